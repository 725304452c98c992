"""Layouts of tensors that the Triton engine reads and writes."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, evaluate, gradients
from support.cases import case
from support.on_triton import DEVICE, OF_KERNELS, assert_close, assert_near, moved

from itrloss import Similarity
from itrloss.engine import triton as engine

pytestmark = OF_KERNELS


@pytest.mark.parametrize("dim", [40, 48, 80])
@pytest.mark.parametrize("side", [0, 1])
def test_dimensions_end_within_a_step(dim, side, multiplying, few_tiles, poisoned, monkeypatch):
    """They are masked: what lies behind them counts for nothing."""
    tile = engine.PRODUCT_TILES[0]._replace(block_k=32)
    monkeypatch.setattr(engine, "PRODUCT_TILES", (tile,))
    v, w, ids, grads = case((7, 9, "random"), dim)
    wanted_values, *wanted, _ = evaluate(ANSWERS["logsumexp"], v, w, ids, "reference", grads)
    given = moved(v.float(), w.float())
    other = 1 - side
    # Others lie behind the dimensions of one side.
    behind = torch.full((len(given[side]), 96), torch.nan, device=DEVICE)
    given[side] = behind[:, :dim].copy_(given[side])
    # The other side is not aligned, and copied.
    between = torch.zeros(len(given[other]), dim + 3, device=DEVICE)
    given[other] = between[:, 3:].copy_(given[other])
    leaves = [x.detach().requires_grad_() for x in given]
    sim = Similarity(*leaves, *moved(*ids), engine="triton")
    values = sim.both.logsumexp(3.0)
    found = gradients(values, leaves, torch.cat(grads))
    assert_close([values.detach()], [wanted_values], 1e-4, 1e-4)
    assert_near(found, wanted, 1e-5)


@pytest.mark.parametrize("dim", [64, 80, 400, 528, 500, 1000])
def test_aligned_embeddings_are_not_copied(dim, monkeypatch):
    monkeypatch.setattr(engine, "INTERPRETED", False)
    x = torch.empty(100, dim, dtype=torch.bfloat16, device=DEVICE)
    found = engine.aligned(x)
    if dim % 8 == 0:
        assert found is x
    else:
        assert found.shape[1] % 8 == 0
        assert not found[:, dim:].any()


def test_a_part_of_longer_vectors_is_copied():
    """Its rows are aligned, but what lies behind them is not 0."""
    longer = torch.ones(3, 24, device=DEVICE)
    found = engine.aligned(longer[:, :20])
    assert found.shape == (3, 24)
    assert not found[:, 20:].any()


@pytest.mark.parametrize("m", [70, 133])
def test_blocks_of_given_scores_end_at_their_columns(m, monkeypatch, poisoned):
    """Nothing is read or written beyond, where the width is no multiple of a tile's."""
    monkeypatch.setattr(engine, "READING_TILE", engine.TileConfig(8, 8, 8, 1, 4, 2))
    monkeypatch.setattr(engine, "BLOCK", 64 * 64)
    monkeypatch.setattr(engine, "BLOCK_ROWS", 64)
    monkeypatch.setattr(engine, "whole_tiles", lambda size: 64)
    size = 5 * m
    space = torch.full((size + 200,), torch.nan, device=DEVICE)
    space[:size] = torch.linspace(-1, 1, size)
    scores = space[:size].view(5, m)
    ids = moved(torch.arange(5), torch.arange(m) % 5)

    def outcome(engine_name):
        leaf = scores.detach().requires_grad_()
        sim = Similarity.from_scores(leaf, *ids, engine=engine_name)
        values = sim.both.logsumexp(3.0)
        (gradient,) = torch.autograd.grad(values.square().sum(), leaf)
        return values.detach(), gradient

    torch.testing.assert_close(outcome("triton"), outcome("dense"))


def test_rows_of_panels_are_aligned_in_one_memory():
    workspace = engine.Workspace(torch.float32, DEVICE)
    panels = [
        workspace.block((slice(0, r), slice(7, 7 + c))) for r, c in ((5, 70), (3, 70), (5, 9))
    ]
    assert [tuple(x.shape) for x in panels] == [(5, 70), (3, 70), (5, 9)]
    assert [x.stride() for x in panels] == [(128, 1), (128, 1), (64, 1)]
    assert {x.data_ptr() for x in panels} == {panels[0].data_ptr()}
