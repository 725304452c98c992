"""The loops of `oracle` and `oracle_more` next to values computed by hand, one example of each."""

from __future__ import annotations

from functools import partial
from math import exp, log, log2, sqrt
from typing import Any

import numpy as np
import pytest

from support import oracle, oracle_embedders, oracle_more, oracle_ranking

AXES = np.eye(3)
PAIRS = ([0, 1], [0, 1])  # ids of a batch of two pairs
THREE = ([0, 1], [0, 1, 2])  # of which the third column belongs to no row
CAPTIONS = ([7, 9], [7, 7, 9])  # two captions of the first image, one of the second
none = {"reduction": "none"}


def unit_columns(S: Any) -> np.ndarray:
    """Unit vectors w_j with cos(e_1, w_j) = S_0j and cos(e_2, w_j) = S_1j."""
    a, b = np.array(S)
    return np.stack([a, b, np.sqrt(1 - a**2 - b**2)], axis=1)


# ------------------------------------------------------------------------------------- diversities

# Row 0 has negatives 0.5 and 0.1: mean 0.3, SD 0.2. Row 1 has 0.4 and 0.6: SD 0.1. With this ε, raw
# is 1 + 1/2 and 1 + 1/4; divided by the larger of the two, 1 and 5/6.
SPREAD = [[0, 0.5, 0.1], [0.4, 0, 0.6]]
EPSILON = 0.2 * log(2)
# Columns 0 and 1 have one negative each, SD at the floor, raw 1. Column 2 (no positive) has 0.1 and
# 0.6, SD 0.25: an anchor without a positive enters the maximum, but contributes 0.
OF_COLUMN = 1 / (1 + 2**-0.8)
# Row 0: exp(S) = 2, 1, 1, so P = 1/2, 1/4, 1/4; its negatives give H = 2 (1/4) 2 = 1 bit.
# Row 1: exp(S) = 1, 6, 1, so P = 1/8, 3/4, 1/8; its negatives give H = 2 (1/8) 3 = 3/4 bit.
PROBABILITIES = np.log([[2.0, 1, 1], [1, 6, 1]])

# The batch has the diversities above, (1, 5/6); the memory, with SD 0.1 and 0.2, (5/6, 1).
IN_MEMORY = unit_columns([[0.4, 0.6], [0.5, 0.1]])
UNUSED = np.zeros((2, 3))
OF_SPREAD = (3 * AXES[:2], unit_columns(SPREAD), UNUSED, IN_MEMORY, *THREE, [5, 6])
# τ = 1/ln 3. Batch: all scores 0, H = 1/2 bit on both rows, so (1, 1). Memory: row 0 has P = 3/4,
# 1/4, both negatives; row 1 has P = 1/2, 1/2, its second entry masked: H = 1/2 bit.
OF_ENTROPY = (AXES[:2], AXES[[2, 2]], AXES[[0, 2]], AXES[[0, 2]], *PAIRS, [5, 1])
RAW = [1 + exp(-0.1 / bits) for bits in (0.75 * log2(4 / 3) + 0.5, 0.5)]
MEAN_OF_ENTROPIES = [1, (1 + RAW[1] / RAW[0]) / 2]

DIVERSITIES = {
    "std": (partial(oracle.std_diversity, SPREAD, *THREE, EPSILON), [1, 5 / 6]),
    "entropy": (
        partial(oracle.entropy_diversity, PROBABILITIES / 2, *THREE, log(2), 0.5),
        [1, (1 + 2 ** (-4 / 3)) / (1 + 1 / 2)],  # ε/H is ln 2, and 4/3 of it
    ),
    "of a memory": (
        lambda: oracle_more.memory_diversity(*OF_SPREAD, "std", EPSILON)[0],
        [11 / 12, 11 / 12],  # an average, which is not divided by its maximum
    ),
    "of a memory by entropy": (
        partial(oracle_more.memory_diversity, *OF_ENTROPY, "entropy", 0.1, 1 / log(3)),
        (MEAN_OF_ENTROPIES, MEAN_OF_ENTROPIES),
    ),
}

# --------------------------------------------------------------------------------- losses of pairs

