"""Tables that compare methods: what they hold, and the same as text and in LaTeX.

:mod:`itrloss.comparison.report` shows them as HTML.
"""

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .metrics import Comparison, RetrievalResults
from .metrics.results import RECALLS, WAYS, Ks, recall_names

DAGGER = "†"
# the figures whose differences are tested: R@1 of both directions and the RSUM
TESTED = ("i2t_r1", "t2i_r1", "rsum")
# Bootstrap samples for each test. If none of them has the other sign, p is 2 / (samples + 1) before
# Holm's correction multiplies it by at most the number of tests: "< 0.001".
SAMPLES_A_TEST = 2000
ARROWS = {"i2t": "image→text", "t2i": "text→image"}
_LINE = 100  # columns of a terminal
_SIGNED = re.compile(r"[+-][\d.]+")
_TEX = str.maketrans(
    {
        **{letter: "\\" + letter for letter in "&%$#_{}"},
        "[": "{[}",  # behind the end of a row it would begin an option
        "*": "{*}",
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\ensuremath{<}",  # the default fonts have other letters in these places
        ">": r"\ensuremath{>}",
        "|": r"\ensuremath{|}",
        "≤": r"\ensuremath{\le}",
        "→": r"\ensuremath{\to}",
        "†": r"\ensuremath{^\dagger}",
        "γ": r"\ensuremath{\gamma}",
        "λ": r"\ensuremath{\lambda}",
    }
)


def samples_for(systems: int) -> int:
    """Return how many bootstrap samples let p of this many systems fall below 0.001."""
    return SAMPLES_A_TEST * len(TESTED) * max(1, systems)


@dataclass(frozen=True)
class Row:
    """A method, and what the table says of it.

    Attributes:
        name: as it is printed.
        results: its results.
        changes: the differences of :data:`TESTED` from the base, with corrected p-values; empty for
            the base itself.
        transductive: whether the result of a query depends on the other test queries.
        seconds: how long it took, if that was measured.
    """

    name: str
    results: RetrievalResults
    changes: Mapping[str, Comparison] = field(default_factory=dict)
    transductive: bool = False
    seconds: float | None = None

    @property
    def marked(self) -> str:
        """The name, with a dagger if the method looks at other test queries."""
        return self.name + DAGGER if self.transductive else self.name


