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


def page(path: str) -> str:
    """Return the lines of a page without its charts; the best figures of columns have a star."""
    read_page(cat(path))
    html = re.sub(r"<(svg|style)\b.*?</\1>", "", cat(path), flags=re.S)
    html = re.sub(r"(</t[dh]>)\s+", r"\1  ", html)
    lines = read_page(html.replace('<b class="strong">', '<b class="strong">*')).splitlines()
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines)))


def csv(path: str) -> str:
    """Return a table whose numbers are rounded."""
    return pd.read_csv(path).round(6).T.to_string(header=False)


# pytest shows what Python hides: matplotlib's calls of NumPy, in some versions of both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_commands_print(saved):
    for seed, path in enumerate(("run_1/sims", "run_2/sims", "third")):
        Path(path).parent.mkdir(exist_ok=True)
        np.save(f"{path}.npy", scores(seed))
    np.savez("one.npz", i2t=scores(), t2i=scores(1), transductive=[True, True])
    for path in ("run_1/sims", "run_2/sims", "third", "sims", "image_bank", "text_bank"):
        np.save(f"{path}.T.npy", np.load(f"{path}.npy").T)
    for name, array in {"_images": "images", "": "sims", "_bank": "text_bank"}.items():
        np.save(f"repeated{name}.npy", np.load(f"{array}.npy").repeat(C, 0))
    np.save("random.npy", np.random.default_rng(0).random((9, 198)))
    np.save("logits.npy", 100 * scores())
    np.save("other_logits.npy", 100 * scores(1))
    Path("captions.txt").write_text("\n".join(f"caption <b{i}> & co" for i in range(N * C)))
    replay("commands", cat=cat, page=page, csv=csv)
