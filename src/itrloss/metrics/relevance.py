"""Which pairs are right, and which are ranked at all."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ..checks import from_numpy
from ..engine.ranking import Relevance
from ..engine.relation import slots
from ..similarity import Similarity
from .judgements import Judgements, Pairs, as_judgements
from .matching import existing, right_pairs


class Rules(TypedDict, total=False):
    """The arguments of ``retrieval_results`` that say who is right, and who is ranked at all."""

    relevant: Pairs
    exclude: Pairs
    candidates: Pairs


class Judged(NamedTuple):
    """The right pairs, and which pairs are ranked at all."""

    shape: tuple[int, int]  # (n_images, n_texts)
    right: Judgements  # with float64 grades above 0
    listed: Judgements | None  # pairs that are not ranked, or the only ones; None: all are
    only: bool  # whether the listed pairs alone are ranked

    def within(self, rows: Tensor, cols: Tensor) -> Judged:
        """Return the same among some images (n,) and texts (m,), by their places among these."""
        listed = None if self.listed is None else _among(self.listed, rows, cols)
        return Judged((len(rows), len(cols)), _among(self.right, rows, cols), listed, self.only)

    @property
    def T(self) -> Judged:
        """The same with the texts as queries."""
        n, m = self.shape
        listed = None if self.listed is None else _turned(self.listed)
        return Judged((m, n), _turned(self.right), listed, self.only)

    def relevance(self) -> Relevance:
        """Return who is right for each query, and who is no candidate."""
        queries, candidates, grades = self.right
        slot = slots(queries)
        width = int(slot.amax()) + 1 if len(slot) else 0
        positives = torch.full((self.shape[0], width), -1, device=queries.device)
        positives[queries, slot] = candidates
        table = None
        if not bool((grades == 1).all()):
            table = grades.new_zeros(positives.shape)
            table[queries, slot] = grades
        return Relevance(positives, table, None if self.listed is None else self.excluded)

    def excluded(self, part: slice) -> Tensor:
        """Return the (B, C) bool mask of the candidates of some queries that are not ranked."""
        assert self.listed is not None
        queries, candidates, _ = self.listed
        here = (queries >= part.start) & (queries < part.stop)
        shape = part.stop - part.start, self.shape[1]
        mask = torch.full(shape, self.only, dtype=torch.bool, device=queries.device)
        mask[queries[here] - part.start, candidates[here]] = not self.only
        return mask


def _turned(pairs: Judgements) -> Judgements:
    """Return pairs with the texts as queries."""
    return Judgements(pairs.texts, pairs.images, pairs.grades)


def _among(pairs: Judgements, rows: Tensor, cols: Tensor) -> Judgements:
    """Return the pairs that are among rows (n,) and columns (m,), both ascending, by their places
    there.
    """
    kept = pairs.only(torch.isin(pairs.images, rows) & torch.isin(pairs.texts, cols))
    images = torch.searchsorted(rows, kept.images)
    return Judgements(images, torch.searchsorted(cols, kept.texts), kept.grades)


def judged(
    sim: Similarity,
    relevant: Pairs | None = None,
    exclude: Pairs | None = None,
    candidates: Pairs | None = None,
) -> Judged:
    """Return the right pairs, those that match if ``relevant`` is None, and the ranked ones.

    What is excluded is not right. What is right and no candidate was missed, and stays right.
    """
    if relevant is None:
        images, texts = right_pairs(sim)
        ones = torch.ones(len(images), dtype=torch.float64, device=sim.device)
        right = Judgements(images, texts, ones)
    else:
        pairs = as_judgements("relevant", relevant, sim.shape, sim.device)
        if not bool((pairs.grades != 0).any()):
            raise ValueError("relevant: expected pairs with a grade above 0, got none")
        lowest = float(pairs.grades.amin())
        if lowest < 0:
            raise ValueError(f"relevant: expected grades of at least 0, got {lowest:g}")
        rows, cols = existing(sim)
        exist = torch.isin(pairs.images, rows) & torch.isin(pairs.texts, cols)
        right = pairs.only(exist & (pairs.grades > 0))
    listed = None
    if exclude is not None:
        listed = _listed("exclude", exclude, sim)
        right = _without(right, listed, sim.shape[1])
    if candidates is not None:
        chosen = _listed("candidates", candidates, sim)
        listed = chosen if listed is None else _without(chosen, listed, sim.shape[1])
    return Judged(sim.shape, right, listed, candidates is not None)


def _without(pairs: Judgements, others: Judgements, count: int) -> Judgements:
    """Return the pairs that are none of the others; there are ``count`` texts."""
    numbers = pairs.images * count + pairs.texts
    return pairs.only(~torch.isin(numbers, others.images * count + others.texts))


def _listed(name: str, pairs: Pairs, sim: Similarity) -> Judgements:
    """Return pairs, of which a matrix says whether they are meant."""
    pairs = from_numpy(pairs)
    if isinstance(pairs, Tensor) and pairs.is_floating_point():  # grades, or scores
        got = f"shape {tuple(pairs.shape)} of {pairs.dtype}"
        raise ValueError(f"{name}: expected a bool matrix {sim.shape}, got {got}")
    return as_judgements(name, pairs, sim.shape, sim.device)


def folds_of(sim: Similarity, folds: int) -> list[tuple[Tensor, Tensor]]:
    """Return the folds of the images that exist: consecutive images (n,) with their texts (m,),
    among which each is ranked. One fold has all texts that exist.
    """
    rows, cols = existing(sim)
    if folds == 1:
        return [(rows, cols)]
    if folds < 1 or len(rows) % folds:
        raise ValueError(f"folds: expected a divisor of the {len(rows)} images, got {folds}")
    images, texts = right_pairs(sim)
    parts = []
    for part in rows.split(len(rows) // folds):
        own = texts[torch.isin(images, part)].unique()
        if not len(own):
            raise ValueError(
                f"folds: images {int(part[0])} to {int(part[-1])} are a part without a text"
            )
        parts.append((part, own))
    if bool((torch.cat([cols for _, cols in parts]).bincount() > 1).any()):
        raise ValueError("folds: expected each text to have its images in one part")
    return parts
