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

        return run(arguments)
    except ImportError as error:
        print(f"itrloss: {error}", file=sys.stderr)
        print("pip install 'itrloss[cli,files,report]' has what commands need", file=sys.stderr)
        return 2
