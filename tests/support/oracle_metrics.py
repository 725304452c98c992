"""Resampled figures as plain loops, written from docs/metrics.rst, in the manner of `oracle`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from support import oracle_ranking

# its id, and its figures as fractions; none if it has no right candidate
Query = tuple[int, dict[str, float]]

KS = (1, 5, 10)
NAMES = oracle_ranking.query_figures([1], KS).keys() - {"rank"}


def query_figures(places: Sequence[int]) -> dict[str, float]:
    """Figures of a query whose right candidates have these ranks."""
    ranked = [float(place in places) for place in range(1, max(places) + 1)]
    return oracle_ranking.query_figures(ranked, KS)


def resampled(i2t: Sequence[Query], t2i: Sequence[Query], drawn: Iterable[int]) -> dict[str, float]:
    """Figures of the queries of the drawn ids, with multiplicity, in percent; nan if none of them
    has an answer.
    """
    found = {}
    drawn = list(drawn)
    for way, queries in (("i2t", i2t), ("t2i", t2i)):
        of_drawn = []
        for drawn_id in drawn:
            of_drawn += [figures for id_, figures in queries if id_ == drawn_id and figures]
        for name in NAMES:
            values = [figures[name] for figures in of_drawn]
            mean = math.fsum(values) / len(values) if values else math.nan
            found[f"{way}_{name}"] = 100 * mean
    found["rsum"] = math.fsum(found[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in KS)
    return found
