"""Comparisons of re-rankers on one set of scores (``itrloss rerank`` and ``itrloss eval``), and of
several models (``itrloss compare``).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rerank
from ..checks import one_of
from ..checks.warnings import UnfitScalesWarning, are_the_same, warn
from ..metrics import Comparison, RetrievalResults, compare_all, retrieval_results
from ..metrics.labels import with_ids
from ..metrics.matching import rows_of
from ..metrics.relevance import Rules
from ..metrics.results import RECALL_NAMES, RECALLS, WAYS, Ks, check_systems
from ..metrics.retrieval import as_pair
from ..rerank import FastReranker, Reranker
from ..rerank.base import go_beyond_cosines, has_defaults_for_cosines
from ..rerank.fast import SCALES
from ..similarity import Similarity
from .tables import ARROWS, TESTED, Row, Table, comparison_table, frame, samples_for
from .tables import text as text_of

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
TITLES = {  # names for readers who do not know the command line's
    PLAIN: "No re-ranking",
    CALIBRATED: "Fast Re-ranking, calibrated",
    "fast": "Fast Re-ranking",
    "inverted-softmax": "Inverted softmax",
    "dual-softmax": "Dual softmax",
    "qb-norm": "QB-Norm",
    "dbnorm": "DBNorm",
    "nnn": "NNN",
    "csls": "CSLS",
    "mutual-proximity": "Mutual proximity",
    "sinkhorn": "Sinkhorn",
    "dbsn": "DBSN",
}
# where hubs were looked for: in words, and as it stands behind the name of a method
_HUBS = {
    "": ("", ""),
    "test": ("the test queries", ""),
    "bank": ("the bank", ", bank"),
    "bank i2t": ("the bank (i2t)", f", bank ({ARROWS['i2t']})"),
    "bank t2i": ("the bank (t2i)", f", bank ({ARROWS['t2i']})"),
}
Banks = tuple[Tensor | None, Tensor | None]  # of images and of texts
# the figures of a protocol, in the order of its columns
_PROTOCOL = (
    *RECALL_NAMES,
    "rsum",
    "i2t_r_precision",
    "t2i_r_precision",
    "i2t_map_at_r",
    "t2i_map_at_r",
)


@dataclass(frozen=True)
class Entry:
    """A method, and what it makes of the scores.

    Attributes:
        name: a key of :data:`METHODS`; ``"no re-ranking"``, or ``"fast, calibrated"``; or a name
            of one's own, by default the re-ranker's ``repr``.
        reranker: None: no re-ranking.
        results: the results of all queries.
        seconds: how long they took.
        changes: the differences of R@1 of both directions and of the RSUM from the first entry,
            with p-values that Holm's method corrected over all entries; empty for the first.
        chosen_on: the pairs that its scales were chosen on, in words; empty if they were not.
    """

    name: str
    reranker: Reranker | None
    results: RetrievalResults
    seconds: float
    changes: Mapping[str, Comparison] = field(default_factory=dict)
    chosen_on: str = ""

    @property
    def label(self) -> str:
        """The name as the command line has it, and the bank if there is one."""
        return self.name + _HUBS[self.hubs][1]

    @property
    def title(self) -> str:
        """The name in words, and the bank if there is one."""
        return TITLES.get(self.name, self.name) + _HUBS[self.hubs][1]

    @property
    def scales(self) -> str:
        """What calibration chose, in sentences; empty for other methods."""
        if not self.chosen_on or not isinstance(self.reranker, FastReranker):
            return ""
        i2t = "γ1 = {:g}, γ2 = {:g}".format(*self.reranker.i2t)
        t2i = "λ1 = {:g}, λ2 = {:g}".format(*self.reranker.t2i)
        values = f"{i2t} ({ARROWS['i2t']}); {t2i} ({ARROWS['t2i']})"
        return f"{values}, chosen on {self.chosen_on}.{self._ends}"

    @property
    def _ends(self) -> str:
        """A sentence on scales beyond which no other was tried; empty if there are none."""
        assert isinstance(self.reranker, FastReranker)
        chosen = (*self.reranker.i2t, *self.reranker.t2i)
        ends = {"smallest": min(SCALES), "largest": max(SCALES)}
        found = [f"{x:g} is the {end}" for end, x in ends.items() if x in chosen]
        return f" Of the values that were tried, {' and '.join(found)}." if found else ""

    @property
    def hubs(self) -> str:
        """Where the hubs were looked for: ``"test"``, ``"bank"``, or ``""`` without re-ranking.

        ``"bank i2t"`` or ``"bank t2i"`` if only that direction has a bank.
        """
        if self.reranker is None:
            return ""
        i2t, t2i = self.reranker.transductive
        if i2t == t2i:
            return "test" if i2t else "bank"
        return "bank t2i" if i2t else "bank i2t"

    @property
    def looks_at(self) -> str:
        """The same in words."""
        return _HUBS[self.hubs][0]


@dataclass(frozen=True)
class RerankerComparison:
    """The entries, first the one without re-ranking, and what could not be tried."""

    sim: Similarity
    entries: list[Entry]
    left_out: dict[str, str]  # method: why
    rules: Rules = field(default_factory=Rules)  # who is right, and who is ranked
    samples: int = 0  # of the bootstrap behind the changes

    def rows(self, titles: bool = True, timed: bool = False) -> list[Row]:
        """Return the entries as rows of a table."""
        rows = []
        for entry in self.entries:
            name = entry.title if titles else entry.label
            transductive = entry.reranker is not None and any(entry.reranker.transductive)
            seconds = entry.seconds if timed else None
            rows.append(Row(name, entry.results, entry.changes, transductive, seconds))
        return rows

    def table(
        self,
        ks: Ks = RECALLS,
        *,
        titles: bool = True,
        timed: bool = False,
        notes: Sequence[str] = (),
    ) -> Table:
        """Return the table of all entries: recalls, changes of the RSUM and of R@1, and notes.

        Args:
            ks: the K of R@K.
            titles: whether methods have names in words; if not, the command line's.
            timed: whether there is a column with the seconds.
            notes: further ones, such as warnings of the input.
        """
        rows = self.rows(titles, timed)
        own = []
        for row, entry in zip(rows, self.entries, strict=True):
            if entry.scales:
                own.append(f"Scales of {row.name}: {entry.scales}")
        for name, why in self.left_out.items():
            own.append(f"{TITLES.get(name, name) if titles else name} was left out: {why}.")
        return comparison_table(rows, ks, samples=self.samples, notes=[*own, *notes])


def compare_rerankers(  # noqa: PLR0913 - options by keyword
    sim: Tensor | Similarity,
    methods: Iterable[str | Reranker] | Mapping[str, Reranker] = tuple(METHODS),
    banks: Banks = (None, None),
    validation: Tensor | Similarity | None = None,
    fast: FastReranker | None = None,
    progress: Callable[[str], None] = lambda text: None,
    folds: int = 1,
    rules: Rules | None = None,
    samples: int | None = None,
) -> RerankerComparison:
    """Return what methods make of scores, with hubs of the test queries and of any banks.

    Args:
        sim: what is re-ranked: scores (n_images, n_texts), with c consecutive texts per image, or a
            :class:`itrloss.Similarity`.
        methods: names in :data:`METHODS`, which stand for the defaults, and re-rankers such as
            ``Sinkhorn(scale=50)``; or a dictionary of re-rankers by names of one's own.
        banks: queries of another set, of images and of texts, see
            :meth:`itrloss.rerank.Reranker.fit`. Re-rankers with banks of their own keep these.
        validation: held-out pairs that ``"fast"`` is calibrated on, too: as ``sim``. A warning says
            so if half of them are in the test set.
        fast: Fast Re-ranking as it is to be tried; its defaults if left out.
        progress: called with a text on what is computed next.
        folds: see :func:`itrloss.metrics.retrieval_results`.
        rules: the arguments ``relevant``, ``exclude`` and ``candidates`` of the same function, by
            name.
        samples: number of bootstrap samples behind intervals and p-values; by default, 2000 for
            each test, so that p can fall below 0.001 after the correction.

    Raises:
        TypeError, ValueError: naming the argument, also for an unknown name.
    """
    rerankers = _by_name(methods, fast or FastReranker())
    rules = rules or Rules()
    banks = _checked_banks(banks)
    if validation is not None and "fast" not in rerankers:
        raise ValueError("validation: expected 'fast' among methods, which is calibrated on it")
    sim = _with_ids("sim", sim)
    if validation is not None:
        validation = _with_ids("validation", validation)
    left_out: dict[str, str] = {}
    for name, method in list(rerankers.items()):
        why = _obstacle(method, sim, banks)
        if why:
            left_out[name] = why
            del rerankers[name]
    chosen_on = _pairs_in_words(sim, validation)
    _warn_of_units(sim, rerankers)

    trials = _trials(rerankers, banks, validation, chosen_on)
    entries: list[Entry] = []
    for number, trial in enumerate(trials, 1):
        bank = ", with a bank" if trial.banks else ""
        progress(f"[{number}/{len(trials)}] {trial.name}{bank} …")
        entries.append(_tried(trial, sim, folds, rules))
    if samples is None:
        samples = samples_for(len(entries) - 1)
    return RerankerComparison(sim, _compared(entries, samples), left_out, rules, samples)


def _checked_banks(banks: Banks) -> Banks:
    """Return a pair of banks; raise a TypeError for what is none."""
    if not isinstance(banks, (tuple, list)) or len(banks) != 2:
        expected = "a pair, queries of images and of texts, or None for one of them"
        raise TypeError(f"banks: expected {expected}, got {type(banks).__name__}")
    return banks[0], banks[1]


class _Trial(NamedTuple):
    """A method that is tried, and what it is made ready with."""

    name: str
    method: Reranker | None = None  # None: no re-ranking
    banks: Banks | None = None  # None: the test queries, or banks of its own
    validation: Similarity | None = None  # None: its scales are not chosen on pairs
    chosen_on: str = ""  # these pairs in words


def _trials(
    rerankers: Mapping[str, Reranker],
    banks: Banks,
    validation: Similarity | None,
    chosen_on: str,
) -> list[_Trial]:
    """Return what is tried, first no re-ranking; each method without and with banks if it can."""
    trials = [_Trial(PLAIN)]
    for name, method in rerankers.items():
        for used in _banks_to_try(method, banks):
            trials.append(_Trial(name, method, used))
            if name == "fast" and validation is not None:
                words = chosen_on + _without_bank(used, validation)
                trials.append(_Trial(CALIBRATED, FastReranker(), used, validation, words))
    return trials


def _tried(trial: _Trial, sim: Similarity, folds: int, rules: Rules) -> Entry:
    """Return what a method makes of the scores, and the time that ranking takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfitScalesWarning)
        reranker = _ready(trial)
        start = time.perf_counter()
        results = retrieval_results(sim, reranker=reranker, folds=folds, **rules)
        seconds = time.perf_counter() - start
    return Entry(trial.name, reranker, results, seconds, chosen_on=trial.chosen_on)


