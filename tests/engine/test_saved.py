"""Saved tensors are read once, so that losses work under checkpoints and hooks on saved tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import pairwise, sample
from support.conforming import LOSSES, Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import itrloss
from itrloss import Similarity

B, D = 12, 8
IMAGES = sample(B, D, dtype=torch.float64)
TEXTS = sample(B, D, seed=1, dtype=torch.float64)
LABELS = torch.arange(B) // 2


@itrloss.pair_term
def wave(scores, weight):
    return torch.sin(scores * weight)


class Wave(itrloss.PairLoss):
    """A loss of a user, with a term that autograd differentiates."""

    def compute(self, sim: Similarity) -> Any:
        anchors = self.anchors(sim)
        weight = anchors.logsumexp(3.0)
        values = anchors.sum(wave, weight) + anchors.mean_of_positives(wave, weight)
        return anchors.reduce(values, self.reduction)


def with_negatives(loss, images, texts, *ids):
    return loss(images, texts, *ids, negatives=images.flip(0) * texts)


def with_guide(loss, images, texts, *ids):
    return loss(images, texts, *ids, guide=(TEXTS, IMAGES))


def with_biases(loss, images, texts, *ids):
    bias = images.sum(1), texts.sum(1)
    return loss(Similarity(images, texts, *ids, bias=bias, engine=loss.engine))


def of_scores(loss, images, texts, *ids):
    return loss(scores=images @ texts.T)


CASES = {
    **LOSSES,
    "further negatives": Case(itrloss.InfoNCELoss(hardness=3.0), {"call": with_negatives}),
    "a guide": Case(itrloss.InfoNCELoss(margin=0.1), {"call": with_guide}),
    "biases": Case(itrloss.TripletLoss(), {"call": with_biases}),
    "one denominator": Case(itrloss.InfoNCELoss(joint=True, image_image=True, text_text=True)),
    "a term of a user": Case(Wave()),
    "inner products": Case(itrloss.InfoNCELoss(normalize=False)),
    "a learnt scale of given scores": Case(
        itrloss.InfoNCELoss(learnable=True).double(), {"call": of_scores}
    ),
}


def gradients(case: Case, engine: str, way: Callable[..., Tensor]) -> list[Tensor]:
    """Return the value of a loss that is called for the first time, and its gradients."""
    loss = copy.deepcopy(case.loss)
    if hasattr(loss, "engine"):
        loss.engine = engine
    call = case.options.get("call", lambda loss, *given: loss(*given))
    ids = (LABELS, LABELS) if case.options.get("ids", True) else ()

    def value(images, texts):
        return call(loss, images, texts, *ids)

    images = IMAGES.clone().requires_grad_()
    texts = TEXTS.clone().requires_grad_()
    found = way(value, images, texts)
    return [found.detach(), *torch.autograd.grad(found, (images, texts))]


class ReadOnce:
    """Hooks that refuse to give a saved tensor back a second time."""

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.count = 0

    def pack(self, x: Tensor) -> tuple[int, Tensor]:
        self.count += 1
        return self.count, x

    def unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        number, x = packed
        assert number not in self.read, "a saved tensor is read twice"
        self.read.add(number)
        return x


def plainly(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return loss(*inputs)


def read_once(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    hooks = ReadOnce()
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        return loss(*inputs)


def offloaded(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return loss(*inputs)


def checkpointed(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The second pass does not look at the batch, as the first call of a loss does, and has to save
    as many tensors.
    """
    return checkpoint(loss, *inputs, use_reentrant=False)


def checkpointed_to_the_end(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(loss, *inputs, use_reentrant=False)


WAYS = [read_once, offloaded, checkpointed, checkpointed_to_the_end]


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize(
    ("name", "engine", "way"), pairwise(name=CASES, engine=["dense", "tiled"], way=WAYS)
)
def test_saved_tensors_are_read_once(name, engine, way):
    wanted = gradients(CASES[name], engine, plainly)
    torch.testing.assert_close(gradients(CASES[name], engine, way), wanted)
