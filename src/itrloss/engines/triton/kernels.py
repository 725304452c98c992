"""Triton kernels: what is done with a block of scores that a matrix product has just left.

A *side* is seen from its anchors: the rows of the block, or its columns. A kernel of sums has a program for some
anchors, which walks along all of the others in the block and adds to the anchors' figures in memory. No other program
of the launch touches these, so results do not depend on the order of the programs. A kernel of gradients has a program
for some rows and columns, and may overwrite the scores by the gradient.

The block holds inner products of embeddings as they came; their reciprocal lengths are multiplied in here, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

MEAN, ENTROPY = tl.constexpr(1), tl.constexpr(2)  # as in itrloss.engines.softmax
SUM, COUNT, COUNT_TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _positive(i, j, row_ids, col_ids, inside_i, inside_j):
    """Whether the global row i matches the global column j, for all pairs of the two lists."""
    if row_ids is not None:
        a = tl.load(row_ids + i, mask=inside_i, other=0)
        b = tl.load(col_ids + j, mask=inside_j, other=0)
        return a[:, None] == b[None, :]
    return i[:, None] == j[None, :]


@triton.jit
def _vector(x, i, inside, ONE: tl.constexpr):
    """Values of some anchors; the same one for all if there is only one."""
    if ONE:
        i = i * 0
    return tl.load(x + i, mask=inside, other=0.0)


@triton.jit
def _scores(block, a, o, stride_a, stride_o, inside, inv_a, inv_o, i, j, inside_i, inside_j):
    """Cosines of anchors ``a`` and others ``o`` of the block, whose global numbers are ``i`` and ``j``."""
    place = a.to(tl.int64)[:, None] * stride_a + o.to(tl.int64)[None, :] * stride_o
    x = tl.load(block + place, mask=inside, other=0.0)
    # The reciprocals are multiplied first: rows and columns, forward and backward must see the same rounding.
    if inv_a is not None and inv_o is not None:
        left = tl.load(inv_a + i, mask=inside_i, other=0.0)
        x = x * (left[:, None] * tl.load(inv_o + j, mask=inside_j, other=0.0)[None, :])
    elif inv_a is not None:
        x = x * tl.load(inv_a + i, mask=inside_i, other=0.0)[:, None]
    elif inv_o is not None:
        x = x * tl.load(inv_o + j, mask=inside_j, other=0.0)[None, :]
    return x


@triton.jit
def softmax_sums(
    block,
    stride_a,
    stride_o,
    size_a,
    size_o,
    start_a,
    start_o,
    inv_a,
    inv_o,
    ids_a,
    ids_o,
    scale,  # (anchors,), or (1,)
    top,  # (anchors,) highest exponent so far; with exponentials e = exp(scale S - top):
    total,  # (anchors,) sum of e
    figure,  # (anchors,) MEAN: sum of e S. ENTROPY: sum of e (scale S - top) over what counts
    share,  # (anchors,) ENTROPY: sum of e over what counts
    ONE_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    EXTRA: tl.constexpr,
    ANCHORS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    k = _vector(scale, i, inside_a, ONE_SCALE)
    highest = tl.load(top + i, mask=inside_a, other=-float("inf"))
    sums = tl.load(total + i, mask=inside_a, other=0.0)
    figures = tl.zeros([ANCHORS], tl.float32)
    shares = tl.zeros([ANCHORS], tl.float32)
    if EXTRA != 0:
        figures = tl.load(figure + i, mask=inside_a, other=0.0)
    if EXTRA == ENTROPY:
        shares = tl.load(share + i, mask=inside_a, other=0.0)
    for first in range(0, size_o, OTHERS):
        o = first + tl.arange(0, OTHERS)
        j, inside_o = start_o + o, o < size_o
        inside = inside_a[:, None] & inside_o[None, :]
        s = _scores(block, a, o, stride_a, stride_o, inside, inv_a, inv_o, i, j, inside_a, inside_o)
        counts = inside
        if MASKED:
            counts = inside & (_positive(i, j, ids_a, ids_o, inside_a, inside_o) == 0)
        summed = counts
        if EXTRA == ENTROPY:
            summed = inside
        z = tl.where(summed, s * k[:, None], -float("inf"))
        higher = tl.maximum(highest, tl.max(z, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        factor = tl.exp(highest - base)
        e = tl.exp(z - base[:, None])
        if EXTRA == ENTROPY:
            gap = tl.where(highest == -float("inf"), 0.0, highest - base)
            counted = tl.where(counts, e, 0.0)
            figures = (figures + gap * shares) * factor
            figures += tl.sum(counted * tl.where(counts, z - base[:, None], 0.0), 1)
            shares = shares * factor + tl.sum(counted, 1)
        if EXTRA == MEAN:
            figures = figures * factor + tl.sum(e * s, 1)
        sums = sums * factor + tl.sum(e, 1)
        highest = higher
    tl.store(top + i, highest, mask=inside_a)
    tl.store(total + i, sums, mask=inside_a)
    if EXTRA != 0:
        tl.store(figure + i, figures, mask=inside_a)
    if EXTRA == ENTROPY:
        tl.store(share + i, shares, mask=inside_a)


@triton.jit
def _softmax_share(s, k, top, base, slope, uncounted, positive, ENTROPIC: tl.constexpr, MASKED: tl.constexpr):
    """``e (base + slope log e)``, at positives that do not count ``e uncounted``; all vectors broadcast."""
    log_e = s * k - top
    factor = base
    if ENTROPIC:
        factor = base + slope * tl.maximum(log_e, -1e4)
        if MASKED:
            factor = tl.where(positive, uncounted, factor)
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
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    inside = inside_r[:, None] & inside_c[None, :]
    s = _scores(block, r, c, stride, 1, inside, row_inv, col_inv, i, j, inside_r, inside_c)
    positive = inside == 0
    if MASKED:
        positive = _positive(i, j, row_ids, col_ids, inside_r, inside_c)
    grad = tl.zeros([R, C], tl.float32)
    if row_vectors is not None:
        k = _vector(row_scale, i, inside_r, ONE_ROW_SCALE)
        top = tl.load(row_vectors + i, mask=inside_r, other=0.0)
        base = tl.load(row_vectors + rows + i, mask=inside_r, other=0.0)
        slope, uncounted = base, base
        if ENTROPIC:
            slope = tl.load(row_vectors + 2 * rows + i, mask=inside_r, other=0.0)
            uncounted = tl.load(row_vectors + 3 * rows + i, mask=inside_r, other=0.0)
        grad += _softmax_share(
            s, k[:, None], top[:, None], base[:, None], slope[:, None], uncounted[:, None], positive, ENTROPIC, MASKED
        )
    if col_vectors is not None:
        k = _vector(col_scale, j, inside_c, ONE_COL_SCALE)
        top = tl.load(col_vectors + j, mask=inside_c, other=0.0)
        base = tl.load(col_vectors + cols + j, mask=inside_c, other=0.0)
        slope, uncounted = base, base
        if ENTROPIC:
            slope = tl.load(col_vectors + 2 * cols + j, mask=inside_c, other=0.0)
            uncounted = tl.load(col_vectors + 3 * cols + j, mask=inside_c, other=0.0)
        grad += _softmax_share(
            s, k[None, :], top[None, :], base[None, :], slope[None, :], uncounted[None, :], positive, ENTROPIC, MASKED
        )
    if MASKED and not ENTROPIC:
        grad = tl.where(positive, 0.0, grad)
    _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c)


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
def moment_sums(
    block,
    stride_a,
    stride_o,
    size_a,
    size_o,
    start_a,
    start_o,
    inv_a,
    inv_o,
    ids_a,
    ids_o,
    centre,  # (anchors,)
    first,  # (anchors,) sum of S - centre over the negatives
    second,  # (anchors,) of its square
    ANCHORS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    middle = tl.load(centre + i, mask=inside_a, other=0.0)
    sums = tl.load(first + i, mask=inside_a, other=0.0)
    squares = tl.load(second + i, mask=inside_a, other=0.0)
    for start in range(0, size_o, OTHERS):
        o = start + tl.arange(0, OTHERS)
        j, inside_o = start_o + o, o < size_o
        inside = inside_a[:, None] & inside_o[None, :]
        s = _scores(block, a, o, stride_a, stride_o, inside, inv_a, inv_o, i, j, inside_a, inside_o)
        counts = inside & (_positive(i, j, ids_a, ids_o, inside_a, inside_o) == 0)
        x = tl.where(counts, s - middle[:, None], 0.0)
        sums += tl.sum(x, 1)
        squares += tl.sum(x * x, 1)
    tl.store(first + i, sums, mask=inside_a)
    tl.store(second + i, squares, mask=inside_a)


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
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    inside = inside_r[:, None] & inside_c[None, :]
    s = _scores(block, r, c, stride, 1, inside, row_inv, col_inv, i, j, inside_r, inside_c)
    constant, slope = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    if row_vectors is not None:
        constant += tl.load(row_vectors + i, mask=inside_r, other=0.0)[:, None]
        slope += tl.load(row_vectors + rows + i, mask=inside_r, other=0.0)[:, None]
    if col_vectors is not None:
        constant += tl.load(col_vectors + j, mask=inside_c, other=0.0)[None, :]
        slope += tl.load(col_vectors + cols + j, mask=inside_c, other=0.0)[None, :]
    positive = _positive(i, j, row_ids, col_ids, inside_r, inside_c)
    grad = tl.where(positive, 0.0, constant + slope * s)
    _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c)


@triton.jit
def hardest_negatives(
    block,
    stride_a,
    stride_o,
    size_a,
    size_o,
    start_a,
    start_o,
    inv_a,
    inv_o,
    ids_a,
    ids_o,
    best,  # (anchors,)
    where,  # (anchors,) int64
    ANCHORS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    highest = tl.load(best + i, mask=inside_a, other=-float("inf"))
    index = tl.load(where + i, mask=inside_a, other=-1)
    for first in range(0, size_o, OTHERS):
        o = first + tl.arange(0, OTHERS)
        j, inside_o = start_o + o, o < size_o
        inside = inside_a[:, None] & inside_o[None, :]
        s = _scores(block, a, o, stride_a, stride_o, inside, inv_a, inv_o, i, j, inside_a, inside_o)
        counts = inside & (_positive(i, j, ids_a, ids_o, inside_a, inside_o) == 0)
        s = tl.where(counts, s, -float("inf"))
        value = tl.max(s, 1)
        # The first of equals, whatever a tree of comparisons would make of them.
        place = tl.min(tl.where(s == value[:, None], o[None, :], size_o), 1)
        index = tl.where(value > highest, (start_o + place).to(tl.int64), index)
        highest = tl.maximum(highest, value)
    tl.store(best + i, highest, mask=inside_a)
    tl.store(where + i, index, mask=inside_a)


@triton.jit
def threshold_sums(
    block,
    stride_a,
    stride_o,
    size_a,
    size_o,
    start_a,
    start_o,
    inv_a,
    inv_o,
    ids_a,
    ids_o,
    bias,  # (others,) added to the scores
    thresholds,  # (slots, anchors); infinite or nan where there is none
    out,  # (slots, anchors)
    anchors,
    WHAT: tl.constexpr,  # SUM of what is above the threshold, or its COUNT, or COUNT_TIES of what is not below it
    ANCHORS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    slot = tl.program_id(1)
    i, inside_a = start_a + a, a < size_a
    t = tl.load(thresholds + slot.to(tl.int64) * anchors + i, mask=inside_a, other=float("inf"))
    found = tl.zeros([ANCHORS], out.dtype.element_ty)
    for first in range(0, size_o, OTHERS):
        o = first + tl.arange(0, OTHERS)
        j, inside_o = start_o + o, o < size_o
        inside = inside_a[:, None] & inside_o[None, :]
        s = _scores(block, a, o, stride_a, stride_o, inside, inv_a, inv_o, i, j, inside_a, inside_o)
        if bias is not None:
            s += tl.load(bias + j, mask=inside_o, other=0.0)[None, :]
        counts = inside & (_positive(i, j, ids_a, ids_o, inside_a, inside_o) == 0)
        if WHAT == SUM:
            found += tl.sum(tl.where(counts, tl.maximum(s - t[:, None], 0.0), 0.0), 1)
        if WHAT == COUNT:
            found += tl.sum((counts & (s > t[:, None])).to(out.dtype.element_ty), 1)
        if WHAT == COUNT_TIES:
            found += tl.sum((counts & (s >= t[:, None])).to(out.dtype.element_ty), 1)
    place = slot.to(tl.int64) * anchors + i
    found += tl.load(out + place, mask=inside_a, other=0)
    tl.store(out + place, found, mask=inside_a)


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
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    inside = inside_r[:, None] & inside_c[None, :]
    s = _scores(block, r, c, stride, 1, inside, row_inv, col_inv, i, j, inside_r, inside_c)
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
    positive = _positive(i, j, row_ids, col_ids, inside_r, inside_c)
    grad = tl.where(positive, 0.0, grad)
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
    k = _vector(scale, i, inside_r, ONE_SCALE)
    before = tl.load(top + i, mask=inside_r, other=-float("inf"))
    highest = before
    sums = tl.zeros([R], tl.float32)
    base = sums
    for reading in tl.static_range(2):
        if reading == 1:
            base = tl.where(highest == -float("inf"), 0.0, highest)
        for first in range(0, size_c, C):
            c = first + tl.arange(0, C)
            j, inside_c = start_c + c, c < size_c
            inside = inside_r[:, None] & inside_c[None, :]
            s = _scores(block, r, c, stride, 1, inside, row_inv, col_inv, i, j, inside_r, inside_c)
            counts = inside
            if MASKED:
                counts = inside & (_positive(i, j, row_ids, col_ids, inside_r, inside_c) == 0)
            z = tl.where(counts, s * k[:, None], -float("inf"))
            if reading == 0:
                highest = tl.maximum(highest, tl.max(z, 1))
            else:
                e = tl.exp(z - base[:, None])
                sums += tl.sum(e, 1)
                # Products of inner products' exponentials with unit columns: their lengths come in here.
                if col_inv is not None:
                    e = e * tl.load(col_inv + j, mask=inside_c, other=0.0)[None, :]
                place = r.to(tl.int64)[:, None] * stride + c.to(tl.int64)[None, :]
                tl.store(out + place, e.to(out.dtype.element_ty), mask=inside)
    shrink = tl.exp(before - base)
    tl.store(factor + i, shrink, mask=inside_r)
    tl.store(total + i, tl.load(total + i, mask=inside_r, other=0.0) * shrink + sums, mask=inside_r)
    tl.store(top + i, highest, mask=inside_r)


@triton.jit
def _softplus(z):
    u = tl.exp(-tl.abs(z))
    w = 1.0 + u
    # log(1 + u) with all digits of a small u: what rounding took from w is in the quotient (Kahan).
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(z, 0.0) + log1p


@triton.jit
def _sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus_sums(
    block,
    stride_a,
    stride_o,
    size_a,
    size_o,
    start_a,
    start_o,
    inv_a,
    inv_o,
    ids_a,
    ids_o,
    scale,  # (anchors,), or (1,)
    bias,  # (anchors,), or (1,)
    values,  # (anchors,) sum of log(1 + e^z) over the negatives, z = scale S + bias; or, for SLOPES, of its slope by S,
    slopes,  # (anchors,) and of that by the bias
    ONE_SCALE: tl.constexpr,
    ONE_BIAS: tl.constexpr,
    ANCHORS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    k, b = _vector(scale, i, inside_a, ONE_SCALE), _vector(bias, i, inside_a, ONE_BIAS)
    first_sum = tl.load(values + i, mask=inside_a, other=0.0)
    second_sum = tl.zeros([ANCHORS], tl.float32)
    if slopes is not None:
        second_sum = tl.load(slopes + i, mask=inside_a, other=0.0)
    for first in range(0, size_o, OTHERS):
        o = first + tl.arange(0, OTHERS)
        j, inside_o = start_o + o, o < size_o
        inside = inside_a[:, None] & inside_o[None, :]
        s = _scores(block, a, o, stride_a, stride_o, inside, inv_a, inv_o, i, j, inside_a, inside_o)
        counts = inside & (_positive(i, j, ids_a, ids_o, inside_a, inside_o) == 0)
        z = s * k[:, None] + b[:, None]
        if slopes is not None:
            slope = tl.where(counts, _sigmoid(z), 0.0)
            first_sum += tl.sum(slope * s, 1)
            second_sum += tl.sum(slope, 1)
        else:
            first_sum += tl.sum(tl.where(counts, _softplus(z), 0.0), 1)
    tl.store(values + i, first_sum, mask=inside_a)
    if slopes is not None:
        tl.store(slopes + i, second_sum, mask=inside_a)


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
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    i, j, inside_r, inside_c = start_r + r, start_c + c, r < size_r, c < size_c
    inside = inside_r[:, None] & inside_c[None, :]
    s = _scores(block, r, c, stride, 1, inside, row_inv, col_inv, i, j, inside_r, inside_c)
    grad = tl.zeros([R, C], tl.float32)
    if row_vectors is not None:
        k = tl.load(row_vectors + i, mask=inside_r, other=0.0)
        b = tl.load(row_vectors + rows + i, mask=inside_r, other=0.0)
        g = tl.load(row_vectors + 2 * rows + i, mask=inside_r, other=0.0)
        grad += _sigmoid(s * k[:, None] + b[:, None]) * (k * g)[:, None]
    if col_vectors is not None:
        k = tl.load(col_vectors + j, mask=inside_c, other=0.0)
        b = tl.load(col_vectors + cols + j, mask=inside_c, other=0.0)
        g = tl.load(col_vectors + 2 * cols + j, mask=inside_c, other=0.0)
        grad += _sigmoid(s * k[None, :] + b[None, :]) * (k * g)[None, :]
    positive = _positive(i, j, row_ids, col_ids, inside_r, inside_c)
    grad = tl.where(positive, 0.0, grad)
    _write(out, grad, r, c, stride, inside, row_inv, col_inv, i, j, inside_r, inside_c)
