"""The Triton engine against the float64 reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import SHAPES, embeddings, make_ids, upstream
from test_engines import ANSWERS, evaluate, gradients_of_parameters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from itrloss import (
    CoupledMemory,
    DiversityContrastiveLoss,
    HubnessAwareLoss,
    InfoNCELoss,
    MemoryDiversityContrastiveLoss,
    OnlineKMeans,
    PrototypeClassificationLoss,
    SigmoidLoss,
    Similarity,
    TripletLoss,
    UnifiedTrainingObjective,
)
from itrloss.bench import eager
from itrloss.engines import softmax, tiles
from itrloss.engines.dispatch import _kernels_work, choose

pytest.importorskip("triton")
passes, blocks = (importlib.import_module(f"itrloss.engines.triton.{x}") for x in ("passes", "blocks"))

# Of lanes whose result is not stored.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MULTIPLIED = (4, 8, 4, 4) if DEVICE == "cpu" else (16, 64, 16, 4)  # GPUs multiply 16 rows and dimensions at least


LOSSES = {
    "dcl": lambda engine: DiversityContrastiveLoss(engine=engine),
    "dcl entropy": lambda engine: DiversityContrastiveLoss(diversity="entropy", entropy_temperature=0.1, engine=engine),
    "dcl attached": lambda engine: DiversityContrastiveLoss(detach_diversity=False, engine=engine),
    "hal": lambda engine: HubnessAwareLoss(engine=engine),
    "infonce": lambda engine: InfoNCELoss(engine=engine),
    "sigmoid": lambda engine: SigmoidLoss(engine=engine),
    "triplet": lambda engine: TripletLoss(engine=engine),
    "triplet all": lambda engine: TripletLoss(mining="all", engine=engine),
}


@pytest.fixture
def few_tiles(monkeypatch):
    """Some tiles, programs and steps with ragged ends on both axes; the interpreter takes its time for each."""
    monkeypatch.setitem(tiles.TILE, DEVICE, (64, 8))
    monkeypatch.setattr(blocks, "READING", blocks.Cut(4, 4))
    monkeypatch.setattr(blocks, "MULTIPLYING", (blocks.Cut(*MULTIPLIED),))
    monkeypatch.setattr(blocks, "_BLOCK", 32)
    monkeypatch.setattr(passes, "_SLOTS", 2)
    monkeypatch.setattr(tiles, "_FEW", 5)
    monkeypatch.setattr(tiles, "_ACCELERATOR_NUMBERS", 5)


@pytest.fixture(params=[False, True], ids=["products before", "multiplying kernels"])
def multiplying(request, monkeypatch):
    """Whether kernels multiply embeddings themselves; of half precision they do, here float32 shows every mistake."""
    if request.param:
        monkeypatch.setattr(blocks, "half", lambda source: source.cols is not None)


def moved(*given):
    return [None if x is None else x.to(DEVICE) for x in given]


def on_scores(s):
    """The same question on a matrix that exists."""
    return Similarity.from_scores(s.scores(), *s.ids, engine="triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_of_scores(name):
    n, m, kind = SHAPES["wide"]
    ids, (v, w), grads = make_ids(kind, n, m), embeddings(n, m), upstream(n, m)
    wanted = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
    v, w = (x.float() for x in (v, w))
    ours = evaluate(lambda s: ANSWERS[name](on_scores(s)), *moved(v, w), moved(*ids), "reference", moved(*grads))
    for got, exact in zip((*ours[0], *ours[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(got.cpu().double(), exact, rtol=1e-4, atol=1e-4)


QUICK, MORE = ("five captions",), ("primes", "one row", "wide", "no negative", "strided ids")


@pytest.mark.parametrize("shape", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE)])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_gradients_equal_the_reference(name, shape, multiplying, few_tiles, poisoned):
    """With errors like those that autograd and the dense engine make of the same inputs in float32."""
    n, m, kind = SHAPES[shape]
    ids, (v, w), grads = make_ids(kind, n, m), embeddings(n, m, dtype=torch.float32), upstream(n, m)
    exact = evaluate(ANSWERS[name], v.double(), w.double(), ids, "reference", grads)
    others = [evaluate(ANSWERS[name], v, w, ids, engine, grads) for engine in ("reference", "dense")]
    ours = evaluate(ANSWERS[name], *moved(v, w), moved(*ids), "triton", moved(*grads))
    for got, wanted, *given in zip(*[[*x[0], *x[1]] for x in (ours, exact, *others)], strict=True):
        finite, got = wanted.isfinite(), got.cpu()
        assert torch.equal(got.isfinite(), finite)
        error, *noise = ((x.double() - wanted)[finite].norm() for x in (got, *given))
        assert error <= 4 * max(noise) + 2e-6 * wanted[finite].norm() + 1e-7


@pytest.mark.parametrize(("dtype", "captions"), [(torch.bfloat16, 1), (torch.bfloat16, 3), (torch.float16, 1)])
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_half_precision_is_more_accurate_than_autocast(dtype, scale, captions):
    n, d = 64, 64
    generator = torch.Generator().manual_seed(0)
    common, other, *noise = (torch.randn(n, d, generator=generator) for _ in range(2 + captions))
    v, w = (common + other).to(dtype), torch.cat([common + x for x in noise]).to(dtype)
    ids = (torch.arange(n), torch.arange(n).repeat(captions)) if captions > 1 else ()

    def gradient(v, w, loss, *ids):
        v, w = v.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(loss(v, w, *ids), (v, w))

    def plain(v, w, *ids):
        with torch.autocast("cpu", dtype):
            return eager.infonce(v, w, *ids, temperature=1 / scale)

    exact = gradient(v.double(), w.double(), InfoNCELoss(1 / scale, engine="reference"), *ids)
    ours = gradient(*moved(v, w), InfoNCELoss(1 / scale, engine="triton"), *moved(*ids))
    for got, theirs, wanted in zip(ours, gradient(v, w, plain, *ids), exact, strict=True):
        assert got.dtype == dtype
        rounding = (wanted.to(dtype).double() - wanted).norm()  # of the result, which nothing can escape
        error, other = ((x.cpu().double() - wanted).norm() for x in (got, theirs))
        assert error <= 0.25 * other + rounding


@pytest.mark.parametrize("name", ["hal", "infonce", "sigmoid", "triplet all", "dcl attached", "dcl entropy"])
@pytest.mark.parametrize("upstream", [0.01, 1.0, 1e4])
def test_no_gradient_leaves_the_range_of_float16(name, upstream):
    """Whatever the lengths: float16 ends at 65504, and has half of its digits at 10^-6."""
    n, d = 24, 16
    v, w = (torch.nn.functional.normalize(x, dim=1) for x in embeddings(n, n, d))
    v = (v * torch.logspace(-2, 2, n, dtype=v.dtype)[:, None]).half()
    w = (w * torch.logspace(3, -1, n, dtype=v.dtype)[:, None]).half()
    found = []
    for engine, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float16, DEVICE)):
        a, b = (x.to(device, dtype).requires_grad_() for x in (v, w))
        value = LOSSES[name](engine)(a, b).sum() * upstream
        found.append([x.cpu() for x in torch.autograd.grad(value, (a, b))])
    for wanted, got in zip(*found, strict=True):
        size = wanted.norm(dim=1)
        stored = (size > 1e-3) & (wanted.abs().amax(1) < 6e4)  # what float16 can hold
        assert stored.any()
        error = (got.double() - wanted).norm(dim=1)
        assert (error[stored] <= 2e-3 * size[stored]).all()


def test_without_lengths_scores_may_leave_the_range_of_float16():
    v, w = (200 * x.half() for x in embeddings(8, 8, 16))
    w, ids = torch.cat([w, -w]), (torch.arange(8), torch.arange(16) + 100)  # with a mean of 0
    found = []
    for engine, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float16, DEVICE)):
        a, b = (x.to(device, dtype).requires_grad_() for x in (v, w))
        std = Similarity(a, b, *(x.to(device) for x in ids), engine=engine, normalize=False).moments().std
        found.append([x.cpu().double() for x in torch.autograd.grad(std.sum(), (a, b))])
    for wanted, got in zip(*found, strict=True):
        assert (got - wanted).norm() <= 1e-3 * wanted.norm()


def test_in_float16_an_anchor_without_negatives_leaves_the_others_alone():
    v, w = (x.half() for x in embeddings(12, 12, 16))
    found = []
    for engine, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float16, DEVICE)):
        a, b = (x.to(device, dtype).requires_grad_() for x in (v, w))
        ids = torch.arange(12, device=device), torch.zeros(12, dtype=torch.int64, device=device)
        values = Similarity(a, b, *ids, engine=engine).logsumexp(5.0)
        found.append([x.cpu().double() for x in torch.autograd.grad(values, (a, b), torch.ones_like(values))])
    for wanted, got in zip(*found, strict=True):
        assert (got - wanted).norm() <= 1e-3 * wanted.norm()


def test_in_float16_many_small_exponentials_count():
    """Of which each is 2^26 times smaller than the largest."""
    many, x = 2**13, torch.eye(16)[:1]
    largest, others = torch.eye(16)[1:2], torch.tensor([[-0.18, 0.0, 1.0] + [0.0] * 13]).expand(many, 16)
    found = []
    for fused, dtype, device in ((False, torch.float64, "cpu"), (True, torch.float16, DEVICE)):
        rows, cols = (y.half().to(device, dtype) for y in (x, torch.cat([largest, others])))
        source = tiles.Source(rows, cols, torch.ones(1, device=device), None, None, None, fused=fused)
        scale = torch.full((1,), 100.0, device=device)
        total, _, products = softmax.sums_and_products(source, scale.to(source.dtype), False, False, True)
        found.append((products / total).cpu().double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-8)


def test_rows_alone_are_counted_by_the_short_axis_of_a_grid(monkeypatch):
    """A GPU's has 65535 places."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(passes.gradients, "rescale", Recorder())
    passes._rescale(torch.zeros(40, 1000), torch.zeros(10, 40), torch.zeros(40), 100)
    assert grids == [(10, 2)]


