"""The inputs of a matrix: layouts, lengths and biases; its tiles."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, assert_equal, evaluate, gradients, parameters
from support.cases import ENGINES, case, each, embeddings

from itrloss import Similarity


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_vectors_are_read_as_contiguous_ones(engine, small_tiles):
    """How inputs are read depends on the engine, and on the answer."""
    v, w, ids, grads = case(d=12)
    # No duplicate embeddings: another rounding would make another one the hardest.
    x = torch.cat([v, v], 1)[:, ::2]
    twice = w.repeat_interleave(2, 0)
    y = twice.T.contiguous().T[::2]
    assert not x.is_contiguous()
    assert not y.is_contiguous()
    plain_x = x.contiguous()
    plain_y = y.contiguous()
    for name, with_engine in each(2, name=ANSWERS, engine=ENGINES):
        if with_engine == engine:
            answer = ANSWERS[name]
            found = evaluate(answer, x, y, ids, engine, grads)
            wanted = evaluate(answer, plain_x, plain_y, ids, engine, grads)
            assert_equal(found, wanted, name, tolerance=1e-11)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_strided_scores_are_read_as_contiguous_ones(engine, small_tiles):
    v, w, ids, grads = case()
    scores = Similarity(v, w, *ids).scores()
    twice = torch.stack([scores, scores], 2).flatten(1)
    strided = twice[:, ::2]
    p = parameters(9, 14)

    def gradient(answer, scores):
        leaf = scores.detach().requires_grad_()
        sim = Similarity.from_scores(leaf, *ids, engine=engine)
        values = answer(sim.both, p)
        return gradients(values, [leaf], torch.cat(grads))

    for name, answer in ANSWERS.items():
        found = gradient(answer, strided)
        wanted = gradient(answer, scores)
        assert_equal(found, wanted, name, tolerance=1e-12)


def test_auto_visits_tiles_from_a_size_on():
    v, w = embeddings(300, 300, dtype=torch.float32)
    small = Similarity(v[:256], w[:256])
    assert small.engine == "tiled"
    large = Similarity(v, w)
    assert large.engine == "tiled"
    in_double = Similarity(v.double(), w.double())
    assert in_double.engine == "tiled"
    of_scores = Similarity.from_scores(torch.rand(300, 300))
    assert of_scores.engine == "tiled"
    tiled = Similarity(v, w, engine="tiled")
    assert "tiled" in repr(tiled)


# ------------------------------------------------------------------------------------------- biases


def test_one_side_may_have_a_bias():
    v, w, ids, _ = case((4, 6, "disjoint"))
    bias = torch.linspace(-1, 1, 6, dtype=v.dtype)
    biased = Similarity(v, w, *ids, bias=(None, bias))
    plain = Similarity(v, w, *ids)
    torch.testing.assert_close(biased.scores(), plain.scores() + bias)


def test_inner_products_with_biases_are_squared_distances():
    x, y = embeddings(4, 6, dtype=torch.float32)
    squares = (-x.square().sum(1), -y.square().sum(1))
    ids = (torch.arange(4), torch.arange(6))
    root = 2**0.5
    sim = Similarity(root * x, root * y, *ids, normalize=False, bias=squares)
    wanted = torch.cdist(x, y).square()
    torch.testing.assert_close(-sim.scores(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bias", [torch.zeros(4), [torch.zeros(4)], (torch.zeros(3), None), (None, 0.5)]
)
def test_a_wrong_bias_is_refused(bias):
    images = torch.randn(4, 2)
    texts = torch.randn(4, 2)
    with pytest.raises((TypeError, ValueError), match="bias: expected"):
        Similarity(images, texts, bias=bias)
