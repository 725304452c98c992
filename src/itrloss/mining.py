"""Hard negatives for queries from a whole corpus, which may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    IdsLike,
    Names,
    as_size,
    as_tensor,
    check_matrix,
    check_same_kind,
    from_numpy,
    require_finite,
)
from .checks.warnings import warn
from .engine.inputs import even_chunks
from .engine.products import full_float32, matmul
from .engine.related import label_sets
from .engine.relation import IGNORE_ID, slots
from .engine.vectors import normalized
from .similarity import TopK

_NAMES = Names("queries", "corpus", "query_ids", "corpus_ids")
_RUN = 64  # number of neighbouring scores whose maximum is looked at first
_CROWD = 2**13  # number of runs of a tile that are looked into at once
_FIRST = 128  # embeddings in the first block, where every score is a candidate
# scores of some queries with a block: less than a processor's cache, enough for full-speed products
_TILE = 2**21


@torch.no_grad()
def mine_hard_negatives(  # noqa: PLR0913 - options by keyword
    queries: Tensor | np.ndarray,
    corpus: Tensor | np.ndarray,
    query_ids: IdsLike,
    corpus_ids: IdsLike,
    k: int = 10,
    *,
    below: float | Tensor | None = None,
    normalize: bool = True,
    block: int = 2**11,
    progress: Callable[[int, int], object] | None = None,
) -> TopK:
    """Return the (Q, k) scores and corpus indices of each query's highest-scoring negatives, best
    first; exact.

    Scores are computed for a block of the corpus at a time, so that memory does not grow with its
    size. Of equal scores the first in the corpus ranks first. Where a query has fewer negatives,
    -inf and -1.

    Args:
        queries: (Q, D) embeddings, floating point, on the device that is to compute.
        corpus: (N, D) embeddings: a tensor on any device, or an array, such as ``np.load(path,
            mmap_mode="r")``.
        query_ids, corpus_ids: (Q,) and (N,) integers or strings, as in :class:`Similarity`; equal
            ids are positives, which are left out. With sets of labels, (Q, k) and (N, l), a pair is
            positive if it shares a label; :data:`itrloss.NO_ID` is no label, and what has no other
            does not exist.
        k: number of negatives.
        below: number, or (Q,), that negatives have to score below; such as 0.95 times the
            positive's score, as *NV-Retriever* takes to leave out false negatives (`Moreira et al.
            2024 <https://arxiv.org/abs/2407.15831>`__).
        normalize: score by cosines, otherwise by inner products.
        block: embeddings of the corpus that are scored at once; the first blocks are smaller.
        progress: called after each block with the number of embeddings that are done, and N.

    Raises:
        TypeError, ValueError: naming the argument, also for nan or infinite embeddings.
    """
    vectors: Tensor = from_numpy(queries)
    check_matrix("queries", vectors, "(Q, D)", check_finite=True)
    k = as_size("k", k)
    block = as_size("block", block)
    shape = tuple(getattr(corpus, "shape", ()))
    if len(shape) != 2 or shape[1] != vectors.shape[1]:
        raise ValueError(
            f"corpus: expected shape (N, {vectors.shape[1]}) as the queries, got {shape}"
        )
    size = len(vectors)
    total = len(corpus)
    vectors = normalized(vectors, normalize)
    labels, corpus_labels = _labels_of_both(query_ids, corpus_ids, size, total, vectors.device)
    values = vectors.new_full((size, k), -torch.inf)
    best = TopK(values, torch.full_like(values, -1, dtype=torch.int64))
    search = _Search(vectors, labels, _limits(below, vectors), best)
    for start, some in _blocks(corpus, block):
        end = start + len(some)
        some = normalized(some.to(vectors.device), normalize).to(vectors.dtype)
        _search_block_(search, some, corpus_labels[start:end], start)
        if progress is not None:
            progress(end, total)
    return best


def _limits(below: float | Tensor | None, queries: Tensor) -> Tensor | None:
    """Return the (Q,) scores that negatives of the queries (Q, D) have to score below, checked."""
    if below is None:
        return None
    size = len(queries)
    limits = as_tensor("below", below, size, queries.dtype, queries.device).expand(size)
    if bool(limits.isnan().any()):
        raise ValueError("below: expected numbers, got nan, below which there is nothing")
    return limits


def _labels_of_both(
    query_ids: IdsLike, corpus_ids: IdsLike, size: int, total: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the labels of the queries (Q, k) and of the corpus (N, l), checked."""
    check_same_kind("query_ids", query_ids, "corpus_ids", corpus_ids)
    labels = label_sets("query_ids", query_ids, size, device)
    corpus_labels = label_sets("corpus_ids", corpus_ids, total, device)
    _warn_of_labels(labels, corpus_labels)
    return labels, corpus_labels