def test_sums_of_half_precision_are_float32_whatever_the_model_does():
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_accumulation
    try:
        flags.allow_fp16_accumulation = True
        with blocks._float32_sums():
            assert not flags.allow_fp16_accumulation
        assert flags.allow_fp16_accumulation
    finally:
        flags.allow_fp16_accumulation = before


def test_in_float16_no_gradient_is_no_gradient():
    v, w = (x.half().to(DEVICE).requires_grad_() for x in embeddings(9, 9, 16))
    found = torch.autograd.grad(0 * InfoNCELoss(engine="triton")(v, w), (v, w))
    assert all(not x.any() for x in found)


def test_in_float16_a_gradient_that_is_no_number_stays_with_its_anchor():
    v, w = (x.half().to(DEVICE).requires_grad_() for x in embeddings(9, 9, 16))
    sim = Similarity(v, w, engine="triton")
    grad = torch.ones(9, device=DEVICE)
    grad[4] = torch.nan
    (found,) = torch.autograd.grad(sim.logsumexp(10.0), v, grad)
    assert found.isfinite().all(1).tolist() == [i != 4 for i in range(9)]


@pytest.mark.parametrize("shared", [True, False], ids=["one number", "per anchor"])
@pytest.mark.parametrize("which", ["positives", "negatives"])
@pytest.mark.parametrize("term", ["softplus", "negative_log_likelihood"])
@pytest.mark.parametrize("shape", ["primes", "one row", "wide"])
def test_gradients_of_parameters(shape, term, which, shared, few_tiles):
    n, m, kind = SHAPES[shape]
    given = make_ids(kind, n, m), n, m, which, term, shared
    wanted = gradients_of_parameters("reference", *given)
    found = gradients_of_parameters("triton", *given, dtype=torch.float32, device=DEVICE)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=["columns", "panels"])
