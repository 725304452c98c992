"""Pairs: which rows and columns belong together, from integer ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .vectors import host_may_read, may_keep

IGNORE_ID = torch.iinfo(torch.int64).min  # id of an entry that does not exist: it matches nothing

EVERYTHING = slice(None)
KEPT_MASK = 2**20  # pairs of a mask that is kept, at most

Ids = tuple[Tensor | None, Tensor | None]
Over = Literal["negatives", "positives", "all"]
Result = TypeVar("Result")


class Pairs:
    """The positive pairs of a matrix (N, M).

    Without ids, row i matches column i. Column ids alone are row numbers.
    """

    def __init__(self, shape: tuple[int, int], ids: Ids, device: torch.device):
        self.shape = shape
        self.device = device
        self.ids_as_passed = ids
        rows, cols = ids
        if rows is None and cols is not None:
            rows = torch.arange(shape[0], device=device)
        #: Whether row i matches column i and nothing else, so that ids need not be compared.
        self.one_to_one = rows is None or cols is None
        if rows is not None and cols is not None and shape[0] == shape[1]:
            self.one_to_one = is_diagonal(rows, cols)
        self.ids: Ids = (None, None) if self.one_to_one else (rows, cols)
        #: (N,) and (M,) bool: rows and columns with IGNORE_ID; None where there certainly are none.
        self.ignored: tuple[Tensor | None, Tensor | None]
        row_ignored = ignored_mask(self.ids[0])
        same = self.ids[0] is self.ids[1]
        self.ignored = row_ignored, row_ignored if same else ignored_mask(self.ids[1])
        self._cache: dict[Any, Any] = {}

    @property
    def listable(self) -> bool:
        """Whether pairs may be listed, as their number depends on the data.

        An accelerator has to synchronise for it, which it cannot while a graph is captured.
        """
        if self.ids[0] is None:
            return True
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            return not torch.cuda.is_current_stream_capturing()
        return host_may_read(self.ids[0])

    def _cached(self, key: Any, compute: Callable[[], Result]) -> Result:
        """Return a result that is computed once, in tensors that autograd may save."""
        if key not in self._cache:
            context = contextlib.nullcontext() if may_keep() else torch.inference_mode(False)
            with context:
                self._cache[key] = compute()
        return self._cache[key]

    # --------------------------------------------------------------------------- numbers and lists

    def counts(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the (A,) int64 numbers of positives and of negatives of each row (0) or column."""
        if self.ids[0] is self.ids[1] and self.shape[0] == self.shape[1]:
            side = 0
        return self._cached(("counts", side), lambda: self._counts(side))

    def _counts(self, side: int) -> tuple[Tensor, Tensor]:
        own = self.ids[side]
        other = self.ids[1 - side]
        if own is None or other is None:
            positives = torch.ones(self.shape[side], dtype=torch.int64, device=self.device)
            return positives, self.shape[1 - side] - positives
        own = own.contiguous()
        ordered = other.sort().values
        positives = torch.searchsorted(ordered, own, right=True)
        positives = positives - torch.searchsorted(ordered, own)
        candidates: Any = self.shape[1 - side]
        others_ignored = self.ignored[1 - side]
        if others_ignored is not None:
            candidates = (~others_ignored).sum()
        ignored = self.ignored[side]
        if ignored is None:
            return positives, candidates - positives
        positives = positives.masked_fill(ignored, 0)
        return positives, (candidates - positives).masked_fill(ignored, 0)

    @property
    def listed(self) -> tuple[Tensor, Tensor]:
        """The (P,) row and (P,) column indices of the positive pairs, sorted by row."""
        return self._cached("listed", self._listed)

    def _listed(self) -> tuple[Tensor, Tensor]:
        if self.one_to_one:
            i = torch.arange(min(self.shape), device=self.device)
            return i, i
        # The ids of the shorter side are searched for in the sorted ids of the other.
        side = int(self.shape[1] > self.shape[0])
        own = self.ids[side]
        other = self.ids[1 - side]
        assert own is not None and other is not None
        ordered, order = torch.sort(other, stable=True)
        first = torch.searchsorted(ordered, own, out_int32=True)
        hit = ordered[first.clamp_max(len(ordered) - 1)] == own  # few entries of a memory match
        ignored = self.ignored[side]
        if ignored is not None:
            hit = hit & ~ignored
        which = hit.nonzero().squeeze(1)
        first = first[which].long()
        count = torch.searchsorted(ordered, own[which], right=True) - first
        repeated = torch.repeat_interleave(count)  # 0 0 0 1 2 2 … for counts 3, 1, 2
        own_index = which[repeated]
        other_index = order[first[repeated] + within(repeated, count)]
        if side == 0:
            return own_index, other_index
        other_index, order = torch.sort(other_index, stable=True)
        return other_index, own_index[order]

    def places(self, side: int) -> Tensor:
        """Return the (A, P) positives of each row (0) or column (1), padded with -1.

        P is the largest number of positives of an anchor.
        """
        anchors = self.listed[side]
        size = self.shape[side]
        slot = slots(anchors, size)
        most = int(slot.max()) + 1 if len(slot) else 0
        places = torch.full((size, most), -1, device=self.device)
        places[anchors, slot] = self.listed[1 - side]
        return places

    # ------------------------------------------------------------------------------------ masking

    def all_excluded(self, over: Over) -> Tensor | None:
        """Return the (N, M) bool mask of the pairs that a sum leaves out, to be read only.

        That of a small matrix is kept for the next question: it takes three launches.
        """
        if self.shape[0] * self.shape[1] > KEPT_MASK:
            return self.excluded(over, EVERYTHING, EVERYTHING)
        return self._cached(over, lambda: self.excluded(over, EVERYTHING, EVERYTHING))

    def excluded(self, over: Over, rows: slice, cols: slice) -> Tensor | None:
        """Return the (r, c) bool mask of the pairs that a sum leaves out; None: it has all."""
        mask = None
        if over != "all":
            mask = self._positive(rows, cols)
            if over == "positives":
                mask = ~mask
        row_ignored, col_ignored = self.ignored
        if row_ignored is not None:
            part = row_ignored[rows, None]
            mask = part if mask is None else mask | part
        if col_ignored is not None:
            part = col_ignored[None, cols]
            mask = part if mask is None else mask | part
        return mask

    def _positive(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs with equal ids."""
        row_ids, col_ids = self.ids
        if row_ids is not None and col_ids is not None:
            return row_ids[rows, None] == col_ids[None, cols]
        n, m = self.shape
        if rows == cols == EVERYTHING:
            return torch.eye(n, m, dtype=torch.bool, device=self.device)
        row_numbers = torch.arange(n, device=self.device)[rows, None]
        return row_numbers == torch.arange(m, device=self.device)[None, cols]

    def exclude_(
        self,
        x: Tensor,  # (r, c)
        places: tuple[slice, slice],  # of the rows and the columns
        value: float,
        over: Over = "negatives",
    ) -> Tensor:
        """Fill the pairs that a sum leaves out with ``value``, in a part of the matrix; return it.

        A fill of single entries takes a tenth of the time of a mask where few pairs are positive.
        """
        rows, cols = places
        if over == "negatives" and self.one_to_one:
            offset = rows.start - cols.start
            if -x.shape[0] < offset < x.shape[1]:
                x.diagonal(offset).fill_(value)
            return x
        if over == "negatives" and self.listable and x.device.type == "cpu":
            i, j = self._listed_within(rows, cols)
            if len(i) * 16 <= x.numel():
                x[i, j] = value
                over = "all"
        mask = self.excluded(over, rows, cols)
        return x if mask is None else x.masked_fill_(mask, value)

    def _listed_within(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Return the positive pairs of a tile, as places in it."""
        i, j = self.listed
        n, m = self.shape
        if rows.start > 0 or rows.stop < n:
            ends = torch.tensor([rows.start, rows.stop])
            start, stop = torch.searchsorted(i, ends).tolist()
            i = i[start:stop] - rows.start
            j = j[start:stop]
        if cols.start > 0 or cols.stop < m:
            inside = (j >= cols.start) & (j < cols.stop)
            i = i[inside]
            j = j[inside] - cols.start
        return i, j


def is_diagonal(rows: Tensor, cols: Tensor) -> bool:
    """Return whether ids only say that row i matches column i; False if the host may not read."""
    if not host_may_read(rows) or not torch.equal(rows, cols):
        return False
    ordered = rows.sort().values
    repeated = bool((ordered[1:] == ordered[:-1]).any())
    return not repeated and int(ordered[0]) != IGNORE_ID


def ignored_mask(ids: Tensor | None) -> Tensor | None:
    """Return the bool mask of ids that are IGNORE_ID; None where there certainly are none."""
    if ids is None:
        return None
    mask = ids == IGNORE_ID
    if host_may_read(ids) and not bool(mask.any()):
        return None
    return mask


def slots(anchors: Tensor, size: int) -> Tensor:
    """Return the (P,) index 0, 1, … of each pair among the pairs of its anchor, below ``size``."""
    ordered, order = torch.sort(anchors, stable=True)
    count = torch.bincount(anchors, minlength=size)
    return torch.empty_like(order).index_copy_(0, order, within(ordered, count))


def within(i: Tensor, count: Tensor) -> Tensor:
    """Return 0, 1, …, count[k] - 1 for each k; ``i`` ascends and has each k count[k] times."""
    return torch.arange(len(i), device=i.device) - (count.cumsum(0) - count)[i]


def segment_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return the (size,) sums of the (P,) values of each index, deterministically."""
    return add_segments_(values.new_zeros(size), index, values)


def add_segments_(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add the (P, ...) values of each index to ``total`` (N, ...), deterministically; return it."""
    if total.device.type == "cpu":
        return total.index_add_(0, index, values)
    # It sorts on accelerators, where index_add is atomic.
    return total.index_put_((index,), values, accumulate=True)


def weighted_sums(
    vectors: Tensor,  # (N, D)
    which: Tensor,  # (P,) vectors of pairs
    weights: Tensor,  # (P,)
    index: Tensor,  # (P,) to which sum each pair contributes
    size: int,
) -> Tensor:
    """Return the (size, D) sums ``sum_{p: index[p] = a} w_p x_p``, without copies (P, D)."""
    index, order = torch.sort(index, stable=True)
    offsets = torch.searchsorted(index, torch.arange(size, device=index.device))
    return F.embedding_bag(
        which[order], vectors, offsets, mode="sum", per_sample_weights=weights[order]
    )
