"""Inputs shared by the tests: shapes and ids by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from itrloss import Similarity, pair_term

# (rows, columns, ids): None is the diagonal, "random" has duplicates and anchors without positives
SHAPES = {
    "one pair": (1, 1, None),
    "one row": (1, 7, "random"),
    "one column": (7, 1, "random"),
    "primes": (13, 13, None),
    "square with duplicates": (13, 13, "random"),
    "five captions": (5, 25, "captions"),
    "wide": (5, 17, "random"),
    "tall": (17, 5, "random"),
    "no positive": (6, 9, "disjoint"),
    "no negative": (6, 9, "same"),
    "strided ids": (11, 11, "strided"),
}


def make_ids(kind: str | None, n: int, m: int, seed: int = 0) -> tuple[Tensor | None, Tensor | None]:
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
    if kind == "strided":
        return tuple(torch.randint(0, 5, (2 * size,), generator=generator)[::2] for size in (n, m))  # type: ignore
    raise AssertionError(kind)


def embeddings(n: int, m: int, d: int = 6, seed: int = 0, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Unnormalised, of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda size: torch.randn(size, d, generator=generator, dtype=torch.float64)  # noqa: E731
    stretch = lambda size: torch.rand(size, 1, generator=generator, dtype=torch.float64) * 5 + 0.1  # noqa: E731
    return (make(n) * stretch(n)).to(dtype), (make(m) * stretch(m)).to(dtype)


def upstream(n: int, m: int, seed: int = 1, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Non-uniform upstream gradients of both signs for the rows and the columns."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in (n, m))  # type: ignore


def similarity(v: Tensor, w: Tensor, ids: tuple, engine: str) -> Similarity:
    """On an engine, or with ``"scores"`` from the matrix, through which the embeddings still get their gradient."""
    if engine != "scores":
        return Similarity(v, w, *ids, engine=engine)  # type: ignore
    return Similarity.from_scores(Similarity(v, w, *ids, engine="reference").scores(), *ids)


def finite(x: Tensor) -> Tensor:
    """With 0 in place of what an anchor without an answer has."""
    return torch.where(x.isfinite(), x, 0.0)


def reference_first(*engines: str) -> list:
    """For checks by finite differences: the quick suite leaves them to the reference, which the others are equal to."""
    return ["reference", *(pytest.param(engine, marks=pytest.mark.slow) for engine in engines)]


# Terms of one's own; here, as a module of tests may be imported under two names.


@pair_term
def only_the_parameter(scores, weight):
    return weight.square(), torch.zeros_like(scores), 2 * weight


@pair_term
def returned_for_a_test(scores, weight):
    return weight, torch.zeros_like(scores), torch.ones_like(weight)


@pair_term
def plane(scores, weight, bias):
    """Its derivative by the second parameter has that parameter's shape."""
    return weight * scores + bias, weight, scores, torch.ones_like(bias)


@pair_term
def straight_line(scores, weight):
    """Its derivative has the parameter's shape."""
    return weight * scores, weight, scores
