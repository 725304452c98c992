"""Chooses the engine and puts each question to it: what all views of one :class:`itrloss.Similarity` share.

An answer covers the rows, the columns or both; ``asked`` says which. Numbers (A,) of all asked anchors follow each
other in one vector, the rows' before the columns'; other results come as a pair.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import operators as ops
from . import ranking, reference
from .memory import MemoryLogSumExp
from .positives import Positives
from .softmax import ENTROPY, MEAN
from .terms import needs_gradient, term_values
from .tiles import PANEL, Asked, Kept, Pair, Source, apart, compute_dtype

Over = Literal["negatives", "all"]

_MANY = 2**20  # scores from which on their products weigh more than the launches of a loss
ENGINES = ("reference", "dense", "tiled", "triton")


def check_engine(engine: str) -> None:
    """Raise a ValueError for an unknown name."""
    if engine not in ("auto", *ENGINES):
        raise ValueError(f"engine: expected 'auto', 'reference', 'dense', 'tiled' or 'triton', got {engine!r}")


def choose(engine: str, scores: int, budget: int, x: Tensor) -> str:
    """The engine that ``"auto"`` stands for, for so many ``scores`` of embeddings like ``x``; a name is left as it is.

    Raises:
        ImportError, TypeError, ValueError: Triton is asked for and not there, or for float64, or on the CPU.
    """
    check_engine(engine)
    dtype = compute_dtype(x)
    if engine == "auto":
        dense = scores * dtype.itemsize <= budget
        pays = not dense or (x.dtype != torch.float32 and scores >= _MANY)
        if pays and x.device.type == "cuda" and dtype == torch.float32 and _kernels_work(x.device, dense):
            return "triton"
        return "dense" if dense else "tiled"
    if engine == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ImportError("engine='triton' needs Triton, which comes with PyTorch for CUDA: pip install triton")
        if dtype != torch.float32:
            raise TypeError("engine: 'triton' computes in float32, and the embeddings are float64")
        if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("engine: 'triton' needs an accelerator (or TRITON_INTERPRET=1), got embeddings on the CPU")
    return engine


def _kernels_work(device: torch.device, multiplying: bool) -> bool:
    """Whether Triton is there and works; and multiplies half precision, many times as fast as others do float32."""
    if importlib.util.find_spec("triton") is None:
        return False
    from .triton import blocks, check

    return (blocks.multiplies(device) or not multiplying) and check.works(str(device))


class Moments(NamedTuple):
    """Mean and population standard deviation of each anchor's negatives: (N,), float32 at least."""

    mean: Tensor
    std: Tensor


class Hardest(NamedTuple):
    """Score (N,) and index (N,) int64 of each anchor's highest-scoring negative; -inf and -1 where it has none."""

    values: Tensor
    indices: Tensor


