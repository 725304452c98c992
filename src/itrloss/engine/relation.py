"""Who matches whom: the one object that says which pairs of a matrix are positive or negative."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks.ids import NO_ID
from ..torch_versions import is_compiling
from .devices import is_recorded
from .vectors import compute_dtype, host_may_read

IGNORE_ID = NO_ID  # id of an entry that does not exist: it matches nothing

ALL = slice(None)
KEPT_MASK = 2**20  # pairs of a mask that is kept, at most
# Pairs up to which masks take fewer operators, and less time, than sorted ids and listed pairs: a
# step of InfoNCE of 32 x 160 with ids takes 66 in place of 84 on the CPU (counted as in
# benchmarks/launches.py). Where the host reads no ids, as on an accelerator, all kept masks do.
BY_MASK = 2**16
# Pairs up to which an accelerator counts by a mask, which is not kept: 5 launches in place of 16
# (pytest tests/engine/test_triton_costs.py -k launches).
COUNTED_MASK = 2**24
AT_ONCE = 2**20  # pairs whose masks are made at once, to be counted or listed
POPULAR = 2**-6  # share of all pairs that share a label from which it is popular

# Positives of an anchor up to which pairs are listed. Each listed pair takes copies of two vectors,
# and on a GPU those of an anchor are added one after the other. Of 2048 pairs in 10 classes,
# InfoNCE takes 0.72 of the time without a list, and SupCon 0.36 (``pytest benchmarks/test_micro.py
# --benchmark-enable -k ten_classes``).
FEW = 64

Over = Literal["negatives", "positives", "all"]
Rule = Literal["same", "other"]
Ids = tuple[Tensor | None, Tensor | None]
Places = tuple[slice, slice]  # rows and columns of a block
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Numbers(NamedTuple):
    """How many positives there are."""

    total: int  # P
    most: tuple[int, int]  # of a row, and of a column
    least: tuple[int, int]


class Occurrences(NamedTuple):
    """Where the ids of the longer side are among those of the shorter one, in ascending order.

    To sort the shorter side is much less work where the other one is a memory.
    """

    ordered: Tensor  # (a,) ids of the shorter side
    order: Tensor  # (a,) the entry of each
    first: Tensor  # (b,) int32: where the id of each entry of the longer side is, or would be
    counts: Tensor  # (b,) int32: how often it is there


class Classes(NamedTuple):
    """The entries of a side by their ids."""

    size: int  # K, with empty classes, so that the host reads nothing
    number: Tensor  # (A,) the class of each entry, below K
    known: Tensor  # (A,) bool: whether the entry is in its class; others match nothing


def kept(
    compute: Callable[Concatenate[Any, Given], Result],
) -> Callable[Concatenate[Any, Given], Result]:
    """Return a method of :class:`Relation` that computes each result once, in tensors that autograd
    may save.

    Masks of more than ``KEPT_MASK`` pairs are made anew. A compiler finds equal expressions itself,
    and refuses tensors that leave the graph of an autograd function.
    """

    @functools.wraps(compute)
    def once(self: Relation, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Return what is known, or compute it."""
        key = compute.__name__, *args, *kwargs.values()
        if key in self._known:
            return self._known[key]
        if is_compiling():
            return compute(self, *args, **kwargs)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                result = compute(self, *args, **kwargs)
        else:
            result = compute(self, *args, **kwargs)
        is_mask = isinstance(result, Tensor) and result.dim() == 2
        if not (is_mask and result.numel() > KEPT_MASK):
            self._known[key] = result
        return result

    return once


