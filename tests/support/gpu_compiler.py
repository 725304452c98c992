"""Compile the kernels for GPUs that need not be present, and report the resources of each.

Triton's compiler may reject what its interpreter accepts, and kernels that spill registers are very
slow.

    PYTHONPATH=tests python -m support.gpu_compiler 90 80 100
"""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from itrloss.engine import terms
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.kernels import FORMS
from itrloss.engine.pair_scores import ListedPairs
from itrloss.engine.question import Question
from itrloss.engine.relation import Relation
from itrloss.engine.tiled import Needs
from support.cases import pairwise

EXPONENTIAL = terms.exponential
SOFTPLUS = terms.softplus
SIGLIP = {"sides": (0,), "shared": True, "ids": False, "shape": (1024, 768)}
CLIP = {"shared": True, "learnt": True}
# The log-sum-exps of losses, as the options of :func:`ask`.
OF_LOSSES = [
    {**CLIP, "ids": False},  # CLIP and InfoNCE with a learnt temperature
    {**CLIP, "ids": True},
    {**CLIP, "ids": True, "over": "all", "sides": (0,)},  # distillation
    {"shared": True, "ids": False, "shifted": False},  # InfoNCE with a temperature of 1/60 or more
    {"shared": True, "ids": True, "shifted": False},
    {"ids": False, "shifted": False},  # DCL
    {"ids": True, "shifted": False},
    {"sides": (0,), "shifted": False, "total": True},  # M-DCL, with the anchors' gradient
    {"sides": (0,), "shifted": False, "total": True, "ids": False},
    {"limits": 1},  # filtered InfoNCE and multi-similarity
    {"sides": (0,), "learnt": True},  # DCL through its diversities
]
# Standard deviations of negatives' scores: of DCL, M-DCL, and with groups.
OF_MOMENTS = [
    {"ids": False},
    {"sides": (0,)},
    {"relation": "same"},
    {"dtype": torch.float32, "relation": "mask"},
]
# How relations say who may be a negative.
OF_RELATIONS = [
    {**CLIP, "relation": "same"},  # the rule of groups
    {"shared": True, "over": "all", "relation": "other", "shifted": False},
    {"relation": "other", "shifted": False},
    {**CLIP, "relation": "mask"},
    {"shared": True, "over": "all", "relation": "mask", "shifted": False},
    {"relation": "mask", "shifted": False},
    {"asked": SOFTPLUS, "total": True, **SIGLIP, "ids": True, "relation": "same"},
    {"asked": SOFTPLUS, "total": True, **SIGLIP, "ids": True, "relation": "mask"},
    {"asked": terms.excess, "dtype": torch.float32, "relation": "same"},
    {"asked": terms.excess, "dtype": torch.float32, "relation": "mask"},
]


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
    axes["limits"] = [2, 0]
    cases += [
        (gpu, dict(zip(axes, case, strict=True))) for *case, gpu in pairwise(**axes, gpu=gpus)
    ]
    excess = terms.excess
    for gpu in gpus:
        cases += [(gpu, options) for options in OF_LOSSES + OF_RELATIONS]
        cases += [(gpu, {"moments": True, **options}) for options in OF_MOMENTS]
        cases += [
            (gpu, {"asked": excess, "dtype": torch.float32}),
            (gpu, {"asked": SOFTPLUS, "total": True, **SIGLIP}),
        ]
    cases.append((gpus[0], {"asked": SOFTPLUS, "total": True, **SIGLIP, "ids": True}))
    cases.append((gpus[0], {"asked": excess, "total": True, "shared": True}))
    cases.append((gpus[0], {"dtype": torch.float32}))
    cases += [(gpus[0], {"shape": (256, dim)}) for dim in (80, 1000, 16384)]
    for asked in FORMS:
        if asked != EXPONENTIAL:
            cases.append((gpus[0], {"asked": asked}))
    return cases + [(gpus[0], {"tile": tile}) for tile in engine.PRODUCT_TILES[1:]]


