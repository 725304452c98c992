"""`Similarity` and terms of users: scores of -inf, and what may be overwritten.

`engine/test_answers.py` compares all answers with a reference, `test_messages.py` has wrong input.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from support.cases import of_engines, sample

import itrloss
from itrloss import Similarity
from itrloss.terms import exponential, softplus

IMAGES, TEXTS = sample(7, 8), sample(9, 8, seed=1)
IDS = torch.arange(7), torch.arange(9) % 7


@of_engines
def test_candidates_of_minus_infinity_are_the_last_and_say_so(engine):
    scores = torch.tensor([[-torch.inf, 0.5, -torch.inf, 1.0]])
    sim = Similarity.from_scores(scores, [0], range(1, 5), engine=engine)
    top = sim.topk(4)
    assert top.values.tolist() == [[1.0, 0.5, -torch.inf, -torch.inf]]
    assert top.indices[0, :2].tolist() == [3, 1]
    assert set(top.indices[0].tolist()) == set(range(4))


def test_ids_of_an_array_that_changes_are_seen():
    """A write through NumPy does not raise the version of a tensor that shares its memory."""
    image_ids = np.array([0, 0, 1, 1, 2, 3, 3])
    text_ids = np.array([0, 1, 1, 2, 2, 3, 3])
    shared = (torch.from_numpy(image_ids), torch.from_numpy(text_ids))
    loss = itrloss.InfoNCELoss()
    loss(IMAGES, TEXTS[:7], *shared)
    image_ids[:] = [6, 5, 4, 3, 2, 1, 0]
    text_ids[:] = [5, 5, 5, 2, 2, 0, 0]
    copies = [ids.clone() for ids in shared]
    wanted = loss(IMAGES, TEXTS[:7], *copies)
    assert torch.equal(loss(IMAGES, TEXTS[:7], *shared), wanted)


# ---------------------------------------------------------------------------------- terms of users


@itrloss.pair_term
def doubled(scores, weight):
    return 2 * weight * scores


def times(factor):
    """Return a term that has the name of one of the library."""

    @itrloss.pair_term
    def exponential(scores):
        return factor * scores

    return exponential


@of_engines
def test_terms_are_told_apart_by_identity_and_not_by_name(engine):
    images = IMAGES.clone().requires_grad_()
    sim = Similarity(images, TEXTS, *IDS, engine=engine)
    once = sim.sum(times(1)).sum()
    twice = sim.sum(times(2)).sum()
    torch.testing.assert_close(twice, 2 * once)
    (of_once,) = torch.autograd.grad(once, images, retain_graph=True)
    (of_twice,) = torch.autograd.grad(twice, images, retain_graph=True)
    torch.testing.assert_close(of_twice, 2 * of_once)
    # the library's own exponential
    positive = IDS[0][:, None] == IDS[1]
    terms = (3 * sim.scores()).exp().masked_fill(positive, 0)
    torch.testing.assert_close(sim.logsumexp(3.0), terms.sum(1).log())


def test_terms_are_pickled_by_name_or_by_value():
    for term in (exponential, softplus):
        assert pickle.loads(pickle.dumps(term)) is term
    local = itrloss.pair_term(torch.nn.functional.softplus)
    again = pickle.loads(pickle.dumps(local))
    torch.testing.assert_close(again(IMAGES), local(IMAGES))


@itrloss.pair_term(slope=lambda z: 3 * z**2)
def cube(scores):
    return scores**3


def test_a_term_with_its_own_slope_has_its_gradient():
    def gradient(term):
        images = IMAGES.clone().requires_grad_()
        sim = Similarity(images, TEXTS, *IDS, engine="tiled")
        value = sim.both.sum(term, scale=2.0, shift=0.3)
        (found,) = torch.autograd.grad(value.sum(), images)
        return found

    torch.testing.assert_close(gradient(cube), gradient(lambda scores: scores**3))


# ------------------------------------------------------------------------- what may be overwritten


def matrices(engine):
    """Return given scores and embeddings, with captions and one to one."""
    return [
        Similarity.from_scores(sample(7, 9).tanh(), *IDS, engine=engine),
        Similarity(IMAGES, TEXTS, *IDS, engine=engine),
        Similarity(IMAGES, TEXTS[:7], engine=engine),
    ]


SUMS = {
    "negatives": lambda sim, *term: sim.sum(*term),
    "all": lambda sim, *term: sim.sum(*term, over="all"),
    "positives": lambda sim, *term: sim.sum_of_positives(*term),
    "total": lambda sim, *term: sim.weighted_sum(*term),
}


@itrloss.pair_term
def overwrites_its_scores(scores, threshold):
    return scores.sub_(threshold).relu_()


def excess(scores, threshold):
    return (scores - threshold).relu()


@pytest.mark.parametrize("engine", ["dense", "tiled", "auto"])
@pytest.mark.parametrize("name", SUMS)
def test_terms_may_overwrite_their_scores(name, engine, small_tiles):
    summed = SUMS[name]
    for sim in matrices(engine):
        before = sim.scores().clone()
        found = summed(sim, overwrites_its_scores, 0.1)
        wanted = summed(sim, excess, 0.1)
        torch.testing.assert_close(found, wanted)
        assert torch.equal(sim.scores(), before)


@itrloss.pair_term
def overwrites_its_weight(scores, weight):
    return weight.mul_(2) * scores


@of_engines
@pytest.mark.parametrize("name", SUMS)
def test_terms_may_overwrite_their_parameters(name, engine, small_tiles):
    summed = SUMS[name]
    for sim in matrices(engine):
        weight = sample(7, seed=2)
        found = summed(sim, overwrites_its_weight, weight)
        assert torch.equal(weight, sample(7, seed=2))
        wanted = summed(sim, doubled, weight)
        torch.testing.assert_close(found, wanted)


@itrloss.pair_term
def overwrites_a_guide(scores, guide):
    return guide.mul_(3) * scores


@of_engines
def test_terms_may_overwrite_the_scores_of_a_guide(engine, small_tiles):
    scores = sample(25, 30).tanh()
    guiding = sample(25, 30, seed=1)
    ids = range(25), range(30)
    sim = Similarity.from_scores(scores, *ids, engine=engine)
    guide = Similarity.from_scores(guiding.clone(), *ids, engine=engine)
    found = sim.sum(overwrites_a_guide, guide=guide, over="all")
    assert torch.equal(guide.scores(), guiding)
    torch.testing.assert_close(found, (3 * guiding * scores).sum(1))


@of_engines
def test_functions_of_pairs_may_work_in_place(engine):
    def value(scores, of_row, of_col):
        return scores.exp_() + of_row.mul_(2) + of_col.mul_(3)

    for sim in matrices(engine):
        n, m = sim.shape
        of_rows = sample(n, seed=3)
        of_cols = sample(m, seed=4)
        first = sim.mean_of_pairs(value, of_rows.clone(), of_cols.clone())
        again = sim.mean_of_pairs(value, of_rows, of_cols)
        assert torch.equal(again, first)
        if sim.one_to_one:
            assert torch.equal(of_rows, sample(n, seed=3))
            assert torch.equal(of_cols, sample(m, seed=4))


def test_margins_of_log1p_sum_exp_may_differ_between_anchors():
    torch.manual_seed(0)
    rows = torch.randn(6, 4, dtype=torch.float64)
    sim = Similarity(rows, torch.randn(6, 4, dtype=torch.float64))
    margins = torch.rand(6, dtype=torch.float64)
    scores = sim.scores().fill_diagonal_(-torch.inf)
    expected = (5 * (scores - margins[:, None])).exp().sum(1).log1p()
    torch.testing.assert_close(sim.log1p_sum_exp(5.0, margins), expected)
