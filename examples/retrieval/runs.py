"""Finished runs, and experiments: runs that differ in the seed only."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import NO_EFFECT

IGNORED = NO_EFFECT | {"seed"}  # settings that may differ between the runs of an experiment
FILES = ("config.json", "metrics.json", "log.jsonl", "dev_scores.npy")

Metrics = dict[str, dict[str, float]]  # "before" and "after" re-ranking, by figure
Rows = Mapping[str, Mapping[int, Metrics]]  # of a table, by name and seed


@dataclass(frozen=True)
class Run:
    """The trainer's results in a run directory."""

    directory: Path
    config: dict[str, Any]
    metrics: dict[str, Metrics]  # by split
    history: list[dict[str, float]]  # one dict per epoch

    def scores(self) -> Tensor:
        """Similarities on dev, (images, captions) float32."""
        return torch.from_numpy(np.load(self.directory / "dev_scores.npy"))


def load_run(directory: Path) -> Run:
    """Read a finished run; a ValueError names what is missing."""
    for name in FILES:
        if not (directory / name).is_file():
            raise ValueError(f"{directory}: no finished run, {name} is missing")
    lines = (directory / "log.jsonl").read_text().splitlines()
    return Run(
        directory,
        json.loads((directory / "config.json").read_text()),
        json.loads((directory / "metrics.json").read_text()),
        [json.loads(line) for line in lines],
    )


@dataclass(frozen=True)
class Experiment:
    """Runs that differ in the seed only."""

    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """The name of the run directory; of several runs, that of the first without its seed."""
        name = self.runs[0].directory.resolve().name
        if len(self.runs) > 1:
            name = re.sub(r"[_-]?(seed)?[_-]?\d+$", "", name)
        return name

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the first run."""
        return self.runs[0].config

    @property
    def seconds(self) -> float:
        """The time of training of all runs."""
        return sum(line["seconds"] for run in self.runs for line in run.history)

    def values(self, split: str, when: str, figure: str) -> list[float]:
        """A figure of each run; a ValueError if it was not measured on the split."""
        for run in self.runs:
            if split not in run.metrics:
                others = ", ".join(run.metrics)
                raise ValueError(f"{run.directory}: has no metrics on {split}, only on {others}")
        return [run.metrics[split][when][figure] for run in self.runs]

    def mean(self, split: str, when: str, figure: str) -> float:
        return statistics.fmean(self.values(split, when, figure))

    def curves(self) -> list[list[float]]:
        """RSUM on dev after each epoch, of each run."""
        return [[line["rsum"] for line in run.history] for run in self.runs]

    def best_run(self) -> Run:
        """The run with the highest RSUM after re-ranking on dev."""
        return max(self.runs, key=lambda run: run.metrics["dev"]["after"]["rsum"])


def decisive(settings: Mapping[str, Any]) -> str:
    """The settings that make an experiment another one, as text."""
    kept = {name: value for name, value in settings.items() if name not in IGNORED}
    return json.dumps(kept, sort_keys=True)


def experiments(runs: Iterable[Run]) -> list[Experiment]:
    """Put runs together that differ in the seed only."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(decisive(run.config), []).append(run)
    return [Experiment(group) for group in groups.values()]


def reported_split(found: Iterable[Experiment]) -> str:
    """Return "test" if all runs were measured on it, else "dev"."""
    on_test = ["test" in run.metrics for experiment in found for run in experiment.runs]
    return "test" if all(on_test) else "dev"
