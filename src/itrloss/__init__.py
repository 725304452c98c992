"""Losses and re-rankers for image-text retrieval."""

from . import functional, metrics, rerank
from .engines.pairs import pair_term
from .losses import DiversityContrastiveLoss, HubnessAwareLoss, InfoNCELoss, PairLoss, TripletLoss
from .similarity import Similarity

__version__ = "0.1.0"

__all__ = [
    "DiversityContrastiveLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "PairLoss",
    "Similarity",
    "TripletLoss",
    "functional",
    "metrics",
    "pair_term",
    "rerank",
]
