"""Wrong arguments of the commands are named in one line, and nothing is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, pairs, refused, run, scores

import itrloss
from itrloss.checks import check_number
from itrloss.cli import main


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file of scores in the working directory."""
    monkeypatch.chdir(tmp_path)
    np.save("sims.npy", scores())
    return "sims.npy"


def write_lines(path: str, values: object) -> None:
    Path(path).write_text("".join(f"{x}\n" for x in values))


def test_the_version_is_that_of_the_library(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"itrloss {itrloss.__version__}\n"


def test_a_reader_that_has_read_enough_gets_no_message(saved):
    """As in ``itrloss rerank … | head -n 1``."""
    command = [sys.executable, "-m", "itrloss", "rerank", saved, "--methods", "csls"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(saved)
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == 1


def test_there_is_no_command_for_benchmarks(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench"])
    assert "invalid choice: 'bench'" in capsys.readouterr().err


IDS = ("--image-ids", "ids.txt", "--text-ids", "ids.txt")
VAL_IDS = ("--val-image-ids", "ids.txt", "--val-text-ids", "ids.txt")
OUT = ("--out", "o.npz")
PAGE = (*OUT, "--report", "r.html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "nowhere/out.npz"), "there is no directory"),
        (("--out", "o.npy"), "--out: expected a file named \\*.npz, got o.npy"),
        (("--rankings", "r"), "--rankings: expected a file named \\*.npz, got r"),
        (("--queries", "q.txt"), "--queries: expected a file named \\*.csv"),
        (("--metrics", "m.json"), "--metrics: expected a file named \\*.csv"),
        (("--latex", "t.pdf"), "--latex: expected a file named \\*.tex"),
        (("--report", "r.htm"), "--report: expected a file named \\*.html"),
        (("--trec", "nowhere/trec"), "there is no directory nowhere"),
        (("--trec", "sims.npy"), "sims.npy: expected a directory to write into, got a file"),
        (("--out", "."), ".: expected a file to write, got a directory"),
        (("--top", 0), "--top"),
        ((*OUT, "--write", "csls"), "--write: expected 'no re-ranking' or 'fast', got 'csls'"),
        ((*OUT, "--i2t", 0, 1), "i2t: expected a number above 0"),
        ((*OUT, "--i2t", 1e39, 1), r"i2t: expected .* in the range of float32, got 1e\+39"),
        ((*OUT, "--image-ids", "ids.txt"), "--image-ids, --text-ids: expected both or neither"),
        ((*OUT, *IDS), r"--image-ids: expected shape \(12,\)"),
        ((*OUT, "--val-image-ids", "ids.txt"), "--val-image-ids, --val-text-ids: expected both"),
        ((*OUT, *VAL_IDS), "--val-image-ids, --val-text-ids: expected --val, too"),
        ((*OUT, "--val", "val.npy", *VAL_IDS), r"--val-image-ids: expected shape \(7,\)"),
        ((*OUT, "--image-ids", "long.txt", *IDS[2:]), "long.txt: expected integers of 64 bits"),
        ((*OUT, "--image-ids", "bytes.txt", *IDS[2:]), "bytes.txt: expected UTF-8"),
        ((*OUT, "--text-names", "ids.txt"), "--text-names: expected --report, too"),
        ((*PAGE, "--text-names", "ids.txt"), "ids.txt: expected a line .* 60 texts, got 3"),
        ((*PAGE, "--text-names", "bytes.txt"), "bytes.txt: expected UTF-8"),
        ((*OUT, "--val", "val.npy", "--methods", "csls"), "--val: expected fast among --methods"),
        ((*OUT, "--val", "val.npy"), "val.npy: --val-image-ids, --val-text-ids: needed for 7 im"),
        (
            (*OUT, "--val", "t.npy"),
            "t.npy: expected images as rows.*--transpose, or --val-image-ids and",
        ),
        ((*OUT, "--bank-images", "val.npy"), r"val.npy: expected \(B, 60\), got shape \(7, 10\)"),
        ((*OUT, "--transpose"), "with --transpose it has 60 rows"),
        ((*OUT, "--rankings", "o.npz"), "o.npz: expected a file of its own .* got that of out"),
        ((*OUT, "--methods", "dbnorm"), "--methods: all were left out"),
        (
            (*OUT, "--methods", "fast", "dbnorm", "--write", "dbnorm"),
            "--write: dbnorm needs embeddings",
        ),
        ((*OUT, "--ks", 0), "--ks: expected at least 1, got 0"),
    ],
)
def test_a_bad_argument_is_named(arguments, message, saved, capsys):
    write_lines("ids.txt", [1, 2, 3])
    write_lines("long.txt", ["1" * 30])
    Path("bytes.txt").write_bytes(b"\xff\xff")
    np.save("val.npy", np.random.default_rng(0).random((7, 10)))
    np.save("t.npy", scores().T)
    assert re.search(message, refused(capsys, "rerank", saved, "--methods", "fast", *arguments))
    assert not Path("o.npz").exists()


IMAGES = [f"img_{i}" for i in range(N)]
TEXTS = [f"img_{i // C}" for i in range(N * C)]
NO_MATCH = "no id of an image equals one of a text, such as"
HEADER = "expected 12 ids, got 13; if the first line of i"


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("i.txt", [f"{x}.jpg" for x in IMAGES], f"{NO_MATCH} 'img_0.jpg' and 'img_0'"),
        ("i.txt", range(N), f"{NO_MATCH} '0' and 'img_0'"),
        ("i.npy", np.arange(N), f"{NO_MATCH} '0' and 'img_0'"),
        ("i.npy", np.array([x.upper() for x in IMAGES]), f"{NO_MATCH} 'IMG_0' and 'img_0'"),
        ("i.csv", ["image", *IMAGES], f"{HEADER}.csv, 'image', is a header, write i.csv:image"),
        ("i.txt", ["image", *IMAGES], f"{HEADER}.txt, 'image', is a header, remove it"),
        ("i.txt", ["a", "b", *IMAGES], "expected shape (12,), got (14,)"),
        ("i.csv:image", ["image", "x", *IMAGES], "expected shape (12,), got (13,)"),
        ("i.npy", np.array(["image", *IMAGES]), "expected shape (12,), got (13,)"),
    ],
)
@pytest.mark.parametrize("val", [False, True])
def test_ids_that_do_not_fit_are_named(val, name, ids, message, saved, capsys):
    if name == "i.npy":
        np.save(name, ids)
    else:
        write_lines(name.partition(":")[0], ids)
    write_lines("t.txt", TEXTS)
    start = "--val-" if val else "--"
    files = ("--val", saved) if val else ()
    options = (*files, f"{start}image-ids", name, f"{start}text-ids", "t.txt")
    said = refused(capsys, "rerank", saved, *options, "--methods", "fast")
    assert message in said
    assert f"rerank: {start}image-ids" in said


