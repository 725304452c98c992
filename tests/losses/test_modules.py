"""Properties of every module: compilation, copies, serialisation, dtypes, autocast, two
processes.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.cases import embeddings
from support.losses_registry import Entry, table
from support.processes import both
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import itrloss

B, K, D, ENTRIES = 6, 3, 8, 10
IDS = torch.tensor([0, 1, 2, 0, 4, 9])


class Inputs(NamedTuple):
    """Inputs of one step, from one tensor of random numbers, so that an encoder can compute
    them.
    """

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


def negatives(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0), x.part(1), IDS, IDS, negatives=x.part(2, K))


def teacher(module: nn.Module, x: Inputs) -> Any:
    known = itrloss.Similarity(x.part(2), x.part(3), IDS, IDS)
    return module(x.part(0), x.part(1), known, IDS, IDS)


def distributions(module: nn.Module, x: Inputs) -> Any:
    return module(*(x.part(at) for at in range(4)), IDS, IDS)


def heads(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0, K), x.part(3), IDS, IDS)


def heads_without_ids(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0, K), x.part(3))


def heads_alone(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0, K))


def tokens(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0, K), x.part(3, 4), IDS.clamp_max(K), None, IDS, IDS)


def tokens_without_ids(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0, K), x.part(3, 4))


def features(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0, 4))


def encode(module: nn.Module, x: Inputs) -> Any:
    return module(x.part(0))


Call = Callable[[Any, Inputs], Any]


class Module(NamedTuple):
    """A constructor and how its module is called, and whether the compiler takes this as a whole
    and no other test compiles it.
    """

    make: Callable[[], nn.Module]
    call: Call
    compiled: bool = True


# How a loss of each kind of input is called, and losses that are called in another way.
CALLS: dict[str, Call] = {
    "pairs": pair,
    "negatives": negatives,
    "teacher": teacher,
    "distributions": distributions,
    "memory": memory,
    "coder": coder,
    "heads": heads,
    "heads alone": heads_alone,
    "heads and residuals": dvse,
    "tokens": tokens,
    "prototypes": classify,
    "features": features,
}
OTHER_CALLS: dict[str, Call] = {
    "variance aware, own sigma": heads_without_ids,
    "late interaction smooth": tokens_without_ids,
}


def of_the_registry(name: str, entry: Entry) -> Module:
    """Return a loss; those of pairs are compiled in test_losses.py."""
    compiled = entry.takes != "pairs" and "compiled" in entry.tables
    return Module(entry.make, OTHER_CALLS.get(name, CALLS[entry.takes]), compiled)


MODULES: dict[str, Module] = {
    **{name: of_the_registry(name, entry) for name, entry in table("module").items()},
    "CoupledMemory": Module(lambda: itrloss.CoupledMemory(ENTRIES, D), enqueue),
    "OnlineKMeans": Module(lambda: itrloss.OnlineKMeans(4, D), cluster),
    "OnlineKMeans sparse": Module(lambda: itrloss.OnlineKMeans(40, D), cluster),
    "MomentumEncoder": Module(
        lambda: itrloss.MomentumEncoder(nn.Linear(D, D)), encode, compiled=False
    ),
}
every_module = pytest.mark.parametrize("name", list(MODULES))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name].make()


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
        value = (call or MODULES[name].call)(module, x)
    if not value.requires_grad:
        return [value]
    return [value.detach(), *torch.autograd.grad(value.sum(), x.vectors)]


def test_every_public_module_is_here():
    public = {n for n in itrloss.__all__ if isinstance(vars(itrloss)[n], type)}
    modules = {n for n in public if issubclass(vars(itrloss)[n], nn.Module)}
    here = {type(module.make()).__name__ for module in MODULES.values()}
    own = {"LateInteraction"}  # a loss that users put together
    assert modules - {"PairLoss", "MemoryLoss"} == here - own


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if module.compiled])
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()
    call = MODULES[name].call
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
        "state_dict": MODULES[name].make(),
        "torch.save": MODULES[name].make(),
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
    module = make(name)
    text = repr(module)
    assert text.startswith(type(module).__name__ + "(") and "object at" not in text


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
        value = MODULES[self.name].call(self.module, Inputs(made, stored))
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
        if name == "gate":
            continue
        assert torch.equal(b, other_buffers[n]), n
    # The mean of the processes' own gradients, as nothing but gradients is exchanged.
    if name in ("CoupledMemory", "OnlineKMeans", "OnlineKMeans sparse", "coder"):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss",
    [
        itrloss.InfoNCELoss(learnable=True),
        itrloss.SigmoidLoss(),
        itrloss.Matryoshka(itrloss.InfoNCELoss(learnable=True), (4, 8)),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_learnt_scale_in_half_precision_is_not_rounded_again(loss, dtype):
    images, texts = embeddings(12, 12, D, dtype=torch.float32)
    half = copy.deepcopy(loss).to(dtype)
    exact = copy.deepcopy(half).float()
    torch.testing.assert_close(half(images, texts), exact(images, texts), rtol=1e-6, atol=0)
