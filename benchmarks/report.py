"""A benchmark's rows as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from itrloss.files import written

from .peers import INSTALL
from .runner import Row

COLUMNS = {  # title -> (key, format)
    "ms": ("seconds", lambda x: f"{1e3 * x:.4g}"),
    "host ms": ("host seconds", lambda x: f"{1e3 * x:.4g}"),
    "to ours": ("to ours", "{:.2f}".format),
    "to open_clip": ("to open_clip", "{:.2f}".format),
    "to matmul_bound": ("to matmul_bound", "{:.2f}".format),
    "GFLOP/s": ("gflops", "{:d}".format),
    "peak MB": ("peak_mb", "{:.0f}".format),
    "gradient difference": ("gradient difference", "{:.1e}".format),
    "gradient error": ("gradient error", "{:.1e}".format),
    "beyond gradients MB": ("beyond gradients MB", "{:.0f}".format),
    "first s": ("first seconds", "{:.2f}".format),
    "calls": ("calls", "{:d}".format),
    "share": ("share", "{:.3f}".format),
    "engine": ("engine", str),
    "products": ("products", str),
}


def table(rows: Iterable[Row]) -> str:
    """Return lines of text; columns that no row has are left out."""
    rows = list(rows)
    titles = [
        title
        for title, (key, _) in COLUMNS.items()
        if any(row.get(key) is not None for row in rows)
    ]
    lines = [["loss", "shape", "variant", *titles]]
    for row in rows:
        cells = [row["loss"], _shape(row), row["variant"]]
        if "error" in row:
            lines.append([*cells, f"({row['error']})"])
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
        cells = [
            c.ljust(w) if i < 3 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=False))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _shape(row: Row) -> str:
    return "x".join(map(str, row["shape"])) + (
        "" if row["dtype"] == "float32" else f" {row['dtype']}"
    )


def check_path(path: Path) -> None:
    """Raise an OSError if results cannot be written there; an existing file is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write, got a directory")
    if path.is_file() or not path.exists():
        tempfile.TemporaryFile(dir=path.parent).close()


def save(path: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Write a JSON object with ``machine`` and ``rows``; an existing file is replaced once all is
    written.
    """
    lines = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in rows)
    with written(path) as file:
        file.write(f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n{lines}\n ]\n}}\n')


def check_plot(path: Path) -> None:
    """Raise an ImportError if matplotlib is missing, a ValueError if it cannot write this file
    format.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError(f"plot: matplotlib is missing; {INSTALL}") from error
    suffixes = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in suffixes:
        raise ValueError(
            f"plot: expected a file name that ends in one of {', '.join(suffixes)}; got "
            f"{str(path)!r}"
        )
    check_path(path)


def plot(path: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Draw each case's variants as bars: time as a multiple of ours."""
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
            axes.annotate(
                f" {row['to ours']:.2f}", (row["to ours"], position), va="center", fontsize=7
            )
            ticks.append((position, f"{name} · {row['variant']}"))
            position += 1
        position += 1
    axes.set_yticks([p for p, _ in ticks], [label for _, label in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time, as a multiple of ours (log scale)")
    axes.set_title(
        f"{machine['processor']}, torch {machine['torch']}, {machine['date']}", fontsize=8
    )
    figure.savefig(path)
