"""Every answer of ``Similarity``: the dense and the tiled engine against the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from cases import SHAPES, embeddings, finite, make_ids, reference_first, similarity, upstream
from torch.autograd import gradcheck

from itrloss import Similarity
from itrloss.engines import positives, tiles
from itrloss.metrics import retrieval_metrics

ENGINES = ("dense", "tiled", "scores")


def per_anchor(x, side):
    """One positive value per anchor."""
    size = x.shape[side]
    return torch.linspace(0.5, 1.5, size, dtype=x.dtype) * 4


def one(x, value):
    """The same for all anchors."""
    return torch.tensor([value], dtype=x.dtype)


def added(first, second):
    return tuple(a + b for a, b in zip(first, second, strict=True))


ANSWERS = {
    "logsumexp": lambda s: s.both.logsumexp(3.0),
    "logsumexp per anchor": lambda s: s.both.logsumexp(per_anchor(s, 0), per_anchor(s, 1)),
    "logsumexp shifted": lambda s: s.both.logsumexp(100.0),
    "logsumexp shifted per anchor": lambda s: s.both.logsumexp(20 * per_anchor(s, 0), 20 * per_anchor(s, 1)),
    "logsumexp and positives": lambda s: added(s.both.logsumexp(3.0), s.both.positives("log1p_clamp")),
    "negatives and positives": lambda s: added(s.both.negatives("log1p_relu"), s.both.positives("log1p_clamp")),
    "hardest and positives": lambda s: added((h.values for h in s.both.hardest()), s.both.positives("identity")),
    "logsumexp sharp": lambda s: s.both.logsumexp(300.0),
    "logsumexp sharp and flat": lambda s: s.both.logsumexp(300.0 * per_anchor(s, 0), 0.5),
    "logsumexp negative scale": lambda s: s.both.logsumexp(-5.0),
    "logsumexp of a scale beyond the exponential's range": lambda s: s.both.logsumexp(-2000.0),
    "logsumexp of such scales": lambda s: s.both.logsumexp(-500 * per_anchor(s, 0), per_anchor(s, 1)),
    "logsumexp of two scales": lambda s: s.both.logsumexp(3.0, 5.0),
    "logsumexp over all": lambda s: s.both.logsumexp(7.0, over="all"),
    "mean": lambda s: tuple(m.mean for m in s.both.moments()),
    "std": lambda s: tuple(m.std for m in s.both.moments()),
    "entropy": lambda s: s.both.entropy(1.0),
    "sharp entropy": lambda s: s.both.entropy(0.01),
    "hardest": lambda s: tuple(h.values for h in s.both.hardest()),
    "positives": lambda s: s.both.positives("identity"),
    "log1p": lambda s: s.both.positives("log1p_clamp"),
    "log1p relu": lambda s: s.both.positives("log1p_relu"),
    "likelihood": lambda s: s.both.positives(
        "negative_log_likelihood",
        (per_anchor(s, 0), per_anchor(s, 0) * 2),
        (per_anchor(s, 1), per_anchor(s, 1) * 2),
    ),
    "hinge": lambda s: s.both.positives("hinge", (per_anchor(s, 0) / 8,), (per_anchor(s, 1) / 8,)),
    "sparse hinge": lambda s: s.both.positives("hinge", (per_anchor(s, 0) / 8,), (per_anchor(s, 1) / 8,), sparse=True),
    "negatives": lambda s: s.both.negatives("identity"),
    "negatives of two thresholds": lambda s: s.both.negatives("hinge", (one(s, 0.1),), (one(s, 0.3),)),
    "positives of two thresholds": lambda s: s.both.positives("hinge", (one(s, 0.1),), (one(s, 0.3),)),
    "softplus of one scale and two biases": lambda s: added(
        s.both.positives("softplus", (one(s, 3.0),) * 2, (one(s, 3.0), one(s, -1.0))),
        s.both.negatives("softplus", (one(s, 3.0), one(s, 1.0)), (one(s, 3.0), one(s, -1.0))),
    ),
    "positives and likelihood": lambda s: added(
        s.both.positives("identity"),
        s.both.positives("negative_log_likelihood", (per_anchor(s, 0), one(s, 30.0)), (one(s, 2.0), one(s, 30.0))),
    ),
    "values of the parameters alone": lambda s: added(
        s.both.positives("only_the_parameter", (per_anchor(s, 0),), (one(s, 2.0),)),
        s.both.negatives("only_the_parameter", (one(s, 3.0),), (per_anchor(s, 1),)),
    ),
    "straight lines": lambda s: added(
        s.both.positives("straight_line", (per_anchor(s, 0),), (per_anchor(s, 1),)),
        s.both.negatives("straight_line", (one(s, 3.0),), (per_anchor(s, 1),)),
    ),
    "softplus of negatives": lambda s: s.both.negatives(
        "softplus", (per_anchor(s, 0), -per_anchor(s, 0)), (per_anchor(s, 1), per_anchor(s, 1) - 3)
    ),
    "violations": lambda s: s.both.violations(0.3),
    "rows only": lambda s: (s.logsumexp(2.0), s.T.moments().std),
    "columns only": lambda s: (s.entropy(0.5), s.T.logsumexp(2.0, over="all")),
    "single sides": lambda s: (s.hardest().values, s.T.violations(0.1)),
    "single negatives": lambda s: (s.negatives("log1p_relu"), s.T.negatives("hinge", per_anchor(s, 1))),
    "single positives": lambda s: (s.positives("log1p_relu"), s.T.positives("hinge", per_anchor(s, 1))),
}


def evaluate(answer, v, w, ids, engine, grads):
    """Values of both sides and gradients of both inputs, with rows that have no answer taken out."""
    v, w = v.clone().requires_grad_(), w.clone().requires_grad_()
    values = [x if torch.is_tensor(x) else torch.stack(x) for x in answer(similarity(v, w, ids, engine))]
    total = sum((finite(x) * g.to(x.dtype)).sum() for x, g in zip(values, grads, strict=True))
    if not total.requires_grad:
        return [x.detach() for x in values], (torch.zeros_like(v), torch.zeros_like(w))
    found = torch.autograd.grad(total, (v, w), allow_unused=True)
    return [x.detach() for x in values], [
        torch.zeros_like(x) if g is None else g for g, x in zip(found, (v, w), strict=True)
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_gradients_equal_the_reference(name, shape, engine, small_tiles, poisoned):
    n, m, kind = SHAPES[shape]
    ids, (v, w), grads = make_ids(kind, n, m), embeddings(n, m), upstream(n, m)
    wanted, wanted_grads = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
    got, got_grads = evaluate(ANSWERS[name], v, w, ids, engine, grads)
    for a, b in zip((*got, *got_grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


SIDES = {
    "two scales": (lambda b: b.logsumexp(3.0, 5.0), lambda s, i: s.logsumexp([3.0, 5.0][i])),
    "a number and one per anchor": (
        lambda b: b.logsumexp(3.0, torch.linspace(1, 5, b.positive_counts[1].numel())),
        lambda s, i: s.logsumexp([3.0, torch.linspace(1, 5, s.shape[0])][i]),
    ),
    "entropy": (lambda b: b.entropy(0.3), lambda s, i: s.entropy(0.3)),
    "moments": (lambda b: [m.std for m in b.moments()], lambda s, i: s.moments().std),
    "hardest": (lambda b: [h.values for h in b.hardest()], lambda s, i: s.hardest().values),
    "violations": (lambda b: b.violations(0.3), lambda s, i: s.violations(0.3)),
    "two thresholds of negatives": (
        lambda b: b.negatives("hinge", (torch.tensor([0.1]),), (torch.tensor([0.4]),)),
        lambda s, i: s.negatives("hinge", torch.tensor([[0.1], [0.4]][i])),
    ),
    "two thresholds of positives": (
        lambda b: b.positives("hinge", (torch.tensor([0.1]),), (torch.tensor([0.4]),)),
        lambda s, i: s.positives("hinge", torch.tensor([[0.1], [0.4]][i])),
    ),
    "values of the parameters alone": (
        lambda b: b.positives("only_the_parameter", (torch.tensor([0.1]),), (torch.tensor([0.4]),)),
        lambda s, i: s.positives("only_the_parameter", torch.tensor([[0.1], [0.4]][i], requires_grad=True)),
    ),
}


@pytest.mark.parametrize("shape", ["primes", "wide", "tall"])
@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize("name", SIDES)
def test_both_sides_are_answered_as_each_alone(name, engine, shape):
    """Of what is given for each side: the order of the two, which the reference shares with the engines."""
    n, m, kind = SHAPES[shape]
    sim = similarity(*embeddings(n, m), make_ids(kind, n, m), engine)
    together, alone = SIDES[name]
    for view in (sim, sim.T):
        for i, (found, side) in enumerate(zip(together(view.both), (view, view.T), strict=True)):
            torch.testing.assert_close(found, alone(side, i))


def gradients_of_parameters(engine, ids, n, m, which, term, shared, dtype=torch.float64, device="cpu"):
    """Of the two parameters of a term that is summed over ``which``: one number each, or one per anchor."""
    v, w = (x.to(device, dtype) for x in embeddings(n, m))
    sizes = (1, 1) if shared else (n, m)
    rows, cols = (
        [torch.linspace(0.5, 2.0, k, dtype=dtype, device=device).requires_grad_() for _ in range(2)] for k in sizes
    )
    both = similarity(v, w, ids, engine).both
    sums = getattr(both, which)(term, tuple(rows), tuple(cols))
    total = sum((x * g.to(x)).sum() for x, g in zip(sums, upstream(n, m), strict=True))
    return torch.autograd.grad(total, (*rows, *cols))


@pytest.mark.parametrize("shared", [True, False], ids=["one number", "per anchor"])
@pytest.mark.parametrize("which", ["positives", "negatives"])
@pytest.mark.parametrize("term", ["softplus", "negative_log_likelihood", "plane"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_parameters(engine, shape, term, which, shared):
    n, m, kind = SHAPES[shape]
    given = make_ids(kind, n, m), n, m, which, term, shared
    found, wanted = gradients_of_parameters(engine, *given), gradients_of_parameters("reference", *given)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
def test_answers_may_be_written_to(engine):
    v, w = (x.requires_grad_() for x in embeddings(6, 6))
    sim = similarity(v, w, (None, None), engine)
    for answer in (
        lambda: sim.both.logsumexp(3.0),
        lambda: sim.both.negatives("log1p_relu"),
        lambda: sim.both.entropy(),
    ):
        first, second = answer()
        wanted = torch.autograd.grad(2 * first.sum() + second.sum(), v, retain_graph=True)
        first, second = answer()
        first.mul_(2)
        assert torch.equal(torch.autograd.grad(first.sum() + second.sum(), v, retain_graph=True)[0], wanted[0])
    wanted = sim.both.hardest()[0].values.detach().clone()
    for best in (sim.hardest(), sim.both.hardest()[0]):
        gradient = torch.autograd.grad(best.values.sum(), v, retain_graph=True)
        best.values.zero_()  # of which the gradient must not be made
        again = torch.autograd.grad(sim.hardest().values.sum(), v, retain_graph=True)
        torch.testing.assert_close(again, gradient)
    torch.testing.assert_close(sim.hardest().values, wanted)
    with torch.no_grad():
        sim.positives().zero_()
    assert (sim.positives() != 0).all()


def test_a_written_to_hardest_negative_keeps_its_gradient():
    v, w = (x.requires_grad_() for x in embeddings(6, 6))
    wanted = torch.autograd.grad(Similarity(v, w).hardest().values.mul(3).sum(), v)
    values = Similarity(v, w).hardest().values
    torch.testing.assert_close(torch.autograd.grad(values.mul_(3).sum(), v), wanted)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_a_nan_beside_an_anchor_without_negatives(engine):
    v, w = (x.float() for x in embeddings(5, 5))
    v[2] = math.nan
    v.requires_grad_()
    hardest = Similarity(v, w, torch.tensor([1, 1, 2, 3, 4]), torch.ones(5, dtype=torch.int64), engine=engine).hardest()
    assert hardest.values[:2].tolist() == [-math.inf] * 2 and hardest.values[2].isnan()
    (gradient,) = torch.autograd.grad(hardest.values[[0, 1, 3]].sum(), v)
    assert (gradient[:2] == 0).all() and gradient[3].any()


def test_a_term_does_not_lose_what_it_returns():
    """Its parameter, where the matrix has a single column."""
    weight = torch.linspace(0.1, 1.0, 5).double()
    sim = Similarity(*embeddings(5, 1), torch.tensor([1, 1, 1, 3, 9]), torch.tensor([1]), engine="dense")
    sim.negatives("returned_for_a_test", weight)
    assert torch.equal(weight, torch.linspace(0.1, 1.0, 5).double())


@pytest.mark.parametrize("shape", ["primes", "wide"])
@pytest.mark.parametrize("d", [6, 40])
@pytest.mark.parametrize("name", ANSWERS)
def test_whole_matrix_in_one_tile(name, shape, d):
    n, m, kind = SHAPES[shape]
    # Short vectors are normalised before the product; of long ones the scores are scaled.
    ids, (v, w), grads = make_ids(kind, n, m), embeddings(n, m, d), upstream(n, m)
    wanted, wanted_grads = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
    for engine in ENGINES:
        got, got_grads = evaluate(ANSWERS[name], v, w, ids, engine, grads)
        for a, b in zip((*got, *got_grads), (*wanted, *wanted_grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("library", ["by_blas", "by_onednn"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ANSWERS)
def test_float32_is_as_accurate_as_plain_float32(name, engine, library, small_tiles, poisoned, request):
    request.getfixturevalue(library)
    n, m = 23, 31
    ids, (v, w), grads = make_ids("random", n, m), embeddings(n, m, d=32), upstream(n, m)
    exact = evaluate(ANSWERS[name], v, w, ids, "reference", grads)
    plain = evaluate(ANSWERS[name], v.float(), w.float(), ids, "reference", grads)
    ours = evaluate(ANSWERS[name], v.float(), w.float(), ids, engine, grads)
    for got, floor, wanted in zip((*ours[0], *ours[1]), (*plain[0], *plain[1]), (*exact[0], *exact[1]), strict=True):
        finite = wanted.isfinite()
        assert got.dtype == torch.float32 and torch.equal(got.isfinite(), finite)
        error, noise = ((x.double() - wanted)[finite].norm() for x in (got, floor))
        assert error <= 4 * noise + 2e-6 * wanted[finite].norm() + 1e-7


@pytest.mark.parametrize("engine", reference_first(*ENGINES))
@pytest.mark.parametrize("name", ANSWERS)
def test_gradcheck(name, engine, small_tiles):
    n, m = 5, 7
    ids, (v, w) = make_ids("random", n, m, seed=3), embeddings(n, m, d=4)

    def function(v, w):
        return tuple(finite(x) for x in ANSWERS[name](similarity(v, w, ids, engine)))

    assert gradcheck(function, (v.requires_grad_(), w.requires_grad_()))


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize("scale_of", ["one", "each"])
def test_scale_gets_its_gradient(engine, scale_of, small_tiles):
    n, m = 5, 7
    ids, (v, w) = make_ids("random", n, m, seed=3), embeddings(n, m, d=4)
    sizes = [(), ()] if scale_of == "one" else [(n,), (m,)]
    a, b = (torch.full(k, x, dtype=torch.float64, requires_grad=True) for k, x in zip(sizes, (2.5, 70.0), strict=True))

    def function(a, b, v):
        sim = similarity(v, w, ids, engine)
        return tuple(finite(x) for x in (*sim.both.logsumexp(a, b), sim.logsumexp(a), sim.T.logsumexp(b)))

    assert gradcheck(function, (a, b, v.requires_grad_()))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_hardest_negative_is_found_with_its_index(engine, shape, small_tiles):
    n, m, kind = SHAPES[shape]
    ids, (v, w) = make_ids(kind, n, m), embeddings(n, m)
    sim = Similarity(v, w, *ids, engine="reference")
    other = similarity(v, w, ids, engine)
    for a, b in ((other.hardest(), sim.hardest()), (other.T.hardest(), sim.T.hardest())):
        assert torch.equal(a.indices, b.indices)


def test_counts():
    ids = torch.tensor([0, 0, 1, 5]), torch.tensor([0, 1, 1, 2, 0])
    sim = Similarity(*embeddings(4, 5), *ids)
    assert sim.positive_counts.tolist() == [2, 2, 2, 0]
    assert sim.T.positive_counts.tolist() == [2, 1, 1, 0, 2]
    assert sim.negative_counts.tolist() == [3, 3, 3, 5]
    assert [x.tolist() for x in sim.both.negative_counts] == [[3, 3, 3, 5], [2, 3, 3, 4, 2]]
    assert [x.tolist() for x in sim.T.both.positive_counts] == [[2, 1, 1, 0, 2], [2, 2, 2, 0]]


def test_one_id_may_be_left_out():
    v, w = embeddings(3, 6)
    captions = torch.arange(3).repeat_interleave(2)
    full = Similarity(v, w, torch.arange(3), captions)
    short = Similarity(v, w, col_ids=captions)
    assert torch.equal(full.logsumexp(2.0), short.logsumexp(2.0))
    with pytest.raises(ValueError, match="col_ids"):  # labels of both sides, given once
        Similarity(v, v, torch.tensor([0, 0, 1]))


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
def test_transposed_view_answers_for_the_columns(engine, small_tiles):
    ids, (v, w) = make_ids("random", 9, 14), embeddings(9, 14)
    sim, swapped = Similarity(v, w, *ids, engine=engine), Similarity(w, v, *ids[::-1], engine=engine)
    assert sim.T.shape == swapped.shape == (14, 9)
    for name, answer in ANSWERS.items():
        for a, b in zip(answer(sim.T), answer(swapped), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)
    torch.testing.assert_close(sim.T.scores(), swapped.scores())


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_detached_similarity_has_no_gradient_and_the_same_answers(engine, small_tiles):
    ids, (v, w) = make_ids("random", 9, 14), embeddings(9, 14)
    sim = Similarity(v.requires_grad_(), w.requires_grad_(), *ids, engine=engine)
    for name, answer in ANSWERS.items():
        for a, b in zip(answer(sim.detach()), answer(sim), strict=True):
            assert not a.requires_grad and torch.equal(a, b.detach()), name


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_gradient_that_is_needed_is_computed(engine, small_tiles):
    ids, (v, w), grads = make_ids("random", 9, 14), embeddings(9, 14), upstream(9, 14)
    for name, answer in ANSWERS.items():
        wanted = evaluate(answer, v, w, ids, engine, grads)[1]
        for side in (0, 1):
            inputs = [v.clone(), w.clone()]
            inputs[side].requires_grad_()
            sim = Similarity(*inputs, *ids, engine="dense" if engine == "scores" else engine)
            values = answer(sim)
            total = sum((finite(x) * g).sum() for x, g in zip(values, grads, strict=True))
            total.backward()
            assert inputs[1 - side].grad is None
            torch.testing.assert_close(inputs[side].grad, wanted[side], rtol=1e-9, atol=1e-9, msg=name)


def test_backward_twice_gives_the_same_gradient(small_tiles):
    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    for engine in ("dense", "tiled"):
        sim = Similarity(v, w, engine=engine)
        total = sum(x.sum() for answer in ANSWERS.values() for x in answer(sim))
        first = torch.autograd.grad(total, (v, w), retain_graph=True)
        second = torch.autograd.grad(total, (v, w))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_input(engine, small_tiles):
    ids, grads = make_ids("random", 9, 14), upstream(9, 14)
    v, w = embeddings(9, 14, d=12)
    # No copies of an embedding: with another rounding another one of them would be the hardest.
    strided = torch.cat([v, v], 1)[:, ::2], w.repeat_interleave(2, 0).T.contiguous().T[::2]
    plain = tuple(x.contiguous() for x in strided)
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    for name, answer in ANSWERS.items():
        a, b = evaluate(answer, *strided, ids, engine, grads), evaluate(answer, *plain, ids, engine, grads)
        for x, y in zip((*a[0], *a[1]), (*b[0], *b[1]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=name)


def test_strided_scores(small_tiles):
    ids, (v, w) = make_ids("random", 9, 14), embeddings(9, 14)
    matrix = Similarity(v, w, *ids).scores()
    wide = torch.stack([matrix, matrix], 2).flatten(1)[:, ::2].requires_grad_()
    for name, answer in ANSWERS.items():
        leaf = matrix.clone().requires_grad_()
        a, b = answer(Similarity.from_scores(wide, *ids)), answer(Similarity.from_scores(leaf, *ids))
        grads = [torch.autograd.grad(sum(finite(y).sum() for y in out), x)[0] for out, x in ((a, wide), (b, leaf))]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
def test_zero_vectors_score_zero_and_get_no_gradient(engine):
    v, w = (x.float() for x in embeddings(6, 6))
    v[2], w[4] = 0, 0
    v.requires_grad_(), w.requires_grad_()
    sim = Similarity(v, w, engine=engine)
    assert (sim.scores()[2] == 0).all() and (sim.scores()[:, 4] == 0).all()
    for name, answer in ANSWERS.items():
        values = answer(sim)
        found = torch.autograd.grad(sum(x.sum() for x in values), (v, w), retain_graph=True, allow_unused=True)
        assert all(x.isfinite().all() for x in values), name
        assert all(x is None or x.isfinite().all() for x in found), name
        assert found[0] is None or (found[0][2] == 0).all(), name


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
def test_what_counts_as_zero(engine):
    v, w = (x.float() for x in embeddings(6, 6, 40))
    v[2] *= 1e-13 / v[2].norm()
    v.requires_grad_()
    sim = Similarity(v, w, engine=engine)
    assert (sim.scores()[2] == 0).all()
    assert (torch.autograd.grad(sim.logsumexp(3.0).sum(), v)[0][2] == 0).all()


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
@pytest.mark.parametrize("stretch", [1e-25, 1e-8, 1e25])
def test_length_of_the_vectors_does_not_matter(engine, stretch):
    v, w = (x.float() for x in embeddings(6, 6))
    if stretch < 1e-12:
        assert Similarity(v * stretch, w, engine=engine).scores().abs().max() == 0
    else:
        a, b = (Similarity(v * s, w, engine=engine).both.logsumexp(20.0) for s in (1, stretch))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_not_normalised(engine, small_tiles):
    ids, (v, w), grads = make_ids("random", 9, 14), embeddings(9, 14), upstream(9, 14)
    for name, answer in ANSWERS.items():
        results = []
        for e in (engine, "reference"):
            a, b = v.clone().requires_grad_(), w.clone().requires_grad_()
            values = answer(Similarity(a, b, *ids, engine=e, normalize=False))
            total = sum((finite(x) * g).sum() for x, g in zip(values, grads, strict=True))
            results.append((*(x.detach() for x in values), *torch.autograd.grad(total, (a, b), allow_unused=True)))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_tile_size_does_not_change_the_answer(engine, monkeypatch):
    ids, (v, w), grads = make_ids("random", 11, 17), embeddings(11, 17), upstream(11, 17)
    for name, answer in ANSWERS.items():
        seen = []
        for tile, panel in (((2**20, 2048), 2**19), ((1, 1), 1), ((24, 8), 30), ((60, 12), 23)):
            monkeypatch.setitem(tiles.TILE, "cpu", tile)
            monkeypatch.setitem(tiles.PANEL, "cpu", panel)
            values, found = evaluate(answer, v, w, ids, engine, grads)
            seen.append((*values, *found))
        for other in seen[1:]:
            for a, b in zip(other, seen[0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("kind", ["random", "captions", "same"])
def test_masks_and_pair_lists_agree(engine, kind, monkeypatch, small_tiles):
    """Small tiles are masked by comparing ids, large ones by listing pairs, accelerators never list."""
    ids, (v, w), grads = make_ids(kind, 10, 20), embeddings(10, 20), upstream(10, 20)
    for name, answer in ANSWERS.items():
        wanted = evaluate(answer, v, w, ids, engine, grads)
        with monkeypatch.context() as patch:
            patch.setattr(positives, "_DENSE_MASK", 0)
            patch.setattr(positives, "_PAIR_CHUNK", 3)
            listed = evaluate(answer, v, w, ids, engine, grads)
        with monkeypatch.context() as patch:
            patch.setattr(positives.Positives, "listable", False)
            masked = evaluate(answer, v, w, ids, engine, grads)
        for other in (listed, masked):
            for a, b in zip((*other[0], *other[1]), (*wanted[0], *wanted[1]), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("side", ["row", "column"])
@pytest.mark.parametrize("scale", [100.0, "per anchor"])
def test_anchors_far_from_all_their_negatives_do_not_underflow(engine, side, scale, small_tiles):
    """One anchor's best score is near -1, the others' near 1: to subtract one number from all is not enough."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, 16, generator=generator) + 0.01 * torch.randn(12, 16, generator=generator)
    w = v + 0.01 * torch.randn(12, 16, generator=generator)
    (v if side == "row" else w)[3] *= -1  # opposite to everything else
    sims = []
    for dtype, kind in ((torch.float64, "reference"), (torch.float32, engine)):
        x, y = (z.to(dtype).requires_grad_() for z in (v, w))
        a = scale if isinstance(scale, float) else torch.linspace(70, 150, 12, dtype=dtype)
        values = torch.stack(Similarity(x, y, engine=kind).both.logsumexp(a))
        sims.append((values, *torch.autograd.grad((values * torch.linspace(-1, 1, 12)).sum(), (x, y))))
    for got, wanted in zip(sims[1], sims[0], strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, wanted.float(), rtol=3e-4, atol=3e-3)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("answer", ["logsumexp", "hardest"])
