"""Matrices, ids and names are read from files of every format."""

from __future__ import annotations

import codecs
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itrloss import Similarity
from itrloss.cli.files import Source, as_source, read_ids, read_lines, read_matrix

# --- writers --------------------------------------------------------------------------------------


def save_npy(path: Path, x: Any) -> None:
    with path.open("wb") as file:  # by a name in upper case, NumPy would add a suffix
        np.save(file, x)


def save_pickle(path: Path, content: Any, protocol: int | None = None) -> None:
    path.write_bytes(pickle.dumps(content, protocol))


def save_csv(path: Path, x: np.ndarray, header: bool = False, start: bytes = b"") -> None:
    lines = [",".join(str(float(number)) for number in row) for row in x]
    if header:
        lines.insert(0, ",".join(f"text {k}" for k in range(x.shape[1])))
    path.write_bytes(start + "\n".join(lines).encode())


def save_frame(path: Path, x: np.ndarray, encoding: str = "utf-8", **options: Any) -> None:
    """Write a table of pandas, with numbers as its header and as its first column."""
    frame = pytest.importorskip("pandas").DataFrame(x)
    path.write_text(frame.to_csv(**options), encoding)


def save_hdf5(path: Path, arrays: dict[str, Any], **options: Any) -> None:
    h5py = pytest.importorskip("h5py")
    userblock = 512 if path.suffix == ".mat" else 0  # where MATLAB writes its version
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)


def save_mat(path: Path, arrays: dict[str, Any], **options: Any) -> None:
    savemat = pytest.importorskip("scipy.io").savemat
    with path.open("wb") as file:
        savemat(file, arrays, **options)


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)


# --- every dtype and layout -----------------------------------------------------------------------

DTYPES = ("float16", "float32", "float64", "bfloat16")
LAYOUTS = ("C", "Fortran", "transposed", "strided", "big-endian", "read-only")
INTEGERS = ("int8", "int32", "int64", "uint8", "uint16")


def matrix(dtype: str) -> np.ndarray:
    """A matrix (5, 7) whose numbers every dtype holds exactly; NumPy has no bfloat16."""
    numbers = (np.arange(35).reshape(5, 7) - 17) / 8
    return numbers.astype("float32" if dtype == "bfloat16" else dtype)


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
    if layout == "read-only":
        x = x.copy()
        x.flags.writeable = False
    return x


