"""Checks of arguments. An error names the argument, what was expected and what it got."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral, Real
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Return a decorator that changes nothing: it is for type checkers and editors."""
        return lambda cls: cls


X = TypeVar("X")
_AT_ONCE = 2**22  # elements checked at once
_LARGEST = torch.finfo(torch.float32).max
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
        hint = did_you_mean(value, allowed) or in_place_of_option(value)
        raise ValueError(f"{name}: expected {listed}, got {shown(value)}{hint}")


def check_number(name: str, value: object, positive: bool = False) -> None:
    """Raise an error unless ``value`` is a number, above 0 if ``positive``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = in_place_of_number(value)
        raise TypeError(f"{name}: expected a number, got {shown(value)}{hint}")
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


def as_size(name: str, value: object) -> int:
    """Return an integer of at least 1, of any type, as an int; raise an error for what is none."""
    size = as_int(name, value)
    if size < 1:
        raise ValueError(f"{name}: expected at least 1, got {size}")
    return size


def as_int(name: str, value: Any) -> int:
    """Return an integer of any type as an int; raise a TypeError for what is none."""
    if isinstance(value, np.bool_):  # an index for NumPy 1.24
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if not isinstance(value, int):  # such as of NumPy; sums of its short ones would overflow
        try:
            value = operator.index(value)
        except TypeError:
            got = shown(value)
            raise TypeError(f"{name}: expected an integer, got {got}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    return value


def check_matrix(
    name: str, x: Any, shape: str, check_finite: bool = False, dims: int = 2, empty: bool = False
) -> None:
    """Raise an error unless ``x`` is a floating-point tensor of ``dims`` dimensions, none of them
    of size 0.

    With ``empty`` there may be no rows, as in one process of several.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        hint = as_floats(name, x)
        raise TypeError(f"{name}: expected a floating-point tensor {shape}, got {_type(x)}{hint}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {x.layout}; write {name}.to_dense()")
    if x.dim() != dims or 0 in x.shape[int(empty) :]:
        hint = as_matrix(name, x, shape.endswith("D)")) if dims == 2 else ""
        raise ValueError(
            f"{name}: expected shape {shape}, each at least 1, got {tuple(x.shape)}{hint}"
        )
    if check_finite and len(x):
        require_finite(name, x)


def as_embeddings(rows: Any, cols: Any, check_finite: bool, names: Names) -> tuple[Tensor, Tensor]:
    """Return (N, D) and (M, D) embeddings, which may be NumPy arrays, as tensors; raise an error
    as :func:`check_embeddings` does.
    """
    if not isinstance(rows, Tensor):
        rows = from_numpy(rows)
    if not isinstance(cols, Tensor):
        cols = from_numpy(cols)
    check_embeddings(rows, cols, check_finite, names)
    return rows, cols


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
    if rows.dtype != cols.dtype or rows.device != cols.device:
        check_alike(names.cols, cols, names.rows, rows)


