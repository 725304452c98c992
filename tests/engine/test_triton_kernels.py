"""Single kernels and their functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from support.on_triton import ASKED_TERMS, DEVICE, OF_KERNELS

from itrloss.engine import kernels

pytestmark = OF_KERNELS


@triton.jit
def log1p_kernel(u, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(u + i)
    tl.store(out + i, kernels._log1p(numbers))


@triton.jit
def softplus_kernel(z, value, slope, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(z + i)
    values, slopes = kernels.softplus(numbers)
    tl.store(value + i, values)
    tl.store(slope + i, slopes)


def test_log1p_is_a_polynomial_that_is_accurate_to_float32():
    u = torch.cat([torch.linspace(0, 1, 2**16), torch.logspace(-38, 0, 2**16)])
    found = torch.empty_like(u, device=DEVICE)
    log1p_kernel[(32,)](u.to(DEVICE), found, BLOCK=4096)
    wanted = u.double().log1p()
    error = (found.cpu().double() - wanted).abs()
    assert (error <= 2.7e-7 * wanted).all()


def test_softplus_and_its_slope_are_accurate_at_both_ends():
    ends = torch.tensor([-torch.inf, torch.inf])
    z = torch.cat([torch.linspace(-80, 80, 8190), ends])
    results = torch.empty(2, len(z), device=DEVICE)
    values, slopes = results
    softplus_kernel[(1,)](z.to(DEVICE), values, slopes, BLOCK=len(z))
    found = results.cpu().double()
    exact = z.double()
    wanted_values = torch.nn.functional.softplus(exact, threshold=100)
    wanted_slopes = exact.sigmoid()
    wanted = torch.stack([wanted_values, wanted_slopes])
    # An exponent is rounded to 2^-24 of its size, which is as much of the exponential.
    relative = 5e-7 + 2e-7 * exact.abs().clamp_max(80)
    close = (found - wanted).abs() <= wanted * relative
    assert close[:, :-2].all()
    assert found[0, -2:].tolist() == [0.0, torch.inf]
    assert found[1, -2:].tolist() == [0.0, 1.0]


def test_what_losses_ask_has_a_form():
    asked = {terms for terms, _ in ASKED_TERMS.values()}
    assert asked == set(kernels.FORMS)
