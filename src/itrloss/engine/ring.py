"""Matrices whose columns travel around the processes: a block of them at a time, in place of all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ranking, reduce
from .answers import ANSWERS
from .backends import Tiled
from .matrix import Matrix, check_unchanged
from .pairs import Pairs, first_derivative_only, pair_products
from .processes import communicate, gather
from .scores import Scores, chunks, full_precision, inverse_norms

_BLOCKS, _GRADIENTS = 0, 1  # tags of messages


class RingMatrix(Matrix):
    """Scores (N_r, W B) of this process's rows with the columns of all W processes, of which it holds its own B.

    Each question, and each backward pass, is a trip of all blocks of columns around the ring of processes. The next
    block is under way while the present one is multiplied.
    """

    def blocks_of_pairs(self) -> list[Pairs]:
        """Return the pairs with the columns of each process."""
        rows, cols = self.pairs.ids
        assert rows is not None and cols is not None and self.share is not None
        if not self._block_pairs:
            blocks = cols.chunk(self.share.processes.world)
            self._block_pairs = [Pairs((len(rows), len(x)), (rows, x), self.device) for x in blocks]
        return self._block_pairs

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.backend = Ring
        self._block_pairs: list[Pairs] = []
        self._inv: tuple[Tensor | None, Tensor | None] | None = None

    def inverse_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the (N_r,) and (W B,) inverse norms, None where vectors are not normalised."""
        if self._inv is None:
            assert self.share is not None
            group = self.share.processes.group
            inv = [None if x is None or not x.normalize else inverse_norms(x.x.detach()) for x in self.embeddings]
            self._inv = inv[0], None if inv[1] is None else gather(inv[1], group)
        return self._inv

    def with_block(self, b: int, rows: Tensor, cols: Tensor) -> Scores:
        """Return the scores (N_r, B) with the columns of process ``b``."""
        row_inv, col_inv = self.inverse_norms()
        inv = None if col_inv is None else col_inv[b * len(cols) : (b + 1) * len(cols)]
        return Scores(rows.detach(), cols, row_inv, inv, *self.blocks_of_pairs()[b].ids)

    def pair_scores(self, i: Tensor | None, j: Tensor | None) -> Tensor:
        """See :meth:`Matrix.pair_scores`; ``i`` and ``j`` are indices."""
        return _RingReduce.apply(self, None, (i, j), self.rows, self.cols)[1]


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
        return sums

    def centre(self) -> Tensor:
        """See :meth:`Dense.centre`: all candidates, as that takes no trip. What the sum of their vectors scores."""
        m = self.matrix
        assert m.share is not None and m.cols is not None
        p = m.share.processes
        source: Any = m.with_block(p.rank, m.rows, m.cols.detach())
        with full_precision(m.rows):
            own: Any = [sum(source.unit(side, part).sum(0) for part in chunks(source[side])) for side in (0, 1)]
            totals = p.total(torch.stack(own)).flip(0)
            rows, cols = (
                torch.cat([source.unit(side, part) @ total for part in chunks(source[side])])
                for side, total in enumerate(totals)
            )
        sums = torch.stack([rows, rows.new_full((len(rows),), p.totals[1])])
        own = torch.stack([cols, cols.new_full((len(cols),), p.totals[0])])
        # Of the columns, this process has the whole sum of its own, to which other processes add nothing.
        parts = {0: sums, 1: torch.cat([own if rank == p.rank else 0 * own for rank in range(p.world)], 1)}
        return torch.cat([parts[side] for side in self.sides], 1)

    def _few(self, positives: Tensor) -> bool:
        return True  # on all processes the same, whatever their pairs, as each pass is a trip that all take part in

    def _hardest(self, below: Tensor | None) -> tuple[Tensor, Tensor]:
        m, parts = self.matrix, _Parts(self.matrix, self.sides)
        values = torch.full((parts.total,), -torch.inf, dtype=m.dtype, device=m.device)
        index = torch.full((parts.total,), -1, device=m.device)
        for b, source in _trip(m, m.rows, m.cols):  # type: ignore[arg-type]
            limit = None if below is None else parts.of(below, b)
            best, where = ranking.hardest(list(source), self.sides, limit, pairs=m.blocks_of_pairs()[b])
            first = torch.cat([where.new_full((size,), b * parts.width * (side == 0)) for side, size in parts.sizes])
            old = parts.of(values, b)
            better = (best > old) | (best.isnan() & ~old.isnan())
            parts.put(index, b, torch.where(better, where + first, parts.of(index, b)))
            parts.put(values, b, torch.where(better, best, old))
        return values, index


