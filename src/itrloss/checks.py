"""Checks of arguments. An error names the argument, what was expected and what it got."""

from __future__ import annotations

import hashlib
import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from . import hints

_AT_ONCE = 2**22  # elements checked at once
_LARGEST = torch.finfo(torch.float32).max
T = TypeVar("T")
# What ids may be: integers of any type, or strings; see as_id_numbers.
IdsLike: TypeAlias = Tensor | np.ndarray | Sequence[int] | Sequence[str]


class Names(NamedTuple):
    """What the caller calls the two sides of a similarity matrix, and their ids: nothing, if it
    does not take any.
    """

    rows: str = "rows"
    cols: str = "cols"
    row_ids: str = "row_ids"
    col_ids: str = "col_ids"


ROWS_AND_COLUMNS = Names()
IMAGES_AND_TEXTS = Names("images", "texts", "image_ids", "text_ids")


def one_of(name: str, value: object, *allowed: object) -> None:
    """Raise a ValueError unless ``value`` is one of those allowed."""
    if isinstance(value, (Tensor, np.ndarray)) or value not in allowed:
        listed = " or ".join([", ".join(map(repr, allowed[:-1])), repr(allowed[-1])])
        if len(allowed) == 1:
            listed = repr(allowed[0])
        hint = hints.did_you_mean(value, allowed) or hints.in_place_of_option(value)
        raise ValueError(f"{name}: expected {listed}, got {hints.shown(value)}{hint}")


def check_number(name: str, value: object, positive: bool = False) -> None:
    """Raise an error unless ``value`` is a number, above 0 if ``positive``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = hints.in_place_of_number(value)
        raise TypeError(f"{name}: expected a number, got {hints.shown(value)}{hint}")
    if positive and not float(value) > 0:
        raise ValueError(f"{name}: expected a number above 0, got {value}")
    if not abs(float(value)) <= _LARGEST:
        raise ValueError(f"{name}: expected a number in the range of float32, got {value}")


def as_number(name: str, value: Any, positive: bool = False) -> float:
    """Return a number of any type as a Python number; raise an error as :func:`check_number`.

    Others would be shown, saved and rounded in their own ways.
    """
    check_number(name, value, positive)
    return int(value) if isinstance(value, Integral) else float(value)


def as_size(name: str, value: Any) -> int:
    """Return an integer of at least 1, of any type, as an int; raise an error for what is none."""
    if isinstance(value, np.bool_):  # an index for NumPy 1.24
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if not isinstance(value, int):  # such as of NumPy; sums of its short ones would overflow
        try:
            value = operator.index(value)
        except TypeError:
            got = hints.shown(value)
            raise TypeError(f"{name}: expected an integer, got {got}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def check_matrix(
    name: str, x: Any, shape: str, check_finite: bool = False, dims: int = 2, empty: bool = False
) -> None:
    """Raise an error unless ``x`` is a floating-point tensor of ``dims`` dimensions, none of them
    of size 0.

    With ``empty`` there may be no rows, as in one process of several.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        hint = hints.as_floats(name, x)
        raise TypeError(f"{name}: expected a floating-point tensor {shape}, got {_type(x)}{hint}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {x.layout}; write {name}.to_dense()")
    if x.dim() != dims or 0 in x.shape[int(empty) :]:
        hint = hints.as_matrix(name, x, shape.endswith("D)")) if dims == 2 else ""
        raise ValueError(
            f"{name}: expected shape {shape}, each at least 1, got {tuple(x.shape)}{hint}"
        )
    if check_finite and len(x):
        require_finite(name, x)


def check_embeddings(
    rows: Any, cols: Any, check_finite: bool, names: Names, empty: bool = False
) -> None:
    """Raise an error unless (N, D) and (M, D) embeddings match in dimension, dtype and device."""
    if cols is None:
        raise missing_side(rows, names)
    check_matrix(names.rows, rows, "(N, D)", check_finite, empty=empty)
    check_matrix(names.cols, cols, "(M, D)", check_finite, empty=empty)
    if rows.shape[1] != cols.shape[1]:
        expected = f"embeddings of dimension {rows.shape[1]} like {names.rows}"
        raise ValueError(f"{names.cols}: expected {expected}, got shape {tuple(cols.shape)}")
    check_alike(names.cols, cols, names.rows, rows)


