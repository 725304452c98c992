"""Triton kernels of the reduction: one sums a function of the scores of a tile, one writes the
tile's gradient.

Each program works on one tile of BLOCK_M x BLOCK_N scores. It multiplies the embeddings of the
tile, or loads scores that are precomputed, and applies the answer's function, a jitted function
that is a compile-time constant:

    FORM(s, p, q, g) -> (values, gradients w.r.t. s, p and q)

s are scores; the parameters p and q broadcast with them, and so do the upstream gradients g, a tuple as long as that of
the values. What a kernel does not use is not compiled. To add an answer, write one such function and list it in
:data:`FORMS`. The sums of each tile are stored separately and added in the tiles' order: unlike atomic additions, that
is deterministic.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import scores

IGNORE_ID, NOWHERE = tl.constexpr(scores.IGNORE_ID), tl.constexpr(-(2**31))
LOG2E = tl.constexpr(1.4426950408889634)
# rows of tiles that run together, so that the embeddings they share stay in the L2 cache
BAND = tl.constexpr(8)

# Arguments of the kernels; None where absent. Half-precision embeddings (N, D) and (M, D), strides,
# D; (N,), (M,) float32 inverse norms; (N,), (M,) int64 ids
Inputs = namedtuple("Inputs", "rows cols row_stride col_stride dim row_inv col_inv row_ids col_ids")
# (1,), with stride 0, for all anchors; (A,), the rows' anchors first; or (slots, A), over whose
# slots values are summed
Params = namedtuple("Params", "p q p_stride q_stride slots slot_stride")
# Limits of the scores of candidates, (1,) with stride 0 or (A,)
Limits = namedtuple("Limits", "below above below_stride above_stride")
# part of the matrix; column 0's index among anchors
Block = namedtuple("Block", "row col size_m size_n first_col")
Panel = namedtuple("Panel", "x stride")  # buffer (size_m, stride) for a block
Upstream = namedtuple("Upstream", "x plane stride")  # gradient (WIDTH, A) of the sums, with strides
# Listed pairs p: (P,) float32 gradients of their scores. Those of anchor i are
# ``order[start[i]:start[i + 1]]``, with candidates ``other[p]``, or the one pair (i, i). (M, dim)
# vectors of the candidates and their (M,) inverse norms.
Listed = namedtuple("Listed", "grad start order other y stride inv")
# Compile-time constants. PARTS, 1 or 4: how many parts of a tile's columns are worked on one after
# the other. SHARED: parameters are one number each, and one evaluation serves both sides. ROWS,
# COLS: whether the rows, the columns are anchors. GRAD_P, GRAD_Q: whether the parameters get
# gradients.
_CONFIG = "BLOCK_M BLOCK_N BLOCK_K PARTS OVER IDS SHARED ROWS COLS WIDTH MAXIMUM GRAD_P GRAD_Q"
Config = namedtuple("Config", _CONFIG, defaults=[False] * 3)
# The rows of a tile, or the columns of a part of it. ``pid``: which of the ``parts`` along a
# block's axis of ``size``. ``start``, ``anchor``: index of the first one in the matrix and among
# anchors. Vectors (BLOCK,): ``local``, indices in the block; ``lane``, offsets from ``start``,
# beyond the end that of the last one, so that loads need no mask; ``inv``, inverse norms; ``ids``,
# or indices in the matrix, NOWHERE beyond the end.
Axis = namedtuple("Axis", "pid parts start anchor size local lane inv ids")


@triton.jit
def _axis(pid, start, first, size, inv, ids, BLOCK: tl.constexpr, PARTS: tl.constexpr = 1):
    """Return the Axis of part ``pid`` of a block's rows or columns, each of whose tiles has PARTS
    parts.
    """
    begin, lane = pid * BLOCK, tl.arange(0, BLOCK)
    local, start = begin + lane, start + begin
    inside, lane = local < size, tl.minimum(lane, size - 1 - begin)
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
    """Return pointers to a tile's entries and their mask, which goes up to the stride: accesses
    have 16 bytes then.
    """
    pointers = panel.x + rows.local.to(tl.int64)[:, None] * panel.stride + cols.local[None, :]
    return pointers, (rows.local < rows.size)[:, None] & (cols.local < panel.stride)[None, :]


@triton.jit
def _tile(inputs, products, block, C: tl.constexpr):
    """Return the Axis of this program's rows, the ``pid`` of its first part of columns, and the
    parts' inner products.

    A thread holds values of many columns, and for each vector along the columns needs as many
    registers. For a whole tile that would be 1.5 times the 128 that let two programs share a
    multiprocessor; hence the parts.
    """
    pid, grid_m, grid_n = (
        tl.program_id(0),
        tl.cdiv(block.size_m, C.BLOCK_M),
        tl.cdiv(block.size_n, C.BLOCK_N),
    )
    band, within = pid // (BAND * grid_n), pid % (BAND * grid_n)
    height = tl.minimum(grid_m - band * BAND, BAND)
    rows = _axis(
        band * BAND + within % height,
        block.row,
        0,
        block.size_m,
        inputs.row_inv,
        inputs.row_ids,
        C.BLOCK_M,
    )
    cols = _axis(within // height, block.col, 0, block.size_n, inputs.col_inv, None, C.BLOCK_N)
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
    """Return x divided by the norms of rows and columns, whose product is formed once for scores
    and gradients.
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
def _params(parameters, axis, slot, AXIS: tl.constexpr, SHARED: tl.constexpr):
    """Return p and q of an axis's anchors."""
    p = _load_anchors(
        parameters.p, slot * parameters.slot_stride, parameters.p_stride, axis, AXIS, SHARED
    )
    return p, _load_anchors(parameters.q, 0, parameters.q_stride, axis, AXIS, SHARED)


