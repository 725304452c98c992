"""The second part of the oracle against values computed by hand."""

from math import exp, log, log2, sqrt

import numpy as np
import pytest
from pytest import approx

from support import oracle_more

AXES = np.eye(3)


def columns(S):
    """Unit vectors w_j with cos(e_1, w_j) = S_0j and cos(e_2, w_j) = S_1j."""
    vectors = []
    for a, b in np.array(S).T:
        third = sqrt(1 - a * a - b * b)
        vectors.append([a, b, third])
    return np.array(vectors)


def memory_case():
    """One pair of id 1; cos(v, w) = 0, cos(v, w key) = cos(w, v key) = 0.6; the last memory entry
    has id 1.
    """
    V = [[2, 0]]
    W = [[0, 1]]
    V_keys = [[4, 3]]
    W_keys = [[3, 4]]
    memory_images = [[0, 2], [3, 4], [1, 0]]  # cosines with w: 1, 0.8, masked
    memory_texts = [[0, 5], [4, 3], [1, 0]]  # cosines with v: 0, 0.8, masked
    memory_ids = [2, 3, 1]
    return V, W, V_keys, W_keys, memory_images, memory_texts, [1], [1], memory_ids


def test_memory_dcl_by_hand():
    # mu = 0.5, gamma = 0.3: exponents -0.6 and 1 for the image, 1.4 and 1 for the text.
    case = memory_case()
    options = {"temperature": 0.5, "margin": 0.3, "diversity": None}
    image = 0.5 * log(1 + exp(-0.6) + exp(1))
    text = 0.5 * log(1 + exp(1.4) + exp(1))
    positive = log(1.6)  # of 0.6, the score of the keys
    images, texts = oracle_more.memory_dcl(*case, **options, reduction="none")
    assert images == approx([image - 0.5 * positive])
    assert texts == approx([text - 0.5 * positive])
    images, texts = oracle_more.memory_dcl(*case, **options, positive_weight=2.0, reduction="none")
    assert images == approx([image - 2 * positive])
    # Within the batch, the positive is log(1 + 0) = 0.
    of_batch = oracle_more.memory_dcl(*case, **options, positive_from="batch", reduction="sum")
    assert of_batch == approx(image + text)


@pytest.mark.parametrize("swap", [False, True])
def test_memory_diversity_is_an_average_that_is_not_normalised_again(swap):
    # Batch: SD 0.2 and 0.1, memory: 0.1 and 0.2; epsilon = 0.2 ln 2: (1, 5/6) and (5/6, 1).
    ids = [0, 1]
    other_ids = [0, 1, 2]
    memory_ids = [5, 6]
    epsilon = 0.2 * log(2)
    own = 3 * AXES[:2]
    others = columns([[0, 0.5, 0.1], [0.4, 0, 0.6]])
    memory = columns([[0.4, 0.6], [0.5, 0.1]])
    unused = np.zeros((2, 3))
    if swap:
        side = 1
        embeddings = (others, own, memory, unused, other_ids, ids, memory_ids)
    else:
        side = 0
        embeddings = (own, others, unused, memory, ids, other_ids, memory_ids)
    diversities = oracle_more.memory_diversity(*embeddings, "std", epsilon)
    assert diversities[side] == approx([11 / 12, 11 / 12])

    V, W, *rest = embeddings
    inputs = (V, W, V, W, *rest)
    # Positives 0 add nothing; 0.4 and 0.6 (row 0), 0.5 and 0.1 (row 1), less 0.3, over 0.1 (11/12).
    row_0 = 0.1 * log(1 + exp(12 / 11) + exp(36 / 11))
    row_1 = 0.1 * log(1 + exp(24 / 11) + exp(-24 / 11))
    values = oracle_more.memory_dcl(*inputs, epsilon=epsilon, reduction="none")
    assert values[side] == approx([row_0, row_1])
    constant = [11 / 12] * 3
    fixed = oracle_more.memory_dcl(*inputs, diversity=(constant, constant), reduction="none")
    assert fixed[side] == approx([row_0, row_1])


