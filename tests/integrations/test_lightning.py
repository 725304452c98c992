"""A loss and the metrics in Lightning's trainer, in one process and in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.losses_registry import select
from support.processes import WORLD, run, set_environment
from torch import nn

import itrloss

pytest.importorskip("torchmetrics")
pytest.importorskip("lightning")

import lightning
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from itrloss.metrics import RetrievalMetrics, retrieval_metrics

STEPS, BATCH, SIZE = 16, 8, 64
LOSSES = select("infonce learnable", "dcl")


class Model(lightning.LightningModule):
    """The module of the documentation, in float64: 16 steps multiply rounding errors."""

    def __init__(self, criterion: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.image_encoder, self.text_encoder = (
            nn.Linear(20, 16).double(),
            nn.Linear(12, 16).double(),
        )
        self.criterion, self.metrics, self.values = criterion, RetrievalMetrics(), []

    def forward(self, batch: Any) -> Any:
        images, texts, ids = batch
        return self.image_encoder(images), self.text_encoder(texts), ids, ids

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.criterion(*self(batch))
        self.values.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.metrics.update(*self(batch))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(SIZE, 20, generator=draw, dtype=torch.float64)
    return torch.utils.data.TensorDataset(images, images[:, :12] ** 2, torch.arange(SIZE) // 2)


def train(name: str, **options: Any) -> tuple[Model, Any]:
    """The module after the steps of their trainer, and the trainer."""
    world = options.get("devices", 1)
    # theirs shuffles
    own = torch.utils.data.DistributedSampler(data(), world, shuffle=False) if world > 1 else None
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH // world, sampler=own)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings: Any = {
        "max_steps": STEPS,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "use_distributed_sampler": False,
    }
    model = Model(LOSSES[name].make(gather=world > 1))
    trainer = lightning.Trainer(**settings, **dict.fromkeys(quiet, False), **options)
    trainer.fit(model, loader, loader)
    return model, trainer


@pytest.mark.parametrize("name", LOSSES)
def test_the_trainer_has_the_curve_of_a_loop_and_the_metrics_of_all_batches(name):
    model, trainer = train(name)
    twin = Model(LOSSES[name].make(gather=False))
    optimizer, values = twin.configure_optimizers(), []
    for i in range(STEPS):
        start = i * BATCH % SIZE
        loss = twin.criterion(*twin(data()[start : start + BATCH]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    torch.testing.assert_close(model.values, values, rtol=0, atol=1e-5)
    assert sum(values[-8:]) < 0.9 * sum(values[:8])
    with torch.no_grad():
        metrics = retrieval_metrics(itrloss.Similarity(*twin(data()[:])))
    for metric in ("rsum", "t2i_r5"):
        assert trainer.callback_metrics[metric].item() == pytest.approx(metrics[metric])


def in_a_process(rank: int) -> dict[str, Any]:
    set_environment(rank)
    found = {}
    for name in LOSSES:
        environment: Any = [TorchElasticEnvironment()]
        model, trainer = train(name, devices=WORLD, strategy="ddp", plugins=environment)
        assert trainer.world_size == WORLD
        found[name] = model.values, trainer.callback_metrics["rsum"].item()
    return found


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    processes = run(in_a_process, tmp_path)
    for name in LOSSES:
        model, trainer = train(name)
        for found in processes:
            torch.testing.assert_close(found[name][0], model.values, rtol=0, atol=1e-5)
            assert found[name][1] == pytest.approx(trainer.callback_metrics["rsum"].item())
