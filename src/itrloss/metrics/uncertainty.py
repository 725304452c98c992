"""Confidence intervals and comparisons by bootstraps over images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import as_size, check_number, one_of
from .results import RECALLS, WAYS, Ks, RetrievalResults, as_ks, share_names

_DRAWN = 2**16  # ids drawn at a time
_SUMMED = tuple(f"r{k}" for k in RECALLS)  # in the RSUM


def _names(ks: Ks) -> list[str]:
    """Return the names of the metrics that have intervals."""
    return [*(f"{way}_{name}" for way in WAYS for name in share_names(as_ks(ks))), "rsum"]


class Comparison(NamedTuple):
    """The difference of a metric between two models, in the metric's unit."""

    difference: float  #: over all queries
    low: float  #: lower end of the confidence interval
    high: float  #: upper end
    p_value: float  #: two-sided probability of so large a difference if there is none


def confidence_intervals(
    results: RetrievalResults,
    *,
    ks: Ks = RECALLS,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Return bootstrap confidence intervals ``{name: (low, high)}``.

    The metrics are those of :func:`retrieval_metrics` that are means over queries, in percent, and
    the RSUM. Ids are drawn with replacement: each image with all its texts, as captions of one
    image are not independent.

    Args:
        results: from :func:`retrieval_results`.
        ks: see :func:`retrieval_metrics`.
        level: confidence level; ``(1 - level) / 2`` of the samples lie outside at either end.
        samples: number of bootstrap samples.
        seed: seed of the random draws.

    Raises:
        ValueError: naming the argument, also if no query has a positive.
    """
    names = _names(ks)
    (drawn,) = _bootstrap([results], ks, samples, seed)
    low, high = _interval(drawn[1:], level)
    intervals = zip(low.tolist(), high.tolist(), strict=True)
    return dict(zip(names, intervals, strict=True))


def compare(
    results: RetrievalResults,
    others: RetrievalResults,
    *,
    ks: Ks = RECALLS,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> dict[str, Comparison]:
    """Return the differences ``results - others`` of all metrics, by a paired bootstrap.

    Each sample draws the same images, with their texts, for both, so that the difficulty of an
    image cancels out.

    Args:
        results, others: from :func:`retrieval_results`, for the same images and texts in the same
            order.
        ks, level, samples, seed: see :func:`confidence_intervals`.

    Raises:
        ValueError: if the queries differ, or none has a positive.
    """
    names = _names(ks)
    first, second = _bootstrap([results, others], ks, samples, seed)
    exact = first[0] - second[0]
    differences = first[1:] - second[1:]
    # a sample whose queries all lack positives has no metrics
    valid = differences.isfinite().sum(0)
    tail = torch.minimum((differences <= 0).sum(0), (differences >= 0).sum(0))
    p = (2 * (tail + 1).double() / (valid + 1)).clamp_max(1.0)
    low, high = _interval(differences, level)
    columns = torch.stack([exact, low, high, p], 1).tolist()
    return {name: Comparison(*values) for name, values in zip(names, columns, strict=True)}


def compare_all(
    systems: Mapping[str, RetrievalResults],
    *,
    baseline: str,
    figures: Sequence[str] = ("rsum",),
    **options: Any,
) -> dict[str, dict[str, Comparison]]:
    """Return :func:`compare` of each system with the baseline, with corrected p-values.

    The correction for multiple comparisons is Holm's: the probability that any difference with p
    below 0.05 is due to chance is at most 5 %. The intervals are not corrected.

    Args:
        systems: results from :func:`retrieval_results` by name, for the same images and texts in
            the same order.
        baseline: the name of the system to compare with.
        figures: the metrics to compare, such as ``("i2t_r1", "t2i_r1")``. The more, the larger the
            p-values.
        options: ``ks, level, samples, seed`` of :func:`confidence_intervals`. Before the correction
            no p-value is below ``2 / (samples + 1)``.

    Returns:
        ``{system: {figure: comparison}}``, without the baseline.
    """
    one_of("baseline", baseline, *systems)
    for figure in figures:
        one_of("figures", figure, *_names(options.get("ks", RECALLS)))
    comparisons: dict[str, dict[str, Comparison]] = {}
    tests: list[tuple[float, str, str]] = []  # p-values, of which system and figure
    for name, results in systems.items():
        if name == baseline:
            continue
        differences = compare(results, systems[baseline], **options)
        comparisons[name] = {figure: differences[figure] for figure in figures}
        for figure, difference in comparisons[name].items():
            tests.append((difference.p_value, name, figure))
    corrected = 0.0
    for i, (p, name, figure) in enumerate(sorted(tests)):
        corrected = max(corrected, min(1.0, (len(tests) - i) * p))
        comparisons[name][figure] = comparisons[name][figure]._replace(p_value=corrected)
    return comparisons


def _bootstrap(runs: Sequence[RetrievalResults], ks: Ks, samples: int, seed: int) -> Tensor:
    """Return (runs, 1 + samples, metrics) percentages of all queries, and of bootstrap samples.

    A sample draws ids with replacement, the same for all runs.
    """
    columns = [*_SUMMED, *share_names(as_ks(ks))]
    samples = as_size("samples", samples)
    sums = [_sums_by_id(run, runs[0], columns) for run in runs]  # (ids, 2, columns + 1) each
    n = len(sums[0])
    totals = [torch.stack([x.sum(0, keepdim=True) for x in sums])]
    generator = torch.Generator("cpu").manual_seed(seed)
    step = max(1, _DRAWN // n)
    for start in range(0, samples, step):
        count = min(step, samples - start)
        # the same numbers, however many samples at once
        drawn = torch.randint(n, (count, n), generator=generator, device="cpu")
        drawn += n * torch.arange(count, device="cpu")[:, None]
        times = drawn.flatten().bincount(minlength=count * n).view(count, n).double()
        totals.append(torch.stack([torch.tensordot(times, x, 1) for x in sums]))
    total = torch.cat(totals, 1)  # (runs, 1 + samples, 2, columns + 1)
    means = 100 * total[..., :-1] / total[..., -1:]
    rsum = means[..., : len(_SUMMED)].sum((-2, -1))
    return torch.cat([means[..., len(_SUMMED) :].flatten(-2), rsum[..., None]], -1)


def _sums_by_id(results: RetrievalResults, first: RetrievalResults, names: Sequence[str]) -> Tensor:
    """Return (ids, 2, columns + 1) sums over the queries with positives of each id and direction.

    Summed are the metrics, and last the queries. The same queries must have positives in
    ``results`` and in ``first``.
    """
    if not isinstance(results, RetrievalResults):
        got = type(results).__name__
        raise TypeError(f"results: expected those of retrieval_results, got {got}")
    image_ids = first.i2t.ids
    ids = torch.cat([image_ids, first.t2i.ids]).cpu()
    unique, inverse = ids.unique(return_inverse=True)
    shape = len(unique), len(WAYS), len(names) + 1
    sums = torch.zeros(shape, dtype=torch.float64, device="cpu")
    indices = inverse.tensor_split([len(image_ids)])
    for side, (way, queries) in enumerate(results.ways.items()):
        expected = first.ways[way]
        matched = queries.positives > 0
        alike = torch.equal(queries.ids, expected.ids)
        if not alike or not torch.equal(matched, expected.positives > 0):
            raise ValueError(f"others: expected results of the same queries; those of {way} differ")
        columns = [queries.per_query(name) for name in names]  # 0 for a query without positives
        values = torch.stack([*columns, matched.double()], 1)
        sums[:, side].index_add_(0, indices[side], values.cpu())
    if not bool(sums[..., -1].any()):
        raise ValueError("results: no query has a right candidate")
    return sums


def _interval(samples: Tensor, level: float) -> Tensor:
    """Return the (2, F) ends of intervals that contain ``level`` of the (samples, F) values."""
    check_number("level", level, positive=True)
    if level >= 1:
        raise ValueError(f"level: expected a number below 1, got {level}")
    ends = samples.new_tensor([(1 - level) / 2, (1 + level) / 2])
    return samples.nanquantile(ends, dim=0)
