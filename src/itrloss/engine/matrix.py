"""The inputs of a similarity matrix, its engine, and what is kept of it between questions."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import reduce
from .answers import ANSWERS, Answer
from .pairs import Pairs, pair_scores
from .products import matmul
from .scores import (
    Embeddings,
    Ids,
    Scores,
    chunks,
    compute_dtype,
    full_precision,
    inverse_norms,
    may_keep,
    scaled,
)

ENGINES = ("dense", "tiled", "triton")
MEMORY_BUDGET = 256 * 2**20  # bytes of scores that "auto" keeps (8192 x 8192 in float32)
# Scores up to which "auto" takes plain PyTorch on the CPU, where calls cost more than passes over the matrix; and on an
# accelerator, where a launch does.
SMALL = {"cpu": 2**16}
_ACCELERATOR_SMALL = 2**20


def check_engine(engine: str) -> None:
    """Raise a ValueError for an unknown name."""
    if engine not in ("auto", *ENGINES):
        raise ValueError(f"engine: expected 'auto', 'dense', 'tiled' or 'triton', got {engine!r}")


def choose_engine(engine: str, numel: int, budget: int, x: Tensor) -> str:
    """Return the engine that ``"auto"`` stands for, for so many scores of embeddings like ``x``, or the one named.

    Raises:
        ImportError, TypeError, ValueError: Triton is named and not there, or for float64, or on the CPU.
    """
    if engine == "auto":
        small = SMALL.get(x.device.type, _ACCELERATOR_SMALL)
        if torch.compiler.is_compiling():  # the compiler fuses what plain PyTorch does with a matrix
            small = budget // compute_dtype(x).itemsize
        if numel <= small:
            return "dense"
        return "triton" if _triton_serves(x) else "tiled"
    check_engine(engine)
    if engine == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ImportError("engine='triton' needs Triton, which comes with PyTorch for CUDA: pip install triton")
        if x.dtype == torch.float64:
            raise TypeError("engine: 'triton' computes in float32, and the embeddings are float64")
        if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("engine: 'triton' needs an accelerator (or TRITON_INTERPRET=1), got embeddings on the CPU")
    return engine


def _triton_serves(x: Tensor) -> bool:
    if x.device.type != "cuda" or x.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return False
    from .triton import works

    return works(x.device, x.dtype)


class Matrix:
    """A score matrix (N, M) of embeddings, or one that exists, as all views of it share it."""

    def __init__(self, rows: Embeddings, cols: Embeddings | None, ids: Ids, engine: str, budget: int = MEMORY_BUDGET):
        """``cols`` None: the rows are (N, M) scores."""
        x = rows.x
        self.embeddings, self.engine, self.dtype, self.device = (rows, cols), engine, rows.dtype, x.device
        self.rows, self.cols = x, None if cols is None else cols.x  # as they were given
        n, m = self.shape = len(x), x.shape[1] if cols is None else len(cols.x)
        self.pairs = Pairs(self.shape, ids, x.device)
        #: Whether scores are known to lie in [-1, 1].
        self.bounded = cols is not None and rows.normalize and cols.normalize
        # Where scores are kept, unit vectors are, too: 5 passes over the embeddings less in each pass over the scores.
        # Elsewhere the lengths are multiplied in tile by tile, and nothing of the embeddings' size is held.
        self.keeps = engine == "dense" or (engine == "tiled" and n * m * self.dtype.itemsize <= budget)
        self._scores: Tensor | None = None  # (N, M), differentiable if dense
        self._of_both: Tensor | None = None
        self._summed = False  # whether a sum over the matrix was recorded for a backward pass
        self._positive_scores: Tensor | None = None
        self._masks: dict[tuple[str, bool, bool], Tensor | None] = {}

    @property
    def normalize(self) -> tuple[bool, bool]:
        """Whether rows, and columns, are scaled to unit length."""
        rows, cols = self.embeddings
        return rows.normalize, cols is not None and cols.normalize

    def detach(self) -> Matrix:
        """Return the same scores without a gradient; what was formed, or is to be kept, is shared."""
        rows, cols = self.embeddings
        if self.keeps:
            self.scores()
        twin = Matrix(rows.detach(), None if cols is None else cols.detach(), self.pairs.ids, self.engine)
        twin.pairs, twin.bounded, twin.keeps = self.pairs, self.bounded, self.keeps
        twin._scores = None if self._scores is None else self._scores.detach()
        return twin

    def check_unchanged(self) -> None:
        """Refuse embeddings that were written to meanwhile: what is kept would not fit to later answers."""
        if torch.compiler.is_compiling():
            return
        for x in self.embeddings:
            if x is not None and x.version is not None and x.version != x.x._version:
                what = "scores were" if self.cols is None else "embeddings were"
                raise RuntimeError(f"the {what} modified in place after this Similarity was made; make another one")

    # ------------------------------------------------------------------------------------------- scores

    def scores(self) -> Tensor:
        """Return the (N, M) scores, not to be written to or handed out; differentiable on the dense engine."""
        if self._scores is not None:
            return self._scores
        (rows, cols), keep = self.embeddings, may_keep()
        if cols is None:
            scores = rows.unit()
        else:
            with full_precision(rows.x), torch.set_grad_enabled(keep and self.engine == "dense"):  # whoever asks first
                left, right = rows.unit(keep), cols.unit(keep).T
                scores = left @ right if self.engine == "dense" else matmul(left, right)
        if self.keeps and keep:
            self._scores = scores
        return scores

    def scores_of_both(self) -> Tensor:
        """Return (2, N, N) scores of a square matrix as its rows see them, and as its columns do; differentiable."""
        if self._of_both is not None:
            return self._of_both
        scores = self.scores()
        with torch.enable_grad():
            both = torch.stack((scores, scores.T))
        if torch.compiler.is_compiling() or not both.is_inference():
            self._of_both = both
        return both

    def dense_mask(self, over: str, of_both: bool, as_bool: bool) -> Tensor | None:
        """Return what leaves pairs out of a sum over the whole matrix: a bool mask of them, or factors of 0 and 1.

        Factors cost a fifth of the time of filling; scores that are given may be infinite, and are filled.
        """
        key = over, of_both, as_bool or self.cols is None
        if key in self._masks:
            return self._masks[key]
        if self.pairs.one_to_one and over == "negatives" and not key[2]:
            mask = 1 - torch.eye(*self.shape, dtype=self.dtype, device=self.device)
        else:
            mask = self.pairs.excluded(over=over)
            if mask is not None and of_both and not self.pairs.one_to_one:
                mask = torch.stack((mask, mask.T))
            mask = mask if mask is None or key[2] else (~mask).to(self.dtype)
        if torch.compiler.is_compiling() or mask is None or not mask.is_inference():
            self._masks[key] = mask
        return mask

    def differentiable_scores(self) -> Tensor:
        """Return the (N, M) scores with their gradient, whatever the engine."""
        rows, cols = self.embeddings
        if self.engine == "dense" or cols is None:
            return self.scores()
        with full_precision(rows.x):
            return rows.unit() @ cols.unit().T

    def source(self, keep: bool = True) -> Scores:
        """Return what a pass needs; with the scores, formed if need be, if these are kept.

        One product less in each further question and in backward passes: 0.81 of the time of HAL at 1024 x 1024 x 512
        (``pytest benchmarks/test_micro.py --benchmark-enable -k kept_scores``).
        """
        (rows, cols), ids = self.embeddings, self.pairs.ids
        if cols is None:
            return Scores(rows.unit(), None, None, None, *ids)
        if self.keeps:
            kept = self.scores() if keep and not torch.compiler.is_compiling() else self._scores
            return Scores(rows.unit(), cols.unit(), None, None, *ids, kept)
        return Scores(rows.x, cols.x, rows.inverse_norms(), cols.inverse_norms(), *ids)

    @property
    def has_gradient(self) -> bool:
        """Whether embeddings or scores have one."""
        return any(x is not None and x.x.requires_grad for x in self.embeddings)

    def pair_scores(self, i: Tensor | None, j: Tensor | None, known: Tensor | None = None) -> Tensor:
        """Return the (P,) scores of rows ``i`` with columns ``j``, or of row p with column p, differentiable.

        ``known``: the scores themselves, if a product has formed them.
        """
        if self.engine == "dense":
            rows, cols = self.embeddings
            if cols is None or self._summed:  # the matrix has a gradient anyway
                scores = self.scores()
                return scores.diagonal() if i is None or j is None else scores[i, j]
            # Two products less in the backward pass of a loss of pairs alone: 0.80 of the time at 128 x 128 x 1024
            # (pytest benchmarks/test_micro.py --benchmark-enable -k pairs_alone).
            return pair_scores(Scores(rows.unit(), cols.unit()), i, j, known)
        return pair_scores(self.source(keep=False), i, j, known)

    def positive_scores(self) -> Tensor:
        """Return the (P,) scores of the positive pairs in the order of ``pairs.listed``; differentiable."""
        self.check_unchanged()
        if self._positive_scores is not None:
            return self._positive_scores
        if self.pairs.one_to_one and self._summed and self._scores is not None:
            return self._scores.diagonal()
        i, j = (None, None) if self.pairs.one_to_one else self.pairs.listed
        formed = None if self._scores is None or self.cols is None else self._scores.detach()
        if formed is not None:
            formed = formed.diagonal() if i is None or j is None else formed[i, j]
        keep = may_keep()
        with torch.set_grad_enabled(keep):  # whoever asks first
            scores = self.pair_scores(i, j, formed)
        if keep:
            self._positive_scores = scores
        return scores

    def positive_table(self, side: int) -> Tensor:
        """Return (slots, A) scores of each anchor's positives, inf where it has fewer; for a sum over the matrix."""
        self._summed = self._summed or torch.is_grad_enabled()
        if self.pairs.one_to_one:
            return self.positive_scores()[None]
        anchor, other, slot = self.pairs.slots(side)
        scores = self.pair_scores(*((anchor, other) if side == 0 else (other, anchor)))
        table = scores.new_full((int(slot.max()) + 1 if len(slot) else 1, self.shape[side]), math.inf)
        return table.index_put((slot, anchor), scores)

    def sorted_hinges(self, side: int, margin: float) -> Tensor:
        """Return (A,) the hinges of each positive against all negatives of its anchor, without listing the positives.

        Every candidate is taken for one: what lies above its threshold is a prefix of the anchor's sorted negatives.
        """
        mask, positive = self.pairs.excluded(), self.pairs.positive()
        assert mask is not None
        scores, mask, positive = (x.T if side else x for x in (self.differentiable_scores(), mask, positive))
        negatives = scores.masked_fill(mask, -math.inf).sort(dim=1).values
        sums = negatives.masked_fill(negatives == -math.inf, 0.0).flip(1).cumsum(1)
        thresholds = scores - margin
        behind = torch.searchsorted(negatives.detach().contiguous(), thresholds.detach().contiguous(), right=True)
        count = scores.shape[1] - behind
        above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
        return torch.where(positive, above - count * thresholds, 0.0).sum(1)

    def mean_scores(self, sides: Sequence[int]) -> Tensor:
        """Return (A,) a number near the mean of each anchor's candidates."""
        if self.keeps or self.embeddings[1] is None:
            scores = self.scores()
            means = [scores.mean(1)] if 0 in sides else []
            return torch.cat([*means, scores.mean(0)]) if 1 in sides else means[0]
        found = []
        for side in sides:
            own, other = self.embeddings[side], self.embeddings[1 - side]
            assert own is not None and other is not None
            total = sum(part.sum(0) for part in _parts(other))
            found += [part @ total / self.shape[1 - side] for part in _parts(own)]
        return torch.cat(found)

    # ---------------------------------------------------------------------------------------- reduction

    def reduce(self, key: str, sides: Sequence[int], *params: Tensor, over: str = "negatives") -> Tensor:
        """Return (K, A): the sums of an answer over the candidates of each anchor of these sides."""
        self.check_unchanged()
        answer = ANSWERS[key]
        if self.engine == "dense":
            self._summed = self._summed or torch.is_grad_enabled()
            return dense_sums(self, answer, over, sides, params)
        cols, compiling = self.cols, torch.compiler.is_compiling()
        early = answer.exponential and len(sides) == 1 and cols is not None and not cols.requires_grad
        source = self.source(keep=not early)
        question = key, over, tuple(sides), self.engine == "triton"
        if not torch.is_grad_enabled():
            pairs = None if compiling else self.pairs
            return reduce.sums(list(source), list(params), *question, False, pairs=pairs)[0]
        listed = not (early or self.keeps or compiling or self._positive_scores is not None)
        listed = listed and cols is not None and self.pairs.listable
        sums, pairs = reduce.Reduce.apply(None if compiling else self.pairs, *question, listed, *source, *params)
        self._positive_scores = pairs if listed else self._positive_scores
        return sums


