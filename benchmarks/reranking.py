"""Fast Re-ranking with all metrics from embeddings, compared with its two bare products and the
loops of RR and MR.

    python -m benchmarks.reranking --out benchmarks/results/cpu_reranking.json
    python -m benchmarks.reranking --slice 2000     # of 100 000 x 500 000, by 2000 of the images
    python -m benchmarks.reranking --methods --out benchmarks/results/cpu_rerank_command.json

RR (MTFN) and MR (GaLR) are implemented as in their papers' public code, in NumPy: sort the matrix
both ways, then search for each query among the sorted queries of each of its candidates. If that
takes too long, the loops are timed for a share of the queries and extrapolated; the sorts are timed
in full.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itrloss import Similarity
from itrloss.cli.comparison import compare_rerankers
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import FastReranker

from . import report, runner
from .peak import peak_memory

SIZES = ((1000, 5000), (5000, 25_000))
DIM = 1024
BLOCK = 512
TIMED_QUERIES = 400  # number of queries that the loops are timed on, for larger sizes
RR_K, MR_K = (15, 20), 30


def embeddings(n: int, m: int, dim: int = DIM) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return (N, D) images, (M, D) captions similar to them, of which some are hubs, and the ids of
    both.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, dim, generator=generator)
    ids = torch.arange(n), torch.arange(n).repeat_interleave(m // n)
    noise = torch.randn(m, dim, generator=generator)
    return (
        images,
        images[ids[1]] + 12 * noise + 3 * torch.rand(m, 1, generator=generator) * images.mean(0),
        ids,
    )


def matmul_bound(images: Tensor, texts: Tensor) -> None:
    """Multiply as often as two passes over all scores do, reusing the output buffer."""
    space = torch.empty(BLOCK, len(texts))
    for _ in range(2):
        for part in images.split(BLOCK):
            torch.mm(part, texts.T, out=space[: len(part)])


def sort_both_ways(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.argsort(-scores, 1), np.argsort(-scores, 0)


def reverse_ranks(order: np.ndarray, back: np.ndarray, query: int, k: int) -> np.ndarray:
    """Return the (k,) ranks of the query among the sorted queries of each of its k best
    candidates.
    """
    ranks = np.array([])
    for candidate in order[query, :k]:
        ranks = np.append(ranks, np.where(back[:, candidate] == query)[0][0])
    return ranks


def loops_rr(order: np.ndarray, back: np.ndarray, queries: range, k: int) -> None:
    for query in queries:
        order[query, :k][np.argsort(reverse_ranks(order, back, query, k), kind="stable")]


def loops_mr(
    scores: np.ndarray, order: np.ndarray, back: np.ndarray, queries: range, k: int
) -> None:
    """MR computes the sum of a candidate's scores again for every query that has it among its
    best.
    """
    out = np.zeros(scores.shape[1], np.float32)
    for query in queries:
        for j, candidate in enumerate(order[query, :k]):
            share = scores[query, candidate] / np.sum(scores[:, candidate])
            out[candidate] = 0.3 * share + np.exp(-0.05 * (j + 1))
        by_rank = order[query, :k][np.argsort(reverse_ranks(order, back, query, k), kind="stable")]
        for position, candidate in enumerate(by_rank):
            out[candidate] += 1.1 * np.exp(-0.05 * (position + 1))


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_loops(scores: np.ndarray) -> dict[str, float]:
    """Return the seconds of RR and of MR, both directions."""
    start = time.perf_counter()
    order, back = sort_both_ways(scores)
    sorts = time.perf_counter() - start
    seconds = {"rr": sorts, "mr": 2 * sorts}  # MR's code sorts again for the second direction
    for (s, o, b), k in zip(
        ((scores, order, back), (scores.T, back.T, order.T)), RR_K, strict=True
    ):
        queries = range(min(len(s), TIMED_QUERIES))
        share = len(s) / len(queries)
        seconds["rr"] += share * timed(lambda o=o, b=b, q=queries, k=k: loops_rr(o, b, q, k))
        seconds["mr"] += share * timed(lambda s=s, o=o, b=b, q=queries: loops_mr(s, o, b, q, MR_K))
    return seconds


def measure(n: int, m: int, rounds: int) -> dict[str, Any]:
    """Return one row of the result."""
    images, texts, ids = embeddings(n, m)
    reranker = FastReranker()
    calls = {
        "matmul_bound": lambda: matmul_bound(images, texts),
        "fast and metrics": lambda: retrieval_metrics(
            Similarity(images, texts, *ids), reranker=reranker
        ),
        "metrics": lambda: retrieval_metrics(Similarity(images, texts, *ids)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    ratio = median(
        b / a for a, b in zip(times["matmul_bound"], times["fast and metrics"], strict=True)
    )
    seconds = {name: median(x) for name, x in times.items()}
    sim = Similarity(images, texts, *ids)
    i2t, t2i = reranker.rerank(Similarity.from_scores(sim.scores(), *ids))
    dense = retrieval_metrics((i2t, t2i), *ids)
    streamed = retrieval_metrics(sim, reranker=reranker)
    scores = sim.scores()
    fast = median(timed(lambda: reranker.rerank(scores)) for _ in range(rounds))
    seconds |= {"fast on the matrix": fast, **time_loops(scores.numpy())}
    return {
        "shape": [n, m, DIM],
        "to matmul_bound": ratio,
        "rr to fast on the matrix": seconds["rr"] / fast,
        "mr to fast on the matrix": seconds["mr"] / fast,
        "largest difference to dense metrics": max(
            abs(dense[x] - streamed[x]) for x in dense if "skewness" not in x
        ),
        "seconds": seconds,
    }


def measure_slice(part: int, n: int = 100_000, m: int = 500_000, dim: int = 512) -> dict[str, Any]:
    """Return the row for some of the images with all the texts: the time of both passes is
    proportional to the images.

    The peak memory excludes the embeddings.
    """
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(size, dim, generator=generator) for size in (part, m))
    ids = torch.arange(part), torch.arange(m)
    FastReranker().topk(Similarity(images[:64], texts[:64], ids[0][:64], ids[1][:64]), 10)
    times: list[float] = []

    def rank() -> None:
        start = time.perf_counter()
        best = FastReranker().topk(Similarity(images, texts, *ids, engine="tiled"), 10)
        times.append(time.perf_counter() - start)
        assert best.i2t.indices.shape == (part, 10) and best.t2i.indices.shape == (m, 10)

    megabytes = peak_memory(rank, images.device)
    seconds = times[0]
    products = (
        timed(lambda: matmul_bound(images[: min(part, BLOCK)], texts)) * part / min(part, BLOCK)
    )
    return {
        "shape": [n, m, dim],
        "images measured": part,
        "seconds": seconds,
        "to matmul_bound": seconds / products,
        "hours for all images": seconds * n / part / 3600,
        "peak_mb": megabytes,
    }


def measure_methods(n: int, m: int) -> list[dict[str, Any]]:
    """Return a row for each method with the column *time* of ``itrloss rerank``, the fastest
    first.
    """
    images, texts, ids = embeddings(n, m)
    scores = Similarity(images, texts, *ids).scores()
    entries = compare_rerankers(scores, samples=100).entries
    rows = [{"method": x.name, "shape": [n, m], "seconds": round(x.seconds, 2)} for x in entries]
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Measure, print and write the results; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--slice",
        type=int,
        metavar="IMAGES",
        help="instead, measure this many of 100 000 images with 500 000 texts",
    )
    parser.add_argument(
        "--methods", action="store_true", help="instead, time all methods of itrloss rerank"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    if args.out:
        report.check_path(args.out)
    found: Iterable[dict[str, Any]]
    if args.slice:
        found = [measure_slice(args.slice)]
    elif args.methods:
        found = measure_methods(*SIZES[-1])
    else:
        found = (measure(n, m, args.rounds) for n, m in SIZES)
    rows = []
    for row in found:
        rows.append(row)
        for name, value in row.items():
            print(f"{name}: {value}")
        if args.out:
            report.save(args.out, runner.machine("cpu"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
