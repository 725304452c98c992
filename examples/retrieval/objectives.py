"""Training objectives: any loss of itrloss and, if it needs them, momentum encoders and a
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import itrloss
from itrloss.distributed import world_size

from .config import Config
from .models import DVSE, VSE, Views, views

LOSSES: dict[str, type[nn.Module]] = {
    "triplet": itrloss.TripletLoss,
    "infonce": itrloss.InfoNCELoss,
    "sigmoid": itrloss.SigmoidLoss,
    "gce": itrloss.GeneralizedCrossEntropyLoss,
    "hal": itrloss.HubnessAwareLoss,
    "dcl": itrloss.DiversityContrastiveLoss,
    "mdcl": itrloss.MemoryDiversityContrastiveLoss,
    "uto": itrloss.UnifiedTrainingObjective,
    "coder": itrloss.CODERObjective,
    "dvse": itrloss.DVSEObjective,
}
WITH_MEMORY = ("mdcl", "uto", "coder")
# Weight of DVSE's orthogonal loss during the warm-up, where it is added to a sum over all negatives
# of some tens. Without it, the heads become identical.
APART = 10.0
TEMPERATURE = 0.07  # of InfoNCE between captions, and in the warm-up

Value = tuple[Tensor, dict[str, Tensor]]  # a loss, and figures to log


def build_loss(config: Config) -> nn.Module:
    """Build the loss that the settings name; the ValueError or TypeError of an unknown loss or
    option names it.
    """
    if config.loss not in LOSSES:
        raise ValueError(f"loss = {config.loss!r}: must be one of {', '.join(LOSSES)}")
    # the loss of a distributed job is over the batches of all processes
    options = {"gather": True, **config.loss_options}
    if options.get("diversity") == "none":  # TOML has no null
        options["diversity"] = None
    if config.loss == "coder":
        options = {"dim": config.dim, "clusters": 200, **options}
    return LOSSES[config.loss](**options)


def figures_of(criterion: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the figures that a loss keeps of its last call; none if it keeps none."""
    figures: Any = getattr(criterion, "telemetry", {})
    return dict(figures)


class Objective(nn.Module):
    """A loss and its warm-up; its state is part of a checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.criterion = build_loss(config)
        self.captions = itrloss.InfoNCELoss(TEMPERATURE, gather=True)
        self.warming_up = False

    def begin_epoch(self, epoch: int) -> None:
        """Switch the warm-up on or off: losses on the hardest negative begin with all negatives,
        without a temperature, or with InfoNCE.

        The hardest negative of an untrained model is noise, and its gradient collapses all
        embeddings into one point.
        """
        self.warming_up = epoch < self.config.warmup_epochs
        if isinstance(self.criterion, itrloss.TripletLoss):
            options = self.config.loss_options
            self.criterion.mining = options.get("mining", "hardest")
            self.criterion.temperature = options.get("temperature")
            if self.warming_up:
                # a sum over all negatives has no soft form
                self.criterion.temperature = None
                self.criterion.mining = "all"

    def prepare(self, model: VSE, *inputs: Tensor | None) -> None:
        """Do what a step needs before its loss."""

    def finish(self, ids: Tensor) -> None:
        """Do what a step needs after its backward pass; ``ids`` are of the batch's texts."""

    def forward(self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor) -> Value:
        """Return the loss of the model's outputs, and figures to log."""
        value, figures = self.of_pairs(outputs, image_ids, text_ids)
        if not self.config.caption_weight:
            return value, figures
        texts = outputs[1].unflatten(0, (-1, self.config.captions_per_image))
        same_image = self.captions(texts[:, 0], texts[:, 1], image_ids, image_ids)
        figures = {**figures, "captions": same_image.detach()}
        return value + self.config.caption_weight * same_image, figures

    def of_pairs(self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor) -> Value:
        """Return the loss between images and texts."""
        criterion = self.criterion
        if isinstance(criterion, itrloss.TripletLoss) and self.softly:
            criterion = itrloss.InfoNCELoss(TEMPERATURE, reduction=criterion.reduction, gather=True)
        value = criterion(*outputs, image_ids=image_ids, text_ids=text_ids)
        return value, figures_of(self.criterion)

    @property
    def softly(self) -> bool:
        """Whether InfoNCE takes the place of all negatives now."""
        return self.warming_up and self.config.warmup == "infonce"

    def figures(self, model: VSE) -> dict[str, float]:
        """Figures of the state after an epoch, for the log."""
        return {}


