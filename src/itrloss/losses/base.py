"""What all losses share: options, which are checked when they are set, and the call forms."""

# Options are checked by the types of their fields: this package does without ``from __future__
# import annotations``.

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import torch
from torch import Tensor, nn

from ..checks import IMAGES_AND_TEXTS, Names, check_number, one_of
from ..distributed import consensus, padded, world_size
from ..distributed.collectives import replicated, total
from ..functional import Reduction
from ..memory import CoupledMemory, MemorySimilarity
from ..similarity import Engine, Similarity
from ..telemetry import describe, describe_memory


def above_zero(default: float) -> Any:
    """Return the field of an option that is a number above 0."""
    return field(default=default, metadata={"positive": True})


def _check(option: Field[Any], value: object) -> None:
    """Raise an error unless a value is of an option's type, if that is a number, a Literal or a
    union of these.
    """
    kinds = (
        get_args(option.type) if get_origin(option.type) in (Union, UnionType) else (option.type,)
    )
    allowed = [x for kind in kinds if get_origin(kind) is Literal for x in get_args(kind)]
    if value is None and type(None) in kinds:
        return
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if allowed and bool in kinds:
        kinds, allowed = (Literal,), [False, True, *allowed]
    elif not all(kind is float or get_origin(kind) is Literal for kind in kinds):
        return  # of a loss elsewhere; its annotations may be text, too
    if float not in kinds:
        one_of(option.name, value, *allowed)
    elif not isinstance(value, str) or not allowed:
        check_number(option.name, value, option.metadata.get("positive", False))
    elif value not in allowed:
        raise ValueError(
            f"{option.name}: expected {', '.join(map(repr, allowed))} or a number, got {value!r}"
        )


@dataclass(eq=False, repr=False)
class Loss(nn.Module):
    """A module with options: the fields of a dataclass, which are checked whenever they are set."""

    _: KW_ONLY
    reduction: Reduction = "mean"
    gather: bool = False
    process_group: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # a module's, also for a plain @dataclass, which has its own
        for name in ("__eq__", "__hash__", "__repr__"):
            setattr(cls, name, getattr(cls, name))

    def __hash__(self) -> int:  # in Python, as the compiler refuses one in C
        return id(self)

    def __new__(cls, *_: Any, **__: Any) -> Any:
        loss = super().__new__(cls)
        nn.Module.__init__(loss)  # before the fields are set, as they may be modules and parameters
        # not a part; the compiler takes no module that is made in a call
        loss.__dict__["_call"] = _Call(loss)
        return loss

    def __post_init__(self) -> None:
        common = {"engine", "check_finite", "telemetry", "gather", "process_group", "reduction"}
        #: Names of the options that ``repr`` shows.
        self.shown = (*(x.name for x in fields(self) if x.name not in common), "reduction")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__:
            _check(self.__dataclass_fields__[name], value)
            if isinstance(value, nn.Module) and hasattr(type(self), name):
                raise TypeError(
                    f"{name}: expected a default_factory; a field's default would hide the module"
                )
        super().__setattr__(name, value)

    def _options(self, kind: type) -> dict[str, Any]:
        """Return the options that a class has, which its function takes; a subclass may have
        others.
        """
        return {
            name: getattr(self, name) for name in self.shown if name in kind.__dataclass_fields__
        }

    @property
    def _sharded(self) -> bool:
        """Whether the batch is that of several processes."""
        return bool(self.gather) and world_size(self.process_group) > 1

    @property
    def _shared(self) -> dict[str, Any]:
        """The options of :meth:`itrloss.Similarity.sharded`."""
        return {"process_group": self.process_group, "same": self._agreed}

    @property
    def _agreed(self) -> str:
        """What has to be the same on all processes: the options, and which parameters are trained."""
        options = {name: getattr(self, name) for name in self.shown if name not in self._modules}
        trained = [name for name, p in self.named_parameters() if p.requires_grad]
        shown = {k: x for k, x in options.items() if not isinstance(x, Tensor)}
        return f"{type(self).__name__} {shown}, parameters trained {trained}"

    def _checked(self, check: Callable[[], str | None]) -> None:
        """Run a check of the input; in a job of several processes, raise an error in all of them if
        it fails in one.

        So they do if options differ, or the text that the check returns.
        """
        if not self._sharded or torch.compiler.is_compiling():
            check()
        else:
            with consensus(self.process_group) as agreed:
                agreed.text = f"{check() or ''} {self._agreed}"

    def _fail(self, error: Exception) -> NoReturn:
        """Raise an error; in a job, on all processes, of which the others have to be on their way
        to a consensus.
        """
        if self._sharded and not torch.compiler.is_compiling():
            with consensus(self.process_group):
                raise error
        raise error

    def _of_all(self, function: Any, *args: Any) -> Any:
        """Return ``function(*args)``, where the gradients of this loss's parameters are the means
        of all processes.
        """
        if not self._sharded or not any(p.requires_grad for p in self.parameters()):
            return function(*args)
        shared = {
            f"loss.{name}": replicated(p, self.process_group) for name, p in self.named_parameters()
        }
        return torch.func.functional_call(self.__dict__["_call"], shared, (function, *args))

    def _of_samples(self, inputs: Sequence[Tensor | None], function: Callable[..., Any]) -> Any:
        """Return the loss of samples that do not depend on one another; ``inputs`` are (B, ...) or
        None.

        ``function(*inputs, reduction)`` returns that of this process.
        """
        if not self._sharded:
            return function(*inputs, self.reduction)

        def part() -> tuple[Any, int]:
            # without samples, one that is dropped
            whole = [x if x is None or len(x) else padded(x, 1) for x in inputs]
            values, size = function(*whole, "none"), len(inputs[0])  # type: ignore[arg-type]
            return values[:size] if isinstance(values, Tensor) else tuple(
                x[:size] for x in values
            ), size

        if torch.compiler.is_compiling():
            values, size = part()
            count = size * world_size(self.process_group)
        else:
            with consensus(self.process_group) as agreed:
                values, size = part()
                one = values if isinstance(values, Tensor) else values[0]
                agreed.text = f"{str(one.dtype)[6:]}, gradient {one.requires_grad}, {self._agreed}"
                agreed.numbers = [size]
            count = max(1, sum(sizes[0] for sizes in agreed.every))
        if self.reduction == "none":
            return values
        whole = values if isinstance(values, Tensor) else torch.cat(values)
        return total(whole.sum(), self.process_group) / (count if self.reduction == "mean" else 1)

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self.shown if name not in self._modules}
        one = [name for name, x in values.items() if isinstance(x, Tensor) and x.numel() == 1]
        values.update((name, float(f"{values[name].item():.4g}")) for name in one)
        return ", ".join(f"{name}={value!r}" for name, value in values.items())


