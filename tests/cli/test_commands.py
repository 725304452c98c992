"""What the commands print and write is what the library computes."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from support.command_line import C, N, pairs, run

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
    calibrated = compare_rerankers(validation, ("fast",), banks, validation).entries[-1].reranker
    with_bank = FastReranker().fit(*banks).calibrate(validation)
    assert repr(calibrated) == repr(with_bank) != repr(FastReranker().calibrate(validation))


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
