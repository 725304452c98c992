"""All methods of ``Anchors`` that engines compute, against the float64 reference of the tests."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import answers
from support.answers import ANSWERS, TOTALS, evaluate, evaluate_total, parameters
from support.cases import (
    ENGINES,
    SHAPES,
    each,
    embeddings,
    finite,
    guide_of,
    make_ids,
    pairwise,
    plane,
    returned_for_a_test,
    similarity,
    upstream,
    weighted_by_guide,
)
from support.reference import TERMS, Reference, formula, matches
from torch.autograd import gradcheck, gradgradcheck

import itrloss
from itrloss import Anchors, Similarity
from itrloss.engine import inputs, pairs, ranking, terms
from itrloss.engine.pairs import IGNORE_ID
from itrloss.engine.terms import (
    hinge,
    identity,
    log1p_clamp,
    log1p_relu,
    negative_log_likelihood,
    softplus,
)
from itrloss.metrics import retrieval_metrics


def assert_equal(found, wanted, **options):
    """Compare values and gradients."""
    options = {"rtol": 1e-9, "atol": 1e-9, **options}
    for a, b in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(a, b, **options)


def case(shape):
    n, m, kind = SHAPES[shape]
    return *embeddings(n, m), make_ids(kind, n, m), upstream(n, m)


# Each answer with two of the engines; the first test has all answers of all shapes with all
# engines.
_NUMBERS = range(len(ANSWERS))
TWICE = {
    "name": [*ANSWERS] * 2,
    "engine": [ENGINES[(k + shift) % 4] for shift in (0, 2) for k in _NUMBERS],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_gradients_equal_the_reference(name, shape, small_tiles, poisoned):
    v, w, ids, grads = case(shape)
    wanted = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
    for engine in ENGINES:
        found = evaluate(ANSWERS[name], v, w, ids, engine, grads)
        assert_equal(found, wanted, msg=lambda text, engine=engine: f"{engine}: {text}")


VIEWS = {"rows": lambda s: s, "columns": lambda s: s.T, "both": lambda s: s.both}


@pytest.mark.parametrize(("name", "shape", "view"), pairwise(name=TOTALS, shape=SHAPES, view=VIEWS))
def test_totals_and_their_gradients_equal_the_reference(name, shape, view, small_tiles, poisoned):
    v, w, ids, _ = case(shape)
    wanted = evaluate_total(TOTALS[name], v, w, ids, "reference", VIEWS[view])
    for engine in ENGINES:
        found = evaluate_total(TOTALS[name], v, w, ids, engine, VIEWS[view])
        assert_equal(found, wanted, msg=lambda text, engine=engine: f"{engine}: {text}")


def test_totals_of_several_matrices(small_tiles):
    """Candidates in three matrices, and groups of anchors of two."""
    n, m, _ = SHAPES["wide"]
    (v, w), ids, p = embeddings(n, m), make_ids("random", n, m), parameters(n, m)
    for engine in ENGINES:
        whole = similarity(v, w, ids, engine)
        pooled = Anchors.pooled(*parts(v, w, ids, engine, (4, 5)))
        for name in ("weighted", "shifts of anchors", "mean of hinges", "sum of hinges"):
            torch.testing.assert_close(TOTALS[name](pooled, p[:n]), TOTALS[name](whole, p[:n]))
        other = similarity(w, v, ids[::-1], engine)
        several = TOTALS["shifts of anchors"](Anchors.together(whole, other), p)
        alone = [TOTALS["shifts of anchors"](x, y) for x, y in ((whole, p[:n]), (other, p[n:]))]
        torch.testing.assert_close(several, alone[0] + alone[1])


def test_weights_of_a_total_get_no_gradient_and_are_checked():
    v, w = embeddings(4, 4)
    sim = Similarity(v.requires_grad_(), w)
    weights = torch.rand(4, dtype=v.dtype, requires_grad=True)
    sim.weighted_sum(softplus, weights=weights).backward()
    assert weights.grad is None and v.grad is not None
    with pytest.raises(ValueError, match=r"weights: expected a number or shape \(4,\), got \(3,\)"):
        sim.weighted_sum(softplus, weights=weights[:3])
    with pytest.raises(ValueError, match="over"):
        sim.weighted_sum(softplus, over="some")


@pytest.mark.parametrize(("name", "engine"), each(**TWICE))
def test_both_sides_are_answered_as_each_alone(name, engine, small_tiles):
    n, m, kind = SHAPES["wide"]
    sim = similarity(*embeddings(n, m), make_ids(kind, n, m), engine)
    p = parameters(n, m)
    for view, q in ((sim, p), (sim.T, torch.cat((p[n:], p[:n])))):
        size = view.shape[0]
        alone = [ANSWERS[name](view, q[:size]), ANSWERS[name](view.T, q[size:])]
        together = [
            ANSWERS[name](view.both, q),
            ANSWERS[name](Anchors.together(view, view.T), q),
        ]
        for found in together:
            torch.testing.assert_close(found, torch.cat(alone), rtol=1e-12, atol=1e-12)
        for a, b in zip(view.both.split(together[0]), alone, strict=True):
            assert a.shape == b.shape


# ---------------------------------------------------------------------- anchors of several matrices


def parts(v, w, ids, engine, cuts, **options):
    """Similarities of the rows to consecutive parts of the columns."""
    starts = [0, *cuts]
    return [
        similarity(v, w[a:b], (ids[0], ids[1][a:b]), engine, **options)
        for a, b in zip(starts, [*cuts, len(w)], strict=True)
    ]


@pytest.mark.parametrize(("name", "engine", "of"), each(**TWICE, of=["rows", "rows and columns"]))
def test_candidates_in_blocks_are_answered_as_the_whole_matrix(
    name, engine, of, small_tiles, poisoned
):
    """Anchors are rows whose candidates are split over three matrices, and two such groups."""
    n, m, _ = SHAPES["wide"]
    (v, w), ids, grads = embeddings(n, m), make_ids("random", n, m), upstream(n, 2 * m)
    p = parameters(n, m)[: 2 * n]

    def anchors(v, w, engine, blocks):
        first = (
            Anchors.pooled(*parts(v, w, ids, engine, (4, 5)))
            if blocks
            else similarity(v, w, ids, engine)
        )
        if of == "rows":
            return first
        other = w[:n], v.repeat(2, 1), (ids[1][:n], ids[0].repeat(2))
        second = (
            Anchors.pooled(*parts(*other, engine, (3,))) if blocks else similarity(*other, engine)
        )
        return Anchors.together(first, second)

    results = []
    for blocks in (False, True):
        x, y, q = (t.clone().requires_grad_() for t in (v, w, p))
        asked = anchors(x, y, engine, blocks)
        values = ANSWERS[name](asked, q[: len(asked)])
        grad = torch.cat(grads)[: len(values)]
        found = torch.autograd.grad((finite(values) * grad).sum(), (x, y, q), allow_unused=True)
        results.append(
            (
                [values],
                [
                    torch.zeros_like(t) if g is None else g
                    for g, t in zip(found, (x, y, q), strict=True)
                ],
            )
        )
    assert_equal(*results)


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_of_one_anchor_have_parameters_of_their_own(engine):
    v, w = embeddings(3, 8)
    ids = torch.arange(3), torch.arange(8) % 4
    rows = [similarity(v[i : i + 1], w, (ids[0][i : i + 1], ids[1]), engine) for i in range(3)]
    p = parameters(3, 0)
    for name, answer in ANSWERS.items():
        whole = answer(similarity(v, w, ids, engine), p)
        torch.testing.assert_close(
            answer(Anchors.together(*rows), p), whole, rtol=1e-11, atol=1e-11, msg=name
        )


@pytest.mark.parametrize("engine", ["tiled", "kept"])
def test_sums_that_a_loss_does_not_use_cost_no_pass_over_the_scores(engine, monkeypatch):
    v, w = embeddings(5, 5)
    v.requires_grad_()
    sim = similarity(v, w, (None, None), engine)
    sim.both.logsumexp(5.0)
    monkeypatch.setattr("itrloss.engine.tiled.gradients", None)
    gradient = torch.autograd.grad(sim.sum_of_positives(identity).sum(), v)[0]
    wanted = torch.autograd.grad(torch.nn.functional.cosine_similarity(v, w).sum(), v)[0]
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_scores_and_pairs_have_their_gradient_after_use_without_one(engine):
    v, w = embeddings(5, 5)
    gradients = []
    for first in (False, True):
        x = v.clone().requires_grad_()
        sim = similarity(x, w, (None, None), engine)
        if first:
            with torch.no_grad():
                sim.sum_of_positives(identity), sim.scores()
        value = sim.sum_of_positives(identity).sum() + sim.scores().square().sum()
        gradients.append(torch.autograd.grad(value, x)[0])
    unit = [torch.nn.functional.normalize(y, dim=1) for y in (v.requires_grad_(), w)]
    scores = unit[0] @ unit[1].T
    wanted = torch.autograd.grad(scores.diagonal().sum() + scores.square().sum(), v)[0]
    for gradient in gradients:
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_matrices_without_ids_keep_what_holds_for_each_alone(engine):
    """One positive each, scores within [-1, 1], and one number of anchors do not hold for several
    together.
    """
    none = (None, None)
    (v, w), (x, y) = embeddings(4, 4), embeddings(3, 3, seed=1)
    first, second, other = (
        similarity(v, w, none, engine),
        similarity(v, w.flip(0), none, engine),
        similarity(x, y, none, engine),
    )
    pooled = Anchors.pooled(first, second)
    assert pooled.positive_counts.tolist() == [2, 2, 2, 2]
    sums = first.sum_of_positives(identity) + second.sum_of_positives(identity)
    torch.testing.assert_close(pooled.sum_of_positives(identity), sums)
    both = Anchors.together(first, other)
    values = torch.arange(7.0)
    assert both.reduce(values, "mean") == values[:4].mean() + values[4:].mean()
    std = torch.cat([first.mean_std().std, other.mean_std().std])
    torch.testing.assert_close(both.mean_std().std, std)
    large = Similarity.from_scores(
        first.scores() * 1000, engine=engine if engine in ("dense", "tiled") else "auto"
    )
    wanted = torch.cat([first.logsumexp(1.0), large.logsumexp(1.0)])
    torch.testing.assert_close(Anchors.together(first, large).logsumexp(1.0), wanted)
    assert wanted.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_pooled_anchors_are_counted_and_listed(engine, monkeypatch):
    n, m, _ = SHAPES["wide"]
    (v, w), ids = embeddings(n, m), make_ids("random", n, m)
    sim = similarity(v, w, ids, engine)
    some = parts(v, w[:15], (ids[0], ids[1][:15]), engine, (5, 10))
    pooled = Anchors.pooled(*(part.both for part in some))
    assert len(pooled) == n + 5 and pooled.sizes == [n, 5]
    rows = Anchors.pooled(*parts(v, w, ids, engine, (4,)))
    assert torch.equal(rows.positive_counts, sim.positive_counts)
    assert torch.equal(rows.negative_counts, sim.negative_counts)
    with pytest.raises(ValueError, match="as many anchors"):
        Anchors.pooled(sim, sim.T)
    torch.testing.assert_close(rows.hinge_sum(0.1), sim.hinge_sum(0.1))
    monkeypatch.setattr(pairs.Pairs, "listable", False)
    with pytest.raises(ValueError, match=r"hinge_sum.*one matrix"):
        rows.hinge_sum(0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_hardest_negatives_of_pooled_matrices_are_numbered_in_their_order(engine):
    n, m, _ = SHAPES["wide"]
    (v, w), ids = embeddings(n, m), make_ids("random", n, m)
    wanted = similarity(v, w, ids, engine).hardest_negatives().indices
    for cuts in ((4,), (4, 9)):  # each block has its own offset
        pooled = Anchors.pooled(*parts(v, w, ids, engine, cuts))
        assert torch.equal(pooled.hardest_negatives().indices, wanted)
    first, second = parts(v, w, ids, engine, (4,))  # in one order and in the other
    orders = [Anchors.pooled(first, second), Anchors.pooled(second, first)]
    wanted = torch.cat([x.hardest_negatives().indices for x in orders])
    assert torch.equal(Anchors.together(*orders).hardest_negatives().indices, wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_hardest_negatives_are_numbered_where_a_matrix_has_columns_and_then_pooled_rows(engine):
    (v, w), (_, x) = embeddings(5, 7), embeddings(5, 4, seed=1)
    ids = make_ids("disjoint", 5, 7)
    sim = similarity(v, w, ids, engine)
    pooled = Anchors.pooled(similarity(v, x, (ids[0], ids[1][:4]), engine), sim)
    wanted = torch.cat([sim.T.hardest_negatives().indices, pooled.hardest_negatives().indices])
    found = Anchors.together(sim.T, pooled).hardest_negatives().indices
    assert torch.equal(found, wanted) and int(found.max()) > 6


@pytest.mark.parametrize("engine", ENGINES)
def test_of_equal_negatives_of_pooled_matrices_the_first_is_the_hardest(engine):
    ids = make_ids("disjoint", 3, 4)
    sim = similarity(torch.ones(3, 2), torch.ones(4, 2), ids, engine)
    assert Anchors.pooled(sim, sim).hardest_negatives().indices.tolist() == [0, 0, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_anchors_together_are_split_and_reduced(engine):
    n, m, _ = SHAPES["wide"]
    (v, w), ids = embeddings(n, m), make_ids("random", n, m)
    sim = similarity(v, w, ids, engine)
    three = Anchors.together(sim, sim.T, sim)  # the rows of one matrix twice
    scales = parameters(n, n + m)
    of_rows, of_cols, of_rows_again = scales.split((n, m, n))
    wanted = [sim.logsumexp(of_rows), sim.T.logsumexp(of_cols), sim.logsumexp(of_rows_again)]
    torch.testing.assert_close(three.logsumexp(scales), torch.cat(wanted))
    rows = Anchors.pooled(*parts(v, w, ids, engine, (4,)))
    three = Anchors.together(rows, sim.T, rows)
    assert three.sizes == [n, m, n] and not rows.one_to_one
    values = torch.arange(2.0 * n + m)
    valid = three.valid()
    means = [
        x[ok].mean() if ok.any() else torch.tensor(0.0)
        for x, ok in zip(three.split(values), three.split(valid), strict=True)
    ]
    torch.testing.assert_close(three.reduce(values, "mean"), sum(means))
    torch.testing.assert_close(three.reduce(values, "sum"), values[valid].sum())
    assert [len(x) for x in three.reduce(values, "none")] == [n, m, n]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_columns_may_be_asked_first(engine):
    n, m, kind = SHAPES["wide"]
    (v, w), ids = (x.requires_grad_() for x in embeddings(n, m)), make_ids(kind, n, m)
    grad = torch.linspace(1, 2, n + m, dtype=torch.float64)
    for name in ("logsumexp", "std", "hardest", "log1p", "hinge sum"):
        sim = similarity(v, w, ids, engine)
        rows_first = ANSWERS[name](sim.both, 2.0)
        cols_first = torch.cat(
            ANSWERS[name](similarity(v, w, ids, engine).T.both, 2.0).split((m, n))[::-1]
        )
        grads = [torch.autograd.grad(finite(x) @ grad, (v, w)) for x in (rows_first, cols_first)]
        torch.testing.assert_close(*grads, msg=name)
        torch.testing.assert_close(cols_first, rows_first, msg=name)


def test_positives_of_matrices_of_which_one_cannot_be_listed(monkeypatch):
    """In a captured graph, positives are known without ids, but not with ids, as pairs cannot be
    listed.
    """
    monkeypatch.setattr(pairs.Pairs, "listable", property(lambda self: self.ids[0] is None))
    monkeypatch.setattr(
        pairs.Pairs, "listed", property(lambda self: pytest.fail("pairs were listed"))
    )
    (v, w), ids = embeddings(6, 6), make_ids("random", 6, 6)
    plain, labelled = (similarity(v, w, x, "tiled") for x in ((None, None), ids))
    found = Anchors.together(plain, labelled).sum_of_positives(identity)
    wanted = [
        similarity(v, w, x, "reference").sum_of_positives(identity) for x in ((None, None), ids)
    ]
    torch.testing.assert_close(found, torch.cat(wanted))


# -------------------------------------------------------------------------------------- ignored ids


@pytest.mark.parametrize(("name", "engine"), each(**TWICE))
def test_an_ignored_embedding_takes_part_in_nothing(name, engine, small_tiles, poisoned):
    """The values equal those of the matrix without it; its gradient is 0."""
    n, m = 9, 14
    (v, w), ids, grads = embeddings(n, m), list(make_ids("random", n, m)), upstream(n, m)
    rows, cols = (torch.ones(size, dtype=torch.bool) for size in (n, m))
    rows[[0, 4]], cols[[2, 3, 13]] = False, False
    stay = torch.cat((rows, cols))
    ids = [ids[0].masked_fill(~rows, IGNORE_ID), ids[1].masked_fill(~cols, IGNORE_ID)]
    p = parameters(n, m)

    def outcome(v, w, p, grad, ids, kind):
        v, w, p = (x.clone().requires_grad_() for x in (v, w, p))
        values = ANSWERS[name](similarity(v, w, ids, kind).both, p)
        assert not values.isnan().any()
        found = torch.autograd.grad((finite(values) * grad).sum(), (v, w, p), allow_unused=True)
        return [values], [
            torch.zeros_like(x) if g is None else g for g, x in zip(found, (v, w, p), strict=True)
        ]

    grad = torch.cat(grads)
    (values,), found = outcome(v, w, p, grad.masked_fill(~stay, 0.0), ids, engine)
    if name != "std":  # the standard deviation is at least 1e-6, even without candidates
        assert (finite(values)[~stay] == 0).all()
    kept = [rows, cols, stay]
    assert all((x[~k] == 0).all() for x, k in zip(found, kept, strict=True))
    short = outcome(
        v[rows], w[cols], p[stay], grad[stay], [ids[0][rows], ids[1][cols]], "reference"
    )
    assert_equal(([values[stay]], [x[k] for x, k in zip(found, kept, strict=True)]), short)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_gradients_of_ignored_anchors_are_zero_whatever_comes_from_above(engine, small_tiles):
    v, w = embeddings(5, 6)
    ids = torch.tensor([0, IGNORE_ID, 1, 2, 3]), torch.tensor([0, 1, IGNORE_ID, IGNORE_ID, 2, 3])
    for name, answer in ANSWERS.items():
        x, y = v.clone().requires_grad_(), w.clone().requires_grad_()
        values = finite(answer(similarity(x, y, ids, engine).both, parameters(5, 6)))
        if values.requires_grad:
            values.sum().backward()
            assert (
                x.grad.isfinite().all() and (x.grad[1] == 0).all() and (y.grad[2:4] == 0).all()
            ), name


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_ignored_entries_are_not_counted_ranked_or_named(engine, small_tiles):
    v, w = embeddings(4, 6)
    ids = torch.tensor([0, IGNORE_ID, 1, 2]), torch.tensor([0, 1, IGNORE_ID, IGNORE_ID, 2, 0])
    sim = similarity(v, w, ids, engine)
    assert sim.positive_counts.tolist() == [2, 0, 1, 1] and sim.negative_counts.tolist() == [
        2,
        0,
        3,
        3,
    ]
    assert sim.T.positive_counts.tolist() == [1, 1, 0, 0, 1, 1]
    assert sim.valid().tolist() == [True, False, True, True]
    best = sim.hardest_negatives()
    assert best.indices[1] == -1 and not set(best.indices.tolist()) & {2, 3}
    kept = torch.tensor([0, 1, 4, 5])
    short = similarity(v, w[kept], (ids[0], ids[1][kept]), engine)
    assert torch.equal(sim.ranks(), short.ranks())
    k = sim.topk(4).indices
    assert torch.equal(k, kept[short.topk(4).indices])


# --------------------------------------------------------------------------------------- parameters


def gradients_of_parameters(
    engine, ids, sizes, which, term, shared, dtype=torch.float64, device="cpu"
):
    """Gradients of a term's two parameters, shared or one per anchor, for its sum over
    ``which``.
    """
    n, m = sizes
    v, w = (x.to(device, dtype) for x in embeddings(n, m))
    size = 1 if shared else n + m
    params = [
        torch.linspace(a, 2.0, size, dtype=dtype, device=device).requires_grad_()
        for a in (0.5, 0.7)
    ]
    anchors = similarity(v, w, ids, engine).both
    asked = anchors.sum if which == "negatives" else anchors.sum_of_positives
    if term is softplus:
        sums = asked(term, scale=params[0], shift=params[1])
    else:
        sums = asked(term, *params)
    return torch.autograd.grad((sums * torch.cat(upstream(n, m)).to(sums)).sum(), params)


@pytest.mark.parametrize(
    ("engine", "shape", "term", "which", "shared"),
    pairwise(
        engine=ENGINES,
        shape=SHAPES,
        term=[softplus, negative_log_likelihood, plane],
        which=["positives", "negatives"],
        shared=[True, False],
    ),
)
def test_gradients_of_parameters(engine, shape, term, which, shared, small_tiles):
    n, m, kind = SHAPES[shape]
    given = make_ids(kind, n, m), (n, m), which, term, shared
    found, wanted = (
        gradients_of_parameters(engine, *given),
        gradients_of_parameters("reference", *given),
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", ["wide", "primes"])
@pytest.mark.parametrize("of", ["both", "rows", "rows of a memory"])
def test_one_scale_for_all_gets_its_gradient(engine, shape, of, small_tiles):
    """A memory has no gradient; that of the rows is computed in the forward pass."""
    n, m, kind = SHAPES[shape]
    (v, w), ids = embeddings(n, m), make_ids(kind, n, m)
    results = []
    for kind in (engine, "reference"):
        x, y, a = (
            v.clone().requires_grad_(),
            w.clone(),
            torch.tensor(2.5, dtype=torch.float64, requires_grad=True),
        )
        sim = similarity(x, y if of == "rows of a memory" else y.requires_grad_(), ids, kind)
        anchors = sim.both if of == "both" else sim
        values = torch.stack(
            [anchors.logsumexp(a), anchors.logsumexp(40 * a), anchors.sum(hinge, a / 9)]
        )
        grad = torch.linspace(-1, 2, values.numel()).view_as(values)
        results.append(
            (
                [values],
                torch.autograd.grad(
                    (finite(values) * grad).sum(), [t for t in (x, y, a) if t.requires_grad]
                ),
            )
        )
    assert_equal(*results)


# ----------------------------------------------------------------- aliasing, errors, extreme values


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_may_be_written_to(engine):
    v, w = (x.requires_grad_() for x in embeddings(6, 6))
    sim = similarity(v, w, (None, None), engine)
    for answer in (
        lambda: sim.both.logsumexp(3.0),
        lambda: sim.both.sum(log1p_relu),
        lambda: sim.both.entropy(),
    ):
        weight = torch.arange(12) < 6
        wanted = torch.autograd.grad((answer() * (1 + 1.0 * weight)).sum(), v, retain_graph=True)
        first = answer()
        first[:6].mul_(2)
        torch.testing.assert_close(
            torch.autograd.grad(first.sum(), v, retain_graph=True), wanted, rtol=0, atol=1e-15
        )
    wanted = sim.hardest_negatives().values.detach().clone()
    for best in (sim.hardest_negatives(), sim.both.hardest_negatives()):
        gradient = torch.autograd.grad(best.values[:6].sum(), v, retain_graph=True)
        best.values.mul_(3)
        again = torch.autograd.grad(best.values[:6].sum() / 3, v, retain_graph=True)
        torch.testing.assert_close(again, gradient)
        best.values.detach().zero_()
    torch.testing.assert_close(sim.hardest_negatives().values, wanted)
    with torch.no_grad():
        sim.sum_of_positives(identity).zero_()
        sim.mean_std().mean.zero_()
    assert (sim.sum_of_positives(identity) != 0).all()


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept", "scores"])
def test_scores_that_are_handed_out_may_be_written_to(engine):
    """Returned scores must not alias cached ones, for one or several blocks, as users write to
    them.
    """
    v, w = embeddings(6, 8)
    ids = torch.arange(6), torch.arange(8) % 6
    sim = similarity(v.requires_grad_(), w, ids, engine)
    wanted = sim.logsumexp(3.0).detach()
    with torch.no_grad():
        for matrix in (sim.scores(), sim.T.scores(), *(block for _, block in sim.blocks(17))):
            assert matrix.is_contiguous()
            matrix.fill_(-9.0)
    sim.scores().mul_(2)
    assert torch.equal(sim.logsumexp(3.0), wanted)
    torch.testing.assert_close(sim.topk(3).values, sim.scores().topk(3).values.detach())


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_ids_may_lie_in_a_buffer_that_is_used_again(engine):
    v, w = embeddings(6, 6)
    buffer = torch.arange(6) // 2
    sim, wanted = (similarity(v, w, (ids, ids), engine) for ids in (buffer, buffer.clone()))
    buffer.copy_(torch.arange(6))
    assert torch.equal(sim.hardest_negatives().indices, wanted.hardest_negatives().indices)
    assert sim.ids[0].tolist() == sim.ids[1].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_a_thread_that_asks_while_another_goes_backward_gets_its_answer(engine):
    go, done = threading.Event(), threading.Event()

    @itrloss.pair_term
    def waits_for_a_test(scores):
        go.set()
        done.wait(10)
        return scores.clone()

    v, w = (x.requires_grad_() for x in embeddings(6, 6))
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
    torch.testing.assert_close(
        answers[0], similarity(v, w, (None, None), "reference").sum(identity).detach()
    )


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_a_nan_beside_an_anchor_without_negatives(engine):
    v, w = (x.float() for x in embeddings(5, 5))
    v[2] = math.nan
    v.requires_grad_()
    best = Similarity(
        v, w, torch.tensor([1, 1, 2, 3, 4]), torch.ones(5, dtype=torch.int64), engine=engine
    )
    values = best.hardest_negatives().values
    assert values[:2].tolist() == [-math.inf] * 2 and values[2].isnan()
    (gradient,) = torch.autograd.grad(values[[0, 1, 3]].sum(), v)
    assert (gradient[:2] == 0).all() and gradient[3].any()


OF_THE_LIBRARY = {x.__name__: x for x in vars(terms).values() if isinstance(x, terms.Term)}


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_the_reference_has_every_term_of_the_library(name):
    term = OF_THE_LIBRARY[name]
    scores = torch.linspace(-1.2, 1.2, 25, dtype=torch.float64)
    count = len(inspect.signature(term.value).parameters) - 1
    params = torch.tensor([0.5, 1.5], dtype=torch.float64)[:count]
    assert formula(term) is not term
    torch.testing.assert_close(formula(term)(scores, *params), term(scores, *params))


def test_the_reference_refuses_a_term_of_the_library_without_a_formula(monkeypatch):
    reference = Reference.from_scores(torch.eye(3, dtype=torch.float64))
    reference.sum(hinge, 0.1)
    monkeypatch.delitem(TERMS, "hinge")
    with pytest.raises(LookupError, match="TERMS has no formula of the term 'hinge'"):
        reference.sum(hinge, 0.1)


def test_a_term_does_not_lose_what_it_returns():
    """The sum over a single column must not alias the term's return value, here its parameter."""
    weight = torch.linspace(0.1, 1.0, 5).double()
    for engine in ENGINES:
        sim = similarity(
            *embeddings(5, 1), (torch.tensor([1, 1, 1, 3, 9]), torch.tensor([1])), engine
        )
        found = sim.sum(returned_for_a_test, weight)
        assert torch.equal(weight, torch.linspace(0.1, 1.0, 5).double())
        torch.testing.assert_close(found, weight * torch.tensor([0, 0, 0, 1, 1]))


