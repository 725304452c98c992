"""Properties of every module: compilation, copies, serialisation, dtypes, autocast, two processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from processes import both
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import itrloss

B, K, D, ENTRIES = 6, 3, 8, 10
IDS = torch.tensor([0, 1, 2, 0, 4, 9])


class Inputs(NamedTuple):
    """Inputs of one step, from one tensor of random numbers, so that an encoder can compute them."""

    vectors: Tensor  # (B, 8 D)
    memory: itrloss.CoupledMemory

    def part(self, at: int, heads: int = 1) -> Tensor:
        """Slice of (B, D), or (B, heads, D)."""
        x = self.vectors[:, at * D : (at + heads) * D]
        return x if heads == 1 else x.unflatten(1, (heads, D))


def pair(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0), x.part(1), IDS, IDS)


def memory(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0), x.part(1), x.part(2).detach(), x.part(3).detach(), x.memory, IDS, IDS)


def coder(module: nn.Module, x: Inputs) -> Any:
    keys = x.part(2).detach(), x.part(3).detach()
    return module(x.part(0), x.part(1), *keys, x.memory, x.part(4), x.part(5), IDS, IDS)[0]


def dvse(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0, K), x.part(3), x.part(4, K), None, IDS, IDS)[0]


def classify(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0), x.part(1), IDS)


def enqueue(module: nn.Module, x: Inputs) -> Any:
    module.enqueue(x.part(0), x.part(1), IDS)
    return module.images.sum() + module.ids.sum()


def cluster(module: nn.Module, x: Inputs) -> Any:
    return module.update(x.part(0)).sum() + module.centroids.sum()


# name -> (constructor, call)
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Inputs], Any]]] = {
    "TripletLoss": (itrloss.TripletLoss, pair),
    "TripletLoss all": (lambda: itrloss.TripletLoss(mining="all"), pair),
    "InfoNCELoss": (lambda: itrloss.InfoNCELoss(learnable=True), pair),
    "InfoNCELoss negatives": (
        lambda: itrloss.InfoNCELoss(hardness=9.0),
        lambda m, x: m(x.part(0), x.part(1), IDS, IDS, negatives=x.part(2, K)),
    ),
    "DirectionalInfoNCELoss": (itrloss.DirectionalInfoNCELoss, pair),
    "FilteredInfoNCELoss": (itrloss.FilteredInfoNCELoss, pair),
    "DistillationLoss": (
        itrloss.DistillationLoss,
        lambda m, x: m(
            x.part(0), x.part(1), itrloss.Similarity(x.part(2), x.part(3), IDS, IDS), IDS, IDS
        ),
    ),
    "SupConLoss": (itrloss.SupConLoss, pair),
    "MILNCELoss": (itrloss.MILNCELoss, pair),
    "MultiSimilarityLoss": (itrloss.MultiSimilarityLoss, pair),
    "CircleLoss": (itrloss.CircleLoss, pair),
    "SigmoidLoss": (itrloss.SigmoidLoss, pair),
    "RINCELoss": (lambda: itrloss.RINCELoss(0.5), pair),
    "ComplementaryContrastiveLoss": (lambda: itrloss.ComplementaryContrastiveLoss(0.5), pair),
    "PCMEPlusPlusLoss": (
        lambda: itrloss.PCMEPlusPlusLoss(0.5, 4.0),
        lambda m, x: m(*(x.part(at) for at in range(4)), IDS, IDS),
    ),
    "HubnessAwareLoss": (itrloss.HubnessAwareLoss, pair),
    "DiversityContrastiveLoss": (itrloss.DiversityContrastiveLoss, pair),
    "MemoryDiversityContrastiveLoss": (itrloss.MemoryDiversityContrastiveLoss, memory),
    "UnifiedTrainingObjective": (itrloss.UnifiedTrainingObjective, memory),
    "VarianceAwareLoss": (
        itrloss.VarianceAwareLoss,
        lambda m, x: m(x.part(0, K), x.part(3), IDS, IDS),
    ),
    "VarianceAwareLoss own sigma": (
        lambda: itrloss.VarianceAwareLoss(shared_sigma=False),
        lambda m, x: m(x.part(0, K), x.part(3)),
    ),
    "LateInteractionLoss": (
        itrloss.LateInteractionLoss,
        lambda m, x: m(x.part(0, K), x.part(3, 4), IDS.clamp_max(K), None, IDS, IDS),
    ),
    "LateInteractionLoss smooth": (
        lambda: itrloss.LateInteractionLoss(0.5, alpha=8.0),
        lambda m, x: m(x.part(0, K), x.part(3, 4)),
    ),
    "Matryoshka": (lambda: itrloss.Matryoshka(itrloss.InfoNCELoss(learnable=True), (2, D)), pair),
    "DynamicOrthogonalLoss": (
        lambda: itrloss.DynamicOrthogonalLoss(0.0),
        lambda m, x: m(x.part(0, K)),
    ),
    "DynamicGate": (lambda: itrloss.DynamicGate(D, K), lambda m, x: m(x.part(0, 4))),
    "CoupledMemory": (lambda: itrloss.CoupledMemory(ENTRIES, D), enqueue),
    "OnlineKMeans": (lambda: itrloss.OnlineKMeans(4, D), cluster),
    "OnlineKMeans sparse": (lambda: itrloss.OnlineKMeans(40, D), cluster),
    "PrototypeClassificationLoss": (lambda: itrloss.PrototypeClassificationLoss(D, 10), classify),
    "CODERObjective": (lambda: itrloss.CODERObjective(D, 9), coder),
    "DVSEObjective": (lambda: itrloss.DVSEObjective(slack=0.0), dvse),
    "MomentumEncoder": (
        lambda: itrloss.MomentumEncoder(nn.Linear(D, D)),
        lambda m, x: m(x.part(0)),
    ),
}
every_module = pytest.mark.parametrize("name", list(MODULES))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name][0]()


def inputs(step: int = 0, dtype: torch.dtype = torch.float32, processes: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(B, 8 * D, generator=generator) + 0.3
    stored = itrloss.CoupledMemory(ENTRIES, D, dtype=dtype)
    # as if enqueued by each process
    keys = torch.randn(2, 7, D, generator=generator).to(dtype).repeat(1, processes, 1)
    stored.enqueue(*keys, torch.arange(7).repeat(processes))
    return Inputs(x.to(dtype).requires_grad_(), stored)


def outcome(
    name: str,
    module: nn.Module,
    x: Inputs,
    call: Callable[..., Any] | None = None,
    autocast: bool = False,
) -> list[Tensor]:
    """Value of one call, and its gradient if it has one."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = (call or MODULES[name][1])(module, x)
    if not value.requires_grad:
        return [value]
    return [value.detach(), *torch.autograd.grad(value.sum(), x.vectors)]


