"""Triton kernels of sums: what is found in a block of scores that a matrix product has just left.

A *side* is seen from its anchors: the rows of the block, or its columns. A kernel of sums has a program for some
anchors, which walks along all of the others in the block and adds to the anchors' figures in memory. No other program
of the launch touches these, so results do not depend on the order of the programs.

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
def vector(x, i, inside, ONE: tl.constexpr):
    """Values of some anchors; the same one for all if there is only one."""
    if ONE:
        i = i * 0
    return tl.load(x + i, mask=inside, other=0.0)


@triton.jit
def cosines(
    block,
    a,
    first,
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
    OTHERS: tl.constexpr,
):
    """Of the anchors ``a`` of a block with its others from ``first`` on; which pairs exist, and which are negatives.

    And the numbers of these others in the block.
    """
    o = first + tl.arange(0, OTHERS)
    i, j, inside_a, inside_o = start_a + a, start_o + o, a < size_a, o < size_o
    inside = inside_a[:, None] & inside_o[None, :]
    place = a.to(tl.int64)[:, None] * stride_a + o.to(tl.int64)[None, :] * stride_o
    x = tl.load(block + place, mask=inside, other=0.0)
    # The reciprocals are multiplied first: rows and columns, forward and backward must see the same rounding.
    if inv_a is not None and inv_o is not None:
        left = tl.load(inv_a + i, mask=inside_a, other=0.0)
        x = x * (left[:, None] * tl.load(inv_o + j, mask=inside_o, other=0.0)[None, :])
    elif inv_a is not None:
        x = x * tl.load(inv_a + i, mask=inside_a, other=0.0)[:, None]
    elif inv_o is not None:
        x = x * tl.load(inv_o + j, mask=inside_o, other=0.0)[None, :]
    negative = inside & (_positive(i, j, ids_a, ids_o, inside_a, inside_o) == 0)
    return x, inside, negative, o


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
    """Sums of exponentials along one side of a block, rescaled whenever a higher exponent comes."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    k = vector(scale, i, inside_a, ONE_SCALE)
    highest = tl.load(top + i, mask=inside_a, other=-float("inf"))
    sums = tl.load(total + i, mask=inside_a, other=0.0)
    figures = tl.zeros([ANCHORS], tl.float32)
    shares = tl.zeros([ANCHORS], tl.float32)
    if EXTRA != 0:
        figures = tl.load(figure + i, mask=inside_a, other=0.0)
    if EXTRA == ENTROPY:
        shares = tl.load(share + i, mask=inside_a, other=0.0)
    for first in range(0, size_o, OTHERS):
        s, inside, negative, _ = cosines(
            block, a, first, stride_a, stride_o, size_a, size_o, start_a, start_o, inv_a, inv_o, ids_a, ids_o, OTHERS
        )
        counts = inside
        if MASKED:
            counts = negative
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
    """Sums of the negatives' distances from a centre, and of their squares."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    middle = tl.load(centre + i, mask=inside_a, other=0.0)
    sums = tl.load(first + i, mask=inside_a, other=0.0)
    squares = tl.load(second + i, mask=inside_a, other=0.0)
    for start in range(0, size_o, OTHERS):
        s, _, negative, _ = cosines(
            block, a, start, stride_a, stride_o, size_a, size_o, start_a, start_o, inv_a, inv_o, ids_a, ids_o, OTHERS
        )
        x = tl.where(negative, s - middle[:, None], 0.0)
        sums += tl.sum(x, 1)
        squares += tl.sum(x * x, 1)
    tl.store(first + i, sums, mask=inside_a)
    tl.store(second + i, squares, mask=inside_a)


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
    """The highest score among the negatives, and whose it is."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    highest = tl.load(best + i, mask=inside_a, other=-float("inf"))
    index = tl.load(where + i, mask=inside_a, other=-1)
    for first in range(0, size_o, OTHERS):
        s, _, negative, o = cosines(
            block, a, first, stride_a, stride_o, size_a, size_o, start_a, start_o, inv_a, inv_o, ids_a, ids_o, OTHERS
        )
        s = tl.where(negative, s, -float("inf"))
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
    """How many negatives are above a threshold, or by how much; a program for each slot."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    slot = tl.program_id(1)
    i, inside_a = start_a + a, a < size_a
    t = tl.load(thresholds + slot.to(tl.int64) * anchors + i, mask=inside_a, other=float("inf"))
    found = tl.zeros([ANCHORS], out.dtype.element_ty)
    for first in range(0, size_o, OTHERS):
        s, _, negative, o = cosines(
            block, a, first, stride_a, stride_o, size_a, size_o, start_a, start_o, inv_a, inv_o, ids_a, ids_o, OTHERS
        )
        if bias is not None:
            s += tl.load(bias + start_o + o, mask=o < size_o, other=0.0)[None, :]
        if WHAT == SUM:
            found += tl.sum(tl.where(negative, tl.maximum(s - t[:, None], 0.0), 0.0), 1)
        if WHAT == COUNT:
            found += tl.sum((negative & (s > t[:, None])).to(out.dtype.element_ty), 1)
        if WHAT == COUNT_TIES:
            found += tl.sum((negative & (s >= t[:, None])).to(out.dtype.element_ty), 1)
    place = slot.to(tl.int64) * anchors + i
    found += tl.load(out + place, mask=inside_a, other=0)
    tl.store(out + place, found, mask=inside_a)


@triton.jit
def _softplus(z):
    u = tl.exp(-tl.abs(z))
    w = 1.0 + u
    # log(1 + u) with all digits of a small u: what rounding took from w is in the quotient (Kahan).
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(z, 0.0) + log1p


@triton.jit
def sigmoid(z):
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
    """Sums of ``log(1 + e^z)`` over the negatives, or of its slopes."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    i, inside_a = start_a + a, a < size_a
    k, b = vector(scale, i, inside_a, ONE_SCALE), vector(bias, i, inside_a, ONE_BIAS)
    first_sum = tl.load(values + i, mask=inside_a, other=0.0)
    second_sum = tl.zeros([ANCHORS], tl.float32)
    if slopes is not None:
        second_sum = tl.load(slopes + i, mask=inside_a, other=0.0)
    for first in range(0, size_o, OTHERS):
        s, _, negative, _ = cosines(
            block, a, first, stride_a, stride_o, size_a, size_o, start_a, start_o, inv_a, inv_o, ids_a, ids_o, OTHERS
        )
        z = s * k[:, None] + b[:, None]
        if slopes is not None:
            slope = tl.where(negative, sigmoid(z), 0.0)
            first_sum += tl.sum(slope * s, 1)
            second_sum += tl.sum(slope, 1)
        else:
            first_sum += tl.sum(tl.where(negative, _softplus(z), 0.0), 1)
    tl.store(values + i, first_sum, mask=inside_a)
    if slopes is not None:
        tl.store(slopes + i, second_sum, mask=inside_a)
