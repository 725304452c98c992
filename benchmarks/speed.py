"""Forward + backward of every loss: itrloss, eager PyTorch, compiled PyTorch and the bare products, interleaved.

    python -m benchmarks.speed --sizes 128 512 2048 8192 --dim 1024 --out FILE
    python -m benchmarks.speed --sizes --memory 128x4096x1024 512x16384x512 --out FILE
    python -m benchmarks.speed --sizes --sets 128x6x1024 --prototypes 128x20000x1024

Shared machines are noisy. The variants of a case run in turn, round after round, in one process, and each time another
one begins; a round's times are divided by each other, and the medians of these ratios are reported. The floor is the
matrix products that cannot be left out, and nothing else: one forward and two backward, or with a memory one of each in
each direction. Compiled code meets ours in rounds of its
own, so that the threads it leaves spinning disturb no other variant.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import itrloss
from benchmarks import eager

# name -> (our module, the eager function with the same options)
CASES: dict[str, tuple[Callable[..., torch.nn.Module], Callable[..., Tensor]]] = {
    "dcl std": (itrloss.DiversityContrastiveLoss, eager.dcl),
    "dcl entropy": (
        partial(itrloss.DiversityContrastiveLoss, diversity="entropy"),
        partial(eager.dcl, diversity="entropy"),
    ),
    "dcl implicit": (partial(itrloss.DiversityContrastiveLoss, diversity=None), partial(eager.dcl, diversity=None)),
    "hal": (itrloss.HubnessAwareLoss, eager.hal),
    "infonce": (itrloss.InfoNCELoss, eager.infonce),
    "sigmoid": (partial(itrloss.SigmoidLoss, learnable=False), eager.sigmoid),
    "triplet hardest": (itrloss.TripletLoss, eager.triplet),
    "triplet all": (partial(itrloss.TripletLoss, mining="all"), partial(eager.triplet, mining="all")),
}


# The same with a memory.
MEMORY_CASES: dict[str, tuple[Callable[..., torch.nn.Module], Callable[..., Tensor]]] = {
    "mdcl": (itrloss.MemoryDiversityContrastiveLoss, eager.memory_dcl),
    "uto": (itrloss.UnifiedTrainingObjective, eager.uto),
}


# More kinds of cases: option -> (their losses, what the numbers of a shape are).
OTHERS: dict[str, tuple[list[str], str]] = {
    "memory": (list(MEMORY_CASES), "batch x entries x dim of a memory"),
    "sets": (["variance aware"], "batch x heads x dim of sets"),
    "prototypes": (["pgc"], "batch x clusters x dim of a classification"),
}


class Case(NamedTuple):
    """A loss, what it is compared with, and what they are called with."""

    shape: dict[str, int]
    ours: torch.nn.Module
    plain: Callable[..., Tensor]
    floor: Callable[[], None]
    leaves: tuple[Tensor, ...]  # that get a gradient
    given: tuple[Any, ...]  # to ours, after the leaves
    given_plain: tuple[Any, ...]  # to the plain function


def pair_case(name: str, size: int, dim: int) -> Case:
    """N images and N texts; the floor is the three products that any dense implementation makes."""
    module, plain = CASES[name]
    v, w = inputs(size, dim)
    s = torch.empty(size, size)

    def floor() -> None:
        torch.mm(v, w.T, out=s)
        torch.mm(s, w)
        torch.mm(s.T, v)

    leaves = tuple(x.clone().requires_grad_() for x in (v, w))
    return Case({"size": size, "dim": dim}, module(), plain, floor, leaves, (), ())


def memory_case(name: str, batch: int, entries: int, dim: int) -> Case:
    """A batch of pairs against a full memory; the floor is one product forward and one backward per direction."""
    module, plain = MEMORY_CASES[name]
    v, w = inputs(batch, dim)
    v_keys, w_keys = inputs(batch, dim, seed=1)
    memory = itrloss.CoupledMemory(entries, dim)
    memory.enqueue(*inputs(entries, dim, seed=2), torch.arange(entries))
    ids = torch.randperm(2 * entries, generator=torch.Generator().manual_seed(0))[:batch]  # some are in the memory
    s = torch.empty(batch, entries)

    def floor() -> None:
        for anchors, keys in ((v, memory.texts), (w, memory.images)):
            torch.mm(anchors, keys.T, out=s)
            torch.mm(s, keys)

    leaves = tuple(x.clone().requires_grad_() for x in (v, w))
    given = (v_keys, w_keys, memory, ids, ids)
    given_plain = (v_keys, w_keys, memory.images, memory.texts, ids, memory.ids)
    shape = {"size": batch, "entries": entries, "dim": dim}
    return Case(shape, module(), plain, floor, leaves, given, given_plain)


def sets_case(name: str, size: int, heads: int, dim: int) -> Case:
    """Images with some embeddings each and one text each; the floor has one forward product a head and two backward."""
    images, texts = torch.stack([inputs(size, dim, seed)[0] for seed in range(heads)], 1), inputs(size, dim)[1]
    s = torch.empty(size, size)

    def floor() -> None:
        for head in range(heads):
            torch.mm(images[:, head], texts.T, out=s)
            torch.mm(s, texts)
            torch.mm(s.T, images[:, head])

    leaves = tuple(x.clone().requires_grad_() for x in (images, texts))
    shape = {"size": size, "heads": heads, "dim": dim}
    return Case(shape, itrloss.VarianceAwareLoss(), eager.variance_aware, floor, leaves, (), ())


def prototypes_case(name: str, batch: int, clusters: int, dim: int) -> Case:
    """Pairs of concept embeddings and their prototypes; the floor has one forward product and two backward."""
    v, w = inputs(batch, dim)
    module = itrloss.PrototypeClassificationLoss(dim, clusters)
    both, weight, s = torch.cat([v, w]), module.weight.detach(), torch.empty(2 * batch, clusters)
    ids = torch.randint(0, clusters, (batch,), generator=torch.Generator().manual_seed(0))

    def floor() -> None:
        torch.mm(both, weight.T, out=s)
        torch.mm(s, weight)
        torch.mm(s.T, both)

    leaves = tuple(x.clone().requires_grad_() for x in (v, w))
    shape = {"size": batch, "clusters": clusters, "dim": dim}
    return Case(shape, module, eager.prototype_classification, floor, leaves, (ids,), (module.weight, ids))


def inputs(size: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs as a model in training gives them: cosines of 0.2 for positives, 0 ± 0.1 for negatives."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(100, dim, generator=generator) / 10  # a hundred directions carry most of the variance
    v = torch.randn(size, 100, generator=generator)
    w = v + 5 * torch.randn(size, 100, generator=generator)
    noise = (torch.randn(size, dim, generator=generator) for _ in range(2))
    return tuple(x @ mix / x.norm(dim=1, keepdim=True) * 10 + 0.1 * n for x, n in zip((v, w), noise, strict=True))  # type: ignore[return-value]


def measure(name: str, case: Case, rounds: int, compiled: bool) -> dict[str, object]:
    """One row of the table: medians of the rounds' ratios, and the agreement of the gradients."""
    gradients: dict[str, Tensor] = {}

    def step(label: str, loss: Callable[..., Tensor], given: tuple[Any, ...]) -> None:
        for x in case.leaves:
            x.grad = None
        loss(*case.leaves, *given).backward()
        assert case.leaves[0].grad is not None
        gradients[label] = case.leaves[0].grad

    variants: dict[str, Callable[[], None]] = {
        "ours": partial(step, "ours", case.ours, case.given),
        "eager": partial(step, "eager", case.plain, case.given_plain),
        "floor": case.floor,
    }
    times = interleave(variants, rounds)
    reference = gradients["ours"].norm()
    row: dict[str, object] = {
        "loss": name,
        **case.shape,
        "rounds": rounds,
        "eager / ours": ratio(times["eager"], times["ours"]),
        "ours / floor": ratio(times["ours"], times["floor"]),
        "eager / floor": ratio(times["eager"], times["floor"]),
        "gradient difference to eager": float((gradients["ours"] - gradients["eager"]).norm() / reference),
    }
    if compiled:
        torch._dynamo.reset()
        plain, ours = (torch.compile(f, fullgraph=True) for f in (case.plain, case.ours))
        variants = {
            "ours": variants["ours"],
            "eager compiled": partial(step, "eager compiled", plain, case.given_plain),
            "ours compiled": partial(step, "ours compiled", ours, case.given),
        }
        times = interleave(variants, rounds)
        row["eager compiled / ours"] = ratio(times["eager compiled"], times["ours"])
        row["eager compiled / ours compiled"] = ratio(times["eager compiled"], times["ours compiled"])
        for label in ("eager compiled", "ours compiled"):
            row[f"gradient difference to {label}"] = float((gradients["ours"] - gradients[label]).norm() / reference)
    return row


