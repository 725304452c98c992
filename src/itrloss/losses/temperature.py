"""The base of losses with a temperature, which may be learnt, or be a model's own."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import torch
from torch import Tensor

from ..checks import Form, Learnt, option
from ..checks.warnings import warn_of_form
from ..engine.vectors import host_may_read
from ..functional import Values
from ..similarity import Similarity
from .base import SimilarityLoss


def temperature_of_log(log_scale: Tensor) -> Tensor:
    """Return the temperature of the logarithm of its scale."""
    return (-log_scale).exp()


def log_of_scale(scale: float | Tensor) -> float | Tensor:
    """Return the logarithm of a scale."""
    return scale.log() if isinstance(scale, Tensor) else math.log(scale)


def log_of_temperature(temperature: float | Tensor) -> float | Tensor:
    """Return the logarithm of the scale ``1/τ``."""
    return -log_of_scale(temperature)


def inverse(x: Any) -> Any:
    """Return the scale of a temperature, or the other way round."""
    return 1 / x


RECIPROCAL = Form(inverse, inverse)
#: The options `temperature` and `scale`, each of which the other is a form of.
TEMPERATURE = Learnt(
    "log_scale", {"scale": RECIPROCAL, "log_scale": Form(temperature_of_log, log_of_temperature)}
)
SCALE = Learnt("log_scale", {"temperature": RECIPROCAL, "log_scale": Form(torch.exp, log_of_scale)})


class TemperatureLoss(SimilarityLoss):
    """A loss with a temperature, which may be learnt.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter of the loss, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        scale, log_scale: ``1/τ`` and ``log(1/τ)``, in place of τ. Each of the three may be a number
            or a model's parameter of one value, which the loss then shares in this form.
        max_scale: the largest ``1/τ`` that is learnt: a call in training mode sets the parameter
            back to it (CLIP's 100). None: there is no limit.
    """

    temperature: float | Tensor = option(default=0.07, above=0, learnt=TEMPERATURE)

    _: KW_ONLY
    learnable: bool = option(default=False, fixed=True)
    scale: float | Tensor | None = option(default=None, above=0, form_of="temperature")
    log_scale: float | Tensor | None = option(default=None, form_of="temperature")
    max_scale: float | None = option(default=None, above=0)

    def _limit_scale(self, largest: float) -> None:
        """Set a learnt scale that has become too large back to the largest one."""
        held = self._held.get("temperature")
        if held is None:
            expected = "expected None with a temperature that is not learnable"
            meant = f"for a scale of {largest:g}, write temperature=1/{largest:g}"
            raise ValueError(f"max_scale: {expected}, got {largest:g}; {meant}")
        if not self.training:
            return
        if not self._looked:  # at what was passed
            look_at_form(self, "temperature")
        limit = TEMPERATURE.stored(held, 1 / largest)
        bounds = {"min": limit} if held == "temperature" else {"max": limit}
        # In place, but no new version: a compiled model that computes with the same parameter has
        # saved it for its backward pass, which refuses other versions.
        for parameter in self._to_write(held):
            parameter.data.clamp_(**bounds)

    def _limited_temperature(self, sim: Similarity) -> float | Tensor:
        """Return τ for the scores of a batch, a parameter after it was limited."""
        if self.max_scale is not None:
            self._limit_scale(self.max_scale)
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            # its reciprocal in half types is inaccurate
            return self.shared(temperature).to(sim.dtype).squeeze()
        return temperature

    def _replicate_for_data_parallel(self) -> Any:
        """Return a replica, for ``nn.DataParallel``, which limits its own copy of the scale."""
        if self.max_scale is not None:
            self._limit_scale(self.max_scale)
        return super()._replicate_for_data_parallel()

    def _look(self, loss: Values, sim: Similarity) -> None:
        """Warn of a batch, and of a temperature that was probably meant in another form."""
        super()._look(loss, sim)
        look_at_form(self, "temperature", sim)


@torch.no_grad()  # a checkpoint would find more saved tensors than in the second pass
def look_at_form(loss: SimilarityLoss, option: str, sim: Similarity | None = None) -> None:
    """Warn of a number, or a parameter that the host may read, that is probably another form, or
    none for cosines, if scores are known to be these; those of another model may be of any size.
    """
    cosines = sim is not None and sim.embeddings is not None and sim.normalizes
    held = loss._held.get(option)
    if held is None or host_may_read(getattr(loss, held)):
        warn_of_form(*loss._passed_form(option), cosines)
