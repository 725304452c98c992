"""Losses and similarities of sets of sub-embeddings; public in :mod:`itrloss.functional`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .anchors import Anchors, Reduction
from .checks import (
    as_indices,
    as_mask,
    check_alike,
    check_matrix,
    check_number,
    check_range,
    from_numpy,
    one_of,
)
from .engine.sets import Sets, set_scores
from .engine.vectors import full_precision, host_may_read, normalized
from .similarity import Similarity
from .suspicious import warn

PairReduction = Literal["mean", "sum", "frobenius"]
Aggregation = Literal["max", "mean", "smooth_chamfer", "max_sum", "smooth_max_sum"]


def variance_aware_loss(
    heads: Sequence[Similarity],
    margin: float = 0.2,
    detach_sigma: bool = False,
    shared_sigma: bool = True,
    reduction: Reduction = "mean",
) -> Any:
    """Return the variance-aware weighting loss of K heads of the images; see
    :class:`itrloss.VarianceAwareLoss`.

    Args:
        heads: K similarities of (N, M) with the same ids, one for each head. Texts have one
            embedding.
        margin, detach_sigma, shared_sigma: as there.
        reduction: ``"mean"`` over the images' pairs plus that over the texts' pairs, summed over
            the heads; ``"sum"``; or ``"none"`` for each image's and each text's sum over its pairs
            and the heads, (N,) and (M,).
    """
    _check_heads(heads)
    pairs = _Pairs(heads)
    everything = Anchors.together(*heads, *(sim.T for sim in heads))
    spread = Anchors.together(*heads) if shared_sigma else everything
    scores = pairs.scores
    if detach_sigma:
        spread = spread.detach()
        scores = scores.detach()
    mean, std = spread.mean_std()
    moments = zip(_by_head(mean, heads), _by_head(std, heads), strict=True)
    sigmas = [pairs.deviation(scores, side, *stats) for side, stats in enumerate(moments)]
    if shared_sigma:
        sigmas = sigmas * 2
    sums = []
    for side, hardest in enumerate(_by_head(everything.hardest_negatives().values, heads)):
        hinges = (margin - pairs.scores + pairs.at(hardest, side)).relu()
        values = hinges / sigmas[side].square() + sigmas[side].log()  # (K, P)
        sums.append(pairs.sum(values.sum(0), side))
    both = heads[0].both
    result = torch.cat(sums)
    if reduction == "mean":
        result = both.per_pair(result)
    return both.reduce(result, reduction)


def _check_heads(heads: Sequence[Similarity]) -> None:
    if not heads or not all(isinstance(sim, Similarity) for sim in heads):
        raise TypeError(
            "heads: expected similarities, one for each head; VarianceAwareLoss takes embeddings"
        )
    if any(sim.shape != heads[0].shape for sim in heads):
        raise ValueError(f"heads: expected one shape, got {[sim.shape for sim in heads]}")
    if any(sim.one_to_one != heads[0].one_to_one for sim in heads):
        raise ValueError("heads: expected the same ids for all of them")


def _by_head(x: Tensor, heads: Sequence[Similarity]) -> list[Tensor]:
    """Return values (A,) as (K, N) of the rows of all heads and, if they are among ``x``, (K, M) of
    the columns.
    """
    k = len(heads)
    n, m = heads[0].both.sizes
    rows = x[: k * n].view(k, n)
    return [rows] if len(x) == k * n else [rows, x[k * n :].view(k, m)]


class _Pairs:
    """The positive pairs (P,) of all heads: listed or, where they are not listable, all pairs and a
    mask.
    """

    def __init__(self, heads: Sequence[Similarity]):
        first = heads[0]
        pairs = first.pairs
        self.sides = first.both.groups()
        self.totals = first.totals
        self.one_to_one = pairs.one_to_one
        self.negatives = [anchors.negative_counts for anchors in self.sides]
        self.mask: Tensor | None = None  # (P,), the pairs that are not positive
        if pairs.listable:
            index = pairs.listed
            scores = [sim.positive_scores() for sim in heads]
        else:
            n, m = pairs.shape
            places = torch.arange(n * m, device=pairs.device)
            index = places // m, places % m
            mask = pairs.excluded("positives", slice(None), slice(None))
            assert mask is not None
            self.mask = mask.flatten()
            scores = [(sim.T if first.side else sim).scores().flatten() for sim in heads]
        self.index = index[::-1] if first.side else index  # rows (P,), columns (P,)
        self.scores = torch.stack(scores)  # (K, P)

    def sum(self, x: Tensor, side: int) -> Tensor:
        """Return the (..., A) sums of the pairs' values (..., P) for each row (0) or column (1)."""
        if self.mask is not None:
            x = x.masked_fill(self.mask, 0.0)
        anchors = self.sides[side]
        zeros = x.new_zeros(*x.shape[:-1], sum(anchors.whole_sizes))
        return anchors.merged(zeros.index_add(-1, self.index[side], x))

    def at(self, x: Tensor, side: int) -> Tensor:
        """Return the (..., P) values of the pairs' rows (0) or columns (1) from (..., A)."""
        return self.sides[side].gathered(x)[..., self.index[side]]

    def deviation(self, scores: Tensor, side: int, mean: Tensor, std: Tensor) -> Tensor:
        """Return (K, P) ``1 +`` the sample standard deviation of the scores of each pair's anchor,
        without the pair.

        ``mean`` and ``std`` (K, A) are of the negatives; the anchor's other positives are added to
        them.
        """
        others = self.totals[1 - side] - 1
        if others < 2:
            return torch.ones_like(scores)
        if self.one_to_one:
            return 1 + std * (others / (others - 1)) ** 0.5
        centred = scores - self.at(mean, side)
        squares = std.square() * self.negatives[side] + self.sum(centred.square(), side)
        rest = self.at(self.sum(centred, side), side) - centred
        squares = self.at(squares, side) - centred.square() - rest.square() / others
        return 1 + (squares / (others - 1)).clamp_min(1e-12).sqrt()


