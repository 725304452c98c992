"""Sums and totals of the Triton engine that come along with their gradient."""

from __future__ import annotations

import pytest
import torch
from support.answers import TOTALS, parameters
from support.cases import (
    embeddings,
)
from support.on_triton import DEVICE, HALF, OF_KERNELS, assert_close, moved
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from itrloss import Similarity
from itrloss.engine import terms, tiled
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.question import Question
from itrloss.engine.relation import Relation
from itrloss.functional import sigmoid_loss

pytestmark = OF_KERNELS


# Totals without one scale, or of a term without kernels; the gradients of all others are found in
# the forward pass.
LATER = ["scales of anchors", "of a user's term"]


@pytest.fixture
def early(monkeypatch):
    """Count the totals that come along with their gradient."""
    found = []
    total = engine.sums_and_gradients

    def counted(*args):
        found.append(args)
        return total(*args)

    monkeypatch.setattr(engine, "sums_and_gradients", counted)
    return found


def siglip(v, w, scale=None):
    """Return SigLIP's loss by Triton."""
    sim = Similarity(v, w, engine="triton")
    return sigmoid_loss(sim, 10.0 if scale is None else scale, -3.0)


def trained(d=8, dtype=torch.float32):
    """Embeddings that get a gradient."""
    vectors = moved(*embeddings(12, 12, d, dtype=dtype))
    return [x.requires_grad_() for x in vectors]


def exact_leaves(*vectors):
    """The same in float64."""
    return [x.detach().cpu().double().requires_grad_() for x in vectors]


@pytest.mark.parametrize("held", [2**27, 4 * 24 * 8, 4 * 24 * 8 - 1])
def test_sums_of_gradients_are_held_if_they_fit(held, early, few_tiles, monkeypatch):
    monkeypatch.setattr(engine, "held_bytes", lambda device: held)
    v, w = trained()
    found = torch.autograd.grad(siglip(v, w), (v, w))
    assert bool(early) == (held >= 4 * 24 * 8)
    exact = exact_leaves(v, w)
    sim = Similarity(*exact, engine="dense")
    wanted = torch.autograd.grad(sigmoid_loss(sim, 10.0, -3.0), exact)
    assert_close(found, wanted, 1e-5, 1e-7)


def test_without_training_no_gradient_is_found(early, few_tiles):
    v, w = trained()
    wanted = siglip(v.detach(), w.detach())
    sim = Similarity(v, w, engine="triton")
    with torch.no_grad():
        torch.testing.assert_close(siglip(v, w), wanted)
        torch.testing.assert_close(sigmoid_loss(sim, 10.0, -3.0), wanted)
    assert not early


def test_a_gradient_of_parameters_alone_is_found_later(early, few_tiles):
    v, w = moved(*embeddings(12, 12, 8, dtype=torch.float32))
    scale = torch.tensor(10.0, requires_grad=True, device=DEVICE)
    siglip(v, w, scale).backward()
    assert scale.grad is not None
    assert not early


def test_a_gradient_of_given_scores_is_found_later(early, few_tiles):
    """It is a matrix."""
    scores, _ = trained(d=12)
    sim = Similarity.from_scores(scores, engine="triton")
    value = sigmoid_loss(sim, 10.0, -3.0)
    value.backward()
    assert scores.grad.any()
    assert not early


@pytest.mark.parametrize("name", LATER)
def test_other_totals_have_their_gradient_later(name, early, few_tiles):
    v, w = trained()
    anchors = Similarity(v, w, engine="triton").both
    p = parameters(12, 12, torch.float32).to(DEVICE)
    TOTALS[name](anchors, p[: len(anchors)]).backward()
    assert v.grad.any()
    assert not early