# ---------------------------------------------------------------------------- tiles, types, layouts


@pytest.mark.parametrize(("name", "engine", "d"), each(**TWICE, d=[6, 40]))
def test_whole_matrix_in_one_tile(name, engine, d):
    for shape in ("primes", "wide"):
        n, m, kind = SHAPES[shape]
        ids, (v, w), grads = make_ids(kind, n, m), embeddings(n, m, d), upstream(n, m)
        wanted = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
        assert_equal(evaluate(ANSWERS[name], v, w, ids, engine, grads), wanted)


def sharp_entropies(shape, best, engine, dtype):
    """Return the entropies, and their gradient, of given scores; engine None: the reference.

    Rounding errors of computed scores would be multiplied by 1 / temperature.
    """
    n, m, kind = SHAPES[shape]
    ids, grad = make_ids(kind, n, m), torch.cat(upstream(n, m))
    v, w = embeddings(n, m)
    scores = torch.nn.functional.normalize(v, dim=1) @ torch.nn.functional.normalize(w, dim=1).T
    if best == "positives":  # similar to a trained model
        scores = scores / 20 + matches(ids, n, m) / 5
    x = scores.float().to(dtype).requires_grad_()
    sim = Reference.from_scores(x, ids)
    if engine is not None:
        sim = Similarity.from_scores(x, *ids, engine=engine)
    value = sim.both.entropy(0.01)
    return value.detach(), *torch.autograd.grad(value @ grad.to(dtype), x)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("best", ["negatives", "positives"])