def missing_side(rows: object, names: Names) -> TypeError:
    """Return the error for embeddings of one side alone, which may be scores."""
    if not isinstance(rows, Tensor):
        got = f"{_type(rows)} and None"
        both = f"{names.rows}, {names.cols}"
        expected = "expected floating-point tensors (N, D) and (M, D)"
        return TypeError(f"{both}: {expected}, got {got}{in_place_of_images(rows)}")
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
    it is given. Only a layout or a number type that PyTorch does not know is copied. An array with
    masked entries, which have no value, is no tensor.
    """
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "to_numpy"):
        x = x.to_numpy()
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub" or np.ma.is_masked(x):
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


def as_id_numbers(name: str, ids: object, size: int | None = None) -> Tensor:
    """Return ids as a tensor of integers: a tensor or an array of any integer type, or a list of
    integers; or strings, whose numbers are the same in every call, process and file.
    """
    if not isinstance(ids, Tensor):
        array = _id_array(ids)
        if array.dtype.kind == "U":
            return _numbers_of_strings(array)
    return as_integers(name, ids, size)


def are_strings(ids: object) -> bool:
    """Return whether ids are strings."""
    return not isinstance(ids, Tensor) and _id_array(ids).dtype.kind == "U"


def _id_array(ids: object) -> np.ndarray:
    """Return ids that are no tensor as an array, of strings if all are strings."""
    if isinstance(ids, (list, tuple)) and any(isinstance(x, Tensor) for x in ids):
        ids = [x.tolist() if isinstance(x, Tensor) else x for x in ids]
    array = _as_array(ids)
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


def _as_array(ids: object) -> np.ndarray:
    """Return ids as an array, of None where lists have different lengths or entries are masked."""
    if np.ma.is_masked(ids):
        return np.array(None)
    try:
        return np.asarray(ids)
    except ValueError:
        return np.array(None)


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


def as_integers(name: str, given: object, size: int | None = None) -> Tensor:
    """Return a tensor, an array or a list of integers as a tensor; raise a TypeError for others."""
    x = given
    if not isinstance(x, Tensor):
        array = _id_array(given)
        x = from_numpy(array)
        if not isinstance(x, Tensor):
            kind = "strings" if array.dtype.kind == "U" else array.dtype
            raise no_integers(name, x, size, f"{type(given).__name__} of {kind}")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise no_integers(name, x, size, _type(given))
    return x


def no_integers(name: str, x: object, size: int | None, got: str) -> TypeError:
    """Return the error for what are no integers."""
    # Formatted for the error alone: the compiler would specialise on the size.
    shape = "(N,)" if size is None else f"({size},)"
    hint = in_place_of_ids(name, x)
    return TypeError(f"{name}: expected an integer tensor of shape {shape}, got {got}{hint}")


def as_ids(name: str, ids: object, size: int, device: torch.device) -> Tensor:
    """Return a copy of the ids as a (size,) int64 tensor on the device; see
    :func:`as_id_numbers`. A column (size, 1) of a table will do.
    """
    return _copied(name, as_id_numbers(name, ids, size), size, device)


def as_indices(name: str, x: object, size: int, device: torch.device) -> Tensor:
    """Return a copy of integers that are no ids as a (size,) int64 tensor on the device."""
    return _copied(name, as_integers(name, x, size), size, device)


def _copied(name: str, x: Tensor, size: int, device: torch.device) -> Tensor:
    """Return a copy of integers as a (size,) int64 tensor on the device."""
    if x.shape == (size, 1):
        x = x[:, 0]
    if x.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(x.shape)}")
    if x.dtype == torch.uint64:
        x = as_int64(name, x)
    return x.to(device, torch.int64, copy=True)


def as_labels(name: str, ids: object, size: int, device: torch.device) -> Tensor:
    """Return a copy of ids as (size,) int64 on the device, or of sets of labels as (size, k).

    A column (size, 1) of a table is one of ids.
    """
    x = as_id_numbers(name, ids, size)
    if x.dim() != 2 or x.shape[1] < 2:
        return _copied(name, x, size, device)
    if len(x) != size:
        raise ValueError(f"{name}: expected shape ({size}, k), got {tuple(x.shape)}")
    return as_int64(name, x).to(device, copy=True)


def as_int64(name: str, x: Tensor) -> Tensor:
    """Return integers as int64; raise a ValueError for larger ones."""
    if x.dtype == torch.uint64 and (x.view(torch.int64) < 0).any():
        # int64 would make them negative, and 2**63 the id of padding. The host waits for these
        # only.
        raise ValueError(f"{name}: expected ids below 2**63, got larger ones in {_type(x)}")
    return x.long()


def as_mask(name: str, mask: object, shape: tuple[int, ...]) -> Tensor:
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


def check_biases(
    bias: object, n: int, m: int, check_finite: bool = False
) -> tuple[Tensor | None, Tensor | None]:
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
        if check_finite and size:
            require_finite("bias", x[None])
    return biases


def ids_of_one_side(row_ids: object, names: Names) -> Exception:
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


def no_default_pairing(n: int, m: int, names: Names) -> ValueError:
    """Return the error for n rows and m columns without ids, which have no default pairing."""
    if not names.col_ids:
        return ValueError(f"{names.cols}: expected as many as {names.rows}, {n}, got {m}")
    got = f"{n} {names.rows} and {m} {names.cols}"
    needed = f"needed for {got}; only N = M has a default pairing"
    hint = consecutive_ids(n, m, names.row_ids, names.col_ids)
    return ValueError(f"{names.row_ids}, {names.col_ids}: {needed}{hint}")


def check_same_kind(name: str, ids: object, other_name: str, others: object) -> None:
    """Raise a TypeError for strings beside integers, which never match."""
    if are_strings(ids) != are_strings(others):
        expected = f"strings with strings in {name}, integers with integers"
        raise TypeError(f"{other_name}: expected {expected}")


def ids_of_both(
    row_ids: object, col_ids: object, n: int, m: int, device: torch.device, names: Names
) -> tuple[Tensor, Tensor]:
    """Return the (N,) and (M,) int64 ids of both sides, both of strings or neither."""
    check_same_kind(names.row_ids, row_ids, names.col_ids, col_ids)
    rows = as_ids(names.row_ids, row_ids, n, device)
    if col_ids is row_ids and n == m:
        return rows, rows  # what is computed of one serves both
    return rows, as_ids(names.col_ids, col_ids, m, device)


def as_value(
    name: str, value: object, size: int, dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """Return a number as a float, or a tensor of one or ``size`` values as (1,) or (size,)."""
    if isinstance(value, list):
        value = np.array(value)
    if isinstance(value, np.ndarray):
        value = from_numpy(value)
    if type(value) is float and abs(value) <= _LARGEST:
        return value
    if not isinstance(value, Tensor):
        return float(as_number(name, value))
    if value.numel() != 1 and value.shape != (size,):
        raise ValueError(f"{name}: expected a number or shape ({size},), got {tuple(value.shape)}")
    return value.flatten().to(device, dtype)


def as_tensor(
    name: str, value: object, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a number, or a tensor of one or ``size`` values, as a tensor (1,) or (size,)."""
    checked = as_value(name, value, size, dtype, device)
    if isinstance(checked, Tensor):
        return checked
    return torch.full((1,), checked, dtype=dtype, device=device)


