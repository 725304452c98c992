"""Hard negatives from a corpus, against the whole matrix of scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from itrloss import mine_hard_negatives
from itrloss.engine.ranking import topk


def problem(queries=7, corpus=300, d=6, dtype=torch.float64) -> Any:
    generator = torch.Generator().manual_seed(queries + corpus)
    x, y = (torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype) for n in (queries, corpus))
    return x, y, torch.arange(queries), torch.randint(0, 12, (corpus,), generator=generator)


def wanted(x, y, ids, k, below=math.inf, normalize=True):
    x, y = (F.normalize(z, dim=1) if normalize else z for z in (x, y))
    scores = x @ y.T
    left_out = (ids[0][:, None] == ids[1]) | (scores >= torch.as_tensor(below, dtype=x.dtype).reshape(-1, 1))
    return F.pad(scores.masked_fill(left_out, -math.inf), (0, max(0, k - len(y))), value=-math.inf).topk(k)


def check(found, best):
    torch.testing.assert_close(found.values, best.values)
    assert torch.equal(found.indices, best.indices.masked_fill(best.values == -math.inf, -1))


@pytest.mark.parametrize("below", [math.inf, 0.3, torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("block", [1, 64, 100, 8192])
def test_negatives_are_those_of_the_whole_matrix(block, normalize, below):
    x, y, *ids = problem()
    options = {"normalize": normalize, "below": None if below is math.inf else below}
    found = mine_hard_negatives(x, y, *ids, k=5, block=block, **options)
    check(found, wanted(x, y, ids, 5, below, normalize))


def test_fewer_negatives_than_asked_for():
    x, y, *ids = problem(corpus=6)
    found = mine_hard_negatives(x, y, *ids, k=9, block=4)
    check(found, wanted(x, y, ids, 9))
    assert (found.indices[:, 6:] == -1).all()


def test_a_corpus_in_a_file(tmp_path):
    x, y, *ids = problem(dtype=torch.float32)
    np.save(tmp_path / "corpus.npy", y.half().numpy())
    done = []
    corpus = np.load(tmp_path / "corpus.npy", mmap_mode="r")
    found = mine_hard_negatives(x, corpus, *ids, k=4, block=128, progress=lambda *numbers: done.append(numbers))
    check(found, wanted(x, y.half().float(), ids, 4))
    assert done == [(128, 300), (256, 300), (300, 300)]
    half = mine_hard_negatives(x.half(), y.half(), *ids, k=4)
    torch.testing.assert_close(half.values, wanted(x.half().float(), y.half().float(), ids, 4).values)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("queries", lambda a: [a[0] * math.nan, *a[1:]]),
        ("corpus", lambda a: [a[0], a[1] * math.inf, *a[2:]]),
        ("corpus", lambda a: [a[0], a[1][:, :3], *a[2:]]),
        ("corpus", lambda a: [a[0], a[1].long(), *a[2:]]),
        ("query_ids", lambda a: [*a[:2], a[2][:3], a[3]]),
        ("corpus_ids", lambda a: [*a[:3], a[3].float()]),
        ("k", lambda a: [*a, 0]),
    ],
)
def test_wrong_input_is_named(name, change):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        mine_hard_negatives(*change([*problem()]))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_best_values_by_runs(rows, runs, k, ties):
    x = torch.randn(rows, 64 * runs, generator=torch.Generator().manual_seed(runs))
    x = x.round() if ties else x
    k = min(k, x.shape[1])
    values, indices = topk(x, k)
    assert torch.equal(values, x.topk(k).values) and torch.equal(x.gather(1, indices), values)
    assert all(len(row.unique()) == k for row in indices)
