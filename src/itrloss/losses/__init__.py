"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`, or the anchors'
methods.

What is named here is also a name of :mod:`itrloss`.
"""

from .base import MemoryLoss, PairLoss
from .coder import (
    CODERObjective,
    CODERTerms,
    DiversityContrastiveLoss,
    MemoryDiversityContrastiveLoss,
    PrototypeClassificationLoss,
)
from .contrastive import SigmoidLoss, TripletLoss
from .distillation import DistillationLoss
from .dvse import DVSEObjective, DVSETerms, DynamicGate, DynamicOrthogonalLoss, VarianceAwareLoss
from .infonce import InfoNCELoss, MemoryInfoNCELoss
from .matryoshka import Matryoshka
from .probabilistic import PCMEPlusPlusLoss
from .robust import ComplementaryContrastiveLoss, RINCELoss
from .supervised import CircleLoss, MILNCELoss, MultiSimilarityLoss, SDMLoss, SupConLoss
from .user import HubnessAwareLoss, UnifiedTrainingObjective

__all__ = [
    "CircleLoss",
    "CODERObjective",
    "CODERTerms",
    "ComplementaryContrastiveLoss",
    "DistillationLoss",
    "DiversityContrastiveLoss",
    "DVSEObjective",
    "DVSETerms",
    "DynamicGate",
    "DynamicOrthogonalLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "Matryoshka",
    "MemoryDiversityContrastiveLoss",
    "MemoryInfoNCELoss",
    "MemoryLoss",
    "MILNCELoss",
    "MultiSimilarityLoss",
    "PairLoss",
    "PCMEPlusPlusLoss",
    "PrototypeClassificationLoss",
    "RINCELoss",
    "SDMLoss",
    "SigmoidLoss",
    "SupConLoss",
    "TripletLoss",
    "UnifiedTrainingObjective",
    "VarianceAwareLoss",
]