def _pairs_in_words(sim: Similarity, validation: Similarity | None) -> str:
    """Return what the validation pairs are; warn if they are those of the test set."""
    if validation is None:
        return ""
    for test, other in ((sim, validation), (sim.T, validation.T)):
        if are_the_same(rows_of(test), rows_of(other)):
            warn(
                "validation: it has items of the test set, on which nothing may be calibrated; "
                "pass held-out pairs"
            )
            return "pairs of the test set"
    return "held-out pairs"


def _warn_of_units(sim: Similarity, rerankers: Mapping[str, Reranker]) -> None:
    """Warn of scores that are no cosines, if methods have scales for cosines."""
    found = [name for name, method in rerankers.items() if has_defaults_for_cosines(method)]
    if found and go_beyond_cosines(sim):
        warn(
            "scores: some are beyond -1 to 1, as of logits or distances, and the scales of "
            f"{', '.join(found)} are for cosine similarities. Divide logits by the model's logit "
            "scale"
        )


def _without_bank(banks: Banks | None, validation: Similarity) -> str:
    """Return the words that say that scales were chosen without the bank that they are for."""
    if banks is None or validation.embeddings is not None:
        return ""
    return " without the bank, whose scores are of the test set's candidates"


def _compared(entries: Sequence[Entry], samples: int) -> list[Entry]:
    """Return the entries with their changes from the first one."""
    systems = {entry.label: entry.results for entry in entries}
    changes = compare_all(systems, baseline=entries[0].label, figures=TESTED, samples=samples)
    first, *others = entries
    return [first, *(replace(entry, changes=changes[entry.label]) for entry in others)]


