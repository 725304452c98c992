"""Answers tile by tile: nothing of the size of the matrix is held but precomputed scores.

    total_i  = sum_j f(z_ij)                              z_ij = scale_i S_ij + shift_i
    dL/dS_ij = sum over the sides of g_i f'(z_ij) scale_i

The gradient of a tile's scores is multiplied at once into the gradient of the embeddings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Inputs, Side, Tile, tiles
from .pair_scores import ListedPairs, add_pair_gradient
from .products import add_matmul_, matmul
from .question import ColumnsView, Question, RowsView, Value, View, has_each, joined
from .ranking import argmax
from .vectors import chunks, compute_dtype, project


def sums(question: Question, inputs: Inputs, guide: Inputs | None) -> Tensor:
    """Return the sums of a question: (A,) of one term, (K, A) of several."""
    totals = [SideTotals(inputs, 0.0) for _ in question.terms]
    for tile in tiles(inputs, guide):
        for view in question.views(tile):
            for term, total in zip(question.terms, totals, strict=True):
                values = term.values(view.affine(), view.params())
                view.exclude_(values)
                for side, dim in view.candidates:
                    total.join(side, tile, values.sum(dim))
    sums_of_terms = [total.of_sides(question.sides) for total in totals]
    return sums_of_terms[0] if len(sums_of_terms) == 1 else torch.stack(sums_of_terms)


def highest(question: Question, inputs: Inputs, guide: Inputs | None) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    total = SideTotals(inputs, -math.inf)
    for tile in tiles(inputs, guide):
        for view in question.views(tile):
            z = view.exclude_(view.affine(), -math.inf)
            for side, dim in view.candidates:
                total.join(side, tile, z.amax(dim))
    return total.of_sides(question.sides)


class Best(NamedTuple):
    """The highest score of each anchor and its candidate, (A,); -inf and -1 without one."""

    values: Tensor
    indices: Tensor


def hardest(question: Question, inputs: Inputs) -> Best:
    """Return the highest score that counts of each anchor, and its candidate."""
    best_of_side: dict[int, Best] = {}
    for tile in tiles(inputs):
        for side in question.sides:
            view = ColumnsView(question, tile, 0) if side else RowsView(question, tile, 0)
            best = best_of_tile(view, tile.places[1 - side].start)
            if len(best.values) == inputs.shape[side] and side not in best_of_side:
                best_of_side[side] = best
                continue
            if side not in best_of_side:
                best_of_side[side] = no_best(inputs, side)
            join_best_(best_of_side[side], best, tile.places[side])
    values = torch.cat([best_of_side[side].values for side in question.sides])
    indices = torch.cat([best_of_side[side].indices for side in question.sides])
    return Best(values, indices)


def best_of_tile(view: View, first: int) -> Best:
    """Return the best candidate (r,) of each anchor in a tile; -inf and -1 without one.

    ``first``: the number of the tile's first candidate.
    """
    scores = view.exclude_(view.scores.clone(), -math.inf)
    values, indices = argmax(scores, 1)
    indices += first
    return Best(values, indices.masked_fill_(values == -math.inf, -1))


def no_best(inputs: Inputs, side: int) -> Best:
    """Return what the anchors of a side have before any tile is visited."""
    size = inputs.shape[side]
    values = torch.full((size,), -math.inf, dtype=inputs.dtype, device=inputs.like.device)
    return Best(values, torch.full_like(values, -1, dtype=torch.int64))


def join_best_(known: Best, best: Best, place: slice) -> None:
    """Replace the best candidates of some anchors where others are better; nan is the highest."""
    values = known.values[place]
    indices = known.indices[place]
    better = (best.values > values) | (best.values.isnan() & ~values.isnan())
    indices.copy_(torch.where(better, best.indices, indices))
    values.copy_(torch.where(better, best.values, values))


# ------------------------------------------------------------------------------------- the gradient


class Needs(NamedTuple):
    """What a gradient is needed of."""

    rows: bool
    cols: bool
    row_bias: bool
    col_bias: bool
    scores: bool = False
    scale: bool = False
    shift: bool = False
    params: tuple[bool, ...] = ()
    #: In which dtypes Triton writes the gradients of rows and columns.
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)


class Gradients(NamedTuple):
    """Gradients, None where they are not needed."""

    rows: Tensor | None  # (N, D)
    cols: Tensor | None  # (M, D)
    row_bias: Tensor | None  # (N,)
    col_bias: Tensor | None  # (M,)
    scores: Tensor | None  # (N, M)
    scale: Tensor | None
    shift: Tensor | None
    params: tuple[Tensor | None, ...]


def gradients(
    question: Question,
    inputs: Inputs,
    guide: Inputs | None,
    grad: Tensor,  # of the sums, (A,) or (K, A)
    needs: Needs,
    listed: ListedPairs | None = None,  # pairs whose scores have a gradient of their own
) -> Gradients:
    """Return the gradients of a question's inputs and values, from the gradient of its sums."""
    question_gradients = QuestionGradients(question, grad, needs)
    scores = ScoreGradients(inputs, needs)
    for tile in tiles(inputs, guide):
        grad_scores = question_gradients.of_scores(tile)
        if listed is not None and grad_scores.shape == inputs.shape:  # they ride on the only tile
            listed.add_to_(grad_scores)
            listed = None
        scores.add(tile.places, grad_scores)
    if listed is not None:
        scores.add_pairs(listed)
    scale, shift, params = question_gradients.finish()
    return scores.finish()._replace(scale=scale, shift=shift, params=params)


