"""Terms of the Triton engine with scales and shifts, and their gradients."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings, make_ids, pairwise, similarity
from support.on_triton import ASKED_TERMS, DEVICE, OF_KERNELS, assert_close

from itrloss.engine import kernels, terms, tiled
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.question import Question
from itrloss.engine.relation import IGNORE_ID, Relation

pytestmark = OF_KERNELS
SHAPE = 7, 18


def tensors(gradients):
    """Return the gradients that were asked for."""
    return [x for x in gradients if isinstance(x, torch.Tensor)]


def ids_with_ignored():
    """Ids of rows and columns, of which one row and two columns are ignored."""
    rows, cols = make_ids("random", *SHAPE)
    rows[2] = IGNORE_ID
    cols[5] = IGNORE_ID
    cols[17] = IGNORE_ID
    return rows, cols


def question_of(key, over, sides, scale, shift, dtype, device):
    """Return a question about a small matrix, and the inputs of the matrix."""
    given = []
    for vectors in embeddings(*SHAPE):
        x = vectors.to(device, dtype)
        inverse_norms = 1 / x.norm(dim=1, keepdim=True)
        given.append(Side(x, inverse_norms, None, None))
    ids = [x.to(device) for x in ids_with_ignored()]
    pairs = Relation(SHAPE, ids, torch.device(device))
    asked_terms, _ = ASKED_TERMS[key]
    if isinstance(scale, torch.Tensor):
        scale = scale.to(device, dtype)
    shift = shift.to(device, dtype)
    question = Question(pairs, sides, asked_terms, over, scale, shift)
    return question, Inputs(*given, None)


def compare_terms(key, over, sides, scale, shift):
    """Compare sums, and gradients by vectors and parameters, with the tiled engine in float64."""
    _, trained = ASKED_TERMS[key]
    anchors = sum(SHAPE[side] for side in sides)
    grad = torch.linspace(-1, 2, anchors)
    needs = tiled.Needs(True, True, False, False, **trained)

    question, inputs = question_of(key, over, sides, scale, shift, torch.float64, "cpu")
    gradients = tiled.gradients(question, inputs, None, grad.double(), needs)
    wanted = [tiled.sums(question, inputs, None), *tensors(gradients)]
    assert len(wanted) == 3 + len(trained)
    for x in wanted:
        assert x.any()

    question, inputs = question_of(key, over, sides, scale, shift, torch.float32, DEVICE)
    gradients = engine.gradients(question, inputs, grad.to(DEVICE), needs, None)
    found = [engine.sums(question, inputs), *tensors(gradients)]
    rtol = 1e-3 if key == "log1p" else 2e-4  # the logarithm of 1 - FLOOR, which rounds
    assert_close(found, wanted, rtol, 2e-5)


OVER = ["negatives", "all", "positives"]
SIDES = [(0, 1), (0,), (1,)]


@pytest.mark.parametrize(
    ("key", "over", "shared", "sides"),
    pairwise(key=ASKED_TERMS, over=OVER, shared=[True, False], sides=SIDES),
)
def test_terms_over_pairs_with_ignored_ids(
    key, over, shared, sides, multiplying, few_tiles, poisoned
):
    """z = scale S + shift has both signs: some functions are 0 for one of them."""
    anchors = sum(SHAPE[side] for side in sides)
    size = 1 if shared else anchors
    scale = torch.linspace(2.0, 0.5, size, dtype=torch.float64)
    shift = torch.linspace(0.1, -0.1, size, dtype=torch.float64)
    if key == "log1p":  # steep near -1, and constant below
        scale = scale / 2
        shift[1:3] = -5
    compare_terms(key, over, sides, scale, shift)


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
