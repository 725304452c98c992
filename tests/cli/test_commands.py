"""``itrloss rerank`` and ``itrloss eval`` print and write the figures of the library."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, pairs, run, scores

from itrloss import Similarity, comparison, rerank
from itrloss.cli import main
from itrloss.comparison import METHODS
from itrloss.metrics import Judgements, retrieval_metrics, retrieval_results

IDS = torch.arange(N), torch.arange(N * C) // C
PLAIN = torch.from_numpy(scores())
WITHOUT_BANK_OR_EMBEDDINGS = [
    name for name, kind in METHODS.items() if not (kind.needs_bank or kind.needs_embeddings)
]


def save(path: Path, x: np.ndarray) -> Path:
    np.save(path, x)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "sims.npy", scores())


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Lines of the recalls by method, and of what was left out."""
    out = capsys.readouterr().out
    recalls = out.partition("\n\n")[0].splitlines()
    left_out = re.findall("^.* left out: .*$", out, re.M)
    found: dict[str, list[str]] = {}
    for line in recalls + left_out:
        name = re.split(r"†|, bank|  +\d| left out", line)[0]
        found.setdefault(name, []).append(line)
    return found


def hubs(line: str) -> str:
    """Where a line says that hubs were looked for."""
    bank = re.search(r"bank(?: \(.*?\))?(†?)", line)
    if bank is not None:
        return bank[0].rstrip("†")
    return "test" if "†" in line else ""


def first_line(out: str, start: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(start))


