"""Log-sum-exp, softmax mean and softmax entropy of rows and columns, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .positives import Positives
from .products import add_matmul_
from .tiles import SIDES, Asked, Gradient, Pair, Source, Tile, apart, fused, joined, panels, tiles

MEAN, ENTROPY = 1, 2  # what may be asked for besides the log-sum-exp
_RANGE = 60.0  # exp(±60) and long sums of it are ordinary float32 numbers
_ENTROPY_RANGE = 4.0  # an entropy is ``log sum - mean``: both of this size at most, it keeps all but a few bits
_NOTHING = 1e-30  # stands for a sum of no exponentials: smaller than any other, and its reciprocal is finite


def carries_diagonal(source: Source, masked: bool, extra: int) -> bool:
    """Whether the pass hands out the positives' scores too: then their gradient needs no matrix of its own."""
    return masked and extra != ENTROPY and source.row_ids is None and not (source.fused and source.cols is None)


def _fixed_shift(scale: Tensor, bounded: bool, extra: int) -> float | None:
    """What can be subtracted from all exponents instead of each anchor's maximum; None if nothing can.

    Scores lie in [-1, 1], so ``a S - shift <= 60``. Up to a scale of 60 the shift is 0 and no anchor can underflow;
    beyond, one underflows only if its best score is below ``1 - 120 / a``, which :func:`logsumexp` checks.
    """
    # Reading a value is free on the CPU; an accelerator would have to wait, and subtracts the maximum instead.
    if not bounded or scale.device.type != "cpu":
        return None
    largest = abs(float(scale if scale.numel() == 1 else scale.abs().amax()))
    if extra == ENTROPY:
        return 0.0 if largest <= _ENTROPY_RANGE else None
    return max(0.0, largest - _RANGE) if largest <= 3 * _RANGE else None


class Sums(NamedTuple):
    """Per anchor, the rows before the columns where both are asked, with exponentials ``e = exp(a S - top)``."""

    total: Tensor  # sum of e, so that L = log total + top
    top: Tensor  # the largest exponent, or the same number for all anchors
    # MEAN: softmax mean of S. ENTROPY: (2, A), softmax entropy (nats) and share of what counts. Empty if not asked for.
    figure: Tensor


def logsumexp(
    source: Source,
    scale: Tensor,
    asked: Asked,
    masked: bool,
    bounded: bool,
    extra: int,
    held: list[Tensor] | None = None,
) -> tuple[Sums, Tensor]:
    """``L = log sum_j exp(a_i S_ij)`` and a figure of its softmax p, of each asked side; and ``S_ii``.

    ``scale`` is one number, or one per anchor. ``extra=MEAN``: the figure is ``sum_j p_ij S_ij``, and all sums run over
    the negatives if ``masked``, else over all columns. ``extra=ENTROPY``: L and p are over all columns, and the figure
    has two rows, ``-sum_j p_ij log p_ij`` (nats) and ``sum_j p_ij``, both over the negatives if ``masked``. The
    diagonal is empty unless :func:`carries_diagonal`. The exponentials of a matrix of a single panel (2 MiB of them at
    most), if they serve both sides, are left in ``held`` for :func:`logsumexp_backward`.
    """
    if source.fused:
        return fused().logsumexp(source, scale, asked, masked, extra)
    shift = _fixed_shift(scale, bounded, extra)
    wanted = carries_diagonal(source, masked, extra)
    diagonal = source.rows.new_empty(source.shape[0] if wanted else 0, dtype=source.dtype)
    scales = apart(scale, source.shape[0], asked)
    if 0 in source.shape:  # a memory that is empty yet
        zeros = source.rows.new_zeros(source.shape[0], dtype=source.dtype)
        none = Stats(None, zeros, zeros if extra else None, zeros if extra == ENTROPY else None)
        return close(none, shift), diagonal
    if extra == ENTROPY and shift is not None:
        stats = _entropy_sums(source, scales, masked)
    else:
        stats = _sums(source, scales, masked, extra, shift, diagonal, held)
    if shift and float(stats.total.amin()) < math.exp(-_RANGE):
        shift = None
        if held:
            held.clear()
        stats = _sums(source, scales, masked, extra, shift, diagonal)
    return close(stats, shift), diagonal


