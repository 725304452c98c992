"""Steps: what the machine is, whether the engine works on it, and whether it is right."""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
import warnings
from datetime import date
from importlib import metadata

import torch
from torch import Tensor, nn

import itrloss
from itrloss import Similarity

from ..sources import code_digest, commit, output
from .losses import DTYPES, LOSSES
from .session import Session, gflops

HALF = torch.bfloat16
CLOCKS = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"

# Of gradients, by the dtype of the embeddings: a gradient is rounded to it once, and the scores'
# gradient once before. In float32 a score times 100 in an exponent is off by 100 roundings.
BOUNDS = {dtype: 2 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
BOUNDS[torch.float32] = 1e-4
# As trainers scale losses: gradients of float16 below 6e-5 lose digits, those above 65504 are lost.
LOSS_SCALE = 512.0


# ------------------------------------------------------------------------------------- the machine


def machine(session: Session) -> None:
    """Write versions and the device's properties; time copies and bare products."""
    session.say(**versions(), **device(session))
    if shutil.which("nvidia-smi") is not None:
        session.say(**{"nvidia-smi": asked_of_driver(CLOCKS)})
    with session.attempt(loss="copy"):
        copy(session)
    for dim in session.pick((512, 768, 1024, 4096), (32,)):
        with session.attempt(loss="bare product"):
            product(session, dim)


def versions() -> dict[str, str | None]:
    """Return the versions of what computes, and the date."""
    return {
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "driver": asked_of_driver("driver_version") or None,
        "python": platform.python_version(),
        "itrloss": itrloss.__version__,
        "commit": commit() or None,
        "engine": code_digest(),
        "date": date.today().isoformat(),
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device(session: Session) -> dict[str, object]:
    """Return the device's name and properties."""
    if session.device.type != "cuda":
        return {"device": platform.processor() or platform.machine(), "capability": None}
    about = torch.cuda.get_device_properties(0)
    return {
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory GB": round(about.total_memory / 1e9, 1),
        "processors": os.cpu_count(),
    }


def asked_of_driver(query: str) -> str:
    """Return what nvidia-smi says of the first GPU, "" without it."""
    return output("nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader")


def copy(session: Session) -> None:
    """Time a copy in the device's memory."""
    size = session.pick(2**31, 2**10)
    x = torch.empty(size, dtype=torch.uint8, device=session.device)
    y = torch.empty_like(x)
    row = session.timed(lambda: y.copy_(x))
    session.say(loss="copy", **{"GB/s": round(2 * size / row["seconds"] / 1e9)}, **row)


def product(session: Session, dim: int) -> None:
    """Time a product (N, D) x (D, N) of bfloat16, which is what scores cost at least."""
    n = session.pick(16384, 32)
    a = torch.randn(n, dim, device=session.device, dtype=HALF)
    b = torch.randn(n, dim, device=session.device, dtype=HALF)
    out = torch.empty(n, n, device=session.device, dtype=HALF)
    row = session.timed(lambda: torch.mm(a, b.T, out=out))
    about = {"loss": "bare product", "shape": [n, n, dim], "dtype": "bfloat16", "variant": "torch"}
    session.say(**about, gflops=gflops(2 * n * n * dim, row), **row)


# ------------------------------------------------------------------------------------ does it work?


def works(session: Session) -> None:
    """Make a first step in each dtype: it runs, its seconds are those of compiling.

    The figures also say which engine "auto" would take for it, and what is warned of.
    """
    n, dim = session.pick((2048, 512), (20, 16))
    for name, dtype in DTYPES.items():
        about = {"loss": "infonce learnable", "shape": [n, n, dim], "dtype": name}
        if session.is_late(**about):
            return
        with session.attempt(**about), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            v, w = session.pair(n, n, dim, dtype)
            start = time.perf_counter()
            found = results(LOSSES["infonce learnable"](engine="triton"), [v, w], {})
            session.synchronize()
            seconds = round(time.perf_counter() - start, 2)
            if not all(bool(x.isfinite().all()) for x in found):
                raise ArithmeticError("a value or a gradient is not finite")
            auto = Similarity(v, w).engine
            warned = sorted({str(x.message)[:600] for x in seen if "itrloss" in str(x.message)})
            session.say(**about, seconds=seconds, auto=auto, warnings=warned)


# ------------------------------------------------------------------------------------ is it right?

# Images, texts, dimensions, and what says who matches: large tiles, ragged ends on every axis, and
# hardly a tile.
SHAPES = (
    (4096, 4096, 512, "rows"),
    (2053, 4099, 200, "ids"),
    (2053, 4099, 200, "groups"),
    (2053, 4099, 200, "label sets"),
    (2048, 2048, 1024, "rows"),
    (1, 300, 64, "ids"),
    (300, 1, 64, "ids"),
    (129, 129, 17, "rows"),
)
TOY_SHAPES = (
    (20, 20, 16, "rows"),
    (12, 36, 20, "ids"),
    (9, 18, 16, "groups"),
    (9, 18, 16, "label sets"),
)


def correct(session: Session) -> None:
    """Compare losses with float64 on the same device, at the tile sizes of production.

    Memory that is not written is full of nan, and a second run has to give the same bits. A part
    is a loss and a dtype.
    """
    assert session.part is not None
    loss, dtype = session.part.split(", ")
    for n, m, dim, who in session.pick(SHAPES, TOY_SHAPES):
        about = {"loss": loss, "shape": [n, m, dim], "dtype": dtype, "who": who}
        if session.is_late(**about):
            session.failed = True  # what was not compared is not right
            return
        with session.attempt(**about):
            row = compared(session, loss, (n, m, dim), DTYPES[dtype], who)
            session.say(**about, **row)
            if not row["right"]:
                raise ArithmeticError(f"off by {row['errors']}: more than {row['bounds']}")


def compared(
    session: Session, loss: str, shape: tuple[int, int, int], dtype: torch.dtype, who: str
) -> dict[str, object]:
    """Return relative errors of the value, both gradients and the parameters' gradients."""
    n, m, dim = shape
    v, w = session.pair(n, m, dim, dtype)
    matching = who_matches(who, n, m, v.device)
    exact_leaves = [x.detach().double().requires_grad_() for x in (v, w)]
    exact = results(LOSSES[loss](engine="dense").double(), exact_leaves, matching)
    first, second = (without_fallback(session, loss, [v, w], matching) for _ in range(2))
    errors = [error(first[0], exact[0], least=1.0)]  # a loss can be a difference near 0
    errors += [error(a, b) for a, b in zip(first[1:], exact[1:], strict=True)]
    bounds = [BOUNDS[torch.float32]] + [BOUNDS[dtype]] * (len(errors) - 1)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    within = all(a <= b for a, b in zip(errors, bounds, strict=True))  # nan is not
    return {"errors": errors, "bounds": bounds, "same bits": same, "right": same and within}


def who_matches(who: str, n: int, m: int, device: torch.device) -> dict[str, Tensor]:
    """Return arguments of a loss that say who matches: none for row i with column i.

    Kernels compare ids and groups, and read a mask for sets of labels.
    """
    if who == "rows":
        return {}
    image_ids = torch.arange(n, device=device)
    # Some texts have no image, and a single image has negatives, too.
    text_ids = torch.arange(m, device=device) * (n + 1) // m
    if who == "label sets":
        image_ids = torch.stack([image_ids, image_ids + 2], 1)
        text_ids = text_ids[:, None]
    found = {"image_ids": image_ids, "text_ids": text_ids}
    if who == "groups":
        found["image_groups"] = image_ids % 3
        found["text_groups"] = text_ids % 3
    return found


def without_fallback(
    session: Session, loss: str, leaves: list[Tensor], matching: dict[str, Tensor]
) -> list[Tensor]:
    """Return a loss and its gradients on the Triton engine; a warning of the library is an error.

    It could say that another engine stands in.
    """
    poison(session)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "itrloss")
        return results(LOSSES[loss](engine="triton"), leaves, matching)


def results(loss: nn.Module, leaves: list[Tensor], matching: dict[str, Tensor]) -> list[Tensor]:
    """Return a loss and its gradients with respect to the leaves and to its parameters."""
    loss = loss.to(leaves[0].device)
    value = LOSS_SCALE * loss(*leaves, **matching)
    gradients = torch.autograd.grad(value, (*leaves, *loss.parameters()))
    return [value.detach() / LOSS_SCALE, *gradients]


def error(found: Tensor, exact: Tensor, least: float = 1e-300) -> float:
    """Return the distance from the exact result, relative to its length or to the least one."""
    gap = (found.double() - exact).norm() / exact.norm().clamp_min(least)
    return float(f"{float(gap):.2g}")


def poison(session: Session) -> None:
    """Fill memory that the allocator hands out next with nan."""
    for size in session.pick((2**26, 2**20, 2**16), (2**10,)):
        torch.full((size,), math.nan, device=session.device)


STEPS = {"machine": machine, "works": works, "correct": correct}
