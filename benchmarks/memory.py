"""DCL's peak memory over the number of pairs: ``python -m benchmarks.memory FILE.json``."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from . import report, runner
from .cases import LOSSES, Case, module, problem
from .peak import peak_memory
from .runner import Row

SIZES = (1024, 2048, 4096, 8192, 16384)
VARIANTS = "eager", "ours"


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


def main() -> None:
    """Measure what the record does not have yet, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(row["shape"][0], row["variant"]) for row in rows}
    for variant in VARIANTS:
        for size in SIZES:
            if (size, variant) in done:
                continue
            rows.append(measure(size, variant))
            print(variant, size, rows[-1]["peak_mb"], "MB", flush=True)
            report.save(args.out, runner.machine("cpu"), rows)


if __name__ == "__main__":
    main()
