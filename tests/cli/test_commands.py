"""``itrloss rerank`` and ``itrloss eval`` print and write the figures of the library."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections import defaultdict
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
    table, _, _ = out.partition("\n\n")
    left_out = re.findall("^.* left out: .*$", out, re.M)
    found: dict[str, list[str]] = defaultdict(list)
    for line in table.splitlines() + left_out:
        name, *_ = re.split(r"†|, bank|  +\d| left out", line)
        found[name].append(line)
    return found


def hubs(line: str) -> str:
    """Where a line says that hubs were looked for."""
    bank = re.search(r"bank(?: \(.*?\))?(†?)", line)
    if bank is not None:
        return bank[0].rstrip("†")
    return "test" if "†" in line else ""


def first_line(out: str, start: str) -> str:
    """The first line that begins with a text."""
    return next(line for line in out.splitlines() if line.startswith(start))


def rsum(reranker: rerank.Reranker | None = None, **options) -> str:
    """The sum of recalls as it is printed."""
    metrics = retrieval_metrics(PLAIN, reranker=reranker, **options)
    return f"{metrics['rsum']:6.1f}"


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
    plain = retrieval_metrics(PLAIN)
    fast = retrieval_metrics(PLAIN, reranker=rerank.FastReranker())
    gain = fast["rsum"] - plain["rsum"]
    assert f"{gain:+.1f}" in found["fast"][0]
    for name in METHODS:
        (line,) = found[name]
        assert len(line) <= 100
        assert ("left out" in line) == (name not in WITHOUT_BANK_OR_EMBEDDINGS)


def test_every_gain_lies_in_its_interval(saved, capsys):
    assert run("rerank", saved) == 0
    out = capsys.readouterr().out
    recalls, _, _ = out.partition("\n\n")
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
    wanted["fast, calibrated"] = ["test", "bank"]
    for name, looked_for in wanted.items():
        assert [hubs(line) for line in found[name]] == looked_for, name
    images, texts = (torch.from_numpy(x).half() for x in pairs())
    bank = [torch.from_numpy(x).half() for x in pairs(2)]
    sim = Similarity(images, texts, *IDS)
    fitted = retrieval_metrics(sim, reranker=rerank.CSLS().fit(*bank))
    assert f"{fitted['rsum']:6.1f}" in found["csls"][1]


def test_embeddings_may_differ_in_precision(tmp_path):
    images, texts = pairs()
    single = save(tmp_path / "v.npy", images)
    double = save(tmp_path / "w.npy", texts.astype(np.float64))
    assert run("eval", single, double, "--methods", "fast") == 0


# --- banks and validation sets --------------------------------------------------------------------


def test_embeddings_are_calibrated_with_the_bank_that_they_are_re_ranked_by():
    images, texts = (torch.from_numpy(x) for x in pairs(1))
    image_bank, text_bank = (torch.from_numpy(x) for x in pairs(2))
    banks = (image_bank + 3.0, text_bank[:9] - 2.0)
    validation = Similarity(images, texts, *IDS)
    found = comparison.compare_rerankers(validation, ("fast",), banks, validation)
    calibrated = found.entries[-1].reranker
    with_bank = rerank.FastReranker().fit(*banks).calibrate(validation)
    without = rerank.FastReranker().calibrate(validation)
    assert repr(calibrated) == repr(with_bank)
    assert repr(with_bank) != repr(without)


def test_scores_are_calibrated_and_compared_with_a_bank(saved, tmp_path, capsys):
    bank_scores = np.random.default_rng(0).random((30, N * C))
    bank = save(tmp_path / "bank.npy", bank_scores)
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
    options = ("--bank-images", bank, "--val", val)
    assert run("rerank", saved, "--methods", "fast", *options) == 0
    found = lines(capsys)
    assert len(found["fast, calibrated"]) == 2


def test_held_out_pairs_have_ids_of_their_own(saved, tmp_path, capsys):
    generator = np.random.default_rng(0)
    order = generator.permutation(N * C)[:-7]  # images have different numbers of texts
    val = save(tmp_path / "val.npy", scores(1)[:, order])
    images = save(tmp_path / "i.npy", np.arange(N) + 7)
    texts = save(tmp_path / "t.npy", order // C + 7)
    ids = ("--val-image-ids", images, "--val-text-ids", texts)
    assert run("rerank", saved, "--val", val, *ids, "--methods", "fast") == 0
    chosen = rerank.FastReranker().calibrate(
        torch.from_numpy(scores(1)[:, order]), torch.arange(N) + 7, torch.from_numpy(order // C + 7)
    )
    assert rsum(chosen) in lines(capsys)["fast, calibrated"][0]


@pytest.mark.parametrize(
    ("side", "shape", "way"),
    [
        ("images", (2 * N * C, N * C), "image→text"),  # as many images as if they were texts
        ("texts", (N, N // 2), "text→image"),
    ],
)
def test_a_bank_of_one_side_has_any_number_of_queries(side, shape, way, saved, tmp_path, capsys):
    bank_scores = np.random.default_rng(0).random(shape)
    bank = save(tmp_path / "bank.npy", bank_scores)
    assert run("rerank", saved, "--methods", "fast", f"--bank-{side}", bank) == 0
    _, with_bank = lines(capsys)["fast"]
    assert hubs(with_bank) == f"bank ({way})"
    assert "†" in with_bank  # the other direction has none


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
    report = tmp_path / "page.html"
    queries = tmp_path / "q.csv"
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
    for row in rows:
        part = int(row["id"]) // 4
        part_of_first = int(row["first"]) // 4
        assert part_of_first == part


def test_folds_of_ids_are_those_of_their_order(saved, tmp_path, capsys):
    images = save(tmp_path / "i.npy", IDS[0].numpy())
    texts = save(tmp_path / "j.npy", IDS[1].numpy())
    ids = ("--image-ids", images, "--text-ids", texts)
    assert run("rerank", saved, "--folds", 3, *ids, "--methods", "fast") == 0
    out = capsys.readouterr().out
    assert rsum(folds=3) in first_line(out, "no re-ranking")


def test_run_files_of_folds_hold_the_candidates_of_the_part(saved, tmp_path):
    options = ("--folds", 3, "--methods", "csls", "--trec", tmp_path, "--top", 4)
    assert run("rerank", saved, *options) == 0
    wanted = retrieval_results(PLAIN, reranker=rerank.CSLS(), folds=3, hubness_k=4)
    for way, side in wanted.ways.items():
        numbers = []
        for line in (tmp_path / f"{way}.run").read_text().splitlines():
            _, _, candidate, *_ = line.split()
            numbers.append(int(candidate.strip("imagetx")))
        assert numbers == side.top.flatten().tolist()


# --- any k, graded pairs, exclusions --------------------------------------------------------------

KS = (1, 3, 20, 50)


def test_columns_of_the_table_have_any_k(saved, capsys):
    assert run("rerank", saved, "--methods", "csls", "--ks", *KS) == 0
    wanted = retrieval_metrics(PLAIN, ks=KS)
    out = capsys.readouterr().out
    ways = first_line(out, " ")
    _, _, below = out.partition(ways + "\n")
    heads = below.splitlines()[0]
    assert ways.split() == ["image→text", "text→image"]
    of_one_way = ["R@1", "R@3", "R@20", "R@50"]
    assert heads.split()[:9] == [*of_one_way, *of_one_way, "RSUM"]
    line = first_line(out, "no re-ranking")
    names = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in KS]
    figures = [f"{wanted[name]:.1f}" for name in (*names, "rsum")]
    assert line.split()[2:-1] == figures
    rsum_printed = f"{wanted['rsum']:.1f}"
    end_of_rsum = line.index(rsum_printed) + 5
    assert end_of_rsum == heads.index("RSUM") + 4


def test_tables_in_files_have_any_k(saved, tmp_path):
    table = tmp_path / "metrics.csv"
    latex = tmp_path / "t.tex"
    options = ("--methods", "csls", "--ks", *KS, "--metrics", table, "--latex", latex)
    assert run("rerank", saved, *options) == 0
    plain, csls = read_csv(table)
    assert plain.pop("method") == "no re-ranking"
    assert plain.pop("hubs") == ""
    assert csls.pop("method") == "csls"
    assert csls.pop("hubs") == "test"
    found = {name: float(x) for name, x in plain.items()}
    assert found == retrieval_metrics(PLAIN, ks=KS)
    found = {name: float(x) for name, x in csls.items()}
    assert found == retrieval_metrics(PLAIN, ks=KS, reranker=rerank.CSLS())
    assert "R@3" in latex.read_text()
    assert "R@5 &" not in latex.read_text()


def write_pairs(path: Path, numbers: torch.Tensor) -> Path:
    """Write rows of numbers in the format of the file's name."""
    if path.suffix == ".npy":
        return save(path, numbers.numpy())
    delimiter = "," if path.suffix == ".csv" else " "
    np.savetxt(path, numbers.numpy(), fmt="%d", delimiter=delimiter)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".npy"])