def missing_side(rows: Any, names: Names) -> TypeError:
    """Return the error for embeddings of one side alone, which may be scores."""
    if not isinstance(rows, Tensor):
        got = f"{_type(rows)} and None"
        both = f"{names.rows}, {names.cols}"
        expected = "expected floating-point tensors (N, D) and (M, D)"
        return TypeError(f"{both}: {expected}, got {got}{hints.in_place_of_images(rows)}")
    calls = {"texts": "loss(scores=scores)", "cols": "Similarity.from_scores(scores)"}
    hint = ""
    if names.cols in calls:
        hint = f"; a matrix of scores goes in as {calls[names.cols]}"
    given = f"None with {names.rows} of shape {tuple(rows.shape)}"
    return TypeError(f"{names.cols}: expected embeddings (M, D), got {given}{hint}")


def check_alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise an error unless two tensors lie on one device, and both are float64 or neither is."""
    if (x.dtype == torch.float64) != (other.dtype == torch.float64):
        expected = f"the dtype of {other_name}, {other.dtype}"
        raise TypeError(
            f"{name}: expected {expected}, got {x.dtype}; write {name}.to({other_name}.dtype)"
        )
    if x.device != other.device:
        raise ValueError(
            f"{name}: expected device {other.device} like {other_name}, got {x.device}; "
            f"write {name}.to({other_name}.device)"
        )


def require_finite(name: str, x: Tensor) -> None:
    """Raise a ValueError for nan or infinity in a tensor (..., C). Synchronises with an
    accelerator.
    """
    given = x.detach().flatten(0, -2)
    x = given.T if given.stride(0) < given.stride(1) else given  # contiguous, as in memory
    # In parts, as the matrix may be memory-mapped. A nan is both extremes, and aminmax takes a
    # tenth of the time of isfinite.
    ends = [end for part in x.split(max(1, _AT_ONCE // x.shape[1])) for end in part.aminmax()]
    if not bool(torch.stack(ends).isfinite().all()):
        raise ValueError(f"{name}: expected finite values, got nan or infinity{_places(given)}")


def _places(x: Tensor) -> str:
    """Return how many numbers of a matrix are not finite, and where the first is, in words."""
    count = 0
    first = ""
    rows = max(1, _AT_ONCE // x.shape[1])
    for start in range(0, len(x), rows):
        places = (~x[start : start + rows].isfinite()).nonzero()
        if len(places) and not count:
            row, col = places[0].tolist()
            first = f"in row {start + row} and column {col}"
        count += len(places)
    return f": {count} of {x.numel()}, the first {first}"


def from_numpy(x: Any) -> Any:
    """Return a NumPy array of numbers as a tensor on the CPU, and a table of pandas, too; anything
    else as it is.

    The tensor has the memory of the array, which may be a file's: the library never writes to what
    it is given. Only a layout or a number type that PyTorch does not know is copied.
    """
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "to_numpy"):
        x = x.to_numpy()
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub":
        return x
    size = min(x.dtype.itemsize, 8)  # of long doubles, too
    # by its size: NumPy has two types of 64 bits, of which PyTorch knows one
    native = np.dtype(f"{x.dtype.kind}{size}")
    order = "F" if x.flags.f_contiguous else "C"  # PyTorch has no negative strides
    x = np.require(x, native, [order, "ALIGNED"])
    if x.flags.writeable:
        return torch.from_numpy(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return torch.from_numpy(x)


def as_id_numbers(name: str, ids: Any, size: int | None = None) -> Tensor:
    """Return ids as a tensor of integers: a tensor or an array of any integer type, or a list of
    integers; or strings, whose numbers are the same in every call, process and file.
    """
    if are_strings(ids):
        return _numbers_of_strings(_id_array(ids))
    return as_integers(name, ids, size)


def are_strings(ids: Any) -> bool:
    """Return whether ids are strings."""
    return not isinstance(ids, Tensor) and _id_array(ids).dtype.kind == "U"


def _id_array(ids: Any) -> np.ndarray:
    """Return ids that are no tensor as an array, of strings if all are strings."""
    if isinstance(ids, (list, tuple)) and any(isinstance(x, Tensor) for x in ids):
        ids = [x.tolist() if isinstance(x, Tensor) else x for x in ids]
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths
        return np.array(None)
    if isinstance(ids, (list, tuple)) and not array.size:
        return array.astype(np.int64)
    if array.dtype.kind == "S":  # as of h5py
        return _decoded(array)
    values = array.ravel().tolist() if array.dtype.kind in "OU" else []
    if array.dtype.kind == "U" and isinstance(ids, (list, tuple)):
        # NumPy makes strings of strings and numbers, too: judged by what there was
        given = np.asarray(ids, dtype=object).ravel()
        if not all(isinstance(x, str) for x in given):
            return np.array(None)
    if array.dtype.kind == "O" and values:  # of pandas, or as np.array(..., dtype=object)
        if all(isinstance(x, str) for x in values):
            return array.astype(str)
        fit = all(isinstance(x, int) and abs(x) < 2**63 for x in values)
        if fit and not any(isinstance(x, bool) for x in values):
            return array.astype(np.int64)
    return array


def _decoded(array: np.ndarray) -> np.ndarray:
    """Return byte strings in UTF-8 as strings; others stay what they are, and are refused."""
    try:
        return np.char.decode(array, "utf-8")
    except UnicodeDecodeError:
        return array


def _numbers_of_strings(strings: np.ndarray) -> Tensor:
    """Return int64 numbers of strings, the first 62 bits of their hashes.

    They depend on nothing but the string, so that equal ones match in later batches, in memories
    and in other processes. Among 10^6 strings, two have one number with a probability of 10^-7.
    """
    numbers = []
    for x in strings.ravel().tolist():
        digest = hashlib.blake2b(x.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        numbers.append(int.from_bytes(digest, "little") >> 2)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").reshape(strings.shape)


def as_integers(name: str, x: Any, size: int | None = None) -> Tensor:
    """Return a tensor, an array or a list of integers as a tensor; raise a TypeError for others."""
    got = _type(x)
    if not isinstance(x, Tensor):
        array = _id_array(x)
        x = from_numpy(array)
        if array.dtype.kind not in "fiub":
            got = f"{got} of {'strings' if array.dtype.kind == 'U' else array.dtype}"
    is_other = not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex()
    if is_other or x.dtype == torch.bool:
        # Formatted for the error alone: the compiler would specialise on the size.
        shape = "(N,)" if size is None else f"({size},)"
        hint = hints.in_place_of_ids(name, x)
        raise TypeError(f"{name}: expected an integer tensor of shape {shape}, got {got}{hint}")
    return x


def as_ids(name: str, ids: Any, size: int, device: torch.device) -> Tensor:
    """Return a copy of the ids as a (size,) int64 tensor on the device; see
    :func:`as_id_numbers`. A column (size, 1) of a table will do.
    """
    return _copied(name, as_id_numbers(name, ids, size), size, device)


def is_label_sets(ids: Any) -> bool:
    """Return whether ids are sets of labels (N, k) of more than one label."""
    if ids is None or isinstance(ids, str):
        return False
    shape = getattr(ids, "shape", None)
    if shape is None:
        return isinstance(ids, (list, tuple)) and any(
            isinstance(x, (list, tuple)) and len(x) > 1 for x in ids
        )
    if len(shape) != 2 or shape[1] < 2:
        return False
    return not isinstance(ids, Tensor) or not (ids.is_floating_point() or ids.dtype == torch.bool)


def as_indices(name: str, x: Any, size: int, device: torch.device) -> Tensor:
    """Return a copy of integers that are no ids as a (size,) int64 tensor on the device."""
    return _copied(name, as_integers(name, x, size), size, device)


def _copied(name: str, x: Tensor, size: int, device: torch.device) -> Tensor:
    """Return a copy of integers as a (size,) int64 tensor on the device."""
    if x.shape == (size, 1):
        x = x[:, 0]
    if x.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(x.shape)}")
    return as_int64(name, x).to(device, copy=True)


def as_int64(name: str, x: Tensor) -> Tensor:
    """Return integers as int64; raise a ValueError for larger ones."""
    if x.dtype == torch.uint64 and (x.view(torch.int64) < 0).any():
        # int64 would make them negative, and 2**63 the id of padding. The host waits for these
        # only.
        raise ValueError(f"{name}: expected ids below 2**63, got larger ones in {_type(x)}")
    return x.long()


def as_mask(name: str, mask: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a mask of bools, or of integers 0 and 1: a tensor, an array or nested lists."""
    if isinstance(mask, (list, tuple)):
        mask = np.array(mask)
    mask = from_numpy(mask)
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name}: expected a bool tensor of shape {shape}, got {got}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(mask.shape)}")
    return mask


