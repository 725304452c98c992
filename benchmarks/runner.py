"""Measures the variants of a case in turn: their time, their memory and their accuracy.

Machines are noisy, shared ones most of all. The variants of a case therefore run in rounds in one
process, in a random order; ratios are taken within a round, and their medians are reported.
Compiled code is compared with ours in separate rounds, so that its busy-waiting threads do not
disturb the other variants.
"""

from __future__ import annotations

import contextlib
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
from unittest.mock import patch

import torch
from torch import Tensor

import itrloss
from itrloss.engine import products
from itrloss.engine.matrix import ENGINES, Matrix

from . import cases, sources
from .cases import LOSSES, Case, Problem
from .peak import peak_memory
from .peers import PEERS, Unavailable

VARIANTS = {
    "ours": "the engine that 'auto' chooses",
    **{f"ours {engine}": f"engine={engine!r}" for engine in ENGINES},
    "ours compiled": "ours under torch.compile",
    "ours graphed": "ours as a CUDA graph, forward and backward",
    "ours recorded": "ours by itrloss.Graphed, with what the host does in each call",
    "eager": "the loss in plain PyTorch; for half precision under autocast",
    "eager graphed": "the loss in plain PyTorch as a CUDA graph",
    "eager compiled": "the loss in plain PyTorch under torch.compile",
    "matmul_bound": "only the matrix products of a dense loss and its gradient",
    "peers": "all other libraries that have this loss",
}
MIN_ROUNDS, MAX_ROUNDS = 3, 200
Step = Callable[[], None]  # forward and backward
Row = dict[str, Any]


def measure(
    case: Case, variants: Sequence[str], seconds: float = 10, accuracy: bool = False
) -> list[Row]:
    """Return one row per variant, always including ``"ours"``. If a variant cannot run, its row has
    the reason.

    Args:
        variants: keys of ``VARIANTS`` and of ``benchmarks.peers.PEERS``.
        seconds: about how long to measure. Every variant has three warm-up runs and at least three
            timed ones.
        accuracy: also compare the gradient of the images with our loss's in float64 (losses of
            pairs only).

    Returns:
        Dictionaries, with the case's columns, and

        - ``seconds``, ``rounds``: the median time, and the number of rounds.
        - ``to ours``, ``to matmul_bound``: medians of the ratios of a round's times.
        - ``gflops``: FLOPs of the products of ``matmul_bound`` divided by the time and by 10⁹.
        - ``peak_mb``: 10⁶ bytes beyond those allocated between steps, including gradients; on the
          CPU the growth of the resident set, on Linux only.
        - ``engine``, ``products``: for ours, the engines of its matrices, and on the CPU the
          libraries of its matrix products: ``oneDNN``, or ``BLAS``, which is PyTorch's choice and
          that of all other variants.
        - ``gradient difference``, ``gradient error``: distance of the images' gradient from ours,
          and from that in float64, divided by the length of the latter; None if that is not a
          number.
        - ``error``: the reason why it cannot run, instead of the figures.

    Raises:
        ValueError: for an unknown variant, a shape that the loss cannot have, or no time.
    """
    _check(variants, seconds)
    problem = cases.problem(case)
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    duration: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    torch._dynamo.reset()  # other cases' graphs would make this one's dynamic in shape
    for name in dict.fromkeys(("ours", *_expand(variants, case))):
        rows[name] = case.fields() | {"variant": name}
        with _errors_into(rows[name]):
            run = step(name, case, problem)
            rows[name] |= _warm_up(run, name, case)
            # the graph has already allocated its memory
            if name != "matmul_bound" and not name.endswith(" graphed"):
                rows[name]["peak_mb"] = _peak(run, case, problem)
            duration[name] = _timed(run, case)
            if name != "matmul_bound":
                gradients[name] = _gradient(problem)
            steps[name] = run
    groups = _groups(list(steps))
    rounds = int(
        min(
            MAX_ROUNDS,
            max(MIN_ROUNDS, seconds / sum(duration[name] for group in groups for name in group)),
        )
    )
    for group in groups:
        times = _interleave({name: steps[name] for name in group}, rounds, case, rows)
        for name in group if group is groups[0] else group[1:]:
            if "error" not in rows[name]:
                rows[name] |= _figures(times, name, problem)
    exact = _exact_gradient(case, problem) if accuracy and case.kind == "pairs" else None
    _compare(gradients, exact, case, rows)
    return list(rows.values())


