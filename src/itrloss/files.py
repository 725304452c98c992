"""Reading score matrices, embeddings and ids from files as people have them; safe writing.

Nothing in a file is ever executed. From pickles, such as VSE code bases save, only arrays, tensors,
numbers, strings and containers of them are read; ``.pt`` files are read with ``weights_only=True``.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import importlib
import io
import json
import os
import pickle
import re
import secrets
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .checks import as_id_numbers, as_int64, from_numpy

TEXTS = (".txt", ".csv")  # whose ids are lines
_LONGEST_HEADER = 2**16
_ENCODING = "latin1"  # of bytes in old pickle protocols
_MISSING = ("", "nan", "na", "n/a", "<na>", "none", "null")
_RE_RANKED = {"i2t", "t2i", "transductive"}  # what itrloss rerank --out writes
_INTEGER = re.compile(r"[+-]?[0-9]+(\.0*)?")


def _as_path(path: str | Path) -> Path:
    """Return a path; raise a TypeError for what names no file."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected the name of a file, got {type(path).__name__}")
    return Path(path)


class Source(NamedTuple):
    """A file, and the name of an array or a column in it, if one was given."""

    path: Path
    key: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.key is None else f"{self.path}:{self.key}"


def as_source(text: str) -> Source:
    """Return what ``FILE`` or ``FILE:NAME`` stands for.

    A file whose own name has a colon goes first. Without a file in front of the colon, it is a part
    of the path, as behind a drive of Windows.
    """
    before, _, key = text.rpartition(":")
    if key and Path(before).is_file() and not Path(text).exists():
        return Source(Path(before), key)
    return Source(Path(text))


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
        ValueError: naming the file and what was expected.
        OSError: if it cannot be read.
        ImportError: if a package is missing that reads the format.
    """
    path = _as_path(path)
    content = _csv_matrix(path, key) if _suffix(path) == ".csv" else _read(path, key)
    array = _tensor(path, content)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{path}: expected a matrix with rows and columns, got shape {tuple(array.shape)}"
        )
    if not array.is_floating_point():
        hint = "save them as floats, such as by astype('float32')"
        raise ValueError(f"{path}: expected floating-point numbers, got {array.dtype}; {hint}")
    return array


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
    path = _as_path(path)
    if _suffix(path) != ".npz":
        return None
    with _reading(path):
        names = _read_npz(path).keys()
    if not names >= _RE_RANKED:
        return None
    flags = _tensor(path, _read(path, "transductive"))
    return SavedScores(read_matrix(path, "i2t"), read_matrix(path, "t2i"), bool(flags.any()))


def read_ids(path: str | Path, key: str | None = None) -> Tensor:
    """Return (N,) int64 ids from a file of integers, or of strings such as file names.

    A ``.txt`` file has one id a line, a ``.csv`` file a column (``key`` chooses among several by
    their header), a ``.json`` file a list; or it is any format of :func:`read_matrix`. Equal
    strings get equal numbers in all files. Whole floats are integers, a single column or row is
    flattened.
    """
    path = _as_path(path)
    if _suffix(path) in TEXTS:
        return _ids_of_texts(path, _text_ids(path, key))
    content = _saved_ids(path, key)
    if _holds_strings(content):
        ids = _numbers_of_names(path, content)
    else:
        ids = _whole(_tensor(path, content))
    is_row = ids.ndim == 1 or (ids.ndim == 2 and 1 in ids.shape)
    is_other = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if is_other or not is_row:
        got = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ValueError(f"{path}: expected a row of integers, got {got}")
    return as_int64(str(path), ids.flatten())


def first_id(path: Path, key: str | None = None) -> str:
    """Return the first id in a file of :func:`read_ids` as it stands there, for a message."""
    return str(np.asarray(_saved_ids(path, key)).ravel()[0])


def _saved_ids(path: Path, key: str | None) -> object:
    """Return the ids in a file as they are: strings in files of text, and arrays or lists."""
    if _suffix(path) in TEXTS:
        return _text_ids(path, key)
    content = _read(path, key)
    if isinstance(content, np.ndarray) and content.dtype.kind == "S":
        with _reading(path):
            content = np.char.decode(content, "utf-8")
    return content


def read_pairs(path: str | Path, key: str | None = None) -> Tensor:
    """Return (P, 2) or (P, 3) float64 numbers of pairs: the indices of an image and a text, and a
    grade.

    A ``.txt`` file has a pair a line, separated by blanks; a ``.csv`` file may have a header; or it
    is any format of :func:`read_matrix`, with an array of this shape. An empty ``.txt`` file has
    no pairs.
    """
    path = _as_path(path)
    suffix = _suffix(path)
    if suffix in TEXTS:
        _check_unnamed(path, key)
        if suffix == ".csv":
            _, rows = _table(path)
        else:
            rows = [line.split() for line in _text(path).splitlines() if line.strip()]
        if not rows:
            return torch.empty(0, 2, dtype=torch.float64, device="cpu")
        pairs = torch.from_numpy(_numbers(path, rows))
    else:
        pairs = _tensor(path, _read(path, key)).double()
    if pairs.ndim != 2 or pairs.shape[1] not in (2, 3):
        expected = "an image and a text a line, and perhaps a grade"
        raise ValueError(f"{path}: expected {expected}, got shape {tuple(pairs.shape)}")
    if not bool((pairs[:, :2] == pairs[:, :2].long()).all()):
        raise ValueError(f"{path}: expected indices of images and texts, got other numbers")
    return pairs


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text file, split at newlines only: other Unicode line separators stay
    in them.

    A file with a byte order mark, as Excel and Notepad write it, is read in the encoding that the
    mark says, and any other as UTF-8.
    """
    text = _text(_as_path(path))
    return text.removesuffix("\n").split("\n") if text else []


