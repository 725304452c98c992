"""Matrix products on the CPU by oneDNN or by the BLAS, chosen by a fixed rule: nothing is timed.

Intel's BLAS, which is part of PyTorch's packages for x86, leaves half of the arithmetic units idle
on some AVX-512 processors of other makers. oneDNN, which is part of them too, does not: it gets the
large float32 products there. Gain on an AMD EPYC (Zen 4, 2 cores): 128 x 1024 x 4096 in 0.62 of the
BLAS's time, 2048 x 1024 x 2048 in 0.87. Transposed left factors and strided ones are copied for it.

    pytest benchmarks/test_micro.py --benchmark-enable -k product

``torch.backends.mkldnn.flags(enabled=False)`` leaves all products to the BLAS. Ranks of a job that
run on the same kind of processor make the same choice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..torch_versions import HAS_FP32_PRECISION, cpu_capability, is_compiling
from .vectors import full_precision

# number of multiplications from which oneDNN's overhead of some microseconds does not matter
LARGE = 2**21
_THIN = 16  # with fewer rows or columns, a product is memory-bound
# shapes that oneDNN gets: it caches a megabyte for each, so sizes that always differ go to the BLAS
_SHAPES = 64
_seen: set[tuple[int, ...]] = set()


def rounds_float32(device: torch.device) -> bool:
    """Return whether the process lets a CUDA device round factors of float32 products (TF32)."""
    if device.type != "cuda" or is_compiling():
        return False
    settings = torch.backends.cuda.matmul
    if HAS_FP32_PRECISION:
        return settings.fp32_precision == "tf32"
    return bool(settings.allow_tf32)


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Return a context in which float32 products round no factors, whatever the process allows.

    The setting is the whole process's, and PyTorch has no other: products of other threads take
    longer meanwhile. If two threads are in the context at a time, one may end it for the other.
    """
    if not rounds_float32(device):
        yield
        return
    settings = torch.backends.cuda.matmul
    # The older setting raises an error where it is read after the newer one was written to.
    if HAS_FP32_PRECISION:
        settings.fp32_precision = "ieee"
    else:
        settings.allow_tf32 = False
    try:
        yield
    finally:
        if HAS_FP32_PRECISION:
            settings.fp32_precision = "tf32"
        else:
            settings.allow_tf32 = True


def product(
    a: Tensor,  # (..., n, k)
    b: Tensor,  # (..., k, m)
) -> Tensor:
    """Return ``a @ b`` of matrices, or of batches of the same shape, differentiable: in full
    precision, whatever autocast is on in the forward or in the backward pass.
    """
    if is_compiling():
        with full_precision(a):
            return a @ b
    return Product.apply(a, b)  # type: ignore[return-value]


class Product(torch.autograd.Function):
    """``a @ b``: autograd's own node would multiply in half precision in a backward pass under
    autocast.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(a, b)
        if a.dim() == 2:
            return matmul(a, b)
        with full_precision(a):
            return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of both factors, which are products themselves."""
        (grad,) = grads
        a, b = ctx.saved_tensors
        of_a = product(grad, b.mT) if ctx.needs_input_grad[0] else None
        of_b = product(a.mT, grad) if ctx.needs_input_grad[1] else None
        return of_a, of_b


def matmul(
    a: Tensor,  # (n, k)
    b: Tensor,  # (k, m)
    out: Tensor | None = None,  # (n, m), used where that saves an allocation
) -> Tensor:
    """Return ``a @ b``, without a gradient: in full precision, as autocast leaves operators alone
    that write to a given tensor.
    """
    if _use_onednn(a, b):
        return _onednn(a, b)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    return torch.mm(a, b, out=out)


def vecdot(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) products of rows (n, k) with rows, in full precision as :func:`matmul`."""
    return torch.linalg.vecdot(a, b, out=a.new_empty(a.shape[0]))


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, in full precision as :func:`matmul`."""
    if _use_onednn(a, b):
        total.add_(_onednn(a, b))
    else:
        torch.addmm(total, a, b, out=total)  # a FLOP counter does not know addmm_


def _use_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN is to multiply (n, k) ``a`` with (k, m) ``b``."""
    n, k = a.shape
    m = b.shape[1]
    if n * k * m < LARGE or min(n, m, k) < _THIN or a.device.type != "cpu":
        return False
    if a.dtype != torch.float32 or b.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
        return False
    # a FLOP counter does not know oneDNN's operator
    if torch._C._len_torch_dispatch_stack() or not prefers_onednn():
        return False
    shape = (n, k, m, b.is_contiguous())
    if len(_seen) < _SHAPES:
        _seen.add(shape)
    return shape in _seen


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices by oneDNN."""
    # A transposed left factor, such as a gradient for the columns, is copied: on Zen 5, copy and
    # product take 0.48 of the BLAS's time for 2048 x 512 x 768 (pytest benchmarks/test_micro.py
    # --benchmark-enable -k product). So are strided factors, such as a few dimensions of
    # embeddings, which oneDNN multiplies a thousand times as slowly.
    b = b if b.is_contiguous() or b.T.is_contiguous() else b.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(a.contiguous(), b.T, None, "none", [], "")


@functools.cache
def prefers_onednn() -> bool:
    """Return whether the processor has AVX-512 and is not Intel's, and PyTorch was built with
    oneDNN.
    """
    if not torch.backends.mkldnn.is_available() or cpu_capability() != "AVX512":
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" not in cpuinfo.read_text()
