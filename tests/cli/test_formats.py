"""Matrices, ids and names are read from files of every format."""

from __future__ import annotations

import codecs
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from scipy.io import savemat
from scipy.sparse import csr_matrix
from support.versions import default_device

from itrloss import Similarity
from itrloss.files import Source, as_source, read_ids, read_lines, read_matrix, read_pairs


def save(folder: Path, name: str, content: Any) -> Path:
    """Write content as a file of a name, whose words choose among a format's variants."""
    path = folder / name
    if isinstance(content, str):
        path.write_text(content, "utf-8")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        suffix = ".h5" if "v7.3" in name else path.suffix.lower()
        WRITERS.get(suffix, save_torch)(path, content, name.lower())
    return path


def save_npy(path: Path, content: Any, words: str) -> None:
    with path.open("wb") as file:  # by a name in upper case, NumPy would add a suffix
        np.save(file, content)


def save_npz(path: Path, content: Any, words: str) -> None:
    (np.savez_compressed if "small" in words else np.savez)(path, **content)


def save_pickle(path: Path, content: Any, words: str) -> None:
    path.write_bytes(pickle.dumps(content, 2 if "old" in words else None))


def save_json(path: Path, content: Any, words: str) -> None:
    path.write_text(json.dumps(content, default=np.ndarray.tolist))


def save_csv(path: Path, content: Any, words: str) -> None:
    separator = {"semicolons": ";", "tabs": "\t"}.get(words.split(".")[0], ",")
    options = {"index": "pandas" in words, "header": "header" in words or "pandas" in words}
    path.write_text(pd.DataFrame(content).to_csv(None, sep=separator, **options), "utf-8-sig")


def save_hdf5(path: Path, content: Any, words: str) -> None:
    options = {"compression": "gzip", "chunks": True} if "small" in words else {}
    # MATLAB writes its version in front
    with h5py.File(path, "w", userblock_size=512 if "mat" in words else 0) as file:
        for key, array in content.items():
            file.create_dataset(key, data=array, **options)


def save_mat(path: Path, content: Any, words: str) -> None:
    with path.open("wb") as file:
        savemat(file, content, format="4" if "v4" in words else "5", do_compression=True)


def save_safetensors(path: Path, content: Any, words: str) -> None:
    save_file({key: x.contiguous() for key, x in content.items()}, path)


def save_torch(path: Path, content: Any, words: str) -> None:
    torch.save(content, path, _use_new_zipfile_serialization="old" not in words)


WRITERS = {
    ".npy": save_npy,
    ".npz": save_npz,
    ".pkl": save_pickle,
    ".pickle": save_pickle,
    ".json": save_json,
    ".csv": save_csv,
    ".h5": save_hdf5,
    ".hdf5": save_hdf5,
    ".mat": save_mat,
    ".safetensors": save_safetensors,
}


# --- every dtype and layout -----------------------------------------------------------------------

