"""Answers without a gradient: the best columns of each row, and where its positives rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .positives import Positives
from .tiles import SIDES, Pair, Source, Tile, fused, tiles

_MANY_SLOTS = 16  # from so many positives a row, sorting the row beats comparing it once per positive
_PARTIAL_SORT = 64  # PyTorch on a CPU finds the k best of at least 64 k values some ten times as fast as of fewer

Tops = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
Ranks = tuple[Tensor | None, Tensor | None]


def topk(source: Source, k: tuple[int, int], biases: Pair) -> Tops:
    """The k highest ``S_ij + bias_j`` of each row (and column): values and indices, best first."""
    best = [_Best(source, side, k[side]) for side in (0, 1)]
    for tile in tiles(source, scratch=1):
        for side, dim in SIDES:
            if k[side]:
                scores = tile.scores
                if (bias := biases[side]) is not None:
                    scores = torch.add(scores, tile.spread(bias, 1 - dim), out=tile.scratch[0])
                best[side].add(tile, scores)
    values, indices = zip(*(b.finish() for b in best), strict=True)
    return values, indices  # type: ignore[return-value]


def ranks(source: Source, biases: Pair, asked: tuple[bool, bool], optimistic: bool) -> Ranks:
    """Per row, the 1-based ranks of its positives among all columns, ascending, padded with 0: (N, most positives).

    A negative with the score of a positive is ahead of it, unless ``optimistic``. The positive's score is read from
    the very product that its rivals' scores come from.
    """
    return _ranked(source, biases, asked, optimistic, None)


def ranks_and_top(source: Source, k: tuple[int, int], biases: Pair, optimistic: bool) -> tuple[Ranks, Tops]:
    """:func:`ranks` and :func:`topk` of the sides with a k above 0, from one pass over the scores."""
    asked = k[0] > 0, k[1] > 0
    if source.fused:
        return ranks(source, biases, asked, optimistic), topk(source, k, biases)
    best = [_Best(source, side, k[side]) for side in (0, 1)]
    found = _ranked(source, biases, asked, optimistic, best)
    values, indices = zip(*(b.finish() for b in best), strict=True)
    return found, (values, indices)  # type: ignore[return-value]


def _ranked(
    source: Source, biases: Pair, asked: tuple[bool, bool], optimistic: bool, best: list[_Best] | None
) -> Ranks:
    pairs = Positives.of(source)
    tables = _score_tables(source, pairs, biases, asked)
    if source.fused and all(table is None or len(table) <= _MANY_SLOTS for table in tables):
        counts = fused().ranks_counted(source, tables, biases, optimistic)
        return _finish(tables[0], counts[0]), _finish(tables[1], counts[1])
    counts = [None if table is None else torch.zeros_like(table, dtype=torch.int64) for table in tables]
    for tile in tiles(source, scratch=1):
        t = tile.scratch[0]
        for side, dim in SIDES:
            table, count = tables[side], counts[side]
            if table is None or count is None:
                continue
            _biased(source, tile, biases[side], dim, t)
            if best is not None:
                best[side].add(tile, t)
            pairs.fill_(t, tile, -math.inf)
            if len(table) > _MANY_SLOTS:
                ordered = (t if dim == 1 else t.T).sort(dim=1).values.contiguous()
                wanted = tile.part(table.T, dim).contiguous()
                found = torch.searchsorted(ordered, wanted, right=optimistic)
                tile.part(count.T, dim).add_(ordered.shape[1] - found)
                continue
            for threshold, into in zip(table, count, strict=True):
                compare = torch.gt if optimistic else torch.ge
                tile.part(into, dim).add_(compare(t, tile.spread(threshold, dim)).sum(dim))
    return _finish(tables[0], counts[0]), _finish(tables[1], counts[1])


class _Best:
    """The k best candidates of each anchor of one side, of the tiles seen so far."""

    def __init__(self, source: Source, side: int, k: int):
        self.source, self.side, self.k = source, side, k
        self.found: dict[int, tuple[Tensor, Tensor]] = {}  # of the anchors from this one on: values and indices
        self.space: Tensor | None = None

    def add(self, tile: Tile, scores: Tensor) -> None:
        """Scores of the tile's shape, with whatever was added to them."""
        x, start, first = (scores, tile.r0, tile.c0) if self.side == 0 else (scores.T, tile.c0, tile.r0)
        old, size = self.found.get(start), x.shape[1]
        k = min(self.k, size + (0 if old is None else old[0].shape[1]))
        if old is not None and x.device.type == "cpu" and self._add_better(scores, old, start, first):
            return
        if x.device.type == "cpu" and size < _PARTIAL_SORT * k <= 4 * size:
            self.found[start] = self._of_padded(x, k, old, first)
            return
        value, where = x.topk(min(k, size), dim=1)
        where = where + first
        if old is not None:
            value, order = torch.cat([old[0], value], 1).topk(k, dim=1)
            where = torch.cat([old[1], where], 1).gather(1, order)
        self.found[start] = value, where

    def _add_better(self, scores: Tensor, old: tuple[Tensor, Tensor], start: int, first: int) -> bool:
        """Take in what is better than the worst that was found before, mostly little; False: that would not pay."""
        values, indices = old
        worst = values[:, -1]
        if values.shape[1] < self.k or not bool(worst.isfinite().all()):
            return False
        better = (scores > (worst[:, None] if self.side == 0 else worst)).nonzero()
        if len(better) > self.k * len(values):
            return False
        anchor, candidate = better.unbind(1) if self.side == 0 else better.flip(1).unbind(1)
        new = scores[better[:, 0], better[:, 1]]
        if self.side:
            anchor, order = anchor.sort(stable=True)
            candidate, new = candidate[order], new[order]
        count = torch.bincount(anchor, minlength=len(values))
        place = torch.arange(len(anchor)) - (count.cumsum(0) - count)[anchor]
        changed = count.nonzero().squeeze(1)
        row = torch.searchsorted(changed, anchor)
        width = int(count.amax())
        more = values.new_full((len(changed), width), -math.inf), indices.new_zeros(len(changed), width)
        more[0][row, place], more[1][row, place] = new, candidate + first
        both, order = torch.cat([values[changed], more[0]], 1).topk(self.k, dim=1)
        values[changed] = both
        indices[changed] = torch.cat([indices[changed], more[1]], 1).gather(1, order)
        return True

    def _of_padded(self, x: Tensor, k: int, old: tuple[Tensor, Tensor] | None, first: int) -> tuple[Tensor, Tensor]:
        """Those of before stand behind the new ones, and -inf behind both, up to a size that is sorted fast."""
        n, size = x.shape
        width = size + (0 if old is None else old[0].shape[1])
        wide = max(width, _PARTIAL_SORT * k)
        if self.space is None or self.space.shape[0] < n or self.space.shape[1] < wide:
            self.space = torch.empty(n, wide, dtype=x.dtype)
        space = self.space[:n, :wide]
        space[:, :size] = x
        space[:, width:] = -math.inf
        least = torch.finfo(x.dtype).min
        if old is not None:
            space[:, size:width] = old[0]
        space[:, :width].clamp_min_(least)  # so that -inf as a score is still ahead of nothing
        value, where = space.topk(k, dim=1)
        value.masked_fill_(value == least, -math.inf)
        found = where + first
        if old is not None:
            found = torch.where(where < size, found, old[1].gather(1, (where - size).clamp_min_(0)))
        return value, found

    def finish(self) -> tuple[Tensor, Tensor]:
        """(anchors, k) values and indices."""
        if not self.found:
            anchors = self.source.shape[self.side]
            empty = self.source.rows.new_empty(anchors, 0, dtype=self.source.dtype)
            return empty, empty.long()
        parts = [self.found[start] for start in sorted(self.found)]
        values, indices = (torch.cat(list(x)) for x in zip(*parts, strict=True))
        return values, indices


