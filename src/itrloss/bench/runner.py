"""Runs the variants of a case in turn, and says how long they take, how much memory, and how exact they are.

Machines are noisy, most of all shared ones. The variants of a case run round after round in one process, in another
order each time; a round's times are divided by each other, and the medians of these ratios are reported. Compiled code
meets ours in rounds of its own, so that the threads it leaves spinning disturb no other variant than that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import platform
import random
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

from ..engine.matrix import ENGINES
from . import cases
from .cases import LOSSES, Case, Problem
from .peers import PEERS, Unavailable

VARIANTS = {
    "ours": "the engine that 'auto' chooses",
    **{f"ours {engine}": f"engine={engine!r}" for engine in ENGINES},
    "ours compiled": "ours under torch.compile",
    "ours graphed": "ours as a CUDA graph, forward and backward",
    "eager": "the loss in plain PyTorch; for half precision under autocast",
    "eager compiled": "that under torch.compile",
    "floor": "the matrix products of a dense loss and its gradient, and nothing else",
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
          float64, divided by the length of the latter; None where that is no number.
        - ``why not``: instead of these, for what cannot run.

    Raises:
        ValueError: for an unknown variant, a shape that the loss cannot have, or no time.
    """
    known = {**VARIANTS, **PEERS}
    for name in variants:
        if name not in known:
            raise ValueError(f"variants: expected some of {', '.join(known)}; got {name!r}")
    if not seconds > 0:
        raise ValueError(f"seconds: expected a number above 0, got {seconds}")
    problem = cases.problem(case)
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    took: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    torch._dynamo.reset()  # another case's graphs would make this one's more general
    for name in dict.fromkeys(("ours", *_expand(variants, case))):
        rows[name] = case.named() | {"variant": name}
        with _or_why_not(rows[name]):
            run = step(name, case, problem)
            _timed(run, case)  # warm: threads, caches, compilers
            start = time.perf_counter()
            if memory and name not in ("floor", "ours graphed"):  # a graph has taken its memory already
                rows[name]["peak_mb"] = _peak(run, case, problem)
            took[name] = time.perf_counter() - start
            if took[name] < 1:  # looking at the memory takes its time too
                took[name] = _timed(run, case)
            if name != "floor":
                gradients[name] = _gradient(problem)
            steps[name] = run
    groups = _groups(list(steps))
    rounds = int(min(MOST, max(LEAST, seconds / sum(took[name] for group in groups for name in group))))
    for group in groups:
        times = _interleave({name: steps[name] for name in group}, rounds, case, rows)
        for name in group if group is groups[0] else group[1:]:
            if "why not" not in rows[name]:
                rows[name] |= _figures(times, name, problem)
    for name, gradient in gradients.items():
        if name != "ours" and "why not" not in rows[name] and _same(name, case):
            rows[name]["gradient difference"] = _distance(gradient, gradients["ours"])
    if accuracy and case.kind == "pairs":
        exact = _exact(case, problem)
        for name, gradient in gradients.items():
            if "why not" not in rows[name] and _same(name, case):
                rows[name]["gradient error"] = _distance(gradient, exact)
    return list(rows.values())


@contextlib.contextmanager
def _or_why_not(row: Row) -> Iterator[None]:
    """Whatever another's code raises is no reason to lose the rest; a failure of ours is."""
    try:
        yield
    except Exception as error:
        if row["variant"] == "ours":
            raise
        row["why not"] = re.sub(r"\s+", " ", str(error) or type(error).__name__)[:200]


def _figures(times: dict[str, list[float]], name: str, problem: Problem) -> Row:
    median = statistics.median(times[name])
    found = {"rounds": len(times[name]), "seconds": float(f"{median:.4g}")}
    found["to ours"] = _ratio(times[name], times["ours"])
    if "floor" in times:
        found["to floor"] = _ratio(times[name], times["floor"])
    return found | {"gflops": round(problem.flops / median / 1e9)}


def _expand(variants: Sequence[str], case: Case) -> Iterator[str]:
    for name in variants:
        if name == "peers":
            yield from (peer for peer, it in PEERS.items() if case.loss in it.losses)
        else:
            yield name


def _same(name: str, case: Case) -> bool:
    """Whether a variant's gradient is to be that of ours."""
    return name not in PEERS or PEERS[name].same(case)


