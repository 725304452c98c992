"""Mean and variance of each row's and each column's negatives, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .positives import Positives
from .tiles import SIDES, Gradient, Source, fused, joined, panels, tiles, unit

Counts = tuple[Tensor | int, Tensor | int]
_SQUARES = 2**17  # squares held at once: so few that the system need not give fresh memory for them, which takes longer


def negative_counts(positives: Positives, asked: tuple[bool, bool]) -> Counts:
    """How many negatives each row and each column has; a plain number where that is the same for all."""
    n, m = positives.n, positives.m
    if positives.diagonal:
        return m - 1, n - 1
    return m - positives.counts() if asked[0] else 0, n - positives.T.counts() if asked[1] else 0


def moments(source: Source, asked: tuple[bool, bool], positives: Positives | None = None) -> tuple[Tensor, Tensor]:
    """Mean and population variance of the negatives, of the rows that are asked and then of the columns.

    Zeros where there are none. Rounding can leave a variance a little below 0.
    """
    if 0 in source.shape:  # a memory that is empty yet
        zeros = source.rows.new_zeros(source.shape[0], dtype=source.dtype)
        return zeros, zeros.clone()
    if source.fused:
        return fused().moments(source, asked)
    positives = positives or Positives.of(source)
    counts = negative_counts(positives, asked)
    scores = source.rows if source.cols is None else source.kept
    if scores is not None and source.rows.device.type == "cpu":
        mean, variance, far = _around_zero(scores, positives, asked, counts)
        if not far:
            return mean, variance
        middle = _sides(mean, source.shape, asked)
    else:
        middle = centres(source, asked)
    found = _around(middle, source, positives, asked, counts)
    # Only the CPU may look at a value for nothing.
    if source.rows.device.type == "cpu" and _lost_digits(found.shift.square(), found.variance):
        found = _around(_sides(found.mean, source.shape, asked), source, positives, asked, counts)
    return found.mean, found.variance


class Moments(NamedTuple):
    mean: Tensor
    variance: Tensor
    shift: Tensor  # from the centre to the mean


def _sides(x: Tensor, shape: tuple[int, int], asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Of the rows and of the columns; empty for a side that was not asked for."""
    rows, cols = x.split([size if a else 0 for size, a in zip(shape, asked, strict=True)])
    return rows, cols


def _lost_digits(subtracted: Tensor, variance: Tensor) -> bool:
    """Whether a difference of two squares was so small beside them that it lost its digits."""
    return float(torch.sub(subtracted, variance, alpha=100).amax()) > 1e-12


def _around_zero(
    scores: Tensor, positives: Positives, asked: tuple[bool, bool], counts: Counts
) -> tuple[Tensor, Tensor, bool]:
    """Means, variances, and whether they lost digits.

    There is no copy of the scores, one square serves both sides, and the positives are taken out of the sums.
    """
    # As the matrix lies in memory: (matrix, the dimension of it that is summed for the rows and for the columns).
    lying, dims = (scores, (1, 0)) if scores.stride(1) == 1 else (scores.T, (0, 1))
    wanted = [side for side, a in enumerate(asked) if a]
    across = any(dims[side] == 0 for side in wanted)  # else the norm needs no second write
    sums: list[list[tuple[Tensor, Tensor]]] = [[], []]  # of each side: of the scores and of their squares
    space = None
    for part in panels(lying, _SQUARES if across else None):
        x = lying[part]
        if across:
            space = torch.empty_like(x) if space is None else space[: x.shape[0]]
            torch.mul(x, x, out=space)
        for side in wanted:
            dim = dims[side]
            squares = torch.linalg.vector_norm(x, dim=1).square_() if space is None else space.sum(dim)
            if dim == 1 or not sums[side]:  # of these anchors, or of all of them for the first time
                sums[side].append((x.sum(dim), squares))
            else:
                sums[side][0][0].add_(x.sum(dim))
                sums[side][0][1].add_(squares)
    # A side's sums are of some anchors after the other, or of all of them.
    first, second = (joined([found[k] for side in wanted for found in sums[side]]) for k in (0, 1))
    if positives.diagonal:
        positive = scores.diagonal()
        positive = torch.cat((positive, positive)) if all(asked) else positive
        first.sub_(positive)
        taken = positive.square()
        count: Tensor | int = max(1, scores.shape[1] - 1)
        mean = first / count
    else:
        taken = torch.zeros_like(first)
        shape = positives.n, positives.m
        sides = _sides(first, shape, asked), _sides(taken, shape, asked)
        for i, j in positives.chunks():
            positive = scores[i, j]
            for side in wanted:
                index = (i, j)[side]
                sides[0][side].index_add_(0, index, positive, alpha=-1)
                sides[1][side].index_add_(0, index, positive.square())
        number = joined([counts[side] for side in wanted])  # type: ignore[misc]
        count = number.clamp_min(1)
        mean = (first / count).masked_fill_(number == 0, 0.0)
    squared = mean.square()
    variance = second.sub_(taken).div_(count).sub_(squared)
    far = _lost_digits(squared.add_(taken.div_(count)), variance)  # positives cost digits as a distance does
    return mean, variance, far


