"""What the commands print and write is what the library computes."""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.command_line import FAST, C, N, pairs, refused, run

import itrloss
from itrloss import Similarity
from itrloss.cli import main
from itrloss.cli.comparison import compare_rerankers
from itrloss.rerank import FastReranker

from .conftest import ARRAYS

IDS = torch.arange(N), torch.arange(N * C) // C
TENSORS = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
BANKS = TENSORS["bank_images"].float(), TENSORS["bank_texts"].float()


def test_embeddings_are_calibrated_with_the_bank_that_they_are_re_ranked_by():
    """Far from the held-out pairs, where it changes what is chosen."""
    images, texts = (torch.from_numpy(x) for x in pairs(1))
    banks = BANKS[0] + 3.0, BANKS[1][:9] - 2.0
    validation = Similarity(images, texts, *IDS)
    test = Similarity(images + 1.0, texts + 1.0, *IDS)
    calibrated = compare_rerankers(test, ("fast",), banks, validation).entries[-1].reranker
    with_bank = FastReranker().fit(*banks).calibrate(validation)
    assert repr(calibrated) == repr(with_bank) != repr(FastReranker().calibrate(validation))


# --- surroundings ---------------------------------------------------------------------------------


def test_the_version_is_that_of_the_library(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"itrloss {itrloss.__version__}\n"


@pytest.mark.slow
def test_without_the_extra_the_command_names_it_in_two_lines():
    """What the library needs brings none of its packages along."""
    names = ["typer", "rich", "pandas"]
    code = """
import os, sys
import itrloss
from itrloss import cli
assert not {"typer", "pandas"} & set(sys.modules)
for missing in sys.argv[1:]:  # a process for each, after one import
    if not os.fork():
        sys.modules[missing] = None
        sys.exit(cli.main(["rerank", "sims.npy"]))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)"""
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.stdout.split() == ["2"] * 3, done.stderr
    said = done.stderr.splitlines()
    for name, named in zip(names, said[::2], strict=True):
        assert named.startswith("itrloss: ") and name in named
    assert said[1::2] == ["pip install 'itrloss[cli,files,report]' has what commands need"] * 3


def test_the_package_is_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["itrloss"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        runpy.run_module("itrloss", run_name="__main__")
    signal.signal(signal.SIGTERM, before)
    text = capsys.readouterr().out
    assert "rerank" in text and "compare" in text


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("command", ["rerank", "eval", "compare"])
def test_help_has_groups_and_three_examples_that_run(command, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    groups = {"The test set", "The table"}
    if command != "compare":
        groups |= {"Held-out pairs and banks", "Methods"}
        groups |= {"The results of the method to take, or of the first"}
    for group in groups:
        assert f"─ {group} ─" in text
    examples = " ".join(text.partition("Examples:")[2].split()).split(f"itrloss {command}")[1:]
    assert len(examples) == 3


def test_a_terminal_of_another_encoding_gets_question_marks(saved, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert run(*FAST, "--samples", 9) == 0
    assert run("rerank", "--help") == 0
    out.flush()
    assert b"fast?" in out.buffer.getvalue() and b"Examples:" in out.buffer.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_tables_fit_the_terminal(width: int, saved, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    banks = ("--bank-images", "image_bank.npy", "--bank-texts", "text_bank.npy")
    assert run("rerank", "sims.npy", *banks, "--samples", 9) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    lines = text.splitlines()[1:]  # below what is compared
    assert max(map(len, lines)) <= width
    assert "\x1b[1;32m" in terminal.getvalue() and "★" in text  # the best row
    assert "mutual-proximity†" in text


class Terminal(io.StringIO):
    """A terminal of a width."""

    def isatty(self) -> bool:
        return True


# --- which method to take, and what was computed --------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--methods csls,fast", "Take csls: in our runs it gained most"),
        ("--methods fast", "Choose on held-out pairs"),
        ("--methods csls --val sims.npy", "Take csls: of these rows it has the highest RSUM on"),
        ("--methods nnn,csls --bank-texts text_bank.npy", "Take csls: "),
    ],
)
def test_a_sentence_says_which_method_to_take(options: str, sentence: str, saved, capsys):
    assert run("rerank", "hubs.npy", "--samples", 9, *options.split()) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_results_are_of_the_method_to_take(saved, capsys):
    for methods, written in (("fast,csls", "csls"), ("fast", "fast")):
        command = ("rerank", "hubs.npy", "--samples", 9, "--methods", methods)
        assert run(*command, "--out", f"{methods}.npz") == 0
        assert f"written ({written}): {methods}.npz" in capsys.readouterr().out
    with np.load("fast.npz") as fast, np.load("fast,csls.npz") as csls:
        assert not np.array_equal(fast["i2t"], csls["i2t"])


def test_ids_of_texts_alone_are_numbers_of_images(saved):
    np.savetxt("numbers.txt", ARRAYS["shuffled_t"] - 7, "%d")
    command = ("rerank", "shuffled.npy", "--methods", "csls", "--samples", 9)
    for ids in (("--text-ids", "numbers.txt"), ("--image-ids", "i.npy", "--text-ids")):
        more = ids if len(ids) == 2 else (*ids, "shuffled_t.npy")
        assert run(*command, *more, "--queries", f"{len(ids)}.csv") == 0
    alone, both = (pd.read_csv(f"{n}.csv") for n in (2, 3))
    assert alone["best_rank"].tolist() == both["best_rank"].tolist()


def test_messages_on_held_out_pairs_name_their_own_options(saved, capsys):
    np.save("uneven.npy", np.load("sims.npy")[:, :-1] / 2)
    Path("names.txt").write_text("".join(f"a{i}.jpg\n" for i in range(N)))
    np.savetxt("numbers.txt", np.arange(N * C) // C, "%d")
    command = ("rerank", "sims.npy", "--methods", "csls", "--samples", 9, "--val")
    found = refused(capsys, *command, "uneven.npy")
    assert "--val: --val-image-ids, --val-text-ids: needed for" in found
    ids = ("--val-image-ids", "names.txt", "--val-text-ids", "numbers.txt")
    found = refused(capsys, *command, "hubs.npy", *ids)
    assert "--val: --val-text-ids: expected strings with strings in --val-image-ids" in found


def test_every_result_says_what_it_was_computed_with(saved):
    results = ["--metrics", "m.csv", "--queries", "q.csv", "--latex", "t.tex", "--report", "r.html"]
    assert run("rerank", "sims.npy", "--methods", "csls", "--samples", 9, *results) == 0
    assert run("compare", "sims.npy", "other.npy", "--samples", 9, "--report", "c.html") == 0
    today = datetime.now().astimezone().date().isoformat()
    for path in ("m.csv", "q.csv", "t.tex", "r.html", "c.html"):
        text = Path(path).read_text(encoding="utf-8")
        for fact in (f"itrloss {itrloss.__version__}", today, "sims.npy", "--samples 9"):
            assert fact in text, (path, fact)
    facts = pd.read_csv("m.csv")
    command = "itrloss rerank sims.npy --methods csls --samples 9 --metrics m.csv --queries q.csv"
    assert set(facts["command"]) == {f"{command} --latex t.tex --report r.html"}


# --- surroundings of a process --------------------------------------------------------------------


def test_a_reader_that_has_read_enough_gets_no_message(saved, capsys, monkeypatch):
    """As in ``itrloss rerank … | head -n 1``."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as closed:  # what is left is flushed at the end, without an error
        monkeypatch.setattr(sys, "stdout", closed)
        assert run("rerank", "sims.npy", "--methods", "csls") == 1
        closed.write("more")
    assert not capsys.readouterr().err
