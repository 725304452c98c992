"""A benchmark's rows as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .runner import Row

COLUMNS = {  # title -> (key, format)
    "ms": ("seconds", lambda x: f"{1e3 * x:.4g}"),
    "to ours": ("to ours", "{:.2f}".format),
    "to floor": ("to floor", "{:.2f}".format),
    "GFLOP/s": ("gflops", "{:d}".format),
    "peak MB": ("peak_mb", "{:.0f}".format),
    "difference": ("gradient difference", "{:.1e}".format),
    "error": ("gradient error", "{:.1e}".format),
}


def table(rows: Iterable[Row]) -> str:
    """Lines of text, the columns that no row has left out."""
    rows = list(rows)
    titles = [title for title, (key, _) in COLUMNS.items() if any(row.get(key) is not None for row in rows)]
    lines = [["loss", "shape", "variant", *titles]]
    for row in rows:
        cells = [row["loss"], _shape(row), row["variant"]]
        if "why not" in row:
            lines.append([*cells, f"({row['why not']})"])
            continue
        for title in titles:
            key, show = COLUMNS[title]
            cells.append("" if row.get(key) is None else show(row[key]))
        lines.append(cells)
    count = 3 + len(titles)
    full = [line for line in lines if len(line) == count]
    widths = [max(len(line[i]) for line in (full if i > 2 else lines)) for i in range(count)]
    text = []
    for line in lines:
        cells = [c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _shape(row: Row) -> str:
    return "x".join(map(str, row["shape"])) + ("" if row["dtype"] == "float32" else f" {row['dtype']}")


def save(path: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Write a JSON object with ``machine`` and ``rows``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in rows)
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def check_plot(path: Path) -> None:
    """Whether it could be drawn.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib cannot write such a file.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("plot: matplotlib is missing; pip install 'itrloss[bench]'") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"plot: expected a file name that ends in one of {', '.join(known)}; got {str(path)!r}")


def plot(path: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Draw each case's variants as bars: time as a multiple of ours."""
    check_plot(path)
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "to ours" in row:
            groups.setdefault(f"{row['loss']} {_shape(row)}", []).append(row)
    bars = sum(len(group) + 1 for group in groups.values())
    figure = Figure(figsize=(9, 1 + 0.22 * bars), layout="constrained")
    axes = figure.subplots()
    position, ticks = 0, []
    for name, group in groups.items():
        for row in sorted(group, key=lambda row: row["to ours"]):
            ours = row["variant"].startswith("ours")
            axes.barh(position, row["to ours"], color="tab:blue" if ours else "tab:gray")
            axes.annotate(f" {row['to ours']:.2f}", (row["to ours"], position), va="center", fontsize=7)
            ticks.append((position, f"{name} · {row['variant']}"))
            position += 1
        position += 1
    axes.set_yticks([p for p, _ in ticks], [label for _, label in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time, as a multiple of ours (log scale)")
    axes.set_title(f"{machine['processor']}, torch {machine['torch']}, {machine['date']}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
