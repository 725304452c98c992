"""Blocks of scores: how they are cut for the kernels, what is held of them, and where their gradients go.

Embeddings of half precision are multiplied by the kernels themselves, as they came and with float32 sums; others by a
matrix product before, into a workspace. The gradient of a block is rounded to half precision if the embeddings are of
it, and goes into float32 sums by two more products.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..tiles import Pair, Source, Tile, at_a_time, spans, tile_shape, unit
from .scores import Scores
from .sums import softmax_sums

# ``a b - c`` is rounded twice everywhere: what one kernel, or PyTorch, finds equal, another must not find larger.
EXACT = {"enable_fp_fusion": False}


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
        return sizes | EXACT | {"num_warps": self.warps, "num_stages": self.stages}


# The interpreter cannot multiply bfloat16, and rounds to it towards zero: it computes in float32.
INTERPRETED = not isinstance(softmax_sums, triton.JITFunction)
FUSED = True  # whether kernels multiply embeddings of half precision themselves; False: a product before does it
# By what Triton's compiler makes of them: the values of a thread fit into its registers, and two programs into a
# processor of an H100, so that one multiplies while the other adds up.
MULTIPLYING = Cut(128, 128, 64, 4, warps=4), Cut(64, 64, 64, warps=4)
READING = Cut(64, 64)
_HELD = 2**25  # float32 sums of a gradient, beside a panel's: 128 MiB
_BLOCK = 2**28  # scores, the figures of whose tiles are held until they are added up


def blocks(source: Source, formed: bool = False, large: bool = False, by_cols: bool = False) -> Iterator[Scores]:
    """All of them, the rows' side by side, or the columns' one below the other.

    They are in the same memory, one after the other, if their products have to be ``formed``. Kernels that multiply
    themselves may have ``large`` ones.
    """
    n, m = source.shape
    if 0 in (n, m):
        return
    vectors = packed(*inverses(source), source.row_ids, source.col_ids)
    if source.cols is None:
        matrix, step = source.rows.contiguous(), max(1, _BLOCK // m)
        for r0 in range(0, n, step):
            part = matrix[r0 : r0 + step]
            yield Scores(part, None, None, m, 0, 0, 0, len(part), m, r0, 0, *vectors)
        return
    if FUSED and not formed and half(source) and multiplies(source.rows.device):
        rows, cols = _aligned(source.rows), _aligned(source.cols)
        if INTERPRETED:
            rows, cols = rows.float(), cols.float()
        given = rows, cols, 0, rows.stride(0), cols.stride(0), rows.shape[1]
        step_r, step_c = tile_shape(source, _BLOCK if large else None)
        for (r0, r1), (c0, c1) in _in_order(_steps(n, step_r), _steps(m, step_c), by_cols):
            yield Scores(None, *given, r1 - r0, c1 - c0, r0, c0, *vectors)
        return
    step_r, step_c = tile_shape(source)
    space = torch.empty(step_r * step_c, dtype=torch.float32, device=source.rows.device)
    for (r0, r1), (c0, c1) in _in_order(spans(n, step_r), spans(m, step_c), by_cols):
        shape = r1 - r0, c1 - c0
        out = space[: math.prod(shape)].view(shape)
        _multiply(source.rows[r0:r1], source.cols[c0:c1], out)
        yield Scores(out, None, None, shape[1], 0, 0, 0, *shape, r0, c0, *vectors)


Span = tuple[int, int]


def _in_order(rows: Sequence[Span], cols: Sequence[Span], by_cols: bool) -> Iterator[tuple[Span, Span]]:
    return ((r, c) for c in cols for r in rows) if by_cols else ((r, c) for r in rows for c in cols)


def _steps(size: int, step: int) -> list[Span]:
    """Whole tiles but for the last: what a kernel multiplies rounds in the same way everywhere."""
    return [(start, min(size, start + step)) for start in range(0, size, step)]


def _multiply(rows: Tensor, cols: Tensor, out: Tensor) -> None:
    if rows.is_cuda and rows.dtype == cols.dtype != torch.float32:
        with _float32_sums():
            torch.mm(rows, cols.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(rows.float(), cols.float().T, out=out)


def as_tiles(source: Source, scratch: int) -> Iterator[Tile]:
    """For what has no kernel: the very scores that the kernels of thresholds see."""
    for block in blocks(source, formed=True):
        x, r0, c0 = block.products, block.start_r, block.start_c
        r1, c1 = r0 + block.size_r, c0 + block.size_c
        left, right = inverses(source)
        if left is not None:
            x.mul_(left[r0:r1, None] if right is None else left[r0:r1, None] * right[c0:c1])
        yield Tile(r0, r1, c0, c1, x, [torch.empty_like(x) for _ in range(scratch)], x.shape == source.shape)


def half(source: Source) -> bool:
    """Whether products may be of half precision as they are."""
    return source.cols is not None and source.rows.dtype == source.cols.dtype != torch.float32


def inverses(source: Source) -> Pair:
    return (None, None) if source.cols is None else (source.row_inv, source.col_inv)


def cut_of(block: Scores) -> Cut:
    """Of the multiplying ones the largest that fits into the GPU and has work for all of it."""
    if block.products is not None:
        return READING
    if block.rows.is_cuda:
        gpu = torch.cuda.get_device_properties(block.rows.device)
        shared = getattr(gpu, "shared_memory_per_block_optin", 2**16)  # which ROCm does not tell
        for cut in MULTIPLYING:
            if cut.memory <= shared and math.prod(cut.grid(block)) >= gpu.multi_processor_count:
                return cut
    return MULTIPLYING[-1]


def launch(kernel: Any, block: Scores, *args: Any, **flags: Any) -> None:
    """A program for each tile of a block."""
    cut = cut_of(block)
    with torch.cuda.device_of(block.rows if block.products is None else block.products):  # Triton takes the current one
        kernel[(math.prod(cut.grid(block)),)](block, *packed(*args), **flags, **cut.options())


def packed(*given: Any) -> list[Any]:
    """Kernels read vectors one value after the other."""
    return [x.contiguous() if isinstance(x, Tensor) else x for x in given]


def multiplies(device: torch.device) -> bool:
    """Whether there are tensor cores that Triton knows how to feed."""
    return device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _aligned(x: Tensor) -> Tensor:
    """Embeddings that can be loaded 16 bytes at a time, with zeros at the end if need be, which change no product."""
    if x.shape[1] % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    made = x.new_zeros(x.shape[0], -(-x.shape[1] // 16) * 16)
    made[:, : x.shape[1]] = x
    return made


def by_rows(x: Tensor) -> Tensor:
    """Embeddings whose numbers follow each other."""
    return x if x.stride(1) == 1 else x.contiguous()


def one(**vectors: Tensor | None) -> dict[str, bool]:
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
        cut = cut_of(block)
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
    """Takes the gradient of block after block and holds that of the source's own tensors.

    Sums are float32, and a gradient of half precision is written once, when its sums are complete. So only some of
    these are held: of a panel of rows, and of all columns; or, where these are too many, of panels of rows first and of
    panels of columns then, which takes the blocks twice.

    ``diagonal`` (N,) is added at the scores of row i with column i, and never rounded to half precision.

    Small gradients would vanish in float16, and lengths leave its range. So it takes those of the scores, times a power
    of two that uses its range, and is multiplied with unit vectors; for that it has to be known how large they can get,
    ``largest`` (one value each) of the rows' part and of the columns'. Else they stay in float32.
    """

    def __init__(
        self,
        source: Source,
        needs: Sequence[bool],
        diagonal: Tensor | None = None,
        largest: Sequence[Tensor | None] = (),
    ):
        self.source, self.diagonal = source, diagonal
        self.matrix, self.space = None, None
        self.turns = [(needs[0], needs[1])]  # which sums the blocks go to, each time that they are visited
        self.turn = self.turns[0]
        if source.cols is None:
            self.matrix = torch.empty(source.shape, dtype=torch.float32, device=source.rows.device)
            return
        given = source.rows, source.cols
        self.out = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None
            for x, need in zip(given, needs, strict=True)
        ]
        if 0 in source.shape:
            for out in self.out:
                if out is not None:
                    out.zero_()
        too_many = source.cols.dtype != torch.float32 and source.cols.numel() > _HELD
        if all(needs) and too_many:
            self.turns = [(True, False), (False, True)]
        self.held: list[Tensor | None] = [None, None]
        self.dtype, self.factor = torch.float32, None
        bounds = [x for x in largest if x is not None]
        if half(source) and (source.rows.dtype == torch.bfloat16 or bounds):
            self.dtype = source.rows.dtype
        if self.dtype == torch.float16:
            self.factor = (14 - torch.stack(bounds).sum().log2()).floor_().clamp_(-100, 100).exp2_()

    def blocks(self, formed: bool = False) -> Iterator[Scores]:
        """All that :meth:`of` and :meth:`add` are to see."""
        if self.matrix is not None:
            yield from blocks(self.source)
            return
        for turn in self.turns:
            self.turn = turn
            for block in blocks(self.source, formed, by_cols=self.turn == (False, True)):
                yield block._replace(factor=self.factor)

    def of(self, block: Scores) -> Tensor:
        """Where to write the gradient of this block; that may be over its products."""
        if self.matrix is not None:
            return self.matrix[block.start_r : block.start_r + block.size_r]
        if block.products is not None and self.dtype == torch.float32:
            return block.products
        numel = block.size_r * block.size_c
        if self.space is None or self.space.numel() < numel:
            dtype = torch.float32 if INTERPRETED else self.dtype
            self.space = torch.empty(numel, dtype=dtype, device=self.source.rows.device)
        return self.space[:numel].view(block.size_r, block.size_c)

    def add(self, block: Scores, grad: Tensor) -> None:
        """Account for what was just written."""
        if self.source.cols is None:
            return
        r, c = (slice(a, a + size) for a, size in ((block.start_r, block.size_r), (block.start_c, block.size_c)))
        n, m = self.source.shape
        grad = grad.to(self.dtype)
        if self.turn[0]:
            self._add(0, r, grad, self._factors(1, c), c.start == 0, c.stop == m)
        if self.turn[1]:
            self._add(1, c, grad.T, self._factors(0, r), r.start == 0, r.stop == n)

    def _factors(self, side: int, some: slice) -> Tensor:
        """Embeddings that the gradient of a block is multiplied with."""
        x, inv = (self.source.rows, self.source.cols)[side], inverses(self.source)[side]
        assert x is not None
        if self.factor is None or inv is None:
            return x[some]
        return torch.mul(x[some], inv[some, None], out=torch.empty_like(x[some]))

    def _add(self, side: int, own: slice, grad: Tensor, others: Tensor, begins: bool, ends: bool) -> None:
        sums = self._sums(side, own)
        if begins:
            sums.zero_()
        add_product(sums, grad, others)
        if ends:
            self._settle(side, own, sums)

    def _sums(self, side: int, own: slice) -> Tensor:
        """float32 sums of some anchors: the gradient itself, or some of all that are held, or all of them."""
        out, size = self.out[side], own.stop - own.start
        assert out is not None
        if out.dtype == torch.float32:
            return out[own]
        whole = side == 1 and self.turn == (True, True)
        held = self.held[side]
        if held is None or (len(held) < size and not whole):
            held = torch.empty(len(out) if whole else size, out.shape[1], dtype=torch.float32, device=out.device)
            self.held[side] = held
        return held[own] if whole else held[:size]

    def _settle(self, side: int, own: slice, sums: Tensor) -> None:
        """Of complete sums the gradient."""
        source, out = self.source, self.out[side]
        assert out is not None and source.cols is not None
        (x, inv), (other, other_inv) = ((source.rows, source.row_inv), (source.cols, source.col_inv))[:: 1 - 2 * side]
        step = at_a_time(x)
        for start in range(own.start, own.stop, step):
            part = slice(start, min(own.stop, start + step))
            g = sums[part.start - own.start : part.stop - own.start]
            if self.factor is not None:
                g.div_(self.factor) if inv is None else g.mul_(inv[part, None] / self.factor)
            if self.diagonal is not None:
                weight = self.diagonal[part]
                for i in (inv, other_inv):
                    weight = weight if i is None else weight * i[part]
                g.addcmul_(other[part].float(), weight[:, None])
            if inv is not None:  # what it has along its own vector changes only the length
                u = unit(x[part], inv[part])
                g.addcmul_(u, (u * g).sum(1, keepdim=True), value=-1)
            if out.dtype != torch.float32:
                out[part] = g

    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of rows and columns in their own dtype; an empty tensor where none was asked for."""
        if self.matrix is not None:
            return self.matrix, self.source.rows.new_empty(0)
        rows, cols = (self.source.rows.new_empty(0) if x is None else x for x in self.out)
        return rows, cols


def add_product(total: Tensor, grad: Tensor, other: Tensor) -> None:
    """``total += grad @ other``, with float32 sums."""
    if grad.dtype == torch.float32 or not grad.is_cuda:
        total.addmm_(grad.float(), other.float())
        return
    with _float32_sums():
        if torch.__version__ >= "2.11":
            torch.addmm(total, grad, other, out_dtype=torch.float32, out=total)
        else:  # which took only a total of half precision
            total.add_(torch.mm(grad, other, out_dtype=torch.float32))


@contextlib.contextmanager
def _float32_sums() -> Iterator[None]:
    """Who lets a model's products of float16 be summed in float16 does not mean these, whose sums leave its range."""
    flags = torch.backends.cuda.matmul
    if not flags.allow_fp16_accumulation:
        yield
        return
    flags.allow_fp16_accumulation = False
    try:
        yield
    finally:
        flags.allow_fp16_accumulation = True
