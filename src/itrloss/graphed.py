"""A step of a loss that is recorded once, and then replayed without the work of the host."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .checks import CheckedModule, option
from .engine.devices import is_recorded, recording
from .memory import CoupledMemory

__all__ = ["Graphed"]

_WARM_UPS = 3  # calls before a capture: they compile, choose and allocate what a capture must not
_OF_PROCESSES = "gather", "process_group"
# What the host reads, keeps or runs in each call; the first of them is telemetry.
_OF_THE_HOST = "_observed", "check_finite", "_forward_hooks", "_forward_pre_hooks"


class CUDAGraph:
    """The CUDA graph of a function, each replay of which writes to the same ``outputs``."""

    def __init__(self, function: Callable[[], list[Tensor]], device: torch.device):
        # the numbers that warm-ups draw are drawn again
        with torch.cuda.device(device), torch.random.fork_rng([device]):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as those of a data loader, may go on
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = function()
        self.replay = graph.replay


class Step:
    """A loss and its gradients for one kind of call, recorded.

    Args:
        criterion: the loss. Its parameters and buffers, and memories, are read where they are; its
            options are those of now.
        given, structure: the arguments of a call, flat. Tensors are copied into tensors of the step
            at each replay.
        result: what the criterion returned for them.
        graph: makes the recording.
    """

    def __init__(
        self,
        criterion: nn.Module,
        given: Iterable[object],
        structure: TreeSpec,
        result: object,
        graph: type[CUDAGraph],
    ):
        leaves, self.structure = tree_flatten(result)
        self.size = len(leaves)
        self._device = leaves[0].device
        # Other parameters of the same memory: what accumulates the gradients of the criterion's
        # belongs to another stream, which a capture cannot wait for.
        shared: dict[int, Tensor] = {id(x): x for x in criterion.buffers()}
        for p in criterion.parameters():
            shared[id(p)] = nn.Parameter(p.detach(), p.requires_grad)
        self._criterion = copy.deepcopy(criterion, shared)
        own: list[object] = []
        self._inputs: list[Tensor] = []
        for x in given:
            if isinstance(x, Tensor):
                x = x.detach().to(self._device, copy=True).requires_grad_(x.requires_grad)
                self._inputs.append(x)
            own.append(x)
        self._args, self._kwargs = tree_unflatten(own, structure)
        self._trained = trained([*self._inputs, *self._criterion.parameters()])
        #: Whether each of the trained tensors gets a gradient: a loss may leave some out.
        self.has_gradient: list[bool] = []
        with recording():
            self._graph = graph(self._outputs, self._device)

    def _outputs(self) -> list[Tensor]:
        """Return the leaves of the criterion's result, and the gradients of the first, the loss."""
        kind = self._device.type
        # without its cache, which would keep the parameters of this call in half precision
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
            leaves, _ = tree_flatten(self._criterion(*self._args, **self._kwargs))
        grads = torch.autograd.grad(leaves[0], self._trained, allow_unused=True)
        self.has_gradient = [x is not None for x in grads]
        return [x.detach() for x in (*leaves, *grads) if x is not None]

    def replay(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Return the outputs for other inputs, as new tensors: there may be a further call before
        the backward pass.
        """
        torch._foreach_copy_(self._inputs, inputs)  # type: ignore[attr-defined]
        self._graph.replay()
        # one operator for all copies
        return torch._foreach_mul(self._graph.outputs, 1.0)  # type: ignore[attr-defined]


class Replayed(torch.autograd.Function):
    """A replayed step, whose gradients are those of the recording times the incoming one."""

    @staticmethod
    def forward(ctx: Any, step: Step, inputs: list[Tensor], *trained: Tensor) -> tuple[Tensor, ...]:
        """Return the leaves of the result; ``trained``: what gets a gradient."""
        outputs = step.replay(inputs)
        ctx.has_gradient = step.has_gradient
        ctx.save_for_backward(*outputs[step.size :])
        ctx.mark_non_differentiable(*outputs[1 : step.size])
        ctx.set_materialize_grads(False)
        return tuple(outputs[: step.size])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the trained tensors."""
        if torch.is_grad_enabled():
            expected = "second derivatives need the criterion itself, without Graphed"
            raise RuntimeError(f"create_graph: {expected}")
        of_loss = grads[0]
        scaled = iter(torch._foreach_mul(ctx.saved_tensors, of_loss))  # type: ignore[attr-defined]
        return None, None, *[next(scaled) if has else None for has in ctx.has_gradient]


class Graphed(CheckedModule):
    """A loss whose steps, forward and backward, are replayed as CUDA graphs: ``criterion =
    Graphed(InfoNCELoss())``.

    It is called as the criterion is, and returns the same. The first call of a kind is the
    criterion's own, with its checks and warnings; then the step is recorded, and later calls replay
    it, for which the host launches less than a dozen operators. A kind is all that decides which
    kernels run: shapes, dtypes, what requires a gradient, autocast, the memory, where parameters
    are, and the options and the mode of the criterion. See :doc:`graphed`.

    The criterion itself is called on other devices; without a gradient; under ``torch.compile`` or
    inside of another graph; with ``gather=True``, ``telemetry``, ``check_finite``, hooks, or
    ``reduction="none"``; for float16; while a memory is new; if a call changes parameters or
    buffers; and for arguments that are no tensors, memories or None, such as lists of ids.

    Args:
        criterion: a loss of this library or of yours, the attribute ``criterion``. It returns a
            0-dim tensor, or one and further tensors without a gradient.
        most: number of kinds that are recorded. Calls of further kinds are the criterion's own.

    Raises:
        RuntimeError: by CUDA, if a call waits for the device; in the backward pass, if
            ``create_graph`` is set.
    """

    _device = "cuda"
    _graph = CUDAGraph

    most: int = option(at_least=0)

    def __init__(self, criterion: nn.Module, most: int = 4):
        super().__init__()
        if not isinstance(criterion, nn.Module):
            raise TypeError(f"criterion: expected a module, got {type(criterion).__name__}")
        self.criterion = criterion
        self.most = most
        # None: calls of a kind are the criterion's own
        self._steps: dict[Hashable, Step | None] = {}

    def __getstate__(self) -> dict[str, object]:
        """Return what is copied: no step, as it reads the parameters of the original."""
        return {**vars(self), "_steps": {}}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the criterion returns."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.criterion(*args, **kwargs)
        given, structure = tree_flatten((args, kwargs))
        inputs = [x for x in given if isinstance(x, Tensor)]
        sources = trained([*inputs, *self.criterion.parameters()])
        kind: Hashable | None = None
        if inputs and sources:
            kind = self._kind(given, structure, inputs[0].device)
        step = self._steps.get(kind)
        if step is not None:
            leaves = Replayed.apply(step, inputs, *sources)
            return tree_unflatten(leaves, step.structure)
        if kind is None or kind in self._steps or len(self._steps) >= self.most:
            return self.criterion(*args, **kwargs)
        modules = [self.criterion, *[x for x in given if isinstance(x, CoupledMemory)]]
        before = versions(modules)
        result = self.criterion(*args, **kwargs)
        if is_loss(result) and versions(modules) == before:
            step = Step(self.criterion, given, structure, result, self._graph)
        self._steps[kind] = step
        return result

    def _kind(
        self, given: Iterable[object], structure: TreeSpec, device: torch.device
    ) -> Hashable | None:
        """Return what decides which kernels run and what they read; None for a call that is not
        recorded.
        """
        if device.type != self._device or is_recorded(device):
            return None
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        # each thread has steps of its own, whose tensors no other one refills
        found: list[Hashable] = [threading.get_ident(), repr(structure), autocast]
        for module in self.criterion.modules():
            found += [options_of(module), *places_of(module)]
        found += [kind_of(x) for x in given]
        return None if None in found else tuple(found)

    def extra_repr(self) -> str:
        """Return the options and the number of recorded steps, for ``repr``."""
        return f"most={self.most}, recorded={len([x for x in self._steps.values() if x])}"


def trained(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return those tensors that get a gradient."""
    return [x for x in tensors if x.requires_grad]


def kind_of(x: object) -> Hashable | None:
    """Return what of an argument or a parameter decides which kernels run; None if these are not
    recorded.
    """
    if x is None:
        return ()
    if isinstance(x, CoupledMemory):
        return None if x.is_new else (id(x), x._labelled, x._named, *places_of(x))
    if not isinstance(x, Tensor) or type(x) not in (Tensor, nn.Parameter):
        return None
    if x.requires_grad and x.dtype == torch.float16:
        return None  # a gradient would be rounded before it is multiplied by a scaler's factor
    return x.shape, x.dtype, x.device, x.requires_grad


def places_of(module: nn.Module) -> list[Hashable | None]:
    """Return the kinds and the addresses of a module's own parameters and buffers."""
    found: list[Hashable | None] = []
    for x in (*module._parameters.values(), *module._buffers.values()):
        kind = kind_of(x)
        found.append((kind, x.data_ptr()) if x is not None and kind is not None else kind)
    return found


def options_of(module: nn.Module) -> str | None:
    """Return the options and the mode of a module, in words; None if its calls are not recorded."""
    state = vars(module)
    if any([state.get(name) for name in _OF_PROCESSES + _OF_THE_HOST]):
        return None
    public = {name: x for name, x in state.items() if not name.startswith("_")}
    has_tensors = any([isinstance(x, Tensor) for x in public.values()])
    return None if has_tensors else repr(public)


def is_loss(result: object) -> bool:
    """Return whether a result is a 0-dim tensor with a gradient, and others without."""
    leaves, _ = tree_flatten(result)
    if not all([isinstance(x, Tensor) and x.is_floating_point() for x in leaves]):
        return False
    loss, *others = leaves
    return loss.dim() == 0 and loss.requires_grad and not trained(others)


def versions(modules: Iterable[nn.Module]) -> list[int]:
    """Return the versions of all parameters and buffers; writing to one gives it another."""
    return [x._version for m in modules for x in (*m.parameters(), *m.buffers())]