def _shared(scales: Pair) -> bool:
    """One scalar scale for both sides: one exponential serves both."""
    a, b = scales
    return a is not None and a is b


def _sums(
    source: Source,
    scales: Pair,
    masked: bool,
    extra: int,
    shift: float | None,
    diagonal: Tensor,
    held: list[Tensor] | None = None,
) -> Stats:
    positives = Positives.of(source)
    fast = shift is not None
    shared = fast and _shared(scales)
    stats: list[Stats | None] = [None, None]
    for tile in tiles(source, scratch=2 if extra else 1):
        t = tile.scratch[0]
        if diagonal.numel():
            positives.read_diagonal(tile, diagonal)
        for side, dim in SIDES:
            scale = scales[side]
            if scale is None:
                continue
            if not (shared and side == 1):
                _exponents(tile, scale, dim, shift, t)
                if fast:
                    t.exp_()
                if masked and extra != ENTROPY:
                    positives.fill_(t, tile, 0.0 if fast else -math.inf)
            top = figure = share = None
            if not fast:
                top = t.amax(dim)
                t.sub_(finite(top).unsqueeze(dim))
            if extra == ENTROPY:
                exponents = tile.scratch[1].copy_(t)
                total = t.exp_().sum(dim)
                if masked:
                    positives.fill_(t, tile, 0.0)
                figure, share = exponents.mul_(t).sum(dim), t.sum(dim)
            else:
                total = (t if fast else t.exp_()).sum(dim)
                if extra == MEAN:
                    figure = torch.mul(t, tile.scores, out=tile.scratch[1]).sum(dim)
            new = Stats(top, total, figure, share)
            stats[side] = _merge(stats[side], new, tile, dim, source.shape[side])
        if held is not None and shared and tile.alone and source.cols is None and extra != ENTROPY:
            held.append(t)
    return _join(stats)


def _entropy_sums(source: Source, scales: Pair, masked: bool) -> Stats:
    """:func:`_sums` of ``extra=ENTROPY`` with nothing subtracted: one scale for both sides makes all terms once."""
    positives = Positives.of(source)
    together = [SIDES] if _shared(scales) else [(side,) for side in SIDES if scales[side[0]] is not None]
    stats: list[Stats | None] = [None, None]
    for tile in tiles(source, scratch=2):
        e, weighted = tile.scratch
        for sides in together:
            first, dim = sides[0]
            scale = scales[first]
            assert scale is not None
            torch.mul(tile.scores, tile.spread(scale, dim), out=e).exp_()
            totals = [e.sum(dim) for _, dim in sides]
            if masked:
                positives.fill_(e, tile, 0.0)
            torch.mul(e, tile.scores, out=weighted)
            for (side, dim), total in zip(sides, totals, strict=True):
                new = Stats(None, total, weighted.sum(dim).mul_(tile.part(scale, dim)), e.sum(dim))
                stats[side] = _merge(stats[side], new, tile, dim, source.shape[side])
    return _join(stats)


def _exponents(tile: Tile, scale: Tensor, dim: int, shift: float | None, out: Tensor) -> Tensor:
    """``a S - shift``."""
    if not shift:
        return torch.mul(tile.scores, tile.spread(scale, dim), out=out)
    return _affine(tile, scale, scale.new_full((1,), -shift), dim, out)


def _affine(tile: Tile, scale: Tensor, offset: Tensor, dim: int, out: Tensor) -> Tensor:
    """``a S + offset`` on the CPU, where PyTorch does not vectorise an addcmul along the rows."""
    if scale.numel() == 1:
        return torch.add(tile.spread(offset, dim), tile.scores, alpha=float(scale), out=out)
    return torch.mul(tile.scores, tile.spread(scale, dim), out=out).add_(tile.spread(offset, dim))


