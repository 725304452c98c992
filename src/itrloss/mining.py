"""Hard negatives for queries from a whole corpus, which may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import as_ids, as_params, check_matrix, check_size
from .engine.inputs import even_chunks
from .engine.pairs import IGNORE_ID, slots
from .engine.products import matmul
from .engine.vectors import compute_dtype, full_precision, normalized
from .similarity import TopK

_RUN = 64  # number of neighbouring scores whose maximum is looked at first
_CROWD = 2**13  # number of runs of a tile that are looked into at once
_FIRST = 128  # embeddings in the first block, where every score is a candidate
# scores of some queries with a block: less than a processor's cache, enough for full-speed products
_TILE = 2**21


@torch.no_grad()
def mine_hard_negatives(
    queries: Tensor,
    corpus: Tensor | np.ndarray,
    query_ids: Tensor,
    corpus_ids: Tensor,
    k: int = 10,
    *,
    below: float | Tensor | None = None,
    normalize: bool = True,
    block: int = 2**11,
    progress: Callable[[int, int], Any] | None = None,
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
        query_ids, corpus_ids: (Q,) and (N,) integers; equal ids are positives, which are left out.
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
    check_matrix("queries", queries, "(Q, D)", check_finite=True)
    check_size("k", k)
    check_size("block", block)
    total, shape = len(corpus), tuple(corpus.shape)
    if len(shape) != 2 or shape[1] != queries.shape[1]:
        raise ValueError(
            f"corpus: expected shape (N, {queries.shape[1]}) as the queries, got {shape}"
        )
    device, dtype = queries.device, compute_dtype(queries)
    ids = (
        as_ids("query_ids", query_ids, len(queries), device),
        as_ids("corpus_ids", corpus_ids, total, device),
    )
    limits = None
    if below is not None:
        limits = as_params("below", (below,), len(queries), dtype, device)[0].expand(len(queries))
    x = normalized(queries, normalize)
    values = torch.full((len(x), k), -torch.inf, dtype=dtype, device=device)
    best = TopK(values, torch.full_like(values, -1, dtype=torch.int64))
    start = 0
    while start < total:
        part = slice(start, min(total, start + min(block, max(_FIRST, start))))
        piece = (
            corpus[part] if isinstance(corpus, Tensor) else torch.from_numpy(np.array(corpus[part]))
        )
        check_matrix("corpus", piece, "(N, D)", check_finite=True)
        y, own = normalized(piece.to(device), normalize).to(dtype), ids[1][part]
        if len(y) % _RUN:  # entries that do not exist fill up the last run
            y, own = (
                F.pad(y, (0, 0, 0, -len(y) % _RUN)),
                F.pad(own, (0, -len(y) % _RUN), value=IGNORE_ID),
            )
        for rows in even_chunks(len(x), max(1, _TILE // len(y))):
            with full_precision(x):
                scores = matmul(x[rows], y.T)
            limit = None if limits is None else limits[rows]
            _merge_(TopK(*(z[rows] for z in best)), scores, ids[0][rows], own, limit, start)
        start = part.stop
        if progress is not None:
            progress(start, total)
    return best


def _merge_(
    best: TopK,
    scores: Tensor,
    query_ids: Tensor,
    corpus_ids: Tensor,
    limits: Tensor | None,
    start: int,
) -> None:
    """Update the (B, k) best negatives with those among (B, C) scores, whose columns are numbered
    from ``start``.

    One pass finds the runs of 64 scores that have one above a query's k-th best so far. After the
    first blocks hardly any do, and ids and limits are looked at only for the scores in them that
    are above it.
    """
    runs, least = scores.unflatten(1, (-1, _RUN)), best.values[:, -1:]
    row, run = (runs.amax(2) > least).nonzero(as_tuple=True)
    # a corpus in ascending order: half the queries, to bound the memory
    if len(row) > _CROWD and len(scores) > 1:
        for half in even_chunks(len(scores), (len(scores) + 1) // 2):
            limit = None if limits is None else limits[half]
            _merge_(
                TopK(*(x[half] for x in best)),
                scores[half],
                query_ids[half],
                corpus_ids,
                limit,
                start,
            )
        return
    new = runs[row, run]
    i, place = (new > least[row]).nonzero(as_tuple=True)
    row, col, new = row[i], run[i] * _RUN + place, new[i, place]
    negative = (
        (query_ids[row] != corpus_ids[col])
        & (query_ids[row] != IGNORE_ID)
        & (corpus_ids[col] != IGNORE_ID)
    )
    if limits is not None:
        negative &= new < limits[row]
    row, col, new = row[negative], col[negative], new[negative]
    if not len(row):
        return
    k, slot = best.values.shape[1], slots(row, len(scores))
    shape = len(scores), k + int(slot.amax()) + 1
    values, indices = scores.new_full(shape, -torch.inf), row.new_full(shape, -1)
    values[:, :k], indices[:, :k] = best
    values[row, k + slot], indices[row, k + slot] = new, col + start
    # of equal scores, the first in the corpus
    values, order = values.sort(dim=1, descending=True, stable=True)
    best.values.copy_(values[:, :k])
    best.indices.copy_(indices.gather(1, order[:, :k]))