def _text(path: Path) -> str:
    """Return the text of a file, without a byte order mark."""
    with open(path, "rb") as file:
        start = file.read(2)
    has_wide_mark = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if has_wide_mark else "utf-8-sig"
    try:
        return path.read_text(encoding=encoding)
    except UnicodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from None


def _text_ids(path: Path, key: str | None) -> list[str]:
    """Return the ids in a text file: a column of a .csv file, and otherwise one a line, or integers
    that blanks separate.
    """
    if _suffix(path) == ".csv":
        return _csv_column(path, key)
    _check_unnamed(path, key)
    text = _text(path)
    words = text.split()
    if not words:
        raise ValueError(f"{path}: the file is empty")
    if all(_is_integer(word) for word in words):
        return words
    return [line.strip() for line in text.strip().split("\n")]


def _is_integer(text: str) -> bool:
    """Return whether a text is an integer, or a whole float, as pandas writes integers of a column
    with gaps: 3.0.
    """
    return _INTEGER.fullmatch(text) is not None


def _is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _ids_of_texts(path: Path, ids: list[str]) -> Tensor:
    """Return ids in a text as integers, if all are, and as numbers of strings otherwise."""
    others = [x for x in ids if not _is_integer(x)]
    below = [x for x in ids[1:] if not _is_integer(x)]  # the first may be a header
    # numbers that are missing, as pandas and spreadsheets write them: they would match each other
    if below and len(others) < len(ids) and all(x.lower() in _MISSING for x in below):
        raise ValueError(f"{path}: expected an id for each item, got {below[0]!r} among integers")
    if others:
        return _numbers_of_names(path, ids)
    try:
        numbers = [int(x.partition(".")[0]) for x in ids]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    except (OverflowError, RuntimeError, ValueError):
        raise ValueError(f"{path}: expected integers of 64 bits, or strings") from None


def _numbers_of_names(path: Path, names: object) -> Tensor:
    """Return the numbers of strings; raise a ValueError for empty ones, which are missing: they
    would match each other.
    """
    places = (np.asarray(names).ravel() == "").nonzero()[0]
    if len(places):
        raise ValueError(f"{path}: expected an id for each item, got none for item {places[0]}")
    return as_id_numbers(str(path), names)


def _holds_strings(content: object) -> bool:
    """Return whether an entry of a file is an array or a list of strings."""
    if isinstance(content, np.ndarray):
        return content.dtype.kind == "U"
    return isinstance(content, list) and all(isinstance(x, str) for x in content)


def _whole(x: Tensor) -> Tensor:
    """Return whole floating-point numbers, as MATLAB and pandas save ids, as integers."""
    if x.is_floating_point() and bool((x == x.long()).all()):
        return x.long()
    return x


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


