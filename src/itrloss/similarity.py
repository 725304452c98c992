"""The similarity matrix of two sets of embeddings, as an object that answers questions and need never exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ._arguments import (
    as_bias,
    as_optimistic,
    as_over,
    as_params,
    as_scale,
    as_term,
    check_embeddings,
    check_ids,
    check_matrix,
    check_number,
    check_size,
    diagonal_if_unique,
    require_finite,
)
from ._both import Both, Joined, TopK
from .engines.dispatch import Hardest, Matrix, Moments, Over, choose
from .engines.products import matmul
from .engines.registration import full_precision
from .engines.tiles import Pair, compute_dtype

Engine = Literal["auto", "reference", "dense", "tiled", "triton"]

_SOME_COLUMNS = 2**14  # embeddings normalised at a time
#: Bytes that ``engine="auto"`` lets the dense engine spend on the score matrix (8192 x 8192 float32 scores).
DEFAULT_MEMORY_BUDGET = 256 * 2**20


class Similarity:
    """The cosine similarities of two sets of embeddings, and who matches whom.

    ``S[i, j] = cos(rows[i], cols[j])``, computed in float32 at least. A pair is *positive* if its ids are equal and
    *negative* otherwise. Losses, re-rankers and metrics ask this object questions; how an answer is computed, and
    whether the (N, M) matrix ever exists, is the business of the engine:

    ========== =======================================================================================
    reference  dense matrix and autograd in plain PyTorch: the specification, for tests and for reading
    dense      one product, hand-written forward and backward passes over it
    tiled      tile after tile in a fixed workspace, recomputed in backward; memory O((N + M) D)
    triton     the same on CUDA, in float32, with Triton kernels for the work on a tile
    auto       dense while the matrix takes at most ``memory_budget`` bytes, else tiled; on CUDA triton instead of
               tiled, and of dense from a million scores of half precision on, where Triton works
    ========== =======================================================================================

    All answers are differentiable unless they say otherwise. They describe each row; ``sim.T`` asks for the columns
    and ``sim.both`` for rows and columns out of one pass.

    Args:
        rows: (N, D) embeddings, floating point; half precision is scored in float32.
        cols: (M, D) embeddings.
        row_ids, col_ids: (N,) and (M,) integers, no value is special. If both are left out, row i matches column i,
            and N must be M. ``col_ids`` alone refer to the rows by their number.
        normalize: scale embeddings to unit length first (a zero vector scores 0 and gets no gradient). Lengths may be
            anything from 1e-12, below which a vector counts as zero, to 1e18.
        engine: one of the above.
        memory_budget: bytes that the score matrix may take for ``engine="auto"`` to choose the dense engine. Forward
            and backward of a loss hold one to three matrices of that size at once.
        check_finite: refuse nan and infinite embeddings. That reads the data: an accelerator has to be waited for, and
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
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
        check_finite: bool = False,
    ):
        check_embeddings(rows, cols, check_finite)
        n, m = rows.shape[0], cols.shape[0]
        given = check_ids(row_ids, col_ids, n, m, rows.device)
        ids = diagonal_if_unique(given)
        if rows is cols:
            cols = cols.view_as(cols)  # the compiler refuses to see the same tensor twice
        chosen = choose(engine, n * m, memory_budget, rows)
        self._matrix, self._flipped = Matrix(rows, cols, ids, normalize, chosen), False
        if row_ids is not None and ids[0] is None and given[0] is not None:
            ids = (given[0].clone(),) * 2
        self._matrix.given_ids = None if row_ids is None else ids[0], ids[1]

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        row_ids: Tensor | None = None,
        col_ids: Tensor | None = None,
        *,
        engine: Literal["auto", "reference", "dense", "triton"] = "auto",
        check_finite: bool = False,
    ) -> Similarity:
        """A similarity matrix (N, M) that some model computed already; higher means more similar, any range.

        The matrix exists, so the engine is dense (or Triton, or the reference); the gradient is that of the scores.
        """
        check_matrix("scores", scores, "(N, M)", check_finite)
        if engine not in ("auto", "dense", "reference", "triton"):
            raise ValueError(f"engine: expected 'auto', 'dense', 'reference' or 'triton' for scores, got {engine!r}")
        ids = diagonal_if_unique(check_ids(row_ids, col_ids, scores.shape[0], scores.shape[1], scores.device))
        chosen = "dense" if engine == "auto" else choose(engine, scores.numel(), 0, scores)
        return cls._of_scores(scores.to(compute_dtype(scores)), ids, chosen)

    @classmethod
    def _of(
        cls, rows: Tensor, cols: Tensor, ids: Pair, inv: Pair, engine: str, valid: Tensor | None = None
    ) -> Similarity:
        """Of checked embeddings with known reciprocal lengths; with ``valid`` as in :class:`Matrix`, of a memory."""
        chosen = choose(engine, rows.shape[0] * cols.shape[0], DEFAULT_MEMORY_BUDGET, rows)
        return cls._view(Matrix(rows, cols, ids, True, chosen, inv, valid), False)

    @classmethod
    def _of_scores(cls, scores: Tensor, ids: Pair, engine: str = "dense") -> Similarity:
        """Of checked scores in the compute dtype."""
        return cls._view(Matrix(scores, None, ids, False, engine), False)

    @classmethod
    def _view(cls, matrix: Matrix, flipped: bool) -> Similarity:
        view = object.__new__(cls)
        view._matrix, view._flipped = matrix, flipped
        return view

    def __repr__(self) -> str:
        n, m = self.shape
        return f"Similarity({n} x {m}, engine={self.engine!r}, dtype={self.dtype}, device={self.device})"

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        n, m = self._matrix.shape
        return (m, n) if self._flipped else (n, m)

    @property
    def engine(self) -> str:
        """The engine in use: ``"reference"``, ``"dense"``, ``"tiled"`` or ``"triton"``."""
        return self._matrix.engine

    @property
    def dtype(self) -> torch.dtype:
        """Type of scores and answers: float64 for float64 inputs, else float32."""
        return compute_dtype(self._matrix.rows)

    @property
    def device(self) -> torch.device:
        """Where inputs and answers live."""
        return self._matrix.rows.device

    @property
    def ids(self) -> tuple[Tensor | None, Tensor | None]:
        """(N,) and (M,) ids as they are compared; None, None if row i simply matches column i.

        That holds where ids were left out, and on the CPU also where they say just that.
        """
        return self._mine((self._matrix.ids, self._matrix.ids[::-1]))

    @property
    def one_to_one(self) -> bool:
        """Whether :attr:`ids` are None: row i matches column i and nothing else."""
        return self._matrix.ids[0] is None

    @property
    def T(self) -> Similarity:
        """The same similarities with the columns as anchors."""
        self._refuse_memory()
        return self._view(self._matrix, not self._flipped)

    @property
    def both(self) -> Both:
        """The same questions, answered for rows and columns out of one pass."""
        self._refuse_memory()
        return Both(self._matrix, self._flipped)

    @property
    def _joined(self) -> Joined:
        """The same in one vector: what the losses work on."""
        self._refuse_memory()
        return Joined(self._matrix, self._flipped)

    def _refuse_memory(self) -> None:
        if self._matrix.memory:
            raise ValueError("a Similarity with a memory answers for the batch only, which are the rows")

    def detach(self) -> Similarity:
        """The same similarities, cut off from the gradient."""
        return self._view(self._matrix.detach(), self._flipped)

    def _detach_for_now(self) -> Similarity:
        """:meth:`detach` for questions before a backward pass, which may then write over the scores."""
        return self._view(self._matrix.detach(later=False), self._flipped)

    def _stacked(self, rows: Tensor) -> Similarity:
        """Of embeddings: more rows (B, D) below those that are there, nothing matching."""
        matrix = self._matrix
        assert matrix.cols is not None
        first, second = (matrix.cols, matrix.rows) if self._flipped else (matrix.rows, matrix.cols)
        both = torch.cat([x.to(self.device, self.dtype) for x in (first.detach(), rows)])  # neither is rounded
        ids = torch.arange(len(both) + len(second)).split((len(both), len(second)))
        engine = self.engine if self.engine in ("tiled", "triton") else "auto"
        return Similarity(both, second.detach(), *ids, normalize=matrix.normalize, engine=engine)  # type: ignore[arg-type]

    def _unlabelled(self) -> Similarity:
        """The same scores without a gradient, nothing matching, so that every column is a negative."""
        matrix = self._matrix.detach()
        n, m = matrix.shape
        matrix.ids = tuple(torch.arange(n + m, device=matrix.rows.device).split((n, m)))  # type: ignore[assignment]
        matrix._diagonal = None
        return self._view(matrix, self._flipped)

    def _part(self, rows: Tensor, cols: Tensor) -> Similarity:
        """The similarities of some rows and some columns, without a gradient."""
        matrix = self._matrix
        ids = [torch.arange(n) if x is None else x for x, n in zip(self.ids, self.shape, strict=True)]
        kept = ids[0].to(rows.device)[rows], ids[1].to(cols.device)[cols]
        if matrix.cols is None:
            return Similarity.from_scores(self.scores().detach()[rows][:, cols], *kept)
        first, second = (matrix.cols, matrix.rows) if self._flipped else (matrix.rows, matrix.cols)
        engine: Any = self.engine
        return Similarity(first.detach()[rows], second.detach()[cols], *kept, normalize=matrix.normalize, engine=engine)

    def _some_scores(self, rows: slice) -> Tensor:
        """A copy of some rows of the scores, without a gradient; of embeddings no other score is formed."""
        matrix = self._matrix
        if matrix.cols is None or matrix.engine in ("dense", "reference"):
            scores = self.scores().detach()[rows]
            return scores.clone(memory_format=torch.contiguous_format)
        source = matrix.source()
        first, second = (source.unit_cols, source.unit_rows) if self._flipped else (source.unit_rows, source.unit_cols)
        left, size = first(rows.start, rows.stop), self.shape[1]
        out = left.new_empty(len(left), size)
        with full_precision(left):
            for start in range(0, size, _SOME_COLUMNS):
                columns = slice(start, min(size, start + _SOME_COLUMNS))
                out[:, columns] = matmul(left, second(columns.start, columns.stop).T)
        return out

    def check_finite(self) -> None:
        """Raise a ValueError if an embedding (or score) is nan or infinite: answers are then without meaning.

        It reads the data, so an accelerator has to be waited for.
        """
        matrix = self._matrix
        named = {"scores": matrix.rows} if matrix.cols is None else {"rows": matrix.rows, "cols": matrix.cols}
        for name, x in named.items():
            require_finite(name, x)

    def _against(self, cols: Tensor) -> Similarity:
        """The same rows beside other columns, nothing matching: (B, D) embeddings, or (N, B) of their scores."""
        rows, own_cols = self._matrix.rows, self._matrix.cols
        if own_cols is None:
            ids = torch.arange(cols.shape[0]), torch.arange(cols.shape[0], cols.shape[0] + cols.shape[1])
            return Similarity.from_scores(cols, *ids)
        rows = own_cols if self._flipped else rows
        ids = torch.arange(rows.shape[0]), torch.arange(rows.shape[0], rows.shape[0] + cols.shape[0])
        engine = self.engine if self.engine in ("tiled", "triton") else "auto"
        return Similarity(rows, cols, *ids, normalize=self._matrix.normalize, engine=engine)

    def scores(self) -> Tensor:
        """The (N, M) matrix itself, differentiable. It is materialised, whatever the engine."""
        return self._matrix.scores().T if self._flipped else self._matrix.scores()

    def pair_scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """(P,) scores of row ``rows[p]`` with column ``cols[p]``; their gradient touches no other embeddings.

        ``rows`` and ``cols`` are (P,) int64 indices; a negative one is not understood.
        """
        i, j = (cols, rows) if self._flipped else (rows, cols)
        if self.engine == "reference":
            return self._matrix.scores()[i, j]
        return self._matrix.pair_scores(i, j)

    @property
    def _asked(self) -> tuple[bool, bool]:
        return (not self._flipped, self._flipped)

    def _mine(self, pair: Any) -> Any:
        return pair[1] if self._flipped else pair[0]

    @property
    def positive_counts(self) -> Tensor:
        """(N,) int64: how many columns match each row."""
        return self._mine(self._matrix.positive_counts(self._asked))

    @property
    def negative_counts(self) -> Tensor:
        """(N,) int64: how many columns do not match each row."""
        valid = self._matrix.valid
        return (self.shape[1] if valid is None else valid) - self.positive_counts

    def moments(self) -> Moments:
        """(N,) mean and population standard deviation (at least 1e-6) of each row's negatives."""
        return self._matrix.moments(self._asked)

    def logsumexp(self, scale: float | Tensor = 1.0, *, over: Over = "negatives") -> Tensor:
        """(N,) ``log sum_j exp(scale_i S_ij)`` over each row's negatives, or over all columns.

        ``scale`` is a number, a 0-dim tensor or one value per row, differentiable. -inf for a row without negatives.
        """
        mine = as_scale("scale", self._matrix, scale, self.shape[0])
        return self._matrix.logsumexp(mine, self._asked, as_over(over))

    def entropy(self, temperature: float = 1.0) -> Tensor:
        """(N,) ``-sum_{j in neg(i)} P_ij log2 P_ij``, ``P_i`` the softmax of ``S_i / temperature`` over all columns."""
        check_number("temperature", temperature, positive=True)
        return self._matrix.entropy(temperature, self._asked)

    def hardest(self) -> Hardest:
        """Each row's highest-scoring negative. Its gradient goes straight to the two embeddings of the pair."""
        return self._mine(self._matrix.hardest(self._asked))

    def positives(self, term: str = "identity", *params: Tensor, sparse: bool = False) -> Tensor:
        """(N,) ``sum_{p in pos(i)} term(S_ip, *params_i)``, 0 for a row without positives.

        ``term`` names an elementwise function; each of ``params`` holds one value per row, or one for all, and gets its
        gradient. :func:`itrloss.pair_term` registers more of them. There are:

        =========================== =====================================================
        ``identity``                ``S``
        ``log1p_clamp``             ``log(1 + max(S, -1 + 1e-6))``
        ``log1p_relu``              ``log(1 + max(S, 0))``
        ``negative_log_likelihood`` ``log(1 + exp(L - a S))``, with the parameters L and a
        ``softplus``                ``log(1 + exp(a S + b))``, with the parameters a and b
        ``hinge``                   ``max(t - S, 0)``, with the parameter t
        =========================== =====================================================

        ``sparse=True`` sends the gradient straight to the embeddings of the pairs instead of through the dense matrix:
        cheaper if no other answer has a dense gradient.
        """
        mine = as_params("params", self._matrix, params, self.shape[0])
        return self._matrix.positives(as_term(term), mine, self._asked, sparse)

    def negatives(self, term: str = "identity", *params: Tensor) -> Tensor:
        """(N,) ``sum_{j in neg(i)} term(S_ij, *params_i)``, 0 for a row without negatives. See :meth:`positives`."""
        mine = as_params("params", self._matrix, params, self.shape[0])
        return self._matrix.negatives(as_term(term), mine, self._asked)

    def violations(self, margin: float) -> Tensor:
        """(N,) ``sum_{p in pos(i)} sum_{j in neg(i)} max(margin - S_ip + S_ij, 0)``.

        Takes a pass over the matrix for each positive that a row can have, and memory for all positive pairs.
        """
        return self._matrix.violations(float(margin), self._asked)

    def topk(self, k: int, bias: Tensor | None = None) -> TopK:
        """The k columns with the highest ``S_ij + bias_j`` for each row. No gradient."""
        check_size("k", k)
        if k > self.shape[1]:
            raise ValueError(f"k: expected a number from 1 to {self.shape[1]}, got {k}")
        bias = as_bias("bias", self._matrix, bias, self.shape[1])
        ks, biases = ((0, k), (None, bias)) if self._flipped else ((k, 0), (bias, None))
        values, indices = self._matrix.topk(ks, biases)
        return TopK(self._mine(values), self._mine(indices))

    def ranks(self, bias: Tensor | None = None, *, ties: str = "pessimistic") -> Tensor:
        """(N, P) ranks (from 1) of each row's positives by ``S_ij + bias_j``, ascending, padded with 0. No gradient.

        P is the largest number of positives of a row. With ``ties="pessimistic"`` a negative that scores the same as
        a positive is ahead of it, with ``"optimistic"`` behind it. The positive's score comes from the same product
        as its rivals', so rounding cannot move it. Memory grows with N times P.
        """
        bias = as_bias("bias", self._matrix, bias, self.shape[1])
        biases = (None, bias) if self._flipped else (bias, None)
        return self._mine(self._matrix.ranks(biases, self._asked, as_optimistic(ties)))


def blocks(sim: Similarity, size: int = 2**22) -> Iterator[tuple[slice, Tensor]]:
    """Copies of some rows of the scores after the other, as many as have ``size`` scores."""
    n, m = sim.shape
    step = max(1, size // m)
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        yield rows, sim._some_scores(rows)
