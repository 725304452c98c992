"""The losses as a careful practitioner would write them in plain eager PyTorch: the baseline of the
benchmarks.

Each uses one dense (N, M) score matrix, a mask of the positives, and autograd. Both directions
share the product, the mask and, if the temperature permits, the logits; new matrices are masked in
place; aligned pairs (no ids) are taken from the diagonal. Every function compiles with
``fullgraph=True``.

Arguments common to all: ``images`` (N, D) and ``texts`` (M, D), floating point, normalised inside;
``image_ids`` (N,) and ``text_ids`` (M,), integer, by default ``arange``. The pair (i, j) is
positive iff the ids are equal. An anchor without a positive or without a negative contributes 0 and
is excluded from the mean. The result is a 0-dim tensor, the mean over images and the mean over
texts (of the triplet loss the sums, as by default in ours), float32 for half precision inputs and
of the input's type otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from itrloss.checks import one_of

NEG_INF = float("-inf")
SCORE_FLOOR = -1 + 1e-6  # log(1 + S) is finite above this value


class Matches(NamedTuple):
    """The positive pairs of one direction's anchors; counts have the scores' type."""

    anchors: Tensor  # (P,) anchor of each positive pair
    positives: Tensor  # (A,) positives of each anchor
    negatives: Tensor  # (A,)
    valid: Tensor  # (A,) has a positive and a negative


class Side(NamedTuple):
    """One direction: the rows' anchors reduce along ``dim`` 1, the columns' along ``dim`` 0."""

    dim: int
    candidates: int  # scores of one anchor
    matches: Matches | None  # None: pair i is the only positive of anchor i


class Batch(NamedTuple):
    scores: Tensor  # (N, M)
    mask: Tensor  # (N, M) True at the positives
    pairs: Tensor  # (P,) scores of the positive pairs
    sides: tuple[Side, Side]  # images, texts


def triplet(
    images: Tensor,
    texts: Tensor,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    margin: float = 0.2,
    mining: str = "hardest",
) -> Tensor:
    """Hinge of every positive pair with the anchor's hardest negative, or with all its negatives
    (VSE++).
    """
    one_of("mining", mining, "hardest", "all")
    batch = _compare(images, texts, image_ids, text_ids)
    if mining == "all":
        hinges = [_hinges_against_all(batch, side, margin) for side in batch.sides]
        return hinges[0].sum() + hinges[1].sum()
    rivals = batch.scores.masked_fill(batch.mask, NEG_INF)
    losses = []
    for side in batch.sides:
        hardest = _at_pairs(rivals.max(dim=side.dim).values, side)
        losses.append(F.relu(margin - batch.pairs + hardest).sum())
    return losses[0] + losses[1]


def infonce(
    images: Tensor,
    texts: Tensor,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    temperature: float = 0.07,
) -> Tensor:
    """Cross-entropy of each positive against the anchor's negatives, averaged over its positives
    (CPC).
    """
    # Dividing the (N, D) embeddings by the temperature is cheaper than dividing the (N, M) scores.
    logits, mask, pairs, sides = _compare(images, texts, image_ids, text_ids, scale=1 / temperature)
    if sides[0].matches is not None:
        logits = logits.masked_fill(mask, NEG_INF)
    losses = []
    for side in sides:
        total = logits.logsumexp(side.dim)
        if side.matches is None:  # the sum already includes the only positive
            surprise = total - pairs
        else:
            surprise = F.softplus(_at_pairs(total, side) - pairs, threshold=50)
            surprise = surprise / side.matches.positives[side.matches.anchors]
        losses.append(_mean(surprise, side))
    return losses[0] + losses[1]


def sigmoid(
    images: Tensor,
    texts: Tensor,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    scale: float = 10.0,
    bias: float = -10.0,
) -> Tensor:
    """Binary classification of every pair (SigLIP Eq. 1); the mean divides by N and by M, one half
    each.
    """
    batch = _compare(images, texts, image_ids, text_ids)
    logits = scale * batch.scores + bias
    total = -F.logsigmoid(torch.where(batch.mask, logits, -logits)).sum()
    return total * (0.5 / logits.shape[0] + 0.5 / logits.shape[1])


def hal(
    images: Tensor,
    texts: Tensor,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    scale: float = 90.0,
    margin: float = 0.5,
) -> Tensor:
    """Hubness-aware loss (USER Eq. 17): row and column terms minus the positive pairs' mean log(1 +
    S).
    """
    batch = _compare(images, texts, image_ids, text_ids)
    logits = (scale * batch.scores).masked_fill_(batch.mask, NEG_INF)
    attraction = 0.5 * torch.log1p(batch.pairs.clamp_min(SCORE_FLOOR))  # one half per direction
    losses = []
    for side in batch.sides:
        value = F.softplus(logits.logsumexp(side.dim) - scale * margin, threshold=50) / scale
        pull = _sum_by_anchor(attraction, side)
        # scaled so that the mean over anchors equals the mean over their pairs
        if side.matches is not None:
            valid = side.matches.valid.to(pull.dtype)
            pull = pull * (valid.sum() / (side.matches.positives * valid).sum().clamp_min(1))
        losses.append(_mean(_where_valid(value - pull, side), side))
    return losses[0] + losses[1]


def dcl(
    images: Tensor,
    texts: Tensor,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    temperature: float = 0.1,
    margin: float = 0.3,
    diversity: str | None = "std",
    epsilon: float = 0.1,
) -> Tensor:
    """Diversity-sensitive contrastive loss (CODER Eq. 5, Eq. 4 if ``diversity=None``), diversity
    detached.
    """
    batch = _compare(images, texts, image_ids, text_ids)
    attraction = temperature * torch.log1p(batch.pairs.clamp_min(SCORE_FLOOR))
    if diversity is None:  # there is one temperature, so both directions use the same logits
        logits = (batch.scores / temperature).masked_fill_(batch.mask, NEG_INF)
        exponents = [logits.logsumexp(side.dim) - margin / temperature for side in batch.sides]
    else:
        exponents = []
        for side in batch.sides:
            sharpness = 1 / (temperature * _diversity(batch, side, diversity, epsilon))
            logits = (batch.scores * sharpness.unsqueeze(side.dim)).masked_fill_(
                batch.mask, NEG_INF
            )
            exponents.append(logits.logsumexp(side.dim) - margin * sharpness)
    losses = []
    for side, exponent in zip(batch.sides, exponents, strict=True):
        pull = _sum_by_anchor(attraction, side)
        if side.matches is not None:
            pull = pull / side.matches.positives.clamp_min(1)
        value = temperature * F.softplus(exponent, threshold=50) - pull
        losses.append(_mean(_where_valid(value, side), side))
    return losses[0] + losses[1]


def memory_dcl(  # noqa: PLR0913 (the arguments of our loss)
    images: Tensor,
    texts: Tensor,
    image_keys: Tensor,
    text_keys: Tensor,
    memory_images: Tensor,
    memory_texts: Tensor,
    ids: Tensor,
    memory_ids: Tensor,
    *,
    temperature: float = 0.1,
    margin: float = 0.3,
    epsilon: float = 0.1,
) -> Tensor:
    """M-DCL (CODER Eq. 6) of N pairs with unique ids; memories (Q, D) are of unit length, diversity
    detached.
    """
    batch = _compare(images.detach(), texts.detach(), None, None)
    mask = ids[:, None] == memory_ids
    count = (~mask).sum(1).clamp_min(1)
    loss = images.new_zeros(())
    ours = ((images, text_keys, memory_texts), (texts, image_keys, memory_images))
    for side, (anchors, keys, memory) in zip(batch.sides, ours, strict=True):
        anchors = F.normalize(anchors, dim=1)
        scores = anchors @ memory.T
        with torch.no_grad():
            negatives = scores.masked_fill(mask, 0)
            mean = negatives.sum(1) / count
            spread = ((negatives.square().sum(1) / count) - mean.square()).clamp_min(1e-12).sqrt()
            raw = 1 + torch.exp(-epsilon / spread)
            diversity = (raw / raw.max() + _diversity(batch, side, "std", epsilon)) / 2
        sharpness = 1 / (temperature * diversity)
        logits = (scores * sharpness[:, None]).masked_fill(mask, NEG_INF)
        pull = torch.log1p((anchors * F.normalize(keys, dim=1)).sum(1).clamp_min(SCORE_FLOOR))
        push = F.softplus(logits.logsumexp(1) - margin * sharpness, threshold=50)
        loss = loss + temperature * (push - pull).mean()
    return loss


def uto(  # noqa: PLR0913 (the arguments of our loss)
    images: Tensor,
    texts: Tensor,
    image_keys: Tensor,
    text_keys: Tensor,
    memory_images: Tensor,
    memory_texts: Tensor,
    ids: Tensor,
    memory_ids: Tensor,
    *,
    scale: float = 90.0,
    margin: float = 0.5,
) -> Tensor:
    """UTO (USER Eq. 18-21) of N pairs with unique ids; memories (Q, D) are of unit length."""
    mask = ids[:, None] == memory_ids
    loss = hal(images, texts, scale=scale, margin=margin)
    for anchors, keys, memory in (
        (images, text_keys, memory_texts),
        (texts, image_keys, memory_images),
    ):
        anchors = F.normalize(anchors, dim=1)
        logits = (scale * (anchors @ memory.T)).masked_fill(mask, NEG_INF)
        pull = torch.log1p((anchors * F.normalize(keys, dim=1)).sum(1).clamp_min(SCORE_FLOOR))
        loss = (
            loss
            + (F.softplus(logits.logsumexp(1) - scale * margin, threshold=50) / scale - pull).mean()
        )
    return loss


def variance_aware(image_sets: Tensor, texts: Tensor, *, margin: float = 0.2) -> Tensor:
    """Variance-aware weighting loss (DVSE Eq. 11) of N images with K heads (N, K, D) and their one
    text each (N, D).
    """
    n = texts.shape[0]
    precision = torch.promote_types(texts.dtype, torch.float32)
    sets, ours = (F.normalize(x.to(precision), dim=-1).to(x.dtype) for x in (image_sets, texts))
    scores = torch.einsum("nkd,md->knm", sets, ours).to(precision)
    diagonal = torch.eye(n, dtype=torch.bool, device=scores.device)
    pairs = scores.diagonal(dim1=1, dim2=2)  # (K, N)
    negatives, zeroed = scores.masked_fill(diagonal, NEG_INF), scores.masked_fill(diagonal, 0)
    mean = zeroed.sum(2) / (n - 1)
    variance = (zeroed.square().sum(2) - (n - 1) * mean.square()) / (n - 2)
    sigma = 1 + variance.clamp_min(1e-12).sqrt()
    loss = scores.new_zeros(())
    for hardest in (negatives.amax(2), negatives.amax(1)):
        loss = (
            loss + ((margin - pairs + hardest).relu() / sigma.square() + sigma.log()).mean(1).sum()
        )
    return loss


def prototype_classification(images: Tensor, texts: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """PGC (CODER Eq. 7): one linear classifier for both sides."""
    return F.cross_entropy(images @ weight.T, ids) + F.cross_entropy(texts @ weight.T, ids)


def _compare(
    images: Tensor,
    texts: Tensor,
    image_ids: Tensor | None,
    text_ids: Tensor | None,
    scale: float = 1.0,
) -> Batch:
    """``scale`` · cosines, mask, positive pairs. Half-precision inputs: product in half, the rest
    in float32.
    """
    precision = torch.promote_types(images.dtype, torch.float32)
    rows, cols = F.normalize(images.to(precision), dim=-1), F.normalize(texts.to(precision), dim=-1)
    if scale != 1.0:
        rows = rows * scale
    scores = (rows.to(images.dtype) @ cols.to(texts.dtype).T).to(precision)
    n, m = scores.shape
    if image_ids is None and text_ids is None:
        if n != m:
            raise ValueError(
                f"image_ids and text_ids: needed for {n} images and {m} texts, got neither"
            )
        if n > 1:
            mask = torch.eye(n, dtype=torch.bool, device=scores.device)
            return Batch(scores, mask, scores.diagonal(), (Side(1, n, None), Side(0, n, None)))
    image_ids = torch.arange(n, device=scores.device) if image_ids is None else image_ids
    text_ids = torch.arange(m, device=scores.device) if text_ids is None else text_ids
    mask = image_ids[:, None] == text_ids
    pair_rows, pair_cols = mask.nonzero(as_tuple=True)
    sides = (_side(mask, 1, pair_rows, precision), _side(mask, 0, pair_cols, precision))
    return Batch(scores, mask, scores[pair_rows, pair_cols], sides)


def _side(mask: Tensor, dim: int, anchors: Tensor, dtype: torch.dtype) -> Side:
    candidates = mask.shape[dim]
    positives = mask.sum(dim, dtype=dtype)
    negatives = candidates - positives
    return Side(
        dim, candidates, Matches(anchors, positives, negatives, (positives > 0) & (negatives > 0))
    )


def _at_pairs(values: Tensor, side: Side) -> Tensor:
    """(A,) -> (P,): for each positive pair the value of its anchor."""
    return values if side.matches is None else values[side.matches.anchors]


def _sum_by_anchor(values: Tensor, side: Side) -> Tensor:
    """(P,) -> (A,): the sum over each anchor's positive pairs."""
    if side.matches is None:
        return values
    return torch.zeros_like(side.matches.positives).index_add(0, side.matches.anchors, values)


