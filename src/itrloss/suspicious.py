"""The warning of input that can be computed with, but is probably not what was meant."""

from __future__ import annotations

import inspect
import warnings

import torch
from torch import Tensor

from .engine.vectors import CHUNK, chunks, compute_dtype
from .hints import EMBEDDINGS

_INSIDE = ("itrloss", "torch")  # packages whose lines a user did not write


class SuspiciousInputWarning(UserWarning):
    """Input that can be computed with, but is probably not what was meant.

    The filters of ``warnings`` show it once for each line of yours that causes it, hide it, or
    make it an error.
    """


class UnfitScalesWarning(SuspiciousInputWarning):
    """Scales of a re-ranker that are probably not for its scores.

    A comparison of many re-rankers says this once, of all of them.
    """


def warn(message: str, category: type[Warning] = SuspiciousInputWarning) -> None:
    """Warn of input, at the line of the user's code that passed it."""
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def warn_of_embeddings(name: str, scores: Tensor) -> None:
    """Warn if the rows of a score matrix (N, M) are unit vectors, as only embeddings are.

    A matrix with an entry of almost 1 may be a right one, such as the unit matrix.
    """
    x = scores.detach()
    if len(x) < 2 or x.shape[1] < 2:
        return
    error = max(1e-3, 2 * torch.finfo(x.dtype).eps)
    for part in chunks(x):  # half precision is converted
        lengths = torch.linalg.vector_norm(x[part], dim=1, dtype=compute_dtype(x))
        if bool((lengths - 1).abs().amax() > error):
            return
    low, high = x.aminmax()
    if bool(torch.maximum(-low, high) < 0.99):
        warn(
            f"{name}: each row has length 1, as embeddings have, and is taken for scores of one "
            f"image with all texts; {EMBEDDINGS}"
        )


def row_labels(x: Tensor) -> Tensor:
    """Return (N,) int64 numbers of the rows (N, D), the same for rows that are equal.

    They need to be equal up to rounding.
    """
    x = x.detach()
    rtol = max(1e-5, 2 * torch.finfo(x.dtype).eps)
    generator = torch.Generator("cpu").manual_seed(0)
    direction = torch.randn(x.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    direction = direction.to(x.device)
    keys = torch.empty(len(x), dtype=torch.float64, device=x.device)
    lengths = torch.empty_like(keys)
    for part in chunks(x):
        rows = x[part].double()
        keys[part] = rows @ direction
        lengths[part] = rows.norm(dim=1)
    order = keys.argsort()  # copies are neighbours in this order
    near = keys[order].diff().abs() <= 1e-6 + rtol * lengths[order[1:]]
    candidates = near.nonzero().squeeze(1)
    same = torch.zeros_like(near)
    step = max(1, CHUNK // max(1, x.shape[1]))
    for some in candidates.split(step):
        pairs = x[order[some]], x[order[some + 1]]
        same[some] = torch.isclose(*pairs, rtol, 1e-6).all(1)
    labels = torch.zeros_like(order)
    labels[order[1:]] = (~same).cumsum(0)
    return labels


def number_shared(x: Tensor, others: Tensor) -> int:
    """Return how many rows of (N, D) are rows of (M, E), too, up to rounding; 0 if D is not E."""
    if x.shape[1] != others.shape[1]:
        return 0
    labels = row_labels(torch.cat([x, others.to(x.dtype)]))
    return int(torch.isin(labels[: len(x)], labels[len(x) :]).sum())
