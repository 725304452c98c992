"""The oracle against values computed by hand on 2x2 and 2x3 matrices."""

from math import exp, log, log2, nan, sqrt

import numpy as np
import pytest

from support import oracle

# Images 7 and 9; two captions of image 7, one of image 9.
ROWS = [7, 9]
COLS = [7, 7, 9]
PAIRS = [0, 1]  # ids of a one-to-one 2x2 batch


def test_cosine_of_a_zero_vector_is_zero():
    # (3, 4) has length 5: against (1, 0) 3/5, against (0, 2) 4/5.
    assert oracle.cosine([[3, 4], [0, 0]], [[1, 0], [0, 2]]) == pytest.approx(
        np.array([[0.6, 0.8], [0, 0]])
    )


def test_std_diversity_by_hand():
    # Row 0 (positive: column 0) has negatives 0.5 and 0.1: mean 0.3, SD 0.2. Row 1 has 0.4 and 0.6:
    # SD 0.1. epsilon = 0.2 ln 2: raw = 1 + 1/2 and 1 + 1/4; divided by the larger: 1 and 5/6.
    S = [[9.0, 0.5, 0.1], [0.4, -9.0, 0.6]]
    assert oracle.std_diversity(S, [0, 1], [0, 1, 2], 0.2 * log(2)) == pytest.approx([1, 5 / 6])


def test_std_diversity_floors_a_row_without_spread_or_without_negatives():
    # Row 0 has SD 0.1 and epsilon = 0.1 ln 2: raw 3/2. Row 1: equal negatives, SD 1e-6, raw 1 +
    # exp(-69315).
    S = [[9.0, 0.4, 0.6], [0.3, 9.0, 0.3]]
    assert oracle.std_diversity(S, [0, 1], [0, 1, 2], 0.1 * log(2)) == pytest.approx([1, 2 / 3])
    # Without negatives, every raw value is 1, and so is every score.
    assert oracle.std_diversity([[0.1, 0.5]], [4], [4, 4]) == pytest.approx([1])
    # At epsilon = 1e-6 ln 2 the floor has an effect: raw = 3/2, next to 1 + 2^(-1e-5) for the row
    # of SD 0.1.
    first = 1 + 2**-1e-5
    assert oracle.std_diversity(S, [0, 1], [0, 1, 2], 1e-6 * log(2)) == pytest.approx(
        [1, 1.5 / first]
    )


def test_entropy_diversity_by_hand():
    # Row 0: exp(S) = 2, 1, 1, so P = 1/2, 1/4, 1/4; its negatives give H = 2 (1/4) 2 = 1 bit.
    # Row 1: exp(S) = 1, 6, 1, so P = 1/8, 3/4, 1/8; its negatives give H = 2 (1/8) 3 = 3/4 bit.
    # epsilon = ln 2: raw = 1 + 1/2 and 1 + 2^(-4/3).
    S = np.log([[2.0, 1, 1], [1, 6, 1]])
    expected = [1, (1 + 2 ** (-4 / 3)) / 1.5]
    assert oracle.entropy_diversity(S, [0, 1], [0, 1, 2], log(2)) == pytest.approx(expected)
    assert oracle.entropy_diversity(S / 2, [0, 1], [0, 1, 2], log(2), 0.5) == pytest.approx(
        expected
    )


def test_triplet_on_pairs_by_hand():
    # margin 0.2; rows: [.2 - .8 + .5]+ = 0 and [.2 - .4 + .3]+ = .1;
    # columns: [.2 - .8 + .3]+ = 0 and [.2 - .4 + .5]+ = .3
    S = [[0.8, 0.5], [0.3, 0.4]]
    rows, cols = oracle.triplet(S, PAIRS, PAIRS, 0.2, "hardest", "none")
    assert rows == pytest.approx([0, 0.1])
    assert cols == pytest.approx([0, 0.3])
    assert oracle.triplet(S, PAIRS, PAIRS, 0.2, "hardest", "sum") == pytest.approx(0.4)
    assert oracle.triplet(S, PAIRS, PAIRS, 0.2, "hardest", "mean") == pytest.approx(
        0.1 / 2 + 0.3 / 2
    )


