"""The one loop over the blocks of a score matrix, and its gradient in closed form.

    total_i  = sum_j f(z_ij)                              z_ij = scale_i S_ij + shift_i
    dL/dS_ij = sum over the sides of g_i f'(z_ij) scale_i

A small matrix is one block, whose slopes f' may be kept for the backward pass. A large one is many:
the backward pass visits them again, and the gradient of a block's scores is multiplied at once into
the gradient of the embeddings. So nothing of the size of the matrix is held but kept scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Inputs, Side, Tile, tiles
from .pair_scores import ListedPairs, add_pair_gradient
from .products import add_matmul_, matmul
from .question import Question, View, joined, views
from .ranking import argmax
from .relation import Places, Relation
from .vectors import chunks, compute_dtype, project


class Hardest(NamedTuple):
    """Score (A,) and index (A,) int64 of each anchor's hardest negative; -inf and -1 if none."""

    values: Tensor
    indices: Tensor


def join_(
    totals: Tensor,  # (A,)
    view: View,
    x: Tensor,  # (r, c)
    reduce: Callable[..., Tensor] = torch.sum,
    join: Callable[..., Tensor] = torch.add,
) -> None:
    """Join the sums, or the maxima, of x by anchor; the first block of an anchor overwrites."""
    places = view.tile.places
    for side in view.sides:
        own = totals[view.question.anchors(side, places[side])]
        if places[1 - side].start == 0:
            reduce(x, 1 - side, out=own)
        else:
            join(own, reduce(x, 1 - side), out=own)


def sums(question: Question, inputs: Inputs, guide: Inputs | None = None) -> Tensor:
    """Return the sums (A,) of a question."""
    like = inputs.like
    totals = torch.empty(question.size, dtype=compute_dtype(like), device=like.device)
    if 0 in inputs.shape:  # there is no block
        return totals.zero_()
    for tile in tiles(inputs, guide):
        for view in views(question, tile):
            join_(totals, view, view.values())
    return totals


def block_of(scores: Tensor) -> Tile:
    """Return a whole matrix (N, M) as one block."""
    n, m = scores.shape
    return Tile((slice(0, n), slice(0, m)), scores)


