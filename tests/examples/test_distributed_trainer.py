"""A run of two processes equals one of a single process with twice the batch."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.retrieval.config import Config
from examples.retrieval.data import Batch
from examples.retrieval.encoders import BatchNorm
from examples.retrieval.train import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.processes import WORLD, both, run, survivors

CAPTIONS = [
    "a brown dog runs",
    "two dogs on grass",
    "a black dog jumping",
    "a man rides a bike",
    "a woman sits",
]
SYSTEMS: dict[str, dict[str, Any]] = {
    "infonce": {"loss": "infonce", "loss_options": {"learnable": True}, "views": "regions+whole"},
    "triplet": {"loss": "triplet"},
    "user": {"loss": "uto", "enhancement": "sge", "loss_options": {"scale": 20.0}},
    "coder": {"loss": "coder", "concepts": 6, "loss_options": {"clusters": 4}},
    "dvse": {"loss": "dvse", "heads": 2},
    "pvse": {"loss": "pvse", "heads": 2},
    "chunks": {"loss": "infonce", "micro_batch": 8, "captions_per_image": 2},
}
# The gradients of PVSE's attention over words are tiny here (4e-5 in norm) and depend on rounding,
# which decides between nearly equal pairs of embeddings, but Adam scales them to steps of the usual
# size.
ROUNDED = {"pvse": ("text.heads.attention",)}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Data set of 30 + 12 images of 4 regions, with global features."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, n in {"train": 30, "dev": 12}.items():
        np.save(root / f"{split}_ims.npy", rng.normal(size=(n, 4, 6)).astype(np.float32))
        np.save(root / f"{split}_global.npy", rng.uniform(size=(n, 5)).astype(np.float32))
        # All captions differ, because rounding would decide between equal hardest negatives.
        lines = [f"{CAPTIONS[(i + c) % 5]} {i} {c}\n" for i in range(n) for c in range(5)]
        (root / f"{split}_caps.txt").write_text("".join(lines))
    return root


def settings(data: str, out: str, system: str, batch_size: int) -> Config:
    config = Config(
        data=data,
        out=out,
        dim=8,
        word_dim=6,
        epochs=2,
        warmup_epochs=1,
        batch_size=batch_size,
        lr=1e-3,
        min_count=1,
        memory=64,
        momentum=0.9,
        feature_dropout=0.0,
        whole_dropout=0.0,
        word_dropout=0.0,
        embedding_dropout=0.0,
        tensorboard=False,
        progress=False,
    )
    return replace(config, **SYSTEMS[system])


def outcome(config: Config) -> dict[str, Any]:
    trainer = Trainer(config)
    for layer in trainer.model.modules():
        # its statistics would be those of a few samples
        if config.micro_batch and isinstance(layer, BatchNorm):
            layer.eval().train = lambda mode=True, layer=layer: layer
    found = trainer.run()
    state = {k: v for k, v in trainer.model.state_dict().items()}
    objective = trainer.objective.state_dict()
    learnt = {k: v for k, v in objective.items() if "classifier" in k or k.endswith("log_scale")}
    return {"history": found["history"], "metrics": found["metrics"], "state": state | learnt}


def worker(rank: int, data: str, out: str) -> dict[str, Any]:
    return {name: outcome(settings(data, f"{out}/{name}", name, 16)) for name in SYSTEMS}


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_twice_the_batch(data: Path, tmp_path: Path):
    (tmp_path / "exchange").mkdir()
    first, second = both(worker, tmp_path / "exchange", str(data), str(tmp_path / "two"))
    for name in SYSTEMS:
        alone = outcome(settings(str(data), str(tmp_path / "one" / name), name, 16 * WORLD))
        assert first[name]["metrics"] == second[name]["metrics"]
        assert [x["step"] for x in first[name]["history"]] == [x["step"] for x in alone["history"]]
        for mine, other in zip(first[name]["history"], alone["history"], strict=True):
            assert mine["rsum"] == pytest.approx(other["rsum"], abs=1e-6), name
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4), name
        for key, wanted in alone["state"].items():
            found = first[name]["state"][key]
            assert torch.equal(found, second[name]["state"][key]), (
                f"{name} {key}: differs between the processes"
            )
            if not key.startswith(ROUNDED.get(name, ())):
                torch.testing.assert_close(
                    found,
                    wanted,
                    rtol=2e-3,
                    atol=2e-4,
                    msg=lambda m, what=f"{name} {key}": f"{what}: {m}",
                )
        assert (tmp_path / "two" / name / "log.jsonl").read_text().count("\n") == 2


BATCH, KILLED = 48, 5  # samples in all processes; the step of six in which a process is killed


def resumable(data: str, out: str, system: str, dropout: float, world: int) -> Config:
    config = settings(data, out, system, BATCH // world)
    return replace(config, feature_dropout=dropout, word_dropout=dropout, save_steps=2, resume=True)


def trained(rank: int, runs: list[tuple[str, str, str, float]], world: int) -> list[dict[str, Any]]:
    return [outcome(resumable(*run, world)) for run in runs]


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


def untimed(found: dict[str, Any]) -> list[dict[str, float]]:
    return [{k: x for k, x in line.items() if "seconds" not in k} for line in found["history"]]


@pytest.mark.slow
def test_a_killed_run_of_two_processes_resumes_in_any_number(data: Path, tmp_path: Path):
    cases = [("user", 0.4), ("user", 0.0), ("coder", 0.0)]

    def runs(name: str) -> list[tuple[str, str, str, float]]:
        return [
            (str(data), str(tmp_path / name / f"{system} {dropout}"), system, dropout)
            for system, dropout in cases
        ]

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    wholes = both(trained, folder("exchange of whole"), runs("whole"), WORLD)
    left = survivors(
        killed, folder("exchange of killed"), runs("killed"), world=WORLD, timeout=60.0
    )
    assert left == [[True, None]] * len(cases)
    for run_ in runs("killed"):
        state = torch.load(Path(run_[1], "last.pt"), weights_only=True)
        assert (state["epoch"], state["step"]) == (1, 1)
    for world in (1, 2, 3):
        shutil.copytree(tmp_path / "killed", tmp_path / f"{world}")
        mine = runs(f"{world}")
        if world == 1:
            found = [trained(0, mine, world)]
        else:
            found = run(trained, folder(f"exchange of {world}"), mine, world, world=world)
        for (system, dropout), *resumed, whole in zip(cases, *found, wholes[0], strict=True):
            for other in resumed:
                same = {
                    k: torch.equal(x, resumed[0]["state"][k]) for k, x in other["state"].items()
                }
                assert all(same.values()) and untimed(other) == untimed(resumed[0])
            if world == WORLD:
                assert all(
                    torch.equal(x, whole["state"][k]) for k, x in resumed[0]["state"].items()
                )
                assert untimed(resumed[0]) == untimed(whole)
            elif not dropout:
                losses, wanted = (
                    [line["loss"] for line in x["history"]] for x in (resumed[0], whole)
                )
                assert losses == pytest.approx(wanted, rel=1e-5), (system, world)
    config = resumable(*runs("killed")[0], 1)
    with pytest.raises(
        ValueError, match="was trained with batch_size of all processes = 48: cannot resume"
    ):
        Trainer(replace(config, batch_size=47)).run()


def normalised(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 3) * 2 + 1
    norm = BatchNorm(3)
    mine = x.chunk(WORLD)[rank].clone().requires_grad_()
    out = norm(mine)
    (out**3 * torch.arange(1.0, 7.0).chunk(WORLD)[rank][:, None]).sum().backward()
    return [out.detach(), mine.grad, norm.running_mean, norm.running_var]


@pytest.mark.slow
def test_batch_normalisation_is_that_of_the_whole_batch(tmp_path: Path):
    parts = both(normalised, tmp_path)
    torch.manual_seed(0)
    x = (torch.randn(6, 3) * 2 + 1).requires_grad_()
    norm = torch.nn.BatchNorm1d(3)
    out = norm(x)
    (out**3 * torch.arange(1.0, 7.0)[:, None]).sum().backward()
    for k, wanted in enumerate((out.detach(), x.grad)):
        torch.testing.assert_close(
            torch.cat([part[k] for part in parts]), wanted, rtol=1e-4, atol=1e-5
        )
    for part in parts:
        torch.testing.assert_close(part[2], norm.running_mean)
        torch.testing.assert_close(part[3], norm.running_var)
