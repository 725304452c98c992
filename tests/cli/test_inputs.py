"""Input in the forms that people have it in: files, ids, sizes and arrays."""

from __future__ import annotations

import argparse
import codecs
import collections
import json
import pickle
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import itrloss
from itrloss import files, metrics, rerank

SCORES = np.random.default_rng(0).random((4, 20)).astype(np.float32)
IDS = [7, -1, 2**40, 7]
NAMES = ["a dog.jpg", "b.jpg", "ü.jpg", "a dog.jpg"]


def _frame(**options) -> str:
    import pandas

    return pandas.DataFrame(SCORES).to_csv(**options)


def _pickled(value: object) -> bytes:
    return pickle.dumps(value)


def _torch_file(path: Path, value: object, **options) -> None:
    torch.save(value, path, **options)


def _safetensors(path: Path, tensors: dict) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})


def _mat(path, values: dict) -> None:
    from scipy.io import savemat

    savemat(path, values)


def _hdf5(path: Path, values: dict, mode: str = "w") -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, mode, userblock_size=512 if path.suffix == ".mat" else 0) as file:
        for name, value in values.items():
            file[name] = value


S = torch.from_numpy(SCORES)
MATRIX_FILES = {
    "a.Npy": lambda path: np.save(path.open("wb"), SCORES),
    "fortran.npy": lambda path: np.save(path, np.asfortranarray(SCORES)),
    "swapped.npy": lambda path: np.save(path, SCORES.astype(">f4")),
    "a.NPZ": lambda path: np.savez(path.open("wb"), sims=SCORES, other=SCORES[:1]),
    "a.PT": lambda path: _torch_file(path, S),
    "a.pth": lambda path: _torch_file(path, {"epoch": 3, "sims": S}),
    "old.PTH.TAR": lambda path: _torch_file(path, S, _use_new_zipfile_serialization=False),
    "list.pkl": lambda path: path.write_bytes(_pickled({"sims": S.clone(), "names": ["a"]})),
    "parameter.pkl": lambda path: path.write_bytes(_pickled(torch.nn.Parameter(S.clone()))),
    "view.pickle": lambda path: path.write_bytes(_pickled(torch.cat([S, S]).T.contiguous().T[4:])),
    "a.SafeTensors": lambda path: _safetensors(path, {"x": S.clone()}),
    "half.safetensors": lambda path: _safetensors(
        path, {"sims": S.bfloat16(), "ids": torch.arange(3)}
    ),
    "plain.csv": lambda path: path.write_text(_frame(index=False, header=False)),
    "numbered.csv": lambda path: path.write_text(_frame(index=False)),
    "pandas.csv": lambda path: path.write_text(_frame()),
    "semicolons.CSV": lambda path: path.write_text(_frame(sep=";"), encoding="utf-8-sig"),
    "tabs.csv": lambda path: path.write_text(_frame(sep="\t"), encoding="utf-16"),
    "a.MAT": lambda path: _mat(path.open("wb"), {"S": SCORES}),
    "a.h5": lambda path: _hdf5(path, {"deep/scores": SCORES}),
    "a.HDF5": lambda path: _hdf5(path, {"sims": SCORES, "other": SCORES}),
    "new.mat": lambda path: _hdf5(path, {"sims": SCORES.T}),
}


@pytest.mark.parametrize("name", MATRIX_FILES)
def test_a_matrix_is_read_from_any_of_the_formats(name: str, tmp_path: Path):
    path = tmp_path / name
    MATRIX_FILES[name](path)
    found = files.read_matrix(path)
    loose = 0.01 if name.startswith("half") else 1e-6
    np.testing.assert_allclose(found.float().numpy(), SCORES, rtol=loose)


