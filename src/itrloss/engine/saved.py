"""Values of nested tuples, taken apart so that autograd holds their tensors.

Autograd sees only tensors that are saved by ``save_for_backward``: hooks, checkpoints and the
detection of tensors that were modified in place depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Return nested tuples with a place for each tensor; the tensors are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return PLACE  # type: ignore[return-value]
    if not isinstance(value, tuple):
        return value
    return like(value, [without_tensors(x, tensors) for x in value])


def with_tensors(value: T, tensors: Iterator[Tensor]) -> T:
    """Return nested tuples with tensors in their places."""
    if value is PLACE:
        return next(tensors)  # type: ignore[return-value]
    if not isinstance(value, tuple):
        return value
    return like(value, [with_tensors(x, tensors) for x in value])


def like(value: Any, parts: list[Any]) -> Any:
    """Return parts as a tuple of the same kind."""
    if hasattr(value, "_fields"):  # a NamedTuple
        return type(value)(*parts)
    return tuple(parts)
