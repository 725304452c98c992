"""Scores of listed pairs, and their gradient, which goes straight to the vectors of the pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Inputs, Side, taken
from .relation import add_segments_

GATHERED = 2**18  # elements of gathered embeddings that are held at once
ACCELERATOR_GATHERED = 2**22

Index = Tensor | None  # (P,) the row, or the column, of each pair; None: row p of pair p


class ListedPairs(NamedTuple):
    """Pairs of rows and columns, and the gradient of their scores."""

    rows: Index
    cols: Index
    grad: Tensor  # (P,)

    def add_to_(self, scores: Tensor) -> None:
        """Add the gradient of the pairs to the gradient of all scores (N, M)."""
        if self.rows is None or self.cols is None:
            scores.diagonal().add_(self.grad)
        else:
            scores.index_put_((self.rows, self.cols), self.grad, accumulate=True)

    def add_by_side(self, total: Tensor, side: int) -> Tensor:
        """Add the gradient of the pairs to the gradient of a side's biases (N,); return it."""
        index = self.cols if side else self.rows
        if index is None:
            total[: len(self.grad)] += self.grad
            return total
        return add_segments_(total, index, self.grad)


def pair_scores(inputs: Inputs, i: Index, j: Index) -> Tensor:
    """Return the (P,) scores of rows i with columns j, without a gradient."""
    if inputs.scores is not None:
        if i is None or j is None:
            return inputs.scores.diagonal().clone()
        return inputs.scores[i, j]
    rows = inputs.rows
    cols = inputs.cols
    size = len(rows.like) if i is None else len(i)
    scores = torch.empty(size, dtype=inputs.dtype, device=inputs.like.device)
    for part in gathered_parts(size, rows.like):
        left = gathered(rows, i, part)
        right = gathered(cols, j, part)
        torch.sum(left * right, 1, out=scores[part])
    if rows.bias is not None:
        scores += taken(rows.bias, i)
    if cols.bias is not None:
        scores += taken(cols.bias, j)
    return scores


def gathered(side: Side, index: Index, part: slice) -> Tensor:
    """Return the vectors (p, D) of some of the pairs, in the compute dtype, at unit length."""
    if index is None:
        return side.vectors(part)
    which = index[part]
    own = Side(taken(side.x, which), taken(side.inv, which), taken(side.unit, which), None)
    return own.all_vectors()


def gathered_parts(size: int, x: Tensor) -> list[slice]:
    """Return slices of as many pairs as vectors like ``x`` (..., D) are gathered at once."""
    most = GATHERED if x.device.type == "cpu" else ACCELERATOR_GATHERED
    step = max(1, most // max(1, x.shape[1]))
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


def add_pair_gradient(
    total: Tensor | None,  # (N, D), zeros if None
    listed: ListedPairs,
    inputs: Inputs,
    side: int,
) -> Tensor:
    """Add the gradient of a side's unit vectors, ``sum_p grad_p y_p``; return it.

    The sum is over the pairs of a vector, and y_p is the unit vector of its partner.
    """
    own = listed.rows
    other = listed.cols
    if side == 1:
        own = listed.cols
        other = listed.rows
    partners = inputs.sides(side)[1]
    if total is None and own is None and other is None:
        return partners.all_vectors() * listed.grad[:, None]
    if total is None:
        size = inputs.shape[side]
        total = listed.grad.new_zeros(size, partners.like.shape[1])
    for part in gathered_parts(len(listed.grad), partners.like):
        vectors = gathered(partners, other, part)
        weight = listed.grad[part, None]
        if own is None:
            total[part].addcmul_(vectors, weight)
        else:
            add_segments_(total, own[part], vectors * weight)
    return total
