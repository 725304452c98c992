"""Log-sum-exp, softmax mean and softmax entropy of rows and columns, forward and backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .positives import Positives
from .tiles import SIDES, Gradient, Pair, Source, Tile, tiles

MEAN, ENTROPY = 1, 2  # what may be asked for besides the log-sum-exp
_RANGE = 60.0  # exp(±60) and long sums of it are ordinary float32 numbers
_NOTHING = 1e-30  # stands for a sum of no exponentials: smaller than any other, and its reciprocal is finite


def carries_diagonal(source: Source, masked: bool, extra: int) -> bool:
    """Whether the pass hands out the positives' scores too: then their gradient needs no matrix of its own."""
    return masked and extra != ENTROPY and source.row_ids is None


def _fixed_shift(scales: Pair, bounded: bool, extra: int) -> float | None:
    """What can be subtracted from all exponents instead of each anchor's maximum; None if nothing can.

    Scores lie in [-1, 1], so ``a S - shift <= 60``. Up to a scale of 60 the shift is 0 and no anchor can underflow;
    beyond, one underflows only if its best score is below ``1 - 120 / a``, which :func:`logsumexp` checks.
    """
    if not bounded or extra == ENTROPY:  # an entropy is the small difference of large numbers unless shifted
        return None
    given = [s for s in scales if s is not None]
    # Reading a value is free on the CPU; an accelerator would have to wait, and subtracts the maximum instead.
    if not all(s.device.type == "cpu" for s in given):
        return None
    largest = max(abs(float(s)) if s.numel() == 1 else float(s.abs().amax()) for s in given)
    return max(0.0, largest - _RANGE) if largest <= 3 * _RANGE else None


def _shared(scales: Pair) -> bool:
    """One scalar scale for both sides: one exponential serves both."""
    a, b = scales
    return a is not None and a is b and a.numel() == 1


class Sums(NamedTuple):
    """Per anchor, with exponentials ``e = exp(a S - top)``; empty where not asked for."""

    total: Tensor  # sum of e, so that L = log total + top
    top: Tensor  # the largest exponent, or the same number for all anchors
    figure: Tensor  # MEAN: softmax mean of S. ENTROPY: (2, n), softmax entropy (nats) and share of what counts


def logsumexp(source: Source, scales: Pair, masked: bool, bounded: bool, extra: int) -> tuple[Sums, Sums, Tensor]:
    """``L = log sum_j exp(a_i S_ij)`` and a figure of its softmax p, of the rows and of the columns; and ``S_ii``.

    ``extra=MEAN``: the figure is ``sum_j p_ij S_ij``, and all sums run over the negatives if ``masked``, else over all
    columns. ``extra=ENTROPY``: L and p are over all columns, and the figure has two rows, ``-sum_j p_ij log p_ij``
    (nats) and ``sum_j p_ij``, both over the negatives if ``masked``. The diagonal is empty unless
    :func:`carries_diagonal`.
    """
    shift = _fixed_shift(scales, bounded, extra)
    wanted = carries_diagonal(source, masked, extra)
    diagonal = source.rows.new_empty(source.shape[0] if wanted else 0, dtype=source.dtype)
    stats = _sums(source, scales, masked, extra, shift, diagonal)
    if shift and any(s is not None and float(s.total.amin()) < math.exp(-_RANGE) for s in stats):
        shift = None
        stats = _sums(source, scales, masked, extra, shift, diagonal)
    rows, cols = (_close(s, source, shift) for s in stats)
    return rows, cols, diagonal


def _sums(
    source: Source, scales: Pair, masked: bool, extra: int, shift: float | None, diagonal: Tensor
) -> list[_Stats | None]:
    positives = Positives.of(source)
    fast = shift is not None
    shared = fast and _shared(scales)
    stats: list[_Stats | None] = [None, None]
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
                t.sub_(_finite(top).unsqueeze(dim))
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
            new = _Stats(top, total, figure, share)
            stats[side] = _merge(stats[side], new, tile, dim, source.shape[side])
    return stats


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


class _Stats(NamedTuple):
    """Per anchor, with exponentials ``e = exp(z - top)``; None where not asked for."""

    top: Tensor | None  # the largest exponent; None: the same number was subtracted everywhere
    total: Tensor  # sum of e
    figure: Tensor | None  # MEAN: sum of e S. ENTROPY: sum of e (z - top) over what counts
    share: Tensor | None  # ENTROPY: sum of e over what counts


def _merge(old: _Stats | None, new: _Stats, tile: Tile, dim: int, size: int) -> _Stats:
    if tile.alone:
        return new
    if old is None:
        sums = (None if x is None else x.new_zeros(size) for x in new[1:])
        old = _Stats(None if new.top is None else new.total.new_full((size,), -math.inf), *sums)  # type: ignore[arg-type]
    mine = _Stats(*(None if x is None else tile.part(x, dim) for x in old))  # type: ignore[arg-type]
    if mine.top is not None and new.top is not None:
        top = torch.maximum(mine.top, new.top)
        _rebase_(mine, top)
        _rebase_(new, top)
    for into, x in zip(mine[1:], new[1:], strict=True):
        if into is not None and x is not None:
            into.add_(x)
    return old