def check_range(name: str, x: Tensor, largest: int) -> None:
    """Raise a ValueError unless all integers are from 0 to ``largest``. Synchronises with an
    accelerator.
    """
    low = int(x.amin())
    high = int(x.amax())
    if low < 0 or high > largest:
        raise ValueError(f"{name}: expected integers from 0 to {largest}, got {low} to {high}")


def check_ids(
    row_ids: Any, col_ids: Any, n: int, m: int, device: torch.device, names: Names
) -> tuple[Tensor | None, Tensor | None]:
    """Return the (N,) and (M,) int64 ids, or None where they are left out; column ids may come
    alone.
    """
    if col_ids is None:
        if row_ids is not None:
            raise ids_of_one_side(row_ids, names)
        if n != m and not names.col_ids:
            raise ValueError(f"{names.cols}: expected as many as {names.rows}, {n}, got {m}")
        if n != m:
            got = f"{n} {names.rows} and {m} {names.cols}"
            needed = f"needed for {got}; only N = M has a default pairing"
            hint = hints.consecutive_ids(n, m, names.row_ids, names.col_ids)
            raise ValueError(f"{names.row_ids}, {names.col_ids}: {needed}{hint}")
        return None, None
    if row_ids is None:  # the columns' ids are numbers of rows
        return None, as_indices(names.col_ids, col_ids, m, device)
    return ids_of_both(row_ids, col_ids, n, m, device, names)


