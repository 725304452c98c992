"""A step of a loss that is recorded once, and then replayed without the work of the host."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..checks import CheckedModule, option
from ..engine.devices import is_recorded, recording
from ..engine.vectors import version_of
from ..memory import CoupledMemory
from ..torch_versions import get_autocast_dtype, is_autocast_enabled, is_compiling, require_version

__all__ = ["Graphed"]

_WARM_UPS = 3  # calls before a capture: they compile, choose and allocate what a capture must not
_MOST_REFUSED = 64  # kinds of calls that are known not to be recorded, until they are forgotten
# Attributes that lead to what no graph holds: exchanges, and what the host reads, keeps or runs in
# each call. ``_observed`` is telemetry.
_NOT_RECORDED = (
    "gather",
    "process_group",
    "_observed",
    "check_finite",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = bool, int, float, str, type(None), torch.dtype, torch.device


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
        criterion: a copy of the loss, see :func:`copied`. Its parameters and buffers, and memories,
            are read where they are.
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
        self._criterion = criterion
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
        with torch.autocast(kind, enabled=is_autocast_enabled(kind), cache_enabled=False):
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

    The criterion itself is called on other devices; without a gradient; under ``torch.compile``,
    with hooks of saved tensors, or inside of another graph; with ``gather=True``, ``telemetry``,
    ``check_finite``, hooks, or ``reduction="none"``; for float16; while a memory is new; if a call
    changes the criterion; and for arguments that are no tensors, memories or None, such as lists of
    ids. So is one that holds more than parameters, buffers, modules, numbers and words.

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
        require_version("Graphed", 2, 8)
        if not isinstance(criterion, nn.Module):
            raise TypeError(f"criterion: expected a module, got {type(criterion).__name__}")
        self.criterion = criterion
        self.most = most
        self._steps: dict[Hashable, Step] = {}
        self._refused: set[Hashable] = set()  # kinds whose calls are the criterion's own

    def __getstate__(self) -> dict[str, object]:
        """Return what is copied: no step, as it reads the parameters of the original."""
        return {**vars(self), "_steps": {}, "_refused": set()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the criterion returns."""
        if is_compiling() or not torch.is_grad_enabled() or has_saved_tensor_hooks():
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
        if kind is None or kind in self._refused or len(self._steps) >= self.most:
            return self.criterion(*args, **kwargs)
        return self._first(kind, given, structure, sources)

    def _first(
        self, kind: Hashable, given: list[Any], structure: TreeSpec, sources: list[Tensor]
    ) -> object:
        """Return what the criterion returns for the first call of a kind, and record its step."""
        inputs = [x for x in given if isinstance(x, Tensor)]
        modules = [self.criterion, *[x for x in given if isinstance(x, CoupledMemory)]]
        before = versions(modules)
        args, kwargs = tree_unflatten(given, structure)
        result = self.criterion(*args, **kwargs)
        is_changed = versions(modules) != before
        is_changed = is_changed or self._kind(given, structure, inputs[0].device) != kind
        if len(self._refused) >= _MOST_REFUSED:
            self._refused.clear()
        self._refused.add(kind)  # unless it is recorded without an error
        if is_changed or not is_loss(result) or trains_others(result, inputs, sources):
            return result
        step = self._recorded(given, structure, result)
        if step is not None:
            self._steps[kind] = step
            self._refused.remove(kind)
        return result

    def _recorded(
        self, given: Iterable[object], structure: TreeSpec, result: object
    ) -> Step | None:
        """Return the step of a call with its result; None if it cannot be recorded."""
        criterion = copied(self.criterion)
        if criterion is None:
            return None
        buffers = list(self.criterion.buffers())
        kept = [x.clone() for x in buffers]
        before = versions([self.criterion])
        try:
            step = Step(criterion, given, structure, result, self._graph)
        except ValueError:  # what the host does not read may be wrong input
            return None
        if versions([self.criterion]) == before:
            return step
        with torch.no_grad():
            for x, own in zip(buffers, kept, strict=True):
                x.copy_(own)
        return None

    def _kind(
        self, given: Iterable[object], structure: TreeSpec, device: torch.device
    ) -> Hashable | None:
        """Return what decides which kernels run and what they read; None for a call that is not
        recorded.
        """
        if device.type != self._device or is_recorded(device):
            return None
        autocast = is_autocast_enabled(device.type) and get_autocast_dtype(device.type)
        if autocast is torch.float16:
            return None  # as for embeddings in float16
        # each thread and stream has steps of its own, whose tensors no other one refills
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        found: list[Hashable] = [threading.get_ident(), stream, repr(structure), autocast]
        for _, module in self.criterion.named_modules(remove_duplicate=False):
            found += [id(module), type(module), state_of(module), *places_of(module, device)]
        found += [kind_of(x) for x in given]
        return None if None in found else tuple(found)

    def extra_repr(self) -> str:
        """Return the options and the number of recorded steps, for ``repr``."""
        return f"most={self.most}, recorded={len(self._steps)}"


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
        if x.is_new:
            return None
        found = id(x), type(x), x._labelled, x._named, state_of(x), *places_of(x, x.images.device)
        return None if None in found[4:] else found
    if not isinstance(x, Tensor) or type(x) not in (Tensor, nn.Parameter):
        return None
    if x.requires_grad and x.dtype == torch.float16:
        return None  # a gradient would be rounded before it is multiplied by a scaler's factor
    return x.shape, x.dtype, x.device, x.requires_grad


