"""InfoNCE with weighted and with left-out negatives as loops over pairs, in the manner and
conventions of `oracle`.

Papers: LLaVE (Lan et al., 2025), Qwen3-Embedding (Zhang et al., 2025), NV-Retriever (Moreira et
al., 2024).
"""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import ArrayLike

from support.oracle import Ids, _log_sum_exp, of_anchors


def hard(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.07,
    hardness: float = 9.0,
    reduction: str = "mean",
) -> Any:
    """InfoNCE in which a negative counts ``exp(α S_in)`` times; the value, as the weight has no
    gradient.
    """

    def value(positives: list[float], negatives: list[float]) -> float:
        others = [s / temperature + hardness * s for s in negatives]
        terms = [_log_sum_exp([s / temperature, *others]) - s / temperature for s in positives]
        return math.fsum(terms) / len(terms)

    return of_anchors(S, row_ids, col_ids, reduction, value)


def filtered(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.05,
    margin: float = 0.1,
    relative: bool = False,
    reduction: str = "mean",
) -> Any:
    """InfoNCE without the negatives from ``P + m``, or ``P + m |P|``, upwards; P is the positives'
    mean score.
    """

    def value(positives: list[float], negatives: list[float]) -> float:
        own = math.fsum(positives) / len(positives)
        limit = own + margin * (abs(own) if relative else 1)
        others = [s / temperature for s in negatives if s < limit]
        terms = [_log_sum_exp([s / temperature, *others]) - s / temperature for s in positives]
        return math.fsum(terms) / len(terms)

    return of_anchors(S, row_ids, col_ids, reduction, value)