def held(request, monkeypatch):
    """Of which sums of a gradient in half precision are held: of all columns, or of panels on both sides."""
    monkeypatch.setattr(blocks, "_HELD", 2**25 if request.param == "columns" else 0)


@pytest.mark.parametrize(
    "loss", ["infonce", *(pytest.param(x, marks=pytest.mark.slow) for x in LOSSES if x != "infonce")]
)
@pytest.mark.parametrize("kind", [None, "random"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_precision_on_triton(loss, kind, dtype, held, few_tiles, poisoned, monkeypatch):
    monkeypatch.setitem(tiles.TILE, DEVICE, (192, 16))
    monkeypatch.setattr(blocks, "MULTIPLYING", (blocks.Cut(16, 16, 16, 1),))
    monkeypatch.setattr(blocks, "READING", blocks.Cut(16, 16))
    n, m = (21, 21) if kind is None else (21, 29)
    ids, (v, w) = make_ids(kind, n, m), embeddings(n, m, d=20, dtype=dtype)
    found = []
    for engine in ("reference", "triton"):
        a, b = (x.double() if engine == "reference" else x.to(DEVICE) for x in (v, w))
        a, b = a.requires_grad_(), b.requires_grad_()
        value = LOSSES[loss](engine)(a, b, *(moved(*ids) if engine == "triton" else ids))
        found.append([x.detach().cpu() for x in (value, *torch.autograd.grad(value, (a, b)))])
    exact, got = found
    torch.testing.assert_close(got[0].double(), exact[0], rtol=1e-4, atol=1e-5)
    for wanted, found_here in zip(exact[1:], got[1:], strict=True):
        rounding = (wanted.to(dtype).double() - wanted).norm()
        # What comes from tiles is rounded, of some losses what comes from positives by itself, and their sum.
        assert (found_here.double() - wanted).norm() <= 4 * rounding + 1e-4 * wanted.norm()


def test_no_sums_of_all_embeddings_are_held_where_they_are_many(monkeypatch, few_tiles):
    n, d = 96, 40
    monkeypatch.setattr(blocks, "_HELD", 0)
    monkeypatch.setitem(tiles.TILE, DEVICE, (16 * 24, 24))
    monkeypatch.setattr(blocks, "MULTIPLYING", (blocks.Cut(16, 32, 16),))
    monkeypatch.setattr(tiles, "_FEW", 8)
    monkeypatch.setattr(tiles, "_ACCELERATOR_NUMBERS", 8 * d)
    v, w = (x.to(DEVICE).requires_grad_() for x in embeddings(n, n, d, dtype=torch.float16))
    loss, largest = InfoNCELoss(engine="triton")(v, w), []
    for name in ("empty", "zeros"):
        make = getattr(torch, name)

        def noted(*args, _make=make, **kwargs):
            x = _make(*args, **kwargs)
            largest.append(x.numel() * (x.dtype == torch.float32))
            return x

        monkeypatch.setattr(torch, name, noted)
    loss.backward()
    assert 0 < max(largest) <= 24 * d


@pytest.mark.parametrize("loss", ["dcl", *(pytest.param(x, marks=pytest.mark.slow) for x in LOSSES if x != "dcl")])
def test_losses_on_triton(loss, multiplying, few_tiles, poisoned):
    n, m = 13, 29
    ids, (v, w) = make_ids("random", n, m), embeddings(n, m, d=16)
    found = []
    for engine, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        a, b = (x.to(DEVICE if engine == "triton" else "cpu", dtype).requires_grad_() for x in (v, w))
        value = LOSSES[loss](engine)(a, b, *moved(*ids) if engine == "triton" else ids)
        found.append([x.detach().cpu().double() for x in (value, *torch.autograd.grad(value, (a, b)))])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_first_of_equal_negatives_on_triton(multiplying, few_tiles):
    v, w = torch.ones(13, 4), torch.ones(21, 4)  # every score is exactly 1
    row_ids, col_ids = torch.arange(13) % 2, torch.arange(21) % 3
    found = Similarity(*moved(v, w, row_ids, col_ids), engine="triton").both.hardest()
    wanted = Similarity(v, w, row_ids, col_ids, engine="reference").both.hardest()
    for got, exact in zip(found, wanted, strict=True):
        assert torch.equal(got.indices.cpu(), exact.indices) and (exact.values == 1).all()


def test_more_tiles_than_are_added_at_once(multiplying, few_tiles, monkeypatch, poisoned):
    monkeypatch.setattr(blocks, "_BLOCK", 2**20)
    monkeypatch.setitem(tiles.TILE, DEVICE, (2**20, 2**10))
    n, m = 5, 300
    v, w = embeddings(n, m, dtype=torch.float32)
    w[-1] = v[0] * 2  # the highest score of all comes late
    ids = torch.arange(n), torch.arange(m) % 7
    for question in (lambda s: s.both.logsumexp(30.0), lambda s: s.both.entropy(0.1)):
        wanted = question(Similarity(v.double(), w.double(), *ids, engine="reference"))
        for got, exact in zip(question(Similarity(*moved(v, w, *ids), engine="triton")), wanted, strict=True):
            torch.testing.assert_close(got.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_softplus_of_what_is_almost_nothing(multiplying, few_tiles):
    v, w = embeddings(13, 21, dtype=torch.float32)
    ids = make_ids("random", 13, 21)
    given = torch.ones(1), torch.full((1,), -30.0)
    wanted = Similarity(v.double(), w.double(), *ids, engine="reference").negatives("softplus", *given)
    got = Similarity(*moved(v, w, *ids), engine="triton").negatives("softplus", *moved(*given))
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-5, atol=0)


def test_negatives_as_high_as_a_positive_are_not_pushed_at_no_margin(few_tiles):
    scores = torch.tensor([[2.0, 2.0, 1.0], [3.0, 1.0, 1.0]])
    ids = torch.arange(2), torch.tensor([0, 1, 5])
    found = []
    for engine, device in (("reference", "cpu"), ("triton", DEVICE)):
        s = scores.to(device).requires_grad_()
        value = Similarity.from_scores(s, *(x.to(device) for x in ids), engine=engine).violations(0.0)
        found.append([x.cpu() for x in (value, *torch.autograd.grad(value.sum(), s))])
    for got, wanted in zip(found[1], found[0], strict=True):
        assert torch.equal(got, wanted)


def test_what_is_no_number_is_the_hardest(multiplying, few_tiles):
    v, w = embeddings(13, 21, dtype=torch.float32)
    v[3, 2], ids = float("nan"), (torch.arange(13), torch.arange(21))
    rows, cols = Similarity(*moved(v, w, *ids), engine="triton").both.hardest()
    wanted = Similarity(v, w, *ids, engine="reference").both.hardest()
    for got, exact in zip((rows, cols), wanted, strict=True):
        assert torch.equal(got.indices.cpu(), exact.indices)
        torch.testing.assert_close(got.values.cpu(), exact.values, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_tie_wherever_they_are(dtype, monkeypatch):
    n, m, d = 600, 2049, 64
    monkeypatch.setitem(tiles.TILE, DEVICE, (2**20, 2048))  # 2048 columns a block, and one is left
    monkeypatch.setattr(blocks, "READING", blocks.Cut(128, 256))
    v, w = embeddings(n, m, d, dtype=dtype)
    w[-1] = w[0]
    ids = torch.zeros(n, dtype=torch.int64), torch.arange(m)
    sim = Similarity(*moved(v, w, *ids), engine="triton")
    assert (sim.ranks(ties="pessimistic") > sim.ranks(ties="optimistic")).all()


@pytest.mark.parametrize("side", [0, 1])
def test_embeddings_as_they_lie(side, multiplying, few_tiles):
    given = embeddings(13, 13, d=20, dtype=torch.float32)
    given = moved(*given)
    contiguous = [x[:, ::2].contiguous() for x in given]
    layouts = [given[side][:, ::2], contiguous[side].T.contiguous().T, given[side].repeat(1, 2)[:, :20:2]]
    ids = torch.arange(13) % 4
    found = []
    for layout in (contiguous[side], *layouts):
        leaves = list(contiguous)
        leaves[side] = layout
        leaves = [x.detach().requires_grad_() for x in leaves]
        value = InfoNCELoss(engine="triton")(*leaves, *moved(ids, ids))
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, wanted)


def test_classification_on_triton(multiplying, few_tiles, poisoned):
    n, classes = 7, 19
    (v, w), (weight, _) = embeddings(n, n, d=6), embeddings(classes, 1, d=6, seed=1)
    ids = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(0))
    found = []
    for engine, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float32, DEVICE)):
        loss = PrototypeClassificationLoss(6, classes, engine=engine)
        loss.weight = torch.nn.Parameter(weight.to(device, dtype))
        a, b = (x.to(device, dtype).requires_grad_() for x in (v, w))
        value = loss(a, b, ids.to(device))
        found.append([x.detach().cpu().double() for x in (value, *torch.autograd.grad(value, (a, b, loss.weight)))])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_kmeans_on_triton(multiplying, few_tiles):
    x = embeddings(40, 1, d=6, dtype=torch.float32)[0]
    means = {e: OnlineKMeans(9, 6, engine=e).to(DEVICE if e == "triton" else "cpu") for e in ("reference", "triton")}
    for part in x.split(10):
        ids = [m.update(part.to(m.centroids.device)).cpu() for m in means.values()]
        assert torch.equal(*ids)
    torch.testing.assert_close(means["triton"].centroids.cpu(), means["reference"].centroids)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("entries", [0, 5, 40])
