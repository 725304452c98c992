"""Images and texts that do not exist change nothing: in clusters, running means and figures, and in
deviations of heads with groups.

`test_random_cases` has the losses.
"""

from __future__ import annotations

import pytest
import torch
from support.cases import sample

import itrloss
from itrloss import NO_ID, Similarity, functional
from itrloss.engine.related import Related

N, D = 7, 8
IDS = torch.tensor([0, 1, 2, 3, 4, 0, 5])
PLACES = torch.tensor([1, 2, 3, 5, 6, 7, 10])  # of 11


def spread(x, fill):
    """``x`` at its places among others, which are ``fill``."""
    whole = x.new_full((11, *x.shape[1:]), fill)
    whole[PLACES] = x
    return whole


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


@pytest.mark.parametrize("kind", ["ids", "label sets", "text ids alone", "image or text"])
def test_prototypes_of_coder(kind):
    """Neither the clusters nor the classifier see pairs that do not exist."""
    x = sample(6, N, D, dtype=torch.float64)
    more = [spread(vectors, 0.7) for vectors in x]
    ids = torch.arange(N)
    if kind == "label sets":
        ids = torch.stack([ids, ids + 50], 1)
    missing = spread(ids, NO_ID)
    given = (missing, missing)
    if kind == "text ids alone":
        given = None, torch.where(missing != NO_ID, torch.arange(11), NO_ID)
    if kind == "image or text":  # one of which exists
        numbers = torch.arange(11)
        exists = [(missing != NO_ID) | (numbers % 2 == side) for side in range(2)]
        given = tuple(torch.where(mask, numbers + 90, NO_ID) for mask in exists)
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


def test_figures_of_batches():
    found = []
    for batch in (
        (sample(N, D), sample(N, D, seed=1), IDS, IDS),
        (spread(sample(N, D), 0.7), spread(sample(N, D, seed=1), 0.7), *[spread(IDS, NO_ID)] * 2),
    ):
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
