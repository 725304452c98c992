"""Sums of all scores of an anchor, and of their squares, from D x D numbers of its candidates.

    sum_j S_ij   = <u_i, s>       s = sum_j v_j
    sum_j S_ij^2 = <u_i, G u_i>   G = sum_j v_j v_j^T

Here j runs over all candidates; the squares and sums of the positives are then taken out. All of it
is computed in float64, so that no digits are lost where negatives score alike, or far below the
positives. Neither the scores nor anything else of their size is formed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Inputs, Side
from .pair_scores import ListedPairs, add_pair_gradient, pair_scores
from .pairs import Pairs, segment_sum
from .question import Question, Value, has_each, joined
from .terms import identity, square
from .tiled import Gradients, Needs, Total, of_vectors
from .vectors import chunks

# What takes as long as one multiplication of scores' float32 products on the CPU: a float64
# multiplication takes 2, and what is summed of a score of one side that is held takes 50 (python -m
# benchmarks.moments prints both ways' times, and which is taken).
FLOAT64 = 2
PASS = 50


def has_gain(question: Question, dim: int, kept: bool) -> bool:
    """Return whether sums from D x D numbers take less time than a pass over the scores.

    ``kept``: the scores are held, so that a pass multiplies nothing.
    """
    n, m = question.pairs.shape
    sides = len(question.sides)
    positives = len(question.pairs.listed[0])
    a_pass = n * m * PASS * sides
    if not kept:
        a_pass += n * m * dim
    return FLOAT64 * (sides * (n + m) * dim + positives) * dim < a_pass


def answers(question: Question) -> bool:
    """Return whether a question asks for sums of scores and of squares over all negatives.

    A few negatives among many positives would lose digits when these are taken out.
    """
    if question.terms != (identity, square) or question.over != "negatives" or question.limited:
        return False
    shift = question.shift
    if isinstance(shift, Tensor) and (shift.requires_grad or shift.dim() > 1):
        return False
    scale = question.scale
    if not isinstance(scale, float) or scale != 1.0:
        return False
    pairs = question.pairs
    if not pairs.others_are_negatives:
        return False
    n, m = pairs.shape
    return pairs.listable and pairs.are_few and 2 * len(pairs.listed[0]) <= n * m


class Powers(NamedTuple):
    """Sums over some vectors (N, D), in float64."""

    vectors: Tensor  # (D,)
    products: Tensor  # (D, D) of the outer products with themselves


def powers(
    side: Side,
    ignored: Tensor | None,  # (N,) bool
    weights: tuple[Tensor, Tensor] | None = None,  # (N,) each, float64
) -> Powers:
    """Return the sums over a side's vectors, without the ignored ones; weighted, if there are
    weights for both.
    """
    dim = side.like.shape[1]
    total = torch.zeros(dim, dtype=torch.float64, device=side.like.device)
    products = total.new_zeros(dim, dim)
    for part in chunks(side.like):
        x = side.vectors(part).double()
        if ignored is not None:
            x.masked_fill_(ignored[part, None], 0.0)
        if weights is None:
            total += x.sum(0)
            products.addmm_(x.T, x)
        else:
            total += weights[0][part] @ x
            products.addmm_(x.T, x * weights[1][part, None])
    return Powers(total, products)


def sums(question: Question, inputs: Inputs) -> Tensor:
    """Return the (2, A) sums of ``S + shift`` and of its square over each anchor's negatives."""
    pairs = question.pairs
    positives = pair_scores(inputs, *pairs.listed, dtype=torch.float64)
    of_sides = [sums_of_side(pairs, inputs, side, positives) for side in question.sides]
    first = joined([x[0] for x in of_sides])
    second = joined([x[1] for x in of_sides])
    count = counts(question)
    shift = question.shift
    if shift is not None:
        shift_sum = count.double() * shift  # in float64
        second = second + shift * (2 * first + shift_sum)
        first = first + shift_sum
    # Where all candidates are positives, what is left is rounding.
    return (torch.stack([first, second]) * (count > 0)).to(inputs.dtype)


def counts(question: Question) -> Tensor:
    """Return the (A,) numbers of negatives."""
    return joined([question.pairs.counts(side)[1] for side in question.sides])


