"""The losses in the trainers of other libraries; each module imports its library when it is used.

They are not in ``compat``, which has the losses of code bases under their signatures, and needs
nothing but PyTorch.
"""

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checks import as_ids
from ..distributed import world_size
from ..losses import Matryoshka, PairLoss, matryoshka
from ..losses.base import Loss
from ..losses.matryoshka import argument_names, needed_by, takes_pairs

if TYPE_CHECKING:
    from . import open_clip as open_clip
    from . import pytorch_metric_learning as pytorch_metric_learning
    from . import sentence_transformers as sentence_transformers
    from . import transformers as transformers

__all__ = ["open_clip", "pytorch_metric_learning", "sentence_transformers", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:  # imports the framework, and becomes an attribute
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def inner_loss(loss: nn.Module) -> nn.Module:
    """Return a loss, or that inside of Matryoshka; raise an error unless it takes images and texts
    to a scalar.
    """
    inner = loss.loss if isinstance(loss, Matryoshka) else loss
    # a module of one's own that is called like a loss
    if isinstance(inner, nn.Module) and not isinstance(inner, (Loss, Matryoshka)):
        takes_ids = {"image_ids", "text_ids"} <= set(argument_names(inner))
        if takes_ids and needed_by(inner.forward) == ["images", "texts"]:
            return inner
    if not takes_pairs(inner):
        raise TypeError(
            "loss: expected one of images and texts alone, such as itrloss.InfoNCELoss(), or a "
            "module of yours with forward(images, texts, image_ids=None, text_ids=None), got "
            f"{loss!r}"
        )
    matryoshka.check_scalar(inner)
    return inner


def check_without_groups(loss: nn.Module) -> None:
    """Raise an error for a loss of groups, which only batches of transformers have, and others."""
    if isinstance(inner_loss(loss), PairLoss):
        matryoshka.inner_loss(loss)


def gathers(loss: nn.Module) -> bool:
    """Return whether a loss, or each one in a module of one's own, is of all processes' batches."""
    inner = inner_loss(loss)
    if isinstance(inner, PairLoss):
        return bool(inner.gather)
    return all(part.gather for part in inner.modules() if isinstance(part, Loss))


def takes_negatives(loss: nn.Module) -> bool:
    """Return whether a loss, or that inside of Matryoshka, takes further negatives."""
    return "negatives" in argument_names(inner_loss(loss))


def warn_without_gather(loss: nn.Module) -> None:
    """Warn in a job of several processes of a loss of the process's own part of the batch."""
    if world_size() > 1 and not gathers(loss):
        warnings.warn(
            "loss: each process takes negatives from its own part of the batch alone; with "
            "gather=True they are those of all processes",
            stacklevel=3,
        )


_STATES = "retrieval_losses.pt"  # the file of a checkpoint with the states of its losses
State = dict[str, object]


class SavesLosses:
    """What a ``transformers.Trainer`` inherits from first to have the states of losses in its
    checkpoints.
    """

    args: Any  # of the trainer

    def _own_states(self) -> dict[str, State]:
        """Return what is saved, by the losses' names; none is written if it is empty."""
        raise NotImplementedError

    def _load_own_states(self, states: dict[str, State]) -> None:
        """Put back what was saved."""
        raise NotImplementedError

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save the model and, next to it, the states of the losses if they have any."""
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        states = self._own_states()
        if states:
            torch.save(states, Path(output_dir or str(self.args.output_dir), _STATES))

    def _load_from_checkpoint(self, folder: str, *model: nn.Module) -> None:
        """Load the model, and the states of the losses; warn if the checkpoint has none."""
        super()._load_from_checkpoint(folder, *model)  # type: ignore[misc]
        file = Path(folder, _STATES)
        if file.exists():
            self._load_own_states(torch.load(file, map_location="cpu", weights_only=True))
        elif self._own_states():
            warnings.warn(
                f"{type(self).__name__}: {folder} has no {_STATES}, as another trainer saved it: "
                "the loss keeps its own state.",
                stacklevel=2,
            )


def ids_of(labels: object, images: Tensor) -> Tensor | None:
    """Return the labels of a batch as (B,) ids; None without labels."""
    if labels is None:
        return None
    try:
        return as_ids("labels", labels, len(images), images.device)
    except TypeError as error:
        raise TypeError(
            f"{error}; they are ids, and rows with equal ones match: remove a column of anything "
            'else, such as dataset.remove_columns("score")'
        ) from None
