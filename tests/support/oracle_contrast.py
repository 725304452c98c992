"""InfoNCE with all its options as loops over single scores, which autograd differentiates.

Written from the meanings of the options alone: each exponential of a denominator is one entry of a
list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NO_ID = -(2**63)


@dataclass
class Model:
    """The scores of a model: the loss's own, or those of a guide."""

    across: Tensor  # (N, M)
    images: Tensor  # (N, N)
    texts: Tensor  # (M, M)
    negatives: Tensor  # (N, K) of images with negatives of all images
    texts_negatives: Tensor  # (M, K)
    own: Tensor  # (N, K) of images with negatives of their own

    @classmethod
    def of(cls, images: Tensor, texts: Tensor, negatives: Tensor | None, unit: bool) -> Model:
        """Return the scores of embeddings; negatives are (K, D), (N, K, D) or None."""

        def scores(a: Tensor, b: Tensor) -> Tensor:
            if unit:
                a = a / a.norm(dim=-1, keepdim=True)
                b = b / b.norm(dim=-1, keepdim=True)
            return a @ b.transpose(-1, -2)

        shared = negatives if negatives is not None and negatives.dim() == 2 else images[:0]
        own = (
            negatives if negatives is not None and negatives.dim() == 3 else images[:, None][:, :0]
        )
        return cls(
            scores(images, texts),
            scores(images, images),
            scores(texts, texts),
            scores(images, shared),
            scores(texts, shared),
            scores(images[:, None], own)[:, 0],
        )


@dataclass
class Options:
    """The options of the loss; see :class:`itrloss.InfoNCELoss`."""

    temperature: float = 0.1
    directions: str = "both"
    image_image: bool = False
    text_text: Any = False
    joint: bool = False
    in_batch: bool = True
    margin: float | None = None
    relative: bool = False
    hardness: Any = 0.0


