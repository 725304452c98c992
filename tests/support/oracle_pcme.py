"""PCME++ in plain PyTorch, pair by pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from support.reference import exists, matches, unit


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
        return torch.where(counts, torch.stack(values) + vib_weight * divergence(mean, log), 0.0)

    rows = of_side(distance, positive, images, images_log, image_exists, text_exists)
    cols = of_side(distance.T, positive.T, texts, texts_log, text_exists, image_exists)
    return rows, cols
