"""Images and texts that do not exist change no loss: in a sum, in a count, or in a deviation."""

from __future__ import annotations

import pytest
import torch
from support.cases import sample

import itrloss
from itrloss import NO_ID, Similarity, functional
from itrloss.engine.related import Related
from itrloss.metrics import Judgements, retrieval_metrics

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


LOGS = sample(N, D, seed=2, dtype=torch.float64), sample(M, D, seed=3, dtype=torch.float64)
RESIDUALS = sample(N, 3, 5, seed=2, dtype=torch.float64)
GATE = torch.arange(3 * N).view(N, 3) % 2
HEADS_OF_ONE = torch.tensor([[1.0], [2.0], [-1.0]]) * torch.linspace(1, 2, D)


def of_distributions(images, texts, *ids):
    logs = LOGS
    if len(images) > N:
        logs = spread(LOGS[0], IMAGE_PLACES, 11, 0.7), spread(LOGS[1], TEXT_PLACES, 13, 0.7)
    return itrloss.PCMEPlusPlusLoss(vib_weight=0.3).double()(images, texts, *logs, *ids)


def of_residuals(images, texts, *ids):
    """The objective of DVSE, with heads that share the images' embeddings, and a gate."""
    own = RESIDUALS, GATE
    if len(images) > N:
        own = spread(RESIDUALS, IMAGE_PLACES, 11, 0.7), spread(GATE, IMAGE_PLACES, 11, 1)
    return itrloss.DVSEObjective()(images[:, None] * HEADS_OF_ONE, texts, *own, *ids)[0]


@pytest.mark.parametrize("loss", [of_distributions, of_residuals])
def test_what_goes_with_images(loss):
    images, texts = sample(N, D, dtype=torch.float64), sample(M, D, seed=1, dtype=torch.float64)
    assert_same(loss, images, texts, IMAGE_IDS, TEXT_IDS)


@pytest.mark.parametrize("kind", ["ids", "label sets", "text ids alone", "image or text"])
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
    if kind == "image or text":  # one of which exists
        numbers = torch.arange(11)
        exists = [(missing != NO_ID) | (numbers % 2 == side) for side in range(2)]
        given = tuple((numbers + 90).where(mask, NO_ID) for mask in exists)
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


def test_a_batch_of_nobody_has_no_orthogonal_term():
    nobody = torch.full((N,), NO_ID)
    heads, residuals = sample(N, 3, D), sample(N, 3, 5)
    _, terms = itrloss.DVSEObjective()(heads, sample(M, D), residuals, None, nobody, TEXT_IDS)
    assert terms.orthogonal == 0


def test_figures_by_judgements_and_of_batches():
    given = sample(N, D), sample(M, D, seed=1), IMAGE_IDS, TEXT_IDS
    more = padded(*given)
    judged = torch.tensor([0, 0, 1, 2, 3, 4, 5]), torch.tensor([0, 3, 1, 2, 5, 6, 7])
    grades = torch.tensor([1.0, 0, 2, 1, 0, 3, 1])
    wanted = retrieval_metrics(Similarity(*given), relevant=Judgements(*judged, grades))
    places = IMAGE_PLACES[judged[0]], TEXT_PLACES[judged[1]]
    relevant = Judgements(*places, grades)
    assert retrieval_metrics(Similarity(*more), relevant=relevant) == pytest.approx(wanted)
    found = []
    for batch in (given, more):
        metric = itrloss.metrics.RetrievalMetrics()
        metric.update(*batch)
        found.append(metric.compute())
    assert found[0] == found[1]


def test_images_without_regions_move_no_running_mean():
    gates = [itrloss.DynamicGate(5, 3), itrloss.DynamicGate(5, 3)]
    gates[1].load_state_dict(gates[0].state_dict())
    regions = sample(4, 6, 5)
    mask = torch.cat([torch.ones(4, 6), torch.zeros(2, 6)])
    wanted = gates[0](regions)
    found = gates[1](torch.cat([regions, sample(2, 6, 5, seed=1)]), mask)
    assert torch.equal(found[:4], wanted) and not found[4:].any()
    for name, x in gates[0].state_dict().items():
        torch.testing.assert_close(gates[1].state_dict()[name], x)
