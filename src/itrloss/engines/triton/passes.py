"""The passes of the other engines, with the work on each block of scores in one kernel.

Embeddings of half precision are multiplied by that kernel itself, as they came and with float32 sums; others by a
matrix product before, into a workspace. The gradient of a block is rounded to bfloat16 if the embeddings are bfloat16,
and goes into float32 sums by two more products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import moments as by_torch
from .. import softmax
from ..positives import Positives
from ..tiles import Pair, Source, Tile, at_a_time, tile_shape, unit
from ..violations import pushed_up, seen_from
from . import gradients
from . import positives as of_positives
from . import sums as along
from .scores import Scores


class Cut(NamedTuple):
    """How a block is cut into tiles, one for a program."""

    rows: int
    cols: int
    dims: int = 0  # of the embeddings that a program multiplies at a time
    parts: int = 1  # in which the columns of a tile are worked on
    warps: int = 8
    stages: int = 3  # of loads that are under way meanwhile

    @property
    def memory(self) -> int:
        """Shared memory that the loads need, in bytes."""
        return 2 * self.stages * (self.rows + self.cols) * self.dims

    def grid(self, block: Scores) -> tuple[int, int]:
        """Tiles above each other, and beside each other."""
        return -(-block.size_r // self.rows), -(-block.size_c // self.cols)

    def options(self) -> dict[str, int]:
        """Of a launch."""
        sizes = {"R": self.rows, "C": self.cols, "K": self.dims, "PARTS": self.parts}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


_INTERPRETED = not isinstance(along.softmax_sums, triton.JITFunction)
FUSED = True  # whether kernels multiply embeddings of half precision themselves; False: a product before does it
# Chosen by what Triton's compiler makes of them: as large as their values fit into the registers of a thread.
MULTIPLYING = Cut(128, 256, 64, 4, stages=4), Cut(128, 128, 64, 4), Cut(64, 64, 64, warps=4)
READING = Cut(64, 128)
_BLOCK = 2**28  # scores, the figures of whose tiles are held until they are added up
_LONGEST = 2**13  # embedding that one program holds
_SLOTS = 32  # thresholds of an anchor that one kernel looks at


def blocks(source: Source, formed: bool = False, numel: int | None = None) -> Iterator[Scores]:
    """All of them; one after the other in the same memory if their products have to be ``formed``.

    Kernels that multiply themselves may have larger blocks, of ``numel`` scores.
    """
    n, m = source.shape
    if 0 in (n, m):
        return
    vectors = _packed(*_inverses(source), source.row_ids, source.col_ids)
    if source.cols is None:
        matrix, step = source.rows.contiguous(), max(1, _BLOCK // m)
        for r0 in range(0, n, step):
            part = matrix[r0 : r0 + step]
            yield Scores(part, None, None, m, 0, 0, 0, len(part), m, r0, 0, *vectors)
        return
    if FUSED and _half(source) and not formed:
        rows, cols = _by_rows(source.rows), _by_rows(source.cols)
        if _INTERPRETED:  # which cannot multiply bfloat16
            rows, cols = rows.float(), cols.float()
        given = rows, cols, 0, rows.stride(0), cols.stride(0), rows.shape[1]
        step_r, step_c = tile_shape(source, numel)
        for c0, r0 in _starts(n, m, step_r, step_c):
            size = min(step_r, n - r0), min(step_c, m - c0)
            yield Scores(None, *given, *size, r0, c0, *vectors)
        return
    step_r, step_c = tile_shape(source)
    space = torch.empty(step_r * step_c, dtype=torch.float32, device=source.rows.device)
    for c0, r0 in _starts(n, m, step_r, step_c):
        rows, cols = source.rows[r0 : r0 + step_r], source.cols[c0 : c0 + step_c]
        out = space[: len(rows) * len(cols)].view(len(rows), len(cols))
        if _half(source) and rows.is_cuda:
            torch.mm(rows, cols.T, out_dtype=torch.float32, out=out)
        else:
            torch.mm(rows.float(), cols.float().T, out=out)
        yield Scores(out, None, None, len(cols), 0, 0, 0, len(rows), len(cols), r0, c0, *vectors)


def _starts(n: int, m: int, step_r: int, step_c: int) -> Iterator[tuple[int, int]]:
    return ((c0, r0) for c0 in range(0, m, step_c) for r0 in range(0, n, step_r))


def as_tiles(source: Source, scratch: int) -> Iterator[Tile]:
    """For what has no kernel: the very scores that the kernels of thresholds see."""
    for block in blocks(source, formed=True):
        x, r0, c0 = block.products, block.start_r, block.start_c
        r1, c1 = r0 + block.size_r, c0 + block.size_c
        left, right = _inverses(source)
        if left is not None:
            x.mul_(left[r0:r1, None] if right is None else left[r0:r1, None] * right[c0:c1])
        yield Tile(r0, r1, c0, c1, x, [torch.empty_like(x) for _ in range(scratch)], x.shape == source.shape)


def _half(source: Source) -> bool:
    """Whether products may be of half precision as they are."""
    return source.cols is not None and source.rows.dtype == source.cols.dtype != torch.float32


def _inverses(source: Source) -> Pair:
    return (None, None) if source.cols is None else (source.row_inv, source.col_inv)


def _cut(block: Scores) -> Cut:
    """Of the multiplying ones the largest that fits into the GPU and has work for all of it."""
    if block.products is not None:
        return READING
    if block.rows.is_cuda:
        gpu = torch.cuda.get_device_properties(block.rows.device)
        for cut in MULTIPLYING:
            tiles = math.prod(cut.grid(block))
            if cut.memory <= gpu.shared_memory_per_block_optin and tiles >= gpu.multi_processor_count:
                return cut
    return MULTIPLYING[-1]


def _launch(kernel: Any, block: Scores, *args: Any, **flags: Any) -> None:
    """A program for each tile of a block."""
    cut = _cut(block)
    with torch.cuda.device_of(block.rows if block.products is None else block.products):  # Triton takes the current one
        kernel[(math.prod(cut.grid(block)),)](block, *_packed(*args), **flags, **cut.options())


def _packed(*given: Any) -> list[Any]:
    """Kernels read vectors one value after the other."""
    return [x.contiguous() if isinstance(x, Tensor) else x for x in given]


def _by_rows(x: Tensor) -> Tensor:
    """Embeddings whose numbers follow each other."""
    return x if x.stride(1) == 1 else x.contiguous()


def _one(**vectors: Tensor | None) -> dict[str, bool]:
    """Flags of a launch: whose vector is one value for all."""
    return {f"ONE_{name.upper()}": x is not None and x.numel() == 1 for name, x in vectors.items()}


class Sides:
    """Figures of the anchors of both sides, (figures, anchors); None for a side that is not asked."""

    def __init__(self, rows: Tensor | None, cols: Tensor | None):
        self.sums = rows, cols

    @classmethod
    def full(cls, source: Source, figures: Sequence[int], value: float, dtype: torch.dtype = torch.float32) -> Sides:
        """As they begin; no figures for a side that is not asked."""
        device, made = source.rows.device, zip(figures, source.shape, strict=True)
        return cls(*[torch.full((int(f), size), value, dtype=dtype, device=device) if f else None for f, size in made])

    def found(self, block: Scores, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
        """Where the tiles of a block leave their figures: (figures, tiles, anchors)."""
        cut = _cut(block)
        high, wide = cut.grid(block)
        shapes = (wide * cut.parts, block.size_r), (high, block.size_c)
        each = zip(self.sums, shapes, strict=True)
        return [None if x is None else torch.empty(len(x), *shape, dtype=dtype, device=x.device) for x, shape in each]

    def parts(self, block: Scores, found: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each side that is asked: the figures of the block's anchors, and what its tiles found."""
        places = (block.start_r, block.size_r), (block.start_c, block.size_c)
        for sums, new, (start, size) in zip(self.sums, found, places, strict=True):
            if sums is not None and new is not None:
                yield sums[:, start : start + size], new

    def add(self, block: Scores, found: Sequence[Tensor | None]) -> None:
        """In the order of the tiles."""
        for sums, new in self.parts(block, found):
            sums += new.sum(1)


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
        self.dtype = torch.bfloat16 if _half(source) and source.rows.dtype == torch.bfloat16 else torch.float32

    def of(self, block: Scores) -> Tensor:
        """Where to write the gradient of this block; that may be over its products."""
        if self.matrix is not None:
            return self.matrix[block.start_r : block.start_r + block.size_r]
        if block.products is not None and self.dtype == torch.float32:
            return block.products
        numel = block.size_r * block.size_c
        if self.space is None:  # the first block is the largest
            self.space = torch.empty(numel, dtype=self.dtype, device=self.source.rows.device)
        return self.space[:numel].view(block.size_r, block.size_c)

    def add(self, block: Scores, grad: Tensor) -> None:
        """Account for what was just written."""
        s = self.source
        if s.cols is None:
            return
        (n, m), (rows, cols) = grad.shape, self.sums
        if rows is not None:
            _add_product(rows[block.start_r : block.start_r + n], grad, s.cols[block.start_c : block.start_c + m])
        if cols is not None:
            _add_product(cols[block.start_c : block.start_c + m], grad.T, s.rows[block.start_r : block.start_r + n])

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
                step = at_a_time(x)
                for g, v, i in zip(grad.split(step), x.split(step), inv.split(step), strict=True):
                    u = unit(v, i)
                    g.addcmul_(u, (u * g).sum(1, keepdim=True), value=-1)
            found.append(grad.to(x.dtype))
        return found[0], found[1]


