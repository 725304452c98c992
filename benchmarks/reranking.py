"""Fast Re-ranking with all metrics from embeddings, beside its two bare products and the loops of RR and MR.

    python benchmarks/reranking.py --out benchmarks/results/cpu_reranking.json
    python benchmarks/reranking.py --slice 2000     # the ten best of 100 000 x 500 000, by 2000 of the images

RR (MTFN) and MR (GaLR) are formulated as in their papers' public codes, in NumPy: sort the matrix both ways, then look
for each query among the sorted queries of each of its candidates. Where that takes too long, a share of the queries is
timed and the loops' time multiplied; the sorts are timed whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itrloss import Similarity
from itrloss.bench import report, runner
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import FastReranker

SIZES = ((1000, 5000), (5000, 25_000))
DIM = 1024
BLOCK = 512
LONGEST = 400  # queries that the loops are timed on, for a size that has more
RR_K, MR_K = (15, 20), 30


def embeddings(n: int, m: int, dim: int = DIM) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Of images and captions that are somewhat like them, and some captions that are like everything."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, dim, generator=generator)
    ids = torch.arange(n), torch.arange(n).repeat_interleave(m // n)
    noise = torch.randn(m, dim, generator=generator)
    return images, images[ids[1]] + 12 * noise + 3 * torch.rand(m, 1, generator=generator) * images.mean(0), ids


def both_products(images: Tensor, texts: Tensor) -> None:
    """What two passes over all scores cannot do without; into the same memory again and again."""
    space = torch.empty(BLOCK, len(texts))
    for _ in range(2):
        for part in images.split(BLOCK):
            torch.mm(part, texts.T, out=space[: len(part)])


def sorted_both_ways(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.argsort(-scores, 1), np.argsort(-scores, 0)


def places(order: np.ndarray, back: np.ndarray, query: int, k: int) -> np.ndarray:
    """Where the query stands with each of its k best: searched for in the list of queries that each of them has."""
    found = np.array([])
    for candidate in order[query, :k]:
        found = np.append(found, np.where(back[:, candidate] == query)[0][0])
    return found


def loops_rr(order: np.ndarray, back: np.ndarray, queries: range, k: int) -> None:
    for query in queries:
        order[query, :k][np.argsort(places(order, back, query, k), kind="stable")]


def loops_mr(scores: np.ndarray, order: np.ndarray, back: np.ndarray, queries: range, k: int) -> None:
    """MR sums a candidate's scores anew for every query that it is among the best of."""
    out = np.zeros(scores.shape[1], np.float32)
    for query in queries:
        for j, candidate in enumerate(order[query, :k]):
            share = scores[query, candidate] / np.sum(scores[:, candidate])
            out[candidate] = 0.3 * share + np.exp(-0.05 * (j + 1))
        by_place = order[query, :k][np.argsort(places(order, back, query, k), kind="stable")]
        for position, candidate in enumerate(by_place):
            out[candidate] += 1.1 * np.exp(-0.05 * (position + 1))


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def of_loops(scores: np.ndarray) -> dict[str, float]:
    """Seconds of RR and of MR, both directions."""
    start = time.perf_counter()
    order, back = sorted_both_ways(scores)
    sorts = time.perf_counter() - start
    found = {"rr": sorts, "mr": 2 * sorts}  # MR's code sorts again for the second direction
    for way, (s, o, b) in enumerate(((scores, order, back), (scores.T, back.T, order.T))):
        queries = range(min(len(s), LONGEST))
        share = len(s) / len(queries)
        found["rr"] += share * timed(lambda o=o, b=b, q=queries, k=RR_K[way]: loops_rr(o, b, q, k))
        found["mr"] += share * timed(lambda s=s, o=o, b=b, q=queries: loops_mr(s, o, b, q, MR_K))
    return found


def measure(n: int, m: int, rounds: int) -> dict[str, Any]:
    """One row of the result."""
    images, texts, ids = embeddings(n, m)
    reranker = FastReranker()
    calls = {
        "products": lambda: both_products(images, texts),
        "fast re-ranking and metrics": lambda: retrieval_metrics(Similarity(images, texts, *ids), reranker=reranker),
        "metrics alone": lambda: retrieval_metrics(Similarity(images, texts, *ids)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    ratio = median(b / a for a, b in zip(times["products"], times["fast re-ranking and metrics"], strict=True))
    seconds = {name: median(x) for name, x in times.items()}
    sim = Similarity(images, texts, *ids)
    i2t, t2i = reranker.rerank(Similarity.from_scores(sim.scores(), *ids))
    dense = retrieval_metrics((i2t, t2i), *ids)
    streamed = retrieval_metrics(sim, reranker=reranker)
    apart = max(abs(dense[name] - streamed[name]) for name in dense if "skewness" not in name)
    scores = sim.scores()
    seconds["fast re-ranking of the matrix"] = median(timed(lambda: reranker.rerank(scores)) for _ in range(rounds))
    seconds |= of_loops(scores.numpy())
    ours = seconds["fast re-ranking of the matrix"]
    return {
        "shape": [n, m, DIM],
        "to the products": ratio,
        "rr takes as long as so many fast re-rankings of the matrix": seconds["rr"] / ours,
        "mr takes as long as so many fast re-rankings of the matrix": seconds["mr"] / ours,
        "largest difference of a figure to the dense way": apart,
        "seconds": seconds,
    }


def measure_slice(part: int, n: int = 100_000, m: int = 500_000, dim: int = 512) -> dict[str, Any]:
    """Some of the images with all the texts: both passes take time in proportion to the images.

    The peak is of memory beyond the embeddings.
    """
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(size, dim, generator=generator) for size in (part, m))
    ids = torch.arange(part), torch.arange(m)
    FastReranker().topk(Similarity(images[:64], texts[:64], ids[0][:64], ids[1][:64]), 10)
    times: list[float] = []

    def rank() -> None:
        start = time.perf_counter()
        found = FastReranker().topk(Similarity(images, texts, *ids, engine="tiled"), 10)
        times.append(time.perf_counter() - start)
        assert found.i2t.indices.shape == (part, 10) and found.t2i.indices.shape == (m, 10)

    megabytes = runner.peak(rank, images.device)
    seconds = times[0]
    products = timed(lambda: both_products(images[: min(part, BLOCK)], texts)) * part / min(part, BLOCK)
    return {
        "shape": [n, m, dim],
        "images measured": part,
        "seconds": seconds,
        "to the products": seconds / products,
        "hours for all images": seconds * n / part / 3600,
        "peak_mb": megabytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slice", type=int, metavar="IMAGES", help="instead, so many of 100 000 with 500 000 texts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    cases = [lambda: measure_slice(args.slice)] if args.slice else [lambda s=s: measure(*s, args.rounds) for s in SIZES]
    for case in cases:
        row = case()
        rows.append(row)
        for name, value in row.items():
            print(f"{name}: {value}")
        if args.out:
            report.save(args.out, runner.machine("cpu"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
