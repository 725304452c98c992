"""Losses and re-rankers for image-text retrieval."""

from . import compat, distributed, functional, integrations, metrics, rerank, terms
from .anchors import Anchors
from .grad_cache import grad_cache_step
from .kmeans import OnlineKMeans
from .losses import (
    CircleLoss,
    CODERObjective,
    CODERTerms,
    ComplementaryContrastiveLoss,
    DirectionalInfoNCELoss,
    DistillationLoss,
    DiversityContrastiveLoss,
    DVSEObjective,
    DVSETerms,
    DynamicGate,
    DynamicOrthogonalLoss,
    FilteredInfoNCELoss,
    HubnessAwareLoss,
    InfoNCELoss,
    LateInteractionLoss,
    Matryoshka,
    MemoryDiversityContrastiveLoss,
    MemoryLoss,
    MILNCELoss,
    MultiSimilarityLoss,
    PairLoss,
    PCMEPlusPlusLoss,
    PrototypeClassificationLoss,
    RINCELoss,
    SigmoidLoss,
    SupConLoss,
    TripletLoss,
    UnifiedTrainingObjective,
    VarianceAwareLoss,
)
from .memory import CoupledMemory, MomentumEncoder
from .mining import mine_hard_negatives
from .similarity import Similarity
from .telemetry import describe
from .terms import pair_term

__version__ = "0.1.0"

__all__ = [
    "Anchors",
    "CODERObjective",
    "CODERTerms",
    "CircleLoss",
    "ComplementaryContrastiveLoss",
    "CoupledMemory",
    "DirectionalInfoNCELoss",
    "DistillationLoss",
    "DiversityContrastiveLoss",
    "DVSEObjective",
    "DVSETerms",
    "DynamicGate",
    "DynamicOrthogonalLoss",
    "FilteredInfoNCELoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "Matryoshka",
    "LateInteractionLoss",
    "MemoryDiversityContrastiveLoss",
    "MemoryLoss",
    "MILNCELoss",
    "MomentumEncoder",
    "MultiSimilarityLoss",
    "OnlineKMeans",
    "PairLoss",
    "PCMEPlusPlusLoss",
    "PrototypeClassificationLoss",
    "RINCELoss",
    "SigmoidLoss",
    "Similarity",
    "SupConLoss",
    "TripletLoss",
    "UnifiedTrainingObjective",
    "VarianceAwareLoss",
    "compat",
    "describe",
    "distributed",
    "functional",
    "grad_cache_step",
    "integrations",
    "metrics",
    "mine_hard_negatives",
    "pair_term",
    "rerank",
    "terms",
]
