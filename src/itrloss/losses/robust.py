"""Losses for data in which some pairs do not match: wrong captions, noisy web data."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import option
from ..engine.vectors import host_may_read
from ..functional import Values
from ..similarity import Similarity
from ..terms import pair_term
from .base import PairLoss, log_add_exp
from .temperature import TemperatureLoss

_RANGE = 70.0  # exp(70), times any number of candidates, does not overflow in float32
_LEAST = 1e-6  # what 1 - p is at least: in float32 a smaller one is rounding


@pair_term
def power_gap(
    scores: Tensor, negatives: Tensor, scale: Tensor, q: Tensor, log_weight: Tensor
) -> Tensor:
    """Return ``((w (e^(a S) + e^L))^q - e^(q a S)) / q``, L the log-sum-exp of the negatives."""
    z = scale * scores
    whole = q * (log_add_exp(z, negatives) + log_weight)
    # Precomputed scores, and pairs that the sum leaves out, may be of any size.
    return (whole.clamp_max(80.0).exp() - (q * z).clamp_max(80.0).exp()) / q


@pair_term
def negative_log_complement(scores: Tensor, scale: Tensor, top: Tensor, rest: Tensor) -> Tensor:
    """Return ``-log(1 - p)``, ``p = e^(a S - t - r)``, where t + r is the log-sum-exp of all
    candidates.
    """
    z = (torch.addcmul(-top, scale, scores) - rest).clamp_max(0.0)
    return -(-z.expm1()).clamp_min(_LEAST).log()


# As a term of its own it has no kernel. Kernels round the weights of candidates to the type of
# half-precision embeddings, and the gradient of these sums nearly cancels with that of
# `negative_log_complement`: with kernels, the loss's gradient was off by 15 % of its norm in
# bfloat16 (pytest tests/engine -k complement).
@pair_term(slope=torch.exp_)
def share(z: Tensor) -> Tensor:
    """Return ``e^z``, a candidate's share of the sum over all candidates."""
    return z.exp_()


@pair_term
def one_less_power(scores: Tensor, negatives: Tensor, scale: Tensor, q: Tensor) -> Tensor:
    """Return ``(1 - p^q) / q``, p the probability of a positive among the negatives, whose
    log-sum-exp is L.
    """
    return -torch.expm1(q * F.logsigmoid(scale * scores - negatives)) / q


