"""Times of a loss over several processes of one thread each, on the CPU: ``python -m
benchmarks.processes``.
"""

from __future__ import annotations

import argparse
import statistics
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

FORMS = (
    "one process",
    "its scores not kept",
    "own rows alone",
    "gathered",
    "plain PyTorch, local loss",
)


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
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=args.processes)
    torch.manual_seed(0)
    inputs = torch.randn(args.pairs, args.dim), torch.randn(args.pairs, args.dim)
    times: dict[str, dict[str, list[float]]] = {}
    for name in args.losses:
        forms, times[name] = calls(name, *inputs, rank, args.processes), {}
        for step in range(args.repeats + 1):
            for form, call in forms.items():
                dist.barrier()
                start = time.perf_counter()
                if form not in FORMS[:2] or rank == 0:  # one process computes, the others wait
                    call().backward()
                dist.barrier()
                if step:
                    times[name].setdefault(form, []).append(time.perf_counter() - start)
    if rank == 0:
        torch.save(times, Path(folder, "times.pt"))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Measure and print medians, in seconds and relative to one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--pairs", type=int, default=8192, help="of all processes, a multiple of their number"
    )
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--losses", nargs="+", default=["InfoNCELoss", "SigmoidLoss", "DiversityContrastiveLoss"]
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, (folder, args), args.processes)
        times = torch.load(Path(folder, "times.pt"))
    for name, forms in times.items():
        print(f"{name}, {args.pairs} pairs of {args.dim} dimensions, {args.processes} processes")
        for form, seconds in forms.items():
            ratio = statistics.median(
                a / b for a, b in zip(seconds, forms["one process"], strict=True)
            )
            print(f"  {form:26} {statistics.median(seconds):7.3f} s  {ratio:5.2f}")


if __name__ == "__main__":
    main()