def as_bias(name: str, bias: object, size: int, device: torch.device) -> Tensor | None:
    """Return the (size,) bias of candidates, detached, on the device; None if there is none."""
    if bias is None:
        return None
    bias = from_numpy(bias)
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape ({size},), got {_type(bias)}")
    if bias.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(bias.shape)}")
    return bias.detach().to(device)


def unchanged(x: X) -> X:
    """Return what is passed: a parameter is the option itself."""
    return x


class Learnt(NamedTuple):
    """How an option may be learnt: as which parameter, and how one is computed from the other."""

    parameter: str
    value: Callable[[Tensor], Tensor] = unchanged  # the option, of the parameter
    stored: Callable[[float], float] = unchanged  # what the parameter holds for a number


class ReadParameter:
    """The value of an option that is computed from a parameter.

    It has no ``__set__``, so that a number in the instance's ``__dict__`` comes first.
    """

    def __init__(self, learnt: Learnt):
        self.learnt = learnt

    def __get__(self, module: object, owner: type) -> object:
        if module is None:
            return self
        return self.learnt.value(getattr(module, self.learnt.parameter))


@dataclass(eq=False)
class Option:
    """An option of a class of :class:`Options`; for what is passed see :func:`option`."""

    default: object = ...
    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf
    converter: Callable[[Any], Any] | None = None
    learnt: Learnt | None = None
    fixed: bool = False
    local: bool = False
    # what the class's body says
    name: str = ""
    kind: object = None  # its type
    keyword_only: bool = False
    words: tuple[object, ...] = ()  # that the type allows, such as "mean", True or None
    number: type | None = None  # float or int, if the type allows numbers

    def declare(self, name: str, kind: object, keyword_only: bool) -> None:
        """Set the name and the type."""
        self.name = name
        self.kind = kind
        self.keyword_only = keyword_only
        words, others = parts_of_type(kind)
        if self.learnt is not None:
            others.discard(Tensor)  # which it then is, and is set to numbers all the same
        if not others - {float, int}:
            self.words = words
            if float in others:
                self.number = float
            elif int in others:
                self.number = int

    @property
    def may_be_anything(self) -> bool:
        """Whether its type is none that is checked."""
        return self.converter is None and self.number is None and not self.words

    def parse(self, value: object) -> object:
        """Return an allowed value in the type in which it is kept; raise an error for another."""
        if self.may_be_anything:
            return value
        if self.converter is not None:
            return self.converter(value)
        if self.number is None:
            one_of(self.name, value, *self.words)
            return self.words[self.words.index(value)]
        is_array = isinstance(value, (Tensor, np.ndarray))
        if not is_array and value in self.words:
            return value
        if self.words and isinstance(value, str):
            listed = ", ".join(map(repr, self.words))
            hint = did_you_mean(value, self.words)
            raise ValueError(f"{self.name}: expected {listed} or a number, got {value!r}{hint}")
        number = as_int(self.name, value) if self.number is int else as_number(self.name, value)
        if not (number > self.above and self.at_least <= number <= self.at_most):
            raise ValueError(f"{self.name}: expected {self._bounds()}, got {value}")
        return number

    def _bounds(self) -> str:
        """Return what numbers are allowed, in words."""
        bounds = []
        if self.above > -math.inf:
            bounds.append(f"above {self.above:g}")
        if self.at_least > -math.inf:
            bounds.append(f"of at least {self.at_least:g}")
        if self.at_most < math.inf:
            bounds.append(f"at most {self.at_most:g}")
        return f"a number {' and '.join(bounds)}"

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter of a signature."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if self.keyword_only:
            kind = inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if self.default is ... else self.default
        return inspect.Parameter(self.name, kind, default=default, annotation=self.kind)


