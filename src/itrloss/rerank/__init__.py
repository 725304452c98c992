"""Re-rankers: better rankings from scores that exist already."""

from .fast import FastReranker, RerankBiases, Reranked

__all__ = ["FastReranker", "RerankBiases", "Reranked"]
