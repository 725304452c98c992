"""Two processes of ``torch.distributed``: what they put together, and gradients as of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import itrloss

WORLD, BATCH, D, STEPS = 2, 3, 4, 3


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


def worker(rank: int, folder: str, with_ids: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = DistributedDataParallel(encoder())
    memory = run(model, [batch(step, rank) for step in range(STEPS)], with_ids)
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    torch.save({"memory": memory.state_dict(), "gradients": gradients}, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("with_ids", [True, False])
def test_memories_and_gradients_of_two_processes_are_those_of_one(tmp_path, with_ids):
    mp.spawn(worker, (str(tmp_path), with_ids), nprocs=WORLD)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    model = encoder()
    both = [[batch(step, rank) for rank in range(WORLD)] for step in range(STEPS)]
    whole = [tuple(torch.cat(x) for x in zip(*ranks, strict=True)) for ranks in both]
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
