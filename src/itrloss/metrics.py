"""Retrieval metrics, streamed: the score matrix need not exist."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ._arguments import as_optimistic, check_number, check_size
from .similarity import Similarity

if TYPE_CHECKING:
    from .rerank import Reranker

__all__ = [
    "Agreement",
    "Comparison",
    "Judgements",
    "QueryResults",
    "RetrievalResults",
    "agreement",
    "compare",
    "confidence_intervals",
    "default_ids",
    "retrieval_metrics",
    "retrieval_results",
    "skewness",
]

WAYS = ("i2t", "t2i")
RECALLS = (1, 5, 10)
Ties = Literal["pessimistic", "optimistic"]


class Judgements(NamedTuple):
    """Graded relevance of image-text pairs, as people judged it: three 1-D tensors of the same length."""

    images: Tensor  # int64, rows of the score matrix
    texts: Tensor  # int64, columns of it
    grades: Tensor  # any numbers, higher is more relevant


@dataclass(frozen=True)
class QueryResults:
    """What each query of one direction found.

    Attributes:
        ids: (Q,) int64 ids of the queries, as :attr:`itrloss.Similarity.ids` has them: their numbers where it has none.
        ranks: (Q, P) int64 ranks of their right candidates, from 1, ascending, padded with 0.
        top: (Q, k) int64 indices of their best candidates, best first.
        candidates: how many there are to choose from.
    """

    ids: Tensor
    ranks: Tensor
    top: Tensor
    candidates: int

    @property
    def best(self) -> Tensor:
        """(Q,) int64 rank of the best right candidate; 0 where there is none."""
        return self.ranks[:, 0] if self.ranks.shape[1] else self.ranks.new_zeros(len(self.ranks))

    @property
    def positives(self) -> Tensor:
        """(Q,) int64: how many right candidates there are."""
        return (self.ranks > 0).sum(1)

    @property
    def hits(self) -> Tensor:
        """(Q, 3) bool: a right candidate among the first 1, 5, 10."""
        best = self.best[:, None]
        return (best > 0) & (best <= torch.tensor(RECALLS, device=best.device))

    @property
    def r_precision(self) -> Tensor:
        """(Q,) float64: share of right ones among the first R of R right candidates; 0 where there is none."""
        return self._within_r().sum(1).double() / self.positives.clamp_min(1)

    @property
    def average_precision(self) -> Tensor:
        """(Q,) float64 average precision at R; 0 where there is no right candidate."""
        order = torch.arange(1, self.ranks.shape[1] + 1, device=self.ranks.device, dtype=torch.float64)
        precision = torch.where(self._within_r(), order / self.ranks.clamp_min(1), 0.0)
        return precision.sum(1) / self.positives.clamp_min(1)

    @property
    def occurrences(self) -> Tensor:
        """(candidates,) int64: among the first k of how many queries a candidate is."""
        return torch.bincount(self.top.flatten(), minlength=self.candidates)

    def _within_r(self) -> Tensor:
        return (self.ranks > 0) & (self.ranks <= self.positives[:, None])

    def metrics(self) -> dict[str, float]:
        """Of the queries with a right candidate; see :func:`retrieval_metrics`."""
        answered = self.positives > 0
        if not bool(answered.any()):
            raise ValueError("image_ids, text_ids: no query has a matching candidate")
        best = self.best[answered].double()
        recalls = 100 * self.hits[answered].double().mean(0)
        figures = {f"r{k}": float(x) for k, x in zip(RECALLS, recalls, strict=True)}
        figures["median_rank"] = float(best.quantile(0.5))
        figures["r_precision"] = 100 * float(self.r_precision[answered].mean())
        figures["map_at_r"] = 100 * float(self.average_precision[answered].mean())
        figures["skewness"] = float(
            skewness(self.occurrences if bool(answered.all()) else self._of(answered).occurrences)
        )
        return figures

    def _of(self, queries: Tensor) -> QueryResults:
        return QueryResults(self.ids[queries], self.ranks[queries], self.top[queries], self.candidates)


@dataclass(frozen=True)
class RetrievalResults:
    """What every query found, in both directions.

    Attributes:
        i2t, t2i: :class:`QueryResults` of the images asking for texts, and of the texts asking for images.
    """

    i2t: QueryResults
    t2i: QueryResults

    def metrics(self) -> dict[str, float]:
        """See :func:`retrieval_metrics`."""
        found = {f"{way}_{name}": x for way in WAYS for name, x in getattr(self, way).metrics().items()}
        return found | {"rsum": _rsum(found)}

    def rows(self) -> Iterator[dict[str, object]]:
        """A row for each query: its direction, number and id, ranks and precisions, and its best candidate."""
        for way in WAYS:
            side: QueryResults = getattr(self, way)
            columns = (side.ids, side.best, side.positives, side.r_precision, side.average_precision, side.top[:, 0])
            for query, values in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
                yield {"direction": way, "query": query, **dict(zip(_COLUMNS, values, strict=True))}

    def save(self, path: str | Path) -> None:
        """Write :meth:`rows` as CSV with a header."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            self.write(file)

    def write(self, file: IO[str]) -> None:
        """The same into an open text file."""
        writer = csv.DictWriter(file, ["direction", "query", *_COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())


_COLUMNS = ("id", "best_rank", "positives", "r_precision", "average_precision", "first")


def retrieval_metrics(
    scores: Tensor | Similarity,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    t2i_scores: Tensor | None = None,
    reranker: Reranker | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
) -> dict[str, float]:
    """Recalls and their companions, for images asking for texts (``i2t_``) and texts asking for images (``t2i_``).

    Args:
        scores, image_ids, text_ids, t2i_scores, reranker, ties, hubness_k: see :func:`retrieval_results`.
        folds: cut the images into so many consecutive parts, each with its texts, retrieve within each, and average
            every figure over them, as MSCOCO's "5-fold 1K" has it.

    Returns:
        A dictionary. For each direction, ``r1 r5 r10``, the percentage of queries with a right candidate among the
        first k; ``median_rank`` of the best right candidate, from 1; ``r_precision``, the percentage of right ones
        among the first R, R the number of right candidates; ``map_at_r``, mean average precision at R in percent;
        ``skewness`` of the k-occurrences (how often a candidate is among a query's first k), 0 without hubs. And
        ``rsum``, the sum of the six recalls. Queries without a right candidate do not count.

    Raises:
        ValueError: naming the argument, also for nan or infinite scores or embeddings and if no query has a right
            candidate.
    """
    check_size("folds", folds)
    options = {"reranker": reranker, "ties": ties, "hubness_k": hubness_k}
    if folds == 1:
        return retrieval_results(scores, image_ids, text_ids, t2i_scores=t2i_scores, **options).metrics()  # type: ignore[arg-type]
    sim = labelled("scores", scores, image_ids, text_ids)
    other = _of_texts(sim, t2i_scores)
    found = []
    for rows, cols in _folds(sim, folds):
        part = None if other is None else other._part(rows, cols).scores()
        found.append(retrieval_results(sim._part(rows, cols), t2i_scores=part, **options).metrics())  # type: ignore[arg-type]
    return {name: sum(x[name] for x in found) / folds for name in found[0]}


def retrieval_results(
    scores: Tensor | Similarity,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    t2i_scores: Tensor | None = None,
    reranker: Reranker | None = None,
    judgements: Judgements | None = None,
    relevant: float | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
) -> RetrievalResults:
    """What every query found: the figures of :func:`retrieval_metrics` before they are averaged.

    Args:
        scores: (n_images, n_texts), higher is better; or a :class:`itrloss.Similarity` with images as rows, whose
            answers are streamed.
        image_ids, text_ids: integers, equal where image and text match. Both left out: ``n_texts = c * n_images`` means
            c consecutive texts an image. Not beside a ``Similarity``, which has its own.
        t2i_scores: (n_images, n_texts) scores for the text queries, if they differ (as after re-ranking).
        reranker: evaluate these scores re-ranked, without holding the matrix.
        judgements: pairs that people graded; those graded ``relevant`` or higher are right then, not those with equal
            ids, which may then be left out whatever the shape. Queries without such a pair do not count. Not beside a
            reranker.
        relevant: the lowest grade that counts as right, for ``judgements``.
        ties: whether a wrong candidate with the score of a right one is ahead of it (``"pessimistic"``) or behind.
        hubness_k: k of the k-occurrences.

    Raises:
        ValueError: naming the argument, also for nan or infinite scores or embeddings.
    """
    if reranker is not None and t2i_scores is not None:
        raise ValueError("t2i_scores: expected None beside a reranker, which finds both directions' scores itself")
    if hubness_k < 1:
        raise ValueError(f"hubness_k: expected a number of at least 1, got {hubness_k}")
    as_optimistic(ties)
    if judgements is None and relevant is not None:
        raise ValueError(f"relevant: expected None without judgements, got {relevant}")
    if judgements is not None and image_ids is None and text_ids is None and not _fits_convention(scores):
        image_ids, text_ids = _no_ids(scores)
    sim = labelled("scores", scores, image_ids, text_ids).detach()
    other = _of_texts(sim, t2i_scores)
    views = sim, (sim if other is None else other).T
    if judgements is not None:
        if reranker is not None:
            raise ValueError("judgements: expected None beside a reranker; give its scores, and t2i_scores")
        pairs = _relevant(judgements, relevant, sim.shape)
        found = [_judged(view, pairs[way], pairs[1 - way], ties, hubness_k) for way, view in enumerate(views)]
    elif other is not None:
        found = [(view.ranks(ties=ties), view.topk(min(hubness_k, view.shape[1])).indices) for view in views]
    elif reranker is not None:
        found = reranker._ranked(sim, hubness_k, ties)
    else:
        found = sim.both._ranked(hubness_k, ties=ties)
    ids = (torch.arange(n, device=sim.device) if x is None else x for x, n in zip(sim.ids, sim.shape, strict=True))
    i2t, t2i = (QueryResults(i, *f, view.shape[1]) for i, f, view in zip(ids, found, views, strict=True))
    return RetrievalResults(i2t, t2i)


def default_ids(n_images: int, n_texts: int) -> tuple[Tensor, Tensor]:
    """Ids by the field's convention: ``n_texts = c * n_images`` texts, c consecutive ones an image."""
    if n_texts % n_images:
        raise ValueError(
            f"image_ids, text_ids: needed for {n_images} images and {n_texts} texts, "
            "which is not a whole number of texts an image (images are the rows)"
        )
    images = torch.arange(n_images)
    return images, images.repeat_interleave(n_texts // n_images)


def skewness(counts: Tensor) -> Tensor:
    """Third standardised moment of ``counts`` (1-D, any dtype) as a 0-dim tensor; 0 if they are all equal."""
    x = counts.double()
    x = x - x.mean()
    variance = x.square().mean()
    return torch.where(variance > 0, (x**3).mean() / variance**1.5, 0.0)


# ------------------------------------------------------------------------------------------------- uncertainty


class Comparison(NamedTuple):
    """A figure of one model less that of another, in the figure's unit."""

    difference: float
    low: float  # of the confidence interval
    high: float
    p_value: float  # two-sided: how probable so large a difference is if there is none


def confidence_intervals(
    results: RetrievalResults, *, level: float = 0.95, samples: int = 2000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bootstrap confidence intervals of recalls, RSUM, R-Precision and mAP@R: ``{name: (low, high)}``.

    Images are drawn with replacement, each with its texts: captions of one picture are no independent witnesses. More
    precisely, what is drawn is ids.

    Args:
        results: of :func:`retrieval_results`.
        level: of confidence; the interval leaves ``(1 - level) / 2`` of the samples out at either end.
        samples: how often is drawn.
        seed: of the draws.

    Raises:
        ValueError: naming the argument, also if no query has a right candidate.
    """
    names, (sums,) = _sums_of_ids(results)
    found = _resampled(sums, samples, seed)
    low, high = _interval(found, level)
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


def compare(
    results: RetrievalResults,
    others: RetrievalResults,
    *,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> dict[str, Comparison]:
    """How much better the first model is than the other on the same queries, figure by figure: a paired bootstrap.

    Both are drawn the same images, with their texts, each time, so that what makes an image hard for both cancels out.

    Args:
        results, others: of :func:`retrieval_results`, of the same images and texts in the same order.
        level, samples, seed: see :func:`confidence_intervals`.

    Raises:
        ValueError: if the queries differ, or none has a right candidate.
    """
    names, (first, second) = _sums_of_ids(results, others)
    together = _resampled(torch.stack([first, second]), samples, seed)
    found = together[0] - together[1]
    valid = found.isfinite().sum(0)  # a sample of unanswered queries alone has no figures
    exact = _figures(first.sum(0)) - _figures(second.sum(0))
    low, high = _interval(found, level)
    tail = torch.minimum((found <= 0).sum(0), (found >= 0).sum(0))
    p = (2 * (tail + 1).double() / (valid + 1)).clamp_max(1.0)
    return {
        name: Comparison(*(float(x) for x in values)) for name, *values in zip(names, exact, low, high, p, strict=True)
    }


_FIGURES = (*(f"r{k}" for k in RECALLS), "r_precision", "map_at_r")


def _sums_of_ids(*runs: RetrievalResults) -> tuple[list[str], list[Tensor]]:
    """Names of figures, and of each run (ids, 2, 6): sums of five figures over an id's queries, and their number."""
    for run in runs[1:]:
        for way in WAYS:
            mine, theirs = (getattr(x, way) for x in (runs[0], run))
            same = torch.equal(mine.ids, theirs.ids) and torch.equal(mine.positives > 0, theirs.positives > 0)
            if not same:
                raise ValueError(f"others: expected results of the same queries; those of {way} differ")
    sides = [getattr(runs[0], way).ids for way in WAYS]
    unique, which = torch.unique(torch.cat(sides), return_inverse=True)
    found = []
    for run in runs:
        sums = torch.zeros(len(unique), len(WAYS), len(_FIGURES) + 1, dtype=torch.float64, device=unique.device)
        for w, (way, index) in enumerate(zip(WAYS, which.split([len(x) for x in sides]), strict=True)):
            side: QueryResults = getattr(run, way)
            answered = (side.positives > 0).double()
            values = [*side.hits.double().unbind(1), side.r_precision, side.average_precision, answered]
            sums[:, w].index_add_(0, index, torch.stack(values, 1) * answered[:, None])
        if not bool(sums[..., -1].any()):
            raise ValueError("results: no query has a right candidate")
        found.append(sums)
    return [f"{way}_{name}" for way in WAYS for name in _FIGURES] + ["rsum"], found


def _figures(sums: Tensor) -> Tensor:
    """(…, 2, 6) sums -> (…, 11) percentages."""
    means = 100 * sums[..., :-1] / sums[..., -1:]
    rsum = means[..., : len(RECALLS)].sum((-2, -1))
    return torch.cat([means.flatten(-2), rsum[..., None]], -1)


def _resampled(sums: Tensor, samples: int, seed: int) -> Tensor:
    """(…, ids, 2, 6) -> (…, samples, 11), of as many ids drawn with replacement."""
    check_size("samples", samples)
    n = sums.shape[-3]
    generator = torch.Generator().manual_seed(seed)
    flat, parts = sums.flatten(-2), []
    for start in range(0, samples, 64):
        count = min(64, samples - start)
        drawn = torch.randint(n, (count, n), generator=generator)
        weights = torch.zeros(count, n, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(count, n).double())
        parts.append(_figures((weights.to(sums.device) @ flat).unflatten(-1, sums.shape[-2:])))
    return torch.cat(parts, -2)


def _interval(found: Tensor, level: float) -> tuple[Tensor, Tensor]:
    check_number("level", level, positive=True)
    if level >= 1:
        raise ValueError(f"level: expected a number below 1, got {level}")
    low, high = found.nanquantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=found.dtype), dim=0)
    return low, high


# -------------------------------------------------------------------------------------------------- judgements


class Agreement(NamedTuple):
    """How scores agree with grades."""

    tau: float  # Kendall's tau-b over all judged pairs: 1 the same order, -1 the opposite one
    i2t_ndcg: float  # in percent
    t2i_ndcg: float


def agreement(scores: Tensor | Similarity, judgements: Judgements, *, k: int = 10) -> Agreement:
    r"""Kendall's τ-b of scores and grades, and the normalised discounted cumulative gain at k.

    .. math::
        \tau_b = \frac{P - Q}{\sqrt{(n_0 - n_1)(n_0 - n_2)}}, \qquad
        \mathrm{nDCG@}k = \frac{\sum_{l \le k} (g_l - g_{min}) / \log_2 (l + 1)}{\text{the same, best first}}

    with the number of concordant pairs of judgements P and of discordant ones Q, of all pairs n₀, and of those tied in
    score n₁ or in grade n₂. :math:`g_l` is the grade of the candidate at rank l, or the lowest one if it was not
    judged; queries with nothing above the lowest grade do not count. Equal scores rank in no particular order.

    Args:
        scores: (n_images, n_texts), or a ``Similarity``.
        judgements: at least two different grades. A pair that is there several times has the mean of its grades.
        k: how many candidates of a query are looked at.
    """
    sim = labelled("scores", scores, *_no_ids(scores)).detach()
    images, texts, grades = _averaged(judgements, sim.shape)
    check_size("k", k)
    gains = (grades - grades.amin()).double()
    if not bool(gains.any()):
        raise ValueError("judgements: expected at least two different grades")
    values = sim.pair_scores(images.to(sim.device), texts.to(sim.device)).double().cpu()
    ndcg = [_ndcg(sim, images, texts, gains, k), _ndcg(sim.T, texts, images, gains, k)]
    return Agreement(_kendall(values, grades), *ndcg)


def _no_ids(scores: Tensor | Similarity) -> tuple[Tensor | None, Tensor | None]:
    """Judgements take the place of ids, so that any shape goes."""
    if isinstance(scores, Tensor) and scores.dim() == 2:
        images, texts = torch.arange(sum(scores.shape)).split(tuple(scores.shape))
        return images, texts
    return None, None


def _fits_convention(scores: Tensor | Similarity) -> bool:
    matrix = isinstance(scores, Tensor) and scores.dim() == 2 and scores.numel()
    return not matrix or scores.shape[1] % scores.shape[0] == 0


def _averaged(judgements: Judgements, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Checked, on the CPU; each pair once."""
    images, texts, grades = judgements
    for name, x, size in (("images", images, shape[0]), ("texts", texts, shape[1])):
        integers = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if not integers or x.dim() != 1:
            raise TypeError(f"judgements.{name}: expected a 1-D tensor of integers, got {_seen(x)}")
        if len(x) == 0 or len(x) != len(images):
            raise ValueError(f"judgements.{name}: expected as many as there are images, above 0; got {len(x)}")
        if int(x.amin()) < 0 or int(x.amax()) >= size:
            got = f"{int(x.amin())} to {int(x.amax())}"
            raise ValueError(f"judgements.{name}: expected numbers from 0 to {size - 1}, got {got}")
    if not isinstance(grades, Tensor) or grades.shape != images.shape:
        raise ValueError(f"judgements.grades: expected a tensor of shape {tuple(images.shape)}, got {_seen(grades)}")
    if not bool(grades.double().isfinite().all()):
        raise ValueError("judgements.grades: expected finite numbers")
    images, texts, values = images.cpu().long(), texts.cpu().long(), grades.detach().cpu().double()
    pairs, which, count = torch.unique(images * shape[1] + texts, return_inverse=True, return_counts=True)
    none = torch.zeros(len(pairs), dtype=torch.float64)
    lowest, highest = (none.scatter_reduce(0, which, values, way, include_self=False) for way in ("amin", "amax"))
    means = none.index_add(0, which, values) / count
    return pairs // shape[1], pairs % shape[1], means.clamp(lowest, highest)  # that of equal grades is that very grade


def _seen(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _relevant(judgements: Judgements, relevant: float | None, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    if relevant is None:
        raise ValueError("relevant: expected the lowest grade that counts as right, beside judgements; got None")
    images, texts, grades = _averaged(judgements, shape)
    kind = judgements.grades.dtype  # 0.7 as float32 is less than 0.7: the limit is rounded as the grades are
    right = grades >= (float(torch.tensor(relevant, dtype=kind)) if kind.is_floating_point else relevant)
    if not bool(right.any()):
        raise ValueError(f"relevant: no pair has a grade of {relevant} or above")
    return images[right], texts[right]


def _judged(sim: Similarity, rows: Tensor, cols: Tensor, ties: str, k: int) -> tuple[Tensor, Tensor]:
    """Ranks of listed right candidates as of ``Similarity.ranks``, and the k best."""
    from .rerank.base import blocks

    order = rows.argsort(stable=True)
    rows, cols = rows[order].to(sim.device), cols[order].to(sim.device)
    count = torch.bincount(rows, minlength=sim.shape[0])
    width = int(count.amax())
    place = torch.arange(len(rows), device=rows.device) - (count.cumsum(0) - count)[rows]
    ranks, tops = [], []
    for part, scores in blocks(sim):
        tops.append(scores.topk(min(k, scores.shape[1])).indices)
        mine = (rows >= part.start) & (rows < part.stop)
        row, col = rows[mine] - part.start, cols[mine]
        right = torch.full((len(scores), width), -torch.inf, dtype=scores.dtype, device=scores.device)
        right[row, place[mine]] = scores[row, col]
        right = right.sort(1, descending=True).values
        scores[row, col] = -torch.inf
        ahead = scores.shape[1] - torch.searchsorted(scores.sort(1).values, right, right=ties == "optimistic")
        found = ahead + torch.arange(1, width + 1, device=rows.device)
        ranks.append(torch.where(torch.arange(width, device=rows.device) < count[part, None], found, 0))
    return torch.cat(ranks), torch.cat(tops)


def _ndcg(sim: Similarity, rows: Tensor, cols: Tensor, gains: Tensor, k: int) -> float:
    n, m = sim.shape
    k = min(k, m)
    pairs, order = (rows * m + cols).sort()
    gains = gains[order]
    asked = torch.arange(n)[:, None] * m + sim.topk(k).indices.cpu()
    where = torch.searchsorted(pairs, asked).clamp_max(len(pairs) - 1)
    found = torch.where(pairs[where] == asked, gains[where], 0.0)
    weights = 1 / torch.log2(torch.arange(2, k + 2, dtype=torch.float64))
    best_first = torch.argsort(gains, descending=True, stable=True)
    row = (pairs // m)[best_first]
    grouped = row.argsort(stable=True)
    row, ordered = row[grouped], gains[best_first][grouped]
    count = torch.bincount(row, minlength=n)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    within = place < k
    ideal = torch.zeros(n, dtype=torch.float64).index_add_(0, row[within], ordered[within] * weights[place[within]])
    counted = ideal > 0
    return 100 * float(((found * weights).sum(1)[counted] / ideal[counted]).mean())


def _kendall(scores: Tensor, grades: Tensor) -> float:
    """τ-b. In the order of grades, and of scores where these are equal, the discordant scores are those that fall."""
    n = len(scores)
    score, grade = (x.unique(return_inverse=True)[1] for x in (scores, grades))
    both = grade * n + score
    tied_score, tied_grade, tied_both = (_pairs(x.unique(return_counts=True)[1]) for x in (score, grade, both))
    total = n * (n - 1) // 2
    falling = _falling(score[both.argsort()])
    rising = total - tied_score - tied_grade + tied_both - falling
    scale = ((total - tied_score) * (total - tied_grade)) ** 0.5
    return (rising - falling) / scale if scale else 0.0


def _pairs(counts: Tensor) -> int:
    return int((counts * (counts - 1) // 2).sum())


def _falling(x: Tensor) -> int:
    """Pairs ``x_i > x_j``, i < j, of numbers from 0 to below ``len(x)``; counted between halves as in a merge sort."""
    n, width, found = len(x), 1, 0
    place = torch.arange(n)
    while width < n:
        block, later = place // (2 * width), place // width % 2 == 1
        keys = block * n + x
        earlier = keys[~later].sort().values
        not_above = torch.searchsorted(earlier, keys[later], right=True)
        found += int((torch.searchsorted(earlier, (block[later] + 1) * n) - not_above).sum())
        width *= 2
    return found


# ------------------------------------------------------------------------------------------------------ shared


def labelled(name: str, scores: Tensor | Similarity, image_ids: Tensor | None, text_ids: Tensor | None) -> Similarity:
    """Scores with ids, by the field's convention where they are left out; errors name ``name`` and the ids."""
    if isinstance(scores, Similarity):
        if image_ids is not None or text_ids is not None:
            raise ValueError("image_ids, text_ids: expected None beside a Similarity, which has its own")
        scores.check_finite()
        return scores
    if image_ids is None and text_ids is None and isinstance(scores, Tensor) and scores.dim() == 2:
        image_ids, text_ids = default_ids(*scores.shape) if scores.numel() else (None, None)
    try:
        return Similarity.from_scores(scores, image_ids, text_ids, check_finite=True)
    except (TypeError, ValueError) as error:
        renamed = str(error).replace("row_ids", "image_ids").replace("col_ids", "text_ids")
        raise type(error)(renamed.replace("scores:", f"{name}:", 1)) from None


def _of_texts(sim: Similarity, scores: Tensor | None) -> Similarity | None:
    """The scores for the text queries, checked."""
    if scores is None:
        return None
    if not isinstance(scores, Tensor):
        raise TypeError(f"t2i_scores: expected a tensor of shape {sim.shape}, got {type(scores).__name__}")
    if tuple(scores.shape) != sim.shape:
        raise ValueError(f"t2i_scores: expected shape {sim.shape} like scores, got {tuple(scores.shape)}")
    return labelled("t2i_scores", scores, *sim.ids)


def _folds(sim: Similarity, folds: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and columns of each: consecutive images, and the texts with their ids."""
    n, m = sim.shape
    if n % folds:
        raise ValueError(f"folds: expected a divisor of the {n} images, got {folds}")
    image_ids, text_ids = (torch.arange(s) if x is None else x for x, s in zip(sim.ids, (n, m), strict=True))
    for rows in torch.arange(n, device=image_ids.device).split(n // folds):
        cols = torch.isin(text_ids, image_ids[rows]).nonzero().squeeze(1)
        if len(cols) == 0:
            raise ValueError(f"folds: images {int(rows[0])} to {int(rows[-1])} are a part without a text")
        yield rows, cols


def _rsum(found: dict[str, float]) -> float:
    return sum(found[f"{way}_r{k}"] for way in WAYS for k in RECALLS)
