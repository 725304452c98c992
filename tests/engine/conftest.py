"""Fixtures of the engines' tests."""

from __future__ import annotations

import pytest
from support.interpreter import TILE, a_quick_interpreter  # noqa: F401 (a fixture)
from support.versions import HAS_TRITON

if not HAS_TRITON:
    collect_ignore_glob = ["test_triton_*.py", "test_autocast.py"]


@pytest.fixture
def few_tiles(monkeypatch):
    """Few tiles, blocks and panels with ragged ends on both axes, because the interpreter is
    slow.
    """
    from itrloss.engine import triton as engine

    step = TILE[1]
    monkeypatch.setattr(engine, "PRODUCT_TILES", (engine.TileConfig(*TILE, 4, 2),))
    monkeypatch.setattr(engine, "READING_TILE", engine.TileConfig(8, 8, 8, 1, 4, 2))
    monkeypatch.setattr(engine, "BLOCK", step * step)
    monkeypatch.setattr(engine, "BLOCK_ROWS", step)
    monkeypatch.setattr(engine, "PANEL", 4 * step * step)
    monkeypatch.setattr(engine, "whole_tiles", lambda size: max(size // step * step, step))


@pytest.fixture
def multiplying(monkeypatch):
    """Let kernels multiply float32 embeddings, too, so that rounding hides no errors."""
    from itrloss.engine import triton as engine

    monkeypatch.setattr(engine, "fused", lambda rows, cols: True)
