"""The oracle against values computed by hand on 2x2 and 2x3 matrices."""

from math import exp, log, log2, nan, sqrt

import numpy as np
import pytest
from pytest import approx

from support import oracle

# Images 7 and 9; two captions of image 7, one of image 9.
ROWS = [7, 9]
COLS = [7, 7, 9]
PAIRS = [0, 1]  # ids of a one-to-one 2x2 batch
# Ids of a 2x3 batch in which the third column belongs to no row.
TWO = [0, 1]
THREE = [0, 1, 2]


def test_std_diversity_by_hand():
    # The positives are 9 and -9, which do not count.
    # Row 0 has negatives 0.5 and 0.1: mean 0.3, SD 0.2.
    # Row 1 has negatives 0.4 and 0.6: SD 0.1.
    S = [[9.0, 0.5, 0.1], [0.4, -9.0, 0.6]]
    epsilon = 0.2 * log(2)
    raw_0 = 1 + 1 / 2  # 1 + exp(-epsilon / 0.2)
    raw_1 = 1 + 1 / 4  # 1 + exp(-epsilon / 0.1)
    found = oracle.std_diversity(S, TWO, THREE, epsilon)
    # Divided by the larger of the two, they are 1 and 5/6.
    assert found == approx([1, raw_1 / raw_0])
    assert found == approx([1, 5 / 6])


def test_entropy_diversity_by_hand():
    # Row 0: exp(S) = 2, 1, 1, so P = 1/2, 1/4, 1/4; its negatives give H = 2 (1/4) 2 = 1 bit.
    # Row 1: exp(S) = 1, 6, 1, so P = 1/8, 3/4, 1/8; its negatives give H = 2 (1/8) 3 = 3/4 bit.
    S = np.log([[2.0, 1, 1], [1, 6, 1]])
    epsilon = log(2)
    raw_0 = 1 + 1 / 2  # 1 + exp(-epsilon / 1)
    raw_1 = 1 + 2 ** (-4 / 3)  # 1 + exp(-epsilon / (3/4))
    expected = [1, raw_1 / raw_0]
    found = oracle.entropy_diversity(S, TWO, THREE, epsilon)
    assert found == approx(expected)
    # Half the scores at half the temperature have the same probabilities.
    halved = oracle.entropy_diversity(S / 2, TWO, THREE, epsilon, 0.5)
    assert halved == approx(expected)


def test_triplet_on_pairs_by_hand():
    S = [[0.8, 0.5], [0.3, 0.4]]
    row_0 = 0  # [.2 - .8 + .5]+
    row_1 = 0.1  # [.2 - .4 + .3]+
    col_0 = 0  # [.2 - .8 + .3]+
    col_1 = 0.3  # [.2 - .4 + .5]+
    rows, cols = oracle.triplet(S, PAIRS, PAIRS, 0.2, "hardest", "none")
    assert rows == approx([row_0, row_1])
    assert cols == approx([col_0, col_1])
    total = oracle.triplet(S, PAIRS, PAIRS, 0.2, "hardest", "sum")
    assert total == approx(0.4)
    mean = oracle.triplet(S, PAIRS, PAIRS, 0.2, "hardest", "mean")
    assert mean == approx(row_1 / 2 + col_1 / 2)


def test_infonce_on_pairs_by_hand():
    S = 0.5 * np.log([[3.0, 1], [2, 2]])  # exp(S/tau) = [[3, 1], [2, 2]]
    row_0 = log(4 / 3)  # 3 of 3 + 1
    row_1 = log(2)  # 2 of 2 + 2
    col_0 = log(5 / 3)  # 3 of 3 + 2
    col_1 = log(3 / 2)  # 2 of 1 + 2
    rows, cols = oracle.infonce(S, PAIRS, PAIRS, 0.5, "none")
    assert rows == approx([row_0, row_1])
    assert cols == approx([col_0, col_1])
    total = log(20 / 3)
    assert oracle.infonce(S, PAIRS, PAIRS, 0.5, "sum") == approx(total)
    assert oracle.infonce(S, PAIRS, PAIRS, 0.5, "mean") == approx(total / 2)


