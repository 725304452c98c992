r"""A self-contained HTML page about a set of runs: recalls, learning curves, hubness and example
queries.

    python -m examples.retrieval.report --data DATA --out report.html \
        runs/dcl_0 runs/dcl_1 runs/hal_0 runs/hal_1

Runs that differ in the seed only share one line of the table, with mean and standard deviation.

The page uses the template of :mod:`itrloss.cli.pages`, with figures as inline SVG and
pictures as inline JPEG. Pictures are optional: without `DATA/pictures/dev_00000.png` etc., the
gallery shows captions only.
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from itrloss.cli.charts import COLOURS, MARKERS, svg
from itrloss.cli.pages import Block, number, render
from itrloss.cli.report import hubness
from itrloss.files import written
from itrloss.metrics import RetrievalResults, retrieval_results
from itrloss.rerank import Reranker

from .config import NO_EFFECT
from .data import Split, load_split
from .evaluate import FIGURES, reranker
from .paper_figures import in_two_dimensions, new_panels, scatter
from .preparation import load_model
from .report_gallery import MISSED, SEED, Gallery
from .runs import Experiment, experiments, load_run, reported_split
from .scene_captions import listed

LOSSES = {
    "triplet": "triplet, hardest negative",
    "infonce": "InfoNCE, softmax over the batch",
    "hal": "HAL, hubness-aware",
    "dcl": "DCL, diversity-sensitive",
    "uto": "USER",
    "coder": "CODER",
    "dvse": "DVSE",
}
COLUMNS = [*FIGURES, "i2t_median_rank", "t2i_median_rank", "i2t_skewness", "t2i_skewness"]
HEADS = ["R@1", "R@5", "R@10"] * 2 + ["RSUM"] + ["i → t", "t → i"] * 2
GROUPS = [
    ("image → text", 3),
    ("text → image", 3),
    ("", 1),
    ("median rank", 2),
    ("skewness", 2),
]
SHOWN = 100  # pictures of the t-SNE


def write_report(run_dirs: Sequence[Path], data_root: Path, out: Path) -> None:
    """Write the page `out` about the runs, which were trained on the data set at `data_root`.

    Raises:
        OSError: a file of the data is missing; the message names it.
        ValueError: a run is not finished, or its scores do not have the shape of the data.
    """
    if not run_dirs:
        raise ValueError("run_dirs: expected at least one run, got none")
    found = experiments(map(load_run, run_dirs))
    split = reported_split(found)
    best = max(found, key=lambda experiment: experiment.mean(split, "after", "rsum"))
    tests = [experiment.config["test_split"] for experiment in found] if split == "test" else []
    names = dict.fromkeys(("train", "dev", *tests))
    splits = {name: load_split(data_root, name, best.config["image_size"]) for name in names}
    dev = splits["dev"].first(best.config["dev_images"])
    scores = _scores(best, dev, data_root)
    before = _results(scores, dev, None)
    after = _results(scores, dev, reranker(best.config["rerank"]))
    gallery = Gallery(dev, data_root, "dev")
    sections = {
        "The data": [{"cards": gallery.samples(min(4, len(dev.features)))}],
        "Recall before and after re-ranking": _recall(found, split),
        "Learning curves": _curves(found),
        "Embeddings": _embeddings(best, dev),
        "Hubness": _hubness(best, before, after, split),
        "Queries to look at": _gallery(best, before, after, gallery),
        "How to read this": _closing(found, splits[[*names][-1]]),
    }
    blocks = _header(found, splits, data_root)
    for title, content in sections.items():
        if content:
            blocks.append({"title": title, "blocks": content})
    out.parent.mkdir(parents=True, exist_ok=True)
    with written(out) as file:
        file.write(render("Image-text retrieval report", blocks))


def _scores(experiment: Experiment, dev: Split, data_root: Path) -> Tensor:
    run = experiment.best_run()
    scores = run.scores()
    if scores.shape != (len(dev.features), len(dev.captions)):
        raise ValueError(
            f"{run.directory / 'dev_scores.npy'} is {tuple(scores.shape)}, but {data_root} has "
            f"{len(dev.features)} dev images and {len(dev.captions)} dev captions"
        )
    return scores


def _results(scores: Tensor, dev: Split, by: Reranker | None) -> RetrievalResults:
    return retrieval_results(scores, dev.image_ids, dev.text_ids, reranker=by)


# --- header ---------------------------------------------------------------------------------------


def _header(
    found: Sequence[Experiment], splits: Mapping[str, Split], data_root: Path
) -> list[Block]:
    first = found[0].config
    differing = [
        name
        for name in first
        if name not in NO_EFFECT
        and any(experiment.config.get(name) != first[name] for experiment in found)
    ]
    lead = f"The experiments differ in {listed(differing)}." if differing else "One experiment."
    lead += (
        " Each is measured by the cosine of image and text embeddings, and again after Fast "
        "Re-ranking of the same scores."
    )
    sizes = [
        f"{name} {len(split.features):,} pictures, {len(split.captions):,} captions"
        for name, split in splits.items()
    ]
    minutes = sum(experiment.seconds for experiment in found) / 60
    times = [f"{experiment.name} {experiment.seconds:.1f}\u00a0s" for experiment in found]
    training = (
        f"{_common(found, 'epochs')} epochs, batches of {_common(found, 'batch_size')}, seeds "
        f"{', '.join(_seeds(found))}, on {_common(found, 'device')}"
    )
    facts = {
        "Data": f"{data_root.resolve().name}: {'; '.join(sizes)}",
        "Model": f"two encoders into one space of {_common(found, 'dim')} dimensions",
        "Training": training,
        "Loss options": "; ".join(f"{x.name}: {_loss_options(x)}" for x in found),
        "Time": f"{minutes:.1f} minutes of training ({', '.join(times)})",
    }
    return [lead, {"facts": facts}]


def _loss_options(experiment: Experiment) -> str:
    options = experiment.config["loss_options"]
    return ", ".join(f"{name} = {value}" for name, value in options.items()) or "the defaults"


def _common(found: Sequence[Experiment], name: str) -> str:
    """Value of a setting; if the experiments differ, all values."""
    return " / ".join(dict.fromkeys(str(experiment.config[name]) for experiment in found))


def _seeds(found: Sequence[Experiment]) -> list[str]:
    """All seeds, each once."""
    seeds = {run.config["seed"] for experiment in found for run in experiment.runs}
    return [str(seed) for seed in sorted(seeds)]


# --- table ----------------------------------------------------------------------------------------


def best_value(column: str, values: Sequence[float]) -> float:
    """Best value of a column: the highest recall, the lowest median rank, the skewness nearest to
    0.
    """
    if column.endswith("skewness"):
        return min(values, key=abs)
    if column.endswith("median_rank"):
        return min(values)
    return max(values)


def _table(found: Sequence[Experiment], split: str) -> Block:
    rows = []
    for experiment in found:
        loss = experiment.config["loss"]
        name = {"text": experiment.name, "below": [LOSSES.get(loss, loss)], "rows": 2}
        for when, texts in (("before", [name, "cosine"]), ("after", ["re-ranked"])):
            cells = [_cell(found, experiment, (split, when, column)) for column in COLUMNS]
            rows.append((texts, cells))
    return {"table": rows, "columns": (["", ""], HEADS), "groups": GROUPS}


def _cell(
    found: Sequence[Experiment], experiment: Experiment, figure: tuple[str, str, str]
) -> dict[str, Any]:
    """A figure, by split, "before" or "after" re-ranking, and column: in bold if it is the best;
    below it its spread, and its change by re-ranking.
    """
    split, when, column = figure
    value = experiment.mean(*figure)
    below = []
    if len(experiment.runs) > 1:
        below.append(f"±\u00a0{number(statistics.stdev(experiment.values(*figure)))}")
    if when == "after":
        below.append(number(value - experiment.mean(split, "before", column), "+,.1f"))
    values = [round(other.mean(*figure), 1) for other in found]
    is_best = round(value, 1) == best_value(column, values)
    return {"text": number(value), "below": below, "strong": is_best and len(found) > 1}


def _recall(found: Sequence[Experiment], split: str) -> list[Block]:
    """The table on the split and, if all runs have them, the means over parts of the test split."""
    held_out = "The test split was not used for selection: the epoch is the best on dev."
    if split == "dev":
        held_out = "The epoch is the best on dev, so these figures are slightly optimistic."
    note = (
        "Small figures with a sign: the change by re-ranking. Median rank: that of the first right "
        "answer; lower is better. Skewness: that of how often each candidate is among a query's "
        "first 10; 0 means that no candidate is a hub."
    )
    if any(len(experiment.runs) > 1 for experiment in found):
        note += " ±: standard deviation over seeds."
    if len(found) > 1:
        note += " Bold on a tint: the best of its column, before and after re-ranking."
    blocks: list[Block] = [
        f"Percentage of queries of the {split} split with a right answer among the first 1, 5 or "
        "10, for pictures as queries for captions and for captions as queries for pictures. "
        f"{held_out}",
        _table(found, split),
    ]
    if all("test_folds" in run.metrics for experiment in found for run in experiment.runs):
        folds = _common(found, "test_folds")
        blocks += [
            f"Means over {folds} equal parts of the test split, each of which is ranked and "
            "re-ranked for itself:",
            _table(found, "test_folds"),
        ]
    return [*blocks, {"note": note}]


# --- figures --------------------------------------------------------------------------------------


def _curves(found: Sequence[Experiment]) -> list[Block]:
    def draw(axes: Axes) -> None:
        """Draw a thick line of the epochs that all seeds have finished, and a thin one for each."""
        for i, experiment in enumerate(found):
            colour = COLOURS[i % len(COLOURS)]
            runs = experiment.curves()
            for run in runs if len(runs) > 1 else []:
                axes.plot(range(1, len(run) + 1), run, color=colour, linewidth=0.8, alpha=0.6)
            means = [statistics.fmean(rsums) for rsums in zip(*runs, strict=False)]
            line = {"color": colour, "marker": MARKERS[i % len(MARKERS)], "linewidth": 2}
            axes.plot(range(1, len(means) + 1), means, label=experiment.name, **line)
        axes.locator_params(axis="x", integer=True)

    label = "RSUM on the dev split after each epoch"
    chart = svg(draw, label, "epoch", "RSUM on dev, at most 600", (480, 300))
    caption = f"{label}, by cosine, without re-ranking."
    if any(len(experiment.runs) > 1 for experiment in found):
        caption += " Thin lines are single seeds, thick ones their means."
    return [{"figures": [(chart, caption)]}]


def _embeddings(best: Experiment, dev: Split) -> list[Block]:
    """t-SNE of the best model, unless its checkpoint is gone or its embeddings are sets."""
    checkpoint = best.best_run().directory / "best.pt"
    if best.config["loss"] == "dvse" or not checkpoint.exists():
        return []
    model, words, _ = load_model(checkpoint)
    shown = dev.first(SHOWN)
    figure, panels = new_panels(1, 1, 5.0, 4.0)
    scatter(panels[0, 0], in_two_dimensions(model, words, shown))
    panels[0, 0].set_axis_off()
    file = io.BytesIO()
    figure.savefig(file, format="png", transparent=True, metadata={"Software": None})
    label = f"t-SNE of {best.name}'s embeddings"
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    caption = (
        f"{label}: {len(shown.features)} pictures of dev (orange, large) and their "
        f"{len(shown.captions)} captions (blue). Neighbours are alike; distances between groups "
        "have no meaning."
    )
    picture = f'<img style="max-width: 34rem" src="{source}" alt="{label}">'
    return [{"figures": [(picture, caption)]}]


def _hubness(
    best: Experiment, before: RetrievalResults, after: RetrievalResults, split: str
) -> list[Block]:
    names = ("cosine", "re-ranked")
    charts = [
        hubness(before.i2t, after.i2t, names, "picture", "caption"),
        hubness(before.t2i, after.t2i, names, "caption", "picture"),
    ]
    return [
        "A hub is a candidate that is retrieved for many queries, right or wrong. If answers "
        "were distributed evenly, every candidate would be in the mean number of lists. The "
        f"charts show {best.name}, with the highest RSUM after re-ranking on {split}, for scores "
        "of the dev split, with counts on a logarithmic axis.",
        {"figures": charts},
    ]


# --- gallery and closing --------------------------------------------------------------------------


def _gallery(
    best: Experiment, before: RetrievalResults, after: RetrievalResults, gallery: Gallery
) -> list[Block]:
    captions = gallery.cards("i2t", before.i2t, after.i2t)
    pictures = gallery.cards("t2i", before.t2i, after.t2i)
    return [
        f"Dev queries answered by {best.name}, drawn at random, not selected by hand (NumPy seed "
        f"{SEED}), from groups by the rank of the first right answer: two queries with a right "
        f"answer at rank 1, one nearly right, one with none in its first {MISSED}, one that "
        "re-ranking corrected and one that it made wrong. A group without queries is omitted. "
        "Right answers have a green edge and a check mark\u00a0✓.",
        {"title": "Pictures asking for captions", "blocks": [{"cards": captions}]},
        {"title": "Captions asking for pictures", "blocks": [{"cards": pictures}]},
    ]


def _closing(found: Sequence[Experiment], split: Split) -> list[Block]:
    seeds = dict.fromkeys(_count(len(experiment.runs), "seed") for experiment in found)
    n = len(split.features)
    caution = ""
    if all(experiment.config["data"] == "scenes" for experiment in found):
        caution = (
            "The pictures are drawn by a program; losses may compare differently on photographs. "
        )
    return [
        "RSUM is the sum of the six recalls, at most 600. R@K counts a query as answered if any "
        "of its right answers is among the first K; a picture has "
        f"{_count(split.captions_per_image, 'right caption')}, a caption one right picture. A "
        "caption is right only for the picture that it was written for, so an answer marked "
        "wrong may still be true.",
        f"Figures are of {listed(list(seeds))}. With {n:,} pictures an image → text recall has a "
        f"standard error of up to {50 / n**0.5:.1f} points, and also varies with the seed, so that "
        f"small differences between losses are not significant. {caution}Fast Re-ranking uses all "
        "queries of a split together, and no labels; a single query cannot be re-ranked.",
    ]


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="report", description="Write one HTML page about finished runs."
    )
    parser.add_argument("--data", type=Path, required=True, help="the directory of the data set")
    parser.add_argument("--out", type=Path, required=True, help="the page, such as report.html")
    parser.add_argument(
        "runs", type=Path, nargs="+", help="run directories, which name the experiments"
    )
    args = parser.parse_args(arguments)
    try:
        write_report(args.runs, args.data, args.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(args.out)


if __name__ == "__main__":
    main()
