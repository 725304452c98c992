"""Calls of the library's functions, which are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable

import itrloss


def calls_of_the_library(function: Callable[[], object]) -> int:
    """The number of calls of the library's Python functions."""
    home = itrloss.__file__.removesuffix("__init__.py")
    calls = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            calls.append(frame)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)
