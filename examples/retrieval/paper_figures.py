"""The figures of the papers, drawn of finished runs of the first seed.

Each is a PNG file without a background, for light and dark pages, and its numbers as CSV, or a page
of HTML.
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits
from torch import Tensor

import itrloss
from itrloss.cli.charts import COLOURS, MARKERS
from itrloss.cli.pages import render
from itrloss.files import written
from itrloss.functional import std_diversity
from itrloss.metrics import retrieval_results

from .config import Config
from .data import Split, Tokenizer, features_directory
from .evaluate import encode, recalls, reranker
from .models import VSE, views
from .paper_runs import Grid, files_of, scores_of, split_of, whole_split_of
from .paper_tables import Table, titled
from .pictures import Images
from .preparation import data_directory, load_model
from .report_gallery import Gallery, picture_of
from .runs import Rows

Lines = list[Sequence[Any]]  # of a CSV file
Drawn = tuple[Figure | str, Lines]  # a picture, or a page of HTML
Draw = Callable[[Grid, Table, Rows], Drawn]

INK = COLOURS[-1]  # for light and dark pages
STYLE = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.transparent": True,
    "savefig.bbox": "tight",
}
# of Fast Re-ranking: some of those of DVSE's Fig. 7
SCALES = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 100, 200, 500, 1000)
MOST = 1000  # images of t-SNE
PAIRS = 8  # of the mini-batch whose similarities are shown
PICTURES = 3  # of the heat maps
SIDE = 224  # pixels of a heat map
SEED = 0  # for the draw of images


def trained(grid: Grid, config: Config) -> tuple[VSE, Tokenizer, Split]:
    """A row's model and its words, with the split on which it is shown."""
    model, words, _ = load_model(Path(config.out) / "best.pt")
    return model, words, split_of(config, grid.split)


def configs(grid: Grid, table: Table) -> dict[str, Config]:
    """The settings of the rows that are run, with the first seed."""
    return {
        name: grid.config(row, grid.seeds[0])
        for name, row in table.rows.items()
        if not (row.mean_of or grid.cannot(row))
    }


def write_csv(stem: Path, lines: Iterable[Sequence[object]]) -> None:
    with written(stem.with_suffix(".csv")) as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def new_panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """A figure with a grid of axes (rows, columns), each of this size in inches."""
    figure = Figure((width * columns, height * rows), layout="constrained", dpi=120)
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw(grid: Grid, table: Table, rows: Rows, stem: Path) -> Path:
    """Write a figure and, if it has some, its numbers; return the file of the figure."""
    with rc_context(STYLE):  # type: ignore[arg-type]
        drawn, lines = DRAWN[table.kind](grid, table, rows)
        if isinstance(drawn, Figure):
            file = stem.with_suffix(".png")
            drawn.savefig(file, metadata={"Software": None})
        else:
            file = stem.with_suffix(".html")
            with written(file) as page:
                page.write(drawn)
    if lines:
        write_csv(stem, lines)
    return file


def matrices(
    values: Mapping[str, np.ndarray], rows: str, columns: str, **colours: Any
) -> tuple[Figure, Lines]:
    """Matrices side by side, and their entries; ``colours`` are options of matplotlib's imshow."""
    figure, panels = new_panels(1, len(values), 5.0, 4.4)
    lines: Lines = [("matrix", rows, columns, "value")]
    for axes, (name, entries) in zip(panels[0], values.items(), strict=True):
        shown = axes.imshow(entries, **colours)
        figure.colorbar(shown, ax=axes, shrink=0.8)
        axes.set(title=name, xlabel=columns, ylabel=rows)
        lines += [(name, *place, value) for place, value in np.ndenumerate(entries)]
    return figure, lines


# --- of figures -----------------------------------------------------------------------------------


