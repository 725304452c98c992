"""Answers in plain PyTorch on the whole matrix: the specification of the loop and of the kernels.

Autograd differentiates them, any number of times, and a compiler fuses them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .question import Question, Value, affine, has_each, joined


class SideQuestion:
    """A question of one side's anchors: they are the first dimension of everything here."""

    def __init__(
        self,
        question: Question,
        side: int,  # 0: the rows are the anchors; 1: the columns are
        scores: Tensor,  # (N, M)
        other: Tensor | None = None,  # (N, M)
    ):
        self.question = question
        self.side = side
        self.scores = scores.T if side else scores  # (A, C)
        self.other = None if other is None else self.turned(other)  # (A, C)

    def turned(self, x: Tensor) -> Tensor:
        """Return a matrix (N, M) with the anchors first."""
        return x.T if self.side else x

    def column(self, x: Value) -> Value:
        """Return the anchors' values as (A, 1), which broadcast with the scores."""
        if not has_each(x):
            return x
        if len(self.question.sides) == 1:
            return x[:, None]
        n = self.question.relation.shape[0]
        return x[n:, None] if self.side else x[:n, None]

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

    def exclude(self, x: Tensor, value: float, over: str | None = None) -> Tensor:
        """Return ``x`` (A, C) with a value in place of the candidates that do not count."""
        question = self.question
        mask = question.relation.all_excluded(question.over if over is None else over)  # type: ignore[arg-type]
        if mask is not None:
            x = x.masked_fill(self.turned(mask), value)
        if not question.limited:
            return x
        judged = self.scores.detach() if self.other is None else self.other
        if question.below is not None:
            x = x.masked_fill(judged >= self.column(question.below), value)
        if question.above is not None:
            x = x.masked_fill(judged <= self.column(question.above), value)
        return x

    def values(self) -> Tensor:
        """Return the term's values (A, C), 0 where candidates do not count."""
        question = self.question
        term = question.term
        shift = None if question.shift is None else self.column(question.shift)
        z = affine(self.scores, self.column(question.scale), shift)
        if term.zero is not None:
            return term.value(self.exclude(z, term.zero))
        # Of an excluded pair a term could overflow, and 0 times inf is nan.
        own = z if term.slope is None else self.exclude(z, 0.0)
        return self.exclude(term(own, *self.params()), 0.0)


def sums(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the sums (A,) of a question of scores (N, M).

    ``other``: the scores (N, M) of a guide or a teacher.
    """
    sides = [SideQuestion(question, side, scores, other) for side in question.sides]
    return joined([own.values().sum(1) for own in sides])


def highest(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    values = []
    for side in question.sides:
        own = SideQuestion(question, side, scores, other)
        z = affine(own.scores, own.column(question.scale), None)
        values.append(own.exclude(z, -math.inf).amax(1))
    return joined(values)


def hardest(question: Question, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return each anchor's highest score that counts, and its candidate; -inf if none."""
    values = []
    indices = []
    for side in question.sides:
        own = SideQuestion(question, side, scores)
        value, index = own.exclude(own.scores, -math.inf).max(1)
        values.append(value)
        indices.append(index)
    return joined(values), joined(indices)


def sorted_excesses(question: Question, scores: Tensor, margin: float) -> Tensor:
    """Return the (A,) sums of hinges of all positives against all negatives.

    Positives need not be listed: each candidate is treated as one, then masked. The negatives above
    its threshold are the last of the anchor's sorted negatives, and their sum is a cumulative one.
    """
    totals = []
    for side in question.sides:
        own = SideQuestion(question, side, scores)
        ordered = own.exclude(own.scores, -math.inf).sort(dim=1).values
        sums = ordered.masked_fill(ordered == -math.inf, 0.0).flip(1).cumsum(1)
        thresholds = own.scores - margin
        below = torch.searchsorted(
            ordered.detach().contiguous(), thresholds.detach().contiguous(), right=True
        )
        count = own.scores.shape[1] - below
        above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
        hinges = above - count * thresholds
        totals.append(own.exclude(hinges, 0.0, "positives").sum(1))
    return joined(totals)
