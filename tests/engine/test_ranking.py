"""The best candidates, the hardest negative and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import ENGINES, embeddings, make_ids, sample, similarity
from support.reference import Reference

from itrloss import Similarity
from itrloss.engine import inputs

# ------------------------------------------------------------------------------- hardest negatives


LONG_SHAPES = [(3, 128), (128, 3), (130, 257), (300, 129), (64, 1029)]


@given(st.sampled_from(LONG_SHAPES), st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_hardest_negative_of_long_rows_and_columns_is_found(shape, seed):
    """Long axes are searched in runs of 64; the last run is ragged. Some scores tie."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(shape, generator=generator).mul(10_000).round()
    ids = make_ids("random", *shape, seed)
    sim = Similarity.from_scores(scores, *ids, engine="tiled")
    reference = Reference.from_scores(scores, ids)
    found = sim.both.hardest_negatives()
    wanted = reference.both.hardest_negatives()
    assert torch.equal(found.values, wanted.values)
    exists = wanted.values.isfinite()
    assert torch.equal(found.indices >= 0, exists)
    # The indices name scores of these values.
    of_rows, of_cols = found.indices.split(shape)
    best_of_rows, best_of_cols = wanted.values.split(shape)
    assert_named(scores, of_rows, best_of_rows)
    assert_named(scores.T, of_cols, best_of_cols)


def assert_named(scores, indices, values):
    """Check that each row has its value at its index, where there is one."""
    exists = indices >= 0
    named = scores.gather(1, indices.clamp_min(0)[:, None]).squeeze(1)
    assert torch.equal(named[exists], values[exists])


def test_of_equal_negatives_in_several_tiles_the_first_is_the_hardest(small_tiles):
    scores = torch.ones(6, 14)
    ids = make_ids("disjoint", 6, 14)
    sim = Similarity.from_scores(scores, *ids, engine="tiled")
    of_rows = sim.hardest_negatives().indices
    of_cols = sim.T.hardest_negatives().indices
    assert of_rows.tolist() == [0] * 6
    assert of_cols.tolist() == [0] * 14


# --------------------------------------------------------------------------------- best candidates

TILES = [(2**20, 2048), (90 * 70, 70), (90 * 150, 150)]


def large_view(side):
    """The rows or the columns of a matrix that takes several tiles of most sizes."""
    v, w = embeddings(230, 310)
    ids = (torch.arange(230), torch.arange(310))
    sim = similarity(v, w, ids, "tiled")
    return sim.T if side else sim


@pytest.mark.parametrize("tile", TILES[:2])
@pytest.mark.parametrize("k", [1, 3, 7, 40])
@pytest.mark.parametrize("side", [0, 1])
def test_best_candidates_are_those_of_sorted_scores(side, tile, k, monkeypatch):
    """Algorithms differ for few or many candidates compared with k, and for several tiles."""
    monkeypatch.setitem(inputs.TILE, "cpu", tile)
    view = large_view(side)
    bias = sample(view.shape[1], dtype=torch.float64)
    bias[::3] = -math.inf  # candidates that must not be found
    biased = view.scores() + bias
    wanted = biased.topk(k).values
    ranks, top, _ = view.ranked(k, bias)
    torch.testing.assert_close(top.values, wanted)
    named = biased.gather(1, top.indices)
    torch.testing.assert_close(named, wanted)
    for row in top.indices.tolist():
        assert len({*row}) == k
    assert torch.equal(ranks, view.ranks(bias))
    top_alone = view.topk(k, bias)
    assert torch.equal(top_alone.indices, top.indices)


@pytest.mark.parametrize("k", [4, 7, 40])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("side", "kept"), [(0, [5, 6, 309]), (1, [3, 100, 225])])
def test_fewer_candidates_than_are_asked_for_are_filled_up(side, kept, tile, k, monkeypatch):
    """A bias of -inf leaves fewer than k in one or several tiles; the rest are arbitrary others
    without repetition.
    """
    monkeypatch.setitem(inputs.TILE, "cpu", tile)
    view = large_view(side)
    candidates = view.shape[1]
    bias = torch.full((candidates,), -math.inf)
    bias[kept] = 0.0
    _, top, _ = view.ranked(k, bias)
    assert top.values[:, :3].isfinite().all()
    assert (top.values[:, 3:] == -math.inf).all()
    first_three = top.indices[:, :3].sort(1).values
    assert (first_three == torch.tensor(kept)).all()
    for row in top.indices.tolist():
        existing = {*row} & {*range(candidates)}
        assert len(existing) == k


@pytest.mark.parametrize("one", [False, True], ids=["one limit each", "one limit"])
@pytest.mark.parametrize("engine", ENGINES)
def test_best_candidates_below_a_limit(engine, one, small_tiles):
    v, w = embeddings(300, 9)  # blocks of rows
    sim = similarity(v, w, make_ids("disjoint", 300, 9), engine)
    if one:
        limit = 0.2
        limits = torch.full((300, 1), 0.2)
    else:
        limit = torch.linspace(-0.5, 0.4, 300).double()
        limits = limit[:, None]
    scores = sim.scores()
    allowed = scores.masked_fill(scores >= limits, -math.inf)
    wanted = allowed.topk(4)
    found = sim.topk(4, below=limit)
    torch.testing.assert_close(found.values, wanted.values)
    missing = wanted.values == -math.inf
    assert torch.equal(found.indices, wanted.indices.masked_fill(missing, -1))
