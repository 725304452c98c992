"""InfoNCE with all its options, and InfoNCE against a memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..anchors import Anchors
from ..checks import IMAGES_AND_TEXTS, IdsLike, Names, as_number, option
from ..engine.related import PassedIds
from ..engine.vectors import compute_dtype
from ..functional import Values
from ..memory import CoupledMemory, MemorySimilarity
from ..similarity import Similarity
from ..terms import identity, softplus
from .base import LEAST_LOG, MemoryLoss, PairLoss, Passed, log_add_exp
from .further import (
    FurtherRelation,
    OwnNegatives,
    Relation,
    as_negative_ids,
    check_negatives,
    scores_of_own,
)
from .other_model import as_tensors, check_kind, similarity_of, zero_or_nan
from .temperature import TemperatureLoss

ROUNDING = 32.0  # units in the last place by which two products of the same vectors may differ
_OF_NEGATIVES = Names("images", "negatives", "image_ids", "negative_ids")
_OF_GUIDE_AND_NEGATIVES = Names("guide[0]", "guide[2]", "image_ids", "negative_ids")


class Part(NamedTuple):
    """Candidates in the denominators of images (side 0), of texts (side 1), or of both."""

    sides: tuple[int, ...]
    #: The sides' anchors, the images first; and a guide's, for whose scores the margin is.
    scores: Sequence[Anchors | OwnNegatives]
    hardness: float = 0.0
    limited: bool = True  # whether the margin leaves some of them out
    for_partners: bool = False  # whether the anchors' positives have them in theirs, too

    def logs(self, scale: float | Tensor, limits: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the log-sum-exps of each side's anchors, about ``LEAST_LOG`` for none."""
        anchors, *guides = self.scores
        limit: Tensor | None = None
        guide: Anchors | OwnNegatives | None = None
        if limits and self.limited:
            limit = torch.cat([limits[side] for side in self.sides])
            guide = guides[0] if guides else None
        options = self.hardness, limit, guide
        log = functional.hard_logsumexp(anchors, scale, *options)  # type: ignore[arg-type]
        log = log.clamp_min(LEAST_LOG)
        if limit is not None and guides:
            log = log + (limit - limit)  # below a limit of nan, who counts is not known
        return anchors.split(log)

    def numbers(self) -> tuple[Tensor, ...]:
        """Return how many they are for each side's anchors, whatever the margin leaves out."""
        anchors = self.scores[0]
        return anchors.split(anchors.negative_counts)


class Model(NamedTuple):
    """What a model has of images, texts and negatives: embeddings or scores."""

    images: Tensor  # (N, D), or scores (N, M)
    texts: Tensor | None  # (M, D)
    negatives: Tensor | None = None  # (K, D) or (N, K, D); of scores, (N, K)
    normalize: bool = True


class Guide(NamedTuple):
    """Another model, whose scores the margin is for."""

    sim: Similarity  # of the batch
    zero_or_nan: Tensor  # (): nan if one of its numbers is


class Further(NamedTuple):
    """What is passed in beyond images and texts; None for what is not there."""

    negatives: Tensor | None = None
    negative_ids: IdsLike | None = None
    guide: Any = None  # scores, or a list of embeddings


NOTHING = Further()


def as_hardness(value: float | Sequence[float]) -> float | tuple[float, float]:
    """Return α, at least 0: a number, or one of the batch's and one of further negatives."""
    is_pair = isinstance(value, (tuple, list, np.ndarray)) and np.ndim(value) == 1
    numbers = list(value) if is_pair else [value]  # type: ignore[arg-type]
    if is_pair and len(numbers) != 2:
        raise ValueError(f"hardness: expected a number or a pair of numbers, got {value!r}")
    checked = [as_number("hardness", number) for number in numbers]
    if min(checked) < 0:
        raise ValueError(f"hardness: expected at least 0, got {value!r}")
    return (checked[0], checked[1]) if is_pair else checked[0]