def test_memory_on_triton(masked, entries, multiplying, few_tiles):
    n, d = 6, 16
    (v, w), (v_keys, w_keys) = embeddings(n, n, d), embeddings(n, n, d, seed=1)
    ids = torch.arange(n) if masked else torch.arange(n) + 1000
    found = []
    for engine, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        device = DEVICE if engine == "triton" else "cpu"
        memory = CoupledMemory(48, d, dtype=dtype).to(device)
        if entries:
            keys = (x.to(device, dtype) for x in embeddings(entries, entries, d, seed=2))
            memory.enqueue(*keys, torch.arange(entries, device=device) % 9)
        a, b, *keys = (x.to(device, dtype) for x in (v, w, v_keys, w_keys))
        for criterion in (MemoryDiversityContrastiveLoss(engine=engine), UnifiedTrainingObjective(engine=engine)):
            a, b = (x.detach().requires_grad_() for x in (a, b))
            value = criterion(a, b, *keys, memory, ids.to(device), ids.to(device))
            found.append([x.detach().cpu().double() for x in (value, *torch.autograd.grad(value, (a, b)))])
    for wanted, got in zip(found[0] + found[1], found[2] + found[3], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "term", ["identity", "log1p_clamp", "log1p_relu", "negative_log_likelihood", "softplus", "hinge"]
)
def test_positives_and_their_parameters(term, shared, poisoned):
    n, m, d = 7, 11, 20
    (v, w), ids = embeddings(n, m, d), (torch.arange(n) % 5, torch.arange(m) % 6)
    w[0] = -3 * v[0]  # a positive at the least of all cosines
    count, grads = {"negative_log_likelihood": 2, "softplus": 2, "hinge": 1}.get(term, 0), upstream(n, m)
    sizes = (1, 1) if shared else (n, m)
    found = []
    for engine, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float32, DEVICE)):
        leaves = [v, w, *(torch.linspace(0.5, 1.5, size).double() + k for size in sizes for k in range(count))]
        leaves = [x.to(device, dtype).requires_grad_() for x in leaves]
        sim = Similarity(*leaves[:2], *(x.to(device) for x in ids), engine=engine)
        sums = sim.both.positives(term, leaves[2 : 2 + count], leaves[2 + count :])
        total = sum((x * g.to(x)).sum() for x, g in zip(sums, grads, strict=True))
        found.append([x.detach().cpu().double() for x in (*sums, *torch.autograd.grad(total, leaves))])
    rtol = 2e-3 if term == "log1p_clamp" else 1e-4  # float32 has few digits of 1 - 0.999999
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(("masked", "kind"), [(True, "random"), (False, "random"), (True, "same")])
@pytest.mark.parametrize("low", [False, True])
def test_sums_over_columns_of_any_length(masked, kind, low, multiplying, few_tiles, poisoned):
    """Whatever power of two a tile takes, and wherever a row has its largest exponent."""
    scale = torch.tensor([0.01, 9.0, 90.0, 1000.0, -50.0, 0.0, 300.0, -1000.0, 60.0], dtype=torch.float64)
    n, m = len(scale), 40
    v, w = embeddings(n, m, 16)
    w[:12], w[12:24], w[30] = w[:12] / 50 - v[3], w[12:24] / 50 + v[3], v[6]  # some cosines near -1 and 1
    if low:
        v, w = v.abs(), -w.abs()  # none above 0
    inverses = [1 / x.norm(dim=1) for x in (v, w)]
    found = []
    for fused, dtype, device in ((False, torch.float64, "cpu"), (True, torch.float32, DEVICE)):
        given = [x.to(device, dtype) for x in (v, w, *inverses)] + [x.to(device) for x in make_ids(kind, n, m)]
        given[0] = given[0].T.contiguous().T
        source = tiles.Source(*given, fused=fused)
        total, top, products = softmax.sums_and_products(source, scale.to(given[0]), masked, False, True)
        found.append([x.cpu().double() for x in (total.log() + top, products / total.clamp_min(1e-30)[:, None])])
        alone = softmax.sums_and_products(source, scale.to(given[0]), masked, False, False)
        torch.testing.assert_close(alone[0].log() + alone[1], total.log() + top)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", [True, False])
