"""The re-rankers of DVSE's table IV where scores are equal, huge or far apart.

See ``tests/metrics/test_random_evaluations.py`` for other scores.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracle_rerank

from examples.retrieval.rerankers import (
    METHODS,
    MultiFactorReranker,
    ReciprocalReranker,
)
from itrloss.cli import comparison

N, M = 7, 14


def test_what_is_not_reordered_keeps_its_order_below():
    scores = torch.rand(N, M)
    before = scores.argsort(1, descending=True)
    for method in (ReciprocalReranker(4, 4), MultiFactorReranker(4)):
        order = method.rerank(scores).i2t.argsort(1, descending=True)
        assert torch.equal(order[:, 4:], before[:, 4:])
        best = order[:, :4].sort(1).values
        best_before = before[:, :4].sort(1).values
        assert torch.equal(best, best_before)
        assert not torch.equal(order, before)
    huge = scores * 2.0**40  # so large that adding 1 is rounded away
    method = ReciprocalReranker(4)
    order = method.rerank(scores).i2t.argsort(1)
    order_of_huge = method.rerank(huge).i2t.argsort(1)
    assert torch.equal(order_of_huge, order)


def test_of_equals_the_first_comes_first():
    """If two texts have equal scores for all images, the reciprocal re-rankers keep their order."""
    scores = torch.rand(N, M)
    scores[:, 9] = scores[:, 4]
    reranked = ReciprocalReranker(M, 4).rerank(scores).i2t
    order = reranked.argsort(dim=1, descending=True, stable=True)
    places_of_4 = (order == 4).nonzero()[:, 1]
    places_of_9 = (order == 9).nonzero()[:, 1]
    assert (places_of_4 < places_of_9).all()


def test_what_is_reordered_stays_above_its_equals():
    """Reordered candidates stay first if all scores are equal."""
    equal = torch.full((N, M), 0.5)
    reranked = ReciprocalReranker(2).rerank(equal)
    # any two of the equal ones
    best = reranked.i2t.topk(3).values
    assert (best[:, 1] > best[:, 2]).all()


def test_of_queries_with_the_same_score_none_stands_before_the_other():
    # only the second image precedes the first, once
    scores = torch.tensor([[5.0, 5.0], [6.0, 5.0], [1.0, 1.0]])
    reranked = ReciprocalReranker(2, 2).rerank(scores)
    assert reranked.i2t[0].argmax() == 1


@pytest.mark.parametrize("k", [M, 400])
def test_multivariate_re_ranking_keeps_the_order_of_far_candidates(k):
    """The terms of the 400th candidate are 1e-9, next to shares of 0.2."""
    # all queries alike: shares tie, and the order is that of the other terms
    scores = (0.5 + torch.arange(k) * 2.0**-20).repeat(5, 1)
    method = MultiFactorReranker(k)
    S = scores.numpy()
    wanted, values = oracle_rerank.multi_factor(S, S, k, method.share_weight, method.place_weight)
    descending = -np.sort(-values, axis=1)
    assert (np.diff(descending) < 0).all()
    top = method.topk(scores, k)
    assert top.i2t.indices.tolist() == wanted.tolist()


def test_tables_name_them_and_the_library_does_not():
    assert {*METHODS.values()} == {ReciprocalReranker, MultiFactorReranker}
    assert METHODS.keys().isdisjoint(comparison.METHODS)
