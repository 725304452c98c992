"""The registry of the tables and figures of the three papers, read from papers.toml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import read_toml
from .evaluate import FIGURES

TABLES = Path(__file__).with_name("papers.toml")
PAPERS = ("coder", "user", "dvse")


def titled(figure: str) -> str:
    """The title of a figure: "RSUM" of "rsum", "i2t R@1" of "i2t_r1"."""
    if figure == "rsum":
        return "RSUM"
    return figure.replace("_r_precision", " R-P").replace("_r", " R@").replace("_", " ")


@dataclass(frozen=True)
class Row:
    """A row of a table: the full model with other settings."""

    what: str  # in words
    set: Sequence[str] = ()  # key=value, or key*=factor of the full model's
    # for tables of re-ranking: γ1, γ2, λ1, λ2, or a name in rerankers.py
    rerank: Sequence[float] | str = ()
    mean_of: Sequence[str] = ()  # rows whose similarities are averaged
    needs: Mapping[str, str] = field(default_factory=dict)  # what settings must hold
    cannot: str = ""  # the reason why it is not run


@dataclass(frozen=True)
class Claim:
    """A paper's claim about pairs of rows: the first is above the second, or they differ by at most
    `apart`.
    """

    says: str
    above: Sequence[Sequence[str]] = ()
    within: Sequence[Sequence[str]] = ()
    apart: float = 0.0
    figure: str = "rsum"

    @property
    def pairs(self) -> list[Sequence[str]]:
        return [*self.above, *self.within]


@dataclass(frozen=True)
class Sweep:
    """A curve: rows that differ in one setting."""

    name: str  # of the setting, as printed
    set: str  # the setting; with *, values are multiples of the full model's, printed as `of`
    values: Sequence[float]  # as printed
    of: float = 1.0
    series: str = ""  # the model, if there are curves of several,
    also: Sequence[str] = ()  # and its settings
    best: Mapping[str, float] = field(default_factory=dict)  # the printed best value, by data set

    def row(self, value: float) -> str:
        """The name of a value's row."""
        return f"{self.name} = {value}" + (f", {self.series}" if self.series else "")

    def rows(self) -> dict[str, Row]:
        rows = {}
        for value in self.values:
            number = value / self.of if self.set.endswith("*") else value
            rows[self.row(value)] = Row(self.series, [f"{self.set}={number}", *self.also])
        return rows

    def claims(self, figure: str) -> list[Claim]:
        claims = []
        for data, best in self.best.items():
            pairs = [(self.row(best), self.row(value)) for value in self.values if value != best]
            says = f"{self.row(best)} is best (on {data})"
            claims.append(Claim(says, above=pairs, figure=figure))
        return claims


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper."""

    title: str
    rows: dict[str, Row]
    kind: str = "table"
    baseline: str = ""  # the row that others are compared with
    # by data set, row and figure
    printed: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    note: str = ""
    needs: str = ""  # what the paper's own figures need, if not what the others of the paper do
    reranks: bool = False  # rows differ in how their model's scores are re-ranked
    sweeps: Sequence[Sweep] = ()
    shown: Sequence[str] = ("rsum",)  # figures of a chart

    @property
    def when(self) -> str:
        """Whether rows are compared "before" or "after" re-ranking."""
        return "after" if self.reranks else "before"


@dataclass(frozen=True)
class Paper:
    title: str
    # settings of the full model; those of a file or the command line override them
    base: Sequence[str]
    tables: dict[str, Table]
    needs: str = ""


def load_paper(name: str) -> Paper:
    """Read a paper's tables and figures from papers.toml."""
    described = read_toml(TABLES)[name]
    tables = {number: _table(**table) for number, table in described.pop("tables").items()}
    return Paper(tables=tables, **described)


def _table(
    rows: Mapping[str, Mapping[str, Any]] | None = None,
    printed: Mapping[str, Mapping[str, Any]] | None = None,
    claims: Sequence[Mapping[str, Any]] = (),
    sweeps: Sequence[Mapping[str, Any]] = (),
    **others: Any,
) -> Table:
    all_rows = {name: Row(**row) for name, row in (rows or {}).items()}
    all_claims = [Claim(**claim) for claim in claims]
    curves = [Sweep(**sweep) for sweep in sweeps]
    for curve in curves:
        all_rows |= curve.rows()
        all_claims += curve.claims(others["shown"][0])
    figures = {data: _printed(**table) for data, table in (printed or {}).items()}
    return Table(rows=all_rows, printed=figures, claims=all_claims, sweeps=curves, **others)


def _printed(
    columns: Sequence[str] = FIGURES, **rows: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Rows of figures by name; RSUM is added if all six recalls are printed without it."""
    figures = {}
    for name, row in rows.items():
        own = dict(zip(columns, row, strict=False))
        if "rsum" in columns and "rsum" not in own:
            own["rsum"] = round(sum(row), 1)
        figures[name] = own
    return figures
