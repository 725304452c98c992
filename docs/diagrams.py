"""Pictures of decisions, processes, ranks and of the records of measurements."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import records
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import itrloss
from examples.retrieval.scene_captions import captions
from examples.retrieval.scene_drawing import render
from examples.retrieval.scenes import generate_scenes
from itrloss.metrics import retrieval_results
from itrloss.rerank import CSLS

ALT = "Diagram"
BOX = "#8b919c"
QUESTIONS = (
    ("Several captions an image,\nor an image twice in a batch?", "pass ids on both sides"),
    ("A fifth of the pairs wrong,\nor more?", "GeneralizedCrossEntropy-\nLoss(0.1, q=0.3)"),
    ("Time to mine hard negatives?", "InfoNCELoss(0.1) with\nnegatives=…, in two calls"),
    ("Encoders fill the memory?", "grad_cache_step, or a queue\n(MemoryInfoNCELoss: not measured)"),
    ("Several GPUs?", "gather=True"),
)


def tree() -> Figure:
    """Five questions, one below the other, and what a yes changes."""
    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    for i, (question, answer) in enumerate(QUESTIONS):
        y = -i
        box(axes, 0.0, y, 2.6, question, "C0")
        box(axes, 3.7, y, 3.0, answer, "C2")
        arrow(axes, (2.6, y), (3.7, y), "yes")
        arrow(axes, (1.3, y - 0.33), (1.3, y - 0.67), "no, or then")
    box(axes, 0.0, -len(QUESTIONS), 2.6, "InfoNCELoss()\n+ CSLS at test time", "C1")
    axes.set(xlim=(-0.1, 6.9), ylim=(-len(QUESTIONS) - 0.5, 0.5))
    axes.set_title("Which loss?")
    axes.axis("off")
    return figure


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str) -> None:
    """Draw a box whose left edge is at x, with text in its middle."""
    style = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch((x, y - 0.33), width, 0.66, style, facecolor="none", edgecolor=color, lw=1.5)
    )
    axes.text(x + width / 2, y, text, ha="center", va="center", size=8.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    """Draw an arrow with a word next to its middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": BOX})
    middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
    across = start[1] == end[1]
    axes.text(
        middle[0] + (0 if across else 0.08),
        middle[1] + (0.06 if across else 0),
        text,
        ha="center" if across else "left",
        va="bottom" if across else "center",
        size=8,
    )


def ranks() -> Figure:
    """The rank of each image's best own caption, before and after CSLS."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(300, 64, generator=generator) + 1.0
    texts = images.repeat_interleave(5, 0) + 3.0 * torch.randn(1500, 64, generator=generator)
    texts = texts + 2.0 * torch.rand(1500, 1, generator=generator)  # hubs
    image_ids = torch.arange(300)
    sim = itrloss.Similarity(images, texts, image_ids, image_ids.repeat_interleave(5))
    before = retrieval_results(sim).i2t
    after = retrieval_results(sim, reranker=CSLS()).i2t
    figure, axes = plt.subplots(figsize=(4.6, 4.2))
    axes.loglog(before.best, after.best, "o", alpha=0.4, markersize=4)
    ends = [1, 1500]
    axes.plot(ends, ends, color=BOX, linewidth=1)
    axes.set(xlabel="rank before", ylabel="rank after", title="Ranks before and after re-ranking")
    return figure


def processes() -> Figure:
    """What each of three processes holds, sends and computes with gather=True."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    count = 3
    for row in range(count):
        for column in range(count):
            own = row == column
            axes.add_patch(
                plt.Rectangle(
                    (column, -row - 1), 1, 1, facecolor=f"C{row}", alpha=0.55 if own else 0.2
                )
            )
            text = f"images {row} ×\ntexts {column}"
            axes.text(column + 0.5, -row - 0.5, text, ha="center", va="center", size=7)
        about = f"process {row}: its images,\nand all texts"
        axes.text(-0.1, -row - 0.5, about, ha="right", va="center", size=8.5)
    notes = (
        "all-gather of all texts,\nM × D numbers",
        "each its own rows:\n1/W of the work",
        "each text's sums are added up,\none number a text",
        "backward: reduce-scatter of\nthe gradients of the texts",
    )
    for i, note in enumerate(notes):
        axes.text(3.2, -0.35 - 0.77 * i, f"{i + 1}. {note}", ha="left", va="center", size=8.5)
    axes.set(xlim=(-2.2, 5.6), ylim=(-3.05, 0.3))
    axes.set_title("gather=True: each process does its rows")
    axes.axis("off")
    return figure


