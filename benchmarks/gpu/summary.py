"""A record as text, and its throughput as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import report
from .record import Record, Row

COLUMNS = "loss", "shape", "dtype", "variant"  # of a row that is a line of a table


def text(record: Record) -> str:
    """Return the device, the steps, the goals, and the tables of all steps."""
    about = ("device", "capability", "torch", "triton", "cuda", "driver", "commit", "date")
    values: dict[str, Any] = vars(record)
    lines = [", ".join(f"{key} {values[key]}" for key in about)]
    lines += ["", *map(step_line, record.steps)]
    lines += ["", *map(goal_line, record.goals)]
    for step in record.steps:
        rows = [row for row in record.figures if row["step"] == step["name"]]
        if rows:
            lines += ["", step["name"], "-" * len(step["name"]), *step_lines(rows)]
    return "\n".join(lines) + "\n"


def step_line(row: Row) -> str:
    """Return a line about how a step ended."""
    if "skipped" in row:
        return f"{row['name']:10}  skipped: {row['skipped']}"
    return f"{row['name']:10}  rc {row['rc']}  {row['seconds']:6.1f} s of {row['limit']}"


def goal_line(row: Row) -> str:
    """Return a line about a goal."""
    if row["met"] is None:
        return f"not measured  {row['goal']}"
    found = f"{row['found']:g}, at most {row['most']:g} {row['unit']}"
    return f"{'met' if row['met'] else 'MISSED':12}  {row['goal']}: {found}"


def step_lines(rows: list[Row]) -> list[str]:
    """Return a step's figures: a table of what was timed, and lines for the rest."""
    timed = [row for row in rows if "seconds" in row and all(key in row for key in COLUMNS)]
    right = [row["right"] for row in rows if "right" in row]
    lines: list[str] = []
    if timed:
        lines.append(report.table(timed))
    if right:
        lines.append(f"{right.count(True)} of {len(right)} cases are right")
    for row in rows:
        if row not in timed and row.get("right") is not True:
            shown = [f"{key} {value}" for key, value in row.items() if key not in ("step", "where")]
            lines.append(", ".join(shown))
    return lines


# -------------------------------------------------------------------------------------------- plot


def plot(record: Record, path: Path) -> None:
    """Draw the throughput of kernels and steps, next to bare products, plain PyTorch and others.

    Raises:
        ImportError: without matplotlib.
    """
    report.check_plot(path)
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for row in record.figures:
        if "gflops" in row:
            shape = "x".join(map(str, row["shape"]))
            groups.setdefault(f"{row['step']} {shape}", []).append(row)
    bars = sum(len(rows) + 1 for rows in groups.values())
    figure = Figure(figsize=(9, 1 + 0.2 * bars), layout="constrained")
    axes = figure.subplots()
    labels: list[str] = []
    for group, rows in groups.items():
        for row in sorted(rows, key=lambda row: -row["gflops"]):
            axes.barh(len(labels), row["gflops"] / 1e3, color=colour(row))
            labels.append(f"{group} · {row['loss']} · {row['variant']}")
        labels.append("")
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s of the products of plain PyTorch")
    axes.set_title(f"{record.device}, torch {record.torch}, {record.date}", fontsize=8)
    figure.savefig(path)


def colour(row: Row) -> str:
    """Return black for bare products, blue for ours, and grey for everything else."""
    variant = row["variant"]
    if variant in ("matmul_bound", "torch"):
        return "black"
    if row["step"] in ("peers", "small") and not variant.startswith("ours"):
        return "tab:gray"
    if row["step"] == "goals" and variant == "eager":
        return "tab:gray"
    return "tab:blue"