def _biased(source: Source, tile: Tile, bias: Tensor | None, dim: int, out: Tensor) -> Tensor:
    if bias is not None:
        torch.add(tile.scores, tile.spread(bias, 1 - dim), out=out)
    else:
        out.copy_(tile.scores)
    if bias is None and source.cols is not None:  # cosines are finite
        return out
    return out.clamp_min_(torch.finfo(out.dtype).min)  # -inf is kept for what does not count


def _score_tables(source: Source, pairs: Positives, biases: Pair, asked: tuple[bool, bool]) -> list[Tensor | None]:
    """(slots, anchors): the scores of each anchor's positives; nan where it has fewer."""
    tables: list[Tensor | None] = []
    places = []
    for side, view in enumerate((pairs, pairs.T)):
        if not asked[side]:
            tables.append(None)
            places.append(None)
            continue
        anchor, other, slot = view.slots()
        width = int(slot.max()) + 1 if slot.numel() else 0
        tables.append(source.rows.new_full((width, view.n), math.nan, dtype=source.dtype))
        places.append((anchor, other, slot))
    i, j = pairs.pairs()
    for tile in tiles(source, scratch=1, wanted=_holding(i, j)):
        for side, dim in SIDES:
            table, place = tables[side], places[side]
            if table is None or place is None:
                continue
            t = _biased(source, tile, biases[side], dim, tile.scratch[0])
            anchor, other, slot = place
            i, j = (anchor, other) if dim == 1 else (other, anchor)
            inside = (i >= tile.r0) & (i < tile.r1) & (j >= tile.c0) & (j < tile.c1)
            table[slot[inside], anchor[inside]] = t[i[inside] - tile.r0, j[inside] - tile.c0]
    return tables


def _holding(i: Tensor, j: Tensor) -> Callable[[int, int, int, int], bool]:
    """Whether one of these pairs lies in a tile: captions that stand by their images are in a few tiles of many."""

    def wanted(r0: int, r1: int, c0: int, c1: int) -> bool:
        return bool(((i >= r0) & (i < r1) & (j >= c0) & (j < c1)).any())

    return wanted


def _finish(table: Tensor | None, count: Tensor | None) -> Tensor | None:
    if table is None or count is None:
        return None
    missing = table.isnan()
    ahead = count.masked_fill(missing, torch.iinfo(torch.int64).max // 2).sort(dim=0).values
    place = torch.arange(1, len(table) + 1, device=table.device)[:, None]
    return (ahead + place).masked_fill(missing.sort(dim=0).values, 0).T
