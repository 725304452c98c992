"""The goals: what the engine is to reach on an H100, in bfloat16 where nothing else is said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .record import Row


class Goal(NamedTuple):
    """An upper limit of a figure."""

    name: str
    most: float
    unit: str
    figures: Row  # keys and values of the figures that have to keep it
    key: str  # of the number
    factor: float = 1.0  # from the figure's unit to that of the goal

    def row(self, figures: Iterable[Row]) -> Row:
        """Return the goal with the highest number found, and whether it is met; None: not known."""
        found: list[float] = []
        for figure in figures:
            if self.key in figure and self.figures.items() <= figure.items():
                found.append(figure[self.key] * self.factor)
        about: Row = {"goal": self.name, "most": self.most, "unit": self.unit}
        if not found:
            return about | {"found": None, "met": None}
        worst = float(f"{max(found):.4g}")
        return about | {"found": worst, "met": worst <= self.most}


def judged(figures: list[Row]) -> list[Row]:
    """Return a row for each goal."""
    return [goal.row(figures) for goal in GOALS]


def _large(loss: str, n: int, dim: int) -> Row:
    return {"step": "goals", "loss": loss, "shape": [n, n, dim], "variant": "triton"}


CLIP = "infonce learnable"
GOALS = (
    Goal("InfoNCE 32768 x 512", 9.0, "ms", _large("infonce", 32768, 512), "seconds", 1e3),
    Goal("InfoNCE 32768 x 1024", 17.0, "ms", _large("infonce", 32768, 1024), "seconds", 1e3),
    Goal("InfoNCE, learnt, 32768 x 512", 9.0, "ms", _large(CLIP, 32768, 512), "seconds", 1e3),
    Goal("InfoNCE, learnt, 32768 x 1024", 17.0, "ms", _large(CLIP, 32768, 1024), "seconds", 1e3),
    Goal("SigLIP 65536 x 768", 40.0, "ms", _large("siglip", 65536, 768), "seconds", 1e3),
    Goal("SigLIP 65536 x 768, memory", 640.0, "MB", _large("siglip", 65536, 768), "peak_mb"),
    Goal(
        "M-DCL 4096 x 65536 x 1024",
        1.6,
        "times its products",
        {"step": "goals", "loss": "mdcl", "variant": "ours triton"},
        "to matmul_bound",
    ),
    Goal(
        "InfoNCE under autocast",
        1.0,
        "times open_clip",
        {"step": "amp", "variant": "ours"},
        "to open_clip",
    ),
)
