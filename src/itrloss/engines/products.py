"""Matrix products on the CPU by the faster of PyTorch's two libraries for them.

``torch.mm`` asks a BLAS. Intel's, which PyTorch's packages for x86 come with, leaves half of the arithmetic units of
other makers' processors with AVX-512 idle; oneDNN, which comes with them too, does not. Which one is faster is measured
once in a process, when the first large product is asked for.
``torch.backends.mkldnn.flags(enabled=False)`` leaves all products to the BLAS.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

_LARGE = 2**21  # multiplications, from which on oneDNN's overhead of some microseconds does not matter
_NARROW, _SHALLOW = 16, 32  # fewer rows or columns, or summands, and a product is bound by memory
_SHAPES = 64  # of products that oneDNN is asked for
_shapes: set[tuple[int, int, int, bool, bool]] = set()
_MARGIN = 1.25  # between equally fast libraries the choice should not hang on noise


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b``, contiguous; written to ``out`` only if that is for free, so that the result is what is returned."""
    if _by_onednn(a, b):
        return _onednn(a, b).contiguous()
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    # A first factor without contiguous rows is copied; a transposed result costs whoever reads it about half as much.
    as_it_is = 0 if a.stride(1) == 1 else a.numel()
    transposed = (0 if b.stride(0) == 1 else b.numel()) + a.shape[0] * b.shape[1] // 2
    return _linear(a, b.T) if as_it_is <= transposed else _linear(b.T, a).T


def add_matmul_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """``into += a @ b``."""
    if _by_onednn(a, b):
        into.add_(_onednn(a, b))
    else:
        into.addmm_(a, b)


def _by_onednn(a: Tensor, b: Tensor) -> bool:
    (n, k), m = a.shape, b.shape[1]
    return (
        not torch.compiler.is_compiling()
        and n * k * m >= _LARGE
        and a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and n >= _NARROW
        and m >= _NARROW
        and k >= _SHALLOW
        and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))  # it has no backward pass
        and torch.backends.mkldnn.enabled
        and onednn_is_faster()
        and _known((n, k, m, a.stride(1) == 1, b.stride(1) == 1))
    )


def _known(shape: tuple[int, int, int, bool, bool]) -> bool:
    """oneDNN keeps a megabyte for every shape that it has seen; sizes that are always others are the BLAS's."""
    if shape not in _shapes and len(_shapes) < _SHAPES:
        _shapes.add(shape)
    return shape in _shapes


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` by oneDNN, in float32: the operator that ``torch.compile`` makes of a linear layer."""
    (n, k), (down, right) = weight.shape, weight.stride()
    if not ((right == 1 and down >= k) or (down == 1 and right >= n)):  # such as windows that overlap
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


@torch.compiler.assume_constant_result
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies matrices at least 1.25 times as fast as the BLAS does, as measured here."""
    return _measured()


@functools.cache  # in a function of its own: the compiler would look behind it, and time what it cannot run
def _measured() -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        a, b = (torch.ones(n, 512, dtype=torch.float32, device="cpu") for n in (256, 512))
        blas, onednn = _least_seconds(lambda: a @ b.T, lambda: _linear(a, b))
    return blas > _MARGIN * onednn


def _least_seconds(*products: Callable[[], Tensor], repeats: int = 6) -> list[float]:
    """Of each, over interleaved repeats: whatever else the machine does only adds to it."""
    found = [float("inf") for _ in products]
    for _ in range(repeats):
        for i, product in enumerate(products):
            start = time.perf_counter()
            product()
            found[i] = min(found[i], time.perf_counter() - start)
    return found
