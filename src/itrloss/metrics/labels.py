"""Ids of images and texts that were left out, and repeated images."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..checks import (
    EMBEDDINGS,
    IMAGES_AND_TEXTS,
    IdsLike,
    as_integers,
    as_labels,
    check_matrix,
    from_numpy,
    ids_of_one_side,
    if_transposed,
)
from ..checks.warnings import warn, warn_of_embeddings, warn_of_guess, warn_of_one_side
from ..similarity import NO_ID, Similarity
from .matching import all_others_are_wrong, existing, query_ids, rows_of, selected

_ROWS = 256  # number of rows compared at once
_COLUMNS = 64  # of rows that may be copies


def default_ids(n_images: int, n_texts: int) -> tuple[Tensor, Tensor]:
    """Return (n_images,) and (n_texts,) ids: by convention, c consecutive texts an image."""
    if n_images == 0 or n_texts % n_images:
        raise ValueError(
            f"image_ids, text_ids: needed for {n_images} images and {n_texts} texts, "
            "which is not a whole number of texts per image (images are the rows)"
        )
    images = torch.arange(n_images, device="cpu")
    return images, images.repeat_interleave(n_texts // n_images)


def fold_repeated(images: Tensor) -> Tensor:
    """Return (N, D) distinct rows of (c N, D) ``images`` whose every c consecutive rows are equal.

    They need to be equal up to rounding. Other images are returned unchanged.

    Many code bases save the embedding, or the row of scores, of an image once per caption. Taken
    for different images, the copies would be wrong candidates that score as high as the right one.
    A warning says what was folded. If all rows are equal, the model cannot tell images apart, and
    ``images`` is returned unchanged.
    """
    images = from_numpy(images)
    check_matrix("images", images, "(N, D)")
    c = _consecutive_copies(images.detach())
    if c == 1:
        return images
    warn(
        f"images: every {c} consecutive ones are the same, as if saved once per caption; "
        f"taken for {len(images) // c} images. If they are not, pass image_ids and text_ids."
    )
    return images[::c]


def _consecutive_copies(images: Tensor) -> int:
    """Return the c for which every c consecutive rows (N, D) are equal; 1 if all or none are."""
    n = len(images)
    numbers = torch.arange(n, device=images.device)
    if n < 2 or not _are_equal(images, numbers[1:2], numbers[:1]).all():
        return 1
    changes = (~_are_equal(images, numbers[1:], numbers[:-1])).nonzero()[:, 0] + 1
    c = math.gcd(n, *changes.tolist())
    return 1 if c == n else c


def _are_equal(x: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """Return (R,) whether rows (R,) of x (N, D) are equal to others (R,), up to rounding."""
    rtol = max(1e-5, 2 * torch.finfo(x.dtype).eps)
    same = []
    for some, other in zip(rows.split(_ROWS), others.split(_ROWS), strict=True):
        same.append(torch.isclose(x[some], x[other], rtol, atol=1e-6).all(1))
    return torch.cat(same)


def warn_of_repeated(sim: Similarity) -> None:
    """Warn if most images are copies of another with the same id, as in rows of pairs."""
    if sim.ids[0] is None:
        return
    ids, _ = query_ids(sim)
    rows, _ = existing(sim)
    rows = rows[ids[rows].argsort(stable=True)]
    of_same_image = (ids[rows].diff() == 0).nonzero()[:, 0]
    if 2 * len(of_same_image) < max(2, len(rows)):
        return
    # A few columns tell rows apart: whole rows of 5000 x 25 000 scores would take 1.0 s of the
    # 3.3 s of `retrieval_results` where five images share an id.
    columns = rows_of(sim).detach()[:, :_COLUMNS]
    copies = int(_are_equal(columns, rows[of_same_image + 1], rows[of_same_image]).sum())
    if 2 * copies >= len(rows):
        warn(
            f"images: {copies} of {len(rows)} rows are copies of another with the same id; each is "
            "ranked, so that an image that is wrong for a text takes as many places as it has "
            "copies. Pass one row for each image: _, first = numpy.unique(images, axis=0, "
            "return_index=True) says which."
        )


def with_ids(
    name: str,
    scores: Tensor | np.ndarray | Similarity,
    image_ids: IdsLike | None,
    text_ids: IdsLike | None,
    by_ids: bool = True,
) -> Similarity:
    """Return checked scores, without a gradient, as a Similarity with ids, by default from
    :func:`default_ids`.

    ``by_ids=False``: relevance does not depend on the ids; images are then not folded, and any
    shape is accepted.
    """
    if isinstance(scores, Similarity):
        if image_ids is not None or text_ids is not None:
            raise ValueError(
                "image_ids, text_ids: expected None with a Similarity, which has its own"
            )
        return _with_own_ids(name, scores, by_ids)
    if text_ids is None and image_ids is not None:
        raise ids_of_one_side(image_ids, IMAGES_AND_TEXTS)
    matrix = from_numpy(scores)
    check_matrix(name, matrix, "(N, M)", check_finite=True)
    warn_of_embeddings(name, matrix)
    matrix = matrix.detach()
    if text_ids is None:  # nor are there image_ids
        if by_ids:
            matrix = fold_repeated(matrix)
        n, m = matrix.shape
        if by_ids and n != m:  # otherwise row i matches column i
            if m % n:  # embeddings may have been taken for scores
                needed = (
                    f"needed for {n} images and {m} texts, which is not a whole number of texts"
                )
                raise ValueError(
                    f"image_ids, text_ids: {needed} per image (images are the rows)"
                    f"{if_transposed(n, m)}; {EMBEDDINGS}"
                )
            warn_of_guess(n, m)
            image_ids, text_ids = default_ids(n, m)
    elif image_ids is None:
        n, m = matrix.shape
        numbers = as_integers("text_ids", text_ids, m)
        numbers = as_labels("text_ids", numbers, m, matrix.device)
        check_numbers("text_ids", numbers, "image", n)
    return Similarity.from_scores(matrix, image_ids, text_ids, names=IMAGES_AND_TEXTS)


def _with_own_ids(name: str, sim: Similarity, by_ids: bool) -> Similarity:
    """Return :func:`with_ids` of a Similarity."""
    if sim.share is not None:
        raise ValueError(
            f"{name}: expected all images and texts, got this process's part of a shared batch; "
            "itrloss.distributed.gather(images) returns those of all processes, and so for texts "
            "and ids: evaluate itrloss.Similarity(images, texts, ...) of them in one process"
        )
    if by_ids and (sim.has_weights or not all_others_are_wrong(sim)):
        expected = "expected neither groups nor weights or nan in matches"
        raise ValueError(f"{name}: {expected}; relevant=... takes grades of pairs")
    sim.check_finite()
    warn_of_one_side(sim)
    if not by_ids:
        return sim.detach()
    image_ids, text_ids = sim.ids
    n, m = sim.shape
    if image_ids is None and text_ids is not None:
        check_numbers("text_ids", text_ids, "image", n)
    if text_ids is None and image_ids is not None:  # in the transpose of texts with images
        check_numbers("image_ids", image_ids, "text", m)
    return folded(sim).detach()


def check_numbers(name: str, ids: Tensor, other: str, count: int) -> None:
    """Raise a ValueError unless ids of one side alone are numbers of the ``count`` others, or
    NO_ID.
    """
    numbers = ids[ids != NO_ID]
    if bool(((numbers < 0) | (numbers >= count)).any()):
        expected = f"numbers of the {count} {other}s, from 0 to {count - 1}"
        got = f"{int(numbers.amin())} to {int(numbers.amax())}"
        raise ValueError(f"{name}: expected {expected}, got {got}; other ids need {other}_ids")


def has_no_ids(sim: Similarity) -> bool:
    """Return whether nothing was said of who matches, so that row i matches column i."""
    return sim.one_to_one and sim.ids == (None, None)


def folded(sim: Similarity) -> Similarity:
    """Return a similarity without ids after :func:`fold_repeated`, any other unchanged."""
    if not has_no_ids(sim):
        return sim
    images = fold_repeated(rows_of(sim))
    m = sim.shape[1]
    if len(images) == m:
        return sim
    copies = m // len(images)
    texts = torch.arange(m, device=sim.device)
    return selected(sim, texts[::copies], texts, (None, texts // copies))