class _Call(nn.Module):
    """A module that has a loss as its part, and runs one of its functions."""

    def __init__(self, loss: Loss):
        super().__init__()
        self.loss = loss

    def forward(self, function: Any, *args: Any) -> Any:
        return function(*args)


@dataclass(eq=False, repr=False)
class SimilarityLoss(Loss):
    """The options that all losses on similarities share, see :class:`PairLoss`."""

    _: KW_ONLY
    engine: Engine = "auto"
    check_finite: bool = False
    telemetry: Any = False
    #: How far a positive pair is to be ahead of its hardest negative, for the figure ``active``.
    active_margin = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.observed, self.telemetry = self.telemetry, {}

    @property
    def _agreed(self) -> str:
        # its figures are of all processes
        return f"{super()._agreed}, telemetry {bool(self.observed)}"

    def compute(self, sim: Any, *more: Any) -> Any:
        """Return the loss of a :class:`Similarity` with images as rows and texts as columns."""
        raise NotImplementedError(f"{type(self).__name__} must implement compute(sim)")

    def _value(self, sim: Any, *more: Any) -> Any:
        """Return the loss of similarities, and of what else a subclass's ``compute`` takes; keep
        their telemetry.
        """
        value = self._of_all(self.compute, sim, *more) if self.gather else self.compute(sim, *more)
        if self.observed and not torch.compiler.is_compiling():
            self.telemetry = describe(sim, self.active_margin)
        return value


