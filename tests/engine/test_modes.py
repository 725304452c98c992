"""Inference mode, no_grad and threads."""

from __future__ import annotations

import threading

import pytest
import torch
from support.cases import ENGINES, case, embeddings, finite, similarity

import itrloss
from itrloss.engine.terms import identity, log1p_clamp

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


@pytest.mark.parametrize("engine", ENGINES)
def test_embeddings_of_inference_mode_are_answered(engine):
    with torch.inference_mode():
        v, w, ids, _ = case((5, 7, "random"))
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    sim = similarity(v, w, ids, engine)
    finite(sim.logsumexp(scale)).sum().backward()
    assert scale.grad.isfinite()
    assert sim.mean_std().std.isfinite().all()