def test_memory_entropy_diversity_by_hand():
    # tau = 1/ln 3. Batch: all scores 0, H = 1/2 bit on both rows, so (1, 1). Memory: row 0 has P =
    # 3/4, 1/4, both negatives; row 1 has P = 1/2, 1/2, its second entry masked: H = 1/2 bit.
    memory = AXES[[0, 2]]
    V = AXES[:2]
    W = AXES[[2, 2]]
    embeddings = (V, W, memory, memory, [0, 1], [0, 1], [5, 1])
    images, texts = oracle_more.memory_diversity(*embeddings, "entropy", 0.1, 1 / log(3))
    entropy_0 = 0.75 * log2(4 / 3) + 0.5
    raw_0 = 1 + exp(-0.1 / entropy_0)
    raw_1 = 1 + exp(-0.1 / 0.5)
    of_batch = 1
    of_memory = raw_1 / raw_0
    expected = [1, (of_batch + of_memory) / 2]
    assert images == approx(expected)
    # Both texts score 0 and 1 against the images in the memory: P = 1/4, 3/4; text 1 keeps the
    # first: 1/2 bit.
    assert texts == approx(expected)


def test_uto_by_hand():
    # gamma = 2, epsilon = 0.5. Memory terms only: image exponents -1 and 0.6, text exponents 1 and
    # 0.6.
    case = memory_case()
    options = {"scale": 2.0, "margin": 0.5}
    image = 0.5 * log(1 + exp(-1) + exp(0.6))
    text = 0.5 * log(1 + exp(1) + exp(0.6))
    positive = log(1.6)
    # HAL: no negatives, so 0
    images, texts = oracle_more.uto(*case, **options, reduction="none")
    assert images == approx([image - positive])
    assert texts == approx([text - positive])
    mean = oracle_more.uto(*case, **options, reduction="mean")
    assert mean == approx(image + text - 2 * positive)


def test_sigmoid_by_hand():
    # exp(S) = [[3, 3], [1, 2], [1, 1]], scale 1, bias 0: a positive costs log(1 + 1/x), a negative
    # log(1 + x).
    S = np.log([[3.0, 3], [1, 2], [1, 1]])
    inputs = (S, [0, 1, 5], [0, 1], 1.0, 0.0)
    positive_0 = log(4 / 3)
    positive_1 = log(3 / 2)
    right_of_0 = log(4)
    below_0 = log(2)
    row_2 = log(2) + log(2)  # it has no positive
    rows, cols = oracle_more.sigmoid(*inputs, "none")
    # Half of each row's and of each column's sum.
    row_0 = positive_0 + right_of_0
    row_1 = below_0 + positive_1
    assert rows == approx([row_0 / 2, row_1 / 2, row_2 / 2])
    col_0 = positive_0 + below_0 + log(2)
    col_1 = right_of_0 + positive_1 + log(2)
    assert cols == approx([col_0 / 2, col_1 / 2])
    total = row_0 + row_1 + row_2
    assert oracle_more.sigmoid(*inputs, "sum") == approx(total)
    assert oracle_more.sigmoid(*inputs, "mean") == approx(total / 6 + total / 4)

    # Square: (1/N) sum. At the defaults t S + b = -10 for S = 0 and 0 for S = 1.
    square = oracle_more.sigmoid(np.eye(2), [0, 1], [0, 1])
    pair = 2 * log(2) + 2 * log(1 + exp(-10))
    assert square == approx(pair / 2)

    # A lone positive pair counts, and a large scale does not overflow.
    alone = oracle_more.sigmoid([[-1.0]], [0], [0], 1e4, 0.0, "sum")
    assert alone == approx(1e4)


def test_variance_sigma_by_hand():
    # Row (0.6, 0, 0.8): without its entry 0, std of (0, 0.8) = 0.4 sqrt(2), divisor 1.
    S = np.array([[[0.6, 0, 0.8]], [[0, 0.8, 0.6]], [[0, 0, 0]]])
    images, texts = oracle_more.variance_sigma(S)
    deviations = sqrt(2) * np.array([0.4, 0.1, 0.3])
    assert images[0, 0] == approx(1 + deviations)
    wide = 1 + 0.4 * sqrt(2)
    assert texts[:, 0, 1] == approx([wide, 1, wide])

    # Four values, three left: (0, 0, 3) has mean 1 and sample variance 6/2.
    images, _ = oracle_more.variance_sigma(np.array([[[9.0, 0, 0, 3]]]))
    assert images[0, 0, 0] == approx(1 + sqrt(3))

    # Of two values one is left, without a spread.
    images, texts = oracle_more.variance_sigma(np.array([[[0.5, 0.1]]]))
    ones = np.ones((1, 1, 2))
    assert np.array_equal(images, ones)
    assert np.array_equal(texts, ones)


