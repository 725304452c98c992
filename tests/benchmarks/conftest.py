"""The benchmarks compare with compiled losses, and with other libraries."""

from __future__ import annotations

import pytest
from support.versions import require


@pytest.fixture(scope="session", autouse=True)
def newer_torch():
    require("python -m benchmarks", 2, 8)
