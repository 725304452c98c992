"""A right loss in plain PyTorch, and wrong ones here and in `planted_*`: each differs from it by
one bug.

Many are those of public code, told in its issue trackers; the comments name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class InfoNCE(nn.Module):
    """InfoNCE with ids, where an anchor's other positives do not compete; a right loss but for its
    memory.

    Subclasses replace one step and so plant a bug.
    """

    def __init__(self, temperature: float = 0.1, reduction: str = "mean", gather: bool = False):
        super().__init__()
        self.temperature, self.reduction, self.gather = temperature, reduction, gather

    def forward(self, images, texts, image_ids=None, text_ids=None):
        images, texts, image_ids, text_ids = self.prepared(images, texts, image_ids, text_ids)
        images = self.unit(images)
        texts = self.unit(texts)
        scores = self.scores(images, texts)
        positive = self.positive(image_ids, text_ids)
        values = self.values(scores, positive), self.values(*self.turned(scores, positive))
        return self.reduced(values, (positive.any(1), positive.any(0)))

    def prepared(self, images, texts, image_ids, text_ids):
        if image_ids is None:
            if len(images) != len(texts):
                raise ValueError("as many texts as images")
            image_ids = text_ids = torch.arange(len(images))
        if self.gather and dist.is_initialized():
            texts_of_all = self.all_texts(texts)
            count = len(texts)
            rank = dist.get_rank()
            # every process computes the loss of all images and texts
            images = self.all_texts(images)
            texts = texts_of_all
            image_ids, text_ids = (self.all_ids(x, count, rank) for x in (image_ids, text_ids))
        return images, texts, image_ids, text_ids

    def all_texts(self, x):
        import torch.distributed.nn.functional as collective

        return torch.cat(collective.all_gather(x))

    def all_ids(self, ids, count, rank):
        parts = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, ids.contiguous())
        return torch.cat(parts)

    def unit(self, x):
        x = x.double() if x.dtype == torch.float64 else x.float()
        size = x.detach().abs().amax(1, keepdim=True)
        x = x / torch.where(size == 0, 1.0, size)  # no square overflows
        length = x.square().sum(1, keepdim=True)
        return x / torch.where(length == 0, 1.0, length).sqrt()

    def scores(self, images, texts):
        with torch.autocast("cpu", enabled=False):
            return images @ texts.T

    def positive(self, image_ids, text_ids):
        return image_ids[:, None] == text_ids

    def turned(self, scores, positive):
        return scores.T, positive.T

    def values(self, scores, positive):
        """The values (N,) of the rows, 0 for those without a positive."""
        logits = scores / self.temperature
        negatives = self.log_of_negatives(logits, positive)
        terms = torch.where(positive, F.softplus(negatives[:, None] - logits), 0.0)
        return terms.sum(1) / positive.sum(1).clamp_min(1)

    def log_of_negatives(self, logits, positive):
        lowest = torch.finfo(logits.dtype).min / 4
        return logits.masked_fill(positive, lowest).logsumexp(1)

    def reduced(self, values, exists):
        if self.reduction == "none":
            return values
        if self.reduction == "sum":
            return values[0].sum() + values[1].sum()
        return sum(x.sum() / has.sum().clamp_min(1) for x, has in zip(values, exists, strict=True))


class WithBias(InfoNCE):
    """A scale and a bias that are learnt."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.bias = nn.Parameter(torch.tensor(0.2))

    def values(self, scores, positive):
        return F.softplus(super().values(scores * self.scale.exp(), positive) + self.bias)


class Planted(NamedTuple):
    """A wrong loss, and the check that has to find it; None: none does."""

    make: Callable[[], Any]
    caught_by: str | None
    options: dict[str, Any]


BUGS: dict[str, Planted] = {}


def planted(caught_by: str | None, **options: Any):
    """Return a decorator that lists a wrong loss; its docstring says what is wrong."""

    def plant(make):
        BUGS[make.__name__] = Planted(make, caught_by, options)
        return make

    return plant


# -------------------------------------------------------------------------------- positives and ids


@planted("ids_matter")
class IdsIgnored(InfoNCE):
    """The batch's other captions of an image are negatives (sentence-transformers#608,
    pytorch-metric-learning#580).
    """

    def positive(self, image_ids, text_ids):
        return torch.eye(len(image_ids), len(text_ids), dtype=torch.bool)


