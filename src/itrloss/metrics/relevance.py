"""Which pairs are right, and which are ranked at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from ..checks import as_integers, from_numpy, require_finite
from ..engine.ranking import Relevance
from ..engine.relation import slots
from ..similarity import Similarity
from .judgements import (
    IndicesLike,
    Judgements,
    distinct_pairs,
    grades_of_pairs,
    pair_numbers,
)
from .matching import are_there, places, right_pairs

ListedPairs = tuple[IndicesLike, IndicesLike]
#: Pairs, a (N, M) bool matrix, or the candidates of each image as lists.
WhichPairs = ListedPairs | Tensor | Sequence[Sequence[int]]
Relevant = ListedPairs | Judgements | Tensor


class Rules(TypedDict, total=False):
    """The arguments of ``retrieval_results`` that say who is right, and who is ranked at all."""

    relevant: Relevant
    exclude: WhichPairs
    candidates: WhichPairs


class Rule(NamedTuple):
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

    @property
    def T(self) -> Rule:
        """The same with the candidates as queries."""
        rows, cols = self.shape
        queries = self.numbers // cols
        numbers = self.numbers % cols * rows + queries
        return Rule((cols, rows), numbers.sort().values, self.only)


class Judged(NamedTuple):
    """The right pairs, and which pairs are ranked at all."""

    shape: tuple[int, int]  # (n_images, n_texts)
    images: Tensor  # (P,)
    texts: Tensor  # (P,)
    grades: Tensor | None = None  # (P,) float64 above 0; None: all 1
    rules: Sequence[Rule] = ()  # of images as queries

    def only(self, kept: Tensor) -> Judged:
        """Return the same with some of the right pairs, of a bool mask (P,)."""
        grades = None if self.grades is None else self.grades[kept]
        return self._replace(images=self.images[kept], texts=self.texts[kept], grades=grades)

    def listed(self) -> Judgements:
        """Return the right pairs with their grades."""
        grades = torch.ones_like(self.images) if self.grades is None else self.grades
        return Judgements(self.images, self.texts, grades)

    def both(self) -> tuple[Relevance, Relevance]:
        """Return the relevance for images, and for texts, as queries."""
        turned = [rule.T for rule in self.rules]
        of_images = _relevance(self.images, self.texts, self.grades, self.shape[0], self.rules)
        of_texts = _relevance(self.texts, self.images, self.grades, self.shape[1], turned)
        return of_images, of_texts


def _relevance(
    queries: Tensor, candidates: Tensor, grades: Tensor | None, size: int, rules: Sequence[Rule]
) -> Relevance:
    """Return who is right for each of ``size`` queries, and who is no candidate."""
    slot = slots(queries)
    width = int(slot.amax()) + 1 if len(slot) else 0
    positives = torch.full((size, width), -1, device=queries.device)
    positives[queries, slot] = candidates
    table = None
    if grades is not None:
        table = torch.zeros(size, width, dtype=grades.dtype, device=queries.device)
        table[queries, slot] = grades
    if not rules:
        return Relevance(positives, table)

    def excluded(part: slice) -> Tensor:
        """Return who is not ranked for a slice of the queries, by any rule."""
        masks = [rule.excluded(part) for rule in rules]
        return torch.stack(masks).any(0)

    return Relevance(positives, table, excluded)


def judged(
    sim: Similarity,
    relevant: Relevant | None = None,
    exclude: WhichPairs | None = None,
    candidates: WhichPairs | None = None,
) -> Judged:
    """Return the right pairs, those that match if ``relevant`` is None, and the ranked ones."""
    rules = []
    for name, pairs in (("exclude", exclude), ("candidates", candidates)):
        if pairs is not None:
            numbers = _pair_numbers(name, pairs, sim.shape).to(sim.device)
            rules.append(Rule(sim.shape, numbers, only=name == "candidates"))
    if relevant is None:
        images, texts = right_pairs(sim)
        right = Judged(sim.shape, images, texts, rules=rules)
    else:
        images, texts, grades = _right_pairs(relevant, sim.shape)
        images = images.to(sim.device)
        texts = texts.to(sim.device)
        grades = None if grades is None else grades.to(sim.device)
        right = Judged(sim.shape, images, texts, grades, rules)
        right = right.only(are_there(sim, images, texts))
    for rule in rules:
        right = right.only(rule.keeps(right.images, right.texts))
    return right


class Fold(NamedTuple):
    """Consecutive images with their texts, among which each is ranked."""

    rows: Tensor  # (n,) indices
    cols: Tensor  # (m,) indices, ascending
    right: Judged  # whose indices are places among these


def folds_of(sim: Similarity, folds: int) -> list[Fold]:
    """Return the folds of the images that exist."""
    numbers, _ = places(sim)
    if folds < 1 or len(numbers) % folds:
        raise ValueError(f"folds: expected a divisor of the {len(numbers)} images, got {folds}")
    images, texts = right_pairs(sim)
    parts = []
    for rows in numbers.split(len(numbers) // folds):
        inside = torch.isin(images, rows)
        if not bool(inside.any()):
            raise ValueError(
                f"folds: images {int(rows[0])} to {int(rows[-1])} are a part without a text"
            )
        cols, text = texts[inside].unique(return_inverse=True)
        image = torch.searchsorted(rows, images[inside])
        right = Judged((len(rows), len(cols)), image, text)
        parts.append(Fold(rows, cols, right))
    return parts


def _right_pairs(
    relevant: Relevant, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (P,) images, texts and grades of the right pairs; no grades where all are 1."""
    relevant = from_numpy(_not_of_scipy(relevant))
    if isinstance(relevant, list) and len(relevant) == shape[0]:  # a list of each image's texts
        relevant = _of_lists("relevant", relevant, shape[0])
    if isinstance(relevant, Tensor):
        relevant = _of_matrix(relevant, shape)
    if not isinstance(relevant, Judgements):
        if not isinstance(relevant, tuple) or len(relevant) != 2:
            expected = f"(images, texts), Judgements or a matrix {shape}"
            raise TypeError(f"relevant: expected {expected}, got {type(relevant).__name__}")
        images, texts = distinct_pairs("relevant", *relevant, shape)[0]
        return images, texts, None
    images, texts, grades = grades_of_pairs("relevant", relevant, shape)
    if bool((grades < 0).any()):
        lowest = float(grades.amin())
        raise ValueError(f"relevant: expected grades of at least 0, got {lowest:g}")
    right = grades > 0
    if bool((grades[right] == 1).all()):
        return images[right], texts[right], None
    return images[right], texts[right], grades[right]


