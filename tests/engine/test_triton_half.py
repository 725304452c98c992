"""The Triton engine in bfloat16 and float16."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.cases import embeddings, similarity
from support.on_triton import DEVICE, HALF, OF_KERNELS, assert_close

from itrloss import Similarity
from itrloss.engine import terms, tiled, vectors
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.question import Question
from itrloss.engine.relation import Relation

pytestmark = OF_KERNELS


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scale", [3.0, 100.0])
def test_rows_of_a_memory_in_half_precision(dtype, scale, few_tiles, poisoned):
    """Exponentials are between e^-60 and e^60."""
    v, w = (F.normalize(x).to(dtype) for x in embeddings(9, 40, 16))
    w[3] = v[2]
    w[7] = -v[4]
    ids = (torch.arange(9), torch.arange(40) + 2)

    def outcome(device, dtype, engine_name):
        """The values of the rows, and the gradient of their sum."""
        own = v.to(device, dtype).requires_grad_()
        others = w.to(device, dtype)
        moved_ids = [x.to(device) for x in ids]
        sim = similarity(own, others, moved_ids, engine_name)
        values = sim.logsumexp(scale)
        (gradient,) = torch.autograd.grad(values.sum(), own)
        return values.detach(), gradient

    wanted_values, wanted = outcome("cpu", torch.float64, "reference")
    values, found = outcome(DEVICE, dtype, "triton")
    assert_close([values], [wanted_values], 1e-4, 1e-4)
    error = (found.cpu().double() - wanted).norm(dim=1)
    # of vectors of this length, which the projection cancels
    tolerance = torch.finfo(dtype).eps * scale
    assert (error <= tolerance).all()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("smallest", [2.0**-14, 2.0**-25])
def test_small_rows_of_a_panel_have_half_precision(side, smallest, few_tiles, poisoned):
    """A panel has one unit. Weights and exponentials, e^-1 to e, span 2^-28: a row that is so small
    still has half precision relative to its own size.
    """
    n = 16  # one panel
    weights = torch.logspace(0, math.log2(smallest), n, base=2)
    given = [F.normalize(x).half() for x in embeddings(n, n, 16)]
    needs = tiled.Needs(True, True, False, False, dtypes=(torch.float32, torch.float32))

    def asked(device, dtype):
        """The question and the inputs of an engine."""
        moved_to = [x.to(device, dtype) for x in given]
        sides = [Side(x, vectors.inverse_norms(x), None, None) for x in moved_to]
        pairs = Relation((n, n), (None, None), torch.device(device))
        question = Question(terms.exponential, pairs, (side,))
        return question, Inputs(*sides, None)

    exact_question = asked("cpu", torch.float64)
    wanted = tiled.gradients(*exact_question, None, weights.double(), needs)
    half_question = asked(DEVICE, torch.float16)
    found = engine.gradients(*half_question, weights.to(DEVICE), needs, None)
    for got, exact in zip(found[:2], wanted[:2], strict=True):
        error = (got.cpu().double() - exact).norm(dim=1)
        size = exact.norm(dim=1)
        assert (error <= 2.0**-10 * size).all()


@pytest.mark.parametrize("largest", [1e-20, 2.0**-24, 1.0, 3e4, 1e20])
def test_a_panel_in_float16_has_one_unit(largest):
    """Entries keep 11 bits down to 2^-29 of the largest, and smaller ones err by 2^-40 of it."""
    panel = largest * torch.logspace(0, -16, 3 * 64, base=10).view(3, 64)
    panel[:, ::2] *= -1
    half = torch.empty(3, 64, dtype=torch.float16, device=DEVICE)
    unit = engine.round_to_half(panel.to(DEVICE), half)
    assert unit.shape == ()
    assert half.isfinite().all()
    rounded = half.double() * unit.double()
    error = (rounded.cpu() - panel).abs()
    size = panel.abs()
    assert (error <= 2.0**-11 * size + 2.0**-40 * largest).all()
    assert half.abs().max() == 2.0**15
    normal = size >= 2.0**-29 * largest
    assert normal.sum() > 90
    keeps_11_bits = error <= 2.0**-11 * 1.001 * size
    assert keeps_11_bits[normal].all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_gives_a_panel_no_unit(bad):
    panel = torch.full((3, 64), 3.0, device=DEVICE)
    panel[1, 5] = bad
    half = torch.empty(3, 64, dtype=torch.float16, device=DEVICE)
    unit = engine.round_to_half(panel, half)
    assert unit == 3 * 2.0**-15
    assert half[[0, 2]].eq(2.0**15).all()
    assert not half[1, 5].isfinite()


def test_a_panel_of_zeros():
    zeros = torch.zeros(2, 64, device=DEVICE)
    half = torch.empty(2, 64, dtype=torch.float16, device=DEVICE)
    unit = engine.round_to_half(zeros, half)
    assert unit > 0
    assert not half.any()


@pytest.mark.parametrize("upstream", [1e-4, 1.0, 1e4])
def test_no_gradient_leaves_the_range_of_float16(upstream, few_tiles):
    """float16 ends at 65504, and loses half of its digits at 10^-6, whatever the lengths of the
    embeddings.
    """
    v, w = (F.normalize(x) for x in embeddings(24, 24, 16))
    lengths_of_v = torch.logspace(-2, 2, 24)[:, None]
    lengths_of_w = torch.logspace(3, -1, 24)[:, None]
    v = (v * lengths_of_v).half()
    w = (w * lengths_of_w).half()

    def gradients(device, dtype, engine_name):
        leaves = [x.to(device, dtype).requires_grad_() for x in (v, w)]
        sim = similarity(*leaves, (None, None), engine_name)
        values = sim.both.logsumexp(5.0)
        return torch.autograd.grad(values.sum() * upstream, leaves)

    wanted = gradients("cpu", torch.float64, "reference")
    found = gradients(DEVICE, torch.float16, "triton")
    for got, exact in zip(found, wanted, strict=True):
        size = exact.norm(dim=1)
        largest_entry = exact.abs().amax(1)
        error = (got.cpu().double() - exact).norm(dim=1)
        stored = (size > 1e-3) & (largest_entry < 6e4)  # the range of float16
        assert stored.any()
        close = error <= 2e-3 * size
        assert close[stored].all()


def test_a_gradient_that_is_no_number_stays_with_its_anchor():
    v, w = (x.half().to(DEVICE).requires_grad_() for x in embeddings(9, 9, 16))
    grad = torch.ones(9, device=DEVICE)
    grad[4] = torch.nan
    values = Similarity(v, w, engine="triton").logsumexp(10.0)
    (found,) = torch.autograd.grad(values, v, grad)
    finite = found.isfinite().all(1)
    assert finite.tolist() == [i != 4 for i in range(9)]


def test_products_are_summed_in_float32_whatever_the_model_does():
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_accumulation
    try:
        flags.allow_fp16_accumulation = True
        total = torch.zeros(2, 3, device=DEVICE)
        panel = torch.full((2, 4), 2.0**15, device=DEVICE).half()
        other = torch.ones(4, 3, device=DEVICE).half()
        unit = torch.tensor(2.0**15, device=DEVICE)
        engine.add_product_(total, panel, other, unit)
        engine.add_product_(total, panel, other)
        assert flags.allow_fp16_accumulation
        wanted = torch.full_like(total, 2.0**32 + 2.0**17)
        torch.testing.assert_close(total, wanted)
    finally:
        flags.allow_fp16_accumulation = before
