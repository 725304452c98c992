"""Damaged and hostile files, and those without a matrix, are refused in one line."""

from __future__ import annotations

import collections
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, refused, scores

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


CONTENT = {
    "empty.npy": (b"", "is empty"),
    "text.npy": (b"These are no numbers at all.", "magic string"),
    "damaged.npz": (b"PK\x03\x04" + bytes(60), "not a zip file"),
    "damaged.pt": (b"PK\x03\x04" + bytes(60), "not a readable .pt"),
    "damaged.pkl": (b"\x80\x04\x95\xff\xff", "not a readable .pkl"),
    "long_header.npy": (
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{",
        "expected 2147483648 bytes",
    ),
    "large.npy": (npy_header("(1000000000, 1000000)"), "not a readable"),
    "negative.npy": (npy_header("(-4, 4)"), "not a readable"),
    "sims.xls": (b"0.1,0.2", r"expected a file named \*.npy"),
    "ragged.csv": (
        b"0.1,0.2\n0.3",
        "readable .csv file: could not convert string to float: ''",
    ),
    "long.csv": (b"0.1,0.2\n0.3,0.4,0.5", "not a readable .csv file: .* line 2, saw 3"),
    "words.csv": (b"a,b\n0.1,x\n", "could not convert string to float: 'x'"),
    "empty.csv": (b"\xef\xbb\xbf", "not a readable .csv file: No columns to parse"),
    "latin.csv": (b"0.1,\xff\n", "expected UTF-8"),
    "text.mat": (b"not MATLAB", "not a readable .mat"),
    "large.pkl": (tensor_beyond_its_storage(), "not a readable .pkl"),
    "code.pkl": (pickle.dumps(collections.Counter), "collections.Counter, which is not read"),
    "long.safetensors": (struct.pack("<Q", 2**60), "not a readable .safetensors"),
    "eight.safetensors": (
        safetensors(b'{"s":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[0,1]}}', b"0"),
        "of 16 bits a number at least, got torch.float8_e4m3fn",
    ),
    "short.safetensors": (
        safetensors(b'{"s":{"dtype":"F32","shape":[9,9],"data_offsets":[0,4]}}', b"0000"),
        "not a readable .safetensors",
    ),
    "structure.pkl": (
        pickle.dumps({"sims": np.zeros(2, "f4,f4")}),
        r"got an array of \|V8, which is not read",
    ),
    "short.pkl": (pickle.dumps({"sims": scores()})[:-100], "not a readable .pkl"),
}
ARRAYS = {
    "nan.npy": (
        np.where(np.arange(N * C) == 7, np.nan, scores()),
        "finite values, got nan or infinity: 12 of 720, the first in row 0 and column 7",
    ),
    "infinite.npy": (
        np.where(np.arange(N * N * C).reshape(N, -1) == 65, -np.inf, scores()),
        "1 of 720, the first in row 1 and column 5",
    ),
    "nan by columns.npy": (
        np.asfortranarray(np.where(np.arange(N * N * C).reshape(N, -1) % 61 == 60, np.nan, 0.5)),
        "11 of 720, the first in row 1 and column 0",
    ),
    "transposed.npy": (scores().T, "--transpose"),
    "misshapen.npy": (scores()[:, :-1], "--image-ids, --text-ids"),
    "vector.npy": (scores()[0], "expected a matrix"),
    "cube.npy": (scores()[None], "expected a matrix"),
    "no_rows.npy": (scores()[:0], "expected a matrix"),
    "integers.npy": (np.arange(N * C).reshape(N, C), "floating-point"),
    "complex.npy": (scores() + 1j, "expected numbers"),
    "objects.npy": (np.array([[0.5, "a"], [0.1, None]], dtype=object), "expected numbers"),
    "strings.npy": (np.array([["a", "b"]]), "expected numbers"),
    "no_sims.npy": ({"a": scores(), "b": scores()}, "one of the name sims; it has a, b"),
}
OUTPUTS = {"--out": "o.npz", "--rankings": "r.npz", "--report": "r.html", "--queries": "q.csv"}


@pytest.mark.parametrize("name", [*CONTENT, *ARRAYS, "short.npy"])
def test_a_bad_file_gets_one_line_and_leaves_nothing(name: str, tmp_path: Path, capsys):
    path = tmp_path / name
    if name in CONTENT:
        content, message = CONTENT[name]
        path.write_bytes(content)
    else:
        array, message = ARRAYS.get(name, (scores(), "not a readable .npy"))
        np.save(path, array)
    if name == "short.npy":
        path.write_bytes(path.read_bytes()[:-100])
    before = set(tmp_path.iterdir())
    outputs = []
    for option, output in OUTPUTS.items():
        outputs += [option, tmp_path / output]
    said = refused(capsys, "rerank", path, "--methods", "fast", *outputs)
    assert path.name in said
    assert re.search(message, said)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "name", ["missing.npy", "image_ids-val.npy", "text_ids.npy", "image_ids/s.npy"]
)
def test_a_missing_file_keeps_its_name_in_the_message(name: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert f"rerank: {name}: there is no such file" in refused(capsys, "rerank", name)


def test_damaged_data_of_the_chosen_array_are_named(tmp_path: Path):
    path = tmp_path / "s.npz"
    np.savez_compressed(path, sims=np.random.default_rng(0).normal(size=(60, 120)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"s\.npz: not a readable \.npz file"):
        read_matrix(path)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("kind", ["sparse", "float8", "meta", "nested"])
def test_tensors_that_are_no_matrices_of_numbers_are_refused(kind: str, tmp_path: Path, capsys):
    x = torch.from_numpy(scores())
    made = {
        "sparse": x.to_sparse(),
        "float8": x.to(torch.float8_e4m3fn),
        "meta": x.to("meta"),
        "nested": torch.nested.nested_tensor([x[0], x[1, :3]]),
    }
    torch.save(made[kind], tmp_path / "sims.pt")
    said = refused(capsys, "rerank", tmp_path / "sims.pt")
    # PyTorch 2.15 no longer reads nested tensors from untrusted files.
    is_unread = kind == "nested" and "not a readable .pt file" in said
    assert "expected a dense tensor" in said or is_unread


# --- memory ---------------------------------------------------------------------------------------


def test_a_tensor_expanded_from_a_few_bytes_is_refused(tmp_path: Path, capsys):
    torch.save(torch.randn(1).expand(10**6, 10**6), tmp_path / "bomb.pt")
    said = refused(capsys, "rerank", tmp_path / "bomb.pt")
    assert "expected a tensor that holds each of its numbers" in said


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
    with pytest.raises(ValueError, match=r"s\.npz: speaks of more data than there is memory"):
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


# --- hostile files --------------------------------------------------------------------------------


class Evil:
    """An object whose unpickling makes a directory."""

    def __reduce__(self):
        return os.mkdir, (os.environ["ITRLOSS_TEST_EVIL"],)


EVIL_FILES = {
    "evil.pkl": lambda path: path.write_bytes(pickle.dumps({"sims": Evil()})),
    "evil.pt": lambda path: torch.save({"sims": Evil()}, path),
    "evil.npy": lambda path: np.save(path, np.array([Evil()], dtype=object)),
    "evil.npz": lambda path: np.savez(path, sims=np.array([Evil()], dtype=object)),
}


@pytest.mark.parametrize("name", EVIL_FILES)
def test_nothing_in_a_file_is_executed(name: str, tmp_path: Path, monkeypatch, capsys):
    mark = tmp_path / "executed"
    monkeypatch.setenv("ITRLOSS_TEST_EVIL", str(mark))
    EVIL_FILES[name](tmp_path / name)
    refused(capsys, "rerank", tmp_path / name)
    assert not mark.exists()


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


OBJECT_DTYPE = (  # numpy.dtype("O8") with flags that claim that items are not references
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR(K\x03X\x01\x00\x00\x00|NNN"
    b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
ADDRESS = b"C\x08AAAAAAAA"
EMPTY_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
HOSTILE = {
    "array": pickled(EMPTY_ARRAY, b"(K\x01K\x01\x85", OBJECT_DTYPE, b"\x89", ADDRESS, b"tb"),
    "constructor": pickled(b"cnumpy\nndarray\n(K\x01\x85X\x01\x00\x00\x00O", ADDRESS, b"tR"),
    "offset": pickled(
        b"cnumpy\nndarray\n(K\x02K\x02\x86X\x02\x00\x00\x00f8C\x20",
        b"A" * 32,
        b"J\xf0\xff\xff\xfftR",
    ),
    "scalar": pickled(b"cnumpy.core.multiarray\nscalar\n(", OBJECT_DTYPE, ADDRESS, b"tR"),
    "buffer": pickled(
        b"cnumpy.core.numeric\n_frombuffer\n(",
        ADDRESS,
        OBJECT_DTYPE,
        b"K\x01\x85X\x01\x00\x00\x00CtR",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_bytes_of_a_pickle_are_taken_for_addresses(name: str, tmp_path: Path):
    """A process of its own reads the file, as it would crash."""
    path = tmp_path / "sims.pkl"
    path.write_bytes(HOSTILE[name])
    process = os.fork()
    if process == 0:
        code = 1
        try:
            read_matrix(path)
        except ValueError:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    assert status == 0
