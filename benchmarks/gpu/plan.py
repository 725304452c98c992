"""What each slot of ten minutes runs, in which order, and how long each step may take."""

from __future__ import annotations

from typing import NamedTuple

from .losses import LOSSES

TOTAL = 570  # seconds of a slot: a machine that is lent for ten minutes is taken away at 600
RESERVE = 8  # seconds that are left for the table and the plot
DRY = 10  # times as long may a dry run take: Triton's interpreter is slow
LEAST = 15  # seconds below which no step begins: imports alone take half of it


class Step(NamedTuple):
    """A part of a slot, which runs in a process of its own."""

    name: str
    module: str  # of benchmarks.gpu: its STEPS have the function
    seconds: int  # at most
    about: str  # what it measures, and what its figures decide
    parts: tuple[str, ...] = ()  # run in processes beside each other: most of the time is compiling
    tool: tuple[str, ...] = ()  # a program that runs it; without the program it is skipped
    needs: str = ""  # a Python package without which it is skipped


FIRST = (
    Step("machine", "works", 30, "versions, clocks, and what copies and bare products reach"),
    Step("works", "works", 60, "the check that 'auto' makes at first: its answer, its seconds"),
    Step(
        "correct",
        "works",
        80,
        "8 losses x 3 dtypes x 6 shapes against float64; the same bits again. "
        "If one is wrong, nothing else counts",
        parts=tuple(LOSSES),
    ),
)
SLOTS: dict[int, tuple[Step, ...]] = {1: FIRST, 2: (FIRST[0],)}


def all_steps() -> dict[str, Step]:
    """Return the steps of all slots by name."""
    return {step.name: step for steps in SLOTS.values() for step in steps}


def chosen(slot: int | None, names: list[str] | None) -> tuple[Step, ...]:
    """Return the steps of a slot, or those with the names; the first describes the machine."""
    if names is None:
        return SLOTS[slot or 1]
    found = all_steps()
    described = dict.fromkeys(("machine", *names))
    return tuple(found[name] for name in described)
