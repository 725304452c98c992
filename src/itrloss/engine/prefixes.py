"""Matrices of the first dimensions of the same embeddings, whose scores come out of one product.

A tile's inner products for a prefix are those for the one before it and the product of the next dimensions; the
gradient of these dimensions is one product with the sum of the gradients of all prefixes that have them. So there are
as many multiplications as for the longest prefix alone: for 64, 128, 256, 512 and 768 dimensions, 0.44 of those of
separate matrices (``pytest benchmarks/test_micro.py --benchmark-enable -k matryoshka``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .answerers import Tiled, View
from .answers import ANSWERS
from .matrix import Matrix, check_unchanged
from .pairs import first_derivative_only
from .products import add_matmul_, matmul
from .reduce import Slopes, Sums
from .scores import Embeddings, Tile, chunks, even_chunks, full_precision, inverse_norms, project_, tile_shape


def prefixes(matrix: Matrix, dims: Sequence[int]) -> list[Matrix]:
    """Return the matrices of the first d dimensions of a matrix's embeddings for each d of ``dims``, which ascend."""
    matrices = []
    for d in dims:
        sides: Any = (Embeddings(x.x[:, :d], x.normalize) for x in matrix.embeddings if x is not None)
        matrices.append(Matrix(*sides, matrix.pairs, matrix.engine, 0))
        matrices[-1].share, matrices[-1].bounded = matrix.share, matrix.bounded
    if matrix.engine == "tiled" and not torch.compiler.is_compiling():
        family = Family(matrices)
        for x in matrices:
            x.family, x.backend = family, Prefixes
    return matrices


class Family:
    """The matrices of prefixes of the same embeddings, in ascending order."""

    def __init__(self, matrices: Sequence[Matrix]):
        self.matrices, self.longest = matrices, matrices[-1]
        sizes = [0, *(m.rows.shape[1] for m in matrices)]
        self.segments = [slice(a, b) for a, b in itertools.pairwise(sizes)]
        # Of rows and columns, for each prefix: the (.,) inverse lengths, 0 for one that counts as a zero vector
        self.inv: Any = [[], []]
        for m in matrices:
            for inv, side in zip(self.inv, m.embeddings, strict=True):
                assert side is not None
                inv.append(inverse_norms(side.x.detach()) if side.normalize else None)
        # relative to the longest, at the length of which products are formed: they cannot overflow then
        self.relative: Any = [[x if x is None else (x / inv[-1]).nan_to_num_(0.0) for x in inv] for inv in self.inv]

    def tiles(self, scratch: int) -> Iterator[tuple[list[Tile], list[Tensor], list[Tensor]]]:
        """Yield the tiles of all prefixes at one place after another, with shared scratch, and the unit vectors there.

        These are the segments (r, d) of rows and (c, d) of columns of the longest prefix.
        """
        source, (n, m) = self.longest.source(), self.longest.shape
        height, width = tile_shape(n, m, self.longest.device.type)
        space = source.rows.new_empty(len(self.segments) + scratch, height * width, dtype=source.dtype)
        for c in even_chunks(m, width):
            right = self.split(source.unit(1, c))
            for r in even_chunks(n, height):
                left, shape = self.split(source.unit(0, r)), (r.stop - r.start, c.stop - c.start)
                views = [x[: shape[0] * shape[1]].view(shape) for x in space]
                product: Tensor | None = None
                for k, (u, v) in enumerate(zip(left, right, strict=True)):
                    if product is None:
                        product = matmul(u, v.T)
                    else:
                        add_matmul_(product, u, v.T)
                    self.divide(product, k, (r, c), views[k])
                k = len(self.segments)
                yield [Tile((r, c), x, views[k:]) for x in views[:k]], left, right

    def split(self, x: Tensor) -> list[Tensor]:
        """Return the segments (., d) of vectors, contiguous as fast products need them."""
        return [x[:, segment].contiguous() for segment in self.segments]

    def divide(self, x: Tensor, k: int, part: tuple[slice, slice], out: Tensor) -> Tensor:
        """Return a tile (r, c) divided by the lengths of prefix k, in ``out``."""
        rows, cols = (inv[k] for inv in self.relative)
        x = x if rows is None else torch.mul(x, rows[part[0], None], out=out)
        x = x if cols is None else torch.mul(x, cols[part[1]], out=out)
        return out if x is out else out.copy_(x)


