"""Forward + backward of every loss: itrloss, eager PyTorch, compiled PyTorch and the bare products, interleaved.

    python -m benchmarks.speed --sizes 128 512 2048 8192 --dim 1024 --out benchmarks/results/NAME.json

Shared machines are noisy. All variants of a case run in turn, round after round, in one process, and each time another
one begins; a round's times are divided by each other, and the medians of these ratios are reported. The floor is one
forward product and two backward products of the same sizes and nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

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
    "triplet hardest": (itrloss.TripletLoss, eager.triplet),
    "triplet all": (partial(itrloss.TripletLoss, mining="all"), partial(eager.triplet, mining="all")),
}


def floor(v: Tensor, w: Tensor, s: Tensor) -> None:
    """The three products that any dense implementation makes."""
    torch.mm(v, w.T, out=s)
    torch.mm(s, w)
    torch.mm(s.T, v)


def inputs(size: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs as a model in training gives them: cosines of 0.2 for positives, 0 ± 0.1 for negatives."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(100, dim, generator=generator) / 10  # a hundred directions carry most of the variance
    v = torch.randn(size, 100, generator=generator)
    w = v + 5 * torch.randn(size, 100, generator=generator)
    noise = (torch.randn(size, dim, generator=generator) for _ in range(2))
    return tuple(x @ mix / x.norm(dim=1, keepdim=True) * 10 + 0.1 * n for x, n in zip((v, w), noise, strict=True))  # type: ignore[return-value]


def measure(name: str, size: int, dim: int, rounds: int, compiled: bool) -> dict[str, object]:
    """One row of the table: medians of the rounds' ratios, and the agreement of the gradients."""
    module, plain = CASES[name]
    v, w = (x.requires_grad_() for x in inputs(size, dim))
    gradients: dict[str, Tensor] = {}

    def step(label: str, loss: Callable[..., Tensor]) -> None:
        v.grad = w.grad = None
        loss(v, w).backward()
        assert v.grad is not None and w.grad is not None
        gradients[label] = v.grad

    variants: dict[str, Callable[[], None]] = {
        "ours": partial(step, "ours", module()),
        "eager": partial(step, "eager", plain),
    }
    scores = torch.empty(size, size)
    variants["floor"] = partial(floor, v.detach(), w.detach(), scores)
    if compiled:
        torch._dynamo.reset()
        variants["compiled"] = partial(step, "compiled", torch.compile(plain, fullgraph=True))
    for run in variants.values():  # warm up, compile
        run()
        run()
    times: dict[str, list[float]] = {label: [] for label in variants}
    labels = list(variants)
    for turn in range(rounds):
        first = turn % len(labels)  # each variant gets to run after each other one
        for label in labels[first:] + labels[:first]:
            run = variants[label]
            start = time.perf_counter()
            run()
            times[label].append(time.perf_counter() - start)
    ratios = {
        label: statistics.median(t / o for t, o in zip(times[label], times["ours"], strict=True)) for label in variants
    }
    reference = gradients["ours"].norm()
    row: dict[str, object] = {
        "loss": name,
        "size": size,
        "dim": dim,
        "rounds": rounds,
        "engine": itrloss.Similarity(v, w).engine,
        "eager / ours": round(ratios["eager"], 3),
        "ours / floor": round(1 / ratios["floor"], 3),
        "eager / floor": round(
            statistics.median(e / f for e, f in zip(times["eager"], times["floor"], strict=True)), 3
        ),
        "gradient difference to eager": float((gradients["ours"] - gradients["eager"]).norm() / reference),
    }
    if compiled:
        row["compiled / ours"] = round(ratios["compiled"], 3)
        row["gradient difference of compiled"] = float((gradients["ours"] - gradients["compiled"]).norm() / reference)
    return row


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
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--losses", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=10, help="about how long to measure each case")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the eager form")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        for name in args.losses:
            guess = max(2e-3, 30 * size * size * args.dim * 2 / 2e11)  # a round of all variants, roughly
            rounds = int(min(200, max(3, args.seconds / guess)))
            row = measure(name, size, args.dim, rounds, args.compiled)
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
