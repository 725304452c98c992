"""The one reduction: sums of an elementwise function of scores over each anchor's candidates, and their gradient.

    sums[k, i] = sum_j f_k(S_ij; params_i)          dL/dS_ij = sum_k g_ki f_k'(S_ij; params_i)

Sums of the rows and of the columns come out of one visit of the matrix and lie in one vector (A,), the rows' first. The
gradient of the scores is formed tile by tile and multiplied away into that of the embeddings, so that nothing of the
size of the matrix is held beyond scores that are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .answers import ANSWERS, Answer
from .pairs import Pairs, first_derivative_only, pair_gradient, pair_products
from .products import add_matmul_, matmul
from .scores import Embeddings, Scores, Tile, full_precision, project_, tiles

_WIDTH = len(Scores._fields)


def by_side(x: Tensor, sides: Sequence[int], shape: tuple[int, int]) -> dict[int, Tensor]:
    """Return what each side has of (..., A)."""
    return dict(zip(sides, x.split([shape[side] for side in sides], -1), strict=True))


def views(
    sides: Sequence[int], params: Sequence[Tensor], shape: tuple[int, int], part: tuple[slice, slice]
) -> list[tuple[Sequence[int], list[Tensor]]]:
    """Return the sides that share values of a tile, and parameters that broadcast with its scores, one or two times."""
    if all(p.shape[-1] == 1 for p in params):
        return [(sides, [p.unsqueeze(-1) for p in params])]
    found: list[tuple[Sequence[int], list[Tensor]]] = []
    for side in sides:
        own = [p if p.shape[-1] == 1 else by_side(p, sides, shape)[side][..., part[side]] for p in params]
        found.append(([side], [p.unsqueeze(-1 - side) for p in own]))
    return found


def tiled_sums(
    scores: Scores, pairs: Pairs, answer: Answer, over: str, sides: Sequence[int], params: Sequence[Tensor], early: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (K, A) sums of :meth:`itrloss.engine.answerers.Dense.sums`, visited tile by tile.

    With ``early``, of rows: also ``sum_j f(S_ij) y_j`` (N, D) with the unit columns y, of which the rows' gradient by
    an exponential is made, and ``sum_j f(S_ij) S_ij`` (N,), that by its scale. So a memory, columns without a gradient,
    is multiplied with once for both passes.
    """
    start = float("-inf") if answer.maximum else 0.0
    new = functools.partial(torch.zeros, dtype=scores.dtype, device=scores.rows.device)
    total = {side: new(answer.width, scores.shape[side]).fill_(start) for side in sides}
    direction, by_scale = new(scores.rows.shape if early else 0), new(len(scores.rows) if early else 0)
    for tile in tiles(scores, answer.buffers):
        for alike, own in views(sides, params, scores.shape, tile.part):
            values = answer.value(tile.scores, *own, out=tile.scratch)
            for k, x in enumerate(values if answer.width > 1 else (values,)):
                pairs.exclude_(x, tile.part, start, over)
                for side in alike:
                    part = total[side][k, tile.part[side]]
                    if answer.maximum:
                        torch.maximum(part, x.amax(1 - side), out=part)
                    else:
                        part.add_(x.sum(1 - side))
                if early:
                    add_matmul_(direction[tile.part[0]], x, scores.unit(1, tile.part[1]))
                    by_scale[tile.part[0]] += x.mul_(tile.scores).sum(1)
    return torch.cat(list(total.values()), 1), direction, by_scale