def sums_and_slopes(question: Question, scores: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the sums (A,) over one block, and the slopes (N, M) of each view of it."""
    parts: list[Tensor] = []
    slopes: list[Tensor] = []
    for view in views(question, block_of(scores)):
        values, of_view = view.values_and_slopes()
        parts += [values.sum(1 - side) for side in view.sides]
        slopes.append(of_view)
    return joined(parts), slopes


def hardest_of_block(question: Question, scores: Tensor) -> Hardest:
    """Return the highest score that counts of each anchor in one block, and its candidate."""
    values: list[Tensor] = []
    indices: list[Tensor] = []
    for view in views(question, block_of(scores)):
        counted = view.exclude_(scores.clone(), -math.inf)
        for side in view.sides:
            value, index = argmax(counted, 1 - side)
            values.append(value)
            indices.append(index)
    return Hardest(joined(values), joined(indices))


def std_of_block(relation: Relation, scores: Tensor, sides: Sequence[int]) -> Tensor:
    """Return the (A,) standard deviations of each anchor's negatives in one block, 0 without any.

    They are about the mean, so that no digits of the squares cancel.
    """
    places = block_of(scores).places
    negatives = relation.exclude_(scores.clone(), places, 0.0)
    of_sides = []
    for side in sides:
        count = relation.negative_counts(side, scores.dtype)
        mean = negatives.sum(1 - side) / count
        about = scores - (mean if side else mean[:, None])
        length = torch.linalg.vector_norm(relation.exclude_(about, places, 0.0), dim=1 - side)
        of_sides.append(length / count**0.5)
    return joined(of_sides)


def moments(question: Question, inputs: Inputs) -> Tensor:
    """Return the number of each anchor's negatives, the mean of their scores and the sum of their
    squares about it: (3, A).
    """
    relation = question.relation
    like = inputs.like
    known = torch.zeros(3, question.size, dtype=compute_dtype(like), device=like.device)
    for tile in tiles(inputs):
        negatives = relation.exclude_(tile.scores.clone(), tile.places, 0.0)
        for side in question.sides:
            own = known[:, question.anchors(side, tile.places[side])]
            of_tile = moments_of_tile(relation, tile, side, negatives)
            is_first = tile.places[1 - side].start == 0
            own.copy_(of_tile if is_first else joined_moments(own, of_tile))
    return known


def moments_of_tile(relation: Relation, tile: Tile, side: int, negatives: Tensor) -> Tensor:
    """Return the moments (3, a) of one block for a side's anchors; ``negatives`` (r, c): its scores
    with 0 for all other pairs.
    """
    number = relation.negatives_within(side, tile.places).to(negatives.dtype)
    mean = negatives.sum(1 - side) / number.clamp_min(1)
    about = tile.scores - (mean if side else mean[:, None])
    squares = relation.exclude_(about, tile.places, 0.0).square_().sum(1 - side)
    return torch.stack([number, mean, squares])


def joined_moments(first: Tensor, second: Tensor) -> Tensor:
    """Return the moments (3, A) of the candidates of two blocks, of which one may have none."""
    number, mean, squares = first
    others, other_mean, other_squares = second
    total = number + others
    share = others / total.clamp_min(1)
    distance = other_mean - mean
    between = distance.square() * number * share
    return torch.stack([total, mean + distance * share, squares + other_squares + between])


def highest(question: Question, inputs: Inputs, guide: Inputs | None = None) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    totals = torch.full((question.size,), -math.inf, dtype=inputs.dtype, device=inputs.like.device)
    for tile in tiles(inputs, guide):
        for view in views(question, tile):
            highest_of_view = view.exclude_(view.exponents(), -math.inf)
            join_(totals, view, highest_of_view, torch.amax, torch.maximum)
    return totals


def hardest(question: Question, inputs: Inputs) -> Hardest:
    """Return the highest score that counts of each anchor, and its candidate; -inf if none."""
    values = torch.full((question.size,), -math.inf, dtype=inputs.dtype, device=inputs.like.device)
    known = Hardest(values, torch.zeros_like(values, dtype=torch.int64))
    for tile in tiles(inputs):
        for view in views(question, tile):
            scores = view.exclude_(tile.scores.clone(), -math.inf)
            for side in view.sides:
                join_best_(known, view, side, Hardest(*argmax(scores, 1 - side)))
    return known


def join_best_(known: Hardest, view: View, side: int, best: Hardest) -> None:
    """Replace the best candidates of some anchors where others are better; nan is the highest."""
    places = view.tile.places
    place = view.question.anchors(side, places[side])
    first = places[1 - side].start
    values = known.values[place]
    better = (best.values > values) | (best.values.isnan() & ~values.isnan())
    torch.where(better, best.indices + first, known.indices[place], out=known.indices[place])
    torch.where(better, best.values, values, out=values)


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
    row_bias: Tensor | None = None  # (N,)
    col_bias: Tensor | None = None  # (M,)
    scores: Tensor | None = None  # (N, M)
    scale: Tensor | None = None
    shift: Tensor | None = None
    params: tuple[Tensor | None, ...] = ()


class EarlyGradients(NamedTuple):
    """What the gradients of sums, or of their weighted total, are made of.

    Each is known up to one factor: the gradient of the sum, or of the total.
    """

    rows: Tensor | None = None  # (N, D) float32 sums of ``f'(z_ij) y_j``, weighted, over the norms
    cols: Tensor | None = None  # (M, D)
    shift: Tensor | None = None  # like the shift, of a total


NOT_FOUND = EarlyGradients()


def gradients(
    question: Question,
    inputs: Inputs,
    guide: Inputs | None,
    grad: Tensor,  # (A,) of the sums
    needs: Needs,
    listed: ListedPairs | None = None,  # pairs whose scores have a gradient of their own
) -> Gradients:
    """Return the gradients of a question's inputs and values, from the gradient of its sums."""
    of_question = QuestionGradients(question, grad, needs.scale, needs.shift, needs.params)
    scores = ScoreGradients(inputs, needs)
    for tile in tiles(inputs, guide):
        total: Tensor | None = None
        for view in views(question, tile):  # one at a time, so that two blocks are held at most
            of_view = of_question.of_scores(view)
            total = of_view if total is None else total.add_(of_view)
        assert total is not None
        if listed is not None and total.shape == inputs.shape:  # they ride on the only block
            listed.add_to_(total)
            listed = None
        scores.add(tile.places, total)
    if listed is not None:
        scores.add_pairs(listed)
    return scores.finish(of_question.scale, of_question.shift, of_question.params)


class BlockGradients(NamedTuple):
    """The gradients of a block's scores (N, M), and of a question's scale and shift if needed."""

    scores: Tensor
    scale: Tensor | None
    shift: Tensor | None


def gradients_of_block(
    question: Question,
    scores: Tensor,  # (N, M)
    slopes: Sequence[Tensor],  # (N, M) of each view
    grad: Tensor | None,  # (A,) of the sums; None: zeros
    needed: tuple[bool, bool],  # whether the scale, and the shift, have a gradient
) -> BlockGradients:
    """Return the gradients of one block, from the slopes that were kept."""
    if grad is None:
        return BlockGradients(torch.zeros_like(scores), None, None)
    of_question = QuestionGradients(question, grad, *needed)
    own = views(question, block_of(scores))
    total = of_question.of_scores(own[0], slopes[0])
    if len(own) > 1:
        total += of_question.of_scores(own[1], slopes[1])
    return BlockGradients(total, of_question.scale, of_question.shift)


def pair_gradients(inputs: Inputs, needs: Needs, listed: ListedPairs) -> Gradients:
    """Return the gradients of what listed pairs were scored from."""
    scores = ScoreGradients(inputs, needs)
    scores.add_pairs(listed)
    return scores.finish(params=[None] * len(needs.params))


class QuestionGradients:
    """Forms the gradient of scores block by block, and adds up those of a question's values.

    The gradients of limits are zero.
    """

    def __init__(
        self,
        question: Question,
        grad: Tensor,  # (A,) of the sums
        needs_scale: bool,
        needs_shift: bool,
        needs_params: Sequence[bool] = (),
    ):
        self.question = question
        self.grad = grad
        # Where no value gets a gradient, the scale is multiplied in before blocks are visited.
        self.folds_scale = not (needs_scale or needs_shift or True in needs_params)
        scale = question.scale
        if self.folds_scale and (isinstance(scale, Tensor) or scale != 1.0):
            self.grad = grad * scale
        self.needs_scale = needs_scale
        self.needs_shift = needs_shift
        self.needs_params = needs_params
        self.scale: Tensor | None = None
        self.shift: Tensor | None = None
        self.params: list[Tensor | None] = [None] * len(question.params)

    def of_scores(self, view: View, slopes: Tensor | None = None) -> Tensor:
        """Return dL/dS (r, c) as a view asks for it; add up the gradients of values.

        ``slopes``: those of the view, if they were kept; they may be needed once more.
        """
        upstream = view.upstream(self.grad)
        if self.question.term.slope is None:
            by_z = self._by_autograd(view, upstream)
        elif slopes is not None:
            by_z = slopes * upstream
        else:
            by_z = view.slopes().mul_(upstream)
        if self.folds_scale:
            return by_z
        question = self.question
        if self.needs_shift:
            self.shift = view.added(self.shift, question.shift, by_z)
        if self.needs_scale:
            self.scale = view.added(self.scale, question.scale, by_z * view.tile.scores)
        return by_z.mul_(view.own(question.scale))

    def _by_autograd(self, view: View, upstream: Tensor) -> Tensor:
        """Return the gradient (r, c) of z of a user's term; add up those of its parameters."""
        question = self.question
        by_z, *by_params = question.term.gradients(view.exponents(), view.params(), upstream)
        if question.teaches:
            by_params = by_params[1:]
        for k, needed in enumerate(self.needs_params):
            if needed:
                own = view.exclude_(by_params[k])
                self.params[k] = view.added(self.params[k], question.params[k], own)
        return view.exclude_(by_z)


class ScoreGradients:
    """Adds up the gradients of what scores are made of, from the gradient of the scores."""

    def __init__(self, inputs: Inputs, needs: Needs):
        self.inputs = inputs
        self.needs = needs
        self.scores: Tensor | None = None
        self.rows: Tensor | None = None  # (N, D) of unit vectors
        self.cols: Tensor | None = None
        n, m = inputs.shape
        self.row_bias = inputs.like.new_zeros(n, dtype=inputs.dtype) if needs.row_bias else None
        self.col_bias = inputs.like.new_zeros(m, dtype=inputs.dtype) if needs.col_bias else None

    def add(self, places: Places, grad: Tensor) -> None:
        """Add what a block's gradient of scores (r, c) contributes; it may become the result."""
        r, c = places
        inputs = self.inputs
        if self.needs.scores:
            if grad.shape == inputs.shape:
                self.scores = grad
            else:
                self._whole_scores()[places] = grad
        if self.needs.rows:
            self.rows = with_product(self.rows, inputs, 0, places, grad)
        if self.needs.cols:
            self.cols = with_product(self.cols, inputs, 1, places, grad)
        if self.row_bias is not None:
            self.row_bias[r] += grad.sum(1)
        if self.col_bias is not None:
            self.col_bias[c] += grad.sum(0)

    def add_pairs(self, listed: ListedPairs) -> None:
        """Add what the gradient of listed pairs' scores contributes."""
        if self.needs.scores:
            listed.add_to_(self._whole_scores())
        if self.needs.rows:
            self.rows = add_pair_gradient(self.rows, listed, self.inputs, 0)
        if self.needs.cols:
            self.cols = add_pair_gradient(self.cols, listed, self.inputs, 1)
        if self.row_bias is not None:
            listed.add_by_side(self.row_bias, 0)
        if self.col_bias is not None:
            listed.add_by_side(self.col_bias, 1)

    def _whole_scores(self) -> Tensor:
        """Return the (N, M) gradient of given scores, zeros at first."""
        if self.scores is None:
            assert self.inputs.scores is not None
            self.scores = torch.zeros_like(
                self.inputs.scores, memory_format=torch.contiguous_format
            )
        return self.scores

    def finish(
        self,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        params: Sequence[Tensor | None] = (),
    ) -> Gradients:
        """Return the gradients of the inputs, with those of a question's values."""
        needs = self.needs
        rows = of_vectors(self.rows, self.inputs.rows) if needs.rows else None
        cols = of_vectors(self.cols, self.inputs.cols) if needs.cols else None
        scores = self._whole_scores() if needs.scores else None
        biases = self.row_bias, self.col_bias
        return Gradients(rows, cols, *biases, scores, scale, shift, tuple(params))


def with_product(
    total: Tensor | None,  # (N, D) of a side's unit vectors, None at first
    inputs: Inputs,
    side: int,
    places: Places,  # of a block
    grad: Tensor,  # (r, c) of its scores
) -> Tensor:
    """Return the gradient of a side's unit vectors with what a block contributes."""
    own, others = inputs.sides(side)
    a = grad.T if side else grad
    b = others.vectors(places[1 - side])
    size = own.like.shape[0]
    if total is None and a.shape[0] == size:
        return matmul(a, b)
    if total is None:
        total = b.new_zeros(size, b.shape[1])
    add_matmul_(total[places[side]], a, b)
    return total


def of_vectors(grad: Tensor | None, side: Side) -> Tensor:
    """Return the gradient of a side's vectors (N, D) from that of its unit vectors, in place."""
    if grad is None:
        return torch.zeros_like(side.like, dtype=compute_dtype(side.like))
    if side.inv is None:
        return grad
    for part in chunks(grad):  # temporaries stay small
        grad[part] = project(grad[part], side.vectors(part), side.inv[part])
    return grad