def _check(variants: Sequence[str], seconds: float) -> None:
    """Raise a ValueError for an unknown variant, or no time."""
    names = [*VARIANTS, *PEERS]
    for name in variants:
        if name not in names:
            raise ValueError(f"variants: expected some of {', '.join(names)}; got {name!r}")
    if not seconds > 0:
        raise ValueError(f"seconds: expected a number above 0, got {seconds}")


def _compare(
    gradients: dict[str, Tensor], exact: Tensor | None, case: Case, rows: dict[str, Row]
) -> None:
    """Put the distances of the gradients from ours, and from the exact one, into the rows."""
    for name, gradient in gradients.items():
        if "error" in rows[name] or not _is_same_loss(name, case):
            continue
        if name != "ours":
            rows[name]["gradient difference"] = _distance(gradient, gradients["ours"])
        if exact is not None:
            rows[name]["gradient error"] = _distance(gradient, exact)


@contextlib.contextmanager
def _errors_into(row: Row) -> Iterator[None]:
    """Errors in other libraries' code must not lose the remaining rows; errors in ours
    propagate.
    """
    try:
        yield
    except Exception as error:
        if row["variant"] == "ours":
            raise
        row["error"] = re.sub(r"\s+", " ", str(error) or type(error).__name__)[:200]


def _figures(times: dict[str, list[float]], name: str, problem: Problem) -> Row:
    median = statistics.median(times[name])
    figures = {"rounds": len(times[name]), "seconds": float(f"{median:.4g}")}
    figures["to ours"] = _ratio(times[name], times["ours"])
    if "matmul_bound" in times:
        figures["to matmul_bound"] = _ratio(times[name], times["matmul_bound"])
    return figures | {"gflops": round(problem.flops / median / 1e9)}


def _expand(variants: Sequence[str], case: Case) -> Iterator[str]:
    for name in variants:
        if name == "peers":
            yield from (name for name, peer in PEERS.items() if case.loss in peer.losses)
        else:
            yield name


def _is_same_loss(name: str, case: Case) -> bool:
    return name not in PEERS or PEERS[name].is_same(case)


def _engine(name: str) -> str | None:
    """Return the ``engine=`` of our variants in eager mode, None for all others."""
    engine = "auto" if name == "ours" else name.removeprefix("ours ")
    return engine if engine in ("auto", *ENGINES) else None


def loss(name: str, case: Case, problem: Problem) -> Callable[..., Tensor]:
    """Return the variant's loss as a function of the leaves.

    Raises:
        Unavailable: another library is not installed, or cannot do this case.
    """
    if name.startswith("ours"):
        ours = cases.module(case, problem, _engine(name) or "auto").to(case.device)
        if name == "ours recorded":
            if case.torch_device.type != "cuda":
                raise Unavailable("runs on CUDA only")
            ours = itrloss.Graphed(ours)
        ours = torch.compile(ours, fullgraph=True) if name == "ours compiled" else ours
        return lambda *leaves: ours(*leaves, *problem.arguments)
    if name in PEERS:
        if case.loss not in PEERS[name].losses:
            raise Unavailable(f"has {', '.join(PEERS[name].losses)} only")
        plain, arguments = PEERS[name].make(case, problem), ()
    else:
        plain, arguments = LOSSES[case.loss].plain, problem.plain_arguments
        if name == "eager compiled":
            plain = torch.compile(plain, fullgraph=True)
    half = case.dtype in (torch.bfloat16, torch.float16)

    def under_autocast(*leaves: Tensor) -> Tensor:
        with torch.autocast(case.torch_device.type, case.dtype, enabled=half):
            return plain(*leaves, *arguments)

    return under_autocast


def step(name: str, case: Case, problem: Problem) -> Step:
    """Return the function to time: forward and backward, or the products of ``matmul_bound``.

    Raises:
        Unavailable: another library is not installed, or cannot do this case.
    """
    if name == "matmul_bound":
        return problem.matmul_bound
    function = loss(name, case, problem)

    def run() -> None:
        for x in problem.trained:
            x.grad = None
        function(*problem.leaves).backward()

    if name.endswith(" graphed"):
        return graphed(run, case.torch_device, problem.trained)
    return run


def graphed(run: Step, device: torch.device, trained: Sequence[Tensor]) -> Step:
    """Return a step recorded once as a CUDA graph, and replayed without the host.

    Raises:
        Unavailable: on other devices.
    """
    if device.type != "cuda":
        raise Unavailable("runs on CUDA only")
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # compilation and choices at the first call cannot be recorded
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    recorded = [x.grad for x in trained]

    def replay() -> None:
        graph.replay()
        for x, grad in zip(trained, recorded, strict=True):
            x.grad = grad

    return replay


