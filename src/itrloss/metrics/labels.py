"""Ids of images and texts, repeated images, and folds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import IMAGES_AND_TEXTS, check_matrix
from ..distributed import consensus
from ..engine.matrix import check_unchanged
from ..similarity import Similarity

_ROWS = 256  # number of rows compared at once


def default_ids(n_images: int, n_texts: int) -> tuple[Tensor, Tensor]:
    """Return (n_images,) and (n_texts,) ids by the usual convention: c consecutive texts per image."""
    if n_texts % n_images:
        raise ValueError(
            f"image_ids, text_ids: needed for {n_images} images and {n_texts} texts, "
            "which is not a whole number of texts per image (images are the rows)"
        )
    images = torch.arange(n_images)
    return images, images.repeat_interleave(n_texts // n_images)


def fold_repeated(images: Tensor) -> Tensor:
    """Return the (N, D) distinct rows of ``images`` (c N, D), if every c consecutive rows are equal
    up to rounding.

    Many code bases save the embedding, or the row of scores, of an image once per caption. Taken
    for different images, the copies would be wrong candidates that score as high as the right one.
    A warning says what was folded. If all rows are equal, the model cannot tell images apart, and
    ``images`` is returned unchanged.
    """
    check_matrix("images", images, "(N, D)")
    rtol, atol = max(1e-5, 2 * torch.finfo(images.dtype).eps), 1e-6
    n, x = len(images), images.detach()
    if n < 2 or not torch.allclose(x[0], x[1], rtol, atol):
        return images
    pairs = zip(x[1:].split(_ROWS), x[:-1].split(_ROWS), strict=True)
    changes = torch.cat(
        [~torch.isclose(row, previous, rtol, atol).all(1) for row, previous in pairs]
    )
    c = math.gcd(n, *(changes.nonzero().squeeze(1) + 1).tolist())
    if c in (1, n):
        return images
    what = f"images: every {c} consecutive ones are the same, as if saved once per caption; taken for {n // c} images."
    warnings.warn(f"{what} If they are not, pass image_ids and text_ids.", stacklevel=2)
    return images[::c]


def with_ids(
    name: str,
    scores: Tensor | Similarity,
    image_ids: Tensor | None,
    text_ids: Tensor | None,
    by_ids: bool = True,
) -> Similarity:
    """Return checked scores as a Similarity with ids, by default those of :func:`default_ids`.

    ``by_ids=False``: relevance does not depend on the ids; images are then not folded, and any
    shape is accepted.
    """
    if isinstance(scores, Similarity):
        if image_ids is not None or text_ids is not None:
            raise ValueError(
                "image_ids, text_ids: expected None with a Similarity, which has its own"
            )
        scores.check_finite()
        return folded(scores) if by_ids else scores
    check_matrix(name, scores, "(N, M)", check_finite=True)
    if image_ids is None and text_ids is None:
        scores = fold_repeated(scores) if by_ids else scores
        n, m = scores.shape
        image_ids, text_ids = (
            default_ids(n, m) if by_ids or m % n == 0 else torch.arange(n + m).split((n, m))
        )
    return Similarity.from_scores(scores, image_ids, text_ids, names=IMAGES_AND_TEXTS)


def folded(sim: Similarity) -> Similarity:
    """Return a similarity without ids after :func:`fold_repeated`; one with ids is returned
    unchanged.
    """
    if any(x is not None for x in sim.ids):
        return sim
    scores = sim._matrix.rows.T if sim._side else sim._matrix.rows
    images = fold_repeated(scores if sim.embeddings is None else sim.embeddings[0])
    n, m = len(images), sim.shape[1]
    if n == m:
        return sim
    texts = torch.arange(m, device=sim.device)
    # ids are row numbers, for gather=True
    return part_of(sim, texts[:: m // n], texts, [None, texts // (m // n)])


def shared(sim: Any, question: str, process_group: Any) -> Similarity:
    """Return the similarities of the images and texts of all processes, without a gradient.

    Ids of texts alone are numbers of this process's images. All processes raise an error if one
    does, or if ``question``, what is computed in words, differs.
    """
    with consensus(process_group):
        if not isinstance(sim, Similarity | Tensor):
            raise TypeError(f"scores: expected a Similarity, got {type(sim).__name__}")
        if isinstance(sim, Tensor) or sim._side or sim.embeddings is None:
            raise ValueError(
                "scores: expected a Similarity of embeddings, images as rows, for gather=True"
            )
        check_unchanged([sim._matrix])
    images, texts = (x.detach() for x in sim.embeddings)
    options: Any = {
        "normalize": sim._matrix.bounded,
        "check_finite": True,
        "names": IMAGES_AND_TEXTS,
    }
    options |= {"process_group": process_group, "same": question}
    return Similarity.sharded(images, texts, *sim.ids, **options)


def ids_or_indices(sim: Similarity) -> list[Tensor]:
    """Return the (N,) and (M,) ids of rows and columns; their indices where there are none."""
    return [
        torch.arange(n, device=sim.device) if x is None else x
        for x, n in zip(sim.ids, sim.shape, strict=True)
    ]


def part_of(
    sim: Similarity, rows: Tensor, cols: Tensor, ids: Sequence[Tensor | None] | None = None
) -> Similarity:
    """Return the similarities of these rows and columns, without a gradient; ``ids`` replace their
    own.
    """
    ids = (
        [x[part] for x, part in zip(ids_or_indices(sim), (rows, cols), strict=True)]
        if ids is None
        else ids
    )
    if sim.embeddings is None:
        return Similarity.from_scores(sim.detach().scores()[rows][:, cols], *ids)
    first, second = (x.detach()[part] for x, part in zip(sim.embeddings, (rows, cols), strict=True))
    engine: Any = sim.engine
    return Similarity(first, second, *ids, normalize=sim._matrix.bounded, engine=engine)


def fold_parts(sim: Similarity, folds: int, whole: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return the row and column indices of each fold: consecutive images, and the texts with their
    ids.

    ``whole``: raise an error unless each text is in exactly one fold.
    """
    n, m = sim.shape
    if n % folds:
        raise ValueError(f"folds: expected a divisor of the {n} images, got {folds}")
    image_ids, text_ids = ids_or_indices(sim)
    parts = []
    for rows in torch.arange(n, device=sim.device).split(n // folds):
        parts.append((rows, torch.isin(text_ids, image_ids[rows]).nonzero().squeeze(1)))
        if len(parts[-1][1]) == 0:
            raise ValueError(
                f"folds: images {int(rows[0])} to {int(rows[-1])} are a part without a text"
            )
    if whole and not bool(
        (torch.cat([cols for _, cols in parts]).bincount(minlength=m) == 1).all()
    ):
        raise ValueError("folds: expected each text to have its images in one part")
    return parts
