"""Answers that are no sums: hardest negatives, the best candidates of each anchor, and where its positives rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .pairs import Pairs
from .scores import Scores, Tile, full_precision, tiles

if TYPE_CHECKING:
    from .matrix import Matrix

_MANY_SLOTS = 16  # from so many positives an anchor, sorting its scores beats comparing them once per positive
_PARTIAL_SORT = 64  # PyTorch on a CPU finds the k best of at least 64 k values some ten times as fast as of fewer

Top = tuple[Tensor, Tensor]  # (A, k) values and indices


def _whole(m: Matrix) -> Scores:
    """The scores without a gradient; none are formed to be kept for one question."""
    m.check_unchanged()
    if m.engine == "dense":
        return Scores(m.scores().detach())
    return m.source(keep=False).detach()


def _oriented(x: Tensor, side: int) -> Tensor:
    """A tile with the anchors of a side as rows."""
    return x.T if side else x


def _spans(tile: Tile, side: int) -> tuple[slice, slice]:
    """Anchors and candidates of a tile."""
    return (tile.cols, tile.rows) if side else (tile.rows, tile.cols)


def rows_of(m: Matrix, side: int, rows: slice) -> Tensor:
    """Return a (B, M) copy of some rows of the scores as a side sees them; only these are formed."""
    source = _whole(m)
    if source.matrix is not None:
        return _oriented(source.matrix, side)[rows].clone(memory_format=torch.contiguous_format)
    part = source._replace(cols=None if source.cols is None else source.cols[rows]) if side else source
    part = part._replace(col_inv=None if source.col_inv is None else source.col_inv[rows]) if side else part
    if not side:
        inv = None if source.row_inv is None else source.row_inv[rows]
        part = source._replace(rows=source.rows[rows], row_inv=inv)
    out = torch.empty(part.shape[::-1] if side else part.shape, dtype=part.dtype, device=part.rows.device)
    with full_precision(part.rows):
        for tile in tiles(part, 0):
            anchors, others = _spans(tile, side)
            out[anchors, others] = _oriented(tile.scores, side)
    return out


# -------------------------------------------------------------------------------------------- hardest negatives


def hardest(m: Matrix, sides: Sequence[int]) -> list[Top]:
    """Return score and index (A,) of the highest-scoring negative for each of these sides; -inf and -1 without one.

    The gradient of a score goes to its pair.
    """
    m.check_unchanged()
    with torch.no_grad(), full_precision(m.rows):  # inside, as the compiler refuses a decorator
        if m.engine == "dense":
            best = [_dense_hardest(m, side) for side in sides]
        elif torch.compiler.is_compiling():
            found = _registered(list(m.source()))
            best = [(found[side], found[2 + side]) for side in sides]
        else:
            best = _hardest(m.source(keep=False).detach(), m.pairs, sides)
    if not (torch.is_grad_enabled() and m.has_gradient):
        return best
    pairs: list[tuple[Tensor, Tensor]] = []
    for side, (values, index) in zip(sides, best, strict=True):
        anchors = torch.arange(len(values), device=values.device)
        pairs.append((index.clamp_min(0), anchors) if side else (anchors, index.clamp_min(0)))
    i, j = (torch.cat(x) for x in zip(*pairs, strict=True))
    known = torch.cat([values for values, _ in best])
    known = known.masked_fill(known == -math.inf, 0.0)  # whose product with no gradient would be nan
    scores = m.pair_scores(i, j, known).split([len(values) for values, _ in best])
    return [(x.masked_fill(index < 0, -math.inf), index) for x, (_, index) in zip(scores, best, strict=True)]


def _dense_hardest(m: Matrix, side: int) -> Top:
    scores, mask = m.scores(), m.dense_mask("negatives", False, True)
    values, index = (scores if mask is None else scores.masked_fill(mask, -math.inf)).max(1 - side)
    return values, index.masked_fill(values == -math.inf, -1)


def _hardest(source: Scores, pairs: Pairs, sides: Sequence[int]) -> list[Top]:
    empty = [source.rows.new_full((source.shape[side],), -math.inf, dtype=source.dtype) for side in sides]
    best = [(x, torch.full_like(x, -1, dtype=torch.int64)) for x in empty]
    for tile in tiles(source, 1):
        t = pairs.exclude_(tile.scratch[0].copy_(tile.scores), tile, -math.inf, "negatives")
        for side, (values, where) in zip(sides, best, strict=True):
            value, index = _argmax(t, 1 - side)
            anchors, candidates = _spans(tile, side)
            b, w = values[anchors], where[anchors]
            better = (value > b) | (value.isnan() & ~b.isnan())
            w.copy_(torch.where(better, index + candidates.start, w))
            b.copy_(torch.where(better, value, b))
    return best


def _hardest_of_both(source: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of rows and columns, then their indices: what the compiler sees of the search."""
    scores = Scores(*source)  # type: ignore[arg-type]
    with full_precision(scores.rows):
        pairs = Pairs(scores.shape, (scores.row_ids, scores.col_ids), scores.rows.device)
        (a, i), (b, j) = _hardest(scores, pairs, (0, 1))
    return a, b, i, j