class InfoNCELoss(TemperatureLoss, PairLoss):
    r"""InfoNCE, with any number of positives per anchor, in one or in both directions.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + Z_{ip}}, \qquad
        Z_{ip} = \sum_{j \in neg(i)} e^{S_{ij}/\tau}

    The two directions are added, where CLIP averages them. The other options add candidates to Z or
    leave some out; they can be combined. See :doc:`losses/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter of the loss, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        scale, log_scale: ``1/τ`` and ``log(1/τ)``, in place of τ. Each of the three may be a number
            or a model's parameter of one value, which the loss then shares in this form:
            ``log_scale=model.logit_scale`` of CLIP, ``temperature=model.temp`` of ALBEF.
        image_image: add the images that do not match image i, ``sum_j exp(V_ij / τ)`` with the
            similarities V of images, to its denominator and to those of its texts.
        text_text: the same of the texts but for a positive p, and of shared ``negatives``.
            ``"unfiltered"``: a ``margin`` leaves none of them out (Qwen3-Embedding).
        joint: one softmax for both directions: a pair's denominator is the sum of its image's and
            of its text's, with the pair twice (GTE, https://arxiv.org/abs/2308.03281), or for
            ``"once"`` once (SimLM, https://arxiv.org/abs/2207.02578). There is one value for an
            image.
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
        label_smoothing: ε in [0, 1]; the label is ``1 - ε`` of the positives and ε of all
            candidates, so that the loss has ``ε/τ`` times the mean score of positives minus that of
            all candidates more. With one positive it is that of ``cross_entropy``. Not with
            ``joint``, a ``margin`` or candidates outside the batch.
        max_scale: the largest ``1/τ`` that is learnt: a call in training mode sets the parameter
            back to it (CLIP's 100). None: there is no limit.
        directions, normalize, reduction, engine, check_finite, telemetry, gather, process_group:
            see :class:`PairLoss`.

    Relations:
        CLIP and open_clip have half of it, the mean of both directions. NT-Xent (SimCLR) is
        ``loss(z1, z2, labels=range(N))``; ``joint=True`` with both in-modality matrices is GTE's.
        ``margin`` makes GISTEmbed's, ``hardness`` that of hard negatives.

    Example:
        >>> import torch
        >>> import itrloss
        >>> from torch.nn.functional import cross_entropy, normalize
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> logits = normalize(images) @ normalize(texts).T / 0.07
        >>> labels = torch.arange(8)
        >>> clip = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
        >>> torch.allclose(itrloss.InfoNCELoss()(images, texts), 2 * clip)
        True
    """

    learnable: bool = option(default=False, fixed=True)

    _: KW_ONLY
    image_image: bool = False
    text_text: bool | Literal["unfiltered"] = False
    joint: bool | Literal["once"] = False
    in_batch: bool = True
    margin: float | None = None
    relative: bool = False
    hardness: float | tuple[float, float] = option(default=0.0, converter=as_hardness)
    label_smoothing: float = option(default=0.0, at_least=0, at_most=1)

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
        guide: Tensor | Sequence[Tensor] | None = None,
        image_groups: IdsLike | None = None,
        text_groups: IdsLike | None = None,
        matches: Tensor | None = None,
        labels: IdsLike | None = None,
        targets: IdsLike | None = None,
        **words: Any,
    ) -> Values:
        """Return the loss as :meth:`PairLoss.forward` does.

        Args:
            images, texts, image_ids, text_ids, scores, words: see there.
            matches: see there. An image matches no other image, and a text no other text.
            labels: see there: NT-Xent of SimCLR (https://arxiv.org/abs/2002.05709) is
                ``loss(z1, z2, labels=range(N))``. ``negatives`` are of all items then, and
                ``negative_ids`` are labels.
            targets: see there. ``negatives`` have no ids then.
            image_groups, text_groups: see there. Candidates of ``image_image`` and ``text_text``
                are of their groups, too; ``negatives`` are open to all groups.
            negatives: further candidates of the images, which are no anchors: (K, D) texts for all
                images, in a job of several processes those of all processes (NegCLIP,
                https://arxiv.org/abs/2210.01936); or (N, K, D), for each image its own. Next to
                ``scores``, (N, K) scores of each image's own.
            negative_ids: (K,) or (N, K) integers: one that equals the image's id is left out, and
                :data:`itrloss.NO_ID` marks padding. Left out, negatives match no image. Without
                ``image_ids``, they are row numbers of images. Strings go with strings.
            guide: another model, whose scores the ``margin`` is for: its embeddings ``(images,
                texts)`` or ``(images, texts, negatives)``, which may have another dimension and
                have cosines as scores, also with ``normalize=False``; or, where there are no other
                candidates, its (N, M) scores, in a job with the texts of all processes. The loss is
                nan if a number of the guide is.
        """
        passed = Passed(images, texts, image_ids, text_ids, scores, image_groups, text_groups)
        passed = self._parsed(passed, words, matches, labels, targets)
        among = self.image_image or self.text_text
        if among or not (negatives is None and negative_ids is None and guide is None):
            return self._with_further(passed, Further(negatives, negative_ids, as_tensors(guide)))
        sim = self._similarity(passed, partial(self._check_options, passed))
        return self._with_telemetry(self.compute(sim), sim)

    def _with_further(self, passed: Passed, further: Further) -> Values:
        """Return the loss with candidates outside the batch, or a guide."""
        negatives, _, guide = further
        numbers: list[Tensor | None] = []  # the negatives' ids, parsed

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            self._check_options(passed, further)
            self._check_further(passed, further)
            words, parsed = self._checked_negatives(passed, further)
            numbers.append(parsed)
            return f"{words}, guide {guide is not None}"

        sim = self._similarity(passed, check)
        models = [Model(passed.rows, passed.texts, negatives, self.normalize)]
        judge: Guide | None = None
        if guide is not None:
            in_cosines = self.margin is not None and abs(self.margin) < 1 and not self.relative
            of_batch = similarity_of("guide", guide, sim, self, in_cosines)
            judge = Guide(of_batch, zero_or_nan(guide))
        if isinstance(guide, list):
            models.append(Model(*guide))
        ids = passed.image_ids, passed.text_ids
        relation = FurtherRelation(sim, ids, passed.related, numbers[0])
        value = self.compute(sim, self._further(sim, models, relation), judge)
        return self._with_telemetry(value, sim)

    def _check_options(self, passed: Passed, further: Further = NOTHING) -> str:
        """Raise an error for options that do not go together, or with the input; return what has
        to be the same in all processes where there is nothing further.
        """
        directions = self.directions
        among = self.image_image or self.text_text
        has_labels = passed.related is not None and passed.related.one_set
        has_targets = passed.related is not None and passed.related.targets is not None
        if self.joint and directions != "both":
            expected = "expected False, or directions='both'"
            raise ValueError(f"joint: {expected}, got directions={directions!r}")
        if not self.in_batch and directions != "image-text":
            raise ValueError(
                f"in_batch: expected True, or directions='image-text', got {directions!r}"
            )
        if not self.in_batch and (among or self.joint):
            raise ValueError("in_batch: expected True with image_image, text_text and joint")
        if not self.in_batch and further.negatives is None:
            raise ValueError("in_batch: expected True, or negatives of the images, got none")
        if self.relative and self.margin is None:
            raise ValueError("relative: expected a margin with relative=True, got None")
        if self.text_text == "unfiltered" and self.margin is None:
            raise ValueError("text_text: expected a margin with text_text='unfiltered', got None")
        if has_labels and (among or self.joint):
            raise ValueError("image_image, text_text, joint: expected False with labels")
        if has_targets and (self.joint or further.negative_ids is not None):
            expected = "expected False and None with targets, which number texts"
            raise ValueError(f"joint, negative_ids: {expected}")
        return "without negatives, guide False"

    def _check_further(self, passed: Passed, further: Further) -> None:
        """Raise an error for options and further input that do not go together."""
        among = self.image_image or self.text_text
        if among and not isinstance(passed.images, Tensor):
            expected = "expected False without embeddings of images and texts"
            raise ValueError(f"image_image, text_text: {expected}")
        negatives, _, guide = further
        # those of all images are candidates of texts, too
        are_of_texts = self.text_text and getattr(negatives, "ndim", 0) != 3
        if self.directions == "text-image" and negatives is not None and not are_of_texts:
            expected = "expected directions='both' or 'image-text', as they are of images"
            meant = "with texts as queries, pass these as images"
            raise ValueError(f"negatives: {expected}, got 'text-image'; {meant}")
        if guide is None:
            return
        if self.margin is None:
            raise ValueError(
                "guide: expected None without a margin, as the margin is for its scores"
            )
        check_kind("guide", guide, negatives is not None)
        if isinstance(guide, Tensor) and (negatives is not None or among):
            expected = "expected embeddings with negatives, image_image and text_text"
            raise ValueError(f"guide: {expected}, got scores")
        if isinstance(guide, list) and negatives is not None:
            check_negatives(self, guide[0], guide[2], _OF_GUIDE_AND_NEGATIVES)
            shape = negatives.shape if passed.scores is not None else negatives.shape[:-1]
            if guide[2].shape[:-1] != shape:
                expected = f"expected shape {(*shape, guide[0].shape[1])}, as of negatives"
                raise ValueError(f"guide[2]: {expected}, got {tuple(guide[2].shape)}")

    def _checked_negatives(self, passed: Passed, further: Further) -> tuple[str, Tensor | None]:
        """Return what the negatives of a shared batch are, in words, and their int64 ids."""
        negatives, negative_ids, _ = further
        if negatives is None:
            if negative_ids is not None:
                raise ValueError("negative_ids: expected None without negatives")
            return "without negatives", None
        are_scores = passed.scores is not None
        check_negatives(self, passed.rows, negatives, _OF_NEGATIVES, are_scores)
        numbers = as_negative_ids(negative_ids, passed.image_ids, negatives, are_scores)
        # strings or integers as image_ids, which processes compare
        words = f"negatives of {negatives.dim()} dimensions, with ids {negative_ids is not None}"
        return words, numbers

    def _further(
        self, sim: Similarity, models: Sequence[Model], relation: FurtherRelation
    ) -> list[Part]:
        """Return the parts of denominators that are outside the batch.

        ``models``: the loss's own, and the guide's, if it has embeddings.
        """
        parts: list[Part] = []
        hardness = self.hardness
        if isinstance(hardness, tuple):
            hardness = hardness[1]
        if models[0].negatives is not None and self.directions != "text-image":
            scores = [self._negatives(sim, model, relation) for model in models]
            parts.append(Part((0,), scores, hardness, for_partners=bool(self.joint)))
        for side, wanted in enumerate((self.image_image, self.text_text)):
            if wanted:
                among = [self._among(side, model, relation) for model in models]
                limited = wanted != "unfiltered"
                parts.append(Part((side,), among, limited=limited, for_partners=True))
        return parts

    def _negatives(
        self, sim: Similarity, model: Model, relation: FurtherRelation
    ) -> Anchors | OwnNegatives:
        """Return the images of a model with their negatives."""
        images, texts, negatives, normalize = model
        assert negatives is not None
        if negatives.dim() == 3:
            scores = scores_of_own(images, negatives, normalize)
        elif texts is None:  # there are scores
            scores = negatives.to(compute_dtype(negatives))
        else:
            related = relation.with_negatives(0, len(images), negatives)
            return self._compared(images, negatives, related, normalize)
        return OwnNegatives(scores, relation.exist(scores), sim.sizes[0])

    def _among(self, side: int, model: Model, relation: FurtherRelation) -> Anchors:
        """Return the images of a model (``side`` 0) with one another, or its texts with one another
        and with negatives of all images.
        """
        own = model.texts if side else model.images
        assert own is not None
        among = self._compared(own, own, relation.among(side), model.normalize)
        negatives = model.negatives
        if side == 0 or negatives is None or negatives.dim() == 3:
            return among
        related = relation.with_negatives(1, len(own), negatives)
        return Anchors.pooled(among, self._compared(own, negatives, related, model.normalize))

    def _compared(
        self, rows: Tensor, cols: Tensor, relation: Relation, normalize: bool
    ) -> Similarity:
        """Return the similarity of candidates outside the batch, which were checked before."""
        ids, related = relation
        options = {"normalize": normalize, "related": related}
        return self._between((rows, cols), ids, IMAGES_AND_TEXTS, **options)

    # -------------------------------------------------------------------------------------- formula

    def compute(
        self, sim: Similarity, further: Sequence[Part] = (), guide: Guide | None = None
    ) -> Values:
        """Return InfoNCE of the candidates in the batch and of ``further`` ones; ``guide``: what
        the margin is for, if it is not the loss's own scores.
        """
        anchors = self.anchors(sim)
        temperature = self._limited_temperature(sim)
        hardness = self.hardness
        if isinstance(hardness, tuple):
            hardness = hardness[0]
        if self.margin is None and not self.joint and not further:
            return functional.info_nce_loss(
                anchors,
                temperature,
                self.reduction,
                hardness=hardness,
                label_smoothing=self.label_smoothing,
            )
        if self.label_smoothing:
            expected = "expected 0 with joint, a margin or candidates outside the batch"
            raise ValueError(f"label_smoothing: {expected}, got {self.label_smoothing}")
        parts = [*further]
        if self.in_batch:
            sides = sim.sides(self.directions)
            scores = [anchors]
            if guide is not None:
                scores.append(self.anchors(guide.sim))
            parts.append(Part(sides, scores, hardness, for_partners=bool(self.joint)))
        limits: Sequence[Tensor] = ()
        if self.margin is not None:
            limits = self._limits(sim, guide)
        scale = 1 / temperature
        if isinstance(scale, Tensor):
            scale = scale.reshape(1)
        if self.joint:  # one value for an image
            anchors = sim.towards("image-text")
        values = self._values(sim, scale, parts, limits)
        valid: Tensor | None = None
        if not self.in_batch or anchors.valid() is not None:
            valid = self._valid(sim, parts)
        return anchors.reduce(values, self.reduction, valid)

    def _sides(self, sim: Similarity) -> tuple[int, ...]:
        """Return the sides whose anchors have values."""
        return (0,) if self.joint else sim.sides(self.directions)

    def _limits(self, sim: Similarity, guide: Guide | None) -> Sequence[Tensor]:
        """Return the scores below which the negatives of images, and of texts, count.

        A positive's score and that of a copy of it among the negatives come from different
        products, which round differently. So what lies within rounding of a limit is left out.
        """
        assert self.margin is not None
        judges = sim.both if guide is None else guide.sim.both
        with torch.no_grad():
            own = judges.mean_of_positives(identity)
        margin = self.margin * own.abs() if self.relative else self.margin
        rounding = ROUNDING * torch.finfo(own.dtype).eps
        limits = own + margin - rounding * own.abs().clamp_min(1.0)
        if guide is not None:
            limits = limits + guide.zero_or_nan
        return judges.split(limits)

    def _values(
        self,
        sim: Similarity,
        scale: float | Tensor,
        parts: Sequence[Part],
        limits: Sequence[Tensor],
    ) -> Tensor:
        """Return the (A,) means of ``-log p`` over the positives of anchors.

        A joint denominator has a pair's own exponential twice, unless it is to have it once.
        """
        own, of_partners = by_side(parts, [part.logs(scale, limits) for part in parts])
        twice = math.log(2) if self.joint is True else 0.0

        def loss_of_pairs(scores: Tensor, of_own: Tensor, of_partner: Tensor) -> Tensor:
            """Return ``-log p`` of pairs, from their scores and their anchors' sums."""
            log = log_add_exp(of_own, of_partner) - twice
            return F.softplus(log - scale * scores, threshold=40) + twice

        values: list[Tensor] = []
        for side in self._sides(sim):
            view = sim.T if side else sim
            log = total_log(own[side])
            if of_partners[side]:
                of_pairs = view.mean_of_pairs(loss_of_pairs, log, total_log(of_partners[side]))
            else:
                of_pairs = view.mean_of_positives(softplus, scale=-scale, shift=log)
            values.append(of_pairs)
        return torch.cat(values)

    def _valid(self, sim: Similarity, parts: Sequence[Part]) -> Tensor:
        """Return (A,) whether anchors have a positive, and in one of its denominators a possible
        negative.
        """
        own, of_partners = by_side(parts, [part.numbers() for part in parts])
        valid: list[Tensor] = []
        for side in self._sides(sim):
            view = sim.T if side else sim
            possible = torch.stack(own[side]).sum(0)
            if of_partners[side]:
                number = torch.stack(of_partners[side]).sum(0)
                possible = possible + view.mean_of_pairs(number_of_partner, possible, number)
            valid.append((view.counts(positive=True) > 0) & (possible > 0))
        return torch.cat(valid)


