"""Arguments of public code bases: their settings, embeddings, scores and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import Names, check_embeddings
from ..engine.vectors import compute_dtype
from ..similarity import Similarity

T = TypeVar("T")


def setting(opt: object, name: str, *default: object) -> Any:
    """Return an attribute of a code base's settings, or an entry of a dictionary of them; or the
    default; an error without both.
    """
    if isinstance(opt, Mapping):
        opt = SimpleNamespace(**opt)
    try:
        return getattr(opt, name, *default)
    except AttributeError:
        raise ValueError(f"opt: expected an attribute {name!r}, got none") from None


def required(name: str, x: T | None) -> T:
    """Return an argument that is optional in the signature but needed here, so it is not None."""
    if x is None:
        raise ValueError(f"{name}: expected a tensor, got None")
    return x


def similarity(
    x: Tensor,
    y: Tensor,
    names: tuple[str, str],
    ids: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Similarity:
    """Return the similarity of (N, D) and (M, D) embeddings, which errors call by names, as they
    are, not normalised.
    """
    return Similarity(x, y, *ids, normalize=False, names=Names(*names, "", ""))


def inner_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the (N, M) inner products of (N, D) and (M, D) embeddings, float32 at least."""
    return similarity(x, y, ("im, s", "mb_cap, mb_img")).scores()


def order_scores(x: Tensor, y: Tensor) -> Tensor:
    """Return the (N, M) scores ``-|max(0, y - x)|`` of (N, D) and (M, D) order embeddings, or the
    best ones of their sets (N, K, D) and (M, L, D).
    """
    rows = x.flatten(0, -2)
    cols = y.flatten(0, -2)
    check_embeddings(rows, cols, False, Names("im", "s", "", ""))
    dtype = compute_dtype(x)
    violations = (cols.to(dtype) - rows.to(dtype)[:, None]).clamp_min(0)  # (N K, M L, D)
    scores = -torch.linalg.vector_norm(violations, dim=2)
    return scores.unflatten(1, (len(y), -1)).unflatten(0, (len(x), -1)).amax((1, 3))


def as_sets(x: Tensor) -> Tensor:
    """Return sets (N, K, D) as they are, and embeddings (N, D) as sets of one."""
    return x if x.dim() == 3 else x[:, None]


def zero_of(x: Tensor) -> Tensor:
    """Return the value of a part that a loss of embeddings ``x`` does not have."""
    return x.new_zeros((), dtype=compute_dtype(x))
