"""Plot of DCL's peak memory over the number of pairs, for the README: ``python -m benchmarks.memory
FILE.svg``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
from matplotlib.figure import Figure

from .cases import LOSSES, Case, module, problem
from .peak import peak_memory

SIZES = (1024, 2048, 4096, 8192, 16384)


def measure(size: int, variant: str) -> float | None:
    """Return the megabytes beyond the embeddings that a step needs, including their gradients."""
    case = Case("dcl std", (size, size, 512))
    inputs = problem(case)
    call = (
        partial(LOSSES[case.loss].plain, *inputs.leaves)
        if variant == "eager"
        else partial(module(case, inputs), *inputs.leaves)
    )
    return peak_memory(lambda: call().backward(), torch.device("cpu"))


def main() -> None:
    """Measure and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", metavar="FILE.svg")
    args = parser.parse_args()
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot(xlabel="pairs in the batch", ylabel="peak memory, MB")
    for name, variant in (("plain PyTorch", "eager"), ("itrloss", "ours")):
        memory = [measure(size, variant) for size in SIZES]
        if None in memory:
            sys.exit("the peak of memory is known on Linux only")
        print(f"{name:13}", *(f"{x:8.1f}" for x in memory), "MB", flush=True)
        axes.loglog(SIZES, memory, "o-", label=name)
    axes.set_xticks(SIZES, [str(n) for n in SIZES])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(args.out, metadata={"Date": None}, transparent=False)


if __name__ == "__main__":
    main()
