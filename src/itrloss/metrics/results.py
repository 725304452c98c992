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
        """The (Q,) float64 share of positives among the first R, R the number of positives; 0 if R
        is 0.
        """
        return self._within_r().sum(1).double() / self.positives.clamp_min(1)

    @property
    def average_precision(self) -> Tensor:
        """The (Q,) float64 average precision at R; 0 if R is 0."""
        order = torch.arange(
            1, self.ranks.shape[1] + 1, device=self.ranks.device, dtype=torch.float64
        )
        precision = torch.where(self._within_r(), order / self.ranks.clamp_min(1), 0.0)
        return precision.sum(1) / self.positives.clamp_min(1)

    @property
    def occurrences(self) -> Tensor:
        """The (candidates,) int64 k-occurrences: the number of queries whose first k contain a
        candidate.
        """
        return torch.bincount(self.top.flatten(), minlength=self.candidates)

    def _within_r(self) -> Tensor:
        return (self.ranks > 0) & (self.ranks <= self.positives[:, None])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this direction, over queries with positives; see
        :func:`retrieval_metrics`.
        """
        answered = self.positives > 0
        if not bool(answered.any()):
            raise ValueError("image_ids, text_ids: no query has a matching candidate")
        those = QueryResults(
            self.ids[answered], self.ranks[answered], self.top[answered], self.candidates
        )
        return {
            **{
                f"r{k}": 100 * float(x.double().mean())
                for k, x in zip(RECALLS, those.hits.unbind(1), strict=True)
            },
            "median_rank": float(np.median(those.best.cpu())),
            "r_precision": 100 * float(those.r_precision.mean()),
            "map_at_r": 100 * float(those.average_precision.mean()),
            "skewness": float(skewness(those.occurrences)),
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
        metrics = {
            f"{way}_{name}": x for way in WAYS for name, x in getattr(self, way).metrics().items()
        }
        return metrics | {"rsum": math.fsum(metrics[name] for name in RECALL_NAMES)}

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each query: its direction, index and id, ranks and precisions, and its
        best candidate.
        """
        for way, side in (("i2t", self.i2t), ("t2i", self.t2i)):
            columns = (
                side.ids,
                side.best,
                side.positives,
                side.r_precision,
                side.average_precision,
                side.top[:, 0],
            )
            for query, values in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
                yield dict(zip(_COLUMNS, (way, query, *values), strict=True))

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
    """Return the results of all queries, from those of each fold and its image and text indices."""
    sides = []
    for side, way in enumerate(WAYS):
        queries: list[QueryResults] = [getattr(fold, way) for fold in folds]
        order = torch.cat([part[side] for part in parts]).argsort(stable=True)
        ids = torch.cat([x.ids for x in queries])
        ranks = pad_sequence([row for x in queries for row in x.ranks], batch_first=True)
        k = min(x.top.shape[1] for x in queries)
        top = torch.cat(
            [part[1 - side][x.top[:, :k]] for x, part in zip(queries, parts, strict=True)]
        )
        sides.append(QueryResults(ids[order], ranks[order], top[order], shape[1 - side]))
    return RetrievalResults(sides[0], sides[1], tuple(folds))


def skewness(counts: Tensor) -> Tensor:
    """Return the third standardised moment of 1-D ``counts`` of any dtype, 0-dim float64; 0 if all
    are equal.
    """
    x = counts.double() - counts.double().mean()
    variance = x.square().mean()
    return torch.where(variance > 0, (x**3).mean() / variance**1.5, 0.0)


def latex_table(
    systems: Mapping[str, RetrievalResults | Mapping[str, float]], *, digits: int = 1
) -> str:
    """Return a LaTeX table (booktabs) of recalls and RSUM with a row per system; the best of each
    column is bold.

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
        cells = [rf"\textbf{{{x}}}" if x == top else x for x, top in zip(row, best, strict=True)]
        lines.append(" & ".join([re.sub(r"([&%$#_{}])", r"\\\1", name), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def save_trec(
    results: RetrievalResults,
    folder: str | Path,
    relevant: tuple[Tensor, Tensor] | None = None,
    tag: str = "itrloss",
) -> None:
    """Write ``i2t.run``, ``i2t.qrels``, ``t2i.run`` and ``t2i.qrels`` for trec_eval and similar
    tools.

    A run lists the stored best candidates of each query, ``hubness_k`` of them; its scores only
    encode their order. Images and texts are named by their indices: ``image0``, ``text12``.

    Args:
        results: from :func:`retrieval_results`.
        folder: an existing folder.
        relevant: the argument of :func:`retrieval_results`, if it was used.
        tag: the name of the run.

    Raises:
        ValueError: if the relevant pairs are not those of the results.
    """
    ids = results.i2t.ids, results.t2i.ids
    shape = len(ids[0]), len(ids[1])
    pairs = (
        Pairs(shape, ids, ids[0].device).listed
        if relevant is None
        else distinct_pairs("relevant", *relevant, shape)[0]
    )
    for side, (way, query, candidate) in enumerate(
        (("i2t", "image", "text"), ("t2i", "text", "image"))
    ):
        queries: QueryResults = getattr(results, way)
        if not torch.equal(
            torch.bincount(pairs[side], minlength=shape[side]).cpu(), queries.positives.cpu()
        ):
            raise ValueError("relevant: expected the right pairs that the results are of")
        best, k = enumerate(queries.top.tolist()), queries.top.shape[1]
        places = ((q, place, c) for q, row in best for place, c in enumerate(row))
        run = [
            f"{query}{q} Q0 {candidate}{c} {place + 1} {k - place} {tag}\n"
            for q, place, c in places
        ]
        positives = zip(pairs[side].tolist(), pairs[1 - side].tolist(), strict=True)
        qrels = [f"{query}{q} 0 {candidate}{c} 1\n" for q, c in positives]
        for kind, lines in (("run", run), ("qrels", qrels)):
            Path(folder, f"{way}.{kind}").write_text("".join(lines), encoding="utf-8")
