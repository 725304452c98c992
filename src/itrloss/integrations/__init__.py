"""The losses in the trainers of other libraries, by subclasses of their classes; each module imports its library.

They are not in ``compat``, which has the losses of code bases under their signatures, and needs nothing but PyTorch.
"""

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from ..losses import Matryoshka, PairLoss

if TYPE_CHECKING:
    from . import pytorch_metric_learning as pytorch_metric_learning
    from . import sentence_transformers as sentence_transformers
    from . import transformers as transformers

__all__ = ["pytorch_metric_learning", "sentence_transformers", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imports the framework, and becomes an attribute
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def takes_pairs(loss: PairLoss) -> bool:
    """Return whether a loss needs images and texts and nothing else."""
    inputs = inspect.signature(loss.forward).parameters.values()
    return [x.name for x in inputs if x.default is x.empty or x.name in ("images", "texts")] == ["images", "texts"]


def inner_loss(loss: Any) -> PairLoss:
    """Return a loss, or that inside of Matryoshka; raise an error unless it takes images and texts to a scalar."""
    inner = loss.loss if isinstance(loss, Matryoshka) else loss
    if not isinstance(inner, PairLoss) or not takes_pairs(inner):
        raise TypeError(f"loss: expected one of images and texts alone, such as itrloss.InfoNCELoss(), got {loss!r}")
    if inner.reduction == "none":
        raise ValueError("loss: expected reduction 'mean' or 'sum', as the trainer needs a scalar, got 'none'")
    return inner
