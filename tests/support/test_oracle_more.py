"""The second part of the oracle against values computed by hand."""

from math import exp, log, log2, sqrt

import numpy as np
import pytest

from support import oracle, oracle_more

AXES = np.eye(3)


def columns(S):
    """Unit vectors w_j with cos(e_1, w_j) = S_0j and cos(e_2, w_j) = S_1j."""
    return np.array([[a, b, sqrt(1 - a * a - b * b)] for a, b in np.array(S).T])


def memory_case():
    """One pair of id 1; cos(v, w) = 0, cos(v, w key) = cos(w, v key) = 0.6; the last memory entry
    has id 1.
    """
    memory_images = [[0, 2], [3, 4], [1, 0]]  # cosines with w: 1, 0.8, masked
    memory_texts = [[0, 5], [4, 3], [1, 0]]  # cosines with v: 0, 0.8, masked
    return [[2, 0]], [[0, 1]], [[4, 3]], [[3, 4]], memory_images, memory_texts, [1], [1], [2, 3, 1]


def test_memory_dcl_by_hand():
    # mu = 0.5, gamma = 0.3: exponents -0.6 and 1 for the image, 1.4 and 1 for the text.
    options = {"temperature": 0.5, "margin": 0.3, "diversity": None}
    image = log(1 + exp(-0.6) + exp(1))
    text = log(1 + exp(1.4) + exp(1))
    images, texts = oracle_more.memory_dcl(*memory_case(), **options, reduction="none")
    assert images == pytest.approx([0.5 * image - 0.5 * log(1.6)])
    assert texts == pytest.approx([0.5 * text - 0.5 * log(1.6)])
    images, texts = oracle_more.memory_dcl(
        *memory_case(), **options, positive_weight=2.0, reduction="none"
    )
    assert images == pytest.approx([0.5 * image - 2 * log(1.6)])
    batch = oracle_more.memory_dcl(
        *memory_case(), **options, positive_from="batch", reduction="sum"
    )
    assert batch == pytest.approx(0.5 * image + 0.5 * text)  # log(1 + 0) = 0


def test_memory_dcl_floors_the_positive():
    V, W, _, _, *rest = memory_case()
    options = {"temperature": 0.5, "diversity": None, "reduction": "none"}
    clamped, _ = oracle_more.memory_dcl(V, W, [[0, -1]], [[-1, 0]], *rest, **options)
    cut, _ = oracle_more.memory_dcl(V, W, [[0, -1]], [[-1, 0]], *rest, **options, positive="relu")
    assert clamped - cut == pytest.approx([-0.5 * log(1e-6)])


def test_memory_dcl_averages_over_the_keys_of_the_id():
    # Text keys of id 7 at cosines 1 and 0 to the image: (log 2 + 0)/2; mu = 1, gamma = 0, one
    # negative at 0. The image of id 8 has no key, text 2 (id 9) no image.
    V = AXES[[0, 0]]
    W = AXES[:3]
    keys = AXES[:3]
    memory = (AXES[[2]], AXES[[2]], [7, 8], [7, 7, 9], [5])
    options = {"temperature": 1.0, "margin": 0.0, "diversity": None}
    images, texts = oracle_more.memory_dcl(
        V, W, AXES[[1, 0]], keys, *memory, **options, reduction="none"
    )
    assert images == pytest.approx([log(2) - log(2) / 2, 0])
    # The image key of id 7 is e_2: cosines 0 and 1 with texts 0 and 1.
    assert texts == pytest.approx([log(2), log(2) - log(2), 0])
    mean = oracle_more.memory_dcl(V, W, AXES[[1, 0]], keys, *memory, **options, reduction="mean")
    assert mean == pytest.approx(log(2) / 2 / 1 + log(2) / 2)


