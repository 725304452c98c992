"""Two standard losses of the field: the triplet loss of VSE++ and the sigmoid loss of SigLIP."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

import torch
from torch import Tensor

from .. import functional
from ..checks import Learnt, option
from ..checks.warnings import warn
from ..engine.devices import is_recorded
from ..functional import Values
from ..similarity import Similarity
from ..torch_versions import is_compiling
from .base import PairLoss
from .temperature import LOG_SCALE, look_at_form

_MINING: tuple[functional.Mining, ...] = ("all", "hardest", "batch-hard")  # as states number them
_INTERVAL = 50  # calls between checks for a collapse


class TripletLoss(PairLoss):
    r"""Triplet ranking loss of VSE++ (Faghri et al. 2018), over both directions.

    .. math:: \sum_{(i,p)\ \mathrm{positive}} \Bigl(
              \max_{j \in neg(i)} [\alpha - S_{ip} + S_{ij}]_+
              + \max_{j \in neg(p)} [\alpha - S_{ip} + S_{jp}]_+ \Bigr)

    With a temperature τ, :math:`\log(1 + e^{x / \tau})` is in place of :math:`[x]_+`, as in
    ColPali's loss of the hardest negative (https://github.com/illuin-tech/colpali,
    ``ColbertPairwiseCELoss`` with α = 0).

    Training from scratch with the hardest negative can collapse, of which there is one warning; the
    usual remedy is to begin with all negatives, see :doc:`losses/triplet`.

    Args:
        margin: α, in units of cosine similarity.
        mining: ``"hardest"`` negative of each anchor, or ``"all"`` (the sum over its negatives),
            for each of its positives; ``"batch-hard"``: the hardest negative, for the lowest
            positive alone (Hermans et al. 2017, https://arxiv.org/abs/1703.07737, Eq. 5), which
            differs where an anchor has several.
        temperature: None, or τ, above 0, in units of the scores; not with ``mining="all"``.
        reduction: see :class:`PairLoss`; as in VSE code bases the default is ``"sum"``.
        engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        VSE++ and VSE∞ have the default, VSE0 and SCAN's sum ``mining="all"``. With one pair and
        one negative of each anchor, both are the same.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(2, 16), torch.randn(2, 16)
        >>> every = itrloss.TripletLoss(mining="all")
        >>> torch.allclose(itrloss.TripletLoss()(images, texts), every(images, texts))
        True
    """

    _calls = 0  # in training mode
    _shared_calls = 0  # those whose batch processes shared, which check together
    _alike = 0  # consecutive checks with embeddings alike

    margin: float = option(default=0.2, at_least=0)
    mining: functional.Mining = "hardest"

    _: KW_ONLY
    temperature: float | None = option(default=None, above=0)
    reduction: functional.Reduction = "sum"

    def __post_init__(self) -> None:
        """Check that the options go together."""
        super().__post_init__()
        functional.check_mining(self.mining, self.temperature)

    @property
    def in_cosines(self) -> bool:
        """Whether the margin is one for cosines."""
        return self.margin < 1

    @property
    def active_margin(self) -> float:
        """The margin, for the figure ``active`` of :func:`itrloss.describe`."""
        return self.margin

    def get_extra_state(self) -> Tensor:
        """Return what ``state_dict`` holds, (1,) uint8: the number of ``mining`` among "all",
        "hardest" and "batch-hard". A run that is resumed after a switch would else begin with all
        again.

        It is a tensor, as files of safetensors and averages of state dicts have nothing else, and
        no buffer, as the host would wait for a GPU to read it.
        """
        number = _MINING.index(self.mining)
        return torch.tensor([number], dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Restore which negatives count from ``get_extra_state``."""
        self.mining = _MINING[int(state)]

    def compute(self, sim: Similarity) -> Values:
        """Return the triplet ranking loss of VSE++; now and then, check for a collapse."""
        anchors = self.anchors(sim)
        loss = functional.triplet_loss(
            anchors, self.margin, self.mining, self.reduction, temperature=self.temperature
        )
        may_collapse = self.mining == "hardest" and self.temperature is None
        if may_collapse and self.training and not is_compiling():
            is_due = self._counted(sim) % _INTERVAL == 0
            if is_due and self._alike < 2:
                self._check_collapse(sim)
        return loss

    def _counted(self, sim: Similarity) -> int:
        """Count a call, and return how many of its kind there were."""
        if sim.share is not None:
            self._shared_calls += 1
            return self._shared_calls
        self._calls += 1
        return self._calls

    @torch.no_grad()
    def _check_collapse(self, sim: Similarity) -> None:
        """Warn if embeddings are all alike in two checks in a row, a hundred calls. Each check
        synchronises.
        """
        if sim.device.type == "meta" or is_recorded(sim.device):
            return
        total = functional.triplet_loss(sim, self.margin, "hardest", "sum")
        per_pair = float(total / sim.total(sim.positive_counts.sum()).clamp_min(1))
        self._alike = self._alike + 1 if abs(per_pair - 2 * self.margin) < 0.01 * self.margin else 0
        if self._alike == 2:
            warn(
                f"TripletLoss: {2 * _INTERVAL} calls within 1 % of {2 * self.margin:g} per pair, "
                "which is 2 * margin: all embeddings seem to be alike. Begin with "
                'mining="all", or lower the learning rate.',
                UserWarning,
            )


class SigmoidLoss(PairLoss):
    r"""Sigmoid loss, SigLIP (Zhai et al., ICCV 2023): every pair is a classification of its own.

    .. math:: \frac12 \Bigl(\frac1N + \frac1M\Bigr)
              \sum_{i,j} \log\bigl(1 + e^{-z_{ij} (a S_{ij} + b)}\bigr)

    with ``z = 1`` for a positive pair and -1 for a negative one. No pair is left out; see
    :doc:`losses/sigmoid`.

    Args:
        scale: a, above 0.
        bias: b, of any sign.
        learnable: make them parameters of the loss, a held as ``log(a)`` (``log_scale``); pass them
            to the optimiser then.
        temperature, log_scale: ``1/a`` and ``log(a)``, in place of a. Each of the three, and b, may
            be a number or a model's parameter, see :class:`InfoNCELoss`.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`;
            with ``"none"`` one half of a pair's value counts for its image and the other for its
            text, and of one set, all of it for the item.

    Relations:
        SigLIP's loss: binary cross-entropy of every pair, where :class:`InfoNCELoss` has a
        softmax.

    Example:
        >>> import torch
        >>> import itrloss
        >>> from torch.nn.functional import logsigmoid, normalize
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> logits = 10 * normalize(images) @ normalize(texts).T - 10
        >>> sign = 2 * torch.eye(8) - 1
        >>> siglip = -logsigmoid(sign * logits).sum() / 8
        >>> torch.allclose(itrloss.SigmoidLoss()(images, texts), siglip)
        True
    """

    scale: float | Tensor = option(default=10.0, above=0, learnt=LOG_SCALE)
    bias: float | Tensor = option(default=-10.0, learnt=Learnt("bias"))
    learnable: bool = option(default=True, fixed=True)

    _: KW_ONLY
    temperature: float | Tensor | None = option(
        default=None, above=0, learnt=LOG_SCALE, form_of="scale"
    )
    log_scale: float | Tensor | None = option(default=None, learnt=LOG_SCALE, form_of="scale")
    # a pair has one value, which is of both
    directions: Literal["both"] = "both"  # type: ignore[assignment]

    @property
    def in_cosines(self) -> bool:
        """Whether the scale is one for cosines."""
        return bool(self.scale > 2)

    def _look(self, loss: Values, sim: Similarity) -> None:
        """Warn of a batch, and of a scale that was probably meant in another form."""
        super()._look(loss, sim)
        look_at_form(self, "scale", sim)

    def compute(self, sim: Similarity) -> Values:
        """Return the sigmoid loss, SigLIP."""
        scale = self.shared(self.scale)
        anchors = self.anchors(sim) if self.reduction == "none" else sim
        return functional.sigmoid_loss(anchors, scale, self.shared(self.bias), self.reduction)