def check_biases(bias: Any, n: int, m: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the (N,) and (M,) biases; raise an error unless they are a pair of tensors or None."""
    if bias is None:
        return None, None
    if not isinstance(bias, (tuple, list)) or len(bias) != 2:
        raise TypeError(f"bias: expected a pair of tensors or None, got {bias!r}")
    biases = from_numpy(bias[0]), from_numpy(bias[1])
    for x, size in zip(biases, (n, m), strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.shape != (size,) or not x.is_floating_point():
            got = f"shape {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"bias: expected ({size},) floating-point numbers, got {got}")
    return biases


def ids_of_one_side(row_ids: Any, names: Names) -> Exception:
    """Return the error for ids of rows alone, which may be something else."""
    shape = tuple(getattr(row_ids, "shape", ()))
    if len(shape) == 2 and 1 not in shape:
        got = f"{_type(row_ids)} of shape {shape}"
        hint = "embeddings go in as itrloss.Similarity(images, texts), negatives as negatives=..."
        if getattr(row_ids, "dtype", None) in (torch.bool, np.dtype(bool)):
            hint = "a mask of the pairs that match goes in as matches=..."
        return ValueError(f"{names.row_ids}: expected ids, a row of integers, got {got}; {hint}")
    as_id_numbers(names.row_ids, row_ids)  # raises its own error for what is none
    return ValueError(f"{names.col_ids}: expected ids to go with {names.row_ids}, got None")


def ids_of_both(
    row_ids: Any, col_ids: Any, n: int, m: int, device: torch.device, names: Names
) -> tuple[Tensor, Tensor]:
    """Return the (N,) and (M,) int64 ids of both sides, both of strings or neither."""
    if are_strings(row_ids) != are_strings(col_ids):
        expected = f"strings with strings in {names.row_ids}, integers with integers"
        raise TypeError(f"{names.col_ids}: expected {expected}")
    rows = as_ids(names.row_ids, row_ids, n, device)
    if col_ids is row_ids and n == m:
        return rows, rows  # what is computed of one serves both
    return rows, as_ids(names.col_ids, col_ids, m, device)


def as_value(
    name: str, value: Any, size: int, dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """Return a number as a float, or a tensor of one or ``size`` values as (1,) or (size,)."""
    if isinstance(value, list):
        value = np.array(value)
    if isinstance(value, np.ndarray):
        value = from_numpy(value)
    if type(value) is float and abs(value) <= _LARGEST:
        return value
    if not isinstance(value, Tensor):
        check_number(name, value)
        return float(value)
    if value.numel() != 1 and value.shape != (size,):
        raise ValueError(f"{name}: expected a number or shape ({size},), got {tuple(value.shape)}")
    return value.flatten().to(device, dtype)


def as_tensor(name: str, value: Any, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number, or a tensor of one or ``size`` values, as a tensor (1,) or (size,)."""
    checked = as_value(name, value, size, dtype, device)
    if isinstance(checked, Tensor):
        return checked
    return torch.full((1,), checked, dtype=dtype, device=device)


def as_bias(name: str, bias: Any, size: int, device: torch.device) -> Tensor | None:
    """Return the (size,) bias of candidates, detached, on the device; None if there is none."""
    if bias is None:
        return None
    bias = from_numpy(bias)
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape ({size},), got {_type(bias)}")
    if bias.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(bias.shape)}")
    return bias.detach().to(device)


