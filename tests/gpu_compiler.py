"""Compile the kernels for GPUs that need not be present, and report the resources of each.

Triton's compiler may reject what its interpreter accepts, and kernels that spill registers are very
slow.

    python tests/gpu_compiler.py 90 80 100
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from cases import pairwise
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from itrloss.engine import triton as engine
from itrloss.engine.terms import ANSWERS
from itrloss.engine.kernels import FORMS
from itrloss.engine.pairs import Pairs
from itrloss.engine.reduce import Question
from itrloss.engine.vectors import Scores


class Absent:
    """Driver that provides the properties of a GPU that Triton needs for compilation."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def cases_of(gpus: Sequence[int]) -> list[tuple[int, dict]]:
    """Return all that is compiled: GPUs, and arguments of :func:`ask`.

    Any two values of the parameters that change one answer's kernels meet, and each meets each GPU;
    all GPUs also get the other kinds of kernels. The first GPU gets all other answers and tiles,
    and more of the most frequent answer.
    """
    axes = {"over": ["negatives", "all"], "shared": [True, False], "ids": [True, False]}
    cases = [(gpus[0], dict(zip(axes, case, strict=True))) for case in pairwise(**axes)]
    axes["shape"] = [(1024, 512), (999, 200)]
    axes["key"] = ["exp<>", "exp"]
    cases += [
        (gpu, dict(zip(axes, case, strict=True))) for *case, gpu in pairwise(**axes, gpu=gpus)
    ]
    for gpu in gpus:
        cases += [(gpu, {"early": True}), (gpu, {"key": "hinges", "dtype": torch.float32})]
    cases += [
        (gpus[0], case)
        for case in ({"dtype": torch.float32}, *({"key": key} for key in FORMS if key != "exp"))
    ]
    return cases + [(gpus[0], {"tile": tile}) for tile in engine.PRODUCT_TILES[1:]]


def compiled(case: tuple[int, dict]) -> list[dict]:
    """Compile the kernels of an answer; return their names, shared memory, registers and spilled
    bytes per thread.
    """
    (gpu, asked), kernels, run = case, {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = self.__name__, kernel
        return kernel

    driver.set_active(Absent(gpu))
    JITFunction.run, engine._is_hopper = compile_only, lambda device: gpu == 90
    ask(**asked)
    about = f"{asked.get('key', 'exp')} {asked}"
    return [
        {
            "GPU": gpu,
            "name": f"{name} {about}",
            "DYNAMIC": kernel.metadata.shared,
            "WARPS": kernel.metadata.num_warps,
            **usage(kernel.asm["cubin"]),
        }
        for name, kernel in kernels.values()
    ]


def ask(
    key="exp",
    dtype=torch.bfloat16,
    shared=False,
    ids=True,
    early=False,
    shape=(1024, 512),
    over="negatives",
    tile=engine.PRODUCT_TILES[0],
) -> None:
    """Call the engine's sums and their gradient; nothing is computed."""
    engine.PRODUCT_TILES = (tile,)  # the last tile is chosen on the CPU
    size, dim = shape
    ones, numbers = torch.ones(size), torch.arange(size)
    which = (numbers, numbers) if ids else (None, None)
    x = torch.zeros(size, dim, dtype=dtype)
    source, sides = Scores(x, x, ones, ones, *which), (0,) if early else (0, 1)
    name = key.rstrip("<>")
    limits = len(key) - len(name)
    count = (
        2
        if name in ("exp", "exponential", "information", "negative_log_likelihood", "softplus")
        else 1
    )
    count = 0 if key.startswith(("log1p", "identity")) else count
    params = [torch.ones(1 if shared else len(sides) * size) for _ in range(count)]
    params = [torch.ones(3, len(params[0]))] if key == "hinges" else params
    params += [torch.ones_like(params[0]) for _ in range(limits)]
    question = Question(source, Pairs((size, size), which, x.device), key, over, sides, params)
    engine.sums(question, early)
    if not early and not ANSWERS[key].maximum:
        needs = [name not in ("exp", "moments", "information"), name not in ("exp", "information")][
            :count
        ]
        needs += [False] * limits
        grad = torch.ones(ANSWERS[key].width, len(sides) * size)
        engine.gradient(question, grad, (True, True, *needs), (*which, ones))


def usage(code: bytes) -> dict[str, int]:
    """Resource usage of a thread or block: REG, STACK, SHARED, ..."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    pairs = (
        word.split(":")
        for word in said.split()
        if word.startswith(("REG:", "STACK:", "LOCAL:", "SHARED:"))
    )
    return {name: int(value) for name, value in pairs}


if __name__ == "__main__":
    # A process for each case, as `compiled` changes what is imported, which they share.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = pool.map(compiled, cases_of([*map(int, sys.argv[1:])]), chunksize=1)
        print(json.dumps([kernel for kernels in found for kernel in kernels]))
