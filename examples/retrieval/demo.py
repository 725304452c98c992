"""`make demo`: four losses on the embedded data set, before and after re-ranking, in one HTML page.

    python -m examples.retrieval.demo --out demo [--quick]

Leaves OUT/data, OUT/runs/{triplet,infonce,hal,dcl} and OUT/report.html. A finished run is used again as long as its
settings and the data are the same, and a run that was cut off goes on after its last epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from .config import Config, load_config
from .report import RECALLS, TITLES, Run, load_run, reported_split, write_report
from .scenes import write_scenes
from .train import train

LOSSES = ("triplet", "infonce", "hal", "dcl")
CONFIG = Path(__file__).with_name("configs") / "scenes.toml"
QUICK = [
    *("epochs=2", "decay_epoch=0", "dim=32", "word_dim=16"),
    *("scenes_sizes.train=100", "scenes_sizes.dev=30", "scenes_sizes.test=30"),
]


def demo_config(loss: str, out: Path, quick: bool = False) -> Config:
    """The settings of one of the demo's runs."""
    overrides = [
        f"loss={loss}",
        f"out={out / 'runs' / loss}",
        f"data_root={out / 'data'}",
        "final_test=true",
        "tensorboard=false",
    ]
    return load_config(CONFIG, overrides + QUICK * quick)


def train_or_reuse(config: Config) -> bool:
    """Make sure that the run of `config` is finished; returns whether there was anything left to train."""
    out = Path(config.out)
    described = out / "config.json"
    found = json.loads(described.read_text()) if described.is_file() else {}
    same = {**found, "resume": False} == asdict(config)
    if same and (out / "metrics.json").is_file():
        return False
    if not same:
        for stale in ("metrics.json", "last.pt"):
            (out / stale).unlink(missing_ok=True)
    train(replace(config, resume=True))
    return True


def result_table(runs: list[Run]) -> str:
    """The recalls and RSUM of the runs for a terminal, two lines a run."""
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


def run_demo(out: Path, quick: bool = False) -> Path:
    """Generate, train, measure and report; returns the page."""
    start = time.perf_counter()
    configs = [demo_config(loss, out, quick) for loss in LOSSES]
    data = out / "data"
    print(f"data: {sum(configs[0].scenes_sizes.values()):,} scenes in {data}", flush=True)
    if write_scenes(data, configs[0].scenes_sizes, seed=0):
        for config in configs:  # trained on other data
            Path(config.out, "config.json").unlink(missing_ok=True)
    run_dirs = {}
    for config in tqdm(configs, desc="losses", unit="loss", leave=False, disable=None):
        run_start = time.perf_counter()
        trained = train_or_reuse(config)
        run_dirs[config.loss] = Path(config.out)
        took = f"{config.epochs} epochs in {time.perf_counter() - run_start:.1f} s" if trained else "already trained"
        tqdm.write(f"{TITLES[config.loss][0]}: {took}")
    page = out / "report.html"
    write_report(run_dirs, data, page)
    print(f"\n{result_table([load_run(name, directory) for name, directory in run_dirs.items()])}\n")
    print(f"{page} is the report; all of it took {time.perf_counter() - start:.1f} s")
    return page


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="demo", description="Train four losses on rendered scenes and report.")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for everything (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few scenes and two epochs: a check, not a result")
    given = parser.parse_args(arguments)
    run_demo(given.out, given.quick)


if __name__ == "__main__":
    main()
