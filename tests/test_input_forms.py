"""Ids, arrays, options and sizes in the forms that people have them in."""

from __future__ import annotations

import tracemalloc
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from support.versions import unsigned

import itrloss
from itrloss import checks, metrics, rerank
from itrloss.cli.comparison import METHODS

X, Y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
NUMBERS = [3, 3, 0, 200, 200, 1]
WORDS = ["x", "x", "", "yy", "yy", "ß"]

# --- ids ------------------------------------------------------------------------------------------


def infonce(image_ids, text_ids):
    return itrloss.InfoNCELoss()(X, Y, image_ids, text_ids)


def pandas_series(ids):
    return pytest.importorskip("pandas").Series(ids)


def read_only(ids):
    backwards = np.array(ids)[::-1].copy()
    return np.broadcast_to(backwards[::-1], len(ids))


FORMS = {
    "list": lambda x: x,
    "tuple": tuple,
    "array": np.array,
    "read-only": read_only,
    "column": lambda x: np.array(x)[:, None],
    "objects": lambda x: np.array(x, dtype=object),
    "series": pandas_series,
}
INTEGER_FORMS = {
    "uint8": lambda x: np.array(x, np.uint8),
    "uintc": lambda x: np.array(x, np.uintc),
    "uint64": lambda x: np.array(x, np.uint64),
    "longlong": lambda x: np.array(x, np.longlong),
    "ulonglong": lambda x: np.array(x, np.ulonglong),
    "uint16": lambda x: torch.tensor(x, dtype=unsigned.uint16),
    "big-endian": lambda x: np.array(x, ">i4"),
    "tensors": lambda x: [torch.tensor(i) for i in x],
    "NumPy integers": lambda x: [np.int16(i) for i in x],
    "tensor column": lambda x: torch.tensor(x)[:, None],
}


@pytest.mark.parametrize("name", FORMS | INTEGER_FORMS)
def test_ids_may_have_any_form(name: str):
    make = (FORMS | INTEGER_FORMS)[name]
    wanted = infonce(torch.tensor(NUMBERS), torch.tensor(NUMBERS))
    assert torch.equal(infonce(make(NUMBERS), make(NUMBERS)), wanted)
    if name in FORMS:
        assert torch.equal(infonce(make(WORDS), list(WORDS)), wanted)


def loss_over_a_memory(ids):
    memory = itrloss.CoupledMemory(8, 8)
    memory.enqueue(Y[:4], X[:4], ids[:4])
    return itrloss.MemoryDiversityContrastiveLoss()(X, Y, X, Y, memory, ids, ids)


def figures_of_batches(ids):
    metric = metrics.RetrievalMetrics()
    metric.update(X[:2], Y[:2], ids[:2], ids[:2])
    metric.update(X[2:], Y[2:], ids[2:], ids[2:])
    return metric.compute()["rsum"]


def calibrated(ids):
    return rerank.FastReranker().calibrate(X @ Y.T, ids, ids, scales=[1, 5]).i2t


TAKERS = {
    "Similarity": lambda ids: itrloss.Similarity(X, Y, ids, ids).positive_counts,
    "scores": lambda ids: itrloss.Similarity.from_scores(X @ Y.T, ids, ids).positive_counts,
    "memory": loss_over_a_memory,
    "bidirectional": lambda ids: itrloss.InfoNCELoss(joint=True, text_text=True)(X, Y, ids, ids),
    "metrics": lambda ids: metrics.retrieval_metrics(X @ Y.T, ids, ids)["rsum"],
    "batches": figures_of_batches,
    "mining": lambda ids: itrloss.mine_hard_negatives(X, Y, ids, ids, 2).indices,
    "calibrate": calibrated,
}


@pytest.mark.parametrize("ids", [NUMBERS, np.array(NUMBERS), WORDS, np.array(WORDS)], ids=repr)
@pytest.mark.parametrize("name", TAKERS)
def test_ids_are_lists_arrays_and_strings_wherever_they_are_taken(name: str, ids):
    found = TAKERS[name](ids)
    wanted = TAKERS[name](torch.tensor(NUMBERS))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_many_names_have_numbers_of_their_own():
    names = [f"{i}.jpg" for i in range(10_000)]
    x = torch.zeros(10_000, 1)
    ids = itrloss.Similarity(x, x, names, names).ids[0]
    assert len(ids.unique()) == 10_000
    assert int(ids.min()) >= 0


