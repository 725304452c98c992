"""Relevance by human judgements instead of ids, and the forms in which pairs are listed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import as_indices, as_integers, check_range, from_numpy, require_finite

IndicesLike = Tensor | np.ndarray | Sequence[int]
ListedPairs = tuple[IndicesLike, IndicesLike]
_ANY = (2**31, 2**31)  # a shape whose pairs can still be numbered
CPU = torch.device("cpu")


class Judgements(NamedTuple):
    """Human judgements of the relevance of image-text pairs: three 1-D tensors of the same length.

    A repeated pair has the mean of its grades.
    """

    images: Tensor  #: integers, row indices of the score matrix
    texts: Tensor  #: integers, column indices
    grades: Tensor  #: any numbers, higher is more relevant

    def only(self, kept: Tensor) -> Judgements:
        """Return some of the judgements, of a bool mask (P,)."""
        return Judgements(self.images[kept], self.texts[kept], self.grades[kept])

    def at_least(self, grade: float) -> tuple[Tensor, Tensor]:
        """Return the (P,) images and (P,) texts of the pairs with this grade or a higher one."""
        pairs = mean_grades("judgements", *self, _ANY)
        # 0.7 as float32 is less than 0.7: the limit is rounded as the grades are.
        given = as_grades("judgements", self.grades, len(self.images))
        dtype = given.dtype if given.is_floating_point() else torch.float64
        relevant = pairs.only(pairs.grades >= torch.tensor(grade, dtype=dtype, device=CPU))
        if not len(relevant.images):
            raise ValueError(f"grade: no pair has a grade of {grade} or above")
        return relevant.images, relevant.texts


#: Pairs, a (N, M) matrix, or the candidates of each image as lists.
Pairs = ListedPairs | Judgements | Tensor | Sequence[Sequence[int]]


def as_judgements(
    name: str, pairs: Pairs, shape: tuple[int, int], device: torch.device
) -> Judgements:
    """Return pairs in any form as judgements on the device, in the order of their numbers ``image
    n_texts + text``, each once with the mean of its grades, which are by default 1.

    Args:
        name: of the argument.
        pairs: (P,) image and (P,) text indices, :class:`Judgements`, a matrix (n_images, n_texts)
            of grades, or a list with a list of text indices for each image.
        shape: (n_images, n_texts).
        device: of the result.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    pairs = from_numpy(pairs)
    grades = None
    if isinstance(pairs, Tensor):
        if tuple(pairs.shape) != shape or pairs.layout != torch.strided:
            got = f"{tuple(pairs.shape)} and {pairs.layout}"
            raise ValueError(f"{name}: expected a dense matrix of shape {shape}, got {got}")
        require_finite(name, pairs)
        images, texts = pairs.nonzero(as_tuple=True)
        grades = pairs[images, texts]
    elif isinstance(pairs, Judgements):
        images, texts, grades = pairs
    elif isinstance(pairs, list):
        images, texts = _of_lists(name, pairs, shape[0])
    elif isinstance(pairs, tuple) and len(pairs) == 2:
        images, texts = pairs
    else:
        forms = f"(images, texts), Judgements, a matrix {shape} or a list of each image's texts"
        raise TypeError(f"{name}: expected {forms}, got {type(pairs).__name__}")
    found = mean_grades(name, images, texts, grades, shape)
    return Judgements(*(x.to(device) for x in found))


def _of_lists(name: str, lists: list, n: int) -> tuple[list[int], list[int]]:
    """Return the images and texts of the pairs in lists of each image's texts."""
    if len(lists) != n:
        raise ValueError(
            f"{name}: expected a list of texts for each of {n} images, got {len(lists)}"
        )
    images: list[int] = []
    texts: list[int] = []
    for image, own in enumerate(lists):
        if np.ndim(own) == 0:  # a number of any type, or None
            raise TypeError(f"{name}: expected a list of the texts of each image, got {own}")
        images += [image] * len(own)
        if len(own):
            texts += as_integers(name, from_numpy(own)).tolist()
    return images, texts


def mean_grades(
    name: str,
    images: IndicesLike,
    texts: IndicesLike,
    grades: object,
    shape: tuple[int, int],
) -> Judgements:
    """Return checked judgements on the CPU, sorted, each pair once with the mean of its grades; of
    grades that are None, 1.
    """
    n, m = shape
    rows = as_integers(f"{name}.images", images)
    rows = as_indices(f"{name}.images", rows, rows.numel(), CPU)
    cols = as_indices(f"{name}.texts", texts, len(rows), CPU)
    if len(rows):
        check_range(f"{name}.images", rows, n - 1)
        check_range(f"{name}.texts", cols, m - 1)
    values = torch.ones(len(rows), dtype=torch.float64, device=CPU)
    if grades is not None:
        values = as_grades(name, grades, len(rows)).detach().cpu().double()
    if len(values):
        require_finite(f"{name}.grades", values[None])
    numbers, index = (rows * m + cols).unique(return_inverse=True)
    zeros = torch.zeros(len(numbers), dtype=torch.float64, device=CPU)
    mean, least, greatest = [
        zeros.scatter_reduce(0, index, values, how, include_self=False)
        for how in ("mean", "amin", "amax")
    ]
    mean = mean.clamp(least, greatest)  # that of equal grades is exact
    return Judgements(numbers // m, numbers % m, mean)


def as_grades(name: str, grades: object, count: int) -> Tensor:
    """Return a list, an array or a column of pandas as a tensor (count,)."""
    values = from_numpy(np.array(grades) if isinstance(grades, (list, tuple)) else grades)
    if not isinstance(values, Tensor) or values.shape != (count,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(grades).__name__
        raise ValueError(f"{name}.grades: expected shape ({count},), got {got}")
    return values