@dataclass(frozen=True)
class ModelComparison:
    """Several models on the same queries, the first of which the others are compared with."""

    rows: list[Row]
    samples: int  # of the bootstrap behind the changes

    def table(self, ks: Ks = RECALLS, *, notes: Sequence[str] = ()) -> Table:
        """Return the table of all models: recalls, changes of the RSUM and of R@1, and notes."""
        return comparison_table(self.rows, ks, samples=self.samples, notes=notes)


def compare_models(
    results: Mapping[str, RetrievalResults],
    *,
    transductive: Sequence[str] = (),
    samples: int | None = None,
) -> ModelComparison:
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
        raise ValueError(f"results: expected at least two models, got {len(results)}")
    for name in transductive:
        one_of("transductive", name, *results)
    if samples is None:
        samples = samples_for(len(results) - 1)
    base = next(iter(results))
    for name, own in results.items():
        if name != base and _are_same(own, results[base]):
            warn(f"{name}: it has the same ranks as {base}, as if its scores were read twice")
    changes = compare_all(results, baseline=base, figures=TESTED, samples=samples)
    rows = []
    for name, own in results.items():
        rows.append(Row(name, own, changes.get(name, {}), name in transductive))
    return ModelComparison(rows, samples)


def _are_same(own: RetrievalResults, other: RetrievalResults) -> bool:
    """Return whether all ranks and best candidates of two models are the same."""
    pairs = [(own.i2t, other.i2t), (own.t2i, other.t2i)]
    return all(torch.equal(x.ranks, y.ranks) and torch.equal(x.top, y.top) for x, y in pairs)


