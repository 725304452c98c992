"""Figures that losses compute of their batches, and the warning of a collapse."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from support import oracle
from support.cases import SHAPES, make_ids, sample, similarity

import itrloss
from itrloss import TripletLoss, describe
from itrloss.memory import MemorySimilarity
from itrloss.telemetry import describe_memory


def mean(values):
    values = list(values)
    return float(np.mean(values)) if values else 0.0


def wanted_figures(scores, image_ids, text_ids, margin):
    """Expected figures, computed by loops."""
    positives, hardest, gaps, active = [], [], [], []
    for s, own, other in ((scores, image_ids, text_ids), (scores.T, text_ids, image_ids)):
        for i in range(len(s)):
            good = [s[i, j] for j in range(len(other)) if other[j] == own[i]]
            bad = [s[i, j] for j in range(len(other)) if other[j] != own[i]]
            if s is scores:
                positives += good
            if bad:
                hardest.append(max(bad))
            if good and bad:
                gaps.append(mean(good) - max(bad))
                active += [p < max(bad) + margin for p in good]
    found = {
        "positive": mean(positives),
        "hardest_negative": mean(hardest),
        "gap": mean(gaps),
        "active": mean(active),
    }
    for name, s in (("i2t", scores), ("t2i", scores.T)):
        top = np.argsort(-s, axis=1)[:, :10]
        counts = np.bincount(top.ravel(), minlength=s.shape[1]).astype(float)
        apart = counts - counts.mean()
        variance = (apart**2).mean()
        found[f"hubness_{name}"] = (apart**3).mean() / variance**1.5 if variance > 0 else 0.0
    return found


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept", "scores"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_figures_equal_loops(shape, engine):
    n, m, kind = SHAPES[shape]
    generator = torch.Generator().manual_seed(3)
    v, w = (torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in (n, m))
    ids = make_ids(kind, n, m)
    sim = similarity(v.requires_grad_(), w, ids, engine)
    known = (torch.arange(n), torch.arange(m)) if ids[0] is None else ids
    found = describe(sim, 0.1)
    scores = torch.nn.functional.normalize(v.detach()) @ torch.nn.functional.normalize(w).T
    for name, value in wanted_figures(scores.numpy(), *(x.numpy() for x in known), 0.1).items():
        np.testing.assert_allclose(float(found[name]), value, rtol=1e-9, atol=1e-12, err_msg=name)
    assert not any(x.requires_grad for x in found.values()) and all(
        x.dim() == 0 for x in found.values()
    )
    if kind in (None, "captions", "strided") and min(n, m) > 2:
        images, texts = (x.numpy() for x in known)
        seen = (
            oracle.std_diversity(scores.numpy(), images, texts),
            oracle.std_diversity(scores.numpy().T, texts, images),
        )
        lowest = min(x.min() for x in seen)
        np.testing.assert_allclose(float(found["diversity_min"]), lowest, rtol=1e-9)


def test_losses_keep_the_figures_of_the_last_call_if_asked():
    v, w = torch.randn(5, 4), torch.randn(5, 4)
    quiet, loud = (
        itrloss.DiversityContrastiveLoss(),
        itrloss.DiversityContrastiveLoss(telemetry=True),
    )
    assert loud.telemetry == {}
    assert torch.equal(loud(v, w), quiet(v, w)) and quiet.telemetry == {}
    torch.testing.assert_close(loud.telemetry, describe(itrloss.Similarity(v, w)))
    triplet = TripletLoss(0.3, telemetry=True)
    triplet(v, w)
    torch.testing.assert_close(triplet.telemetry, describe(itrloss.Similarity(v, w), 0.3))
    for twin in (copy.deepcopy(triplet), pickle.loads(pickle.dumps(triplet))):
        torch.testing.assert_close(twin.telemetry, triplet.telemetry)


def test_telemetry_of_a_memory():
    memory = itrloss.CoupledMemory(8, 4)
    v, w = torch.randn(3, 4), torch.randn(3, 4)
    loss = itrloss.MemoryDiversityContrastiveLoss(telemetry=True)
    ids = torch.arange(3)
    loss(v, w, v, w, memory, ids, ids)
    assert loss.telemetry["memory_entries"] == 0 and loss.telemetry["memory_hardest"] == 0
    keys = torch.randn(2, 6, 4)
    memory.enqueue(*keys, torch.arange(6) + 2)
    loss(v, w, v, w, memory, ids, ids)
    assert loss.telemetry["memory_entries"] == 6
    torch.testing.assert_close(loss.telemetry["memory_age"], torch.tensor(1.5))
    best = []
    for x, bank in ((v, keys[1]), (w, keys[0])):
        s = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(bank, dim=1).T
        best += [s[i, [j for j in range(6) if j + 2 != i]].max() for i in range(3)]
    torch.testing.assert_close(loss.telemetry["memory_hardest"], torch.stack(best).mean())
    torch.testing.assert_close(loss.telemetry["gap"], describe(itrloss.Similarity(v, w))["gap"])


def test_the_age_of_a_memory_counts_the_batches_of_all_processes(monkeypatch):
    memory = itrloss.CoupledMemory(12, 4)
    memory.enqueue(*torch.randn(2, 12, 4), torch.arange(12))
    v, w = torch.randn(2, 3, 4)
    sims = MemorySimilarity.of(v, w, v, w, memory, torch.arange(3), torch.arange(3))
    assert describe_memory(sims)["memory_age"] == 2.5  # 1, 2, 3 and 4 batches ago
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _=None: 2)
    assert describe_memory(sims)["memory_age"] == 1.5  # 1 and 2 batches ago, of six pairs each


def test_telemetry_of_sets_is_that_of_the_best_head():
    sets, texts, ids = torch.randn(4, 3, 5), torch.randn(8, 5), torch.arange(4).repeat_interleave(2)
    quiet, loss = itrloss.VarianceAwareLoss(), itrloss.VarianceAwareLoss(telemetry=True)
    assert torch.equal(
        loss(sets, texts, torch.arange(4), ids), quiet(sets, texts, torch.arange(4), ids)
    )
    assert quiet.telemetry == {}
    best = itrloss.functional.set_similarity(sets, texts)
    wanted = describe(itrloss.Similarity.from_scores(best, torch.arange(4), ids), 0.2)
    torch.testing.assert_close(loss.telemetry, wanted)


def run(loss, v, w, calls, *ids):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            loss(v, w, *ids)
    # the warning points to the user's code, not to ours or torch's
    assert all(c.filename == __file__ for c in caught)
    return [str(c.message) for c in caught]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "ids", [(), (torch.arange(4), torch.arange(4).repeat_interleave(2))], ids=["pairs", "captions"]
)
def test_collapse_is_told_once(reduction, ids):
    v = torch.ones(4, 6) + 1e-4 * torch.randn(4, 6)
    w = v.repeat_interleave(2, 0) if ids else v
    loss = TripletLoss(reduction=reduction)
    assert run(loss, v, w, 99, *ids) == []
    told = run(loss, v, w, 102, *ids)
    assert len(told) == 1 and "0.4 per pair" in told[0] and 'mining="all"' in told[0]
    soft = TripletLoss(temperature=0.1, reduction=reduction)  # its value is another one
    assert run(soft, v, w, 201, *ids) == []


def test_the_warning_names_the_line_that_calls_the_loss():
    v = torch.ones(4, 6) + 1e-4 * torch.randn(4, 6)
    loss = TripletLoss()
    with pytest.warns(UserWarning, match="seem to be alike") as told:
        for _ in range(101):
            loss(v, v)
    assert told[0].filename == __file__


def test_values_are_looked_at_every_fiftieth_call(monkeypatch):
    """Each check synchronises with an accelerator."""
    looks, loss = [], TripletLoss()
    monkeypatch.setattr(loss, "_check_collapse", looks.append)
    run(loss, torch.randn(3, 4), torch.randn(3, 4), 149)
    assert len(looks) == 2


def test_training_that_is_not_on_the_plateau_is_left_in_peace():
    torch.manual_seed(0)
    v, flat = torch.randn(6, 6), torch.ones(6, 6)
    assert run(TripletLoss(), v, v, 101) == []
    assert run(TripletLoss(mining="all"), flat, flat, 101) == []
    assert run(TripletLoss().eval(), flat, flat, 101) == []
    loss = TripletLoss()
    for _ in range(3):  # never a hundred consecutive calls
        assert run(loss, flat, flat, 60) == [] and run(loss, v, v, 40) == []


def test_telemetry_may_be_switched_on_and_off_later():
    images, texts = sample(12, 8), sample(12, 8, seed=1)
    loss = itrloss.InfoNCELoss()
    loss(images, texts)
    assert loss.telemetry == {}
    loss.telemetry = True
    loss(images, texts)
    assert "positive" in loss.telemetry
    loss.telemetry = False
    loss(images, texts)
    assert loss.telemetry == {}
    with pytest.raises((TypeError, ValueError), match="telemetry"):
        loss.telemetry = "all"


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


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("name", OF_ONE_PAIR)
def test_telemetry_of_one_pair_leaves_the_loss_finite(name):
    images, texts = sample(1, 8).requires_grad_(), sample(1, 8, seed=1).requires_grad_()
    value = OF_ONE_PAIR[name](images, texts)
    gradients = torch.autograd.grad(value, (images, texts))
    assert all(x.isfinite().all() for x in (value, *gradients))