EXACT = (np.arange(35).reshape(5, 7) - 17) / 8  # which every dtype holds
LAYOUTS = ("C", "Fortran", "transposed", "strided", "big-endian", "read-only")
WITHOUT_LAYOUT = (".csv", ".json", "v4.mat", "v5.MAT", ".SafeTensors")  # whose writers drop it


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """The same numbers, held in another way."""
    if layout == "Fortran":
        return np.asfortranarray(x)
    if layout == "transposed":
        return np.ascontiguousarray(x.T).T
    if layout == "strided":
        wide = np.zeros((x.shape[0], 2 * x.shape[1]), x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    if layout == "big-endian":
        return x.astype(x.dtype.newbyteorder(">"))
    x = x.copy()
    x.flags.writeable = layout != "read-only"
    return x


def alone(x: Any) -> Any:
    return x


def named(x: Any) -> dict[str, Any]:
    return {"sims": x}


def as_floats(x: np.ndarray) -> np.ndarray:
    return x.astype(float)


# what a file has of an array or, below, of a tensor
OF_ARRAYS = {
    "s.npy": alone,
    "S.NPY": alone,
    "pickled.npy": lambda x: np.array({"sims": x}, dtype=object),
    "s.npz": named,
    "small.npz": named,
    "s.pkl": named,
    "old.pickle": alone,
    "s.csv": as_floats,
    "header.csv": lambda x: pd.DataFrame(x.astype(float)).add_prefix("text "),
    "s.json": as_floats,
    "s.h5": named,
    "small.hdf5": named,
    "v4.mat": named,
    "v5.MAT": named,
    "v7.3.mat": lambda x: {"sims": x.T},  # MATLAB's are transposed
}
OF_TENSORS = {
    "s.pt": alone,
    "S.PTH": named,
    "OLD.PTH.TAR": alone,
    "s.pth.tar": lambda x: {"sims": x, "epoch": 3},
    "pickled.pkl": alone,
    "s.SafeTensors": named,
}
# what a format has not, or PyTorch has hardly any operator for
MISSING = {name: {torch.bfloat16} for name in OF_ARRAYS}
MISSING |= {name: {"uint16"} for name in OF_TENSORS}
MISSING["v4.mat"] |= {torch.float16, "int8", "int64"}
MISSING["v5.MAT"] |= {torch.float16}
FLOATS = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
INTEGERS = ("int8", "int32", "int64", "uint8", "uint16")


def cases(dtypes: tuple) -> list[tuple]:
    """Return each file with the types that it can have."""
    return [(name, dtype) for name in MISSING for dtype in dtypes if dtype not in MISSING[name]]


def laid_out_cases() -> list[tuple]:
    """Return each file of a matrix with the types and the layouts that it can have."""
    found = []
    for name, dtype in cases(FLOATS):
        layouts = LAYOUTS[:1] if name.endswith(WITHOUT_LAYOUT) else LAYOUTS
        found += [(name, dtype, layout) for layout in layouts]
    return found


def array_of(numbers: np.ndarray, dtype: torch.dtype | str) -> np.ndarray:
    return numbers.astype(str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(("name", "dtype", "layout"), laid_out_cases())
def test_matrices_have_any_dtype_and_layout(name, dtype, layout, tmp_path: Path):
    if name in OF_TENSORS:
        held = laid_out(EXACT.astype("float32"), layout.replace("big-endian", "C"))
        x = torch.from_numpy(held.copy(order="K")).to(dtype)  # which keeps the strides
        path = save(tmp_path, name, OF_TENSORS[name](x))
    else:
        x = laid_out(array_of(EXACT, dtype), layout)
        path = save(tmp_path, name, OF_ARRAYS[name](x))
    found = read_matrix(path)
    assert found.tolist() == EXACT.tolist()
    assert found.dtype == (torch.float64 if name.endswith((".csv", ".json")) else dtype)


@pytest.mark.parametrize(("name", "dtype"), cases(INTEGERS))
def test_ids_have_any_integer_type(name, dtype, tmp_path: Path):
    """In files of text, they are whole floats."""
    numbers = np.array([[3, 1, 4, 1, 5]])
    if name in OF_ARRAYS:
        x = array_of(numbers.T if name == "header.csv" else numbers, dtype)
        content = OF_ARRAYS[name](x)
    else:
        content = OF_TENSORS[name](torch.from_numpy(numbers).to(getattr(torch, dtype)))
    found = read_ids(save(tmp_path, name, content))
    assert found.dtype == np.int64
    assert found.tolist() == numbers[0].tolist()


# --- which array of a file is read ----------------------------------------------------------------

SCORES = np.random.default_rng(0).random((4, 20)).astype(np.float32)
S = torch.from_numpy(SCORES)
MATRICES = {
    "others.npz": {"sims": SCORES, "other": SCORES[:1]},
    "others.pkl": {"sims": S.clone(), "names": ["a"]},
    "parameter.pkl": torch.nn.Parameter(S.clone()),
    "view.pickle": torch.cat([S.flip(0), S]).T.contiguous().T[4:],
    "any name.safetensors": {"x": S},
    "ids.safetensors": {"sims": S, "ids": torch.arange(3)},
    "numbers as header.csv": SCORES,
    "pandas.csv": SCORES,
    "semicolons.CSV": SCORES,
    "tabs.csv": SCORES,
    "any name.mat": {"S": SCORES},
    "sparse.mat": {"sims": SCORES, "matches": csr_matrix(SCORES > 0.5)},
    "group.h5": {"deep/scores": SCORES},
    "others.HDF5": {"sims": SCORES, "other": SCORES[:1]},
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_is_found_beside_other_content(name: str, tmp_path: Path):
    found = read_matrix(save(tmp_path, name, MATRICES[name])).numpy()
    np.testing.assert_allclose(found, SCORES, rtol=1e-6)


def test_numbers_longer_than_pytorchs_are_read(tmp_path: Path):
    path = save(tmp_path, "s.npy", np.full((2, 3), 0.1, np.longdouble))
    assert read_matrix(path).tolist() == [[0.1] * 3] * 2


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_arrays_of_every_version_are_read(version, tmp_path: Path):
    path = tmp_path / "sims.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, SCORES, version)
    np.testing.assert_array_equal(read_matrix(path), SCORES)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol: int, tmp_path: Path):
    content = {
        "npts": np.int64(4),
        "mean": np.float64(0.5),
        "sims": np.asfortranarray(SCORES),
        "names": np.array(["a", "b"]),
        "objects": np.array([1, "a"], dtype=object),
        "big": SCORES.astype(">f8"),
        "C": SCORES,
    }
    path = save(tmp_path, "sims.pkl", pickle.dumps(content, protocol))
    for key in (None, "big", "C"):
        np.testing.assert_array_equal(read_matrix(path, key), SCORES)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("a.npz", None),
        ("a.npz", "img"),
        ("a.npz", "deep/img"),
        ("12:30.npz", None),
        ("12:30.npz", "img"),
        ("a.npz:", None),
        ("C:none.npz", None),
        ("folder:img", None),
    ],
)
def test_a_name_stands_behind_a_colon(path, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.npz", "12", "12:30.npz"):
        Path(name).touch()
    Path("folder").mkdir()
    text = path if key is None else f"{path}:{key}"
    assert as_source(text) == Source(Path(path), key)
    assert str(as_source(text)) == text


# --- ids and names --------------------------------------------------------------------------------

IDS = [7, -1, 2**40, 7]
LINES = "7\n-1\n1099511627776\n7\n"
INTEGER_FILES = {
    "blanks.txt": "7 -1\t1099511627776\r\n7\n",
    "a.TXT": "\ufeff" + LINES,
    "header.csv": "image_id\n" + LINES,
    "row.csv": "7, -1, 1099511627776, 7",
    "series.csv": ",id\n0,7\n1,-1\n2,1099511627776\n3,7\n",
    "list.json": IDS,
    "entry.JSON": "\ufeff" + json.dumps({"ids": IDS}),
    "objects.npy": np.array(IDS, dtype=object),
    "floats.npz": {"ids": np.array(IDS, dtype=np.float64)},
    "list.pt": IDS,
    "column.pkl": torch.tensor(IDS)[:, None],
    "floats.mat": {"ids": np.array(IDS, dtype=np.float64)},
}
NAMES = ["a dog.jpg", "b.jpg", "ü.jpg", "a dog.jpg"]
NAME_FILES = {
    "lines.txt": "\n".join(NAMES),
    "excel.csv": codecs.BOM_UTF8 + "\r\n".join(NAMES).encode(),
    "list.json": NAMES,
    "objects.npy": np.array(NAMES, dtype=object),
    "a.npz": {"names": np.array([NAMES])},
    "list.pkl": NAMES,
    "array.pkl": {"names": np.array(NAMES)},
    "list.pth.tar": NAMES,
    "a.h5": {"names": NAMES},
    # h5py takes no arrays of strings, but of bytes
    "bytes.hdf5": {"names": np.char.encode(NAMES, "utf-8")},
    "bytes.npy": np.char.encode(NAMES, "utf-8"),
    "bytes.pkl": [name.encode() for name in NAMES],
}


@pytest.mark.parametrize("name", INTEGER_FILES)
def test_integer_ids_are_read_from_any_format(name: str, tmp_path: Path):
    found = read_ids(save(tmp_path, name, INTEGER_FILES[name]))
    assert found.dtype == np.int64
    assert found.tolist() == IDS


@pytest.mark.parametrize("pairs", [[[0, 1], [1, 2], [2, 0]], [[0, 1, 2], [1, 0, 1]], [[0, 1]]])
@pytest.mark.parametrize("has_header", [False, True])
def test_a_first_pair_or_row_of_ids_is_no_header(has_header, pairs, tmp_path):
    """Above a matrix, 0, 1, 2 is a header of pandas."""
    lines = [",".join(map(str, pair)) for pair in pairs]
    header = ["image,text,grade" if len(pairs[0]) == 3 else "image,text"] * has_header
    path = save(tmp_path, "pairs.csv", "\n".join(header + lines))
    assert read_pairs(path).tolist() == pairs
    assert read_ids(save(tmp_path, "row.csv", lines[0])).tolist() == pairs[0]


@pytest.mark.parametrize("name", NAME_FILES)
def test_names_are_the_same_from_all_formats(name: str, tmp_path: Path):
    found = read_ids(save(tmp_path, name, NAME_FILES[name]))
    assert found.tolist() == NAMES
    ids = Similarity(torch.eye(4), torch.eye(4), found, NAMES).ids
    assert torch.equal(*ids) and len(ids[0].unique()) == 3


CAPTIONS = 'image,caption\n3,"a dog, running"\n4,a cat\n'
AMONG_INTEGERS = "expected an id for each item, got .* among integers"
WRONG_IDS = [
    ("captions.csv", CAPTIONS, r"it has image, caption; for one of them, write .*ns\.csv:image"),
    ("captions.csv:text", CAPTIONS, "a column of the name 'text'; it has image, caption"),
    # missing ones would match each other
    ("blank_lines.txt", "a\n\nb\n\nc\n", "expected an id for each item"),
    ("empty_names.csv", 'id\na\n""\nb\n""\n', "expected an id for each item"),
    ("nan.csv", "id\n3.0\nnan\n4.0\nnan\n", AMONG_INTEGERS),
    ("empty.csv:id", "id,x\n3,a\n,b\n4,c\n,d\n", AMONG_INTEGERS),
    ("null.json", '["a", null, "b", null]', "null.json: expected numbers"),
    ("empty.json", '["a", "", "b", ""]', "expected an id for each item"),
    ("one.csv", "id\n3\nnan", AMONG_INTEGERS),
    ("first.csv", "nan\n3\nnan", AMONG_INTEGERS),
    ("two.csv", "3\nnan\nnan", AMONG_INTEGERS),
    ("empty_one.csv", 'id\n3\n""', AMONG_INTEGERS),
    ("floats.npy", np.array([3.0, 3.5, 4.0]), r"expected a row of integers, got torch\.float64"),
    ("floats.json", "[3.0, 3.5, 4.0]", r"expected a row of integers, got torch\.float64"),
    ("bools.npy", np.array([True, False]), r"expected a row of integers, got torch\.bool"),
]


@pytest.mark.parametrize(("source", "content", "message"), WRONG_IDS)
def test_other_ids_are_refused(source: str, content: Any, message: str, tmp_path: Path):
    name, _, key = source.partition(":")
    path = save(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        read_ids(path, key or None)


def test_a_column_of_a_table_is_chosen_by_its_header(tmp_path: Path):
    assert read_ids(save(tmp_path, "captions.csv", CAPTIONS), "image").tolist() == [3, 4]


@pytest.mark.parametrize("start", ["\ufeff", ""])
def test_lines_have_no_byte_order_mark(start: str, tmp_path: Path):
    path = save(tmp_path, "captions.txt", (start + "a\u2028b\r\nü\n").encode())
    assert read_lines(path) == ["a\u2028b", "ü"]


# --- surroundings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("scipy.io", "s.mat"),
        ("h5py", "s.h5"),
        ("safetensors.torch", "s.safetensors"),
    ],
)
def test_an_extra_that_is_missing_is_named(module: str, name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    path = save(tmp_path, name, b"MATLAB 5.0 MAT-file")
    with pytest.raises(ImportError, match=r"install itrloss with the extra 'files'"):
        read_matrix(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", SCORES),
        ("a.csv", SCORES),
        ("a.pkl", S.clone()),
        ("a.safetensors", {"s": S.clone()}),
        ("ids.txt", "1\n2"),
        ("names.txt", "a\nb"),
    ],
)
def test_a_default_device_does_not_matter(name: str, content: Any, tmp_path: Path):
    path = save(tmp_path, name, content)
    with default_device("meta"):
        if path.suffix == ".txt":
            assert len(read_ids(path)) == 2
        else:
            assert read_matrix(path).device.type == "cpu"
