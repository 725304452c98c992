"""Who matches and who may be a negative, where one id for each entry does not say it: sets of
labels, groups, or a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .pairs import EVERYTHING, IGNORE_ID, Over, Pairs
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


class Labels(NamedTuple):
    """Entries match if they share a label. Groups say which others are negatives.

    ``IGNORE_ID`` is no label, and an entry with no other does not exist. As a group it is open to
    all.
    """

    rows: Tensor  # (N, k) int64
    cols: Tensor  # (M, l) int64
    groups: tuple[Tensor, Tensor] | None  # (N,) and (M,) int64
    rule: Rule  # whether negatives are of the same group, or of another one

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, M)."""
        return len(self.rows), len(self.cols)

    @property
    def device(self) -> torch.device:
        """Where masks are computed."""
        return self.rows.device

    def positive(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that share a label."""
        own_labels = self.rows[rows]
        other_labels = self.cols[cols]
        shared = own_labels.new_zeros(len(own_labels), len(other_labels), dtype=torch.bool)
        for own in own_labels.unbind(1):
            is_label = (own != IGNORE_ID)[:, None]
            for other in other_labels.unbind(1):
                shared |= (own[:, None] == other) & is_label
        return shared

    def negative(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that share no label and may meet."""
        exist = (self.rows[rows] != IGNORE_ID).any(1)
        others_exist = (self.cols[cols] != IGNORE_ID).any(1)
        mask = ~self.positive(rows, cols) & exist[:, None] & others_exist
        if self.groups is None:
            return mask
        own, others = self.groups[0][rows, None], self.groups[1][cols]
        meet = own == others
        if self.rule == "other":
            meet = ~meet
        return mask & (meet | (own == IGNORE_ID) | (others == IGNORE_ID))


class Matches(NamedTuple):
    """Pairs match where a matrix is above 0, and are negatives where it is 0; nan is neither."""

    matrix: Tensor  # (N, M)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, M)."""
        n, m = self.matrix.shape
        return n, m

    @property
    def device(self) -> torch.device:
        """Where masks are computed."""
        return self.matrix.device

    def positive(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the entries above 0."""
        return self.matrix[rows, cols] > 0

    def negative(self, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the entries that are 0."""
        return self.matrix[rows, cols] == 0


class RelatedPairs(Pairs):
    """The positive and negative pairs of a matrix (N, M) by a relation.

    Masks are made tile by tile, so that memory does not grow with N times M.
    """

    def __init__(self, relation: Relation):
        super().__init__(relation.shape, (None, None), relation.device)
        self.relation = relation
        self.one_to_one = False

    @property
    def others_are_negatives(self) -> bool:
        """False, as pairs may be neither positive nor negative."""
        return False

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
        zeros = [torch.zeros(size, dtype=torch.int64, device=self.device) for size in self.shape]
        counts = [(x, x.clone()) for x in zeros]
        for rows in self._rows():
            positive = self.relation.positive(rows, EVERYTHING)
            masks = positive, self.relation.negative(rows, EVERYTHING)
            for kind, mask in enumerate(masks):
                counts[0][kind][rows] = mask.sum(1)
                counts[1][kind].add_(mask.sum(0))
        return counts

    def _listed(self) -> tuple[Tensor, Tensor]:
        parts = []
        for rows in self._rows():
            i, j = self.relation.positive(rows, EVERYTHING).nonzero().unbind(1)
            parts.append(torch.stack([i + rows.start, j]))
        if not parts:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return nothing, nothing
        i, j = torch.cat(parts, 1)
        return i, j
