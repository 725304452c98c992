"""Texts that are stored: what is written for fixed input.

Where a text is meant to change, ``STORE=1`` before the command of its test writes it anew; read the
difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "stored"


def assert_stored(name: str, text: str) -> None:
    path = FOLDER / f"{name}.txt"
    if os.environ.get("STORE"):
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()
