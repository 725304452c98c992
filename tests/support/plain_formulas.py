"""Losses with weights that the gradient takes for constants: the formulas in plain PyTorch, where a
``detach()`` shows which these are.

`check_loss` takes them as ``reference``: after the module, whose options they read, come its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support import oracle, oracle_contrast

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


def infonce(loss: Any, images: Tensor, texts: Tensor, *ids: Tensor, negatives: Any = None) -> Any:
    """Return InfoNCE, whose weights of hard negatives are constants."""
    names = [x.name for x in fields(oracle_contrast.Options)]
    options = oracle_contrast.Options(**{name: getattr(loss, name) for name in names})
    model = oracle_contrast.Model.of(images, texts, negatives, loss.normalize)
    numbers = [x.tolist() for x in ids]
    groups = oracle_contrast.Loss(model, model, options, *numbers).groups()
    values = [torch.stack(of_side) for of_side, _ in groups]
    counts = [torch.tensor(of_side) for _, of_side in groups]
    return reduced(values, counts, loss.reduction)


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
        temperatures = loss.temperature * diversities(scores, ids, candidate_ids)
        exponents = (scores - loss.margin) / temperatures[:, None]
        negatives = exponents.masked_fill(positive, NONE).logsumexp(1)
        floor = oracle.SCORE_FLOOR if loss.positive == "clamp" else 0.0
        logs = scores.clamp_min(floor).log1p() * positive
        attraction = logs.sum(1) / positive.sum(1).clamp_min(1)
        weight = loss.positive_weight
        if weight == "paper":
            weight = loss.temperature
        return loss.temperature * F.softplus(negatives) - weight * attraction

    return of_both_sides(loss, inputs, of_anchors)


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
