"""Processes that share a batch share its work: each does 1/W of the products of one process."""

from __future__ import annotations

import pytest
from support.drawn_losses import LossCase
from support.draws import Batch
from support.flops import Products
from support.losses_registry import REGISTRY
from support.processes import run

ROWS = 64  # images, and texts, of each process
# Alone, the products of a small batch are found with those of its memory, also for losses that ask
# nothing of the batch; for ALBEF's, of the teacher's batch, too.
UNASKED = {"memory infonce": 1, "albef": 2, "mdcl implicit": 1, "moco": 1}
LOSSES = [name for name, entry in REGISTRY.items() if entry.takes != "features"]  # a gate


class LargeCase(LossCase):
    dim = 64


def flops(name: str, world: int, rank: int | None) -> int:
    """Return the FLOPs of a step of one of ``world`` processes, or of one process with all data."""
    pairs = world * ROWS
    case = LargeCase(name, 0, in_processes=True, batch=Batch("pairs", pairs, pairs))
    case.common = {}
    case.form = "embeddings"
    if rank is not None:
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        case = case.part(own, own)
    leaves = [x.requires_grad_() for x in case.input]
    with Products() as products:
        (value,) = case.ours(case.loss("auto", gather=rank is not None), leaves)
        value.backward()
    return products.flops


def work(rank: int, world: int, names: list[str]) -> dict[str, int]:
    return {name: flops(name, world, rank) for name in names}


@pytest.mark.slow
def test_each_process_does_its_part_of_the_work(tmp_path):
    names = [name for name in LOSSES if LossCase(name, 0, in_processes=True).can_be_shared]
    for found in run(work, tmp_path, 2, names):
        for name in names:
            alone = flops(name, 2, None)
            alone -= UNASKED.get(name, 0) * 2 * (2 * ROWS) ** 2 * LargeCase.dim
            assert found[name] == pytest.approx(alone / 2), name