def tiled_gradient(
    scores: Scores,
    pairs: Pairs,
    answer: Answer,
    over: str,
    sides: Sequence[int],
    params: Sequence[Tensor],
    grad: Tensor,  # (K, A)
    needs: Sequence[bool],  # of the rows, the columns, and each parameter
    riding: tuple[Tensor | None, Tensor | None, Tensor] | None = None,  # pairs i, j, and the gradient of their scores
) -> list[Tensor]:
    """Return the gradients of rows, columns and parameters from those of the sums; empty where not needed."""
    assert answer.slopes is not None
    gradient, upstream = _Gradient(scores, needs[:2]), by_side(grad, sides, scores.shape)
    by_params = [torch.zeros_like(p, dtype=scores.dtype) for p in params]
    for tile in tiles(scores, answer.buffers + 1):
        total: Tensor | None = None
        for at, (alike, own) in enumerate(views(sides, params, scores.shape, tile.part)):
            each = [upstream[side][:, tile.part[side]].unsqueeze(-1 - side) for side in alike]
            g = functools.reduce(torch.add, each)
            found = answer.slopes(tile.scores, own, g, needs[2:], tile.scratch[at:])
            for of, by in zip(by_params, found[1:], strict=True):
                if by is not None:
                    pairs.exclude_(by, tile.part, 0.0, over)
                    if of.shape[-1] == 1:
                        of.add_(by.sum((-1, -2)).view(of.shape))
                    else:
                        (side,) = alike
                        by_side(of, sides, scores.shape)[side][..., tile.part[side]] += by.sum(-1 - side)
            if found[0] is not None:
                slope = pairs.exclude_(found[0], tile.part, 0.0, over)
                total = slope if total is None else total.add_(slope)
        gradient.add(tile, torch.zeros_like(tile.scores) if total is None else total)
    if riding is not None:
        gradient.add_pairs(*riding)
    return [*gradient.finish(), *(p if need else p.new_empty(0) for p, need in zip(by_params, needs[2:], strict=True))]


class _Gradient:
    """Takes the gradient of the scores tile by tile and holds that of the embeddings, or of the matrix."""

    def __init__(self, scores: Scores, needs: Sequence[bool]):
        self.scores, self.needs = scores, needs
        self.total: list[Tensor | None] = [None, None]

    def add(self, tile: Tile, grad: Tensor) -> None:
        """Account for a tile's gradient, which is taken over."""
        s = self.scores
        if s.cols is None:
            whole = grad.shape == s.shape  # autograd's may lie as a transposed matrix does
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
        """Account for the gradient (P,) of the scores of listed pairs; of their lengths it is taken as of all."""
        for side, (own, other) in enumerate(((i, j), (j, i))):
            if self.needs[side]:
                s: Any = self.scores
                y, inv = (s[1 - side], s[3 - side]) if s[8 - side] is None else (s[8 - side], None)
                self.total[side] = pair_gradient(self.total[side], own, y, inv, other, grad, s.shape[side])

    def _total(self, side: int) -> Tensor:
        total = self.total[side]
        if total is None:
            x: Any = self.scores[side]
            self.total[side] = total = x.new_zeros(x.shape, dtype=self.scores.dtype)
        return total

    def finish(self) -> list[Tensor]:
        """Return the gradients in the types of their tensors; empty where none is needed."""
        s, found = self.scores, []
        for side, (x, need) in enumerate(zip(s[:2], self.needs, strict=True)):
            if need and x is not None:
                found.append(project_(self._total(side), x, s[2 + side], s[7 + side]))
            else:
                found.append(s.rows.new_empty(0))
        return found


# ----------------------------------------------------------------------------------------------- operators

_library = torch.library.Library("itrloss", "DEF")
_SOURCE, _QUESTION = "Tensor?[] source, Tensor[] params", "str key, str over, int[] sides, bool triton"


def asked(source: Sequence[Tensor | None], pairs: Pairs | None) -> tuple[Scores, Pairs]:
    """Return what an operator is asked about."""
    scores = Scores(*source)  # type: ignore[arg-type]
    return scores, pairs or Pairs(scores.shape, (scores.row_ids, scores.col_ids), scores.rows.device)


def _sums(source, params, key, over, sides, triton, early, pairs=None):
    """(K, A) sums, and with ``early`` (N, D) directions and (A,) gradients by the scale."""
    scores, pairs = asked(source, pairs)
    with full_precision(scores.rows), torch.no_grad():
        if triton:
            from . import triton as kernels

            return kernels.sums(scores, pairs, key, over, tuple(sides), params, early)
        return tiled_sums(scores, pairs, ANSWERS[key], over, sides, params, early)


def _gradients(source, params, grad, key, over, sides, triton, needs, pairs=None, riding=None):
    """Gradients of rows, columns and parameters; ``riding``: and from (P,) of the scores of listed pairs."""
    scores, pairs = asked(source, pairs)
    with full_precision(scores.rows), torch.no_grad():
        if triton:
            from . import triton as kernels

            return kernels.gradient(scores, pairs, key, over, tuple(sides), params, grad, needs, riding)
        return tiled_gradient(scores, pairs, ANSWERS[key], over, sides, params, grad, needs, riding)


