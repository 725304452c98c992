"""Losses of the first dimensions of embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..checks import WholeState, as_size, check_number, own_name
from ..functional import Values
from ..memory import CoupledMemory
from .base import Loss, PairLoss

# The arguments of losses, besides images and texts, that are embeddings or hold them.
_CUT = (
    *("negatives", "image_keys", "text_keys", "memory"),
    *("images_log_variance", "texts_log_variance"),
)


class Matryoshka(WholeState):
    r"""A loss summed over the first d dimensions of the embeddings, so that these are good
    embeddings of their own.

    .. math:: \sum_d w_d\, \mathrm{loss}\bigl(v_{1 \dots N}[{:}d],\, w_{1 \dots M}[{:}d]\bigr)

    Matryoshka representation learning (Kusupati et al. 2022, https://arxiv.org/abs/2205.13147). See
    :doc:`losses/matryoshka`. ``torch.compile`` breaks the graph where the loss has a memory.

    Args:
        loss: a module called as ``loss(images, texts, ...)``, such as a :class:`PairLoss`.
        dims: numbers of dimensions, in any order.
        weights: w, one for each of ``dims``; by default 1.

    Raises:
        TypeError: for a loss that is no module, or that returns no tensors.
        ValueError: for other numbers of dimensions or weights.

    Relations:
        The weighted sum of one loss on the first dimensions of the embeddings.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> loss = itrloss.InfoNCELoss()
        >>> both = loss(images[:, :8], texts[:, :8]) + loss(images, texts)
        >>> torch.allclose(itrloss.Matryoshka(loss, [8, 16])(images, texts), both)
        True
    """

    def __init__(
        self, loss: nn.Module, dims: Sequence[int], weights: Sequence[float] | None = None
    ):
        super().__init__()
        if not isinstance(loss, nn.Module):
            raise TypeError(f"loss: expected a module called as loss(images, texts), got {loss!r}")
        if not isinstance(dims, Iterable):
            raise TypeError(f"dims: expected numbers such as (64, 256), got {dims!r}")
        dims = [as_size("dims", d) for d in dims]
        if isinstance(weights, Tensor):
            weights = weights.tolist()
        weights = [1.0] * len(dims) if weights is None else list(weights)
        check_dims(dims, weights)
        ordered = sorted(zip(dims, weights, strict=True))
        self.loss = loss
        self.argument_names = argument_names(loss)  # here, as the compiler does not ask for them
        self.dims = [d for d, _ in ordered]
        self.weights = [float(weight) for _, weight in ordered]

    def forward(
        self,
        images: Tensor = None,  # type: ignore[assignment]
        texts: Tensor | None = None,
        *args: object,
        **options: Any,
    ) -> Values:
        """Return the loss of (N, D) images and (M, D) texts, or of one set with ``labels``.

        Negatives, keys and the entries of a memory are cut to the same dimensions; what else the
        loss takes is passed on whole. ``queries`` and ``documents`` are images and texts.

        With the loss's ``reduction="none"``, a tuple of its values for each number of dimensions:
        images' and texts', or those of one direction.
        """
        first, second = [*self.argument_names, "", ""][:2]
        if images is None:
            images = taken(options, first, "images")
        if texts is None:
            texts = taken(options, second, "texts")
        check = partial(self._checked, images, texts, [*args, *options.values()])
        if isinstance(self.loss, Loss):
            self.loss.agree(check)
        else:
            check()
        names = self.argument_names[2:] + [""] * len(args)
        parts: list[Values] = []
        for d in self.dims:
            others = None if texts is None else texts[..., :d]
            more = [first_dimensions(name, x, d) for name, x in zip(names, args, strict=False)]
            named = {name: first_dimensions(name, x, d) for name, x in options.items()}
            parts.append(self.loss(images[..., :d], others, *more, **named))
        values: list[Tensor] = []
        for weight, part in zip(self.weights, parts, strict=True):
            values.extend(weight * x for x in tensors_of(part))
        if getattr(self.loss, "reduction", None) == "none" or isinstance(parts[0], tuple):
            return tuple(values)
        return sum(values)  # type: ignore[return-value]

    def _checked(self, images: Tensor, texts: Tensor | None, others: Sequence[object]) -> str:
        """Check the input; return what has to be the same in all processes."""
        check_dims(self.dims, self.weights)  # which are set one after the other
        second = images if texts is None else texts  # of one set
        check_dimensions(images, second, max(self.dims))
        for x in others:
            if isinstance(x, CoupledMemory) and x.dim != images.shape[-1]:
                expected = f"one of dimension {images.shape[-1]} like images"
                raise ValueError(f"memory: expected {expected}, got {x.dim}")
        return f"Matryoshka {self.extra_repr()}"

    def extra_repr(self) -> str:
        """Return the dimensions and their weights, for ``repr``."""
        return f"dims={self.dims}, weights={self.weights}"


def argument_names(loss: nn.Module) -> list[str]:
    """Return the names of what a loss takes."""
    return list(inspect.signature(loss.forward).parameters)


def taken(options: dict[str, Any], *names: str) -> Any:
    """Return one of some arguments, by its own or another name, and take it out of the options;
    None if it is not there.
    """
    for given in options:
        if own_name(given) in names:
            return options.pop(given)
    return None


def first_dimensions(name: str, x: object, d: int) -> object:
    """Return the first d dimensions of embeddings, or of the entries of a memory; an argument of
    another name as it is.
    """
    if own_name(name) not in _CUT:
        return x
    if isinstance(x, Tensor):
        return x[..., :d]
    if isinstance(x, CoupledMemory):
        return x.first_dimensions(d)
    return x


def check_dims(dims: Sequence[int], weights: Sequence[float]) -> None:
    """Raise an error unless numbers of dimensions differ, and each has a weight."""
    if len(weights) != len(dims):
        raise ValueError(f"weights: expected {len(dims)}, one for each of dims, got {len(weights)}")
    for d, weight in zip(dims, weights, strict=True):
        as_size("dims", d)
        check_number("weights", weight)
    if not dims or len(set(dims)) < len(dims):
        raise ValueError(f"dims: expected numbers that differ, got {list(dims)}")


def check_dimensions(images: Tensor, texts: Tensor, least: int) -> None:
    """Raise an error unless embeddings have as many dimensions, at least so many."""
    for name, x in (("images", images), ("texts", texts)):
        if not isinstance(x, Tensor) or not x.ndim or x.shape[-1] < least:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            expected = f"embeddings of at least {least} dimensions"
            raise ValueError(f"{name}: expected {expected}, got {got}")
    if images.shape[-1] != texts.shape[-1]:
        expected = f"{images.shape[-1]} dimensions like images"
        raise ValueError(f"texts: expected {expected}, got {texts.shape[-1]}")


def tensors_of(part: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a loss's tensor, or its tensors of each side, as a tuple; raise an error for what is
    none.
    """
    found = part if isinstance(part, tuple) else (part,)
    for x in found:
        if not isinstance(x, Tensor):
            expected = "it to return a tensor or a tuple of tensors"
            where = " in a tuple" if isinstance(part, tuple) else ""
            raise TypeError(f"loss: expected {expected}, got {type(x).__name__}{where}")
    return found


def takes_pairs(loss: object) -> bool:
    """Return whether a loss is of images and texts, and needs nothing but their similarity."""
    if not isinstance(loss, PairLoss) or len(needed_by(loss.compute)) > 1:
        return False
    names = [x for x in argument_names(loss) if x in ("images", "texts")]
    return names == ["images", "texts"] and set(needed_by(loss.forward)) <= {"images", "texts"}


def needed_by(function: Callable[..., object]) -> list[str]:
    """Return the names of a function's arguments that have no default."""
    parameters = inspect.signature(function).parameters.values()
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [x.name for x in parameters if x.default is x.empty and x.kind not in several]


def inner_loss(loss: Any) -> Any:
    """Return a loss, or that inside of Matryoshka; raise an error unless it takes images and texts
    to a scalar.
    """
    inner = loss.loss if isinstance(loss, Matryoshka) else loss
    if not takes_pairs(inner):
        expected = "expected one of images and texts alone, such as itrloss.InfoNCELoss()"
        raise TypeError(f"loss: {expected}, got {loss!r}")
    if inner.groups != "same":
        expected = "expected 'same', as a trainer passes no groups to the loss"
        raise ValueError(f"groups: {expected}, got {inner.groups!r}")
    check_scalar(inner)
    return inner


def check_scalar(loss: Any) -> None:
    """Raise an error if a loss, or that inside of Matryoshka, returns values of each anchor.

    Trainers ask at each step, as options may be set later.
    """
    inner = loss.loss if isinstance(loss, Matryoshka) else loss
    if inner.reduction == "none":
        raise ValueError(
            "loss: expected reduction 'mean' or 'sum', as the trainer needs a scalar, got 'none'"
        )
