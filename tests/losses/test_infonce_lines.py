"""The lines of other projects: their values and gradients, in one process and over several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.embedders import CASES, LINES
from support.processes import run
from torch import Tensor

from itrloss import PairLoss


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("engine", ["dense", "tiled"])
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
    gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
    for found, wanted in zip(gradients, case["gradients"].values(), strict=True):
        exact = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found.reshape(exact.shape), exact, rtol=0, atol=2e-9)


# Lines on scores of each query's own candidates, which no process shares; those with ids by hand,
# and one that has texts as rows.
NOT_SHARED = {
    "flagembedding-kd",
    "nemo-distill",
    "colpali-gathered",
    "colpali-negatives",
    "colpali-negatives-half",
    "clip4clip",
    "clap-weighted",  # whose weights are of the whole batch
}
SHARES = {  # of each process in the rows
    "two": (0.5, 0.5),
    "two, uneven": (0.25, 0.75),
    "two, one empty": (0.0, 1.0),
    "three": (0.34, 0.33, 0.33),
    "three, uneven": (0.25, 0.0, 0.75),
}


def part(x: Any, shares: tuple[float, ...], rank: int) -> Any:
    """A process's rows of a tensor, or of a list with an entry for each row."""
    ends = [round(sum(shares[:k]) * len(x)) for k in range(len(shares) + 1)]
    return x[ends[rank] : ends[rank + 1]]


def shared_line(name: str, shares: tuple[float, ...], rank: int) -> list[Tensor]:
    """The value of a line in a job, and its gradients by the parts of the inputs."""
    case = CASES[name]
    x = {}
    for key, numbers in case["inputs"].items():
        whole = torch.tensor(numbers, dtype=torch.float64)
        x[key] = part(whole, shares, rank).clone().requires_grad_()
    if name == "gist-negatives":  # the same for each query, so that nobody has a part of them
        for key in ("negatives", "guide_negatives"):
            x[key] = torch.tensor(case["inputs"][key], dtype=torch.float64).requires_grad_()
    options = {}
    for key, value in case["options"].items():
        options[key] = part(value, shares, rank) if isinstance(value, list) else value
    if name == "nemo-same-document":
        options["document_ids"] = [
            number
            for own in part(torch.tensor(case["options"]["document_ids"]).view(-1, 3), shares, rank)
            for number in own.tolist()
        ]
    value = LINES[name](x, options)
    leaves = [x[key] for key in case["gradients"]]
    gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
    return [value.detach(), *gradients]


def lines_of_a_process(rank: int, shares: tuple[float, ...]) -> dict[str, list[Tensor]]:
    # whatever a line's losses were made with
    PairLoss.gather = property(lambda loss: True, lambda loss, value: None)  # type: ignore
    return {name: shared_line(name, shares, rank) for name in LINES if name not in NOT_SHARED}


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
def test_lines_of_other_projects_over_processes(shares, tmp_path):
    """Their values and gradients are those of one process, with even and with uneven parts."""
    world = len(SHARES[shares])
    every = run(lines_of_a_process, tmp_path, SHARES[shares], world=world)
    for name in every[0]:
        case = CASES[name]
        for value, *_ in (found[name] for found in every):
            assert abs(float(value) - case["value"]) < 2e-9, name
        for k, (key, wanted) in enumerate(case["gradients"].items()):
            exact = torch.tensor(wanted, dtype=torch.float64)
            gradients = [found[name][1 + k] for found in every]
            if name == "gist-negatives" and "negatives" in key:
                grad = sum(gradients) / world
            else:
                grad = torch.cat(gradients) / world
            torch.testing.assert_close(
                grad.reshape(exact.shape), exact, rtol=0, atol=2e-9, msg=f"{name} {key}"
            )
