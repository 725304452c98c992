"""Groups, sets of labels and matrices of matches on the Triton engine."""

from __future__ import annotations

import pytest
import torch
from support import losses_registry
from support.cases import embeddings
from support.on_triton import (
    DEVICE,
    HALF,
    OF_KERNELS,
    assert_close,
    assert_near,
    moved,
)

import itrloss
from itrloss import NO_ID, Related
from itrloss.engine import tiled
from itrloss.engine import triton as engine
from itrloss.engine.related import relation_of as made

pytestmark = OF_KERNELS
NAMES = itrloss.checks.ROWS_AND_COLUMNS
RELATIONS = (
    "same group",
    "other group",
    "no group in common",
    "one label",
    "sets",
    "matches",
)


def drawn(seed, high, *shape):
    """Integers from 0 on, below a number."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator)


def relation_of(kind, n, m):
    """Ids and a Related of a kind. Some entries do not exist, some are open to all groups."""
    if kind == "sets":
        return label_sets(n, m), None
    if "matches" in kind:
        matches = drawn(1, 3, n, m).float()
        unjudged = drawn(2, 3, n, m) == 0
        matches[unjudged] = torch.nan
        return (None, None), Related(matches=matches)
    row_ids = drawn(1, 4, n)
    col_ids = drawn(2, 4, m)
    row_ids[-1] = NO_ID
    col_ids[1 % m] = NO_ID
    if kind == "one label":
        return (row_ids[:, None], col_ids[:, None]), None
    rule = "other" if kind == "other group" else "same"
    return (row_ids, col_ids), Related(groups_of(kind, n, m), rule)


def label_sets(n, m):
    """Up to two labels of rows, and three of columns."""
    row_labels = drawn(1, 9, n, 2)
    col_labels = drawn(2, 9, m, 3)
    has_one = drawn(3, 2, n) == 0
    row_labels[has_one, 1] = NO_ID
    row_labels[0] = NO_ID
    col_labels[-1] = NO_ID
    return row_labels, col_labels


def groups_of(kind, n, m):
    """Groups of rows and of columns."""
    row_groups = drawn(3, 3, n)
    col_groups = drawn(4, 3, m)
    if kind == "no group in common":
        return row_groups, col_groups + 10
    row_groups[0] = NO_ID
    col_groups[-1] = NO_ID
    return row_groups, col_groups


def on_device(kind, n, m):
    """The pairs of a relation where kernels run."""
    ids, related = relation_of(kind, n, m)
    if related is not None:
        groups = tuple(moved(*related.groups))
        related = related._replace(groups=groups, matches=moved(related.matches)[0])
    return made((n, m), tuple(moved(*ids)), related, DEVICE, NAMES)


def loss_input(kind, n, m):
    """A relation as losses take it, and the rule of its groups."""
    ids, related = relation_of(kind, n, m)
    related = Related() if related is None else related
    given = moved(*ids, *related.groups, related.matches)
    names = ("image_ids", "text_ids", "image_groups", "text_groups", "matches")
    by_name = zip(names, given, strict=True)
    found = {name: x for name, x in by_name if x is not None}
    return found, related.rule


RELATED_LOSSES = losses_registry.where(lambda entry: entry.takes == "pairs" and entry.oracle)


@pytest.mark.parametrize("dtype", HALF)
def test_a_complement_in_half_precision_is_that_of_float64(dtype, few_tiles):
    """The gradients of its two sums nearly cancel."""
    images, texts = embeddings(19, 22, 8, dtype=dtype)
    who, _ = loss_input("one label", 19, 22)

    def gradient(engine_name, dtype):
        leaf = images.to(DEVICE, dtype, copy=True).requires_grad_()
        loss = itrloss.ComplementaryContrastiveLoss(engine=engine_name)
        value = loss(leaf, texts.to(DEVICE, dtype), **who)
        return torch.autograd.grad(value, leaf)

    wanted = [x.cpu() for x in gradient("dense", torch.float64)]
    assert_near(gradient("triton", dtype), wanted, 4e-3)


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("name", ["infonce", "dcl", "sigmoid mild"])
def test_weights_of_matches(name, few, few_tiles, poisoned, monkeypatch):
    """Positives are listed, or too many, and then their weights are a guide."""
    monkeypatch.setattr("itrloss.engine.relation.FEW", few)
    matches = 0.7 * drawn(1, 3, 19, 22).double()
    unjudged = drawn(2, 4, 19, 22) == 0
    matches[unjudged] = torch.nan

    def outcome(engine_name, dtype, device):
        leaves = [x.to(device, dtype).requires_grad_() for x in embeddings(19, 22, 8)]
        loss = RELATED_LOSSES[name].make(engine=engine_name).to(device)
        value = loss(*leaves, matches=matches.to(device))
        gradients = torch.autograd.grad(value, leaves)
        return [value.detach(), *gradients]

    found = outcome("triton", torch.float32, DEVICE)
    wanted = outcome("dense", torch.float64, "cpu")
    assert_close(found, wanted, 1e-3, 1e-5)


def test_masks_are_for_what_ids_and_groups_do_not_say():
    masked = [kind for kind in RELATIONS if engine.compared(on_device(kind, 5, 7)).mask]
    assert masked == ["sets", "matches"]


@pytest.mark.parametrize("kind", RELATIONS)
@pytest.mark.parametrize("on_scores", [False, True])
def test_nothing_of_related_pairs_is_left_to_tiles(kind, on_scores, few_tiles, monkeypatch):
    def refuse(*args):
        raise AssertionError("tiles of PyTorch")

    monkeypatch.setattr(tiled, "sums", refuse)
    monkeypatch.setattr(tiled, "gradients", refuse)
    v, w = (x.requires_grad_() for x in moved(*embeddings(19, 22, dtype=torch.float32)))
    who, rule = loss_input(kind, 19, 22)
    loss = itrloss.InfoNCELoss(groups=rule, engine="triton")
    value = loss(scores=v @ w.T / 100, **who) if on_scores else loss(v, w, **who)
    for gradient in torch.autograd.grad(value, (v, w)):
        assert gradient.isfinite().all()
