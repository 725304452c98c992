"""Standard deviations of each anchor's negatives in both ways: ``python -m benchmarks.moments``.

One visits all scores, the other computes D x D numbers. Printed are their seconds, and which one
the engine takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import torch

from itrloss import Anchors, Similarity
from itrloss.engine import moments

from .cases import embeddings, parse_shape

SHAPES = (
    "2048x2048x64",
    "2048x2048x256",
    "8192x8192x64",
    "8192x8192x256",
    "8192x8192x512",
    "1024x65536x256",
    "12288x12288x256",
    "12288x12288x512",
    "5000x25000x512",
)


def seconds(shape: tuple[int, ...], sides: int, way: bool, rounds: int) -> float:
    """Return the median time of the standard deviations in one way."""
    n, m, dim = shape
    rows, cols = embeddings(n, dim)[0], embeddings(m, dim, seed=1)[0]
    ids = torch.arange(n), torch.arange(m)
    sim = Similarity(rows, cols, *ids, engine="tiled", memory_budget=2**28)
    times = []
    with mock.patch.object(moments, "has_gain", lambda *_: way):
        for _ in range(rounds + 1):
            anchors: Anchors = sim if sides == 1 else sim.both
            start = time.perf_counter()
            anchors.std()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first forms scores that are kept


def taken(shape: tuple[int, ...], sides: int) -> str:
    """Return which way the engine takes."""
    n, m, dim = shape
    found = []
    original = moments.has_gain

    def seen(*args: object) -> bool:
        found.append(original(*args))  # type: ignore[arg-type]
        return True

    ids = torch.arange(n), torch.arange(m)
    x = torch.ones(max(n, m), dim)
    sim = Similarity(x[:n], x[:m], *ids, engine="tiled", memory_budget=2**28)
    with mock.patch.object(moments, "has_gain", seen):
        (sim if sides == 1 else sim.both).std()
    return "numbers" if found[0] else "scores"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'shape':18} sides   scores  numbers  taken")
    with torch.no_grad():
        for name in args.shapes:
            shape = parse_shape(name, "pairs")
            for sides in (1, 2):
                times = [seconds(shape, sides, way, args.rounds) for way in (False, True)]
                by_scores, by_numbers = times
                way = taken(shape, sides)
                print(f"{name:18} {sides:5} {by_scores:8.3f} {by_numbers:8.3f}  {way}", flush=True)


if __name__ == "__main__":
    main()
