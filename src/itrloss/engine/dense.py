"""Answers in plain PyTorch on the whole matrix: the specification of the other engines.

Autograd differentiates them, any number of times, and a compiler fuses them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .question import Question, Value, affine, has_each

EVERYTHING = slice(None)


class SideQuestion:
    """A question of one side's anchors: they are the first dimension of everything here."""

    def __init__(self, question: Question, side: int, scores: Tensor, other: Tensor | None):
        self.question = question
        self.side = side
        self.scores = self.turned(scores)  # (A, C)
        self.other = None if other is None else self.turned(other)  # (A, C)

    def turned(self, x: Tensor) -> Tensor:
        """Return a matrix (N, M) with this side first."""
        return x.T if self.side else x

    def column(self, x: Value) -> Value:
        """Return the anchors' values as (A, 1), which broadcast with the scores."""
        if not has_each(x):
            return x
        if len(self.question.sides) == 1:
            return x[..., None]
        n = self.question.pairs.shape[0]
        return x[n:, None] if self.side else x[:n, None]

    def shifts(self) -> list[Value | None]:
        """Return the shifts, whose sums are added up."""
        shift = self.question.shift
        if shift is None:
            return [None]
        if isinstance(shift, Tensor) and shift.dim() == 2:
            return [self.column(x) for x in shift]
        return [self.column(shift)]

    def params(self) -> list[Tensor]:
        """Return the parameters of the term: (A, 1), (1,), or a teacher's scores (A, C)."""
        own: list[Tensor] = []
        if self.question.teaches:
            assert self.other is not None
            own.append(self.other)
        for param in self.question.params:
            column = self.column(param)
            assert isinstance(column, Tensor)
            own.append(column)
        return own

    def excluded(self) -> Tensor:
        """Return the bool mask (A, C) of candidates that do not count."""
        question = self.question
        scores = self.scores.detach()
        mask = question.pairs.excluded(question.over, EVERYTHING, EVERYTHING)
        if mask is None:
            mask = torch.zeros_like(scores, dtype=torch.bool)
        else:
            mask = self.turned(mask.expand(question.pairs.shape))
        judged = scores if self.other is None else self.other
        if question.below is not None:
            mask = mask | (judged >= self.column(question.below))
        if question.above is not None:
            mask = mask | (judged <= self.column(question.above))
        return mask


def by_side(question: Question, scores: Tensor, other: Tensor | None) -> list[SideQuestion]:
    """Return the question of each side that asks."""
    return [SideQuestion(question, side, scores, other) for side in question.sides]


def sums(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the sums of a question of scores (N, M): (A,) of one term, (K, A) of several.

    ``other``: the scores (N, M) of a guide or a teacher.
    """
    found = []
    for asked in by_side(question, scores, other):
        mask = asked.excluded()
        totals = [sums_with_shift(asked, mask, shift) for shift in asked.shifts()]
        found.append(sum(totals[1:], start=totals[0]))
    whole = torch.cat(found, 1)
    return whole[0] if len(question.terms) == 1 else whole


def sums_with_shift(asked: SideQuestion, mask: Tensor, shift: Value | None) -> Tensor:
    """Return the sums (K, A) of the terms over the candidates (A, C) that are not masked."""
    scale = asked.column(asked.question.scale)
    z = affine(asked.scores, scale, shift)
    found = []
    for term in asked.question.terms:
        argument = z
        if term.slope is not None:
            # Of an excluded pair it could overflow, and 0 times inf is nan.
            argument = z.masked_fill(mask, 0.0)
        values = term(argument, *asked.params())
        found.append(values.masked_fill(mask, 0.0).sum(1))
    return torch.stack(found)


def highest(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    found = []
    for asked in by_side(question, scores, other):
        z = affine(asked.scores, asked.column(question.scale), None)
        found.append(z.masked_fill(asked.excluded(), -math.inf).amax(1))
    return torch.cat(found)


def hardest(question: Question, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest score that counts of each anchor, and its candidate; -inf and -1 if none."""
    values = []
    indices = []
    for asked in by_side(question, scores, None):
        value, index = asked.scores.masked_fill(asked.excluded(), -math.inf).max(1)
        values.append(value)
        indices.append(index.masked_fill(value == -math.inf, -1))
    return torch.cat(values), torch.cat(indices)


def sorted_excesses(question: Question, scores: Tensor, margin: float) -> Tensor:
    """Return the (A,) sums of hinges of all positives against all negatives.

    Positives need not be listed: each candidate is treated as one, then masked. The negatives above
    its threshold are the last of the anchor's sorted negatives, and their sum is a cumulative one.
    """
    found = []
    not_positive = [
        asked.excluded() for asked in by_side(question._replace(over="positives"), scores, None)
    ]
    for asked, excluded in zip(by_side(question, scores, None), not_positive, strict=True):
        negatives = asked.scores.masked_fill(asked.excluded(), -math.inf)
        ordered = negatives.sort(dim=1).values
        sums = ordered.masked_fill(ordered == -math.inf, 0.0).flip(1).cumsum(1)
        thresholds = asked.scores - margin
        below = torch.searchsorted(
            ordered.detach().contiguous(), thresholds.detach().contiguous(), right=True
        )
        count = asked.scores.shape[1] - below
        above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
        hinges = above - count * thresholds
        found.append(hinges.masked_fill(excluded, 0.0).sum(1))
    return torch.cat(found)
