"""Retrieval metrics of batches, for TorchMetrics (``pip install 'itrloss[metrics]'``)."""

from __future__ import annotations

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
    are_names: list[Tensor]  # 1 if ids are strings; backends do not all exchange bools

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
        for name in ("images", "texts", "image_ids", "text_ids", "are_names"):
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
        by_ids = image_ids is not None
        mixed = len(self.images) > 0 and by_ids != (len(self.image_ids) > 0)
        if mixed or by_ids != (text_ids is not None):
            raise ValueError("image_ids, text_ids: expected both in all batches, or neither in any")
        if image_ids is None:
            self._check_captions(len(images), len(texts))
        else:
            sizes = len(images), len(texts)
            ids = ids_of_both(image_ids, text_ids, *sizes, images.device, IMAGES_AND_TEXTS)
            named = are_strings(image_ids)
            if len(self.are_names) and bool(self.are_names[0]) != named:
                expected = "strings in all batches, or integers in all"
                raise TypeError(f"image_ids, text_ids: expected {expected}")
            self.are_names.append(torch.tensor([int(named)], device=images.device))
            self.image_ids.append(ids[0])
            self.text_ids.append(ids[1])
        self.images.append(images.detach().clone())
        self.texts.append(texts.detach().clone())

    def _check_captions(self, n: int, m: int) -> None:
        """Raise a ValueError unless all batches without ids have as many texts an image."""
        if len(self.images) and m * len(self.images[0]) != n * len(self.texts[0]):
            raise ValueError(
                "image_ids, text_ids: needed for batches of different numbers of texts an image"
            )
        default_ids(n, m)  # raises an error unless the number is whole

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
                names = [bool(x) for x in self.are_names[:1]]
                with_ids = f"ids {len(self.image_ids) > 0}, of strings {names}"
                agreed.text = f"{kind}, {with_ids}, normalize {self.normalize}, "
                agreed.text += f"ks {self.ks}, {self.options}"
        super().sync(*args, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics by name as 0-dim float64 tensors on the CPU."""
        if len(self.images) == 0:
            raise ValueError("RetrievalMetrics: expected a call of update() before compute()")
        images = dim_zero_cat(self.images)
        texts = dim_zero_cat(self.texts)
        ids: tuple[IdsLike | None, IdsLike | None] = (None, None)
        if len(self.image_ids):
            ids = dim_zero_cat(self.image_ids), dim_zero_cat(self.text_ids)
        elif len(images) != len(texts):
            ids = default_ids(len(images), len(texts))
        sim = Similarity(images, texts, *ids, normalize=self.normalize)
        metrics = retrieval_metrics(sim, ks=self.ks, **self.options)
        return {name: torch.from_numpy(np.array(x)) for name, x in metrics.items()}
