"""The parts of DVSE: the variance-aware loss, the orthogonal constraint of its heads, their gate.

`check_loss` and `test_modules` have what holds of every loss; `test_objectives` has the whole.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.answers import assert_finite
from support.cases import make_ids, sample, sets

import itrloss
from itrloss import DynamicGate, DynamicOrthogonalLoss, VarianceAwareLoss, functional

# ------------------------------------------------------------------------------ variance-aware loss


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
    images = sets(3, 3, 5)
    texts = sample(6, 5, dtype=torch.float64)
    image_ids, text_ids = make_ids("captions", 3, 6)
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


# ---------------------------------------------------------------------------- orthogonal constraint

PAIR_REDUCTIONS = ["mean", "sum", "frobenius"]


def test_a_gate_has_no_gradient():
    residuals = sets(3, 4, 5).requires_grad_()
    gates = torch.ones(3, 4).double().requires_grad_()
    DynamicOrthogonalLoss(0.01)(residuals, gates).backward()
    assert gates.grad is None
    with torch.inference_mode():
        inferred = gates.clone()
    DynamicOrthogonalLoss(0.01)(residuals, inferred).backward()


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
    assert_finite(value, [residuals])


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
