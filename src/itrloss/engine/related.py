"""Who matches whom, as it is passed to a similarity: ids, sets of labels, groups or a matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import (
    IdsLike,
    Names,
    as_ids,
    as_indices,
    as_integers,
    as_labels,
    check_range,
    check_same_kind,
    ids_of_one_side,
    no_default_pairing,
    one_of,
)
from ..torch_versions import is_compiling
from .devices import is_recorded
from .relation import IGNORE_ID, Ids, Relation, Rule, as_sets
from .vectors import host_may_read

NO_TARGET = -100  # of a row that does not count, as in torch.nn.functional.cross_entropy
PassedIds = tuple[IdsLike | None, IdsLike | None]  # of rows and of columns, as passed in


class Related(NamedTuple):
    """What decides, besides ids, who matches and who may be a negative.

    ``groups``: (N,) groups of the rows and (M,) of the columns, which are the rows' if None. A pair
    that does not match is negative only in the same group, or with the ``rule`` ``"other"`` only in
    different ones; :data:`itrloss.NO_ID` is open to all.

    ``matches``: (N, M), in place of ids and groups: above 0 for a match, 0 for a negative and nan
    for neither. Matches that are not 1 are weights, see :meth:`PairLoss.forward`. It is read to be
    checked, so an accelerator has to synchronise.

    ``one_set``: whether row i and column i are the same item, which is no pair with itself. It goes
    with ids, the same of both sides; losses then have the rows alone as anchors.

    ``targets``: (N,), in place of all others: the number of the column that each row matches, or
    -100 for a row that does not count, as in cross-entropy. The rows alone are anchors.
    """

    groups: PassedIds = (None, None)
    rule: Rule = "same"
    matches: Tensor | None = None
    one_set: bool = False
    targets: IdsLike | None = None


class UnknownRelation(Relation):
    """The pairs of N rows and M columns without ids, of which nothing says who matches: to rank
    them is no question of that, and all others raise a ValueError.
    """

    is_known = False
    listable = False  # type: ignore[assignment]

    def __init__(self, shape: tuple[int, int], device: torch.device, names: Names):
        super().__init__(shape, device=device)
        self.one_to_one = False
        self.error = no_default_pairing(*shape, names)

    def _alike(self, rows: slice, cols: slice) -> Tensor:
        """Raise the error."""
        raise self.error


def relation_of(
    shape: tuple[int, int],
    ids: PassedIds,
    related: Related | Relation | None,
    device: torch.device,
    names: Names,
) -> Relation:
    """Return who matches in a matrix, by all that was passed in; raise an error for wrong input.

    A relation, as of a batch that several processes share, is returned as it is.
    """
    if isinstance(related, Relation):
        return related
    if related is not None and related.matches is not None:
        check_matches(related, shape, ids, names, device)
        has_weights = weights_of(related.matches)
        return Relation(shape, device=device, matches=related.matches, has_weights=has_weights)
    if related is not None and related.targets is not None:
        rows = ids_by_targets(related, shape, ids, device)
        cols = torch.arange(shape[1], device=device)
        return Relation(shape, (rows, cols), device, one_way=True)
    if related is None and ids[0] is None and ids[1] is None:
        if shape[0] == shape[1]:
            return Relation(shape, device=device)
        return UnknownRelation(shape, device, names)
    place: torch.device | None = device
    if device.type != "cpu" and not (is_compiling() or is_recorded(device)):
        place = None  # where they are, to be looked at there; a graph would keep what was seen
    rows, cols = labels_of(shape, ids, place, names)
    if related is None:
        return Relation(shape, (rows, cols), device)
    n, m = shape
    if rows is None:
        rows = torch.arange(n, device=device)
    if cols is None:
        cols = torch.arange(m, device=device)
    groups = groups_of(shape, related, device, names)
    return Relation(
        shape,
        (rows, cols),
        device,
        groups=groups,
        rule=related.rule,
        one_set=related.one_set,
    )


def labels_of(
    shape: tuple[int, int], ids: PassedIds, device: torch.device | None, names: Names
) -> Ids:
    """Return copies of the ids (N,) and (M,), or sets of labels (N, k) and (M, l), of rows and
    columns as int64, on a device, or where they are if it is None.

    Ids of columns may come alone, as numbers of rows; those that are left out are None.
    """
    n, m = shape
    row_ids, col_ids = ids
    if col_ids is None:
        if row_ids is not None:
            raise ids_of_one_side(row_ids, names)
        if n != m:
            raise no_default_pairing(n, m, names)
        return None, None
    if row_ids is None:
        numbers = as_integers(names.col_ids, col_ids, m)
        return None, as_labels(names.col_ids, numbers, m, device)
    rows = as_labels(names.row_ids, row_ids, n, device)
    if col_ids is row_ids and n == m:
        return rows, rows  # what is computed of one serves both
    cols = as_labels(names.col_ids, col_ids, m, device)
    if not isinstance(row_ids, Tensor) or not isinstance(col_ids, Tensor):  # these are no strings
        check_same_kind(names.row_ids, row_ids, names.col_ids, col_ids)
    return rows, cols


def label_sets(name: str, ids: object, size: int, device: torch.device) -> Tensor:
    """Return the (size, k) int64 labels of ids (size,) or of sets (size, k)."""
    return as_sets(as_labels(name, ids, size, device))


def groups_of(
    shape: tuple[int, int], related: Related, device: torch.device, names: Names
) -> tuple[Tensor, Tensor] | None:
    """Return the (N,) and (M,) int64 groups; those of columns are by default those of rows."""
    n, m = shape
    rows, cols = related.groups
    one_of("groups", related.rule, "same", "other")
    row_name, col_name = group_names(names)
    if rows is None and cols is None:
        return numbers_of_items(shape, device) if related.one_set else None
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


def numbers_of_items(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the (N,) numbers of the items of one set, as groups of rows and of columns."""
    n, m = shape
    if n != m:
        raise ValueError(f"one_set: expected as many columns as rows, got shape {shape}")
    numbers = torch.arange(n, device=device)
    return numbers, numbers


