"""Wrong arguments are named with what was expected, and nothing is written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, pairs, refused, run, scores

from itrloss.checks import check_number

EXPLAINED = "\nitrloss rerank --help explains all options\n"
# files of text with these lines
LINES = {
    "ids.txt": [1, 2, 3],
    "long.txt": ["1" * 30],
    "i.txt": [f"img_{i}" for i in range(N)],
    "jpg.txt": [f"img_{i}.jpg" for i in range(N)],
    "numbers.txt": range(N),
    "header.txt": ["image", *(f"img_{i}" for i in range(N))],
    "header.csv": ["image", *(f"img_{i}" for i in range(N))],
    "two more.txt": ["a", "b", *(f"img_{i}" for i in range(N))],
    "one more.csv": range(N + 1),
    "t.txt": [f"img_{i // C}" for i in range(N * C)],
    "twice.txt": [*range(N - 1), 0],
    "own.txt": [i // C for i in range(N * C)],
    "unknown.txt": [i % (N + 1) for i in range(N * C)],
    "late.txt": [4 + i % (N - 4) for i in range(N * C)],
    "pair.txt": ["0 1"],
    "grades.txt": ["0 1 2"],
    "one.txt": [0, 1],
    "ragged.txt": ["0 1", "2"],
    "halves.txt": ["0 1.5"],
    "words.txt": ["a b"],
    "beyond.txt": ["0 60"],
    "empty.txt": [],
    "below.txt": ["0 1 -1"],
}
NAN = np.where(np.arange(60) == 7, np.nan, scores())
FILES = {
    "small": np.random.default_rng(0).random((7, 10)),
    "nan": NAN,
    "half": scores()[:6, :30],
    "numbers": np.arange(N),
    "upper": np.array([f"IMG_{i}" for i in range(N)]),
    "header": np.array(["image", *(f"img_{i}" for i in range(N))]),
    "broken": np.where(np.arange(8) == 2, np.nan, pairs()[1]),
    "narrow": pairs()[1][:, :-1],
    "one": np.arange(5, dtype="f4")[None],
}


def ids(images: str, texts: str = "t.txt") -> str:
    return f"--image-ids {images} --text-ids {texts}"


IDS = ids("ids.txt", "ids.txt")
VAL_IDS = IDS.replace("--", "--val-")
NO_MATCH = "no id of an image equals one of a text, such as"
A_HEADER = r"12 ids, got 13; if the first of {}, 'image', is a header, remove it"
FOLDS = "--folds 3 --image-ids"

# arguments behind `rerank sims.npy --out o.npz`, and what is said
RERANK = [
    ("--out nowhere/o.npz", f"argument --out: nowhere/o.npz: there is no directory.*{EXPLAINED}"),
    ("--out o.npy", f"--out: o.npy: expected a file named \\*.npz{EXPLAINED}"),
    ("--rankings r", "--rankings: r: expected a file named \\*.npz"),
    ("--queries q.txt", "--queries: q.txt: expected a file named \\*.csv"),
    ("--metrics m.json", "--metrics: m.json: expected a file named \\*.csv"),
    ("--latex t.pdf", "--latex: t.pdf: expected a file named \\*.tex"),
    ("--report r.htm", "--report: r.htm: expected a file named \\*.html"),
    ("--trec nowhere/trec", "--trec: nowhere/trec: there is no directory nowhere"),
    ("--trec sims.npy", "sims.npy: expected a directory to write into, got a file"),
    ("--out .", "--out: .: expected a file to write, got a directory"),
    ("--out /dev/null", "/dev/null: expected a file to write, got a device or a pipe"),
    ("--rankings /dev/null", "/dev/null: expected a file to write, got a device or a pipe"),
    ("--rankings o.npz", "o.npz: expected a file of its own .* got that of out"),
    ("--top 0", "--top: expected an integer of at least 1, got '0'"),
    ("--ks 0", "--ks: expected an integer of at least 1, got '0'"),
    ("--samples 0", "--samples: expected an integer of at least 1, got '0'"),
    ("--write csls", "--write: expected 'no re-ranking' or 'fast', got 'csls'"),
    ("--i2t 0 1", "i2t: expected a number above 0"),
    ("--i2t 1e39 1", r"i2t: expected .* in the range of float32, got 1e\+39"),
    ("--image-ids ids.txt", "--image-ids, --text-ids: expected both or neither"),
    (IDS, r"--image-ids: expected shape \(12,\)"),
    ("--val-image-ids ids.txt", "--val-image-ids, --val-text-ids: expected --val, too"),
    ("--val sims.npy --val-image-ids ids.txt", "--val-image-ids, --val-text-ids: expected both"),
    (VAL_IDS, "--val-image-ids, --val-text-ids: expected --val, too"),
    (f"--val small.npy {VAL_IDS}", r"--val-image-ids: expected shape \(7,\)"),
    (ids("long.txt"), "long.txt: expected integers of 64 bits"),
    (ids("bytes.txt"), "bytes.txt: expected UTF-8"),
    ("--text-names ids.txt", "--text-names: expected --report, too"),
    ("--report r.html --text-names ids.txt", "ids.txt: expected a line .* 60 texts, got 3"),
    ("--report r.html --text-names bytes.txt", "bytes.txt: expected UTF-8"),
    ("--val sims.npy --methods csls", "--val: expected 'fast' among methods"),
    ("--val small.npy", "small.npy: --val-image-ids, --val-text-ids: needed for 7 images"),
    ("--val transposed.npy", "images as rows.*--transpose, or --val-image-ids and --val-text-ids"),
    ("--bank-images small.npy", r"small.npy: expected \(B, 60\), got shape \(7, 10\)"),
    ("--bank-texts small.npy", r"small.npy: expected \(12, B\), got shape \(7, 10\)"),
    ("--transpose", "sims.npy: expected images as rows; with --transpose it has 60 rows"),
    ("--methods dbnorm", "--methods: all were left out"),
    ("--methods fast dbnorm --write dbnorm", "--write: dbnorm needs embeddings"),
    ("--relevant pair.txt --protocol coco", "--relevant: expected none with --protocol"),
    # ids
    (ids("jpg.txt"), f"--image-ids, --text-ids: {NO_MATCH} 'img_0.jpg' and 'img_0'"),
    (ids("numbers.txt"), f"{NO_MATCH} '0' and 'img_0'"),
    (ids("numbers.npy"), f"{NO_MATCH} '0' and 'img_0'"),
    (ids("upper.npy"), f"{NO_MATCH} 'IMG_0' and 'img_0'"),
    (ids("header.csv"), A_HEADER.format("header.csv") + ", .* write header.csv:image"),
    (ids("header.txt"), A_HEADER.format("header.txt")),
    (ids("header.npy"), A_HEADER.format("header.npy")),
    (ids("two_more.txt"), r"--image-ids: expected shape \(12,\), got \(14,\)"),
    (ids("one_more.csv", "one_more.csv"), r"--image-ids: expected shape \(12,\), got \(13,\)"),
    # folds
    ("--folds 0", "--folds: expected an integer of at least 1, got '0'"),
    ("--folds 12", "--folds: 12 are parts of one image"),
    ("--folds 3", "--folds: nothing is ranked among all"),
    # pairs
    ("--exclude grades.txt", "grades.txt: expected an image and a text a line, got grades, too"),
    ("--exclude one.txt", "one.txt: expected an image and a text a line, and perhaps a grade"),
    ("--relevant ragged.txt", "ragged.txt: not a readable .txt file"),
    ("--relevant halves.txt", "halves.txt: expected indices of images and texts"),
    ("--relevant words.txt", "words.txt: not a readable .txt file"),
    ("--candidates beyond.txt", "candidates.texts: expected integers from 0 to 59, got 60"),
    ("--relevant empty.txt", "relevant: expected pairs with a grade above 0, got none"),
    ("--relevant below.txt", "relevant: expected grades of at least 0, got -1"),
]
# whole commands
OTHERS = [
    ("rerank sims.npy --folds 5", "--folds: expected a divisor of the 12 images, got 5"),
    ("rerank one.npy", "a single image is compared with no other.*--bank-images"),
    ("rerank sims.npy --methods fast --folds 3 --rankings r.npz", "nothing is ranked among all"),
    ("rerank sims.npy --folds 3 --bank-images sims.npy", "--folds: banks of scores"),
    ("rerank sims.npy --folds 3 --exclude pair.txt", "--folds: expected 1 with relevant, excluded"),
    (f"rerank sims.npy {FOLDS} numbers.txt --text-ids late.txt", "images 0 to 3 are a part with"),
    (f"rerank sims.npy {FOLDS} numbers.txt --text-ids unknown.txt", "expected each text"),
    (f"rerank sims.npy {FOLDS} twice.txt --text-ids own.txt", "expected each text"),
    ("eval images.npy broken.npy", "eval: broken.npy: expected finite"),
    ("eval images.npy narrow.npy", "narrow.npy: expected embeddings of dimension 8 like images"),
    ("eval images.npy texts.npy --bank-texts broken.npy", "broken.npy: expected finite"),
    ("eval images.npy texts.npy --bank-images narrow.npy", r"narrow.npy: expected \(B, 8\), got"),
    (f"eval images.npy texts.npy {IDS}", r"--image-ids: expected shape \(12,\)"),
    ("compare sims.npy", "sims.npy: expected at least two files to compare, got one"),
    ("compare sims.npy other.npy --names x", "--names: expected one for each of the 2 files"),
    ("compare sims.npy other.npy --names x x", "--names: expected different names, got 'x'"),
    ("compare sims.npy sims.npy", "--names: expected different names, got 'sims.npy'"),
    ("compare sims.npy other.npy --transductive c", "--transductive: expected 'sims' or 'other'"),
    ("compare sims.npy half.npy", r"half.npy: expected shape \(12, 60\) like sims.npy, got \(6,"),
    ("compare sims.npy none.npy", "none.npy: there is no such file"),
    ("compare sims.npy other.npy --folds 5", "--folds: expected a divisor of the 12 images"),
    ("compare sims.npy other.npy --latex t.tex --report t.html --names x y --ks 0", "--ks: "),
    ("bench", "invalid choice: 'bench'"),
]


def expect(message: str, command: str, capsys) -> None:
    for name, lines in LINES.items():
        Path(name.replace(" ", "_")).write_text("".join(f"{x}\n" for x in lines))
    Path("bytes.txt").write_bytes(b"\xff\xff")
    for name, array in FILES.items():
        np.save(f"{name}.npy", array)
    before = set(Path().iterdir())
    said = refused(capsys, *command.split())
    assert re.search(message, said, re.S), said
    assert "fit(" not in said and "cols" not in said
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize(("arguments", "message"), RERANK)
def test_a_bad_argument_is_named(arguments, message, saved, capsys):
    methods = "" if "--methods" in arguments else "--methods fast "
    expect(message, f"rerank sims.npy --out o.npz {methods}{arguments}", capsys)


@pytest.mark.parametrize(("command", "message"), OTHERS)
def test_a_bad_command_is_answered(command, message, saved, capsys):
    expect(message, command, capsys)


@pytest.mark.parametrize("images", ["jpg.txt", "header.csv", "two_more.txt"])
def test_ids_of_held_out_pairs_are_named(images, saved, capsys):
    options = ids(images).replace("--", "--val-")
    expect("--val-image-ids", f"rerank sims.npy --val sims.npy {options} --methods fast", capsys)


def test_relevant_pairs_need_no_ids_that_match(saved):
    Path("i.txt").write_text("".join(f"img_{i}\n" for i in range(N)))
    Path("t.txt").write_text("".join(f"{i}\n" for i in range(N * C)))
    Path("pairs.txt").write_text("0 1\n")
    rules = [*ids("i.txt").split(), "--relevant", "pairs.txt"]
    assert run("rerank", "sims.npy", *rules, "--methods", "csls") == 0


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
    assert run("rerank", "sims.npy", "--val", "val.npy", "--methods", "fast") == 0
    said = capsys.readouterr().err
    assert "--val: images: every 5 consecutive ones are the same" in said
    assert "pass --val-image-ids and --val-text-ids" in said


def test_a_wrong_method_to_write_is_found_before_all_are_tried(saved, capsys):
    assert run("rerank", "sims.npy", "--write", "csl", "--out", "o.npz") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("x", [float("nan"), float("-inf"), -1e39])
def test_a_number_beyond_float32_is_named(x):
    with pytest.raises(ValueError, match="x: expected a number in the range of float32"):
        check_number("x", x)
    check_number("x", torch.finfo(torch.float32).max, positive=True)


RE_RANKED = {"i2t": scores(), "t2i": scores(), "transductive": np.array([True, True])}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"t2i": NAN}, "r.npz: expected finite"),
        ({"t2i": scores()[:5]}, "scores[1]: expected shape (12, 60), got (5, 60)"),
        (
            {"i2t": scores()[:5, :25], "t2i": scores()[:5, :25]},
            "r.npz: expected shape (12, 60) like sims.npy, got (5, 25)",
        ),
        ({"transductive": np.array([None])}, "r.npz: not a readable .npz file"),
    ],
)
def test_broken_re_ranked_scores_are_named(changed, message, saved, capsys):
    np.savez("r.npz", **(RE_RANKED | changed))
    assert message in refused(capsys, "compare", "sims.npy", "r.npz", "--samples", 9)
    Path("r.npz").write_bytes(b"PK")
    said = refused(capsys, "compare", "sims.npy", "r.npz")
    assert "r.npz: not a readable .npz file" in said
