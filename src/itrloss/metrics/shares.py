"""The test data of all processes of ``torch.distributed``, for metrics and re-rankers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import require_finite
from ..distributed import agreement, gather_all, numbered
from ..engine.matrix import check_unchanged
from ..similarity import Similarity


class Shares:
    """The images and texts of all processes, each of which computes the results of its own queries.

    Every process raises an error if one does: if it failed alone, the others would hang.

    Args:
        sim: this process's similarity of embeddings, images as rows. Its ids are valid across processes; ids of texts
            alone are numbers of this process's images.
        question: what is computed, in words: it has to be the same in every process.
        process_group: by default, all processes.

    Attributes:
        own, ids: this process's images and texts, and their ids; ``every``, ``every_ids`` those of all, by rank.
        first: the indices of the first own image and the first own text in ``every``.
    """

    def __init__(self, sim: Similarity | Tensor, question: str, process_group: Any = None):
        self.group = process_group
        with agreement(process_group) as agreed:
            if not isinstance(sim, Similarity | Tensor):
                raise TypeError(f"scores: expected a Similarity, got {type(sim).__name__}")
            if isinstance(sim, Tensor) or sim._side or sim._inputs is None:
                raise ValueError("scores: expected a Similarity of embeddings, images as rows, for gather=True")
            check_unchanged([sim._matrix])
            self.sim, self.own = sim, tuple(x.detach() for x in sim._inputs)
            for name, x in zip(("images", "texts"), self.own, strict=True):
                require_finite(name, x)
            kinds = [f"{str(x.dtype)[6:]} (B, {x.shape[1]})" for x in self.own]
            ids = [x is not None for x in sim.ids]
            agreed.text = f"{kinds}, normalize={sim._matrix.bounded}, ids of images and texts {ids}, {question}"
            agreed.numbers = sim.shape
        rank = dist.get_rank(process_group)
        self.first = tuple(sum(sizes[side] for sizes in agreed.every[:rank]) for side in (0, 1))
        self.ids = self._ids()
        *every, first, second = gather_all((*self.own, *self.ids), process_group)
        self.every, self.every_ids = every, (first, second)

    def _ids(self) -> tuple[Tensor, Tensor]:
        images, texts = self.sim.ids
        numbers = torch.arange(self.sim.shape[0], device=self.sim.device) + self.first[0]
        if images is not None and texts is not None:
            return images, texts
        return numbers, numbers if texts is None else numbered(texts, len(numbers), self.first[0])

    def queries(self, side: int) -> Similarity:
        """Return the similarity of own images with all texts (``side`` 0), or of own texts with all images (1)."""
        engine: Any = self.sim.engine if self.sim.engine in ("tiled", "triton") else "auto"
        ids = self.ids[side], self.every_ids[1 - side]
        normalize = self.sim._matrix.bounded
        return Similarity(self.own[side], self.every[1 - side], *ids, normalize=normalize, engine=engine)
