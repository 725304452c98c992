"""The input and output of a re-ranker's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed import gather
from ..distributed.collectives import total
from ..similarity import Similarity

SIDES = ("images", "texts")  # the queries of image→text and of text→image


class Direction(NamedTuple):
    """The similarities that a re-ranker sees in one direction, image→text or text→image; no labels.

    In a job of several processes, ``queries`` has this process's queries and the candidates of all
    processes. ``candidates`` has this process's candidates (all of them unless ``shared``) and all
    references.
    """

    side: int  # 0: image→text; 1: text→image
    queries: Similarity  # (queries, candidates)
    # (candidates, references): the references are the test queries or a bank
    candidates: Similarity
    transductive: bool  # whether the references are the test queries
    gallery: Tensor | None  # the bank of the candidates' own modality
    shared: bool = False  # whether each process computes the values of its own candidates alone
    # index of this process's first query and first candidate among all
    first: tuple[int, int] = (0, 0)
    group: Any = None  # of the processes

    def of_all(self, x: Tensor) -> Tensor:
        """Return the values of all processes' queries or candidates, from ``x`` (B, ...) of this
        process's.
        """
        return gather(x, self.group) if self.shared else x

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all processes."""
        return total(x, self.group) if self.shared else x


class Bias(NamedTuple):
    """A rule that ranks candidates by ``factor S_qc + bias_c``."""

    bias: Tensor  # (candidates,); this process's candidates if the direction is shared
    factor: float = 1.0  # above 0

    def __call__(self, scores: Tensor, rows: slice) -> Tensor:
        """Return re-ranked scores (B, candidates), which overwrite the given ones."""
        return scores.mul_(self.factor).add_(self.bias.to(scores))


Rule = Callable[[Tensor, slice], Tensor]  # a bias or another function


def unlabelled(sim: Similarity) -> Similarity:
    """Return the same scores without a gradient and without positives."""
    return sim.relabelled(*_no_match(sim.shape, sim.device))


def against(sim: Similarity, bank: Tensor, more_rows: Tensor | None = None) -> Similarity:
    """Return the similarities of the rows of ``sim`` and ``more_rows`` with a :func:`fitting` bank;
    no positives.
    """
    if sim.embeddings is None:
        return Similarity.from_scores(bank, *_no_match(bank.shape, sim.device))
    rows = sim.embeddings[0]
    row_bias = None if sim.bias is None else sim.bias[0]
    if more_rows is not None:
        rows = torch.cat([rows.to(more_rows.dtype), more_rows])  # neither is rounded
        if row_bias is not None:  # a bank's items have no bias
            row_bias = torch.cat([row_bias, row_bias.new_zeros(len(more_rows))])
    engine: Any = sim.engine if sim.engine in ("tiled", "triton") else "auto"
    ids = _no_match((len(rows), len(bank)), sim.device)
    bias = row_bias, None
    return Similarity(rows, bank, *ids, normalize=sim.normalizes, engine=engine, bias=bias)


def fitting(bank: Tensor, side: int, sim: Similarity) -> Tensor:
    """Return the bank of a side as (B, D) embeddings or, if ``sim`` is of scores, (C, B) scores
    with the candidates.

    In the dtype of the scores, as half precision would round a float32 bank. Raises an error if the
    bank does not fit.
    """
    axis = 1 - side
    size = sim.shape[axis]
    expected = f"scores with the {size} candidates"
    if sim.embeddings is not None:
        axis = 1
        size = sim.embeddings[0].shape[1]
        expected = f"embeddings of dimension {size}"
    if bank.shape[axis] != size:
        raise ValueError(f"{SIDES[side]}: expected {expected}, got a bank of {bank.shape[axis]}")
    bank = bank.to(sim.device, sim.dtype)
    return bank.T if sim.embeddings is None and side == 0 else bank


def _no_match(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids of rows and columns with which none match."""
    rows, cols = torch.arange(sum(shape), device=device).split(tuple(shape))
    return rows, cols
