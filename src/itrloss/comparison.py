"""All re-rankers on one set of scores: what ``itrloss rerank`` and ``itrloss eval`` print and
write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from . import rerank
from .metrics import Comparison, RetrievalResults, compare, retrieval_results
from .metrics.results import RECALLS, WAYS
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
# from so many, (N + M)² numbers a few times over are more than most machines have
K_RECIPROCAL_ITEMS = 12_000
PLAIN = "no re-ranking"
CALIBRATED = "fast, calibrated"
Banks = tuple[Tensor | None, Tensor | None]  # of images and of texts
_RECALLS = f"{'image→text 1 5 10':>17} {'text→image 1 5 10':>17} {'RSUM':>5}"


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
        """Where the hubs were looked for: ``"test"``, ``"bank"``, ``"bank i2t"`` if only that has
        one, or ``""``.
        """
        if self.reranker is None:
            return ""
        i2t, t2i = self.reranker.transductive
        if i2t and t2i:
            return "test"
        return "bank t2i" if i2t else "bank i2t" if t2i else "bank"

    @property
    def looks_at(self) -> str:
        """The same in words."""
        kind, _, way = self.hubs.partition(" ")
        return {"": "", "test": "the test queries", "bank": "the bank"}[kind] + (
            f" ({way})" if way else ""
        )


@dataclass(frozen=True)
class RerankerComparison:
    """Entries, that without re-ranking first, and what could not be tried."""

    sim: Similarity
    entries: list[Entry]
    left_out: dict[str, str]  # method: why


def compare_rerankers(
    sim: Similarity,
    methods: Sequence[str] = tuple(METHODS),
    banks: Banks = (None, None),
    validation: Similarity | None = None,
    fast: FastReranker | None = None,
    progress: Callable[[str], None] = lambda text: None,
    folds: int = 1,
) -> RerankerComparison:
    """Try methods on scores, on the test queries and, with banks, on these.

    Args:
        sim: what is re-ranked, with ids.
        methods: names in :data:`METHODS`.
        banks: queries of another set, of images and of texts, see
            :meth:`itrloss.rerank.Reranker.fit`.
        validation: held-out pairs that Fast Re-ranking is calibrated on, beside its numbers in
            ``fast``.
        fast: Fast Re-ranking as it is to be tried; its defaults if left out.
        progress: told what is done next.
        folds: see :func:`itrloss.metrics.retrieval_results`.
    """
    left_out: dict[str, str] = {}
    tried: list[tuple[str, Banks | None]] = [(PLAIN, None)]
    for name in methods:
        kind = METHODS[name]
        if kind.needs_embeddings and sim._inputs is None:
            left_out[name] = "needs embeddings: itrloss eval"
        elif name == "k-reciprocal" and sum(sim.shape) > folds * K_RECIPROCAL_ITEMS:
            left_out[name] = (
                f"holds (N + M)² numbers, too many from {folds * K_RECIPROCAL_ITEMS} items on"
            )
        elif kind.needs_bank and None in banks:
            left_out[name] = "needs banks of queries: --bank-images and --bank-texts"
        else:
            by_bank = [banks] if kind.takes_bank and banks != (None, None) else []
            for used in by_bank if kind.needs_bank else [None, *by_bank]:
                tried.append((name, used))
                if name == "fast" and validation is not None:
                    tried.append((CALIBRATED, used))
    entries: list[Entry] = []
    for number, (name, used) in enumerate(tried, 1):
        progress(f"[{number}/{len(tried)}] {name}{', with a bank' if used else ''} …")
        held_out = validation if name == CALIBRATED else None
        reranker = None if name == PLAIN else _made(name, used, fast, held_out)
        start = time.perf_counter()
        results = retrieval_results(sim, reranker=reranker, folds=folds)
        seconds = time.perf_counter() - start
        change = compare(results, entries[0].results if entries else results)["rsum"]
        entries.append(Entry(name, reranker, results, change, seconds))
    return RerankerComparison(sim, entries, left_out)


def _made(
    name: str, banks: Banks | None, fast: FastReranker | None, validation: Similarity | None
) -> Reranker:
    if validation is None:
        made = (
            FastReranker(fast.i2t, fast.t2i)
            if name == "fast" and fast is not None
            else METHODS[name]()
        )
    elif (
        banks is not None and validation._inputs is not None
    ):  # banks of embeddings fit the validation set too
        return FastReranker().fit(*banks).calibrate(validation)
    else:  # scores of a bank are of the test candidates
        made = FastReranker().calibrate(validation)
    return made if banks is None else made.fit(*banks)


def table(comparison: RerankerComparison) -> str:
    """Return one line a method, of at most 100 columns."""
    lines = [f"{'':16} {'hubs in':8} {_RECALLS} {'change (95 %)':>20} {'time':>6}"]
    for entry in comparison.entries:
        c = entry.change
        change = (
            "" if entry.reranker is None else f"{c.difference:+.1f} ({c.low:+.1f}, {c.high:+.1f})"
        )
        line = f"{entry.name:16} {entry.hubs:8} {_recalls(entry.results.metrics())} {change:>20} {entry.seconds:5.1f}s"
        lines.append(line)
    lines += [f"{name:16} left out: {why}" for name, why in comparison.left_out.items()]
    return "\n".join(line.rstrip() for line in lines)


def protocol_table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line a protocol of :func:`itrloss.metrics.coco_protocol`, of at most 100 columns."""
    lines = [f"{'':12} {_RECALLS} {'R-P i2t':>8} {'t2i':>5} {'mAP@R i2t':>10} {'t2i':>5}"]
    for name, m in figures.items():
        precisions = (
            m.get(f"{way}_{figure}") for figure in ("r_precision", "map_at_r") for way in WAYS
        )
        a, b, c, d = ("" if x is None else f"{x:.1f}" for x in precisions)
        lines.append(f"{name:12} {_recalls(m)} {a:>8} {b:>5} {c:>10} {d:>5}".rstrip())
    return "\n".join(lines)


def _recalls(m: Mapping[str, float]) -> str:
    return " ".join(
        f"{m[name]:5.1f}" for name in (*(f"{way}_r{k}" for way in WAYS for k in RECALLS), "rsum")
    )
