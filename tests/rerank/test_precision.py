"""Orders of re-rankers for scores of any size and precision, against float64 oracles."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from support import oracle_rerank
from support.cases import sample
from support.rerankers import BY_LOOPS, ORDERS, Direction
from torch.utils._python_dispatch import TorchDispatchMode

from itrloss import Similarity
from itrloss.metrics import retrieval_metrics, retrieval_results
from itrloss.rerank import (
    CSLS,
    DualSoftmax,
    FastReranker,
    InvertedSoftmax,
    MutualProximity,
    NearestNeighborNorm,
    QueryBankNorm,
    Sinkhorn,
    TwoStageReranker,
)

N, M, K = 12, 24, 9


def uniform(seed=0):
    """(N, M) distinct float64 numbers in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(N * M, generator=generator).argsort()
    return order.double().view(N, M) / (N * M)


def with_one_at(value, size=1.0):
    """Scores of which every seventh candidate of a query is at ``value``, about."""
    scores = size * uniform(1)
    every_seventh = (torch.arange(N)[:, None] - torch.arange(M)) % 7 == 0
    about_value = value * (1 + 0.1 * uniform(2))
    return torch.where(every_seventh, about_value, scores)


def in_two_stages(first, second, weight):
    """Each query's candidates from best to worst, by the docstring and in float64."""
    orders = oracle_rerank.two_stages(first.double(), second.double(), K, weight)
    return torch.from_numpy(orders)


FIRST = uniform().float()
SPREADS = {
    "masked at -1e9": (FIRST, with_one_at(-1e9), 0.0),
    "masked at the least float32": (FIRST, with_one_at(-3e38).float(), 0.0),
    "certain at 1e30": (FIRST, with_one_at(1e30), 0.0),
    "next to the least half": (FIRST, with_one_at(-6e4, 0.1).float(), 0.0),
    "next to each other 1e-9": (FIRST, 1 + 1e-9 * uniform(1), 0.0),
    "probabilities of 1e-8": (FIRST, 1e-8 * uniform(1), 0.0),
    "probabilities of 1e-30": (FIRST, (1e-30 * uniform(1)).float(), 0.0),
    "subnormal numbers": (FIRST, (1e-41 * uniform(1)).float(), 0.0),
    "logits of bfloat16": (FIRST, torch.arange(N * M).view(N, M).double().fmod(61).bfloat16(), 1.0),
    "integers beyond float32": (FIRST, 2**40 + (N * M * uniform(1)).long(), 0.0),
    "first scores beyond the second": (1e6 * FIRST.double(), uniform(1), 1.0),
    "second scores beyond the first": (FIRST, with_one_at(-1e9).round(decimals=-8), 1.0),
    "first scores of 1e30": (1e30 * FIRST, uniform(1), 0.0),
    "first scores up to the largest": (3.4e38 * FIRST, uniform(1), 0.0),
    "first scores down to the least": (-3.4e38 * FIRST, uniform(1), 0.0),
    "first scores of 1e-30": (1e-30 * FIRST, uniform(1), 0.0),
}


@pytest.mark.parametrize("name", SPREADS)
def test_two_stages_keep_every_order(name):
    first, second, weight = SPREADS[name]
    method = TwoStageReranker(lambda i, t: second[i, t], k=K, weight=weight)
    wanted = in_two_stages(first, second, weight), in_two_stages(first.T, second.T, weight)
    found = method.rerank(first)
    of_sides = zip(wanted, method.topk(first, M), (found.i2t, found.t2i.T), strict=True)
    for order, best, scores in of_sides:
        assert torch.equal(best.indices, order)
        assert torch.equal(scores.argsort(dim=1, descending=True), order)
        assert scores.isfinite().all()


@pytest.mark.parametrize(
    ("ties", "ranks"), [("pessimistic", [2, 2, 3, 4]), ("optimistic", [1, 1, 3, 4])]
)
def test_two_stages_leave_equal_scores_equal(ties, ranks):
    second = torch.tensor([1e-9, 1e-9, 0.0, -1e9])
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 4)
    method = TwoStageReranker(lambda i, t: second[t], k=4, weight=0.0)
    found = retrieval_results(scores, reranker=method, ties=ties)
    assert found.i2t.best.tolist() == ranks


# --- scores of any scale --------------------------------------------------------------------------


def cosines(seed=0, n=30):
    """(n, 40) cosines, with a hub."""
    v = sample(n, 6, seed=2 * seed, dtype=torch.float64)
    w = sample(40, 6, seed=2 * seed + 1, dtype=torch.float64)
    v[:, 0] += 0.5
    w[:3, 0] += 4.0
    return torch.nn.functional.normalize(v, dim=1) @ torch.nn.functional.normalize(w, dim=1).T