def dynamic_orthogonal_loss(
    residuals: Tensor,  # (N, K, D)
    gate: Tensor | None = None,  # (N, K) or (N, D)
    slack: float = 0.4,
    pair_reduction: PairReduction = "mean",
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the dynamic orthogonal constraint on sub-embeddings; see
    :class:`itrloss.DynamicOrthogonalLoss`.

    Args:
        residuals: (N, K, D) residual sub-embeddings; they are normalised here to u, and a zero
            vector stays zero.
        gate: (N, K), the m of each head, or (N, D), a factor for each dimension of the u of all
            heads (if K = D, it is read as the former). None: all ones. It gets no gradient.
        others: as there. The result is float32 (float64 for float64 residuals).
    """
    check_matrix("residuals", residuals, "(N, K, D)", dims=3)
    one_of("pair_reduction", pair_reduction, "mean", "sum", "frobenius")
    one_of("reduction", reduction, "mean", "sum", "none")
    heads = normalized(residuals)
    k = heads.shape[1]
    if gate is not None:
        heads = heads * _factors(gate, heads)
    with full_precision(heads):
        correlation = heads @ heads.transpose(1, 2)  # (N, K, K)
    diagonal = torch.eye(k, dtype=torch.bool, device=heads.device)
    off_diagonal = correlation.masked_fill(diagonal, 0.0).flatten(1)
    if pair_reduction == "frobenius":
        total = torch.linalg.vector_norm(off_diagonal, dim=1) / k**2
    else:
        total = off_diagonal.abs().sum(1)
        if pair_reduction == "mean":
            total = total / max(1, k * (k - 1))
    values = (total - slack).relu()
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def _factors(gate: Tensor, heads: Tensor) -> Tensor:
    """Return the factors (N, K, 1) or (N, 1, D) of heads (N, K, D)."""
    if not isinstance(gate, Tensor):
        raise TypeError(f"gate: expected a tensor, got {type(gate).__name__}")
    n, k, d = heads.shape
    shape = tuple(gate.shape)
    if shape not in ((n, k), (n, d)):
        raise ValueError(f"gate: expected shape ({n}, {k}) or ({n}, {d}), got {shape}")
    gate = gate.detach().to(heads.dtype)
    return gate[:, :, None] if shape == (n, k) else gate[:, None]


def set_similarity(  # noqa: PLR0913 - options by keyword
    images: Tensor,  # (N, K, D)
    texts: Tensor,  # (M, D) or (M, L, D)
    aggregation: Aggregation = "max",
    alpha: float = 16.0,
    *,
    normalize: bool = True,
    image_lengths: Tensor | None = None,
    text_lengths: Tensor | None = None,
    image_mask: Tensor | None = None,
    text_mask: Tensor | None = None,
) -> Tensor:
    r"""Return the (N, M) similarity of sets of embeddings by the cosines of their elements.

    ``"max"`` is the largest cosine of an element of one with an element of the other (DVSE, PVSE),
    ``"mean"`` the mean of all such cosines. ``"max_sum"`` is late interaction (`ColBERT
    <https://arxiv.org/abs/2004.12832>`_), and ``"smooth_max_sum"`` the same with
    :math:`\frac1\alpha \log \sum_b e^{\alpha \cos(a, b)}` in place of the maximum:

    .. math:: \sum_a \max_b \cos(a, b)

    ``"smooth_chamfer"`` is (Kim et al., DivE, CVPR 2023, with :math:`\alpha` the sharpness)

    .. math:: \frac1{2 \alpha K} \sum_a \log \sum_b e^{\alpha \cos(a, b)}
              + \frac1{2 \alpha L} \sum_b \log \sum_a e^{\alpha \cos(a, b)}

    whose inner sums are not divided by their length, so that it may exceed 1. It is float32
    (float64 for float64 input) and differentiable. Pass it to
    :meth:`itrloss.Similarity.from_scores`, to the metrics or to a re-ranker. The cosines are held
    for a few sets at a time, but for second derivatives. The gradient of a maximum goes to the
    first of equal elements.

    Args:
        images: (N, K, D) sets, of any length.
        texts: (M, D), or sets (M, L, D).
        alpha: :math:`\alpha`, above 0.
        normalize: scale elements to unit length first; False takes inner products instead of
            cosines.
        image_lengths, text_lengths: (N,) and (M,) integers, how many elements of each set exist;
            K and L are then the set's own lengths. What follows is padding, of any value. An empty
            set scores 0, without a gradient. On an accelerator they are not checked.
        image_mask, text_mask: (N, K) and (M, L) bool tensors in place of lengths, True where an
            element exists, such as for padding on the left, or tokens that do not count. Integers 0
            and 1, as tokenizers return them, will do.
    """
    images = from_numpy(images)
    texts = from_numpy(texts)
    for name, x in (("images", images), ("texts", texts)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected sets of embeddings, got {type(x).__name__}")
    if texts.dim() == 2:
        texts = texts[:, None]
    for name, x in (("images", images), ("texts", texts)):
        if x.dim() != 3 or x.shape[2] != images.shape[2] or 0 in x.shape:
            raise ValueError(
                f"{name}: expected sets of embeddings of one dimension, got shape {tuple(x.shape)}"
            )
    check_alike("texts", texts, "images", images)
    check_number("alpha", alpha, positive=True)
    one_of("aggregation", aggregation, "max", "mean", "smooth_chamfer", "max_sum", "smooth_max_sum")
    rows = _existing("image", images, image_lengths, image_mask)
    cols = _existing("text", texts, text_lengths, text_mask)
    for name, (_, lengths) in (("image", rows), ("text", cols)):
        if lengths is not None and host_may_read(lengths) and not bool(lengths.any()):
            warn(
                f"{name}_lengths, {name}_mask: all sets are empty, so that all scores are 0 "
                "without a gradient. A mask is True where an element exists"
            )
    if aggregation != "mean":
        return set_scores(rows, cols, aggregation, alpha, normalize)
    with full_precision(images):  # the mean of the products is the product of the means
        return _means(*rows, normalize) @ _means(*cols, normalize).T


def _means(sets: Tensor, lengths: Tensor | None, normalize: bool) -> Tensor:
    """Return the (N, D) means of the elements of sets (N, K, D)."""
    elements = Sets(sets, None, lengths).differentiable(normalize)
    if lengths is None:
        return elements.mean(1)
    return elements.sum(1) / lengths.clamp_min(1)[:, None]


def _existing(
    name: str, sets: Tensor, lengths: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return sets (N, K, D) whose existing elements come first, and the (N,) numbers of these."""
    if mask is None:
        return sets, _lengths(f"{name}_lengths", lengths, sets)
    if lengths is not None:
        raise ValueError(f"{name}_mask: expected None beside {name}_lengths")
    shape = tuple(sets.shape[:2])
    mask = as_mask(f"{name}_mask", mask, shape)
    exists = mask.to(sets.device) != 0
    # No aggregation depends on the order of elements, and equal ones stay in theirs.
    order = (~exists).to(torch.uint8).argsort(dim=1, stable=True)
    return sets.gather(1, order[:, :, None].expand_as(sets)), exists.sum(1)


def _lengths(name: str, lengths: Tensor | None, sets: Tensor) -> Tensor | None:
    """Return the (N,) int64 numbers of elements of the sets (N, K, D); None if all exist."""
    if lengths is None:
        return None
    lengths = as_indices(name, lengths, len(sets), sets.device)
    if host_may_read(lengths):
        check_range(name, lengths, sets.shape[1])
    return lengths
