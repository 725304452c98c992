"""Objectives: warm-ups, two captions of an image, and memories."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import itrloss
from examples.retrieval.config import Config
from examples.retrieval.data import Batch
from examples.retrieval.encoders import BatchNorm
from examples.retrieval.objectives import LOSSES, WITH_MEMORY, build_objective
from examples.retrieval.train import Trainer

DRY = {"feature_dropout": 0.0, "word_dropout": 0.0, "embedding_dropout": 0.0}


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
                whole_dropout=0.0,
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


def loss_of_captions(texts: Tensor, image_ids: Tensor, per_image: int) -> float:
    """InfoNCE between the first two captions of each image, in both directions."""
    texts = normalize(texts, dim=1).detach().double()
    total = 0.0
    firsts, seconds = texts[::per_image], texts[1::per_image]
    for this, other in ((firsts, seconds), (seconds, firsts)):
        scores = (this @ other.T / 0.07).exp()
        for i, own in enumerate(image_ids):
            negatives = scores[i][image_ids != own].sum()
            positives = scores[i][image_ids == own]
            terms = -torch.log(positives / (positives + negatives))
            total += terms.mean().item() / len(this)
    return total


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
    expected = loss_of_captions(outputs[1], batch.image_ids, per_image)
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


def test_keys_follow_the_model_before_each_step(config):
    trainer = Trainer(replace(config, loss="uto", momentum=0.5))
    keys = trainer.objective.keys
    batches = trainer.batches.epoch(0)
    start = trainer.model.text.embedding.weight.detach().clone()
    trainer.train_step(next(batches))
    assert torch.equal(keys.module.text.embedding.weight, start)
    after = trainer.model.text.embedding.weight.detach().clone()
    trainer.train_step(next(batches))
    torch.testing.assert_close(keys.module.text.embedding.weight, (start + after) / 2)


def test_keys_enter_the_memory_after_each_step(config):
    trainer = Trainer(replace(config, loss="uto", memory=40))
    memory = trainer.objective.memory
    first, second, *_ = trainer.batches.epoch(0)
    trainer.train_step(first)
    assert len(memory) == 32
    assert torch.equal(memory.ids[:32], first.text_ids)
    trainer.train_step(second)
    assert len(memory) == 40
    assert torch.equal(memory.ids[32:], second.text_ids[:8])


def test_keys_are_not_trained(config):
    trainer = Trainer(replace(config, loss="uto"))
    assert not any(p.requires_grad for p in trainer.objective.keys.parameters())
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert set(map(id, trained)) == set(map(id, trainer.model.parameters()))


# --- warm-up --------------------------------------------------------------------------------------


def test_every_view_warms_up_on_all_negatives(config):
    objective = Trainer(replace(config, loss="triplet", views="regions+regions")).objective
    for epoch, mining in enumerate(("all", "hardest")):
        objective.begin_epoch(epoch)
        assert [each.criterion.mining for each in objective] == [mining, mining]


def test_triplet_may_warm_up_with_infonce(config):
    trainer = Trainer(replace(config, loss="triplet", warmup="infonce"))
    batch = first_batch(trainer)
    outputs = trainer.model(*batch.inputs)
    ids = batch.image_ids, batch.text_ids
    # triplet sums over the batch, and so does its warm-up
    infonce = itrloss.InfoNCELoss(0.07, reduction="sum")
    for epoch, loss in enumerate((infonce, itrloss.TripletLoss())):
        trainer.objective.begin_epoch(epoch)
        torch.testing.assert_close(trainer.objective(outputs, *ids)[0], loss(*outputs, *ids))


class TestDVSE:
    """Its loss in and after the warm-up, with and without its parts."""

    sets = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(0))
    texts = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    residuals = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(2))
    gate = torch.tensor([1.0, 1.0, 0.0]).expand(6, 3)
    ids = torch.arange(6)
    orthogonal = itrloss.DynamicOrthogonalLoss(0.0)

    def value(self, epoch: int, balance: float = 0.4, **settings) -> Tensor:
        options = {"balance": balance, "slack": 0.0}
        config = Config(loss="dvse", dim=8, heads=3, loss_options=options, **settings)
        objective = build_objective(config, torch.nn.Module())  # type: ignore[arg-type]
        objective.begin_epoch(epoch)
        outputs = [self.sets, self.texts, self.residuals, self.gate]
        return objective(outputs, self.ids, self.ids)[0] / 6  # summed over the batch

    def of_heads(self, loss: torch.nn.Module) -> Tensor:
        return torch.stack([loss(head, self.texts) for head in self.sets.unbind(1)])

    def hinges(self, mining: str) -> Tensor:
        return self.of_heads(itrloss.TripletLoss(0.2, mining, reduction="mean"))

    def test_all_negatives_warm_up(self):
        apart = self.orthogonal(self.residuals, self.gate)
        torch.testing.assert_close(self.value(0), self.hinges("all").mean() + 10 * apart)

    def test_infonce_may_warm_up(self):
        infonce = self.of_heads(itrloss.InfoNCELoss(0.07))
        apart = self.orthogonal(self.residuals, self.gate)
        found = self.value(0, warmup="infonce")
        torch.testing.assert_close(found, infonce.mean() + 10 * apart)

    @pytest.mark.parametrize("gated", [True, False])
    def test_heads_are_weighted_by_their_variance(self, gated):
        loss = itrloss.DVSEObjective(0.4, slack=0.0)
        gate = self.gate if gated else None
        wanted, _ = loss(self.sets, self.texts, self.residuals, gate, self.ids, self.ids)
        torch.testing.assert_close(self.value(5, gate=gated), wanted)

    @pytest.mark.parametrize("gated", [True, False])
    def test_heads_may_have_equal_weights(self, gated):
        apart = self.orthogonal(self.residuals, self.gate if gated else None)
        wanted = 0.4 * self.hinges("hardest").sum() + 0.6 * apart
        torch.testing.assert_close(self.value(5, variance_weights=False, gate=gated), wanted)

    def test_without_an_orthogonal_loss_there_is_none_in_the_warm_up(self):
        torch.testing.assert_close(self.value(0, balance=1.0), self.hinges("all").mean())
        found = self.value(5, balance=1.0, variance_weights=False)
        torch.testing.assert_close(found, self.hinges("hardest").sum())