def group_names(names: Names) -> tuple[str, str]:
    """Return what the caller calls the groups of rows and of columns."""
    return names.row_ids.replace("_ids", "_groups"), names.col_ids.replace("_ids", "_groups")


def ids_by_targets(
    related: Related, shape: tuple[int, int], ids: PassedIds, device: torch.device
) -> Tensor:
    """Return the (N,) int64 numbers of the columns that rows match, as ids; ``IGNORE_ID`` for rows
    that do not count.
    """
    if any(x is not None for x in (*ids, *related.groups, related.matches)):
        raise ValueError("targets: expected None with ids, groups and matches")
    n, m = shape
    targets = as_indices("targets", related.targets, n, device)
    counts = targets != NO_TARGET
    if host_may_read(targets) and counts.any():
        check_range("targets", targets[counts], m - 1)
    return targets.masked_fill(~counts, IGNORE_ID)


def check_matches(
    related: Related, shape: tuple[int, int], ids: PassedIds, names: Names, device: torch.device
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
    """Return whether matches have weights that are not 1; raise an error for values below 0,
    infinite ones, and integers that are neither 0 nor 1.

    An accelerator has to synchronise. In a graph, compiled or recorded, nothing is read: there may
    be weights.
    """
    is_fake = matches.is_meta or isinstance(matches, torch._subclasses.FakeTensor)
    # there are no values yet
    if is_fake or is_compiling() or is_recorded(matches.device):
        return matches.dtype != torch.bool
    weights = matches[(matches != 0) & ~matches.isnan()]
    if bool(((weights < 0) | (weights == torch.inf)).any()):
        expected = "above 0 for a match, which are weights, 0 for a negative, and nan for neither"
        raise ValueError(f"matches: expected numbers {expected}")
    has_weights = bool((weights != 1).any())
    if has_weights and not matches.is_floating_point():
        got = f"integers up to {int(weights.max())}; of distances, write matches=distances < limit"
        raise ValueError(f"matches: expected bools, 0 and 1, or floats as weights, got {got}")
    return has_weights