# Texts are the axes, so that scores are the coordinates of images.
# Image 2 (a zero vector, id 8) has no caption.
CAPTIONED = np.array([[[3.0, 0, 4]], [[0, 4, 3]], [[0, 0, 0]]])
CAPTIONS = 2 * AXES
CAPTIONED_IDS = ([7, 9, 8], [7, 7, 9])
SIGMA = 1 + 0.4 * sqrt(2)  # of the pairs (0, 0) and (1, 2)
OTHER_SIGMA = 1 + 0.1 * sqrt(2)  # of the pair (0, 1)
# A hinge over sigma squared, plus log sigma.
SMALL_HINGE = 0.4 / SIGMA**2 + log(SIGMA)
LARGE_HINGE = 1 / OTHER_SIGMA**2 + log(OTHER_SIGMA)


def test_variance_aware_by_hand():
    inputs = (CAPTIONED, CAPTIONS, *CAPTIONED_IDS)
    images, texts = oracle_more.variance_aware(*inputs, reduction="none")
    # Image 0 against 0.8: hinges 0.4 (positive 0.6) and 1 (positive 0). Image 1 against 0.8: hinge
    # 0.4.
    assert images == approx([SMALL_HINGE + LARGE_HINGE, SMALL_HINGE, 0])
    # Text 0 against 0: hinge 0. Text 1 against 0.8: hinge 1. Text 2 against 0.8: hinge 0.4.
    assert texts == approx([log(SIGMA), LARGE_HINGE, SMALL_HINGE])
    mean = oracle_more.variance_aware(*inputs, reduction="mean")
    assert mean == approx(sum(images) / 3 + sum(texts) / 3)

    # The mean is over three pairs, for any number of images: without image 2 nothing changes.
    fewer = (CAPTIONED[:2], CAPTIONS, [7, 9], [7, 7, 9])
    mean_of_fewer = oracle_more.variance_aware(*fewer, reduction="mean")
    assert mean_of_fewer == approx(mean)

    # Heads are summed.
    two_heads = CAPTIONED.repeat(2, axis=1)
    twice = oracle_more.variance_aware(two_heads, CAPTIONS, *CAPTIONED_IDS, reduction="mean")
    assert twice == approx(2 * mean)


def test_dynamic_orthogonal_by_hand():
    # Two images with two heads each: |cos| 0.6 and 0, less the slack 0.4.
    residuals = [[[2.0, 0], [-3, 4]], [[0, 1], [5, 0]]]
    values = oracle_more.dynamic_orthogonal(residuals, reduction="none")
    assert values == approx([0.2, 0])
    # one hinge per image
    mean = oracle_more.dynamic_orthogonal(residuals)
    assert mean == approx(0.2 / 2)
    # Each pair of heads is summed in both orders: 0.6 + 0.6, and 0.4 is subtracted once.
    total = oracle_more.dynamic_orthogonal(residuals, reduction="sum", pair_reduction="sum")
    assert total == approx(0.8)
    frobenius = oracle_more.dynamic_orthogonal(residuals, None, 0.1, "frobenius", "sum")
    assert frobenius == approx(sqrt(2 * 0.36) / 4 - 0.1)

    # Six parallel heads: 1, 30 and the 0.152 that never reaches a slack of 0.4.
    parallel = np.ones((1, 6, 3))
    by_reduction = {"mean": 1, "sum": 30, "frobenius": sqrt(30) / 36}
    for pair_reduction, expected in by_reduction.items():
        value = oracle_more.dynamic_orthogonal(parallel, None, 0, pair_reduction)
        assert value == approx(expected)

    one_head = np.ones((1, 1, 3))
    assert oracle_more.dynamic_orthogonal(one_head, None, 0) == 0
    zeros = np.zeros((1, 3, 3))
    assert oracle_more.dynamic_orthogonal(zeros, None, 0) == 0


def test_dynamic_orthogonal_gates():
    # Heads that are off count as zeros: 2 of the 6 ordered pairs of three parallel heads remain.
    parallel = np.ones((2, 3, 4))
    heads_on = [[1, 1, 0], [1, 0, 0]]
    values = oracle_more.dynamic_orthogonal(parallel, heads_on, 0, reduction="none")
    assert values == approx([1 / 3, 0])

    # Dimensions: (0.6, 0.8, 0) and (0.6, -0.8, 0).
    residuals = [[[3.0, 4, 0], [3, -4, 0]]]
    without_the_second = [[1, 0, 1]]
    everything = oracle_more.dynamic_orthogonal(residuals, None, 0)
    assert everything == approx(0.28)
    gated = oracle_more.dynamic_orthogonal(residuals, without_the_second, 0)
    assert gated == approx(0.36)
    # 1 if the rest is normalised.
    gated_first = oracle_more.dynamic_orthogonal(residuals, without_the_second, 0, gate_first=True)
    assert gated_first == approx(1)
    with pytest.raises(ValueError, match="gate"):
        oracle_more.dynamic_orthogonal(residuals, [[1, 1, 1, 1]])