def test_an_answer_without_gradient_leaves_the_positives_theirs(engine, answer):
    v, w = (x.requires_grad_() for x in embeddings(7, 7))
    sim = Similarity(v, w, engine=engine)
    with torch.no_grad():
        getattr(sim.both, answer)()
    found = torch.autograd.grad(sim.positives().sum(), (v, w))
    wanted = torch.autograd.grad(Similarity(v, w, engine="reference").positives().sum(), (v, w))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("length", [1e-11, 1e17, 1e25])
def test_long_vectors_of_extreme_length(length):
    """Few vectors of many dimensions have their products scaled: these must not leave float32's range."""
    v, w = embeddings(5, 5, 64, dtype=torch.float32)
    values = []
    for stretch in (1.0, length):
        x, y = (v * stretch).requires_grad_(), (w * stretch).requires_grad_()
        value = torch.cat(Similarity(x, y, engine="dense").both.logsumexp(5.0))
        gradient = torch.autograd.grad(value.sum(), (x, y))
        values.append((value, *(g * stretch for g in gradient)))
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-5)


def test_auto_picks_by_the_budget():
    v, w = embeddings(10, 20, dtype=torch.float32)
    ids = make_ids("captions", 10, 20)
    assert Similarity(v, w, *ids).engine == "dense"
    assert Similarity(v, w, *ids, memory_budget=10 * 20 * 4).engine == "dense"
    assert Similarity(v, w, *ids, memory_budget=10 * 20 * 4 - 1).engine == "tiled"
    assert Similarity(v.double(), w.double(), *ids, memory_budget=10 * 20 * 8 - 1).engine == "tiled"
    assert "tiled" in repr(Similarity(v, w, *ids, engine="tiled"))


