"""The input and output of a re-ranker's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.products import full_float32, rounds_float32
from ..engine.vectors import full_precision
from ..metrics.matching import Part
from ..similarity import Similarity

SIDES = ("images", "texts")  # the queries of image→text and of text→image
# Scores that a pass in float64 takes at once: they fit into a cache, which halves its time. Its
# results are written in place: kept from each block, they would lie between the blocks and fragment
# the heap, by 200 MB for 5000 x 25 000 scores.
AT_ONCE = 2**18


class Direction(NamedTuple):
    """The similarities that a re-ranker sees in one direction, image→text or text→image; no labels.

    Queries and candidates that do not exist (:data:`itrloss.NO_ID`) are not among them.
    """

    side: int  # 0: image→text; 1: text→image
    queries: Similarity  # (queries, candidates)
    # (candidates, references): the references are the test queries or a bank
    candidates: Similarity
    transductive: bool  # whether the references are the test queries
    gallery: Tensor | None  # the bank of the candidates' own modality
    numbers: tuple[Tensor, Tensor]  # (queries,) and (candidates,), their indices in the input


class Bias(NamedTuple):
    """A rule that ranks candidates by ``factor S_qc + bias_c``."""

    bias: Tensor  # (candidates,)
    factor: float = 1.0  # above 0

    def __call__(self, scores: Tensor, rows: slice) -> Tensor:
        """Return re-ranked scores (B, candidates), in float64 if the bias is."""
        return torch.add(self.bias, scores, alpha=self.factor)


Rule = Callable[[Tensor, slice], Tensor]  # a bias or another function


def unlabelled(sim: Similarity) -> Similarity:
    """Return the same scores without a gradient and without positives.

    Embeddings that autocast or TF32 may have rounded for a loss are taken as they were passed in.
    """
    ids = no_match(sim.shape, sim.device)
    if sim.embeddings is None:
        return sim.relabelled(*ids)
    is_rounded = any(vectors.is_rounded for vectors in sim.vectors)
    if not is_rounded and not rounds_float32(sim.device):
        return sim.relabelled(*ids)
    images, texts = sim.embeddings
    engine = sim.engine_for_others
    with full_precision(images):
        return Similarity(
            images, texts, *ids, normalize=sim.normalizes, engine=engine, bias=sim.bias
        ).detach()


def against(sim: Similarity, bank: Tensor, more_rows: Tensor | None = None) -> Similarity:
    """Return the similarities of the rows of ``sim`` and ``more_rows`` with a :func:`fitting` bank;
    no positives.
    """
    if sim.embeddings is None:
        return Similarity.from_scores(bank, *no_match(bank.shape, sim.device))
    rows = sim.embeddings[0]
    row_bias = None if sim.bias is None else sim.bias[0]
    if more_rows is not None:
        rows = torch.cat([rows.to(more_rows.dtype), more_rows])  # neither is rounded
        if row_bias is not None:  # a bank's items have no bias
            row_bias = torch.cat([row_bias, row_bias.new_zeros(len(more_rows))])
    ids = no_match((len(rows), len(bank)), sim.device)
    engine = sim.engine_for_others
    bias = row_bias, None
    with full_precision(rows):  # autocast would round them
        return Similarity(rows, bank, *ids, normalize=sim.normalizes, engine=engine, bias=bias)


def log_sum_exp(sim: Similarity, scale: float, cols: Tensor | None = None) -> Tensor:
    """Return (N,) float64 ``log sum_j exp(scale S_ij + cols_j)``, without holding the scores.

    Logits times a scale are thousands, and float32 would lose the digits that tell them apart.
    """
    sums = torch.empty(sim.shape[0], dtype=torch.float64, device=sim.device)
    for rows, block in sim.blocks(AT_ONCE):
        exponents = block.double().mul_(scale)
        if cols is not None:
            exponents.add_(cols)
        sums[rows] = exponents.logsumexp(1)
    return sums


def reference_sums(candidates: Similarity, scale: float) -> Tensor:
    """Return the (N,) log-sum-exp of each candidate's scores with the references.

    Given scores are taken to be exact, and summed in float64. Those of embeddings are themselves
    rounded to float32, and so are their sums if scales are usual: with a small scale they are the
    logarithm of a number of references, but for the last digits; with a large one they are the
    highest score, from which some differ by less than its rounding.
    """
    if candidates.embeddings is None or not 1 <= scale <= 100:
        return log_sum_exp(candidates, scale)
    with full_float32(candidates.device):
        return candidates.logsumexp(scale)


def fitting(bank: Tensor, side: int, part: Part) -> Tensor:
    """Return the bank of a side as (B, D) embeddings or, of scores, as (C, B) scores with the
    candidates of a part.

    In the dtype of the scores, as half precision would round a float32 bank; scores in half
    precision stay so, as they are converted by blocks. Raises an error if the bank does not fit.
    """
    sim = part.sim
    axis = 1 - side
    size = part.shape[axis]
    expected = f"scores with the {size} candidates"
    if sim.embeddings is not None:
        axis = 1
        size = sim.embeddings[0].shape[1]
        expected = f"embeddings of dimension {size}"
    if bank.shape[axis] != size:
        raise ValueError(f"{SIDES[side]}: expected {expected}, got a bank of {bank.shape[axis]}")
    if sim.embeddings is not None:
        return bank.to(sim.device, sim.dtype)
    bank = bank.to(sim.device)
    candidates = part.rows if side else part.cols
    bank = bank if side else bank.T
    return bank if len(candidates) == size else bank[candidates]


def no_match(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids of rows and columns with which none match."""
    rows, cols = torch.arange(sum(shape), device=device).split(tuple(shape))
    return rows, cols
