"""A log-sum-exp on the Triton engine whose scale the host does not know."""

from __future__ import annotations

import pytest
import torch
from support.answers import gradients
from support.cases import SHAPES, VIEWS, each, embeddings, finite, similarity
from support.interpreter import TILE
from support.on_triton import (
    ASKED,
    DEVICE,
    OF_KERNELS,
    assert_close,
    assert_near,
    compare,
    distance,
    moved,
)
from support.processes import run

import itrloss
from itrloss import Similarity
from itrloss.engine import triton as engine
from itrloss.engine.matrix import Matrix

pytestmark = OF_KERNELS


@pytest.fixture
def unread(monkeypatch, multiplying, few_tiles, poisoned):
    """Let the host read no numbers, as on an accelerator, where kernels multiply."""
    stop_reading(monkeypatch.setattr)


def stop_reading(replace):
    replace(itrloss.anchors, "host_may_read", lambda x: False)
    replace(Matrix, "host_may_read", lambda matrix: False)


OF_EXPONENTIALS = [name for name in ASKED if name.startswith("logsumexp") and "guide" not in name]


@pytest.mark.parametrize(
    ("name", "shape", "view", "normalize"),
    each(
        3,
        name=OF_EXPONENTIALS,
        shape=[shape for shape in SHAPES if SHAPES[shape][0] > 1],
        view=VIEWS,
        normalize=[True, True, False],
    ),
)
def test_scales_that_the_host_does_not_read(name, shape, view, normalize, unread):
    compare(name, shape, VIEWS[view], normalize=normalize)


def aligned_embeddings(kind, n, m, d=6):
    """Embeddings whose scores are usual ones, or all near -1 for one row, or for all."""
    v, w = embeddings(n, m, d)
    if kind == "usual":
        return v, w
    direction = v[0] / v[0].norm()
    lengths_of_w = w.norm(dim=1, keepdim=True)
    w = lengths_of_w * (direction + 1e-3 * w)
    if kind == "one row far":
        opposite = -2 * direction[None]
        return torch.cat([v[:-1], opposite]), w
    lengths_of_v = v.norm(dim=1, keepdim=True)
    return lengths_of_v * (-direction + 1e-3 * v), w


KINDS = ["usual", "one row far", "all far"]


