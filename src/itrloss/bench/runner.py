"""Runs the variants of a case in turn, and says how long they take, how much memory, and how exact they are.

Machines are noisy, most of all shared ones. The variants of a case run round after round in one process, and each time
another one begins; a round's times are divided by each other, and the medians of these ratios are reported. Compiled
code meets ours in rounds of its own, so that the threads it leaves spinning disturb no other variant.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import itrloss

from ..engines.dispatch import ENGINES
from . import cases
from .cases import LOSSES, Case, Problem
from .peers import PEERS, Unavailable

VARIANTS = {
    "ours": "the engine that 'auto' chooses",
    **{f"ours {engine}": f"engine={engine!r}" for engine in ENGINES},
    "ours compiled": "ours under torch.compile",
    "eager": "the loss in plain PyTorch; for half precision under autocast",
    "eager compiled": "that under torch.compile",
    "floor": "the matrix products that cannot be left out, and nothing else",
    "peers": "all other libraries that have this loss",
}
LEAST, MOST = 3, 200  # rounds
Step = Callable[[], None]  # forward and backward
Row = dict[str, Any]


def measure(
    case: Case, variants: Sequence[str], seconds: float = 10, accuracy: bool = False, memory: bool = True
) -> list[Row]:
    """One row per variant; ``"ours"`` is always among them. A variant that cannot run has a row that says why.

    Args:
        variants: names of ``VARIANTS`` and of ``itrloss.bench.peers.PEERS``.
        seconds: about how long to measure. Every variant runs two times before and three times at least.
        accuracy: also the gradient of the images against one that our loss finds in float64 (pairs only).
        memory: also the peak of memory.

    Returns:
        Dictionaries, with what the case is, and

        - ``seconds``, ``rounds``: the median of how many rounds.
        - ``to ours``, ``to floor``: medians of the ratios of a round's times.
        - ``gflops``: the floor's products in that time, per second and divided by 10⁹.
        - ``peak_mb``: 10⁶ bytes beyond what lives between two steps, gradients included; on the CPU the growth of the
          resident set, on Linux only.
        - ``gradient difference``, ``gradient error``: distance of the images' gradient from ours, and from that in
          float64, divided by the length of the latter.
        - ``why not``: instead of these, for what cannot run.
    """
    problem = cases.problem(case)
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    took: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    torch._dynamo.reset()  # another case's graphs would make this one's more general
    for name in dict.fromkeys(("ours", *_expand(variants, case))):
        rows[name] = {
            "loss": case.loss,
            "shape": list(case.shape),
            "dtype": str(case.dtype).removeprefix("torch."),
            "variant": name,
        }
        try:
            run = step(name, case, problem)
            run()  # warm: threads, caches, compilers
            _wait(case)
            start = time.perf_counter()
            if memory:
                rows[name]["peak_mb"] = _peak(run, case, problem)
            else:
                _timed(run, case)
            took[name] = time.perf_counter() - start
            if name != "floor":
                gradients[name] = _gradient(problem)
            steps[name] = run
        except (Unavailable, ImportError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            if name == "ours":
                raise
            rows[name]["why not"] = re.sub(r"\s+", " ", str(error))[:200]
    for together in _groups(list(steps)):
        rounds = int(min(MOST, max(LEAST, seconds / sum(took[name] for name in together))))
        for name, times in _interleave({name: steps[name] for name in together}, rounds, case).items():
            if name == "ours" and "seconds" in rows[name]:
                continue
            rows[name]["rounds"] = len(times["own"])
            rows[name]["seconds"] = float(f"{statistics.median(times['own']):.4g}")
            rows[name]["to ours"] = _ratio(times["own"], times["ours"])
            rows[name]["gflops"] = round(problem.flops / statistics.median(times["own"]) / 1e9)
            if "floor" in times:
                rows[name]["to floor"] = _ratio(times["own"], times["floor"])
    for name, gradient in gradients.items():
        if PEERS[name].same if name in PEERS else name != "ours":
            rows[name]["gradient difference"] = _distance(gradient, gradients["ours"])
    if accuracy and case.kind == "pairs":
        exact = _exact(case, problem)
        for name, gradient in gradients.items():
            if name not in PEERS or PEERS[name].same:
                rows[name]["gradient error"] = _distance(gradient, exact)
    return list(rows.values())


def _expand(variants: Sequence[str], case: Case) -> Iterator[str]:
    for name in variants:
        if name == "peers":
            yield from (peer for peer, it in PEERS.items() if case.loss in it.losses)
        elif name not in PEERS or case.loss in PEERS[name].losses:
            yield name


def _loss(name: str, case: Case, problem: Problem) -> Callable[..., Tensor]:
    """The loss of the leaves that a variant stands for."""
    if name in PEERS:
        return PEERS[name].make(case, problem)
    if name.startswith("eager"):
        plain = LOSSES[case.loss].plain
        if name == "eager compiled":
            plain = torch.compile(plain, fullgraph=True)
        half = case.dtype in (torch.bfloat16, torch.float16)

        def eager(*leaves: Tensor) -> Tensor:
            with torch.autocast(torch.device(case.device).type, case.dtype, enabled=half):
                return plain(*leaves, *problem.given_plain)

        return eager
    engine = name.removeprefix("ours").strip()
    ours: Callable[..., Tensor] = cases.module(case, problem.given_plain, engine if engine in ENGINES else "auto").to(
        case.device
    )
    if engine == "compiled":
        ours = torch.compile(ours, fullgraph=True)
    return lambda *leaves: ours(*leaves, *problem.given)


def step(name: str, case: Case, problem: Problem) -> Step:
    """What is timed of a variant: forward and backward, or the floor's products.

    Raises:
        Unavailable: another library is not installed, or cannot do this case.
    """
    if name == "floor":
        return problem.products
    loss = _loss(name, case, problem)

    def run() -> None:
        for x in problem.leaves:
            x.grad = None
        loss(*problem.leaves).backward()

    return run


def _gradient(problem: Problem) -> Tensor:
    grad = problem.leaves[0].grad
    assert grad is not None
    return grad.detach().clone()


def _exact(case: Case, problem: Problem) -> Tensor:
    leaves = [x.detach().double().requires_grad_() for x in problem.leaves]
    cases.module(case, (), "tiled")(*leaves, *problem.given).backward()
    assert leaves[0].grad is not None
    return leaves[0].grad


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float(f"{float((found.double() - wanted.double()).norm() / wanted.double().norm()):.3g}")


# ------------------------------------------------------------------------------------------------------ time


def _groups(names: list[str]) -> list[list[str]]:
    """The variants that run in turn; both groups have ours."""
    compiled = [name for name in names if name.endswith("compiled")]
    plain = [name for name in names if name not in compiled]
    return [plain, ["ours", *compiled]] if compiled and "ours" in names else [names]


def _interleave(steps: dict[str, Step], rounds: int, case: Case) -> dict[str, dict[str, list[float]]]:
    """Per variant, the seconds of each round: its own, ours and the floor's."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        first = turn % len(names)  # each variant gets to run after each other one
        for name in names[first:] + names[:first]:
            found[name].append(_timed(steps[name], case))
    beside = {name: found[name] for name in ("ours", "floor") if name in found}
    return {name: {"own": times, **beside} for name, times in found.items()}


