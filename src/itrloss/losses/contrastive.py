"""The field's standard losses: triplet, InfoNCE and SigLIP."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from .._arguments import check_number
from .._reduction import AnchorCounts
from ..similarity import Similarity
from .base import PairLoss

_PLATEAU = 100  # calls


class _Plateau:
    """How long a triplet loss has been what it is where all embeddings are alike."""

    def __init__(self) -> None:
        self.flat: Tensor | int = 0  # number of calls in a row on the plateau
        self.calls, self.warned = 0, False

    def lasts(self, total: Tensor, pairs: Tensor | int, margin: float) -> bool:
        """Count the calls on the plateau; True, and ``warned`` from then on, once there are too many."""
        self.calls += 1
        if total.device.type == "cpu":
            flat = self.flat = (int(self.flat) + 1) * _alike(float(total) / float(pairs), margin)
        else:  # which would have to be waited for: read the number now and then only
            before = self.flat.to(total.device) if isinstance(self.flat, Tensor) else self.flat
            flat = self.flat = (before + 1) * _alike(total / pairs, margin)
        self.warned = self.calls % _PLATEAU == 0 and int(flat) >= _PLATEAU
        return self.warned


def _alike(value: Any, margin: float) -> Any:
    """Whether a pair's loss is that of embeddings that are all alike."""
    return abs(value - 2 * margin) < 0.01 * margin


class TripletLoss(PairLoss):
    r"""Triplet ranking loss of VSE++ (Faghri et al. 2018), over both directions.

    .. math:: \sum_{(i,p)\ \mathrm{positive}} \Bigl( \max_{j \in neg(i)} [\alpha - S_{ip} + S_{ij}]_+
              + \max_{j \in neg(p)} [\alpha - S_{ip} + S_{jp}]_+ \Bigr)

    Training from scratch with the hardest negative can collapse to a plateau where the loss is ``2 * margin`` per pair,
    as all embeddings are alike. After a hundred calls on it in training mode there is a warning, once. The usual cure
    is to begin with all negatives: ``TripletLoss(mining="all")``, and after the first epoch ``criterion.mining =
    "hardest"``.

    Args:
        margin: α, in units of cosine similarity.
        mining: ``"hardest"`` negative of each anchor, or ``"all"`` (the sum over its negatives). May be set later.
        reduction: as in VSE code bases the default is ``"sum"`` over all positive pairs and both directions.
        engine, check_finite, telemetry: see :class:`PairLoss`.
    """

    def __init__(
        self,
        margin: float = 0.2,
        mining: functional.Mining = "hardest",
        *,
        reduction: functional.Reduction = "sum",
        **common: Any,
    ):
        super().__init__(reduction=reduction, **common)
        check_number("margin", margin)
        self.margin = margin
        self.mining = mining
        self._plateau = _Plateau()

    @property
    def active_margin(self) -> float:  # type: ignore[override]
        """See :func:`itrloss.describe`."""
        return self.margin

    @property
    def mining(self) -> functional.Mining:
        """Which negatives count: ``"hardest"`` or ``"all"``."""
        return self._mining

    @mining.setter
    def mining(self, value: functional.Mining) -> None:
        if value not in ("hardest", "all"):
            raise ValueError(f"mining: expected 'hardest' or 'all', got {value!r}")
        self._mining: functional.Mining = value

    def compute(self, sim: Similarity) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`itrloss.functional.triplet_loss`."""
        values, counts = functional.triplet_values(sim, self.margin, self.mining), AnchorCounts(sim)
        loss, plateau = counts.reduce(values, self.reduction), self._plateau
        if self.mining == "hardest" and self.training and not plateau.warned and not torch.compiler.is_compiling():
            total = loss if self.reduction == "sum" else counts.reduce(values.detach(), "sum")
            assert isinstance(total, Tensor)
            if plateau.lasts(total.detach(), sim.shape[0] if counts.one_to_one else counts.pairs[0], self.margin):
                warnings.warn(
                    f"TripletLoss: {_PLATEAU} calls within 1 % of {2 * self.margin:g} per pair, which is 2 * margin:"
                    ' all embeddings seem to be alike. Begin with mining="all", or lower the learning rate.',
                    stacklevel=5,  # past forward and what a module's call goes through
                )
        return loss

    def extra_repr(self) -> str:
        return f"margin={self.margin}, mining={self.mining!r}, reduction={self.reduction!r}"


class InfoNCELoss(PairLoss):
    r"""InfoNCE in both directions, any number of positives per anchor.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau}}

    With ``reduction="mean"`` the two directions are added; CLIP's loss is half of it.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        reduction, engine, check_finite, telemetry, gather: see :class:`PairLoss`.
    """

    def __init__(self, temperature: float = 0.07, learnable: bool = False, **common: Any):
        super().__init__(**common)
        check_number("temperature", temperature, positive=True)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature))) if learnable else None
        self._temperature = temperature

    @property
    def temperature(self) -> float | Tensor:
        """τ: a number, or a 0-dim tensor that follows ``log_scale``."""
        return self._temperature if self.log_scale is None else (-self.log_scale).exp()

    def compute(self, sim: Similarity) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`itrloss.functional.info_nce_loss`."""
        return functional.info_nce_loss(sim, self.temperature, self.reduction)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        learnable = self.log_scale is not None
        with torch.no_grad():
            temperature = float(self.temperature)
        return f"temperature={temperature:.4g}, learnable={learnable}, reduction={self.reduction!r}"


class SigmoidLoss(PairLoss):
    r"""Sigmoid loss, SigLIP (Zhai et al., ICCV 2023): every pair is a classification of its own.

    .. math:: \frac12 \Bigl(\frac1N + \frac1M\Bigr) \sum_{i,j} \log\bigl(1 + e^{-z_{ij} (a S_{ij} + b)}\bigr)

    with ``z = 1`` for a positive pair and -1 for a negative one. On one-to-one batches it is SigLIP's: the sum over all
    pairs, divided by the number of images. No pair is left out: an image without a text of its own has negatives, too.

    Args:
        scale: a, above 0.
        bias: b. The start at -10 makes up for the negatives' number.
        learnable: make them parameters, a held as ``log(a)`` (``log_scale``); they belong in the optimizer then.
        reduction, engine, check_finite, telemetry, gather: see :class:`PairLoss`; with ``"none"`` one half of a pair's
            value is its image's and the other its text's.
    """

    def __init__(self, scale: float = 10.0, bias: float = -10.0, learnable: bool = True, **common: Any):
        super().__init__(**common)
        check_number("scale", scale, positive=True)
        check_number("bias", bias)
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale))) if learnable else None
        self.bias = nn.Parameter(torch.tensor(float(bias))) if learnable else float(bias)
        self._scale = scale

    @property
    def scale(self) -> float | Tensor:
        """a: a number, or a 0-dim tensor that follows ``log_scale``."""
        return self._scale if self.log_scale is None else self.log_scale.exp()

    def compute(self, sim: Similarity) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`itrloss.functional.sigmoid_loss`."""
        return functional.sigmoid_loss(sim, self.scale, self.bias, self.reduction)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        learnable = self.log_scale is not None
        with torch.no_grad():
            scale, bias = float(self.scale), float(self.bias)
        return f"scale={scale:.4g}, bias={bias:.4g}, learnable={learnable}, reduction={self.reduction!r}"
