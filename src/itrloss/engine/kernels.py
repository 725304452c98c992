"""Triton kernels of sums and of their gradient, for a tile of scores each.

    z_ij = scale_i S_ij + shift_i        S_ij = <x_i, y_j> / (|x_i| |y_j|)

Each program works on one tile of BLOCK_M x BLOCK_N scores. It multiplies the embeddings of the
tile, or loads scores that are precomputed, and applies the term of a question to z. Its form is
a jitted function, which is a compile-time constant:

    FORM(z) -> f(z), f'(z)

What a kernel does not use is not compiled. To give a term a kernel, write one such function and add
it to :data:`FORMS`. The partial sums of each tile are stored separately and added in the tiles'
order: unlike atomic additions, that is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import relation, terms, vectors

IGNORE_ID = tl.constexpr(relation.IGNORE_ID)
NOWHERE = tl.constexpr(-(2**31))  # index of a row or column beyond the end
LOG2E = tl.constexpr(1.4426950408889634)
SMALLEST_LOG = tl.constexpr(terms.SMALLEST_LOG)
EPS = tl.constexpr(vectors.EPS)
FLOOR = tl.constexpr(terms.FLOOR)
LEFT_OUT = tl.constexpr(3e38)  # in place of a score that is not to count
GROUP_M = tl.constexpr(8)  # rows of tiles that run together: the embeddings they share stay in L2


# The arguments of the kernels. A None is a compile-time constant.


class Vectors(NamedTuple):
    """The vectors of the rows, or of the columns."""

    x: Tensor | None  # (N, dim); None where products or scores are read
    stride: int  # from a vector to the next
    inv: Tensor | None  # (N,) float32 inverse norms; None: vectors are taken as they are
    ids: Tensor | None = None  # (N,) int64; None: row i matches column i, unless there is a mask
    groups: Tensor | None = None  # (N,) int64, in addition to ids


class Inputs(NamedTuple):
    """What scores are made of."""

    rows: Vectors
    cols: Vectors
    dim: int  # of the vectors, a multiple of 8, like their strides


class PerAnchor(NamedTuple):
    """Numbers of the anchors (A,), or one for all: a launch has it among its arguments.

    As a tensor it would be one launch more: 20 of UTO (pytest tests/engine/test_triton_costs.py -k
    launches).
    """

    x: Tensor | None
    stride: int = 0  # from an anchor to the next; 0: one number for all
    number: float | None = None  # where there is no tensor


class Values(NamedTuple):
    """The scale, the shift and the limits of the scores of candidates."""

    scale: PerAnchor
    shift: PerAnchor | None
    below: PerAnchor | None
    above: PerAnchor | None


class Block(NamedTuple):
    """A part of the matrix."""

    row: int  # its first row
    col: int  # its first column
    size_m: int  # number of rows
    size_n: int  # number of columns
    first_col: int  # column 0's index among the anchors


class Panel(NamedTuple):
    """A buffer (size_m, stride) for a block; None where absent."""

    x: Tensor | None = None
    stride: int = 0
    width: int = 0  # columns that may be accessed


class Loaded(NamedTuple):
    """Panels of a block that its programs read."""

    products: Panel  # float32 inner products or scores, unless programs multiply the vectors
    excluded: Panel = Panel()  # uint8 mask of the pairs that a sum leaves out, where ids do not say


class Listed(NamedTuple):
    """Listed pairs p, sorted by their anchors; None where absent.

    Pairs of anchor i are ``order[start[i]:start[i + 1]]``, or the one pair (i, i).
    """

    grad: Tensor | None = None  # (P,) float32 gradients of the scores
    start: Tensor | None = None  # (A + 1,)
    order: Tensor | None = None  # (P,)
    other: Tensor | None = None  # (P,) candidates


class Config(NamedTuple):
    """Compile-time constants."""

    BLOCK_M: int  # rows of a tile
    BLOCK_N: int  # columns of a tile
    BLOCK_K: int  # dimensions that are multiplied at once
    PARTS: int  # 1 or 4: parts of a tile's columns, which are worked on one after the other
    WHOLE_STEPS: bool  # whether the dimensions are a multiple of BLOCK_K
    OVER: relation.Over
    IDS: bool  # whether there are ids
    GROUPS: relation.Rule | None  # whether negatives are of the same group or of another one
    SHARED: bool  # values are one number each: one evaluation serves both sides
    ROWS: bool  # whether the rows are anchors
    COLS: bool  # whether the columns are anchors
    BASE_2: bool  # the term is an exponential of base 2, as scale and shift are in units of log 2
    MAXIMUM: bool = False  # the largest z is taken in place of a sum
    MOMENTS: bool = False  # moments of the scores are taken in place of a sum
    TIMES_SCALE: bool = True  # whether the gradient of scores contains the scale
    GRAD_SCALE: bool = False  # whether the scale gets a gradient, summed by anchor
    GRAD_SHIFT: bool = False
    TOTAL: bool = False  # whether the term is summed up along with its gradient


class Axis(NamedTuple):
    """The rows of a tile, or the columns of a part of it; vectors are (BLOCK,)."""

    pid: tl.tensor  # which of the parts along the block's axis
    parts: tl.tensor  # their number
    start: tl.tensor  # index of the first one in the matrix
    anchor: tl.tensor  # index of the first one among the anchors
    size: tl.tensor  # of the block's axis
    local: tl.tensor  # indices in the block
    lane: tl.tensor  # offsets from ``start``, of the last one beyond the end: loads need no mask
    inv: tl.tensor  # inverse norms
    ids: tl.tensor  # ids, or indices in the matrix; NOWHERE beyond the end
    groups: tl.tensor | None


# --------------------------------------------------------------------------------- a tile of scores


@triton.jit
def _axis(
    pid,
    start,
    first,
    size,
    vectors,  # Vectors
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr = 1,  # of each tile along this axis
):
    """Return the Axis of part ``pid`` of a block's rows or columns."""
    begin = pid * BLOCK
    lane = tl.arange(0, BLOCK)
    local = begin + lane
    start = start + begin
    inside = local < size
    lane = tl.minimum(lane, size - 1 - begin)
    if vectors.ids is None:
        ids = tl.where(inside, start + lane, NOWHERE)
    else:
        ids = tl.where(inside, tl.load(vectors.ids + start + lane), IGNORE_ID)
    if vectors.inv is None:
        inv = tl.full([BLOCK], 1.0, tl.float32)
    else:
        inv = tl.load(vectors.inv + start + lane)
    groups = None if vectors.groups is None else tl.load(vectors.groups + start + lane)
    parts = tl.cdiv(size, BLOCK * PARTS) * PARTS
    return Axis(pid, parts, start, first + start, size, local, lane, inv, ids, groups)


