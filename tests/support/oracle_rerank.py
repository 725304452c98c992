"""The re-rankers implemented again as plain loops over queries and candidates, in the manner of
`oracle`.

It is written from docs/reranking.rst and the papers and not from the library. Every
function is one direction: ``S`` (queries, candidates), ``R`` (references, candidates), and ``R =
S`` for transductive re-ranking. Unless the docstring says otherwise, functions return scores
(queries, candidates), where higher is better. A ``k`` larger than their number means all. The page
does not specify the order of equal scores: here the lower index is first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support.oracle import Array, _log_sum_exp, cosine

Order = NDArray[np.int64]

DEVIATION_FLOOR = 1e-6


def fast(S: ArrayLike, R: ArrayLike, gamma_sum: float, gamma_score: float) -> Array:
    """``γ_score S_qc − log Σ_r exp(γ_sum R_rc)``, DVSE Eq. 14."""
    S, R = _matrices(S, R)
    return _each_pair(
        S, lambda q, c: gamma_score * S[q, c] - _log_sum_exp([gamma_sum * s for s in R[:, c]])
    )


def inverted_softmax(S: ArrayLike, R: ArrayLike, scale: float) -> Array:
    """``β S_qc − log Σ_r exp(β R_rc)``."""
    S, R = _matrices(S, R)
    return _each_pair(S, lambda q, c: scale * S[q, c] - _log_sum_exp([scale * s for s in R[:, c]]))


def dual_softmax(S: ArrayLike, R: ArrayLike, scale: float) -> Array:
    """``S_qc exp(β S_qc) / Σ_r exp(β R_rc)``."""
    S, R = _matrices(S, R)
    share = inverted_softmax(S, R, scale)
    return _each_pair(S, lambda q, c: S[q, c] * math.exp(share[q, c]))


def query_bank_norm(S: ArrayLike, R: ArrayLike, scale: float, k: int) -> Array:
    """``β S_qc − a_q log Σ_r exp(β R_rc)``, a_q = 1 if the best candidate of q is among the k best
    of any r, else 0.
    """
    S, R = _matrices(S, R)
    activated = {c for row in R for c in _best_first(row)[:k]}

    def score(q: int, c: int) -> float:
        if _best_first(S[q])[0] not in activated:
            return scale * S[q, c]
        return scale * S[q, c] - _log_sum_exp([scale * s for s in R[:, c]])

    return _each_pair(S, score)


def dual_bank_norm(
    S: ArrayLike, R: ArrayLike, G: ArrayLike, query_scale: float, gallery_scale: float
) -> Array:
    """``(β₁ + β₂) S_qc − log Σ_r exp(β₁ R_rc) − log Σ_g exp(β₂ G_gc)``, G (gallery bank,
    candidates).
    """
    S, R, G = _matrices(S, R, G)

    def score(q: int, c: int) -> float:
        of_queries = _log_sum_exp([query_scale * s for s in R[:, c]])
        of_gallery = _log_sum_exp([gallery_scale * s for s in G[:, c]])
        return (query_scale + gallery_scale) * S[q, c] - of_queries - of_gallery

    return _each_pair(S, score)


def nearest_neighbor_norm(S: ArrayLike, R: ArrayLike, alpha: float, k: int) -> Array:
    """``S_qc − α mean top-k_r R_rc``."""
    S, R = _matrices(S, R)
    return _each_pair(S, lambda q, c: S[q, c] - alpha * _mean_of_largest(R[:, c], k))


def csls(S: ArrayLike, R: ArrayLike, k: int) -> Array:
    """``2 S_qc − mean top-k_c' S_qc' − mean top-k_r R_rc``."""
    S, R = _matrices(S, R)
    return _each_pair(
        S, lambda q, c: 2 * S[q, c] - _mean_of_largest(S[q], k) - _mean_of_largest(R[:, c], k)
    )


def mutual_proximity(S: ArrayLike, R: ArrayLike) -> Array:
    """``log Φ((S_qc − μ_q)/σ_q) + log Φ((S_qc − μ_c)/σ_c)``, moments of row q of S and of column c
    of R.

    Population deviations, at least 1e-6.
    """
    S, R = _matrices(S, R)

    def log_proximity(s: float, sample: Array) -> float:
        mean = math.fsum(sample) / len(sample)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in sample) / len(sample))
        return _log_normal_cdf((s - mean) / max(deviation, DEVIATION_FLOOR))

    return _each_pair(
        S, lambda q, c: log_proximity(S[q, c], S[q]) + log_proximity(S[q, c], R[:, c])
    )


def sinkhorn(S: ArrayLike, R: ArrayLike, scale: float, iterations: int) -> Array:
    """``β S_qc + g_c``; g from 0, in turns: ``f_r ← −log|r| − log Σ_c exp(β R_rc + g_c)``,
    ``g_c ← −log C − log Σ_r exp(β R_rc + f_r)``.
    """
    S, R = _matrices(S, R)
    references = range(len(R))
    candidates = range(R.shape[1])
    g = [0.0 for _ in candidates]
    for _ in range(iterations):
        f = [
            -math.log(len(R)) - _log_sum_exp([scale * R[r, c] + g[c] for c in candidates])
            for r in references
        ]
        g = [
            -math.log(len(g)) - _log_sum_exp([scale * R[r, c] + f[r] for r in references])
            for c in candidates
        ]
    return _each_pair(S, lambda q, c: scale * S[q, c] + g[c])


def reciprocal_order(S: ArrayLike, R: ArrayLike, k: int) -> Order:
    """Candidates of each query from best to worst: (queries, candidates) indices.

    The k best by ascending ``ρ_qc = #{r : R_rc > S_qc}``, the better S_qc first where ρ is the
    same; then the others.
    """
    S, R = _matrices(S, R)
    orders = []
    for q in range(len(S)):
        order = _best_first(S[q])
        place = {c: sum(1 for s in R[:, c] if s > S[q, c]) for c in order}
        orders.append(sorted(order[:k], key=lambda c, place=place: place[c]) + order[k:])
    return np.array(orders)


def multi_factor(
    S: ArrayLike, R: ArrayLike, k: int, share_weight: float, place_weight: float
) -> tuple[Order, Array]:
    """Candidates of each query from best to worst, and the scores (queries, k) of its k best in S,
    best in S first.

    ``w₁ S_qc / Σ_r R_rc + exp(−0.05 j) + w₂ exp(−0.05 l)``: c is the j-th of q in S and the l-th in
    `reciprocal_order`, both from 1. Equal scores keep the order of S.
    """
    S, R = _matrices(S, R)
    reciprocal = reciprocal_order(S, R, k).tolist()
    orders = []
    scores = []
    for q in range(len(S)):
        order = _best_first(S[q])
        score = {}
        for c in order[:k]:
            share = S[q, c] / math.fsum(R[:, c])
            j = order.index(c) + 1
            place = reciprocal[q].index(c) + 1
            score[c] = (
                share_weight * share + math.exp(-0.05 * j) + place_weight * math.exp(-0.05 * place)
            )
        orders.append(sorted(order[:k], key=lambda c, score=score: -score[c]) + order[k:])
        scores.append([score[c] for c in order[:k]])
    return np.array(orders), np.array(scores)


def k_reciprocal(images: ArrayLike, texts: ArrayLike, k1: int, k2: int, weight: float) -> Array:
    """``−((1 − λ) J_qc + λ d̂_qc)``, images (N, D) as queries, texts (M, D) as candidates -> (N,
    M).

    All N + M items are one set. An item is first among its own neighbours, even if others are at
    distance 0.
    """
    images, texts = _matrices(images, texts)
    cosines = cosine(np.concatenate([images, texts]), np.concatenate([images, texts]))
    items = range(len(cosines))
    d = [[2 - 2 * float(cosines[x, y]) for y in items] for x in items]
    d_hat = [[distance / max(row) for distance in row] for row in d]
    nearest = [sorted(items, key=lambda y, x=x: (y != x, d[x][y], y)) for x in items]

    def mutual(x: int, k: int) -> set[int]:
        return {y for y in nearest[x][: k + 1] if x in nearest[y][: k + 1]}

    half = round(k1 / 2)  # round half to even
    V = np.zeros((len(items), len(items)))
    for x in items:
        expanded = mutual(x, k1)
        for y in mutual(x, k1):
            added = mutual(y, half)
            if 3 * len(added & mutual(x, k1)) > 2 * len(added):
                expanded |= added
        total = math.fsum(math.exp(-d_hat[x][y]) for y in expanded)
        for y in expanded:
            V[x, y] = math.exp(-d_hat[x][y]) / total
    v = [[_mean(V[near, z] for near in nearest[x][:k2]) for z in items] for x in items]

    def score(q: int, c: int) -> float:
        text = len(images) + c
        m = math.fsum(min(v[q][z], v[text][z]) for z in items)
        return -((1 - weight) * (1 - m / (2 - m)) + weight * d_hat[q][text])

    return _each_pair(np.zeros((len(images), len(texts))), score)


# --------------------------------------------------------------------------------- shared functions


def _matrices(*values: ArrayLike) -> tuple[Array, ...]:
    return tuple(np.asarray(value, np.float64) for value in values)


def _each_pair(S: Array, score: Callable[[int, int], float]) -> Array:
    scores = np.zeros(S.shape)
    for q in range(S.shape[0]):
        for c in range(S.shape[1]):
            scores[q, c] = score(q, c)
    return scores


def _best_first(row: Array) -> list[int]:
    return sorted(range(len(row)), key=lambda c: -row[c])


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _mean_of_largest(values: Array, k: int) -> float:
    return _mean(sorted(values, reverse=True)[:k])


def _log_normal_cdf(z: float) -> float:
    """log Φ(z); far below 0, where Φ underflows, by Laplace's ``Φ(−x) = φ(x) / (x + 1/(x + 2/(x +
    3/(x + …))))``.
    """
    if z > 0:
        return math.log1p(-0.5 * math.erfc(z / math.sqrt(2)))
    if z > -10:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2)))
    fraction = -z
    for n in range(100, 0, -1):
        fraction = -z + n / fraction
    return -0.5 * z * z - 0.5 * math.log(2 * math.pi) - math.log(fraction)
