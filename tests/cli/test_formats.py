"""Files of every format are read as the same matrix, of any dtype and layout that they have."""

from __future__ import annotations

import codecs
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itrloss.files import read_ids, read_matrix

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


def save_csv(path: Path, x: np.ndarray, header: bool, start: bytes = b"") -> None:
    lines = [",".join(str(float(number)) for number in row) for row in x]
    if header:
        lines.insert(0, ",".join(f"text {k}" for k in range(x.shape[1])))
    path.write_bytes(start + "\n".join(lines).encode())


def save_upper_case(path: Path, x: np.ndarray) -> None:
    with path.open("wb") as file:  # by a name, NumPy would add a suffix
        np.save(file, x)


def save_hdf5(path: Path, x: np.ndarray, **options: Any) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.create_dataset("sims", data=x, **options)


def save_mat(path: Path, x: np.ndarray, **options: Any) -> None:
    pytest.importorskip("scipy.io").savemat(path, {"sims": x}, **options)


def save_safetensors(path: Path, x: torch.Tensor) -> None:
    pytest.importorskip("safetensors.torch").save_file({"sims": x.contiguous()}, path)


Write = Callable[[Path, np.ndarray], object]
# Formats of arrays, whose files keep the array's dtype and layout as far as the format has them.
OF_ARRAYS: dict[str, Write] = {
    "s.npy": lambda path, x: np.save(path, x),
    "S.NPY": lambda path, x: save_upper_case(path, x),
    "pickled.npy": lambda path, x: np.save(path, np.array({"sims": x}, dtype=object)),
    "s.npz": lambda path, x: np.savez(path, sims=x),
    "small.npz": lambda path, x: np.savez_compressed(path, sims=x),
    "s.pkl": lambda path, x: path.write_bytes(pickle.dumps({"sims": x})),
    "old.pickle": lambda path, x: path.write_bytes(pickle.dumps(x, protocol=2)),
    "s.csv": lambda path, x: save_csv(path, x, header=False),
    "header.csv": lambda path, x: save_csv(path, x, header=True, start=codecs.BOM_UTF8),
    "s.json": lambda path, x: path.write_text(json.dumps(x.astype(float).tolist())),
    "s.h5": lambda path, x: save_hdf5(path, x),
    "small.hdf5": lambda path, x: save_hdf5(path, x, compression="gzip", chunks=True),
    "v4.mat": lambda path, x: save_mat(path, x, format="4"),
    "v5.mat": lambda path, x: save_mat(path, x, do_compression=True),
    "v7.3.mat": lambda path, x: save_hdf5(path, x.T),  # MATLAB's are transposed
}
OF_TENSORS: dict[str, Callable[[Path, torch.Tensor], object]] = {
    "s.pt": lambda path, x: torch.save(x, path),
    "S.PTH": lambda path, x: torch.save({"sims": x}, path),
    "old.pth": lambda path, x: torch.save(x, path, _use_new_zipfile_serialization=False),
    "s.pth.tar": lambda path, x: torch.save({"sims": x, "epoch": 3}, path),
    "pickled.pkl": lambda path, x: path.write_bytes(pickle.dumps(x)),
    "s.safetensors": save_safetensors,
}
NO_HALF = {"v4.mat", "v5.mat"}  # MATLAB has no half precision
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
def test_arrays_of_any_dtype_and_layout(name: str, dtype: str, layout: str, tmp_path: Path):
    exact = matrix(dtype)
    OF_ARRAYS[name](tmp_path / name, laid_out(exact, layout))
    found = read_matrix(tmp_path / name)
    assert found.is_floating_point() and found.tolist() == exact.tolist()
    keeps_dtype = not name.endswith((".csv", ".json"))
    if keeps_dtype:
        assert found.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("layout", ["C", "Fortran", "transposed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_TENSORS)
def test_tensors_of_any_dtype_and_layout(name: str, dtype: str, layout: str, tmp_path: Path):
    exact = matrix(dtype)
    OF_TENSORS[name](tmp_path / name, as_tensor(laid_out(exact, layout), dtype))
    found = read_matrix(tmp_path / name)
    assert found.dtype == getattr(torch, dtype) and found.tolist() == exact.tolist()


def cases_of_ids() -> list[tuple[str, str]]:
    """Return all formats with the integers that they have."""
    cases = []
    for dtype in INTEGERS:
        cases += [(name, dtype) for name in OF_ARRAYS if name not in NO_INTEGERS.get(dtype, ())]
        if dtype != "uint16":  # of which PyTorch has hardly any operator
            cases += [(name, dtype) for name in OF_TENSORS]
    return cases


@pytest.mark.parametrize(("name", "dtype"), cases_of_ids())
def test_ids_of_any_integer_type(name: str, dtype: str, tmp_path: Path):
    """In files of text, they are whole floats."""
    exact = np.array([[3, 1, 4, 1, 5]], dtype)
    if name in OF_ARRAYS:
        OF_ARRAYS[name](tmp_path / name, exact.T if name == "header.csv" else exact)
    else:
        OF_TENSORS[name](tmp_path / name, as_tensor(exact, dtype))
    found = read_ids(tmp_path / name)
    assert found.dtype == torch.int64 and found.tolist() == exact[0].tolist()
