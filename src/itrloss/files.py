"""Scores, embeddings, ids and pairs from files of many formats, and results into files.

Nothing in a file is ever executed. From pickles, such as VSE code bases save, only arrays, tensors,
numbers, strings and containers of them are read; ``.pt`` files are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .checks import as_int64, from_numpy
from .torch_versions import untyped_storage

_TEXT = "utf-8-sig"  # with or without a byte order mark, as Excel and Notepad write it
_ENCODING = "latin1"  # of bytes in old pickle protocols
_SHOWN = 200  # letters of a file that a message has at most
_MISSING = ("nan", "na", "n/a", "<na>", "none", "null")
_RE_RANKED = {"i2t", "t2i", "transductive"}  # what itrloss rerank --out writes
# an integer, or a whole float, as pandas writes integers of a column with gaps: 3.0
_INTEGER = re.compile(r"[+-]?[0-9]+(\.0*)?")
# SciPy's reader in a process of its own, which a damaged file can only end
_READ_MAT = """
import numpy, pickle, sys, scipy.io
found = scipy.io.loadmat(sys.argv[1]).items()
arrays = {name: x for name, x in found if name[:2] != "__" and type(x) is numpy.ndarray}
plain = {name: x for name, x in arrays.items() if not x.dtype.hasobject}
pickle.dump(plain, sys.stdout.buffer)
"""


_Reader = Callable[[Path], object]


class Source(NamedTuple):
    """A file, and the name of an array or a column in it, if one was given."""

    path: Path
    key: str | None = None

    def __str__(self) -> str:
        return printable(str(self.path) if self.key is None else f"{self.path}:{self.key}")


def printable(text: str) -> str:
    """Return text with "?" for what UTF-8 has not, as in names of files of another system."""
    return text.encode("utf-8", "replace").decode()


def as_source(text: str) -> Source:
    """Return what ``FILE`` or ``FILE:NAME`` stands for.

    A file whose own name has a colon goes first. Without a file in front of the colon, it is a part
    of the path, as behind a drive of Windows.
    """
    before, _, key = text.rpartition(":")
    if key and Path(before).is_file() and not Path(text).exists():
        return Source(Path(before), key)
    return Source(Path(text))


# ----------------------------------------------------------------------------------------- matrices


def read_matrix(path: str | Path, key: str | None = None) -> Tensor:
    """Return the (N, M) floating-point matrix in a file; an ``.npy`` file is memory-mapped, so
    pages load on use.

    Args:
        path: ``.npy``, ``.npz``, ``.pt``/``.pth``/``.pth.tar``, ``.pkl``/``.pickle``,
            ``.csv`` (also with a header, or as pandas writes it), ``.safetensors``, ``.mat`` and
            ``.h5``/``.hdf5`` (with the extra ``files``), or ``.npy`` with a pickled
            dictionary in it. Letters of the suffix may be upper-case.
        key: the entry, if the file has several. By default ``sims``, or the only one.

    Raises:
        ValueError: naming the file and what was expected; also for a column of ids beside scores
            or embeddings, which would be one of them.
        OSError: if it cannot be read.
        ImportError: if a package is missing that reads the format.
    """
    path = Path(path)
    matrix = _tensor(path, _read(path, key, {".csv": _read_csv}))
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(
            f"{path}: expected a matrix with rows and columns, got shape {tuple(matrix.shape)}"
        )
    if not matrix.is_floating_point():
        hint = "save them as floats, such as by astype('float32')"
        raise ValueError(f"{path}: expected floating-point numbers, got {matrix.dtype}; {hint}")
    for column in (0, -1):
        x = matrix[:, column].double()
        is_large = bool(x.abs().max() > 1)  # for cosines
        is_distinct = len(x.unique()) == len(x) > 1
        are_ids = _are_whole(x) and is_large and is_distinct
        if are_ids and not _are_whole(matrix[0].double()):
            got = f"a column of distinct integers such as {x[0]:.0f} and {x[1]:.0f}"
            raise ValueError(f"{path}: expected scores or embeddings, got {got}; leave ids out")
    return matrix


def _are_whole(x: Tensor) -> bool:
    """Return whether all numbers are integers."""
    return bool((x == x.round()).all())


class SavedScores(NamedTuple):
    """Re-ranked scores, as ``itrloss rerank --out`` writes them."""

    i2t: Tensor  #: (n_images, n_texts), to rank the texts of an image
    t2i: Tensor  #: (n_images, n_texts), to rank the images of a text
    transductive: bool  #: whether the result of a query depends on the other test queries


def read_reranked(path: str | Path) -> SavedScores | None:
    """Return the scores that ``itrloss rerank --out`` wrote; None for any other file.

    Args:
        path: an ``.npz`` file with the arrays ``i2t``, ``t2i`` and ``transductive``.

    Raises:
        ValueError, OSError: as :func:`read_matrix`.
    """
    path = Path(path)
    if _suffix(path) != ".npz":
        return None
    with _reading(path), np.load(path) as arrays:
        if not set(arrays) >= _RE_RANKED:
            return None
        is_transductive = bool(arrays["transductive"].any())
    return SavedScores(read_matrix(path, "i2t"), read_matrix(path, "t2i"), is_transductive)


def _tensor(path: Path, x: object) -> Tensor:
    """Return what a file has as a tensor, if it is an array of numbers, dense and on the CPU, that
    holds each of them.
    """
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "fiub":
            raise ValueError(f"{path}: expected numbers, got {x.dtype}")
        return from_numpy(x)
    if not isinstance(x, Tensor):
        raise ValueError(f"{path}: expected an array, got {type(x).__name__}")
    plain = x.layout == torch.strided and not x.is_nested and x.device.type == "cpu"
    if not plain or (x.is_floating_point() and x.element_size() < 2):
        expected = "a dense tensor of 16 bits a number at least"
        raise ValueError(f"{path}: expected {expected}, got {x.dtype} on {x.device}, {x.layout}")
    size = untyped_storage(x).nbytes()
    if size < x.numel() * x.element_size():  # of a few bytes, petabytes
        got = f"{tuple(x.shape)} on {size} bytes"
        raise ValueError(f"{path}: expected a tensor that holds each of its numbers, got {got}")
    return x.detach()


# -------------------------------------------------------------------------- ids, pairs and captions


def read_ids(path: str | Path, key: str | None = None) -> np.ndarray:
    """Return (N,) ids from a file: int64, or strings such as file names.

    A ``.txt`` file has one id a line, a ``.csv`` file a column (``key`` chooses among several by
    their header), a ``.json`` file a list; or it is any format of :func:`read_matrix`. Whole floats
    are integers, as are strings if all of a file are numbers; a single column or row is flattened.

    Raises:
        ValueError, OSError, ImportError: as :func:`read_matrix`; also for floats that are too large
            to tell one integer from the next, such as 2**24 in float32.
    """
    path = Path(path)
    of_text = {".csv": lambda path: {key: _csv_column(path, key)}, ".txt": _words_or_lines}
    content = _read(path, key, of_text)
    if isinstance(content, np.ndarray) and content.dtype.kind == "U":
        return _ids_of_texts(path, content.ravel())
    ids = _tensor(path, content)
    if ids.is_floating_point() and _are_whole(ids.double()):  # as MATLAB and pandas save ids
        limit = int(2 / torch.finfo(ids.dtype).eps)
        if bool((ids.abs() >= limit).any()):
            got = f"larger ones in {ids.dtype}, where neighbours are equal"
            raise ValueError(f"{path}: expected ids below {limit}, got {got}; save them as int64")
        ids = ids.long()
    is_row = ids.numel() == max(ids.shape, default=0)
    if not is_row or ids.dtype == torch.bool or ids.is_floating_point():
        got = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ValueError(f"{path}: expected a row of integers, got {got}")
    return as_int64(str(path), ids.flatten()).numpy()


def _words_or_lines(path: Path) -> np.ndarray:
    """Return the strings in a text file: its words if they are integers, or else its lines."""
    text = path.read_text(encoding=_TEXT).strip()
    words = text.split()
    if all(map(_INTEGER.fullmatch, words)):
        return np.array(words, dtype=str)
    return np.array([line.strip() for line in text.split("\n")])


def _ids_of_texts(path: Path, ids: np.ndarray) -> np.ndarray:
    """Return ids that are texts: as integers if all are."""
    integers = [x for x in ids if _INTEGER.fullmatch(x)]
    missing = [x for x in ids if not x or (integers and x.lower() in _MISSING)]
    if not len(ids):
        raise ValueError(f"{path}: expected ids, got none")
    if missing:  # they would match each other
        among = " among integers" if integers else ""
        raise ValueError(f"{path}: expected an id for each item, got {str(missing[0])!r}{among}")
    if len(integers) < len(ids):
        return ids
    try:
        return np.array([int(x.partition(".")[0]) for x in ids], dtype=np.int64)
    except (OverflowError, ValueError):
        raise ValueError(f"{path}: expected integers of 64 bits, or strings") from None


def read_pairs(path: str | Path, key: str | None = None) -> Tensor:
    """Return (P, 2) or (P, 3) float64 numbers of pairs: the indices of an image and a text, and a
    grade.

    A ``.txt`` file has a pair a line, separated by blanks; a ``.csv`` file may have a header of
    words, as numbers are a pair; or it is any format of :func:`read_matrix`, with an array of this
    shape. An empty ``.txt`` file has no pairs.
    """
    path = Path(path)
    of_text = {".csv": partial(_read_csv, numbered=False), ".txt": _rows_of_words}
    pairs = _tensor(path, _read(path, key, of_text)).double()
    if pairs.ndim != 2 or pairs.shape[1] not in (2, 3):
        expected = "an image and a text a line, and perhaps a grade"
        raise ValueError(f"{path}: expected {expected}, got shape {tuple(pairs.shape)}")
    if not _are_whole(pairs[:, :2]):
        raise ValueError(f"{path}: expected indices of images and texts, got other numbers")
    return pairs


def _rows_of_words(path: Path) -> np.ndarray:
    """Return the numbers in a text file, a row a line; of an empty one, no pairs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an empty file
        rows = np.loadtxt(path, ndmin=2, encoding=_TEXT)
    return rows if rows.size else np.empty((0, 2))


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text file, split at newlines only: other Unicode line separators stay
    in them.
    """
    path = Path(path)
    with _reading(path):
        text = path.read_text(encoding=_TEXT)
    return text.removesuffix("\n").split("\n") if text else []


# ------------------------------------------------------------------------------------------ formats


def _read(path: Path, key: str | None, of_text: Mapping[str, _Reader]) -> object:
    """Return the array named ``key`` in a file, or by default ``sims`` or the only one.

    ``of_text`` has the readers of formats by suffix in which matrices, ids and pairs differ.
    """
    path.stat()  # of a file that is missing, the suffix does not matter
    suffix = _suffix(path)
    readers = {**_READERS, **of_text}
    if suffix not in readers:
        names = ", ".join("*" + s for s in (*_READERS, ".csv"))
        raise ValueError(f"{path}: expected a file named {names}; *.txt has ids or pairs")
    if path.is_file() and path.stat().st_size == 0 and suffix != ".txt":
        raise ValueError(f"{path}: the file is empty")
    with _reading(path):
        content = _plain(readers[suffix](path))
        if isinstance(content, Mapping):
            content = content[_array_name(path, content, key)]
        elif key is not None:
            expected = "expected no name, as the file has one array"
            raise ValueError(f"{path}: {expected}, got {key!r}")
        return _plain(content)


def _suffix(path: Path) -> str:
    """Return the suffix that tells the format of a file, in lower case."""
    if path.name.lower().endswith(".pth.tar"):
        return ".pth.tar"
    return path.suffix.lower()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Return a context whose errors name the file."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{path}: {error}: install itrloss with the extra 'files'") from None
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:
        if str(error).startswith(f"{path}: "):  # it names the file already
            raise
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path}: not a readable {_suffix(path)} file: {text}") from None


def _array_name(path: Path, content: Mapping[str, Any], key: str | None) -> str:
    """Return the name of the array that is read: ``key`` or, if it is None, ``sims`` or the only
    one.
    """
    names = list(content)
    if key is None:
        key = names[0] if len(names) == 1 else "sims"
    if key in names:
        return key
    hint = f"for one of several, write {path}:NAME"
    if set(names) >= _RE_RANKED:
        hint = "itrloss compare takes such re-ranked scores of both directions"
    got = ", ".join(map(str, names)) or "none"
    raise ValueError(f"{path}: expected an array of the name {key!r}; it has {got}; {hint}")


def _plain(x: Any) -> Any:
    """Return what is in a file, as an array if it is one or a list; bytes are strings."""
    if hasattr(x, "asstr"):  # a data set of HDF5
        x = _read_data_set(x)
    if isinstance(x, np.ndarray) and x.dtype.hasobject:
        x = x.tolist()
    if not isinstance(x, (list, np.ndarray)):
        return x
    array = np.asarray(x)
    return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array


def _read_npy(path: Path) -> object:
    """Return the array of a .npy file, mapped into memory, or the object that was pickled in it."""
    form = np.lib.format
    with open(path, "rb") as file:
        is_short = form.read_magic(file) == (1, 0)
        read = form.read_array_header_1_0 if is_short else form.read_array_header_2_0
        _, _, dtype = read(file)
        if dtype.hasobject:  # np.save of a dictionary
            return _Unpickler(file).load()
    # raises an error if the file is shorter than its header says
    return np.load(path, mmap_mode="c")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, which are mapped into memory."""
    from safetensors.torch import load_file

    return load_file(path)