def _warn_of_labels(labels: Tensor, corpus_labels: Tensor) -> None:
    """Warn if labels leave out nothing, so that right answers are mined, or most of the corpus."""
    exist = corpus_labels != IGNORE_ID
    total = len(corpus_labels)
    missing = total - int(exist.any(1).sum())
    if 2 * missing > total:
        warn(
            f"corpus_ids: {missing / total:.0%} of the corpus has no id but NO_ID, so that it does "
            "not exist, and is no negative. What matches no query needs an id, such as -1"
        )
    own = labels[labels != IGNORE_ID]
    of_corpus = corpus_labels[exist]
    if len(own) == 0 or len(of_corpus) == 0:
        return
    if not bool(torch.isin(own, of_corpus).any()):
        warn(
            "query_ids, corpus_ids: they have no id in common, so that the highest-scoring "
            "embeddings are all taken for negatives, right ones among them. Equal ids are a match"
        )
    elif bool((own == own[0]).all()) and bool((of_corpus == own[0]).all()):
        warn("query_ids, corpus_ids: all are the same, so that there are no negatives")


def _blocks(corpus: Tensor | np.ndarray, block: int) -> Iterator[tuple[int, Tensor]]:
    """Yield where each block begins, and its embeddings, checked; the first ones are smaller."""
    total = len(corpus)
    start = 0
    while start < total:
        end = min(total, start + min(block, max(_FIRST, start)))
        vectors: Tensor = from_numpy(corpus[start:end])
        check_matrix("corpus", vectors, "(N, D)")
        require_finite(f"corpus[{start}:{end}]", vectors)
        yield start, vectors
        start = end


@dataclass(frozen=True)
class _Search:
    """Queries, and the best of their negatives so far, which are updated in place."""

    vectors: Tensor  # (Q, D)
    labels: Tensor  # (Q, k)
    limits: Tensor | None  # (Q,), which negatives score below
    best: TopK  # (Q, k)

    def of(self, rows: slice) -> _Search:
        """Return the search for some of the queries, which shares their memory."""
        limits = self.limits
        if limits is not None:
            limits = limits[rows]
        best = TopK(self.best.values[rows], self.best.indices[rows])
        return _Search(self.vectors[rows], self.labels[rows], limits, best)


def _search_block_(
    search: _Search,
    vectors: Tensor,  # (C, D)
    labels: Tensor,  # (C, l)
    start: int,  # the index in the corpus of the first of them
) -> None:
    """Update the best negatives with a block of the corpus."""
    missing = -len(vectors) % _RUN
    if missing:  # entries that do not exist fill up the last run
        vectors = F.pad(vectors, (0, 0, 0, missing))
        labels = F.pad(labels, (0, 0, 0, missing), value=IGNORE_ID)
    for rows in even_chunks(len(search.vectors), max(1, _TILE // len(vectors))):
        some = search.of(rows)
        with full_float32(vectors.device):
            scores = matmul(some.vectors, vectors.T)
        _search_scores_(some, scores, labels, start)


def _search_scores_(
    search: _Search,
    scores: Tensor,  # (B, C) of its queries
    labels: Tensor,  # (C, l)
    start: int,
) -> None:
    """Update the best negatives with scores, whose columns are numbered from ``start``.

    One pass finds the runs of 64 scores that have one above a query's k-th best so far. After the
    first blocks hardly any do, and labels and limits are looked at only for the scores in them that
    are above it.
    """
    runs = scores.unflatten(1, (-1, _RUN))  # (B, C / 64, 64)
    least = search.best.values[:, -1:]  # (B, 1)
    row, run = (runs.amax(2) > least).nonzero(as_tuple=True)
    # a corpus in ascending order: half the queries, to bound the memory
    if len(row) > _CROWD and len(scores) > 1:
        for half in even_chunks(len(scores), (len(scores) + 1) // 2):
            _search_scores_(search.of(half), scores[half], labels, start)
        return
    high = runs[row, run]  # (R, 64)
    i, place = (high > least[row]).nonzero(as_tuple=True)
    row = row[i]  # (P,), as all from here on
    col = run[i] * _RUN + place
    score = high[i, place]
    negative = _are_negative(search.labels[row], labels[col])
    if search.limits is not None:
        negative &= score < search.limits[row]
    _insert_(search.best, row[negative], score[negative], start + col[negative])


def _are_negative(labels: Tensor, others: Tensor) -> Tensor:
    """Return (P,) whether pairs of entries that exist share no label, of (P, k) and (P, l)."""
    negative = (labels != IGNORE_ID).any(1) & (others != IGNORE_ID).any(1)
    for label in labels.unbind(1):
        share = (label[:, None] == others).any(1) & (label != IGNORE_ID)
        negative &= ~share
    return negative


def _insert_(
    best: TopK,  # (B, k)
    row: Tensor,  # (P,)
    score: Tensor,  # (P,)
    index: Tensor,  # (P,), in ascending order for each row
) -> None:
    """Update the best scores of each row with new ones."""
    if not len(row):
        return
    size, k = best.values.shape
    place = k + slots(row)  # (P,), the new scores follow the best
    shape = size, int(place.amax()) + 1
    values = score.new_full(shape, -torch.inf)
    values[:, :k] = best.values
    values[row, place] = score
    indices = index.new_full(shape, -1)
    indices[:, :k] = best.indices
    indices[row, place] = index
    # of equal scores, the first in the corpus
    values, order = values.sort(dim=1, descending=True, stable=True)
    best.values.copy_(values[:, :k])
    best.indices.copy_(indices.gather(1, order[:, :k]))
