"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`."""

from .base import MemoryLoss, PairLoss
from .contrastive import InfoNCELoss, SigmoidLoss, TripletLoss
from .diversity import DiversityContrastiveLoss, MemoryDiversityContrastiveLoss
from .hubness import HubnessAwareLoss, UnifiedTrainingObjective
from .sets import DynamicGate, DynamicOrthogonalLoss

__all__ = [
    "DiversityContrastiveLoss",
    "DynamicGate",
    "DynamicOrthogonalLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "MemoryDiversityContrastiveLoss",
    "MemoryLoss",
    "PairLoss",
    "SigmoidLoss",
    "TripletLoss",
    "UnifiedTrainingObjective",
]