def _read_mat(path: Path) -> Mapping[str, Any]:
    """Return the arrays of a MATLAB file; those of version 7.3 are HDF5, and transposed."""
    import h5py
    import scipy.io  # noqa: F401

    if h5py.is_hdf5(path):
        return {name: x[()].T for name, x in _read_hdf5(path).items()}
    done = subprocess.run([sys.executable, "-c", _READ_MAT, path], capture_output=True)
    if done.returncode:
        *_, reason = done.stderr.decode(errors="replace").splitlines() or ["damaged"]
        raise ValueError(reason)
    return _Unpickler(io.BytesIO(done.stdout)).load()


def _read_hdf5(path: Path) -> dict[str, Any]:
    """Return the data sets of a file by their paths in it, each of which is read when chosen."""
    import h5py

    file = h5py.File(path, "r")  # closed with the last of its data sets
    names: list[str] = []
    file.visit(names.append)
    return {name: file[name] for name in names if isinstance(file[name], h5py.Dataset)}


def _read_data_set(x: Any) -> object:
    """Return the numbers or the strings of a data set of HDF5, if none is marked as missing."""
    if x.dtype.kind == "O":
        return np.array(x.asstr()[()].tolist())
    values = x[()]
    missing = x.attrs.get("_FillValue")  # as of netCDF
    if missing is not None and np.isin(values, missing).any():
        raise ValueError(f"expected a value in each place, got missing ones: {missing}")
    return values


