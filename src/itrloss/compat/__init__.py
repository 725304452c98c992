"""The losses of public code bases, under the signatures they have there: a user changes one line.

Each class takes what the original's constructor takes, is called as the original is, and returns what it returns.
Embeddings are scored as they come, because those code bases normalise in their models. Where a value differs from the
original's, the class says so and why. Of all of them: scores and losses are float32 at least, and nothing is printed.
"""

from .hubness import HALLoss, USERLoss
from .open_clip import ClipLoss, SigLipLoss
from .sets import DivELoss, PVSELoss
from .triplets import CHANLoss, HREMLoss, SCANLoss, SGRAFLoss, VSEInfinityLoss, VSEPPLoss

__all__ = [
    "VSEPPLoss",
    "VSEInfinityLoss",
    "SCANLoss",
    "SGRAFLoss",
    "CHANLoss",
    "HREMLoss",
    "HALLoss",
    "USERLoss",
    "PVSELoss",
    "DivELoss",
    "ClipLoss",
    "SigLipLoss",
]
