"""The one reduction: sums of an elementwise function of scores over each anchor's candidates, and
their gradient.

    sums[k, i] = sum_j f_k(S_ij; params_i)          dL/dS_ij = sum_k g_ki f_k'(S_ij; params_i)

One pass over the matrix gives the sums of its rows and columns in one vector (A,), the rows' first.
The gradient of the scores is formed tile by tile and multiplied at once into that of the
embeddings: except for cached scores, nothing of the size of the matrix is held.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .answers import ANSWERS, Answer
from .pairs import Pairs, first_derivative_only, pair_gradient, pair_products
from .products import add_matmul_, matmul
from .scores import Scores, Tile, full_precision, normalized, project_, tiles

_WIDTH = len(Scores._fields)


class Question(NamedTuple):
    """What is asked of a score matrix: the sums of an answer over the candidates of one or both
    sides' anchors.
    """

    scores: Scores
    pairs: Pairs
    key: str  # of the answer
    over: str  # negatives, positives or all
    sides: Sequence[int]  # of the anchors, the rows (0) first
    params: Sequence[Tensor]  # (1,) or (A,); thresholds may have slots, (slots, A)
    # of another matrix, without a gradient: the first parameter of the answer
    guide: Scores | None = None

    @property
    def answer(self) -> Answer:
        """The function of scores that is summed."""
        return ANSWERS[self.key]

    def by_side(self, x: Tensor) -> dict[int, Tensor]:
        """Return the part of ``x`` (..., A) that belongs to each side."""
        sizes = [self.scores.shape[side] for side in self.sides]
        return dict(zip(self.sides, x.split(sizes, -1), strict=True))

    def views(self, part: tuple[slice, slice]) -> list[tuple[Sequence[int], list[Tensor]]]:
        """Return groups of sides that share a tile's values, each with parameters that broadcast
        with its scores.
        """
        if all(p.shape[-1] == 1 for p in self.params):
            return [(self.sides, [p.unsqueeze(-1) for p in self.params])]
        groups: list[tuple[Sequence[int], list[Tensor]]] = []
        for side in self.sides:
            own = [
                p if p.shape[-1] == 1 else self.by_side(p)[side][..., part[side]]
                for p in self.params
            ]
            groups.append(([side], [p.unsqueeze(-1 - side) for p in own]))
        return groups


def tiled_sums(question: Question, early: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (K, A) sums of :meth:`itrloss.engine.backends.Dense.sums`, added up tile by tile.

    With ``early``, which is for exponentials of rows, also return ``sum_j f(S_ij) y_j`` (N, D) with
    the unit columns y, from which backward gets the rows' gradient, and ``sum_j f(S_ij) S_ij``
    (N,), the derivatives w.r.t. the scale. So columns without a gradient, such as a memory's, are
    multiplied once for both passes.
    """
    scores, sums = question.scores, Sums(question)
    new = functools.partial(torch.zeros, dtype=scores.dtype, device=scores.rows.device)
    direction, scale_slopes = (
        new(scores.rows.shape if early else 0),
        new(len(scores.rows) if early else 0),
    )
    for tile in tiles(scores, question.answer.buffers, question.guide):
        values = sums.add(tile)
        if early:
            add_matmul_(direction[tile.part[0]], values, scores.unit(1, tile.part[1]))
            scale_slopes[tile.part[0]] += values.mul_(tile.scores).sum(1)
    return sums.finish(), direction, scale_slopes


class Sums:
    """Adds up an answer, tile by tile."""

    def __init__(self, question: Question):
        self.question, scores, answer = question, question.scores, question.answer
        self.start = float("-inf") if answer.maximum else 0.0
        new = functools.partial(torch.full, dtype=scores.dtype, device=scores.rows.device)
        self.total = {
            side: new((answer.width, scores.shape[side]), self.start) for side in question.sides
        }

    def add(self, tile: Tile) -> Tensor:
        """Add a tile's values; return the last of them (r, c), in its scratch or new."""
        x, q, answer = tile.scores, self.question, self.question.answer
        for group, own in q.views(tile.part):
            values = answer.value(tile.scores, *tile.guide, *own, out=tile.scratch)
            for k, x in enumerate(values if answer.width > 1 else (values,)):
                q.pairs.exclude_(x, tile.part, self.start, q.over)
                for side in group:
                    part = self.total[side][k, tile.part[side]]
                    if answer.maximum:
                        torch.maximum(part, x.amax(1 - side), out=part)
                    else:
                        part.add_(x.sum(1 - side))
        return x

    def finish(self) -> Tensor:
        """Return the (K, A) sums."""
        return torch.cat(list(self.total.values()), 1)


