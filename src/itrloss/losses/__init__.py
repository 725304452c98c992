"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`."""

from .base import MemoryLoss as MemoryLoss
from .base import PairLoss as PairLoss
from .coder import CODERObjective as CODERObjective
from .coder import CODERTerms as CODERTerms
from .coder import DiversityContrastiveLoss as DiversityContrastiveLoss
from .coder import MemoryDiversityContrastiveLoss as MemoryDiversityContrastiveLoss
from .coder import PrototypeClassificationLoss as PrototypeClassificationLoss
from .contrastive import InfoNCELoss as InfoNCELoss
from .contrastive import SigmoidLoss as SigmoidLoss
from .contrastive import TripletLoss as TripletLoss
from .dvse import DVSEObjective as DVSEObjective
from .dvse import DVSETerms as DVSETerms
from .dvse import DynamicGate as DynamicGate
from .dvse import DynamicOrthogonalLoss as DynamicOrthogonalLoss
from .dvse import VarianceAwareLoss as VarianceAwareLoss
from .late_interaction import LateInteractionLoss as LateInteractionLoss
from .user import HubnessAwareLoss as HubnessAwareLoss
from .user import UnifiedTrainingObjective as UnifiedTrainingObjective