ID_FILES = {
    "blanks.txt": lambda path: path.write_text("7 -1\t1099511627776\r\n7\n"),
    "a.TXT": lambda path: path.write_text("7\n-1\n1099511627776\n7", encoding="utf-8-sig"),
    "wide.txt": lambda path: path.write_text("7\n-1\n1099511627776\n7\n", encoding="utf-16"),
    "header.csv": lambda path: path.write_text("image_id\n7\n-1\n1099511627776\n7\n"),
    "row.csv": lambda path: path.write_text("7, -1, 1099511627776, 7"),
    "series.csv": lambda path: path.write_text(",id\n0,7\n1,-1\n2,1099511627776\n3,7\n"),
    "list.json": lambda path: path.write_text(json.dumps(IDS)),
    "entry.JSON": lambda path: path.write_text(json.dumps({"ids": IDS}), encoding="utf-8-sig"),
    "row.npy": lambda path: np.save(path, np.array([IDS])),
    "objects.npy": lambda path: np.save(path, np.array(IDS, dtype=object)),
    "floats.npz": lambda path: np.savez(path, ids=np.array(IDS, dtype=np.float64)),
    "list.pt": lambda path: _torch_file(path, IDS),
    "column.pkl": lambda path: path.write_bytes(_pickled(torch.tensor(IDS)[:, None])),
    "a.safetensors": lambda path: _safetensors(path, {"ids": torch.tensor(IDS)}),
    "matlab.mat": lambda path: _mat(path, {"ids": np.array(IDS, dtype=np.float64)}),
    "a.h5": lambda path: _hdf5(path, {"ids": IDS}),
}


@pytest.mark.parametrize("name", ID_FILES)
def test_integer_ids_are_read_from_any_of_the_formats(name: str, tmp_path: Path):
    ID_FILES[name](tmp_path / name)
    found = files.read_ids(tmp_path / name)
    assert found.dtype == torch.int64 and found.tolist() == IDS


NAME_FILES = {
    "lines.txt": lambda path: path.write_text("\n".join(NAMES), encoding="utf-8"),
    "excel.csv": lambda path: path.write_text("\r\n".join(NAMES), encoding="utf-8-sig"),
    "list.json": lambda path: path.write_text(json.dumps(NAMES)),
    "bytes.npy": lambda path: np.save(path, np.array([x.encode() for x in NAMES])),
    "objects.npy": lambda path: np.save(path, np.array(NAMES, dtype=object)),
    "a.npz": lambda path: np.savez(path, names=np.array([NAMES])),
    "list.pkl": lambda path: path.write_bytes(_pickled(NAMES)),
    "array.pkl": lambda path: path.write_bytes(_pickled({"names": np.array(NAMES)})),
    "list.pth.tar": lambda path: _torch_file(path, NAMES),
    "a.h5": lambda path: _hdf5(path, {"names": NAMES}),
}


@pytest.mark.parametrize("name", NAME_FILES)
def test_names_get_the_same_numbers_from_all_formats(name: str, tmp_path: Path):
    NAME_FILES[name](tmp_path / name)
    found = files.read_ids(tmp_path / name)
    sim = itrloss.Similarity(torch.eye(4), torch.eye(4), NAMES, NAMES)
    assert torch.equal(found, sim.ids[0]) and len(set(found.tolist())) == 3


def test_a_column_of_a_table_is_chosen_by_its_header(tmp_path: Path):
    path = tmp_path / "captions.csv"
    path.write_text('image,caption\n3,"a dog, running"\n4,a cat\n')
    assert files.read_ids(path, "image").tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"expected one column, .*it has image, caption"):
        files.read_ids(path)
    with pytest.raises(ValueError, match="a column of the name 'text'; it has image, caption"):
        files.read_ids(path, "text")


