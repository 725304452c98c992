"""SupCon, MIL-NCE, multi-similarity and circle loss as loops over pairs, in the manner and
conventions of `oracle`.

Papers: SupCon (Khosla et al., NeurIPS 2020), MIL-NCE (Miech et al., CVPR 2020), multi-similarity
(Wang et al., CVPR 2019), circle loss (Sun et al., CVPR 2020).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from support.oracle import (
    Array,
    Ids,
    _candidates,
    _log_sum_exp,
    _positives,
    _reduce_valid,
    of_anchors,
    weight,
)


def supcon(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.1,
    inside: bool = False,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Any:
    """Eq. 2, ``mean_p -log P_p``, or Eq. 3, ``-log mean_p P_p``; P is the softmax of all ``S_ij /
    τ``. With smoothing, ε of the label is spread over all candidates.
    """

    def value(positives: list[float], negatives: list[float]) -> float:
        exponents = [s / temperature for s in positives + negatives]
        total = _log_sum_exp(exponents)
        logs = [s / temperature - total for s in positives]
        if inside:
            return math.log(len(logs)) - _log_sum_exp(logs)
        every = [s / temperature - total for s in positives + negatives]
        of_all = label_smoothing * math.fsum(every) / len(every)
        return -(1 - label_smoothing) * math.fsum(logs) / len(logs) - of_all

    return of_anchors(S, row_ids, col_ids, reduction, value)


def decoupled(
    S: ArrayLike, row_ids: Ids, col_ids: Ids, temperature: float = 0.1, reduction: str = "mean"
) -> Any:
    """``mean_p -S_ip / τ + log Σ_n exp(S_in / τ)`` (Yeh et al., ECCV 2022, Eq. 6)."""

    def value(positives: list[float], negatives: list[float]) -> float:
        log = _log_sum_exp([s / temperature for s in negatives])
        return log - math.fsum(positives) / len(positives) / temperature

    return of_anchors(S, row_ids, col_ids, reduction, value)


def mil_nce(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.07,
    joint: bool | str = False,
    reduction: str = "mean",
) -> Any:
    """``-log Σ_p exp(S_ip / τ) / (Σ_p exp(S_ip / τ) + Σ_n exp(S_in / τ))``; or jointly, see
    `joint_mil_nce`.
    """
    if joint:
        return joint_mil_nce(S, row_ids, col_ids, temperature, joint, reduction)

    def value(positives: list[float], negatives: list[float]) -> float:
        of_positives = [s / temperature for s in positives]
        of_negatives = [s / temperature for s in negatives]
        denominator = _log_sum_exp(of_positives + of_negatives)
        return denominator - _log_sum_exp(of_positives)

    return of_anchors(S, row_ids, col_ids, reduction, value)


def joint_mil_nce(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float,
    joint: bool | str,
    reduction: str,
) -> Any:
    """Values of images: negatives of an image, and those of each of its texts, times the weight of
    their match, next to the positives, which are there once (``joint="once"``) or twice.
    """
    scores = np.asarray(S, np.float64) / temperature
    values = np.zeros(len(scores))
    valid = []
    for i in range(len(scores)):
        positives = list(_positives(i, row_ids, col_ids))
        logits = [scores[i, n] for n in _candidates(i, row_ids, col_ids) if n not in positives]
        for p in positives:
            log = math.log(weight(i, p, row_ids, col_ids))
            of_text = set(_candidates(p, col_ids, row_ids)) - set(_positives(p, col_ids, row_ids))
            logits += [scores[n, p] + log for n in of_text]
        if not positives or not logits:
            continue
        valid.append(i)
        own = [scores[i, p] for p in positives]
        logits += own if joint == "once" else own + own
        values[i] = _log_sum_exp(logits) - _log_sum_exp(own)
    if reduction == "none":
        return values
    return values.sum() / (max(1, len(valid)) if reduction == "mean" else 1)


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
        of_positives = [-alpha * (s - base) for s in positives]
        of_negatives = [beta * (s - base) for s in negatives]
        pull = _log_sum_exp([0.0, *of_positives]) / alpha
        push = _log_sum_exp([0.0, *of_negatives]) / beta
        return pull + push

    return of_anchors(S, row_ids, col_ids, reduction, value)


def circle(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    margin: float = 0.4,
    scale: float = 80.0,
    reduction: str = "mean",
    held: ArrayLike | None = None,
) -> Any:
    """``log(1 + Σ_np exp(γ (α_n (S_n - Δ_n) - α_p (S_p - Δ_p))))``; O_p = 1 + m, O_n = -m, Δ_p = 1
    - m, Δ_n = m.
    """

    def value(
        positives: list[float], negatives: list[float], held_p: list[float], held_n: list[float]
    ) -> float:
        exponents = [0.0]
        for s_n, of_weight in zip(negatives, held_n, strict=True):
            alpha_n = max(of_weight + margin, 0)
            logit_n = scale * alpha_n * (s_n - margin)
            for s_p, of_weight in zip(positives, held_p, strict=True):
                alpha_p = max(1 + margin - of_weight, 0)
                logit_p = -scale * alpha_p * (s_p - (1 - margin))
                exponents.append(logit_n + logit_p)
        return _log_sum_exp(exponents)

    return of_anchors(S, row_ids, col_ids, reduction, value, S if held is None else held)


def sdm(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.02,
    epsilon: float = 1e-8,
    reduction: str = "mean",
) -> Any:
    """``Σ_j p_j log(p_j / (q_j + ε))``; p is the softmax of all ``S_ij / τ``, q the positives'
    weights divided by their sum. An anchor without a negative counts.
    """

    def anchors(S: Array, ids: Ids, other_ids: Ids) -> tuple[Array, list[int]]:
        """The values of all anchors, and those that have a positive."""
        values = np.zeros(len(S))
        counted = []
        for i, row in enumerate(S):
            positives = _positives(i, ids, other_ids)
            if not positives:
                continue
            counted.append(i)
            candidates = _candidates(i, ids, other_ids)
            total = _log_sum_exp([row[j] / temperature for j in candidates])
            weights = {p: weight(i, p, ids, other_ids) for p in positives}
            for j in candidates:
                label = weights.get(j, 0.0) / math.fsum(weights.values())
                log_p = row[j] / temperature - total
                values[i] += math.exp(log_p) * (log_p - math.log(label + epsilon))
        return values, counted

    S = np.asarray(S, np.float64)
    rows, counted_rows = anchors(S, row_ids, col_ids)
    cols, counted_cols = anchors(S.T, col_ids, row_ids)
    return _reduce_valid(rows, cols, counted_rows, counted_cols, reduction)
