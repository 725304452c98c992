"""Small cases under pytest-benchmark: ``pytest benchmarks --benchmark-enable``; without that, each runs once.

The cases, their inputs and their variants are those of ``itrloss bench``.
"""

import pytest
import torch

from itrloss.bench.cases import LOSSES, Case, problem
from itrloss.bench.runner import step

SHAPES = {"pairs": (128, 128, 256), "memory": (128, 1024, 256), "sets": (64, 4, 128), "prototypes": (64, 1024, 128)}


@pytest.mark.parametrize("variant", ["ours", "eager", "floor"])
@pytest.mark.parametrize("loss", LOSSES)
def test_forward_and_backward(benchmark, loss, variant):
    case = Case(loss, SHAPES[LOSSES[loss].kind])
    given = problem(case)
    benchmark.group = str(case)
    benchmark(step(variant, case, given))
    if variant != "floor":
        assert all(torch.isfinite(x.grad).all() and x.grad.any() for x in given.leaves)
