"""Orders of re-rankers for scores of any size and precision, against float64 oracles."""

from __future__ import annotations

import numpy as np
import oracle_rerank
import pytest
import torch

from itrloss import Similarity
from itrloss.metrics import retrieval_metrics, retrieval_results
from itrloss.rerank import MultiFactorReranker, TwoStageReranker

N, M, K = 12, 24, 9


def uniform(n=N, m=M, seed=0):
    """(n, m) distinct float64 numbers in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(n * m, generator=generator).argsort()
    return order.double().view(n, m) / (n * m)


def with_one_at(value, size=1.0):
    """Scores of which every seventh candidate of a query is at ``value``, about."""
    x = size * uniform(seed=1)
    some = (torch.arange(N)[:, None] - torch.arange(M)) % 7 == 0
    return torch.where(some, value * (1 + 0.1 * uniform(seed=2)), x)


def in_two_stages(first, second, weight, k):
    """Each query's candidates from best to worst, by the docstring and in float64."""
    orders = []
    for s, f in zip(first.double().tolist(), second.double().tolist(), strict=True):
        order = sorted(range(len(s)), key=lambda c, s=s: -s[c])
        best = sorted(order[:k], key=lambda c, s=s, f=f: -(f[c] + weight * s[c]))
        orders.append(best + order[k:])
    return torch.tensor(orders)


FIRST = uniform().float()
SPREADS = {
    "masked at -1e9": (FIRST, with_one_at(-1e9), 0.0),
    "masked at the least float32": (FIRST, with_one_at(-3e38).float(), 0.0),
    "certain at 1e30": (FIRST, with_one_at(1e30), 0.0),
    "beside the least half": (FIRST, with_one_at(-6e4, 0.1).float(), 0.0),
    "beside each other 1e-9": (FIRST, 1 + 1e-9 * uniform(seed=1), 0.0),
    "probabilities of 1e-8": (FIRST, 1e-8 * uniform(seed=1), 0.0),
    "probabilities of 1e-30": (FIRST, (1e-30 * uniform(seed=1)).float(), 0.0),
    "subnormal numbers": (FIRST, (1e-41 * uniform(seed=1)).float(), 0.0),
    "logits of bfloat16": (FIRST, torch.arange(N * M).view(N, M).double().fmod(61).bfloat16(), 1.0),
    "integers beyond float32": (FIRST, 2**40 + (N * M * uniform(seed=1)).long(), 0.0),
    "first scores beyond the second": (1e6 * FIRST.double(), uniform(seed=1), 1.0),
    "second scores beyond the first": (FIRST, with_one_at(-1e9).round(decimals=-8), 1.0),
    "first scores of 1e30": (1e30 * FIRST, uniform(seed=1), 0.0),
    "first scores up to the largest": (3.4e38 * FIRST, uniform(seed=1), 0.0),
    "first scores down to the least": (-3.4e38 * FIRST, uniform(seed=1), 0.0),
    "first scores of 1e-30": (1e-30 * FIRST, uniform(seed=1), 0.0),
}


@pytest.mark.parametrize("name", SPREADS)
def test_two_stages_keep_every_order(name):
    first, second, weight = SPREADS[name]
    method = TwoStageReranker(lambda i, t: second[i, t], k=K, weight=weight)
    reranked = method.rerank(first)
    best = method.topk(first, M)
    sides = (
        (first, second, reranked.i2t, best.i2t),
        (first.T, second.T, reranked.t2i.T, best.t2i),
    )
    for scores, scored, found, top in sides:
        wanted = in_two_stages(scores, scored, weight, K)
        assert torch.equal(found.argsort(dim=1, descending=True), wanted)
        assert torch.equal(top.indices, wanted)
        assert found.isfinite().all()


def test_two_stages_leave_equal_scores_equal():
    second = torch.tensor([[1e-9, 1e-9, 0.0, -1e9]])
    first = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    scores = first.repeat(4, 1)
    method = TwoStageReranker(lambda i, t: second[0, t], k=4, weight=0.0)
    worst, best = (
        retrieval_results(scores, reranker=method, ties=ties).i2t.best.tolist()
        for ties in ("pessimistic", "optimistic")
    )
    assert (worst, best) == ([2, 2, 3, 4], [1, 1, 3, 4])


@pytest.mark.parametrize("k", [M, 400])
def test_multivariate_re_ranking_keeps_the_order_of_far_candidates(k):
    """The terms of the 400th candidate are 1e-9, beside shares of 0.2."""
    # all queries alike: shares tie, and the order is that of the other terms
    scores = (0.5 + torch.arange(k) * 2.0**-20).repeat(5, 1)
    method = MultiFactorReranker(k)
    wanted, values = oracle_rerank.multi_factor(
        scores.numpy(), scores.numpy(), k, method.share_weight, method.place_weight
    )
    assert (np.diff(-np.sort(-values, axis=1)) < 0).all()
    assert method.topk(scores, k).i2t.indices.tolist() == wanted.tolist()


def test_a_second_scorer_ranks_as_its_scores_would_alone():
    second = with_one_at(-1e9)
    ids = torch.arange(N), torch.arange(M) // 2
    method = TwoStageReranker(lambda i, t: second[i, t], k=M, weight=0.0)
    for engine in ("dense", "tiled"):
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(N, 8, generator=generator), torch.randn(M, 8, generator=generator)
        sim = Similarity(*vectors, *ids, engine=engine)
        assert retrieval_metrics(sim, reranker=method) == retrieval_metrics(second, *ids)
