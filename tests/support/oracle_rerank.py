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
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support.oracle import Array, _log_sum_exp

Order = NDArray[np.int64]

DEVIATION_FLOOR = 1e-6


def fast(S: ArrayLike, R: ArrayLike, gamma_sum: float, gamma_score: float) -> Array:
    """``γ_score S_qc − log Σ_r exp(γ_sum R_rc)``, DVSE Eq. 14."""
    S, R = _matrices(S, R)
    log_sums = _log_sum_of_each_column(R, gamma_sum)

    def score(q: int, c: int) -> float:
        return gamma_score * S[q, c] - log_sums[c]

    return _each_pair(S, score)


def inverted_softmax(S: ArrayLike, R: ArrayLike, scale: float) -> Array:
    """``β S_qc − log Σ_r exp(β R_rc)``."""
    return fast(S, R, scale, scale)


def dual_softmax(S: ArrayLike, R: ArrayLike, scale: float) -> Array:
    """``S_qc exp(β S_qc) / Σ_r exp(β R_rc)``."""
    S, R = _matrices(S, R)
    log_share = inverted_softmax(S, R, scale)

    def score(q: int, c: int) -> float:
        share = math.exp(log_share[q, c])
        return S[q, c] * share

    return _each_pair(S, score)


def query_bank_norm(S: ArrayLike, R: ArrayLike, scale: float, k: int) -> Array:
    """``β S_qc − a_q log Σ_r exp(β R_rc)``, a_q = 1 if the best candidate of q is among the k best
    of any r, else 0.
    """
    S, R = _matrices(S, R)
    log_sums = _log_sum_of_each_column(R, scale)
    activated = set()
    for row in R:
        best = _best_first(row)
        activated.update(best[:k])

    def score(q: int, c: int) -> float:
        best = _best_first(S[q])
        if best[0] not in activated:
            return scale * S[q, c]
        return scale * S[q, c] - log_sums[c]

    return _each_pair(S, score)


def dual_bank_norm(
    S: ArrayLike, R: ArrayLike, G: ArrayLike, query_scale: float, gallery_scale: float
) -> Array:
    """``(β₁ + β₂) S_qc − log Σ_r exp(β₁ R_rc) − log Σ_g exp(β₂ G_gc)``, G (gallery bank,
    candidates).
    """
    S, R, G = _matrices(S, R, G)
    of_queries = _log_sum_of_each_column(R, query_scale)
    of_gallery = _log_sum_of_each_column(G, gallery_scale)

    def score(q: int, c: int) -> float:
        scaled = (query_scale + gallery_scale) * S[q, c]
        return scaled - of_queries[c] - of_gallery[c]

    return _each_pair(S, score)


def nearest_neighbor_norm(S: ArrayLike, R: ArrayLike, alpha: float, k: int) -> Array:
    """``S_qc − α mean top-k_r R_rc``."""
    S, R = _matrices(S, R)

    def score(q: int, c: int) -> float:
        bias = _mean_of_largest(R[:, c], k)
        return S[q, c] - alpha * bias

    return _each_pair(S, score)


def csls(S: ArrayLike, R: ArrayLike, k: int) -> Array:
    """``2 S_qc − mean top-k_c' S_qc' − mean top-k_r R_rc``."""
    S, R = _matrices(S, R)

    def score(q: int, c: int) -> float:
        of_query = _mean_of_largest(S[q], k)
        of_candidate = _mean_of_largest(R[:, c], k)
        return 2 * S[q, c] - of_query - of_candidate

    return _each_pair(S, score)


def mutual_proximity(S: ArrayLike, R: ArrayLike) -> Array:
    """``log Φ((S_qc − μ_q)/σ_q) + log Φ((S_qc − μ_c)/σ_c)``, moments of row q of S and of column c
    of R.

    Population deviations, at least 1e-6.
    """
    S, R = _matrices(S, R)

    def log_proximity(s: float, sample: Array) -> float:
        """log Φ of a score's place in a sample."""
        mean = _mean(sample)
        variance = _mean((x - mean) ** 2 for x in sample)
        deviation = max(math.sqrt(variance), DEVIATION_FLOOR)
        return _log_normal_cdf((s - mean) / deviation)

    def score(q: int, c: int) -> float:
        in_row = log_proximity(S[q, c], S[q])
        in_column = log_proximity(S[q, c], R[:, c])
        return in_row + in_column

    return _each_pair(S, score)


