"""How losses reduce their per-anchor values, and which anchors count."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .similarity import Similarity

Reduction = Literal["mean", "sum", "none"]


class AnchorCounts:
    """Which anchors take part, and how many positives each has; one vector (N + M,) holds the rows, then the columns.

    One-to-one batches need no counting.
    """

    def __init__(self, sim: Similarity):
        self.shape = n, m = sim.shape
        self.one_to_one = sim.one_to_one
        if self.one_to_one:
            self.active = n > 1
            return
        counts = sim.both.positive_counts
        positives = [p.clamp_min(1) for p in counts]
        valid = [(p > 0) & (p < size) for p, size in zip(counts, (m, n), strict=True)]
        self.pairs = [(p * v).sum().clamp_min(1) for p, v in zip(positives, valid, strict=True)]
        self.anchors = [v.sum().clamp_min(1) for v in valid]
        self.positives, self.valid = torch.cat(positives), torch.cat(valid)

    def mean_of_positives(self, sums: Tensor) -> Tensor:
        """Per anchor, from its sum over positives."""
        return sums if self.one_to_one else sums / self.positives

    def mean_over_pairs(self, sums: Tensor) -> Tensor:
        """Scaled so that the mean over a side's valid anchors is the mean over their positive pairs."""
        if self.one_to_one:
            return sums
        # In this order: a quotient of counts would be float32.
        sides = zip(sums.split(self.shape), self.anchors, self.pairs, strict=True)
        return torch.cat([x * anchors / pairs for x, anchors, pairs in sides])

    def reduce(self, values: Tensor, reduction: Reduction) -> Tensor | tuple[Tensor, Tensor]:
        """The two means added, the sum of both, or both as they are; an anchor that takes no part counts nothing."""
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
        if not self.one_to_one:
            values = torch.where(self.valid, values, 0.0)
        elif not self.active:  # a single pair has no negatives
            values = values * 0
        if reduction == "sum":
            return values.sum()
        if reduction == "mean" and self.one_to_one:
            return values.sum() / self.shape[0]
        rows, cols = values.split(self.shape)
        return rows.sum() / self.anchors[0] + cols.sum() / self.anchors[1] if reduction == "mean" else (rows, cols)


def reduce_valid(sides: list[tuple[Tensor, Tensor]], reduction: Reduction) -> Tensor | tuple[Tensor, Tensor]:
    """As :meth:`AnchorCounts.reduce`, of the values of images and texts, each with whether it counts (and 0 if not)."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    (rows, row_valid), (cols, col_valid) = sides
    if reduction == "mean":
        return rows.sum() / row_valid.sum().clamp_min(1) + cols.sum() / col_valid.sum().clamp_min(1)
    return rows.sum() + cols.sum() if reduction == "sum" else (rows, cols)
