"""Damaged and hostile files, and those without a matrix, are refused in one line."""

from __future__ import annotations

import collections
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, replay, scores
from support.versions import require

from itrloss.files import read_matrix

# --- content --------------------------------------------------------------------------------------


def npy_header(shape: str) -> bytes:
    """A file that ends after its header."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def tensor_beyond_its_storage() -> bytes:
    """A pickle of a tensor that claims more numbers than its storage has."""
    data = pickle.dumps(torch.zeros(2, 3), protocol=2)
    shape = b"K\x02K\x03\x86"
    before, _, after = data.rpartition(shape)
    return before + b"M\xff\xffK\x03\x86" + after


def safetensors(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


class Evil:
    """An object whose unpickling makes a file."""

    def __reduce__(self):
        return open, ("executed", "w")


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


OBJECT_DTYPE = (  # numpy.dtype("O8") with flags that claim that items are not references
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR(K\x03X\x01\x00\x00\x00|NNN"
    b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
ADDRESS = b"C\x08AAAAAAAA"
EMPTY_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
CONTENT = {
    "empty.npy": b"",
    "text.npy": b"These are no numbers at all.",
    "damaged.npz": b"PK\x03\x04" + bytes(60),
    "damaged.pt": b"PK\x03\x04" + bytes(60),
    "damaged.pkl": b"\x80\x04\x95\xff\xff",
    "long_header.npy": b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{",
    "large.npy": npy_header("(1000000000, 1000000)"),
    "negative.npy": npy_header("(-4, 4)"),
    "sims.xls": b"0.1,0.2",
    "ragged.csv": b"0.1,0.2\n0.3",
    "long.csv": b"0.1,0.2\n0.3,0.4,0.5",
    "words.csv": b"a,b\n0.1,x\n",
    "empty.csv": b"\xef\xbb\xbf",
    "latin.csv": b"0.1,\xff\n",
    "text.mat": b"not MATLAB",
    "large.pkl": tensor_beyond_its_storage(),
    "code.pkl": pickle.dumps(collections.Counter),
    "long.safetensors": struct.pack("<Q", 2**60),
    "eight.safetensors": safetensors(
        b'{"s":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[0,1]}}', b"0"
    ),
    "short.safetensors": safetensors(
        b'{"s":{"dtype":"F32","shape":[9,9],"data_offsets":[0,4]}}', b"0000"
    ),
    "structure.pkl": pickle.dumps({"sims": np.zeros(2, "f4,f4")}),
    "short.pkl": pickle.dumps({"sims": scores()})[:-100],
    "evil.pkl": pickle.dumps({"sims": Evil()}),
    # bytes that are no addresses; to take them for some would crash
    "array.pkl": pickled(EMPTY_ARRAY, b"(K\x01K\x01\x85", OBJECT_DTYPE, b"\x89", ADDRESS, b"tb"),
    "constructor.pkl": pickled(b"cnumpy\nndarray\n(K\x01\x85X\x01\x00\x00\x00O", ADDRESS, b"tR"),
    "offset.pkl": pickled(
        b"cnumpy\nndarray\n(K\x02K\x02\x86X\x02\x00\x00\x00f8C\x20",
        b"A" * 32,
        b"J\xf0\xff\xff\xfftR",
    ),
    "scalar.pkl": pickled(b"cnumpy.core.multiarray\nscalar\n(", OBJECT_DTYPE, ADDRESS, b"tR"),
    "buffer.pkl": pickled(
        b"cnumpy.core.numeric\n_frombuffer\n(",
        ADDRESS,
        OBJECT_DTYPE,
        b"K\x01\x85X\x01\x00\x00\x00CtR",
    ),
}
PLACES = np.arange(N * N * C).reshape(N, -1)
ARRAYS = {
    "nan": np.where(np.arange(N * C) == 7, np.nan, scores()),
    "infinite": np.where(PLACES == 65, -np.inf, scores()),
    "nan_by_columns": np.asfortranarray(np.where(PLACES % 61 == 60, np.nan, 0.5)),
    "transposed": scores().T,
    "misshapen": scores()[:, :-1],
    "vector": scores()[0],
    "cube": scores()[None],
    "no_rows": scores()[:0],
    "integers": np.arange(N * C).reshape(N, C),
    "complex": scores() + 1j,
    "objects": np.array([[0.5, "a"], [0.1, None]], dtype=object),
    "strings": np.array([["a", "b"]]),
    "no_sims": {"a": scores(), "b": scores()},
    "evil": np.array([Evil()], dtype=object),
}
TENSORS = {
    "sparse": lambda x: x.to_sparse(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "meta": lambda x: x.to("meta"),
    "expanded": lambda x: torch.randn(1).expand(10**6, 10**6),
    "evil": lambda x: {"sims": Evil()},
}


def test_what_is_said_of_bad_files(tmp_path: Path, monkeypatch):
    """All outputs are asked for, of which none is left."""
    require("torch.float8_e4m3fn", 2, 1)
    monkeypatch.chdir(tmp_path)
    for name, content in CONTENT.items():
        Path(name).write_bytes(content)
    for name, array in ARRAYS.items():
        np.save(f"{name}.npy", array)
    np.savez("evil.npz", sims=ARRAYS["evil"])
    np.save("short.npy", scores())
    Path("short.npy").write_bytes(Path("short.npy").read_bytes()[:-100])
    for name, changed in TENSORS.items():
        torch.save(changed(torch.from_numpy(scores())), f"{name}.pt")
    replay("bad_files")


def test_damaged_data_of_the_chosen_array_are_named(tmp_path: Path):
    path = tmp_path / "s.npz"
    np.savez_compressed(path, sims=np.random.default_rng(0).normal(size=(60, 120)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"s\.npz: not a readable \.npz file"):
        read_matrix(path)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_nested_tensors_are_refused(tmp_path: Path):
    """PyTorch 2.15 no longer reads them from untrusted files."""
    require("saving a nested tensor", 2, 0)
    x = torch.from_numpy(scores())
    torch.save(torch.nested.nested_tensor([x[0], x[1, :3]]), tmp_path / "sims.pt")
    with pytest.raises(ValueError, match=r"expected a dense tensor|not a readable \.pt file"):
        read_matrix(tmp_path / "sims.pt")


# --- memory ---------------------------------------------------------------------------------------


def test_only_the_chosen_array_of_an_archive_is_read(tmp_path: Path):
    path = tmp_path / "side.npz"
    arrays = {"sims": scores(), "other": np.zeros((2000, 2000), "f4")}
    np.savez_compressed(path, **arrays)
    tracemalloc.start()
    found = read_matrix(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(found, torch.from_numpy(scores()))
    assert peak < 10**7
    assert read_matrix(path, "other").shape == (2000, 2000)


def test_an_archive_that_claims_more_numbers_than_it_has_is_refused(tmp_path: Path):
    path = tmp_path / "s.npz"
    header = {"descr": "<f4", "fortran_order": False, "shape": (10**8, 10**7)}  # petabytes
    with zipfile.ZipFile(path, "w") as archive, archive.open("sims.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(100))
    with pytest.raises(ValueError, match=r"s\.npz: not a readable \.npz file: "):
        read_matrix(path)


def test_an_array_that_holds_itself_has_an_end(tmp_path: Path):
    array = np.empty((), object)
    array[()] = array
    path = tmp_path / "sims.pkl"
    path.write_bytes(pickle.dumps(array))
    with pytest.raises(ValueError, match="expected numbers"):
        read_matrix(path)


def test_the_order_of_bytes_in_a_pickle_is_a_string(tmp_path: Path):
    """Lists in lists, each twice the one in it, would fill the memory as a text."""
    path = tmp_path / "s.pkl"
    order = b"X\x01\x00\x00\x00<"
    pickled = pickle.dumps(np.ones((2, 2)), protocol=2)
    assert pickled.count(order) == 1
    path.write_bytes(pickled.replace(order, b"]"))
    with pytest.raises(ValueError, match="expected str instance, list found"):
        read_matrix(path)
