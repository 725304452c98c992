"""The command line: ``itrloss rerank``, ``itrloss eval`` and ``itrloss compare``, and what they are
made of: comparisons, tables and reports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    try:
        from .commands import run
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        hint = "install itrloss with the extra 'cli': pip install 'itrloss[cli]'"
        print(f"itrloss: the command line needs {package}\n{hint}", file=sys.stderr)
        return 2
    return run(arguments)
