"""Triton kernels of sums and of their gradient, for a tile of scores each.

Each program works on one tile of BLOCK_M x BLOCK_N scores. It multiplies the embeddings of the
tile, or loads scores that are precomputed, and applies a term to ``z = scale S + shift``. A term's
form is a jitted function, which is a compile-time constant:

    FORM(z) -> (value, slope)

What a kernel does not use is not compiled. To give a term a kernel, write one such function and add
it to :data:`FORMS`. The sums of each tile are stored separately and added in the tiles' order:
unlike atomic additions, that is deterministic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import pairs, terms

IGNORE_ID = tl.constexpr(pairs.IGNORE_ID)
NOWHERE = tl.constexpr(-(2**31))  # index of a row or column beyond the end
LOG2E = tl.constexpr(1.4426950408889634)
LARGEST_FALL = tl.constexpr(terms.SMALLEST_LOG)
BAND = tl.constexpr(8)  # rows of tiles that run together: the embeddings they share stay in L2


class Inputs(NamedTuple):
    """The embeddings that kernels multiply; None where they read products or scores."""

    rows: Any  # (N, dim) half precision
    cols: Any  # (M, dim)
    row_stride: Any
    col_stride: Any
    dim: Any
    row_inv: Any  # (N,) float32 inverse norms; None: vectors are taken as they are
    col_inv: Any  # (M,)
    row_ids: Any  # (N,) int64; None: row i matches column i
    col_ids: Any  # (M,)


class Values(NamedTuple):
    """The scale, the shift and the limits of anchors: (1,) with stride 0, or (A,)."""

    scale: Any
    shift: Any  # None, or (slots, A), over whose slots the terms are summed
    below: Any  # None, or a limit of the scores of candidates
    above: Any
    scale_stride: Any
    shift_stride: Any
    below_stride: Any
    above_stride: Any
    slots: Any
    slot_stride: Any


class Block(NamedTuple):
    """A part of the matrix."""

    row: Any  # its first row
    col: Any  # its first column
    size_m: Any  # number of rows
    size_n: Any  # number of columns
    first_col: Any  # column 0's index among the anchors


class Panel(NamedTuple):
    """A buffer (size_m, stride) for a block; None where absent."""

    x: Any
    stride: Any
    width: Any  # columns that may be accessed


class Upstream(NamedTuple):
    """The gradient (K, A) of the sums, with its strides."""

    x: Any
    plane: Any
    stride: Any


class Listed(NamedTuple):
    """Listed pairs p, sorted by their anchors; None where absent.

    Pairs of anchor i are ``order[start[i]:start[i + 1]]``, or the one pair (i, i).
    """

    grad: Any  # (P,) float32 gradients of the scores
    start: Any  # (A + 1,)
    order: Any  # (P,)
    other: Any  # (P,) candidates
    y: Any  # (M, dim) the candidates' vectors
    stride: Any
    inv: Any  # (M,) inverse norms


class Config(NamedTuple):
    """Compile-time constants."""

    BLOCK_M: Any  # rows of a tile
    BLOCK_N: Any  # columns of a tile
    BLOCK_K: Any  # dimensions that are multiplied at once
    PARTS: Any  # 1 or 4: parts of a tile's columns, which are worked on one after the other
    OVER: Any  # "negatives", "positives" or "all"
    IDS: Any  # whether there are ids
    SHARED: Any  # values are one number each: one evaluation serves both sides
    ROWS: Any  # whether the rows are anchors
    COLS: Any  # whether the columns are anchors
    WIDTH: Any  # number of terms, K: 1 or 2
    BASE_2: Any  # the term is an exponential of base 2, as scale and shift are in units of log 2
    SHIFT_FIRST: Any  # z = scale (S + shift), which is exact for a large scale
    MAXIMUM: Any  # the largest z is taken in place of a sum
    GRAD_SCALE: Any  # whether the scale gets a gradient
    GRAD_SHIFT: Any


class Axis(NamedTuple):
    """The rows of a tile, or the columns of a part of it; vectors are (BLOCK,)."""

    pid: Any  # which of the parts along the block's axis
    parts: Any  # their number
    start: Any  # index of the first one in the matrix
    anchor: Any  # index of the first one among the anchors
    size: Any  # of the block's axis
    local: Any  # indices in the block
    lane: Any  # offsets from ``start``, of the last one beyond the end: loads need no mask
    inv: Any  # inverse norms
    ids: Any  # ids, or indices in the matrix; NOWHERE beyond the end


@triton.jit
def _axis(pid, start, first, size, inv, ids, BLOCK: tl.constexpr, PARTS: tl.constexpr = 1):
    """Return the Axis of part ``pid`` of a block's rows or columns, each of whose tiles has PARTS
    parts.
    """
    begin = pid * BLOCK
    lane = tl.arange(0, BLOCK)
    local = begin + lane
    start = start + begin
    inside = local < size
    lane = tl.minimum(lane, size - 1 - begin)
    if ids is None:
        ids = tl.where(inside, start + lane, NOWHERE)
    else:
        ids = tl.where(inside, tl.load(ids + start + lane), IGNORE_ID)
    inv = tl.full([BLOCK], 1.0, tl.float32) if inv is None else tl.load(inv + start + lane)
    return Axis(
        pid, tl.cdiv(size, BLOCK * PARTS) * PARTS, start, first + start, size, local, lane, inv, ids
    )


@triton.jit
def _part(pid, inputs, block, C: tl.constexpr):
    """Return the Axis of part ``pid`` of the columns."""
    side = block.col, block.first_col, block.size_n, inputs.col_inv, inputs.col_ids
    return _axis(pid, *side, C.BLOCK_N // C.PARTS, C.PARTS)


@triton.jit
def _dot(inputs, rows, cols, C: tl.constexpr):
    """Return the (BLOCK_M, BLOCK_N) float32 inner products of rows and columns."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    k = tl.arange(0, C.BLOCK_K)
    a = (
        inputs.rows
        + (rows.start + rows.lane).to(tl.int64)[:, None] * inputs.row_stride
        + k[None, :]
    )
    b = (
        inputs.cols
        + (cols.start + cols.lane).to(tl.int64)[None, :] * inputs.col_stride
        + k[:, None]
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs.dim, C.BLOCK_K):
        acc = tl.dot(tl.load(a + start), tl.load(b + start), acc, input_precision="ieee")
    return acc


