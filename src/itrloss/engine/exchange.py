"""A batch that several processes share, and what its anchors exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .answers import ANSWERS
from .pairs import Pairs
from .processes import gather, largest, merge, merge_largest, total
from .scores import IGNORE_ID


class Processes:
    """The processes that share a batch, each with rows and columns of its own.

    All have as many, so that they run the same collectives: shorter batches are padded with entries
    that do not exist.
    """

    def __init__(self, group: Any, sizes: Sequence[Sequence[int]]):
        """``sizes``: numbers of rows and columns of each process, before padding."""
        self.group, self.sizes, self.world = group, sizes, len(sizes)
        self.rank = dist.get_rank(group)
        # Two at least, as a parameter of one value is for all anchors.
        self.padded = max(2, *(n for n, _ in sizes)), max(2, *(m for _, m in sizes))
        self.totals = sum(n for n, _ in sizes), sum(m for _, m in sizes)
        #: All rows and columns, padded, with the (N,) and (M,) int64 ids of all processes.
        self.pairs: Pairs

    def gather_ids(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the ids of all processes; return the (B,) padded ones of own rows, and the (M,) of
        all columns.
        """
        n, m = self.padded
        own = torch.cat(
            [
                F.pad(rows, (0, n - len(rows)), value=IGNORE_ID),
                F.pad(cols, (0, m - len(cols)), value=IGNORE_ID),
            ]
        )
        first, second = gather(own, self.group).view(-1, n + m).split([n, m], 1)
        ids = first.flatten(), second.flatten()
        self.pairs = Pairs((len(ids[0]), len(ids[1])), ids, rows.device)
        return own[:n], ids[1]

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """The (N,) int64 ids of all rows, and (M,) of all columns, padded."""
        return self.pairs.ids_as_passed  # type: ignore[return-value]

    def first(self, side: int) -> int:
        """Return the number of this process's first row (``side`` 0) or column (1) among all."""
        return sum(size[side] for size in self.sizes[: self.rank])

    def numbers(self, side: int, index: Tensor) -> Tensor:
        """Return the numbers among all rows or columns of those at ``index`` in the padded ones; -1
        stays.
        """
        if all(size[side] == self.padded[side] for size in self.sizes):
            return index
        before = [
            sum(self.padded[side] - size[side] for size in self.sizes[:rank])
            for rank in range(self.world)
        ]
        missing = torch.tensor(before, device=index.device)[
            (index // self.padded[side]).clamp_min(0)
        ]
        return torch.where(index < 0, index, index - missing)

    def existing(self, x: Tensor, side: int) -> Tensor:
        """Return the rows or columns (..., of all processes) in ``x`` (W B, ...) without the
        padding.
        """
        if all(size[side] == self.padded[side] for size in self.sizes):
            return x
        return torch.cat(
            [part[: size[side]] for part, size in zip(x.chunk(self.world), self.sizes, strict=True)]
        )

    def merge_best(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of all processes' values (W B,) and its index, for this process's part
        (B,).

        The gradient goes to the process that has it; of equal values, to the first.
        """
        comparable = values.detach().nan_to_num(torch.inf, torch.inf, -torch.inf)
        best = largest(comparable, self.group)
        claims = torch.where(comparable == best, -self.rank, -self.world)
        mine = (largest(claims, self.group) == -self.rank) & (comparable != -torch.inf)
        value = merge(torch.where(mine, values, 0.0), self.group)
        index = merge(torch.where(mine, indices + 1, 0), self.group) - 1
        return value.masked_fill(index < 0, -torch.inf), index

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all processes; differentiable."""
        return total(x, self.group)

    def largest(self, x: float) -> float:
        """Return the largest of the processes' numbers."""
        # where the ids are: NCCL exchanges nothing between hosts
        return float(
            largest(torch.tensor([x], dtype=torch.float64, device=self.pairs.device), self.group)
        )


class Share(NamedTuple):
    """What a process has of a sharded batch's matrix."""

    processes: Processes
    #: The side (0 or 1) whose anchors' candidates are spread over the processes: the matrix has
    # the anchors of all : processes on it, with partial sums. The other side has this process's
    # anchors. None: so have both.
    spread: int | None
    unpadded: Sequence[int]  # numbers of this process's anchors on each side that exist
    cols: Tensor | None = None  # (M_r, D) this process's own columns, if candidates are spread


class Exchange:
    """What the anchors of a sharded batch exchange with those of the other processes.

    In groups whose candidates are spread over the processes, matrices have the anchors of all
    processes, and partial sums for them. There, parameters are gathered and answers merged.
    """

    def __init__(self, firsts: Sequence[tuple[Any, int]]):
        """``firsts``: for each group, its first matrix and the side of it that the anchors are."""
        shares = [(matrix.share, side) for matrix, side in firsts]
        self.processes: Processes = shares[0][0].processes
        self.spread = [share.spread == side for share, side in shares]
        self.unpadded = [share.unpadded[side] for share, side in shares]
        #: Numbers of anchors of the matrices, and of these those of this process.
        self.whole_sizes = [matrix.shape[side] for matrix, side in firsts]
        parts = zip(self.whole_sizes, self.spread, strict=True)
        self.sizes = [size // self.processes.world if spread else size for size, spread in parts]
        #: Which side of the batch the candidates are; None: those of a memory.
        self.others = [None if share.spread is None else 1 - side for share, side in shares]

    def _exchanged(self, x: Tensor, sizes: Sequence[int], collective: Any) -> Tensor:
        if not any(self.spread):
            return x
        parts = list(x.split(sizes, -1))
        places = [g for g, spread in enumerate(self.spread) if spread]
        own = torch.stack([parts[g] for g in places]).movedim(-1, 0)  # all at once
        for g, part in zip(
            places, collective(own, self.processes.group).movedim(0, -1), strict=True
        ):
            parts[g] = part
        return torch.cat(parts, -1)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the parameters of the matrices' anchors from those (..., A) of this process's;
        single ones stay.
        """
        return x if x.shape[-1] == 1 else self._exchanged(x, self.sizes, gather)

    def merged(self, x: Tensor, maximum: bool = False) -> Tensor:
        """Return the answers (..., A) of this process's anchors from those of the matrices'."""
        return self._exchanged(x, self.whole_sizes, merge_largest if maximum else merge)

    def merged_best(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (A,) best values of all processes, and their indices among all candidates that
        exist.
        """
        p, best = self.processes, []
        parts = zip(values.split(self.whole_sizes), indices.split(self.whole_sizes), strict=True)
        for spread, other, (value, index) in zip(self.spread, self.others, parts, strict=True):
            if spread:
                assert other is not None
                value, index = p.merge_best(
                    value, torch.where(index < 0, index, index + p.rank * p.padded[other])
                )
            best.append((value, index if other is None else p.numbers(other, index)))
        first, second = zip(*best, strict=True)
        return torch.cat(first), torch.cat(second)

    def group_amax(self, x: Tensor, own: Tensor) -> list[Tensor]:
        """Return the () largest value of ``x`` (A,) in each group, from those (G,) of this process."""
        whole = largest(own, self.processes.group)
        ties = torch.stack(
            [(part == top).sum() for part, top in zip(x.split(self.sizes), whole, strict=True)]
        )
        sums, number = self.processes.total(
            torch.stack([torch.where(ties > 0, own, 0.0) * ties, ties.to(own)])
        )
        return list(sums / number)

    def counts(self, local: Tensor, positive: bool) -> Tensor:
        """Return the (A,) numbers of positives or of negatives from those of the matrices' anchors.

        Processes need no exchange for it, as they have the ids of all.
        """
        p, counts = self.processes, list(local.split(self.whole_sizes))
        for g, (spread, other) in enumerate(zip(self.spread, self.others, strict=True)):
            if spread and other is not None:
                counts[g] = p.pairs.counts(1 - other)[0 if positive else 1].chunk(p.world)[p.rank]
        return torch.cat(counts)

    def earlier(self) -> Tensor:
        """Return how many positives each of the matrices' anchors has in the processes before this
        one.
        """
        p = self.processes
        rows, cols = p.ids[0][: p.rank * p.padded[0]].sort().values, p.ids[1]
        before = torch.searchsorted(rows, cols, right=True) - torch.searchsorted(rows, cols)
        parts = zip(self.whole_sizes, self.spread, strict=True)
        return torch.cat([before if spread else before.new_zeros(size) for size, spread in parts])

    def existing(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the values of each group without those of padding."""
        return tuple(x[:size] for x, size in zip(parts, self.unpadded, strict=True))


class Sharded:
    """A backend for the anchors of a sharded batch; those of matrices answer for the anchors of the
    matrices.
    """

    def __init__(self, exchange: Exchange, local: Any):
        self.exchange, self.local = exchange, local

    def sums(self, *params: Tensor, key: str, **options: Any) -> Tensor:
        """See :meth:`itrloss.engine.backends.Dense.sums`."""
        sums = self.local.sums(*map(self.exchange.gathered, params), key=key, **options)
        return self.exchange.merged(sums, ANSWERS[key].maximum)

    def counts(self, *, positive: bool) -> Tensor:
        """See :meth:`itrloss.engine.backends.Dense.counts`."""
        return self.exchange.counts(self.local.counts(positive=positive), positive)

    def centre(self) -> Tensor:
        """See :meth:`itrloss.engine.backends.Dense.centre`."""
        return self.exchange.merged(self.local.centre())

    def hardest(self, *below: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`itrloss.engine.backends.Dense.hardest`."""
        return self.exchange.merged_best(*self.local.hardest(*map(self.exchange.gathered, below)))