class Stats(NamedTuple):
    """Per anchor, with exponentials ``e = exp(z - top)``; None where not asked for."""

    top: Tensor | None  # the largest exponent; None: the same number was subtracted everywhere
    total: Tensor  # sum of e
    figure: Tensor | None  # MEAN: sum of e S. ENTROPY: sum of e (z - top) over what counts
    share: Tensor | None  # ENTROPY: sum of e over what counts


def _join(sides: Sequence[Stats | None]) -> Stats:
    """One vector of the rows and the columns for each figure."""
    given = [x for x in sides if x is not None]
    return Stats(*[None if x[0] is None else joined(x) for x in zip(*given, strict=True)])  # type: ignore[arg-type]


def _merge(old: Stats | None, new: Stats, tile: Tile, dim: int, size: int) -> Stats:
    if tile.alone:
        return new
    if old is None:
        sums = (None if x is None else x.new_zeros(size) for x in new[1:])
        old = Stats(None if new.top is None else new.total.new_full((size,), -math.inf), *sums)  # type: ignore[arg-type]
    mine = Stats(*(None if x is None else tile.part(x, dim) for x in old))  # type: ignore[arg-type]
    if mine.top is not None and new.top is not None:
        top = torch.maximum(mine.top, new.top)
        _rebase_(mine, top)
        _rebase_(new, top)
    for into, x in zip(mine[1:], new[1:], strict=True):
        if into is not None and x is not None:
            into.add_(x)
    return old


def _rebase_(stats: Stats, top: Tensor) -> None:
    """The same sums with another maximum subtracted, in place."""
    assert stats.top is not None
    gap = stats.top - finite(top)
    if stats.figure is not None and stats.share is not None:
        stats.figure.add_(finite(gap) * stats.share)
    for x in stats[1:]:
        if x is not None:
            x.mul_(gap.exp())
    stats.top.copy_(top)


def finite(x: Tensor) -> Tensor:
    """-inf, the maximum of nothing, as 0: subtracting it must not give nan."""
    return x.masked_fill(x == -math.inf, 0.0)


def close(stats: Stats, shift: float | None) -> Sums:
    """What a pass hands out of its sums."""
    top = torch.full_like(stats.total, shift or 0.0) if stats.top is None else stats.top
    if stats.figure is None:
        return Sums(stats.total, top, top.new_empty(0))
    total = stats.total.clamp_min(_NOTHING)
    if stats.share is None:
        return Sums(stats.total, top, stats.figure / total)
    share = stats.share / total
    entropy = (total.log() * share - stats.figure / total).clamp_min_(0.0)  # rounding could leave it below
    return Sums(stats.total, top, torch.stack([entropy, share]))


def exponentials_(
    scores: Tensor, scale: Tensor, positives: Positives | None, bounded: bool
) -> tuple[Tensor, Tensor] | None:
    """Overwrite scores (N, M) by ``exp(a_i S_ij - top_i)``, 0 at the positives; (N,) sums of that, and the tops.

    None if a top for all anchors, tried where scores are ``bounded``, was too large for some: scores are lost then.
    """
    shift = _fixed_shift(scale, bounded, 0)
    n = scores.shape[0]
    total, top = (torch.zeros(n, dtype=scores.dtype, device=scores.device) for _ in range(2))
    for rows in panels(scores) if scores.shape[1] else ():
        x = scores[rows].mul_(scale if scale.numel() == 1 else scale[rows, None])
        if positives is not None and positives.listable:
            i, j = positives.pairs(rows.start, rows.stop)
            x[i - rows.start, j] = -math.inf
        elif positives is not None:
            x.masked_fill_(positives.row_ids[rows, None] == positives.col_ids, -math.inf)  # type: ignore[index]
        if shift is None:
            top[rows] = finite(x.amax(1))
            x.sub_(top[rows, None])
        elif shift:
            x.sub_(shift)
        torch.sum(x.exp_(), 1, out=total[rows])
    if shift and scores.shape[1] and float(total.amin()) < math.exp(-_RANGE):
        return None
    return total, top.fill_(shift) if shift else top


