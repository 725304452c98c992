"""What a process passes in of a batch that several processes share, and what it learns of the
others' parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..engine.matrix import Bias
from ..engine.related import (
    PassedIds,
    Related,
    check_matches,
    groups_of,
    ids_by_targets,
    labels_of,
    weights_of,
)
from ..engine.relation import IGNORE_ID, Relation, Rule
from ..engine.vectors import autocast_dtype
from ..torch_versions import is_compiling
from . import collectives
from .collectives import ProcessGroup, world_size
from .consensus import consensus, described, is_trained, numbered, padded
from .shards import Processes


class LocalIds(NamedTuple):
    """Who matches in a process's part, checked: ids or labels, groups, or a matrix."""

    ids: tuple[Tensor | None, Tensor | None]  # (N_r,) and (M_r,), or (N_r, k) and (M_r, l) labels
    groups: tuple[Tensor, Tensor] | None = None  # (N_r,) and (M_r,)
    rule: Rule = "same"  # of the groups
    matches: Tensor | None = None  # (N_r, M), with the columns of all processes
    has_weights: bool = False  # whether matches in it are not all 1
    one_set: bool = False  # whether groups are the numbers of items, which are rows and columns
    targets: Tensor | None = None  # (N_r,) numbers of columns, in place of ids
    targets_among_all: bool = False  # whether they number the columns of all processes


class LocalBatch(NamedTuple):
    """A process's part of a batch: embeddings of rows and columns, or its rows of scores."""

    tensors: tuple[Tensor, ...]  # (N_r, D) and (M_r, D), or (N_r, M) scores
    ids: PassedIds  # of own rows and columns
    bias: Bias | None
    related: Related
    names: checks.Names
    check_finite: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of own rows and columns; with scores, ids say how many columns."""
        n = len(self.tensors[0])
        if len(self.tensors) > 1:
            return n, len(self.tensors[1])
        for of_columns in (self.ids[1], self.related.groups[1]):
            if of_columns is not None:
                return n, len(of_columns)
        return n, n

    def checked(self) -> LocalIds:
        """Return who matches; raise an error for wrong input."""
        self._check_tensors()
        device = self.tensors[0].device
        related = self.related
        if related.matches is not None:
            return self._by_matches(related.matches)
        n, m = self.sizes
        if related.targets is not None:
            are_scores = len(self.tensors) == 1
            shape = (n, self.tensors[0].shape[1] if are_scores else m)
            targets = ids_by_targets(related, shape, self.ids, device)
            return LocalIds((None, None), targets=targets, targets_among_all=are_scores)
        ids = labels_of((n, m), self.ids, device, self.names)
        groups = groups_of((n, m), related, device, self.names)
        return LocalIds(ids, groups, related.rule, one_set=related.one_set)

    def _check_tensors(self) -> None:
        """Raise an error for wrong embeddings, scores or biases."""
        if len(self.tensors) == 1:
            checks.check_matrix("scores", self.tensors[0], "(N, M)", self.check_finite, empty=True)
        else:
            rows, cols = self.tensors
            checks.check_embeddings(rows, cols, self.check_finite, self.names, empty=True)
        checks.check_biases(self.bias, *self.sizes, self.check_finite)

    def _by_matches(self, matches: Tensor) -> LocalIds:
        """Return who matches by a matrix (N_r, M), with the columns of all processes."""
        n, m = self.sizes
        columns = matches.shape[-1] if isinstance(matches, Tensor) else m
        check_matches(self.related, (n, columns), self.ids, self.names, self.tensors[0].device)
        if not matches.is_floating_point():
            matches = matches.float()  # which has a nan, for padding
        return LocalIds((None, None), matches=matches, has_weights=weights_of(matches))

    def widths(self) -> tuple[int, int]:
        """Return how many columns a matrix of matches and one of scores have; -1 for none."""
        matches = self.related.matches
        of_matches = -1 if matches is None else matches.shape[1]
        of_scores = self.tensors[0].shape[1] if len(self.tensors) == 1 else -1
        return of_matches, of_scores

    def described(self, known: LocalIds) -> str:
        """Return what has to be alike in the processes' parts of a batch, in words."""
        kinds = ", ".join(described(x) for x in self.tensors)
        if len(self.tensors) == 1:  # how many columns there are is said by `widths`
            kinds = f"scores {str(self.tensors[0].dtype).removeprefix('torch.')}"
        about = {
            "autocast": autocast_dtype(self.tensors[0]),
            "gradients": [is_trained(x) for x in self.tensors],
            "ids": [x is not None for x in known.ids],
            "numbers of labels": [None if x is None else x.shape[1:] for x in known.ids],
            "groups": known.groups is not None,
            "rule": known.rule,
            "one set": known.one_set,
            "matches": None if known.matches is None else known.matches.dtype,
            "targets": known.targets is not None,
            "biases": [None if x is None else f"gradient {is_trained(x)}" for x in self.bias or ()],
        }
        return "; ".join([kinds, *(f"{name} {value}" for name, value in about.items())])