def _where_valid(values: Tensor, side: Side) -> Tensor:
    return values if side.matches is None else values.where(side.matches.valid, 0)


def _mean(values: Tensor, side: Side) -> Tensor:
    """Return the sum of all values, divided by the number of valid anchors."""
    if side.matches is None:
        return values.sum() / side.candidates
    return values.sum() / side.matches.valid.sum().clamp_min(1)


def _hinges_against_all(batch: Batch, side: Side, margin: float) -> Tensor:
    """Hinges of each positive pair against every negative of its anchor: P rows or columns of
    them.
    """
    scores, mask = batch.scores, batch.mask
    if side.matches is not None:
        other = 1 - side.dim
        scores = scores.index_select(other, side.matches.anchors)
        mask = mask.index_select(other, side.matches.anchors)
    return (scores - (batch.pairs - margin).unsqueeze(side.dim)).masked_fill_(mask, 0).relu_()


@torch.no_grad()
def _diversity(batch: Batch, side: Side, kind: str, epsilon: float) -> Tensor:
    """CODER Eq. 3 and supplement Eq. 8: one score per anchor, (A,), in (1/2, 1]."""
    one_of("diversity", kind, "std", "entropy")
    if kind == "std":
        if side.matches is None:
            count = side.candidates - 1
            total = batch.scores.sum(side.dim) - batch.pairs
        else:
            # Not the sum of all minus _sum_by_anchor(pairs): inductor (torch 2.13) then compiles
            # dcl to wrong gradients.
            count = side.matches.negatives.clamp_min(1)
            total = batch.scores.masked_fill(batch.mask, 0).sum(side.dim)
        deviations = (batch.scores - (total / count).unsqueeze(side.dim)).masked_fill_(
            batch.mask, 0
        )
        spread = torch.linalg.vector_norm(deviations, dim=side.dim) / count**0.5
    else:
        entropy = torch.special.entr(batch.scores.softmax(side.dim)).masked_fill_(batch.mask, 0)
        spread = entropy.sum(side.dim) / math.log(2)
    raw = 1 + torch.exp(-epsilon / spread.clamp_min(1e-6))
    return raw / raw.max()