HINGES = [[0.8, 0.5], [0.3, 0.4]]
ODDS = 0.5 * np.log([[3.0, 1], [2, 2]])  # exp(S/τ) = [[3, 1], [2, 2]]
# log(1 + S) of the positives: log 2, 0 and 1; exp of the negatives: 2 in row 0, 1 and 3 in row 1
HUBS = [[1.0, 0.0, log(2)], [0.0, log(3), exp(1) - 1]]
HUBS_ROWS = [log(1 + 2), log(1 + 1 + 3)]
HUBS_COLS = [log(1 + 1), log(1 + 3), log(1 + 2)]
# μ = 1/2, γ = 0: exp(2 S) of the negatives is 3 and 8; the positives are 1 and -2, at the floor
CLAMPED = [[1.0, log(3) / 2], [log(8) / 2, -2.0]]
# exp(S), at scale 1 and bias 0: a positive costs log(1 + 1/x), a negative log(1 + x)
SIGMOID = np.log([[3.0, 3], [1, 2], [1, 1]])
SIGMOID_ROWS = np.array([log(4 / 3) + log(4), log(2) + log(3 / 2), 2 * log(2)])
SIGMOID_COLS = np.array([log(4 / 3) + 2 * log(2), log(4) + log(3 / 2) + log(2)])

LOSSES = {
    # row 1: [.2 - .4 + .3]+; column 1: [.2 - .4 + .5]+
    "triplet": (
        partial(oracle.triplet, HINGES, *PAIRS, 0.2, "hardest", "none"),
        ([0, 0.1], [0, 0.3]),
    ),
    # 3 of 3 + 1 and 2 of 2 + 2; 3 of 3 + 2 and 2 of 1 + 2
    "infonce": (
        partial(oracle_embedders.infonce, ODDS, *PAIRS, 0.5, **none),
        ([log(4 / 3), log(2)], [log(5 / 3), log(3 / 2)]),
    ),
    # half of each positive, times n_valid/P, which is 2/3 for rows and 3/3 for columns
    "hal": (
        partial(oracle.hal, HUBS, *CAPTIONS, 1.0, 0.0, "none"),
        (
            [HUBS_ROWS[0] - log(2) / 3, HUBS_ROWS[1] - 1 / 3],
            [HUBS_COLS[0] - log(2) / 2, HUBS_COLS[1], HUBS_COLS[2] - 1 / 2],
        ),
    ),
    "hal, a mean over pairs": (
        partial(oracle.hal, HUBS, *CAPTIONS, 1.0, 0.0, "mean"),
        sum(HUBS_ROWS) / 2 + sum(HUBS_COLS) / 3 - (log(2) + 1) / 3,
    ),
    "dcl": (
        partial(oracle.dcl, CLAMPED, *PAIRS, 0.5, 0.0, None, **none),
        (
            [log(4) / 2 - log(2) / 2, log(9) / 2 - log(1e-6) / 2],
            [log(9) / 2 - log(2) / 2, log(4) / 2 - log(1e-6) / 2],
        ),
    ),
    # γ = (1/2) log 3 takes 3 to 1 and 8 to 8/3
    "dcl with a margin and a weight": (
        lambda: oracle.dcl(
            CLAMPED, *PAIRS, 0.5, log(3) / 2, None, positive_weight=3.0, positive="relu", **none
        )[0],
        [log(2) / 2 - 3 * log(2), log(11 / 3) / 2],
    ),
    # Positives 0 add nothing. Rows: 0.5 and 0.1, less 0.3, over 0.1; 0.1 and 0.3 over 0.1 (5/6).
    "dcl divides the temperature by the diversity": (
        partial(oracle.dcl, SPREAD, *THREE, epsilon=EPSILON, **none),
        (
            [0.1 * log(1 + exp(2) + exp(-2)), 0.1 * log(1 + exp(1.2) + exp(3.6))],
            [0.1 * log(1 + exp(1 / OF_COLUMN)), 0.1 * log(1 + exp(2 / OF_COLUMN)), 0],
        ),
    ),
    # half of each row's and of each column's sum
    "sigmoid": (
        partial(oracle_more.sigmoid, SIGMOID, [0, 1, 5], [0, 1], 1.0, 0.0, "none"),
        (SIGMOID_ROWS / 2, SIGMOID_COLS / 2),
    ),
}