def test_every_public_module_is_here():
    public = {n for n in itrloss.__all__ if isinstance(getattr(itrloss, n), type)}
    modules = {n for n in public if issubclass(getattr(itrloss, n), nn.Module)}
    assert modules - {"PairLoss", "MemoryLoss"} == {n.split()[0] for n in MODULES}


# Others are compiled in other tests: losses on pairs, and those with a memory, a teacher or
# variances.
ELSEWHERE = {
    "TripletLoss",
    "InfoNCELoss",
    "SigmoidLoss",
    "HubnessAwareLoss",
    "DiversityContrastiveLoss",
}
ELSEWHERE |= {
    "MemoryDiversityContrastiveLoss",
    "UnifiedTrainingObjective",
    "DynamicOrthogonalLoss",
    "MomentumEncoder",
}
ELSEWHERE |= {
    "FilteredInfoNCELoss",
    "SupConLoss",
    "MILNCELoss",
    "MultiSimilarityLoss",
    "CircleLoss",
}
ELSEWHERE |= {
    "DirectionalInfoNCELoss",
    "DistillationLoss",
    "RINCELoss",
    "ComplementaryContrastiveLoss",
}
ELSEWHERE |= {"PCMEPlusPlusLoss", "Matryoshka"}
# as parts of CODERObjective and DVSEObjective
ELSEWHERE |= {"PrototypeClassificationLoss", "VarianceAwareLoss"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MODULES
        if name == "VarianceAwareLoss own sigma" or name.split()[0] not in ELSEWHERE
    ],
)
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()
    call = MODULES[name][1]
    module, twin = make(name), make(name)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for step in range(3):
        wanted, found = (
            outcome(name, module, inputs(step)),
            outcome(name, twin, inputs(step), compiled),
        )
        torch.testing.assert_close(found, wanted)
    for a, b in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@every_module
