"""Hard negatives for queries from a whole corpus, which may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import as_ids, as_params, check_matrix, check_size
from .engine.pairs import Pairs
from .engine.products import matmul
from .engine.ranking import topk
from .engine.scores import IGNORE_ID, compute_dtype, even_chunks, full_precision, normalized
from .similarity import TopK

_TILE = 2**20  # scores of some queries with a block of the corpus


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
    block: int = 2**13,
    progress: Callable[[int, int], Any] | None = None,
) -> TopK:
    """Return the (Q, k) scores and corpus indices of each query's highest-scoring negatives, best first; exact.

    Scores are computed for a block of the corpus at a time, so that memory does not grow with its size. Where a query
    has fewer negatives, -inf and -1.

    Args:
        queries: (Q, D) embeddings, floating point, on the device that is to compute.
        corpus: (N, D) embeddings: a tensor on any device, or an array, such as ``np.load(path, mmap_mode="r")``.
        query_ids, corpus_ids: (Q,) and (N,) integers; equal ids are positives, which are left out.
        k: number of negatives.
        below: number, or (Q,), that negatives have to score below; such as 0.95 times the positive's score, as
            *NV-Retriever* takes to leave out false negatives (`Moreira et al. 2024
            <https://arxiv.org/abs/2407.15831>`__).
        normalize: score by cosines, otherwise by inner products.
        block: embeddings of the corpus that are scored at once.
        progress: called after each block with the number of embeddings that are done, and N.

    Raises:
        TypeError, ValueError: naming the argument, also for nan or infinite embeddings.
    """
    check_matrix("queries", queries, "(Q, D)", check_finite=True)
    check_size("k", k)
    check_size("block", block)
    total, shape = len(corpus), tuple(corpus.shape)
    if len(shape) != 2 or shape[1] != queries.shape[1]:
        raise ValueError(f"corpus: expected shape (N, {queries.shape[1]}) as the queries, got {shape}")
    device, dtype = queries.device, compute_dtype(queries)
    ids = as_ids("query_ids", query_ids, len(queries), device), as_ids("corpus_ids", corpus_ids, total, device)
    limits = [] if below is None else as_params("below", (below,), len(queries), dtype, device)
    x = normalized(queries, normalize)
    values = torch.full((len(x), k), -torch.inf, dtype=dtype, device=device)
    indices = torch.full((len(x), k), -1, device=device)
    for start in range(0, total, block):
        part = slice(start, min(total, start + block))
        piece = corpus[part] if isinstance(corpus, Tensor) else torch.from_numpy(np.array(corpus[part]))
        check_matrix("corpus", piece, "(N, D)", check_finite=True)
        y, width = normalized(piece.to(device), normalize).to(dtype), part.stop - part.start
        if width % 64:  # entries that do not exist fill up the last block: `topk` is faster for whole runs
            y = torch.nn.functional.pad(y, (0, 0, 0, -width % 64))
        own = torch.nn.functional.pad(ids[1][part], (0, -width % 64), value=IGNORE_ID)
        pairs = Pairs((len(x), len(own)), (ids[0], own), device)
        for rows in even_chunks(len(x), max(1, _TILE // len(own))):
            with full_precision(x):
                scores = matmul(x[rows], y.T)
            pairs.exclude_(scores, (rows, slice(0, len(own))), -torch.inf)
            for limit in limits:
                scores.masked_fill_(scores >= (limit[rows] if len(limit) > 1 else limit)[:, None], -torch.inf)
            best = topk(scores, min(k, len(own)))
            both = torch.cat([values[rows], best[0]], 1), torch.cat([indices[rows], best[1] + start], 1)
            values[rows], order = both[0].topk(k, 1)
            indices[rows] = both[1].gather(1, order)
        if progress is not None:
            progress(part.stop, total)
    return TopK(values, indices.masked_fill_(values == -torch.inf, -1))
