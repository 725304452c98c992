"""The losses in the training of open_clip (``pip install 'itrloss[open-clip]'``)."""

from __future__ import annotations

import importlib
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ..compat import ClipLoss, SigLipLoss
from ..torch_versions import functional_call
from . import check_without_groups, warn_without_gather


class RetrievalLoss(nn.Module):
    """A loss of this library as one of open_clip, in place of its ``ClipLoss`` and ``SigLipLoss``.

    The model's scale and bias replace the loss's learnable ones (its parameters ``log_scale`` and
    ``bias``): ``InfoNCELoss(learnable=True)`` is twice ``ClipLoss``, which averages the directions,
    and ``SigmoidLoss()`` is ``SigLipLoss``. With other losses, the model's scale and bias are not
    trained: their gradient is 0. open_clip itself limits the scale, to 100; a ``max_scale`` of the
    loss limits what the loss is computed with, and not the model's parameter.

    Args:
        loss: a :class:`itrloss.PairLoss` of images and texts alone, :class:`itrloss.Matryoshka`
            around one, or a module with ``forward(images, texts, image_ids=None, text_ids=None)``;
            in a job of several processes with ``gather=True``.

    Raises:
        TypeError, ValueError: for other losses, for parameters that the model does not have, and in
            a call without the bias that the loss trains.
    """

    def __init__(self, loss: nn.Module):
        super().__init__()
        check_without_groups(loss)
        #: Names of the loss's parameters, and of the arguments that stand for them.
        self.shared = {name: name.rpartition(".")[2] for name, _ in loss.named_parameters()}
        own = [name for name, last in self.shared.items() if last not in ("log_scale", "bias")]
        if own:
            raise ValueError(
                "loss: expected a learnable log_scale and bias at most, as open_clip trains the "
                f"parameters of its model alone, got {', '.join(own)} of {loss!r}"
            )
        self.loss = loss
        warn_without_gather(loss)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of (B, D) pairs, or with ``output_dict`` a dictionary that has it as
        ``contrastive_loss``.

        ``logit_scale``: the scale itself, of one element, as ``logit_bias``.
        """
        if logit_bias is None and "bias" in self.shared.values():
            expected = f"that of the model, which {self.loss!r} trains (--siglip)"
            raise ValueError(f"logit_bias: expected {expected}, got None")
        logit_scale = torch.as_tensor(logit_scale, device=image_features.device)
        # a logarithm in half would put it up to 2 % off
        exact = torch.promote_types(logit_scale.dtype, torch.float32)
        of_model = {"log_scale": logit_scale.to(exact).log().reshape(1)}
        if logit_bias is not None:
            of_model["bias"] = logit_bias
        parameters = {name: of_model[last] for name, last in self.shared.items()}
        loss = functional_call(self.loss, parameters, (image_features, text_features))
        # DistributedDataParallel needs a gradient for each parameter.
        loss = loss + 0 * logit_scale.sum()
        if logit_bias is not None:
            loss = loss + 0 * logit_bias.sum()
        if output_dict:
            return {"contrastive_loss": loss}
        return loss


def patch_open_clip(loss: nn.Module | None = None) -> ExitStack:
    """Put losses of this library into open_clip, and return what undoes it: its ``close()``, or the
    end of a ``with``.

    Losses that open_clip makes from then on, in its tasks and by ``create_loss``, are
    :class:`itrloss.compat.ClipLoss` and :class:`itrloss.compat.SigLipLoss`, or ``loss``. Its
    losses of CoCa and of distillation stay as they are. Of several patches, undo the latest first.

    Args:
        loss: see :class:`RetrievalLoss`; all training losses share it.

    Raises:
        ImportError: without open_clip.
        TypeError, ValueError: for losses that :class:`RetrievalLoss` does not take.
    """
    try:
        names = ("open_clip", "open_clip.factory", "open_clip.loss")
        modules = [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ImportError(
            f"patch_open_clip: install itrloss with the extra 'open-clip' ({error})"
        ) from error

    ours: dict[str, type[nn.Module]] = {"ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}
    if loss is not None:
        RetrievalLoss(loss)  # raises an error now, not when open_clip makes it

        class Patched(RetrievalLoss):
            def __init__(self, *_: object, **__: object):  # open_clip's options have no effect
                super().__init__(loss)

        ours = dict.fromkeys(ours, Patched)
    undo = ExitStack()
    for module in modules:
        for name, replacement in ours.items():
            if hasattr(module, name):
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, replacement)
    return undo