def test_sums_over_columns_of_half_precision(dtype, unit, few_tiles, poisoned):
    n, m = 9, 40
    v, w = (x.to(dtype) for x in embeddings(n, m, 16))
    w = w if not unit else torch.nn.functional.normalize(w, dim=1)
    w[30] = v[3] if not unit else torch.nn.functional.normalize(v[3], dim=0)
    if not unit:
        w[30:] /= 4000  # their reciprocal lengths times exponentials leave the range of float16
    found = []
    for fused, kind, device in ((False, torch.float64, "cpu"), (True, dtype, DEVICE)):
        rows, cols = v.to(device, kind), w.to(device, kind)
        inverses = [(1 / x.double().norm(dim=1)).to(tiles.compute_dtype(rows)).to(device) for x in (v, w)]
        source = tiles.Source(rows, cols, inverses[0], None if unit else inverses[1], None, None, fused=fused)
        scale = torch.linspace(1, 300, n).to(inverses[0])
        total, top, products = softmax.sums_and_products(source, scale, False, False, True)
        found.append([x.cpu().double() for x in (total.log() + top, products / total[:, None])])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    assert (found[1][1] - found[0][1]).norm() <= torch.finfo(dtype).eps * found[0][1].norm()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", ["primes", "five captions", "no negative", "square with duplicates"])
