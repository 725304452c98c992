"""Objectives: warm-ups, two captions of an image, and memories."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import sample
from support.drawn import DRY
from torch import Tensor
from torch.nn.functional import normalize

import itrloss
from examples.retrieval.config import Config
from examples.retrieval.data import Batch
from examples.retrieval.encoders import BatchNorm
from examples.retrieval.objectives import LOSSES, WITH_MEMORY, build_objective
from examples.retrieval.train import Trainer


def first_batch(trainer: Trainer) -> Batch:
    return next(trainer.batches.epoch(0))


def fill_memories(trainer: Trainer) -> None:
    """Enqueue keys of other images, as an empty memory gives no gradients."""
    for objective in trainer.objective.modules():
        if isinstance(objective, itrloss.CoupledMemory):
            torch.manual_seed(1)
            objective.enqueue(*torch.randn(2, 10, 16), torch.arange(10) + 1000)


@pytest.mark.parametrize(
    ("loss", "per_image", "views"),
    [
        *((loss, 2, "regions") for loss in LOSSES),
        *((loss, 1, "regions") for loss in WITH_MEMORY),
        ("infonce", 5, "regions"),
        ("dvse", 5, "regions"),
        ("coder", 2, "regions+regions"),
        ("dvse", 2, "regions+whole"),
    ],
)
def test_micro_batches_give_the_gradients_of_the_batch(config, loss, per_image, views):
    found = []
    for micro_batch in (0, 7):
        trainer = Trainer(
            replace(
                config,
                loss=loss,
                captions_per_image=per_image,
                views=views,
                batch_size=20,
                micro_batch=micro_batch,
                clip=1e9,
                **DRY,
            )
        )
        fill_memories(trainer)
        for layer in trainer.model.modules():
            if isinstance(layer, BatchNorm | itrloss.DynamicGate):
                layer.training = False  # their statistics would be those of a few samples
        found.append((trainer.train_step(first_batch(trainer)), trainer))
    (value, whole), (chunked_value, chunked) = found
    assert chunked_value == pytest.approx(value, rel=1e-5)
    for name, p in whole.model.named_parameters():
        other = chunked.model.get_parameter(name).grad
        atol = 3e-4 * p.grad.abs().max().item()
        torch.testing.assert_close(other, p.grad, rtol=1e-3, atol=atol, msg=name)
    state = chunked.objective.state_dict()
    for name, x in whole.objective.state_dict().items():
        if torch.is_tensor(x):
            torch.testing.assert_close(state[name], x, rtol=1e-4, atol=1e-4, msg=name)


# --- captions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_image", [2, 3])
@pytest.mark.parametrize("loss", ["infonce", "mdcl"])
def test_the_first_two_captions_of_an_image_belong_together(config, loss, per_image):
    config = replace(config, loss=loss, captions_per_image=per_image)
    trainer = Trainer(replace(config, caption_weight=0.5))
    batch = first_batch(trainer)
    trainer.objective.prepare(trainer.model, *batch.inputs)
    outputs = trainer.model(*batch.inputs)
    value, figures = trainer.objective(outputs, batch.image_ids, batch.text_ids)
    trainer.objective.config = config
    alone, _ = trainer.objective(outputs, batch.image_ids, batch.text_ids)
    texts = outputs[1].detach()
    pairs = texts[::per_image], texts[1::per_image]
    expected = itrloss.InfoNCELoss()(*pairs, batch.image_ids, batch.image_ids).item()
    assert figures["captions"].item() == pytest.approx(expected, rel=1e-4)
    assert value.item() == pytest.approx(alone.item() + 0.5 * expected, rel=1e-4)


# --- memories -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", WITH_MEMORY)
def test_captions_enter_the_memory_beside_the_keys_of_their_image(config, loss):
    trainer = Trainer(replace(config, loss=loss, captions_per_image=3, memory=200, **DRY))
    objective, batch = trainer.objective, first_batch(trainer)
    images, texts = (normalize(keys) for keys in objective.keys(*batch.inputs)[:2])
    objective.keys.update = lambda model: None
    objective.prepare(trainer.model, *batch.inputs)
    objective.finish(batch.text_ids)
    assert len(objective.memory) == len(texts) == 96
    assert torch.equal(objective.memory.ids[:96], batch.image_ids.repeat_interleave(3))
    torch.testing.assert_close(objective.memory.images[:96], images.repeat_interleave(3, 0))
    torch.testing.assert_close(objective.memory.texts[:96], texts)


def test_keys_follow_the_model_before_each_step_and_are_enqueued_after_it(config):
    trainer = Trainer(replace(config, loss="uto", momentum=0.5, memory=40))
    keys, memory = trainer.objective.keys, trainer.objective.memory
    own, followed = trainer.model.text.embedding, keys.module.text.embedding
    first, second, *_ = trainer.batches.epoch(0)
    start = own.weight.detach().clone()
    trainer.train_step(first)
    assert torch.equal(followed.weight, start)
    assert len(memory) == 32
    assert torch.equal(memory.ids[:32], first.text_ids)
    after = own.weight.detach().clone()
    trainer.train_step(second)
    torch.testing.assert_close(followed.weight, (start + after) / 2)
    assert len(memory) == 40
    assert torch.equal(memory.ids[32:], second.text_ids[:8])
    assert not any(p.requires_grad for p in keys.parameters())
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert set(map(id, trained)) == set(map(id, trainer.model.parameters()))


# --- warm-up --------------------------------------------------------------------------------------


def test_every_view_warms_up_on_all_negatives(config):
    objective = Trainer(replace(config, loss="triplet", views="regions+regions")).objective
    for epoch, mining in enumerate(("all", "hardest")):
        objective.begin_epoch(epoch)
        assert [each.criterion.mining for each in objective] == [mining, mining]


SOFT = {"temperature": 0.1}
# Settings, the loss of the warm-up, and the one after it.
WARM_UPS = {
    "without the temperature": (
        {"loss_options": SOFT},
        itrloss.TripletLoss(mining="all"),
        itrloss.TripletLoss(**SOFT),
    ),
    # triplet sums over the batch, and so does its warm-up
    "by InfoNCE": (
        {"warmup": "infonce"},
        itrloss.InfoNCELoss(0.07, reduction="sum"),
        itrloss.TripletLoss(),
    ),
}


@pytest.mark.parametrize("name", WARM_UPS)
def test_a_triplet_loss_warms_up_by_another_one(config, name):
    settings, *losses = WARM_UPS[name]
    trainer = Trainer(replace(config, loss="triplet", **settings))
    batch = first_batch(trainer)
    outputs = trainer.model(*batch.inputs)
    ids = batch.image_ids, batch.text_ids
    for epoch, loss in enumerate(losses):
        trainer.objective.begin_epoch(epoch)
        torch.testing.assert_close(trainer.objective(outputs, *ids)[0], loss(*outputs, *ids))


SETS, RESIDUALS = sample(2, 6, 3, 8)
TEXTS = sample(6, 8, seed=1)
GATE = torch.tensor([1.0, 1.0, 0.0]).expand(6, 3)
IDS = torch.arange(6)
ALL, HARDEST = (itrloss.TripletLoss(0.2, mining, reduction="mean") for mining in ("all", "hardest"))


def of_heads(loss: torch.nn.Module) -> Tensor:
    return torch.stack([loss(head, TEXTS) for head in SETS.unbind(1)])


def apart(gate: Tensor | None = GATE) -> Tensor:
    return itrloss.DynamicOrthogonalLoss(0.0)(RESIDUALS, gate)


def weighted(gate: Tensor | None = GATE) -> Tensor:
    return itrloss.DVSEObjective(0.4, slack=0.0)(SETS, TEXTS, RESIDUALS, gate, IDS, IDS)[0]


EQUAL = {"variance_weights": False}
# The epoch, of which the first is a warm-up, settings, the weight of the hinges, and the loss.
DVSE = {
    "warm-up": (0, {}, 0.4, lambda: of_heads(ALL).mean() + 10 * apart()),
    "warm-up by InfoNCE": (
        0,
        {"warmup": "infonce"},
        0.4,
        lambda: of_heads(itrloss.InfoNCELoss(0.07)).mean() + 10 * apart(),
    ),
    "warm-up of heads alone": (0, {}, 1.0, lambda: of_heads(ALL).mean()),
    "weights by variance": (5, {}, 0.4, weighted),
    "no gate": (5, {"gate": False}, 0.4, lambda: weighted(None)),
    "equal weights": (5, EQUAL, 0.4, lambda: 0.4 * of_heads(HARDEST).sum() + 0.6 * apart()),
    "equal weights, no gate": (
        5,
        {**EQUAL, "gate": False},
        0.4,
        lambda: 0.4 * of_heads(HARDEST).sum() + 0.6 * apart(None),
    ),
    "heads alone": (5, EQUAL, 1.0, lambda: of_heads(HARDEST).sum()),
}


@pytest.mark.parametrize("case", DVSE)
def test_dvse_in_and_after_the_warm_up(case):
    epoch, settings, balance, wanted = DVSE[case]
    options = {"balance": balance, "slack": 0.0}
    config = Config(loss="dvse", dim=8, heads=3, loss_options=options, **settings)
    objective = build_objective(config, torch.nn.Module())  # type: ignore[arg-type]
    objective.begin_epoch(epoch)
    found = objective([SETS, TEXTS, RESIDUALS, GATE], IDS, IDS)[0] / 6  # summed over the batch
    torch.testing.assert_close(found, wanted())