@triton.jit
def _within(x, s, fill, limits, axis, AXIS: tl.constexpr, SHARED: tl.constexpr):
    """Return x with ``fill`` where scores are not within the limits of an axis's anchors."""
    if limits.below is not None:
        x = tl.where(
            s < _load_anchors(limits.below, 0, limits.below_stride, axis, AXIS, SHARED), x, fill
        )
    if limits.above is not None:
        x = tl.where(
            s > _load_anchors(limits.above, 0, limits.above_stride, axis, AXIS, SHARED), x, fill
        )
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
def _value(result, K: tl.constexpr, C: tl.constexpr):
    """Return the K-th value of a FORM's result; with GRAD_P, for K = 1 the derivative w.r.t. p
    instead.
    """
    return result[2] if C.GRAD_P and K == 1 else result[0][K]


@triton.jit
def _values(
    s,
    axis,
    parameters,
    limits,
    K: tl.constexpr,
    AXIS: tl.constexpr,
    FORM: tl.constexpr,
    C: tl.constexpr,
):
    """Return the K-th values of a tile, see `_value`, summed over slots."""
    p, q = _params(parameters, axis, 0, AXIS, C.SHARED)
    x = _value(FORM(s, p, q, (1.0, 1.0)), K, C)
    for slot in range(1, parameters.slots):
        p, q = _params(parameters, axis, slot, AXIS, C.SHARED)
        x += _value(FORM(s, p, q, (1.0, 1.0)), K, C)
    return _within(x, s, float("-inf") if C.MAXIMUM else 0.0, limits, axis, AXIS, C.SHARED)


