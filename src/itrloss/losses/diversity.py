"""CODER's diversity-sensitive contrastive losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import functional
from .._arguments import check_number
from ..memory import MemorySimilarity
from ..similarity import Similarity
from .base import Loss, MemoryLoss, PairLoss


class DiversityOptions(Loss):
    """The options of DCL and M-DCL."""

    def __init__(
        self,
        temperature: float = 0.1,
        margin: float = 0.3,
        diversity: functional.Diversity = "std",
        epsilon: float = 0.1,
        detach_diversity: bool = True,
        positive_weight: functional.PositiveWeight = "paper",
        positive: functional.PositiveForm = "clamp",
        *,
        entropy_temperature: float = 1.0,
        **common: Any,
    ):
        super().__init__(**common)
        above_zero = {"temperature": temperature, "epsilon": epsilon, "entropy_temperature": entropy_temperature}
        for name, value in above_zero.items():
            check_number(name, value, positive=True)
        check_number("margin", margin)
        if diversity not in ("std", "entropy", None):
            raise ValueError(f"diversity: expected 'std', 'entropy' or None, got {diversity!r}")
        if isinstance(positive_weight, str) and positive_weight != "paper":
            raise ValueError(f"positive_weight: expected 'paper' or a number, got {positive_weight!r}")
        if positive_weight != "paper":
            check_number("positive_weight", positive_weight)
        if positive not in ("clamp", "relu"):
            raise ValueError(f"positive: expected 'clamp' or 'relu', got {positive!r}")
        self.temperature, self.margin, self.epsilon = temperature, margin, epsilon
        self.entropy_temperature = entropy_temperature
        self.diversity: functional.Diversity = diversity
        self.detach_diversity = detach_diversity
        self.positive_weight: functional.PositiveWeight = positive_weight
        self.positive: functional.PositiveForm = positive

    def options(self) -> dict[str, Any]:
        """As the functions take them."""
        names = ("temperature", "margin", "diversity", "epsilon", "detach_diversity", "positive_weight", "positive")
        return {name: getattr(self, name) for name in (*names, "entropy_temperature", "reduction")}

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


class DiversityContrastiveLoss(DiversityOptions, PairLoss):
    r"""Diversity-sensitive contrastive loss, DCL (Wang et al., CODER, ECCV 2022, Eq. 4-5).

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{j \in neg(i)} e^{(S_{ij} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + S_{ip})

    for images and for texts. The diversity ``d_i`` in (½, 1] is low where an anchor's negatives are all about equally
    similar; that sharpens its temperature and weighs its hard negatives more.

    Args:
        temperature: μ.
        margin: γ, in units of cosine similarity.
        diversity: ``"std"`` (Eq. 3), ``"entropy"`` (supplement; see the warning at
            :func:`itrloss.functional.entropy_diversity`), or None for the implicit form DCL_I with ``d = 1``.
        entropy_temperature: τ of ``diversity="entropy"``. At the paper's 1 every score is practically 1.
        epsilon: ε of the diversity scores, above 0.
        detach_diversity: treat ``d`` as a weight; False sends gradients through it.
        positive_weight: ``"paper"`` for ``w = μ`` as printed, or ``w`` itself, per direction. (HAL's balance, weight 1
            counted once for both directions, is 0.5.)
        positive: ``"clamp"`` keeps S above -1 + 1e-6 in ``log(1 + S)``; ``"relu"`` takes ``log(1 + max(S, 0))`` as the
            public HAL and USER codes do. Warning: with ``"relu"`` a positive whose score is not above 0 is not pulled.
        reduction, engine, check_finite, telemetry, gather: see :class:`PairLoss`.
    """

    def compute(self, sim: Similarity) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`itrloss.functional.diversity_contrastive_loss`."""
        return functional.diversity_contrastive_loss(sim, **self.options())


class MemoryDiversityContrastiveLoss(DiversityOptions, MemoryLoss):
    r"""Memory-aided DCL, M-DCL (CODER Eq. 6): a batch against the keys of former batches.

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{q} e^{(S_{iq} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + \cos(x_i, k_p)), \qquad
        d_i = \tfrac12 (d_i^{batch} + d_i^{memory})

    for images against the memory's texts and for texts against its images. Negatives are the entries q with another id
    than the anchor's; positives are the momentum keys k of the batch with the anchor's id, its own pair's if ids are
    unique. Both diversities are normalised by their own maximum over the batch.

    An anchor without a negative in the memory contributes 0 and does not count in a mean; so the loss is 0 while the
    memory is empty.

    Args:
        positive_from: ``"key"``, or ``"batch"`` to take the positives from the batch instead of its keys; they get a
            gradient then.
        diversity_from: ``"both"`` for the mean of the two diversities, ``"batch"`` for that of the batch alone.
        temperature, margin, diversity, epsilon, detach_diversity, positive_weight, positive, entropy_temperature: see
            :class:`DiversityContrastiveLoss`.
        reduction, engine, check_finite, telemetry, gather: see :class:`MemoryLoss`.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        margin: float = 0.3,
        diversity: functional.Diversity = "std",
        epsilon: float = 0.1,
        detach_diversity: bool = True,
        positive_weight: functional.PositiveWeight = "paper",
        positive: functional.PositiveForm = "clamp",
        *,
        entropy_temperature: float = 1.0,
        positive_from: functional.PositiveFrom = "key",
        diversity_from: functional.DiversityFrom = "both",
        **common: Any,
    ):
        shared = (temperature, margin, diversity, epsilon, detach_diversity, positive_weight, positive)
        super().__init__(*shared, entropy_temperature=entropy_temperature, **common)
        if positive_from not in ("key", "batch"):
            raise ValueError(f"positive_from: expected 'key' or 'batch', got {positive_from!r}")
        if diversity_from not in ("both", "batch"):
            raise ValueError(f"diversity_from: expected 'both' or 'batch', got {diversity_from!r}")
        self.positive_from: functional.PositiveFrom = positive_from
        self.diversity_from: functional.DiversityFrom = diversity_from

    def options(self) -> dict[str, Any]:
        """As the function takes them."""
        return {**super().options(), "positive_from": self.positive_from, "diversity_from": self.diversity_from}

    def compute(self, sims: MemorySimilarity) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`itrloss.functional.memory_diversity_contrastive_loss`."""
        return functional.memory_diversity_contrastive_loss(sims, **self.options())
