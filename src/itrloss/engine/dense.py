"""Answers in plain PyTorch on the whole matrix: the specification of the other engines.

Autograd differentiates them, any number of times, and a compiler fuses them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .pairs import EVERYTHING
from .question import Question, Value, affine, has_each
from .terms import Term


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

    def excluded(self) -> Tensor | None:
        """Return the bool mask (A, C) of candidates that do not count; None if all do."""
        question = self.question
        mask = question.pairs.excluded(question.over, EVERYTHING, EVERYTHING)
        if mask is not None:
            mask = self.turned(mask.expand(question.pairs.shape))
        if not question.limited:
            return mask
        judged = self.scores.detach() if self.other is None else self.other
        if question.below is not None:
            mask = joined(mask, judged >= self.column(question.below))
        if question.above is not None:
            mask = joined(mask, judged <= self.column(question.above))
        return mask

    def values(self) -> list[Tensor]:
        """Return the values (A, C) of each term, added over the shifts."""
        mask = self.excluded()
        scale = self.column(self.question.scale)
        found: list[Tensor] = []
        for shift in self.shifts():
            z = affine(self.scores, scale, shift)
            values = [self.masked_values(term, z, mask) for term in self.question.terms]
            if found:
                values = [a + b for a, b in zip(found, values, strict=True)]
            found = values
        return found

    def masked_values(self, term: Term, z: Tensor, mask: Tensor | None) -> Tensor:
        """Return the values (A, C) of a term, 0 where they are masked."""
        if mask is None:
            return term(z, *self.params())
        if term.zero is not None:
            return term.value(z.masked_fill(mask, term.zero))
        if term.slope is not None:
            # Of an excluded pair it could overflow, and 0 times inf is nan.
            z = z.masked_fill(mask, 0.0)
        return term(z, *self.params()).masked_fill(mask, 0.0)


def joined(mask: Tensor | None, other: Tensor) -> Tensor:
    """Return where one of two masks is true."""
    return other if mask is None else mask | other


def filled(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return scores with -inf where they are masked."""
    return x if mask is None else x.masked_fill(mask, -math.inf)


def by_side(question: Question, scores: Tensor, other: Tensor | None) -> list[SideQuestion]:
    """Return the question of each side that asks."""
    return [SideQuestion(question, side, scores, other) for side in question.sides]


def sums(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the sums of a question of scores (N, M): (A,) of one term, (K, A) of several.

    ``other``: the scores (N, M) of a guide or a teacher.
    """
    if question.is_shared:  # one evaluation serves the rows and the columns
        values = SideQuestion(question, 0, scores, other).values()
        totals = [torch.cat([x.sum(1), x.sum(0)]) for x in values]
    else:
        of_sides = []
        for asked in by_side(question, scores, other):
            of_sides.append([x.sum(1) for x in asked.values()])
        totals = [torch.cat(parts) for parts in zip(*of_sides, strict=True)]
    return totals[0] if len(totals) == 1 else torch.stack(totals)


def highest(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    found = []
    for asked in by_side(question, scores, other):
        z = affine(asked.scores, asked.column(question.scale), None)
        found.append(filled(z, asked.excluded()).amax(1))
    return torch.cat(found)


def hardest(question: Question, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return each anchor's highest score that counts, and its candidate; -inf and -1 if none."""
    values = []
    indices = []
    for asked in by_side(question, scores, None):
        value, index = filled(asked.scores, asked.excluded()).max(1)
        values.append(value)
        indices.append(index.masked_fill(value == -math.inf, -1))
    return torch.cat(values), torch.cat(indices)


def sorted_excesses(question: Question, scores: Tensor, margin: float) -> Tensor:
    """Return the (A,) sums of hinges of all positives against all negatives.

    Positives need not be listed: each candidate is treated as one, then masked. The negatives above
    its threshold are the last of the anchor's sorted negatives, and their sum is a cumulative one.
    """
    found = []
    for side in question.sides:
        asked = SideQuestion(question, side, scores, None)
        positives = SideQuestion(replace(question, over="positives"), side, scores, None)
        ordered = filled(asked.scores, asked.excluded()).sort(dim=1).values
        sums = ordered.masked_fill(ordered == -math.inf, 0.0).flip(1).cumsum(1)
        thresholds = asked.scores - margin
        below = torch.searchsorted(
            ordered.detach().contiguous(), thresholds.detach().contiguous(), right=True
        )
        count = asked.scores.shape[1] - below
        above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
        hinges = above - count * thresholds
        not_positive = positives.excluded()
        assert not_positive is not None
        found.append(hinges.masked_fill(not_positive, 0.0).sum(1))
    return torch.cat(found)
