"""What the commands print and write is what the library computes."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, pairs, run, table_line

import itrloss
from itrloss import Similarity
from itrloss.cli import main
from itrloss.cli.comparison import METHODS, compare_rerankers
from itrloss.metrics import Judgements, retrieval_metrics, retrieval_results
from itrloss.rerank import CSLS, FastReranker

from .conftest import ARRAYS

IDS = torch.arange(N), torch.arange(N * C) // C
TENSORS = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
PLAIN = TENSORS["sims"]
EMBEDDED = Similarity(TENSORS["images"], TENSORS["texts"].float(), *IDS)
HELD_OUT = TENSORS["val"], TENSORS["i"], TENSORS["val_t"]
BANKS = TENSORS["bank_images"].float(), TENSORS["bank_texts"].float()
ON_BANK = CSLS().fit(*BANKS)
IDS_7 = "--image-ids i.npy --text-ids"
FAST = {"reranker": FastReranker()}


def fitted(**banks: torch.Tensor) -> dict:
    return {"reranker": CSLS().fit(**banks)}


# a command, words of its output, and figures by the names of rows: scores and options
TRANSCRIPTS = [
    (
        "rerank sims.npy --methods fast csls",
        "sims.npy: 12 images, 60 texts (5 an image, one behind the other)",
        {"no re-ranking": (PLAIN, {}), "fast†": (PLAIN, FAST), "csls†": (PLAIN, fitted())},
    ),
    ("rerank transposed.npy --transpose --methods csls", "", {"no re-ranking": (PLAIN, {})}),
    (
        f"rerank shuffled.npy {IDS_7} shuffled_t.npy --methods fast",
        "(by the ids given)",
        {"no re-ranking": (PLAIN, {}), "fast†": (PLAIN, FAST)},
    ),
    (
        "rerank transposed.npy --image-ids t.npy --text-ids i.npy --methods csls",
        "60 images, 12 texts",
        {},
    ),
    (
        "rerank sims.npy --folds 3 --methods fast",
        "in 3 parts",
        {"no re-ranking": (PLAIN, {"folds": 3}), "fast†": (PLAIN, {**FAST, "folds": 3})},
    ),
    (
        f"rerank sims.npy --folds 3 {IDS_7} t.npy --methods csls",
        "in 3 parts",
        {"no re-ranking": (PLAIN, {"folds": 3})},
    ),
    (
        "rerank sims.npy --ks 1 3 20 50 --methods csls",
        "R@20",
        {"no re-ranking": (PLAIN, {"ks": (1, 3, 20, 50)})},
    ),
    (
        f"rerank sims.npy --val val.npy --val-image-ids i.npy --val-text-ids val_t.npy {IDS_7} "
        "t.npy --bank-images image_bank.npy --methods fast qb-norm",
        "qb-norm was left out: needs banks of queries: --bank-images and --bank-texts.",
        {
            "fast†": (PLAIN, FAST),
            "fast, calibrated†": (PLAIN, {"reranker": FastReranker().calibrate(*HELD_OUT)}),
            "fast, bank (image→text)†": (
                PLAIN,
                {"reranker": FastReranker().fit(images=TENSORS["image_bank"])},
            ),
        },
    ),
    (
        "rerank sims.npy --bank-images image_bank.npy --bank-texts text_bank.npy --methods csls",
        "",
        {
            "csls†": (PLAIN, fitted()),
            "csls, bank": (
                PLAIN,
                fitted(images=TENSORS["image_bank"], texts=TENSORS["text_bank"]),
            ),
        },
    ),
    (
        "rerank sims.npy --bank-texts text_bank.npy --methods csls",
        "",
        {"csls, bank (text→image)†": (PLAIN, fitted(texts=TENSORS["text_bank"]))},
    ),
    (
        "eval images.npy texts.npy --bank-images bank_images.npy --bank-texts bank_texts.npy "
        "--val val_images.npy val_texts.npy --methods csls fast",
        "images.npy, texts.npy: 12 images, 60 texts",
        {
            "no re-ranking": (EMBEDDED, {}),
            "csls†": (EMBEDDED, fitted()),
            "csls, bank": (EMBEDDED, {"reranker": ON_BANK}),
            "fast, calibrated, bank": (EMBEDDED, {}),
        },
    ),
]
CALIBRATED = FastReranker().fit(*BANKS)
CALIBRATED.calibrate(Similarity(TENSORS["val_images"], TENSORS["val_texts"], *IDS))
TRANSCRIPTS[-1][2]["fast, calibrated, bank"] = (EMBEDDED, {"reranker": CALIBRATED})


@pytest.mark.parametrize(("command", "words", "figures"), TRANSCRIPTS)
def test_printed_figures_are_those_of_the_library(command, words, figures, saved, capsys):
    assert run(*command.split(), "--samples", 9) == 0
    out, err = capsys.readouterr()
    assert words in " ".join(out.split())
    assert not err
    for name, (sim, options) in figures.items():
        metrics = retrieval_metrics(sim, **options)
        names = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in options.get("ks", (1, 5, 10))]
        printed = table_line(out, name).removeprefix(name).split()
        wanted = [f"{metrics[figure]:.1f}" for figure in (*names, "rsum")]
        assert printed[: len(wanted)] == wanted, name


def test_every_method_has_a_row_or_a_reason(saved, capsys):
    assert run("rerank", "sims.npy", "--samples", 20) == 0
    out = capsys.readouterr().out
    for name, kind in METHODS.items():
        if kind.needs_bank or kind.needs_embeddings:
            assert f"\n{name} was left out: needs " in out
        else:
            line = table_line(out, name + "†")
            change, low, high = re.findall(r"[-+][\d.]+", line)
            assert float(low) <= float(change) <= float(high)
            assert re.search(r"\d\.\ds$", line)  # seconds
    banks = ["--bank-images", "bank_images.npy", "--bank-texts", "bank_texts.npy"]
    assert run("eval", "images.npy", "texts.npy", *banks, "--samples", 20) == 0
    out = capsys.readouterr().out
    assert "left out" not in out
    for name, kind in METHODS.items():
        assert table_line(out, f"{name}, bank")
        assert (f"\n{name}†" in out) != kind.needs_bank


def test_embeddings_are_calibrated_with_the_bank_that_they_are_re_ranked_by():
    """Far from the held-out pairs, where it changes what is chosen."""
    images, texts = (torch.from_numpy(x) for x in pairs(1))
    banks = BANKS[0] + 3.0, BANKS[1][:9] - 2.0
    validation = Similarity(images, texts, *IDS)
    calibrated = compare_rerankers(validation, ("fast",), banks, validation).entries[-1].reranker
    with_bank = FastReranker().fit(*banks).calibrate(validation)
    assert repr(calibrated) == repr(with_bank) != repr(FastReranker().calibrate(validation))


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def numbers(row: Mapping[str, str]) -> dict[str, float]:
    return {name: float(x) for name, x in row.items() if name not in ("method", "hubs")}


def test_files_have_any_k(saved):
    options = ("--methods", "csls", "--ks", 1, 3, 20, 50, "--metrics", "m.csv", "--latex", "t.tex")
    assert run("rerank", "sims.npy", *options) == 0
    plain, csls = read_csv("m.csv")
    assert [plain["method"], plain["hubs"]] == ["no re-ranking", ""]
    assert [csls["method"], csls["hubs"]] == ["csls", "test"]
    ks = (1, 3, 20, 50)
    assert numbers(plain) == retrieval_metrics(PLAIN, ks=ks)
    assert numbers(csls) == retrieval_metrics(PLAIN, ks=ks, reranker=CSLS())
    latex = Path("t.tex").read_text(encoding="utf-8")
    assert "R@3 &" in latex and "R@5 &" not in latex


def test_folds_rank_the_candidates_of_their_part(saved):
    options = ("--folds", 3, "--methods", "csls", "--trec", ".", "--top", 4, "--queries", "q.csv")
    assert run("rerank", "sims.npy", *options) == 0
    wanted = retrieval_results(PLAIN, reranker=CSLS(), folds=3, hubness_k=4)
    for way, side in wanted.ways.items():
        candidates = []
        for line in Path(f"{way}.run").read_text().splitlines():
            _, _, candidate, *_ = line.split()
            candidates.append(int(candidate.strip("imagetx")))
        assert candidates == side.top.flatten().tolist()
    rows = [row for row in read_csv("q.csv") if row["direction"] == "t2i"]
    assert [int(row["id"]) for row in rows] == IDS[1].tolist()
    assert all(int(row["id"]) // 4 == int(row["first"]) // 4 for row in rows)


@pytest.mark.parametrize("suffix", ["txt", "csv", "npy"])
def test_graded_pairs_and_exclusions_come_from_files(suffix, saved, capsys):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(N * N * C, generator=generator)[:80]
    images, texts = chosen // (N * C), chosen % (N * C)
    grades = torch.randint(0, 4, (80,), generator=generator)
    for name, columns in (("g", [images, texts, grades]), ("e", [images[::7], texts[::7]])):
        table = torch.stack(columns, 1).numpy()
        if suffix == "npy":
            np.save(f"{name}.npy", table)
        else:
            np.savetxt(f"{name}.{suffix}", table, "%d", "," if suffix == "csv" else " ")
    rules = ("--relevant", f"g.{suffix}", "--exclude", f"e.{suffix}")
    results = ("--metrics", "m.csv", "--trec", ".", "--write", "no re-ranking", "--top", 60)
    assert run("rerank", "sims.npy", *rules, "--methods", "fast", *results) == 0
    assert f"right by g.{suffix}" in capsys.readouterr().out
    excluded = images[::7], texts[::7]
    options = {"relevant": Judgements(images, texts, grades), "exclude": excluded}
    for row, method in zip(read_csv("m.csv"), (None, FastReranker()), strict=True):
        wanted = retrieval_metrics(PLAIN, reranker=method, **options)
        assert {name: float(row[name]) for name in wanted} == wanted
    ranked = set()
    for line in Path("i2t.run").read_text().splitlines():
        image, _, text, *_ = line.split()
        ranked.add(int(image.removeprefix("image")) * N * C + int(text.removeprefix("text")))
    assert ranked == set(range(N * N * C)) - set(chosen[::7].tolist())


# --- several models -------------------------------------------------------------------------------


def test_re_ranked_scores_are_compared_in_both_directions(saved, capsys):
    banks = {"images": TENSORS["image_bank"], "texts": TENSORS["text_bank"]}
    results = {"sims": retrieval_results(PLAIN), "plain": retrieval_results(PLAIN)}
    for name, used in {"alone": [], "bank": ["images", "texts"], "half": ["images"]}.items():
        reranker = CSLS().fit(**{side: banks[side] for side in used})
        results[name] = retrieval_results(PLAIN, reranker=reranker)
    for suffix in ("", ".T"):
        transpose = ["--transpose"] if suffix else []
        for name in ("sims", "image_bank", "text_bank"):
            np.save(f"{name}{suffix}.npy", ARRAYS[name].T if suffix else ARRAYS[name])
        base = f"sims{suffix}.npy"
        of_images = ["--bank-images", f"image_bank{suffix}.npy"]
        options = {
            "plain": ["--write", "no re-ranking"],
            "alone": [],
            "bank": [*of_images, "--bank-texts", f"text_bank{suffix}.npy"],
            "half": of_images,
        }
        for name, given in options.items():
            command = ("rerank", base, *transpose, "--methods", "csls", *given, "--samples", 9)
            assert run(*command, "--out", f"{name}.npz") == 0
        capsys.readouterr()
        files = [base, *(f"{name}.npz" for name in options)]
        names = ("--names", *results)
        assert run("compare", *files, *names, *transpose, "--samples", 40) == 0
        out = capsys.readouterr().out
        for name, dagger in zip(results, ("", "", "†", "", "†"), strict=True):
            metrics = results[name].metrics()
            assert f"  {metrics['rsum']:.1f}" in table_line(out, name + dagger)
    np.savez("one.npz", i2t=ARRAYS["sims"], t2i=ARRAYS["other"], transductive=[True, True])
    assert run("compare", "one.npz:i2t", "other.npy", "--samples", 9) == 0
    figures = retrieval_metrics(PLAIN)
    assert f"  {figures['rsum']:.1f}" in table_line(capsys.readouterr().out, "one")


# --- surroundings ---------------------------------------------------------------------------------


def test_the_version_is_that_of_the_library(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"itrloss {itrloss.__version__}\n"


@pytest.mark.slow
def test_the_package_is_a_command_without_which_pandas_is_named(saved):
    command = [sys.executable, "-m", "itrloss", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "rerank" in done.stdout
    code = (
        "import sys; sys.modules['pandas'] = None; from itrloss import cli; cli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "rerank", "sims.npy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.count("\n") == 1
    assert "pandas: install itrloss with the extra 'cli'" in done.stderr


def test_help_has_groups_and_examples_in_any_encoding(saved, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert run("rerank", "sims.npy", "--methods", "fast") == 0
    with pytest.raises(SystemExit, match="0"):
        main(["rerank", "--help"])
    out.flush()
    table, _, text = out.buffer.getvalue().partition(b"usage: ")
    assert b"fast" in table
    assert b"held-out pairs and banks:" in text and b"examples:\n  itrloss rerank sims" in text


def test_a_reader_that_has_read_enough_gets_no_message(saved):
    """As in ``itrloss rerank … | head -n 1``."""
    command = [sys.executable, "-m", "itrloss", "rerank", "sims.npy", "--methods", "csls"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("sims.npy")
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == 1