def test_logsumexp_of_no_negatives_is_minus_infinity():
    ids = torch.tensor([1, 1, 2]), torch.tensor([1, 1])
    for engine in ("reference", "dense", "tiled"):
        for scale in (2.0, 200.0):
            rows = Similarity(*embeddings(3, 2), *ids, engine=engine).logsumexp(scale)
            assert rows[:2].tolist() == [-math.inf] * 2 and rows[2].isfinite()


@pytest.mark.parametrize("shape", [(3, 128), (128, 3), (130, 257), (5, 5), (64, 129)])
def test_best_negative_of_long_rows_and_columns(shape):
    """Long axes are searched in runs of 64; the last run is ragged."""
    n, m = shape
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        scores = torch.rand(n, m, generator=generator)
        ids = make_ids("random", n, m, seed)
        ours, reference = (Similarity.from_scores(scores, *ids, engine=e) for e in ("dense", "reference"))
        for a, b in zip(ours.both.hardest(), reference.both.hardest(), strict=True):
            assert torch.equal(a.values, b.values) and torch.equal(a.indices, b.indices)


@pytest.mark.parametrize("engine", ["dense", "tiled", "scores"])
def test_positives_far_off_and_first_cost_the_moments_no_digits(engine):
    ids = torch.arange(512) // 64
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(512, 512, generator=generator, dtype=torch.float64) * 0.01
    scores[ids[:, None] == ids] += 10
    if engine == "scores":
        make = lambda dtype, kind: Similarity.from_scores(scores.to(dtype), ids, ids, engine=kind)  # noqa: E731
    else:
        side = torch.eye(512, dtype=torch.float64)
        make = lambda dtype, kind: Similarity(  # noqa: E731
            scores.to(dtype), side.to(dtype), ids, ids, engine=kind, normalize=False
        )
    ours, wanted = make(torch.float32, "dense" if engine == "scores" else engine), make(torch.float64, "reference")
    for found, exact in ((ours.moments(), wanted.moments()), (ours.T.moments(), wanted.T.moments())):
        torch.testing.assert_close(found.std.double(), exact.std, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.mean.double(), exact.mean, rtol=0, atol=1e-6)