def _with_ids(name: str, scores: Tensor | Similarity) -> Similarity:
    """Return scores of any form as a Similarity."""
    if isinstance(as_pair(scores), tuple):
        expected = "one matrix of scores, from which both directions are re-ranked"
        raise TypeError(f"{name}: expected {expected}, got a pair")
    return with_ids(name, scores, None, None)


def _by_name(
    methods: Iterable[str | Reranker] | Mapping[str, Reranker], fast: FastReranker
) -> dict[str, Reranker]:
    """Return re-rankers by their names in :data:`METHODS`, by names of one's own, and others as
    they show themselves.
    """
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise TypeError(f"methods: expected a list such as ['fast', CSLS(10)], got {methods!r}")
    if isinstance(methods, Mapping):
        named = methods
        for name in methods:
            if not isinstance(name, str) or name in TITLES:
                raise ValueError(f"methods: expected other names than the library's, got {name!r}")
    else:
        named = {x if isinstance(x, str) else repr(x): x for x in methods}
    found = {}
    for name, method in named.items():
        if isinstance(method, str):
            one_of("methods", method, *METHODS)
            method = fast if method == "fast" else METHODS[method]()
        if not isinstance(method, Reranker):
            expected = "names and re-rankers with their options, such as 'csls' or CSLS(10)"
            raise TypeError(f"methods: expected {expected}, got {method!r}")
        found[name] = method
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
    validation = trial.validation
    if trial.method is None or (trial.banks is None and validation is None):
        return trial.method
    method = copy.copy(trial.method)  # the caller's has no bank afterwards
    # scores of a bank are of the test candidates; a bank of embeddings fits held-out pairs, too
    fits_validation = validation is not None and validation.embeddings is not None
    if trial.banks is not None and fits_validation:
        method.fit(*trial.banks)
    if validation is not None:
        assert isinstance(method, FastReranker)
        method.calibrate(validation)
    if trial.banks is not None and not fits_validation:
        method.fit(*trial.banks)
    return method


def protocol_table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return the figures of :func:`itrloss.metrics.coco_protocol` as text: a line for each
    protocol.
    """
    heads = [(arrow, f"R@{k}") for arrow in ARROWS.values() for k in RECALLS]
    heads += [("", "RSUM")]
    heads += [(figure, way) for figure in ("R-P", "mAP@R") for way in WAYS]
    lines = []
    for metrics in figures.values():
        values = [metrics.get(figure, "") for figure in _PROTOCOL]
        lines.append(dict(zip(heads, values, strict=True)))
    return text_of(Table([frame(list(figures), lines)]))
