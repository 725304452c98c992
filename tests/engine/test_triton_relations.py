"""Groups, sets of labels and matrices of matches on the Triton engine."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings
from support.draws import RELATIONS, Batch, Draw, with_padding
from support.on_triton import (
    DEVICE,
    HALF,
    OF_KERNELS,
    assert_near,
    moved,
)

import itrloss
from itrloss.engine import tiled
from itrloss.engine import triton as engine
from itrloss.engine.related import relation_of

pytestmark = OF_KERNELS
KINDS = [*RELATIONS, "one label"]


def batch_of(kind):
    """Who matches among 19 rows and columns, where kernels run."""
    if kind != "one label":
        return RELATIONS[kind](Draw(kind), 19, 19).to(DEVICE)
    rows, cols = with_padding(Draw(kind), 19, 19).ids
    return Batch(kind, 19, 19, (rows[:, None], cols[:, None])).to(DEVICE)


@pytest.mark.parametrize("dtype", HALF)
def test_a_complement_in_half_precision_is_that_of_float64(dtype, few_tiles):
    """The gradients of its two sums nearly cancel."""
    images, texts = embeddings(19, 19, 8, dtype=dtype)
    who = {"image_ids": torch.arange(19)[:, None] % 4, "text_ids": torch.arange(19)[:, None] % 3}
    who = {name: ids.to(DEVICE) for name, ids in who.items()}

    def gradient(engine_name, dtype):
        leaf = images.to(DEVICE, dtype, copy=True).requires_grad_()
        loss = itrloss.ComplementaryContrastiveLoss(engine=engine_name)
        value = loss(leaf, texts.to(DEVICE, dtype), **who)
        return torch.autograd.grad(value, leaf)

    wanted = [x.cpu() for x in gradient("dense", torch.float64)]
    assert_near(gradient("triton", dtype), wanted, 4e-3)


def test_masks_are_for_what_ids_and_groups_do_not_say():
    masked = []
    for kind in KINDS:
        batch = batch_of(kind)
        names = itrloss.checks.ROWS_AND_COLUMNS
        pairs = relation_of((19, 19), batch.ids, batch.related, DEVICE, names)
        if engine.compared(pairs).mask:
            masked.append(kind)
    assert masked == ["one set", "labels", "matches", "weights"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_scores", [False, True])
def test_nothing_of_related_pairs_is_left_to_tiles(kind, on_scores, few_tiles, monkeypatch):
    def refuse(*args):
        raise AssertionError("tiles of PyTorch")

    monkeypatch.setattr(tiled, "sums", refuse)
    monkeypatch.setattr(tiled, "gradients", refuse)
    v, w = (x.requires_grad_() for x in moved(*embeddings(19, 19, dtype=torch.float32)))
    batch = batch_of(kind)
    loss = itrloss.InfoNCELoss(groups=batch.rule, engine="triton")
    given = {"scores": v @ w.T / 100} if on_scores else {"images": v, "texts": w}
    value = loss(**given, **batch.given)
    for gradient in torch.autograd.grad(value, (v, w)):
        assert gradient.isfinite().all()
