"""Compile the kernels for GPUs that need not be present, and report the resources of each.

Triton's compiler may reject what its interpreter accepts, and kernels that spill registers are very slow.

    python tests/gpu_compiler.py 90 80 100
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


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


def compiled(capability: int) -> list[dict]:
    """Compile the kernels of all answers; return their names, shared memory, registers and spilled bytes per thread."""
    kernels, run, asked = {}, JITFunction.run, ""

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name = f"{self.__name__} {asked}"
        about = name, kernel.metadata.shared, kernel.metadata.num_warps, kernel.asm["cubin"]
        kernels.setdefault(kernel.hash, about)
        return kernel

    driver.set_active(Absent(capability))
    JITFunction.run = compile_only
    from itrloss.engine import triton as engine
    from itrloss.engine.kernels import FORMS

    tiles, engine._is_hopper = engine.PRODUCT_TILES, lambda device: capability == 90
    # All parameters that change the kernels of one answer; all answers for one GPU; and the other tiles.
    variants = [{"shared": shared, "ids": ids} for shared in (True, False) for ids in (True, False)]
    cases = [(tiles[0], "exp", case) for case in (*variants, {"early": True}, {"dim": 200, "size": 999})]
    cases += [(tiles[0], "exp", {"over": "all", "ids": ids}) for ids in (True, False)]
    cases += [(tiles[0], "exp<>", {"shared": shared}) for shared in (True, False)]
    if capability == 90:
        cases += [(tiles[0], key, {}) for key in FORMS if key != "exp"]
        cases += [(tile, "exp", {}) for tile in tiles[1:]]
    cases += [(tiles[0], key, {"dtype": torch.float32}) for key in ("exp", "hinges")]
    for tile, key, case in cases:
        engine.PRODUCT_TILES = (tile,)  # the last tile is chosen on the CPU
        asked = f"{key} {case} {tile.block_m}"
        ask(engine, key, **case)
    return [
        {"name": name, "DYNAMIC": shared, "WARPS": warps, **usage(code)}
        for name, shared, warps, code in kernels.values()
    ]


def ask(
    engine, key, dtype=torch.bfloat16, shared=False, ids=True, early=False, dim=512, size=1024, over="negatives"
) -> None:
    """Call the engine's sums and their gradient; nothing is computed."""
    from itrloss.engine.answers import ANSWERS
    from itrloss.engine.pairs import Pairs
    from itrloss.engine.reduce import Question
    from itrloss.engine.scores import Scores

    ones, numbers = torch.ones(size), torch.arange(size)
    which = (numbers, numbers) if ids else (None, None)
    x = torch.zeros(size, dim, dtype=dtype)
    source, sides = Scores(x, x, ones, ones, *which), (0,) if early else (0, 1)
    name = key.rstrip("<>")
    limits = len(key) - len(name)
    count = 2 if name in ("exp", "exponential", "information", "negative_log_likelihood", "softplus") else 1
    count = 0 if key.startswith(("log1p", "identity")) else count
    params = [torch.ones(1 if shared else len(sides) * size) for _ in range(count)]
    params = [torch.ones(3, len(params[0]))] if key == "hinges" else params
    params += [torch.ones_like(params[0]) for _ in range(limits)]
    question = Question(source, Pairs((size, size), which, x.device), key, over, sides, params)
    engine.sums(question, early)
    if not early and not ANSWERS[key].maximum:
        needs = [name not in ("exp", "moments", "information"), name not in ("exp", "information")][:count]
        needs += [False] * limits
        grad = torch.ones(ANSWERS[key].width, len(sides) * size)
        engine.gradient(question, grad, (True, True, *needs), (*which, ones))


def usage(code: bytes) -> dict[str, int]:
    """Resource usage of a thread or block: REG, STACK, SHARED, ..."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    pairs = (word.split(":") for word in said.split() if word.startswith(("REG:", "STACK:", "LOCAL:", "SHARED:")))
    return {name: int(value) for name, value in pairs}


if __name__ == "__main__":
    # One process for each GPU, as `compiled` changes what is imported, which they share.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(compiled, map(int, sys.argv[1:]), chunksize=1)))
