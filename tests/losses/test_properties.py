"""What holds for any input of the three papers' losses of sets and prototypes, and objectives.

Lengths, order, names of ids and of clusters, sums over parts, and limits whose value is known:
one head, one cluster, equal rows, an empty memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answers import assert_equal
from support.draws import Draw
from torch import Tensor
from torch.nn import functional as F

import itrloss
from itrloss.functional import prototype_classification_loss

pytestmark = pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
D, HEADS, CLUSTERS, ENTRIES = 5, 3, 4, 7
seeds = st.integers(0, 10**6)
sizes = st.integers(2, 7)
few = settings(deadline=None, max_examples=20)
Batch = dict[str, Tensor]
KEYS = ("images", "texts", "image_keys", "text_keys")
VECTORS = (*KEYS, "image_concepts", "text_concepts")


def drawn(seed: int, n: int) -> Batch:
    """What the losses take of n pairs, and entries of a memory."""
    draw = Draw("properties", seed, n)
    batch = {name: draw.vectors(n, D, zeros=False) for name in VECTORS}
    for name in ("sets", "residuals"):
        batch[name] = draw.vectors(n * HEADS, D, zeros=False).view(n, HEADS, D)
    return {
        **batch,
        "gate": draw.integers(2, n, HEADS).double(),
        "ids": draw.integers(4, n),
        "regions": draw.normal(n, 3, D),
        "entries": draw.normal(2, ENTRIES, D),
        "entry_ids": draw.integers(6, ENTRIES),
        "points": draw.normal(9, D),
        "weight": draw.normal(CLUSTERS, D),
    }


def of_pairs(batch: Batch) -> dict[str, Tensor]:
    """What has a row for each pair."""
    others = "entries", "entry_ids", "points", "weight"
    return {name: x for name, x in batch.items() if name not in others}


def full(*shape: int, value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def memory_of(batch: Batch) -> itrloss.CoupledMemory:
    memory = itrloss.CoupledMemory(ENTRIES, D, dtype=torch.float64)
    memory.enqueue(*batch["entries"], batch["entry_ids"])
    return memory


# ------------------------------------------------------------------------------------------- losses


def variance_aware(batch: Batch) -> Tensor:
    loss = itrloss.VarianceAwareLoss(reduction="none")
    return torch.stack([*loss(batch["sets"], batch["texts"], batch["ids"], batch["ids"])])


def orthogonal(batch: Batch) -> Tensor:
    loss = itrloss.DynamicOrthogonalLoss(0.01, reduction="none")
    return loss(batch["residuals"], batch["gate"])


def prototypes(batch: Batch) -> Tensor:
    sides = batch["image_concepts"], batch["text_concepts"]
    ids = batch["ids"] % len(batch["weight"])
    values = prototype_classification_loss(*sides, batch["weight"], ids, "none")
    return torch.stack([*values])


def gates(batch: Batch) -> Tensor:
    torch.manual_seed(0)
    gate = itrloss.DynamicGate(D, HEADS).eval()
    return gate(batch["regions"]).T


def clusters(batch: Batch) -> Tensor:
    means = itrloss.OnlineKMeans(CLUSTERS, D)
    means.update(batch["points"])
    return means.predict(batch["images"])


def user(batch: Batch, **options: float) -> Tensor:
    loss = itrloss.UnifiedTrainingObjective(10.0, batch_weight=3.0, reduction="none", **options)
    return torch.stack([*loss(*with_memory(batch), batch["ids"], batch["ids"])])


def with_memory(batch: Batch) -> list[Tensor | itrloss.CoupledMemory]:
    return [*(batch[name] for name in KEYS), memory_of(batch)]


def coder(batch: Batch, number: int = CLUSTERS, **options: float | str) -> Tensor:
    """The total and its terms."""
    torch.manual_seed(0)
    objective = itrloss.CODERObjective(D, number, **options).double().eval()
    objective.prototypes.update(batch["points"])
    concepts = batch["image_concepts"], batch["text_concepts"]
    total, terms = objective(*with_memory(batch), *concepts, batch["ids"], batch["ids"])
    return torch.stack([total.detach(), *terms])


def coder_with_the_memorys_diversity(batch: Batch) -> Tensor:
    return coder(batch, batch_diversity_from="both")


def dvse(batch: Batch, balance: float = 0.6) -> Tensor:
    """The total and its terms."""
    objective = itrloss.DVSEObjective(balance, slack=0.01)
    parts = batch["sets"], batch["texts"], batch["residuals"], batch["gate"]
    total, terms = objective(*parts, batch["ids"], batch["ids"])
    return torch.stack([total, *terms])


class Subject(NamedTuple):
    """A loss: its values, of which the last dimension is of the pairs if they are several, and what
    may have any length.
    """

    values: Callable[[Batch], Tensor]
    of_any_length: tuple[str, ...] = ()
    of_pairs: bool = True


SUBJECTS = {
    "variance aware": Subject(variance_aware, ("sets", "texts")),
    "orthogonal": Subject(orthogonal, ("residuals",)),
    "prototypes": Subject(prototypes),
    "gate": Subject(gates),
    "clusters": Subject(clusters, ("images", "points")),
    "user": Subject(user, KEYS),
    "coder": Subject(coder, KEYS, False),
    "coder, MB": Subject(coder_with_the_memorys_diversity, KEYS, False),
    "dvse": Subject(dvse, ("sets", "texts", "residuals"), False),
}


# --------------------------------------------------------------------------------------- invariants


@pytest.mark.parametrize("name", SUBJECTS)
@given(seed=seeds, n=sizes)
@few
def test_lengths_change_nothing(name, seed, n):
    subject, batch = SUBJECTS[name], drawn(seed, n)
    draw = Draw("lengths", seed)
    longer = dict(batch)
    for part in subject.of_any_length:
        longer[part] = batch[part] * draw.normal(*batch[part].shape[:-1], 1).exp()
    assert_equal(subject.values(longer), subject.values(batch))


@pytest.mark.parametrize("name", SUBJECTS)
@given(seed=seeds, n=sizes)
@few
def test_the_order_of_pairs_changes_nothing(name, seed, n):
    subject, batch = SUBJECTS[name], drawn(seed, n)
    order = torch.randperm(n, generator=Draw("order", seed).generator)
    shuffled = {**batch, **{part: x[order] for part, x in of_pairs(batch).items()}}
    wanted = subject.values(batch)
    assert_equal(subject.values(shuffled), wanted[..., order] if subject.of_pairs else wanted)


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "prototypes"])
@given(seed=seeds, n=sizes)
@few
def test_names_of_ids_change_nothing(name, seed, n):
    subject, batch = SUBJECTS[name], drawn(seed, n)
    names = torch.randperm(20, generator=Draw("names", seed).generator) * 10**15 - 10**16
    renamed = {**batch, "ids": names[batch["ids"]], "entry_ids": names[batch["entry_ids"]]}
    assert_equal(subject.values(renamed), subject.values(batch))


@given(seed=seeds, n=sizes)
@few
def test_names_of_clusters_and_the_unit_of_length_change_no_classification(seed, n):
    batch = drawn(seed, n)
    batch["ids"] = batch["ids"] % CLUSTERS
    order = torch.randperm(CLUSTERS, generator=Draw("clusters", seed).generator)
    renamed = {**batch, "ids": order.argsort()[batch["ids"]], "weight": batch["weight"][order] / 3}
    for part in ("image_concepts", "text_concepts"):
        renamed[part] = 3 * batch[part]
    assert_equal(prototypes(renamed), prototypes(batch))


@given(seed=seeds, n=sizes)
@few
def test_order_and_signs_of_heads_change_nothing(seed, n):
    batch = drawn(seed, n)
    draw = Draw("heads", seed)
    order = torch.randperm(HEADS, generator=draw.generator)
    signs = 1.0 - 2 * draw.integers(2, n, HEADS, 1)
    other = {part: batch[part][:, order] for part in ("sets", "residuals", "gate")}
    other["residuals"] = other["residuals"] * signs
    assert_equal(dvse({**batch, **other}), dvse(batch))


@given(seed=seeds, n=sizes)
@few
def test_clusters_turn_with_the_points(seed, n):
    batch = drawn(seed, n)
    turn = torch.linalg.qr(Draw("turn", seed).normal(D, D)).Q
    means, turned = itrloss.OnlineKMeans(CLUSTERS, D), itrloss.OnlineKMeans(CLUSTERS, D)
    for part in ("points", "images", "texts"):
        ids = means.update(batch[part])
        assert torch.equal(turned.update(batch[part] @ turn), ids)
    assert_equal(turned.centroids, means.centroids @ turn.float(), tolerance=1e-5)
    assert means.counts.sum() == 9 + 2 * n


# --------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("name", ["orthogonal", "prototypes", "gate", "clusters"])
@given(seed=seeds, n=sizes, cut=st.integers(1, 6))
@few
def test_pairs_do_not_depend_on_one_another(name, seed, n, cut):
    subject, batch = SUBJECTS[name], drawn(seed, n)
    halves = []
    for part in (slice(None, cut), slice(cut, None)):
        own = {key: x[part] for key, x in of_pairs(batch).items()}
        if len(own["ids"]):
            halves.append(subject.values({**batch, **own}))
    assert_equal(torch.cat(halves, -1), subject.values(batch))


@given(seed=seeds, n=sizes)
@few
def test_variance_aware_losses_of_heads_add_up(seed, n):
    batch = drawn(seed, n)
    each = [variance_aware({**batch, "sets": batch["sets"][:, [k]]}) for k in range(HEADS)]
    assert_equal(variance_aware(batch), torch.stack(each).sum(0))


@given(seed=seeds, n=sizes)
@few
def test_objectives_are_sums_of_their_parts(seed, n):
    batch = drawn(seed, n)
    weights = ("batch_weight", "memory_weight", "concept_weight", "prototype_weight")
    paper = dict(zip(weights, (3.0, 1.0, 2.0, 1.0), strict=True))
    none = dict.fromkeys(weights, 0.0)
    parts = [value * coder(batch, **none | {name: 1.0})[0] for name, value in paper.items()]
    assert_equal(coder(batch)[0], torch.stack(parts).sum())
    total, variance, apart = dvse(batch)
    assert_equal(total, 0.6 * variance + 0.4 * apart)
    assert_equal(dvse(batch, 0.0)[0], apart)
    no_queue = {"image_memory_weight": 0.0, "text_memory_weight": 0.0}
    of_queues = user(batch) - user(batch, **no_queue)
    of_images = user(batch, text_memory_weight=0.0) - user(batch, **no_queue)
    of_texts = user(batch, image_memory_weight=0.0) - user(batch, **no_queue)
    assert_equal(of_queues, of_images + of_texts)
    assert not of_images[0].any()  # texts have the queue of images
    assert not of_texts[1].any()


@pytest.mark.parametrize("diversity", ["batch", "both"])
@given(seed=seeds, n=sizes)
@few
def test_keys_are_in_the_memorys_term_alone(diversity, seed, n):
    batch = drawn(seed, n)
    others = {name: -batch[name] for name in ("image_keys", "text_keys")}
    found = coder({**batch, **others}, batch_diversity_from=diversity)
    wanted = coder(batch, batch_diversity_from=diversity)
    assert_equal(found[[1, 3, 4]], wanted[[1, 3, 4]])


# ------------------------------------------------------------------------------------------- limits


@given(seed=seeds, n=sizes)
@few
def test_one_head_has_nothing_to_be_orthogonal_to(seed, n):
    batch = drawn(seed, n)
    one = {part: batch[part][:, :1] for part in ("sets", "residuals", "gate")}
    total, variance, apart = dvse({**batch, **one})
    assert apart == 0
    assert_equal(total, 0.6 * variance)


@given(seed=seeds, n=sizes)
@few
def test_one_cluster_is_no_classification(seed, n):
    batch = drawn(seed, n)
    assert not prototypes({**batch, "weight": batch["weight"][:1]}).any()
    assert coder(batch, 1)[-1] == 0
    means = itrloss.OnlineKMeans(1, D)
    for part in ("points", "images"):
        assert not means.update(batch[part]).any()
    assert means.counts[0] == 9 + n
    first = F.normalize(F.normalize(batch["points"]).sum(0), dim=0)
    # which weighs as much as the points that it is of
    total = 9 * first + F.normalize(batch["images"]).sum(0)
    assert_equal(means.centroids[0].double(), F.normalize(total, dim=0), tolerance=1e-5)


@given(seed=seeds, n=sizes)
@few
def test_equal_rows(seed, n):
    """All scores are 1: no spread, and hinges are the margin."""
    batch = drawn(seed, n)
    vector = batch["images"][:1]
    same = dict.fromkeys(VECTORS, vector.expand(n, D))
    same["sets"] = vector[:, None].expand(n, HEADS, D)
    same["residuals"] = vector[:, None].expand(n, HEADS, D)
    same["ids"] = torch.arange(n)
    same["entries"] = vector.expand(2, ENTRIES, D)
    same["entry_ids"] = torch.arange(ENTRIES) + 100
    batch = {**batch, **same}
    assert_equal(variance_aware(batch), full(2, n, value=0.2 * HEADS), tolerance=1e-5)
    on = batch["gate"].sum(1)
    pairs = on * (on - 1) / (HEADS * (HEADS - 1))
    assert_equal(orthogonal(batch), (pairs - 0.01).relu())

    def hal(number: int) -> float:
        return math.log1p(number * math.exp(10 * 0.5)) / 10

    wanted = 3 * (hal(n - 1) - math.log(2) / 2) + hal(ENTRIES) - math.log(2)
    assert_equal(user(batch), full(2, n, value=wanted))

    def dcl(number: int) -> float:
        return 0.2 * (math.log1p(number * math.exp(7)) - math.log(2))

    for options in ({}, {"batch_diversity_from": "both"}):
        terms = coder(batch, **options)
        assert_equal(terms[1], full(value=dcl(n - 1)))
        assert_equal(terms[2], full(value=dcl(ENTRIES)))
    weight = batch["weight"][:1].expand(CLUSTERS, D)
    alike = prototypes({**batch, "weight": weight})
    assert_equal(alike, full(2, n, value=math.log(CLUSTERS)))
    means = itrloss.OnlineKMeans(CLUSTERS, D)
    means.update(vector)
    assert not means.update(batch["images"]).any()
    assert len(means) == 1


@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_known_spread(heads):
    """Each image is between its text and the next, at right angles to the third: 0.5 is the sample
    deviation of its other two scores.
    """
    texts = torch.eye(3).double()
    sets = (texts + texts.roll(-1, 0))[:, None].expand(3, heads, 3)
    values = variance_aware({"sets": sets, "texts": texts, "ids": torch.arange(3)})
    assert_equal(values, full(2, 3, value=heads * (0.2 / 1.5**2 + math.log(1.5))))


@given(seed=seeds, n=sizes)
@few
def test_a_memory_without_entries_leaves_the_batch(seed, n):
    batch = drawn(seed, n)
    empty = {**batch, "entries": batch["entries"][:, :0], "entry_ids": batch["entry_ids"][:0]}
    batch_alone = itrloss.HubnessAwareLoss(10.0, reduction="none")
    wanted = torch.stack(
        [*batch_alone(batch["images"], batch["texts"], batch["ids"], batch["ids"])]
    )
    assert_equal(user(empty), 3 * wanted)
    _, own, against, *_ = coder(empty)
    assert against == 0
    assert_equal(coder_with_the_memorys_diversity(empty)[1], own)
