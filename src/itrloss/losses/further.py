"""InfoNCE's candidates outside the batch: who of them is a negative of whom."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import (
    IdsLike,
    Names,
    are_strings,
    as_id_numbers,
    as_ids,
    as_int64,
    check_alike,
    check_embeddings,
    check_matrix,
    check_same_kind,
)
from ..distributed import gather, numbered, padded
from ..engine.products import product
from ..engine.related import PassedIds, Related, label_sets
from ..engine.vectors import normalized
from ..similarity import NO_ID, Similarity
from .base import LEAST_LOG, SimilarityLoss

Relation = tuple[PassedIds, Related | None]  # ids of rows and columns, and what else decides
_ID_NAMES = "image_ids", "text_ids"


class OwnNegatives:
    """Negatives that each image has for itself, with methods like those of :class:`Anchors`."""

    def __init__(
        self,
        scores: Tensor,  # (N, K)
        exist: Tensor,  # (N, K) bool: those that do not match
        size: int,  # number of images with the padding of a shared batch
    ):
        self.scores = padded(scores, size)
        self.exist = padded(exist, size)

    def logsumexp(
        self,
        scale: float | Tensor,
        *,
        below: Tensor | None = None,  # (N,)
        guide: OwnNegatives | None = None,  # whose scores the limits are of
    ) -> Tensor:
        """Return the (N,) log-sum-exps of those that count, about ``LEAST_LOG`` for none."""
        left_out = ~self.exist
        if below is not None:
            judge = self if guide is None else guide
            left_out = left_out | (judge.scores.detach() >= below[:, None])  # a nan counts
        return (self.scores * scale).masked_fill(left_out, LEAST_LOG).logsumexp(1)

    @property
    def negative_counts(self) -> Tensor:
        """Their (N,) numbers."""
        return self.exist.sum(1)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor (N,) that belong to each side: all to the images."""
        return (x,)


def scores_of_own(images: Tensor, negatives: Tensor, normalize: bool) -> Tensor:
    """Return the (N, K) scores of images (N, D) with negatives (N, K, D) of their own."""
    x = normalized(images, normalize)
    y = normalized(negatives, normalize)
    return product(y, x[:, :, None]).squeeze(2)


# --------------------------------------------------------------------------------- who matches whom


class FurtherRelation:
    """What images, texts and negatives of this process are to each other, and to those of the other
    processes of a shared batch, by ids, sets of labels or numbers.

    With ``matches`` their ids are their numbers, so that an image matches no other image, and a
    text no other text. Those of negatives then are numbers of images: one matches its image, and
    the texts of this image.
    """

    def __init__(
        self,
        sim: Similarity,
        ids: PassedIds,  # of images and texts
        related: Related | None,  # with their groups, or with matches
        negatives: Tensor | None,  # (K,) or (N, K) int64
    ):
        share = sim.share
        self.matches: Tensor | None = None
        if related is not None and related.matches is not None:
            self.matches = related.matches.detach()
        if share is not None:
            if ids[0] is None and negatives is not None:  # numbers of this process's images
                among_all = numbered(negatives, sim.shape[0], share.processes.first(0))
                negatives = among_all.masked_fill(negatives == NO_ID, NO_ID)
            ids = sim.own_ids
        elif self.matches is not None:
            of_images, of_texts = [torch.arange(n, device=sim.device) for n in sim.pairs.shape]
            ids = of_images, of_texts
        elif related is not None and related.targets is not None:
            ids = sim.pairs.ids
        self.share = share
        self.ids = ids
        self.related = related
        self.negatives = negatives

    def among(self, side: int) -> Relation:
        """Return what images (``side`` 0), or texts, are to each other."""
        same = self.ids[side], self.ids[side]
        if self.related is None or self.matches is not None:
            return same, None
        of_images, of_texts = self.related.groups
        groups = of_images if side == 0 or of_texts is None else of_texts
        return same, Related((groups, groups), self.related.rule)

    def with_negatives(self, side: int, size: int, negatives: Tensor) -> Relation:
        """Return what images, or texts, are to the negatives (K, D) of all images."""
        device = negatives.device
        if self.negatives is None:  # they match nothing
            zeros = torch.zeros(size, dtype=torch.int64, device=device)
            return (zeros, torch.ones(len(negatives), dtype=torch.int64, device=device)), None
        labels = self._labels(side, size, device)
        matches = self.matches
        if side == 0 or matches is None:
            return (labels, self.negatives), None
        table = self._of_all(matches if matches.is_floating_point() else matches.float())
        numbers = self._of_all(self.negatives)
        exist = (numbers >= 0) & (numbers < len(table))
        found = table[numbers.clamp(0, len(table) - 1)][:, labels[:, 0]].masked_fill(
            ~exist[:, None], 0.0
        )
        found = found.masked_fill((numbers == NO_ID)[:, None], torch.nan)
        return (None, None), Related(matches=found.T)

    def exist(self, scores: Tensor) -> Tensor:
        """Return the (N, K) bool mask of own negatives that exist and do not match their image."""
        if self.negatives is None:
            return torch.ones_like(scores, dtype=torch.bool)
        labels = self._labels(0, len(scores), scores.device)
        matching = (self.negatives[:, :, None] == labels[:, None]).any(2)
        return (self.negatives != NO_ID) & ~matching

    def _labels(self, side: int, size: int, device: torch.device) -> Tensor:
        """Return the labels (A, k) of images, or of texts, by default their numbers (A, 1)."""
        if self.ids[side] is None:
            return torch.arange(size, device=device)[:, None]
        return label_sets(_ID_NAMES[side], self.ids[side], size, device)

    def _of_all(self, x: Tensor) -> Tensor:
        """Return the rows of all processes that share the batch."""
        return x if self.share is None else gather(x, self.share.processes.group)