@triton.jit(do_not_specialize=Block._fields)  # these change from batch to batch
def sums_kernel(
    inputs,
    products,  # Panel of float32 inner products or scores
    row, col, size_m, size_n, first_col,  # Block
    parameters,
    limits,
    row_out,  # (WIDTH, column parts, size_m) float32: sums of each tile over its columns
    col_out,  # (WIDTH, row parts, size_n) over its rows
    panel,  # Panel for value 0 over the columns' norms, if any
    FORM: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Sum ``value(S_ij)`` over the columns and over the rows of each tile, or take the MAXIMUM."""
    block = Block(row, col, size_m, size_n, first_col)
    rows, first, parts = _tile(inputs, products, block, C)
    PARTS: tl.constexpr = C.PARTS
    WIDTH: tl.constexpr = C.WIDTH
    for part in tl.static_range(PARTS):
        cols = _part(first + part, inputs, block, C)
        s = _over_norms(parts[part], rows, cols)
        for k in tl.static_range(WIDTH):
            x = _values(
                s, rows if C.ROWS else cols, parameters, limits, k, 1 if C.ROWS else 0, FORM, C
            )
            y = (
                _values(s, cols, parameters, limits, k, 0, FORM, C)
                if C.ROWS and C.COLS and not C.SHARED
                else x
            )
            x, y = _masked(x, y, float("-inf") if C.MAXIMUM else 0.0, rows, cols, True, C)
            if C.ROWS:
                _store_partial(row_out, k, x, rows, cols, 1, C.MAXIMUM)
            if C.COLS:
                _store_partial(col_out, k, y, rows, cols, 0, C.MAXIMUM)
            if panel.x is not None and k == 0:
                pointers, inside = _entries(panel, rows, cols)
                tl.store(
                    pointers, (x * cols.inv[None, :]).to(panel.x.dtype.element_ty), mask=inside
                )


@triton.jit
def _upstream(grad, plane, axis, cols, AXIS: tl.constexpr, C: tl.constexpr):
    """Return the gradients of an axis's sums; of rows and columns together where one evaluation
    serves both.
    """
    g = _load_anchors(grad.x, plane * grad.plane, grad.stride, axis, AXIS)
    if C.SHARED and C.ROWS and C.COLS:
        g += _load_anchors(grad.x, plane * grad.plane, grad.stride, cols, 0)
    return g


@triton.jit
def _slopes(
    total,
    s,
    rows,
    cols,
    parameters,
    limits,
    grad,
    grads_out,
    AXIS: tl.constexpr,
    FORM: tl.constexpr,
    C: tl.constexpr,
):
    """Return ``total`` plus the gradient of the scores; store those of the parameters, summed along
    an axis.
    """
    axis = rows if AXIS == 1 else cols
    first = _upstream(grad, 0, axis, cols, AXIS, C)
    g = (first, _upstream(grad, 1, axis, cols, AXIS, C)) if C.WIDTH == 2 else (first,)
    for slot in range(parameters.slots):
        p, q = _params(parameters, axis, slot, AXIS, C.SHARED)
        _, grad_s, grad_p, grad_q = FORM(s, p, q, g)
        total += _within(grad_s, s, 0.0, limits, axis, AXIS, C.SHARED)
        if C.GRAD_P or C.GRAD_Q:
            grad_p, grad_q = _masked(
                grad_p, grad_q if C.GRAD_Q else grad_p, 0.0, rows, cols, True, C
            )
            grad_p = _within(grad_p, s, 0.0, limits, axis, AXIS, C.SHARED)
            grad_q = _within(grad_q, s, 0.0, limits, axis, AXIS, C.SHARED)
        if C.GRAD_P:
            _store_partial(grads_out, slot, grad_p, rows, cols, AXIS, False)
        if C.GRAD_Q:
            _store_partial(grads_out, parameters.slots, grad_q, rows, cols, AXIS, False)
    return total


@triton.jit(do_not_specialize=Block._fields)
def gradient_kernel(
    inputs,
    products,  # as in sums_kernel
    row, col, size_m, size_n, first_col,
    parameters,
    limits,
    grad,  # Upstream
    # (planes, parts, anchors) float32 gradients w.r.t. p (a plane per slot) and q, summed by tile
    row_grads_out,
    col_grads_out,
    panel,  # Panel for the gradient of the inner products, if any; may alias the products
    FORM: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write ``dL/d(x_i y_j) = sum_sides g slope(S_ij) / (|x_i| |y_j|)``, and sum the gradients
    w.r.t. the parameters.

    With SHARED, one evaluation serves both sides, and gradients w.r.t. the parameters are summed by
    row alone.
    """
    block = Block(row, col, size_m, size_n, first_col)
    rows, first, parts = _tile(inputs, products, block, C)
    PARTS: tl.constexpr = C.PARTS
    for part in tl.static_range(PARTS):
        cols = _part(first + part, inputs, block, C)
        s = _over_norms(parts[part], rows, cols)
        x = tl.zeros_like(s)
        if C.ROWS:
            x = _slopes(x, s, rows, cols, parameters, limits, grad, row_grads_out, 1, FORM, C)
        if C.COLS and not (C.ROWS and C.SHARED):
            x = _slopes(x, s, rows, cols, parameters, limits, grad, col_grads_out, 0, FORM, C)
        if panel.x is not None:
            x = _over_norms(_masked(x, x, 0.0, rows, cols, False, C)[0], rows, cols)
            pointers, inside = _entries(panel, rows, cols)
            tl.store(pointers, x.to(panel.x.dtype.element_ty), mask=inside)


@triton.jit
def _log1p(u):
    """Return log(1 + u), accurate for a small u: the quotient makes up for the rounding of 1 + u
    (Kahan).
    """
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def _softplus(z, g):
    """Return log(1 + e^z), and g times its derivative."""
    e = tl.exp2(-tl.abs(z) * LOG2E)
    return tl.maximum(z, 0.0) + _log1p(e), tl.where(z >= 0, 1.0, e) / (1.0 + e) * g


@triton.jit
def exp(s, scale, top, g):
    e = tl.exp2(s * (scale * LOG2E) - top * LOG2E)  # one fused multiply-add and one instruction
    return (e,), e * (scale * g[0]), s * e * g[0], 0.0


@triton.jit
def peak(s, scale, q, g):
    return (scale * s,), scale * g[0], s * g[0], 0.0


@triton.jit
def information(s, scale, best, g):
    z = tl.maximum((s - best) * scale, -1e4)  # -inf times exp(-inf) would be nan
    e = tl.exp2(z * LOG2E)
    # Where one candidate has nearly all of the probability, both terms are large and cancel: they
    # are scaled after it.
    return (e, e * z), scale * (e * (z + 1.0) * g[1] + e * g[0]), 0.0, 0.0


@triton.jit
def moments(s, centre, q, g):
    d = s - centre
    return (d, d * d), 2.0 * g[1] * d + g[0], 0.0, 0.0


@triton.jit
def hinges(s, threshold, q, g):
    g = tl.where(s > threshold, g[0], 0.0)
    return (tl.maximum(s - threshold, 0.0, propagate_nan=tl.PropagateNan.ALL),), g, -g, 0.0


@triton.jit
def softplus(s, scale, bias, g):
    x, slope = _softplus(scale * s + bias, g[0])
    return (x,), scale * slope, s * slope, slope


FORMS = {form.__name__: form for form in (exp, peak, information, moments, hinges, softplus)}


@triton.jit
def _vector(x, row, stride, dim, BLOCK_D: tl.constexpr):
    """Return vector ``row`` of x (N, dim) as (BLOCK_D,) float32, padded with zeros."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + row.to(tl.int64) * stride + d, mask=d < dim, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["begin"])
def project_kernel(x, stride, dim, inv, begin, total, listed, out, BLOCK_D: tl.constexpr):
    """Write ``out_i = g - u <u, g>`` (N, dim) with ``u = x_i inv_i``; each vector from ``begin`` on
    has a program.

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
