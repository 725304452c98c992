"""Gradients: which are computed, when, and how often; second derivatives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support import answers
from support.answers import ANSWERS, parameters
from support.cases import (
    embeddings,
    finite,
    guide_of,
    make_ids,
    similarity,
)
from support.flops import saved_bytes
from torch.autograd import gradcheck, gradgradcheck

import itrloss
from itrloss import Similarity
from itrloss.engine import relation
from itrloss.engine.relation import IGNORE_ID
from itrloss.engine.terms import hinge, identity, log1p_clamp


def leaves_of(*tensors):
    return tuple(x.requires_grad_() for x in tensors)


def few_leaves():
    """Vectors and parameters for numerical derivatives."""
    return leaves_of(*embeddings(4, 5, d=3), parameters(4, 5))


def answer_of(name, engine):
    """Return an answer as a function of vectors and parameters."""
    ids = make_ids("random", 4, 5, seed=3)
    return lambda v, w, p: finite(ANSWERS[name](similarity(v, w, ids, engine).both, p))


@pytest.mark.parametrize("name", ANSWERS)
def test_gradcheck(name, monkeypatch):
    """Gradients of plain PyTorch, which the other engines must equal."""
    v, w, p = few_leaves()
    guide = guide_of(similarity(v, w, make_ids("random", 4, 5, seed=3), "dense").both)
    # not that of the perturbed inputs
    monkeypatch.setattr(answers, "guide_of", lambda anchors: guide)
    assert gradcheck(answer_of(name, "dense"), (v, w, p), fast_mode=True)


@pytest.mark.parametrize("engine", ["tiled", "kept"])
def test_sums_that_a_loss_does_not_use_cost_no_pass_over_the_scores(engine, monkeypatch):
    v, w = embeddings(5, 5)
    v.requires_grad_()
    sim = similarity(v, w, (None, None), engine)
    sim.both.logsumexp(5.0)
    monkeypatch.setattr("itrloss.engine.tiled.gradients", None)
    found = torch.autograd.grad(sim.sum_of_positives(identity).sum(), v)
    wanted = torch.autograd.grad(F.cosine_similarity(v, w).sum(), v)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_scores_and_pairs_have_their_gradient_after_use_without_one(engine, asked_before):
    v, w = embeddings(5, 5)
    v.requires_grad_()
    sim = similarity(v, w, (None, None), engine)
    if asked_before:
        with torch.no_grad():
            sim.sum_of_positives(identity)
            sim.scores()
    value = sim.sum_of_positives(identity).sum() + sim.scores().square().sum()
    found = torch.autograd.grad(value, v)
    scores = F.normalize(v) @ F.normalize(w).T
    wanted = torch.autograd.grad(scores.diagonal().sum() + scores.square().sum(), v)
    torch.testing.assert_close(found, wanted)


# Sums over positives next to a threshold of each anchor.
OF_THRESHOLDS = {
    "hardest": lambda both: both.sum_of_positives(hinge, both.hardest_negatives().values),
    "hinge sum": lambda both: both.hinge_sum(0.1),
}


@pytest.mark.parametrize("name", OF_THRESHOLDS)
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_what_is_held_for_many_positives_is_no_copy_of_each(name, engine):
    """2048 pairs save 64 numbers each, not copies of their embeddings."""
    v, w = leaves_of(*embeddings(64, 64, 64, dtype=torch.float32))
    ids = torch.arange(64) % 2
    both = similarity(v, w, (ids, ids), engine).both
    saved = saved_bytes(lambda: OF_THRESHOLDS[name](both))
    assert max(saved) < 2048 * 64 * 4


# ------------------------------------------------------------------------------ second derivatives

SECOND = [
    "logsumexp per anchor",
    "std",
    "likelihood",
    "entropy",
    "softplus of negatives",
    "hardest",
    "log1p",
]
SINGLE_PAIRS = ["hardest", "log1p"]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(
            (name, engine)
            for name in SECOND
            for engine in ("dense", "kept", "auto", "scores", "tiled")
        ),
        *((name, "tiled") for name in SINGLE_PAIRS),
    ],
)
def test_kept_scores_and_single_pairs_have_second_derivatives(name, engine):
    assert gradgradcheck(answer_of(name, engine), few_leaves(), fast_mode=True)


def test_anchors_without_pairs_stay_in_the_graph_of_second_derivatives():
    """A process without pairs would otherwise leave out an exchange that the others wait in."""
    ids = torch.full((3,), IGNORE_ID), torch.tensor([IGNORE_ID, 1, 2, 3])
    v, w = leaves_of(*embeddings(3, 4))
    sums = Similarity(v, w, *ids, engine="dense").both.sum_of_positives(log1p_clamp)
    grad = torch.ones_like(sums, requires_grad=True)
    first = torch.autograd.grad(sums, (v, w), grad, create_graph=True)
    (second,) = torch.autograd.grad(sum(x.sum() for x in first), grad)
    assert torch.equal(second, torch.zeros_like(grad))


def test_sums_by_class_have_second_derivatives(monkeypatch):
    monkeypatch.setattr(relation, "FEW", -1)
    v, w, _ = few_leaves()
    ids = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 3, 1, 2])

    def sums(x, y):
        return similarity(x, y, ids, "kept").both.sum_of_positives(identity)

    assert gradgradcheck(sums, (v, w))


OF_ONE_INPUT = {
    "columns computed from rows": lambda x: Similarity(x, 2 * x + 1).logsumexp(3.0),
    "rows and columns are one": lambda x: Similarity(x, x).both.logsumexp(3.0),
    "a large matrix": lambda x: Similarity(x, 2 * x + 1, engine="tiled").logsumexp(3.0),
    "a scale computed from the scores": lambda x: scaled_by_itself(Similarity(x, 2 * x + 1)),
    "sets": lambda x: itrloss.functional.set_similarity(*[x.view(2, 2, 3)] * 2, "max_sum"),
    "own weights": lambda x: itrloss.ComplementaryContrastiveLoss()(x, x + 1),
    "further candidates": lambda x: itrloss.InfoNCELoss(image_image=True)(x, x.flip(1)),
}


def scaled_by_itself(sim):
    scale = 1 + sim.std()
    return sim.log1p_sum_exp(scale, scale / 4)


@pytest.mark.parametrize("name", OF_ONE_INPUT)
def test_a_gradient_with_a_graph_counts_each_way_once(name):
    (x,) = leaves_of(embeddings(4, 5, d=3)[0])
    call = OF_ONE_INPUT[name]
    gradients = []
    for create_graph in (False, True):
        gradients += torch.autograd.grad(call(x).sum(), x, create_graph=create_graph)
    torch.testing.assert_close(gradients[1], gradients[0])


JOINT = {
    "joint": itrloss.InfoNCELoss(0.3, joint=True),
    "images and texts": itrloss.InfoNCELoss(0.3, image_image=True, text_text=True),
    "mil-nce": itrloss.MILNCELoss(0.3, joint=True),
    "rince": itrloss.RINCELoss(0.3),
}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("name", JOINT)
def test_second_derivatives_where_an_anchor_has_no_negatives(name, engine):
    loss = copy.deepcopy(JOINT[name])
    loss.engine = engine
    matches = torch.tensor([[1.0, 1, 1], [0, 1, 0], [0, 1, 0]], dtype=torch.float64)
    v, w = leaves_of(*embeddings(3, 3, d=4))
    assert gradgradcheck(lambda v, w: loss(v, w, matches=matches), (v, w))


@pytest.mark.parametrize("name", JOINT)
def test_second_derivatives_in_float32_at_a_scale_of_100(name):
    loss = copy.deepcopy(JOINT[name])
    loss.temperature = 0.01
    if name == "rince":
        loss.q = 0.1  # the values of 0.5 are e^50
    for seed in range(20):
        v, w = leaves_of(*(x.float() for x in embeddings(6, 6, d=4, seed=seed)))
        (first,) = torch.autograd.grad(loss(v, w), v, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), v)
        assert second.isfinite().all()


def test_a_gradient_of_the_positives_alone_beside_a_sum_with_parameters():
    found = []
    for engine in ("dense", "tiled"):
        leaves = [x.requires_grad_() for x in embeddings(4, 5)]
        threshold = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        ids = torch.arange(4) % 3, torch.arange(5) % 3
        sim = Similarity(*leaves, *ids, engine=engine)
        sim.sum(hinge, threshold)
        sim.positive_scores().square().sum().backward()
        assert threshold.grad is None
        found.append([x.grad for x in leaves])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected)