@pytest.mark.parametrize("swap", [False, True])
def test_memory_diversity_is_an_average_that_is_not_normalised_again(swap):
    # Batch: SD 0.2 and 0.1, memory: 0.1 and 0.2; epsilon = 0.2 ln 2: (1, 5/6) and (5/6, 1).
    ids = [0, 1]
    other_ids = [0, 1, 2]
    memory_ids = [5, 6]
    epsilon = 0.2 * log(2)
    others = columns([[0, 0.5, 0.1], [0.4, 0, 0.6]])
    memory = columns([[0.4, 0.6], [0.5, 0.1]])
    unused = np.zeros((2, 3))
    if swap:
        embeddings = (others, 3 * AXES[:2], memory, unused, other_ids, ids, memory_ids)
    else:
        embeddings = (3 * AXES[:2], others, unused, memory, ids, other_ids, memory_ids)
    div = oracle_more.memory_diversity(*embeddings, "std", epsilon)[int(swap)]
    assert div == pytest.approx([11 / 12, 11 / 12])
    V, W, *rest = embeddings
    # Positives 0 add nothing; 0.4 and 0.6 (row 0), 0.5 and 0.1 (row 1), less 0.3, over 0.1 (11/12).
    values = oracle_more.memory_dcl(V, W, V, W, *rest, epsilon=epsilon, reduction="none")[int(swap)]
    expected = [
        0.1 * log(1 + exp(12 / 11) + exp(36 / 11)),
        0.1 * log(1 + exp(24 / 11) + exp(-24 / 11)),
    ]
    assert values == pytest.approx(expected)
    fixed = oracle_more.memory_dcl(
        V, W, V, W, *rest, diversity=([11 / 12] * 3, [11 / 12] * 3), reduction="none"
    )
    assert fixed[int(swap)] == pytest.approx(expected)


def test_memory_entropy_diversity_by_hand():
    # tau = 1/ln 3. Batch: all scores 0, H = 1/2 bit on both rows, so (1, 1). Memory: row 0 has P =
    # 3/4, 1/4, both negatives; row 1 has P = 1/2, 1/2, its second entry masked: H = 1/2 bit.
    memory = AXES[[0, 2]]
    V = AXES[:2]
    W = AXES[[2, 2]]
    embeddings = (V, W, memory, memory, [0, 1], [0, 1], [5, 1])
    images, texts = oracle_more.memory_diversity(*embeddings, "entropy", 0.1, 1 / log(3))
    first = 1 + exp(-0.1 / (0.75 * log2(4 / 3) + 0.5))
    assert images == pytest.approx([1, (1 + (1 + exp(-0.2)) / first) / 2])
    # Both texts score 0 and 1 against the images in the memory: P = 1/4, 3/4; text 1 keeps the
    # first: 1/2 bit.
    assert texts == pytest.approx([1, (1 + (1 + exp(-0.2)) / first) / 2])


def test_uto_by_hand():
    # gamma = 2, epsilon = 0.5. Memory terms only: image exponents -1 and 0.6, text exponents 1 and
    # 0.6.
    options = {"scale": 2.0, "margin": 0.5}
    image = 0.5 * log(1 + exp(-1) + exp(0.6))
    text = 0.5 * log(1 + exp(1) + exp(0.6))
    # HAL: no negatives, so 0
    images, texts = oracle_more.uto(*memory_case(), **options, reduction="none")
    assert images == pytest.approx([image - log(1.6)])
    assert texts == pytest.approx([text - log(1.6)])
    assert oracle_more.uto(*memory_case(), **options, reduction="mean") == pytest.approx(
        image + text - 2 * log(1.6)
    )