@dataclass(frozen=True)
class Cell:
    """The text of a figure, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """Rows of figures below two lines of heads.

    Attributes:
        groups: the upper heads, each with its number of columns.
        columns: the lower heads.
        rows: the name of each row and its figures, as many as there are columns.
    """

    groups: Sequence[tuple[str, int]]
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Table:
    """The recalls, the changes of R@1, and what readers have to know of them."""

    grids: Sequence[Grid]
    notes: Sequence[str]


def comparison_table(
    rows: Sequence[Row],
    ks: Ks = RECALLS,
    *,
    samples: int,
    scales: Iterable[str] = (),
    warnings: Iterable[str] = (),
) -> Table:
    """Return the table of methods, each compared with the first one.

    Args:
        rows: the methods, the base first.
        ks: the K of R@K.
        samples: the number of bootstrap samples behind their changes.
        scales: a sentence for each calibrated method with what was chosen.
        warnings: of the input, which become notes.
    """
    tests = len(TESTED) * (len(rows) - 1)
    least = 2 * tests / (samples + 1)
    grids = [_recall_grid(rows, ks, least)]
    if tests:
        grids.append(_change_grid(rows, least))
    notes = [*_notes(rows, tests, samples), *scales, *_falls(rows)]
    notes += [f"Warning: {text.removesuffix('.')}." for text in warnings]
    return Table(grids, notes)


def p_text(p: float, least: float) -> str:
    """Return a p-value in three decimals, never 0.

    ``least`` is the smallest value that the number of samples allows. There a p-value is an upper
    bound, which is rounded up.
    """
    if p < 0.001:
        return "< 0.001"
    if p <= least * (1 + 1e-9) and p < 1:
        return f"≤ {math.ceil(1000 * p - 1e-6) / 1000:.3f}"
    return f"{p:.3f}"


def _recall_grid(rows: Sequence[Row], ks: Ks, least: float) -> Grid:
    """Return R@K, the RSUM and its change."""
    names = [*recall_names(ks), "rsum"]
    metrics = [row.results.metrics(ks) for row in rows]
    best = {name: max((f"{values[name]:.1f}" for values in metrics), key=float) for name in names}
    timed = any(row.seconds is not None for row in rows)
    lines = []
    for row, values in zip(rows, metrics, strict=True):
        cells = []
        for name in names:
            text = f"{values[name]:.1f}"
            cells.append(Cell(text, text == best[name] and len(rows) > 1))
        cells += _change_cells(row.changes.get("rsum"), least)
        if timed:
            cells.append(Cell("" if row.seconds is None else f"{row.seconds:.1f}s"))
        lines.append((row.marked, cells))
    groups = [(ARROWS[way], len(ks)) for way in WAYS]
    columns = [f"R@{k}" for k in (*ks, *ks)] + ["RSUM", "change (95 %)", "p"]
    groups.append(("", 3))
    if timed:
        groups.append(("", 1))
        columns.append("time")
    return Grid(groups, columns, lines)


def _change_grid(rows: Sequence[Row], least: float) -> Grid:
    """Return the changes of R@1 in both directions."""
    lines = []
    for row in rows[1:]:
        cells = []
        for way in WAYS:
            cells += _change_cells(row.changes[f"{way}_r1"], least)
        lines.append((row.marked, cells))
    groups = [(f"change of R@1, {ARROWS[way]}", 2) for way in WAYS]
    return Grid(groups, ["points (95 %)", "p"] * 2, lines)


def _change_cells(change: Comparison | None, least: float) -> list[Cell]:
    """Return a difference with its interval, and its p-value; empty cells for the base."""
    if change is None:
        return [Cell(""), Cell("")]
    difference, low, high, p = change
    interval = f"{_signed(difference)} ({_signed(low)}, {_signed(high)})"
    return [Cell(interval), Cell(p_text(p, least))]


def _signed(value: float) -> str:
    """Return a number in one decimal with its sign; a rounded zero is +0.0."""
    text = f"{value:+.1f}"
    return "+0.0" if text == "-0.0" else text


def _notes(rows: Sequence[Row], tests: int, samples: int) -> list[str]:
    """Return what the columns are, the footnote of the dagger, and which queries do not count."""
    notes = []
    if tests:
        notes.append(
            "Changes are against the first row, with 95 % confidence intervals of a paired "
            f"bootstrap over images ({samples:,} samples). P is two-sided, and corrected by Holm's "
            f"method over the {tests} tests of this table: R@1 of both directions and RSUM, of "
            "each other row. The intervals are not corrected."
        )
    if any(row.transductive for row in rows):
        notes.append(
            f"{DAGGER} looks at the other test queries (transductive): the result of a query "
            "depends on which queries are ranked together."
        )
    results = rows[0].results
    if results.i2t.unmatched or results.t2i.unmatched:
        notes.append(f"{results.unmatched_in_words}: they are ranked for others, and do not count.")
    return notes


def _falls(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each row whose R@1 falls in a direction though its RSUM rises."""
    falls = []
    for row in rows:
        rise = row.changes["rsum"].difference if row.changes else 0.0
        if rise <= 0:
            continue
        for way in WAYS:
            fall = -row.changes[f"{way}_r1"].difference
            if fall > 0:
                falls.append(
                    f"Warning: {row.name}: R@1 of {ARROWS[way]} falls by {_amount(fall)}, though "
                    f"RSUM rises by {_amount(rise)}."
                )
    return falls


