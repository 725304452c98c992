"""A study of re-rankers as one HTML page, without scripts or files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from .metrics import QueryResults
from .study import Entry, Study

_LISTED = 10  # hubs, queries that gained, queries that lost
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b636b; --page: #fff; --rule: #dfe3e6;
  --a: #c24e00; --b: #0067a8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #9ea7af; --page: #15181b; --rule: #33393f; --a: #f09255; --b: #63b3f0 }
}
body { margin: 0 auto; max-width: 66rem; padding: 2rem 1.2rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .4rem } h2 { font-size: 1.25rem; margin: 2.6rem 0 .4rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem } p { max-width: 46rem; margin: .3rem 0 .8rem }
.soft, th { color: var(--soft); font-weight: 400 } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule) }
.text { text-align: left; white-space: normal; min-width: 11rem } .chosen { font-weight: 600 }
svg text { fill: var(--soft); font-size: 12px } svg path { fill: none; stroke-width: 2 }
.before { stroke: var(--a); stroke-dasharray: 5 3 } .after { stroke: var(--b) } .axis { stroke: var(--rule) }
"""


@dataclass(frozen=True)
class Names:
    """How images and texts are called on the page; numbers where there is nothing better."""

    images: Sequence[str] = ()
    texts: Sequence[str] = ()

    def of(self, side: int, index: int) -> str:
        """Of the image (side 0) or text (1) with this number."""
        names = (self.images, self.texts)[side]
        return escape(names[index]) if names else f"{('image', 'text')[side]} {index}"


def page(found: Study, chosen: Entry, title: str, names: Names = Names()) -> str:
    """The study; hubs and queries are those of one entry beside the scores as they are."""
    n, m = found.sim.shape
    first = found.entries[0]
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1>",
        f"<p>{n} images, {m} texts. Recalls in percent; an interval is that of the change of the RSUM, over other test "
        "images (95 %, paired bootstrap). Skewness of 0 means that no candidate is a hub.</p>",
        "<h2>All methods</h2>",
        _methods(found, chosen),
        "<p class='soft'>Hubs that were looked for in the test queries make a result depend on which queries are asked "
        "together; compare it with results of the same kind. By a bank, each query stands for itself.</p>",
        f"<h2>What {escape(_title(chosen))} changed</h2>",
    ]
    sides = (("Images asking for texts", 0), ("Texts asking for images", 1))
    for heading, side in sides:
        before, after = ((x.results.i2t, x.results.t2i)[side] for x in (first, chosen))
        parts += [f"<h3>{heading}</h3>", _hubness(before, after), _hubs(before, after, names, 1 - side)]
        parts += [_moved(before, after, names, side)]
    return "\n".join([*parts, "</body></html>", ""])


def _title(entry: Entry) -> str:
    return f"{entry.name}, hubs of {entry.looks_at}"


def _methods(found: Study, chosen: Entry) -> str:
    head = ("i2t 1", "5", "10", "t2i 1", "5", "10", "RSUM", "change", "interval", "skewness i2t", "t2i", "seconds")
    rows = [_row("th", "method", "hubs looked for in", *head)]
    for entry in found.entries:
        m, c = entry.results.metrics(), entry.change
        values = [f"{m[f'{way}_r{k}']:.1f}" for way in ("i2t", "t2i") for k in (1, 5, 10)] + [f"{m['rsum']:.1f}"]
        change = ["", ""] if entry.reranker is None else [f"{c.difference:+.1f}", f"{c.low:+.1f} to {c.high:+.1f}"]
        rest = [f"{m['i2t_skewness']:.2f}", f"{m['t2i_skewness']:.2f}", f"{entry.seconds:.1f}"]
        kind = ' class="chosen"' if entry is chosen else ""
        rows.append(_row("td", escape(entry.name), entry.looks_at, *values, *change, *rest, kind=kind))
    left = "".join(f"<p class='soft'>{escape(n)} was left out: {escape(why)}.</p>" for n, why in found.left_out.items())
    return _table(rows) + left


def _hubness(before: QueryResults, after: QueryResults) -> str:
    """How often each candidate is among the first k, most often first: a steep beginning is a hub."""
    k, width, height, left, bottom = before.top.shape[1], 620, 210, 46, 34
    curves = [x.occurrences.sort(descending=True).values.double() for x in (before, after)]
    size, peak = len(curves[0]), max(float(c[0]) for c in curves)
    where = torch.logspace(0, torch.tensor(float(size)).log10(), 120).round().long().clamp_max(size).unique() - 1

    def place(index: Tensor, value: Tensor) -> str:
        x = left + (index + 1).double().log() / max(1e-9, torch.tensor(float(size)).log()) * (width - left - 12)
        y = 10 + (1 - value / peak) * (height - bottom - 10)
        return "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    lines = "".join(
        f'<path class="{kind}" d="{place(where, curve[where])}"/>'
        for kind, curve in zip(("before", "after"), curves, strict=True)
    )
    floor = height - bottom
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="k-occurrences before and after">'
        f'<path class="axis" d="M{left} 10 V{floor} H{width - 12}"/>{lines}'
        f'<text x="{left - 6}" y="16" text-anchor="end">{peak:.0f}</text>'
        f'<text x="{left - 6}" y="{floor}" text-anchor="end">0</text>'
        f'<text x="{left}" y="{floor + 16}">1st</text>'
        f'<text x="{width - 12}" y="{floor + 16}" text-anchor="end">{size}th candidate, most often found first</text>'
        f"</svg><p class='soft'>Of how many queries a candidate is among the first {k}: dashed before, solid after.</p>"
    )


def _hubs(before: QueryResults, after: QueryResults, names: Names, side: int) -> str:
    counts = before.occurrences, after.occurrences
    top = counts[0].sort(descending=True, stable=True).indices[:_LISTED].tolist()
    rows = [_row("th", "greatest hubs before", "", "queries before", "after")]
    rows += [_row("td", names.of(side, c), "", int(counts[0][c]), int(counts[1][c])) for c in top]
    return _table(rows)


def _moved(before: QueryResults, after: QueryResults, names: Names, side: int) -> str:
    """Who gained and who lost, by the rank of the best right candidate."""
    answered = (before.best > 0).nonzero().squeeze(1)
    old, new = before.best[answered], after.best[answered]
    better, worse = int((new < old).sum()), int((new > old).sum())
    text = f"<p>{better} of {len(answered)} queries rank their right candidate higher than before, {worse} lower.</p>"
    gain = old.double().log() - new.double().log()  # from 20 to 2 is more than from 200 to 182
    for heading, order in (
        ("gained most", gain.sort(descending=True, stable=True)),
        ("lost most", gain.sort(stable=True)),
    ):
        moved = [i for i in order.indices[:_LISTED].tolist() if old[i] != new[i]]
        if not moved:
            continue
        rows = [_row("th", heading, "first candidate before, after", "rank before", "after")]
        for i in moved:
            query = int(answered[i])
            firsts = (names.of(1 - side, int(x.top[query, 0])) for x in (before, after))
            rows.append(_row("td", names.of(side, query), "<br>".join(firsts), int(old[i]), int(new[i])))
        text += _table(rows)
    return text


def _table(rows: Sequence[str]) -> str:
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _row(tag: str, *cells: object, kind: str = "") -> str:
    """The first two cells are text, the others numbers."""
    styled = (f"<{tag}{' class=text' if i < 2 else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))
    return f"<tr{kind}>{''.join(styled)}</tr>"
