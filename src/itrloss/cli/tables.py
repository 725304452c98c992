"""Tables that compare methods: data frames with notes, and the same as text and in LaTeX.

:mod:`itrloss.cli.report` shows them as HTML. They need the extra ``cli``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from ..metrics import Comparison, RetrievalResults
from ..metrics.results import RECALLS, WAYS, Ks
from ..rerank import FastReranker, Reranker
from ..rerank.fast import SCALES

DAGGER = "†"
# the figures whose differences are tested: the RSUM and R@1 of both directions
TESTED = ("rsum", "i2t_r1", "t2i_r1")
SIGNIFICANT = 0.05
# Bootstrap samples for each test. If none of them has the other sign, p is 2 / (samples + 1) before
# Holm's correction multiplies it by at most the number of tests: "< 0.001".
SAMPLES_A_TEST = 2000
ARROWS = {"i2t": "image→text", "t2i": "text→image"}
_HEADS = {"rsum": "RSUM", **{f"{way}_r1": f"R@1 {arrow}" for way, arrow in ARROWS.items()}}
# where hubs were looked for: in words, and as it stands behind the name of a method
HUBS = {
    "": ("", ""),
    "test": ("the test queries", ""),
    "bank": ("the bank", ", bank"),
    "bank i2t": ("the bank (i2t)", f", bank ({ARROWS['i2t']})"),
    "bank t2i": ("the bank (t2i)", f", bank ({ARROWS['t2i']})"),
}
TITLES = {  # names for readers who do not know the command line's
    "no re-ranking": "No re-ranking",
    "fast, calibrated": "Fast Re-ranking, calibrated",
    "fast": "Fast Re-ranking",
    "inverted-softmax": "Inverted softmax",
    "dual-softmax": "Dual softmax",
    "qb-norm": "QB-Norm",
    "dbnorm": "DBNorm",
    "nnn": "NNN",
    "csls": "CSLS",
    "mutual-proximity": "Mutual proximity",
    "sinkhorn": "Sinkhorn",
    "dbsn": "DBSN",
}
_NAME = 17  # letters of the longest method without a bank
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
class Entry:
    """A row of a table: a model, or a method and what it makes of the scores.

    Attributes:
        name: of a model; a key of :data:`itrloss.cli.comparison.METHODS`, ``"no re-ranking"``, or
            ``"fast, calibrated"``; or a name of one's own, by default the re-ranker's ``repr``.
        results: the results of all queries.
        reranker: None: no re-ranking.
        hubs: where hubs were looked for: ``"test"``, so that the result of a query depends on the
            other test queries; ``"bank"``; ``"bank i2t"`` or ``"bank t2i"`` if only that direction
            has a bank; or ``""`` without re-ranking.
        seconds: how long it took; 0 of models.
        changes: the differences of the RSUM and of R@1 of both directions from the first entry,
            with p-values that Holm's method corrected over all entries; empty for the first.
        chosen_on: the pairs that its scales were chosen on, in words; empty if they were not.
    """

    name: str
    results: RetrievalResults
    reranker: Reranker | None = None
    hubs: str = ""
    seconds: float = 0.0
    changes: Mapping[str, Comparison] = field(default_factory=dict)
    chosen_on: str = ""

    @property
    def label(self) -> str:
        """The name as the command line has it, and the bank if there is one."""
        return self.name + HUBS[self.hubs][1]

    @property
    def title(self) -> str:
        """The name in words, and the bank if there is one."""
        return TITLES.get(self.name, self.name) + HUBS[self.hubs][1]

    @property
    def dagger(self) -> str:
        """A dagger if the result of a query depends on the other test queries."""
        return DAGGER if self.hubs not in ("", "bank") else ""

    @property
    def scales(self) -> str:
        """What calibration chose, in sentences; empty for other methods."""
        if not self.chosen_on or not isinstance(self.reranker, FastReranker):
            return ""
        i2t = "γ1 = {:g}, γ2 = {:g}".format(*self.reranker.i2t)
        t2i = "λ1 = {:g}, λ2 = {:g}".format(*self.reranker.t2i)
        chosen = (*self.reranker.i2t, *self.reranker.t2i)
        ends = {"smallest": min(SCALES), "largest": max(SCALES)}
        found = [f"{x:g} is the {end}" for end, x in ends.items() if x in chosen]
        limits = f" Of the values that were tried, {' and '.join(found)}." if found else ""
        values = f"{i2t} ({ARROWS['i2t']}); {t2i} ({ARROWS['t2i']})"
        return f"{values}, chosen on {self.chosen_on}.{limits}"


@dataclass(frozen=True)
class Table:
    """The recalls, their changes, and what readers have to know of them.

    Attributes:
        frames: data frames with the names of methods as index and two levels of columns. Numbers
            are printed in one decimal, and the highest of each column is bold in LaTeX and HTML.
        notes: sentences below the frames.
    """

    frames: Sequence[pd.DataFrame]
    notes: Sequence[str] = ()


def comparison_table(
    entries: Sequence[Entry],
    ks: Ks = RECALLS,
    *,
    samples: int,
    titles: bool = True,
    timed: bool = False,
    notes: Iterable[str] = (),
) -> Table:
    """Return the table of entries, each compared with the first one.

    Args:
        entries: the first is the base.
        ks: the K of R@K.
        samples: the number of bootstrap samples behind their changes.
        titles: whether methods have names in words; if not, the command line's.
        timed: whether there is a column with the seconds.
        notes: further ones, behind those on the figures.
    """
    tests = len(TESTED) * (len(entries) - 1)
    least = 2 * tests / (samples + 1)
    names = [(entry.title if titles else entry.label) + entry.dagger for entry in entries]
    frames = [frame(names, [_recalls(entry, ks, timed) for entry in entries])]
    if tests:
        frames.append(frame(names[1:], [_changes(entry, least) for entry in entries[1:]]))
    return Table(frames, [*_notes(entries, tests, samples), *_falls(names, entries), *notes])


def frame(names: Sequence[str], lines: Sequence[Mapping[tuple[str, str], object]]) -> pd.DataFrame:
    """Return a data frame with an index of names; lines have cells by (upper head, head)."""
    columns = pd.MultiIndex.from_tuples(list(lines[0]))
    return pd.DataFrame([list(line.values()) for line in lines], list(names), columns)


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


def _recalls(entry: Entry, ks: Ks, timed: bool) -> dict[tuple[str, str], object]:
    """Return R@K, the RSUM, and perhaps the time."""
    metrics = entry.results.metrics(ks)
    line: dict[tuple[str, str], object] = {}
    for way in WAYS:
        for k in ks:
            line[ARROWS[way], f"R@{k}"] = metrics[f"{way}_r{k}"]
    line["", "RSUM"] = metrics["rsum"]
    if timed:
        line["", "time"] = f"{entry.seconds:.1f}s"
    return line


def _changes(entry: Entry, least: float) -> dict[tuple[str, str], object]:
    """Return the differences that are tested with their intervals, and the p-values."""
    line: dict[tuple[str, str], object] = {}
    for figure in TESTED:
        difference, low, high, p = entry.changes[figure]
        interval = f"({_signed(low)}, {_signed(high)})"
        line[_HEADS[figure], "change (95 %)"] = f"{_signed(difference)} {interval}"
        line[_HEADS[figure], "p"] = p_text(p, least)
    return line


def _signed(value: float) -> str:
    """Return a number in one decimal with its sign; a rounded zero is +0.0."""
    text = f"{value:+.1f}"
    return "+0.0" if text == "-0.0" else text


def _notes(entries: Sequence[Entry], tests: int, samples: int) -> list[str]:
    """Return what the columns are, the footnote of the dagger, and which queries do not count."""
    notes = []
    if tests:
        notes.append(
            "Changes are against the first row, with 95 % confidence intervals of a paired "
            f"bootstrap over images ({samples:,} samples). P is two-sided, and corrected by Holm's "
            f"method over the {tests} tests of this table. The intervals are not corrected."
        )
    if any(entry.dagger for entry in entries):
        notes.append(
            f"{DAGGER} looks at the other test queries (transductive): the result of a query "
            "depends on which queries are ranked together."
        )
    results = entries[0].results
    if results.i2t.unmatched or results.t2i.unmatched:
        notes.append(f"{results.unmatched_in_words}: they are ranked for others, and do not count.")
    return notes


def _falls(names: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    """Return a sentence for each significant fall of R@1 where the RSUM rises."""
    falls = []
    for name, entry in zip(names, entries, strict=True):
        if not entry.changes or entry.changes["rsum"].difference <= 0:
            continue
        for way in WAYS:
            change = entry.changes[f"{way}_r1"]
            if change.difference < 0 and change.p_value < SIGNIFICANT:
                falls.append(
                    f"Warning: {name}: R@1 of {ARROWS[way]} falls by {-change.difference:.1f}, "
                    f"though RSUM rises by {entry.changes['rsum'].difference:.1f}."
                )
    return falls


# ------------------------------------------------------------------------------------------ formats


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of a frame as they are printed: numbers have one decimal."""
    return frame.map(lambda x: x if isinstance(x, str) else f"{x:.1f}")


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """Return which cells are the highest of their column as printed; none in a single row."""
    numbers = shown(frame.select_dtypes("number")).astype(float)
    highest = (numbers == numbers.max()) & (len(frame) > 1)
    return highest.reindex(columns=frame.columns, fill_value=False).astype(bool)


