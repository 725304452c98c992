"""`make demo`: four losses on the generated data set, before and after re-ranking, in one HTML
page.

    python -m examples.retrieval.demo --out demo [--quick]

It writes OUT/data, OUT/runs/{triplet,infonce,hal,dcl} and OUT/report.html. A finished run is reused
as long as its settings and the data are the same, and an interrupted run is resumed after its last
epoch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from .config import Config, load_config
from .evaluate import RECALLS
from .report import TITLES, Run, load_run, reported_split, write_report
from .scenes import write_scenes
from .train import train

# Published settings are for ten times the pictures and five times the epochs. These had the best
# dev RSUM among a few tried for each loss. The defaults of all losses attract positives too weakly
# for only six epochs.
LOSSES = {
    "triplet": ["warmup_epochs=5"],
    "infonce": ["loss_options.temperature=0.1"],
    "hal": ["loss_options.scale=10.0", "loss_options.margin=0.3"],
    "dcl": ["loss_options.positive_weight=1.0"],
}
CONFIG = Path(__file__).with_name("configs") / "scenes.toml"
QUICK = [
    *("epochs=2", "decay_epochs=[]", "dim=32", "word_dim=16"),
    *("scenes_sizes.train=100", "scenes_sizes.dev=30", "scenes_sizes.test=30"),
]


def demo_config(loss: str, out: Path, quick: bool = False) -> Config:
    """Settings of one of the demo's runs."""
    overrides = [
        f"loss={loss}",
        f"out={out / 'runs' / loss}",
        f"data_root={out / 'data'}",
        "final_test=true",
        "tensorboard=false",
        "progress=false",
        # Matrices this small gain little from a second thread, and are much slower if the cores
        # have other work. One thread per run also makes the figures independent of the number of
        # cores.
        "threads=1",
    ]
    return load_config(CONFIG, overrides + LOSSES[loss] + QUICK * quick)


def clear_other_run(config: Config) -> None:
    """Remove the files of a run with other settings from this run's directory."""
    out = Path(config.out)
    described = out / "config.json"
    earlier = json.loads(described.read_text()) if described.is_file() else {}
    if {**earlier, "resume": False} != asdict(config):
        for stale in ("metrics.json", "log.jsonl", "last.pt"):
            (out / stale).unlink(missing_ok=True)


def is_finished(config: Config) -> bool:
    """Whether the run has metrics, which are written last."""
    return Path(config.out, "metrics.json").is_file()


def train_all(configs: Sequence[Config]) -> None:
    """Train these runs, as many at a time as there are cores, with a progress bar."""
    start = time.perf_counter()
    # a process that has used torch may hang when forked
    context = multiprocessing.get_context("spawn")
    workers = min(len(configs), os.cpu_count() or 1)
    bar = tqdm(
        total=sum(config.epochs for config in configs),
        desc="training",
        unit="epoch",
        leave=False,
        disable=None,
    )
    with ProcessPoolExecutor(workers, context) as pool, bar:
        running = {pool.submit(train, replace(config, resume=True)): config for config in configs}
        while running:
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                config = running.pop(future)
                rsum = future.result()["best_rsum"]
                seconds = time.perf_counter() - start
                tqdm.write(
                    f"{TITLES[config.loss][0]}: RSUM {rsum:.1f} on dev, finished after "
                    f"{seconds:.1f} s"
                )
            bar.n = sum(epochs_done(config) for config in configs)
            bar.refresh()


def epochs_done(config: Config) -> int:
    log = Path(config.out, "log.jsonl")
    return len(log.read_text().splitlines()) if log.is_file() else 0


def result_table(runs: Sequence[Run]) -> str:
    """Table of the runs' recalls and RSUM for a terminal, two lines per run."""
    split = reported_split(runs)
    head = [f"{way} R@{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]
    lines = [f"{split + ' split':21}" + "".join(f"{name:>10}" for name in head) + f"{'RSUM':>9}"]
    for run in runs:
        before, after = run.metrics[split]["before"], run.metrics[split]["after"]
        for title, ranking, figures in ((run.title, "cosine", before), ("", "re-ranked", after)):
            recalls = "".join(f"{figures[name]:10.1f}" for name in RECALLS)
            lines.append(f"{title:10}{ranking:11}{recalls}{figures['rsum']:9.1f}")
        lines[-1] += f"  ({after['rsum'] - before['rsum']:+.1f})"
    return "\n".join(lines)


def run_demo(out: Path, quick: bool = False) -> None:
    """Generate the data, train, measure, and write the report."""
    start = time.perf_counter()
    configs = [demo_config(loss, out, quick) for loss in LOSSES]
    data, page = out / "data", out / "report.html"
    print(f"data: {sum(configs[0].scenes_sizes.values()):,} scenes in {data}", flush=True)
    if write_scenes(data, configs[0].scenes_sizes, seed=0):
        for config in configs:  # existing runs were trained on other data
            Path(config.out, "config.json").unlink(missing_ok=True)
    for config in configs:
        clear_other_run(config)
    unfinished = [config for config in configs if not is_finished(config)]
    for config in configs:
        if config not in unfinished:
            print(f"{TITLES[config.loss][0]}: trained already")
    if unfinished:
        train_all(unfinished)
    run_dirs = {config.loss: Path(config.out) for config in configs}
    write_report(run_dirs, data, page)
    print(
        f"\n{result_table([load_run(name, directory) for name, directory in run_dirs.items()])}\n"
    )
    print(f"{page} is the report; all of it took {time.perf_counter() - start:.1f} s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="demo", description="Train four losses on rendered scenes and report."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for everything (%(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few scenes and two epochs, as a test"
    )
    args = parser.parse_args(arguments)
    run_demo(args.out, args.quick)


if __name__ == "__main__":
    main()
