"""Losses and re-rankers for image-text retrieval."""

from . import compat, distributed, functional, metrics, rerank
from .anchors import Anchors
from .engine.answers import pair_term
from .grad_cache import grad_cache_step
from .kmeans import OnlineKMeans
from .losses import (
    CODERObjective,
    CODERTerms,
    DiversityContrastiveLoss,
    DVSEObjective,
    DVSETerms,
    DynamicGate,
    DynamicOrthogonalLoss,
    HubnessAwareLoss,
    InfoNCELoss,
    LateInteractionLoss,
    MemoryDiversityContrastiveLoss,
    MemoryLoss,
    PairLoss,
    PrototypeClassificationLoss,
    SigmoidLoss,
    TripletLoss,
    UnifiedTrainingObjective,
    VarianceAwareLoss,
)
from .memory import CoupledMemory, MomentumEncoder
from .mining import mine_hard_negatives
from .similarity import Similarity
from .telemetry import describe

__version__ = "0.1.0"

__all__ = [
    "Anchors",
    "CODERObjective",
    "CODERTerms",
    "CoupledMemory",
    "DiversityContrastiveLoss",
    "DVSEObjective",
    "DVSETerms",
    "DynamicGate",
    "DynamicOrthogonalLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "LateInteractionLoss",
    "MemoryDiversityContrastiveLoss",
    "MemoryLoss",
    "MomentumEncoder",
    "OnlineKMeans",
    "PairLoss",
    "PrototypeClassificationLoss",
    "SigmoidLoss",
    "Similarity",
    "TripletLoss",
    "UnifiedTrainingObjective",
    "VarianceAwareLoss",
    "compat",
    "describe",
    "distributed",
    "functional",
    "grad_cache_step",
    "metrics",
    "mine_hard_negatives",
    "pair_term",
    "rerank",
]
