"""Triton kernels that write a tile of a block: its gradient, or its exponentials."""

from __future__ import annotations

import triton
import triton.language as tl

from .scores import cosines, exp, products, tile, vector
from .sums import leave, sigmoid


@triton.jit
def _write(given, out, grad, r, c, inside):
    """The gradient of the inner products from that of the cosines; this one, times a factor, if there is one."""
    if given.factor is not None:
        grad = grad * tl.load(given.factor)
    else:
        if given.row_inv is not None:
            grad = grad * tl.load(given.row_inv + given.start_r + r, mask=r < given.size_r, other=0.0)[:, None]
        if given.col_inv is not None:
            grad = grad * tl.load(given.col_inv + given.start_c + c, mask=c < given.size_c, other=0.0)[None, :]
    place = r.to(tl.int64)[:, None] * given.size_c + c.to(tl.int64)[None, :]
    tl.store(out + place, grad.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_share(
    s, k, vectors, size, i, inside, negative, ENTROPIC: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr
):
    """``e (base + slope log e)``, at positives that do not count ``e uncounted``."""
    top = tl.expand_dims(tl.load(vectors + i, mask=inside, other=0.0), AXIS)
    factor = tl.expand_dims(tl.load(vectors + size + i, mask=inside, other=0.0), AXIS)
    log_e = s * tl.expand_dims(k, AXIS) - top
    if ENTROPIC:
        slope = tl.expand_dims(tl.load(vectors + 2 * size + i, mask=inside, other=0.0), AXIS)
        factor = factor + slope * log_e
        if MASKED:
            uncounted = tl.expand_dims(tl.load(vectors + 3 * size + i, mask=inside, other=0.0), AXIS)
            factor = tl.where(negative, factor, uncounted)
    return exp(log_e) * factor


@triton.jit
def softmax_gradient(
    given,
    out,
    row_vectors,  # (4, N): top, base, slope, uncounted
    n,
    row_scale,
    col_vectors,  # (4, M)
    m,
    col_scale,
    ONE_ROW_SCALE: tl.constexpr,
    ONE_COL_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    ENTROPIC: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradient of the log-sum-exps and entropies of both sides."""
    _, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, inside, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        grad = tl.zeros([R, C // PARTS], tl.float32)
        if row_vectors is not None:
            i, there = given.start_r + r, r < given.size_r
            k = vector(row_scale, i, there, ONE_ROW_SCALE)
            grad += _softmax_share(s, k, row_vectors, n, i, there, negative, ENTROPIC, MASKED, 1)
        if col_vectors is not None:
            j, there = given.start_c + c, c < given.size_c
            k = vector(col_scale, j, there, ONE_COL_SCALE)
            grad += _softmax_share(s, k, col_vectors, m, j, there, negative, ENTROPIC, MASKED, 0)
        if MASKED and not ENTROPIC:
            grad = tl.where(negative, grad, 0.0)
        _write(given, out, grad, r, c, inside)


@triton.jit
def exponentials(
    given,
    out,  # (rows, columns): 2^(z - power) over lengths of columns, 0 for what does not count; may be the products
    found,  # (2, tiles, rows): the tile's powers, -inf where nothing ever counted, and sums of its exponentials
    powers,  # (N,) that the rows have so far; -inf: none yet
    scale,  # (N,), or (1,)
    ONE_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Exponentials in one go, with ``z = scale S log2(e)``, before the largest of a row is known.

    A row's largest has to lie between 2^LEAST and 2^MOST, and what is far below it may vanish. A tile takes the power
    that its row has; only where its own largest does not lie there, another. As powers are integers, to change them
    later (:func:`rescale`) rounds only what vanishes.
    """
    _, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    i, there = given.start_r + r, r < given.size_r
    k = vector(scale, i, there, ONE_SCALE) * 1.4426950408889634
    had = tl.load(powers + i, mask=there, other=-float("inf"))
    base = tl.where(had == -float("inf"), 0.0, had)
    lowest = tl.where(had == -float("inf"), float(LEAST), -float("inf"))
    for part in tl.static_range(PARTS):
        number, tiles = across * PARTS + part, tl.cdiv(given.size_c, C) * PARTS
        s, inside, counts, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        if not MASKED:
            counts = inside
        z = tl.where(counts, s * k[:, None], -float("inf"))
        top = tl.max(z, 1)
        power = tl.where((top >= lowest) & (top <= base + MOST), base, tl.ceil(top) - (LEAST + MOST) // 2)
        e = tl.where(counts, tl.exp2(z - power[:, None]), 0.0)
        leave(found, 0, tiles, number, given.size_r, r, power)
        leave(found, 1, tiles, number, given.size_r, r, tl.sum(e, 1))
        # For products with columns as they came.
        if given.col_inv is not None:
            e = e * tl.load(given.col_inv + given.start_c + c, mask=c < given.size_c, other=0.0)[None, :]
        place = r.to(tl.int64)[:, None] * given.size_c + c.to(tl.int64)[None, :]
        tl.store(out + place, e.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rescale(
    x,  # (rows, width): numbers over 2^old
    rows,
    width,
    old,  # (tiles, rows) of each C columns; -inf: there are only zeros
    stride,  # between tiles; 0: the same for all columns
    new,  # (rows,)
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Numbers over 2^new instead, which is not below 2^old; where it is the same they are not even read."""
    across, up = tl.program_id(0), tl.program_id(1)
    r, c = up * R + tl.arange(0, R), across * C + tl.arange(0, C)
    there = r < rows
    power = tl.load(old + across * stride + r, mask=there, other=-float("inf"))
    gap = tl.where(power == -float("inf"), 0.0, power - tl.load(new + r, mask=there, other=0.0))
    if tl.min(gap) < 0:
        inside = there[:, None] & (c < width)[None, :]
        place = x + r.to(tl.int64)[:, None] * width + c.to(tl.int64)[None, :]
        scaled = tl.load(place, mask=inside, other=0.0) * tl.exp2(gap)[:, None]
        tl.store(place, scaled.to(x.dtype.element_ty), mask=inside)


@triton.jit
def affine_gradient(
    given,
    out,
    row_vectors,  # (2, N): constant, slope
    n,
    col_vectors,  # (2, M)
    m,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``constant + slope S`` of both sides, over the negatives: the gradient of the moments."""
    _, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, inside, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        grad = tl.zeros([R, C // PARTS], tl.float32)
        if row_vectors is not None:
            i, there = given.start_r + r, r < given.size_r
            constant = tl.load(row_vectors + i, mask=there, other=0.0)
            grad += constant[:, None] + tl.load(row_vectors + n + i, mask=there, other=0.0)[:, None] * s
        if col_vectors is not None:
            j, there = given.start_c + c, c < given.size_c
            constant = tl.load(col_vectors + j, mask=there, other=0.0)
            grad += constant[None, :] + tl.load(col_vectors + m + j, mask=there, other=0.0)[None, :] * s
        _write(given, out, tl.where(negative, grad, 0.0), r, c, inside)


@triton.jit
def violation_gradient(
    given,
    out,
    row_thresholds,  # (slots, N)
    row_slots,
    row_grad,  # (N,)
    n,
    col_thresholds,  # (slots, M)
    col_slots,
    col_grad,  # (M,)
    m,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Upstream gradients of the thresholds that a negative is above."""
    _, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, inside, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        grad = tl.zeros([R, C // PARTS], tl.float32)
        if row_thresholds is not None:
            place, there = row_thresholds + given.start_r + r, r < given.size_r
            g = tl.load(row_grad + given.start_r + r, mask=there, other=0.0)
            for _slot in range(row_slots):
                t = tl.load(place, mask=there, other=float("inf"))
                grad += tl.where(s > t[:, None], g[:, None], 0.0)
                place += n
        if col_thresholds is not None:
            place, there = col_thresholds + given.start_c + c, c < given.size_c
            g = tl.load(col_grad + given.start_c + c, mask=there, other=0.0)
            for _slot in range(col_slots):
                t = tl.load(place, mask=there, other=float("inf"))
                grad += tl.where(s > t[None, :], g[None, :], 0.0)
                place += m
        _write(given, out, tl.where(negative, grad, 0.0), r, c, inside)


@triton.jit
def softplus_gradient(
    given,
    out,
    row_vectors,  # (3, N): scale, bias, gradient
    n,
    col_vectors,  # (3, M)
    m,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradient of the sums of ``log(1 + e^z)`` of both sides."""
    _, across, r = tile(given, R, C)
    parts = products(given, across, r, R, C, K, PARTS)
    for part in tl.static_range(PARTS):
        number = across * PARTS + part
        s, inside, negative, c = cosines(given, parts[part], r, number * (C // PARTS), C // PARTS)
        grad = tl.zeros([R, C // PARTS], tl.float32)
        if row_vectors is not None:
            i, there = given.start_r + r, r < given.size_r
            k = tl.load(row_vectors + i, mask=there, other=0.0)
            b = tl.load(row_vectors + n + i, mask=there, other=0.0)
            g = tl.load(row_vectors + 2 * n + i, mask=there, other=0.0)
            grad += sigmoid(s * k[:, None] + b[:, None]) * (k * g)[:, None]
        if col_vectors is not None:
            j, there = given.start_c + c, c < given.size_c
            k = tl.load(col_vectors + j, mask=there, other=0.0)
            b = tl.load(col_vectors + m + j, mask=there, other=0.0)
            g = tl.load(col_vectors + 2 * m + j, mask=there, other=0.0)
            grad += sigmoid(s * k[None, :] + b[None, :]) * (k * g)[None, :]
        _write(given, out, tl.where(negative, grad, 0.0), r, c, inside)
