"""The passes of the other engines, with the work on each block of scores in one kernel.

A block is formed by a matrix product of embeddings as they came (half precision multiplies half precision, accumulated
in float32) and worked on by kernels that know reciprocal lengths and ids. Its gradient is rounded to bfloat16 if the
embeddings are bfloat16, and goes into float32 sums by two more products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import moments as by_torch
from .. import softmax
from ..positives import Positives
from ..tiles import Pair, Source, Tile, tile_shape, unit
from ..violations import pushed_up, seen_from
from . import gradients
from . import sums as along

# Anchors and others per program of a kernel of sums, along the rows and along the columns; rows and columns per program
# of a kernel of gradients.
_ALONG, _SQUARE = ((16, 256), (64, 64)), (32, 128)
_ROWS = 2**15  # embeddings at a time on their way through the normalisation


class Block(NamedTuple):
    """Inner products of some rows with some columns, or scores."""

    scores: Tensor  # (rows, columns), contiguous
    r0: int
    c0: int


def blocks(source: Source) -> Iterator[Block]:
    """All of them; one after the other in the same memory if they have to be formed."""
    n, m = source.shape
    if 0 in (n, m):
        return
    if source.cols is None:
        yield Block(source.rows.contiguous(), 0, 0)
        return
    step_r, step_c = tile_shape(source)
    space = torch.empty(step_r * step_c, dtype=torch.float32, device=source.rows.device)
    for c0 in range(0, m, step_c):
        cols = source.cols[c0 : c0 + step_c]
        for r0 in range(0, n, step_r):
            rows = source.rows[r0 : r0 + step_r]
            out = space[: len(rows) * len(cols)].view(len(rows), len(cols))
            if _half(source) and rows.is_cuda:
                torch.mm(rows, cols.T, out_dtype=torch.float32, out=out)
            else:
                torch.mm(rows.float(), cols.float().T, out=out)
            yield Block(out, r0, c0)


def as_tiles(source: Source, scratch: int) -> Iterator[Tile]:
    """For what has no kernel: the very scores that the kernels see."""
    for block in blocks(source):
        x, (r0, c0) = block.scores, block[1:]
        r1, c1 = r0 + x.shape[0], c0 + x.shape[1]
        left, right = _inverses(source)
        if left is not None:
            x.mul_(left[r0:r1, None] if right is None else left[r0:r1, None] * right[c0:c1])
        yield Tile(r0, r1, c0, c1, x, [torch.empty_like(x) for _ in range(scratch)], x.shape == source.shape)


def _half(source: Source) -> bool:
    """Whether products may be of half precision as they are."""
    return source.cols is not None and source.rows.dtype == source.cols.dtype != torch.float32


def _inverses(source: Source) -> Pair:
    return (None, None) if source.cols is None else (source.row_inv, source.col_inv)


def _sum(kernel: Any, source: Source, block: Block, side: int, *args: Any, slots: int = 1, **flags: Any) -> None:
    """Launch a kernel of sums along the rows (side 0) or the columns of a block."""
    inverses, ids, x = _inverses(source), (source.row_ids, source.col_ids), block.scores
    seen = []
    for pair in (x.stride(), x.shape, (block.r0, block.c0), inverses, ids):
        seen += pair if side == 0 else pair[::-1]
    anchors, others = _ALONG[side]
    grid = -(-x.shape[side] // anchors), slots
    kernel[grid](x, *_packed(*seen, *args), **flags, ANCHORS=anchors, OTHERS=others)


def _write(kernel: Any, source: Source, block: Block, out: Tensor, *args: Any, rows_only: bool = False, **flags: Any):
    """Launch a kernel that writes as many values as a block has."""
    inverses, ids, (n, m) = _inverses(source), (source.row_ids, source.col_ids), block.scores.shape
    rows, cols = _ALONG[0] if rows_only else _SQUARE
    grid = -(-n // rows), 1 if rows_only else -(-m // cols)
    given = _packed(*inverses, *ids, *args)
    kernel[grid](block.scores, out, m, n, m, block.r0, block.c0, *given, **flags, R=rows, C=cols)


def _packed(*given: Any) -> list[Any]:
    """Kernels read vectors one value after the other."""
    return [x.contiguous() if isinstance(x, Tensor) else x for x in given]


class Gradient:
    """Takes the gradient of block after block and holds that of the source's own tensors."""

    def __init__(self, source: Source, needs: Sequence[bool]):
        self.source, self.sums = source, [None, None]
        self.matrix, self.space = None, None
        if source.cols is None:
            self.matrix = torch.empty(source.shape, dtype=torch.float32, device=source.rows.device)
            return
        self.sums = [
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if need else None
            for x, need in zip((source.rows, source.cols), needs, strict=True)
        ]
        # float16 would lose small gradients.
        if _half(source) and source.rows.dtype == torch.bfloat16:
            step_r, step_c = tile_shape(source)
            self.space = torch.empty(step_r * step_c, dtype=torch.bfloat16, device=source.rows.device)

    def of(self, block: Block) -> Tensor:
        """Where to write the gradient of this block; that may be over its scores."""
        if self.matrix is not None:
            return self.matrix
        x = block.scores
        return x if self.space is None else self.space[: x.numel()].view(x.shape)

    def add(self, block: Block, grad: Tensor) -> None:
        """Account for what was just written."""
        s = self.source
        if s.cols is None:
            return
        (n, m), (rows, cols) = grad.shape, self.sums
        if rows is not None:
            _add_product(rows[block.r0 : block.r0 + n], grad, s.cols[block.c0 : block.c0 + m])
        if cols is not None:
            _add_product(cols[block.c0 : block.c0 + m], grad.T, s.rows[block.r0 : block.r0 + n])

    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of rows and columns in their own dtype; an empty tensor where none was asked for."""
        s = self.source
        if s.cols is None:
            assert self.matrix is not None
            return self.matrix, s.rows.new_empty(0)
        found = []
        for grad, x, inv in zip(self.sums, (s.rows, s.cols), _inverses(s), strict=True):
            if grad is None:
                found.append(x.new_empty(0))
                continue
            if inv is not None:  # what it has along its own vector changes only the length
                for g, v, i in zip(grad.split(_ROWS), x.split(_ROWS), inv.split(_ROWS), strict=True):
                    u = unit(v, i)
                    g.addcmul_(u, (u * g).sum(1, keepdim=True), value=-1)
            found.append(grad.to(x.dtype))
        return found[0], found[1]


def _add_product(total: Tensor, grad: Tensor, other: Tensor) -> None:
    if grad.dtype != torch.float32 and grad.is_cuda:
        torch.addmm(total, grad, other, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(grad.float(), other.float())


def _figures(
    source: Source, asked: Sequence[bool], value: float = 0.0, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Per anchor of each asked side, as they begin."""
    return [
        torch.full((size,), value, dtype=dtype, device=source.rows.device) if a else None
        for size, a in zip(source.shape, asked, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ log-sum-exp


def logsumexp(source: Source, scales: Pair, masked: bool, extra: int) -> tuple[softmax.Sums, softmax.Sums, Tensor]:
    """See :func:`itrloss.engines.softmax.logsumexp`."""
    asked = [scale is not None for scale in scales]
    tops = _figures(source, asked, -math.inf)
    totals, figures, shares = (_figures(source, asked) for _ in range(3))
    for block in blocks(source):
        for side, scale in enumerate(scales):
            if scale is not None:
                into = tops[side], totals[side], figures[side], shares[side]
                flags = {"ONE_SCALE": scale.numel() == 1, "MASKED": masked, "EXTRA": extra}
                _sum(along.softmax_sums, source, block, side, scale, *into, **flags)
    found = []
    for side, a in enumerate(asked):
        figure, share = figures[side] if extra else None, shares[side] if extra == softmax.ENTROPY else None
        found.append(softmax.Stats(tops[side], totals[side], figure, share) if a else None)
    rows, cols = [softmax.close(stats, source, None) for stats in found]
    return rows, cols, torch.empty(0, dtype=torch.float32, device=source.rows.device)


def logsumexp_backward(
    source: Source,
    scales: Pair,
    sums: tuple[softmax.Sums | None, softmax.Sums | None],
    grads: Pair,
    entropy_grads: Pair,
    masked: bool,
    extra: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.softmax.logsumexp_backward`."""
    given, single = [], []
    for side, (scale, x, g, h) in enumerate(zip(scales, sums, grads, entropy_grads, strict=True)):
        vectors = None
        if scale is not None and x is not None and not (g is None and h is None):
            const = softmax.constant(scale, x, g)
            factors = [const, torch.zeros_like(const), const]
            if h is not None:
                factors = softmax.entropy_factors(const, scale, x, h[0])
            vectors = torch.stack([softmax.finite(x.top), *factors])
        given += [scale, vectors, source.shape[side]]
        single.append(scale is not None and scale.numel() == 1)
    flags = {"MASKED": masked, "ENTROPIC": extra == softmax.ENTROPY}
    flags |= {"ONE_ROW_SCALE": single[0], "ONE_COL_SCALE": single[1]}
    gradient = Gradient(source, needs)
    for block in blocks(source):
        out = gradient.of(block)
        _write(gradients.softmax_gradient, source, block, out, *given, **flags)
        gradient.add(block, out)
    return gradient.finish()


def sums_and_products(
    source: Source, scale: Tensor, masked: bool, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`itrloss.engines.softmax.sums_and_products`."""
    cols = source.cols
    assert cols is not None
    (top, _), (total, _), (factor, _) = (_figures(source, (True, False), x) for x in (-math.inf, 0.0, 0.0))
    shape = source.rows.shape
    products = torch.zeros(shape, dtype=torch.float32, device=source.rows.device) if wanted else None
    gradient = Gradient(source, (False, False))
    for block in blocks(source):
        rows, size = slice(block.r0, block.r0 + block.scores.shape[0]), block.scores.shape[1]
        out = gradient.of(block)
        flags = {"ONE_SCALE": scale.numel() == 1, "MASKED": masked}
        _write(gradients.exponentials, source, block, out, scale, top, total, factor, rows_only=True, **flags)
        if products is not None:
            products[rows] *= factor[rows, None]
            _add_product(products[rows], out, cols[block.c0 : block.c0 + size])
    return total, softmax.finite(top), products


# ---------------------------------------------------------------------------------------------------- moments


def moments(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.moments.moments`."""
    centres = by_torch.centres(source, asked)
    first, second = _figures(source, asked), _figures(source, asked)
    for block in blocks(source):
        for side, a in enumerate(asked):
            if a:
                _sum(along.moment_sums, source, block, side, centres[side], first[side], second[side])
    counts = by_torch.negative_counts(Positives.of(source), asked)
    found = by_torch.close(centres, counts, first, second)
    return found.mean, found.variance


def moments_backward(
    source: Source, parts: Sequence[tuple[Tensor, Tensor] | None], needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """``dS = constant + slope S``, of each side, over the negatives."""
    given = []
    for part, size in zip(parts, source.shape, strict=True):
        given += [None if part is None else torch.stack(part), size]
    gradient = Gradient(source, needs)
    for block in blocks(source):
        out = gradient.of(block)
        _write(gradients.affine_gradient, source, block, out, *given)
        gradient.add(block, out)
    return gradient.finish()


# --------------------------------------------------------------------------------------- hardest, margins, terms


def hardest(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, ...]:
    """See :func:`itrloss.engines.pairs.hardest`."""
    best, where = _figures(source, asked, -math.inf), _figures(source, asked, -1, torch.int64)
    for block in blocks(source):
        for side, a in enumerate(asked):
            if a:
                _sum(along.hardest_negatives, source, block, side, best[side], where[side])
    empty = torch.empty(0, dtype=torch.float32, device=source.rows.device)
    values = [empty if x is None else x for x in best]
    return *values, *[empty.to(torch.int64) if x is None else x for x in where]


def violations(source: Source, margin: float, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.violations.violations`."""
    found = seen_from(source, margin, asked)
    sums = [None if x is None else torch.zeros_like(x.thresholds) for x in found]
    for block in blocks(source):
        _count(source, block, [None if x is None else x.thresholds for x in found], sums, along.SUM)
    empty = torch.empty(0, dtype=torch.float32, device=source.rows.device)
    rows, cols = [empty if x is None else x.sum(0) for x in sums]
    return rows, cols


def _count(
    source: Source,
    block: Block,
    thresholds: Sequence[Tensor | None],
    into: Sequence[Tensor | None],
    what: Any,
    biases: Pair = (None, None),
) -> None:
    """Add to (slots, anchors) how many negatives are above each threshold, or by how much."""
    for side, (table, out, bias) in enumerate(zip(thresholds, into, biases, strict=True)):
        if table is not None and out is not None and len(table):
            given = bias, table, out, source.shape[side]
            _sum(along.threshold_sums, source, block, side, *given, slots=len(table), WHAT=what.value)


def violations_backward(source: Source, margin: float, grads: Pair, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.violations.violations_backward`."""
    found = seen_from(source, margin, (grads[0] is not None, grads[1] is not None))
    tables = [None if x is None else x.thresholds for x in found]
    active = [None if x is None else torch.zeros_like(x) for x in tables]
    given = []
    for table, grad, size in zip(tables, grads, source.shape, strict=True):
        given += [table, 0 if table is None else len(table), grad, size]
    gradient = Gradient(source, needs)
    for block in blocks(source):
        _count(source, block, tables, active, along.COUNT)
        out = gradient.of(block)
        _write(gradients.violation_gradient, source, block, out, *given)
        gradient.add(block, out)
    rows, cols = gradient.finish()
    return pushed_up(source, found, active, grads, needs, rows, cols)


def softplus_sums(
    source: Source, params: tuple[list[Tensor], list[Tensor]], asked: tuple[bool, bool], slopes: bool = False
) -> tuple[list[Any], list[Any]]:
    """Of each asked side ``sum_j log(1 + exp(a S_ij + b))`` over the negatives.

    With ``slopes`` two sums instead, which times the upstream gradient are the parameters' gradients.
    """
    first, second = _figures(source, asked), _figures(source, asked) if slopes else [None, None]
    for block in blocks(source):
        for side, a in enumerate(asked):
            if a:
                scale, bias = params[side]
                flags = {"ONE_SCALE": scale.numel() == 1, "ONE_BIAS": bias.numel() == 1}
                _sum(along.softplus_sums, source, block, side, scale, bias, first[side], second[side], **flags)
    return first, second


def softplus_sums_backward(
    source: Source,
    params: tuple[list[Tensor], list[Tensor]],
    grads: Pair,
    needs: tuple[bool, bool],
    needs_params: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """See :func:`itrloss.engines.pairs.term_sums_backward`."""
    asked = grads[0] is not None, grads[1] is not None
    by_params = [torch.zeros_like(p) for p in params[0]], [torch.zeros_like(p) for p in params[1]]
    if needs_params:
        slopes = softplus_sums(source, params, asked, slopes=True)
        for side, g in enumerate(grads):
            if g is not None:
                for into, slope in zip(by_params[side], (slopes[0][side], slopes[1][side]), strict=True):
                    into += (g * slope).sum() if into.numel() == 1 else g * slope
    given = []
    for side, g in enumerate(grads):
        given.append(None if g is None else torch.stack([x.expand(g.shape) for x in (*params[side], g)]))
        given.append(source.shape[side])
    gradient = Gradient(source, needs)
    for block in blocks(source):
        out = gradient.of(block)
        _write(gradients.softplus_gradient, source, block, out, *given)
        gradient.add(block, out)
    return (*gradient.finish(), *by_params)


def ranks_counted(
    source: Source, tables: Sequence[Tensor | None], biases: Pair, optimistic: bool
) -> list[Tensor | None]:
    """(slots, anchors) int64: how many negatives rank ahead of each positive."""
    counts = [None if t is None else torch.zeros_like(t, dtype=torch.int64) for t in tables]
    for block in blocks(source):
        _count(source, block, tables, counts, along.COUNT if optimistic else along.COUNT_TIES, biases)
    return counts
