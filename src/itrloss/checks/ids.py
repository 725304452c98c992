"""Ids, which are integers or strings, and sets of labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..torch_versions import UINT64
from .arrays import Names, from_numpy, type_name
from .values import shown

NO_ID = torch.iinfo(torch.int64).min  # of what does not exist; among strings, too
# What ids may be: integers of any type, or strings; see as_id_numbers.
IdsLike: TypeAlias = Tensor | np.ndarray | Sequence[int] | Sequence[str]


def as_id_numbers(name: str, ids: object, size: int | None = None) -> Tensor:
    """Return ids as a tensor of integers: a tensor or an array of any integer type, or a list of
    integers; or strings, whose numbers are the same in every call, process and file.
    """
    x = ids
    if not isinstance(x, Tensor):
        array = _as_array(ids)
        if array.dtype.kind == "U":
            return _numbers_of_strings(array)
        if array.dtype.kind == "u" and (array >= 2**63).any():
            raise too_large(name, array.dtype)
        x = from_numpy(array)
    is_tensor = isinstance(x, Tensor)
    if not is_tensor or x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        got = type_name(ids) if isinstance(ids, Tensor) else f"{type_name(ids)} of {x.dtype}"
        if isinstance(ids, (list, tuple)):
            got = shown(ids)
        raise no_integers(name, x, size, got)
    return x


def as_integers(name: str, given: object, size: int | None = None) -> Tensor:
    """Return a tensor, an array or a list of integers as a tensor; raise a TypeError for others."""
    if are_strings(given):
        raise no_integers(name, given, size, f"{type_name(given)} of strings")
    return as_id_numbers(name, given, size)


def are_strings(ids: object) -> bool:
    """Return whether ids are strings."""
    return not isinstance(ids, Tensor) and _as_array(ids).dtype.kind == "U"


def kind_of(ids: object) -> bool | None:
    """Return whether ids are strings; None for no ids, and for lists of ``NO_ID`` alone, which go
    with strings and with integers.
    """
    if ids is None:
        return None
    if isinstance(ids, Tensor):
        return False if ids.numel() else None
    array = _as_array(ids)
    if array.size == 0:
        return None
    if array.dtype.kind == "U":
        return True
    return None if (array == NO_ID).all() else False


def _as_array(ids: object) -> np.ndarray:
    """Return ids that are no tensor as an array of integers or of strings; of objects, if they
    are neither.
    """
    if np.ma.is_masked(ids):  # some have no value
        return np.array(None)
    if isinstance(ids, (list, tuple)):
        ids = [x.tolist() if isinstance(x, Tensor) else x for x in ids]
        array = np.array(ids, dtype=object)  # else numbers among strings would become strings
    else:
        array = np.asarray(ids)
    if array.dtype.kind == "S":  # as of h5py
        return np.char.decode(array, "utf-8", "surrogateescape")
    if array.dtype.kind != "O":
        return array
    values = array.ravel().tolist()
    if all(isinstance(x, Integral) for x in values):
        return np.array(values, None if values else np.int64).reshape(array.shape)
    if all(isinstance(x, str) or (isinstance(x, Integral) and x == NO_ID) for x in values):
        return array.astype(str)
    return array


def _numbers_of_strings(strings: np.ndarray) -> Tensor:
    """Return int64 numbers of strings, the first 62 bits of their hashes.

    They depend on nothing but the string, so that equal ones match in later batches, in memories
    and in other processes. Among 10^6 strings, two have one number with a probability of 10^-7.
    """
    numbers = []
    for x in strings.ravel().tolist():
        if x == str(NO_ID):
            numbers.append(NO_ID)
            continue
        digest = hashlib.blake2b(x.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        numbers.append(int.from_bytes(digest, "little") >> 2)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").reshape(strings.shape)


def as_ids(
    name: str, ids: object, size: int, device: torch.device | None, may_be_sets: bool = False
) -> Tensor:
    """Return a copy of the ids as a (size,) int64 tensor on the device, or where they are if it is
    None; see :func:`as_id_numbers`. A column (size, 1) of a table will do.

    With ``may_be_sets``, they may also be sets of labels (size, k).
    """
    x = as_id_numbers(name, ids, size)
    if x.shape == (size, 1):
        x = x[:, 0]
    are_sets = may_be_sets and x.dim() == 2 and x.shape[1] > 0
    if x.shape[:1] != (size,) or x.dim() != 1 + are_sets:
        expected = f"({size}, k)" if are_sets else f"({size},)"
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
    if x.dtype == UINT64:
        x = as_int64(name, x)
    return x.to(device, torch.int64, copy=True)


#: A copy of ids as (size,) int64, or of sets of labels as (size, k): :func:`as_ids` of both kinds.
as_labels = partial(as_ids, may_be_sets=True)


def as_indices(name: str, x: object, size: int, device: torch.device) -> Tensor:
    """Return a copy of integers that are no ids as a (size,) int64 tensor on the device."""
    return as_ids(name, as_integers(name, x, size), size, device)


def as_int64(name: str, x: Tensor) -> Tensor:
    """Return integers as int64; raise a ValueError for larger ones."""
    if x.dtype == UINT64 and (x.view(torch.int64) < 0).any():
        raise too_large(name, x.dtype)  # the host waits for these only
    return x.long()


def too_large(name: str, dtype: object) -> ValueError:
    """Return the error of ids that int64 would make negative, and 2**63 the id of padding."""
    return ValueError(f"{name}: expected ids below 2**63, got larger ones in {dtype}")


def check_range(name: str, x: Tensor, largest: int) -> None:
    """Raise a ValueError unless all integers are from 0 to ``largest``. Synchronises with an
    accelerator.
    """
    low = int(x.amin())
    high = int(x.amax())
    if low < 0 or high > largest:
        raise ValueError(f"{name}: expected integers from 0 to {largest}, got {low} to {high}")


def check_same_kind(name: str, ids: object, other_name: str, others: object) -> None:
    """Raise a TypeError for strings on one side and integers on the other, which never match."""
    if {True, False} <= {kind_of(ids), kind_of(others)}:
        expected = f"strings with strings in {name}, integers with integers"
        raise TypeError(f"{other_name}: expected {expected}")


def ids_of_both(
    row_ids: object, col_ids: object, n: int, m: int, device: torch.device, names: Names
) -> tuple[Tensor, Tensor]:
    """Return the (N,) and (M,) int64 ids of both sides, both of strings or neither."""
    check_same_kind(names.row_ids, row_ids, names.col_ids, col_ids)
    rows = as_ids(names.row_ids, row_ids, n, device)
    return rows, as_ids(names.col_ids, col_ids, m, device)


# ------------------------------------------------------------------------------- words of messages


def no_integers(name: str, x: object, size: int | None, got: str) -> TypeError:
    """Return the error for what are no integers."""
    # Formatted for the error alone: the compiler would specialise on the size.
    shape = "(N,)" if size is None else f"({size},)"
    hint = ""
    if isinstance(x, Tensor) and x.dtype == torch.bool and x.dim() == 2:
        hint = (
            "; a mask of the pairs that match goes in as matches=mask, multi-hot labels as "
            "matches=(of_images.float() @ of_texts.float().T) > 0, and the id of what does not "
            "exist is itrloss.NO_ID"
        )
    elif isinstance(x, Tensor) and x.dim() == 2:
        hint = (
            f" {tuple(x.shape)}; embeddings go in as itrloss.Similarity(images, texts), "
            "negatives as negatives=..., a matrix of who matches whom as matches=..."
        )
    elif isinstance(x, Tensor) and x.dim() == 0:
        hint = ", a scalar as logit_scale is; pass images and texts alone"
    return TypeError(f"{name}: expected an integer tensor of shape {shape}, got {got}{hint}")


def ids_of_one_side(row_ids: object, names: Names) -> Exception:
    """Return the error for ids of rows alone."""
    as_id_numbers(names.row_ids, row_ids)  # raises its own error for what is none
    return ValueError(f"{names.col_ids}: expected ids to go with {names.row_ids}, got None")


def no_default_pairing(n: int, m: int, names: Names) -> ValueError:
    """Return the error for n rows and m columns without ids, which have no default pairing."""
    if not names.col_ids:
        return ValueError(f"{names.cols}: expected as many as {names.rows}, {n}, got {m}")
    ids = f"{names.row_ids}, {names.col_ids}"
    hint = ""
    if n and m % n == 0:
        hint = (
            f"; where {m // n} consecutive ones belong to each, write {names.row_ids}="
            f"torch.arange({n}), {names.col_ids}=torch.arange({m}) // {m // n}"
        )
    hint += if_transposed(n, m)
    got = f"{n} {names.rows} and {m} {names.cols}"
    return ValueError(f"{ids}: needed for {got}; only N = M has a default pairing{hint}")


def if_transposed(n: int, m: int) -> str:
    """Return what to do about a matrix that is probably one of texts with images; else nothing."""
    if not m or n <= m or n % m:
        return ""
    return (
        "; rows are images here: if yours are texts, pass the transpose, scores.T, or embeddings "
        "the other way round"
    )
