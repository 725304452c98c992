"""A self-contained HTML page about a set of runs: recalls, learning curves, hubness and example
queries.

    python -m examples.retrieval.report --data DATA --out report.html runs/dcl_0 runs/dcl_1
    runs/hal_0 runs/hal_1

Runs that differ in the seed only share one line of the table, with mean and standard deviation.

The page uses the template of :mod:`itrloss.report`, with figures as inline SVG and pictures as
inline JPEG. Pictures are optional: without `DATA/pictures/dev_00000.png` etc., the gallery shows
captions only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itrloss.metrics import RetrievalResults, retrieval_results
from itrloss.report import Block, number, render
from itrloss.report.charts import Series, lines
from itrloss.report.comparison import hubness

from .config import NO_EFFECT
from .data import Split, load_split
from .evaluate import RECALLS, reranker
from .pictures import layout
from .report_gallery import MISSED, SEED, Gallery
from .scene_captions import listed
from .summary import IGNORED

TITLES = {
    "triplet": ("Triplet", "hardest negative"),
    "infonce": ("InfoNCE", "softmax over the batch"),
    "hal": ("HAL", "hubness-aware"),
    "dcl": ("DCL", "diversity-sensitive"),
}
COLUMNS = [*RECALLS, "rsum", "i2t_median_rank", "t2i_median_rank", "i2t_skewness", "t2i_skewness"]
# Settings that may differ between runs of the same experiment with different losses.
ABOUT_THE_LOSS = ("loss", "loss_options", "warmup_epochs", "warmup")


Metrics = dict[str, dict[str, dict[str, float]]]  # [split]["before" or "after"][figure]


@dataclass(frozen=True)
class Run:
    """The trainer's results in a run directory, or in several directories that differ in the
    seed.
    """

    name: str
    config: dict[str, Any]
    history: list[dict[str, float]]  # one dict per epoch: the mean over seeds
    metrics: Metrics  # the mean over seeds
    scores: Tensor  # (dev images, dev captions) float32: of the best seed
    finished: datetime
    seeds: tuple[Run, ...] = ()  # the single runs, if there are several seeds

    @property
    def title(self) -> str:
        """Title of the run: that of its loss, if the run is named after it."""
        return (
            TITLES[self.name][0]
            if self.name in TITLES and self.name == self.config["loss"]
            else self.name
        )

    @property
    def subtitle(self) -> str:
        """Short description of its loss."""
        loss = str(self.config["loss"])
        title, meaning = TITLES.get(loss, (loss, ""))
        return meaning if title == self.title else title

    @property
    def seconds(self) -> float:
        return sum(line["seconds"] for run in self.seeds or (self,) for line in run.history)

    def spread(self, split: str, when: str, figure: str) -> float:
        """Standard deviation of a figure over seeds, 0 for a single seed."""
        return (
            statistics.stdev(run.metrics[split][when][figure] for run in self.seeds)
            if self.seeds
            else 0.0
        )


def merge_seeds(runs: Sequence[Run]) -> list[Run]:
    """Merge runs that differ in the seed only; the merged run has the common prefix of their
    names.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        decisive = {key: value for key, value in run.config.items() if key not in IGNORED}
        groups.setdefault(json.dumps(decisive, sort_keys=True), []).append(run)
    return [_mean(group) if len(group) > 1 else group[0] for group in groups.values()]


def _mean(runs: list[Run]) -> Run:
    names = [run.name for run in runs]
    in_common = next(
        (i for i, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1),
        len(names[0]),
    )
    name = names[0][:in_common].rstrip("_-. ").removesuffix("seed").rstrip("_-. ")
    best = max(runs, key=lambda run: run.metrics["dev"]["after"]["rsum"])
    epochs = zip(*(run.history for run in runs), strict=False)  # epochs that all runs have finished
    splits = [split for split in best.metrics if all(split in run.metrics for run in runs)]
    return replace(
        best,
        name=name or best.name,
        config={**best.config, "seed": ", ".join(str(run.config["seed"]) for run in runs)},
        history=[_mean_of(lines) for lines in epochs],
        metrics={
            split: {
                when: _mean_of([run.metrics[split][when] for run in runs])
                for when in ("before", "after")
            }
            for split in splits
        },
        finished=max(run.finished for run in runs),
        seeds=tuple(runs),
    )


def _mean_of(dictionaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(d[key] for d in dictionaries) for key in dictionaries[0]}


