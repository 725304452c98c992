"""The specification: every answer on a dense score matrix, in plain PyTorch, differentiated by autograd.

Each function takes the scores and a boolean mask of the positive pairs, both (N, M), and answers for the rows; the
columns are the rows of the transposed matrix. In float64 this is the oracle of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .registration import full_precision
from .terms import term_values
from .tiles import EPS, compute_dtype, lengths


def scores(rows: Tensor, cols: Tensor, normalize_rows: bool, normalize_cols: bool) -> Tensor:
    """(N, M) inner products, of unit vectors if they are normalised; a zero vector scores 0."""
    rows, cols = rows.to(compute_dtype(rows)), cols.to(compute_dtype(cols))
    with full_precision(rows):
        return (unit(rows) if normalize_rows else rows) @ (unit(cols) if normalize_cols else cols).T


def unit(x: Tensor) -> Tensor:
    """Vectors along the last dimension at unit length, in the compute dtype; a zero vector stays zero."""
    x = x.to(compute_dtype(x))
    norm = lengths(x.detach().flatten(0, -2)).view(*x.shape[:-1], 1)
    zero = norm <= EPS
    x = (x / norm.masked_fill(zero, 1)).masked_fill(zero, 0)  # brings the squares into range
    return x / torch.linalg.vector_norm(x.masked_fill(zero, 1), dim=-1, keepdim=True)


def logsumexp(scores: Tensor, positive: Tensor, scale: Tensor, masked: bool) -> Tensor:
    """``log sum_j exp(a_i S_ij)`` over the negatives, or over all columns."""
    z = scores * scale.reshape(-1, 1)
    if not masked:
        return z.logsumexp(1)
    z = z.masked_fill(positive, -math.inf)
    empty = (z == -math.inf).all(1)
    return z.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, -math.inf)  # -inf has a nan gradient


def moments(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of the negatives."""
    n = (~positive).sum(1).clamp_min(1)
    mean = scores.masked_fill(positive, 0).sum(1) / n
    return mean, (scores - mean[:, None]).masked_fill(positive, 0).square().sum(1) / n


def entropy(scores: Tensor, positive: Tensor, scale: float) -> Tensor:
    """``-sum_{j in neg} p_ij log2 p_ij`` with ``p`` the softmax over all columns."""
    log_p = (scores * scale).log_softmax(1)
    return -(log_p.exp() * log_p).masked_fill(positive, 0).sum(1) / math.log(2)


def hardest(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Score and index of the best negative; -inf and -1 where there is none."""
    best, index = scores.masked_fill(positive, -math.inf).max(1)
    none = best == -math.inf
    value = scores.gather(1, index[:, None]).squeeze(1)
    return value.masked_fill(none, -math.inf), index.masked_fill(none, -1)


def positives(scores: Tensor, positive: Tensor, term: str, params: Sequence[Tensor]) -> Tensor:
    """``sum_{p in pos(i)} term(S_ip, *params_i)``."""
    values = term_values(term, scores, *(p.reshape(-1, 1) for p in params))
    return torch.where(positive, values, 0.0).sum(1)


def violations(scores: Tensor, positive: Tensor, margin: float) -> Tensor:
    """``sum_{p in pos(i)} sum_{j in neg(i)} max(margin - S_ip + S_ij, 0)``."""
    sums = []
    for row, match in zip(scores, positive, strict=True):
        hinge = (margin - row[:, None] + row).relu()
        sums.append(torch.where(match[:, None] & ~match, hinge, 0.0).sum())
    return torch.stack(sums)