@pytest.mark.parametrize("which", [0, 1])
def test_a_side_without_training_has_no_sums(which, early, few_tiles):
    given = trained()
    given[which].requires_grad_(False)
    siglip(*given).backward()
    _, _, _, needs = early[0]
    assert (needs.rows, needs.cols) == (which == 1, which == 0)
    assert given[which].grad is None
    assert given[1 - which].grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_total_may_be_differentiated_again(dtype, early, few_tiles):
    v, w = trained(dtype=dtype)
    value = siglip(v, w)
    first = torch.autograd.grad(value, (v, w), retain_graph=True)
    again = torch.autograd.grad(3 * value, (v, w), retain_graph=True)
    torch.testing.assert_close([3 * x for x in first], [*again], rtol=1e-2, atol=1e-3)
    assert len(early) == 1
    with pytest.raises(RuntimeError, match=r"create_graph.*dense"):
        torch.autograd.grad(value, v, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_total_has_its_gradient_in_checkpoints_and_with_hooks(dtype, early, few_tiles):
    v, w = trained(dtype=dtype)
    wanted = torch.autograd.grad(siglip(v, w), (v, w))
    again = checkpoint(siglip, v, w, use_reentrant=False)
    with saved_tensors_hooks(torch.clone, lambda copy: copy):
        hooked = siglip(v, w)
    for other in (again, hooked):
        found = torch.autograd.grad(other, (v, w))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_parts_of_a_total_and_its_positives(early, few_tiles):
    """The total and the positives' scores come from one node, which may get one gradient only."""

    def found_by(engine_name, leaves):
        sim = Similarity(*leaves, engine=engine_name)
        total = sim.weighted_sum(terms.softplus, scale=4.0)
        positives = sim.sum_of_positives(terms.square).sum()
        by_total = torch.autograd.grad(total, leaves, retain_graph=True)
        by_positives = torch.autograd.grad(positives, leaves)
        return [*by_total, *by_positives]

    leaves = trained()
    found = found_by("triton", leaves)
    assert len(early) == 1
    wanted = found_by("dense", exact_leaves(*leaves))
    assert_close(found, wanted, 1e-5, 1e-6)


# Sums of anchors that alone are trained, as next to a memory; their scales and shifts are given.
ONE_SIDED = {
    "one scale": lambda anchors, q: anchors.logsumexp(5.0),
    "scales of anchors": lambda anchors, q: anchors.logsumexp(q),
    "shifts of anchors": lambda anchors, q: anchors.sum(terms.softplus, scale=3.0, shift=-q),
    "over all": lambda anchors, q: anchors.sum(terms.square, scale=2.0, over="all"),
    "limits": lambda anchors, q: anchors.logsumexp(q, below=0.8, above=-0.3),
    "listed positives": lambda anchors, q: (
        anchors.logsumexp(5.0) - anchors.mean_of_positives(terms.identity)
    ),
}


# Others, whose gradients are found later.
NOT_ONE_SIDED = {
    "a learnt scale": lambda anchors, q: anchors.logsumexp(q.requires_grad_(), at_most=9.0),
    "a learnt shift": lambda anchors, q: anchors.sum(terms.softplus, shift=q.requires_grad_()),
    "both sides": lambda anchors, q: anchors.both.logsumexp(5.0),
}


@pytest.mark.parametrize("name", [*ONE_SIDED, *NOT_ONE_SIDED])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_sums_of_one_trained_side_come_along_with_its_gradient(name, dtype, early, few_tiles):
    """Float16 has no room for exponentials of several anchors, whose sums divide them first."""
    v, w = trained(dtype=dtype)
    q = torch.linspace(2, 6, 12, device=DEVICE)
    answer = {**ONE_SIDED, **NOT_ONE_SIDED}[name]
    values = answer(Similarity(v, w.detach(), engine="triton"), q)
    values.sum().backward()
    assert v.grad.any()
    if name in ("one scale", "scales of anchors") and dtype == torch.float16:
        assert not early
    elif dtype != torch.float16:
        assert len(early) == (name in ONE_SIDED)


@pytest.mark.parametrize("name", ["one scale", "scales of anchors"])
def test_sums_with_a_gradient_for_candidates_have_it_later(name, early, few_tiles):
    v, w = trained()
    for sim in (Similarity(v, w.detach(), engine="triton").T, Similarity(v, w, engine="triton")):
        ONE_SIDED[name](sim, torch.linspace(2, 6, 12, device=DEVICE)).sum().backward()
    assert not early
    assert v.grad.any()
    assert w.grad.any()


def test_embeddings_that_change_before_backward_are_refused(early, few_tiles):
    v, w = trained()
    value = siglip(v, w)
    with torch.no_grad():
        w.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def no_pairs(n, m, sides, term, **values):
    """A question about n rows and m columns, one of which is 0, and its inputs."""
    vectors = [torch.ones(size, 4, device=DEVICE) for size in (n, m)]
    question = Question(term, Relation((n, m), (None, None), DEVICE), sides, **values)
    return question, Inputs(*[Side(x, None, None, None) for x in vectors], None)


@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0)])
def test_no_rows_or_columns(n, m):
    asked = no_pairs(n, m, (0, 1), terms.exponential)
    assert engine.sums(*asked).tolist() == [0.0] * 3
    needs = tiled.Needs(True, True, False, False)
    rows, cols, *_ = engine.gradients(*asked, torch.ones(3, device=DEVICE), needs, None)
    assert (rows.shape, cols.shape) == ((n, 4), (m, 4))
    assert not rows.any() and not cols.any()


@torch.no_grad()
def test_a_total_of_no_pairs():
    scale = torch.ones(1, device=DEVICE, requires_grad=True)
    asked = no_pairs(0, 3, (0,), terms.softplus, scale=scale)
    needs = tiled.Needs(True, True, False, False, scale=True)
    value, sums = engine.sums_and_gradients(*asked, torch.ones(1, device=DEVICE), needs)
    found = engine.completed_gradients(*asked, sums, torch.ones((), device=DEVICE), needs, None)
    assert value == 0
    assert found.scale == 0
    assert not found.cols.any()
    assert found.rows.shape == (0, 4)
