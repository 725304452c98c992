"""Retrieval metrics, computed without holding the score matrix."""

from typing import TYPE_CHECKING

from .judgements import Judgements
from .labels import default_ids, fold_repeated
from .protocols import coco_protocol
from .results import QueryResults, RetrievalResults, save_trec, skewness
from .retrieval import retrieval_metrics, retrieval_results
from .uncertainty import Comparison, compare, compare_all, confidence_intervals

if TYPE_CHECKING:
    from .batches import RetrievalMetrics as RetrievalMetrics

__all__ = [
    "Comparison",
    "Judgements",
    "QueryResults",
    "RetrievalResults",
    "coco_protocol",
    "compare",
    "compare_all",
    "confidence_intervals",
    "default_ids",
    "fold_repeated",
    "retrieval_metrics",
    "retrieval_results",
    "save_trec",
    "skewness",
]


def __getattr__(name: str) -> object:
    if name == "RetrievalMetrics":  # TorchMetrics, its base class, is imported where it is used
        from .batches import RetrievalMetrics

        return RetrievalMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
