"""Triton kernels of sums: what the anchors of a tile find in it.

A *side* is seen from its anchors: the rows, or the columns. One reading of a tile answers both. Every program leaves
the figures of its own anchors in its own place, ``out`` (figures, tiles, anchors); they are added up afterwards, in the
order of the tiles. So results do not depend on the order of the programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import cosines, exp, products, tile, vector

MEAN, ENTROPY = tl.constexpr(1), tl.constexpr(2)  # as in itrloss.engines.softmax
SUM, COUNT, COUNT_TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def leave(out, figure, tiles, number, anchors, a, values):
    """Store a figure of some anchors in the place of this tile."""
    tl.store(out + (figure * tiles + number) * anchors + a, values, mask=a < anchors)


@triton.jit
def _of_softmax(out, tiles, number, anchors, a, s, k, counts, inside, EXTRA: tl.constexpr, AXIS: tl.constexpr):
    summed = counts
    if EXTRA == ENTROPY:
        summed = inside
    z = tl.where(summed, s * tl.expand_dims(k, AXIS), -float("inf"))
    top = tl.max(z, AXIS)
    z -= tl.expand_dims(tl.where(top == -float("inf"), 0.0, top), AXIS)
    e = exp(z)
    leave(out, 0, tiles, number, anchors, a, top)
    leave(out, 1, tiles, number, anchors, a, tl.sum(e, AXIS))
    if EXTRA == MEAN:
        leave(out, 2, tiles, number, anchors, a, tl.sum(e * s, AXIS))
    if EXTRA == ENTROPY:
        e = tl.where(counts, e, 0.0)
        leave(out, 2, tiles, number, anchors, a, tl.sum(e * tl.where(counts, z, 0.0), AXIS))
        leave(out, 3, tiles, number, anchors, a, tl.sum(e, AXIS))


@triton.jit
def softmax_sums(
    given,
    row_out,  # top: highest exponent. With exponentials e = exp(scale S - top), total: sum of e. MEAN: sum of e S.
    col_out,  # ENTROPY: sum of e (scale S - top) over what counts, and sum of e over what counts
    row_scale,  # (N,), or (1,)
    col_scale,
    ONE_ROW_SCALE: tl.constexpr,
    ONE_COL_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    EXTRA: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sums of exponentials."""
    up, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, inside, counts, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        if not MASKED:
            counts = inside
        if row_out is not None:
            k = vector(row_scale, given.start_r + r, r < given.size_r, ONE_ROW_SCALE)
            _of_softmax(
                row_out, tl.cdiv(given.size_c, C) * PARTS, number, given.size_r, r, s, k, counts, inside, EXTRA, 1
            )
        if col_out is not None:
            k = vector(col_scale, given.start_c + c, c < given.size_c, ONE_COL_SCALE)
            _of_softmax(col_out, tl.cdiv(given.size_r, R), up, given.size_c, c, s, k, counts, inside, EXTRA, 0)