def test_uto_weighs_the_batch_and_counts_each_part_by_itself():
    # gamma = 1, epsilon = 0. Batch: identity, so every row and column is log(1 + 1) - log(2)/2 =
    # log(2)/2. The memory holds id 0 only, so pair 0 has no negative there; its text scores 1 with
    # e_2, its image 0.
    embeddings = (
        AXES[:2],
        AXES[:2],
        AXES[:2],
        AXES[[0, 2]],
        AXES[[0]],
        AXES[[1]],
        [0, 1],
        [0, 1],
        [0],
    )
    options = {"scale": 1.0, "margin": 0.0, "batch_weight": 3.0}
    images, texts = oracle_more.uto(*embeddings, **options, reduction="none")
    # the text key is e_3: log(1 + 0)
    assert images == pytest.approx([1.5 * log(2), 1.5 * log(2) + log(1 + exp(1))])
    assert texts == pytest.approx([1.5 * log(2), 1.5 * log(2) + log(2) - log(2)])
    assert oracle_more.uto(*embeddings, **options, reduction="sum") == pytest.approx(
        sum(images) + sum(texts)
    )
    mean = 3 * log(2) + log(1 + exp(1))
    assert oracle_more.uto(*embeddings, **options, reduction="mean") == pytest.approx(mean)


@pytest.mark.parametrize("diversity", ["std", "entropy", None])
def test_an_empty_memory_gives_nothing(diversity):
    V, W, V_keys, W_keys, *_ = memory_case()
    arguments = (V, W, V_keys, W_keys, np.zeros((0, 2)), np.zeros((0, 2)), [1], [1], [])
    assert oracle_more.memory_dcl(*arguments, diversity=diversity) == 0
    assert oracle_more.uto(*arguments) == 0


def test_sigmoid_by_hand():
    # exp(S) = [[3, 3], [1, 2], [1, 1]], scale 1, bias 0: a positive costs log(1 + 1/x), a negative
    # log(1 + x).
    S = np.log([[3.0, 3], [1, 2], [1, 1]])
    rows, cols = oracle_more.sigmoid(S, [0, 1, 5], [0, 1], 1.0, 0.0, "none")
    assert rows == pytest.approx([log(4 / 3 * 4) / 2, log(2 * 3 / 2) / 2, log(2 * 2) / 2])
    assert cols == pytest.approx([log(4 / 3 * 2 * 2) / 2, log(4 * 3 / 2 * 2) / 2])
    total = log(4 / 3 * 4 * 2 * 3 / 2 * 2 * 2)
    assert oracle_more.sigmoid(S, [0, 1, 5], [0, 1], 1.0, 0.0, "sum") == pytest.approx(total)
    assert oracle_more.sigmoid(S, [0, 1, 5], [0, 1], 1.0, 0.0, "mean") == pytest.approx(
        total / 6 + total / 4
    )
    # Square: (1/N) sum. At the defaults t S + b = -10 for S = 0 and 0 for S = 1.
    pair = 2 * log(2) + 2 * log(1 + exp(-10))
    assert oracle_more.sigmoid(np.eye(2), [0, 1], [0, 1]) == pytest.approx(pair / 2)
    # A lone positive pair counts, and a large scale does not overflow.
    assert oracle_more.sigmoid([[-1.0]], [0], [0], 1e4, 0.0, "sum") == pytest.approx(1e4)


def test_variance_sigma_by_hand():
    # Row (0.6, 0, 0.8): without its entry 0, std of (0, 0.8) = 0.4 sqrt(2), divisor 1.
    S = np.array([[[0.6, 0, 0.8]], [[0, 0.8, 0.6]], [[0, 0, 0]]])
    images, texts = oracle_more.variance_sigma(S)
    assert images[0, 0] == pytest.approx(1 + sqrt(2) * np.array([0.4, 0.1, 0.3]))
    assert texts[:, 0, 1] == pytest.approx([1 + 0.4 * sqrt(2), 1, 1 + 0.4 * sqrt(2)])
    # Four values, three left: (0, 0, 3) has mean 1 and sample variance 6/2.
    images, _ = oracle_more.variance_sigma(np.array([[[9.0, 0, 0, 3]]]))
    assert images[0, 0, 0] == pytest.approx(1 + sqrt(3))
    images, texts = oracle_more.variance_sigma(np.array([[[0.5, 0.1]]]))
    assert np.array_equal(images, np.ones((1, 1, 2)))
    assert np.array_equal(texts, np.ones((1, 1, 2)))