def pair_gradients(inputs: Inputs, needs: Needs, listed: ListedPairs) -> Gradients:
    """Return the gradients of what listed pairs were scored from."""
    scores = ScoreGradients(inputs, needs)
    scores.add_pairs(listed)
    return scores.finish()


def gradients_of_scores(inputs: Inputs, needs: Needs, grad: Tensor) -> Gradients:
    """Return the gradients of what scores are made of, from the gradient (N, M) of all scores."""
    n, m = grad.shape
    scores = ScoreGradients(inputs, needs)
    scores.add((slice(0, n), slice(0, m)), grad)
    return scores.finish()


class QuestionGradients:
    """Forms the gradient of scores tile by tile, and adds up the gradients of a question's values.

    The gradients of limits are zero.
    """

    def __init__(self, question: Question, grad: Tensor, needs: Needs):
        self.question = question
        self.needs = needs
        self.grads = [grad] if len(question.terms) == 1 else list(grad)  # K times (A,)
        # Where no value gets a gradient, the scale is multiplied in before tiles are visited. The
        # slopes of several terms may cancel: they are scaled afterwards, which rounds once.
        values_trained = needs.scale or needs.shift or any(needs.params)
        self.folds_scale = len(question.terms) == 1 and not values_trained
        scale = question.scale
        if self.folds_scale and not (isinstance(scale, float) and scale == 1.0):
            self.grads = [x * scale for x in self.grads]
        self.scale = zeros_like_value(question.scale, grad) if needs.scale else None
        self.shift = zeros_like_value(question.shift, grad) if needs.shift else None
        self.params: list[Tensor | None] = []
        for param, needed in zip(question.params, needs.params, strict=True):
            self.params.append(zeros_like_value(param, grad) if needed else None)

    def of_scores(self, tile: Tile) -> Tensor:
        """Return the gradient dL/dS (r, c) of a tile's scores; add up the gradients of values."""
        first, *others = self.question.views(tile)
        total = self._add_view(first)
        for view in others:  # one at a time, so that two tiles are held at most
            total.add_(self._add_view(view))
        return total

    def _add_view(self, view: View) -> Tensor:
        """Return dL/dS (r, c) as one view asks for it; add up the gradients of values."""
        question = self.question
        by_z, *by_params = self._slopes(view, 0)
        for k in range(1, len(question.terms)):
            by_z.add_(self._slopes(view, k)[0])
        view.exclude_(by_z)
        if self.shift is not None:
            self._add_value(self.shift, by_z, view)
        if self.scale is not None:
            self._add_value(self.scale, by_z * view.scores, view)
        if question.teaches:
            by_params = by_params[1:]
        for total, by_param in zip(self.params, by_params, strict=False):
            if total is not None:
                self._add_value(total, view.exclude_(by_param), view)
        if not self.folds_scale:
            by_z.mul_(view.column(question.scale))
        return view.of_matrix(by_z)

    def _slopes(self, view: View, k: int) -> list[Tensor]:
        """Return the gradient of the k-th sums by z and by the parameters: tensors (r, c)."""
        term = self.question.terms[k]
        return term.slopes(view.affine(), view.params(), view.upstream(self.grads[k]))

    def _add_value(self, total: Tensor, grad: Tensor, view: View) -> None:
        """Add the gradient (r, c) of a value in each pair."""
        if total.dim() == 2:
            total[view.slot, view.anchors] += grad.sum(1)
        elif has_each(total):
            total[view.anchors] += grad.sum(1)
        else:
            total += grad.sum()

    def finish(self) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        """Return the gradients of the scale, of the shift, and of the parameters."""
        return self.scale, self.shift, tuple(self.params)