def test_ranks_and_topk_on_triton(shape, biased, multiplying, few_tiles):
    n, m, kind = SHAPES[shape]
    ids, (v, w) = make_ids(kind, n, m), embeddings(n, m, dtype=torch.float32)
    w[1:3] = w[0]  # ties
    bias = torch.linspace(-0.2, 0.2, m) if biased else None
    sim = Similarity(*moved(v, w, *ids), engine="triton")
    wanted = Similarity.from_scores(sim.scores().cpu(), *ids)
    for ties in ("pessimistic", "optimistic"):
        got = sim.ranks(*moved(bias), ties=ties).cpu()
        assert torch.equal(got, wanted.ranks(bias, ties=ties))
    k = min(3, m)
    torch.testing.assert_close(sim.topk(k, *moved(bias)).values.cpu(), wanted.topk(k, bias).values)


@pytest.fixture
def check(monkeypatch):
    check = importlib.import_module("itrloss.engines.triton.check")
    monkeypatch.setattr(check, "_known", {})
    return check


SMALL = (40, 136, 24)


@pytest.fixture
def small_example(check, monkeypatch):
    why_not = check._why_not
    monkeypatch.setattr(check, "_why_not", lambda device: why_not(device, *SMALL))


def warned(recwarn):
    return [w for w in recwarn if "Triton engine" in str(w.message)]