def load_run(name: str, directory: Path) -> Run:
    """Read a finished run directory; FileNotFoundError names what is missing."""
    config, metrics = (
        json.loads(_existing(directory / f"{kind}.json").read_text())
        for kind in ("config", "metrics")
    )
    history = [
        json.loads(line) for line in _existing(directory / "log.jsonl").read_text().splitlines()
    ]
    if not history:
        raise ValueError(f"{directory / 'log.jsonl'}: holds no epoch")
    scores = torch.from_numpy(np.load(_existing(directory / "dev_scores.npy")))
    finished = datetime.fromtimestamp((directory / "metrics.json").stat().st_mtime)
    return Run(name, config, history, metrics, scores, finished)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the report needs it")
    return path


def reported_split(runs: Sequence[Run]) -> str:
    """Split of the table: "test" if all runs were measured on it, else "dev"."""
    return "test" if all("test" in run.metrics for run in runs) else "dev"


def write_report(run_dirs: Mapping[str, Path], data_root: Path, out: Path) -> None:
    """Write the page `out` about the runs, by name, that were trained on the data set at
    `data_root`.

    Raises:
        FileNotFoundError: a file is missing; the message names it.
        ValueError: the scores do not have the shape of the data.
    """
    if not run_dirs:
        raise ValueError("run_dirs: expected at least one run, got none")
    runs = [load_run(name, directory) for name, directory in run_dirs.items()]
    split = reported_split(runs)
    there = ["train", "dev", "test"]
    if layout(data_root) == "features":
        for needed in ("dev", split):
            for kind in ("ims.npy", "caps.txt"):
                _existing(data_root / f"{needed}_{kind}")
        there = [name for name in there if (data_root / f"{name}_ims.npy").is_file()]
    splits = {name: load_split(data_root, name) for name in there}
    dev = splits["dev"]
    for run, directory in zip(runs, run_dirs.values(), strict=True):
        if run.scores.shape != (len(dev.features), len(dev.captions)):
            raise ValueError(
                f"{directory / 'dev_scores.npy'} is {tuple(run.scores.shape)}, but {data_root} has "
                f"{len(dev.features)} dev images and {len(dev.captions)} dev captions"
            )
    runs = merge_seeds(runs)
    best = max(runs, key=lambda run: run.metrics[split]["after"]["rsum"])
    by = reranker(best.config["rerank"])
    results = [
        retrieval_results(best.scores, dev.image_ids, dev.text_ids, reranker=x) for x in (None, by)
    ]
    sections = {
        "Recall before and after re-ranking": _table(runs, split),
        "Learning curves": _curves(runs),
        "Hubness": _hubness(best, results, split),
        "Queries to look at": _gallery(best, results, Gallery(dev, data_root, "dev")),
        "How to read this": _closing(runs, splits[split]),
    }
    blocks = [
        *_header(runs, splits, data_root),
        *({"title": k, "blocks": v} for k, v in sections.items()),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render("Image-text retrieval report", blocks), encoding="utf-8")


# --- header ---------------------------------------------------------------------------------------


def _header(runs: Sequence[Run], splits: Mapping[str, Split], data_root: Path) -> list[Block]:
    titles = [run.title for run in runs]
    differing = [
        k for k in runs[0].config if any(run.config.get(k) != runs[0].config[k] for run in runs)
    ]
    differing = [key for key in differing if key not in NO_EFFECT]
    if len(runs) == 1:
        lead = "One run, measured"
    elif set(differing) <= set(ABOUT_THE_LOSS):
        lead = "The same model, data and batches; only the loss differs. Each run is measured"
    else:
        lead = f"The runs differ in {listed(differing)}. Each is measured"
    sizes = "; ".join(
        f"{n} {len(s.features):,} pictures, {len(s.captions):,} captions" for n, s in splits.items()
    )
    times = ", ".join(
        f"{title} {run.seconds:.1f}\u00a0s" for title, run in zip(titles, runs, strict=True)
    )
    facts = {
        "Losses" if runs[0].title in {t for t, _ in TITLES.values()} else "Runs": listed(titles),
        "Data": f"{_data_name(runs, data_root)}: {sizes}",
        "Model": f"two encoders into one space of {_common(runs, 'dim')} dimensions",
        "Training": f"{_common(runs, 'epochs')} epochs, batches of {_common(runs, 'batch_size')}, "
        f"seed {_common(runs, 'seed')}, on {_common(runs, 'device')}",
        "Loss options": _loss_options(runs),
        "Time": f"{sum(run.seconds for run in runs) / 60:.1f} minutes of training ({times})",
        "Finished": f"{max(run.finished for run in runs):%Y-%m-%d %H:%M}",
    }
    lead += (
        " by the cosine of image and text embeddings, and again after Fast Re-ranking of the same "
        "scores."
    )
    return [lead, {"facts": facts}]