class Prefixes:
    """Answers for one or both sides of matrices of a family, in the order of the matrices."""

    def __init__(self, views: Sequence[View]):
        self.views, self.family = views, views[0][0].family
        self.parts = [Tiled(list(group)) for _, group in itertools.groupby(views, key=lambda view: id(view[0]))]
        self.sizes = [sum(part.matrix.shape[side] for side in part.sides) for part in self.parts]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return the values (..., A) of each matrix's anchors; single ones are for all."""
        return [x] * len(self.parts) if x.shape[-1] == 1 else x.split(self.sizes, -1)

    def each(self, params: Sequence[Tensor]) -> list[tuple[Tiled, list[Tensor]]]:
        """Return each matrix's part, with its anchors' parameters."""
        split = [self.split(p) for p in params]
        return [(part, [p[j] for p in split]) for j, part in enumerate(self.parts)]

    def sums(self, *params: Tensor, key: str, over: str = "negatives") -> Tensor:
        """See :meth:`Dense.sums`."""
        longest = self.family.longest
        check_unchanged([longest])
        return _PrefixReduce.apply(self, key, over, longest.rows, longest.cols, *params)

    def counts(self, **options: Any) -> Tensor:
        """See :meth:`Dense.counts`."""
        return torch.cat([part.counts(**options) for part in self.parts])

    def centre(self) -> Tensor:
        """See :meth:`Dense.centre`."""
        return torch.cat([part.centre() for part in self.parts], 1)

    def hardest(self, below: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Dense.hardest`."""
        limits = [None] * len(self.parts) if below is None else self.split(below)
        found = [part.hardest(limit) for part, limit in zip(self.parts, limits, strict=True)]
        values, indices = zip(*found, strict=True)
        return torch.cat(values), torch.cat(indices)

    def sorted_hinges(self, *, margin: float) -> Tensor:
        """See :meth:`Dense.sorted_hinges`."""
        return torch.cat([part.sorted_hinges(margin=margin) for part in self.parts])


class _PrefixReduce(torch.autograd.Function):
    """:class:`itrloss.engine.reduce.Reduce` for prefixes, whose gradients are added up before they are multiplied."""

    @staticmethod
    def forward(ctx: Any, prefixes: Prefixes, key: str, over: str, rows: Tensor, cols: Tensor, *params: Tensor):
        """``rows``, ``cols``: the longest prefixes of the embeddings."""
        ctx.prefixes, ctx.question, family = prefixes, (ANSWERS[key], over), prefixes.family
        ctx.save_for_backward(rows, cols, *params)
        sums = {}
        for part, own in prefixes.each(params):
            m = part.matrix
            sums[family.matrices.index(m)] = Sums(m.source(), m.pairs, *ctx.question, part.sides, own)
        with full_precision(rows):
            for tiles, _, _ in family.tiles(ANSWERS[key].buffers):
                for k, x in sums.items():
                    x.add(tiles[k])
        return torch.cat([x.finish() for x in sums.values()], 1)

    @staticmethod
    def backward(ctx: Any, grad: Any):  # type: ignore[override]
        first_derivative_only()
        rows, _, *params = ctx.saved_tensors
        needs, prefixes = ctx.needs_input_grad[3:], ctx.prefixes
        slopes = {}
        for (part, own), g in zip(prefixes.each(params), prefixes.split(grad), strict=True):
            k, m = prefixes.family.matrices.index(part.matrix), part.matrix
            slopes[k] = Slopes(m.source(), m.pairs, *ctx.question, part.sides, own, g, needs[2:])
        with full_precision(rows):
            result = _embedding_gradients(prefixes.family, slopes, needs[:2], ctx.question[0].buffers)
        for i, (p, need) in enumerate(zip(params, needs[2:], strict=True)):
            found = [x.finish()[i] for x in slopes.values()]
            result.append((sum(found) if p.shape[-1] == 1 else torch.cat(found, -1)) if need else None)
        return None, None, None, *result


def _embedding_gradients(family: Family, slopes: dict[int, Slopes], needs: Sequence[bool], buffers: int) -> list[Any]:
    """Return the gradients of rows and columns, (N, D) and (M, D), None where not needed.

    Scores are ``S = u v / (|u| |v|)`` of the first dimensions u and v of longer vectors. Beside the gradient of inner
    products, ``sum_j G_ij v_j / (|u| |v_j|)``, u has that of its length, ``-u sum_j G_ij S_ij / |u|^2``.
    """
    source, count = family.longest.source(), len(family.segments)
    d, (n, m) = source.rows.shape[1], family.longest.shape
    new = functools.partial(torch.zeros, dtype=source.dtype, device=source.rows.device)
    row_total, col_total = new(n, d), new(d, m)  # transposed, as the gradient of scores would be once for each segment
    lengths = new(count, n), new(count, m)  # sum_j G_ij S_ij
    for tiles, left, right in family.tiles(buffers + 3):
        r, c = part = tiles[0].part
        *scratch, product, total = tiles[0].scratch
        total.zero_()
        for k in reversed(range(count)):
            if k in slopes:
                x = slopes[k].of(tiles[k]._replace(scratch=scratch))
                torch.mul(x, tiles[k].scores, out=product)
                for side, need in enumerate(needs):
                    if need:
                        lengths[side][k, part[side]] += product.sum(1 - side)
                total.add_(family.divide(x, k, part, x))
            segment = family.segments[k]
            if needs[0]:
                add_matmul_(row_total[r, segment], total, right[k])
            if needs[1]:
                add_matmul_(col_total[segment, c], left[k].T, total)
    result: list[Any] = []
    for side, (grad, need) in enumerate(zip((row_total, col_total.T), needs, strict=True)):
        rest = new(len(grad))
        for k in reversed(range(count)):
            inv, segment = family.relative[side][k], family.segments[k]
            if inv is not None and need:
                rest.addcmul_(lengths[side][k], inv.square())
                for some in chunks(grad):
                    grad[some, segment] -= source.unit(side, some)[:, segment] * rest[some, None]
        x: Any = source[side]
        result.append(project_(grad.contiguous(), x, source[2 + side]) if need else None)
    return result
