"""What is stored in ``tests/stored``: texts and numbers that fixed input leads to.

Where they are meant to change, ``STORE=1`` before the command of their test writes them anew; read
the difference before it is committed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "stored"


def stored(file: str, text: str) -> str:
    """Return what is stored, which is the text itself if it is stored anew."""
    path = FOLDER / file
    if os.environ.get("STORE"):
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def assert_stored(name: str, text: str) -> None:
    assert text.splitlines() == stored(f"{name}.txt", text).splitlines()


def assert_stored_numbers(name: str, numbers: dict[str, list[float]], rel: float = 1e-6) -> None:
    """Compare up to the rounding of other processors and versions of PyTorch."""
    rounded = {key: [float(f"{x:.8g}") for x in row] for key, row in numbers.items()}
    text = json.dumps(rounded).replace("], ", "],\n") + "\n"
    wanted = json.loads(stored(f"{name}.json", text))
    assert numbers.keys() == wanted.keys()
    for key, row in numbers.items():
        assert row == pytest.approx(wanted[key], rel=rel, abs=1e-3 * rel), key