# ------------------------------------------------------------------- memories, sets and prototypes

# One pair of id 1, whose third entry in the memory is masked. cos(v, w) = 0, cos(v, w key) =
# cos(w, v key) = 0.6; cosines of v with the memory's texts: 0, 0.8, of w with its images: 1, 0.8.
PAIR = ([[2, 0]], [[0, 1]], [[4, 3]], [[3, 4]])
ENTRIES = ([[0, 2], [3, 4], [1, 0]], [[0, 5], [4, 3], [1, 0]])
MEMORY = (*PAIR, *ENTRIES, [1], [1], [2, 3, 1])

# Texts are the axes, so that scores are the coordinates of images. Image 2, of zeros, has no text.
HEADS = np.array([[[3.0, 0, 4]], [[0, 4, 3]], [[0, 0, 0]]])
SIGMA = 1 + 0.4 * sqrt(2)  # of the pairs (0, 0) and (1, 2): without 0.6, 0 and 0.8 are left
OTHER_SIGMA = 1 + 0.1 * sqrt(2)  # of the pair (0, 1)
SMALL_HINGE = 0.4 / SIGMA**2 + log(SIGMA)  # 0.2 - 0.6 + 0.8
LARGE_HINGE = 1 / OTHER_SIGMA**2 + log(OTHER_SIGMA)  # 0.2 - 0 + 0.8

RESIDUALS = [[[2.0, 0], [-3, 4]], [[0, 1], [5, 0]]]  # |cos| 0.6 and 0
PARALLEL = np.ones((2, 3, 4))
LEANING = [[[3.0, 4, 0], [3, -4, 0]]]
orthogonal = oracle_more.dynamic_orthogonal

POINTS = [[2.0, 0], [3, 3], [0, 5], [-3, 4]]  # (3, 3) ties between the first two centroids
STEP = partial(oracle_more.spherical_kmeans_step, [[1.0, 0], [0, 1], [-1, 0]], [3, 0, 7], POINTS)
# Three times the old centroid, (1, 0), and (3, 3) normalised.
FIRST = np.array([4 + sqrt(0.5), sqrt(0.5)])
# (0, 1) and (-0.6, 0.8); the old centroid counts 0.
SECOND = np.array([-0.6, 1.8])
MOVED = np.array([FIRST / np.linalg.norm(FIRST), SECOND / np.linalg.norm(SECOND), [-1, 0]])