def test_scores_of_minus_infinity_take_a_pair_out():
    scores = torch.tensor([[0.5, -math.inf, 0.2], [0.0, 1.0, -math.inf], [-math.inf, -math.inf, 0.3]])
    grads = []
    for engine in ("reference", "dense"):
        s = scores.clone().requires_grad_()
        sim = Similarity.from_scores(s, engine=engine)
        rows, cols = sim.both.logsumexp(20.0)
        assert rows[2] == -math.inf and cols[1] == -math.inf
        hardest = sim.hardest()
        assert hardest.indices.tolist() == [2, 0, -1] and hardest.values[2] == -math.inf
        values = torch.cat([rows, cols])
        grads.append(torch.autograd.grad(finite(values).sum(), s, retain_graph=True)[0])
        (all_of_it,) = torch.autograd.grad(values.sum(), s)
        assert all_of_it.isfinite().all() or engine == "reference"
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
def test_embeddings_changed_meanwhile_are_refused(engine):
    for change in (0, 1):
        given = list(embeddings(5, 5))
        sim = Similarity(*given, engine=engine)
        given[change].mul_(10)
        for question in (lambda s: s.logsumexp(5.0), lambda s: s.detach().logsumexp(5.0), retrieval_metrics):
            with pytest.raises(RuntimeError, match=r"embeddings.*modified in place"):
                question(sim)
    scores = torch.rand(4, 4)
    sim = Similarity.from_scores(scores)
    sim.logsumexp(5.0)
    scores.zero_()
    with pytest.raises(RuntimeError, match=r"scores.*modified in place"):
        sim.positives()


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
def test_no_grad_and_inference_mode_leave_the_gradient_to_others(engine):
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    wanted = torch.autograd.grad(itrloss_sum(Similarity(v, w)), v)
    sim = Similarity(v, w, engine=engine)
    with torch.inference_mode():
        sim.scores(), sim.hardest(), sim.positives(), sim.detach().topk(2)
    torch.testing.assert_close(torch.autograd.grad(itrloss_sum(sim), v), wanted)
    with torch.no_grad():
        sim = Similarity(v, w, engine=engine)
    assert not itrloss_sum(sim).requires_grad and not sim.hardest().values.requires_grad


