"""What losses, re-rankers and metrics compute of fixed input, as numbers, and their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import itrloss
from itrloss import Similarity, metrics, rerank
from itrloss.testing.subject import Subject, trained
from support.cases import public_rerankers, sample
from support.conforming import CALLS, LOSSES, conforming
from support.losses_registry import REGISTRY


def projections(tensors: Iterable[Tensor]) -> list[float]:
    """Return a number for each tensor, to which every element contributes with another weight."""
    numbers = []
    for x in tensors:
        weights = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64)
        numbers.append(float(x.detach().double().flatten() @ weights))
    return numbers


def normal(*shape: int, seed: int) -> Tensor:
    """Return normally distributed numbers in float64."""
    return sample(*shape, seed=seed, dtype=torch.float64)


def similarity() -> Similarity:
    """Return the similarities of ten images with twenty texts, some of which match."""
    images = normal(10, 6, seed=0)
    texts = images.repeat_interleave(2, 0) + normal(20, 6, seed=1)
    ids = torch.arange(10)
    return Similarity(images, texts, ids, ids.repeat_interleave(2))


# ------------------------------------------------------------------------------------------- values


def losses() -> dict[str, list[float]]:
    """Return the value of each loss, and of its gradients, by name."""
    cases = dict(LOSSES)
    for name, entry in REGISTRY.items():
        if name not in cases and entry.takes in CALLS:
            cases[name] = conforming(name)
    return {f"loss {name}": loss_outcome(case) for name, case in sorted(cases.items())}


def loss_outcome(case: Any, state: dict[str, Any] | None = None) -> list[float]:
    """Return the value of a loss and of its gradients, after loading a state if there is one."""
    options = {name: x for name, x in case.options.items() if name != "processes"}
    subject = Subject(case.loss, **options)
    loss = subject.fresh()
    if state is None:
        set_weights(loss)
    else:
        loss.load_state_dict(state)
    batch = subject.batch(d=64)
    # Noise, so that pairs are hard enough for losses with a margin.
    batch = batch.of(
        batch.images + 2 * normal(*batch.images.shape, seed=15),
        batch.texts + 2 * normal(*batch.texts.shape, seed=16),
    )
    result = subject.result(batch, loss)
    return projections(result.values())


def set_weights(loss: Any) -> None:
    """Set matrices of weights, which are drawn when a loss is made."""
    for parameter in trained(loss).values():
        if parameter.dim() > 1:
            parameter.data.copy_(normal(*parameter.shape, seed=17))


def rerankers() -> dict[str, rerank.Reranker]:
    """Return each re-ranker, with a bank if it takes one."""
    found = {}
    for kind in sorted(public_rerankers(), key=lambda kind: kind.__name__):
        if kind is rerank.TwoStageReranker:
            continue
        method = kind()
        if method.takes_bank:
            method.fit(normal(9, 6, seed=2), normal(8, 6, seed=3))
        found[f"reranker {kind.__name__}"] = method
    return found


def reranked(method: rerank.Reranker) -> list[float]:
    """Return what a re-ranker makes of both directions."""
    return projections(method.rerank(similarity())[:2])


def measured() -> dict[str, list[float]]:
    """Return the metrics, and intervals and p-values of a difference."""
    results = metrics.retrieval_results(similarity())
    others = metrics.retrieval_results(similarity(), reranker=rerank.FastReranker())
    found = {f"metric {name}": [x] for name, x in results.metrics().items()}
    for name, difference in metrics.compare(others, results).items():
        found[f"difference {name}"] = list(difference)
    return found


def values() -> dict[str, list[float]]:
    """Return all numbers by name."""
    found = losses()
    for name, method in rerankers().items():
        found[name] = reranked(method)
    return found | measured()


# ------------------------------------------------------------------------------------------- states


def memory() -> itrloss.CoupledMemory:
    """Return a memory of nine entries, the first of which was overwritten."""
    queue = itrloss.CoupledMemory(9, 6, dtype=torch.float64)
    queue.enqueue(normal(10, 6, seed=4), normal(10, 6, seed=5), torch.arange(10))
    return queue


def against_memory(queue: nn.Module) -> list[float]:
    """Return the value of a loss over a memory, and of its gradients."""
    images = normal(3, 6, seed=6).requires_grad_()
    texts = normal(3, 6, seed=7).requires_grad_()
    ids = torch.arange(3)
    loss = itrloss.MemoryDiversityContrastiveLoss()
    value = loss(images, texts, images.detach(), texts.detach(), queue, ids, ids)
    return projections([value, *torch.autograd.grad(value, (images, texts))])


def clusters() -> itrloss.OnlineKMeans:
    """Return prototypes that were moved twice."""
    means = itrloss.OnlineKMeans(3, 6).double()
    means.update(normal(12, 6, seed=8))
    means.update(normal(12, 6, seed=9))
    return means


def moved(means: nn.Module) -> list[float]:
    """Return clusters and centroids after another update."""
    ids = means.update(normal(12, 6, seed=10))
    return projections([ids, means.centroids])


def averaged() -> itrloss.MomentumEncoder:
    """Return a moving average that was updated."""
    torch.manual_seed(0)
    encoder = itrloss.MomentumEncoder(nn.Linear(6, 4).double(), momentum=0.9)
    encoder.update(nn.Linear(6, 4).double())
    return encoder


def gated() -> itrloss.DynamicGate:
    """Return a gate that was trained for two batches."""
    gate = itrloss.DynamicGate(6, 3).double().train()
    for seed in (11, 12):
        gate(normal(5, 3, 6, seed=seed))
    return gate


# How a module is made, and what is computed with it.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[float]]]] = {
    "CoupledMemory": (memory, against_memory),
    "OnlineKMeans": (clusters, moved),
    "MomentumEncoder": (averaged, lambda encoder: projections([encoder(normal(3, 6, seed=13))])),
    "DynamicGate": (gated, lambda gate: projections([gate(normal(5, 3, 6, seed=14))])),
}


def states() -> dict[str, Any]:
    """Return the states of all that have one, by name, with parameters other than the default."""
    found: dict[str, Any] = {}
    for name, (make, _) in MODULES.items():
        found[name] = make().state_dict()
    for name, case in LOSSES.items():
        loss = Subject(case.loss).fresh()
        set_weights(loss)
        for parameter in trained(loss).values():
            parameter.data += 0.01
        if isinstance(loss, nn.Module) and loss.state_dict():
            found[f"loss {name}"] = loss.state_dict()
    for name, method in rerankers().items():
        found[name] = method.state_dict()
    return found


def outcome_of(name: str, state: Any) -> list[float]:
    """Return what is computed after loading a state."""
    kind, _, own = name.partition(" ")
    if kind == "loss":
        return loss_outcome(LOSSES[own], state)
    if kind == "reranker":
        method = getattr(rerank, own)()
        return reranked(method.load_state_dict(state))
    make, compute = MODULES[name]
    module = make()
    module.load_state_dict(state)
    return compute(module)
