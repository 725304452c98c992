"""Two processes of ``torch.distributed`` that run a function and return its results."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def both(work: Callable[..., Any], folder: Path, *args) -> list[Any]:
    """Run ``work(rank, *args)``, a top-level function of a module, in each process and return the results."""
    mp.spawn(_process, (work, str(folder), args), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def _process(rank: int, work: Callable[..., Any], folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", where, timedelta(seconds=120), rank=rank, world_size=WORLD)
    torch.save(work(rank, *args), Path(folder, f"{rank}.pt"))
    dist.barrier()  # a process that exits before the other has connected would make that one fail
    dist.destroy_process_group()
    # Exit without Python's shutdown: DDP keeps the group's threads alive, and dropping a last tensor in them during
    # shutdown aborts the process (pytorch/pytorch#179291), which is rare and happens on busy machines.
    os._exit(0)
