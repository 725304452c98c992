"""Pictures of the two schedules by which processes share a batch: what each computes, and what it
holds.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

W = 4  # processes
HELD = W + 0.9  # where the columns that a process holds are drawn


def figures() -> list[Figure]:
    """Return the pictures of both schedules."""
    return [panel("all-gather", all_gather), panel("ring", ring)]


def panel(title: str, draw: Callable[[Axes], None]) -> Figure:
    """Return the matrix in blocks, whose colour tells whose columns they have, beside what ``draw``
    adds.
    """
    figure, axes = plt.subplots(figsize=(4.7, 2.9))
    axes.set(title=title, xlim=(-1.3, 8.1), ylim=(W + 0.1, -0.7), aspect="equal")
    axes.axis("off")
    for process in range(W):
        axes.text(-0.15, process + 0.5, f"process {process}", ha="right", va="center", fontsize=9)
        for owner in range(W):
            block(axes, owner, process, 1.0, owner)
        axes.add_patch(
            Rectangle(
                (0, process), W, 1, fill=False, linewidth=1.4, edgecolor=plt.rcParams["text.color"]
            )
        )
    axes.text(W / 2, -0.3, "texts of process 0, 1, 2, 3", ha="center", va="center", fontsize=9)
    draw(axes)
    return figure


def block(axes: Axes, x: float, y: float, size: float, owner: int) -> None:
    """Draw a square in its owner's colour, pale enough for the ink of either theme."""
    axes.add_patch(Rectangle((x, y), size, size, facecolor=f"C{owner}", alpha=0.4, linewidth=0))


def all_gather(axes: Axes) -> None:
    """Each process holds the columns of all, and computes its rows at once."""
    axes.text(HELD + 1.1, -0.3, "holds", ha="center", va="center", fontsize=9)
    for process in range(W):
        for owner in range(W):
            block(axes, HELD + 0.55 * owner, process + 0.27, 0.46, owner)


def ring(axes: Axes) -> None:
    """Each process holds two blocks of columns; the numbers are the steps at which it computes with
    a block.
    """
    axes.text(HELD + 0.65, -0.3, "holds at step 1", ha="center", va="center", fontsize=9)
    for process in range(W):
        for owner in range(W):
            step = (owner - process) % W + 1
            axes.text(owner + 0.5, process + 0.5, f"{step}", ha="center", va="center")
        block(axes, HELD, process + 0.27, 0.46, process)
        block(axes, HELD + 0.55, process + 0.27, 0.46, (process + 1) % W)
    ink, x = plt.rcParams["text.color"], HELD + 1.35
    # from each process to the one before it, and from the first to the last
    for process in range(W):
        start, end, bend = (process + 0.4, process - 0.4, 0.4) if process else (0.5, W - 0.5, -0.55)
        style = {"arrowstyle": "->", "color": ink, "connectionstyle": f"arc3,rad={bend}"}
        axes.annotate("", (x, end), (x, start), arrowprops=style)