@dataclass
class Loss:
    """A batch and the options: its parts are lists of exponents."""

    model: Model
    guide: Model
    options: Options
    image_ids: list[int]
    text_ids: list[int]
    negative_ids: Any = None  # a list of K, or N lists
    pairs: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.pairs = []
        for i, a in enumerate(self.image_ids):
            for p, b in enumerate(self.text_ids):
                if a == b and a != NO_ID:
                    self.pairs.append((i, p))

    def limit(self, image: int | None = None, text: int | None = None) -> float | None:
        """Return the score below which negatives of an image, or of a text, count."""
        if self.options.margin is None:
            return None
        own = [self.guide.across[i, p].item() for i, p in self.pairs if image == i or text == p]
        mean = sum(own) / max(1, len(own))  # an anchor without positives has no value
        return mean + self.options.margin * (abs(mean) if self.options.relative else 1.0)

    def exponent(self, score: Tensor, judged: Tensor, limit: float | None, alpha: float) -> list:
        """Return the exponent of one candidate in a list, or an empty list if it is left out."""
        if limit is not None and not judged.item() < limit:
            return []
        return [score / self.options.temperature + alpha * score.detach()]

    def alphas(self) -> tuple[float, float]:
        """Return the hardness of the batch and of further negatives."""
        alpha = self.options.hardness
        return alpha if isinstance(alpha, tuple) else (alpha, alpha)

    def across_of_image(self, i: int) -> tuple[list, int]:
        """Return exponents of an image's texts and negatives, and how many candidates there are."""
        found = []
        count = 0
        limit = self.limit(image=i)
        for j, other in enumerate(self.text_ids):
            if self.options.in_batch and other not in (self.image_ids[i], NO_ID):
                count += 1
                scores = self.model.across[i, j], self.guide.across[i, j]
                found += self.exponent(*scores, limit, self.alphas()[0])
        for name in ("negatives", "own"):
            for k, score in enumerate(getattr(self.model, name)[i]):
                other = self.id_of_negative(i, k, name)
                if other is None or other not in (self.image_ids[i], NO_ID):
                    count += 1
                    judged = getattr(self.guide, name)[i, k]
                    found += self.exponent(score, judged, limit, self.alphas()[1])
        return found, count

    def id_of_negative(self, i: int, k: int, name: str) -> int | None:
        if self.negative_ids is None:
            return None
        return self.negative_ids[k] if name == "negatives" else self.negative_ids[i][k]

    def across_of_text(self, p: int) -> tuple[list, int]:
        """Return exponents of a text's images, and how many candidates there are."""
        found = []
        count = 0
        for i, other in enumerate(self.image_ids):
            if other not in (self.text_ids[p], NO_ID):
                count += 1
                scores = self.model.across[i, p], self.guide.across[i, p]
                found += self.exponent(*scores, self.limit(text=p), self.alphas()[0])
        return found, count

    def among_images(self, i: int) -> list:
        """Return exponents of an image with other images."""
        found = []
        for j, other in enumerate(self.image_ids):
            if self.options.image_image and other not in (self.image_ids[i], NO_ID):
                scores = self.model.images[i, j], self.guide.images[i, j]
                found += self.exponent(*scores, self.limit(image=i), 0.0)
        return found

    def number_among_images(self, i: int) -> int:
        """Return how many other images may be candidates of an image."""
        if not self.options.image_image:
            return 0
        return sum(other not in (self.image_ids[i], NO_ID) for other in self.image_ids)

    def number_among_texts(self, p: int) -> int:
        """Return how many other texts and negatives may be candidates of a text."""
        if not self.options.text_text:
            return 0
        number = sum(other not in (self.text_ids[p], NO_ID) for other in self.text_ids)
        for k in range(len(self.model.texts_negatives[p])):
            other = self.id_of_negative(0, k, "negatives")
            number += other is None or other not in (self.text_ids[p], NO_ID)
        return number

    def among_texts(self, p: int) -> list:
        """Return exponents of a text with other texts and with negatives of all images."""
        found = []
        if not self.options.text_text:
            return found
        limit = None if self.options.text_text == "unfiltered" else self.limit(text=p)
        for q, other in enumerate(self.text_ids):
            if other not in (self.text_ids[p], NO_ID):
                found += self.exponent(self.model.texts[p, q], self.guide.texts[p, q], limit, 0.0)
        for k, score in enumerate(self.model.texts_negatives[p]):
            other = self.id_of_negative(0, k, "negatives")
            if other is None or other not in (self.text_ids[p], NO_ID):
                found += self.exponent(score, self.guide.texts_negatives[p, k], limit, 0.0)
        return found

    def values(self, side: int) -> tuple[list[Tensor], list[bool]]:
        """Return the value of each image (side 0) or text, and whether it counts in a mean."""
        values = []
        counted = []
        for anchor in range(len((self.image_ids, self.text_ids)[side])):
            own = [pair for pair in self.pairs if pair[side] == anchor]
            across, count = (self.across_of_image, self.across_of_text)[side](anchor)
            losses = []
            for i, p in own:
                score = self.model.across[i, p] / self.options.temperature
                others = across + self.among_images(i) + self.among_texts(p)
                if self.options.joint:
                    others = others + self.across_of_text(p)[0] + [score]
                losses.append(torch.stack([score, *others]).logsumexp(0) - score)
            for i, p in own:
                count += self.number_among_images(i) + self.number_among_texts(p)
                if self.options.joint:
                    count += self.across_of_text(p)[1]
            is_valid = bool(own) and count > 0
            zero = self.model.across.sum() * 0
            values.append(sum(losses) / len(losses) if is_valid else zero)
            counted.append(is_valid)
        return values, counted

    def groups(self) -> list[tuple[list[Tensor], list[bool]]]:
        """Return the values of each direction."""
        if self.options.joint:
            return [self.values(0)]
        sides = {"both": (0, 1), "image-text": (0,), "text-image": (1,)}
        return [self.values(side) for side in sides[self.options.directions]]
