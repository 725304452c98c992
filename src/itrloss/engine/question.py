"""What is computed from a score matrix, and how the anchors of a side see a tile of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from .inputs import Tile
from .pairs import Over, Pairs
from .terms import Term
from .vectors import host_may_read

Value = float | Tensor  # one number for all anchors, or a tensor (1,) or (A,)


class Attempt(NamedTuple):
    """Sums that were found before, with a shift that is only usually right."""

    shift: Tensor  # (1,) or (A,)
    sums: Tensor  # (A,)


class Condition(NamedTuple):
    """When an answer is needed: if the flag, which is on the device, has this value.

    The host cannot read the flag without waiting for the device. So both of two alternative
    questions are asked, with opposite conditions, and the device then selects one of the answers.
    """

    flag: Tensor  # () bool
    value: bool


@dataclass(frozen=True, eq=False)
class Question:
    """The sums of terms over the candidates of the sides that ask.

        total_i = sum_j f(scale_i S_ij + shift_i, *params_i)

    They are (A,) for one term, and (K, A) for K terms of the same argument. A are the anchors of
    the sides, the rows first. A shift (L, A) asks for the sum of L sums, one with each shift.
    """

    pairs: Pairs
    sides: tuple[int, ...]  # 0: the rows are anchors; 1: the columns are
    terms: tuple[Term, ...]
    over: Over = "negatives"
    scale: Value = 1.0
    shift: Value | None = None
    below: Value | None = None  # only candidates with a score below it count
    above: Value | None = None
    params: tuple[Tensor, ...] = ()  # of the term, (1,) or (A,)
    teaches: bool = False  # the tile's other scores are the first parameter of the term
    attempt: Attempt | None = None  # its sums are the answer if all its shifts are this question's
    condition: Condition | None = None  # where it does not hold, any answer will do

    @property
    def values(self) -> tuple[Value | None, ...]:
        """The numbers that may differ between anchors."""
        return self.scale, self.shift, self.below, self.above, *self.params

    @property
    def size(self) -> int:
        """The number of anchors, A."""
        return sum(self.pairs.shape[side] for side in self.sides)

    @property
    def slots(self) -> int:
        """The number of shifts, L."""
        if isinstance(self.shift, Tensor) and self.shift.dim() == 2:
            return self.shift.shape[0]
        return 1

    @property
    def limited(self) -> bool:
        """Whether scores decide which candidates count."""
        return self.below is not None or self.above is not None

    def alternatives(self) -> list[Question]:
        """Return the question, or after an attempt two: as attempted, and with its own shift.

        Their conditions say which of the two counts.
        """
        if self.attempt is None:
            return [self]
        assert isinstance(self.shift, Tensor)
        failed = torch.ne(self.shift, self.attempt.shift).any()
        as_attempted = replace(
            self, shift=self.attempt.shift, attempt=None, condition=Condition(failed, False)
        )
        return [as_attempted, replace(self, attempt=None, condition=Condition(failed, True))]

    @property
    def is_shared(self) -> bool:
        """Whether rows and columns ask the same, so that one evaluation serves both."""
        return len(self.sides) == 2 and not any(has_each(x) for x in self.values)

    def views(self, tile: Tile) -> list[View]:
        """Return a tile as the sides see it, for each shift."""
        views: list[View] = []
        for kind in self._view_kinds():
            for slot in range(self.slots):
                view = kind(self, tile, slot)
                if slot == 0 or not view.is_unused():
                    views.append(view)
        return views

    def _view_kinds(self) -> list[type[View]]:
        """Return how the sides see a tile: together, if they ask the same, or one by one."""
        if self.sides == (0,):
            return [RowsView]
        if self.sides == (1,):
            return [ColumnsView]
        if self.is_shared:
            return [SharedView]
        return [RowsView, ColumnsView]


class View:
    """A tile as some anchors see it: the anchors are the first dimension, (r, c)."""

    #: The sides of the matrix whose anchors these are, each with the dimension of its candidates.
    candidates: tuple[tuple[int, int], ...]
    anchors: slice  # where they are among all anchors (A,)
    scores: Tensor  # (r, c)

    def __init__(self, question: Question, tile: Tile, slot: int):
        self.question = question
        self.tile = tile
        self.slot = slot  # number of the shift
        self.start()

    def start(self) -> None:
        """Set the anchors and the scores."""
        raise NotImplementedError

    def seen(self, x: Tensor) -> Tensor:
        """Return a tile (r, c) of the matrix as seen from here."""
        raise NotImplementedError

    def fill_(self, x: Tensor, value: float) -> None:
        """Fill the pairs that do not count by their ids, in values as seen from here."""
        raise NotImplementedError

    def upstream(self, grad: Tensor) -> Tensor:
        """Return the gradient (A,) of the sums for each pair: (r, 1) or (r, c)."""
        return grad[self.anchors, None]

    def of_matrix(self, x: Tensor) -> Tensor:
        """Return the tile (r, c) of the matrix from values as seen from here: undo `seen`."""
        raise NotImplementedError

    # The rest is the same for all views.

    def column(self, x: Value) -> Value:
        """Return the anchors' values as (r, 1), which broadcast with the scores."""
        return x[self.anchors, None] if has_each(x) else x

    def shift(self) -> Value | None:
        """Return the shift of this slot, (r, 1) or one number."""
        shift = self.question.shift
        if isinstance(shift, Tensor) and shift.dim() == 2:
            return shift[self.slot, self.anchors, None]
        return None if shift is None else self.column(shift)

    def is_unused(self) -> bool:
        """Return whether the shift is -inf for all anchors here, as far as the host may read it."""
        shift = self.shift()
        if not isinstance(shift, Tensor) or not host_may_read(shift):
            return False
        return float(shift.detach().amax()) == -torch.inf

    def affine(self) -> Tensor:
        """Return ``scale S + shift`` (r, c), a new tensor."""
        return affine(self.scores, self.column(self.question.scale), self.shift())

    def params(self) -> list[Tensor]:
        """Return the parameters of the term: (r, 1), (1,), or a teacher's scores (r, c)."""
        own = []
        if self.question.teaches:
            assert self.tile.other is not None
            own.append(self.seen(self.tile.other))
        for param in self.question.params:
            column = self.column(param)
            assert isinstance(column, Tensor)
            own.append(column)
        return own

    def exclude_(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Fill the pairs (r, c) that do not count; return them."""
        self.fill_(x, value)
        question = self.question
        if not question.limited:
            return x
        judged = self.scores
        if self.tile.other is not None:
            judged = self.seen(self.tile.other)
        if question.below is not None:
            x.masked_fill_(judged >= self.column(question.below), value)
        if question.above is not None:
            x.masked_fill_(judged <= self.column(question.above), value)
        return x


class RowsView(View):
    """The rows are the anchors."""

    candidates = ((0, 1),)

    def start(self) -> None:
        """Take the tile's rows, and its scores as they are."""
        self.anchors = self.tile.places[0]
        self.scores = self.tile.scores

    def seen(self, x: Tensor) -> Tensor:
        return x

    def fill_(self, x: Tensor, value: float) -> None:
        self.question.pairs.exclude_(x, self.tile.places, value, self.question.over)

    def of_matrix(self, x: Tensor) -> Tensor:
        return x


class SharedView(RowsView):
    """Both sides ask the same: one evaluation serves the rows and the columns."""

    candidates = ((0, 1), (1, 0))

    def upstream(self, grad: Tensor) -> Tensor:
        """Return the sums of the gradients of a score's row and of its column."""
        n = self.question.pairs.shape[0]
        c = self.tile.places[1]
        return grad[self.anchors, None] + grad[n + c.start : n + c.stop]


class ColumnsView(View):
    """The columns are the anchors."""

    candidates = ((1, 1),)

    def start(self) -> None:
        """Take the tile's columns, numbered after all rows if these are asked, too."""
        c = self.tile.places[1]
        n = self.question.pairs.shape[0] if 0 in self.question.sides else 0
        self.anchors = slice(n + c.start, n + c.stop)
        self.scores = self.tile.scores.T

    def seen(self, x: Tensor) -> Tensor:
        return x.T

    def fill_(self, x: Tensor, value: float) -> None:
        self.question.pairs.exclude_(x.T, self.tile.places, value, self.question.over)

    def of_matrix(self, x: Tensor) -> Tensor:
        return x.T


def affine(scores: Tensor, scale: Value, shift: Value | None) -> Tensor:
    """Return ``scale S + shift``, a new tensor."""
    if isinstance(scale, float) and scale == 1.0:
        return scores.clone() if shift is None else scores + shift
    if isinstance(scale, float) and isinstance(shift, Tensor):
        return torch.add(shift, scores, alpha=scale)
    z = scores * scale
    return z if shift is None else z.add_(shift)


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
