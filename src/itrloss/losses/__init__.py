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
from .distillation import DistillationLoss, MarginMSELoss
from .dvse import DVSEObjective, DVSETerms, DynamicGate, DynamicOrthogonalLoss, VarianceAwareLoss
from .infonce import InfoNCELoss, MemoryInfoNCELoss
from .matryoshka import Matryoshka
from .probabilistic import PCMEPlusPlusLoss
from .robust import ComplementaryContrastiveLoss, GeneralizedCrossEntropyLoss, RINCELoss
from .supervised import (
    CircleLoss,
    DecoupledContrastiveLoss,
    MILNCELoss,
    MultiSimilarityLoss,
    SDMLoss,
    SupConLoss,
)
from .user import HubnessAwareLoss, UnifiedTrainingObjective

__all__ = [
    "CircleLoss",
    "CODERObjective",
    "CODERTerms",
    "ComplementaryContrastiveLoss",
    "DecoupledContrastiveLoss",
    "DistillationLoss",
    "DiversityContrastiveLoss",
    "DVSEObjective",
    "DVSETerms",
    "DynamicGate",
    "DynamicOrthogonalLoss",
    "GeneralizedCrossEntropyLoss",
    "HubnessAwareLoss",
    "InfoNCELoss",
    "MarginMSELoss",
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