def sums_and_products(
    source: Source, scale: Tensor, masked: bool, bounded: bool, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of embeddings, tile by tile: per row ``sum_j e_ij`` and the top of :func:`exponentials_`, and ``sum_j e_ij y_j``.

    The last one, (N, D) with the unit columns y, is what the gradient is made of; None unless ``wanted``.
    """
    if source.fused:
        return fused().sums_and_products(source, scale, masked, wanted)
    shift = _fixed_shift(scale, bounded, 0)
    found = _sums_and_products(source, scale, masked, shift, wanted)
    if shift and source.shape[1] and float(found[0].amin()) < math.exp(-_RANGE):
        found = _sums_and_products(source, scale, masked, None, wanted)
    return found


def _sums_and_products(
    source: Source, scale: Tensor, masked: bool, shift: float | None, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    positives, n = Positives.of(source), source.shape[0]
    total = source.rows.new_zeros(n, dtype=source.dtype)
    top = torch.full_like(total, -math.inf if shift is None else shift)
    products = source.rows.new_zeros(source.rows.shape, dtype=source.dtype) if wanted else None
    for tile in tiles(source, scratch=1):
        t, rows = tile.scratch[0], slice(tile.r0, tile.r1)
        _exponents(tile, scale, 1, shift, t)
        if masked:
            positives.fill_(t, tile, -math.inf)
        if shift is None:
            higher = torch.maximum(top[rows], t.amax(1))
            t.sub_(finite(higher)[:, None])
            factor = (top[rows] - finite(higher)).exp()
            total[rows] *= factor
            if products is not None:
                products[rows] *= factor[:, None]
            top[rows] = higher
        total[rows] += t.exp_().sum(1)
        if products is not None:
            right = source.unit_cols(tile.c0, tile.c1) if tile.right is None else tile.right
            add_matmul_(products[rows], t, right)
    return total, finite(top), products


def logsumexp_backward(
    source: Source,
    scale: Tensor,
    asked: Asked,
    sums: Sums,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    masked: bool,
    bounded: bool,
    extra: int,
    needs: tuple[bool, bool],
    in_place: bool = False,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of the source from those of ``L``, of the first row of the entropy figure and of the diagonal.

    ``dL/dS_ij = a p_ij`` and ``dH/dS_ij = a p_ij (B - H - [j counts] (log p_ij + 1))``, B the share that counts.
    """
    if source.fused:
        return fused().logsumexp_backward(source, scale, asked, sums, grads, masked, extra, needs)
    (grad, figure_grad, diagonal_grad), positives = grads, Positives.of(source)
    gradient = Gradient(source, needs, in_place)
    shares: list[Share] = []
    if not (grad is None and figure_grad is None):
        shift = None if held is not None else _fixed_shift(scale, bounded, extra)
        if shift and not bool((sums.top == shift).all()):
            shift = None  # the forward pass had to subtract the maximum
        const = constant(scale, sums, grad)
        scales = apart(scale, source.shape[0], asked)
        if held is not None:
            shares = [_of_held(apart(const, source.shape[0], asked), held)]
        elif extra != ENTROPY and shift is not None and _shared(scales):
            shares = [_of_both(apart(const, source.shape[0], asked), scale, shift)]
        else:
            if figure_grad is not None:
                const = torch.stack([finite(sums.top), *entropy_factors(const, scale, sums, figure_grad[0])])
            elif shift is None:
                const = torch.stack([finite(sums.top), const])
            for (_, dim), a, x in zip(SIDES, scales, apart(const, source.shape[0], asked), strict=True):
                if a is None or x is None:
                    continue
                if figure_grad is not None:
                    shares.append(_of_entropy(a, x, dim, positives if masked else None))
                else:
                    shares.append(_of_top(a, x, dim) if shift is None else _of_shift(a, x, shift, dim))
    for tile in tiles(source, scratch=gradient.scratch(2 if extra == ENTROPY else 1)):
        out = gradient.of(tile)
        if not shares:
            out.zero_()
        for share in shares[:-1]:  # at most one; `out` may be the scores, and comes last
            share(tile, tile.scratch[0])
        for share in shares[-1:]:
            share(tile, out)
        if len(shares) == 2:
            out.add_(tile.scratch[0])
        if masked and extra != ENTROPY:
            positives.fill_(out, tile, 0.0 if diagonal_grad is None else diagonal_grad)
        gradient.add(tile)
    return gradient.finish()


# What a side adds to dS: each of these returns a function that writes it for one tile.
Share = Callable[[Tile, Tensor], object]


def constant(scale: Tensor, sums: Sums, grad: Tensor | None) -> Tensor:
    """``g a / total``, so that ``g dL/dS = constant exp(a S - top)``."""
    total = sums.total.clamp_min(_NOTHING)
    return torch.zeros_like(total) if grad is None else grad * scale / total


def _of_held(constants: Pair, held: Tensor) -> Share:
    """Of both sides at once, the exponentials being there."""
    rows, cols = constants
    assert rows is not None and cols is not None
    return lambda tile, out: torch.add(tile.spread(rows, 1), tile.spread(cols, 0), out=out).mul_(held)


def _of_both(constants: Pair, scale: Tensor, shift: float) -> Share:
    """Of both sides at once: they share the exponentials."""
    rows, cols = constants
    assert rows is not None and cols is not None

    def write(tile: Tile, out: Tensor) -> None:
        _exponents(tile, scale, 1, shift, out).exp_()
        out.mul_(torch.add(tile.spread(rows, 1), tile.spread(cols, 0), out=tile.scratch[0]))

    return write


def _of_shift(scale: Tensor, const: Tensor, shift: float, dim: int) -> Share:
    """``sign exp(a S - shift + log |constant|)``: no pass for the constant."""
    positive = float(const.amin()) >= 0
    offset = (const if positive else const.abs()).log()
    offset, sign = offset - shift if shift else offset, None if positive else const.sign()

    def write(tile: Tile, out: Tensor) -> None:
        _affine(tile, scale, offset, dim, out).exp_()
        if sign is not None:
            out.mul_(tile.spread(sign, dim))

    return write


def _of_top(scale: Tensor, vectors: Tensor, dim: int) -> Share:
    """``constant exp(a S - top)``: a large maximum is subtracted first and alone, what is left of it is exact."""
    top, const = vectors

    def write(tile: Tile, out: Tensor) -> None:
        torch.mul(tile.scores, tile.spread(scale, dim), out=out).sub_(tile.spread(top, dim))
        out.exp_().mul_(tile.spread(const, dim))

    return write


def entropy_factors(const: Tensor, scale: Tensor, sums: Sums, grad: Tensor) -> list[Tensor]:
    """Per anchor ``base``, ``slope`` and ``uncounted`` of :func:`_of_entropy`."""
    (entropy, share), weight = sums.figure, grad * scale / sums.total.clamp_min(_NOTHING)
    uncounted = const + weight * (share - entropy)
    return [uncounted - weight * (1 - finite(sums.total.log())), -weight, uncounted]


def _of_entropy(scale: Tensor, vectors: Tensor, dim: int, positives: Positives | None) -> Share:
    """``e (base + slope log e)`` with ``e = exp(a S - top)``; at positives that do not count, ``e uncounted``."""
    top, base, slope, uncounted = vectors

    def write(tile: Tile, out: Tensor) -> None:
        """Write the share of one tile."""
        torch.mul(tile.scores, tile.spread(scale, dim), out=out).sub_(tile.spread(top, dim))
        factor = torch.clamp_min(out, -1e4, out=tile.scratch[1])  # -inf would meet a p of 0
        factor.mul_(tile.spread(slope, dim)).add_(tile.spread(base, dim))
        if positives is not None:
            positives.fill_(factor, tile, uncounted, dim)
        out.exp_().mul_(factor)

    return write
