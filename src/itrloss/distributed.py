"""Exchange between the processes of ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .engines.tiles import first_order


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all processes in the order of their ranks, (world * B, ...); without a gradient.

    B must be the same on every process. Without a process group, or alone in it, ``x`` itself.
    """
    if world_size() == 1:
        return x
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def gather_parts(x: Tensor) -> Tensor:
    """:func:`gather_rows` of parts that need not have the same number of rows."""
    if world_size() == 1:
        return x
    own = torch.tensor([x.shape[0]], device=x.device)
    sizes = gather_rows(own).tolist()
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: x.shape[0]] = x.detach()
    parts = gather_rows(padded).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all processes in the order of their ranks, (world * B, ...), with its gradient.

    Each process may then compute the loss of the whole batch. Its gradient comes back summed over the processes, which
    ``DistributedDataParallel`` divides by their number: what it leaves is the gradient of one process with the whole
    batch. Without it, average the gradients of the parameters yourself.

    B must be the same on every process. Without a process group, or alone in it, ``x`` itself.
    """
    return x if world_size() == 1 else _Gather.apply(x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[0]
        return gather_rows(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.narrow(0, dist.get_rank() * ctx.size, ctx.size)


def gather_ids(ids: Tensor | None, images: int) -> Tensor | None:
    """Ids of all processes. ``images``: 0, or how many there are a process where ids number its own."""
    if ids is None or world_size() == 1:
        return ids
    return gather_rows(ids + dist.get_rank() * images)
