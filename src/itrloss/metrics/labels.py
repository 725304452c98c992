"""Which image and which text match."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..similarity import Similarity


def default_ids(n_images: int, n_texts: int) -> tuple[Tensor, Tensor]:
    """Ids by the field's convention: ``n_texts = c * n_images`` texts, c consecutive ones an image."""
    if n_texts % n_images:
        raise ValueError(
            f"image_ids, text_ids: needed for {n_images} images and {n_texts} texts, "
            "which is not a whole number of texts an image (images are the rows)"
        )
    images = torch.arange(n_images)
    return images, images.repeat_interleave(n_texts // n_images)


def labelled(name: str, scores: Tensor | Similarity, image_ids: Tensor | None, text_ids: Tensor | None) -> Similarity:
    """Scores with ids, by the field's convention where they are left out; errors name ``name`` and the ids."""
    if isinstance(scores, Similarity):
        if image_ids is not None or text_ids is not None:
            raise ValueError("image_ids, text_ids: expected None beside a Similarity, which has its own")
        scores.check_finite()
        return scores
    if image_ids is None and text_ids is None and isinstance(scores, Tensor) and scores.dim() == 2:
        image_ids, text_ids = default_ids(*scores.shape) if scores.numel() else (None, None)
    try:
        return Similarity.from_scores(scores, image_ids, text_ids, check_finite=True)
    except (TypeError, ValueError) as error:
        renamed = str(error).replace("row_ids", "image_ids").replace("col_ids", "text_ids")
        raise type(error)(renamed.replace("scores:", f"{name}:", 1)) from None


def numbered(sim: Similarity) -> list[Tensor]:
    """Return the ids of rows and columns, their numbers where there are none."""
    return [torch.arange(n, device=sim.device) if x is None else x for x, n in zip(sim.ids, sim.shape, strict=True)]


def part_of(sim: Similarity, rows: Tensor, cols: Tensor) -> Similarity:
    """Return the similarities of some rows and some columns, without a gradient."""
    kept = [ids[part] for ids, part in zip(numbered(sim), (rows, cols), strict=True)]
    if sim._inputs is None:
        return Similarity.from_scores(sim.detach().scores()[rows][:, cols], *kept)
    first, second = (x.detach()[part] for x, part in zip(sim._inputs, (rows, cols), strict=True))
    engine: Any = sim.engine
    return Similarity(first, second, *kept, normalize=sim._matrix.bounded, engine=engine)


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
