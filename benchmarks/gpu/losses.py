"""The losses that are compared with float64: between them they ask all that kernels answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from itrloss import (
    DiversityContrastiveLoss,
    HubnessAwareLoss,
    InfoNCELoss,
    SigmoidLoss,
    TripletLoss,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Called with `engine=`.
LOSSES: dict[str, Callable[..., nn.Module]] = {
    "infonce": InfoNCELoss,
    "infonce sharp": partial(InfoNCELoss, 0.01),
    "infonce learnable": partial(InfoNCELoss, learnable=True),
    "siglip": SigmoidLoss,
    "dcl std": DiversityContrastiveLoss,
    "dcl entropy": partial(
        DiversityContrastiveLoss,
        diversity="entropy",
        entropy_temperature=0.1,
        detach_diversity=False,
    ),
    "hal": HubnessAwareLoss,
    "triplet all": partial(TripletLoss, mining="all", reduction="mean"),  # sums leave float16
}