def interleave(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round."""
    for run in variants.values():  # warm up, compile
        run()
        run()
    times: dict[str, list[float]] = {label: [] for label in variants}
    labels = list(variants)
    for turn in range(rounds):
        first = turn % len(labels)  # each variant gets to run after each other one
        for label in labels[first:] + labels[:first]:
            start = time.perf_counter()
            variants[label]()
            times[label].append(time.perf_counter() - start)
    return times


def ratio(of: list[float], to: list[float]) -> float:
    """Median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(of, to, strict=True)), 3)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "device": "cpu",
        "processor": model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "itrloss": itrloss.__version__,
        "date": date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[128, 512, 2048], help="of the batch")
    parser.add_argument("--dim", type=int, default=1024)
    every = [*CASES, *(name for names, _ in OTHERS.values() for name in names)]
    parser.add_argument("--losses", nargs="+", default=every, choices=every)
    for option, (_, numbers) in OTHERS.items():
        parser.add_argument(f"--{option}", nargs="*", default=[], metavar="NxMxD", help=numbers)
    parser.add_argument("--seconds", type=float, default=10, help="about how long to measure each case")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of both")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    makers = {"memory": memory_case, "sets": sets_case, "prototypes": prototypes_case}
    runs = [
        (n, 3 * size * size * args.dim, partial(pair_case, n, size, args.dim)) for size in args.sizes for n in CASES
    ]
    for option, (names, _) in OTHERS.items():
        for shape in (tuple(int(x) for x in text.split("x")) for text in getattr(args, option)):
            runs += [(n, 4 * math.prod(shape), partial(makers[option], n, *shape)) for n in names]
    rows = []
    for name, work, make in runs:
        if name in args.losses:
            guess = max(2e-3, 20 * work / 2e11)  # seconds of a round of all variants, roughly
            rounds = int(min(200, max(3, args.seconds / guess)))
            row = measure(name, make(), rounds, args.compiled)
            rows.append(row)
            print(
                " · ".join(f"{k} {v:.2g}" if isinstance(v, float) and v < 1e-2 else f"{k} {v}" for k, v in row.items()),
                flush=True,
            )
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
