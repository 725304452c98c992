"""Losses and re-rankers for image-text retrieval."""

from . import functional, metrics, rerank
from .engines.pairs import pair_term
from .losses import (
    DiversityContrastiveLoss,
    DynamicGate,
    DynamicOrthogonalLoss,
    HubnessAwareLoss,
    InfoNCELoss,
    MemoryDiversityContrastiveLoss,
    MemoryLoss,
    PairLoss,
    SigmoidLoss,
    TripletLoss,
    UnifiedTrainingObjective,
)
from .memory import CoupledMemory, MomentumEncoder
from .similarity import Similarity

__version__ = "0.1.0"

__all__ = [
    "CoupledMemory",
    "DiversityContrastiveLoss",
    "DynamicGate",
    "DynamicOrthogonalLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "MemoryDiversityContrastiveLoss",
    "MemoryLoss",
    "MomentumEncoder",
    "PairLoss",
    "SigmoidLoss",
    "Similarity",
    "TripletLoss",
    "UnifiedTrainingObjective",
    "functional",
    "metrics",
    "pair_term",
    "rerank",
]
