"""Compiles the kernels for GPUs that need not be there, and says what each takes: what the interpreter accepts need not
be accepted by Triton's compiler, and a kernel whose values do not fit into registers would crawl.

    python tests/gpu_compiler.py 90
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED = {80: 163 * 2**10, 90: 227 * 2**10}  # bytes that a program may have


class Absent:
    """What Triton asks of a GPU before it compiles for one."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compiled(capability: int) -> list[dict]:
    """The kernels that losses and metrics launch: name, shared memory, registers and a thread's bytes beside them."""
    kernels, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = self.__name__, kernel.metadata.shared, kernel.asm["cubin"]
        return kernel

    torch.empty = torch.zeros  # whose is the hardest, say, is not computed, and must exist
    driver.set_active(Absent(capability))
    JITFunction.run = compile_only
    from itrloss.engines.triton import blocks, passes  # noqa: F401  # the kernels are made when they are imported

    os.environ["TRITON_INTERPRET"] = "1"  # read as "embeddings may be on the CPU": the kernels are there already
    for dtype in (torch.float32, torch.float16):
        for ids in (False, True):
            launch(dtype, ids)
    for cut in blocks.MULTIPLYING:
        if cut.memory <= SHARED[capability]:
            blocks.MULTIPLYING = (cut,)
            for ids in (False, True):
                launch(torch.bfloat16, ids)
    return [{"name": name, "DYNAMIC": shared, **usage(code)} for name, shared, code in kernels.values()]


def launch(dtype: torch.dtype, with_ids: bool) -> None:
    """Call the kernels with all kinds of arguments; nothing is computed."""
    from test_triton import LOSSES

    import itrloss

    n, m, d = 96, 160 if with_ids else 96, 32
    images, texts = (torch.randn(size, d).to(dtype).requires_grad_() for size in (n, m))
    ids = (torch.arange(n) // 2, torch.arange(m) // 5) if with_ids else ()
    for loss in LOSSES.values():
        loss("triton")(images, texts, *ids).backward()
    memory = itrloss.CoupledMemory(100, d, dtype=dtype)
    memory.enqueue(torch.randn(100, d), torch.randn(100, d))
    for loss in (itrloss.MemoryDiversityContrastiveLoss, itrloss.UnifiedTrainingObjective):
        loss(engine="triton")(images, images, images.detach(), images.detach(), memory).backward()
    sim = itrloss.Similarity(images, texts, *ids, engine="triton")
    sim.hardest()
    for ties in ("optimistic", "pessimistic"):
        sim.ranks(ties=ties)
        sim.ranks(torch.zeros(m), ties=ties)


def usage(code: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, ...: what one thread or block takes."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    pairs = (word.split(":") for word in said.split() if word.startswith(("REG:", "STACK:", "LOCAL:", "SHARED:")))
    return {name: int(value) for name, value in pairs}


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]))))