def tiled_gradient(
    question: Question,
    grad: Tensor,  # (K, A)
    needs: Sequence[bool],  # of the rows, the columns, and each parameter
    # pairs i, j; gradient of their scores
    pair_grads: tuple[Tensor | None, Tensor | None, Tensor] | None = None,
) -> list[Tensor]:
    """Return the gradients of rows, columns and parameters from that of the sums; empty where not
    needed.
    """
    gradient, slopes = _Gradient(question.scores, needs[:2]), Slopes(question, grad, needs[2:])
    for tile in tiles(question.scores, question.answer.buffers + 1, question.guide):
        gradient.add(tile, slopes.of(tile))
    if pair_grads is not None:
        gradient.add_pairs(*pair_grads)
    return [*gradient.finish(), *slopes.finish()]


class Slopes:
    """Forms the gradient of the scores tile by tile, and adds up those of the parameters."""

    def __init__(self, question: Question, grad: Tensor, needs: Sequence[bool]):
        """``grad``: (K, A) that of the sums; ``needs``: whether that of each parameter is needed."""
        self.question, self.needs, self.upstream = question, needs, question.by_side(grad)
        self.totals = [torch.zeros_like(p, dtype=question.scores.dtype) for p in question.params]

    def of(self, tile: Tile) -> Tensor:
        """Return the (r, c) gradient of a tile's scores, in its scratch or new."""
        q, tile_grad = self.question, None
        assert q.answer.slopes is not None
        for k, (group, own) in enumerate(q.views(tile.part)):
            side_grads = [
                self.upstream[side][:, tile.part[side]].unsqueeze(-1 - side) for side in group
            ]
            g, needs = (
                functools.reduce(torch.add, side_grads),
                [*(False for _ in tile.guide), *self.needs],
            )
            slopes = q.answer.slopes(tile.scores, [*tile.guide, *own], g, needs, tile.scratch[k:])
            for total, grad_p in zip(self.totals, slopes[1 + len(tile.guide) :], strict=True):
                if grad_p is not None:
                    self._add(
                        total, q.pairs.exclude_(grad_p, tile.part, 0.0, q.over), group, tile.part
                    )
            if slopes[0] is not None:
                slope = q.pairs.exclude_(slopes[0], tile.part, 0.0, q.over)
                tile_grad = slope if tile_grad is None else tile_grad.add_(slope)
        return torch.zeros_like(tile.scores) if tile_grad is None else tile_grad

    def _add(
        self, total: Tensor, grad: Tensor, group: Sequence[int], part: tuple[slice, slice]
    ) -> None:
        if total.shape[-1] == 1:
            total.add_(grad.sum((-1, -2)).view(total.shape))
        else:
            (side,) = group
            self.question.by_side(total)[side][..., part[side]] += grad.sum(-1 - side)

    def finish(self) -> list[Tensor]:
        """Return the gradients of the parameters; empty where not needed."""
        return [
            p if need else p.new_empty(0) for p, need in zip(self.totals, self.needs, strict=True)
        ]


class _Gradient:
    """Adds up the gradient of the embeddings, or of a precomputed matrix, from that of the scores,
    tile by tile.
    """

    def __init__(self, scores: Scores, needs: Sequence[bool]):
        self.scores, self.needs = scores, needs
        self.total: list[Tensor | None] = [None, None]

    def add(self, tile: Tile, grad: Tensor) -> None:
        """Add what a tile's gradient contributes; ``grad`` may become part of the result without a
        copy.
        """
        s = self.scores
        if s.cols is None:
            whole = grad.shape == s.shape  # autograd's may have transposed strides
            self.total[0] = total = grad.contiguous() if whole else self._total(0)
            total[tile.part] = grad
            return
        for side, need in enumerate(self.needs):
            if not need:
                continue
            other, mine = s.unit(1 - side, tile.part[1 - side]), grad.T if side else grad
            total = self.total[side]
            if total is None and len(mine) == s.shape[side]:
                self.total[side] = matmul(mine, other)
            else:
                add_matmul_(self._total(side)[tile.part[side]], mine, other)

    def add_pairs(self, i: Tensor | None, j: Tensor | None, grad: Tensor) -> None:
        """Add what the (P,) gradient of listed pairs' scores contributes; as for tiles, `finish`
        adds that of norms.
        """
        for side, (own, other) in enumerate(((i, j), (j, i))):
            if self.needs[side]:
                y, inv = self.scores.vectors(1 - side)
                self.total[side] = pair_gradient(
                    self.total[side], own, y, inv, other, grad, self.scores.shape[side]
                )

    def _total(self, side: int) -> Tensor:
        total = self.total[side]
        if total is None:
            x: Any = self.scores[side]
            self.total[side] = total = x.new_zeros(x.shape, dtype=self.scores.dtype)
        return total

    def finish(self) -> list[Tensor]:
        """Return the gradients of rows and columns in their dtypes; empty where not needed."""
        s, gradients = self.scores, []
        for side, (x, need) in enumerate(zip(s[:2], self.needs, strict=True)):
            if need and x is not None:
                gradients.append(project_(self._total(side), x, s[2 + side], s[7 + side]))
            else:
                gradients.append(s.rows.new_empty(0))
        return gradients