@pytest.mark.parametrize("scale", [0.0, 3.0, 60.0, 100.0, 150.0, 1e4, -100.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("learnt", "view"), [(True, "both"), (True, "rows"), (False, "columns")])
def test_scores_at_which_sums_vanish(scale, kind, learnt, view, unread):
    """The limits of float32 are those of the engine in plain PyTorch, which subtracts maxima."""
    given = [*aligned_embeddings(kind, 14, 14), torch.tensor([scale])]

    def outcome(engine_name, dtype, device):
        """The values, and their gradients by vectors and scale."""
        leaves = [x.to(device, dtype).requires_grad_() for x in given]
        v, w, a = leaves
        sim = similarity(v, w, (None, None), engine_name)
        anchors = VIEWS[view](sim)
        values = anchors.logsumexp(a if learnt else scale)
        grad = torch.linspace(-1, 2, len(values)).to(values)
        return [values.detach(), *gradients(values, leaves, grad)]

    exact = outcome("reference", torch.float64, "cpu")
    plain = outcome("dense", torch.float32, "cpu")
    found = outcome("triton", torch.float32, DEVICE)
    for got, other, wanted in zip(found, plain, exact, strict=True):
        error_of_torch = distance(other, wanted)
        assert_near([got], [wanted], 2e-6, 4 * error_of_torch + 1e-6)


@pytest.mark.parametrize("embedded", ["as they are", "in several blocks", "without negatives"])
@pytest.mark.parametrize("kind", KINDS)
def test_vanishing_sums_of_other_matrices(embedded, kind, unread):
    n, m = 8, 14
    given = [*aligned_embeddings(kind, n, m), torch.tensor([100.0])]
    row_ids = torch.arange(n)
    col_ids = torch.arange(m) // 2
    if embedded == "without negatives":
        row_ids = (torch.arange(n) - 3).clamp_min(0)
        col_ids = torch.zeros(m, dtype=torch.int64)

    def outcome(engine_name, dtype, device):
        """The values, and their gradients by vectors and scale."""
        leaves = [x.to(device, dtype).requires_grad_() for x in given]
        v, w, a = leaves
        of_rows = row_ids.to(device)
        of_cols = col_ids.to(device)
        if embedded == "in several blocks" and engine_name == "triton":
            first = similarity(v, w[:5], (of_rows, of_cols[:5]), engine_name)
            second = similarity(v, w[5:], (of_rows, of_cols[5:]), engine_name)
            anchors = itrloss.Anchors.pooled(first, second)
        else:
            normalize = embedded != "as they are"
            anchors = similarity(v, w, (of_rows, of_cols), engine_name, normalize=normalize)
        values = anchors.logsumexp(a)
        found = gradients(values, leaves, torch.ones(n))
        return values.detach(), found

    wanted_values, wanted = outcome("reference", torch.float64, "cpu")
    values, found = outcome("triton", torch.float32, DEVICE)
    assert torch.equal(values.cpu().isfinite(), wanted_values.isfinite())
    # scores near -1 have few digits left
    assert_near([finite(values), *found], [finite(wanted_values), *wanted], 2e-4, 1e-6)


def record_runs(replace):
    """Return a list to which the kernels are appended that compute anything."""
    launch = engine.Pass.launch
    ran = []

    def launched(run, kernel, config, *args):
        flag = run.kernel_values.flag
        if flag is None or bool(flag) == config.RUNS_IF:
            what = "maxima" if config.MAXIMUM else kernel.__name__.removesuffix("_kernel")
            name = f"{what} of {'one' if config.SHARED else 'each'}"
            if name not in ran:
                ran.append(name)
        launch(run, kernel, config, *args)

    replace(engine.Pass, "launch", launched)
    return ran


USUALLY = ["sums of one", "gradient of one"]
FAILED = ["sums of one", "maxima of one", "sums of each", "gradient of each"]


@pytest.mark.parametrize(
    ("kind", "ids", "scale", "wanted"),
    [
        ("usual", (None, None), 100.0, USUALLY),
        ("one row far", (None, None), 100.0, FAILED),
        ("one row far", (None, None), 60.0, USUALLY),
        # A sum of no candidates is 0, too.
        ("usual", ([0] * 14, [0] * 13 + [1]), 60.0, USUALLY),
        ("usual", ([0] * 14, [0] * 14), 100.0, ["sums of one", "maxima of one", "gradient of one"]),
    ],
)
def test_needless_kernels_return_at_once(kind, ids, scale, wanted, unread, monkeypatch):
    """Usually one shift serves all anchors, in one evaluation for both sides."""
    ran = record_runs(monkeypatch.setattr)
    v, w = (x.float().to(DEVICE).requires_grad_() for x in aligned_embeddings(kind, 14, 14))
    a = torch.tensor([scale], device=DEVICE, requires_grad=True)
    given_ids = [x if x is None else torch.tensor(x, device=DEVICE) for x in ids]
    sim = Similarity(v, w, *given_ids, engine="triton")
    values = sim.both.logsumexp(a)
    values.sum().backward()
    assert ran == wanted


def test_a_bias_takes_the_tiles_of_torch(unread, monkeypatch):
    """Neither sums nor maxima of biased scores have kernels, whatever the scale."""
    ran = record_runs(monkeypatch.setattr)
    v, w = moved(*embeddings(6, 6, dtype=torch.float32))
    bias = torch.linspace(-1, 1, 6, device=DEVICE)
    scale = torch.tensor([100.0], device=DEVICE)

    def values(engine_name):
        sim = Similarity(v, w, bias=(None, bias), engine=engine_name)
        return sim.both.logsumexp(scale)

    torch.testing.assert_close(values("triton"), values("dense"))
    assert not ran


def test_the_bound_of_scores():
    v = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    w = torch.tensor([[-6.0, -8.0], [0.0, 0.0]])

    def bound(*args, **options):
        sim = Similarity(*args, **options)
        return sim._matrix.largest_score()

    assert bound(v, w, normalize=False).tolist() == [50.0]
    no_positive = (torch.tensor([0, 1]), torch.tensor([2]))
    assert bound(v, w[1:], *no_positive, normalize=False).tolist() == [0.0]
    assert bound(v, w).tolist() == [1.0]
    assert bound(v, w, bias=(None, torch.ones(2))) is None
    assert Similarity.from_scores(v)._matrix.largest_score() is None


def of_a_process(rank, kind, normalize):
    """Return the kernels that compute anything, and the values and gradients of a process."""
    stop_reading(setattr)
    engine.fused = lambda rows, cols: True
    engine.PRODUCT_TILES = (engine.TileConfig(*TILE, 4, 2),)
    ran = record_runs(setattr)
    leaves = []
    for vectors in aligned_embeddings(kind, 12, 12):
        own = vectors.float().chunk(2)[rank]
        leaves.append(own.requires_grad_())
    a = torch.tensor([100.0 if normalize else 0.35], requires_grad=True)
    sim = Similarity.sharded(*leaves, engine="triton", normalize=normalize)
    values = sim.both.logsumexp(a)
    gradients = torch.autograd.grad(values.sum(), (*leaves, a))
    return ran, [values.detach(), *gradients]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="processes share the CPU")
@pytest.mark.parametrize(
    ("kind", "normalize"), [("usual", True), ("usual", False), ("all far", True)]
)
def test_vanishing_sums_over_several_processes(kind, normalize, tmp_path):
    found = run(of_a_process, tmp_path, kind, normalize)
    v, w = (x.requires_grad_() for x in aligned_embeddings(kind, 12, 12))
    a = torch.tensor([100.0 if normalize else 0.35], dtype=torch.float64, requires_grad=True)
    sim = similarity(v, w, (None, None), "reference", normalize=normalize)
    whole = sim.both.logsumexp(a)
    by_v, by_w, by_scale = torch.autograd.grad(whole.sum(), (v, w, a))
    of_rows, of_cols = whole.detach().split(12)
    for rank, (ran, (*own, _)) in enumerate(found):
        assert ran == (USUALLY if kind == "usual" else FAILED)
        part = slice(6 * rank, 6 * rank + 6)
        values = torch.cat([of_rows[part], of_cols[part]])
        assert_near(own, [values, by_v[part], by_w[part]], 2e-4, 1e-6)
    total = sum(tensors[-1] for _, tensors in found)
    assert_close([total], [by_scale], 1e-4, 1e-4)
