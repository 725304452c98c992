"""What a re-ranker may look at, and what it answers with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed import gather_parts, sum_over_processes
from ..engine.pairs import Pairs
from ..similarity import Similarity

SIDES = ("images", "texts")  # whose queries: image→text, text→image


class Direction(NamedTuple):
    """What a re-ranker may look at when the images, or the texts, are the queries. Labels are not part of it.

    With several processes, each has its own queries, which choose among the candidates of all, and compares its own
    candidates with all references: where ``shared``, what it computes for them is a part of the whole.
    """

    side: int  # 0: images ask; 1: texts
    queries: Similarity  # (queries, candidates)
    candidates: Similarity  # (candidates, references): the test queries or the bank's
    transductive: bool
    gallery: Tensor | None  # the bank of the candidates' own modality
    shared: bool = False
    first: tuple[int, int] = (0, 0)  # number of the first own query, and of the first own candidate, among those of all

    def of_all(self, x: Tensor) -> Tensor:
        """Return (B, ...) of all queries, or candidates, from that of each own one."""
        return gather_parts(x) if self.shared else x

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of the ``x`` of all processes; written over."""
        return sum_over_processes(x) if self.shared else x


class Bias(NamedTuple):
    """A rule by which candidates are ranked: ``factor S_qc + bias_c``."""

    bias: Tensor  # (candidates,), of each process's own where they are shared
    factor: float = 1.0  # above 0


# Another rule: a function of the (B, candidates) scores of some queries, which it may overwrite, and of the slice of
# these queries, that returns the scores to rank by.
Rule = Bias | Callable[[Tensor, slice], Tensor]


def unlabelled(sim: Similarity) -> Similarity:
    """Return the same scores without a gradient, nothing matching, so that every column is a negative."""
    matrix = sim._matrix.detach()
    rows, cols = (x.to(sim.device) for x in no_match(*matrix.shape))
    matrix.pairs = Pairs(matrix.shape, (rows, cols), sim.device)
    return sim._view(matrix, sim._side)


def against(sim: Similarity, cols: Tensor, more_rows: Tensor | None = None) -> Similarity:
    """Return the similarities of the same rows, with more below them, and other columns; nothing matches."""
    assert sim._inputs is not None
    rows = sim._inputs[0].detach()
    if more_rows is not None:
        rows = torch.cat([x.to(sim.device, sim.dtype) for x in (rows, more_rows)])  # neither is rounded
    engine: Any = sim.engine if sim.engine in ("tiled", "triton") else "auto"
    return Similarity(rows, cols, *no_match(len(rows), len(cols)), normalize=sim._matrix.bounded, engine=engine)


def as_similarity(scores: Tensor | Similarity) -> Similarity:
    """Return scores as a ``Similarity``, checked: re-ranking never asks who matches whom."""
    if isinstance(scores, Similarity):
        scores.check_finite()
        return scores
    n, m = (scores.shape[0], scores.shape[1]) if isinstance(scores, Tensor) and scores.dim() == 2 else (1, 1)
    return Similarity.from_scores(scores, torch.arange(n), torch.arange(m), check_finite=True)


def no_match(n: int, m: int) -> Sequence[Tensor]:
    """Return (N,) and (M,) ids by which no row matches a column."""
    return torch.arange(n + m).split((n, m))


def with_bank(candidates: Similarity, name: str, bank: Tensor) -> Similarity:
    """Return the similarities of the candidates, rows here, and the queries of the bank ``name``."""
    if candidates._inputs is not None:
        return against(candidates, fitting(bank, name, candidates))
    bank = bank.to(candidates.device, candidates.dtype)
    bank, size = bank.T if name == "images" else bank, candidates.shape[0]
    if bank.shape[0] != size:
        raise ValueError(f"{name}: expected scores with the {size} candidates, got a bank of {bank.shape[0]}")
    return Similarity.from_scores(bank, *no_match(*bank.shape))


def fitting(bank: Tensor, name: str, sim: Similarity) -> Tensor:
    """Return the bank ``name`` of embeddings in the type of scores: half precision would round a float32 one."""
    assert sim._inputs is not None
    dim = sim._inputs[0].shape[1]
    if bank.shape[1] != dim:
        raise ValueError(f"{name}: expected embeddings of dimension {dim}, got a bank of {bank.shape[1]}")
    return bank.to(sim.device, sim.dtype)
