"""Answers that are not sums over candidates: hardest negatives and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .pairs import Pairs
from .reduce import Question, operator, operator_inputs
from .scores import Scores, full_precision, tiles

# number of positives of an anchor beyond which sorting its rivals beats comparing them with each
# positive
_MANY = 32
_RUN = 64  # length of the runs in `argmax`


def _hardest(
    source: list[Tensor | None],
    sides: Sequence[int],
    below: Tensor | None,
    pairs: Pairs | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the (A,) scores and indices of each anchor's highest-scoring negative; -inf and -1
    without one.

    ``below``, (A,) or (1,): of the negatives that score below it.
    """
    scores, _, pairs = operator_inputs(source, pairs)
    limits = Question(scores, pairs, "peak", "negatives", sides, [] if below is None else [below])
    best = [
        scores.rows.new_full((scores.shape[side],), -math.inf, dtype=scores.dtype) for side in sides
    ]
    where = [torch.full_like(x, -1, dtype=torch.int64) for x in best]
    with torch.no_grad(), full_precision(scores.rows):
        for tile in tiles(scores, 1):
            t = pairs.exclude_(tile.scratch[0].copy_(tile.scores), tile.part, -math.inf)
            own = {side: x for group, x in limits.views(tile.part) for side in group}
            for side, values, indices in zip(sides, best, where, strict=True):
                x = t if below is None else t.masked_fill(t >= own[side][0], -math.inf)
                value, index = argmax(x, 1 - side)
                v, i = values[tile.part[side]], indices[tile.part[side]]
                better = (value > v) | (value.isnan() & ~v.isnan())
                i.copy_(torch.where(better, index + tile.part[1 - side].start, i))
                v.copy_(torch.where(better, value, v))
    return torch.cat(best), torch.cat(where)


def _fake_hardest(
    source: list[Tensor | None], sides: Sequence[int], below: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = Scores(*source)  # type: ignore[arg-type]
    best = scores.rows.new_empty(sum(scores.shape[side] for side in sides), dtype=scores.dtype)
    return best, best.to(torch.int64)


_SCHEMA = "(Tensor?[] source, int[] sides, Tensor? below) -> (Tensor, Tensor)"
hardest = operator("hardest", _SCHEMA, _hardest, _fake_hardest)


def argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``x.max(dim)``. On the CPU, PyTorch vectorises it only without the index: the best run
    of 64 comes first.

    0.5 of the time along rows of 1024 x 1024, 0.2 along columns (``pytest benchmarks/test_micro.py
    --benchmark-enable -k argmax``).
    """
    if x.device.type != "cpu" or x.shape[dim] % _RUN:
        return x.max(dim)
    runs = x.unflatten(dim, (-1, _RUN))
    value, run = runs.amax(dim + 1).max(dim)
    best = torch.take_along_dim(runs, run.unsqueeze(dim).unsqueeze(dim), dim).squeeze(dim)
    return value, best.argmax(dim).add_(run, alpha=_RUN)


def ranks(thresholds: Tensor, rivals: Tensor, optimistic: bool) -> Tensor:
    """Return the (B, P) ranks, from 1, of positives with scores ``thresholds`` (nan: none),
    ascending, padded with 0.

    ``rivals``: (B, C) scores of the negatives, -inf for other candidates. A negative with the score
    of a positive ranks ahead of it, unless ``optimistic``.
    """
    missing, positions = (
        thresholds.isnan(),
        torch.arange(1, thresholds.shape[1] + 1, device=rivals.device),
    )
    if thresholds.shape[1] > _MANY:
        ordered = rivals.sort(dim=1).values
        ahead = rivals.shape[1] - torch.searchsorted(ordered, thresholds, right=optimistic)
    else:
        compare = torch.gt if optimistic else torch.ge
        ahead = torch.zeros_like(thresholds, dtype=torch.int64)
        for k, t in enumerate(thresholds.unbind(1)):
            ahead[:, k] = compare(rivals, t[:, None]).sum(1)
    ahead = ahead.masked_fill_(missing, torch.iinfo(torch.int64).max // 2).sort(dim=1).values
    return (ahead + positions).masked_fill_(missing.sort(dim=1).values, 0)
