"""Tables that compare methods: data frames with notes, and the same as text and in LaTeX.

:mod:`itrloss.cli.report` shows them as HTML. They need the extra ``cli``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from pandas.io.formats.style import Styler
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid

from ..metrics import Comparison, RetrievalResults
from ..metrics.results import RECALLS, WAYS, Ks
from ..rerank import Reranker

Line = dict[tuple[str, str], object]  # cells by upper head and head
Names = tuple[Sequence[str], Sequence[str]]  # of images and of texts
DAGGER = "†"
# the figures whose differences are tested: the RSUM and R@1 of both directions
TESTED = ("rsum", "i2t_r1", "t2i_r1")
# Bootstrap samples for each test. If none of them has the other sign, p is 2 / (samples + 1) before
# Holm's correction multiplies it by at most the number of tests: "< 0.001".
SAMPLES_A_TEST = 2000
ARROWS = {"i2t": "image→text", "t2i": "text→image"}
_HEADS = {"rsum": "RSUM", **{f"{way}_r1": f"R@1 {arrow}" for way, arrow in ARROWS.items()}}
_NAME = 17  # letters of the longest word of a method's name, which stay in a line
_SIGNED = re.compile(r"[+-]\d+\.\d")
# what pandas leaves as it is: "[" would begin an option behind the end of a row, and the default
# fonts have no others of these letters, or in other places
_TEX = str.maketrans(
    {
        "[": "{[}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "≤": r"$\le$",
        "→": r"$\to$",
        "†": r"$^\dagger$",
    }
)


def samples_for(systems: int) -> int:
    """Return how many bootstrap samples let p of this many systems fall below 0.001."""
    return SAMPLES_A_TEST * len(TESTED) * max(1, systems)


@dataclass(frozen=True)
class Entry:
    """A row of a table: a model, or a method and what it makes of the scores.

    Attributes:
        name: of a model, or of a method, with what it was made ready with, as in ``"fast,
            calibrated, bank"``.
        results: the results of all queries.
        method: a key of :data:`itrloss.cli.comparison.METHODS`, ``"no re-ranking"``, or a
            re-ranker's ``repr``.
        reranker: None: no re-ranking.
        transductive: whether the result of a query depends on the other test queries.
        seconds: how long it took; 0 of models.
        held_out: its RSUM on held-out pairs, if there are any.
        changes: the differences of the RSUM and of R@1 of both directions from the first entry,
            with p-values that Holm's method corrected over all entries; empty for the first.
    """

    name: str
    results: RetrievalResults
    method: str = ""
    reranker: Reranker | None = None
    transductive: bool = False
    seconds: float = 0.0
    held_out: float | None = None
    changes: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name, with a dagger if the method is transductive."""
        return self.name + DAGGER * self.transductive


@dataclass(frozen=True)
class Table:
    """The recalls, their changes, and what readers have to know of them.

    Attributes:
        frames: data frames with the names of methods as index and two levels of columns. Numbers
            are printed in one decimal, and the highest of each column is bold in LaTeX and HTML.
        notes: sentences below the frames.
        hints: what to do next, below the notes; LaTeX leaves them out.
    """

    frames: Sequence[pd.DataFrame]
    notes: Sequence[str] = ()
    hints: Sequence[str] = ()


@dataclass(frozen=True)
class SystemComparison:
    """Models or re-rankers on the same queries, each compared with the first one.

    Attributes:
        entries: of re-rankers, first the one without re-ranking.
        samples: how many there were of the bootstrap behind the changes.
        notes: sentences on the entries.
        hints: which method to take, and which were left out.
        advised: of re-rankers, the one to take, if there is advice.
    """

    entries: Sequence[Entry]
    samples: int = 0
    notes: Sequence[str] = ()
    hints: Sequence[str] = ()
    advised: Entry | None = None

    def table(self, ks: Ks = RECALLS, *, timed: bool = False) -> Table:
        """Return the table of all entries: recalls, changes of the RSUM and of R@1, and notes.

        Args:
            ks: the K of R@K.
            timed: whether there is a column with the seconds.
        """
        names = [entry.title for entry in self.entries]
        recalls = [_recalls(entry, ks, timed) for entry in self.entries]
        frames = [frame(names, recalls)]
        tests = len(TESTED) * (len(names) - 1)
        if tests:
            changes = [_changes(entry) for entry in self.entries[1:]]
            frames.append(frame(names[1:], changes))
        notes = _notes(self.entries, tests, self.samples)
        return Table(frames, [*notes, *self.notes], self.hints)


def frame(names: Sequence[str], lines: Sequence[Line]) -> pd.DataFrame:
    """Return a data frame with an index of names; lines have cells by (upper head, head)."""
    columns = pd.MultiIndex.from_tuples(list(lines[0]))
    return pd.DataFrame([list(line.values()) for line in lines], list(names), columns)


def p_text(p: float) -> str:
    """Return a p-value in three decimals, never 0."""
    if p < 0.001:
        return "<0.001"
    return f"{p:.3f}"


