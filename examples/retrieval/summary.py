"""Mean ± standard deviation of finished runs that differ in the seed only.

python -m examples.retrieval.summary runs/infonce_0 runs/infonce_1 runs/infonce_2 runs/dcl_0 ...
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from itrloss.cli import tables
from itrloss.cli.tables import ARROWS, Table, frame

from .evaluate import FIGURES
from .runs import Experiment, experiments, load_run


def cell(values: Sequence[float]) -> str:
    """Format mean ± sample standard deviation; a single value stands alone, none is empty."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    return f"{mean:.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{mean:.1f}"


def table(found: Sequence[Experiment], split: str) -> str:
    """Two lines per experiment: before and after re-ranking."""
    heads = [(arrow, f"R@{k}") for arrow in ARROWS.values() for k in (1, 5, 10)]
    heads = [(" ", "seeds"), *heads, ("", "RSUM")]
    names = []
    rows: list[dict[tuple[str, str], object]] = []
    for experiment in found:
        for when, name in (("before", experiment.name), ("after", "  re-ranked")):
            texts = [cell(experiment.values(split, when, figure)) for figure in FIGURES]
            seeds = str(len(experiment.runs)) if when == "before" else ""
            names.append(name)
            rows.append(dict(zip(heads, [seeds, *texts], strict=True)))
    return tables.text(Table([frame(names, rows)], [f"On the {split} split."]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--split", default="dev", choices=["dev", "test", "test_folds"])
    args = parser.parse_args(arguments)
    # a directory that is given twice counts as one seed
    directories = {run.resolve(): run for run in args.runs}
    try:
        print(table(experiments(map(load_run, directories.values())), args.split))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
