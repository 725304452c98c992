"""Results in the forms that papers and other tools take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..engine.pairs import Pairs
from .judgements import listed
from .results import RECALLS, WAYS, RetrievalResults

_ITEMS = ("image", "text")


def latex_table(systems: Mapping[str, RetrievalResults | Mapping[str, float]], *, digits: int = 1) -> str:
    """Return a LaTeX table of recalls and RSUM, a row for each system, the best of each column in bold (booktabs).

    Args:
        systems: results, or what :func:`retrieval_metrics` returned, by name.
        digits: after the point.
    """
    names = [*(f"{way}_r{k}" for way in WAYS for k in RECALLS), "rsum"]
    figures = {name: x.metrics() if isinstance(x, RetrievalResults) else x for name, x in systems.items()}
    rows = {name: [f"{x[column]:.{digits}f}" for column in names] for name, x in figures.items()}
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
    """Write ``i2t.run``, ``i2t.qrels``, ``t2i.run`` and ``t2i.qrels``, which trec_eval and its like read.

    A run has the best candidates that the results have, ``hubness_k`` of a query, with scores that only order them.
    Images and texts are named by their numbers: ``image0``, ``text12``.

    Args:
        results: of :func:`retrieval_results`.
        folder: an existing one.
        relevant: as it was for the results.
        tag: the name of the run.

    Raises:
        ValueError: if the right pairs are others than those that the results are of.
    """
    sides = results.i2t, results.t2i
    ids = sides[0].ids, sides[1].ids
    shape, device = (len(ids[0]), len(ids[1])), ids[0].device
    pairs = Pairs(shape, ids, device).listed if relevant is None else listed(relevant, shape, device)
    for side, (way, found) in enumerate(zip(WAYS, sides, strict=True)):
        if not torch.equal(torch.bincount(pairs[side], minlength=shape[side]), found.positives):
            raise ValueError("relevant: expected the right pairs that the results are of")
        query, candidate, k = _ITEMS[side], _ITEMS[1 - side], found.top.shape[1]
        best = ((q, c, place) for q, row in enumerate(found.top.tolist()) for place, c in enumerate(row))
        run = [f"{query}{q} Q0 {candidate}{c} {place + 1} {k - place} {tag}\n" for q, c, place in best]
        right = zip(pairs[side].tolist(), pairs[1 - side].tolist(), strict=True)
        qrels = [f"{query}{q} 0 {candidate}{c} 1\n" for q, c in right]
        for kind, lines in (("run", run), ("qrels", qrels)):
            Path(folder, f"{way}.{kind}").write_text("".join(lines), encoding="utf-8")
