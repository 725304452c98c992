"""What is computed from a score matrix, and how its anchors see a block of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .inputs import Tile
from .relation import Over, Relation
from .terms import Term

Value = float | Tensor  # one number for all anchors, or a tensor (1,) or (A,)


class Question(NamedTuple):
    """The sum of a term over the candidates of the sides that ask.

        total_i = sum_j f(scale_i S_ij + shift_i, *params_i)

    The sums are (A,), where A are the anchors of the sides, the rows first.
    """

    term: Term
    #: Of the matrix that is asked.
    relation: Relation = None  # type: ignore[assignment]
    sides: tuple[int, ...] = ()  # 0: the rows are anchors; 1: the columns are
    over: Over = "negatives"
    scale: Value = 1.0
    shift: Value | None = None
    below: Value | None = None  # only candidates with a score below it count
    above: Value | None = None
    params: tuple[Tensor, ...] = ()  # of the term, (1,) or (A,)
    teaches: bool = False  # the block's other scores are the first parameter of the term

    @property
    def values(self) -> tuple[Value | None, ...]:
        """The numbers that may differ between anchors."""
        return self.scale, self.shift, self.below, self.above, *self.params

    @property
    def is_shared(self) -> bool:
        """Whether values are one number each, so that one evaluation serves both sides."""
        for x in (self.scale, self.shift, self.below, self.above, *self.params):
            if isinstance(x, Tensor) and x.numel() > 1:
                return False
        return True

    def without_tensors(self) -> tuple[Question, list[Tensor | None]]:
        """Return what is left of the question without its tensors, and these, or None in their
        places: autograd is to save them.
        """
        numbers: list[Value | None] = []
        tensors: list[Tensor | None] = []
        for x in self.values:
            is_tensor = isinstance(x, Tensor)
            numbers.append(None if is_tensor else x)
            tensors.append(x if is_tensor else None)
        return self.with_values(numbers), tensors

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Question:
        """Return the question with tensors in their places again."""
        values: list[Value | None] = []
        for number, tensor in zip(self.values, tensors, strict=True):
            values.append(number if tensor is None else tensor)
        return self.with_values(values)

    def with_values(self, values: Sequence[Any]) -> Question:
        """Return the question with other values, as :attr:`values` has them."""
        scale, shift, below, above, *params = values
        return self._replace(
            scale=scale, shift=shift, below=below, above=above, params=tuple(params)
        )

    @property
    def size(self) -> int:
        """The number of anchors, A."""
        n, m = self.relation.shape
        if len(self.sides) == 2:
            return n + m
        return m if self.sides[0] else n

    @property
    def limited(self) -> bool:
        """Whether scores decide which candidates count."""
        return self.below is not None or self.above is not None

    def anchors(self, side: int, place: slice) -> slice:
        """Return where the rows or columns at a place are among all anchors (A,)."""
        if side == 0 or len(self.sides) == 1:
            return place
        n = self.relation.shape[0]
        return slice(n + place.start, n + place.stop)


class View(NamedTuple):
    """A block (r, c) as some sides see it, whose exponents are the same for all of them."""

    question: Question
    tile: Tile
    sides: tuple[int, ...]

    def own(self, x: Value) -> Value:
        """Return the values of the block's anchors: (r, 1) of rows, (c,) of columns."""
        if not isinstance(x, Tensor) or x.numel() == 1:
            return x
        side = self.sides[0]
        own = x[self.question.anchors(side, self.tile.places[side])]
        return own if side else own[:, None]

    def exponents(self) -> Tensor:
        """Return ``scale S + shift`` (r, c), a new tensor."""
        question = self.question
        scale = self.own(question.scale)
        shift = None if question.shift is None else self.own(question.shift)
        return affine(self.tile.scores, scale, shift)

    def params(self) -> list[Tensor]:
        """Return the parameters of the term: (r, 1), (c,), (1,), or a teacher's scores (r, c)."""
        own: list[Tensor] = []
        if self.question.teaches:
            assert self.tile.other is not None
            own.append(self.tile.other)
        for param in self.question.params:
            column = self.own(param)
            assert isinstance(column, Tensor)
            own.append(column)
        return own

    def exclude_(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Fill the pairs (r, c) that do not count; return them."""
        question = self.question
        question.relation.exclude_(x, self.tile.places, value, question.over)
        if question.below is None and question.above is None:
            return x
        judged = self.tile.scores if self.tile.other is None else self.tile.other
        if question.below is not None:
            x.masked_fill_(judged >= self.own(question.below), value)
        if question.above is not None:
            x.masked_fill_(judged <= self.own(question.above), value)
        return x

    def values(self) -> Tensor:
        """Return the term's values (r, c), 0 for pairs that do not count."""
        term = self.question.term
        z = self.exponents()
        if term.zero is None:
            return self.exclude_(term.values(z, self.params()))
        return term.value(self.exclude_(z, term.zero))

    def values_and_slopes(self) -> tuple[Tensor, Tensor]:
        """Return the values and the derivatives (r, c) of a term that has them in closed form.

        Both are 0 for pairs that do not count.
        """
        term = self.question.term
        z = self.exponents()
        if term.zero is not None:
            return term.both(self.exclude_(z, term.zero))
        values, slopes = term.both(z)
        return self.exclude_(values), self.exclude_(slopes)

    def slopes(self) -> Tensor:
        """Return the derivatives (r, c) of a term that has them in closed form."""
        term = self.question.term
        assert term.slope is not None
        z = self.exponents()
        if term.zero is not None:
            return term.slope(self.exclude_(z, term.zero))
        return self.exclude_(term.slope(z))

    def upstream(self, grad: Tensor) -> Tensor:
        """Return the gradient (A,) of the sums for each pair: (r, 1), (c,) or (r, c)."""
        r, c = self.tile.places
        if self.sides == (0,):
            return grad[r, None]
        of_columns = grad[self.question.anchors(1, c)]
        return of_columns if self.sides == (1,) else grad[r, None] + of_columns

    def added(self, total: Tensor | None, value: Value | None, x: Tensor) -> Tensor:
        """Return the gradient of a value, (1,) or (A,), with x (r, c) added by anchor.

        ``total``: what other blocks have added; None: nothing yet.
        """
        assert isinstance(value, Tensor)
        if value.numel() == 1:
            own = x.sum().reshape(value.shape)
            return own if total is None else total.add_(own)
        if total is None:
            total = torch.zeros_like(value, dtype=x.dtype)
        (side,) = self.sides
        total[self.question.anchors(side, self.tile.places[side])] += x.sum(1 - side)
        return total


def views(question: Question, tile: Tile) -> list[View]:
    """Return a block as the sides that ask see it: together, if they ask the same."""
    if len(question.sides) == 1 or question.is_shared:
        return [View(question, tile, question.sides)]
    return [View(question, tile, (0,)), View(question, tile, (1,))]


def affine(scores: Tensor, scale: Value, shift: Value | None) -> Tensor:
    """Return ``scale S + shift``, a new tensor."""
    if shift is None and not isinstance(scale, Tensor) and scale == 1:
        return scores.clone()  # whose backward pass does nothing
    if shift is None:
        return scores * scale
    if isinstance(scale, Tensor) and isinstance(shift, Tensor):
        return torch.addcmul(shift, scores, scale)
    if isinstance(scale, Tensor):
        return scores * scale + shift
    if isinstance(shift, Tensor):
        return torch.add(shift, scores, alpha=scale)
    return torch.rsub(scores, shift, alpha=-scale)  # one operator


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the values (A,) of all sides from the values of each; those of one are not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim)


def has_each(x: Value | None) -> TypeGuard[Tensor]:
    """Return whether a value is one for each anchor."""
    return isinstance(x, Tensor) and x.numel() > 1


def is_trained(x: Value | None) -> TypeGuard[Tensor]:
    """Return whether a value gets a gradient."""
    return isinstance(x, Tensor) and x.requires_grad