# --------------------------------------------------------------------- engines and libraries in use


def _warm_up(run: Step, name: str, case: Case) -> Row:
    """Run once, to start threads, fill caches and compile; return the engines and libraries that
    ours chose.
    """
    # other variants choose nothing, and the functions below must not be compiled
    if _engine(name) is None:
        _timed(run, case)
        return {}
    engines: dict[str, None] = {}
    libraries: dict[str, None] = {}
    make, by_onednn = Matrix.__init__, products._use_onednn

    def make_and_note(matrix: Matrix, *args: Any, **options: Any) -> None:
        make(matrix, *args, **options)
        engines[matrix.engine] = None

    def choose_and_note(a: Tensor, b: Tensor) -> bool:
        chosen = by_onednn(a, b)
        libraries["oneDNN" if chosen else "BLAS"] = None
        return chosen

    with (
        patch.object(Matrix, "__init__", make_and_note),
        patch.object(products, "_use_onednn", choose_and_note),
    ):
        _timed(run, case)
    chosen = {"engine": ", ".join(engines)} if engines else {}
    if case.torch_device.type == "cpu":
        # the dense engine uses PyTorch's products
        chosen["products"] = ", ".join(libraries) or "BLAS"
    return chosen


# ---------------------------------------------------------------------------------------- gradients


def _gradient(problem: Problem) -> Tensor:
    grad = problem.leaves[0].grad
    assert grad is not None
    return grad.detach().clone()


def _exact_gradient(case: Case, problem: Problem) -> Tensor:
    leaves = [x.detach().double().requires_grad_() for x in problem.leaves]
    cases.module(case, problem, "tiled")(*leaves, *problem.arguments).backward()
    assert leaves[0].grad is not None
    return leaves[0].grad


def _distance(gradient: Tensor, expected: Tensor) -> float | None:
    """Return the distance relative to the length of the expected gradient; None if it is not a
    number.
    """
    gap, length = (
        float((gradient.double() - expected.double()).norm()),
        float(expected.double().norm()),
    )
    share = gap / length if length else gap
    return float(f"{share:.3g}") if math.isfinite(share) else None


# ---------------------------------------------------------------------------------- time and memory


def _groups(names: list[str]) -> list[list[str]]:
    """Return the groups of variants that are measured in turn; each begins with ours."""
    compiled = [name for name in names if name.endswith(" compiled")]
    plain = [name for name in names if name not in compiled]
    return [plain, ["ours", *compiled]] if compiled else [plain]


def _interleave(
    steps: dict[str, Step], rounds: int, case: Case, rows: dict[str, Row]
) -> dict[str, list[float]]:
    """Return the seconds of each round. The order is random, because a step inherits the caches of
    the previous one.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(steps), len(steps)):
            if "error" not in rows[name]:
                with _errors_into(rows[name]):
                    times[name].append(_timed(steps[name], case))
    return times


def _timed(run: Step, case: Case) -> float:
    start = time.perf_counter()
    run()
    if case.torch_device.type != "cpu":
        torch.accelerator.synchronize(case.torch_device)
    return time.perf_counter() - start


def _ratio(times: list[float], base: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(times, base, strict=True)), 3)


def _peak(run: Step, case: Case, problem: Problem) -> float | None:
    for x in problem.trained:
        x.grad = None
    return peak_memory(run, case.torch_device)


# ------------------------------------------------------------------------------------------ machine


def machine(device: str) -> Row:
    """Return the description of the machine: the processor, the library of matrix products,
    versions.
    """
    about: Row = {"device": device}
    build = torch.__config__.show()
    mkl = _match(r"Math Kernel Library Version ([\d.]+)", build)
    if device.startswith("cuda"):
        about |= {
            "processor": torch.cuda.get_device_name(device),
            "blas": f"cuBLAS of CUDA {torch.version.cuda}",
        }
    else:
        about |= {
            "processor": _processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
        about["blas"] = f"MKL {mkl}" if mkl else _match(r"BLAS_INFO=(\w+)", build)
        about["onednn"] = _match(r"MKL-DNN (v\S+)", build)
    return about | {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "itrloss": itrloss.__version__,
        "commit": sources.commit(),
        "engine": sources.code_digest(),
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    name = _match(r"^model name\s*:\s*(.*)$", info.read_text()) if info.exists() else None
    return name or platform.processor() or platform.machine()


def _match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None
