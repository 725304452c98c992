"""Tables that compare methods: data frames with notes, and the same as text and in LaTeX.

:mod:`itrloss.cli.report` shows them as HTML. They need pandas, and LaTeX also needs jinja2; both
come with the extra ``cli``.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..metrics import Comparison, RetrievalResults
from ..metrics.results import RECALLS, WAYS, Ks

if TYPE_CHECKING:
    import pandas as pd

DAGGER = "†"
# the figures whose differences are tested: R@1 of both directions and the RSUM
TESTED = ("i2t_r1", "t2i_r1", "rsum")
# Bootstrap samples for each test. If none of them has the other sign, p is 2 / (samples + 1) before
# Holm's correction multiplies it by at most the number of tests: "< 0.001".
SAMPLES_A_TEST = 2000
ARROWS = {"i2t": "image→text", "t2i": "text→image"}
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
class Table:
    """The recalls, the changes of R@1, and what readers have to know of them.

    Attributes:
        frames: data frames with the names of methods as index and two levels of columns. Numbers
            are printed in one decimal, and the highest of each column is bold in LaTeX and HTML.
        notes: sentences below the frames.
    """

    frames: Sequence[pd.DataFrame]
    notes: Sequence[str] = ()


def comparison_table(
    rows: Sequence[Row],
    ks: Ks = RECALLS,
    *,
    samples: int,
    notes: Iterable[str] = (),
) -> Table:
    """Return the table of methods, each compared with the first one.

    Args:
        rows: the methods, the base first.
        ks: the K of R@K.
        samples: the number of bootstrap samples behind their changes.
        notes: further ones, behind those on the figures.
    """
    tests = len(TESTED) * (len(rows) - 1)
    least = 2 * tests / (samples + 1)
    names = [row.marked for row in rows]
    frames = [frame(names, [_recalls(row, ks, least) for row in rows])]
    if tests:
        frames.append(frame(names[1:], [_changes(row, least) for row in rows[1:]]))
    return Table(frames, [*_notes(rows, tests, samples), *_falls(rows), *notes])


def frame(names: Sequence[str], lines: Sequence[Mapping[tuple[str, str], object]]) -> pd.DataFrame:
    """Return a data frame with an index of names; lines have cells by (upper head, head)."""
    pandas = require_pandas()
    columns = pandas.MultiIndex.from_tuples(list(lines[0]))
    return pandas.DataFrame([list(line.values()) for line in lines], list(names), columns)


def require_pandas():
    """Return pandas; raise an ImportError that names the extra it is in."""
    try:
        import pandas
    except ImportError:
        raise ImportError("tables need pandas: install itrloss with the extra 'cli'") from None
    return pandas


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


def _recalls(row: Row, ks: Ks, least: float) -> dict[tuple[str, str], object]:
    """Return R@K, the RSUM and its change."""
    metrics = row.results.metrics(ks)
    line: dict[tuple[str, str], object] = {}
    for way in WAYS:
        for k in ks:
            line[ARROWS[way], f"R@{k}"] = metrics[f"{way}_r{k}"]
    line["", "RSUM"] = metrics["rsum"]
    change, p = _change(row.changes.get("rsum"), least)
    line["", "change (95 %)"] = change
    line["", "p"] = p
    if row.seconds is not None:
        line["", "time"] = f"{row.seconds:.1f}s"
    return line


def _changes(row: Row, least: float) -> dict[tuple[str, str], object]:
    """Return the changes of R@1 in both directions."""
    line: dict[tuple[str, str], object] = {}
    for way in WAYS:
        head = f"change of R@1, {ARROWS[way]}"
        line[head, "points (95 %)"], line[head, "p"] = _change(row.changes[f"{way}_r1"], least)
    return line


def _change(change: Comparison | None, least: float) -> tuple[str, str]:
    """Return a difference with its interval, and its p-value; empty texts for the base."""
    if change is None:
        return "", ""
    difference, low, high, p = change
    return f"{_signed(difference)} ({_signed(low)}, {_signed(high)})", p_text(p, least)


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


# ------------------------------------------------------------------------------------------ formats


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of a frame as they are printed: numbers have one decimal."""
    return frame.map(lambda x: x if isinstance(x, str) else f"{x:.1f}")


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """Return which cells are the highest of their column as printed; none in a single row."""
    numbers = shown(frame.select_dtypes("number")).astype(float)
    highest = (numbers == numbers.max()) & (len(frame) > 1)
    return highest.reindex(columns=frame.columns, fill_value=False).astype(bool)


def text(table: Table, width: int | None = None) -> str:
    """Return the table as plain text for a terminal of ``width`` characters.

    What is wider is divided into parts, one below the other. ``width=None``: rows may have any
    length, and the notes up to 100 characters a line.
    """
    lines = []
    with require_pandas().option_context("display.unicode.east_asian_width", True):
        for frame in table.frames:
            lines += [*shown(frame).to_string(line_width=width).split("\n"), ""]
    for note in table.notes:
        lines += textwrap.wrap(note, width or 100)
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def latex(table: Table) -> str:
    """Return the table in LaTeX, for the packages booktabs and inputenc (UTF-8).

    It is a ``tabular`` for the recalls and one for the changes of R@1, then the notes in small
    print, to be put into a float. The best of each column is bold.
    """
    parts = []
    for frame in table.frames:
        cells = shown(frame).map(lambda text: _SIGNED.sub(r"$\g<0>$", _tex(text)))
        cells = cells.where(~best(frame), r"\textbf{" + cells + "}").rename(_tex)
        cells = cells.rename(columns=_tex)
        layout = "l" + "r" * len(cells.columns)
        parts.append(cells.to_latex(escape=False, multicolumn_format="c", column_format=layout))
    if table.notes:
        notes = "\n\n".join(_tex(note) for note in table.notes)
        parts.append(
            f"\\begin{{minipage}}{{\\linewidth}}\\footnotesize\n{notes}\n\\end{{minipage}}\n"
        )
    return "\\par\\medskip\n".join(parts)


def _tex(text: str) -> str:
    """Return plain text for LaTeX: one line, where no letter is a command."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return printable.translate(_TEX)
