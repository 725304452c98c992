"""Limits of the candidates that count, by the own scores or by those of a guide."""

from __future__ import annotations

import math

import pytest
import torch
from support.answers import parameters
from support.cases import (
    ENGINES,
    case,
    embeddings,
    finite,
    make_ids,
    similarity,
    weighted_by_guide,
)
from torch.autograd import gradgradcheck

from itrloss import Anchors, Similarity

GUIDED = {
    "limited": lambda own, p, guide: own.logsumexp(p, below=0.4, above=-0.5, guide=guide),
    "weighted": lambda own, p, guide: own.sum(weighted_by_guide, p, 1.0, guide=guide),
}


@pytest.mark.parametrize("second", ENGINES)
@pytest.mark.parametrize("name", GUIDED)
def test_second_derivatives_beside_a_guide_that_holds_no_scores(name, second):
    ids = make_ids("random", 4, 5, seed=3)
    guide = similarity(*embeddings(4, 5, d=3, seed=5), ids, second).both

    def answer(v, w, p):
        sim = similarity(v, w, ids, "kept")
        values = GUIDED[name](sim.both, p, guide)
        return finite(values)

    v, w = embeddings(4, 5, d=3)
    p = parameters(4, 5)
    leaves = (v.requires_grad_(), w.requires_grad_(), p.requires_grad_())
    first = torch.autograd.grad(answer(*leaves).sum(), leaves)
    again = torch.autograd.grad(answer(*leaves).sum(), leaves, create_graph=True)
    torch.testing.assert_close(again, first)
    assert gradgradcheck(answer, leaves, fast_mode=True)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_scores_that_equal_a_limit_do_not_count(engine, guided, small_tiles):
    v = torch.tensor([[-1.0], [1.0], [2.0]])
    w = torch.arange(-4.0, 5)[:, None]
    ids = make_ids("disjoint", 3, 9)
    sim = similarity(v, w, ids, engine, normalize=False)
    for own, scores in ((sim, v @ w.T), (sim.T, w @ v.T)):
        between = (scores > -1) & (scores < 2)
        counted = (scores / 2).masked_fill(~between, -math.inf)
        guide = own if guided else None
        for size in (1, len(scores)):  # one limit for all anchors, or one of each
            above = torch.full((size,), -1.0)
            below = torch.full((size,), 2.0)
            found = own.logsumexp(0.5, above=above, below=below, guide=guide)
            torch.testing.assert_close(found, counted.logsumexp(1))


def test_a_matrix_that_is_asked_twice_has_two_guides():
    v, w, ids, _ = case((5, 7, "random"))
    sim = Similarity(v, w, *ids)
    other = Similarity(v, w.flip(0), *ids)
    guides = Anchors.together(sim, other)
    twice = Anchors.together(sim, sim)
    found = twice.logsumexp(below=0.1, guide=guides)
    wanted = [sim.logsumexp(below=0.1, guide=guide) for guide in (sim, other)]
    torch.testing.assert_close(found, torch.cat(wanted))


# Questions with a wrong guide, of 5 rows and 7 columns.
OTHER_ANCHORS = "guide: expected the same anchors and candidates"
WRONG = {
    "columns": (lambda sim: sim.logsumexp(below=0.1, guide=sim.T), OTHER_ANCHORS),
    "fewer candidates": (
        lambda sim: sim.logsumexp(below=0.1, guide=Similarity(*embeddings(5, 5))),
        OTHER_ANCHORS,
    ),
    "scores": (
        lambda sim: sim.logsumexp(below=0.1, guide=sim.scores()),
        "guide: expected the same anchors of another Similarity, got Tensor",
    ),
    "no limits": (lambda sim: sim.logsumexp(guide=sim), "guide: expected below or above"),
    "limits of a term with a guide": (
        lambda sim: sim.sum(weighted_by_guide, 1.0, 1.0, below=0.1, guide=sim),
        "guide: expected no limits",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_guide_is_refused(name):
    v, w, ids, _ = case((5, 7, "random"))
    ask, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        ask(Similarity(v, w, *ids))


def test_a_guide_whose_embeddings_were_modified_is_refused():
    v, w, ids, _ = case((5, 7, "random"))
    teacher = v.clone()
    guide = Similarity(teacher, w, *ids)
    sim = Similarity(v, w, *ids)
    teacher.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        sim.logsumexp(below=0.1, guide=guide)