@pytest.mark.parametrize("module", ["scipy.io", "h5py"])
def test_an_extra_that_is_missing_is_named(module: str, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    path = tmp_path / ("s.mat" if module == "scipy.io" else "s.h5")
    path.write_bytes(b"MATLAB 5.0 MAT-file")
    with pytest.raises(ImportError, match=r"pip install 'itrloss\[files\]'"):
        files.read_matrix(path)


def _large_tensor() -> bytes:
    """Return a pickle whose tensor claims more numbers than its storage has."""
    data = pickle.dumps(torch.zeros(2, 3), protocol=2)
    at = data.rindex(b"K\x02K\x03\x86")
    return data[:at] + b"M\xff\xffK\x03\x86" + data[at + 5 :]


BAD_FILES = {
    "large.pkl": (_large_tensor(), "not a readable .pkl"),
    "code.pkl": (pickle.dumps(collections.Counter), "collections.Counter, which is not read"),
    "long.safetensors": (struct.pack("<Q", 2**60), "its header is longer than the file"),
    "eight.safetensors": (
        struct.pack("<Q", 60)
        + b'{"s":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[0,1]}}  '[:60]
        + b"0",
        "of 16 bits at least, got F8_E4M3",
    ),
    "short.safetensors": (
        struct.pack("<Q", 56) + b'{"s":{"dtype":"F32","shape":[9,9],"data_offsets":[0,4]}}0000',
        "not a readable .safetensors",
    ),
    "words.csv": (b"a,b\n0.1,x\n", "could not convert string to float: 'x'"),
    "empty.csv": (b"\xef\xbb\xbf", "the file is empty"),
    "latin.csv": (b"0.1,\xff\n", "expected UTF-8"),
    "text.mat": (b"not MATLAB", "not a readable .mat"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name: str, tmp_path: Path):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        files.read_matrix(tmp_path / name)
    assert name in str(error.value)


@pytest.mark.parametrize("start", [codecs.BOM_UTF8, b""])
def test_lines_have_no_byte_order_mark(start: bytes, tmp_path: Path):
    path = tmp_path / "captions.txt"
    path.write_bytes(start + "a\u2028b\r\nü\n".encode())
    assert files.read_lines(path) == ["a\u2028b", "ü"]


# -------------------------------------------------------------------------------------------- ids


def _pandas(ids):
    import pandas

    return pandas.Series(ids)


X, Y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
NUMBERS = [3, 3, 0, 200, 200, 1]
WORDS = ["x", "x", "", "yy", "yy", "ß"]
FORMS = {
    "list": lambda x: x,
    "tuple": tuple,
    "array": np.array,
    "read-only": lambda x: np.broadcast_to(np.array(x)[::-1].copy()[::-1], len(x)),
    "column": lambda x: np.array(x)[:, None],
    "objects": lambda x: np.array(x, dtype=object),
    "series": _pandas,
}
INTEGER_FORMS = {
    "uint8": lambda x: np.array(x, np.uint8),
    "uint16": lambda x: torch.tensor(x, dtype=torch.uint16),
    "big-endian": lambda x: np.array(x, ">i4"),
    "tensors": lambda x: [torch.tensor(i) for i in x],
    "NumPy integers": lambda x: [np.int16(i) for i in x],
    "tensor column": lambda x: torch.tensor(x)[:, None],
}


@pytest.mark.parametrize("form", [*FORMS, *INTEGER_FORMS])
def test_ids_of_any_form_are_the_same(form: str):
    make = {**FORMS, **INTEGER_FORMS}[form]
    ids = torch.tensor(NUMBERS)
    expected = itrloss.InfoNCELoss()(X, Y, ids, ids)
    assert torch.equal(itrloss.InfoNCELoss()(X, Y, make(NUMBERS), make(NUMBERS)), expected)
    if form in FORMS:
        assert torch.equal(itrloss.InfoNCELoss()(X, Y, make(WORDS), list(WORDS)), expected)


def _memory_loss(ids):
    memory = itrloss.CoupledMemory(8, 8)
    memory.enqueue(Y[:4], X[:4], ids[:4])
    return itrloss.MemoryDiversityContrastiveLoss()(X, Y, X, Y, memory, ids, ids)


def _batches(ids):
    metric = metrics.RetrievalMetrics()
    for some in (slice(0, 2), slice(2, 6)):
        metric.update(X[some], Y[some], ids[some], ids[some])
    return metric.compute()["rsum"]


TAKERS = {
    "Similarity": lambda ids: itrloss.Similarity(X, Y, ids, ids).positive_counts,
    "scores": lambda ids: itrloss.Similarity.from_scores(X @ Y.T, ids, ids).positive_counts,
    "memory": _memory_loss,
    "bidirectional": lambda ids: itrloss.InfoNCELoss(joint=True, text_text=True)(X, Y, ids, ids),
    "metrics": lambda ids: metrics.retrieval_metrics(X @ Y.T, ids, ids)["rsum"],
    "batches": _batches,
    "mining": lambda ids: itrloss.mine_hard_negatives(X, Y, ids, ids, 2).indices,
    "calibrate": lambda ids: torch.tensor(
        rerank.FastReranker().calibrate(X @ Y.T, ids, ids, scales=[1, 5]).i2t
    ),
}


@pytest.mark.parametrize("name", TAKERS)
def test_names_and_lists_are_ids_wherever_ids_are_taken(name: str):
    take = TAKERS[name]
    expected = torch.as_tensor(take(torch.tensor(NUMBERS)))
    for ids in (NUMBERS, np.array(NUMBERS), WORDS, np.array(WORDS)):
        assert torch.equal(torch.as_tensor(take(ids)), expected)


BAD_IDS = {
    "fractions": ([0.5] * 6, "image_ids: expected an integer"),
    "bools": ([True] * 6, "image_ids: expected an integer"),
    "None in it": ([1, 2, None, 3, 4, 5], "image_ids: expected an integer"),
    "mixed": (["1", 2, "3", 4, 5, 6], "image_ids: expected an integer"),
    "ragged": ([[1], [2, 3]], "image_ids: expected an integer"),
    "one string": ("abcdef", "image_ids: expected shape"),
    "too few": ([1, 2], r"image_ids: expected shape \(6,\), got \(2,\)"),
    "strings beside integers": (WORDS, "text_ids: expected strings beside strings"),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_other_ids_are_refused_by_name(name: str):
    ids, message = BAD_IDS[name]
    others = NUMBERS if name == "strings beside integers" else ids
    with pytest.raises((TypeError, ValueError), match=message):
        itrloss.InfoNCELoss()(X, Y, ids, others)


def test_many_names_have_numbers_of_their_own():
    names = [f"{i}.jpg" for i in range(10_000)]
    ids = itrloss.Similarity(torch.zeros(10_000, 1), torch.zeros(10_000, 1), names, names).ids[0]
    assert len(ids.unique()) == 10_000 and int(ids.min()) >= 0


def test_strings_are_no_row_numbers():
    with pytest.raises(TypeError, match=r"text_ids: expected an integer .* got list of strings"):
        itrloss.InfoNCELoss()(X, Y, None, WORDS)


LARGE_IDS = np.array([2**63 + i for i in range(6)], dtype=np.uint64)
LARGE_IDS_CALLS = {
    "a list": lambda: itrloss.InfoNCELoss()(X, Y, LARGE_IDS.tolist(), LARGE_IDS.tolist()),
    "mining": lambda: itrloss.mine_hard_negatives(X, Y, LARGE_IDS, LARGE_IDS, 3),
    "a memory": lambda: itrloss.CoupledMemory(20, 8).enqueue(X, Y, LARGE_IDS),
}


@pytest.mark.parametrize("name", LARGE_IDS_CALLS)
def test_ids_beyond_int64_are_refused(name: str):
    with pytest.raises(ValueError, match=r"expected ids below 2\*\*63, got larger ones"):
        LARGE_IDS_CALLS[name]()


@pytest.mark.parametrize("kind", [np.ulonglong, np.longlong, np.uint64, np.uintc])
def test_ids_have_any_of_numpys_integer_types(kind):
    ids = np.abs(NUMBERS)
    wanted = itrloss.InfoNCELoss()(X, Y, ids, ids)
    assert torch.equal(itrloss.InfoNCELoss()(X, Y, ids.astype(kind), ids.astype(kind)), wanted)


MISSING_IDS = {
    "blank lines.txt": ("a\n\nb\n\nc\n", None),
    "empty names.csv": ('id\na\n""\nb\n""\n', None),
    "nan.csv": ("id\n3.0\nnan\n4.0\nnan\n", None),
    "empty numbers.csv": ("id,x\n3,a\n,b\n4,c\n,d\n", "id"),
    "null.json": (json.dumps(["a", None, "b", None]), None),
    "empty strings.json": (json.dumps(["a", "", "b", ""]), None),
}


@pytest.mark.parametrize("name", MISSING_IDS)
def test_missing_ids_do_not_match_each_other(name: str, tmp_path: Path):
    text, column = MISSING_IDS[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=name):
        files.read_ids(path, column)


# -------------------------------------------------------------------------------- arrays and sizes


def test_arrays_are_embeddings_and_scores_where_nothing_is_trained():
    x = X.numpy()
    y = np.asfortranarray(Y.numpy())
    y.flags.writeable = False
    scores = (X @ Y.T).numpy()
    expected = metrics.retrieval_metrics(itrloss.Similarity(X, Y))
    assert metrics.retrieval_metrics(itrloss.Similarity(x, y)) == expected
    assert metrics.retrieval_metrics(scores[::-1][::-1]) == metrics.retrieval_metrics(X @ Y.T)
    pair = scores, scores.astype(">f4")
    assert metrics.retrieval_metrics(pair) == metrics.retrieval_metrics(X @ Y.T)
    listed = [0, 1, 2], np.array([0, 1, 2])
    tensors = torch.arange(3), torch.arange(3)
    results = [metrics.retrieval_metrics(scores, relevant=x) for x in (listed, tensors)]
    assert results[0] == results[1]
    judged = metrics.Judgements([0, 1, 2], np.array([2, 1, 0]), np.array([1, 0, 2]))
    tensors = metrics.Judgements(
        torch.tensor([0, 1, 2]), torch.tensor([2, 1, 0]), torch.tensor([1, 0, 2])
    )
    assert metrics.agreement(scores, judged) == metrics.agreement(X @ Y.T, tensors)
    assert torch.equal(judged.at_least(1)[0], tensors.at_least(1)[0])
    for method in (rerank.CSLS(2).fit(images=x, texts=y), rerank.CSLS(2).fit(images=X, texts=Y)):
        found = method.topk(itrloss.Similarity(x, Y), 2)[0]
        results.append(found)
    assert torch.equal(results[-1].indices, results[-2].indices)
    found = itrloss.mine_hard_negatives(x, y, NUMBERS, NUMBERS, 2)
    wanted = itrloss.mine_hard_negatives(X, Y, torch.tensor(NUMBERS), torch.tensor(NUMBERS), 2)
    assert torch.equal(found.indices, wanted.indices)


@pytest.mark.parametrize("options", [{}, {"scores": SCORES}])
def test_a_loss_is_not_trained_on_arrays(options):
    inputs = () if options else (X.numpy(), Y.numpy())
    with pytest.raises(TypeError, match=r"expected a floating-point tensor .* got ndarray"):
        itrloss.InfoNCELoss()(*inputs, **options)


SETS = torch.stack([X, Y, X.flip(0)], 1)
EXCLUDED = (X @ Y.T > 0.5).numpy()
SIM = itrloss.Similarity(X, Y)


def figures(**options):
    return metrics.retrieval_metrics((X @ Y.T).tanh(), **options)


def scipy_matrix(kind: str, numbers: np.ndarray):
    return getattr(pytest.importorskip("scipy.sparse"), kind)(numbers)


def pandas_table(numbers: np.ndarray):
    return pytest.importorskip("pandas").DataFrame(numbers)


# Calls with input of a further form, and with the same of the documented one.
FURTHER_FORMS = {
    "hardness in a list": (
        lambda: itrloss.InfoNCELoss(hardness=[0, 5])(X, Y),
        lambda: itrloss.InfoNCELoss(hardness=(0.0, 5.0))(X, Y),
    ),
    "hardness of float16": (
        lambda: itrloss.InfoNCELoss(hardness=np.float16(9))(X, Y),
        lambda: itrloss.InfoNCELoss(hardness=9.0)(X, Y),
    ),
    "a temperature that is a fraction": (
        lambda: itrloss.SupConLoss(Fraction(1, 8))(X, Y),
        lambda: itrloss.SupConLoss(0.125)(X, Y),
    ),
    "a guide of arrays": (
        lambda: itrloss.InfoNCELoss(margin=0.1)(X, Y, guide=(Y.numpy(), Y.numpy())),
        lambda: itrloss.InfoNCELoss(margin=0.1)(X, Y, guide=(Y, Y)),
    ),
    "a teacher that is an array": (
        lambda: itrloss.DistillationLoss()(X, Y, (X @ Y.T).double().numpy()),
        lambda: itrloss.DistillationLoss()(X, Y, (X @ Y.T).double()),
    ),
    "byte strings as ids, as HDF5 has them": (
        lambda: itrloss.InfoNCELoss()(X, Y, *[np.array([b"x", b"y", b"z"] * 2)] * 2),
        lambda: itrloss.InfoNCELoss()(X, Y, *[["x", "y", "z"] * 2] * 2),
    ),
    "a budget of NumPy's type": (
        lambda: itrloss.Similarity(X, Y, memory_budget=np.int64(0)).logsumexp(3.0),
        lambda: itrloss.Similarity(X, Y, memory_budget=0).logsumexp(3.0),
    ),
    "a bias that is an array": (
        lambda: itrloss.Similarity(X, Y, bias=[np.ones(6), None]).scores(),
        lambda: itrloss.Similarity(X, Y, bias=(torch.ones(6), None)).scores(),
    ),
    "sets that are arrays": (
        lambda: itrloss.functional.set_similarity(SETS.numpy(), SETS.numpy()),
        lambda: itrloss.functional.set_similarity(SETS, SETS),
    ),
    "a mask in lists": (
        lambda: itrloss.functional.set_similarity(SETS, SETS, image_mask=[[1, 1, 0]] * 6),
        lambda: itrloss.functional.set_similarity(SETS, SETS, image_lengths=torch.full((6,), 2)),
    ),
    "limits of mining in an array": (
        lambda: itrloss.mine_hard_negatives(X, Y, range(6), range(6), 3, below=np.full(6, 0.3)),
        lambda: itrloss.mine_hard_negatives(X, Y, range(6), range(6), 3, below=0.3),
    ),
    "K in an array": (lambda: figures(ks=np.array([1, 3])), lambda: figures(ks=(1, 3))),
    "scores in a table of pandas": (
        lambda: metrics.retrieval_metrics(pandas_table(SCORES)),
        lambda: metrics.retrieval_metrics(S),
    ),
    "two matrices in a list": (
        lambda: metrics.retrieval_metrics([S, S]),
        lambda: metrics.retrieval_metrics((S, S)),
    ),
    "right pairs in a matrix of SciPy": (
        lambda: figures(relevant=scipy_matrix("csr_array", EXCLUDED.astype(float))),
        lambda: figures(relevant=torch.from_numpy(EXCLUDED).double()),
    ),
    "right texts in lists": (
        lambda: figures(relevant=[[i, (i + 1) % 6] for i in range(6)]),
        lambda: figures(relevant=torch.eye(6) + torch.eye(6).roll(1, 1)),
    ),
    "excluded pairs in a matrix of SciPy": (
        lambda: figures(exclude=scipy_matrix("coo_matrix", EXCLUDED.astype(float))),
        lambda: figures(exclude=EXCLUDED),
    ),
    "excluded pairs as integers": (
        lambda: figures(exclude=EXCLUDED.astype(int)),
        lambda: figures(exclude=EXCLUDED),
    ),
    "judgements in lists": (
        lambda: metrics.Judgements([0, 1], [1, 0], [0.5, 1.0]).at_least(0.7),
        lambda: metrics.Judgements(
            torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([0.5, 1.0])
        ).at_least(0.7),
    ),
}


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("name", FURTHER_FORMS)
def test_input_may_have_a_further_form(name: str):
    given, plain = FURTHER_FORMS[name]
    torch.testing.assert_close(given(), plain(), rtol=0, atol=0)


INTEGERS = [np.int64, np.uint8, np.int16, torch.tensor, np.array]
SIZED = {
    "memory": lambda k: itrloss.CoupledMemory(k(200), k(8)).images.shape,
    "prototypes": lambda k: itrloss.PrototypeClassificationLoss(k(8), k(4)).weight.shape,
    "kmeans": lambda k: itrloss.OnlineKMeans(k(5), k(8)).centroids.shape,
    "topk": lambda k: itrloss.Similarity(X, Y).topk(k(3)).indices.shape,
    "mining": lambda k: (
        itrloss.mine_hard_negatives(X, Y, NUMBERS, NUMBERS, k(2), block=k(3))[0].shape
    ),
    "kreciprocal": lambda k: (
        rerank.KReciprocalReranker(k1=k(3), k2=k(2))
        .topk(itrloss.Similarity(X, Y), k(2))[0][0]
        .shape
    ),
    "samples": lambda k: metrics.confidence_intervals(
        metrics.retrieval_results(X @ Y.T, hubness_k=k(2)), samples=k(200)
    ),
    "matryoshka": lambda k: itrloss.Matryoshka(itrloss.InfoNCELoss(), [k(2), k(8)]).dims,
}


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.__name__)
def test_sizes_may_be_integers_of_any_type(name: str, kind):
    assert SIZED[name](kind) == SIZED[name](int)


@pytest.mark.parametrize("size", [True, np.True_, 2.0, np.float32(2), "2", np.array([2, 3]), None])
def test_a_size_is_an_integer(size):
    with pytest.raises(TypeError, match="k: expected an integer, got"):
        itrloss.Similarity(X, Y).topk(size)


# ------------------------------------------------------------------------- devices, parts and masks
# tests/test_surroundings.py has the default device of all but files.


@pytest.fixture
def default_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(
    "name", ["a.npy", "a.csv", "a.pkl", "a.safetensors", "ids.txt", "names.txt"]
)
def test_a_default_device_does_not_matter_for_files(name: str, tmp_path: Path, request):
    path = tmp_path / name
    writers = {
        "a.npy": lambda: np.save(path, SCORES),
        "a.csv": lambda: np.savetxt(path, SCORES, delimiter=","),
        "a.pkl": lambda: path.write_bytes(pickle.dumps(S.clone())),
        "a.safetensors": lambda: _safetensors(path, {"s": S.clone()}),
        "ids.txt": lambda: path.write_text("1\n2"),
        "names.txt": lambda: path.write_text("a\nb"),
    }
    writers[name]()
    request.getfixturevalue("default_device")
    found = files.read_ids(path) if path.suffix == ".txt" else files.read_matrix(path)
    assert found.device.type == "cpu"


def _negatives(d: int):
    z = Y.flip(0)[:3]
    return itrloss.InfoNCELoss()(X[:, :d], Y[:, :d], negatives=z[:, :d])


def _keys(d: int):
    memory = itrloss.CoupledMemory(4, d)
    memory.enqueue(Y[:3, :d], X[:3, :d])
    return itrloss.MemoryDiversityContrastiveLoss()(
        X[:, :d], Y[:, :d], Y.flip(0)[:, :d], X.flip(0)[:, :d], memory
    )


def test_matryoshka_cuts_negatives_keys_and_memories():
    found = itrloss.Matryoshka(itrloss.InfoNCELoss(), (3, 8))(X, Y, negatives=Y.flip(0)[:3])
    torch.testing.assert_close(found, _negatives(3) + _negatives(8))
    memory = itrloss.CoupledMemory(4, 8)
    memory.enqueue(Y[:3], X[:3])
    loss = itrloss.Matryoshka(itrloss.MemoryDiversityContrastiveLoss(), (3, 8))
    expected = _keys(3) + _keys(8)
    torch.testing.assert_close(loss(X, Y, Y.flip(0), X.flip(0), memory), expected)
    found = loss(X, Y, image_keys=Y.flip(0), text_keys=X.flip(0), memory=memory)
    torch.testing.assert_close(found, expected)


def test_matryoshka_cuts_the_first_two_arguments_of_a_loss_of_any_names():
    class Own(torch.nn.Module):
        def forward(self, v, w, *more):
            return (v * w).sum() + sum(more)

    found = itrloss.Matryoshka(Own(), (3, 8))(X, Y, 1.0, 2.0)
    torch.testing.assert_close(found, (X * Y)[:, :3].sum() + (X * Y).sum() + 6)


@pytest.mark.filterwarnings("ignore::itrloss.suspicious.SuspiciousInputWarning")
@pytest.mark.parametrize("size", [1, 4, 5, 6])
@pytest.mark.parametrize("options", [{"folds": 3}, {"reranker": rerank.FastReranker()}])
def test_a_metric_takes_batches_that_are_no_data_set(size: int, options):
    pytest.importorskip("torchmetrics")
    x, y = torch.randn(2, 21, 8, generator=torch.Generator().manual_seed(1))
    metric = metrics.RetrievalMetrics(**options)
    for some in torch.arange(21).split(size):
        metric(x[some], y[some])
    found = {name: float(value) for name, value in metric.compute().items()}
    assert found == metrics.retrieval_metrics(itrloss.Similarity(x, y), **options)


MASKS = {
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]],
    "all": [[1] * 5] * 2,
    "one empty": [[0] * 5, [1, 1, 0, 0, 1]],
    "right": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
}


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
@pytest.mark.parametrize(
    "aggregation", ["max", "mean", "max_sum", "smooth_max_sum", "smooth_chamfer"]
)
@pytest.mark.parametrize("name", MASKS)
def test_masks_leave_out_elements_as_if_they_were_not_there(name: str, aggregation, kind):
    make = torch.Generator().manual_seed(0)
    sets = torch.randn(2, 5, 6, dtype=torch.float64, generator=make)
    sets.requires_grad_()
    others = torch.randn(3, 4, 6, dtype=torch.float64, generator=make)
    mask = torch.tensor(MASKS[name], dtype=kind)
    found = itrloss.functional.set_similarity(others, sets, aggregation, text_mask=mask)
    turned = itrloss.functional.set_similarity(sets, others, aggregation, image_mask=mask)
    parts = [x[m.bool()][None] for x, m in zip(sets, mask, strict=True)]
    for i, part in enumerate(parts):
        if not part.shape[1]:
            assert not found[:, i].any()
            continue
        alone = itrloss.functional.set_similarity(others, part, aggregation)
        torch.testing.assert_close(found[:, i : i + 1], alone)
        alone = itrloss.functional.set_similarity(part, others, aggregation)
        torch.testing.assert_close(turned[i : i + 1], alone)
    (gradient,) = torch.autograd.grad(found.sum(), sets)
    assert not gradient[~mask.bool()].any()