SCALES = {
    "cosines": lambda x: x,
    "logits of CLIP": lambda x: 100 * x,
    "a thousand": lambda x: 1e3 * x,
    "a million": lambda x: 1e6 * x,
    "a hundredth": lambda x: 0.01 * x,
    "a millionth": lambda x: 1e-6 * x,
    "all negative": lambda x: 100 * x - 200,
    "all positive": lambda x: 100 * x + 200,
    "far from 0": lambda x: 1e4 + x,
    "a zero in each row": lambda x: 100 * x * (torch.arange(x.shape[1]) % 7 != 0),
    "one at -1e9": lambda x: x.index_fill(1, torch.tensor([9]), -1e9),
}


def dual_softmax_order(S, R, scale):
    """The sign and log size of ``S_qc exp(β S_qc) / Σ_r exp(β R_rc)``, as ascending pairs."""
    log_share = oracle_rerank.inverted_softmax(S, R, scale)
    signs = np.sign(S)
    sizes = np.log(np.abs(S) + (signs == 0)) + log_share
    return np.stack([signs, signs * sizes], 2).tolist()


def keys(name, S):
    """What float64 ranks the candidates of each query by: lists of numbers or of pairs."""
    if name == "dual softmax":
        return dual_softmax_order(S, S, 20.0)
    direction = Direction(0, S, S, S, S)
    return BY_LOOPS[name](direction, METHODS[name]).tolist()


