"""Confidence intervals and comparisons by bootstraps over images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import as_size, check_number, one_of
from ..similarity import NO_ID
from .results import RECALLS, WAYS, Ks, RetrievalResults, as_ks, check_systems, share_names

_DRAWN = 2**16  # ids drawn at a time
_ROUNDING = 1e-9  # sums of equal values in another order differ by some 1e-13
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
    (drawn,) = _bootstrap([results], names, samples, seed)
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
    (differences,) = _differences([results], others, _names(ks), level, samples, seed)
    return differences


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
    for figure in figures:
        one_of("figures", figure, *_names(ks))
    figures = list(dict.fromkeys(figures))
    others = [name for name in systems if name != baseline]
    if not others or not figures:
        return {name: {} for name in others}
    results = [systems[name] for name in others]
    differences = _differences(results, systems[baseline], figures, level, samples, seed)
    corrected = iter(holm([x.p_value for every in differences for x in every.values()]))
    comparisons: dict[str, dict[str, Comparison]] = {}
    for name, every in zip(others, differences, strict=True):
        comparisons[name] = {
            figure: x._replace(p_value=next(corrected)) for figure, x in every.items()
        }
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


def _differences(
    systems: Sequence[RetrievalResults],
    baseline: RetrievalResults,
    figures: Sequence[str],
    level: float,
    samples: int,
    seed: int,
) -> list[dict[str, Comparison]]:
    """Return the differences of figures between each system and the baseline, uncorrected."""
    *runs, base = _bootstrap([*systems, baseline], figures, samples, seed)
    found = []
    for run in runs:
        every = run - base
        every[every.abs() < _ROUNDING] = 0.0
        exact = every[0]
        differences = every[1:]
        # a sample whose queries all lack positives has no metrics
        valid = differences.isfinite().sum(0)
        tail = torch.minimum((differences <= 0).sum(0), (differences >= 0).sum(0))
        p = (2 * (tail + 1).double() / (valid + 1)).clamp_max(1.0)
        low, high = _interval(differences, level)
        columns = torch.stack([exact, low, high, p], 1).tolist()
        rows = zip(figures, columns, strict=True)
        found.append({figure: Comparison(*values) for figure, values in rows})
    return found


def _bootstrap(
    runs: Sequence[RetrievalResults], figures: Sequence[str], samples: int, seed: int
) -> Tensor:
    """Return (runs, 1 + samples, figures) percentages of all queries, and of bootstrap samples.

    A sample draws ids with replacement, the same for all runs.
    """
    samples = as_size("samples", samples)
    columns = _columns(figures)
    sums = torch.stack([_sums_by_id(run, runs[0], columns) for run in runs], 1)
    n = len(sums)  # ids, of (ids, runs, 2, columns + 1)
    found = [_figures(sums.sum(0, keepdim=True), figures, columns)]
    generator = torch.Generator("cpu").manual_seed(seed)
    step = max(1, _DRAWN // n)
    for start in range(0, samples, step):
        count = min(step, samples - start)
        # the same numbers, however many samples at once
        drawn = torch.randint(n, (count, n), generator=generator, device="cpu")
        drawn += n * torch.arange(count, device="cpu")[:, None]
        times = drawn.flatten().bincount(minlength=count * n).view(count, n).double()
        found.append(_figures(torch.tensordot(times, sums, 1), figures, columns))
    return torch.cat(found, 1)


def _columns(figures: Sequence[str]) -> list[str]:
    """Return the names of the metrics of a direction that figures are made of."""
    columns: dict[str, None] = {}
    for figure in figures:
        parts = _SUMMED if figure == "rsum" else (figure.partition("_")[2],)
        columns.update(dict.fromkeys(parts))
    return list(columns)


def _figures(sums: Tensor, figures: Sequence[str], columns: Sequence[str]) -> Tensor:
    """Return (runs, samples, figures) percentages from the (samples, runs, 2, columns + 1) sums."""
    means = 100 * sums[..., :-1] / sums[..., -1:]
    found = []
    for figure in figures:
        if figure == "rsum":
            summed = [columns.index(name) for name in _SUMMED]
            found.append(means[..., summed].sum((-2, -1)))
        else:
            way, _, name = figure.partition("_")
            found.append(means[..., WAYS.index(way), columns.index(name)])
    return torch.stack(found, -1).transpose(0, 1)


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
    return sums[unique != NO_ID]  # what does not exist is not drawn


def _interval(samples: Tensor, level: float) -> Tensor:
    """Return the (2, F) ends of intervals that contain ``level`` of the (samples, F) values."""
    check_number("level", level, positive=True)
    if level >= 1:
        raise ValueError(f"level: expected a number below 1, got {level}")
    ends = samples.new_tensor([(1 - level) / 2, (1 + level) / 2])
    return samples.nanquantile(ends, dim=0)