class _Parts:
    """The values (..., A) of rows and columns, of which a block has those of all rows and of its own columns."""

    def __init__(self, matrix: RingMatrix, sides: Sequence[int]):
        assert matrix.share is not None
        self.rows, self.width = matrix.shape[0], matrix.shape[1] // matrix.share.processes.world
        self.sizes = [(side, self.rows if side == 0 else self.width) for side in sides]
        self.total = sum(matrix.shape[side] for side in sides)
        self.first = self.rows if 0 in sides else 0  # of the columns
        self.has_rows, self.has_cols = 0 in sides, 1 in sides

    def new(self, like: Tensor, value: float) -> Tensor:
        """Return values (..., A), all the same, for those of a block."""
        return like.new_full((*like.shape[:-1], self.total), value)

    def slices(self, block: int) -> list[slice]:
        """Return where the values of a block's rows and columns are."""
        start = self.first + block * self.width
        return [slice(0, self.first)] * self.has_rows + [slice(start, start + self.width)] * self.has_cols

    def of(self, x: Tensor, block: int) -> Tensor:
        """Return those values (..., A) that belong to a block; single ones are for all."""
        return x if x.shape[-1] == 1 else torch.cat([x[..., part] for part in self.slices(block)], -1)

    def put(self, x: Tensor, block: int, values: Tensor) -> None:
        """Write a block's values into ``x`` (..., A)."""
        if x.shape[-1] == 1:
            x.copy_(values)
            return
        for part, own in zip(self.slices(block), values.split([size for _, size in self.sizes], -1), strict=True):
            x[..., part] = own

    def add(self, x: Tensor, block: int, values: Tensor) -> None:
        """Add a block's values to ``x`` (..., A)."""
        self.put(x, block, self.of(x, block) + values)


class _RingReduce(torch.autograd.Function):
    """:class:`itrloss.engine.reduce.Reduce` for blocks of columns that travel around the ring."""

    @staticmethod
    def forward(ctx: Any, matrix: RingMatrix, question: Any, index: Any, rows: Tensor, cols: Any, *params: Tensor):
        """``question``: arguments of the operators, or None for pairs alone; ``index``: (P,) pairs i, j, or None."""
        ctx.matrix, ctx.question, ctx.index = matrix, question, index
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, cols, *params)
        parts = _Parts(matrix, question[2]) if question else None
        inside = None if index is None else _by_block(matrix, index)
        totals: Any = None
        scores: Any = None
        for b, source in _trip(matrix, rows, cols):
            if parts is not None:
                own, pairs = [parts.of(p, b) for p in params], matrix.blocks_of_pairs()[b]
                sums = reduce.sums(list(source), own, *question, False, pairs=pairs)[0]
                maximum = ANSWERS[question[0]].maximum
                totals = parts.new(sums, -torch.inf if maximum else 0.0) if totals is None else totals
                old = parts.of(totals, b)
                parts.put(totals, b, torch.maximum(old, sums) if maximum else old + sums)
            if inside is not None:
                which, i, j = inside[b]
                products = pair_products(source, i, j)
                scores = products.new_zeros(sum(len(x) for x, _, _ in inside)) if scores is None else scores
                scores[which] = products
        return totals, scores

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_pairs: Any):  # type: ignore[override]
        first_derivative_only()
        matrix, index = ctx.matrix, ctx.index
        question: Any = ctx.question
        rows, cols, *params = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        parts = None if grad is None or question is None else _Parts(matrix, question[2])
        inside = None if grad_pairs is None else _by_block(matrix, index)
        dtype = matrix.dtype
        grad_rows, grad_params = torch.zeros_like(rows, dtype=dtype), [torch.zeros_like(p, dtype=dtype) for p in params]
        home = _Home(matrix, cols) if needs[1] else None
        for b, source in _trip(matrix, rows, cols):
            listed = None
            if inside is not None and grad_pairs is not None:
                listed = (*inside[b][1:], grad_pairs[inside[b][0]])
            if parts is not None and grad is not None and question is not None:
                own, pairs = [parts.of(p, b) for p in params], matrix.blocks_of_pairs()[b]
                upstream = parts.of(grad, b)
                found = reduce.gradients(list(source), own, upstream, *question, needs, pairs=pairs, pair_grads=listed)
            else:
                found = reduce.pair_gradients(source, needs[:2], listed)
            if needs[0]:
                grad_rows += found[0]
            if home is not None:
                home.send(found[1])
            for total, x, need in zip(grad_params, found[2:], needs[2:], strict=False):
                if need:
                    assert parts is not None
                    parts.add(total, b, x)
            del found  # before the next block has its own
        grad_cols = None if home is None else home.receive()
        result = [
            grad_rows.to(rows.dtype),
            grad_cols,
            *(x.to(p.dtype) for x, p in zip(grad_params, params, strict=True)),
        ]
        return None, None, None, *(x if need else None for x, need in zip(result, needs, strict=True))


