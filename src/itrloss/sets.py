"""Functions of sets of sub-embeddings; public in :mod:`itrloss.functional`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .engines.reference import unit as unit_vectors

Reduction = Literal["mean", "sum", "none"]
PairReduction = Literal["mean", "sum", "frobenius"]
Aggregation = Literal["max", "mean", "smooth_chamfer"]


def dynamic_orthogonal_loss(
    residuals: Tensor,  # (N, K, D)
    gate: Tensor | None = None,  # (N, K) or (N, D)
    slack: float = 0.4,
    pair_reduction: PairReduction = "mean",
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Dynamic orthogonal constraint (DVSE Eq. 4): correlation of an image's sub-embeddings above a ``slack`` β.

    .. math:: \Bigl[ \frac1{K (K - 1)} \sum_{i \ne j} |m_i m_j \langle u_i, u_j \rangle| - \beta \Bigr]_+

    Args:
        residuals: (N, K, D) residual sub-embeddings; normalised inside to u, a zero vector stays zero.
        gate: (N, K), the m of each head, or (N, D), one of each dimension, by which the u of all heads are multiplied
            (where K = D it is taken for the former). None: all ones. It gets no gradient.
        slack: β.
        pair_reduction: ``"mean"``, ``"sum"`` or ``"frobenius"``, see :class:`itrloss.DynamicOrthogonalLoss`.
        reduction: over the images: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        A 0-dim tensor or, for ``"none"``, (N,); float32 (float64 for float64 residuals).
    """
    if not isinstance(residuals, Tensor) or residuals.dim() != 3 or not residuals.is_floating_point():
        got = (tuple(residuals.shape), residuals.dtype) if isinstance(residuals, Tensor) else type(residuals).__name__
        raise TypeError(f"residuals: expected a floating-point tensor (N, K, D), got {got}")
    n, k, d = residuals.shape
    heads = unit_vectors(residuals)
    if gate is not None:
        if not isinstance(gate, Tensor):
            raise TypeError(f"gate: expected a tensor, got {type(gate).__name__}")
        if gate.shape not in ((n, k), (n, d)):
            raise ValueError(f"gate: expected shape ({n}, {k}) or ({n}, {d}), got {tuple(gate.shape)}")
        mask = gate.detach().to(heads.dtype)
        heads = heads * (mask[:, :, None] if gate.shape == (n, k) else mask[:, None, :])
    with torch.autocast(heads.device.type, enabled=False):
        correlation = heads @ heads.transpose(1, 2)
    apart = correlation.masked_fill(torch.eye(k, dtype=torch.bool, device=heads.device), 0.0).flatten(1)
    if pair_reduction == "frobenius":
        found = torch.linalg.vector_norm(apart, dim=1) / k**2
    elif pair_reduction in ("mean", "sum"):
        found = apart.abs().sum(1) / (max(1, k * (k - 1)) if pair_reduction == "mean" else 1)
    else:
        raise ValueError(f"pair_reduction: expected 'mean', 'sum' or 'frobenius', got {pair_reduction!r}")
    values = (found - slack).relu()
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    return values if reduction == "none" else values.sum() / (max(1, n) if reduction == "mean" else 1)


def set_similarity(
    images: Tensor,  # (N, K, D)
    texts: Tensor,  # (M, D) or (M, L, D)
    aggregation: Aggregation = "max",
    alpha: float = 16.0,
) -> Tensor:
    r"""(N, M) similarity of sets of embeddings by the cosines of their elements.

    ``"max"`` is the largest cosine of an element of one with an element of the other (DVSE, PVSE), ``"mean"`` that of
    all of them, and ``"smooth_chamfer"`` (Kim et al., DivE, CVPR 2023, with :math:`\alpha` the sharpness)

    .. math:: \frac1{2 \alpha K} \sum_a \log \sum_b e^{\alpha \cos(a, b)}
              + \frac1{2 \alpha L} \sum_b \log \sum_a e^{\alpha \cos(a, b)}

    whose inner sums are not divided by their length, so that it may exceed 1. Differentiable; worked out for some
    images at a time. Feed it to :meth:`itrloss.Similarity.from_scores`, to the metrics or to a re-ranker.

    Args:
        images: (N, K, D) sets, of any length.
        texts: (M, D), or sets (M, L, D).
        aggregation: as above.
        alpha: :math:`\alpha`, above 0.

    Returns:
        (N, M) float32 (float64 for float64 input).
    """
    if texts.dim() == 2:
        texts = texts[:, None]
    for name, x in (("images", images), ("texts", texts)):
        if x.dim() != 3 or x.shape[2] != images.shape[2] or 0 in x.shape:
            raise ValueError(f"{name}: expected sets of embeddings of one dimension, got shape {tuple(x.shape)}")
    if not alpha > 0:
        raise ValueError(f"alpha: expected a number above 0, got {alpha}")
    if aggregation not in ("max", "mean", "smooth_chamfer"):
        raise ValueError(f"aggregation: expected 'max', 'mean' or 'smooth_chamfer', got {aggregation!r}")
    (m, size, _), elements = texts.shape, unit_vectors(texts).flatten(0, 1)
    step = max(1, 2**22 // (images.shape[1] * len(elements)))
    found = []
    for block in unit_vectors(images).split(step):
        with torch.autocast(elements.device.type, enabled=False):
            cosines = (block.flatten(0, 1) @ elements.T).view(len(block), -1, m, size)
        if aggregation == "max":
            found.append(cosines.amax((1, 3)))
        elif aggregation == "mean":
            found.append(cosines.mean((1, 3)))
        else:
            z = alpha * cosines
            found.append((z.logsumexp(3).mean(1) + z.logsumexp(1).mean(2)) / (2 * alpha))
    return torch.cat(found)