def _fake_hardest(source: list[Tensor | None]) -> tuple[Tensor, ...]:
    scores = Scores(*source)  # type: ignore[arg-type]
    a, b = (scores.rows.new_empty(size, dtype=scores.dtype) for size in scores.shape)
    return a, b, a.to(torch.int64), b.to(torch.int64)


_library = torch.library.Library("itrloss", "FRAGMENT")
_library.define("hardest(Tensor?[] source) -> (Tensor, Tensor, Tensor, Tensor)")
_library.impl("hardest", _hardest_of_both, "CompositeExplicitAutograd")
torch.library.register_fake("itrloss::hardest", _fake_hardest, lib=_library)
_registered = torch.ops.itrloss.hardest.default

_RUN, _FEW = 64, 2**15


def _argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``x.max(dim)``, which PyTorch vectorises on the CPU only without the index: so the run of 64 comes first.

    0.5 of the time along rows of 1024 x 1024, 0.2 along columns (``pytest benchmarks/test_micro.py --benchmark-enable
    -k argmax``).
    """
    size = x.shape[dim]
    runs = size // _RUN
    if runs < 2 or x.numel() <= _FEW or x.device.type != "cpu":
        return x.max(dim)
    head = x.narrow(dim, 0, runs * _RUN).unflatten(dim, (runs, _RUN))
    value, run = head.amax(dim + 1).max(dim)
    where = run.unsqueeze(dim).unsqueeze(dim + 1)
    shape = list(head.shape)
    shape[dim] = 1
    index = head.gather(dim, where.expand(shape)).squeeze(dim).argmax(dim).add_(run, alpha=_RUN)
    if size % _RUN:
        rest, place = x.narrow(dim, runs * _RUN, size % _RUN).max(dim)
        better = rest > value
        value, index = torch.where(better, rest, value), torch.where(better, place + runs * _RUN, index)
    return value, index


# ----------------------------------------------------------------------------------- ranks and best candidates


def ranked(
    m: Matrix, asked: Sequence[tuple[int, int, Tensor | None]], ranks: bool, optimistic: bool
) -> list[tuple[Tensor | None, Top]]:
    """Return for each asked (side, k, bias of its candidates) the ranks of its positives and its k best candidates.

    Ranks (A, P) begin at 1, are ascending, and padded with 0: a negative with the score of a positive is ahead of it,
    unless ``optimistic``. The positive's score is read from the very product that its rivals' scores come from.
    """
    source = _whole(m)
    asked = [(side, k, _of_existing(bias, m.pairs.ignored[1 - side], source)) for side, k, bias in asked]
    best = [_Best(side, k) for side, k, _ in asked]
    with full_precision(m.rows):
        tables = _score_tables(source, m.pairs, asked) if ranks else []
        counts = [torch.zeros_like(table, dtype=torch.int64) for table in tables]
        for tile in tiles(source, 1):
            for at, (side, k, bias) in enumerate(asked):
                scores = _biased(tile, side, bias)
                if k:
                    best[at].add(tile, scores)
                if ranks:
                    rivals = m.pairs.exclude_(_own(scores, tile), tile, -math.inf, "negatives")
                    _count_ahead(counts[at], tables[at], tile, side, rivals, optimistic)
    places = [_ranks(*x) for x in zip(tables, counts, strict=True)] if ranks else [None] * len(asked)
    return [(place, b.finish(source)) for place, b in zip(places, best, strict=True)]


def _of_existing(bias: Tensor | None, ignored: Tensor | None, source: Scores) -> Tensor | None:
    """Return the bias of candidates, -inf for those that do not exist: they are found last."""
    if ignored is None:
        return bias
    bias = torch.zeros(ignored.shape, dtype=source.dtype, device=ignored.device) if bias is None else bias
    return bias.masked_fill(ignored, -math.inf)


def _own(scores: Tensor, tile: Tile) -> Tensor:
    """What may be written to."""
    return scores if scores is tile.scratch[0] else tile.scratch[0].copy_(scores)


def _biased(tile: Tile, side: int, bias: Tensor | None) -> Tensor:
    """Scores of a tile with the bias of a side's candidates; -inf is kept for what does not count."""
    if bias is None:
        return tile.scratch[0].copy_(tile.scores).clamp_min_(torch.finfo(tile.scores.dtype).min)
    _, candidates = _spans(tile, side)
    out = torch.add(tile.scores, bias[candidates].unsqueeze(side), out=tile.scratch[0])
    return out.clamp_min_(torch.finfo(out.dtype).min)


