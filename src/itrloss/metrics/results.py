"""Results of each query, before they are averaged, and their files and data frames.

What papers on image-text retrieval call R@K is the *hit rate*: whether any right candidate is among
the first K. Here it is named so, ``r1``. The *recall* of information retrieval, the share of right
candidates among the first K, is ``recall_at_1``. With one of five captions found at once, R@1 is
100 and the recall at 1 is 20.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..checks import as_size
from ..engine.ranking import Ranking
from ..files import written
from ..similarity import NO_ID
from .judgements import Judgements

if TYPE_CHECKING:
    from pandas import DataFrame

WAYS = ("i2t", "t2i")
RECALLS = (1, 5, 10)
RECALL_NAMES = [f"{way}_r{k}" for way in WAYS for k in RECALLS]
Ks = Sequence[int]
RankedPart = tuple[Ranking, Tensor, Tensor]  # with the indices of its queries and its candidates
_COLUMNS = (
    "direction",
    "query",
    "id",
    "best_rank",
    "positives",
    "r_precision",
    "average_precision_at_r",
    "first",
)


def as_ks(ks: Ks | Tensor | np.ndarray) -> tuple[int, ...]:
    """Return distinct numbers of first candidates; raise an error unless they are 1 or more."""
    if isinstance(ks, (Tensor, np.ndarray)):
        ks = ks.tolist()
    if isinstance(ks, str) or not isinstance(ks, Sequence):
        raise TypeError(f"ks: expected numbers such as (1, 5, 10), got {ks!r}")
    if not len(ks):
        raise ValueError("ks: expected at least one number, got none")
    return tuple(dict.fromkeys([as_size("ks", k) for k in ks]))


@dataclass(frozen=True, repr=False)
class QueryResults:
    """The results of each query of one direction.

    Attributes:
        ids: (Q,) int64 ids of the queries. Where there are none, an image has its index, and a text
            that of the first image that it matches; :data:`itrloss.NO_ID` for a query that does not
            exist.
        ranks: (Q, P) int64 ranks of each query's positives, from 1, ascending, padded with 0.
        top: (Q, k) int64 indices of each query's best candidates, best first, padded with -1.
        candidates: number of candidates.
        grades: (Q, P) float64 grades of the positives at these ranks, 0 for none; None: all 1.
        missing: how many of the candidates do not exist, and are nowhere in ``top``.
    """

    ids: Tensor
    ranks: Tensor
    top: Tensor
    candidates: int
    grades: Tensor | None = None
    missing: int = 0

    def __repr__(self) -> str:
        return f"QueryResults({len(self.ids)} queries, {self.candidates} candidates)"

    @cached_property
    def exists(self) -> Tensor:
        """The (Q,) bool: whether a query exists."""
        return self.ids != NO_ID

    @cached_property
    def best(self) -> Tensor:
        """The (Q,) int64 rank of each query's best positive; 0 where there is none."""
        return self.ranks[:, :1].sum(1)

    @cached_property
    def positives(self) -> Tensor:
        """The (Q,) int64 number of positives of each query."""
        return (self.ranks > 0).sum(1)

    @property
    def unmatched(self) -> int:
        """The number of queries without a positive, which do not count."""
        return int((self.exists & (self.positives == 0)).sum())

    def part(self, queries: Tensor, candidates: Tensor) -> QueryResults:
        """Return the results of some queries, whose candidates were these."""
        return replace(
            self,
            ids=self.ids[queries],
            ranks=self.ranks[queries],
            top=self.top[queries],
            grades=None if self.grades is None else self.grades[queries],
            missing=self.candidates - len(candidates),
        )

    @property
    def occurrences(self) -> Tensor:
        """The (candidates,) int64 k-occurrences: how many queries have a candidate in their top."""
        return torch.bincount(self.top[self.top >= 0], minlength=self.candidates)

    def per_query(self, ks: Ks = RECALLS) -> dict[str, Tensor]:
        """Return the (Q,) float64 values of metrics that are means over queries, by name, from 0
        to 1; and ``rsum``, the sum of R@1, R@5 and R@10. They are 0 for a query without positives.

        The gain of a positive is its grade. See :func:`retrieval_metrics`.
        """
        ranks = self.ranks.double().masked_fill(self.ranks == 0, torch.inf)
        first = ranks[:, :1]  # none if no query has a positive
        total = self.positives.clamp_min(1)
        gains = ranks.isfinite().double() if self.grades is None else self.grades
        place = torch.arange(2, ranks.shape[1] + 2, device=ranks.device)
        ideal = gains.sort(dim=1, descending=True).values / place.double().log2()
        discounted = gains / (ranks + 1).log2()
        hits = {}
        recalls = {}
        ndcg = {}
        for k in ks:
            within = ranks <= k
            hits[f"r{k}"] = (first <= k).double().sum(1)
            recalls[f"recall_at_{k}"] = within.double().sum(1) / total
            gained = torch.where(within, discounted, 0.0).sum(1)
            most = ideal[:, :k].sum(1)
            ndcg[f"ndcg_at_{k}"] = torch.where(most > 0, gained / most, 0.0)
        rsum = torch.stack([(first <= k).double().sum(1) for k in RECALLS]).sum(0)
        return hits | recalls | ndcg | precisions(ranks, total) | {"rsum": rsum}

    def metrics(self, ks: Ks = RECALLS) -> dict[str, float]:
        """Return the metrics of this direction over queries with positives, and their part of the
        RSUM.

        See :func:`retrieval_metrics`.
        """
        matched = self.positives > 0
        if not bool(matched.any()):
            raise ValueError("image_ids, text_ids: no query has a matching candidate")
        values = self.per_query(ks)
        means = 100 * torch.stack(list(values.values()))[:, matched].mean(1)
        metrics = dict(zip(values, means.tolist(), strict=True))
        ranks = self.best[matched].cpu()
        metrics["median_rank"] = float(np.median(ranks))
        metrics["mean_rank"] = float(ranks.double().mean())
        counts = replace(self, top=self.top[matched]).occurrences
        metrics["skewness"] = float(skewness(counts, self.candidates - self.missing))
        return metrics


