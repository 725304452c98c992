"""The parts of DVSE: the variance-aware loss, the orthogonal constraint of its heads, their gate.

`check_loss` and `test_modules` have what holds of every loss; `test_objectives` has the whole.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support import oracle_more
from support.cases import SHAPES, make_ids, pairwise, sample, sets, upstream
from torch.autograd import gradcheck

import itrloss
from itrloss import DynamicGate, DynamicOrthogonalLoss, VarianceAwareLoss, functional

# some batches have nothing in common, or one id for all
pytestmark = pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
REDUCTIONS = ["mean", "sum", "none"]

# ------------------------------------------------------------------------------ variance-aware loss

HEADS_SHAPES = {"two captions": (3, 6, "captions"), **SHAPES}


def heads_batch(shape, heads=3, dim=5):
    """Return sets of images, texts and ids."""
    n, m, kind = HEADS_SHAPES[shape]
    texts = 3 * sample(m, dim, dtype=torch.float64) + 0.3
    return sets(n, heads, dim), texts, make_ids(kind, n, m)


def known(ids, n, m):
    """Ids as arrays, also where image i matches text i."""
    image_ids = torch.arange(n) if ids[0] is None else ids[0]
    text_ids = torch.arange(m) if ids[1] is None else ids[1]
    return image_ids.numpy(), text_ids.numpy()


@pytest.mark.parametrize(
    ("shape", "heads", "engine", "shared", "reduction"),
    pairwise(
        shape=HEADS_SHAPES,
        heads=[1, 3, 4],
        engine=["dense", "tiled"],
        shared=[True, False],
        reduction=REDUCTIONS,
    ),
)
def test_variance_aware_loss_equals_the_loop_oracle(shape, heads, engine, shared, reduction):
    images, texts, ids = heads_batch(shape, heads)
    numbers = known(ids, len(images), len(texts))
    for margin, detached in ((0.2, False), (0.7, True)):
        loss = VarianceAwareLoss(margin, detached, shared, reduction=reduction, engine=engine)
        found = loss(images, texts, *ids)
        wanted = oracle_more.variance_aware(
            images.numpy(), texts.numpy(), *numbers, margin, shared, reduction
        )
        if reduction == "none":
            wanted = tuple(torch.from_numpy(x) for x in wanted)
        else:
            wanted = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


class OfHeads:
    """A sum of a loss's values with uneven weights, and the same with deviations held fixed."""

    def __init__(self, shape, engine, shared):
        self.images, self.texts, self.ids = heads_batch(shape, heads=2, dim=4)
        self.engine, self.shared = engine, shared
        self.of_images, self.of_texts = upstream(len(self.images), len(self.texts))
        cosines = oracle_more.set_cosine(self.images.numpy(), self.texts.numpy())
        by_image, by_text = oracle_more.variance_sigma(cosines)
        self.deviations = by_image, by_image if shared else by_text

    def value(self, images, texts, detached=False):
        loss = VarianceAwareLoss(0.5, detached, self.shared, reduction="none", engine=self.engine)
        of_images, of_texts = loss(images, texts, *self.ids)
        return self.of_images @ of_images + self.of_texts @ of_texts

    def value_with_fixed_deviations(self, images, texts):
        numbers = known(self.ids, len(images), len(texts))
        of_images, of_texts = oracle_more.variance_aware(
            images.numpy(), texts.numpy(), *numbers, 0.5, self.shared, "none", self.deviations
        )
        return float(self.of_images.numpy() @ of_images + self.of_texts.numpy() @ of_texts)


of_heads = pytest.mark.parametrize(
    ("shape", "engine", "shared"),
    [
        (shape, engine, shared)
        for shape in ("one row", "two captions")
        for engine in ("dense", "tiled")
        for shared in (True, False)
    ],
)


@of_heads
def test_variance_aware_gradient_is_that_of_differences(shape, engine, shared):
    case = OfHeads(shape, engine, shared)
    inputs = case.images.requires_grad_(), case.texts.requires_grad_()
    assert gradcheck(case.value, inputs, fast_mode=True)


