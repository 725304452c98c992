"""Steps: sizes at which engines change, ragged sizes, and ways to run a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from itrloss import Graphed, InfoNCELoss

from .record import Row
from .session import Session, gflops
from .speed import Step, case_fields


def crossover(session: Session) -> None:
    """Time engines by size: 'auto' should take the one that is faster as a CUDA graph."""
    for dim in session.pick((512, 1024), (16,)):
        for n in session.pick((256, 512, 1024, 1448, 2048, 4096, 8192), (20,)):
            for engine in ("dense", "triton"):
                about = case_fields("infonce", (n, n, dim))
                if session.is_late(**about):
                    return
                with session.attempt(**about, variant=engine):
                    step = Step(InfoNCELoss(engine=engine), session.pair(n, n, dim))
                    session.say(**about, variant=engine, **session.timed(step, 0.1))
                    row = session.timed(session.graph(step, step.trained), 0.1)
                    session.say(**about, variant=f"{engine} graphed", **row)


def ragged(session: Session) -> None:
    """Time sizes that are no multiple of a tile, and the first step of each, which may compile."""
    shapes = ((8192, 512), (8191, 512), (8200, 512), (8192, 500), (4099, 1024), (4096, 1024))
    for n, dim in session.pick(shapes, ((21, 17),)):
        about = case_fields("infonce", (n, n, dim)) | {"variant": "triton"}
        if session.is_late(**about):
            return
        with session.attempt(**about):
            step = Step(InfoNCELoss(engine="triton"), session.pair(n, n, dim))
            start = time.perf_counter()
            step()
            session.synchronize()
            first = round(time.perf_counter() - start, 3)
            row = session.timed(step)
            flops = 6 * n * n * dim
            session.say(**about, gflops=gflops(flops, row), **row, **{"first seconds": first})


# -------------------------------------------------------------------------------------- ways to run


def modes(session: Session) -> None:
    """Run a step on another stream, as CUDA graphs and compiled: all have the same gradients."""
    n, dim = session.pick((4096, 512), (12, 16))
    v, w = session.pair(n, n, dim)
    ids = torch.arange(n, device=v.device) // 2
    step = Step(InfoNCELoss(engine="triton"), (v, w))
    with_ids = Step(InfoNCELoss(engine="triton"), (v, w), (ids, ids))
    runs: dict[str, tuple[Step, Callable[[Step], Callable[[], None]]]] = {
        "other stream": (step, lambda x: on_other_stream(session, x)),
        "graph": (step, lambda x: session.graph(x, x.trained)),
        "graph with ids": (with_ids, lambda x: session.graph(x, x.trained)),
        "recorded": (step, recorded),
        "recorded, with ids": (with_ids, recorded),
        "compiled": (step, lambda x: compiled(session, x, "default")),
        "compiled, reduce-overhead": (step, lambda x: compiled(session, x, "reduce-overhead")),
    }
    for mode, (usual, make) in runs.items():
        about = case_fields("infonce", (n, n, dim)) | {"variant": mode}
        if session.is_late(**about):
            return
        with session.attempt(**about):
            same_gradients(session, usual, make, about)


def same_gradients(
    session: Session, usual: Step, make: Callable[[Step], Callable[[], None]], about: Row
) -> None:
    """Write the time of a step that is run in another way, and how far its gradients are off.

    Raises:
        ArithmeticError: if they differ by more than the roundings of bfloat16.
    """
    usual()
    wanted = gradients(usual)
    start = time.perf_counter()
    run = make(usual)
    run()
    first = round(time.perf_counter() - start, 2)
    session.synchronize()
    errors = [distance(a, b) for a, b in zip(gradients(usual), wanted, strict=True)]
    row = session.timed(run, 0.2)
    session.say(**about, **row, errors=errors, **{"first seconds": first})
    if not max(errors) <= 1e-2:  # one rounding is 4e-3
        raise ArithmeticError(f"gradients differ by {errors}")


def gradients(step: Step) -> list[Tensor]:
    """Return copies of the leaves' gradients."""
    found: list[Tensor] = []
    for x in step.leaves:
        assert x.grad is not None
        found.append(x.grad.clone())
    return found


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative distance."""
    return float(f"{float((a.double() - b.double()).norm() / b.double().norm()):.2g}")


def on_other_stream(session: Session, step: Step) -> Callable[[], None]:
    """Return the step on another stream than the default one; in a dry run the step itself."""
    if session.device.type != "cuda":
        return step
    side = torch.cuda.Stream()

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)

    return run


def recorded(step: Step) -> Callable[[], None]:
    """Return the step with a recorded loss, after its first call, which is the loss's own."""
    replayed = Step(Graphed(InfoNCELoss(engine="triton")), step.leaves, step.ids)
    replayed()
    return replayed


def compiled(session: Session, step: Step, mode: str) -> Callable[[], None]:
    """Return the step with a compiled loss; in a dry run its graph, uncompiled."""
    options: dict[str, Any] = session.pick({"mode": mode}, {"backend": "eager"})
    loss: Any = torch.compile(InfoNCELoss(), **options)
    return Step(loss, step.leaves, step.ids)


STEPS = {"crossover": crossover, "ragged": ragged, "modes": modes}
