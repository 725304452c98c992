"""The similarity matrix of two sets of embeddings, as an object that answers questions and need never exist."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import checks
from .checks import as_bias, as_params, check_number, check_size, one_of
from .engine import ranking
from .engine.answers import term_name
from .engine.matrix import MEMORY_BUDGET, Matrix, choose_engine
from .engine.pairs import segment_sum
from .engine.scores import Ids, compute_dtype, host_may_read, inverse_norms

Engine = Literal["auto", "dense", "tiled", "triton"]
Over = Literal["negatives", "all"]
Reduction = Literal["mean", "sum", "none"]
Term = Callable[..., Tensor]
Self = TypeVar("Self", bound="Anchors")

_RANGE = 60.0  # exp(±60) and long sums of it are ordinary float32 numbers


class MeanStd(NamedTuple):
    """Mean and population standard deviation (at least 1e-6) of each anchor's negatives: (A,), 0 without any."""

    mean: Tensor
    std: Tensor


class Hardest(NamedTuple):
    """Score (A,) and index (A,) int64 of each anchor's highest-scoring negative; -inf and -1 where it has none."""

    values: Tensor
    indices: Tensor


class TopK(NamedTuple):
    """The best candidates of an anchor, best first: (A, k) scores and indices."""

    values: Tensor
    indices: Tensor


