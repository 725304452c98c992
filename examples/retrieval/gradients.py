"""The gradients of a batch, encoded as a whole or a few samples at a time.

Both functions return the loss, figures to log, and the seconds of the loss itself, its forward and
backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

import itrloss

from .objectives import Objective, Objectives

# Regions (B, R, d), words (M, L), lengths (M,), and optionally global features (B, d').
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
Found = tuple[float, dict[str, Tensor], float]


class Step(NamedTuple):
    """A batch, with the model, objective and precision of its training step."""

    encode: nn.Module
    objective: Objective | Objectives
    inputs: Inputs
    ids: tuple[Tensor, Tensor]  # ids of images and of texts
    scaler: torch.amp.GradScaler
    precision: AbstractContextManager  # autocast of the encoders
    now: Callable[[], float]  # clock, in seconds


def of_whole_batch(step: Step) -> Found:
    """Compute gradients in two parts, so that the loss can be timed by itself.

    The loss is computed on detached copies of the encoders' outputs, and their gradients are then
    propagated through the encoders. The gradients are those of a single backward pass.
    """
    with step.precision:
        outputs = step.encode(*step.inputs)
    start = step.now()
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in outputs]
    loss, figures = step.objective(leaves, *step.ids)
    step.scaler.scale(loss).backward()
    seconds = step.now() - start
    reached = [
        (x, leaf.grad) for x, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None
    ]
    torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])
    return loss.item(), figures, seconds


def of_chunks(step: Step, chunk: int, of_texts: tuple[int, ...]) -> Found:
    """Compute gradients of the whole batch in the memory of ``chunk`` samples, at the cost of a
    second forward pass.

    Args:
        of_texts: which of the encoders' outputs have one row per text.
    """
    regions, words, lengths, wholes = step.inputs
    rows = [regions, *(x.unflatten(0, (len(regions), -1)) for x in (words, lengths))]
    start = end = 0.0

    def stamp(_: Tensor) -> None:
        nonlocal end
        end = step.now()

    def loss(outputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal start
        start = step.now()
        for x in outputs:
            if x.requires_grad:
                x.register_hook(stamp)  # the loss ends with the last of these gradients
        return step.objective(
            [x.flatten(0, 1) if k in of_texts else x for k, x in enumerate(outputs)], *step.ids
        )

    inputs = tuple(rows if wholes is None else [*rows, wholes])
    with step.precision:
        encoders = [BySample(step.encode, of_texts)]
        value, figures = itrloss.grad_cache_step(
            loss, encoders, [inputs], chunk, scaler=step.scaler
        )
    return value.item(), figures, end - start


class BySample(nn.Module):
    """Encoder of samples, an image with all its captions: every input and every output has one row
    per sample.
    """

    def __init__(self, encode: nn.Module, of_texts: tuple[int, ...]) -> None:
        super().__init__()
        self.encode, self.of_texts = encode, of_texts

    def no_sync(self) -> AbstractContextManager:
        return self.encode.no_sync() if hasattr(self.encode, "no_sync") else nullcontext()  # pyright: ignore

    def forward(
        self, regions: Tensor, words: Tensor, lengths: Tensor, *wholes: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = self.encode(regions, words.flatten(0, 1), lengths.flatten(), *wholes)
        return tuple(
            x.unflatten(0, (len(regions), -1)) if k in self.of_texts else x
            for k, x in enumerate(outputs)
        )
