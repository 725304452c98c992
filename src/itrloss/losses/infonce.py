"""InfoNCE with all its options, and cross-entropy against a teacher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..anchors import Anchors
from ..checks import (
    IdsLike,
    Learnt,
    Names,
    as_id_numbers,
    as_ids,
    as_int64,
    as_number,
    as_similarity,
    check_alike,
    check_embeddings,
    check_matrix,
    from_numpy,
    option,
)
from ..distributed import numbered, padded
from ..engine.vectors import compute_dtype, full_precision, host_may_read, normalized
from ..memory import CoupledMemory, MemorySimilarity
from ..related import Related, label_sets
from ..similarity import NO_ID, SIDES, Similarity
from ..suspicious import (
    may_be_read,
    warn_of_scale,
    warn_of_temperature,
    warn_of_units,
    warn_of_vectors,
)
from ..terms import identity, softplus
from .base import LEAST_LOG, MemoryLoss, PairLoss, SimilarityLoss

ROUNDING = 32.0  # units in the last place by which two products of the same vectors may differ
_OF_IMAGES = Names("images", "images", "image_ids", "image_ids")
_OF_TEXTS = Names("texts", "texts", "text_ids", "text_ids")
_OF_NEGATIVES = Names("images", "negatives", "image_ids", "negative_ids")
_OF_TEXTS_AND_NEGATIVES = Names("texts", "negatives", "text_ids", "negative_ids")
_OF_GUIDE = Names("guide[0]", "guide[1]", "image_ids", "text_ids")
_OF_TEACHER = Names("teacher[0]", "teacher[1]", "image_ids", "text_ids")


class OwnNegatives(NamedTuple):
    """Negatives that each image has for itself."""

    scores: Tensor  # (N, K)
    exist: Tensor  # (N, K) bool

    def logsumexp(
        self,
        scale: float | Tensor,
        hardness: float,
        limit: Tensor | None,  # (N,), or longer by padding
        guide: OwnNegatives | None,  # whose scores the limits are of
    ) -> Tensor:
        """Return the (N,) log-sum-exps of those that count, ``LEAST_LOG`` for none."""
        exponents = self.scores * scale
        if hardness:
            exponents = exponents + hardness * self.scores.detach()
        counts = self.exist
        if limit is not None:
            judge = self.scores if guide is None else guide.scores
            counts = counts & (judge.detach() < limit[: len(judge), None])
        return exponents.masked_fill(~counts, LEAST_LOG).logsumexp(1)

    def counts(self) -> Tensor:
        """Return their (N,) numbers."""
        return self.exist.sum(1)


class Further(NamedTuple):
    """Further candidates, in addition to the texts and the images of the batch."""

    negatives: Similarity | None = None  # (N, K) images with negatives of all images
    own_negatives: OwnNegatives | None = None
    among_images: Similarity | None = None  # (N, N)
    among_texts: Similarity | None = None  # (M, M)
    texts_with_negatives: Similarity | None = None  # (M, K) with those of all images


NOTHING_FURTHER = Further()


def temperature_of_log(log_scale: Tensor) -> Tensor:
    """Return the 0-dim temperature of a parameter (1,), the logarithm of its inverse."""
    # in float32 at least: exp in half precision would put it up to 0.4 % off
    return (-log_scale.to(compute_dtype(log_scale))).exp().squeeze()


def log_of_temperature(temperature: float) -> float:
    """Return the logarithm of the scale ``1/τ``."""
    return -math.log(temperature)


def as_hardness(value: float | Sequence[float]) -> float | tuple[float, float]:
    """Return α, at least 0: a number, or one of the batch's and one of further negatives."""
    is_pair = isinstance(value, (tuple, list, np.ndarray)) and np.ndim(value) == 1
    numbers: Sequence[Any] = list(value) if is_pair else [value]  # type: ignore[arg-type]
    if is_pair and len(numbers) != 2:
        raise ValueError(f"hardness: expected a number or a pair of numbers, got {value!r}")
    checked = [as_number("hardness", number) for number in numbers]
    if min(checked) < 0:
        raise ValueError(f"hardness: expected at least 0, got {value!r}")
    return (checked[0], checked[1]) if is_pair else checked[0]


class TemperatureLoss(SimilarityLoss):
    """A loss with a temperature, which may be learnt.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        max_scale: the largest ``1/τ`` that is learnt: a call in training mode sets ``log_scale``
            back to it (CLIP's 100). None: there is no limit.
    """

    temperature: float | Tensor = option(
        default=0.07, above=0, learnt=Learnt("log_scale", temperature_of_log, log_of_temperature)
    )
    learnable: bool = option(default=False, fixed=True)

    _: KW_ONLY
    max_scale: float | None = option(default=None, above=0)

    def __post_init__(self) -> None:
        """Make the parameter."""
        super().__post_init__()
        # (1,): FSDP and the like do not shard 0-dim parameters.
        self.log_scale = nn.Parameter(torch.zeros(1)) if self.learnable else None
        self.reset_parameters()

    @property
    def in_cosines(self) -> bool:
        """Whether the temperature is one for cosines."""
        return bool(self.temperature < 0.5)

    def reset_parameters(self) -> None:
        """Give a learnable τ the value that was set last, as is needed after ``to_empty``."""
        self._reset_learnt()

    @torch.no_grad()
    def _limit_scale(self) -> None:
        """Set a learnt scale that has become too large back to the largest one; look at it before
        the first batch.
        """
        log_scale = self.log_scale
        if log_scale is not None and not self._looked and host_may_read(log_scale):
            warn_of_scale(log_scale)
        if self.max_scale is None:
            return
        if self.log_scale is None:
            expected = "expected None with a temperature that is not learnable"
            meant = f"for a scale of {self.max_scale:g}, write temperature=1/{self.max_scale:g}"
            raise ValueError(f"max_scale: {expected}, got {self.max_scale:g}; {meant}")
        if self.training:
            # In place, but no new version: a compiled model that computes with the same parameter
            # has saved it for its backward pass, which refuses other versions.
            self.log_scale.data.clamp_(max=math.log(self.max_scale))

    def _look(self, loss: Any, sim: Similarity) -> None:
        """Warn of a batch, and of a temperature that is probably a scale."""
        super()._look(loss, sim)
        if self._looked:
            with torch.no_grad():  # later calls save no tensor for it either
                warn_of_temperature(self.temperature, sim)