@dataclass(frozen=True)
class RetrievalResults:
    """The results of each query, in both directions.

    Attributes:
        i2t, t2i: :class:`QueryResults` of image→text and of text→image.
        folds: the results of each fold, if queries had only the candidates of their fold.
        relevant: the right pairs that were ranked, with their grades; None: they are not known.
    """

    i2t: QueryResults
    t2i: QueryResults
    folds: tuple[RetrievalResults, ...] = ()
    relevant: Judgements | None = None

    @property
    def unmatched_in_words(self) -> str:
        """How many images and texts have no match, in words."""
        counts = []
        for name, own in (("images", self.i2t), ("texts", self.t2i)):
            counts.append(f"{own.unmatched} of {int(own.exists.sum())} {name}")
        return f"{' and '.join(counts)} have no match"

    @property
    def ways(self) -> dict[str, QueryResults]:
        """The results of both directions by name: ``"i2t"`` and ``"t2i"``."""
        return {"i2t": self.i2t, "t2i": self.t2i}

    def metrics(self, ks: Ks = RECALLS) -> dict[str, float]:
        """Return the metrics of both directions, see :func:`retrieval_metrics`."""
        ks = as_ks(ks)
        if self.folds:
            parts = [part.metrics(ks) for part in self.folds]
            return {name: math.fsum(part[name] for part in parts) / len(parts) for name in parts[0]}
        metrics = {}
        for way, side in self.ways.items():
            for name, value in side.metrics(ks).items():
                metrics[f"{way}_{name}"] = value
        metrics["rsum"] = metrics.pop("i2t_rsum") + metrics.pop("t2i_rsum")
        return metrics

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each query that exists.

        It has the query's direction, index, id, best rank, number of positives and precisions, and
        its best candidate, -1 if it has none.
        """
        for way, side in self.ways.items():
            shares = side.per_query()
            precisions = shares["r_precision"], shares["map_at_r"]
            queries = side.exists.nonzero()[:, 0]
            columns = (side.ids, side.best, side.positives, *precisions, side.top[:, 0])
            values = [column[queries].tolist() for column in columns]
            for row in zip(queries.tolist(), *values, strict=True):
                yield dict(zip(_COLUMNS, (way, *row), strict=True))

    def to_frame(self) -> DataFrame:
        """Return :meth:`rows` as a pandas data frame."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ImportError(
                "to_frame needs pandas: install itrloss with the extra 'metrics'"
            ) from None
        return DataFrame(list(self.rows()))

    def save(self, path: str | Path) -> None:
        """Write :meth:`rows` as CSV with a header to a new file."""
        with written(path) as file:
            self.write(file)

    def write(self, file: IO[str]) -> None:
        """Write :meth:`rows` as CSV with a header to an open text file."""
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())


def precisions(ranks: Tensor, total: Tensor) -> dict[str, Tensor]:
    """Return the (Q,) values of metrics of all places by name, of the ranks (Q, P) of positives,
    infinite for none, and their numbers (Q,).
    """
    number = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)  # of the right ones
    precision = number / ranks
    within_r = ranks <= total[:, None]
    return {
        "mrr": precision[:, :1].sum(1),
        "map": precision.sum(1) / total,
        "r_precision": within_r.double().sum(1) / total,
        "map_at_r": torch.where(within_r, precision, 0.0).sum(1) / total,
    }