def draw_curves(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """Figures by the value of a setting, mean and standard deviation over seeds."""
    names = list(dict.fromkeys(sweep.name for sweep in table.sweeps))
    figure, panels = new_panels(len(table.shown), len(names), 4.2, 2.4)
    for (i, shown), (j, name) in product(enumerate(table.shown), enumerate(names)):
        axes = panels[i, j]
        for k, sweep in enumerate(sweep for sweep in table.sweeps if sweep.name == name):
            values = [value for value in sweep.values if rows[sweep.row(value)]]
            figures = [
                [metrics[table.when][shown] for metrics in rows[sweep.row(value)].values()]
                for value in values
            ]
            means = [np.mean(seeds) for seeds in figures]
            spread = [np.std(seeds, ddof=1) if len(seeds) > 1 else 0.0 for seeds in figures]
            places = [sweep.values.index(value) for value in values]
            style = {"marker": MARKERS[k], "color": COLOURS[k], "capsize": 3}
            axes.errorbar(places, means, spread, label=sweep.series, **style)
            axes.set_xticks(range(len(sweep.values)), [str(value) for value in sweep.values])
            if sweep.series:
                axes.legend()
        axes.set_xlabel(name)
        axes.set_ylabel(titled(shown))
    return figure, []


def draw_times(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """RSUM by time or speed: ours, and what is printed."""
    shown = table.shown[0]
    ours = {}
    for name, seeds in rows.items():
        both = [(one["before"][shown], one["before"]["rsum"]) for one in seeds.values()]
        if both:
            ours[name] = np.mean(both, axis=0)
    panels_of = {f"ours, {grid.split}": ours}
    for data, printed in table.printed.items():
        whole = {name: row for name, row in printed.items() if shown in row and "rsum" in row}
        panels_of[f"printed, {data}"] = {
            name: np.array([row[shown], row["rsum"]]) for name, row in whole.items()
        }
    figure, panels = new_panels(1, len(panels_of), 4.2, 3.2)
    for axes, (title, points) in zip(panels[0], panels_of.items(), strict=True):
        for k, (name, (x, y)) in enumerate(points.items()):
            axes.plot(x, y, MARKERS[k], color=COLOURS[k], label=name)
        axes.set(title=title, xlabel=titled(shown), ylabel="RSUM")
        axes.legend()
    return figure, []


def draw_grid(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """Recalls at 1 by the scales of Fast Re-ranking."""
    config = next(iter(configs(grid, table).values()))
    scores, split = scores_of(config, grid.split)
    size = len(SCALES)
    matrix_of = {name: np.zeros((size, size)) for name in ("i2t_r1", "t2i_r1")}
    for (i, first), (j, second) in product(enumerate(SCALES), enumerate(SCALES)):
        by = reranker([first, second, first, second])
        measured = recalls(scores, split, by)
        for name, values in matrix_of.items():
            values[i, j] = measured[name]
    named = {titled(name): values for name, values in matrix_of.items()}
    figure, lines = matrices(named, "γ1 or λ1", "γ2 or λ2")
    labels = [str(scale) for scale in SCALES]
    for axes in figure.axes[:2]:
        axes.set_xticks(range(size), labels, rotation=90)
        axes.set_yticks(range(size), labels)
    scaled = [(name, labels[i], labels[j], value) for name, i, j, value in lines[1:]]
    return figure, [lines[0], *scaled]


# --- of embeddings --------------------------------------------------------------------------------


def in_two_dimensions(model: VSE, words: Tokenizer, split: Split) -> dict[str, np.ndarray]:
    """t-SNE of the texts' and the images' embeddings, each (n, 2)."""
    images, texts = (model.as_vectors(x) for x in encode(model, split, words))
    both = torch.cat([images, texts]).cpu().numpy()
    perplexity = min(30.0, (len(both) - 1) / 3)
    # more threads wait for one another actively: 16 times the CPU seconds on busy cores
    with threadpool_limits(1):
        points = TSNE(perplexity=perplexity, random_state=SEED).fit_transform(both)
    return {"text": points[len(images) :], "image": points[: len(images)]}


def scatter(axes: Axes, points: Mapping[str, np.ndarray]) -> None:
    """Draw what :func:`in_two_dimensions` returns."""
    for (kind, part), colour, size in zip(points.items(), COLOURS, (3, 9), strict=False):
        axes.scatter(*part.T, s=size, color=colour, label=f"{kind}s", linewidths=0)


def draw_tsne(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """Images and their texts in two dimensions, of each model."""
    models = configs(grid, table)
    figure, panels = new_panels(1, len(models), 5.0, 5.0)
    lines: Lines = [("model", "kind", "image", "x", "y")]
    for axes, (name, config) in zip(panels[0], models.items(), strict=True):
        model, words, split = trained(grid, config)
        parts = in_two_dimensions(model, words, split.first(MOST))
        scatter(axes, parts)
        for kind, part in parts.items():
            each = 1 if kind == "image" else split.captions_per_image
            lines += [(name, kind, i // each, *point) for i, point in enumerate(part.tolist())]
        axes.set(title=name, xticks=[], yticks=[])
        axes.legend(markerscale=2)
    return figure, lines


def draw_matrices(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """Similarities of a mini-batch, and the same divided by the texts' diversity."""
    config = next(iter(configs(grid, table).values()))
    model, words, split = trained(grid, config)
    images, texts = (model.as_vectors(x) for x in encode(model, split, words))
    images = images[:PAIRS]
    texts = texts[:: split.captions_per_image][:PAIRS]
    similarity = itrloss.Similarity(texts, images, split.image_ids[:PAIRS], split.image_ids[:PAIRS])
    scores = similarity.scores()
    divided = scores / std_diversity(similarity)[:, None]
    figure, lines = matrices({"S": scores.numpy(), "S / div": divided.numpy()}, "text", "image")
    for axes, values in zip(figure.axes, (scores, divided), strict=False):
        for (i, j), value in np.ndenumerate(values.numpy()):
            ink = "black" if value > values.mean() else "white"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=8)
    return figure, lines


def draw_correlations(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """Correlations of one image's sub-embeddings, of each model."""
    correlations = {}
    for name, config in configs(grid, table).items():
        model, _, split = trained(grid, config)
        image = int(np.random.default_rng(SEED).integers(len(split.features)))
        sets, _ = sub_embeddings(model, split, image)
        correlations[f"{name}, image {image}"] = np.corrcoef(sets.numpy())
    return matrices(correlations, "i", "j", cmap="RdBu_r", vmin=-1, vmax=1)


@torch.no_grad()
def sub_embeddings(model: VSE, split: Split, image: int) -> tuple[Tensor, Tensor]:
    """An image's sub-embeddings (K, d), and its regions in the same space (R, d)."""
    encoder = views(model)[0].image
    assert encoder.heads is not None
    seen: list[Tensor] = []
    hook = encoder.heads.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    whole = split.whole(image)
    sets, _ = encoder(split.regions(image)[None], None if whole is None else whole[None])
    hook.remove()
    return sets[0], seen[0][0]


# --- with pictures --------------------------------------------------------------------------------


def boxes_of(split: Split, data: Path, name: str, regions: int) -> np.ndarray:
    """Boxes of each image's regions, (n, R, 4): left, top, right and bottom as shares of the
    picture. ``split`` has all images of the files with this name.
    """
    if isinstance(split.features, Images):  # the positions of a network's last feature map
        side = math.isqrt(regions)
        corners = np.array([(j, i) for i in range(side) for j in range(side)])
        boxes = np.concatenate([corners, corners + 1], 1) / side
        return np.broadcast_to(boxes, (len(split.features), *boxes.shape))
    file = features_directory(data) / f"{name}_boxes.npy"
    if not file.exists():
        raise ValueError(f"{file}: heat maps need the regions' boxes, (n, {regions}, 4)")
    boxes = np.load(file).astype(np.float32)
    if boxes.shape != (len(split.features), regions, 4) or boxes.min() < 0 or boxes.max() > 1:
        raise ValueError(
            f"{file}: {boxes.shape}, must be ({len(split.features)}, {regions}, 4) of numbers from "
            "0 to 1: left, top, right and bottom as shares of the picture's width and height"
        )
    return boxes


def heat(similarities: np.ndarray, boxes: np.ndarray, side: int = SIDE) -> np.ndarray:
    """Attention of pixels, (side, side): regions (R,) by rank r have (R - r)², and pixels the sum
    of their regions' (DVSE, section IV-E), at most 1.
    """
    ranks = np.argsort(np.argsort(-similarities, kind="stable"), kind="stable") + 1
    pixels = np.zeros((side, side))
    for (left, top, right, bottom), rank in zip(boxes * side, ranks, strict=True):
        rows = slice(math.floor(top), math.ceil(bottom))
        pixels[rows, math.floor(left) : math.ceil(right)] += (len(ranks) - rank) ** 2
    return pixels / max(pixels.max(), 1)


def draw_heat_maps(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """Images, each with a heat map of its sub-embeddings and the caption that is closest to it."""
    config = next(iter(configs(grid, table).values()))
    model, words, split = trained(grid, config)
    whole = whole_split_of(config, grid.split)
    data = data_directory(config)
    name = files_of(config, grid.split)
    view = views(model)[0]
    texts = encode(view, split, words)[1]
    rng = np.random.default_rng(SEED)
    chosen = [int(image) for image in rng.permutation(len(split.features))[:PICTURES]]
    heads = config.heads
    figure, panels = new_panels(len(chosen), 1 + heads, 2.4, 3.0)
    lines: Lines = [("image", "head", "region", "similarity")]
    for axes, image in zip(panels, chosen, strict=True):
        sets, regions = sub_embeddings(model, split, image)
        boxes = boxes_of(whole, data, name, len(regions))[image]
        picture = picture_pixels(split, data, name, image)
        similarities = cosines(sets, regions)
        own = range(image * split.captions_per_image, (image + 1) * split.captions_per_image)
        captions = [split.captions[own[i]] for i in cosines(sets, texts[own]).argmax(1)]
        axes[0].imshow(picture)
        axes[0].set_title(f"image {image}", fontsize=7)
        for k in range(heads):
            axes[1 + k].imshow(picture)
            axes[1 + k].imshow(heat(similarities[k], boxes), cmap="jet", alpha=0.5)
            axes[1 + k].set_title(textwrap.fill(captions[k], 32), fontsize=7)
        for panel in axes:
            panel.set_axis_off()
        lines += [(image, *place, value) for place, value in np.ndenumerate(similarities)]
    return figure, lines


def cosines(a: Tensor, b: Tensor) -> np.ndarray:
    return torch.cosine_similarity(a[:, None], b[None], dim=2).numpy()


def picture_pixels(split: Split, data: Path, name: str, image: int) -> Image.Image:
    """The picture of an image as a square; white without a file."""
    picture = picture_of(split, data, name, image)
    if picture is None:
        return Image.new("RGB", (SIDE, SIDE), "white")
    return picture.resize((SIDE, SIDE))


def draw_results(grid: Grid, table: Table, rows: Rows) -> Drawn:
    """A page of queries with the answers of two models side by side."""
    models = configs(grid, table)
    first, second = models
    split = split_of(models[first], grid.split)
    results = []
    for config in models.values():
        scores, _ = scores_of(config, grid.split)
        results.append(retrieval_results(scores, split.image_ids, split.text_ids))
    name = files_of(models[first], grid.split)
    gallery = Gallery(split, data_directory(models[first]), name, (first, second))
    blocks = []
    for way, title in (("i2t", "Images as queries"), ("t2i", "Texts as queries")):
        before, after = (getattr(result, way) for result in results)
        blocks.append({"title": title, "blocks": [{"cards": gallery.cards(way, before, after)}]})
    return render(f"{first} and {second}", [table.title, *blocks]), []


DRAWN: dict[str, Draw] = {
    "curves": draw_curves,
    "time": draw_times,
    "grid": draw_grid,
    "t-SNE": draw_tsne,
    "matrices": draw_matrices,
    "correlations": draw_correlations,
    "heat maps": draw_heat_maps,
    "results": draw_results,
}