def test_a_number_is_not_taken_for_a_header(saved, capsys):
    write_lines("i.csv", range(N + 1))
    ids = ("--image-ids", "i.csv", "--text-ids", "i.csv")
    said = refused(capsys, "rerank", saved, *ids, "--methods", "fast")
    assert "--image-ids: expected shape (12,), got (13,)" in said


def test_relevant_pairs_need_no_ids_that_match(saved):
    write_lines("i.txt", IMAGES)
    write_lines("t.txt", range(N * C))
    write_lines("pairs.txt", ["0 1"])
    ids = ("--image-ids", "i.txt", "--text-ids", "t.txt")
    assert run("rerank", saved, *ids, "--relevant", "pairs.txt", "--methods", "csls") == 0


def test_embeddings_in_place_of_scores_are_told_where_they_go(saved, capsys):
    images, texts = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in pairs())
    advice = "embeddings go in as .*, on the command line as itrloss eval IMAGES TEXTS"
    for shape in ((12, 8), (12, 6), (8, 12)):
        np.save("x.npy", np.resize(images, shape))
        assert re.search(advice, refused(capsys, "rerank", "x.npy"))
    np.save("x.npy", texts[:4])
    assert run("rerank", "x.npy", "--methods", "csls") == 0
    said = capsys.readouterr().err
    assert "x.npy: each row has length 1, as embeddings have" in said
    assert re.search(advice, said)


def test_warnings_of_held_out_pairs_name_their_options(saved, capsys):
    np.save("val.npy", scores(1).repeat(C, 0))
    assert run("rerank", saved, "--val", "val.npy", "--methods", "fast") == 0
    said = capsys.readouterr().err
    assert "--val: images: every 5 consecutive ones are the same" in said
    assert "pass --val-image-ids and --val-text-ids" in said


@pytest.mark.parametrize("x", [float("nan"), float("-inf"), -1e39])
def test_a_number_beyond_float32_is_named(x):
    with pytest.raises(ValueError, match="x: expected a number in the range of float32"):
        check_number("x", x)


def test_the_largest_float32_is_a_number():
    check_number("x", torch.finfo(torch.float32).max, positive=True)