def test_triplet_with_two_captions_by_hand():
    # Row 0: positives .5 and .1, negative .4: .1 + .5. Row 1: positive .3, negatives .2 and .6: .1
    # and .5. Column 0: .5 against .2: 0. Column 1: .1 against .6: .7. Column 2: .3 against .4: .3.
    S = [[0.5, 0.1, 0.4], [0.2, 0.6, 0.3]]
    rows, cols = oracle.triplet(S, ROWS, COLS, 0.2, "hardest", "none")
    assert rows == pytest.approx([0.6, 0.5])
    assert cols == pytest.approx([0, 0.7, 0.3])
    rows, cols = oracle.triplet(S, ROWS, COLS, 0.2, "all", "none")
    assert rows == pytest.approx([0.6, 0.1 + 0.5])
    assert cols == pytest.approx([0, 0.7, 0.3])
    assert oracle.triplet(S, ROWS, COLS, 0.2, "all", "mean") == pytest.approx(1.2 / 2 + 1.0 / 3)


def test_infonce_on_pairs_by_hand():
    # exp(S/tau) = [[3, 1], [2, 2]]: rows -log 3/4 and -log 2/4; columns -log 3/5 and -log 2/3.
    S = 0.5 * np.log([[3.0, 1], [2, 2]])
    rows, cols = oracle.infonce(S, PAIRS, PAIRS, 0.5, "none")
    assert rows == pytest.approx([log(4 / 3), log(2)])
    assert cols == pytest.approx([log(5 / 3), log(3 / 2)])
    assert oracle.infonce(S, PAIRS, PAIRS, 0.5, "sum") == pytest.approx(log(20 / 3))
    assert oracle.infonce(S, PAIRS, PAIRS, 0.5, "mean") == pytest.approx(log(20 / 3) / 2)


def test_infonce_positives_do_not_compete_with_each_other():
    # exp(S) of row 0: positives 3 and 1, negative 2: mean of -log 3/5 and -log 1/3 = (1/2) log 5.
    # Row 1: positive 4 against 1 + 3: log 2. Columns: 3 against 1, 1 against 3, 4 against 2.
    S = np.log([[3.0, 1, 2], [1, 3, 4]])
    rows, cols = oracle.infonce(S, ROWS, COLS, 1.0, "none")
    assert rows == pytest.approx([log(5) / 2, log(2)])
    assert cols == pytest.approx([log(4 / 3), log(4), log(3 / 2)])


def test_hal_on_pairs_by_hand():
    # scale 1, margin 0. Rows: log(1 + 2), log(1 + 3). Columns: log(1 + 3), log(1 + 2).
    # Positives: log(1 + 1), log(1 + 0).
    S = [[1.0, log(2)], [log(3), 0.0]]
    rows, cols = oracle.hal(S, PAIRS, PAIRS, 1.0, 0.0, "none")
    assert rows == pytest.approx([log(3) - log(2) / 2, log(4)])
    assert cols == pytest.approx([log(4) - log(2) / 2, log(3)])
    # Eq. 17: (1/2) [(log 3 + log 4) + (log 4 + log 3) - (log 2 + 0)]
    assert oracle.hal(S, PAIRS, PAIRS, 1.0, 0.0, "mean") == pytest.approx(log(12) - log(2) / 2)
    # scale 2, margin (1/2) log 2: (1/2) log(1 + exp(2 (1/2) log 2)) = (1/2) log 3 for row 0 and
    # column 1.
    rows, _ = oracle.hal(S, PAIRS, PAIRS, 2.0, log(2) / 2, "none")
    assert rows[0] == pytest.approx(log(3) / 2 - log(2) / 2)