BAD_MASKS = {
    "shape": (torch.ones(2, 4, dtype=torch.bool), {}, r"text_mask: expected shape \(2, 5\)"),
    "fractions": (torch.ones(2, 5), {}, "text_mask: expected a bool tensor"),
    "a string": ("1 1 0", {}, "text_mask: expected a bool tensor .*str"),
    "lengths": (
        torch.ones(2, 5, dtype=torch.bool),
        {"text_lengths": torch.tensor([1, 2])},
        "text_mask: expected None beside text_lengths",
    ),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_other_masks_are_refused(name: str):
    mask, options, message = BAD_MASKS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        itrloss.functional.set_similarity(
            torch.randn(2, 5, 4), torch.randn(2, 5, 4), text_mask=mask, **options
        )


SIMS = (X @ Y.T).tanh()


def test_scores_with_ids_that_mask_are_a_call_of_laps():
    opt = argparse.Namespace(mask_repeat=1, margin=0.2)
    criterion = itrloss.compat.HREMLoss(opt=opt)
    sets = torch.randn(6, 3, 4), torch.randn(6, 5, 4)
    thresholds = 0.2 - SIMS.diagonal()
    negative = torch.tensor(NUMBERS)[:, None] != torch.tensor(NUMBERS)
    excess = (thresholds[:, None] + SIMS).relu() + (thresholds + SIMS).relu()
    expected = (excess * negative).sum()
    for ids in (torch.tensor(NUMBERS), NUMBERS, np.array(NUMBERS), WORDS):
        torch.testing.assert_close(criterion(*sets, ids, SIMS), expected)
    own = itrloss.compat.adapt(itrloss.InfoNCELoss(), "hrem")
    wanted = itrloss.InfoNCELoss()(scores=SIMS, image_ids=NUMBERS, text_ids=NUMBERS)
    torch.testing.assert_close(own(*sets, NUMBERS, SIMS), wanted)


@pytest.mark.parametrize("code_base", ["vsepp", "scan", "sgraf", "chan", "hal"])
def test_another_call_is_answered_with_the_one_of_the_code_base(code_base: str):
    score = (lambda im, s, lengths: SIMS) if code_base == "scan" else None
    criterion = itrloss.compat.adapt(itrloss.InfoNCELoss(), code_base, score)
    with pytest.raises(TypeError, match=rf"code_base '{code_base}': expected criterion\("):
        criterion(X, Y, NUMBERS, SIMS, 1, 2, 3)
