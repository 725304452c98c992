"""How an operator is defined: its schema, its shapes for the compiler, and what eager mode calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .tiles import Source

_library = torch.library.Library("itrloss", "DEF")
_SOURCE = (
    "Tensor rows, Tensor? cols, Tensor? row_inv, Tensor? col_inv, Tensor? row_ids, Tensor? col_ids,"
    " Tensor? kept, Tensor? valid, bool fused"
)
WIDTH = len(Source._fields)


_AS_IT_IS = contextlib.nullcontext()


def full_precision(x: Tensor):
    """Autocast would round the score products to half precision behind our back."""
    kind = x.device.type
    rounds = (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if rounds else _AS_IT_IS


# Tells the compiler that a CUDA graph would keep a value that was read when it was recorded.
_READS_VALUES = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
_COUNT = Source._fields.index("valid")


def operator(
    schema: str, fake: Callable[..., Any], *, reads_values: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``itrloss::<function name>`` and return the function to call.

    Where the schema begins with SOURCE, the function and its fake get one :class:`Source` for the arguments of that.
    Keywords are for eager mode, and are not part of the schema. ``reads_values``: the host reads some of its inputs; of
    a memory it does in any case, for which there is an operator ``<function name>_of_memory``.
    """
    on_source = schema.startswith("(SOURCE")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        """Give the operator its implementation and its shapes."""
        name = function.__name__

        @functools.wraps(function)
        def implementation(*args: Any, **eager: Any) -> Any:
            """What runs, in eager mode and behind the dispatcher."""
            with full_precision(args[0]):
                if on_source:
                    return function(Source(*args[:WIDTH]).trimmed(), *args[WIDTH:], **eager)
                return function(*args, **eager)

        @functools.wraps(function)
        def call(*args: Any, **eager: Any) -> Any:
            """The function that this module's users get."""
            # In eager mode the dispatcher would only cost time.
            if not torch.compiler.is_compiling():
                return implementation(*args, **eager)
            return (of_memory if on_source and args[_COUNT] is not None else registered)(*args)

        def shapes(*args: Any) -> Any:
            return fake(Source(*args[:WIDTH]), *args[WIDTH:]) if on_source else fake(*args)

        def define(name: str, tags: list[torch.Tag]) -> Any:
            """Register the implementation and its shapes under a name; what the dispatcher calls."""
            _library.define(name + schema.replace("SOURCE", _SOURCE), tags=tags)
            _library.impl(name, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"itrloss::{name}", shapes, lib=_library)
            return getattr(torch.ops.itrloss, name).default

        registered = define(name, _READS_VALUES if reads_values else [])
        of_memory = define(f"{name}_of_memory", _READS_VALUES) if on_source else registered
        return call

    return register


def uninitialised(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Uninitialised (N,) and (M,) results, empty where a side was not asked for."""
    sizes = [size if a else 0 for size, a in zip(source.shape, asked, strict=True)]
    first, second = [source.rows.new_empty(size, dtype=source.dtype) for size in sizes]
    return first, second


def like_source(source: Source, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Uninitialised gradients of the source's tensors, empty where none is needed."""
    rows, cols = source.rows, source.cols
    if cols is None:
        return torch.empty_like(rows, memory_format=torch.contiguous_format), rows.new_empty(0)
    made = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else rows.new_empty(0)
        for x, need in zip((rows, cols), needs, strict=True)
    )
    first, second = made
    return first, second