@dataclass(eq=False, repr=False)
class PairLoss(SimilarityLoss):
    """A loss on the similarities of images and texts; the base of the losses here and of your own.

    A subclass implements :meth:`compute`, and applies ``self.reduction`` itself
    (``sim.both.reduce``). Its options are the fields of a dataclass, or an ``__init__`` passes
    ``**common`` on to this one. Those that are numbers or Literals are checked whenever they are
    set. A ``__post_init__`` begins with that of its base.

    Args:
        reduction: ``"mean"`` (over image anchors plus over text anchors), ``"sum"`` or ``"none"``
            (a pair of per-anchor values: images (N,), texts (M,)).
        engine, check_finite: see :class:`Similarity`. One in place of the input keeps its own
            engine.
        telemetry: keep what :func:`describe` says of each call's similarity in the attribute
            ``telemetry``, a dictionary. It costs a few passes over the scores, and is left out
            under ``torch.compile``.
        gather: in a ``torch.distributed`` job, the loss of the batches of all processes, on each of
            them: every other process's pairs are negatives, too (or positives, where ids are
            equal). Each process does its part of the work, and gets the values of its own anchors
            with ``reduction="none"``, and holds the texts of all. See :doc:`distributed`.
        process_group: the processes that take part; by default, all.
    """

    def forward(
        self,
        images: Tensor | Similarity | None = None,
        texts: Tensor | None = None,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
        *,
        scores: Tensor | None = None,
    ) -> Any:
        """Return the loss of embeddings, of a score matrix, or of a :class:`itrloss.Similarity`.

        Args:
            images: (N, D) embeddings of any length; or a ``Similarity``, images as rows, in place
                of everything else.
            texts: (M, D) embeddings.
            image_ids, text_ids: (N,) and (M,) integers; equal ids are positives. If both are left
                out, image i matches text i. ``text_ids`` alone refer to the images by their number.
            scores: (N, M) similarities from another model, instead of ``images`` and ``texts``.

        Returns:
            A 0-dim float32 tensor (float64 for float64 input), or per-anchor values with
            ``reduction="none"``.
        """
        return self._value(self._similarity(images, texts, image_ids, text_ids, scores))

    def _similarity(
        self,
        images: Any,
        texts: Any,
        image_ids: Any,
        text_ids: Any,
        scores: Any,
        names: Names = IMAGES_AND_TEXTS,
        also_same: str = "",
    ) -> Similarity:
        """Return the input as a similarity; ``also_same``: what else has to be the same on all
        processes.
        """
        if (scores is not None or isinstance(images, Similarity)) and self._sharded:
            self._fail(
                ValueError(
                    "gather: expected embeddings; scores and a Similarity cannot be gathered"
                )
            )
        options: dict[str, Any] = {
            "engine": self.engine,
            "check_finite": self.check_finite,
            "names": names,
        }
        if isinstance(images, Similarity):
            others = {
                "texts": texts,
                "image_ids": image_ids,
                "text_ids": text_ids,
                "scores": scores,
            }
            extra = [name for name, x in others.items() if x is not None]
            if extra:
                raise ValueError(
                    f"{extra[0]}: expected None beside a Similarity, which stands for all of the input"
                )
            if self.check_finite:
                images.check_finite()
            return images
        if scores is not None:
            if images is not None or texts is not None:
                raise ValueError("scores: expected either scores or images and texts, got both")
            return Similarity.from_scores(scores, image_ids, text_ids, **options)
        if self.gather:
            options |= self._shared | {"same": f"{self._agreed} {also_same}"}
            return Similarity.sharded(images, texts, image_ids, text_ids, **options)
        return Similarity(images, texts, image_ids, text_ids, **options)


@dataclass(eq=False, repr=False)
class MemoryLoss(SimilarityLoss):
    """A loss on images, texts, their momentum keys and a :class:`itrloss.CoupledMemory`; a base for
    your own.

    A subclass implements ``compute(sims)`` of a :class:`itrloss.memory.MemorySimilarity`. There is
    no gradient to keys and memory. After the backward pass, put the batch into the memory:
    ``memory.enqueue(image_keys, text_keys, ids)``.

    Args:
        reduction, engine, check_finite: see :class:`PairLoss`. ``engine`` goes by the size of the
            memory.
        telemetry: the same of :func:`itrloss.telemetry.describe_memory`.
        gather, process_group: see :class:`PairLoss`. The memory takes in the keys of all processes
            in any case.
    """

    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        image_keys: Tensor,
        text_keys: Tensor,
        memory: CoupledMemory,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Any:
        """Return the loss of a batch beside the memory of former ones, as :meth:`PairLoss.forward`
        does.

        Args:
            images, texts: (N, D) and (M, D) embeddings of any length.
            image_keys, text_keys: (N, D) and (M, D) embeddings of the same by the momentum
                encoders.
            memory: keys of former batches. While it is empty, its terms are 0.
            image_ids, text_ids: (N,) and (M,) integers; equal ids are positives in the batch, and
                entries of the memory with an anchor's id are no negatives of it. If both are left
                out, image i matches text i; the memory must have been filled without ids, too.
        """
        options: Any = {"engine": self.engine, "check_finite": self.check_finite}
        if self.gather:
            options |= {"gather": self._sharded, **self._shared}
        sims = MemorySimilarity.of(
            images, texts, image_keys, text_keys, memory, image_ids, text_ids, **options
        )
        value = self._of_all(self.compute, sims) if self.gather else self.compute(sims)
        if self.observed and not torch.compiler.is_compiling():
            self.telemetry = describe_memory(sims, self.process_group)
        return value