def test_hal_on_pairs_by_hand():
    S = [[1.0, log(2)], [log(3), 0.0]]
    # At scale 1 and margin 0, the negatives give log(1 + 2) and log(1 + 3).
    low = log(3)
    high = log(4)
    # The positives give log(1 + 1) and log(1 + 0).
    positive_0 = log(2)
    rows, cols = oracle.hal(S, PAIRS, PAIRS, 1.0, 0.0, "none")
    assert rows == approx([low - positive_0 / 2, high])
    assert cols == approx([high - positive_0 / 2, low])
    # Eq. 17: (1/2) [(log 3 + log 4) + (log 4 + log 3) - (log 2 + 0)]
    mean = oracle.hal(S, PAIRS, PAIRS, 1.0, 0.0, "mean")
    assert mean == approx(log(12) - log(2) / 2)

    # At scale 2 and margin (1/2) log 2, row 0 has (1/2) log(1 + exp(2 (1/2) log 2)).
    rows, _ = oracle.hal(S, PAIRS, PAIRS, 2.0, log(2) / 2, "none")
    assert rows[0] == approx(log(3) / 2 - positive_0 / 2)


def test_hal_with_two_captions_is_a_mean_over_pairs():
    S = [[1.0, 0.0, log(2)], [0.0, log(3), exp(1) - 1]]
    # log(1 + S) of the positives 1, 0 and e - 1
    first = log(2)
    second = 0
    third = 1
    # exp of the negatives: 2 in row 0, 1 and 3 in row 1
    row_0 = log(1 + 2)
    row_1 = log(1 + 1 + 3)
    col_0 = log(1 + 1)
    col_1 = log(1 + 3)
    col_2 = log(1 + 2)
    rows, cols = oracle.hal(S, ROWS, COLS, 1.0, 0.0, "none")
    # Half of each positive, times n_valid/P, which is 2/3 for rows and 3/3 for columns.
    assert rows == approx([row_0 - (first + second) / 3, row_1 - third / 3])
    assert cols == approx([col_0 - first / 2, col_1 - second / 2, col_2 - third / 2])

    of_rows = (row_0 + row_1) / 2
    of_cols = (col_0 + col_1 + col_2) / 3
    of_positives = (first + second + third) / 3
    mean = oracle.hal(S, ROWS, COLS, 1.0, 0.0, "mean")
    assert mean == approx(of_rows + of_cols - of_positives)


def test_dcl_without_diversity_by_hand():
    # mu = 1/2, gamma = 0. Negatives: exp(2 S) = 3 (row 0, column 1), 8 (row 1, column 0).
    S = [[1.0, log(3) / 2], [log(8) / 2, -2.0]]
    options = {"temperature": 0.5, "margin": 0.0, "diversity": None}
    first = log(1 + 3) / 2
    second = log(1 + 8) / 2
    # The positives are 1, and -2, which is clamped.
    positive_0 = log(2) / 2
    positive_1 = log(1e-6) / 2
    rows, cols = oracle.dcl(S, PAIRS, PAIRS, **options, reduction="none")
    assert rows == approx([first - positive_0, second - positive_1])
    assert cols == approx([second - positive_0, first - positive_1])

    options |= {"positive": "relu", "reduction": "none"}
    rows, _ = oracle.dcl(S, PAIRS, PAIRS, **options, positive_weight=3.0)
    assert rows == approx([first - 3 * log(2), second])

    # gamma = (1/2) log 3 takes 3 to 1 and 8 to 8/3; with 1 for row 0, both terms cancel.
    options["margin"] = log(3) / 2
    rows, _ = oracle.dcl(S, PAIRS, PAIRS, **options)
    assert rows == approx([0, log(1 + 8 / 3) / 2])


