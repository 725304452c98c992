"""DVSE's losses on sets of sub-embeddings."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from .._arguments import check_embeddings, check_ids, check_number, check_size, diagonal_if_unique
from ..distributed import gather_rows
from ..engines.dispatch import choose
from ..engines.operators import inverse_norms
from ..engines.registration import full_precision
from ..similarity import DEFAULT_MEMORY_BUDGET, Similarity
from ..telemetry import describe
from .base import ObservedLoss, in_words_of_pairs


class VarianceAwareLoss(ObservedLoss):
    r"""Variance-aware weighting loss (Wei et al., DVSE 2023, Eq. 8, 11) on sets of image embeddings.

    .. math::
        \sum_k \operatorname{mean}_{(i, p)} \Bigl[ \frac1{\sigma_{ikp}^2}
            \bigl[\alpha - S^k_{ip} + \max_{j \in neg(i)} S^k_{ij}\bigr]_+ + \log \sigma_{ikp} \Bigr]
        + \text{the same from the texts}, \qquad
        \sigma_{ikp} = 1 + \operatorname{Std}_{j \ne p} S^k_{ij}

    over the positive pairs (i, p). A head that spreads its scores widely for an image is trusted less with it. With
    several captions an image, those that are not the target stay in the distribution; with one, it is that of the
    negatives. Permuting heads, images or texts changes nothing, and no value is below 0.

    Warning:
        The gradient through σ *lowers* the spread of an anchor's negatives as long as its hinge is below ½, which it
        nearly always is: the opposite of what DCL's diversity asks for. Think twice before you add the two.

    Args:
        margin: α, in units of cosine similarity.
        detach_sigma: treat σ as a weight. The log term has no effect on the model then.
        shared_sigma: the texts' direction takes a pair's σ from the image's scores, as printed; False: from the text's
            own, over all images but the pair's.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, see :func:`itrloss.functional.variance_aware_loss`.
        engine, check_finite, telemetry, gather: see :class:`itrloss.PairLoss`; the telemetry is that of each pair's
            best head, and forms the matrix. With several captions an image, an accelerator forms the matrices, or with
            ``engine="tiled"`` is waited for.
    """

    def __init__(self, margin: float = 0.2, detach_sigma: bool = False, shared_sigma: bool = True, **common: Any):
        super().__init__(**common)
        check_number("margin", margin)
        self.margin, self.detach_sigma, self.shared_sigma = margin, detach_sigma, shared_sigma

    def forward(
        self,
        image_sets: Tensor,
        texts: Tensor,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of sets of image embeddings and texts.

        Args:
            image_sets: (N, K, D) embeddings of any length, K for each image.
            texts: (M, D) embeddings.
            image_ids, text_ids: (N,) and (M,) integers, see :class:`itrloss.PairLoss`.

        Returns:
            A 0-dim float32 tensor (float64 for float64 input), or per-anchor values with ``reduction="none"``.
        """
        (image_sets, texts), image_ids, text_ids = self._gathered((image_sets, texts), image_ids, text_ids)
        heads = self._heads(image_sets, texts, image_ids, text_ids)
        value = functional.variance_aware_loss(heads, self.margin, self.detach_sigma, self.shared_sigma, self.reduction)
        self._observe(lambda: describe(_best_of(heads), self.margin))
        return value

    def _heads(self, images: Tensor, texts: Tensor, image_ids: Any, text_ids: Any) -> list[Similarity]:
        if not isinstance(images, Tensor):
            raise TypeError(f"image_sets: expected a floating-point tensor (N, K, D), got {type(images).__name__}")
        if not images.is_floating_point():
            raise TypeError(f"image_sets: expected a floating-point tensor (N, K, D), got {images.dtype}")
        if images.dim() != 3 or 0 in images.shape:
            raise ValueError(f"image_sets: expected shape (N, K, D), got {tuple(images.shape)}")
        n, k = images.shape[:2]
        flat = images.flatten(0, 1)
        try:
            check_embeddings(flat, texts, self.check_finite)
            ids = diagonal_if_unique(check_ids(image_ids, text_ids, n, texts.shape[0], images.device))
        except (TypeError, ValueError) as error:
            raise type(error)(re.sub(r"\bimages\b", "image_sets", in_words_of_pairs(str(error)))) from None
        engine = choose(self.engine, n * texts.shape[0], DEFAULT_MEMORY_BUDGET // k, images)  # all heads, one by one
        of_images, of_texts = inverse_norms(flat.detach()), inverse_norms(texts.detach())
        if engine == "dense":  # one product for all heads
            scores = Similarity._of(flat, texts, (None, None), (of_images, of_texts), engine).scores()
            return [Similarity._of_scores(head, ids) for head in scores.view(n, k, -1).unbind(1)]
        return [
            Similarity._of(head, texts, ids, (inv, of_texts), engine)
            for head, inv in zip(images.unbind(1), of_images.view(n, k).unbind(1), strict=True)
        ]

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        names = ("margin", "detach_sigma", "shared_sigma", "reduction")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _best_of(heads: list[Similarity]) -> Similarity:
    """What a model of sets retrieves by: the best head of each pair."""
    scores = heads[0].detach().scores()
    for sim in heads[1:]:
        scores = torch.maximum(scores, sim.detach().scores())
    return Similarity.from_scores(scores, *heads[0].ids)


class DynamicOrthogonalLoss(nn.Module):
    r"""Dynamic orthogonal constraint (Wei et al., DVSE 2023, Eq. 4): an image's sub-embeddings should differ.

    .. math:: \Bigl[ \frac1{K (K - 1)} \sum_{i \ne j} |m_i m_j \langle u_i, u_j \rangle| - \beta \Bigr]_+

    for the normalised residuals u of an image's K heads and a gate m that says which of them take part, see
    :class:`DynamicGate`. It is 0 for orthogonal heads, and never larger than with all heads on.

    Args:
        slack: β, a correlation that is let pass.
        pair_reduction: ``"mean"`` over ordered pairs of heads; ``"sum"`` as printed, which grows with K (K - 1); or
            ``"frobenius"``, the root of the sum of squares, divided by K². Warning: that is at most 0.152 for K = 6, so
            with the default slack there is no loss at all.
        reduction: over the images: ``"mean"``, ``"sum"``, or ``"none"`` for (N,).
    """

    def __init__(
        self,
        slack: float = 0.4,
        pair_reduction: functional.PairReduction = "mean",
        *,
        reduction: functional.Reduction = "mean",
    ):
        super().__init__()
        check_number("slack", slack)
        if pair_reduction not in ("mean", "sum", "frobenius"):
            raise ValueError(f"pair_reduction: expected 'mean', 'sum' or 'frobenius', got {pair_reduction!r}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
        self.slack = slack
        self.pair_reduction: functional.PairReduction = pair_reduction
        self.reduction: functional.Reduction = reduction

    def forward(self, residuals: Tensor, gate: Tensor | None = None) -> Tensor:
        """See :func:`itrloss.functional.dynamic_orthogonal_loss`."""
        return functional.dynamic_orthogonal_loss(residuals, gate, self.slack, self.pair_reduction, self.reduction)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"slack={self.slack}, pair_reduction={self.pair_reduction!r}, reduction={self.reduction!r}"


class DynamicGate(nn.Module):
    r"""Which heads of an image's sub-embeddings take part in the orthogonal constraint (DVSE Eq. 3).

    .. math:: m = \operatorname{round}(\sigma(\operatorname{pool}(W z) - c))

    for the features z of an image's regions, with a frozen random W and mean pooling. The features of all images have
    much in common, so that W alone would leave some heads on, or off, for every image. Hence the centre c: the running
    mean of what is pooled over the training batches, by which each head is on for about one half of the images.

    Args:
        dim: of the region features.
        heads: K.
        momentum: weight of a batch in the running figures.

    Attributes:
        weight: (heads, dim) W; no parameter, but part of the state.
        centre: (heads,) c.
        on_rate: (heads,) running share of the images for which a head is on. One that stays at 0 or 1 is stuck.
    """

    weight: Tensor
    centre: Tensor
    on_rate: Tensor
    batches: Tensor

    def __init__(self, dim: int, heads: int, *, momentum: float = 0.1):
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads)):
            check_size(name, value)
        check_number("momentum", momentum, positive=True)
        self.momentum = momentum
        self.register_buffer("weight", torch.randn(heads, dim) / dim**0.5)
        self.register_buffer("centre", torch.zeros(heads))
        self.register_buffer("on_rate", torch.zeros(heads))
        self.register_buffer("batches", torch.tensor(0))

    @torch.no_grad()
    def forward(self, regions: Tensor, mask: Tensor | None = None) -> Tensor:
        """The gate of each image; in training mode the running figures are updated first, over all processes.

        Args:
            regions: (N, R, dim) floating point.
            mask: (N, R), True or 1 for regions that exist.

        Returns:
            (N, heads) float32 of zeros and ones, without a gradient.
        """
        dim = self.weight.shape[1]
        if regions.dim() != 3 or regions.shape[2] != dim:
            raise ValueError(f"regions: expected shape (N, R, {dim}), got {tuple(regions.shape)}")
        if mask is not None and mask.shape != regions.shape[:2]:
            raise ValueError(f"mask: expected shape {tuple(regions.shape[:2])}, got {tuple(mask.shape)}")
        with full_precision(regions):
            if mask is None:
                pooled = regions.float().mean(1)
            else:
                total = mask.float().sum(1, keepdim=True).clamp_min(1)
                pooled = torch.einsum("nr,nrd->nd", mask.float(), regions.float()) / total
            found = pooled @ self.weight.float().T  # pooling and projection commute
        if self.training:
            self._follow(self.centre, gather_rows(found).mean(0))
        gate = (found > self.centre).float()  # round(sigmoid(x)) is 1 for x > 0
        if self.training:
            self._follow(self.on_rate, gather_rows(gate).mean(0))
            self.batches.add_(1)
        return gate

    def _follow(self, running: Tensor, now: Tensor) -> None:
        """Running mean, which begins with the first batch."""
        share = torch.where(self.batches == 0, 1.0, self.momentum).to(running.dtype)
        running.lerp_(now.to(running.dtype), share)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        heads, dim = self.weight.shape
        return f"dim={dim}, heads={heads}, momentum={self.momentum}"
