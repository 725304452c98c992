"""The report of an ablation: measured and printed figures, and which of the paper's claims hold on
this data.

Rows are compared by the differences between runs with the same seed. Their mean has a 95 %
confidence interval by Student's t, which is unbounded for one seed. A claim holds if the interval
is within the claimed range, does not hold if it is outside, and is undecided ("cannot be told")
otherwise.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations
from typing import Any, NamedTuple

from .ablate import Claim, Grid, Table, measured
from .summary import Metrics, cell

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be told"
Rows = Mapping[str, Mapping[int, Metrics]]

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond these, the last one is
# slightly too wide.
T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


class Difference(NamedTuple):
    """Mean of paired differences and half the width of its 95 % confidence interval."""

    mean: float
    half: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" + (f" ± {self.half:.1f}" if self.seeds > 1 else "")


def paired(values: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """Difference of values by seed, paired by seed; None if no seed has both."""
    differences = [values[seed] - others[seed] for seed in values if seed in others]
    n = len(differences)
    if n < 2:
        return Difference(differences[0], math.inf, 1) if differences else None
    half = T[min(n - 1, len(T)) - 1] * statistics.stdev(differences) / math.sqrt(n)
    return Difference(statistics.fmean(differences), half, n)


def figures(runs: Mapping[int, Metrics], when: str, figure: str) -> dict[int, float]:
    return {seed: metrics[when][figure] for seed, metrics in runs.items()}


def verdict(claim: Claim, rows: Rows, when: str) -> tuple[str, list[Difference | None]]:
    """Judge a claim, which must hold for all its pairs and fails with any; also return the
    differences.
    """
    low, high = (0.0, math.inf) if claim.above else (-claim.apart, claim.apart)
    differences = [
        paired(*(figures(rows[row], when, claim.figure) for row in pair)) for pair in claim.pairs
    ]
    verdicts = []
    for d in differences:
        if d is None or math.isinf(d.half):
            verdicts.append(UNKNOWN)
        elif low < d.mean - d.half and d.mean + d.half < high:
            verdicts.append(HOLDS)
        else:
            verdicts.append(FAILS if d.mean + d.half < low or d.mean - d.half > high else UNKNOWN)
    return next((v for v in (FAILS, UNKNOWN) if v in verdicts), HOLDS), differences


def write_report(grid: Grid) -> str:
    """Write report.md and report.json into the grid's directory; returns the former."""
    settings = [*([f"--config {grid.file}"] if grid.file else []), *grid.common]
    parts = [
        f"# {grid.source.title}: ablations",
        f"Settings of all rows: {' '.join(settings) or 'none'}. Seeds "
        f"{', '.join(map(str, grid.seeds))}.",
        "RSUM on the development split, mean ± standard deviation over seeds. Differences (Δ) "
        "from the bold row are\n"
        "paired by seed, ± half of a 95 % confidence interval. Intervals are not corrected for "
        "multiplicity. The best\n"
        "epoch of a run was selected on the same split; the papers print figures of test splits "
        "of other data.",
    ]
    content: dict[str, Any] = {
        "paper": grid.source.title,
        "settings": settings,
        "seeds": grid.seeds,
        "tables": {},
    }
    for number, table in grid.tables.items():
        rows = measured(grid, table)
        claims = [(claim, *verdict(claim, rows, _when(table))) for claim in table.claims]
        parts += [f"## Table {number}: {table.title}", _table(table, rows)]
        parts += [note for note in (table.note, _alike(grid, table, rows)) if note]
        parts.append("\n".join(_claim(table, *judged) for judged in claims))
        content["tables"][number] = {
            "title": table.title,
            "baseline": table.baseline,
            "rows": {name: _row(grid, table, rows, name) for name in table.rows},
            "claims": [
                {
                    **asdict(claim),
                    "verdict": answer,
                    "differences": [_plain(d) for d in differences],
                }
                for claim, answer, differences in claims
            ],
        }
    text = "\n\n".join(parts) + "\n"
    grid.out.mkdir(parents=True, exist_ok=True)
    (grid.out / "report.md").write_text(text, encoding="utf-8")
    (grid.out / "report.json").write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return text


def _when(table: Table) -> str:
    return "after" if table.reranks else "before"


