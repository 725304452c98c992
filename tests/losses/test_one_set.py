"""Losses of one set of embeddings with labels, and by targets, next to loops from the papers.

SupCon: Khosla et al. 2020, Eq. 2. NT-Xent: Chen et al. 2020 (SimCLR), Eq. 1. Triplets: all, or with
each anchor's hardest negative. Multi-similarity: Wang et al. 2019, Eq. 15. Circle: Sun et al. 2020,
Eq. 6. In all of them an item is no candidate of itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import WORLD, run
from torch import Tensor

import itrloss
from itrloss import NO_ID

ENGINES = ["dense", "tiled"]
LABELS = torch.tensor([3, 1, 3, 0, 1, 3, 7, 0, 1, 5])  # 7 and 5 match nothing


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


# ------------------------------------------------------------------------------------------- loops


def pairs_of(labels: Any) -> list[tuple[list[int], list[int]]]:
    """The positives and the negatives of each item, which have one label or a set of them."""
    sets = [set(x) if isinstance(x, list) else {x} for x in torch.as_tensor(labels).tolist()]
    places = range(len(sets))
    return [
        (
            [j for j in places if j != i and sets[i] & sets[j]],
            [j for j in places if j != i and not sets[i] & sets[j]],
        )
        for i in places
    ]


def supcon(s: Tensor, own: list[int], others: list[int]) -> Tensor:
    all_others = torch.logsumexp(s[own + others] / 0.1, 0)
    return sum(all_others - s[p] / 0.1 for p in own) / len(own)


def nt_xent(s: Tensor, own: list[int], others: list[int]) -> Tensor:
    """With one positive, that of SimCLR; several do not compete."""
    values = []
    for p in own:
        values.append(torch.logsumexp(s[[p, *others]] / 0.5, 0) - s[p] / 0.5)
    return sum(values) / len(own)


def all_triplets(s: Tensor, own: list[int], others: list[int]) -> Tensor:
    return sum((0.2 - s[p] + s[j]).clamp_min(0) for p in own for j in others)


def hardest_triplets(s: Tensor, own: list[int], others: list[int]) -> Tensor:
    return sum((0.2 - s[p] + s[others].max()).clamp_min(0) for p in own)


def multi_similarity(s: Tensor, own: list[int], others: list[int]) -> Tensor:
    pull = torch.log(1 + torch.exp(-2 * (s[own] - 0.5)).sum()) / 2
    return pull + torch.log(1 + torch.exp(50 * (s[others] - 0.5)).sum()) / 50


def mined_similarity(s: Tensor, own: list[int], others: list[int]) -> Tensor:
    near = [j for j in others if s[j] > s[own].min() - 0.1]
    far = [p for p in own if s[p] < s[others].max() + 0.1]
    return multi_similarity(s, far, near)


def circle(s: Tensor, own: list[int], others: list[int]) -> Tensor:
    push = [80 * (s[j].detach() + 0.4).clamp_min(0) * (s[j] - 0.4) for j in others]
    pull = [-80 * (1.4 - s[p].detach()).clamp_min(0) * (s[p] - 0.6) for p in own]
    logs = torch.logsumexp(torch.stack(push), 0) + torch.logsumexp(torch.stack(pull), 0)
    return F.softplus(logs)


Loop = Callable[[Tensor, list[int], list[int]], Tensor]
LOSSES: dict[str, tuple[Loop, Any]] = {
    "supcon": (supcon, itrloss.SupConLoss(0.1)),
    "nt-xent": (nt_xent, itrloss.InfoNCELoss(0.5)),
    "all triplets": (all_triplets, itrloss.TripletLoss(0.2, "all", reduction="mean")),
    "hardest": (hardest_triplets, itrloss.TripletLoss(0.2, reduction="mean")),
    "multi-similarity": (multi_similarity, itrloss.MultiSimilarityLoss()),
    "mined": (mined_similarity, itrloss.MultiSimilarityLoss(epsilon=0.1)),
    "circle": (circle, itrloss.CircleLoss()),
}


def values_of(loop: Loop, z: Tensor, labels: Any) -> list[Tensor]:
    """The value of each item; 0 for one without a positive or a negative, which does not count."""
    u = F.normalize(z, dim=1)
    return [
        loop(u[i] @ u.T, own, others) if own and others else z.sum() * 0
        for i, (own, others) in enumerate(pairs_of(labels))
    ]


def mean_of(values: list[Tensor], labels: Any) -> Tensor:
    return sum(values) / sum(bool(own and others) for own, others in pairs_of(labels))


def assert_same(found: Tensor, wanted: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    own = torch.autograd.grad(found, leaves, retain_graph=True)
    exact = torch.autograd.grad(wanted, leaves, retain_graph=True)
    for x, y in zip(own, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


# ----------------------------------------------------------------------------------- one set, views


@pytest.fixture
def loss_of(name, engine):
    """The loop of a loss, and the loss with an engine, of small matrices in several tiles."""
    loop, loss = LOSSES[name]
    loss.engine = engine
    return loop, loss


of_losses = pytest.mark.parametrize("name", LOSSES)
of_engines = pytest.mark.parametrize("engine", ENGINES)


@of_losses
@of_engines
def test_one_set_with_labels_has_the_values_of_loops(loss_of, small_tiles):
    loop, loss = loss_of
    z = drawn(1, 10, 6)
    values = values_of(loop, z, LABELS)
    assert_same(loss(z, labels=LABELS), mean_of(values, LABELS), z)
    loss.reduction = "none"
    of_items = loss(z, labels=LABELS)
    loss.reduction = "mean"
    assert of_items.shape == (10,)
    assert_same(of_items.sum(), sum(values), z)
    torch.testing.assert_close(of_items, torch.stack(values))


@of_losses
@of_engines
def test_two_views_of_the_same_items_are_one_set(loss_of, small_tiles):
    loop, loss = loss_of
    first, second = drawn(1, 7, 6), drawn(2, 7, 6)
    for labels in (torch.arange(7), LABELS[:7]):
        both = torch.cat([labels, labels])
        wanted = mean_of(values_of(loop, torch.cat([first, second]), both), both)
        assert_same(loss(first, second, labels=labels), wanted, first, second)


def test_nt_xent_is_a_cross_entropy_without_the_diagonal():
    first, second = drawn(1, 7, 6), drawn(2, 7, 6)
    u = F.normalize(torch.cat([first, second]), dim=1)
    logits = (u @ u.T / 0.5).masked_fill(torch.eye(14).bool(), -math.inf)
    wanted = F.cross_entropy(logits, torch.arange(14).roll(7))
    assert_same(itrloss.InfoNCELoss(0.5)(first, second, labels=range(7)), wanted, first, second)


@pytest.mark.parametrize("directions", ["both", "image-text", "text-image"])
def test_each_item_is_an_anchor_once(directions):
    z = drawn(1, 10, 6)
    loss = itrloss.SupConLoss(directions=directions)
    assert_same(loss(z, labels=LABELS), itrloss.SupConLoss()(z, labels=LABELS), z)


@of_engines
def test_labels_are_what_ids_may_be(engine, small_tiles):
    z = drawn(1, 10, 6)
    loss = itrloss.SupConLoss(engine=engine)
    wanted = loss(z, labels=LABELS)
    names = [f"item {x}" for x in LABELS.tolist()]
    for labels in (LABELS.tolist(), LABELS.numpy(), LABELS.int(), names, LABELS[:, None]):
        assert_same(loss(z, labels=labels), wanted, z)
    sets = torch.stack([LABELS, torch.arange(10) % 4 + 20], 1)
    assert_same(loss(z, labels=sets), mean_of(values_of(supcon, z, sets), sets), z)
    # one that does not exist is no candidate
    some = LABELS.clone()
    some[2] = NO_ID
    left = torch.arange(10) != 2
    assert_same(loss(z, labels=some), loss(z[left], labels=LABELS[left]), z)


def test_scores_of_one_set():
    z = drawn(1, 10, 6)
    u = F.normalize(z, dim=1)
    for _, loss in LOSSES.values():
        assert_same(loss(scores=u @ u.T, labels=LABELS), loss(z, labels=LABELS), z)


def test_margins_and_further_negatives_go_with_labels():
    z, n = drawn(1, 10, 6), drawn(2, 4, 6)
    ids = torch.tensor([3, 8, 1, 9])
    u, w = F.normalize(z, dim=1), F.normalize(n, dim=1)
    s = torch.cat([u @ u.T, u @ w.T], 1)
    labels = torch.cat([LABELS, ids])
    values = []
    for i, (own, _) in enumerate(pairs_of(LABELS)):
        others = [j for j in range(14) if j != i and labels[j] != labels[i]]
        limit = s[i, own].mean().detach() + 0.3 if own else 0
        near = [j for j in others if s[i, j] < limit]
        if own:
            values.append(nt_xent(s[i], own, near))
    loss = itrloss.InfoNCELoss(0.5, margin=0.3)
    found = loss(z, labels=LABELS, negatives=n, negative_ids=ids)
    assert_same(found, sum(values) / len(values), z, n)
    guided = loss(z, labels=LABELS, negatives=n, negative_ids=ids, guide=(z, z, n))
    assert_same(guided, found, z, n)


def test_a_similarity_of_one_set_and_telemetry():
    z = drawn(1, 10, 6)
    related = itrloss.Related(one_set=True)
    sim = itrloss.Similarity(z, z, LABELS, LABELS, related=related)
    loss = itrloss.SupConLoss(telemetry=True)
    assert_same(loss(sim), loss(z, labels=LABELS), z)
    u = F.normalize(z, dim=1).detach()
    right = [u[i] @ u[p] for i, (own, _) in enumerate(pairs_of(LABELS)) for p in own]
    torch.testing.assert_close(loss.telemetry["positive"].double(), torch.stack(right).mean())
    assert sim.positive_counts.tolist() == [len(own) for own, _ in pairs_of(LABELS)]
    assert sim.negative_counts.tolist() == [len(others) for _, others in pairs_of(LABELS)]


def test_a_gradient_cache_and_matryoshka_take_labels():
    z = drawn(1, 10, 6).detach()
    encoder = torch.nn.Linear(6, 5, dtype=torch.float64)
    loss = itrloss.SupConLoss()
    wanted = loss(encoder(z), labels=LABELS)
    wanted.backward()
    gradient = encoder.weight.grad.clone()
    encoder.zero_grad()
    found = itrloss.grad_cache_step(loss, [encoder], [z], 3, labels=LABELS)
    torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(encoder.weight.grad, gradient)
    parts = sum(loss(z[:, :d], labels=LABELS) for d in (2, 4))
    torch.testing.assert_close(itrloss.Matryoshka(loss, (2, 4))(z, labels=LABELS), parts)


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
        (((), {"labels": Y[:3], "scores": Z @ W.T}), "labels: expected shape"),
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


def ranked(make: Callable[..., itrloss.Similarity], part: slice) -> Tensor:
    """The sums of the ranks of each item's positives among all others."""
    z, y = drawn(1, 10, 6).detach()[part], LABELS[part]
    return make(z, z, y, y, related=itrloss.Related(one_set=True)).ranks().sum(1)