def joined(parts: Sequence[RankedPart], ids: Tensor, size: int) -> QueryResults:
    """Return the results of all queries (ids (Q,)) of one direction, from the rankings of parts.

    ``size``: number of candidates, with those that are in no part.
    """
    most = max(ranking.ranks.shape[1] for ranking, _, _ in parts)  # positives of a query
    k = max(ranking.top.indices.shape[1] for ranking, _, _ in parts)
    ranks = ids.new_zeros(len(ids), most)
    top = ids.new_full((len(ids), k), -1)
    grades = None
    missing = size
    for ranking, queries, candidates in parts:
        best = ranking.top.indices
        top[queries, : best.shape[1]] = candidates[best].masked_fill(best < 0, -1)
        ranks[queries, : ranking.ranks.shape[1]] = ranking.ranks
        missing -= len(candidates)
        if ranking.grades is not None:  # of a single part, as those of folds are all 1
            grades = torch.zeros_like(ranks, dtype=ranking.grades.dtype)
            grades[queries] = ranking.grades
    return QueryResults(ids, ranks, top, size, grades, missing)


def skewness(counts: Tensor, existing: int | Tensor | None = None) -> Tensor:
    """Return the third standardised moment of counts: 0 if all are equal.

    Args:
        counts: (N,) numbers of any dtype.
        existing: how many of them are counted, the largest ones: those of candidates that do not
            exist are 0, and left out. None: all.

    Returns:
        a 0-dim float64 tensor.
    """
    counts = counts.double()
    if existing is None:
        existing = len(counts)
    ordered = counts.sort(descending=True).values
    counted = torch.arange(len(counts), device=counts.device) < existing
    x = torch.where(counted, ordered - ordered.sum() / existing, 0.0)
    variance = x.square().sum() / existing
    third = (x**3).sum() / existing
    return torch.where(variance > 0, third / variance**1.5, 0.0)


def check_systems(name: str, systems: object) -> None:
    """Raise a TypeError unless there are results for each name."""
    expected = "results of retrieval_results for each name, as in {'model': results}"
    if not isinstance(systems, Mapping):
        raise TypeError(f"{name}: expected {expected}, got {type(systems).__name__}")
    for system, x in systems.items():
        if not isinstance(x, RetrievalResults):
            raise TypeError(f"{name}: expected {expected}, got {type(x).__name__} for {system!r}")


def save_trec(results: RetrievalResults, folder: str | Path, tag: str = "itrloss") -> None:
    """Write run and qrels files for trec_eval and similar tools.

    They are named ``i2t.run``, ``i2t.qrels``, ``t2i.run`` and ``t2i.qrels``. Images and texts are
    named by their indices: ``image0``, ``text12``. A run lists the stored best candidates of each
    query, ``hubness_k`` of them; for metrics of all places, such as MRR, store all. Its scores are
    whole numbers that fall from place to place, in the order of the ranks: any tool computes the
    metrics of the results, whatever it does with equal scores. Qrels have the right pairs that were
    ranked, with their grades.

    Args:
        results: from :func:`retrieval_results`.
        folder: where they are written; it is made if it does not exist.
        tag: the name of the run, one word.

    Raises:
        ValueError: for a tag of another number of words, as the format separates its columns by
            blanks; for grades that are no whole numbers, which the format has no place for.
    """
    if not isinstance(results, RetrievalResults):
        got = type(results).__name__
        raise TypeError(f"results: expected those of retrieval_results, got {got}")
    if tag.split() != [tag]:
        raise ValueError(f"tag: expected a word without blanks, got {tag!r}")
    if results.relevant is None:
        raise ValueError("results: expected their right pairs (relevant), got None")
    images, texts, grades = results.relevant
    if not bool((grades == grades.long()).all()):
        raise ValueError("results: expected grades that are whole numbers, got others")
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = {}
    for way, query, candidate in (("i2t", "image", "text"), ("t2i", "text", "image")):
        pairs = (images, texts) if way == "i2t" else (texts, images)
        files[f"{way}.run"] = _run_lines(results.ways[way].top, query, candidate, tag)
        files[f"{way}.qrels"] = [
            f"{query}{q} 0 {candidate}{c} {grade}\n"
            for q, c, grade in torch.stack([*pairs, grades.long()], 1).tolist()
        ]
    with contextlib.ExitStack() as complete:  # all four files, or none
        for name, lines in files.items():
            file = complete.enter_context(written(Path(folder, name)))
            file.writelines(lines)
            file.flush()


def _run_lines(top: Tensor, query: str, candidate: str, tag: str) -> list[str]:
    """Return the lines of a run with the (Q, k) best candidates of each query."""
    k = top.shape[1]
    lines = []
    for q, best in enumerate(top.tolist()):
        for place, c in enumerate(best):
            if c >= 0:
                lines.append(f"{query}{q} Q0 {candidate}{c} {place + 1} {k - place} {tag}\n")
    return lines
