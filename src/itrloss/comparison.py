"""All re-rankers on one set of scores, which ``itrloss rerank`` and ``itrloss eval`` compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from . import rerank
from .metrics import Comparison, RetrievalResults, compare, retrieval_results
from .metrics.results import RECALLS, WAYS, Ks
from .rerank import FastReranker, Reranker
from .similarity import Similarity

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
    "reciprocal": rerank.ReciprocalReranker,
    "multi-factor": rerank.MultiFactorReranker,
    "k-reciprocal": rerank.KReciprocalReranker,
}
# for more items, (N + M)² numbers a few times over are more than most machines have
K_RECIPROCAL_ITEMS = 12_000
PLAIN = "no re-ranking"
CALIBRATED = "fast, calibrated"
Banks = tuple[Tensor | None, Tensor | None]  # of images and of texts
_PRECISIONS = {  # columns and their widths
    "i2t_r_precision": 8,
    "t2i_r_precision": 5,
    "i2t_map_at_r": 10,
    "t2i_map_at_r": 5,
}


@dataclass(frozen=True)
class Entry:
    """A method, and what it makes of the scores."""

    name: str
    reranker: Reranker | None  # None: no re-ranking
    results: RetrievalResults
    change: Comparison  # of the RSUM
    seconds: float

    @property
    def hubs(self) -> str:
        """Where the hubs were looked for: ``"test"``, ``"bank"``, or ``""`` without re-ranking.

        ``"bank i2t"`` or ``"bank t2i"`` if only that direction has a bank.
        """
        if self.reranker is None:
            return ""
        i2t, t2i = self.reranker.transductive
        if i2t and t2i:
            return "test"
        if i2t:
            return "bank t2i"
        if t2i:
            return "bank i2t"
        return "bank"

    @property
    def looks_at(self) -> str:
        """The same in words."""
        kind, _, way = self.hubs.partition(" ")
        words = {"": "", "test": "the test queries", "bank": "the bank"}[kind]
        return f"{words} ({way})" if way else words


@dataclass(frozen=True)
class RerankerComparison:
    """The entries, first the one without re-ranking, and what could not be tried."""

    sim: Similarity
    entries: list[Entry]
    left_out: dict[str, str]  # method: why
    rules: Mapping[str, Any] = field(default_factory=dict)  # who is right, and who is ranked


def compare_rerankers(
    sim: Similarity,
    methods: Sequence[str] = tuple(METHODS),
    banks: Banks = (None, None),
    validation: Similarity | None = None,
    fast: FastReranker | None = None,
    progress: Callable[[str], None] = lambda text: None,
    folds: int = 1,
    rules: Mapping[str, Any] = MappingProxyType({}),
) -> RerankerComparison:
    """Return what methods make of scores, with hubs of the test queries and of any banks.

    Args:
        sim: what is re-ranked, with ids.
        methods: names in :data:`METHODS`.
        banks: queries of another set, of images and of texts, see
            :meth:`itrloss.rerank.Reranker.fit`.
        validation: held-out pairs that Fast Re-ranking is calibrated on, with its numbers in
            ``fast``.
        fast: Fast Re-ranking as it is to be tried; its defaults if left out.
        progress: told what is done next.
        folds: see :func:`itrloss.metrics.retrieval_results`.
        rules: its arguments ``relevant``, ``exclude`` and ``candidates``.
    """
    left_out: dict[str, str] = {}
    tried: list[tuple[str, Banks | None]] = [(PLAIN, None)]
    for name in methods:
        why = _obstacle(name, sim, banks, folds)
        if why:
            left_out[name] = why
            continue
        for used in _banks_to_try(METHODS[name], banks):
            tried.append((name, used))
            if name == "fast" and validation is not None:
                tried.append((CALIBRATED, used))
    entries: list[Entry] = []
    for number, (name, used) in enumerate(tried, 1):
        bank = ", with a bank" if used else ""
        progress(f"[{number}/{len(tried)}] {name}{bank} …")
        reranker = None
        if name != PLAIN:
            reranker = _made(name, used, fast, validation)
        start = time.perf_counter()
        results = retrieval_results(sim, reranker=reranker, folds=folds, **rules)
        seconds = time.perf_counter() - start
        before = entries[0].results if entries else results
        change = compare(results, before)["rsum"]
        entries.append(Entry(name, reranker, results, change, seconds))
    return RerankerComparison(sim, entries, left_out, rules)


def _obstacle(name: str, sim: Similarity, banks: Banks, folds: int) -> str:
    """Return why a method cannot be tried; an empty string if it can."""
    kind = METHODS[name]
    if kind.needs_embeddings and sim.embeddings is None:
        return "needs embeddings: itrloss eval"
    most = folds * K_RECIPROCAL_ITEMS
    if name == "k-reciprocal" and sum(sim.shape) > most:
        return f"holds (N + M)² numbers, too many from {most} items on"
    if kind.needs_bank and None in banks:
        return "needs banks of queries: --bank-images and --bank-texts"
    return ""


def _banks_to_try(kind: type[Reranker], banks: Banks) -> list[Banks | None]:
    """Return the banks that a method is tried with; None stands for the test queries."""
    if kind.needs_bank:
        return [banks]
    if kind.takes_bank and banks != (None, None):
        return [None, banks]
    return [None]


def _made(
    name: str, banks: Banks | None, fast: FastReranker | None, validation: Similarity | None
) -> Reranker:
    """Return the re-ranker of this name, fitted to banks and, if it is the calibrated one, to
    held-out pairs.
    """
    if name == CALIBRATED:
        assert validation is not None
        if banks is not None and validation.embeddings is not None:
            # banks of embeddings fit the validation set, too
            return FastReranker().fit(*banks).calibrate(validation)
        # scores of a bank are of the test candidates
        made = FastReranker().calibrate(validation)
    elif name == "fast" and fast is not None:
        made = FastReranker(fast.i2t, fast.t2i)
    else:
        made = METHODS[name]()
    if banks is not None:
        made.fit(*banks)
    return made


def table(comparison: RerankerComparison, ks: Ks = RECALLS) -> str:
    """Return one line for each method with R@K; of at most 100 columns for three K."""
    lines = [f"{'':16} {'hubs in':8} {_head(ks)} {'change (95 %)':>20} {'time':>6}"]
    for entry in comparison.entries:
        change = ""
        if entry.reranker is not None:
            c = entry.change
            change = f"{c.difference:+.1f} ({c.low:+.1f}, {c.high:+.1f})"
        recalls = _recalls(entry.results.metrics(ks), ks)
        lines.append(f"{entry.name:16} {entry.hubs:8} {recalls} {change:>20} {entry.seconds:5.1f}s")
    for name, why in comparison.left_out.items():
        lines.append(f"{name:16} left out: {why}")
    return "\n".join(lines)


def protocol_table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line for each protocol of :func:`itrloss.metrics.coco_protocol`.

    A line has at most 100 columns.
    """
    lines = [f"{'':12} {_head()} {'R-P i2t':>8} {'t2i':>5} {'mAP@R i2t':>10} {'t2i':>5}"]
    for name, metrics in figures.items():
        line = f"{name:12} {_recalls(metrics)}"
        for column, width in _PRECISIONS.items():
            value = ""
            if column in metrics:
                value = f"{metrics[column]:.1f}"
            line += f" {value:>{width}}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _title(way: str, ks: Ks) -> str:
    return f"{way} {' '.join(map(str, ks))}"


def _width(ks: Ks) -> int:
    """Return the width of the columns of a direction: of their title, or of their numbers."""
    return max(len(_title("image→text", ks)), 6 * len(ks) - 1)


def _head(ks: Ks = RECALLS) -> str:
    """Return the head of the columns that :func:`_recalls` fills."""
    titles = [f"{_title(way, ks):>{_width(ks)}}" for way in ("image→text", "text→image")]
    return " ".join([*titles, f"{'RSUM':>5}"])


def _recalls(metrics: Mapping[str, float], ks: Ks = RECALLS) -> str:
    """Return R@K of both directions, and the RSUM."""
    groups = []
    for way in WAYS:
        numbers = " ".join(f"{metrics[f'{way}_r{k}']:5.1f}" for k in ks)
        groups.append(f"{numbers:>{_width(ks)}}")
    return " ".join([*groups, f"{metrics['rsum']:5.1f}"])
