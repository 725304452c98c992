"""Values in nested tuples and dataclasses, taken apart so that autograd holds their tensors.

Autograd sees only tensors that are saved by ``save_for_backward``: hooks, checkpoints and the
detection of tensors that were modified in place depend on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def save(ctx: Any, value: tuple[Any, ...]) -> None:
    """Keep a value for :func:`saved`, in the backward pass of an autograd function."""
    tensors: list[Tensor] = []
    ctx.value = without_tensors(value, tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Any:
    """Return the value that was kept."""
    return with_tensors(ctx.value, iter(ctx.saved_tensors))


class Place:
    """Stands for a tensor."""


PLACE = Place()


def without_tensors(value: T, tensors: list[Tensor]) -> T:
    """Return a value with a place for each tensor; the tensors are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return PLACE  # type: ignore[return-value]
    return rebuilt(value, lambda x: without_tensors(x, tensors))


def with_tensors(value: T, tensors: Iterator[Tensor]) -> T:
    """Return a value with tensors in their places."""
    if value is PLACE:
        return next(tensors)  # type: ignore[return-value]
    return rebuilt(value, lambda x: with_tensors(x, tensors))


def rebuilt(value: Any, part: Callable[[Any], Any]) -> Any:
    """Return a tuple or dataclass of ``part(x)`` for each of its values x; others as they are."""
    if dataclasses.is_dataclass(value):
        return type(value)(*[part(x) for x in vars(value).values()])
    if not isinstance(value, tuple):
        return value
    parts = [part(x) for x in value]
    is_named = hasattr(value, "_fields")
    return type(value)(*parts) if is_named else tuple(parts)