class InfoNCELoss(TemperatureLoss, PairLoss):
    r"""InfoNCE, with any number of positives per anchor, in one or in both directions.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + Z_{ip}}, \qquad
        Z_{ip} = \sum_{j \in neg(i)} e^{S_{ij}/\tau}

    The two directions are added, where CLIP averages them. The other options add candidates to Z or
    leave some out; they can be combined. See :doc:`losses/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        image_image: add the images that do not match image i, ``sum_j exp(V_ij / τ)`` with the
            similarities V of images, to its denominator and to those of its texts.
        text_text: the same of the texts but for a positive p, and of shared ``negatives``.
            ``"unfiltered"``: a ``margin`` leaves none of them out (Qwen3-Embedding).
        joint: one softmax for both directions: a pair's denominator is the sum of its image's and
            of its text's (GTE, https://arxiv.org/abs/2308.03281). There is one value for an image.
        in_batch: False: of texts, only an image's ``negatives`` are candidates.
        margin: m; negatives count only below :math:`t_i = \bar G_{i+} + m`, where
            :math:`\bar G_{i+}` is the mean score of the positives, as others are probably matches
            without a label. G is S itself (Qwen3-Embedding, https://arxiv.org/abs/2506.05176, 0.1)
            or a guide's scores (GISTEmbed, https://arxiv.org/abs/2402.16829, 0). None: all count.
        relative: :math:`t_i = \bar G_{i+} + m |\bar G_{i+}|` (NV-Retriever,
            https://arxiv.org/abs/2407.15831, -0.05).
        hardness: α, at least 0, or a pair of numbers, of the batch's and of further negatives; a
            negative counts ``exp(α S_ij)`` times, a weight without a gradient (LLaVE with 9,
            https://arxiv.org/abs/2503.04812; EmbeddingGemma with (0, 5),
            https://arxiv.org/abs/2509.20354). Candidates of ``image_image`` and ``text_text`` count
            once.
        max_scale: the largest ``1/τ`` that is learnt: a call in training mode sets ``log_scale``
            back to it (CLIP's 100). None: there is no limit.
        directions, normalize, reduction, engine, check_finite, telemetry, gather, process_group:
            see :class:`PairLoss`.
    """

    _: KW_ONLY
    image_image: bool = False
    text_text: bool | Literal["unfiltered"] = False
    joint: bool = False
    in_batch: bool = True
    margin: float | None = None
    relative: bool = False
    hardness: float | tuple[float, float] = option(default=0.0, converter=as_hardness)

    # ---------------------------------------------------------------------------------------- input

    def forward(  # noqa: PLR0913 (input, by keyword)
        self,
        images: Tensor | Similarity | None = None,
        texts: Tensor | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scores: Tensor | None = None,
        negatives: Tensor | None = None,
        negative_ids: IdsLike | None = None,
        guide: Similarity | Sequence[Tensor] | None = None,
        image_groups: IdsLike | None = None,
        text_groups: IdsLike | None = None,
        matches: Tensor | None = None,
        **unknown: Any,
    ) -> Any:
        """Return the loss as :meth:`PairLoss.forward` does.

        Args:
            images, texts, image_ids, text_ids, scores, matches: see there.
            image_groups, text_groups: see there. Candidates of ``image_image`` and ``text_text``
                are of their groups, too; ``negatives`` are open to all groups.
            negatives: further candidates of the images, which are no anchors: (K, D) texts for all
                images, in a job of several processes those of all processes (NegCLIP,
                https://arxiv.org/abs/2210.01936); or (N, K, D), for each image its own. Beside
                ``scores``, (N, K) scores of each image's own.
            negative_ids: (K,) or (N, K) integers: one that equals the image's id is left out, and
                :data:`itrloss.NO_ID` marks padding. Left out, negatives match no image. Without
                ``image_ids``, they are row numbers of images.
            guide: another model, whose scores the ``margin`` is for: its embeddings ``(images,
                texts)`` or ``(images, texts, negatives)``, which may have another dimension; or a
                :class:`Similarity` of the same images and texts, with the same ids, where there
                are no other candidates. In a job, that is a :meth:`Similarity.sharded`.
        """
        if unknown:
            self.refuse(unknown)
        guide = as_guide(guide)
        self._limit_scale()
        anchors = images if scores is None else scores

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            self._check_options(negatives, guide, isinstance(images, Tensor))
            ids = image_ids, negative_ids
            return self._described_input(anchors, texts, negatives, ids, guide, scores is not None)

        related = self._related(image_groups, text_groups, matches)
        sim = self._similarity(
            images, texts, image_ids, text_ids, scores, check=check, related=related
        )
        if guide is None and negatives is None and not (self.image_image or self.text_text):
            return self._with_telemetry(self.compute(sim), sim)
        ids = FurtherIds.of(sim, image_ids, text_ids, negative_ids, related)
        self._look_at_further(sim, guide)
        further = self._further(anchors, texts, negatives, ids, self.normalize)
        judge, judged = self._judges(guide, sim, (image_ids, text_ids), ids)
        return self._with_telemetry(self.compute(sim, further, judge, judged), sim)

    @torch.no_grad()
    def _look_at_further(
        self,
        sim: Similarity,
        guide: Similarity | Sequence[Tensor] | None,
    ) -> None:
        """Warn of a guide in other units; see :meth:`_look`."""
        if self._looked or torch.compiler.is_compiling():
            return
        if not may_be_read(sim) or sim.share is not None:
            return
        of_cosines = self.margin is not None and abs(self.margin) < 1 and not self.relative
        if isinstance(guide, Similarity) and of_cosines:
            warn_of_units(type(self).__name__, guide, "guide: scores")

    @torch.no_grad()
    def _judges(
        self,
        guide: Similarity | Sequence[Tensor] | None,
        sim: Similarity,
        ids: tuple[IdsLike | None, IdsLike | None],
        ids_of_further: FurtherIds,
    ) -> tuple[Similarity | None, Further]:
        """Return a guide's similarities, in the batch and further ones."""
        if guide is None:
            return None, NOTHING_FURTHER
        if isinstance(guide, Similarity):
            functional.check_other_model("guide", guide, sim)
            check_guide_ids(guide, sim)
            return guide, NOTHING_FURTHER
        images, texts, *more = guide
        related = ids_of_further.related
        check = partial(check_rows, _OF_GUIDE, images, texts, sim)
        batch = self._between(images, texts, ids, check, names=_OF_GUIDE, related=related)
        negatives = more[0] if more else None
        return batch, self._further(images, texts, negatives, ids_of_further, True)

    def _check_options(
        self,
        negatives: Tensor | None,
        guide: Similarity | Sequence[Tensor] | None,
        has_images: bool,  # whether there are embeddings of images and texts
    ) -> None:
        """Raise an error for options and input that do not go together."""
        among = self.image_image or self.text_text
        self._check_directions(negatives)
        if not self.in_batch and (among or self.joint):
            raise ValueError("in_batch: expected True with image_image, text_text and joint")
        if not self.in_batch and negatives is None:
            raise ValueError("in_batch: expected True, or negatives of the images, got none")
        if among and not has_images:
            expected = "expected False without embeddings of images and texts"
            raise ValueError(f"image_image, text_text: {expected}")
        for name in ("relative", "text_text"):
            value = getattr(self, name)
            if self.margin is None and (value == "unfiltered" or (name == "relative" and value)):
                raise ValueError(f"{name}: expected a margin with {name}={value!r}, got None")
        if guide is None:
            return
        if self.margin is None:
            raise ValueError(
                "guide: expected None without a margin, as the margin is for its scores"
            )
        check_guide(guide, negatives is not None, bool(among))

    def _check_directions(self, negatives: Tensor | None) -> None:
        """Raise an error for options and input that need another direction."""
        if self.joint and self.directions != "both":
            expected = "expected False, or directions='both', whose denominators it adds up"
            raise ValueError(f"joint: {expected}, got directions={self.directions!r}")
        if not self.in_batch and self.directions != "image-text":
            expected = "expected True, or directions='image-text', as negatives are of images"
            raise ValueError(f"in_batch: {expected}, got directions={self.directions!r}")
        if self.directions != "text-image" or negatives is None:
            return
        if not self.text_text or negatives.dim() == 3:
            expected = "expected directions='both' or 'image-text', as they are of images"
            meant = "with texts as queries, pass these as images"
            raise ValueError(f"negatives: {expected}, got 'text-image'; {meant}")

    def _described_input(
        self,
        images: Any,  # (N, D), or (N, M) scores
        texts: Any,
        negatives: Tensor | None,
        ids: tuple[IdsLike | None, IdsLike | None],  # of images and of negatives
        guide: Similarity | Sequence[Tensor] | None,
        are_scores: bool,
    ) -> str:
        """Return what processes have to pass alike, in words; raise an error for wrong input."""
        _image_ids, negative_ids = ids
        described = "without negatives"
        if negatives is None and negative_ids is not None:
            raise ValueError("negative_ids: expected None without negatives")
        if negatives is not None:
            check_negatives(images, negatives, self.sharded, are_scores)
            has_ids = negative_ids is not None
            described = f"negatives of {negatives.dim()} dimensions with ids {has_ids}"
        if isinstance(guide, Similarity) and self.sharded:
            return f"{described}, {described_model('guide', guide, images, texts)}"
        return f"{described}, guide {guide is not None}"

    def _further(
        self,
        images: Any,
        texts: Any,
        negatives: Tensor | None,
        ids: FurtherIds,
        normalize: bool,
    ) -> Further:
        """Return the similarities of a model's embeddings with candidates outside the batch."""
        options: dict[str, Any] = {"normalize": normalize, "check_finite": self.check_finite}
        among_images: Similarity | None = None
        among_texts: Similarity | None = None
        if self.image_image:
            same = ids.images, ids.images
            options["related"] = ids.among(0)
            among_images = self._between(images, images, same, names=_OF_IMAGES, **options)
        if self.text_text:
            same = ids.texts, ids.texts
            options["related"] = ids.among(1)
            among_texts = self._between(texts, texts, same, names=_OF_TEXTS, **options)
        if negatives is None:
            return Further(among_images=among_images, among_texts=among_texts)
        is_own = negatives.dim() == 3 or texts is None  # with scores there are no texts
        if is_own:
            scores = negatives
            if negatives.dim() == 3:
                scores = scores_of_own(images, negatives, normalize)
            own = OwnNegatives(scores, ids.exist(scores))
            return Further(None, own, among_images, among_texts)
        options["related"] = None
        options["names"] = _OF_NEGATIVES
        of_images = ids.with_negatives(ids.images, len(images), negatives)
        shared = self._between(images, negatives, of_images, **options)
        if not self.text_text:
            return Further(shared, None, among_images, among_texts)
        options["names"] = _OF_TEXTS_AND_NEGATIVES
        assert texts is not None
        of_texts = ids.with_negatives(ids.texts, len(texts), negatives)
        beside_texts = self._between(texts, negatives, of_texts, **options)
        return Further(shared, None, among_images, among_texts, beside_texts)

    # -------------------------------------------------------------------------------------- formula

    def compute(
        self,
        sim: Similarity,
        further: Further = NOTHING_FURTHER,
        guide: Similarity | None = None,
        of_guide: Further = NOTHING_FURTHER,
    ) -> Any:
        """Return InfoNCE; ``further`` candidates, and what a guide has in place of both."""
        denominators = Denominators(self, sim, further, guide, of_guide)
        if not denominators.are_of_anchors:
            return self._of_pairs(sim, denominators)
        positives = None
        if further.negatives is not None:
            positives = self.anchors(sim)
        return functional.info_nce_loss(
            self._pooled(sim, further),
            denominators.temperature,
            self.reduction,
            hardness=denominators.hardness[0],
            positives=positives,
            below=denominators.limits(),
            guide=None if guide is None else self._pooled(guide, of_guide),
        )

    def _pooled(self, sim: Similarity, further: Further) -> Anchors:
        """Return the anchors whose values count, images with further negatives."""
        if further.negatives is None or self.directions == "text-image":
            return self.anchors(sim)
        images = Anchors.pooled(sim, further.negatives)
        if self.directions == "image-text":
            return images
        return Anchors.together(images, sim.T)

    def _of_pairs(self, sim: Similarity, denominators: Denominators) -> Any:
        """Return the loss where a pair's denominator has parts of its image and of its text."""
        if self.joint:
            values = denominators.joint_values()
            valid = denominators.valid(0)
            return sim.towards("image-text").reduce(values, self.reduction, valid)
        sides = SIDES[self.directions]
        values = torch.cat([denominators.values(side) for side in sides])
        valid = torch.cat([denominators.valid(side) for side in sides])
        return self.anchors(sim).reduce(values, self.reduction, valid)


