"""Warnings of input that can be computed with, but is probably not what was meant."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .arrays import EMBEDDINGS, host_may_read

if TYPE_CHECKING:
    from ..distributed.shards import Share
    from ..metrics.results import RetrievalResults
    from ..similarity import Similarity

# Folders of packages whose lines a user did not write.
_INSIDE = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
# Cosines are at most 1, and SCAN's log-sum-exp of cosines 1.6; cosines times CLIP's first scale
# of 14.3 are more.
_LARGEST = 5.0
_LOWEST = -1e4  # scores of what does not exist are often filled up with lower ones
# CLIP learns scales of at most 100.
_LARGEST_SCALE = 1e4
_WARMEST = 2.0  # temperature for cosines, of which two are then at most a factor of e apart
_MOST_TEXTS = 20  # of an image, in the data sets that give each image as many
_SAMPLE = 256  # rows that tell embeddings from scores
_MOST_UNMATCHED = 0.1  # share of images, or of texts, that are there as wrong candidates only


class SuspiciousInputWarning(UserWarning):
    """Input that can be computed with, but is probably not what was meant.

    The filters of ``warnings`` show it once, hide it, or make it an error. From Python 3.12 on it
    names the line of yours that causes it.
    """


class UnfitScalesWarning(SuspiciousInputWarning):
    """Scales of a re-ranker that are probably not for its scores.

    A comparison of many re-rankers says this once, of all of them.
    """


def warn(message: str, category: type[Warning] = SuspiciousInputWarning) -> None:
    """Warn of input, at the line of the user's code that passed it where Python can find it."""
    if sys.version_info >= (3, 12):
        warnings.warn(message, category, skip_file_prefixes=_INSIDE)
    else:
        warnings.warn(message, category, stacklevel=2)


# -------------------------------------------------------------------------------- batches of losses


def may_be_read(sim: Similarity) -> bool:
    """Return whether the host may read scores and ids at no cost: on the CPU, uncompiled."""
    if sim.embeddings is not None:
        return all(host_may_read(x) for x in sim.embeddings)
    return sim.given_scores is not None and host_may_read(sim.given_scores)


def warn_of_ids(name: str, loss: object, sim: Similarity) -> None:
    """Warn if no image has a positive; or if none has a negative, so that the loss is 0."""
    if sim.shape[0] == 0:  # a process without images
        return
    if not bool(sim.positive_counts.any()):
        warn(
            f"{name}: no image has a matching text, as image_ids and text_ids have no id in "
            "common. Equal ids are a match; if image i matches text i, leave out both"
        )
    elif not bool(sim.negative_counts.any()) and _is_zero(loss):
        warn(
            f"{name}: every image matches every text, so that the loss is 0 whatever is learnt. "
            "Pass batches of more than one pair, with ids that differ where image and text do "
            "not match; multi-hot labels go in as matches=(of_images @ of_texts.T) > 0"
        )


def warn_of_numbers_in_the_batch(name: str, share: Share) -> None:
    """Warn if all processes that share a batch have the same ids, as two may by chance with ids of
    few classes.
    """
    processes = share.processes
    first, *others = processes.ids[0].chunk(processes.world)
    # two views of one set have each number twice
    are_many = 2 * len(first.unique(dim=0)) >= len(first) > 1
    if are_many and all(torch.equal(first, other) for other in others):
        warn(
            f"{name}: image_ids, or labels, are the same in all processes, as numbers in a batch "
            "are, so that each image matches texts of all processes. Pass numbers in the data set "
            "or, of one process's images, text_ids alone"
        )


def _is_zero(loss: object) -> bool:
    """Return whether a loss, or the losses of all anchors, are 0 up to rounding."""
    parts = loss if isinstance(loss, tuple) else (loss,)
    return all(isinstance(x, Tensor) and bool((x.abs() <= 1e-6).all()) for x in parts)


def warn_of_units(name: str, sim: Similarity, what: str = "scores") -> None:
    """Warn of scores too large for cosines: given ones, or of embeddings that are not
    normalised.
    """
    scores = sim.given_scores
    if scores is None:
        if sim.normalizes or sim.bias is not None or not sim.one_to_one:
            return
        scores = sim.detach().positive_scores()  # as large as others, and not N times M
    exist = scores > _LOWEST
    if bool((exist & (scores.abs() > _LARGEST)).any()):
        warn(
            f"{name}: {what} above {_LARGEST:g}, as of logits, where the loss's options are in "
            "units of cosine similarity. Pass cosines, before they are multiplied by a scale or "
            "divided by a temperature"
        )


