"""What a program sets for itself changes no result: autocast, default types and devices, precision
of products, deterministic algorithms.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import sample
from support.versions import default_device
from torch import Tensor, nn

import itrloss.testing
from itrloss import Similarity, compat, functional, metrics, rerank

N, D = 12, 8
IMAGES = sample(N, D)
TEXTS = sample(N, D, seed=1)
UNIT_IMAGES = nn.functional.normalize(IMAGES)
UNIT_TEXTS = nn.functional.normalize(TEXTS)
SCORES = IMAGES @ TEXTS.T
SIM = Similarity(IMAGES, TEXTS)
SETS = sample(N, 3, D, seed=5)
UNIT_SETS = nn.functional.normalize(SETS, dim=2)
REGIONS = sample(4, 6, 5, D, seed=6)  # four batches of six images with five regions
MASK = torch.ones(6, 5)
NUMBERS = list(range(N))
WORDS = [f"{i}.jpg" for i in NUMBERS]
PVSE = Namespace(
    margin=2.0, max_violation=False, num_embeds=3, mmd_weight=0.1, div_weight=0.1, order=False
)

# ---------------------------------------------------------------- types, precision and algorithms


@pytest.fixture(params=["autocast", "bfloat16", "float16", "float64", "deterministic", "medium"])
def surroundings(request) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    name = request.param
    if name == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif name == "medium":
        torch.set_float32_matmul_precision("medium")
    elif name != "autocast":
        torch.set_default_dtype(getattr(torch, name))
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


def running_means() -> Tensor:
    gate = itrloss.DynamicGate(D, 3, momentum=0.01)
    gate.weight.copy_(IMAGES[:3])
    for regions in REGIONS[:2]:
        gate(regions)
    for regions in REGIONS[2:]:
        gate(regions, MASK)
    return gate.centre


def centroids() -> Tensor:
    means = itrloss.OnlineKMeans(4, D)
    means.update(IMAGES)
    means.update(TEXTS)
    return means.centroids


def telemetry() -> Tensor:
    figures = itrloss.describe(Similarity(IMAGES, TEXTS))
    return torch.stack([x.double() for x in figures.values()])


def mined() -> Tensor:
    return itrloss.mine_hard_negatives(IMAGES, TEXTS, NUMBERS, NUMBERS, 3).values


# `losses/test_programs.py` has the losses of the registry in another default dtype.
RESULTS: dict[str, Callable[[], Tensor]] = {
    "the best of sets": lambda: functional.set_similarity(SETS, SETS.flip(0), "max"),
    "the mean of sets": lambda: functional.set_similarity(SETS, SETS.flip(0), "mean"),
    "late interaction": lambda: functional.set_similarity(SETS, SETS.flip(0), "smooth_max_sum"),
    "running means": running_means,
    "k-means": centroids,
    "mining": mined,
    "telemetry": telemetry,
    "orthogonal heads": lambda: functional.dynamic_orthogonal_loss(SETS, slack=0.0),
    "PVSE's regularisers": lambda: compat.PVSELoss(PVSE)(UNIT_SETS, UNIT_SETS.flip(0), SETS, SETS)[
        0
    ],
    "order embeddings": lambda: compat.VSEPPLoss(0.2, "order")(IMAGES.abs(), TEXTS.abs()),
    "own negatives": lambda: itrloss.InfoNCELoss()(UNIT_IMAGES, UNIT_TEXTS, negatives=SETS),
    "Sinkhorn": lambda: rerank.Sinkhorn().rerank(Similarity(IMAGES, TEXTS)).i2t,
}
WANTED = {name: make().double() for name, make in RESULTS.items()}


@pytest.mark.parametrize("name", RESULTS)
def test_results_do_not_depend_on_surroundings(name, surroundings):
    found = RESULTS[name]().double()
    wanted = WANTED[name]
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


# ----------------------------------------------------------------------------------- default device

MEMORY = itrloss.CoupledMemory(20, D)
MEMORY.enqueue(IMAGES, TEXTS)
GATE = itrloss.DynamicGate(D, 3)
MEANS = itrloss.OnlineKMeans(4, D)
MEANS.update(IMAGES)
ENCODERS = nn.Linear(D, D), nn.Linear(D, D)
MOMENTUM = itrloss.MomentumEncoder(ENCODERS[0])
CLASSIFIER = itrloss.PrototypeClassificationLoss(D, 4)
CODER = itrloss.CODERObjective(D, 3)
UTO = itrloss.UnifiedTrainingObjective()
BANKS = sample(9, D, seed=31), sample(9, D, seed=32)
GRADES = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
JUDGED = metrics.Judgements(torch.arange(6), torch.arange(6), GRADES)
RIGHT = torch.eye(N)
FEW = SCORES[:3, :8]  # two or three texts an image


def metric_of_batches() -> Any:
    metric = metrics.RetrievalMetrics()
    metric.update(IMAGES, TEXTS, NUMBERS, NUMBERS)
    return metric.compute()


def kmeans() -> None:
    MEANS.update(IMAGES)
    MEANS.fit(IMAGES)
    MEANS.predict(TEXTS)


CALLS: dict[str, Callable[[], Any]] = {
    "ids in a list": lambda: itrloss.InfoNCELoss()(IMAGES, TEXTS, NUMBERS, NUMBERS),
    "ids that are words": lambda: itrloss.InfoNCELoss()(IMAGES, TEXTS, WORDS, WORDS),
    "hinges of listed pairs": lambda: itrloss.TripletLoss(mining="all")(
        IMAGES, TEXTS, NUMBERS, NUMBERS
    ),
    "own negatives": lambda: itrloss.InfoNCELoss(image_image=True)(
        IMAGES, TEXTS, NUMBERS, NUMBERS, negatives=SETS, negative_ids=[[1, 2, 3]] * N
    ),
    "checks of a loss": lambda: itrloss.testing.check_loss(
        itrloss.InfoNCELoss(), only=["gradcheck", "order_of_pairs", "float32_error"]
    ),
    "a memory's first dimensions": lambda: MEMORY.first_dimensions(4),
    "enqueue": lambda: MEMORY.enqueue(IMAGES, TEXTS),
    "momentum": lambda: MOMENTUM.update(ENCODERS[0]),
    "k-means": kmeans,
    "a gate": lambda: GATE(REGIONS[0], MASK),
    "prototypes": lambda: CLASSIFIER(IMAGES, TEXTS, [0] * N),
    "CODER": lambda: CODER(IMAGES, TEXTS, IMAGES, TEXTS, MEMORY, IMAGES, TEXTS),
    "gradient cache": lambda: itrloss.grad_cache_step(
        itrloss.InfoNCELoss(), ENCODERS, [IMAGES, TEXTS], 5
    ),
    "mining": lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS.numpy(), NUMBERS, NUMBERS, 3),
    "USER's queues": lambda: compat.adapt(UTO, "user").moco_forward(
        IMAGES, TEXTS, TEXTS, IMAGES, BANKS[0].T, BANKS[1].T
    ),
    "HAL without a bank": lambda: compat.adapt(UTO, "hal")(IMAGES, TEXTS),
    "HAL's bank": lambda: compat.adapt(UTO, "hal")(IMAGES, TEXTS, *BANKS, range(20, 29), NUMBERS),
    "PVSE": lambda: compat.PVSELoss(PVSE)(SETS, SETS, SETS, SETS),
    "metrics without ids": lambda: metrics.retrieval_metrics(SCORES[:4, :8]),
    "metrics of an array": lambda: metrics.retrieval_metrics(SCORES.numpy()),
    "folds": lambda: metrics.retrieval_metrics(SCORES[:4, :8], folds=2),
    "batches": metric_of_batches,
    "judgements": lambda: metrics.retrieval_metrics(SIM, relevant=JUDGED),
    "judgements from a grade": lambda: metrics.Judgements(
        [0, 1], [1, 0], np.array([1.0, 2.0])
    ).at_least(1.5),
    "candidates": lambda: metrics.retrieval_metrics(
        SCORES, NUMBERS, NUMBERS, candidates=[NUMBERS] * N
    ),
    "a matrix of right pairs": lambda: metrics.retrieval_metrics(SIM, relevant=RIGHT),
    "intervals": lambda: metrics.confidence_intervals(metrics.retrieval_results(SCORES.numpy())),
    "re-ranking of a ragged matrix": lambda: rerank.CSLS(2).topk(FEW, 2),
    "re-ranking with banks": lambda: rerank.DualBankNorm().fit(*BANKS).rerank(SIM),
    "fast": lambda: rerank.FastReranker().topk(SIM, 2),
    "calibration": lambda: rerank.FastReranker().calibrate(SIM, scales=(5, 20)),
    "calibration of scores": lambda: rerank.FastReranker().calibrate(SCORES, scales=[1, 5]),
}


@pytest.fixture
def other_default_device() -> Iterator[None]:
    """A default device on which nothing lies: each tensor that is made there is an error."""
    # after set_default_device(None), get_default_device of PyTorch 2.8 raises an error
    with default_device("meta"):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_tensors_are_made_where_the_input_is(name, other_default_device):
    CALLS[name]()
