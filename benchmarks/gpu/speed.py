"""Steps: whole losses at large sizes, their memory, and which kernels take the time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from itrloss import OnlineKMeans, Similarity
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import CSLS, FastReranker, Reranker, Sinkhorn

from .. import cases, runner
from ..cases import Case
from ..peak import peak_memory
from .losses import LOSSES
from .record import Row
from .session import Session, gflops

HALF = torch.bfloat16
Shape = tuple[int, int, int]

LARGE: tuple[tuple[str, Shape], ...] = (
    ("infonce", (32768, 32768, 512)),
    ("infonce learnable", (32768, 32768, 512)),
    ("infonce", (32768, 32768, 1024)),
    ("infonce learnable", (32768, 32768, 1024)),
    ("siglip", (65536, 65536, 768)),
    ("dcl std", (32768, 32768, 1024)),
    ("hal", (32768, 32768, 1024)),
)
TOYS: tuple[tuple[str, Shape], ...] = (("infonce learnable", (20, 20, 16)),)


def goals(session: Session) -> None:
    """Time a step of the losses that have goals, next to the products that plain PyTorch makes."""
    shape = session.pick((4096, 65536, 1024), (4, 24, 16))
    for loss in ("mdcl", "uto"):
        with session.attempt(loss=loss, shape=shape):
            case = Case(loss, shape, HALF, session.device.type)
            measured(session, case, ("ours triton", "matmul_bound"))
    last: Shape | None = None
    for loss, shape in session.pick(LARGE, TOYS):
        if session.is_late(loss=loss, shape=shape):
            return
        if shape != last:
            bound(session, shape)
            last = shape
        with session.attempt(loss=loss, shape=shape):
            whole_step(session, loss, shape)


def bound(session: Session, shape: Shape) -> None:
    """Time the three bare products of a dense loss and its gradient."""
    about = case_fields("products", shape)
    with session.attempt(**about):
        problem = cases.problem(Case("infonce", shape, HALF, session.device.type))
        row = session.timed(problem.matmul_bound, 0.2)
        session.say(**about, variant="matmul_bound", gflops=gflops(problem.flops, row), **row)


def whole_step(session: Session, loss: str, shape: Shape) -> None:
    """Time forward and backward of a loss, launched one by one and as a CUDA graph."""
    n, m, dim = shape
    v, w = session.pair(n, m, dim)
    step = Step(LOSSES[loss](engine="triton").to(session.device), (v, w))
    flops = 6 * n * m * dim  # of the products of plain PyTorch: ours computes some of them twice
    about = case_fields(loss, shape)
    row = session.timed(step)
    megabytes = peak_memory(step, session.device)
    session.say(**about, variant="triton", gflops=gflops(flops, row), **row, peak_mb=megabytes)
    row = session.timed(session.graph(step, step.trained), 0.3)
    session.say(**about, variant="triton graphed", gflops=gflops(flops, row), **row)


class Step(NamedTuple):
    """Forward and backward of a loss, as a function without arguments."""

    loss: nn.Module
    leaves: tuple[Tensor, ...]  # which require gradients
    ids: tuple[Tensor, ...] = ()

    @property
    def trained(self) -> list[Tensor]:
        """The leaves and the parameters."""
        return [*self.leaves, *self.loss.parameters()]

    def __call__(self) -> None:
        for x in self.trained:
            x.grad = None
        self.loss(*self.leaves, *self.ids).backward()


def measured(
    session: Session, case: Case, variants: tuple[str, ...], accuracy: bool = False
) -> None:
    """Write the rows of ``python -m benchmarks`` for a case."""
    seconds = session.pick(3.0, 0.001)
    for row in runner.measure(case, variants, seconds, accuracy):
        if "error" in row:  # of another's code, such as a library that is not installed
            row["skipped"] = row.pop("error")
        session.say(**row)


def case_fields(loss: str, shape: Shape, dtype: torch.dtype = HALF) -> Row:
    """Return the columns of a row that say what it is about."""
    return {"loss": loss, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


# ---------------------------------------------------------------------- what is not a loss of pairs


def others(session: Session) -> None:
    """Time the online k-means of PGC, and re-rankers and metrics of a test set's size."""
    points, dim, clusters = session.pick((512, 1024, 10_000), (8, 4, 3))
    with session.attempt(loss="online k-means"):
        prototypes = OnlineKMeans(clusters, dim).to(session.device)
        batch = torch.randn(points, dim, device=session.device)
        shape = points, clusters, dim
        timed_call(session, "online k-means", shape, partial(prototypes.update, batch))
    n, captions, dim = session.pick((5000, 5, 1024), (6, 2, 8))
    shape = n, n * captions, dim
    v, w = (x.detach().float() for x in session.pair(*shape))
    ids = torch.arange(n, device=session.device)
    sim = Similarity(v, w, ids, ids.repeat_interleave(captions))
    methods: dict[str, Reranker | None] = {
        "metrics": None,
        "fast and metrics": FastReranker(),
        "csls and metrics": CSLS(),
        "sinkhorn and metrics": Sinkhorn(),
    }
    for name, method in methods.items():
        if session.is_late(loss=name, shape=shape):
            return
        with session.attempt(loss=name, shape=shape):
            timed_call(session, name, shape, partial(retrieval_metrics, sim, reranker=method))


