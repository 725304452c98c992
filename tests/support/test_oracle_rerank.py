"""The oracle of the re-rankers against values computed by hand."""

from math import cos, exp, fsum, log, pi, sin

import numpy as np
import pytest
from pytest import approx

from support import oracle_rerank

# Column sums of exp(L): 4, 4, 2; of exp(2 L): 10, 8, 2.
L = np.log([[1, 2, 1], [3, 2, 1]])
S = np.array([[0.9, 0.5, 0.1], [0.6, 0.8, 0.2]])
# Each query's order: 0, 1, 2 and 0, 2, 1; #{r : R_rc > S_qc}: 1, 0, 1 and 0, 1, 0; column sums
# 1.85, 1, 0.4.
P = np.array([[0.9, 0.8, 0.1], [0.95, 0.2, 0.3]])


def test_fast_by_hand():
    expected = np.array([[-log(10), log(8 / 8), -log(2)], [log(27 / 10), log(8 / 8), -log(2)]])
    assert oracle_rerank.fast(L, L, 2.0, 3.0) == approx(expected)


def test_inverted_softmax_by_hand():
    expected = np.log([[1 / 4, 2 / 4, 1 / 2], [3 / 4, 2 / 4, 1 / 2]])
    assert oracle_rerank.inverted_softmax(L, L, 1.0) == approx(expected)
    # One reference query, whose scores are subtracted.
    assert oracle_rerank.inverted_softmax(L, np.log([[2, 1, 5]]), 3.0) == approx(
        3 * (L - np.log([2, 1, 5]))
    )


def test_a_large_scale_does_not_overflow():
    # The sum is its largest term: 1e5 (0.9 - 0.9) = 0, 1e5 (0.5 - 0.8) = -3e4, ...
    expected = 1e5 * np.array([[0, -0.3, -0.1], [-0.3, 0, 0]])
    assert oracle_rerank.inverted_softmax(S, S, 1e5) == approx(expected)
    assert oracle_rerank.dual_softmax(S, S, 1e5) == approx(np.array([[0.9, 0, 0], [0, 0.8, 0.2]]))
    assert np.isfinite(oracle_rerank.sinkhorn(S, S, 1e5, 5)).all()


def test_dual_softmax_by_hand():
    expected = np.array([[0, log(2) * 2 / 4, 0], [log(3) * 3 / 4, log(2) * 2 / 4, 0]])
    assert oracle_rerank.dual_softmax(L, L, 1.0) == approx(expected)


def test_query_bank_norm_by_hand():
    # The bank's best are 0 and 2: query 0 (its best: 0) is normalised by the sums 6, 2, 4, query 1
    # (its best: 1) not.
    scores = np.log([[3, 1, 2], [1, 2, 1]])
    bank = np.log([[4, 1, 1], [2, 1, 3]])
    normalised = np.log([[3 / 6, 1 / 2, 2 / 4], [1 / 6, 2 / 2, 1 / 4]])
    assert oracle_rerank.query_bank_norm(scores, bank, 1.0, 1) == approx(
        np.array([normalised[0], scores[1]])
    )
    assert oracle_rerank.query_bank_norm(scores, bank, 1.0, 9) == approx(normalised)


def test_dual_bank_norm_by_hand():
    # Query sums exp(R): 4, 2; gallery sums exp(2 G): 4, 1; exp(3 S): 8, 1.
    scores = oracle_rerank.dual_bank_norm(
        [[log(2), 0]], np.log([[3, 1], [1, 1]]), [[log(2), 0]], 1.0, 2.0
    )
    assert scores == approx(np.log([[8 / 4 / 4, 1 / 2 / 1]]))


def test_nearest_neighbor_norm_by_hand():
    one = oracle_rerank.nearest_neighbor_norm(S, S, 0.5, 1)
    assert one == approx(S - 0.5 * np.array([0.9, 0.8, 0.2]))
    everything = oracle_rerank.nearest_neighbor_norm(S, S, 0.5, 9)
    assert everything == approx(S - 0.5 * np.array([0.75, 0.65, 0.15]))


def test_csls_by_hand():
    assert oracle_rerank.csls(S, S, 1) == approx(np.array([[0, -0.7, -0.9], [-0.5, 0, -0.6]]))
    # k = 2: rows 0.7 and 0.7; the columns have no more than two values: 0.75, 0.65, 0.15.
    assert oracle_rerank.csls(S, S, 2) == approx(
        np.array([[0.35, -0.35, -0.65], [-0.25, 0.25, -0.45]])
    )


def test_mutual_proximity_by_hand():
    # Every row and every column has mean 1 and deviation 1.
    below = log(0.15865525393145707)
    above = log(0.8413447460685429)
    scores = [[0, 2], [2, 0]]
    assert oracle_rerank.mutual_proximity(scores, scores) == approx(
        2 * np.array([[below, above], [above, below]])
    )
    # References without spread: (0 - 0) / 1e-6 and (2 - 0) / 1e-6.
    expected = np.array([[below + log(0.5), above], [above, below + log(0.5)]])
    assert oracle_rerank.mutual_proximity(scores, [[0, 0]]) == approx(expected)
    # (0 - 2) / 1e-6: the density over |z|.
    far = below - 0.5 * 4e12 - log(2e6) - 0.5 * log(2 * pi)
    assert oracle_rerank.mutual_proximity(scores, [[2, 2]])[0, 0] == approx(far, rel=1e-15)


def test_the_two_forms_of_the_normal_distribution_meet():
    # Where the two forms meet, at z = -10, the slope is φ/Φ = 10.098.
    above, below = (oracle_rerank._log_normal_cdf(z) for z in (-10 + 1e-9, -10 - 1e-9))
    assert above - below == approx(2e-9 * 10.098, rel=1e-3)


