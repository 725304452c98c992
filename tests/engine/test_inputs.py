"""The inputs of a matrix: layouts, lengths and biases; its tiles."""

from __future__ import annotations

import torch
from support.cases import case, embeddings

from itrloss import Similarity


def test_auto_visits_tiles_from_a_size_on():
    v, w = embeddings(300, 300, dtype=torch.float32)
    every = (
        Similarity(v[:256], w[:256]),
        Similarity(v, w),
        Similarity(v.double(), w.double()),
        Similarity.from_scores(torch.rand(300, 300)),
    )
    assert all(sim.engine == "tiled" for sim in every)
    assert "tiled" in repr(Similarity(v, w, engine="tiled"))


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
