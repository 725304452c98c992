"""The best candidates, the hardest negative and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import ENGINES, SHAPES, case, embeddings, make_ids, sample, similarity
from support.reference import Reference

from itrloss import Similarity
from itrloss.engine import inputs, ranking

# ------------------------------------------------------------------------------- hardest negatives


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_hardest_negative_is_found_with_its_index(engine, shape, small_tiles):
    v, w, ids, _ = case(shape)
    found = similarity(v, w, ids, engine).both.hardest_negatives().indices
    wanted = similarity(v, w, ids, "reference").both.hardest_negatives().indices
    assert torch.equal(found, wanted)


@given(
    st.sampled_from([(3, 128), (128, 3), (130, 257), (300, 129), (64, 1029)]), st.integers(0, 10**6)
)
@settings(deadline=None, max_examples=20)
def test_hardest_negative_of_long_rows_and_columns_is_found(shape, seed):
    """Long axes are searched in runs of 64; the last run is ragged. Some scores tie."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(shape, generator=generator).mul(10_000).round()
    ids = make_ids("random", *shape, seed)
    found = Similarity.from_scores(scores, *ids, engine="tiled").both.hardest_negatives()
    wanted = Reference.from_scores(scores, ids).both.hardest_negatives()
    assert torch.equal(found.values, wanted.values)
    exists = wanted.values.isfinite()
    assert torch.equal(found.indices >= 0, exists)
    for own, indices, best in zip(
        (scores, scores.T), found.indices.split(shape), wanted.values.split(shape), strict=True
    ):
        named = own.gather(1, indices.clamp_min(0)[:, None]).squeeze(1)
        assert torch.equal(named[indices >= 0], best[indices >= 0])


def test_of_equal_negatives_in_several_tiles_the_first_is_the_hardest(small_tiles):
    sim = Similarity.from_scores(torch.ones(6, 14), *make_ids("disjoint", 6, 14), engine="tiled")
    assert sim.hardest_negatives().indices.tolist() == [0] * 6
    assert sim.T.hardest_negatives().indices.tolist() == [0] * 14


# --------------------------------------------------------------------------------- best candidates

TILES = [(2**20, 2048), (90 * 70, 70), (90 * 150, 150)]


@pytest.mark.parametrize("tile", TILES[:2])
@pytest.mark.parametrize("k", [1, 3, 7, 40])
@pytest.mark.parametrize("side", [0, 1])
def test_best_candidates_are_those_of_sorted_scores(side, tile, k, monkeypatch):
    """Algorithms differ for few or many candidates compared with k, and for several tiles."""
    monkeypatch.setitem(inputs.TILE, "cpu", tile)
    ids = torch.arange(230), torch.arange(310)
    sim = similarity(*embeddings(230, 310), ids, "tiled")
    view = sim.T if side else sim
    bias = sample(view.shape[1], dtype=torch.float64)
    bias[::3] = -math.inf  # candidates that must not be found
    biased = view.scores() + bias
    wanted = biased.topk(k).values
    ranks, top, _ = view.ranked(k, bias)
    torch.testing.assert_close(top.values, wanted)
    torch.testing.assert_close(biased.gather(1, top.indices), wanted)
    assert all(len({*row}) == k for row in top.indices.tolist())
    assert torch.equal(ranks, view.ranks(bias))
    assert torch.equal(view.topk(k, bias).indices, top.indices)


@pytest.mark.parametrize("k", [4, 7, 40])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("side", "kept"), [(0, [5, 6, 309]), (1, [3, 100, 225])])
def test_fewer_candidates_than_are_asked_for_are_filled_up(side, kept, tile, k, monkeypatch):
    """A bias of -inf leaves fewer than k in one or several tiles; the rest are arbitrary others
    without repetition.
    """
    monkeypatch.setitem(inputs.TILE, "cpu", tile)
    ids = torch.arange(230), torch.arange(310)
    sim = similarity(*embeddings(230, 310), ids, "tiled")
    view = sim.T if side else sim
    candidates = view.shape[1]
    bias = torch.full((candidates,), -math.inf)
    bias[kept] = 0.0
    _, top, _ = view.ranked(k, bias)
    assert top.values[:, :3].isfinite().all()
    assert (top.values[:, 3:] == -math.inf).all()
    assert (top.indices[:, :3].sort(1).values == torch.tensor(kept)).all()
    for row in top.indices.tolist():
        assert len({*row} & {*range(candidates)}) == k


@pytest.mark.parametrize("one", [False, True], ids=["one limit each", "one limit"])
@pytest.mark.parametrize("engine", ENGINES)
def test_best_candidates_below_a_limit(engine, one, small_tiles):
    sim = similarity(*embeddings(300, 9), make_ids("disjoint", 300, 9), engine)  # blocks of rows
    below = torch.full((300,), 0.2) if one else torch.linspace(-0.5, 0.4, 300).double()
    scores = sim.scores()
    wanted = scores.masked_fill(scores >= below[:, None], -math.inf).topk(4)
    found = sim.topk(4, below=0.2 if one else below)
    torch.testing.assert_close(found.values, wanted.values)
    indices = wanted.indices.masked_fill(wanted.values == -math.inf, -1)
    assert torch.equal(found.indices, indices)


# ------------------------------------------------------------------------------------------- ranks


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 30))
@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("ties", ["optimistic", "pessimistic"])
@pytest.mark.parametrize(
    ("engine", "many"), [("dense", ranking.MANY), ("tiled", ranking.MANY), ("dense", 0)]
)
def test_ranks_are_those_of_sorted_scores(engine, many, ties, seed, n, m):
    """Scores of few values, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (n, m), generator=generator).double()
    ids = make_ids("random", n, m, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "MANY", many)
        found = Similarity.from_scores(scores, *ids, engine=engine).ranks(ties=ties)
    for i, row in enumerate(found.tolist()):
        positive = ids[0][i] == ids[1]
        rivals = scores[i][~positive]
        wanted = []
        for place, own in enumerate(scores[i][positive].sort(descending=True).values, 1):
            ahead = rivals > own if ties == "optimistic" else rivals >= own
            wanted.append(place + int(ahead.sum()))
        assert [rank for rank in row if rank] == wanted


def test_the_only_positive_is_found_in_every_corner_of_a_tile(monkeypatch):
    monkeypatch.setitem(inputs.TILE, "cpu", (12, 4))
    v, w = embeddings(9, 11)
    places = [(i, j) for i in range(9) for j in range(11) if (i + j) % 2]
    for i, j in places:
        ids = torch.arange(9), torch.arange(11) + 20
        ids[1][j] = i
        tiled = Similarity(v, w, *ids, engine="tiled")
        dense = Similarity(v, w, *ids, engine="dense")
        assert torch.equal(tiled.ranks(), dense.ranks())
        assert torch.equal(tiled.T.ranks(), dense.T.ranks())
        assert tiled.ranks()[i] > 0
        assert tiled.T.ranks()[j] > 0
