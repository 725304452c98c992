"""Re-rankers: better rankings from scores that exist already."""

from .base import RerankBiases, Reranked, Reranker
from .fast import FastReranker, InvertedSoftmax
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
