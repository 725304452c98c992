"""Entries with an ignored id take part in nothing."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, assert_equal, gradients, parameters
from support.cases import ENGINES, case, each, embeddings, finite, similarity

from itrloss.engine.relation import IGNORE_ID


def but(size, *places):
    """Return a mask (size,) of all entries but some."""
    mask = torch.ones(size, dtype=torch.bool)
    mask[list(places)] = False
    return mask


def ids_with_ignored_ones():
    """Ids of four rows and of six columns, one and two of them ignored."""
    row_ids = torch.tensor([0, IGNORE_ID, 1, 2])
    col_ids = torch.tensor([0, 1, IGNORE_ID, IGNORE_ID, 2, 0])
    return row_ids, col_ids


@pytest.mark.parametrize(("name", "engine"), each(2, name=ANSWERS, engine=ENGINES))
def test_an_ignored_embedding_takes_part_in_nothing(name, engine, small_tiles, poisoned):
    """The values equal those of the matrix without it; its gradient is 0."""
    v, w, ids, grads = case()
    p = parameters(9, 14)
    rows = but(9, 0, 4)
    cols = but(14, 2, 3, 13)
    stay = torch.cat([rows, cols])
    grad = torch.cat(grads) * stay

    def outcome(vectors_and_parameters, ids, grad, engine):
        """The values, and their gradients by vectors and parameters."""
        leaves = [x.clone().requires_grad_() for x in vectors_and_parameters]
        x, y, scales = leaves
        sim = similarity(x, y, ids, engine)
        values = ANSWERS[name](sim.both, scales)
        assert not values.isnan().any()
        return values.detach(), gradients(values, leaves, grad)

    row_ids, col_ids = ids
    marked_rows = row_ids.masked_fill(~rows, IGNORE_ID)
    marked_cols = col_ids.masked_fill(~cols, IGNORE_ID)
    values, found = outcome((v, w, p), (marked_rows, marked_cols), grad, engine)
    if name != "std":  # the standard deviation is at least 1e-6, even without candidates
        assert not finite(values)[~stay].any()
    short = (v[rows], w[cols], p[stay])
    short_ids = (row_ids[rows], col_ids[cols])
    wanted_values, wanted = outcome(short, short_ids, grad[stay], "reference")
    assert_equal(values[stay], wanted_values)
    of_each_leaf = zip(found, wanted, (rows, cols, stay), strict=True)
    for got, exact, kept in of_each_leaf:
        assert not got[~kept].any()
        assert_equal(got[kept], exact)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_gradients_of_ignored_anchors_are_zero_whatever_comes_from_above(engine, small_tiles):
    v, w = (x.requires_grad_() for x in embeddings(5, 6))
    row_ids = torch.tensor([0, IGNORE_ID, 1, 2, 3])
    col_ids = torch.tensor([0, 1, IGNORE_ID, IGNORE_ID, 2, 3])
    p = parameters(5, 6)
    for name, answer in ANSWERS.items():
        sim = similarity(v, w, (row_ids, col_ids), engine)
        values = answer(sim.both, p)
        by_rows, by_cols = gradients(values, [v, w], torch.ones(11))
        assert by_rows.isfinite().all(), name
        assert not by_rows[1].any(), name
        assert not by_cols[2:4].any(), name


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_ignored_entries_are_not_counted(engine):
    v, w = embeddings(4, 6)
    sim = similarity(v, w, ids_with_ignored_ones(), engine)
    assert sim.positive_counts.tolist() == [2, 0, 1, 1]
    assert sim.negative_counts.tolist() == [2, 0, 3, 3]
    assert sim.T.positive_counts.tolist() == [1, 1, 0, 0, 1, 1]
    assert sim.valid().tolist() == [True, False, True, True]


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_ignored_entries_are_not_ranked_or_named(engine, small_tiles):
    v, w = embeddings(4, 6)
    row_ids, col_ids = ids_with_ignored_ones()
    sim = similarity(v, w, (row_ids, col_ids), engine)
    hardest = sim.hardest_negatives().indices.tolist()
    assert hardest[1] == -1
    assert 2 not in hardest
    assert 3 not in hardest
    kept = torch.tensor([0, 1, 4, 5])
    short = similarity(v, w[kept], (row_ids, col_ids[kept]), engine)
    assert torch.equal(sim.ranks(), short.ranks())
    best = sim.topk(4).indices
    best_of_kept = short.topk(4).indices
    assert torch.equal(best, kept[best_of_kept])


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_equal_ids_with_an_ignored_one_are_not_the_same_as_no_ids(engine):
    ids = torch.tensor([0, IGNORE_ID, 2])
    v, w = embeddings(3, 3)
    sim = similarity(v, w, (ids, ids), engine)
    assert sim.positive_counts.tolist() == [1, 0, 1]
    assert sim.negative_counts.tolist() == [1, 0, 1]
    values = sim.both.logsumexp(2.0)
    assert values.isfinite().tolist() == [True, False, True] * 2


ASKED = {
    "logsumexp over all": lambda anchors: anchors.logsumexp(5.0, over="all"),
    "entropy": lambda anchors: anchors.entropy(0.05),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("engine", ENGINES)
def test_one_side_alone_has_an_ignored_id(engine, name, side):
    answer = ASKED[name]
    vectors = list(embeddings(5, 5))
    ids = [torch.arange(5), torch.arange(5)]
    marked = [x.clone() for x in ids]
    marked[side][3] = IGNORE_ID
    sim = similarity(*vectors, marked, engine)
    found = answer(sim.both)
    stay = but(5, 3)
    vectors[side] = vectors[side][stay]
    ids[side] = ids[side][stay]
    short = similarity(*vectors, ids, "reference")
    wanted = answer(short.both)
    all_but_the_ignored = but(10, 5 * side + 3)
    torch.testing.assert_close(found[all_but_the_ignored], wanted)
