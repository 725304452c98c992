"""Mean ± standard deviation of finished runs that differ in the seed only.

python -m examples.retrieval.summary runs/infonce_0 runs/infonce_1 runs/infonce_2 runs/dcl_0 ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from .config import NO_EFFECT
from .evaluate import RECALLS

FIGURES = (*RECALLS, "rsum")
IGNORED = NO_EFFECT | {"seed"}  # settings that may differ between runs of one line

Metrics = dict[str, dict[str, float]]  # "before" and "after" re-ranking


def load(run: Path, split: str) -> tuple[dict[str, Any], Metrics]:
    """Read settings and metrics of a finished run; a ValueError names what is missing."""
    try:
        config = json.loads((run / "config.json").read_text())
        metrics = json.loads((run / "metrics.json").read_text())
    except OSError as error:
        raise ValueError(
            f"{run}: no finished run, {Path(error.filename).name} is missing"
        ) from None
    if split not in metrics:
        raise ValueError(f"{run}: has no metrics on {split}, only on {', '.join(metrics)}")
    return config, metrics[split]


def group(runs: list[tuple[dict[str, Any], Metrics]]) -> dict[str, list[Metrics]]:
    """Group the runs' metrics by name: the loss, its options, and other settings that differ
    between runs.
    """
    settings = [{k: v for k, v in config.items() if k not in IGNORED} for config, _ in runs]
    varying = sorted(k for k in settings[0] if any(s.get(k) != settings[0][k] for s in settings))
    groups = defaultdict(list)
    for own, (_, metrics) in zip(settings, runs, strict=True):
        options = {
            **own["loss_options"],
            **{k: own.get(k) for k in varying if k not in ("loss", "loss_options")},
        }
        name = " ".join([own["loss"], *(f"{k}={v}" for k, v in options.items())])
        groups[name].append(metrics)
    return dict(groups)


def cell(values: list[float]) -> str:
    """Format mean ± sample standard deviation; a single value stands alone."""
    mean = statistics.fmean(values)
    return f"{mean:.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{mean:.1f}"


def table(groups: dict[str, list[Metrics]]) -> list[list[str]]:
    """Rows of text, the header first: two per group, before and after re-ranking."""
    rows = [["run", "seeds", "re-ranked", *FIGURES]]
    for name, runs in groups.items():
        for when, text in (("before", "no"), ("after", "yes")):
            rows.append(
                [
                    name,
                    str(len(runs)),
                    text,
                    *(cell([run[when][f] for run in runs]) for f in FIGURES),
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--split", default="dev", choices=["dev", "test"])
    args = parser.parse_args()
    try:
        # a directory that is given twice counts as one seed
        runs = {run.resolve(): run for run in args.runs}
        rows = table(group([load(run, args.split) for run in runs.values()]))
    except ValueError as error:
        sys.exit(str(error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    main()
