"""The examples in docstrings run, and every public loss and re-ranker has one."""

import doctest
import inspect

import pytest
import torch
from support.losses_registry import public_losses

import itrloss
from itrloss import rerank

METHODS = [
    name
    for name in rerank.__all__
    if isinstance(getattr(rerank, name), type)
    and issubclass(getattr(rerank, name), rerank.Reranker)
    and name != "Reranker"
]
CLASSES = [getattr(itrloss, name) for name in sorted(public_losses())]
CLASSES += [getattr(rerank, name) for name in METHODS]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_docstrings_have_an_example_that_runs_and_say_what_is_related(kind):
    text = inspect.getdoc(kind)
    assert "\nRelations:\n" in text
    example = doctest.DocTestParser().get_doctest(text, {}, kind.__name__, None, None)
    assert example.examples
    torch.manual_seed(0)
    failures = doctest.DocTestRunner().run(example)
    assert failures.failed == 0
