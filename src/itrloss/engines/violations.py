"""Margin violations: hinges of every positive pair against every negative of its members."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .pairs import PairGradient, pair_scores
from .positives import Positives
from .tiles import SIDES, Gradient, Pair, Source, fused, tiles


class _Pairs(NamedTuple):
    """The positive pairs as one side sees them, sorted by anchor."""

    i: Tensor  # (P,) rows
    j: Tensor  # (P,) columns
    scores: Tensor  # (P,)
    place: tuple[Tensor, Tensor] | None  # of each pair in a table (slots, anchors); None: one pair an anchor, in order
    thresholds: Tensor  # such a table of ``S_p - margin``, infinite where an anchor has fewer positives

    def listed(self, table: Tensor) -> Tensor:
        """(P,) entries of a table."""
        return table[0] if self.place is None else table[self.place]


def seen_from(source: Source, margin: float, asked: tuple[bool, bool]) -> list[_Pairs | None]:
    """The positive pairs and their thresholds, for each asked side."""
    pairs = Positives.of(source)
    if pairs.diagonal:  # both sides see the same
        i, j = pairs.pairs()
        scores = source.rows.diagonal() if source.cols is None else pair_scores(source, i, j)
        only = _Pairs(i, j, scores, None, (scores - margin)[None])
        return [only if a else None for a in asked]
    found: list[_Pairs | None] = []
    for side, view in enumerate((pairs, pairs.T)):
        if not asked[side]:
            found.append(None)
            continue
        a, b, slot = view.slots()
        i, j = (a, b) if side == 0 else (b, a)
        scores = pair_scores(source, i, j)
        table = scores.new_full((int(slot.max()) + 1 if slot.numel() else 0, view.n), math.inf)
        table[slot, a] = scores - margin
        found.append(_Pairs(i, j, scores, (slot, a), table))
    return found


def violations(source: Source, margin: float, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """``sum_{p in pos} sum_{j in neg} max(margin - S_p + S_j, 0)`` of each row and each column."""
    if source.fused:
        return fused().violations(source, margin, asked)
    positives, found = Positives.of(source), seen_from(source, margin, asked)
    sums = [
        source.rows.new_zeros(size if a else 0, dtype=source.dtype) for size, a in zip(source.shape, asked, strict=True)
    ]
    for tile in tiles(source, scratch=1):
        t = tile.scratch[0]
        for side, dim in SIDES:
            if (entry := found[side]) is None:
                continue
            for threshold in entry.thresholds:
                torch.sub(tile.scores, tile.spread(threshold, dim), out=t).relu_()
                tile.part(sums[side], dim).add_(positives.fill_(t, tile, 0.0).sum(dim))
    return sums[0], sums[1]


def violations_backward(
    source: Source, margin: float, grads: Pair, needs: tuple[bool, bool], in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """A violating negative is pushed down by each positive it violates, and pushes each of them up."""
    if source.fused:
        return fused().violations_backward(source, margin, grads, needs)
    positives, found = Positives.of(source), seen_from(source, margin, (grads[0] is not None, grads[1] is not None))
    gradient = Gradient(source, needs, in_place)
    active = [None if entry is None else torch.zeros_like(entry.thresholds) for entry in found]
    for tile in tiles(source, scratch=gradient.scratch(1 + in_place)):
        # The scores are looked at again after the first writing.
        out, t, written = tile.scratch[1] if in_place else gradient.of(tile), tile.scratch[0], False
        for side, dim in SIDES:
            entry, count, g = found[side], active[side], grads[side]
            if entry is None or count is None or g is None:
                continue
            for threshold, into in zip(entry.thresholds, count, strict=True):
                torch.gt(tile.scores, tile.spread(threshold, dim), out=t)
                tile.part(into, dim).add_(positives.fill_(t, tile, 0.0).sum(dim))
                if written:
                    out.addcmul_(t, tile.spread(g, dim))
                else:
                    torch.mul(t, tile.spread(g, dim), out=out)
                written = True
        if not written:
            out.zero_()
        if in_place:
            gradient.of(tile).copy_(out)
        gradient.add(tile)
    return pushed_up(source, found, active, grads, needs, *gradient.finish())


def pushed_up(
    source: Source,
    found: list[_Pairs | None],
    active: list[Tensor | None],
    grads: Pair,
    needs: tuple[bool, bool],
    rows: Tensor,
    cols: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of the positives to that of the negatives; ``active``: how many violate each threshold."""
    listed = PairGradient(source, needs)
    if source.cols is None:
        listed.sums[0] = rows
    for entry, count, g in zip(found, active, grads, strict=True):
        if entry is None or count is None or g is None:
            continue
        if entry.place is None and source.cols is None:
            rows.diagonal().addcmul_(g, entry.listed(count), value=-1)
            continue
        anchor = g if entry.place is None else g[entry.place[1]]
        listed.add(entry.i, entry.j, entry.scores, -anchor * entry.listed(count))
    more_rows, more_cols = listed.finish()
    return (more_rows, more_cols) if source.cols is None else (rows.add_(more_rows), cols.add_(more_cols))
