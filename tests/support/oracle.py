"""Every equation implemented again as plain loops over pairs in float64, as an independent
reference for the tests.

It is written from the papers and not from the library, deliberately simple and slow, for matrices
of up to some thirty rows.

Conventions: ``S`` is an (N, M) score matrix, rows are images and columns are texts. ``row_ids``
(N,) and ``col_ids`` (M,) are integers; the pair (i, j) is positive iff ``row_ids[i] ==
col_ids[j]``, else negative. In place of ids there may be items of other relations, see `Item` and
`Judged`, of which a pair may also be neither. An anchor is *valid* iff it has at least one positive
and at least one negative; an invalid anchor's loss is exactly 0. Equations are numbered as in the
papers.

Reductions, for values ``rows`` (N,) of the image anchors and ``cols`` (M,) of the text anchors:

* ``"none"``: the pair ``(rows, cols)`` of float64 arrays,
* ``"sum"``: ``Σ_i rows_i + Σ_j cols_j``,
* ``"mean"``: mean of ``rows`` over valid images + mean of ``cols`` over valid texts (0 where none
  is valid).

Weights that a loss's gradient takes for constants are those of ``held``, scores like ``S``, where
they are passed in: differences of the loss are then in the scores alone.

Papers: CODER (Wang et al., ECCV 2022), USER (Zhang et al., 2023), DVSE (Wei et al., 2023),
VSE++ (Faghri et al., BMVC 2018), CPC (van den Oord et al., 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Ids = ArrayLike
PerAnchor = tuple[Array, Array]
# a loss of one anchor, from the scores of its positives and of its negatives
OfAnchor = Callable[..., float]

SD_FLOOR = 1e-6  # the variance is floored at its square, 1e-12
ENTROPY_FLOOR = 1e-6
SCORE_FLOOR = -1.0 + 1e-6  # log(1 + S) is finite from here upwards
NO_ID = -(2**63)  # of a row or column that does not exist; as a group, open to all


@dataclass(frozen=True)
class Item:
    """A row or a column in place of its id: it matches those with which it shares a label.

    Without a label, it does not exist. One that does not match is a negative if the groups allow
    it: with the rule ``"same"`` those of one group, with ``"other"`` those of different ones. With
    the rule ``"itself"``, groups are numbers of the items of one set, and equal ones no pair.
    """

    labels: frozenset[int]
    group: int = NO_ID
    rule: str = "same"

    def matches(self, other: Item) -> bool:
        return bool(self.labels & other.labels) and not self.is_itself(other)

    def is_itself(self, other: Item) -> bool:
        return self.rule == "itself" and self.group == other.group

    def differs(self, other: Item) -> bool:
        if self.matches(other) or not self.labels or not other.labels:
            return False
        if NO_ID in (self.group, other.group):
            return True
        return (self.group == other.group) == (self.rule == "same")


@dataclass(frozen=True)
class Judged:
    """A row or a column whose matches are entries of a matrix: above 0, or 0 for a negative."""

    number: int
    entries: Sequence[float]  # next to the items of the other side

    def matches(self, other: Judged) -> bool:
        return self.entries[other.number] > 0

    def differs(self, other: Judged) -> bool:
        return self.entries[other.number] == 0

    def weight(self, other: Judged) -> float:
        return self.entries[other.number]


def cosine(V: ArrayLike, W: ArrayLike) -> Array:
    """``S_ij = ⟨v_i, w_j⟩ / (|v_i| |w_j|)``, (N, D) and (M, D) -> (N, M); a zero vector scores
    0.
    """
    images = np.asarray(V, np.float64).tolist()
    texts = np.asarray(W, np.float64).tolist()
    text_norms = [math.sqrt(_dot(w, w)) for w in texts]
    S = np.zeros((len(images), len(texts)))
    for i, v in enumerate(images):
        v_norm = math.sqrt(_dot(v, v))
        for j, w in enumerate(texts):
            if v_norm > 0 and text_norms[j] > 0:
                S[i, j] = _dot(v, w) / (v_norm * text_norms[j])
    return S


def std_diversity(S: ArrayLike, row_ids: Ids, col_ids: Ids, epsilon: float = 0.1) -> Array:
    """Standard-deviation diversity of each row, CODER Eq. 3: (N, M) -> (N,).

    ``SD_i = sqrt(max(mean_{j∈neg(i)} (S_ij − mean_neg)², 1e-12))``, ``raw_i = 1/sigmoid(ε/SD_i) = 1
    + exp(−ε/SD_i)``, ``div_i = raw_i / max_i raw_i``, the maximum over all rows. A row without
    negatives has the floor as its SD.
    """
    S = np.asarray(S, np.float64)
    raw = []
    for i in range(len(S)):
        scores = [S[i, j] for j in _negatives(i, row_ids, col_ids)]
        variance = 0.0
        if scores:
            mean = _mean(scores)
            variance = _mean([(s - mean) ** 2 for s in scores])
        deviation = math.sqrt(max(variance, SD_FLOOR**2))
        raw.append(1 + math.exp(-epsilon / deviation))
    return np.array(raw) / max(raw)


def entropy_diversity(
    S: ArrayLike, row_ids: Ids, col_ids: Ids, epsilon: float = 0.1, temperature: float = 1.0
) -> Array:
    """Entropy diversity of each row, CODER supplement Eq. 8: (N, M) -> (N,).

    ``P_ij = exp(S_ij/τ) / Σ_{l∈pos(i)∪neg(i)} exp(S_il/τ)``, ``H_i = max(−Σ_{j∈neg(i)} P_ij log2
    P_ij, 1e-6)`` in bits, ``raw_i = 1 + exp(−ε/H_i)``, ``div_i = raw_i / max_i raw_i``, the maximum
    over all rows.
    """
    S = np.asarray(S, np.float64)
    raw = []
    for i, row in enumerate(S):
        exponents = [row[j] / temperature for j in _candidates(i, row_ids, col_ids)]
        bits = []
        for j in _negatives(i, row_ids, col_ids):
            log_p = row[j] / temperature - _log_sum_exp(exponents)
            bits.append(-math.exp(log_p) * log_p / math.log(2))
        entropy = max(math.fsum(bits), ENTROPY_FLOOR)
        raw.append(1 + math.exp(-epsilon / entropy))
    return np.array(raw) / max(raw)


def of_anchors(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    reduction: str,
    value: OfAnchor,
    held: ArrayLike | None = None,
) -> Any:
    """Reduce ``value(scores of positives, scores of negatives)`` of all valid anchors, of both
    sides; with ``held``, these scores follow.
    """

    def anchors(matrices: list[Array], ids: Ids, other_ids: Ids) -> Array:
        values = np.zeros(len(matrices[0]))
        for i in _valid_anchors(ids, other_ids):
            scores = []
            for S in matrices:
                scores.append([S[i, p] for p in _positives(i, ids, other_ids)])
                scores.append([S[i, n] for n in _negatives(i, ids, other_ids)])
            values[i] = value(*scores)
        return values

    matrices = [np.asarray(x, np.float64) for x in (S, held) if x is not None]
    rows = anchors(matrices, row_ids, col_ids)
    cols = anchors([x.T for x in matrices], col_ids, row_ids)
    return _reduce(rows, cols, row_ids, col_ids, reduction)


def triplet(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    margin: float = 0.2,
    mining: str = "hardest",
    reduction: str = "sum",
    temperature: float | None = None,
) -> Any:
    """Triplet ranking loss of VSE++: sum of hinges (``mining="all"``) or maximum of hinges
    (``"hardest"``).

    ``hardest``: ``ℓ_i = Σ_{p∈pos(i)} [α − S_ip + max_{n∈neg(i)} S_in]_+``;
    ``all``: ``ℓ_i = Σ_{p∈pos(i)} Σ_{n∈neg(i)} [α − S_ip + S_in]_+``.
    With a temperature, ``log(1 + e^{x/τ})`` in place of ``[x]_+``. The hinges of a match count as
    often as its weight says.
    ``batch-hard``: ``ℓ_i = [α − min_{p∈pos(i)} S_ip + max_{n∈neg(i)} S_in]_+``.
    """

    def hinge(x: float) -> float:
        if temperature is None:
            return max(0.0, x)
        return float(np.logaddexp(0.0, x / temperature))

    def anchors(S: Array, ids: Ids, other_ids: Ids) -> Array:
        values = np.zeros(len(S))
        for i in _valid_anchors(ids, other_ids):
            negatives = [S[i, n] for n in _negatives(i, ids, other_ids)]
            if mining == "batch-hard":
                lowest = min(S[i, p] for p in _positives(i, ids, other_ids))
                values[i] = hinge(margin - lowest + max(negatives))
                continue
            competitors = [max(negatives)] if mining == "hardest" else negatives
            for p in _positives(i, ids, other_ids):
                hinges = [hinge(margin - S[i, p] + competitor) for competitor in competitors]
                values[i] += weight(i, p, ids, other_ids) * math.fsum(hinges)
        return values

    S = np.asarray(S, np.float64)
    rows = anchors(S, row_ids, col_ids)
    cols = anchors(S.T, col_ids, row_ids)
    return _reduce(rows, cols, row_ids, col_ids, reduction)


def hal(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    scale: float = 90.0,
    margin: float = 0.5,
    reduction: str = "mean",
    positive: str = "clamp",
) -> Any:
    """Hubness-aware loss, USER Eq. 17, for several positives and N ≠ M.

    ``r_i = (1/γ) log(1 + Σ_{j∈neg(i)} exp(γ(S_ij − ε)))`` over a row, ``c_j`` likewise over a
    column; the loss is ``mean_i r_i + mean_j c_j − mean_{positive pairs} log(1 + S_ip)``, S floored
    at −1 + 1e-6 in the last term, with ``positive="relu"`` at 0. Per anchor, each direction has
    half of the positive term: ``ℓ_i = r_i − ½ (n_valid / P) Σ_{p∈pos(i)} log(1 + S_ip)``, P =
    positive pairs whose anchor is valid. A pair counts as often as its weight says.
    """
    floor = SCORE_FLOOR if positive == "clamp" else 0.0

    def anchors(S: Array, ids: Ids, other_ids: Ids) -> Array:
        values = np.zeros(len(S))
        valid = _valid_anchors(ids, other_ids)
        pairs = sum(sum(_weights(i, ids, other_ids)) for i in valid)
        for i in valid:
            negatives = _negatives(i, ids, other_ids)
            exponents = [scale * (S[i, n] - margin) for n in negatives]
            repulsion = _log_sum_exp([0.0, *exponents]) / scale
            logs = _log_positives(S, i, ids, other_ids, floor)
            attraction = len(valid) / pairs * math.fsum(logs)
            values[i] = repulsion - 0.5 * attraction
        return values

    S = np.asarray(S, np.float64)
    rows = anchors(S, row_ids, col_ids)
    cols = anchors(S.T, col_ids, row_ids)
    return _reduce(rows, cols, row_ids, col_ids, reduction)


def dcl(  # noqa: PLR0913 (the options of the loss)
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    temperature: float = 0.1,
    margin: float = 0.3,
    diversity: str | None = "std",
    epsilon: float = 0.1,
    positive_weight: str | float = "paper",
    positive: str = "clamp",
    reduction: str = "mean",
    entropy_temperature: float = 1.0,
    held: ArrayLike | None = None,
) -> Any:
    """Diversity-sensitive contrastive loss, CODER Eq. 5 (Eq. 4 with ``diversity=None``).

    ``ℓ_i = μ log(1 + Σ_{j∈neg(i)} exp((S_ij − γ)/(μ d_i))) − w mean_{p∈pos(i)} log(1 + S_ip)``, w =
    μ for ``"paper"``. Texts are anchors of the transposed matrix; their diversities are divided by
    their own maximum. ``positive="clamp"`` floors S at −1 + 1e-6 in the last term, ``"relu"`` at 0.
    """
    S = np.asarray(S, np.float64)
    weight = temperature if positive_weight == "paper" else float(positive_weight)
    floor = SCORE_FLOOR if positive == "clamp" else 0.0
    estimated = S if held is None else np.asarray(held, np.float64)
    options = diversity, epsilon, entropy_temperature
    row_div, col_div = _diversities(estimated, row_ids, col_ids, *options)

    def anchors(S: Array, ids: Ids, other_ids: Ids, div: Array) -> Array:
        values = np.zeros(len(S))
        for i in _valid_anchors(ids, other_ids):
            negatives = _negatives(i, ids, other_ids)
            exponents = [(S[i, n] - margin) / (temperature * div[i]) for n in negatives]
            repulsion = temperature * _log_sum_exp([0.0, *exponents])
            logs = _log_positives(S, i, ids, other_ids, floor)
            mean = math.fsum(logs) / math.fsum(_weights(i, ids, other_ids))
            values[i] = repulsion - weight * mean
        return values

    rows = anchors(S, row_ids, col_ids, row_div)
    cols = anchors(S.T, col_ids, row_ids, col_div)
    return _reduce(rows, cols, row_ids, col_ids, reduction)


def _diversities(
    S: Array,
    row_ids: Ids,
    col_ids: Ids,
    diversity: str | None,
    epsilon: float,
    temperature: float,
) -> PerAnchor:
    """The diversities of rows and of columns: of a name, or 1."""
    if diversity is None:
        return np.ones(S.shape[0]), np.ones(S.shape[1])
    if diversity == "std":
        row_div = std_diversity(S, row_ids, col_ids, epsilon)
        return row_div, std_diversity(S.T, col_ids, row_ids, epsilon)
    row_div = entropy_diversity(S, row_ids, col_ids, epsilon, temperature)
    return row_div, entropy_diversity(S.T, col_ids, row_ids, epsilon, temperature)


ITEMS = (Item, Judged)  # others are ids


def match(a: Any, b: Any) -> bool:
    """Whether two items, or two ids, match."""
    if isinstance(a, ITEMS):
        return a.matches(b)
    return a == b and a != NO_ID


def differ(a: Any, b: Any) -> bool:
    """Whether two items, or two ids, are a negative pair."""
    if isinstance(a, ITEMS):
        return a.differs(b)
    return a != b and NO_ID not in (a, b)


def listed(ids: Ids) -> list[Any]:
    """Ids, or items, one by one."""
    return ids if isinstance(ids, list) else np.asarray(ids).tolist()


def weight(i: int, j: int, ids: Ids, other_ids: Ids) -> float:
    """The weight of a match: that of its entry in a matrix, else 1."""
    anchor = listed(ids)[i]
    return anchor.weight(listed(other_ids)[j]) if isinstance(anchor, Judged) else 1.0


def _weights(i: int, ids: Ids, other_ids: Ids) -> list[float]:
    return [weight(i, p, ids, other_ids) for p in _positives(i, ids, other_ids)]


def _log_positives(S: Array, i: int, ids: Ids, other_ids: Ids, floor: float) -> list[float]:
    """``log(1 + S)`` of an anchor's positives, times their weights."""
    logs = [_log_positive(S[i, p], floor) for p in _positives(i, ids, other_ids)]
    return [log * own for log, own in zip(logs, _weights(i, ids, other_ids), strict=True)]


