"""Relevance by human judgements instead of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import as_indices, as_integers, check_range, from_numpy, require_finite

IndicesLike = Tensor | np.ndarray | Sequence[int]
_ANY = (2**31, 2**31)  # a shape whose pairs can still be numbered


class Judgements(NamedTuple):
    """Human judgements of the relevance of image-text pairs: three 1-D tensors of the same length.

    A repeated pair has the mean of its grades.
    """

    images: Tensor  #: integers, row indices of the score matrix
    texts: Tensor  #: integers, column indices
    grades: Tensor  #: any numbers, higher is more relevant

    def at_least(self, grade: float) -> tuple[Tensor, Tensor]:
        """Return the (P,) images and (P,) texts of the pairs with this grade or a higher one."""
        images, texts, grades = grades_of_pairs("judgements", self)
        # 0.7 as float32 is less than 0.7: the limit is rounded as the grades are.
        given = _as_tensor(self.grades)
        dtype = torch.float64
        if isinstance(given, Tensor) and given.is_floating_point():
            dtype = given.dtype
        relevant = grades >= torch.tensor(grade, dtype=dtype, device=grades.device)
        if not bool(relevant.any()):
            raise ValueError(f"grade: no pair has a grade of {grade} or above")
        return images[relevant], texts[relevant]


def grades_of_pairs(
    name: str, judgements: Judgements, shape: tuple[int, int] = _ANY
) -> tuple[Tensor, Tensor, Tensor]:
    """Return checked images, texts and mean grades on the CPU, sorted, each pair once."""
    images, texts, grades = judgements
    images = as_integers(f"{name}.images", images)
    of_pairs = _as_tensor(grades)
    pairs, index = distinct_pairs(name, images, texts, shape)
    if not isinstance(of_pairs, Tensor) or of_pairs.shape != images.shape:
        got = tuple(of_pairs.shape) if isinstance(of_pairs, Tensor) else type(grades).__name__
        raise ValueError(f"{name}.grades: expected shape {tuple(images.shape)}, got {got}")
    values = of_pairs.detach().cpu().double()
    require_finite(f"{name}.grades", values[None])

    def reduced(how: str) -> Tensor:
        """Return the mean, the least or the greatest of the grades of each pair."""
        zeros = torch.zeros(pairs.shape[1], dtype=torch.float64, device="cpu")
        return zeros.scatter_reduce(0, index, values, how, include_self=False)

    # the mean of equal grades is exact
    mean = reduced("mean").clamp(reduced("amin"), reduced("amax"))
    return pairs[0], pairs[1], mean


def _as_tensor(grades: object) -> object:
    """Return a list, an array or a column of pandas as a tensor; anything else as it is."""
    return from_numpy(np.array(grades) if isinstance(grades, (list, tuple)) else grades)


def distinct_pairs(
    name: str, images: IndicesLike, texts: IndicesLike, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the (2, P) distinct pairs, checked and sorted, and the index of each input pair there.

    Both are on the CPU.
    """
    if not as_integers(f"{name}.images", images).numel():
        raise ValueError(f"{name}.images: expected at least 1 index, got 0")
    numbers = pair_numbers(name, images, texts, shape)
    numbers, index = numbers.unique(return_inverse=True)
    m = shape[1]
    return torch.stack([numbers // m, numbers % m]), index


def pair_numbers(
    name: str, images: IndicesLike, texts: IndicesLike, shape: tuple[int, int]
) -> Tensor:
    """Return the (P,) numbers ``image n_texts + text`` of pairs, checked, on the CPU."""
    n, m = shape
    rows = as_integers(f"{name}.images", images)
    cpu = torch.device("cpu")
    rows = as_indices(f"{name}.images", rows, rows.numel(), cpu)
    cols = as_indices(f"{name}.texts", texts, len(rows), cpu)
    if len(rows):
        check_range(f"{name}.images", rows, n - 1)
        check_range(f"{name}.texts", cols, m - 1)
    return rows * m + cols
