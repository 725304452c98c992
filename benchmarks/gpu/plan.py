"""What each slot of ten minutes runs, in which order, and how long each step may take."""

from __future__ import annotations

from typing import NamedTuple

from .losses import DTYPES, LOSSES

# Rows, columns and dimensions of a tile, its parts, warps, stages and limit of registers: see
# `itrloss.engine.triton.TileConfig`.
TILES: dict[str, tuple[int | None, ...]] = {
    "128x128x64, 8 warps": (128, 128, 64, 4, 8, 3, None),
    "128x128x64, 4 warps": (128, 128, 64, 4, 4, 3, None),
    "128x128x32, 8 warps, 5 stages": (128, 128, 32, 4, 8, 5, 128),
    "128x128x128, 8 warps, 2 stages": (128, 128, 128, 4, 8, 2, None),
    "128x256x64, 8 warps": (128, 256, 64, 4, 8, 3, None),
    "256x128x64, 8 warps": (256, 128, 64, 4, 8, 3, None),
    "64x256x64, 4 warps": (64, 256, 64, 4, 4, 3, None),
}
PRODUCTION = "production tiles"

TOTAL = 570  # seconds of a slot: a machine that is lent for ten minutes is taken away at 600
RESERVE = 8  # seconds that are left for the table and the plot
DRY = 10  # times as long may a dry run take: Triton's interpreter is slow
SHARE = 0.85  # of a step's time, after which it begins nothing new, so that it is not killed
LEAST = 15  # seconds below which no step begins: imports alone take half of it


class Step(NamedTuple):
    """A part of a slot, which runs in a process of its own."""

    name: str
    module: str  # of benchmarks.gpu: its STEPS have the function
    seconds: int  # at most
    about: str  # what it measures, and what its figures decide
    parts: tuple[str, ...] = ()  # run in processes at the same time: most of the time is compiling
    tool: tuple[str, ...] = ()  # a program that runs it; without the program it is skipped
    needs: str = ""  # a Python package without which it is skipped


MACHINE = Step("machine", "works", 30, "versions, clocks, and what copies and products reach")
NCU = (
    "ncu --clock-control none --kernel-name regex:(sums|gradient)_kernel --launch-skip 8 "
    "--launch-count 10 --csv --page details --section SpeedOfLight --section Occupancy "
    "--section WarpStateStats --section MemoryWorkloadAnalysis --section ComputeWorkloadAnalysis "
    "--log-file {out}/ncu.csv"
)
SANITIZER = "compute-sanitizer --tool memcheck --error-exitcode 9"
SLOTS: dict[int, tuple[Step, ...]] = {
    1: (
        MACHINE,
        Step("works", "works", 45, "a first step in each dtype: does it run, and compiling's time"),
        Step(
            "correct",
            "works",
            85,
            "8 losses x 3 dtypes x 8 shapes against float64. If one is wrong, nothing else counts",
            parts=tuple(f"{loss}, {dtype}" for dtype in DTYPES for loss in LOSSES),
        ),
        Step("goals", "speed", 85, "whole losses at large sizes, and as CUDA graphs"),
        Step(
            "encoders", "training", 60, "a step of training with two encoders, and the loss alone"
        ),
        Step("compile", "kernels", 60, "compiles what follows", parts=(PRODUCTION, *TILES)),
        Step("kernels", "kernels", 45, "each kernel alone: which is far from the bare product"),
        Step("profile", "speed", 30, "time by kernel: copies above 8 % are worth a fusion"),
        Step("others", "speed", 25, "PGC's online k-means, re-rankers and metrics"),
        Step("memory", "speed", 35, "peaks; above 270 MB beyond gradients: a regression"),
        Step("tiles", "kernels", 35, "other tiles; one that is 5 % faster: PRODUCT_TILES"),
        Step("products", "kernels", 25, "a panel's products below 500 TFLOP/s: BLOCK_ROWS"),
        Step("panels", "kernels", 35, "other panels of the backward pass: BLOCK_ROWS, PANEL"),
    ),
    2: (
        MACHINE,
        Step("amp", "training", 60, "float32 unit vectors under autocast; also open_clip's loss"),
        Step("small", "training", 90, "small batches: eager, CUDA graphs, compiled"),
        Step("peers", "training", 100, "other libraries, plain PyTorch and bare products"),
        Step("crossover", "modes", 40, "the size from which 'auto' should take Triton"),
        Step("ragged", "modes", 35, "8191 above 1.3 times 8192: rows that are not aligned"),
        Step("modes", "modes", 60, "streams, CUDA graphs, compiled: the same gradients"),
        Step("tests", "tools", 110, "the tests of the Triton engine", needs="pytest"),
        Step("sanitizer", "tools", 50, "accesses beyond memory", tool=tuple(SANITIZER.split())),
        Step("ncu", "tools", 50, "what limits each kernel: ncu.csv", tool=tuple(NCU.split())),
    ),
}


def all_steps() -> dict[str, Step]:
    """Return the steps of all slots by name."""
    return {step.name: step for steps in SLOTS.values() for step in steps}


def chosen(names: list[str]) -> tuple[Step, ...]:
    """Return the steps with the names, after the one that describes the machine."""
    found = all_steps()
    return tuple(found[name] for name in dict.fromkeys((MACHINE.name, *names)))