class Anchors:
    """Whoever asks about similarities: rows, columns, both, or the rows of several matrices.

    Answers are one vector (A,) over all anchors, group after group; :meth:`split` takes it apart. A parameter holds one
    value per anchor, in the same order, or one for all. All answers are differentiable unless they say otherwise.

    Anchors come from a :class:`Similarity`, which is one (its rows), from its ``both``, and from :meth:`together`.
    """

    #: For each group of anchors: the matrices that hold its candidates, one after the other, and as which side of each.
    _groups: tuple[tuple[tuple[Matrix, int], ...], ...]

    @classmethod
    def _of(cls: type[Self], *groups: Sequence[tuple[Matrix, int]]) -> Self:
        view = object.__new__(cls)
        view._groups = tuple(tuple(group) for group in groups)
        return view

    @staticmethod
    def together(*anchors: Anchors) -> Anchors:
        """Return the anchors of all, one after the other, which ask each their own candidates."""
        return Anchors._of(*(group for x in anchors for group in x._groups))

    @staticmethod
    def pooled(*anchors: Anchors) -> Anchors:
        """Return the same anchors with the candidates of all: a gallery in blocks. One block's rows are the other's.

        >>> v, w = torch.randn(3, 4), torch.randn(6, 4)
        >>> ids = torch.arange(3), torch.arange(6) % 3
        >>> blocks = [Similarity(v, x, ids[0], i) for x, i in zip(w.split(2), ids[1].split(2))]
        >>> whole = Similarity(v, w, *ids).logsumexp(5.0)
        >>> torch.allclose(Anchors.pooled(*blocks).logsumexp(5.0), whole, atol=1e-6)
        True
        """
        groups = list(zip(*(x._groups for x in anchors), strict=True))
        if any(len({m.shape[side] for group in same for m, side in group}) > 1 for same in groups):
            raise ValueError("anchors: expected as many anchors in each block")
        return Anchors._of(*([part for group in same for part in group] for same in groups))

    # ------------------------------------------------------------------------------------------- what there is

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Number of anchors in each group."""
        return [group[0][0].shape[group[0][1]] for group in self._groups]

    def __len__(self) -> int:
        """Number of anchors, A."""
        return sum(self.sizes)

    def __bool__(self) -> bool:
        return True

    @property
    def _first(self) -> Matrix:
        return self._groups[0][0][0]

    @property
    def dtype(self) -> torch.dtype:
        """Type of scores and answers: float64 for float64 inputs, else float32."""
        return compute_dtype(self._first.rows)

    @property
    def device(self) -> torch.device:
        """Where inputs and answers live."""
        return self._first.rows.device

    @property
    def one_to_one(self) -> bool:
        """Whether anchor i of each group matches its candidate i and nothing else."""
        return all(len(group) == 1 and group[0][0].pairs.one_to_one for group in self._groups)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what each group holds of a tensor (..., A)."""
        return x.split(self.sizes, -1)

    def groups(self) -> list[Anchors]:
        """Return the anchors of each group by themselves."""
        return [Anchors._of(group) for group in self._groups]

    def detach(self: Self) -> Self:
        """Return the same anchors of similarities without a gradient."""
        known = {id(m): m.detach() for group in self._groups for m, _ in group}
        return self._of(*([(known[id(m)], side) for m, side in group] for group in self._groups))

    def _counted(self, count: Callable[[Matrix, int], Any]) -> Tensor:
        return torch.cat([sum(count(m, side) for m, side in group) for group in self._groups])  # type: ignore[misc]

    @property
    def positive_counts(self) -> Tensor:
        """(A,) int64: how many candidates match each anchor."""
        return self._counted(lambda m, side: m.pairs.counts(side))

    @property
    def negative_counts(self) -> Tensor:
        """(A,) int64: how many candidates do not match each anchor."""
        return self._counted(lambda m, side: m.pairs.negative_counts(side))

    # ------------------------------------------------------------------------------------------------ questions

    def _params(self, name: str, *params: Any) -> list[Tensor]:
        return as_params(name, params, len(self), self.dtype, self.device)

    def _sums(self, key: str, *params: Tensor, over: str = "negatives") -> Tensor:
        """(K, A) sums of an answer; both sides of one matrix out of one visit."""
        if len(self._groups) == 1 and len(self._groups[0]) == 1:
            ((matrix, side),) = self._groups[0]
            return matrix.reduce(key, (side,), *params, over=over)
        visits: dict[int, tuple[Matrix, list[tuple[int, int]]]] = {}
        for g, group in enumerate(self._groups):
            for matrix, side in group:
                visits.setdefault(id(matrix), (matrix, []))[1].append((side, g))
        parts = [p if p.shape[-1] == 1 else self.split(p) for p in params]
        sums: list[list[Tensor]] = [[] for _ in self._groups]
        for matrix, places in visits.values():
            places.sort()
            mine = [p if isinstance(p, Tensor) else torch.cat([p[g] for _, g in places], -1) for p in parts]
            found = matrix.reduce(key, [side for side, _ in places], *mine, over=over)
            for (_, g), x in zip(places, found.split([self.sizes[g] for _, g in places], 1), strict=True):
                sums[g].append(x)
        if key == "peak":
            return torch.cat([functools.reduce(torch.maximum, x) for x in sums], 1)
        return torch.cat([functools.reduce(torch.add, x) for x in sums], 1)

    def logsumexp(self, scale: float | Tensor = 1.0, *, over: Over = "negatives") -> Tensor:
        """Return (A,) ``log sum_j exp(scale_i S_ij)`` over each anchor's negatives, or over all candidates.

        ``scale`` is a number, a tensor of one value, or one of (A,); it gets its gradient. -inf for an empty sum.
        """
        one_of("over", over, "negatives", "all")
        (a,) = self._params("scale", scale)
        top = self._shift(a)
        if top is not None:
            (total,) = self._sums("exp", a, top, over=over)
            if not float(top) or float(total.detach().amin()) >= math.exp(-_RANGE):
                return total.log() + top
        with torch.no_grad():
            (top,) = self._sums("peak", a.detach(), over=over)
            top = top.masked_fill(top == -math.inf, 0.0)
        (total,) = self._sums("exp", a, top, over=over)
        return total.log() + top

    def _shift(self, scale: Tensor) -> Tensor | None:
        """(1,) what can be subtracted from all exponents instead of each anchor's maximum; None if nothing can.

        Scores lie in [-1, 1], so ``a S - shift <= 60``. Up to a scale of 60 no sum underflows; beyond, one does only if
        its best score is below ``1 - 120 / a``, which is looked for. One pass over the scores less.
        """
        if not (all(m.bounded for group in self._groups for m, _ in group) and host_may_read(scale)):
            return None
        largest = float(scale.detach().abs().amax())
        return scale.new_full((1,), max(0.0, largest - _RANGE)) if largest <= 3 * _RANGE else None

    def mean_std(self) -> MeanStd:
        """Return mean and population standard deviation of each anchor's negatives, (A,) each."""
        count = self.negative_counts
        centre = self._centre()
        first, second = self._sums("moments", centre) / count.clamp_min(1)
        mean = torch.where(count > 0, centre + first, 0.0)
        return MeanStd(mean, (second - first.square()).clamp_min(1e-12).sqrt())

    @torch.no_grad()
    def _centre(self) -> Tensor:
        """(A,) the mean over all candidates, near that of the negatives: squares of distances lose no digits."""
        means = [[_mean_score(m, side) * m.shape[1 - side] for m, side in group] for group in self._groups]
        sizes = [sum(m.shape[1 - side] for m, side in group) for group in self._groups]
        return torch.cat([sum(x) / size for x, size in zip(means, sizes, strict=True)])  # type: ignore[arg-type]

    def entropy(self, temperature: float = 1.0) -> Tensor:
        """Return (A,) ``-sum_{j in neg(i)} P_ij log2 P_ij``, ``P_i`` the softmax of ``S_i / temperature`` over all."""
        check_number("temperature", temperature, positive=True)
        (a,) = self._params("temperature", 1 / temperature)
        (bits,) = self._sums("information", a, self.logsumexp(a, over="all"))
        return bits.clamp_min(0.0) / math.log(2)

    def sum(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return (A,) ``sum_{j in neg(i)} term(S_ij, *params_i)``, 0 for an anchor without negatives.

        ``term`` is a function that :func:`itrloss.pair_term` registered; parameters get their gradients.
        """
        return self._sums(term_name(term), *self._params("params", *params))[0]

    def sum_of_positives(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} term(S_ip, *params_i)``, 0 for an anchor without positives.

        ``term`` is as in :meth:`sum`. The gradient goes straight to the embeddings of the pairs.
        """
        name, given = term_name(term), self._params("params", *params)
        if not all(m.pairs.listable for group in self._groups for m, _ in group):
            return self._sums(name, *given, over="positives")[0]
        shared = all(p.numel() == 1 for p in given)
        known: dict[int, Tensor] = {}
        found, start = [], 0
        for group, size in zip(self._groups, self.sizes, strict=True):
            sums = []
            for matrix, side in group:
                anchor = None if matrix.pairs.one_to_one else matrix.pairs.listed[side]
                if not shared or id(matrix) not in known:
                    own = [p if p.numel() == 1 else p[start : start + size] for p in given]
                    own = [p if anchor is None or p.numel() == 1 else p[anchor] for p in own]
                    known[id(matrix)] = term(matrix.positive_scores, *own).expand_as(matrix.positive_scores)
                sums.append(segment_sum(known[id(matrix)], anchor, size))
            found.append(functools.reduce(torch.add, sums))
            start += size
        return torch.cat(found)

    def mean_of_positives(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return (A,) the mean of a term over each anchor's positives, 0 without any."""
        sums = self.sum_of_positives(term, *params)
        return sums if self.one_to_one else sums / self.positive_counts.clamp_min(1)

    def hinge_sum(self, margin: float) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} sum_{j in neg(i)} max(margin - S_ip + S_ij, 0)``.

        Memory for all positive pairs, and work for the largest number of positives that an anchor has.
        """
        if any(len(group) > 1 for group in self._groups):
            raise ValueError("hinge_sum: expected the candidates of an anchor in one matrix")
        tables = [_positive_table(m, side, math.inf) for ((m, side),) in self._groups]
        slots = max(len(t) for t in tables)
        padded = [torch.cat((t, t.new_full((slots - len(t), t.shape[1]), math.inf))) for t in tables]
        return self._sums("hinges", torch.cat(padded, 1) - margin)[0]

    def hardest_negatives(self) -> Hardest:
        """Return score and index (A,) of each anchor's highest-scoring negative; the gradient goes to the pair."""
        found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for m, sides in self._visits():
            with torch.no_grad():  # inside, as the compiler refuses a decorator
                best = ranking.hardest(m, sides)
            for side, (value, index) in zip(sides, best, strict=True):
                found[id(m), side] = _with_gradient(m, side, value, index), index
        groups = []
        for group in self._groups:
            values, indices = found[id(group[0][0]), group[0][1]]
            offset = group[0][0].shape[1 - group[0][1]]
            for m, side in group[1:]:
                more, at = found[id(m), side]
                better = more > values
                values, indices = torch.where(better, more, values), torch.where(better, at + offset, indices)
                offset += m.shape[1 - side]
            groups.append((values, indices))
        values, indices = (torch.cat(x) for x in zip(*groups, strict=True))
        return Hardest(values, indices)

    def _visits(self) -> Iterator[tuple[Matrix, list[int]]]:
        """Each matrix with the sides that are asked of it."""
        matrices = {id(m): m for group in self._groups for m, _ in group}
        for k, m in matrices.items():
            yield m, sorted(side for group in self._groups for x, side in group if id(x) == k)

    # --------------------------------------------------------------------------------------- losses' reduction

    def valid(self) -> Tensor | None:
        """Return (A,) bool: which anchors have a positive and a negative; None: all do."""
        if self.one_to_one and all(m.shape[1 - side] > 1 for ((m, side),) in self._groups):
            return None
        return (self.positive_counts > 0) & (self.negative_counts > 0)

    def reduce(self, values: Tensor, reduction: Reduction, valid: Tensor | None = None) -> Any:
        """Return the means over each group's ``valid`` anchors (default: :meth:`valid`) added, the sum, or the parts.

        An anchor that is not valid contributes 0 and does not count in a mean.
        """
        one_of("reduction", reduction, "mean", "sum", "none")
        valid = self.valid() if valid is None else valid
        if valid is not None:
            values = torch.where(valid, values, 0.0)
        if reduction == "none":
            return self.split(values)
        if reduction == "sum":
            return values.sum()
        if valid is None and len(set(self.sizes)) == 1:
            return values.sum() / self.sizes[0]
        counts = self.sizes if valid is None else [v.sum().clamp_min(1) for v in self.split(valid)]
        return sum(x.sum() / count for x, count in zip(self.split(values), counts, strict=True))

    def per_pair(self, sums: Tensor) -> Tensor:
        """Return sums (A,) over positives, scaled so that the mean over a group's valid anchors is that over pairs."""
        valid = self.valid()
        if self.one_to_one or valid is None:
            return sums
        sides = zip(self.split(sums), self.split(valid), self.split(self.positive_counts), strict=True)
        # In this order: a quotient of counts would be float32.
        return torch.cat([x * v.sum().clamp_min(1) / (n * v).sum().clamp_min(1) for x, v, n in sides])


def _mean_score(m: Matrix, side: int) -> Tensor:
    """(A,) mean over all candidates."""
    scores = m.scores() if m.engine == "dense" else m.source().matrix
    if scores is not None:
        return scores.detach().mean(1 - side)
    own, other = (m.rows, m.cols) if side == 0 else (m.cols, m.rows)
    assert own is not None and other is not None
    average = torch.zeros(own.shape[1], dtype=compute_dtype(own), device=own.device)
    for part in _parts(other, m.normalize[1 - side]):
        average += part.sum(0)
    return torch.cat([part @ average for part in _parts(own, m.normalize[side])]) / len(other)


def _parts(x: Tensor, normalize: bool) -> Iterator[Tensor]:
    from .engine.scores import chunks, scaled

    x = x.detach()
    for part in chunks(x):
        yield scaled(x[part], inverse_norms(x[part]) if normalize else None)


def _positive_table(m: Matrix, side: int, empty: float) -> Tensor:
    """(slots, A) scores of each anchor's positives, ``empty`` where it has fewer."""
    if m.pairs.one_to_one:
        return m.positive_scores[None]
    anchor, other, slot = m.pairs.slots(side)
    scores = m.pair_scores(*((anchor, other) if side == 0 else (other, anchor)))
    table = scores.new_full((int(slot.max()) + 1 if len(slot) else 0, m.shape[side]), empty)
    return table.index_put((slot, anchor), scores)


def _with_gradient(m: Matrix, side: int, value: Tensor, index: Tensor) -> Tensor:
    """The scores of each anchor's best pair, with their gradient; -inf where there is none."""
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (m.rows, m.cols))):
        return value
    anchor, other = torch.arange(len(index), device=index.device), index.clamp_min(0)
    scores = m.pair_scores(*((anchor, other) if side == 0 else (other, anchor)))
    return scores.masked_fill(index < 0, -math.inf)


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
    auto   dense up to 65 536 scores (a million on accelerators); beyond, triton on CUDA, else tiled
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
        options: dict[str, Any] = {"normalize": (normalize, normalize), "memory_budget": memory_budget}
        made = self._made(rows, cols, row_ids, col_ids, engine=engine, check_finite=check_finite, **options)
        self._groups, self._ids = made._groups, made._ids

    @classmethod
    def _made(
        cls,
        rows: Tensor,
        cols: Tensor | None,
        row_ids: Tensor | None,
        col_ids: Tensor | None,
        *,
        normalize: tuple[bool, bool] = (True, True),
        engine: str = "auto",
        memory_budget: int | None = None,
        check_finite: bool = False,
        names: checks.Names = checks.ROWS_AND_COLUMNS,
    ) -> Similarity:
        """Check and build, with errors in the caller's names."""
        if cols is None:
            checks.check_matrix("scores", rows, "(N, M)", check_finite)
            ids = checks.check_ids(row_ids, col_ids, *rows.shape, rows.device, names)
            scores = rows.to(compute_dtype(rows))
            return cls._unchecked(scores, None, ids, engine=engine, rows_labelled=row_ids is not None)
        checks.check_embeddings(rows, cols, check_finite, names)
        ids = checks.check_ids(row_ids, col_ids, rows.shape[0], cols.shape[0], rows.device, names)
        return cls._unchecked(rows, cols, ids, normalize, engine, memory_budget, row_ids is not None)

    @classmethod
    def _unchecked(
        cls,
        rows: Tensor,
        cols: Tensor | None,
        ids: Ids,
        normalize: tuple[bool, bool] = (True, True),
        engine: str = "auto",
        memory_budget: int | None = None,
        rows_labelled: bool = True,
        bounded: bool | None = None,
    ) -> Similarity:
        """Build of checked input. ``bounded``: scores lie in [-1, 1]; by default where both sides are normalised."""
        budget = (0 if engine == "tiled" else MEMORY_BUDGET) if memory_budget is None else memory_budget
        numel = rows.shape[0] * (rows.shape[1] if cols is None else cols.shape[0])
        if cols is rows:
            cols = cols.view_as(cols)  # the compiler refuses to see the same tensor twice
        chosen = choose_engine(engine, numel, budget, rows)
        matrix = Matrix(rows, cols, _diagonal_if_unique(ids), normalize, chosen, budget)
        matrix.bounded = cols is not None and all(normalize) if bounded is None else bounded
        sim = cls._of([(matrix, 0)])
        sim._ids = (ids[0] if rows_labelled else None, ids[1])
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
    ) -> Similarity:
        """Return the similarity matrix (N, M) that some model computed already; higher means more similar, any range.

        The gradient is that of the scores. They are not copied: what writes to them makes later answers an error.
        """
        return cls._made(scores, None, row_ids, col_ids, engine=engine, check_finite=check_finite)

    _ids: Ids = (None, None)

    def __repr__(self) -> str:
        n, m = self.shape
        return f"Similarity({n} x {m}, engine={self.engine!r}, dtype={self.dtype}, device={self.device})"

    @property
    def _side(self) -> int:
        return self._groups[0][0][1]

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
        return self._ids[::-1] if self._side else self._ids

    @property
    def T(self) -> Similarity:
        """The same similarities with the columns as anchors."""
        return self._seen([(self._first, 1 - self._side)])

    def _seen(self, group: list[tuple[Matrix, int]]) -> Similarity:
        view = Similarity._of(group)
        view._ids = self._ids
        return view

    def detach(self) -> Similarity:
        """Return the same similarities without a gradient."""
        return self._seen([(self._first.detach(), self._side)])

    @functools.cached_property
    def both(self) -> Anchors:
        """The rows and then the columns as anchors, answered out of one pass."""
        return Anchors._of([(self._first, self._side)], [(self._first, 1 - self._side)])

    def check_finite(self) -> None:
        """Raise a ValueError if an embedding (or score) is nan or infinite. Synchronises with an accelerator."""
        named = {"scores": self._first.rows} if self._inputs is None else dict(zip(("rows", "cols"), self._inputs))  # noqa: B905
        for name, x in named.items():
            checks.require_finite(name, x)

    def scores(self) -> Tensor:
        """Return a copy of the (N, M) matrix itself, differentiable. It is materialised, whatever the engine."""
        scores = self._first.scores()
        return (scores.T if self._side else scores).clone(memory_format=torch.contiguous_format)

    def pair_scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the (P,) scores of row ``rows[p]`` with column ``cols[p]``; their gradient touches no other embeddings.

        ``rows`` and ``cols`` are (P,) int64 indices; a negative one is not understood.
        """
        return self._first.pair_scores(*((cols, rows) if self._side else (rows, cols)))

    def blocks(self, size: int = 2**22) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows after the others, and a copy of their scores without a gradient, ``size`` at most at a time."""
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


def _diagonal_if_unique(ids: Ids) -> Ids:
    """None on both sides if the ids only say that row i matches column i, which then takes no searching for pairs."""
    rows, cols = ids
    if rows is None or cols is None or not host_may_read(rows):
        return ids
    return (None, None) if torch.equal(rows, cols) and len(rows.unique()) == len(rows) else ids
