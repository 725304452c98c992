"""Re-rankers: better rankings from existing scores."""

from .base import RerankBiases, Reranked, Reranker
from .direction import Bias, Direction
from .fast import FastReranker, InvertedSoftmax
from .index import BiasedIndex
from .neighbours import KReciprocalReranker, MultiFactorReranker, ReciprocalReranker, TwoStageReranker
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
    "Bias",
    "BiasedIndex",
    "CSLS",
    "Direction",
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
    "TwoStageReranker",
]
