"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`."""

from .base import MemoryLoss, PairLoss
from .contrastive import InfoNCELoss, SigmoidLoss, TripletLoss
from .diversity import DiversityContrastiveLoss, MemoryDiversityContrastiveLoss
from .hubness import HubnessAwareLoss, UnifiedTrainingObjective
from .objectives import CODERObjective, CODERTerms, DVSEObjective, DVSETerms
from .prototypes import PrototypeClassificationLoss
from .sets import DynamicGate, DynamicOrthogonalLoss, VarianceAwareLoss

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
