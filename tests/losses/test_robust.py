"""RINCE and RCL: limits, hostile input, options.

`test_random_cases` has their values next to loops, in one process and in several.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import make_ids, of_engines

import itrloss
from itrloss import ComplementaryContrastiveLoss, RINCELoss


def share_of_the_wrong_pair(make):
    """Share of the pull on positives that goes to the one pair that does not match."""
    scores = torch.full((8, 8), 0.1).fill_diagonal_(0.6)
    scores[3, 3] = 0.0
    scores.requires_grad_()
    make(scores=scores).backward()
    pull = -scores.grad.diagonal()
    return float(pull[3] / pull.sum())


def test_a_wrong_pair_pulls_less_than_with_infonce():
    plain = share_of_the_wrong_pair(itrloss.InfoNCELoss(0.1))
    assert plain > 0.7
    falling = [share_of_the_wrong_pair(RINCELoss(0.1, q)) for q in (0.1, 0.3, 0.5, 1.0)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] < plain
    assert falling[-1] < 0.01
    assert share_of_the_wrong_pair(ComplementaryContrastiveLoss(0.1)) < 0.2 < plain


def test_a_negative_that_has_all_of_the_probability_stays_finite():
    scores = torch.tensor([[-1.0, 1.0], [1.0, -1.0]])
    for temperature in (0.05, 1e-3, 1e-6):
        s = scores.clone().requires_grad_()
        value = ComplementaryContrastiveLoss(temperature)(scores=s)
        value.backward()
        torch.testing.assert_close(value.item(), -2 * math.log(1e-6))
        assert s.grad.isfinite().all()
    value = ComplementaryContrastiveLoss(1e-3)(scores=-scores)
    assert value == 0


HOSTILE = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), torch.eye(8)[:3], -torch.ones(2, 8)])


@pytest.mark.parametrize("kind", [None, "random", "same", "disjoint"])
@of_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss",
    [
        RINCELoss(0.0072),
        RINCELoss(0.0144, q=1.0),
        RINCELoss(50.0),
        ComplementaryContrastiveLoss(1e-3),
    ],
    ids=str,
)
def test_extreme_temperatures_leave_hostile_input_finite(loss, dtype, engine, kind):
    loss.engine = engine
    v = HOSTILE.clone().to(dtype).requires_grad_()
    w = HOSTILE.flip(0).to(dtype).requires_grad_()
    value = loss(v, w, *make_ids(kind, 10, 10))
    assert value.isfinite()
    assert value.dtype == torch.float32
    if dtype == torch.float16 and isinstance(loss, RINCELoss):
        # gradients have e^(q / temperature), which float16 does not hold
        value = value * math.exp(-loss.q / loss.temperature)
    value.backward()
    assert v.grad.isfinite().all()
    assert w.grad.isfinite().all()
    assert (v.grad[:2] == 0).all()


def test_wrong_pairs_that_are_nearly_certain_have_accurate_gradients():
    """Where 1 - p is 1e-4 or less, it is no difference of rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    v, noise = torch.randn(2, 64, 32, generator=generator, dtype=torch.float64)
    w = v + 0.3 * noise
    w[:16] = w[:16].roll(1, 0)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x = v.to(dtype).requires_grad_()
        ComplementaryContrastiveLoss(0.05)(x, w.to(dtype)).backward()
        gradients.append(x.grad.double())
    found, exact = gradients
    assert (found - exact).norm() < 0.01 * exact.norm()  # 0.04 from the log-sum-exp alone


def test_a_learnt_temperature_that_overflows_is_an_error():
    x = torch.randn(6, 4)
    loss = RINCELoss(0.02, q=1.0, learnable=True)
    assert loss(x, x.flip(0)).isfinite()
    with torch.no_grad():
        loss.log_scale.fill_(5.3)
    with pytest.raises(ValueError, match=r"^temperature: expected at least q / 70 = 0.014"):
        loss(x, x.flip(0))
    for q in torch.linspace(0.01, 1, 40).tolist():  # a limit is no error, however it is rounded
        limited = RINCELoss(0.1, q=q, learnable=True, max_scale=70 / q)
        with torch.no_grad():
            limited.log_scale.fill_(9.0)
        assert limited(x, x.flip(0)).isfinite()