def option(
    *,
    default: object = ...,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    converter: Callable[[Any], Any] | None = None,
    learnt: Learnt | None = None,
    fixed: bool = False,
    local: bool = False,
) -> Any:
    """Return the declaration of an option, in the body of a class: ``margin: float =
    option(default=0.2, above=0)``.

    Args:
        default: ``...``: there is none, the option has to be passed.
        above, at_least, at_most: bounds of a number.
        converter: a function that returns the value in the type in which it is kept, and raises an
            error for another; it takes the place of the check by the type.
        learnt: as which parameter the option may be learnt.
        fixed: parameters depend on it, so that it is set once.
        local: each process of a job may have its own, and ``repr`` leaves it out.
    """
    return Option(default, above, at_least, at_most, converter, learnt, fixed, local)


def parts_of_type(kind: object) -> tuple[tuple[object, ...], set[object]]:
    """Return the words that a type allows, such as those of a Literal, and the types of others."""
    origin = get_origin(kind)
    if origin is Literal:
        return get_args(kind), set()
    if kind is bool:
        return (True, False), set()
    if kind is None or kind is type(None):
        return (None,), set()
    if origin is not Union and origin is not UnionType:
        return (), {kind}
    words: tuple[object, ...] = ()
    others: set[object] = set()
    for part in get_args(kind):
        own, types = parts_of_type(part)
        words += own
        others |= types
    return words, others


def evaluated(annotation: object, owner: type) -> object:
    """Return the type that an annotation in a class's body stands for; an unknown one as it is,
    such as a name that is imported for type checkers alone.
    """
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[owner.__module__]), dict(vars(owner)))
    except Exception:
        return annotation


