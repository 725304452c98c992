"""Wrong arguments are named with what was expected, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, pairs, replay, scores

from itrloss.checks import check_number

# files of text with these lines
LINES = {
    "ids.txt": [1, 2, 3],
    "long.txt": ["1" * 30],
    "i.txt": [f"img_{i}" for i in range(N)],
    "jpg.txt": [f"img_{i}.jpg" for i in range(N)],
    "numbers.txt": range(N),
    "header.txt": ["image", *(f"img_{i}" for i in range(N))],
    "header.csv": ["image", *(f"img_{i}" for i in range(N))],
    "two_more.txt": ["a", "b", *(f"img_{i}" for i in range(N))],
    "one_more.csv": range(N + 1),
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
IMAGES, TEXTS = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in pairs())
FILES = {
    "small": np.random.default_rng(0).random((7, 10)),
    "nan": NAN,
    "half": scores()[:6, :30],
    "repeated": scores(1).repeat(C, 0),
    "numbers": np.arange(N),
    "upper": np.array([f"IMG_{i}" for i in range(N)]),
    "header": np.array(["image", *(f"img_{i}" for i in range(N))]),
    "broken": np.where(np.arange(8) == 2, np.nan, pairs()[1]),
    "narrow": pairs()[1][:, :-1],
    "one": np.arange(5, dtype="f4")[None],
    "wide_units": np.resize(IMAGES, (12, 8)),
    "odd_units": np.resize(IMAGES, (12, 6)),
    "turned_units": np.resize(IMAGES, (8, 12)),
    "few_units": TEXTS[:4],
}
# re-ranked scores
ARCHIVES = {
    "nan": {"t2i": NAN},
    "one_small": {"t2i": scores()[:5]},
    "both_small": {"i2t": scores()[:5, :25], "t2i": scores()[:5, :25]},
    "none": {"transductive": np.array([None])},
}


def test_what_is_said_of_mistakes(saved):
    for name, lines in LINES.items():
        Path(name).write_text("".join(f"{x}\n" for x in lines))
    Path("bytes.txt").write_bytes(b"\xff\xff")
    for name, array in FILES.items():
        np.save(f"{name}.npy", array)
    right = {"i2t": scores(), "t2i": scores(), "transductive": np.array([True, True])}
    for name, changed in ARCHIVES.items():
        np.savez(f"{name}.npz", **(right | changed))
    Path("no_archive.npz").write_bytes(b"PK")
    replay("mistakes")


@pytest.mark.parametrize("x", [float("nan"), float("-inf"), -1e39])
def test_a_number_beyond_float32_is_named(x):
    with pytest.raises(ValueError, match="x: expected a number in the range of float32"):
        check_number("x", x)
    check_number("x", torch.finfo(torch.float32).max, positive=True)
