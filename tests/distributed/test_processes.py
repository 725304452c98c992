"""Processes that are lost, that disagree, that wrap their models, and that are stopped and
resumed.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import cases
from support.cases import pairwise
from support.losses_registry import Entry, select
from support.processes import run, survivors
from support.versions import DTensor, fully_shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

import itrloss
import itrloss.compat
from itrloss.distributed import shards

D, WORLD, ODD = 6, 3, 1  # ODD: the process that is lost, or that differs


def sample(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, trained: bool = True
) -> Tensor:
    return cases.sample(*shape, seed=seed, dtype=dtype).requires_grad_(trained)


def pairs(seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    return sample(4, D, seed=2 * seed, **options), sample(4, D, seed=2 * seed + 1, **options)


def same(found: Any, other: Any) -> bool:
    """Whether nested results are equal bit for bit."""
    leaves, others = tree_flatten(found)[0], tree_flatten(other)[0]
    return len(leaves) == len(others) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(leaves, others, strict=True)
    )


# --- a process is lost ----------------------------------------------------------------------------

TIMEOUT = 7.0  # seconds


def enqueued(v: Tensor, w: Tensor) -> Tensor:
    empty = memory()
    empty.enqueue(v, w)
    return empty.images


def clustered(v: Tensor, w: Tensor) -> Tensor:
    means = itrloss.OnlineKMeans(4, D)
    means.update(v)
    return means.centroids


def against_memory(v: Tensor, w: Tensor) -> Tensor:
    return mdcl(v, w, v.detach(), w.detach(), memory())


WORK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "batch": lambda v, w: itrloss.InfoNCELoss(learnable=True, gather=True)(v, w),
    "memory": against_memory,
    "enqueue": enqueued,
    "k-means": clustered,
}
# What is done, how a process is lost, and at which collective, begin or end of a forward pass.
FAULTS = [
    *((kind, "is killed", 3) for kind in WORK),
    *((kind, "is killed", 8) for kind in ("batch", "memory")),
    ("batch", "is stuck", 1),
    ("enqueue", "raises", 1),
]
COLLECTIVES = (
    *("all_gather_single", "all_gather_into_tensor", "all_gather_object"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"),
)


def lose(how: str) -> None:
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is stuck":
        time.sleep(TIMEOUT + 3)
        os._exit(1)
    raise LookupError("an image is missing")


def counted(collective: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        before()
        return collective(*args, **options)

    return call


def stepping(rank: int, kind: str, how: str, at: int) -> dict[str, Any]:
    """Two steps, in which one process is lost."""
    moments = itertools.count(1)

    def count() -> None:
        if next(moments) == at and rank == ODD:
            lose(how)

    for name in filter(partial(hasattr, dist), COLLECTIVES):
        setattr(dist, name, counted(getattr(dist, name), count))
    began, said, steps = time.monotonic(), "", []
    try:
        for _ in range(2):
            v, w = pairs(rank)
            count()
            value = WORK[kind](v, w)
            count()
            if value.requires_grad:
                value.backward()
            steps.append([x for x in (value.detach(), v.grad, w.grad) if x is not None])
    except RuntimeError as error:
        said = str(error)
    return {"steps": steps, "said": said, "seconds": time.monotonic() - began}


@pytest.mark.slow
def test_the_others_end_with_an_error_of_the_backend(tmp_path):
    cases = [*FAULTS, *((kind, "", 0) for kind in WORK)]
    every = survivors(stepping, tmp_path, cases, world=WORLD, timeout=TIMEOUT)
    found = dict(zip(cases, every, strict=True))
    for kind, how, at in FAULTS:
        survived = found[kind, how, at]
        about = kind, how, at, survived
        assert survived[ODD] is None, about
        for mine, healthy in zip(survived, found[kind, "", 0], strict=True):
            assert not healthy["said"], about
            if mine is not None:
                assert mine["said"] and mine["seconds"] < TIMEOUT + 6 * (how == "is stuck"), about
                # A process may be lost after it has sent its last part of a step: then the others
                # complete that one.
                assert mine["steps"] == [] or same(mine["steps"], healthy["steps"][:1]), about


def test_numbers_are_exchanged_where_the_embeddings_are(monkeypatch):
    """NCCL exchanges nothing between hosts, and the hinges of all negatives need the largest of
    some numbers.
    """
    devices: list[str] = []
    monkeypatch.setattr(
        shards, "largest", lambda x, group: devices.append(x.device.type) or torch.ones(1)
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    shared = shards.Processes(None, [(2, 2)] * 2)
    shared.ids = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert shared.largest(1) == 1 and devices == ["meta"]


# --- processes disagree ---------------------------------------------------------------------------


def frozen(parameter: str, loss: Any, odd: bool) -> Any:
    if odd:
        loss.get_parameter(parameter).requires_grad_(False)
    return loss


def memory(size: int = 9, dim: int = D) -> itrloss.CoupledMemory:
    return itrloss.CoupledMemory(size, dim)


def without_gradient(call: Callable[[], Any], odd: bool) -> Any:
    with torch.set_grad_enabled(not odd):
        return call()


def coder(loss: itrloss.CODERObjective) -> Any:
    return loss(*pairs(), *pairs(), memory(), *pairs())


def coder_with_prototypes(odd: bool) -> itrloss.CODERObjective:
    """An objective that has loaded prototypes in the odd process alone."""
    loaded = objective().eval()
    if odd:
        trained = objective(gather=False)
        trained.prototypes.fit(pairs()[0].detach())
        loaded.prototypes.load_state_dict(trained.prototypes.state_dict())
    return loaded


def with_value(name: str, value: float, loss: Any) -> Any:
    with torch.no_grad():
        loss.get_parameter(name).fill_(value)
    return loss


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    return make()


def fitted_means(odd: bool) -> itrloss.OnlineKMeans:
    means = itrloss.OnlineKMeans(3, D)
    if odd:
        means.fit(sample(6, D, trained=False))
    return means


def filled_memory(odd: bool) -> itrloss.CoupledMemory:
    filled = memory()
    if odd:
        filled.enqueue_alone(*pairs(trained=False))
    return filled


def metric_of_batches(*ids: Any, captions: int = 1, **options: Any) -> Any:
    metric = itrloss.metrics.RetrievalMetrics(**options)
    images, texts = pairs(trained=False)
    metric.update(images, texts.repeat(captions, 1), *ids)
    return metric.compute()


def metric_without_batches(odd: bool) -> Any:
    metric = itrloss.metrics.RetrievalMetrics()
    if not odd:
        metric.update(*pairs(trained=False))
    return metric.compute()


def under_autocast(odd: bool, call: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=odd):
        return call()


half = {False: torch.bfloat16, True: torch.float16}
floats = {False: torch.float32, True: torch.float64}
ids = torch.arange(4)
words = list("abcd")
labels = torch.stack([ids, ids + 100], 1)
pair = itrloss.InfoNCELoss
shared: Any = pair(gather=True)
filtered: Any = pair(gather=True, margin=0.1)
uto: Any = itrloss.UnifiedTrainingObjective(gather=True)
mdcl = itrloss.MemoryDiversityContrastiveLoss(gather=True)
classifier = partial(itrloss.PrototypeClassificationLoss, D, 4, gather=True)
objective = partial(itrloss.CODERObjective, D, 4, gather=True)


def together(*ids: Any, **options: Any) -> Tensor:
    return shared(*pairs(), *ids, **options)


def masked(x: Tensor) -> Any:
    array = x.detach().numpy()
    return np.ma.array(array, mask=array > 0)


def of_sets(dim: int = D, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    images, texts = sample(4, 2, dim, dtype=dtype), sample(4, 3, dim, dtype=dtype)
    return itrloss.functional.set_similarity(images, texts, gather=True, **options)


class WithOption(itrloss.PairLoss):
    """A loss of one's own with an option."""

    weight: float = 1.0

    def compute(self, sim: itrloss.Similarity) -> Any:
        return sim.both.reduce(self.weight * sim.both.logsumexp(), self.reduction)


