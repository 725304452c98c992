"""What a loss over many processes computes, exchanges and holds: the command ``itrloss plan``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .distributed import choose_schedule
from .engine.matrix import ACCELERATOR_SMALL, MEMORY_BUDGET


class Passes(NamedTuple):
    """How often a loss passes over the matrix; a log-sum-exp on an accelerator takes one more, for
    the maxima.
    """

    forward: int
    backward: int
    maxima: int


LOSSES = {
    "InfoNCELoss": Passes(1, 1, 1),
    "SigmoidLoss": Passes(1, 1, 0),
    "HubnessAwareLoss": Passes(1, 1, 1),
    "DiversityContrastiveLoss": Passes(2, 1, 1),
}


class Machine(NamedTuple):
    """What a GPU reaches in practice; bandwidths are those of sending, while it receives as much."""

    tflops: float = 400.0  # 10¹² floating-point operations a second, in matrix products
    link: float = 300.0  # 10⁹ bytes a second to the GPUs of its node
    network: float = 40.0  # 10⁹ bytes a second to other nodes
    node: int = 8  # GPUs of a node
    latency: float = 5.0  # microseconds of an exchange between two GPUs


class Plan(NamedTuple):
    """What one GPU does in a step, forward and backward of the loss alone, with one schedule."""

    gpus: int
    schedule: str
    chosen: bool  # by gather=True
    flops: float
    sent: float  # bytes
    exchanges: int  # of embeddings or their gradients
    held: float  # bytes beyond the GPU's own embeddings and their gradients
    computing: float  # seconds
    waiting: float  # seconds in which an exchange is under way and nothing is computed


def plan(
    gpus: int,
    images: int,
    texts: int,
    dim: int,
    itemsize: int = 2,
    passes: Passes = LOSSES["InfoNCELoss"],
    machine: Machine = Machine(),  # noqa: B008
    accelerator: bool = True,
) -> tuple[Plan, Plan]:
    """Return the plans of all-gather and of the ring, by the formulas in :doc:`distributed`.

    ``gpus`` is 2 or more. ``images`` and ``texts`` are those of all, which have gradients on both
    sides; ``itemsize`` is the bytes of an element of the embeddings. Ids, and numbers that are
    exchanged for each text, are left out.
    """
    n, m = -(-images // gpus), -(-texts // gpus)  # of the largest process
    rows, cols, others = n, m * gpus, gpus - 1
    product = 2.0 * rows * cols * dim
    forward, backward = passes.forward + passes.maxima * accelerator, passes.backward
    block, gradient = float(itemsize * m * dim), float(max(4, itemsize) * m * dim)
    speed = 1e12 * machine.tflops
    rate, latency = (
        1e9 * (machine.link if gpus <= machine.node else machine.network),
        1e-6 * machine.latency,
    )

    cached = rows * cols <= ACCELERATOR_SMALL if accelerator else 4 * rows * cols <= MEMORY_BUDGET
    flops = (1 + 2 * backward if cached else forward + 3 * backward) * product
    sent, held = (block + gradient) * others, 8.0 * cols * dim + 4.0 * rows * cols * cached
    chosen = choose_schedule(cols * dim) == "all-gather"
    time = sent / rate + 2 * others * latency
    gathered = Plan(gpus, "all-gather", chosen, flops, sent, 2, held, flops / speed, time)

    # A block's products hide the exchange of the next one; a gradient's last exchange is hidden by
    # nothing.
    flops, last = (forward + 3 * backward) * product, gradient / rate + latency
    sent = (forward + backward) * block * others + backward * gradient * gpus
    waits = forward * max(0.0, block / rate + latency - product / gpus / speed)
    waits += backward * max(0.0, (block + gradient) / rate + latency - 3 * product / gpus / speed)
    exchanges = (forward + backward) * others + backward * gpus
    held, time = 2 * block + 3 * gradient, waits * others + backward * last
    return gathered, Plan(
        gpus, "ring", not chosen, flops, sent, exchanges, held, flops / speed, time
    )


def plan_table(plans: Sequence[Plan]) -> str:
    """Return a line for each plan, of at most 100 columns; a star marks the schedule that
    ``gather=True`` takes.
    """
    lines = [
        f"{'GPUs':>5} {'schedule':11} {'TFLOP':>9} {'MB sent':>9} {'exchanges':>9} {'MB held':>9} {'ms':>9}  waiting"
    ]
    for p in plans:
        figures = (
            p.flops / 1e12,
            p.sent / 1e6,
            p.exchanges,
            p.held / 1e6,
            1e3 * (p.computing + p.waiting),
        )
        numbers = " ".join(f"{x:9,.0f}" if x >= 100 else f"{x:9.3g}" for x in figures)
        lines.append(
            f"{p.gpus:5} {p.schedule + '*' * p.chosen:11} {numbers}  {p.waiting / (p.computing + p.waiting):7.0%}"
        )
    return "\n".join(lines)