@triton.jit
def _columns(pid, inputs, block, PARTS: tl.constexpr, C: tl.constexpr):
    """Return the Axis of part ``pid`` of the columns."""
    BLOCK: tl.constexpr = C.BLOCK_N // PARTS
    return _axis(pid, block.col, block.first_col, block.size_n, inputs.cols, BLOCK, PARTS)


@triton.jit
def _dot(inputs, rows, cols, C: tl.constexpr):
    """Return the (BLOCK_M, BLOCK_N) float32 inner products of rows and columns."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    k = tl.arange(0, C.BLOCK_K)
    i = (rows.start + rows.lane).to(tl.int64)[:, None]
    j = (cols.start + cols.lane).to(tl.int64)[None, :]
    # They are multiples of 8. The compiler sees it, and loads 16 bytes at a time.
    dim = inputs.dim // 8 * 8
    i *= inputs.rows.stride // 8 * 8
    j *= inputs.cols.stride // 8 * 8
    a = inputs.rows.x + i + k[None, :]  # (BLOCK_M, BLOCK_K)
    b = inputs.cols.x + j + k[:, None]  # (BLOCK_K, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, dim, C.BLOCK_K):
        if C.WHOLE_STEPS:
            x = tl.load(a + start)
            y = tl.load(b + start)
        else:
            inside = k < dim - start
            x = tl.load(a + start, mask=inside[None, :], other=0.0)
            y = tl.load(b + start, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def _entries(panel, rows, cols):
    """Return pointers to a tile's entries and their mask.

    The mask of a buffer goes up to its stride, so that accesses have 16 bytes.
    """
    pointers = panel.x + rows.local.to(tl.int64)[:, None] * panel.stride + cols.local[None, :]
    return pointers, (rows.local < rows.size)[:, None] & (cols.local < panel.width)[None, :]


@triton.jit
def _pids(block, C: tl.constexpr):
    """Return the tile's row and column in the block's grid.

    Tiles run in groups of GROUP_M rows, column by column (the grouped ordering of Triton's tutorial
    on matrix products).
    """
    pid = tl.program_id(0)
    grid_m = tl.cdiv(block.size_m, C.BLOCK_M)
    grid_n = tl.cdiv(block.size_n, C.BLOCK_N)
    group = pid // (GROUP_M * grid_n)
    within = pid % (GROUP_M * grid_n)
    height = tl.minimum(grid_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % height, within // height


@triton.jit
def _tile(inputs, loaded, block, C: tl.constexpr):
    """Return the Axis of the rows, the ``pid`` of the first part of columns, and inner products.

    The products are a tuple, (BLOCK_M, BLOCK_N / PARTS) for each part. A thread holds values of
    many columns, and for each vector along the columns needs as many registers. For a whole tile
    that would be 1.5 times the 128 that let two programs share a multiprocessor; hence the parts.
    """
    pid_m, pid_n = _pids(block, C)
    rows = _axis(pid_m, block.row, 0, block.size_m, inputs.rows, C.BLOCK_M)
    cols = _columns(pid_n, inputs, block, 1, C)
    if loaded.products.x is None:
        x = _dot(inputs, rows, cols, C)
    else:
        pointers, inside = _entries(loaded.products, rows, cols)
        x = tl.load(pointers, mask=inside, other=0.0)
    if C.PARTS == 1:
        parts = (x,)
    else:
        quarters = tl.reshape(x, (C.BLOCK_M, 2, 2, C.BLOCK_N // 4))
        even, odd = tl.split(tl.permute(quarters, (0, 3, 1, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        parts = (a, b, c, d)
    return rows, pid_n * C.PARTS, parts


@triton.jit
def _over_norms(x, rows, cols):
    """Return x divided by the norms of rows and columns.

    Their product is formed once for scores and gradients.
    """
    return x * (rows.inv[:, None] * cols.inv[None, :])


@triton.jit
def _may_meet(rows, cols, C: tl.constexpr):
    """Return the mask of pairs whose groups let them be negatives: IGNORE_ID is open to all."""
    i = rows.groups[:, None]
    j = cols.groups[None, :]
    meet = i == j if C.GROUPS == "same" else i != j
    return meet | (i == IGNORE_ID) | (j == IGNORE_ID)


@triton.jit
def _included(excluded, rows, cols, ENDS: tl.constexpr, C: tl.constexpr):
    """Return the mask of pairs that a sum has: by a mask, or by their ids and groups.

    With ENDS, it has none beyond the block.
    """
    i = rows.ids[:, None]
    j = cols.ids[None, :]
    if excluded.x is not None:
        pointers, inside = _entries(excluded, rows, cols)
        mask = tl.load(pointers, mask=inside, other=1) == 0
    elif C.IDS:
        mask = (i != IGNORE_ID) & (j != IGNORE_ID)
        if C.OVER == "positives":
            mask = mask & (i == j)
        if C.OVER == "negatives":
            mask = mask & (i != j)
            if C.GROUPS is not None:
                mask = mask & _may_meet(rows, cols, C)
        if C.OVER == "all" and C.GROUPS is not None:
            mask = mask & ((i == j) | _may_meet(rows, cols, C))
    elif C.OVER == "positives":
        mask = i == j
    elif not ENDS:
        mask = i != j
    elif C.OVER == "negatives":
        mask = (i ^ j) > 0  # one comparison instead of three: NOWHERE is negative
    else:
        mask = (i | j) >= 0
    return mask


@triton.jit
def _masked(x, excluded, rows, cols, ENDS: tl.constexpr, C: tl.constexpr):
    """Return x without the pairs that a sum leaves out and, with ENDS, within the block."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N // C.PARTS
    x = tl.broadcast_to(x, (BLOCK_M, BLOCK_N))  # slopes may be constants
    # Without ids, only tiles at the end of a block or on the diagonal have excluded pairs.
    special = C.OVER == "negatives" and (
        (rows.start < cols.start + BLOCK_N) & (cols.start < rows.start + BLOCK_M)
    )
    if ENDS:
        beyond_m = (rows.pid + 1) * BLOCK_M > rows.size
        beyond_n = (cols.pid + 1) * BLOCK_N > cols.size
        special = special | beyond_m | beyond_n
    if excluded.x is not None or C.IDS or C.OVER == "positives" or special:
        included = _included(excluded, rows, cols, ENDS, C)
        x = tl.where(included, x, float("-inf") if C.MAXIMUM else 0.0)
    return x