@dataclass_transform(field_specifiers=(option,), eq_default=False)
class Options:
    """A class whose options are declared in its body, with a type and a default, as the fields of
    dataclasses are.

    The type says what an option may be: ``float``, ``int``, ``bool``, words in a ``Literal``, or
    several of these; other types are not checked. :func:`option` adds bounds. What follows ``_:
    KW_ONLY`` is passed by name. The constructor, its signature, ``repr``, and the check whenever an
    option is set are made of the declarations. A value is in the instance's ``__dict__``, so that
    it is read without a call.
    """

    _own_options: ClassVar[dict[str, Option]] = {}  # of one class
    _all_options: ClassVar[dict[str, Option]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Make the options and the signature of a class."""
        super().__init_subclass__(**kwargs)
        cls._own_options = own_options(cls)
        cls._all_options = all_options(cls)
        cls.__signature__ = signature_of(cls._all_options)  # what inspect and help show
        if cls.__init__ is not Options.__init__:
            cls.__signature__ = extended_signature(cls.__init__, cls._all_options)

    def __init__(self, *args: Any, **options: Any):
        super().__init__()
        name = type(self).__name__
        for given in options:
            if given not in self._all_options:
                raise unknown_keyword(name, given, self._all_options)
        signature = signature_of(self._all_options)
        bind = signature.bind
        if type(self).__init__ is not Options.__init__:
            bind = signature.bind_partial  # a constructor of one's own may set some of them later
        try:
            bound = bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        bound.apply_defaults()
        for given, value in bound.arguments.items():
            setattr(self, given, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Make what depends on the options, such as parameters; a subclass calls this one first."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; check it if it is an option."""
        declared = self._all_options.get(name)
        if declared is None:
            super().__setattr__(name, value)
            return
        if declared.fixed and name in self.__dict__:
            raise AttributeError(
                f"{name}: cannot be changed, as parameters depend on it; make a new module"
            )
        self._set_option(declared, value)

    def _set_option(self, declared: Option, value: object) -> None:
        """Check and keep the value of an option."""
        self.__dict__[declared.name] = declared.parse(value)

    def _options_in_words(self) -> str:
        """Return the options as they are passed: those by position, and changed ones by name."""
        parts = []
        for name, declared in self._all_options.items():
            value = self._shown(declared)
            is_default = value == repr(declared.default)
            if not declared.local and not (declared.keyword_only and is_default):
                parts.append(f"{name}={value}")
        return ", ".join(parts)

    def _shown(self, declared: Option) -> str:
        """Return the value of an option in words."""
        value = getattr(self, declared.name, None)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(f"{value.item():.4g}")
        return repr(value)


def own_options(cls: type) -> dict[str, Option]:
    """Return the options that a class declares, and take their defaults out of its attributes."""
    found = changed_defaults(cls)
    keyword_only = False
    for name, annotation in inspect.get_annotations(cls).items():
        kind = evaluated(annotation, cls)
        if kind is KW_ONLY:
            keyword_only = True
        if name not in vars(cls) or ClassVar in (kind, get_origin(kind)):
            continue
        given = vars(cls)[name]
        declared = given if isinstance(given, Option) else Option(given)
        declared.declare(name, kind, keyword_only)
        found[name] = declared
    for name, declared in found.items():
        delattr(cls, name)
        if declared.learnt is not None and declared.learnt.parameter != name:
            setattr(cls, name, ReadParameter(declared.learnt))
    for name, value in vars(cls).items():
        if isinstance(value, Option):
            raise TypeError(f"{name}: expected a type, as in {name}: float = option(...), got none")
    return found


def changed_defaults(cls: type) -> dict[str, Option]:
    """Return the options of its bases to which a class gives another default, as ``margin = 0.5``
    does.
    """
    inherited: dict[str, Option] = {}
    for owner in reversed(cls.__mro__[1:]):
        inherited |= vars(owner).get("_own_options", {})
    found = {}
    for name, value in vars(cls).items():
        if name in inherited and not hasattr(value, "__get__"):  # no property, and no method
            found[name] = replace(inherited[name], default=value)
    return found


def all_options(cls: type) -> dict[str, Option]:
    """Return the options of a class and of its bases.

    First come those by position, of the bases before its own, then those by name, its own first.
    """
    owners = [vars(x)["_own_options"] for x in cls.__mro__ if "_own_options" in vars(x)]
    latest: dict[str, Option] = {}
    for own in reversed(owners):
        latest |= own
    by_position = {name: x for name, x in latest.items() if not x.keyword_only}
    have_defaults = False
    for name, declared in by_position.items():
        if have_defaults and declared.default is ...:
            expected = "a default, or a place behind _: KW_ONLY, as others before it have defaults"
            raise TypeError(f"{name}: expected {expected}")
        have_defaults = declared.default is not ...
    by_name = {}
    for own in owners:
        by_name |= {name: latest[name] for name in own if name not in by_position}
    return by_position | by_name


def signature_of(options: Mapping[str, Option]) -> inspect.Signature:
    """Return the signature of a constructor that takes options."""
    return inspect.Signature([x.parameter() for x in options.values()])


def extended_signature(
    function: Callable[..., object], options: Mapping[str, Option]
) -> inspect.Signature:
    """Return the signature of a constructor of one's own, with the options that it passes on by
    ``**``.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    if not own or own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return inspect.Signature(own)
    named = {x.name for x in own}
    passed_on = []
    for name, declared in options.items():
        if name not in named:
            passed_on.append(declared.parameter().replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature([*own[:-1], *passed_on, own[-1]])


class WholeState(nn.Module):
    """A module that loads all of its state dict or, if a buffer's shape differs, nothing of it.

    Some keys may be missing or unexpected: so a module loads the state of another one that has the
    same parameters, and neither needs what the other holds besides, its ``extra_state``.
    """

    def may_differ(self, name: str) -> bool:
        """Return whether a key of the state, from this module on, may be missing or unexpected."""
        return name.split(".")[-1] == "_extra_state"

    def before_assignment(self, loaded: Mapping[str, Tensor]) -> None:
        """Prepare for a state, by keys from this module on, that is loaded with ``assign=True``."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
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

    def _misfit(self, loaded: Mapping[str, Tensor]) -> str:
        """Return what is wrong with a buffer of a state; nothing if all fit."""
        for name, own in self._buffers.items():
            new = loaded.get(name)
            if own is not None and new is not None and new.shape != own.shape:
                return f"{name}: expected shape {tuple(own.shape)}, got {tuple(new.shape)}"
        return ""

    def _excused(self, key: str, prefix: str) -> bool:
        """Return whether a key of the whole state dict is this module's, and may differ."""
        return key.startswith(prefix) and self.may_differ(key.removeprefix(prefix))


class CheckedModule(Options, WholeState):
    """A module whose options are checked whenever they are set, and may be learnt."""

    # The parameters in shards, which the optimiser moves, by name: in a forward pass,
    # ``fully_shard`` puts gathered copies in their place.
    _shards: ClassVar[Mapping[str, Tensor]] = {}

    def _to_write(self, name: str) -> list[Tensor]:
        """Return what a change of a parameter is written to: it and, if it is a gathered copy, the
        shards.
        """
        own = getattr(self, name)
        shards = self._shards.get(name)
        return [own] if shards is None or shards is own else [own, shards]

    def _set_option(self, declared: Option, value: Any) -> None:
        """Check and keep the value of an option, or the parameter that stands for it."""
        name = declared.name
        learnt = declared.learnt
        is_itself = learnt is not None and learnt.parameter == name
        # the replicas of nn.DataParallel have computed copies in place of parameters
        kind = Tensor if getattr(self, "_is_replica", False) else nn.Parameter
        if declared.may_be_anything or (is_itself and isinstance(value, kind)):
            super(Options, self).__setattr__(name, value)  # registers parameters and modules
            return
        if learnt is None:
            super()._set_option(declared, value)
            return
        number = declared.parse(value)
        if self.__dict__.get("learnable") and learnt.parameter not in self._parameters:
            expected = f"a value of {learnt.parameter}, which a parametrization computes"
            raise AttributeError(f"{name}: cannot be set, as it is {expected}")
        self.__dict__[f"_{name}"] = number  # for _reset_learnt
        if self._parameters.get(learnt.parameter) is None:
            self.__dict__[name] = number
        else:
            self._fill(declared)

    @torch.no_grad()
    def _fill(self, declared: Option) -> None:
        """Give the parameter behind an option the number that was set last."""
        assert declared.learnt is not None
        parameter = self._parameters.get(declared.learnt.parameter)
        if parameter is not None:
            parameter.fill_(declared.learnt.stored(self.__dict__[f"_{declared.name}"]))

    def _reset_learnt(self) -> None:
        """Give the parameters behind the options the numbers that were set last."""
        for declared in self._all_options.values():
            if declared.learnt is not None:
                self._fill(declared)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; an option that is learnt as it is then read from it."""
        super().register_parameter(name, param)
        if is_sharded(param):
            self.__dict__["_shards"] = {**self._shards, name: param}
        for declared in self._all_options.values():
            if declared.learnt is None or declared.learnt.parameter != name:
                continue
            if param is None:
                self.__dict__[declared.name] = self.__dict__[f"_{declared.name}"]
            else:
                self.__dict__.pop(declared.name, None)
            if "learnable" in self._all_options:
                self.__dict__["learnable"] = param is not None

    def _shown(self, declared: Option) -> str:
        """Return the value of an option in words.

        Shards are not read: that takes all processes, and one alone may be asked.
        """
        learnt = declared.learnt
        if learnt is not None and is_sharded(self._parameters.get(learnt.parameter)):
            return "in shards"
        return super()._shown(declared)

    def extra_repr(self) -> str:
        """Return the options, for ``repr``: those by position, and changed ones by name."""
        return self._options_in_words()


def is_sharded(x: object) -> bool:
    """Return whether a tensor is a DTensor, whose module is imported by those who make one."""
    return hasattr(x, "device_mesh")


# -------------------------------------------------- what was probably meant, at the end of an error


_SHARED_SCALE = (
    "a loss with learnable=True shares a model's parameter: loss.log_scale = model.logit_scale"
)
_MULTI_HOT = (
    "labels (N, k) are sets of ids, not multi-hot rows; for these, write "
    "matches=(of_images.float() @ of_texts.float().T) > 0"
)
# What to pass, and on the command line, where scores are expected.
EMBEDDINGS = (
    "embeddings go in as itrloss.Similarity(images, texts), on the command line as "
    "itrloss eval IMAGES TEXTS"
)


def did_you_mean(given: object, allowed: Iterable[object]) -> str:
    """Return the end of a message that says which word was probably misspelt; empty for no idea."""
    if not isinstance(given, str):
        return ""
    words = {plain_word(word): word for word in allowed if isinstance(word, str)}
    close = difflib.get_close_matches(plain_word(given), words, 1, 0.8)
    return f"; did you mean {words[close[0]]!r}?" if close else ""


def plain_word(word: str) -> str:
    """Return a word without what is often confused: case, hyphens and underscores."""
    return word.lower().replace("-", "").replace("_", "").replace(" ", "")


def unknown_keyword(name: str, given: str, allowed: Iterable[str]) -> TypeError:
    """Return the error for a keyword that a class or a function does not know."""
    names = list(allowed)
    hint = did_you_mean(given, names) or f"; it has {', '.join(names)}"
    return TypeError(f"{name}: got an unexpected keyword argument {given!r}{hint}")


def shown(value: object) -> str:
    """Return a value for a message: a parameter, a tensor or an array by its shape."""
    if isinstance(value, nn.Parameter):
        return f"a parameter of shape {tuple(value.shape)}"
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def in_place_of_option(value: object) -> str:
    """Return advice where data was passed for an option of a loss; empty for other values."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return "; options go first, and data into the call: loss = Loss(...); loss(images, texts)"
    return ""


def in_place_of_number(value: object) -> str:
    """Return advice where a tensor was passed for a number; empty for other values."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return f"; {_SHARED_SCALE}"
    return in_place_of_option(value)


def in_place_of_images(value: object) -> str:
    """Return advice where a trainer's batch was passed for images; empty for other values."""
    if isinstance(value, (list, tuple)) and any(isinstance(x, Mapping) for x in value):
        return (
            "; in the trainer of sentence-transformers, a loss goes into "
            "itrloss.integrations.sentence_transformers.RetrievalLoss(model, loss)"
        )
    return ""


def as_floats(name: str, x: object) -> str:
    """Return how to make a floating-point tensor of what is none; empty for no idea."""
    if isinstance(x, Tensor) and name == "negatives" and not x.is_complex():
        return "; for row numbers of a corpus, pass those rows: corpus[negatives]"
    if isinstance(x, Tensor) and name == "texts" and x.dim() == 1 and not x.is_complex():
        return "; labels are ids: loss(images, texts, image_ids, text_ids)"
    if isinstance(x, Tensor):
        return "" if x.is_complex() else f"; write {name}.float()"
    if np.ma.is_masked(x):
        return ", of which some entries are masked and have no value"
    if isinstance(x, np.ndarray):
        return f"; write torch.from_numpy({name})" if x.dtype.kind == "f" else ""
    if isinstance(getattr(x, "pooler_output", None), Tensor):  # of a model of transformers
        return f"; write {name}.pooler_output"
    if not isinstance(x, (list, tuple)) or not len(x):
        return ""
    if name == "negatives" and all(isinstance(part, Tensor) for part in x):
        return (
            "; write torch.cat(negatives) for negatives of all images, or "
            "torch.stack(negatives, 1) for each image's own, the i-th of each tensor"
        )
    if all(isinstance(part, Tensor) for part in x):
        return f"; write torch.stack({name}), or pass the tensors one by one"
    return f"; write torch.tensor({name})"


def as_matrix(name: str, x: Tensor, are_embeddings: bool) -> str:
    """Return how to make a matrix of a tensor of another shape; empty for no idea."""
    if x.dim() == 1:
        return f"; for a single row, write {name}[None]"
    if x.dim() == 3 and 1 in x.shape[:2]:
        return f"; write {name}.squeeze({list(x.shape).index(1)})"
    if x.dim() == 3 and are_embeddings:
        return (
            f"; for {x.shape[1]} embeddings of each, such as captions, write {name}.flatten(0, 1) "
            "and pass ids. Sets with one score for each pair are for "
            "itrloss.functional.set_similarity"
        )
    return ""


def consecutive_ids(n: int, m: int, row_ids: str, col_ids: str) -> str:
    """Return the ids of as many consecutive columns for each row; empty if numbers do not fit."""
    if n == 0 or m % n:
        return ""
    ids = f"{row_ids}=torch.arange({n}), {col_ids}=torch.arange({m}) // {m // n}"
    return f"; where {m // n} consecutive ones belong to each, write {ids}"


def repeated_rows(name: str, n: int, m: int) -> str:
    """Return how to repeat each of n rows to have m; empty if m is no multiple of n."""
    if n == 0 or m <= n or m % n:
        return ""
    rows = f"{name}.repeat_interleave({m // n}, 0)"
    return f"; where {m // n} consecutive ones belong to each, write {rows}"


def in_place_of_ids(name: str, x: object) -> str:
    """Return what to pass for a scale or a mask; empty for other values."""
    if isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point():
        return ", a scalar as logit_scale is; pass images and texts alone"
    if not isinstance(x, Tensor) or x.dtype != torch.bool or x.dim() != 2:
        return ""
    if name == "negative_ids":
        return "; for a mask of those that exist, write torch.where(mask, -1, itrloss.NO_ID)"
    return f"; {_MULTI_HOT}"


def multi_hot(x: Tensor) -> str:
    """Return what to pass for labels (N, k) that are all 0 or 1; empty for others."""
    if x.dim() != 2 or x.shape[1] < 2 or not bool(((x == 0) | (x == 1)).all()):
        return ""
    return f"; {_MULTI_HOT}"


def no_parameter(name: str, given: str, learnt: Iterable[str]) -> AttributeError:
    """Return the error for a parameter that a loss does not learn."""
    names = ", ".join(learnt)
    return AttributeError(f"{name}: it has no parameter {given!r}; it learns {names or 'none'}")


def as_similarity(name: str, x: object) -> str:
    """Return how to pass a matrix of scores for another model; empty for other values."""
    if isinstance(x, Tensor) and x.dim() == 2:
        return f"; scores go in as itrloss.Similarity.from_scores({name}, image_ids, text_ids)"
    return ""


def _type(x: object) -> str:
    """Return what to call an object's type: a tensor's dtype, or a class's name."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