METHODS = {
    "dual softmax": DualSoftmax(),
    "inverted softmax": InvertedSoftmax(),
    "sinkhorn": Sinkhorn(iterations=5),
    "fast": FastReranker((25.0, 10.0), (25.0, 10.0)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", METHODS)
def test_scores_of_any_scale_rank_as_float64_does(name, scale, dtype):
    scores = SCALES[scale](cosines())
    if dtype == torch.float16 and scores.abs().max() > 6e4:
        scores = scores.clamp_min(-6e4) if scale == "one at -1e9" else scores / 1e3
    scores = scores.to(dtype)
    found = METHODS[name].topk(scores, 40)
    in_double = scores.double().numpy()
    for side, S in ((found.i2t, in_double), (found.t2i, in_double.T)):
        assert_descending(side.indices.tolist(), keys(name, S))


def assert_descending(orders, keys_of_queries):
    """Check the order of each query's candidates; that of candidates that float64 cannot tell apart
    is open.
    """
    for order, key in zip(orders, keys_of_queries, strict=True):
        ranked = [key[c] for c in order]
        for better, worse in itertools.pairwise(ranked):
            equal_up_to_rounding = np.allclose(better, worse, rtol=1e-13, atol=1e-12)
            assert better >= worse or equal_up_to_rounding


@pytest.mark.parametrize("scale", SCALES)
def test_sinkhorn_equals_float64_to_rounding(scale):
    scores = SCALES[scale](cosines())
    found = Sinkhorn(iterations=7).rerank(scores)
    for own, S in ((found.i2t, scores), (found.t2i.T, scores.T)):
        wanted = oracle_rerank.sinkhorn(S.numpy(), S.numpy(), 100.0, 7)
        np.testing.assert_allclose(own, wanted, rtol=1e-12, atol=1e-9)


# --- scores that float32 can hardly tell apart ----------------------------------------------------

PAIRS = 60, 120  # of images, and of their captions
CAPTIONS = torch.arange(60), torch.arange(120) // 2


def captioned(offset=0.0):
    """Float64 embeddings of images, and of two captions each; far from the origin they are
    crowded.
    """
    n, m = PAIRS
    things = sample(n, 32, dtype=torch.float64)
    noise_of_images = sample(n, 32, seed=1, dtype=torch.float64)
    noise_of_texts = sample(m, 32, seed=2, dtype=torch.float64)
    images = things + 0.9 * noise_of_images
    texts = things.repeat_interleave(2, 0) + 1.2 * noise_of_texts
    return offset + images, offset + texts


def ranks_of(sim, reranker):
    """The ranks of all positives, of both directions."""
    results = retrieval_results(sim, reranker=reranker)
    return torch.cat([side.ranks.flatten() for side in results.ways.values()])


CROWDED = {
    "fast, small scales": FastReranker((0.01, 0.01), (0.01, 0.01)),
    "inverted softmax, tiny scale": InvertedSoftmax(0.001),
    "inverted softmax, large scale": InvertedSoftmax(1000.0),
    "sinkhorn, small scale": Sinkhorn(0.01),
    "mutual proximity": MutualProximity(),
}


@pytest.mark.parametrize("name", CROWDED)
def test_crowded_embeddings_keep_their_order(name):
    images, texts = (x.float() for x in captioned(offset=30.0))  # cosines differ by thousandths
    single = Similarity(images, texts, *CAPTIONS)
    double = Similarity(images.double(), texts.double(), *CAPTIONS)
    different = ranks_of(single, CROWDED[name]) != ranks_of(double, CROWDED[name])
    assert different.double().mean() <= 0.01


SHIFTED = {
    "csls": CSLS(),
    "nnn": NearestNeighborNorm(),
    "inverted softmax": InvertedSoftmax(),
    **ORDERS,
}


@pytest.mark.parametrize("shift", [1000.0, -1000.0])
@pytest.mark.parametrize("name", SHIFTED)
def test_scores_far_from_zero_keep_their_order(name, shift):
    cosines = Similarity(*captioned(), *CAPTIONS).scores()
    scores = (cosines + shift).float()
    single = Similarity.from_scores(scores, *CAPTIONS)
    double = Similarity.from_scores(scores.double(), *CAPTIONS)
    assert torch.equal(ranks_of(single, SHIFTED[name]), ranks_of(double, SHIFTED[name]))


@pytest.mark.parametrize("side", [0, 1])
def test_a_large_bias_of_all_keeps_the_order_of_scores(side):
    images, texts = captioned()
    bias = [None, None]
    bias[side] = torch.full((PAIRS[side],), 1e5)
    plain = Similarity(images.float(), texts.float(), *CAPTIONS)
    moved = Similarity(images.float(), texts.float(), *CAPTIONS, bias=tuple(bias))
    assert torch.equal(ranks_of(moved, None), ranks_of(plain, None))
    assert torch.equal(moved.topk(5).indices, plain.topk(5).indices)


# --- half precision and what surrounds a call -----------------------------------------------------

EVERY = {
    **METHODS,
    "mutual proximity": MutualProximity(),
    "nnn": NearestNeighborNorm(),
    "csls": CSLS(),
    "two stages": TwoStageReranker(lambda i, t: torch.sin(i * 40.0 + t), k=9, weight=0.01),
    "qb-norm": QueryBankNorm().fit(100 * cosines(1).float(), 100 * cosines(2).float()),
    "none": None,
}


@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_half_scores_have_the_figures_of_their_numbers(name, dtype, folds, monkeypatch):
    images = 30 if name == "qb-norm" else 20
    scores = (100 * cosines(n=images)).to(dtype)
    ids = (torch.arange(images), torch.arange(40) % images)
    monkeypatch.setattr(Similarity.blocks, "__defaults__", (200,))
    metrics = partial(retrieval_metrics, reranker=EVERY[name], folds=folds)
    assert metrics(scores, *ids) == metrics(scores.float(), *ids)


@pytest.mark.parametrize("surroundings", ["autocast", "high"])
@pytest.mark.parametrize("given", ["scores", "dense", "tiled", "inner products"])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "qb-norm"])
def test_surroundings_do_not_change_rankings(name, given, surroundings):
    images, texts = sample(24, 64), sample(48, 64, seed=1)
    ids = (torch.arange(24), torch.arange(48) % 24)
    scores = 3 * images @ texts.T

    def figures():
        if given == "scores":
            sim = Similarity.from_scores(scores, *ids)
        else:
            normalize = given != "inner products"
            engine = "tiled" if given == "tiled" else "dense"
            sim = Similarity(images, texts, *ids, normalize=normalize, engine=engine)
        method = EVERY[name]
        found = [] if method is None else list(method.rerank(sim))
        return retrieval_metrics(sim, reranker=method), found

    wanted, wanted_scores = figures()
    before = torch.get_float32_matmul_precision()
    try:
        if surroundings == "high":
            torch.set_float32_matmul_precision("high")
        with torch.autocast("cpu", torch.bfloat16, enabled=surroundings == "autocast"):
            found, found_scores = figures()
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == wanted
    for one, other in zip(found_scores, wanted_scores, strict=True):
        assert torch.equal(one, other)


class Converted(TorchDispatchMode):
    """The sizes of what is converted from half to single precision."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_half = args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.half
        if is_half and isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("name", [name for name in EVERY if name != "qb-norm"])
def test_a_half_matrix_is_never_converted_whole(name, monkeypatch):
    scores = (100 * cosines(n=40)).half()
    monkeypatch.setattr(Similarity.blocks, "__defaults__", (400,))
    monkeypatch.setattr("itrloss.rerank.base._AT_ONCE", 400)
    monkeypatch.setattr("itrloss.engine.matrix.CONVERTED_AT_ONCE", 400)
    monkeypatch.setattr("itrloss.engine.inputs.TILE", {"cpu": (400, 10)})
    monkeypatch.setattr("itrloss.rerank.direction.AT_ONCE", 400)
    monkeypatch.setattr("itrloss.rerank.normalization.AT_ONCE", 400)
    with Converted() as converted:
        retrieval_metrics(scores, reranker=EVERY[name])
    assert 0 < max(converted.sizes) <= 400
