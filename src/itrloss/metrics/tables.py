"""Results as LaTeX tables and as files for trec_eval."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..engine.pairs import Pairs
from .judgements import unique_pairs
from .results import RECALLS, WAYS, RetrievalResults

_ITEMS = ("image", "text")


def latex_table(systems: Mapping[str, RetrievalResults | Mapping[str, float]], *, digits: int = 1) -> str:
    """Return a LaTeX table (booktabs) of recalls and RSUM with a row per system; the best of each column is bold.

    Args:
        systems: results, or dictionaries from :func:`retrieval_metrics`, by name.
        digits: number of decimals.
    """
    columns = [*(f"{way}_r{k}" for way in WAYS for k in RECALLS), "rsum"]
    metrics = {name: x.metrics() if isinstance(x, RetrievalResults) else x for name, x in systems.items()}
    rows = {name: [f"{x[column]:.{digits}f}" for column in columns] for name, x in metrics.items()}
    best = [max(column, key=float) for column in zip(*rows.values(), strict=True)]
    lines = [
        r"\begin{tabular}{lrrrrrrr}",
        r"\toprule",
        r" & \multicolumn{3}{c}{image to text} & \multicolumn{3}{c}{text to image} & \\",
        " & ".join(["", *(f"R@{k}" for _ in WAYS for k in RECALLS), r"RSUM \\"]),
        r"\midrule",
    ]
    for name, row in rows.items():
        cells = [rf"\textbf{{{x}}}" if x == top else x for x, top in zip(row, best, strict=True)]
        lines.append(" & ".join([re.sub(r"([&%$#_{}])", r"\\\1", name), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def save_trec(
    results: RetrievalResults, folder: str | Path, relevant: tuple[Tensor, Tensor] | None = None, tag: str = "itrloss"
) -> None:
    """Write ``i2t.run``, ``i2t.qrels``, ``t2i.run`` and ``t2i.qrels`` for trec_eval and similar tools.

    A run lists the stored best candidates of each query, ``hubness_k`` of them; its scores only encode their order.
    Images and texts are named by their indices: ``image0``, ``text12``.

    Args:
        results: from :func:`retrieval_results`.
        folder: an existing folder.
        relevant: the argument of :func:`retrieval_results`, if it was used.
        tag: the name of the run.

    Raises:
        ValueError: if the relevant pairs are not those of the results.
    """
    sides = results.i2t, results.t2i
    ids = sides[0].ids, sides[1].ids
    shape, device = (len(ids[0]), len(ids[1])), ids[0].device
    pairs = Pairs(shape, ids, device).listed if relevant is None else unique_pairs(relevant, shape, device)
    for side, (way, queries) in enumerate(zip(WAYS, sides, strict=True)):
        if not torch.equal(torch.bincount(pairs[side], minlength=shape[side]), queries.positives):
            raise ValueError("relevant: expected the right pairs that the results are of")
        query, candidate, k = _ITEMS[side], _ITEMS[1 - side], queries.top.shape[1]
        best = ((q, c, place) for q, row in enumerate(queries.top.tolist()) for place, c in enumerate(row))
        run = [f"{query}{q} Q0 {candidate}{c} {place + 1} {k - place} {tag}\n" for q, c, place in best]
        positives = zip(pairs[side].tolist(), pairs[1 - side].tolist(), strict=True)
        qrels = [f"{query}{q} 0 {candidate}{c} 1\n" for q, c in positives]
        for kind, lines in (("run", run), ("qrels", qrels)):
            Path(folder, f"{way}.{kind}").write_text("".join(lines), encoding="utf-8")
