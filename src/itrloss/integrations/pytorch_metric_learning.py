"""Losses for pytorch-metric-learning (``pip install 'itrloss[pytorch-metric-learning]'``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.related import Related
from ..losses import PairLoss
from ..losses.matryoshka import takes_pairs
from ..similarity import Similarity

try:
    from pytorch_metric_learning.losses import BaseMetricLossFunction
    from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
except ImportError as error:
    raise ImportError(
        f"{__name__}: install itrloss with the extra 'pytorch-metric-learning' ({error})"
    ) from error


def _of_mined(
    embeddings: Tensor,
    ref_emb: Tensor,
    mined: tuple[Tensor, Tensor, Tensor, Tensor],
    normalize: bool,
) -> Similarity:
    """Return the similarity of embeddings and candidates with the mined pairs alone."""
    anchors, positives, negative_anchors, negatives = mined
    shape = len(embeddings), len(ref_emb)
    matches = torch.full(shape, torch.nan, device=embeddings.device)
    matches[negative_anchors, negatives] = 0.0
    matches[anchors, positives] = 1.0
    related = Related(matches=matches)
    return Similarity(embeddings, ref_emb, related=related, engine="dense", normalize=normalize)


def _check_options(loss: PairLoss) -> None:
    """Raise an error for a loss that reduces or gathers itself, or is not of the embeddings."""
    if loss.reduction != "none" or loss.gather:
        raise ValueError(
            "loss: expected reduction='none' without gather, as reducers and "
            "DistributedLossWrapper take their places, "
            f"got {loss!r} with gather={loss.gather!r}"
        )
    if loss.directions == "text-image":
        expected = "'both' or 'image-text', whose anchors are the embeddings"
        raise ValueError(f"directions: expected {expected}, got 'text-image'")


# The name is one of those that CrossBatchMemory and SelfSupervisedLoss accept.
class ContrastiveLoss(BaseMetricLossFunction):
    """A loss of this library as one of pytorch-metric-learning: of ``embeddings`` as anchors, by
    their ``labels``.

    The candidates are ``ref_emb`` with ``ref_labels``, or else the other embeddings. Of
    ``indices_tuple``, from a miner or ``CrossBatchMemory``, only the pairs count. With ``ref_emb``
    and without ``indices_tuple``, a large matrix is not formed. An anchor without a positive or
    without a negative does not count.

    Args:
        loss: a :class:`itrloss.PairLoss` with ``reduction="none"`` that is computed from
            similarities alone.
        options: of ``BaseMetricLossFunction``: ``reducer``, by default ``MeanReducer``, which gets
            the values of the anchors, ``embedding_regularizer`` and ``embedding_reg_weight``; no
            ``distance``, as scores are cosines.

    Raises:
        TypeError, ValueError: for other losses and options, and in a call without labels.
    """

    def __init__(self, loss: PairLoss, **options: Any):
        if not takes_pairs(loss):
            expected = "one of similarities alone, such as itrloss.SupConLoss"
            raise TypeError(f"loss: expected {expected}, got {loss!r}")
        _check_options(loss)
        distance = options.get("distance")
        if distance is not None:
            raise ValueError(f"distance: expected none, as scores are cosines, got {distance!r}")
        super().__init__(**options)
        self.loss = loss

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, Any]:
        """Return the values of the anchors that have a positive and a negative, for the reducer."""
        _check_options(self.loss)  # again, as they may be set later
        if labels is None or ref_labels is None:
            raise ValueError("labels, ref_labels: expected integers for all embeddings, got None")
        if indices_tuple is None and ref_emb is not embeddings:
            options = {"normalize": self.loss.normalize, "engine": self.loss.engine}
            sim = Similarity(embeddings, ref_emb, labels, ref_labels, **options)
        else:
            others = None if ref_emb is embeddings else ref_labels
            mined = convert_to_pairs(indices_tuple, labels, others)
            sim = _of_mined(embeddings, ref_emb, mined, self.loss.normalize)
        valid = sim.valid()
        if valid is None:
            valid = torch.ones(len(sim), dtype=torch.bool, device=sim.device)
        anchors = valid.nonzero().squeeze(1)
        if not len(anchors):
            return self.zero_losses()
        of_anchors = self.loss(sim)
        of_rows = of_anchors if isinstance(of_anchors, Tensor) else of_anchors[0]
        values: dict[str, object] = {
            "losses": of_rows[anchors],
            "indices": anchors,
            "reduction_type": "element",
        }
        return {"loss": values}