def _by_block(matrix: RingMatrix, index: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return which of the (P,) pairs are in each block of columns, and their rows and columns there."""
    assert matrix.share is not None
    i, j = index
    width = matrix.shape[1] // matrix.share.processes.world
    block, order = (j // width).sort(stable=True)
    counts = torch.bincount(block, minlength=matrix.share.processes.world).tolist()  # synchronises with an accelerator
    return [(which, i[which], j[which] % width) for which in order.split(counts)]


def _trip(matrix: RingMatrix, rows: Tensor, cols: Tensor) -> Iterator[tuple[int, Scores]]:
    """Yield the scores with each process's columns, its own first; the next block is exchanged meanwhile."""
    assert matrix.share is not None
    p, block = matrix.share.processes, cols.detach().contiguous()
    for step in range(p.world):
        b = (p.rank + step) % p.world
        following, works = block, []
        if step + 1 < p.world:
            following = torch.empty_like(block)
            works = _exchange(p, block, following, _BLOCKS)
        yield b, matrix.with_block(b, rows, block)
        _wait(p, works)
        block = following


class _Home:
    """The gradients of blocks of columns, which travel with them, and on to the process that has the columns."""

    def __init__(self, matrix: RingMatrix, cols: Tensor):
        assert matrix.share is not None
        self.processes, self.dtype = matrix.share.processes, cols.dtype
        self.incoming = torch.zeros_like(cols, dtype=matrix.dtype)
        self.works: list[Any] = []

    def send(self, grad: Tensor) -> None:
        """Add this process's part to the block's gradient, and pass it on."""
        _wait(self.processes, self.works)
        total = grad.to(self.incoming.dtype).add_(self.incoming)
        self.incoming = torch.empty_like(total)
        self.works = _exchange(self.processes, total, self.incoming, _GRADIENTS)

    def receive(self) -> Tensor:
        """Return the gradient of this process's columns."""
        _wait(self.processes, self.works)
        return self.incoming.to(self.dtype)


def _exchange(p: Any, mine: Tensor, following: Tensor, tag: int) -> list[Any]:
    """Send a block to the process before, receive another from the process behind; return what to wait for."""
    ranks_of_group = dist.get_process_group_ranks(p.group)
    ranks = [ranks_of_group[(p.rank + k) % p.world] for k in (-1, 1)]
    ops = [
        dist.P2POp(dist.isend, mine, ranks[0], p.group, tag),
        dist.P2POp(dist.irecv, following, ranks[1], p.group, tag),
    ]
    return [(work, mine) for work in communicate(_batch, ops, group=p.group)]  # what is being sent is kept alive


def _batch(ops: list[Any], group: Any) -> list[Any]:
    return dist.batch_isend_irecv(ops)


def _wait(p: Any, works: list[Any]) -> None:
    for work, _ in works:
        communicate(lambda group, work=work: work.wait(), group=p.group)
