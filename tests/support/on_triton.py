"""Shared by the tests of the Triton engine: on a GPU if there is one, else in its interpreter."""

from __future__ import annotations

import pytest
import torch

from itrloss.engine import terms

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