class Denominators:
    """The sums of exponentials that InfoNCE's denominators are made of, as logarithms.

    Side 0 is that of the images, side 1 that of the texts. A sum without candidates is
    ``LEAST_LOG``.
    """

    def __init__(
        self,
        loss: InfoNCELoss,
        sim: Similarity,
        further: Further,
        guide: Similarity | None,
        of_guide: Further,
    ):
        self.loss = loss
        self.views = sim, sim.T
        self.further = further
        #: The similarities that decide which negatives count; None: the loss's own.
        self.guides = None if guide is None else (guide, guide.T)
        self.of_guide = of_guide
        self.temperature = loss.shared(loss.temperature)
        scale = 1 / self.temperature
        if isinstance(scale, Tensor):
            scale = (1 / self.temperature.to(sim.dtype)).reshape(1)
        self.scale = scale
        hardness = loss.hardness
        #: Of the batch, and of further negatives.
        self.hardness = hardness if isinstance(hardness, tuple) else (hardness, hardness)
        # Found once, as several denominators have them.
        self._limits: dict[int, Tensor] = {}
        self._across: dict[int, Tensor] = {}
        self._among: dict[int, Tensor | None] = {}

    @property
    def are_of_anchors(self) -> bool:
        """Whether an anchor has one denominator for all its positives, as in plain InfoNCE."""
        further = self.further
        others = further.among_images, further.among_texts, further.own_negatives
        if self.loss.joint or not self.loss.in_batch or any(x is not None for x in others):
            return False
        return further.negatives is None or self.hardness[0] == self.hardness[1]

    # --------------------------------------------------------------------------------------- limits

    def limits(self) -> Tensor | None:
        """Return the (A,) scores below which negatives of the loss's anchors count; None: all."""
        if self.loss.margin is None:
            return None
        judge = self.views[0] if self.guides is None else self.guides[0]
        return self._above(self.loss.anchors(judge).mean_of_positives(identity)).detach()

    def limit(self, side: int) -> Tensor | None:
        """Return the (N,) or (M,) scores below which negatives count; None: all do."""
        if self.loss.margin is None:
            return None
        if side not in self._limits:
            judge = self.views[side] if self.guides is None else self.guides[side]
            self._limits[side] = self._above(judge.mean_of_positives(identity)).detach()
        return self._limits[side]

    def _above(self, own: Tensor) -> Tensor:
        """Return the limits from the mean scores of positives.

        A positive's score and that of a copy of it among the negatives come from different
        products, which round differently. So what lies within rounding of a limit is left out.
        """
        assert self.loss.margin is not None
        margin = self.loss.margin * own.abs() if self.loss.relative else self.loss.margin
        rounding = ROUNDING * torch.finfo(own.dtype).eps
        return own + margin - rounding * own.abs().clamp_min(1.0)

    # ----------------------------------------------------------------------------------------- sums

    def of_batch(self, side: int) -> Tensor:
        """Return the log-sum-exps of the candidates across: (N,) of images, (M,) of texts."""
        view = self.views[side]
        limit = self.limit(side)
        _, of_further = self.hardness
        logs: list[Tensor] = []
        if self.loss.in_batch:
            logs.append(self.across(side))
        negatives = self.further.negatives
        if side == 0 and negatives is not None:
            logs.append(self._log(negatives, self.of_guide.negatives, limit, of_further))
        own = self.further.own_negatives
        if side == 0 and own is not None:
            judge = self.of_guide.own_negatives
            log = own.logsumexp(self.scale, of_further, limit, judge)
            # a shared batch is padded
            logs.append(padded(log, view.sizes[0], LEAST_LOG))
        return joined_logs(logs)

    def across(self, side: int) -> Tensor:
        """Return the log-sum-exps of the batch's texts (N,) for images, or images (M,) for texts.

        Both are found in one pass over the scores.
        """
        if not self._across:
            anchors = self.loss.anchors(self.views[0])
            guide = None if self.guides is None else self.loss.anchors(self.guides[0])
            sides = SIDES[self.loss.directions]
            log = self._log(anchors, guide, self.limits(), self.hardness[0])
            self._across = dict(zip(sides, anchors.split(log), strict=True))
        return self._across[side]

    def among(self, side: int) -> Tensor | None:
        """Return the log-sum-exps of candidates of the own kind; None where they are none."""
        if side not in self._among:
            self._among[side] = self._found_among(side)
        return self._among[side]

    def _found_among(self, side: int) -> Tensor | None:
        """Return :meth:`among`, computed anew."""
        further = self.further
        of_guide = self.of_guide
        if side == 0 and further.among_images is not None:
            return self._log(further.among_images, of_guide.among_images, self.limit(0))
        if side == 0 or further.among_texts is None:
            return None
        limit = None if self.loss.text_text == "unfiltered" else self.limit(1)
        logs = [self._log(further.among_texts, of_guide.among_texts, limit)]
        if further.texts_with_negatives is not None:
            others = further.texts_with_negatives, of_guide.texts_with_negatives
            logs.append(self._log(*others, limit))
        return joined_logs(logs)

    def _log(
        self,
        anchors: Anchors,
        guide: Anchors | None,
        limit: Tensor | None,
        hardness: float = 0.0,
    ) -> Tensor:
        """Return the log-sum-exps of the negatives below a limit."""
        judge = None if limit is None else guide
        log = functional.hard_logsumexp(anchors, self.scale, hardness, limit, judge)
        return log.clamp_min(LEAST_LOG)

    # --------------------------------------------------------------------------------------- values

    def values(self, side: int) -> Tensor:
        """Return the losses (N,) of images, or (M,) of texts."""
        own = self.of_batch(side)
        among_own = self.among(side)
        if among_own is not None:
            own = joined_logs([own, among_own])
        return self._means(side, own, self.among(1 - side), 1)

    def joint_values(self) -> Tensor:
        """Return the losses (N,) of images where a pair has one denominator for both directions."""
        parts: list[Tensor] = []
        for side in (0, 1):
            among = self.among(side)
            logs = [self.of_batch(side)]
            if among is not None:
                logs.append(among)
            parts.append(joined_logs(logs))
        of_images, of_texts = parts
        return self._means(0, of_images, of_texts, 2)

    def _means(self, side: int, own: Tensor, partners: Tensor | None, several: int) -> Tensor:
        """Return the means of ``-log p`` over the positives of a side's anchors.

        A pair's denominator has ``several`` times its own exponential, and the sums of the anchor
        and, if there are any, of its partner.
        """
        log = math.log(several)

        def loss_of_pairs(scores: Tensor, of_own: Tensor, of_partner: Tensor) -> Tensor:
            """Return ``-log p`` of pairs, from their scores and their anchors' sums."""
            others = torch.logaddexp(of_own, of_partner)
            return F.softplus(others - log - self.scale * scores, threshold=40) + log

        view = self.views[side]
        if partners is not None:
            return view.mean_of_pairs(loss_of_pairs, own, partners)
        return view.mean_of_positives(softplus, scale=-self.scale, shift=own - log) + log

    # --------------------------------------------------------------------------- anchors that count

    def valid(self, side: int) -> Tensor:
        """Return whether (N,) images, or (M,) texts, have a positive, and in one of its
        denominators a possible negative.
        """
        view = self.views[side]
        possible = self.number_across(side)
        own = self.number_among(side)
        if own is not None:
            possible = possible + own
        partners = self.number_among(1 - side)
        if self.loss.joint:
            across = self.number_across(1 - side)
            partners = across if partners is None else across + partners
        if partners is not None:
            of_positives = view.mean_of_pairs(
                lambda scores, of_own, of_partner: of_partner.to(scores.dtype), possible, partners
            )
            possible = possible + (of_positives > 0)
        return (view.positive_counts > 0) & (possible > 0)

    def number_across(self, side: int) -> Tensor:
        """Return the (N,) or (M,) numbers of possible negatives in :meth:`of_batch`."""
        view = self.views[side]
        number = torch.zeros_like(view.positive_counts)
        if self.loss.in_batch:
            number = view.negative_counts
        negatives = self.further.negatives
        if side == 0 and negatives is not None:
            number = number + negatives.negative_counts
        own = self.further.own_negatives
        if side == 0 and own is not None:
            number = number + padded(own.counts(), view.sizes[0])
        return number

    def number_among(self, side: int) -> Tensor | None:
        """Return the numbers of possible negatives in :meth:`among`; None where it is None."""
        further = self.further
        if side == 0:
            return None if further.among_images is None else further.among_images.negative_counts
        if further.among_texts is None:
            return None
        number = further.among_texts.negative_counts
        if further.texts_with_negatives is not None:
            number = number + further.texts_with_negatives.negative_counts
        return number


