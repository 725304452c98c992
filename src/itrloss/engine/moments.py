"""Sums of squares of scores from D x D numbers of an anchor's candidates, without the scores.

    sum_j S_ij   = <u_i, s>       s = sum_j v_j
    sum_j S_ij^2 = <u_i, G u_i>   G = sum_j v_j v_j^T

Here j runs over all candidates; the squares and sums of the positives are then taken out. All of it
is computed in float64, so that no digits are lost where negatives score alike, or far below the
positives. Of M-DCL at 512 x 16384 x 512, that is 0.7 of the time of a pass over the scores
(``python -m benchmarks.moments``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import Inputs, Side
from .pair_scores import pair_scores
from .question import Question, joined
from .relation import segment_sum
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
    n, m = question.relation.shape
    sides = len(question.sides)
    positives = len(question.relation.listed[0])
    a_pass = n * m * PASS * sides
    if not kept:
        a_pass += n * m * dim
    return FLOAT64 * (sides * (n + m) * dim + positives) * dim < a_pass


def answers(question: Question) -> bool:
    """Return whether a question's squares are over all negatives, with a shift alone.

    A few negatives among many positives would lose digits when these are taken out.
    """
    relation = question.relation
    if question.over != "negatives" or question.limited or not relation.others_are_negatives:
        return False
    if isinstance(question.scale, Tensor) or question.scale != 1.0:
        return False
    n, m = relation.shape
    return relation.listable and relation.are_few and 2 * len(relation.listed[0]) <= n * m


def squares(question: Question, inputs: Inputs) -> Tensor:
    """Return the (A,) sums of ``(S + shift)^2`` over each anchor's negatives. No gradient."""
    relation = question.relation
    with torch.no_grad():
        positives = pair_scores(inputs, *relation.listed, dtype=torch.float64)
        of_sides = [sums_of_side(question, inputs, side, positives) for side in question.sides]
        first, second = (joined(parts) for parts in zip(*of_sides, strict=True))
        count = joined([relation.counts(side, positive=False) for side in question.sides])
        if question.shift is not None:
            shift = question.shift
            second = second + shift * (2 * first + count.double() * shift)  # in float64
        # Where all candidates are positives, what is left is rounding.
        return (second.clamp_min(0.0) * (count > 0)).to(inputs.dtype)


def sums_of_side(
    question: Question,
    inputs: Inputs,
    side: int,
    positives: Tensor,  # (P,) scores
) -> tuple[Tensor, Tensor]:
    """Return the (A,) sums of a side's negatives' scores and of their squares, in float64."""
    own, others = inputs.sides(side)
    total, products = powers(others, question.relation.ignored[1 - side])
    first = positives.new_empty(len(own.like))
    second = torch.empty_like(first)
    for part in chunks(own.like):
        x = own.vectors(part).double()
        torch.mv(x, total, out=first[part])
        torch.sum((x @ products).mul_(x), 1, out=second[part])
    index = question.relation.listed[side]
    first -= segment_sum(positives, index, len(first))
    second -= segment_sum(positives.square(), index, len(first))
    return first, second


def powers(side: Side, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum (D,) of a side's vectors, and that of their outer products (D, D), in float64.

    ``ignored``: (N,) bool, the vectors that do not count.
    """
    dim = side.like.shape[1]
    total = torch.zeros(dim, dtype=torch.float64, device=side.like.device)
    products = total.new_zeros(dim, dim)
    for part in chunks(side.like):
        x = side.vectors(part).double()
        if ignored is not None:
            x = x.masked_fill(ignored[part, None], 0.0)
        total += x.sum(0)
        products.addmm_(x.T, x)
    return total, products