def _suffix(path: Path) -> str:
    """Return the suffix that tells the format of a file, in lower case."""
    if path.name.lower().endswith(".pth.tar"):
        return ".pth.tar"
    return path.suffix.lower()


def _read(path: Path, key: str | None) -> object:
    """Return the array named ``key`` in a file, or by default ``sims`` or the only one."""
    path.stat()  # of a file that is missing, the suffix does not matter
    suffix = _suffix(path)
    if suffix not in _READERS:
        names = ", ".join("*" + s for s in [*_READERS, ".csv"])
        raise ValueError(f"{path}: expected a file named {names}; *.txt has ids or pairs")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    with _reading(path):
        content = _READERS[suffix](path)
    count = None
    if isinstance(content, dict):
        key = _array_name(path, content, key)
        count = content.get("npts")
        content = content[key]
    else:
        _check_unnamed(path, key)
    with _reading(path):
        content = _loaded(content)
        count = _loaded(count)
    if isinstance(count, (int, np.integer)):
        shape = getattr(content, "shape", ())
        if len(shape) == 2 and count not in shape:
            raise ValueError(f"{path}: says npts = {count}, but {key} has shape {tuple(shape)}")
    return content


def _check_unnamed(path: Path, key: str | None) -> None:
    """Raise a ValueError for the name of an array in a file that has one without a name."""
    if key is not None:
        raise ValueError(f"{path}: expected no name, as the file has one array, got {key!r}")


def _array_name(path: Path, content: Mapping[str, object], key: str | None) -> str:
    """Return the name of the array that is read: ``key`` or, if it is None, ``sims`` or the only
    one.
    """
    names = []
    for name, value in content.items():
        is_array = isinstance(value, (np.ndarray, Tensor, _Later, _Pickled)) and value.ndim > 0
        if is_array or isinstance(value, list):
            names.append(name)
    if key is not None and key in names:
        return key
    if not names:
        expected = "a list" if _suffix(path) == ".json" else "an array"
        raise ValueError(f"{path}: expected {expected}, or one with a name; it has none")
    got = ", ".join(map(str, names))
    if key is not None:
        raise ValueError(f"{path}: expected an array of the name {key!r}; it has {got}")
    if "sims" in names:
        return "sims"
    if len(names) == 1:
        return names[0]
    hint = f"for one of several, write {path}:{names[0]}"
    if set(names) >= _RE_RANKED:
        hint = "itrloss compare takes such re-ranked scores of both directions"
    raise ValueError(f"{path}: expected one array, or one of the name sims; it has {got}; {hint}")


def _loaded(x: object) -> object:
    """Return an entry of a file; an array of which only the header was read is read now."""
    return x.load() if isinstance(x, (_Later, _Pickled)) else x


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let errors name the file."""
    try:
        yield
    except (FileNotFoundError, ImportError, IsADirectoryError, PermissionError):
        raise
    except MemoryError:
        raise ValueError(f"{path}: speaks of more data than there is memory; damaged?") from None
    except Exception as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path}: not a readable {_suffix(path)} file: {text}") from None


def _read_npy(path: Path) -> object:
    """Return the array of a .npy file, mapped into memory, or the object that was pickled in it."""
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


class _Later(NamedTuple):
    """An array in a file that is read when it is chosen: others may be larger than memory."""

    ndim: int
    load: Callable[[], object]


def _read_npz(path: Path) -> dict[str, _Later]:
    """Return the arrays of a .npz file by name."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            with archive.open(entry) as file:
                name = entry.removesuffix(".npy")
                arrays[name] = _Later(len(_header(file)[0]), partial(_from_npz, path, name))
    return arrays


def _from_npz(path: Path, name: str) -> object:
    """Return an array of an archive, or one number as such."""
    with np.load(path) as arrays:  # refuses Python objects
        return arrays[name][()]


def _read_safetensors(path: Path) -> dict[str, _Later]:
    """Return the tensors of a safetensors file by name."""
    arrays = {}
    with _package(path, "safetensors").safe_open(path, framework="pt") as file:
        for name in list(file.keys()):
            dims = len(file.get_slice(name).get_shape())
            arrays[name] = _Later(dims, partial(_from_safetensors, path, name))
    return arrays


