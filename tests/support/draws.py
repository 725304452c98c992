"""Random batches: shapes, who matches whom, and what decides how the engines work.

A relation is drawn as losses take it, with the items that loops take in its place; see
`oracle.Item`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from itrloss import NO_ID, Related
from itrloss.engine import inputs, pair_scores, relation
from support.oracle import Item, Judged

T = TypeVar("T")
Items = list[Item] | list[Judged]


class Draw:
    """Random choices and tensors, the same for the same names."""

    def __init__(self, *names: Any):
        self.random = random.Random(repr(names))
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(32))

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def normal(self, *shape: int) -> Tensor:
        """Return float64 numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def vectors(self, size: int, dim: int, zeros: bool = True) -> Tensor:
        """Return embeddings whose lengths differ by a factor of up to 30; some may be 0."""
        lengths = torch.rand(size, 1, generator=self.generator, dtype=torch.float64) * 3 + 0.1
        if zeros and self.chance(0.2):
            lengths *= self.integers(4, size, 1) > 0
        return self.normal(size, dim) * lengths

    def marked(self, ids: Tensor, probability: float, value: int = NO_ID) -> Tensor:
        """Return ids of which some are the value."""
        chosen = torch.rand(ids.shape, generator=self.generator) < probability
        return ids.masked_fill(chosen, value)


@dataclass
class Batch:
    """Who matches in a batch of n rows and m columns."""

    kind: str
    n: int
    m: int
    ids: tuple[Tensor | None, Tensor | None] = (None, None)
    groups: tuple[Tensor | None, Tensor | None] = (None, None)
    rule: Any = "same"
    matches: Tensor | None = None
    one_set: bool = False  # groups are the numbers of items
    views: int = 1  # of the items of one set

    @property
    def related(self) -> Related | None:
        """What a similarity takes in addition to ids."""
        if self.matches is None and self.groups[0] is None:
            return None
        return Related(self.groups, self.rule, self.matches, one_set=self.one_set)

    @property
    def given(self) -> dict[str, Any]:
        """What a loss of pairs takes in addition to embeddings."""
        if self.one_set:
            return {"labels": self.ids[0]}
        every = {
            "image_ids": self.ids[0],
            "text_ids": self.ids[1],
            "image_groups": self.groups[0],
            "text_groups": self.groups[1],
            "matches": self.matches,
        }
        return {name: x for name, x in every.items() if x is not None}

    def items(self) -> tuple[Items, Items]:
        """Return the rows and the columns as loops take them."""
        if self.matches is not None:
            rows = [Judged(i, entries) for i, entries in enumerate(self.matches.tolist())]
            cols = [Judged(j, entries) for j, entries in enumerate(self.matches.T.tolist())]
            return rows, cols
        return self._side(0, self.n), self._side(1, self.m)

    def _side(self, side: int, size: int) -> list[Item]:
        ids = self.ids[side]
        labels = [[i] for i in range(size)] if ids is None else ids.reshape(size, -1).tolist()
        if self.one_set:
            sets = [frozenset(own) - {NO_ID} for own in self.views * labels]
            return [Item(own, number, "itself") for number, own in enumerate(sets)]
        groups = self.groups[side]
        groups = [NO_ID] * size if groups is None else groups.tolist()
        return [
            Item(frozenset(own) - {NO_ID}, group, self.rule)
            for own, group in zip(labels, groups, strict=True)
        ]

    def part(self, rows: slice, cols: slice) -> Batch:
        """Return who matches of some rows and columns."""

        def cut(sides: tuple[Tensor | None, Tensor | None]) -> Any:
            places = (rows, cols)
            return tuple(None if x is None else x[k] for x, k in zip(sides, places, strict=True))

        matches = None if self.matches is None else self.matches[rows, cols]
        n, m = len(range(self.n)[rows]), len(range(self.m)[cols])
        ids, groups = cut(self.ids), cut(self.groups)
        return replace(self, n=n, m=m, ids=ids, groups=groups, matches=matches)

    def to(self, device: torch.device | str) -> Batch:
        """Return the same on a device."""

        def moved(*given: Tensor | None) -> Any:
            return tuple(None if x is None else x.to(device) for x in given)

        (matches,) = moved(self.matches)
        return replace(self, ids=moved(*self.ids), groups=moved(*self.groups), matches=matches)

    def of_process(self, rows: slice, cols: slice) -> Batch:
        """Return what a process has, whose part of a matrix has the columns of all."""
        found = self.part(rows, cols)
        if self.matches is not None:
            found.matches = self.matches[rows]
        return found


def places_of_process(draw: Draw, batch: Batch, rank: int, world: int = 2) -> tuple[slice, slice]:
    """Draw which rows and columns a process has: of each side consecutive ones, or none."""
    if batch.kind in SQUARE:
        place = drawn_part(draw, batch.n, rank, world)
        return place, place
    return drawn_part(draw, batch.n, rank, world), drawn_part(draw, batch.m, rank, world)