def itrloss_sum(sim):
    return sum(x.sum() for x in (*sim.both.logsumexp(5.0), *sim.both.positives("log1p_clamp")))


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.both.logsumexp(torch.ones(8)), ValueError, "col_scale.*5"),
        (lambda s: s.both.logsumexp(torch.ones(3), 1.0), ValueError, "row_scale.*8"),
        (lambda s: s.T.logsumexp(torch.ones(8)), ValueError, "scale.*5"),
        (lambda s: s.positives("hinge", torch.ones(9)), ValueError, "params.*8"),
        (lambda s: s.positives("hinge", 0.2), TypeError, "params.*float"),
        (lambda s: s.both.positives("hinge", (torch.ones(8),)), ValueError, "row_params, col_params.*1 and 0"),
        (lambda s: s.both.positives("hinge", (torch.ones(8),), (torch.ones(8),)), ValueError, "col_params.*5"),
        (lambda s: s.topk(2, torch.ones(5, 1)), ValueError, "bias.*5"),
        (lambda s: s.ranks(torch.ones(6)), ValueError, "bias.*5"),
        (lambda s: s.both.ranks(torch.ones(5)), ValueError, "row_bias.*8"),
        (lambda s: s.T.both.topk(1, torch.ones(8)), ValueError, "row_bias.*5"),
        (lambda s: s.ranks(0.5), TypeError, "bias.*float"),
    ],
)
def test_a_value_per_anchor_has_the_size_of_the_anchors(engine, call, error, message, small_tiles):
    with pytest.raises(error, match=message):
        call(Similarity(*embeddings(8, 5), *make_ids("random", 8, 5), engine=engine))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("name", ["rows only", "columns only", "single sides", "single positives"])
