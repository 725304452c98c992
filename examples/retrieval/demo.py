"""`make demo`: USER and four single losses on the generated data set, before and after re-ranking,
in one HTML page.

    python -m examples.retrieval.demo --out demo [--quick]

It writes OUT/data, OUT/runs/{uto,triplet,infonce,hal,dcl} and OUT/report.html.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .config import Config, load_config
from .report import write_report
from .runs import experiments, load_run
from .scenes import write_scenes
from .summary import table
from .train import train

# USER takes longest, and therefore begins. Its settings are those of user_scenes.toml.
# Published settings are for thirty times the pictures and five times the epochs. These had the best
# dev RSUM among a few tried for each loss, with 1,600 scenes. The defaults of all losses attract
# positives too weakly for only six epochs.
LOSSES = {
    "uto": [
        "enhancement=sge",
        "momentum=0.99",
        "loss_options.scale=20.0",
        "loss_options.margin=0.3",
        "loss_options.batch_weight=20.0",
    ],
    "triplet": ["warmup_epochs=5"],
    "infonce": ["loss_options.temperature=0.1"],
    "hal": ["loss_options.scale=10.0", "loss_options.margin=0.3"],
    "dcl": ["loss_options.positive_weight=1.0"],
}
CLEAR = "\x1b[J"  # what is left of bars below the cursor
CONFIG = Path(__file__).with_name("configs") / "scenes.toml"
QUICK = [
    "epochs=2",
    "decay_epochs=[]",
    "dim=32",
    "word_dim=16",
    "scenes_sizes.train=100",
    "scenes_sizes.dev=30",
    "scenes_sizes.test=30",
]


def demo_config(loss: str, out: Path, quick: bool = False) -> Config:
    """Settings of one of the demo's runs."""
    overrides = [
        f"loss={loss}",
        *LOSSES[loss],
        f"out={out / 'runs' / loss}",
        f"data_root={out / 'data'}",
        "final_test=true",
        "scenes_sizes.train=800",  # for two minutes and a half on two slow cores
        "tensorboard=false",
        # Matrices this small gain little from a second thread, and are much slower if the cores
        # have other work. One thread per run also makes the figures independent of the number of
        # cores.
        "threads=1",
    ]
    if quick:
        overrides += QUICK
    return load_config(CONFIG, overrides)


def train_all(configs: Sequence[Config]) -> None:
    """Train these runs, as many at a time as there are cores, with a bar each on a terminal."""
    start = time.perf_counter()
    # a process that has used torch may hang when forked
    context = multiprocessing.get_context("spawn")
    workers = min(len(configs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, context, tqdm.set_lock, (context.RLock(),)) as pool:
        running = {pool.submit(train_in, workers, config): config.loss for config in configs}
        for run in as_completed(running):
            rsum = run.result()["best_rsum"]
            seconds = time.perf_counter() - start
            if not sys.stderr.isatty():
                print(f"{running[run]}: RSUM {rsum:.1f} on dev, finished after {seconds:.1f} s")
    if sys.stderr.isatty():
        print(CLEAR, end="", file=sys.stderr)


def train_in(workers: int, config: Config) -> dict[str, Any]:
    """Train in one of these processes, in whose line of the terminal the bar is."""
    number = int(multiprocessing.current_process().name.rpartition("-")[2])
    return train(config, line=number % workers)


def run_demo(out: Path, quick: bool = False) -> None:
    """Generate the data, train, measure, and write the report."""
    start = time.perf_counter()
    configs = [demo_config(loss, out, quick) for loss in LOSSES]
    sizes = configs[0].scenes_sizes
    print(f"data: {sum(sizes.values()):,} scenes in {out / 'data'}", flush=True)
    write_scenes(out / "data", sizes, seed=0)
    train_all(configs)
    runs = [Path(config.out) for config in configs]
    page = out / "report.html"
    write_report(runs, out / "data", page)
    print()
    print(table(experiments(map(load_run, runs)), "test"))
    print(f"\n{page} is the report; all of it took {time.perf_counter() - start:.1f} s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="demo", description="Train USER and four losses on rendered scenes and report."
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
