"""The field's standard losses: triplet, InfoNCE and SigLIP."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..anchors import Anchors
from ..checks import (
    Choice,
    Fixed,
    Learnable,
    Names,
    Number,
    check_embeddings,
    check_number,
)
from ..similarity import Similarity
from .base import PairLoss

_OF_NEGATIVES = Names("images", "negatives")
_INTERVAL = 50  # calls between checks for a collapse


class TripletLoss(PairLoss):
    r"""Triplet ranking loss of VSE++ (Faghri et al. 2018), over both directions.

    .. math:: \sum_{(i,p)\ \mathrm{positive}} \Bigl(
              \max_{j \in neg(i)} [\alpha - S_{ip} + S_{ij}]_+
              + \max_{j \in neg(p)} [\alpha - S_{ip} + S_{jp}]_+ \Bigr)

    Training from scratch with the hardest negative can collapse, of which there is one warning; the
    usual remedy is to begin with all negatives, see :doc:`methods/triplet`.

    Args:
        margin: α, in units of cosine similarity.
        mining: ``"hardest"`` negative of each anchor, or ``"all"`` (the sum over its negatives).
        reduction: see :class:`PairLoss`; as in VSE code bases the default is ``"sum"``.
        engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    shown = ("margin", "mining", "reduction")
    margin = Number()
    mining: Choice[functional.Mining] = Choice("hardest", "all")  #: May be set later.

    def __init__(
        self,
        margin: float = 0.2,
        mining: functional.Mining = "hardest",
        *,
        reduction: functional.Reduction = "sum",
        **common: Any,
    ):
        super().__init__(reduction=reduction, **common)
        self.margin = margin
        self.mining = mining
        self._calls = 0  # in training mode
        self._alike = 0  # consecutive checks with embeddings alike

    @property
    def active_margin(self) -> float:
        """The margin, for the figure ``active`` of :func:`itrloss.describe`."""
        return self.margin

    def get_extra_state(self) -> dict[str, Any]:
        """Return what ``state_dict`` holds: which negatives count, as a resumed run would else
        begin again.
        """
        return {"mining": self.mining}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.mining = state["mining"]

    def compute(self, sim: Similarity) -> Any:
        loss = functional.triplet_loss(sim, self.margin, self.mining, self.reduction)
        if self.mining == "hardest" and self.training and not torch.compiler.is_compiling():
            self._calls += 1
            if self._calls % _INTERVAL == 0 and self._alike < 2:
                self._check_collapse(sim)
        return loss

    @torch.no_grad()
    def _check_collapse(self, sim: Similarity) -> None:
        """Warn if embeddings are all alike in two checks in a row, a hundred calls. Each check
        synchronises.
        """
        if sim.device.type == "meta" or (
            sim.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            return
        total = functional.triplet_loss(sim, self.margin, "hardest", "sum")
        per_pair = float(total / sim.total(sim.positive_counts.sum()).clamp_min(1))
        self._alike = self._alike + 1 if abs(per_pair - 2 * self.margin) < 0.01 * self.margin else 0
        if self._alike == 2:
            warnings.warn(
                f"TripletLoss: {2 * _INTERVAL} calls within 1 % of {2 * self.margin:g} per pair, "
                "which is 2 * margin: all embeddings seem to be alike. Begin with "
                'mining="all", or lower the learning rate.',
                stacklevel=8,  # the caller of the module: past forward and nn.Module.__call__
            )


class InfoNCELoss(PairLoss):
    r"""InfoNCE in both directions, with any number of positives per anchor.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau}}

    The two directions are added, where CLIP averages them; see :doc:`methods/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        hardness: α, at least 0; a negative counts ``exp(α S_ij)`` times, a weight without a
            gradient (LLaVE with 9, https://arxiv.org/abs/2503.04812; EmbeddingGemma with 5,
            https://arxiv.org/abs/2509.20354).
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    shown = ("temperature", "learnable", "hardness", "reduction")
    learnable = Fixed[bool]()
    hardness = Number(at_least=0)

    def __init__(
        self,
        temperature: float = 0.07,
        learnable: bool = False,
        *,
        hardness: float = 0.0,
        **common: Any,
    ):
        super().__init__(**common)
        self.learnable = learnable
        # (1,): FSDP and the like do not shard 0-dim parameters.
        self.log_scale = nn.Parameter(torch.zeros(1)) if learnable else None
        self.temperature = temperature
        self.hardness = hardness

    @property
    def temperature(self) -> float | Tensor:
        """τ: a number, or a 0-dim tensor that follows ``log_scale`` (1,). May be set later."""
        if self.log_scale is None:
            return self._temperature
        return (-self.log_scale).exp().squeeze()

    @temperature.setter
    def temperature(self, value: float) -> None:
        check_number("temperature", value, positive=True)
        if self.log_scale is None:
            self._temperature = value
            return
        with torch.no_grad():
            self.log_scale.fill_(-math.log(value))

    def forward(
        self,
        images: Tensor | Similarity | None = None,
        texts: Tensor | None = None,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
        *,
        scores: Tensor | None = None,
        negatives: Tensor | None = None,
    ) -> Any:
        """Return the loss as :meth:`PairLoss.forward` does, with further negatives of the images.

        ``negatives``: (K, D) embeddings of texts that match no image, as in NegCLIP
        (https://arxiv.org/abs/2210.01936), or (N, K, D), those of each image alone. They are no
        anchors, and in a job of several processes, (K, D).
        """

        def check() -> str:
            if negatives is None:
                return "without negatives"
            if not isinstance(images, Tensor):
                expected = "expected images beside them, not scores or a Similarity"
                raise ValueError(f"negatives: {expected}")
            self._check_negatives(images, negatives)
            return "with negatives"

        sim = self._similarity(images, texts, image_ids, text_ids, scores, check=check)
        if negatives is None:
            return self._value(sim)
        assert isinstance(images, Tensor)
        if negatives.dim() == 3:
            return self._value(sim, self._own_negatives(images, negatives))
        return self._value(sim, self._unmatched(images, negatives))

    def _check_negatives(self, images: Tensor, negatives: Tensor) -> None:
        """Raise an error unless negatives are (K, D) or, in one process, (N, K, D)."""
        if not isinstance(negatives, Tensor) or negatives.dim() != 3:
            check_embeddings(images, negatives, False, _OF_NEGATIVES, empty=self.sharded)
            return
        expected = f"(K, D) or ({len(images)}, K, {images.shape[1]})"
        if self.sharded:
            expected = "(K, D)"
        n, k, dim = negatives.shape
        if self.sharded or k == 0 or (n, dim) != images.shape:
            raise ValueError(f"negatives: expected shape {expected}, got {tuple(negatives.shape)}")

    def _unmatched(self, images: Tensor, negatives: Tensor) -> Similarity:
        """Return the similarities of images (N, D) with texts (K, D) that match none."""
        image_ids = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        ids = torch.ones(len(negatives), dtype=torch.int64, device=images.device)
        return self._similarity(images, negatives, image_ids, ids, names=_OF_NEGATIVES)

    def _own_negatives(self, images: Tensor, negatives: Tensor) -> Similarity:
        """Return the similarities of images (N, D) with texts (N, K, D) of their own."""
        n, k, _ = negatives.shape
        every = self._unmatched(images, negatives.flatten(0, 1))
        own = torch.arange(n * k, device=images.device)
        scores = every.pair_scores(own // k, own).view(n, k)
        image_ids, _ = every.ids
        assert image_ids is not None
        return Similarity.from_scores(scores, image_ids, image_ids.new_ones(k), engine=self.engine)

    def compute(self, sim: Similarity, unmatched: Anchors | None = None) -> Any:
        anchors = None
        if unmatched is not None:
            anchors = Anchors.together(Anchors.pooled(sim, unmatched), sim.T)
        return functional.info_nce_loss(
            sim if anchors is None else anchors,
            self.shared(self.temperature),
            self.reduction,
            hardness=self.hardness,
            positives=None if anchors is None else sim.both,
        )


class SigmoidLoss(PairLoss):
    r"""Sigmoid loss, SigLIP (Zhai et al., ICCV 2023): every pair is a classification of its own.

    .. math:: \frac12 \Bigl(\frac1N + \frac1M\Bigr)
              \sum_{i,j} \log\bigl(1 + e^{-z_{ij} (a S_{ij} + b)}\bigr)

    with ``z = 1`` for a positive pair and -1 for a negative one. No pair is left out; see
    :doc:`methods/sigmoid`.

    Args:
        scale: a, above 0.
        bias: b.
        learnable: make them parameters, a held as ``log(a)`` (``log_scale``); pass them to the
            optimiser then.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`;
            with ``"none"`` one half of a pair's value counts for its image and the other for its
            text.
    """

    shown = ("scale", "bias", "learnable", "reduction")
    learnable = Fixed[bool]()
    bias = Learnable()

    def __init__(
        self, scale: float = 10.0, bias: float = -10.0, learnable: bool = True, **common: Any
    ):
        super().__init__(**common)
        self.learnable = learnable
        self.log_scale = None
        if learnable:
            self.log_scale = nn.Parameter(torch.zeros(1))
            self.bias = nn.Parameter(torch.zeros(1))
        self.scale = scale
        self.bias = bias

    @property
    def scale(self) -> float | Tensor:
        """a: a number, or a 0-dim tensor that follows ``log_scale`` (1,). May be set later."""
        if self.log_scale is None:
            return self._scale
        return self.log_scale.exp().squeeze()

    @scale.setter
    def scale(self, value: float) -> None:
        check_number("scale", value, positive=True)
        if self.log_scale is None:
            self._scale = value
            return
        with torch.no_grad():
            self.log_scale.fill_(math.log(value))

    def compute(self, sim: Similarity) -> Any:
        scale = self.shared(self.scale)
        return functional.sigmoid_loss(sim, scale, self.shared(self.bias), self.reduction)