def _recalls(entry: Entry, ks: Ks, timed: bool) -> Line:
    """Return R@K, the RSUM, and perhaps the time."""
    metrics = entry.results.metrics(ks)
    line: Line = {}
    for way in WAYS:
        for k in ks:
            line[ARROWS[way], f"R@{k}"] = metrics[f"{way}_r{k}"]
    line["", "RSUM"] = metrics["rsum"]
    if timed:
        line["", "time"] = f"{entry.seconds:.1f}s"
    return line


def _changes(entry: Entry) -> Line:
    """Return the differences that are tested with their intervals, and the p-values."""
    line: Line = {}
    for figure in TESTED:
        difference, low, high, p = entry.changes[figure]
        interval = f"({_signed(low)},{_signed(high)})"
        line[_HEADS[figure], "change (95 %)"] = f"{_signed(difference)} {interval}"
        line[_HEADS[figure], "p"] = p_text(p)
    return line


def _signed(value: float) -> str:
    """Return a number in one decimal with its sign; a rounded zero is +0.0."""
    return f"{round(value, 1) + 0.0:+.1f}"


def _notes(entries: Sequence[Entry], tests: int, samples: int) -> list[str]:
    """Return what the columns are, the footnote of the dagger, and which queries do not count."""
    notes = []
    if tests:
        notes.append(
            "Changes are against the first row, with 95 % confidence intervals of a paired "
            f"bootstrap over images ({samples:,} samples). P is two-sided, and corrected by Holm's "
            f"method over the {tests} tests of this table. The intervals are not corrected."
        )
    if any(entry.transductive for entry in entries):
        notes.append(
            f"{DAGGER} looks at the other test queries (transductive): the result of a query "
            "depends on which queries are ranked together."
        )
    results = entries[0].results
    if results.i2t.unmatched or results.t2i.unmatched:
        notes.append(f"{results.unmatched_in_words}: they are ranked for others, and do not count.")
    return notes


# ------------------------------------------------------------------------------------------ formats


def show(table: Table, console: Console) -> None:
    """Print the table in the width of a console; the row with the highest RSUM has a star."""
    for frame in table.frames:
        blanks = (0, int(console.width > 100))  # beside each cell
        grid = Grid(box=box.SIMPLE_HEAD, padding=blanks, pad_edge=False, show_edge=False)
        # Names of changes break behind a comma, to leave room for intervals, which break, too.
        is_narrow = console.width < 100 and ("RSUM", "p") in frame
        width = min(_NAME, max(map(cell_len, frame.index))) if is_narrow else None
        grid.add_column("", overflow="fold", width=width)
        for upper, head in frame.columns.tolist():
            short = upper.replace("image", "i").replace("text", "t") if head != "p" else ""
            title = f"{short}\n{head}"
            grid.add_column(title, justify="right", overflow="fold", no_wrap=head == "p")
        best = ""
        if len(table.frames) > 1 and ("", "RSUM") in frame:  # a comparison
            best = frame["", "RSUM"].idxmax()
        rows = frame.round(1).astype(str)
        if is_narrow:
            rows = rows.replace(",", ", ", regex=True)
        for name, cells in rows.iterrows():
            is_best = name == best
            style = "bold green" if is_best else ""
            grid.add_row(f"{name}{' ★' * is_best}", *cells, style=style)
        console.print(grid, "", markup=False, highlight=False)
    for note in (*table.notes, *table.hints):
        console.print(note, markup=False, highlight=False)


def text(table: Table, width: int = 100) -> str:
    """Return the table as plain text of at most ``width`` characters a line."""
    file = io.StringIO()
    show(table, Console(file=file, width=width, color_system=None))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def latex(table: Table) -> str:
    """Return the table in LaTeX, for the packages booktabs and inputenc (UTF-8).

    It is a ``tabular`` for the recalls and one for their changes, then the notes in small print, to
    be put into a float. The best of each column is bold.
    """
    parts = []
    for frame in table.frames:
        layout = "l" + "r" * len(frame.columns)
        style = styled(frame, "latex", "textbf:--rwrap")
        parts.append(style.to_latex(hrules=True, multicol_align="c", column_format=layout))
    notes = pd.DataFrame(table.notes).style
    notes.format(escape="latex")
    notes.hide(axis="index")
    notes.hide(axis="columns")
    parts.append("{\\footnotesize\n" + notes.to_latex(column_format=r"@{}p{\linewidth}@{}") + "}\n")
    whole = "\\par\\medskip\n".join(parts).translate(_TEX)
    return _SIGNED.sub(r"$\g<0>$", whole)


def styled(frame: pd.DataFrame, escape: str, bold: str) -> Styler:
    """Return a frame in the style of ``escape``, LaTeX or HTML, in which the highest number of each
    column is bold.
    """
    style = frame.round(1).style
    style.format(precision=1, escape=escape)
    for axis in ("index", "columns"):
        style.format_index(escape=escape, axis=axis)
    if len(frame) > 1:
        style.highlight_max(subset=frame.select_dtypes("number").columns, props=bold)
    return style
