"""Losses and re-rankers for image-text retrieval."""

from . import compat, distributed, functional, metrics, rerank
from .cached import cached_step
from .cluster import OnlineKMeans
from .engines.terms import pair_term
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
from .similarity import Similarity
from .telemetry import describe

__version__ = "0.1.0"

__all__ = [
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
    "cached_step",
    "compat",
    "describe",
    "distributed",
    "functional",
    "metrics",
    "pair_term",
    "rerank",
]
