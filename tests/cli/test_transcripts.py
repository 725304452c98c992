"""What the commands print, and the tables and pages that they write."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.command_line import C, N, read_page, replay, scores


def cat(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def head(path: str) -> str:
    return "\n".join(cat(path).splitlines()[:12])


def page(path: str) -> str:
    """Return the lines of a page without its charts."""
    read_page(cat(path))
    html = re.sub(r"<(svg|style)\b.*?</\1>", "", cat(path), flags=re.S)
    html = re.sub(r"(</t[dh]>)\s*", r"\1  ", html)
    lines = read_page(html).splitlines()
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines)))


def csv(path: str) -> str:
    """Return a table whose numbers are rounded, without what it was computed with."""
    table = pd.read_csv(path).drop(columns=["data", "version", "date", "command"])
    return table.round(6).T.to_string(header=False)


def npz(path: str) -> str:
    """Return the shapes of an archive's arrays, and their numbers in the corners."""
    with np.load(path) as arrays, np.printoptions(precision=4, threshold=20, edgeitems=4):
        return "\n".join(f"{name} {x.shape}\n{x}" for name, x in arrays.items())


@pytest.fixture
def more(saved):
    """More files in the working directory."""
    for seed, path in enumerate(("run_1/sims", "run_2/sims", "third")):
        Path(path).parent.mkdir(exist_ok=True)
        np.save(f"{path}.npy", scores(seed))
    np.savez("one.npz", i2t=scores(), t2i=scores(1), transductive=[True, True])
    for path in ("run_1/sims", "run_2/sims", "third", "sims", "image_bank", "text_bank"):
        np.save(f"{path}.T.npy", np.load(f"{path}.npy").T)
    for name, array in {"_images": "images", "": "sims", "_bank": "text_bank"}.items():
        np.save(f"repeated{name}.npy", np.load(f"{array}.npy").repeat(C, 0))
    graded = np.random.default_rng(2).permutation(N * N * C)[:80]
    graded = np.stack([graded // (N * C), graded % (N * C), graded % 4], 1)
    for name, table in {"graded": graded, "left_out": graded[::7, :2]}.items():
        np.save(f"{name}.npy", table)
        np.savetxt(f"{name}.txt", table, "%d")
        np.savetxt(f"{name}.csv", table, "%d", ",")
    np.save("random.npy", np.random.default_rng(0).random((9, 198)))
    np.save("logits.npy", 100 * scores())
    np.save("other_logits.npy", 100 * scores(1))
    Path("captions.txt").write_text("\n".join(f"caption <b{i}> & co" for i in range(N * C)))


# pytest shows what Python hides: matplotlib's calls of NumPy, in some versions of both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["commands", "written"])
def test_commands_are_those_that_were_read(name, more):
    replay(name, cat=cat, head=head, page=page, csv=csv, npz=npz)
