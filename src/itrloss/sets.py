"""Functions of sets of sub-embeddings; public in :mod:`itrloss.functional`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ._reduction import AnchorCounts, Reduction
from .engines.pairs import add_at_
from .engines.positives import Positives
from .engines.reference import unit as unit_vectors
from .engines.registration import full_precision
from .similarity import Similarity

PairReduction = Literal["mean", "sum", "frobenius"]
Aggregation = Literal["max", "mean", "smooth_chamfer"]
_SMALL = 2**21  # scores of all heads


def variance_aware_loss(
    heads: Sequence[Similarity],
    margin: float = 0.2,
    detach_sigma: bool = False,
    shared_sigma: bool = True,
    reduction: Reduction = "mean",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Variance-aware weighting loss (DVSE Eq. 8, 11) of an image's K heads with the texts.

    .. math::
        \sum_k \operatorname{mean}_{(i, p)} \Bigl[ \frac1{\sigma_{ikp}^2}
            \bigl[\alpha - S^k_{ip} + \max_{j \in neg(i)} S^k_{ij}\bigr]_+ + \log \sigma_{ikp} \Bigr]
        + \text{the same from the texts}, \qquad
        \sigma_{ikp} = 1 + \operatorname{Std}_{j \ne p} S^k_{ij}

    over the positive pairs (i, p), with the ``margin`` α and the sample standard deviation of all that head k scores
    with image i but the target p: other captions of the image stay in (Eq. 7).

    Args:
        heads: K similarities of (N, M) with the same ids, one for each head. Texts have one embedding.
        margin, detach_sigma, shared_sigma: see :class:`itrloss.VarianceAwareLoss`.
        reduction: ``"mean"`` over the images' pairs plus that over the texts' pairs, summed over the heads; ``"sum"``;
            or ``"none"`` for each image's and each text's sum over its pairs and the heads, (N,) and (M,).

    Returns:
        A 0-dim tensor, or a pair of tensors for ``"none"``.
    """
    if not heads or not all(isinstance(sim, Similarity) for sim in heads):
        raise TypeError("heads: expected similarities, one for each head; VarianceAwareLoss takes embeddings")
    if any(sim.shape != heads[0].shape for sim in heads):
        raise ValueError(f"heads: expected one shape, got {[sim.shape for sim in heads]}")
    if any(sim.one_to_one != heads[0].one_to_one for sim in heads):
        raise ValueError("heads: expected the same ids for all of them")
    counts = AnchorCounts(heads[0])
    small = len(heads) * heads[0].shape[0] * heads[0].shape[1] <= _SMALL
    if small and all(sim.engine == "dense" and _same_ids(sim, heads[0]) for sim in heads):
        found = [x.sum(0) for x in _weighted_hinges(_Stack.of(heads), margin, detach_sigma, shared_sigma)]
    else:
        each = [_weighted_hinges(_Head.of(sim), margin, detach_sigma, shared_sigma) for sim in heads]
        found = [torch.stack(values).sum(0) for values in zip(*each, strict=True)]
    values = torch.cat(found)
    return counts.reduce(counts.mean_over_pairs(values) if reduction == "mean" else values, reduction)


def _same_ids(sim: Similarity, other: Similarity) -> bool:
    return all(a is b for a, b in zip(sim.ids, other.ids, strict=True))


def _weighted_hinges(head: _Head | _Stack, margin: float, detach_sigma: bool, shared_sigma: bool) -> list[Tensor]:
    """Of each image and of each text the sum over its pairs."""
    beside = head.detach() if detach_sigma else head
    of_images, of_texts = _deviations(beside, shared_sigma)
    pairs = head.pairs
    return [
        pairs.sum((margin - pairs.scores + pairs.of_anchor(best, side)).relu() / sigma.square() + sigma.log(), side)
        for side, (best, sigma) in enumerate(zip(head.hardest, (of_images, of_texts), strict=True))
    ]


def _deviations(head: _Head | _Stack, shared: bool) -> list[Tensor]:
    """Of each positive pair: 1 + the sample standard deviation of its anchor's scores without the pair itself.

    From the moments of the negatives; the other positives are added to them, and the pair taken out.
    """
    pairs, found = head.pairs, []
    for side, (mean, std, negatives) in enumerate(head.moments(sides=1 if shared else 2)):
        others = pairs.shape[1 - side] - 1
        if others < 2:
            found.append(torch.ones_like(pairs.scores))
        elif pairs.one_to_one:
            found.append(1 + std * (others / (others - 1)) ** 0.5)
        else:
            apart = pairs.scores - pairs.of_anchor(mean, side)
            squares = std.square() * negatives + pairs.sum(apart.square(), side)
            rest = pairs.of_anchor(pairs.sum(apart, side), side) - apart
            squares = pairs.of_anchor(squares, side) - apart.square() - rest.square() / others
            found.append(1 + (squares / (others - 1)).clamp_min(1e-12).sqrt())
    return [found[0], found[-1]]