def _read_csv(path: Path, numbered: bool = True) -> np.ndarray:
    """Return the matrix in a file of separated values; ``numbered`` as in :func:`_is_header`."""
    head, read = _separated(path)
    # pandas writes the number of a row in front, without a name
    return read(skiprows=int(_is_header(head, numbered)))[:, int(head[0] == "") :]


def _csv_column(path: Path, key: str | None) -> np.ndarray:
    """Return the strings of the column ``key`` of a file of separated values, or of its only one.

    Of a column of strings, the first line is a header if ``key`` is its name, or the rest are
    numbers.
    """
    head, read = _separated(path)
    names = ", ".join(head)[:_SHOWN]
    columns = range(int(head[0] == ""), len(head))
    if key in head:
        columns = [head.index(key)]
    elif key is not None:
        raise ValueError(f"{path}: expected a column of the name {key!r}; it has {names}")
    ids = np.char.strip(read(dtype=str, usecols=columns))
    if 1 not in ids.shape:
        hint = f"for one of them, write {path}:{head[0][:_SHOWN]}"
        raise ValueError(f"{path}: expected one column; it has {names}; {hint}")
    ids = ids.ravel()
    are_integers = all(map(_INTEGER.fullmatch, ids[1:]))
    if key is not None or (_is_header(head, numbered=False) and are_integers):
        return ids[1:]
    return ids


