"""Exchange between the processes of ``torch.distributed``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all processes in the order of their ranks, (world * B, ...); without a gradient.

    B must be the same on every process. Without a process group, or alone in it, ``x`` itself.
    """
    if world_size() == 1:
        return x
    gathered = x.new_empty(world_size() * x.shape[0], *x.shape[1:])
    with torch.no_grad():
        dist.all_gather_into_tensor(gathered, x.detach().contiguous())
    return gathered
