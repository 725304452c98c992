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

from .answers import ANSWERS
from .backends import Guides, Tiled, View
from .matrix import Matrix, check_unchanged
from .pairs import first_derivative_only
from .products import add_matmul_, matmul
from .reduce import Question, Slopes, Sums
from .scores import Embeddings, Scores, Tile, chunks, even_chunks, full_precision, inverse_norms, project_, tile_shape

_LONGER = 1e15  # a prefix that the longest is as many times as long as counts as zero: its products would underflow


def prefixes(matrix: Matrix, dims: Sequence[int]) -> list[Matrix]:
    """Return the matrices of the first d dimensions of a matrix's embeddings for each d of ``dims``, which ascend."""
    together = matrix.engine == "tiled" and not torch.compiler.is_compiling()
    matrices, family = [], object() if together else None
    for d in dims:
        rows, cols = (Embeddings(x.x[:, :d], x.normalize) for x in matrix.embeddings if x is not None)
        matrices.append(x := Matrix(rows, cols, matrix.pairs, matrix.engine, 0))
        x.share, x.bounded, x.family, x.backend = matrix.share, matrix.bounded, family, Prefixes if together else None
    return matrices


class Prefixes:
    """Answers for one or both sides of matrices of prefixes, shorter ones first."""

    def __init__(self, views: Sequence[View]):
        """``views``: those of one matrix next to one another, the rows first."""
        self.parts = [Tiled(list(group)) for _, group in itertools.groupby(views, key=lambda view: id(view[0]))]
        self.family = _Family(self.parts)

    def sums(self, *params: Tensor, guides: Guides | None = None, **question: Any) -> Tensor:
        """See :meth:`Dense.sums`. With guides, matrices are answered one by one, with a product for each."""
        check_unchanged([longest := self.parts[-1].matrix])
        if guides is None:
            asked = question["key"], question.get("over", "negatives")
            return _PrefixReduce.apply(self.family, *asked, longest.rows, longest.cols, *params)
        each = zip(self.parts, self.family.each(params), strict=True)
        return torch.cat([part.sums(*own, guides=guides, **question) for part, own in each], -1)

    def counts(self, **options: Any) -> Tensor:
        """See :meth:`Dense.counts`."""
        return torch.cat([part.counts(**options) for part in self.parts])

    def centre(self) -> Tensor:
        """See :meth:`Dense.centre`."""
        return torch.cat([part.centre() for part in self.parts], 1)

    def hardest(self, below: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Dense.hardest`."""
        limits = self.family.each([] if below is None else [below])
        values, indices = zip(*(part.hardest(*own) for part, own in zip(self.parts, limits, strict=True)), strict=True)
        return torch.cat(values), torch.cat(indices)

    def sorted_hinges(self, *, margin: float) -> Tensor:
        """See :meth:`Dense.sorted_hinges`."""
        return torch.cat([part.sorted_hinges(margin=margin) for part in self.parts])


class _Family:
    """What a pass over the scores of all prefixes needs beside the embeddings, which are left to autograd to save."""

    def __init__(self, parts: Sequence[Tiled]):
        matrices: Any = [part.matrix for part in parts]
        self.pairs, self.sides = matrices[0].pairs, [part.sides for part in parts]
        self.sizes = [sum(matrices[0].shape[side] for side in sides) for sides in self.sides]
        self.segments = [slice(a, b) for a, b in itertools.pairwise([0, *(m.rows.shape[1] for m in matrices)])]
        #: Of rows and columns: (.,) inverse lengths of the longest prefix, and (K, .) those of all K relative to it, as
        #: products are formed at its length. 0: a vector counts as zero; None: nothing is normalised.
        self.longest: list[Tensor | None] = []
        self.relative: list[Tensor | None] = []
        for sides in zip(*(m.embeddings for m in matrices), strict=True):
            inv = torch.stack([inverse_norms(x.x.detach()) for x in sides]) if sides[0].normalize else None
            self.longest.append(None if inv is None else inv[-1])
            self.relative.append(None if inv is None else torch.where((x := inv / inv[-1]) < _LONGER, x, 0.0))

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return the values (..., A) of each matrix's anchors; single ones are for all."""
        return [x] * len(self.sizes) if x.shape[-1] == 1 else x.split(self.sizes, -1)

    def each(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the parameters of each matrix's anchors."""
        split = [self.split(p) for p in params]
        return [[p[k] for p in split] for k in range(len(self.sizes))]

    def questions(self, source: Scores, key: str, over: str, params: Sequence[Tensor]) -> list[Question]:
        """Return what is asked of each matrix."""
        parts = zip(self.sides, self.each(params), strict=True)
        return [Question(source, self.pairs, key, over, sides, own) for sides, own in parts]

    def tiles(self, source: Scores, scratch: int) -> Iterator[tuple[list[Tile], list[Tensor], list[Tensor]]]:
        """Yield the tiles of all prefixes at one place after another, and the segments of unit vectors they are of."""
        (n, m), count = source.shape, len(self.segments)
        height, width = tile_shape(n, m, source.rows.device.type)
        space = source.rows.new_empty(count + scratch, height * width, dtype=source.dtype)
        for c in even_chunks(m, width):
            right = self.segmented(source.unit(1, c))
            for r in even_chunks(n, height):
                left, shape = self.segmented(source.unit(0, r)), (r.stop - r.start, c.stop - c.start)
                views = [x[: shape[0] * shape[1]].view(shape) for x in space]
                product = matmul(left[0], right[0].T)
                for k in range(count):
                    if k:
                        add_matmul_(product, left[k], right[k].T)
                    self.divide(product, k, (r, c), views[k])
                yield [Tile((r, c), x, views[count:]) for x in views[:count]], left, right

    def segmented(self, x: Tensor) -> list[Tensor]:
        """Return the segments (., d) of vectors, contiguous as fast products need them."""
        return [x[:, segment].contiguous() for segment in self.segments]

    def divide(self, x: Tensor, k: int, part: tuple[slice, slice], out: Tensor) -> Tensor:
        """Return a tile (r, c) divided by the lengths of prefix k, in ``out``."""
        rows, cols = self.relative
        x = x if rows is None else torch.mul(x, rows[k, part[0], None], out=out)
        x = x if cols is None else torch.mul(x, cols[k, part[1]], out=out)
        return out if x is out else out.copy_(x)


class _PrefixReduce(torch.autograd.Function):
    """:class:`itrloss.engine.reduce.Reduce` for prefixes, whose gradients are added up before they are multiplied."""

    @staticmethod
    def forward(ctx: Any, family: _Family, key: str, over: str, rows: Tensor, cols: Tensor, *params: Tensor):
        """``rows``, ``cols``: the longest prefixes."""
        ctx.family, ctx.question = family, (key, over)
        ctx.save_for_backward(rows, cols, *params)
        source = Scores(rows, cols, *family.longest)
        sums = [Sums(question) for question in family.questions(source, key, over, params)]
        with full_precision(rows):
            for tiles, _, _ in family.tiles(source, ANSWERS[key].buffers):
                for x, tile in zip(sums, tiles, strict=True):
                    x.add(tile)
        return torch.cat([x.finish() for x in sums], 1)

    @staticmethod
    def backward(ctx: Any, grad: Any):  # type: ignore[override]
        first_derivative_only()
        rows, cols, *params = ctx.saved_tensors
        needs, family = ctx.needs_input_grad[3:], ctx.family
        source = Scores(rows, cols, *family.longest)
        parts = zip(family.questions(source, *ctx.question, params), family.split(grad), strict=True)
        slopes = [Slopes(question, own, needs[2:]) for question, own in parts]
        with full_precision(rows):
            result = _embedding_gradients(family, source, slopes, needs[:2], ANSWERS[ctx.question[0]].buffers)
        for p, need, *found in zip(params, needs[2:], *(x.finish() for x in slopes), strict=True):
            result.append((sum(found) if p.shape[-1] == 1 else torch.cat(found, -1)) if need else None)
        return None, None, None, *result


def _embedding_gradients(
    family: _Family, source: Scores, slopes: Sequence[Slopes], needs: Sequence[bool], buffers: int
) -> list[Any]:
    """Return the gradients of rows and columns, (N, D) and (M, D), None where not needed.

    Scores are ``S = u v / (|u| |v|)`` of the first dimensions u and v of longer vectors. Beside the gradient of inner
    products, ``sum_j G_ij v_j / (|u| |v_j|)``, u has that of its length, ``-u sum_j G_ij S_ij / |u|^2``.
    """
    count, d, (n, m) = len(family.segments), source.rows.shape[1], source.shape
    new = functools.partial(torch.zeros, dtype=source.dtype, device=source.rows.device)
    row_total, col_total = new(n, d), new(d, m)  # transposed, as the gradient of scores would be once for each segment
    lengths = new(count, n), new(count, m)  # sum_j G_ij S_ij
    for tiles, left, right in family.tiles(source, buffers + 3):
        r, c = part = tiles[0].part
        *scratch, product, total = tiles[0].scratch
        total.zero_()
        for k, segment in reversed([*enumerate(family.segments)]):
            x = slopes[k].of(tiles[k]._replace(scratch=scratch))
            torch.mul(x, tiles[k].scores, out=product)
            for side, need in enumerate(needs):
                if need:
                    lengths[side][k, part[side]] += product.sum(1 - side)
            total.add_(family.divide(x, k, part, x))
            if needs[0]:
                add_matmul_(row_total[r, segment], total, right[k])
            if needs[1]:
                add_matmul_(col_total[segment, c], left[k].T, total)
    result: list[Any] = []
    for side, grad in enumerate((row_total, col_total.T)):
        x: Any = source[side]
        if needs[side] and (relative := family.relative[side]) is not None:
            along = (lengths[side] * relative.square()).flip(0).cumsum(0).flip(0)  # of all prefixes with a segment
            for some in chunks(x):
                unit = source.unit(side, some)
                for k, segment in enumerate(family.segments):
                    grad[some, segment] -= unit[:, segment] * along[k, some, None]
        result.append(project_(grad.contiguous(), x, source[2 + side]) if needs[side] else None)
    return result
