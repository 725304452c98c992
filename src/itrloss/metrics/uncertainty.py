"""Confidence intervals and comparisons by bootstraps over images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import as_size, check_number, one_of
from ..similarity import NO_ID
from .results import RECALLS, WAYS, Ks, RetrievalResults, as_ks, check_systems

_DRAWN = 2**16  # ids drawn at a time
_ROUNDING = 1e-9  # sums of equal values in another order differ by some 1e-13


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
    ends = _ends(level)
    values = _bootstrap([results], ks, samples, seed)
    return {name: _interval(x[0, 1:], ends) for name, x in values.items()}


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
    ends = _ends(level)
    values = _bootstrap([results, others], ks, samples, seed)
    return {name: _compared(own, other, ends) for name, (own, other) in values.items()}


def compare_all(
    systems: Mapping[str, RetrievalResults],
    *,
    baseline: str,
    figures: Sequence[str] = ("rsum",),
    ks: Ks = RECALLS,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> dict[str, dict[str, Comparison]]:
    """Return :func:`compare` of each system with the baseline, with corrected p-values.

    The p-values are corrected by Holm's method over all tests of the call: each of ``figures`` for
    each system but the baseline. Call a difference significant if its p is below 0.05: then the
    probability that any figure that does not differ is called significant is at most 5 %, however
    many do differ. Systems and figures that were looked at elsewhere are not counted, and the
    intervals are not corrected.

    Args:
        systems: results from :func:`retrieval_results` by name, for the same images and texts in
            the same order.
        baseline: the name of the system to compare with.
        figures: the metrics to compare, such as ``("i2t_r1", "t2i_r1")``. The more, the larger the
            p-values.
        ks, level, samples, seed: see :func:`confidence_intervals`. No p-value is below
            ``2 / (samples + 1)`` before the correction, nor below ``2 * tests / (samples + 1)``
            after it.

    Returns:
        ``{system: {figure: comparison}}``, without the baseline.
    """
    check_systems("systems", systems)
    one_of("baseline", baseline, *systems)
    ends = _ends(level)
    names = list(systems)
    comparisons: dict[str, dict[str, Comparison]] = {name: {} for name in names if name != baseline}
    values = _bootstrap(list(systems.values()), ks, samples, seed, figures)
    for figure, x in values.items():
        of_systems = dict(zip(names, x, strict=True))
        for name, compared in comparisons.items():
            compared[figure] = _compared(of_systems[name], of_systems[baseline], ends)
    p_values = [x.p_value for compared in comparisons.values() for x in compared.values()]
    corrected = iter(holm(p_values))
    for compared in comparisons.values():
        for figure, x in compared.items():
            compared[figure] = x._replace(p_value=next(corrected))
    return comparisons


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method (1979), in the given order.

    The smallest of m is multiplied by m, the next one by m - 1, and so on; none may be above 1, or
    below the corrected value of a smaller one.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [0.0] * len(p_values)
    least = 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = least
    return corrected


def _compared(own: Tensor, other: Tensor, ends: Tensor) -> Comparison:
    """Return the difference of a metric's values (1 + samples,) between two models."""
    differences = own - other
    differences[differences.abs() < _ROUNDING] = 0.0
    samples = differences[1:]
    # a sample whose queries all lack positives has no metrics
    valid = int(samples.isfinite().sum())
    tail = min(int((samples <= 0).sum()), int((samples >= 0).sum()))
    p_value = min(1.0, 2 * (tail + 1) / (valid + 1))
    low, high = _interval(samples, ends)
    return Comparison(float(differences[0]), low, high, p_value)


def _bootstrap(
    runs: Sequence[RetrievalResults],
    ks: Ks,
    samples: int,
    seed: int,
    figures: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Return (runs, 1 + samples) values of each metric of ``figures``, by default of all, over all
    queries and over those of bootstrap samples, in percent.

    A sample draws ids with replacement, the same for all runs.
    """
    samples = as_size("samples", samples)
    ks = as_ks(ks)
    sums = torch.stack([_sums_by_id(run, runs[0], ks) for run in runs], 1)
    places = {}
    for side, way in enumerate(WAYS):
        for column, name in enumerate(runs[0].i2t.per_query(ks)):
            places[f"{way}_{name}"] = [(side, column)]
    places["rsum"] = places.pop("i2t_rsum") + places.pop("t2i_rsum")
    if figures is None:
        figures = list(places)
    for figure in figures:
        one_of("figures", figure, *places)
    values = {figure: sums.new_empty(len(runs), 1 + samples) for figure in figures}
    start = 0
    # Of all systems and samples, the metrics that nobody asked for would take gigabytes.
    for of_samples in _drawn_sums(sums, samples, seed):
        stop = start + len(of_samples)
        means = 100 * of_samples[..., :-1] / of_samples[..., -1:]
        for figure, x in values.items():
            x[:, start:stop] = sum(means[:, :, side, column].T for side, column in places[figure])
        start = stop
    return values


def _drawn_sums(sums: Tensor, samples: int, seed: int) -> Iterator[Tensor]:
    """Return the sums over all ids, and over those of bootstrap samples, some samples at a time:
    (B, runs, 2, columns) of (ids, runs, 2, columns).
    """
    n = len(sums)
    yield sums.sum(0, keepdim=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    step = max(1, _DRAWN // n)
    for start in range(0, samples, step):
        count = min(step, samples - start)
        # the same numbers, however many samples at once
        drawn = torch.randint(n, (count, n), generator=generator, device="cpu")
        times = torch.zeros(count, n, dtype=sums.dtype, device="cpu")
        times.scatter_add_(1, drawn, torch.ones_like(times))
        yield torch.tensordot(times, sums, 1)


def _sums_by_id(results: RetrievalResults, first: RetrievalResults, ks: Ks) -> Tensor:
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
    indices = inverse.tensor_split([len(image_ids)])
    sums = []
    for (way, queries), index in zip(results.ways.items(), indices, strict=True):
        expected = first.ways[way]
        matched = queries.positives > 0
        alike = torch.equal(queries.ids, expected.ids)
        if not alike or not torch.equal(matched, expected.positives > 0):
            raise ValueError(f"others: expected results of the same queries; those of {way} differ")
        # the values are 0 for a query without positives
        values = torch.stack([*queries.per_query(ks).values(), matched.double()], 1).cpu()
        zeros = values.new_zeros(len(unique), values.shape[1])
        sums.append(zeros.index_add_(0, index, values))
    of_ids = torch.stack(sums, 1)
    if not bool(of_ids[..., -1].any()):
        raise ValueError("results: no query has a right candidate")
    return of_ids[unique != NO_ID]  # what does not exist is not drawn


def _ends(level: float) -> Tensor:
    """Return the (2,) shares of samples below the ends of an interval, of a checked level."""
    check_number("level", level, positive=True)
    if level >= 1:
        raise ValueError(f"level: expected a number below 1, got {level}")
    shares = [(1 - level) / 2, (1 + level) / 2]
    return torch.tensor(shares, dtype=torch.float64, device="cpu")


def _interval(samples: Tensor, ends: Tensor) -> tuple[float, float]:
    """Return the ends of the interval of values (samples,)."""
    low, high = samples.nanquantile(ends).tolist()
    return low, high
