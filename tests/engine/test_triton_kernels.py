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
from itrloss.engine.relation import IGNORE_ID, Relation

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
    tl.store(value + i, values[0])
    tl.store(slope + i, slopes[0])


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


def assert_inverse_norms(x, wanted):
    found = vectors.inverse_norms(x.to(DEVICE))
    torch.testing.assert_close(found.squeeze(1).cpu(), wanted)


def test_inverse_norms():
    lengths = torch.tensor([0.0, 1e-13, 2e-12, 1e-6, 1.0, 1e6, 9e17])
    directions, _ = embeddings(7, 1, 40, dtype=torch.float32)
    unit = torch.nn.functional.normalize(directions, dim=1)
    x = lengths[:, None] * unit
    wanted = torch.where(lengths > 1e-12, 1 / lengths, 0.0)
    by_columns = x.T.contiguous().T
    part_of_rows = x.repeat(1, 2)[:, :40]
    for layout in (x, by_columns, part_of_rows):
        assert_inverse_norms(layout, wanted)
    nothing = vectors.inverse_norms(x[:0].to(DEVICE))
    assert nothing.shape == (0, 1)
    long, _ = embeddings(3, 1, 2000)
    half = long.bfloat16()
    assert_inverse_norms(half, 1 / half.float().norm(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dim", [17, 300])
def test_sums_of_classes(dtype, normalize, dim, poisoned):
    rows = torch.tensor([5, 3, 5, IGNORE_ID, 8, 3, 3, -7])
    cols = torch.tensor([3, 5, 9, IGNORE_ID, 3, -7] + [5] * 40, device=DEVICE)
    shape = (len(rows), len(cols))
    pairs = Relation(shape, (rows.to(DEVICE), cols), DEVICE)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(cols), dim, generator=generator)
    x[2] = math.nan  # of no class
    x = x.to(DEVICE, dtype)
    inverse_norms = vectors.inverse_norms(x) if normalize else None
    side = Side(x, inverse_norms, None, None)
    sums = engine.class_sums(side, pairs.members(1))
    number = pairs.classes(0).number
    for i, own in enumerate(rows.tolist()):
        if own == IGNORE_ID:
            continue
        found = sums[number[i]].double()
        members = x[cols == own].double()
        if normalize:
            members = torch.nn.functional.normalize(members)
        assert torch.allclose(found, members.sum(0), rtol=1e-5, atol=1e-5)
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
    wanted = (2047 * 2048 + 2047) * 4096
    assert out.item() == wanted
    assert wanted > 2**31
