"""The oracle of the re-rankers against values computed by hand."""

from math import exp, log, pi

import numpy as np
from pytest import approx

from support import oracle_rerank

# Scores by their exponentials, whose columns sum to 4, 4 and 2; those of the squares to 10, 8, 2.
EXP_L = np.array([[1, 2, 1], [3, 2, 1]])
L = np.log(EXP_L)
S = np.array([[0.9, 0.5, 0.1], [0.6, 0.8, 0.2]])
# Each query's order: 0, 1, 2 and 0, 2, 1; #{r : R_rc > S_qc}: 1, 0, 1 and 0, 1, 0; column sums
# 1.85, 1, 0.4.
P = np.array([[0.9, 0.8, 0.1], [0.95, 0.2, 0.3]])


def test_fast_by_hand():
    # The reference is taken at scale 2, the query at scale 3.
    # Their quotients are 1, 8, 1 and 27, 8, 1 over 10, 8, 2.
    expected = np.log(EXP_L**3 / [10, 8, 2])
    found = oracle_rerank.fast(L, L, 2.0, 3.0)
    assert found == approx(expected)


def test_inverted_softmax_by_hand():
    found = oracle_rerank.inverted_softmax(L, L, 1.0)
    assert found == approx(np.log(EXP_L / [4, 4, 2]))


def test_a_large_scale_does_not_overflow():
    # The sum is its largest term: 1e5 (0.9 - 0.9) = 0, 1e5 (0.5 - 0.8) = -3e4, ...
    less_the_largest = np.array([[0, -0.3, -0.1], [-0.3, 0, 0]])
    inverted = oracle_rerank.inverted_softmax(S, S, 1e5)
    assert inverted == approx(1e5 * less_the_largest)
    # Only the largest score of a column is left.
    largest = np.array([[0.9, 0, 0], [0, 0.8, 0.2]])
    assert oracle_rerank.dual_softmax(S, S, 1e5) == approx(largest)
    balanced = oracle_rerank.sinkhorn(S, S, 1e5, 5)
    assert np.isfinite(balanced).all()


def test_dual_softmax_by_hand():
    # Each score times its share of the column's sum.
    share = EXP_L / [4, 4, 2]
    found = oracle_rerank.dual_softmax(L, L, 1.0)
    assert found == approx(L * share)


def test_query_bank_norm_by_hand():
    # The bank's best are 0 and 2: query 0 (its best: 0) is normalised by the bank's sums, query 1
    # (its best: 1) not.
    exp_scores = np.array([[3, 1, 2], [1, 2, 1]])
    scores = np.log(exp_scores)
    bank = np.log([[4, 1, 1], [2, 1, 3]])
    normalised = np.log(exp_scores / [6, 2, 4])
    found = oracle_rerank.query_bank_norm(scores, bank, 1.0, 1)
    assert found[0] == approx(normalised[0])
    assert found[1] == approx(scores[1])
    assert found.shape == scores.shape


def test_dual_bank_norm_by_hand():
    scores = np.log([[2, 1]])
    query_bank = np.log([[3, 1], [1, 1]])  # exp(R) sums to 4, 2
    gallery_bank = np.log([[2, 1]])  # exp(2 G) sums to 4, 1
    found = oracle_rerank.dual_bank_norm(scores, query_bank, gallery_bank, 1.0, 2.0)
    first = log(8 / 4 / 4)  # exp(3 S) is 8
    second = log(1 / 2 / 1)  # exp(3 S) is 1
    assert found == approx(np.array([[first, second]]))


def test_nearest_neighbor_norm_by_hand():
    mean = np.array([0.75, 0.65, 0.15])
    everything = oracle_rerank.nearest_neighbor_norm(S, S, 0.5, 9)
    assert everything == approx(S - 0.5 * mean)