def joined_logs(logs: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the sum of what logarithms (A,) are of."""
    return logs[0] if len(logs) == 1 else torch.stack([*logs]).logsumexp(0)


# ------------------------------------------------------------------------------------- the input


@dataclass(frozen=True)
class FurtherIds:
    """The ids of this process's images, texts and negatives; None where they were left out."""

    images: IdsLike | None
    texts: IdsLike | None
    negatives: IdsLike | None  # (K,) or (N, K)
    related: Related | None  # of images and texts

    @classmethod
    def of(
        cls,
        sim: Similarity,
        images: IdsLike | None,
        texts: IdsLike | None,
        negatives: IdsLike | None,
        related: Related | None,
    ) -> FurtherIds:
        """Return the ids that were passed in; of a batch that processes share, ids that tell the
        images and texts of all apart.
        """
        if sim.share is not None:
            if images is None and negatives is not None:  # numbers of this process's images
                numbers = as_int64("negative_ids", as_id_numbers("negative_ids", negatives))
                among_all = numbered(numbers, sim.shape[0], sim.share.processes.first(0))
                negatives = among_all.masked_fill(numbers == NO_ID, NO_ID)
            images, texts = sim.own_ids
        return cls(images, texts, negatives, related)

    def among(self, side: int) -> Related | None:
        """Return the groups of images (``side`` 0), or of texts, among themselves."""
        if self.related is None:
            return None
        of_images, of_texts = self.related.groups
        own = of_images if side == 0 or of_texts is None else of_texts
        if own is None:
            return None
        return Related((own, own), self.related.rule)

    def with_negatives(
        self, own: IdsLike | None, size: int, negatives: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the ids (A,) or label sets (A, k) of images, or of texts, and the ids (K,) of
        negatives of all images.
        """
        device = negatives.device
        if self.negatives is None:  # they match nothing
            zeros = torch.zeros(size, dtype=torch.int64, device=device)
            return zeros, torch.ones(len(negatives), dtype=torch.int64, device=device)
        own_ids = labels_or_numbers("image_ids", own, size, device)
        if own_ids.shape[1] == 1:
            own_ids = own_ids[:, 0]
        return own_ids, as_ids("negative_ids", self.negatives, len(negatives), device)

    def exist(self, scores: Tensor) -> Tensor:
        """Return the (N, K) bool mask of own negatives that exist and do not match their image."""
        if self.negatives is None:
            return torch.ones_like(scores, dtype=torch.bool)
        numbers = as_id_numbers("negative_ids", self.negatives)
        if numbers.shape != scores.shape:
            expected = f"expected shape {tuple(scores.shape)}"
            raise ValueError(f"negative_ids: {expected}, got {tuple(numbers.shape)}")
        numbers = as_int64("negative_ids", numbers).to(scores.device)
        own = labels_or_numbers("image_ids", self.images, len(scores), scores.device)
        matching = (numbers[:, :, None] == own[:, None]).any(2)
        return (numbers != NO_ID) & ~matching


def labels_or_numbers(name: str, ids: IdsLike | None, size: int, device: torch.device) -> Tensor:
    """Return the labels (N, k) of entries, by default their numbers (N, 1)."""
    if ids is None:
        return torch.arange(size, device=device)[:, None]
    return label_sets(name, ids, size, device)


def scores_of_own(images: Tensor, negatives: Tensor, normalize: bool) -> Tensor:
    """Return the (N, K) scores of images (N, D) with negatives (N, K, D) of their own."""
    with full_precision(images):
        x = normalized(images, normalize)
        y = normalized(negatives, normalize)
        return (y @ x[:, :, None]).squeeze(2)


def check_negatives(images: Any, negatives: Any, sharded: bool, are_scores: bool) -> None:
    """Raise an error unless negatives are (K, D) or (N, K, D), or where scores are given (N, K)."""
    if are_scores:
        check_matrix("negatives", negatives, "(N, K), as of scores", empty=sharded)
        if len(negatives) != len(images):
            expected = f"expected a row of scores for each of {len(images)} images"
            raise ValueError(f"negatives: {expected}, got shape {tuple(negatives.shape)}")
        return
    if not isinstance(images, Tensor):
        expected = "expected images with them, not a Similarity"
        raise ValueError(f"negatives: {expected}")
    if not isinstance(negatives, Tensor) or negatives.dim() != 3:
        check_embeddings(images, negatives, False, _OF_NEGATIVES, empty=sharded)
        return
    check_matrix("negatives", negatives, "(N, K, D)", dims=3, empty=sharded)
    if (negatives.shape[0], negatives.shape[2]) != images.shape:
        expected = f"expected shape (K, D) or ({len(images)}, K, {images.shape[1]})"
        raise ValueError(f"negatives: {expected}, got {tuple(negatives.shape)}")
    check_alike("negatives", negatives, "images", images)


def as_guide(guide: Any) -> Any:
    """Return a guide with tensors in place of NumPy arrays."""
    return [from_numpy(x) for x in guide] if isinstance(guide, (tuple, list)) else guide


def check_guide(guide: Any, has_negatives: bool, among: bool) -> None:
    """Raise an error unless a guide has scores of all candidates."""
    if not isinstance(guide, Similarity):
        check_embeddings_of("guide", guide, has_negatives)
    elif has_negatives or among:
        expected = "expected embeddings with negatives, image_image and text_text"
        raise ValueError(f"guide: {expected}, got a Similarity")


def check_embeddings_of(name: str, model: Any, has_negatives: bool) -> None:
    """Raise an error unless another model has embeddings of all candidates."""
    expected = "(images, texts, negatives)" if has_negatives else "(images, texts)"
    if not isinstance(model, Sequence) or not all(isinstance(x, Tensor) for x in model):
        expected = f"expected a Similarity or embeddings {expected}"
        hint = as_similarity(name, model)
        raise TypeError(f"{name}: {expected}, got {type(model).__name__}{hint}")
    if len(model) != 2 + has_negatives:
        raise ValueError(f"{name}: expected embeddings {expected}, got {len(model)} tensors")


def check_rows(names: Names, images: Tensor, texts: Tensor, sim: Similarity) -> str:
    """Raise an error unless another model has embeddings of as many images and texts as there are
    in this process; return nothing that has to be the same in others.
    """
    sizes = {"images": sim.shape[0], "texts": sim.T.shape[0]}
    for name, x, side in zip(names[:2], (images, texts), sizes, strict=True):
        if x.shape[:1] != (sizes[side],):
            expected = f"as many rows as there are {side}, {sizes[side]}"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(x.shape)}")
    return ""


def described_model(name: str, other: Any, images: Any, texts: Any) -> str:
    """Return what another model's part of a shared batch is, in words.

    Raise an error unless it is of this process's images and texts.
    """
    if not isinstance(other, Similarity) or other.share is None:
        expected = "expected a Similarity.sharded in a job of several processes"
        raise TypeError(f"{name}: {expected}, got {type(other).__name__}")
    sizes = len(images), len(texts)
    got = other.shape[0], other.T.shape[0]
    if got != sizes:
        raise ValueError(f"{name}: expected {sizes} images and texts of this process, got {got}")
    return f"{name} of {other.totals} images and texts"


def check_guide_ids(guide: Similarity, sim: Similarity) -> None:
    """Raise an error unless a guide has the ids of the loss; on an accelerator, if one has any."""
    ids = zip(sim.ids, guide.ids, strict=True)
    if sim.share is not None:  # the ids of all processes, so that all raise the error
        ids = zip(sim.all_ids, guide.all_ids, strict=True)
    for own, others in ids:
        same = (own is None) == (others is None)
        if own is not None and others is not None and host_may_read(own) and host_may_read(others):
            same = torch.equal(own, others)
        if not same:
            expected = "expected the ids of the loss, as its positives' scores are limits"
            raise ValueError(f"guide: {expected}")


class MemoryInfoNCELoss(TemperatureLoss, MemoryLoss):
    r"""InfoNCE of a batch against the keys of earlier batches (MoCo; He et al., CVPR 2020,
    https://arxiv.org/abs/1911.05722, Eq. 1), between images and texts as in ALBEF (Li et al.,
    NeurIPS 2021, https://arxiv.org/abs/2107.07651, Eq. 1 and 6).

    .. math:: \ell_i = (1 - \alpha) \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau}}
        - \alpha \sum_j q_{ij} \log p_{ij}

    The candidates of image i are the text keys of the batch and the memory's texts; of them the
    batch's keys with its id are its positives, and those with another id its negatives. Entries of
    the memory with its id are neither. The last term is ALBEF's momentum distillation: over all
    candidates, p is the softmax of :math:`S_i / \tau`, and q that of the image's own *key* with
    the candidates, without a gradient. See :doc:`losses/memory`.

    Args:
        temperature, learnable, max_scale: see :class:`InfoNCELoss`.
        batch_negatives: False: the memory's entries alone are negatives (MoCo). While it is empty,
            the loss is then 0.
        distillation: α in [0, 1]; ALBEF has 0.4.
        directions, reduction, engine, check_finite, telemetry, gather, process_group: see
            :class:`MemoryLoss`.
    """

    _: KW_ONLY
    batch_negatives: bool = True
    distillation: float = option(default=0.0, at_least=0, at_most=1)

    def _value(
        self,
        sims: MemorySimilarity,
        keys: tuple[Tensor, Tensor],
        memory: CoupledMemory,
        ids: tuple[IdsLike | None, IdsLike | None],
    ) -> Any:
        """Return the loss, with the keys in place of the batch as a teacher."""
        if self.distillation and not self.batch_negatives:
            expected = "expected 0 with batch_negatives=False, as q is over the batch, too"
            raise ValueError(f"distillation: {expected}, got {self.distillation}")
        self._limit_scale()
        teacher: MemorySimilarity | None = None
        if self.distillation:
            teacher = self._similarities(keys, keys, memory, ids)
        return self.compute(sims, teacher)

    def compute(self, sims: MemorySimilarity, teacher: MemorySimilarity | None = None) -> Any:
        """Return the loss; ``teacher``: the similarities with the keys in place of the batch."""
        return functional.memory_info_nce_loss(
            sims,
            self.shared(self.temperature),
            self.reduction,
            batch_negatives=self.batch_negatives,
            distillation=self.distillation,
            teacher=teacher,
        )


class DistillationLoss(PairLoss):
    r"""Cross-entropy against the softmax of a teacher's scores, over both directions.

    .. math:: \ell_i = -\sum_j q_{ij} \log p_{ij}, \qquad
        p_i = \operatorname{softmax}_j(S_{ij} / \tau), \qquad
        q_i = \operatorname{softmax}_j(T_{ij} / \tau_t)

    over all candidates, whatever matches. It is the divergence KL(q | p) plus the entropy of q, a
    constant (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). The teacher gets no gradient.
    See :doc:`losses/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        teacher_temperature: :math:`\tau_t`, in units of the teacher's scores.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    temperature: float = option(default=0.07, above=0)
    teacher_temperature: float = option(default=0.07, above=0)

    @property
    def in_cosines(self) -> bool:
        """Whether the temperature is one for cosines."""
        return self.temperature < 0.5

    def forward(  # type: ignore[override]
        self,
        images: Tensor | None = None,
        texts: Tensor | None = None,
        teacher: Tensor | Similarity | Sequence[Tensor] | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scores: Tensor | None = None,
        image_groups: IdsLike | None = None,
        text_groups: IdsLike | None = None,
        **unknown: Any,
    ) -> Any:
        """Return the loss of (N, D) images and (M, D) texts, or of a score matrix.

        Args:
            images, texts, scores: see :meth:`PairLoss.forward`. Scores may be those of each image
                with its own candidates, such as its text and its hard negatives, with
                ``directions="image-text"``.
            teacher: (N, M) scores of another model, its embeddings ``(images, texts)``, or a
                :class:`Similarity` of these.
            image_ids, text_ids: see there; they are for ``telemetry`` alone, and go with groups.
            image_groups, text_groups: see there; candidates are of the same group, or match.
        """
        if unknown:
            self.refuse(unknown)
        given = as_guide(from_numpy(teacher))
        own = images if scores is None else scores

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            if not isinstance(given, (Tensor, Similarity)):
                check_embeddings_of("teacher", given, has_negatives=False)
            if not self.sharded or isinstance(given, (Tensor, list)):
                return f"teacher {type(given).__name__}"
            if scores is not None:
                expected = "expected scores in a job whose loss gets scores"
                raise TypeError(f"teacher: {expected}, got {type(given).__name__}")
            return described_model("teacher", given, images, texts)

        related = self._related(image_groups, text_groups, None)
        no_ids = image_ids is None and text_ids is None and related is None
        if no_ids and not self.sharded and isinstance(own, Tensor):
            n, m = (len(own), len(texts)) if texts is not None else own.shape
            if n != m:
                image_ids = torch.arange(n, device=own.device)
                text_ids = torch.arange(m, device=own.device)
        ids = image_ids, text_ids
        sim = self._similarity(images, texts, *ids, scores, check=check, related=related)
        model = self._model(given, sim, ids, related)
        if not self._looked and not torch.compiler.is_compiling():
            self._look_at_teacher(model)
        return self._with_telemetry(self.compute(sim, model), sim)

    @torch.no_grad()
    def _model(
        self,
        teacher: Any,
        sim: Similarity,
        ids: tuple[IdsLike | None, IdsLike | None],
        related: Related | None,
    ) -> Any:
        """Return a teacher's scores or embeddings as a similarity, and a similarity as it is."""
        if isinstance(teacher, Tensor):
            return self._taught_by(teacher, sim, ids, related)
        if isinstance(teacher, list):
            images, texts = teacher
            check = partial(check_rows, _OF_TEACHER, images, texts, sim)
            return self._between(images, texts, ids, check, names=_OF_TEACHER, related=related)
        return teacher

    def _taught_by(
        self,
        scores: Tensor,
        sim: Similarity,
        ids: tuple[IdsLike | None, IdsLike | None],
        related: Related | None,
    ) -> Similarity:
        """Return a teacher's scores of the same images and texts as a similarity."""

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            check_matrix("teacher", scores, "(N, M)", self.check_finite, empty=self.sharded)
            if scores.shape != sim.shape:
                raise ValueError(f"teacher: expected shape {sim.shape}, got {tuple(scores.shape)}")
            return "teacher"

        if sim.share is None:
            check()
            return Similarity.from_scores(scores, *ids, related=related)
        options = {"process_group": self.process_group, "same": check, "related": related}
        return Similarity.sharded_scores(scores, *sim.own_ids, **options)

    @torch.no_grad()
    def _look_at_teacher(self, teacher: Any) -> None:
        """Warn of a teacher in other units, or of its embeddings; see :meth:`_look`."""
        if not isinstance(teacher, Similarity) or not may_be_read(teacher):
            return
        warn_of_vectors(teacher)
        if self.teacher_temperature < 0.5:
            warn_of_units(type(self).__name__, teacher, "teacher: scores")

    def compute(  # type: ignore[override]
        self, sim: Similarity, teacher: Similarity | None
    ) -> Any:
        """Return the loss of the similarities of two models."""
        taught = functional.check_other_model("teacher", teacher, sim)
        return functional.distillation_loss(
            self.anchors(sim),
            self.anchors(taught),
            self.temperature,
            self.teacher_temperature,
            self.reduction,
        )