def test_variance_aware_by_hand():
    # Texts are the axes, so S are the coordinates; image 2 (a zero vector, id 8) has no caption.
    V = np.array([[[3.0, 0, 4]], [[0, 4, 3]], [[0, 0, 0]]])
    W = 2 * AXES
    ids = ([7, 9, 8], [7, 7, 9])
    # sigma of the pairs (0, 0) and (1, 2), of the pair (0, 1)
    a = 1 + 0.4 * sqrt(2)
    b = 1 + 0.1 * sqrt(2)
    images, texts = oracle_more.variance_aware(V, W, *ids, reduction="none")
    # Image 0 against 0.8: hinges 0.4 (positive 0.6) and 1 (positive 0). Image 1 against 0.8: hinge
    # 0.4.
    assert images == pytest.approx(
        [0.4 / a**2 + log(a) + 1 / b**2 + log(b), 0.4 / a**2 + log(a), 0]
    )
    # Text 0 against 0: hinge 0. Text 1 against 0.8: hinge 1. Text 2 against 0.8: hinge 0.4.
    assert texts == pytest.approx([log(a), 1 / b**2 + log(b), 0.4 / a**2 + log(a)])
    mean = oracle_more.variance_aware(V, W, *ids, reduction="mean")
    assert mean == pytest.approx(sum(images) / 3 + sum(texts) / 3)
    # The mean is over three pairs, for any number of images: without image 2 nothing changes.
    assert oracle_more.variance_aware(
        V[:2], W, [7, 9], [7, 7, 9], reduction="mean"
    ) == pytest.approx(mean)
    # Each text's own sigma: pair (0, 0) is left with (0, 0), the pairs (0, 1) and (1, 2) with (0.8,
    # 0).
    same, own = oracle_more.variance_aware(V, W, *ids, shared_sigma=False, reduction="none")
    assert same == pytest.approx(images)
    assert own == pytest.approx([0, 1 / a**2 + log(a), 0.4 / a**2 + log(a)])
    # Heads are summed; sigma is constant.
    twice = oracle_more.variance_aware(V.repeat(2, axis=1), W, *ids, reduction="mean")
    assert twice == pytest.approx(2 * mean)
    ones = np.ones((3, 1, 3))
    twos = np.full((3, 1, 3), 2.0)
    images, texts = oracle_more.variance_aware(V, W, *ids, reduction="none", sigma=(ones, twos))
    assert images == pytest.approx([1.4, 0.4, 0])
    assert texts == pytest.approx([log(2), 1 / 4 + log(2), 0.1 + log(2)])


def test_variance_aware_of_two_pairs_is_the_triplet_loss():
    # With two texts, one score is left besides the target: no spread, sigma = 1, log sigma = 0.
    # Positives 0.6, negatives 0.8: every hinge is 0.4.
    V = np.array([[[3.0, 4]], [[4, 3]]])
    W = np.eye(2)
    S = oracle.cosine(V[:, 0], W)
    for reduction in ("mean", "sum"):
        value = oracle_more.variance_aware(V, W, [0, 1], [0, 1], reduction=reduction)
        assert value == pytest.approx(oracle.triplet(S, [0, 1], [0, 1], reduction=reduction))
        assert value == pytest.approx(0.8 if reduction == "mean" else 1.6)


def test_variance_aware_drops_a_direction_without_negatives():
    # Text 0 (id 1) matches both images: no negative image. Image 0: [.2 - .6 + .8]+; image 1: [.2 -
    # .8 + .6]+ = 0.
    V = np.array([[[3.0, 4]], [[4, 3]]])
    W = np.eye(2)
    images, texts = oracle_more.variance_aware(V, W, [1, 1], [1, 2], reduction="none")
    assert images == pytest.approx([0.4, 0])
    assert texts == pytest.approx([0, 0])
    assert oracle_more.variance_aware(V, W, [1, 1], [1, 2], reduction="mean") == pytest.approx(
        0.4 / 2
    )
    assert oracle_more.variance_aware(V, W, [1, 1], [1, 1], reduction="mean") == 0