# --- arrays ---------------------------------------------------------------------------------------

S = torch.rand(4, 20, generator=torch.Generator().manual_seed(0))
SCORES = X @ Y.T
SETS = torch.stack([X, Y, X.flip(0)], 1)
EXCLUDED = SCORES > 0.5
JUDGED = tuple(map(torch.tensor, ([0, 1, 2], [2, 1, 0], [1, 0, 2])))
GIVEN: list[tuple[np.ndarray, np.ndarray]] = []  # arrays that may not be written to, and copies


def protected(x: torch.Tensor) -> np.ndarray:
    """An array as of a file that is open for reading, to which nothing may be written."""
    array = x.numpy().copy()
    array.flags.writeable = False
    GIVEN.append((array, array.copy()))
    return array


def by_columns(x: torch.Tensor) -> np.ndarray:
    return np.asfortranarray(protected(x))


def backwards(x: torch.Tensor) -> np.ndarray:
    """An array with negative strides, and with the bytes of other processors."""
    array = protected(x)
    return array.astype(array.dtype.newbyteorder(">"))[::-1].copy()[::-1]


def figures(**options):
    return metrics.retrieval_metrics(SCORES.tanh(), **options)


def re_ranked(name: str):
    def best(a):
        x, y, scores = X.double(), Y.double(), SCORES.double()
        of_embeddings = itrloss.Similarity(a(x), a(y), normalize=False), (a(y), a(x))
        of_scores = a(scores), (a(scores.T), a(scores))
        found = []
        for given, bank in (of_embeddings, of_scores):
            method = METHODS[name]()
            if method.needs_bank:
                method.fit(*bank)
            if given is of_embeddings[0] or not method.needs_embeddings:
                found.append(method.topk(given, 3).i2t.values)
        return found

    return best


def clusters(a):
    means = itrloss.OnlineKMeans(3, 8)
    means.update(a(X))
    torch.manual_seed(0)
    means.fit(a(X))
    return means.centroids


def keys_of_a_memory(a):
    memory = itrloss.CoupledMemory(8, 8)
    memory.enqueue(a(X), a(Y), a(torch.arange(6)))
    return memory.images


def mined(a):
    ids = range(6)
    below = a(torch.full((6,), 0.3))
    return itrloss.mine_hard_negatives(a(X), a(Y), ids, ids, 3, below=below).indices


def with_a_bias(a):
    sim = itrloss.Similarity(a(X), a(Y), normalize=False, bias=(a(X[:, 0]), None))
    return metrics.retrieval_metrics(sim, exclude=a(EXCLUDED))


# All that takes arrays, which are made by ``a``. One that writes to a file's memory would end the
# process.
OF_ARRAYS = {
    **{name: re_ranked(name) for name in METHODS},
    "embeddings": lambda a: metrics.retrieval_metrics(itrloss.Similarity(a(X), a(Y))),
    "scores": lambda a: metrics.retrieval_metrics(a(SCORES)),
    "two matrices": lambda a: metrics.retrieval_metrics((a(SCORES), SCORES)),
    "a bias": with_a_bias,
    "grades": lambda a: figures(relevant=a(SCORES.abs())),
    "right pairs": lambda a: figures(relevant=(a(torch.arange(3)), [0, 1, 2])),
    "excluded pairs": lambda a: figures(exclude=a(EXCLUDED)),
    "excluded pairs as integers": lambda a: figures(exclude=a(EXCLUDED.long())),
    "judgements": lambda a: figures(relevant=metrics.Judgements(*(a(x) for x in JUDGED))),
    "mining": mined,
    "a memory": keys_of_a_memory,
    "k-means": clusters,
    "sets": lambda a: itrloss.functional.set_similarity(a(SETS), a(SETS)),
    "a guide": lambda a: itrloss.InfoNCELoss(margin=0.1)(X, Y, guide=(a(Y), a(Y))),
    "a teacher": lambda a: itrloss.DistillationLoss()(X, Y, a(SCORES)),
    "matches": lambda a: itrloss.InfoNCELoss()(X, Y, matches=a(EXCLUDED)),
    "matches as integers": lambda a: itrloss.InfoNCELoss()(X, Y, matches=a(EXCLUDED.long())),
    "K": lambda a: figures(ks=a(torch.tensor([1, 3])).tolist()),
}


