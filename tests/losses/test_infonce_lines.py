"""The lines of other projects: their values and gradients."""

from __future__ import annotations

import pytest
import torch
from support.cases import of_engines
from support.embedders import CASES, LINES
from support.versions import grad_or_zeros

from itrloss import PairLoss


@of_engines
@pytest.mark.parametrize("name", LINES)
def test_lines_of_other_projects(name, engine, small_tiles, monkeypatch):
    """Their values and gradients, in float64 and with ten digits."""
    # whatever a line's losses were made with
    chosen = property(lambda loss: engine, lambda loss, value: None)
    monkeypatch.setattr(PairLoss, "engine", chosen, raising=False)
    case = CASES[name]
    x = {}
    for key, numbers in case["inputs"].items():
        x[key] = torch.tensor(numbers, dtype=torch.float64).requires_grad_()
    value = LINES[name](x, case["options"])
    assert abs(value.item() - case["value"]) < 2e-9
    leaves = [x[key] for key in case["gradients"]]
    gradients = grad_or_zeros(value, leaves)
    for found, wanted in zip(gradients, case["gradients"].values(), strict=True):
        exact = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found.reshape(exact.shape), exact, rtol=0, atol=2e-9)
