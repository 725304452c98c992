"""Inference mode, no_grad and threads."""

from __future__ import annotations

import threading

import pytest
import torch
from support.cases import ENGINES, case, embeddings, finite, similarity

import itrloss
from itrloss import Similarity
from itrloss.engine.terms import identity, log1p_clamp, softplus
from itrloss.metrics import retrieval_metrics

OF_EMBEDDINGS = ["dense", "tiled", "kept"]


def leaves(n=5, m=5):
    return [x.requires_grad_() for x in embeddings(n, m)]


def total_of(sim, scale=5.0):
    return (sim.both.logsumexp(scale) + sim.both.sum_of_positives(log1p_clamp)).sum()


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_a_thread_that_asks_while_another_goes_backward_gets_its_answer(engine):
    go = threading.Event()
    done = threading.Event()

    @itrloss.pair_term
    def waits_for_a_test(scores):
        go.set()
        done.wait(10)
        return scores.clone()

    v, w = leaves(6, 6)
    sim = similarity(v, w, (None, None), engine)
    total = sim.both.logsumexp(20.0).sum()
    answers = []

    def ask():
        with torch.no_grad():
            answers.append(sim.sum(waits_for_a_test))

    thread = threading.Thread(target=ask)
    thread.start()
    go.wait(10)
    total.backward()
    done.set()
    thread.join()
    wanted = similarity(v, w, (None, None), "reference").sum(identity)
    torch.testing.assert_close(answers, [wanted.detach()])


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_moments_of_both_sides_asked_first_in_inference_mode(engine):
    v, w = leaves()
    wanted = torch.autograd.grad(Similarity(v, w).both.mean_std().std.sum(), v)
    sim = similarity(v, w, (None, None), engine)
    with torch.inference_mode():
        sim.both.mean_std()
    torch.testing.assert_close(torch.autograd.grad(sim.both.mean_std().std.sum(), v), wanted)


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_inference_mode_leaves_the_gradient_to_later_questions(engine):
    v, w = leaves()
    wanted = torch.autograd.grad(total_of(Similarity(v, w)), v)
    sim = similarity(v, w, (None, None), engine)
    with torch.inference_mode():
        sim.scores()
        sim.hardest_negatives()
        sim.sum_of_positives(identity)
        sim.detach().topk(2)
        sim.mean_std()
    torch.testing.assert_close(torch.autograd.grad(total_of(sim), v), wanted)


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_a_similarity_made_without_gradient_has_none(engine):
    with torch.no_grad():
        sim = similarity(*leaves(), (None, None), engine)
    assert not total_of(sim).requires_grad
    assert not sim.hardest_negatives().values.requires_grad


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_in_inference_mode_are_those_of_the_scores(engine):
    v, w, ids, _ = case((6, 7, "random"))
    sim = similarity(v, w, ids, engine)
    with torch.inference_mode():
        for view in (sim, sim.T):
            found = torch.cat([block for _, block in view.blocks(17)])
            torch.testing.assert_close(found, view.scores())


@pytest.mark.parametrize("asked", [False, True], ids=["new", "asked before"])
@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_anchors_asked_first_in_inference_mode(engine, asked):
    """Tensors that they cache must not be inference tensors."""
    v, w, ids, _ = case((6, 5, "random"))
    vectors = [v.requires_grad_(), w.requires_grad_()]

    def gradients(anchors):
        values = anchors.logsumexp(2.0) + anchors.logsumexp(2.0, over="all")
        values = values + anchors.hinge_sum(0.2) + anchors.mean_std().std
        return torch.autograd.grad(finite(values).sum(), vectors)

    both = similarity(v, w, ids, engine).both
    if asked:
        both.logsumexp(1.0)
        both.sum(identity)
    with torch.inference_mode():
        both.hardest_negatives()
        both.mean_std()
        both.sum_of_positives(identity)
        both.logsumexp(2.0, over="all")
    wanted = gradients(similarity(v, w, ids, engine).both)
    torch.testing.assert_close(gradients(both), wanted)


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_a_scale_learns_after_questions_in_inference_mode(engine):
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)

    def gradient(sim):
        positives = sim.sum_of_positives(softplus, scale=scale, shift=1.0)
        return torch.autograd.grad(total_of(sim, scale) + positives.sum(), scale)

    v, w = embeddings(5, 5)
    sim = similarity(v, w, (None, None), engine)
    with torch.inference_mode():
        retrieval_metrics(sim)
        sim.both.logsumexp(2.0)
        sim.sum_of_positives(identity)
    reference = similarity(v, w, (None, None), "reference")
    torch.testing.assert_close(gradient(sim), gradient(reference))


@pytest.mark.parametrize("engine", ENGINES)
def test_embeddings_of_inference_mode_are_answered(engine):
    with torch.inference_mode():
        v, w, ids, _ = case((5, 7, "random"))
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    sim = similarity(v, w, ids, engine)
    finite(sim.logsumexp(scale)).sum().backward()
    assert scale.grad.isfinite()
    assert sim.mean_std().std.isfinite().all()
