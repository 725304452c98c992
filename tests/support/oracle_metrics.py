"""Folds, judgements and resampling, implemented again as plain loops in float64, in the manner of
`oracle`.

It is written from docs/metrics.rst and the docstrings, not from the library. ``S`` is
(images, texts), and ``pairs`` lists (image, text). A judgement is (image, text, grade); the grade
of a pair judged several times is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from numpy.typing import ArrayLike

from support import oracle

Pair = tuple[int, int]
Judged = Iterable[tuple[int, int, float]]
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
        rows = list(range(part * size, (part + 1) * size))
        cols = [j for j in range(S.shape[1]) if text_ids[j] in [image_ids[i] for i in rows]]
        found.append(oracle.retrieval_metrics(S[rows][:, cols], image_ids[rows], text_ids[cols]))
    return {name: math.fsum(f[name] for f in found) / parts for name in found[0]}


def ranks(scores: Sequence[float], right: Sequence[int], ties: str = "pessimistic") -> list[int]:
    """Ranks of one query's right candidates, ascending; wrong ones of an equal score rank above or
    below them.
    """
    places = []
    for place, p in enumerate(sorted(right, key=lambda j: -scores[j])):
        wrong = [scores[j] for j in range(len(scores)) if j not in right]
        ahead = sum(s > scores[p] or (s == scores[p] and ties == "pessimistic") for s in wrong)
        places.append(place + ahead + 1)
    return places


def query_figures(places: Sequence[int]) -> list[float]:
    """Figures of a query whose right candidates have these ranks, in the order of FIGURES, as
    fractions.
    """
    total = len(places)
    within = [(n, r) for n, r in enumerate(places, 1) if r <= total]
    hits = [float(places[0] <= k) for k in KS]
    recalls = [sum(place <= k for place in places) / total for k in KS]
    gains = []
    for k in KS:
        found = _dcg([float(place in places) for place in range(1, k + 1)])
        gains.append(found / _dcg([float(place <= total) for place in range(1, k + 1)]))
    whole = math.fsum(n / r for n, r in enumerate(places, 1)) / total
    at_r = math.fsum(n / r for n, r in within) / total
    return [*hits, *recalls, *gains, 1 / places[0], whole, len(within) / total, at_r]


def listed(S: ArrayLike, pairs: Iterable[Pair], ties: str = "pessimistic") -> dict[str, float]:
    """All figures except the skewness, with the listed pairs as the right ones."""
    S = np.asarray(S, np.float64)
    pairs = set(pairs)
    found = {}
    for way, M, matches in (("i2t", S, pairs), ("t2i", S.T, {(j, i) for i, j in pairs})):
        right = [[c for c in range(M.shape[1]) if (q, c) in matches] for q in range(len(M))]
        places = [ranks(M[q], right[q], ties) for q in range(len(M)) if right[q]]
        each = [query_figures(p) for p in places]
        for x, name in enumerate(FIGURES):
            found[f"{way}_{name}"] = 100 * math.fsum(e[x] for e in each) / len(each)
        found[f"{way}_median_rank"] = float(median(p[0] for p in places))
        found[f"{way}_mean_rank"] = math.fsum(p[0] for p in places) / len(places)
    found["rsum"] = rsum(found)
    return found


def resampled(i2t: Sequence[Query], t2i: Sequence[Query], drawn: Iterable[int]) -> dict[str, float]:
    """Figures of the queries of the drawn ids, with multiplicity; nan if none of them has an
    answer.
    """
    found = {}
    drawn = list(drawn)
    for way, queries in (("i2t", i2t), ("t2i", t2i)):
        each = [figures for id_ in drawn for query, figures in queries if query == id_ and figures]
        for x, name in enumerate(FIGURES):
            found[f"{way}_{name}"] = (
                100 * math.fsum(e[x] for e in each) / len(each) if each else math.nan
            )
    found["rsum"] = rsum(found)
    return found


def rsum(found: dict[str, float]) -> float:
    return math.fsum(found[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10))


def kendall(S: ArrayLike, judged: Judged) -> float:
    """τ-b over all pairs of judged pairs: ``(P − Q) / sqrt((n₀ − n₁)(n₀ − n₂))``."""
    S = np.asarray(S, np.float64)
    points = [(float(S[pair]), grade) for pair, grade in _mean_grades(judged).items()]
    difference = untied_scores = untied_grades = 0
    for a in range(len(points)):
        for b in range(a):
            by_score, by_grade = (np.sign(points[a][x] - points[b][x]) for x in (0, 1))
            difference += int(by_score * by_grade)
            untied_scores += int(by_score != 0)
            untied_grades += int(by_grade != 0)
    return difference / math.sqrt(untied_scores * untied_grades)


def ndcg(S: ArrayLike, judged: Judged, k: int = 10) -> tuple[float, float]:
    """nDCG@k of images and of texts as queries, in percent; the gain is the grade minus the lowest,
    0 if not judged.
    """
    S = np.asarray(S, np.float64)
    grades = _mean_grades(judged)
    lowest = min(grades.values())
    gains = np.zeros(S.shape)
    for pair, grade in grades.items():
        gains[pair] = grade - lowest
    found = []
    for M, G in ((S, gains), (S.T, gains.T)):
        values = []
        for scores, gain in zip(M, G, strict=True):
            if max(gain) > 0:
                order = sorted(range(len(scores)), key=lambda c, scores=scores: -scores[c])
                values.append(
                    _dcg([gain[c] for c in order[:k]]) / _dcg(sorted(gain, reverse=True)[:k])
                )
        found.append(100 * math.fsum(values) / len(values))
    return found[0], found[1]


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(g / math.log2(place + 1) for place, g in enumerate(gains, 1))


def _mean_grades(judged: Judged) -> dict[Pair, float]:
    each: dict[Pair, list[float]] = {}
    for image, text, grade in judged:
        each.setdefault((int(image), int(text)), []).append(float(grade))
    return {pair: math.fsum(grades) / len(grades) for pair, grades in each.items()}