def _around(
    centre: tuple[Tensor, Tensor], source: Source, positives: Positives, asked: tuple[bool, bool], counts: Counts
) -> Moments:
    first: list[Tensor | None] = [None, None]
    second: list[Tensor | None] = [None, None]
    for tile in tiles(source, scratch=1):
        t = tile.scratch[0]
        for side, dim in SIDES:
            if not asked[side]:
                continue
            torch.sub(tile.scores, tile.spread(centre[side], dim), out=t)
            positives.fill_(t, tile, 0.0)
            size = source.shape[side]
            first[side] = tile.add_to(first[side], t.sum(dim), dim, size)
            # Along the rows the norm needs no second write; along the columns PyTorch does not vectorise it.
            squares = torch.linalg.vector_norm(t, dim=1).square_() if dim == 1 else t.square_().sum(0)
            second[side] = tile.add_to(second[side], squares, dim, size)
    return close(centre, counts, first, second)


def close(centre: tuple[Tensor, Tensor], counts: Counts, first: Sequence[Any], second: Sequence[Any]) -> Moments:
    """From the sums of the negatives' distances from ``centre`` and of their squares; None for a side not asked for."""
    found = []
    for middle, count, s1, s2 in zip(centre, counts, first, second, strict=True):
        if s1 is None:
            continue
        n = _at_least_one(count)
        shift = s1 / n
        mean, variance = middle + shift, (s2 / n).addcmul_(shift, shift, value=-1)
        if isinstance(count, Tensor):
            mean = mean.masked_fill_(count == 0, 0.0)
        elif not count:
            mean = torch.zeros_like(mean)
        found.append((mean, variance, shift))
    return Moments(*(joined(x) for x in zip(*found, strict=True)))


def _at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp_min(1) if isinstance(count, Tensor) else max(1, count)


def centres(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """A value near each row's and each column's mean: a shift that keeps the squares small, cheap from either source.

    The mean of a k-th of some values lies within sqrt(k) standard deviations of the mean of all, so a thirty-second
    of them costs at most five of the bits of a variance. That counts the positives, which can lie far off and come
    first: :func:`moments` looks at the result.
    """
    s = source.rows if source.cols is None else source.kept
    if s is not None:
        (n, m), empty = source.shape, s.new_empty(0)
        rows = s[:, : max(64, m // 32)].mean(1) if asked[0] else empty
        return rows, s[: max(64, n // 32)].mean(0) if asked[1] else empty
    assert source.cols is not None
    average = []
    for x, inv in ((source.rows, source.row_inv), (source.cols, source.col_inv)):
        total = torch.zeros(x.shape[1], dtype=source.dtype, device=x.device)
        for start in range(0, x.shape[0], 4096):
            total += unit(x[start : start + 4096], None if inv is None else inv[start : start + 4096]).sum(0)
        average.append(total / x.shape[0])

    def along(x: Tensor, inv: Tensor | None, mean: Tensor) -> Tensor:
        y = x.to(source.dtype) @ mean
        return y if inv is None else y * inv

    return along(source.rows, source.row_inv, average[1]), along(source.cols, source.col_inv, average[0])


def moments_backward(
    source: Source,
    asked: tuple[bool, bool],
    mean: Tensor,
    grad: Tensor | None,
    variance_grad: Tensor | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """``dS_ij = (g_mean + 2 g_var (S_ij - mean)) / n`` over the negatives, summed over both sides."""
    positives = Positives.of(source)
    parts: list[tuple[Tensor, Tensor] | None] = [None, None]
    if grad is not None or variance_grad is not None:
        zero = torch.zeros_like(mean)
        given = (_sides(zero if x is None else x, source.shape, asked) for x in (mean, grad, variance_grad))
        sides = zip(negative_counts(positives, asked), *given, strict=True)
        for side, (count, middle, g, gv) in enumerate(sides):
            if asked[side]:
                n = _at_least_one(count)
                slope = 2 * gv / n
                parts[side] = g / n - slope * middle, slope
    if source.fused:
        return fused().moments_backward(source, parts, needs)
    gradient = Gradient(source, needs)
    for tile in tiles(source, scratch=2):
        out, t = gradient.of(tile), tile.scratch[0]
        if parts[0] is not None and parts[1] is not None:
            torch.add(tile.spread(parts[0][1], 1), tile.spread(parts[1][1], 0), out=out).mul_(tile.scores)
            torch.add(tile.spread(parts[0][0], 1), tile.spread(parts[1][0], 0), out=t)
            out.add_(t)
        else:
            for part, (_, dim) in zip(parts, SIDES, strict=True):
                if part is not None:
                    torch.mul(tile.scores, tile.spread(part[1], dim), out=out).add_(tile.spread(part[0], dim))
            if parts[0] is None and parts[1] is None:
                out.zero_()
        positives.fill_(out, tile, 0.0)
        gradient.add(tile)
    return gradient.finish()
