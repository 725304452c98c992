"""The one reduction: sums of an elementwise function of scores over each anchor's candidates, and their gradient.

    sums[k, i] = sum_j f_k(S_ij; params_i)          dL/dS_ij = sum_k g_ki f_k'(S_ij; params_i)

Sums of the rows and of the columns come out of one visit of the matrix and lie in one vector (A,), the rows' first. The
gradient of the scores is formed tile by tile and multiplied away into that of the embeddings, so that nothing of the
size of the matrix is held beyond scores that are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .answers import ANSWERS, Answer, slopes_of
from .pairs import Pairs, first_derivative_only, pair_products, weighted_sums
from .products import add_matmul_, matmul
from .scores import Scores, Tile, chunks, full_precision, project_, tiles

_WIDTH = len(Scores._fields)


class View(NamedTuple):
    """A tile as seen by sides that share its values."""

    sums: list[tuple[int, slice]]  # for each: the dimension summed, and where its anchors are in the vector
    params: list[Tensor]  # broadcast with the tile


def _views(tile: Tile, sides: Sequence[int], first: int, params: Sequence[Tensor]) -> list[View]:
    """Split a tile by sides; where parameters are one number each, one evaluation serves both.

    ``first``: where the columns' anchors begin.
    """
    places = []
    for side in sides:
        part, start = (tile.rows, 0) if side == 0 else (tile.cols, first)
        places.append((1 - side, slice(start + part.start, start + part.stop)))
    if _single(params):
        return [View(places, [p.unsqueeze(-1) for p in params])]
    views = []
    for dim, anchors in places:
        given = [(p if p.shape[-1] == 1 else p[..., anchors]).unsqueeze(dim - 2) for p in params]
        views.append(View([(dim, anchors)], given))
    return views


def _sizes(shape: tuple[int, int], sides: Sequence[int]) -> tuple[int, int]:
    """Return the number of anchors and where the columns begin among them."""
    n, m = shape
    return (n + m, n) if len(sides) == 2 else (shape[sides[0]], 0)


def _single(params: Sequence[Tensor]) -> bool:
    """Return whether parameters are one number each, for all anchors."""
    for p in params:  # noqa: SIM110  # a generator costs more than what it looks at
        if p.shape[-1] != 1:
            return False
    return True


def tiled_sums(
    scores: Scores, pairs: Pairs, answer: Answer, over: str, sides: Sequence[int], params: Sequence[Tensor], early: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (K, A) sums of :func:`itrloss.engine.matrix.dense_sums`, visited tile by tile.

    With ``early``, of rows: also ``sum_j f(S_ij) y_j`` (N, D) with the unit columns y, of which the rows' gradient by
    an exponential is made, and ``sum_j f(S_ij) S_ij`` (N,), that by its scale. So a memory, columns without a gradient,
    is multiplied with once for both passes.
    """
    size, first = _sizes(scores.shape, sides)
    start = float("-inf") if answer.maximum else 0.0
    sums = torch.full((answer.width, size), start, dtype=scores.dtype, device=scores.rows.device)
    direction = sums.new_zeros(scores.rows.shape if early else (0,))
    by_scale = sums.new_zeros(size if early else 0)
    for tile in tiles(scores, answer.buffers):
        for view in _views(tile, sides, first, params):
            values = answer.value(tile.scores, *view.params, out=tile.scratch)
            for k, values in enumerate(values if answer.width > 1 else (values,)):  # noqa: B020
                values = _whole(values, tile, view.params)
                pairs.exclude_(values, tile, start, over)
                for dim, anchors in view.sums:
                    part = sums[k, anchors]
                    if answer.maximum:
                        torch.maximum(part, values.amax(dim), out=part)
                    else:
                        part.add_(values.sum(dim))
                if early:
                    right = scores.unit_cols(tile.cols) if tile.right is None else tile.right
                    add_matmul_(direction[tile.rows], values, right)
                    by_scale[tile.rows] += values.mul_(tile.scores).sum(1)
    return sums, direction, by_scale


def _whole(values: Tensor, tile: Tile, params: Sequence[Tensor]) -> Tensor:
    """Return values of the tile's shape that may be written to: a term may return what it was given, or less."""
    if values.shape != tile.scores.shape:
        return values.expand_as(tile.scores).clone()
    own = values.untyped_storage()._cdata
    given = (tile.scores, *params)
    return values.clone() if any(x.untyped_storage()._cdata == own for x in given) else values


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
    gradient, first = _Gradient(scores, needs[:2]), _sizes(scores.shape, sides)[1]
    by_params = [torch.zeros_like(p, dtype=scores.dtype) for p in params]
    for tile in tiles(scores, answer.buffers + (len(sides) == 2 and not _single(params))):
        total: Tensor | None = None
        for at, view in enumerate(_views(tile, sides, first, params)):
            g = [functools.reduce(torch.add, [x[a].unsqueeze(dim) for dim, a in view.sums]) for x in grad]
            found = slopes_of(answer, tile.scores, view.params, g, needs[2:], tile.scratch[at:])
            for by, of in zip(found[1:], by_params, strict=True):
                if by is not None:
                    for part in by.unbind() if by.dim() > 2 else (by,):
                        pairs.exclude_(part, tile, 0.0, over)
                    _add_by_anchor(of, by, view)
            if found[0] is not None:
                slope = pairs.exclude_(found[0], tile, 0.0, over)
                total = slope if total is None else total.add_(slope)
        gradient.add(tile, torch.zeros_like(tile.scores) if total is None else total)
    if riding is not None:
        gradient.add_pairs(*riding)
    return [*gradient.finish(), *(p if need else p.new_empty(0) for p, need in zip(by_params, needs[2:], strict=True))]


