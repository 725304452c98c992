"""The passes of the other engines, with the work on each block of scores in one kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
from torch import Tensor

from .. import moments as by_torch
from .. import softmax
from ..pairs import aligned_scores
from ..positives import Positives
from ..tiles import Asked, Pair, Source, apart, joined
from ..violations import pushed_up, seen_from
from . import gradients
from . import positives as of_positives
from . import sums as along
from .blocks import (
    EXACT,
    INTERPRETED,
    Gradient,
    Sides,
    add_product,
    blocks,
    by_rows,
    cut_of,
    half,
    inverses,
    launch,
    one,
    packed,
)
from .scores import Scores

_LONGEST = 2**13  # embedding that one program holds
# Powers of two between which the largest exponential of a row has to lie. Their sums, and products with them, are
# float32, and what is 2^60 times smaller may vanish; float16 begins to lose digits at 2^-14, and ends at 2^16.
_REACH = {torch.float32: (0, 60), torch.bfloat16: (0, 60), torch.float16: (8, 15)}
_SLOTS = 32  # thresholds of an anchor that one kernel looks at


def _by_kernel(
    kernel: Any,
    source: Source,
    needs: Sequence[bool],
    diagonal: Tensor | None,
    largest: Sequence[Tensor | None],
    *args: Any,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """The source's gradient from that which a kernel writes of each block, and from the diagonal's."""
    gradient = Gradient(source, needs, diagonal, largest)
    for block in gradient.blocks():
        out = gradient.of(block)
        launch(kernel, block, out, *args, **flags)
        gradient.add(block, out)
    return gradient.finish()


# ------------------------------------------------------------------------------------------------ log-sum-exp


def logsumexp(source: Source, scale: Tensor, asked: Asked, masked: bool, extra: int) -> tuple[softmax.Sums, Tensor]:
    """See :func:`itrloss.engines.softmax.logsumexp`."""
    figures, scales = {0: 2, softmax.MEAN: 3, softmax.ENTROPY: 4}[extra], apart(scale, source.shape[0], asked)
    sides = Sides.full(source, [figures * a for a in asked], 0.0)
    for sums in sides.sums:
        if sums is not None:
            sums[0] = -math.inf
    for block in blocks(source, large=True):
        _add_softmax_sums(block, sides, scales, masked, extra)
    top, total, *others = joined([x for x in sides.sums if x is not None])
    figure, share = (*others, None, None)[:2]
    stats = softmax.Stats(top, total.clone(), figure, share)  # results may not share their memory
    return softmax.close(stats, None), diagonal_of(source, softmax.carries_diagonal(source, masked, extra))


def diagonal_of(source: Source, wanted: bool) -> Tensor:
    """(N,) scores of row i with column i; empty unless they are wanted."""
    return aligned_scores(source) if wanted else torch.empty(0, dtype=torch.float32, device=source.rows.device)


def _add_softmax_sums(block: Scores, sides: Sides, scales: Pair, masked: bool, extra: int) -> None:
    found = sides.found(block)
    flags = one(row_scale=scales[0], col_scale=scales[1]) | {"MASKED": masked, "EXTRA": extra}
    launch(along.softmax_sums, block, *found, *scales, **flags)
    for sums, new in sides.parts(block, found):
        _put_together(sums, new, extra, binary=False)


def _put_together(sums: Tensor, new: Tensor, extra: int, binary: bool) -> None:
    _, tiles, anchors = new.shape
    add: Any = along.add_softmax_sums
    with torch.cuda.device_of(new):
        add[(-(-anchors // 32),)](
            new, tiles, anchors, sums, sums.stride(0), EXTRA=extra, BINARY=binary, ANCHORS=32, TILES=32, **EXACT
        )


def _most(x: Tensor) -> Tensor | None:
    """The largest of numbers that are not negative, and finite: nan spoils the gradient of its own anchor alone."""
    return x.nan_to_num(0.0, 0.0).amax() if x.numel() else None


def logsumexp_backward(
    source: Source,
    scale: Tensor,
    asked: Asked,
    sums: softmax.Sums,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    masked: bool,
    extra: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.softmax.logsumexp_backward`."""
    grad, figure_grad, diagonal_grad = grads
    scales, vectors = apart(scale, source.shape[0], asked), (None, None)
    largest: list[Tensor | None] = []
    if not (grad is None and figure_grad is None):
        const = softmax.constant(scale, sums, grad)
        factors = [const, torch.zeros_like(const), const] if extra == softmax.ENTROPY else [const]
        if figure_grad is not None:
            factors = softmax.entropy_factors(const, scale, sums, figure_grad[0])
        both = torch.stack([softmax.finite(sums.top), *factors])
        # e and |e log e| are at most 1. Where nothing counts, the factors are those of a sum of nearly nothing.
        most = both[1:].abs().sum(0).masked_fill(sums.total == 0, 0.0)
        vectors = apart(both, source.shape[0], asked)
        largest = [None if x is None else _most(x) for x in apart(most, source.shape[0], asked)]
    given = [y for x in zip(vectors, source.shape, scales, strict=True) for y in x]
    flags = one(row_scale=scales[0], col_scale=scales[1])
    flags |= {"MASKED": masked, "ENTROPIC": extra == softmax.ENTROPY}
    return _by_kernel(gradients.softmax_gradient, source, needs, diagonal_grad, largest, *given, **flags)


