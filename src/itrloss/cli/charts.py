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

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Each has a contrast of at least 3 with white and with near black, for light and dark pages.
COLOURS = ("#2f86c9", "#cf6a1c", "#1f9a70", "#b065a5", "#9a7d0a", "#7a838c")
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


def histograms(counts: Mapping[str, np.ndarray], label: str, x: str, y: str) -> str:
    """Return a log-scale chart of two (n,) integer arrays' histograms, side by side."""
    numbers = list(counts.values())
    most = int(np.max(numbers))
    mean = float(np.mean(numbers[0]))
    width = most // 28 + 1
    edges = np.arange(0, most + 2 * width, width) - 0.5

    def draw(axes: Axes) -> None:
        """Draw on the axes."""
        colours = (COLOURS[-1], COLOURS[0])
        axes.hist(numbers, list(edges), log=True, label=list(counts), color=colours)
        axes.axvline(mean, color=_INK, linestyle=":", label=f"mean {mean:.1f}")
        axes.set_ylim(bottom=0.6)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", integer=True)

    return svg(draw, label, x, y, (480, 300))


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

    def draw(axes: Axes) -> None:
        """Draw on the axes."""
        apart = min(0.3, 0.8 / len(groups))
        for i, (group, values) in enumerate(groups.items()):
            places = np.arange(len(names)) + apart * (i - (len(groups) - 1) / 2)
            value, low, high = np.array(values, float).T
            ends = value - low, high - value
            look = {"fmt": MARKERS[i], "color": COLOURS[i], "capsize": 3}
            axes.errorbar(value, places, xerr=ends, label=group, **look)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        if zero:
            axes.axvline(0, color=_INK, linewidth=1)

    return svg(draw, label, x, "", (480, height))


def _lines(names: Sequence[str]) -> int:
    """Return how many lines names take, one below the other."""
    return sum(name.count("\n") + 1 for name in names)


def svg(draw: Callable[[Axes], None], label: str, x: str, y: str, size: tuple[int, int]) -> str:
    """Return what is drawn on axes as an ``<svg>`` element, with a legend of several labels."""
    width, height = size
    file = io.StringIO()
    with style.context(["default", {**_STYLE, "svg.hashsalt": label}]):  # not the user's style
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        handles, names = axes.get_legend_handles_labels()
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
