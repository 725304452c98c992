"""Where scores come from and where their gradients go.

The dense and the tiled engine run the same passes (``softmax``, ``moments``, ``pairs``, ``ranking``). They differ only
here: a *dense* source is a score matrix that exists, visited in panels that stay in the cache; a *tiled* source is two
sets of embeddings whose product is formed tile by tile in a fixed workspace, once per pass, and again in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .products import add_matmul_, matmul

PANEL = {"cpu": 2**19}  # scores per panel of a matrix that exists: a few panels fit in the cache
TILE = {"cpu": (2**20, 2048)}  # scores per recomputed tile, and its least width: large enough for full-speed products
EPS = 1e-12  # a vector of at most this length counts as zero: its scores and its gradient are 0
_ACCELERATOR_PANEL = 2**24
_ACCELERATOR_TILE = (2**24, 8192)
_FEW, _ACCELERATOR_NUMBERS = 256, 2**22  # embeddings at a time that stay in the cache; numbers in them


Pair = tuple[Tensor | None, Tensor | None]  # (of the rows, of the columns); None: not asked for
Asked = tuple[bool, bool]  # whether the rows are, and the columns
SIDES = ((0, 1), (1, 0))  # (position in a pair, dimension that is reduced)


def apart(x: Tensor, n: int, asked: Asked) -> Pair:
    """What is of the n rows and what is of the columns, of numbers (..., A) of all asked anchors.

    Where both are asked, the rows' numbers come before the columns'. A single number belongs to both.
    """
    rows, cols = asked
    if not (rows and cols) or x.numel() == 1:
        return x if rows else None, x if cols else None
    first, second = x.split_with_sizes((n, x.shape[-1] - n), -1)
    return first, second


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One vector of those that :func:`apart` makes two of."""
    return torch.cat(tuple(parts), -1) if len(parts) > 1 else parts[0]


class Source(NamedTuple):
    """What the operators receive: embeddings, or scores when ``cols`` is None, and who matches whom."""

    rows: Tensor  # (N, D) embeddings, or (N, M) scores
    cols: Tensor | None  # (M, D)
    row_inv: Tensor | None  # (N,) reciprocal norms; None: do not normalise
    col_inv: Tensor | None  # (M,)
    row_ids: Tensor | None  # (N,); None on both sides: row i matches column i
    col_ids: Tensor | None  # (M,)
    kept: Tensor | None = None  # (N, M) scores of the embeddings, where they exist already
    valid: Tensor | None = None  # () int64 on the CPU: how many of the columns exist; None: all. No columns are asked
    fused: bool = False  # by Triton kernels

    def trimmed(self) -> Source:
        """Without the columns that do not exist."""
        if self.valid is None:
            return self
        m = int(self.valid)
        cols, col_inv, col_ids = (None if x is None else x[:m] for x in (self.cols, self.col_inv, self.col_ids))
        kept = None if self.kept is None else self.kept[:, :m]
        return Source(self.rows, cols, self.row_inv, col_inv, self.row_ids, col_ids, kept, None, self.fused)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], (self.rows.shape[1] if self.cols is None else self.cols.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.rows)

    def unit_rows(self, start: int, stop: int) -> Tensor:
        """Some of the rows in the compute dtype, normalised if they are to be."""
        return unit(self.rows[start:stop], None if self.row_inv is None else self.row_inv[start:stop])

    def unit_cols(self, start: int, stop: int) -> Tensor:
        """The same of the columns."""
        assert self.cols is not None
        return unit(self.cols[start:stop], None if self.col_inv is None else self.col_inv[start:stop])


@dataclass(slots=True)
class Kept:
    """A score matrix that was formed of embeddings, as all views of them share it."""

    scores: Tensor | None = None  # of a memory
    readers: int = 0  # recorded backward passes, and users, that count on the scores; a single one may overwrite them
    spent: bool = False  # overwritten
    positives: Any = None  # of a memory, once they were looked for


def fused() -> Any:
    """The passes of the Triton engine, which is imported where it is used."""
    from .triton import passes

    return passes


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward pass of an ``autograd.Function`` without a second derivative: refuse one, on any path.

    PyTorch's ``once_differentiable`` refuses only where an incoming gradient has a gradient itself; the dependence on
    the embeddings would be dropped in silence.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("itrloss has no second derivatives: create_graph=True is not supported")
        return backward(ctx, *grads)

    return checked


