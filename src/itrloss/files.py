"""Reading score matrices, embeddings and ids from ``.npy``, ``.npz``, ``.pt`` and pickle files;
safe writing.

Nothing in a file is ever executed. From pickles, such as VSE code bases save, only NumPy arrays,
numbers, strings and containers of them are read; ``.pt`` files are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_LONGEST_HEADER = 2**16
_ENCODING = "latin1"  # of bytes in old pickle protocols


def read_matrix(path: str | Path, key: str | None = None) -> Tensor:
    """Return the (N, M) floating-point matrix in a file; an ``.npy`` file is memory-mapped, so
    pages load on use.

    Args:
        path: ``.npy``, ``.npz``, ``.pt``/``.pth``, ``.pkl``/``.pickle``, or ``.npy`` with a pickled
            dictionary in it.
        key: the entry, if the file has several. By default ``sims``, or the only one.

    Raises:
        ValueError: naming the file and what was expected.
        OSError: if it cannot be read.
    """
    array = _read(Path(path), key)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{path}: expected a matrix with rows and columns, got shape {tuple(array.shape)}"
        )
    if not array.is_floating_point():
        raise ValueError(f"{path}: expected floating-point numbers, got {array.dtype}")
    return array


def read_ids(path: str | Path, key: str | None = None) -> Tensor:
    """Return (N,) int64 ids from a text file with one integer per line, or any format of
    :func:`read_matrix`.
    """
    path = Path(path)
    if path.suffix == ".txt":
        try:
            numbers = [int(x) for x in path.read_text(encoding="utf-8").split()]
            return torch.tensor(numbers, dtype=torch.int64)
        except (OverflowError, RuntimeError, ValueError):  # RuntimeError: more than 64 bits
            raise ValueError(f"{path}: expected one integer a line") from None
    array = _read(path, key)
    no_integers = array.is_floating_point() or array.is_complex() or array.dtype == torch.bool
    if array.ndim != 1 or no_integers:
        raise ValueError(
            f"{path}: expected a row of integers, got {array.dtype} of shape {tuple(array.shape)}"
        )
    return array.long()


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text file, split at newlines only: other Unicode line separators stay
    in them.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from None
    return text.removesuffix("\n").split("\n") if text else []


@contextlib.contextmanager
def written(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Return a context with a temporary file to write, which replaces ``path`` when complete, or is
    removed on error.

    The target of a symbolic link is replaced, not the link. A device or a pipe, such as
    ``/dev/stdout``, is written to directly; in binary mode, whose archives need to seek, it is
    refused.
    """
    path = Path(os.path.realpath(path))
    binary = "b" in mode
    encoding = None if binary else "utf-8"
    if path.exists() and not path.is_file():
        if binary:
            raise ValueError(f"{path}: expected a file to write, got a device or a pipe")
        with open(path, mode, encoding=encoding) as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, mode, encoding=encoding) as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, key: str | None) -> Tensor:
    """Return the array named ``key`` in a file, or by default ``sims`` or the only one."""
    if path.suffix not in _READERS:
        raise ValueError(f"{path}: expected a file named {', '.join('*' + s for s in _READERS)}")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    with _reading(path):
        content = _READERS[path.suffix](path)
    count = None
    if isinstance(content, dict):
        key = _array_name(path, content, key)
        count = content.get("npts")
        content = content[key]
    elif key is not None:
        got = type(content).__name__
        raise ValueError(f"{path}: expected entries with names, among them {key!r}; got {got}")
    with _reading(path):
        content = _loaded(content)
        count = _loaded(count)
    array = _tensor(path, content)
    if isinstance(count, (int, np.integer)) and array.ndim == 2 and count not in array.shape:
        raise ValueError(f"{path}: says npts = {count}, but {key} has shape {tuple(array.shape)}")
    return array


def _array_name(path: Path, content: dict[Any, Any], key: str | None) -> Any:
    """Return the name of the array that is read: ``key`` or, if it is None, ``sims`` or the only
    one.
    """
    kinds = np.ndarray | Tensor | _Archived | _Pickled
    names = [name for name, value in content.items() if isinstance(value, kinds) and value.ndim]
    expected = f"an array of the name {key!r}"
    if key is None:
        expected = "one array, or one of the name sims"
        if "sims" in names:
            key = "sims"
        elif len(names) == 1:
            key = names[0]
    if key not in names:
        got = ", ".join(map(str, names)) or "none"
        raise ValueError(f"{path}: expected {expected}; it has {got}")
    return key


def _loaded(x: Any) -> Any:
    """Return an entry of a file; an array of which only the header was read is read now."""
    return x.load() if isinstance(x, _Archived | _Pickled) else x


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let errors name the file."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except MemoryError:
        raise ValueError(f"{path}: speaks of more data than there is memory; damaged?") from None
    except Exception as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path}: not a readable {path.suffix} file: {text}") from None


