"""The base of losses with a temperature, which may be learnt, or be a model's own."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import torch
from torch import Tensor

from ..checks import Learnt, option
from ..checks.warnings import warn_of_form
from ..engine.vectors import host_may_read
from ..functional import Values
from ..similarity import Similarity
from .base import SimilarityLoss

# The forms of a temperature: itself, its scale ``1/τ`` and the logarithm of that.
LOG_SCALE = Learnt(
    "log_scale",
    {
        ("temperature", "scale"): torch.reciprocal,
        ("scale", "temperature"): torch.reciprocal,
        ("scale", "log_scale"): torch.log,
        ("log_scale", "scale"): torch.exp,
        ("temperature", "log_scale"): lambda temperature: -temperature.log(),
        ("log_scale", "temperature"): lambda log_scale: (-log_scale).exp(),
    },
)


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

    temperature: float | Tensor = option(default=0.07, above=0, learnt=LOG_SCALE)

    _: KW_ONLY
    learnable: bool = option(default=False, fixed=True)
    scale: float | Tensor | None = option(
        default=None, above=0, learnt=LOG_SCALE, form_of="temperature"
    )
    log_scale: float | Tensor | None = option(default=None, learnt=LOG_SCALE, form_of="temperature")
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
        # In place, but no new version: a compiled model that computes with the same parameter has
        # saved it for its backward pass, which refuses other versions.
        for parameter in self._to_write(held):
            limit = LOG_SCALE.converted(torch.full_like(parameter, largest), "scale", held)
            bounds = {"min": limit} if held == "temperature" else {"max": limit}
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
    form, number = loss._passed[option]
    if held is not None:
        parameter = getattr(loss, held)
        if not host_may_read(parameter):
            return
        trained = parameter.item()
        if not math.isclose(trained, loss._number_in(held, option), rel_tol=0.01, abs_tol=1e-6):
            form = held
            number = trained
    warn_of_form(form, number, cosines)