def test_graded_pairs_and_exclusions_come_from_files(suffix, saved, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(N * N * C, generator=generator)[:80]
    images = chosen // (N * C)
    texts = chosen % (N * C)
    grades = torch.randint(0, 4, (80,), generator=generator)
    graded = write_pairs(tmp_path / f"g{suffix}", torch.stack([images, texts, grades], 1))
    excluded = write_pairs(tmp_path / f"e{suffix}", torch.stack([images, texts], 1)[::7])
    table = tmp_path / "metrics.csv"
    options = ("--relevant", graded, "--exclude", excluded, "--methods", "fast", "--top", 60)
    results = ("--metrics", table, "--trec", tmp_path, "--write", "no re-ranking")
    assert run("rerank", saved, *options, *results) == 0
    assert f"right by {graded}" in capsys.readouterr().out

    judged = Judgements(images, texts, grades)
    left_out = (images[::7], texts[::7])
    for row, method in zip(read_csv(table), (None, rerank.FastReranker()), strict=True):
        wanted = retrieval_metrics(PLAIN, reranker=method, relevant=judged, exclude=left_out)
        found = {name: float(row[name]) for name in wanted}
        assert found == wanted
    every = {(i, j) for i in range(N) for j in range(N * C)}
    excluded_pairs = set(zip(images[::7].tolist(), texts[::7].tolist(), strict=True))
    assert ranked_pairs(tmp_path / "i2t.run") == every - excluded_pairs


def ranked_pairs(run_file: Path) -> set[tuple[int, int]]:
    """Images and texts of a run file of images as queries."""
    ranked = set()
    for line in run_file.read_text().splitlines():
        image, _, text, *_ = line.split()
        pair = (int(image.removeprefix("image")), int(text.removeprefix("text")))
        ranked.add(pair)
    return ranked
