"""The similarity matrix of two sets of embeddings, as an object that answers questions and need never exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import checks
from .anchors import Anchors
from .anchors import Reduction as Reduction
from .checks import as_bias, check_size, one_of
from .engine import ranking
from .engine.matrix import MEMORY_BUDGET, Matrix, choose_engine
from .engine.pairs import Pairs
from .engine.scores import Embeddings, Ids

Engine = Literal["auto", "dense", "tiled", "triton"]


class TopK(NamedTuple):
    """The best candidates of an anchor, best first: (A, k) scores and indices."""

    values: Tensor
    indices: Tensor


class Similarity(Anchors):
    """The cosine similarities of two sets of embeddings, and who matches whom; its rows are the anchors.

    ``S[i, j] = cos(rows[i], cols[j])``, computed in float32 at least. A pair is *positive* if its ids are equal and
    *negative* otherwise. Losses, re-rankers and metrics ask this object questions; how an answer is computed, and
    whether the (N, M) matrix ever exists, is the business of the engine:

    ====== ===========================================================================================
    dense  plain PyTorch and autograd on the matrix: the specification, and what runs for small ones
    tiled  tile after tile in a fixed workspace; scores are kept within ``memory_budget``, and formed
           again in the backward pass beyond it: memory O((N + M) D)
    triton the same on CUDA, in float32, with Triton kernels for the work on a tile
    auto   dense up to 65 536 scores (a million on accelerators, and what fits into the budget under
           ``torch.compile``); beyond, triton on CUDA, else tiled
    ====== ===========================================================================================

    ``sim.T`` has the columns as anchors, ``sim.both`` the rows and then the columns, out of one pass.

    Args:
        rows: (N, D) embeddings, floating point; half precision is scored in float32.
        cols: (M, D) embeddings.
        row_ids, col_ids: (N,) and (M,) integers. If both are left out, row i matches column i, and N must be M.
            ``col_ids`` alone refer to the rows by their number. The least int64 marks what does not exist: it takes
            part in nothing.
        normalize: scale embeddings to unit length first (a zero vector scores 0 and gets no gradient). Lengths may be
            anything from 1e-12, below which a vector counts as zero, to 1e18.
        engine: one of the above.
        memory_budget: bytes of scores that may be kept; by default 256 MiB, and none for ``engine="tiled"``.
        check_finite: refuse nan and infinite embeddings. That reads the data: an accelerator has to synchronise, and
            ``torch.compile(fullgraph=True)`` refuses.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what it should be.
    """

    def __init__(
        self,
        rows: Tensor,
        cols: Tensor,
        row_ids: Tensor | None = None,
        col_ids: Tensor | None = None,
        *,
        normalize: bool = True,
        engine: Engine = "auto",
        memory_budget: int | None = None,
        check_finite: bool = False,
    ):
        options: dict[str, Any] = {"engine": engine, "memory_budget": memory_budget, "check_finite": check_finite}
        self.__dict__ = self._made(rows, cols, row_ids, col_ids, normalize, **options).__dict__

    @classmethod
    def _made(
        cls,
        rows: Tensor,
        cols: Tensor | None,
        row_ids: Tensor | None,
        col_ids: Tensor | None,
        normalize: bool = True,
        *,
        engine: str = "auto",
        memory_budget: int | None = None,
        check_finite: bool = False,
        names: checks.Names = checks.ROWS_AND_COLUMNS,
    ) -> Similarity:
        """Check and build, with errors in the caller's names; ``cols`` None: of scores."""
        if cols is None:
            checks.check_matrix("scores", rows, "(N, M)", check_finite)
        else:
            checks.check_embeddings(rows, cols, check_finite, names)
            cols = cols.view_as(cols) if cols is rows else cols  # the compiler refuses to see the same tensor twice
        ids: Ids = (None, None)
        size = rows.shape[1] if cols is None else len(cols)
        if row_ids is not None or col_ids is not None or len(rows) != size:
            ids = checks.check_ids(row_ids, col_ids, len(rows), size, rows.device, names)
        sides = Embeddings(rows, normalize and cols is not None), None if cols is None else Embeddings(cols, normalize)
        if memory_budget is None:
            memory_budget = 0 if engine == "tiled" else MEMORY_BUDGET
        chosen = choose_engine(engine, len(rows) * size, memory_budget, rows)
        return cls._seen(Matrix(*sides, Pairs((len(rows), size), ids, rows.device), chosen, memory_budget), 0)

    @staticmethod
    def _seen(matrix: Matrix, side: int) -> Similarity:
        view = object.__new__(Similarity)
        Anchors.__init__(view, ((matrix, side),))
        view._side = side
        return view

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        row_ids: Tensor | None = None,
        col_ids: Tensor | None = None,
        *,
        engine: Engine = "auto",
        check_finite: bool = False,
    ) -> Similarity:
        """Return the similarity matrix (N, M) that some model computed already; higher means more similar, any range.

        The gradient is that of the scores. They are not copied: what writes to them makes later answers an error.
        """
        return cls._made(scores, None, row_ids, col_ids, engine=engine, check_finite=check_finite)

    _side: int

    def __repr__(self) -> str:
        n, m = self.shape
        return f"Similarity({n} x {m}, engine={self.engine!r}, dtype={self.dtype}, device={self.device})"

    @property
    def _inputs(self) -> tuple[Tensor, Tensor] | None:
        """The (N, D) and (M, D) embeddings as this view sees them; None for scores that exist."""
        m = self._first
        if m.cols is None:
            return None
        return (m.cols, m.rows) if self._side else (m.rows, m.cols)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        n, m = self._first.shape
        return (m, n) if self._side else (n, m)

    @property
    def engine(self) -> str:
        """The engine in use: ``"dense"``, ``"tiled"`` or ``"triton"``."""
        return self._first.engine

    @property
    def ids(self) -> Ids:
        """(N,) and (M,) int64 ids as they were given; None where they were left out."""
        rows, cols = self._first.pairs.given
        return (cols, rows) if self._side else (rows, cols)

    @property
    def T(self) -> Similarity:
        """The same similarities with the columns as anchors."""
        return self._seen(self._first, 1 - self._side)

    def detach(self) -> Similarity:
        """Return the same similarities without a gradient."""
        return self._seen(self._first.detach(), self._side)

    @property
    def both(self) -> Anchors:
        """The rows and then the columns as anchors, answered out of one pass."""
        return Anchors(((self._first, self._side),), ((self._first, 1 - self._side),))

    def check_finite(self) -> None:
        """Raise a ValueError if an embedding (or score) is nan or infinite. Synchronises with an accelerator."""
        for name, x in zip(("rows", "cols"), self._inputs or (), strict=False):
            checks.require_finite(name, x)
        if self._inputs is None:
            checks.require_finite("scores", self._first.rows)

    def scores(self) -> Tensor:
        """Return a copy of the (N, M) matrix itself, differentiable. It is materialised, whatever the engine."""
        self._first.check_unchanged()
        scores = self._first.differentiable_scores()
        return (scores.T if self._side else scores).clone(memory_format=torch.contiguous_format)

    def pair_scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the (P,) scores of row ``rows[p]`` with column ``cols[p]``; their gradient goes to these embeddings.

        ``rows`` and ``cols`` are (P,) int64 indices; a negative one is not understood.
        """
        self._first.check_unchanged()
        return self._first.pair_scores(*((cols, rows) if self._side else (rows, cols)))

    def blocks(self, size: int = 2**22) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the rows, one after the other, each with a copy of its scores (B, M), ``size`` at most."""
        n, m = self.shape
        step = max(1, size // m)
        for start in range(0, n, step):
            rows = slice(start, min(n, start + step))
            yield rows, ranking.rows_of(self._first, self._side, rows)

    # ----------------------------------------------------------------------------- answers without a gradient

    def topk(self, k: int, bias: Tensor | None = None) -> TopK:
        """Return the k columns with the highest ``S_ij + bias_j`` for each row, (N, k). No gradient."""
        check_size("k", k)
        if k > self.shape[1]:
            raise ValueError(f"k: expected a number from 1 to {self.shape[1]}, got {k}")
        bias = as_bias("bias", bias, self.shape[1], self.device)
        return self._ranked(((self._side, k, bias),), ranks=False)[0][1]

    def ranks(self, bias: Tensor | None = None, *, ties: str = "pessimistic") -> Tensor:
        """Return the (N, P) ranks (from 1) of each row's positives by ``S_ij + bias_j``, ascending, padded with 0.

        P is the largest number of positives of a row. With ``ties="pessimistic"`` a negative that scores the same as
        a positive is ahead of it, with ``"optimistic"`` behind it. The positive's score comes from the same product
        as its rivals', so rounding cannot move it. Memory grows with N times P. No gradient.
        """
        bias = as_bias("bias", bias, self.shape[1], self.device)
        return self._ranked(((self._side, 0, bias),), ties=ties)[0][0]

    def ranked(
        self,
        k: int,
        row_bias: Tensor | None = None,
        col_bias: Tensor | None = None,
        *,
        ties: str = "pessimistic",
        columns: bool = True,
    ) -> list[tuple[Tensor, TopK]]:
        """Return :meth:`ranks` and :meth:`topk` of the rows, and of the ``columns`` if wanted, out of one pass.

        ``col_bias`` (M,) is for the rows, ``row_bias`` (N,) for the columns. A side with fewer than k candidates gets
        them all.
        """
        check_size("k", k)
        n, m = self.shape
        asked = [(self._side, min(k, m), as_bias("col_bias", col_bias, m, self.device))]
        if columns:
            asked.append((1 - self._side, min(k, n), as_bias("row_bias", row_bias, n, self.device)))
        return self._ranked(asked, ties=ties)

    def _ranked(self, asked: Any, ranks: bool = True, ties: str = "pessimistic") -> Any:
        one_of("ties", ties, "pessimistic", "optimistic")
        with torch.no_grad():
            found = ranking.ranked(self._first, asked, ranks, ties == "optimistic")
        return [(rank, TopK(*top)) for rank, top in found]