class MemoryObjective(Objective):
    """A loss with momentum encoders and a memory of their keys."""

    def __init__(self, config: Config, model: VSE) -> None:
        super().__init__(config)
        self.keys = itrloss.MomentumEncoder(model, config.momentum)
        self.memory = itrloss.CoupledMemory(config.memory, config.dim)
        self.batch_keys: tuple[Tensor, Tensor] | None = None  # of the images, once a caption

    def prepare(self, model: VSE, *inputs: Tensor | None) -> None:
        """Update the momentum encoders and compute the keys of the batch."""
        self.keys.update(model)
        images, texts = self.keys(*inputs)[:2]
        self.batch_keys = self._for_each_caption(images), texts

    def of_pairs(self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor) -> Value:
        # A memory holds pairs, so images are repeated for their captions. The outputs are of images
        # and of texts in turn.
        assert self.batch_keys is not None
        pairs = list(outputs)
        pairs[::2] = map(self._for_each_caption, outputs[::2])
        ids = {"image_ids": text_ids, "text_ids": text_ids}
        value = self.criterion(*pairs[:2], *self.batch_keys, self.memory, *pairs[2:], **ids)
        if isinstance(value, tuple):
            total, terms = value
            return total, terms._asdict()
        return value, figures_of(self.criterion)

    def finish(self, ids: Tensor) -> None:
        """Enqueue the batch into the memory."""
        assert self.batch_keys is not None
        self.memory.enqueue(*self.batch_keys, ids)
        self.batch_keys = None

    def _for_each_caption(self, images: Tensor) -> Tensor:
        """Repeat each image once per caption in the batch."""
        return images.repeat_interleave(self.config.captions_per_image, 0)


class DVSEObjective(Objective):
    """DVSE's objective, summed over the batch, so that gradients are clipped both during and after
    the warm-up.

    Otherwise the warm-up's gradients are many times as large, and the second moments that they
    leave in AdamW make the following steps too small.
    """

    criterion: itrloss.DVSEObjective  # type: ignore[assignment]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        margin = self.criterion.variance_aware.margin
        self.all = itrloss.TripletLoss(margin, mining="all", reduction="mean", gather=True)
        self.hardest = itrloss.TripletLoss(margin, reduction="mean", gather=True)
        self.infonce = itrloss.InfoNCELoss(TEMPERATURE, reduction="mean", gather=True)

    def of_pairs(self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor) -> Value:
        if len(outputs) == 4:
            sets, texts, residuals, gate = outputs
        else:  # the "whole" view: sets of one element, with nothing to be orthogonal to
            images, texts = outputs
            sets = images[:, None]
            residuals = sets.detach()
            gate = None
        if not self.config.gate:
            gate = None
        batch = len(sets) * world_size()
        if self.config.variance_weights and not self.warming_up:
            total, terms = self.criterion(sets, texts, residuals, gate, image_ids, text_ids)
            return batch * total, terms._asdict()
        orthogonal = self.criterion.orthogonal(residuals, gate)
        balance = self.criterion.balance
        if self.warming_up:
            loss = self.infonce if self.softly else self.all
            # no orthogonal loss in training: none in the warm-up
            apart = APART if balance < 1 else 0.0
            heads = self._of_heads(loss, sets, texts, image_ids, text_ids)
            total = heads.mean() + apart * orthogonal
        else:
            heads = self._of_heads(self.hardest, sets, texts, image_ids, text_ids)
            total = balance * heads.sum() + (1 - balance) * orthogonal
        return batch * total, {"orthogonal": orthogonal.detach()}

    def _of_heads(self, loss: nn.Module, sets: Tensor, texts: Tensor, *ids: Tensor) -> Tensor:
        """The loss of each head, (K,)."""
        return torch.stack([loss(images, texts, *ids) for images in sets.unbind(1)])

    @torch.no_grad()
    def figures(self, model: VSE) -> dict[str, float]:
        if not isinstance(model, DVSE):  # the "whole" view
            return {}
        return {f"gate_{k}": rate for k, rate in enumerate(model.gate.on_rate.tolist())}


class Objectives(nn.Module):
    """The sum of one objective for each view of a model; methods as of :class:`Objective`."""

    def __init__(self, config: Config, models: Sequence[VSE]) -> None:
        super().__init__()
        self.each = nn.ModuleList(_of_view(config, model) for model in models)
        self.outputs = [model.outputs for model in models]

    def __iter__(self) -> Iterator[Objective]:
        return cast("Iterator[Objective]", iter(self.each))

    def begin_epoch(self, epoch: int) -> None:
        for objective in self:
            objective.begin_epoch(epoch)

    def prepare(self, model: VSE, *inputs: Tensor | None) -> None:
        for objective, view in zip(self, views(model), strict=True):
            objective.prepare(view, *inputs)

    def forward(self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor) -> Value:
        values, figures, start = [], {}, 0
        for v, (objective, width) in enumerate(zip(self, self.outputs, strict=True)):
            value, own = objective(outputs[start : start + width], image_ids, text_ids)
            values.append(value)
            figures |= {f"{name}_view{v}": x for name, x in own.items()}
            start += width
        return torch.stack(values).sum(), figures

    def finish(self, ids: Tensor) -> None:
        for objective in self:
            objective.finish(ids)

    def figures(self, model: VSE) -> dict[str, float]:
        values = {}
        for v, (objective, view) in enumerate(zip(self, views(model), strict=True)):
            for name, x in objective.figures(view).items():
                values[f"{name}_view{v}"] = x
        return values


def build_objective(config: Config, model: VSE) -> Objective | Objectives:
    """Build the objective of the model: one per view if it has several views."""
    if isinstance(model, Views):
        return Objectives(config, list(model))
    return _of_view(config, model)


def _of_view(config: Config, model: VSE) -> Objective:
    if config.loss in WITH_MEMORY:
        return MemoryObjective(config, model)
    if config.loss == "dvse":
        return DVSEObjective(config)
    return Objective(config)