def shared(rank: int) -> list[Tensor]:
    """The losses of this process's items, and their gradients, with the batch of both."""
    part = CUTS[rank]
    found = []
    for name, (_, loss) in LOSSES.items():
        loss.gather = True
        z = drawn(1, 10, 6).detach()[part].requires_grad_()
        w = drawn(2, 10, 6).detach()[part].requires_grad_()
        one = loss(z, labels=LABELS[part])
        two = loss(z, w, labels=LABELS[part])
        found += [one.detach(), two.detach()]
        found += [*torch.autograd.grad(one, z), *torch.autograd.grad(two, (z, w))]
        if name == "nt-xent":
            cosines = F.normalize(drawn(1, 10, 6), dim=1)
            found.append(loss(scores=cosines[part] @ cosines.T, labels=LABELS[part]).detach())
    found.append(ranked(itrloss.Similarity.sharded, part))
    # document j of process r is number 4 r + j among the documents of both
    loss = itrloss.InfoNCELoss(0.1, gather=True)
    q = drawn(1, 10, 6).detach()[part].requires_grad_()
    d = drawn(2, 10, 6).detach()[part].requires_grad_()
    own = torch.tensor([1, 1, -100, 3] if rank == 0 else [5, 0, 2, -100, 2, 1])
    value = loss(q, d, targets=own)
    found += [value.detach(), *torch.autograd.grad(value, (q, d))]
    every = torch.cat([drawn(2, 10, 6), drawn(3, 5, 6)])
    scores = F.normalize(q, dim=1) @ F.normalize(every, dim=1).T
    of_all = torch.where(own == -100, own, own + part.start)
    found.append(loss(scores=scores, targets=of_all).detach())
    return found