class Relation:
    """What the pairs of a matrix (N, M) are: positive, negative, or neither.

    Args:
        shape: (N, M).
        ids: (N,) and (M,) int64, which are equal for positives; or sets of labels (N, k) and (M,
            l), of which positives share one. ``IGNORE_ID`` is no label, and an entry with no other
            does not exist: its pairs are neither. Column ids alone are row numbers. (None, None):
            row i matches column i.
        groups: (N,) and (M,) int64. Pairs that do not match are negatives only in the same group
            or, with the ``rule`` ``"other"``, only in different ones. ``IGNORE_ID`` is open to all.
        matches: (N, M), in place of ids and groups: above 0 for positives, 0 for negatives, nan for
            neither. What is not 1 is a weight.
        has_weights: whether there are such weights.
        one_set: whether rows and columns are the same items, with their numbers as groups: the rule
            then is ``"other"``, and pairs of the same group do not match either.
        one_way: whether the rows alone are anchors, unless a loss says otherwise, as in one set.
    """

    matches: Tensor | None = None  # (N, M) uint8, see :func:`states_of`
    _weights: Tensor | None = None  # (N, M), where matches have them
    _weight_dtype = torch.float32
    is_known = True  #: whether something says who matches
    #: The ids that were passed in, where they are, if they alone say who matches.
    ids_as_passed: Ids = (None, None)
    #: (N,) and (M,) ids or (N, k) and (M, l) labels; None where they are not needed.
    ids: Ids = (None, None)
    #: (N,) and (M,) bool: entries that do not exist; None where there certainly are none.
    ignored: Ids = (None, None)
    all_exist = True  #: whether all entries certainly exist
    #: Whether one id of each entry alone says who matches, so that pairs are found by sorting. Sets
    #: of labels, groups and matrices take masks, block by block.
    by_ids = False
    #: Whether rows and columns are alike, so that each has as many positives as the other.
    _is_symmetric = False

    def __init__(  # noqa: PLR0913 (what says who matches, by keyword)
        self,
        shape: tuple[int, int],
        ids: Ids = (None, None),
        device: torch.device | None = None,
        *,
        groups: tuple[Tensor, Tensor] | None = None,
        rule: Rule = "same",
        matches: Tensor | None = None,
        has_weights: bool = False,
        one_set: bool = False,
        one_way: bool = False,
    ):
        self.shape = shape
        self.device = device
        self.groups = groups
        self.rule: Rule = "other" if one_set else rule
        self.has_weights = has_weights
        self.one_set = one_set
        self.one_way = one_way or one_set
        self._known: dict[Any, Any] = {}  # see `kept`
        if matches is not None:
            self._keep_matches(matches)
        #: Whether all pairs of entries that exist and do not match are negatives.
        self.others_are_negatives = matches is None and groups is None
        #: Whether row i matches column i, and all other pairs are negatives.
        self.one_to_one = self.others_are_negatives
        self._is_small = shape[0] * shape[1] <= BY_MASK
        if ids[1] is not None:
            self._keep_ids(*ids)

    def _keep_ids(self, given_rows: Tensor | None, given_cols: Tensor | None) -> None:
        """Keep ids, or sets of labels, that say who matches, on the device of the matrix.

        Those on the CPU were looked at before an accelerator gets them: of different items nothing
        is listed, no mask is made, and nobody waits. A step of InfoNCE of 128 x 128 with such ids
        has 39 launches in place of 88 with masks (tests/engine/test_synchronisation.py counts).
        """
        assert given_cols is not None
        rows, cols = compared_ids(self.shape[0], given_rows, given_cols)
        if self.groups is None and rows.dim() == 1:
            self.ids_as_passed = given_rows, given_cols
        if self.others_are_negatives and is_diagonal(self.shape, rows, cols):
            return
        self.one_to_one = False
        self.ignored = missing_masks(rows, cols, self.device)
        self.all_exist = self.ignored[0] is None and self.ignored[1] is None
        own = rows.to(self.device)
        others = own if cols is rows else cols.to(self.device)
        self.ids = own, others
        n, m = self.shape
        self.by_ids = own.dim() == 1 and self.groups is None
        self._is_symmetric = self.others_are_negatives and own is others and n == m
        if not host_may_read(own):
            self._is_small = n * m <= COUNTED_MASK

    def _keep_matches(self, matches: Tensor) -> None:
        """Keep a matrix of matches (N, M), and its weights if there are any."""
        self.matches = states_of(matches)
        if matches.is_floating_point():
            self._weight_dtype = matches.dtype
        if self.has_weights:
            # half types would round the sums of weights
            self._weights = matches.detach().nan_to_num(0.0).to(compute_dtype(matches))

    @property
    def listable(self) -> bool:
        """Whether pairs may be listed: their number depends on the data, and the host reads it.

        An accelerator has to synchronise for it, which it cannot while a graph is captured.
        """
        if self.one_to_one:
            return True
        like = self.ids[0] if self.matches is None else self.matches
        assert like is not None
        if like.device.type == "cuda" and not is_compiling():
            return not is_recorded(like.device)
        return host_may_read(like)

    @kept
    def exists(self, side: int) -> Tensor | None:
        """Return the (A,) bool mask of the rows (0) or columns (1) that exist; None: all do.

        With ``matches``, those do that take part in a pair.
        """
        if self.matches is not None:
            return (self.matches != 2).any(1 - side)
        ignored = self.ignored[side]
        return None if ignored is None else ~ignored

    # ------------------------------------------------------------------------------------- masks

    def positive(self, rows: slice = ALL, cols: slice = ALL) -> Tensor:
        """Return the (r, c) bool mask of the pairs that match."""
        mask = self._alike(rows, cols)
        if self.one_set:
            assert self.groups is not None
            mask = mask & may_meet(self.groups, self.rule, rows, cols)
        ignored = self.ignored[0]
        return mask if ignored is None else mask & ~ignored[rows, None]

    def negative(self, rows: slice = ALL, cols: slice = ALL) -> Tensor:
        """Return the (r, c) bool mask of the pairs that do not match and may meet."""
        return self._not_negative(rows, cols).logical_not_()

    def _alike(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that match, and maybe of pairs that do not
        exist.
        """
        if self.matches is not None:
            return self.matches[rows, cols] == 1
        of_rows, of_cols = self.ids
        if of_rows is None or of_cols is None:
            return same_numbers(self.shape, self.device, rows, cols)
        if of_rows.dim() == 1 and of_cols.dim() == 1:
            return of_rows[rows, None] == of_cols[None, cols]
        return shares_label(of_rows[rows], of_cols[cols])

    def _not_negative(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that are no negatives."""
        if self.matches is not None:
            return self.matches[rows, cols] != 0
        mask = self._alike(rows, cols)
        row_ignored, col_ignored = self.ignored
        if row_ignored is not None:
            mask |= row_ignored[rows, None]
        if col_ignored is not None:
            mask |= col_ignored[cols]
        if self.groups is not None:
            mask |= may_meet(self.groups, self.rule, rows, cols).logical_not_()
        return mask

    def excluded(self, over: Over, rows: slice = ALL, cols: slice = ALL) -> Tensor | None:
        """Return the (r, c) bool mask of the pairs that a sum leaves out; None: it has all."""
        is_whole = rows == cols == ALL
        if over == "negatives":
            if is_whole and self.others_are_negatives and self.all_exist:
                return self.all_positive()
            return self._not_negative(rows, cols)
        if over == "positives":
            return ~(self.all_positive() if is_whole else self.positive(rows, cols))
        if self.others_are_negatives and self.all_exist:
            return None
        return self._not_negative(rows, cols) & ~self.positive(rows, cols)

    @kept
    def all_positive(self) -> Tensor:
        """Return the (N, M) bool mask of all positives, to be read only."""
        return self.positive()

    @kept
    def all_excluded(self, over: Over) -> Tensor | None:
        """Return the (N, M) bool mask of the pairs that a sum leaves out, to be read only.

        It takes up to five launches.
        """
        return self.excluded(over)

    def exclude_(
        self,
        x: Tensor,  # (..., r, c)
        places: Places,
        value: float,
        over: Over = "negatives",
    ) -> Tensor:
        """Fill the pairs that a sum leaves out with ``value``, in a part of the matrix; return it.

        A fill of single entries takes a tenth of the time of a mask where few pairs are positive.
        """
        rows, cols = places
        if over == "negatives" and self.one_to_one:
            offset = rows.start - cols.start
            if -x.shape[-2] < offset < x.shape[-1]:
                x.diagonal(offset, -2, -1).fill_(value)
            return x
        entries: tuple[Tensor, Tensor] | None = None
        if over == "negatives" and not self._is_small:
            entries = self._entries()
        # what was kept may be asked for in a compiled graph, where the host reads nothing
        if entries is not None and not is_compiling():
            i, j = self._within(entries, rows, cols)
            count = i.shape[0]
            if count * 16 <= x.shape[-1] * x.shape[-2]:
                if count:
                    x[..., i, j] = value
                if self.all_exist:
                    return x
                over = "all"
        if x.shape[-2] == self.shape[0] and x.shape[-1] == self.shape[1]:
            mask = self.all_excluded(over)
        else:
            mask = self.excluded(over, rows, cols)
        return x if mask is None else x.masked_fill_(mask, value)

    @kept
    def _entries(self) -> tuple[Tensor, Tensor] | None:
        """Return the positive pairs if they may be filled one by one: few, and at hand on the CPU;
        None: by a mask.
        """
        if not self.by_ids or self.ids[0].device.type != "cpu":  # type: ignore[union-attr]
            return None
        return self.listed if self.listable and self.are_few else None

    def _within(
        self, pairs: tuple[Tensor, Tensor], rows: slice, cols: slice
    ) -> tuple[Tensor, Tensor]:
        """Return those of all positive pairs on the CPU that are in a block, as places in it."""
        n, m = self.shape
        if rows.start == 0 and rows.stop == n:
            i, j = self._listed_by_column()
            part = between(j, cols)
            return i[part], j[part] - cols.start
        i, j = pairs
        part = between(i, rows)
        i = i[part] - rows.start
        j = j[part]
        if cols.start > 0 or cols.stop < m:
            inside = (j >= cols.start) & (j < cols.stop)
            i = i[inside]
            j = j[inside] - cols.start
        return i, j

    @kept
    def _listed_by_column(self) -> tuple[Tensor, Tensor]:
        """Return the positive pairs, sorted by column."""
        i, j = self.listed
        j, order = torch.sort(j, stable=True)
        return i[order], j

    def _blocks(self) -> Iterator[slice]:
        """Yield slices of the rows whose masks are made at once."""
        n, m = self.shape
        step = max(1, AT_ONCE // max(1, m))
        for start in range(0, n, step):
            yield slice(start, min(n, start + step))

    # --------------------------------------------------------------------------- numbers and lists

    @kept
    def counts(self, side: int, positive: bool) -> Tensor:
        """Return the (A,) int32 or int64 numbers of positives, or of negatives, of each row (0) or
        column (1).
        """
        if side == 1 and self._is_symmetric:
            return self.counts(0, positive)
        if self.one_to_one or (self.by_ids and not self._is_small):
            return self._counts_by_ids(side, positive)
        if self._is_small:
            return self._counts_in_mask(side, positive)
        return self._counts_by_masks()[side][positive]

    def negative_counts(self, side: int, dtype: torch.dtype) -> Any:
        """Return how many negatives each row (0) or column (1) has, at least 1, to divide by: (A,)
        or one number for all.
        """
        if self.one_to_one and self.shape[0] == self.shape[1]:
            return max(1, self.shape[0] - 1)
        return self._divisors(0 if self._is_symmetric else side, dtype)

    @kept
    def _divisors(self, side: int, dtype: torch.dtype) -> Tensor:
        """Return :meth:`negative_counts` of one side, in a dtype."""
        return self.counts(side, positive=False).clamp_min(1).to(dtype)

    def negatives_within(self, side: int, places: Places) -> Tensor:
        """Return how many negatives the rows (0) or columns (1) of a block have in it: (r,) or
        (c,).
        """
        others = places[1 - side]
        if others.start == 0 and others.stop == self.shape[1 - side]:
            return self.counts(side, positive=False)[places[side]]
        r, c = places
        pairs = torch.ones(r.stop - r.start, c.stop - c.start, device=self.device)
        return self.exclude_(pairs, places, 0.0).sum(1 - side)

    def _counts_by_ids(self, side: int, positive: bool) -> Tensor:
        """Return :meth:`counts` of one side, from sorted ids."""
        own = self.ids[side]
        if own is None:
            positives = torch.ones(self.shape[side], dtype=torch.int64, device=self.device)
            return positives if positive else self.shape[1 - side] - positives
        ignored = self.ignored[side]
        if positive:
            counts = self._counts_of_classes(side)
        else:
            candidates: Any = self.shape[1 - side]
            others_ignored = self.ignored[1 - side]
            if others_ignored is not None:
                candidates = (~others_ignored).sum()
            counts = candidates - self.counts(side, positive=True)
        return counts if ignored is None else counts.masked_fill(ignored, 0)

    def _counts_of_classes(self, side: int) -> Tensor:
        """Return the (A,) numbers of entries of the other side with each id."""
        found = self._occurrences()
        if side != self._shorter:
            return found.counts
        own = self.ids[side]
        assert own is not None
        # Entries of no class add 0, some of them behind the last one.
        of_class = found.counts.new_zeros(own.shape[0] + 1)
        of_class.index_add_(0, found.first, (found.counts > 0).to(of_class.dtype))
        return of_class[torch.searchsorted(found.ordered, own)]

    def _counts_in_mask(self, side: int, positive: bool) -> Tensor:
        """Return :meth:`counts` of one side, from the mask of all pairs."""
        if positive:
            return self.all_positive().sum(1 - side)
        excluded = self.all_excluded("negatives")
        assert excluded is not None
        return self.shape[1 - side] - excluded.sum(1 - side)

    @kept
    def _counts_by_masks(self) -> list[tuple[Tensor, Tensor]]:
        """Return the numbers of negatives and of positives of each side, from masks of blocks."""
        of_both = torch.zeros(2, sum(self.shape), dtype=torch.int64, device=self.device)
        of_rows, of_cols = of_both.split(self.shape, 1)
        for rows in self._blocks():
            for kind, mask in enumerate((self.negative(rows), self.positive(rows))):
                of_rows[kind, rows] = mask.sum(1)
                of_cols[kind] += mask.sum(0)
        return [(of_rows[0], of_rows[1]), (of_cols[0], of_cols[1])]

    @property
    def _shorter(self) -> int:
        """The side with fewer entries, or the columns."""
        return int(self.shape[1] <= self.shape[0])

    @kept
    def _occurrences(self) -> Occurrences:
        """Return where the ids of the longer side are among the sorted ones of the shorter."""
        shorter = self._shorter
        own = self.ids[shorter]
        others = self.ids[1 - shorter]
        assert own is not None and others is not None
        ordered, order = torch.sort(own, stable=True)
        # int32 takes half the memory: of a million entries, 8 MB for 16.
        first = torch.searchsorted(ordered, others, out_int32=True)
        count = torch.searchsorted(ordered, others, right=True, out_int32=True).sub_(first)
        ignored = self.ignored[1 - shorter]
        if ignored is not None:
            count.masked_fill_(ignored, 0)
        return Occurrences(ordered, order, first, count)

    @kept
    def numbers(self) -> Numbers:
        """Return how many positives there are.

        The host reads nothing else of ids. On an accelerator it waits for it.
        """
        if 0 in self.shape:
            return Numbers(0, (0, 0), (0, 0))
        if self.one_to_one:
            return Numbers(min(self.shape), (1, 1), (1, 1))
        of_rows = self.counts(0, positive=True)
        of_cols = self.counts(1, positive=True)
        low_row, high_row = of_rows.aminmax()
        low_col, high_col = of_cols.aminmax()
        numbers = torch.stack([of_rows.sum(), low_row, high_row, low_col, high_col])
        total, row_least, row_most, col_least, col_most = numbers.tolist()
        return Numbers(total, (row_most, col_most), (row_least, col_least))

    def is_complete(self, side: int) -> bool:
        """Return whether each row (0) or column (1) certainly has a positive and a negative."""
        if self.one_to_one:
            return min(self.shape) > 1
        if not self.others_are_negatives or not self.all_exist:
            return False
        if not self.listable or self.device is None or self.device.type != "cpu":
            return False
        numbers = self.numbers()
        return numbers.least[side] > 0 and numbers.most[side] < self.shape[1 - side]

    @property
    def are_few(self) -> bool:
        """Whether no row and no column has many positives, so that pairs are best listed."""
        return self.one_to_one or max(self.numbers().most) <= FEW

    @property
    @kept
    def listed(self) -> tuple[Tensor, Tensor]:
        """The (P,) row and (P,) column indices of the positive pairs, sorted by row."""
        if self.one_to_one:
            i = torch.arange(min(self.shape), device=self.device)
            return i, i
        own = self.ids[0]
        on_host = own is None or host_may_read(own)
        if self._is_small and on_host:  # elsewhere the host would wait a second time for it
            rows, cols = self.all_positive().nonzero(as_tuple=True)
            return rows, cols
        if not self.by_ids:
            return self._listed_by_masks()
        # Of each entry of the longer side, those of the shorter one are next to each other.
        _, order, first, count = self._occurrences()
        total = self.numbers().total
        # 0 0 0 1 2 2 … for counts 3, 1, 2
        long_index = torch.repeat_interleave(count, output_size=total).long()
        number = torch.arange(total, device=self.device)
        slot = number - torch.searchsorted(long_index, long_index)  # 0 1 2 0 0 1 …
        short_index = order[first[long_index] + slot]
        if self._shorter == 1:
            return long_index, short_index
        short_index, order = torch.sort(short_index, stable=True)
        return short_index, long_index[order]

    def _listed_by_masks(self) -> tuple[Tensor, Tensor]:
        """Return :attr:`listed`, from masks."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        of_rows = [nothing]
        of_cols = [nothing]
        for rows in self._blocks():
            i, j = self.positive(rows).nonzero(as_tuple=True)
            of_rows.append(i + rows.start)
            of_cols.append(j)
        return torch.cat(of_rows), torch.cat(of_cols)

    @kept
    def classes(self, side: int) -> Classes:
        """Return the classes of a side's entries by their ids: positives have the same."""
        ids = self.ids[side]
        assert ids is not None
        found = self._occurrences()
        size = len(found.ordered) + 1
        if side == self._shorter:
            place = torch.searchsorted(found.ordered, ids)
            known = ids != IGNORE_ID
        else:
            place = found.first
            known = found.counts > 0
        # Entries of no class are many in a memory: with one number, they would be added one by one.
        spread = torch.arange(len(ids), device=self.device) % size
        return Classes(size, torch.where(known, place, spread), known)

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

    # ------------------------------------------------------------------------------------ weights

    def weight_matrix(self) -> Tensor:
        """Return the (N, M) weights of the pairs that match, 0 elsewhere."""
        if self._weights is not None:
            return self._weights
        return self.positive().to(self._weight_dtype)

    def matrix(self) -> Tensor:
        """Return the (N, M) matrix of matches again: nan for pairs that are neither."""
        assert self.matches is not None
        whole = self.weight_matrix()
        return whole.masked_fill(self.matches == 2, torch.nan)

    def weight_sums(self, side: int) -> Tensor:
        """Return the (A,) sums of the weights of each row's (0) or column's (1) matches."""
        if self._weights is None:
            return self.counts(side, positive=True)
        return self._weights.sum(1 - side)

    def listed_weights(self) -> Tensor:
        """Return the (P,) weights of the pairs in :attr:`listed`."""
        i, j = self.listed
        if self._weights is None:
            return torch.ones(len(i), device=self.device)
        return self._weights[i, j]


# ------------------------------------------------------------------------------------------ helpers


def are_sets(ids: Ids) -> bool:
    """Return whether rows or columns have sets of labels."""
    rows, cols = ids
    return (rows is not None and rows.dim() == 2) or (cols is not None and cols.dim() == 2)


def compared_ids(n: int, rows: Tensor | None, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids of n rows, which are by default their numbers, and of columns; sets of labels
    of both sides, if one side has sets.
    """
    if rows is None:
        rows = torch.arange(n, device=cols.device)
    if rows.dim() != cols.dim():
        rows = as_sets(rows)
        cols = as_sets(cols)
    return rows.contiguous(), cols.contiguous()


def states_of(matches: Tensor) -> Tensor:
    """Return an (N, M) uint8 copy of a matrix: 1 for a match, 0 for a negative, 2 for neither.

    The backward pass reads it, too, and the matrix may have been modified by then.
    """
    matches = matches.detach()
    states = (matches > 0).to(torch.uint8)
    if matches.is_floating_point():
        states.masked_fill_(matches.isnan(), 2)
    return states


def same_numbers(
    shape: tuple[int, int], device: torch.device | None, rows: slice, cols: slice
) -> Tensor:
    """Return the (r, c) bool mask of the pairs of row i with column i."""
    n, m = shape
    if rows == cols == ALL:
        return torch.eye(n, m, dtype=torch.bool, device=device)
    row_numbers = torch.arange(n, device=device)[rows, None]
    return row_numbers == torch.arange(m, device=device)[None, cols]


def as_sets(labels: Tensor) -> Tensor:
    """Return ids (A,) as sets of one label (A, 1), and sets as they are."""
    return labels[:, None] if labels.dim() == 1 else labels


def shares_label(rows: Tensor, cols: Tensor) -> Tensor:
    """Return the (r, c) bool mask of the sets (r, k) and (c, l) that share a label.

    On the CPU, popular labels are found by a product of indicators, and the others, of which few
    are equal, by sorting. Sets of 16 labels take 0.03 of the time of comparing each with each, 1024
    x 1024 sets of 5000 labels (``pytest benchmarks/test_micro.py --benchmark-enable -k
    label_sets``).
    """
    rows = as_sets(rows)
    cols = as_sets(cols)
    if host_may_read(rows):
        popular = popular_labels(rows, cols)
        shared = indicators(rows, popular) @ indicators(cols, popular).T > 0
        shared[equal_labels(rows, cols, popular)] = True
        return shared
    shared = torch.zeros(len(rows), len(cols), dtype=torch.bool, device=rows.device)
    for own in rows.unbind(1):
        exists = (own != IGNORE_ID)[:, None]
        for other in cols.unbind(1):
            shared |= (own[:, None] == other) & exists
    return shared


def popular_labels(rows: Tensor, cols: Tensor) -> Tensor:
    """Return the labels that more than ``POPULAR`` of all pairs of sets (r, k) and (c, l) share.

    They are at most ``sqrt(k l / POPULAR)``, and the pairs that share another label at most
    ``sqrt(k l POPULAR)`` times r c.
    """
    labels, in_rows = rows.unique(return_counts=True)
    ordered = cols.flatten().sort().values
    in_cols = torch.searchsorted(ordered, labels, right=True) - torch.searchsorted(ordered, labels)
    is_popular = in_rows * in_cols > POPULAR * len(rows) * len(cols)
    return labels[is_popular & (labels != IGNORE_ID)]


def indicators(sets: Tensor, labels: Tensor) -> Tensor:
    """Return (A, K) float32, 1 where a set (A, k) has a label (K,) and 0 elsewhere."""
    return (sets[:, :, None] == labels).any(1).float()


def equal_labels(rows: Tensor, cols: Tensor, but: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each two equal labels in sets (r, k) and (c, l), without the
    labels ``but``.

    The labels of the rows are searched for in the sorted ones of the columns.
    """
    ordered, order = torch.sort(cols.flatten())
    own = rows.flatten()
    first = torch.searchsorted(ordered, own)
    count = torch.searchsorted(ordered, own, right=True) - first
    count.masked_fill_((own == IGNORE_ID) | torch.isin(own, but), 0)
    total = int(count.sum())
    index = torch.repeat_interleave(count, output_size=total)
    number = torch.arange(total, device=own.device)
    slot = number - (count.cumsum(0) - count)[index]
    other = order[first[index] + slot]
    return index // rows.shape[1], other // cols.shape[1]


def may_meet(groups: tuple[Tensor, Tensor], rule: Rule, rows: slice, cols: slice) -> Tensor:
    """Return the (r, c) bool mask of the pairs whose groups let them be negatives."""
    of_rows = groups[0][rows, None]
    of_cols = groups[1][cols]
    meet = of_rows == of_cols
    if rule == "other":
        meet.logical_not_()
    meet |= of_rows == IGNORE_ID
    meet |= of_cols == IGNORE_ID
    return meet


def is_diagonal(shape: tuple[int, int], rows: Tensor, cols: Tensor) -> bool:
    """Return whether ids only say that row i matches column i; False if the host may not read."""
    if shape[0] != shape[1] or rows.dim() > 1 or rows.device != cols.device:
        return False
    if not host_may_read(rows) or not torch.equal(rows, cols):
        return False
    different = rows.unique()
    return different.shape == rows.shape and int(different[0]) != IGNORE_ID


def missing_masks(rows: Tensor, cols: Tensor, device: torch.device | None) -> Ids:
    """Return the masks of rows and of columns without any id on a device, one for both if the ids
    are one.
    """
    of_rows = missing_mask(rows, device)
    return of_rows, of_rows if cols is rows else missing_mask(cols, device)


def missing_mask(ids: Tensor, device: torch.device | None = None) -> Tensor | None:
    """Return the (A,) bool mask of entries without any id, on a device, or where the ids are; None
    where there certainly are none.
    """
    if host_may_read(ids) and (ids.numel() == 0 or int(ids.amin()) != IGNORE_ID):
        return None
    mask = ids == IGNORE_ID
    if mask.dim() == 2:
        mask = mask.all(1)
    return mask.to(device)


def between(ordered: Tensor, part: slice) -> slice:
    """Return where those numbers are among ordered ones (P,) on the CPU that are in a range."""
    numbers: Any = ordered.numpy()
    return slice(
        bisect.bisect_left(numbers, part.start),
        bisect.bisect_left(numbers, part.stop),
    )


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
