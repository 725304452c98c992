"""Single kernels and their functions."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from support.cases import embeddings
from support.on_triton import DEVICE, OF_KERNELS

from itrloss.engine import kernels, vectors
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Side
from itrloss.engine.pairs import IGNORE_ID, Pairs

pytestmark = OF_KERNELS


@triton.jit
def log1p_kernel(u, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, kernels._log1p(tl.load(u + i)))


@triton.jit
def softplus_kernel(z, value, slope, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values, slopes = kernels.softplus(tl.load(z + i))
    tl.store(value + i, values[0])
    tl.store(slope + i, slopes[0])


def test_log1p_is_a_polynomial_that_is_accurate_to_float32():
    u = torch.cat([torch.linspace(0, 1, 2**16), torch.logspace(-38, 0, 2**16)])
    found = torch.empty_like(u, device=DEVICE)
    log1p_kernel[(32,)](u.to(DEVICE), found, BLOCK=4096)
    wanted = u.double().log1p()
    assert ((found.cpu().double() - wanted).abs() <= 2.7e-7 * wanted).all()


def test_softplus_and_its_slope_are_accurate_at_both_ends():
    z = torch.cat([torch.linspace(-80, 80, 8190), torch.tensor([-torch.inf, torch.inf])])
    found = torch.empty(2, len(z), device=DEVICE)
    softplus_kernel[(1,)](z.to(DEVICE), *found, BLOCK=len(z))
    exact = z.double()
    wanted = torch.stack([torch.nn.functional.softplus(exact, threshold=100), exact.sigmoid()])
    # An exponent is rounded to 2^-24 of its size, which is as much of the exponential.
    tolerance = wanted * (5e-7 + 2e-7 * exact.abs().clamp_max(80))
    assert torch.equal(found[0, -2:].cpu(), torch.tensor([0.0, torch.inf]))
    close = (found.cpu().double() - wanted).abs() <= tolerance
    assert close[:, :-2].all()
    assert torch.equal(found[1, -2:].cpu(), torch.tensor([0.0, 1.0]))


def test_inverse_norms():
    lengths = torch.tensor([0.0, 1e-13, 2e-12, 1e-6, 1.0, 1e6, 9e17])
    x = lengths[:, None] * torch.nn.functional.normalize(
        embeddings(7, 1, 40, dtype=torch.float32)[0], dim=1
    )
    wanted = torch.where(lengths > 1e-12, 1 / lengths, 0.0)
    for layout in (x, x.T.contiguous().T, x.repeat(1, 2)[:, :40]):
        torch.testing.assert_close(
            vectors.inverse_norms(layout.to(DEVICE)).squeeze(1).cpu(), wanted
        )
    assert vectors.inverse_norms(x[:0].to(DEVICE)).shape == (0, 1)
    half = embeddings(3, 1, 2000)[0].bfloat16()
    torch.testing.assert_close(
        vectors.inverse_norms(half.to(DEVICE)).squeeze(1).cpu(), 1 / half.float().norm(dim=1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dim", [17, 300])
def test_sums_of_classes(dtype, normalize, dim, poisoned):
    rows = torch.tensor([5, 3, 5, IGNORE_ID, 8, 3, 3, -7])
    cols = torch.tensor([3, 5, 9, IGNORE_ID, 3, -7] + [5] * 40, device=DEVICE)
    pairs = Pairs((len(rows), len(cols)), (rows.to(DEVICE), cols), DEVICE)
    x = torch.randn(len(cols), dim, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[2] = math.nan  # of no class
    side = Side(x, vectors.inverse_norms(x) if normalize else None, None, None)
    sums = engine.class_sums(side, pairs.members(1))
    number = pairs.classes(0).number
    for i, own in enumerate(rows.tolist()):
        if own == IGNORE_ID:
            continue
        found = sums[number[i]]
        unit = x[cols == own].double()
        if normalize:
            unit = torch.nn.functional.normalize(unit)
        assert torch.allclose(found.double(), unit.sum(0), rtol=1e-5, atol=1e-5)
    assert not sums[-1].any()  # the entries without a class


@triton.jit
def first_partials(out, plane, size, parts, pid):
    """Store where the results of a part of a plane begin."""
    axis = kernels.Axis(pid, parts, 0, 0, size, 0, 0, 0, 0, None)
    tl.store(out, kernels._first_partial(plane, axis, axis))


def test_places_of_results_are_beyond_32_bits():
    """A hinge of 2048 positives has as many planes of partial sums."""
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    first_partials[(1,)](out, 2047, 4096, 2048, 2047)
    assert out.item() == (2047 * 2048 + 2047) * 4096 > 2**31