# ------------------------------------------------------------------------------ the epilogue: sums

# AXIS is the tile's dimension of the candidates: 1 where ``axis`` are the rows, 0 for the columns.


@triton.jit
def _load(value, axis, AXIS: tl.constexpr, SHARED: tl.constexpr = False):
    """Return an axis's numbers (BLOCK_M, 1) or (1, BLOCK_N), or the one number of all anchors."""
    if value.x is None:
        y = value.number
    elif SHARED:
        y = tl.load(value.x)
    else:
        pointers = value.x + axis.anchor * value.stride + axis.lane * value.stride
        y = tl.expand_dims(tl.load(pointers), AXIS)
    return y


@triton.jit
def _affine(s, values, axis, AXIS: tl.constexpr, C: tl.constexpr):
    """Return ``z = scale S + shift`` of an axis's anchors."""
    scale = _load(values.scale, axis, AXIS, C.SHARED)
    if C.BASE_2:
        scale = scale * LOG2E
    if values.shift is None:
        z = s * scale
    else:
        shift = _load(values.shift, axis, AXIS, C.SHARED)
        if C.BASE_2:
            shift = shift * LOG2E
        z = s * scale + shift  # one fused multiply-add
    return z


@triton.jit
def _within(x, s, values, axis, AXIS: tl.constexpr, C: tl.constexpr):
    """Return x without the candidates whose scores are beyond the limits of an axis's anchors."""
    empty = float("-inf") if C.MAXIMUM else 0.0
    if values.below is not None:
        x = tl.where(s < _load(values.below, axis, AXIS, C.SHARED), x, empty)
    if values.above is not None:
        x = tl.where(s > _load(values.above, axis, AXIS, C.SHARED), x, empty)
    return x


