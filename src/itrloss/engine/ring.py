"""Matrices whose columns travel around the processes: a block of them at a time, in place of all at
once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ranking, reduce
from .answers import ANSWERS
from .backends import Tiled
from .exchange import Processes
from .matrix import Matrix, check_unchanged
from .pairs import Pairs, first_derivative_only, pair_products
from .processes import gather, pass_on
from .scores import Scores, chunks, full_precision, inverse_norms

_BLOCKS, _GRADIENTS = 0, 1  # tags of messages


class RingMatrix(Matrix):
    """Scores (N_r, W B) of this process's rows with the columns of all W processes, of which it
    holds its own B.

    Each question, and each backward pass, is a trip of all blocks of columns around the ring of
    processes. The next block is under way while the present one is multiplied.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.backend = Ring

    @property
    def processes(self) -> Processes:
        """The processes that share the batch."""
        assert self.share is not None
        return self.share.processes

    @property
    def width(self) -> int:
        """The number of columns of a process, B."""
        return self.shape[1] // self.processes.world

    @functools.cached_property
    def block_pairs(self) -> list[Pairs]:
        """The pairs with the columns of each process."""
        rows, cols = self.pairs.ids
        assert rows is not None and cols is not None
        blocks = cols.chunk(self.processes.world)
        return [Pairs((len(rows), len(x)), (rows, x), self.device) for x in blocks]

    @functools.cached_property
    def inverse_norms(self) -> tuple[Tensor | None, list[Any]]:
        """The (N_r,) inverse norms of the rows and those (B,) of each block, None where they are
        not normalised.
        """
        own, cols = (
            inverse_norms(x.x.detach()) if x and x.normalize else None for x in self.embeddings
        )
        p = self.processes
        return own, [None] * p.world if cols is None else list(gather(cols, p.group).chunk(p.world))

    def trip(self) -> Iterator[tuple[int, Scores]]:
        """Yield each process's number and the scores (N_r, B) with its columns, this one's first."""
        assert self.cols is not None
        p, block, (row_inv, col_inv) = (
            self.processes,
            self.cols.detach().contiguous(),
            self.inverse_norms,
        )
        for step in range(p.world):
            b = (p.rank + step) % p.world
            arriving = pass_on(block, p.group, _BLOCKS) if step + 1 < p.world else None
            yield (
                b,
                Scores(self.rows.detach(), block, row_inv, col_inv[b], *self.block_pairs[b].ids),
            )
            block = block if arriving is None else arriving()
            del arriving  # and with it the block that was sent

    def by_block(self, i: Tensor, j: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return, for each block, which of the (P,) pairs of rows and columns it has, and their
        indices there.
        """
        block, order = (j // self.width).sort(stable=True)
        # synchronises with an accelerator
        counts = torch.bincount(block, minlength=self.processes.world).tolist()
        return [(which, i[which], j[which] % self.width) for which in order.split(counts)]

    def parts(self, sides: Sequence[int]) -> _Parts:
        """Return how the values of one or both sides are divided among blocks."""
        return _Parts(self.shape[0] if 0 in sides else 0, self.width)

    def pair_scores(self, i: Tensor | None, j: Tensor | None) -> Tensor:
        """See :meth:`Matrix.pair_scores`; ``i`` and ``j`` are indices."""
        return _RingReduce.apply(self, None, (i, j), self.rows, self.cols)[1]


class _Parts(NamedTuple):
    """How values (..., A) of rows and columns are divided: a block has those of all rows and of its
    own columns.
    """

    rows: int  # 0 if only columns are asked for
    width: int  # columns of a block

    def split(self, x: Tensor, block: int) -> Tensor:
        """Return the values of a block; single ones are for all."""
        first = self.rows + block * self.width  # beyond the end where only rows are asked for
        return (
            x
            if x.shape[-1] == 1
            else torch.cat([x[..., : self.rows], x[..., first : first + self.width]], -1)
        )

    def join(self, blocks: Sequence[Tensor], maximum: bool = False) -> Tensor:
        """Return the values (..., A), or single ones, that those of all blocks add up to, or the
        largest of rows.
        """
        x = torch.stack([*blocks], -2)
        if x.shape[-1] == 1:
            return x.sum(-2)
        rows = x[..., : self.rows]
        return torch.cat(
            [rows.amax(-2) if maximum else rows.sum(-2), x[..., self.rows :].flatten(-2)], -1
        )


class Ring(Tiled):
    """Answers for one or both sides of a matrix, block by block of columns."""

    matrix: RingMatrix

    def sums(self, *params: Tensor, key: str, over: str = "negatives") -> Tensor:
        """See :meth:`Dense.sums`; the scores of the positive pairs come along."""
        m = self.matrix
        check_unchanged([m])
        index = m.pairs.listed if m._positive_scores is None and torch.is_grad_enabled() else None
        question = key, over, self.sides, m.engine == "triton"
        sums, positive = _RingReduce.apply(m, question, index, m.rows, m.cols, *params)
        m._positive_scores = m._positive_scores if index is None else positive
        return sums[0] if len(sums) == 1 else sums

    def centre(self) -> Tensor:
        """See :meth:`Dense.centre`: all candidates, as that takes no trip. What the sum of their
        vectors scores.
        """
        m, p = self.matrix, self.matrix.processes
        assert m.cols is not None
        row_inv, col_inv = m.inverse_norms
        source: Any = Scores(m.rows.detach(), m.cols.detach(), row_inv, col_inv[p.rank])
        with full_precision(m.rows):
            own: Any = [
                sum(source.unit(side, part).sum(0) for part in chunks(source[side]))
                for side in (0, 1)
            ]
            for side, total in enumerate(p.total(torch.stack(own)).flip(0)):
                sums = torch.cat([source.unit(side, part) @ total for part in chunks(source[side])])
                own[side] = torch.stack([sums, torch.full_like(sums, p.totals[1 - side])])
        # Of the columns, this process has the whole sum of its own, to which other processes add
        # nothing.
        before = p.rank * m.width
        own[1] = F.pad(own[1], (before, m.shape[1] - m.width - before))
        return torch.cat([own[side] for side in self.sides], 1)

    def _few(self, positives: Tensor) -> bool:
        # on all processes the same, whatever their pairs, as each pass is a trip that all take part
        # in
        return True

    def _hardest(self, below: Tensor | None) -> tuple[Tensor, Tensor]:
        m, parts = self.matrix, self.matrix.parts(self.sides)
        bests: list[Any] = [None] * m.processes.world
        for b, source in m.trip():
            limit = None if below is None else parts.split(below, b)
            bests[b] = ranking.hardest(list(source), self.sides, limit, pairs=m.block_pairs[b])
            index = bests[b][1][: parts.rows]
            index += torch.where(index < 0, 0, b * parts.width)
        values, index = (torch.stack(x) for x in zip(*bests, strict=True))  # (W, N_r + B)
        best, block = values[:, : parts.rows].max(0)
        where = index[:, : parts.rows].gather(0, block[None])[0]
        cols = (x[:, parts.rows :].flatten() for x in (values, index))
        return tuple(torch.cat(x) for x in zip((best, where), cols, strict=True))  # type: ignore[return-value]


class _RingReduce(torch.autograd.Function):
    """:class:`itrloss.engine.reduce.Reduce` for blocks of columns that travel around the ring."""

    @staticmethod
    def forward(
        ctx: Any,
        matrix: RingMatrix,
        question: Any,
        index: Any,
        rows: Tensor,
        cols: Any,
        *params: Tensor,
    ):
        """``question``: arguments of the operators, or None for pairs alone; ``index``: (P,) pairs
        i, j, or None.
        """
        ctx.matrix, ctx.question, ctx.index = matrix, question, index
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, cols, *params)
        parts: Any = None if question is None else matrix.parts(question[2])
        inside: Any = None if index is None else matrix.by_block(*index)
        sums: list[Any] = [None] * matrix.processes.world
        scores: Any = None if index is None else rows.new_empty(len(index[0]), dtype=matrix.dtype)
        for b, source in matrix.trip():
            if question is not None:
                own = [parts.split(p, b) for p in params]
                sums[b] = reduce.sums(
                    list(source), own, *question, False, pairs=matrix.block_pairs[b]
                )[0]
            if index is not None:
                which, i, j = inside[b]
                scores[which] = pair_products(source, i, j)
        totals = None if question is None else parts.join(sums, ANSWERS[question[0]].maximum)
        return totals, scores

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_pairs: Any):  # type: ignore[override]
        first_derivative_only()
        matrix, needs = ctx.matrix, ctx.needs_input_grad[3:]
        question: Any = ctx.question
        rows, cols, *params = ctx.saved_tensors
        parts: Any = None if grad is None else matrix.parts(question[2])
        inside: Any = None if grad_pairs is None else matrix.by_block(*ctx.index)
        grad_rows, slopes = (
            torch.zeros_like(rows, dtype=matrix.dtype),
            [()] * matrix.processes.world,
        )
        # the gradient of a block of columns, which travels with it, and on to where they are
        arriving: Any = None
        for b, source in matrix.trip():
            listed = None if grad_pairs is None else (*inside[b][1:], grad_pairs[inside[b][0]])
            if grad is None:
                block_grads = reduce.pair_gradients(source, needs[:2], listed)
            else:
                tensors = [parts.split(p, b) for p in params], parts.split(grad, b)
                pairs = matrix.block_pairs[b]
                block_grads = reduce.gradients(
                    list(source), *tensors, *question, needs, pairs=pairs, pair_grads=listed
                )
            if needs[0]:
                grad_rows += block_grads[0]
            if needs[1]:
                total = (
                    block_grads[1].to(matrix.dtype)
                    if arriving is None
                    else arriving().add_(block_grads[1])
                )
                del arriving  # and with it the gradient that was sent
                arriving = pass_on(total, matrix.processes.group, _GRADIENTS)
            slopes[b] = block_grads[2:]
            del block_grads  # before the next block has its own
        grads: list[Any] = [grad_rows, arriving() if needs[1] else None]
        grads += (
            [None] * len(params) if grad is None else map(parts.join, zip(*slopes, strict=True))
        )
        inputs = zip(grads, (rows, cols, *params), needs, strict=True)
        return (
            None,
            None,
            None,
            *(x.to(y.dtype) if need and x is not None else None for x, y, need in inputs),
        )
