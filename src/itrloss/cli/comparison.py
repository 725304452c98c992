"""Comparisons of re-rankers on one set of scores (``itrloss rerank`` and ``itrloss eval``), and of
several models (``itrloss compare``).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from .. import rerank
from ..checks import one_of
from ..checks.warnings import UnfitScalesWarning, are_the_same, warn
from ..metrics import RetrievalResults, compare_all, retrieval_metrics, retrieval_results
from ..metrics.labels import with_ids
from ..metrics.matching import rows_of
from ..metrics.relevance import Rules
from ..metrics.results import check_systems
from ..metrics.retrieval import check_numbering
from ..rerank import FastReranker, Reranker
from ..rerank.base import go_beyond_cosines, has_defaults_for_cosines
from ..similarity import Similarity
from .tables import TESTED, Entry, SystemComparison, samples_for

METHODS: dict[str, type[Reranker]] = {
    "fast": rerank.FastReranker,
    "inverted-softmax": rerank.InvertedSoftmax,
    "dual-softmax": rerank.DualSoftmax,
    "qb-norm": rerank.QueryBankNorm,
    "dbnorm": rerank.DualBankNorm,
    "nnn": rerank.NearestNeighborNorm,
    "csls": rerank.CSLS,
    "mutual-proximity": rerank.MutualProximity,
    "sinkhorn": rerank.Sinkhorn,
    "dbsn": rerank.DualBankSinkhorn,
}
PLAIN = "no re-ranking"
CALIBRATED = "fast, calibrated"
# which method to take without held-out pairs, by its name: the first that is there, and why
# (docs/reranking.rst, On trained models, and docs/results.rst, Judged relevance)
_ADVICE = {
    "nnn, bank": "no query depends on another, and in our runs it was among the best by a bank",
    "csls, bank": "no query depends on another",
    "csls": "in our runs it gained most of six methods where people judged relevance",
}
Banks = tuple[Tensor | None, Tensor | None]  # of images and of texts


def compare_rerankers(
    sim: Tensor | Similarity,
    methods: Iterable[str | Reranker] = tuple(METHODS),
    banks: Banks = (None, None),
    validation: Tensor | Similarity | None = None,
    track: Callable[[Sequence[_Trial]], Iterable[_Trial]] = iter,
    folds: int = 1,
    rules: Rules | None = None,
    samples: int | None = None,
) -> SystemComparison:
    """Return what methods make of scores, with hubs of the test queries and of any banks.

    Args:
        sim: what is re-ranked: scores (n_images, n_texts), with c consecutive texts per image, or a
            :class:`itrloss.Similarity`.
        methods: names in :data:`METHODS`, which stand for the defaults, and re-rankers such as
            ``Sinkhorn(scale=50)``.
        banks: queries of another set, of images and of texts, see
            :meth:`itrloss.rerank.Reranker.fit`. Re-rankers with banks of their own keep these.
        validation: held-out pairs, as ``sim``, of other images and texts. ``"fast"`` is calibrated
            on them, too, and the method with the highest RSUM on them is the one to take.
        track: what shows progress over a list, such as ``tqdm`` or ``rich.progress.track``.
        folds: see :func:`itrloss.metrics.retrieval_results`.
        rules: the arguments ``relevant``, ``exclude`` and ``candidates`` of the same function, by
            name.
        samples: number of bootstrap samples behind intervals and p-values; by default, 2000 for
            each test, so that p can fall below 0.001 after the correction.

    Raises:
        TypeError, ValueError: naming the argument, also for an unknown name.
    """
    rerankers = _named(methods)
    rules = rules or Rules()
    if not isinstance(banks, (tuple, list)):
        expected = "a pair, queries of images and of texts, or None for one of them"
        raise TypeError(f"banks: expected {expected}, got {type(banks).__name__}")
    given = sim
    sim = with_ids("sim", sim, None, None, by_ids=rules.get("relevant") is None)
    for _, method in rerankers:
        check_numbering("sim", given, sim, method)
    if validation is not None:
        validation = with_ids("validation", validation, None, None)
        _check_held_out(validation, sim)
    trials, hints = _trials(rerankers, sim, banks, validation is not None)
    _warn_of_units(sim, trials)
    entries: list[Entry] = []
    notes = []
    for trial in track(trials):
        entry = _tried(trial, sim, validation, folds, rules)
        entry = replace(entry, name=_free_name(entry.name, entries))
        entries.append(entry)
        if trial.name == CALIBRATED:
            notes.append(f"{entry.name}: {entry.reranker!r}, chosen on held-out pairs.")
    found = _compared(entries, samples)
    advised, why = _advice(found.entries) if validation is None else _best_held_out(found.entries)
    if len(entries) > 1:
        hints.append(why)
    return replace(found, notes=notes, hints=hints, advised=advised)


class _Trial(NamedTuple):
    """What is tried."""

    method: str
    name: str  # without its banks
    reranker: Reranker | None = None  # with its banks; None: no re-ranking


def _trials(
    rerankers: Sequence[tuple[str, Reranker]], sim: Similarity, banks: Banks, calibrates: bool
) -> tuple[list[_Trial], list[str]]:
    """Return no re-ranking, and each method with and without the banks; and why others are left
    out.
    """
    trials = [_Trial(PLAIN, PLAIN)]
    hints = []
    for name, method in rerankers:
        if method.needs_embeddings and sim.embeddings is None:
            hints.append(f"{name} was left out: needs embeddings: itrloss eval.")
            continue
        ready = [method]
        has_none = all(method.transductive)  # no bank of its own
        if method.takes_bank and has_none and any(bank is not None for bank in banks):
            ready.append(copy.copy(method).fit(*banks))  # the caller's has no bank afterwards
        if method.needs_bank:
            ready = [each for each in ready if not any(each.transductive)]
        if not ready:
            needed = "needs banks of queries: --bank-images and --bank-texts"
            hints.append(f"{name} was left out: {needed}.")
        for each in ready:
            trials.append(_Trial(name, name, each))
            if name == "fast" and calibrates:
                trials.append(_Trial(name, CALIBRATED, each))
    return trials, hints


def _free_name(name: str, entries: Sequence[Entry]) -> str:
    """Return the name of a further entry, with a number if another has it: banks alone differ."""
    names = [entry.name for entry in entries]
    number = 1
    free = name
    while free in names:
        number += 1
        free = f"{name} ({number})"
    return free


def _calibrated(method: Reranker, sim: Similarity, validation: Similarity) -> Reranker:
    """Return Fast Re-ranking with the scales that are best on held-out pairs."""
    found = copy.copy(method)
    chosen = copy.copy(method)
    assert isinstance(found, FastReranker) and isinstance(chosen, FastReranker)
    if sim.embeddings is None or validation.embeddings is None:
        found.fit()  # a bank of scores is of the test set's candidates
    found.calibrate(validation)
    chosen.i2t = found.i2t
    chosen.t2i = found.t2i
    return chosen


def _tried(
    trial: _Trial, sim: Similarity, validation: Similarity | None, folds: int, rules: Rules
) -> Entry:
    """Return what a method makes of the scores and of held-out pairs, and the time that ranking
    takes.
    """
    method, name, reranker = trial
    if reranker is not None and validation is not None and name == CALIBRATED:
        reranker = _calibrated(reranker, sim, validation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfitScalesWarning)
        start = time.perf_counter()
        results = retrieval_results(sim, reranker=reranker, folds=folds, **rules)
        seconds = time.perf_counter() - start
    transductive = (False, False)
    if reranker is not None:
        transductive = reranker.transductive
    if reranker is not None and reranker.takes_bank:
        name += {0: ", bank", 1: ", one bank", 2: ""}[sum(transductive)]
    held_out = None if validation is None else _held_out_rsum(reranker, sim, validation)
    return Entry(name, results, method, reranker, any(transductive), seconds, held_out)


def _held_out_rsum(
    reranker: Reranker | None, sim: Similarity, validation: Similarity
) -> float | None:
    """Return the RSUM of held-out pairs; None by a bank of scores, which are the test set's, and of
    a method that is for the images and texts of the test set.
    """
    if reranker is not None and reranker.needs_numbers:
        return None
    are_embeddings = sim.embeddings is not None and validation.embeddings is not None
    if reranker is not None and not are_embeddings:
        has_bank = not all(reranker.transductive)
        if has_bank or reranker.needs_embeddings:
            return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfitScalesWarning)
        return retrieval_metrics(validation, reranker=reranker)["rsum"]


def _check_held_out(validation: Similarity, sim: Similarity) -> None:
    """Raise a ValueError for pairs with the images or the texts of the test set."""
    for test, other in ((sim, validation), (sim.T, validation.T)):
        if are_the_same(rows_of(test), rows_of(other)):
            raise ValueError(
                "validation: expected held-out pairs, got images or texts of the test set, on "
                "which nothing may be calibrated"
            )


def _warn_of_units(sim: Similarity, trials: Sequence[_Trial]) -> None:
    """Warn of scores that are no cosines, if methods have scales for cosines."""
    names = {}
    for method, _, reranker in trials:
        if reranker is not None and has_defaults_for_cosines(reranker):
            names[method] = reranker
    if names and go_beyond_cosines(sim):
        warn(
            "scores: some are beyond -1 to 1, as of logits or distances, and the scales of "
            f"{', '.join(names)} are for cosine similarities. Divide logits by the model's logit "
            "scale, and negate distances: higher is more similar"
        )


def _advice(entries: Sequence[Entry]) -> tuple[Entry | None, str]:
    """Return the entry to take, one that certainly gains here, and a sentence that says why."""
    for name, why in _ADVICE.items():
        for entry in entries[1:]:
            if entry.name == name and entry.changes["rsum"].low > 0:
                return entry, f"Take {name}: {why}."
    return None, "Choose on held-out pairs: the best row is chosen by the test set's labels."


def _best_held_out(entries: Sequence[Entry]) -> tuple[Entry | None, str]:
    """Return the entry with the highest RSUM on held-out pairs, and a sentence that says so."""
    measured = [entry for entry in entries if entry.held_out is not None]
    best = max(measured, key=lambda entry: entry.held_out or 0.0)
    why = f"of these rows it has the highest RSUM on the held-out pairs, {best.held_out:.1f}"
    return best if best.reranker is not None else None, f"Take {best.name}: {why}."


def _compared(entries: Sequence[Entry], samples: int | None) -> SystemComparison:
    """Return the comparison of entries with the first one."""
    if samples is None:
        samples = samples_for(len(entries) - 1)
    systems = {entry.name: entry.results for entry in entries}
    first, *others = entries
    changes = compare_all(systems, baseline=first.name, figures=TESTED, samples=samples)
    others = [replace(entry, changes=changes[entry.name]) for entry in others]
    return SystemComparison([first, *others], samples)


def compare_models(
    results: Mapping[str, RetrievalResults],
    *,
    transductive: Sequence[str] = (),
    samples: int | None = None,
) -> SystemComparison:
    """Return the comparison of models with the first one.

    Args:
        results: of each model by its name, for the same images and texts in the same order; from
            :func:`itrloss.metrics.retrieval_results`.
        transductive: names of the models whose scores depend on the other test queries.
        samples: number of bootstrap samples; by default, 2000 for each test.

    Raises:
        ValueError: if there are fewer than two models, a name is unknown, or queries differ.
    """
    check_systems("results", results)
    if len(results) < 2:
        expected = "expected at least two models (itrloss rerank has the recalls of one)"
        raise ValueError(f"results: {expected}, got {len(results)}")
    for name in transductive:
        one_of("transductive", name, *results)
    entries = []
    for name, own in results.items():
        entries.append(Entry(name, own, transductive=name in transductive))
    return _compared(entries, samples)


def _named(methods: Iterable[str | Reranker]) -> list[tuple[str, Reranker]]:
    """Return re-rankers with their names in :data:`METHODS`, and others as they show themselves."""
    found = []
    for method in dict.fromkeys(methods):
        if isinstance(method, Reranker):
            found.append((repr(method), method))
        else:
            one_of("methods", method, *METHODS)
            found.append((method, METHODS[method]()))
    return found
