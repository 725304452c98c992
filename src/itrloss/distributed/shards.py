"""A batch that several processes share: whose anchors are where, and what they exchange.

Each process has rows and columns of its own, and one matrix: its rows with the columns of all. It
has all candidates of its rows, but of each column only the candidates among its own rows. So it
asks for all columns, and its own columns' answers are merged from the answers of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.relation import IGNORE_ID, Relation
from .collectives import Collective, ProcessGroup, gather, largest, merge, merge_largest, total
from .consensus import padded


class Processes:
    """The processes that share a batch, each with rows and columns of its own.

    All have as many, so that they run the same collectives: shorter batches are padded with entries
    that do not exist.
    """

    def __init__(self, group: ProcessGroup, sizes: Sequence[Sequence[int]]):
        """Store the processes; ``sizes`` are their numbers of rows and columns before padding."""
        self.group = group
        self.sizes = sizes
        self.world = len(sizes)
        self.rank = dist.get_rank(group)
        # At least two, as a value of one entry is for all anchors.
        rows = max(2, *(n for n, _ in sizes))
        cols = max(2, *(m for _, m in sizes))
        self.padded = rows, cols
        self.totals = sum(n for n, _ in sizes), sum(m for _, m in sizes)
        #: The int64 ids (N,) of all rows, and (M,) of all columns, padded; or labels (N, k) and
        #: (M, l).
        self.ids: tuple[Tensor, Tensor]
        #: The (N,) and (M,) int64 groups of all, padded; None: there are none.
        self.groups: tuple[Tensor, Tensor] | None = None
        #: Their pairs; None where more than an id of each entry says who matches.
        self.pairs: Relation | None = None

    def of_all(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids (N,) and (M,) of all processes, padded, from own ones (N_r,) and (M_r,);
        or labels (N, k) and (M, l).
        """
        n, m = self.padded
        own_rows = padded(rows, n, IGNORE_ID)
        own_cols = padded(cols, m, IGNORE_ID)
        own = torch.cat([own_rows.flatten(), own_cols.flatten()])
        every = gather(own, self.group).view(self.world, -1)
        of_rows, of_cols = every.split([own_rows.numel(), own_cols.numel()], 1)
        return of_rows.reshape(-1, *rows.shape[1:]), of_cols.reshape(-1, *cols.shape[1:])

    def is_even(self, side: int) -> bool:
        """Return whether no process's rows (``side`` 0) or columns (1) are padded."""
        return all(size[side] == self.padded[side] for size in self.sizes)

    def first(self, side: int) -> int:
        """Return the number of this process's first row (``side`` 0) or column (1) among all."""
        return sum(size[side] for size in self.sizes[: self.rank])

    def numbers(self, side: int, index: Tensor) -> Tensor:
        """Return the numbers among all that exist of those at ``index`` in the padded ones.

        -1 stays.
        """
        if self.is_even(side):
            return index
        padding = [self.padded[side] - size[side] for size in self.sizes]
        before = [sum(padding[:rank]) for rank in range(self.world)]
        owner = (index // self.padded[side]).clamp_min(0)
        missing = torch.tensor(before, device=index.device)[owner]
        return torch.where(index < 0, index, index - missing)

    def existing(self, x: Tensor, side: int) -> Tensor:
        """Return the rows or columns (..., of all processes) in ``x`` (W B, ...) without
        padding.
        """
        if self.is_even(side):
            return x
        parts = zip(x.chunk(self.world), self.sizes, strict=True)
        return torch.cat([part[: size[side]] for part, size in parts])

    def own(self, x: Tensor) -> Tensor:
        """Return this process's part (B, ...) of ``x`` (W B, ...)."""
        return x.chunk(self.world)[self.rank]

    def merge_best(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of all processes' values (W B,) and its index, of own anchors (B,).

        The gradient goes to the process that has it; of equal values, to the first.
        """
        comparable = values.detach().nan_to_num(torch.inf, torch.inf, -torch.inf)
        best = largest(comparable, self.group)
        claims = torch.where(comparable == best, -self.rank, -self.world)
        mine = largest(claims, self.group) == -self.rank
        mine = mine & (comparable != -torch.inf)
        value = merge(torch.where(mine, values, 0.0), self.group)
        index = merge(torch.where(mine, indices + 1, 0), self.group) - 1
        return value.masked_fill(index < 0, -torch.inf), index

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all processes; differentiable."""
        return total(x, self.group)

    def largest(self, x: float) -> float:
        """Return the largest of the processes' numbers."""
        # On the device of the ids: NCCL exchanges nothing between hosts.
        number = torch.tensor([x], dtype=torch.float64, device=self.ids[0].device)
        return float(largest(number, self.group))


class Share(NamedTuple):
    """What a process has of a matrix of a shared batch."""

    processes: Processes
    #: The side (0 or 1) whose anchors' candidates are spread over the processes: the matrix has the
    #: anchors of all processes on it, with partial sums. None: it has all candidates of both.
    spread: int | None
    unpadded: Sequence[int]  # numbers of this process's anchors on each side that exist
    cols: Tensor | None = None  # (M_r, D) this process's own columns, if candidates are spread


class AnchorGroup(NamedTuple):
    """A group of a shared batch's anchors."""

    share: Share
    side: int  # of the matrix that the anchors are
    size: int  # number of anchors that the matrix has

    @property
    def is_spread(self) -> bool:
        """Whether the matrix has the anchors of all processes, with partial answers."""
        return self.share.spread == self.side

    @property
    def own_size(self) -> int:
        """The number of this process's anchors."""
        return self.size // self.share.processes.world if self.is_spread else self.size


class Exchange:
    """What the anchors of a shared batch exchange with the other processes.

    In groups whose candidates are spread over the processes, values are gathered and answers
    merged. Elsewhere both stay as they are.
    """

    def __init__(self, shards: Sequence[AnchorGroup]):
        self.shards = shards
        self.processes = shards[0].share.processes
        #: Numbers of anchors of the matrices, and of this process.
        self.whole_sizes = [shard.size for shard in shards]
        self.sizes = [shard.own_size for shard in shards]

    def _exchanged(self, x: Tensor, sizes: Sequence[int], collective: Collective) -> Tensor:
        """Return ``x`` (..., A) with a collective of the spread groups' parts, all at once."""
        parts = list(x.split(sizes, -1))
        spread = [g for g, shard in enumerate(self.shards) if shard.is_spread]
        if not spread:
            return x
        own = torch.stack([parts[g] for g in spread]).movedim(-1, 0)
        exchanged = collective(own, self.processes.group).movedim(0, -1)
        for g, part in zip(spread, exchanged, strict=True):
            parts[g] = part
        return torch.cat(parts, -1)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the values of the matrices' anchors from the values (..., A) of own anchors."""
        return self._exchanged(x, self.sizes, gather)

    def merged(self, x: Tensor) -> Tensor:
        """Return the sums of own anchors from the sums (..., A) of the matrices' anchors."""
        return self._exchanged(x, self.whole_sizes, merge)

    def merged_largest(self, x: Tensor) -> Tensor:
        """Return the maxima of own anchors from the maxima (..., A) of the matrices' anchors."""
        return self._exchanged(x, self.whole_sizes, merge_largest)

    def merged_moments(self, moments: Tensor) -> Tensor:
        """Return the numbers, means and squares about them (3, A) of own anchors from those of the
        matrices' anchors.
        """
        number, mean, squares = moments
        own_number, sums = self.merged(torch.stack([number, number * mean]))
        own_mean = sums / own_number.clamp_min(1)
        distance = mean - self.gathered(own_mean)
        own_squares = self.merged(squares + number * distance.square())
        return torch.stack([own_number, own_mean, own_squares])

    def merged_best(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (A,) best values of all processes, and their numbers among all candidates."""
        processes = self.processes
        best_values = []
        best_indices = []
        parts = zip(values.split(self.whole_sizes), indices.split(self.whole_sizes), strict=True)
        for shard, (value, index) in zip(self.shards, parts, strict=True):
            other = 1 - shard.side
            if shard.is_spread:
                before = processes.rank * processes.padded[other]
                index = torch.where(index < 0, index, index + before)
                value, index = processes.merge_best(value, index)
            if shard.share.spread is not None:  # the candidates are not those of a memory
                index = processes.numbers(other, index)
            best_values.append(value)
            best_indices.append(index)
        return torch.cat(best_values), torch.cat(best_indices)

    def group_amax(self, x: Tensor) -> list[Tensor]:
        """Return the () largest value of ``x`` (A,) in each group, over all processes.

        Equal values share the gradient, as in ``amax``.
        """
        parts = x.split(self.sizes)
        own = torch.stack([part.amax() for part in parts])
        tops = largest(own, self.processes.group)
        ties = torch.stack([(part == top).sum() for part, top in zip(parts, tops, strict=True)])
        reached = torch.where(ties > 0, own, 0.0) * ties
        sums, number = self.processes.total(torch.stack([reached, ties.to(own)]))
        return list(sums / number)

    def counts(self, local: Tensor, positive: bool) -> Tensor:
        """Return the (A,) numbers of positives or negatives; ``local``: of the matrices' anchors.

        Processes need no exchange for it if they have the ids of all.
        """
        processes = self.processes
        if processes.pairs is None:
            return self.merged(local)
        counts = list(local.split(self.whole_sizes))
        for g, shard in enumerate(self.shards):
            if shard.is_spread:
                counts[g] = processes.own(processes.pairs.counts(shard.side, positive))
        return torch.cat(counts)

    def earlier_positives(self, local: Tensor) -> Tensor:
        """Return how many positives each of the matrices' anchors has in earlier processes.

        ``local`` (A,): how many it has in this one.
        """
        processes = self.processes
        parts = []
        for part, shard in zip(local.split(self.whole_sizes), self.shards, strict=True):
            if not shard.is_spread:
                parts.append(torch.zeros_like(part))
                continue
            every = gather(part, processes.group).view(processes.world, -1)
            parts.append(every[: processes.rank].sum(0))
        return torch.cat(parts)

    def existing(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the values of each group without its padding."""
        shards = zip(parts, self.shards, strict=True)
        return tuple(part[: shard.share.unpadded[shard.side]] for part, shard in shards)