def test_float32_loses_no_digits_of_a_sharp_entropy(engine, best, small_tiles, poisoned):
    """No more than plain float32 does, over all shapes: in one of them either may be lucky."""
    errors, noises = torch.zeros(2), torch.zeros(2)
    for shape in ("primes", "square with duplicates", "five captions", "wide", "tall"):
        wanted = sharp_entropies(shape, best, None, torch.float64)
        plain = sharp_entropies(shape, best, None, torch.float32)
        found = sharp_entropies(shape, best, engine, torch.float32)
        for k, exact in enumerate(wanted):
            errors[k] += (found[k].double() - exact).norm()
            noises[k] += (plain[k].double() - exact).norm() + 5e-7 * exact.norm()
    assert (errors <= noises).all()


@pytest.mark.parametrize(
    ("name", "engine", "library"),
    each(name=[*ANSWERS] * 2, engine=ENGINES, library=["by_blas", "by_onednn"]),
)
def test_float32_is_as_accurate_as_plain_float32(
    name, engine, library, small_tiles, poisoned, request
):
    request.getfixturevalue(library)
    n, m = 23, 31
    ids, (v, w), grads = make_ids("random", n, m), embeddings(n, m, d=32), upstream(n, m)
    exact = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
    plain = evaluate(ANSWERS[name], v.float(), w.float(), ids, "reference", grads)
    ours = evaluate(ANSWERS[name], v.float(), w.float(), ids, engine, grads)
    for got, floor, wanted in zip(
        (*ours[0], *ours[1]), (*plain[0], *plain[1]), (*exact[0], *exact[1]), strict=True
    ):
        finite = wanted.isfinite()
        assert got.dtype == torch.float32 and torch.equal(got.isfinite(), finite)
        error, noise = ((x.double() - wanted)[finite].norm() for x in (got, floor))
        assert error <= 4 * noise + 2e-6 * wanted[finite].norm() + 1e-7


