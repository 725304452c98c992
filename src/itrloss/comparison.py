"""All re-rankers on one set of scores: what ``itrloss rerank`` and ``itrloss eval`` print and write."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .metrics import Comparison, RetrievalResults, compare, retrieval_results
from .peak import peak_memory
from .rerank import (
    CSLS,
    DualBankNorm,
    DualBankSinkhorn,
    DualSoftmax,
    FastReranker,
    InvertedSoftmax,
    KReciprocalReranker,
    MultiFactorReranker,
    MutualProximity,
    NearestNeighborNorm,
    QueryBankNorm,
    ReciprocalReranker,
    Reranker,
    Sinkhorn,
)
from .similarity import Similarity

METHODS: dict[str, type[Reranker]] = {
    "fast": FastReranker,
    "inverted-softmax": InvertedSoftmax,
    "dual-softmax": DualSoftmax,
    "qb-norm": QueryBankNorm,
    "dbnorm": DualBankNorm,
    "nnn": NearestNeighborNorm,
    "csls": CSLS,
    "mutual-proximity": MutualProximity,
    "sinkhorn": Sinkhorn,
    "dbsn": DualBankSinkhorn,
    "reciprocal": ReciprocalReranker,
    "multi-factor": MultiFactorReranker,
    "k-reciprocal": KReciprocalReranker,
}
K_RECIPROCAL_ITEMS = 12_000  # from so many, (N + M)² numbers a few times over are more than most machines have
PLAIN = "no re-ranking"
CALIBRATED = "fast, calibrated"


@dataclass(frozen=True)
class Entry:
    """A method, and what it makes of the scores."""

    name: str
    reranker: Reranker | None  # None: no re-ranking
    inductive: bool  # by a bank of queries
    results: RetrievalResults
    change: Comparison  # of the RSUM
    seconds: float
    peak_mb: float | None  # memory beyond the scores or embeddings, 10⁶ bytes; None where nothing tells

    @property
    def looks_at(self) -> str:
        """Where the hubs were looked for."""
        if self.reranker is None:
            return ""
        if not self.inductive:
            return "the test queries"
        return f"the bank ({self._way})" if self._way else "the bank"

    @property
    def hubs(self) -> str:
        """The same in a word: ``"test"``, ``"bank"``, ``"bank i2t"``."""
        if self.reranker is None:
            return ""
        return f"bank {self._way}".rstrip() if self.inductive else "test"

    @property
    def _way(self) -> str:
        """The only direction with a bank, if it is only one; the other keeps to the test queries."""
        ways = {(False, True): "i2t", (True, False): "t2i"}
        return "" if self.reranker is None else ways.get(self.reranker.transductive, "")


@dataclass(frozen=True)
class RerankerComparison:
    """Entries, that without re-ranking first, and what could not be tried."""

    sim: Similarity
    entries: list[Entry]
    left_out: dict[str, str]  # method: why


def compare_rerankers(
    sim: Similarity,
    methods: Sequence[str] = tuple(METHODS),
    banks: tuple[Tensor | None, Tensor | None] = (None, None),
    validation: Similarity | None = None,
    fast: FastReranker | None = None,
    progress: Callable[[str], None] = lambda text: None,
    memory: bool = False,
    folds: int = 1,
) -> RerankerComparison:
    """Try methods on scores, on the test queries and, with banks, on these.

    Args:
        sim: what is re-ranked, with ids.
        methods: names in :data:`METHODS`.
        banks: queries of another set, of images and of texts, see :meth:`itrloss.rerank.Reranker.fit`.
        validation: held-out pairs that Fast Re-ranking is calibrated on, beside its numbers in ``fast``.
        fast: Fast Re-ranking as it is to be tried; its defaults if left out.
        progress: told what is done next.
        memory: run every method once more, and see how much memory it takes.
        folds: see :func:`itrloss.metrics.retrieval_results`.
    """
    left_out: dict[str, str] = {}
    tried: list[tuple[str, Callable[[], Reranker | None], bool]] = [(PLAIN, lambda: None, False)]
    for name in methods:
        kind = METHODS[name]
        if kind.needs_embeddings and sim._inputs is None:
            left_out[name] = "needs embeddings: itrloss eval"
        elif name == "k-reciprocal" and sum(sim.shape) > folds * K_RECIPROCAL_ITEMS:
            left_out[name] = f"holds (N + M)² numbers, too many from {folds * K_RECIPROCAL_ITEMS} items on"
        elif kind.needs_bank and None in banks:
            left_out[name] = "needs banks of queries: --bank-images and --bank-texts"
        else:
            tried += _ways(name, banks, validation, fast)
    entries: list[Entry] = []
    for number, (name, make, inductive) in enumerate(tried, 1):
        progress(f"[{number}/{len(tried)}] {name}" + (", with a bank" if inductive else ""))
        reranker = make()
        start = time.perf_counter()
        results = retrieval_results(sim, reranker=reranker, folds=folds)
        seconds = time.perf_counter() - start
        change = compare(results, entries[0].results if entries else results)["rsum"]
        # Once more: looking at the memory takes its time.
        again = partial(retrieval_results, sim, reranker=reranker, folds=folds)
        megabytes = peak_memory(again, sim.device) if memory else None
        entries.append(Entry(name, reranker, inductive, results, change, seconds, megabytes))
    return RerankerComparison(sim, entries, left_out)


def _ways(
    name: str, banks: tuple[Tensor | None, Tensor | None], validation: Similarity | None, fast: FastReranker | None
) -> list[tuple[str, Callable[[], Reranker | None], bool]]:
    """A method on the test queries and by the banks, as far as it goes, and what makes it."""
    kind = METHODS[name]
    ways: list[tuple[str, Callable[[], Reranker | None], bool]] = []
    held_out = validation if name == "fast" else None
    if not kind.needs_bank:
        ways.append((name, lambda: _made(kind, fast), False))
        if held_out is not None:
            ways.append((CALIBRATED, lambda: FastReranker().calibrate(held_out), False))
    if any(bank is not None for bank in banks) and kind.takes_bank:
        ways.append((name, lambda: _made(kind, fast).fit(*banks), True))
        if held_out is not None:
            ways.append((CALIBRATED, lambda: _calibrated(held_out, banks), True))
    return ways


def _made(kind: type[Reranker], fast: FastReranker | None) -> Reranker:
    return FastReranker(fast.i2t, fast.t2i) if kind is FastReranker and fast is not None else kind()


def _calibrated(validation: Similarity, banks: tuple[Tensor | None, Tensor | None]) -> Reranker:
    """With the banks, which of embeddings fit the validation set too; scores of a bank are of the test candidates."""
    if validation._inputs is None:
        return FastReranker().calibrate(validation).fit(*banks)
    return FastReranker().fit(*banks).calibrate(validation)


def table(comparison: RerankerComparison) -> str:
    """Return one line a method, of at most 100 columns."""
    measured = any(entry.peak_mb is not None for entry in comparison.entries)
    head = (
        f"{'':16} {'hubs in':8} {'image→text 1 5 10':>17} {'text→image 1 5 10':>17} {'RSUM':>5} {'change (95 %)':>20}"
    )
    lines = [f"{head} {'time':>6}" + (f" {'MB':>5}" if measured else "")]
    for entry in comparison.entries:
        m, c = entry.results.metrics(), entry.change
        i2t, t2i = (" ".join(f"{m[f'{way}_r{k}']:5.1f}" for k in (1, 5, 10)) for way in ("i2t", "t2i"))
        change = "" if entry.reranker is None else f"{c.difference:+.1f} ({c.low:+.1f}, {c.high:+.1f})"
        line = f"{entry.name:16} {entry.hubs:8} {i2t} {t2i} {m['rsum']:5.1f} {change:>20} {entry.seconds:5.1f}s"
        lines.append(line + ("" if entry.peak_mb is None else f" {entry.peak_mb:5.0f}"))
    lines += [f"{name:16} left out: {why}" for name, why in comparison.left_out.items()]
    return "\n".join(line.rstrip() for line in lines)


def protocol_table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line a protocol of :func:`itrloss.metrics.coco_protocol`, of at most 100 columns."""
    head = f"{'':12} {'image→text 1 5 10':>17} {'text→image 1 5 10':>17} {'RSUM':>5}"
    lines = [f"{head} {'R-P i2t':>8} {'t2i':>5} {'mAP@R i2t':>10} {'t2i':>5}"]
    for name, m in figures.items():
        recalls = (" ".join(f"{m[f'{way}_r{k}']:5.1f}" for k in (1, 5, 10)) for way in ("i2t", "t2i"))
        precisions = (m.get(f"{way}_{figure}") for figure in ("r_precision", "map_at_r") for way in ("i2t", "t2i"))
        a, b, c, d = ("" if x is None else f"{x:.1f}" for x in precisions)
        lines.append(f"{name:12} {' '.join(recalls)} {m['rsum']:5.1f} {a:>8} {b:>5} {c:>10} {d:>5}".rstrip())
    return "\n".join(lines)
