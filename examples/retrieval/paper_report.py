"""The report of tables and figures: measured and printed figures, and which of the claims hold on
this data.

Rows are compared by the differences between runs with the same seed. Their mean has a 95 %
confidence interval by Student's t, which is unbounded for one seed. A claim holds if the interval
is within the claimed range, does not hold if it is outside, and is undecided ("cannot be told")
otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.stats import t

from itrloss.cli import tables
from itrloss.files import written

from .evaluate import FIGURES
from .paper_figures import DRAWN, configs, draw, write_csv
from .paper_runs import Grid, measured, state
from .paper_tables import Claim, Table, titled
from .runs import Metrics, Rows
from .summary import cell

MEASURED = ("table", "curves", "time")  # kinds whose rows have figures
ALSO = ("i2t_r_precision", "t2i_r_precision")  # figures that some tables of results have
TIMES = ("encode_seconds", "match_seconds", "seconds", "kpps")
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be told"


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
    if n == 0:
        return None
    if n == 1:
        return Difference(differences[0], math.inf, 1)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Difference(statistics.fmean(differences), half, n)


def figures(runs: Mapping[int, Metrics], when: str, figure: str) -> dict[int, float]:
    return {seed: metrics[when][figure] for seed, metrics in runs.items()}


def verdict(claim: Claim, rows: Rows, when: str) -> tuple[str, list[Difference | None]]:
    """Judge a claim, which must hold for all its pairs and fails with any; also return the
    differences.
    """
    differences = []
    for row, other in claim.pairs:
        values = figures(rows[row], when, claim.figure)
        differences.append(paired(values, figures(rows[other], when, claim.figure)))
    verdicts = [_judged(claim, difference) for difference in differences]
    for answer in (FAILS, UNKNOWN):
        if answer in verdicts:
            return answer, differences
    return HOLDS, differences


def _judged(claim: Claim, difference: Difference | None) -> str:
    if difference is None:
        return UNKNOWN
    low = difference.mean - difference.half
    high = difference.mean + difference.half
    least, most = (0.0, math.inf) if claim.above else (-claim.apart, claim.apart)
    if least < low and high < most:
        return HOLDS
    if high < least or low > most:
        return FAILS
    return UNKNOWN


def write_report(grid: Grid) -> str:
    """Write report.md into the grid's directory, and a file for each table and figure; return the
    report's text.
    """
    settings = list(grid.common)
    if grid.file is not None:
        settings.insert(0, f"--config {grid.file}")
    parts = [
        f"# {grid.source.title}: tables and figures",
        f"Settings of all rows: {' '.join(settings) or 'none'}. Seeds "
        f"{', '.join(map(str, grid.seeds))}.",
        f"RSUM on the {grid.split} split, mean ± standard deviation over seeds. Differences (Δ) "
        "from the row with a star are\n"
        "paired by seed, ± half of a 95 % confidence interval. Intervals are not corrected for "
        "multiplicity. The best\n"
        "epoch of a run was selected on dev; the papers print figures of test splits of other "
        "data.",
    ]
    grid.out.mkdir(parents=True, exist_ok=True)
    for number, table in grid.tables.items():
        parts.append(f"## {heading(number)}: {table.title}")
        parts += _of_table(grid, number, table)
    text = "\n\n".join(parts) + "\n"
    with written(grid.out / "report.md") as file:
        file.write(text)
    return text


def heading(number: str) -> str:
    if number == "forms":
        return "Printed forms"
    return number.replace("fig", "Figure ") if number.startswith("fig") else f"Table {number}"


def _of_table(grid: Grid, number: str, table: Table) -> list[str]:
    """The paragraphs of a table or figure, whose file is written."""
    stem = grid.out / f"{grid.paper}_{number}"
    parts = []
    rows: Rows = {}
    if table.kind in MEASURED:
        rows = measured(grid, table)
        parts.append(_table(grid, table, rows))
        cannot = {name: grid.cannot(row) for name, row in table.rows.items()}
        write_csv(stem, result_lines(table, rows, grid.split, cannot))
    if table.note:
        parts.append(table.note)
    if table.claims:
        claims = [_claim(table, claim, *verdict(claim, rows, table.when)) for claim in table.claims]
        parts.append("\n".join(claims))
    if table.kind in DRAWN:
        unfinished = [
            name for name, run in configs(grid, table).items() if state(run) != "finished"
        ]
        if unfinished:
            parts.append(f"Not drawn: no finished run of {', '.join(unfinished)}.")
        else:
            parts.append(_figure(grid, table, rows, stem))
    return parts


def _figure(grid: Grid, table: Table, rows: Rows, stem: Path) -> str:
    """The file of a figure, which is drawn, or what it lacks; the report is written without it."""
    try:
        return f"Drawn: {draw(grid, table, rows, stem)}"
    except (OSError, ValueError) as error:
        return f"Not drawn: {error}"


def result_lines(
    table: Table, rows: Rows, split: str = "", cannot: Mapping[str, str] | None = None
) -> list[list[str]]:
    """A table with all figures: those of each row that are printed, by data set, and below them
    ours.
    """
    printed = {name for data in table.printed.values() for row in data.values() for name in row}
    shown = {*printed, *(FIGURES if rows or not printed else ()), *table.shown}
    if table.kind == "time":
        shown |= {*TIMES}
    columns = [name for name in (*FIGURES, *ALSO, *TIMES) if name in shown]
    blank = [""] * len(columns)
    lines = [["row", "", "", *map(titled, columns)]]
    for name, row in table.rows.items():
        own = []  # where figures are from, and the figures
        for data, printed_rows in table.printed.items():
            known = printed_rows.get(name, {})
            if known:
                texts = [f"{known[column]:.1f}" if column in known else "" for column in columns]
                own.append((f"printed, {data}", texts))
        seeds = rows.get(name, {})
        if seeds:
            each = [metrics[table.when] for metrics in seeds.values()]
            texts = [_text(column, [x[column] for x in each if column in x]) for column in columns]
            own.append((f"ours, {split}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}", texts))
        elif cannot and cannot.get(name):
            own.append((f"not run: {cannot[name]}", blank))
        elif not own:
            own.append(("no runs" if rows else "", blank))
        lines += [[name, row.what, source, *texts] for source, texts in own]
    return lines


def _text(column: str, values: Sequence[float]) -> str:
    """Mean and deviation of recalls, the mean of times."""
    if values and column in TIMES:
        return f"{statistics.fmean(values):.3g}"
    return cell(values)


def _table(grid: Grid, table: Table, rows: Rows) -> str:
    """The rows as text, that with which others are compared marked by a star."""
    names = [f"{name} *" if name == table.baseline else name for name in table.rows]
    lines = [_line(grid, table, rows, name) for name in table.rows]
    text = tables.text(tables.Table([tables.frame(names, lines)]), 120)
    return f"```\n{text.rstrip()}\n```"


def _line(grid: Grid, table: Table, rows: Rows, name: str) -> dict[tuple[str, str], object]:
    """The cells of a row of the table, by heads."""
    runs = rows[name]
    row = table.rows[name]
    reason = grid.cannot(row)
    what = f"{row.what}; cannot be run: {reason}" if reason else row.what
    line: dict[tuple[str, str], object] = {("", ""): what, ("", "seeds"): str(len(runs) or "")}
    for when, head in (("before", "cosine"), ("after", "re-ranked")):
        values = figures(runs, when, "rsum")
        difference = paired(values, figures(rows[table.baseline], when, "rsum"))
        line[head, "RSUM"] = cell([*values.values()])
        line[head, "Δ"] = str(difference or "") if name != table.baseline else ""
    for data, printed in table.printed.items():
        figure = _shown(printed)
        head = f"{data}, printed {titled(figure)}"
        known = printed.get(name, {}).get(figure)
        line[head, "figure"] = "" if known is None else f"{known:.1f}"
        line[head, "Δ"] = ""
        if known is not None and name != table.baseline:
            line[head, "Δ"] = f"{known - printed[table.baseline][figure]:+.1f}"
    return line


def _shown(printed: Mapping[str, Mapping[str, float]]) -> str:
    """Figure that a table shows for a data set: RSUM, or the first that is printed."""
    first = next(iter(printed.values()))
    return "rsum" if "rsum" in first else next(iter(first))


def _claim(
    table: Table, claim: Claim, answer: str, differences: Sequence[Difference | None]
) -> str:
    """The verdict on a claim, and below it the differences of its pairs."""
    figure = claim.figure
    lines = [f"* **{answer}**: {claim.says}"]
    for (name, other), difference in zip(claim.pairs, differences, strict=True):
        printed = []
        for data, rows in table.printed.items():
            if figure in rows.get(name, {}) and figure in rows.get(other, {}):
                change = rows[name][figure] - rows[other][figure]
                printed.append(f"{change:+.1f} on {data}")
        known = f"printed {', '.join(printed)}" if printed else "not printed"
        lines.append(f"  * {name} − {other}: {titled(figure)} {difference or 'no runs'} ({known})")
    return "\n".join(lines)
