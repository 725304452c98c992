"""DCL's peak memory over the number of pairs, as a record and as README's plot:
``python -m benchmarks.memory FILE.json FILE.svg``.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from . import report, runner
from .cases import LOSSES, Case, module, problem
from .peak import peak_memory
from .runner import Row

SIZES = (1024, 2048, 4096, 8192, 16384)
LABELS = {"eager": "plain PyTorch", "ours": "itrloss"}


def measure(size: int, variant: str) -> Row:
    """Return a row with the megabytes beyond the embeddings that a step needs, including their
    gradients.
    """
    case = Case("dcl std", (size, size, 512))
    inputs = problem(case)
    call = (
        partial(LOSSES[case.loss].plain, *inputs.leaves)
        if variant == "eager"
        else partial(module(case, inputs), *inputs.leaves)
    )
    peak = peak_memory(lambda: call().backward(), torch.device("cpu"))
    if peak is None:
        sys.exit("the peak of memory is known on Linux only")
    return case.fields() | {"variant": variant, "peak_mb": round(peak, 1)}


def draw(rows: list[Row]) -> Figure:
    """Return the plot of the rows of a record."""
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot(xlabel="pairs in the batch", ylabel="peak memory, MB")
    for variant, label in LABELS.items():
        of_variant = [row for row in rows if row["variant"] == variant]
        sizes = [row["shape"][0] for row in of_variant]
        axes.loglog(sizes, [row["peak_mb"] for row in of_variant], "o-", label=label)
    axes.set_xticks(SIZES, [str(n) for n in SIZES])
    axes.minorticks_off()
    axes.legend()
    return figure


def main() -> None:
    """Measure what the record does not have yet, write it, and plot it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="FILE.json")
    parser.add_argument("plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(row["shape"][0], row["variant"]) for row in rows}
    for variant in LABELS:
        for size in SIZES:
            if (size, variant) in done:
                continue
            rows.append(measure(size, variant))
            print(variant, size, rows[-1]["peak_mb"], "MB", flush=True)
            report.save(args.out, runner.machine("cpu"), rows)
    draw(rows).savefig(args.plot, metadata={"Date": None}, transparent=False)


if __name__ == "__main__":
    main()
