"""The base of losses with a temperature, which may be learnt."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import Fixed, NumberOr, as_number
from ..engine.vectors import compute_dtype, host_may_read
from ..similarity import Similarity
from .base import SimilarityLoss
from .suspicion import warn_of_scale, warn_of_temperature


class TemperatureLoss(SimilarityLoss):
    """A loss with a temperature, which may be learnt.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        max_scale: the largest ``1/τ`` that is learnt: a call in training mode sets ``log_scale``
            back to it (CLIP's 100). None: there is no limit.
    """

    learnt = ("log_scale",)
    learnable = Fixed[bool]("log_scale")
    max_scale = NumberOr(None, above=0)

    def __init__(
        self,
        temperature: float = 0.07,
        learnable: bool = False,
        *,
        max_scale: float | None = None,
        **common: Any,
    ):
        super().__init__(**common)
        self.learnable = learnable
        # (1,): FSDP and the like do not shard 0-dim parameters.
        self.log_scale = nn.Parameter(torch.zeros(1)) if learnable else None
        self.temperature = temperature
        self.max_scale = max_scale

    @property
    def in_cosines(self) -> bool:
        """Whether the temperature is one for cosines."""
        return bool(self.temperature < 0.5)

    @property
    def temperature(self) -> float | Tensor:
        """τ: a number, or a 0-dim tensor that follows ``log_scale`` (1,). May be set later."""
        if self.log_scale is None:
            return self._temperature
        # in float32 at least: exp in half precision would put it up to 0.4 % off
        return (-self.log_scale.to(compute_dtype(self.log_scale))).exp().squeeze()

    @temperature.setter
    def temperature(self, value: float) -> None:
        """Set τ, above 0; if it is learnable, in place."""
        self._temperature = as_number("temperature", value, positive=True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give a learnable τ the value that was set last, as is needed after ``to_empty``."""
        if self.log_scale is not None:
            self.log_scale.fill_(-math.log(self._temperature))

    @torch.no_grad()
    def _limit_scale(self) -> None:
        """Set a learnt scale that has become too large back to the largest one; look at it before
        the first batch.
        """
        log_scale = self.log_scale
        if log_scale is not None and not self._looked and host_may_read(log_scale):
            warn_of_scale(log_scale)
        if self.max_scale is None:
            return
        if self.log_scale is None:
            expected = "expected None with a temperature that is not learnable"
            meant = f"for a scale of {self.max_scale:g}, write temperature=1/{self.max_scale:g}"
            raise ValueError(f"max_scale: {expected}, got {self.max_scale:g}; {meant}")
        if self.training:
            # In place, but no new version: a compiled model that computes with the same parameter
            # has saved it for its backward pass, which refuses other versions.
            self.log_scale.data.clamp_(max=math.log(self.max_scale))

    def _look(self, loss: Any, sim: Similarity) -> None:
        """Warn of a batch, and of a temperature that is probably a scale."""
        super()._look(loss, sim)
        if self._looked:
            with torch.no_grad():  # later calls save no tensor for it either
                warn_of_temperature(self.temperature, sim)
