"""Results of each query, before they are averaged, and what is written of them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..engine.pairs import Pairs
from .judgements import distinct_pairs

if TYPE_CHECKING:
    from pandas import DataFrame

WAYS = ("i2t", "t2i")
RECALLS = (1, 5, 10)
RECALL_NAMES = [f"{way}_r{k}" for way in WAYS for k in RECALLS]
_COLUMNS = (
    "direction",
    "query",
    "id",
    "best_rank",
    "positives",
    "r_precision",
    "average_precision",
    "first",
)


@dataclass(frozen=True)
class QueryResults:
    """The results of each query of one direction.

    Attributes:
        ids: (Q,) int64 ids of the queries; their indices if :attr:`itrloss.Similarity.ids` has
            none.
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
        return self.ranks[:, :1].sum(1)

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
        """The (Q,) float64 share of positives among the first R candidates; 0 if R is 0.

        R is the number of positives.
        """
        return self._within_r().sum(1).double() / self.positives.clamp_min(1)

    @property
    def average_precision(self) -> Tensor:
        """The (Q,) float64 average precision at R; 0 if R is 0."""
        size = self.ranks.shape[1]
        found = torch.arange(1, size + 1, device=self.ranks.device).double()  # up to each rank
        precision = torch.where(self._within_r(), found / self.ranks.clamp_min(1), 0.0)
        return precision.sum(1) / self.positives.clamp_min(1)

    @property
    def occurrences(self) -> Tensor:
        """The (candidates,) int64 k-occurrences: how many queries have a candidate in their top."""
        return torch.bincount(self.top.flatten(), minlength=self.candidates)

    def _within_r(self) -> Tensor:
        return (self.ranks > 0) & (self.ranks <= self.positives[:, None])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this direction over queries with positives.

        See :func:`retrieval_metrics`.
        """
        matched = self.positives > 0
        if not bool(matched.any()):
            raise ValueError("image_ids, text_ids: no query has a matching candidate")
        counted = QueryResults(
            self.ids[matched], self.ranks[matched], self.top[matched], self.candidates
        )
        metrics = {}
        for k, hits in zip(RECALLS, counted.hits.unbind(1), strict=True):
            metrics[f"r{k}"] = 100 * float(hits.double().mean())
        metrics["median_rank"] = float(np.median(counted.best.cpu()))
        metrics["r_precision"] = 100 * float(counted.r_precision.mean())
        metrics["map_at_r"] = 100 * float(counted.average_precision.mean())
        metrics["skewness"] = float(skewness(counted.occurrences))
        return metrics


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

    @property
    def ways(self) -> dict[str, QueryResults]:
        """The results of both directions by name: ``"i2t"`` and ``"t2i"``."""
        return {"i2t": self.i2t, "t2i": self.t2i}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of both directions, see :func:`retrieval_metrics`."""
        if self.folds:
            parts = [part.metrics() for part in self.folds]
            return {name: math.fsum(part[name] for part in parts) / len(parts) for name in parts[0]}
        metrics = {}
        for way, side in self.ways.items():
            for name, value in side.metrics().items():
                metrics[f"{way}_{name}"] = value
        metrics["rsum"] = math.fsum(metrics[name] for name in RECALL_NAMES)
        return metrics

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each query.

        It has the query's direction, index, id, best rank, number of positives and precisions, and
        its best candidate.
        """
        for way, side in self.ways.items():
            columns = (
                side.ids,
                side.best,
                side.positives,
                side.r_precision,
                side.average_precision,
                side.top[:, 0],
            )
            values = [column.tolist() for column in columns]
            for query, row in enumerate(zip(*values, strict=True)):
                yield dict(zip(_COLUMNS, (way, query, *row), strict=True))

    def to_frame(self) -> DataFrame:
        """Return :meth:`rows` as a pandas data frame."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ImportError("to_frame needs pandas: pip install 'itrloss[metrics]'") from None
        return DataFrame(list(self.rows()))

    def save(self, path: str | Path) -> None:
        """Write :meth:`rows` as CSV with a header to a new file."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            self.write(file)

    def write(self, file: IO[str]) -> None:
        """Write :meth:`rows` as CSV with a header to an open text file."""
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(row.values() for row in self.rows())


def join_folds(
    folds: list[RetrievalResults], parts: list[tuple[Tensor, Tensor]], shape: tuple[int, int]
) -> RetrievalResults:
    """Return the results of all queries, from the results of each fold.

    ``parts``: the image and text indices of each fold; ``shape``: numbers of images and of texts.
    """
    n, m = shape
    images = [rows for rows, _ in parts]
    texts = [cols for _, cols in parts]
    i2t = _joined([fold.i2t for fold in folds], images, texts, m)
    t2i = _joined([fold.t2i for fold in folds], texts, images, n)
    return RetrievalResults(i2t, t2i, tuple(folds))


def _joined(
    folds: list[QueryResults], queries: list[Tensor], candidates: list[Tensor], size: int
) -> QueryResults:
    """Return the results of all queries of one direction, in their order.

    Args:
        folds: the results of each fold.
        queries: the indices of the queries of each fold.
        candidates: the indices of the candidates of each fold.
        size: number of candidates of all folds.
    """
    order = torch.cat(queries).argsort(stable=True)
    k = min(fold.top.shape[1] for fold in folds)
    ids = torch.cat([fold.ids for fold in folds])
    ranks = pad_sequence([row for fold in folds for row in fold.ranks], batch_first=True)
    top = [own[fold.top[:, :k]] for fold, own in zip(folds, candidates, strict=True)]
    return QueryResults(ids[order], ranks[order], torch.cat(top)[order], size)


def skewness(counts: Tensor) -> Tensor:
    """Return the third standardised moment of counts: 0 if all are equal.

    Args:
        counts: (N,) numbers of any dtype.

    Returns:
        a 0-dim float64 tensor.
    """
    x = counts.double() - counts.double().mean()
    variance = x.square().mean()
    return torch.where(variance > 0, (x**3).mean() / variance**1.5, 0.0)


def latex_table(
    systems: Mapping[str, RetrievalResults | Mapping[str, float]], *, digits: int = 1
) -> str:
    """Return a LaTeX table (booktabs) of recalls and RSUM with a row for each system.

    The best of each column is bold.

    Args:
        systems: results, or dictionaries from :func:`retrieval_metrics`, by name.
        digits: number of decimals.
    """
    rows = {}
    for name, x in systems.items():
        metrics = x.metrics() if isinstance(x, RetrievalResults) else x
        rows[name] = [f"{metrics[column]:.{digits}f}" for column in (*RECALL_NAMES, "rsum")]
    best = [max(column, key=float) for column in zip(*rows.values(), strict=True)]
    lines = [
        r"\begin{tabular}{lrrrrrrr}",
        r"\toprule",
        r" & \multicolumn{3}{c}{image to text} & \multicolumn{3}{c}{text to image} & \\",
        r" & R@1 & R@5 & R@10 & R@1 & R@5 & R@10 & RSUM \\",
        r"\midrule",
    ]
    for name, row in rows.items():
        cells = [re.sub(r"([&%$#_{}])", r"\\\1", name)]
        for cell, highest in zip(row, best, strict=True):
            cells.append(rf"\textbf{{{cell}}}" if cell == highest else cell)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def save_trec(
    results: RetrievalResults,
    folder: str | Path,
    relevant: tuple[Tensor, Tensor] | None = None,
    tag: str = "itrloss",
) -> None:
    """Write run and qrels files for trec_eval and similar tools.

    They are named ``i2t.run``, ``i2t.qrels``, ``t2i.run`` and ``t2i.qrels``.
    A run lists the stored best candidates of each query, ``hubness_k`` of them; its scores only
    encode their order. Images and texts are named by their indices: ``image0``, ``text12``.

    Args:
        results: from :func:`retrieval_results`.
        folder: an existing folder.
        relevant: the argument of :func:`retrieval_results`, if it was used.
        tag: the name of the run.

    Raises:
        ValueError: if the results have other relevant pairs.
    """
    i2t, t2i = results.i2t, results.t2i
    shape = (len(i2t.ids), len(t2i.ids))
    if relevant is None:
        pairs = Pairs(shape, (i2t.ids, t2i.ids), i2t.ids.device).listed
    else:
        pairs = distinct_pairs("relevant", *relevant, shape)[0]
    images, texts = pairs
    _check_positives(i2t, images)
    _check_positives(t2i, texts)
    _save_trec(Path(folder, "i2t"), i2t, ("image", "text"), (images, texts), tag)
    _save_trec(Path(folder, "t2i"), t2i, ("text", "image"), (texts, images), tag)


def _check_positives(results: QueryResults, queries: Tensor) -> None:
    """Raise a ValueError unless each query has as many pairs as positives."""
    counts = torch.bincount(queries, minlength=len(results.ids))
    if not torch.equal(counts.cpu(), results.positives.cpu()):
        raise ValueError("relevant: expected the right pairs that the results are of")


def _save_trec(
    path: Path,  # without a suffix
    results: QueryResults,
    names: tuple[str, str],  # of a query and of a candidate
    pairs: tuple[Tensor, Tensor],  # the right queries (P,) and candidates (P,)
    tag: str,
) -> None:
    """Write the run and qrels files of one direction."""
    query, candidate = names
    k = results.top.shape[1]
    run = []
    for q, best in enumerate(results.top.tolist()):
        for place, c in enumerate(best):
            run.append(f"{query}{q} Q0 {candidate}{c} {place + 1} {k - place} {tag}\n")
    qrels = []
    for q, c in torch.stack(pairs, 1).tolist():
        qrels.append(f"{query}{q} 0 {candidate}{c} 1\n")
    path.with_suffix(".run").write_text("".join(run), encoding="utf-8")
    path.with_suffix(".qrels").write_text("".join(qrels), encoding="utf-8")