BySide = dict[int, list[Tensor]]


def by_side(parts: Sequence[Part], values: Sequence[tuple[Tensor, ...]]) -> tuple[BySide, BySide]:
    """Return the values of the parts of each side's own denominators, and of its partners'."""
    own: BySide = {0: [], 1: []}
    of_partners: BySide = {0: [], 1: []}
    for part, of_part in zip(parts, values, strict=True):
        for side, value in zip(part.sides, of_part, strict=True):
            own[side].append(value)
            if part.for_partners:
                of_partners[1 - side].append(value)
    return own, of_partners


def total_log(logs: list[Tensor]) -> Tensor:
    """Return the logarithm of the sum of what logarithms (A,) are of."""
    return logs[0] if len(logs) == 1 else torch.stack(logs).logsumexp(0)


def number_of_partner(scores: Tensor, of_own: Tensor, of_partner: Tensor) -> Tensor:
    """Return a number of the partners of pairs, as a score is."""
    return of_partner.to(scores.dtype)


class MemoryInfoNCELoss(TemperatureLoss, MemoryLoss):
    r"""InfoNCE of a batch against the keys of earlier batches (MoCo; He et al., CVPR 2020,
    https://arxiv.org/abs/1911.05722, Eq. 1), between images and texts as in ALBEF (Li et al.,
    NeurIPS 2021, https://arxiv.org/abs/2107.07651, Eq. 1 and 6).

    .. math:: \ell_i = -(1 - \alpha) \operatorname{mean}_{p \in pos(i)} \log p_{ip}
        - \alpha \sum_j q_{ij} \log p_{ij}, \qquad
        p_i = \operatorname{softmax}_j(S_{ij}/\tau)

    The candidates of image i are the text keys of the batch and the memory's texts; those with its
    id are its positives. The last term is ALBEF's momentum distillation: q is the softmax of the
    scores of the image's own *key* with the candidates, without a gradient. See
    :doc:`losses/memory`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        memory_positives: False: in the first term, entries of the memory with the id of image i
            are no candidates of it, and a positive does not compete with the others: its
            denominator has the negatives and itself, as in :class:`InfoNCELoss`.
        batch_negatives: False: the memory's entries with other ids alone are negatives, and the
            batch's keys alone positives, which do not compete (MoCo). While the memory is empty,
            the loss is then 0.
        distillation: α in [0, 1]; ALBEF has 0.4.
        directions, reduction, engine, check_finite, telemetry, gather, process_group: see
            :class:`MemoryLoss`.

    Relations:
        MoCo's and ALBEF's loss. It is :class:`InfoNCELoss` whose positives and negatives are
        keys.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> memory = itrloss.CoupledMemory(size=32, dim=16)
        >>> ids = torch.arange(8)
        >>> loss = itrloss.MemoryInfoNCELoss()
        >>> value = loss(images, texts, images, texts, memory, ids, ids)
        >>> memory.enqueue(images, texts, ids)
        >>> value.shape
        torch.Size([])
    """

    learnable: bool = option(default=False, fixed=True)

    _: KW_ONLY
    memory_positives: bool = True
    batch_negatives: bool = True
    distillation: float = option(default=0.0, at_least=0, at_most=1)

    def _value(
        self,
        sims: MemorySimilarity,
        keys: tuple[Tensor, Tensor],
        memory: CoupledMemory,
        ids: PassedIds,
    ) -> Values:
        """Return the loss, with the keys in place of the batch as a teacher."""
        if self.distillation and not self.batch_negatives:
            expected = "expected 0 with batch_negatives=False, as q is over the batch, too"
            raise ValueError(f"distillation: {expected}, got {self.distillation}")
        teacher: MemorySimilarity | None = None
        if self.distillation:
            teacher = self._similarities(keys, keys, memory, ids)
        return self.compute(sims, teacher)

    def compute(self, sims: MemorySimilarity, teacher: MemorySimilarity | None = None) -> Values:
        """Return the loss; ``teacher``: the similarities with the keys in place of the batch."""
        return functional.memory_info_nce_loss(
            sims,
            self._limited_temperature(sims.batch),
            self.reduction,
            memory_positives=self.memory_positives,
            batch_negatives=self.batch_negatives,
            distillation=self.distillation,
            teacher=teacher,
        )
