"""How sure figures and their differences are: bootstraps over images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_number, check_size, one_of
from .results import RECALLS, WAYS, QueryResults, RetrievalResults

_FIGURES = (*(f"r{k}" for k in RECALLS), "r_precision", "map_at_r")
_DRAWN = 2**22  # ids drawn at once


class Comparison(NamedTuple):
    """A figure of one model less that of another, in the figure's unit."""

    difference: float
    low: float  # of the confidence interval
    high: float
    p_value: float  # two-sided: how probable so large a difference is if there is none


def confidence_intervals(
    results: RetrievalResults, *, level: float = 0.95, samples: int = 2000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bootstrap confidence intervals of recalls, RSUM, R-Precision and mAP@R: ``{name: (low, high)}``.

    Images are drawn with replacement, each with its texts: captions of one picture are no independent witnesses. More
    precisely, what is drawn is ids.

    Args:
        results: of :func:`retrieval_results`.
        level: of confidence; the interval leaves ``(1 - level) / 2`` of the samples out at either end.
        samples: how often is drawn.
        seed: of the draws.

    Raises:
        ValueError: naming the argument, also if no query has a right candidate.
    """
    names, (sums,) = _sums_of_ids(results)
    found = _resampled(sums, samples, seed)
    low, high = _interval(found, level)
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


def compare(
    results: RetrievalResults,
    others: RetrievalResults,
    *,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> dict[str, Comparison]:
    """How much better the first model is than the other on the same queries, figure by figure: a paired bootstrap.

    Both are drawn the same images, with their texts, each time, so that what makes an image hard for both cancels out.

    Args:
        results, others: of :func:`retrieval_results`, of the same images and texts in the same order.
        level, samples, seed: see :func:`confidence_intervals`.

    Raises:
        ValueError: if the queries differ, or none has a right candidate.
    """
    names, (first, second) = _sums_of_ids(results, others)
    together = _resampled(torch.stack([first, second]), samples, seed)
    found = together[0] - together[1]
    valid = found.isfinite().sum(0)  # a sample of unanswered queries alone has no figures
    exact = _figures(first.sum(0)) - _figures(second.sum(0))
    low, high = _interval(found, level)
    tail = torch.minimum((found <= 0).sum(0), (found >= 0).sum(0))
    p = (2 * (tail + 1).double() / (valid + 1)).clamp_max(1.0)
    return {
        name: Comparison(*(float(x) for x in values)) for name, *values in zip(names, exact, low, high, p, strict=True)
    }


def compare_all(
    systems: Mapping[str, RetrievalResults],
    *,
    baseline: str,
    figures: Sequence[str] = ("rsum",),
    **options: Any,
) -> dict[str, dict[str, Comparison]]:
    """How much better each system is than the baseline: :func:`compare`, with p-values for so many comparisons at once.

    They are Holm's: whoever believes in the differences with p below 0.05 is wrong about any of them in 5 % of such
    tables at most. The intervals are each for itself.

    Args:
        systems: results of :func:`retrieval_results` by name, of the same images and texts in the same order.
        baseline: the name of the one that the others are compared with.
        figures: what is looked at, such as ``("i2t_r1", "t2i_r1")``. The more, the larger the p-values.
        options: ``level, samples, seed`` of :func:`confidence_intervals`. No p-value of one comparison is below
            ``2 / (samples + 1)``, before it is corrected.

    Returns:
        ``{system: {figure: comparison}}``, without the baseline.
    """
    one_of("baseline", baseline, *systems)
    found: dict[str, dict[str, Comparison]] = {}
    for name, results in systems.items():
        if name != baseline:
            every = compare(results, systems[baseline], **options)
            for figure in figures:
                one_of("figures", figure, *every)
            found[name] = {figure: every[figure] for figure in figures}
    order = sorted(((name, figure) for name in found for figure in figures), key=lambda at: found[at[0]][at[1]].p_value)
    p = 0.0
    for place, (name, figure) in enumerate(order):
        single = found[name][figure]
        p = max(p, min(1.0, (len(order) - place) * single.p_value))
        found[name][figure] = single._replace(p_value=p)
    return found


def _sums_of_ids(*runs: RetrievalResults) -> tuple[list[str], list[Tensor]]:
    """Names of figures, and of each run (ids, 2, 6): sums of five figures over an id's queries, and their number."""
    for run in runs[1:]:
        for way in WAYS:
            mine, theirs = (getattr(x, way) for x in (runs[0], run))
            same = torch.equal(mine.ids, theirs.ids) and torch.equal(mine.positives > 0, theirs.positives > 0)
            if not same:
                raise ValueError(f"others: expected results of the same queries; those of {way} differ")
    sides = [getattr(runs[0], way).ids for way in WAYS]
    unique, which = torch.unique(torch.cat(sides), return_inverse=True)
    found = []
    for run in runs:
        sums = torch.zeros(len(unique), len(WAYS), len(_FIGURES) + 1, dtype=torch.float64, device=unique.device)
        for w, (way, index) in enumerate(zip(WAYS, which.split([len(x) for x in sides]), strict=True)):
            side: QueryResults = getattr(run, way)
            answered = (side.positives > 0).double()
            values = [*side.hits.double().unbind(1), side.r_precision, side.average_precision, answered]
            sums[:, w].index_add_(0, index, torch.stack(values, 1) * answered[:, None])
        if not bool(sums[..., -1].any()):
            raise ValueError("results: no query has a right candidate")
        found.append(sums)
    return [f"{way}_{name}" for way in WAYS for name in _FIGURES] + ["rsum"], found


def _figures(sums: Tensor) -> Tensor:
    """(…, 2, 6) sums -> (…, 11) percentages."""
    means = 100 * sums[..., :-1] / sums[..., -1:]
    rsum = means[..., : len(RECALLS)].sum((-2, -1))
    return torch.cat([means.flatten(-2), rsum[..., None]], -1)


def _resampled(sums: Tensor, samples: int, seed: int) -> Tensor:
    """(…, ids, 2, 6) -> (…, samples, 11), of as many ids drawn with replacement."""
    check_size("samples", samples)
    n = sums.shape[-3]
    generator = torch.Generator().manual_seed(seed)
    flat, parts = sums.flatten(-2), []
    step = max(1, min(64, _DRAWN // n))
    for start in range(0, samples, step):
        count = min(step, samples - start)
        drawn = torch.randint(n, (count, n), generator=generator)
        weights = torch.zeros(count, n, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(count, n).double())
        parts.append(_figures((weights.to(sums.device) @ flat).unflatten(-1, sums.shape[-2:])))
    return torch.cat(parts, -2)


def _interval(found: Tensor, level: float) -> tuple[Tensor, Tensor]:
    check_number("level", level, positive=True)
    if level >= 1:
        raise ValueError(f"level: expected a number below 1, got {level}")
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=found.dtype, device=found.device)
    low, high = found.nanquantile(ends, dim=0)
    return low, high