def test_spherical_kmeans_step_by_hand():
    centroids = [[1.0, 0], [0, 1], [-1, 0]]
    counts = [3, 0, 7]
    x = [[2.0, 0], [3, 3], [0, 5], [-3, 4]]  # (3, 3) ties between the first two
    ids, new, seen = oracle_more.spherical_kmeans_step(centroids, counts, x)
    assert ids.tolist() == [0, 0, 1, 1]
    assert seen.tolist() == [5, 2, 7]
    # Three times the old centroid, (1, 0), and (3, 3) normalised.
    first = np.array([4 + sqrt(0.5), sqrt(0.5)])
    # (0, 1) and (-0.6, 0.8); the old centroid counts 0.
    second = np.array([-0.6, 1.8])
    assert new[0] == approx(first / np.linalg.norm(first))
    assert new[1] == approx(second / np.linalg.norm(second))
    assert new[2] == approx([-1, 0])
    assert len(new) == 3
    maxima = [1, sqrt(0.5), 1, 0.8]
    objective = oracle_more.kmeans_objective(x, centroids)
    assert objective == approx(sum(maxima) / 4)

    # A member opposite to a centroid of count 1 cancels it: the centroid stays.
    _, new, seen = oracle_more.spherical_kmeans_step([[1.0, 0]], [1], [[-1.0, 0]])
    assert new.tolist() == [[1, 0]]
    assert seen.tolist() == [2]


def test_prototype_classification_by_hand():
    # Logits (log 3, 0) and (0, log 3): probabilities 3/4, 1/4 and 1/4, 3/4; (0, 0): 1/2, 1/2.
    V = [[log(3), 0], [0, 0]]
    W = [[0, log(3)], [log(3), 0]]
    inputs = (V, W, np.eye(2), None, [0, 1])
    images, texts = oracle_more.prototype_classification(*inputs, "none")
    assert images == approx([log(4 / 3), log(2)])
    assert texts == approx([log(4), log(4)])
    mean = oracle_more.prototype_classification(*inputs)
    assert mean == approx(log(8 / 3) / 2 + log(4))

    # A third cluster with a row of zeros, and a bias of log 2 on the first: 6 of 6 + 1 + 1, and 1
    # of 2 + 1 + 1.
    weight = [[1.0, 0], [0, 1], [0, 0]]
    bias = [log(2), 0, 0]
    images, _ = oracle_more.prototype_classification(V, W, weight, bias, [0, 2], "none")
    assert images == approx([log(8 / 6), log(4)])


def test_set_aggregations_by_hand():
    first = [[3, 4, 0], [0, 5, 0]]
    second = [[1, 0, 0], [0, 0, 0]]
    scores = oracle_more.set_cosine([first, second], AXES[:2])
    assert scores[0] == approx(np.array([[0.6, 0.8], [0, 1]]))
    assert scores[1] == approx(np.array([[1, 0], [0, 0]]))
    assert len(scores) == 2
    maxima = np.array([[0.6, 1], [1, 0]])
    assert oracle_more.set_max(scores) == approx(maxima)
    means = np.array([[0.3, 0.9], [0.5, 0]])
    assert oracle_more.set_mean(scores) == approx(means)


def test_smooth_chamfer_by_hand():
    # A = {e1, e2}, B = {e1}
    pair = [AXES[:2]]
    single = [2 * AXES[:1]]
    for alpha in (0.5, 16):
        from_pair = 1 / 4  # (1 + 0)/4
        from_single = log(exp(alpha) + 1) / (2 * alpha)
        expected = np.array([[from_pair + from_single]])
        assert oracle_more.smooth_chamfer(pair, single, alpha) == approx(expected)
        assert oracle_more.smooth_chamfer(single, pair, alpha) == approx(expected)

    # Sharp, it is the Chamfer similarity (1 + 0)/4 + 1/2; of single vectors the cosine.
    sharp = oracle_more.smooth_chamfer(pair, single, 1e6)
    assert sharp == approx(np.array([[0.75]]))
    cosines = oracle_more.smooth_chamfer([[[3, 4]]], [[[1, 0]], [[0, 1]]])
    assert cosines == approx(np.array([[0.6, 0.8]]))

    # Two equal vectors on each side: 1 + log(2)/alpha.
    equal = [AXES[[0, 0]]]
    assert oracle_more.smooth_chamfer(equal, equal, 2) == approx(1 + log(2) / 2)