def _timed(run: Step, case: Case) -> float:
    start = time.perf_counter()
    run()
    _wait(case)
    return time.perf_counter() - start


def _wait(case: Case) -> None:
    if case.device != "cpu":
        torch.accelerator.synchronize()


def _ratio(of: list[float], to: list[float]) -> float:
    """Median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(of, to, strict=True)), 3)


# ---------------------------------------------------------------------------------------------------- memory


def _peak(run: Step, case: Case, problem: Problem) -> float | None:
    """Megabytes (10⁶) that a step takes at its peak beyond what lives between steps; None where nothing tells."""
    for x in problem.leaves:
        x.grad = None
    gc.collect()
    if case.device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        _wait(case)
        return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    status = Path("/proc/self/status")
    if case.device != "cpu" or not status.exists():
        return None
    _give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set begins anew
    except OSError:
        return None

    def kilobytes(field: str) -> int:
        found = re.search(rf"^{field}:\s*(\d+) kB", status.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    before = kilobytes("VmRSS")
    run()
    return round((kilobytes("VmHWM") - before) * 1024 / 1e6, 1)


def _give_back() -> None:
    """Freed memory that the C library keeps would hide what a step takes."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


# --------------------------------------------------------------------------------------------------- machine


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    if device.startswith("cuda"):
        processor = torch.cuda.get_device_name()
    else:
        processor = platform.processor() or platform.machine()
        info = Path("/proc/cpuinfo")
        if info.exists():
            named = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE)
            processor = named[1] if named else processor
    return {
        "device": device,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "itrloss": itrloss.__version__,
        "date": date.today().isoformat(),
    }
