"""SupCon, MIL-NCE, multi-similarity and circle loss at their extremes, and how they relate.

`test_random_cases` has their values next to loops, `test_pytorch_metric_learning` those of others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.answers import assert_finite
from support.cases import embeddings, of_engines, sample, upstream
from support.draws import Batch
from support.losses_registry import REGISTRY
from support.oracle_supervised import mil_nce
from support.versions import FlopCounterMode
from torch import Tensor

import itrloss
from itrloss import Similarity
from itrloss.engine.relation import Relation


def with_gradients(call: Any, v: Tensor, w: Tensor, grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The values of rows and columns, and the gradients of their weighted sum."""
    x = v.clone().requires_grad_()
    y = w.clone().requires_grad_()
    rows, cols = call(x, y)
    total = (rows * grads[0].to(rows.dtype)).sum() + (cols * grads[1].to(rows.dtype)).sum()
    return [rows, cols, *torch.autograd.grad(total, (x, y))]


# ----------------------------------------------------------------------------------------- extremes

SHARP: dict[str, tuple[Any, dict[str, Any]]] = {
    "supcon": (itrloss.SupConLoss, {"temperature": 1 / 256}),
    "supcon inside": (itrloss.SupConLoss, {"temperature": 1 / 256, "inside": True}),
    "mil-nce": (itrloss.MILNCELoss, {"temperature": 1 / 256}),
    "multi-similarity": (itrloss.MultiSimilarityLoss, {"alpha": 256.0, "beta": 256.0}),
    "multi-similarity mined": (
        itrloss.MultiSimilarityLoss,
        {"alpha": 256.0, "beta": 256.0, "epsilon": 0.1},
    ),
    "circle": (itrloss.CircleLoss, {"scale": 256.0}),
    "circle of a wide margin": (itrloss.CircleLoss, {"scale": 256.0, "margin": 0.73}),
    "circle without a margin": (itrloss.CircleLoss, {"scale": 256.0, "margin": 0.0}),
}


def arranged(kind: str) -> tuple[Tensor, Tensor]:
    """Embeddings (12, 6) of images and texts, which are the same, opposite, or all alike but for a
    little.
    """
    v, w = (F.normalize(x, dim=1) for x in embeddings(12, 12))
    near = v + 0.01 * w
    return {
        "random": (v, w),
        "matched": (v, near),
        "opposite": (v, -near),
        "alike": (near[:1] + 1e-3 * v, near),
    }[kind]


@of_engines
@pytest.mark.parametrize("kind", ["random", "matched", "opposite", "alike"])
@pytest.mark.parametrize("name", SHARP)
def test_a_scale_of_256_in_float32_has_the_values_and_gradients_of_float64(
    name, kind, engine, small_tiles
):
    module, options = SHARP[name]
    v, w = arranged(kind)
    v, w = v.float(), w.float()  # the same embeddings for both
    ids = torch.arange(12) // 2
    criterion = module(**options, reduction="none", engine=engine)

    def call(x, y):
        return criterion(x, y, ids, ids)

    exact = with_gradients(call, v.double(), w.double(), upstream(12, 12))
    found = with_gradients(call, v, w, upstream(12, 12))
    for a, b in zip(found, exact, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().amax() <= 1e-4 * b.abs().amax().clamp_min(1)


@of_engines
def test_the_worst_pairs_stay_finite(engine):
    """Positives that score -1 and negatives that score 1, for which exponents of the circle loss
    add up to 1200.
    """
    v = torch.eye(4).requires_grad_()
    w = -torch.eye(4)
    w[[0, 1, 2]] += 2 * torch.eye(4)[[1, 2, 3]]
    w = w.requires_grad_()
    for module, options in SHARP.values():
        loss = module(**options, engine=engine)(v, w)
        assert_finite(loss, (v, w))


def test_values_of_mil_nce_near_0_keep_their_digits():
    """The logarithm of a probability of nearly 1."""
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.0, 0.1, 0.7]])
    ids = {"image_ids": torch.tensor([0, 1]), "text_ids": torch.tensor([0, 0, 1])}
    criterion = itrloss.MILNCELoss(0.02, reduction="none")
    exact = criterion(scores=scores.double(), **ids)[0]
    assert 0 < exact.amax() < 1e-12
    torch.testing.assert_close(
        criterion(scores=scores, **ids)[0].double(), exact, rtol=1e-4, atol=0
    )


# ---------------------------------------------------------------------------------------- relations


def test_pairs_are_mined_by_the_lowest_positive_itself_where_several_score_the_same():
    scores = torch.tensor([[0.5] * 5 + [0.39], [0.0] * 5 + [0.9]])
    ids = {"image_ids": torch.tensor([0, 1]), "text_ids": torch.tensor([0] * 5 + [1])}
    for epsilon, counts in ((0.1, False), (0.12, True)):
        rows, _ = itrloss.MultiSimilarityLoss(epsilon=epsilon, reduction="none")(
            scores=scores, **ids
        )
        assert (rows[0] > 0) == counts


@pytest.mark.parametrize(
    ("name", "kept", "recomputed"),
    [
        ("supcon", 6, 8),
        ("supcon inside", 6, 8),
        ("mil-nce", 6, 8),
        ("sdm", 6, 16),
        ("multi-similarity", 6, 8),
        ("multi-similarity mined", 6, 18),
        ("circle", 6, 10),
    ],
)
def test_work_is_that_of_the_page(name, kept, recomputed):
    v, w = (torch.randn(600, 32, requires_grad=True) for _ in range(2))
    ids = torch.arange(600) // 2
    for budget, work in ((0, recomputed), (10**9, kept)):
        with FlopCounterMode(display=False) as counter:
            sim = Similarity(v, w, ids, ids, engine="tiled", memory_budget=budget)
            REGISTRY[name].make()(sim).backward()
        assert counter.get_total_flops() == work * 600 * 600 * 32


@pytest.mark.parametrize("listable", [True, False])
def test_joint_denominators_of_a_matrix_are_exact_for_scores_of_any_size(listable, monkeypatch):
    monkeypatch.setattr(Relation, "listable", listable)
    scores = 2000 * sample(6, 6, dtype=torch.float64)
    batch = Batch("matches", 6, 6, matches=torch.eye(6) + torch.eye(6).roll(1, 1))
    loss = itrloss.MILNCELoss(1.0, normalize=False, joint="once", reduction="none")
    found = loss(scores=scores, matches=batch.matches > 0)
    wanted = mil_nce(scores, *batch.items(), 1.0, "once", "none")
    torch.testing.assert_close(found, torch.from_numpy(wanted))
