"""What a step costs: its products, what its operators return, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from itrloss.torch_versions import untyped_storage


class Products(TorchDispatchMode):
    """Counter of the FLOPs of matrix products."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        factors = {"mm": args[:2], "addmm": args[1:3], "addmm_": args[1:3]}.get(name)
        if name == "_linear_pointwise":
            factors = args[0], args[1].T
        if factors:
            self.flops += 2 * factors[0].numel() * factors[1].shape[1]
        return function(*args, **(kwargs or {}))


class Sizes(TorchDispatchMode):
    """Notes the numbers of elements that operators return."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sizes += [x.numel() for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        return result


def saved_bytes(step: Callable[[], Tensor], given: Iterable[Tensor | None] = ()) -> list[int]:
    """Return the size of each storage that autograd keeps for the backward pass of a step, without
    those of given tensors.
    """
    seen = {}

    def pack(x: Tensor) -> Tensor:
        seen[untyped_storage(x).data_ptr()] = untyped_storage(x).nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = step()
    assert value.requires_grad
    for x in given:
        if x is not None:
            seen.pop(untyped_storage(x).data_ptr(), None)
    return [*seen.values()]
