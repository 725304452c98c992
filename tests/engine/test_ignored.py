"""Entries with an ignored id take part in nothing."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings, similarity

from itrloss.engine.relation import IGNORE_ID


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_equal_ids_with_an_ignored_one_are_not_the_same_as_no_ids(engine):
    ids = torch.tensor([0, IGNORE_ID, 2])
    v, w = embeddings(3, 3)
    sim = similarity(v, w, (ids, ids), engine)
    assert sim.positive_counts.tolist() == [1, 0, 1]
    assert sim.negative_counts.tolist() == [1, 0, 1]
    values = sim.both.logsumexp(2.0)
    assert values.isfinite().tolist() == [True, False, True] * 2
