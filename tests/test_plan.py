"""What processes compute and exchange, counted, and what ``itrloss plan`` says of it."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
import torch.distributed as dist
from flops import Products
from processes import run
from torch.autograd.graph import saved_tensors_hooks

from itrloss import plan
from itrloss.cli import main
from itrloss.engine import matrix, processes

D, ROWS = 512, 64  # of a process
KEYS = {
    "InfoNCELoss": "infonce",
    "SigmoidLoss": "sigmoid",
    "HubnessAwareLoss": "hal",
    "DiversityContrastiveLoss": "dcl",
}


# Embeddings (ROWS, D) that autograd holds with the ring: images and texts, or what else there is.
EMBEDDINGS = {
    "infonce negatives": 3,
    # The gradients of images and texts by the memory, found in the forward pass, and the keys if
    # positives are of them.
    "mdcl batch": 4, "mdcl": 6, "uto": 6,
    # unit vectors, too; all heads share those of texts
    **dict.fromkeys(sharded.SETS, 2 * (sharded.HEADS + 1)),
}  # fmt: skip
# Tiles (ROWS, ROWS) that autograd holds for the gradient of a term without derivatives of its own,
# within backward.
TILES = {"complementary": 5, "circle": 3}
# FLOPs in parts of one process's. The further negatives have no gradient. One process finds that of
# the images along with their sums, in 2 products; the ring, which would have to hold it until
# backward, takes 3. Both take 4 for texts.
RING = {"infonce negatives": 7 / 6}


class Saved:
    """What autograd saved, until it is freed."""

    def __init__(self, x: torch.Tensor, counts: Counts):
        self.x, self.counts, self.storage = (
            x,
            counts,
            (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()),
        )
        counts.held[self.storage] += 1
        counts.saved = max(
            counts.saved, sum(size for (_, size), number in counts.held.items() if number)
        )

    def __del__(self):
        self.counts.held[self.storage] -= 1


class Counts(Products):
    """Counter of FLOPs of products, bytes that this process sends, exchanges of embeddings, and
    what autograd holds.
    """

    def __init__(self):
        super().__init__()
        self.sent = self.exchanges = self.saved = 0
        self.held: Counter[tuple[int, int]] = Counter()  # by address and size of the storage

    def collective(self, function: Any, *args: Any, group: Any, **options: Any) -> Any:
        """Count and run a collective; those of numbers are counted as the usual algorithms on a
        ring send them.
        """
        name, others, sent = getattr(function, "__name__", ""), dist.get_world_size(group) - 1, 0
        if name == "_batch":
            sent = sum(x.tensor.nbytes for x in args[0] if x.op is dist.isend)
        elif "reduce_scatter" in name:
            sent = others * args[0].nbytes
        elif "gather" in name:
            sent = others * args[1].nbytes
        elif name == "all_reduce":
            sent = 2 * others * args[0].nbytes // (others + 1)
        self.sent += sent
        self.exchanges += sent >= 4 * ROWS * D
        return self.communicate(function, *args, group=group, **options)

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        self.communicate = processes.communicate
        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(processes, "communicate", self.collective)
            yield self


def counted(rank: int, world: int, name: str, **options: Any) -> dict[str, float]:
    """The counts of a step of one process; of a process alone for ``rank`` -1."""
    config = {
        "loss": name,
        "sizes": [(ROWS, ROWS)] * world,
        "ids": "none",
        "options": {},
        "seed": 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "D", D)
        parts, memory = (
            sharded.batch(config, torch.float32),
            sharded.filled_memory(config, torch.float32),
        )
        inputs = sharded.joined(parts, "none") if rank < 0 else parts[rank]
        with (
            Counts().counting() as counts,
            saved_tensors_hooks(lambda x: Saved(x, counts), lambda saved: saved.x),
        ):
            sharded.outcome(config, inputs, memory, **options)
    return {name: getattr(counts, name) for name in ("flops", "sent", "exchanges", "saved")}


def worker(rank: int, world: int, names: list[str]) -> dict[str, dict[str, float]]:
    matrix.MEMORY_BUDGET = plan.MEMORY_BUDGET = 0  # of processes that end after this
    found = {}
    for name in names:
        options = {"engine": "dense"} if name != "orthogonal" else {}
        found[f"{name} dense all-gather"] = counted(
            rank, world, name, gather="all-gather", **options
        )
        # a guide's scores are not sent around
        rings = name not in (*sharded.SAMPLES, *sharded.GUIDED)
        if rings:
            found[f"{name} tiled ring"] = counted(rank, world, name, gather="ring", engine="tiled")
        # of the others, each with each engine and each schedule
        if name in KEYS.values() or (not rings and options):
            found[f"{name} tiled all-gather"] = counted(
                rank, world, name, gather="all-gather", engine="tiled"
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_processes_compute_and_exchange_what_is_planned(tmp_path, world, monkeypatch):
    names = [*sharded.LOSSES] if world == 2 else [*KEYS.values()]
    found = run(worker, tmp_path, world, names, world=world)
    size, wholes = ROWS * world, {}
    for key in found[0]:
        name, engine, schedule = key.rsplit(" ", 2)
        if (name, engine) not in wholes:
            wholes[name, engine] = counted(
                -1, world, name, **({"engine": engine} if name != "orthogonal" else {})
            )
        whole = wholes[name, engine]
        for counts in (x[key] for x in found):
            more = RING.get(name, 1) if schedule == "ring" else 1
            assert counts["flops"] == pytest.approx(more * whole["flops"] / world), key
            # and a few numbers for each row of this process and column of all
            if schedule == "ring":
                numbers = 20 * (sharded.HEADS if name in sharded.SETS else 1) * (ROWS + size)
                tiles = TILES.get(name, 0) * ROWS * ROWS
                assert counts["saved"] <= 4 * (
                    EMBEDDINGS.get(name, 2) * ROWS * D + tiles + numbers
                ), key
    for name, passes in plan.LOSSES.items():
        for engine in ("dense", "tiled"):
            monkeypatch.setattr(plan, "MEMORY_BUDGET", 0 if engine == "tiled" else 2**28)
            for planned in plan.plan(world, size, size, D, 4, passes, accelerator=False):
                counts = [x.get(f"{KEYS[name]} {engine} {planned.schedule}") for x in found]
                for x in filter(None, counts):
                    assert x["flops"] == pytest.approx(planned.flops, rel=0.05)
                    assert x["sent"] == pytest.approx(planned.sent, rel=0.1)
                    assert x["exchanges"] == planned.exchanges


def test_a_plan_is_printed(capsys):
    assert main(["plan", "--batch", "65536", "--dim", "768", "--gpus", "8", "1024"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "65,536 images" in lines[0] and [line.split()[:2] for line in lines[2:]] == [
        ["8", "all-gather*"], ["8", "ring"], ["1024", "all-gather*"], ["1024", "ring"]
    ]  # fmt: skip
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    "wrong", ["--gpus 1", "--gpus 2 --latency 0", "--gpus 2 --batch 0", "--gpus 2 --texts -1"]
)
def test_impossible_plans_are_refused(wrong, capsys):
    assert main(f"plan --batch 8 --dim 4 {wrong}".split()) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("name", plan.LOSSES)
def test_accelerators_take_a_pass_for_the_maxima(name, monkeypatch):
    monkeypatch.setattr("itrloss.anchors.host_may_read", lambda x: False)  # as there
    v, w = torch.randn(2, 30, 200).requires_grad_()
    with Products() as products:
        sharded.PAIR[KEYS[name]](engine="tiled")(v, w).backward()
    forward, backward, maxima = plan.LOSSES[name]
    assert products.flops == 2 * 30 * 30 * 200 * (forward + maxima + 3 * backward)


def test_the_plans_in_the_docs_are_those_of_the_command(capsys):
    text = (Path(__file__).parent.parent / "docs" / "distributed.rst").read_text()
    commands = re.findall(r"^   \$ itrloss (plan .*)\n((?:   [^$\n].*\n)+)", text, re.MULTILINE)
    assert len(commands) == 2
    for command, output in commands:
        assert main(command.split()) == 0
        assert textwrap.dedent(output) == capsys.readouterr().out
