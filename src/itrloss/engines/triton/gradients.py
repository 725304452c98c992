"""Triton kernels that write a block: its gradient, or its exponentials. A program has some rows and columns of it."""

from __future__ import annotations

import triton
import triton.language as tl

from .sums import cosines, sigmoid, vector


@triton.jit
def _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c):
    """The gradient of the inner products from that of the cosines."""
    if row_inv is not None:
        grad = grad * tl.load(row_inv + i, mask=inside_r, other=0.0)[:, None]
    if col_inv is not None:
        grad = grad * tl.load(col_inv + j, mask=inside_c, other=0.0)[None, :]
    place = r.to(tl.int64)[:, None] * stride + c.to(tl.int64)[None, :]
    tl.store(out + place, grad.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_share(s, k, top, base, slope, uncounted, negative, ENTROPIC: tl.constexpr, MASKED: tl.constexpr):
    """``e (base + slope log e)``, at positives that do not count ``e uncounted``; all vectors broadcast."""
    log_e = s * k - top
    factor = base
    if ENTROPIC:
        factor = base + slope * tl.maximum(log_e, -1e4)
        if MASKED:
            factor = tl.where(negative, factor, uncounted)
    return tl.exp(log_e) * factor


@triton.jit
def softmax_gradient(
    block,
    out,
    stride,
    size_r,
    size_c,
    start_r,
    start_c,
    row_inv,
    col_inv,
    row_ids,
    col_ids,
    row_scale,
    row_vectors,  # (4, rows): top, base, slope, uncounted
    rows,
    col_scale,
    col_vectors,  # (4, columns)
    cols,
    ONE_ROW_SCALE: tl.constexpr,
    ONE_COL_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    ENTROPIC: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Gradient of the log-sum-exps and entropies of both sides."""
    r, first = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C
    s, inside, negative, c = cosines(
        block, r, first, stride, 1, size_r, size_c, start_r, start_c, row_inv, col_inv, row_ids, col_ids, C
    )
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    grad = tl.zeros([R, C], tl.float32)
    if row_vectors is not None:
        k = vector(row_scale, i, inside_r, ONE_ROW_SCALE)
        top = tl.load(row_vectors + i, mask=inside_r, other=0.0)
        base = tl.load(row_vectors + rows + i, mask=inside_r, other=0.0)
        slope, uncounted = base, base
        if ENTROPIC:
            slope = tl.load(row_vectors + 2 * rows + i, mask=inside_r, other=0.0)
            uncounted = tl.load(row_vectors + 3 * rows + i, mask=inside_r, other=0.0)
        grad += _softmax_share(
            s, k[:, None], top[:, None], base[:, None], slope[:, None], uncounted[:, None], negative, ENTROPIC, MASKED
        )
    if col_vectors is not None:
        k = vector(col_scale, j, inside_c, ONE_COL_SCALE)
        top = tl.load(col_vectors + j, mask=inside_c, other=0.0)
        base = tl.load(col_vectors + cols + j, mask=inside_c, other=0.0)
        slope, uncounted = base, base
        if ENTROPIC:
            slope = tl.load(col_vectors + 2 * cols + j, mask=inside_c, other=0.0)
            uncounted = tl.load(col_vectors + 3 * cols + j, mask=inside_c, other=0.0)
        grad += _softmax_share(
            s, k[None, :], top[None, :], base[None, :], slope[None, :], uncounted[None, :], negative, ENTROPIC, MASKED
        )
    if MASKED and not ENTROPIC:
        grad = tl.where(negative, grad, 0.0)
    _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c)


@triton.jit
def exponentials(
    block,
    out,  # (rows, columns) exponentials, 0 for what does not count; may be the block
    stride,
    size_r,
    size_c,
    start_r,
    start_c,
    row_inv,
    col_inv,
    row_ids,
    col_ids,
    scale,  # (rows,), or (1,)
    top,  # (rows,) highest exponent so far
    total,  # (rows,) sum of exponentials so far
    factor,  # (rows,) what those of former blocks are to be multiplied by
    ONE_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """``exp(scale S - top)`` of whole rows of the block, which are read twice: the top comes first."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    i, inside_r = start_r + r, r < size_r
    k = vector(scale, i, inside_r, ONE_SCALE)
    before = tl.load(top + i, mask=inside_r, other=-float("inf"))
    highest = before
    sums = tl.zeros([R], tl.float32)
    base = sums
    for reading in tl.static_range(2):
        if reading == 1:
            base = tl.where(highest == -float("inf"), 0.0, highest)
        for first in range(0, size_c, C):
            s, counts, negative, c = cosines(
                block, r, first, stride, 1, size_r, size_c, start_r, start_c, row_inv, col_inv, row_ids, col_ids, C
            )
            inside = counts
            if MASKED:
                counts = negative
            z = tl.where(counts, s * k[:, None], -float("inf"))
            if reading == 0:
                highest = tl.maximum(highest, tl.max(z, 1))
            else:
                e = tl.exp(z - base[:, None])
                sums += tl.sum(e, 1)
                # Products of inner products' exponentials with unit columns: their lengths come in here.
                if col_inv is not None:
                    e = e * tl.load(col_inv + start_c + c, mask=c < size_c, other=0.0)[None, :]
                place = r.to(tl.int64)[:, None] * stride + c.to(tl.int64)[None, :]
                tl.store(out + place, e.to(out.dtype.element_ty), mask=inside)
    shrink = tl.exp(before - base)
    tl.store(factor + i, shrink, mask=inside_r)
    tl.store(total + i, tl.load(total + i, mask=inside_r, other=0.0) * shrink + sums, mask=inside_r)
    tl.store(top + i, highest, mask=inside_r)


@triton.jit
def affine_gradient(
    block,
    out,
    stride,
    size_r,
    size_c,
    start_r,
    start_c,
    row_inv,
    col_inv,
    row_ids,
    col_ids,
    row_vectors,  # (2, rows): constant, slope
    rows,
    col_vectors,  # (2, columns)
    cols,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """``constant + slope S`` of both sides, over the negatives: the gradient of the moments."""
    r, first = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C
    s, inside, negative, c = cosines(
        block, r, first, stride, 1, size_r, size_c, start_r, start_c, row_inv, col_inv, row_ids, col_ids, C
    )
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    constant, slope = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    if row_vectors is not None:
        constant += tl.load(row_vectors + i, mask=inside_r, other=0.0)[:, None]
        slope += tl.load(row_vectors + rows + i, mask=inside_r, other=0.0)[:, None]
    if col_vectors is not None:
        constant += tl.load(col_vectors + j, mask=inside_c, other=0.0)[None, :]
        slope += tl.load(col_vectors + cols + j, mask=inside_c, other=0.0)[None, :]
    grad = tl.where(negative, constant + slope * s, 0.0)
    _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c)


@triton.jit
def violation_gradient(
    block,
    out,
    stride,
    size_r,
    size_c,
    start_r,
    start_c,
    row_inv,
    col_inv,
    row_ids,
    col_ids,
    row_thresholds,  # (slots, rows)
    row_slots,
    row_grad,  # (rows,)
    rows,
    col_thresholds,
    col_slots,
    col_grad,
    cols,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Upstream gradients of the thresholds that a negative is above."""
    r, first = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C
    s, inside, negative, c = cosines(
        block, r, first, stride, 1, size_r, size_c, start_r, start_c, row_inv, col_inv, row_ids, col_ids, C
    )
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    grad = tl.zeros([R, C], tl.float32)
    if row_thresholds is not None:
        g = tl.load(row_grad + i, mask=inside_r, other=0.0)
        for slot in range(row_slots):
            t = tl.load(row_thresholds + slot * rows + i, mask=inside_r, other=float("inf"))
            grad += tl.where(s > t[:, None], g[:, None], 0.0)
    if col_thresholds is not None:
        g = tl.load(col_grad + j, mask=inside_c, other=0.0)
        for slot in range(col_slots):
            t = tl.load(col_thresholds + slot * cols + j, mask=inside_c, other=float("inf"))
            grad += tl.where(s > t[None, :], g[None, :], 0.0)
    grad = tl.where(negative, grad, 0.0)
    _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c)


@triton.jit
def softplus_gradient(
    block,
    out,
    stride,
    size_r,
    size_c,
    start_r,
    start_c,
    row_inv,
    col_inv,
    row_ids,
    col_ids,
    row_vectors,  # (3, rows): scale, bias, gradient
    rows,
    col_vectors,  # (3, columns)
    cols,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Gradient of the sums of ``log(1 + e^z)`` of both sides."""
    r, first = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C
    s, inside, negative, c = cosines(
        block, r, first, stride, 1, size_r, size_c, start_r, start_c, row_inv, col_inv, row_ids, col_ids, C
    )
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    grad = tl.zeros([R, C], tl.float32)
    if row_vectors is not None:
        k = tl.load(row_vectors + i, mask=inside_r, other=0.0)
        b = tl.load(row_vectors + rows + i, mask=inside_r, other=0.0)
        g = tl.load(row_vectors + 2 * rows + i, mask=inside_r, other=0.0)
        grad += sigmoid(s * k[:, None] + b[:, None]) * (k * g)[:, None]
    if col_vectors is not None:
        k = tl.load(col_vectors + j, mask=inside_c, other=0.0)
        b = tl.load(col_vectors + cols + j, mask=inside_c, other=0.0)
        g = tl.load(col_vectors + 2 * cols + j, mask=inside_c, other=0.0)
        grad += sigmoid(s * k[None, :] + b[None, :]) * (k * g)[None, :]
    grad = tl.where(negative, grad, 0.0)
    _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c)