def as_tensor(x: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor of the same dtype and strides, which has no order of bytes."""
    native = x.astype(x.dtype.newbyteorder("="), order="K", copy=False)
    tensor = torch.from_numpy(native.copy(order="K"))
    return tensor.bfloat16() if dtype == "bfloat16" else tensor


# Formats of arrays, whose files keep the array's dtype and layout as far as the format has them.
OF_ARRAYS: dict[str, Callable[[Path, np.ndarray], object]] = {
    "s.npy": save_npy,
    "S.NPY": save_npy,
    "pickled.npy": lambda path, x: save_npy(path, np.array({"sims": x}, dtype=object)),
    "s.npz": lambda path, x: np.savez(path, sims=x),
    "small.npz": lambda path, x: np.savez_compressed(path, sims=x),
    "s.pkl": lambda path, x: save_pickle(path, {"sims": x}),
    "old.pickle": lambda path, x: save_pickle(path, x, protocol=2),
    "s.csv": save_csv,
    "header.csv": lambda path, x: save_csv(path, x, header=True, start=codecs.BOM_UTF8),
    "s.json": lambda path, x: path.write_text(json.dumps(x.astype(float).tolist())),
    "s.h5": lambda path, x: save_hdf5(path, {"sims": x}),
    "small.hdf5": lambda path, x: save_hdf5(path, {"sims": x}, compression="gzip", chunks=True),
    "v4.mat": lambda path, x: save_mat(path, {"sims": x}, format="4"),
    "v5.MAT": lambda path, x: save_mat(path, {"sims": x}, do_compression=True),
    "v7.3.mat": lambda path, x: save_hdf5(path, {"sims": x.T}),  # MATLAB's are transposed
}
OF_TENSORS: dict[str, Callable[[Path, torch.Tensor], object]] = {
    "s.pt": lambda path, x: torch.save(x, path),
    "S.PTH": lambda path, x: torch.save({"sims": x}, path),
    "OLD.PTH.TAR": lambda path, x: torch.save(x, path, _use_new_zipfile_serialization=False),
    "s.pth.tar": lambda path, x: torch.save({"sims": x, "epoch": 3}, path),
    "pickled.pkl": lambda path, x: save_pickle(path, x),
    "s.SafeTensors": lambda path, x: save_safetensors(path, {"sims": x}),
}
NO_HALF = {"v4.mat", "v5.MAT"}  # MATLAB has no half precision
NO_INTEGERS = {"int8": {"v4.mat"}, "int64": {"v4.mat"}}


def cases_of_arrays() -> list[tuple[str, str, str]]:
    cases = []
    for name in OF_ARRAYS:
        for dtype in DTYPES[:3]:
            for layout in LAYOUTS:
                if not (name in NO_HALF and dtype == "float16"):
                    cases.append((name, dtype, layout))
    return cases


@pytest.mark.parametrize(("name", "dtype", "layout"), cases_of_arrays())
def test_arrays_have_any_dtype_and_layout(name: str, dtype: str, layout: str, tmp_path: Path):
    path = tmp_path / name
    exact = matrix(dtype)
    OF_ARRAYS[name](path, laid_out(exact, layout))
    found = read_matrix(path)
    assert found.is_floating_point()
    assert found.tolist() == exact.tolist()
    keeps_dtype = not name.endswith((".csv", ".json"))
    if keeps_dtype:
        assert found.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("layout", ["C", "Fortran", "transposed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_TENSORS)
def test_tensors_have_any_dtype_and_layout(name: str, dtype: str, layout: str, tmp_path: Path):
    path = tmp_path / name
    exact = matrix(dtype)
    OF_TENSORS[name](path, as_tensor(laid_out(exact, layout), dtype))
    found = read_matrix(path)
    assert found.dtype == getattr(torch, dtype)
    assert found.tolist() == exact.tolist()


def cases_of_ids() -> list[tuple[str, str]]:
    """Return all formats with the integers that they have."""
    cases = []
    for dtype in INTEGERS:
        cases += [(name, dtype) for name in OF_ARRAYS if name not in NO_INTEGERS.get(dtype, ())]
        if dtype != "uint16":  # of which PyTorch has hardly any operator
            cases += [(name, dtype) for name in OF_TENSORS]
    return cases


@pytest.mark.parametrize(("name", "dtype"), cases_of_ids())
def test_ids_have_any_integer_type(name: str, dtype: str, tmp_path: Path):
    """In files of text, they are whole floats."""
    path = tmp_path / name
    exact = np.array([[3, 1, 4, 1, 5]], dtype)
    if name in OF_ARRAYS:
        OF_ARRAYS[name](path, exact.T if name == "header.csv" else exact)
    else:
        OF_TENSORS[name](path, as_tensor(exact, dtype))
    found = read_ids(path)
    assert found.dtype == torch.int64
    assert found.tolist() == exact[0].tolist()


def test_numbers_longer_than_pytorchs_are_read(tmp_path: Path):
    path = tmp_path / "s.npy"
    np.save(path, np.full((2, 3), 0.1, np.longdouble))
    assert read_matrix(path).tolist() == [[0.1] * 3] * 2


# --- which array of a file is read ----------------------------------------------------------------

SCORES = np.random.default_rng(0).random((4, 20)).astype(np.float32)
S = torch.from_numpy(SCORES)
BOTH = torch.cat([S.flip(0), S])
MATRIX_FILES = {
    "others.npz": lambda path: np.savez(path, sims=SCORES, other=SCORES[:1]),
    "others.pkl": lambda path: save_pickle(path, {"sims": S.clone(), "names": ["a"]}),
    "parameter.pkl": lambda path: save_pickle(path, torch.nn.Parameter(S.clone())),
    "view.pickle": lambda path: save_pickle(path, BOTH.T.contiguous().T[4:]),
    "any name.safetensors": lambda path: save_safetensors(path, {"x": S}),
    "ids.safetensors": lambda path: save_safetensors(path, {"sims": S, "ids": torch.arange(3)}),
    "numbers as header.csv": lambda path: save_frame(path, SCORES, index=False),
    "pandas.csv": lambda path: save_frame(path, SCORES),
    "semicolons.CSV": lambda path: save_frame(path, SCORES, "utf-8-sig", sep=";"),
    "tabs.csv": lambda path: save_frame(path, SCORES, "utf-16", sep="\t"),
    "any name.mat": lambda path: save_mat(path, {"S": SCORES}),
    "group.h5": lambda path: save_hdf5(path, {"deep/scores": SCORES}),
    "others.HDF5": lambda path: save_hdf5(path, {"sims": SCORES, "other": SCORES[:1]}),
}


@pytest.mark.parametrize("name", MATRIX_FILES)
def test_a_matrix_is_found_beside_other_content(name: str, tmp_path: Path):
    path = tmp_path / name
    MATRIX_FILES[name](path)
    found = read_matrix(path)
    np.testing.assert_allclose(found.numpy(), SCORES, rtol=1e-6)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol: int, tmp_path: Path):
    path = tmp_path / "sims.pkl"
    content = {
        "npts": np.int64(4),
        "mean": np.float64(0.5),
        "sims": np.asfortranarray(SCORES),
        "names": np.array(["a", "b"]),
        "objects": np.array([1, "a"], dtype=object),
        "big": SCORES.astype(">f8"),
        "C": SCORES,
    }
    save_pickle(path, content, protocol)
    for key in (None, "big", "C"):
        np.testing.assert_array_equal(read_matrix(path, key), SCORES)


@pytest.mark.parametrize(
    ("text", "path", "key"),
    [
        ("a.npz", "a.npz", None),
        ("a.npz:img", "a.npz", "img"),
        ("a.npz:deep/img", "a.npz", "deep/img"),
        ("12:30.npz", "12:30.npz", None),
        ("12:30.npz:img", "12:30.npz", "img"),
        ("a.npz:", "a.npz:", None),
        ("C:none.npz", "C:none.npz", None),
        ("folder:img", "folder:img", None),
    ],
)
def test_a_name_stands_behind_a_colon(text, path, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.npz", "12", "12:30.npz"):
        Path(name).touch()
    Path("folder").mkdir()
    assert as_source(text) == Source(Path(path), key)
    assert str(as_source(text)) == text


# --- ids and names --------------------------------------------------------------------------------

IDS = [7, -1, 2**40, 7]
LINES = "7\n-1\n1099511627776\n7\n"
ID_FILES = {
    "blanks.txt": lambda path: path.write_text("7 -1\t1099511627776\r\n7\n"),
    "a.TXT": lambda path: path.write_text(LINES, encoding="utf-8-sig"),
    "wide.txt": lambda path: path.write_text(LINES.rstrip(), encoding="utf-16"),
    "header.csv": lambda path: path.write_text("image_id\n" + LINES),
    "row.csv": lambda path: path.write_text("7, -1, 1099511627776, 7"),
    "series.csv": lambda path: path.write_text(",id\n0,7\n1,-1\n2,1099511627776\n3,7\n"),
    "list.json": lambda path: path.write_text(json.dumps(IDS)),
    "entry.JSON": lambda path: path.write_text(json.dumps({"ids": IDS}), encoding="utf-8-sig"),
    "objects.npy": lambda path: np.save(path, np.array(IDS, dtype=object)),
    "floats.npz": lambda path: np.savez(path, ids=np.array(IDS, dtype=np.float64)),
    "list.pt": lambda path: torch.save(IDS, path),
    "column.pkl": lambda path: save_pickle(path, torch.tensor(IDS)[:, None]),
    "floats.mat": lambda path: save_mat(path, {"ids": np.array(IDS, dtype=np.float64)}),
}


@pytest.mark.parametrize("name", ID_FILES)
def test_integer_ids_are_read_from_any_format(name: str, tmp_path: Path):
    path = tmp_path / name
    ID_FILES[name](path)
    found = read_ids(path)
    assert found.dtype == torch.int64
    assert found.tolist() == IDS


NAMES = ["a dog.jpg", "b.jpg", "ü.jpg", "a dog.jpg"]
NAME_FILES = {
    "lines.txt": lambda path: path.write_text("\n".join(NAMES), encoding="utf-8"),
    "excel.csv": lambda path: path.write_text("\r\n".join(NAMES), encoding="utf-8-sig"),
    "list.json": lambda path: path.write_text(json.dumps(NAMES)),
    "bytes.npy": lambda path: np.save(path, np.array([x.encode() for x in NAMES])),
    "objects.npy": lambda path: np.save(path, np.array(NAMES, dtype=object)),
    "a.npz": lambda path: np.savez(path, names=np.array([NAMES])),
    "list.pkl": lambda path: save_pickle(path, NAMES),
    "array.pkl": lambda path: save_pickle(path, {"names": np.array(NAMES)}),
    "list.pth.tar": lambda path: torch.save(NAMES, path),
    "a.h5": lambda path: save_hdf5(path, {"names": NAMES}),
}


@pytest.mark.parametrize("name", NAME_FILES)
def test_names_get_the_same_numbers_from_all_formats(name: str, tmp_path: Path):
    path = tmp_path / name
    NAME_FILES[name](path)
    found = read_ids(path)
    sim = Similarity(torch.eye(4), torch.eye(4), NAMES, NAMES)
    assert torch.equal(found, sim.ids[0])
    assert len(found.unique()) == 3


def test_a_column_of_a_table_is_chosen_by_its_header(tmp_path: Path):
    path = tmp_path / "captions.csv"
    path.write_text('image,caption\n3,"a dog, running"\n4,a cat\n')
    assert read_ids(path, "image").tolist() == [3, 4]
    with pytest.raises(
        ValueError, match=r"expected one column; it has image, caption; .*captions\.csv:image"
    ):
        read_ids(path)
    with pytest.raises(ValueError, match="a column of the name 'text'; it has image, caption"):
        read_ids(path, "text")


MISSING_IDS = {
    "blank lines.txt": ("a\n\nb\n\nc\n", None),
    "empty names.csv": ('id\na\n""\nb\n""\n', None),
    "nan.csv": ("id\n3.0\nnan\n4.0\nnan\n", None),
    "empty numbers.csv": ("id,x\n3,a\n,b\n4,c\n,d\n", "id"),
    "null.json": (json.dumps(["a", None, "b", None]), None),
    "empty strings.json": (json.dumps(["a", "", "b", ""]), None),
}


@pytest.mark.parametrize("name", MISSING_IDS)
def test_missing_ids_are_refused(name: str, tmp_path: Path):
    """They would match each other."""
    text, column = MISSING_IDS[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=name):
        read_ids(path, column)


@pytest.mark.parametrize("lines", ["id\n3\nnan", "nan\n3\nnan", "3\nnan\nnan", 'id\n3\n""'])
def test_ids_that_are_missing_but_for_one_are_refused(lines: str, tmp_path: Path):
    path = tmp_path / "ids.csv"
    path.write_text(lines)
    with pytest.raises(ValueError, match=r"expected an id for each item, got .* among integers"):
        read_ids(path)


@pytest.mark.parametrize("name", ["i.npy", "i.json"])
def test_numbers_that_are_not_whole_are_no_ids(name: str, tmp_path: Path):
    path = tmp_path / name
    ids = [3.0, 3.5, 4.0]
    if name == "i.npy":
        np.save(path, np.array(ids))
    else:
        path.write_text(json.dumps(ids))
    with pytest.raises(ValueError, match=r"expected a row of integers, got torch\.float64"):
        read_ids(path)


def test_bools_are_no_ids(tmp_path: Path):
    path = tmp_path / "i.npy"
    np.save(path, np.array([True, False]))
    with pytest.raises(ValueError, match=r"i\.npy: expected a row of integers, got torch\.bool"):
        read_ids(path)


@pytest.mark.parametrize("start", [codecs.BOM_UTF8, b""])
def test_lines_have_no_byte_order_mark(start: bytes, tmp_path: Path):
    path = tmp_path / "captions.txt"
    path.write_bytes(start + "a\u2028b\r\nü\n".encode())
    assert read_lines(path) == ["a\u2028b", "ü"]


# --- surroundings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("scipy.io", "s.mat"),
        ("h5py", "s.h5"),
        ("safetensors.torch", "s.safetensors"),
        ("pandas", "s.csv"),
    ],
)
def test_an_extra_that_is_missing_is_named(module: str, name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / name
    path.write_bytes(b"MATLAB 5.0 MAT-file")
    with pytest.raises(ImportError, match=r"install itrloss with the extra '(files|cli)'"):
        read_matrix(path)


ON_THE_CPU = {
    "a.npy": lambda path: np.save(path, SCORES),
    "a.csv": lambda path: save_csv(path, SCORES),
    "a.pkl": lambda path: save_pickle(path, S.clone()),
    "a.safetensors": lambda path: save_safetensors(path, {"s": S.clone()}),
    "ids.txt": lambda path: path.write_text("1\n2"),
    "names.txt": lambda path: path.write_text("a\nb"),
}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_a_default_device_does_not_matter(name: str, tmp_path: Path):
    path = tmp_path / name
    ON_THE_CPU[name](path)
    read = read_ids if path.suffix == ".txt" else read_matrix
    with torch.device("meta"):
        found = read(path)
    assert found.device.type == "cpu"
