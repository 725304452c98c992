"""What is suspicious about a test set: copies, one side for both, and recall at chance level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hints import EMBEDDINGS
from ..similarity import Similarity
from ..suspicious import row_labels, warn

if TYPE_CHECKING:
    from .results import QueryResults, RetrievalResults

_LEAST_QUERIES = 20  # of fewer, chance and a weak model cannot be told apart
_MOST_TEXTS = 20  # of an image, in the data sets that give each image as many
_MOST_UNMATCHED = 0.1  # share of images, or of texts, that are there as wrong candidates only


def warn_of_copies(images: Tensor) -> None:
    """Warn if most rows of images (N, D) have copies, which are taken for other images."""
    labels = row_labels(images)
    counts = labels.bincount()
    copied = int((counts[labels] > 1).sum())
    if len(counts) > 1 and 2 * copied >= len(images):
        warn(
            f"images: {len(images)} rows are {len(counts)} different ones, and not every c "
            "consecutive ones are the same; each copy is taken for another image, and is a wrong "
            "candidate as good as the right one. Pass one row for each image, with image_ids and "
            "text_ids."
        )


def warn_of_guess(n: int, m: int) -> None:
    """Warn if n images and m texts make an unlikely number of consecutive texts for each image."""
    if n > 1 and m // n > _MOST_TEXTS:
        warn(
            f"image_ids, text_ids: without them, {n} images and {m} texts are {m // n} consecutive "
            "texts an image, more than is usual. If they are not, pass image_ids and text_ids; "
            "rows are images."
        )


def warn_of_one_side(sim: Similarity) -> None:
    """Warn if images and texts are the same embeddings."""
    if sim.embeddings is None:
        return
    images, texts = sim.embeddings
    n = len(images)
    m = len(texts)
    if n > 1 and m % n == 0 and torch.equal(images, texts[:: m // n]):
        warn(
            "images, texts: both are the same embeddings, so that each is compared with itself. "
            "Pass the images' and the texts'."
        )


def warn_of_unmatched(results: RetrievalResults) -> None:
    """Warn if many images or texts have no match, as of ids in two spellings."""
    shares = []
    for own in results.ways.values():
        shares.append(own.unmatched / max(1, int(own.exists.sum())))
    if max(shares) >= _MOST_UNMATCHED:
        warn(
            f"image_ids, text_ids: {results.unmatched_in_words}, so that they are no queries. "
            "Equal ids are a match; names have to be spelt in the same way. If they are there as "
            "wrong candidates alone, that is right"
        )


def warn_of_chance(results: RetrievalResults) -> None:
    """Warn if in both directions right candidates rank as in a random order, or worse."""
    folds = results.folds or (results,)
    i2t = [fold.i2t for fold in folds]
    t2i = [fold.t2i for fold in folds]
    if _by_chance(i2t) and _by_chance(t2i):
        warn(
            "recall is at chance level: right candidates rank as in a random order, or worse. If "
            "the model is trained, image_ids and text_ids or the order of rows may be wrong, or "
            "these are distances (negate them: higher is better) or embeddings where scores are "
            f"expected ({EMBEDDINGS})."
        )


def _by_chance(folds: Sequence[QueryResults]) -> bool:
    """Return whether the mean place of right candidates is that of a random order, or worse.

    In a random order, places between 0 and 1 have the mean 1/2 and the variance 1/12.
    """
    places = []
    queries = 0
    for fold in folds:
        found = fold.ranks > 0
        counts = found.sum(1)
        sums = ((fold.ranks - 0.5) * found).sum(1) / (fold.candidates - fold.missing)
        matched = counts > 0
        places.append(sums[matched] / counts[matched])
        queries += len(fold.ids[matched].unique())
    if queries < _LEAST_QUERIES:
        return False
    deviation = (12 * queries) ** -0.5
    return float(torch.cat(places).mean()) > 0.5 - 2.5 * deviation
