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


class CandidateFilter(NamedTuple):
    """Pairs that are not ranked, or the only ones that are."""

    shape: tuple[int, int]  # (Q, C)
    numbers: Tensor  # (P,) of the pairs, q C + c, ascending
    only: bool  # whether they alone are ranked

    def excluded(self, part: slice) -> Tensor:
        """Return the (B, C) bool mask of the candidates of some queries that are not ranked."""
        count = self.shape[1]
        ends = torch.tensor([part.start, part.stop], device=self.numbers.device) * count
        start, stop = torch.searchsorted(self.numbers, ends).tolist()
        shape = part.stop - part.start, count
        mask = torch.full(shape, self.only, dtype=torch.bool, device=self.numbers.device)
        mask.view(-1)[self.numbers[start:stop] - part.start * count] = not self.only
        return mask

    def keeps(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Return the (P,) bool: whether these pairs are ranked."""
        listed = torch.isin(queries * self.shape[1] + candidates, self.numbers)
        return listed if self.only else ~listed

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the (P,) queries and (P,) candidates."""
        return self.numbers // self.shape[1], self.numbers % self.shape[1]

    @property
    def T(self) -> CandidateFilter:
        """The same with the candidates as queries."""
        rows, cols = self.shape
        queries, candidates = self.pairs()
        numbers = candidates * rows + queries
        return CandidateFilter((cols, rows), numbers.sort().values, self.only)


class Judged(NamedTuple):
    """The right pairs, and which pairs are ranked at all."""

    shape: tuple[int, int]  # (n_images, n_texts)
    right: Judgements  # with float64 grades above 0
    ranked: CandidateFilter | None  # of images as queries; None: all pairs

    def within(self, rows: Tensor, cols: Tensor) -> Judged:
        """Return the same among some images (n,) and texts (m,), by their places among these."""
        shape = len(rows), len(cols)
        if shape == self.shape:
            return self
        images, texts, kept = _places_of(self.right.images, self.right.texts, rows, cols)
        ranked = None
        if self.ranked is not None:
            queries, candidates, _ = _places_of(*self.ranked.pairs(), rows, cols)
            numbers = queries * len(cols) + candidates
            ranked = CandidateFilter(shape, numbers, self.ranked.only)
        return Judged(shape, Judgements(images, texts, self.right.grades[kept]), ranked)

    @property
    def T(self) -> Judged:
        """The same with the texts as queries."""
        n, m = self.shape
        images, texts, grades = self.right
        turned = None if self.ranked is None else self.ranked.T
        return Judged((m, n), Judgements(texts, images, grades), turned)

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
        return Relevance(positives, table, None if self.ranked is None else self.ranked.excluded)


def _places_of(
    images: Tensor, texts: Tensor, rows: Tensor, cols: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places of pairs (P,) among rows (n,) and columns (m,), both ascending, and the
    (P,) mask of the pairs that are among them.
    """
    kept = torch.isin(images, rows) & torch.isin(texts, cols)
    return torch.searchsorted(rows, images[kept]), torch.searchsorted(cols, texts[kept]), kept


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
        right = _right_pairs(relevant, sim)
    ranked = None
    if exclude is not None:
        ranked = CandidateFilter(sim.shape, _pair_numbers("exclude", exclude, sim), only=False)
        right = right.only(ranked.keeps(right.images, right.texts))
    if candidates is not None:
        chosen = CandidateFilter(sim.shape, _pair_numbers("candidates", candidates, sim), only=True)
        if ranked is not None:
            chosen = chosen._replace(numbers=chosen.numbers[ranked.keeps(*chosen.pairs())])
        ranked = chosen
    return Judged(sim.shape, right, ranked)


def _right_pairs(relevant: Pairs, sim: Similarity) -> Judgements:
    """Return the pairs of images and texts that exist, and that are right by their grades."""
    pairs = as_judgements("relevant", relevant, sim.shape)
    if not bool((pairs.grades != 0).any()):
        raise ValueError("relevant: expected pairs with a grade above 0, got none")
    lowest = float(pairs.grades.amin())
    if lowest < 0:
        raise ValueError(f"relevant: expected grades of at least 0, got {lowest:g}")
    images, texts, grades = (x.to(sim.device) for x in pairs)
    rows, cols = existing(sim)
    kept = (grades > 0) & torch.isin(images, rows) & torch.isin(texts, cols)
    return Judgements(images, texts, grades).only(kept)


def _pair_numbers(name: str, pairs: Pairs, sim: Similarity) -> Tensor:
    """Return the ascending numbers (P,) of pairs, of which a matrix says whether they are meant."""
    pairs = from_numpy(pairs)
    if isinstance(pairs, Tensor):
        is_mask = not pairs.is_floating_point() and bool(((pairs == 0) | (pairs == 1)).all())
        if not is_mask:
            got = f"shape {tuple(pairs.shape)} of {pairs.dtype}"
            raise ValueError(f"{name}: expected a bool matrix {sim.shape}, got {got}")
    images, texts, _ = as_judgements(name, pairs, sim.shape)
    return (images * sim.shape[1] + texts).to(sim.device)


class Fold(NamedTuple):
    """Consecutive images with their texts, among which each is ranked."""

    rows: Tensor  # (n,) indices
    cols: Tensor  # (m,) indices, ascending


def folds_of(sim: Similarity, folds: int) -> list[Fold]:
    """Return the folds of the images that exist; one fold has all texts that exist."""
    rows, cols = existing(sim)
    if folds == 1:
        return [Fold(rows, cols)]
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
        parts.append(Fold(part, own))
    if bool((torch.cat([part.cols for part in parts]).bincount() > 1).any()):
        raise ValueError("folds: expected each text to have its images in one part")
    return parts