@triton.jit
def _entries(panel, rows, cols):
    """Return pointers to a tile's entries and their mask.

    The mask of a buffer goes up to its stride, so that accesses have 16 bytes.
    """
    pointers = panel.x + rows.local.to(tl.int64)[:, None] * panel.stride + cols.local[None, :]
    return pointers, (rows.local < rows.size)[:, None] & (cols.local < panel.width)[None, :]


@triton.jit
def _tile(inputs, products, block, C: tl.constexpr):
    """Return the Axis of the rows, the ``pid`` of the first part of columns, and inner products.

    The products are of each part of the columns. A thread holds values of many columns, and for each vector along the columns needs as many
    registers. For a whole tile that would be 1.5 times the 128 that let two programs share a
    multiprocessor; hence the parts.
    """
    pid = tl.program_id(0)
    grid_m = tl.cdiv(block.size_m, C.BLOCK_M)
    grid_n = tl.cdiv(block.size_n, C.BLOCK_N)
    band = pid // (BAND * grid_n)
    within = pid % (BAND * grid_n)
    height = tl.minimum(grid_m - band * BAND, BAND)
    pid_m = band * BAND + within % height
    pid_n = within // height
    rows = _axis(pid_m, block.row, 0, block.size_m, inputs.row_inv, inputs.row_ids, C.BLOCK_M)
    cols = _axis(pid_n, block.col, 0, block.size_n, inputs.col_inv, None, C.BLOCK_N)
    if products.x is None:
        x = _dot(inputs, rows, cols, C)
    else:
        pointers, inside = _entries(products, rows, cols)
        x = tl.load(pointers, mask=inside, other=0.0)
    if C.PARTS == 1:
        parts = (x,)
    else:
        even, odd = tl.split(
            tl.permute(tl.reshape(x, (C.BLOCK_M, 2, 2, C.BLOCK_N // 4)), (0, 3, 1, 2))
        )
        a, c = tl.split(even)
        b, d = tl.split(odd)
        parts = (a, b, c, d)
    return rows, cols.pid * C.PARTS, parts


@triton.jit
def _over_norms(x, rows, cols):
    """Return x divided by the norms of rows and columns.

    Their product is formed once for scores and gradients.
    """
    return x * (rows.inv[:, None] * cols.inv[None, :])


@triton.jit
def _masked(x, y, empty, rows, cols, ENDS: tl.constexpr, C: tl.constexpr):
    """Return x and y with ``empty`` for excluded pairs and, with ENDS, beyond the block's ends."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N // C.PARTS
    # slopes may be constants
    x, y = tl.broadcast_to(x, (BLOCK_M, BLOCK_N)), tl.broadcast_to(y, (BLOCK_M, BLOCK_N))
    # Without ids, only tiles at the end of a block or on the diagonal have excluded pairs.
    special = C.OVER == "negatives" and (rows.start < cols.start + BLOCK_N) & (
        cols.start < rows.start + BLOCK_M
    )
    if ENDS:
        special = (
            special
            | ((rows.pid + 1) * BLOCK_M > rows.size)
            | ((cols.pid + 1) * BLOCK_N > cols.size)
        )
    if C.IDS or C.OVER == "positives" or special:
        i, j = rows.ids[:, None], cols.ids[None, :]
        if C.IDS:
            valid = (i != IGNORE_ID) & (j != IGNORE_ID)
            valid = (
                valid & (i != j)
                if C.OVER == "negatives"
                else valid & (i == j)
                if C.OVER == "positives"
                else valid
            )
        elif C.OVER == "positives":
            valid = i == j
        elif ENDS:  # one comparison instead of three: NOWHERE is negative
            valid = (i ^ j) > 0 if C.OVER == "negatives" else (i | j) >= 0
        else:
            valid = i != j
        x, y = tl.where(valid, x, empty), tl.where(valid, y, empty)
    return x, y


@triton.jit
def _load_anchors(x, begin, stride, axis, AXIS: tl.constexpr, SHARED: tl.constexpr = False):
    """Return values of an axis's anchors, which broadcast with the scores, or one for all; 0 if x
    is None.
    """
    if x is None:
        y = 0.0
    elif SHARED:
        y = tl.load(x + begin)
    else:
        y = tl.expand_dims(tl.load(x + begin + axis.anchor * stride + axis.lane * stride), AXIS)
    return y


@triton.jit
def _affine(s, values, axis, slot, AXIS: tl.constexpr, C: tl.constexpr):
    """Return ``scale S + shift`` of an axis's anchors."""
    scale = _load_anchors(values.scale, 0, values.scale_stride, axis, AXIS, C.SHARED)
    if C.BASE_2:
        scale = scale * LOG2E
    if values.shift is None:
        z = s * scale
    else:
        slot_begin = slot * values.slot_stride
        shift = _load_anchors(values.shift, slot_begin, values.shift_stride, axis, AXIS, C.SHARED)
        if C.SHIFT_FIRST:
            z = (s + shift) * scale
        elif C.BASE_2:
            z = s * scale + shift * LOG2E  # one fused multiply-add
        else:
            z = s * scale + shift
    return z


@triton.jit
def _within(x, s, fill, values, axis, AXIS: tl.constexpr, SHARED: tl.constexpr):
    """Return x with ``fill`` where scores are not within the limits of an axis's anchors."""
    if values.below is not None:
        below = _load_anchors(values.below, 0, values.below_stride, axis, AXIS, SHARED)
        x = tl.where(s < below, x, fill)
    if values.above is not None:
        above = _load_anchors(values.above, 0, values.above_stride, axis, AXIS, SHARED)
        x = tl.where(s > above, x, fill)
    return x


@triton.jit
def _store_partial(out, plane, x, rows, cols, AXIS: tl.constexpr, MAXIMUM: tl.constexpr):
    """Store a tile's sums or maxima along an axis at ``out[plane, part along that axis, anchor]``."""
    x = tl.max(x, AXIS) if MAXIMUM else tl.sum(x, AXIS)
    if AXIS == 1:
        tl.store(
            out + (plane * cols.parts + cols.pid) * rows.size + rows.local,
            x,
            mask=rows.local < rows.size,
        )
    else:
        tl.store(
            out + (plane * rows.parts + rows.pid) * cols.size + cols.local,
            x,
            mask=cols.local < cols.size,
        )


@triton.jit
def _term(z, K: tl.constexpr, FORM: tl.constexpr, SECOND: tl.constexpr):
    """Return the value and the slope of the K-th term."""
    if K == 0:
        value, slope = FORM(z)
    else:
        value, slope = SECOND(z)
    return value, slope


@triton.jit
def _summands(
    s,  # (BLOCK_M, BLOCK_N) scores
    axis,
    values,
    K: tl.constexpr,
    AXIS: tl.constexpr,
    FORM: tl.constexpr,
    SECOND: tl.constexpr,
    C: tl.constexpr,
):
    """Return the values of the K-th term, summed over slots, 0 beyond the limits."""
    x, _ = _term(_affine(s, values, axis, 0, AXIS, C), K, FORM, SECOND)
    for slot in range(1, values.slots):
        further, _ = _term(_affine(s, values, axis, slot, AXIS, C), K, FORM, SECOND)
        x += further
    return _within(x, s, float("-inf") if C.MAXIMUM else 0.0, values, axis, AXIS, C.SHARED)


@triton.jit(do_not_specialize=Block._fields)  # these change from batch to batch
def sums_kernel(
    inputs,
    products,  # Panel of float32 inner products or scores
    row,  # Block
    col,
    size_m,
    size_n,
    first_col,
    values,
    row_out,  # (WIDTH, column parts, size_m) float32: sums of each tile over its columns
    col_out,  # (WIDTH, row parts, size_n) over its rows
    FORM: tl.constexpr,
    SECOND: tl.constexpr,
    C: tl.constexpr,
):
    """Sum ``f(z_ij)`` over the columns and over the rows of each tile, or take the MAXIMUM of z."""
    block = Block(row, col, size_m, size_n, first_col)
    rows, first, parts = _tile(inputs, products, block, C)
    PARTS: tl.constexpr = C.PARTS
    WIDTH: tl.constexpr = C.WIDTH
    for part in tl.static_range(PARTS):
        cols = _part(first + part, inputs, block, C)
        s = _over_norms(parts[part], rows, cols)
        for k in tl.static_range(WIDTH):
            if C.ROWS:
                x = _summands(s, rows, values, k, 1, FORM, SECOND, C)
            else:
                x = _summands(s, cols, values, k, 0, FORM, SECOND, C)
            y = x
            if C.ROWS and C.COLS and not C.SHARED:
                y = _summands(s, cols, values, k, 0, FORM, SECOND, C)
            x, y = _masked(x, y, float("-inf") if C.MAXIMUM else 0.0, rows, cols, True, C)
            if C.ROWS:
                _store_partial(row_out, k, x, rows, cols, 1, C.MAXIMUM)
            if C.COLS:
                _store_partial(col_out, k, y, rows, cols, 0, C.MAXIMUM)


@triton.jit
def _upstream(grad, plane, axis, cols, AXIS: tl.constexpr, C: tl.constexpr):
    """Return the gradients of an axis's sums; of both sides, where one evaluation serves them."""
    g = _load_anchors(grad.x, plane * grad.plane, grad.stride, axis, AXIS)
    if C.SHARED and C.ROWS and C.COLS:
        g += _load_anchors(grad.x, plane * grad.plane, grad.stride, cols, 0)
    return g


@triton.jit
def _by_z(
    z,
    axis,
    cols,
    grad,
    AXIS: tl.constexpr,
    FORM: tl.constexpr,
    SECOND: tl.constexpr,
    C: tl.constexpr,
):
    """Return the gradient of z: ``sum_k g_k f_k'(z)``."""
    _, slope = _term(z, 0, FORM, SECOND)
    by_z = slope * _upstream(grad, 0, axis, cols, AXIS, C)
    if C.WIDTH == 2:
        _, slope = _term(z, 1, FORM, SECOND)
        by_z += slope * _upstream(grad, 1, axis, cols, AXIS, C)
    return by_z


@triton.jit
def _slopes(
    total,  # (BLOCK_M, BLOCK_N) the gradient of the scores so far
    s,  # (BLOCK_M, BLOCK_N) scores
    rows,
    cols,
    values,
    grad,
    grads_out,
    AXIS: tl.constexpr,
    FORM: tl.constexpr,
    SECOND: tl.constexpr,
    C: tl.constexpr,
):
    """Return ``total`` plus an axis's gradient of the scores; store that of its scale and shift."""
    axis = rows if AXIS == 1 else cols
    scale = _load_anchors(values.scale, 0, values.scale_stride, axis, AXIS, C.SHARED)
    by_scale = tl.zeros_like(s)
    for slot in range(values.slots):
        z = _affine(s, values, axis, slot, AXIS, C)
        by_z = _by_z(z, axis, cols, grad, AXIS, FORM, SECOND, C)
        by_z = _within(by_z, s, 0.0, values, axis, AXIS, C.SHARED)
        total += by_z * scale
        if C.GRAD_SHIFT:
            by_shift, _ = _masked(by_z, by_z, 0.0, rows, cols, True, C)
            _store_partial(grads_out, slot, by_shift, rows, cols, AXIS, False)
        if C.GRAD_SCALE:
            by_scale += by_z * s
    if C.GRAD_SCALE:
        by_scale, _ = _masked(by_scale, by_scale, 0.0, rows, cols, True, C)
        _store_partial(grads_out, values.slots, by_scale, rows, cols, AXIS, False)
    return total


@triton.jit(do_not_specialize=Block._fields)
def gradient_kernel(
    inputs,
    products,  # as in sums_kernel
    row,
    col,
    size_m,
    size_n,
    first_col,
    values,
    grad,  # Upstream
    row_grads_out,  # (planes, parts, anchors) float32: a plane for each slot of the shift, then the scale
    col_grads_out,
    panel,  # Panel for the gradient of the inner products, if any; may alias the products
    FORM: tl.constexpr,
    SECOND: tl.constexpr,
    C: tl.constexpr,
):
    """Write ``dL/d(x_i y_j) = sum_sides g f'(z_ij) scale / (|x_i| |y_j|)``, and sum up dL/dz.

    With SHARED, one evaluation serves both sides, and the gradients of scale and shift are summed
    by row alone.
    """
    block = Block(row, col, size_m, size_n, first_col)
    rows, first, parts = _tile(inputs, products, block, C)
    PARTS: tl.constexpr = C.PARTS
    for part in tl.static_range(PARTS):
        cols = _part(first + part, inputs, block, C)
        s = _over_norms(parts[part], rows, cols)
        x = tl.zeros_like(s)
        if C.ROWS:
            x = _slopes(x, s, rows, cols, values, grad, row_grads_out, 1, FORM, SECOND, C)
        if C.COLS and not (C.ROWS and C.SHARED):
            x = _slopes(x, s, rows, cols, values, grad, col_grads_out, 0, FORM, SECOND, C)
        if panel.x is not None:
            x = _over_norms(_masked(x, x, 0.0, rows, cols, False, C)[0], rows, cols)
            pointers, inside = _entries(panel, rows, cols)
            tl.store(pointers, x.to(panel.x.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------- the forms of terms


@triton.jit
def _log1p(u):
    """Return log(1 + u), accurate for a small u: the quotient makes up for the rounding of 1 + u
    (Kahan).
    """
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def exponential(z):
    """``2^z``: the scale and the shift are in units of log 2."""
    e = tl.exp2(z)
    return e, e


@triton.jit
def exponential_of_base_e(z):
    """``e^z``, beside another term of the same z."""
    e = tl.exp2(z * LOG2E)
    return e, e


@triton.jit
def information(z):
    """``z e^z``."""
    z = tl.maximum(z, LARGEST_FALL)  # -inf times exp(-inf) would be nan
    e = tl.exp2(z * LOG2E)
    return z * e, (z + 1.0) * e


@triton.jit
def identity(z):
    """``z``."""
    return z, tl.full(z.shape, 1.0, z.dtype)


@triton.jit
def square(z):
    """``z²``."""
    return z * z, 2.0 * z


@triton.jit
def excess(z):
    """``max(z, 0)``."""
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(z > 0.0, 1.0, 0.0)


@triton.jit
def softplus(z):
    """``log(1 + e^z)``."""
    e = tl.exp2(-tl.abs(z) * LOG2E)
    return tl.maximum(z, 0.0) + _log1p(e), tl.where(z >= 0, 1.0, e) / (1.0 + e)


# The forms of the terms of a question; others are summed tile by tile in PyTorch.
FORMS = {
    (terms.exponential,): (exponential, None),
    (terms.square,): (square, None),
    (terms.excess,): (excess, None),
    (terms.softplus,): (softplus, None),
    (terms.identity, terms.square): (identity, square),
    (terms.exponential, terms.information): (exponential_of_base_e, information),
}


@triton.jit
def _vector(x, row, stride, dim, BLOCK_D: tl.constexpr):
    """Return vector ``row`` of x (N, dim) as (BLOCK_D,) float32, padded with zeros."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + row.to(tl.int64) * stride + d, mask=d < dim, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["begin"])
def project_kernel(x, stride, dim, inv, begin, total, listed, out, BLOCK_D: tl.constexpr):
    """Write ``out_i = g - u <u, g>`` (N, dim) with ``u = x_i inv_i``: a program for each vector.

    g adds up ``total`` (., dim), float32 sums from vector ``begin`` on that may alias out, and
    ``grad inv_i inv_j y_j`` of the listed pairs (i, j), whose scores have the gradient
    ``listed.grad``.
    """
    row, d = begin + tl.program_id(0), tl.arange(0, BLOCK_D)
    g = _vector(total, tl.program_id(0), dim, dim, BLOCK_D)
    scale = 1.0 if inv is None else tl.load(inv + row)
    if listed.grad is not None:
        first, last = row, row + 1
        if listed.start is not None:
            first, last = tl.load(listed.start + row), tl.load(listed.start + row + 1)
        for k in range(first, last):
            pair = k if listed.order is None else tl.load(listed.order + k)
            j = pair if listed.other is None else tl.load(listed.other + pair)
            weight = tl.load(listed.grad + pair) * scale
            weight = weight if listed.inv is None else weight * tl.load(listed.inv + j)
            g += weight * _vector(listed.y, j, listed.stride, dim, BLOCK_D)
    if inv is not None:
        u = _vector(x, row, stride, dim, BLOCK_D) * scale
        g -= u * tl.sum(u * g, 0)
    tl.store(out + row.to(tl.int64) * dim + d, g.to(out.dtype.element_ty), mask=d < dim)