def _add_product(total: Tensor, grad: Tensor, other: Tensor) -> None:
    if grad.dtype != torch.float32 and grad.is_cuda:
        torch.addmm(total, grad, other, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(grad.float(), other.float())


def _by_kernel(kernel: Any, source: Source, needs: Sequence[bool], *args: Any, **flags: Any) -> tuple[Tensor, Tensor]:
    """The source's gradient from that which a kernel writes of each block."""
    gradient = Gradient(source, needs)
    for block in blocks(source):
        out = gradient.of(block)
        _launch(kernel, block, out, *args, **flags)
        gradient.add(block, out)
    return gradient.finish()


# ------------------------------------------------------------------------------------------------ log-sum-exp


def logsumexp(source: Source, scales: Pair, masked: bool, extra: int) -> tuple[softmax.Sums, softmax.Sums, Tensor]:
    """See :func:`itrloss.engines.softmax.logsumexp`."""
    figures = {0: 2, softmax.MEAN: 3, softmax.ENTROPY: 4}[extra]
    sides = Sides.full(source, [0 if scale is None else figures for scale in scales], 0.0)
    for sums in sides.sums:
        if sums is not None:
            sums[0] = -math.inf
    for block in blocks(source, numel=_BLOCK):
        _add_softmax_sums(block, sides, scales, masked, extra)
    found = []
    for sums in sides.sums:
        stats = None
        if sums is not None:
            top, total, *others = sums
            figure, share = (*others, None, None)[:2]
            stats = softmax.Stats(top, total.clone(), figure, share)  # results may not share their memory
        found.append(softmax.close(stats, source, None))
    return *found, torch.empty(0, dtype=torch.float32, device=source.rows.device)


def _add_softmax_sums(block: Scores, sides: Sides, scales: Pair, masked: bool, extra: int) -> None:
    found = sides.found(block)
    flags = _one(row_scale=scales[0], col_scale=scales[1]) | {"MASKED": masked, "EXTRA": extra}
    _launch(along.softmax_sums, block, *found, *scales, **flags)
    add: Any = along.add_softmax_sums
    for sums, new in sides.parts(block, found):
        _, tiles, anchors = new.shape
        with torch.cuda.device_of(new):
            add[(-(-anchors // 32),)](new, tiles, anchors, sums, sums.stride(0), EXTRA=extra, ANCHORS=32, TILES=32)


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
    given = []
    for side, (scale, x, g, h) in enumerate(zip(scales, sums, grads, entropy_grads, strict=True)):
        vectors = None
        if scale is not None and x is not None and not (g is None and h is None):
            const = softmax.constant(scale, x, g)
            factors = [const, torch.zeros_like(const), const] if extra == softmax.ENTROPY else [const]
            if h is not None:
                factors = softmax.entropy_factors(const, scale, x, h[0])
            vectors = torch.stack([softmax.finite(x.top), *factors])
        given += [vectors, source.shape[side], scale]
    flags = _one(row_scale=scales[0], col_scale=scales[1])
    flags |= {"MASKED": masked, "ENTROPIC": extra == softmax.ENTROPY}
    return _by_kernel(gradients.softmax_gradient, source, needs, *given, **flags)


def sums_and_products(
    source: Source, scale: Tensor, masked: bool, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`itrloss.engines.softmax.sums_and_products`."""
    cols = source.cols
    assert cols is not None
    sides = Sides.full(source, (2, 0), 0.0)
    (sums, _), products = sides.sums, torch.zeros_like(source.rows, dtype=torch.float32) if wanted else None
    assert sums is not None
    top, total = sums
    top.fill_(-math.inf)
    gradient = Gradient(source, (False, False))
    flags = _one(scale=scale) | {"MASKED": masked}
    for block in blocks(source, formed=True):
        before = top.clone()
        _add_softmax_sums(block, sides, (scale, None), masked, 0)
        if products is not None:
            rows, base, out = (
                slice(block.start_r, block.start_r + block.size_r),
                softmax.finite(top),
                gradient.of(block),
            )
            products[rows] *= (before - base).exp()[rows, None]
            _launch(gradients.exponentials, block, out, base, scale, **flags)
            _add_product(products[rows], out, cols[block.start_c : block.start_c + block.size_c])
    return total.clone(), softmax.finite(top), products


# ---------------------------------------------------------------------------------------------------- moments


def moments(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.moments.moments`."""
    centres = by_torch.centres(source, asked)
    sides = Sides.full(source, [2 * a for a in asked], 0.0)
    for block in blocks(source, numel=_BLOCK):
        found = sides.found(block)
        _launch(along.moment_sums, block, *found, *centres)
        sides.add(block, found)
    first, second = ([None if x is None else x[figure] for x in sides.sums] for figure in (0, 1))
    counts = by_torch.negative_counts(Positives.of(source), asked)
    closed = by_torch.close(centres, counts, first, second)
    return closed.mean, closed.variance


def moments_backward(
    source: Source, parts: Sequence[tuple[Tensor, Tensor] | None], needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """``dS = constant + slope S``, of each side, over the negatives."""
    given = []
    for part, size in zip(parts, source.shape, strict=True):
        given += [None if part is None else torch.stack(part), size]
    return _by_kernel(gradients.affine_gradient, source, needs, *given)


# --------------------------------------------------------------------------------------- hardest, margins, terms


def hardest(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, ...]:
    """See :func:`itrloss.engines.pairs.hardest`."""
    best, where = Sides.full(source, asked, -math.inf), Sides.full(source, asked, -1, torch.int64)
    for block in blocks(source, numel=_BLOCK):
        values, places = best.found(block), where.found(block, torch.int32)
        _launch(along.hardest_negatives, block, *values, *places)
        both = zip(best.parts(block, values), where.parts(block, places), strict=True)
        for (sums, value), (index, place) in both:
            highest = value.amax(1)
            first = place.masked_fill_(value != highest[:, None], torch.iinfo(torch.int32).max).amin(1)
            index.copy_(torch.where(highest > sums, first, index))
            sums.copy_(torch.maximum(highest, sums))
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
        _launch(along.threshold_sums, block, *found, *some, *slots, *source.shape, *biases, WHAT=what.value)
        sides.add(block, found)


def violations_backward(source: Source, margin: float, grads: Pair, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """See :func:`itrloss.engines.violations.violations_backward`."""
    found = seen_from(source, margin, (grads[0] is not None, grads[1] is not None))
    tables = [None if x is None else x.thresholds for x in found]
    active = [None if x is None else torch.zeros_like(x) for x in tables]
    given = []
    for table, grad, size in zip(tables, grads, source.shape, strict=True):
        given += [table, 0 if table is None else len(table), grad, size]
    gradient = Gradient(source, needs)
    for block in blocks(source, formed=True):
        _count(source, block, tables, active, along.COUNT)
        out = gradient.of(block)
        _launch(gradients.violation_gradient, block, out, *given)
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
    flags = _one(row_scale=a, row_bias=b, col_scale=c, col_bias=d) | {"SLOPES": slopes}
    for block in blocks(source, numel=_BLOCK):
        found = sides.found(block)
        _launch(along.softplus_sums, block, *found, a, b, c, d, **flags)
        sides.add(block, found)
    first, second = ([None if x is None else x[i] for x in sides.sums] for i in (0, slopes))
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
    return (*_by_kernel(gradients.softplus_gradient, source, needs, *given), *by_params)


def takes_positives(source: Source, term: str) -> bool:
    """Whether there are kernels for the positives of such a source."""
    named = source.cols is not None and source.row_ids is not None
    return named and term in of_positives.TERMS and source.rows.shape[1] <= _LONGEST


def _positives_of(source: Source, side: int) -> list[Any]:
    """Of the anchors of one side: embeddings, where their positives are, what a launch has to know of them."""
    assert source.cols is not None
    pairs = [(_by_rows(x), inv) for x, inv in zip((source.rows, source.cols), _inverses(source), strict=True)]
    (own, own_inv), (other, other_inv) = pairs[:: 1 - 2 * side]
    found = Positives.of(source)
    strides = own.stride(0), other.stride(0), own.shape[1]
    return [own, other, *_packed(own_inv, other_inv), *strides, *(found.T if side else found).ranges()]


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
            _per_anchor(of_positives.positive_sums, given, **_one(p=p, q=q), **_of_term(term, source.rows.shape[1]))
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
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if needs[side] else None
        of_params = [_zeros(source, len(x)) if needs_params else None for _ in params[side]]
        (a, b), (c, d) = _two(params[side]), _two(params[1 - side])
        if len(x) and (out is not None or any(of is not None for of in of_params)):
            given = *_positives_of(source, side), a, b, grads[side], c, d, grads[1 - side], out, *_two(of_params)
            flags = _one(own_p=a, own_q=b, other_p=c, other_q=d) | _of_term(term, x.shape[1])
            _per_anchor(of_positives.positive_gradient, given, **flags)
        found.append(x.new_empty(0) if out is None else out)
        by_params.append([
            torch.zeros_like(p) if of is None else of.sum().reshape(1) if p.numel() == 1 else of
            for p, of in zip(params[side], of_params, strict=True)
        ])  # fmt: skip
    return found[0], found[1], by_params[0], by_params[1]


def _two(given: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    first, second = (*_packed(*given), None, None)[:2]
    return first, second


def _zeros(source: Source, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device=source.rows.device)


def _per_anchor(kernel: Any, given: Sequence[Any], **flags: Any) -> None:
    own = given[0]
    with torch.cuda.device_of(own):
        kernel[(len(own),)](*given, **flags)


def ranks_counted(
    source: Source, tables: Sequence[Tensor | None], biases: Pair, optimistic: bool
) -> list[Tensor | None]:
    """(slots, anchors) int64: how many negatives rank ahead of each positive."""
    counts = [None if t is None else torch.zeros_like(t, dtype=torch.int64) for t in tables]
    for block in blocks(source, formed=True):
        _count(source, block, tables, counts, along.COUNT if optimistic else along.COUNT_TIES, biases)
    return counts