def test_that_it_works_is_found_out_on_an_example(check, small_example, recwarn):
    assert check.works(DEVICE) and not warned(recwarn)


def test_the_example_is_tried_out_of_sight_of_the_caller(check, small_example, recwarn):
    def step(x):
        return (x.sin() if check.works(DEVICE) else x.cos()).sum()

    wanted = [(torch.ones(3) * 1.0).cos()]
    x = torch.ones(3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(checkpoint(step, x, use_reentrant=False), x)[0], wanted[0])
    modes = [torch.device("meta"), torch.inference_mode(), torch.no_grad(), FakeTensorMode()]
    modes += [torch.autocast(DEVICE, torch.bfloat16), saved_tensors_hooks(refused, refused)]
    for mode in modes:
        check._known.clear()
        with mode:
            assert check.works(DEVICE)
    check._known.clear()
    assert torch.func.grad(step)(torch.ones(3)).equal(wanted[0])
    assert not warned(recwarn)


def test_a_full_memory_is_no_answer(check, monkeypatch, recwarn):
    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(check, "_agree", full)
    assert not check.works(DEVICE) and not check._known and not warned(recwarn)


def test_nothing_is_tried_while_a_graph_is_captured(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(check, "_why_not", refused)
    assert not check.works("cuda:0") and not check._known
    check._known["cuda:0"] = True
    assert check.works("cuda:0")


def test_the_compiler_does_not_look_into_the_example(check):
    torch._dynamo.reset()
    f = torch.compile(
        lambda x: x + 1 if _kernels_work(torch.device("cpu"), True) else x - 1, fullgraph=True, backend="eager"
    )
    for works in (True, False):
        check._known["cpu"] = works
        torch._dynamo.reset()
        assert f(torch.zeros(())) == (1 if works else -1)


def nothing(*args, **kwargs):
    """A product that was not made."""


def refused(*args, **kwargs):
    raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("add_product", nothing, "finds something else than the dense engine, of torch.float32 and of torch.bfloat16 "),
        ("_add_softmax_sums", nothing, "finds something else"),
        ("_rescale", nothing, "finds something else"),
        ("launch", refused, "fails: RuntimeError: no C compiler"),
        ("_multiply", nothing, "finds something else"),
    ],
)
def test_what_does_not_work_is_left_alone(name, broken, why, check, small_example, monkeypatch):
    for module in (passes, blocks):
        monkeypatch.setattr(module, name, broken, raising=False)
    with pytest.warns(UserWarning, match=f"the Triton engine {why}.*does without it on {DEVICE}"):
        assert not check.works(DEVICE)
    assert not check.works(DEVICE)  # and is not tried again