@pytest.mark.parametrize("kind", [None, "random"])
def test_questions_about_one_side_compile(name, engine, kind):
    (v, w), ids = embeddings(9, 9), make_ids(kind, 9, 9)

    def total(v, w):
        return sum(finite(x).square().sum() for x in ANSWERS[name](Similarity(v, w, *ids, engine=engine)))

    torch._dynamo.reset()
    results = []
    for function in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        a, b = v.clone().requires_grad_(), w.clone().requires_grad_()
        value = function(a, b)
        results.append((value, *torch.autograd.grad(value, (a, b))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("engine", ["reference", "dense", "tiled"])
def test_best_candidates_compile(engine):
    ids = torch.arange(5), torch.arange(7) % 5

    def best(v, w):
        sim = Similarity(v, w, *ids, engine=engine)
        rows, cols = sim.both.topk(3)
        return rows.values, rows.indices, cols.values, cols.indices, sim.T.topk(2).indices

    v, w = embeddings(5, 7)
    for a, b in zip(best(v, w), torch.compile(best, fullgraph=True, backend="aot_eager")(v, w), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.2, 0.01])  # with and without a maximum that is subtracted
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_an_only_candidate_leaves_no_entropy(engine, temperature):
    v, w = torch.randn(50, 3), torch.randn(1, 3)
    entropy = Similarity(v, w, torch.arange(50), torch.tensor([99]), engine=engine).entropy(temperature)
    assert (entropy >= 0).all() and (entropy < 1e-5).all()


@pytest.mark.parametrize("tile", [(2**20, 2048), (90 * 70, 70)])
@pytest.mark.parametrize("k", [1, 3, 7, 40])
def test_best_candidates_whatever_the_sizes(tile, k, monkeypatch):
    """Few candidates for the k asked, and many, are found in different ways; so are those of several tiles."""
    monkeypatch.setitem(tiles.TILE, "cpu", tile)
    v, w = embeddings(230, 310, dtype=torch.float64)
    ids = torch.arange(230), torch.arange(310)
    rows, cols = (torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (230, 310))
    rows[5], cols[::3] = -math.inf, -math.inf  # candidates that nobody is to find
    sim = Similarity(v, w, *ids, engine="tiled")
    matrix = sim.scores()
    found = sim.both.topk(k, rows, cols)
    for top, biased in zip(found, (matrix + cols, matrix.T + rows), strict=True):
        wanted = biased.topk(k)
        torch.testing.assert_close(top.values, wanted.values)
        torch.testing.assert_close(biased.gather(1, top.indices), wanted.values)
        assert all(len(set(row)) == k for row in top.indices.tolist())
    ranks, top = sim.both._ranked(k, rows, cols)[0]
    assert torch.equal(top, found[0].indices) and torch.equal(ranks, sim.both.ranks(rows, cols)[0])
    one = sim.topk(k, cols)
    assert torch.equal(one.indices, found[0].indices)


def test_the_only_positive_is_found_in_every_corner_of_a_tile(monkeypatch):
    monkeypatch.setitem(tiles.TILE, "cpu", (12, 4))
    v, w = embeddings(9, 11)
    for i in range(9):
        for j in range(11):
            ids = torch.arange(9), torch.arange(11) + 20
            ids[1][j] = i
            tiled, dense = (Similarity(v, w, *ids, engine=engine).both.ranks() for engine in ("tiled", "dense"))
            assert all(torch.equal(a, b) for a, b in zip(tiled, dense, strict=True)) and int(tiled[0][i]) > 0


@pytest.mark.parametrize("k", [4, 7, 40])
@pytest.mark.parametrize("tile", [(2**20, 2048), (90 * 70, 70), (90 * 150, 150)])
def test_fewer_candidates_than_are_asked_for(tile, k, monkeypatch):
    """A bias of -inf leaves few to be found, in one tile or in several; the rest are any others, and each once."""
    monkeypatch.setitem(tiles.TILE, "cpu", tile)
    sim = Similarity(*embeddings(230, 310), torch.arange(230), torch.arange(310), engine="tiled")
    rows, cols = torch.full((230,), -math.inf), torch.full((310,), -math.inf)
    kept = [3, 100, 225], [5, 6, 309]
    rows[kept[0]], cols[kept[1]] = 0.0, 0.0
    for top, some, size in zip(sim.both.topk(k, rows, cols), reversed(kept), (310, 230), strict=True):
        assert top.values[:, :3].isfinite().all() and (top.values[:, 3:] == -math.inf).all()
        assert (top.indices[:, :3].sort(1).values == torch.tensor(some)).all()
        assert all(len(set(row)) == k for row in top.indices.tolist())
        assert (top.indices >= 0).all() and (top.indices < size).all()