def _separated(path: Path) -> tuple[list[str], Callable[..., np.ndarray]]:
    """Return the cells of the first line of a file of separated values, and its reader."""
    with open(path, encoding=_TEXT) as file:
        first = file.readline()
    if not first.strip():
        raise ValueError(f"{path}: the file is empty")
    separator = next((x for x in "\t;" if x in first), ",")
    form = {"delimiter": separator, "quotechar": '"', "comments": None}
    read = partial(np.loadtxt, path, **form, encoding=_TEXT, ndmin=2)
    cells = np.char.strip(read(dtype=str, max_rows=1)).ravel()
    return cells.tolist(), read


def _is_header(head: list[str], numbered: bool) -> bool:
    """Return whether a first line is a header: other cells than numbers, or, if ``numbered``, 0, 1,
    2 and so on, as pandas writes it above a matrix; ids and pairs may begin with these.
    """
    try:
        numbers = np.array(head, dtype=float)
    except ValueError:
        return True
    return numbered and len(head) > 1 and np.array_equal(numbers, np.arange(len(head)))


def _read_torch(path: Path) -> object:
    """Return the tensors, and containers of them, of a file of ``torch.save``."""
    try:
        with warnings.catch_warnings():
            # PyTorch 2.15 says that it checks sparse tensors, which are refused later.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):  # torch's message would advise to trust the file
        raise ValueError("damaged, or more in it than tensors and containers of them") from None