@pytest.mark.parametrize("form", [protected, by_columns, backwards])
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_arrays_are_taken_as_tensors_are_and_not_written_to(name: str, form):
    GIVEN.clear()
    found = OF_ARRAYS[name](form)
    torch.testing.assert_close(found, OF_ARRAYS[name](lambda x: x))
    assert all(np.array_equal(*pair) for pair in GIVEN)


def infonce_of(matches):
    return itrloss.InfoNCELoss()(X, Y, matches=matches)


# Calls with input of a further form, and with the same of the documented one.
FURTHER_FORMS = {
    "judgements in lists": (
        lambda: metrics.Judgements(*(x.tolist() for x in JUDGED)).at_least(0.7),
        lambda: metrics.Judgements(*JUDGED).at_least(0.7),
    ),
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
    "byte strings as ids, as HDF5 has them": (
        lambda: infonce(np.array([b"x", b"y", b"\xff"] * 2), np.array([b"x", b"y", b"\xff"] * 2)),
        lambda: infonce(["x", "y", "z"] * 2, ["x", "y", "z"] * 2),
    ),
    "a budget of NumPy's type": (
        lambda: itrloss.Similarity(X, Y, memory_budget=np.int64(0)).logsumexp(3.0),
        lambda: itrloss.Similarity(X, Y, memory_budget=0).logsumexp(3.0),
    ),
    "a mask in lists": (
        lambda: itrloss.functional.set_similarity(SETS, SETS, image_mask=[[1, 1, 0]] * 6),
        lambda: itrloss.functional.set_similarity(SETS, SETS, image_lengths=torch.full((6,), 2)),
    ),
    "K in an array": (lambda: figures(ks=np.array([1, 3])), lambda: figures(ks=(1, 3))),
    "scores in a table of pandas": (
        lambda: metrics.retrieval_metrics(pytest.importorskip("pandas").DataFrame(S.numpy())),
        lambda: metrics.retrieval_metrics(S),
    ),
    "two matrices in a list": (
        lambda: metrics.retrieval_metrics([S, S]),
        lambda: metrics.retrieval_metrics((S, S)),
    ),
    "right texts in lists": (
        lambda: figures(relevant=[[i, (i + 1) % 6] for i in range(6)]),
        lambda: figures(relevant=torch.eye(6) + torch.eye(6).roll(1, 1)),
    ),
    "matches in a matrix of SciPy": (
        lambda: infonce_of(pytest.importorskip("scipy.sparse").csr_array(EXCLUDED.numpy())),
        lambda: infonce_of(EXCLUDED),
    ),
    "matches in a masked array without a mask": (
        lambda: infonce_of(np.ma.array(EXCLUDED.numpy(), mask=False)),
        lambda: infonce_of(EXCLUDED),
    ),
}


@pytest.mark.parametrize("name", FURTHER_FORMS)
def test_input_may_have_a_further_form(name: str):
    given, plain = FURTHER_FORMS[name]
    torch.testing.assert_close(given(), plain(), rtol=0, atol=0)


# --- memory that belongs to a file ----------------------------------------------------------------