@pytest.mark.parametrize("name", ANSWERS)
def test_gradcheck(name, monkeypatch):
    """Gradients of plain PyTorch, which the other engines must equal."""
    n, m = 4, 5
    ids, (v, w) = make_ids("random", n, m, seed=3), embeddings(n, m, d=3)
    p, guide = parameters(n, m), guide_of(similarity(v, w, ids, "dense").both)
    # not that of the perturbed inputs
    monkeypatch.setattr(answers, "guide_of", lambda anchors: guide)

    def function(v, w, p):
        return finite(ANSWERS[name](similarity(v, w, ids, "dense").both, p))

    assert gradcheck(
        function, (v.requires_grad_(), w.requires_grad_(), p.requires_grad_()), fast_mode=True
    )


@pytest.mark.parametrize(
    ("engine", "second", "view"),
    pairwise(engine=ENGINES, second=[*ENGINES, "float32"], view=["rows", "cols", "both"]),
)
def test_a_guide_has_embeddings_and_an_engine_of_its_own(engine, second, view, small_tiles):
    n, m, kind = SHAPES["wide"]
    (v, w), ids, teacher = embeddings(n, m), make_ids(kind, n, m), embeddings(n, m, d=3, seed=5)
    leaves = [x.requires_grad_() for x in (v, w)], [x.requires_grad_() for x in teacher]

    def value(kinds):
        guide = [x.float() for x in teacher] if kinds[1] == "float32" else teacher
        kinds = [kinds[0], "tiled" if kinds[1] == "float32" else kinds[1]]
        sims = [similarity(*x, ids, k) for x, k in zip(((v, w), guide), kinds, strict=True)]
        own, other = ({"rows": sim, "cols": sim.T, "both": sim.both}[view] for sim in sims)
        p = parameters(n, m)[: len(own)]
        limited = finite(own.logsumexp(p, below=p / 8, guide=other))
        return limited.sum() + own.sum(weighted_by_guide, p, other.logsumexp(p), guide=other).sum()

    options = {"rtol": 1e-5, "atol": 1e-5} if second == "float32" else {"rtol": 1e-9, "atol": 1e-9}
    found, wanted = (
        torch.autograd.grad(value(x), leaves[0])
        for x in ((engine, second), ("reference", "reference"))
    )
    assert_equal(((), found), ((), wanted), **options)


@pytest.mark.parametrize("second", ENGINES)
@pytest.mark.parametrize("answer", ["limited", "taught"])
def test_second_derivatives_beside_a_guide_that_holds_no_scores(answer, second):
    ids, teacher = make_ids("random", 4, 5, seed=3), embeddings(4, 5, d=3, seed=5)
    guide = similarity(*teacher, ids, second).both

    def function(v, w, p):
        own = similarity(v, w, ids, "kept").both
        if answer == "limited":
            return finite(own.logsumexp(p, below=0.4, above=-0.5, guide=guide))
        return own.sum(weighted_by_guide, p, 1.0, guide=guide)

    inputs = tuple(x.requires_grad_() for x in (*embeddings(4, 5, d=3), parameters(4, 5)))
    first, again = (
        torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=graph)
        for graph in (False, True)
    )
    torch.testing.assert_close(again, first)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_scores_that_equal_a_limit_do_not_count(engine, guided, small_tiles):
    v, w = torch.tensor([[-1.0], [1.0], [2.0]]), torch.arange(-4.0, 5)[:, None]
    ids, scores = (torch.arange(3), torch.arange(9) + 9), v @ w.T
    sim = Similarity.from_scores(scores, *ids)
    if engine != "scores":
        sim = similarity(v, w, ids, engine, normalize=False)
    for own, s in ((sim, scores), (sim.T, scores.T)):
        wanted = (s / 2).masked_fill((s <= -1) | (s >= 2), -math.inf).logsumexp(1)
        for size in (1, len(s)):  # one limit for all anchors, or one of each
            limits = {"above": torch.full((size,), -1.0), "below": torch.full((size,), 2.0)}
            found = own.logsumexp(0.5, **limits, guide=own if guided else None)
            torch.testing.assert_close(found, wanted)


def test_what_a_guide_has_to_be():
    (v, w), ids = embeddings(5, 7), make_ids("random", 5, 7)
    sim = Similarity(v, w, *ids)
    for guide in (sim.T, sim.both, Similarity(v, w[:6], ids[0], ids[1][:6])):
        with pytest.raises(ValueError, match="guide: expected the same anchors and candidates"):
            sim.logsumexp(below=0.1, guide=guide)
    # beside one matrix, another for each of its two uses
    others = Anchors.together(sim, Similarity(v, w.flip(0), *ids))
    twice = Anchors.together(sim, sim).logsumexp(below=0.1, guide=others)
    each = [sim.logsumexp(below=0.1, guide=guide) for guide in others.groups()]
    torch.testing.assert_close(twice, torch.cat(each))
    with pytest.raises(
        TypeError, match="guide: expected the same anchors of another Similarity, got Tensor"
    ):
        sim.logsumexp(below=0.1, guide=sim.scores())
    with pytest.raises(ValueError, match="guide: expected below or above"):
        sim.logsumexp(guide=sim)
    with pytest.raises(ValueError, match="guide: expected no limits"):
        sim.sum(weighted_by_guide, 1.0, 1.0, below=0.1, guide=sim)
    teacher = v.clone()
    other = Similarity(teacher, w, *ids)
    teacher.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        sim.logsumexp(below=0.1, guide=other)


SECOND = [
    "logsumexp per anchor",
    "std",
    "likelihood",
    "entropy",
    "softplus of negatives",
    "hardest",
    "log1p",
]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, engine) for name in SECOND for engine in ("dense", "kept", "auto", "scores")),
        *((name, "tiled") for name in ("hardest", "log1p")),
    ],
)
def test_kept_scores_and_single_pairs_have_second_derivatives(name, engine):
    ids, (v, w) = make_ids("random", 4, 5, seed=3), embeddings(4, 5, d=3)

    def function(v, w, p):
        return finite(ANSWERS[name](similarity(v, w, ids, engine).both, p))

    inputs = (x.requires_grad_() for x in (v, w, parameters(4, 5)))
    assert gradgradcheck(function, tuple(inputs), fast_mode=True)


def test_tiles_that_are_not_kept_refuse_second_derivatives(engine="tiled"):
    v, w = (x.requires_grad_() for x in embeddings(4, 5))
    ids = make_ids("random", 4, 5, seed=3)
    for name in ("logsumexp", "softplus of negatives", "std"):
        values = finite(ANSWERS[name](similarity(v, w, ids, engine).both, parameters(4, 5)))
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(values.sum(), v, create_graph=True)
    # gradients are computed in the forward pass
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(
            similarity(v, w.detach(), ids, engine).logsumexp(3.0).sum(), v, create_graph=True
        )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_hardest_negative_is_found_with_its_index(engine, shape, small_tiles):
    n, m, kind = SHAPES[shape]
    ids, (v, w) = make_ids(kind, n, m), embeddings(n, m)
    found, wanted = (
        similarity(v, w, ids, e).both.hardest_negatives().indices for e in (engine, "reference")
    )
    assert torch.equal(found, wanted)


def test_counts():
    ids = torch.tensor([0, 0, 1, 5]), torch.tensor([0, 1, 1, 2, 0])
    sim = Similarity(*embeddings(4, 5), *ids)
    assert sim.positive_counts.tolist() == [2, 2, 2, 0]
    assert sim.T.positive_counts.tolist() == [2, 1, 1, 0, 2]
    assert sim.negative_counts.tolist() == [3, 3, 3, 5]
    assert sim.both.negative_counts.tolist() == [3, 3, 3, 5, 2, 3, 3, 4, 2]
    assert sim.T.both.positive_counts.tolist() == [2, 1, 1, 0, 2, 2, 2, 2, 0]
    assert len(sim) == 4 and len(sim.both) == 9 and bool(sim)


def test_one_id_may_be_left_out():
    v, w = embeddings(3, 6)
    captions = torch.arange(3).repeat_interleave(2)
    full = Similarity(v, w, torch.arange(3), captions)
    short = Similarity(v, w, col_ids=captions)
    assert torch.equal(full.logsumexp(2.0), short.logsumexp(2.0))
    assert short.ids[0] is None and torch.equal(short.ids[1], captions) and short.T.ids[1] is None
    # ids of one side only, possibly meant for both
    with pytest.raises(ValueError, match="col_ids"):
        Similarity(v, v, torch.tensor([0, 0, 1]))


def test_ids_stay_as_they_were_given():
    """Ids are returned unchanged, even if they only mean that row i matches column i."""
    v, w = embeddings(4, 4)
    given = torch.tensor([7, 3, 9, 1])
    sim = Similarity(v, w, given, given)
    assert sim.one_to_one and torch.equal(sim.ids[0], given) and torch.equal(sim.T.ids[1], given)
    assert Similarity(v, w).ids == (None, None)
    assert not Similarity(v, w, given, given.flip(0)).one_to_one
    for repeated in ([1, 1, 2, 3], [1, 2, 1, 3]):
        ids = torch.tensor(repeated)
        assert not Similarity(v, w, ids, ids).one_to_one