# What a process calls, the odd one with True, and what the error says of the others and of it.
DIFFERENT: dict[str, tuple[Callable[[bool], Any], str, str]] = {
    "temperature": (lambda odd: pair(0.06 if odd else 0.05, gather=True)(*pairs()), "0.05", "0.06"),
    "option of one's own": (
        lambda odd: WithOption(2.0 if odd else 1.0, gather=True)(*pairs()),
        "'weight': 1.0",
        "'weight': 2.0",
    ),
    "class": (
        lambda odd: (itrloss.HubnessAwareLoss if odd else pair)(gather=True)(*pairs()),
        "InfoNCELoss",
        "HubnessAwareLoss",
    ),
    "another function": (
        lambda odd: memory().enqueue(*pairs()) if odd else together(),
        "InfoNCELoss",
        "memory (9, 6)",
    ),
    "half type": (
        lambda odd: shared(*pairs(dtype=half[odd])),
        "bfloat16 (B, 6)",
        " float16 (B, 6)",
    ),
    "as many numbers": (
        lambda odd: shared(*(sample(4 + 2 * odd, 6 - 2 * odd) for _ in range(2))),
        "(B, 6)",
        "(B, 4)",
    ),
    "ids": (
        lambda odd: together(*[ids] * 2 * odd),
        "ids [False, False]",
        "ids [True, True]",
    ),
    "image ids": (
        lambda odd: together(None if odd else ids, ids),
        "ids [True, True]",
        "ids [False, True]",
    ),
    "scores": (
        lambda odd: shared(scores=sample(4, 12)) if odd else together(),
        "float32 (B, 6), float32 (B, 6)",
        "scores float32",
    ),
    "gradient": (
        lambda odd: shared(pairs()[0], pairs(trained=not odd)[1]),
        "gradients [True, True]",
        "gradients [True, False]",
    ),
    "no gradient": (
        lambda odd: without_gradient(together, odd),
        "gradients [True, True]",
        "gradients [False, False]",
    ),
    "gradient of what is gathered": (
        lambda odd: itrloss.distributed.gather(sample(4, D, trained=not odd)),
        "gradient True",
        "gradient False",
    ),
    "gradient of texts that are gathered": (
        lambda odd: itrloss.functional.set_similarity(
            sample(4, 2, D), sample(4, 3, D, trained=not odd), gather=True
        ),
        "gradient True",
        "gradient False",
    ),
    "parameter": (
        lambda odd: frozen("log_scale", pair(learnable=True, gather=True), odd)(*pairs()),
        "trained ['log_scale']",
        "trained []",
    ),
    "telemetry": (
        lambda odd: pair(gather=True, telemetry=odd)(*pairs()),
        "telemetry False",
        "telemetry True",
    ),
    "size of the memory": (
        lambda odd: mdcl(*pairs(), *pairs(), memory(9 + odd)),
        "memory (9, 6)",
        "memory (10, 6)",
    ),
    "keys": (
        lambda odd: mdcl(*pairs(), *pairs(dtype=half[odd]), memory()),
        "keys float32 bfloat16 bfloat16",
        "keys float32 float16 float16",
    ),
    "ids next to a memory": (
        lambda odd: mdcl(*pairs(), *pairs(), memory(), *[ids] * 2 * odd),
        "ids [False, False]",
        "ids [True, True]",
    ),
    "enqueued keys": (
        lambda odd: memory().enqueue(*pairs(dtype=half[odd])),
        "bfloat16",
        "float16",
    ),
    "enqueued ids": (lambda odd: memory().enqueue(*pairs(), *[ids] * odd), "", "int64 (B)"),
    "clusters": (
        lambda odd: itrloss.OnlineKMeans(4 + odd, D).update(sample(4, D)),
        "clusters=4",
        "clusters=5",
    ),
    "gate": (
        lambda odd: itrloss.DynamicGate(D, 3, momentum=0.2 if odd else 0.1)(sample(4, 2, D)),
        "momentum=0.1",
        "momentum=0.2",
    ),
    "negatives": (
        lambda odd: together(negatives=sample(3, D) if odd else None),
        "without negatives",
        "negatives of 2 dimensions",
    ),
    "a guide": (
        lambda odd: filtered(*pairs(), guide=None if odd else pairs()),
        "guide True",
        "guide False",
    ),
    "mode": (
        lambda odd: itrloss.TripletLoss(gather=True).train(not odd)(*pairs()),
        "in training mode",
        "in evaluation mode",
    ),
    "mode of an objective": (
        lambda odd: coder(objective().train(not odd)),
        "training True",
        "training False",
    ),
    "weight in an objective": (
        lambda odd: coder(objective(batch_weight=2 + odd)),
        "batch_weight=2",
        "batch_weight=3",
    ),
    "inner option": (
        lambda odd: coder(objective(margin=0.4 if odd else 0.2)),
        "'margin': 0.2",
        "'margin': 0.4",
    ),
    "prefixes": (
        lambda odd: itrloss.Matryoshka(shared, (2, 4 + odd))(*pairs()),
        "dims=[2, 4]",
        "dims=[2, 5]",
    ),
    "heads": (
        lambda odd: itrloss.VarianceAwareLoss(gather=True)(sample(4, 3 + odd, D), sample(4, D)),
        "3 heads",
        "4 heads",
    ),
    "type of concepts": (
        lambda odd: classifier()(*pairs(dtype=floats[odd]), ids),
        "float32",
        "float64",
    ),
    "number of a temperature": (
        lambda odd: with_value("log_scale", 3 + odd, pair(learnable=True, gather=True))(*pairs()),
        "'log_scale 3'",
        "'log_scale 4'",
    ),
    "number of a shared temperature": (
        lambda odd: with_value("temperature", 0.5 + odd, sharing(gather=True))(*pairs()),
        "'temperature 0.5'",
        "'temperature 1.5'",
    ),
    "form of a temperature": (
        lambda odd: pair(**{("scale" if odd else "temperature"): shared_scale()}, gather=True)(
            *pairs()
        ),
        "parameters trained ['temperature']",
        "parameters trained ['scale']",
    ),
    "numbers of a classifier": (
        lambda odd: seeded(odd, classifier)(*pairs(), ids),
        "digests of parameters ['weight ",
        "digests of parameters ['weight ",
    ),
    "given gates": (
        lambda odd: itrloss.DynamicOrthogonalLoss(0.0, gather=True)(
            sample(4, 3, D), torch.ones(4, 3) if odd else None
        ),
        "given [True, False]",
        "given [True, True]",
    ),
    "projection of a gate": (
        lambda odd: seeded(odd, lambda: itrloss.DynamicGate(D, 3))(sample(4, 2, D)),
        "weight ",
        "weight ",
    ),
    "prototypes found before": (
        lambda odd: coder(coder_with_prototypes(odd)),
        "prototypes found before False",
        "prototypes found before True",
    ),
    "centroids": (
        lambda odd: fitted_means(odd).update(sample(4, D)),
        "centroids ",
        "centroids ",
    ),
    "entries of a memory": (
        lambda odd: filled_memory(odd).enqueue(*pairs(trained=False)),
        "entries so far 0",
        "entries so far 4",
    ),
    "ids of a metric": (
        lambda odd: metric_of_batches(*[ids] * 2 * odd),
        "1 texts an image without ids",
        "integers as ids",
    ),
    "texts an image of a metric": (
        lambda odd: metric_of_batches(captions=1 + odd),
        "1 texts an image",
        "2 texts an image",
    ),
    "option of a metric": (
        lambda odd: metric_of_batches(normalize=odd),
        "normalize False",
        "normalize True",
    ),
    "scale of open_clip": (
        lambda odd: itrloss.compat.ClipLoss(world_size=WORLD)(*pairs(), torch.tensor(10 + odd)),
        "logit_scale Tensor 10",
        "logit_scale Tensor 11",
    ),
    "bias of open_clip": (
        lambda odd: itrloss.compat.SigLipLoss(world_size=WORLD)(
            *pairs(), torch.tensor(10.0), torch.tensor(-10.0) if odd else None
        ),
        "logit_bias NoneType None",
        "logit_bias Tensor -10",
    ),
    "words as ids": (
        lambda odd: together(*[words if odd else ids] * 2),
        "of strings [False, False, False, False]",
        "of strings [True, True, False, False]",
    ),
    "words as labels": (
        lambda odd: pair(gather=True)(*pairs(), labels=words if odd else ids),
        "ids of strings False",
        "ids of strings True",
    ),
    "autocast": (
        lambda odd: under_autocast(odd, together),
        "autocast None",
        "autocast torch.bfloat16",
    ),
    "gradient of a bias": (
        lambda odd: itrloss.Similarity.sharded(*pairs(), bias=(None, sample(4, trained=not odd))),
        "biases [None, 'gradient True",
        "biases [None, 'gradient False",
    ),
    "gradient of a variance": (
        lambda odd: itrloss.PCMEPlusPlusLoss(gather=True, learnable=False)(
            *(x.detach() for x in (*pairs(), *pairs())[:3]), sample(4, D, trained=not odd)
        ),
        "biases ['gradient False', 'gradient True",
        "biases ['gradient False', 'gradient False",
    ),
    "enqueued words": (
        lambda odd: memory().enqueue(*pairs(), words if odd else ids),
        "ids of strings False",
        "ids of strings True",
    ),
    "words of a metric": (
        lambda odd: metric_of_batches(*[words if odd else ids] * 2),
        "integers as ids",
        "strings as ids",
    ),
    "groups": (
        lambda odd: together(image_groups=None if odd else ids),
        "groups True",
        "groups False",
    ),
    "words as groups": (
        lambda odd: together(image_groups=words if odd else ids),
        "of strings",
        "of strings",
    ),
    "number of labels": (
        lambda odd: together(*[torch.arange(8 + 4 * odd).view(4, -1)] * 2),
        "numbers of labels",
        "numbers of labels",
    ),
    "type of matches": (
        lambda odd: together(matches=torch.ones(4, 12, dtype=floats[odd])),
        "matches torch.float32",
        "matches torch.float64",
    ),
    "rule of groups": (
        lambda odd: itrloss.Similarity.sharded(
            *pairs(), related=itrloss.Related((ids, ids), "other" if odd else "same")
        ),
        "rule same",
        "rule other",
    ),
    "weights of prefixes": (
        lambda odd: itrloss.Matryoshka(shared, (2, 4), (1.0, 1.0 + odd))(*pairs()),
        "weights=[1.0, 1.0]",
        "weights=[1.0, 2.0]",
    ),
    "aggregation of sets": (
        lambda odd: of_sets(aggregation="mean" if odd else "max"),
        "aggregation 'max'",
        "aggregation 'mean'",
    ),
    "dimension of sets": (lambda odd: of_sets(D + odd), "dimension 6", "dimension 7"),
    "type of sets": (
        lambda odd: of_sets(dtype=floats[odd]),
        "torch.float32",
        "torch.float64",
    ),
}
# What the odd process refuses, and how its error begins.
REFUSED: dict[str, tuple[Callable[[bool], Any], str]] = {
    "vector": (
        lambda odd: shared(sample(4) if odd else sample(4, D), sample(4, D)),
        "ValueError: images:",
    ),
    "more texts": (
        lambda odd: shared(sample(4, D), sample(4 + odd, D)),
        "ValueError: image_ids, text_ids:",
    ),
    "ids of few, of prototypes alone": (
        lambda odd: itrloss.CODERObjective(
            D, 4, batch_weight=0, memory_weight=0, concept_weight=0, gather=True
        )(*pairs(), *pairs(), memory(), *pairs(), ids, ids[: 4 - odd]),
        "ValueError: text_ids:",
    ),
    "ids of few": (
        lambda odd: together(ids, ids[: 4 - odd]),
        "ValueError: text_ids:",
    ),
    "guide": (
        lambda odd: filtered(*pairs(), guide=sample(4) if odd else pairs()),
        "ValueError: guide: expected shape (N, M)",
    ),
    "rows of the guide": (
        lambda odd: filtered(*pairs(), guide=(sample(4, D), sample(4 + odd, D))),
        "ValueError: guide[1]: expected as many rows as there are texts, 4, got shape (5,",
    ),
    "teacher": (
        lambda odd: itrloss.DistillationLoss(gather=True)(*pairs(), "odd" if odd else pairs()),
        "TypeError: teacher: expected (N, M) scores",
    ),
    "negatives of each": (
        lambda odd: together(negatives=sample(4 + odd, 2, D)),
        "ValueError: negatives: expected shape (K, D) or (4, K,",
    ),
    "ids of negatives": (
        lambda odd: shared(*pairs(), negatives=sample(3, D), negative_ids=torch.arange(3 + odd)),
        "ValueError: negative_ids: expected shape (3,), got (4,)",
    ),
    "words as ids of negatives": (
        lambda odd: shared(
            *pairs(), negatives=sample(3, D), negative_ids=words[:3] if odd else [0, 1, 2]
        ),
        "TypeError: negative_ids: expected integers",
    ),
    "negatives of the guide": (
        lambda odd: filtered(
            *pairs(), negatives=sample(4, 2, D), guide=(*pairs(), sample(4, 2 + odd, D))
        ),
        "ValueError: guide[2]: expected shape (4, 2, 6), as of negatives, got (4, 3, 6)",
    ),
    "nan in the guide": (
        lambda odd: itrloss.InfoNCELoss(margin=0.1, check_finite=True, gather=True)(
            *pairs(), guide=[x / (1 - odd) for x in pairs()]
        ),
        "ValueError: guide[0]: expected finite values",
    ),
    "no texts": (
        lambda odd: shared(sample(4, D), None if odd else sample(4, D)),
        "TypeError: texts: expected embeddings",
    ),
    "nan": (
        lambda odd: pair(check_finite=True, gather=True)(*(x / (1 - odd) for x in pairs())),
        "ValueError: images: expected finite values",
    ),
    "no memory": (
        lambda odd: mdcl(*pairs(), *pairs(), None if odd else memory()),
        "TypeError: memory:",
    ),
    "shape of keys": (
        lambda odd: mdcl(*pairs(), *(sample(4 + odd, D) for _ in range(2)), memory()),
        "ValueError: image_keys:",
    ),
    "enqueued shape": (
        lambda odd: memory().enqueue(sample(4, D + odd), sample(4, D)),
        "ValueError: image_keys:",
    ),
    "points": (
        lambda odd: itrloss.OnlineKMeans(4, D).update(sample(4, D + odd)),
        "ValueError: x:",
    ),
    "regions": (
        lambda odd: itrloss.DynamicGate(D, 3)(sample(4, 2, D + odd)),
        "ValueError: regions:",
    ),
    "shape of sets": (
        lambda odd: itrloss.VarianceAwareLoss(gather=True)(sample(*(4, 3, D)[odd:]), sample(4, D)),
        "ValueError: image_sets:",
    ),
    "variances": (
        lambda odd: itrloss.PCMEPlusPlusLoss(gather=True)(
            *pairs(), sample(4, D), sample(4, D + odd)
        ),
        "ValueError: texts_log_variance:",
    ),
    "prototypes": (
        lambda odd: classifier()(*pairs(), torch.arange(4 + odd)),
        "ValueError: prototype_ids:",
    ),
    "no concepts": (
        lambda odd: objective()(
            *pairs(), *pairs(), memory(), sample(4, D), None if odd else sample(4, D)
        ),
        "TypeError: text_concepts:",
    ),
    "array as keys": (
        lambda odd: uto(
            *pairs(), pairs()[0].detach().numpy() if odd else pairs()[0], pairs()[1], memory()
        ),
        "TypeError: image_keys: expected a floating-point tensor",
    ),
    "prefixes of a memory": (
        lambda odd: itrloss.Matryoshka(uto, (3, D))(*pairs(), *pairs(), memory(4, D - odd)),
        "ValueError: memory: expected one of dimension 6",
    ),
    "short texts": (
        lambda odd: itrloss.Matryoshka(shared, (2, D))(sample(4, D), sample(4, D - odd)),
        "ValueError: texts: expected embeddings of at least 6 dimensions",
    ),
    "masked ids": (
        lambda odd: together(np.ma.array(ids, mask=ids < odd), ids),
        "TypeError: image_ids: expected an integer tensor",
    ),
    "masked guide": (
        lambda odd: filtered(*pairs(), guide=[masked(x) if odd else x for x in pairs()]),
        "TypeError: guide: expected (N, M) scores or embeddings",
    ),
    "device of the guide": (
        lambda odd: filtered(*pairs(), guide=(pairs()[0].to("meta" if odd else "cpu"), pairs()[1])),
        "ValueError: guide[0]: expected device cpu",
    ),
    "scores of a teacher": (
        lambda odd: itrloss.DistillationLoss(gather=True)(*pairs(), sample(4, 12 - odd)),
        "ValueError: teacher: expected shape (4, 12), got (4, 11)",
    ),
    "residuals": (
        lambda odd: itrloss.DVSEObjective(gather=True)(
            sample(4, 3, D), sample(4, D), sample(4 - odd, 3, 5)
        ),
        "ValueError: residuals: expected a row for each",
    ),
    "features of open_clip": (
        lambda odd: itrloss.compat.ClipLoss(world_size=WORLD)(
            sample(4, D)[0 if odd else slice(None)], sample(4, D), 9.0
        ),
        "ValueError: image_features: expected shape (N, D)",
    ),
    "alpha of sets": (lambda odd: of_sets(alpha=1.0 - odd), "ValueError: alpha: expected a number"),
    "metric without batches": (
        metric_without_batches,
        "ValueError: RetrievalMetrics: expected a call of update() first, got none",
    ),
}

