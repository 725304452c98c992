"""Mean and variance of each row's and each column's negatives, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .positives import Positives
from .tiles import SIDES, Gradient, Pair, Source, fused, panels, tiles, unit

Counts = tuple[Tensor | int, Tensor | int]
_SQUARES = 2**17  # squares held at once: so few that the system need not give fresh memory for them, which takes longer


def negative_counts(positives: Positives, asked: tuple[bool, bool]) -> Counts:
    """How many negatives each row and each column has; a plain number where that is the same for all."""
    n, m = positives.n, positives.m
    if positives.diagonal:
        return m - 1, n - 1
    return m - positives.counts() if asked[0] else 0, n - positives.T.counts() if asked[1] else 0


def moments(
    source: Source, asked: tuple[bool, bool], positives: Positives | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Mean and population variance of each row's (column's) negatives; zeros where there are none.

    Rounding can leave a variance a little below 0.
    """
    if 0 in source.shape:  # a memory that is empty yet
        zeros = [source.rows.new_zeros(size, dtype=source.dtype) for size in source.shape]
        return (zeros[0], zeros[1]), (zeros[0].clone(), zeros[1].clone())
    if source.fused:
        return fused().moments(source, asked)
    positives = positives or Positives.of(source)
    counts = negative_counts(positives, asked)
    scores = source.rows if source.cols is None else source.kept
    if scores is not None and source.rows.device.type == "cpu":
        mean, variance, far = _around_zero(scores, positives, asked, counts)
        if not far:
            return mean, variance
        middle = mean
    else:
        middle = centres(source, asked)
    rows, cols = _around(middle, source, positives, asked, counts)
    # Only the CPU may look at a value for nothing.
    if source.rows.device.type == "cpu" and (_is_far(rows) or _is_far(cols)):
        rows, cols = _around((rows.mean, cols.mean), source, positives, asked, counts)
    return (rows.mean, cols.mean), (rows.variance, cols.variance)


class _Moments(NamedTuple):
    mean: Tensor
    variance: Tensor
    shift: Tensor  # from the centre to the mean


def _is_far(found: _Moments) -> bool:
    """Whether a centre was so far from the mean that the difference of two squares lost its digits."""
    return _lost_digits(found.shift.square(), found.variance)


def _lost_digits(subtracted: Tensor, variance: Tensor) -> bool:
    return bool((subtracted > (100 * variance).clamp_min_(1e-12)).any())


def _around_zero(
    scores: Tensor, positives: Positives, asked: tuple[bool, bool], counts: Counts
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], bool]:
    """Means, variances, and whether they lost digits.

    There is no copy of the scores, one square serves both sides, and the positives are taken out of the sums.
    """
    sizes, both = [size if a else 0 for size, a in zip(scores.shape, asked, strict=True)], all(asked)
    sums = scores.new_zeros(3, sum(sizes))  # of the scores, their squares, the positives' squares; rows, then columns
    first, second, taken = (x.split(sizes) if both else (x, x) for x in sums.unbind())
    # As the matrix lies in memory: (matrix, the dimension of it that is summed for the rows and for the columns).
    lying, dims = (scores, (1, 0)) if scores.stride(1) == 1 else (scores.T, (0, 1))
    across = any(a and dim == 0 for a, dim in zip(asked, dims, strict=True))  # else the norm needs no second write
    space = scores.new_empty(0)
    for part in panels(lying, _SQUARES if across else None):
        x = lying[part]
        if across:
            space = space[: x.shape[0]] if space.numel() else torch.empty_like(x)
            torch.mul(x, x, out=space)
        for side, dim in enumerate(dims):
            if asked[side] and dim == 0:
                first[side].add_(x.sum(0))
                second[side].add_(space.sum(0))
            elif asked[side]:
                torch.sum(x, 1, out=first[side][part])
                if across:
                    torch.sum(space, 1, out=second[side][part])
                else:
                    torch.linalg.vector_norm(x, dim=1, out=second[side][part]).square_()
    if positives.diagonal:
        diagonal = scores.diagonal()
        for side, size in enumerate(sizes):
            if size:
                first[side].sub_(diagonal)
                torch.mul(diagonal, diagonal, out=taken[side])
    else:
        for i, j in positives.chunks():
            positive = scores[i, j]
            for side, index in enumerate((i, j)):
                if asked[side]:
                    first[side].index_add_(0, index, positive, alpha=-1)
                    taken[side].index_add_(0, index, positive.square())
    if positives.diagonal:
        count = max(1, scores.shape[1] - 1)
        mean = sums[0] / count
    else:
        given = [n for n, a in zip(counts, asked, strict=True) if a and isinstance(n, Tensor)]
        number = torch.cat(given) if both else given[0]
        count = number.clamp_min(1)
        mean = (sums[0] / count).masked_fill_(number == 0, 0.0)
    squared = mean.square()
    variance = (sums[1] - sums[2]).div_(count).sub_(squared)
    far = _lost_digits(squared.add_(sums[2].div_(count)), variance)  # positives cost digits as a distance does
    if both:  # answers share no memory
        means, variances = ([part.clone() for part in x.split(sizes)] for x in (mean, variance))
    else:
        means, variances = ([x if a else x.new_empty(0) for a in asked] for x in (mean, variance))
    return (means[0], means[1]), (variances[0], variances[1]), far


def _around(
    centre: tuple[Tensor, Tensor], source: Source, positives: Positives, asked: tuple[bool, bool], counts: Counts
) -> tuple[_Moments, _Moments]:
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
    rows, cols = (close(c, n, s1, s2) for c, n, s1, s2 in zip(centre, counts, first, second, strict=True))
    return rows, cols


def close(centre: Tensor, count: Tensor | int, first: Tensor | None, second: Tensor | None) -> _Moments:
    """Of one side, from the sums of its negatives' distances from ``centre`` and of their squares; empty for None."""
    if first is None or second is None:
        return _Moments(*(centre.new_empty(0) for _ in range(3)))
    n = _at_least_one(count)
    shift = first / n
    mean, variance = centre + shift, (second / n).addcmul_(shift, shift, value=-1)
    if isinstance(count, Tensor):
        return _Moments(mean.masked_fill_(count == 0, 0.0), variance, shift)
    return _Moments(mean if count else torch.zeros_like(mean), variance, shift)


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
    source: Source, means: Pair, grads: Pair, variance_grads: Pair, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """``dS_ij = (g_mean + 2 g_var (S_ij - mean)) / n`` over the negatives, summed over both sides."""
    positives = Positives.of(source)
    counts = negative_counts(positives, (means[0] is not None, means[1] is not None))
    parts: list[tuple[Tensor, Tensor] | None] = []
    for side, _ in SIDES:
        mean, g, gv = means[side], grads[side], variance_grads[side]
        if mean is None or (g is None and gv is None):
            parts.append(None)
            continue
        n = _at_least_one(counts[side])
        slope = torch.zeros_like(mean) if gv is None else 2 * gv / n
        const = (torch.zeros_like(mean) if g is None else g / n) - slope * mean
        parts.append((const, slope))
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
