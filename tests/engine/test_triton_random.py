"""The random batches of `test_random_cases` on the Triton engine.

Kernels multiply embeddings, or read scores. Errors are compared with those of plain PyTorch in the
same precision.
"""

from __future__ import annotations

import pytest
import torch
from support.drawn_answers import ASKED, AnswerCase
from support.drawn_losses import LossCase
from support.losses_registry import where
from support.on_triton import DEVICE, HALF, OF_KERNELS, distance

import itrloss
from itrloss.engine import relation
from itrloss.engine import triton as engine
from itrloss.engine.matrix import Matrix

pytestmark = OF_KERNELS

# Rounding of scores is multiplied: by 2000, or where nearly equal numbers are subtracted.
SHARP = ["logsumexp of a scale beyond the exponential's range", "logsumexp of such scales"]
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 8e-3, torch.float16: 2e-3}
LISTABLE = vars(relation.Relation)["listable"]
LOSSES = where(lambda entry: entry.takes == "pairs" and entry.oracle is not None)


def assert_as_accurate(found, plain, exact, about, bound=3e-5):
    """Compare errors with those of plain PyTorch, by norms; both are of rounded input.

    A gradient may be 0 because large parts cancel, as that of embeddings of one dimension.
    """
    size = max(wanted[wanted.isfinite()].norm() for wanted in exact)
    for got, other, wanted in zip(found, plain, exact, strict=True):
        exists = wanted.isfinite()
        assert torch.equal(got.cpu().isfinite(), exists), about
        error = distance(got, wanted)
        noise = 4 * distance(other, wanted) + 1e-5
        if got.dtype in HALF:  # all of a gradient may cancel but for rounding
            noise = noise + torch.finfo(got.dtype).eps / 8
        assert error <= noise + bound * size, f"{about}: {error}"


def draw_kernels(case, monkeypatch):
    """Draw how kernels work; return the engine: of embeddings or of their scores."""
    draw = case.draw
    multiplies = draw.chance(0.6)
    held = draw.pick([2**27, 0])  # bytes of held sums: enough for one side, or none
    monkeypatch.setattr(engine, "fused", lambda *_: multiplies)
    monkeypatch.setattr(engine, "held_bytes", lambda device: held)
    monkeypatch.setattr(relation, "FEW", draw.pick([-1, 64]))
    is_listable = "hinge" in case.name or draw.chance(0.8)
    # positives cannot be listed while a CUDA graph is captured
    listable = LISTABLE if is_listable else property(lambda pairs: False)
    monkeypatch.setattr(relation.Relation, "listable", listable)
    reads = draw.chance(0.7)  # whether the host may read numbers
    monkeypatch.setattr(itrloss.anchors, "host_may_read", lambda x: reads)
    monkeypatch.setattr(Matrix, "host_may_read", lambda matrix: reads)
    return draw.pick(["triton", "triton", "triton scores"])


# The gradients of their three sums are up to a hundred times as large as the answer's gradient, and
# each is rounded to the half type of its panel before they cancel.
ROUGH_IN_HALF = {"sharp entropy": 64, "supcon smoothed": 4}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", [name for name in ASKED if name not in SHARP])
def test_answers_of_random_batches(name, seed, few_tiles, poisoned, monkeypatch):
    case = AnswerCase(name, seed)
    if "hinge" in name and case.batch.n * case.batch.m > 150:
        return  # it takes ten seconds, as each positive has hinges with all
    kind = draw_kernels(case, monkeypatch)
    dtype = torch.float32
    if kind == "triton" and not case.bias:
        dtype = case.draw.pick([torch.float32, *HALF])
    case.vectors = [x.to(dtype) for x in case.vectors]
    if case.draw.chance(0.3):  # sums of one side come along with its gradient
        case.view = case.draw.pick(["rows", "columns"])
        case.trained = [case.view == "rows", case.view == "columns", False, False, False]
    exact = case.outcome("reference")
    plain = case.outcome("dense", dtype)
    found = case.outcome(kind, dtype, DEVICE)
    bound = 3e-5
    if dtype in HALF:
        bound = BOUNDS[dtype] * ROUGH_IN_HALF.get(name, 1)
    assert_as_accurate(found, plain, exact, f"{case}, {kind}, {dtype}", bound)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_random_batches(name, dtype, seed, few_tiles, poisoned, monkeypatch):
    bound = BOUNDS[dtype] * (ROUGH_IN_HALF.get(name, 1) if dtype in HALF else 1)
    case = LossCase(name, seed)
    case.form = "embeddings"
    case.common["reduction"] = "mean"
    case.common.pop("normalize", None)
    # Kernels round the weights of positives that are not listed as they do those of negatives.
    few = case.draw.pick([-1, 64]) if dtype == torch.float32 else 64
    monkeypatch.setattr(relation, "FEW", few)
    rounded = case.rounded(dtype)
    exact = rounded.rounded(torch.float64).outcome("dense")
    plain = rounded.outcome("tiled")
    found = rounded.outcome("triton", DEVICE)
    assert_as_accurate(found, plain, exact, f"{case}, {dtype}", bound)