def test_dynamic_orthogonal_by_hand():
    residuals = [[[2.0, 0], [-3, 4]], [[0, 1], [5, 0]]]  # |cos| 0.6 and 0
    assert oracle_more.dynamic_orthogonal(residuals, reduction="none") == pytest.approx([0.2, 0])
    # one hinge per image
    assert oracle_more.dynamic_orthogonal(residuals) == pytest.approx(0.2 / 2)
    assert oracle_more.dynamic_orthogonal(
        residuals, reduction="sum", pair_reduction="sum"
    ) == pytest.approx(0.8)
    frobenius = oracle_more.dynamic_orthogonal(residuals, None, 0.1, "frobenius", "sum")
    assert frobenius == pytest.approx(sqrt(2 * 0.36) / 4 - 0.1)
    # Six parallel heads: 1, 30 and the 0.152 that never reaches a slack of 0.4.
    parallel = np.ones((1, 6, 3))
    for pair_reduction, value in (("mean", 1), ("sum", 30), ("frobenius", sqrt(30) / 36)):
        assert oracle_more.dynamic_orthogonal(parallel, None, 0, pair_reduction) == pytest.approx(
            value
        )
    assert oracle_more.dynamic_orthogonal(np.ones((1, 1, 3)), None, 0) == 0
    assert oracle_more.dynamic_orthogonal(np.zeros((1, 3, 3)), None, 0) == 0


def test_dynamic_orthogonal_gates():
    # Heads that are off count as zeros: 2 of the 6 ordered pairs of three parallel heads remain.
    parallel = np.ones((2, 3, 4))
    values = oracle_more.dynamic_orthogonal(parallel, [[1, 1, 0], [1, 0, 0]], 0, reduction="none")
    assert values == pytest.approx([1 / 3, 0])
    # Dimensions: (0.6, 0.8, 0) and (0.6, -0.8, 0) without the second: 0.36, or 1 if the rest is
    # normalised.
    residuals = [[[3.0, 4, 0], [3, -4, 0]]]
    gate = [[1, 0, 1]]
    assert oracle_more.dynamic_orthogonal(residuals, None, 0) == pytest.approx(0.28)
    assert oracle_more.dynamic_orthogonal(residuals, gate, 0) == pytest.approx(0.36)
    assert oracle_more.dynamic_orthogonal(residuals, gate, 0, gate_first=True) == pytest.approx(1)
    with pytest.raises(ValueError, match="gate"):
        oracle_more.dynamic_orthogonal(residuals, [[1, 1, 1, 1]])


def test_spherical_kmeans_step_by_hand():
    centroids = [[1.0, 0], [0, 1], [-1, 0]]
    counts = [3, 0, 7]
    x = [[2.0, 0], [3, 3], [0, 5], [-3, 4]]  # (3, 3) ties between the first two
    ids, new, seen = oracle_more.spherical_kmeans_step(centroids, counts, x)
    assert ids.tolist() == [0, 0, 1, 1]
    assert seen.tolist() == [5, 2, 7]
    first = np.array([4 + sqrt(0.5), sqrt(0.5)])
    second = np.array([-0.6, 1.8])
    expected = [first / np.linalg.norm(first), second / np.linalg.norm(second), [-1, 0]]
    assert new == pytest.approx(np.array(expected))
    # Maxima: 1, sqrt(1/2), 1, 0.8.
    assert oracle_more.kmeans_objective(x, centroids) == pytest.approx((2.8 + sqrt(0.5)) / 4)
    # A member opposite to a centroid of count 1 cancels it: the centroid stays.
    _, new, seen = oracle_more.spherical_kmeans_step([[1.0, 0]], [1], [[-1.0, 0]])
    assert new.tolist() == [[1, 0]]
    assert seen.tolist() == [2]


