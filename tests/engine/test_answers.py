"""All answers of anchors, and totals of them, on all engines, and the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from support.answers import ANSWERS, TOTALS, assert_equal, evaluate, evaluate_total, parameters
from support.cases import (
    ENGINES,
    SHAPES,
    VIEWS,
    case,
    each,
    embeddings,
    finite,
    make_ids,
    pairwise,
    similarity,
)

from itrloss import Anchors, Similarity
from itrloss.engine.terms import hinge, softplus


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_gradients_equal_the_reference(name, shape, small_tiles, poisoned):
    v, w, ids, grads = case(shape)
    wanted = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
    for engine in ENGINES:
        found = evaluate(ANSWERS[name], v, w, ids, engine, grads)
        assert_equal(found, wanted, engine)


@pytest.mark.parametrize(("name", "shape", "view"), pairwise(name=TOTALS, shape=SHAPES, view=VIEWS))
def test_totals_and_gradients_equal_the_reference(name, shape, view, small_tiles, poisoned):
    v, w, ids, _ = case(shape)
    wanted = evaluate_total(TOTALS[name], v, w, ids, "reference", VIEWS[view])
    for engine in ENGINES:
        found = evaluate_total(TOTALS[name], v, w, ids, engine, VIEWS[view])
        assert_equal(found, wanted, engine)


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


@pytest.mark.parametrize(("name", "engine"), each(2, name=ANSWERS, engine=ENGINES))
def test_both_sides_are_answered_as_each_alone(name, engine, small_tiles):
    answer = ANSWERS[name]
    v, w, ids, _ = case("wide")
    sim = similarity(v, w, ids, engine)
    p = parameters(len(v), len(w))
    of_rows, of_cols = p.split(sim.shape)
    rows = answer(sim, of_rows)
    cols = answer(sim.T, of_cols)
    rows_first = answer(sim.both, p)
    assert_equal(rows_first, torch.cat([rows, cols]), tolerance=1e-12)
    together = answer(Anchors.together(sim, sim.T), p)
    assert_equal(together, rows_first, tolerance=1e-12)
    cols_first = answer(sim.T.both, torch.cat([of_cols, of_rows]))
    assert_equal(cols_first, torch.cat([cols, rows]), tolerance=1e-12)
    first, second = sim.both.split(rows_first)
    assert len(first) == len(rows)
    assert len(second) == len(cols)


@pytest.mark.parametrize("name", ["logsumexp", "std", "hardest", "log1p", "hinge sum"])
@pytest.mark.parametrize("engine", ENGINES)
def test_columns_asked_first_have_the_same_gradients(engine, name):
    v, w, ids, _ = case("wide")
    leaves = [v.requires_grad_(), w.requires_grad_()]
    answer = ANSWERS[name]
    sim = similarity(v, w, ids, engine)
    rows_first = answer(sim.both, 2.0)
    turned = similarity(v, w, ids, engine).T
    of_cols, of_rows = answer(turned.both, 2.0).split([17, 5])
    cols_first = torch.cat([of_rows, of_cols])
    torch.testing.assert_close(cols_first, rows_first)
    grad = torch.linspace(1, 2, 22, dtype=torch.float64)
    found = torch.autograd.grad(finite(cols_first) @ grad, leaves)
    wanted = torch.autograd.grad(finite(rows_first) @ grad, leaves)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_transposed_view_answers_for_the_columns(engine, small_tiles):
    v, w, ids, _ = case()
    row_ids, col_ids = ids
    view = similarity(v, w, (row_ids, col_ids), engine).T
    swapped = similarity(w, v, (col_ids, row_ids), engine)
    assert view.shape == (14, 9)
    assert swapped.shape == (14, 9)
    torch.testing.assert_close(view.scores(), swapped.scores())
    p = parameters(14, 9)
    for name, answer in ANSWERS.items():
        found = answer(view.both, p)
        wanted = answer(swapped.both, p)
        assert_equal(found, wanted, name)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_detached_similarity_has_the_same_answers_without_gradient(engine, biased, small_tiles):
    v, w, ids, _ = case()
    v.requires_grad_()
    w.requires_grad_()
    bias = None
    if biased:
        of_rows = torch.linspace(-0.1, 0.2, 9).to(v).requires_grad_()
        of_cols = torch.linspace(-0.1, 0.2, 14).to(v).requires_grad_()
        bias = (of_rows, of_cols)
    sim = similarity(v, w, ids, engine, bias=bias)
    p = parameters(9, 14)
    for name, answer in ANSWERS.items():
        # With a gradient, a hardest negative is the product of its pair; without one, it is an
        # entry of the tile.
        wanted = answer(sim.both, p).detach()
        for detached in (sim.detach().both, sim.both.detach()):
            found = answer(detached, p)
            assert not found.requires_grad
            assert_equal(found, wanted, name, tolerance=1e-12)


@pytest.mark.parametrize("scale", [2.0, 200.0])
@pytest.mark.parametrize("engine", ENGINES)
def test_logsumexp_of_no_negatives_is_minus_infinity(engine, scale):
    v, w = embeddings(3, 2)
    ids = (torch.tensor([1, 1, 2]), torch.tensor([1, 1]))
    first, second, third = similarity(v, w, ids, engine).logsumexp(scale)
    assert first == -math.inf
    assert second == -math.inf
    assert third.isfinite()


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


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_parameters_of_a_wrong_size_are_refused(engine, call, error, message):
    sim = Similarity(*embeddings(8, 5), *make_ids("random", 8, 5), engine=engine)
    with pytest.raises(error, match=message):
        call(sim)