# ---------------------------------------------------------------------------------------- operators

_library = torch.library.Library("itrloss", "DEF")
_SOURCE, _QUESTION = (
    "Tensor?[] source, Tensor[] params",
    "str key, str over, int[] sides, bool triton",
)


def operator_inputs(
    source: Sequence[Any], pairs: Pairs | None
) -> tuple[Scores, Scores | None, Pairs]:
    """Return the scores, those of a guide that may follow them, and the pairs that an operator's
    tensors stand for.
    """
    scores, guide = Scores(*source[:_WIDTH]), Scores(*source[_WIDTH:]) if source[_WIDTH:] else None
    return (
        scores,
        guide,
        pairs or Pairs(scores.shape, (scores.row_ids, scores.col_ids), scores.rows.device),
    )


def _question(source, params, key, over, sides, pairs) -> Question:
    scores, guide, pairs = operator_inputs(source, pairs)
    return Question(scores, pairs, key, over, tuple(sides), params, guide)


def _passes(key: str, triton: bool) -> tuple[Any, Any]:
    """Return the forward and the backward pass of an answer: PyTorch's where Triton has no kernel
    for it.
    """
    if triton:
        from . import triton as gpu

        if key in gpu.WITH_LIMITS:
            return gpu.sums, gpu.gradient
    return tiled_sums, tiled_gradient


def _sums(source, params, key, over, sides, triton, early, pairs=None):
    """Return the (K, A) sums and, with ``early``, (N, D) directions and (A,) derivatives w.r.t. the
    scale.
    """
    with full_precision(source[0]), torch.no_grad():
        return _passes(key, triton)[0](_question(source, params, key, over, sides, pairs), early)


def _gradients(source, params, grad, key, over, sides, triton, needs, pairs=None, pair_grads=None):
    """Return the gradients of rows, columns and parameters, to which ``pair_grads`` adds that of
    listed pairs.
    """
    with full_precision(source[0]), torch.no_grad():
        return _passes(key, triton)[1](
            _question(source, params, key, over, sides, pairs), grad, needs, pair_grads
        )


def _fake_sums(source, params, key, over, sides, triton, early):
    scores = Scores(*source[:_WIDTH])
    size = sum(scores.shape[side] for side in sides)
    sums = scores.rows.new_empty(ANSWERS[key].width, size, dtype=scores.dtype)
    return (
        sums,
        sums.new_empty(scores.rows.shape if early else (0,)),
        sums.new_empty(size if early else 0),
    )


def _fake_gradients(source, params, grad, key, over, sides, triton, needs):
    rows, cols = source[:2]
    inputs = rows, rows if cols is None else cols, *params
    return [x.new_empty(x.shape if need else (0,)) for x, need in zip(inputs, needs, strict=True)]


def operator(name: str, schema: str, function: Any, fake: Any) -> Any:
    """Register an operator; eager mode calls the function itself, as the dispatcher would only cost
    time.
    """
    _library.define(name + schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"itrloss::{name}", fake, lib=_library)
    registered = getattr(torch.ops.itrloss, name).default

    def call(*args: Any, **eager: Any) -> Any:
        return registered(*args) if torch.compiler.is_compiling() else function(*args, **eager)

    return call


_SUMS = f"({_SOURCE}, {_QUESTION}, bool early) -> (Tensor, Tensor, Tensor)"
_GRADIENTS = f"({_SOURCE}, Tensor grad, {_QUESTION}, bool[] needs) -> Tensor[]"
sums = operator("reduce", _SUMS, _sums, _fake_sums)
gradients = operator("reduce_backward", _GRADIENTS, _gradients, _fake_gradients)


