"""The field's standard losses: triplet, InfoNCE and SigLIP."""

import math
import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..anchors import Anchors
from ..checks import Names, check_number
from ..similarity import Similarity
from .base import PairLoss

_INTERVAL = 50  # calls between checks for a collapse


@dataclass(eq=False, repr=False)
class TripletLoss(PairLoss):
    r"""Triplet ranking loss of VSE++ (Faghri et al. 2018), over both directions.

    .. math:: \sum_{(i,p)\ \mathrm{positive}} \Bigl( \max_{j \in neg(i)} [\alpha - S_{ip} + S_{ij}]_+
              + \max_{j \in neg(p)} [\alpha - S_{ip} + S_{jp}]_+ \Bigr)

    Training from scratch with the hardest negative can collapse, of which there is one warning; the
    usual remedy is to begin with all negatives, see :doc:`methods/triplet`.

    Args:
        margin: α, in units of cosine similarity.
        mining: ``"hardest"`` negative of each anchor, or ``"all"`` (the sum over its negatives).
        reduction: see :class:`PairLoss`; as in VSE code bases the default is ``"sum"``.
        engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    margin: float = 0.2
    mining: functional.Mining = "hardest"  #: May be set later.
    _: KW_ONLY
    reduction: functional.Reduction = "sum"
    _calls = 0  # in training mode
    _alike = 0  # consecutive checks with embeddings alike

    @property
    def active_margin(self) -> float:  # type: ignore[override]
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
        loss = functional.triplet_loss(sim, **self._options(TripletLoss))
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
                f"TripletLoss: {2 * _INTERVAL} calls within 1 % of {2 * self.margin:g} per pair, which is 2 * margin:"
                ' all embeddings seem to be alike. Begin with mining="all", or lower the learning rate.',
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

    def __init__(
        self,
        temperature: float = 0.07,
        learnable: bool = False,
        *,
        hardness: float = 0.0,
        **common: Any,
    ):
        super().__init__(**common)
        self.shown = ("temperature", "learnable", "hardness", "reduction")
        check_number("temperature", temperature, positive=True)
        check_number("hardness", hardness)
        if hardness < 0:
            raise ValueError(f"hardness: expected a number of at least 0, got {hardness}")
        self.hardness = float(hardness)
        # (1,): FSDP and the like do not shard 0-dim parameters.
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)])) if learnable else None
        self._temperature, self.learnable = temperature, learnable

    @property
    def temperature(self) -> float | Tensor:
        """τ: a number, or a 0-dim tensor that follows ``log_scale`` (1,)."""
        return self._temperature if self.log_scale is None else (-self.log_scale).exp().squeeze()

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
        if negatives is not None and not isinstance(images, Tensor):
            self._fail(
                ValueError("negatives: expected images beside them, not scores or a Similarity")
            )
        also_same = "without negatives" if negatives is None else "with negatives"
        sim = self._similarity(images, texts, image_ids, text_ids, scores, also_same=also_same)
        if negatives is None:
            return self._value(sim)
        assert isinstance(images, Tensor)
        return self._value(sim, self._unmatched(images, negatives))

    def _unmatched(self, images: Tensor, negatives: Tensor) -> Similarity:
        """Return the similarities of images with texts that match none."""
        names, image_ids = (
            Names("images", "negatives"),
            torch.zeros_like(images[:, 0], dtype=torch.int64),
        )
        if not isinstance(negatives, Tensor) or negatives.dim() != 3:
            ids = image_ids.new_ones(len(negatives)) if isinstance(negatives, Tensor) else None
            return self._similarity(images, negatives, image_ids, ids, None, names)
        if negatives.shape[::2] != images.shape or not negatives.shape[1] or self._sharded:
            expected = (
                "(K, D)" if self._sharded else f"(K, D) or ({len(images)}, K, {images.shape[1]})"
            )
            self._fail(
                ValueError(f"negatives: expected shape {expected}, got {tuple(negatives.shape)}")
            )
        own = torch.arange(negatives[..., 0].numel(), device=images.device)
        every = self._similarity(
            images, negatives.flatten(0, 1), image_ids, torch.ones_like(own), None, names
        )
        scores = every.pair_scores(own // negatives.shape[1], own).view(negatives.shape[:2])
        return self._similarity(
            None, None, image_ids, image_ids.new_ones(negatives.shape[1]), scores
        )

    def compute(self, sim: Similarity, unmatched: Anchors | None = None) -> Any:
        options: dict[str, Any] = {"reduction": self.reduction, "hardness": self.hardness}
        if unmatched is None:
            return functional.info_nce_loss(sim, self.temperature, **options)
        anchors = Anchors.together(Anchors.pooled(sim, unmatched), sim.T)
        return functional.info_nce_loss(anchors, self.temperature, positives=sim.both, **options)


class SigmoidLoss(PairLoss):
    r"""Sigmoid loss, SigLIP (Zhai et al., ICCV 2023): every pair is a classification of its own.

    .. math:: \frac12 \Bigl(\frac1N + \frac1M\Bigr) \sum_{i,j} \log\bigl(1 + e^{-z_{ij} (a S_{ij} + b)}\bigr)

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

    def __init__(
        self, scale: float = 10.0, bias: float = -10.0, learnable: bool = True, **common: Any
    ):
        super().__init__(**common)
        self.shown = ("scale", "bias", "learnable", "reduction")
        check_number("scale", scale, positive=True)
        check_number("bias", bias)
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale)])) if learnable else None
        self.bias = nn.Parameter(torch.tensor([float(bias)])) if learnable else float(bias)
        self._scale, self.learnable = scale, learnable

    @property
    def scale(self) -> float | Tensor:
        """a: a number, or a 0-dim tensor that follows ``log_scale`` (1,)."""
        return self._scale if self.log_scale is None else self.log_scale.exp().squeeze()

    def compute(self, sim: Similarity) -> Any:
        return functional.sigmoid_loss(sim, self.scale, self.bias, self.reduction)
