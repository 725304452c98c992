"""A run of two processes equals one of a single process with twice the batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.retrieval.config import Config
from examples.retrieval.encoders import BatchNorm
from examples.retrieval.train import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import WORLD, both

CAPTIONS = ["a brown dog runs", "two dogs on grass", "a black dog jumping", "a man rides a bike", "a woman sits"]
SYSTEMS: dict[str, dict[str, Any]] = {
    "infonce": {"loss": "infonce", "loss_options": {"learnable": True}, "views": "regions+whole"},
    "triplet": {"loss": "triplet"},
    "user": {"loss": "uto", "enhancement": "sge", "loss_options": {"scale": 20.0}},
    "coder": {"loss": "coder", "concepts": 6, "loss_options": {"clusters": 4}},
    "dvse": {"loss": "dvse", "heads": 2},
    "pvse": {"loss": "pvse", "heads": 2},
    "chunks": {"loss": "infonce", "micro_batch": 8, "captions_per_image": 2},
}
# The gradients of PVSE's attention over words are tiny here (4e-5 in norm) and depend on rounding, which decides
# between nearly equal pairs of embeddings, but Adam scales them to steps of the usual size.
ROUNDED = {"pvse": ("text.heads.attention",)}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Data set of 48 + 12 images of 4 regions, with global features."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, n in {"train": 48, "dev": 12}.items():
        np.save(root / f"{split}_ims.npy", rng.normal(size=(n, 4, 6)).astype(np.float32))
        np.save(root / f"{split}_global.npy", rng.uniform(size=(n, 5)).astype(np.float32))
        # All captions differ, because rounding would decide between equal hardest negatives.
        lines = [f"{CAPTIONS[(i + c) % 5]} {i} {c}\n" for i in range(n) for c in range(5)]
        (root / f"{split}_caps.txt").write_text("".join(lines))
    return root


def settings(data: str, out: str, system: str, batch_size: int) -> Config:
    config = Config(
        data=data, out=out, dim=8, word_dim=6, epochs=2, warmup_epochs=1, batch_size=batch_size, lr=1e-3, min_count=1,
        memory=64, momentum=0.9, feature_dropout=0.0, whole_dropout=0.0, word_dropout=0.0, embedding_dropout=0.0,
        tensorboard=False, progress=False,
    )  # fmt: skip
    return replace(config, **SYSTEMS[system])


def outcome(config: Config) -> dict[str, Any]:
    trainer = Trainer(config)
    for layer in trainer.model.modules():
        if config.micro_batch and isinstance(layer, BatchNorm):  # its statistics would be those of a few samples
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
            if name not in ("coder", "dvse", "pvse"):  # parts of their values are of a process's own samples
                assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4), name
        for key, wanted in alone["state"].items():
            found = first[name]["state"][key]
            assert torch.equal(found, second[name]["state"][key]), f"{name} {key}: differs between the processes"
            if not key.startswith(ROUNDED.get(name, ())):
                torch.testing.assert_close(
                    found, wanted, rtol=2e-3, atol=2e-4, msg=lambda m, what=f"{name} {key}": f"{what}: {m}"
                )
        assert (tmp_path / "two" / name / "log.jsonl").read_text().count("\n") == 2


def resumed(rank: int, data: str, out: str) -> list[dict[str, Any]]:
    whole = outcome(replace(settings(data, f"{out}/whole", "user", 16), feature_dropout=0.4))
    config = replace(settings(data, f"{out}/cut", "user", 16), feature_dropout=0.4)
    outcome(replace(config, epochs=1))
    return [whole, outcome(replace(config, resume=True))]


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(data: Path, tmp_path: Path):
    (tmp_path / "exchange").mkdir()
    for whole, cut in both(resumed, tmp_path / "exchange", str(data), str(tmp_path / "runs")):
        assert all(torch.equal(whole["state"][key], cut["state"][key]) for key in whole["state"])
    with pytest.raises(ValueError, match="was trained by 2 processes: cannot resume with 1"):
        config = replace(settings(str(data), str(tmp_path / "runs" / "cut"), "user", 16), feature_dropout=0.4)
        Trainer(replace(config, resume=True)).run()


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
        torch.testing.assert_close(torch.cat([part[k] for part in parts]), wanted, rtol=1e-4, atol=1e-5)
    for part in parts:
        torch.testing.assert_close(part[2], norm.running_mean)
        torch.testing.assert_close(part[3], norm.running_var)