def test_csls_by_hand():
    # k = 1: twice each score, less the largest of its row and of its column.
    expected = np.array([[0, -0.7, -0.9], [-0.5, 0, -0.6]])
    assert oracle_rerank.csls(S, S, 1) == approx(expected)


def test_mutual_proximity_by_hand():
    # Every row and every column has mean 1 and deviation 1.
    below = log(0.15865525393145707)  # of z = -1
    above = log(0.8413447460685429)  # of z = 1
    scores = [[0, 2], [2, 0]]
    expected = np.array([[2 * below, 2 * above], [2 * above, 2 * below]])
    found = oracle_rerank.mutual_proximity(scores, scores)
    assert found == approx(expected)

    # References without spread: (0 - 0) / 1e-6 and (2 - 0) / 1e-6.
    half = log(0.5)
    expected = np.array([[below + half, above], [above, below + half]])
    found = oracle_rerank.mutual_proximity(scores, [[0, 0]])
    assert found == approx(expected)

    # z = (0 - 2) / 1e-6: the density over |z|.
    log_density = -0.5 * 4e12 - 0.5 * log(2 * pi)
    far = below + log_density - log(2e6)
    found = oracle_rerank.mutual_proximity(scores, [[2, 2]])
    assert found[0, 0] == approx(far, rel=1e-15)


def test_the_two_forms_of_the_normal_distribution_meet():
    # Where the two forms meet, at z = -10, the slope is φ/Φ = 10.098.
    above = oracle_rerank._log_normal_cdf(-10 + 1e-9)
    below = oracle_rerank._log_normal_cdf(-10 - 1e-9)
    assert above - below == approx(2e-9 * 10.098, rel=1e-3)


def test_sinkhorn_by_hand():
    # exp(R) has row sums 4 and 2, over two columns: f = -log 8, -log 4.
    R = np.log([[3, 1], [1, 1]])
    first_column = 3 / 8 + 1 / 4
    second_column = 1 / 8 + 1 / 4
    expected = R - np.log([2 * first_column, 2 * second_column])
    assert oracle_rerank.sinkhorn(R, R, 1.0, 1) == approx(expected)
    assert oracle_rerank.sinkhorn(R, R, 1.0, 0) == approx(R)

    # For R_rc = a_r + b_c, one iteration leaves a_r + log Σ exp(b) - log C.
    a = np.log([[2], [5]])
    b = np.log([[1, 2, 3]])
    of_rows = a + log(6) - log(3)
    expected = np.broadcast_to(of_rows, (2, 3))
    assert oracle_rerank.sinkhorn(a + b, a + b, 1.0, 1) == approx(expected)


def test_sinkhorn_balances_the_columns():
    joint = np.exp(oracle_rerank.sinkhorn(S, S, 10.0, 200))
    row_sums = joint.sum(1, keepdims=True)
    joint = joint / row_sums / 2  # the effect of f on the rows
    assert joint.sum(0) == approx(np.full(3, 1 / 3))


def test_reciprocal_order_by_hand():
    two = oracle_rerank.reciprocal_order(P, P, 2)
    assert two.tolist() == [[1, 0, 2], [0, 2, 1]]


def test_multi_factor_by_hand():
    order, scores = oracle_rerank.multi_factor(P, P, 2, 1.0, 2.0)
    # A score over its column's sum, a decay of j and twice a decay of l.
    first = exp(-0.05)
    second = exp(-0.1)
    # Query 0: candidate 0 is j = 1, l = 2, candidate 1 j = 2, l = 1: 3.247 and 3.607.
    of_query_0 = [0.9 / 1.85 + first + 2 * second, 0.8 / 1 + second + 2 * first]
    # Query 1: both are alike in j and l: 3.367 and 3.464.
    of_query_1 = [0.95 / 1.85 + 3 * first, 0.3 / 0.4 + 3 * second]
    assert scores == approx(np.array([of_query_0, of_query_1]))
    assert order.tolist() == [[1, 0, 2], [2, 0, 1]]
