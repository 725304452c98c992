"""Training steps around any loss: gradients of large batches in chunks, and CUDA graphs."""

from .grad_cache import grad_cache_step
from .graphed import Graphed

__all__ = ["Graphed", "grad_cache_step"]
