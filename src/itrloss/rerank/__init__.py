"""Re-rankers: better rankings from scores that exist already."""

from .fast import FastReranker

__all__ = ["FastReranker"]
