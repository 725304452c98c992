"""The command line: ``itrloss rerank``, ``itrloss eval`` and ``itrloss compare``, and what they are
made of: comparisons, tables and reports.
"""

from .commands import main

__all__ = ["main"]