@dataclass
class _Pairs:
    """Scores of the positive pairs: of all rows, in a list or, where listing them would wait, in a masked matrix."""

    scores: Tensor
    shape: tuple[int, int]
    one_to_one: bool
    index: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None

    @staticmethod
    def of(sim: Similarity) -> _Pairs:
        """Of one head."""
        if sim.one_to_one:
            return _Pairs(sim.positives(sparse=True), sim.shape, True)
        pairs = Positives(*sim.shape, *sim.ids, sim.device)
        # The length of a list is data: an accelerator has to be waited for, and the compiler refuses.
        dense = sim.engine in ("reference", "dense")
        if sim.engine == "reference" or torch.compiler.is_compiling() or (dense and not pairs.listable):
            return _Pairs(sim.scores(), sim.shape, False, mask=_positive_mask(sim))
        index = pairs.pairs()
        return _Pairs(sim.pair_scores(*index), sim.shape, False, index)

    def of_anchor(self, x: Tensor, side: int) -> Tensor:
        """Values per row (side 0) or column (side 1), for each of the pairs."""
        if self.index is not None:
            return x[self.index[side]]
        return x if self.one_to_one else x.unsqueeze(-1 - side)

    def sum(self, x: Tensor, side: int) -> Tensor:
        """Sums of the pairs' values per row or column."""
        if self.index is not None:
            return add_at_(x.new_zeros(self.shape[side]), self.index[side], x)
        return x if self.mask is None else torch.where(self.mask, x, 0.0).sum(-1 - side)


def _positive_mask(sim: Similarity) -> Tensor:
    row_ids, col_ids = sim.ids
    if row_ids is None:
        return torch.eye(*sim.shape, dtype=torch.bool, device=sim.device)
    return row_ids[:, None] == col_ids


@dataclass
class _Head:
    """What the loss asks of one head."""

    sim: Similarity
    hardest: tuple[Tensor, Tensor]
    pairs: _Pairs

    @staticmethod
    def of(sim: Similarity) -> _Head:
        """Of one similarity."""
        rows, cols = sim.both.hardest()  # first: it hands out the positives' scores
        return _Head(sim, (rows.values, cols.values), _Pairs.of(sim))

    def detach(self) -> _Head:
        """The same without a gradient."""
        return _Head(self.sim._detach_for_now(), self.hardest, replace(self.pairs, scores=self.pairs.scores.detach()))

    def moments(self, sides: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Mean and deviation of the negatives of rows, or of rows and columns, and how many there are."""
        if sides == 1:
            moments, counts = [self.sim.moments()], [self.sim.negative_counts]
        else:
            moments, counts = self.sim.both.moments(), self.sim.both.negative_counts
        return [(m.mean, m.std, count) for m, count in zip(moments, counts, strict=True)]


@dataclass
class _Stack:
    """The same of all heads at once, (K, N, M), in plain PyTorch: for small matrices, where calls cost most."""

    scores: Tensor
    mask: Tensor
    pairs: _Pairs

    @staticmethod
    def of(heads: Sequence[Similarity]) -> _Stack:
        """Of heads with the same ids."""
        scores, mask = torch.stack([sim.scores() for sim in heads]), _positive_mask(heads[0])
        if heads[0].one_to_one:
            return _Stack(scores, mask, _Pairs(scores.diagonal(dim1=1, dim2=2), heads[0].shape, True))
        return _Stack(scores, mask, _Pairs(scores, heads[0].shape, False, mask=mask))

    @property
    def hardest(self) -> tuple[Tensor, Tensor]:
        negatives = self.scores.masked_fill(self.mask, -math.inf)
        return negatives.max(2).values, negatives.max(1).values

    def detach(self) -> _Stack:
        """The same without a gradient."""
        return _Stack(self.scores.detach(), self.mask, replace(self.pairs, scores=self.pairs.scores.detach()))

    def moments(self, sides: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """As of one head."""
        found = []
        for dim in (-1, -2)[:sides]:
            count = (~self.mask).sum(dim)
            n = count.clamp_min(1)
            mean = self.scores.masked_fill(self.mask, 0).sum(dim) / n
            apart = (self.scores - mean.unsqueeze(dim)).masked_fill(self.mask, 0)
            found.append((mean, (apart.square().sum(dim) / n).clamp_min(1e-12).sqrt(), count))
        return found


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
    with full_precision(heads):
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
        with full_precision(elements):
            cosines = (block.flatten(0, 1) @ elements.T).view(len(block), -1, m, size)
        if aggregation == "max":
            found.append(cosines.amax((1, 3)))
        elif aggregation == "mean":
            found.append(cosines.mean((1, 3)))
        else:
            z = alpha * cosines
            found.append((z.logsumexp(3).mean(1) + z.logsumexp(1).mean(2)) / (2 * alpha))
    return torch.cat(found)
