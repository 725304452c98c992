"""The figures of the report as inline SVG: text, colours and line styles come from the page's style sheet.

So a figure weighs a few kilobytes, and turns dark with the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np


@dataclass(frozen=True)
class Series:
    """A line of a chart; `style` is the number of the CSS classes `s0`, `s1`, ... and of the marker.

    `beside` are lines of the same style drawn thin, without markers.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: int
    beside: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Frame:
    """The plotting area of a figure and the data ranges it shows; y may be logarithmic."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_y: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log_y:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        share = (value - low) / (high - low)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


STYLES = 6  # how many line styles the style sheet has; more series begin again
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "bar")


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if span / (power * m) <= most - 1)
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], label: str, y_label: str, x_label: str = "epoch") -> str:
    """All series in one frame, each with its name at its end."""
    values = [v for s in series for line in (s.y, *s.beside) for v in line]
    frame = Frame(560, 310, 46, 88, 28, 42, _span([v for s in series for v in s.x]), _padded(values))
    parts = [_y_axis(frame, nice_ticks(*frame.y_range), y_label), _x_axis(frame, _whole_ticks(frame.x_range), x_label)]
    ends = _spread([frame.y(s.y[-1]) for s in series], 17, frame.top, frame.height - frame.bottom)
    for s, end in zip(series, ends, strict=True):
        parts.append(_line(frame, s))
        x, y = frame.x(s.x[-1]), frame.y(s.y[-1])
        parts.append(f'<path class="leader" d="M{x + 6:.1f} {y:.1f}L{x + 16:.1f} {end:.1f}"/>')
        parts.append(_text(f"name s{s.style % STYLES}", x + 20, end + 4.5, s.name))
    return _svg(frame, label, parts)


def small_chart(series: Series, label: str, x_range: tuple[float, float]) -> str:
    """One series in a small frame of its own scale; a set of them shares `x_range`."""
    frame = Frame(240, 150, 46, 12, 12, 30, x_range, _padded(series.y))
    ticks = nice_ticks(*frame.y_range, most=4)
    return _svg(frame, label, [_y_axis(frame, ticks), _x_axis(frame, _whole_ticks(x_range, 5)), _line(frame, series)])


def histogram_pair(before: np.ndarray, after: np.ndarray, label: str, x_label: str, y_label: str) -> str:
    """Two distributions of whole numbers: `before` as filled bars, `after` as an outline, on a logarithmic axis."""
    width = math.ceil((max(before.max(), after.max()) + 1) / 28)
    bins = int(max(before.max(), after.max())) // width + 1
    counts = [np.bincount(x // width, minlength=bins) for x in (before, after)]
    top = 10 ** math.ceil(math.log10(max(c.max() for c in counts) * 1.05))
    frame = Frame(500, 300, 52, 14, 28, 42, (-0.5, bins * width - 0.5), (0.6, top), log_y=True)
    edges = [frame.x(i * width - 0.5) for i in range(bins + 1)]
    floor = frame.y(frame.y_range[0])
    powers = [10.0**i for i in range(round(math.log10(top)) + 1)]
    parts = [_y_axis(frame, powers, y_label)]
    for i, count in enumerate(counts[0]):
        if count:
            y, gap = frame.y(count), 0.5
            size = f'width="{edges[i + 1] - edges[i] - 2 * gap:.2f}" height="{floor - y:.2f}"'
            parts.append(f'<rect class="before" x="{edges[i] + gap:.2f}" y="{y:.2f}" {size}/>')
    steps = [f"M{edges[0]:.2f} {floor:.2f}"]
    for i, count in enumerate(counts[1]):
        steps.append(f"V{frame.y(count) if count else floor:.2f}H{edges[i + 1]:.2f}")
    parts.append(f'<path class="after" d="{"".join(steps)}V{floor:.2f}"/>')
    mean, right = frame.x(float(before.mean())), frame.width - frame.right
    anchor, shift = ("start", 5) if mean < right - 70 else ("end", -5)
    parts.append(f'<path class="mean" d="M{mean:.1f} {frame.top}V{floor:.1f}"/>')
    parts.append(_text("tick", mean + shift, frame.top + 10, f"mean {before.mean():.1f}", anchor))
    parts.append(_x_axis(frame, _whole_ticks((0, bins * width - 1), 8), x_label))
    return _svg(frame, label, parts)


# --- parts ------------------------------------------------------------------------------------------------


def _svg(frame: Frame, label: str, parts: Sequence[str]) -> str:
    opening = f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(label)}">'
    return opening + "".join(parts) + "</svg>"


def _text(kind: str, x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _line(frame: Frame, series: Series) -> str:
    style = series.style % STYLES

    def path(values: Sequence[float]) -> str:
        return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in zip(series.x, values, strict=False))

    thin = "".join(f'<path class="thin line s{style}" d="{path(values)}"/>' for values in series.beside)
    markers = "".join(_marker(style, frame.x(x), frame.y(y)) for x, y in zip(series.x, series.y, strict=True))
    return f'{thin}<path class="line s{style}" d="{path(series.y)}"/>{markers}'


def _marker(style: int, x: float, y: float) -> str:
    """The marker of a style, a path about (x, y)."""
    outline = {
        "circle": "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        "square": "m-3.6 -3.6h7.2v7.2h-7.2z",
        "triangle": "m0 -4.8l4.6 8h-9.2z",
        "diamond": "m0 -5.2l4.6 5.2l-4.6 5.2l-4.6 -5.2z",
        "cross": "m-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
        "bar": "m-1.6 -5h3.2v10h-3.2z",
    }[MARKERS[style]]
    return f'<path class="marker s{style}" d="M{x:.1f} {y:.1f}{outline}"/>'


def _y_axis(frame: Frame, ticks: Sequence[float], label: str = "") -> str:
    """Hairlines and numbers, and the label above the axis, where it can be read without turning the head."""
    parts = []
    right = frame.width - frame.right
    decimals = max(len(f"{tick:.10g}".partition(".")[2]) for tick in ticks)
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(_text("tick", frame.left - 7, y + 4, _number(tick, decimals), "end"))
    if label:
        parts.append(_text("label", 0, 13, label))
    return "".join(parts)


def _x_axis(frame: Frame, ticks: Sequence[float], label: str = "") -> str:
    base = frame.height - frame.bottom
    parts = [f'<path class="axis" d="M{frame.left} {base}H{frame.width - frame.right}"/>']
    for tick in ticks:
        parts.append(_text("tick", frame.x(tick), base + 17, _number(tick), "middle"))
    if label:
        middle = (frame.left + frame.width - frame.right) / 2
        parts.append(_text("label", middle, frame.height - 5, label, "middle"))
    return "".join(parts)


def _number(value: float, decimals: int = 0) -> str:
    return f"{value:,.{decimals}f}".replace("-", "−")


def _whole_ticks(span: tuple[float, float], most: int = 10) -> list[float]:
    return [tick for tick in nice_ticks(*span, most=most) if tick == int(tick)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values; a single one gets room on both sides."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = _span(values)
    return low - 0.06 * (high - low), high + 0.06 * (high - low)


def _spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions moved as little as a simple sweep allows so that they are `gap` apart, within low to high."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = list(positions)
    for before, i in zip([None, *order], order, strict=False):
        placed[i] = max(placed[i], low if before is None else placed[before] + gap)
    for after, i in zip([None, *order[::-1]], order[::-1], strict=False):
        placed[i] = min(placed[i], high if after is None else placed[after] - gap)
    return placed