def test_sinkhorn_by_hand():
    # exp(R) = (3, 1), (1, 1): f = -log 8, -log 4; the columns then sum to 3/8 + 1/4 and 1/8 + 1/4.
    R = np.log([[3, 1], [1, 1]])
    expected = R - np.log([2 * 5 / 8, 2 * 3 / 8])
    assert oracle_rerank.sinkhorn(R, R, 1.0, 1) == approx(expected)
    assert oracle_rerank.sinkhorn(R, R, 1.0, 0) == approx(R)
    # For R_rc = a_r + b_c, one iteration leaves a_r + log Σ exp(b) - log C. A separate query keeps
    # the same g.
    a = np.log([[2], [5]])
    b = np.log([[1, 2, 3]])
    assert oracle_rerank.sinkhorn(a + b, a + b, 1.0, 1) == approx(
        np.broadcast_to(a + log(6) - log(3), (2, 3))
    )
    assert oracle_rerank.sinkhorn([[0, 0, 0]], a + b, 1.0, 3) == approx(log(6) - log(3) - b)


def test_sinkhorn_balances_the_columns():
    joint = np.exp(oracle_rerank.sinkhorn(S, S, 10.0, 200))
    joint = joint / joint.sum(1, keepdims=True) / 2  # the effect of f on the rows
    assert joint.sum(0) == approx(np.full(3, 1 / 3))


def test_reciprocal_order_by_hand():
    assert oracle_rerank.reciprocal_order(P, P, 2).tolist() == [[1, 0, 2], [0, 2, 1]]
    assert oracle_rerank.reciprocal_order(P, P, 1).tolist() == [[0, 1, 2], [0, 2, 1]]
    assert oracle_rerank.reciprocal_order(P, P, 9).tolist() == [[1, 0, 2], [0, 2, 1]]
    # Against one reference query, the ranks are 0, 1, 1 and 0, 1, 0.
    assert oracle_rerank.reciprocal_order(P, [[0.85, 0.9, 0.2]], 9).tolist() == [
        [0, 1, 2],
        [0, 2, 1],
    ]


def test_multi_factor_by_hand():
    order, scores = oracle_rerank.multi_factor(P, P, 2, 1.0, 2.0)
    # Query 0: candidate 0 is j = 1, l = 2, candidate 1 j = 2, l = 1: 3.247 and 3.607. Query 1:
    # 3.367 and 3.464.
    first = [0.9 / 1.85 + exp(-0.05) + 2 * exp(-0.1), 0.8 / 1 + exp(-0.1) + 2 * exp(-0.05)]
    second = [0.95 / 1.85 + 3 * exp(-0.05), 0.3 / 0.4 + 3 * exp(-0.1)]
    assert scores == approx(np.array([first, second]))
    assert order.tolist() == [[1, 0, 2], [2, 0, 1]]
    order, scores = oracle_rerank.multi_factor(P, P, 9, 0.0, 0.0)
    assert order.tolist() == [[0, 1, 2], [0, 2, 1]]
    assert scores == approx(np.broadcast_to(np.exp([-0.05, -0.1, -0.15]), (2, 3)))


def on_circle(*angles):
    return [[cos(angle), sin(angle)] for angle in angles]


def test_k_reciprocal_by_hand():
    # Image at 0, texts at 60 and 180 degrees: d = 1, 4 and 3 between the texts. Largest of a row:
    # 4, 3, 4. k1 = 1: the image and text 0 are mutual neighbours, text 1 has only itself; k1 / 2
    # rounds to 0.
    image = on_circle(0)
    texts = on_circle(pi / 3, pi)
    # the image's weight in itself and in text 0
    own = 1 / (1 + exp(-1 / 4))
    other = exp(-1 / 3) / (1 + exp(-1 / 3))
    m = other + 1 - own
    expected = [[-0.7 * (1 - m / (2 - m)) - 0.3 / 4, -0.7 - 0.3]]
    assert oracle_rerank.k_reciprocal(image, texts, 1, 1, 0.3) == approx(np.array(expected))
    # k2 = 2: the image and text 0 become the same vector; text 1 takes half of text 0: m = 1/2.
    assert oracle_rerank.k_reciprocal(image, texts, 1, 2, 0.3) == approx(
        np.array([[-0.3 / 4, -0.7 * 2 / 3 - 0.3]])
    )
    # All items are neighbours of each other, and all vectors the same mean.
    assert oracle_rerank.k_reciprocal(image, texts, 9, 9, 0.3) == approx(
        np.array([[-0.3 / 4, -0.3]])
    )


@pytest.mark.parametrize("k1", [5, 6])
def test_k_reciprocal_expands(k1):
    # The image at 0 has all items but the last text (1.62) for its k1 mutual neighbours. Three of
    # the four of R(1.5, 3) are among them, so that k1 = 6 adds the fourth, 1.62. 5 / 2 rounds to 2,
    # and R(1.5, 2) has nothing new.
    angles = [0, *[-1, -1.1, -1.2][: k1 - 3], 1.4, 1.45, 1.5, 1.62]
    last = len(angles) - 1
    around = range(last + 1 if k1 == 6 else last)

    def vector(x, support):
        d = [2 - 2 * cos(angle - angles[x]) for angle in angles]
        weights = [exp(-d[y] / max(d)) if y in support else 0 for y in range(len(angles))]
        return [w / fsum(weights) for w in weights]

    m = sum(map(min, vector(0, around), vector(last, range(last - 3, last + 1))))
    scores = oracle_rerank.k_reciprocal(on_circle(0), on_circle(*angles[1:]), k1, 1, 0.0)
    assert scores[0, -1] == approx(m / (2 - m) - 1)
