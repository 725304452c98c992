"""Answers about the rows and the columns of a similarity matrix out of one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._arguments import as_bias, as_optimistic, as_over, as_params, as_scale, as_term, check_number, check_size
from .engines.dispatch import Hardest, Matrix, Moments, Over


class TopK(NamedTuple):
    """The best candidates of an anchor, best first: (N, k) scores and indices."""

    values: Tensor
    indices: Tensor


class Joined:
    """Rows and columns answered out of one pass, in one vector (N + M,): the rows first.

    Parameters hold one number for all anchors, or one for each in the same order.
    """

    def __init__(self, matrix: Matrix, flipped: bool):
        self._matrix, self._flipped = matrix, flipped

    def _turned(self, x: Tensor, back: bool = False) -> Tensor:
        """From the order of the matrix to that of the view, or ``back``."""
        if not self._flipped or x.numel() == 1:
            return x
        first = self._matrix.shape[back]
        return torch.cat((x[first:], x[:first]))

    def _params(self, params: tuple[Tensor, ...]) -> list[Tensor]:
        given = as_params("params", self._matrix, params, sum(self._matrix.shape))
        return [self._turned(p, back=True) for p in given] if self._flipped else given

    def moments(self) -> Moments:
        mean, std = self._matrix.moments((True, True))
        return Moments(self._turned(mean), self._turned(std))

    def logsumexp(self, scale: float | Tensor, over: Over = "negatives") -> Tensor:
        scale = self._turned(as_scale("scale", self._matrix, scale, sum(self._matrix.shape)), back=True)
        return self._turned(self._matrix.logsumexp(scale, (True, True), over))

    def entropy(self, temperature: float) -> Tensor:
        return self._turned(self._matrix.entropy(temperature, (True, True)))

    def positives(self, term: str, *params: Tensor, sparse: bool = False) -> Tensor:
        return self._turned(self._matrix.positives(as_term(term), self._params(params), (True, True), sparse))

    def negatives(self, term: str, *params: Tensor) -> Tensor:
        return self._turned(self._matrix.negatives(as_term(term), self._params(params), (True, True)))

    def violations(self, margin: float) -> Tensor:
        return self._turned(self._matrix.violations(float(margin), (True, True)))


class Both:
    """Rows and columns answered out of one pass: each method returns the pair ``(of the rows, of the columns)``.

    The methods are those of :class:`Similarity`; where that takes a value per row, these take one for the rows and
    one for the columns.
    """

    def __init__(self, matrix: Matrix, flipped: bool):
        self._matrix, self._flipped, self._joined = matrix, flipped, Joined(matrix, flipped)

    def _order(self, pair: Any) -> Any:
        return (pair[1], pair[0]) if self._flipped else (pair[0], pair[1])

    def _parted(self, x: Tensor) -> Any:
        n, _ = self._order(self._matrix.shape)
        return x[:n], x[n:]  # outputs of a split may not be changed in place

    @property
    def positive_counts(self) -> tuple[Tensor, Tensor]:
        """(N,) and (M,) int64: how many positives each anchor has."""
        return self._order(self._matrix.positive_counts((True, True)))

    @property
    def negative_counts(self) -> tuple[Tensor, Tensor]:
        """(N,) and (M,) int64: how many negatives each anchor has."""
        n, m = self._matrix.shape
        rows, cols = self._matrix.positive_counts((True, True))
        return self._order((m - rows, n - cols))

    def moments(self) -> tuple[Moments, Moments]:
        """See :meth:`itrloss.Similarity.moments`."""
        rows, cols = (Moments(*x) for x in zip(*(self._parted(x) for x in self._joined.moments()), strict=True))
        return rows, cols

    def logsumexp(
        self, row_scale: float | Tensor = 1.0, col_scale: float | Tensor | None = None, *, over: Over = "negatives"
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`itrloss.Similarity.logsumexp`; ``col_scale`` is ``row_scale`` unless given."""
        n, m = self._order(self._matrix.shape)
        scale = as_scale("row_scale", self._matrix, row_scale, n)
        if col_scale is not None or scale.numel() > 1:
            other = as_scale("col_scale", self._matrix, row_scale if col_scale is None else col_scale, m)
            scale = torch.cat((scale.expand(n), other.expand(m)))
        return self._parted(self._joined.logsumexp(scale, as_over(over)))

    def entropy(self, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """See :meth:`itrloss.Similarity.entropy`."""
        check_number("temperature", temperature, positive=True)
        return self._parted(self._joined.entropy(temperature))

    def hardest(self) -> tuple[Hardest, Hardest]:
        """See :meth:`itrloss.Similarity.hardest`."""
        return self._order(self._matrix.hardest((True, True)))

    def positives(
        self,
        term: str = "identity",
        row_params: tuple[Tensor, ...] = (),
        col_params: tuple[Tensor, ...] = (),
        *,
        sparse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`itrloss.Similarity.positives`."""
        params = self._params(row_params, col_params)
        return self._parted(self._joined.positives(term, *params, sparse=sparse))

    def negatives(
        self, term: str = "identity", row_params: tuple[Tensor, ...] = (), col_params: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`itrloss.Similarity.negatives`."""
        params = self._params(row_params, col_params)
        return self._parted(self._joined.negatives(term, *params))

    def violations(self, margin: float) -> tuple[Tensor, Tensor]:
        """See :meth:`itrloss.Similarity.violations`."""
        return self._parted(self._joined.violations(margin))

    def topk(self, k: int, row_bias: Tensor | None = None, col_bias: Tensor | None = None) -> tuple[TopK, TopK]:
        """See :meth:`itrloss.Similarity.topk`: ``col_bias`` (M,) is for the rows, ``row_bias`` (N,) for the columns.

        A side with fewer than k candidates gets them all.
        """
        check_size("k", k)
        biases = self._biases(row_bias, col_bias)
        n, m = self._matrix.shape
        values, indices = self._matrix.topk((min(k, m), min(k, n)), biases)
        return self._order((TopK(values[0], indices[0]), TopK(values[1], indices[1])))

    def ranks(
        self, row_bias: Tensor | None = None, col_bias: Tensor | None = None, *, ties: str = "pessimistic"
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`itrloss.Similarity.ranks`: ``col_bias`` (M,) is for rows, ``row_bias`` (N,) for columns."""
        biases = self._biases(row_bias, col_bias)
        return self._order(self._matrix.ranks(biases, (True, True), as_optimistic(ties)))

    def _ranked(
        self,
        k: int,
        row_bias: Tensor | None = None,
        col_bias: Tensor | None = None,
        *,
        ties: str = "pessimistic",
        columns: bool = True,
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Of the rows, and the ``columns`` if wanted, :meth:`ranks` and the indices of :meth:`topk`, from one pass."""
        n, m = self._order(self._matrix.shape)
        biases, sizes = self._biases(row_bias, col_bias), self._order((min(k, m), min(k, n) if columns else 0))
        ranks, (_, top) = self._matrix.ranks_and_top(sizes, biases, as_optimistic(ties))
        return self._order(tuple(zip(ranks, top, strict=True)))

    def _params(self, row_params: tuple[Tensor, ...], col_params: tuple[Tensor, ...]) -> list[Tensor]:
        if len(row_params) != len(col_params):
            got = f"{len(row_params)} and {len(col_params)}"
            raise ValueError(f"row_params, col_params: expected as many for the columns as for the rows, got {got}")
        n, m = self._order(self._matrix.shape)
        rows = as_params("row_params", self._matrix, row_params, n)
        cols = as_params("col_params", self._matrix, col_params, m)
        given = zip(row_params, col_params, rows, cols, strict=True)
        # A single number that both sides are given stays one.
        return [a if p is q and a.numel() == 1 else torch.cat((a.expand(n), b.expand(m))) for p, q, a, b in given]

    def _biases(self, row_bias: Tensor | None, col_bias: Tensor | None) -> Any:
        """Of the rows' candidates, the columns, and of the columns', the rows."""
        n, m = self._order(self._matrix.shape)
        return self._order(
            (as_bias("col_bias", self._matrix, col_bias, m), as_bias("row_bias", self._matrix, row_bias, n))
        )
