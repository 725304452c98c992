"""Whether the kernels work on this machine: what Triton's compiler, the driver and the GPU make of them is not ours."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from ..tiles import Source
from .blocks import blocks


@torch.compiler.assume_constant_result
def works(device: str) -> bool:
    """Whether this engine finds on a CUDA device what the dense one finds, on an example; tried once in a process.

    If not, a warning says why. While a CUDA graph is captured nothing can be tried, and it is taken not to.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not capturing and _works(device)


@functools.cache  # in a function of its own: the compiler would look behind it
def _works(device: str, n: int = 2048, m: int = 2816, d: int = 72) -> bool:
    """The example has as many tiles of the largest kind as the largest GPUs have processors."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(torch.device(device).type, enabled=False):
            wrong = [str(dtype) for dtype in (torch.float32, torch.bfloat16) if not _agree(device, dtype, n, m, d)]
        why = f"finds something else than the dense engine, of {' and of '.join(wrong)}" if wrong else ""
    except Exception as error:  # of a compiler, a driver, a product that a GPU does not have
        why = f"fails: {type(error).__name__}: {error}"
    if why:
        warnings.warn(f"itrloss: the Triton engine {why}; engine='auto' does without it on {device}", stacklevel=2)
    return not why


def _agree(device: str, dtype: torch.dtype, n: int, m: int, d: int) -> bool:
    wanted, got = (_found(engine, device, dtype, n, m, d) for engine in ("dense", "triton"))
    products = next(blocks(Source(*_example(device, dtype, n, m, d), None, None, None, None), formed=True))
    rows, cols = _example(device, dtype, n, m, d)
    some = (rows[: products.size_r].double() @ cols[: products.size_c].double().T).float()
    pairs = zip((*got, products.products), (*wanted, some), strict=True)
    # A gradient is rounded to the dtype, and in it; a kernel that is wrong is not wrong by a percent of it.
    return all(bool((a.float() - b.float()).norm() <= 0.01 * b.float().norm()) for a, b in pairs)


def _example(device: str, dtype: torch.dtype, n: int, m: int, d: int) -> tuple[Tensor, Tensor]:
    """Numbers that need no generator, whose state is the user's."""
    rows, cols = (torch.arange(size * d, dtype=torch.float64).view(size, d) for size in (n, m))
    return (rows * 0.7).sin().to(device, dtype), (cols * 1.3).cos().to(device, dtype)


def _found(engine: str, device: str, dtype: torch.dtype, n: int, m: int, d: int) -> list[Tensor]:
    from ...similarity import Similarity

    leaves = [x.requires_grad_() for x in _example(device, dtype, n, m, d)]
    ids = [torch.arange(size, device=device) % 97 for size in (n, m)]
    values = Similarity(*leaves, *ids, engine=engine).both.logsumexp(20.0)  # type: ignore[arg-type]
    total = sum((x * torch.linspace(0.5, 1.5, len(x), device=device)).sum() for x in values)
    return [x.detach() for x in (*values, *torch.autograd.grad(total, leaves))]  # type: ignore[arg-type]
