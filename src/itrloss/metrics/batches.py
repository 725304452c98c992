"""Retrieval metrics of batches, for TorchMetrics (``pip install 'itrloss[metrics]'``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import (
    IMAGES_AND_TEXTS,
    IdsLike,
    are_strings,
    as_id_numbers,
    as_size,
    check_embeddings,
    from_numpy,
    ids_of_both,
    one_of,
    takes_queries,
)
from ..distributed import consensus, world_size
from ..distributed.consensus import described
from ..rerank import Reranker
from ..similarity import NO_ID, Similarity
from .labels import default_ids
from .results import RECALLS, Ks, as_ks
from .retrieval import Options, Ties, check_reranker, retrieval_metrics

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ImportError:
    raise ImportError(
        "RetrievalMetrics needs TorchMetrics: install itrloss with the extra 'metrics'"
    ) from None

# what a batch is paired by, in place of a number of texts an image
_INTEGERS = -1
_STRINGS = -2
_MIXED = "image_ids, text_ids: expected both in all batches, or neither in any"


class RetrievalMetrics(Metric):
    """Compute :func:`itrloss.metrics.retrieval_metrics` of all batches of all processes.

    Every process stores copies of its embeddings until ``reset()``, and holds the embeddings of all
    processes in :meth:`compute`.

    Args:
        normalize: see :class:`itrloss.Similarity`.
        ks: see :func:`itrloss.metrics.retrieval_metrics`.
        reranker, ties, hubness_k, folds: see :func:`itrloss.metrics.retrieval_results`.
        kwargs: see ``torchmetrics.Metric``.
    """

    is_differentiable = False
    full_state_update = False

    # one tensor for each batch; one tensor for all after an exchange between processes
    images: list[Tensor]
    texts: list[Tensor]
    image_ids: list[Tensor]
    text_ids: list[Tensor]
    paired_by: list[Tensor]  # (1,): texts an image without ids; else _INTEGERS or _STRINGS

    def __init__(
        self,
        *,
        normalize: bool = True,
        ks: Ks = RECALLS,
        reranker: Reranker | None = None,
        ties: Ties = "pessimistic",
        hubness_k: int = 10,
        folds: int = 1,
        **kwargs: object,
    ):
        super().__init__(**kwargs)
        one_of("ties", ties, "pessimistic", "optimistic")  # now, not after the last batch
        if reranker is not None:
            check_reranker(reranker, False)
        self.normalize = normalize
        self.ks = as_ks(ks)
        self.options: Options = {
            "reranker": reranker,
            "ties": ties,
            "hubness_k": as_size("hubness_k", hubness_k),
            "folds": as_size("folds", folds),
        }
        for name in ("images", "texts", "image_ids", "text_ids", "paired_by"):
            self.add_state(name, [], dist_reduce_fx="cat")

    @takes_queries
    def update(
        self,
        images: Tensor,
        texts: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> None:
        """Add (B, D) images and (C, D) texts; each image and text must be added once only.

        ``image_ids``, ``text_ids``: (B,) and (C,) integers or strings, equal where image and text
        match, across batches and processes. Pass them in all batches or in none. Without them, ``C
        = c * B`` means c consecutive texts per image.
        """
        images = from_numpy(images)
        texts = from_numpy(texts)
        check_embeddings(images, texts, False, IMAGES_AND_TEXTS, empty=True)
        if len(images) == len(texts) == 0:
            return
        sizes = len(images), len(texts)
        paired_by = pairing(*sizes, image_ids, text_ids)
        if len(self.paired_by):  # compute() compares all, but here it is known which one differs
            check_alike([int(self.paired_by[0]), paired_by])
        if image_ids is not None:
            ids = ids_of_both(image_ids, text_ids, *sizes, images.device, IMAGES_AND_TEXTS)
            self.image_ids.append(ids[0])
            self.text_ids.append(ids[1])
        self.images.append(images.detach().clone())
        self.texts.append(texts.detach().clone())
        self.paired_by.append(torch.tensor([paired_by], device=images.device))

    def _paired_by(self) -> int:
        """Return what all batches are paired by; raise an error if they differ."""
        every = dim_zero_cat(self.paired_by).tolist()
        check_alike(every)
        return every[0]

    @takes_queries
    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> dict[str, Tensor] | None:
        """Add a batch as :meth:`update` does, and return the metrics of it alone.

        With folds or a re-ranker, which belong to the whole data and which a batch may be too small
        for, return None; also for a batch in which nothing matches, or which is empty.
        """
        batch = images, texts, image_ids, text_ids
        matches = len(images) > 0 and len(texts) > 0
        if matches and image_ids is not None and text_ids is not None:
            own = as_id_numbers("image_ids", image_ids)
            others = as_id_numbers("text_ids", text_ids)
            matches = bool(torch.isin(own[own != NO_ID], others).any())
        if matches and self.options.get("folds") == 1 and self.options.get("reranker") is None:
            return super().forward(*batch)
        self.update(*batch)
        return None

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Exchange the batches of all processes; raise an error in all of them if they differ in
        options or in what they were given, or if one has no batch.
        """
        should_sync = kwargs.get("should_sync", True)
        group = kwargs.get("process_group") or self.process_group
        if should_sync and not self._is_synced and world_size(group) > 1:
            with consensus(group) as agreed:
                if len(self.images) == 0:
                    raise ValueError(
                        "RetrievalMetrics: expected a call of update() first, got none"
                    )
                kind = described(self.images[0]), described(self.texts[0])
                paired_by = in_words(self._paired_by())
                agreed.text = f"{kind}, {paired_by}, normalize {self.normalize}, "
                agreed.text += f"ks {self.ks}, {self.options}"
        super().sync(*args, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics by name as 0-dim float64 tensors on the CPU.

        Raises:
            TypeError, ValueError: as :func:`itrloss.metrics.retrieval_results`; if there is no
                batch, or if some batches have ids and others none, or other numbers of texts an
                image.
        """
        if len(self.images) == 0:
            raise ValueError("RetrievalMetrics: expected a call of update() before compute()")
        texts_per_image = self._paired_by()
        images = dim_zero_cat(self.images)
        texts = dim_zero_cat(self.texts)
        ids: tuple[IdsLike | None, IdsLike | None] = (None, None)
        if texts_per_image < 0:
            ids = dim_zero_cat(self.image_ids), dim_zero_cat(self.text_ids)
        elif texts_per_image != 1:
            ids = default_ids(len(images), len(texts))
        sim = Similarity(images, texts, *ids, normalize=self.normalize)
        metrics = retrieval_metrics(sim, ks=self.ks, **self.options)
        return {name: torch.from_numpy(np.array(x)) for name, x in metrics.items()}


def pairing(n: int, m: int, image_ids: IdsLike | None, text_ids: IdsLike | None) -> int:
    """Return what a batch of n images and m texts is paired by; raise an error if it is nothing."""
    if (image_ids is None) != (text_ids is None):
        raise ValueError(_MIXED)
    if image_ids is not None:
        return _STRINGS if are_strings(image_ids) else _INTEGERS
    default_ids(n, m)  # raises an error unless the number is whole
    return m // n


def in_words(paired_by: int) -> str:
    """Return what batches are paired by, for a message."""
    if paired_by >= 0:
        return f"{paired_by} texts an image without ids"
    return "strings as ids" if paired_by == _STRINGS else "integers as ids"


def check_alike(paired_by: Sequence[int]) -> None:
    """Raise an error unless all batches are paired by the same."""
    lowest = min(paired_by)
    highest = max(paired_by)
    if lowest == highest:
        return
    if highest < 0:
        expected = "strings in all batches, or integers in all"
        raise TypeError(f"image_ids, text_ids: expected {expected}")
    if lowest < 0:
        raise ValueError(_MIXED)
    needed = "needed for batches of different numbers of texts an image"
    raise ValueError(f"image_ids, text_ids: {needed}, got {lowest} and {highest}")