def exists(item: Any) -> bool:
    """Whether there is an item; of ids, one that is not ``NO_ID``."""
    return bool(item.labels) if isinstance(item, Item) else item != NO_ID


def _positives(i: int, ids: Ids, other_ids: Ids) -> list[int]:
    anchor = listed(ids)[i]
    return [j for j, other in enumerate(listed(other_ids)) if match(anchor, other)]


def _negatives(i: int, ids: Ids, other_ids: Ids) -> list[int]:
    anchor = listed(ids)[i]
    return [j for j, other in enumerate(listed(other_ids)) if differ(anchor, other)]


def _candidates(i: int, ids: Ids, other_ids: Ids) -> list[int]:
    return sorted(_positives(i, ids, other_ids) + _negatives(i, ids, other_ids))


def _valid_anchors(ids: Ids, other_ids: Ids) -> list[int]:
    anchors = range(len(listed(ids)))
    return [i for i in anchors if _positives(i, ids, other_ids) and _negatives(i, ids, other_ids)]


def _log_sum_exp(exponents: Sequence[float]) -> float:
    """``log Σ_k exp(x_k)``, computed with the largest exponent subtracted, so that large scales do
    not overflow.
    """
    largest = max(exponents)
    total = math.fsum(math.exp(x - largest) for x in exponents)
    return largest + math.log(total)


