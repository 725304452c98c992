"""Images and texts that do not exist change no loss: in a sum, in a count, or in a deviation."""

from __future__ import annotations

import pytest
import torch
from support.cases import sample

import itrloss
from itrloss import NO_ID, Similarity, functional
from itrloss.engine.related import Related

N, M, D = 7, 10, 8
IMAGE_IDS = torch.tensor([0, 1, 2, 3, 4, 0, 5])
TEXT_IDS = torch.tensor([0, 1, 2, 3, 4, 5, 1, 2, 8, 0])
IMAGE_PLACES = torch.tensor([1, 2, 3, 5, 6, 7, 10])  # of 11
TEXT_PLACES = torch.tensor([0, 1, 2, 3, 6, 7, 8, 9, 10, 12])  # of 13
LABELS = {
    "ids": (IMAGE_IDS, TEXT_IDS),
    "label sets": (
        torch.stack([IMAGE_IDS, IMAGE_IDS + 100], 1),
        torch.stack([TEXT_IDS, TEXT_IDS + 200, torch.full((M,), NO_ID)], 1),
    ),
}


def spread(x, places, size, fill):
    """``x`` at its places among ``size`` entries; the others are ``fill``."""
    whole = x.new_full((size, *x.shape[1:]), fill)
    whole[places] = x
    return whole


def padded(images, texts, image_ids, text_ids):
    return (
        spread(images, IMAGE_PLACES, 11, 0.7),
        spread(texts, TEXT_PLACES, 13, 0.7),
        spread(image_ids, IMAGE_PLACES, 11, NO_ID),
        spread(text_ids, TEXT_PLACES, 13, NO_ID),
    )


def outcome(loss, images, texts, *ids):
    """The loss and its gradients by the embeddings."""
    images = images.clone().requires_grad_()
    texts = texts.clone().requires_grad_()
    value = loss(images, texts, *ids)
    value.backward()
    return value.detach(), images.grad, texts.grad


def assert_same(loss, images, texts, *ids):
    wanted, of_images, of_texts = outcome(loss, images, texts, *ids)
    found, more_images, more_texts = outcome(loss, *padded(images, texts, *ids))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(more_images[IMAGE_PLACES], of_images)
    torch.testing.assert_close(more_texts[TEXT_PLACES], of_texts)
    missing = torch.ones(11, dtype=torch.bool).index_fill(0, IMAGE_PLACES, False)
    assert not more_images[missing].any()


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("labels", LABELS)
def test_deviations_of_heads(labels, shared, engine):
    loss = itrloss.VarianceAwareLoss(shared_sigma=shared, engine=engine)
    heads = sample(N, 3, D, dtype=torch.float64)
    texts = sample(M, D, seed=1, dtype=torch.float64)
    assert_same(loss, heads, texts, *LABELS[labels])


def test_deviations_of_heads_with_groups_are_of_the_candidates_that_meet():
    """A pair of two groups is no candidate: one group in a batch is as if it were alone."""
    heads = sample(3, 8, D, dtype=torch.float64)
    texts = sample(8, D, seed=1, dtype=torch.float64)
    groups = torch.arange(8) // 4
    related = Related((groups, groups))
    ids = torch.arange(8)
    together = [Similarity(head, texts, ids, ids, related=related) for head in heads]
    total = functional.variance_aware_loss(together, reduction="sum")
    for part in (slice(4), slice(4, 8)):
        alone = [Similarity(head[part], texts[part]) for head in heads]
        total = total - functional.variance_aware_loss(alone, reduction="sum")
    assert abs(float(total)) < 1e-9


@pytest.mark.parametrize("kind", ["ids", "label sets", "text ids alone"])
def test_prototypes_of_coder(kind):
    """Neither the clusters nor the classifier see pairs that do not exist."""
    x = sample(6, N, D, dtype=torch.float64)
    more = [spread(vectors, IMAGE_PLACES, 11, 0.7) for vectors in x]
    ids = torch.arange(N)
    if kind == "label sets":
        ids = torch.stack([ids, ids + 50], 1)
    missing = spread(ids, IMAGE_PLACES, 11, NO_ID)
    given = (missing, missing)
    if kind == "text ids alone":
        given = None, torch.arange(11).where(missing != NO_ID, NO_ID)
    terms = []
    for vectors, own in ((x, (ids, ids)), (more, given)):
        torch.manual_seed(0)
        objective = itrloss.CODERObjective(D, 5, memory_weight=0.0).double()
        objective.prototypes.double()
        memory = itrloss.CoupledMemory(9, D, dtype=torch.float64)
        _, found = objective(*vectors[:4], memory, *vectors[4:], *own)
        terms.append((found.prototype, objective.prototypes.centroids.clone()))
    torch.testing.assert_close(terms[0], terms[1])


def test_a_batch_of_nobody_has_no_prototypes():
    objective = itrloss.CODERObjective(D, 5)
    memory = itrloss.CoupledMemory(9, D)
    memory.enqueue(*sample(2, 9, D, seed=2), torch.arange(9))
    nobody = torch.full((4,), NO_ID)
    total, terms = objective(*sample(4, 4, D), memory, *sample(2, 4, D), nobody, nobody)
    assert terms.prototype == 0 and total.isfinite()
    assert not len(objective.prototypes)
