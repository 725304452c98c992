"""Losses as modules: they hold hyper-parameters and call :mod:`itrloss.functional`."""

from .base import PairLoss
from .contrastive import InfoNCELoss, TripletLoss
from .diversity import DiversityContrastiveLoss
from .hubness import HubnessAwareLoss

__all__ = ["DiversityContrastiveLoss", "HubnessAwareLoss", "InfoNCELoss", "PairLoss", "TripletLoss"]
