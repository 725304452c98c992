"""The gradients of a batch: with encoders that take it whole, or a few samples at a time.

Both return the loss, figures worth logging, and the seconds of the loss alone, its forward and its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

import itrloss

from .objectives import Objective, Objectives

# Regions (B, R, d), words (M, L), lengths (M,), and whole pictures (B, d') where there are any.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
Found = tuple[float, dict[str, Tensor], float]


class Step(NamedTuple):
    """A batch, and what it is trained with."""

    encode: nn.Module
    objective: Objective | Objectives
    inputs: Inputs
    ids: tuple[Tensor, Tensor]  # of images and of texts
    scaler: torch.amp.GradScaler
    precision: AbstractContextManager  # of the encoders
    now: Callable[[], float]  # seconds


def of_whole_batch(step: Step) -> Found:
    """The loss runs on leaves cut from the encoders' outputs, so that it can be timed by itself; the gradients of the
    leaves are then sent on into the encoders: the very gradients of one backward pass.
    """
    with step.precision:
        outputs = step.encode(*step.inputs)
    start = step.now()
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in outputs]
    loss, figures = step.objective(leaves, *step.ids)
    step.scaler.scale(loss).backward()
    seconds = step.now() - start
    reached = [(x, leaf.grad) for x, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
    torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])
    return loss.item(), figures, seconds


def of_chunks(step: Step, chunk: int, of_texts: tuple[int, ...]) -> Found:
    """The loss of the whole batch in the memory of ``chunk`` samples, for two forward passes of the encoders.

    Args:
        of_texts: which of the encoders' outputs have a row a text.
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
                x.register_hook(stamp)  # the last gradient to come is the end of the loss
        return step.objective([x.flatten(0, 1) if k in of_texts else x for k, x in enumerate(outputs)], *step.ids)

    given = tuple(rows if wholes is None else [*rows, wholes])
    with step.precision:
        encoders = [BySample(step.encode, of_texts)]
        value, figures = itrloss.grad_cache_step(loss, encoders, [given], chunk, scaler=step.scaler)
    return value.item(), figures, end - start


class BySample(nn.Module):
    """Encoders of samples, an image with all its captions: every input and every output has a row a sample."""

    def __init__(self, encode: nn.Module, of_texts: tuple[int, ...]) -> None:
        super().__init__()
        self.encode, self.of_texts = encode, of_texts

    def no_sync(self) -> AbstractContextManager:
        return self.encode.no_sync() if hasattr(self.encode, "no_sync") else nullcontext()  # pyright: ignore

    def forward(self, regions: Tensor, words: Tensor, lengths: Tensor, *wholes: Tensor) -> tuple[Tensor, ...]:
        outputs = self.encode(regions, words.flatten(0, 1), lengths.flatten(), *wholes)
        return tuple(x.unflatten(0, (len(regions), -1)) if k in self.of_texts else x for k, x in enumerate(outputs))
