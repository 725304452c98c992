"""What all Triton kernels begin with: a tile of scores, which a program has to itself.

A *block* is a part of the score matrix, cut into tiles of R rows and C columns. Its inner products are there already,
as a matrix product has left them, or a program multiplies the embeddings of its tile itself; then they never leave the
chip. Either way the embeddings are as they came; reciprocal lengths are multiplied in here, in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Scores(NamedTuple):
    """A block as the kernels get it; None for what there is not."""

    products: Any  # (rows, columns); None: to be formed of these:
    rows: Any  # (N, D)
    cols: Any  # (M, D)
    stride: Any  # between rows of the products
    row_stride: Any  # between embeddings
    col_stride: Any
    width: Any  # D
    size_r: Any  # rows of the block
    size_c: Any
    start_r: Any  # first row of the block in the matrix
    start_c: Any
    row_inv: Any  # (N,) reciprocal lengths
    col_inv: Any  # (M,)
    row_ids: Any  # (N,)
    col_ids: Any  # (M,)
    factor: Any = None  # (1,) that multiplies gradients, which are then left undivided by the lengths


_BAND = tl.constexpr(
    8
)  # rows of tiles that are worked on together, so that the embeddings they share stay in the cache


@triton.jit
def tile(given, R: tl.constexpr, C: tl.constexpr):
    """Where this program's tile is: how many above it, how many to the left, and the rows that it has."""
    number, high, wide = tl.program_id(0), tl.cdiv(given.size_r, R), tl.cdiv(given.size_c, C)
    band = number // (_BAND * wide)
    height = tl.minimum(high - band * _BAND, _BAND)
    within = number % (_BAND * wide)
    up = band * _BAND + within % height
    return up, within // height, up * R + tl.arange(0, R)


@triton.jit
def vector(x, i, inside, ONE: tl.constexpr):
    """Values of some anchors; the same one for all if there is only one."""
    if ONE:
        i = i * 0
    return tl.load(x + i, mask=inside, other=0.0)


@triton.jit
def exp(x):
    """As the hardware has it: Triton's own takes three more instructions for results below 10^-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _multiplied(given, r, c, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Inner products of embeddings, K of their dimensions at a time, with float32 sums."""
    # Beyond the end the last one stands in: no mask of rows or columns in the loop.
    i = given.start_r + tl.minimum(r, given.size_r - 1)
    j = given.start_c + tl.minimum(c, given.size_c - 1)
    k = tl.arange(0, K)
    left = given.rows + i.to(tl.int64)[:, None] * given.row_stride + k[None, :]
    right = given.cols + j.to(tl.int64)[None, :] * given.col_stride + k[:, None]
    sums = tl.zeros([R, C], tl.float32)
    for start in range(0, given.width, K):
        exists = start + k < given.width
        x = tl.load(left + start, mask=exists[None, :], other=0.0)
        y = tl.load(right + start, mask=exists[:, None], other=0.0)
        sums = tl.dot(x, y, sums, input_precision="ieee")
    return sums


@triton.jit
def _halves(x, R: tl.constexpr, C: tl.constexpr):
    """Left and right half of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@triton.jit
def products(given, across, r, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """Inner products of a tile in parts of C / PARTS columns: what is made of a few at a time fits into registers."""
    c = across * C + tl.arange(0, C)
    if given.products is None:
        x = _multiplied(given, r, c, R, C, K)
    else:
        inside = (r < given.size_r)[:, None] & (c < given.size_c)[None, :]
        place = r.to(tl.int64)[:, None] * given.stride + c.to(tl.int64)[None, :]
        x = tl.load(given.products + place, mask=inside, other=0.0)
    if PARTS == 1:
        found = (x,)
    elif PARTS == 2:
        found = _halves(x, R, C)
    else:
        left, right = _halves(x, R, C)  # type: ignore  # Triton says that a split never returns
        left, after_left = _halves(left, R, C // 2)
        right, after_right = _halves(right, R, C // 2)
        found = (left, after_left, right, after_right)
    return found


@triton.jit
def cosines(given, x, r, first, C: tl.constexpr):
    """Cosines, from inner products of rows r with C columns from ``first`` on.

    Then which of these pairs exist, which of them are negatives, and the numbers of the columns.
    """
    c = first + tl.arange(0, C)
    i, j, inside_r, inside_c = given.start_r + r, given.start_c + c, r < given.size_r, c < given.size_c
    inside = inside_r[:, None] & inside_c[None, :]
    # The reciprocals are multiplied first: forward and backward must see the same rounding.
    if given.row_inv is not None and given.col_inv is not None:
        left = tl.load(given.row_inv + i, mask=inside_r, other=0.0)
        x = x * (left[:, None] * tl.load(given.col_inv + j, mask=inside_c, other=0.0)[None, :])
    elif given.row_inv is not None:
        x = x * tl.load(given.row_inv + i, mask=inside_r, other=0.0)[:, None]
    elif given.col_inv is not None:
        x = x * tl.load(given.col_inv + j, mask=inside_c, other=0.0)[None, :]
    if given.row_ids is not None:
        a = tl.load(given.row_ids + i, mask=inside_r, other=0)
        positive = a[:, None] == tl.load(given.col_ids + j, mask=inside_c, other=0)[None, :]
    else:
        positive = i[:, None] == j[None, :]
    return x, inside, inside & (positive == 0), c