def warn_of_form(form: str, value: float, cosines: bool) -> None:
    """Warn of a temperature, its scale or the logarithm of that, if the number is none for it, or
    none for ``cosines``.
    """
    meant: list[str] = []
    if form == "log_scale":
        temperature = math.exp(max(min(-value, 700.0), -700.0))
        if value > math.log(_LARGEST_SCALE):
            meant = [f"scale={value:.4g}", f"log_scale={math.log(value):.4g}"]
        elif cosines and temperature > _WARMEST:
            meant = [f"log_scale={-value:.4g}"]
        elif cosines and 0 < value < 0.5:  # as is a temperature
            meant = [f"temperature={value:.4g}"]
    else:
        temperature = value if form == "temperature" else 1 / (value or math.nan)
        if not temperature > 0:  # only a parameter's
            meant = [f"log_scale={abs(value):.4g}"]
        elif cosines and temperature > _WARMEST:
            meant = [f"temperature={value:.4g}"]
            if form == "temperature":
                meant = [f"scale={value:.4g}", f"log_scale={value:.4g}"]
    if meant:
        warn(
            f"{form}: {value:.4g} is a temperature of {temperature:.4g}, which is none for "
            f"cosines; did you mean {' or '.join(meant)}? temperature is τ, scale 1 / τ, and "
            "log_scale the logarithm of 1 / τ"
        )


def warn_of_vectors(sim: Similarity) -> None:
    """Warn of embeddings in place of scores, and of scores in place of embeddings."""
    if sim.given_scores is not None:
        warn_of_embeddings("scores", sim.given_scores)
        return
    assert sim.embeddings is not None
    images, texts = (x.detach() for x in sim.embeddings)
    is_transposed = images.shape == texts.T.shape and torch.equal(images, texts.T)
    says_of_itself = sim.pairs.one_set or sim.pairs.matches is not None
    if torch.equal(images, texts) and not says_of_itself:
        warn(
            "images, texts: both are the same embeddings, so that each matches itself best. One "
            "set of embeddings goes in as loss(embeddings, labels=labels), which leaves out each "
            "with itself, and two views of it as loss(first, second, labels=labels)"
        )
    elif is_transposed and not torch.equal(images, texts):
        warn(
            "images, texts: a matrix and its transpose, as of logits_per_image and "
            "logits_per_text. Pass the embeddings, or scores=cosines"
        )


# ---------------------------------------------------------------------------------------- test sets


def warn_of_embeddings(name: str, scores: Tensor) -> None:
    """Warn if the rows of a score matrix (N, M) are unit vectors, as only embeddings are.

    A matrix with an entry of almost 1 may be a right one, such as the unit matrix.
    """
    x = scores.detach()[:_SAMPLE]
    if min(x.shape) < 2 or bool((x.abs() >= 0.99).any()):
        return
    lengths = torch.linalg.vector_norm(x.double(), dim=1)
    error = max(1e-3, 2 * torch.finfo(x.dtype).eps)
    if bool(((lengths - 1).abs() <= error).all()):
        warn(
            f"{name}: each row has length 1, as embeddings have, and is taken for scores of one "
            f"image with all texts; {EMBEDDINGS}"
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
    if n > 1 and m % n == 0 and are_the_same(images, texts[:: m // n]):
        warn(
            "images, texts: both are the same embeddings, so that each is compared with itself. "
            "Pass the images' and the texts'."
        )


def warn_of_unmatched(results: RetrievalResults) -> None:
    """Warn if many images or texts have no match, as of ids in two spellings."""
    shares = [own.unmatched / max(1, int(own.exists.sum())) for own in results.ways.values()]
    if max(shares) >= _MOST_UNMATCHED:
        warn(
            f"image_ids, text_ids: {results.unmatched_in_words}, so that they are no queries. "
            "Equal ids are a match; names have to be spelt in the same way. If they are there as "
            "wrong candidates alone, that is right"
        )


def are_the_same(x: Tensor, others: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, as of one file that was read twice."""
    return x.shape == others.shape and torch.equal(x, others.to(x))