@triton.jit
def add_softmax_sums(
    found,  # (figures, tiles, anchors) that softmax_sums has left
    tiles,
    anchors,
    into,  # (figures, anchors) so far
    stride,  # between figures
    EXTRA: tl.constexpr,
    BINARY: tl.constexpr,  # tops are of powers of two, as itrloss.engines.triton.gradients.exponentials leaves them
    ANCHORS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Add the tiles' sums, put on a common top."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    inside, place, plane = a < anchors, into + a, tiles * anchors
    top = tl.load(place, mask=inside, other=-float("inf"))
    total = tl.load(place + stride, mask=inside, other=0.0)
    figure, share = tl.zeros_like(total), tl.zeros_like(total)
    if EXTRA != 0:
        figure = tl.load(place + 2 * stride, mask=inside, other=0.0)
    if EXTRA == ENTROPY:
        share = tl.load(place + 3 * stride, mask=inside, other=0.0)
    for first in range(0, tiles, TILES):
        t = first + tl.arange(0, TILES)
        there = (t < tiles)[:, None] & inside[None, :]
        one = found + t[:, None] * anchors + a[None, :]
        tops = tl.load(one, mask=there, other=-float("inf"))
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        gap, gaps = top - base, tops - base[None, :]
        if BINARY:
            factor, factors = tl.exp2(gap), tl.exp2(gaps)
        else:
            factor, factors = exp(gap), exp(gaps)
        total = total * factor + tl.sum(tl.load(one + plane, mask=there, other=0.0) * factors, 0)
        if EXTRA == MEAN:
            figure = figure * factor + tl.sum(tl.load(one + 2 * plane, mask=there, other=0.0) * factors, 0)
        if EXTRA == ENTROPY:
            gap, gaps = tl.where(top == -float("inf"), 0.0, gap), tl.where(tops == -float("inf"), 0.0, gaps)
            figures = tl.load(one + 2 * plane, mask=there, other=0.0)
            shares = tl.load(one + 3 * plane, mask=there, other=0.0)
            figure = (figure + gap * share) * factor + tl.sum((figures + gaps * shares) * factors, 0)
            share = share * factor + tl.sum(shares * factors, 0)
        top = higher
    tl.store(place, top, mask=inside)
    tl.store(place + stride, total, mask=inside)
    if EXTRA != 0:
        tl.store(place + 2 * stride, figure, mask=inside)
    if EXTRA == ENTROPY:
        tl.store(place + 3 * stride, share, mask=inside)


@triton.jit
def moment_sums(
    given,
    row_out,  # sum of S - centre over the negatives, and of its square
    col_out,
    row_centre,  # (N,)
    col_centre,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sums of the negatives' distances from a centre, and of their squares."""
    up, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, _, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        if row_out is not None:
            middle = tl.load(row_centre + given.start_r + r, mask=r < given.size_r, other=0.0)
            x, tiles = tl.where(negative, s - middle[:, None], 0.0), tl.cdiv(given.size_c, C) * PARTS
            leave(row_out, 0, tiles, number, given.size_r, r, tl.sum(x, 1))
            leave(row_out, 1, tiles, number, given.size_r, r, tl.sum(x * x, 1))
        if col_out is not None:
            middle = tl.load(col_centre + given.start_c + c, mask=c < given.size_c, other=0.0)
            x, tiles = tl.where(negative, s - middle[None, :], 0.0), tl.cdiv(given.size_r, R)
            leave(col_out, 0, tiles, up, given.size_c, c, tl.sum(x, 0))
            leave(col_out, 1, tiles, up, given.size_c, c, tl.sum(x * x, 0))


@triton.jit
def _highest(s, AXIS: tl.constexpr):
    """nan if there is one, which Triton's maximum leaves out."""
    return tl.where(tl.max((s != s).to(tl.int32), AXIS) > 0, float("nan"), tl.max(s, AXIS))


@triton.jit
def hardest_negatives(
    given,
    row_out,  # highest score among the negatives
    col_out,
    row_where,  # int32, whose it is, as a number in the matrix; of no use where there is no negative
    col_where,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The highest score among the negatives; of equals the first, whatever a tree of comparisons would make of them.

    A score that is not a number is the highest, as it is to PyTorch.
    """
    up, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, _, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        s = tl.where(negative, s, -float("inf"))
        if row_out is not None:
            best, tiles = _highest(s, 1), tl.cdiv(given.size_c, C) * PARTS
            leave(row_out, 0, tiles, number, given.size_r, r, best)
            where = tl.min(tl.where((s == best[:, None]) | (s != s), c[None, :], given.size_c), 1)
            leave(row_where, 0, tiles, number, given.size_r, r, given.start_c + where)
        if col_out is not None:
            best, tiles = _highest(s, 0), tl.cdiv(given.size_r, R)
            leave(col_out, 0, tiles, up, given.size_c, c, best)
            where = tl.min(tl.where((s == best[None, :]) | (s != s), r[:, None], given.size_r), 0)
            leave(col_where, 0, tiles, up, given.size_c, c, given.start_r + where)


@triton.jit
def _beyond(out, slot, tiles, number, anchors, a, s, t, negative, WHAT: tl.constexpr, AXIS: tl.constexpr):
    t = tl.expand_dims(t, AXIS)
    if WHAT == SUM:
        found = tl.where(negative, tl.maximum(s - t, 0.0), 0.0)
    elif WHAT == COUNT:
        found = (negative & (s > t)).to(tl.int32)
    else:
        found = (negative & (s >= t)).to(tl.int32)
    leave(out, slot, tiles, number, anchors, a, tl.sum(found, AXIS))


@triton.jit
def threshold_sums(
    given,
    row_out,  # a figure for each slot
    col_out,
    row_thresholds,  # (slots, N); infinite or nan where there is none
    col_thresholds,
    row_slots,
    col_slots,
    n,
    m,
    row_bias,  # (M,) added to the scores as rows see them
    col_bias,
    WHAT: tl.constexpr,  # SUM of what is above the threshold, or its COUNT, or COUNT_TIES of what is not below it
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """How many negatives are above each threshold, or by how much."""
    up, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, _, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        inside_r, inside_c = r < given.size_r, c < given.size_c
        if row_out is not None:
            seen, place = s, row_thresholds + given.start_r + r
            if row_bias is not None:
                seen = s + tl.load(row_bias + given.start_c + c, mask=inside_c, other=0.0)[None, :]
            for slot in range(row_slots):
                t = tl.load(place, mask=inside_r, other=float("inf"))
                _beyond(
                    row_out, slot, tl.cdiv(given.size_c, C) * PARTS, number, given.size_r, r, seen, t, negative, WHAT, 1
                )
                place += n
        if col_out is not None:
            seen, place = s, col_thresholds + given.start_c + c
            if col_bias is not None:
                seen = s + tl.load(col_bias + given.start_r + r, mask=inside_r, other=0.0)[:, None]
            for slot in range(col_slots):
                t = tl.load(place, mask=inside_c, other=float("inf"))
                _beyond(col_out, slot, tl.cdiv(given.size_r, R), up, given.size_c, c, seen, t, negative, WHAT, 0)
                place += m


@triton.jit
def log1p(u):
    """With all digits of a small u: what rounding took from 1 + u is in the quotient (Kahan)."""
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def softplus(z):
    return tl.maximum(z, 0.0) + log1p(exp(-tl.abs(z)))


@triton.jit
def sigmoid(z):
    e = exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _of_softplus(out, tiles, number, anchors, a, s, k, b, negative, SLOPES: tl.constexpr, AXIS: tl.constexpr):
    z = s * tl.expand_dims(k, AXIS) + tl.expand_dims(b, AXIS)
    if SLOPES:
        slope = tl.where(negative, sigmoid(z), 0.0)
        leave(out, 0, tiles, number, anchors, a, tl.sum(slope * s, AXIS))
        leave(out, 1, tiles, number, anchors, a, tl.sum(slope, AXIS))
    else:
        leave(out, 0, tiles, number, anchors, a, tl.sum(tl.where(negative, softplus(z), 0.0), AXIS))


@triton.jit
def softplus_sums(
    given,
    row_out,  # sum of log(1 + e^z) over the negatives, z = scale S + bias. SLOPES: of its slope by S, of that by bias
    col_out,
    row_scale,  # (N,), or (1,)
    row_bias,  # (N,), or (1,)
    col_scale,
    col_bias,
    ONE_ROW_SCALE: tl.constexpr,
    ONE_ROW_BIAS: tl.constexpr,
    ONE_COL_SCALE: tl.constexpr,
    ONE_COL_BIAS: tl.constexpr,
    SLOPES: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sums of ``log(1 + e^z)`` over the negatives, or of its slopes."""
    up, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, _, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        if row_out is not None:
            i, inside = given.start_r + r, r < given.size_r
            k, b = vector(row_scale, i, inside, ONE_ROW_SCALE), vector(row_bias, i, inside, ONE_ROW_BIAS)
            _of_softplus(
                row_out, tl.cdiv(given.size_c, C) * PARTS, number, given.size_r, r, s, k, b, negative, SLOPES, 1
            )
        if col_out is not None:
            j, inside = given.start_c + c, c < given.size_c
            k, b = vector(col_scale, j, inside, ONE_COL_SCALE), vector(col_bias, j, inside, ONE_COL_BIAS)
            _of_softplus(col_out, tl.cdiv(given.size_r, R), up, given.size_c, c, s, k, b, negative, SLOPES, 0)
