"""Processes of ``torch.distributed`` that run a function and return its results."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from itrloss.torch_versions import VERSION

from .versions import load

WORLD = 2
# Processes are copies of one that has imported the slow modules: PyTorch's compiler is imported by
# DDP.
SLOW = ["itrloss", "pytest"]
if VERSION >= (2, 8):
    SLOW += ["torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp"]
# Those are slow, too, and only few tests need them: tests that are collected together with these.
SLOW_HERE = ["transformers.trainer", "sentence_transformers", "torchmetrics", "lightning"]


def preload() -> None:
    """Choose what processes have imported, which the first one to be started decides."""
    multiprocessing.set_forkserver_preload(
        [*SLOW, *(name for name in SLOW_HERE if name in sys.modules)]
    )


def run(work: Callable[..., Any], folder: Path, *args, world: int = WORLD) -> list[Any]:
    """Run ``work(rank, *args)``, a top-level function of a module, in each process and return the
    results.
    """
    preload()
    mp.start_processes(
        _process, (work, str(folder), args, world, 120, True), world, start_method="forkserver"
    )
    return [load(folder / f"{rank}.pt") for rank in range(world)]


def start(work: Callable[..., Any], args: tuple, world: int) -> None:
    """``torch.multiprocessing.spawn`` without imports of the slow modules in each process."""
    preload()
    mp.start_processes(work, args, world, start_method="forkserver")


def forkserver() -> Any:
    """Return what starts processes without imports of the slow modules in each."""
    preload()
    return mp.get_context("forkserver")


def set_environment(rank: int) -> None:
    """Set what ``torchrun`` would: accelerate looks for it, although the process group is there."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def survivors(
    work: Callable[..., Any], folder: Path, cases: Sequence[tuple], *, world: int, timeout: float
) -> list[list[Any]]:
    """Run ``work(rank, *case)`` in a group of processes for each case, all at once; return the
    results of each case.

    The result of a process that was lost is None. ``timeout``: seconds that a collective waits for
    a process.
    """
    preload()
    folders = [folder / str(number) for number in range(len(cases))]
    groups: list[Any] = []
    for place, case in zip(folders, cases, strict=True):
        place.mkdir()
        args = work, str(place), case, world, timeout, False
        groups.append(
            mp.start_processes(_process, args, world, join=False, start_method="forkserver")
        )
    deadline = time.monotonic() + 4 * timeout
    for process in (process for group in groups for process in group.processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
    found = [[place / f"{rank}.pt" for rank in range(world)] for place in folders]
    return [[load(path) if path.exists() else None for path in paths] for paths in found]


def _process(
    rank: int,
    work: Callable[..., Any],
    folder: str,
    args: tuple,
    world: int,
    timeout: float,
    all: bool,
):
    # or the collector would visit all modules, and copy the memory that processes share
    gc.freeze()
    gc.set_threshold(100_000)
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", where, timedelta(seconds=timeout), rank=rank, world_size=world)
    torch.save(work(rank, *args), Path(folder, f"{rank}.pt"))
    if all:
        # a process that exits before the other has connected would make that one fail
        dist.barrier()
        _kept = dist.group.WORLD  # in PyTorch 2.4 its destructor may wait for ever
        dist.destroy_process_group()
    # Exit without Python's shutdown: DDP keeps the group's threads alive, and dropping a last
    # tensor in them during shutdown aborts the process (pytorch/pytorch#179291), which is rare and
    # happens on busy machines.
    os._exit(0)