def test_dcl_divides_the_temperature_by_the_diversity():
    # The negatives of test_std_diversity_by_hand: d = 1, 5/6. Positives 0 add nothing. mu = 0.1,
    # gamma = 0.3.
    S = [[0.0, 0.5, 0.1], [0.4, 0.0, 0.6]]
    epsilon = 0.2 * log(2)
    rows, cols = oracle.dcl(S, TWO, THREE, epsilon=epsilon, reduction="none")
    # 0.5 and 0.1, less 0.3, over 0.1
    assert rows[0] == approx(0.1 * log(1 + exp(2) + exp(-2)))
    # 0.1 and 0.3 over 0.1 (5/6)
    assert rows[1] == approx(0.1 * log(1 + exp(1.2) + exp(3.6)))

    # Columns 0 and 1 have one negative each, SD at the floor, raw 1. Column 2 (no positive): 0.1
    # and 0.6, SD 0.25, raw 1 + 2^(-0.8): an anchor without a positive enters the maximum, but
    # contributes 0.
    d = 1 / (1 + 2**-0.8)
    col_0 = 0.1 * log(1 + exp(1 / d))  # 0.4 - 0.3 over 0.1 d
    col_1 = 0.1 * log(1 + exp(2 / d))  # 0.5 - 0.3 over 0.1 d
    assert cols == approx([col_0, col_1, 0])

    diversity = ([1, 5 / 6], [d, d, 1])
    fixed_rows, fixed_cols = oracle.dcl(S, TWO, THREE, diversity=diversity, reduction="none")
    assert fixed_rows == approx(rows)
    assert fixed_cols == approx(cols)


@pytest.mark.parametrize("loss", [oracle.triplet, oracle.infonce, oracle.hal, oracle.dcl])
def test_invalid_anchors_contribute_nothing_and_are_not_counted(loss):
    # Row 1 (id 5) has no positive, column 1 (id 6) neither; row 0 and column 0 are the only valid
    # anchors.
    S = [[0.3, 0.9], [0.8, 0.7]]
    rows, cols = loss(S, [1, 5], [1, 6], reduction="none")
    assert rows[0] != 0
    assert rows[1] == 0
    assert cols[0] != 0
    assert cols[1] == 0
    mean = loss(S, [1, 5], [1, 6], reduction="mean")
    assert mean == approx(rows[0] + cols[0])
    # Only positives, or only negatives: there is no valid anchor.
    only_positives = loss(S, [1, 1], [1, 1], reduction="mean")
    assert only_positives == 0
    only_negatives = loss(S, [1, 2], [3, 4], reduction="mean")
    assert only_negatives == 0
    with pytest.raises(ValueError, match="reduction"):
        loss(S, [1, 5], [1, 6], reduction="median")


def test_fast_rerank_by_hand():
    # The second parameter scales A only.
    exp_A = np.array([[1.0, 2], [3, 1]])
    column_sums = [4, 3]
    row_sums = [[3], [4]]
    i2t, t2i = oracle.fast_rerank(np.log(exp_A), i2t=(1, 2), t2i=(1, 3))
    assert i2t == approx(np.log(exp_A**2 / column_sums))
    assert t2i == approx(np.log(exp_A**3 / row_sums))
    sharp_column_sums = [10, 5]  # of exp(2 A)
    i2t, _ = oracle.fast_rerank(np.log(exp_A), i2t=(2, 1))
    assert i2t == approx(np.log(exp_A / sharp_column_sums))


