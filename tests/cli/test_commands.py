"""What the commands print and write is what the library computes."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, pairs, run

import itrloss
from itrloss import Similarity
from itrloss.cli import main
from itrloss.cli.comparison import compare_rerankers
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