def compute_dtype(x: Tensor) -> torch.dtype:
    """Scores and accumulators: float64 stays, everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def unit(x: Tensor, inv: Tensor | None) -> Tensor:
    """``x`` in the compute dtype, scaled by its reciprocal norms if there are any."""
    dtype = compute_dtype(x)
    x = x if x.dtype == dtype else x.to(dtype)
    return x if inv is None else x * inv[:, None]


def lengths(x: Tensor) -> Tensor:
    """(N,) Euclidean lengths of the rows in the compute dtype, though squares may leave its range."""
    x = x.to(compute_dtype(x))
    peak = x.abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.linalg.vector_norm(x / peak, dim=1) * peak.squeeze(1)


def at_a_time(x: Tensor) -> int:
    """How many of the embeddings (N, D) a pass over them takes at once: an accelerator waits for every call."""
    return _FEW if x.device.type == "cpu" else max(_FEW, _ACCELERATOR_NUMBERS // max(1, x.shape[1]))


@dataclass(slots=True)
class Tile:
    """One block of scores, ``scores[i, j] = S[r0 + i, c0 + j]``, with scratch space of the same shape."""

    r0: int
    r1: int
    c0: int
    c1: int
    scores: Tensor
    scratch: list[Tensor]
    alone: bool  # the only tile: it holds every row and every column
    left: Tensor | None = None  # the unit embeddings that the scores were made of
    right: Tensor | None = None

    def part(self, x: Tensor, dim: int) -> Tensor:
        """The piece of a per-row (``dim=1``) or per-column (``dim=0``) vector that belongs to this tile."""
        if self.alone or x.numel() == 1:
            return x
        return x[self.r0 : self.r1] if dim == 1 else x[self.c0 : self.c1]

    def spread(self, x: Tensor, dim: int) -> Tensor:
        """:meth:`part`, shaped to broadcast over the tile."""
        return self.part(x, dim).unsqueeze(dim)

    def add_to(self, sums: Tensor | None, values: Tensor, dim: int, size: int) -> Tensor:
        """Add this tile's per-anchor ``values`` to the sums over all tiles, which begin as None."""
        if self.alone:
            return values
        if sums is None:
            sums = values.new_zeros(size)
        self.part(sums, dim).add_(values)
        return sums


Wanted = Callable[[int, int, int, int], bool]  # whether a tile r0, r1, c0, c1 is


def tiles(source: Source, scratch: int, wanted: Wanted | None = None) -> Iterator[Tile]:
    """Visit every score once, or those of wanted tiles alone. ``tile.scores`` must not be written to."""
    if 0 in source.shape:
        return iter(())
    if source.fused:
        from .triton.blocks import as_tiles

        return as_tiles(source, scratch)
    return _panels(source, scratch) if source.cols is None else _products(source, scratch, wanted)


def _workspace(source: Source, numel: int, count: int) -> list[Tensor]:
    return [torch.empty(numel, dtype=source.dtype, device=source.rows.device) for _ in range(count)]


def _panels(source: Source, scratch: int) -> Iterator[Tile]:
    n, m = source.shape
    space: list[Tensor] = []
    for rows in panels(source.rows):
        r0, r1 = rows.start, rows.stop
        if r1 == n and r0 == 0:
            space = [torch.empty(n, m, dtype=source.dtype, device=source.rows.device) for _ in range(scratch)]
            yield Tile(0, n, 0, m, source.rows, space, alone=True)
            return
        space = space or _workspace(source, (r1 - r0) * m, scratch)
        views = [b[: (r1 - r0) * m].view(r1 - r0, m) for b in space]
        yield Tile(r0, r1, 0, m, source.rows[rows], views, alone=False)


