"""The losses in the trainers of other libraries; each module imports its library when it is used.

They are not in ``compat``, which has the losses of code bases under their signatures, and needs
nothing but PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..checks import as_ids
from ..losses.matryoshka import inner_loss as inner_loss

if TYPE_CHECKING:
    from . import open_clip as open_clip
    from . import pytorch_metric_learning as pytorch_metric_learning
    from . import sentence_transformers as sentence_transformers
    from . import transformers as transformers

__all__ = ["open_clip", "pytorch_metric_learning", "sentence_transformers", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imports the framework, and becomes an attribute
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def ids_of(labels: Any, images: Tensor) -> Tensor | None:
    """Return the labels of a batch as (B,) ids; None without labels."""
    if labels is None:
        return None
    return as_ids("labels", labels, len(images), images.device)