def _read_pickle(path: Path) -> object:
    """Return the object in a pickle."""
    with open(path, "rb") as file:
        return _Unpickler(file).load()


_READERS: dict[str, _Reader] = {
    ".npy": _read_npy,
    ".npz": np.load,  # which refuses Python objects
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".pth.tar": _read_torch,
    ".pkl": _read_pickle,
    ".pickle": _read_pickle,
    ".safetensors": _read_safetensors,
    ".mat": _read_mat,
    ".h5": _read_hdf5,
    ".hdf5": _read_hdf5,
    ".json": lambda path: json.loads(path.read_text(encoding=_TEXT)),
}


# ------------------------------------------------------------------------------------------ pickles


class _Type:
    """Stands in for ``numpy.dtype``: a pickle could set a real one's flags so that bytes are read
    as addresses.
    """

    def __init__(self, name: str, *_: object):
        self.name = name

    def __setstate__(self, state: tuple[int, str]) -> None:
        self.name = "".join([state[1], self.name])  # with the order of bytes, if it is a string

    def real(self) -> np.dtype:
        """Return the type that it stands for: of numbers, strings or objects."""
        dtype = np.dtype(self.name)
        if dtype.kind not in "fiubSUO":
            raise ValueError(f"expected numbers, got an array of {dtype}, which is not read")
        return dtype


class _Array(np.ndarray):
    """An array whose type and shape are checked before NumPy makes it of pickled data."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *_, shape, kind, fortran, data = state
        if min(shape, default=0) < 0:
            raise ValueError(f"expected a shape, got {shape}")
        super().__setstate__((1, shape, kind.real(), fortran, data))


def _from_buffer(data: Any, kind: _Type, shape: tuple[int, ...] = (), order: Any = "C") -> Any:
    """Return an array of pickled bytes, or one number as such."""
    data = data.encode(_ENCODING) if isinstance(data, str) else data
    return np.frombuffer(data, kind.real()).reshape(shape, order=order)[()]


def _strided(storage: torch.TypedStorage, offset: int, *shape_and_stride: Any) -> Tensor:
    """Return a pickled tensor; raise a RuntimeError if it is larger than its storage."""
    shape, stride, *_ = shape_and_stride
    whole = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage)
    return whole.as_strided(shape, stride, offset)


# The names that pickled arrays and tensors refer to, and their replacements here.
_REPLACED: dict[str, object] = {
    "numpy.core.multiarray._reconstruct": lambda *_: _Array(0),
    "numpy.core.multiarray.scalar": lambda kind, data: _from_buffer(data, kind),
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy.ndarray": "ndarray",
    "numpy.dtype": _Type,
    "collections.OrderedDict": dict,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_tensor_v2": _strided,
    "torch.storage._load_from_bytes": lambda data: torch.load(io.BytesIO(data), weights_only=True),
    "_codecs.encode": lambda text, _: text.encode(_ENCODING),
}


class _Unpickler(pickle.Unpickler):
    """Knows nothing but numbers, strings, containers, and the replacements."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file, encoding=_ENCODING)  # as written by Python 2, too

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name; raise a ValueError for one that is not read."""
        # as it was called before NumPy 2
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in _REPLACED:
            raise ValueError(f"it asks for {full}, which is not read")
        return _REPLACED[full]


# ---------------------------------------------------------------------------------------- to write


@contextlib.contextmanager
def written(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Return a context with a temporary file to write, which replaces ``path`` when complete, or is
    removed on error.

    The permissions of a file that is replaced stay, and one that is read-only is refused. The
    target of a symbolic link is replaced, not the link.

    Raises:
        OSError: before the body runs, if the file cannot be written.
    """
    path = Path(os.path.realpath(path))
    check_writable(path)
    encoding = None if "b" in mode else "utf-8"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, mode, encoding=encoding) as file:
            if path.exists():
                shutil.copymode(path, temporary)
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise an error for what is no file, a file that is read-only, or a place where none can be
    made.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file to write, got a folder, a device or a pipe")
    if path.exists() and not path.stat().st_mode & stat.S_IWUSR:
        raise PermissionError(f"{path}: it is read-only")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"{path.parent}: no file can be made there: {error.strerror}") from None