def test_hal_with_two_captions_is_a_mean_over_pairs():
    # Positive scores 1, 0, e - 1: log(1 + S) = log 2, 0, 1. exp of the negatives: 2 (row 0), 1 and
    # 3 (row 1).
    S = [[1.0, 0.0, log(2)], [0.0, log(3), exp(1) - 1]]
    # n_valid/P is 2/3 for rows and 3/3 for columns.
    rows, cols = oracle.hal(S, ROWS, COLS, 1.0, 0.0, "none")
    assert rows == pytest.approx([log(3) - log(2) / 3, log(5) - 1 / 3])
    assert cols == pytest.approx([log(2) - log(2) / 2, log(4), log(3) - 1 / 2])
    mean = (log(3) + log(5)) / 2 + (log(2) + log(4) + log(3)) / 3 - (log(2) + 0 + 1) / 3
    assert oracle.hal(S, ROWS, COLS, 1.0, 0.0, "mean") == pytest.approx(mean)


def test_dcl_without_diversity_by_hand():
    # mu = 1/2, gamma = 0. Negatives: exp(2 S) = 3 (row 0, column 1), 8 (row 1, column 0).
    # Positives: 1, -2.
    S = [[1.0, log(3) / 2], [log(8) / 2, -2.0]]
    options = {"temperature": 0.5, "margin": 0.0, "diversity": None}
    rows, cols = oracle.dcl(S, PAIRS, PAIRS, **options, reduction="none")
    assert rows == pytest.approx([(log(4) - log(2)) / 2, (log(9) - log(1e-6)) / 2])
    assert cols == pytest.approx([(log(9) - log(2)) / 2, (log(4) - log(1e-6)) / 2])
    rows, _ = oracle.dcl(
        S, PAIRS, PAIRS, **options, positive="relu", positive_weight=3.0, reduction="none"
    )
    assert rows == pytest.approx([log(4) / 2 - 3 * log(2), log(9) / 2])
    # gamma = (1/2) log 3 takes 3 to 1 and 8 to 8/3.
    rows, _ = oracle.dcl(S, PAIRS, PAIRS, 0.5, log(3) / 2, None, positive="relu", reduction="none")
    assert rows == pytest.approx([0, log(11 / 3) / 2])


def test_dcl_averages_over_positives():
    # mu = 1, gamma = 0. Row 0: positives 1 and 0, negative log 2: log 3 - (log 2 + 0)/2.
    S = [[1.0, 0.0, log(2)], [0.0, log(3), exp(1) - 1]]
    rows, cols = oracle.dcl(S, ROWS, COLS, 1.0, 0.0, None, reduction="none")
    assert rows == pytest.approx([log(3) - log(2) / 2, log(5) - 1])
    assert cols == pytest.approx([0, log(4), log(3) - 1])


def test_dcl_divides_the_temperature_by_the_diversity():
    # The negatives of test_std_diversity_by_hand: d = 1, 5/6. Positives 0 add nothing. mu = 0.1,
    # gamma = 0.3.
    S = [[0.0, 0.5, 0.1], [0.4, 0.0, 0.6]]
    ids = ([0, 1], [0, 1, 2])
    epsilon = 0.2 * log(2)
    rows, cols = oracle.dcl(S, *ids, epsilon=epsilon, reduction="none")
    # 0.5 and 0.1, less 0.3, over 0.1
    assert rows[0] == pytest.approx(0.1 * log(1 + exp(2) + exp(-2)))
    # 0.1 and 0.3 over 0.1 (5/6)
    assert rows[1] == pytest.approx(0.1 * log(1 + exp(1.2) + exp(3.6)))
    # Columns 0 and 1 have one negative each, SD at the floor, raw 1. Column 2 (no positive): 0.1
    # and 0.6, SD 0.25, raw 1 + 2^(-0.8): an anchor without a positive enters the maximum, but
    # contributes 0.
    d = 1 / (1 + 2**-0.8)
    assert cols == pytest.approx([0.1 * log(1 + exp(1 / d)), 0.1 * log(1 + exp(2 / d)), 0])
    fixed = oracle.dcl(S, *ids, diversity=([1, 5 / 6], [d, d, 1]), reduction="none")
    assert fixed[0] == pytest.approx(rows)
    assert fixed[1] == pytest.approx(cols)