@triton.jit
def _store_partial(out, plane, x, axis, candidates, AXIS: tl.constexpr, C: tl.constexpr):
    """Store a tile's sums or maxima over an axis's candidates at ``out[plane, part, anchor]``."""
    x = tl.max(x, AXIS) if C.MAXIMUM else tl.sum(x, AXIS)
    _store(out, plane, x, axis, candidates)


@triton.jit
def _store(out, plane, x, axis, candidates):
    """Store what a tile has of an axis's anchors (BLOCK,) at ``out[plane, part, anchor]``."""
    begin = (plane * candidates.parts + candidates.pid).to(tl.int64) * axis.size
    tl.store(out + begin + axis.local, x, mask=axis.local < axis.size)


@triton.jit
def _summands(
    s,  # (BLOCK_M, BLOCK_N) scores
    values,
    axis,
    AXIS: tl.constexpr,
    FORM: tl.constexpr,
    C: tl.constexpr,
):
    """Return ``f(z)``."""
    x, _ = FORM(_affine(s, values, axis, AXIS, C))
    return _within(x, s, values, axis, AXIS, C)


@triton.jit
def _store_moments(s, out, axis, candidates, AXIS: tl.constexpr):
    """Store the number of a tile's scores of an axis's anchors that are not LEFT_OUT, their mean,
    and their squared deviations from it: about it, no digits of squares cancel.
    """
    counts = s != LEFT_OUT
    number = tl.sum(tl.where(counts, 1.0, 0.0), AXIS)
    mean = tl.sum(tl.where(counts, s, 0.0), AXIS) / tl.maximum(number, 1.0)
    deviation = tl.where(counts, s - tl.expand_dims(mean, AXIS), 0.0)
    _store(out, 0, number, axis, candidates)
    _store(out, 1, mean, axis, candidates)
    _store(out, 2, tl.sum(deviation * deviation, AXIS), axis, candidates)


