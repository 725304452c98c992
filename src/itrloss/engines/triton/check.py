"""Whether the kernels work on this machine: what Triton's compiler, the driver and the GPU make of them is not ours."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..operators import inverse_norms
from ..tiles import Source
from .blocks import blocks

_known: dict[str, bool] = {}


@torch.compiler.assume_constant_result
def works(device: str) -> bool:
    """Whether this engine finds on a CUDA device what the dense one finds, on an example; tried once in a process.

    If not, a warning says why. While a CUDA graph is captured nothing can be tried, and what is not known is taken not
    to work.
    """
    if device not in _known:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        with ThreadPoolExecutor(1) as other:  # where no mode, hook or tracer of the caller's sees the example
            try:
                why = other.submit(_why_not, device).result()
            except torch.OutOfMemoryError:  # which may be otherwise the next time
                return False
        if why:
            warnings.warn(f"itrloss: the Triton engine {why}; engine='auto' does without it on {device}", stacklevel=3)
        _known[device] = not why
    return _known[device]


def _why_not(device: str, n: int = 2048, m: int = 2816, d: int = 80) -> str:
    """Empty if it works. The example has as many tiles of the largest kind as the largest GPUs have processors."""
    try:
        dtypes = torch.float32, torch.bfloat16, torch.float16
        wrong = [str(dtype) for dtype in dtypes if not _agree(device, dtype, n, m, d)]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler, a driver, a product that a GPU does not have
        return f"fails: {type(error).__name__}: {error}"
    return f"finds something else than the dense engine, of {' and of '.join(wrong)}" if wrong else ""


def _agree(device: str, dtype: torch.dtype, n: int, m: int, d: int) -> bool:
    rows, cols = _example(device, dtype, n, m, d)
    wanted, got = (_found(engine, rows, cols) for engine in ("dense", "triton"))
    block = next(blocks(Source(rows, cols, None, None, None, None), formed=True))
    products = rows[: block.size_r].float() @ cols[: block.size_c].float().T
    # Half precision rounds by less than a percent, and all numbers differ from their mean by much more.
    return all(
        bool((a.float() - b.float()).abs().amax() <= 0.02 * (b.float() - b.float().mean()).abs().amax())
        for a, b in zip((*got, block.products), (*wanted, products), strict=True)
    )


def _example(device: str, dtype: torch.dtype, n: int, m: int, d: int) -> tuple[Tensor, Tensor]:
    """Pairs that are alike, of numbers that need no generator: its state is the user's."""
    rows, noise = (torch.arange(size * d, dtype=torch.float64, device="cpu").view(size, d) for size in (n, m))
    rows = (rows * 0.7).sin()
    cols = rows[torch.arange(m, device="cpu") % n] + (noise * 1.3).cos()
    return rows.to(device, dtype), cols.to(device, dtype)


def _found(engine: str, rows: Tensor, cols: Tensor) -> list[Tensor]:
    from ...similarity import Similarity

    leaves = [x.detach().requires_grad_() for x in (rows, cols)]
    ids = [torch.arange(len(x), device=x.device) % 97 for x in leaves]
    values = Similarity(*leaves, *ids, engine=engine).both.logsumexp(20.0)  # type: ignore[arg-type]
    keys = torch.nn.functional.normalize(cols.float(), dim=1).to(cols.dtype)
    count, lengths = torch.tensor(len(keys), device="cpu"), (inverse_norms(rows), None)
    memory = Similarity._of(leaves[0], keys, (ids[0], ids[1]), lengths, engine, count)
    values = *values, memory.logsumexp(200.0)
    given = [torch.linspace(0.5, 1.5, len(x), device=x.device) for x in values]
    by_pairs = torch.autograd.grad(values[:2], leaves, given[:2])
    by_memory = torch.autograd.grad(values[2], leaves[0], given[2])
    return [x.detach() for x in (*values, *by_pairs, *by_memory)]
