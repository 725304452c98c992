"""All answers of anchors, and totals of them, on all engines, and the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import embeddings, make_ids, similarity

from itrloss import Similarity
from itrloss.engine.terms import hinge, softplus


def test_weights_of_a_total_get_no_gradient():
    v, w = embeddings(4, 4)
    v.requires_grad_()
    weights = torch.rand(4, dtype=v.dtype, requires_grad=True)
    total = Similarity(v, w).weighted_sum(softplus, weights=weights)
    total.backward()
    assert weights.grad is None
    assert v.grad is not None


def test_wrong_arguments_of_a_total_are_refused():
    sim = Similarity(*embeddings(4, 4))
    with pytest.raises(ValueError, match=r"weights: expected a number or shape \(4,\), got \(3,\)"):
        sim.weighted_sum(softplus, weights=torch.ones(3))
    with pytest.raises(ValueError, match="over"):
        sim.weighted_sum(softplus, over="some")


# with and without subtraction of the maximum
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.2, 0.01])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_entropy_of_an_only_candidate_is_zero(engine, temperature):
    v, w = embeddings(50, 1, 3)
    ids = (torch.arange(50), torch.tensor([99]))
    entropy = similarity(v, w, ids, engine).entropy(temperature)
    assert (entropy <= 1e-5).all()
    assert (entropy >= 0).all()


def test_detached_scores_may_be_of_any_size():
    scores = torch.full((3, 3), 200.0)
    sim = Similarity.from_scores(scores)
    found = sim.detach().logsumexp(1.0)
    wanted = torch.full((3,), 200 + math.log(2))  # of two negatives
    torch.testing.assert_close(found, wanted)


# Calls with a parameter of a wrong size or type, of 8 rows and 5 columns.
WRONG = [
    (lambda sim: sim.both.logsumexp(torch.ones(8)), ValueError, r"scale.*\(13,\).*\(8,\)"),
    (lambda sim: sim.T.logsumexp(torch.ones(8)), ValueError, r"scale.*\(5,\)"),
    (lambda sim: sim.logsumexp("3"), TypeError, "scale.*'3'"),
    (lambda sim: sim.sum_of_positives(hinge, torch.ones(9)), ValueError, r"params.*\(8,\)"),
    (lambda sim: sim.both.sum_of_positives(hinge, torch.ones(8, 2)), ValueError, r"params.*13"),
    (lambda sim: sim.topk(2, torch.ones(5, 1)), ValueError, "bias.*5"),
    (lambda sim: sim.ranks(torch.ones(6)), ValueError, "bias.*5"),
    (lambda sim: sim.ranked(1, torch.ones(8)), ValueError, "bias.*5"),
    (lambda sim: sim.T.ranked(1, torch.ones(5)), ValueError, "bias.*8"),
    (lambda sim: sim.ranks(0.5), TypeError, "bias.*float"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_parameters_of_a_wrong_size_are_refused(call, error, message):
    sim = Similarity(*embeddings(8, 5), *make_ids("random", 8, 5))
    with pytest.raises(error, match=message):
        call(sim)
