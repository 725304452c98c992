"""The regularisers of PVSE and DivE on sets of embeddings."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..checks import one_of
from ..engine.vectors import compute_dtype
from .arguments import required, setting, zero_of

Parts = dict[str, Tensor]


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return ``exp(-|a - b| / 2)`` of all rows a and b; these code bases do not square the
    distance.
    """
    distances = torch.cdist(x, y)
    if x is y:  # cdist has the root of a rounding error there, 8e-4 in float32
        distances = distances - distances.diagonal().diag()
    return torch.exp(-0.5 * distances)


class Regularizers:
    """The weighted regularisers of PVSE and DivE on the sets of images and of texts.

    Args:
        opt: the code base's settings; None for no regularisers.
        code_base: ``"pvse"``, which has no uniformity, and none at all for one embedding a set; or
            ``"dive"``.
        reduction: of the orthogonal loss and of the kernels, ``"mean"`` or ``"sum"``.
    """

    def __init__(self, opt: object, code_base: str, reduction: Literal["mean", "sum"] = "mean"):
        one_of("reduction", reduction, "mean", "sum")
        self.reduction: Literal["mean", "sum"] = reduction
        kinds = ("unif", "div", "mmd")
        if code_base == "pvse":
            kinds = ("div", "mmd") if setting(opt, "num_embeds", 1) > 1 else ()
        weights = {name: setting(opt, f"{name}_weight", 0.0) for name in kinds}
        self.weights = {name: weight for name, weight in weights.items() if weight > 0}
        self.unif_residual = bool(setting(opt, "unif_residual", False))

    def total(
        self, parts: Parts, img: Tensor, txt: Tensor, img_r: Tensor | None, txt_r: Tensor | None
    ) -> tuple[Tensor, Parts]:
        """Return the sum of parts and weighted regularisers, and each of these unweighted and
        detached.
        """
        zero = zero_of(img)
        sides = (("img_r", img, img_r), ("txt_r", txt, txt_r))
        several = [side for side in sides if side[1].dim() == 3 and side[1].shape[1] > 1]
        if "unif" in self.weights:
            parts["unif"] = sum((self._crowding(*side) for side in several), zero)
        if "div" in self.weights:
            parts["div"] = sum((self._correlation(*side) for side in several), zero)
        if "mmd" in self.weights:
            parts["mmd"] = self._discrepancy(img, txt)
        loss = torch.stack([self.weights.get(name, 1.0) * x for name, x in parts.items()]).sum()
        return loss, {f"{name}_loss": x.detach() for name, x in parts.items()}

    def _crowding(self, name: str, members: Tensor, residuals: Tensor | None) -> Tensor:
        """Return the mean of ``exp(-2 |a - b|²)`` over the pairs of members of a set, or of the
        residuals, which are the argument ``name``.
        """
        x = members.to(compute_dtype(members))
        if self.unif_residual:
            x = F.normalize(required(name, residuals).to(x.dtype), dim=-1)
        first, second = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
        distances = (x[:, first] - x[:, second]).square().sum(-1)
        return (-2 * distances).exp().mean()

    def _correlation(self, name: str, _: Tensor, residuals: Tensor | None) -> Tensor:
        """Return the orthogonal loss without slack, of the residuals."""
        sets = required(name, residuals)
        return functional.dynamic_orthogonal_loss(sets, None, 0.0, "frobenius", self.reduction)

    def _discrepancy(self, img: Tensor, txt: Tensor) -> Tensor:
        """Return the maximum mean discrepancy of all images' members and all texts'."""
        x = img.flatten(0, -2).to(compute_dtype(img))
        y = txt.flatten(0, -2).to(compute_dtype(txt))
        reduce = torch.mean if self.reduction == "mean" else torch.sum
        within = reduce(_kernel(x, x)) + reduce(_kernel(y, y))
        return within - 2 * reduce(_kernel(x, y))