def _data_name(runs: Sequence[Run], data_root: Path) -> str:
    card = data_root / "dataset.json"
    if card.is_file() and all(run.config["data"] == "scenes" for run in runs):
        return f"generated scenes (seed {json.loads(card.read_text())['seed']})"
    return data_root.resolve().name


def _warmup(run: Run) -> int:
    """Number of epochs in which the triplet loss sums over all negatives, before it uses the
    hardest.
    """
    hardest = run.config["loss"] == "triplet" and run.config["loss_options"].get("mining") != "all"
    return min(run.config["warmup_epochs"], len(run.history)) if hardest else 0


def _loss_options(runs: Sequence[Run]) -> str:
    options = {run.title: dict(run.config["loss_options"]) for run in runs}
    for run in runs:
        if warmup := _warmup(run):
            options[run.title]["warm-up"] = _count(warmup, "epoch")
    texts = [
        f"{title} {', '.join(f'{k} = {v}' for k, v in own.items())}"
        for title, own in options.items()
        if own
    ]
    rest = (
        []
        if len(texts) == len(runs)
        else ["the defaults of itrloss" if not texts else "the others by default"]
    )
    return "; ".join(texts + rest)


def _common(runs: Sequence[Run], key: str) -> str:
    """Value of a setting; if the runs differ, all values."""
    return " / ".join(dict.fromkeys(str(run.config[key]) for run in runs))


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


# --- table ----------------------------------------------------------------------------------------


def best_value(column: str, values: Sequence[float]) -> float:
    """Best value of a column: the highest recall, the lowest median rank, the skewness nearest to
    0.
    """
    if column.endswith("skewness"):
        return min(values, key=abs)
    return min(values) if column.endswith("median_rank") else max(values)


def _table(runs: Sequence[Run], split: str) -> list[Block]:
    best = {
        (when, column): best_value(
            column, [round(run.metrics[split][when][column], 1) for run in runs]
        )
        for when in ("before", "after")
        for column in COLUMNS
    }
    rows = []
    for run in runs:
        before, after = (run.metrics[split][when] for when in ("before", "after"))
        for when, figures in (("before", before), ("after", after)):
            cells = []
            for column in COLUMNS:
                below = [f"±\u00a0{number(run.spread(split, when, column))}"] if run.seeds else []
                below += (
                    [number(after[column] - before[column], "+,.1f")] if when == "after" else []
                )
                strong = len(runs) > 1 and round(figures[column], 1) == best[when, column]
                cells.append({"text": number(figures[column]), "below": below, "strong": strong})
            name = (
                [{"text": run.title, "below": [run.subtitle], "rows": 2}]
                if when == "before"
                else []
            )
            rows.append(([*name, "cosine" if when == "before" else "re-ranked"], cells))
    held_out = "The test split was not used for selection: the epoch is the best on dev."
    if split == "dev":
        held_out = "The epoch is the best on dev, so these figures are slightly optimistic."
    marked = (
        " Bold on a tint: the best of its column, among the cosine rows and among the re-ranked "
        "rows."
    )
    groups = [
        ("image → text", 3),
        ("text → image", 3),
        ("", 1),
        ("median rank", 2),
        ("skewness", 2),
    ]
    columns = ["R@1", "R@5", "R@10"] * 2 + ["RSUM", *["i → t", "t → i"] * 2]
    return [
        f"Percentage of queries of the {split} split with a right answer among the first 1, 5 or "
        "10, for pictures as queries for captions and for captions as queries for pictures. "
        f"{held_out}",
        {"table": rows, "columns": (["", ""], columns), "groups": groups},
        {
            "note": f"{'±: standard deviation over seeds. ' * any(run.seeds for run in runs)}Small "
            f"figures with a sign: the change by re-ranking.{marked * (len(runs) > 1)} Median "
            "rank: that of the first right answer; lower is better. Skewness: that of how often "
            "each candidate is among a query's first 10; 0 means that no candidate is a hub."
        },
    ]


# --- figures --------------------------------------------------------------------------------------


def _curves(runs: Sequence[Run]) -> list[Block]:
    series = []
    for run in runs:
        seeds = [[line["rsum"] for line in seed.history] for seed in run.seeds]
        epochs, rsums = ([line[key] for line in run.history] for key in ("epoch", "rsum"))
        series.append(Series(run.title, epochs, rsums, seeds))
    chart = lines(
        series, "RSUM on the dev split after each epoch", "epoch", "RSUM on dev, at most 600"
    )
    thin = " Thin lines are single seeds, thick ones their means." * any(run.seeds for run in runs)
    phases = (
        " In its warm-up the triplet loss sums over all negatives; the shorter of its two phases "
        "is not shown."
    )
    return [
        {
            "figures": [
                (
                    chart,
                    f"RSUM on the dev split after each epoch, by cosine, without re-ranking.{thin}",
                )
            ]
        },
        {
            "title": "Training loss",
            "blocks": [
                {"figures": [_loss_chart(run, i) for i, run in enumerate(runs)], "width": 16},
                {
                    "note": "Mean over each epoch. Losses have different scales: compare the "
                    f"shapes, not the heights.{phases * any(map(_warmup, runs))}"
                },
            ],
        },
    ]