@pytest.mark.parametrize(
    ("dtype", "device", "scores", "budget", "works", "wanted"),
    [
        (torch.bfloat16, "cuda:1", 2**20, 2**30, True, "triton"),
        (torch.float16, "cuda:1", 2**20, 2**30, True, "triton"),
        (torch.bfloat16, "cuda:1", 2**20, 2**30, False, "dense"),
        (torch.bfloat16, "cuda:1", 2**20, 2**20, False, "tiled"),
        (torch.bfloat16, "cuda:1", 2**20 - 1, 2**30, True, "dense"),
        (torch.float32, "cuda:1", 2**20, 2**30, True, "dense"),
        (torch.float32, "cuda:1", 2**20, 2**20, True, "triton"),
        (torch.float64, "cuda:1", 2**20, 2**20, True, "tiled"),
        (torch.float16, "old", 2**20, 2**30, True, "dense"),
        (torch.float16, "old", 2**20, 2**20, True, "triton"),
        (torch.bfloat16, "cpu", 2**20, 2**20, True, "tiled"),
        (torch.bfloat16, "cpu", 2**20, 2**30, True, "dense"),
    ],
)
def test_auto_takes_triton_where_it_pays_and_works(dtype, device, scores, budget, works, wanted, check, monkeypatch):
    asked = []
    monkeypatch.setattr(check, "works", lambda device: asked.append(device) or works)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda x: (7, 5) if device == "old" else (8, 0))
    x = SimpleNamespace(dtype=dtype, device=torch.device(device.replace("old", "cuda:1")))
    assert choose("auto", scores, budget, x) == wanted
    assert set(asked) <= {"cuda:1"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose("auto", scores, budget, x) == (
        "dense" if scores * (8 if dtype == torch.float64 else 4) <= budget else "tiled"
    )


def test_what_triton_cannot_do_is_refused(monkeypatch):
    v, w = embeddings(3, 3)
    with pytest.raises(TypeError, match="engine: 'triton' computes in float32"):
        Similarity(v, w, engine="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="engine: 'triton' needs an accelerator"):
        Similarity(v.float(), w.float(), engine="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install triton"):
        Similarity(v.float(), w.float(), engine="triton")


def test_losses_on_triton_give_the_same_bits_again():
    v, w = moved(*embeddings(40, 56, d=16, dtype=torch.float32))
    ids = moved(torch.arange(40), torch.arange(56) // 2)
    for loss in LOSSES.values():
        criterion, found = loss("triton"), []
        for _ in range(2):
            a, b = (x.clone().requires_grad_() for x in (v, w))
            value = criterion(a, b, *ids)
            found.append((value, *torch.autograd.grad(value, (a, b))))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "random"])
@pytest.mark.parametrize("loss", ["dcl", "hal", "infonce", "sigmoid", "triplet"])
def test_compiles_without_graph_breaks(loss, kind):
    v, w = moved(*embeddings(8, 8, d=16, dtype=torch.float32))
    ids = moved(*make_ids(kind, 8, 8))
    criterion, found = LOSSES[loss]("triton"), []
    torch._dynamo.reset()
    for f in (criterion, torch.compile(criterion, fullgraph=True, backend="aot_eager")):
        a, b = (x.clone().requires_grad_() for x in (v, w))
        value = f(a, b, *ids)
        found.append((value, *torch.autograd.grad(value, (a, b))))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(capability, tmp_path):
    """Into code that keeps the values of a thread in registers, but for eight at most."""
    tests = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [sys.executable, str(tests / "gpu_compiler.py"), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    gradients = {
        "affine_gradient",
        "exponentials",
        "rescale",
        "softmax_gradient",
        "softplus_gradient",
        "violation_gradient",
    }
    sums = {"hardest_negatives", "moment_sums", "softmax_sums", "softplus_sums", "threshold_sums", "add_softmax_sums"}
    assert {kernel["name"] for kernel in kernels} == gradients | sums | {"positive_gradient", "positive_sums"}
    for kernel in kernels:
        assert kernel["REG"] and kernel["STACK"] <= 32 and not kernel["LOCAL"], kernel
        assert kernel["DYNAMIC"] <= 96 * 2**10, (
            kernel
        )  # two programs fit into a processor of an H100, one into an A100's
