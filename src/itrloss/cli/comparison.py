"""Comparisons of re-rankers on one set of scores (``itrloss rerank`` and ``itrloss eval``), and of
several models (``itrloss compare``).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    rerankers = _by_name(methods)
    rules = rules or Rules()
    if not isinstance(banks, (tuple, list)):
        expected = "a pair, queries of images and of texts, or None for one of them"
        raise TypeError(f"banks: expected {expected}, got {type(banks).__name__}")
    given = sim
    sim = with_ids("sim", sim, None, None, by_ids=rules.get("relevant") is None)
    for method in rerankers.values():
        check_numbering("sim", given, sim, method)
    if validation is not None:
        validation = with_ids("validation", validation, None, None)
        _check_held_out(validation, sim)
    rerankers, hints = _that_fit(rerankers, sim, banks)
    trials = _trials(rerankers, banks, validation)
    _warn_of_units(sim, rerankers)
    entries = []
    notes = []
    for trial in track(trials):
        entry = _tried(trial, sim, folds, rules)
        if validation is not None:
            entry = replace(entry, held_out=_held_out_rsum(entry, sim, validation))
        entries.append(entry)
        if trial.validation is not None:
            notes.append(f"{entry.name}: {entry.reranker!r}, chosen on held-out pairs.")
    found = _compared(entries, samples)
    advised, why = _advice(found.entries) if validation is None else _best_held_out(found.entries)
    if len(entries) > 1:
        hints.append(why)
    return replace(found, notes=notes, hints=hints, advised=advised)


def _that_fit(
    rerankers: Mapping[str, Reranker], sim: Similarity, banks: Banks
) -> tuple[dict[str, Reranker], list[str]]:
    """Return the methods that can rank the scores, and why others are left out."""
    fitting: dict[str, Reranker] = {}
    hints: list[str] = []
    for name, method in rerankers.items():
        why = _obstacle(method, sim, banks)
        if why:
            hints.append(f"{name} was left out: {why}.")
        else:
            fitting[name] = method
    return fitting, hints


@dataclass(frozen=True)
class _Trial:
    """A method that is tried, and what it is made ready with."""

    method: str
    reranker: Reranker | None = None  # None: no re-ranking
    banks: Banks | None = None  # None: the test queries, or banks of its own
    validation: Similarity | None = None  # None: its scales are not chosen on pairs


def _trials(
    rerankers: Mapping[str, Reranker], banks: Banks, validation: Similarity | None
) -> list[_Trial]:
    """Return what is tried: no re-ranking, and each method with and without banks."""
    trials = [_Trial(PLAIN)]
    for name, method in rerankers.items():
        for used in _banks_to_try(method, banks):
            trials.append(_Trial(name, method, used))
            if name == "fast" and validation is not None:
                trials.append(_Trial(name, method, used, validation))
    return trials


def _tried(trial: _Trial, sim: Similarity, folds: int, rules: Rules) -> Entry:
    """Return what a method makes of the scores, and the time that ranking takes."""
    reranker = _ready(trial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfitScalesWarning)
        start = time.perf_counter()
        results = retrieval_results(sim, reranker=reranker, folds=folds, **rules)
        seconds = time.perf_counter() - start
    name = CALIBRATED if trial.validation else trial.method
    transductive = (False, False)
    if reranker is not None:
        transductive = reranker.transductive
        name += {0: ", bank", 1: ", one bank", 2: ""}[sum(transductive)]
    return Entry(name, results, trial.method, reranker, any(transductive), seconds)


def _held_out_rsum(entry: Entry, sim: Similarity, validation: Similarity) -> float | None:
    """Return the RSUM of held-out pairs; None by a bank of scores, which are the test set's."""
    reranker = entry.reranker
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


def _warn_of_units(sim: Similarity, rerankers: Mapping[str, Reranker]) -> None:
    """Warn of scores that are no cosines, if methods have scales for cosines."""
    names = [name for name, method in rerankers.items() if has_defaults_for_cosines(method)]
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


def _by_name(methods: Iterable[str | Reranker]) -> dict[str, Reranker]:
    """Return re-rankers by their names in :data:`METHODS`, and others as they show themselves."""
    found = {}
    for method in methods:
        if isinstance(method, Reranker):
            found[repr(method)] = method
        else:
            one_of("methods", method, *METHODS)
            found[method] = METHODS[method]()
    return found


def _obstacle(method: Reranker, sim: Similarity, banks: Banks) -> str:
    """Return why a method cannot be tried; an empty string if it can."""
    if method.needs_embeddings and sim.embeddings is None:
        return "needs embeddings: itrloss eval"
    if method.needs_bank and any(method.transductive) and None in banks:
        return "needs banks of queries: --bank-images and --bank-texts"
    return ""


def _banks_to_try(method: Reranker, banks: Banks) -> list[Banks | None]:
    """Return the banks that a method is tried with.

    None stands for the test queries, or for banks of its own.
    """
    if not method.takes_bank or not all(method.transductive) or banks == (None, None):
        return [None]
    if method.needs_bank:
        return [banks]
    return [None, banks]


def _ready(trial: _Trial) -> Reranker | None:
    """Return a method with its banks and its scales; None stands for no re-ranking."""
    if trial.banks is None and trial.validation is None:
        return trial.reranker
    method = copy.copy(trial.reranker)  # the caller's has no bank afterwards
    assert method is not None
    if trial.validation is not None:
        assert isinstance(method, FastReranker)
        if trial.banks is not None and trial.validation.embeddings is not None:
            method.fit(*trial.banks)  # of scores, they are of the test set's candidates
        method.calibrate(trial.validation)
    if trial.banks is not None:
        method.fit(*trial.banks)
    return method
