"""The combined objectives of CODER and DVSE."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support import oracle, oracle_more
from support.cases import embeddings, sample

from itrloss import CODERObjective, CODERTerms, CoupledMemory, DVSEObjective, DVSETerms, DynamicGate


def coder_input(b=6, d=5, seed=0, entries=9):
    v, w = embeddings(b, b, d, seed)
    v_keys, w_keys = embeddings(b, b, d, seed + 1)
    v_concepts, w_concepts = embeddings(b, b, d, seed + 2)
    memory = CoupledMemory(entries, d, dtype=torch.float64)
    memory.enqueue(*embeddings(entries, entries, d, seed + 3), torch.arange(entries) % 7)
    return [v, w, v_keys, w_keys, memory, v_concepts, w_concepts]


def dvse_input():
    heads = sample(6, 3, 5)
    return [heads, sample(6, 5, seed=1), heads]


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_coder_objective_is_the_weighted_sum_of_the_oracles_terms():
    given, ids = coder_input(), torch.tensor([0, 1, 2, 0, 4, 9])
    weights = {
        "batch_weight": 2.5,
        "memory_weight": 0.5,
        "concept_weight": 1.5,
        "prototype_weight": 0.7,
    }
    objective = CODERObjective(5, 4, temperature=0.2, **weights)
    objective.classifier.double()
    total, terms = objective(*given, ids, ids)
    v, w, v_keys, w_keys, memory, v_concepts, w_concepts = [
        x if isinstance(x, CoupledMemory) else x.numpy() for x in given
    ]
    known = ids.numpy()
    clusters = objective.prototypes.predict(torch.from_numpy(unit(v) + unit(w)))
    banks = memory.images.numpy(), memory.texts.numpy(), known, known, memory.ids.numpy()
    wanted = CODERTerms(
        oracle.dcl(oracle.cosine(v, w), known, known, temperature=0.2),
        oracle_more.memory_dcl(v, w, v_keys, w_keys, *banks, temperature=0.2),
        oracle.dcl(oracle.cosine(v_concepts, w_concepts), known, known, temperature=0.2),
        oracle_more.prototype_classification(
            v_concepts,
            w_concepts,
            objective.classifier.weight.detach().numpy(),
            None,
            clusters.numpy(),
        ),
    )
    np.testing.assert_allclose([float(x) for x in terms], wanted, rtol=1e-6)
    np.testing.assert_allclose(
        float(total.detach()), np.dot(list(weights.values()), wanted), rtol=1e-6
    )
    assert not any(x.requires_grad for x in terms)


def test_coder_weights_by_default_are_those_of_equation_8():
    objective = CODERObjective(5, 4)
    assert (objective.batch_weight, objective.memory_weight) == (3.0, 1.0)
    assert (objective.concept_weight, objective.prototype_weight) == (2.0, 1.0)


def test_prototypes_move_in_training_and_stand_still_in_evaluation():
    objective, given = CODERObjective(5, 8).eval(), coder_input()
    # there are no prototypes yet
    assert objective(*given, torch.arange(6), torch.arange(6))[1].prototype == 0
    assert len(objective.prototypes) == 0
    objective.train()
    objective(*given, torch.arange(6), torch.arange(6))
    assert len(objective.prototypes) == 6
    before = copy.deepcopy(objective.state_dict())
    objective.eval()
    assert objective(*given, torch.arange(6), torch.arange(6))[1].prototype > 0
    assert all(
        torch.equal(x, before[name])
        for name, x in objective.state_dict().items()
        if torch.is_tensor(x)
    )


def test_clusters_are_those_of_sums_of_unit_vectors():
    objective, given = CODERObjective(5, 20), coder_input()
    given[0] = given[0] * torch.tensor([[100.0], [0.01], [1], [30], [0.5], [7]])
    objective(*given, torch.arange(6), torch.arange(6))
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
    ids = torch.arange(6)
    objective(*given, ids, ids)
    torch.testing.assert_close(
        objective.classifier.weight.detach(), objective.prototypes.centroids / 3**0.5
    )
    with torch.no_grad():
        objective.classifier.weight.fill_(9.0)
    objective(*given, ids, ids)  # the same points, so that nothing is reseeded
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
    objective(*given, torch.arange(6), torch.arange(6))[0].backward()
    assert all(given[at].grad.abs().sum() > 0 for at in (0, 1, 5, 6))
    assert given[2].grad is None and given[3].grad is None
    assert objective.classifier.weight.grad.abs().sum() > 0


def test_dvse_objective_is_the_weighted_sum_of_the_oracles_terms():
    generator = torch.Generator().manual_seed(0)
    sets, residuals = (
        torch.randn(4, 3, 5, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2)
    )
    texts, ids = (
        torch.randn(8, 5, generator=generator, dtype=torch.float64),
        torch.arange(4).repeat_interleave(2),
    )
    gate = torch.tensor([[1.0, 1, 0]]).repeat(4, 1)
    objective = DVSEObjective(0.3, slack=0.05, margin=0.4)
    total, terms = objective(sets, texts, residuals, gate, torch.arange(4), ids)
    wanted = DVSETerms(
        oracle_more.variance_aware(sets.numpy(), texts.numpy(), np.arange(4), ids.numpy(), 0.4),
        oracle_more.dynamic_orthogonal(residuals.numpy(), gate.numpy(), 0.05),
    )
    np.testing.assert_allclose([float(x) for x in terms], wanted, rtol=1e-9)
    np.testing.assert_allclose(float(total), 0.3 * wanted[0] + 0.7 * wanted[1], rtol=1e-9)
    assert DVSEObjective().balance == 0.6


def test_dvse_with_its_gate_trains_the_heads_apart():
    torch.manual_seed(0)
    residuals = (torch.randn(16, 1, 8) + 0.1 * torch.randn(16, 6, 8)).requires_grad_()
    texts, regions, gate = torch.randn(16, 8), torch.randn(16, 4, 12), DynamicGate(12, 6)
    objective, optimiser = DVSEObjective(), torch.optim.Adam([residuals], 0.05)
    values = []
    for _ in range(40):
        optimiser.zero_grad()
        total, terms = objective(residuals, texts, residuals, gate(regions))
        total.backward()
        optimiser.step()
        values.append((float(total.detach()), float(terms.orthogonal)))
    assert values[-1][0] < values[0][0] and values[-1][1] < values[0][1]


def test_input_errors_of_the_objectives():
    given = coder_input()
    for call, error, words in (
        (
            lambda: CODERObjective(5, 4)(given[0], given[1][:4], *given[2:]),
            ValueError,
            r"texts: expected shape \(6, 5\)",
        ),
        (lambda: CODERObjective(7, 4)(*given), ValueError, r"images: expected shape \(6, 7\)"),
        (
            lambda: CODERObjective(5, 4)(*given[:6], given[6][:4]),
            ValueError,
            "text_concepts: expected shape",
        ),
        (lambda: CODERObjective(5, 4, reduction="none"), ValueError, "reduction"),
        (lambda: CODERObjective(5, 4, batch_weight="x"), TypeError, "batch_weight"),
        (lambda: CODERObjective(5, 4, temperature=0), ValueError, "temperature"),
        (lambda: DVSEObjective(1.5), ValueError, "balance"),
        (lambda: DVSEObjective(reduction="sum"), ValueError, "reduction"),
    ):
        with pytest.raises(error, match=words):
            call()


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
