"""``mine_hard_negatives`` next to FAISS's flat index, and to products and ``topk``, interleaved
in one process.

    python -m benchmarks.mining --out benchmarks/results/cpu_mining.json

The others find the best of the whole corpus: they know no positives. ``matmul_bound`` are the bare
products, in tiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from itrloss import mine_hard_negatives
from itrloss.engine.products import matmul

from . import report, runner
from .peak import peak_memory

ROWS, COLS = 1000, 2048  # of a tile of bare products


def flat_index(corpus: Tensor) -> Any:
    """Return FAISS's index of inner products, with as many threads as PyTorch, or None where it is
    not installed.
    """
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    index: Any = faiss.IndexFlatIP(corpus.shape[1])
    index.add(corpus.numpy())
    return index


def ways(queries: Tensor, corpus: Tensor, k: int) -> dict[str, Callable[[], Any]]:
    """Return calls, each of which finds the k best of unit vectors; those of ours return the
    indices.
    """
    index = flat_index(corpus)
    ids = torch.arange(len(queries)), torch.full((len(corpus),), -1)

    def bound() -> None:
        for y in corpus.split(COLS):
            for x in queries.split(ROWS):
                matmul(x, y.T)

    calls = {
        "ours": lambda: mine_hard_negatives(queries, corpus, *ids, k, normalize=False).indices,
        "ours, normalised": lambda: mine_hard_negatives(queries, corpus, *ids, k).indices,
        "mm and topk": lambda: torch.cat(
            [torch.mm(x, corpus.T).topk(k).indices for x in queries.split(256)]
        ),
        "matmul_bound": bound,
    }
    return (
        calls
        if index is None
        else calls | {"faiss": lambda: torch.from_numpy(index.search(queries.numpy(), k)[1])}
    )


def measure(n: int, m: int, dim: int, k: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each way: seconds, their ratio to ours, megabytes, and the share of the same
    neighbours.
    """
    generator = torch.Generator().manual_seed(0)
    queries, corpus = (F.normalize(torch.randn(size, dim, generator=generator)) for size in (n, m))
    calls = ways(queries, corpus, k)
    results = {name: call() for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, call in calls.items():
        same = (
            None
            if results[name] is None
            else float((results[name] == results["ours"]).double().mean())
        )
        ratio = median(a / b for a, b in zip(seconds[name], seconds["ours"], strict=True))
        about = {
            "way": name,
            "shape": [n, m, dim],
            "k": k,
            "seconds": median(seconds[name]),
            "to ours": ratio,
        }
        rows.append(about | {"same neighbours": same, "peak_mb": peak_memory(call, queries.device)})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(2000, 200_000, 384), metavar=("N", "M", "D")
    )
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.out:
        report.check_path(args.out)
    n, m, dim = args.shape
    rows = measure(n, m, dim, args.k, args.rounds)
    for row in rows:
        print(row)
    if args.out:
        report.save(args.out, runner.machine("cpu"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
