"""CODER's classification of concept embeddings by prototypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from .._arguments import check_matrix, check_size
from .base import Loss


class PrototypeClassificationLoss(Loss):
    r"""Prototype-guided classification, PGC (Wang et al., CODER, ECCV 2022, Eq. 7).

    .. math:: -\operatorname{mean}_b \log \operatorname{softmax}(P v_b)_{z_b}
              - \operatorname{mean}_b \log \operatorname{softmax}(P w_b)_{z_b}

    One linear classifier P tells from the concept embedding of an image, and from that of its text, which prototype z
    the pair belongs to: its cluster of the sums of normalised instance embeddings, see :class:`itrloss.OnlineKMeans`.
    It is at least 0; swapping images and texts, or renaming prototypes together with the rows of P, changes nothing.

    Args:
        dim: F of the concept embeddings.
        clusters: K, the number of prototypes.
        reduction: ``"mean"`` (over images plus over texts), ``"sum"`` or ``"none"`` for two tensors (B,).
        engine, check_finite: see :class:`itrloss.PairLoss`. ``"auto"`` holds no (2 B, K) logits above 256 MiB.

    Attributes:
        weight: (clusters, dim) P, a parameter: give it to the optimiser.
    """

    def __init__(self, dim: int, clusters: int, **common: Any):
        super().__init__(**common)
        for name, value in (("dim", dim), ("clusters", clusters)):
            check_size(name, value)
        self.weight = nn.Parameter(torch.empty(clusters, dim).uniform_(-1, 1) / dim**0.5)

    def forward(
        self, image_concepts: Tensor, text_concepts: Tensor, prototype_ids: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`itrloss.functional.prototype_classification_loss`."""
        for name, x in (("image_concepts", image_concepts), ("text_concepts", text_concepts)):
            check_matrix(name, x, f"(B, {self.weight.shape[1]})", self.check_finite)
        weight = self.weight.to(torch.promote_types(image_concepts.dtype, torch.float32))
        return functional.prototype_classification_loss(
            image_concepts, text_concepts, weight, prototype_ids, self.reduction, self.engine
        )

    @torch.no_grad()
    def reset(self, reseeded: Tensor, centroids: Tensor) -> None:
        """Forget the clusters that another point took over: their old rows would mislabel what is in them now.

        Such a row of P becomes the new centroid, as long as the other rows were at the start, and its gradient, if
        there is one yet, 0. What an optimiser remembers of it (Adam's moments) decays in its own time. The parameter is
        written to: not between a forward pass and its backward pass, which PyTorch refuses then.

        Args:
            reseeded: (clusters,) bool, :attr:`itrloss.OnlineKMeans.reseeded`.
            centroids: (clusters, dim) of unit length.
        """
        clusters, dim = self.weight.shape
        for name, x in (("reseeded", reseeded), ("centroids", centroids)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if reseeded.shape != (clusters,) or reseeded.dtype != torch.bool:
            got = f"{tuple(reseeded.shape)} {reseeded.dtype}"
            raise ValueError(f"reseeded: expected a boolean tensor of shape ({clusters},), got {got}")
        if centroids.shape != self.weight.shape:
            raise ValueError(f"centroids: expected shape {(clusters, dim)}, got {tuple(centroids.shape)}")
        fresh = centroids.to(self.weight.dtype) / 3**0.5  # the expected length of a row of uniform numbers
        if self.weight.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = reseeded.nonzero().squeeze(1)
            if len(rows):
                self.weight[rows] = fresh[rows]
                if self.weight.grad is not None:
                    self.weight.grad[rows] = 0
            return
        # A list of rows would have to be waited for, and its length is not known to a compiler.
        self.weight.copy_(torch.where(reseeded[:, None], fresh, self.weight))
        if self.weight.grad is not None:
            self.weight.grad.masked_fill_(reseeded[:, None], 0)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        clusters, dim = self.weight.shape
        return f"dim={dim}, clusters={clusters}, reduction={self.reduction!r}"
