"""Answers in plain PyTorch on the whole matrix: the specification of the other engines.

Autograd differentiates them, any number of times, and a compiler fuses them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .question import Question, Value, affine, has_each, joined


class SideQuestion:
    """A question of some sides' anchors: they are the first dimension of everything here."""

    def __init__(
        self,
        question: Question,
        sides: tuple[int, ...],  # (0,), (1,), or of a square matrix (0, 1)
        scores: Tensor,  # (N, M)
        other: Tensor | None = None,  # (N, M)
    ):
        self.question = question
        self.sides = sides
        self.scores = self.turned(scores)  # (A, C)
        self.other = None if other is None else self.turned(other)  # (A, C)
        #: Whether the candidates that do not count are the diagonal of the matrix.
        self.excludes_diagonal = False
        if question.over == "negatives" and not question.limited:
            self.excludes_diagonal = question.pairs.one_to_one
        self._mask = None if self.excludes_diagonal else self.mask()

    def turned(self, x: Tensor) -> Tensor:
        """Return a matrix (N, M) with the anchors first: of both sides, one below the other."""
        if self.sides == (0,):
            return x
        if self.sides == (1,):
            return x.T
        return torch.cat([x, x.T])

    def column(self, x: Value) -> Value:
        """Return the anchors' values as (A, 1), which broadcast with the scores."""
        if not has_each(x):
            return x
        if self.sides == self.question.sides:
            return x[..., None]
        n = self.question.pairs.shape[0]
        return x[:n, None] if self.sides == (0,) else x[n:, None]

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

    def mask(self) -> Tensor | None:
        """Return the bool mask (A, C) of candidates that do not count; None if all do."""
        question = self.question
        mask = question.pairs.all_excluded(question.over)
        if mask is not None:
            mask = self.turned(mask.expand(question.pairs.shape))
        if not question.limited:
            return mask
        judged = self.scores.detach() if self.other is None else self.other
        if question.below is not None:
            mask = either(mask, judged >= self.column(question.below))
        if question.above is not None:
            mask = either(mask, judged <= self.column(question.above))
        return mask

    def exclude(self, x: Tensor, value: float) -> Tensor:
        """Return ``x`` (A, C) with a value in place of the candidates that do not count.

        A diagonal takes a sixth of the time of a mask, forward and backward of 256 x 256
        (``pytest benchmarks/test_micro.py --benchmark-enable -k diagonal``).
        """
        if self.excludes_diagonal:
            diagonal = x.new_full((min(self.question.pairs.shape),), value)
            if len(self.sides) == 1:
                return x.diagonal_scatter(diagonal)
            by_side = x.view(2, -1, x.shape[1])
            return by_side.diagonal_scatter(diagonal.expand(2, -1), dim1=1, dim2=2).view_as(x)
        if self._mask is None:
            return x
        return x.masked_fill(self._mask, value)

    def values(self) -> list[Tensor]:
        """Return the values (A, C) of each term, added over the shifts."""
        scale = self.column(self.question.scale)
        total: list[Tensor] = []
        for shift in self.shifts():
            z = self.scores
            if shift is not None or not isinstance(scale, float) or scale != 1.0:
                z = affine(self.scores, scale, shift)
            values = self.values_of(z)
            if total:
                values = [a + b for a, b in zip(total, values, strict=True)]
            total = values
        return total

    def values_of(self, z: Tensor) -> list[Tensor]:
        """Return the values (A, C) of each term, 0 where candidates do not count."""
        first, *others = self.question.terms
        if first.zero is not None and all(term.zero == first.zero for term in others):
            z = self.exclude(z, first.zero)
            if z is self.scores:
                z = z.clone()
            of_others = [term(z) for term in others]  # of copies, as the first may overwrite z
            return [first.value(z), *of_others]
        values = []
        for term in self.question.terms:
            # Of an excluded pair a term could overflow, and 0 times inf is nan.
            own = z if term.slope is None else self.exclude(z, 0.0)
            values.append(self.exclude(term(own, *self.params()), 0.0))
        return values


def either(mask: Tensor | None, other: Tensor) -> Tensor:
    """Return where one of two masks is true."""
    return other if mask is None else mask | other


def by_side(question: Question, scores: Tensor, other: Tensor | None = None) -> list[SideQuestion]:
    """Return the question of each side that asks; both sides of a square matrix ask it at once.

    That is half of the operators: 0.85 of the time of DCL at 32 x 32 x 256 (``python -m benchmarks
    --losses dcl --shapes 32x32x256``, with and without). The compiler needs no copy to fuse them.
    """
    n, m = scores.shape
    if len(question.sides) == 2 and n == m and not torch.compiler.is_compiling():
        return [SideQuestion(question, question.sides, scores, other)]
    return [SideQuestion(question, (side,), scores, other) for side in question.sides]


def sums(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the sums of a question of scores (N, M): (A,) of one term, (K, A) of several.

    ``other``: the scores (N, M) of a guide or a teacher.
    """
    if question.is_shared:  # one evaluation serves the rows and the columns
        values = SideQuestion(question, (0,), scores, other).values()
        totals = [torch.cat([x.sum(1), x.sum(0)]) for x in values]
    else:
        of_sides = [own.values() for own in by_side(question, scores, other)]
        totals = []
        for of_term in zip(*of_sides, strict=True):
            totals.append(joined([x.sum(1) for x in of_term]))
    return totals[0] if len(totals) == 1 else torch.stack(totals)


def highest(question: Question, scores: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    values = []
    for own in by_side(question, scores, other):
        z = affine(own.scores, own.column(question.scale), None)
        values.append(own.exclude(z, -math.inf).amax(1))
    return joined(values)


def hardest(question: Question, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return each anchor's highest score that counts, and its candidate; -inf and -1 if none."""
    values = []
    indices = []
    for own in by_side(question, scores):
        value, index = own.exclude(own.scores, -math.inf).max(1)
        values.append(value)
        indices.append(index.masked_fill(value == -math.inf, -1))
    return joined(values), joined(indices)


def sorted_excesses(question: Question, scores: Tensor, margin: float) -> Tensor:
    """Return the (A,) sums of hinges of all positives against all negatives.

    Positives need not be listed: each candidate is treated as one, then masked. The negatives above
    its threshold are the last of the anchor's sorted negatives, and their sum is a cumulative one.
    """
    totals = []
    for side in question.sides:
        own = SideQuestion(question, (side,), scores)
        positives = SideQuestion(replace(question, over="positives"), (side,), scores)
        ordered = own.exclude(own.scores, -math.inf).sort(dim=1).values
        sums = ordered.masked_fill(ordered == -math.inf, 0.0).flip(1).cumsum(1)
        thresholds = own.scores - margin
        below = torch.searchsorted(
            ordered.detach().contiguous(), thresholds.detach().contiguous(), right=True
        )
        count = own.scores.shape[1] - below
        above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
        hinges = above - count * thresholds
        totals.append(positives.exclude(hinges, 0.0).sum(1))
    return torch.cat(totals)
