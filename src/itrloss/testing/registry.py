"""The checks by name, in the order in which they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from .subject import Subject


class Check(NamedTuple):
    """A function that raises an AssertionError if a loss has not the property that its docstring
    states.
    """

    function: Callable[[Subject], None]
    needs: tuple[str, ...]

    @property
    def about(self) -> str:
        """What is demanded, and why."""
        return inspect.cleandoc(self.function.__doc__ or "")


CHECKS: dict[str, Check] = {}


def check(*needs: str) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Return a decorator that registers a check under its function's name; ``needs``: see
    :meth:`Subject.lacks`.
    """

    def register(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CHECKS[function.__name__] = Check(function, needs)
        return function

    return register
