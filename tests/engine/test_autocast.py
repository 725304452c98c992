"""Autocast: Triton's kernels multiply float32 embeddings in its dtype; nothing else changes.

CPU autocast and Triton's interpreter stand in for CUDA. Results are compared with float64 on the
rounded vectors.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from support.cases import embeddings, make_ids

import itrloss
from itrloss import Similarity
from itrloss.engine import triton as engine
from itrloss.engine import vectors
from itrloss.rerank import MutualProximity

pytestmark = [
    pytest.mark.usefixtures("a_quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # masked lanes of the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="it is autocast of the CPU"),
]
HALF = [torch.bfloat16, torch.float16]
LOSSES = {
    "infonce": itrloss.InfoNCELoss,
    "dcl": itrloss.DiversityContrastiveLoss,
    "sigmoid": itrloss.SigmoidLoss,
    "triplet": itrloss.TripletLoss,
}


@pytest.fixture(autouse=True)
def multiplying(few_tiles, monkeypatch):
    """Note for each pass whether kernels multiply; long embeddings take few steps."""
    tile = engine.PRODUCT_TILES[0]._replace(block_k=16)
    monkeypatch.setattr(engine, "PRODUCT_TILES", (tile,))
    fused = []
    start = engine.Pass.__init__

    def noted(run, *args):
        start(run, *args)
        fused.append(run.fused)

    monkeypatch.setattr(engine.Pass, "__init__", noted)
    return fused


def pairs_of_vectors(n, d=48, noise=1.5):
    """Return (n, d) images and the texts that describe them, float32."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(n, d, generator=generator)
    return v, v + noise * torch.randn(n, d, generator=generator)


def step(loss, v, w, *ids):
    """Return a loss and the gradients of the embeddings."""
    x = v.clone().requires_grad_()
    y = w.clone().requires_grad_()
    value = loss(x, y, *ids)
    by_x, by_y = torch.autograd.grad(value, (x, y))
    return [value.detach(), by_x, by_y]


def distance(found, wanted):
    """The length of the error, as a share of that of the exact one."""
    exact = wanted.double()
    error = found.double() - exact
    return float(error.norm() / exact.norm())


def assert_identical(found, wanted):
    for got, exact in zip(found, wanted, strict=True):
        assert torch.equal(got, exact)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", LOSSES)
def test_float32_embeddings_are_rounded_and_their_gradient_is_not(name, dtype, multiplying):
    v, w = embeddings(12, 12, 24, dtype=torch.float32)
    ids = make_ids("random", 12, 12) if name == "dcl" else ()
    reference = LOSSES[name]().double()

    def of_rounded(x, y):
        return reference(rounded(x, dtype), rounded(y, dtype), *ids)

    wanted = step(of_rounded, v.double(), w.double())
    loss = LOSSES[name](engine="triton")
    with torch.autocast("cpu", dtype):
        found = step(loss, v, w, *ids)
    assert all(multiplying)
    bounds = (1e-5, OF_PANELS, OF_PANELS)
    for got, exact, bound in zip(found, wanted, bounds, strict=True):
        assert got.dtype == torch.float32
        assert distance(got, exact) < bound
    if name != "triplet":
        _, gradient, _ = found
        has_more_digits = gradient.to(dtype).float() != gradient
        assert has_more_digits.float().mean() > 0.9


OF_PANELS = 3e-3  # the gradient of scores is rounded before it is multiplied


def rounded(x, dtype):
    """Return vectors in float64 as they are multiplied.

    float16 has no range for all lengths: vectors have unit length first, which scales the gradient.
    """
    if dtype == torch.float16:
        inv = 1 / x.double().norm(dim=1, keepdim=True)
        return Rounded.apply(x.double() * inv, dtype)
    return Rounded.apply(x.double(), dtype)


