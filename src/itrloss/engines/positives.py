"""Which pairs are positive: from integer ids, never as an N x M mask that outlives a tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .tiles import Source, Tile

_DENSE_MASK = 2**16  # below so many scores one comparison is cheaper than finding the pairs
_PAIR_CHUNK = 2**16  # positive pairs handled at once


class Positives:
    """The positive pairs of a source. Ids left out on both sides mean that row i matches column i."""

    def __init__(self, n: int, m: int, row_ids: Tensor | None, col_ids: Tensor | None, device: torch.device):
        self.n, self.m, self.row_ids, self.col_ids, self.device = n, m, row_ids, col_ids, device
        self._ranges: tuple[Tensor, Tensor, Tensor] | None = None
        self._transposed: Positives | None = None
        self._pairs: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, source: Source) -> Positives:
        return cls(*source.shape, source.row_ids, source.col_ids, source.rows.device)

    @property
    def T(self) -> Positives:
        """The same pairs, seen from the columns."""
        if self._transposed is None:
            self._transposed = Positives(self.m, self.n, self.col_ids, self.row_ids, self.device)
        return self._transposed

    @property
    def diagonal(self) -> bool:
        return self.row_ids is None

    @property
    def listable(self) -> bool:
        """Whether pairs may be listed without making an accelerator wait for the host."""
        return self.diagonal or self.device.type == "cpu"

    def ranges(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(order, first, last)``: row i's positives are the columns ``order[first[i]:last[i]]``."""
        if self._ranges is None:
            assert self.row_ids is not None and self.col_ids is not None
            ids, order = torch.sort(self.col_ids, stable=True)
            rows = self.row_ids.contiguous()
            self._ranges = order, torch.searchsorted(ids, rows), torch.searchsorted(ids, rows, right=True)
        return self._ranges

    def counts(self) -> Tensor:
        """(N,) int64: how many positives each row has."""
        if self.diagonal:
            return torch.ones(self.n, dtype=torch.int64, device=self.device)
        _, first, last = self.ranges()
        return last - first

    def pairs(self, r0: int = 0, r1: int | None = None) -> tuple[Tensor, Tensor]:
        """(P,) row and (P,) column indices of the positive pairs of rows r0 … r1, sorted by row."""
        if self.diagonal:
            i = torch.arange(r0, min(self.n if r1 is None else r1, self.m), device=self.device)
            return i, i
        whole = r0 == 0 and (r1 is None or r1 >= self.n)
        if whole and self._pairs is not None:
            return self._pairs
        order, first, last = self.ranges()
        first, last = first[r0:r1], last[r0:r1]
        count = last - first
        i = torch.repeat_interleave(count)  # 0 0 0 1 2 2 …
        within = torch.arange(i.numel(), device=i.device) - (count.cumsum(0) - count)[i]
        found = i + r0, order[first[i] + within]
        if whole and i.numel() <= _PAIR_CHUNK:
            self._pairs = found
        return found

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """:meth:`pairs`, a bounded number at a time (or one row's, if that is more)."""
        if self.diagonal:
            for r0 in range(0, self.n, _PAIR_CHUNK):
                yield self.pairs(r0, min(self.n, r0 + _PAIR_CHUNK))
            return
        counts = self.counts()
        if int(counts.sum()) <= _PAIR_CHUNK:
            yield self.pairs()
            return
        total = counts.cumsum(0)
        r0, done = 0, 0
        while r0 < self.n:
            r1 = max(r0 + 1, int(torch.searchsorted(total, done + _PAIR_CHUNK, right=True)))
            yield self.pairs(r0, r1)
            r0, done = r1, int(total[r1 - 1])

    def slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs and, for each, its number among its row's positives (0, 1, …)."""
        i, j = self.pairs()
        if self.diagonal:
            return i, j, torch.zeros_like(i)
        count = self.counts()
        return i, j, torch.arange(i.numel(), device=i.device) - (count.cumsum(0) - count)[i]

    def fill_(self, x: Tensor, tile: Tile, value: float | Tensor, dim: int = 1) -> Tensor:
        """Overwrite the positive entries of a tile-shaped ``x``: by a number, or one per row (``dim=1``) or column."""
        if self.diagonal:
            offset = tile.r0 - tile.c0
            if -x.shape[0] < offset < x.shape[1]:
                place = x.diagonal(offset)
                if isinstance(value, Tensor):
                    start = max(tile.r0, tile.c0)
                    part = value if value.numel() in (1, place.numel()) else value[start : start + place.numel()]
                    place.copy_(part)
                else:
                    place.fill_(value)
            return x
        assert self.row_ids is not None and self.col_ids is not None
        if self.device.type == "cpu" and x.numel() > _DENSE_MASK:
            _, first, last = self.ranges()
            if int((last[tile.r0 : tile.r1] - first[tile.r0 : tile.r1]).sum()) * 16 <= x.numel():
                i, j = self.pairs(tile.r0, tile.r1)
                if x.shape[1] < self.m:
                    inside = (j >= tile.c0) & (j < tile.c1)
                    i, j = i[inside], j[inside]
                if isinstance(value, Tensor):
                    value = value if value.numel() == 1 else value[i if dim == 1 else j]
                x[i - tile.r0, j - tile.c0] = value
                return x
        if isinstance(value, Tensor):
            return torch.where(self.mask(tile), tile.spread(value, dim), x, out=x)
        return x.masked_fill_(self.mask(tile), value)

    def read_diagonal(self, tile: Tile, into: Tensor) -> None:
        """Copy the scores of row i with column i that this tile holds."""
        offset = tile.r0 - tile.c0
        if -tile.scores.shape[0] < offset < tile.scores.shape[1]:
            found = tile.scores.diagonal(offset)
            start = max(tile.r0, tile.c0)
            (into if into.shape == found.shape else into[start : start + found.numel()]).copy_(found)

    def mask(self, tile: Tile) -> Tensor:
        """Boolean, of the tile's shape."""
        if self.diagonal:
            i = torch.arange(tile.r0, tile.r1, device=self.device)
            return i[:, None] == torch.arange(tile.c0, tile.c1, device=self.device)
        assert self.row_ids is not None and self.col_ids is not None
        return self.row_ids[tile.r0 : tile.r1, None] == self.col_ids[tile.c0 : tile.c1]
