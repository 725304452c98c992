"""The base of losses with a temperature, which may be learnt."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY

import torch
from torch import Tensor, nn

from ..checks import Learnt, option
from ..checks.warnings import warn_of_scale, warn_of_temperature
from ..engine.vectors import compute_dtype, host_may_read
from ..functional import Values
from ..similarity import Similarity
from .base import SimilarityLoss


def temperature_of_log(log_scale: Tensor) -> Tensor:
    """Return the 0-dim temperature of a parameter (1,), the logarithm of its inverse."""
    # in float32 at least: exp in half precision would put it up to 0.4 % off
    return (-log_scale.to(compute_dtype(log_scale))).exp().squeeze()


def log_of_temperature(temperature: float) -> float:
    """Return the logarithm of the scale ``1/τ``."""
    return -math.log(temperature)


class TemperatureLoss(SimilarityLoss):
    """A loss with a temperature, which may be learnt.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        max_scale: the largest ``1/τ`` that is learnt: a call in training mode sets ``log_scale``
            back to it (CLIP's 100). None: there is no limit.
    """

    temperature: float | Tensor = option(
        default=0.07, above=0, learnt=Learnt("log_scale", temperature_of_log, log_of_temperature)
    )
    learnable: bool = option(default=False, fixed=True)

    _: KW_ONLY
    max_scale: float | None = option(default=None, above=0)

    def _limit_scale(self) -> None:
        """Set a learnt scale that has become too large back to the largest one; look at it before
        the first batch.
        """
        log_scale: Tensor | None = getattr(self, "log_scale", None)
        if log_scale is not None and not self._looked and host_may_read(log_scale):
            warn_of_scale(log_scale.detach())
        if self.max_scale is None:
            return
        if log_scale is None:
            expected = "expected None with a temperature that is not learnable"
            meant = f"for a scale of {self.max_scale:g}, write temperature=1/{self.max_scale:g}"
            raise ValueError(f"max_scale: {expected}, got {self.max_scale:g}; {meant}")
        if self.training:
            # In place, but no new version: a compiled model that computes with the same parameter
            # has saved it for its backward pass, which refuses other versions.
            for log_scale in self._to_write("log_scale"):
                log_scale.data.clamp_(max=math.log(self.max_scale))

    def _replicate_for_data_parallel(self) -> nn.Module:
        """Return a replica, for ``nn.DataParallel``, which limits its own copy of the scale."""
        self._limit_scale()
        return super()._replicate_for_data_parallel()  # type: ignore[no-any-return]

    def _look(self, loss: Values, sim: Similarity) -> None:
        """Warn of a batch, and of a temperature that is probably a scale."""
        super()._look(loss, sim)
        with torch.no_grad():  # later calls save no tensor for it either
            warn_of_temperature(self.temperature, sim)