def test_a_wrong_method_to_write_is_found_before_all_are_tried(saved, capsys):
    assert run("rerank", saved, "--write", "csl", "--out", "o.npz") == 2
    assert capsys.readouterr().out == ""


def test_a_single_query_is_told_which_option_helps(tmp_path, capsys):
    np.save(tmp_path / "one.npy", np.arange(5, dtype="f4")[None])
    said = refused(capsys, "rerank", tmp_path / "one.npy")
    assert "a single image is compared with no other" in said
    assert "--bank-images" in said
    assert "fit(" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("images.npy", "broken.npy"), "broken.npy: expected finite"),
        (
            ("images.npy", "narrow.npy"),
            "narrow.npy: expected embeddings of dimension 8 like images.npy",
        ),
        (("images.npy", "texts.npy", "--bank-texts", "broken.npy"), "broken.npy: expected finite"),
        (
            ("images.npy", "texts.npy", "--bank-images", "narrow.npy"),
            "narrow.npy: expected (B, 8), got shape",
        ),
        (("images.npy", "texts.npy", *IDS), "--image-ids: expected shape (12,)"),
    ],
)
def test_an_error_names_the_wrong_file_of_embeddings(arguments, message, saved, capsys):
    images, texts = pairs()
    broken = texts.copy()
    broken[3, 2] = np.nan
    np.save("images.npy", images)
    np.save("texts.npy", texts)
    np.save("broken.npy", broken)
    np.save("narrow.npy", texts[:, :-1])
    write_lines("ids.txt", [1, 2])
    said = refused(capsys, "eval", *arguments, "--methods", "fast")
    assert f"eval: {message}" in said
    assert "cols" not in said


# --- folds ----------------------------------------------------------------------------------------

FOLDS = ("--folds", 3)
I_IDS = (*FOLDS, "--image-ids", "i.txt", "--text-ids")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--folds", 5), "expected a divisor of the 12 images, got 5"),
        (("--folds", 0), "expected a divisor of the 12 images, got 0"),
        (("--folds", N), "12 are parts of one image"),
        ((*I_IDS, "late.txt"), "images 0 to 3 are a part without"),
        ((*I_IDS, "unknown.txt"), "expected each text"),
        ((*FOLDS, "--image-ids", "twice.txt", "--text-ids", "own.txt"), "expected each text"),
        ((*FOLDS, "--out", "x.npz"), "nothing is ranked among all"),
        ((*FOLDS, "--rankings", "x.npz"), "nothing is ranked among all"),
        ((*FOLDS, "--bank-images", "sims.npy"), "banks of scores"),
        ((*FOLDS, "--exclude", "pair.txt"), "expected 1 with relevant, excluded"),
    ],
)
def test_what_folds_cannot_do_is_named(arguments, message, saved, capsys):
    texts = range(N * C)
    write_lines("i.txt", range(N))
    write_lines("twice.txt", [*range(N - 1), 0])
    write_lines("own.txt", [x // C for x in texts])
    write_lines("unknown.txt", [x % (N + 1) for x in texts])
    write_lines("late.txt", [4 + x % (N - 4) for x in texts])
    write_lines("pair.txt", ["0 1"])
    assert f"--folds: {message}" in refused(capsys, "rerank", saved, *arguments)


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--exclude", "0 1 2\n", "expected an image and a text a line, got grades, too"),
        ("--exclude", "0\n1\n", "expected an image and a text a line, and perhaps a grade"),
        ("--relevant", "0 1\n2\n", "not a readable .txt file"),
        ("--relevant", "0 1.5\n", "expected indices of images and texts"),
        ("--relevant", "a b\n", "not a readable .txt file"),
        ("--candidates", "0 60\n", "candidates.texts: expected integers from 0 to 59, got 60"),
        ("--relevant", "", "relevant: expected pairs with a grade above 0, got none"),
        ("--relevant", "0 1 -1\n", "relevant: expected grades of at least 0, got -1"),
    ],
)
def test_a_bad_file_of_pairs_is_named(option, text, message, saved, capsys):
    Path("pairs.txt").write_text(text)
    assert message in refused(capsys, "rerank", saved, option, "pairs.txt", "--methods", "csls")


def test_relevant_pairs_and_a_protocol_do_not_go_together(saved, capsys):
    write_lines("pairs.txt", ["0 1"])
    said = refused(capsys, "rerank", saved, "--relevant", "pairs.txt", "--protocol", "coco")
    assert "--relevant: expected none with --protocol" in said