class ScoreGradients:
    """Adds up the gradients of what scores are made of, from the gradient of the scores."""

    def __init__(self, inputs: Inputs, needs: Needs):
        self.inputs = inputs
        self.needs = needs
        self.scores: Tensor | None = None
        n, m = inputs.shape
        self.rows = Total(n)
        self.cols = Total(m)
        self.row_bias = Total(n)
        self.col_bias = Total(m)

    def add(self, places: tuple[slice, slice], grad: Tensor) -> None:
        """Add what the gradient of a tile's scores (r, c) contributes; it may become the result."""
        r, c = places
        inputs = self.inputs
        needs = self.needs
        if needs.scores:
            if grad.shape == inputs.shape:
                self.scores = grad.contiguous()
            else:
                self._whole_scores()[places] = grad
        if needs.rows:
            self.rows.add_product(r, grad, inputs.cols.vectors(c))
        if needs.cols:
            self.cols.add_product(c, grad.T, inputs.rows.vectors(r))
        if needs.row_bias:
            self.row_bias.add(r, grad.sum(1))
        if needs.col_bias:
            self.col_bias.add(c, grad.sum(0))

    def add_pairs(self, listed: ListedPairs) -> None:
        """Add what the gradient of listed pairs' scores contributes."""
        needs = self.needs
        if needs.scores:
            listed.add_to_(self._whole_scores())
        if needs.rows:
            self.rows.value = add_pair_gradient(self.rows.value, listed, self.inputs, 0)
        if needs.cols:
            self.cols.value = add_pair_gradient(self.cols.value, listed, self.inputs, 1)
        if needs.row_bias:
            self.row_bias.value = listed.add_by_side(self.row_bias.whole(self.inputs), 0)
        if needs.col_bias:
            self.col_bias.value = listed.add_by_side(self.col_bias.whole(self.inputs), 1)

    def _whole_scores(self) -> Tensor:
        """Return the (N, M) gradient of given scores, zeros at first."""
        if self.scores is None:
            assert self.inputs.scores is not None
            self.scores = torch.zeros_like(
                self.inputs.scores, memory_format=torch.contiguous_format
            )
        return self.scores

    def finish(self) -> Gradients:
        """Return the gradients of the inputs; the values have none yet."""
        inputs = self.inputs
        needs = self.needs
        return Gradients(
            rows=of_vectors(self.rows, inputs.rows) if needs.rows else None,
            cols=of_vectors(self.cols, inputs.cols) if needs.cols else None,
            row_bias=self.row_bias.whole(inputs) if needs.row_bias else None,
            col_bias=self.col_bias.whole(inputs) if needs.col_bias else None,
            scores=self._whole_scores() if needs.scores else None,
            scale=None,
            shift=None,
            params=(None,) * len(needs.params),
        )


