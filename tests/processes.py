"""Two processes of ``torch.distributed`` that work and hand back what they found."""

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
    """What ``work(rank, *args)`` returns in each process, which must be at home in the top level of a module."""
    mp.spawn(_process, (work, str(folder), args), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def _process(rank: int, work: Callable[..., Any], folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", where, timedelta(seconds=120), rank=rank, world_size=WORLD)
    torch.save(work(rank, *args), Path(folder, f"{rank}.pt"))
    dist.barrier()  # one that is gone before the other has connected makes it fail
    dist.destroy_process_group()
    # Without taking Python down: DDP keeps the group's threads alive, and one that drops its last tensor while
    # the interpreter goes down aborts the process (pytorch/pytorch#179291), seldom and on a busy machine.
    os._exit(0)
