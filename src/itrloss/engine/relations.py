"""Who matches and who may be a negative, where one id for each entry does not say it: sets of
labels, groups, or a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from .pairs import EVERYTHING, Over, Pairs, ignored_mask
from .vectors import host_may_read

Rule = Literal["same", "other"]
_AT_ONCE = 2**20  # pairs that are counted or listed at once


class Relation(Protocol):
    """What the pairs of a matrix (N, M) are to each other."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, M)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where masks are computed."""
        ...

    def positive(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that match."""
        ...

    def negative(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that are negatives; others are neither."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether matches have weights that are not all 1."""
        ...

    def weights(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) weights of the pairs that match, with finite values elsewhere."""
        ...


class Labels:
    """Entries match if they share a label. Groups say which others are negatives.

    ``IGNORE_ID`` is no label, and an entry with no other does not exist. As a group it is open to
    all.
    """

    def __init__(
        self,
        rows: Tensor,  # (N, k) int64
        cols: Tensor,  # (M, l) int64
        groups: tuple[Tensor, Tensor] | None = None,  # (N,) and (M,) int64
        rule: Rule = "same",  # whether negatives are of the same group, or of another one
    ):
        self.labels = rows, cols
        self.groups = groups
        self.rule: Rule = rule
        self.shape = len(rows), len(cols)
        self.device = rows.device
        # Bool masks, and None where there certainly are none: a tile then needs fewer passes.
        self.no_label = [[ignored_mask(x) for x in labels.unbind(1)] for labels in self.labels]
        self.missing = [missing_mask(masks) for masks in self.no_label]
        self.open: list[Tensor | None] = [None, None]
        if groups is not None:
            self.open = [ignored_mask(x) for x in groups]

    @property
    def ids(self) -> tuple[Tensor, Tensor] | None:
        """The (N,) and (M,) labels where each entry has one; None for sets of labels."""
        rows, cols = self.labels
        if rows.shape[1] != 1 or cols.shape[1] != 1:
            return None
        return rows[:, 0], cols[:, 0]

    @property
    def has_weights(self) -> bool:
        """False, as matches by labels weigh 1."""
        return False

    def weights(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) weights, which are 1."""
        return self.positive(rows, cols).float()

    def positive(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that share a label."""
        shared: Tensor | None = None
        for own, no_label in zip(self.labels[0].unbind(1), self.no_label[0], strict=True):
            for other in self.labels[1].unbind(1):
                same = own[rows, None] == other[cols]
                if no_label is not None:
                    same &= ~no_label[rows, None]
                shared = same if shared is None else shared.logical_or_(same)
        assert shared is not None
        return shared

    def negative(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that share no label and may meet."""
        mask = self.positive(rows, cols).logical_not_()
        row_missing, col_missing = self.missing
        if row_missing is not None:
            mask &= ~row_missing[rows, None]
        if col_missing is not None:
            mask &= ~col_missing[cols]
        if self.groups is not None:
            mask &= self.may_meet(self.groups, rows, cols)
        return mask

    def may_meet(self, groups: tuple[Tensor, Tensor], rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs whose groups let them be negatives."""
        of_rows, of_cols = groups
        meet = of_rows[rows, None] == of_cols[cols]
        if self.rule == "other":
            meet.logical_not_()
        row_open, col_open = self.open
        if row_open is not None:
            meet |= row_open[rows, None]
        if col_open is not None:
            meet |= col_open[cols]
        return meet


def missing_mask(no_label: Sequence[Tensor | None]) -> Tensor | None:
    """Return the bool mask of entries without any label; None where there certainly are none."""
    missing: Tensor | None = None
    for mask in no_label:
        if mask is None:
            return None
        missing = mask if missing is None else missing & mask
    return missing


class Matches:
    """Pairs match where a matrix is above 0, and are negatives where it is 0; nan is neither."""

    def __init__(self, matrix: Tensor, has_weights: bool):
        n, m = matrix.shape
        self.shape = n, m
        self.device = matrix.device
        self.has_weights = has_weights
        matrix = matrix.detach()
        #: (N, M) uint8, 1 for a match, 0 for a negative, 2 for neither. It is a copy: the backward
        #: pass reads it, too, and the matrix may have been modified by then.
        self.states = (matrix > 0).to(torch.uint8)
        if matrix.is_floating_point():
            self.states.masked_fill_(matrix.isnan(), 2)
        self.dtype = matrix.dtype if matrix.is_floating_point() else torch.float32
        self.own_weights = matrix.nan_to_num(0.0) if has_weights else None

    def positive(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the entries above 0."""
        return self.states[rows, cols] == 1

    def negative(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the entries that are 0."""
        return self.states[rows, cols] == 0

    def weights(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) entries, with 0 in place of nan."""
        if self.own_weights is None:
            return self.positive(rows, cols).to(self.dtype)
        return self.own_weights[rows, cols]

    def matrix(self) -> Tensor:
        """Return the (N, M) matrix."""
        everything = slice(None), slice(None)
        return self.weights(*everything).masked_fill(self.states == 2, torch.nan)


class SparseMatches:
    """:class:`Matches` of a sparse matrix: the entries that it leaves out are 0."""

    def __init__(self, matrix: Tensor, has_weights: bool):
        n, m = matrix.shape
        self.shape = n, m
        self.device = matrix.device
        self.has_weights = has_weights
        entries = matrix.coalesce()  # sorted by row
        self.rows, self.cols = entries.indices()
        self.values = entries.values().detach().clone()  # see Matches
        #: Where the entries of each row start, which an accelerator has to tell the host.
        boundaries = torch.arange(n + 1, device=matrix.device)
        self.starts = torch.searchsorted(self.rows, boundaries).tolist()

    def part(self, rows: slice, cols: slice) -> Tensor:
        """Return a part (r, c) of the matrix, which is not sparse."""
        top, bottom, _ = rows.indices(self.shape[0])
        left, right, _ = cols.indices(self.shape[1])
        of_rows = slice(self.starts[top], self.starts[bottom])
        i = self.rows[of_rows] - top
        j = self.cols[of_rows]
        inside = (j >= left) & (j < right)
        width = right - left
        # Entries of other columns go to a place of their own, so that the host need not wait.
        place = torch.where(inside, i * width + j - left, (bottom - top) * width)
        part = self.values.new_zeros((bottom - top) * width + 1)
        part.index_copy_(0, place, self.values[of_rows])
        return part[:-1].view(bottom - top, width)

    def positive(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the entries above 0."""
        return self.part(rows, cols) > 0

    def negative(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the entries that are 0."""
        return self.part(rows, cols) == 0

    def weights(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) entries, with 0 in place of nan."""
        return self.part(rows, cols).nan_to_num(0.0)


class RelatedPairs(Pairs):
    """The positive and negative pairs of a matrix (N, M) by a relation.

    Masks are made tile by tile, so that memory does not grow with N times M.
    """

    def __init__(self, relation: Relation):
        super().__init__(relation.shape, (None, None), relation.device)
        self.relation = relation
        self.one_to_one = False
        self.has_weights = relation.has_weights

    @property
    def others_are_negatives(self) -> bool:
        """False, as pairs may be neither positive nor negative."""
        return False

    def exists(self, side: int) -> Tensor | None:
        """Return the (A,) bool mask of the rows (0) or columns (1) that exist; None: all do.

        Entries of a matrix exist if they match something, or are a negative of something.
        """
        if isinstance(self.relation, Labels):
            missing = self.relation.missing[side]
            return None if missing is None else ~missing
        positives, negatives = self.counts(side)
        return positives + negatives > 0

    def weight_sums(self, side: int) -> Tensor:
        """Return the (A,) sums of the weights of each row's (0) or column's (1) matches."""
        sums = self._cached("weight sums", self._weight_sums_of_both)
        return sums[side]

    def _weight_sums_of_both(self) -> list[Tensor]:
        """Return the (N,) sums of the rows' weights and the (M,) of the columns'."""
        of_rows: list[Tensor] = []
        of_cols = torch.zeros(self.shape[1], device=self.device)
        for rows in self._rows():
            weights = self._weights_of_matches(rows)
            of_rows.append(weights.sum(1))
            of_cols = of_cols + weights.sum(0)
        return [torch.cat(of_rows), of_cols]

    def _weights_of_matches(self, rows: slice) -> Tensor:
        """Return the (r, M) weights of some rows' matches, 0 for other pairs."""
        matching = self.relation.positive(rows, EVERYTHING)
        return self.relation.weights(rows, EVERYTHING).masked_fill(~matching, 0.0)

    def listed_weights(self) -> Tensor:
        """Return the (P,) weights of the pairs in :attr:`listed`."""
        return self._cached("listed weights", self._listed_weights)

    def _listed_weights(self) -> Tensor:
        """Return what :meth:`listed_weights` keeps."""
        parts = [torch.empty(0, device=self.device)]
        for rows in self._rows():
            weights = self.relation.weights(rows, EVERYTHING)
            parts.append(weights[self.relation.positive(rows, EVERYTHING)])
        return torch.cat(parts)

    def weight_matrix(self) -> Tensor:
        """Return the (N, M) weights of the pairs that match, with finite values elsewhere."""
        return self.relation.weights(EVERYTHING, EVERYTHING)

    @property
    def listable(self) -> bool:
        """Whether pairs may be listed, see :class:`Pairs`."""
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            return not torch.cuda.is_current_stream_capturing()
        corner = slice(0, 1)
        return host_may_read(self.relation.positive(corner, corner))

    def excluded(self, over: Over, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that a sum leaves out."""
        if over == "positives":
            return ~self.relation.positive(rows, cols)
        counted = self.relation.negative(rows, cols)
        if over == "all":
            counted = counted | self.relation.positive(rows, cols)
        return ~counted

    def exclude_(
        self, x: Tensor, places: tuple[slice, slice], value: float, over: Over = "negatives"
    ) -> Tensor:
        """Fill the pairs that a sum leaves out with ``value``, in a part of the matrix."""
        return x.masked_fill_(self.excluded(over, *places), value)

    def _rows(self) -> Sequence[slice]:
        """Return slices of the rows whose pairs are looked at at once."""
        n, m = self.shape
        step = max(1, _AT_ONCE // max(1, m))
        return [slice(start, min(n, start + step)) for start in range(0, n, step)]

    def counts(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the (A,) numbers of positives and of negatives of each row (0) or column (1)."""
        counts = self._cached("counts", self._counts_of_both)
        return counts[side]

    def _counts_of_both(self) -> list[tuple[Tensor, Tensor]]:
        """Return the numbers of positives and negatives of each row, and those of each column."""
        zeros = [torch.zeros(size, dtype=torch.int64, device=self.device) for size in self.shape]
        of_rows, of_cols = [(x, x.clone()) for x in zeros]
        for rows in self._rows():
            positive = self.relation.positive(rows, EVERYTHING)
            negative = self.relation.negative(rows, EVERYTHING)
            for kind, mask in enumerate((positive, negative)):
                of_rows[kind][rows] = mask.sum(1)
                of_cols[kind].add_(mask.sum(0))
        return [of_rows, of_cols]

    def _listed(self) -> tuple[Tensor, Tensor]:
        """Return what :attr:`listed` keeps."""
        parts = []
        for rows in self._rows():
            i, j = self.relation.positive(rows, EVERYTHING).nonzero().unbind(1)
            parts.append(torch.stack([i + rows.start, j]))
        if not parts:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return nothing, nothing
        i, j = torch.cat(parts, 1)
        return i, j
