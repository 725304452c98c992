"""Losses and similarities of sets of sub-embeddings; public in :mod:`itrloss.functional`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .anchors import Anchors, Reduction
from .checks import (
    as_integers,
    as_mask,
    check_alike,
    check_matrix,
    check_number,
    check_range,
    from_numpy,
    one_of,
    takes_queries,
)
from .checks.warnings import warn
from .distributed import ProcessGroup, consensus, is_trained, rows_of_all, world_size
from .engine.products import product
from .engine.sets import Form, Sets, set_scores
from .engine.vectors import compute_dtype, host_may_read, normalized, savable
from .similarity import Similarity
from .torch_versions import is_compiling

PairReduction = Literal["mean", "sum", "frobenius"]
Aggregation = Literal[
    "max", "mean", "smooth_chamfer", "max_sum", "max_mean", "smooth_max_sum", "smooth_max_mean"
]
# Sums over an image's elements, by which number the others divide them.
_SUMS = {"max_mean": "max_sum", "smooth_max_mean": "smooth_max_sum"}


def variance_aware_loss(
    heads: Sequence[Similarity],
    margin: float = 0.2,
    detach_sigma: bool = False,
    shared_sigma: bool = True,
    reduction: Reduction = "mean",
) -> Tensor | tuple[Tensor, ...]:
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
    for sim in heads:
        sim.refuse_weights("variance_aware_loss")
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
    """Raise an error unless all heads are similarities of the same pairs."""
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
        self.sides = first, first.T
        self.negatives = [anchors.negative_counts for anchors in self.sides]
        #: The (A,) numbers of each anchor's candidates, which are positives or negatives.
        self.candidates = [
            anchors.positive_counts + anchors.negative_counts for anchors in self.sides
        ]
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
        others = self.at(self.candidates[side].to(scores), side) - 1  # (P,) of each pair's anchor
        centred = scores - self.at(mean, side)
        squares = std.square() * self.negatives[side] + self.sum(centred.square(), side)
        rest = self.at(self.sum(centred, side), side) - centred
        squares = self.at(squares, side) - centred.square() - rest.square() / others.clamp_min(1)
        deviation = (squares / (others - 1).clamp_min(1)).clamp_min(1e-12).sqrt()
        return 1 + deviation.masked_fill(others < 2, 0.0)


def dynamic_orthogonal_loss(
    residuals: Tensor,  # (N, K, D)
    gate: Tensor | None = None,  # (N, K) or (N, D)
    slack: float = 0.4,
    pair_reduction: PairReduction = "mean",
    reduction: Reduction = "mean",
    normalize_residuals: bool = True,
) -> Tensor:
    """Return the dynamic orthogonal constraint on sub-embeddings; see
    :class:`itrloss.DynamicOrthogonalLoss`.

    Args:
        residuals: (N, K, D) residual sub-embeddings; they are normalised here to u, and a zero
            vector stays zero.
        gate: (N, K), the m of each head, or (N, D), a factor for each dimension of the u of all
            heads (if K = D, it is read as the former). None: all ones. It gets no gradient.
        normalize_residuals: False takes the residuals as u as they are.
        others: as there. The result is float32 (float64 for float64 residuals).
    """
    check_matrix("residuals", residuals, "(N, K, D)", dims=3)
    one_of("pair_reduction", pair_reduction, "mean", "sum", "frobenius")
    one_of("reduction", reduction, "mean", "sum", "none")
    heads = normalized(residuals) if normalize_residuals else residuals.to(compute_dtype(residuals))
    k = heads.shape[1]
    if gate is not None:
        heads = heads * _factors(gate, heads)
    correlation = product(heads, heads.mT)  # (N, K, K)
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
    gate = savable(gate.detach()).to(heads.dtype)
    return gate[:, :, None] if shape == (n, k) else gate[:, None]


@takes_queries
def set_similarity(  # noqa: PLR0913 - options by keyword
    images: Tensor,  # (N, K, D)
    texts: Tensor,  # (M, D), (M, L, D) or (N, J, L, D)
    aggregation: Aggregation = "max",
    alpha: float = 16.0,
    *,
    normalize: bool = True,
    image_lengths: Tensor | None = None,
    text_lengths: Tensor | None = None,
    image_mask: Tensor | None = None,
    text_mask: Tensor | None = None,
    gather: bool = False,
    process_group: ProcessGroup = None,
) -> Tensor:
    r"""Return the (N, M) similarity of sets of embeddings by the cosines of their elements.

    ``"max"`` is the largest cosine of an element of one with an element of the other (DVSE, PVSE),
    ``"mean"`` the mean of all such cosines. ``"max_sum"`` is late interaction (`ColBERT
    <https://arxiv.org/abs/2004.12832>`_), the sum over the image's elements a of their best
    elements b of the text:

    .. math:: \sum_a \max_b \cos(a, b)

    ``"max_mean"`` divides it by the number of the image's elements that exist (ColPali). In
    ``"smooth_max_sum"`` and ``"smooth_max_mean"``,
    :math:`\frac1\alpha \log \sum_b e^{\alpha \cos(a, b)}` is in place of the maximum.
    ``"smooth_chamfer"`` is (Kim et al., DivE, CVPR 2023, with :math:`\alpha` the sharpness)

    .. math:: \frac1{2 \alpha K} \sum_a \log \sum_b e^{\alpha \cos(a, b)}
              + \frac1{2 \alpha L} \sum_b \log \sum_a e^{\alpha \cos(a, b)}

    whose inner sums are not divided by their length, so that it may exceed 1. The result is float32
    (float64 for float64 input) and differentiable. Any loss takes it as ``scores=``, and so do
    :meth:`itrloss.Similarity.from_scores`, the metrics and the re-rankers; see
    :doc:`losses/late_interaction`. The cosines are held for a few sets at a time, but for second
    derivatives. The gradient of a maximum goes to the first of equal elements.

    Args:
        images: (N, K, D) sets, of any length. Where queries are summed up, they are the images.
        texts: (M, D), or sets (M, L, D); or (N, J, L, D), each image's own J sets, such as its hard
            negatives: the result is (N, J), and no other scores are computed.
        alpha: :math:`\alpha`, above 0.
        normalize: scale elements to unit length first; False takes inner products instead of
            cosines.
        image_lengths, text_lengths: (N,) and (M,) or (N, J) integers, how many elements of each set
            exist; K and L are then the set's own lengths. What follows is padding, of any value. An
            empty set scores 0, without a gradient. On an accelerator they are not checked.
        image_mask, text_mask: (N, K) and (M, L) or (N, J, L) bool tensors in place of lengths, True
            where an element exists, such as for padding on the left, or tokens that do not count.
            Integers 0 and 1, as tokenizers return them, will do.
        gather: in a job of several processes, take the texts of all of them, padded to the longest:
            the result is (N, M) with the M texts of all processes by rank. N, M and L may differ
            between processes. Each computes its images' scores alone; the gradient of a text is the
            sum of its gradients in all processes, so all have to take part in backward.
        process_group: a process group, by default of all processes.

    Raises:
        ValueError, TypeError: if shapes, dtypes or options do not fit, naming the argument; with
            ``gather``, in all processes.
    """
    one_of("gather", gather, True, False)
    is_shared = gather and world_size(process_group) > 1
    are_own = getattr(texts, "ndim", 0) == 4

    def checked() -> tuple[Sets, Sets]:
        """Return the sets of both sides; raise an error if they, or options, do not fit."""
        one_of("aggregation", aggregation, *get_args(Aggregation))
        check_number("alpha", alpha, positive=True)
        may_be_empty = is_shared or are_own  # in a process of several
        rows = _sets("image", images, image_lengths, image_mask, may_be_empty)
        cols = _sets("text", texts, text_lengths, text_mask, may_be_empty)
        _check_together(rows.x, cols.x, gather)
        return rows, cols

    if is_shared:
        said = f"aggregation {aggregation!r}; alpha {alpha}; normalize {normalize}"
        rows, cols = _with_texts_of_all(checked, said, process_group)
    else:
        rows, cols = checked()
    if aggregation == "mean":
        return _mean_scores(rows, cols, normalize)
    form = Form(_SUMS.get(aggregation, aggregation), float(alpha), normalize)
    scores = set_scores(rows, cols, form)
    if aggregation in _SUMS:
        return scores / rows.numbers_of_elements()[:, None]
    return scores


def _sets(side: str, sets: object, lengths: object, mask: object, may_be_empty: bool) -> Sets:
    """Return the sets (N, K, D), of texts also (N, J, L, D), of one side, and which elements exist;
    raise an error for wrong input.
    """
    x = from_numpy(sets)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{side}s: expected floating-point sets of embeddings, got {got}")
    if side == "text" and x.dim() == 2:
        x = x[:, None]
    may_be_own = side == "text" and x.dim() == 4
    if not (x.dim() == 3 or may_be_own) or 0 in x.shape[int(may_be_empty) :]:
        raise ValueError(f"{side}s: expected sets of embeddings, got shape {tuple(x.shape)}")
    exists: Tensor | None = None
    if mask is not None:
        if lengths is not None:
            raise ValueError(f"{side}_mask: expected None with {side}_lengths")
        exists = as_mask(f"{side}_mask", mask, tuple(x.shape[:-1])).to(x.device) != 0
    elif lengths is not None:
        numbers = _lengths(f"{side}_lengths", lengths, x)
        exists = torch.arange(x.shape[-2], device=x.device) < numbers[..., None]
    if exists is not None and len(x) and host_may_read(exists) and not bool(exists.any()):
        warn(
            f"{side}_lengths, {side}_mask: all sets are empty, so that all scores are 0 without a "
            "gradient. A mask is True where an element exists"
        )
    return Sets(savable(x), exists)


def _lengths(name: str, lengths: object, sets: Tensor) -> Tensor:
    """Return the (...) int64 numbers of elements of sets (..., K, D)."""
    shape = tuple(sets.shape[:-2])
    lengths = as_integers(name, lengths)
    if lengths.shape == (*shape, 1):
        lengths = lengths.squeeze(-1)
    if lengths.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(lengths.shape)}")
    lengths = lengths.to(sets.device).long()
    if lengths.numel() and host_may_read(lengths):
        check_range(name, lengths, sets.shape[-2])
    return lengths


def _check_together(images: Tensor, texts: Tensor, gather: bool) -> None:
    """Raise an error unless sets of both sides fit together."""
    check_alike("texts", texts, "images", images)
    if texts.shape[-1] != images.shape[-1]:
        expected = f"expected sets of embeddings of dimension {images.shape[-1]}, as the images'"
        raise ValueError(f"texts: {expected}, got shape {tuple(texts.shape)}")
    if texts.dim() == 3:
        return
    if len(texts) != len(images):
        expected = f"expected each image's own sets, ({len(images)}, J, L, D)"
        raise ValueError(f"texts: {expected}, got shape {tuple(texts.shape)}")
    if gather:
        expected = "expected False for each image's own texts, which stay in their process"
        raise ValueError(f"gather: {expected}, got {gather!r}")


def _with_texts_of_all(
    check: Callable[[], tuple[Sets, Sets]], said: str, group: ProcessGroup
) -> tuple[Sets, Sets]:
    """Return this process's images (N, K, D) and the texts (M, L, D) of all, which are padded to
    the longest. All processes raise an error, or none.
    """
    if is_compiling():  # nothing is compared then
        rows, cols = check()
        every = [[len(cols.x), cols.size, int(cols.exists is not None)]] * world_size(group)
    else:
        with consensus(group) as agreed:
            rows, cols = check()
            kind = f"{cols.x.dtype}; dimension {cols.x.shape[2]}; gradient {is_trained(cols.x)}"
            agreed.text = f"{said}; {kind}"
            agreed.numbers = [len(cols.x), cols.size, int(cols.exists is not None)]
        every = agreed.every
    numbers = [own[0] for own in every]
    sizes = [own[1] for own in every]
    if not any(numbers):
        raise ValueError("texts: expected at least one set among those of all processes, got none")
    # The compiler of PyTorch 2.8 does not trace the maximum of a list.
    longer = max(0, *sizes) - cols.size
    x = rows_of_all(F.pad(cols.x, (0, 0, 0, longer)), numbers, group)
    if len(set(sizes)) == 1 and not any(own[2] for own in every):
        return rows, Sets(x)
    exists = cols.exists
    if exists is None:
        exists = torch.ones(cols.x.shape[:2], dtype=torch.bool, device=cols.x.device)
    exists = F.pad(exists.to(torch.uint8), (0, longer))  # backends do not all exchange bools
    return rows, Sets(x, rows_of_all(exists, numbers, group).bool())


def _mean_scores(rows: Sets, cols: Sets, normalize: bool) -> Tensor:
    """Return the means of all products of elements, (N, M) or (N, J) of own sets."""
    left = _means(rows, normalize)  # the mean of the products is the product of the means
    right = _means(cols, normalize)
    if cols.x.dim() == 4:
        return product(right, left[:, :, None]).squeeze(2)
    return product(left, right.T)


def _means(sets: Sets, normalize: bool) -> Tensor:
    """Return the (..., D) means of the elements of sets (..., K, D)."""
    elements = sets.prepared(normalize).x
    if sets.exists is None:
        return elements.mean(-2)
    return elements.sum(-2) / sets.numbers_of_elements().unsqueeze(-1)
