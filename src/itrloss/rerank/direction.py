"""The input and output of a re-ranker's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed import gather_parts, sum_over_processes
from ..engine.pairs import Pairs
from ..similarity import Similarity

SIDES = ("images", "texts")  # the queries of image→text and of text→image


class Direction(NamedTuple):
    """The similarities that a re-ranker sees in one direction, image→text or text→image; no labels.

    In a job of several processes, ``queries`` has this process's queries and the candidates of all processes.
    ``candidates`` has this process's candidates (all of them unless ``shared``) and all references.
    """

    side: int  # 0: image→text; 1: text→image
    queries: Similarity  # (queries, candidates)
    candidates: Similarity  # (candidates, references): the references are the test queries or a bank
    transductive: bool  # whether the references are the test queries
    gallery: Tensor | None  # the bank of the candidates' own modality
    shared: bool = False  # whether each process computes the values of its own candidates alone
    first: tuple[int, int] = (0, 0)  # index of this process's first query and first candidate among all

    def of_all(self, x: Tensor) -> Tensor:
        """Return the values of all processes' queries or candidates, from ``x`` (B, ...) of this process's."""
        return gather_parts(x) if self.shared else x

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all processes, in place."""
        return sum_over_processes(x) if self.shared else x


class Bias(NamedTuple):
    """A rule that ranks candidates by ``factor S_qc + bias_c``."""

    bias: Tensor  # (candidates,); this process's candidates if the direction is shared
    factor: float = 1.0  # above 0


# A rule is a Bias, or a function f(scores, rows) that returns (B, candidates) scores to rank by: ``scores`` are those
# of the queries in the slice ``rows``, and may be overwritten.
Rule = Bias | Callable[[Tensor, slice], Tensor]


def unlabelled(sim: Similarity) -> Similarity:
    """Return the same scores without a gradient and without positives."""
    matrix = sim._matrix.detach()
    rows, cols = (x.to(sim.device) for x in no_match(*matrix.shape))
    matrix.pairs = Pairs(matrix.shape, (rows, cols), sim.device)
    return sim._view(matrix, sim._side)


def against(sim: Similarity, cols: Tensor, more_rows: Tensor | None = None) -> Similarity:
    """Return the similarities of the rows of ``sim``, and of ``more_rows``, with ``cols``, without positives."""
    assert sim._inputs is not None
    rows = sim._inputs[0].detach()
    if more_rows is not None:
        rows = torch.cat([x.to(sim.device, sim.dtype) for x in (rows, more_rows)])  # neither is rounded
    engine: Any = sim.engine if sim.engine in ("tiled", "triton") else "auto"
    return Similarity(rows, cols, *no_match(len(rows), len(cols)), normalize=sim._matrix.bounded, engine=engine)


def as_similarity(scores: Tensor | Similarity) -> Similarity:
    """Return checked scores as a ``Similarity``, whose ids re-ranking ignores."""
    if isinstance(scores, Similarity):
        scores.check_finite()
        return scores
    n, m = (scores.shape[0], scores.shape[1]) if isinstance(scores, Tensor) and scores.dim() == 2 else (1, 1)
    return Similarity.from_scores(scores, torch.arange(n), torch.arange(m), check_finite=True)


def no_match(n: int, m: int) -> Sequence[Tensor]:
    """Return (N,) and (M,) ids with which no row matches a column."""
    return torch.arange(n + m).split((n, m))


def with_bank(candidates: Similarity, name: str, bank: Tensor) -> Similarity:
    """Return the similarities of the candidates (rows) with the queries of the bank ``name``, images or texts."""
    if candidates._inputs is not None:
        return against(candidates, fitting(bank, name, candidates))
    bank = bank.to(candidates.device, candidates.dtype)
    bank, size = bank.T if name == "images" else bank, candidates.shape[0]
    if bank.shape[0] != size:
        raise ValueError(f"{name}: expected scores with the {size} candidates, got a bank of {bank.shape[0]}")
    return Similarity.from_scores(bank, *no_match(*bank.shape))


def fitting(bank: Tensor, name: str, sim: Similarity) -> Tensor:
    """Return a bank of embeddings in the dtype of the scores: half precision would round a float32 bank."""
    assert sim._inputs is not None
    dim = sim._inputs[0].shape[1]
    if bank.shape[1] != dim:
        raise ValueError(f"{name}: expected embeddings of dimension {dim}, got a bank of {bank.shape[1]}")
    return bank.to(sim.device, sim.dtype)
