"""Figures that losses compute of their batches, and the warning of a collapse."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch
from support import oracle
from support.cases import ENGINES, sample, similarity
from support.cases import sets as sample_sets
from support.draws import OF_IDS, Draw, draw_workings, drawn_batch
from support.oracle import differ, match
from support.processes import run

import itrloss
from itrloss import Similarity, TripletLoss, describe
from itrloss.losses.telemetry import describe_memory
from itrloss.memory import MemorySimilarity

# ------------------------------------------------------------------------------------------ figures


def mean(values):
    values = list(values)
    return float(np.mean(values)) if values else 0.0


def skewness_of_counts(scores, own, others, k):
    """How unevenly the columns are among the k best of the rows, of those that have candidates."""
    pairs = np.array([[match(a, b) or differ(a, b) for b in others] for a in own])
    counts = np.zeros(len(others))
    for row, candidates in zip(scores, pairs, strict=True):
        best = sorted(np.flatnonzero(candidates), key=lambda j: -row[j])
        counts[best[:k]] += 1
    counts = counts[pairs.any(0)]
    deviations = counts - counts.mean()
    variance = (deviations**2).mean()
    return (deviations**3).mean() / variance**1.5 if variance > 0 else 0.0


def wanted_figures(scores, rows, cols, margin, k):
    positives, hardest, gaps, active, diversities = [], [], [], [], []
    for S, own, others in ((scores, rows, cols), (scores.T, cols, rows)):
        spread = oracle.std_diversity(S, own, others)
        for row, item, diversity in zip(S, own, spread, strict=True):
            right = [s for s, other in zip(row, others, strict=True) if match(item, other)]
            wrong = [s for s, other in zip(row, others, strict=True) if differ(item, other)]
            positives += right
            if right or wrong:
                diversities.append(diversity)
            if wrong:
                hardest.append(max(wrong))
            if right and wrong:
                gaps.append(mean(right) - max(wrong))
                active += [s < max(wrong) + margin for s in right]
    return {
        "positive": mean(positives),
        "hardest_negative": mean(hardest),
        "gap": mean(gaps),
        "active": mean(active),
        "hubness_i2t": skewness_of_counts(scores, rows, cols, k),
        "hubness_t2i": skewness_of_counts(scores.T, cols, rows, k),
        "diversity_min": min(diversities),
    }


@pytest.mark.parametrize("turn", range(4))
def test_figures_of_random_batches_are_those_of_loops(turn, poisoned, monkeypatch):
    for seed in range(20 * turn, 20 * turn + 20):
        draw = Draw("figures", seed)
        batch = drawn_batch(draw, [*OF_IDS, "labels"])
        rows, cols = batch.items()
        if not any(match(a, b) or differ(a, b) for a in rows for b in cols):
            continue
        engine = draw.pick(ENGINES)
        k = draw.pick([2, 10])
        about = f"{batch}, {engine}, {draw_workings(draw, monkeypatch)}"
        images = draw.normal(batch.n, 8).requires_grad_()
        texts = draw.normal(batch.m, 8)
        sim = similarity(images, texts, batch.ids, engine, related=batch.related)
        found = describe(sim, 0.1, hubness_k=k)
        assert all(x.dim() == 0 and not x.requires_grad for x in found.values())
        scores = oracle.cosine(images.detach().numpy(), texts.numpy())
        wanted = wanted_figures(scores, rows, cols, 0.1, k)
        assert {name: x.item() for name, x in found.items()} == pytest.approx(wanted), about


IMAGES, TEXTS = sample(12, 8), sample(12, 8, seed=1)


def test_losses_keep_the_figures_of_the_last_call_if_asked():
    loss = TripletLoss(0.3, telemetry=True)
    assert loss.telemetry == {}
    value = loss(IMAGES, TEXTS)
    assert torch.equal(value, TripletLoss(0.3)(IMAGES, TEXTS))
    torch.testing.assert_close(loss.telemetry, describe(Similarity(IMAGES, TEXTS), 0.3))
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        torch.testing.assert_close(twin.telemetry, loss.telemetry)


def test_figures_of_a_loss_without_a_margin_are_those_by_default():
    loss = itrloss.DiversityContrastiveLoss(telemetry=True)
    loss(IMAGES, TEXTS)
    torch.testing.assert_close(loss.telemetry, describe(Similarity(IMAGES, TEXTS)))


def test_telemetry_may_be_switched_on_and_off_later():
    loss = itrloss.InfoNCELoss()
    loss(IMAGES, TEXTS)
    assert loss.telemetry == {}
    loss.telemetry = True
    loss(IMAGES, TEXTS)
    assert "positive" in loss.telemetry
    loss.telemetry = False
    loss(IMAGES, TEXTS)
    assert loss.telemetry == {}
    with pytest.raises((TypeError, ValueError), match="telemetry"):
        loss.telemetry = "all"


def test_the_number_of_neighbours_is_named():
    with pytest.raises(ValueError, match=r"^hubness_k: expected at least 1, got 0"):
        describe(Similarity(*sample(2, 5, 4)), hubness_k=0)


def test_telemetry_of_heads_is_that_of_the_best_one():
    sets = sample_sets(4, 3, 5)
    texts = sample(8, 5, dtype=torch.float64)
    ids = torch.arange(4), torch.arange(8) // 2
    loss = itrloss.VarianceAwareLoss(telemetry=True)
    assert torch.equal(loss(sets, texts, *ids), itrloss.VarianceAwareLoss()(sets, texts, *ids))
    best = itrloss.functional.set_similarity(sets, texts)
    wanted = describe(Similarity.from_scores(best, *ids), 0.2)
    torch.testing.assert_close(loss.telemetry, wanted)


OF_ONE_PAIR = {
    "pairs": lambda v, w: itrloss.InfoNCELoss(telemetry=True)(v, w),
    "heads": lambda v, w: itrloss.VarianceAwareLoss(telemetry=True)(v[:, None], w),
    "tokens": lambda v, w: itrloss.InfoNCELoss(telemetry=True)(
        scores=itrloss.functional.set_similarity(v[:, None], w[:, None], "max_sum")
    ),
    "distributions": lambda v, w: itrloss.PCMEPlusPlusLoss(telemetry=True)(v, w, v, w),
    "an empty memory": lambda v, w: itrloss.UnifiedTrainingObjective(telemetry=True)(
        v, w, v.detach(), w.detach(), itrloss.CoupledMemory(3, 8)
    ),
}


@pytest.mark.parametrize("name", OF_ONE_PAIR)
def test_telemetry_of_one_pair_leaves_the_loss_finite(name):
    images, texts = IMAGES[:1].clone().requires_grad_(), TEXTS[:1].clone().requires_grad_()
    value = OF_ONE_PAIR[name](images, texts)
    gradients = torch.autograd.grad(value, (images, texts))
    assert all(x.isfinite().all() for x in (value, *gradients))


# ----------------------------------------------------------------------------------------- memories


def test_telemetry_of_a_memory():
    memory = itrloss.CoupledMemory(8, 4)
    images, texts = sample(3, 4), sample(3, 4, seed=1)
    batch = images, texts, images, texts, memory, torch.arange(3), torch.arange(3)
    loss = itrloss.MemoryDiversityContrastiveLoss(telemetry=True)
    loss(*batch)
    assert loss.telemetry["memory_entries"] == 0
    assert loss.telemetry["memory_hardest"] == 0
    image_keys, text_keys = sample(2, 6, 4, seed=2)
    entry_ids = torch.arange(6) + 2
    memory.enqueue(image_keys, text_keys, entry_ids)
    loss(*batch)
    assert loss.telemetry["memory_entries"] == 6
    assert loss.telemetry["memory_age"] == 1.5  # as of two batches of three: 1 and 2
    own = torch.arange(3)[:, None] == entry_ids
    hardest = []
    for x, keys in ((images, text_keys), (texts, image_keys)):
        scores = torch.nn.functional.cosine_similarity(x[:, None], keys, dim=2)
        hardest.append(scores.masked_fill(own, -math.inf).amax(1))
    torch.testing.assert_close(loss.telemetry["memory_hardest"], torch.cat(hardest).mean())
    of_batch = describe(Similarity(images, texts))
    torch.testing.assert_close(loss.telemetry["gap"], of_batch["gap"])


def to_twelve_entries(*ids):
    """The similarities of pairs with these ids to a memory of twelve entries."""
    memory = itrloss.CoupledMemory(12, 4)
    memory.enqueue(*sample(2, 12, 4), torch.arange(12))
    images, texts = sample(2, len(ids), 4, seed=1)
    return MemorySimilarity.of(images, texts, images, texts, memory, ids, ids)


def test_the_age_of_a_memory_is_in_batches_of_what_exists():
    sims = to_twelve_entries(0, itrloss.NO_ID, 1, 2, itrloss.NO_ID)
    assert describe_memory(sims)["memory_age"] == 2.5  # in batches of three pairs


@pytest.mark.parametrize("entries", [1, 2, 3, 4, 7, 9, 11])
def test_the_age_of_a_memory_is_exact_where_the_oldest_batch_is_cut_off(entries):
    memory = itrloss.CoupledMemory(entries, 4)
    memory.enqueue(*sample(2, 12, 4))
    images, texts = sample(2, 3, 4, seed=1)
    sims = MemorySimilarity.of(images, texts, images, texts, memory)
    ages = [1 + place // 3 for place in range(entries)]
    age = describe_memory(sims)["memory_age"]
    assert float(age) == pytest.approx(sum(ages) / entries)


def described_in_part(rank):
    """Figures of a batch of two processes, with padding in one of them."""
    images, texts = sample(2, 8, 4)
    ids = torch.tensor([0, 1, 2, 3, itrloss.NO_ID, 5, 6, itrloss.NO_ID])
    own = slice(4) if rank == 0 else slice(4, 8)
    return describe(Similarity.sharded(images[own], texts[own], ids[own], ids[own]), hubness_k=3)


def test_processes_that_share_a_batch_describe_what_exists(tmp_path):
    images, texts = sample(2, 8, 4)
    exist = torch.tensor([0, 1, 2, 3, 5, 6])
    wanted = describe(Similarity(images[exist], texts[exist]), hubness_k=3)
    for found in run(described_in_part, tmp_path):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, msg=name)


def test_the_age_of_a_memory_counts_the_batches_of_all_processes(monkeypatch):
    sims = to_twelve_entries(0, 1, 2)
    assert describe_memory(sims)["memory_age"] == 2.5  # 1, 2, 3 and 4 batches ago
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _=None: 2)
    assert describe_memory(sims)["memory_age"] == 1.5  # 1 and 2 batches ago, of six pairs each


# ----------------------------------------------------------------------------------------- collapse

ALIKE = torch.ones(4, 6) + 1e-4 * sample(4, 6), torch.ones(4, 6)
APART = sample(6, 6), sample(6, 6).flip(1)


def warnings_of(loss, calls, *batch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            loss(*batch)
    # they point to the user's code, not to ours or PyTorch's
    assert sys.version_info < (3, 12) or all(x.filename == __file__ for x in caught)
    return [str(x.message) for x in caught]


CAPTIONS = torch.arange(4), torch.arange(8) // 2
COLLAPSED = {
    "pairs": ALIKE,
    "captions": (ALIKE[0], ALIKE[1].repeat_interleave(2, 0), *CAPTIONS),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", COLLAPSED)
def test_a_collapse_is_told_once(name, reduction):
    batch = COLLAPSED[name]
    loss = TripletLoss(reduction=reduction)
    assert not warnings_of(loss, 99, *batch)
    (message,) = warnings_of(loss, 102, *batch)
    assert "0.4 per pair" in message
    assert 'mining="all"' in message


def test_values_are_looked_at_every_fiftieth_call(monkeypatch):
    """Each check synchronises with an accelerator."""
    looks = []
    loss = TripletLoss()
    monkeypatch.setattr(loss, "_check_collapse", looks.append)
    warnings_of(loss, 149, *APART)
    assert len(looks) == 2


NOT_COLLAPSED = {
    "embeddings apart": (TripletLoss(), *APART),
    "mean of all hinges": (TripletLoss(mining="all"), *ALIKE),
    "soft form, whose value is another one": (TripletLoss(temperature=0.1), *ALIKE),
    "evaluation": (TripletLoss().eval(), *ALIKE),
}


@pytest.mark.parametrize("name", NOT_COLLAPSED)
def test_other_training_is_left_in_peace(name):
    assert not warnings_of(NOT_COLLAPSED[name][0], 101, *NOT_COLLAPSED[name][1:])


def test_a_plateau_that_is_left_again_is_no_collapse():
    loss = TripletLoss()
    for _ in range(3):  # never a hundred consecutive calls
        assert not warnings_of(loss, 60, *ALIKE)
        assert not warnings_of(loss, 40, *APART)