class Rounded(torch.autograd.Function):
    """Rounding that passes the gradient on."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_gradients_beat_what_autocast_makes_of_plain_pytorch():
    """The embeddings are float32, as ``F.normalize`` returns them under autocast."""
    v, w = (torch.nn.functional.normalize(x) for x in pairs_of_vectors(32, 128))
    _, *exact = step(itrloss.InfoNCELoss(), v.double(), w.double())
    loss = itrloss.InfoNCELoss(engine="triton")
    with torch.autocast("cpu", torch.bfloat16):
        _, *ours = step(loss, v, w)
        _, *plain = step(plain_info_nce, v, w)
    wanted = torch.cat(exact)
    our_error = distance(torch.cat(ours), wanted)
    plain_error = distance(torch.cat(plain), wanted)
    assert 1e-4 < our_error < 0.1 * plain_error  # 0.0028 and 0.43


def plain_info_nce(x, y):
    """InfoNCE in plain PyTorch."""
    logits = x @ y.T / 0.07
    numbers = torch.arange(len(x))
    cross_entropy = torch.nn.functional.cross_entropy
    return cross_entropy(logits, numbers) + cross_entropy(logits.T, numbers)


@pytest.mark.parametrize("length", [2.0**-30, 2.0**30])
@pytest.mark.parametrize("dtype", HALF)
def test_embeddings_of_any_length(length, dtype):
    v, w = pairs_of_vectors(16)
    loss = itrloss.InfoNCELoss(engine="triton")
    with torch.autocast("cpu", dtype):
        wanted_value, wanted_by_v, wanted_by_w = step(loss, v, w)
        value, by_v, by_w = step(loss, v * length, w)
    assert distance(value, wanted_value) < 1e-3
    assert distance(by_v * length, wanted_by_v) < 0.02
    assert distance(by_w, wanted_by_w) < 0.02


def test_one_switch_refuses(multiplying):
    v, w = pairs_of_vectors(16)
    loss = itrloss.InfoNCELoss(engine="triton")
    wanted = step(loss, v, w)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        found = step(loss, v, w)
    assert_identical(found, wanted)
    assert not any(multiplying)


@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_engines_that_multiply_float32_round_nothing(name):
    v, w = pairs_of_vectors(16)
    loss = itrloss.InfoNCELoss(engine=name)
    wanted = step(loss, v, w)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(loss, v, w)
    assert_identical(found, wanted)


@pytest.mark.parametrize(
    "kind", [itrloss.MemoryDiversityContrastiveLoss, itrloss.UnifiedTrainingObjective]
)
@pytest.mark.parametrize("engine_name", ["dense", "tiled", "auto"])
def test_products_with_keys_round_nothing(kind, engine_name):
    keys = pairs_of_vectors(16, noise=0.5)
    memory = itrloss.CoupledMemory(40, 48)
    memory.enqueue(*pairs_of_vectors(40))
    loss = kind(engine=engine_name)

    def against_keys(v, w):
        return loss(v, w, *keys, memory)

    wanted = step(against_keys, *pairs_of_vectors(16))
    with torch.autocast("cpu", torch.bfloat16):
        found = step(against_keys, *pairs_of_vectors(16))
    assert_identical(found, wanted)


@pytest.mark.parametrize("index", [torch.arange(16), torch.arange(16).flip(0) // 2])
def test_scores_of_pairs_round_nothing(index):
    def of_pairs(v, w):
        return Similarity(v, w).pair_scores(torch.arange(16), index).square().sum()

    wanted = step(of_pairs, *pairs_of_vectors(16))
    with torch.autocast("cpu", torch.bfloat16):
        found = step(of_pairs, *pairs_of_vectors(16))
    assert_identical(found, wanted)


def test_ranks_and_scores_are_those_of_the_embeddings():
    v, w = pairs_of_vectors(20)
    with torch.autocast("cpu", torch.bfloat16):
        sim = Similarity(v, w, engine="triton")
        best = sim.topk(5)
        ranks = sim.T.ranks()
        scores = sim.scores()
    exact = Similarity(v, w, engine="tiled")
    exact_best = exact.topk(5)
    assert torch.equal(best.values, exact_best.values)
    assert torch.equal(best.indices, exact_best.indices)
    assert torch.equal(ranks, exact.T.ranks())
    assert torch.equal(scores, exact.scores())
    images, texts = sim.embeddings
    assert images is v
    assert texts is w


def test_a_similarity_keeps_what_autocast_was_when_it_was_made():
    v, w = pairs_of_vectors(16)
    outside = Similarity(v, w, engine="triton")
    wanted = outside.logsumexp(10.0)
    with torch.autocast("cpu", torch.bfloat16):
        inside = Similarity(v, w, engine="triton")
        assert torch.equal(outside.detach().logsumexp(10.0), wanted)
        rounding = inside.logsumexp(10.0)
    assert not torch.equal(rounding, wanted)
    assert torch.equal(inside.detach().logsumexp(10.0), rounding)
    pickled = pickle.loads(pickle.dumps(inside))
    assert torch.equal(pickled.logsumexp(10.0), rounding)
    v += 1
    with pytest.raises(RuntimeError, match="modified in place"):
        inside.logsumexp(10.0)


def test_a_bias_is_no_reason_to_round():
    """No kernel adds biases."""
    v, w = pairs_of_vectors(16)
    bias = (torch.linspace(-1, 1, 16), None)
    exact = Similarity(v, w, engine="tiled", bias=bias)
    wanted = exact.logsumexp(10.0)
    with torch.autocast("cpu", torch.bfloat16):
        sim = Similarity(v, w, engine="triton", bias=bias)
        found = sim.logsumexp(10.0)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", ["MemoryDiversityContrastiveLoss", "UnifiedTrainingObjective"])
def test_a_float32_memory_does_not_slow_half_precision(name, autocast, multiplying):
    """Kernels multiply the batch with its keys and with the memory, as if all were rounded."""
    v, w = pairs_of_vectors(8)
    keys = [v + 0.1, w + 0.1]
    memory = itrloss.CoupledMemory(24, 48)
    for seed in range(3):
        memory.enqueue(*embeddings(8, 8, 48, seed=seed, dtype=torch.float32))
    half = [v.bfloat16(), w.bfloat16()]

    kind = getattr(itrloss, name)
    reference = kind().double()
    exact_keys = [x.bfloat16().double() for x in keys]
    exact_memory = itrloss.CoupledMemory(24, 48, dtype=torch.float64)
    exact_memory.load_state_dict(memory.to(torch.bfloat16).double().state_dict())
    exact_batch = [x.double() for x in half]
    wanted = step(lambda x, y: reference(x, y, *exact_keys, exact_memory), *exact_batch)

    loss = kind(engine="triton")
    memory = memory.float()
    batch = [v, w] if autocast else half
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = step(lambda x, y: loss(x, y, *keys, memory), *batch)
    assert multiplying
    assert all(multiplying)
    bounds = (1e-5, 5e-3, 5e-3)
    for got, exact, bound in zip(found, wanted, bounds, strict=True):
        assert distance(got, exact) < bound


def test_moments_of_a_reranker_are_float32():
    sim = Similarity(*pairs_of_vectors(20))
    method = MutualProximity()
    wanted = method.rerank(sim)
    with torch.autocast("cpu", torch.bfloat16):
        found = method.rerank(sim)
    assert_identical(found, wanted)


def test_autocast_of_the_device_counts(monkeypatch):
    class OnCuda:
        device = torch.device("cuda:1")
        dtype = torch.float32

    asked = {"cuda": True, "cpu": False}
    monkeypatch.setattr(vectors, "is_autocast_available", lambda kind: kind in asked)
    monkeypatch.setattr(vectors, "is_autocast_enabled", asked.__getitem__)
    monkeypatch.setattr(vectors, "get_autocast_dtype", {"cuda": torch.float16}.__getitem__)
    assert vectors.autocast_dtype(OnCuda()) == torch.float16
    assert vectors.autocast_dtype(torch.ones(2)) is None
    assert vectors.autocast_dtype(torch.ones(2, device="meta")) is None
    for dtype in (torch.float64, torch.bfloat16):
        OnCuda.dtype = dtype
        assert vectors.autocast_dtype(OnCuda()) is None
