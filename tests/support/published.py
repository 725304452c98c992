"""Stand-ins with the classes of open_clip 3.3, for tests where that package is not installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn


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


class SigLipLoss(nn.Module):
    def __init__(self, cache_labels=False, rank=0, world_size=1, dist_impl=None):
        super().__init__()


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
