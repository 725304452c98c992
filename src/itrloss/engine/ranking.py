"""Answers that are not sums over candidates: the best candidate, and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .vectors import chunks

# Number of positives of an anchor beyond which sorting its rivals beats comparing them with each.
MANY = 32
RUN = 64  # length of the runs in `argmax`


def argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``x.max(dim)`` of a matrix.

    On the CPU, PyTorch vectorises it only without the index, so the best run of 64 comes first: 0.5
    of the time along rows of 1024 x 1024, 0.2 along columns (``pytest benchmarks/test_micro.py
    --benchmark-enable -k argmax``).
    """
    if x.device.type != "cpu" or x.shape[dim] % RUN:
        return x.max(dim)
    if x.stride(0) < x.stride(1):  # as it lies in memory, which takes a tenth of the time
        return argmax(x.T, 1 - dim)
    runs = x.unflatten(dim, (-1, RUN))
    value, run = runs.amax(dim + 1).max(dim)
    best = torch.take_along_dim(runs, run.unsqueeze(dim).unsqueeze(dim), dim).squeeze(dim)
    return value, best.argmax(dim).add_(run, alpha=RUN)


def ranks(
    thresholds: Tensor,  # (B, P) scores of the positives, nan where there is none
    rivals: Tensor,  # (B, C) scores of the negatives, -inf for other candidates
    optimistic: bool,
) -> Tensor:
    """Return the (B, P) ranks of positives, from 1, ascending, padded with 0.

    A negative with the score of a positive ranks ahead of it, unless ``optimistic``.
    """
    count = thresholds.shape[1]
    missing = thresholds.isnan()
    if count > MANY:
        ordered = rivals.sort(dim=1).values
        ahead = rivals.shape[1] - torch.searchsorted(ordered, thresholds, right=optimistic)
    else:
        compare = torch.gt if optimistic else torch.ge
        ahead = torch.zeros_like(thresholds, dtype=torch.int64)
        for part in chunks(rivals):  # to be summed, a mask is copied to int64
            for k in range(count):
                ahead[part, k] = compare(rivals[part], thresholds[part, k, None]).sum(1)
    last = torch.iinfo(torch.int64).max // 2
    ahead = ahead.masked_fill_(missing, last).sort(dim=1).values
    positions = torch.arange(1, count + 1, device=rivals.device)
    return (ahead + positions).masked_fill_(missing.sort(dim=1).values, 0)