def _add_by_anchor(total: Tensor, by: Tensor, view: View) -> None:
    """Add the gradients by a parameter, each like the tile, to those of its anchors or of the one number."""
    if total.shape[-1] == 1:
        total.add_(by.sum((-1, -2)).view(total.shape))
        return
    for dim, anchors in view.sums:  # one, as both share only single numbers
        total[..., anchors].add_(by.sum(dim - 2))


class _Gradient:
    """Takes the gradient of the scores tile by tile and holds that of the embeddings, or of the matrix."""

    def __init__(self, scores: Scores, needs: Sequence[bool]):
        self.scores, self.needs = scores, needs
        self.rows: Tensor | None = None
        self.cols: Tensor | None = None

    def add(self, tile: Tile, grad: Tensor) -> None:
        """Account for a tile's gradient, which is taken over."""
        (n, m), s = self.scores.shape, self.scores
        if s.cols is None:
            if grad.shape == (n, m):
                self.rows = grad.contiguous()  # autograd's may lie as a transposed matrix does
            elif self.needs[0]:
                self.rows = grad.new_empty(n, m) if self.rows is None else self.rows
                self.rows[tile.rows, tile.cols] = grad
            return
        if self.needs[0]:
            right = s.unit_cols(tile.cols) if tile.right is None else tile.right
            self.rows = _add_product(self.rows, n, tile.rows, grad, right)
        if self.needs[1]:
            self.cols = _add_product(self.cols, m, tile.cols, grad.T, s.unit_rows(tile.rows))

    def add_pairs(self, i: Tensor | None, j: Tensor | None, grad: Tensor) -> None:
        """Account for the gradient (P,) of the scores of listed pairs; of their lengths it is taken as of all."""
        s = self.scores
        assert s.cols is not None
        sides = (s.rows, s.row_inv, i), (s.cols, s.col_inv, j)
        for side, ((x, _, index), (other, inv, others)) in enumerate((sides, sides[::-1])):
            if not self.needs[side]:
                continue
            total = (self.rows, self.cols)[side]
            total = grad.new_zeros(x.shape) if total is None else total
            weight = grad if inv is None else grad * (inv if others is None else inv[others])
            if index is None or others is None:
                for part in chunks(x):
                    total[part].addcmul_(other[part].to(total.dtype), weight[part, None])
            else:
                total.add_(weighted_sums(other.to(total.dtype), others, weight, index, len(x)))
            self.rows, self.cols = (total, self.cols) if side == 0 else (self.rows, total)

    def finish(self) -> list[Tensor]:
        """Return the gradients in the types of their tensors; empty where none is needed."""
        s, found = self.scores, []
        for x, inv, total, need in zip((s.rows, s.cols), s[2:4], (self.rows, self.cols), self.needs, strict=True):
            if x is None or not need:
                found.append(s.rows.new_empty(0))
            else:  # zeros where there was no tile
                found.append(x.new_zeros(x.shape) if total is None else project_(total, x, inv))
        return found


def _add_product(total: Tensor | None, size: int, part: slice, a: Tensor, b: Tensor) -> Tensor:
    """Add ``a @ b`` to some of the sums (size, D), which begin with the first product if it is of all of them."""
    if total is None and len(a) == size:
        return matmul(a, b)
    total = b.new_zeros(size, b.shape[1]) if total is None else total
    add_matmul_(total[part], a, b)
    return total


# ----------------------------------------------------------------------------------------------- operators

_library = torch.library.Library("itrloss", "DEF")
_QUESTION = "str key, str over, int[] sides, bool triton"


def _sums(source, params, key, over, sides, triton, early, pairs=None):
    """(K, A) sums, and with ``early`` (N, D) directions and (A,) gradients by the scale."""
    scores = Scores(*source)
    pairs = pairs or Pairs(scores.shape, (scores.row_ids, scores.col_ids), scores.rows.device)
    with full_precision(scores.rows), torch.no_grad():
        if triton:
            from . import triton as kernels

            return kernels.sums(scores, pairs, key, over, tuple(sides), params, early)
        return tiled_sums(scores, pairs, ANSWERS[key], over, tuple(sides), params, early)


