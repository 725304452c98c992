"""Retrieval metrics of batches of embeddings, for TorchMetrics (``pip install
'itrloss[metrics]'``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import IMAGES_AND_TEXTS, check_embeddings, check_ids
from ..rerank import Reranker
from ..similarity import Similarity
from .labels import default_ids
from .results import RECALL_NAMES
from .retrieval import Ties, retrieval_metrics

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ImportError:
    raise ImportError(
        "RetrievalMetrics needs TorchMetrics: pip install 'itrloss[metrics]'"
    ) from None

_STATES = ("images", "texts", "image_ids", "text_ids")


class RetrievalMetrics(Metric):
    """:func:`itrloss.metrics.retrieval_metrics` of the embeddings of all :meth:`update` calls, in
    all processes.

    Every process stores its embeddings until ``reset()``, and holds those of all processes in
    :meth:`compute`.

    Args:
        normalize: see :class:`itrloss.Similarity`.
        reranker, ties, hubness_k, folds: see :func:`itrloss.metrics.retrieval_results`.
        kwargs: see ``torchmetrics.Metric``.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(
        self,
        *,
        normalize: bool = True,
        reranker: Reranker | None = None,
        ties: Ties = "pessimistic",
        hubness_k: int = 10,
        folds: int = 1,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.normalize = normalize
        self.options = {"reranker": reranker, "ties": ties, "hubness_k": hubness_k, "folds": folds}
        for name in _STATES:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(
        self,
        images: Tensor,
        texts: Tensor,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> None:
        """Add (B, D) images and (C, D) texts; each image and text must be added once only.

        ``image_ids``, ``text_ids``: (B,) and (C,) integers, equal where image and text match,
        across batches and processes. Pass them in all batches or in none. Without them, ``C = c *
        B`` means c consecutive texts per image.
        """
        check_embeddings(images, texts, False, IMAGES_AND_TEXTS)
        stored = [getattr(self, name) for name in _STATES]
        n, m, by_ids = len(images), len(texts), image_ids is not None
        if by_ids != (text_ids is not None) or (stored[0] and by_ids != bool(stored[2])):
            raise ValueError("image_ids, text_ids: expected both in all batches, or neither in any")
        if by_ids:
            image_ids, text_ids = check_ids(
                image_ids, text_ids, n, m, images.device, IMAGES_AND_TEXTS
            )
        elif stored[0] and m * len(stored[0][0]) != n * len(stored[1][0]):
            raise ValueError(
                "image_ids, text_ids: needed for batches of different numbers of texts an image"
            )
        else:
            default_ids(n, m)  # for its error
        for state, x in zip(
            stored, (images.detach(), texts.detach(), image_ids, text_ids), strict=True
        ):
            if x is not None:
                state.append(x)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics by name as 0-dim float64 tensors on the CPU."""
        # lists, or tensors after an exchange between processes
        states = (getattr(self, name) for name in _STATES)
        images, texts, *ids = (dim_zero_cat(x) if len(x) else None for x in states)
        if images is None or texts is None:
            raise ValueError("RetrievalMetrics: expected a call of update() before compute()")
        if ids[0] is None and len(images) != len(texts):
            ids = default_ids(len(images), len(texts))
        metrics = retrieval_metrics(
            Similarity(images, texts, *ids, normalize=self.normalize), **self.options
        )
        return {name: torch.tensor(x, dtype=torch.float64) for name, x in metrics.items()}

    def plot(
        self, val: dict[str, Tensor] | Sequence[dict[str, Tensor]] | None = None, ax: Any = None
    ) -> Any:
        """Return the figure and axes of a plot of the six recalls.

        ``val``: one result of :meth:`compute`, or a sequence of them; by default the present one.
        """
        val = self.compute() if val is None else val
        recalls = [
            {name: x[name] for name in RECALL_NAMES}
            for x in ([val] if isinstance(val, dict) else val)
        ]
        return self._plot(recalls[0] if isinstance(val, dict) else recalls, ax)
