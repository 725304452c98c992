"""Answers in plain PyTorch on the whole matrix: the specification of the other engines.

Autograd differentiates them, any number of times, and a compiler fuses them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .inputs import Tile
from .question import ColumnsView, Question, RowsView, View


def whole_tile(scores: Tensor, other: Tensor | None = None) -> Tile:
    """Return a matrix (N, M), and another one beside it, as one tile."""
    n, m = scores.shape
    return Tile((slice(0, n), slice(0, m)), scores, other)


def view_of(question: Question, tile: Tile, side: int, slot: int = 0) -> View:
    """Return the whole matrix as a side sees it."""
    return ColumnsView(question, tile, slot) if side else RowsView(question, tile, slot)


def sums(question: Question, tile: Tile) -> Tensor:
    """Return the sums of a question, (A,) or (K, A), of a tile that is the whole matrix."""
    found: list[Tensor] = []
    for side in question.sides:
        total = torch.zeros((), dtype=tile.scores.dtype, device=tile.scores.device)
        for slot in range(question.slots):
            total = total + sums_of_view(view_of(question, tile, side, slot))
        found.append(total)
    sums = torch.cat(found, 1)
    return sums[0] if len(sums) == 1 else sums


def sums_of_view(view: View) -> Tensor:
    """Return the sums (K, A) of the terms over the candidates that count."""
    mask = excluded(view)
    z = view.affine()
    sums = []
    for term in view.question.terms:
        argument = z
        if term.slope is not None:
            # Of an excluded pair it could overflow, and 0 times inf is nan.
            argument = z.masked_fill(mask, 0.0)
        values = term(argument, *view.params())
        sums.append(values.masked_fill(mask, 0.0).sum(1))
    return torch.stack(sums)


def excluded(view: View) -> Tensor:
    """Return the bool mask (A, C) of candidates that do not count."""
    mask = torch.zeros_like(view.scores.detach(), dtype=torch.bool)
    return view.exclude_(mask, True)


def highest(question: Question, tile: Tile) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    found = []
    for side in question.sides:
        view = view_of(question, tile, side)
        found.append(view.affine().masked_fill(excluded(view), -math.inf).amax(1))
    return torch.cat(found)


def hardest(question: Question, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the highest score that counts of each anchor, and its candidate; -inf and -1 if none.

    The scores have their gradient.
    """
    values = []
    indices = []
    for side in question.sides:
        view = view_of(question, tile, side)
        mask = excluded(view)
        best, index = view.scores.detach().masked_fill(mask, -math.inf).max(1)
        value = view.scores.gather(1, index[:, None]).squeeze(1)
        empty = best == -math.inf
        values.append(value.masked_fill(empty, -math.inf))
        indices.append(index.masked_fill(empty, -1))
    return torch.cat(values), torch.cat(indices)


def sorted_excesses(question: Question, tile: Tile, margin: float) -> Tensor:
    """Return the (A,) sums of hinges of all positives against all negatives.

    Positives need not be listed: each candidate is treated as one, then masked. The negatives above
    its threshold are the last of the anchor's sorted negatives, and their sum is a cumulative one.
    """
    found = []
    for side in question.sides:
        view = view_of(question, tile, side)
        scores = view.scores
        negatives = scores.masked_fill(excluded(view), -math.inf)
        ordered = negatives.sort(dim=1).values
        sums = ordered.masked_fill(ordered == -math.inf, 0.0).flip(1).cumsum(1)
        thresholds = scores - margin
        below = torch.searchsorted(
            ordered.detach().contiguous(), thresholds.detach().contiguous(), right=True
        )
        count = scores.shape[1] - below
        above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
        positives = view_of(question._replace(over="positives"), tile, side)
        hinges = above - count * thresholds
        found.append(hinges.masked_fill(excluded(positives), 0.0).sum(1))
    return torch.cat(found)
