"""Folds, judgements and resampling, implemented again as plain loops in float64, in the manner of
`oracle`.

It is written from docs/metrics.rst and the docstrings, not from the library. ``S`` is
(images, texts), and ``pairs`` lists (image, text). A judgement is (image, text, grade); the grade
of a pair judged several times is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from support import oracle

# its id, and the figures of FIGURES; no figures if it has no right candidate
Query = tuple[int, list[float]]

KS = (1, 5, 10)
FIGURES = (
    *(f"r{k}" for k in KS),
    *(f"recall_at_{k}" for k in KS),
    *(f"ndcg_at_{k}" for k in KS),
    "mrr",
    "map",
    "r_precision",
    "map_at_r",
)


def folds(S: ArrayLike, image_ids: ArrayLike, text_ids: ArrayLike, parts: int) -> dict[str, float]:
    """`oracle.retrieval_metrics` within consecutive parts of the images and their texts by id,
    averaged.
    """
    S = np.asarray(S, np.float64)
    image_ids = np.asarray(image_ids)
    text_ids = np.asarray(text_ids)
    size = len(S) // parts
    found = []
    for part in range(parts):
        start = part * size
        rows = list(range(start, start + size))
        own_ids = image_ids[rows]
        cols = [j for j in range(S.shape[1]) if text_ids[j] in own_ids]
        scores = S[rows][:, cols]
        found.append(oracle.retrieval_metrics(scores, own_ids, text_ids[cols]))
    means = {}
    for name in found[0]:
        values = [figures[name] for figures in found]
        means[name] = math.fsum(values) / parts
    return means


def query_figures(places: Sequence[int]) -> list[float]:
    """Figures of a query whose right candidates have these ranks, in the order of FIGURES, as
    fractions.
    """
    total = len(places)
    hits = []
    recalls = []
    gains = []
    for k in KS:
        among_k = [place for place in places if place <= k]
        hits.append(float(len(among_k) > 0))
        recalls.append(len(among_k) / total)
        found = [float(place in places) for place in range(1, k + 1)]
        best = [float(place <= total) for place in range(1, k + 1)]
        gains.append(_dcg(found) / _dcg(best))
    precisions = [n / place for n, place in enumerate(places, 1)]
    within = [n for n, place in enumerate(places, 1) if place <= total]
    reciprocal_rank = 1 / places[0]
    average_precision = math.fsum(precisions) / total
    r_precision = len(within) / total
    map_at_r = math.fsum(precisions[: len(within)]) / total
    return [*hits, *recalls, *gains, reciprocal_rank, average_precision, r_precision, map_at_r]


def _mean_figures(way: str, figures: Sequence[list[float]]) -> dict[str, float]:
    """Means of the figures of queries, in percent; nan without a query."""
    means = {}
    for x, name in enumerate(FIGURES):
        values = [of_query[x] for of_query in figures]
        mean = math.fsum(values) / len(values) if values else math.nan
        means[f"{way}_{name}"] = 100 * mean
    return means


def resampled(i2t: Sequence[Query], t2i: Sequence[Query], drawn: Iterable[int]) -> dict[str, float]:
    """Figures of the queries of the drawn ids, with multiplicity; nan if none of them has an
    answer.
    """
    found = {}
    drawn = list(drawn)
    for way, queries in (("i2t", i2t), ("t2i", t2i)):
        of_drawn = []
        for drawn_id in drawn:
            of_drawn += [figures for id_, figures in queries if id_ == drawn_id and figures]
        found |= _mean_figures(way, of_drawn)
    found["rsum"] = rsum(found)
    return found


def rsum(found: dict[str, float]) -> float:
    """The sum of the six R@K."""
    recalls = [found[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in KS]
    return math.fsum(recalls)


def _dcg(gains: Sequence[float]) -> float:
    """Discounted cumulative gain of the gains at places 1, 2, ..."""
    discounted = [gain / math.log2(place + 1) for place, gain in enumerate(gains, 1)]
    return math.fsum(discounted)
