"""Processes that share a batch share its work: each does 1/W of the products of one process."""

from __future__ import annotations

import pytest
import torch
from support import sharded
from support.flops import Products
from support.processes import run

DIM = 64
ROWS = 64  # images, and texts, of each process
# Alone, the products of a small batch are found with those of its memory, also for losses that ask
# nothing of the batch; for ALBEF's, of the teacher's batch, too.
UNASKED = {"memory infonce": 1, "albef": 2}


def flops(name: str, world: int, rank: int | None) -> int:
    """Return the FLOPs of a step of one of ``world`` processes, or of one process with all data."""
    config = {
        "loss": name,
        "sizes": [(ROWS, ROWS)] * world,
        "ids": "none",
        "options": {},
        "seed": 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "D", DIM)
        parts = sharded.batch(config, torch.float32)
        memory = sharded.filled_memory(config, torch.float32)
        inputs = sharded.joined(parts, "none") if rank is None else parts[rank]
        with Products() as products:
            sharded.outcome(config, inputs, memory, gather=rank is not None)
    return products.flops


def work(rank: int, world: int, names: list[str]) -> dict[str, int]:
    return {name: flops(name, world, rank) for name in names}


@pytest.mark.slow
def test_each_process_does_its_part_of_the_work(tmp_path):
    names = list(sharded.LOSSES)
    for found in run(work, tmp_path, 2, names):
        for name in names:
            alone = flops(name, 2, None)
            alone -= UNASKED.get(name, 0) * 2 * (2 * ROWS) ** 2 * DIM
            assert found[name] == pytest.approx(alone / 2), name
