"""Learning curves as inline SVG, see :mod:`itrloss.cli.charts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from itrloss.cli.charts import COLOURS, MARKERS, svg

DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (4, 2)), "-")


class Series(NamedTuple):
    """A line ``y`` over ``x``; ``runs`` are single runs of which it is the mean, drawn thin."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    runs: Sequence[Sequence[float]] = ()


def lines(series: Sequence[Series], label: str, x: str, y: str) -> str:
    """Return a chart of lines over integers such as epochs."""

    def draw(axes: Axes) -> None:
        """Draw on the axes."""
        for i, one in enumerate(series):
            kind = i % len(COLOURS)
            colour = COLOURS[kind]
            for run in one.runs:
                length = min(len(run), len(one.x))
                axes.plot(one.x[:length], run[:length], color=colour, linewidth=0.8, alpha=0.6)
            axes.plot(
                one.x,
                one.y,
                color=colour,
                linestyle=DASHES[kind],
                marker=MARKERS[kind],
                linewidth=2,
                label=one.name,
            )
        axes.locator_params(axis="x", integer=True)

    return svg(draw, label, x, y, (480, 300))
