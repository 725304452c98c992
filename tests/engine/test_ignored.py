"""Entries with an ignored id take part in nothing."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings, similarity

from itrloss.engine.relation import IGNORE_ID


def ids_with_ignored_ones():
    """Ids of four rows and of six columns, one and two of them ignored."""
    row_ids = torch.tensor([0, IGNORE_ID, 1, 2])
    col_ids = torch.tensor([0, 1, IGNORE_ID, IGNORE_ID, 2, 0])
    return row_ids, col_ids


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
