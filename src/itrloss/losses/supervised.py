"""Losses of metric learning: SupCon, decoupled, MIL-NCE, SDM, multi-similarity, circle loss."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..anchors import Anchors
from ..checks import option
from ..functional import Values
from ..similarity import Similarity
from ..terms import identity, pair_term
from .base import LEAST_LOG, PairLoss, log_add_exp
from .infonce import number_of_partner
from .temperature import TemperatureLoss


def _mil_nce(anchors: Anchors, scale: float | Tensor) -> Tensor:
    """Return (A,) ``-log`` of the positives' share of the softmax over all, exact also where that
    is nearly 1.
    """
    # finite without candidates: of -inf minus -inf, value and gradient would be nan, also for
    # anchors that do not count
    of_negatives = anchors.logsumexp(scale).clamp_min(LEAST_LOG)
    of_positives = anchors.logsumexp(scale, over="positives").clamp_min(LEAST_LOG)
    return F.softplus(of_negatives - of_positives, threshold=40)


class SupConLoss(TemperatureLoss, PairLoss):
    r"""Supervised contrastive loss (Khosla et al. 2020, https://arxiv.org/abs/2004.11362), over
    both directions.

    .. math::
        \ell^{out}_i = \operatorname{mean}_{p \in pos(i)}
        -\log \frac{e^{S_{ip}/\tau}}{\sum_j e^{S_{ij}/\tau}}, \qquad
        \ell^{in}_i = -\log \operatorname{mean}_{p \in pos(i)}
        \frac{e^{S_{ip}/\tau}}{\sum_j e^{S_{ij}/\tau}}

    Eq. 2 and 3 there. The sums over j run over all candidates, an anchor's other positives among
    them; in :class:`InfoNCELoss` those do not compete. See :doc:`losses/supervised`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        inside: take the mean inside of the logarithm: :math:`\ell^{in}`, which has the gradient of
            :class:`MILNCELoss`.
        label_smoothing: ε, see :class:`InfoNCELoss`; not with ``inside``.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        With one positive of each anchor it is :class:`InfoNCELoss` at its temperature.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> infonce = itrloss.InfoNCELoss()(images, texts)
        >>> torch.allclose(itrloss.SupConLoss(0.07)(images, texts), infonce)
        True
    """

    temperature = 0.1
    inside: bool = False

    _: KW_ONLY
    label_smoothing: float = option(default=0.0, at_least=0, at_most=1)

    def compute(self, sim: Similarity) -> Values:
        """Return SupCon, with the mean over positives outside or inside the logarithm."""
        anchors = self.anchors(sim)
        scale = 1 / self._limited_temperature(sim)
        smoothing = self.label_smoothing
        if self.inside:
            if smoothing:
                raise ValueError(f"label_smoothing: expected 0 with inside=True, got {smoothing}")
            values = _mil_nce(anchors, scale) + anchors.positive_counts.to(anchors.dtype).log()
        else:
            log = anchors.logsumexp(scale, over="all")
            pull = anchors.mean_of_positives(identity)
            if smoothing:
                mean = functional.mean_of_candidates(anchors)
                pull = (1 - smoothing) * pull + smoothing * mean
            values = log - scale * pull
        return anchors.reduce(values, self.reduction)


class DecoupledContrastiveLoss(TemperatureLoss, PairLoss):
    r"""Decoupled contrastive loss (Yeh et al., ECCV 2022, https://arxiv.org/abs/2110.06848, Eq. 6),
    over both directions.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\frac{S_{ip}}\tau
        + \log \sum_{j \in neg(i)} e^{S_{ij}/\tau}

    :class:`InfoNCELoss` without the positive in the denominator: its pull does not fade as the
    positive wins, so that small batches learn more. Values may be negative. Other libraries call it
    DCL, which here is :class:`DiversityContrastiveLoss`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        :class:`InfoNCELoss` without the positive in the denominator, so it is always below.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> dcl = itrloss.DecoupledContrastiveLoss(0.07)(images, texts)
        >>> bool(dcl < itrloss.InfoNCELoss()(images, texts))
        True
    """

    temperature = 0.1

    def compute(self, sim: Similarity) -> Values:
        """Return the decoupled contrastive loss."""
        anchors = self.anchors(sim)
        scale = 1 / self._limited_temperature(sim)
        # finite without candidates, whose anchors do not count
        log = anchors.logsumexp(scale).clamp_min(LEAST_LOG)
        values = log - scale * anchors.mean_of_positives(identity)
        return anchors.reduce(values, self.reduction)


class MILNCELoss(TemperatureLoss, PairLoss):
    r"""MIL-NCE (Miech et al. 2020, https://arxiv.org/abs/1912.06430): of many positives, one has to
    be right.

    .. math:: \ell_i = -\log \frac{\sum_{p \in pos(i)} e^{S_{ip}/\tau}}{\sum_j e^{S_{ij}/\tau}}

    The sum over j runs over all candidates. It is ``SupConLoss(inside=True)`` minus the logarithm
    of the number of positives. Its authors have no temperature and no cosines, and one denominator
    for both directions: ``MILNCELoss(1.0, normalize=False, joint="once")``; see
    :doc:`losses/supervised`.

    Args:
        joint: add the negatives of the positive texts of an image to its denominator, by the
            weights of their matches; there is one value for an image. ``"once"``: positives are in
            it once (Eq. 1 there; UniVL, https://arxiv.org/abs/2002.06353); True: twice (the code of
            MIL-NCE).
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        With one positive of each anchor it is :class:`InfoNCELoss`.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> infonce = itrloss.InfoNCELoss()(images, texts)
        >>> torch.allclose(itrloss.MILNCELoss()(images, texts), infonce)
        True
    """

    _: KW_ONLY
    joint: bool | Literal["once"] = False

    def compute(self, sim: Similarity) -> Values:
        """Return MIL-NCE."""
        scale = 1 / self._limited_temperature(sim)
        if self.joint:
            return self._joint(sim, scale)
        anchors = self.anchors(sim)
        return anchors.reduce(_mil_nce(anchors, scale), self.reduction)

    def _joint(self, sim: Similarity, scale: float | Tensor) -> Values:
        """Return the values of images, whose denominators have those of their texts, too."""
        if self.directions != "both":
            expected = "expected False, or directions='both', whose denominators it adds up"
            raise ValueError(f"joint: {expected}, got directions={self.directions!r}")
        images = sim.towards("image-text")
        own, of_texts = sim.both.split(sim.both.logsumexp(scale).clamp_min(LEAST_LOG))
        top = sim.largest_of_pairs(of_texts)
        # e^(L_p - top_i), L the logarithm of a partner's sum
        sums = sim.positive_weights * sim.mean_of_pairs(
            lambda _, own, partner: (partner - own).exp(), top, of_texts
        )
        of_partners = sums.clamp_min(torch.finfo(sums.dtype).tiny).log() + top
        of_positives = images.logsumexp(scale, over="positives").clamp_min(LEAST_LOG)
        twice = math.log(2) if self.joint is True else 0.0
        negatives = log_add_exp(own, of_partners) - twice
        values = F.softplus(negatives - of_positives, threshold=40) + twice
        numbers = sim.both.split(sim.both.negative_counts)
        possible = numbers[0] + sim.mean_of_pairs(number_of_partner, *numbers)
        return images.reduce(values, self.reduction, (sim.positive_counts > 0) & (possible > 0))


@pair_term
def _expected_log_label(
    log_share: Tensor, weight: Tensor, weights: Tensor, epsilon: Tensor
) -> Tensor:
    """Return ``p log q``: the share p and the label q, a match's part of its anchor's weights."""
    share = log_share.clamp_max(1.0).exp()  # pairs that do not count may overflow
    return share * (weight / weights + epsilon).log()


class SDMLoss(TemperatureLoss, PairLoss):
    r"""Similarity distribution matching, SDM (IRRA; Jiang & Ye, CVPR 2023,
    https://arxiv.org/abs/2303.12501), over both directions.

    .. math::
        \ell_i = \sum_j p_{ij} \log \frac{p_{ij}}{q_{ij} + \varepsilon}, \qquad
        p_i = \operatorname{softmax}_j(S_{ij} / \tau), \qquad
        q_{ij} = \frac{w_{ij}}{\sum_{p \in pos(i)} w_{ip}}

    Eq. 2 to 4 there: the divergence of the softmax over all candidates from the labels, which are
    uniform over an anchor's positives, or in proportion to the weights w in ``matches``. An anchor
    without a positive does not count; one without a negative does. See :doc:`losses/supervised`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        epsilon: ε, above 0.
        directions, normalize, reduction, engine, check_finite, telemetry, gather, process_group:
            see :class:`PairLoss`.

    Relations:
        The ids stand where :class:`DistillationLoss` has a teacher; the divergence is the
        reverse.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> people = torch.arange(8) // 2
        >>> itrloss.SDMLoss()(images, texts, people, people).shape
        torch.Size([])
    """

    temperature = 0.02
    epsilon: float = option(default=1e-8, above=0)

    def compute(self, sim: Similarity) -> Values:
        """Return the divergence, summed over negatives, whose label is 0, and over positives."""
        anchors = self.anchors(sim)
        scale = 1 / self._limited_temperature(sim)
        p = anchors.softmax_parts(scale)
        log_labels = anchors.sum_of_positives(
            _expected_log_label,
            anchors.positive_weights,
            self.epsilon,
            scale=scale,
            shift=-p.logsumexp,
            weights="parameter",
        )
        of_negatives = p.log_negatives - p.negatives * math.log(self.epsilon)
        values = of_negatives + p.log_positives - log_labels
        return anchors.reduce(values, self.reduction, anchors.positive_counts > 0)


class MultiSimilarityLoss(PairLoss):
    r"""Multi-similarity loss (Wang et al. 2019, https://arxiv.org/abs/1904.06627), over both
    directions.

    .. math::
        \ell_i = \tfrac1\alpha
        \log\Bigl(1 + \sum_{p \in pos(i)} e^{-\alpha (S_{ip} - \lambda)}\Bigr)
        + \tfrac1\beta \log\Bigl(1 + \sum_{j \in neg(i)} e^{\beta (S_{ij} - \lambda)}\Bigr)

    Args:
        alpha: α, the scale of the positives.
        beta: β, the scale of the negatives.
        base: λ, the score that positives are to exceed, and negatives not, in units of cosine
            similarity.
        epsilon: ε of the paper's pair mining: of the negatives only those with
            :math:`S_{ij} > \min_p S_{ip} - \varepsilon` count, of the positives those with
            :math:`S_{ip} < \max_j S_{ij} + \varepsilon`. None: all pairs count.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        Its negatives are a soft maximum as in :class:`HubnessAwareLoss`, of scores beyond
        ``base``.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> classes = torch.arange(8) // 4
        >>> itrloss.MultiSimilarityLoss()(images, texts, classes, classes).shape
        torch.Size([])
    """

    alpha: float = option(default=2.0, above=0)
    beta: float = option(default=50.0, above=0)
    base: float = 0.5
    epsilon: float | None = None

    @property
    def in_cosines(self) -> bool:
        """Whether the base is a cosine."""
        return self.base < 1

    def compute(self, sim: Similarity) -> Values:
        """Return the multi-similarity loss."""
        anchors = self.anchors(sim)
        a = self.alpha
        b = self.beta
        below = None
        above = None
        if self.epsilon is not None:
            with torch.no_grad():
                below = anchors.hardest_negatives().values + self.epsilon
                above = functional.lowest_positives(anchors) - self.epsilon
        push = anchors.logsumexp(b, above=above) - b * self.base
        pull = anchors.logsumexp(-a, over="positives", below=below) + a * self.base
        values = F.softplus(pull, threshold=40) / a + F.softplus(push, threshold=40) / b
        return anchors.reduce(values, self.reduction)


def _exponent(x: Tensor, scale: float | Tensor, margin: float | Tensor) -> Tensor:
    """Return ``γ [x + m]_+ (x - m)``, where the gradient takes ``[x + m]_+`` for a constant."""
    return scale * (x.detach() + margin).relu() * (x - margin)


@pair_term
def circle_of_negatives(scores: Tensor, scale: Tensor, margin: Tensor, top: Tensor) -> Tensor:
    """Return ``exp(γ α_n (S - m) - top)`` with ``α_n = [S + m]_+``."""
    # pairs that are left out may overflow
    return (_exponent(scores, scale, margin) - top).clamp_max(80.0).exp()


@pair_term
def circle_of_positives(scores: Tensor, scale: Tensor, margin: Tensor, top: Tensor) -> Tensor:
    """Return ``exp(-γ α_p (S - 1 + m) - top)`` with ``α_p = [1 + m - S]_+``: a negative's, of ``1 -
    S``.
    """
    return circle_of_negatives(1 - scores, scale, margin, top)


class CircleLoss(PairLoss):
    r"""Circle loss (Sun et al. 2020, https://arxiv.org/abs/2002.10857), over both directions.

    .. math::
        \ell_i = \log\Bigl(1 + \sum_{j \in neg(i)} e^{\gamma \alpha_{ij} (S_{ij} - m)}
        \sum_{p \in pos(i)} e^{-\gamma \alpha_{ip} (S_{ip} - 1 + m)}\Bigr), \qquad
        \alpha_{ij} = [S_{ij} + m]_+, \quad \alpha_{ip} = [1 + m - S_{ip}]_+

    The weights α are constants for the gradient: the further a score is from its optimum, the
    larger its gradient. It takes another pass over the scores than the other losses, for each
    anchor's hardest negative. In float32 it is accurate for :math:`\gamma m^2 \le 140`.

    Args:
        margin: m, in units of cosine similarity.
        scale: γ.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        A soft triplet loss whose pairs are weighted by what they lack.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> classes = torch.arange(8) // 4
        >>> itrloss.CircleLoss()(images, texts, classes, classes).shape
        torch.Size([])
    """

    margin: float = 0.4
    scale: float = option(default=80.0, above=0)

    @property
    def in_cosines(self) -> bool:
        """Whether the margin is one for cosines."""
        return self.margin < 1

    def compute(self, sim: Similarity) -> Values:
        """Return the circle loss."""
        anchors = self.anchors(sim)
        options = self.scale, self.margin
        # Exponents of negatives are 0 up to -m, then fall and rise again: the hardest has the
        # largest exponent, or an easy one has a larger one, 0 at most. So with a shift of -60
        # at least no sum overflows. A bound on scores is for anchors without pairs. Positives have
        # the exponents of negatives with 1 - S.
        with torch.no_grad():
            lowest = functional.lowest_positives(anchors)
            hardest = anchors.hardest_negatives().values, 1 - lowest
        tops = [_exponent(x.clamp_min(-self.margin), *options).clamp_min(-60.0) for x in hardest]
        push = anchors.sum(circle_of_negatives, *options, tops[0])
        pull = anchors.sum_of_positives(circle_of_positives, *options, tops[1])
        logs = [x.clamp_min(torch.finfo(x.dtype).tiny).log() for x in (push, pull)]
        values = F.softplus(logs[0] + tops[0] + logs[1] + tops[1], threshold=40)
        return anchors.reduce(values, self.reduction)
