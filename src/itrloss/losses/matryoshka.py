"""Losses of the first dimensions of embeddings."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import PairLoss


def of_pairs(loss: PairLoss) -> bool:
    """Return whether a loss takes images and texts, and computes it from their similarities alone."""
    inputs = list(inspect.signature(loss.forward).parameters.values())
    needed = [x for x in inspect.signature(loss.compute).parameters.values() if x.default is x.empty]
    required = [x.name for x in inputs if x.default is x.empty and x.name not in ("images", "texts")]
    return not required and [x.name for x in inputs[:2]] == ["images", "texts"] and len(needed) == 1


class Matryoshka(nn.Module):
    r"""A loss summed over the first d dimensions of the embeddings, so that these are good embeddings of their own.

    .. math:: \sum_d w_d\, \mathrm{loss}\bigl(S^{(d)}\bigr), \qquad S^{(d)}_{ij} = \cos(v_i[{:}d], w_j[{:}d])

    Matryoshka representation learning (Kusupati et al. 2022, https://arxiv.org/abs/2205.13147). The scores of all
    prefixes come out of one product; see :doc:`methods/matryoshka`.

    Args:
        loss: a :class:`PairLoss` that asks ``sim.both``, as all here do but those of other inputs; without
            telemetry, and with ``gather`` only as ``"all-gather"``.
        dims: numbers of dimensions, in any order.
        weights: w, one for each of ``dims``; by default 1.

    Raises:
        TypeError: for a loss that takes more than images and texts, or with telemetry.
        ValueError: for other numbers of dimensions or weights, and in a job whose blocks of texts travel.
    """

    def __init__(self, loss: PairLoss, dims: Sequence[int], weights: Sequence[float] | None = None):
        super().__init__()
        if not isinstance(loss, PairLoss) or not of_pairs(loss) or loss.observed:
            raise TypeError(f"loss: expected one of images and texts alone, without telemetry, got {loss!r}")
        if weights is not None and len(weights) != len(dims):
            raise ValueError(f"weights: expected {len(dims)}, one for each of dims, got {len(weights)}")
        ordered = sorted(zip(dims, [1.0] * len(dims) if weights is None else weights, strict=True))
        self.loss, self.dims, self.weights = loss, [d for d, _ in ordered], [float(w) for _, w in ordered]

    def forward(
        self, images: Tensor, texts: Tensor, image_ids: Tensor | None = None, text_ids: Tensor | None = None
    ) -> Any:
        """Return the loss of (N, D) images and (M, D) texts; ids are as in :meth:`PairLoss.forward`.

        With the loss's ``reduction="none"``, a tuple of images' and texts' values for each number of dimensions.
        """
        sim = self.loss._similarity(images, texts, image_ids, text_ids, None)
        return self.loss._value(sim.prefixes(self.dims, self.weights))  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"dims={self.dims}, weights={self.weights}"


def inner_loss(loss: Any) -> PairLoss:
    """Return a loss, or that inside of Matryoshka; raise an error unless it takes images and texts to a scalar."""
    inputs = inspect.signature(loss.forward).parameters.values() if isinstance(loss, (PairLoss, Matryoshka)) else ()
    if [x.name for x in inputs if x.default is x.empty or x.name in ("images", "texts")] != ["images", "texts"]:
        raise TypeError(f"loss: expected one of images and texts alone, such as itrloss.InfoNCELoss(), got {loss!r}")
    inner = loss.loss if isinstance(loss, Matryoshka) else loss
    if inner.reduction == "none":
        raise ValueError("loss: expected reduction 'mean' or 'sum', as the trainer needs a scalar, got 'none'")
    return inner
