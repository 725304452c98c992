"""What the losses of several code bases need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..checks import Names, check_number
from ..similarity import Similarity

Ids = Tensor | Sequence[int]
Parts = dict[str, Tensor]


class HingeLoss(nn.Module):
    """What the triplet losses share: a margin, and whether only the hardest negative counts."""

    def __init__(self, margin: float = 0, max_violation: bool = False):
        super().__init__()
        check_number("margin", margin)
        self.margin, self.max_violation = margin, bool(max_violation)

    def max_violation_on(self) -> None:
        """From now on the hardest negative of each anchor."""
        self.max_violation = True

    def max_violation_off(self) -> None:
        """From now on all negatives."""
        self.max_violation = False

    def _hinges(self, sim: Similarity, reduction: functional.Reduction = "sum") -> Any:
        return functional.triplet_loss(sim, self.margin, "hardest" if self.max_violation else "all", reduction)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"margin={self.margin}, max_violation={self.max_violation}"


def similarity_of(
    x: Tensor, y: Tensor, ids: Any = (None, None), names: tuple[str, str] = ("im", "s"), order: bool = False
) -> Similarity:
    """Of embeddings as they come; errors name the caller's arguments."""
    if order:
        return Similarity.from_scores(order_scores(x, y), *ids)
    return Similarity(x, y, *ids, normalize=False, names=Names(*names, "img_ids"))


def pairs_of(x: Tensor, y: Tensor, names: tuple[str, str] = ("im", "s"), order: bool = False) -> Similarity:
    """Of embeddings as they come, row i matching row i."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
        raise ValueError(f"{names[1]}: expected shape {tuple(x.shape)} like {names[0]}, got {tuple(y.shape)}")
    return similarity_of(x, y, names=names, order=order)


def apart(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Ids by which no row of one matches any of the other."""
    return torch.arange(len(x) + len(y), device=x.device).split([len(x), len(y)])


def square(name: str, scores: Tensor) -> Similarity:
    """Of a score matrix (B, B), row i matching column i."""
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[0] != scores.shape[1]:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{name}: expected scores (B, B), got {got}")
    return Similarity.from_scores(scores)


def order_scores(images: Tensor, texts: Tensor) -> Tensor:  # (N, D) and (M, D) -> (N, M)
    return -torch.linalg.vector_norm((texts[None] - images[:, None]).clamp_min(0), dim=2)


def given(name: str, x: Any) -> Any:
    if x is None:
        raise ValueError(f"{name}: expected a tensor, got None")
    return x


_REQUIRED = object()


def option(opt: Any, name: str, default: Any = _REQUIRED) -> Any:
    """An attribute of a code base's settings; an error where it is missing and has no default."""
    found = getattr(opt, name, default)
    if found is _REQUIRED:
        raise ValueError(f"opt: expected an attribute {name!r}, got none")
    return found


def is_order(name: str, measure: Any) -> bool:
    if measure not in (False, None, "cosine", "order"):
        raise ValueError(f"{name}: expected 'cosine' or 'order', got {measure!r}")
    return measure == "order"
