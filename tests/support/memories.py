"""Batches next to a memory, by the name of their shape."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from itrloss import CoupledMemory
from support.cases import embeddings, make_ids

D = 6  # dimensions
# images, texts, entries, kind of ids
SHAPES = {
    "pairs": (7, 7, 12, None),
    "ids": (7, 7, 12, "random"),
    "wide": (5, 11, 9, "random"),
    "empty": (6, 6, 0, None),
}


class MemoryBatch(NamedTuple):
    """What a loss over a memory takes, in its order."""

    images: Tensor
    texts: Tensor
    image_keys: Tensor
    text_keys: Tensor
    memory: CoupledMemory
    image_ids: Tensor | None
    text_ids: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """The embeddings, which get gradients."""
        return self.images, self.texts


def filled(
    entries: int,
    dtype: torch.dtype = torch.float64,
    ids: Tensor | None = None,
    size: int | None = None,
) -> CoupledMemory:
    """A memory with some unused capacity, from batches whose size does not divide its entries."""
    memory = CoupledMemory(size or entries + 3, D, dtype=dtype)
    images, texts = embeddings(max(entries, 1), max(entries, 1), D, seed=5)
    for start in range(0, entries, 4):
        part = slice(start, min(entries, start + 4))
        memory.enqueue(images[part], texts[part], None if ids is None else ids[part])
    return memory


def memory_batch(shape: str, dtype: torch.dtype = torch.float64) -> MemoryBatch:
    n, m, entries, kind = SHAPES[shape]
    memory_ids = None
    if kind is not None:
        memory_ids, _ = make_ids(kind, entries, 1, seed=7)
    images, texts = embeddings(n, m, D, dtype=dtype)
    keys = embeddings(n, m, D, seed=9, dtype=dtype)
    memory = filled(entries, dtype, memory_ids)
    ids = make_ids(kind, n, m)
    return MemoryBatch(images.requires_grad_(), texts.requires_grad_(), *keys, memory, *ids)