def sums_of_side(
    pairs: Pairs,
    inputs: Inputs,
    side: int,
    positives: Tensor,  # (P,) scores
) -> tuple[Tensor, Tensor]:
    """Return the (A,) sums of a side's negatives' scores and of their squares, in float64."""
    own, others = inputs.sides(side)
    of_candidates = powers(others, pairs.ignored[1 - side])
    first = positives.new_empty(len(own.like))
    second = torch.empty_like(first)
    for part in chunks(own.like):
        x = own.vectors(part).double()
        torch.mv(x, of_candidates.vectors, out=first[part])
        torch.sum((x @ of_candidates.products).mul_(x), 1, out=second[part])
    index = pairs.listed[side]
    first -= segment_sum(positives, index, len(first))
    second -= segment_sum(positives.square(), index, len(first))
    return first, second


# ------------------------------------------------------------------------------------- the gradient


class Slopes(NamedTuple):
    """The gradient ``constant_i + by_score_i S_ij`` of an anchor's negatives' scores."""

    constant: Tensor  # (A,) float64
    by_score: Tensor  # (A,)

    def of_side(self, question: Question, side: int) -> Slopes:
        """Return the part of a side's anchors."""
        first = 0
        if side == 1 and 0 in question.sides:
            first = question.pairs.shape[0]
        own = slice(first, first + question.pairs.shape[side])
        return Slopes(self.constant[own], self.by_score[own])


def slopes_of(question: Question, grad: Tensor) -> Slopes:
    """Return the slopes from the gradient (2, A) of the sums."""
    first, second = (grad * (counts(question) > 0)).double()
    shift: Value = 0.0 if question.shift is None else question.shift
    if isinstance(shift, Tensor) and not has_each(shift):
        shift = shift.reshape(())
    return Slopes(first + 2 * second * shift, 2 * second)


def gradients(
    question: Question,
    inputs: Inputs,
    grad: Tensor,  # (2, A) of the sums
    needs: Needs,
    listed: ListedPairs | None = None,  # pairs whose scores have a gradient of their own
) -> Gradients:
    """Return the gradients of the vectors from the gradient of the sums."""
    slopes = slopes_of(question, grad)
    positives = pair_scores(inputs, *question.pairs.listed, dtype=torch.float64)
    taken_out = torch.zeros_like(positives)  # the gradient of the positives' scores
    for side in question.sides:
        of_side = slopes.of_side(question, side)
        index = question.pairs.listed[side]
        taken_out -= of_side.constant[index] + of_side.by_score[index] * positives
    own_pairs = ListedPairs(*question.pairs.listed, taken_out.to(inputs.dtype))
    of_sides: list[Tensor | None] = []
    for side, needed in enumerate((needs.rows, needs.cols)):
        if not needed:
            of_sides.append(None)
            continue
        total = Total(inputs.shape[side])
        total.value = add_pair_gradient(
            vector_gradient(question, inputs, slopes, side), own_pairs, inputs, side
        )
        if listed is not None:
            total.value = add_pair_gradient(total.value, listed, inputs, side)
        of_sides.append(of_vectors(total, inputs.sides(side)[0]))
    rows, cols = of_sides
    return Gradients(rows, cols, None, None, None, None, None, ())


def vector_gradient(question: Question, inputs: Inputs, slopes: Slopes, side: int) -> Tensor:
    """Return the gradient (N, D) of a side's unit vectors, of sums over all their candidates."""
    own, others = inputs.sides(side)
    own_ignored = question.pairs.ignored[side]
    others_ignored = question.pairs.ignored[1 - side]
    total = torch.zeros(own.like.shape, dtype=inputs.dtype, device=own.like.device)
    if side in question.sides:  # as anchors
        of_side = slopes.of_side(question, side)
        of_candidates = powers(others, others_ignored)
        for part in chunks(own.like):
            slope = of_side.by_score[part, None]
            x = own.vectors(part).double() @ of_candidates.products
            total[part] = x.mul_(slope).addcmul_(
                of_side.constant[part, None], of_candidates.vectors
            )
    if 1 - side in question.sides:  # as candidates
        of_anchors = powers(others, None, slopes.of_side(question, 1 - side))
        for part in chunks(own.like):
            x = own.vectors(part).double() @ of_anchors.products + of_anchors.vectors
            if own_ignored is not None:
                x.masked_fill_(own_ignored[part, None], 0.0)
            total[part] += x
    return total
