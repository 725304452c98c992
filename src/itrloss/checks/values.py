"""Numbers, words and sizes, and how a message shows what was passed instead."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .arrays import from_numpy

LARGEST = torch.finfo(torch.float32).max


def one_of(name: str, value: object, *allowed: object) -> None:
    """Raise a ValueError unless ``value`` is one of those allowed."""
    if isinstance(value, (Tensor, np.ndarray)) or value not in allowed:
        raise no_word(name, value, *map(repr, allowed))


def no_word(name: str, value: object, *allowed: str) -> ValueError:
    """Return the error for what is none of the values that are written as in ``allowed``."""
    *others, last = allowed
    listed = f"{', '.join(others)} or {last}" if others else last
    words = [word.strip("'") for word in allowed]
    hint = did_you_mean(value, words) or in_place_of_option(value)
    return ValueError(f"{name}: expected {listed}, got {shown(value)}{hint}")


def check_number(name: str, value: object, positive: bool = False) -> None:
    """Raise an error unless ``value`` is a number, above 0 if ``positive``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = in_place_of_option(value)
        raise TypeError(f"{name}: expected a number, got {shown(value)}{hint}")
    if positive and not float(value) > 0:
        raise ValueError(f"{name}: expected a number above 0, got {value}")
    if not abs(float(value)) <= LARGEST:
        raise ValueError(f"{name}: expected a number in the range of float32, got {value}")


def as_number(name: str, value: Any, positive: bool = False) -> float:
    """Return a number of any type as a Python number; raise an error as :func:`check_number`.

    Others would be shown, saved and rounded in their own ways.
    """
    check_number(name, value, positive)
    return int(value) if isinstance(value, Integral) else float(value)


def as_int(name: str, value: Any) -> int:
    """Return an integer of any type as an int; raise a TypeError for what is none."""
    try:
        if isinstance(value, (bool, np.bool_)):  # an index, too
            raise TypeError
        return operator.index(value)  # sums of NumPy's short ones would overflow
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {shown(value)}") from None


def as_size(name: str, value: object) -> int:
    """Return an integer of at least 1, of any type, as an int; raise an error for what is none."""
    size = as_int(name, value)
    if size < 1:
        raise ValueError(f"{name}: expected at least 1, got {size}")
    return size


def as_value(
    name: str, value: object, size: int, dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """Return a number as a float, or a tensor of one or ``size`` values as (1,) or (size,)."""
    if isinstance(value, (list, np.ndarray)):
        value = from_numpy(np.asarray(value))
    if type(value) is float and abs(value) <= LARGEST:
        return value
    if not isinstance(value, Tensor):
        return float(as_number(name, value))
    if value.numel() != 1 and value.shape != (size,):
        raise ValueError(f"{name}: expected a number or shape ({size},), got {tuple(value.shape)}")
    return value.flatten().to(device, dtype)


def as_tensor(
    name: str, value: object, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a number, or a tensor of one or ``size`` values, as a tensor (1,) or (size,)."""
    checked = as_value(name, value, size, dtype, device)
    if isinstance(checked, Tensor):
        return checked
    return torch.full((1,), checked, dtype=dtype, device=device)


# ------------------------------------------------------------------------------- words of messages


def shown(value: object) -> str:
    """Return a value for a message; a parameter or an array by its shape."""
    is_parameter = isinstance(value, nn.Parameter)
    if isinstance(value, (Tensor, np.ndarray)) and (value.ndim or is_parameter):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def in_place_of_option(value: object) -> str:
    """Return advice where a parameter or data were passed for an option; empty for others."""
    if isinstance(value, nn.Parameter):
        shared = "InfoNCELoss(log_scale=model.logit_scale)"
        return f"; losses that learn a temperature share a model's parameter: {shared}"
    if isinstance(value, Tensor) and value.requires_grad:
        return "; a loss shares an nn.Parameter, and not what is computed from one"
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return "; options go first, and data into the call: loss = Loss(...); loss(images, texts)"
    return ""


def did_you_mean(given: object, allowed: Iterable[object]) -> str:
    """Return the end of a message that says which word was probably misspelt; empty for no idea."""
    if not isinstance(given, str):
        return ""
    words = {word.lower(): word for word in allowed if isinstance(word, str)}
    close = difflib.get_close_matches(given.lower(), words, 1, 0.8)
    return f"; did you mean {words[close[0]]!r}?" if close else ""


def unknown_keyword(name: str, given: str, allowed: Iterable[str]) -> TypeError:
    """Return the error for a keyword that a class or a function does not know."""
    names = list(allowed)
    hint = did_you_mean(given, names) or f"; it has {', '.join(names)}"
    return TypeError(f"{name}: got an unexpected keyword argument {given!r}{hint}")


def no_parameter(name: str, given: str, learnt: Iterable[str]) -> AttributeError:
    """Return the error for a parameter that a loss does not learn."""
    names = ", ".join(learnt)
    return AttributeError(f"{name}: it has no parameter {given!r}; it learns {names or 'none'}")
