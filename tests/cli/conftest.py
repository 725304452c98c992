"""The files that the commands of these tests read, in the working directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.command_line import C, N, pairs, scores

IMAGE_IDS = np.arange(N)
TEXT_IDS = np.arange(N * C) // C
ORDER = np.random.default_rng(0).permutation(N * C)
GENERATOR = np.random.default_rng(1)
ARRAYS = {
    "sims": scores(),
    "other": scores(1),
    "transposed": scores().T,
    "shuffled": scores()[:, ORDER],
    "hubs": scores() + 0.5 * np.random.default_rng(3).random(N * C),
    "val": scores(1)[:, ORDER[:-7]],  # images have different numbers of texts
    "i": IMAGE_IDS + 7,
    "t": TEXT_IDS + 7,
    "shuffled_t": TEXT_IDS[ORDER] + 7,
    "val_t": TEXT_IDS[ORDER[:-7]] + 7,
    "image_bank": GENERATOR.random((30, N * C)),
    "text_bank": GENERATOR.random((N, 40)),
    "images": pairs()[0],
    "texts": pairs()[1].astype(np.float64),  # of another precision
    "val_images": pairs(1)[0],
    "val_texts": pairs(1)[1],
    "bank_images": pairs(2)[0].astype(np.float16),
    "bank_texts": pairs(2)[1].astype(np.float16),
}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a .npy file of each array."""
    monkeypatch.chdir(tmp_path)
    for name, array in ARRAYS.items():
        np.save(f"{name}.npy", array)
    return tmp_path