def _from_safetensors(path: Path, name: str) -> Tensor:
    """Return a tensor of a safetensors file."""
    with _package(path, "safetensors").safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _package(path: Path, name: str) -> ModuleType:
    """Return a package that reads a file; raise an ImportError that names the extra with it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ImportError(
            f"{path}: needs {package}: install itrloss with the extra 'files'"
        ) from None


def _read_mat(path: Path) -> Mapping[str, object]:
    """Return the arrays of a MATLAB file; those of version 7.3 are HDF5."""
    if _is_hdf5(path):
        return _read_hdf5(path, transposed=True)
    arrays = _package(path, "scipy.io").loadmat(path)
    return {name: x for name, x in arrays.items() if not name.startswith("__")}


def _is_hdf5(path: Path) -> bool:
    """Return whether an HDF5 file starts at byte 0, or at 512, behind MATLAB's own header."""
    with open(path, "rb") as file:
        start = file.read(520)
    return start[:8] == _HDF5 or start[512:] == _HDF5


_HDF5 = b"\x89HDF\r\n\x1a\n"


def _read_hdf5(path: Path, transposed: bool = False) -> dict[str, _Later]:
    """Return the data sets of a file by their paths in it; MATLAB's are transposed."""
    h5py = _package(path, "h5py")
    arrays: dict[str, _Later] = {}

    def add(name: str, entry: Any) -> None:
        """Note a data set, which is loaded when it is used."""
        if isinstance(entry, h5py.Dataset):
            load = partial(_from_hdf5, path, name, transposed)
            arrays[name] = _Later(len(entry.shape), load)

    with h5py.File(path, "r") as file:
        file.visititems(add)
    return arrays


def _from_hdf5(path: Path, name: str, transposed: bool) -> object:
    """Return a data set of a file, or one number as such."""
    h5py = _package(path, "h5py")
    with h5py.File(path, "r") as file:
        entry = file[name]
        if h5py.check_string_dtype(entry.dtype):
            return list(entry.asstr()[()].flat)
        array = entry[()]
    return array.T if transposed else array


