"""What is no sum over candidates: the hardest negatives, the best candidates, and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .pairs import Pairs
from .scores import Scores, full_precision, tiles

_MANY = 32  # positives of an anchor, from which on sorting its rivals beats comparing them once per positive

Top = tuple[Tensor, Tensor]  # values and indices


def hardest(source: Scores, pairs: Pairs, sides: Sequence[int]) -> list[Top]:
    """Return score and index (A,) of the highest-scoring negative for each of these sides; -inf and -1 without one."""
    empty = [source.rows.new_full((source.shape[side],), -math.inf, dtype=source.dtype) for side in sides]
    best = [(x, torch.full_like(x, -1, dtype=torch.int64)) for x in empty]
    for tile in tiles(source, 1):
        t = pairs.exclude_(tile.scratch[0].copy_(tile.scores), tile.part, -math.inf)
        for side, (values, where) in zip(sides, best, strict=True):
            value, index = argmax(t, 1 - side)
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
        (a, i), (b, j) = hardest(scores, pairs, (0, 1))
    return a, b, i, j


def _fake_hardest(source: list[Tensor | None]) -> tuple[Tensor, ...]:
    scores = Scores(*source)  # type: ignore[arg-type]
    a, b = (scores.rows.new_empty(size, dtype=scores.dtype) for size in scores.shape)
    return a, b, a.to(torch.int64), b.to(torch.int64)


_library = torch.library.Library("itrloss", "FRAGMENT")
_library.define("hardest(Tensor?[] source) -> (Tensor, Tensor, Tensor, Tensor)")
_library.impl("hardest", _hardest_of_both, "CompositeExplicitAutograd")
torch.library.register_fake("itrloss::hardest", _fake_hardest, lib=_library)
registered_hardest = torch.ops.itrloss.hardest.default

_RUN, _FEW = 64, 2**15


def argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
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


def ranks(thresholds: Tensor, rivals: Tensor, optimistic: bool) -> Tensor:
    """Return (B, P) ranks from 1, ascending and padded with 0, of positives with scores ``thresholds``; nan for none.

    ``rivals``: (B, C) scores of the negatives, -inf for what is none. One with the score of a positive is ahead of it,
    unless ``optimistic``.
    """
    missing, places = thresholds.isnan(), torch.arange(1, thresholds.shape[1] + 1, device=rivals.device)
    if thresholds.shape[1] > _MANY:
        ordered = rivals.sort(dim=1).values
        ahead = rivals.shape[1] - torch.searchsorted(ordered, thresholds, right=optimistic)
    else:
        compare = torch.gt if optimistic else torch.ge
        ahead = torch.zeros_like(thresholds, dtype=torch.int64)
        for k, t in enumerate(thresholds.unbind(1)):
            ahead[:, k] = compare(rivals, t[:, None]).sum(1)
    ahead = ahead.masked_fill_(missing, torch.iinfo(torch.int64).max // 2).sort(dim=1).values
    return (ahead + places).masked_fill_(missing.sort(dim=1).values, 0)
