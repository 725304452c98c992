"""Ranked lists and their figures, as plain loops: grades, exclusions and the rule for ties.

It is written from the docstrings, not from the library. One query has ``scores`` and ``grades`` of
all candidates (0 is wrong) and a set of those that are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median


def order(
    scores: Sequence[float],
    grades: Sequence[float],
    excluded: Collection[int] = (),
    ties: str = "pessimistic",
) -> list[int]:
    """Candidates best first: of equal scores, the lowest grade first, or last if optimistic."""
    sign = 1 if ties == "pessimistic" else -1
    candidates = [c for c in range(len(scores)) if c not in excluded]
    return sorted(candidates, key=lambda c: (-scores[c], sign * grades[c], c))


def query_figures(ranked: Sequence[float], ks: Sequence[int]) -> dict[str, float]:
    """Figures of one query from the grades of its candidates, best first; none without a right
    one.
    """
    places = [place for place, grade in enumerate(ranked, 1) if grade > 0]
    if not places:
        return {}
    total = len(places)
    figures = {"rank": float(places[0]), "mrr": 1 / places[0]}
    for k in ks:
        figures[f"r{k}"] = float(places[0] <= k)
        figures[f"recall_at_{k}"] = sum(place <= k for place in places) / total
        figures[f"ndcg_at_{k}"] = _dcg(ranked[:k]) / _dcg(sorted(ranked, reverse=True)[:k])
    precisions = [found / place for found, place in enumerate(places, 1)]
    figures["map"] = math.fsum(precisions) / total
    figures["r_precision"] = sum(place <= total for place in places) / total
    inside = [p for p, place in zip(precisions, places, strict=True) if place <= total]
    figures["map_at_r"] = math.fsum(inside) / total
    return figures


def figures(
    lists: Sequence[Sequence[float]], ks: Sequence[int] = (1, 5, 10)
) -> Mapping[str, float]:
    """Figures of one direction but the skewness, from the ranked grades of each query."""
    answered = [found for found in (query_figures(ranked, ks) for ranked in lists) if found]
    result = {}
    for name in answered[0]:
        values = [found[name] for found in answered]
        if name == "rank":
            result["median_rank"] = float(median(values))
            result["mean_rank"] = math.fsum(values) / len(values)
        else:
            result[name] = 100 * math.fsum(values) / len(values)
    return result


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(g / math.log2(place + 1) for place, g in enumerate(gains, 1))
