"""Checks of what :class:`itrloss.Similarity` is given: an error names the argument, what it got and what it wanted."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from .engines.dispatch import Matrix, Over
from .engines.terms import TERMS
from .engines.tiles import Pair, compute_dtype

_FEW = 2**22  # numbers looked at together


def check_matrix(name: str, x: Tensor, wanted: str, check_finite: bool) -> None:
    """Raise a TypeError or ValueError unless ``x`` is a floating-point matrix with rows and columns."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a floating-point tensor {wanted}, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor {wanted}, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{name}: expected shape {wanted}, got {tuple(x.shape)}")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name}: expected at least one row and one column, got shape {tuple(x.shape)}")
    if check_finite:
        require_finite(name, x)


def check_embeddings(rows: Tensor, cols: Tensor, check_finite: bool) -> None:
    """Raise a TypeError or ValueError unless (N, D) and (M, D) embeddings go together."""
    check_matrix("rows", rows, "(N, D)", check_finite)
    check_matrix("cols", cols, "(M, D)", check_finite)
    if rows.shape[1] != cols.shape[1]:
        got = tuple(cols.shape)
        raise ValueError(f"cols: expected embeddings of dimension {rows.shape[1]} like rows, got shape {got}")
    if (rows.dtype == torch.float64) != (cols.dtype == torch.float64):
        raise TypeError(f"cols: expected float64 on both sides or on neither, got {rows.dtype} and {cols.dtype}")
    if rows.device != cols.device:
        raise ValueError(f"cols: expected device {rows.device} like rows, got {cols.device}")


def require_finite(name: str, x: Tensor) -> None:
    """Raise a ValueError for nan or infinity."""
    x = x.detach().T if x.stride(0) < x.stride(1) else x.detach()  # as it lies in memory
    # Some at a time: of what is as large as memory, or on a disk, PyTorch would make a copy to look at.
    parts = x.split(max(1, _FEW // x.shape[1]))
    if not bool(torch.stack([part.isfinite().all() for part in parts]).all()):
        raise ValueError(f"{name}: expected finite values, got nan or infinity")


def check_ids(row_ids: Tensor | None, col_ids: Tensor | None, n: int, m: int, device: torch.device) -> Pair:
    """(N,) and (M,) int64 ids on the device, or None on both sides; ``col_ids`` alone refer to rows by number."""
    if row_ids is None and col_ids is None:
        if n != m:
            raise ValueError(f"row_ids, col_ids: needed for {n} rows and {m} columns; only N = M has a default pairing")
        return None, None
    if col_ids is None:
        raise ValueError("col_ids: expected ids beside row_ids, got None")
    checked: list[Tensor] = []
    for name, ids, size in (("row_ids", row_ids, n), ("col_ids", col_ids, m)):
        if ids is None:
            checked.append(torch.arange(size, device=device))
            continue
        checked.append(as_ids(name, ids, size, device))
    same = checked[0] is checked[1]
    return checked[0], checked[1].view_as(checked[1]) if same else checked[1]


def as_ids(name: str, ids: Tensor, size: int, device: torch.device) -> Tensor:
    """(size,) int64 on the device."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name}: expected an integer tensor of shape ({size},), got {got}")
    if ids.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(ids.shape)}")
    return ids.to(device, torch.int64)


def diagonal_if_unique(ids: Pair) -> Pair:
    """None on both sides if the ids only say that row i matches column i, which then takes no searching for pairs."""
    rows, cols = ids
    # Only the CPU may look at them for nothing.
    if rows is None or cols is None or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return ids
    return (None, None) if torch.equal(rows, cols) and len(rows.unique()) == len(rows) else ids


def as_scale(name: str, matrix: Matrix, scale: float | Tensor, size: int) -> Tensor:
    """As a tensor of one value, or of one for each of so many anchors, in the compute dtype."""
    dtype = compute_dtype(matrix.rows)
    if not isinstance(scale, Tensor):
        return matrix.rows.new_full((1,), float(scale), dtype=dtype)
    if scale.numel() != 1 and scale.shape != (size,):
        raise ValueError(f"{name}: expected a number or shape ({size},), got {tuple(scale.shape)}")
    if scale.dim() == 1 and scale.dtype == dtype and scale.device == matrix.rows.device:
        return scale
    return scale.reshape(-1).to(matrix.rows.device, dtype)


def as_params(name: str, matrix: Matrix, params: tuple[Tensor, ...], size: int) -> list[Tensor]:
    """Parameters of a term, each of one value or of one for each of so many anchors, in the compute dtype."""
    for p in params:
        if not isinstance(p, Tensor):
            raise TypeError(f"{name}: expected tensors of shape ({size},) or of one value, got {type(p).__name__}")
        if p.numel() != 1 and p.shape != (size,):
            raise ValueError(f"{name}: expected shape ({size},) or one value, got {tuple(p.shape)}")
    like = matrix.rows.device, compute_dtype(matrix.rows)
    return [p if p.dim() == 1 and (p.device, p.dtype) == like else p.reshape(-1).to(*like) for p in params]


def as_over(over: str) -> Over:
    if over not in ("negatives", "all"):
        raise ValueError(f"over: expected 'negatives' or 'all', got {over!r}")
    return over


def as_term(term: str) -> str:
    if term not in TERMS:
        raise ValueError(f"term: expected one of {sorted(TERMS)}, got {term!r}")
    return term


def check_number(name: str, value: object, positive: bool = False) -> None:
    """Raise an error that names the argument unless ``value`` is a number, above 0 if ``positive``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if positive and not float(value) > 0:
        raise ValueError(f"{name}: expected a number above 0, got {value}")


def check_size(name: str, value: object) -> None:
    """Raise an error that names the argument unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def refuse_other_shapes(module: nn.Module, state: Mapping[str, Any], prefix: str, errors: list[str]) -> bool:
    """Whether buffers of a state have other shapes than the module's: none of it should be loaded then."""
    for name, own in module._buffers.items():
        given = state.get(prefix + name)
        if own is not None and given is not None and given.shape != own.shape:
            errors.append(f"{prefix}{name}: expected shape {tuple(own.shape)}, got {tuple(given.shape)}")
            return True
    return False


def as_bias(name: str, matrix: Matrix, bias: Tensor | None, size: int) -> Tensor | None:
    """(size,) added to the candidates' scores, detached and on the matrix's device; None for none."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape ({size},), got {type(bias).__name__}")
    if bias.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(bias.shape)}")
    return bias.detach().to(matrix.rows.device)


def as_optimistic(ties: str) -> bool:
    if ties not in ("pessimistic", "optimistic"):
        raise ValueError(f"ties: expected 'pessimistic' or 'optimistic', got {ties!r}")
    return ties == "optimistic"
