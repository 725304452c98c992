"""Ids, arrays, options and sizes in the forms that people have them in."""

from __future__ import annotations

import tracemalloc
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import itrloss
from itrloss import checks, metrics, rerank
from itrloss.comparison import METHODS

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
    "uint16": lambda x: torch.tensor(x, dtype=torch.uint16),
    "big-endian": lambda x: np.array(x, ">i4"),
    "tensors": lambda x: [torch.tensor(i) for i in x],
    "NumPy integers": lambda x: [np.int16(i) for i in x],
    "tensor column": lambda x: torch.tensor(x)[:, None],
}


@pytest.mark.parametrize("form", FORMS | INTEGER_FORMS)
def test_integer_ids_may_have_any_form(form: str):
    make = (FORMS | INTEGER_FORMS)[form]
    wanted = infonce(torch.tensor(NUMBERS), torch.tensor(NUMBERS))
    assert torch.equal(infonce(make(NUMBERS), make(NUMBERS)), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_strings_as_ids_may_have_any_form(form: str):
    wanted = infonce(torch.tensor(NUMBERS), torch.tensor(NUMBERS))
    assert torch.equal(infonce(FORMS[form](WORDS), list(WORDS)), wanted)


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


BAD_IDS = {
    "fractions": ([0.5] * 6, "image_ids: expected an integer"),
    "bools": ([True] * 6, "image_ids: expected an integer"),
    "None in it": ([1, 2, None, 3, 4, 5], "image_ids: expected an integer"),
    "mixed": (["1", 2, "3", 4, 5, 6], "image_ids: expected an integer"),
    "ragged": ([[1], [2, 3]], "image_ids: expected an integer"),
    "one string": ("abcdef", "image_ids: expected shape"),
    "too few": ([1, 2], r"image_ids: expected shape \(6,\), got \(2,\)"),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_other_ids_are_refused_by_name(name: str):
    ids, message = BAD_IDS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        infonce(ids, ids)


def test_strings_beside_integers_are_refused():
    with pytest.raises(TypeError, match="text_ids: expected strings with strings"):
        infonce(WORDS, NUMBERS)


def test_strings_are_no_row_numbers():
    with pytest.raises(TypeError, match=r"text_ids: expected an integer .* got list of strings"):
        infonce(None, WORDS)


def test_many_names_have_numbers_of_their_own():
    names = [f"{i}.jpg" for i in range(10_000)]
    x = torch.zeros(10_000, 1)
    ids = itrloss.Similarity(x, x, names, names).ids[0]
    assert len(ids.unique()) == 10_000
    assert int(ids.min()) >= 0


LARGE_IDS = np.array([2**63 + i for i in range(6)], dtype=np.uint64)
TAKERS_OF_LARGE_IDS = {
    "a loss": lambda: infonce(LARGE_IDS.tolist(), LARGE_IDS.tolist()),
    "mining": lambda: itrloss.mine_hard_negatives(X, Y, LARGE_IDS, LARGE_IDS, 3),
    "a memory": lambda: itrloss.CoupledMemory(20, 8).enqueue(X, Y, LARGE_IDS),
}


@pytest.mark.parametrize("name", TAKERS_OF_LARGE_IDS)
def test_ids_beyond_int64_are_refused(name: str):
    with pytest.raises(ValueError, match=r"expected ids below 2\*\*63, got larger ones"):
        TAKERS_OF_LARGE_IDS[name]()


# --- arrays and options ---------------------------------------------------------------------------

S = torch.rand(4, 20, generator=torch.Generator().manual_seed(0))
SCORES = X @ Y.T
SETS = torch.stack([X, Y, X.flip(0)], 1)
EXCLUDED = (SCORES > 0.5).numpy()
JUDGED = ([0, 1, 2], [2, 1, 0], [1, 0, 2])


@pytest.mark.parametrize("options", [{}, {"scores": S.numpy()}])
def test_a_loss_is_not_trained_on_arrays(options):
    inputs = () if options else (X.numpy(), Y.numpy())
    with pytest.raises(TypeError, match=r"expected a floating-point tensor .* got ndarray"):
        itrloss.InfoNCELoss()(*inputs, **options)


def read_only_fortran(x: torch.Tensor) -> np.ndarray:
    array = np.asfortranarray(x.numpy())
    array.flags.writeable = False
    return array


def figures(**options):
    return metrics.retrieval_metrics(SCORES.tanh(), **options)


def by_judgements(scores, judged):
    return metrics.retrieval_metrics(scores, relevant=metrics.Judgements(*judged))


def by_a_bank(images, texts, image_bank, text_bank):
    method = rerank.CSLS(2).fit(images=image_bank, texts=text_bank)
    return method.topk(itrloss.Similarity(images, texts), 2).i2t.indices


def pandas_table(numbers: np.ndarray):
    return pytest.importorskip("pandas").DataFrame(numbers)


# Calls with input of a further form, and with the same of the documented one.
FURTHER_FORMS = {
    "embeddings in arrays": (
        lambda: metrics.retrieval_metrics(itrloss.Similarity(X.numpy(), read_only_fortran(Y))),
        lambda: metrics.retrieval_metrics(itrloss.Similarity(X, Y)),
    ),
    "scores in an array with negative strides": (
        lambda: metrics.retrieval_metrics(SCORES.numpy()[::-1].copy()[::-1]),
        lambda: metrics.retrieval_metrics(SCORES),
    ),
    "two arrays of scores, one big-endian": (
        lambda: metrics.retrieval_metrics((SCORES.numpy(), SCORES.numpy().astype(">f4"))),
        lambda: metrics.retrieval_metrics(SCORES),
    ),
    "right pairs in lists and arrays": (
        lambda: figures(relevant=([0, 1, 2], np.array([0, 1, 2]))),
        lambda: figures(relevant=(torch.arange(3), torch.arange(3))),
    ),
    "judgements of scores in an array": (
        lambda: by_judgements(SCORES.numpy(), map(np.array, JUDGED)),
        lambda: by_judgements(SCORES, map(torch.tensor, JUDGED)),
    ),
    "judgements in lists": (
        lambda: metrics.Judgements(*JUDGED).at_least(0.7),
        lambda: metrics.Judgements(*map(torch.tensor, JUDGED)).at_least(0.7),
    ),
    "a bank in arrays": (
        lambda: by_a_bank(X.numpy(), Y, X.numpy(), read_only_fortran(Y)),
        lambda: by_a_bank(X, Y, X, Y),
    ),
    "mining in arrays": (
        lambda: itrloss.mine_hard_negatives(X.numpy(), read_only_fortran(Y), NUMBERS, NUMBERS, 2),
        lambda: itrloss.mine_hard_negatives(X, Y, NUMBERS, NUMBERS, 2),
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
    "a guide of arrays": (
        lambda: itrloss.InfoNCELoss(margin=0.1)(X, Y, guide=(Y.numpy(), Y.numpy())),
        lambda: itrloss.InfoNCELoss(margin=0.1)(X, Y, guide=(Y, Y)),
    ),
    "a teacher that is an array": (
        lambda: itrloss.DistillationLoss()(X, Y, SCORES.double().numpy()),
        lambda: itrloss.DistillationLoss()(X, Y, SCORES.double()),
    ),
    "byte strings as ids, as HDF5 has them": (
        lambda: infonce(np.array([b"x", b"y", b"z"] * 2), np.array([b"x", b"y", b"z"] * 2)),
        lambda: infonce(["x", "y", "z"] * 2, ["x", "y", "z"] * 2),
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
    "K in an array": (
        lambda: figures(ks=np.array([1, 3])),
        lambda: figures(ks=(1, 3)),
    ),
    "scores in a table of pandas": (
        lambda: metrics.retrieval_metrics(pandas_table(S.numpy())),
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
    "excluded pairs as integers": (
        lambda: figures(exclude=EXCLUDED.astype(int)),
        lambda: figures(exclude=EXCLUDED),
    ),
}


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
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


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
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


def re_ranked(name: str):
    def by_scores_or_embeddings(x):
        method = METHODS[name]()
        if method.needs_bank:
            method.fit(x[::-1], x[::-1])
        method.rerank(itrloss.Similarity(x, x, normalize=False))
        if not method.needs_embeddings:
            method = METHODS[name]()
            if method.needs_bank:
                method.fit(SCORES, SCORES)
            method.topk(protected(SCORES.numpy()), 3)

    return by_scores_or_embeddings


def clusters(x):
    means = itrloss.OnlineKMeans(3, 8)
    means.update(x)
    return means.fit(x)


def inner_products(x):
    sim = itrloss.Similarity(x, x, normalize=False, bias=(x[:, 0].copy(), None))
    return metrics.retrieval_metrics(sim, exclude=protected(EXCLUDED))


GIVEN: list[tuple[np.ndarray, np.ndarray]] = []  # arrays that may not be written to, and copies


def protected(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    GIVEN.append((x, x.copy()))
    return x


# All that takes arrays. One that writes to a file's memory would end the process.
TAKERS_OF_ARRAYS = {
    **{name: re_ranked(name) for name in METHODS},
    "inner products": inner_products,
    "grades": lambda x: figures(relevant=abs(x @ X.numpy().T)),
    "mining": lambda x: itrloss.mine_hard_negatives(
        x, x, range(6), range(6), 2, normalize=False, below=protected(x[:, 0])
    ),
    "a memory": lambda x: itrloss.CoupledMemory(8, 8).enqueue(x, x, protected(np.arange(6))),
    "k-means": clusters,
    "sets": lambda x: itrloss.functional.set_similarity(x[:, None], x[:, None]),
    "a guide": lambda x: itrloss.InfoNCELoss(margin=0.1)(X, Y, guide=(x, x)),
    "a teacher": lambda x: itrloss.DistillationLoss()(X, Y, protected(SCORES.numpy())),
}


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("name", TAKERS_OF_ARRAYS)
def test_nothing_writes_to_an_array(name: str):
    GIVEN.clear()
    TAKERS_OF_ARRAYS[name](protected(X.numpy()))
    assert all(np.array_equal(*pair) for pair in GIVEN)


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


@pytest.mark.parametrize("size", [True, np.True_, 2.0, np.float32(2), "2", np.array([2, 3]), None])
def test_a_size_is_an_integer(size):
    with pytest.raises(TypeError, match="k: expected an integer, got"):
        itrloss.Similarity(X, Y).topk(size)