@triton.jit(do_not_specialize=Block._fields)  # these change from batch to batch
def sums_kernel(
    inputs,  # Inputs
    loaded,  # Loaded
    row,  # Block
    col,
    size_m,
    size_n,
    first_col,
    values,  # Values
    row_out,  # (planes, column parts, size_m) float32 partial sums over columns
    col_out,  # (planes, row parts, size_n) float32 partial sums over rows
    FORM: tl.constexpr,
    C: tl.constexpr,  # Config
):
    """Store each tile's ``sum_j f(z_ij)`` and ``sum_i f(z_ij)``, the MAXIMUM of z, or the MOMENTS
    of scores.

    The reference is :func:`itrloss.engine.tiled.sums`.
    """
    block = Block(row, col, size_m, size_n, first_col)
    rows, first, parts = _tile(inputs, loaded, block, C)
    PARTS: tl.constexpr = C.PARTS
    for part in tl.static_range(PARTS):
        cols = _columns(first + part, inputs, block, PARTS, C)
        s = _over_norms(parts[part], rows, cols)
        if C.MOMENTS:
            s = tl.where(_included(loaded.excluded, rows, cols, True, C), s, LEFT_OUT)
        if C.ROWS and C.MOMENTS:
            _store_moments(s, row_out, rows, cols, 1)
        elif C.ROWS:
            x = _summands(s, values, rows, 1, FORM, C)
            x = _masked(x, loaded.excluded, rows, cols, True, C)
            _store_partial(row_out, 0, x, rows, cols, 1, C)
        if C.COLS and C.MOMENTS:
            _store_moments(s, col_out, cols, rows, 0)
        elif C.COLS:
            if not (C.ROWS and C.SHARED):
                x = _summands(s, values, cols, 0, FORM, C)
                x = _masked(x, loaded.excluded, rows, cols, True, C)
            _store_partial(col_out, 0, x, cols, rows, 0, C)


@triton.jit(do_not_specialize=["parts", "size", "stride"])
def join_moments_kernel(
    partial,  # (3, parts, size) float32 moments of a block, see _store_moments
    parts,
    size,
    total,  # (3, size) float32: of the blocks before, and then with this one
    stride,  # of total
    PARTS: tl.constexpr,
    ANCHORS: tl.constexpr,
):
    """Join the moments of a block's parts with those of the blocks before.

    Squared deviations from a joint mean are those from each of two means, plus the squared distance
    of both times the product of their numbers over its sum (Chan, Golub and LeVeque, 1979).
    """
    anchors = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    inside = anchors < size
    out = total + anchors
    number = tl.load(out, mask=inside, other=0.0)
    mean = tl.load(out + stride, mask=inside, other=0.0)
    squares = tl.load(out + 2 * stride, mask=inside, other=0.0)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        pointers = partial + part.to(tl.int64)[:, None] * size + anchors[None, :]
        plane = parts.to(tl.int64) * size
        mask = (part < parts)[:, None] & inside[None, :]
        n = tl.load(pointers, mask=mask, other=0.0)
        m = tl.load(pointers + plane, mask=mask, other=0.0)
        q = tl.load(pointers + 2 * plane, mask=mask, other=0.0)
        added = tl.sum(n, 0)
        own_mean = tl.sum(n * m, 0) / tl.maximum(added, 1.0)
        deviation = m - own_mean[None, :]
        share = added / tl.maximum(number + added, 1.0)
        distance = own_mean - mean
        squares += tl.sum(q + n * deviation * deviation, 0) + distance * distance * number * share
        mean += distance * share
        number += added
    tl.store(out, number, mask=inside)
    tl.store(out + stride, mean, mask=inside)
    tl.store(out + 2 * stride, squares, mask=inside)


