"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`."""

from .base import MemoryLoss, PairLoss
from .coder import (
    CODERObjective,
    CODERTerms,
    DiversityContrastiveLoss,
    MemoryDiversityContrastiveLoss,
    PrototypeClassificationLoss,
)
from .contrastive import InfoNCELoss, SigmoidLoss, TripletLoss
from .dvse import DVSEObjective, DVSETerms, DynamicGate, DynamicOrthogonalLoss, VarianceAwareLoss
from .user import HubnessAwareLoss, UnifiedTrainingObjective

__all__ = [
    "CODERObjective",
    "CODERTerms",
    "DVSEObjective",
    "DVSETerms",
    "DiversityContrastiveLoss",
    "DynamicGate",
    "DynamicOrthogonalLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "MemoryDiversityContrastiveLoss",
    "MemoryLoss",
    "PairLoss",
    "PrototypeClassificationLoss",
    "SigmoidLoss",
    "TripletLoss",
    "UnifiedTrainingObjective",
    "VarianceAwareLoss",
]
