"""Shared by the tests of the Triton engine: on a GPU if there is one, else in its interpreter."""

from __future__ import annotations

import pytest
import torch

from itrloss import Similarity
from itrloss.engine import terms
from support.answers import ANSWERS, evaluate
from support.cases import case

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


HALF = [torch.bfloat16, torch.float16]

# Marks of each module. Warnings come from masked lanes, whose results are not stored.
OF_KERNELS = [
    pytest.mark.usefixtures("a_quick_interpreter"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
    ),
]


def moved(*given):
    return [None if x is None else x.to(DEVICE) for x in given]


# Answers without a function here are computed by others, or not by the engine.
OTHERS = (
    "hardest",
    "log1p",
    "log1p relu",
    "likelihood",
    "hinge",
    "straight lines",
    "plane of negatives",
)


ASKED = [
    name
    for name in ANSWERS
    if "positives" not in name and name not in OTHERS and "alone" not in name
]


# The term of a question, a key of `kernels.FORMS`, and which of its values get a gradient.
ASKED_TERMS = {
    "exponential": (terms.exponential, {"scale": True}),
    "information": (terms.information, {"scale": True, "shift": True}),
    "excess": (terms.excess, {"shift": True}),
    "softplus": (terms.softplus, {"scale": True, "shift": True}),
    "square": (terms.square, {"scale": True, "shift": True}),
    "identity": (terms.identity, {"scale": True, "shift": True}),
    "log1p": (terms.log1p_clamp, {"scale": True}),
    "log1p relu": (terms.log1p_relu, {"shift": True}),
}


def compare(name, shape, view=lambda sim: sim.both, on_scores=False, **options):
    """Compare errors with those of PyTorch in float32, dense in two orders of sums and in tiles.

    A single order may have no rounding error at all, as on some processors for the few negatives of
    "no positive".
    """
    v, w, ids, grads = case(shape)

    def outcome(v, w, engine, question=ANSWERS[name], ids=ids):
        return evaluate(question, v, w, ids, engine, grads, view, **options)

    def of_scores(anchors, p):
        sim = Similarity.from_scores(anchors.scores(), *moved(*ids), engine="triton")
        return ANSWERS[name](sim, p)

    v = v.float()
    w = w.float()
    exact = outcome(v.double(), w.double(), "reference")
    in_order = outcome(v, w, "dense")
    turned = outcome(v.flip(1), w.flip(1), "dense")
    turned = [x.flip(1) if x.dim() == 2 else x for x in turned]
    in_tiles = outcome(v, w, "tiled")
    if on_scores:
        ours = outcome(*moved(v, w), "dense", of_scores, moved(*ids))
    else:
        ours = outcome(*moved(v, w), "triton", ids=moved(*ids))
    for got, wanted, *others in zip(ours, exact, in_order, turned, in_tiles, strict=True):
        exists = wanted.isfinite()
        assert torch.equal(got.cpu().isfinite(), exists)
        noise = max(distance(other, wanted) for other in others)
        size = wanted[exists].norm()
        assert distance(got, wanted) <= 4 * noise + 2e-6 * size + 1e-7


def distance(got, wanted):
    """Return the norm of the difference, where what is wanted is finite."""
    difference = got.cpu().double() - wanted
    return difference[wanted.isfinite()].norm()


def assert_near(found, wanted, relative, absolute=0.0):
    """Compare tensors of any device and precision with exact ones, by norms."""
    for got, exact in zip(found, wanted, strict=True):
        assert distance(got, exact) <= relative * exact.norm() + absolute


def assert_close(found, wanted, rtol=1e-4, atol=1e-5):
    """Compare tensors of any device and precision with exact ones, entry by entry."""
    found = [x.cpu().double() for x in found]
    torch.testing.assert_close(found, [*wanted], rtol=rtol, atol=atol)
