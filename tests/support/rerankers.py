"""Re-rankers with options, and what loops make of scores."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.retrieval.rerankers import MultiFactorReranker, ReciprocalReranker
from itrloss.rerank import (
    CSLS,
    Bias,
    DualBankNorm,
    DualBankSinkhorn,
    DualSoftmax,
    FastReranker,
    InvertedSoftmax,
    MutualProximity,
    NearestNeighborNorm,
    QueryBankNorm,
    Reranker,
    Sinkhorn,
)
from support import oracle_rerank as loops
from support.oracle import Array

METHODS: dict[str, Any] = {
    "fast": FastReranker((9.0, 8.0), (8.0, 17.0)),
    "inverted softmax": InvertedSoftmax(15.0),
    "dual softmax": DualSoftmax(15.0),
    "qb-norm": QueryBankNorm(15.0, 2),
    "dbnorm": DualBankNorm(2.0, 3.0),
    "nnn": NearestNeighborNorm(0.6, 4),
    "csls": CSLS(3),
    "mutual proximity": MutualProximity(),
    "sinkhorn": Sinkhorn(12.0, 4),
    "dbsn": DualBankSinkhorn(12.0, 4),
}
# those of the examples, whose new scores are an order
ORDERS: dict[str, Any] = {
    "reciprocal": ReciprocalReranker(4, 5),
    "multivariate": MultiFactorReranker(5, 0.5, 1.1),
}


class Centred(Reranker):
    """A re-ranker of a user's own: scores less the mean of their candidate."""

    def rule(self, direction):
        return Bias(-direction.candidates.mean_std().mean)


class CentredByBlocks(Reranker):
    """The same as a function of a block of scores."""

    def rule(self, direction):
        mean = direction.candidates.mean_std().mean
        return lambda scores, rows: scores.sub_(mean)


OWN: dict[str, Any] = {"own": Centred(), "own by blocks": CentredByBlocks()}
EVERY = METHODS | ORDERS | OWN


@dataclass
class Direction:
    """Scores (queries, candidates) of the direction ``side``.

    ``references`` (references, candidates) are the scores themselves, or those of the bank of
    queries. ``gallery`` (bank of candidates, candidates) and ``between`` (bank of queries, bank of
    candidates) are of two banks.
    """

    side: int
    scores: Array
    references: Array
    gallery: Array
    between: Array


def of_sinkhorn(one: Direction, method: Any) -> Array:
    return loops.sinkhorn(one.scores, one.references, method.scale, method.iterations)


def of_two_banks(one: Direction, method: Any) -> Array:
    """The bank's candidates take part, too, with scores of 0 for the queries."""
    candidates = one.scores.shape[1]
    of_queries = np.c_[one.scores, np.zeros((len(one.scores), one.between.shape[1]))]
    of_bank = np.c_[one.references, one.between]
    found = loops.sinkhorn(of_queries, of_bank, method.scale, method.iterations)
    return found[:, :candidates]


def of_reciprocal(one: Direction, method: Any) -> Array:
    k = (method.i2t_k, method.t2i_k)[one.side]
    return as_scores(loops.reciprocal_order(one.scores, one.references, k))


def of_multivariate(one: Direction, method: Any) -> Array:
    weights = method.share_weight, method.place_weight
    return as_scores(loops.multi_factor(one.scores, one.references, method.k, *weights)[0])


def as_scores(orders: Array) -> Array:
    """Return scores by which each query's candidates are in an order, best first."""
    return -orders.argsort(1)


BY_LOOPS: dict[str, Callable[[Direction, Any], Array]] = {
    "fast": lambda one, m: loops.fast(one.scores, one.references, *(m.i2t, m.t2i)[one.side]),
    "inverted softmax": lambda one, m: loops.inverted_softmax(one.scores, one.references, m.scale),
    "dual softmax": lambda one, m: loops.dual_softmax(one.scores, one.references, m.scale),
    "qb-norm": lambda one, m: loops.query_bank_norm(one.scores, one.references, m.scale, m.k),
    "dbnorm": lambda one, m: loops.dual_bank_norm(
        one.scores, one.references, one.gallery, m.query_scale, m.gallery_scale
    ),
    "nnn": lambda one, m: loops.nearest_neighbor_norm(one.scores, one.references, m.alpha, m.k),
    "csls": lambda one, m: loops.csls(one.scores, one.references, m.k),
    "mutual proximity": lambda one, m: loops.mutual_proximity(one.scores, one.references),
    "sinkhorn": of_sinkhorn,
    "dbsn": of_two_banks,
    "own": lambda one, m: one.scores - one.scores.mean(0),
    "own by blocks": lambda one, m: one.scores - one.scores.mean(0),
    "reciprocal": of_reciprocal,
    "multivariate": of_multivariate,
}


def method_of(name: str) -> Reranker:
    """Return a re-ranker without a bank, which may get one."""
    return copy.copy(EVERY[name])


def by_loops(name: str, direction: Direction) -> Array:
    """Return the new scores (queries, candidates) of a direction."""
    return BY_LOOPS[name](direction, EVERY[name])


def assert_same_scores(name: str, found: Tensor, expected: Array) -> None:
    """Compare scores (queries, candidates) up to a constant of each query; of the dual softmax,
    their logarithms are scores, from 1 on.
    """
    if name in ORDERS:
        return
    if name == "dual softmax":
        size = np.log(np.abs(expected))
        expected = np.sign(expected) * (1 + size - size.min(1, keepdims=True))
    else:
        found = found - found.mean(1, keepdim=True)
        expected = expected - expected.mean(1, keepdims=True)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-8, atol=1e-9)
