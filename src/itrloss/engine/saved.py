"""Values in nested tuples and dataclasses, taken apart so that autograd holds their tensors.

Autograd sees only tensors that are saved by ``save_for_backward``: hooks, checkpoints and the
detection of tensors that were modified in place depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def save(ctx: Any, value: tuple[Any, ...]) -> None:
    """Keep a value for :func:`saved`, in the backward pass of an autograd function."""
    tensors: list[Tensor] = []
    ctx.value = without_tensors(value, tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Any:
    """Return the value that was kept; raise an error if a tensor in it was modified in place."""
    try:
        tensors = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "embeddings, scores or a memory were modified in place before the backward pass of a "
            f"loss that needs them; enqueue a batch after its backward pass. PyTorch says: {error}"
        ) from error
    return with_tensors(ctx.value, iter(tensors))


class Place:
    """Stands for a tensor."""


PLACE = Place()


def without_tensors(value: T, tensors: list[Tensor]) -> T:
    """Return a value with a place for each tensor; the tensors are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return PLACE  # type: ignore[return-value]
    parts = parts_of(value)
    if parts is None:
        return value
    return rebuilt(value, [without_tensors(x, tensors) for x in parts])


def with_tensors(value: T, tensors: Iterator[Tensor]) -> T:
    """Return a value with tensors in their places."""
    if value is PLACE:
        return next(tensors)  # type: ignore[return-value]
    parts = parts_of(value)
    if parts is None:
        return value
    return rebuilt(value, [with_tensors(x, tensors) for x in parts])


def parts_of(value: Any) -> Iterable[Any] | None:
    """Return the values in a tuple or a dataclass; None of anything else."""
    if isinstance(value, tuple):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return vars(value).values()
    return None


def rebuilt(value: Any, parts: list[Any]) -> Any:
    """Return a tuple or dataclass like ``value`` with other values in it."""
    if type(value) is tuple:
        return tuple(parts)
    return type(value)(*parts)