@pytest.mark.parametrize("engine", ENGINES)
def test_transposed_view_answers_for_the_columns(engine, small_tiles):
    ids, (v, w) = make_ids("random", 9, 14), embeddings(9, 14)
    sim, swapped = (similarity(*x, engine) for x in ((v, w, ids), (w, v, ids[::-1])))
    assert sim.T.shape == swapped.shape == (14, 9)
    p = parameters(14, 9)
    for name, answer in ANSWERS.items():
        torch.testing.assert_close(
            answer(sim.T.both, p), answer(swapped.both, p), rtol=1e-9, atol=1e-9, msg=name
        )
    torch.testing.assert_close(sim.T.scores(), swapped.scores())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_detached_similarity_has_no_gradient_and_the_same_answers(engine, biased, small_tiles):
    ids, (v, w) = make_ids("random", 9, 14), embeddings(9, 14)
    bias = None
    if biased:
        bias = tuple(torch.linspace(-0.1, 0.2, size).to(v).requires_grad_() for size in (9, 14))
    sim = similarity(v.requires_grad_(), w.requires_grad_(), ids, engine, bias=bias)
    p = parameters(9, 14)
    for name, answer in ANSWERS.items():
        for detached in (sim.detach().both, sim.both.detach()):
            found = answer(detached, p)
            assert not found.requires_grad
            # With a gradient, a hardest negative is the product of its pair; without one, it is an
            # entry of the tile.
            torch.testing.assert_close(
                found, answer(sim.both, p).detach(), rtol=1e-12, atol=1e-12, msg=name
            )