def test_copies_go_on_as_the_original_does(name):
    module = make(name)
    for step in range(2):
        outcome(name, module, inputs(step))
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    twins = {
        "deepcopy": copy.deepcopy(module),
        "pickle": pickle.loads(pickle.dumps(module)),
        "state_dict": MODULES[name][0](),
        "torch.save": MODULES[name][0](),
    }
    twins["state_dict"].load_state_dict(module.state_dict())
    twins["torch.save"].load_state_dict(torch.load(stored, weights_only=True))
    for step in range(2, 4):
        wanted = outcome(name, module, inputs(step))
        for by, twin in twins.items():
            for a, b in zip(outcome(name, twin, inputs(step)), wanted, strict=True):
                assert torch.equal(a, b), by
    for by, twin in twins.items():
        for (key, a), (_, b) in zip(module.named_buffers(), twin.named_buffers(), strict=True):
            assert torch.equal(a, b), (by, key)


@every_module
def test_repr_is_one_that_can_be_read(name):
    text = repr(make(name))
    assert text.startswith(name.split()[0] + "(") and "object at" not in text


@every_module
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moves_to_another_type(name, dtype):
    given = inputs(dtype=dtype)
    found = outcome(name, make(name).to("cpu", dtype), given)
    same = Inputs(
        given.vectors.detach().float().requires_grad_(), inputs(dtype=dtype).memory.float()
    )
    for a, b in zip(found, outcome(name, make(name), same), strict=True):
        assert a.isfinite().all()
        # Parameters are rounded, too, and so are gradients.
        assert (a.to(b.dtype) - b).norm() <= (1e-5 if dtype == torch.float64 else 0.03) * b.norm()


@every_module
def test_autocast_changes_nothing(name):
    wanted = outcome(name, make(name), inputs())
    found = outcome(name, make(name), inputs(), autocast=True)
    if name == "MomentumEncoder":  # it runs the user's encoder, under the user's autocast
        assert found[0].dtype == torch.bfloat16
        return
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


class Step(nn.Module):
    """Encoder and module in one, as DDP wraps them."""

    def __init__(self, name: str):
        super().__init__()
        torch.manual_seed(1)
        self.name, self.encoder, self.module = name, nn.Linear(5, 8 * D), make(name)

    def forward(self, x: Tensor, stored: itrloss.CoupledMemory) -> Tensor:
        made = self.encoder(x)
        value = MODULES[self.name][1](self.module, Inputs(made, stored))
        return value.float().sum() + 0 * made.sum()


def worker(rank: int) -> dict[str, Any]:
    found = {}
    for name in MODULES:
        model = DistributedDataParallel(Step(name))
        gradients = []
        for step in range(3):
            x = torch.randn(B, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            model.zero_grad()
            model(x, inputs(step).memory).backward()
            gradients.append(
                {
                    n: p.grad.clone()
                    for n, p in model.module.named_parameters()
                    if p.grad is not None
                }
            )
        buffers = dict(model.module.module.named_buffers())
        found[name] = gradients, {n: b.clone() for n, b in buffers.items()}
    return found


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return both(worker, tmp_path_factory.mktemp("gloo"))


@pytest.mark.slow
@every_module
def test_two_processes_stay_equal(name, two_processes):
    (gradients, buffers), (other_gradients, other_buffers) = (
        found[name] for found in two_processes
    )
    for mine, theirs in zip(gradients, other_gradients, strict=True):
        assert mine and all(
            g.isfinite().all() and torch.equal(g, theirs[n]) for n, g in mine.items()
        )
    for n, b in buffers.items():
        # running statistics are of each process's own images, as with BatchNorm
        if name == "DynamicGate":
            continue
        assert torch.equal(b, other_buffers[n]), n
    # The mean of the processes' own gradients, as nothing but gradients is exchanged.
    if name in ("CoupledMemory", "OnlineKMeans", "OnlineKMeans sparse", "CODERObjective"):
        return
    alone = []
    for rank in range(2):
        model = Step(name)
        model(
            torch.randn(B, 5, generator=torch.Generator().manual_seed(rank)),
            inputs(0, processes=2).memory,
        ).backward()
        alone.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for n, g in gradients[0].items():
        torch.testing.assert_close(g, (alone[0][n] + alone[1][n]) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_clusters_of_two_processes_are_those_of_one(two_processes):
    model = Step("OnlineKMeans")
    for step in range(3):
        both = [
            torch.randn(B, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(2)
        ]
        model.module.update(Inputs(model.encoder(torch.cat(both)), None).part(0))
    for n, b in model.module.named_buffers():
        torch.testing.assert_close(two_processes[0]["OnlineKMeans"][1][n], b)