def timed_call(session: Session, name: str, shape: Shape, call: Callable[[], object]) -> None:
    """Write the row of a call in float32."""
    session.say(**case_fields(name, shape, torch.float32), variant="ours", **session.timed(call))


# ------------------------------------------------------------------------------------------ memory


def memory(session: Session) -> None:
    """Measure the peak beyond inputs and gradients at sizes whose matrices fit on no device."""
    sizes = ((32768, 32768, 1024), (16384, 65536, 1024), (65536, 65536, 1024))
    sizes = session.pick((*sizes, (262144, 262144, 512)), ((20, 40, 16),))
    for n, m, dim in sizes:
        about = case_fields("infonce", (n, m, dim)) | {"variant": "triton"}
        if session.is_late(**about):
            return
        with session.attempt(**about):
            v = torch.randn(n, dim, device=session.device, dtype=HALF, requires_grad=True)
            w = torch.randn(m, dim, device=session.device, dtype=HALF, requires_grad=True)
            ids = torch.arange(n, device=v.device), torch.arange(m, device=v.device) * n // m
            step = Step(LOSSES["infonce"](engine="triton"), (v, w), ids)
            row = session.timed(step, 0.0)
            found = peak_memory(step, session.device)
            gradients = (v.numel() + w.numel()) * v.element_size() / 1e6
            beyond = None if found is None else round(found - gradients, 1)
            session.say(**about, **row, peak_mb=found, **{"beyond gradients MB": beyond})


# ----------------------------------------------------------------------------------------- profile


def profile(session: Session) -> None:
    """Write the device's time by kernel of one step, as PyTorch's profiler sees it."""
    for loss, shape in session.pick(LARGE[1:2] + LARGE[3:6], TOYS):
        if session.is_late(loss=loss, shape=shape):
            return
        with session.attempt(loss=loss, shape=shape):
            v, w = session.pair(*shape)
            step = Step(LOSSES[loss](engine="triton").to(session.device), (v, w))
            by_kernel(session, loss, shape, step)


def by_kernel(session: Session, loss: str, shape: Shape, step: Callable[[], None]) -> None:
    """Write a row for each kernel that takes 2 % of the time or more."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    step()
    session.synchronize()
    with torch.profiler.profile(activities=activities) as seen:
        step()
        session.synchronize()
    events: list[tuple[float, Any]] = []
    for event in seen.key_averages():
        taken = own_time(event, session)
        if taken > 0:
            events.append((taken, event))
    total = sum(taken for taken, _ in events)
    if not events:
        raise RuntimeError("the profiler saw no kernel")
    for taken, event in sorted(events, key=lambda x: -x[0]):
        share = round(taken / total, 3)
        if share >= 0.02:
            about = case_fields(loss, shape) | {"variant": event.key[:80], "calls": event.count}
            session.say(**about, seconds=taken / 1e6, share=share)


def own_time(event: Any, session: Session) -> float:
    """Return the microseconds of a kernel on a GPU, or of an operator on the CPU."""
    if session.device.type != "cuda":
        return event.self_cpu_time_total
    if event.device_type.name == "CPU":
        return 0.0
    return event.self_device_time_total


STEPS = {"goals": goals, "others": others, "memory": memory, "profile": profile}