def _table(table: Table, rows: Rows) -> str:
    """Format as Markdown, padded to be readable in a terminal."""
    shown = {data: _shown(printed) for data, printed in table.printed.items()}
    header = ["row", "", "seeds", "RSUM", "Δ", "re-ranked", "Δ"]
    header += [
        text for data, figure in shown.items() for text in (f"{data}, printed{_named(figure)}", "Δ")
    ]
    lines = [header]
    for name, row in table.rows.items():
        line = [
            f"**{name}**" if name == table.baseline else name,
            row.what,
            str(len(rows[name])) if rows[name] else "",
        ]
        for when in ("before", "after"):
            values = figures(rows[name], when, "rsum")
            difference = paired(values, figures(rows[table.baseline], when, "rsum"))
            line.append(cell(list(values.values())) if values else "")
            line.append(str(difference) if difference and name != table.baseline else "")
        for data, figure in shown.items():
            value = table.printed[data].get(name, {}).get(figure)
            line.append("" if value is None else f"{value:.1f}")
            compared = value is not None and name != table.baseline
            line.append(f"{_printed(table, data, name, figure):+.1f}" if compared else "")
        if row.cannot:
            line[1] += f"; cannot be run: {row.cannot}"
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * max(3, width) for width in widths])
    return "\n".join(
        "| "
        + " | ".join(text.ljust(max(3, width)) for text, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def _alike(grid: Grid, table: Table, rows: Rows) -> str:
    """Note which rows have different runs with equal figures: their difference of 0 ± 0 carries no
    information.
    """
    pairs = [
        f"{a} and {b}"
        for a, b in combinations(table.rows, 2)
        if rows[a]
        and rows[a] == rows[b]
        and grid.config(table.rows[a], grid.seeds[0]).out
        != grid.config(table.rows[b], grid.seeds[0]).out
    ]
    what = (
        "Other settings with equal figures, because the best epochs precede the settings' effect, "
        "in rows "
    )
    return what + "; ".join(pairs) + "." if pairs else ""


def _shown(printed: Mapping[str, Mapping[str, float]]) -> str:
    """Figure that a table shows for a data set: RSUM, or the first that is printed."""
    first = next(iter(printed.values()))
    return "rsum" if "rsum" in first else next(iter(first))


def _named(figure: str) -> str:
    return (
        ""
        if figure == "rsum"
        else " " + figure.replace("i2t_r", "i2t R@").replace("t2i_r", "t2i R@")
    )


def _printed(table: Table, data: str, name: str, figure: str, other: str = "") -> float:
    """Difference between two rows' printed figures, by default from the baseline."""
    rows = table.printed[data]
    return round(rows[name][figure] - rows[other or table.baseline][figure], 1)


def _claim(table: Table, claim: Claim, answer: str, differences: list[Difference | None]) -> str:
    lines = [f"* **{answer}**: {claim.says}"]
    for (a, b), difference in zip(claim.pairs, differences, strict=True):
        printed = [
            f"{_printed(table, data, a, claim.figure, b):+.1f} on {data}"
            for data, rows in table.printed.items()
            if claim.figure in rows.get(a, {}) and claim.figure in rows.get(b, {})
        ]
        known = f"printed {', '.join(printed)}" if printed else "not printed"
        lines.append(f"  * {a} − {b}:{_named(claim.figure)} {difference or 'no runs'} ({known})")
    return "\n".join(lines)


def _row(grid: Grid, table: Table, rows: Rows, name: str) -> dict[str, Any]:
    row = table.rows[name]
    differences = {}
    for when in ("before", "after"):
        pair = (figures(rows[other], when, "rsum") for other in (name, table.baseline))
        differences[when] = _plain(paired(*pair))
    return {
        **asdict(row),
        "runs": {} if row.cannot else {seed: grid.config(row, seed).out for seed in grid.seeds},
        "measured": rows[name],
        "difference": differences,
        "printed": {
            data: printed[name] for data, printed in table.printed.items() if name in printed
        },
    }


def _plain(difference: Difference | None) -> dict[str, Any] | None:
    """Convert to JSON's types; it has no infinity."""
    if difference is None:
        return None
    return {**difference._asdict(), "half": difference.half if difference.seeds > 1 else None}