def pair_gradients(scores: Scores, needs: Sequence[bool], pair_grads: Any) -> list[Tensor]:
    """Return the gradients of rows and columns from ``pair_grads``: (P,) pairs i, j, and that of
    their scores.
    """
    gradient = _Gradient(scores, needs)
    if pair_grads is not None:
        gradient.add_pairs(*pair_grads)
    return gradient.finish()


class PairProducts(torch.autograd.Function):
    """The (P,) scores of listed pairs, twice differentiable."""

    @staticmethod
    def forward(ctx: Any, index, *source):
        """``index``: pairs i, j as in `pair_products`."""
        ctx.index = index
        ctx.save_for_backward(*source[:6], None, *source[7:])  # the gradient needs no cached scores
        return pair_products(Scores(*source), *index)

    @staticmethod
    def backward(ctx: Any, grad: Any):  # type: ignore[override]
        scores: Any = Scores(*ctx.saved_tensors)
        needs, nothing = ctx.needs_input_grad[1:3], [None] * (_WIDTH - 2)
        if torch.is_grad_enabled():  # create_graph=True
            units = [
                normalized(x, inv is not None)
                for x, inv in zip(scores[:2], scores[2:4], strict=True)
            ]
            left, right = (x if k is None else x[k] for x, k in zip(units, ctx.index, strict=True))
            inputs = [x for x, need in zip(scores[:2], needs, strict=True) if need]
            grads = iter(
                torch.autograd.grad((left * right).sum(1), inputs, grad, create_graph=True)
            )
            return None, *(next(grads) if need else None for need in needs), *nothing
        grads = pair_gradients(scores, needs, (*ctx.index, grad))
        return None, *(x if need else None for x, need in zip(grads, needs, strict=True)), *nothing


class Reduce(torch.autograd.Function):
    """The (K, A) sums and the (P,) scores of listed pairs, or None, with their gradient.

    As one node, both add their gradients to the same tensors. Where no unit vectors are cached,
    backward then holds one gradient of all embeddings less at a time: 34 MB of 105 for InfoNCE at
    8192 x 8192 x 512 (``pytest tests/test_operators.py -k memory``).
    """

    @staticmethod
    def forward(ctx: Any, pairs, question, index, width, *tensors):
        """``question``: arguments of the operators; ``index``: pairs i, j as in `pair_products`, or
        None.

        ``width``: the number of tensors that are scores and those of a guide, before the
        parameters.
        """
        source, params, (rows, cols) = (
            list(tensors[:width]),
            list(tensors[width:]),
            ctx.needs_input_grad[4:6],
        )
        early = (
            ANSWERS[question[0]].exponential
            and question[2] == (0,)
            and rows
            and not cols
            and source[1] is not None
        )
        ctx.pairs, ctx.question, ctx.index, ctx.width, ctx.early = (
            pairs,
            question,
            index,
            width,
            early,
        )
        ctx.set_materialize_grads(False)  # a loss may use the sums alone, or the pairs alone
        totals, direction, scale_slopes = sums(source, params, *question, early, pairs=pairs)
        early_tensors = source[0], source[2], source[7], *params[:1], direction, scale_slopes
        ctx.save_for_backward(*(early_tensors if early else tensors))
        return totals, None if index is None else pair_products(Scores(*source[:_WIDTH]), *index)

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_pairs: Any):  # type: ignore[override]
        first_derivative_only()
        result: list[Any] = [None] * len(ctx.needs_input_grad)
        if ctx.early:
            rows, row_inv, unit, scale, direction, scale_slopes = ctx.saved_tensors
            result[4] = project_(direction * (grad[0] * scale)[:, None], rows, row_inv, unit)
            if ctx.needs_input_grad[4 + ctx.width]:
                grad_scale = grad[0] * scale_slopes
                result[4 + ctx.width] = (
                    grad_scale.sum().view(1) if scale.numel() == 1 else grad_scale
                )
            return tuple(result)
        source, params = list(ctx.saved_tensors[: ctx.width]), list(ctx.saved_tensors[ctx.width :])
        places = [4, 5, *range(4 + ctx.width, len(result))]
        needs = [ctx.needs_input_grad[k] for k in places]
        eager: dict[str, Any] = (
            {} if grad_pairs is None else {"pair_grads": (*ctx.index, grad_pairs)}
        )
        if grad is None:
            grads = pair_gradients(Scores(*source[:_WIDTH]), needs[:2], eager.get("pair_grads"))
        else:
            grads = gradients(source, params, grad, *ctx.question, needs, pairs=ctx.pairs, **eager)
        for k, x, need in zip(places, grads, needs, strict=False):
            result[k] = x if need else None
        return tuple(result)
