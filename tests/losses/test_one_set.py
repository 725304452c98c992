"""Losses of one set of embeddings with labels, and by targets.

`test_random_cases` has all losses of one set next to loops, in one process and in two.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.cases import of_engines, sample
from support.processes import WORLD, run
from torch import Tensor

import itrloss
from itrloss import NO_ID

LABELS = torch.tensor([3, 1, 3, 0, 1, 3, 7, 0, 1, 5])  # 7 and 5 match nothing


def drawn(seed: int, *shape: int) -> Tensor:
    return sample(*shape, seed=seed, dtype=torch.float64).requires_grad_()


def assert_same(found: Tensor, wanted: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    own = torch.autograd.grad(found, leaves, retain_graph=True)
    exact = torch.autograd.grad(wanted, leaves, retain_graph=True)
    for x, y in zip(own, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


# ----------------------------------------------------------------------------------- one set, views


@of_engines
def test_labels_are_what_ids_may_be(engine, small_tiles):
    z = drawn(1, 10, 6)
    loss = itrloss.SupConLoss(engine=engine)
    wanted = loss(z, labels=LABELS)
    names = [f"item {x}" for x in LABELS.tolist()]
    for labels in (LABELS.tolist(), LABELS.numpy(), LABELS.int(), names, LABELS[:, None]):
        assert_same(loss(z, labels=labels), wanted, z)


def test_margins_and_further_negatives_go_with_labels():
    z, n = drawn(1, 10, 6), drawn(2, 4, 6)
    ids = torch.tensor([3, 8, 1, 9])
    u, w = F.normalize(z, dim=1), F.normalize(n, dim=1)
    s = torch.cat([u @ u.T, u @ w.T], 1)
    labels = torch.cat([LABELS, ids])
    values = []
    for i in range(10):
        is_other = torch.arange(14) != i
        own = ((labels == labels[i]) & is_other)[:10]
        if own.any():
            limit = s[i, :10][own].mean().detach() + 0.3
            near = s[i, (labels != labels[i]) & (s[i] < limit)]
            logits = [torch.cat([x[None], near]) / 0.5 for x in s[i, :10][own]]
            values.append(sum(x.logsumexp(0) - x[0] for x in logits) / len(logits))
    loss = itrloss.InfoNCELoss(0.5, margin=0.3)
    found = loss(z, labels=LABELS, negatives=n, negative_ids=ids)
    assert_same(found, sum(values) / len(values), z, n)
    guided = loss(z, labels=LABELS, negatives=n, negative_ids=ids, guide=(z, z, n))
    assert_same(guided, found, z, n)


@pytest.mark.slow
def test_one_set_and_targets_compile_as_one_graph():
    torch.compiler.reset()
    first, second = drawn(1, 7, 6).detach(), drawn(2, 7, 6).detach()
    for given in (
        {"images": first, "labels": LABELS[:7]},
        {"images": first, "texts": second, "labels": LABELS[:7]},
        {"images": first, "texts": second, "targets": torch.tensor([1, 0, -100, 6, 6, 2, 3])},
    ):
        loss = itrloss.InfoNCELoss(engine="dense")
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**given), loss(**given))


# ----------------------------------------------------------------------------------------- targets

TARGETS = torch.tensor([3, 3, -100, 0, 8, 1])


@of_engines
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_targets_are_those_of_cross_entropy(reduction, engine, small_tiles):
    scores = drawn(1, 6, 9)
    loss = itrloss.InfoNCELoss(1.0, reduction=reduction, engine=engine)
    found = loss(scores=scores, targets=TARGETS)
    wanted = F.cross_entropy(scores, TARGETS, reduction=reduction)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted)
    assert_same(found.sum(), wanted.sum(), scores)


@of_engines
def test_targets_number_documents(engine, small_tiles):
    q, d, n = drawn(1, 6, 5), drawn(2, 9, 5), drawn(3, 2, 5)
    cosines = F.normalize(q, dim=1) @ F.normalize(torch.cat([d, n]), dim=1).T
    loss = itrloss.InfoNCELoss(0.1, engine=engine)
    for targets in (TARGETS, TARGETS.tolist(), TARGETS.numpy(), TARGETS.int()):
        wanted = F.cross_entropy(cosines[:, :9] / 0.1, TARGETS)
        assert_same(loss(q, d, targets=targets), wanted, q, d)
    wanted = F.cross_entropy(cosines / 0.1, TARGETS)
    assert_same(loss(q, d, targets=TARGETS, negatives=n), wanted, q, d, n)
    square = loss(q, d[:6], targets=torch.arange(6))
    assert_same(square, F.cross_entropy(cosines[:, :6] / 0.1, torch.arange(6)), q, d)


def test_queries_of_one_document_are_no_negatives_of_each_other():
    q, d = drawn(1, 6, 5), drawn(2, 9, 5)
    u = F.normalize(q, dim=1)
    own = (u @ u.T / 0.1).masked_fill((TARGETS[:, None] == TARGETS) | (TARGETS == -100), -math.inf)
    logits = torch.cat([u @ F.normalize(d, dim=1).T / 0.1, own], 1)
    wanted = F.cross_entropy(logits, TARGETS)
    assert_same(itrloss.InfoNCELoss(0.1, image_image=True)(q, d, targets=TARGETS), wanted, q, d)


def test_all_losses_of_pairs_take_targets():
    q, d = drawn(1, 6, 5), drawn(2, 9, 5)
    rows = torch.where(TARGETS == -100, NO_ID, TARGETS)
    for make in (itrloss.SupConLoss, itrloss.TripletLoss, itrloss.DiversityContrastiveLoss):
        by_ids = make(directions="image-text")(q, d, rows, torch.arange(9))
        assert_same(make()(q, d, targets=TARGETS), by_ids, q, d)
    teacher = drawn(3, 6, 9).detach()
    by_ids = itrloss.MarginMSELoss(directions="image-text")(q, d, teacher, rows, torch.arange(9))
    assert_same(itrloss.MarginMSELoss()(q, d, teacher, targets=TARGETS), by_ids, q, d)
    counts = TARGETS != -100
    of_rows = itrloss.DistillationLoss(directions="image-text")(q[counts], d, teacher[counts])
    assert_same(itrloss.DistillationLoss()(q, d, teacher, targets=TARGETS), of_rows, q, d)


# -------------------------------------------------------------------------------------- wrong input

Z, W = drawn(1, 6, 5), drawn(2, 6, 5)
NINE = drawn(3, 9, 5)
Y = torch.arange(6)


@pytest.mark.parametrize(
    "given, message",
    [
        (((Z,), {"labels": Y[:3]}), r"^labels: expected shape \(6,\), got \(3,\)"),
        (((Z,), {"labels": Y.float()}), "^labels: expected an integer tensor"),
        (((Z, NINE), {"labels": Y}), "^texts: expected another view of the same 6 items"),
        (((Z, W, Y), {"labels": Y}), "^image_ids: expected None with labels"),
        (((Z,), {"text_ids": Y, "labels": Y}), "^text_ids: expected None with labels"),
        (((Z,), {"labels": Y, "targets": Y}), "targets: expected None with labels"),
        (((Z,), {"labels": Y, "image_groups": Y}), "^image_groups, .*: expected None with labels"),
        (((), {"labels": Y}), r"^images: expected a floating-point tensor \(N, D\)"),
        (((), {"labels": torch.arange(9), "scores": NINE}), r"^scores: expected shape \(N, N\)"),
        (((Z, W), {"labels": Y, "scores": Z @ W.T}), "either scores or images and texts"),
        (((itrloss.Similarity(Z, W),), {"labels": Y}), "^images: expected a floating-point"),
        (((Z, NINE), {"targets": Y + 4}), "^targets: expected integers from 0 to 8, got 4 to 9"),
        (((Z, NINE), {"targets": Y - 1}), "^targets: expected integers from 0 to 8, got -1 to 4"),
        (((Z, NINE), {"targets": Y[:3]}), "^targets: expected shape"),
        (((Z, NINE), {"targets": ["a"] * 6}), "^targets: expected an integer tensor"),
        (((Z, NINE, Y), {"targets": Y}), "^targets: expected None with ids"),
        (((Z, NINE), {"targets": Y, "image_groups": Y}), "^targets: expected None with ids"),
        (((itrloss.Similarity(Z, W),), {"targets": Y}), "targets: expected None with a Simil"),
    ],
)
def test_wrong_input_is_refused(given, message):
    args, options = given
    with pytest.raises((TypeError, ValueError), match=message):
        itrloss.SupConLoss()(*args, **options)


@pytest.mark.parametrize(
    "options, given",
    [
        ({"image_image": True}, {"labels": Y}),
        ({"text_text": True}, {"labels": Y}),
        ({"joint": True}, {"labels": Y}),
        ({"joint": True}, {"texts": W, "targets": Y}),
        ({}, {"texts": W, "targets": Y, "negatives": W, "negative_ids": Y}),
    ],
)
def test_options_of_two_sides_are_refused(options, given):
    with pytest.raises(ValueError, match="expected False"):
        itrloss.InfoNCELoss(**options)(Z, **given)


# ---------------------------------------------------------------------------------------- processes

CUTS = [slice(0, 4), slice(4, 10)]


def shared(rank: int) -> list[Tensor]:
    """The losses of this process's queries, and their gradients, with the documents of both."""
    part = CUTS[rank]
    # document j of process r is number 4 r + j among the documents of both
    loss = itrloss.InfoNCELoss(0.1, gather=True)
    q = drawn(1, 10, 6).detach()[part].requires_grad_()
    d = drawn(2, 10, 6).detach()[part].requires_grad_()
    own = torch.tensor([1, 1, -100, 3] if rank == 0 else [5, 0, 2, -100, 2, 1])
    value = loss(q, d, targets=own)
    found = [value.detach(), *torch.autograd.grad(value, (q, d))]
    every = torch.cat([drawn(2, 10, 6), drawn(3, 5, 6)])
    scores = F.normalize(q, dim=1) @ F.normalize(every, dim=1).T
    of_all = torch.where(own == -100, own, own + part.start)
    found.append(loss(scores=scores, targets=of_all).detach())
    return found


def test_processes_number_the_documents_of_all(tmp_path: Path):
    """The losses of all processes are added, as `DistributedDataParallel` takes their mean."""
    found = run(shared, tmp_path)
    for part, results in zip(CUTS, found, strict=True):
        results = iter(results)
        targets = torch.tensor([1, 1, -100, 3, 9, 4, 6, -100, 6, 5])
        q, d = drawn(1, 10, 6), drawn(2, 10, 6)
        value = itrloss.InfoNCELoss(0.1)(q, d, targets=targets)
        torch.testing.assert_close(next(results), value.detach())
        for gradient in torch.autograd.grad(value, (q, d)):
            torch.testing.assert_close(next(results) / WORLD, gradient[part])
        more = torch.cat([d, drawn(3, 5, 6)])
        value = itrloss.InfoNCELoss(0.1)(q, more, targets=targets)
        torch.testing.assert_close(next(results), value.detach())
