"""Re-rankers: better rankings from existing scores.

In their equations S_qc is the score of query q and candidate c, and R_rc the score of reference
query r and candidate c; r is one of the test queries, or of the bank after :meth:`Reranker.fit`.
All other names are parameters of the class.
"""

from .base import RerankBiases, Reranked, Reranker
from .direction import Bias, Direction
from .fast import FastReranker, InvertedSoftmax
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
from .two_stage import TwoStageReranker

__all__ = [
    "Bias",
    "CSLS",
    "Direction",
    "DualBankNorm",
    "DualBankSinkhorn",
    "DualSoftmax",
    "FastReranker",
    "InvertedSoftmax",
    "MutualProximity",
    "NearestNeighborNorm",
    "QueryBankNorm",
    "RerankBiases",
    "Reranked",
    "Reranker",
    "Sinkhorn",
    "TwoStageReranker",
]