def places_of(module: nn.Module, device: torch.device) -> list[Hashable | None]:
    """Return what of a module's own parameters and buffers decides what is computed; None for those
    that a graph of the device does not read where they are.
    """
    found: list[Hashable | None] = []
    for x in (*module._parameters.values(), *module._buffers.values()):
        kind = kind_of(x)
        if x is not None and kind is not None:
            kind = (id(x), kind, x.data_ptr(), x.stride()) if x.device == device else None
        found.append(kind)
    return found


def state_of(module: nn.Module) -> Hashable | None:
    """Return the options, the mode and other numbers and words of a module; None if there is more,
    which may change unnoticed, or if its calls are not recorded.
    """
    counters = counters_of(type(module))
    found: list[Hashable] = []
    for name, x in vars(module).items():
        if name in _NOT_RECORDED and x:
            return None
        if name in _OF_MODULES or (name[0] == "_" and (counters is None or name in counters)):
            continue
        if type(x) in _PLAIN:
            found.append((name, x))
        elif type(x) in (list, tuple) and all([type(y) in _PLAIN for y in x]):
            found.append((name, tuple(x)))
        elif type(x) is not dict or x:  # telemetry is an empty one
            return None
    return tuple(found)


@functools.cache
def counters_of(kind: type[nn.Module]) -> frozenset[str] | None:
    """Return the private attributes that a subclass of this library's losses has from them, none of
    which decides what is computed; None for the library's own classes: all.
    """
    if issubclass(kind, Graphed) or kind.__module__.startswith("itrloss."):
        return None
    bases = [base for base in kind.__mro__ if base.__module__.startswith("itrloss.")]
    return frozenset([name for base in bases for name in vars(base)])


def has_saved_tensor_hooks() -> bool:
    """Return whether what autograd saves goes elsewhere, as in a checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks is not None


def copied(criterion: nn.Module) -> nn.Module | None:
    """Return a copy of a criterion that reads the same parameters and buffers; None for one that
    cannot be copied.
    """
    # Other parameters of the same memory: what accumulates the gradients of the criterion's belongs
    # to another stream, which a capture cannot wait for.
    shared: dict[int, Tensor] = {id(x): x for x in criterion.buffers()}
    for p in criterion.parameters():
        shared[id(p)] = nn.Parameter(p.detach(), p.requires_grad)
    try:
        return copy.deepcopy(criterion, shared)
    except (RuntimeError, TypeError):  # a tensor with a graph, a lock
        return None


def trains_others(result: object, inputs: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Return whether a loss has a gradient of other tensors than its inputs and ``sources``."""
    known = {id(x) for x in sources}
    seen: set[Any] = {x.grad_fn for x in inputs}  # what they are computed from is not looked at
    nodes: list[Any] = [tree_flatten(result)[0][0].grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", sources[0])) not in known:
            return True
        nodes += [before for before, _ in node.next_functions]
    return False


def is_loss(result: object) -> bool:
    """Return whether a result is a 0-dim tensor with a gradient, and others without."""
    leaves, _ = tree_flatten(result)
    are_numbers = [isinstance(x, Tensor) and x.is_floating_point() for x in leaves]
    if not leaves or not all(are_numbers):
        return False
    loss, *others = leaves
    return loss.dim() == 0 and loss.requires_grad and not trained(others)


def versions(modules: Iterable[nn.Module]) -> list[int | None]:
    """Return the versions of all parameters and buffers; writing to one gives it another."""
    return [version_of(x) for m in modules for x in (*m.parameters(), *m.buffers())]
