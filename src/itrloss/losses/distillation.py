"""Losses against a teacher's scores: cross-entropy of its softmax, squared errors of margins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import functional
from ..checks import IdsLike, option
from ..functional import Values
from ..similarity import Similarity
from ..terms import identity, pair_term
from .base import PairLoss, Passed
from .other_model import as_tensors, check_kind, similarity_of
from .temperature import TemperatureLoss


class TaughtLoss(PairLoss):
    """A loss of the similarities of two models; the base of :class:`DistillationLoss` and
    :class:`MarginMSELoss`.
    """

    @property
    def teacher_in_cosines(self) -> bool:
        """Whether the teacher's scores are to be of the size of cosines."""
        return False

    def forward(  # type: ignore[override]  # noqa: PLR0913 (input, by keyword)
        self,
        images: Tensor | None = None,
        texts: Tensor | None = None,
        teacher: Tensor | Sequence[Tensor] | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scores: Tensor | None = None,
        image_groups: IdsLike | None = None,
        text_groups: IdsLike | None = None,
        targets: IdsLike | None = None,
        **words: Any,
    ) -> Values:
        """Return the loss of (N, D) images and (M, D) texts, or of a score matrix.

        Args:
            images, texts, scores, words: see :meth:`PairLoss.forward`. Scores may be those of each
                image with its own candidates, such as its text and its hard negatives, with
                ``targets=[0] * N`` or ``directions="image-text"``.
            teacher: (N, M) scores of another model, in a job with the texts of all processes; or
                its embeddings ``(images, texts)``, which have cosines as scores, also with
                ``normalize=False``.
            image_ids, text_ids: see there. They go with groups; in :class:`DistillationLoss`, whose
                candidates are all texts whatever matches, they are for ``telemetry`` alone.
            image_groups, text_groups: see there; candidates are of the same group, or match.
            targets: see there.
        """
        passed = Passed(images, texts, image_ids, text_ids, scores, image_groups, text_groups)
        passed = self._parsed(passed, words, targets=targets)
        model = as_tensors(teacher)

        def check() -> str:
            """Check the teacher; return nothing that has to be the same in all processes."""
            check_kind("teacher", model)
            return ""

        sim = self._similarity(passed, check)
        taught = similarity_of("teacher", model, sim, self, self.teacher_in_cosines)
        return self._with_telemetry(self.compute(sim, taught), sim)

    def compute(  # type: ignore[override]
        self, sim: Similarity, teacher: Similarity
    ) -> Values:
        """Return the loss of the similarities of two models."""
        raise NotImplementedError


class DistillationLoss(TemperatureLoss, TaughtLoss):
    r"""Cross-entropy against the softmax of a teacher's scores, over both directions.

    .. math:: \ell_i = -\sum_j q_{ij} \log p_{ij}, \qquad
        p_i = \operatorname{softmax}_j(S_{ij} / \tau), \qquad
        q_i = \operatorname{softmax}_j(T_{ij} / \tau_t)

    over all candidates, whatever matches. It is the divergence KL(q | p) plus the entropy of q, a
    constant (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). The teacher gets no gradient.
    See :doc:`losses/infonce`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        teacher_temperature: :math:`\tau_t`, in units of the teacher's scores. None: τ, without a
            gradient if that is learnt.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        With the matches as the teacher's distribution it is :class:`SupConLoss`, and with one match
        of each anchor :class:`InfoNCELoss`.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> teacher = torch.eye(8)  # a teacher that knows the pairs
        >>> loss = itrloss.DistillationLoss(teacher_temperature=0.01)
        >>> taught = loss(images, texts, teacher)
        >>> torch.allclose(taught, itrloss.InfoNCELoss()(images, texts), atol=1e-4)
        True
    """

    teacher_temperature: float | None = option(default=0.07, above=0)

    @property
    def teacher_in_cosines(self) -> bool:
        """Whether the teacher's scores are to be of the size of cosines."""
        return self.teacher_temperature is not None and self.teacher_temperature < 0.5

    def compute(  # type: ignore[override]
        self, sim: Similarity, teacher: Similarity
    ) -> Values:
        """Return the loss of the similarities of two models."""
        temperature = self._limited_temperature(sim)
        of_teacher: float | Tensor | None = self.teacher_temperature
        if of_teacher is None:
            of_teacher = temperature.detach() if isinstance(temperature, Tensor) else temperature
        return functional.distillation_loss(
            self.anchors(sim), self.anchors(teacher), temperature, of_teacher, self.reduction
        )


@pair_term
def squared_gap(scores: Tensor, teacher: Tensor, gap: Tensor) -> Tensor:
    """Return ``(S - T - g)^2``."""
    return (scores - teacher - gap).square()


class MarginMSELoss(TaughtLoss):
    r"""Margin-MSE (Hofstätter et al. 2020, https://arxiv.org/abs/2010.02666): the squared error of
    the margins between positives and negatives, next to those of a teacher.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} \operatorname{mean}_{j \in neg(i)}
        \bigl( (S_{ip} - S_{ij}) - (T_{ip} - T_{ij}) \bigr)^2

    The teacher gets no gradient. Its scores are those that are to be reached: with a
    cross-encoder's logits, take ``normalize=False``. See :doc:`losses/infonce`.

    Args:
        directions, normalize, reduction, engine, check_finite, telemetry, gather, process_group:
            see :class:`PairLoss`.

    Relations:
        A regression of the teacher's margins; :class:`DistillationLoss` takes its distribution
        instead.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> teacher = itrloss.Similarity(images, texts).scores()
        >>> value = itrloss.MarginMSELoss()(images, texts, teacher)
        >>> bool(value < 1e-6)  # the teacher's margins are its own
        True
    """

    def compute(  # type: ignore[override]
        self, sim: Similarity, teacher: Similarity
    ) -> Values:
        """Return Margin-MSE of the similarities of two models."""
        anchors = self.anchors(sim)
        anchors.refuse_weights("MarginMSELoss")
        taught = self.anchors(teacher).detach()
        gap = anchors.mean_of_positives(identity) - taught.mean_of_positives(identity)
        negatives = anchors.sum(squared_gap, gap, guide=taught)
        positives = anchors.sum(squared_gap, gap, over="positives", guide=taught)
        values = negatives / anchors.negative_counts.clamp_min(1)
        values = values + positives / anchors.positive_counts.clamp_min(1)
        return anchors.reduce(values, self.reduction)
