"""A counter of matrix products."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


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