def agreed(
    part: LocalBatch, group: ProcessGroup, same: str | Callable[[], str], options: dict[str, Any]
) -> tuple[LocalIds, list[list[int]]]:
    """Return who matches in this process's part, and the numbers of all processes' rows and
    columns.

    All processes raise an error if one of them fails or if they differ in what has to be alike. The
    compiler compares nothing, and takes sizes to be equal.
    """
    if is_compiling():
        if callable(same):
            same()
        return part.checked(), [list(part.sizes)] * world_size(group)
    with consensus(group) as agreement:
        also = same() if callable(same) else same
        known = part.checked()
        agreement.numbers = [*part.sizes, int(known.has_weights), *part.widths()]
        agreement.text = f"{part.described(known)}; {options}; {also}"
        agreement.kinds = [checks.kind_of(x) for x in (*part.ids, *part.related.groups)]
    every = [numbers[:5] for numbers in agreement.every]
    if len(part.tensors) == 1 and (known.matches is not None or known.targets is not None):
        divide_columns(every)
    total = sum(m for _, m, *_ in every)
    for name, place in (("matches", 3), ("scores", 4)):
        widths = [numbers[place] for numbers in every]
        if any(width not in (-1, total) for width in widths):
            expected = f"expected {total} columns in each process, the texts of all"
            raise ValueError(f"{name}: {expected}, got {widths}")
    weighted = any(numbers[2] for numbers in every)
    return known._replace(has_weights=weighted), [numbers[:2] for numbers in every]


def divide_columns(every: list[list[int]]) -> None:
    """Set how many columns of scores each process has, where a matrix of matches does not say it:
    as many as rows or, if these are not all, an even share.
    """
    of_scores = every[0][4]
    if sum(numbers[1] for numbers in every) == of_scores:
        return
    world = len(every)
    for rank, numbers in enumerate(every):
        numbers[1] = (rank + 1) * of_scores // world - rank * of_scores // world


def processes_of(
    known: LocalIds, sizes: list[list[int]], group: ProcessGroup, device: torch.device
) -> Processes:
    """Return the processes of a batch, with the ids and groups of all."""
    processes = Processes(group, sizes)
    ids = ids_among_all(known, processes, device)
    processes.ids = processes.of_all(*ids)
    if known.groups is not None:
        rows, cols = known.groups
        if known.one_set:  # so that the items of all processes differ
            rows = rows + processes.first(0)
            cols = rows
        processes.groups = processes.of_all(rows, cols)
    of_rows, of_cols = processes.ids
    if known.groups is None and known.matches is None and of_rows.dim() == of_cols.dim() == 1:
        processes.pairs = Relation((len(of_rows), len(of_cols)), processes.ids, device)
    return processes


def ids_among_all(
    known: LocalIds, processes: Processes, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ids or labels of own rows and columns that tell the items of all processes apart."""
    n, m = processes.sizes[processes.rank]
    first_row = processes.first(0)
    row_ids, col_ids = known.ids
    numbers = torch.arange(n, device=device) + first_row
    if known.matches is not None:
        return numbers, torch.arange(m, device=device) + processes.first(1)
    if known.targets is not None:
        targets = known.targets
        first_col = processes.first(1)
        if not known.targets_among_all:
            targets = numbered(targets, m, first_col).masked_fill(targets == IGNORE_ID, IGNORE_ID)
        return targets, torch.arange(m, device=device) + first_col
    if col_ids is None:
        return numbers, numbers
    if row_ids is not None:
        return row_ids, col_ids
    among_all = numbered(col_ids, n, first_row)
    return numbers, among_all.masked_fill(col_ids == IGNORE_ID, IGNORE_ID)


def relation_to_all(known: LocalIds, processes: Processes, device: torch.device) -> Relation:
    """Return who matches among own padded rows and the columns of all."""
    n, m = processes.padded
    shape = n, m * processes.world
    if known.matches is not None:
        matches = spread_columns(known.matches, processes, torch.nan)
        return Relation(shape, device=device, matches=matches, has_weights=known.has_weights)
    rows, cols = processes.ids
    groups: tuple[Tensor, Tensor] | None = None
    if processes.groups is not None:
        groups = processes.own(processes.groups[0]), processes.groups[1]
    return Relation(
        shape,
        (processes.own(rows), cols),
        device,
        groups=groups,
        rule=known.rule,
        one_set=known.one_set,
        one_way=known.targets is not None,
    )


def spread_columns(x: Tensor, processes: Processes, value: float) -> Tensor:
    """Return own rows (N_r, M) with the padding of rows and of each process's columns."""
    n, m = processes.padded
    parts = x.split([size for _, size in processes.sizes], 1)
    columns = torch.cat([padded(part.T, m, value) for part in parts])
    return padded(columns.T, n, value)


def gathered_bias(bias: Bias | None, processes: Processes) -> Bias | None:
    """Return the bias of a process's padded rows and of all processes' columns."""
    if bias is None:
        return None
    n, m = processes.padded
    rows, cols = bias
    own = None if rows is None else padded(rows, n)
    others = None if cols is None else collectives.gather(padded(cols, m), processes.group)
    return own, others
