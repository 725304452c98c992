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


def of_anchor(distance, label, scale, shift, pseudo_weight):
    """The mean over candidates of the binary cross-entropies, with pseudo-positives: those as near
    as the matches of the largest label on average, which have this label.
    """
    match = -F.logsigmoid(shift - scale * distance)
    miss = -F.logsigmoid(scale * distance - shift)
    pseudo = label
    if label.any():
        radius = distance[label == label.max()].mean()
        pseudo = torch.where(distance <= radius, label.max(), label)
    labelled = label * match + (1 - label) * miss
    pseudo_labelled = pseudo * match + (1 - pseudo) * miss
    return (labelled + pseudo_weight * pseudo_labelled).mean()


def divergence(mean, log):
    """The divergence of each distribution from the standard normal one, per dimension."""
    return 0.5 * (mean**2 + log.exp() - log - 1).mean(1)


def labels_of(ids, n, m):
    """The labels (N, M) of ids: 1 for a match, 0 for a negative, nan for what does not exist."""
    row_exists, col_exists = (exists(x, size) for x, size in zip(ids, (n, m), strict=True))
    labels = matches(ids, n, m).double()
    return labels.masked_fill(~(row_exists[:, None] & col_exists), torch.nan)


def pcme(
    inputs,
    ids,
    scale=5.0,
    shift=5.0,
    pseudo_weight=0.1,
    vib_weight=1e-4,
    normalize=True,
    labels=None,
):
    """The values of each image and text by PCME++; ``labels``: (N, M), in place of ids."""
    images, texts, images_log, texts_log = inputs
    if normalize:
        images = unit(images)
        texts = unit(texts)
    distance = distances(images, texts, images_log, texts_log)
    if labels is None:
        labels = labels_of(ids, len(images), len(texts))

    def of_side(distance, labels, mean, log):
        """Values of those that have candidates, 0 of others."""
        has_candidates = ~labels.isnan()
        values = [
            of_anchor(row[counts], label[counts], scale, shift, pseudo_weight)
            for row, label, counts in zip(distance, labels, has_candidates, strict=True)
        ]
        values = torch.stack(values) + vib_weight * divergence(mean, log)
        return torch.where(has_candidates.any(1), values, 0.0)

    rows = of_side(distance, labels, images, images_log)
    cols = of_side(distance.T, labels.T, texts, texts_log)
    return rows, cols
