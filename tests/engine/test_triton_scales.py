"""A log-sum-exp on the Triton engine whose scale the host does not know."""

from __future__ import annotations

import pytest
import torch
from support.answers import gradients
from support.cases import VIEWS, embeddings, finite, similarity
from support.on_triton import (
    DEVICE,
    OF_KERNELS,
    assert_near,
    distance,
    moved,
)

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
    """Return a list to which the kernels are appended that run."""
    launch = engine.Pass.launch
    ran = []

    def launched(run, kernel, config, *args):
        ran.append(kernel.__name__)
        launch(run, kernel, config, *args)

    replace(engine.Pass, "launch", launched)
    return ran


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