@pytest.mark.parametrize(
    ("engine", "view", "side"), pairwise(engine=["dense", "tiled", "kept"], view=VIEWS, side=[0, 1])
)
def test_only_the_gradient_that_is_needed_is_computed(engine, view, side, small_tiles, poisoned):
    ids, (v, w), grads = make_ids("random", 9, 14), embeddings(9, 14), torch.cat(upstream(9, 14))
    for name, answer in ANSWERS.items():
        p = parameters(9, 14)
        results = []
        for kind in (engine, "reference"):
            inputs, q = [v.clone(), w.clone()], p.clone().requires_grad_()
            inputs[side].requires_grad_()
            anchors = VIEWS[view](similarity(*inputs, ids, kind))
            values = answer(anchors, q[: len(anchors)])
            (finite(values) * grads[: len(values)]).sum().backward()
            assert inputs[1 - side].grad is None
            results.append((values, inputs[side].grad, q.grad))
        for a, b in zip(*results, strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(
                    a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize("engine", ENGINES)
def test_backward_twice_gives_the_same_gradient(engine, small_tiles):
    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    sim = similarity(v, w, (None, None), engine)
    total = sum(answer(sim.both, parameters(9, 9)).sum() for answer in ANSWERS.values())
    first = torch.autograd.grad(total, (v, w), retain_graph=True)
    second = torch.autograd.grad(total, (v, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_input(engine, small_tiles):
    """With the answers that `TWICE` has for the engine: how inputs are read depends on the
    engine.
    """
    ids, grads = make_ids("random", 9, 14), upstream(9, 14)
    v, w = embeddings(9, 14, d=12)
    # No duplicate embeddings: another rounding would make another one the hardest.
    strided = torch.cat([v, v], 1)[:, ::2], w.repeat_interleave(2, 0).T.contiguous().T[::2]
    plain = tuple(x.contiguous() for x in strided)
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    for name in (name for name, asked in zip(*TWICE.values(), strict=True) if asked == engine):
        a, b = (evaluate(ANSWERS[name], *x, ids, engine, grads) for x in (strided, plain))
        assert_equal(a, b, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_strided_scores(engine, small_tiles):
    ids, (v, w) = make_ids("random", 9, 14), embeddings(9, 14)
    matrix = Similarity(v, w, *ids).scores()
    wide = torch.stack([matrix, matrix], 2).flatten(1)[:, ::2].requires_grad_()
    for name, answer in ANSWERS.items():
        grads = []
        for x in (wide, matrix.clone().requires_grad_()):
            values = answer(Similarity.from_scores(x, *ids, engine=engine).both, parameters(9, 14))
            found = (
                torch.autograd.grad(finite(values).sum(), x)[0]
                if values.requires_grad
                else torch.zeros_like(x)
            )
            grads.append(found)
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_zero_vectors_score_zero_and_get_no_gradient(engine):
    v, w = (x.float() for x in embeddings(6, 6))
    v[2], w[4] = 0, 0
    v.requires_grad_(), w.requires_grad_()
    sim = similarity(v, w, (None, None), engine)
    assert (sim.scores()[2] == 0).all() and (sim.scores()[:, 4] == 0).all()
    for name, answer in ANSWERS.items():
        values = answer(sim.both, parameters(6, 6, torch.float32))
        assert not values.isnan().any() and (values.isfinite().all() or "above" in name), name
        if not values.requires_grad:
            continue
        found = torch.autograd.grad(
            finite(values).sum(), (v, w), retain_graph=True, allow_unused=True
        )
        assert all(x is None or x.isfinite().all() for x in found), name
        assert found[0] is None or (found[0][2] == 0).all(), name


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_what_counts_as_zero(engine):
    v, w = (x.float() for x in embeddings(6, 6, 40))
    v[2] *= 1e-13 / v[2].norm()
    v.requires_grad_()
    sim = similarity(v, w, (None, None), engine)
    assert (sim.scores()[2] == 0).all()
    assert (torch.autograd.grad(sim.logsumexp(3.0).sum(), v)[0][2] == 0).all()


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
@pytest.mark.parametrize("length", [1e-25, 1e-11, 1e-8, 1e17, 1e18])
def test_lengths_do_not_matter_even_extreme_ones(engine, length):
    """Neither squares nor gradients overflow or underflow in float32."""
    v, w = embeddings(5, 5, 64, dtype=torch.float32)
    if length < 1e-12:
        assert similarity(v * length, w, (None, None), engine).scores().abs().max() == 0
        return
    values = []
    for stretch in (1.0, length):
        x, y = (v * stretch).requires_grad_(), (w * stretch).requires_grad_()
        value = similarity(x, y, (None, None), engine).both.logsumexp(5.0)
        if length <= 1e18:  # beyond the documented range
            value = value + similarity(x, y, (None, None), engine).both.sum_of_positives(identity)
        gradient = torch.autograd.grad(value.sum(), (x, y))
        values.append((value, *(g * stretch for g in gradient)))
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_not_normalised(engine, small_tiles):
    ids, (v, w), grads = make_ids("random", 9, 14), embeddings(9, 14), upstream(9, 14)
    for name, answer in ANSWERS.items():
        results = [
            evaluate(answer, v, w, ids, e, grads, normalize=False) for e in (engine, "reference")
        ]
        assert_equal(*results, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tiled", "kept"])
def test_tile_size_does_not_change_the_answer(engine, monkeypatch):
    ids, (v, w), grads = make_ids("random", 4, 9), embeddings(4, 9), upstream(4, 9)
    for answer in ANSWERS.values():
        seen = []
        for tile in ((2**20, 2048), (1, 1), (24, 8), (12, 3)):
            monkeypatch.setitem(inputs.TILE, "cpu", tile)
            seen.append(evaluate(answer, v, w, ids, engine, grads))
        for other in seen[1:]:
            assert_equal(other, seen[0])


OF_POSITIVES = [
    "positives",
    "mean of positives",
    "positives and likelihood",
    "log1p",
    "log1p relu",
    "logsumexp of positives per anchor",
    "softplus of one number each",
    "std",
    "entropy",
]


@pytest.mark.parametrize(
    ("name", "engine", "kind", "biased"),
    pairwise(
        name=OF_POSITIVES,
        engine=ENGINES,
        kind=["random", "same", "ignored", "disjoint"],
        biased=[False, True],
    ),
)
def test_many_positives_are_not_listed(name, engine, kind, biased, monkeypatch):
    """Their plain scores are summed by class, and terms of them like those of negatives."""
    monkeypatch.setattr(pairs, "FEW", -1)
    monkeypatch.setattr(
        pairs.Pairs, "listed", property(lambda self: pytest.fail("pairs were listed"))
    )
    n, m = 7, 12
    (v, w), grads = embeddings(n, m), upstream(n, m)
    ids = make_ids("random" if kind == "ignored" else kind, n, m)
    wanted_of = "reference"
    if kind == "ignored":  # for the reference, ignored entries would be negatives of the others
        ids[0][2] = ids[1][5] = ids[1][6] = IGNORE_ID
        wanted_of = "dense"
    options = {}
    if biased and engine != "scores":
        options["bias"] = torch.linspace(-1, 1, n).double(), torch.linspace(0.5, -1, m).double()
    found = evaluate(ANSWERS[name], v, w, ids, engine, grads, **options)
    assert_equal(found, evaluate(ANSWERS[name], v, w, ids, wanted_of, grads, **options))


def test_sums_by_class_have_second_derivatives(monkeypatch):
    monkeypatch.setattr(pairs, "FEW", -1)
    v, w = (x.requires_grad_() for x in embeddings(4, 5, 3))
    ids = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 3, 1, 2])

    def sums(x, y):
        return similarity(x, y, ids, "kept").both.sum_of_positives(identity)

    assert torch.autograd.gradgradcheck(sums, (v, w))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kind"),
    each(engine=["tiled", "kept"], kind=["random", "captions", "same", "ignored"]),
)
def test_masks_and_pair_lists_agree(engine, kind, monkeypatch):
    """Tiles with few pairs are masked by listing them, others by comparing ids; captured graphs
    never list.
    """
    monkeypatch.setitem(inputs.TILE, "cpu", (60, 10))
    (v, w), grads = embeddings(10, 40), upstream(10, 40)
    ids = make_ids("captions" if kind == "ignored" else kind, 10, 40)
    if kind == "ignored":
        ids = (
            ids[0].masked_fill(ids[0] == 3, IGNORE_ID),
            ids[1].masked_fill(ids[1] % 4 == 1, IGNORE_ID),
        )
    for answer in ANSWERS.values():
        wanted = evaluate(answer, v, w, ids, engine, grads)
        with monkeypatch.context() as patch:
            patch.setattr(pairs.Pairs, "listable", False)
            assert_equal(evaluate(answer, v, w, ids, engine, grads), wanted)


@pytest.mark.parametrize("ignored", [False, True])
def test_few_pairs_of_a_tile_are_listed(ignored, monkeypatch):
    """With few pairs, the mask writes to their positions. Tiles differ in width; some pairs are at
    their edges.
    """
    monkeypatch.setitem(inputs.TILE, "cpu", (300, 40))
    (v, w), grads = embeddings(40, 100), upstream(40, 100)
    ids = torch.arange(40), torch.arange(100).roll(33)
    if ignored:
        ids = (
            ids[0].masked_fill(ids[0] % 9 == 3, IGNORE_ID),
            ids[1].masked_fill(ids[1] % 9 == 5, IGNORE_ID),
        )
    for name in ("logsumexp", "logsumexp per anchor", "mean", "hardest"):
        wanted = evaluate(ANSWERS[name], v, w, ids, "dense", grads)
        assert_equal(evaluate(ANSWERS[name], v, w, ids, "tiled", grads), wanted)


@pytest.mark.parametrize(
    ("engine", "side", "scale"),
    pairwise(
        engine=["dense", "tiled", "kept"], side=["row", "column"], scale=[100.0, "per anchor"]
    ),
)
def test_anchors_far_from_all_their_negatives_do_not_underflow(engine, side, scale, small_tiles):
    """One anchor's best score is near -1, the others' near 1, so that a single maximum for all is
    not enough.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, 16, generator=generator) + 0.01 * torch.randn(12, 16, generator=generator)
    w = v + 0.01 * torch.randn(12, 16, generator=generator)
    (v if side == "row" else w)[3] *= -1  # opposite to everything else
    sims = []
    for dtype, kind in ((torch.float64, "reference"), (torch.float32, engine)):
        x, y = (z.to(dtype).requires_grad_() for z in (v, w))
        a = (
            scale
            if isinstance(scale, float)
            else torch.linspace(70, 150, 12, dtype=dtype).repeat(2)
        )
        values = similarity(x, y, (None, None), kind).both.logsumexp(a)
        weight = torch.linspace(-1, 1, 12).repeat(2)
        sims.append((values, *torch.autograd.grad((values * weight).sum(), (x, y))))
    for got, wanted in zip(sims[1], sims[0], strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, wanted.float(), rtol=3e-4, atol=3e-3)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_positives_far_off_do_not_underflow_beside_no_negatives(engine):
    v, ids = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([7, 7])
    found = similarity(v, -v, (ids, ids), engine).logsumexp(150.0, over="all")
    torch.testing.assert_close(found, torch.full((2,), math.log(2) - 150))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scale_at_which_sums_vanish_is_worked_out_with_maxima(engine):
    """With cos = -1 throughout, exp(-90 - 30) underflows float32's normal numbers."""
    v = torch.eye(4)[:1]
    x, w = v.clone().requires_grad_(), -v.expand(8, 4).contiguous()
    for scale in (90.0, 150.0):
        found = similarity(x, w, (torch.tensor([0]), torch.arange(8) + 10), engine).logsumexp(scale)
        torch.testing.assert_close(found, torch.tensor([-scale]) + torch.log(torch.tensor(8.0)))
        assert torch.autograd.grad(found.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("answer", ["logsumexp", "hardest_negatives"])
def test_an_answer_without_gradient_leaves_the_others_theirs(engine, answer):
    v, w = (x.requires_grad_() for x in embeddings(7, 7))
    sim = similarity(v, w, (None, None), engine)
    with torch.no_grad():
        getattr(sim.both, answer)()
    found, wanted = (
        torch.autograd.grad((s.sum_of_positives(identity) + s.logsumexp(2.0)).sum(), (v, w))
        for s in (sim, similarity(v, w, (None, None), "reference"))
    )
    torch.testing.assert_close(found, wanted)


def test_auto_visits_tiles_from_a_size_on():
    ids = torch.arange(300), torch.arange(300) % 300
    v, w = embeddings(300, 300, dtype=torch.float32)
    assert Similarity(v[:256], w[:256]).engine == "dense"
    assert Similarity(v, w, *ids).engine == "tiled" == Similarity(v.double(), w.double()).engine
    assert Similarity.from_scores(torch.rand(300, 300)).engine == "tiled"
    assert "tiled" in repr(Similarity(v, w, *ids, engine="tiled"))


def test_logsumexp_of_no_negatives_is_minus_infinity():
    ids = torch.tensor([1, 1, 2]), torch.tensor([1, 1])
    for engine in ENGINES:
        for scale in (2.0, 200.0):
            rows = similarity(*embeddings(3, 2), ids, engine).logsumexp(scale)
            assert rows[:2].tolist() == [-math.inf] * 2 and rows[2].isfinite()


@given(
    st.sampled_from([(3, 128), (128, 3), (130, 257), (300, 129), (64, 1029)]), st.integers(0, 10**6)
)
@settings(deadline=None, max_examples=20)
def test_best_negative_of_long_rows_and_columns(shape, seed):
    """Long axes are searched in runs of 64; the last run is ragged. Some scores tie."""
    n, m = shape
    matrix = torch.rand(n, m, generator=torch.Generator().manual_seed(seed)).mul(10_000).round()
    ids = make_ids("random", n, m, seed)
    sim, wanted = (
        similarity_of(matrix, ids, kind).both.hardest_negatives() for kind in ("tiled", "reference")
    )
    assert torch.equal(sim.values, wanted.values)
    for own, index, best in zip(
        (matrix, matrix.T), sim.indices.split((n, m)), wanted.values.split((n, m)), strict=True
    ):
        assert torch.equal(index >= 0, best.isfinite())
        assert torch.equal(
            own.gather(1, index.clamp_min(0)[:, None]).squeeze(1)[index >= 0], best[index >= 0]
        )


def similarity_of(matrix, ids, engine):
    """Similarity with a given matrix."""
    from support.reference import Reference

    return (
        Reference.from_scores(matrix, ids)
        if engine == "reference"
        else Similarity.from_scores(matrix, *ids, engine=engine)
    )


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("given_as", ["scores", "embeddings"])
def test_positives_far_off_and_first_cost_the_moments_no_digits(engine, given_as):
    ids = torch.arange(512) // 64
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 512, generator=generator, dtype=torch.float64) * 0.01
    matrix[ids[:, None] == ids] += 10
    side = torch.eye(512, dtype=torch.float64)
    sims = []
    for dtype, kind in ((torch.float32, engine), (torch.float64, "dense")):
        if given_as == "scores":
            sims.append(Similarity.from_scores(matrix.to(dtype), ids, ids, engine=kind))
        else:
            sims.append(
                Similarity(matrix.to(dtype), side.to(dtype), ids, ids, engine=kind, normalize=False)
            )
    found, exact = (sim.both.mean_std() for sim in sims)
    torch.testing.assert_close(found.std.double(), exact.std, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_a_large_bias_costs_the_moments_no_digits(engine):
    generator = torch.Generator().manual_seed(0)
    v, w = (torch.randn(40, 8, generator=generator) for _ in range(2))
    bias = torch.full((40,), 300.0), torch.full((40,), 500.0)
    found = similarity(v, w, (None, None), engine, bias=bias).both.mean_std().std
    exact = Similarity(v.double(), w.double(), engine="dense").both.mean_std().std
    torch.testing.assert_close(found.double(), exact, rtol=2e-4, atol=0)


def test_scores_of_minus_infinity_take_a_pair_out():
    matrix = torch.tensor(
        [[0.5, -math.inf, 0.2], [0.0, 1.0, -math.inf], [-math.inf, -math.inf, 0.3]]
    )
    grads = []
    for engine in ("dense", "tiled"):
        s = matrix.clone().requires_grad_()
        sim = Similarity.from_scores(s, engine=engine)
        values = sim.both.logsumexp(20.0)
        assert values[2] == -math.inf and values[4] == -math.inf
        best = sim.hardest_negatives()
        assert best.indices.tolist() == [2, 0, -1] and best.values[2] == -math.inf
        grads.append(torch.autograd.grad(finite(values).sum(), s)[0])
        assert grads[-1].isfinite().all()
    torch.testing.assert_close(*grads)


def test_scores_of_minus_infinity_carry_no_entropy():
    matrix = torch.tensor([[0.5, -math.inf, 0.2], [0.0, 1.0, -0.4], [0.3, -math.inf, 0.3]])
    found, wanted = (
        Similarity.from_scores(matrix, engine=engine).entropy() for engine in ("tiled", "dense")
    )
    assert found.isfinite().all()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [None, "random"])
def test_positives_alone_get_their_gradient_after_an_answer_that_nobody_uses(kind):
    """Their gradient is normally computed together with the other answer's, which has none here."""
    ids, results = make_ids(kind, 9, 9), []
    for engine in ("tiled", "reference"):
        v, w = (x.requires_grad_() for x in embeddings(9, 9))
        anchors = similarity(v, w, ids, engine).both
        anchors.logsumexp(3.0)
        values = anchors.sum_of_positives(log1p_clamp)
        results.append(
            ([values], torch.autograd.grad((values * torch.cat(upstream(9, 9))).sum(), (v, w)))
        )
    assert_equal(*results)


# ------------------------------------------------------------------------------------ state, copies


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_embeddings_changed_meanwhile_are_refused(engine):
    for change in (0, 1):
        inputs = list(embeddings(5, 5))
        sim = similarity(*inputs, (None, None), engine)
        inputs[change].mul_(10)
        for question in (
            lambda s: s.logsumexp(5.0),
            lambda s: s.detach().logsumexp(5.0),
            retrieval_metrics,
        ):
            with pytest.raises(RuntimeError, match=r"embeddings.*modified in place"):
                question(sim)
    matrix = torch.rand(4, 4)
    sim = Similarity.from_scores(matrix, engine="dense" if engine == "dense" else "tiled")
    sim.logsumexp(5.0)
    matrix.zero_()
    with pytest.raises(RuntimeError, match=r"scores.*modified in place"):
        sim.sum_of_positives(identity)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
@pytest.mark.parametrize("asked", [False, True])
def test_cosines_stay_cosines_after_changes_that_nobody_counts(engine, asked):
    """A fused optimiser's step does not increment the version: old lengths must not be used with
    new embeddings.
    """
    v, w = (x.float() for x in embeddings(6, 6))
    sim = similarity(v, w, (None, None), engine)
    if asked:
        sim.logsumexp(5.0)
    v.data.mul_(torch.linspace(0.1, 30, 6)[:, None]).add_(0.5)
    assert sim.scores().abs().max() <= 1 + 1e-6
    assert sim.sum_of_positives(identity).abs().max() <= 1 + 1e-6
    assert sim.hardest_negatives().values.abs().max() <= 1 + 1e-6
    assert (sim.both.logsumexp(5.0) <= 5 + math.log(5) + 1e-5).all()
    assert all(block.abs().max() <= 1 + 1e-6 for view in (sim, sim.T) for _, block in view.blocks())


def test_a_gradient_found_early_is_of_the_vectors_that_were_multiplied():
    """Vectors and lengths were both computed before the change, which did not increment the
    version.
    """
    v, w = (x.float() for x in embeddings(6, 6))
    v.requires_grad_()
    sim = similarity(v, w, (None, None), "kept")
    wanted = torch.autograd.grad(sim.logsumexp(5.0).sum(), v, retain_graph=True)
    v.data.mul_(20).add_(1.0)
    torch.testing.assert_close(torch.autograd.grad(sim.logsumexp(5.0).sum(), v), wanted)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_what_exists_on_neither_side_is_no_pair(engine):
    """Ids that are equal and unique, apart from an ignored one, are not the same as no ids at
    all.
    """
    ids = torch.tensor([0, IGNORE_ID, 2])
    sim = similarity(*embeddings(3, 3), (ids, ids), engine)
    assert sim.positive_counts.tolist() == sim.negative_counts.tolist() == [1, 0, 1]
    assert sim.both.logsumexp(2.0).isfinite().tolist() == [True, False, True] * 2


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_an_infinite_score_of_a_positive_is_no_matter_to_the_negatives(engine):
    scores = torch.rand(4, 4, dtype=torch.float64)
    found, wanted = (
        Similarity.from_scores(scores.fill_diagonal_(value), engine=engine).both.mean_std()
        for value in (math.inf, 0.5)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_both_sides_asked_first_in_inference_mode(engine):
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    wanted = torch.autograd.grad(Similarity(v, w).both.mean_std().std.sum(), v)
    sim = similarity(v, w, (None, None), engine)
    with torch.inference_mode():
        sim.both.mean_std()
    torch.testing.assert_close(torch.autograd.grad(sim.both.mean_std().std.sum(), v), wanted)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_no_grad_and_inference_mode_leave_the_gradient_to_others(engine):
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    wanted = torch.autograd.grad(total_of(Similarity(v, w)), v)
    sim = similarity(v, w, (None, None), engine)
    with torch.inference_mode():
        (
            sim.scores(),
            sim.hardest_negatives(),
            sim.sum_of_positives(identity),
            sim.detach().topk(2),
            sim.mean_std(),
        )
    torch.testing.assert_close(torch.autograd.grad(total_of(sim), v), wanted)
    with torch.no_grad():
        sim = similarity(v, w, (None, None), engine)
    assert not total_of(sim).requires_grad and not sim.hardest_negatives().values.requires_grad


@pytest.mark.parametrize("engine", ["dense", "kept"])
def test_gradients_are_of_what_was_scored_before_changes_that_nobody_counts(engine):
    v, w = (x.requires_grad_() for x in embeddings(6, 6))
    wanted = torch.autograd.grad(total_of(similarity(v, w, (None, None), engine)), (v, w))
    sim = similarity(v, w, (None, None), engine)
    sim.sum_of_positives(identity)
    v.data.mul_(20), w.data.mul_(0.1)
    torch.testing.assert_close(torch.autograd.grad(total_of(sim), (v, w)), wanted)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept", "scores"])
def test_blocks_in_inference_mode_are_those_of_the_scores(engine):
    sim = similarity(*embeddings(6, 7), make_ids("random", 6, 7), engine)
    with torch.inference_mode():
        for view in (sim, sim.T):
            found = torch.cat([block for _, block in view.blocks(17)])
            torch.testing.assert_close(found, view.scores())


@pytest.mark.parametrize("asked", [False, True], ids=["new", "asked before"])
@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_anchors_asked_first_in_inference_mode(engine, asked):
    """Tensors that they cache must not be inference tensors."""
    v, w = (x.requires_grad_() for x in embeddings(6, 5))
    sim = similarity(v, w, make_ids("random", 6, 5), engine)
    both, other = sim.both, sim.both
    if asked:
        sim.logsumexp(1.0), both.sum(identity)
    with torch.inference_mode():
        (
            both.hardest_negatives(),
            both.mean_std(),
            both.sum_of_positives(identity),
            both.logsumexp(2.0, over="all"),
        )
    answers = [
        finite(
            x.logsumexp(2.0) + x.logsumexp(2.0, over="all") + x.hinge_sum(0.2) + x.mean_std().std
        ).sum()
        for x in (both, other)
    ]
    torch.testing.assert_close(
        *(torch.autograd.grad(x, (v, w), retain_graph=True) for x in answers)
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_only_one_side_has_what_does_not_exist(engine):
    (v, w), ids = embeddings(5, 5), (torch.arange(5), torch.arange(5))
    for k in (0, 1):
        own = [x.clone() for x in ids]
        own[k][3] = IGNORE_ID
        sim = similarity(v, w, own, engine).both
        there = torch.ones(10, dtype=torch.bool).index_fill(0, torch.tensor([5 * k + 3]), False)
        cut = [x[torch.arange(5) != 3] if side == k else x for side, x in enumerate((v, w))]
        whole = [x[torch.arange(5) != 3] if side == k else x for side, x in enumerate(ids)]
        wanted = similarity(*cut, whole, "reference").both
        for question in (lambda a: a.logsumexp(5.0, over="all"), lambda a: a.entropy(0.05)):
            torch.testing.assert_close(question(sim)[there], question(wanted))


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_a_scale_learns_beside_columns_that_do_not(engine):
    v, w = embeddings(5, 7)
    ids = make_ids("random", 5, 7)
    for scale in (torch.tensor(3.0), torch.tensor([3.0]), torch.linspace(2, 4, 5)):
        grads = []
        for kind in (engine, "reference"):
            a, x = scale.double().requires_grad_(), v.clone().requires_grad_()
            values = similarity(x, w, ids, kind).logsumexp(a)
            grads.append(torch.autograd.grad(finite(values).sum(), (x, a)))
        torch.testing.assert_close(*grads)


def test_detached_scores_may_still_be_of_any_size():
    sim = Similarity.from_scores(torch.full((3, 3), 200.0))
    torch.testing.assert_close(sim.detach().logsumexp(1.0), torch.full((3,), 200 + math.log(2)))


@pytest.mark.parametrize("name", ["hardest", "hinge sum"])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_what_is_held_for_many_positives_is_no_copy_of_each(name, engine):
    """2048 pairs save 64 numbers each, not copies of their embeddings."""
    v, w = (x.float().requires_grad_() for x in embeddings(64, 64, 64))
    ids, saved = torch.arange(64) % 2, {}
    both = similarity(v, w, (ids, ids), engine).both

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = (
            both.sum_of_positives(hinge, ANSWERS["hardest"](both, 0.0))
            if name == "hardest"
            else both.hinge_sum(0.1)
        )
    assert value.requires_grad and max(saved.values()) < 2048 * 64 * 4


def total_of(sim, scale=5.0):
    return (sim.both.logsumexp(scale) + sim.both.sum_of_positives(log1p_clamp)).sum()


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_asked_first_in_inference_mode_and_then_with_a_scale_that_learns(engine):
    v, w = embeddings(5, 5)
    sim = similarity(v, w, (None, None), engine)
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        retrieval_metrics(sim)
        sim.both.logsumexp(2.0), sim.sum_of_positives(identity)
    found = total_of(sim, scale) + sim.sum_of_positives(softplus, scale=scale, shift=1.0).sum()
    other = similarity(v, w, (None, None), "reference")
    wanted = total_of(other, scale) + other.sum_of_positives(softplus, scale=scale, shift=1.0).sum()
    torch.testing.assert_close(
        torch.autograd.grad(found, scale), torch.autograd.grad(wanted, scale)
    )


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_similarity_is_copied_and_stored(engine, way):
    v, w = embeddings(6, 6)
    ids = make_ids("random", 6, 6)
    sim = similarity(v, w, ids, engine)
    wanted = sim.both.logsumexp(3.0), sim.ranks(), sim.T.hardest_negatives().indices
    sim.sum_of_positives(identity)
    for view in (sim, similarity(v, w, ids, engine)):
        twin = way(view)
        found = twin.both.logsumexp(3.0), twin.ranks(), twin.T.hardest_negatives().indices
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert repr(twin) == repr(view) and torch.equal(twin.ids[1], ids[1])
    v.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        sim.logsumexp(3.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_embeddings_of_inference_mode_are_answered(engine):
    with torch.inference_mode():
        v, w = (x.clone() for x in embeddings(5, 7))
        ids = torch.arange(5), torch.arange(7) % 5
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    sim = similarity(v, w, ids, engine)
    sim.logsumexp(scale).sum().backward()
    assert scale.grad is not None and sim.mean_std().std.isfinite().all()


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.both.logsumexp(torch.ones(8)), ValueError, r"scale.*\(13,\).*\(8,\)"),
        (lambda s: s.T.logsumexp(torch.ones(8)), ValueError, r"scale.*\(5,\)"),
        (lambda s: s.logsumexp("3"), TypeError, "scale.*'3'"),
        (lambda s: s.sum_of_positives(hinge, torch.ones(9)), ValueError, r"params.*\(8,\)"),
        (
            lambda s: s.both.sum_of_positives(hinge, torch.ones(8, 2)),
            ValueError,
            r"params.*\(13,\)",
        ),
        (lambda s: s.topk(2, torch.ones(5, 1)), ValueError, "bias.*5"),
        (lambda s: s.ranks(torch.ones(6)), ValueError, "bias.*5"),
        (lambda s: s.ranked(1, torch.ones(8)), ValueError, "bias.*5"),
        (lambda s: s.T.ranked(1, torch.ones(5)), ValueError, "bias.*8"),
        (lambda s: s.ranks(0.5), TypeError, "bias.*float"),
    ],
)
def test_a_value_per_anchor_has_the_size_of_the_anchors(engine, call, error, message, small_tiles):
    with pytest.raises(error, match=message):
        call(Similarity(*embeddings(8, 5), *make_ids("random", 8, 5), engine=engine))


# -------------------------------------------------------------------------------------- compilation

COMPILED = [
    "logsumexp shifted",
    "logsumexp per anchor",
    "std",
    "entropy",
    "hardest",
    "likelihood",
    "hinge of negatives",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "engine", "kind", "view"),
    pairwise(
        names=[COMPILED[:4], COMPILED[4:]],
        engine=["dense", "tiled"],
        kind=[None, "random"],
        view=["both", "rows"],
    ),
)
def test_questions_compile(names, engine, kind, view):
    (v, w), ids = embeddings(9, 9), make_ids(kind, 9, 9)
    p = parameters(9, 9)

    def total(v, w):
        anchors = VIEWS[view](Similarity(v, w, *ids, engine=engine))
        return sum(
            finite(ANSWERS[name](anchors, p[: len(anchors)])).square().sum() for name in names
        )

    torch._dynamo.reset()
    results = []
    # Tiles are visited outside of graphs; plain PyTorch is one graph.
    compiled = torch.compile(total, fullgraph=engine == "dense", backend="aot_eager")
    for function in (total, compiled):
        a, b = v.clone().requires_grad_(), w.clone().requires_grad_()
        value = function(a, b)
        results.append((value, *torch.autograd.grad(value, (a, b))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_one_graph_is_refused_for_tiles():
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def total(v, w):
        return Similarity(v, w, engine="tiled").logsumexp(2.0).sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph=True needs engine='dense'"):
        total(v, w)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_best_candidates_compile(engine):
    ids = torch.arange(5), torch.arange(7) % 5

    def best(v, w):
        sim = Similarity(v, w, *ids, engine=engine)
        (_, rows), (_, cols) = sim.topk(3), sim.T.topk(3)
        return rows, cols, sim.T.topk(2).indices

    v, w = embeddings(5, 7)
    torch._dynamo.reset()
    for a, b in zip(
        best(v, w), torch.compile(best, fullgraph=True, backend="aot_eager")(v, w), strict=True
    ):
        torch.testing.assert_close(a, b)


# with and without subtraction of the maximum
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.2, 0.01])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_an_only_candidate_leaves_no_entropy(engine, temperature):
    v, w = torch.randn(50, 3), torch.randn(1, 3)
    entropy = Similarity(v, w, torch.arange(50), torch.tensor([99]), engine=engine).entropy(
        temperature
    )
    assert (entropy >= 0).all() and (entropy < 1e-5).all()


# ------------------------------------------------------------------------------------------ ranking


@pytest.mark.parametrize("tile", [(2**20, 2048), (90 * 70, 70)])
@pytest.mark.parametrize("k", [1, 3, 7, 40])
def test_best_candidates_whatever_the_sizes(tile, k, monkeypatch):
    """Different algorithms are used for few or many candidates compared with k, and for several
    tiles.
    """
    monkeypatch.setitem(inputs.TILE, "cpu", tile)
    v, w = embeddings(230, 310, dtype=torch.float64)
    ids = torch.arange(230), torch.arange(310)
    rows, cols = (
        torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        for n in (230, 310)
    )
    rows[5], cols[::3] = -math.inf, -math.inf  # candidates that must not be found
    sim = Similarity(v, w, *ids, engine="tiled")
    matrix = sim.scores()
    found = sim.ranked(k, cols), sim.T.ranked(k, rows)
    for (_, top, _), biased in zip(found, (matrix + cols, matrix.T + rows), strict=True):
        wanted = biased.topk(k)
        torch.testing.assert_close(top.values, wanted.values)
        torch.testing.assert_close(biased.gather(1, top.indices), wanted.values)
        assert all(len(set(row)) == k for row in top.indices.tolist())
    (ranks, top, _), (col_ranks, _, _) = found
    assert torch.equal(ranks, sim.ranks(cols)) and torch.equal(col_ranks, sim.T.ranks(rows))
    assert torch.equal(sim.topk(k, cols).indices, top.indices)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 30), st.booleans())