def _parts(x: Embeddings) -> Iterator[Tensor]:
    """Yield some vectors after the others, at unit length if they are to be."""
    for part in chunks(x.x):
        y = x.x[part].detach()
        yield scaled(y, inverse_norms(y) if x.normalize else None)


def _whole_views(shape: tuple[int, int], sides: Sequence[int], params: Sequence[Tensor]) -> list[reduce.View]:
    """Return the views of the whole matrix, without slices: the compiler would take their ends for constants."""
    everything = slice(None)
    if all(p.shape[-1] == 1 for p in params):
        return [reduce.View([(1 - side, everything) for side in sides], [p.unsqueeze(-1) for p in params])]
    sizes, views = [shape[side] for side in sides], []
    for k, side in enumerate(sides):
        own = [p if p.shape[-1] == 1 else p.split(sizes, -1)[k] for p in params]
        views.append(reduce.View([(1 - side, everything)], [p.unsqueeze(-1 - side) for p in own]))
    return views


def dense_sums(matrix: Matrix, answer: Answer, over: str, sides: Sequence[int], params: Sequence[Tensor]) -> Tensor:
    """Return the (K, A) sums over a matrix (N, M) that exists, in plain PyTorch: autograd differentiates it."""
    (n, m), each = matrix.shape, False
    for p in params:
        each = each or p.shape[-1] != 1
    if each and n == m and len(sides) == 2:
        # Rows and columns as one batch of rows: half the operators, which is what small matrices cost.
        scores, params = matrix.scores_of_both(), list(params)
        for k, p in enumerate(params):
            params[k] = p.unsqueeze(-1) if p.shape[-1] == 1 else p.reshape(*p.shape[:-1], 2, n, 1)
        views = [reduce.View([(-1, slice(None))], params)]
    else:
        scores = matrix.scores()
        views = _whole_views((n, m), sides, params)
    mask = matrix.dense_mask(over, scores.dim() == 3, answer.maximum)
    found: list[Tensor] = []  # of the first view's sides, and then of the second's
    for view in views:
        values = answer.value(scores, *view.params)
        x = values.expand_as(scores) if answer.width == 1 else torch.stack(values)
        if mask is not None:
            x = x.masked_fill(mask, float("-inf") if answer.maximum else 0.0) if mask.dtype == torch.bool else x * mask
        for dim, _ in view.sums:
            dim = dim - 2 if dim >= 0 else dim
            found.append((x.amax(dim) if answer.maximum else x.sum(dim)).reshape(answer.width, -1))
    return found[0] if len(found) == 1 else torch.cat(found, 1)