def scenes() -> Figure:
    """Four scenes with their first captions."""
    figure, rows = plt.subplots(1, 4, figsize=(6.4, 2.2))
    for number, (axes, scene) in enumerate(zip(rows, generate_scenes("train", 4), strict=True)):
        generator = np.random.default_rng(number)
        axes.imshow(render(scene))
        axes.set_xlabel(wrapped(captions(scene, generator)[0]), size=7)
        axes.set(xticks=[], yticks=[])
    rows[0].set_title("Scenes and captions", loc="left")
    return figure


def wrapped(text: str, width: int = 24) -> str:
    """Return text in lines of at most so many letters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(lines)


def cpu() -> Figure:
    """Eager PyTorch and torch.compile as multiples of ours, by the number of pairs, on two CPUs."""
    figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.2), sharey=True)
    titles = {"cpu_losses": "AVX2", "cpu_losses_avx512": "AVX-512, earlier engine"}
    for axes, (record, title) in zip(panels, titles.items(), strict=True):
        for variant, marker in (("eager", "o"), ("eager compiled", "s")):
            for color, loss in enumerate(("infonce", "dcl std", "hal", "sigmoid")):
                rows = records.rows_of(record, loss=loss, variant=variant)
                name = loss if variant == "eager" else f"{loss}, compiled"
                style = "-" if variant == "eager" else "--"
                sizes = [row["shape"][0] for row in rows]
                times = [row["to ours"] for row in rows]
                axes.plot(sizes, times, marker + style, color=f"C{color}", label=name, markersize=4)
        axes.axhline(1, color=BOX, linewidth=1)
        axes.set_xscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("pairs, of 1024 dimensions")
        axes.set_title(title)
    panels[0].set_ylabel("time of plain PyTorch, ours = 1")
    panels[0].set_ylim(bottom=0)
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def gpu() -> Figure:
    """Milliseconds and peak memory of InfoNCE, 32 768² × 512 in bfloat16, on an H100."""
    figure, (times, memory) = plt.subplots(1, 2, figsize=(6.4, 2.6), sharey=True)
    names = {"ours triton": "itrloss", "open_clip": "open_clip", "eager": "plain PyTorch"}
    shape = [32768, 32768, 512]
    for row, (variant, name) in enumerate(names.items()):
        where = {"step": "encoders", "loss": "infonce", "shape": shape, "variant": variant}
        (found,) = records.rows_of(records.GPU[0], **where)
        bars = times.barh(name, 1e3 * found["seconds"], color=f"C{row}")
        times.bar_label(bars, fmt="%.0f", padding=2)
        bars = memory.barh(name, found["peak_mb"] / 1e3, color=f"C{row}")
        memory.bar_label(bars, fmt="%.1f", padding=2)
    times.invert_yaxis()
    times.set_title("InfoNCE of 32 768 pairs, H100", loc="left")
    times.set_xlabel("milliseconds a step")
    memory.set_xlabel("peak memory, GB")
    return figure


def memory() -> Figure:
    """Peak memory of DCL over the number of pairs, on a CPU."""
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    for variant, label in (("eager", "plain PyTorch"), ("ours", "itrloss")):
        rows = records.rows_of("cpu_peak", variant=variant)
        sizes = [row["shape"][0] for row in rows]
        axes.loglog(sizes, [row["peak_mb"] for row in rows], "o-", label=label)
        axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="pairs in the batch", ylabel="peak memory, MB", title="DCL on a CPU")
    axes.legend()
    return figure


DIAGRAMS: dict[str, Callable[[], Figure]] = {
    "tree": tree,
    "ranks": ranks,
    "processes": processes,
    "scenes": scenes,
    "cpu": cpu,
    "gpu": gpu,
    "memory": memory,
}


def figures(name: str) -> list[Figure]:
    """Return the picture of one page."""
    return [DIAGRAMS[name]()]