class Matrix:
    """The inputs, the engine, and the scores once they were needed.

    A *memory* has columns of unit length that get no gradient, of which only the first ``valid`` exist; it answers for
    the rows.
    """

    given_ids: Pair = (None, None)  # as they were given: also those dropped that only say what leaving them out says

    def __init__(
        self,
        rows: Tensor,
        cols: Tensor | None,
        ids: Pair,
        normalize: bool,
        engine: str,
        inv: Pair | None = None,
        valid: Tensor | None = None,
    ):
        self.memory = valid is not None
        if valid is not None and cols is not None and not torch.compiler.is_compiling():
            cols, ids, valid = cols[: int(valid)], (ids[0], _given(ids[1])[: int(valid)]), None
        if not torch.is_grad_enabled():  # what is made under no_grad has no gradient, whatever the engine and the time
            rows, cols = rows.detach(), None if cols is None else cols.detach()
        self.rows, self.cols, self.ids, self.normalize, self.engine = rows, cols, ids, normalize, engine
        self._versions = None if torch.compiler.is_compiling() else self._seen()
        self.shape = (rows.shape[0], rows.shape[1] if cols is None else cols.shape[0])
        self.bounded = normalize and cols is not None
        self.valid = valid
        self._scores = rows if cols is None else None
        self._kept = Kept()
        self._diagonal: Tensor | None = None
        self._inv: Pair = inv or (None, None)
        self._usual = False  # whether all lengths are known to be usual
        if inv is None and self.bounded and cols is not None and engine != "reference":
            self._measure(rows.detach(), cols.detach())

    def _measure(self, rows: Tensor, cols: Tensor) -> None:
        first = second = None
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():
            first, second = ops.usual_inverse_norms(rows), ops.usual_inverse_norms(cols)
        self._usual = first is not None and second is not None
        self._inv = (
            ops.inverse_norms(rows) if first is None else first,
            ops.inverse_norms(cols) if second is None else second,
        )

    def _seen(self) -> list[int]:
        return [x._version for x in (self.rows, self.cols) if x is not None and not x.is_inference()]

    def _check_unchanged(self) -> None:
        """Lengths and scores are kept between answers, so that a queue written meanwhile would give nonsense."""
        if self._versions is not None and not torch.compiler.is_compiling() and self._versions != self._seen():
            what = "scores were" if self.cols is None else "embeddings were"
            raise RuntimeError(f"the {what} modified in place after this Similarity was made; make another one")

    def detach(self, later: bool = True) -> Matrix:
        """The same scores without a gradient; a dense product is shared, not repeated.

        ``later``: they may be asked for after a backward pass, when the embeddings may be others.
        """
        cols = None if self.cols is None else self.cols.detach()
        twin = Matrix(self.rows.detach(), cols, self.ids, self.normalize, self.engine, self._inv)
        twin._usual = self._usual
        twin._versions, twin.memory, twin.valid = self._versions, self.memory, self.valid
        twin.given_ids = self.given_ids
        twin._diagonal = None if self._diagonal is None else self._diagonal.detach()
        if self.memory and self.engine == "dense":
            self._keep()
        elif cols is not None and self.engine not in ("tiled", "triton"):
            twin._scores = self._formed().detach()
        twin._kept = self._kept
        twin._kept.readers += later
        return twin

    def scores(self) -> Tensor:
        """(N, M), differentiable; formed once, and from now on never overwritten."""
        scores = self._formed()
        self._kept.readers += 1
        return scores

    def _formed(self) -> Tensor:
        if self._kept.spent:
            self._scores, self._kept = None, Kept()
        if self.cols is None or self._scores is None:
            self._check_unchanged()
        if self._scores is not None:
            return self._scores
        assert self.cols is not None
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(not inference):  # whoever asks first may do so under no_grad
            if self.engine == "reference":
                scores = reference.scores(self.rows, self.cols, self.normalize, self.normalize and not self.memory)
            else:
                scaled = ops.scaling_scores_pays(self.rows, self.cols, *self._inv, self._usual)
                scores = ops.Product.apply(self.rows, self.cols, *self._inv, scaled)
                self._kept.readers += scaled
        if not (inference and self._has_gradient):  # such scores would lack it for good
            self._scores = scores
        return scores

    @property
    def _has_gradient(self) -> bool:
        return self.rows.requires_grad or (self.cols is not None and self.cols.requires_grad)

    def source(self, *params: Tensor | None) -> Source:
        """What a recorded operator works on: the matrix if it may exist, else the embeddings."""
        source = self._source()
        self._kept.readers += needs_gradient(self.rows, self.cols, *params)
        return source

    def _source(self) -> Source:
        if self.engine in ("tiled", "triton"):
            return self._given()
        if self.memory:  # the gradient goes to the rows as it is found, and no matrix of it is needed
            return self._given()._replace(kept=self._keep())
        return Source(self._formed(), None, None, None, *self.ids)

    def _detached_source(self) -> Source:
        source = self._source()
        return source._replace(rows=source.rows.detach(), cols=None if source.cols is None else source.cols.detach())

    def _keep(self) -> Tensor:
        """(N, M) scores without a gradient; formed once."""
        if self._kept.scores is not None:
            return self._kept.scores
        self._check_unchanged()
        with torch.no_grad():
            pair, inv = (self.rows.detach(), _given(self.cols)), self._inv
            # A few anchors are the better right factor.
            if self._is_small():
                scores = ops.Product.apply(*pair[::-1], *inv[::-1], False).T
            else:
                scores = ops.Product.apply(*pair, *inv, False)
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():  # no later answer could save such
            self._kept.scores = scores
        return scores

    def _is_small(self) -> bool:
        return math.prod(self.shape) <= PANEL.get(self.rows.device.type, 0)

    def _listed(self) -> Positives | None:
        """The positive pairs of a memory, found once for all questions; None where an operator has to find them."""
        if not self.memory or self.engine != "dense" or torch.compiler.is_compiling():
            return None
        if self._kept.positives is None:
            self._kept.positives = Positives(*self.shape, *self.ids, self.rows.device)
        return self._kept.positives

    def list_as(self, other: Matrix) -> None:
        """Take over the positive pairs of a memory with the same ids, whenever they are found."""
        self._kept.positives = other._listed()

    def _may_consume(self) -> bool:
        """Whether the kept scores of a memory may be overwritten: no backward pass will read them."""
        return self.engine == "dense" and not self._kept.readers and not torch.compiler.is_compiling()

    def _spendable(self) -> Kept | None:
        """Given to a backward pass that may write over the scores."""
        formed = self.engine == "dense" and self.cols is not None and not self.memory
        return self._kept if formed and not torch.compiler.is_compiling() else None

    def _given(self) -> Source:
        self._check_unchanged()
        return Source(self.rows, self.cols, *self._inv, *self.ids, None, self.valid, self.engine == "triton")

    def _views(self, asked: Asked) -> list[tuple[Tensor, Tensor] | None]:
        """(scores, positive mask) as each asked side sees them, for the reference."""
        s = self.scores()
        if self.ids[0] is None:
            mask = torch.eye(*self.shape, dtype=torch.bool, device=s.device)
        else:
            assert self.ids[1] is not None
            mask = self.ids[0][:, None] == self.ids[1]
        return [(s, mask) if asked[0] else None, (s.T, mask.T) if asked[1] else None]

    def _by_reference(self, answer: Callable[..., Any], asked: Asked, *args: Any) -> list[Any]:
        return [None if view is None else answer(*view, *args) for view in self._views(asked)]

    def logsumexp(self, scale: Tensor, asked: Asked, over: Over) -> Tensor:
        """``log sum exp`` of each asked side's scores times ``scale``, which is one number or one per anchor."""
        masked = over == "negatives"
        if self.engine == "reference":
            scales = [x for x in apart(scale, self.shape[0], asked) if x is not None]
            views = [x for x in self._views(asked) if x is not None]
            return torch.cat([reference.logsumexp(*v, a, masked) for v, a in zip(views, scales, strict=True)])
        if self.memory and not scale.requires_grad:
            # Scores that no question before has formed are not all needed at once; few are formed faster in one piece.
            in_tiles = self._kept.scores is None and not self._is_small()
            source, in_place = self._given() if in_tiles else self._source(), self._may_consume() and not in_tiles
            if in_place:  # a later question forms them again
                self._kept.scores = None
            flags = masked, self.bounded, needs_gradient(self.rows), in_place, self._listed()
            return MemoryLogSumExp.apply(*source, scale, *flags)
        flags = masked, self.bounded, MEAN if scale.requires_grad else 0, self._spendable()
        found, _, diagonal = ops.LogSumExp.apply(*self.source(scale), scale, *asked, *flags)
        if diagonal.numel():
            self._keep_diagonal(diagonal)
        return found

    def moments(self, asked: Asked) -> Moments:
        """Mean and standard deviation of the negatives, of the rows if they are asked and then of the columns."""
        if self.engine == "reference":
            sides = [x for x in self._by_reference(reference.moments, asked) if x is not None]
            mean, variance = (torch.cat(x) for x in zip(*sides, strict=True))
        else:
            source = self.source()
            if needs_gradient(source.rows, source.cols):
                mean, variance = ops.Moments.apply(*source, *asked, self._listed())
            else:
                mean, variance = ops.moment_sums(*source, *asked, positives=self._listed())
        return Moments(mean, variance.clamp_min(1e-12).sqrt())

    def entropy(self, temperature: float, asked: Asked) -> Tensor:
        """Softmax entropy (bits) of the negatives of each asked side."""
        scale = 1 / temperature
        if self.engine == "reference":
            return torch.cat([x for x in self._by_reference(reference.entropy, asked, scale) if x is not None])
        a = self.rows.new_full((1,), scale, dtype=compute_dtype(self.rows))
        _, figure, _ = ops.LogSumExp.apply(*self.source(), a, *asked, True, self.bounded, ENTROPY, None)
        return figure[0] / math.log(2)

    def hardest(self, asked: Asked) -> Any:
        """Highest-scoring negative of each asked side, with its index."""
        if 0 in self.shape:  # a memory that is empty yet
            return Hardest(*ops.hardest(*self._given(), *asked)[::2]), None
        if self.engine == "reference":
            return [None if h is None else Hardest(*h) for h in self._by_reference(reference.hardest, asked)]
        out = ops.hardest(*self._detached_source(), *asked)
        values, (rows, cols) = list(out[:2]), out[2:]
        along = torch.arange(max(self.shape), device=self.rows.device)
        i, j = [along[: rows.numel()], cols], [rows, along[: cols.numel()]]
        one_to_one = self.ids[0] is None
        if one_to_one:  # the positives join the list: one sparse gradient instead of two
            i, j = [*i, along], [*j, along]
            values.append(self.pair_scores() if self._scores is None else self._scores.diagonal())
        known, i, j = torch.cat(values).detach(), torch.cat(i), torch.cat(j)
        # Whether some anchor has no negative; only the CPU may look for nothing.
        looking = known.device.type == "cpu" and not torch.compiler.is_compiling()
        missing = not looking or not float(known.amin()) > -math.inf
        if missing:  # -inf times no gradient is nan
            known.clamp_min_(torch.finfo(known.dtype).min)
            i, j = i.clamp_min(0), j.clamp_min(0)
        scores = self.pair_scores(i, j, known)
        # Outputs of an ordinary split may not be changed in place, and nothing else reads these scores.
        first, second, *diagonal = torch.unsafe_split_with_sizes(scores, [x.numel() for x in values])
        if one_to_one:
            self._keep_diagonal(diagonal[0])
        rows, cols = (
            Hardest(v.masked_fill(x < 0, -math.inf) if missing else v, x) if a else None
            for v, x, a in zip((first, second), (rows, cols), asked, strict=True)
        )
        return rows, cols

    def positives(self, term: str, params: Sequence[Tensor], asked: Asked, sparse: bool = False) -> Tensor:
        """Sums of a registered term over the positives of each asked side; ``params`` are as in :meth:`logsumexp`."""
        if self.engine == "reference":
            return self._sums_by_reference(self._views(asked), term, params, asked)
        if self.ids[0] is None:  # one positive an anchor: no sums
            scores = self.diagonal(sparse)
            if not all(asked):
                return term_values(term, scores, *params)
            n = len(scores)
            if any(p.numel() > 1 for p in params):
                scores, params = scores.expand(2, n), [p.reshape(2, n) if p.numel() > 1 else p for p in params]
            return term_values(term, scores, *params).expand(2, n).flatten()
        # Where pairs cannot be listed, the embeddings would have to be multiplied once more.
        pairs = Positives(*self.shape, *self.ids, self.rows.device)
        formed = self.engine == "dense" and self.cols is not None and not self.memory
        if formed and pairs.listable and not sparse and not torch.compiler.is_compiling():
            # A matrix of nothing but their gradients would take more time and room than those of the pairs.
            sparse = 4 * int(pairs.counts().sum()) * self.rows.shape[1] <= self.shape[0] * self.shape[1]
        source = self._given() if sparse and pairs.listable else self.source(*params)
        return self._term_sums(source, term, params, asked, False)

    def negatives(self, term: str, params: Sequence[Tensor], asked: Asked) -> Tensor:
        """Sums of a registered term over the negatives of each asked side."""
        if self.engine == "reference":
            views = [None if v is None else (v[0], ~v[1]) for v in self._views(asked)]
            return self._sums_by_reference(views, term, params, asked)
        return self._term_sums(self.source(*params), term, params, asked, True)

    def _sums_by_reference(self, views: list[Any], term: str, params: Sequence[Tensor], asked: Asked) -> Tensor:
        sides = zip(views, self._of_sides(params, asked), strict=True)
        return torch.cat(
            [reference.positives(view[0], view[1], term, mine) for view, mine in sides if view is not None]
        )

    def _of_sides(self, params: Sequence[Tensor], asked: Asked) -> tuple[list[Tensor], list[Tensor]]:
        rows: list[Tensor] = []
        cols: list[Tensor] = []
        for p in params:
            row, col = apart(p, self.shape[0], asked)
            if row is not None:
                rows.append(row)
            if col is not None:  # the compiler refuses to see the same tensor twice
                cols.append(col.view_as(col) if col is row else col)
        return rows, cols

    def _term_sums(self, source: Source, term: str, params: Sequence[Tensor], asked: Asked, negative: bool) -> Tensor:
        rows, cols = self._of_sides(params, asked)
        if not needs_gradient(source.rows, source.cols, *rows, *cols):  # as in term_values
            *sums, diagonal = ops.term_sums(*source, term, negative, list(rows), list(cols), *asked)
        else:
            spendable = self._spendable() if negative else None
            *sums, diagonal = ops.TermSums.apply(*source, term, negative, *asked, spendable, len(rows), *rows, *cols)
        if diagonal.numel():
            self._keep_diagonal(diagonal)
        return torch.cat(sums) if all(asked) else sums[asked.index(True)]

    def diagonal(self, sparse: bool) -> Tensor:
        """(N,) scores of row i with column i, differentiable."""
        self._check_unchanged()
        if self._diagonal is not None:
            return self._diagonal
        if self.cols is None or (self.engine == "dense" and not sparse):
            return self.scores().diagonal()
        return self._keep_diagonal(self.pair_scores())

    def _keep_diagonal(self, diagonal: Tensor) -> Tensor:
        """Whichever answer comes first hands out the positives' scores: their gradient rides along with its own."""
        if self._diagonal is None and diagonal.requires_grad == self._has_gradient:
            self._diagonal = diagonal
        return diagonal

    def pair_scores(self, i: Tensor | None = None, j: Tensor | None = None, scores: Tensor | None = None) -> Tensor:
        """(P,) scores of listed pairs, or of row i with column i; the gradient goes straight to the embeddings."""
        self._check_unchanged()
        return ops.PairScores.apply(self.rows, self.cols, *self._inv, i, j, scores)

    def violations(self, margin: float, asked: Asked) -> Tensor:
        """Sums of margin violations of each asked side."""
        if self.engine == "reference":
            return torch.cat([x for x in self._by_reference(reference.violations, asked, margin) if x is not None])
        sums = ops.Violations.apply(*self.source(), margin, *asked, self._spendable())
        return torch.cat(sums) if all(asked) else sums[asked.index(True)]

    def positive_counts(self, asked: Asked) -> Any:
        positives = Positives(*self.shape, *self.ids, self.rows.device)
        return [p.counts() if a else None for p, a in zip((positives, positives.T), asked, strict=True)]

    def topk(self, k: tuple[int, int], biases: Pair) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        with torch.no_grad():  # as a decorator the compiler would refuse it
            return ranking.topk(self._detached_source(), k, biases)

    def ranks_and_top(self, k: tuple[int, int], biases: Pair, optimistic: bool) -> Any:
        with torch.no_grad():
            return ranking.ranks_and_top(self._detached_source(), k, biases, optimistic)

    def ranks(self, biases: Pair, asked: Asked, optimistic: bool) -> Pair:
        with torch.no_grad():
            return ranking.ranks(self._detached_source(), biases, asked, optimistic)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
