"""Training objectives: any loss of itrloss and, if it needs them, momentum encoders and a
memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import itrloss
from itrloss.distributed import gather, world_size
from itrloss.functional import set_similarity

from .config import Config
from .models import VSE, Views, views

LOSSES: dict[str, type[nn.Module]] = {
    "triplet": itrloss.TripletLoss,
    "infonce": itrloss.InfoNCELoss,
    "sigmoid": itrloss.SigmoidLoss,
    "hal": itrloss.HubnessAwareLoss,
    "dcl": itrloss.DiversityContrastiveLoss,
    "mdcl": itrloss.MemoryDiversityContrastiveLoss,
    "uto": itrloss.UnifiedTrainingObjective,
    "coder": itrloss.CODERObjective,
    "dvse": itrloss.DVSEObjective,
    "pvse": itrloss.TripletLoss,
}
# Weight of DVSE's orthogonal loss during the warm-up, where it is added to a sum over all negatives
# of some tens. Without it, the heads become identical.
APART = 10.0
DIVERSITY = 0.1  # weight of PVSE's diversity loss, on the residuals of both sides
TEMPERATURE = 0.07  # of InfoNCE between captions, and in the warm-up
WITH_MEMORY = ("mdcl", "uto", "coder")
# The classes to which objectives pass on their keyword arguments.
PASSED_ON: dict[str, type[nn.Module]] = {
    "coder": itrloss.DiversityContrastiveLoss,
    "dvse": itrloss.VarianceAwareLoss,
}


def build_loss(config: Config) -> nn.Module:
    """Build the loss that the settings name; a ValueError names an unknown loss or option."""
    name, options = config.loss, dict(config.loss_options)
    if name not in LOSSES:
        raise ValueError(f"loss = {name!r}: must be one of {', '.join(LOSSES)}")
    if options.get("reduction") == "none":
        raise ValueError(
            "loss_options.reduction = 'none': training needs one number, 'mean' or 'sum'"
        )
    known = [p for kind in (LOSSES[name], PASSED_ON.get(name)) if kind for p in _parameters(kind)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"loss_options.{option}: {LOSSES[name].__name__} takes {', '.join(known)}"
            )
    if options.get("diversity") == "none":  # TOML has no null
        options["diversity"] = None
    if name == "coder":
        options = {"dim": config.dim, "clusters": 200, **options}
    if name != "pvse":  # which is given scores
        # the loss of a distributed job is over the batches of all processes
        options["gather"] = True
    return LOSSES[name](**options)


def _parameters(kind: type[nn.Module]) -> list[str]:
    """Names of the parameters of a class's constructor and of its base classes' constructors."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    parameters = [
        p
        for c in own
        if "__init__" in vars(c)
        for p in inspect.signature(c.__init__).parameters.values()
    ]
    passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return list(
        dict.fromkeys(p.name for p in parameters if p.name != "self" and p.kind not in passed_on)
    )


