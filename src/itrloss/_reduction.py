"""How losses reduce their per-anchor values, and which anchors count."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .similarity import Similarity

Reduction = Literal["mean", "sum", "none"]


class AnchorCounts:
    """Which anchors take part, and how many positives each has. One-to-one batches need no counting."""

    def __init__(self, sim: Similarity):
        n, m = sim.shape
        self.one_to_one = sim.one_to_one
        if self.one_to_one:
            self.active = n > 1
            return
        positives = sim.both.positive_counts
        self.positives = [p.clamp_min(1) for p in positives]
        self.valid = [(p > 0) & (p < size) for p, size in zip(positives, (m, n), strict=True)]
        self.pairs = [(p * v).sum().clamp_min(1) for p, v in zip(positives, self.valid, strict=True)]
        self.anchors = [v.sum().clamp_min(1) for v in self.valid]

    def mean_of_positives(self, sums: Tensor, side: int) -> Tensor:
        """Per anchor, from its sum over positives."""
        return sums if self.one_to_one else sums / self.positives[side]

    def mean_over_pairs(self, sums: Tensor, side: int) -> Tensor:
        """Scaled so that the mean over valid anchors is the mean over their positive pairs."""
        return (
            sums if self.one_to_one else sums * self.anchors[side] / self.pairs[side]
        )  # a quotient of counts would be float32

    def reduce(self, rows: Tensor, cols: Tensor, reduction: Reduction) -> Tensor | tuple[Tensor, Tensor]:
        """The two means added, the sum of both, or both as they are; an anchor that takes no part counts nothing."""
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
        if self.one_to_one:
            if not self.active:  # a single pair has no negatives
                rows, cols = rows * 0, cols * 0
            if reduction != "none":
                both = rows + cols
                return both.mean() if reduction == "mean" else both.sum()
        else:
            rows, cols = (torch.where(v, x, 0.0) for v, x in zip(self.valid, (rows, cols), strict=True))
            if reduction == "mean":
                return rows.sum() / self.anchors[0] + cols.sum() / self.anchors[1]
        return rows.sum() + cols.sum() if reduction == "sum" else (rows, cols)


def reduce_valid(sides: list[tuple[Tensor, Tensor]], reduction: Reduction) -> Tensor | tuple[Tensor, Tensor]:
    """As :meth:`AnchorCounts.reduce`, of the values of images and texts, each with whether it counts (and 0 if not)."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    (rows, row_valid), (cols, col_valid) = sides
    if reduction == "mean":
        return rows.sum() / row_valid.sum().clamp_min(1) + cols.sum() / col_valid.sum().clamp_min(1)
    return rows.sum() + cols.sum() if reduction == "sum" else (rows, cols)
