"""Parameters of terms: scales and shifts, of all anchors or of each, and their gradients."""

from __future__ import annotations

import pytest
import torch
from support.answers import assert_equal, gradients
from support.cases import ENGINES, SHAPES, case, pairwise, plane, similarity

from itrloss.engine.terms import hinge, negative_log_likelihood, softplus


@pytest.mark.parametrize(
    ("engine", "shape", "term", "over", "shared"),
    pairwise(
        engine=ENGINES,
        shape=SHAPES,
        term=[softplus, negative_log_likelihood, plane],
        over=["positives", "negatives"],
        shared=[True, False],
    ),
)
def test_gradients_of_two_parameters(engine, shape, term, over, shared, small_tiles):
    v, w, ids, grads = case(shape)
    size = 1 if shared else len(v) + len(w)

    def found_by(engine):
        first = torch.linspace(0.5, 2.0, size, dtype=torch.float64, requires_grad=True)
        second = torch.linspace(0.7, 2.0, size, dtype=torch.float64, requires_grad=True)
        both = similarity(v, w, ids, engine).both
        ask = both.sum if over == "negatives" else both.sum_of_positives
        if term is softplus:
            sums = ask(term, scale=first, shift=second)
        else:
            sums = ask(term, first, second)
        return torch.autograd.grad(sums, (first, second), torch.cat(grads))

    assert_equal(found_by(engine), found_by("reference"))


ASKED = {
    "logsumexp": lambda anchors, scale: anchors.logsumexp(scale),
    "logsumexp shifted": lambda anchors, scale: anchors.logsumexp(40 * scale),
    "hinge": lambda anchors, scale: anchors.sum(hinge, scale / 9),
}


@pytest.mark.parametrize(
    ("name", "engine", "shape", "of"),
    pairwise(
        name=ASKED,
        engine=ENGINES,
        shape=["wide", "primes"],
        of=["both", "rows", "rows of a memory"],
    ),
)
def test_one_scale_for_all_gets_its_gradient(name, engine, shape, of, small_tiles):
    """A memory has no gradient; that of the rows is computed in the forward pass."""
    v, w, ids, grads = case(shape)

    def outcome(engine):
        scale = torch.tensor(2.5, dtype=torch.float64)
        x, y = v.clone(), w.clone()
        leaves = [x, scale] if of == "rows of a memory" else [x, y, scale]
        for leaf in leaves:
            leaf.requires_grad_()
        sim = similarity(x, y, ids, engine)
        values = ASKED[name](sim.both if of == "both" else sim, scale)
        return [values.detach(), *gradients(values, leaves, torch.cat(grads))]

    assert_equal(outcome(engine), outcome("reference"))


SCALES = [torch.tensor(3.0), torch.tensor([3.0]), torch.linspace(2, 4, 5)]


@pytest.mark.parametrize("given", SCALES, ids=["number", "one", "each"])
@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_a_scale_learns_beside_columns_that_do_not(engine, given):
    v, w, ids, grads = case((5, 7, "random"))

    def found_by(engine):
        leaves = [x.double().requires_grad_() for x in (v.clone(), given.clone())]
        values = similarity(leaves[0], w, ids, engine).logsumexp(leaves[1])
        return gradients(values, leaves, grads[0])

    assert_equal(found_by(engine), found_by("reference"))
