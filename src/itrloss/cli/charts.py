"""Charts as inline SVG. Text and axes take the colour of the surrounding text, so that any
background works.

``label`` describes a chart for screen readers; it must be unique on a page.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .pages import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Handles = Sequence[Any]  # artists and containers of matplotlib, for which it has no common type
Legend = tuple[Handles, Sequence[str]]

# Each has a contrast of at least 3 with white and with near black, for light and dark pages.
COLOURS = ("#2f86c9", "#cf6a1c", "#1f9a70", "#b065a5", "#9a7d0a", "#7a838c")
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (4, 2)), "-")
MARKERS = "os^DPv"
_INK = "#010203"  # becomes currentColor, for which matplotlib has no name
_STYLE = {
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "font.size": 12,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may hold dollars
}


class Series(NamedTuple):
    """A line ``y`` over ``x``; ``runs`` are single runs of which it is the mean, drawn thin."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    runs: Sequence[Sequence[float]] = ()


def lines(series: Sequence[Series], label: str, x: str, y: str) -> str:
    """Return a chart of lines over integers such as epochs."""

    def draw(axes: Axes) -> Legend:
        """Draw on the axes; return the legend's handles and names."""
        handles = []
        for i, one in enumerate(series):
            kind = i % len(COLOURS)
            colour = COLOURS[kind]
            for run in one.runs:
                length = min(len(run), len(one.x))
                axes.plot(one.x[:length], run[:length], color=colour, linewidth=0.8, alpha=0.6)
            handles += axes.plot(
                one.x,
                one.y,
                color=colour,
                linestyle=DASHES[kind],
                marker=MARKERS[kind],
                linewidth=2,
            )
        axes.locator_params(axis="x", integer=True)
        return handles, [one.name for one in series]

    return _svg(draw, label, x, y, (480, 300))


def histograms(counts: Mapping[str, np.ndarray], label: str, x: str, y: str) -> str:
    """Return a log-scale chart of two (n,) integer arrays' histograms, the first as bars, the
    second as an outline.
    """
    first, second = counts.values()
    most = max(int(first.max()), int(second.max()))
    width = most // 28 + 1
    edges = np.arange(0, most + 2 * width, width) - 0.5

    def draw(axes: Axes) -> Legend:
        """Draw on the axes; return the legend's handles and names."""
        heights = np.histogram(first, edges)[0]
        bars = axes.stairs(heights, edges, fill=True, color=COLOURS[-1], alpha=0.6)
        heights = np.histogram(second, edges)[0]
        outline = axes.stairs(heights, edges, color=COLOURS[0], linewidth=2)
        mean = axes.axvline(first.mean(), color=_INK, linestyle=":")
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.6)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter("")
        axes.locator_params(axis="x", integer=True)
        return [bars, outline, mean], [*counts, f"mean {first.mean():.1f}"]

    return _svg(draw, label, x, y, (480, 300))


def intervals(
    names: Sequence[str],
    groups: Mapping[str, Sequence[Sequence[float]]],
    label: str,
    x: str,
    zero: bool = False,
) -> str:
    """Return a chart of values with intervals, (value, low, high) per name and group; ``zero``
    draws a line at 0.
    """
    names = [textwrap.fill(name, 28) for name in names]  # the axis needs room next to them
    height = 60 + len(names) * (12 * len(groups) - 5) + 15 * _lines(names)

    def draw(axes: Axes) -> Legend:
        """Draw on the axes; return the legend's handles and names."""
        handles = []
        apart = min(0.3, 0.8 / len(groups))
        for i, values in enumerate(groups.values()):
            places = np.arange(len(names)) + apart * (i - (len(groups) - 1) / 2)
            value, low, high = np.array(values, float).T
            handles.append(
                axes.errorbar(
                    value,
                    places,
                    xerr=(value - low, high - value),
                    fmt=MARKERS[i],
                    color=COLOURS[i],
                    capsize=3,
                )
            )
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        if zero:
            axes.axvline(0, color=_INK, linewidth=1)
        return handles, list(groups)

    return _svg(draw, label, x, "", (480, height))


def _lines(names: Sequence[str]) -> int:
    """Return how many lines names take, one below the other."""
    return sum(name.count("\n") + 1 for name in names)


def _svg(draw: Callable[[Axes], Legend], label: str, x: str, y: str, size: tuple[int, int]) -> str:
    """Return a chart as an ``<svg>`` element."""
    check()
    from matplotlib import style
    from matplotlib.figure import Figure

    width, height = size
    file = io.StringIO()
    with style.context(["default", {**_STYLE, "svg.hashsalt": label}]):  # not the user's style
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        axes = figure.subplots()
        handles, names = draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if len(names) > 1:
            names = [textwrap.fill(name, 52) for name in names]
            figure.legend(handles, names, loc="outside upper left")
            height += 18 * _lines(names)  # above the chart
            figure.set_figheight(height / 72)
        # equal charts give equal text
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    body = _plain(file.getvalue())
    frame = (
        f'viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(label)}"'
    )
    # A font not wider than matplotlib's, for which the text was placed.
    look = (
        "max-width: 100%; height: auto; "  # narrower on a narrow screen
        "font-family: system-ui, sans-serif; stroke-linejoin: round"
    )
    return f'<svg {frame} style="{look}">{body}'


def _plain(svg: str) -> str:
    """Return the elements of matplotlib's SVG, in the colour and the font of the page."""
    body = svg.partition("</defs>")[2]  # what precedes would style the whole page
    # Drop matplotlib's ids, which repeat in every figure, except those referred to, which depend on
    # the label's hash.
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    return re.sub(r" font-family: [^;]*;", "", body).replace(_INK, "currentColor")
