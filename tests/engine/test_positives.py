"""Positive pairs: how they are counted, listed or masked, and sums over them."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings

from itrloss import Similarity


def test_row_ids_may_be_left_out():
    v, w = embeddings(3, 6)
    captions = torch.arange(3).repeat_interleave(2)
    full = Similarity(v, w, torch.arange(3), captions)
    short = Similarity(v, w, col_ids=captions)
    assert torch.equal(full.logsumexp(2.0), short.logsumexp(2.0))
    assert short.ids[0] is None
    assert torch.equal(short.ids[1], captions)
    assert short.T.ids[1] is None


def test_column_ids_may_not_be_left_out():
    """Ids of the rows alone may have been meant for both."""
    v, _ = embeddings(3, 3)
    with pytest.raises(ValueError, match="col_ids"):
        Similarity(v, v, torch.tensor([0, 0, 1]))


def test_ids_are_returned_as_they_were_given():
    """Even if they only mean that row i matches column i."""
    v, w = embeddings(4, 4)
    given = torch.tensor([7, 3, 9, 1])
    sim = Similarity(v, w, given, given)
    assert torch.equal(sim.ids[0], given)
    assert torch.equal(sim.T.ids[1], given)
    assert Similarity(v, w).ids == (None, None)


@pytest.mark.parametrize(
    ("row_ids", "col_ids", "one_to_one"),
    [
        ([7, 3, 9, 1], [7, 3, 9, 1], True),
        ([7, 3, 9, 1], [1, 9, 3, 7], False),
        ([1, 1, 2, 3], [1, 1, 2, 3], False),
        ([1, 2, 1, 3], [1, 2, 1, 3], False),
    ],
)
def test_one_to_one_is_row_i_with_column_i(row_ids, col_ids, one_to_one):
    sim = Similarity(*embeddings(4, 4), torch.tensor(row_ids), torch.tensor(col_ids))
    assert sim.one_to_one == one_to_one