@of_heads
def test_detached_deviations_are_constants_of_the_gradient(shape, engine, shared):
    case = OfHeads(shape, engine, shared)
    inputs = case.images.clone().requires_grad_(), case.texts.clone().requires_grad_()
    value = case.value(*inputs, detached=True)
    gradients = torch.autograd.grad(value, inputs, materialize_grads=True)
    size = 1e-6
    for seed in range(2):
        by_images = sample(*case.images.shape, seed=seed, dtype=torch.float64)
        by_texts = sample(*case.texts.shape, seed=seed + 2, dtype=torch.float64)
        ahead, behind = (
            case.value_with_fixed_deviations(
                case.images + step * by_images, case.texts + step * by_texts
            )
            for step in (size, -size)
        )
        slope = (gradients[0] * by_images).sum() + (gradients[1] * by_texts).sum()
        assert slope.item() == pytest.approx((ahead - behind) / (2 * size), rel=1e-5, abs=1e-7)


def test_heads_may_have_ids_of_their_own():
    """The module excludes this, but no engine may confuse the ids of two heads."""
    images, texts = sample(2, 6, 4, dtype=torch.float64), sample(2, 6, 4, seed=1).double()
    ids = torch.arange(6) // 2, torch.arange(6) % 3

    def value(engine):
        heads = [
            itrloss.Similarity(images[k], texts[k], ids[k], ids[k], engine=engine) for k in range(2)
        ]
        return functional.variance_aware_loss(heads)

    torch.testing.assert_close(value("tiled"), value("dense"))


@pytest.mark.parametrize("shared", [True, False])
def test_heads_may_be_seen_from_the_texts(shared):
    """A shared deviation is computed over the rows, whatever they are."""
    images, texts, (image_ids, text_ids) = heads_batch("two captions")
    options = {"shared_sigma": shared, "reduction": "none"}
    heads = [itrloss.Similarity(x, texts, image_ids, text_ids).T for x in images.unbind(1)]
    turned = [itrloss.Similarity(texts, x, text_ids, image_ids) for x in images.unbind(1)]
    found = functional.variance_aware_loss(heads, **options)
    torch.testing.assert_close(found, functional.variance_aware_loss(turned, **options))


@pytest.mark.parametrize(("heads", "kept"), [(3, True), (4, False)])
def test_the_memory_budget_is_that_of_all_heads(heads, kept, monkeypatch):
    formed = []
    of_scores = itrloss.losses.dvse.Matrix.of_scores

    def noted(scores, *options):
        formed.append(scores.x.shape)
        return of_scores(scores, *options)

    monkeypatch.setattr(itrloss.losses.dvse.Matrix, "of_scores", noted)
    monkeypatch.setattr(itrloss.losses.dvse, "MEMORY_BUDGET", 3 * 300 * 300 * 4)
    VarianceAwareLoss()(sample(300, heads, 5), sample(300, 5, seed=1))
    assert formed == ([(300, 300)] * heads if kept else [])


SETS = torch.ones(3, 2, 4)
TEXTS = torch.ones(3, 4)
IDS = torch.arange(3)
strict = VarianceAwareLoss(check_finite=True)
loss = VarianceAwareLoss()
WRONG_HEADS = {
    "no sets": (lambda: loss(TEXTS, TEXTS), ValueError, r"image_sets: expected shape \(N, K, D\)"),
    "a list": (lambda: loss([1], TEXTS), TypeError, "image_sets: expected a floating-point tensor"),
    "integers": (
        lambda: loss(SETS.long(), TEXTS.long()),
        TypeError,
        r"image_sets: expected a floating-point tensor \(N, K, D\), got torch.int64",
    ),
    "dimensions": (
        lambda: loss(SETS, TEXTS[:, :3]),
        ValueError,
        "texts: expected embeddings of dimension 4 like image_sets",
    ),
    "nan in texts": (lambda: strict(SETS, TEXTS * math.nan), ValueError, "texts: expected finite"),
    "inf in sets": (
        lambda: strict(SETS * math.inf, TEXTS),
        ValueError,
        "image_sets: expected finite",
    ),
    "unpaired": (lambda: loss(SETS, TEXTS[:2]), ValueError, "image_ids, text_ids: needed for 3"),
    "fewer ids": (lambda: loss(SETS, TEXTS, IDS, IDS[:2]), ValueError, "text_ids: expected shape"),
    "margin": (lambda: VarianceAwareLoss(margin="x"), TypeError, "margin"),
    "no heads": (
        lambda: functional.variance_aware_loss([]),
        TypeError,
        "heads: expected similarities",
    ),
}


