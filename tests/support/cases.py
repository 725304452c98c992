"""Inputs shared by the tests: shapes and ids by name, and covering sets of parameter
combinations.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from itrloss import (
    Anchors,
    Related,
    Similarity,
    SuspiciousInputWarning,
    pair_term,
    rerank,
)
from support.reference import Reference

# (rows, columns, ids): None is the diagonal, "random" has duplicates and anchors without positives
SHAPES = {
    "primes": (13, 13, None),
    "square with duplicates": (13, 13, "random"),
    "five captions": (5, 25, "captions"),
    "wide": (5, 17, "random"),
    "tall": (17, 5, "random"),
}


def pairwise(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Select cases so that every two values of different axes meet at least once: far fewer than
    the full product.

    Most failures of combinations are caused by two of their values. The selection is greedy and
    deterministic.
    """
    values = [list(axis) for axis in axes.values()]
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(values)), 2)
        for a in range(len(values[i]))
        for b in range(len(values[j]))
    }
    cases = []
    while missing:
        i, a, j, b = min(missing)
        case = {i: a, j: b}
        for k in range(len(values)):
            if k not in case:
                size = len(values[k])
                places = [(len(cases) + x) % size for x in range(size)]
                gains = [_pairs_met(case, k, x, missing) for x in places]
                case[k] = places[gains.index(max(gains))]
        for i, j in itertools.combinations(sorted(case), 2):
            missing.discard((i, case[i], j, case[j]))
        cases.append(tuple(values[k][case[k]] for k in range(len(values))))
    return cases


def _pairs_met(
    case: dict[int, int], axis: int, place: int, missing: set[tuple[int, int, int, int]]
) -> int:
    """How many missing pairs a value of an axis makes with the values of a case."""
    met = 0
    for other, other_place in case.items():
        if other < axis:
            pair = (other, other_place, axis, place)
        else:
            pair = (axis, place, other, other_place)
        met += pair in missing
    return met