def test_dcl_with_entropy_diversity_by_hand():
    # S of zeros: P = 1/2, H = 1/2 bit everywhere, so all scores are 1: four times mu log(1 +
    # exp(-gamma/mu)).
    value = oracle.dcl(np.zeros((2, 2)), PAIRS, PAIRS, 1.0, log(2), "entropy", reduction="sum")
    assert value == pytest.approx(4 * log(1.5))


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
    assert loss(S, [1, 5], [1, 6], reduction="mean") == pytest.approx(rows[0] + cols[0])
    # Only positives, or only negatives: there is no valid anchor.
    assert loss(S, [1, 1], [1, 1], reduction="mean") == 0
    assert loss(S, [1, 2], [3, 4], reduction="mean") == 0
    with pytest.raises(ValueError, match="reduction"):
        loss(S, [1, 5], [1, 6], reduction="median")


def test_fast_rerank_by_hand():
    # exp(A) = [[1, 2], [3, 1]]: column sums 4 and 3, row sums 3 and 4; the second parameter scales
    # A only.
    A = np.log([[1.0, 2], [3, 1]])
    i2t, t2i = oracle.fast_rerank(A, i2t=(1, 2), t2i=(1, 3))
    assert i2t == pytest.approx(np.log([[1 / 4, 4 / 3], [9 / 4, 1 / 3]]))
    assert t2i == pytest.approx(np.log([[1 / 3, 8 / 3], [27 / 4, 1 / 4]]))
    i2t, _ = oracle.fast_rerank(A, i2t=(2, 1))  # column sums of exp(2 A): 10 and 5
    assert i2t == pytest.approx(np.log([[1 / 10, 2 / 5], [3 / 10, 1 / 5]]))


def test_retrieval_metrics_by_hand():
    # Image 7 ranks its captions 1st and 3rd: rank 1, R-Precision 1/2, mAP@2 = (1/1 + 0)/2.
    # Image 9 ranks its caption 2nd: rank 2, R-Precision 0, mAP@1 = 0.
    # Of both, a quarter of the captions is found first on average; average precisions 5/6 and 1/2.
    # Texts as queries: caption 0 finds image 7 first, caption 1 second, caption 2 second.
    S = [[0.9, 0.1, 0.4], [0.2, 0.6, 0.3]]
    figures = oracle.retrieval_metrics(S, ROWS, COLS)
    expected = {
        "i2t_r1": 50, "i2t_r5": 100, "i2t_r10": 100, "i2t_median_rank": 1.5,
        "i2t_r_precision": 25, "i2t_map_at_r": 25,
        "t2i_r1": 100 / 3, "t2i_r5": 100, "t2i_r10": 100, "t2i_median_rank": 2,
        "t2i_r_precision": 100 / 3, "t2i_map_at_r": 100 / 3,
        "rsum": 50 + 100 / 3 + 400, "i2t_skewness": 0, "t2i_skewness": 0,
        "i2t_recall_at_1": 25, "i2t_recall_at_5": 100, "i2t_recall_at_10": 100,
        "t2i_recall_at_1": 100 / 3, "t2i_recall_at_5": 100, "t2i_recall_at_10": 100,
        "i2t_mrr": 75, "t2i_mrr": 200 / 3, "i2t_map": 200 / 3, "t2i_map": 200 / 3,
        "i2t_mean_rank": 1.5, "t2i_mean_rank": 5 / 3, "i2t_ndcg_at_1": 50, "t2i_ndcg_at_1": 100 / 3,
    }  # fmt: skip
    second = 1 / log2(3)
    for k in (5, 10):
        expected[f"i2t_ndcg_at_{k}"] = 50 * (1.5 / (1 + second) + second)
        expected[f"t2i_ndcg_at_{k}"] = 100 * (1 + 2 * second) / 3
    assert figures == pytest.approx(expected)