@settings(deadline=None, max_examples=30)
def test_ranks_are_those_of_sorted_scores(seed, n, m, optimistic):
    """Scores of few values, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randint(0, 6, (n, m), generator=generator).double()
    ids = make_ids("random", n, m, seed)
    ties = "optimistic" if optimistic else "pessimistic"
    for engine, many in (("dense", ranking.MANY), ("tiled", ranking.MANY), ("dense", 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranking, "MANY", many)
            found = Similarity.from_scores(matrix, *ids, engine=engine).ranks(ties=ties)
        for i, row in enumerate(found.tolist()):
            positive = ids[0][i] == ids[1]
            own, rivals = matrix[i][positive].sort(descending=True).values, matrix[i][~positive]
            ahead = [int((rivals > s).sum() if optimistic else (rivals >= s).sum()) for s in own]
            assert [r for r in row if r] == [a + place for place, a in enumerate(ahead, 1)]


def test_the_only_positive_is_found_in_every_corner_of_a_tile(monkeypatch):
    monkeypatch.setitem(inputs.TILE, "cpu", (12, 4))
    v, w = embeddings(9, 11)
    for i in range(9):
        for j in range(0, 11, 2) if i % 2 else range(1, 11, 2):
            ids = torch.arange(9), torch.arange(11) + 20
            ids[1][j] = i
            for side in (0, 1):
                sims = (Similarity(v, w, *ids, engine=engine) for engine in ("tiled", "dense"))
                tiled, dense = ((sim.T if side else sim).ranks() for sim in sims)
                assert torch.equal(tiled, dense) and int(tiled[j if side else i]) > 0


@pytest.mark.parametrize("k", [4, 7, 40])
@pytest.mark.parametrize("tile", [(2**20, 2048), (90 * 70, 70), (90 * 150, 150)])
def test_fewer_candidates_than_are_asked_for(tile, k, monkeypatch):
    """A bias of -inf leaves fewer than k in one or several tiles; the rest are arbitrary others
    without repetition.
    """
    monkeypatch.setitem(inputs.TILE, "cpu", tile)
    sim = Similarity(*embeddings(230, 310), torch.arange(230), torch.arange(310), engine="tiled")
    rows, cols = torch.full((230,), -math.inf), torch.full((310,), -math.inf)
    kept = [3, 100, 225], [5, 6, 309]
    rows[kept[0]], cols[kept[1]] = 0.0, 0.0
    found = sim.ranked(k, cols), sim.T.ranked(k, rows)
    for (_, top, _), some, size in zip(found, reversed(kept), (310, 230), strict=True):
        assert top.values[:, :3].isfinite().all() and (top.values[:, 3:] == -math.inf).all()
        assert (top.indices[:, :3].sort(1).values == torch.tensor(some)).all()
        assert all(len(set(row)) == k for row in top.indices.tolist())
        assert (top.indices >= 0).all() and (top.indices < size).all()


@pytest.mark.parametrize("shape", ["primes", "wide"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "name", ["logsumexp per anchor", "std", "hardest", "likelihood", "hinge sum", "sum between"]
)
def test_a_bias_is_part_of_all_answers_and_gets_its_gradient(
    name, normalize, shape, small_tiles, poisoned
):
    n, m, kind = SHAPES[shape]
    (v, w), ids, grads = embeddings(n, m), make_ids(kind, n, m), upstream(n, m)
    p, found = parameters(n, m), {}
    for engine in ("reference", *ENGINES):
        b, c = (
            torch.linspace(-0.3, 0.2, n, dtype=v.dtype),
            torch.linspace(0.4, -0.1, m, dtype=v.dtype),
        )
        leaves = [x.clone().requires_grad_() for x in (v, w, b, c)]
        sim = similarity(*leaves[:2], ids, engine, normalize=normalize, bias=tuple(leaves[2:]))
        values = ANSWERS[name](sim.both, p)
        total = (finite(values) * torch.cat(tuple(grads)).to(values)).sum()
        found[engine] = [values.detach(), *torch.autograd.grad(total, leaves)]
        torch.testing.assert_close(
            found[engine], found["reference"], rtol=1e-9, atol=1e-9, msg=engine
        )


def test_one_side_may_have_a_bias():
    v, w = embeddings(4, 6)
    ids, c = (torch.arange(4), torch.arange(6)), torch.linspace(-1, 1, 6, dtype=v.dtype)
    torch.testing.assert_close(
        Similarity(v, w, *ids, bias=(None, c)).scores(), Similarity(v, w, *ids).scores() + c
    )
    x, y = v.float(), w.float()  # squared distances
    squares = tuple(-z.square().sum(1) for z in (x, y))
    found = Similarity(x * 2**0.5, y * 2**0.5, *ids, normalize=False, bias=squares).scores()
    torch.testing.assert_close(-found, torch.cdist(x, y).square(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bias", [torch.zeros(4), [torch.zeros(4)], (torch.zeros(3), None), (None, 0.5)]
)
def test_a_bias_is_checked(bias):
    with pytest.raises((TypeError, ValueError), match="bias: expected"):
        Similarity(torch.randn(4, 2), torch.randn(4, 2), bias=bias)


@pytest.mark.parametrize("engine", ENGINES)
def test_best_candidates_below_a_limit(engine, small_tiles):
    v, w = embeddings(300, 9)  # three blocks of rows
    ids = torch.arange(300), torch.arange(9)
    sim = similarity(v, w, ids, engine)
    limits = torch.linspace(-0.5, 0.4, 300, dtype=v.dtype)
    for below in (limits, 0.2):
        top, scores = sim.topk(4, below=below), sim.scores()
        left = scores.masked_fill(
            scores >= (below[:, None] if below is limits else below), -math.inf
        )
        wanted = left.topk(4)
        torch.testing.assert_close(top.values, wanted.values)
        assert torch.equal(top.indices, wanted.indices.masked_fill(wanted.values == -math.inf, -1))


def test_anchors_without_pairs_stay_in_the_graph_of_second_derivatives():
    """A process without pairs would otherwise leave out an exchange that the others wait in."""
    ignored = torch.iinfo(torch.int64).min
    ids = torch.full((3,), ignored), torch.tensor([ignored, 1, 2, 3])
    v, w = (x.requires_grad_() for x in embeddings(3, 4))
    sums = Similarity(v, w, *ids, engine="dense").both.sum_of_positives(log1p_clamp)
    upstream = torch.ones_like(sums, requires_grad=True)
    first = torch.autograd.grad(sums, (v, w), upstream, create_graph=True)
    (second,) = torch.autograd.grad(sum(x.sum() for x in first), upstream)
    assert torch.equal(second, torch.zeros_like(upstream))
