"""Terms, and their formulas in the reference of the tests."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.cases import ENGINES, embeddings, returned_for_a_test, similarity
from support.reference import TERMS, Reference, formula

from itrloss.engine import terms
from itrloss.engine.terms import hinge

OF_THE_LIBRARY = {x.__name__: x for x in vars(terms).values() if isinstance(x, terms.Term)}
OF_ONE_NUMBER = [name for name, term in OF_THE_LIBRARY.items() if term.slope is not None]


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_the_reference_has_every_term_of_the_library(name):
    term = OF_THE_LIBRARY[name]
    scores = torch.linspace(-1.2, 1.2, 25, dtype=torch.float64)
    scores_and_parameters = inspect.signature(term.value).parameters
    number_of_parameters = len(scores_and_parameters) - 1
    params = torch.tensor([0.5, 1.5], dtype=torch.float64)[:number_of_parameters]
    own_formula = formula(term)
    assert own_formula is not term
    wanted = own_formula(scores, *params)
    torch.testing.assert_close(term(scores, *params), wanted)


def test_the_reference_refuses_a_term_of_the_library_without_a_formula(monkeypatch):
    reference = Reference.from_scores(torch.eye(3, dtype=torch.float64))
    reference.sum(hinge, 0.1)
    monkeypatch.delitem(TERMS, "hinge")
    with pytest.raises(LookupError, match="TERMS has no formula of the term 'hinge'"):
        reference.sum(hinge, 0.1)


@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_a_slope_is_the_derivative(name):
    term = OF_THE_LIBRARY[name]
    z = torch.linspace(-1.3, 1.3, 26, dtype=torch.float64, requires_grad=True)
    total = term(z).sum()
    (wanted,) = torch.autograd.grad(total, z)
    slope = term.slope(z.detach().clone())
    of_each = slope * torch.ones_like(wanted)  # a slope may be one number
    torch.testing.assert_close(of_each, wanted)


@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_a_function_that_is_zero_somewhere_says_where(name):
    """Pairs that do not count are then masked before the function, which may overflow."""
    term = OF_THE_LIBRARY[name]
    places = []
    for z in (-torch.inf, 0.0):
        value = term(torch.tensor([z]))
        slope = term.slope(torch.tensor([z])) * torch.ones(1)
        if value.item() == slope.item() == 0:
            places.append(z)
    assert term.zero in (places or [None])


@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_values_and_slopes_are_those_that_come_one_by_one(name):
    term = OF_THE_LIBRARY[name]
    z = torch.linspace(-0.9, 1.3, 26, dtype=torch.float64)
    values, slopes = term.both(z.clone())
    torch.testing.assert_close(values, term(z))
    torch.testing.assert_close(
        slopes * torch.ones_like(z), term.slope(z.clone()) * torch.ones_like(z)
    )


@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_a_term_and_its_slope_do_not_overflow_on_the_way(name):
    """In float32 they are finite where their exact values are within its range."""
    term = OF_THE_LIBRARY[name]
    z = torch.tensor([-300.0, -100.0, 100.0, 300.0])
    for function in (term, term.slope):
        exact = function(z.double()).float()
        torch.testing.assert_close(function(z.clone()), exact, rtol=1e-2, atol=1e-37)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_term_does_not_lose_what_it_returns(engine):
    """The sum over a single column must not alias the term's return value, here its parameter."""
    weight = torch.linspace(0.1, 1.0, 5, dtype=torch.float64)
    given = weight.clone()
    v, w = embeddings(5, 1)
    ids = (torch.tensor([1, 1, 1, 3, 9]), torch.tensor([1]))
    sim = similarity(v, w, ids, engine)
    found = sim.sum(returned_for_a_test, given)
    assert torch.equal(given, weight)
    is_negative = torch.tensor([0, 0, 0, 1, 1])
    torch.testing.assert_close(found, weight * is_negative)
