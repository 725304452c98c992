r"""Run the rows of a paper's ablation tables on your data, and compare them with the printed
figures.

    python -m examples.retrieval.ablate coder --seeds 0 1 2 --out runs/ablate_coder \
        --config examples/retrieval/configs/coder_scenes.toml

ablations.toml lists what each row changes in the full model, the printed figures and the paper's
claims. Every row and seed is an ordinary run directory below --out, named after a digest of its
settings: rows with equal settings share one run, finished runs are not repeated, interrupted ones
are resumed, and other settings get other directories. `ablate_report.py` writes the comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from .config import Config, load_config, make_config, read_toml
from .data import load_split
from .evaluate import RECALLS, before_and_after, reranker
from .objectives import build_loss
from .preparation import data_directory
from .rerankers import METHODS
from .runs import IGNORED, Metrics, Run, load_run
from .train import train

TABLES = Path(__file__).with_name("ablations.toml")
PAPERS = ("coder", "user", "dvse")
OWN = ("loss", "seed", "out", "resume")  # settings that the grid sets itself


@dataclass(frozen=True)
class Row:
    """A row of a table: the full model with other settings."""

    what: str  # in words
    set: Sequence[str] = ()  # key=value, or key*=factor of the full model's
    # for tables of re-ranking: γ1, γ2, λ1, λ2, or a name in rerankers.py
    rerank: Sequence[float] | str = ()
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
class Table:
    title: str
    baseline: str  # the row that others are compared with
    rows: dict[str, Row]
    printed: dict[str, dict[str, dict[str, float]]]  # by data set, row and figure
    claims: Sequence[Claim]
    note: str = ""
    reranks: bool = False  # rows differ in how the full model's scores are re-ranked


@dataclass(frozen=True)
class Paper:
    title: str
    # settings of the full model; those of a file or the command line override them
    base: Sequence[str]
    tables: dict[str, Table]


def load_paper(name: str) -> Paper:
    """Read a paper's tables from ablations.toml."""
    described = read_toml(TABLES)[name]
    tables = {}
    for number, table in described["tables"].items():
        rows = {row: Row(**settings) for row, settings in table.pop("rows").items()}
        printed = {data: _printed(**figures) for data, figures in table.pop("printed").items()}
        claims = [Claim(**claim) for claim in table.pop("claims")]
        tables[number] = Table(rows=rows, printed=printed, claims=claims, **table)
    return Paper(described["title"], described["base"], tables)


