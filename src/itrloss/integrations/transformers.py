"""A trainer of dual encoders for transformers (``pip install 'itrloss[transformers]'``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..losses import Matryoshka, PairLoss
from . import check_scalar, ids_of, inner_loss, load_states, save_states

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(f"{__name__}: pip install 'itrloss[transformers]' ({error})") from error

# a loss's parameters, and the model's of the same meaning
_SHARED = {"log_scale": "logit_scale", "bias": "logit_bias"}


class RetrievalTrainer(Trainer):
    """A ``transformers.Trainer`` of a loss of this library on the embeddings of CLIP, SigLIP and
    similar models.

    Its checkpoints also hold what the loss keeps besides parameters, such as which negatives count
    in a ``TripletLoss``; a run that is resumed goes on with that.

    The model's outputs need ``image_embeds`` and ``text_embeds``. The model's scale and bias
    replace the loss's learnable ones: ``InfoNCELoss(learnable=True)`` is twice CLIP's own loss,
    which averages the directions, and ``SigmoidLoss()`` is SigLIP's. With other losses, the model's
    scale and bias are not trained. ``labels`` in a batch, (B,) integers, are ids: rows with equal
    ones match, too. To combine it with another subclass of ``Trainer``, inherit from this one
    first.

    Args:
        args, kwargs: of ``transformers.Trainer``.
        loss: a :class:`itrloss.PairLoss` of images and texts alone, or :class:`itrloss.Matryoshka`
            around one; in a job of several processes with ``gather=True``.

    Raises:
        TypeError, ValueError: for other losses and models, and for parameters of the loss that the
            model does not have.
    """

    def __init__(self, *args: Any, loss: PairLoss | Matryoshka, **kwargs: Any):
        inner_loss(loss)
        self.loss = loss
        super().__init__(*args, **kwargs)
        self._share_parameters(self.model)
        self.can_return_loss = True  # evaluation has a loss without labels, too
        # a mean of the batch, which gradient accumulation has to divide
        self.model_accepts_loss_kwargs = False

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """Return a new model of ``model_init``, whose parameters the loss takes over."""
        model = super().call_model_init(*args, **kwargs)
        self._share_parameters(model)
        return model

    def _share_parameters(self, model: Any) -> None:
        """Put the model's scale and bias into the loss, in place of its own."""
        inner = inner_loss(self.loss)
        own = dict(inner.named_parameters())
        for name, of_model in _SHARED.items():
            p = getattr(model, of_model, None)
            if isinstance(p, nn.Parameter):
                if own.pop(name, None) is None:
                    p.requires_grad_(False)  # DistributedDataParallel may wait for its gradient
                else:
                    setattr(inner, name, p)
        if own:
            raise ValueError(
                f"loss: {type(model).__name__} does not have {', '.join(own)}, and trains its own "
                f"parameters alone; expected one with learnable=False, got {self.loss!r}"
            )

    def _own_state(self) -> dict[str, Any]:
        """Return the loss's state without its parameters, which are the model's."""
        parameters = dict(self.loss.named_parameters())
        state = self.loss.state_dict()
        return {name: x for name, x in state.items() if name not in parameters}

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model and, beside it, the loss's own state if it has any."""
        super()._save(output_dir, state_dict)
        state = self._own_state()
        if state:
            save_states({"": state}, output_dir or str(self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the model, and the loss's own state; warn if the checkpoint has none of it."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self._own_state():
            return
        states = load_states(resume_from_checkpoint, self)
        if states is not None:
            self.loss.load_state_dict(states[""], strict=False)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch, and with ``return_outputs`` the model's outputs."""
        check_scalar(self.loss)
        others = {name: x for name, x in inputs.items() if name not in ("labels", "return_loss")}
        outputs = model(**others)
        fields = outputs if isinstance(outputs, dict) else {}
        images = fields.get("image_embeds")
        texts = fields.get("text_embeds")
        if not isinstance(images, Tensor) or not isinstance(texts, Tensor):
            got = ", ".join(fields) or type(outputs).__name__
            raise TypeError(
                "model: expected outputs with image_embeds and text_embeds, as CLIPModel's, "
                f"got {got}"
            )
        ids = ids_of(inputs.get("labels"), images)
        loss = self.loss(images, texts, ids, ids)
        if return_outputs:
            return loss, outputs
        return loss