class RINCELoss(TemperatureLoss, PairLoss):
    r"""Robust InfoNCE (`Chuang et al., CVPR 2022 <https://arxiv.org/abs/2201.04309>`__), over both
    directions.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} \frac1q \Bigl[
        \Bigl( \lambda \bigl( e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau} \bigr) \Bigr)^q
        - e^{q S_{ip}/\tau} \Bigr]

    For q → 0 it is InfoNCE, :class:`InfoNCELoss`, plus log λ. For q = 1 a pair counts in proportion
    to :math:`e^{S/\tau}`, so that a wrong positive, which scores low, hardly does. Values are
    negative for a good model, and grow as :math:`e^{q/\tau}`; see :doc:`losses/robust`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`. τ is at least
            q / 70, as float32 would overflow; a learnt one needs ``max_scale=70 / q``, and on an
            accelerator nothing else notices. Scores that are no cosines are at most 80 τ / q: pairs
            above have no gradient.
        q: above 0 and at most 1. The authors' codes have 0.1 and 0.5.
        lam: λ, above 0 and at most 1, the weight of the denominator.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        With q → 0 it is :class:`InfoNCELoss` and log λ for each direction.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> rince = itrloss.RINCELoss(q=1e-3, lam=1.0)(images, texts)
        >>> difference = rince - itrloss.InfoNCELoss()(images, texts)
        >>> bool(difference.abs() < 0.1)
        True
    """

    q: float = option(default=0.5, above=0, at_most=1)
    lam: float = option(default=0.01, above=0, at_most=1)

    def __post_init__(self) -> None:
        """Check that the options go together."""
        super().__post_init__()
        self._check_range()

    def _check_range(self) -> None:
        """Raise an error if the loss overflows; at each call, as options are set one by one."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            if not host_may_read(temperature):
                return
            temperature = temperature.item()
        # that of a logarithm in float32 is off by some units in the last place
        if self.q / temperature > _RANGE * (1 + 1e-4):
            expected = f"expected at least q / {_RANGE:g} = {self.q / _RANGE:.2g}"
            raise ValueError(
                f"temperature: {expected}, as float32 would overflow, got {temperature:.3g}"
            )

    def compute(self, sim: Similarity) -> Values:
        """Return robust InfoNCE, RINCE."""
        anchors = self.anchors(sim)
        scale = 1 / self._limited_temperature(sim)
        self._check_range()  # after a learnt temperature was limited
        negatives = anchors.logsumexp(scale)
        values = anchors.mean_of_positives(power_gap, negatives, scale, self.q, math.log(self.lam))
        return anchors.reduce(values, self.reduction)


class GeneralizedCrossEntropyLoss(TemperatureLoss, PairLoss):
    r"""Generalised cross-entropy, GCE (`Zhang & Sabuncu, NeurIPS 2018
    <https://arxiv.org/abs/1805.07836>`__, Eq. 6), of the softmax over candidates, over both
    directions.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} \frac{1 - p_{ip}^q}{q}, \qquad
        p_{ip} = \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau}}

    For q → 0 it is :class:`InfoNCELoss`, and for q = 1 the mean absolute error. It pulls in
    proportion to :math:`p^q (1 - p)`, so that a wrong positive, which scores low, hardly counts.
    See :doc:`losses/robust`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        q: above 0 and at most 1; the authors have 0.7.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        With q → 0 it is :class:`InfoNCELoss`, with q = 1 the mean absolute error.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> gce = itrloss.GeneralizedCrossEntropyLoss(q=1e-3)(images, texts)
        >>> difference = gce - itrloss.InfoNCELoss()(images, texts)
        >>> bool(difference.abs() < 0.1)
        True
    """

    q: float = option(default=0.7, above=0, at_most=1)

    def compute(self, sim: Similarity) -> Values:
        """Return the generalised cross-entropy, GCE."""
        anchors = self.anchors(sim)
        scale = 1 / self._limited_temperature(sim)
        values = anchors.mean_of_positives(one_less_power, anchors.logsumexp(scale), scale, self.q)
        return anchors.reduce(values, self.reduction)


class ComplementaryContrastiveLoss(TemperatureLoss, PairLoss):
    r"""Complementary contrastive loss, RCL (`Hu et al., TPAMI 2023
    <https://doi.org/10.1109/TPAMI.2023.3247939>`__).

    .. math:: \ell_i = - \sum_{j \in neg(i)} \log (1 - p_{ij}), \qquad
        p_{ij} = \frac{e^{S_{ij}/\tau}}{\sum_{k} e^{S_{ik}/\tau}}

    It learns from negatives alone: that a text does *not* match an image is seldom wrong, even
    where many pairs are. The sum over k has all candidates, so that a positive rises as its
    negatives fall. ``1 - p`` is taken as at least 1e-6. See :doc:`losses/robust`.

    Args:
        temperature, learnable, scale, log_scale, max_scale: see :class:`InfoNCELoss`.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        With one negative and one positive of each anchor it is :class:`InfoNCELoss`; with one
        negative and several positives, :class:`MILNCELoss`.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(2, 16), torch.randn(2, 16)
        >>> rcl = itrloss.ComplementaryContrastiveLoss(0.07)(images, texts)
        >>> torch.allclose(rcl, itrloss.InfoNCELoss()(images, texts), atol=1e-4)
        True
    """

    temperature = 0.05

    def compute(self, sim: Similarity) -> Values:
        """Return the complementary contrastive loss, RCL."""
        anchors = self.anchors(sim)
        scale = 1 / self._limited_temperature(sim)
        with torch.no_grad():
            top = anchors.logsumexp(scale, over="all").nan_to_num(neginf=0.0)
        # 1 - p is small where p is near 1, and the log-sum-exp has only seven digits. The sum of
        # all p, which should be 1, tells by how much it is wrong: a twentieth of the error, for one
        # more pass over the scores.
        whole = anchors.sum(share, scale=scale, shift=-top)
        whole = whole + anchors.sum_of_positives(share, scale=scale, shift=-top)
        values = anchors.sum(negative_log_complement, scale, top, whole.clamp_min(0.5).log())
        return anchors.reduce(values, self.reduction)
