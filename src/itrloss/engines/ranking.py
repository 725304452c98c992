"""Answers without a gradient: the best columns of each row, and where its positives rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .positives import Positives
from .tiles import SIDES, Pair, Source, Tile, fused, tiles

_MANY_SLOTS = 16  # from so many positives a row, sorting the row beats comparing it once per positive


def topk(source: Source, k: tuple[int, int], biases: Pair) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The k highest ``S_ij + bias_j`` of each row (and column): values and indices, best first."""
    values = [source.rows.new_empty(size, 0, dtype=source.dtype) for size in source.shape]
    index = [v.new_empty(v.shape, dtype=torch.int64) for v in values]
    best: list[dict[int, tuple[Tensor, Tensor]]] = [{}, {}]
    for tile in tiles(source, scratch=1):
        for side, dim in SIDES:
            if k[side] == 0:
                continue
            scores = tile.scores
            if (bias := biases[side]) is not None:
                scores = torch.add(scores, tile.spread(bias, 1 - dim), out=tile.scratch[0])
            value, where = scores.topk(min(k[side], scores.shape[dim]), dim=dim)
            start, first = (tile.r0, tile.c0) if dim == 1 else (tile.c0, tile.r0)
            value, where = (x if dim == 1 else x.T for x in (value, where + first))
            if start in best[side]:
                old_value, old_where = best[side][start]
                value, order = torch.cat([old_value, value], 1).topk(
                    min(k[side], old_value.shape[1] + value.shape[1]), dim=1
                )
                where = torch.cat([old_where, where], 1).gather(1, order)
            best[side][start] = value, where
    for side, _ in SIDES:
        if k[side]:
            parts = [best[side][start] for start in sorted(best[side])]
            values[side], index[side] = (torch.cat(list(x)) for x in zip(*parts, strict=True))
    return (values[0], values[1]), (index[0], index[1])


def ranks(
    source: Source, biases: Pair, asked: tuple[bool, bool], optimistic: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Per row, the 1-based ranks of its positives among all columns, ascending, padded with 0: (N, most positives).

    A negative with the score of a positive is ahead of it, unless ``optimistic``. The positive's score is read from
    the very product that its rivals' scores come from.
    """
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
    for tile in tiles(source, scratch=1):
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


def _finish(table: Tensor | None, count: Tensor | None) -> Tensor | None:
    if table is None or count is None:
        return None
    missing = table.isnan()
    ahead = count.masked_fill(missing, torch.iinfo(torch.int64).max // 2).sort(dim=0).values
    place = torch.arange(1, len(table) + 1, device=table.device)[:, None]
    return (ahead + place).masked_fill(missing.sort(dim=0).values, 0).T
