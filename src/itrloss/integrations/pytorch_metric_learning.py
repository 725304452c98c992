"""Losses for pytorch-metric-learning (``pip install 'itrloss[pytorch-metric-learning]'``)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..anchors import AnchorSide
from ..engine.matrix import Matrix
from ..engine.pairs import Over, Pairs
from ..engine.vectors import Embeddings
from ..losses import PairLoss
from ..losses.matryoshka import takes_pairs
from ..similarity import Similarity

try:
    from pytorch_metric_learning.losses import BaseMetricLossFunction
    from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
except ImportError as error:
    raise ImportError(
        f"{__name__}: pip install 'itrloss[pytorch-metric-learning]' ({error})"
    ) from error


class _MinedPairs(Pairs):
    """The positive and negative pairs of a matrix (N, M) by lists, as miners return them.

    Other pairs are neither.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        mined: tuple[Tensor, Tensor, Tensor, Tensor],
        device: torch.device,
    ):
        super().__init__(shape, (None, None), device)
        self.one_to_one = False
        anchors, positives, negative_anchors, negatives = mined
        self._positives = torch.zeros(shape, dtype=torch.bool, device=device)
        self._positives[anchors, positives] = True
        self._negatives = torch.zeros_like(self._positives)
        self._negatives[negative_anchors, negatives] = True

    def excluded(self, over: Over, rows: slice, cols: slice) -> Tensor:
        """Return the (r, c) bool mask of the pairs that a sum leaves out."""
        if over == "positives":
            counted = self._positives
        elif over == "negatives":
            counted = self._negatives
        else:
            counted = self._positives | self._negatives
        return ~counted[rows, cols]

    def exclude_(
        self, x: Tensor, places: tuple[slice, slice], value: float, over: Over = "negatives"
    ) -> Tensor:
        """Fill these pairs with ``value``, in a part of the matrix."""
        return x.masked_fill_(self.excluded(over, *places), value)

    def counts(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the (A,) numbers of positives and of negatives of each row (0) or column (1)."""
        return self._positives.sum(1 - side), self._negatives.sum(1 - side)

    @property
    def listed(self) -> tuple[Tensor, Tensor]:
        """The (P,) row and (P,) column indices of the positive pairs, sorted by row."""
        i, j = self._positives.nonzero().unbind(1)
        return i, j


def _of_similarities(loss: Any) -> bool:
    """Return whether a loss takes images and texts, and computes its value from their similarities
    alone.
    """
    if not isinstance(loss, PairLoss) or not takes_pairs(loss):
        return False
    parameters = inspect.signature(loss.compute).parameters.values()
    needed = [x.name for x in parameters if x.default is x.empty]
    return len(needed) == 1


def _of_mined(
    embeddings: Tensor, ref_emb: Tensor, mined: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Similarity:
    """Return the similarity of embeddings and candidates with the mined pairs alone."""
    pairs = _MinedPairs((len(embeddings), len(ref_emb)), mined, embeddings.device)
    rows = Embeddings(embeddings, normalize=True)
    cols = Embeddings(ref_emb, normalize=True)
    return Similarity.of_anchors(AnchorSide(Matrix(rows, cols, pairs, "dense", 0), 0))


def _check_options(loss: PairLoss) -> None:
    """Raise an error for a loss that reduces or gathers itself."""
    if loss.reduction != "none" or loss.gather:
        raise ValueError(
            "loss: expected reduction='none' without gather, as reducers and "
            "DistributedLossWrapper take their places, "
            f"got {loss!r} with gather={loss.gather!r}"
        )


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
        if not _of_similarities(loss):
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
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, Any]:
        """Return the values of the anchors that have a positive and a negative, for the reducer."""
        _check_options(self.loss)  # again, as they may be set later
        if labels is None or ref_labels is None:
            raise ValueError("labels, ref_labels: expected integers for all embeddings, got None")
        if indices_tuple is None and ref_emb is not embeddings:
            sim = Similarity(embeddings, ref_emb, labels, ref_labels)
        else:
            others = None if ref_emb is embeddings else ref_labels
            mined = convert_to_pairs(indices_tuple, labels, others)
            sim = _of_mined(embeddings, ref_emb, mined)
        valid = sim.valid()
        if valid is None:
            valid = torch.ones(len(sim), dtype=torch.bool, device=sim.device)
        anchors = valid.nonzero().squeeze(1)
        if not len(anchors):
            return self.zero_losses()
        of_rows, _ = self.loss(sim)
        values = {"losses": of_rows[anchors], "indices": anchors, "reduction_type": "element"}
        return {"loss": values}