def sinkhorn(S: ArrayLike, R: ArrayLike, scale: float, iterations: int) -> Array:
    """``β S_qc + g_c``; g from 0, in turns: ``f_r ← −log|r| − log Σ_c exp(β R_rc + g_c)``,
    ``g_c ← −log C − log Σ_r exp(β R_rc + f_r)``.
    """
    S, R = _matrices(S, R)
    references = range(R.shape[0])
    candidates = range(R.shape[1])
    f = [0.0] * R.shape[0]
    g = [0.0] * R.shape[1]
    for _ in range(iterations):
        for r in references:
            exponents = [scale * R[r, c] + g[c] for c in candidates]
            f[r] = -math.log(len(f)) - _log_sum_exp(exponents)
        for c in candidates:
            exponents = [scale * R[r, c] + f[r] for r in references]
            g[c] = -math.log(len(g)) - _log_sum_exp(exponents)

    def score(q: int, c: int) -> float:
        return scale * S[q, c] + g[c]

    return _each_pair(S, score)


def reciprocal_order(S: ArrayLike, R: ArrayLike, k: int) -> Order:
    """Candidates of each query from best to worst: (queries, candidates) indices.

    The k best by ascending ``ρ_qc = #{r : R_rc > S_qc}``, the better S_qc first where ρ is the
    same; then the others.
    """
    S, R = _matrices(S, R)
    orders = []
    for q in range(len(S)):
        order = _best_first(S[q])
        place = {}
        for c in order:
            better = [s for s in R[:, c] if s > S[q, c]]
            place[c] = len(better)
        best = sorted(order[:k], key=place.__getitem__)
        orders.append(best + order[k:])
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
        best = order[:k]
        of_best = []
        for c in best:
            share = S[q, c] / math.fsum(R[:, c])
            j = order.index(c) + 1
            place = reciprocal[q].index(c) + 1
            forth = math.exp(-0.05 * j)
            back = math.exp(-0.05 * place)
            of_best.append(share_weight * share + forth + place_weight * back)
        reordered = [best[x] for x in _best_first(of_best)]
        orders.append(reordered + order[k:])
        scores.append(of_best)
    return np.array(orders), np.array(scores)


def two_stages(S: ArrayLike, F: ArrayLike, k: int, weight: float) -> Order:
    """Candidates of each query from best to worst: the k best of S by ``F_qc + w S_qc``, then the
    others. Equal scores keep the order of S.
    """
    S, F = _matrices(S, F)
    orders = []
    for first, second in zip(S, F, strict=True):
        order = _best_first(first)
        best = order[:k]
        scores = [second[c] + weight * first[c] for c in best]
        reordered = [best[x] for x in _best_first(scores)]
        orders.append(reordered + order[k:])
    return np.array(orders)


# --------------------------------------------------------------------------------- shared functions


def _matrices(*values: ArrayLike) -> tuple[Array, ...]:
    return tuple(np.asarray(value, np.float64) for value in values)


def _log_sum_of_each_column(R: Array, scale: float) -> list[float]:
    """``log Σ_r exp(scale R_rc)`` of every candidate c."""
    log_sums = []
    for column in R.T:
        exponents = [scale * s for s in column]
        log_sums.append(_log_sum_exp(exponents))
    return log_sums


def _each_pair(S: Array, score: Callable[[int, int], float]) -> Array:
    """The scores of all queries q and candidates c, ``score(q, c)``."""
    scores = np.zeros(S.shape)
    for q in range(S.shape[0]):
        for c in range(S.shape[1]):
            scores[q, c] = score(q, c)
    return scores


def _best_first(row: Sequence[float] | Array) -> list[int]:
    return sorted(range(len(row)), key=lambda c: -row[c])


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _mean_of_largest(values: Array, k: int) -> float:
    largest = sorted(values, reverse=True)[:k]
    return _mean(largest)


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