class Option(Generic[T]):
    """An option of a :class:`CheckedModule` or a re-ranker, declared in the body of its class."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.place = f"_{name}"  # of the value; the compiler of PyTorch 2.8 needs another name

    def check(self, value: Any) -> None:
        """Raise an error that names the option unless it may have the value: here, any."""

    def plain(self, value: Any) -> Any:
        """Return an allowed value in the type in which it is kept."""
        return value

    @overload
    def __get__(self, module: None, owner: type) -> Option[T]: ...
    @overload
    def __get__(self, module: object, owner: type) -> T: ...
    def __get__(self, module: object | None, owner: type) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self.place]
        except KeyError:
            raise AttributeError(f"{owner.__name__} has not set its option {self.name}") from None

    def __set__(self, module: Any, value: T) -> None:
        self.check(value)
        module.__dict__[self.place] = self.plain(value)


class WholeState(nn.Module):
    """A module that loads all of its state dict or, if a buffer's shape differs, nothing of it.

    Some keys may be missing or unexpected: so a module loads the state of another one that has the
    same parameters, and neither needs what the other holds besides, its ``extra_state``.
    """

    def may_differ(self, name: str) -> bool:
        """Return whether a key of the state, from this module on, may be missing or unexpected."""
        return name.split(".")[-1] == "_extra_state"

    def before_assignment(self, loaded: Mapping[str, Any]) -> None:
        """Prepare for a state, by keys from this module on, that is loaded with ``assign=True``."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        loaded = {
            key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)
        }
        for name, p in self._parameters.items():
            x = loaded.get(name)
            # such as the scale of a model (), which this loss shared when it was saved
            if p is not None and p.shape == (1,) and isinstance(x, Tensor) and x.dim() == 0:
                state_dict = {**state_dict, f"{prefix}{name}": x.reshape(1)}
        misfit = self._misfit(loaded)
        if misfit:
            error_msgs.append(f"{prefix}{misfit}")
            return
        if local_metadata.get("assign_to_params_buffers"):
            self.before_assignment(loaded)
        problems = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *problems)
        for keys in (missing_keys, unexpected_keys):
            keys[:] = [key for key in keys if not self._excused(key, prefix)]

    def _misfit(self, loaded: Mapping[str, Any]) -> str:
        """Return what is wrong with a buffer of a state; nothing if all fit."""
        for name, own in self._buffers.items():
            new = loaded.get(name)
            if own is not None and new is not None and new.shape != own.shape:
                return f"{name}: expected shape {tuple(own.shape)}, got {tuple(new.shape)}"
        return ""

    def _excused(self, key: str, prefix: str) -> bool:
        """Return whether a key of the whole state dict is this module's, and may differ."""
        return key.startswith(prefix) and self.may_differ(key.removeprefix(prefix))


class CheckedModule(WholeState):
    """A module whose options are checked whenever they are set."""

    def __setattr__(self, name: str, value: Any) -> None:
        option = getattr(type(self), name, None)
        # nn.Module would register a parameter without asking them
        if isinstance(option, (Option, property)):
            option.__set__(self, value)
        else:
            super().__setattr__(name, value)


