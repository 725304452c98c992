"""Saved tensors are read once, so that losses work under checkpoints and hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import sample
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import itrloss
from itrloss import Similarity, compat, functional

B, D = 12, 8
IMAGES = sample(B, D, dtype=torch.float64)
TEXTS = sample(B, D, seed=1, dtype=torch.float64)
OFFSETS = sample(B, 3, D, seed=5, dtype=torch.float64)  # of the elements of sets
LABELS = torch.arange(B) // 2
MEMORY = itrloss.CoupledMemory(9, D, dtype=torch.float64)
MEMORY.enqueue(IMAGES[:9], TEXTS[:9], LABELS[:9])


def sets_of(x: Tensor) -> Tensor:
    return x[:, None] + OFFSETS


def gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Return the value of a loss, and the gradients of images and texts."""
    images = IMAGES.clone().requires_grad_()
    texts = TEXTS.clone().requires_grad_()
    value = loss(images, texts)
    return [value.detach(), *torch.autograd.grad(value, (images, texts))]


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


LOSSES: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {
    "M-DCL": lambda engine, v, w: itrloss.MemoryDiversityContrastiveLoss(engine=engine)(
        v, w, IMAGES, TEXTS, MEMORY, LABELS, LABELS
    ),
    "UTO": lambda engine, v, w: itrloss.UnifiedTrainingObjective(engine=engine)(
        v, w, IMAGES, TEXTS, MEMORY, LABELS, LABELS
    ),
    "late interaction": lambda engine, v, w: itrloss.InfoNCELoss(engine=engine)(
        scores=functional.set_similarity(sets_of(v), sets_of(w), "smooth_max_sum", 3.0)
    ),
    "heads": lambda engine, v, w: itrloss.VarianceAwareLoss(engine=engine)(
        sets_of(v), w, LABELS, LABELS
    ),
    "PCME++": lambda engine, v, w: itrloss.PCMEPlusPlusLoss(learnable=False, engine=engine)(
        v, w, v / 10, w / 10, LABELS, LABELS
    ),
    "Matryoshka": lambda engine, v, w: itrloss.Matryoshka(
        itrloss.InfoNCELoss(engine=engine), (4, 8)
    )(v, w, LABELS, LABELS),
    "further negatives": lambda engine, v, w: itrloss.InfoNCELoss(engine=engine, hardness=3.0)(
        v, w, LABELS, LABELS, negatives=v.flip(0) * w
    ),
    "a guide": lambda engine, v, w: itrloss.InfoNCELoss(engine=engine, margin=0.1)(
        v, w, LABELS, LABELS, guide=(TEXTS, IMAGES)
    ),
    "one denominator": lambda engine, v, w: itrloss.InfoNCELoss(
        engine=engine, joint=True, image_image=True, text_text=True
    )(v, w, LABELS, LABELS),
    "a teacher": lambda engine, v, w: itrloss.DistillationLoss(engine=engine)(
        v, w, Similarity(TEXTS, IMAGES)
    ),
    "biases": lambda engine, v, w: itrloss.TripletLoss()(
        Similarity(v, w, LABELS, LABELS, bias=(v.sum(1), w.sum(1)), engine=engine)  # type: ignore
    ),
    "a term of a user": lambda engine, v, w: Wave(engine=engine)(v, w, LABELS, LABELS),
    "a code base": lambda engine, v, w: compat.VSEPPLoss(2)(v, w),
}


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


def read_once(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    hooks = ReadOnce()
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        return loss(*inputs)


def offloaded(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return loss(*inputs)


def checkpointed(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return checkpoint(loss, *inputs, use_reentrant=False)


def checkpointed_to_the_end(loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return checkpoint(loss, *inputs, use_reentrant=False, early_stop=False)


@pytest.mark.parametrize("way", [read_once, offloaded, checkpointed, checkpointed_to_the_end])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("name", LOSSES)
def test_saved_tensors_are_read_once(name, engine, way):
    def loss(images, texts):
        return LOSSES[name](engine, images, texts)

    found = gradients(lambda images, texts: way(loss, images, texts))
    torch.testing.assert_close(found, gradients(loss))


FIRST_CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "a learnt scale of given scores": (
        lambda: itrloss.InfoNCELoss(learnable=True).double(),
        lambda loss, v, w: loss(scores=v @ w.T),
    ),
    "SigLIP": (lambda: itrloss.SigmoidLoss().double(), lambda loss, v, w: loss(v, w)),
    "inner products": (
        lambda: itrloss.InfoNCELoss(normalize=False),
        lambda loss, v, w: loss(v, w),
    ),
    "further negatives": (
        itrloss.InfoNCELoss,
        lambda loss, v, w: loss(v, w, negatives=v.flip(0) * w),
    ),
    "a teacher": (itrloss.DistillationLoss, lambda loss, v, w: loss(v, w, IMAGES @ TEXTS.T)),
    "heads": (itrloss.VarianceAwareLoss, lambda loss, v, w: loss(sets_of(v), w)),
    "a code base": (lambda: compat.VSEPPLoss(0.2), lambda loss, v, w: loss(v, w)),
}


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_a_look_at_the_first_batch_saves_no_tensors(name):
    """The second pass of a checkpoint does not look again, and has to save as many."""
    make, call = FIRST_CALLS[name]
    plain, checked = make(), make()
    wanted = gradients(lambda v, w: call(plain, v, w))
    found = gradients(lambda v, w: checkpointed(lambda x, y: call(checked, x, y), v, w))
    torch.testing.assert_close(found, wanted)