def _of_matrix(matrix: Tensor, shape: tuple[int, int]) -> Judgements:
    """Return the judgements in a matrix (N, M) of grades, dense or sparse."""
    if tuple(matrix.shape) != shape:
        raise ValueError(f"relevant: expected shape {shape}, got {tuple(matrix.shape)}")
    matrix = matrix.detach()
    if matrix.layout == torch.strided:
        if matrix.is_floating_point():
            require_finite("relevant", matrix)
        images, texts = matrix.nonzero(as_tuple=True)
        grades = matrix[images, texts]
    else:
        matrix = matrix.to_sparse_coo().coalesce()
        images, texts = matrix.indices()
        grades = matrix.values()
    if not len(grades):
        raise ValueError("relevant: expected grades above 0, got none")
    return Judgements(images, texts, grades)


def _pair_numbers(name: str, pairs: WhichPairs, shape: tuple[int, int]) -> Tensor:
    """Return the ascending numbers (P,) of pairs: of lists, of a mask, or of two lists of
    indices.
    """
    pairs = from_numpy(_not_of_scipy(pairs))
    if isinstance(pairs, Tensor):
        if pairs.layout != torch.strided:
            pairs = pairs.to_dense() != 0
        is_mask = not pairs.is_floating_point() and bool(((pairs == 0) | (pairs == 1)).all())
        if not is_mask or tuple(pairs.shape) != shape:
            got = f"shape {tuple(pairs.shape)} of {pairs.dtype}"
            raise ValueError(f"{name}: expected a bool matrix {shape}, got {got}")
        return pairs.flatten().nonzero()[:, 0]  # also of integers 0 and 1
    if isinstance(pairs, list):
        images, texts = _of_lists(name, pairs, shape[0])
    elif isinstance(pairs, tuple) and len(pairs) == 2:
        images, texts = pairs
    else:
        expected = "(images, texts), a bool matrix, or a list of the texts of each image"
        raise TypeError(f"{name}: expected {expected}, got {type(pairs).__name__}")
    return pair_numbers(name, images, texts, shape).unique()


def _not_of_scipy(matrix: Any) -> Any:
    """Return a sparse matrix of SciPy as one of PyTorch; anything else as it is."""
    if not hasattr(matrix, "tocoo"):
        return matrix
    entries = matrix.tocoo()
    places = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    values = from_numpy(entries.data)
    return torch.sparse_coo_tensor(places, values, tuple(matrix.shape), check_invariants=True)


def _of_lists(name: str, lists: list, n: int) -> tuple[list[int], list[int]]:
    """Return the images and texts of the pairs in lists of each image's texts."""
    if len(lists) != n:
        raise ValueError(
            f"{name}: expected a list of texts for each of {n} images, got {len(lists)}"
        )
    images = []
    texts = []
    for image, own in enumerate(lists):
        if isinstance(own, int):
            raise TypeError(f"{name}: expected a list of the texts of each image, got {own}")
        own = as_integers(name, from_numpy(own)).tolist() if len(own) else []
        images += [image] * len(own)
        texts += own
    return images, texts
