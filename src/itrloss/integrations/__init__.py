"""The losses in the trainers of other libraries; each module imports its library when it is used.

They are not in ``compat``, which has the losses of code bases under their signatures, and needs
nothing but PyTorch.
"""

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import as_ids
from ..distributed import world_size
from ..losses.matryoshka import argument_names
from ..losses.matryoshka import check_scalar as check_scalar
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


def takes_negatives(loss: Any) -> bool:
    """Return whether a loss, or that inside of Matryoshka, takes further negatives."""
    return "negatives" in argument_names(inner_loss(loss))


def warn_without_gather(loss: Any) -> None:
    """Warn in a job of several processes of a loss of the process's own part of the batch."""
    if world_size() > 1 and not inner_loss(loss).gather:
        warnings.warn(
            "loss: each process takes negatives from its own part of the batch alone; with "
            "gather=True they are those of all processes",
            stacklevel=3,
        )


_STATES = "retrieval_losses.pt"  # the file of a checkpoint with the states of its losses


def save_states(states: dict[str, dict[str, Any]], folder: str) -> None:
    """Save the states of losses, by the losses' names, in the folder of a checkpoint."""
    torch.save(states, Path(folder, _STATES))


def load_states(folder: str, trainer: object) -> dict[str, dict[str, Any]] | None:
    """Return the states that a checkpoint has; None, with a warning, if there are none."""
    file = Path(folder, _STATES)
    if file.exists():
        return torch.load(file, map_location="cpu", weights_only=True)
    warnings.warn(
        f"{type(trainer).__name__}: {folder} has no {_STATES}, as another trainer saved it: "
        "the loss keeps its own state.",
        stacklevel=3,
    )
    return None


def ids_of(labels: Any, images: Tensor) -> Tensor | None:
    """Return the labels of a batch as (B,) ids; None without labels."""
    if labels is None:
        return None
    return as_ids("labels", labels, len(images), images.device)
