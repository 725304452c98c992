"""Planted bugs of state, copies, threads, memory and processes, and those that no check notices,
see :mod:`planted`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.planted import InfoNCE, planted

# ---------------------------------------------------------------------------------- state, programs


@planted("repeated_calls")
class LabelsCached(InfoNCE):
    """The mask of the first batch serves all later ones of its size."""

    masks: Any = None

    def positive(self, image_ids, text_ids):
        self.masks = self.masks or {}
        key = len(image_ids), len(text_ids)
        return self.masks.setdefault(key, super().positive(image_ids, text_ids))


@planted("repeated_calls")
class TemperatureFalls(InfoNCE):
    """Each call lowers the temperature."""

    def values(self, scores, positive):
        self.temperature *= 0.99
        return super().values(scores, positive)


class Queue(InfoNCE):
    """Scores are weighted by what a ring of earlier texts holds; all of its state is saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ring", torch.zeros(8, 8))
        self.register_buffer("place", torch.tensor(0))

    def enqueue(self, texts):
        for x in texts.detach():
            self.ring[int(self.place) % 8] = x
            self.place = self.place + 1

    def scores(self, images, texts):
        self.enqueue(texts)
        return super().scores(images, texts) * (1 + 0.1 * self.ring[0].sum())


@planted("state_dict_round_trip")
class QueueWithoutItsPlace(Queue):
    """The queue's place is not in the state_dict (pytorch-metric-learning's CrossBatchMemory)."""

    def __init__(self):
        super().__init__()
        del self.place
        self.place = 0


@planted("two_forwards_before_one_backward")
class QueueOverwritten(InfoNCE):
    """A buffer of the forward pass is overwritten before the backward pass (USER's queues)."""

    def __init__(self):
        super().__init__()
        self.kept: Any = None

    def scores(self, images, texts):
        owner = self

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, v, w):
                owner.kept = v.detach(), w.detach()
                return v @ w.T

            @staticmethod
            def backward(ctx, grad):  # type: ignore[override]
                v, w = owner.kept
                return grad @ w, grad.T @ v

        return Product.apply(images, texts)


@planted("training_and_evaluation")
class DropoutInside(InfoNCE):
    """Embeddings are dropped in training mode."""

    def unit(self, x):
        return super().unit(x * 0.5) + (0.01 * self.training)


@planted("pickled")
class LambdaInside(InfoNCE):
    """A lambda in an attribute cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.form = lambda x: x


@planted("non_contiguous_inputs")
class Strides(InfoNCE):
    """Memory is read as if it were contiguous, as a kernel without strides does."""

    def prepared(self, images, texts, image_ids, text_ids):
        images, texts = (torch.as_strided(x, x.shape, (x.shape[1], 1)) for x in (images, texts))
        return super().prepared(images, texts, image_ids, text_ids)


@planted("compiled_as_one_graph")
class BranchOnAValue(InfoNCE):
    """A branch on a value breaks the graph."""

    def scores(self, images, texts):
        scores = super().scores(images, texts)
        return scores if scores.max().item() < 2 else scores.clamp(-1, 1)


@planted("engines_agree")
class EnginesDiffer(InfoNCE):
    """One of two engines leaves out the last block of candidates' gradients."""

    engine = "dense"

    def scores(self, images, texts):
        scores = super().scores(images, texts)
        if self.engine == "tiled":
            scores = torch.cat([scores[:, :16], scores[:, 16:].detach()], 1)
        return scores


# ---------------------------------------------------------------------------------------- processes


class Together(nn.ModuleList):
    """Losses of one batch: processes, which take seconds to start, compute all of them."""

    gather = False

    def forward(self, *batch):
        for loss in self:
            loss.gather = self.gather
        return [loss(*batch) for loss in self]


class FailsTogether(InfoNCE):
    """Several processes cannot call it."""

    def forward(self, *batch):
        if self.gather:
            raise ValueError("no loss of several processes")
        return super().forward(*batch)


@planted("several_processes", processes=2)
class GatheredWithoutGradient(InfoNCE):
    """Other processes' embeddings get no gradient (open_clip#616, pytorch-metric-learning#363)."""

    def all_texts(self, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach().contiguous())
        parts[dist.get_rank()] = x
        return torch.cat(parts)


@planted("several_processes", processes=2)
class OffByTheWorldSize(InfoNCE):
    """Gradients are 1 / world size of what they should be (lightly#1977)."""

    def all_texts(self, x):
        x = super().all_texts(x)
        return x / dist.get_world_size() + (x - x / dist.get_world_size()).detach()


# -------------------------------------------------------------------------------- what none notices


@planted(None)
class WrongTemperature(InfoNCE):
    """Scores are multiplied by the temperature: another loss, and as good as any for the checks."""

    def values(self, scores, positive):
        return super().values(scores * self.temperature * 10, positive)


@planted(None)
class MaskedByZero(InfoNCE):
    """Positives count as exp(0) among the negatives, a constant (a mask that multiplies scores)."""

    def log_of_negatives(self, logits, positive):
        return (logits * ~positive).logsumexp(1)