@planted("swapped_sides")
class DuplicatesMaskedOneWay(InfoNCE):
    """False negatives are left out among the texts only (sentence-transformers#2870)."""

    def turned(self, scores, positive):
        first = positive.T & (positive.T.cumsum(1) == 1)
        return scores.T, first


@planted("order_of_each_side")
class FirstPositiveOnly(InfoNCE):
    """Of several positives the first counts, the others are negatives
    (pytorch-metric-learning#492).
    """

    def positive(self, image_ids, text_ids):
        equal = image_ids[:, None] == text_ids
        return equal & (equal.cumsum(1) == 1) & (equal.cumsum(0) == 1)


@planted("renamed_ids")
class IdsInSmallIntegers(InfoNCE):
    """Ids are cast to int8 and collide."""

    def positive(self, image_ids, text_ids):
        return image_ids.to(torch.int8)[:, None] == text_ids.to(torch.int8)


@planted("without_positives")
class MeanOfNoPositives(InfoNCE):
    """A mean over no positives is 0 / 0; a mask behind it leaves nan in the gradient
    (lightly#1259).
    """

    def values(self, scores, positive):
        logits = scores / self.temperature
        share = (logits.exp() * positive).sum(1) / logits.exp().sum(1)
        return torch.where(positive.any(1), -share.log(), 0.0)


@planted("without_negatives")
class NoNegatives(InfoNCE):
    """The logarithm of a sum over no negatives is -inf, its gradient nan."""

    def log_of_negatives(self, logits, positive):
        return (logits.exp() * ~positive).sum(1).log()


# ------------------------------------------------------------------------------------- wrong values


@planted("prefers_its_own_texts")
class WrongSign(InfoNCE):
    """Similarity is minimised."""

    def scores(self, images, texts):
        return -super().scores(images, texts)


@planted("order_of_pairs")
class TailDropped(InfoNCE):
    """Blocks of 16 rows; the last rows are in none (lightly drops the tail of a batch in its memory
    bank).
    """

    def prepared(self, images, texts, image_ids, text_ids):
        images, texts, image_ids, text_ids = super().prepared(images, texts, image_ids, text_ids)
        n = max(1, len(images) // 16) * 16
        return images[:n], texts, image_ids[:n], text_ids


@planted("unpaired_batches_are_refused")
class Broadcast(InfoNCE):
    """A single text is broadcast to all images."""

    def prepared(self, images, texts, image_ids, text_ids):
        if image_ids is None:
            texts = texts.expand(len(images), -1) if len(texts) == 1 else texts
        return super().prepared(images, texts, image_ids, text_ids)


@planted("other_dimensions_are_refused")
class DimensionsCut(InfoNCE):
    """Dimensions that one side does not have are left out."""

    def scores(self, images, texts):
        return super().scores(
            *(x[:, : min(images.shape[1], texts.shape[1])] for x in (images, texts))
        )


@planted("nan_is_not_hidden")
class NanHidden(InfoNCE):
    """A nan_to_num hides a broken encoder."""

    def unit(self, x):
        return super().unit(x.nan_to_num())


@planted("one_pair")
class SampleDeviationOfOne(InfoNCE):
    """Scores are divided by their sample standard deviation, nan for one."""

    def scores(self, images, texts):
        scores = super().scores(images, texts)
        return scores / scores.detach().std()


@planted("rotation")
class DistanceOfCoordinates(InfoNCE):
    """The largest coordinate counts, not the inner product."""

    def scores(self, images, texts):
        return 1 - (images[:, None] - texts).abs().amax(2)


@planted("scaled_embeddings")
class NotNormalised(InfoNCE):
    """One side is not normalised."""

    def scores(self, images, texts):
        return super().scores(images, texts)

    def prepared(self, images, texts, image_ids, text_ids):
        self.length = images.norm(dim=1).mean()
        return super().prepared(images, texts, image_ids, text_ids)

    def values(self, scores, positive):
        return super().values(scores * self.length, positive)


@planted("reductions_agree")
class MeanOfTheWrongSide(InfoNCE):
    """Both directions are divided by 2 N, where there are N + M anchors of which each side has its
    mean.
    """

    def reduced(self, values, exists):
        if self.reduction == "mean":
            return (values[0].sum() + values[1].sum()) / (2 * len(values[0]))
        return super().reduced(values, exists)