def _fake_sums(source, params, key, over, sides, triton, early):
    scores = Scores(*source)
    size = sum(scores.shape[side] for side in sides)
    sums = scores.rows.new_empty(ANSWERS[key].width, size, dtype=scores.dtype)
    return sums, sums.new_empty(scores.rows.shape if early else (0,)), sums.new_empty(size if early else 0)


def _fake_gradients(source, params, grad, key, over, sides, triton, needs):
    rows, cols = source[:2]
    given = rows, rows if cols is None else cols, *params
    return [x.new_empty(x.shape if need else (0,)) for x, need in zip(given, needs, strict=True)]


def operator(name: str, schema: str, function: Any, fake: Any) -> Any:
    """Register an operator; eager mode calls the function itself, as the dispatcher would only cost time."""
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


class Reduce(torch.autograd.Function):
    """(K, A) sums and (P,) scores of pairs, each if wanted, with their gradient.

    Where nothing of the embeddings' size is held, the gradient of positives rides along with that of the first sums:
    one gradient less of all embeddings at a time, 34 MB of 105 for InfoNCE at 8192 x 8192 x 512 (``pytest
    tests/test_operators.py -k memory``).
    """

    @staticmethod
    def forward(ctx: Any, pairs, question, index, *tensors):
        """``question``: arguments of the operators; ``index``: rows and columns of pairs, (None, None): p and p."""
        source, params = list(tensors[:_WIDTH]), list(tensors[_WIDTH:])
        rows, cols = ctx.needs_input_grad[3:5]
        ctx.pairs, ctx.question, ctx.index, ctx.early = pairs, question, index, False
        ctx.set_materialize_grads(False)
        products = None if index is None else pair_products(Scores(*source), *index)
        if question is None:
            ctx.save_for_backward(*source[:6], None, *source[7:])  # a gradient of pairs needs no kept scores
            return None, products
        key, _, sides, _ = question
        ctx.early = ANSWERS[key].exponential and sides == (0,) and rows and not cols and source[1] is not None
        found, direction, by_scale = sums(source, params, *question, ctx.early, pairs=pairs)
        if ctx.early:
            ctx.save_for_backward(source[0], source[2], source[7], params[0], direction, by_scale)
        else:
            ctx.save_for_backward(*tensors)
        return found, products

    @staticmethod
    def backward(ctx: Any, grad: Any, by_pair: Any):  # type: ignore[override]
        found: list[Any] = [None] * len(ctx.needs_input_grad)
        if not ctx.question and torch.is_grad_enabled():  # a second derivative is wanted
            xs, wanted = ctx.saved_tensors[:4], [k for k in (0, 1) if ctx.needs_input_grad[3 + k]]
            units = [Embeddings(x, inv is not None).unit() for x, inv in zip(xs[:2], xs[2:], strict=True)]
            left, right = (x if k is None else x[k] for x, k in zip(units, ctx.index, strict=True))
            by = torch.autograd.grad((left * right).sum(1), [xs[k] for k in wanted], by_pair, create_graph=True)
            for k, x in zip(wanted, by, strict=True):
                found[3 + k] = x
            return tuple(found)
        first_derivative_only()
        if ctx.early and grad is not None:
            rows, row_inv, unit, scale, direction, by_scale = ctx.saved_tensors
            found[3] = project_(direction * (grad[0] * scale)[:, None], rows, row_inv, unit)
            if ctx.needs_input_grad[3 + _WIDTH]:
                of_scale = grad[0] * by_scale
                found[3 + _WIDTH] = of_scale.sum().view(1) if scale.numel() == 1 else of_scale
        elif grad is not None or by_pair is not None:
            tensors, at = ctx.saved_tensors, [3, 4, *range(3 + _WIDTH, len(found))]
            source, params = list(tensors[:_WIDTH]), list(tensors[_WIDTH:])
            needs = [ctx.needs_input_grad[k] for k in at]
            if grad is None:
                gradient = _Gradient(Scores(*source), needs[:2])
                gradient.add_pairs(ctx.index[0], ctx.index[1], by_pair)
                by = gradient.finish()
            else:
                riding: dict[str, Any] = {} if by_pair is None else {"riding": (ctx.index[0], ctx.index[1], by_pair)}
                by = gradients(source, params, grad, *ctx.question, needs, pairs=ctx.pairs, **riding)
            for k, x, need in zip(at, by, needs, strict=False):
                found[k] = x if need else None
        return tuple(found)