def drawn_part(draw: Draw, size: int, rank: int, world: int) -> slice:
    cuts = sorted(draw.random.randint(0, size) for _ in range(world - 1))
    ends = [0, *cuts, size]
    return slice(ends[rank], ends[rank + 1])


# --------------------------------------------------------------------------------- drawn relations


def of_pairs(draw: Draw, n: int, m: int) -> Batch:
    return Batch("pairs", n, m)


def of_ids(draw: Draw, n: int, m: int) -> Batch:
    few = draw.pick([1, 2, 4, 9])
    return Batch("ids", n, m, (draw.integers(few, n), draw.integers(few, m)))


def with_padding(draw: Draw, n: int, m: int) -> Batch:
    batch = of_ids(draw, n, m)
    rows, cols = batch.ids
    ids = (draw.marked(rows, 0.3), draw.marked(cols, 0.3))
    return replace(batch, kind="padding", ids=ids)


def of_numbers(draw: Draw, n: int, m: int) -> Batch:
    """Columns have the number of a row, or of none."""
    return Batch("numbers", n, m, (None, draw.integers(n + 2, m) - 1))


def of_one_tensor(draw: Draw, n: int, m: int) -> Batch:
    own = draw.marked(draw.integers(2 * n, n), draw.pick([0.0, 0.3]))
    return Batch("same", n, m, (own, own))


def of_one_set(draw: Draw, n: int, m: int) -> Batch:
    """Row i and column i are one item."""
    shape = draw.pick([(n,), (n,), (n, 2)])  # of labels, or of sets of them
    own = draw.marked(draw.integers(draw.pick([2, 4, 9]), *shape), 0.1)
    numbers = torch.arange(n)
    return Batch("one set", n, n, (own, own), (numbers, numbers), "other", one_set=True)


def of_label_sets(draw: Draw, n: int, m: int) -> Batch:
    labels = draw.pick([4, 8, 18])
    rows = draw.marked(draw.integers(labels, n, 3), 0.3)
    cols = draw.marked(draw.integers(labels, m, 2), 0.3)
    if draw.chance(0.2):  # sets on one side alone
        cols = cols[:, 0]
    return Batch("labels", n, m, (rows, cols))


def of_groups(draw: Draw, n: int, m: int) -> Batch:
    """Some are open to all groups."""
    batch = of_ids(draw, n, m)
    groups = (draw.marked(draw.integers(3, n), 0.2), draw.marked(draw.integers(3, m), 0.2))
    return replace(batch, kind="groups", groups=groups, rule=draw.pick(["same", "other"]))


def of_matches(draw: Draw, n: int, m: int) -> Batch:
    """Half of the pairs are neither positive nor negative."""
    matches = draw.integers(4, n, m).clamp_max(2).double()
    return Batch("matches", n, m, matches=matches.masked_fill(matches == 2, torch.nan))


def of_weights(draw: Draw, n: int, m: int) -> Batch:
    """Matches have other numbers than 1."""
    batch = of_matches(draw, n, m)
    weights = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)[draw.integers(3, n, m)]
    return replace(batch, kind="weights", matches=batch.matches * weights)


RELATIONS = {
    "pairs": of_pairs,
    "ids": of_ids,
    "padding": with_padding,
    "numbers": of_numbers,
    "same": of_one_tensor,
    "one set": of_one_set,
    "labels": of_label_sets,
    "groups": of_groups,
    "matches": of_matches,
    "weights": of_weights,
}
SQUARE = ["pairs", "same", "one set"]  # with as many columns as rows
KINDS = [kind for kind in RELATIONS if kind not in ("weights", "one set")]
OF_IDS = ["pairs", "ids", "padding", "numbers", "same"]  # one of each item


def drawn_batch(draw: Draw, kinds: Sequence[str] = KINDS) -> Batch:
    """Draw the shape of a batch, and who matches."""
    kind = draw.pick(kinds)
    n = draw.pick([1, 2, 3, 5, 8, 13])
    is_square = kind in SQUARE or draw.chance(0.2)
    m = n if is_square else draw.pick([1, 2, 4, 7, 17])
    return RELATIONS[kind](draw, n, m)


def draw_workings(draw: Draw, monkeypatch: Any) -> str:
    """Draw sizes that decide how answers are computed, and none of which changes one; return them
    in words.
    """
    tile = draw.pick([(20, 5), (6, 2), (60, 10), (2**20, 2048)])
    few = draw.pick([-1, 2, 64])
    by_mask = draw.pick([0, 2**16])
    at_once = draw.pick([20, 2**20])
    monkeypatch.setitem(inputs.TILE, "cpu", tile)
    monkeypatch.setattr(relation, "FEW", few)
    monkeypatch.setattr(relation, "BY_MASK", by_mask)
    monkeypatch.setattr(relation, "AT_ONCE", at_once)
    monkeypatch.setattr(pair_scores, "GATHERED", draw.pick([20, 2**18]))
    return f"tiles {tile}, few {few}, masks {by_mask}, at once {at_once}"