def compiled(case: tuple[int, dict]) -> list[dict]:
    """Compile the kernels of an answer; return their names, shared memory, registers and spilled
    bytes per thread, and numbers of instructions.
    """
    (gpu, asked), kernels, run = case, {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = self.__name__, kernel, options.get("C")
        return kernel

    driver.set_active(Absent(gpu))
    JITFunction.run, engine.compute_capability = compile_only, lambda device: gpu // 10
    ask(**asked)
    about = f"{asked.get('asked', EXPONENTIAL).__name__} {asked}"
    found = []
    for name, kernel, config in kernels.values():
        of_kernel = {
            "GPU": gpu,
            "name": f"{name} {about}",
            "DYNAMIC": kernel.metadata.shared,
            "WARPS": kernel.metadata.num_warps,
            "SHARED": config is not None and config.SHARED,
            "IDS": config is not None and config.IDS,
        }
        found.append(of_kernel | resources(kernel.asm["cubin"]))
    return found


def ask(  # noqa: PLR0913 (what a kernel is compiled for, by keyword)
    asked=EXPONENTIAL,
    dtype=torch.bfloat16,
    shared=False,
    ids=True,
    sides=(0, 1),
    shape=(1024, 512),
    over="negatives",
    limits=0,
    learnt=False,
    total=False,
    shifted=True,
    relation=None,
    moments=False,
    tile=engine.PRODUCT_TILES[0],
) -> None:
    """Call the engine's sums and their gradient, or their total; nothing is computed."""
    engine.PRODUCT_TILES = (tile,)  # the last tile is chosen on the CPU
    size, dim = shape
    anchors = len(sides) * size
    which = ids_of(size) if ids else (None, None)
    pairs = Relation((size, size), which, torch.device("cpu"))
    if relation is not None:
        pairs = relation_of(size, relation)
    scale: float | torch.Tensor = torch.ones(1 if shared else anchors)
    if shared and asked == EXPONENTIAL and not learnt:
        scale = 2.5  # an argument of the launch
    shift = None
    if shifted:
        shift = torch.ones(anchors) if asked == terms.excess else scale
    bounds = [scale if k < limits else None for k in range(2)]
    question = Question(asked, pairs, sides, over, scale, shift, *bounds)
    side = Side(torch.zeros(size, dim, dtype=dtype), torch.ones(size, 1), None, None)
    inputs = Inputs(side, side, None)
    if moments:
        engine.inverse_norms(inputs.rows.x)
        engine.pair_scores(inputs, *which)
        engine.moments(question, inputs)
        return
    engine.sums(question, inputs)
    needs = needs_of(asked, learnt, dtype)
    if total:
        engine.sums_and_gradients(question, inputs, 1.0, needs)
        return
    grad = torch.ones(anchors)
    listed = ListedPairs(*which, torch.ones(size))
    engine.gradients(question, inputs, grad, needs, listed)


def needs_of(asked: terms.Term, learnt: bool, dtype: torch.dtype) -> Needs:
    """What gets a gradient: embeddings, and the scale and the shift where they may be learnt."""
    return Needs(
        True,
        True,
        False,
        False,
        scale=learnt or asked == SOFTPLUS,
        shift=asked in (terms.excess, SOFTPLUS),
        dtypes=(dtype, dtype),
    )


def ids_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that differ: equal ones are known to match one to one, and are left out."""
    numbers = torch.arange(size)
    return numbers // 2, numbers // 3


def relation_of(size: int, relation: str) -> Relation:
    """Pairs that need a mask, or that follow a rule of groups."""
    numbers = torch.arange(size)
    device = torch.device("cpu")
    if relation == "mask":
        return Relation((size, size), (numbers[:, None].repeat(1, 2), numbers), device)
    groups = (numbers // 5, numbers // 7)
    return Relation((size, size), ids_of(size), device, groups=groups, rule=relation)


def resources(code: bytes) -> dict[str, int]:
    """Return the usage of a thread or block, and the number of instructions of a thread.

    REG, STACK, LOCAL and AFTER: instructions after the last one of a product of tiles.
    """
    found = {}
    for word in dumped(code, "-res-usage").split():
        if word.startswith(("REG:", "STACK:", "LOCAL:")):
            name, value = word.split(":")
            found[name] = int(value)
    listing = dumped(code, "-sass")
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/(.*)", listing, re.MULTILINE)
    of_products = [k for k, text in enumerate(instructions) if "MMA" in text]
    found["AFTER"] = 0
    if of_products:
        last = of_products[-1]
        found["AFTER"] = len(instructions) - 1 - last
    return found


def dumped(code: bytes, what: str) -> str:
    """Return what NVIDIA's tool says of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), what, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    # A process for each case, as `compiled` changes what is imported, which they share.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = pool.map(compiled, cases_of([*map(int, sys.argv[1:])]), chunksize=1)
        print(json.dumps([kernel for kernels in found for kernel in kernels]))
