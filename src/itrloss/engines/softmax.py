"""Log-sum-exp and softmax mean of the rows and columns of a similarity matrix, forward and backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .positives import Positives
from .tiles import SIDES, Gradient, Pair, Source, Tile, tiles

_NO_SHIFT = 40.0  # exp(±40) and sums of it are exact enough in float32: no maximum needs to be subtracted


def _safe_without_maximum(scales: Pair, bounded: bool) -> bool:
    """Scores in [-1, 1] times a scale of at most 40: ``exp`` neither overflows nor loses a row to underflow."""
    if not bounded:
        return False
    given = [s for s in scales if s is not None]
    # Reading a value is free on the CPU; an accelerator would have to wait, and subtracts the maximum instead.
    return all(s.device.type == "cpu" and float(s.abs().amax()) <= _NO_SHIFT for s in given)


def _shared(scales: Pair) -> bool:
    """One scalar scale for both sides: one exponential serves both."""
    a, b = scales
    return a is not None and b is not None and a.numel() == 1 and a.data_ptr() == b.data_ptr()


def logsumexp(
    source: Source, scales: Pair, masked: bool, bounded: bool, expect: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``L = log sum_j exp(a_i S_ij)`` over the negatives (``masked``) or all columns, and ``E = sum_j p_ij S_ij``.

    ``p`` is the softmax belonging to ``L``; ``E`` is filled only if ``expect`` is set. A row without a term has
    ``L = -inf`` and ``E = 0``.
    """
    positives = Positives.of(source)
    fast = _safe_without_maximum(scales, bounded)
    shared = fast and _shared(scales)
    stats: list[_Stats | None] = [None, None]
    for tile in tiles(source, scratch=1 + expect):
        t = tile.scratch[0]
        for side, dim in SIDES:
            scale = scales[side]
            if scale is None:
                continue
            if not (shared and side == 1):
                torch.mul(tile.scores, tile.spread(scale, dim), out=t)
                if fast:
                    t.exp_()
                if masked:
                    positives.fill_(t, tile, 0.0 if fast else -math.inf)
            top = None
            if not fast:
                top = t.amax(dim)
                t.sub_(_finite(top).unsqueeze(dim)).exp_()
            mean = torch.mul(t, tile.scores, out=tile.scratch[1]).sum(dim) if expect else None
            stats[side] = _merge(stats[side], _Stats(top, t.sum(dim), mean), tile, dim, source.shape[side])
    (row_value, row_mean), (col_value, col_mean) = (_close(s, source) for s in stats)
    return (row_value, col_value), (row_mean, col_mean)


class _Stats(NamedTuple):
    """Per anchor: the largest exponent (None: nothing was subtracted), the sum of exponentials, the same times S."""

    top: Tensor | None
    total: Tensor
    mean: Tensor | None


def _merge(old: _Stats | None, new: _Stats, tile: Tile, dim: int, size: int) -> _Stats:
    if tile.alone:
        return new
    if old is None:
        old = _Stats(
            None if new.top is None else new.total.new_full((size,), -math.inf),
            new.total.new_zeros(size),
            None if new.mean is None else new.total.new_zeros(size),
        )
    total, gain = tile.part(old.total, dim), None
    if old.top is not None and new.top is not None:
        top = tile.part(old.top, dim)
        both = torch.maximum(top, new.top)
        shift = _finite(both)
        total.mul_((top - shift).exp_())
        gain = (_finite(new.top) - shift).exp_()
        if old.mean is not None:
            tile.part(old.mean, dim).mul_((top - shift).exp_())
        top.copy_(both)
    total.add_(new.total if gain is None else new.total * gain)
    if old.mean is not None and new.mean is not None:
        tile.part(old.mean, dim).add_(new.mean if gain is None else new.mean * gain)
    return old


def _finite(x: Tensor) -> Tensor:
    """-inf, the maximum of nothing, as 0: subtracting it must not give nan."""
    return x.masked_fill(x == -math.inf, 0.0)


def _close(stats: _Stats | None, source: Source) -> tuple[Tensor, Tensor]:
    """``(L, E)``; empty where not asked for."""
    if stats is None:
        empty = source.rows.new_empty(0, dtype=source.dtype)
        return empty, empty.clone()
    value = stats.total.log() if stats.top is None else stats.total.log().add_(stats.top)
    if stats.mean is None:
        return value, value.new_empty(0)
    return value, stats.mean / stats.total.clamp_min(torch.finfo(source.dtype).tiny)


def logsumexp_backward(
    source: Source,
    scales: Pair,
    values: Pair,
    means: Pair,
    grads: Pair,
    mean_grads: Pair,
    masked: bool,
    bounded: bool,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """``dS_ij = p_ij (gL a + gE (1 + a (S_ij - E)))`` summed over both sides, sent on to the source."""
    positives = Positives.of(source)
    fast = _safe_without_maximum(scales, bounded)
    shared = fast and _shared(scales) and mean_grads[0] is None and mean_grads[1] is None
    gradient = Gradient(source, needs)
    weights: list[tuple[Tensor, Tensor | None, Tensor] | None] = []
    for side, _ in SIDES:
        scale, value, g, ge = scales[side], values[side], grads[side], mean_grads[side]
        if scale is None or value is None or (g is None and ge is None):
            weights.append(None)
            continue
        value = value.masked_fill(value == -math.inf, math.inf)  # a row without terms: p = exp(-inf) = 0
        const = torch.zeros_like(value) if g is None else g * scale
        slope = None
        if ge is not None:
            mean = means[side]
            assert mean is not None
            const, slope = const + ge * (1 - scale * mean), ge * scale
        if fast:  # exp(a S) stays in range, so the normaliser joins the weights
            norm = value.neg().exp()
            const, slope = const * norm, None if slope is None else slope * norm
        weights.append((const, slope, value))
    for tile in tiles(source, scratch=3):
        out, t, u = gradient.of(tile), tile.scratch[0], tile.scratch[1]
        if shared and weights[0] is not None and weights[1] is not None:
            torch.mul(tile.scores, _given(scales[0]), out=out).exp_()
            torch.add(tile.spread(weights[0][0], 1), tile.spread(weights[1][0], 0), out=t)
            out.mul_(t)
        else:
            written = False
            for side, dim in SIDES:
                w = weights[side]
                if w is None:
                    continue
                x = t if written else out
                torch.mul(tile.scores, tile.spread(_given(scales[side]), dim), out=x)
                if not fast:
                    x.sub_(tile.spread(w[2], dim))
                x.exp_()
                if w[1] is None:
                    x.mul_(tile.spread(w[0], dim))
                else:
                    torch.mul(tile.scores, tile.spread(w[1], dim), out=u).add_(tile.spread(w[0], dim))
                    x.mul_(u)
                if written:
                    out.add_(t)
                written = True
            if not written:
                out.zero_()
        if masked:
            positives.fill_(out, tile, 0.0)
        gradient.add(tile)
    return gradient.finish()


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
