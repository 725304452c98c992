"""Losses with weights that the gradient takes for constants: the formulas in plain PyTorch, where a
``detach()`` shows which these are.

`check_loss` takes them as ``reference``: after the module, whose options they read, come its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import itrloss
from support import oracle, oracle_embedders, oracle_more
from support.reference import exists, matches, unit

NONE = -1e5  # the exponent of a pair that does not count; with -inf, gradients would be nan
OfAnchors = Callable[[Tensor, Tensor, Tensor], Tensor]


def reduced(values: Sequence[Tensor], counts: Sequence[Tensor], reduction: str) -> Any:
    """Return the values of one direction's anchors, or of both, by a loss's reduction."""
    if reduction == "none":
        return values[0] if len(values) == 1 else tuple(values)
    sums = [x.sum() for x in values]
    if reduction == "mean":
        sums = [x / which.sum().clamp_min(1) for x, which in zip(sums, counts, strict=True)]
    return torch.stack(sums).sum()


def of_both_sides(loss: Any, inputs: Sequence[Tensor], of_anchors: OfAnchors) -> Any:
    """Return a loss of images, texts and their ids.

    ``of_anchors(scores, ids, candidate_ids)`` are the (N,) values of the anchors of (N, M) scores.
    Anchors without a positive or without a negative have the value 0, and do not count in a mean.
    """
    images, texts = (F.normalize(x, dim=1) for x in inputs[:2])
    image_ids, text_ids = inputs[2:]
    scores = images @ texts.T
    values = []
    counts = []
    for sides in ((scores, image_ids, text_ids), (scores.T, text_ids, image_ids)):
        positive = sides[1][:, None] == sides[2]
        has_both = positive.any(1) & ~positive.all(1)
        values.append(of_anchors(*sides).where(has_both, torch.tensor(0.0)))
        counts.append(has_both)
    return reduced(values, counts, loss.reduction)


INFONCE = ["temperature", "directions", "in_batch", "image_image", "text_text", "joint"]
INFONCE += ["margin", "relative", "hardness", "normalize", "reduction"]


def infonce(
    loss: Any,
    images: Tensor,
    texts: Tensor,
    image_ids: Tensor,
    text_ids: Tensor,
    negatives: Tensor | None = None,
) -> Any:
    """Return InfoNCE, whose weights of hard negatives are constants."""
    options = {name: getattr(loss, name) for name in INFONCE}
    ids = {"rows": image_ids.tolist(), "cols": text_ids.tolist()}
    return oracle_embedders.contrastive(images, texts, negatives=negatives, **ids, **options)


def dcl_values(
    loss: Any,
    near: Tensor,  # (A, P) scores of anchors with those among which their positives are
    positive: Tensor,  # (A, P) bool
    far: Tensor,  # (A, M) scores with those among which their negatives are
    negative: Tensor,  # (A, M) bool
    diversities: Tensor,  # (A,)
) -> Tensor:
    """Return the (A,) values of anchors by DCL."""
    temperatures = loss.temperature * diversities
    exponents = (far - loss.margin) / temperatures[:, None]
    repulsion = F.softplus(exponents.masked_fill(~negative, NONE).logsumexp(1))
    floor = oracle.SCORE_FLOOR if loss.positive == "clamp" else 0.0
    logs = near.clamp_min(floor).log1p() * positive
    attraction = logs.sum(1) / positive.sum(1).clamp_min(1)
    weight = loss.positive_weight
    if weight == "paper":
        weight = loss.temperature
    return loss.temperature * repulsion - weight * attraction


def dcl(loss: Any, *inputs: Tensor) -> Any:
    """Return DCL, whose diversities are constants."""

    def diversities(scores: Tensor, ids: Tensor, candidate_ids: Tensor) -> Tensor:
        arrays = [x.detach().numpy() for x in (scores, ids, candidate_ids)]
        if loss.diversity == "std":
            return torch.from_numpy(oracle.std_diversity(*arrays, loss.epsilon))
        temperature = loss.entropy_temperature
        return torch.from_numpy(oracle.entropy_diversity(*arrays, loss.epsilon, temperature))

    def of_anchors(scores: Tensor, ids: Tensor, candidate_ids: Tensor) -> Tensor:
        positive = ids[:, None] == candidate_ids
        constant = diversities(scores, ids, candidate_ids)
        return dcl_values(loss, scores, positive, scores, ~positive, constant)

    return of_both_sides(loss, inputs, of_anchors)


def memory_dcl(
    loss: Any,
    images: Tensor,
    texts: Tensor,
    image_keys: Tensor,
    text_keys: Tensor,
    memory: itrloss.CoupledMemory,
    image_ids: Tensor,
    text_ids: Tensor,
) -> Any:
    """Return M-DCL, whose diversities are constants."""
    count = len(memory)
    stored = memory.images[:count], memory.texts[:count]
    memory_ids = memory.ids[:count]
    given = (images, texts, *stored, image_ids, text_ids)
    estimated_in = memory_ids if loss.diversity_from == "both" else memory_ids[:0]
    arrays = [x.detach().numpy() for x in (*given, estimated_in)]
    options = loss.diversity, loss.epsilon, loss.entropy_temperature
    of_images, of_texts = oracle_more.memory_diversity(*arrays, *options)
    keys = (image_keys, text_keys) if loss.positive_from == "key" else (images, texts)
    values = []
    counts = []
    for queries, own_keys, entries, ids, key_ids, diversities in (
        (images, keys[1], stored[1], image_ids, text_ids, of_images),
        (texts, keys[0], stored[0], text_ids, image_ids, of_texts),
    ):
        units, near, far = (F.normalize(x, dim=1) for x in (queries, own_keys, entries))
        positive = ids[:, None] == key_ids
        negative = ids[:, None] != memory_ids
        constant = torch.from_numpy(diversities)
        of_side = dcl_values(loss, units @ near.T, positive, units @ far.T, negative, constant)
        has_both = positive.any(1) & negative.any(1)
        values.append(of_side.where(has_both, torch.tensor(0.0)))
        counts.append(has_both)
    return reduced(values, counts, loss.reduction)


def circle(loss: Any, *inputs: Tensor) -> Any:
    """Return the circle loss, whose weights α are constants."""

    def of_anchors(scores: Tensor, ids: Tensor, candidate_ids: Tensor) -> Tensor:
        positive = ids[:, None] == candidate_ids
        margin = loss.margin
        of_negatives = (scores.detach() + margin).relu() * (scores - margin)
        of_positives = -(1 + margin - scores.detach()).relu() * (scores - 1 + margin)
        push = (loss.scale * of_negatives).masked_fill(positive, NONE).logsumexp(1)
        pull = (loss.scale * of_positives).masked_fill(~positive, NONE).logsumexp(1)
        return F.softplus(push + pull)

    return of_both_sides(loss, inputs, of_anchors)


def distances(images, texts, images_log, texts_log):
    """The expected squared distances (N, M) of two samples, pair by pair."""
    rows = []
    for x, s in zip(images, images_log.exp(), strict=True):
        row = []
        for y, t in zip(texts, texts_log.exp(), strict=True):
            between_means = ((x - y) ** 2).sum()
            row.append(between_means + s.sum() + t.sum())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def of_anchor(distance, positive, scale, shift, pseudo_weight):
    """The mean over candidates of the binary cross-entropies, with pseudo-positives: those as near
    as the positives on average.
    """
    match = -F.logsigmoid(shift - scale * distance)
    miss = -F.logsigmoid(scale * distance - shift)
    near = positive
    if positive.any():
        radius = distance[positive].mean()
        near = positive | (distance <= radius)
    labelled = torch.where(positive, match, miss)
    pseudo_labelled = torch.where(near, match, miss)
    return (labelled + pseudo_weight * pseudo_labelled).mean()


def divergence(mean, log):
    """The divergence of each distribution from the standard normal one, per dimension."""
    return 0.5 * (mean**2 + log.exp() - log - 1).mean(1)


def pcme(inputs, ids, scale=5.0, shift=5.0, pseudo_weight=0.1, vib_weight=1e-4, normalize=True):
    """The values of each image and text by PCME++."""
    images, texts, images_log, texts_log = inputs
    if normalize:
        images = unit(images)
        texts = unit(texts)
    distance = distances(images, texts, images_log, texts_log)
    positive = matches(ids, len(images), len(texts))

    image_exists, text_exists = (
        exists(own, len(x)) for own, x in zip(ids, (images, texts), strict=True)
    )

    def of_side(distance, positive, mean, log, own, others):
        """Values of those that exist and have candidates, 0 of others."""
        values = [
            of_anchor(row[others], right[others], scale, shift, pseudo_weight)
            for row, right in zip(distance, positive, strict=True)
        ]
        counts = own & others.any()
        return (torch.stack(values) + vib_weight * divergence(mean, log)).where(counts, 0.0)

    rows = of_side(distance, positive, images, images_log, image_exists, text_exists)
    cols = of_side(distance.T, positive.T, texts, texts_log, text_exists, image_exists)
    return rows, cols
