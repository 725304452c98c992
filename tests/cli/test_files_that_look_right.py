"""Files that would be read as something else are refused, or read as what they are."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file
from scipy.io import savemat
from support.command_line import C, N, scores
from support.versions import require

from itrloss.files import read_ids, read_matrix

SCORES = scores()
IDS = 100 + 7 * np.arange(N)
WITH_IDS = np.column_stack([IDS, SCORES])
LARGE = 2**24 + np.arange(4)


def csv(path: Path, x: Any) -> None:
    pd.DataFrame(x).to_csv(path, index=False)


def hdf5(path: Path, x: Any) -> None:
    with h5py.File(path, "w") as file:
        file["sims"] = x


# --- ids beside scores ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write", "matrix"),
    [
        ("first.csv", csv, WITH_IDS),
        ("last.csv", csv, np.column_stack([SCORES, IDS])),
        (
            "named.csv",
            lambda path, x: pd.DataFrame(x, pd.Index(IDS, name="id")).to_csv(path),
            SCORES,
        ),
        ("plain.csv", lambda path, x: np.savetxt(path, x, delimiter=";"), WITH_IDS),
        ("s.npy", np.save, WITH_IDS),
        ("s.h5", hdf5, WITH_IDS),
        ("s.mat", lambda path, x: savemat(path, {"sims": x}), WITH_IDS),
        ("s.pkl", lambda path, x: path.write_bytes(pickle.dumps(x)), -WITH_IDS),
    ],
)
def test_a_column_of_ids_is_no_dimension(name, write: Callable, matrix, tmp_path: Path):
    write(tmp_path / name, matrix)
    with pytest.raises(ValueError, match=r"got a column of distinct integers such as -?\d"):
        read_matrix(tmp_path / name)


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(4),  # cosines that are integers
        np.column_stack([np.eye(3)[:, 0] - np.eye(3)[:, 1], 0.5 * np.eye(3)]),  # 1, -1, 0
        np.arange(12.0).reshape(4, 3),  # integers all over
        np.column_stack([np.repeat([2.0, 3.0], 2), np.full((4, 2), 0.5)]),  # not distinct
        np.array([[7.0, 0.5, 0.1]]),  # a single row
    ],
)
def test_integers_among_scores_are_read(matrix, tmp_path: Path):
    np.save(tmp_path / "s.npy", matrix)
    assert read_matrix(tmp_path / "s.npy").tolist() == matrix.tolist()


def test_pandas_number_of_a_row_is_left_out(tmp_path: Path):
    pd.DataFrame(SCORES).to_csv(tmp_path / "s.csv")
    np.testing.assert_allclose(read_matrix(tmp_path / "s.csv"), SCORES, rtol=1e-6)


# --- ids that a number type cannot tell apart -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write", "ids"),
    [
        ("i.npy", np.save, LARGE.astype("float32")),
        ("i.npy", np.save, np.array([3, 2048], "float16")),
        ("i.npy", np.save, np.array([1.0, 2.0**53])),
        ("i.npz", lambda path, x: np.savez(path, ids=x), -LARGE.astype("float32")),
        ("i.mat", lambda path, x: savemat(path, {"ids": x}), LARGE.astype("float32")),
        ("i.safetensors", lambda path, x: save_file({"ids": x}, path), LARGE.astype("float32")),
    ],
)
def test_ids_beyond_what_floats_tell_apart_are_refused(name, write: Callable, ids, tmp_path: Path):
    write(tmp_path / name, ids)
    with pytest.raises(ValueError, match="where neighbours are equal; save them as int64"):
        read_ids(tmp_path / name)
    np.save(tmp_path / "right.npy", (ids / 3).round().astype(ids.dtype))
    assert len(read_ids(tmp_path / "right.npy")) == len(ids)


@pytest.mark.parametrize("dtype", ["u2", "u4", "u8"])
def test_unsigned_ids_are_read_from_safetensors(dtype: str, tmp_path: Path):
    require("torch.uint64", 2, 3)
    save_file({"ids": np.arange(3, dtype=dtype)}, tmp_path / "i.safetensors")
    assert read_ids(tmp_path / "i.safetensors").tolist() == [0, 1, 2]


# --- masks, empty entries and rows ----------------------------------------------------------------


def test_missing_values_of_netcdf_are_no_numbers(tmp_path: Path):
    path = tmp_path / "s.h5"
    with h5py.File(path, "w") as file:
        file["sims"] = np.where(np.eye(N, N * C) > 0, -9.0, SCORES)
        file["sims"].attrs["_FillValue"] = np.array([-9.0], "f4")
        file["whole"] = SCORES
        file["whole"].attrs["_FillValue"] = np.array([-9.0], "f4")
        file["empty"] = h5py.Empty("f")
    with pytest.raises(ValueError, match="expected a value in each place, got missing ones"):
        read_matrix(path, "sims")
    assert read_matrix(path, "whole").shape == SCORES.shape


def test_masked_arrays_in_pickles_are_refused(tmp_path: Path):
    path = tmp_path / "s.pkl"
    path.write_bytes(pickle.dumps(np.ma.masked_less(SCORES, 0)))
    with pytest.raises(ValueError, match="which is not read"):
        read_matrix(path)


@pytest.mark.parametrize(
    "rows",
    [
        list(SCORES),
        np.array([*SCORES, None], dtype=object)[:-1],
        SCORES.tolist(),
        {"sims": list(SCORES), "epoch": 3},
        [list(map(np.float32, row)) for row in SCORES.tolist()],
    ],
)
def test_rows_in_pickles_are_a_matrix(rows, tmp_path: Path):
    path = tmp_path / "s.pkl"
    path.write_bytes(pickle.dumps(rows))
    np.testing.assert_allclose(read_matrix(path), SCORES)


@pytest.mark.parametrize(
    "ids", [[np.int64(3), np.int64(5)], [np.str_("a"), np.str_("b")], np.array(["a", 3], object)]
)
def test_lists_of_numpys_scalars_are_ids(ids, tmp_path: Path):
    path = tmp_path / "i.pkl"
    path.write_bytes(pickle.dumps(ids))
    assert read_ids(path).tolist() == [x if isinstance(x, np.int64) else str(x) for x in ids]


# --- files of text --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id\n", "expected ids, got none"),
        ("\n", "the file is empty"),
        ('"' + "a" * 200_000 + '",1\n1,2\n', "expected one column; it has aaa"),
        ('"open,1\n1,2\n', "expected ids, got none"),
        ("a;b\n1\n", "not a readable .csv file"),
    ],
)
def test_odd_files_of_ids_are_refused_in_words(content: str, message: str, tmp_path: Path):
    path = tmp_path / "i.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_ids(path)


@pytest.mark.parametrize("options", [{}, {"header": None}, {"sep": "\t"}, {"sep": ";", "index": 0}])
def test_a_table_needs_little_more_memory_than_its_numbers(options: dict, tmp_path: Path):
    x = np.random.default_rng(0).normal(size=(1500, 64)).astype("f4")
    pd.DataFrame(x).to_csv(tmp_path / "s.csv", **({"index": False} | options))
    tracemalloc.start()
    found = read_matrix(tmp_path / "s.csv")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(found, x, rtol=1e-6)
    assert peak < 3 * 8 * x.size


def test_a_damaged_file_of_matlab_ends_no_process(tmp_path: Path):
    path = tmp_path / "s.mat"
    savemat(path, {"sims": SCORES, "more": {"a": np.arange(3)}})
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(3):
        damaged = bytearray(content)
        for place in generator.integers(128, 400, 40):
            damaged[place] = generator.integers(256)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"s\.mat: "):
            read_matrix(path)
