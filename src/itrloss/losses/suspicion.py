"""What is suspicious about a batch: ids that leave nothing to learn, and scores in other units."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import hints
from ..engine.vectors import host_may_read
from ..similarity import Similarity
from ..suspicious import number_shared, warn, warn_of_embeddings

# Cosines are at most 1, and SCAN's log-sum-exp of cosines 1.6; cosines times CLIP's first scale
# of 14.3 are more.
_LARGEST = 5.0
# CLIP learns scales of at most 100.
_LARGEST_SCALE = 1e4


def may_be_read(sim: Similarity) -> bool:
    """Return whether the host may read scores and ids at no cost: on the CPU, uncompiled."""
    if sim.embeddings is None:
        scores = sim.given_scores
        return scores is not None and host_may_read(scores)
    return all(host_may_read(x) for x in sim.embeddings)


def warn_of_ids(name: str, loss: Any, sim: Similarity) -> None:
    """Warn if no image has a positive; or if none has a negative, so that the loss is 0."""
    n, m = sim.shape
    if n == 0:  # a process without images
        return
    counts = sim.positive_counts.detach()
    if not bool(counts.any()):
        warn(
            f"{name}: no image has a matching text, as image_ids and text_ids have no id in "
            "common. Equal ids are a match; if image i matches text i, leave out both"
        )
    elif bool((counts == m).all()) and _is_zero(loss):
        meant = "".join({hints.multi_hot(labels) for labels in sim.label_sets()})
        warn(
            f"{name}: every image matches every text, so that the loss is 0 whatever is learnt. "
            "Pass batches of more than one pair, with ids that differ where image and text do "
            f"not match{meant}"
        )


def warn_of_units(name: str, sim: Similarity, what: str = "scores") -> None:
    """Warn of scores too large for cosines: given ones, or of embeddings that are not
    normalised.
    """
    scores = sim.given_scores
    if sim.embeddings is not None:
        if sim.normalizes or sim.bias is not None or not sim.one_to_one:
            return
        scores = sim.detach().positive_scores()  # as large as others, and not N times M
    if scores is not None and bool(scores.detach().abs().amax() > _LARGEST):
        warn(
            f"{name}: {what} above {_LARGEST:g}, as of logits, where the loss's options are in "
            "units of cosine similarity. Pass cosines, before they are multiplied by a scale or "
            "divided by a temperature"
        )


def warn_of_temperature(temperature: float | Tensor, sim: Similarity) -> None:
    """Warn of a temperature for cosines that is probably a scale, its inverse."""
    if sim.embeddings is not None and sim.normalizes and bool(temperature > _LARGEST):
        value = float(temperature)
        warn(
            f"temperature: {value:g} makes cosines almost equal. A scale of {value:g}, as other "
            f"libraries have, is temperature=1/{value:g}"
        )


def warn_of_scale(log_scale: float | Tensor) -> None:
    """Warn of the logarithm of a scale, 1 / temperature, that is probably the scale itself."""
    if bool(log_scale > math.log(_LARGEST_SCALE)):
        value = float(log_scale)
        warn(
            f"log_scale: {value:.4g} is a scale of {math.exp(min(value, 700.0)):.4g}, by which "
            "cosines are multiplied, where CLIP learns scales up to 100. If it is meant as the "
            f"scale itself, its logarithm is {math.log(value):.4g}"
        )


def warn_of_vectors(sim: Similarity) -> None:
    """Warn of embeddings in place of scores, and of those that are all zero."""
    if sim.given_scores is not None:
        warn_of_embeddings("scores", sim.given_scores)
        return
    assert sim.embeddings is not None
    images, texts = (x.detach() for x in sim.embeddings)
    if _is_transpose(images, texts):
        warn(
            "images, texts: a matrix and its transpose, as of logits_per_image and "
            "logits_per_text. Pass the embeddings, or scores=cosines"
        )
    for name, x in zip(("images", "texts"), sim.embeddings, strict=True):
        if len(x) and not bool(x.detach().any()):
            warn(f"{name}: all embeddings are zero, so that they get no gradient")


def _is_transpose(images: Tensor, texts: Tensor) -> bool:
    """Return whether a matrix is another one's transpose, but not symmetric."""
    if images.shape != texts.T.shape or not torch.equal(images, texts.T):
        return False
    return not torch.equal(images, texts)


def warn_of_negatives(sim: Similarity, texts: Tensor, negatives: Tensor) -> None:
    """Warn of further negatives without ids that are right texts.

    ``negatives`` are (K, D) of all images, where any text of the batch is right for one of them, or
    (N, K, D) of each image's own.
    """
    count = 0
    if negatives.dim() == 2:
        count = number_shared(negatives, texts)
    elif sim.one_to_one:
        same = torch.isclose(negatives.detach(), texts.detach()[:, None].to(negatives.dtype))
        count = int(same.all(2).sum())
    if count:
        warn(
            f"negatives: {count} of them are texts of the batch, and count as negatives of the "
            "images that they match. Leave them out, or pass image_ids, text_ids and negative_ids"
        )


def _is_zero(loss: Any) -> bool:
    """Return whether a loss, or the losses of all anchors, are 0 up to rounding."""
    parts = loss if isinstance(loss, tuple) else (loss,)
    values = [x.detach() for x in parts if isinstance(x, Tensor)]
    return bool(values) and all(bool((x.abs() <= 1e-6).all()) for x in values)
