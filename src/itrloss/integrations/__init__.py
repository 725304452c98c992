"""The losses in the trainers of other libraries; each module imports its library when it is used.

They are not in ``compat``, which has the losses of code bases under their signatures, and needs nothing but PyTorch.
"""

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from ..losses import Matryoshka, PairLoss

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


def inner_loss(loss: Any) -> PairLoss:
    """Return a loss, or that inside of Matryoshka; raise an error unless it takes images and texts to a scalar."""
    inputs = inspect.signature(loss.forward).parameters.values() if isinstance(loss, (PairLoss, Matryoshka)) else ()
    if [x.name for x in inputs if x.default is x.empty or x.name in ("images", "texts")] != ["images", "texts"]:
        raise TypeError(f"loss: expected one of images and texts alone, such as itrloss.InfoNCELoss(), got {loss!r}")
    inner = loss.loss if isinstance(loss, Matryoshka) else loss
    if inner.reduction == "none":
        raise ValueError("loss: expected reduction 'mean' or 'sum', as the trainer needs a scalar, got 'none'")
    return inner
