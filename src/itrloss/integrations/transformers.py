"""A trainer of dual encoders for transformers (``pip install 'itrloss[transformers]'``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

from torch import Tensor, nn

from ..checks import as_size
from ..losses.matryoshka import argument_names
from ..training import grad_cache_step
from . import (
    SavesLosses,
    State,
    ids_of,
    inner_loss,
    takes_negatives,
    warn_without_gather,
)

try:
    from transformers import Trainer, default_data_collator
except ImportError as error:
    raise ImportError(
        f"{__name__}: install itrloss with the extra 'transformers' ({error})"
    ) from error

# a loss's parameters, and the model's of the same meaning
_SHARED = {"log_scale": "logit_scale", "bias": "logit_bias"}
# what the loss gets of the model, and what stands for it
_EMBEDDINGS = ("images", "texts", "negatives", "scores")


class RetrievalTrainer(SavesLosses, Trainer):  # type: ignore[override]
    """A ``transformers.Trainer`` of a loss of this library on the embeddings of CLIP, SigLIP and
    similar models.

    Its checkpoints also hold what the loss keeps besides parameters, such as which negatives count
    in a ``TripletLoss``; a run that is resumed goes on with that.

    The model's outputs need ``image_embeds`` and ``text_embeds``; for a model of one tower there
    are ``sides``. The model's scale and bias replace the loss's learnable ones:
    ``InfoNCELoss(learnable=True)`` is twice CLIP's own loss, which averages the directions, and
    ``SigmoidLoss()`` is SigLIP's. With other losses, the model's scale and bias are not trained.
    ``labels`` in a batch, (B,) integers, are ids: rows with equal ones match, too. What else the
    loss takes, such as ``image_ids``, ``image_groups`` or ``guide``, is passed on to it by name. To
    combine it with another subclass of ``Trainer``, inherit from this one first.

    Args:
        args, kwargs: of ``transformers.Trainer``.
        loss: a :class:`itrloss.PairLoss` of images and texts alone, :class:`itrloss.Matryoshka`
            around one, or a module with ``forward(images, texts, image_ids=None, text_ids=None)``;
            in a job of several processes with ``gather=True``.
        sides: for a model that encodes one kind of input at a time: how the batch's names begin for
            images or queries, for texts or documents and, if there are any, for negatives, such as
            ``("query_", "doc_", "neg_")``. The model is called once for each, by the rest of the
            names. Negatives are everybody's, or each image's own with ``in_batch=False``: (N · K)
            rows, those of the first image first. By default, one call has both embeddings.
        output: with ``sides``, the name of the embeddings in the model's output, or a function of
            the output that returns them, (B, D).
        mini_batch_size: encode that many rows at once, twice, so that the memory of the encoder
            does not grow with the batch (GradCache, see :func:`itrloss.grad_cache_step`). Losses
            and gradients are the whole batch's, and with ``gather=True`` all processes'. By
            default, all rows.
        split: with ``mini_batch_size``, how one side's inputs are cut, see
            :func:`itrloss.grad_cache_step`.

    Raises:
        TypeError, ValueError: for other losses and models, for parameters of the loss that the
            model does not have, and in a step for names of a batch that neither of them takes.
    """

    def __init__(
        self,
        *args: Any,
        loss: nn.Module,
        sides: Sequence[str] | None = None,
        output: str | Callable[[object], Tensor] = "pooler_output",
        mini_batch_size: int | None = None,
        split: Callable[[object, int], Sequence[object]] | None = None,
        **kwargs: Any,
    ):
        inner_loss(loss)
        self.loss = loss
        self.sides = None
        if sides is not None:
            self.sides = _checked_sides(sides, loss)
        self.output = output
        if mini_batch_size is not None:
            mini_batch_size = as_size("mini_batch_size", mini_batch_size)
        elif split is not None:
            raise ValueError("mini_batch_size: expected a number with split, got None")
        self.mini_batch_size = mini_batch_size
        self.split = split
        super().__init__(*args, **kwargs)
        if self.data_collator is default_data_collator:
            names = ["label", "labels", *self._passed_on()]
            self.data_collator = partial(_collated, names=names)
        self._share_parameters(cast(nn.Module, self.model))
        warn_without_gather(loss)
        self.can_return_loss = True  # evaluation has a loss without labels, too
        # a mean of the batch, which gradient accumulation has to divide
        self.model_accepts_loss_kwargs = False
        # LOMO makes its steps in the backward pass
        has_own_backward = self.is_deepspeed_enabled or "lomo" in self.args.optim
        if mini_batch_size is not None and has_own_backward:
            raise ValueError(
                "mini_batch_size: expected None with DeepSpeed or the optimizer LOMO, whose "
                f"backward passes are their own, got {mini_batch_size}"
            )

    def _set_signature_columns_if_needed(self) -> None:
        """Also keep the columns that the loss takes, which are no arguments of the model."""
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            columns = cast(list[str], self._signature_columns)
            names = dict.fromkeys([*columns, "labels", *self._passed_on()])  # each once
            self._signature_columns = list(names)

    def _passed_on(self) -> list[str]:
        """Return the names in a batch that are passed on to the loss, and are not the model's."""
        # labels of a batch are ids of both sides, and no one set's
        others = {*_EMBEDDINGS, "labels", *argument_names(cast(nn.Module, self.model))}
        return sorted(set(argument_names(inner_loss(self.loss))) - others)

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Return a new model of ``model_init``, whose parameters the loss takes over."""
        model = super().call_model_init(*args, **kwargs)
        self._share_parameters(model)
        return model

    def _share_parameters(self, model: nn.Module) -> None:
        """Put the model's scale and bias into the loss, in place of its own."""
        inner = inner_loss(self.loss)
        of_model = {
            name: getattr(model, of_model)
            for name, of_model in _SHARED.items()
            if isinstance(getattr(model, of_model, None), nn.Parameter)
        }
        unused = dict(of_model)
        # by name, such as log_scale, or first.log_scale of a loss in another
        own = dict(inner.named_parameters(remove_duplicate=False))
        for name, p in own.items():
            last = name.rpartition(".")[2]
            if last not in of_model:
                needed = _SHARED.get(last, name)
                model_name = type(model).__name__
                raise ValueError(
                    f"loss: expected parameters that {model_name} has, as the trainer trains the "
                    f"model's alone, got {self.loss!r}, and {model_name} has no {needed}. Take a "
                    "loss without parameters, such as one with learnable=False; or put a scale or "
                    f"bias into the model before, such as model.{needed} = torch.nn.Parameter("
                    f"torch.tensor({round(p.sum().item(), 4)})), in several processes with "
                    "ddp_find_unused_parameters=False in the arguments"
                )
        for name in own:
            path, _, last = name.rpartition(".")
            setattr(inner.get_submodule(path), last, of_model[last])
            unused.pop(last, None)
        for p in unused.values():
            p.requires_grad_(False)  # DistributedDataParallel may wait for its gradient

    def _own_states(self) -> dict[str, State]:
        """Return the loss's state without its parameters, which are the model's."""
        parameters = dict(self.loss.named_parameters(remove_duplicate=False))
        state = {x: y for x, y in self.loss.state_dict().items() if x not in parameters}
        return {"": state} if state else {}

    def _load_own_states(self, states: dict[str, State]) -> None:
        """Load the loss's state without its parameters."""
        self.loss.load_state_dict(states[""], strict=False)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Run forward and backward of a batch, and return its loss, detached."""
        if self.mini_batch_size is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        switch = getattr(self.optimizer, "train", None)  # schedule-free optimizers have one
        if switch is not None:
            switch()
        inputs = self._prepare_inputs(inputs)
        calls = self._calls(inputs)

        def loss(*embeddings: tuple[Tensor, ...]) -> Tensor:
            """Return the batch's loss, divided by the number of batches that accumulate."""
            value = self._loss(embeddings, inputs)
            return value / self.current_gradient_accumulation_steps

        with self.compute_loss_context_manager():
            return grad_cache_step(
                loss,
                [model] * len(calls),
                calls,
                self.mini_batch_size,
                scaler=self.accelerator.scaler,
                output=self._embeddings,
                split=self.split,
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Return the loss of a batch; with ``return_outputs`` also the model's outputs, which are a
        dictionary of embeddings if there are sides.
        """
        outputs = [model(**call) for call in self._calls(inputs)]
        embeddings = [self._embeddings(x) for x in outputs]
        loss = self._loss(embeddings, inputs)
        if not return_outputs:
            return loss
        if self.sides is None:
            return loss, outputs[0]
        of_sides = [own for (own,) in embeddings]
        return loss, dict(zip(self.sides, of_sides, strict=True))

    def _calls(self, inputs: Mapping[str, object]) -> list[dict[str, object]]:
        """Return the arguments of the model's calls for a batch: one call, or one for each side."""
        of_loss = ["labels", *self._passed_on()]
        others = {name: x for name, x in inputs.items() if name not in (*of_loss, "return_loss")}
        model = cast(nn.Module, self.model)
        if self.sides is None:
            calls = [others]
            unknown = _unknown(model, others)
        else:
            calls = [
                {name[len(side) :]: x for name, x in others.items() if name.startswith(side)}
                for side in self.sides
            ]
            unknown = [name for name in others if not name.startswith(self.sides)]
        if unknown:
            raise ValueError(
                f"inputs: expected a batch with names that {type(model).__name__}, with sides "
                f"{self.sides}, or the loss takes ({', '.join(of_loss)}), got {', '.join(unknown)}"
            )
        return calls

    def _embeddings(self, outputs: object) -> tuple[Tensor, ...]:
        """Return the embeddings in the model's outputs: of images and texts, or of one side."""
        names = ["image_embeds", "text_embeds"]
        if self.sides is not None:
            if callable(self.output):
                return (self.output(outputs),)
            names = [self.output]
        fields = outputs if isinstance(outputs, dict) else {}
        found = tuple(fields[name] for name in names if isinstance(fields.get(name), Tensor))
        if len(found) < len(names):
            got = ", ".join(fields) or type(outputs).__name__
            raise TypeError(f"model: expected outputs with {' and '.join(names)}, got {got}")
        return found

    def _loss(
        self, embeddings: Sequence[tuple[Tensor, ...]], inputs: Mapping[str, object]
    ) -> Tensor:
        """Return the loss of the embeddings that the calls of the model returned for a batch."""
        images, texts, *negatives = [x for of_call in embeddings for x in of_call]
        options = {name: inputs[name] for name in self._passed_on() if name in inputs}
        ids = ids_of(inputs.get("labels"), images)
        if ids is not None:
            if {"image_ids", "text_ids"} & options.keys():
                expected = "either labels or image_ids and text_ids"
                raise ValueError(f"labels: expected {expected} in a batch, got both")
            options["image_ids"] = options["text_ids"] = ids
        for rows in negatives:  # none, or those of the third side
            if not getattr(inner_loss(self.loss), "in_batch", True):  # each image's own
                rows = rows.unflatten(0, (len(images), -1))
            options["negatives"] = rows
        return self.loss(images, texts, **options)


def _collated(rows: list[Any], names: list[str]) -> dict[str, object]:
    """Return the batch that transformers' usual collator makes of rows.

    It leaves out strings, so raise an error if what the loss should get, by ``names``, is one.
    """
    first = rows[0] if isinstance(rows[0], Mapping) else vars(rows[0])
    for name in names:
        if isinstance(first.get(name), str):
            raise TypeError(
                f"{name}: expected integers, as the usual collator of transformers leaves out "
                f"strings, got {first[name]!r}; number them, or pass a data_collator of your own, "
                "which puts them into the batch as a list"
            )
    return default_data_collator(rows)


def _unknown(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of arguments that a model does not take."""
    parameters = inspect.signature(model.forward).parameters
    # of any name; those of transformers declare theirs
    if any(x.kind is x.VAR_KEYWORD and not get_args(x.annotation) for x in parameters.values()):
        return []
    return [name for name in names if name not in parameters]


def _checked_sides(sides: Sequence[str], loss: nn.Module) -> tuple[str, ...]:
    """Return the sides as a tuple; raise an error unless they are as many as the loss takes."""
    most = 3 if takes_negatives(loss) else 2
    if len(sides) not in (2, most):
        expected = "two strings" if most == 2 else "two or three strings"
        raise ValueError(f"sides: expected {expected} for {loss!r}, got {sides!r}")
    return tuple(sides)
