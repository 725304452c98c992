"""Sets of sub-embeddings: the orthogonal constraint, its gate, and similarities of sets."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle_more
from support.cases import SHAPES, make_ids, pairwise, sample, sets, upstream
from torch.autograd import gradcheck

import itrloss
from itrloss import DynamicGate, DynamicOrthogonalLoss, VarianceAwareLoss, functional

PAIRS = ("mean", "sum", "frobenius")


def gates(n, size, seed=0):
    return torch.randint(0, 2, (n, size), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize(
    ("shape", "gate", "pairs", "reduction"),
    pairwise(
        shape=[(5, 4, 7), (1, 2, 3), (3, 1, 4), (2, 6, 2)],
        gate=["off", "heads", "dimensions"],
        pairs=PAIRS,
        reduction=["mean", "sum", "none"],
    ),
)
def test_orthogonal_loss_equals_the_loop_oracle(shape, gate, pairs, reduction):
    x = sets(*shape)
    m = {"off": None, "heads": gates(shape[0], shape[1]), "dimensions": gates(shape[0], shape[2])}[
        gate
    ]
    for slack in (0.0, 0.1, 0.4):
        found = DynamicOrthogonalLoss(slack, pairs, reduction=reduction)(x, m)
        wanted = oracle_more.dynamic_orthogonal(
            x.numpy(),
            None if m is None else m.numpy(),
            slack,
            pair_reduction=pairs,
            reduction=reduction,
        )
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pairs", PAIRS)
def test_orthogonal_loss_gradient(pairs):
    x, m = sets(3, 4, 5).requires_grad_(), gates(3, 4, seed=2)
    module = DynamicOrthogonalLoss(0.01, pairs, reduction="none")
    assert gradcheck(lambda r: module(r, m), x)
    m = m.requires_grad_()
    module(x, m).sum().backward()
    assert m.grad is None  # the gate is not differentiated


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(PAIRS), st.floats(0, 1))
@settings(deadline=None)
def test_what_holds_of_the_orthogonal_loss(seed, k, pairs, slack):
    x, m = sets(4, k, 8, seed), gates(4, k, seed)
    generator = torch.Generator().manual_seed(seed)
    loss = DynamicOrthogonalLoss(slack, pairs, reduction="none")
    value, order = loss(x, m), torch.randperm(k, generator=generator)
    # switching heads off can only lower it
    assert (value >= 0).all() and (value <= loss(x) + 1e-12).all()
    torch.testing.assert_close(loss(x[:, order], m[:, order]), value)
    lengths = torch.rand(4, k, 1, generator=generator, dtype=torch.float64) + 0.1
    torch.testing.assert_close(loss(-x * lengths, m), value)
    orthogonal = torch.linalg.qr(torch.randn(4, 8, 8, generator=generator, dtype=torch.float64))[0][
        :, :k
    ]
    assert (DynamicOrthogonalLoss(1e-9, pairs, reduction="none")(orthogonal) == 0).all()
    same = x[:, :1].expand(4, k, 8)
    highest = {"mean": float(k > 1), "sum": k * (k - 1), "frobenius": (k * (k - 1)) ** 0.5 / k**2}[
        pairs
    ]
    torch.testing.assert_close(
        DynamicOrthogonalLoss(0.0, pairs, reduction="none")(same),
        torch.full((4,), highest, dtype=torch.float64),
    )


def test_frobenius_with_six_heads_never_reaches_the_default_slack():
    same = torch.ones(1, 6, 3)
    assert (
        functional.dynamic_orthogonal_loss(same, slack=0.0, pair_reduction="frobenius").item()
        < 0.153
    )
    assert DynamicOrthogonalLoss(pair_reduction="frobenius")(same) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zero_vectors_and_copies_stay_finite(dtype):
    x = torch.zeros(3, 4, 5, dtype=dtype)
    x[1:] = 2
    x = x.requires_grad_()
    for pairs in PAIRS:
        loss = DynamicOrthogonalLoss(0.0, pairs)(x)
        assert loss.dtype == torch.float32
        assert torch.autograd.grad(loss, x)[0].isfinite().all()


# ----------------------------------------------------------------------------------- variance-aware


def set_case(name, k=3, d=5, seed=0, dtype=torch.float64):
    n, m, kind = {"two captions": (3, 6, "captions"), **SHAPES}[name]
    generator = torch.Generator().manual_seed(seed)
    images = sets(n, k, d, seed, dtype)
    texts = (torch.randn(m, d, generator=generator, dtype=torch.float64) * 3 + 0.3).to(dtype)
    ids = make_ids(kind, n, m, seed)
    known = (torch.arange(n), torch.arange(m)) if ids[0] is None else ids
    return images, texts, ids, known


@pytest.mark.parametrize(
    ("shape", "engine", "shared", "reduction"),
    pairwise(
        shape=["two captions", *SHAPES],
        engine=["dense", "tiled"],
        shared=[True, False],
        reduction=["mean", "sum", "none"],
    ),
)
def test_variance_aware_loss_equals_the_loop_oracle(shape, engine, shared, reduction):
    images, texts, ids, known = set_case(shape)
    for margin, detach in ((0.2, False), (0.7, True)):
        module = VarianceAwareLoss(margin, detach, shared, reduction=reduction, engine=engine)
        found = module(images, texts, *ids)
        wanted = oracle_more.variance_aware(
            images.numpy(), texts.numpy(), *(x.numpy() for x in known), margin, shared, reduction
        )
        for a, b in zip(found, wanted, strict=True) if reduction == "none" else [(found, wanted)]:
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("shape", ["one row", "two captions"])
def test_variance_aware_gradient(shape, engine, shared):
    images, texts, ids, known = set_case(shape, k=2, d=4)
    weight = upstream(images.shape[0], texts.shape[0])

    def value(v, w, detach=False, **options):
        module = VarianceAwareLoss(0.5, detach, shared, reduction="none", engine=engine)
        return sum((x * g).sum() for x, g in zip(module(v, w, *ids), weight, strict=True))

    given_ = images.requires_grad_(), texts.requires_grad_()
    assert gradcheck(value, given_, fast_mode=True)
    # With detached sigma, it is the gradient of the loss with sigma held fixed.
    fixed = oracle_more.variance_sigma(
        oracle_more.set_cosine(images.detach().numpy(), texts.detach().numpy())
    )
    fixed = (fixed[0], fixed[0] if shared else fixed[1])

    def at(v, w):
        per_anchor = oracle_more.variance_aware(
            v, w, *(x.numpy() for x in known), 0.5, shared, "none", fixed
        )
        return sum(float((a * g.numpy()).sum()) for a, g in zip(per_anchor, weight, strict=True))

    grads = torch.autograd.grad(value(*given_, detach=True), given_, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(given_, grads, strict=True)]
    generator, eps = torch.Generator().manual_seed(5), 1e-6
    for _ in range(2):
        step = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in given_]
        there, back = (
            at(*((x + s * eps * e).detach().numpy() for x, e in zip(given_, step, strict=True)))
            for s in (1, -1)
        )
        along = sum(float((g * e).sum()) for g, e in zip(grads, step, strict=True))
        np.testing.assert_allclose(along, (there - back) / (2 * eps), rtol=1e-5, atol=1e-7)


@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans(), st.sampled_from(list(SHAPES)))
@settings(deadline=None, max_examples=30)
def test_what_holds_of_the_variance_aware_loss(seed, k, shared, shape):
    images, texts, ids, known = set_case(shape, k, 6, seed)
    generator = torch.Generator().manual_seed(seed)
    loss = VarianceAwareLoss(shared_sigma=shared, reduction="none")
    rows, cols = loss(images, texts, *ids)
    assert (rows >= 0).all() and (cols >= 0).all()
    heads, i, j = (
        torch.randperm(size, generator=generator) for size in (k, len(images), len(texts))
    )
    moved = loss(images[:, heads][i], texts[j], known[0][i], known[1][j])
    torch.testing.assert_close(moved, (rows[i], cols[j]))
    more = VarianceAwareLoss(margin=0.3, shared_sigma=shared, reduction="none")(images, texts, *ids)
    # monotone in the margin
    assert all((a >= b - 1e-12).all() for a, b in zip(more, (rows, cols), strict=True))
    parts = [loss(images[:, h : h + 1], texts, *ids) for h in range(k)]
    torch.testing.assert_close((sum(p[0] for p in parts), sum(p[1] for p in parts)), (rows, cols))


def test_heads_with_other_ids_each():
    """The interface excludes this, but no engine may confuse the ids of two heads."""
    torch.manual_seed(0)
    ids = torch.arange(6) // 2, torch.arange(6) % 3
    vectors = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    found = [
        functional.variance_aware_loss(
            [itrloss.Similarity(*x, i, i, engine=e) for x, i in zip(vectors, ids, strict=True)]
        )
        for e in ("dense", "tiled")
    ]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("shared", [True, False])
def test_heads_seen_from_the_texts(shared):
    """Sigma is computed over the rows, or for each direction."""
    images, texts, ids, _ = set_case("two captions")
    heads = [itrloss.Similarity(images[:, k], texts, *ids) for k in range(images.shape[1])]
    turned = [itrloss.Similarity(texts, images[:, k], *ids[::-1]) for k in range(images.shape[1])]
    found = functional.variance_aware_loss(
        [sim.T for sim in heads], shared_sigma=shared, reduction="none"
    )
    torch.testing.assert_close(
        found, functional.variance_aware_loss(turned, shared_sigma=shared, reduction="none")
    )


def test_variance_aware_input_errors_name_the_argument():
    loss, v, w = VarianceAwareLoss(), torch.randn(3, 2, 4), torch.randn(3, 4)
    for call, error, words in (
        (lambda: loss(v[:, 0], w), ValueError, r"image_sets: expected shape \(N, K, D\)"),
        (lambda: loss([1], w), TypeError, "image_sets: expected a floating-point tensor"),
        (
            lambda: loss(v.long(), w.long()),
            TypeError,
            r"image_sets: expected a floating-point tensor \(N, K, D\), got torch.int64",
        ),
        (
            lambda: loss(v, w[:, :3]),
            ValueError,
            "texts: expected embeddings of dimension 4 like image_sets",
        ),
        (
            lambda: VarianceAwareLoss(check_finite=True)(v, w * torch.nan),
            ValueError,
            "texts: expected finite",
        ),
        (
            lambda: VarianceAwareLoss(check_finite=True)(v * torch.inf, w),
            ValueError,
            "image_sets: expected finite",
        ),
        (lambda: loss(v, w[:2]), ValueError, "image_ids, text_ids: needed for 3"),
        (
            lambda: loss(v, w, torch.arange(3), torch.arange(2)),
            ValueError,
            "text_ids: expected shape",
        ),
        (lambda: VarianceAwareLoss(margin="x"), TypeError, "margin"),
        (lambda: functional.variance_aware_loss([]), TypeError, "heads: expected similarities"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_the_memory_budget_is_that_of_all_heads(monkeypatch):
    """The budget is for the scores of all heads together."""
    formed = []
    made = itrloss.losses.dvse.Matrix.of_scores

    def noted(scores, *options):
        formed.append(scores.x.shape)
        return made(scores, *options)

    monkeypatch.setattr(itrloss.losses.dvse.Matrix, "of_scores", noted)
    monkeypatch.setattr(itrloss.losses.dvse, "MEMORY_BUDGET", 3 * 300 * 300 * 4)
    for k, kept in ((3, True), (4, False)):
        formed.clear()
        VarianceAwareLoss()(torch.randn(300, k, 5), torch.randn(300, 5))
        assert formed == [(300, 300)] * (k * kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["zeros", "copies"])
def test_variance_aware_loss_stays_finite(dtype, kind):
    images, texts = (
        (torch.zeros(4, 3, 5), torch.zeros(4, 5))
        if kind == "zeros"
        else (torch.ones(4, 3, 5), torch.ones(4, 5))
    )
    images, texts = images.to(dtype).requires_grad_(), texts.to(dtype).requires_grad_()
    loss = VarianceAwareLoss()(images, texts, torch.tensor([0, 0, 1, 2]), torch.arange(4))
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (images, texts)))


# ----------------------------------------------------------------------------------------- the gate


def test_gate_rounds_the_sigmoid_of_centred_projections():
    torch.manual_seed(0)
    gate = DynamicGate(5, 3)
    # without centring, the common mean would switch heads on or off
    regions = torch.randn(16, 7, 5) + 3
    found = gate(regions)
    projected = (regions @ gate.weight.T).mean(1)
    torch.testing.assert_close(gate.centre, projected.mean(0))
    assert torch.equal(found, torch.round(torch.sigmoid(projected - gate.centre)))
    assert found.shape == (16, 3) and not found.requires_grad
    torch.testing.assert_close(gate.on_rate, found.mean(0))
    assert ((gate.on_rate > 0.2) & (gate.on_rate < 0.8)).all()


def test_gate_follows_training_and_stands_still_in_evaluation():
    torch.manual_seed(0)
    gate = DynamicGate(4, 6, momentum=0.25)
    first, second = torch.randn(8, 3, 4), torch.randn(8, 3, 4) + 1
    gate(first)
    centre, rate = gate.centre.clone(), gate.on_rate.clone()
    found = gate(second)
    torch.testing.assert_close(
        gate.centre, 0.75 * centre + 0.25 * (second @ gate.weight.T).mean((0, 1))
    )
    torch.testing.assert_close(gate.on_rate, 0.75 * rate + 0.25 * found.mean(0))
    state = copy.deepcopy(gate.state_dict())
    gate.eval()
    assert torch.equal(gate(second), gate(second))
    assert all(torch.equal(value, gate.state_dict()[name]) for name, value in state.items())
    assert not list(gate.parameters())


def test_gate_looks_at_the_regions_that_exist():
    gate = DynamicGate(4, 6).eval()
    regions, mask = torch.randn(5, 7, 4), torch.ones(5, 7, dtype=torch.bool)
    mask[:, 4:] = False
    wanted = gate(regions[:, :4])
    regions[:, 4:] = 1e4
    assert torch.equal(gate(regions, mask), wanted)
    assert gate(regions, torch.zeros(5, 7)).isfinite().all()


def test_no_head_is_stuck_on_features_with_much_in_common():
    torch.manual_seed(0)
    gate, common = DynamicGate(32, 8), 20 * torch.randn(32)
    for _ in range(20):
        gate(torch.randn(64, 9, 32) + common)
    assert ((gate.on_rate > 0.3) & (gate.on_rate < 0.7)).all()


# ----------------------------------------------------------------------------- similarities of sets


@pytest.mark.parametrize("shape", [(5, 3, 7, 1), (4, 2, 6, 4), (1, 1, 1, 1)])
def test_set_similarity_equals_the_loop_oracle(shape):
    n, k, m, size = shape
    v, w = sets(n, k, 5), sets(m, size, 5, seed=1)
    if size == 1:
        cosines = oracle_more.set_cosine(v.numpy(), w[:, 0].numpy())
        for name, wanted in (
            ("max", oracle_more.set_max(cosines)),
            ("mean", oracle_more.set_mean(cosines)),
        ):
            np.testing.assert_allclose(
                functional.set_similarity(v, w[:, 0], name), wanted, rtol=1e-10
            )
    else:
        cosines = torch.einsum(
            "nkd,mld->nkml", *(torch.nn.functional.normalize(x, dim=2) for x in (v, w))
        )
        torch.testing.assert_close(functional.set_similarity(v, w, "max"), cosines.amax((1, 3)))
        torch.testing.assert_close(functional.set_similarity(v, w, "mean"), cosines.mean((1, 3)))
    for alpha in (1.0, 16.0):
        found = functional.set_similarity(v, w, "smooth_chamfer", alpha)
        np.testing.assert_allclose(
            found, oracle_more.smooth_chamfer(v.numpy(), w.numpy(), alpha), rtol=1e-10
        )


@pytest.mark.parametrize("aggregation", ["max", "mean", "smooth_chamfer"])
def test_set_similarity_is_differentiable_symmetric_and_worked_out_in_pieces(
    aggregation, monkeypatch
):
    v, w = sets(3, 2, 4).requires_grad_(), sets(5, 3, 4, seed=1).requires_grad_()
    assert gradcheck(lambda a, b: functional.set_similarity(a, b, aggregation), (v, w))
    whole = functional.set_similarity(v, w, aggregation)
    torch.testing.assert_close(functional.set_similarity(w, v, aggregation).T, whole)
    many = sets(300, 8, 4).float()
    texts = sets(3000, 1, 4, seed=2).float()[:, 0]
    found = functional.set_similarity(many, texts, aggregation)
    torch.testing.assert_close(
        found[170:180], functional.set_similarity(many[170:180], texts, aggregation)
    )


# ----------------------------------------------------------------------------------- sets and gates


@pytest.mark.parametrize(
    "module", [DynamicOrthogonalLoss(0.1, "sum"), DynamicGate(5, 4)], ids=lambda m: type(m).__name__
)
def test_modules_are_copied_stored_compiled_and_printed(module):
    x = sets(3, 4, 5, dtype=torch.float32)
    module = module.eval()
    wanted = module(x)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        module.to(torch.float32),
    ):
        assert torch.equal(other(x), wanted) and repr(other) == repr(module)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), wanted)


X = torch.ones(2, 3, 4)
WRONG = {
    "residuals": (
        lambda: DynamicOrthogonalLoss()(X[0]),
        ValueError,
        r"residuals: expected shape \(N, K, D\)",
    ),
    "gate": (
        lambda: DynamicOrthogonalLoss()(X, torch.ones(2, 5)),
        ValueError,
        r"gate: expected shape \(2, 3\) or",
    ),
    "pairs": (lambda: DynamicOrthogonalLoss(pair_reduction="max"), ValueError, "pair_reduction"),  # type: ignore[arg-type]
    "slack": (lambda: DynamicOrthogonalLoss("0.4"), TypeError, "slack"),  # type: ignore[arg-type]
    "reduction": (lambda: DynamicOrthogonalLoss(reduction="all"), ValueError, "reduction"),  # type: ignore[arg-type]
    "heads": (lambda: DynamicGate(3, 0), ValueError, "heads"),
    "regions": (lambda: DynamicGate(3, 2)(X), ValueError, r"regions: expected shape \(N, R, 3\)"),
    "mask": (
        lambda: DynamicGate(4, 2)(X, torch.ones(2, 4)),
        ValueError,
        r"mask: expected shape \(2, 3\)",
    ),
    "aggregation": (lambda: functional.set_similarity(X, X, "min"), ValueError, "aggregation"),  # type: ignore[arg-type]
    "texts": (lambda: functional.set_similarity(X, X[:, :, :3]), ValueError, "texts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_they_are_public():
    assert {"DynamicGate", "DynamicOrthogonalLoss"} <= set(itrloss.__all__)


def test_gate_does_not_heed_autocast():
    torch.manual_seed(0)
    gate = DynamicGate(32, 6).eval()
    regions = torch.randn(512, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(regions, torch.ones(512, 9)), gate(regions))


def test_alpha_is_above_zero():
    with pytest.raises(ValueError, match="alpha"):
        functional.set_similarity(X, X, "smooth_chamfer", 0.0)


def test_an_overflow_does_not_switch_the_gate_off():
    """The gradient scaler skips the step, but running statistics would be updated."""
    torch.manual_seed(0)
    gate, loss = DynamicGate(8, 6), DynamicOrthogonalLoss()
    alike = torch.randn(4, 1, 8).expand(4, 6, 8)  # their correlation is 1
    for step in range(12):
        regions = torch.randn(4, 5, 8)
        if step == 2:
            regions[0, 0, 0], regions[0, 1, 0], regions[2, 0, 3] = torch.inf, -torch.inf, torch.nan
        heads = gate(regions)
        assert (
            gate.centre.isfinite().all()
            and gate.on_rate.isfinite().all()
            and heads.isfinite().all()
        )
    assert (
        heads.sum() > 0
        and torch.stack([loss(alike, gate(torch.randn(4, 5, 8))) for _ in range(5)]).max() > 0
    )


REGIONS = sample(4, 6, 5, 8, seed=6)  # four batches of six images with five regions


def twin_gates(heads=3):
    """Two gates with the same weights."""
    first, second = DynamicGate(8, heads), DynamicGate(8, heads)
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_gate_ignores_what_the_mask_leaves_out(value):
    padded_gate, gate = twin_gates()
    regions = REGIONS[0, :, :3].clone()
    mask = torch.tensor([[1, 1, 0]] * 6)
    regions[:, 2] = value
    torch.testing.assert_close(padded_gate(regions, mask), gate(regions[:, :2]))
    torch.testing.assert_close(padded_gate.centre, gate.centre)


def test_gate_begins_with_the_first_batch_that_has_finite_images():
    gate, other = twin_gates()
    gate(REGIONS[0, :0])
    gate(torch.full((2, 5, 8), math.nan))
    gate(REGIONS[0])
    other(REGIONS[0])
    assert torch.equal(gate.centre, other.centre)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_of_a_half_precision_model_has_float32_means(dtype):
    """In half precision, steps of a thousandth would be rounded away."""
    gate = DynamicGate(8, 4, momentum=0.001)
    gate(REGIONS[0])
    half = copy.deepcopy(gate).to(dtype)
    for _ in range(50):
        gate(REGIONS[1] + 1)
        half(REGIONS[1] + 1)
    assert half.centre.dtype == torch.float32
    assert half.on_rate.dtype == torch.float32
    torch.testing.assert_close(half.centre, gate.centre, rtol=0.02, atol=0.002)
