"""What is asked of a score matrix, and how the anchors of a side see a tile of it."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from .inputs import Tile
from .pairs import Over, Pairs
from .terms import Term
from .vectors import host_may_read

Value = float | Tensor  # one number for all anchors, or a tensor (1,) or (A,)


class Question(NamedTuple):
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

    def views(self, tile: Tile) -> list[View]:
        """Return a tile as the sides see it, for each shift: one view if they ask the same."""
        groups = [self.sides]
        if any(has_each(x) for x in self.values):
            groups = [(side,) for side in self.sides]
        found = []
        for sides in groups:
            for slot in range(self.slots):
                view = View(self, tile, sides, slot)
                if slot == 0 or not view.is_unused():
                    found.append(view)
        return found


class View:
    """A tile as the anchors of a side see it: they are the first dimension, (r, c).

    With two ``sides``, what is asked is the same for both, and one evaluation serves them.
    """

    def __init__(self, question: Question, tile: Tile, sides: tuple[int, ...], slot: int = 0):
        self.question = question
        self.tile = tile
        self.sides = sides
        self.side = sides[0]
        self.slot = slot  # number of the shift
        self.scores = self.turned(tile.scores)

    def turned(self, x: Tensor) -> Tensor:
        """Return a tile as seen from here, or back from here."""
        return x if self.side == 0 else x.T

    def place(self, side: int) -> slice:
        """Return where a side's anchors of the tile are among all (A,)."""
        part = self.tile.places[side]
        if side == 0 or self.question.sides == (1,):
            return part
        n = self.question.pairs.shape[0]
        return slice(n + part.start, n + part.stop)

    def column(self, x: Value) -> Value:
        """Return the anchors' values as (r, 1), which broadcast with the scores."""
        if not has_each(x):
            return x
        return x[self.place(self.side), None]

    def shift(self) -> Value | None:
        """Return the shift of this slot, (r, 1) or one number."""
        shift = self.question.shift
        if isinstance(shift, Tensor) and shift.dim() == 2:
            return shift[self.slot, self.place(self.side), None]
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
            own.append(self.turned(self.tile.other))
        for param in self.question.params:
            column = self.column(param)
            assert isinstance(column, Tensor)
            own.append(column)
        return own

    def exclude_(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Fill the pairs (r, c) that do not count; return them."""
        question = self.question
        question.pairs.exclude_(self.turned(x), self.tile.places, value, question.over)
        if not question.limited:
            return x
        judged = self.scores
        if self.tile.other is not None:
            judged = self.turned(self.tile.other)
        if question.below is not None:
            x.masked_fill_(judged >= self.column(question.below), value)
        if question.above is not None:
            x.masked_fill_(judged <= self.column(question.above), value)
        return x

    def upstream(self, grad: Tensor) -> Tensor:
        """Return the gradient (A,) of the sums as (r, 1), or as (r, c) if it is of both sides."""
        own = grad[self.place(self.side), None]
        if len(self.sides) == 1:
            return own
        return own + grad[self.place(1)]


def affine(scores: Tensor, scale: Value, shift: Value | None) -> Tensor:
    """Return ``scale S + shift``, a new tensor."""
    if isinstance(scale, float) and scale == 1.0:
        return scores.clone() if shift is None else scores + shift
    if isinstance(scale, float) and isinstance(shift, Tensor) and scale != 0:
        # a S - a b would cancel digits for a large a; a (S - b) is exact for a score near b.
        return (scores + shift / scale).mul_(scale)
    z = scores * scale
    return z if shift is None else z.add_(shift)


def has_each(x: Value | None) -> TypeGuard[Tensor]:
    """Return whether a value is one for each anchor."""
    return isinstance(x, Tensor) and x.numel() > 1


def is_trained(x: Value | None) -> TypeGuard[Tensor]:
    """Return whether a value gets a gradient."""
    return isinstance(x, Tensor) and x.requires_grad
