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

from benchmarks.peak import peak_memory
from itrloss import mine_hard_negatives
from itrloss.engine.pairs import IGNORE_ID


def problem(queries=7, corpus=300, d=6, dtype=torch.float64) -> Any:
    generator = torch.Generator().manual_seed(queries + corpus)
    x, y = (
        torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
        for n in (queries, corpus)
    )
    return x, y, torch.arange(queries), torch.randint(0, 12, (corpus,), generator=generator)


def wanted(x, y, ids, k, below: Any = math.inf, normalize=True):
    x, y = (F.normalize(z, dim=1) if normalize else z for z in (x, y))
    scores = x @ y.T
    left_out = (ids[0][:, None] == ids[1]) | (
        scores >= torch.as_tensor(below, dtype=x.dtype).reshape(-1, 1)
    )
    return F.pad(
        scores.masked_fill(left_out, -math.inf), (0, max(0, k - len(y))), value=-math.inf
    ).topk(k)


def check(found, best):
    torch.testing.assert_close(found.values, best.values)
    assert torch.equal(found.indices, best.indices.masked_fill(best.values == -math.inf, -1))


@pytest.mark.parametrize(
    "below", [math.inf, 0.3, torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)]
)
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
    found = mine_hard_negatives(
        x, corpus, *ids, k=4, block=128, progress=lambda *numbers: done.append(numbers)
    )
    check(found, wanted(x, y.half().float(), ids, 4))
    assert done == [(128, 300), (256, 300), (300, 300)]
    half = mine_hard_negatives(x.half(), y.half(), *ids, k=4)
    torch.testing.assert_close(
        half.values, wanted(x.half().float(), y.half().float(), ids, 4).values
    )


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


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 700),
    st.integers(1, 20),
    st.sampled_from([1, 100, 128, 8192]),
    st.integers(0, 99),
)
def test_of_equal_scores_the_first_in_the_corpus(corpus, k, block, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-1, 2, (n, 3), generator=generator).float() for n in (5, corpus))
    ids = [torch.randint(0, 9, (n,), generator=generator) for n in (5, corpus)]
    ids[0][0], ids[1][::7] = IGNORE_ID, IGNORE_ID
    found = mine_hard_negatives(x, y, *ids, k=k, block=block, normalize=False)
    left_out = (ids[0][:, None] == ids[1]) | (ids[0] == IGNORE_ID)[:, None] | (ids[1] == IGNORE_ID)
    scores = F.pad((x @ y.T).masked_fill(left_out, -math.inf), (0, k), value=-math.inf)
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.values, values[:, :k])
    assert torch.equal(found.indices, indices[:, :k].masked_fill(values[:, :k] == -math.inf, -1))


@pytest.mark.parametrize("block", [512, 8192])
def test_every_block_beats_those_before(block):
    """No score is ruled out by the best so far; candidates are looked into for a share of the
    queries at a time.
    """
    x, y, *ids = problem(queries=300, corpus=4000)
    x[:, 0], y[:, 0] = 100.0, torch.linspace(-1, 1, 4000, dtype=torch.float64)
    below = 0.9 * torch.linspace(-1, 1, 300, dtype=torch.float64)
    check(mine_hard_negatives(x, y, *ids, k=7, block=block), wanted(x, y, ids, 7))
    check(
        mine_hard_negatives(x, y, *ids, k=7, block=block, below=below), wanted(x, y, ids, 7, below)
    )


def test_memory_for_a_corpus_in_ascending_order():
    x, y = torch.ones(1000, 2), torch.linspace(-1, 1, 12_000)[:, None] * torch.ones(2)
    ids = torch.arange(1000), torch.full((12_000,), -1)
    found = []
    used = peak_memory(
        lambda: found.append(mine_hard_negatives(x, y, *ids, k=3, normalize=False)), x.device
    )
    assert found[0].indices.eq(torch.tensor([11_999, 11_998, 11_997])).all()
    assert used is None or used < 200