MORE = {
    # μ = 0.5, γ = 0.3: exponents -0.6 and 1 for the image, 1.4 and 1 for the text
    "memory dcl": (
        partial(oracle_more.memory_dcl, *MEMORY, temperature=0.5, diversity=None, **none),
        (
            [0.5 * log(1 + exp(-0.6) + exp(1)) - 0.5 * log(1.6)],
            [0.5 * log(1 + exp(1.4) + exp(1)) - 0.5 * log(1.6)],
        ),
    ),
    # γ = 2, ε = 0.5: image exponents -1 and 0.6, text exponents 1 and 0.6; HAL has no negatives
    "uto": (
        partial(oracle_more.uto, *MEMORY, scale=2.0, **none),
        (
            [0.5 * log(1 + exp(-1) + exp(0.6)) - log(1.6)],
            [0.5 * log(1 + exp(1) + exp(0.6)) - log(1.6)],
        ),
    ),
    # (0, 0, 3) has mean 1 and the sample variance 6/2
    "sigma": (
        lambda: oracle_more.variance_sigma([[[9.0, 0, 0, 3]]], [0], range(4))[0][0, 0, 0],
        1 + sqrt(3),
    ),
    "variance aware": (
        partial(oracle_more.variance_aware, HEADS, 2 * AXES, [7, 9, 8], [7, 7, 9], **none),
        ([SMALL_HINGE + LARGE_HINGE, SMALL_HINGE, 0], [log(SIGMA), LARGE_HINGE, SMALL_HINGE]),
    ),
    "variance aware, a mean over pairs": (
        partial(oracle_more.variance_aware, HEADS, 2 * AXES, [7, 9, 8], [7, 7, 9]),
        (log(SIGMA) + 2 * LARGE_HINGE + 3 * SMALL_HINGE) / 3,
    ),
    "orthogonal": (partial(orthogonal, RESIDUALS), (0.6 - 0.4) / 2),
    "orthogonal, Frobenius": (
        partial(orthogonal, RESIDUALS, None, 0.1, "frobenius", "sum"),
        sqrt(2 * 0.36) / 4 - 0.1,
    ),
    # heads that are off count as zeros: 2 of the 6 ordered pairs remain
    "orthogonal with gated heads": (
        partial(orthogonal, PARALLEL, [[1, 1, 0], [1, 0, 0]], 0, **none),
        [1 / 3, 0],
    ),
    # (0.6, 0.8, 0) and (0.6, -0.8, 0) without the second dimension
    "orthogonal with gated dimensions": (partial(orthogonal, LEANING, [[1, 0, 1]], 0), 0.36),
    "k-means": (STEP, ([0, 0, 1, 1], MOVED, [5, 2, 7])),
    # logits (log 3, 0) and (0, 0) of images, (0, log 3) and (log 3, 0) of texts
    "prototypes": (
        partial(
            oracle_more.prototype_classification,
            [[log(3), 0], [0, 0]],
            [[0, log(3)], [log(3), 0]],
            np.eye(2),
            [0, log(2)],  # 3 of 3 + 2, and 2 of 1 + 2
            [0, 1],
            "none",
        ),
        ([log(5 / 3), log(3 / 2)], [log(1 + 2 * 3), log(1 + 3 / 2)]),
    ),
}

# -------------------------------------------------------------------------- rankings and re-ranking

# The first query has its candidates 1st and 3rd: average precision 5/6, mAP@2 = (1/1 + 0)/2. The
# second has its candidate 2nd, behind a wrong one of the same score. A right one at rank r has the
# gain 1/log2(1 + r).
LISTS = (([0.9, 0.1, 0.4], [1, 1, 0]), ([0.6, 0.2, 0.6], [0, 0, 1]))
OF_QUERIES = {
    "r1": 50,
    "r5": 100,
    "median_rank": 1.5,
    "mean_rank": 1.5,
    "r_precision": 25,
    "map_at_r": 25,
    "mrr": 75,
    "map": 100 * (5 / 6 + 1 / 2) / 2,
    "recall_at_1": 25,
    "recall_at_5": 100,
    "ndcg_at_1": 50,
    "ndcg_at_5": 50 * ((1 + 1 / 2) / (1 + 1 / log2(3)) + 1 / log2(3)),
}


def figures() -> list[float]:
    ranked = [[grades[c] for c in oracle_ranking.order(scores, grades)] for scores, grades in LISTS]
    found = oracle_ranking.figures(ranked)
    return [found[name] for name in OF_QUERIES]


RANKINGS = {
    "metrics": (figures, [*OF_QUERIES.values()]),
}

EXAMPLES = {**DIVERSITIES, **LOSSES, **MORE, **RANKINGS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_by_hand(name):
    compute, wanted = EXAMPLES[name]
    found = compute()
    if not isinstance(wanted, tuple):
        found, wanted = (found,), (wanted,)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("loss", [oracle.triplet, oracle_embedders.infonce, oracle.hal, oracle.dcl])
def test_invalid_anchors_contribute_nothing_and_are_not_counted(loss):
    # only row 0 and column 0 have a positive
    inputs = ([[0.3, 0.9], [0.8, 0.7]], [1, 5], [1, 6])
    rows, cols = loss(*inputs, **none)
    assert [x != 0 for x in (*rows, *cols)] == [True, False, True, False]
    assert loss(*inputs, reduction="mean") == pytest.approx(rows[0] + cols[0])
    for ids in (([1, 1], [1, 1]), ([1, 2], [3, 4])):  # no negatives, or no positives
        assert loss(inputs[0], *ids, reduction="mean") == 0
