"""Stand-ins for CUDA graphs on the CPU, by which a `itrloss.Graphed` replays there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import itrloss
from itrloss.training.graphed import CUDAGraph

# What a capture cannot hold: the host waits for the device, or sizes depend on numbers.
WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}


class Rerun(CUDAGraph):
    """A graph that computes the function again, and writes to the same tensors."""

    def __init__(self, function: Callable[[], list[Tensor]], device: torch.device):
        self.function = function
        with torch.random.fork_rng([]):
            self.outputs = [x.clone() for x in function()]

    def replay(self) -> None:  # type: ignore[override]
        with torch.enable_grad():
            found = self.function()
        torch._foreach_copy_(self.outputs, found)  # type: ignore[attr-defined]


class Tape(CUDAGraph):
    """A graph that runs the recorded operators again, on the memory where they ran: nothing of
    Python is run again, as in a CUDA graph.
    """

    def __init__(self, function: Callable[[], list[Tensor]], device: torch.device):
        with torch.random.fork_rng([]):
            function()  # what a capture must not do, warm-ups do
        with torch.random.fork_rng([]), Operators() as operators:
            self.outputs = function()
        self.operators = operators.ran

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # its conversions are recorded
    def replay(self) -> None:  # type: ignore[override]
        for function, args, kwargs, results in self.operators:
            found = tree_flatten(function(*args, **kwargs))[0]
            for own, new in zip(results, found, strict=True):
                if isinstance(own, Tensor) and own.data_ptr() != new.data_ptr():
                    own.copy_(new)


class Operators(TorchDispatchMode):
    """Keeps the operators that run; raises the error of CUDA where a capture would."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1]
        )
        if name in WAITING or "unique" in name or by_mask:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **(kwargs or {}))
        held = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, tree_flatten(result)[0]))
        self.ran.append((func, *held))
        return result


class Idle(CUDAGraph):
    """A graph whose replay does nothing: what is left is the work of the host."""

    def __init__(self, function: Callable[[], list[Tensor]], device: torch.device):
        self.outputs = [x.clone() for x in function()]

    def replay(self) -> None:  # type: ignore[override]
        pass


class OnCPU(itrloss.Graphed):
    """It computes steps again."""

    _device = "cpu"
    _graph = Rerun


class Taped(OnCPU):
    """It runs recorded operators again."""

    _graph = Tape


class Idling(OnCPU):
    """It replays nothing."""

    _graph = Idle


def read_nothing(monkeypatch: Any) -> None:
    """Let the host read no tensor on the CPU, as on an accelerator."""
    for name, module in list(sys.modules.items()):
        if name.startswith("itrloss") and hasattr(module, "host_may_read"):
            monkeypatch.setattr(module, "host_may_read", lambda x: False)


class FakeCuda:
    """What a capture calls of ``torch.cuda``, in the order of the calls."""

    def __init__(self, monkeypatch: Any):
        self.log: list[str] = []
        for name in ("device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, self.context(name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.random, "fork_rng", self.drawn_again)

    def context(self, name: str) -> Callable[..., Any]:
        def enter(*_: object, **options: object) -> Any:
            self.log.append(name)
            return nullcontext()

        return enter

    def drawn_again(self, devices: Sequence[torch.device]) -> Any:
        self.log.append(f"numbers of {devices[0]}")
        return nullcontext()

    def wait_stream(self, other: object) -> None:
        self.log.append("wait")

    def replay(self) -> None:
        self.log.append("replay")
