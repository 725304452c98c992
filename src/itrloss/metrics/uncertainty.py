"""Confidence intervals and comparisons by bootstraps over images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_number, check_size, one_of
from .results import RECALLS, WAYS, QueryResults, RetrievalResults

_METRICS = (*(f"r{k}" for k in RECALLS), "r_precision", "map_at_r")
_DRAWN = 2**22  # number of ids drawn at once


class Comparison(NamedTuple):
    """The difference of a metric between two models, in the metric's unit."""

    difference: float
    low: float  # of the confidence interval
    high: float
    p_value: float  # two-sided: the probability of so large a difference if there is none


def confidence_intervals(
    results: RetrievalResults, *, level: float = 0.95, samples: int = 2000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return bootstrap confidence intervals of recalls, RSUM, R-Precision and mAP@R: ``{name: (low, high)}``.

    Ids are drawn with replacement: each image with all its texts, as captions of one image are not independent.

    Args:
        results: from :func:`retrieval_results`.
        level: confidence level; ``(1 - level) / 2`` of the samples lie outside at either end.
        samples: number of bootstrap samples.
        seed: seed of the random draws.

    Raises:
        ValueError: naming the argument, also if no query has a positive.
    """
    names, (sums,) = _sums_by_id(results)
    low, high = _interval(_resample(sums, samples, seed), level)
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


def compare(
    results: RetrievalResults, others: RetrievalResults, *, level: float = 0.95, samples: int = 2000, seed: int = 0
) -> dict[str, Comparison]:
    """Return the differences ``results - others`` of all metrics on the same queries, by a paired bootstrap.

    Each sample draws the same images, with their texts, for both, so that the difficulty of an image cancels out.

    Args:
        results, others: from :func:`retrieval_results`, for the same images and texts in the same order.
        level, samples, seed: see :func:`confidence_intervals`.

    Raises:
        ValueError: if the queries differ, or none has a positive.
    """
    names, sums = _sums_by_id(results, others)
    first, second = _resample(torch.stack(sums), samples, seed)
    differences = first - second
    valid = differences.isfinite().sum(0)  # a sample whose queries all lack positives has no metrics
    exact = _metrics(sums[0].sum(0)) - _metrics(sums[1].sum(0))
    low, high = _interval(differences, level)
    tail = torch.minimum((differences <= 0).sum(0), (differences >= 0).sum(0))
    p = (2 * (tail + 1).double() / (valid + 1)).clamp_max(1.0)
    columns = zip(names, exact, low, high, p, strict=True)
    return {name: Comparison(*(float(x) for x in values)) for name, *values in columns}


def compare_all(
    systems: Mapping[str, RetrievalResults], *, baseline: str, figures: Sequence[str] = ("rsum",), **options: Any
) -> dict[str, dict[str, Comparison]]:
    """Return :func:`compare` of each system with the baseline, with p-values corrected for multiple comparisons.

    The correction is Holm's: the probability that any difference with p below 0.05 is due to chance is at most 5 %.
    The intervals are not corrected.

    Args:
        systems: results from :func:`retrieval_results` by name, for the same images and texts in the same order.
        baseline: the name of the system to compare with.
        figures: the metrics to compare, such as ``("i2t_r1", "t2i_r1")``. The more, the larger the p-values.
        options: ``level, samples, seed`` of :func:`confidence_intervals`. Before the correction no p-value is below
            ``2 / (samples + 1)``.

    Returns:
        ``{system: {figure: comparison}}``, without the baseline.
    """
    one_of("baseline", baseline, *systems)
    comparisons: dict[tuple[str, str], Comparison] = {}
    for name, results in systems.items():
        if name != baseline:
            single = compare(results, systems[baseline], **options)
            for figure in figures:
                one_of("figures", figure, *single)
                comparisons[name, figure] = single[figure]
    p = 0.0
    for i, key in enumerate(sorted(comparisons, key=lambda key: comparisons[key].p_value)):
        p = max(p, min(1.0, (len(comparisons) - i) * comparisons[key].p_value))
        comparisons[key] = comparisons[key]._replace(p_value=p)
    return {name: {figure: comparisons[name, figure] for figure in figures} for name in systems if name != baseline}


def _sums_by_id(*runs: RetrievalResults) -> tuple[list[str], list[Tensor]]:
    """Return the names of the metrics, and for each run (ids, 2, 6): sums over the queries of an id, and their count.

    Queries without positives are left out.
    """
    ids = [getattr(runs[0], way).ids for way in WAYS]
    unique, inverse = torch.unique(torch.cat(ids), return_inverse=True)
    all_sums = []
    for run in runs:
        sums = torch.zeros(len(unique), len(WAYS), len(_METRICS) + 1, dtype=torch.float64, device=unique.device)
        for i, (way, index) in enumerate(zip(WAYS, inverse.split([len(x) for x in ids]), strict=True)):
            queries: QueryResults = getattr(run, way)
            answered = queries.positives > 0
            if not torch.equal(queries.ids, ids[i]) or not torch.equal(answered, getattr(runs[0], way).positives > 0):
                raise ValueError(f"others: expected results of the same queries; those of {way} differ")
            values = [*queries.hits.unbind(1), queries.r_precision, queries.average_precision, answered]
            sums[:, i].index_add_(0, index, torch.stack([x.double() for x in values], 1) * answered[:, None])
        if not bool(sums[..., -1].any()):
            raise ValueError("results: no query has a right candidate")
        all_sums.append(sums)
    return [f"{way}_{name}" for way in WAYS for name in _METRICS] + ["rsum"], all_sums


def _metrics(sums: Tensor) -> Tensor:
    """Return (…, 11) percentages from (…, 2, 6) sums."""
    means = 100 * sums[..., :-1] / sums[..., -1:]
    rsum = means[..., : len(RECALLS)].sum((-2, -1))
    return torch.cat([means.flatten(-2), rsum[..., None]], -1)


def _resample(sums: Tensor, samples: int, seed: int) -> Tensor:
    """Return (…, samples, 11) percentages from (…, ids, 2, 6) sums, with ids drawn with replacement."""
    check_size("samples", samples)
    n = sums.shape[-3]
    generator = torch.Generator().manual_seed(seed)
    flat, parts = sums.flatten(-2), []
    step = max(1, min(64, _DRAWN // n))
    for start in range(0, samples, step):
        count = min(step, samples - start)
        drawn = torch.randint(n, (count, n), generator=generator)
        weights = torch.zeros(count, n, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(count, n).double())
        parts.append(_metrics((weights.to(sums.device) @ flat).unflatten(-1, sums.shape[-2:])))
    return torch.cat(parts, -2)


def _interval(samples: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return the (11,) lower and upper ends of the intervals that contain ``level`` of the (samples, 11) values."""
    check_number("level", level, positive=True)
    if level >= 1:
        raise ValueError(f"level: expected a number below 1, got {level}")
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=samples.dtype, device=samples.device)
    low, high = samples.nanquantile(ends, dim=0)
    return low, high
