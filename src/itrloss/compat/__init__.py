"""The losses of public code bases, under the signatures they have there: a user changes one line.

Each class takes what the original's constructor takes, is called as the original is, and returns what it returns.
Embeddings are scored as they come, because those code bases normalise in their models. Where a value differs from the
original's, the class says so. Of all of them: scores and losses are float32 at least, and nothing is printed.
"""

from .contrastive import ClipLoss, HALLoss, SigLipLoss, USERLoss
from .hinge import CHANLoss, HREMLoss, SCANLoss, SGRAFLoss, VSEInfinityLoss, VSEPPLoss
from .sets import DivELoss, PVSELoss

__all__ = ["CHANLoss", "ClipLoss", "DivELoss", "HALLoss", "HREMLoss", "PVSELoss", "SCANLoss", "SGRAFLoss", "SigLipLoss",
           "USERLoss", "VSEInfinityLoss", "VSEPPLoss"]  # fmt: skip
