"""Pairs: which rows and columns belong together, from integer ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .vectors import host_may_read, may_keep

IGNORE_ID = torch.iinfo(torch.int64).min  # id of an entry that does not exist: it matches nothing

EVERYTHING = slice(None)
KEPT_MASK = 2**20  # pairs of a mask that is kept, at most

# Positives of an anchor up to which pairs are listed. Each listed pair takes copies of two vectors,
# and on a GPU those of an anchor are added one after the other. Of 2048 pairs in 10 classes,
# InfoNCE takes 0.72 of the time without a list, and SupCon 0.36 (``pytest benchmarks/test_micro.py
# --benchmark-enable -k ten_classes``).
FEW = 64

Ids = tuple[Tensor | None, Tensor | None]
Over = Literal["negatives", "positives", "all"]
Result = TypeVar("Result")


class Numbers(NamedTuple):
    """How many positives there are."""

    total: int  # P
    most: tuple[int, int]  # of a row, and of a column


class Classes(NamedTuple):
    """The entries of a side by their ids."""

    size: int  # K, with empty classes, so that the host reads nothing
    number: Tensor  # (A,) the class of each entry, below K
    known: Tensor  # (A,) bool: whether the entry is in its class; others match nothing


class Members(NamedTuple):
    """The entries of a side in K classes: ``order[start[k]:stop[k]]``, none of most classes."""

    order: Tensor  # (A,)
    start: Tensor  # (K,)
    stop: Tensor  # (K,)


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
        self.ids: Ids = (None, None)
        if rows is not None and cols is not None and not self.one_to_one:
            self.ids = rows.contiguous(), cols.contiguous()
        #: (N,) and (M,) bool: rows and columns with IGNORE_ID; None where there certainly are none.
        self.ignored: tuple[Tensor | None, Tensor | None]
        row_ignored = ignored_mask(self.ids[0])
        same = self.ids[0] is self.ids[1]
        self.ignored = row_ignored, row_ignored if same else ignored_mask(self.ids[1])
        #: Whether matches have weights that are not all 1.
        self.has_weights = False
        self._cache: dict[Any, Any] = {}

    @property
    def listable(self) -> bool:
        """Whether pairs may be listed: their number depends on the data, and the host reads it.

        An accelerator has to synchronise for it, which it cannot while a graph is captured.
        """
        if self.ids[0] is None:
            return True
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            return not torch.cuda.is_current_stream_capturing()
        return host_may_read(self.ids[0])

    @property
    def others_are_negatives(self) -> bool:
        """Whether all pairs of entries that exist and do not match are negatives."""
        return True

    def exists(self, side: int) -> Tensor | None:
        """Return the (A,) bool mask of the rows (0) or columns (1) that exist; None: all do."""
        ignored = self.ignored[side]
        return None if ignored is None else ~ignored

    def weight_sums(self, side: int) -> Tensor:
        """Return the (A,) sums of the weights of each row's (0) or column's (1) matches."""
        return self.counts(side)[0]

    def listed_weights(self) -> Tensor:
        """Return the (P,) weights of the pairs in :attr:`listed`."""
        return torch.ones(len(self.listed[0]), device=self.device)

    def weight_matrix(self) -> Tensor:
        """Return the (N, M) weights of the pairs that match, with finite values elsewhere."""
        return torch.ones((), device=self.device).expand(self.shape)

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
        """Return what :meth:`counts` keeps."""
        own = self.ids[side]
        other = self.ids[1 - side]
        if own is None or other is None:
            positives = torch.ones(self.shape[side], dtype=torch.int64, device=self.device)
            return positives, self.shape[1 - side] - positives
        ordered, _ = self._sorted(1 - side)
        positives = torch.searchsorted(ordered, own, right=True) - self._first(side)
        candidates: Any = self.shape[1 - side]
        others_ignored = self.ignored[1 - side]
        if others_ignored is not None:
            candidates = (~others_ignored).sum()
        ignored = self.ignored[side]
        if ignored is None:
            return positives, candidates - positives
        positives = positives.masked_fill(ignored, 0)
        return positives, (candidates - positives).masked_fill(ignored, 0)

    def _sorted(self, side: int) -> tuple[Tensor, Tensor]:
        """Return a side's ids (A,) in ascending order, and the index of each."""
        ids = self.ids[side]
        assert ids is not None
        ordered, order = self._cached(("sorted", side), lambda: torch.sort(ids, stable=True))
        return ordered, order

    def _first(self, side: int) -> Tensor:
        """Return where each id (A,) of a side would begin in the sorted ids of the other side."""
        ids = self.ids[side]
        assert ids is not None
        ordered, _ = self._sorted(1 - side)
        return self._cached(("first", side), lambda: torch.searchsorted(ordered, ids))

    def numbers(self) -> Numbers:
        """Return how many positives there are.

        The host reads nothing else of ids. On an accelerator it waits for it.
        """
        return self._cached("numbers", self._numbers)

    def _numbers(self) -> Numbers:
        """Return what :meth:`numbers` keeps."""
        if 0 in self.shape:
            return Numbers(0, (0, 0))
        of_rows, _ = self.counts(0)
        of_cols, _ = self.counts(1)
        numbers = torch.stack([of_rows.sum(), of_rows.amax(), of_cols.amax()])
        total, row_most, col_most = numbers.tolist()
        return Numbers(total, (row_most, col_most))

    @property
    def are_few(self) -> bool:
        """Whether no row and no column has many positives, so that pairs are best listed."""
        return self.one_to_one or max(self.numbers().most) <= FEW

    @property
    def listed(self) -> tuple[Tensor, Tensor]:
        """The (P,) row and (P,) column indices of the positive pairs, sorted by row."""
        return self._cached("listed", self._listed)

    def _listed(self) -> tuple[Tensor, Tensor]:
        """Return what :attr:`listed` keeps."""
        if self.one_to_one:
            i = torch.arange(min(self.shape), device=self.device)
            return i, i
        # The ids of the shorter side are searched for in the sorted ids of the other.
        side = int(self.shape[1] > self.shape[0])
        _, order = self._sorted(1 - side)
        count, _ = self.counts(side)
        total = self.numbers().total
        # 0 0 0 1 2 2 … for counts 3, 1, 2
        own_index = torch.repeat_interleave(count, output_size=total)
        number = torch.arange(total, device=self.device)
        slot = number - (count.cumsum(0) - count)[own_index]  # 0 1 2 0 0 1 …
        other_index = order[self._first(side)[own_index] + slot]
        if side == 0:
            return own_index, other_index
        other_index, order = torch.sort(other_index, stable=True)
        return other_index, own_index[order]

    def classes(self, side: int) -> Classes:
        """Return the classes of a side's entries: positives have the same."""
        return self._cached(("classes", side), lambda: self._classes(side))

    def _classes(self, side: int) -> Classes:
        """Return what :meth:`classes` keeps."""
        ids = self.ids[side]
        assert ids is not None
        n = self.shape[0]
        ordered, _ = self._sorted(0)
        place = torch.searchsorted(ordered, ids)
        known = ids != IGNORE_ID
        if n > 0:
            known = known & (ordered[place.clamp_max(n - 1)] == ids)
        # Entries of no class are many in a memory: with one number, they would be added one by one.
        spread = torch.arange(len(ids), device=self.device) % (n + 1)
        return Classes(n + 1, torch.where(known, place, spread), known)

    def members(self, side: int) -> Members:
        """Return a side's entries by their class, as :meth:`classes` numbers them.

        The class of an id has the number of its first row in ascending order of the ids.
        """
        return self._cached(("members", side), lambda: self._members(side))

    def _members(self, side: int) -> Members:
        """Return what :meth:`members` keeps."""
        numbered, _ = self._sorted(0)
        ordered, order = self._sorted(side)
        # The last class is of entries without one.
        start = torch.searchsorted(ordered, F.pad(numbered, (0, 1)))
        stop = torch.searchsorted(ordered, F.pad(numbered, (0, 1)), right=True)
        is_class = numbered != IGNORE_ID
        is_class[1:] &= numbered[1:] != numbered[:-1]
        return Members(order, start, torch.where(F.pad(is_class, (0, 1)), stop, start))

    def places(self, side: int) -> Tensor:
        """Return the (A, P) positives of each row (0) or column (1), padded with -1.

        P is the largest number of positives of an anchor.
        """
        anchors = self.listed[side]
        size = self.shape[side]
        slot = slots(anchors)
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
        if over == "negatives" and x.device.type == "cpu" and self.listable and self.are_few:
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
            ends = torch.tensor([rows.start, rows.stop], device=i.device)
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


def slots(anchors: Tensor) -> Tensor:
    """Return the (P,) index 0, 1, … of each pair among the pairs of its anchor."""
    ordered, order = torch.sort(anchors, stable=True)
    first = torch.searchsorted(ordered, ordered)
    numbers = torch.arange(len(ordered), device=ordered.device)
    return torch.empty_like(order).index_copy_(0, order, numbers - first)


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
