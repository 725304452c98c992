"""Precision, and values at the ends of the range of floating-point numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.answers import ANSWERS, evaluate, gradients
from support.cases import (
    ENGINES,
    case,
    each,
    embeddings,
    make_ids,
    pairwise,
    sample,
    similarity,
)
from support.reference import Reference, matches

from itrloss import Similarity
from itrloss.engine.terms import identity

OF_EMBEDDINGS = ["dense", "tiled", "kept"]
NO_IDS = None, None

# ------------------------------------------------------------------------------------------ float32


@pytest.mark.parametrize(
    ("name", "engine", "library"),
    each(2, name=ANSWERS, engine=ENGINES, library=["by_blas", "by_onednn"]),
)
def test_float32_is_as_accurate_as_plain_float32(
    name, engine, library, small_tiles, poisoned, request
):
    request.getfixturevalue(library)
    answer = ANSWERS[name]
    v, w, ids, grads = case((23, 31, "random"), d=32)
    x = v.float()
    y = w.float()
    exact = evaluate(answer, v, w, ids, "reference", grads)
    plain = evaluate(answer, x, y, ids, "reference", grads)
    found = evaluate(answer, x, y, ids, engine, grads)
    for got, other, wanted in zip(found, plain, exact, strict=True):
        exists = wanted.isfinite()
        assert got.dtype == torch.float32
        assert torch.equal(got.isfinite(), exists)
        error = (got.double() - wanted)[exists].norm()
        noise = (other.double() - wanted)[exists].norm()
        size = wanted[exists].norm()
        assert error <= 4 * noise + 2e-6 * size + 1e-7


def sharp_entropies(shape, best, engine, dtype):
    """Return the entropies of given scores, and their gradient.

    Rounding errors of computed scores would be multiplied by 1 / temperature.
    """
    v, w, ids, grads = case(shape)
    scores = F.normalize(v) @ F.normalize(w).T
    if best == "positives":  # similar to a trained model
        scores = scores / 20 + matches(ids, len(v), len(w)) / 5
    x = scores.float().to(dtype).requires_grad_()
    if engine == "reference":
        sim = Reference.from_scores(x, ids)
    else:
        sim = Similarity.from_scores(x, *ids, engine=engine)
    values = sim.both.entropy(0.01)
    upstream = torch.cat(grads).to(dtype)
    (gradient,) = torch.autograd.grad(values, x, upstream)
    return values.detach(), gradient


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("best", ["negatives", "positives"])
def test_float32_loses_no_digits_of_a_sharp_entropy(engine, best, small_tiles, poisoned):
    """No more than plain float32 does, over all shapes: in one of them either may be lucky."""
    errors = torch.zeros(2)
    noises = torch.zeros(2)
    for shape in ("primes", "square with duplicates", "five captions", "wide", "tall"):
        exact = sharp_entropies(shape, best, "reference", torch.float64)
        plain = sharp_entropies(shape, best, "reference", torch.float32)
        found = sharp_entropies(shape, best, engine, torch.float32)
        for k, (got, other, wanted) in enumerate(zip(found, plain, exact, strict=True)):
            errors[k] += (got.double() - wanted).norm()
            noises[k] += (other.double() - wanted).norm()
            noises[k] += 5e-7 * wanted.norm()
    assert (errors <= noises).all()


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("given_as", ["scores", "embeddings"])
def test_positives_far_off_and_first_cost_the_moments_no_digits(engine, given_as):
    ids = torch.arange(512) // 64
    scores = 0.01 * sample(512, 512, dtype=torch.float64)
    scores[ids[:, None] == ids] += 10
    unit = torch.eye(512, dtype=torch.float64)

    def moments(dtype, engine):
        if given_as == "scores":
            sim = Similarity.from_scores(scores.to(dtype), ids, ids, engine=engine)
        else:
            given = scores.to(dtype), unit.to(dtype)
            sim = Similarity(*given, ids, ids, engine=engine, normalize=False)
        return sim.both.mean_std()

    found = moments(torch.float32, engine)
    exact = moments(torch.float64, "dense")
    torch.testing.assert_close(found.std.double(), exact.std, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_a_large_bias_costs_the_moments_no_digits(engine):
    v = sample(40, 8)
    w = sample(40, 8, seed=1)
    bias = (torch.full((40,), 300.0), torch.full((40,), 500.0))
    biased = similarity(v, w, NO_IDS, engine, bias=bias)
    plain = Similarity(v.double(), w.double(), engine="dense")
    found = biased.both.mean_std().std
    exact = plain.both.mean_std().std
    torch.testing.assert_close(found.double(), exact, rtol=2e-4, atol=0)


# ---------------------------------------------------------------------------- zero and long vectors


@pytest.mark.parametrize("length", [1e-13, 1e-25])  # whose square is 0
@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_a_vector_shorter_than_the_smallest_length_counts_as_zero(engine, length):
    v, w = embeddings(6, 6, 40, dtype=torch.float32)
    v[2] *= length / v[2].norm()
    v.requires_grad_()
    sim = similarity(v, w, NO_IDS, engine)
    assert not sim.scores()[2].any()
    total = sim.logsumexp(3.0).sum()
    (gradient,) = torch.autograd.grad(total, v)
    assert not gradient[2].any()


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
@pytest.mark.parametrize("length", [1e-11, 1e-8, 1e17, 1e18])
def test_lengths_do_not_matter_even_extreme_ones(engine, length):
    """Neither squares nor gradients overflow or underflow in float32."""
    v, w = (x / x.norm(dim=1, keepdim=True) for x in embeddings(5, 5, 64, dtype=torch.float32))

    def outcome(length):
        """The values, and their gradients times the length."""
        leaves = [(x * length).requires_grad_() for x in (v, w)]
        both = similarity(*leaves, NO_IDS, engine).both
        value = both.logsumexp(5.0) + both.sum_of_positives(identity)
        by_rows, by_cols = torch.autograd.grad(value.sum(), leaves)
        return [value, by_rows * length, by_cols * length]

    found = outcome(length)
    wanted = outcome(1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------- sums that may vanish


@pytest.mark.parametrize(
    ("engine", "side", "scale"),
    pairwise(engine=OF_EMBEDDINGS, side=[0, 1], scale=["one", "per anchor"]),
)
def test_anchors_far_from_all_their_negatives_do_not_underflow(engine, side, scale, small_tiles):
    """One anchor's best score is near -1, the others' near 1, so that a single maximum for all is
    not enough.
    """
    v = sample(1, 16) + 0.01 * sample(12, 16, seed=1)
    w = v + 0.01 * sample(12, 16, seed=2)
    own = (v, w)[side]
    own[3] *= -1  # opposite to everything else
    scales = torch.tensor(100.0)
    if scale == "per anchor":
        scales = torch.linspace(70, 150, 12).repeat(2)

    def outcome(dtype, engine):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (v, w)]
        sim = similarity(*leaves, NO_IDS, engine)
        values = sim.both.logsumexp(scales.to(dtype))
        grad = torch.linspace(-1, 1, 12, dtype=dtype).repeat(2)
        gradients = torch.autograd.grad(values, leaves, grad)
        return [values.detach(), *gradients]

    exact = outcome(torch.float64, "reference")
    wanted = [x.float() for x in exact]
    found = outcome(torch.float32, engine)
    torch.testing.assert_close(found, wanted, rtol=3e-4, atol=3e-3)


@pytest.mark.parametrize("engine", OF_EMBEDDINGS)
def test_positives_far_off_do_not_underflow_beside_no_negatives(engine):
    v = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    ids = torch.tensor([7, 7])
    sim = similarity(v, -v, (ids, ids), engine)
    found = sim.logsumexp(150.0, over="all")
    wanted = torch.full((2,), math.log(2) - 150)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("scale", [90.0, 150.0])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_scale_at_which_sums_vanish_is_worked_out_with_maxima(engine, scale):
    """With cos = -1 throughout, exp(-90 - 30) underflows float32's normal numbers."""
    v = torch.eye(4)[:1].requires_grad_()
    w = -v.detach().expand(8, 4).contiguous()
    sim = similarity(v, w, make_ids("disjoint", 1, 8), engine)
    found = sim.logsumexp(scale)
    torch.testing.assert_close(found, torch.tensor([math.log(8) - scale]))
    (gradient,) = torch.autograd.grad(found.sum(), v)
    assert gradient.isfinite().all()


