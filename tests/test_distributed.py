"""Two processes of ``torch.distributed``: what they put together, and gradients as of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import WORLD, both
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import itrloss

BATCH, D, STEPS = 3, 4, 3


def encoder() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, D)


def batch(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Inputs of both modalities and ids."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    first, second = (torch.randn(BATCH, 6, generator=generator) for _ in range(2))
    return first, second, torch.randint(0, 4, (BATCH,), generator=generator)


def run(model: nn.Module, batches: list[tuple[torch.Tensor, ...]], with_ids: bool) -> itrloss.CoupledMemory:
    """Backward passes over the batches, with a memory that does not fit a number of them."""
    memory = itrloss.CoupledMemory(7, D)
    criterion = itrloss.MemoryDiversityContrastiveLoss(diversity=None)
    for first, second, ids in batches:
        given = (ids, ids) if with_ids else ()
        v, w = model(torch.cat([first, second])).chunk(2)
        keys = v.detach() + 1, w.detach() - 1
        criterion(v, w, *keys, memory, *given).backward()
        memory.enqueue(*keys, *given[:1])
    return memory


def worker(rank: int, with_ids: bool) -> dict[str, Any]:
    model = DistributedDataParallel(encoder())
    memory = run(model, [batch(step, rank) for step in range(STEPS)], with_ids)
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    return {"memory": memory.state_dict(), "gradients": gradients}


@pytest.mark.slow
@pytest.mark.parametrize("with_ids", [True, False])
def test_memories_and_gradients_of_two_processes_are_those_of_one(tmp_path, with_ids):
    found = both(worker, tmp_path, with_ids)
    model = encoder()
    batches = [[batch(step, rank) for rank in range(WORLD)] for step in range(STEPS)]
    whole = [tuple(torch.cat(x) for x in zip(*ranks, strict=True)) for ranks in batches]
    memory = run(model, whole, with_ids)
    for name, value in memory.state_dict().items():
        for other in found:
            if torch.is_tensor(value):
                torch.testing.assert_close(other["memory"][name], value)
            else:
                assert other["memory"][name] == value
    assert torch.equal(found[0]["memory"]["images"], found[1]["memory"]["images"])
    if not with_ids:  # else the anchors without a negative differ in number between the processes
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[0]["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-6)


def late_worker(rank: int, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the first process loads a state; DDP hands it to the other."""
    model = nn.ModuleDict({"encoder": encoder(), "memory": itrloss.CoupledMemory(9, D)})
    model["means"] = itrloss.OnlineKMeans(4, D)
    if rank == 0:
        model.load_state_dict(state)
    DistributedDataParallel(model)
    assert len(model["memory"]) == 5 and len(model["means"]) == 4
    return model["means"].update(torch.ones(2, D) * (rank + 1)), model["means"].centroids


@pytest.mark.slow
def test_a_state_that_ddp_broadcasts_counts_too(tmp_path):
    model = nn.ModuleDict({"encoder": encoder(), "memory": itrloss.CoupledMemory(9, D)})
    model["means"] = itrloss.OnlineKMeans(4, D)
    model["memory"].enqueue(*torch.randn(2, 5, D), torch.arange(5))
    model["means"].update(torch.randn(4, D))
    (ids, centroids), (other_ids, other) = both(late_worker, tmp_path, model.state_dict())
    assert torch.equal(ids, other_ids) and torch.equal(centroids, other)