def _printed(
    columns: Sequence[str] = (*RECALLS, "rsum"), **rows: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Rows of figures by name; RSUM is added if all six recalls are printed without it."""
    figures = {}
    for name, row in rows.items():
        own = dict(zip(columns, row, strict=False))
        if "rsum" in columns and "rsum" not in own:
            own["rsum"] = round(sum(row), 1)
        figures[name] = own
    return figures


@dataclass(frozen=True)
class Grid:
    """Tables of a paper over seeds, with the settings that all rows share."""

    paper: str
    file: Path | None = None  # of --config
    common: Sequence[str] = ()  # key=value
    seeds: Sequence[int] = (0,)
    out: Path = Path("runs/ablate")
    only: Sequence[str] = ()  # tables; empty: all

    def __post_init__(self) -> None:
        for setting in self.common:
            if setting.partition("=")[0] in OWN:
                raise ValueError(
                    f"{setting!r}: the grid itself decides {', '.join(OWN)}; see --seeds and --out"
                )
        for number in self.only:
            if number not in self.source.tables:
                raise ValueError(
                    f"tables: {self.paper} has {', '.join(self.source.tables)}, got {number!r}"
                )

    @cached_property
    def source(self) -> Paper:
        return load_paper(self.paper)

    @property
    def tables(self) -> dict[str, Table]:
        wanted = self.only or self.source.tables
        return {number: self.source.tables[number] for number in wanted}

    def config(self, row: Row, seed: int) -> Config:
        """Settings of a run; the row overrides the command line, which overrides the file's and the
        paper's.
        """
        base = [setting for setting in self.source.base if not self._in_file(setting)]
        shared = [*base, *self.common]
        # options of one loss do not fit another
        if any(setting.startswith("loss=") for setting in row.set):
            shared = [setting for setting in shared if not setting.startswith("loss_options.")]
        config = load_config(self.file, [*shared, *(s for s in row.set if "*=" not in s)])
        for setting in row.set:
            if "*=" in setting:
                config = _times(config, *setting.split("*="))
        config = replace(
            config, seed=seed, resume=True, data_root=config.data_root or str(self.out / "data")
        )
        decisive = {name: value for name, value in asdict(config).items() if name not in IGNORED}
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:10]
        return replace(config, out=str(self.out / f"{config.loss}_{digest}_seed{seed}"))

    def _in_file(self, setting: str) -> bool:
        if self.file is None or setting.startswith("loss="):
            return False
        stated = read_toml(self.file)
        name, _, option = setting.partition("=")[0].partition(".")
        if option:
            return option in stated.get(name, {})
        return name in stated

    def runs(self) -> dict[str, tuple[Config, list[str]]]:
        """Distinct runs by directory, each with the rows that use it."""
        by_directory: dict[str, tuple[Config, list[str]]] = {}
        for number, table in self.tables.items():
            for (name, row), seed in product(table.rows.items(), self.seeds):
                if row.cannot:
                    continue
                config = self.config(row, seed)
                _, users = by_directory.setdefault(config.out, (config, []))
                users.append(f"{number}: {name}")
        return by_directory


def _times(config: Config, key: str, factor: str) -> Config:
    """Copy of the settings with one number multiplied; an integer stays an integer, and at least
    1.
    """
    values = asdict(config)
    table, _, option = key.rpartition(".")
    holder = values[table] if table else values
    number = holder.get(option)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(
            f"{key}: must be a number, so that a row can have {factor} times as much of it"
        )
    scaled = number * float(factor)
    holder[option] = scaled if isinstance(number, float) else max(1, round(scaled))
    return make_config(values)


def state(config: Config) -> str:
    """State of a run: "finished", "interrupted" or "to run"."""
    out = Path(config.out)
    if (out / "metrics.json").exists():
        return "finished"
    return "interrupted" if (out / "last.pt").exists() else "to run"


def run(grid: Grid) -> None:
    """Train all runs that are not finished."""
    runs = grid.runs()
    for i, (config, rows) in enumerate(runs.values()):
        print(
            f"[{i + 1}/{len(runs)}] {Path(config.out).name}  {state(config)}  {', '.join(rows)}",
            flush=True,
        )
        if state(config) != "finished":
            try:
                train(config)
            except FloatingPointError as error:  # a diverging row should not stop the others
                print(f"    diverged: {error}", flush=True)


def measured(grid: Grid, table: Table) -> dict[str, dict[int, Metrics]]:
    """Metrics on dev of the finished runs, before and after re-ranking, by row and seed."""
    metrics_by_row: dict[str, dict[int, Metrics]] = {name: {} for name in table.rows}
    for (name, row), seed in product(table.rows.items(), grid.seeds):
        config = grid.config(row, seed)
        if row.cannot or state(config) != "finished":
            continue
        finished = load_run(Path(config.out))
        metrics = finished.metrics["dev"]
        if table.reranks:
            metrics = _reranked(finished, config, row)
        metrics_by_row[name][seed] = metrics
    return metrics_by_row


def _reranked(finished: Run, config: Config, row: Row) -> Metrics:
    """Metrics of the run's scores before and after the row's re-ranking."""
    if not row.rerank:
        before = finished.metrics["dev"]["before"]
        return {"before": before, "after": before}
    by = METHODS[row.rerank]() if isinstance(row.rerank, str) else reranker(row.rerank)
    split = load_split(data_directory(config), "dev", config.image_size).first(config.dev_images)
    return before_and_after(finished.scores(), split, by)


def main(arguments: list[str] | None = None) -> None:
    from .ablate_report import write_report

    words = sys.argv[1:] if arguments is None else arguments
    # Removed before parsing: after --seeds 0 1, argparse would take key=value for another seed.
    common = [word for word in words if re.match(r"[a-z_.]+=", word)]
    parser = argparse.ArgumentParser(
        description="Run the rows of a paper's ablation tables and compare them with its own.",
        epilog="key=value anywhere: settings of all rows, as for examples.retrieval.train",
    )
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--config", type=Path, metavar="FILE.toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--tables", nargs="+", default=[], metavar="NUMBER", help="as printed; default: all"
    )
    parser.add_argument("--out", type=Path, help="default: runs/ablate_PAPER")
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--dry-run", action="store_true", help="list the runs, and run nothing")
    doing.add_argument(
        "--report", action="store_true", help="report on what is finished, and run nothing"
    )
    args = parser.parse_args([word for word in words if word not in common])
    try:
        out = args.out or Path(f"runs/ablate_{args.paper}")
        seeds = list(dict.fromkeys(args.seeds))
        grid = Grid(args.paper, args.config, common, seeds, out, args.tables)
        for config, _ in grid.runs().values():
            build_loss(config)  # report wrong settings before the first run
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    if args.dry_run:
        print_grid(grid)
        return
    if not args.report:
        run(grid)
    print(write_report(grid))


def print_grid(grid: Grid) -> None:
    """Print which rows would be run, and which cannot be."""
    for config, rows in grid.runs().values():
        print(f"{Path(config.out).name}  {state(config):11}  {', '.join(rows)}")
    for number, table in grid.tables.items():
        for name, row in table.rows.items():
            what = f"{row.what}  {' '.join(row.set)}"
            if row.cannot:
                what = f"cannot be run: {row.cannot}"
            print(f"{number}: {name}  {what}".rstrip())


if __name__ == "__main__":
    main()