def _gradients(source, params, grad, key, over, sides, triton, needs, pairs=None, riding=None):
    """Gradients of rows, columns and parameters; ``riding``: and from (P,) of the scores of listed pairs."""
    scores = Scores(*source)
    pairs = pairs or Pairs(scores.shape, (scores.row_ids, scores.col_ids), scores.rows.device)
    with full_precision(scores.rows), torch.no_grad():
        if triton:
            from . import triton as kernels

            return kernels.gradient(scores, pairs, key, over, tuple(sides), params, grad, needs, riding)
        return tiled_gradient(scores, pairs, ANSWERS[key], over, tuple(sides), params, grad, needs, riding)


def _fake_sums(source, params, key, over, sides, triton, early):
    scores = Scores(*source)
    size, _ = _sizes(scores.shape, sides)
    sums = scores.rows.new_empty(ANSWERS[key].width, size, dtype=scores.dtype)
    return sums, sums.new_empty(scores.rows.shape if early else (0,)), sums.new_empty(size if early else 0)


def _fake_gradients(source, params, grad, key, over, sides, triton, needs):
    scores = Scores(*source)
    both = scores.rows, scores.rows if scores.cols is None else scores.cols
    found = [x.new_empty(x.shape if need else (0,)) for x, need in zip(both, needs[:2], strict=True)]
    return found + [p.new_empty(p.shape if n else (0,)) for p, n in zip(params, needs[2:], strict=True)]


def _operator(name: str, schema: str, function: Any, fake: Any) -> Any:
    """Register an operator; eager mode calls the function itself, as the dispatcher would only cost time."""
    _library.define(name + schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"itrloss::{name}", fake, lib=_library)
    registered = getattr(torch.ops.itrloss, name).default

    def call(*args: Any, **eager: Any) -> Any:
        return registered(*args) if torch.compiler.is_compiling() else function(*args, **eager)

    return call


sums = _operator(
    "reduce",
    f"(Tensor?[] source, Tensor[] params, {_QUESTION}, bool early) -> (Tensor, Tensor, Tensor)",
    _sums,
    _fake_sums,
)
gradients = _operator(
    "reduce_backward",
    f"(Tensor?[] source, Tensor[] params, Tensor grad, {_QUESTION}, bool[] needs) -> Tensor[]",
    _gradients,
    _fake_gradients,
)


class Reduce(torch.autograd.Function):
    """(K, A) sums with their gradient, by the two operators; and (P,) scores of listed pairs, or None.

    Where nothing of the embeddings' size is held, the gradient of positives rides along with that of the first sums:
    one gradient less of all embeddings at a time, 34 MB of 105 for InfoNCE at 8192 x 8192 x 512 (``pytest
    tests/test_operators.py -k memory``).
    """

    @staticmethod
    def forward(ctx: Any, pairs, key, over, sides, triton, listed, *tensors):
        source, params = list(tensors[:_WIDTH]), list(tensors[_WIDTH:])
        rows, cols = ctx.needs_input_grad[6:8]
        ctx.early = ANSWERS[key].exponential and tuple(sides) == (0,) and rows and not cols and source[1] is not None
        found, direction, by_scale = sums(source, params, key, over, sides, triton, ctx.early, pairs=pairs)
        ctx.question, ctx.pairs, ctx.count = (key, over, sides, triton), pairs, len(params)
        ctx.index = (None, None) if not listed or pairs.one_to_one else pairs.listed
        ctx.set_materialize_grads(False)
        if ctx.early:
            ctx.save_for_backward(source[0], source[2], params[0], direction, by_scale)
        else:
            ctx.save_for_backward(*tensors)
        return found, pair_products(*source[:4], *ctx.index) if listed else None

    @staticmethod
    def backward(ctx: Any, grad: Any, by_pair: Any):  # type: ignore[override]
        first_derivative_only()
        if grad is None and by_pair is None:
            return (None,) * len(ctx.needs_input_grad)
        if ctx.early and grad is not None:
            rows, row_inv, scale, direction, by_scale = ctx.saved_tensors
            found = project_(direction * (grad[0] * scale)[:, None], rows, row_inv)
            of_scale = grad[0] * by_scale if ctx.needs_input_grad[6 + _WIDTH] else None
            if of_scale is not None and scale.numel() == 1:
                of_scale = of_scale.sum().view(1)
            return *([None] * 6), found, *([None] * (_WIDTH - 1)), of_scale, *([None] * (ctx.count - 1))
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[6:]
        needed = [*needs[:2], *needs[_WIDTH:]]
        source, params = list(tensors[:_WIDTH]), list(tensors[_WIDTH:])
        riding: dict[str, Any] = {} if by_pair is None else {"riding": (*ctx.index, by_pair)}
        if grad is None and by_pair is not None:
            size, _ = _sizes(Scores(*source).shape, ctx.question[2])
            grad = by_pair.new_zeros(ANSWERS[ctx.question[0]].width, size)
        found = gradients(source, params, grad, *ctx.question, needed, pairs=ctx.pairs, **riding)
        found = [x if need else None for x, need in zip(found, needed, strict=True)]
        return *([None] * 6), *found[:2], *([None] * (_WIDTH - 2)), *found[2:]
