"""Modules next to the losses that `check_loss` takes, and losses with a state: compilation, types,
autocast. `test_processes` has them over processes, `test_resuming` their copies and states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.losses_registry import REGISTRY, public_losses
from support.versions import reset_compiler
from torch import Tensor, nn

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


def pair(module: nn.Module, x: Inputs) -> Tensor:
    return module(x.part(0), x.part(1), IDS, IDS)


def coder(module: nn.Module, x: Inputs) -> Tensor:
    batch = (x.part(0), x.part(1))
    keys = (x.part(2).detach(), x.part(3).detach())
    features = (x.part(4), x.part(5))
    total, _ = module(*batch, *keys, x.memory, *features, IDS, IDS)
    return total


def classify(module: nn.Module, x: Inputs) -> Tensor:
    return module(x.part(0), x.part(1), IDS)


def enqueue(module: nn.Module, x: Inputs) -> Tensor:
    module.enqueue(x.part(0), x.part(1), IDS)
    return module.images.sum() + module.ids.sum()


def cluster(module: nn.Module, x: Inputs) -> Tensor:
    return module.update(x.part(0)).sum() + module.centroids.sum()


def heads(module: nn.Module, x: Inputs) -> Tensor:
    return module(x.part(0, K))


def features(module: nn.Module, x: Inputs) -> Tensor:
    return module(x.part(0, 4))


def encode(module: nn.Module, x: Inputs) -> Tensor:
    return module(x.part(0))


class Module(NamedTuple):
    """A constructor, and how its module is called."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Inputs], Tensor]


MODULES = {
    "infonce": Module(REGISTRY["infonce learnable"].make, pair),
    "graphed": Module(lambda: itrloss.Graphed(REGISTRY["infonce learnable"].make()), pair),
    "coder": Module(REGISTRY["coder"].make, coder),
    "prototypes": Module(REGISTRY["prototypes"].make, classify),
    "orthogonal": Module(REGISTRY["orthogonal"].make, heads),
    "gate": Module(REGISTRY["gate"].make, features),
    "memory": Module(lambda: itrloss.CoupledMemory(ENTRIES, D), enqueue),
    "means": Module(lambda: itrloss.OnlineKMeans(4, D), cluster),
    "sparse means": Module(lambda: itrloss.OnlineKMeans(40, D), cluster),
    "momentum": Module(lambda: itrloss.MomentumEncoder(nn.Linear(D, D)), encode),
}
every_module = pytest.mark.parametrize("name", MODULES)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name].make()


def inputs(step: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(B, 8 * D, generator=generator) + 0.3
    stored = itrloss.CoupledMemory(ENTRIES, D, dtype=dtype)
    keys = torch.randn(2, 7, D, generator=generator).to(dtype)
    stored.enqueue(*keys, torch.arange(7))
    return Inputs(x.to(dtype).requires_grad_(), stored)


def outcome(
    name: str, module: nn.Module, x: Inputs, call: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Value of one call, and its gradient if it has one."""
    if call is None:
        call = MODULES[name].call
    value = call(module, x)
    if not value.requires_grad:
        return [value]
    (gradient,) = torch.autograd.grad(value.sum(), x.vectors)
    return [value.detach(), gradient]


def assert_identical(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_every_public_module_is_here_or_a_loss():
    """`test_completeness` has the losses."""
    classes = [x for x in vars(itrloss).values() if isinstance(x, type)]
    public = {x.__name__ for x in classes if issubclass(x, nn.Module)}
    here = {type(make(name)).__name__ for name in MODULES}
    assert public - {"PairLoss", "MemoryLoss"} <= here | public_losses()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"momentum", "infonce"}))
def test_module_compiles_without_a_graph_break(name):
    reset_compiler()
    module = make(name)
    twin = make(name)
    compiled = torch.compile(MODULES[name].call, fullgraph=True, backend="aot_eager")
    for step in range(3):
        wanted = outcome(name, module, inputs(step))
        found = outcome(name, twin, inputs(step), compiled)
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close([*twin.buffers()], [*module.buffers()])


@pytest.mark.parametrize("name", {**REGISTRY, **MODULES})
def test_repr_is_one_that_can_be_read(name):
    module = make(name) if name in MODULES else REGISTRY[name].make()
    text = repr(module)
    assert text.startswith(type(module).__name__ + "(")
    assert "object at" not in text
    on_meta = repr(module.to("meta"))  # as a model is before its parameters have memory
    assert on_meta.startswith(type(module).__name__ + "(")


@pytest.mark.parametrize("name", ["gate", "means"])
def test_module_without_parameters_may_be_made_in_inference_mode(name):
    with torch.inference_mode():
        module = make(name)
    for step in range(2):
        found = outcome(name, module, inputs(step))
    twin = make(name)
    for step in range(2):
        wanted = outcome(name, twin, inputs(step))
    assert_identical(found, wanted)


@every_module
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_module_moves_to_another_type(name, dtype):
    given = inputs(dtype=dtype)
    moved = make(name).to("cpu", dtype)
    found = outcome(name, moved, given)
    vectors = given.vectors.detach().float().requires_grad_()
    memory = inputs(dtype=dtype).memory.float()
    wanted = outcome(name, make(name), Inputs(vectors, memory))
    # Parameters are rounded, too, and so are gradients.
    tolerance = 1e-5 if dtype == torch.float64 else 0.03
    for got, exact in zip(found, wanted, strict=True):
        assert got.isfinite().all()
        error = got.to(exact.dtype) - exact
        assert error.norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"momentum"}))
def test_module_is_the_same_under_autocast(name):
    def under_autocast(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return MODULES[name].call(module, x)

    wanted = outcome(name, make(name), inputs())
    found = outcome(name, make(name), inputs(), under_autocast)
    assert_identical(found, wanted)


def test_momentum_encoder_runs_under_the_users_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        found = encode(make("momentum"), inputs())
    assert found.dtype == torch.bfloat16
