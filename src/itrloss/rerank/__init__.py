"""Re-rankers: better rankings from scores that exist already."""

from .base import BiasReranker, RerankBiases, Reranked, Reranker
from .fast import FastReranker, InvertedSoftmax
from .index import BiasedIndex
from .neighbours import KReciprocalReranker, MultiFactorReranker, ReciprocalReranker
from .normalization import (
    CSLS,
    DualBankNorm,
    DualBankSinkhorn,
    DualSoftmax,
    MutualProximity,
    NearestNeighborNorm,
    QueryBankNorm,
    Sinkhorn,
)

__all__ = [
    "BiasReranker",
    "BiasedIndex",
    "CSLS",
    "DualBankNorm",
    "DualBankSinkhorn",
    "DualSoftmax",
    "FastReranker",
    "InvertedSoftmax",
    "KReciprocalReranker",
    "MultiFactorReranker",
    "MutualProximity",
    "NearestNeighborNorm",
    "QueryBankNorm",
    "ReciprocalReranker",
    "RerankBiases",
    "Reranked",
    "Reranker",
    "Sinkhorn",
]