# ----------------------------------------------------------------------- scores that are not finite


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_a_nan_beside_an_anchor_without_negatives(engine):
    v, w = embeddings(5, 5, dtype=torch.float32)
    v[2] = math.nan
    v.requires_grad_()
    row_ids = torch.tensor([1, 1, 2, 3, 4])
    col_ids = torch.ones(5, dtype=torch.int64)
    sim = Similarity(v, w, row_ids, col_ids, engine=engine)
    values = sim.hardest_negatives().values
    assert values[:2].tolist() == [-math.inf] * 2
    assert values[2].isnan()
    (gradient,) = torch.autograd.grad(values[[0, 1, 3]].sum(), v)
    assert not gradient[:2].any()
    assert gradient[3].any()


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("place", [1, 38])
def test_a_nan_in_any_tile_is_the_hardest_negative(engine, place, small_tiles):
    """As the largest of all is nan next to a nan: a model that diverges must not go unnoticed."""
    v, w = embeddings(40, 40)
    w[place] = torch.nan
    hardest = Similarity(v, w, engine=engine).hardest_negatives()
    others = torch.arange(40) != place
    assert hardest.values[others].isnan().all()
    assert (hardest.indices[others] == place).all()
    assert hardest.values[place].isfinite()


def test_scores_of_minus_infinity_take_a_pair_out():
    scores = torch.tensor(
        [[0.5, -math.inf, 0.2], [0.0, 1.0, -math.inf], [-math.inf, -math.inf, 0.3]]
    )

    def gradient(engine):
        x = scores.clone().requires_grad_()
        sim = Similarity.from_scores(x, engine=engine)
        best = sim.hardest_negatives()
        assert best.indices.tolist() == [2, 0, -1]
        assert best.values[2] == -math.inf
        values = sim.both.logsumexp(20.0)
        assert values[[2, 4]].tolist() == [-math.inf] * 2
        (found,) = gradients(values, [x], torch.ones(6))
        assert found.isfinite().all()
        return found

    torch.testing.assert_close(gradient("tiled"), gradient("dense"))


def test_scores_of_minus_infinity_carry_no_entropy():
    scores = torch.tensor([[0.5, -math.inf, 0.2], [0.0, 1.0, -0.4], [0.3, -math.inf, 0.3]])
    tiled = Similarity.from_scores(scores, engine="tiled")
    dense = Similarity.from_scores(scores, engine="dense")
    found = tiled.entropy()
    assert found.isfinite().all()
    torch.testing.assert_close(found, dense.entropy())


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_an_infinite_score_of_a_positive_is_no_matter_to_the_negatives(engine):
    scores = torch.rand(4, 4, dtype=torch.float64)
    infinite = scores.clone().fill_diagonal_(math.inf)
    sim = Similarity.from_scores(scores, engine=engine)
    with_infinite_positives = Similarity.from_scores(infinite, engine=engine)
    found = with_infinite_positives.both.mean_std()
    wanted = sim.both.mean_std()
    torch.testing.assert_close(found, wanted)