def test_processes_have_the_values_of_one(tmp_path: Path):
    """The losses of all processes are added, as `DistributedDataParallel` takes their mean."""
    found = run(shared, tmp_path)
    for part, results in zip(CUTS, found, strict=True):
        results = iter(results)
        for name, (_, loss) in LOSSES.items():
            loss.gather = False
            z, w = drawn(1, 10, 6), drawn(2, 10, 6)
            one = loss(z, labels=LABELS)
            two = loss(z, w, labels=LABELS)
            for value in (one, two):
                torch.testing.assert_close(next(results), value.detach())
            gradients = [*torch.autograd.grad(one, z), *torch.autograd.grad(two, (z, w))]
            for gradient in gradients:
                torch.testing.assert_close(next(results) / WORLD, gradient[part])
            if name == "nt-xent":
                torch.testing.assert_close(next(results), one.detach())
        torch.testing.assert_close(next(results), ranked(itrloss.Similarity, slice(None))[part])
        targets = torch.tensor([1, 1, -100, 3, 9, 4, 6, -100, 6, 5])
        q, d = drawn(1, 10, 6), drawn(2, 10, 6)
        value = itrloss.InfoNCELoss(0.1)(q, d, targets=targets)
        torch.testing.assert_close(next(results), value.detach())
        for gradient in torch.autograd.grad(value, (q, d)):
            torch.testing.assert_close(next(results) / WORLD, gradient[part])
        more = torch.cat([d, drawn(3, 5, 6)])
        value = itrloss.InfoNCELoss(0.1)(q, more, targets=targets)
        torch.testing.assert_close(next(results), value.detach())
