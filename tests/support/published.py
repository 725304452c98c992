"""Stand-ins with the call forms of open_clip 3.3, for tests where that package is not installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn


def open_clip() -> Any:
    """Return the losses of the package; where it is not installed, those below."""
    try:
        from open_clip.loss import ClipLoss, SigLipLoss
    except (ImportError, RuntimeError):  # RuntimeError: its torchvision was built for another torch
        return SimpleNamespace(**globals())
    return SimpleNamespace(ClipLoss=ClipLoss, SigLipLoss=SigLipLoss)


class ClipLoss(nn.Module):
    def __init__(
        self,
        local_loss=False,
        gather_with_grad=False,
        cache_labels=False,
        rank=0,
        world_size=1,
        use_horovod=False,
    ):
        super().__init__()
        self.local_loss, self.gather_with_grad, self.rank, self.world_size = (
            local_loss, gather_with_grad, rank, world_size,
        )  # fmt: skip

    def gather(self, x: Tensor) -> Tensor:
        if self.gather_with_grad:
            return torch.cat(torch.distributed.nn.all_gather(x))
        gathered = [torch.zeros_like(x) for _ in range(self.world_size)]
        dist.all_gather(gathered, x)
        if not self.local_loss:
            gathered[self.rank] = x  # alone of all features with a gradient
        return torch.cat(gathered)

    def forward(
        self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False
    ):
        all_image_features, all_text_features = (
            self.gather(image_features),
            self.gather(text_features),
        )
        labels = torch.arange(len(image_features))
        if self.local_loss:
            logits_per_image = logit_scale * image_features @ all_text_features.T
            logits_per_text = logit_scale * text_features @ all_image_features.T
            labels = labels + len(labels) * self.rank
        else:
            logits_per_image = logit_scale * all_image_features @ all_text_features.T
            logits_per_text = logits_per_image.T
            labels = torch.arange(len(all_image_features))
        if logit_bias is not None:
            logits_per_image, logits_per_text = (
                logits_per_image + logit_bias,
                logits_per_text + logit_bias,
            )
        total_loss = (
            F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)
        ) / 2
        return {"contrastive_loss": total_loss} if output_dict else total_loss


class SigLipLoss(nn.Module):
    """With ``dist_impl="gather"``, whichever is asked for."""

    def __init__(self, cache_labels=False, rank=0, world_size=1, dist_impl=None):
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def _loss(self, image_features, text_features, logit_scale, logit_bias, negative_only=False):
        logits = logit_scale * image_features @ text_features.T + logit_bias
        labels = (0 if negative_only else 2) * torch.eye(len(logits)) - 1
        return -F.logsigmoid(labels * logits).sum() / len(image_features)

    def forward(self, image_features, text_features, logit_scale, logit_bias, output_dict=False):
        loss = self._loss(image_features, text_features, logit_scale, logit_bias)
        all_text = torch.distributed.nn.all_gather(text_features)
        for i in range(self.world_size):
            loss = loss + float(i != self.rank) * self._loss(
                image_features, all_text[i], logit_scale, logit_bias, negative_only=True
            )
        return {"contrastive_loss": loss} if output_dict else loss


class CoCaLoss(ClipLoss):
    def __init__(self, caption_loss_weight, clip_loss_weight, pad_id=0, **options):
        super().__init__(**options)


def create_loss(args):
    shared = {"rank": args.rank, "world_size": args.world_size}
    if args.siglip:
        return SigLipLoss(dist_impl=args.loss_dist_impl, **shared)
    shared |= {
        "local_loss": args.local_loss,
        "gather_with_grad": args.gather_with_grad,
        "cache_labels": True,
    }
    if "coca" in args.model.lower():
        return CoCaLoss(args.coca_caption_loss_weight, args.coca_contrastive_loss_weight, **shared)
    return ClipLoss(use_horovod=args.horovod, **shared)
