"""Results of each query, before they are averaged."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from pandas import DataFrame

WAYS = ("i2t", "t2i")
RECALLS = (1, 5, 10)
_COLUMNS = ("id", "best_rank", "positives", "r_precision", "average_precision", "first")


@dataclass(frozen=True)
class QueryResults:
    """The results of each query of one direction.

    Attributes:
        ids: (Q,) int64 ids of the queries; their indices if :attr:`itrloss.Similarity.ids` has none.
        ranks: (Q, P) int64 ranks of each query's positives, from 1, ascending, padded with 0.
        top: (Q, k) int64 indices of each query's best candidates, best first.
        candidates: number of candidates.
    """

    ids: Tensor
    ranks: Tensor
    top: Tensor
    candidates: int

    @property
    def best(self) -> Tensor:
        """The (Q,) int64 rank of each query's best positive; 0 where there is none."""
        return self.ranks[:, 0] if self.ranks.shape[1] else self.ranks.new_zeros(len(self.ranks))

    @property
    def positives(self) -> Tensor:
        """The (Q,) int64 number of positives of each query."""
        return (self.ranks > 0).sum(1)

    @property
    def hits(self) -> Tensor:
        """The (Q, 3) bool: whether a positive is among the first 1, 5, 10."""
        best = self.best[:, None]
        return (best > 0) & (best <= torch.tensor(RECALLS, device=best.device))

    @property
    def r_precision(self) -> Tensor:
        """The (Q,) float64 share of positives among the first R, R the number of positives; 0 if R is 0."""
        return self._within_r().sum(1).double() / self.positives.clamp_min(1)

    @property
    def average_precision(self) -> Tensor:
        """The (Q,) float64 average precision at R; 0 if R is 0."""
        order = torch.arange(1, self.ranks.shape[1] + 1, device=self.ranks.device, dtype=torch.float64)
        precision = torch.where(self._within_r(), order / self.ranks.clamp_min(1), 0.0)
        return precision.sum(1) / self.positives.clamp_min(1)

    @property
    def occurrences(self) -> Tensor:
        """The (candidates,) int64 k-occurrences: the number of queries whose first k contain a candidate."""
        return torch.bincount(self.top.flatten(), minlength=self.candidates)

    def _within_r(self) -> Tensor:
        return (self.ranks > 0) & (self.ranks <= self.positives[:, None])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this direction, over queries with positives; see :func:`retrieval_metrics`."""
        answered = self.positives > 0
        if not bool(answered.any()):
            raise ValueError("image_ids, text_ids: no query has a matching candidate")
        best = self.best[answered]
        recalls = 100 * self.hits[answered].double().mean(0)
        # torch.quantile takes at most 16 million numbers.
        ordered, n = best.sort().values, len(best)
        return {
            **{f"r{k}": float(x) for k, x in zip(RECALLS, recalls, strict=True)},
            "median_rank": float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2,
            "r_precision": 100 * float(self.r_precision[answered].mean()),
            "map_at_r": 100 * float(self.average_precision[answered].mean()),
            "skewness": float(skewness(torch.bincount(self.top[answered].flatten(), minlength=self.candidates))),
        }


@dataclass(frozen=True)
class RetrievalResults:
    """The results of each query, in both directions.

    Attributes:
        i2t, t2i: :class:`QueryResults` of image→text and of text→image.
        folds: the results of each fold, if queries had only the candidates of their fold.
    """

    i2t: QueryResults
    t2i: QueryResults
    folds: tuple[RetrievalResults, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of both directions, see :func:`retrieval_metrics`."""
        if self.folds:
            parts = [part.metrics() for part in self.folds]
            return {name: math.fsum(part[name] for part in parts) / len(parts) for name in parts[0]}
        metrics = {f"{way}_{name}": x for way in WAYS for name, x in getattr(self, way).metrics().items()}
        return metrics | {"rsum": math.fsum(metrics[f"{way}_r{k}"] for way in WAYS for k in RECALLS)}

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each query: its direction, index and id, ranks and precisions, and its best candidate."""
        for way in WAYS:
            side: QueryResults = getattr(self, way)
            columns = (side.ids, side.best, side.positives, side.r_precision, side.average_precision, side.top[:, 0])
            for query, values in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
                yield {"direction": way, "query": query, **dict(zip(_COLUMNS, values, strict=True))}

    def save(self, path: str | Path) -> None:
        """Write :meth:`rows` as CSV with a header to a new file."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            self.write(file)

    def to_frame(self) -> DataFrame:
        """Return :meth:`rows` as a pandas data frame."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ImportError("to_frame needs pandas: pip install 'itrloss[metrics]'") from None
        return DataFrame(list(self.rows()))

    def write(self, file: IO[str]) -> None:
        """Write :meth:`rows` as CSV with a header to an open text file."""
        writer = csv.DictWriter(file, ["direction", "query", *_COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())


def join_folds(
    folds: list[RetrievalResults], parts: list[tuple[Tensor, Tensor]], ids: Sequence[Tensor]
) -> RetrievalResults:
    """Return the results of all queries, from those of each fold, its image and text indices, and the ids of all."""
    images, texts = (list(x) for x in zip(*parts, strict=True))
    i2t = _join_queries([fold.i2t for fold in folds], images, texts, ids)
    return RetrievalResults(i2t, _join_queries([fold.t2i for fold in folds], texts, images, ids[::-1]), tuple(folds))


def _join_queries(
    folds: list[QueryResults], queries: list[Tensor], candidates: list[Tensor], ids: Sequence[Tensor]
) -> QueryResults:
    indices, order = torch.cat(queries).sort(stable=True)
    width, k = max(x.ranks.shape[1] for x in folds), min(x.top.shape[1] for x in folds)
    ranks = torch.cat([pad(x.ranks, (0, width - x.ranks.shape[1])) for x in folds])
    top = torch.cat([index[x.top[:, :k]] for x, index in zip(folds, candidates, strict=True)])
    return QueryResults(ids[0][indices], ranks[order], top[order], len(ids[1]))


def skewness(counts: Tensor) -> Tensor:
    """Return the third standardised moment of 1-D ``counts`` of any dtype, 0-dim float64; 0 if all are equal."""
    x = counts.double()
    x = x - x.mean()
    variance = x.square().mean()
    return torch.where(variance > 0, (x**3).mean() / variance**1.5, 0.0)