@pytest.mark.parametrize("name", WRONG_HEADS)
def test_wrong_input_of_the_variance_aware_loss_is_named(name):
    call, error, message = WRONG_HEADS[name]
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------------------- orthogonal constraint

PAIR_REDUCTIONS = ["mean", "sum", "frobenius"]


def random_gates(n, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (n, size), generator=generator).double()


@pytest.mark.parametrize(
    ("shape", "gate", "pairs", "reduction", "slack"),
    pairwise(
        shape=[(5, 4, 7), (1, 2, 3), (3, 1, 4), (2, 6, 2)],
        gate=["off", "heads", "dimensions"],
        pairs=PAIR_REDUCTIONS,
        reduction=REDUCTIONS,
        slack=[0.0, 0.1, 0.4],
    ),
)
def test_orthogonal_loss_equals_the_loop_oracle(shape, gate, pairs, reduction, slack):
    n, heads, dim = shape
    residuals = sets(*shape)
    gates = {"off": None, "heads": random_gates(n, heads), "dimensions": random_gates(n, dim)}[gate]
    found = DynamicOrthogonalLoss(slack, pairs, reduction=reduction)(residuals, gates)
    wanted = oracle_more.dynamic_orthogonal(
        residuals.numpy(), None if gates is None else gates.numpy(), slack, pairs, reduction
    )
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pairs", PAIR_REDUCTIONS)
def test_orthogonal_loss_has_a_gradient_for_the_heads_alone(pairs):
    loss = DynamicOrthogonalLoss(0.01, pairs, reduction="none")
    residuals = sets(3, 4, 5).requires_grad_()
    gates = random_gates(3, 4, seed=2).requires_grad_()
    assert gradcheck(lambda x: loss(x, gates.detach()), residuals)
    loss(residuals, gates).sum().backward()
    assert gates.grad is None


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("pairs", PAIR_REDUCTIONS)
def test_orthogonal_loss_is_between_that_of_a_basis_and_of_copies(pairs, heads):
    basis = torch.linalg.qr(sample(4, 8, 8, dtype=torch.float64)).Q[:, :heads]
    copies = basis[:, :1].expand(4, heads, 8)
    loss = DynamicOrthogonalLoss(1e-9, pairs)
    ordered_pairs = heads * (heads - 1)
    highest = {
        "mean": float(heads > 1),
        "sum": ordered_pairs,
        "frobenius": ordered_pairs**0.5 / heads**2,
    }
    assert loss(basis) == 0
    assert 0 <= loss(sets(4, heads, 8)) <= highest[pairs]
    assert loss(copies).item() == pytest.approx(highest[pairs], rel=1e-6)


