"""Losses and re-rankers for image-text retrieval."""

from . import compat, distributed, functional, integrations, losses, metrics, rerank, terms
from .anchors import Anchors
from .checks import option
from .checks.warnings import SuspiciousInputWarning, UnfitScalesWarning
from .engine.related import Related
from .kmeans import OnlineKMeans
from .losses import *  # noqa: F403 (every loss, by `losses.__all__`)
from .losses.telemetry import describe
from .memory import CoupledMemory, MomentumEncoder
from .mining import mine_hard_negatives
from .similarity import NO_ID, Similarity
from .terms import pair_term
from .training import Graphed, grad_cache_step

__version__ = "0.1.0"

__all__ = [
    "Anchors",
    "CoupledMemory",
    "Graphed",
    "MomentumEncoder",
    "NO_ID",
    "OnlineKMeans",
    "Related",
    "Similarity",
    "SuspiciousInputWarning",
    "UnfitScalesWarning",
    "compat",
    "describe",
    "distributed",
    "functional",
    "grad_cache_step",
    "integrations",
    "metrics",
    "mine_hard_negatives",
    "option",
    "pair_term",
    "rerank",
    "terms",
]
__all__ += losses.__all__