def each(times: int = 1, /, **axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Select cases so that each value of the first and longest axis occurs so many times, every
    time with other values of each of the other axes.

    Values of the other axes are mixed even where the numbers of values have a common divisor. A
    value that is added at the end of the first axis changes no other case.
    """
    first, *others = (list(axis) for axis in axes.values())
    assert len(first) * times >= max(map(len, others))
    cases = []
    for time in range(times):
        for place, value in enumerate(first):
            chosen = [value]
            period = 1  # after so many places, the values of the axes so far begin again
            for axis in others:
                period = math.lcm(period, len(axis))
                chosen.append(axis[(place + place // period + time) % len(axis)])
            cases.append(tuple(chosen))
    return cases


def measured_apart(code: str, *arguments: str) -> Any:
    """What the code prints, as JSON, in a process whose allocator gives back at once what is freed.

    Otherwise a peak of the resident set depends on what was measured before, by up to 40 MB.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    command = [sys.executable, "-c", code, *arguments]
    home = Path(__file__).parents[2]  # from where the code imports benchmarks
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def make_ids(
    kind: str | None, n: int, m: int, seed: int = 0
) -> tuple[Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    if kind is None:
        return None, None
    if kind == "random":
        return tuple(torch.randint(0, 5, (size,), generator=generator) - 2 for size in (n, m))  # type: ignore
    if kind == "captions":
        return torch.arange(n), torch.arange(n).repeat_interleave(m // n)
    if kind == "disjoint":
        return torch.arange(n), torch.arange(m) + 1000
    if kind == "same":
        return torch.full((n,), 7), torch.full((m,), 7)
    raise AssertionError(kind)


def public_rerankers() -> set[type]:
    """Return the classes of all re-rankers of the library."""
    found = set()
    for kind in vars(rerank).values():
        is_reranker = isinstance(kind, type) and issubclass(kind, rerank.Reranker)
        if is_reranker and not inspect.isabstract(kind):
            found.add(kind)
    return found


def warnings_of(call: Callable[[], object]) -> list[str]:
    """Return what the library warns of in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SuspiciousInputWarning)
        call()
    return [str(x.message) for x in caught if issubclass(x.category, SuspiciousInputWarning)]


def embeddings(
    n: int, m: int, d: int = 6, seed: int = 0, dtype=torch.float64
) -> tuple[Tensor, Tensor]:
    """Embeddings that are not normalised, with very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda size: torch.randn(size, d, generator=generator, dtype=torch.float64)  # noqa: E731
    stretch = lambda size: torch.rand(size, 1, generator=generator, dtype=torch.float64) * 5 + 0.1  # noqa: E731
    return (make(n) * stretch(n)).to(dtype), (make(m) * stretch(m)).to(dtype)


def case(
    shape: str | tuple[int, int, str | None] = (9, 14, "random"), d: int = 6
) -> tuple[Tensor, Tensor, tuple, tuple[Tensor, Tensor]]:
    """Return embeddings, ids and upstream gradients of a shape, or of one of `SHAPES` by name."""
    n, m, kind = SHAPES[shape] if isinstance(shape, str) else shape
    v, w = embeddings(n, m, d)
    return v, w, make_ids(kind, n, m), upstream(n, m)


def upstream(n: int, m: int) -> tuple[Tensor, Tensor]:
    """Non-uniform upstream gradients of both signs for the rows and the columns."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in (n, m))  # type: ignore


ENGINES = ("dense", "tiled", "kept", "scores")
of_engines = pytest.mark.parametrize("engine", ["dense", "tiled"])
VIEWS = {"rows": lambda sim: sim, "columns": lambda sim: sim.T, "both": lambda sim: sim.both}


def as_it_is(x: Tensor) -> Tensor:
    return x


def strided(x: Tensor) -> Tensor:
    """The same numbers, with others between those of a row."""
    return torch.stack([x, x], 2).flatten(1)[:, ::2]


def transposed(x: Tensor) -> Tensor:
    """The same numbers, column by column."""
    return x.T.contiguous().T


LAYOUTS = (as_it_is, strided, transposed)


def similarity(
    v: Tensor, w: Tensor, ids: tuple, engine: str, layout: Any = as_it_is, **options: Any
) -> Any:
    """Similarity on an engine; ``"kept"``: the tiled engine with cached scores; ``"scores"`` and
    ``"triton scores"``: from a given matrix, of a layout in memory.

    ``"reference"`` is the specification of the tests.
    """
    if engine == "reference":
        return Reference.of(v, w, ids, **options)
    if engine == "kept":
        return Similarity(v, w, *ids, engine="tiled", memory_budget=10**9, **options)
    if engine in ("scores", "triton scores"):
        chosen: Any = "tiled" if engine == "scores" else "triton"
        scores = layout(Similarity(v, w, *ids, engine="dense", **options).scores())
        return Similarity.from_scores(scores, *ids, engine=chosen, related=options.get("related"))
    return Similarity(v, w, *ids, engine=engine, **options)  # type: ignore


def guide_of(anchors: Any) -> Any:
    """The same anchors of a second matrix, with the scores cos(3 S)."""
    if isinstance(anchors, Reference):
        return Reference(
            *((torch.cos(3 * scores.detach()), *masks) for scores, *masks in anchors.groups)
        )
    second = {}
    for matrix in {side.matrix for group in anchors._groups for side in group}:
        scores = torch.cos(3 * matrix.scores().detach())
        pairs = matrix.relation
        states = torch.full_like(scores, torch.nan)
        states[pairs.negative()] = 0.0
        states[pairs.positive()] = 1.0
        related = Related(matches=states)
        second[matrix] = Similarity.from_scores(scores, related=related)._matrix
    return Anchors(
        *(
            [side._replace(matrix=second[side.matrix]) for side in group]
            for group in anchors._groups
        )
    )


def finite(x: Tensor) -> Tensor:
    """Replace values of anchors without an answer, which are not finite, by 0."""
    return torch.where(x.isfinite(), x, 0.0)


# User-defined terms. They are registered here, because test modules may be imported under two
# names.


@pair_term
def only_the_parameter(scores, weight):
    return weight.square()


@pair_term
def returned_for_a_test(scores, weight):
    return weight


@pair_term
def plane(scores, weight, bias):
    return weight * scores + bias


@pair_term
def straight_line(scores, weight):
    return weight * scores


@pair_term
def weighted_by_guide(scores, guide, scale, shift):
    return (scale * guide - shift).exp() * scores.square()


def sets(n, k, d, seed=0, dtype=torch.float64):
    """Elements of different lengths that are not orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, d, generator=generator, dtype=torch.float64) + 0.7
    return (x * torch.rand(n, k, 1, generator=generator, dtype=torch.float64).add(0.1)).to(dtype)


def clip(images: Tensor, texts: Tensor, scale: Any) -> Tensor:
    """The loss of CLIP, of embeddings with a scale."""
    logits = scale * images @ texts.T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed numbers, the same in all precisions up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
