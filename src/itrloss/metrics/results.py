"""What every query found, before it is averaged."""

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
        return self._occurrences(slice(None))

    def _occurrences(self, queries: Tensor | slice) -> Tensor:
        return torch.bincount(self.top[queries].flatten(), minlength=self.candidates)

    def _within_r(self) -> Tensor:
        return (self.ranks > 0) & (self.ranks <= self.positives[:, None])

    def metrics(self) -> dict[str, float]:
        """Of the queries with a right candidate; see :func:`retrieval_metrics`."""
        answered = self.positives > 0
        if not bool(answered.any()):
            raise ValueError("image_ids, text_ids: no query has a matching candidate")
        best = self.best[answered]
        recalls = 100 * self.hits[answered].double().mean(0)
        figures = {f"r{k}": float(x) for k, x in zip(RECALLS, recalls, strict=True)}
        figures["median_rank"] = _median(best)
        figures["r_precision"] = 100 * float(self.r_precision[answered].mean())
        figures["map_at_r"] = 100 * float(self.average_precision[answered].mean())
        figures["skewness"] = float(skewness(self._occurrences(answered)))
        return figures


@dataclass(frozen=True)
class RetrievalResults:
    """What every query found, in both directions.

    Attributes:
        i2t, t2i: :class:`QueryResults` of the images asking for texts, and of the texts asking for images.
        folds: the same of each part, if queries only had the candidates of their part.
    """

    i2t: QueryResults
    t2i: QueryResults
    folds: tuple[RetrievalResults, ...] = ()

    def metrics(self) -> dict[str, float]:
        """See :func:`retrieval_metrics`."""
        if self.folds:
            parts = [part.metrics() for part in self.folds]
            return {name: math.fsum(part[name] for part in parts) / len(parts) for name in parts[0]}
        found = {f"{way}_{name}": x for way in WAYS for name, x in getattr(self, way).metrics().items()}
        return found | {"rsum": math.fsum(found[f"{way}_r{k}"] for way in WAYS for k in RECALLS)}

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

    def to_frame(self) -> DataFrame:
        """Return :meth:`rows` as a data frame of pandas."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ImportError("to_frame needs pandas: pip install 'itrloss[metrics]'") from None
        return DataFrame(list(self.rows()))

    def write(self, file: IO[str]) -> None:
        """The same into an open text file."""
        writer = csv.DictWriter(file, ["direction", "query", *_COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())


def joined(
    found: list[RetrievalResults], parts: list[tuple[Tensor, Tensor]], ids: Sequence[Tensor]
) -> RetrievalResults:
    """Results within parts, which have these images and texts -> results of all, whose ids are given."""
    images, texts = (list(x) for x in zip(*parts, strict=True))
    i2t = _joined([part.i2t for part in found], images, texts, ids)
    return RetrievalResults(i2t, _joined([part.t2i for part in found], texts, images, ids[::-1]), tuple(found))


def _joined(
    found: list[QueryResults], queries: list[Tensor], candidates: list[Tensor], ids: Sequence[Tensor]
) -> QueryResults:
    numbers, order = torch.cat(queries).sort(stable=True)
    width, k = max(x.ranks.shape[1] for x in found), min(x.top.shape[1] for x in found)
    ranks = torch.cat([pad(x.ranks, (0, width - x.ranks.shape[1])) for x in found])
    top = torch.cat([own[x.top[:, :k]] for x, own in zip(found, candidates, strict=True)])
    return QueryResults(ids[0][numbers], ranks[order], top[order], len(ids[1]))


def _median(x: Tensor) -> float:
    """The mean of the two in the middle if there are two; ``torch.quantile`` takes no more than 16 million numbers."""
    x = x.sort().values
    return float(x[(len(x) - 1) // 2] + x[len(x) // 2]) / 2


def skewness(counts: Tensor) -> Tensor:
    """Third standardised moment of ``counts`` (1-D, any dtype) as a 0-dim tensor; 0 if they are all equal."""
    x = counts.double()
    x = x - x.mean()
    variance = x.square().mean()
    return torch.where(variance > 0, (x**3).mean() / variance**1.5, 0.0)