# ------------------------------------------------------------------------------------------ checks


def as_negative_ids(
    negative_ids: IdsLike | None, image_ids: IdsLike | None, negatives: Tensor, are_scores: bool
) -> Tensor | None:
    """Return the (K,) or (N, K) int64 ids of negatives; raise an error for wrong ones."""
    if negative_ids is None:
        return None
    if image_ids is None and are_strings(negative_ids):
        expected = "expected integers, as without image_ids they are numbers of images"
        raise TypeError(f"negative_ids: {expected}, got strings")
    if image_ids is not None:
        check_same_kind("image_ids", image_ids, "negative_ids", negative_ids)
    if negatives.dim() == 2 and not are_scores:
        return as_ids("negative_ids", negative_ids, len(negatives), negatives.device)
    numbers = as_id_numbers("negative_ids", negative_ids)
    shape = negatives.shape[:2]
    if numbers.shape != shape:
        expected = f"expected shape {tuple(shape)}"
        raise ValueError(f"negative_ids: {expected}, got {tuple(numbers.shape)}")
    return as_int64("negative_ids", numbers).to(negatives.device)


def check_negatives(
    loss: SimilarityLoss,
    images: Tensor,  # (N, D), or (N, M) scores
    negatives: Tensor,
    names: Names,  # of images and negatives
    are_scores: bool = False,
) -> None:
    """Raise an error unless negatives are (K, D) or (N, K, D), or where scores are given (N, K)."""
    name = names.cols
    check_finite = loss.check_finite
    empty = loss.sharded  # in one process of several there may be none
    if are_scores:
        check_matrix(name, negatives, "(N, K), as of scores", check_finite, empty=empty)
        if len(negatives) != len(images):
            expected = f"expected a row of scores for each of {len(images)} images"
            raise ValueError(f"{name}: {expected}, got shape {tuple(negatives.shape)}")
        check_alike(name, negatives, "scores", images)
        return
    if not isinstance(images, Tensor):
        expected = "expected images with them, not a Similarity"
        raise ValueError(f"{name}: {expected}")
    if not isinstance(negatives, Tensor) or negatives.dim() != 3:
        check_embeddings(images, negatives, check_finite, names, empty=empty)
        return
    check_matrix(name, negatives, "(N, K, D)", check_finite, dims=3, empty=empty)
    if (negatives.shape[0], negatives.shape[2]) != images.shape:
        expected = f"expected shape (K, D) or ({len(images)}, K, {images.shape[1]})"
        raise ValueError(f"{name}: {expected}, got {tuple(negatives.shape)}")
    check_alike(name, negatives, names.rows, images)