def rsum(reranker: rerank.Reranker | None = None, **options) -> str:
    return f"{retrieval_metrics(PLAIN, reranker=reranker, **options)['rsum']:6.1f}"


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_package_is_a_command():
    command = [sys.executable, "-m", "itrloss", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "rerank" in done.stdout


def test_a_terminal_without_greek_letters_gets_the_rest(saved, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert run("rerank", saved, "--methods", "fast") == 0
    with pytest.raises(SystemExit, match="0"):
        main(["rerank", "--help"])
    out.flush()
    table, _, text = out.buffer.getvalue().partition(b"usage: ")
    assert b"fast" in table
    assert b"fast" in text


# --- methods --------------------------------------------------------------------------------------


def test_every_method_has_a_line_of_its_recalls(saved, capsys):
    assert run("rerank", saved) == 0
    found = lines(capsys)
    assert found.keys() >= {"no re-ranking", *METHODS}
    assert rsum() in found["no re-ranking"][0]
    assert rsum(rerank.FastReranker()) in found["fast"][0]
    fast = retrieval_metrics(PLAIN, reranker=rerank.FastReranker())
    gain = fast["rsum"] - retrieval_metrics(PLAIN)["rsum"]
    assert f"{gain:+.1f}" in found["fast"][0]
    for name in METHODS:
        (line,) = found[name]
        assert len(line) <= 100
        assert ("left out" in line) == (name not in WITHOUT_BANK_OR_EMBEDDINGS)


def test_every_gain_lies_in_its_interval(saved, capsys):
    assert run("rerank", saved) == 0
    recalls = capsys.readouterr().out.partition("\n\n")[0]
    number = r"([-+][\d.]+)"
    intervals = re.findall(rf"{number} \({number}, {number}\)", recalls)
    assert len(intervals) == len(WITHOUT_BANK_OR_EMBEDDINGS)
    for change, low, high in intervals:
        assert float(low) <= float(change) <= float(high)
    assert any(float(low) < float(high) for _, low, high in intervals)


def test_embeddings_and_banks_leave_no_method_out(tmp_path, capsys):
    for seed, name in enumerate(("", "val_", "bank_")):
        images, texts = pairs(seed)
        save(tmp_path / f"{name}images.npy", images.astype(np.float16))
        save(tmp_path / f"{name}texts.npy", texts.astype(np.float16))
    given = [tmp_path / "images.npy", tmp_path / "texts.npy"]
    options = ["--val", tmp_path / "val_images.npy", tmp_path / "val_texts.npy"]
    options += ["--bank-images", tmp_path / "bank_images.npy"]
    options += ["--bank-texts", tmp_path / "bank_texts.npy"]
    assert run("eval", *given, *options) == 0
    found = lines(capsys)
    wanted = {}
    for name, kind in METHODS.items():
        wanted[name] = ["bank"] if kind.needs_bank else ["test", "bank"]
    wanted["k-reciprocal"] = ["test"]
    wanted["fast, calibrated"] = ["test", "bank"]
    for name, looked_for in wanted.items():
        assert [hubs(line) for line in found[name]] == looked_for, name
    images, texts, *bank = (torch.from_numpy(x).half() for x in (*pairs(), *pairs(2)))
    sim = Similarity(images, texts, *IDS)
    fitted = retrieval_metrics(sim, reranker=rerank.CSLS().fit(*bank))
    assert f"{fitted['rsum']:6.1f}" in found["csls"][1]


def test_embeddings_may_differ_in_precision(tmp_path):
    images, texts = pairs()
    given = (
        save(tmp_path / "v.npy", images),
        save(tmp_path / "w.npy", texts.astype(np.float64)),
    )
    assert run("eval", *given, "--methods", "fast") == 0


# --- banks and validation sets --------------------------------------------------------------------


def test_embeddings_are_calibrated_with_the_bank_that_they_are_re_ranked_by():
    images, texts, image_bank, text_bank = (torch.from_numpy(x) for x in (*pairs(1), *pairs(2)))
    banks = image_bank + 3.0, text_bank[:9] - 2.0
    validation = Similarity(images, texts, *IDS)
    found = comparison.compare_rerankers(validation, ("fast",), banks, validation)
    with_bank = rerank.FastReranker().fit(*banks).calibrate(validation)
    without = rerank.FastReranker().calibrate(validation)
    assert repr(found.entries[-1].reranker) == repr(with_bank)
    assert repr(with_bank) != repr(without)


def test_scores_are_calibrated_and_compared_with_a_bank(saved, tmp_path, capsys):
    bank = save(tmp_path / "bank.npy", np.random.default_rng(0).random((30, N * C)))
    val = save(tmp_path / "val.npy", scores(1))
    options = ("--bank-images", bank, "--val", val)
    assert run("rerank", saved, *options, "--methods", "fast", "qb-norm") == 0
    found = lines(capsys)
    assert len(found["fast"]) == 2
    assert len(found["fast, calibrated"]) == 2
    assert "needs banks" in found["qb-norm"][0]
    chosen = rerank.FastReranker().calibrate(torch.from_numpy(scores(1)))
    assert rsum(chosen) in found["fast, calibrated"][0]


def test_a_validation_set_may_have_another_size_than_a_bank_of_scores(saved, tmp_path, capsys):
    generator = np.random.default_rng(0)
    bank = save(tmp_path / "bank.npy", generator.random((5, N * C)))
    val = save(tmp_path / "val.npy", generator.random((4, 8)))
    assert run("rerank", saved, "--methods", "fast", "--bank-images", bank, "--val", val) == 0
    assert len(lines(capsys)["fast, calibrated"]) == 2


@pytest.mark.parametrize(
    ("side", "shape", "way"),
    [
        ("images", (2 * N * C, N * C), "image→text"),  # as many images as if they were texts
        ("texts", (N, N // 2), "text→image"),
    ],
)
def test_a_bank_of_one_side_has_any_number_of_queries(side, shape, way, saved, tmp_path, capsys):
    bank = save(tmp_path / "bank.npy", np.random.default_rng(0).random(shape))
    assert run("rerank", saved, "--methods", "fast", f"--bank-{side}", bank) == 0
    line = lines(capsys)["fast"][1]
    assert hubs(line) == f"bank ({way})"
    assert "†" in line  # the other direction has none


# --- ids and folds --------------------------------------------------------------------------------


def test_more_images_than_texts_have_ids(tmp_path):
    transposed = save(tmp_path / "t.npy", scores().T)  # five images per text
    images = save(tmp_path / "i.npy", IDS[1].numpy())
    texts = save(tmp_path / "j.npy", IDS[0].numpy())
    ids = ("--image-ids", images, "--text-ids", texts)
    assert run("rerank", transposed, *ids, "--methods", "fast") == 0


def test_transposed_scores_have_the_same_figures(tmp_path, capsys):
    transposed = save(tmp_path / "t.npy", scores().T)
    assert run("rerank", transposed, "--transpose", "--methods", "fast") == 0
    assert rsum() in lines(capsys)["no re-ranking"][0]


def test_texts_in_another_order_with_ids_have_the_same_figures(tmp_path, capsys):
    order = np.random.default_rng(0).permutation(N * C)
    shuffled = save(tmp_path / "s.npy", scores()[:, order])
    images = save(tmp_path / "i.npy", np.arange(N) + 7)
    texts = save(tmp_path / "j.npy", order // C + 7)
    ids = ("--image-ids", images, "--text-ids", texts)
    assert run("rerank", shuffled, *ids, "--methods", "fast") == 0
    assert rsum() in lines(capsys)["no re-ranking"][0]


def test_folds_retrieve_within_parts(saved, tmp_path, capsys):
    report, queries = tmp_path / "page.html", tmp_path / "q.csv"
    options = ("--folds", 3, "--methods", "fast", "--report", report, "--queries", queries)
    assert run("rerank", saved, *options) == 0
    out = capsys.readouterr().out
    assert f"{N} images, {N * C} texts" in out
    assert "in 3 parts" in out
    assert "in 3 parts" in report.read_text("utf-8")
    for name, method in {"no re-ranking": None, "fast†": rerank.FastReranker()}.items():
        assert rsum(method, folds=3) in first_line(out, name)
    rows = [row for row in read_csv(queries) if row["direction"] == "t2i"]
    owners = [int(row["id"]) for row in rows]
    assert owners == IDS[1].tolist()
    assert [int(row["first"]) // 4 for row in rows] == [owner // 4 for owner in owners]


def test_folds_of_ids_are_those_of_their_order(saved, tmp_path, capsys):
    images = save(tmp_path / "i.npy", IDS[0].numpy())
    texts = save(tmp_path / "j.npy", IDS[1].numpy())
    ids = ("--image-ids", images, "--text-ids", texts)
    assert run("rerank", saved, "--folds", 3, *ids, "--methods", "fast") == 0
    assert rsum(folds=3) in first_line(capsys.readouterr().out, "no re-ranking")


def test_run_files_of_folds_hold_the_candidates_of_the_part(saved, tmp_path):
    options = ("--folds", 3, "--methods", "csls", "--trec", tmp_path, "--top", 4)
    assert run("rerank", saved, *options) == 0
    wanted = retrieval_results(PLAIN, reranker=rerank.CSLS(), folds=3, hubness_k=4)
    for way, side in wanted.ways.items():
        found = [line.split()[2] for line in (tmp_path / f"{way}.run").read_text().splitlines()]
        assert [int(name.strip("imagetx")) for name in found] == side.top.flatten().tolist()


# --- any k, graded pairs, exclusions --------------------------------------------------------------

KS = (1, 3, 20, 50)


def test_columns_of_the_table_have_any_k(saved, capsys):
    assert run("rerank", saved, "--methods", "csls", "--ks", *KS) == 0
    wanted = retrieval_metrics(PLAIN, ks=KS)
    out = capsys.readouterr().out
    ways = first_line(out, " ")
    heads = out.partition(ways + "\n")[2].splitlines()[0]
    assert ways.split() == ["image→text", "text→image"]
    assert heads.split()[:9] == [*("R@1", "R@3", "R@20", "R@50") * 2, "RSUM"]
    line = first_line(out, "no re-ranking")
    names = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in KS]
    assert line.split()[2:-1] == [f"{wanted[name]:.1f}" for name in (*names, "rsum")]
    end_of_rsum = line.index(f"{wanted['rsum']:.1f}") + 5
    assert end_of_rsum == heads.index("RSUM") + 4


def test_tables_in_files_have_any_k(saved, tmp_path):
    table, latex = tmp_path / "metrics.csv", tmp_path / "t.tex"
    options = ("--methods", "csls", "--ks", *KS, "--metrics", table, "--latex", latex)
    assert run("rerank", saved, *options) == 0
    plain, csls = read_csv(table)
    assert (plain.pop("method"), plain.pop("hubs")) == ("no re-ranking", "")
    assert (csls.pop("method"), csls.pop("hubs")) == ("csls", "test")
    assert {name: float(x) for name, x in plain.items()} == retrieval_metrics(PLAIN, ks=KS)
    wanted = retrieval_metrics(PLAIN, ks=KS, reranker=rerank.CSLS())
    assert {name: float(x) for name, x in csls.items()} == wanted
    assert "R@3" in latex.read_text()
    assert "R@5 &" not in latex.read_text()


def write_pairs(path: Path, numbers: torch.Tensor) -> Path:
    if path.suffix == ".npy":
        return save(path, numbers.numpy())
    delimiter = "," if path.suffix == ".csv" else " "
    np.savetxt(path, numbers.numpy(), fmt="%d", delimiter=delimiter)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".npy"])
def test_graded_pairs_and_exclusions_come_from_files(suffix, saved, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(N * N * C, generator=generator)[:80]
    images, texts = chosen // (N * C), chosen % (N * C)
    grades = torch.randint(0, 4, (80,), generator=generator)
    graded = write_pairs(tmp_path / f"g{suffix}", torch.stack([images, texts, grades], 1))
    excluded = write_pairs(tmp_path / f"e{suffix}", torch.stack([images, texts], 1)[::7])
    table = tmp_path / "metrics.csv"
    options = ("--relevant", graded, "--exclude", excluded, "--methods", "fast", "--top", 60)
    results = ("--metrics", table, "--trec", tmp_path, "--write", "no re-ranking")
    assert run("rerank", saved, *options, *results) == 0
    assert f"right by {graded}" in capsys.readouterr().out

    judged = Judgements(images, texts, grades)
    left_out = images[::7], texts[::7]
    for row, method in zip(read_csv(table), (None, rerank.FastReranker()), strict=True):
        wanted = retrieval_metrics(PLAIN, reranker=method, relevant=judged, exclude=left_out)
        assert {name: float(row[name]) for name in wanted} == wanted

    ranked = set()
    for line in (tmp_path / "i2t.run").read_text().splitlines():
        image, _, text = line.split()[:3]
        ranked.add((int(image.removeprefix("image")), int(text.removeprefix("text"))))
    every = {(i, j) for i in range(N) for j in range(N * C)}
    assert ranked == every - set(zip(*(x.tolist() for x in left_out), strict=True))
