"""RINCE, GCE and the complementary contrastive loss as loops over pairs, in the manner of `oracle`.

Papers: RINCE (Chuang et al., CVPR 2022), RCL (Hu et al., TPAMI 2023), GCE (Zhang & Sabuncu,
NeurIPS 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from support.oracle import Ids, of_anchors


def of_positives(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float,
    reduction: str,
    value: Callable[[float, float], float],
) -> Any:
    """Reduce ``mean_p value(e_p, Σ_n e_n)`` of all anchors, where ``e = exp(S / τ)``."""

    def of_anchor(positives: list[float], negatives: list[float]) -> float:
        others = math.fsum(math.exp(s / temperature) for s in negatives)
        values = [value(math.exp(s / temperature), others) for s in positives]
        return math.fsum(values) / len(values)

    return of_anchors(S, row_ids, col_ids, reduction, of_anchor)


def rince(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.07,
    q: float = 0.5,
    lam: float = 0.01,
    reduction: str = "mean",
) -> Any:
    """``mean_p (−e_p^q + (λ (e_p + Σ_n e_n))^q) / q``, where ``e = exp(S / τ)``."""

    def value(e: float, others: float) -> float:
        return ((lam * (e + others)) ** q - e**q) / q

    return of_positives(S, row_ids, col_ids, temperature, reduction, value)


def generalized(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.07,
    q: float = 0.7,
    reduction: str = "mean",
) -> Any:
    """``mean_p (1 − P_p^q) / q``; ``P_p = e_p / (e_p + Σ_n e_n)`` with ``e = exp(S / τ)``."""

    def value(e: float, others: float) -> float:
        return (1 - (e / (e + others)) ** q) / q

    return of_positives(S, row_ids, col_ids, temperature, reduction, value)


def complementary(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.05,
    reduction: str = "mean",
) -> Any:
    """``−Σ_n log(1 − P_n)``; P is the softmax of all ``S / τ``, and ``1 − P`` is at least 1e-6."""

    def value(positives: list[float], negatives: list[float]) -> float:
        every = math.fsum(math.exp(s / temperature) for s in positives + negatives)
        rest = [1 - math.exp(s / temperature) / every for s in negatives]
        return -math.fsum(math.log(max(x, 1e-6)) for x in rest)

    return of_anchors(S, row_ids, col_ids, reduction, value)