def show(table: Table, console: Console) -> None:
    """Print the table in the width of a console; the row with the highest RSUM has a star."""
    for frame in table.frames:
        blanks = (0, int(console.width > 100))  # beside each cell
        grid = Grid(box=box.SIMPLE_HEAD, padding=blanks, pad_edge=False, show_edge=False)
        longest = max(map(len, frame.index))
        grid.add_column("", overflow="fold", min_width=min(longest, _NAME))
        for upper, head in frame.columns.tolist():
            short = upper.replace("image", "i").replace("text", "t") if head != "p" else ""
            is_number = pd.api.types.is_numeric_dtype(frame[upper, head])
            grid.add_column(f"{short}\n{head}", justify="right", no_wrap=is_number, overflow="fold")
        rows = shown(frame).replace({", ": ",", "< ": "<", "≤ ": "≤"}, regex=True)
        stars = np.zeros(len(frame), bool)
        if len(table.frames) > 1 and ("", "RSUM") in frame:  # a comparison
            stars = best(frame)["", "RSUM"]
        for (name, cells), star in zip(rows.iterrows(), stars, strict=True):
            label = f"{name} ★" if star else str(name)
            grid.add_row(label, *cells, style="bold green" if star else "")
        console.print(grid, "", markup=False, highlight=False)
    for note in table.notes:
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
