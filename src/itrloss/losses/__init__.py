"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`."""

from .base import MemoryLoss, PairLoss
from .contrastive import InfoNCELoss, TripletLoss
from .diversity import DiversityContrastiveLoss, MemoryDiversityContrastiveLoss
from .hubness import HubnessAwareLoss, UnifiedTrainingObjective

__all__ = [
    "DiversityContrastiveLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "MemoryDiversityContrastiveLoss",
    "MemoryLoss",
    "PairLoss",
    "TripletLoss",
    "UnifiedTrainingObjective",
]