def _loss_chart(run: Run, style: int) -> tuple[str, str]:
    """Chart of a run's loss. A triplet loss shows its longer phase only, as the warm-up's values
    are far larger.
    """
    warmup = _warmup(run)
    phase = max(run.history[warmup:], run.history[:warmup], key=len)
    series = Series(run.title, [line["epoch"] for line in phase], [line["loss"] for line in phase])
    label = f"Training loss of run {style + 1}, {run.title}, by epoch"
    note = (", warm-up" if phase[0] is run.history[0] else ", hardest negatives") if warmup else ""
    return lines([series], label, "epoch", "training loss", (300, 200), style), f"{run.title}{note}"


def _hubness(run: Run, results: Sequence[RetrievalResults], split: str) -> list[Block]:
    before, after = results
    names = ("cosine", "re-ranked")
    charts = [
        hubness(before.i2t, after.i2t, names, "picture", "caption"),
        hubness(before.t2i, after.t2i, names, "caption", "picture"),
    ]
    return [
        "A hub is a candidate that is retrieved for many queries, right or wrong. If answers "
        "were distributed evenly, every candidate would be in the mean number of lists. The "
        f"charts show {run.title}, with the highest RSUM after re-ranking on {split}, for scores "
        "of the dev split, with counts on a logarithmic axis.",
        {"figures": charts},
    ]


# --- gallery and closing --------------------------------------------------------------------------


def _gallery(run: Run, results: Sequence[RetrievalResults], gallery: Gallery) -> list[Block]:
    i2t, t2i = ([getattr(x, way) for x in results] for way in ("i2t", "t2i"))
    return [
        f"Dev queries answered by {run.title}, drawn at random, not selected by hand (NumPy seed "
        f"{SEED}), from groups by the rank of the first right answer: two queries with a right "
        f"answer at rank 1, one nearly right, one with none in its first {MISSED}, one that "
        "re-ranking corrected and one that it made wrong. A group without queries is omitted. "
        "Right answers have a green edge and a check mark\u00a0✓.",
        {
            "title": "Pictures asking for captions",
            "blocks": [{"cards": gallery.cards("i2t", *i2t)}],
        },
        {
            "title": "Captions asking for pictures",
            "blocks": [{"cards": gallery.cards("t2i", *t2i)}],
        },
    ]


def _closing(runs: Sequence[Run], split: Split) -> list[Block]:
    seeds = {run.config["seed"] for run in runs}
    trained = "The runs have different seeds"
    if any(run.seeds for run in runs):
        numbers = dict.fromkeys(_count(max(1, len(run.seeds)), "seed") for run in runs)
        trained = f"Figures are means over {listed(list(numbers))}"
    elif len(seeds) == 1:
        trained = "Each loss was trained once, with one seed"
    synthetic = all(run.config["data"] == "scenes" for run in runs)
    drawn = "The pictures are drawn by a program; losses may compare differently on photographs. "
    n = len(split.features)
    return [
        "RSUM is the sum of the six recalls, at most 600. R@K counts a query as answered if any "
        "of its right answers is among the first K; a picture has "
        f"{_count(split.captions_per_image, 'right caption')}, a caption one right picture. A "
        "caption is right only for the picture that it was written for, so an answer marked "
        "wrong may still be true.",
        f"{trained}. With {n:,} pictures an image → text recall has a standard error of up to "
        f"{50 / n**0.5:.1f} points, and also varies with the seed, so that small differences "
        f"between losses are not significant. {drawn * synthetic}Fast Re-ranking uses all queries "
        "of a split together, and no labels; a single query cannot be re-ranked.",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="report", description="Write one HTML page about finished runs."
    )
    parser.add_argument("--data", type=Path, required=True, help="the data set, in the SCAN layout")
    parser.add_argument("--out", type=Path, required=True, help="the page, such as report.html")
    parser.add_argument(
        "runs", type=Path, nargs="+", help="run directories; the last part of a path names the run"
    )
    args = parser.parse_args(arguments)
    run_dirs = {directory.resolve().name: directory for directory in args.runs}
    if len(run_dirs) < len(args.runs):
        parser.error("runs: two of the directories have the same last name")
    try:
        write_report(run_dirs, args.data, args.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(args.out)


if __name__ == "__main__":
    main()
