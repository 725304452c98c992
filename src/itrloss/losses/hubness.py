"""USER's hubness-aware losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import functional
from .._arguments import check_number
from ..similarity import Similarity
from .base import PairLoss


class HubnessAwareLoss(PairLoss):
    r"""Hubness-aware loss, HAL (Liu et al. 2020), in the form of USER Eq. 17.

    .. math::
        \frac1B \sum_i \Bigl[ \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ij} - \varepsilon)}\bigr)
        + \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ji} - \varepsilon)}\bigr) - \log(1 + S_{ii}) \Bigr]

    With several positives: mean over rows of the row term plus mean over columns of the column term minus the mean over
    positive pairs of ``log(1 + S)``. Positives are left out of the sums altogether; public codes set them to zero
    before ``exp``, which leaves ``exp(-scale * margin)`` in the sum.

    Args:
        scale: γ.
        margin: ε, in units of cosine similarity.
        reduction, engine, check_finite: see :class:`PairLoss`.
    """

    def __init__(self, scale: float = 90.0, margin: float = 0.5, **common: Any):
        super().__init__(**common)
        check_number("scale", scale, positive=True)
        check_number("margin", margin)
        self.scale, self.margin = scale, margin

    def compute(self, sim: Similarity) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`itrloss.functional.hubness_aware_loss`."""
        return functional.hubness_aware_loss(sim, self.scale, self.margin, self.reduction)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, margin={self.margin}, reduction={self.reduction!r}"
