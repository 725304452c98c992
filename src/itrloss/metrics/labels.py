"""Which image and which text match."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import IMAGES_AND_TEXTS, check_matrix
from ..similarity import Similarity

_ROWS = 256  # compared at once


def default_ids(n_images: int, n_texts: int) -> tuple[Tensor, Tensor]:
    """Ids by the field's convention: ``n_texts = c * n_images`` texts, c consecutive ones an image."""
    if n_texts % n_images:
        raise ValueError(
            f"image_ids, text_ids: needed for {n_images} images and {n_texts} texts, "
            "which is not a whole number of texts an image (images are the rows)"
        )
    images = torch.arange(n_images)
    return images, images.repeat_interleave(n_texts // n_images)


def fold_repeated(images: Tensor) -> Tensor:
    """Return the (N, D) rows of ``images`` (c N, D), each once, if every c consecutive ones are the same.

    Much code of the field saves an image once per caption, be it embeddings or rows of scores. Taken for different
    images, its copies would be wrong candidates that score as high as the right one. Rows are the same up to rounding;
    if all are, a model tells no image from another, and they stay as they are. A warning says what was folded.
    """
    check_matrix("images", images, "(N, D)")
    rtol, atol = max(1e-5, 2 * torch.finfo(images.dtype).eps), 1e-6
    n, x = len(images), images.detach()
    if n < 2 or not torch.allclose(x[0], x[1], rtol, atol):
        return images
    pairs = zip(x[1:].split(_ROWS), x[:-1].split(_ROWS), strict=True)
    changes = torch.cat([~torch.isclose(row, before, rtol, atol).all(1) for row, before in pairs])
    c = math.gcd(n, *(changes.nonzero().squeeze(1) + 1).tolist())
    if c in (1, n):
        return images
    what = f"images: every {c} consecutive ones are the same, as if saved once per caption; taken for {n // c} images."
    warnings.warn(f"{what} If they are not, pass image_ids and text_ids.", stacklevel=2)
    return images[::c]


def labelled(
    name: str, scores: Tensor | Similarity, image_ids: Tensor | None, text_ids: Tensor | None, by_ids: bool = True
) -> Similarity:
    """Return scores with ids, by the field's convention where they are left out.

    ``by_ids=False``: it is not they that say what is right, so images are not folded, and any shape goes.
    """
    if isinstance(scores, Similarity):
        if image_ids is not None or text_ids is not None:
            raise ValueError("image_ids, text_ids: expected None beside a Similarity, which has its own")
        scores.check_finite()
        return folded(scores) if by_ids else scores
    check_matrix(name, scores, "(N, M)", check_finite=True)
    if image_ids is None and text_ids is None:
        scores = fold_repeated(scores) if by_ids else scores
        n, m = scores.shape
        image_ids, text_ids = default_ids(n, m) if by_ids or m % n == 0 else torch.arange(n + m).split((n, m))
    return Similarity.from_scores(scores, image_ids, text_ids, names=IMAGES_AND_TEXTS)


def folded(sim: Similarity) -> Similarity:
    """Return a similarity with each image once, if it has no ids and they are repeated: see :func:`fold_repeated`."""
    if any(x is not None for x in sim.ids):
        return sim
    scores = sim._matrix.rows.T if sim._side else sim._matrix.rows
    images = fold_repeated(scores if sim._inputs is None else sim._inputs[0])
    n, m = len(images), sim.shape[1]
    if n == m:
        return sim
    texts = torch.arange(m, device=sim.device)
    return part_of(sim, texts[:: m // n], texts, [None, texts // (m // n)])  # by number: also in a job of several


def numbered(sim: Similarity) -> list[Tensor]:
    """Return the ids of rows and columns, their numbers where there are none."""
    return [torch.arange(n, device=sim.device) if x is None else x for x, n in zip(sim.ids, sim.shape, strict=True)]


def part_of(sim: Similarity, rows: Tensor, cols: Tensor, ids: Sequence[Tensor | None] | None = None) -> Similarity:
    """Return the similarities of some rows and some columns, without a gradient; ``ids``: others than they have."""
    ids = [x[part] for x, part in zip(numbered(sim), (rows, cols), strict=True)] if ids is None else ids
    if sim._inputs is None:
        return Similarity.from_scores(sim.detach().scores()[rows][:, cols], *ids)
    first, second = (x.detach()[part] for x, part in zip(sim._inputs, (rows, cols), strict=True))
    engine: Any = sim.engine
    return Similarity(first, second, *ids, normalize=sim._matrix.bounded, engine=engine)


def parts_of(sim: Similarity, folds: int) -> list[tuple[Tensor, Tensor]]:
    """Which images and which texts are in each: consecutive images, and the texts with their ids."""
    n = sim.shape[0]
    if n % folds:
        raise ValueError(f"folds: expected a divisor of the {n} images, got {folds}")
    image_ids, text_ids = numbered(sim)
    found = []
    for rows in torch.arange(n, device=sim.device).split(n // folds):
        cols = torch.isin(text_ids, image_ids[rows]).nonzero().squeeze(1)
        if len(cols) == 0:
            raise ValueError(f"folds: images {int(rows[0])} to {int(rows[-1])} are a part without a text")
        found.append((rows, cols))
    return found


def whole_parts_of(sim: Similarity, folds: int) -> list[tuple[Tensor, Tensor]]:
    """:func:`parts_of`, each text in one of them."""
    found = parts_of(sim, folds)
    texts = torch.cat([cols for _, cols in found])
    if len(texts) != sim.shape[1] or len(texts.unique()) != len(texts):
        raise ValueError("folds: expected each text to have its images in one part")
    return found