def sums_and_products(
    source: Source, scale: Tensor, masked: bool, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`itrloss.engines.softmax.sums_and_products`."""
    sides = Sides.full(source, (2, 0), 0.0)
    sums, cols = sides.sums[0], source.cols
    assert sums is not None and cols is not None
    top, total = sums
    top.fill_(-math.inf)
    if not wanted:
        for block in blocks(source, large=True):
            _add_softmax_sums(block, sides, (scale, None), masked, 0)
        return total.clone(), softmax.finite(top), None
    products = torch.zeros(source.rows.shape, dtype=torch.float32, device=source.rows.device)
    gradient = Gradient(source, (False, False))
    if half(source) and source.col_inv is None:
        gradient.dtype = source.rows.dtype
    least, most = _REACH[gradient.dtype]
    flags = one(scale=scale) | {"MASKED": masked, "LEAST": least, "MOST": most}
    for block in blocks(source):
        rows, out = slice(block.start_r, block.start_r + block.size_r), gradient.of(block)
        found, before = sides.found(block)[0], top[rows].clone()
        assert found is not None
        launch(gradients.exponentials, block, out, found, top, scale, **flags)
        _put_together(sums[:, rows], found, 0, binary=True)
        _rescale(products[rows], before[None], top[rows])
        cut = cut_of(block)
        _rescale(out, found[0], top[rows], cut.cols // cut.parts)
        add_product(products[rows], out.to(gradient.dtype), cols[block.start_c : block.start_c + block.size_c])
    return total.clone(), softmax.finite(top).mul_(math.log(2)), products


def _rescale(x: Tensor, old: Tensor, new: Tensor, width: int = 64) -> None:
    """Numbers (rows, columns) over 2^old as such over 2^new; ``old`` (tiles, rows) is of ``width`` columns, or all."""
    n, rescale = len(x), cast(Any, gradients.rescale)
    with torch.cuda.device_of(x):
        rescale[(-(-x.shape[1] // width), -(-n // 32))](  # of the second, GPUs have no more than 65535
            x, n, x.shape[1], old, n if len(old) > 1 else 0, new, R=32, C=width, **EXACT
        )


# ---------------------------------------------------------------------------------------------------- moments


def moments(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.moments.moments`."""
    centres = by_torch.centres(source, asked)
    sides = Sides.full(source, [2 * a for a in asked], 0.0)
    for block in blocks(source, large=True):
        found = sides.found(block)
        launch(along.moment_sums, block, *found, *centres)
        sides.add(block, found)
    first, second = ([None if x is None else x[figure] for x in sides.sums] for figure in (0, 1))
    counts = by_torch.negative_counts(Positives.of(source), asked)
    closed = by_torch.close(centres, counts, first, second)
    return closed.mean, closed.variance


def moments_backward(
    source: Source, parts: Sequence[tuple[Tensor, Tensor] | None], needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """``dS = constant + slope S``, of each side, over the negatives."""
    given, largest = [], []
    for part, size in zip(parts, source.shape, strict=True):
        given += [None if part is None else torch.stack(part), size]
        if part is not None and source.row_inv is not None:  # else scores may have any size
            largest.append(_most(part[0].abs() + 1.01 * part[1].abs()))
    return _by_kernel(gradients.affine_gradient, source, needs, None, largest, *given)


# --------------------------------------------------------------------------------------- hardest, margins, terms


def hardest(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, ...]:
    """See :func:`itrloss.engines.pairs.hardest`."""
    best, where = Sides.full(source, asked, -math.inf), Sides.full(source, asked, -1, torch.int64)
    for block in blocks(source, large=True):
        values, places = best.found(block), where.found(block, torch.int32)
        launch(along.hardest_negatives, block, *values, *places)
        both = zip(best.parts(block, values), where.parts(block, places), strict=True)
        for (best_so_far, value), (index, place) in both:
            highest = value.amax(1)
            missed = (value != highest[:, None]) & ~value.isnan()
            first = place.masked_fill_(missed, torch.iinfo(torch.int32).max).amin(1)
            index.copy_(torch.where((highest > best_so_far) | (highest.isnan() & ~best_so_far.isnan()), first, index))
            best_so_far.copy_(torch.maximum(highest, best_so_far))
    empty = torch.empty(0, dtype=torch.float32, device=source.rows.device)
    found = [empty if x is None else x[0] for x in best.sums]
    return *found, *[empty.to(torch.int64) if x is None else x[0] for x in where.sums]


def violations(source: Source, margin: float, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.violations.violations`."""
    tables = [None if x is None else x.thresholds for x in seen_from(source, margin, asked)]
    sums = [None if x is None else torch.zeros_like(x) for x in tables]
    for block in blocks(source, formed=True):
        _count(source, block, tables, sums, along.SUM)
    empty = torch.empty(0, dtype=torch.float32, device=source.rows.device)
    rows, cols = [empty if x is None else x.sum(0) for x in sums]
    return rows, cols


def _count(
    source: Source,
    block: Scores,
    thresholds: Sequence[Tensor | None],
    into: Sequence[Tensor | None],
    what: Any,
    biases: Pair = (None, None),
) -> None:
    """Add to (slots, anchors) how many negatives are above each threshold, or by how much."""
    most = max([0, *(len(x) for x in thresholds if x is not None)])
    for first in range(0, most, _SLOTS):
        some, sums = (
            [None if x is None or first >= len(x) else x[first : first + _SLOTS] for x in given]
            for given in (thresholds, into)
        )
        sides = Sides(*sums)
        found = sides.found(block, torch.float32 if what is along.SUM else torch.int32)
        slots = [0 if x is None else len(x) for x in some]
        launch(along.threshold_sums, block, *found, *some, *slots, *source.shape, *biases, WHAT=what.value)
        sides.add(block, found)


def violations_backward(source: Source, margin: float, grads: Pair, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.violations.violations_backward`."""
    found = seen_from(source, margin, (grads[0] is not None, grads[1] is not None))
    tables = [None if x is None else x.thresholds for x in found]
    active = [None if x is None else torch.zeros_like(x) for x in tables]
    given = []
    for table, grad, size in zip(tables, grads, source.shape, strict=True):
        given += [table, 0 if table is None else len(table), grad, size]
    largest = [None if g is None or t is None else _most(g.abs() * len(t)) for t, g in zip(tables, grads, strict=True)]
    gradient = Gradient(source, needs, largest=largest)
    for block in gradient.blocks(formed=True):
        if gradient.turn == gradient.turns[0]:
            _count(source, block, tables, active, along.COUNT)
        out = gradient.of(block)
        launch(gradients.violation_gradient, block, out, *given)
        gradient.add(block, out)
    rows, cols = gradient.finish()
    return pushed_up(source, found, active, grads, needs, rows, cols)


def softplus_sums(
    source: Source, params: tuple[list[Tensor], list[Tensor]], asked: tuple[bool, bool], slopes: bool = False
) -> tuple[list[Any], list[Any]]:
    """Of each asked side ``sum_j log(1 + exp(a S_ij + b))`` over the negatives.

    With ``slopes`` two sums instead, which times the upstream gradient are the parameters' gradients.
    """
    sides = Sides.full(source, [(1 + slopes) * a for a in asked], 0.0)
    (a, b), (c, d) = [x if ask else (None, None) for x, ask in zip(params, asked, strict=True)]
    flags = one(row_scale=a, row_bias=b, col_scale=c, col_bias=d) | {"SLOPES": slopes}
    for block in blocks(source, large=True):
        found = sides.found(block)
        launch(along.softplus_sums, block, *found, a, b, c, d, **flags)
        sides.add(block, found)
    first, second = ([None if x is None else x[i] for x in sides.sums] for i in (0, int(slopes)))
    return first, second


def softplus_sums_backward(
    source: Source,
    params: tuple[list[Tensor], list[Tensor]],
    grads: Pair,
    diagonal_grad: Tensor | None,
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
    largest = [None if g is None else _most((params[side][0] * g).abs()) for side, g in enumerate(grads)]
    return (*_by_kernel(gradients.softplus_gradient, source, needs, diagonal_grad, largest, *given), *by_params)


def takes_positives(source: Source, term: str) -> bool:
    """Whether there are kernels for the positives of such a source."""
    named = source.cols is not None and source.row_ids is not None
    return named and term in of_positives.TERMS and source.rows.shape[1] <= _LONGEST


def _positives_of(source: Source, side: int) -> list[Any]:
    """Of the anchors of one side: embeddings, where their positives are, what a launch has to know of them."""
    assert source.cols is not None
    pairs = [(by_rows(x), inv) for x, inv in zip((source.rows, source.cols), inverses(source), strict=True)]
    (own, own_inv), (other, other_inv) = pairs[:: 1 - 2 * side]
    found = Positives.of(source)
    strides = own.stride(0), other.stride(0), own.shape[1]
    return [own, other, *packed(own_inv, other_inv), *strides, *(found.T if side else found).ranges()]


def _of_term(term: str, width: int) -> dict[str, Any]:
    return {"TERM": of_positives.TERMS.index(term), "D": triton.next_power_of_2(width)}


def positive_sums(
    source: Source, term: str, params: tuple[list[Tensor], list[Tensor]], asked: tuple[bool, bool]
) -> list[Tensor | None]:
    """Of each asked side the sums of a term over the positives."""
    sums = [_zeros(source, size) if a else None for size, a in zip(source.shape, asked, strict=True)]
    for side, out in enumerate(sums):
        if out is not None and out.numel():
            p, q = _two(params[side])
            given = *_positives_of(source, side), p, q, out
            _per_anchor(of_positives.positive_sums, given, **one(p=p, q=q), **_of_term(term, source.rows.shape[1]))
    return sums


def positive_sums_backward(
    source: Source,
    term: str,
    params: tuple[list[Tensor], list[Tensor]],
    grads: Pair,
    needs: tuple[bool, bool],
    needs_params: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """See :func:`itrloss.engines.pairs.term_sums_backward`."""
    found, by_params = [], []
    grads = tuple(None if g is None else g.contiguous() for g in grads)  # type: ignore[assignment]
    for side, x in enumerate((source.rows, source.cols)):
        assert x is not None
        dtype = torch.float32 if INTERPRETED else x.dtype
        out = torch.zeros(x.shape, dtype=dtype, device=x.device) if needs[side] else None
        of_params = [_zeros(source, len(x)) if needs_params else None for _ in params[side]]
        (a, b), (c, d) = _two(params[side]), _two(params[1 - side])
        if len(x) and (out is not None or any(of is not None for of in of_params)):
            given = *_positives_of(source, side), a, b, grads[side], c, d, grads[1 - side], out, *_two(of_params)
            flags = one(own_p=a, own_q=b, other_p=c, other_q=d) | _of_term(term, x.shape[1])
            _per_anchor(of_positives.positive_gradient, given, **flags)
        found.append(x.new_empty(0) if out is None else out.to(x.dtype))
        by_params.append([
            torch.zeros_like(p) if of is None else of.sum().reshape(1) if p.numel() == 1 else of
            for p, of in zip(params[side], of_params, strict=True)
        ])  # fmt: skip
    return found[0], found[1], by_params[0], by_params[1]


def _two(given: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    first, second = (*packed(*given), None, None)[:2]
    return first, second


def _zeros(source: Source, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device=source.rows.device)


def _per_anchor(kernel: Any, given: Sequence[Any], **flags: Any) -> None:
    own = given[0]
    with torch.cuda.device_of(own):
        kernel[(len(own),)](*given, **flags, **EXACT)


def ranks_counted(
    source: Source, tables: Sequence[Tensor | None], biases: Pair, optimistic: bool
) -> list[Tensor | None]:
    """(slots, anchors) int64: how many negatives rank ahead of each positive."""
    counts = [None if t is None else torch.zeros_like(t, dtype=torch.int64) for t in tables]
    for block in blocks(source, formed=True):
        _count(source, block, tables, counts, along.COUNT if optimistic else along.COUNT_TIES, biases)
    return counts
