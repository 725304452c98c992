"""Terms of the Triton engine with scales and shifts, and their gradients."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings, similarity
from support.on_triton import ASKED_TERMS, DEVICE, OF_KERNELS, assert_close

from itrloss.engine import kernels, terms
from itrloss.engine import triton as engine

pytestmark = OF_KERNELS


def test_what_losses_ask_has_a_form():
    asked = {asked_terms for asked_terms, _ in ASKED_TERMS.values()}
    assert asked == set(kernels.FORMS)


# Which sides have vectors that are trained, and how many bytes of sums may be held.
TRAINED = [((0, 1), 2**27), ((0, 1), 0), ((0,), 2**27), ((1,), 2**27), ((), 2**27)]


@pytest.mark.parametrize("scale", [0.0, -2.5, 40.0])
@pytest.mark.parametrize(("sides", "held"), TRAINED)
@pytest.mark.parametrize("one", [True, False], ids=["one scale", "one each"])
def test_the_gradient_of_a_scale(scale, sides, held, one, multiplying, few_tiles, monkeypatch):
    """It comes from the projected vectors where there are any, else from the scores.

    The shift is not 0, and some pairs are listed: neither belongs to the scale's gradient.
    """
    monkeypatch.setattr(engine, "held_bytes", lambda device: held)
    n, m = 11, 26
    v, w = embeddings(n, m)
    v[0] = 0  # scores 0 with everything
    size = 1 if one else n + m
    scales = torch.full((size,), scale)
    ids = (torch.arange(n), torch.arange(m) // 2)
    upstream = torch.linspace(-1, 2, n + m)

    def gradients(kind, dtype, device):
        """The gradients by the scale and by the vectors that are trained."""
        vectors = [x.to(device, dtype, copy=True) for x in (v, w)]
        a = scales.to(device, dtype, copy=True)
        leaves = [a, *(vectors[side] for side in sides)]
        for leaf in leaves:
            leaf.requires_grad_()
        moved_ids = [x.to(device) for x in ids]
        both = similarity(*vectors, moved_ids, kind).both
        of_negatives = both.sum(terms.softplus, scale=a, shift=-1.5)
        of_positives = both.sum_of_positives(terms.softplus, scale=-2.0)
        values = of_negatives + of_positives
        return torch.autograd.grad(values, leaves, upstream.to(values))

    wanted = gradients("reference", torch.float64, "cpu")
    found = gradients("triton", torch.float32, DEVICE)
    assert_close(found, wanted)
