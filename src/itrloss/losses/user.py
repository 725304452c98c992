"""USER's hubness-aware losses."""

from __future__ import annotations

from dataclasses import KW_ONLY

from .. import functional
from ..checks import option
from ..functional import Values
from ..memory import MemorySimilarity
from ..similarity import Similarity
from .base import MemoryLoss, PairLoss


class HubnessAwareLoss(PairLoss):
    r"""Hubness-aware loss, HAL (Liu et al. 2020), in the form of USER Eq. 17.

    .. math::
        \frac1B \sum_i \Bigl[
        \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ij} - \varepsilon)}\bigr)
        + \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ji} - \varepsilon)}\bigr)
        - \log(1 + S_{ii}) \Bigr]

    For several positives, and for how it differs from public codes, see :doc:`losses/hal`.

    Args:
        scale: γ.
        margin: ε, in units of cosine similarity.
        positive: see :class:`DiversityContrastiveLoss`; HAL and USER published ``"relu"``.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        It is DCL without diversity, at a higher scale and with another weight of the positives.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> dcl = itrloss.DiversityContrastiveLoss(diversity=None, positive_weight=0.5)
        >>> hal = itrloss.HubnessAwareLoss(scale=10, margin=0.3)
        >>> torch.allclose(hal(images, texts), dcl(images, texts))
        True
    """

    scale: float = option(default=90.0, above=0)
    margin: float = 0.5
    positive: functional.PositiveForm = "clamp"

    @property
    def in_cosines(self) -> bool:
        """Whether the scale is one for cosines."""
        return self.scale > 2

    def compute(self, sim: Similarity) -> Values:
        """Return HAL (USER Eq. 17)."""
        return functional.hubness_aware_loss(
            self.anchors(sim), self.scale, self.margin, self.reduction, positive=self.positive
        )


class UnifiedTrainingObjective(MemoryLoss):
    r"""Unified training objective, UTO (USER Eq. 18-21): HAL in the batch, and the batch against a
    memory.

    .. math::
        \lambda\, \mathrm{HAL} + \operatorname{mean}_i Q(v_i) + \operatorname{mean}_i Q(w_i), \qquad
        Q(x_i) = \tfrac1\gamma \log\bigl(1 + \sum_{q} e^{\gamma (S_{iq} - \varepsilon)}\bigr)
                 - \operatorname{mean}_{p \in pos(i)} \log(1 + \cos(x_i, k_p))

    for images v against the memory's texts and for texts w against its images, with the entries q
    and the momentum keys k of :class:`MemoryDiversityContrastiveLoss`; see :doc:`losses/memory`.

    Args:
        scale, margin, positive: see :class:`HubnessAwareLoss`.
        batch_weight: λ, weight of HAL.
        image_memory_weight, text_memory_weight: weights of the texts against the memory's images
            (the paper's DVQ), and of the images against its texts (DTQ).
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`MemoryLoss`.

    Relations:
        With an empty memory it is :class:`HubnessAwareLoss`.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> memory = itrloss.CoupledMemory(size=32, dim=16)
        >>> ids = torch.arange(8)
        >>> uto = itrloss.UnifiedTrainingObjective()(images, texts, images, texts, memory, ids, ids)
        >>> torch.allclose(uto, itrloss.HubnessAwareLoss()(images, texts))
        True
    """

    scale: float = option(default=90.0, above=0)
    margin: float = 0.5
    batch_weight: float = 1.0
    positive: functional.PositiveForm = "clamp"

    _: KW_ONLY
    image_memory_weight: float = 1.0
    text_memory_weight: float = 1.0

    def compute(self, sims: MemorySimilarity) -> Values:
        """Return UTO (USER Eq. 18-21)."""
        return functional.unified_training_objective(
            sims,
            batch_weight=self.batch_weight,
            image_memory_weight=self.image_memory_weight,
            text_memory_weight=self.text_memory_weight,
            scale=self.scale,
            margin=self.margin,
            positive=self.positive,
            reduction=self.reduction,
        )