# -------------------------------------------------------------------------- the epilogue: gradient


@triton.jit
def _slopes(
    total,  # (BLOCK_M, BLOCK_N) the gradient of the scores so far
    s,  # (BLOCK_M, BLOCK_N) scores
    excluded,  # Panel
    rows,
    cols,
    values,
    grad,  # PerAnchor
    out,  # (planes, parts, anchors): with GRAD_SHIFT sums for the shift; then for the scale or,
    # with TOTAL, of the term
    AXIS: tl.constexpr,
    FORM: tl.constexpr,
    C: tl.constexpr,
):
    """Return ``total`` plus an axis's gradient of the scores; store its scale's and shift's.

    With TOTAL, the sums of the term times the gradients of the sums are stored, too.
    """
    axis = rows if AXIS == 1 else cols
    candidates = cols if AXIS == 1 else rows
    LAST: tl.constexpr = 1 if C.GRAD_SHIFT else 0
    value, slope = FORM(_affine(s, values, axis, AXIS, C))
    g = _load(grad, axis, AXIS)
    if C.SHARED and C.ROWS and C.COLS:  # one evaluation serves both sides
        g += _load(grad, cols, 0)
    by_z = _within(slope * g, s, values, axis, AXIS, C)
    if C.TIMES_SCALE:
        total += by_z * _load(values.scale, axis, AXIS, C.SHARED)
    else:
        total += by_z
    if C.GRAD_SHIFT:
        by_shift = _masked(by_z, excluded, rows, cols, True, C)
        _store_partial(out, 0, by_shift, axis, candidates, AXIS, C)
    if C.TOTAL:
        summed = _within(value * g, s, values, axis, AXIS, C)
        summed = _masked(summed, excluded, rows, cols, True, C)
        _store_partial(out, LAST, summed, axis, candidates, AXIS, C)
    if C.GRAD_SCALE:
        by_scale = _masked(by_z * s, excluded, rows, cols, True, C)
        _store_partial(out, LAST, by_scale, axis, candidates, AXIS, C)
    return total