def test_frobenius_with_six_heads_never_reaches_the_default_slack():
    assert DynamicOrthogonalLoss(pair_reduction="frobenius")(torch.ones(1, 6, 3)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pairs", PAIR_REDUCTIONS)
def test_orthogonal_loss_of_zeros_and_copies_is_finite(pairs, dtype):
    residuals = torch.zeros(3, 4, 5, dtype=dtype)
    residuals[1:] = 2
    residuals.requires_grad_()
    value = DynamicOrthogonalLoss(0.0, pairs)(residuals)
    assert value.dtype == torch.float32
    (gradient,) = torch.autograd.grad(value, residuals)
    assert gradient.isfinite().all()


# --------------------------------------------------------------------------------------------- gate

REGIONS = sample(4, 16, 7, 8, seed=6)  # four batches of 16 images with seven regions


def twin_gates():
    """Two gates with the same weights."""
    first, second = DynamicGate(8, 6), DynamicGate(8, 6)
    second.load_state_dict(first.state_dict())
    return first, second


def test_gate_rounds_the_sigmoid_of_centred_projections():
    torch.manual_seed(0)
    gate = DynamicGate(8, 6)
    regions = REGIONS[0] + 3  # without centring, the common mean would switch heads on or off
    found = gate(regions)
    projected = (regions @ gate.weight.T).mean(1)
    torch.testing.assert_close(gate.centre, projected.mean(0))
    assert torch.equal(found, (projected - gate.centre).sigmoid().round())
    assert not found.requires_grad
    torch.testing.assert_close(gate.on_rate, found.mean(0))
    assert (gate.on_rate > 0.2).all()
    assert (gate.on_rate < 0.8).all()


def test_gate_has_running_means_and_no_parameters():
    gate = DynamicGate(8, 6, momentum=0.25)
    gate(REGIONS[0])
    centre, on_rate = gate.centre.clone(), gate.on_rate.clone()
    found = gate(REGIONS[1] + 1)
    new_centre = ((REGIONS[1] + 1) @ gate.weight.T).mean((0, 1))
    torch.testing.assert_close(gate.centre, centre.lerp(new_centre, 0.25))
    torch.testing.assert_close(gate.on_rate, on_rate.lerp(found.mean(0), 0.25))
    assert not list(gate.parameters())


def test_gate_stands_still_in_evaluation():
    gate = DynamicGate(8, 6)
    gate(REGIONS[0])
    state = copy.deepcopy(gate.state_dict())
    gate.eval()
    assert torch.equal(gate(REGIONS[1]), gate(REGIONS[1]))
    assert all(torch.equal(x, gate.state_dict()[name]) for name, x in state.items())


def test_no_head_is_stuck_on_features_with_much_in_common():
    torch.manual_seed(0)
    gate = DynamicGate(32, 8)
    common = 20 * torch.randn(32)
    for _ in range(20):
        gate(torch.randn(64, 9, 32) + common)
    assert (gate.on_rate > 0.3).all()
    assert (gate.on_rate < 0.7).all()


@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_gate_ignores_what_the_mask_leaves_out(padding, dtype):
    padded_gate, gate = twin_gates()
    regions = REGIONS[0].clone()
    regions[:, 4:] = padding
    mask = torch.zeros(16, 7, dtype=dtype)
    mask[:, :4] = 1
    assert torch.equal(padded_gate(regions, mask), gate(REGIONS[0, :, :4]))
    torch.testing.assert_close(padded_gate.centre, gate.centre)


def test_gate_of_no_regions_is_finite():
    assert DynamicGate(8, 6)(REGIONS[0], torch.zeros(16, 7)).isfinite().all()


def test_gate_begins_with_the_first_batch_that_has_finite_images():
    gate, other = twin_gates()
    gate(REGIONS[0, :0])
    gate(torch.full((2, 5, 8), math.nan))
    gate(REGIONS[0])
    other(REGIONS[0])
    assert torch.equal(gate.centre, other.centre)


def test_an_overflow_does_not_switch_the_gate_off():
    """The gradient scaler skips the step, but running statistics would be updated."""
    torch.manual_seed(0)
    gate = DynamicGate(8, 6)
    alike = sample(16, 1, 8).expand(16, 6, 8)  # their correlation is 1
    gate(REGIONS[0])
    broken = REGIONS[1].clone()
    broken[0, 0, 0] = math.inf
    broken[0, 1, 0] = -math.inf
    broken[2, 0, 3] = math.nan
    assert gate(broken).isfinite().all()
    assert gate.centre.isfinite().all()
    assert gate.on_rate.isfinite().all()
    for regions in REGIONS[2:]:
        gates = gate(regions)
        assert gates.isfinite().all()
        assert gates.any()
        assert DynamicOrthogonalLoss()(alike, gates) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_of_a_half_precision_model_has_float32_means(dtype):
    """In half precision, steps of a thousandth would be rounded away."""
    gate = DynamicGate(8, 6, momentum=0.001)
    gate(REGIONS[0])
    half = copy.deepcopy(gate).to(dtype)
    for _ in range(50):
        gate(REGIONS[1] + 1)
        half(REGIONS[1] + 1)
    assert half.centre.dtype == torch.float32
    assert half.on_rate.dtype == torch.float32
    torch.testing.assert_close(half.centre, gate.centre, rtol=0.02, atol=0.002)


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
    "pairs": (lambda: DynamicOrthogonalLoss(pair_reduction="max"), ValueError, "pair_reduction"),
    "slack": (lambda: DynamicOrthogonalLoss("0.4"), TypeError, "slack"),
    "reduction": (lambda: DynamicOrthogonalLoss(reduction="all"), ValueError, "reduction"),
    "heads": (lambda: DynamicGate(3, 0), ValueError, "heads"),
    "regions": (lambda: DynamicGate(3, 2)(X), ValueError, r"regions: expected shape \(N, R, 3\)"),
    "mask": (
        lambda: DynamicGate(4, 2)(X, torch.ones(2, 4)),
        ValueError,
        r"mask: expected shape \(2, 3\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_of_the_constraint_and_its_gate_is_named(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