def _read_npy(path: Path) -> Any:
    with open(path, "rb") as file:
        if _header(file)[1].hasobject:  # np.save of a dictionary
            return _unpickled(file)
    # raises an error if the file is shorter than its header says
    return np.load(path, mmap_mode="c")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of an array in NumPy's format; the file is then at the start of its
    data.
    """
    start = io.BytesIO(file.read(_LONGEST_HEADER))
    version = np.lib.format.read_magic(start)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"version {version} of the format is not known")
    shape, _, dtype = readers[version](start, max_header_size=_LONGEST_HEADER)
    file.seek(start.tell())
    return shape, dtype


class _Archived(NamedTuple):
    """An array in an archive, which is read when it is chosen: others may be larger than memory."""

    path: Path
    name: str
    ndim: int

    def load(self) -> Any:
        """Return the array, or one number as such."""
        with np.load(self.path) as arrays:  # refuses Python objects
            return arrays[self.name][()]


def _read_npz(path: Path) -> dict[str, _Archived]:
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            with archive.open(entry) as file:
                name = entry.removesuffix(".npy")
                arrays[name] = _Archived(path, name, len(_header(file)[0]))
    return arrays


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):  # torch's message would advise to trust the file
        raise ValueError("damaged, or more in it than tensors and containers of them") from None


def _read_pickle(path: Path) -> Any:
    with open(path, "rb") as file:
        return _unpickled(file)


class _Type:
    """Stands in for ``numpy.dtype``: a pickle could set a real one's flags so that bytes are read
    as addresses.
    """

    def __init__(self, name: object, *_: object):
        self.parts = (name,)

    def __setstate__(self, state: Any) -> None:
        self.parts = state[1], *self.parts  # with the order of bytes


class _Pickled:
    """An array in a pickle, which is made when it is chosen, and only of numbers."""

    def __init__(
        self, data: Any = None, kind: Any = None, shape: Any = (), order: Any = "C", *_: object
    ):
        self.data = data
        self.kind = kind
        self.shape = shape
        self.order = order
        self.ndim = len(shape)

    def __setstate__(self, state: Any) -> None:
        shape, kind, fortran, data = state[-4:]
        _Pickled.__init__(self, data, kind, shape, "F" if fortran else "C")

    def load(self) -> Any:
        """Return the array, or one number as such."""
        # refuses all but strings; str() of lists in lists may take for ever
        dtype = np.dtype("".join(self.kind.parts))
        if dtype.kind not in "fiub":
            raise ValueError(f"expected numbers, got an array of {dtype}, which is not read")
        data = self.data
        if isinstance(data, str):
            data = data.encode(_ENCODING)
        return np.frombuffer(data, dtype).copy().reshape(self.shape, order=self.order)[()]


# The names that pickled arrays refer to, and their replacements here.
_REPLACED: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": lambda *_: _Pickled(),
    "numpy.core.multiarray.scalar": lambda kind, data: _Pickled(data, kind),
    "numpy.core.numeric._frombuffer": _Pickled,
    "numpy.ndarray": "ndarray",
    "numpy.dtype": _Type,
    "_codecs.encode": lambda text, _: text.encode(_ENCODING),
}


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Python's own, not the one in C, which allocates gigabytes for a memo's index that 20 bytes
    can name.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name; raise a ValueError for one that is not read."""
        # as it was called before NumPy 2
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in _REPLACED:
            raise ValueError(f"it asks for {full}, which is not read")
        return _REPLACED[full]


def _unpickled(file: IO[bytes]) -> Any:
    value = _Unpickler(file, encoding=_ENCODING).load()  # as written by Python 2, too
    if isinstance(value, _Pickled) and isinstance(value.data, list) and len(value.data) == 1:
        value = value.data[0]  # once: it may contain itself
    return value


def _checked_tensor(path: Path, x: Tensor) -> Tensor:
    """Return a tensor that a file has, if it is dense, holds its numbers and is on the CPU."""
    plain = x.layout == torch.strided and not x.is_nested and x.device.type == "cpu"
    if not plain or (x.is_floating_point() and x.dtype.itemsize < 2):
        expected = "a dense tensor of 16 bits a number at least"
        raise ValueError(f"{path}: expected {expected}, got {x.dtype} on {x.device}, {x.layout}")
    size = x.untyped_storage().nbytes()
    if size < x.numel() * x.element_size():  # of a few bytes, petabytes
        got = f"{tuple(x.shape)} on {size} bytes"
        raise ValueError(f"{path}: expected a tensor that holds each of its numbers, got {got}")
    return x.detach()


def _tensor(path: Path, array: Any) -> Tensor:
    """Return what a file has as a tensor, if it is an array of numbers."""
    if isinstance(array, Tensor):
        return _checked_tensor(path, array)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: expected an array, got {type(array).__name__}")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{path}: expected numbers, got {array.dtype}")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


_READERS: dict[str, Callable[[Path], Any]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".pkl": _read_pickle,
    ".pickle": _read_pickle,
}
