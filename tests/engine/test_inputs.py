"""The inputs of a matrix: layouts, lengths and biases; its tiles."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, assert_equal, evaluate, gradients, parameters
from support.cases import ENGINES, case, each, embeddings, pairwise, similarity

from itrloss import Similarity
from itrloss.engine import inputs


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_vectors_are_read_as_contiguous_ones(engine, small_tiles):
    """How inputs are read depends on the engine, and on the answer."""
    v, w, ids, grads = case(d=12)
    # No duplicate embeddings: another rounding would make another one the hardest.
    x = torch.cat([v, v], 1)[:, ::2]
    y = w.repeat_interleave(2, 0).T.contiguous().T[::2]
    assert not x.is_contiguous()
    assert not y.is_contiguous()
    for name, with_engine in each(2, name=ANSWERS, engine=ENGINES):
        if with_engine == engine:
            found = evaluate(ANSWERS[name], x, y, ids, engine, grads)
            plain = (x.contiguous(), y.contiguous())
            wanted = evaluate(ANSWERS[name], *plain, ids, engine, grads)
            assert_equal(found, wanted, name, tolerance=1e-11)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_strided_scores_are_read_as_contiguous_ones(engine, small_tiles):
    v, w, ids, grads = case()
    scores = Similarity(v, w, *ids).scores()
    strided = torch.stack([scores, scores], 2).flatten(1)[:, ::2]

    def gradient(answer, x):
        x = x.requires_grad_()
        sim = Similarity.from_scores(x, *ids, engine=engine)
        return gradients(answer(sim.both, parameters(9, 14)), [x], torch.cat(grads))

    for name, answer in ANSWERS.items():
        found = gradient(answer, strided.detach())
        assert_equal(found, gradient(answer, scores.detach()), name, tolerance=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_inner_products_equal_the_reference(engine, small_tiles):
    v, w, ids, grads = case()
    for name, answer in ANSWERS.items():
        found = evaluate(answer, v, w, ids, engine, grads, normalize=False)
        wanted = evaluate(answer, v, w, ids, "reference", grads, normalize=False)
        assert_equal(found, wanted, name, tolerance=1e-8)


@pytest.mark.parametrize(("name", "engine", "d"), each(2, name=ANSWERS, engine=ENGINES, d=[6, 40]))
def test_matrix_in_one_tile_equals_the_reference(name, engine, d):
    for shape in ("primes", "wide"):
        v, w, ids, grads = case(shape, d)
        wanted = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
        assert_equal(evaluate(ANSWERS[name], v, w, ids, engine, grads), wanted, shape)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(1, 1), (24, 8), (12, 3)])
@pytest.mark.parametrize("engine", ["tiled", "kept"])
def test_tile_size_does_not_change_the_answer(engine, tile, monkeypatch):
    v, w, ids, grads = case((4, 9, "random"))
    for name, answer in ANSWERS.items():
        wanted = evaluate(answer, v, w, ids, engine, grads)
        with monkeypatch.context() as patch:
            patch.setitem(inputs.TILE, "cpu", tile)
            assert_equal(evaluate(answer, v, w, ids, engine, grads), wanted, name)


def test_auto_visits_tiles_from_a_size_on():
    v, w = embeddings(300, 300, dtype=torch.float32)
    assert Similarity(v[:256], w[:256]).engine == "dense"
    assert Similarity(v, w).engine == "tiled"
    assert Similarity(v.double(), w.double()).engine == "tiled"
    assert Similarity.from_scores(torch.rand(300, 300)).engine == "tiled"
    assert "tiled" in repr(Similarity(v, w, engine="tiled"))


# ------------------------------------------------------------------------------------------- biases


@pytest.mark.parametrize(
    ("name", "engine", "normalize", "shape"),
    pairwise(
        name=["logsumexp per anchor", "std", "hardest", "likelihood", "hinge sum", "sum between"],
        engine=ENGINES,
        normalize=[True, False],
        shape=["primes", "wide"],
    ),
)
def test_a_bias_is_part_of_answers_and_gets_its_gradient(
    name, engine, normalize, shape, small_tiles, poisoned
):
    v, w, ids, grads = case(shape)
    of_rows = torch.linspace(-0.3, 0.2, len(v), dtype=v.dtype)
    of_cols = torch.linspace(0.4, -0.1, len(w), dtype=v.dtype)

    def outcome(engine):
        x, y, *bias = leaves = [t.clone().requires_grad_() for t in (v, w, of_rows, of_cols)]
        sim = similarity(x, y, ids, engine, normalize=normalize, bias=tuple(bias))
        values = ANSWERS[name](sim.both, parameters(len(v), len(w)))
        return [values.detach(), *gradients(values, leaves, torch.cat(grads))]

    assert_equal(outcome(engine), outcome("reference"))


def test_one_side_may_have_a_bias():
    v, w, ids, _ = case((4, 6, "disjoint"))
    bias = torch.linspace(-1, 1, 6, dtype=v.dtype)
    found = Similarity(v, w, *ids, bias=(None, bias)).scores()
    torch.testing.assert_close(found, Similarity(v, w, *ids).scores() + bias)


def test_inner_products_with_biases_are_squared_distances():
    x, y = embeddings(4, 6, dtype=torch.float32)
    squares = -x.square().sum(1), -y.square().sum(1)
    ids = torch.arange(4), torch.arange(6)
    sim = Similarity(x * 2**0.5, y * 2**0.5, *ids, normalize=False, bias=squares)
    torch.testing.assert_close(-sim.scores(), torch.cdist(x, y).square(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bias", [torch.zeros(4), [torch.zeros(4)], (torch.zeros(3), None), (None, 0.5)]
)
def test_a_wrong_bias_is_refused(bias):
    with pytest.raises((TypeError, ValueError), match="bias: expected"):
        Similarity(torch.randn(4, 2), torch.randn(4, 2), bias=bias)
