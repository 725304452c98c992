"""A run of two processes equals one of a single process with twice the batch."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import drawn
from support.processes import WORLD, run, survivors

from examples.retrieval.config import Config
from examples.retrieval.data import Batch
from examples.retrieval.encoders import BatchNorm
from examples.retrieval.train import Trainer

SYSTEMS: dict[str, dict[str, Any]] = {
    "infonce": {"loss": "infonce", "loss_options": {"learnable": True}, "views": "regions+whole"},
    "triplet": {"loss": "triplet"},
    "user": {"loss": "uto", "enhancement": "sge", "loss_options": {"scale": 20.0}},
    "coder": {"loss": "coder", "concepts": 6, "loss_options": {"clusters": 4}},
    "dvse": {"loss": "dvse", "heads": 2},
    "chunks": {"loss": "infonce", "micro_batch": 8, "captions_per_image": 2},
}


@pytest.fixture
def small(config, tmp_path) -> Config:
    """Settings of runs that differ in nothing that depends on the number of processes."""
    root = drawn.features(tmp_path, {"train": 30, "dev": 12})
    for split in ("train", "dev"):
        # All captions differ, because rounding would decide between equal hardest negatives.
        file = root / f"{split}_caps.txt"
        lines = file.read_text().splitlines()
        file.write_text("".join(f"{line} {number}\n" for number, line in enumerate(lines)))
    return replace(config, data=str(root), dim=8, epochs=2, lr=1e-3, momentum=0.9, **drawn.DRY)


def settings(small: Config, out: str, system: str, batch_size: int) -> Config:
    return replace(small, out=out, batch_size=batch_size, **SYSTEMS[system])


def outcome(config: Config) -> dict[str, Any]:
    trainer = Trainer(config)
    if config.micro_batch:
        for layer in trainer.model.modules():
            # its statistics would be those of a few samples
            if isinstance(layer, BatchNorm):
                layer.eval().train = lambda mode=True, layer=layer: layer
    found = trainer.run()
    state = dict(trainer.model.state_dict())
    for name, x in trainer.objective.state_dict().items():
        if "classifier" in name or name.endswith("log_scale"):  # what the loss learns
            state[name] = x
    return {"history": found["history"], "metrics": found["metrics"], "state": state}


def worker(rank: int, small: Config, out: str) -> dict[str, Any]:
    return {name: outcome(settings(small, f"{out}/{name}", name, 16)) for name in SYSTEMS}


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_twice_the_batch(small, tmp_path):
    (tmp_path / "exchange").mkdir()
    first, second = run(worker, tmp_path / "exchange", small, str(tmp_path / "two"))
    for name in SYSTEMS:
        alone = outcome(settings(small, str(tmp_path / "one" / name), name, 16 * WORLD))
        found = first[name]
        assert found["metrics"] == second[name]["metrics"]
        for mine, other in zip(found["history"], alone["history"], strict=True):
            assert mine["step"] == other["step"]
            assert mine["rsum"] == pytest.approx(other["rsum"], abs=1e-6), name
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4), name
        for key, wanted in alone["state"].items():
            assert torch.equal(found["state"][key], second[name]["state"][key]), (name, key)
            torch.testing.assert_close(
                found["state"][key],
                wanted,
                rtol=2e-3,
                atol=2e-4,
                msg=lambda m, what=f"{name} {key}": f"{what}: {m}",
            )


# --- killed runs ----------------------------------------------------------------------------------

BATCH, KILLED = 48, 5  # samples in all processes; the step of six in which a process is killed
CASES = [("user", 0.4), ("user", 0.0), ("coder", 0.0)]  # systems and their dropout


def resumable(small: Config, out: str, system: str, dropout: float, world: int) -> Config:
    config = settings(small, out, system, BATCH // world)
    return replace(config, feature_dropout=dropout, word_dropout=dropout, save_steps=2, resume=True)


def trained(
    rank: int, runs: list[tuple[Config, str, str, float]], world: int
) -> list[dict[str, Any]]:
    found = []
    for case in runs:
        result = outcome(resumable(*case, world))
        for line in result["history"]:
            del line["seconds"]
        found.append(result)
    return found


def killed(rank: int, *run: Any) -> bool:
    """Return, in the process that is left, whether its error came at once."""
    trainer = Trainer(resumable(*run, WORLD))
    take_step = trainer.train_step

    def step(batch: Batch) -> float:
        if rank == 1 and trainer.total_steps == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(batch)

    trainer.train_step = step
    # by the first batch normalisation that waits for the other process
    with pytest.raises(RuntimeError):
        trainer.run()
    return trainer.total_steps == KILLED


class Runs:
    """Runs of all cases, in folders of one place."""

    def __init__(self, small: Config, root: Path) -> None:
        self.small = small
        self.root = root

    def of(self, name: str) -> list[tuple[Config, str, str, float]]:
        folder = self.root / name
        return [(self.small, f"{folder}/{case[0]} {case[1]}", *case) for case in CASES]

    def exchange(self, name: str) -> Path:
        folder = self.root / f"exchange of {name}"
        folder.mkdir()
        return folder

    def resumed(self, world: int) -> list[list[dict[str, Any]]]:
        """What each of several processes finds when they resume the killed runs."""
        name = str(world)
        shutil.copytree(self.root / "killed", self.root / name)
        if world == 1:
            return [trained(0, self.of(name), world)]
        return run(trained, self.exchange(name), self.of(name), world, world=world)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["history"] == wanted["history"]
    for name, x in wanted["state"].items():
        assert torch.equal(found["state"][name], x), name


@pytest.mark.slow
def test_a_killed_run_of_two_processes_resumes_in_any_number(small, tmp_path):
    runs = Runs(small, tmp_path)
    wholes, _ = run(trained, runs.exchange("whole"), runs.of("whole"), WORLD)
    left = survivors(killed, runs.exchange("killed"), runs.of("killed"), world=WORLD, timeout=60.0)
    assert left == [[True, None]] * len(CASES)
    for _, out, *_ in runs.of("killed"):
        state = torch.load(Path(out, "last.pt"))
        assert (state["epoch"], state["step"]) == (1, 1)
    for world in (1, 2, 3):
        first, *others = runs.resumed(world)
        for other in others:
            for found, same in zip(other, first, strict=True):
                assert_same(found, same)
        for (_, dropout), found, whole in zip(CASES, first, wholes, strict=True):
            if world == WORLD:
                assert_same(found, whole)
            elif not dropout:
                losses = [line["loss"] for line in found["history"]]
                wanted = [line["loss"] for line in whole["history"]]
                assert losses == pytest.approx(wanted, rel=1e-5)
    config = resumable(*runs.of("killed")[0], 1)
    message = "was trained with batch_size of all processes = 48: cannot resume"
    with pytest.raises(ValueError, match=message):
        Trainer(replace(config, batch_size=47)).run()
