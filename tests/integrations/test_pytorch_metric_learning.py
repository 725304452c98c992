"""Losses where pytorch-metric-learning expects its own: with reducers, miners and its wrappers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.cases import embeddings
from support.losses_registry import select
from support.processes import WORLD, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import itrloss

pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import distances, losses, miners, reducers, regularizers, trainers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices

from itrloss.integrations.pytorch_metric_learning import ContrastiveLoss

SUPCON = partial(itrloss.SupConLoss, 0.1)
OF_PAIRS: dict[str, Any] = {"alpha": 2, "beta": 50, "base": 0.5}
# Their losses, and ours.
SAME: dict[str, Any] = {
    "supcon": (partial(losses.SupConLoss, 0.1), SUPCON),
    "multi-similarity": (
        partial(losses.MultiSimilarityLoss, **OF_PAIRS),
        partial(itrloss.MultiSimilarityLoss, **OF_PAIRS),
    ),
    "circle": (losses.CircleLoss, itrloss.CircleLoss),
}
MINERS = {
    "none": None,
    "pairs": miners.MultiSimilarityMiner(),
    "triplets": miners.TripletMarginMiner(margin=0.4),
    "hard": miners.BatchHardMiner(),
}
OTHERS = select(
    "dcl",
    "dcl entropy",
    "hal",
    "infonce",
    "filtered",
    "sigmoid",
    "triplet",
    "triplet all",
    "mil-nce",
    "rince of the defaults",
    "complementary",
)
LABELS, REF_LABELS = torch.arange(12) % 5, torch.arange(15) % 6


def ours(loss: Any, **options: Any) -> ContrastiveLoss:
    return ContrastiveLoss(loss(reduction="none"), **options)


def outcome(loss: Any, x: Tensor, *args: Any) -> list[Tensor]:
    value = loss(x, *args)
    return [value.detach(), *torch.autograd.grad(value, x)]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.fixture(params=[False, True])
def ref(request) -> tuple[Tensor | None, ...]:
    """References and their labels, if there are any."""
    return (embeddings(12, 15)[1].requires_grad_(), REF_LABELS) if request.param else (None, None)


@pytest.fixture(params=MINERS)
def given(request, ref) -> tuple[Any, ...]:
    """Embeddings, their labels, the mined pairs, and references."""
    x = embeddings(12, 15)[0].requires_grad_()
    miner = MINERS[request.param]
    pairs = None if miner is None else miner(x, LABELS, *ref)
    return x, LABELS, pairs, *ref


@pytest.mark.parametrize("name", SAME)
def test_values_and_gradients_are_theirs(name, given):
    """Of the anchors that have a positive and a negative: of others, some of theirs have a part."""
    theirs, loss = SAME[name]
    nothing = {"reducer": reducers.DoNothingReducer()}
    found = ours(loss, **nothing)(*given)["loss"]
    values = theirs(**nothing)(*given)["loss"]["losses"].flatten()
    wanted = values[found["indices"]]
    assert len(wanted) > 8
    weights = torch.arange(1, len(wanted) + 1, dtype=torch.float64)
    pair = found["losses"], wanted
    assert_same(*([z, *torch.autograd.grad(z @ weights, given[0])] for z in pair))
    if len(wanted) == 12:
        assert_same(*(outcome(f, *given) for f in (ours(loss), theirs())))


@pytest.mark.parametrize("name", SAME)
def test_their_memory_has_the_values_and_gradients_of_theirs(name):
    theirs, loss = SAME[name]
    memories = [
        losses.CrossBatchMemory(f, 6, 20, miner=miners.BatchHardMiner())
        for f in (ours(loss), theirs())
    ]
    for seed in range(4):  # the memory runs over
        torch.manual_seed(seed)
        x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(4, (8,))
        assert_same(*(outcome(f, x, labels) for f in memories))


def test_all_triplets_are_those_of_their_triplet_margin_loss(given):
    total = {"reducer": reducers.SumReducer()}
    triplets = partial(itrloss.TripletLoss, 0.2, mining="all")
    found = outcome(ours(triplets, **total), *given)
    cosines = {"distance": distances.CosineSimilarity()}
    theirs = losses.TripletMarginLoss(0.2, **cosines, **total)
    assert_same(found, outcome(theirs, *given))
    squares = losses.TripletMarginLoss(0.4, distance=distances.LpDistance(power=2), **total)
    assert_same([2 * z for z in found], outcome(squares, *given))
    each = losses.TripletMarginLoss(0.2, **cosines, reducer=reducers.DoNothingReducer())
    violating = (each(*given)["loss"]["losses"] > 0).sum()
    mean = losses.TripletMarginLoss(0.2, **cosines)
    assert_same([z / violating for z in found], outcome(mean, *given))


def train(loss: Any, rank: int = 0, world: int = 1) -> list[Tensor]:
    """The losses of 32 steps of their trainer and the model; in one process, of mined pairs."""
    torch.manual_seed(0)
    model, draw = nn.Linear(20, 8).double(), torch.Generator().manual_seed(1)
    labels = torch.arange(64) % 6
    rows = torch.randn(6, 20, generator=draw).double()[labels] + torch.randn(64, 20, generator=draw)
    own = [*zip(rows, labels.tolist(), strict=True)][rank::world]
    values: list[Tensor] = []
    trainer = trainers.MetricLossOnly(
        {"trunk": DistributedDataParallel(model) if world > 1 else model},
        {"trunk_optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)},
        16 // world,
        {"metric_loss": loss},
        own,
        {"tuple_miner": miners.MultiSimilarityMiner(0.9)} if world == 1 else None,
        sampler=torch.utils.data.SequentialSampler(own),
        dataloader_num_workers=0,
        data_device="cpu",
        end_of_iteration_hook=lambda trainer: values.append(trainer.losses["metric_loss"].detach()),
    )
    trainer.train(num_epochs=8)
    return [torch.stack(values), model.weight.detach()]


def assert_falls(values: Tensor) -> None:
    assert len(values) == 32 and values[-4:].mean() < 0.9 * values[:4].mean()


def test_their_trainer_has_the_curve_of_theirs():
    found = train(ours(SUPCON))
    assert_same(found, train(losses.SupConLoss(0.1)))
    for values, _ in (found, train(ours(itrloss.DiversityContrastiveLoss))):
        assert_falls(values)


def in_a_process(rank: int) -> list[list[Tensor]]:
    every = ours(SUPCON), losses.SupConLoss(0.1)
    return [train(DistributedLossWrapper(loss), rank, WORLD) for loss in every]


@pytest.mark.slow
def test_their_wrapper_has_the_curve_of_theirs_in_two_processes(tmp_path):
    for found, theirs in run(in_a_process, tmp_path):
        assert_same(found, theirs)
        assert_falls(found[0])


@pytest.mark.parametrize("name", OTHERS)
def test_lists_of_all_pairs_are_pairs_by_labels(name):
    x, y = (z.requires_grad_() for z in embeddings(12, 15))
    own = ours(OTHERS[name].make)
    pairs = get_all_pairs_indices(LABELS, REF_LABELS)
    by_labels = outcome(own, x, LABELS, None, y, REF_LABELS)
    assert_same(outcome(own, x, LABELS, pairs, y, REF_LABELS), by_labels)
    # The candidates that are in no pair might as well not be there.
    some = y.detach()[:9]
    pairs = get_all_pairs_indices(LABELS, REF_LABELS[:9])
    if name != "sigmoid":  # which divides by their number
        wanted = outcome(own, x, LABELS, None, some, REF_LABELS[:9])
        assert_same(outcome(own, x, LABELS, pairs, y, REF_LABELS), wanted)
    assert by_labels[0].isfinite() and by_labels[1].abs().amax() > 1e-3


def test_a_pair_of_views_is_infonce():
    """NTXentLoss averages over pairs, of which each anchor has one here."""
    v, w = (z.requires_grad_() for z in embeddings(9, 9))
    pair = losses.SelfSupervisedLoss(ours(itrloss.InfoNCELoss), symmetric=False)
    theirs = losses.SelfSupervisedLoss(losses.NTXentLoss(0.07), symmetric=False)
    assert_same(*(outcome(f, v, w) for f in (pair, theirs)))


def test_reducers_get_the_values_of_anchors():
    x, labels = embeddings(12, 1)[0].requires_grad_(), LABELS.clone()
    labels[-1] = 99  # without a positive, it does not count
    weights = torch.arange(100, dtype=torch.float64)
    loss = ours(itrloss.SupConLoss, reducer=reducers.DoNothingReducer())(x, labels)["loss"]
    values, indices = loss["losses"], loss["indices"]
    assert loss["reduction_type"] == "element" and indices.tolist() == list(range(11))
    for reducer, wanted in (
        (None, values.mean()),
        (reducers.SumReducer(), values.sum()),
        (reducers.PerAnchorReducer(), values.mean()),
        (reducers.ThresholdReducer(low=2.0), values[values > 2].mean()),
        (reducers.ClassWeightedReducer(weights), (values * weights[labels[:-1]]).mean()),
    ):
        torch.testing.assert_close(ours(itrloss.SupConLoss, reducer=reducer)(x, labels), wanted)
    regularized = ours(itrloss.SupConLoss, embedding_regularizer=regularizers.LpRegularizer())(
        x, labels
    )
    assert regularized.item() == pytest.approx((values.mean() + x.norm(dim=1).mean()).item())


def test_options_of_the_loss_count():
    x, y = embeddings(12, 15)
    of_rows = itrloss.InfoNCELoss(1.0, normalize=False, directions="image-text")
    wanted = of_rows(x, y, LABELS, REF_LABELS)
    of_rows.reduction = "none"
    loss = ContrastiveLoss(of_rows)
    given = {"ref_emb": y, "ref_labels": REF_LABELS}
    pairs = get_all_pairs_indices(LABELS, REF_LABELS)
    torch.testing.assert_close(loss(x, LABELS, **given), wanted)
    torch.testing.assert_close(loss(x, LABELS, pairs, **given), wanted)


def test_a_batch_without_pairs_has_the_loss_0():
    x = embeddings(4, 1)[0].requires_grad_()
    for labels in (torch.arange(4), torch.zeros(4, dtype=torch.int64)):
        value = ours(itrloss.InfoNCELoss)(x, labels)
        assert value == 0 and not torch.autograd.grad(value, x)[0].any()


@pytest.mark.parametrize(
    ("loss", "options", "error"),
    [
        (losses.SupConLoss(), {}, "loss: expected one of similarities alone, such as itrloss"),
        (itrloss.DistillationLoss(reduction="none"), {}, "loss: expected one of similarities"),
        (itrloss.SupConLoss(), {}, "loss: expected reduction='none' without gather"),
        (itrloss.SupConLoss(reduction="none", gather=True), {}, "with gather=True"),
        (
            itrloss.SupConLoss(reduction="none"),
            {"distance": distances.LpDistance()},
            "distance: expected none",
        ),
        (
            itrloss.SupConLoss(reduction="none", directions="text-image"),
            {},
            "directions: expected 'both' or 'image-text'",
        ),
        (itrloss.SupConLoss(reduction="none"), {}, "labels, ref_labels: expected integers for all"),
    ],
)
def test_other_losses_options_and_calls_are_refused(loss, options, error):
    x = embeddings(4, 1)[0]
    with pytest.raises((TypeError, ValueError), match=error):
        ContrastiveLoss(loss, **options)(x, None, ref_emb=x.clone())
