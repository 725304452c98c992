"""Times of a loss over several processes of one thread each, on the CPU:
``python -m benchmarks.processes --out benchmarks/results/cpu_processes.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import itrloss

from . import report, runner

WORLD = 2
# What is timed, and how the table calls it.
FORMS = {
    "one process": "one process, which keeps its scores",
    "its scores not kept": "one process, scores not kept",
    "own rows alone": "two processes, half of the work each, no exchange",
    "gathered": "``gather=True``",
    "plain PyTorch, local loss": (
        "plain PyTorch: gathered with gradients, each process its images and its texts"
    ),
}
IN_ONE_PROCESS = ("one process", "its scores not kept")
LOSSES = {"InfoNCELoss": "InfoNCE", "SigmoidLoss": "SigLIP", "DiversityContrastiveLoss": "DCL"}


def plain(images: Tensor, texts: Tensor) -> Tensor:
    """Return InfoNCE of this process's images with all texts and of its texts with all images."""
    v, w = F.normalize(images, dim=1), F.normalize(texts, dim=1)
    all_v, all_w = (torch.cat(torch.distributed.nn.all_gather(x)) for x in (v, w))  # type: ignore[attr-defined]
    target = torch.arange(len(v)) + dist.get_rank() * len(v)
    return F.cross_entropy(v @ all_w.T / 0.07, target) + F.cross_entropy(w @ all_v.T / 0.07, target)


def calls(
    name: str, images: Tensor, texts: Tensor, rank: int, world: int
) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by form; "own rows alone" is a process's part of the work without an
    exchange.
    """
    kind, n = getattr(itrloss, name), len(images) // world
    own = slice(rank * n, (rank + 1) * n)
    leaves = [images, texts, images[own], texts[own]]
    v, w, own_v, own_w = (x.clone().requires_grad_() for x in leaves)
    ids = torch.arange(len(images))
    forms = {
        "one process": lambda: kind()(v, w),
        "its scores not kept": lambda: kind(engine="tiled")(v, w),
        "own rows alone": lambda: kind()(own_v, w, ids[own], ids),
        "gathered": lambda: kind(gather=True)(own_v, own_w),
    }
    return (
        {**forms, "plain PyTorch, local loss": lambda: plain(own_v, own_w)}
        if name == "InfoNCELoss"
        else forms
    )


def worker(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Time all forms in turn, and save the seconds of each."""
    torch.set_num_threads(1)
    # PyTorch 2.13 deprecates the differentiable all_gather
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    inputs = torch.randn(args.pairs, args.dim), torch.randn(args.pairs, args.dim)
    times: dict[str, dict[str, list[float]]] = {}
    for name in args.losses:
        forms, times[name] = calls(name, *inputs, rank, WORLD), {}
        for step in range(args.repeats + 1):
            for form, call in forms.items():
                dist.barrier()
                start = time.perf_counter()
                if form not in IN_ONE_PROCESS or rank == 0:  # one process computes, the others wait
                    call().backward()
                dist.barrier()
                if step:
                    times[name].setdefault(form, []).append(time.perf_counter() - start)
    if rank == 0:
        torch.save(times, Path(folder, "times.pt"))
    dist.destroy_process_group()


def rows_of(times: dict[str, dict[str, list[float]]], shape: list[int]) -> list[dict[str, Any]]:
    """Return a row for each loss and form: the median of the seconds, and of their ratios to one
    process.
    """
    rows = []
    for form, how in FORMS.items():
        for name, forms in times.items():
            if form not in forms:
                continue
            ratios = [a / b for a, b in zip(forms[form], forms["one process"], strict=True)]
            rows.append(
                {
                    "how": how,
                    "loss": LOSSES[name],
                    "shape": shape,
                    "seconds": round(statistics.median(forms[form]), 3),
                    "to one process": round(statistics.median(ratios), 3),
                }
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write medians; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8192, help="of both processes, an even number")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--losses", nargs="+", default=[*LOSSES], choices=LOSSES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.out:
        report.check_path(args.out)
    torch.set_num_threads(1)  # as in each process
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, (folder, args), WORLD)
        times = torch.load(Path(folder, "times.pt"))
    rows = rows_of(times, [args.pairs, args.pairs, args.dim])
    for row in rows:
        print(row)
    if args.out:
        report.save(args.out, runner.machine("cpu"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