def test_prototype_classification_by_hand():
    # Logits (log 3, 0) and (0, log 3): probabilities 3/4, 1/4 and 1/4, 3/4; (0, 0): 1/2, 1/2.
    V = [[log(3), 0], [0, 0]]
    W = [[0, log(3)], [log(3), 0]]
    weight = np.eye(2)
    images, texts = oracle_more.prototype_classification(V, W, weight, None, [0, 1], "none")
    assert images == pytest.approx([log(4 / 3), log(2)])
    assert texts == pytest.approx([log(4), log(4)])
    mean = oracle_more.prototype_classification(V, W, weight, None, [0, 1])
    assert mean == pytest.approx(log(8 / 3) / 2 + log(4))
    # A third cluster with a row of zeros, and a bias of log 2 on the first.
    weight = [[1.0, 0], [0, 1], [0, 0]]
    images, _ = oracle_more.prototype_classification(V, W, weight, [log(2), 0, 0], [0, 2], "none")
    assert images == pytest.approx([log(8 / 6), log(4)])


def test_set_aggregations_by_hand():
    scores = oracle_more.set_cosine([[[3, 4, 0], [0, 5, 0]], [[1, 0, 0], [0, 0, 0]]], AXES[:2])
    expected = np.array([[[0.6, 0.8], [0, 1]], [[1, 0], [0, 0]]])
    assert scores == pytest.approx(expected)
    assert oracle_more.set_max(scores) == pytest.approx(np.array([[0.6, 1], [1, 0]]))
    assert oracle_more.set_mean(scores) == pytest.approx(np.array([[0.3, 0.9], [0.5, 0]]))


def test_smooth_chamfer_by_hand():
    # A = {e1, e2}, B = {e1}: from A (1 + 0)/4, from B log(exp(alpha) + 1)/(2 alpha).
    pair = [AXES[:2]]
    single = [2 * AXES[:1]]
    for alpha in (0.5, 16):
        expected = 1 / 4 + log(exp(alpha) + 1) / (2 * alpha)
        assert oracle_more.smooth_chamfer(pair, single, alpha) == pytest.approx(
            np.array([[expected]])
        )
        assert oracle_more.smooth_chamfer(single, pair, alpha) == pytest.approx(
            np.array([[expected]])
        )
    # Sharp, it is the Chamfer similarity (1 + 0)/4 + 1/2; of single vectors the cosine.
    assert oracle_more.smooth_chamfer(pair, single, 1e6) == pytest.approx(np.array([[0.75]]))
    assert oracle_more.smooth_chamfer([[[3, 4]]], [[[1, 0]], [[0, 1]]]) == pytest.approx(
        np.array([[0.6, 0.8]])
    )
    # Two equal vectors on each side: 1 + log(2)/alpha.
    assert oracle_more.smooth_chamfer([AXES[[0, 0]]], [AXES[[0, 0]]], 2) == pytest.approx(
        1 + log(2) / 2
    )


@pytest.mark.parametrize("name", ["memory_dcl", "uto"])
def test_memory_losses_are_symmetric_in_the_two_sides(name):
    rng = np.random.default_rng(0)
    V, W, V_keys, W_keys, images, texts = (rng.normal(size=(n, 4)) for n in (3, 5, 3, 5, 6, 6))
    image_ids = [0, 1, 2]
    text_ids = [0, 0, 1, 2, 7]
    memory_ids = [0, 1, 3, 4, 2, 2]
    loss = getattr(oracle_more, name)
    rows, cols = loss(
        V, W, V_keys, W_keys, images, texts, image_ids, text_ids, memory_ids, reduction="none"
    )
    swapped = loss(
        W, V, W_keys, V_keys, texts, images, text_ids, image_ids, memory_ids, reduction="none"
    )
    assert swapped[0] == pytest.approx(cols)
    assert swapped[1] == pytest.approx(rows)
    assert cols[4] == 0
    assert np.all(rows != 0)
