"""SupCon, MIL-NCE, multi-similarity and circle loss as loops over pairs, in the manner and
conventions of `oracle`.

Papers: SupCon (Khosla et al., NeurIPS 2020), MIL-NCE (Miech et al., CVPR 2020), multi-similarity
(Wang et al., CVPR 2019), circle loss (Sun et al., CVPR 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from support.oracle import Array, Ids, _log_sum_exp, _negatives, _positives, _reduce, _valid_anchors

OfAnchor = Callable[[list[float], list[float]], float]


def of_anchors(S: ArrayLike, row_ids: Ids, col_ids: Ids, reduction: str, value: OfAnchor) -> Any:
    """Reduce ``value(scores of positives, scores of negatives)`` of all valid anchors, of both
    sides.
    """

    def anchors(S: Array, ids: Ids, other_ids: Ids) -> Array:
        values = np.zeros(len(S))
        for i in _valid_anchors(ids, other_ids):
            positives = _positives(i, ids, other_ids)
            negatives = _negatives(i, ids, other_ids)
            values[i] = value([S[i, p] for p in positives], [S[i, n] for n in negatives])
        return values

    S = np.asarray(S, np.float64)
    return _reduce(
        anchors(S, row_ids, col_ids), anchors(S.T, col_ids, row_ids), row_ids, col_ids, reduction
    )


def supcon(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.1,
    inside: bool = False,
    reduction: str = "mean",
) -> Any:
    """Eq. 2, ``mean_p -log P_p``, or Eq. 3, ``-log mean_p P_p``; P is the softmax of all ``S_ij /
    τ``.
    """

    def value(positives: list[float], negatives: list[float]) -> float:
        total = _log_sum_exp([s / temperature for s in positives + negatives])
        logs = [s / temperature - total for s in positives]
        if inside:
            return math.log(len(logs)) - _log_sum_exp(logs)
        return -math.fsum(logs) / len(logs)

    return of_anchors(S, row_ids, col_ids, reduction, value)


def mil_nce(
    S: ArrayLike, row_ids: Ids, col_ids: Ids, temperature: float = 0.07, reduction: str = "mean"
) -> Any:
    """``-log Σ_p exp(S_ip / τ) / (Σ_p exp(S_ip / τ) + Σ_n exp(S_in / τ))``."""

    def value(positives: list[float], negatives: list[float]) -> float:
        numerator = _log_sum_exp([s / temperature for s in positives])
        return _log_sum_exp([s / temperature for s in positives + negatives]) - numerator

    return of_anchors(S, row_ids, col_ids, reduction, value)


def multi_similarity(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float | None = None,
    reduction: str = "mean",
) -> Any:
    """``1/α log(1 + Σ_p exp(-α (S_p - λ))) + 1/β log(1 + Σ_n exp(β (S_n - λ)))``, of mined pairs if
    there is an ε.
    """

    def value(positives: list[float], negatives: list[float]) -> float:
        lowest = min(positives)
        highest = max(negatives)
        if epsilon is not None:
            positives = [s for s in positives if s < highest + epsilon]
            negatives = [s for s in negatives if s > lowest - epsilon]
        pull = _log_sum_exp([0.0, *(-alpha * (s - base) for s in positives)])
        return pull / alpha + _log_sum_exp([0.0, *(beta * (s - base) for s in negatives)]) / beta

    return of_anchors(S, row_ids, col_ids, reduction, value)


def circle(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    margin: float = 0.4,
    scale: float = 80.0,
    reduction: str = "mean",
) -> Any:
    """``log(1 + Σ_np exp(γ (α_n (S_n - Δ_n) - α_p (S_p - Δ_p))))``; O_p = 1 + m, O_n = -m, Δ_p = 1
    - m, Δ_n = m.
    """

    def value(positives: list[float], negatives: list[float]) -> float:
        logits_p = [-scale * max(1 + margin - s, 0) * (s - (1 - margin)) for s in positives]
        logits_n = [scale * max(s + margin, 0) * (s - margin) for s in negatives]
        return _log_sum_exp([0.0, *(n + p for n in logits_n for p in logits_p)])

    return of_anchors(S, row_ids, col_ids, reduction, value)


def sdm(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.02,
    epsilon: float = 1e-8,
    reduction: str = "mean",
) -> Any:
    """``Σ_j p_j log(p_j / (q_j + ε))``; p is the softmax of all ``S_ij / τ``, q the positives'
    share. An anchor without a negative counts.
    """

    def anchors(S: Array, ids: Ids, other_ids: Ids) -> tuple[list[float], list[bool]]:
        values = [0.0] * len(S)
        counts = [False] * len(S)
        for i in range(len(S)):
            positives = set(_positives(i, ids, other_ids))
            if not positives:
                continue
            total = _log_sum_exp([s / temperature for s in S[i]])
            for j, s in enumerate(S[i]):
                label = 1 / len(positives) if j in positives else 0.0
                log = s / temperature - total
                values[i] += math.exp(log) * (log - math.log(label + epsilon))
            counts[i] = True
        return values, counts

    S = np.asarray(S, np.float64)
    rows = anchors(S, row_ids, col_ids)
    cols = anchors(S.T, col_ids, row_ids)
    if reduction == "none":
        return np.array(rows[0]), np.array(cols[0])
    if reduction == "sum":
        return math.fsum(rows[0] + cols[0])
    return sum(math.fsum(values) / max(1, sum(counts)) for values, counts in (rows, cols))