def _rebase_(stats: _Stats, top: Tensor) -> None:
    """The same sums with another maximum subtracted, in place."""
    assert stats.top is not None
    gap = stats.top - _finite(top)
    if stats.figure is not None and stats.share is not None:
        stats.figure.add_(_finite(gap) * stats.share)
    for x in stats[1:]:
        if x is not None:
            x.mul_(gap.exp())
    stats.top.copy_(top)


def _finite(x: Tensor) -> Tensor:
    """-inf, the maximum of nothing, as 0: subtracting it must not give nan."""
    return x.masked_fill(x == -math.inf, 0.0)


def _close(stats: _Stats | None, source: Source, shift: float | None) -> Sums:
    if stats is None:
        return Sums(*(source.rows.new_empty(0, dtype=source.dtype) for _ in range(3)))
    top = torch.full_like(stats.total, shift or 0.0) if stats.top is None else stats.top
    if stats.figure is None:
        return Sums(stats.total, top, top.new_empty(0))
    total = stats.total.clamp_min(_NOTHING)
    if stats.share is None:
        return Sums(stats.total, top, stats.figure / total)
    share = stats.share / total
    return Sums(stats.total, top, torch.stack([total.log() * share - stats.figure / total, share]))


def logsumexp_backward(
    source: Source,
    scales: Pair,
    sums: tuple[Sums | None, Sums | None],
    grads: Pair,
    entropy_grads: Pair,
    diagonal_grad: Tensor | None,
    masked: bool,
    bounded: bool,
    extra: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """Gradient of the source from those of ``L``, of the first row of the entropy figure and of the diagonal.

    ``dL/dS_ij = a p_ij`` and ``dH/dS_ij = a p_ij (B - H - [j counts] (log p_ij + 1))``, B the share that counts.
    """
    positives = Positives.of(source)
    shift = _fixed_shift(scales, bounded, extra)
    if shift and not all(s is None or bool((s.top == shift).all()) for s in sums):
        shift = None  # the forward pass had to subtract the maximum
    gradient = Gradient(source, needs)
    active = [
        not (a is None or x is None or (g is None and h is None))
        for a, x, g, h in zip(scales, sums, grads, entropy_grads, strict=True)
    ]
    shared = shift is not None and _shared(scales) and all(active)
    weights = [
        _weights(_given(a), x, g, h, shift, shared) if on and x is not None else None
        for a, x, g, h, on in zip(scales, sums, grads, entropy_grads, active, strict=True)
    ]
    for tile in tiles(source, scratch=3 if extra == ENTROPY else 2):
        out, t = gradient.of(tile), tile.scratch[0]
        if shared and weights[0] is not None and weights[1] is not None:
            _exponents(tile, _given(scales[0]), 1, shift, out).exp_()
            out.mul_(torch.add(tile.spread(weights[0].const, 1), tile.spread(weights[1].const, 0), out=t))
        else:
            written = False
            for (_, dim), w, scale in zip(SIDES, weights, scales, strict=True):
                if w is None or scale is None:
                    continue
                x = t if written else out
                if shift is None:  # a large maximum is subtracted first and alone: what is left of it is exact
                    torch.mul(tile.scores, tile.spread(scale, dim), out=x).sub_(tile.spread(w.offset, dim))
                    factor = tile.spread(w.const, dim)
                    if w.slope is not None:
                        factor = torch.clamp_min(x, -1e4, out=tile.scratch[1])  # -inf would meet a p of 0
                        factor.mul_(tile.spread(w.slope, dim)).add_(tile.spread(w.const, dim))
                        if masked:
                            positives.fill_(factor, tile, w.uncounted, dim)
                    x.exp_().mul_(factor)
                else:
                    _affine(tile, scale, w.offset, dim, x).exp_()
                    if w.sign is not None:
                        x.mul_(tile.spread(w.sign, dim))
                if written:
                    out.add_(x)
                written = True
            if not written:
                out.zero_()
        if masked and extra != ENTROPY:
            positives.fill_(out, tile, 0.0 if diagonal_grad is None else diagonal_grad)
        gradient.add(tile)
    return gradient.finish()


class _Weights(NamedTuple):
    """What a side adds to ``dS``.

    Where both sides share the exponentials it is ``exp(a S - shift) const``; else with a fixed shift ``sign exp(a S +
    offset)``. Otherwise ``e (const + slope log e)`` with ``e = exp(a S - offset)``, and ``e uncounted`` where a term
    of the softmax does not count.
    """

    const: Tensor
    offset: Tensor
    sign: Tensor | None = None  # None: + everywhere
    slope: Tensor | None = None
    uncounted: float | Tensor = 0.0


def _weights(
    scale: Tensor, sums: Sums, grad: Tensor | None, entropy_grad: Tensor | None, shift: float | None, shared: bool
) -> _Weights:
    total = sums.total.clamp_min(_NOTHING)
    const = torch.zeros_like(total) if grad is None else grad * scale / total
    if shared:
        return _Weights(const, sums.top)
    if shift is not None:
        positive = float(const.amin()) >= 0
        offset = (const if positive else const.abs()).log()
        return _Weights(const, offset - shift if shift else offset, None if positive else const.sign())
    top = _finite(sums.top)
    if entropy_grad is None:
        return _Weights(const, top)
    (entropy, share), weight = sums.figure, entropy_grad[0] * scale / total
    uncounted = const + weight * (share - entropy)
    log_total = _finite(sums.total.log())
    return _Weights(uncounted - weight * (1 - log_total), top, None, -weight, uncounted)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