class Objective(nn.Module):
    """A loss and what it needs besides the batch; its state is part of a checkpoint."""

    def __init__(self, config: Config, model: VSE) -> None:
        super().__init__()
        self.config = config
        self.criterion = build_loss(config)
        self.warming_up = False
        margin = (
            self.criterion.variance_aware.margin
            if isinstance(self.criterion, itrloss.DVSEObjective)
            else 0.2
        )
        self.beginning: nn.Module = itrloss.TripletLoss(
            margin, mining="all", reduction="mean", gather=True
        )
        if config.warmup == "infonce":
            reduction = (
                self.criterion.reduction
                if isinstance(self.criterion, itrloss.TripletLoss)
                else "mean"
            )
            self.beginning = itrloss.InfoNCELoss(
                TEMPERATURE, reduction=reduction, gather=config.loss != "pvse"
            )
        self.hardest = itrloss.TripletLoss(margin, reduction="mean", gather=True)
        self.apart = itrloss.DynamicOrthogonalLoss(0.0, "frobenius", gather=True)
        self.captions = itrloss.InfoNCELoss(TEMPERATURE, gather=True)
        self.keys: itrloss.MomentumEncoder | None = None
        self.memory: itrloss.CoupledMemory | None = None
        self.batch_keys: tuple[Tensor, ...] = ()
        if config.loss in WITH_MEMORY:
            self.keys = itrloss.MomentumEncoder(model, config.momentum)
            self.memory = itrloss.CoupledMemory(config.memory, config.dim)

    def begin_epoch(self, epoch: int) -> None:
        """Switch the warm-up on or off: losses on the hardest negative begin with all negatives, or
        with InfoNCE.

        The hardest negative of an untrained model is noise, and its gradient collapses all
        embeddings into one point.
        """
        self.warming_up = epoch < self.config.warmup_epochs
        if isinstance(self.criterion, itrloss.TripletLoss):
            self.criterion.mining = (
                "all" if self.warming_up else self.config.loss_options.get("mining", "hardest")
            )

    def prepare(self, model: VSE, *inputs: Tensor | None) -> None:
        """Update the momentum encoders and compute the keys of the batch, before the loss of a
        step.
        """
        if self.keys is not None:
            self.keys.update(model)
            images, texts = self.keys(*inputs)[:2]
            self.batch_keys = self._for_each_caption(images), texts

    def _for_each_caption(self, images: Tensor) -> Tensor:
        """Repeat each image once per caption in the batch."""
        return images.repeat_interleave(self.config.captions_per_image, 0)

    def forward(
        self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the model's outputs, and figures to log."""
        value, figures = self._of_pairs(outputs, image_ids, text_ids)
        if not self.config.caption_weight:
            return value, figures
        texts = outputs[1] if outputs[1].ndim == 2 else outputs[1].mean(1)
        firsts, seconds = texts.unflatten(0, (-1, self.config.captions_per_image)).unbind(1)[:2]
        same_image = self.captions(firsts, seconds, image_ids, image_ids)
        return value + self.config.caption_weight * same_image, figures | {
            "captions": same_image.detach()
        }

    def _of_pairs(
        self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(self.criterion, itrloss.DVSEObjective):
            return self._of_sets(self.criterion, outputs, image_ids, text_ids)
        softly = (
            self.warming_up
            and self.config.warmup == "infonce"
            and isinstance(self.criterion, itrloss.TripletLoss)
        )
        criterion = self.beginning if softly else self.criterion
        if self.config.loss == "pvse":
            image_ids, text_ids = (gather(ids) for ids in (image_ids, text_ids))
            scores = set_similarity(gather(outputs[0]), gather(outputs[1]), "max")
            diversity = torch.stack([self.apart(residuals) for residuals in outputs[2:]]).sum()
            value = criterion(scores=scores, image_ids=image_ids, text_ids=text_ids)
            return value + DIVERSITY * diversity, {"diversity": diversity.detach()}
        if self.memory is None:
            value = criterion(*outputs, image_ids=image_ids, text_ids=text_ids)
        else:  # a memory holds pairs, so images are repeated for their captions
            pairs = [x if k % 2 else self._for_each_caption(x) for k, x in enumerate(outputs)]
            ids = {"image_ids": text_ids, "text_ids": text_ids}
            value = criterion(*pairs[:2], *self.batch_keys, self.memory, *pairs[2:], **ids)
        if isinstance(value, tuple):
            total, terms = value
            return total, dict(terms._asdict())
        return value, dict(getattr(self.criterion, "telemetry", {}))

    def _of_sets(
        self,
        criterion: itrloss.DVSEObjective,
        outputs: Sequence[Tensor],
        image_ids: Tensor,
        text_ids: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss summed over the batch, so that gradients are clipped both during and after the
        warm-up.

        Otherwise the warm-up's gradients are many times as large, and the second moments that they
        leave in AdamW make the following steps too small.
        """
        # the "whole" view: sets of one element, with nothing to be orthogonal to
        if len(outputs) == 2:
            sets, texts, gate = outputs[0][:, None], outputs[1], None
            residuals = sets.detach()
        else:
            sets, texts, residuals, gate = outputs
        batch, gate = len(sets) * world_size(), gate if self.config.gate else None
        if self.config.variance_weights and not self.warming_up:
            total, terms = criterion(sets, texts, residuals, gate, image_ids, text_ids)
            return batch * total, dict(terms._asdict())
        loss = self.beginning if self.warming_up else self.hardest
        heads = torch.stack([loss(x, texts, image_ids, text_ids) for x in sets.unbind(1)])
        orthogonal = criterion.orthogonal(residuals, gate)
        if self.warming_up:
            # no orthogonal loss in training: none in the warm-up
            apart = APART if criterion.balance < 1 else 0.0
            total = heads.mean() + apart * orthogonal
        else:
            total = criterion.balance * heads.sum() + (1 - criterion.balance) * orthogonal
        return batch * total, {"orthogonal": orthogonal.detach()}

    def finish(self, ids: Tensor) -> None:
        """Enqueue the batch into the memory, after the backward pass."""
        if self.memory is not None:
            images, texts = self.batch_keys
            self.memory.enqueue(images, texts, ids)
            self.batch_keys = ()

    @torch.no_grad()
    def figures(self, model: VSE) -> dict[str, float]:
        """Figures of the state after an epoch, for the log."""
        values: dict[str, Any] = {}
        gate = getattr(model, "gate", None)
        if gate is not None:
            values |= {f"gate_{k}": float(rate) for k, rate in enumerate(gate.on_rate)}
        return values


class Objectives(nn.Module):
    """The sum of one objective for each view of a model."""

    def __init__(self, config: Config, models: Sequence[VSE]) -> None:
        super().__init__()
        self.each = nn.ModuleList(Objective(config, model) for model in models)
        self.outputs = [model.outputs for model in models]

    def __iter__(self) -> Iterator[Objective]:
        return iter(self.each)  # type: ignore[arg-type]

    def begin_epoch(self, epoch: int) -> None:
        """See :class:`Objective`, as for the methods below."""
        for objective in self:
            objective.begin_epoch(epoch)

    def prepare(self, model: VSE, *inputs: Tensor | None) -> None:
        for objective, view in zip(self, views(model), strict=True):
            objective.prepare(view, *inputs)

    def forward(
        self, outputs: Sequence[Tensor], image_ids: Tensor, text_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
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
        values = [
            objective.figures(view) for objective, view in zip(self, views(model), strict=True)
        ]
        return {f"{name}_view{v}": x for v, own in enumerate(values) for name, x in own.items()}


def build_objective(config: Config, model: VSE) -> Objective | Objectives:
    """Build the objective of the model: one per view if it has several views."""
    return (
        Objectives(config, views(model)) if isinstance(model, Views) else Objective(config, model)
    )
