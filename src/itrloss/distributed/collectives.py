"""The collectives of ``torch.distributed`` that a shared batch needs, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_versions import all_gather_single, reduce_scatter_single

#: The processes that take part; None stands for all.
ProcessGroup: TypeAlias = "dist.ProcessGroup | None"
Collective: TypeAlias = "Callable[[Tensor, ProcessGroup], Tensor]"


def world_size(group: ProcessGroup = None) -> int:
    """Return the number of processes in the group, by default of all; 1 without a job."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError("process_group: expected one that this process belongs to")
    return size


# ------------------------------------------------------------------ without a gradient of their own


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the (W B, ...) concatenation of ``x`` (B, ...) by rank."""
    whole = x.new_empty(len(x) * world_size(group), *x.shape[1:])
    all_gather_single(whole, x.contiguous(), group=group)
    return whole


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this process's part (B, ...) of the sum of ``x`` (W B, ...), rounded once."""
    whole = x.contiguous()
    if x.is_floating_point() and x.element_size() < 4:
        whole = x.float().contiguous()  # sums of half types would be rounded with each addend
    part = whole.new_empty(len(x) // world_size(group), *x.shape[1:])
    reduce_scatter_single(part, whole, group=group)
    return part.to(x.dtype)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of ``x`` over all processes."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def largest(x: Tensor, group: ProcessGroup = None) -> Tensor:
    """Return the elementwise maximum of ``x`` over all processes, without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def merge_largest(x: Tensor, group: ProcessGroup = None) -> Tensor:
    """Return this process's part (B, ...) of the maximum of ``x`` (W B, ...), without a
    gradient.
    """
    return largest(x, group).chunk(world_size(group))[dist.get_rank(group)]


# --------------------------------------------------------------------------------- with a gradient


class Exchanged(torch.autograd.Function):
    """The result of a linear collective; the gradient is that of its transpose, for the gradients.

    :func:`all_gather` and :func:`reduce_scatter` are each other's transpose, :func:`all_reduce` is
    its own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, collective: Collective, transpose: Collective
    ) -> Tensor:
        """Return ``collective(x, group)``."""
        ctx.group = group
        ctx.collective = collective
        ctx.transpose = transpose
        return collective(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the transpose for the gradient."""
        gradient = Exchanged.apply(grads[0], ctx.group, ctx.transpose, ctx.collective)
        return gradient, None, None, None  # type: ignore[return-value]


class Replicated(torch.autograd.Function):
    """A tensor that all processes have; its gradient is the mean of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """Return a view of ``x``."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the mean of the gradients over all processes, of the shape of ``x``."""
        return total(grads[0], ctx.group) / world_size(ctx.group), None


def gather(x: Tensor, group: ProcessGroup = None) -> Tensor:
    """Return the (W B, ...) concatenation by rank of ``x`` (B, ...), of one shape everywhere."""
    return Exchanged.apply(x, group, all_gather, reduce_scatter)  # type: ignore[return-value]


def merge(x: Tensor, group: ProcessGroup = None) -> Tensor:
    """Return this process's part (B, ...) of the sum of ``x`` (W B, ...) over all processes."""
    return Exchanged.apply(x, group, reduce_scatter, all_gather)  # type: ignore[return-value]


def total(x: Tensor, group: ProcessGroup = None) -> Tensor:
    """Return the sum of ``x`` over all processes."""
    return Exchanged.apply(x, group, all_reduce, all_reduce)  # type: ignore[return-value]


def replicated(x: Tensor, group: ProcessGroup = None) -> Tensor:
    """Return ``x``, which is the same on all processes, with the mean of their gradients."""
    return Replicated.apply(x, group)  # type: ignore[return-value]
