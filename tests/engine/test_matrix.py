"""What a matrix keeps between questions does not alias what it returns or was given."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from support.cases import ENGINES, case, embeddings, similarity

from itrloss import Similarity
from itrloss.engine.matrix import SMALL, is_small
from itrloss.engine.terms import exponential, identity, log1p_relu
from itrloss.metrics import retrieval_metrics

# ------------------------------------------------------------------------ what is returned or given

ASKED = {
    "logsumexp": lambda sim: sim.both.logsumexp(3.0),
    "sum": lambda sim: sim.both.sum(log1p_relu),
    "entropy": lambda sim: sim.both.entropy(),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("engine", ENGINES)
def test_answers_may_be_written_to(engine, name):
    v, w = (x.requires_grad_() for x in embeddings(6, 6))
    sim = similarity(v, w, (None, None), engine)
    twice_the_rows = torch.tensor([2.0] * 6 + [1.0] * 6, dtype=v.dtype)
    answer = ASKED[name]
    values = answer(sim)
    wanted = torch.autograd.grad(values, v, twice_the_rows, retain_graph=True)
    written = answer(sim)
    written[:6].mul_(2)
    found = torch.autograd.grad(written.sum(), v)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("view", ["rows", "both"])
@pytest.mark.parametrize("engine", ENGINES)
def test_hardest_negatives_may_be_written_to(engine, view):
    v, w = (x.requires_grad_() for x in embeddings(6, 6))
    sim = similarity(v, w, (None, None), engine)
    wanted = sim.hardest_negatives().values.detach().clone()
    anchors = sim if view == "rows" else sim.both
    best = anchors.hardest_negatives().values
    total = best[:6].sum()
    gradient = torch.autograd.grad(total, v, retain_graph=True)
    best.mul_(3)
    third = best[:6].sum() / 3
    again = torch.autograd.grad(third, v)
    torch.testing.assert_close(again, gradient)
    best.detach().zero_()
    asked_again = sim.hardest_negatives().values
    torch.testing.assert_close(asked_again, wanted)


# Answers without a gradient, of the same pairs or not.
HELD = {
    "sum of positives": lambda sim: sim.sum_of_positives(identity),
    "mean": lambda sim: sim.mean_std().mean,
    "scores of positives": lambda sim: sim.positive_scores(),
    "numbers of positives": lambda sim: sim.positive_counts,
    "numbers of negatives": lambda sim: sim.negative_counts,
}


@pytest.mark.parametrize("ids", [(None, None), (torch.arange(6), torch.arange(6) // 2)])
@pytest.mark.parametrize("engine", ENGINES)
def test_answers_without_gradient_may_be_written_to(engine, ids):
    sim = similarity(*embeddings(6, 6), ids, engine)
    for answer in HELD.values():
        before = answer(sim).clone()
        answer(sim).zero_()
        assert torch.equal(answer(sim), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_that_are_handed_out_may_be_written_to(engine):
    """Returned scores must not alias cached ones, for one or several blocks."""
    v, w = embeddings(6, 8)
    v.requires_grad_()
    ids = (torch.arange(6), torch.arange(8) % 6)
    sim = similarity(v, w, ids, engine)
    wanted = sim.logsumexp(3.0).detach()
    with torch.no_grad():
        blocks = [block for _, block in sim.blocks(17)]
        for scores in (sim.scores(), sim.T.scores(), *blocks):
            assert scores.is_contiguous()
            scores.fill_(-9.0)
    sim.scores().mul_(2)
    assert torch.equal(sim.logsumexp(3.0), wanted)
    best = sim.scores().topk(3).values.detach()
    torch.testing.assert_close(sim.topk(3).values, best)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_ids_may_lie_in_a_buffer_that_is_used_again(engine):
    v, w = embeddings(6, 6)
    ids = torch.arange(6) // 2
    wanted = similarity(v, w, (ids, ids), engine).hardest_negatives()
    buffer = ids.clone()
    sim = similarity(v, w, (buffer, buffer), engine)
    buffer.copy_(torch.arange(6))
    found = sim.hardest_negatives()
    assert torch.equal(found.indices, wanted.indices)
    row_ids, col_ids = sim.ids
    assert torch.equal(row_ids, ids)
    assert torch.equal(col_ids, ids)


# ---------------------------------------------------------------------------------- changed inputs

QUESTIONS = {
    "logsumexp": lambda sim: sim.logsumexp(5.0),
    "detached": lambda sim: sim.detach().logsumexp(5.0),
    "metrics": retrieval_metrics,
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_embeddings_changed_meanwhile_are_refused(engine, name, side):
    vectors = embeddings(5, 5)
    sim = similarity(*vectors, (None, None), engine)
    vectors[side].mul_(10)
    with pytest.raises(RuntimeError, match=r"embeddings.*modified in place"):
        QUESTIONS[name](sim)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_scores_changed_meanwhile_are_refused(engine):
    scores = torch.rand(4, 4)
    sim = Similarity.from_scores(scores, engine=engine)
    sim.logsumexp(5.0)
    scores.zero_()
    with pytest.raises(RuntimeError, match=r"scores.*modified in place"):
        sim.sum_of_positives(identity)


@pytest.mark.parametrize("times", [0, 1])  # that embeddings are modified before
def test_a_copy_of_a_similarity_is_checked_by_itself(times):
    images = torch.randn(5, 3)
    for _ in range(times):
        images.add_(1)
    sim = Similarity(images, torch.randn(5, 3))
    copied = copy.deepcopy(sim)
    assert torch.equal(copied.logsumexp(3.0), sim.logsumexp(3.0))
    copied.embeddings[0].add_(1)
    sim.logsumexp(2.0)
    with pytest.raises(RuntimeError, match="modified in place"):
        copied.logsumexp(2.0)


@pytest.mark.parametrize(
    ("engine", "asked"),
    [("dense", False), ("dense", True), ("tiled", False), ("kept", False), ("kept", True)],
)
def test_cosines_stay_cosines_after_changes_that_nobody_counts(engine, asked):
    """A fused optimiser's step does not increment the version: old lengths must not be used with
    new embeddings.
    """
    v, w = embeddings(6, 6, dtype=torch.float32)
    sim = similarity(v, w, (None, None), engine)
    if asked:
        sim.logsumexp(5.0)
    v.data.mul_(torch.linspace(0.1, 30, 6)[:, None]).add_(0.5)
    cosines = [sim.scores(), sim.sum_of_positives(identity), sim.hardest_negatives().values]
    for view in (sim, sim.T):
        cosines += [block for _, block in view.blocks()]
    for x in cosines:
        assert x.abs().max() <= 1 + 1e-6
    of_five_equal_ones = 5 + math.log(5)
    assert (sim.both.logsumexp(5.0) <= of_five_equal_ones + 1e-5).all()


def test_a_gradient_found_early_is_of_the_vectors_that_were_multiplied():
    """Vectors and lengths were both computed before the change, which did not increment the
    version.
    """
    v, w = embeddings(6, 6, dtype=torch.float32)
    v.requires_grad_()
    sim = similarity(v, w, (None, None), "kept")
    total = sim.logsumexp(5.0).sum()
    wanted = torch.autograd.grad(total, v, retain_graph=True)
    v.data.mul_(20).add_(1.0)
    total = sim.logsumexp(5.0).sum()
    found = torch.autograd.grad(total, v)
    torch.testing.assert_close(found, wanted)


# ------------------------------------------------------------------------------------------ copies

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda sim: pickle.loads(pickle.dumps(sim)),
}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
@pytest.mark.parametrize("way", COPIES)
def test_a_similarity_is_copied_and_stored(engine, way, asked):
    def answers(sim):
        return [sim.both.logsumexp(3.0), sim.ranks(), sim.T.hardest_negatives().indices]

    v, w, ids, _ = case((6, 6, "random"))
    wanted = answers(similarity(v, w, ids, engine))
    sim = similarity(v, w, ids, engine)
    if asked:
        answers(sim)
        sim.sum_of_positives(identity)
    twin = COPIES[way](sim)
    torch.testing.assert_close(answers(twin), wanted, rtol=0, atol=0)
    assert repr(twin) == repr(sim)
    assert torch.equal(twin.ids[1], ids[1])


# ------------------------------------------------------------------------------------------ biases


@pytest.mark.parametrize("trained", [(True, True), (False, True)])
def test_second_derivatives_of_biased_scores(trained):
    vectors = [x.double() for x in embeddings(4, 5)]
    found = []
    for engine in ("dense", "tiled"):
        leaves = [x.clone().requires_grad_(trained[0]) for x in vectors]
        biases = [torch.linspace(0, 1, n, dtype=torch.float64).requires_grad_() for n in (4, 5)]
        ids = torch.arange(4) % 3, torch.arange(5) % 3
        sim = Similarity(*leaves, *ids, bias=tuple(biases), engine=engine)
        own = [x for x in (*leaves, *biases) if x.requires_grad]
        first = torch.autograd.grad(sim.both.logsumexp(3.0).square().sum(), own, create_graph=True)
        total = sum(x.square().sum() for x in first)
        found.append([*first, *torch.autograd.grad(total, own)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected)


def test_biases_changed_meanwhile_are_refused():
    biases = torch.zeros(5, dtype=torch.float64), None
    sim = Similarity(*embeddings(5, 5), bias=biases, engine="tiled")
    sim.logsumexp(1.0)
    biases[0].add_(1.0)
    with pytest.raises(RuntimeError, match=r"biases.*modified in place"):
        sim.logsumexp(1.0)


def test_biases_without_a_gradient_and_of_inference_mode():
    trained = torch.zeros(5, requires_grad=True)
    with torch.no_grad():
        sim = Similarity(*embeddings(5, 5), bias=(trained, None), engine="tiled")
    assert not sim.logsumexp(1.0).requires_grad
    with torch.inference_mode():
        made = torch.ones(5)
    rows, cols = embeddings(5, 5)
    sim = Similarity(rows.requires_grad_(), cols, bias=(made, None), engine="tiled")
    sim.logsumexp(1.0).sum().backward()


def test_a_similarity_that_was_asked_before_compiles():
    ids = torch.arange(300) // 2
    sim = Similarity(*embeddings(300, 300), ids, ids.clone(), engine="tiled")
    before = sim.sum(exponential, scale=0.5)
    ask = torch.compile(partial(sim.sum, exponential, scale=0.5), fullgraph=True, backend="eager")
    torch.testing.assert_close(ask(), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_of_pairs_may_be_written_to(engine):
    sim = similarity(*embeddings(6, 6), (None, None), engine)
    for name in ("positive_counts", "negative_counts"):
        expected = getattr(sim.both, name).clone()
        getattr(sim.both, name).zero_()
        assert torch.equal(getattr(sim.both, name), expected)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_scores_are_kept_up_to_a_block_and_the_budget(dtype: torch.dtype, size: int):
    budget = size * SMALL
    assert is_small("tiled", SMALL, budget, dtype)
    assert not is_small("tiled", SMALL + 1, 2 * budget, dtype)
    assert not is_small("tiled", SMALL, budget - 1, dtype)
    assert not is_small("triton", SMALL, budget, dtype)
    assert is_small("dense", 2 * SMALL, 0, dtype)