def of_vectors(total: Total, side: Side) -> Tensor:
    """Return the gradient of a side's vectors (N, D) from the gradient of its unit vectors."""
    grad = total.value
    if grad is None:
        like = side.like
        return torch.zeros_like(like, dtype=side.vectors(slice(0, 0)).dtype)
    if side.inv is None:
        return grad
    if side.unit is not None:
        return project(grad, side.unit, side.inv)
    for part in chunks(grad):  # temporaries stay small
        grad[part] = project(grad[part], side.vectors(part), side.inv[part])
    return grad


def zeros_like_value(value: Value | None, grad: Tensor) -> Tensor:
    """Return zeros of the shape of a value, which gets a gradient."""
    assert isinstance(value, Tensor)
    return torch.zeros_like(value, dtype=grad.dtype)


class Total:
    """A vector or matrix that is joined from parts; a part that is all of it is not copied."""

    def __init__(self, size: int, empty: float = 0.0):
        self.size = size
        self.empty = empty  # 0: parts are added; -inf: the largest entries are taken
        self.value: Tensor | None = None

    def add(self, place: slice, x: Tensor) -> None:
        """Join some of the entries with others, (r, ...)."""
        if self.value is None and len(x) == self.size:
            self.value = x
            return
        own = self._allocated(x)[place]
        if self.empty == 0.0:
            own.add_(x)
        else:
            torch.maximum(own, x, out=own)

    def add_product(self, place: slice, a: Tensor, b: Tensor) -> None:
        """Add the product of (r, k) and (k, D) to the entries (r, D) of a matrix."""
        if self.value is None and len(a) == self.size:
            self.value = matmul(a, b)
            return
        add_matmul_(self._allocated(b)[place], a, b)

    def _allocated(self, like: Tensor) -> Tensor:
        """Return the whole value (size, ...), filled with ``empty`` at first."""
        if self.value is None:
            self.value = like.new_full((self.size, *like.shape[1:]), self.empty)
        return self.value

    def whole(self, inputs: Inputs) -> Tensor:
        """Return the vector (size,)."""
        if self.value is None:
            like = inputs.like
            return torch.full((self.size,), self.empty, dtype=inputs.dtype, device=like.device)
        return self.value


class SideTotals:
    """Sums, or maxima, of the rows and of the columns, joined from tiles."""

    def __init__(self, inputs: Inputs, empty: float):
        self.inputs = inputs
        n, m = inputs.shape
        self.totals = Total(n, empty), Total(m, empty)

    def join(self, side: int, tile: Tile, values: Tensor) -> None:
        """Join the values (r,) of a side's anchors in a tile with those of other tiles."""
        self.totals[side].add(tile.places[side], values)

    def of_sides(self, sides: tuple[int, ...]) -> Tensor:
        """Return the values (A,) of some sides."""
        return joined([self.totals[side].whole(self.inputs) for side in sides])


def summed_scores(inputs: Inputs, side: int) -> Tensor:
    """Return the sums (A,) of all scores of a side's vectors.

    They are the products of the vectors with the sum of the others: no matrix is formed.
    """
    if inputs.scores is not None:
        return inputs.scores.sum(1 - side)
    own, others = inputs.sides(side)
    if others.inv is None:
        total = others.like.sum(0, dtype=compute_dtype(others.like))
    else:
        total = torch.stack([others.vectors(part).sum(0) for part in chunks(others.like)]).sum(0)
    sums = torch.cat([own.vectors(part) @ total for part in chunks(own.like)])
    if own.bias is not None:
        sums = sums + own.bias * len(others.like)
    if others.bias is not None:
        sums = sums + others.bias.sum()
    return sums
