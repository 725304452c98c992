"""The losses of public code bases, under their original signatures: a user changes one line.

Each class has the constructor, call and result of the original. Embeddings are not normalised,
because those code bases normalise in their models. If a value differs from the original's, the
class says so. In all classes, scores and losses are float32 at least, and nothing is printed.
"""

from .adapter import adapt
from .contrastive import HALLoss, USERLoss
from .hinge import (
    CHANLoss,
    DivELoss,
    HREMLoss,
    PVSELoss,
    SCANLoss,
    SGRAFLoss,
    VSEInfinityLoss,
    VSEPPLoss,
)
from .open_clip import ClipLoss, SigLipLoss

__all__ = [
    "CHANLoss",
    "ClipLoss",
    "DivELoss",
    "HALLoss",
    "HREMLoss",
    "PVSELoss",
    "SCANLoss",
    "SGRAFLoss",
    "SigLipLoss",
    "USERLoss",
    "VSEInfinityLoss",
    "VSEPPLoss",
    "adapt",
]