def _amount(value: float) -> str:
    """Return a positive number in one decimal, or more where that would be 0."""
    return f"{value:.1f}" if value >= 0.05 else f"{value:.1g}"


# -------------------------------------------------------------------------------------------- text


def text(table: Table) -> str:
    """Return the table for a terminal: every column stands right-aligned under its head."""
    first = max((_width(name) for grid in table.grids for name, _ in grid.rows), default=0)
    parts = ["\n".join(_text_lines(grid, first)) for grid in table.grids]
    if table.notes:
        parts.append("\n".join(textwrap.fill(note, _LINE) for note in table.notes))
    return "\n\n".join(parts)


def _text_lines(grid: Grid, first: int) -> list[str]:
    """Return the lines of a grid, whose names have ``first`` columns of the terminal."""
    widths = []
    for i, head in enumerate(grid.columns):
        cells = [_width(cells[i].text) for _, cells in grid.rows]
        widths.append(max(_width(head), *cells, 5))
    spans = []
    start = 0
    for title, size in grid.groups:
        missing = _width(title) - (sum(widths[start : start + size]) + size - 1)
        if missing > 0:  # a head wider than its columns widens the first
            widths[start] += missing
        spans.append(sum(widths[start : start + size]) + size - 1)
        start += size
    titles = [title for title, _ in grid.groups]
    lines = [
        _text_line("", first, titles, spans),
        _text_line("", first, grid.columns, widths),
    ]
    for name, cells in grid.rows:
        lines.append(_text_line(name, first, [cell.text for cell in cells], widths))
    return lines


def _text_line(name: str, first: int, texts: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line with a left-aligned name and right-aligned texts."""
    parts = [name + " " * (first - _width(name))]
    for cell, width in zip(texts, widths, strict=True):
        parts.append(" " * (width - _width(cell)) + cell)
    return " ".join(parts).rstrip()


def _width(line: str) -> int:
    """Return how many columns of a terminal a line takes."""
    width = 0
    for letter in line:
        if unicodedata.combining(letter):
            continue
        width += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
    return width


# ------------------------------------------------------------------------------------------- LaTeX


def latex(table: Table) -> str:
    """Return the table in LaTeX, for the packages booktabs and inputenc (UTF-8).

    It is a ``tabular`` for the recalls and one for the changes of R@1, then the notes in small
    print, to be put into a float. The best of each column is bold.
    """
    parts = ["\n".join(_latex_lines(grid)) for grid in table.grids]
    if table.notes:
        notes = "\n\n".join(_tex(note) for note in table.notes)
        parts.append(
            f"\\begin{{minipage}}{{\\linewidth}}\\footnotesize\n{notes}\n\\end{{minipage}}"
        )
    return "\n\\par\\medskip\n".join(parts) + "\n"


def _tex(text: str) -> str:
    """Return plain text for LaTeX: one line, where no letter is a command."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return printable.translate(_TEX)


def _latex_lines(grid: Grid) -> list[str]:
    """Return the lines of a grid as a tabular."""
    groups = []
    rules = []
    start = 2  # the first column has the names
    for title, size in grid.groups:
        groups.append(rf"\multicolumn{{{size}}}{{c}}{{{_tex(title)}}}")
        if title:
            rules.append(rf"\cmidrule(lr){{{start}-{start + size - 1}}}")
        start += size
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(grid.columns)}}}",
        r"\toprule",
        " & ".join(["", *groups]) + r" \\",
        " ".join(rules),
        " & ".join(["", *map(_tex, grid.columns)]) + r" \\",
        r"\midrule",
    ]
    for name, cells in grid.rows:
        figures = [_latex_figure(cell) for cell in cells]
        lines.append(" & ".join([_tex(name), *figures]) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _latex_figure(cell: Cell) -> str:
    """Return a figure with minus signs in place of hyphens."""
    figure = _SIGNED.sub(r"$\g<0>$", _tex(cell.text))
    return rf"\textbf{{{figure}}}" if cell.best else figure