def _log_positive(score: float, floor: float = SCORE_FLOOR) -> float:
    """``log(1 + S)``, S floored."""
    return math.log(1 + max(score, floor))


def _dot(a: Array, b: Array) -> float:
    products = [x * y for x, y in zip(a, b, strict=True)]
    return math.fsum(products)


def _mean(values: Sequence[float]) -> float:
    """The mean; nan without a value."""
    return math.fsum(values) / len(values) if values else math.nan


def _reduce(rows: Array, cols: Array, row_ids: Ids, col_ids: Ids, reduction: str) -> Any:
    """Apply a reduction as defined in the module's docstring: a pair of arrays for ``"none"``, else
    a float.
    """
    valid_rows = _valid_anchors(row_ids, col_ids)
    valid_cols = _valid_anchors(col_ids, row_ids)
    return _reduce_valid(rows, cols, valid_rows, valid_cols, reduction)


def _reduce_valid(
    rows: Array, cols: Array, valid_rows: Sequence[int], valid_cols: Sequence[int], reduction: str
) -> Any:
    """Apply a reduction, with the caller's lists of the valid anchors."""
    if reduction == "none":
        return rows, cols
    if reduction == "sum":
        return math.fsum(rows) + math.fsum(cols)
    return _mean_of_valid(rows, valid_rows) + _mean_of_valid(cols, valid_cols)


def _mean_of_valid(values: Array, valid: Sequence[int]) -> float:
    """The mean over valid anchors, 0 if there is none."""
    total = math.fsum(values[i] for i in valid)
    return total / max(len(valid), 1)