def panels(scores: Tensor, size: int | None = None) -> Iterator[slice]:
    """Rows of a matrix that exists, as many at a time as stay in the cache, or as have ``size`` scores."""
    n, m = scores.shape
    step = min(n, max(1, (size or PANEL.get(scores.device.type, _ACCELERATOR_PANEL)) // max(1, m)))
    return (slice(start, min(n, start + step)) for start in range(0, n, step))


def tile_shape(source: Source, numel: int | None = None) -> tuple[int, int]:
    """Rows and columns of a recomputed tile; of one that has at most ``numel`` scores."""
    n, m = source.shape
    usual, width = TILE.get(source.rows.device.type, _ACCELERATOR_TILE)
    numel = numel or usual
    c = min(m, max(width, numel // n))
    return min(n, max(1, numel // c)), c


def _products(source: Source, scratch: int, wanted: Wanted | None = None) -> Iterator[Tile]:
    n, m = source.shape
    step_r, step_c = tile_shape(source)
    alone = step_r == n and step_c == m
    kept = source.kept
    space = _workspace(source, step_r * step_c, scratch + (kept is None))
    assert source.cols is not None
    # Columns outside: their wider block is normalised once, the narrow row block again and again.
    for c0, c1 in spans(m, step_c):
        above = [span for span in spans(n, step_r) if wanted is None or wanted(*span, c0, c1)]
        right = source.unit_cols(c0, c1) if kept is None and above else None
        for r0, r1 in above:
            views = [b[: (r1 - r0) * (c1 - c0)].view(r1 - r0, c1 - c0) for b in space]
            if kept is not None:
                yield Tile(r0, r1, c0, c1, kept[r0:r1, c0:c1], views, alone)
            elif right is not None:
                left = source.unit_rows(r0, r1)
                scores = matmul(left, right.T, out=views[0])
                yield Tile(r0, r1, c0, c1, scores, views[1:], alone, left, right)


def spans(size: int, step: int) -> list[tuple[int, int]]:
    """Pieces of at most ``step``, as equal as can be.

    A product of a few columns rounds otherwise than that of many, and copies of an embedding would no longer tie.
    """
    count = -(-size // step)
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


class Gradient:
    """Takes ``dS`` tile by tile and holds the gradient of the source's own tensors.

    ``in_place``: the source is a matrix, and ``dS`` is written over it.
    """

    def __init__(self, source: Source, needs: tuple[bool, bool], in_place: bool = False):
        self.source = source
        self.rows = self.cols = None
        if in_place:
            self.rows = source.rows
        elif source.cols is not None:
            self.rows = self._zeros(source.rows) if needs[0] else None
            self.cols = self._zeros(source.cols) if needs[1] else None

    def _zeros(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=self.source.dtype, device=x.device)

    def scratch(self, wanted: int) -> int:
        """How many scratch buffers a tile takes if so many are ``wanted`` beside that of :meth:`of`."""
        return wanted + (self.source.cols is not None)

    def of(self, tile: Tile) -> Tensor:
        """The buffer to write this tile's ``dS`` into; the last scratch buffer if there is no matrix to keep."""
        if self.source.cols is None:
            rows = self._matrix()
            return rows if tile.alone else rows[tile.r0 : tile.r1]
        return tile.scratch[-1]

    def _matrix(self) -> Tensor:
        if self.rows is None:
            self.rows = torch.empty(self.source.shape, dtype=self.source.dtype, device=self.source.rows.device)
        return self.rows

    def put(self, tile: Tile, values: Tensor) -> None:
        """Write this tile's ``dS``; the buffer of a whole matrix is taken over, and no longer the caller's."""
        if self.source.cols is None and self.rows is None and tile.alone and values.is_contiguous():
            self.rows = values
        else:
            self.of(tile).copy_(values)

    def add(self, tile: Tile) -> None:
        """Account for the ``dS`` just written."""
        if self.source.cols is None:
            return
        if self.rows is not None:
            right = self.source.unit_cols(tile.c0, tile.c1) if tile.right is None else tile.right
            add_matmul_(self.rows[tile.r0 : tile.r1], tile.scratch[-1], right)
        if self.cols is not None:
            left = self.source.unit_rows(tile.r0, tile.r1) if tile.left is None else tile.left
            add_matmul_(self.cols[tile.c0 : tile.c1], tile.scratch[-1].T, left)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of ``rows`` and ``cols`` in their own dtype; an empty tensor where none was asked for."""
        s = self.source
        if s.cols is None:
            return self._matrix(), s.rows.new_empty(0)
        return _through_norm(self.rows, s.rows, s.row_inv), _through_norm(self.cols, s.cols, s.col_inv)


def _through_norm(grad: Tensor | None, x: Tensor, inv: Tensor | None) -> Tensor:
    """Gradient of ``x`` from the gradient of ``x / |x|``, in place and in blocks so that nothing else is held."""
    if grad is None:
        return x.new_empty(0)
    if inv is not None:
        step = at_a_time(x)
        for start in range(0, x.shape[0], step):
            block = slice(start, start + step)
            project_(grad[block], unit(x[block], inv[block]), inv[block])
    return grad.to(x.dtype)


def project_(grad: Tensor, unit_x: Tensor, inv: Tensor) -> None:
    """``(g - u (u . g)) / |x|``: the gradient that leaves a normalisation, written over ``grad``."""
    if torch.compiler.is_compiling():  # it fuses without our help, and a loop would fix the number of rows
        grad.copy_((grad - unit_x * (unit_x * grad).sum(1, keepdim=True)) * inv[:, None])
        return
    given = grad, unit_x, inv[:, None]
    step = at_a_time(grad)
    blocks = [given] if grad.shape[0] <= step else zip(*(x.split(step) for x in given), strict=True)
    for g, u, i in blocks:
        g.addcmul_(u, (u * g).sum(1, keepdim=True), value=-1).mul_(i)