class Choice(Option[T]):
    """An option that has one of a few values."""

    def __init__(self, *allowed: T):
        self.allowed = allowed

    def check(self, value: Any) -> None:
        one_of(self.name, value, *self.allowed)

    def plain(self, value: Any) -> Any:
        return self.allowed[self.allowed.index(value)]


class Size(Option[int]):
    """An option that is an integer of at least 1."""

    def check(self, value: Any) -> None:
        as_size(self.name, value)

    def plain(self, value: Any) -> int:
        return as_size(self.name, value)


class Bounded(Option[T]):
    """An option that is a number within bounds, or what a subclass allows besides."""

    def __init__(
        self,
        *,
        above: float = -math.inf,
        at_least: float = -math.inf,
        at_most: float = math.inf,
    ):
        self.above = above
        self.at_least = at_least
        self.at_most = at_most

    def check(self, value: Any) -> None:
        """Raise an error unless a value is a number within the bounds."""
        check_number(self.name, value)
        if value > self.above and self.at_least <= value <= self.at_most:
            return
        bounds = []
        if self.above > -math.inf:
            bounds.append(f"above {self.above:g}")
        if self.at_least > -math.inf:
            bounds.append(f"of at least {self.at_least:g}")
        if self.at_most < math.inf:
            bounds.append(f"at most {self.at_most:g}")
        raise ValueError(f"{self.name}: expected a number {' and '.join(bounds)}, got {value}")

    def plain(self, value: Any) -> Any:
        return as_number(self.name, value) if isinstance(value, Real) else value


class Number(Bounded[float]):
    """An option that is a number."""


class NumberOr(Bounded[Any]):
    """An option that is a number or one of some words."""

    def __init__(self, *words: str | None, **bounds: float):
        super().__init__(**bounds)
        self.words = words

    def check(self, value: Any) -> None:
        """Raise an error unless a value is one of the words, or a number within the bounds."""
        if value in self.words:
            return
        if isinstance(value, str):
            listed = ", ".join(map(repr, self.words))
            hint = hints.did_you_mean(value, self.words)
            raise ValueError(f"{self.name}: expected {listed} or a number, got {value!r}{hint}")
        super().check(value)


class Learnable(Bounded[Any]):
    """An option that is a number, or a parameter (1,) that holds one."""

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        # read here, as the compiler does not go on to the module's __getattr__
        parameter = module._parameters.get(self.name)
        if parameter is not None:
            return parameter
        return super().__get__(module, owner)

    def __set__(self, module: nn.Module, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            module.__dict__.pop(self.place, None)
            module.register_parameter(self.name, value)
            return
        parameter = module._parameters.get(self.name)
        if parameter is None:
            super().__set__(module, value)
            return
        self.check(value)
        module.__dict__[self.place] = self.plain(value)
        self.reset(module)

    def reset(self, module: nn.Module) -> None:
        """Give a parameter the number that was set last."""
        parameter = module._parameters.get(self.name)
        value = module.__dict__.get(self.place)
        if parameter is not None and value is not None:
            with torch.no_grad():
                parameter.fill_(value)


def reset_learnable(module: nn.Module) -> None:
    """Give the parameters behind a module's options the numbers that were set last."""
    for owner in type(module).__mro__:
        for option in vars(owner).values():
            if isinstance(option, Learnable):
                option.reset(module)


class Fixed(Option[T]):
    """An option that parameters depend on, so that it is set once.

    Whether a ``parameter`` is learnable is True once the module has one, by assignment, too.
    """

    def __init__(self, parameter: str | None = None):
        self.parameter = parameter

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None or self.parameter is None:
            return super().__get__(module, owner)
        is_parameter = module._parameters.get(self.parameter) is not None
        return is_parameter or super().__get__(module, owner)

    def check(self, value: Any) -> None:
        hint = hints.in_place_of_option(value)
        if hint:
            raise TypeError(f"{self.name}: expected an option, got {hints.shown(value)}{hint}")

    def __set__(self, module: Any, value: T) -> None:
        if self.place in module.__dict__:
            raise AttributeError(
                f"{self.name}: cannot be changed, as parameters depend on it; make a new module"
            )
        super().__set__(module, value)


def _type(x: object) -> str:
    """Return what to call an object's type: a tensor's dtype, or a class's name."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