def mapped(folder: Path, x: torch.Tensor) -> np.ndarray:
    """The numbers of a file, which are read where they are needed, and cannot be written to."""
    np.save(folder / "x.npy", x.numpy())
    return np.load(folder / "x.npy", mmap_mode="r")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_a_tensor_shares_the_memory_of_a_file(dtype, tmp_path: Path):
    given = mapped(tmp_path, (9 * S).to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checks.from_numpy(given).data_ptr() == given.ctypes.data
    if dtype.is_floating_point:
        sim = itrloss.Similarity.from_scores(given, range(4), range(20))
        assert sim.given_scores is not None
        assert sim.given_scores.data_ptr() == given.ctypes.data


WIDE = torch.rand(100, 500, generator=torch.Generator().manual_seed(0))
READERS = {
    "metrics": metrics.retrieval_metrics,
    "metrics of the re-ranked": lambda x: metrics.retrieval_metrics(x, reranker=rerank.CSLS()),
    "topk": lambda x: rerank.DualSoftmax().topk(x, 5),
    "calibration": lambda x: rerank.FastReranker().calibrate(x, scales=(1.0, 5.0)),
    "embeddings": lambda x: metrics.retrieval_metrics(itrloss.Similarity(x, x)),
    "mining": lambda x: itrloss.mine_hard_negatives(x, x, range(100), range(100), 3),
    "a bank": lambda x: rerank.CSLS().fit(images=x),
}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_a_file_is_not_copied(name: str, is_transposed: bool, tmp_path: Path):
    given = mapped(tmp_path, WIDE)
    if is_transposed:
        given = mapped(tmp_path, WIDE.T.contiguous()).T
    READERS[name](given)  # makes what is made once
    tracemalloc.start()  # counts what NumPy allocates
    try:
        READERS[name](given)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < given.nbytes


# --- sizes ----------------------------------------------------------------------------------------


def reranked(k):
    return rerank.CSLS(k(3)).topk(itrloss.Similarity(X, Y), k(2)).i2t.values.shape


def mined(k):
    return itrloss.mine_hard_negatives(X, Y, NUMBERS, NUMBERS, k(2), block=k(3)).indices.shape


def intervals(k):
    results = metrics.retrieval_results(SCORES, hubness_k=k(2))
    return metrics.confidence_intervals(results, samples=k(200))


SIZED = {
    "memory": lambda k: itrloss.CoupledMemory(k(200), k(8)).images.shape,
    "prototypes": lambda k: itrloss.PrototypeClassificationLoss(k(8), k(4)).weight.shape,
    "kmeans": lambda k: itrloss.OnlineKMeans(k(5), k(8)).centroids.shape,
    "topk": lambda k: itrloss.Similarity(X, Y).topk(k(3)).indices.shape,
    "mining": mined,
    "re-ranking": reranked,
    "samples": intervals,
    "matryoshka": lambda k: itrloss.Matryoshka(itrloss.InfoNCELoss(), [k(2), k(8)]).dims,
}


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16, torch.tensor, np.array])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_may_be_integers_of_any_type(name: str, kind):
    assert SIZED[name](kind) == SIZED[name](int)


# --- strings and what does not exist --------------------------------------------------------------

NO = itrloss.NO_ID
LETTERS = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "x": 9, NO: NO}
OF_STRINGS = {
    "ids": {"image_ids": ["a", "b", NO, "d", "a", NO], "text_ids": ["a", NO, "c", "d", "e", "f"]},
    "sets": {
        "image_ids": [["a", NO], ["b", "c"], ["d", NO], ["e", "a"], [NO, NO], ["f", NO]],
        "text_ids": ["a", "b", "c", "d", "e", "f"],
    },
    "groups": {
        "image_ids": list("abcdef"),
        "text_ids": list("abcdef"),
        "image_groups": ["a", NO, "a", "b", "b", "b"],
    },
    "negatives": {
        "image_ids": list("abcdef"),
        "text_ids": list("abcdef"),
        "negatives": torch.stack([X + Y, X - Y], 1),
        "negative_ids": [["a", "x"], [NO, "c"], ["c", "x"], ["a", "d"], [NO, NO], ["b", "x"]],
    },
    "padding alone, of texts": {"image_ids": list("abcdef"), "text_ids": [NO] * 6},
    "padding alone, of groups": {
        "image_ids": list("abcdef"),
        "text_ids": list("abcdef"),
        "image_groups": list("aabbcc"),
        "text_groups": [NO] * 6,
    },
    "padding alone, of negatives": {
        "image_ids": list("abcdef"),
        "text_ids": list("abcdef"),
        "negatives": Y[:, None] + X[:, None],
        "negative_ids": [[NO]] * 6,
    },
}


def as_numbers(ids):
    if isinstance(ids, list):
        return [as_numbers(x) for x in ids]
    return ids if isinstance(ids, torch.Tensor) else LETTERS[ids]


@pytest.mark.parametrize("name", OF_STRINGS)
def test_what_does_not_exist_may_stand_among_strings(name):
    given = OF_STRINGS[name]
    loss = itrloss.InfoNCELoss()
    numbers = {key: as_numbers(ids) for key, ids in given.items()}
    assert torch.equal(loss(X, Y, **given), loss(X, Y, **numbers))


def test_a_memory_takes_what_does_not_exist_among_strings():
    memory = itrloss.CoupledMemory(6, 8)
    memory.enqueue(X, Y, ["a", NO, "c", "d", NO, "f"])
    assert (memory.ids == NO).tolist() == [False, True, False, False, True, False]
    assert len(memory) == 4
    memory.enqueue(X[:2], Y[:2], [NO, NO])
    assert len(memory) == 3
    with pytest.raises(TypeError, match="expected strings"):
        memory.enqueue(X[:2], Y[:2], [NO, 3])
