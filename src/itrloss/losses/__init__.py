"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`, or the anchors'
methods.
"""

from .base import MemoryLoss as MemoryLoss
from .base import PairLoss as PairLoss
from .coder import CODERObjective as CODERObjective
from .coder import CODERTerms as CODERTerms
from .coder import DiversityContrastiveLoss as DiversityContrastiveLoss
from .coder import MemoryDiversityContrastiveLoss as MemoryDiversityContrastiveLoss
from .coder import PrototypeClassificationLoss as PrototypeClassificationLoss
from .contrastive import SigmoidLoss as SigmoidLoss
from .contrastive import TripletLoss as TripletLoss
from .dvse import DVSEObjective as DVSEObjective
from .dvse import DVSETerms as DVSETerms
from .dvse import DynamicGate as DynamicGate
from .dvse import DynamicOrthogonalLoss as DynamicOrthogonalLoss
from .dvse import VarianceAwareLoss as VarianceAwareLoss
from .infonce import DirectionalInfoNCELoss as DirectionalInfoNCELoss
from .infonce import DistillationLoss as DistillationLoss
from .infonce import FilteredInfoNCELoss as FilteredInfoNCELoss
from .infonce import InfoNCELoss as InfoNCELoss
from .late_interaction import LateInteractionLoss as LateInteractionLoss
from .matryoshka import Matryoshka as Matryoshka
from .probabilistic import PCMEPlusPlusLoss as PCMEPlusPlusLoss
from .robust import ComplementaryContrastiveLoss as ComplementaryContrastiveLoss
from .robust import RINCELoss as RINCELoss
from .supervised import CircleLoss as CircleLoss
from .supervised import MILNCELoss as MILNCELoss
from .supervised import MultiSimilarityLoss as MultiSimilarityLoss
from .supervised import SupConLoss as SupConLoss
from .user import HubnessAwareLoss as HubnessAwareLoss
from .user import UnifiedTrainingObjective as UnifiedTrainingObjective
