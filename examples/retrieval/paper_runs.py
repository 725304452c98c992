"""The runs of a table's rows: ordinary run directories, one for each row and seed.

A directory is named after a digest of its settings: rows with equal settings share one run,
finished runs are not repeated, interrupted ones are resumed, and other settings get other
directories.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from itrloss.files import written
from itrloss.rerank import Reranker

from .config import Config, load_config, make_config, read_toml
from .data import Split, features_directory, load_split
from .evaluate import before_and_after, encode, match, model_scores, reranker
from .paper_tables import Paper, Row, Table, load_paper
from .pictures import layout
from .preparation import data_directory, load_model
from .rerankers import METHODS
from .runs import Metrics, decisive, load_run
from .train import train

OWN = ("loss", "seed", "out", "resume")  # settings that the grid sets itself


@dataclass(frozen=True)
class Grid:
    """Tables of a paper over seeds, with the settings that all rows share."""

    paper: str
    file: Path | None = None  # of --config
    common: Sequence[str] = ()  # key=value
    seeds: Sequence[int] = (0,)
    out: Path = Path("runs/paper")
    only: Sequence[str] = ()  # tables; empty: all
    split: str = "dev"  # on which rows are measured
    rows: Sequence[str] = ()  # those that are run; empty: all

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
        names = [name for table in self.tables.values() for name in table.rows]
        for row in self.rows:
            if row not in names:
                raise ValueError(f"--row: the tables have {', '.join(names)}, got {row!r}")

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
        digest = hashlib.sha256(decisive(asdict(config)).encode()).hexdigest()[:10]
        return replace(config, out=str(self.out / f"{config.loss}_{digest}_seed{seed}"))

    def _in_file(self, setting: str) -> bool:
        if self.file is None or setting.startswith("loss="):
            return False
        stated = read_toml(self.file)
        name, _, option = setting.partition("=")[0].partition(".")
        if option:
            return option in stated.get(name, {})
        return name in stated

    def cannot(self, row: Row) -> str:
        """The reason why a row is not run with these settings and data; empty if it is."""
        if row.cannot or row.mean_of:
            return row.cannot
        config = self.config(row, 0)
        for setting, part in row.needs.items():
            value = getattr(config, setting).lower()
            # a BERT may have any name
            if part not in value and (part != setting or not value):
                return f"needs {part} as {setting}=…"
        data = Path(config.data)
        is_raw = config.data != "scenes" and layout(data) != "features"
        if is_raw and not config.backbone:
            return f"needs regions, and {data} has raw images"
        files = features_directory(data)
        if config.enhancement == "cge" and not (files / "train_global.npy").exists():
            return "needs the global features of CLIP, {split}_global.npy"
        return ""

    def runs(self) -> dict[str, tuple[Config, list[str]]]:
        """Distinct runs by directory, each with the rows that use it."""
        by_directory: dict[str, tuple[Config, list[str]]] = {}
        for number, table in self.tables.items():
            for (name, row), seed in product(table.rows.items(), self.seeds):
                left_out = self.rows and name not in self.rows
                if left_out or row.mean_of or self.cannot(row):
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
    """Metrics of the finished runs, before and after re-ranking, by row and seed."""
    metrics: dict[str, dict[int, Metrics]] = {name: {} for name in table.rows}
    for (name, row), seed in product(table.rows.items(), grid.seeds):
        parts = [table.rows[part] for part in row.mean_of] or [row]
        configs = [grid.config(part, seed) for part in parts]
        if any(grid.cannot(part) for part in parts) or {*map(state, configs)} != {"finished"}:
            continue
        metrics[name][seed] = _of_row(grid.split, table, row, configs)
    return metrics


def _of_row(split_name: str, table: Table, row: Row, configs: Sequence[Config]) -> Metrics:
    if table.kind == "time":
        return timed(configs[0], split_name)
    if not (table.reranks or row.mean_of):
        known = load_run(Path(configs[0].out)).metrics
        if split_name in known:
            return known[split_name]
    each = [scores_of(config, split_name) for config in configs]
    scores = torch.stack([scores for scores, _ in each]).mean(0)
    split = each[0][1]
    by: Reranker = reranker(configs[0].rerank)
    if isinstance(row.rerank, str):
        by = METHODS[row.rerank]()
    elif row.rerank:
        by = reranker(row.rerank)
    both = before_and_after(scores, split, by, folds_of(configs[0], split_name))
    if table.reranks and not row.rerank:
        return {"before": both["before"], "after": both["before"]}
    start = time.perf_counter()
    by.rerank(scores)
    both["after"]["seconds"] = time.perf_counter() - start
    return both


def split_of(config: Config, split_name: str) -> Split:
    """The split on which a run is measured: "dev", or another one for the run's test split."""
    split = whole_split_of(config, split_name)
    return split.first(config.dev_images) if split_name == "dev" else split


def whole_split_of(config: Config, split_name: str) -> Split:
    """The same split, with all images of dev."""
    name = files_of(config, split_name)
    return load_split(data_directory(config), name, config.image_size)


def files_of(config: Config, split_name: str) -> str:
    """The name that the split's files begin with: "dev", or that of the run's test split."""
    return "dev" if split_name == "dev" else config.test_split


def folds_of(config: Config, split_name: str) -> int:
    """The number of parts of the split, each of which is ranked for itself."""
    return config.test_folds if split_name == "test_folds" else 1


def scores_of(config: Config, split_name: str) -> tuple[Tensor, Split]:
    """Similarities of a finished run on a split, stored next to it, and the split."""
    split = split_of(config, split_name)
    stored = Path(config.out) / f"{split_name}_scores.npy"
    if not stored.exists():
        model, words, _ = load_model(Path(config.out) / "best.pt")
        scores = model_scores(model.to(config.device), split, words)
        with written(stored, "wb") as file:
            np.save(file, scores.numpy())
    return torch.from_numpy(np.load(stored)), split


def timed(config: Config, split_name: str) -> Metrics:
    """Metrics before and after re-ranking, with the seconds of encoding and of matching, and
    thousand pairs per second.
    """
    model, words, _ = load_model(Path(config.out) / "best.pt")
    model.to(config.device)
    split = split_of(config, split_name)
    start = time.perf_counter()
    images, texts = encode(model, split, words)
    encoded = time.perf_counter()
    scores = match(model, images, texts)
    end = time.perf_counter()
    folds = folds_of(config, split_name)
    both = before_and_after(scores, split, reranker(config.rerank), folds)
    times = {
        "encode_seconds": encoded - start,
        "match_seconds": end - encoded,
        "seconds": end - start,
        "kpps": scores.numel() / (end - start) / 1000,
    }
    return {when: {**figures, **times} for when, figures in both.items()}