def _table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header of a file of separated values, which may be empty, and its rows.

    As pandas writes them, the first column is a number of the row if its header is empty, and the
    header of a matrix is 0, 1, 2 and so on.
    """
    text = _text(path)
    first, _, _ = text.partition("\n")
    separator = next((x for x in "\t;," if x in first), ",")
    rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if row]
    if not rows:
        raise ValueError(f"{path}: the file is empty")
    head = [x.strip() for x in rows[0]]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path}: expected rows of one length")
    counted = len(head) > 1 and head == [str(i) for i in range(len(head))]
    if all(_is_number(x) for x in head) and not counted:
        return [], rows
    if not head[0]:
        return head[1:], [row[1:] for row in rows[1:]]
    return head, rows[1:]


def _csv_matrix(path: Path, key: str | None) -> np.ndarray:
    """Return the matrix in a file of separated values."""
    _check_unnamed(path, key)
    _, rows = _table(path)
    return _numbers(path, rows)


def _numbers(path: Path, rows: list[list[str]]) -> np.ndarray:
    """Return the numbers in the rows of a text."""
    with _reading(path):
        return np.array([[float(x) for x in row] for row in rows])


def _csv_column(path: Path, key: str | None) -> list[str]:
    """Return the column ``key`` of a file of separated values, or its only one.

    A first line of a column of strings is a header if ``key`` is its name, or the rest are numbers.
    """
    head, rows = _table(path)
    if key is not None:
        if key not in head:
            got = ", ".join(head) or "no header"
            raise ValueError(f"{path}: expected a column of the name {key!r}; it has {got}")
        return [row[head.index(key)].strip() for row in rows]
    width = len(head) if head else len(rows[0])
    if width != 1 and len(rows) == 1 and not head:
        return [x.strip() for x in rows[0]]
    if width != 1:
        got = f"{width} without names; give them a header"
        if head:
            got = f"{', '.join(head)}; for one of them, write {path}:{head[0]}"
        raise ValueError(f"{path}: expected one column; it has {got}")
    column = [row[0].strip() for row in rows]
    if head and not all(_is_integer(x) for x in column):
        return head + column
    return column


def _read_json(path: Path) -> object:
    return json.loads(_text(path))


def _read_torch(path: Path) -> object:
    try:
        with warnings.catch_warnings():
            # PyTorch 2.15 says that it checks sparse tensors, which are refused later.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):  # torch's message would advise to trust the file
        raise ValueError("damaged, or more in it than tensors and containers of them") from None


def _read_pickle(path: Path) -> object:
    with open(path, "rb") as file:
        return _unpickled(file)


class _Type:
    """Stands in for ``numpy.dtype``: a pickle could set a real one's flags so that bytes are read
    as addresses.
    """

    def __init__(self, name: str, *_: object):
        self.parts: tuple[str, ...] = (name,)

    def __setstate__(self, state: tuple[int, str]) -> None:
        self.parts = state[1], *self.parts  # with the order of bytes


class _Pickled:
    """An array in a pickle, which is made when it is chosen, and only of numbers."""

    def __init__(
        self,
        data: bytes | str | list[object] = b"",
        kind: _Type | None = None,
        shape: tuple[int, ...] = (),
        order: Literal["C", "F"] = "C",
        *_: object,
    ):
        self.data = data
        self.kind = kind
        self.shape = shape
        self.order = order
        self.ndim = len(shape)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Type, bool, bytes]) -> None:
        shape, kind, fortran, data = state[-4:]
        _Pickled.__init__(self, data, kind, shape, "F" if fortran else "C")

    def load(self) -> object:
        """Return the array, or one number as such."""
        assert self.kind is not None
        # refuses all but strings; str() of lists in lists may take for ever
        dtype = np.dtype("".join(self.kind.parts))
        listed = dtype.kind == "O" and isinstance(self.data, list)
        if listed and (_holds_strings(self.data) or all(isinstance(x, int) for x in self.data)):
            return self.data
        if dtype.kind not in "fiubSU":
            raise ValueError(f"expected numbers, got an array of {dtype}, which is not read")
        assert not isinstance(self.data, list)
        data = self.data.encode(_ENCODING) if isinstance(self.data, str) else self.data
        return np.frombuffer(data, dtype).copy().reshape(self.shape, order=self.order)[()]


def _stored(data: bytes) -> object:
    """Return the storage of a pickled tensor."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _strided(
    storage: torch.TypedStorage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *_: object,
) -> Tensor:
    """Return a pickled tensor; raise a RuntimeError if it is larger than its storage."""
    whole = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage)
    return whole.as_strided(shape, stride, offset)


# The names that pickled arrays and tensors refer to, and their replacements here.
_REPLACED: dict[str, object] = {
    "numpy.core.multiarray._reconstruct": lambda *_: _Pickled(),
    "numpy.core.multiarray.scalar": lambda kind, data: _Pickled(data, kind),
    "numpy.core.numeric._frombuffer": _Pickled,
    "numpy.ndarray": "ndarray",
    "numpy.dtype": _Type,
    "collections.OrderedDict": dict,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_tensor_v2": _strided,
    "torch.storage._load_from_bytes": _stored,
    "_codecs.encode": lambda text, _: text.encode(_ENCODING),
}


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Python's own, not the one in C, which allocates gigabytes for a memo's index that 20 bytes
    can name.
    """

    def find_class(self, module: str, name: str) -> object:
        """Return the replacement of a name; raise a ValueError for one that is not read."""
        # as it was called before NumPy 2
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in _REPLACED:
            raise ValueError(f"it asks for {full}, which is not read")
        return _REPLACED[full]


def _unpickled(file: IO[bytes]) -> object:
    """Return what was pickled; of a list with one entry, the entry."""
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


def _tensor(path: Path, array: object) -> Tensor:
    """Return what a file has as a tensor, if it is an array of numbers."""
    if isinstance(array, Tensor):
        return _checked_tensor(path, array)
    if isinstance(array, list):
        with _reading(path):
            array = np.array(array)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: expected an array, got {type(array).__name__}")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{path}: expected numbers, got {array.dtype}")
    return from_numpy(array)


_READERS: dict[str, Callable[[Path], object]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".pth.tar": _read_torch,
    ".pkl": _read_pickle,
    ".pickle": _read_pickle,
    ".safetensors": _read_safetensors,
    ".mat": _read_mat,
    ".h5": _read_hdf5,
    ".hdf5": _read_hdf5,
    ".json": _read_json,
}
