"""The collectives of ``torch.distributed`` that a sharded batch needs, with their gradients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_PATIENCE = 2.0  # seconds to find out which process is lost


def world_size(group: Any = None) -> int:
    """Return the number of processes in the group, by default of all; 1 without ``torch.distributed``."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def communicate(collective: Any, *args: Any, group: Any, **options: Any) -> Any:
    """Run a collective; if it fails, the error says which processes do not answer."""
    if torch.compiler.is_compiling():
        return collective(*args, group=group, **options)
    try:
        return collective(*args, group=group, **options)
    except RuntimeError as error:
        raise RuntimeError(f"gather: {_lost(group)}") from error


def _lost(group: Any) -> str:
    """Return who does not answer: processes in which a collective failed say so in the store, which still works.

    A process that still waits in the collective does not answer either, until those that failed are gone.
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


class _Gather(torch.autograd.Function):
    """(W B, ...) from all processes by rank; its gradient is :class:`_Merge`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = x.new_empty(len(x) * world_size(group), *x.shape[1:])
        communicate(_all_gather, whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Merge.apply(grads[0], ctx.group), None


class _Merge(torch.autograd.Function):
    """This process's part (B, ...) of the sum of all processes' (W B, ...); its gradient is :class:`_Gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        half = x.is_floating_point() and x.itemsize < 4  # sums of half types would be rounded with each addend
        whole = (x.float() if half else x).contiguous()
        part = whole.new_empty(len(x) // world_size(group), *x.shape[1:])
        communicate(_reduce_scatter, part, whole, group=group)
        return part.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grads[0], ctx.group), None


class _Total(torch.autograd.Function):
    """The sum over all processes, whose gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        communicate(dist.all_reduce, total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grads[0], ctx.group), None


class _Replicated(torch.autograd.Function):
    """A parameter that all processes hold: each of their gradients becomes the mean of those of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grads[0], ctx.group) / world_size(ctx.group), None


def gather(x: Tensor, group: Any = None) -> Tensor:
    """Return the (W B, ...) concatenation by rank of ``x`` (B, ...), of one shape on all processes; differentiable."""
    return _Gather.apply(x, group)


def total(x: Tensor, group: Any = None) -> Tensor:
    """Return the sum of ``x`` over all processes; differentiable."""
    return _Total.apply(x, group)


def largest(x: Tensor, group: Any = None) -> Tensor:
    """Return the elementwise maximum of ``x`` over all processes, without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    communicate(dist.all_reduce, x, dist.ReduceOp.MAX, group=group)
    return x


def replicated(x: Tensor, group: Any = None) -> Tensor:
    """Return ``x``, which is the same on all processes, with the mean of their gradients."""
    return _Replicated.apply(x, group)


class Processes:
    """The processes that share a batch, each with rows and columns of its own.

    All have as many, so that they run the same collectives: shorter batches are padded with entries that do not exist.
    """

    def __init__(self, group: Any, sizes: Sequence[Sequence[int]]):
        """``sizes``: numbers of rows and columns of each process, before padding."""
        self.group, self.sizes, self.world = group, sizes, len(sizes)
        self.rank = dist.get_rank(group)
        # Two at least, as a parameter of one value is for all anchors.
        self.padded = max(2, *(n for n, _ in sizes)), max(2, *(m for _, m in sizes))
        self.totals = sum(n for n, _ in sizes), sum(m for _, m in sizes)
        #: (N,) int64 ids of all rows, and (M,) of all columns, padded.
        self.ids: tuple[Tensor, Tensor]

    def first(self, side: int) -> int:
        """Return the number of this process's first row (``side`` 0) or column (1) among all."""
        return sum(size[side] for size in self.sizes[: self.rank])

    def numbers(self, side: int, index: Tensor) -> Tensor:
        """Return the numbers among all rows or columns of those at ``index`` in the padded ones; -1 stays."""
        if all(size[side] == self.padded[side] for size in self.sizes):
            return index
        before = [sum(self.padded[side] - size[side] for size in self.sizes[:rank]) for rank in range(self.world)]
        missing = torch.tensor(before, device=index.device)[(index // self.padded[side]).clamp_min(0)]
        return torch.where(index < 0, index, index - missing)

    def existing(self, x: Tensor, side: int) -> Tensor:
        """Return the rows or columns (..., of all processes) in ``x`` (W B, ...) without the padding."""
        if all(size[side] == self.padded[side] for size in self.sizes):
            return x
        return torch.cat([part[: size[side]] for part, size in zip(x.chunk(self.world), self.sizes, strict=True)])

    @property
    def earlier(self) -> Tensor:
        """The (M,) number of positives that each column has in the processes before this one."""
        rows, cols = self.ids[0][: self.rank * self.padded[0]].sort().values, self.ids[1]
        return torch.searchsorted(rows, cols, right=True) - torch.searchsorted(rows, cols)

    def gather(self, x: Tensor) -> Tensor:
        """Return (..., W B) of all processes from ``x`` (..., B); differentiable."""
        return gather(x.movedim(-1, 0), self.group).movedim(0, -1)

    def merge(self, x: Tensor) -> Tensor:
        """Return this process's part (..., B) of the sum of all processes' (..., W B); differentiable."""
        return _Merge.apply(x.movedim(-1, 0), self.group).movedim(0, -1)

    def merge_largest(self, x: Tensor) -> Tensor:
        """Return this process's part (..., B) of the maximum of all processes' (..., W B), without a gradient."""
        return largest(x, self.group).chunk(self.world, -1)[self.rank]

    def merge_best(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of all processes' values (..., W B) and its index, for this process's part (..., B).

        The gradient goes to the process that has it; of equal values, to the first.
        """
        comparable = values.detach().nan_to_num(torch.inf, torch.inf, -torch.inf)
        best = largest(comparable, self.group)
        claims = torch.where(comparable == best, -self.rank, -self.world)
        mine = (largest(claims, self.group) == -self.rank) & (comparable != -torch.inf)
        value = self.merge(torch.where(mine, values, 0.0))
        index = self.merge(torch.where(mine, indices + 1, 0)) - 1
        return value.masked_fill(index < 0, -torch.inf), index

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all processes; differentiable."""
        return total(x, self.group)

    def largest_of(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of ``x`` over all processes, without a gradient."""
        return largest(x, self.group)

    def largest(self, x: float) -> float:
        """Return the largest of the processes' numbers."""
        return float(largest(torch.tensor([x], dtype=torch.float64), self.group))


class Share(NamedTuple):
    """What a process has of a sharded batch's matrix."""

    processes: Processes
    #: The side (0 or 1) whose anchors' candidates are spread over the processes: the matrix has the anchors of all
    #: processes on it, with partial sums. The other side has this process's anchors. None: so have both.
    spread: int | None
    unpadded: Sequence[int]  # numbers of this process's anchors on each side that exist
    cols: Tensor | None = None  # (M_r, D) this process's own columns, if candidates are spread
