"""Kernels that a step launches on a GPU, counted on any machine: ``python -m benchmarks.launches
--loss mdcl``.

In eager mode these are the operators that do more than a view or an allocation, counted on tensors
without data. Compiled code is generated for a GPU and counted, but not run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
from torch import Tensor
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import LOSSES, Case, module, parse_shape, problem

# Operators that launch nothing, besides views, whose schemas say so.
FREE = {
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
}
VARIANTS = "eager", "ours", "eager compiled", "ours compiled"


class Operators(TorchDispatchMode):
    """Counter of the operators that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func._schema.name.removeprefix("aten::") in FREE)
        return func(*args, **(kwargs or {}))


class NotCompiled:
    """A Triton kernel that does nothing."""

    def run(self, *args: Any, **options: Any) -> None: ...


def step(case: Case, variant: str) -> Callable[[], Tensor]:
    """Return a function that returns the loss of a case."""
    inputs = problem(case)
    if variant.startswith("eager"):
        plain = LOSSES[case.loss].plain
        function = torch.compile(plain, fullgraph=True) if "compiled" in variant else plain
        return lambda: function(*inputs.leaves, *inputs.plain_arguments)
    criterion = module(case, inputs, "auto")
    if "compiled" in variant:
        criterion = torch.compile(criterion, fullgraph=True)
    return lambda: criterion(*inputs.leaves, *inputs.arguments)


def generated(call: Callable[[], Tensor]) -> list[int]:
    """Return the launches of compiled code, forward and backward."""
    counts, codegen = [], GraphLowering.codegen

    def counted(self: Any) -> Any:
        result = codegen(self)
        body = result[0].value.split("def call(")[1]
        counts.append(len(re.findall(r"\.run\(|extern_kernels\.\w+\(|torch\.ops\.\w+\.\w+", body)))
        return result

    with (
        mock.patch.object(GraphLowering, "codegen", counted),
        mock.patch.object(AsyncCompile, "triton", lambda self, *args, **options: NotCompiled()),
        mock.patch.object(torch.utils._triton, "triton_hash_with_backend", lambda: "no GPU"),
        config.patch(cpu_backend="triton", compile_threads=1, force_disable_caches=True),
    ):
        call().backward()
    return counts


def launches(case: Case, variant: str) -> tuple[int, int]:
    """Return the numbers of launches of the forward and the backward pass."""
    if "compiled" in variant:
        forward, backward = generated(step(case, variant))
        return forward, backward
    call = step(Case(case.loss, case.shape, case.dtype, "meta"), variant)
    call().backward()  # the first call fills caches
    with Operators() as operators:
        value = call()
        forward = operators.count
        value.backward()
    return forward, operators.count - forward


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", choices=LOSSES, default="mdcl")
    parser.add_argument("--shape", default="128x4096x1024")
    args = parser.parse_args()
    case = Case(args.loss, parse_shape(args.shape, LOSSES[args.loss].kind))
    for variant in VARIANTS:
        forward, backward = launches(case, variant)
        counts = f"{forward:4} forward {backward:4} backward {forward + backward:4} in all"
        print(f"{case} {variant:14} {counts}", flush=True)


if __name__ == "__main__":
    main()