def _loss(name: str, case: Case, problem: Problem) -> Callable[..., Tensor]:
    """The loss of the leaves that a variant stands for."""
    if name == "ours" or name.startswith("ours "):
        engine = name.removeprefix("ours").strip()
        module = cases.module(case, problem.given_plain, engine if engine in ENGINES else "auto").to(case.device)
        ours = torch.compile(module, fullgraph=True) if engine == "compiled" else module
        return lambda *leaves: ours(*leaves, *problem.given)
    if name in PEERS:
        if case.loss not in PEERS[name].losses:
            raise Unavailable(f"has {', '.join(PEERS[name].losses)} only")
        plain, given = PEERS[name].make(case, problem), ()
    else:
        plain, given = LOSSES[case.loss].plain, problem.given_plain
        if name == "eager compiled":
            plain = torch.compile(plain, fullgraph=True)
    half = case.dtype in (torch.bfloat16, torch.float16)

    def loss(*leaves: Tensor) -> Tensor:
        with torch.autocast(case.where.type, case.dtype, enabled=half):
            return plain(*leaves, *given)

    return loss


def step(name: str, case: Case, problem: Problem) -> Step:
    """What is timed of a variant: forward and backward, or the floor's products.

    Raises:
        Unavailable: another library is not installed, or cannot do this case.
    """
    if name == "floor":
        return problem.products
    loss = _loss(name, case, problem)

    def run() -> None:
        """Forward and backward, gradients anew."""
        for x in problem.trained:
            x.grad = None
        loss(*problem.leaves).backward()

    return _graphed(run, case, problem) if name == "ours graphed" else run


def _graphed(run: Step, case: Case, problem: Problem) -> Step:
    """Recorded once, and replayed without the host."""
    if case.where.type != "cuda":
        raise Unavailable("runs on CUDA only")
    with torch.cuda.device(case.where):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is compiled or chosen at the first call cannot be recorded
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    recorded = [x.grad for x in problem.trained]

    def replay() -> None:
        graph.replay()
        for x, grad in zip(problem.trained, recorded, strict=True):
            x.grad = grad

    return replay


def _gradient(problem: Problem) -> Tensor:
    grad = problem.leaves[0].grad
    assert grad is not None
    return grad.detach().clone()


def _exact(case: Case, problem: Problem) -> Tensor:
    leaves = [x.detach().double().requires_grad_() for x in problem.leaves]
    cases.module(case, (), "tiled")(*leaves, *problem.given).backward()
    assert leaves[0].grad is not None
    return leaves[0].grad


def _distance(found: Tensor, wanted: Tensor) -> float | None:
    """As a share of the length of what is wanted; None where it is not a number."""
    gap, length = float((found.double() - wanted.double()).norm()), float(wanted.double().norm())
    share = gap / length if length else gap
    return float(f"{share:.3g}") if math.isfinite(share) else None


# ------------------------------------------------------------------------------------------------------ time


def _groups(names: list[str]) -> list[list[str]]:
    """The variants that run in turn; ours is the first of both groups."""
    compiled = [name for name in names if name.endswith(" compiled")]
    plain = [name for name in names if name not in compiled]
    return [plain, ["ours", *compiled]] if compiled else [plain]


def _interleave(steps: dict[str, Step], rounds: int, case: Case, rows: dict[str, Row]) -> dict[str, list[float]]:
    """Seconds of each round. The order changes at random: a step finds the caches as the one before left them."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(steps), len(steps)):
            with _or_why_not(rows[name]):
                if "why not" not in rows[name]:
                    found[name].append(_timed(steps[name], case))
    return found


def _timed(run: Step, case: Case) -> float:
    start = time.perf_counter()
    run()
    _wait(case)
    return time.perf_counter() - start


def _wait(case: Case) -> None:
    if case.where.type != "cpu":
        torch.accelerator.synchronize(case.where)


def _ratio(of: list[float], to: list[float]) -> float:
    """Median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(of, to, strict=True)), 3)


# ---------------------------------------------------------------------------------------------------- memory


def _peak(run: Step, case: Case, problem: Problem) -> float | None:
    """Of a step, beyond what lives between steps."""
    for x in problem.trained:
        x.grad = None
    return peak(run, case.where)


def peak(run: Callable[[], Any], where: torch.device) -> float | None:
    """Megabytes (10⁶) that a call takes at its peak beyond what there was before; None where nothing tells."""
    gc.collect()
    if where.type == "cuda":
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        run()
        torch.cuda.synchronize(where)
        return round((torch.cuda.max_memory_allocated(where) - before) / 1e6, 1)
    status = Path("/proc/self/status")
    if where.type != "cpu" or not status.exists():
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
        processor = torch.cuda.get_device_name(device)
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
