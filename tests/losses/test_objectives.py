"""The combined objectives of CODER and DVSE."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support.cases import embeddings, sample

from itrloss import CODERObjective, CoupledMemory, DVSEObjective

IDS = torch.arange(6)


def coder_input():
    pairs, keys, concepts = (embeddings(6, 6, 5, seed) for seed in range(3))
    memory = CoupledMemory(9, 5, dtype=torch.float64)
    memory.enqueue(*embeddings(9, 9, 5, 3), torch.arange(9) % 7)
    return [*pairs, *keys, memory, *concepts]


def dvse_input():
    heads = sample(6, 3, 5)
    return [heads, sample(6, 5, seed=1), heads]


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_coder_weights_by_default_are_those_of_equation_8():
    objective = CODERObjective(5, 4)
    assert (objective.batch_weight, objective.memory_weight) == (3.0, 1.0)
    assert (objective.concept_weight, objective.prototype_weight) == (2.0, 1.0)


def test_prototypes_move_in_training_and_stand_still_in_evaluation():
    objective, given = CODERObjective(5, 8).eval(), coder_input()
    # there are no prototypes yet
    assert objective(*given, IDS, IDS)[1].prototype == 0
    assert len(objective.prototypes) == 0
    objective.train()
    objective(*given, IDS, IDS)
    assert len(objective.prototypes) == 6
    before = copy.deepcopy(objective.state_dict())
    objective.eval()
    assert objective(*given, IDS, IDS)[1].prototype > 0
    assert all(
        torch.equal(x, before[name])
        for name, x in objective.state_dict().items()
        if torch.is_tensor(x)
    )


@pytest.mark.parametrize("wrong", ["concepts", "type", "ids"])
def test_prototypes_stand_still_where_the_input_is_refused(wrong):
    objective = CODERObjective(5, 8, concept_weight=0, check_finite=True)
    given = [*coder_input(), torch.arange(6), torch.arange(6)]
    if wrong == "concepts":
        given[5][0] = torch.nan
    elif wrong == "type":
        given[6] = given[6].float()
    else:
        given[8] = given[8][:5]
    with pytest.raises((TypeError, ValueError), match=r"image_concepts|text_ids"):
        objective(*given)
    assert len(objective.prototypes) == 0


def test_clusters_are_those_of_sums_of_unit_vectors():
    objective, given = CODERObjective(5, 20), coder_input()
    given[0] = given[0] * torch.tensor([[100.0], [0.01], [1], [30], [0.5], [7]])
    objective(*given, IDS, IDS)
    sums = unit(given[0].numpy()) + unit(given[1].numpy())
    order = objective.prototypes.predict(torch.from_numpy(sums))
    np.testing.assert_allclose(
        objective.prototypes.centroids[order].numpy(), unit(sums), rtol=1e-5, atol=1e-6
    )


def test_options_reach_what_they_are_for():
    options = {"engine": "tiled", "check_finite": True, "reduction": "sum", "telemetry": True}
    objective = CODERObjective(5, 4, max_count=3.0, diversity=None, **options)
    assert objective.prototypes.max_count == 3.0
    for loss in (objective.batch, objective.memory, objective.concept):
        assert (
            loss.diversity is None
            and loss.engine == "tiled"
            and loss.check_finite
            and loss._observed
        )
    for loss in (
        objective.classifier,
        DVSEObjective(engine="tiled", check_finite=True).variance_aware,
    ):
        assert loss.engine == "tiled" and loss.check_finite
    assert objective.classifier.reduction == "sum"


def test_a_reseeded_cluster_loses_what_the_classifier_learnt():
    objective, given = CODERObjective(5, 6), coder_input()
    objective(*given, IDS, IDS)
    torch.testing.assert_close(
        objective.classifier.weight.detach(), objective.prototypes.centroids / 3**0.5
    )
    with torch.no_grad():
        objective.classifier.weight.fill_(9.0)
    objective(*given, IDS, IDS)  # the same points, so that nothing is reseeded
    assert (objective.classifier.weight == 9.0).all()


def test_a_term_of_weight_zero_is_not_computed():
    given = coder_input()
    given[4] = None  # without a memory
    objective = CODERObjective(5, 4, memory_weight=0, prototype_weight=0)
    total, terms = objective(*given)
    assert (
        total.isfinite()
        and terms.memory == 0
        and terms.prototype == 0
        and len(objective.prototypes) == 0
    )


def test_gradients_reach_all_that_is_trained_and_nothing_else():
    given = coder_input()
    for at in (0, 1, 2, 3, 5, 6):
        given[at] = given[at].requires_grad_()
    objective = CODERObjective(5, 4)
    objective(*given, IDS, IDS)[0].backward()
    assert all(given[at].grad.abs().sum() > 0 for at in (0, 1, 5, 6))
    assert given[2].grad is None and given[3].grad is None
    assert objective.classifier.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("objective", "part", "reduction", "given"),
    [
        (DVSEObjective(), "variance_aware", "sum", dvse_input()),
        (DVSEObjective(), "orthogonal", "none", dvse_input()),
        (CODERObjective(5, 4), "concept", "none", coder_input()),
    ],
)
def test_a_part_of_a_total_may_not_be_given_another_reduction(objective, part, reduction, given):
    getattr(objective, part).reduction = reduction
    with pytest.raises(ValueError, match="reduction"):
        objective(*given)
