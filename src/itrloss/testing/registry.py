"""The checks by name, in the order in which they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from .subject import Subject

CheckFunction = Callable[[Subject], None]


class Check(NamedTuple):
    """A function that raises an AssertionError if a loss lacks the property in its docstring."""

    function: CheckFunction
    needs: tuple[str, ...]

    @property
    def about(self) -> str:
        """What a loss has to do, and why."""
        return inspect.getdoc(self.function) or ""


CHECKS: dict[str, Check] = {}


def check(*needs: str) -> Callable[[CheckFunction], CheckFunction]:
    """Return a decorator that registers a check under its function's name; ``needs``: see
    :meth:`Subject.require`.
    """

    def register(function: CheckFunction) -> CheckFunction:
        """Register a check; return it."""
        CHECKS[function.__name__] = Check(function, needs)
        return function

    return register
