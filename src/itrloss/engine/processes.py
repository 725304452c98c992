"""The collectives of ``torch.distributed`` that a sharded batch needs, with their gradients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)
_PATIENCE = 2.0  # seconds to find out which process is lost


def world_size(group: Any = None) -> int:
    """Return the number of processes in the group, by default of all; 1 without
    ``torch.distributed``.
    """
    size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if size < 1:
        raise ValueError("process_group: expected one that this process belongs to")
    return size


def communicate(collective: Any, *args: Any, group: Any, **options: Any) -> Any:
    """Run a collective; if it fails, the error says which processes do not answer."""
    if torch.compiler.is_compiling():
        return collective(*args, group=group, **options)
    try:
        return collective(*args, group=group, **options)
    except RuntimeError as error:
        raise RuntimeError(f"gather: {_lost(group)}") from error


def _lost(group: Any) -> str:
    """Return who does not answer: processes in which a collective failed say so in the store, which
    still works.

    A process that still waits in the collective does not answer either, until those that failed are
    gone.
    """
    me, deadline = dist.get_rank(), time.monotonic() + _PATIENCE
    silent = [rank for rank in dist.get_process_group_ranks(group) if rank != me]
    with contextlib.suppress(RuntimeError):  # the process that holds the store may end, too
        store = dist.distributed_c10d._get_default_store()
        store.set(f"itrloss failed {me}", "")
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = [rank for rank in silent if not store.check([f"itrloss failed {rank}"])]
    if not silent:
        return "a collective failed in all processes"
    return f"no answer from process {', '.join(map(str, silent))}"


class _Collective(torch.autograd.Function):
    """A collective of ``_COLLECTIVES``, whose gradient is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, group: Any) -> Tensor:
        ctx.name, ctx.group = name, group
        return _COLLECTIVES[name][0](x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Collective.apply(grads[0], _COLLECTIVES[ctx.name][1], ctx.group), None, None


def _gather(x: Tensor, group: Any) -> Tensor:
    whole = x.new_empty(len(x) * world_size(group), *x.shape[1:])
    communicate(_all_gather, whole, x.contiguous(), group=group)
    return whole


def _merge(x: Tensor, group: Any) -> Tensor:
    # sums of half types would be rounded with each addend
    half = x.is_floating_point() and x.itemsize < 4
    whole = (x.float() if half else x).contiguous()
    part = whole.new_empty(len(x) // world_size(group), *x.shape[1:])
    communicate(_reduce_scatter, part, whole, group=group)
    return part.to(x.dtype)


def _total(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    communicate(dist.all_reduce, total, group=group)
    return total


def _mean(x: Tensor, group: Any) -> Tensor:
    return _total(x, group) / world_size(group)


def _same(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


_COLLECTIVES: dict[str, tuple[Any, str]] = {  # each with that of its gradient
    "gather": (_gather, "merge"),
    "merge": (_merge, "gather"),
    "total": (_total, "total"),
    "mean": (_mean, "mean"),
    "same": (_same, "mean"),
}


def gather(x: Tensor, group: Any = None) -> Tensor:
    """Return the (W B, ...) concatenation by rank of ``x`` (B, ...), of one shape on all processes;
    differentiable.
    """
    return _Collective.apply(x, "gather", group)


def merge(x: Tensor, group: Any = None) -> Tensor:
    """Return this process's part (B, ...) of the sum of ``x`` (W B, ...) over all processes;
    differentiable.
    """
    return _Collective.apply(x, "merge", group)


def total(x: Tensor, group: Any = None) -> Tensor:
    """Return the sum of ``x`` over all processes; differentiable."""
    return _Collective.apply(x, "total", group)


def replicated(x: Tensor, group: Any = None) -> Tensor:
    """Return ``x``, which is the same on all processes, with the mean of their gradients."""
    return _Collective.apply(x, "same", group)


def largest(x: Tensor, group: Any = None) -> Tensor:
    """Return the elementwise maximum of ``x`` over all processes, without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    communicate(dist.all_reduce, x, dist.ReduceOp.MAX, group=group)
    return x


def merge_largest(x: Tensor, group: Any = None) -> Tensor:
    """Return this process's part (B, ...) of the maximum of ``x`` (W B, ...) over all processes,
    without a gradient.
    """
    return largest(x, group).chunk(world_size(group))[dist.get_rank(group)]


def pass_on(x: Tensor, group: Any, tag: int) -> Callable[[], Tensor]:
    """Begin to send ``x`` to the process before this one; return what waits for that of the one
    behind and returns it.

    Both have the same shape. The process before the first is the last.
    """
    rank, ranks, received = (
        dist.get_rank(group),
        dist.get_process_group_ranks(group),
        torch.empty_like(x),
    )
    before, behind = ranks[rank - 1], ranks[(rank + 1) % len(ranks)]
    ops = [
        dist.P2POp(dist.isend, x, before, group, tag),
        dist.P2POp(dist.irecv, received, behind, group, tag),
    ]
    works = communicate(_batch, ops, group=group)

    def wait(_sent: Tensor = x) -> Tensor:  # which is kept until then
        for work in works:
            communicate(lambda group, work=work: work.wait(), group=group)
        return received

    return wait


def _batch(ops: list[Any], group: Any) -> list[Any]:
    return dist.batch_isend_irecv(ops)
