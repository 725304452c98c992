"""Who matches whom, as it is passed to a similarity: ids, sets of labels, groups or a matrix."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .checks import (
    IdsLike,
    Names,
    as_id_numbers,
    as_ids,
    as_int64,
    check_ids,
    check_same_kind,
    ids_of_one_side,
    is_label_sets,
    one_of,
)
from .engine.relation import Relation, Rule

Sides = tuple[Any, Any]  # of rows and of columns


class Related(NamedTuple):
    """What decides, besides ids, who matches and who may be a negative.

    ``groups``: (N,) groups of the rows and (M,) of the columns, which are the rows' if None. A pair
    that does not match is negative only in the same group, or with the ``rule`` ``"other"`` only in
    different ones; :data:`itrloss.NO_ID` is open to all.

    ``matches``: (N, M), in place of ids and groups: above 0 for a match, 0 for a negative and nan
    for neither. Matches that are not 1 are weights, see :meth:`PairLoss.forward`. It is read to be
    checked, so an accelerator has to synchronise.
    """

    groups: tuple[IdsLike | None, IdsLike | None] = (None, None)
    rule: Rule = "same"
    matches: Tensor | None = None


def relation_of(
    shape: tuple[int, int], ids: Sides, related: Related | None, device: torch.device, names: Names
) -> Relation:
    """Return who matches in a matrix, by all that was passed in; raise an error for wrong input."""
    row_ids, col_ids = ids
    n, m = shape
    if related is None and row_ids is None and col_ids is None and n == m:
        return Relation(shape, device=device)  # row i matches column i
    if related is None and not is_label_sets(row_ids) and not is_label_sets(col_ids):
        return Relation(shape, check_ids(row_ids, col_ids, n, m, device, names), device)
    if related is None:
        related = Related()
    if related.matches is not None:
        check_matches(related, shape, ids, names, device)
        has_weights = weights_of(related.matches)
        return Relation(shape, device=device, matches=related.matches, has_weights=has_weights)
    rows, cols = labels_of(shape, ids, device, names)
    groups = groups_of(shape, related, device, names)
    return Relation(shape, (rows, cols), device, groups=groups, rule=related.rule)


def labels_of(
    shape: tuple[int, int], ids: Sides, device: torch.device, names: Names
) -> tuple[Tensor, Tensor]:
    """Return the ids (N,) and (M,) or sets of labels (N, k) and (M, l) of rows and columns."""
    n, m = shape
    row_ids, col_ids = ids
    if col_ids is None and row_ids is not None:
        raise ids_of_one_side(row_ids, names)
    if row_ids is None:
        row_ids = torch.arange(n, device=device)
    if col_ids is None:
        check_ids(None, None, n, m, device, names)  # an error unless N = M
        col_ids = torch.arange(m, device=device)
    rows = label_sets(names.row_ids, row_ids, n, device)
    cols = label_sets(names.col_ids, col_ids, m, device)
    check_same_kind(names.row_ids, row_ids, names.col_ids, col_ids)
    if rows.shape[1] == cols.shape[1] == 1:
        return rows[:, 0], cols[:, 0]
    return rows, cols


def label_sets(name: str, ids: Any, size: int, device: torch.device) -> Tensor:
    """Return the (size, k) int64 labels of ids (size,) or of sets (size, k)."""
    if isinstance(ids, (list, tuple)):
        with contextlib.suppress(ValueError):  # of lists of different lengths, for the error below
            ids = np.asarray(ids)  # of lists of strings, an array of strings
    if not is_label_sets(ids):
        return as_ids(name, ids, size, device)[:, None]
    numbers = as_id_numbers(name, ids)
    if numbers.dim() != 2 or len(numbers) != size:
        raise ValueError(f"{name}: expected shape ({size}, k), got {tuple(numbers.shape)}")
    return as_int64(name, numbers).to(device, copy=True)


def groups_of(
    shape: tuple[int, int], related: Related, device: torch.device, names: Names
) -> tuple[Tensor, Tensor] | None:
    """Return the (N,) and (M,) int64 groups; those of columns are by default those of rows."""
    n, m = shape
    rows, cols = related.groups
    one_of("groups", related.rule, "same", "other")
    row_name, col_name = group_names(names)
    if rows is None and cols is None:
        return None
    if rows is None:
        raise ValueError(f"{row_name}: expected groups to go with {col_name}, got None")
    own = as_ids(row_name, rows, n, device)
    if cols is None:
        if n != m:
            got = f"{n} {names.rows} and {m} {names.cols}"
            raise ValueError(f"{col_name}: needed for {got}; only N = M has a default")
        return own, own
    check_same_kind(row_name, rows, col_name, cols)
    return own, as_ids(col_name, cols, m, device)


def group_names(names: Names) -> tuple[str, str]:
    """Return what the caller calls the groups of rows and of columns."""
    return names.row_ids.replace("_ids", "_groups"), names.col_ids.replace("_ids", "_groups")


def check_matches(
    related: Related, shape: tuple[int, int], ids: Sides, names: Names, device: torch.device
) -> None:
    """Raise an error unless a matrix says alone who matches."""
    matches = related.matches
    if any(x is not None for x in ids):
        raise ValueError(f"matches: expected None with {names.row_ids} and {names.col_ids}")
    if any(x is not None for x in related.groups):
        raise ValueError(f"matches: expected None with {' and '.join(group_names(names))}")
    if not isinstance(matches, Tensor):
        raise TypeError(f"matches: expected a tensor (N, M), got {type(matches).__name__}")
    if matches.is_complex():
        raise TypeError(f"matches: expected real numbers, got {matches.dtype}")
    if matches.shape != shape:
        raise ValueError(f"matches: expected shape {shape}, got {tuple(matches.shape)}")
    if matches.layout != torch.strided:
        raise ValueError(f"matches: expected a dense tensor, got {matches.layout}")
    if matches.device != device:
        raise ValueError(f"matches: expected device {device}, got {matches.device}")


def weights_of(matches: Tensor) -> bool:
    """Return whether matches have weights that are not 1; raise an error for values below 0 or
    infinite ones.

    An accelerator has to synchronise. In a compiled graph nothing is read: there may be weights.
    """
    is_fake = matches.is_meta or isinstance(matches, torch._subclasses.FakeTensor)
    if is_fake or torch.compiler.is_compiling():  # there are no values yet
        return matches.dtype != torch.bool
    weights = matches[(matches != 0) & ~matches.isnan()]
    if bool(((weights < 0) | (weights == torch.inf)).any()):
        expected = "above 0 for a match, which are weights, 0 for a negative, and nan for neither"
        raise ValueError(f"matches: expected numbers {expected}")
    return bool((weights != 1).any())
