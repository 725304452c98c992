"""Checks of arguments: an error names the argument, what it got and what it wanted."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_AT_ONCE = 2**22  # numbers looked at together


class Names(NamedTuple):
    """What the caller calls the two sides of a similarity matrix."""

    rows: str = "rows"
    cols: str = "cols"
    row_ids: str = "row_ids"
    col_ids: str = "col_ids"
    columns: str = "columns"


ROWS_AND_COLUMNS = Names()
IMAGES_AND_TEXTS = Names("images", "texts", "image_ids", "text_ids", "texts")


def one_of(name: str, value: object, *allowed: object) -> None:
    """Raise a ValueError unless ``value`` is one of those allowed."""
    if value not in allowed:
        listed = ", ".join(map(repr, allowed[:-1])) + f" or {allowed[-1]!r}"
        raise ValueError(f"{name}: expected {listed}, got {value!r}")


def check_number(name: str, value: object, positive: bool = False) -> None:
    """Raise an error unless ``value`` is a number, above 0 if ``positive``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if positive and not float(value) > 0:
        raise ValueError(f"{name}: expected a number above 0, got {value}")


def check_size(name: str, value: object) -> None:
    """Raise an error unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_matrix(name: str, x: Any, shape: str, check_finite: bool = False) -> None:
    """Raise an error unless ``x`` is a floating-point matrix with rows and columns."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a floating-point tensor {shape}, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor {shape}, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name}: expected at least one row and one column, got shape {tuple(x.shape)}")
    if check_finite:
        require_finite(name, x)


def check_embeddings(rows: Any, cols: Any, check_finite: bool = False, names: Names = ROWS_AND_COLUMNS) -> None:
    """Raise an error unless (N, D) and (M, D) embeddings go together."""
    if isinstance(rows, Tensor) and isinstance(cols, Tensor) and rows.dim() == cols.dim() == 2 and not check_finite:
        alike = rows.dtype == cols.dtype and rows.device == cols.device and rows.shape[1] == cols.shape[1]
        if alike and rows.is_floating_point() and rows.numel() and cols.numel():
            return  # what nearly all calls are
    check_matrix(names.rows, rows, "(N, D)", check_finite)
    check_matrix(names.cols, cols, "(M, D)", check_finite)
    if rows.shape[1] != cols.shape[1]:
        wanted = f"embeddings of dimension {rows.shape[1]} like {names.rows}"
        raise ValueError(f"{names.cols}: expected {wanted}, got shape {tuple(cols.shape)}")
    check_alike(names.cols, cols, names.rows, rows)


def check_alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise an error unless two tensors lie on one device, and both are float64 or neither is."""
    if (x.dtype == torch.float64) != (other.dtype == torch.float64):
        got = f"{x.dtype} beside {other.dtype}"
        raise TypeError(f"{name}: expected float64 beside float64 {other_name} and beside no others, got {got}")
    if x.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} like {other_name}, got {x.device}")


def require_finite(name: str, x: Tensor) -> None:
    """Raise a ValueError for nan or infinity. Synchronises with an accelerator."""
    x = x.detach().T if x.stride(0) < x.stride(1) else x.detach()  # as it lies in memory
    # Some at a time: of what is as large as memory, or on a disk, PyTorch would make a copy to look at.
    parts = x.split(max(1, _AT_ONCE // x.shape[1]))
    if not bool(torch.stack([part.isfinite().all() for part in parts]).all()):
        raise ValueError(f"{name}: expected finite values, got nan or infinity")


def as_ids(name: str, ids: Any, size: int, device: torch.device) -> Tensor:
    """Return ids as a (size,) int64 tensor on the device, of its own memory."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name}: expected an integer tensor of shape ({size},), got {got}")
    if ids.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(ids.shape)}")
    return ids.to(device, torch.int64, copy=True)


def check_ids(
    row_ids: Any, col_ids: Any, n: int, m: int, device: torch.device, names: Names = ROWS_AND_COLUMNS
) -> tuple[Tensor | None, Tensor | None]:
    """Return (N,) and (M,) int64 ids, or None where they are left out; column ids may stand alone."""
    if row_ids is None and col_ids is None:
        if n != m:
            what = f"{n} {names.rows} and {m} {names.columns}; only N = M has a default pairing"
            raise ValueError(f"{names.row_ids}, {names.col_ids}: needed for {what}")
        return None, None
    if col_ids is None:
        raise ValueError(f"{names.col_ids}: expected ids beside {names.row_ids}, got None")
    rows = None if row_ids is None else as_ids(names.row_ids, row_ids, n, device)
    return rows, as_ids(names.col_ids, col_ids, m, device)


def as_params(name: str, params: tuple[Any, ...], size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return numbers or tensors, of one value or of one for each of ``size`` anchors, as tensors (1,) or (size,)."""
    found = []
    for p in params:
        if not isinstance(p, Tensor):
            check_number(name, p)
            found.append(torch.full((1,), float(p), dtype=dtype, device=device))
            continue
        if p.numel() != 1 and p.shape != (size,):
            raise ValueError(f"{name}: expected a number or shape ({size},), got {tuple(p.shape)}")
        found.append(p if p.dim() == 1 and p.dtype == dtype and p.device == device else p.reshape(-1).to(device, dtype))
    return found


def as_bias(name: str, bias: Any, size: int, device: torch.device) -> Tensor | None:
    """Return a (size,) bias of candidates, detached, on the device; None for none."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape ({size},), got {type(bias).__name__}")
    if bias.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(bias.shape)}")
    return bias.detach().to(device)


def refuse_other_shapes(module: nn.Module, state: Mapping[str, Any], prefix: str, errors: list[str]) -> bool:
    """Return whether buffers of a state have other shapes than the module's: none of it should be loaded then."""
    for name, own in module._buffers.items():
        loaded = state.get(prefix + name)
        if own is not None and loaded is not None and loaded.shape != own.shape:
            errors.append(f"{prefix}{name}: expected shape {tuple(own.shape)}, got {tuple(loaded.shape)}")
            return True
    return False
