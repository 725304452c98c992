"""Options, checks and similarities that the losses share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import Names
from ..similarity import Similarity


def option(opt: Any, name: str, *default: Any) -> Any:
    """Return an attribute of a code base's settings, or the default; raise an error if there is neither."""
    try:
        return getattr(opt, name, *default)
    except AttributeError:
        raise ValueError(f"opt: expected an attribute {name!r}, got none") from None


def required(name: str, x: Any) -> Any:
    """Return an argument that is optional in the signature but needed here; raise an error if it is None."""
    if x is None:
        raise ValueError(f"{name}: expected a tensor, got None")
    return x


def similarity(
    x: Tensor, y: Tensor, names: tuple[str, str] = ("im", "s"), ids: tuple[Any, Any] | None = None, order: bool = False
) -> Similarity:
    """Return the similarity of unnormalised embeddings; without ids row i matches row i. Errors use ``names``."""
    if ids is None and isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
        raise ValueError(f"{names[1]}: expected shape {tuple(x.shape)} like {names[0]}, got {tuple(y.shape)}")
    if order:
        return Similarity.from_scores(-torch.linalg.vector_norm((y - x[:, None]).clamp_min(0), dim=2), *ids or ())
    return Similarity(x, y, *ids or (), normalize=False, names=Names(*names, "img_ids", "img_ids"))