def test_map_at_r_weighs_the_order_and_r_precision_does_not():
    # One image, captions 0..2 positive, ranked: negative, positive, positive | positive, negative.
    S = [[0.4, 0.3, 0.2, 0.5, 0.1]]
    ids = [1, 1, 1, 2, 3]
    figures = oracle.retrieval_metrics(S, [1], ids)
    assert figures["i2t_r_precision"] == pytest.approx(100 * 2 / 3)
    assert figures["i2t_map_at_r"] == pytest.approx(100 * (1 / 2 + 2 / 3) / 3)
    assert figures["i2t_median_rank"] == 2
    # Texts 3 and 4 have no image: they are no queries, and all others are right.
    assert figures["t2i_r1"] == 100


def test_ties_count_against_the_positive():
    # Image 0 ties with one negative: rank 2. Image 1 with two: rank 3.
    S = [[0.5, 0.5, 0.1], [0.7, 0.7, 0.7], [0.0, 0.0, 0.2]]
    figures = oracle.retrieval_metrics(S, [0, 1, 2], [0, 1, 2])
    assert figures["i2t_r1"] == pytest.approx(100 / 3)
    assert figures["i2t_median_rank"] == 2
    assert figures["i2t_map_at_r"] == pytest.approx(100 / 3)
    # A tie among positives has no cost.
    assert oracle.retrieval_metrics([[0.5, 0.5]], [0], [0, 0])["i2t_r_precision"] == 100


def test_skewness_by_hand():
    # One query, eleven items: ten occur once and one never. A Bernoulli variable with p = 10/11 has
    # skewness (1 - 2p)/sqrt(p (1 - p)) = (-9/11)/(sqrt(10)/11).
    S = np.linspace(1, 0, 11)[None]
    figures = oracle.retrieval_metrics(S, [0], range(11))
    assert figures["i2t_skewness"] == pytest.approx(-9 / sqrt(10))
    assert figures["t2i_skewness"] == 0  # eleven queries, one item
    # Query 0 ties all twelve items and therefore omits its own, 0, and the last other, 11; query 1
    # omits 5 and 11. N = 0 once, 1 twice, 2 nine times: mean 5/3, variance (25 + 2*4 + 9)/9/12,
    # third (-125 - 2*8 + 9)/27/12.
    S = np.zeros((2, 12))
    S[1, [5, 11]] = -1
    S[1, [1, 2]] = 1
    figures = oracle.retrieval_metrics(S, [0, 1], range(12))
    assert figures["i2t_skewness"] == pytest.approx((-132 / 27 / 12) / (42 / 9 / 12) ** 1.5)


def test_metrics_without_any_answer_are_nan():
    figures = oracle.retrieval_metrics([[0.5]], [0], [1])
    assert figures["i2t_r1"] == pytest.approx(nan, nan_ok=True)
    assert figures["rsum"] == pytest.approx(nan, nan_ok=True)


def test_large_scales_do_not_overflow():
    # Row 0: (1/90) log(1 + exp(90 (20 - 0.5))) = 19.5 to the last digit, minus (1/2) log(1 + 0).
    rows, _ = oracle.hal([[0.0, 20.0], [0.0, 0.0]], PAIRS, PAIRS, reduction="none")
    assert rows[0] == pytest.approx(19.5)
    assert oracle.infonce([[0.0, 8.0], [0.0, 0.0]], PAIRS, PAIRS, 0.01, "none")[0][
        0
    ] == pytest.approx(800)