@triton.jit(do_not_specialize=Block._fields)
def gradient_kernel(
    inputs,  # as in sums_kernel
    loaded,
    row,
    col,
    size_m,
    size_n,
    first_col,
    values,
    row_out,  # (planes, column parts, size_m) float32 partial sums, see `_slopes`
    col_out,  # (planes, row parts, size_n)
    grad,  # PerAnchor: of the sums
    panel,  # Panel for the gradient of the inner products, if any; may alias the products
    FORM: tl.constexpr,
    C: tl.constexpr,
):
    """Write ``dL/d<x_i, y_j> = sum_sides g f'(z_ij) scale / (|x_i| |y_j|)``, and sum up dL/dz.

    Without TIMES_SCALE, the scale is one number, by which `project_kernel` multiplies. With SHARED,
    one evaluation serves both sides, and the gradients of scale and shift are summed by row alone.
    The reference is :func:`itrloss.engine.tiled.gradients`.
    """
    block = Block(row, col, size_m, size_n, first_col)
    rows, first, parts = _tile(inputs, loaded, block, C)
    PARTS: tl.constexpr = C.PARTS
    for part in tl.static_range(PARTS):
        cols = _columns(first + part, inputs, block, PARTS, C)
        s = _over_norms(parts[part], rows, cols)
        x = tl.zeros_like(s)
        if C.ROWS:
            x = _slopes(x, s, loaded.excluded, rows, cols, values, grad, row_out, 1, FORM, C)
        if C.COLS and not (C.ROWS and C.SHARED):
            x = _slopes(x, s, loaded.excluded, rows, cols, values, grad, col_out, 0, FORM, C)
        if panel.x is not None:
            x = _masked(x, loaded.excluded, rows, cols, False, C)
            x = _over_norms(x, rows, cols)
            pointers, inside = _entries(panel, rows, cols)
            tl.store(pointers, x.to(panel.x.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------- the gradient of vectors


@triton.jit
def _vector(vectors, i, dim, BLOCK_D: tl.constexpr):
    """Return vector i (BLOCK_D,) of Vectors in float32, padded with zeros."""
    d = tl.arange(0, BLOCK_D)
    pointers = vectors.x + i.to(tl.int64) * vectors.stride + d
    return tl.load(pointers, mask=d < dim, other=0.0).to(tl.float32)


@triton.jit
def inverse_norms_kernel(
    vectors,  # Vectors x (N, dim)
    out,  # (N,) float32
    dim,
    BLOCK_D: tl.constexpr,
):
    """Write the inverse norms of vectors, 0 of those that count as zero: a program for each."""
    i = tl.program_id(0)
    x = _vector(vectors, i, dim, BLOCK_D)
    norm = tl.sqrt(tl.sum(x * x, 0))
    tl.store(out + i, tl.where(norm > EPS, 1.0 / norm, 0.0))


@triton.jit
def pair_scores_kernel(
    rows,  # Vectors x (N, dim)
    cols,  # Vectors y (M, dim)
    row,  # (P,) int64 the row of each pair; None: row p of pair p
    col,  # (P,) int64
    out,  # (P,) float32
    dim,
    BLOCK_D: tl.constexpr,
):
    """Write the scores of pairs: a program for each."""
    p = tl.program_id(0)
    i = p if row is None else tl.load(row + p)
    j = p if col is None else tl.load(col + p)
    s = tl.sum(_vector(rows, i, dim, BLOCK_D) * _vector(cols, j, dim, BLOCK_D), 0)
    if rows.inv is not None:
        s *= tl.load(rows.inv + i)
    if cols.inv is not None:
        s *= tl.load(cols.inv + j)
    tl.store(out + p, s)


@triton.jit
def _number(value, i):
    """Return the number of anchor i."""
    return value.number if value.x is None else tl.load(value.x + i * value.stride)


@triton.jit
def _listed_gradient(pair, j, scale, listed, partners, dim, BLOCK_D: tl.constexpr):
    """Return ``grad_p inv_i inv_j y_j`` of pair p, whose partner is j; ``scale``: inv_i."""
    weight = tl.load(listed.grad + pair) * scale
    if partners.inv is not None:
        weight = weight * tl.load(partners.inv + j)
    return weight * _vector(partners, j, dim, BLOCK_D)


@triton.jit(do_not_specialize=["begin"])
def project_kernel(
    own,  # Vectors x (N, dim)
    partners,  # Vectors y (M, dim) of the other side
    total,  # Vectors (r, dim): float32 sums of vectors from ``begin`` on; may alias out
    begin,
    factor,  # PerAnchor: the one scale of all scores; None: the sums contain it
    by_factor,  # (N,) float32 its gradient, or None
    grad,  # PerAnchor: of the sums, where they do not contain it; or None
    listed,  # Listed
    out,  # (N, dim)
    dim,
    BLOCK_D: tl.constexpr,
):
    """Write ``out_i = g - u <u, g>`` with ``u = x_i inv_i``: a program for each vector.

    g adds up ``factor grad_i total_i`` and ``grad_p inv_i inv_j y_j`` of the listed pairs p = (i,
    j). The gradient of the factor is ``<x_i, total_i>``, times ``grad_i``. The reference is
    :func:`itrloss.engine.vectors.project`.
    """
    i = begin + tl.program_id(0)
    x = _vector(own, i, dim, BLOCK_D)
    g = _vector(total, tl.program_id(0), dim, BLOCK_D)
    if by_factor is not None:
        tl.store(by_factor + i, tl.sum(x * g, 0))
    if factor is not None:
        g *= _number(factor, i)
    if grad is not None:
        g *= _number(grad, i)
    scale = 1.0 if own.inv is None else tl.load(own.inv + i)
    if listed.grad is not None:
        first = i if listed.start is None else tl.load(listed.start + i)
        end = i + 1 if listed.start is None else tl.load(listed.start + i + 1)
        for k in range(first, end):
            pair = k if listed.order is None else tl.load(listed.order + k)
            j = pair if listed.other is None else tl.load(listed.other + pair)
            g += _listed_gradient(pair, j, scale, listed, partners, dim, BLOCK_D)
    if own.inv is not None:
        u = x * scale
        g -= u * tl.sum(u * g, 0)
    d = tl.arange(0, BLOCK_D)
    tl.store(out + i.to(tl.int64) * dim + d, g.to(out.dtype.element_ty), mask=d < dim)


# ------------------------------------------------------------------------------- the forms of terms


@triton.jit
def _exp(z):
    """Return ``e^z``."""
    return tl.exp2(z * LOG2E)


@triton.jit
def _log1p(u):
    """Return log(1 + u) for u in [0, 1], accurate for a small u.

    That is u P(u), where P has the least relative error of all polynomials of degree 8: 3.0e-8, and
    1.8e-7 with the rounding of float32. Nine multiply-adds replace a logarithm and a division.
    """
    p = u * 0.005232694302256581 - 0.02950523892810469
    p = p * u + 0.07822595211928804
    p = p * u - 0.1366324581460909
    p = p * u + 0.19106006769502745
    p = p * u - 0.24842982215661985
    p = p * u + 0.33319096807734766
    p = p * u - 0.4999949314048222
    p = p * u + 0.9999999698795607
    return p * u


@triton.jit
def exponential(z):
    """``2^z``: the scale and the shift are in units of log 2."""
    e = tl.exp2(z)
    return e, e


@triton.jit
def information(z):
    """``z log(2) 2^z``: units of log 2, so that it rounds as the exponential does."""
    e = tl.exp2(z)
    z = tl.maximum(z / LOG2E, SMALLEST_LOG)  # -inf times exp(-inf) would be nan
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
    value = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return value, tl.where(z > 0.0, 1.0, 0.0)


@triton.jit
def softplus(z):
    """``log(1 + e^z)``."""
    log = _log1p(tl.exp2(tl.abs(z) * -LOG2E))
    value = tl.maximum(z, 0.0) + log
    slope = _exp(tl.minimum(z, 0.0) - log)  # 1 / (1 + e^-z) without a division
    return value, slope


@triton.jit
def log1p_clamp(z):
    """``log(1 + max(z, FLOOR))``."""
    w = 1.0 + tl.maximum(z, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return tl.log(w), tl.where(z < FLOOR, 0.0, 1.0 / w)


@triton.jit
def log1p_relu(z):
    """``log(1 + max(z, 0))``."""
    w = 1.0 + tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.log(w), tl.where(z <= 0.0, 0.0, 1.0 / w)


# The forms of terms; others are summed block by block in PyTorch.
FORMS = {
    terms.exponential: exponential,
    terms.information: information,
    terms.square: square,
    terms.excess: excess,
    terms.softplus: softplus,
    terms.identity: identity,
    terms.log1p_clamp: log1p_clamp,
    terms.log1p_relu: log1p_relu,
}
