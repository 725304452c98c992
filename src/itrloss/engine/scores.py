"""The inputs of scores: embeddings, multiplied tile by tile, or a precomputed matrix."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .products import matmul

EPS = 1e-12  # a vector of at most this length counts as zero: its scores and its gradient are 0
# id of an entry that does not exist: neither positive nor negative
IGNORE_ID = torch.iinfo(torch.int64).min
# Number of scores in a tile, and its least width. On a CPU, a tile and its scratch fit into the
# last-level cache and are still large enough for full-speed products. From 2^18 to 2^22 the size
# hardly matters: 5 % at 2048 x 2048 x 512 on one thread of an EPYC (pytest benchmarks/test_micro.py
# --benchmark-enable -k tile_size).
TILE = {"cpu": (2**20, 2048)}
_ACCELERATOR_TILE = (2**24, 8192)
# elements of embeddings that a pass over them processes at once
_CHUNK, _ACCELERATOR_CHUNK = 2**17, 2**23

Ids = tuple[Tensor | None, Tensor | None]


class Scores(NamedTuple):
    """The inputs of a score matrix (N, M): all that a pass needs, as tensors, so that an operator
    can take them.
    """

    rows: Tensor  # (N, D) embeddings, or (N, M) scores
    cols: Tensor | None = None  # (M, D)
    row_inv: Tensor | None = None  # (N,) inverse norms; None: vectors are not normalised
    col_inv: Tensor | None = None  # (M,)
    row_ids: Tensor | None = None  # (N,) int64; None on both sides: row i matches column i
    col_ids: Tensor | None = None  # (M,)
    # Where scores are cached, these and the unit vectors they were computed from, detached:
    kept: Tensor | None = None  # (N, M)
    row_unit: Tensor | None = None  # (N, D)
    col_unit: Tensor | None = None  # (M, D)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, M) of the matrix."""
        return self.rows.shape[0], (self.rows.shape[1] if self.cols is None else self.cols.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores and sums."""
        return compute_dtype(self.rows)

    @property
    def matrix(self) -> Tensor | None:
        """The (N, M) scores, if precomputed or cached."""
        return self.rows if self.cols is None else self.kept

    def unit(self, side: int, part: slice = slice(None)) -> Tensor:
        """Return some of the rows (0) or columns (1) in the compute dtype, at unit length if they
        are normalised.
        """
        x, inv = self.vectors(side)
        return scaled(x[part], None if inv is None else inv[part])

    def vectors(self, side: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows (0) or columns (1) and their inverse norms: None if they are unit
        vectors, or not scaled.
        """
        x, inv, unit = self[side], self[2 + side], self[7 + side]
        assert x is not None
        return (x, inv) if unit is None else (unit, None)


class Tile(NamedTuple):
    """A block of scores, with buffers of its shape."""

    part: tuple[slice, slice]  # rows and columns
    scores: Tensor  # (r, c), not to be written to
    scratch: list[Tensor]  # uninitialised
    guide: tuple[Tensor, ...] = ()  # (r, c) scores of a second matrix, if there is one


def tiles(scores: Scores, scratch: int, guide: Scores | None = None) -> Iterator[Tile]:
    """Yield tiles that cover every score once, with ``scratch`` buffers; all tiles share the same
    memory.
    """
    if guide is not None:
        for tile, other in zip(tiles(scores, scratch), tiles(guide, 0), strict=True):
            yield tile._replace(guide=(other.scores.to(scores.dtype),))
        return
    (n, m), matrix, dtype, device = scores.shape, scores.matrix, scores.dtype, scores.rows.device
    if 0 in (n, m):
        return
    step_r, step_c = tile_shape(n, m, device.type)
    space = [
        torch.empty(step_r * step_c, dtype=dtype, device=device)
        for _ in range(scratch + (matrix is None))
    ]
    # Columns in the outer loop: their wide block is normalised once, the narrow row blocks again
    # for each of them.
    for c in even_chunks(m, step_c):
        right: Tensor | None = None
        for r in even_chunks(n, step_r):
            height, width = r.stop - r.start, c.stop - c.start
            views = [x[: height * width].view(height, width) for x in space]
            if matrix is not None:
                yield Tile((r, c), matrix[r, c], views)
            else:
                right = scores.unit(1, c) if right is None else right
                yield Tile((r, c), matmul(scores.unit(0, r), right.T, out=views.pop()), views)


def tile_shape(n: int, m: int, device: str) -> tuple[int, int]:
    """Return the rows and the columns of a tile."""
    numel, width = TILE.get(device, _ACCELERATOR_TILE)
    c = min(m, max(width, numel // n))
    return min(n, max(1, numel // c)), c


def even_chunks(size: int, step: int) -> list[slice]:
    """Return slices of at most ``step`` entries, as equal as possible.

    A product with few columns may round differently from one with many: copies of an embedding
    would no longer tie.
    """
    count = -(-size // step)
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


def chunks(x: Tensor) -> list[slice]:
    """Return slices of the rows of (N, D) embeddings for a pass over them, whose temporaries stay
    small.
    """
    if torch.compiler.is_compiling():  # it would specialise on the size, and fuses passes anyway
        return [slice(0, x.shape[0])]
    step = max(
        1, (_CHUNK if x.device.type == "cpu" else _ACCELERATOR_CHUNK) // max(1, x[:1].numel())
    )
    return [slice(start, min(start + step, len(x))) for start in range(0, len(x), step)]


# ------------------------------------------------------------------------------- precision, lengths


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scores and sums: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def full_precision(x: Tensor):
    """Return a context in which autocast does not run products in half precision."""
    kind = x.device.type
    rounds = (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(
        kind
    )
    return torch.autocast(kind, enabled=False) if rounds else contextlib.nullcontext()


def may_keep() -> bool:
    """Return whether tensors made now may be cached: inference tensors could not be saved for
    backward.
    """
    return torch.compiler.is_compiling() or not torch.is_inference_mode_enabled()


def host_may_read(x: Tensor) -> bool:
    """Return whether the host may read values of ``x`` without a synchronisation or a graph break
    of the compiler.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return type(x) is Tensor or not isinstance(x, torch._subclasses.FakeTensor)


def scaled(x: Tensor, inv: Tensor | None) -> Tensor:
    """Return the (N, D) vectors in the compute dtype, times (N,) inverse norms if there are any."""
    x = x.to(compute_dtype(x))
    return x if inv is None else x * inv[:, None]


def inverse_norms(x: Tensor) -> Tensor:
    """Return the (...) inverse norms of vectors (..., D) in the compute dtype; 0 for a norm of at
    most 1e-12.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    norms = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
    # Squares of norms beyond 1e18 overflow float32. Float64 takes three times as long, 0.05 of a
    # step at 128 x 512 (pytest benchmarks/test_micro.py --benchmark-enable -k norms), so only the
    # CPU, which may look, goes beyond.
    # no fake tensor
    readable = x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()
    if readable and not math.isfinite(float(norms.sum())):
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return torch.threshold_(norms, EPS, math.inf).reciprocal_().to(dtype)


def normalized(x: Tensor, normalize: bool = True) -> Tensor:
    """Return the vectors (..., D) at unit length in the compute dtype, twice differentiable; zeros
    stay zeros.
    """
    if not normalize:
        return x.to(compute_dtype(x))
    return (
        _normalized(x)
        if torch.compiler.is_compiling()
        else _Normalize.apply(x, inverse_norms(x.detach()))
    )


def _normalized(x: Tensor) -> Tensor:
    """Return unit vectors (..., D), computed by operators that autograd differentiates and the
    compiler fuses.
    """
    x = x.to(compute_dtype(x))
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.threshold(norms, EPS, math.inf).reciprocal()


class _Normalize(torch.autograd.Function):
    """Unit vectors, whose backward reads and writes them half as often as autograd's would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inv: Tensor) -> Tensor:
        unit = x * inv.unsqueeze(-1)  # promoted to the dtype of ``inv``
        ctx.save_for_backward(x, unit, inv)
        return unit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, unit, inv = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return torch.autograd.grad(_normalized(x), x, grads[0], create_graph=True)[0], None
        return project_(grads[0], x, inv, unit, out=torch.empty_like(grads[0])), None


def with_bias(
    rows: Tensor, cols: Tensor, bias: tuple[Tensor | None, Tensor | None] | None, normalize: bool
) -> tuple[Tensor, Tensor, bool]:
    """Return embeddings, and whether to normalise them, whose scores include a bias: ``<(u, b, 1),
    (v, 1, c)>``.
    """
    if bias is None:
        return rows, cols, normalize
    if not isinstance(bias, tuple) or len(bias) != 2:
        raise TypeError(f"bias: expected a pair of tensors or None, got {bias!r}")
    extended = []
    for side, (x, b) in enumerate(zip((rows, cols), bias, strict=True)):
        if b is not None and (
            not isinstance(b, Tensor) or b.shape != (len(x),) or not b.is_floating_point()
        ):
            got = f"shape {tuple(b.shape)} of {b.dtype}" if isinstance(b, Tensor) else repr(b)
            raise ValueError(f"bias: expected ({len(x)},) floating-point numbers, got {got}")
        u = normalized(x, normalize)
        own = u.new_zeros(len(u), 1) if b is None else b.to(u)[:, None]
        ones = torch.ones_like(own)
        extended.append(torch.cat([u, ones, own] if side else [u, own, ones], 1))
    return extended[0], extended[1], False


class Embeddings:
    """The vectors (N, D) of one side. Their unit vectors are computed once, for all matrices that
    share this object.
    """

    def __init__(self, x: Tensor, normalize: bool = True):
        # a similarity made under no_grad has no gradient, even if it is used outside
        if not torch.is_grad_enabled():
            x = x.detach()
        compiling = torch.compiler.is_compiling()
        if not compiling and x.is_inference() and not torch.is_inference_mode_enabled():
            x = x.clone()  # inference tensors cannot be saved for backward
        self.x, self.normalize = x, normalize
        self.dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.version = None if compiling or x.is_inference() else x._version
        self._unit: Tensor | None = None
        #: (N,) inverse norms, once the unit vectors were computed with them.
        self.inv: Tensor | None = None

    def unit(self) -> Tensor:
        """Return the (N, D) vectors in the compute dtype, at unit length if ``normalize``;
        differentiable, cached.
        """
        if self._unit is not None:
            return self._unit
        keep = may_keep()
        with torch.set_grad_enabled(keep):  # with their graph, even if first used under no_grad
            if not self.normalize:
                unit = self.x.to(self.dtype)
            elif torch.compiler.is_compiling():
                unit = _normalized(self.x)
            else:
                self.inv = inverse_norms(self.x.detach())
                unit = _Normalize.apply(self.x, self.inv)
        self._unit = unit if keep else None
        return unit

    def detach(self) -> Embeddings:
        """Return the same embeddings without a gradient."""
        twin = Embeddings(self.x.detach(), self.normalize)
        twin.version = self.version
        twin._unit, twin.inv = None if self._unit is None else self._unit.detach(), self.inv
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a copied tensor has its own version counter
        self.version = None if self.x.is_inference() else self.x._version


def project_(
    grad: Tensor,
    x: Tensor,
    inv: Tensor | None,
    unit: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the gradient of ``x`` (..., D), in its dtype, from that of the unit vectors; works in
    place or in ``out``.

    ``dL/dx = (g - u <u, g>) / |x|`` with ``u = x / |x|``, taken from ``unit`` if there.
    """
    out = grad if out is None else out
    for part in chunks(x) if inv is not None else ():
        assert inv is not None
        g, u = grad[part], scaled(x[part], inv[part]) if unit is None else unit[part]
        along = (u * g).sum(-1, keepdim=True)
        torch.addcmul(g, u, along, value=-1, out=out[part]).mul_(inv[part].unsqueeze(-1))
    return out.to(x.dtype)