def test_retrieval_metrics_by_hand():
    S = [[0.9, 0.1, 0.4], [0.2, 0.6, 0.3]]
    third = 100 / 3
    expected = {
        # Image 7 ranks its captions 1st and 3rd: rank 1, R-Precision 1/2, mAP@2 = (1/1 + 0)/2.
        # Image 9 ranks its caption 2nd: rank 2, R-Precision 0, mAP@1 = 0.
        "i2t_r1": 50,
        "i2t_r5": 100,
        "i2t_r10": 100,
        "i2t_median_rank": 1.5,
        "i2t_mean_rank": 1.5,
        "i2t_r_precision": 25,
        "i2t_map_at_r": 25,
        "i2t_mrr": 75,
        "i2t_map": 200 / 3,  # average precisions 5/6 and 1/2
        # Of both images, a quarter of the captions is found first on average.
        "i2t_recall_at_1": 25,
        "i2t_recall_at_5": 100,
        "i2t_recall_at_10": 100,
        "i2t_skewness": 0,
        # Texts as queries: caption 0 finds image 7 first, caption 1 second, caption 2 second.
        "t2i_r1": third,
        "t2i_r5": 100,
        "t2i_r10": 100,
        "t2i_median_rank": 2,
        "t2i_mean_rank": 5 / 3,
        "t2i_r_precision": third,
        "t2i_map_at_r": third,
        "t2i_mrr": 200 / 3,
        "t2i_map": 200 / 3,
        "t2i_recall_at_1": third,
        "t2i_recall_at_5": 100,
        "t2i_recall_at_10": 100,
        "t2i_skewness": 0,
        "rsum": 50 + third + 400,
    }
    # A positive at rank r has the gain 1/log2(1 + r).
    second_gain = 1 / log2(3)
    third_gain = 1 / 2
    ideal_of_two = 1 + second_gain
    of_image_7 = (1 + third_gain) / ideal_of_two
    of_image_9 = second_gain
    expected["i2t_ndcg_at_1"] = 50
    expected["t2i_ndcg_at_1"] = third
    for k in (5, 10):
        expected[f"i2t_ndcg_at_{k}"] = 50 * (of_image_7 + of_image_9)
        expected[f"t2i_ndcg_at_{k}"] = third * (1 + second_gain + second_gain)
    figures = oracle.retrieval_metrics(S, ROWS, COLS)
    assert figures == approx(expected)


def test_ties_count_against_the_positive():
    # Image 0 ties with one negative: rank 2. Image 1 with two: rank 3.
    S = [[0.5, 0.5, 0.1], [0.7, 0.7, 0.7], [0.0, 0.0, 0.2]]
    figures = oracle.retrieval_metrics(S, THREE, THREE)
    assert figures["i2t_r1"] == approx(100 / 3)
    assert figures["i2t_median_rank"] == 2
    assert figures["i2t_map_at_r"] == approx(100 / 3)
    # A tie among positives has no cost.
    figures = oracle.retrieval_metrics([[0.5, 0.5]], [0], [0, 0])
    assert figures["i2t_r_precision"] == 100


def test_skewness_by_hand():
    # One query, eleven items: ten occur once and one never. A Bernoulli variable with p = 10/11 has
    # skewness (1 - 2p)/sqrt(p (1 - p)) = (-9/11)/(sqrt(10)/11).
    S = np.linspace(1, 0, 11)[None]
    figures = oracle.retrieval_metrics(S, [0], range(11))
    assert figures["i2t_skewness"] == approx(-9 / sqrt(10))
    assert figures["t2i_skewness"] == 0  # eleven queries, one item

    # Query 0 ties all twelve items and therefore omits its own, 0, and the last other, 11.
    # Query 1 omits 5 and 11.
    S = np.zeros((2, 12))
    S[1, [5, 11]] = -1
    S[1, [1, 2]] = 1
    figures = oracle.retrieval_metrics(S, [0, 1], range(12))
    # N = 0 once, 1 twice, 2 nine times: the mean is 5/3.
    variance = (25 + 2 * 4 + 9) / 9 / 12
    third_moment = (-125 - 2 * 8 + 9) / 27 / 12
    assert figures["i2t_skewness"] == approx(third_moment / variance**1.5)


def test_metrics_without_any_answer_are_nan():
    figures = oracle.retrieval_metrics([[0.5]], [0], [1])
    assert figures["i2t_r1"] == approx(nan, nan_ok=True)
    assert figures["rsum"] == approx(nan, nan_ok=True)
