"""The similarity matrix of two sets of embeddings, as an object that need not hold the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, SupportsIndex, TypeVar

import torch
from torch import Tensor

from . import checks
from .anchors import Anchors, AnchorSide, Limit
from .anchors import Reduction as Reduction
from .checks import IdsLike, as_bias, as_size, one_of
from .distributed import collectives
from .distributed.consensus import padded, world_size
from .distributed.parts import (
    LocalBatch,
    agreed,
    gathered_bias,
    processes_of,
    relation_to_all,
    spread_columns,
)
from .distributed.shards import Processes, Share
from .engine import ranking
from .engine.matrix import MEMORY_BUDGET, Bias, Matrix, choose_engine
from .engine.matrix import Engine as Engine
from .engine.question import Value, has_each
from .engine.ranking import Ranking, Relevance
from .engine.ranking import TopK as TopK
from .engine.related import Related, relation_of
from .engine.relation import IGNORE_ID, Ids, Relation, segment_sum
from .engine.vectors import Embeddings

X = TypeVar("X")
#: The id of a row, a column or a negative that does not exist, such as padding: the least int64.
NO_ID = IGNORE_ID
Directions = Literal[
    "both",
    "image-text",
    "text-image",
    "i2t",
    "t2i",
    "v2t",
    "t2v",
    "query-document",
    "document-query",
]
DIRECTIONS: tuple[Directions, ...] = "both", "image-text", "text-image"
#: What results, and trainers of videos or of documents, call the directions.
SYNONYMS = {
    "i2t": "image-text",
    "t2i": "text-image",
    "v2t": "image-text",
    "t2v": "text-image",
    "query-document": "image-text",
    "document-query": "text-image",
}
#: The sides whose values count: 0 for images, 1 for texts.
SIDES: dict[Directions, tuple[int, ...]] = {
    "both": (0, 1),
    "image-text": (0,),
    "text-image": (1,),
}


def as_directions(value: object) -> Directions:
    """Return the directions that are meant; raise an error for another word."""
    meant = SYNONYMS.get(value, value) if isinstance(value, str) else value
    one_of("directions", meant, *DIRECTIONS)
    return meant  # type: ignore[return-value]


class Similarity(Anchors):
    """The cosine similarities of two sets of embeddings, and who matches whom; rows are anchors.

    ``S[i, j] = cos(rows[i], cols[j])``, computed in float32 at least. A pair is *positive* if its
    ids are equal and *negative* otherwise. Losses, re-rankers and metrics call this object's
    methods. How an answer is computed, and whether the (N, M) matrix is ever formed, is up to the
    engine: see :doc:`engines`.

    ``sim.T`` has the columns as anchors; ``sim.both`` has the rows and then the columns, computed
    in one pass.

    Args:
        rows: (N, D) embeddings, floating point; half precision is scored in float32. NumPy arrays
            will do where no gradient is needed.
        cols: (M, D) embeddings; required. Of scores, see :meth:`from_scores`.
        row_ids, col_ids: (N,) and (M,) integers of any type, or strings, as tensors, NumPy arrays
            or lists. If both are left out, row i matches column i; if N is not M, nothing says who
            matches, so that there are scores and rankings alone. ``col_ids`` alone are row
            numbers. With sets of labels, (N, k) and (M, l), a pair is positive if it
            shares a label. :data:`itrloss.NO_ID` marks a row or column that does not exist: it is
            neither positive nor negative to anything.
        normalize: scale embeddings to unit length first (a zero vector scores 0 and gets no
            gradient). Lengths may be anything from 1e-12, below which a vector counts as zero, to
            1e18.
        engine: ``"dense"`` is plain PyTorch on the matrix, ``"tiled"`` visits it tile by tile in a
            fixed workspace, ``"triton"`` does so on CUDA; ``"auto"`` chooses by size and device.
        bias: (N,) and (M,) tensors b and c that are added to the scores, ``S_ij + b_i + c_j``, and
            get their gradients; None stands for zeros.
        memory_budget: bytes of scores that may be kept between questions; by default 256 MiB, and
            none for ``engine="tiled"``.
        check_finite: raise a ValueError for nan and infinite embeddings. That reads the data: an
            accelerator has to synchronise, and ``torch.compile(fullgraph=True)`` fails.
        names: what error messages call rows, columns and their ids.
        related: what decides, besides ids, who matches or may be a negative: groups, or a matrix.

    Raises:
        TypeError, ValueError: naming the argument, what it should be and what it was.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        rows: Tensor,
        cols: Tensor | None = None,
        row_ids: IdsLike | None = None,
        col_ids: IdsLike | None = None,
        *,
        normalize: bool = True,
        engine: Engine = "auto",
        bias: Bias | None = None,
        memory_budget: int | None = None,
        check_finite: bool = False,
        names: checks.Names = checks.ROWS_AND_COLUMNS,
        related: Related | Relation | None = None,
    ):
        rows, cols = checks.as_embeddings(rows, cols, check_finite, names)
        n = len(rows)
        m = len(cols)
        if cols is rows:
            cols = cols.view_as(cols)  # the compiler refuses one tensor as two arguments
        relation = relation_of((n, m), (row_ids, col_ids), related, rows.device, names)
        if memory_budget is None:
            memory_budget = 0 if engine == "tiled" else MEMORY_BUDGET
        elif not isinstance(memory_budget, SupportsIndex) or memory_budget < 0:
            got = repr(memory_budget)
            raise ValueError(f"memory_budget: expected a number of bytes, 0 at least, got {got}")
        row_bias, col_bias = checks.check_biases(bias, n, m, check_finite)
        matrix = Matrix.of_embeddings(
            Embeddings(rows, normalize, row_bias),
            Embeddings(cols, normalize, col_bias),
            relation,
            choose_engine(engine, n * m, int(memory_budget), rows),
            int(memory_budget),
        )
        self._start(AnchorSide(matrix, 0))

    def _start(self, anchors: AnchorSide) -> None:
        """Become the anchors that are one side of a matrix."""
        super().__init__([anchors])
        self._matrix = anchors.matrix
        self._side = anchors.side
        #: What this process has of a batch that several processes share; None: all.
        self.share = anchors.share

    @staticmethod
    def of_anchors(anchors: AnchorSide) -> Similarity:
        """Return a similarity whose rows are one side of a matrix."""
        view = object.__new__(Similarity)
        view._start(anchors)
        return view

    @classmethod
    def sharded(
        cls,
        rows: Tensor,
        cols: Tensor,
        row_ids: IdsLike | None = None,
        col_ids: IdsLike | None = None,
        *,
        process_group: Any = None,
        same: str | Callable[[], str] = "",
        **options: Any,
    ) -> Similarity:
        """Return this process's part of all processes' similarities; see :doc:`multi_gpu`.

        Its anchors are this process's rows, or its columns, and their candidates the columns, or
        rows, of all processes. Answers equal one process's with the whole batch. All processes
        have to ask the same. :meth:`reduce` returns the same on all of them. Shorter batches, which
        may be empty, are padded with anchors that do not exist. Each process holds the columns of
        all.

        Args:
            rows, cols: this process's embeddings, (N_r, D) and (M_r, D).
            row_ids, col_ids: as in :class:`Similarity`, equal across processes where rows and
                columns match. Without ids, a row matches a column of the same process.
            process_group: the processes of ``torch.distributed`` that take part; by default, all.
            same: what else has to be the same on all processes, such as options, in words; or a
                function that returns it and may check further input.
            options: of :class:`Similarity`; a bias belongs to this process's rows and columns.

        Raises:
            TypeError, ValueError: on all processes, if one of them fails or they differ in more
                than their sizes.
            RuntimeError: if another process is lost.
        """
        if world_size(process_group) == 1:
            if callable(same):
                same()
            return cls(rows, cols, row_ids, col_ids, **options)
        bias = options.pop("bias", None)
        if isinstance(bias, (tuple, list)):
            bias = tuple(map(checks.from_numpy, bias))
        names = options.pop("names", checks.ROWS_AND_COLUMNS)
        related = options.pop("related", None) or Related()
        finite = options.get("check_finite", False)
        part = LocalBatch((rows, cols), (row_ids, col_ids), bias, related, names, finite)
        known, sizes = agreed(part, process_group, same, options)
        processes = processes_of(known, sizes, process_group, rows.device)
        n, m = processes.padded
        own_cols = padded(cols, m)
        sim = cls(
            padded(rows, n),
            collectives.gather(own_cols, process_group),
            bias=gathered_bias(bias, processes),
            related=relation_to_all(known, processes, rows.device),
            **options,
        )
        return sim._shared_by(processes, own_cols)

    @classmethod
    def sharded_scores(
        cls,
        scores: Tensor,
        row_ids: IdsLike | None = None,
        col_ids: IdsLike | None = None,
        *,
        process_group: Any = None,
        same: str | Callable[[], str] = "",
        **options: Any,
    ) -> Similarity:
        """Return this process's part of all processes' precomputed scores; see :meth:`sharded`.

        Args:
            scores: (N_r, M) of this process's rows with the columns of all processes, which are in
                the order of the processes.
            row_ids, col_ids: (N_r,) and (M_r,) of this process's rows and columns. Without ids, row
                i matches this process's column i.
            process_group, same: see there.
            options: of :meth:`from_scores`. Groups of columns belong to this process's columns;
                ``matches`` are as the scores.
        """
        if world_size(process_group) == 1:
            if callable(same):
                same()
            return cls.from_scores(scores, row_ids, col_ids, **options)
        names = options.pop("names", checks.ROWS_AND_COLUMNS)
        related = options.pop("related", None) or Related()
        finite = options.get("check_finite", False)
        scores = checks.from_numpy(scores)
        part = LocalBatch((scores,), (row_ids, col_ids), None, related, names, finite)
        known, sizes = agreed(part, process_group, same, options)
        processes = processes_of(known, sizes, process_group, scores.device)
        relation = relation_to_all(known, processes, scores.device)
        of_all = spread_columns(scores, processes, 0.0)
        sim = cls.from_scores(of_all, related=relation, **options)
        return sim._shared_by(processes, None)

    def _shared_by(self, processes: Processes, own_cols: Tensor | None) -> Similarity:
        """Become this process's part of a batch; return it."""
        share = Share(processes, 1, processes.sizes[processes.rank], own_cols)
        self._start(AnchorSide(self._matrix, 0, share))
        return self

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        row_ids: IdsLike | None = None,
        col_ids: IdsLike | None = None,
        *,
        engine: Engine = "auto",
        check_finite: bool = False,
        names: checks.Names = checks.ROWS_AND_COLUMNS,
        related: Related | Relation | None = None,
    ) -> Similarity:
        """Return a Similarity of (N, M) scores that a model computed; higher means more similar.

        They may be in any range. Gradients go to the scores. They are not copied: if they are
        modified in place, later calls raise an error.
        """
        scores = checks.from_numpy(scores)
        checks.check_matrix("scores", scores, "(N, M)", check_finite)
        n, m = scores.shape
        relation = relation_of((n, m), (row_ids, col_ids), related, scores.device, names)
        chosen = choose_engine(engine, n * m, 8 * n * m, scores)  # they are held anyway
        matrix = Matrix.of_scores(Embeddings(scores, False), relation, chosen)
        return cls.of_anchors(AnchorSide(matrix, 0))

    def __repr__(self) -> str:
        n, m = self.shape
        return (
            f"Similarity({n} x {m}, engine={self.engine!r}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    # --------------------------------------------------------------------------- what it is made of

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, M) of the matrix; of a shared batch, this process's (N_r, M)."""
        if self.share is not None:
            return self.share.unpadded[self._side], self.totals[1]
        n, m = self._matrix.shape
        return self._turned(n, m)

    def _turned(self, of_matrix_rows: X, of_matrix_columns: X) -> tuple[X, X]:
        """Return what belongs to the rows of this view, and to its columns."""
        if self._side == 0:
            return of_matrix_rows, of_matrix_columns
        return of_matrix_columns, of_matrix_rows

    @property
    def totals(self) -> tuple[int, int]:
        """The numbers of rows and columns; of a shared batch, of all processes."""
        n, m = self._matrix.shape if self.share is None else self.share.processes.totals
        return self._turned(n, m)

    @property
    def engine(self) -> str:
        """The engine in use: ``"dense"``, ``"tiled"`` or ``"triton"``."""
        return self._matrix.engine

    @property
    def engine_for_others(self) -> Engine:
        """The option ``engine`` of other similarities that are made from this one: ``"auto"`` if
        this one keeps its scores, and the engine in use if it does not.
        """
        if self._matrix.in_graph or self._matrix.keeps_scores:
            return "auto"
        return "triton" if self._matrix.engine == "triton" else "tiled"

    @property
    def embeddings(self) -> tuple[Tensor, Tensor] | None:
        """The (N, D) rows and (M, D) columns that were passed in; None for precomputed scores.

        Of a shared batch, this process's rows and the columns of all, each with its padding.
        """
        if self._matrix.embeddings is None:
            return None
        rows, cols = self._matrix.embeddings
        return self._turned(rows.given, cols.given)

    @property
    def vectors(self) -> tuple[Embeddings, Embeddings]:
        """The rows and the columns, with their unit vectors if these are kept."""
        assert self._matrix.embeddings is not None
        rows, cols = self._matrix.embeddings
        return self._turned(rows, cols)

    @property
    def pairs(self) -> Relation:
        """Who matches whom in the matrix."""
        return self._matrix.relation

    @property
    def side(self) -> int:
        """Which side of the matrix its rows are: 0, or 1 after ``T``."""
        return self._side

    @property
    def normalizes(self) -> bool:
        """Whether embeddings are scaled to unit length."""
        embeddings = self._matrix.embeddings
        return embeddings is not None and embeddings[0].normalize

    @property
    def bias(self) -> Bias | None:
        """The biases (N,) and (M,) that were passed in, each a tensor or None."""
        row_bias, col_bias = self._matrix.bias
        if row_bias is None and col_bias is None:
            return None
        return self._turned(row_bias, col_bias)

    @property
    def given_scores(self) -> Tensor | None:
        """The (N, M) precomputed scores that were passed in; None for embeddings."""
        given = self._matrix.given
        if given is None:
            return None
        return given.x.T if self._side else given.x

    @property
    def ids(self) -> Ids:
        """The (N,) and (M,) int64 ids that were passed in, where they alone say who matches; None
        where they were left out, and with sets of labels, groups or a matrix of matches.

        Of a shared batch they belong to :attr:`embeddings`; padding has ``itrloss.NO_ID``.
        """
        relation = self._matrix.relation
        rows, cols = [None if x is None else x.to(self.device) for x in relation.ids_as_passed]
        return self._turned(rows, cols)

    @property
    def own_ids(self) -> Ids:
        """The int64 ids of this process's rows and columns, without padding; of a batch that is not
        shared, :attr:`ids`.
        """
        if self.share is None:
            return self.ids
        processes = self.share.processes
        n, m = self.share.unpadded
        row_ids, col_ids = processes.ids
        return self._turned(processes.own(row_ids)[:n], processes.own(col_ids)[:m])

    @property
    def T(self) -> Similarity:
        """The same similarities with the columns as anchors."""
        return self.of_anchors(AnchorSide(self._matrix, 1 - self._side, self.share))

    @property
    def both(self) -> Anchors:
        """The rows and then the columns as anchors, computed in one pass."""
        rows = AnchorSide(self._matrix, self._side, self.share)
        cols = AnchorSide(self._matrix, 1 - self._side, self.share)
        return Anchors([rows], [cols])

    def towards(self, directions: Directions) -> Anchors:
        """Return the anchors of one direction or of both, with rows that are images.

        ``"image-text"`` has the rows, whose candidates are texts, ``"text-image"`` the columns;
        synonyms of :class:`PairLoss` will do. Of one set, or by targets, ``"both"`` has the rows
        alone.
        """
        if directions == "both" and not self._matrix.relation.one_way:
            return self.both
        directions = as_directions(directions)
        side = 1 - self._side if directions == "text-image" else self._side
        return Anchors([AnchorSide(self._matrix, side, self.share)])

    def sides(self, directions: Directions) -> tuple[int, ...]:
        """Return the sides whose anchors :meth:`towards` has: 0 for rows, 1 for columns."""
        if directions == "both" and self._matrix.relation.one_way:
            return (0,)
        return SIDES[directions]

    def detach(self) -> Similarity:
        """Return the same similarities without a gradient."""
        return self.of_anchors(AnchorSide(self._matrix.detach(), self._side, self.share))

    def relabelled(self, row_ids: Tensor, col_ids: Tensor) -> Similarity:
        """Return the same similarities with other (N,) and (M,) int64 ids, without a gradient."""
        ids = self._turned(row_ids, col_ids)
        matrix = self._matrix.detach(Relation(self._matrix.shape, ids, self.device))
        return self.of_anchors(AnchorSide(matrix, self._side))

    def local(self) -> Similarity:
        """Return this process's anchors with all candidates at hand, for what is no sum.

        A process without anchors gets one that is padding.
        """
        if self.share is None:
            return self
        processes = self.share.processes
        side = self._side
        some = slice(0, max(1, self.share.unpadded[side]))
        ids, related = self._local_relation(some)
        if self._matrix.given is not None:
            scores = self._local_part(self._matrix.given.x, some)
            return Similarity.from_scores(scores, *ids, related=related)
        assert self._matrix.embeddings is not None
        rows, cols = self._matrix.embeddings
        row_bias, col_bias = self._matrix.bias
        own = rows.given
        others = cols.given
        own_bias = row_bias
        others_bias = col_bias
        if side == 1:
            assert self.share.cols is not None
            own = self.share.cols
            others = collectives.gather(rows.given, processes.group)
            own_bias = None if col_bias is None else processes.own(col_bias)
            others_bias = None
            if row_bias is not None:
                others_bias = collectives.gather(row_bias, processes.group)
        bias = (
            None if own_bias is None else own_bias[some],
            None if others_bias is None else processes.existing(others_bias, 1 - side),
        )
        return Similarity(
            own[some],
            processes.existing(others, 1 - side),
            *ids,
            normalize=rows.normalize,
            engine="auto" if self.engine == "dense" else self.engine,  # type: ignore[arg-type]
            bias=bias,
            related=related,
        )

    def _local_relation(self, some: slice) -> tuple[Ids, Related | None]:
        """Return who matches among some of this process's anchors and all candidates."""
        assert self.share is not None
        processes = self.share.processes
        side = self._side
        relation = self._matrix.relation
        if relation.matches is not None:
            matches = self._local_part(relation.matrix(), some)
            return (None, None), Related(matches=matches)
        own_ids = processes.own(processes.ids[side])[some]
        ids = own_ids, processes.existing(processes.ids[1 - side], 1 - side)
        if processes.groups is None:
            return ids, None
        own = processes.own(processes.groups[side])[some]
        others = processes.existing(processes.groups[1 - side], 1 - side)
        return ids, Related((own, others), relation.rule, one_set=relation.one_set)

    def label_sets(self) -> tuple[Tensor, ...]:
        """Return the (N, k) and (M, l) labels, if ids of rows or columns are sets; else nothing."""
        ids = self._matrix.relation.ids
        return tuple(x for x in ids if x is not None and x.dim() == 2)

    def _local_part(self, x: Tensor, some: slice) -> Tensor:
        """Return what a matrix (N_r, M) has of some of this process's anchors with all
        candidates.
        """
        assert self.share is not None
        processes = self.share.processes
        if self._side == 1:
            whole = collectives.gather(x, processes.group)
            x = whole.chunk(processes.world, 1)[processes.rank].T
        return processes.existing(x[some].T, 1 - self._side).T

    def check_finite(self) -> None:
        """Raise a ValueError for an embedding (or score) that is nan or infinite. Synchronises."""
        if self.given_scores is not None:
            checks.require_finite("scores", self.given_scores)
        elif self.embeddings is not None:
            rows, cols = self.embeddings
            checks.require_finite("rows", rows)
            checks.require_finite("cols", cols)
            for bias in self.bias or ():
                if bias is not None:
                    checks.require_finite("bias", bias[None])

    def check_unchanged(self) -> None:
        """Raise a RuntimeError if the input was modified in place after this object was made."""
        self._matrix.check_unchanged()

    # --------------------------------------------------------------------------------------- scores

    def scores(self) -> Tensor:
        """Return a differentiable copy of the (N, M) matrix, which any engine materialises."""
        if self.share is not None:
            return self.local().scores()[: self.shape[0]]
        self.check_unchanged()
        scores = self._matrix.scores()
        scores = scores.T if self._side else scores
        return scores.clone(memory_format=torch.contiguous_format)

    def pair_scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the (P,) scores of row ``rows[p]`` with column ``cols[p]``.

        Their gradient goes to these embeddings. ``rows`` and ``cols`` are (P,) int64 indices, at
        least 0: negative ones do not count from the end.
        """
        if self.share is not None:
            return self.local().pair_scores(rows, cols)
        if self._side:
            return self._matrix.pair_scores(cols, rows)
        return self._matrix.pair_scores(rows, cols)

    def positive_scores(self) -> Tensor:
        """Return a copy of the (P,) scores of the positive pairs, sorted by the rows of the
        matrix.
        """
        return self._matrix.positive_scores().clone()

    def mean_of_pairs(
        self,
        value: Callable[[Tensor, Tensor, Tensor], Tensor],
        of_rows: Tensor,
        of_cols: Tensor,
    ) -> Tensor:
        """Return the (N,) means of ``value(S_ip, row_i, column_p)`` over each row's positives p, by
        the weights of their matches.

        ``of_rows`` and ``of_cols`` are values (N,) and (M,), of a shared batch those of this
        process. A row without positives has 0.
        """
        rows = self.gathered(of_rows)
        cols = self.T.gathered(of_cols)
        pairs = self._matrix.relation
        if self.one_to_one:
            return value(self.positive_scores(), rows.clone(), cols.clone())
        if pairs.listable:
            i, j = self._turned(*pairs.listed)
            values = value(self.positive_scores(), rows[i], cols[j])
            if self.has_weights:
                values = values * self._listed_weights()
            total = segment_sum(values, i, len(rows))
        else:
            whole = self._matrix.scores()
            excluded = pairs.all_excluded("positives")
            assert excluded is not None
            scores, excluded = (x.T if self._side else x for x in (whole, excluded))
            values = value(scores, rows[:, None], cols)
            if self.has_weights:
                weights = pairs.weight_matrix().to(self.dtype)
                values = values * (weights.T if self._side else weights)
            total = values.masked_fill(excluded, 0.0).sum(1)
        return self.merged(total) / self.positive_weights

    def largest_of_pairs(self, of_cols: Tensor) -> Tensor:
        """Return the (N,) largest of columns' values (M,) over each row's positives, 0 without any,
        as constants of a gradient; for arguments see :meth:`mean_of_pairs`.
        """
        cols = self.T.gathered(of_cols.detach())
        pairs = self._matrix.relation
        if self.one_to_one:
            return cols.clone()
        if pairs.listable:
            i, j = self._turned(*pairs.listed)
            top = cols.new_full((sum(self.whole_sizes),), -torch.inf)
            top = top.scatter_reduce(0, i, cols[j], "amax")
        else:
            excluded = pairs.all_excluded("positives")
            assert excluded is not None
            excluded = excluded.T if self._side else excluded
            top = cols.expand_as(excluded).masked_fill(excluded, -torch.inf).amax(1)
        if self.exchange is not None:
            top = self.exchange.merged_largest(top)
        return top.masked_fill(top == -torch.inf, 0.0)

    def blocks(self, size: int = 2**22) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the rows in order, each with a copy of its scores (B, M).

        ``size``: the number of scores of a block at most.
        """
        local = self.local()
        n = self.shape[0]
        for part, block in local._matrix.blocks(local._side, size):
            if part.start < n:
                yield slice(part.start, min(part.stop, n)), block[: n - part.start]

    # ------------------------------------------------------------------- answers without a gradient

    def topk(self, k: int, bias: Tensor | None = None, *, below: Limit = None) -> TopK:
        """Return the (N, k) columns with the highest ``S_ij + bias_j`` for each row. No gradient.

        Of equal scores, the lower column comes first. With ``below``, a number or (N,), of those
        for which that is lower; -inf and -1 where there are fewer.
        """
        k = as_size("k", k)
        if k > self.shape[1]:
            raise ValueError(f"k: expected a number from 1 to {self.shape[1]}, got {k}")
        top = self.ranked(k, bias, ties=None, below=below).top
        if below is None:
            return top
        return TopK(top.values, top.indices.masked_fill(top.values == -torch.inf, -1))

    def ranks(self, bias: Tensor | None = None, *, ties: str = "pessimistic") -> Tensor:
        """Return the (N, P) ranks (from 1) of each row's positives by ``S_ij + bias_j``, ascending.

        P is the largest number of positives of a row; rows with fewer are padded with 0. With
        ``ties="pessimistic"`` a negative that scores the same as a positive is ahead of it, with
        ``"optimistic"`` behind it. The positive's score comes from the same product as its rivals',
        so rounding cannot move it. Memory grows with N times P. No gradient.
        """
        return self.ranked(0, bias, ties=ties).ranks

    def ranked(
        self,
        k: int,
        bias: Tensor | None = None,
        *,
        ties: str | None = "pessimistic",
        below: Limit = None,
        relevance: Relevance | None = None,
    ) -> Ranking:
        """Return :meth:`ranks` (empty for ``ties=None``) and the k best columns from one pass.

        k may exceed M. Equal scores are in the order of the ranks: with ``ties="pessimistic"``
        negatives come first, and for ``ties=None`` the lower column. ``relevance`` takes the place
        of the ids, and says who is no candidate: -inf and -1 where there are fewer than k. Right
        ones that are no candidates have the last ranks.
        """
        if k != 0:
            k = as_size("k", k)
        one_of("ties", ties, "pessimistic", "optimistic", None)
        if self.share is not None:
            return self._ranked_locally(k, bias, ties, below, relevance)
        bias = as_bias("bias", bias, self.shape[1], self.device)
        limit = self._limit("below", below)
        least = torch.finfo(self.dtype).min
        optimistic = ties == "optimistic"
        judged = relevance
        if ties is not None and relevance is None:
            judged = Relevance(self._matrix.relation.places(self._side))

        def parts() -> Iterator[tuple[slice, Ranking]]:
            """Yield slices of the rows, each with its ranking."""
            for part, scores in self._scores_to_rank(bias, least):
                own = None if judged is None else judged.part(part)
                if own is not None and own.excluded is not None:
                    # below all scores, so that nobody can tie with them
                    scores.masked_fill_(own.excluded(slice(0, len(scores))), -torch.inf)
                rivals = limited_scores(scores, limit, part, least)
                top = self._best_of(rivals, k, own, optimistic)
                ranks = top.indices[:, :0]
                grades = None
                if own is not None:
                    by_ids = relevance is None
                    ranks, grades = self._ranks_of(scores, own, part, optimistic, by_ids)
                yield part, Ranking(ranks, top, grades)

        return ranking.collected(self.shape[0], parts())

    def _scores_to_rank(self, bias: Tensor | None, least: float) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the rows, each with its scores (B, M) plus ``bias``, at least ``least``.

        They are float64 if a bias is. Columns that do not exist have -inf.
        """
        of_rows, of_cols = self._separate_biases(bias)
        matrix = self._matrix if self.bias is None else self._matrix.without_bias()
        ignored = self._matrix.relation.ignored[1 - self._side]
        for part, scores in matrix.blocks(self._side):
            scores = biased(scores, None if of_rows is None else of_rows[part], of_cols)
            scores.clamp_min_(least)
            if ignored is not None:
                scores.masked_fill_(ignored, -torch.inf)
            yield part, scores

    def _separate_biases(self, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return what ranking adds to the products of embeddings: biases (N,) of rows, (M,) of
        columns.

        They are float64 where the matrix has biases: next to large ones, float32 would lose the
        digits that tell candidates apart.
        """
        if self.bias is None:
            return None, bias
        of_rows, of_cols = (None if x is None else x.detach().double() for x in self.bias)
        total = torch.zeros(self.shape[1], dtype=torch.float64, device=self.device)
        for x in (of_cols, bias):
            if x is not None:
                total = total + x
        return of_rows, total

    def _best_of(self, scores: Tensor, k: int, own: Relevance | None, optimistic: bool) -> TopK:
        """Return the best columns of some rows by their scores (B, M), as :meth:`ranked` does."""
        least = torch.finfo(self.dtype).min
        values, indices = ranking.best(scores, min(k, self.shape[1]), least, own, optimistic)
        indices = indices.masked_fill(values == -torch.inf, -1)
        return TopK(values.masked_fill(values == least, -torch.inf).to(self.dtype), indices)

    def _ranked_locally(
        self,
        k: int,
        bias: Tensor | None,
        ties: str | None,
        below: Limit,
        relevance: Relevance | None,
    ) -> Ranking:
        """Return :meth:`ranked` of a batch that processes share."""
        if relevance is not None:
            raise ValueError("relevance: expected None for a batch that processes share")
        local = self.local()
        n = self.shape[0]
        if isinstance(below, Tensor) and below.numel() > 1:
            below = below[: len(local)]
        ranks, top, _ = local.ranked(k, bias, ties=ties, below=below)
        return Ranking(ranks[:n], TopK(top.values[:n], top.indices[:n]))

    def _ranks_of(
        self,
        scores: Tensor,  # (B, M), overwritten
        own: Relevance,  # of these rows
        part: slice,  # of the rows
        optimistic: bool,
        by_ids: bool,  # whether positives are those of equal ids
    ) -> tuple[Tensor, Tensor | None]:
        """Return the (B, P) ranks of the positives of some rows, and their grades, if they have
        any.
        """
        positives = own.positives
        thresholds = scores.gather(1, positives.clamp_min(0))
        thresholds = thresholds.masked_fill_(positives < 0, torch.nan)
        whole = slice(0, scores.shape[1])
        if not by_ids:
            rows, places = (positives >= 0).nonzero(as_tuple=True)
            scores[rows, positives[rows, places]] = -torch.inf
        elif self._side:
            self._matrix.relation.exclude_(scores.T, (whole, part), -torch.inf)
        else:
            self._matrix.relation.exclude_(scores, (part, whole), -torch.inf)
        grades = None
        if own.grades is not None:
            grades = ranking.ranked_grades(thresholds, own.grades, optimistic)
        return ranking.ranks(thresholds, scores, optimistic), grades


# ------------------------------------------------------------------------------------------ helpers


def biased(scores: Tensor, of_rows: Tensor | None, of_cols: Tensor | None) -> Tensor:
    """Return scores (B, M) plus biases (B,) and (M,), in float64 if the biases are."""
    if of_cols is not None:
        scores = scores + of_cols
    if of_rows is not None:
        scores = scores + of_rows[:, None]
    return scores


def limited_scores(scores: Tensor, limit: Value | None, part: slice, least: float) -> Tensor:
    """Return scores (B, M) with ``least`` in place of those that are not below a limit."""
    if limit is None:
        return scores
    if has_each(limit):
        limit = limit[part, None]
    return scores.masked_fill(scores >= limit, least)