# What all say.
ALIKE: dict[str, tuple[Callable[[bool], Any], str]] = {
    "columns of scores": (
        lambda odd: shared(scores=sample(4, 12 - odd)),
        "ValueError: scores: expected 12 columns",
    ),
    "columns of matches": (
        lambda odd: together(matches=torch.eye(4)),
        "ValueError: matches: expected 12 columns",
    ),
    "no sets": (
        lambda odd: itrloss.functional.set_similarity(
            sample(4, 2, D), sample(0, 2, D), gather=True
        ),
        "ValueError: texts: expected at least one set",
    ),
}


def disagreeing(rank: int) -> dict[str, tuple[str, float]]:
    """What each case raises, and the loss of a good step after it."""
    found = {}
    for name, (call, *_) in {**DIFFERENT, **REFUSED, **ALIKE}.items():
        said = "no error"
        try:
            call(rank == ODD)
        except (TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        found[name] = said, shared(*pairs(rank)).item()
    return found


def test_all_raise_an_error_if_processes_disagree_and_go_on(tmp_path):
    found = run(disagreeing, tmp_path, world=WORLD)
    whole = pair()(*(torch.cat(x) for x in zip(*map(pairs, range(WORLD)), strict=True))).item()
    assert len(found[0]) == len(DIFFERENT) + len(REFUSED) + len(ALIKE)  # each has its own name
    for name in found[0]:
        texts, afterwards = zip(*(mine[name] for mine in found), strict=True)
        assert afterwards == pytest.approx([whole] * WORLD, rel=1e-5), name
        if name in ALIKE:
            assert len(set(texts)) == 1 and texts[0].startswith(ALIKE[name][1]), (name, texts)
            continue
        if name in REFUSED:
            assert texts[ODD].startswith(REFUSED[name][1]), (name, texts)
            quoted = f"ValueError: gather: process {ODD} failed: {texts[ODD]}"
            assert all(text == quoted for rank, text in enumerate(texts) if rank != ODD), (
                name,
                texts,
            )
            continue
        started = "ValueError: gather: expected the same in all processes, got "
        assert len(set(texts)) == 1 and texts[0].startswith(started), (name, texts)
        others, odd, _ = re.split(r" in process (?:0, 2|1)(?:; |$)", texts[0].removeprefix(started))
        usual, different = DIFFERENT[name][1:]
        assert usual in others and different in odd, (name, texts)


def calls_with_one_alone(rank: int) -> float:
    """The last of 51 losses; before, one process calls the loss once more, by itself."""
    loss = itrloss.TripletLoss(gather=True)
    if rank == ODD:
        loss.gather = False
        loss(*pairs())
        loss.gather = True
    return [float(loss(*pairs(rank))) for _ in range(51)][-1]


def test_processes_look_for_a_collapse_in_the_same_call(tmp_path):
    """It is the 50th of all, which a process that called the loss alone must not reach earlier."""
    first, second = run(calls_with_one_alone, tmp_path, world=2)
    assert first == second
    assert math.isfinite(first)


# --- wrappers -------------------------------------------------------------------------------------

SIZES = (3, 5, 0), (2, 0, 4)  # of the processes' batches
CLUSTERS = 4


class OwnLoss(itrloss.PairLoss):
    """A loss of one's own with a parameter."""

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.scale = nn.Parameter(torch.tensor([9.0]))

    def compute(self, sim: itrloss.Similarity) -> Any:
        values = sim.both.logsumexp(self.shared(self.scale))
        return sim.both.reduce(values, self.reduction)


def shared_scale() -> nn.Parameter:
    return nn.Parameter(torch.ones(1))


def sharing(**common: Any) -> nn.Module:
    """A loss that has a temperature of a model."""
    return itrloss.SupConLoss(temperature=nn.Parameter(torch.tensor([0.2])), **common)


CRITERIA = {
    **select("infonce learnable", "sigmoid", "mdcl", "prototypes"),
    "sharing": Entry(sharing),
    "own": Entry(OwnLoss),
}
WAYS = "ddp", "ddp, loss inside", "fsdp", "fsdp, loss inside", "by hand"


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = nn.Linear(7, D), nn.Linear(5, D)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.images(images), self.texts(texts)


class Step(nn.Module):
    """Encoders and a loss."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.towers, self.criterion = Towers(), CRITERIA[kind].make(D, **options)
        self.double()

    def forward(self, images: Tensor, texts: Tensor, ids: Tensor) -> Tensor:
        """Return the loss, or the sum of its values."""
        v, w = self.towers(images, texts)
        if isinstance(self.criterion, itrloss.MemoryLoss):
            memory = itrloss.CoupledMemory(4, D, dtype=torch.float64)
            memory.images[:], memory.texts[:], memory.ids[:] = (
                torch.eye(D)[:4],
                torch.eye(D)[2:],
                torch.arange(4),
            )
            memory._labelled = True
            values = self.criterion(v, w, v.detach() + 1, w.detach() - 1, memory, ids, ids)
        elif isinstance(self.criterion, itrloss.PairLoss):
            values = self.criterion(v, w, ids, ids)
        else:
            values = self.criterion(v, w, ids % CLUSTERS)
        return torch.cat(
            [x.reshape(-1) for x in (values if isinstance(values, tuple) else (values,))]
        ).sum()

    def gradients(self) -> dict[str, Tensor]:
        found = {name.replace("module.", ""): p.grad for name, p in self.named_parameters()}
        return {
            name: x.full_tensor() if isinstance(x, DTensor) else x
            for name, x in found.items()
            if x is not None
        }


def batch(number: int, rank: int | None) -> list[Tensor]:
    """Images, texts and ids of a process, or of all."""
    n = sum(SIZES[number])
    whole = [
        sample(n, size, seed=size + number, dtype=torch.float64, trained=False) for size in (7, 5)
    ]
    whole.append(torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(number)))
    return whole if rank is None else [x.split(SIZES[number])[rank] for x in whole]


def wrapped(way: str, step: Step) -> Any:
    """Return what is called in place of ``step``; the loss is inside the wrapper or outside."""
    if way.startswith("fsdp"):
        fully_shard(
            step if "inside" in way else step.towers, mesh=dist.init_device_mesh("cpu", (WORLD,))
        )
    elif way == "ddp, loss inside":
        return DistributedDataParallel(step)
    elif way == "ddp":
        step.towers = DistributedDataParallel(step.towers)  # type: ignore[assignment]
    return step


def averaged(towers: nn.Module) -> None:
    for p in towers.parameters():
        dist.all_reduce(p.grad)
        p.grad /= WORLD


def accumulate(way: str, step: Step, call: Any, rank: int | None) -> None:
    """Backward passes of two parts, which the processes exchange with the last."""
    wrapper = call if "inside" in way else step.towers
    for number in range(len(SIZES)):
        last = number + 1 == len(SIZES)
        if way.startswith("fsdp"):
            wrapper.set_requires_gradient_sync(last)
        with wrapper.no_sync() if way.startswith("ddp") and not last else nullcontext():
            (call(*batch(number, rank)) / len(SIZES)).backward()


CHUNKED = (4, 7, 2)  # rows of the processes' batches


def chunked(way: str, rank: int | None) -> dict[str, Tensor]:
    """Gradients of a step in chunks."""
    step, rows = Step("infonce learnable", gather=True), sum(CHUNKED)
    whole = [sample(rows, size, seed=size, dtype=torch.float64, trained=False) for size in (7, 5)]
    whole.append(torch.arange(rows) % 6)
    *inputs, ids = whole if rank is None else (x.split(CHUNKED)[rank] for x in whole)
    encoders: list[Any] = [step.towers.images, step.towers.texts]
    chunk = 3
    if way == "fsdp":  # as many chunks in each process
        chunk = -(-len(ids) // 2)
        for encoder in encoders:
            fully_shard(encoder, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    if way == "ddp":
        encoders = [*map(DistributedDataParallel, encoders)]
    itrloss.grad_cache_step(step.criterion, encoders, inputs, chunk, image_ids=ids, text_ids=ids)
    if way == "by hand":
        averaged(step.towers)
    return step.gradients()


# Wrapper, loss and reduction.
STEPPED = pairwise(way=WAYS, kind=[*CRITERIA], reduction=("mean", "sum", "none"))
ALONE = [("alone", *case) for case in itertools.product(CRITERIA, ("mean", "sum", "none"))]


def trained(
    rank: int | None, ways: Sequence[str] = WAYS, cases: Sequence[tuple] = STEPPED
) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """Gradients with this process's part of the batch, or with everything in one process."""
    found = {}
    for way in ways:
        for kind, reduction in [case[1:] for case in cases if case[0] == way]:
            step = Step(kind, reduction=reduction, gather=True)
            call = wrapped(way, step)
            # What all processes return is averaged; a value of one's own is divided by their
            # number.
            own = WORLD if reduction == "none" and rank is not None else 1
            (call(*batch(0, rank)) * own).backward()
            if way == "by hand":
                averaged(step.towers)
            found[way, kind, reduction] = step.gradients()
        step = Step("infonce learnable", gather=True)
        accumulate(way, step, wrapped(way, step), rank)
        if way == "by hand":
            averaged(step.towers)
        found[way, "accumulated"] = step.gradients()
        if "inside" not in way:
            found[way, "chunked"] = chunked(way, rank)
    return found


@pytest.mark.slow
def test_gradients_are_those_of_one_process_with_the_whole_batch(tmp_path):
    whole = {case[1:]: gradients for case, gradients in trained(None, ["alone"], ALONE).items()}
    for found in run(trained, tmp_path, world=WORLD):
        for case, gradients in found.items():
            wanted = whole[case[1:]]
            assert (
                gradients.keys() == wanted.keys() and sum(x.any() for x in gradients.values()) > 3
            ), case
            for name, x in gradients.items():
                assert (x - wanted[name]).norm() <= 1e-10 * wanted[name].norm(), (case, name)


# --- states ---------------------------------------------------------------------------------------

STEPS, SAVED = 5, 3  # the state is saved before the fourth step
SPLITS = {  # sizes of the processes' parts of the steps' batches
    1: [(10,)] * STEPS,
    2: [(6, 4), (10, 0), (3, 7), (0, 10), (5, 5)],
    3: [(4, 3, 3), (5, 0, 5), (0, 10, 0), (2, 8, 0), (3, 0, 7)],
}


class System(nn.Module):
    """An encoder in training, with everything that has a state that processes share."""

    def __init__(self, world: int, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"gather": True, "process_group": group}
        self.world, self.group = world, group
        self.encoder = nn.Linear(7, D).double()
        self.memory = itrloss.CoupledMemory(17, D, dtype=torch.float64)
        self.gate = itrloss.DynamicGate(7, 3)
        self.pair = itrloss.InfoNCELoss(0.5, learnable=True, telemetry=True, **options)
        self.orthogonal = itrloss.DynamicOrthogonalLoss(slack=0.1, **options)
        self.coder = itrloss.CODERObjective(D, CLUSTERS, telemetry=True, **options).double()

    def step(self, number: int, rank: int) -> float:
        """Train with a process's part of a batch; return the loss."""
        x, y = (
            sample(10, 7, seed=2 * number + side, dtype=torch.float64, trained=False)
            for side in (0, 1)
        )
        ids = torch.arange(10) * (number + 1) % 12
        x, y, ids = (part.split(SPLITS[self.world][number])[rank] for part in (x, y, ids))
        v, w = self.encoder(x), self.encoder(y)
        keys = v.detach() + 0.1, w.detach() - 0.1
        gates = self.gate(torch.stack([x, x * y], 1), process_group=self.group)
        loss = self.pair(v, w, ids, ids) + self.orthogonal(torch.stack([v, w, v * w], 1), gates)
        loss = loss + self.coder(v, w, *keys, self.memory, v, w, ids, ids)[0]
        loss.backward()
        for p in self.encoder.parameters():
            if self.world > 1:
                dist.all_reduce(p.grad, group=self.group)
            p.grad /= self.world
        with torch.no_grad():
            for p in self.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        self.memory.enqueue(*keys, ids, self.group)
        return loss.item()


def stepped(rank: int, world: int, first: int, last: int, state: Any, group: Any = None) -> Any:
    """Take some steps; return their losses, the state and figures, and the state before the fourth
    step.
    """
    system = System(world, group)
    if state is not None:
        system.load_state_dict(state)
    losses, saved = [], {}
    for number in range(first, last):
        if number == SAVED:
            saved = deepcopy(dict(system.state_dict()))
        losses.append(system.step(number, rank))
    v, w = (x.detach().chunk(world)[rank] for x in (sample(12, D), sample(12, D, seed=1)))
    sim = itrloss.Similarity(*(itrloss.distributed.gather(x, group) for x in (v, w)))
    measured = itrloss.metrics.retrieval_metrics(sim, hubness_k=2)
    figures = system.pair.telemetry, system.coder.memory.telemetry, measured
    return (losses, dict(system.state_dict()), figures), saved


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[Any]:
    """What two processes return of all steps."""
    return run(stepped, tmp_path_factory.mktemp("two"), 2, 0, STEPS, None, world=2)


@pytest.mark.slow
def test_states_are_identical_in_all_processes_and_resume_in_any_number(tmp_path, two):
    (whole, saved), (other, other_saved) = two
    assert same((whole, saved), (other, other_saved)) and not torch.equal(
        saved["memory.images"], whole[1]["memory.images"]
    )
    for world in SPLITS:
        if world == 1:
            resumed = [stepped(0, 1, SAVED, STEPS, saved)[0]]
        else:
            (tmp_path / f"{world}").mkdir()
            found = run(stepped, tmp_path / f"{world}", world, SAVED, STEPS, saved, world=world)
            resumed = [mine for mine, _ in found]
        assert all(same(resumed[0], other) for other in resumed)
        assert resumed[0][0] == pytest.approx(whole[0][SAVED:], rel=1e-6)
        assert world != 2 or same(resumed[0], (whole[0][SAVED:], *whole[1:]))


def grouped(rank: int) -> tuple[Any, str]:
    """Two of three processes share batches; the other trains alone."""
    outer, inner = dist.new_group([0, 2]), dist.new_group([1])
    if rank == 1:
        with pytest.raises(ValueError) as error:
            pair(gather=True, process_group=outer)(*pairs())
        return stepped(0, 1, 0, STEPS, None, inner)[0], str(error.value)
    found, _ = stepped(rank // 2, 2, 0, STEPS, None, outer)
    with pytest.raises(ValueError) as error:
        pair(gather=True, process_group=outer)(sample(4, D), sample(4 + rank, D))
    return found, str(error.value)


@pytest.mark.slow
def test_a_group_of_some_processes_shares_batches_of_its_own(tmp_path, two):
    (whole, _), _ = two
    (first, said), (alone, outside), (last, refusal) = run(grouped, tmp_path, world=3)
    assert same(first, last) and same(first, whole)
    assert same(alone, stepped(0, 1, 0, STEPS, None)[0])
    assert said == f"gather: process 2 failed: ValueError: {refusal}"
    assert outside == "process_group: expected one that this process belongs to"