def _count_ahead(count: Tensor, table: Tensor, tile: Tile, side: int, rivals: Tensor, optimistic: bool) -> None:
    """Add how many rivals of a tile are ahead of each positive: (slots, A)."""
    anchors, _ = _spans(tile, side)
    if len(table) > _MANY_SLOTS:
        ordered = _oriented(rivals, side).sort(dim=1).values.contiguous()
        behind = torch.searchsorted(ordered, table[:, anchors].T.contiguous(), right=optimistic)
        count[:, anchors] += (ordered.shape[1] - behind).T
        return
    compare = torch.gt if optimistic else torch.ge
    for threshold, total in zip(table, count, strict=True):
        total[anchors] += compare(rivals, threshold[anchors].unsqueeze(1 - side)).sum(1 - side)


def _score_tables(source: Scores, pairs: Pairs, asked: Sequence[tuple[int, int, Tensor | None]]) -> list[Tensor]:
    """(slots, A) for each asked side: the scores of each anchor's positives; nan where it has fewer."""
    places = [pairs.slots(side) for side, _, _ in asked]
    widths = [int(slot.max()) + 1 if len(slot) else 0 for _, _, slot in places]
    tables = [
        source.rows.new_full((width, source.shape[side]), math.nan, dtype=source.dtype)
        for (side, _, _), width in zip(asked, widths, strict=True)
    ]
    for tile in tiles(source, 1, _holding(*pairs.listed)):
        for (side, _, bias), table, (anchor, other, slot) in zip(asked, tables, places, strict=True):
            t = _oriented(_biased(tile, side, bias), side)
            a, c = _spans(tile, side)
            inside = (anchor >= a.start) & (anchor < a.stop) & (other >= c.start) & (other < c.stop)
            table[slot[inside], anchor[inside]] = t[anchor[inside] - a.start, other[inside] - c.start]
    return tables


def _holding(i: Tensor, j: Tensor):
    """Whether a pair lies in a tile: captions that stand by their images are in a few tiles of many."""

    def wanted(r: slice, c: slice) -> bool:
        return bool(((i >= r.start) & (i < r.stop) & (j >= c.start) & (j < c.stop)).any())

    return wanted


def _ranks(table: Tensor, count: Tensor) -> Tensor:
    missing = table.isnan()
    ahead = count.masked_fill(missing, torch.iinfo(torch.int64).max // 2).sort(dim=0).values
    place = torch.arange(1, len(table) + 1, device=table.device)[:, None]
    return (ahead + place).masked_fill(missing.sort(dim=0).values, 0).T


class _Best:
    """The k best candidates of each anchor of one side, of the tiles seen so far."""

    def __init__(self, side: int, k: int):
        self.side, self.k = side, k
        self.found: dict[int, Top] = {}  # of the anchors from this one on: values and indices
        self.space: Tensor | None = None

    def add(self, tile: Tile, scores: Tensor) -> None:
        """Take in scores of the tile's shape, with whatever was added to them."""
        anchors, candidates = _spans(tile, self.side)
        x, start, first = _oriented(scores, self.side), anchors.start, candidates.start
        old, size = self.found.get(start), x.shape[1]
        k = min(self.k, size + (0 if old is None else old[0].shape[1]))
        on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if old is not None and on_cpu and self._add_better(scores, old, first):
            return
        if on_cpu and size < _PARTIAL_SORT * k <= 4 * size:
            self.found[start] = self._of_padded(x, k, old, first)
            return
        value, where = x.topk(min(k, size), dim=1)
        where = where + first
        if old is not None:
            value, order = torch.cat([old[0], value], 1).topk(k, dim=1)
            where = torch.cat([old[1], where], 1).gather(1, order)
        self.found[start] = value, where

    def _add_better(self, scores: Tensor, old: Top, first: int) -> bool:
        """Take in what is better than the worst that was found before, mostly little; False: that would not pay."""
        values, indices = old
        worst = values[:, -1]
        if values.shape[1] < self.k or not bool(worst.isfinite().all()):
            return False
        better = (scores > worst.unsqueeze(1 - self.side)).nonzero()
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

    def _of_padded(self, x: Tensor, k: int, old: Top | None, first: int) -> Top:
        """Return the best of the new ones and the old ones behind them, with -inf behind both: a size sorted fast."""
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

    def finish(self, source: Scores) -> Top:
        """Return (A, k) values and indices."""
        if not self.k or not self.found:
            empty = source.rows.new_empty(source.shape[self.side], 0, dtype=source.dtype)
            return empty, empty.long()
        parts = [self.found[start] for start in sorted(self.found)]
        values, indices = (torch.cat(list(x)) for x in zip(*parts, strict=True))
        return values.masked_fill(values == torch.finfo(values.dtype).min, -math.inf), indices
