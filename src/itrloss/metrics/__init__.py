"""Retrieval metrics, streamed: the score matrix need not exist."""

from .judgements import Agreement, Judgements, agreement
from .labels import default_ids, fold_repeated
from .results import QueryResults, RetrievalResults, skewness
from .retrieval import retrieval_metrics, retrieval_results
from .uncertainty import Comparison, compare, confidence_intervals

__all__ = [
    "Agreement",
    "Comparison",
    "Judgements",
    "QueryResults",
    "RetrievalResults",
    "agreement",
    "compare",
    "confidence_intervals",
    "default_ids",
    "fold_repeated",
    "retrieval_metrics",
    "retrieval_results",
    "skewness",
]
