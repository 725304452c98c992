"""``itrloss rerank`` and ``itrloss eval``: their output, their files, and their errors for
unreadable input.
"""

from __future__ import annotations

import csv
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, Page, pairs, run, scores

from itrloss import Similarity, comparison, rerank
from itrloss.cli import main
from itrloss.comparison import METHODS
from itrloss.files import read_ids, read_matrix, written
from itrloss.metrics import (
    Judgements,
    QueryResults,
    RetrievalResults,
    compare,
    retrieval_metrics,
    retrieval_results,
)
from itrloss.report.comparison import page


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "sims.npy"
    np.save(path, scores())
    return path


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Lines of the recalls by method, and of what was left out."""
    out = capsys.readouterr().out
    left_out = re.findall("^.* left out: .*$", out, re.M)
    found: dict[str, list[str]] = {}
    for line in [*out.partition("\n\n")[0].splitlines(), *left_out]:
        name = re.split(r"†|, bank|  +\d| left out", line)[0]
        found.setdefault(name, []).append(line)
    return found


def hubs(line: str) -> str:
    """Where a line says that hubs were looked for."""
    bank = re.search(r"bank(?: \(.*?\))?(†?)", line)
    return "test" if bank is None and "†" in line else bank[0].rstrip("†") if bank else ""


def test_there_is_no_command_for_benchmarks(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["bench"])
    assert "invalid choice: 'bench'" in capsys.readouterr().err


def test_every_method_has_its_line(saved: Path, capsys: pytest.CaptureFixture[str]):
    assert run("rerank", saved) == 0
    found = lines(capsys)
    assert set(METHODS) | {"no re-ranking"} <= set(found)
    plain = retrieval_metrics(torch.from_numpy(scores()))
    assert f"{plain['rsum']:5.1f}" in found["no re-ranking"][0]
    fast = retrieval_metrics(torch.from_numpy(scores()), reranker=rerank.FastReranker())
    assert (
        f"{fast['rsum']:5.1f}" in found["fast"][0]
        and f"{fast['rsum'] - plain['rsum']:+.1f}" in found["fast"][0]
    )
    assert max(len(line) for name in ("no re-ranking", *METHODS) for line in found[name]) <= 100
    for name, kind in METHODS.items():
        assert ("left out" in found[name][0]) == (kind.needs_bank or kind.needs_embeddings), name
    intervals = re.findall(
        r"([-+][\d.]+) \(([-+][\d.]+), ([-+][\d.]+)\)",
        "".join(x for every in found.values() for x in every),
    )
    assert len(intervals) == sum(
        not (kind.needs_bank or kind.needs_embeddings) for kind in METHODS.values()
    )
    assert all(float(low) <= float(change) <= float(high) for change, low, high in intervals)
    assert any(float(low) < float(high) for _, low, high in intervals)


def test_folds_retrieve_within_parts(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.html"
    assert (
        run(
            "rerank",
            saved,
            "--folds",
            3,
            "--methods",
            "fast",
            "--report",
            page,
            "--queries",
            tmp_path / "q.csv",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        f"{N} images, {N * C} texts" in out
        and "in 3 parts" in out
        and "in 3 parts" in page.read_text("utf-8")
    )
    for name, method in {"no re-ranking": None, "fast†": rerank.FastReranker()}.items():
        wanted = retrieval_metrics(torch.from_numpy(scores()), folds=3, reranker=method)["rsum"]
        assert any(line.startswith(name) and f"{wanted:6.1f}" in line for line in out.splitlines())
    with open(tmp_path / "q.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["direction"] == "t2i"]
    assert [int(row["id"]) for row in rows] == [text // C for text in range(N * C)]
    assert all(int(row["first"]) // 4 == int(row["id"]) // 4 for row in rows)


def test_run_files_of_folds_hold_the_candidates_of_the_part(saved: Path, tmp_path: Path):
    assert (
        run("rerank", saved, "--folds", 3, "--methods", "csls", "--trec", tmp_path, "--top", 4) == 0
    )
    wanted = retrieval_results(
        torch.from_numpy(scores()), reranker=rerank.CSLS(), folds=3, hubness_k=4
    )
    for way, results in (("i2t", wanted.i2t), ("t2i", wanted.t2i)):
        found = [line.split() for line in (tmp_path / f"{way}.run").read_text().splitlines()]
        assert [int(line[2].strip("imagetx")) for line in found] == results.top.flatten().tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--folds", 5), "--folds: expected a divisor of the 12 images, got 5"),
        (("--folds", 0), "--folds: expected a divisor of the 12 images, got 0"),
        (("--folds", N), "--folds: 12 are parts of one image"),
        (
            ("--folds", 3, "--image-ids", "i.txt", "--text-ids", "late.txt"),
            "--folds: images 0 to 3 are a part without",
        ),
        (("--folds", 3, "--image-ids", "i.txt", "--text-ids", "i5.txt"), ""),
        (
            ("--folds", 3, "--image-ids", "twice.txt", "--text-ids", "i5.txt"),
            "--folds: expected each text",
        ),
        (("--folds", 3, "--out", "x.npz"), "--folds: nothing is ranked among all"),
        (("--folds", 3, "--rankings", "x.npz"), "--folds: nothing is ranked among all"),
        (("--folds", 3, "--bank-images", "sims.npy"), "--folds: banks of scores"),
        (
            ("--folds", 3, "--image-ids", "i.txt", "--text-ids", "t.txt"),
            "--folds: expected each text",
        ),
    ],
)
def test_what_folds_cannot_do(saved: Path, tmp_path: Path, monkeypatch, capsys, given, said):
    monkeypatch.chdir(tmp_path)
    Path("i.txt").write_text("\n".join(map(str, range(N))))
    # a text without an image
    Path("t.txt").write_text("\n".join(str(x % (N + 1)) for x in range(N * C)))
    Path("late.txt").write_text("\n".join(str(4 + x % (N - 4)) for x in range(N * C)))
    Path("i5.txt").write_text("\n".join(str(x // C) for x in range(N * C)))
    Path("twice.txt").write_text("\n".join(map(str, [*range(N - 1), 0])))
    assert run("rerank", saved, *given) == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_embeddings_and_banks_leave_none_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, arrays in {"": pairs(), "val_": pairs(1), "bank_": pairs(2)}.items():
        for side, x in zip(("images", "texts"), arrays, strict=True):
            np.save(tmp_path / f"{name}{side}.npy", x.astype(np.float16))
    given = [tmp_path / f"{name}.npy" for name in ("images", "texts")]
    banks = [
        "--bank-images",
        tmp_path / "bank_images.npy",
        "--bank-texts",
        tmp_path / "bank_texts.npy",
    ]
    assert (
        run(
            "eval", *given, "--val", tmp_path / "val_images.npy", tmp_path / "val_texts.npy", *banks
        )
        == 0
    )
    found = lines(capsys)
    for name, kind in METHODS.items():
        wanted = ["bank"] if kind.needs_bank else ["test", "bank"]
        assert [hubs(line) for line in found[name]] == wanted[: 1 if name == "k-reciprocal" else 2]
    assert [hubs(line) for line in found["fast, calibrated"]] == ["test", "bank"]
    images, texts = (torch.from_numpy(x).half() for x in pairs())
    ids = torch.arange(N), torch.arange(N).repeat_interleave(C)
    bank = [torch.from_numpy(x).half() for x in pairs(2)]
    fitted = retrieval_metrics(Similarity(images, texts, *ids), reranker=rerank.CSLS().fit(*bank))
    assert f"{fitted['rsum']:6.1f}" in found["csls"][1]


def test_embeddings_are_calibrated_with_the_bank_that_they_are_re_ranked_by():
    held_out, banks = (tuple(torch.from_numpy(x) for x in pairs(seed)) for seed in (1, 2))
    banks = banks[0] + 3.0, banks[1][:9] - 2.0
    validation = Similarity(*held_out, torch.arange(N), torch.arange(N * C) // C)
    found = (
        comparison.compare_rerankers(validation, ("fast",), banks, validation).entries[-1].reranker
    )
    with_bank, without = rerank.FastReranker().fit(*banks), rerank.FastReranker()
    assert (
        repr(found) == repr(with_bank.calibrate(validation)) != repr(without.calibrate(validation))
    )


def test_a_bank_of_scores_and_a_validation_set(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    generator = np.random.default_rng(0)
    np.save(tmp_path / "bank.npy", generator.random((30, N * C)))
    np.save(tmp_path / "val.npy", scores(1))
    options = ("--bank-images", tmp_path / "bank.npy", "--val", tmp_path / "val.npy")
    assert run("rerank", saved, *options, "--methods", "fast", "qb-norm") == 0
    found = lines(capsys)
    assert (
        len(found["fast"]) == len(found["fast, calibrated"]) == 2
        and "needs banks" in found["qb-norm"][0]
    )
    chosen = rerank.FastReranker().calibrate(torch.from_numpy(scores(1)))
    wanted = retrieval_metrics(torch.from_numpy(scores()), reranker=chosen)["rsum"]
    assert f"{wanted:6.1f}" in found["fast, calibrated"][0]


def test_what_is_written_is_what_the_library_finds(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, ranked, queries = (tmp_path / name for name in ("out.npz", "rankings.npz", "queries.csv"))
    options = (
        "--methods",
        "csls",
        "fast",
        "--write",
        "fast",
        "--i2t",
        9,
        8,
        "--t2i",
        8,
        17,
        "--top",
        3,
    )
    assert (
        run("rerank", saved, *options, "--out", out, "--rankings", ranked, "--queries", queries)
        == 0
    )
    assert "written (fast, hubs of the test queries)" in capsys.readouterr().out
    fast, given = rerank.FastReranker((9, 8), (8, 17)), torch.from_numpy(scores())
    wanted, tops = fast.rerank(given), fast.topk(given, 3)
    with np.load(out) as arrays:
        np.testing.assert_allclose(arrays["i2t"], wanted.i2t)
        np.testing.assert_allclose(arrays["t2i"], wanted.t2i)
    with np.load(ranked) as arrays:
        assert (arrays["i2t"] == tops.i2t.indices.numpy()).all() and (
            arrays["t2i"] == tops.t2i.indices.numpy()
        ).all()
    with open(queries, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == N + N * C
    metrics = retrieval_metrics(given, reranker=fast)
    results = retrieval_results(given, reranker=fast)
    for way in ("i2t", "t2i"):
        found = [int(row["best_rank"]) for row in rows if row["direction"] == way]
        assert (
            found
            == getattr(results, way).best.tolist()
            != getattr(retrieval_results(given), way).best.tolist()
        )
    hits = [int(row["best_rank"]) <= 5 for row in rows if row["direction"] == "t2i"]
    assert 100 * sum(hits) / len(hits) == pytest.approx(metrics["t2i_r5"])
    assert run("rerank", saved, "--methods", "csls", "--write", "no re-ranking", "--out", out) == 0
    with np.load(out) as arrays:
        np.testing.assert_allclose(arrays["t2i"], given)


@pytest.mark.parametrize("transposed", [False, True])
def test_of_both_ways_that_by_the_bank_is_written(
    transposed: bool, saved: Path, tmp_path: Path, capsys
):
    bank = np.random.default_rng(0).random((30, N * C))
    for name, x in (("s", scores()), ("b", bank)):
        np.save(tmp_path / f"{name}.npy", x.T if transposed else x)
    options = [
        "--bank-images",
        tmp_path / "b.npy",
        "--methods",
        "csls",
        "--out",
        tmp_path / "o.npz",
    ]
    assert run("rerank", tmp_path / "s.npy", *options, *["--transpose"][: int(transposed)]) == 0
    assert "written (csls, hubs of the bank (i2t))" in capsys.readouterr().out
    method = rerank.CSLS().fit(images=torch.from_numpy(bank))
    wanted = method.rerank(torch.from_numpy(scores()))
    with np.load(tmp_path / "o.npz") as arrays:
        np.testing.assert_allclose(arrays["i2t"], wanted.i2t, rtol=1e-5)


def test_the_report_names_hubs_and_who_gained(saved: Path, tmp_path: Path):
    report, names = tmp_path / "report.html", tmp_path / "captions.txt"
    given = ("--i2t", 60, 25, "--t2i", 60, 20)  # more queries lose than gain
    names.write_text("\n".join(f"caption <b{i}> & co" for i in range(N * C)), encoding="utf-8")
    assert (
        run(
            "rerank",
            saved,
            "--report",
            report,
            "--text-names",
            names,
            "--methods",
            "fast",
            "sinkhorn",
            *given,
        )
        == 0
    )
    page = Page()
    page.feed(report.read_text(encoding="utf-8"))
    assert page.open == []
    plain = Similarity.from_scores(
        torch.from_numpy(scores()), torch.arange(N), torch.arange(N * C) // C
    )
    hub = int(torch.bincount(plain.topk(10).indices.flatten(), minlength=N * C).argmax())
    assert f"caption <b{hub}> & co" in page.text and "image 3" in page.text
    for text in ("Sinkhorn", "greatest hubs before", "gained most", "lost most", "text→image"[:4]):
        assert text in page.text
    chosen = rerank.FastReranker((60, 25), (60, 20))
    results = [retrieval_results(torch.from_numpy(scores()), reranker=x) for x in (None, chosen)]
    for way, size in (("t2i", N * C), ("i2t", N)):
        before, after = (getattr(x, way).best for x in results)
        higher = int((after < before).sum())
        lower = int((after > before).sum())
        moved = f"{higher} of {size} queries rank their right candidate higher than before"
        assert f"{moved}, {lower} lower" in page.text
    gained = int((before.double().log() - after.double().log()).argmax())
    heads = r"gained most\s*first candidate before\s*first candidate after\s*rank before\s*after\s*"
    assert re.search(rf"{heads}image {gained}\D", page.text)


def test_the_report_ranks_gains_by_ratio_and_counts_answered_queries_only():
    """A change from 20 to 2 is larger than one from 200 to 100. The fourth query has no right
    candidate.
    """
    ranks = {"before": [200, 20, 3, 0, 5], "after": [100, 2, 9, 0, 5]}
    top = torch.arange(5)[:, None]
    entries = []
    for name, own in ranks.items():
        queries = QueryResults(torch.arange(5), torch.tensor(own)[:, None], top, 300)
        results = RetrievalResults(queries, queries)
        base = entries[0].results if entries else results
        changes = compare(results, base, samples=9) if entries else {}
        method = rerank.CSLS() if entries else None
        entries.append(comparison.Entry(name, method, results, 0.0, changes))
    found = comparison.RerankerComparison(Similarity.from_scores(torch.rand(5, 5)), entries, {})
    names = [[f"{letter}{i}" for i in range(300)] for letter in "IT"]
    text = Page()
    text.feed(page(found, entries[1], "title", names))
    assert (
        text.text.count("2 of 4 queries rank their right candidate higher than before, 1 lower.")
        == 2
    )
    for name, section in zip("IT", text.text.split("gained most")[1:], strict=True):
        gained, lost = section.split("greatest hubs")[0].split("lost most")
        assert re.findall(rf"{name}\d", gained) == [f"{name}1", f"{name}0"]
        assert re.findall(rf"{name}\d", lost) == [f"{name}2"]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra_a_report_is_refused_before_the_work(
    saved: Path, tmp_path, capsys, monkeypatch, missing
):
    monkeypatch.setitem(sys.modules, missing, None)
    assert run("rerank", saved, "--methods", "fast", "--report", tmp_path / "report.html") == 2
    out, err = capsys.readouterr()
    assert f"{missing} is missing; pip install 'itrloss[report]'" in err and "RSUM" not in out
    assert run("rerank", saved, "--methods", "fast") == 0


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_dictionaries_are_read(tmp_path: Path, protocol: int):
    path = tmp_path / "sims.pkl"
    path.write_bytes(pickle.dumps({"npts": N, "sims": scores()}, protocol))
    np.testing.assert_array_equal(read_matrix(path), scores())


def test_formats(tmp_path: Path):
    wanted = scores()
    np.save(tmp_path / "dictionary.npy", {"npts": N, "sims": wanted})  # type: ignore[arg-type]
    np.save(tmp_path / "fortran.npy", np.asfortranarray(wanted))
    np.save(tmp_path / "big.npy", wanted.astype(">f8"))
    np.save(tmp_path / "half.npy", wanted.astype(np.float16))
    np.savez(tmp_path / "one.npz", wanted)
    np.savez_compressed(tmp_path / "several.npz", sims=wanted, other=wanted[:3])
    torch.save(torch.from_numpy(wanted), tmp_path / "tensor.pt")
    torch.save(
        {"sims": torch.from_numpy(wanted).bfloat16(), "epoch": 3}, tmp_path / "dictionary.pt"
    )
    for path in tmp_path.iterdir():
        loose = 0.01 if "half" in path.name or path.name == "dictionary.pt" else 0
        np.testing.assert_allclose(read_matrix(path).float(), wanted, atol=loose)
    assert read_matrix(tmp_path / "several.npz", "other").shape == (3, N * C)
    (tmp_path / "ids.txt").write_text("3\n4\n-5\n")
    np.save(tmp_path / "ids.npy", np.array([3, 4, 5], np.uint16))
    assert read_ids(tmp_path / "ids.txt").tolist() == [3, 4, -5] and read_ids(
        tmp_path / "ids.npy"
    ).tolist() == [
        3,
        4,
        5,
    ]


class _Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["ITRLOSS_TEST_EVIL"],)


def _header(text: str) -> bytes:
    return (
        b"\x93NUMPY\x01\x00"
        + len(text := text.ljust(117) + "\n").to_bytes(2, "little")
        + text.encode()
    )


BAD = {
    "empty.npy": (b"", "is empty"),
    "text.npy": (b"These are no numbers at all.", "magic string"),
    "damaged.npz": (b"PK\x03\x04" + bytes(60), "not a zip file"),
    "damaged.pt": (b"PK\x03\x04" + bytes(60), "not a readable .pt"),
    "damaged.pkl": (b"\x80\x04\x95\xff\xff", "not a readable .pkl"),
    "long_header.npy": (
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{",
        "expected 2147483648 bytes",
    ),
    "large.npy": (
        _header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000000)}"),
        "not a readable",
    ),
    "negative.npy": (
        _header("{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 4)}"),
        "not a readable",
    ),
    "sims.xls": (b"0.1,0.2", r"expected a file named \*.npy"),
    "ragged.csv": (b"0.1,0.2\n0.3", "expected rows of one length"),
}
ARRAYS = {
    "nan.npy": (np.where(np.arange(N * C) == 7, np.nan, scores()), "finite"),
    "infinite.npy": (np.where(np.arange(N * C) == 7, np.inf, scores()), "finite"),
    "transposed.npy": (scores().T, "--transpose"),
    "misshapen.npy": (scores()[:, :-1], "--image-ids, --text-ids"),
    "vector.npy": (scores()[0], "expected a matrix"),
    "cube.npy": (scores()[None], "expected a matrix"),
    "no_rows.npy": (scores()[:0], "expected a matrix"),
    "integers.npy": (np.arange(N * C).reshape(N, C), "floating-point"),
    "complex.npy": (scores() + 1j, "expected numbers"),
    "objects.npy": (np.array([[0.5, "a"], [0.1, None]], dtype=object), "expected numbers"),
    "strings.npy": (np.array([["a", "b"]]), "expected numbers"),
    "wrong_count.npy": ({"npts": 7, "sims": scores()}, "npts = 7"),
    "no_sims.npy": ({"a": scores(), "b": scores()}, "one of the name sims; it has a, b"),
}


@pytest.mark.parametrize("name", [*BAD, *ARRAYS, "missing.npy", "short.npy", "short.pkl"])
def test_a_bad_file_gets_one_line_and_leaves_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, message = tmp_path / name, "no such file"
    if name in BAD:
        path.write_bytes(BAD[name][0])
        message = BAD[name][1]
    elif name in ARRAYS:
        np.save(path, ARRAYS[name][0])
        message = ARRAYS[name][1]
    elif name == "short.npy":
        np.save(path, scores())
        path.write_bytes(path.read_bytes()[:-100])
        message = "not a readable .npy"
    elif name == "short.pkl":
        path.write_bytes(pickle.dumps({"sims": scores()})[:-100])
        message = "not a readable .pkl"
    before = set(tmp_path.iterdir())
    outputs = [
        "--out",
        tmp_path / "o.npz",
        "--rankings",
        tmp_path / "r.npz",
        "--report",
        tmp_path / "r.html",
    ]
    assert run("rerank", path, "--methods", "fast", *outputs, "--queries", tmp_path / "q.csv") == 2
    error = capsys.readouterr().err
    assert (
        len(error.splitlines()) == 1 and name.split(".")[0] in error and "Traceback" not in error
    ), error
    assert re.search(message, error), error
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("suffix", [".pkl", ".npy", ".npz", ".pt"])
def test_nothing_in_a_file_is_executed(
    suffix: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    mark = tmp_path / "executed"
    monkeypatch.setenv("ITRLOSS_TEST_EVIL", str(mark))
    path = tmp_path / f"evil{suffix}"
    if suffix == ".pkl":
        path.write_bytes(pickle.dumps({"sims": _Evil()}))
    elif suffix == ".pt":
        torch.save({"sims": _Evil()}, path)
    elif suffix == ".npy":
        np.save(path, np.array([_Evil()], dtype=object))
    else:
        np.savez(path, sims=np.array([_Evil()], dtype=object))
    assert run("rerank", path) == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert not mark.exists()


def _pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


_OBJECT = (  # numpy.dtype("O8") with flags that claim that items are not references
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
_ADDRESS = b"C\x08AAAAAAAA"
_EMPTY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
HOSTILE = {
    "array": _pickled(_EMPTY, b"(K\x01K\x01\x85", _OBJECT, b"\x89", _ADDRESS, b"tb"),
    "constructor": _pickled(b"cnumpy\nndarray\n(K\x01\x85X\x01\x00\x00\x00O", _ADDRESS, b"tR"),
    "offset": _pickled(
        b"cnumpy\nndarray\n(K\x02K\x02\x86X\x02\x00\x00\x00f8C\x20",
        b"A" * 32,
        b"J\xf0\xff\xff\xfftR",
    ),
    "scalar": _pickled(b"cnumpy.core.multiarray\nscalar\n(", _OBJECT, _ADDRESS, b"tR"),
    "buffer": _pickled(
        b"cnumpy.core.numeric\n_frombuffer\n(", _ADDRESS, _OBJECT, b"K\x01\x85X\x01\x00\x00\x00CtR"
    ),
}


def test_no_bytes_of_a_pickle_are_taken_for_addresses(tmp_path: Path):
    for name, content in HOSTILE.items():
        (tmp_path / name).with_suffix(".pkl").write_bytes(content)
    # Run in a subprocess, which would crash: after the last name that it printed.
    code = (
        "import sys\nfrom itrloss.files import read_matrix\n"
        "for name in sys.argv[1:]:\n"
        "    try: read_matrix(name + '.pkl')\n"
        "    except ValueError: print(name, flush=True)"
    )
    given = [sys.executable, "-c", code, *HOSTILE]
    found = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.stdout.splitlines() == list(HOSTILE), (found.returncode, found.stderr)


def test_an_array_that_holds_itself_has_an_end(tmp_path: Path):
    array = np.empty((), object)
    array[()] = array
    path = tmp_path / "sims.pkl"
    path.write_bytes(pickle.dumps(array))
    with pytest.raises(ValueError, match="expected numbers"):
        read_matrix(path)


def test_arrays_of_other_kinds_in_pickles(tmp_path: Path):
    path, wanted = tmp_path / "sims.pkl", scores()
    others = {
        "names": np.array(["a", "b"]),
        "objects": np.array([1, "a"], dtype=object),
        "big": wanted.astype(">f8"),
    }
    given = {
        "npts": np.int64(N),
        "mean": np.float64(0.5),
        "sims": np.asfortranarray(wanted),
        **others,
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(given, protocol))
        np.testing.assert_array_equal(read_matrix(path), wanted)
        np.testing.assert_array_equal(read_matrix(path, "big"), wanted)
    path.write_bytes(pickle.dumps({"sims": np.zeros(2, "f4,f4")}))
    with pytest.raises(ValueError, match=r"got an array of \|V8, which is not read"):
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
    assert run("rerank", tmp_path / "sims.pt") == 2
    said = capsys.readouterr().err
    # PyTorch 2.15 no longer reads nested tensors from untrusted files.
    assert "expected a dense tensor" in said or (
        kind == "nested" and "not a readable .pt file" in said
    )


def test_what_is_interrupted_leaves_the_old_file(saved: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "out.npz"
    out.write_text("of yesterday")

    def full(*args: object, **arrays: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert run("rerank", saved, "--methods", "fast", "--out", out) == 2
    assert out.read_text() == "of yesterday" and sorted(x.name for x in tmp_path.iterdir()) == [
        "out.npz",
        "sims.npy",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "nowhere/out.npz"), "there is no directory"),
        (("--top", 0), "--top"),
        (("--write", "csls"), "--write: expected 'no re-ranking' or 'fast', got 'csls'"),
        (("--i2t", 0, 1), "i2t: expected a number above 0"),
        (("--image-ids", "ids.txt"), "--image-ids, --text-ids: expected both or neither"),
        (("--text-names", "ids.txt"), "ids.txt: expected a line for each of the 60 texts, got 3"),
        (
            ("--image-ids", "ids.txt", "--text-ids", "ids.txt"),
            r"--image-ids: expected shape \(12,\)",
        ),
        (("--val", "val.npy"), "val.npy: .*--image-ids, --text-ids"),
        (("--bank-images", "val.npy"), r"val.npy: expected \(B, 60\), got shape \(7, 10\)"),
        (("--transpose",), "with --transpose it has 60 rows"),
        (("--key", "sims"), "expected entries with names"),
        (
            ("--image-ids", "long.txt", "--text-ids", "ids.txt"),
            "long.txt: expected integers of 64 bits",
        ),
        (
            ("--image-ids", "bytes.txt", "--text-ids", "ids.txt"),
            "bytes.txt: expected UTF-8",
        ),
        (("--text-names", "bytes.txt"), "bytes.txt: expected UTF-8"),
        (("--out", "."), ".: expected a file to write, got a directory"),
        (
            ("--rankings", "o.npz"),
            "o.npz: expected a file of its own for a result, got that of out",
        ),
        (("--methods", "dbnorm"), "--methods: all were left out"),
        (("--methods", "fast", "dbnorm", "--write", "dbnorm"), "--write: dbnorm needs embeddings"),
    ],
)
def test_bad_options_are_named(
    arguments, message, saved: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(saved.parent)
    Path("ids.txt").write_text("1\n2\n3\n")
    Path("long.txt").write_text("1" * 30)
    Path("bytes.txt").write_bytes(b"\xff\xff")
    np.save("val.npy", np.random.default_rng(0).random((7, 10)))
    output = ("--out", "o.npz") if "--out" not in arguments and "--top" not in arguments else ()
    assert run("rerank", saved, "--methods", "fast", *output, *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("o.npz").exists()


def test_a_wrong_method_to_write_is_found_before_all_are_tried(
    saved: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("rerank", saved, "--write", "csl", "--out", saved.parent / "o.npz") == 2
    assert capsys.readouterr().out == ""


def test_what_is_calibrated_is_what_is_written(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    np.save(tmp_path / "val.npy", scores(1))
    given = (
        "rerank",
        saved,
        "--val",
        tmp_path / "val.npy",
        "--methods",
        "fast",
        "csls",
        "--out",
        tmp_path / "o.npz",
    )
    assert run(*given) == 0 and "written (fast, calibrated, hubs of" in capsys.readouterr().out
    wanted = (
        rerank.FastReranker()
        .calibrate(torch.from_numpy(scores(1)))
        .rerank(torch.from_numpy(scores()))
    )
    with np.load(tmp_path / "o.npz") as arrays:
        np.testing.assert_allclose(arrays["i2t"], wanted.i2t)
    assert (
        run(*given, "--write", "fast") == 0 and "written (fast, hubs of" in capsys.readouterr().out
    )


def test_a_bank_has_any_number_of_queries_and_its_direction_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    generator = np.random.default_rng(0)
    # as many images as if they were texts
    np.save(tmp_path / "images.npy", generator.random((2 * N * C, N * C)))
    np.save(tmp_path / "texts.npy", generator.random((N, N // 2)))
    for side, way in (("images", "image→text"), ("texts", "text→image")):
        assert (
            run("rerank", saved, "--methods", "fast", f"--bank-{side}", tmp_path / f"{side}.npy")
            == 0
        )
        line = lines(capsys)["fast"][1]
        assert hubs(line) == f"bank ({way})" and "†" in line  # the other direction has none


def test_more_images_than_texts_with_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.save(tmp_path / "t.npy", scores().T)  # five images per text
    np.save(tmp_path / "i.npy", np.arange(N * C) // C)
    np.save(tmp_path / "j.npy", np.arange(N))
    ids = ("--image-ids", tmp_path / "i.npy", "--text-ids", tmp_path / "j.npy")
    assert run("rerank", tmp_path / "t.npy", *ids, "--methods", "fast") == 0


def test_errors_name_the_file_that_is_wrong(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    images, texts = pairs()
    broken = texts.copy()
    broken[3, 2] = np.nan
    for name, x in {
        "images": images,
        "texts": texts,
        "broken": broken,
        "narrow": texts[:, :-1],
    }.items():
        np.save(f"{name}.npy", x)
    for arguments, message in (
        (("images.npy", "broken.npy"), "eval: broken.npy: expected finite"),
        (
            ("images.npy", "narrow.npy"),
            "eval: narrow.npy: expected embeddings of dimension 8 like images.npy",
        ),
        (
            ("images.npy", "texts.npy", "--bank-texts", "broken.npy"),
            "eval: broken.npy: expected finite",
        ),
        (
            ("images.npy", "texts.npy", "--bank-images", "narrow.npy"),
            "eval: narrow.npy: expected (B, 8), got shape",
        ),
    ):
        assert run("eval", *arguments, "--methods", "fast") == 2
        assert message in capsys.readouterr().err


def test_a_terminal_without_greek_letters_gets_the_rest(saved: Path, monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    assert main(["rerank", str(saved), "--methods", "fast"]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["rerank", "--help"])
    streams[0].flush()
    table, _, text = streams[0].buffer.getvalue().partition(b"usage: ")
    assert ended.value.code == 0 and b"fast" in table and b"fast" in text


def test_a_line_ends_where_the_file_says_so(saved: Path, tmp_path: Path):
    names, report = tmp_path / "captions.txt", tmp_path / "report.html"
    names.write_text("\n".join(["a\u2028dog\x85"] * (N * C)) + "\n", encoding="utf-8")
    assert run("rerank", saved, "--methods", "fast", "--text-names", names, "--report", report) == 0


def test_results_follow_links_and_leave_devices_alone(saved: Path, tmp_path: Path):
    link, target, pipe = (tmp_path / name for name in ("link.csv", "target.csv", "pipe.csv"))
    link.symlink_to(target)
    assert run("rerank", saved, "--methods", "fast", "--queries", link) == 0
    assert link.is_symlink() and target.read_text().startswith("direction")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with written(pipe) as file:
        file.write("x")
    assert os.read(reader, 9) == b"x" and pipe.is_fifo()
    os.close(reader)


def test_transposed_matrices_and_ids_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    np.save(tmp_path / "t.npy", scores().T)
    assert run("rerank", tmp_path / "t.npy", "--transpose", "--methods", "fast") == 0
    plain = lines(capsys)["no re-ranking"]
    shuffled = np.random.default_rng(0).permutation(N * C)
    np.save(tmp_path / "s.npy", scores()[:, shuffled])
    np.save(tmp_path / "i.npy", np.arange(N) + 7)
    np.save(tmp_path / "j.npy", shuffled // C + 7)
    ids = ("--image-ids", tmp_path / "i.npy", "--text-ids", tmp_path / "j.npy")
    assert run("rerank", tmp_path / "s.npy", *ids, "--methods", "fast") == 0
    assert lines(capsys)["no re-ranking"][0][:68] == plain[0][:68]


# --- any k, graded pairs, exclusions --------------------------------------------------------------


def test_columns_tables_and_metrics_have_any_k(saved: Path, tmp_path: Path, capsys):
    table, latex = tmp_path / "metrics.csv", tmp_path / "t.tex"
    options = ("--methods", "csls", "--ks", 1, 3, 20, 50, "--metrics", table, "--latex", latex)
    assert run("rerank", saved, *options) == 0
    matrix = torch.from_numpy(scores())
    wanted = retrieval_metrics(matrix, ks=(1, 3, 20, 50))
    out = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(out) if "RSUM" in line)
    ways, head = out[place - 1 : place + 1]
    line = next(line for line in out if line.startswith("no re-ranking"))
    numbers = [f"{wanted[f'{way}_r{k}']:.1f}" for way in ("i2t", "t2i") for k in (1, 3, 20, 50)]
    assert line.split()[2:] == [*numbers, f"{wanted['rsum']:.1f}", line.split()[-1]]
    assert ways.split() == ["image→text", "text→image"]
    assert head.split()[:9] == [*("R@1", "R@3", "R@20", "R@50") * 2, "RSUM"]
    assert line.index(f"{wanted['rsum']:.1f}") + 5 == head.index("RSUM") + 4
    with open(table, encoding="utf-8", newline="") as file:
        rows = {row.pop("method"): row for row in csv.DictReader(file)}
    assert {name: row.pop("hubs") for name, row in rows.items()} == {
        "no re-ranking": "",
        "csls": "test",
    }
    assert {name: float(x) for name, x in rows["no re-ranking"].items()} == wanted
    csls = retrieval_metrics(matrix, ks=(1, 3, 20, 50), reranker=rerank.CSLS())
    assert {name: float(x) for name, x in rows["csls"].items()} == csls
    assert "R@3" in latex.read_text() and "R@5 &" not in latex.read_text()


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".npy"])
def test_graded_pairs_and_exclusions_come_from_files(saved: Path, tmp_path: Path, suffix, capsys):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randperm(N * N * C, generator=generator)[:80]
    grades = torch.randint(0, 4, (80,), generator=generator)
    graded = torch.stack([numbers // (N * C), numbers % (N * C), grades], 1)
    excluded = graded[::7, :2]
    files = []
    for name, listed in (("graded", graded), ("excluded", excluded)):
        path = tmp_path / (name + suffix)
        files.append(path)
        if suffix == ".npy":
            np.save(path, listed.numpy())
        else:
            separator = "," if suffix == ".csv" else " "
            np.savetxt(path, listed.numpy(), fmt="%d", delimiter=separator)
    table, trec = tmp_path / "metrics.csv", tmp_path
    options = ("--relevant", files[0], "--exclude", files[1], "--methods", "fast", "--top", 60)
    written = ("--metrics", table, "--trec", trec, "--write", "no re-ranking")
    assert run("rerank", saved, *options, *written) == 0
    assert f"right by {files[0]}" in capsys.readouterr().out
    rules = {"relevant": Judgements(*graded.T), "exclude": tuple(excluded.T)}
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, method in zip(rows, (None, rerank.FastReranker()), strict=True):
        wanted = retrieval_metrics(torch.from_numpy(scores()), reranker=method, **rules)
        assert {name: float(row[name]) for name in wanted} == wanted
    kept = {tuple(pair) for pair in excluded.tolist()}
    run_lines = (trec / "i2t.run").read_text().splitlines()
    ranked = {tuple(int(x.strip("imagetx")) for x in line.split()[:3:2]) for line in run_lines}
    assert ranked == {(i, j) for i in range(N) for j in range(N * C)} - kept
    assert run("rerank", saved, "--candidates", files[1], "--methods", "csls") == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("--exclude", "0 1 2\n", "expected an image and a text a line, got grades, too"),
        ("--exclude", "0\n1\n", "expected an image and a text a line, and perhaps a grade"),
        ("--relevant", "0 1\n2\n", "not a readable .txt file"),
        ("--relevant", "0 1.5\n", "expected indices of images and texts"),
        ("--relevant", "a b\n", "not a readable .txt file"),
        ("--candidates", "0 60\n", "candidates.texts: expected integers from 0 to 59, got 60"),
        ("--relevant", "", "relevant.images: expected at least 1 index, got 0"),
        ("--relevant", "0 1 -1\n", "relevant: expected grades of at least 0, got -1"),
    ],
)
def test_files_of_pairs_are_checked(saved: Path, tmp_path: Path, name, text, said, capsys):
    path = tmp_path / "pairs.txt"
    path.write_text(text)
    assert run("rerank", saved, name, path, "--methods", "csls") == 2
    assert said in capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused(saved: Path, tmp_path: Path, capsys):
    path = tmp_path / "pairs.txt"
    path.write_text("0 1\n")
    assert run("rerank", saved, "--relevant", path, "--protocol", "coco") == 2
    assert "--relevant: expected none with --protocol" in capsys.readouterr().err
    assert run("rerank", saved, "--exclude", path, "--folds", 3, "--methods", "csls") == 2
    assert "--folds: expected 1 with relevant, excluded" in capsys.readouterr().err
    assert run("rerank", saved, "--ks", 0) == 2
    assert "--ks: expected at least 1, got 0" in capsys.readouterr().err
