"""The similarity matrix of two sets of embeddings, as an object that need not hold the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import checks
from .anchors import Anchors, Limit
from .checks import as_bias, check_size, one_of
from .distributed import choose_schedule, consensus, numbered, padded, world_size
from .engine import processes, ranking
from .engine.exchange import Processes, Share
from .engine.matrix import MEMORY_BUDGET, Matrix, check_unchanged, choose_engine
from .engine.pairs import Pairs
from .engine.ring import RingMatrix
from .engine.scores import Embeddings, Ids, with_bias
from .groups import Reduction as Reduction

Engine = Literal["auto", "dense", "tiled", "triton"]
Schedule = Literal["auto", "all-gather", "ring"]


class TopK(NamedTuple):
    """The best candidates of an anchor, best first: (A, k) scores and indices."""

    values: Tensor
    indices: Tensor


class Similarity(Anchors):
    """The cosine similarities of two sets of embeddings, and who matches whom; its rows are the
    anchors.

    ``S[i, j] = cos(rows[i], cols[j])``, computed in float32 at least. A pair is *positive* if its
    ids are equal and *negative* otherwise. Losses, re-rankers and metrics call this object's
    methods. How an answer is computed, and whether the (N, M) matrix is ever formed, is up to the
    engine: see :doc:`engines`.

    ``sim.T`` has the columns as anchors; ``sim.both`` has the rows and then the columns, computed
    in one pass.

    Args:
        rows: (N, D) embeddings, floating point; half precision is scored in float32.
        cols: (M, D) embeddings.
        row_ids, col_ids: (N,) and (M,) integers. If both are left out, row i matches column i, and
            N must be M. ``col_ids`` alone are row numbers. The least int64 marks a row or column
            that does not exist: it is neither positive nor negative to anything.
        normalize: scale embeddings to unit length first (a zero vector scores 0 and gets no
            gradient). Lengths may be anything from 1e-12, below which a vector counts as zero, to
            1e18.
        engine: ``"dense"`` is plain PyTorch on the matrix, ``"tiled"`` visits it tile by tile in a
            fixed workspace, ``"triton"`` does so on CUDA; ``"auto"`` chooses by size and device.
        bias: (N,) and (M,) tensors b and c that are added to the scores, ``S_ij + b_i + c_j``, and
            get their gradients; None stands for zeros. As two more dimensions of the embeddings, in
            float32 at least, it is part of all answers.
        memory_budget: bytes of scores that may be cached; by default 256 MiB, and none for
            ``engine="tiled"``.
        check_finite: raise a ValueError for nan and infinite embeddings. That reads the data: an
            accelerator has to synchronise, and ``torch.compile(fullgraph=True)`` fails.
        names: what error messages call rows, columns and their ids.

    Raises:
        TypeError, ValueError: naming the argument, what it should be and what it was.
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
        bias: tuple[Tensor | None, Tensor | None] | None = None,
        memory_budget: int | None = None,
        check_finite: bool = False,
        names: checks.Names = checks.ROWS_AND_COLUMNS,
    ):
        checks.check_embeddings(rows, cols, check_finite, names)
        if bias is not None:
            rows, cols, normalize = with_bias(rows, cols, bias, normalize)
        # the compiler refuses one tensor as two arguments
        cols = cols.view_as(cols) if cols is rows else cols
        n, m, ids = len(rows), len(cols), (row_ids, col_ids)
        if row_ids is not None or col_ids is not None or n != m:
            ids = checks.check_ids(row_ids, col_ids, n, m, rows.device, names)
        budget = (
            (0 if engine == "tiled" else MEMORY_BUDGET) if memory_budget is None else memory_budget
        )
        chosen, pairs = choose_engine(engine, n * m, budget, rows), Pairs((n, m), ids, rows.device)
        super().__init__(
            [
                (
                    Matrix(
                        Embeddings(rows, normalize),
                        Embeddings(cols, normalize),
                        pairs,
                        chosen,
                        budget,
                    ),
                    0,
                )
            ]
        )
        self._matrix.biased = bias is not None

    @classmethod
    def sharded(
        cls,
        rows: Tensor,
        cols: Tensor,
        row_ids: Tensor | None = None,
        col_ids: Tensor | None = None,
        *,
        process_group: Any = None,
        schedule: Schedule = "auto",
        same: str = "",
        **options: Any,
    ) -> Similarity:
        """Return this process's part of the similarities of all processes' batches; see
        :doc:`distributed`.

        Its anchors are this process's rows, or its columns, and their candidates those of all
        processes. Answers are those of one process with the whole batch. All processes have to ask
        the same. :meth:`reduce` returns the same on all of them. Shorter batches, which may be
        empty, are padded with anchors that do not exist.

        Args:
            rows, cols: this process's embeddings, (N_r, D) and (M_r, D).
            row_ids, col_ids: as in :class:`Similarity`, equal across processes where rows and
                columns match. Without ids, a row matches a column of the same process.
            process_group: the processes of ``torch.distributed`` that take part; by default, all.
            schedule: ``"all-gather"`` holds the columns of all processes, ``"ring"`` those of two
                at a time; ``"auto"`` chooses by size. The compiler takes the former only.
            same: what else has to be the same on all processes, such as options, in words.
            options: of :class:`Similarity`; a bias is that of this process's rows and columns.

        Raises:
            TypeError, ValueError: on all processes, if one of them fails or they differ in more
                than their sizes.
            RuntimeError: if another process is lost.
        """
        if world_size(process_group) == 1:
            return cls(rows, cols, row_ids, col_ids, **options)
        names, ids = options.pop("names", checks.ROWS_AND_COLUMNS), (row_ids, col_ids)
        bias = options.pop("bias", None)

        def check() -> list[int]:
            nonlocal ids, rows, cols
            one_of("schedule", schedule, "auto", "all-gather", "ring")
            if schedule == "ring" and torch.compiler.is_compiling():
                raise ValueError("schedule: torch.compile needs 'all-gather'")
            checks.check_embeddings(
                rows, cols, options.get("check_finite", False), names, empty=True
            )
            ids = checks.check_ids(*ids, len(rows), len(cols), rows.device, names)
            rows, cols, options["normalize"] = with_bias(
                rows, cols, bias, options.get("normalize", True)
            )
            return [len(rows), len(cols)]

        if torch.compiler.is_compiling():  # nothing is compared then
            sizes = [check()] * world_size(process_group)
        else:
            with consensus(process_group) as agreed:
                agreed.numbers = check()
                kinds = [f"{str(x.dtype)[6:]} (B, {x.shape[1]})" for x in (rows, cols)]
                trained = [x.requires_grad and torch.is_grad_enabled() for x in (rows, cols)]
                had = [x is not None for x in ids]
                agreed.text = f"{', '.join(kinds)}, gradients {trained}, ids {had}, {options} {schedule} {same}"
            sizes = [numbers[:2] for numbers in agreed.every]
        shared = Processes(process_group, sizes)
        numbers = torch.arange(len(rows), device=rows.device) + shared.first(0)
        own_ids = numbers if ids[0] is None else ids[0], numbers if ids[1] is None else ids[1]
        if ids[0] is None and ids[1] is not None:
            own_ids = numbers, numbered(ids[1], len(rows), shared.first(0))
        ids, (n, m) = shared.gather_ids(*own_ids), shared.padded
        rows, cols = padded(rows, n), padded(cols, m)
        if schedule == "auto":
            schedule = choose_schedule(m * shared.world * cols.shape[1])
        if schedule == "ring":
            pairs = Pairs((n, m * shared.world), ids, rows.device)
            engine = choose_engine(options.get("engine", "auto"), n * m * shared.world, 0, rows)
            tiled = "tiled" if engine == "dense" else engine
            sides = (Embeddings(x, options["normalize"]) for x in (rows, cols))
            sim = cls._view(RingMatrix(*sides, pairs, tiled, 0), 0)
        else:
            sim = cls(rows, processes.gather(cols, process_group), *ids, **options, names=names)
        sim._matrix.share, sim._matrix.biased = (
            Share(shared, 1, sizes[shared.rank], cols),
            bias is not None,
        )
        Anchors.__init__(sim, [(sim._matrix, 0)])
        return sim

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        row_ids: Tensor | None = None,
        col_ids: Tensor | None = None,
        *,
        engine: Engine = "auto",
        check_finite: bool = False,
        names: checks.Names = checks.ROWS_AND_COLUMNS,
    ) -> Similarity:
        """Return a Similarity of (N, M) scores that a model computed; higher means more similar, in
        any range.

        Gradients go to the scores. They are not copied: if they are modified in place, later calls
        raise an error.
        """
        checks.check_matrix("scores", scores, "(N, M)", check_finite)
        n, m = scores.shape
        ids = checks.check_ids(row_ids, col_ids, n, m, scores.device, names)
        pairs, chosen = Pairs((n, m), ids, scores.device), choose_engine(engine, n * m, 0, scores)
        return cls._view(Matrix(Embeddings(scores, False), None, pairs, chosen, 0), 0)

    @staticmethod
    def _view(matrix: Matrix, side: int) -> Similarity:
        view = object.__new__(Similarity)
        Anchors.__init__(view, [(matrix, side)])
        return view

    def __repr__(self) -> str:
        n, m = self.shape
        return f"Similarity({n} x {m}, engine={self.engine!r}, dtype={self.dtype}, device={self.device})"

    @property
    def _inputs(self) -> tuple[Tensor, Tensor] | None:
        """The (N, D) and (M, D) embeddings of this view's rows and columns; None for precomputed
        scores.
        """
        m = self._matrix
        if m.cols is None:
            return None
        return (m.cols, m.rows) if self._side else (m.rows, m.cols)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, M) of the matrix; of a sharded batch, this process's (N_r, M)."""
        if self._matrix.share is not None:
            return self._matrix.share.unpadded[self._side], self.totals[1]
        n, m = self._matrix.shape
        return (m, n) if self._side else (n, m)

    @property
    def totals(self) -> tuple[int, int]:
        """The numbers of rows and columns; of a sharded batch, of all processes."""
        share = self._matrix.share
        n, m = self._matrix.shape if share is None else share.processes.totals
        return (m, n) if self._side else (n, m)

    def _local(self) -> tuple[Similarity, int]:
        """Return this view with all candidates in this process, and its number of anchors; for 0,
        one of padding.
        """
        matrix, side, share = self._matrix, self._side, self._matrix.share
        if share is None:
            return self, len(self)
        p = share.processes
        options: dict[str, Any] = {"engine": "auto" if self.engine == "dense" else self.engine}
        n = share.unpadded[side]
        some = slice(0, max(1, n))
        ids = p.ids[side].chunk(p.world)[p.rank][some], p.existing(p.ids[1 - side], 1 - side)
        others: Any = matrix.cols
        if side or isinstance(matrix, RingMatrix):
            others = processes.gather(matrix.rows if side else share.cols, p.group)  # type: ignore[arg-type]
        if matrix.cols is None:
            scores = others.chunk(p.world, 1)[p.rank].T if side else matrix.rows
            local = Similarity.from_scores(p.existing(scores[some].T, 1 - side).T, *ids)
        else:
            own: Any = share.cols if side else matrix.rows
            options["normalize"] = matrix.embeddings[0].normalize
            local = Similarity(own[some], p.existing(others, 1 - side), *ids, **options)
        return local, n

    @property
    def engine(self) -> str:
        """The engine in use: ``"dense"``, ``"tiled"`` or ``"triton"``."""
        return self._matrix.engine

    @property
    def ids(self) -> Ids:
        """The (N,) and (M,) int64 ids that were passed in; None where they were left out."""
        rows, cols = self._matrix.pairs.ids_as_passed
        return (cols, rows) if self._side else (rows, cols)

    @property
    def all_ids(self) -> tuple[Tensor, Tensor]:
        """The int64 ids of the rows and columns of all processes; for a sharded batch."""
        assert self._matrix.share is not None
        p = self._matrix.share.processes
        rows, cols = (p.existing(ids, side) for side, ids in enumerate(p.ids))
        return (cols, rows) if self._side else (rows, cols)

    @property
    def T(self) -> Similarity:
        """The same similarities with the columns as anchors."""
        return self._view(self._matrix, 1 - self._side)

    def detach(self) -> Similarity:
        """Return the same similarities without a gradient."""
        return self._view(self._matrix.detach(), self._side)

    @property
    def both(self) -> Anchors:
        """The rows and then the columns as anchors, computed in one pass."""
        return Anchors([(self._matrix, self._side)], [(self._matrix, 1 - self._side)])

    def check_finite(self) -> None:
        """Raise a ValueError if an embedding (or score) is nan or infinite. Synchronises with an
        accelerator.
        """
        names = ("scores",) if self._inputs is None else ("rows", "cols")
        for name, x in zip(names, self._inputs or (self._matrix.rows,), strict=True):
            checks.require_finite(name, x)

    def scores(self) -> Tensor:
        """Return a differentiable copy of the (N, M) matrix, which is materialised by any engine."""
        if self._matrix.share is not None:
            local, size = self._local()
            return local.scores()[:size]
        check_unchanged([self._matrix])
        trained = torch.is_grad_enabled() and any(
            x is not None and x.x.requires_grad for x in self._matrix.embeddings
        )
        scores = (self._matrix.as_dense() if trained else self._matrix).scores()
        return (scores.T if self._side else scores).clone(memory_format=torch.contiguous_format)

    def pair_scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the (P,) scores of row ``rows[p]`` with column ``cols[p]``; their gradient goes to
        these embeddings.

        ``rows`` and ``cols`` are (P,) int64 indices, at least 0: negative ones do not count from
        the end.
        """
        if self._matrix.share is not None:
            return self._local()[0].pair_scores(rows, cols)
        check_unchanged([self._matrix])
        return self._matrix.pair_scores(*((cols, rows) if self._side else (rows, cols)))

    def blocks(self, size: int = 2**22) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the rows in order, each with a copy of its scores (B, M), at most
        ``size`` of them.
        """
        local, n = self._local()
        for part, block in local._matrix.blocks(local._side, size):
            if part.start < n:
                yield slice(part.start, min(part.stop, n)), block[: n - part.start]

    # ------------------------------------------------------------------- answers without a gradient

    def topk(self, k: int, bias: Tensor | None = None, *, below: Limit = None) -> TopK:
        """Return the (N, k) columns with the highest ``S_ij + bias_j`` for each row. No gradient.

        With ``below``, a number or (N,), of those for which that is lower; -inf and -1 where there
        are fewer.
        """
        check_size("k", k)
        if k > self.shape[1]:
            raise ValueError(f"k: expected a number from 1 to {self.shape[1]}, got {k}")
        top = self.ranked(k, bias, ties=None, below=below)[1]
        return (
            top
            if below is None
            else TopK(top.values, top.indices.masked_fill(top.values == -torch.inf, -1))
        )

    def ranks(self, bias: Tensor | None = None, *, ties: str = "pessimistic") -> Tensor:
        """Return the (N, P) ranks (from 1) of each row's positives by ``S_ij + bias_j``, ascending,
        padded with 0.

        P is the largest number of positives of a row. With ``ties="pessimistic"`` a negative that
        scores the same as a positive is ahead of it, with ``"optimistic"`` behind it. The
        positive's score comes from the same product as its rivals', so rounding cannot move it.
        Memory grows with N times P. No gradient.
        """
        return self.ranked(0, bias, ties=ties)[0]

    def ranked(
        self,
        k: int,
        bias: Tensor | None = None,
        *,
        ties: str | None = "pessimistic",
        below: Limit = None,
    ) -> tuple[Tensor, TopK]:
        """Return :meth:`ranks` (empty for ``ties=None``) and :meth:`topk` from one pass; k may
        exceed M.
        """
        if k != 0:
            check_size("k", k)
        one_of("ties", ties, "pessimistic", "optimistic", None)
        if self._matrix.share is not None:
            local, n = self._local()
            below = (
                below[: len(local)] if isinstance(below, Tensor) and below.numel() > 1 else below
            )
            ranks, top = local.ranked(k, bias, ties=ties, below=below)
            return ranks[:n], TopK(*(x[:n] for x in top))
        pairs, side, m = self._matrix.pairs, self._side, self.shape[1]
        bias, ignored = as_bias("bias", bias, m, self.device), pairs.ignored[1 - side]
        if ignored is not None:  # columns that do not exist rank last
            bias = torch.zeros(m, dtype=self.dtype, device=self.device) if bias is None else bias
            bias = bias.masked_fill(ignored, -torch.inf)
        limits = self._limits(below, None)[1]
        places, least = None if ties is None else pairs.places(side), torch.finfo(self.dtype).min
        parts: list[list[Tensor]] = [[], [], []]
        for part, scores in self._matrix.blocks(side):
            scores = (scores if bias is None else scores.add_(bias)).clamp_min_(least)
            rivals = scores
            for limit in limits:
                rivals = scores.masked_fill(
                    scores >= (limit[part] if len(limit) > 1 else limit)[:, None], least
                )
            values, indices = rivals.topk(min(k, m), dim=1)
            parts[1].append(values.masked_fill_(values == least, -torch.inf))
            parts[2].append(indices)
            if places is not None:
                own = places[part]
                thresholds = scores.gather(1, own.clamp_min(0)).masked_fill_(own < 0, torch.nan)
                whole = slice(0, m)
                pairs.exclude_(
                    scores.T if side else scores,
                    (whole, part) if side else (part, whole),
                    -torch.inf,
                )
                parts[0].append(ranking.ranks(thresholds, scores, ties == "optimistic"))
        ranks, values, indices = (torch.cat(x) if x else torch.empty(0) for x in parts)
        return ranks, TopK(values, indices)
