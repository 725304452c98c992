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

Top = tuple[Tensor, Tensor]  # (A, k) values and indices


def _whole(m: Matrix) -> Scores:
    """The scores without a gradient; none are formed to be kept for one question."""
    m.check_unchanged()
    return Scores(m.scores().detach()) if m.engine == "dense" else m.source()


def _oriented(x: Tensor, side: int) -> Tensor:
    """A tile with the anchors of a side as rows."""
    return x.T if side else x


def rows_of(m: Matrix, side: int, rows: slice) -> Tensor:
    """Return a (B, M) copy of some rows of the scores as a side sees them; only these are formed."""
    source = _whole(m)
    if source.matrix is not None:
        return _oriented(source.matrix.detach(), side)[rows].clone(memory_format=torch.contiguous_format)
    own, others = (tuple(source[k + s] for k in (0, 2, 7)) for s in (side, 1 - side))  # embeddings, lengths, units
    (x, inv, unit), (y, other_inv, other_unit) = (None if z is None else z[rows] for z in own), others
    assert x is not None
    part = Scores(x, y, inv, other_inv, row_unit=unit, col_unit=other_unit)
    out = torch.empty(part.shape, dtype=part.dtype, device=part.rows.device)
    with full_precision(part.rows), torch.no_grad():
        for tile in tiles(part, 0):
            out[tile.part] = tile.scores
    return out


# -------------------------------------------------------------------------------------------- hardest negatives


def hardest(m: Matrix, sides: Sequence[int]) -> list[Top]:
    """Return score and index (A,) of the highest-scoring negative for each of these sides; -inf and -1 without one.

    The gradient of a score goes to its pair.
    """
    m.check_unchanged()
    with torch.no_grad(), full_precision(m.rows):  # inside, as the compiler refuses a decorator
        if m.engine == "dense":
            whole = slice(0, m.shape[0]), slice(0, m.shape[1])
            t = m.pairs.exclude_(m.scores().clone(), whole, -math.inf)
            best = [t.max(1 - side) for side in sides]
            best = [(values, index.masked_fill(values == -math.inf, -1)) for values, index in best]
        elif torch.compiler.is_compiling():
            found = _registered(list(m.source(form=True)))
            best = [(found[side], found[2 + side]) for side in sides]
        else:
            best = _hardest(m.source(), m.pairs, sides)
    if not (torch.is_grad_enabled() and any(x is not None and x.x.requires_grad for x in m.embeddings)):
        return best
    pairs = []
    for side, (_, index) in zip(sides, best, strict=True):
        anchors = torch.arange(len(index), device=index.device)
        pairs.append((index, anchors) if side else (anchors, index))
    i, j = (torch.cat(x).clamp_min(0) for x in zip(*pairs, strict=True))
    values, index = (torch.cat(x) for x in zip(*best, strict=True))
    missing, sizes = index < 0, [len(index) for _, index in best]
    scores = m.pair_scores(i, j, values.masked_fill(missing, 0.0))  # whose product with no gradient would be nan
    scores = scores.masked_fill(missing, -math.inf)
    return list(zip(scores.split(sizes), index.split(sizes), strict=True))


def _hardest(source: Scores, pairs: Pairs, sides: Sequence[int]) -> list[Top]:
    empty = [source.rows.new_full((source.shape[side],), -math.inf, dtype=source.dtype) for side in sides]
    best = [(x, torch.full_like(x, -1, dtype=torch.int64)) for x in empty]
    for tile in tiles(source, 1):
        t = pairs.exclude_(tile.scratch[0].copy_(tile.scores), tile.part, -math.inf)
        for side, (values, where) in zip(sides, best, strict=True):
            value, index = _argmax(t, 1 - side)
            anchors, candidates = tile.part[side], tile.part[1 - side]
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
    best: list[dict[int, Top]] = [{} for _ in asked]  # of the anchors from this one on
    with full_precision(m.rows):
        tables = _score_tables(source, m.pairs, asked) if ranks else []
        counts = [torch.zeros_like(table, dtype=torch.int64) for table in tables]
        for tile in tiles(source, 1):
            for at, (side, k, bias) in enumerate(asked):
                scores, start = _biased(tile, side, bias), tile.part[side].start
                if k:
                    new = _oriented(scores, side)
                    best[at][start] = _best(best[at].get(start), new, tile.part[1 - side].start, k)
                if ranks:
                    rivals = m.pairs.exclude_(scores, tile.part, -math.inf)
                    _count_ahead(counts[at], tables[at], tile, side, rivals, optimistic)
    places = [_ranks(*x) for x in zip(tables, counts, strict=True)] if ranks else [None] * len(asked)
    tops = [_top(found, source, side) for found, (side, _, _) in zip(best, asked, strict=True)]
    return list(zip(places, tops, strict=True))


def _best(old: Top | None, scores: Tensor, first: int, k: int) -> Top:
    """Return the k best of former candidates and new ones, whose scores are (a, c), numbered from ``first`` on."""
    values, indices = scores.topk(min(k, scores.shape[1]), dim=1)
    indices = indices + first
    if old is not None:
        values, indices = torch.cat([old[0], values], 1), torch.cat([old[1], indices], 1)
        values, order = values.topk(min(k, values.shape[1]), dim=1)
        indices = indices.gather(1, order)
    return values, indices


def _top(found: dict[int, Top], source: Scores, side: int) -> Top:
    """Return (A, k) values and indices of all anchors."""
    if not found:
        empty = source.rows.new_empty(source.shape[side], 0, dtype=source.dtype)
        return empty, empty.long()
    values, indices = (torch.cat(x) for x in zip(*(found[start] for start in sorted(found)), strict=True))
    return values.masked_fill(values == torch.finfo(values.dtype).min, -math.inf), indices


def _of_existing(bias: Tensor | None, ignored: Tensor | None, source: Scores) -> Tensor | None:
    """Return the bias of candidates, -inf for those that do not exist: they are found last."""
    if ignored is None:
        return bias
    bias = torch.zeros(ignored.shape, dtype=source.dtype, device=ignored.device) if bias is None else bias
    return bias.masked_fill(ignored, -math.inf)


def _biased(tile: Tile, side: int, bias: Tensor | None) -> Tensor:
    """A copy of a tile's scores with the bias of a side's candidates; -inf is kept for what does not count."""
    scores, out = tile.scores, tile.scratch[0]
    if bias is None:
        out.copy_(scores)
    else:
        torch.add(scores, bias[tile.part[1 - side]].unsqueeze(side), out=out)
    return out.clamp_min_(torch.finfo(out.dtype).min)


def _count_ahead(count: Tensor, table: Tensor, tile: Tile, side: int, rivals: Tensor, optimistic: bool) -> None:
    """Add how many rivals of a tile are ahead of each positive: (slots, A)."""
    anchors = tile.part[side]
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
    places = [(pairs.listed[side], pairs.listed[1 - side], pairs.slots(side)) for side, _, _ in asked]
    widths = [int(slot.max()) + 1 if len(slot) else 0 for *_, slot in places]
    tables = [
        source.rows.new_full((width, source.shape[side]), math.nan, dtype=source.dtype)
        for (side, _, _), width in zip(asked, widths, strict=True)
    ]
    for tile in tiles(source, 1, _holding(*pairs.listed)):
        for (side, _, bias), table, (anchor, other, slot) in zip(asked, tables, places, strict=True):
            t = _oriented(_biased(tile, side, bias), side)
            a, c = tile.part[side], tile.part[1 - side]
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
