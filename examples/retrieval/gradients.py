"""The gradients of a batch that is encoded a few samples at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

import itrloss

from .data import Batch
from .objectives import Objective, Objectives, Value


def backward_in_chunks(
    encode: nn.Module,
    objective: Objective | Objectives,
    batch: Batch,
    chunk: int,
    of_texts: tuple[int, ...],
    scaler: torch.amp.GradScaler,
) -> Value:
    """Compute gradients of the whole batch in the memory of ``chunk`` samples, at the cost of a
    second forward pass. Return the loss, and figures to log.

    Args:
        of_texts: which of the encoders' outputs have one row per text.
    """

    def loss(outputs: tuple[Tensor, ...]) -> Value:
        by_row = [x.flatten(0, 1) if k in of_texts else x for k, x in enumerate(outputs)]
        return objective(by_row, batch.image_ids, batch.text_ids)

    samples = len(batch.regions)
    words = batch.words.unflatten(0, (samples, -1))
    lengths = batch.lengths.unflatten(0, (samples, -1))
    inputs = (batch.regions, words, lengths, batch.wholes)
    encoder = BySample(encode, of_texts)
    return itrloss.grad_cache_step(loss, [encoder], [inputs], chunk, scaler=scaler)


class BySample(nn.Module):
    """Encoder of samples, an image with all its captions: every input and every output has one row
    per sample.
    """

    def __init__(self, encode: nn.Module, of_texts: tuple[int, ...]) -> None:
        super().__init__()
        self.encode = encode
        self.of_texts = of_texts

    def no_sync(self) -> AbstractContextManager:
        if isinstance(self.encode, nn.parallel.DistributedDataParallel):
            return self.encode.no_sync()
        return nullcontext()

    def forward(
        self, regions: Tensor, words: Tensor, lengths: Tensor, wholes: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = self.encode(regions, words.flatten(0, 1), lengths.flatten(), wholes)
        return tuple(
            x.unflatten(0, (len(regions), -1)) if k in self.of_texts else x
            for k, x in enumerate(outputs)
        )
