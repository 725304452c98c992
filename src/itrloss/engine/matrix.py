"""The inputs of a similarity matrix, its engine, and what is kept of it between questions."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reduce
from .answers import ANSWERS, Answer, identity
from .pairs import Pairs, pair_scores, segment_sum
from .products import matmul
from .scores import Embeddings, Scores, chunks, compute_dtype, full_precision, may_keep

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

    def __init__(self, rows: Embeddings, cols: Embeddings | None, pairs: Pairs, engine: str, budget: int):
        """``cols`` None: the rows are (N, M) scores. ``budget``: bytes of scores that may be kept."""
        self.embeddings, self.pairs, self.shape, self.engine = (rows, cols), pairs, pairs.shape, engine
        self.rows, self.cols = rows.x, None if cols is None else cols.x  # as they were given
        self.dtype, self.device = rows.dtype, rows.x.device
        #: Whether scores are known to lie in [-1, 1].
        self.bounded = cols is not None and rows.normalize and cols.normalize
        # Where scores are kept, unit vectors are, too; elsewhere nothing of the embeddings' size is held.
        self.keeps = engine == "dense" or (engine == "tiled" and math.prod(self.shape) * self.dtype.itemsize <= budget)
        self._wholes: dict[tuple[str, bool, bool], tuple[Tensor, Tensor | None]] = {}

    _scores: Tensor | None = None  # (N, M), differentiable if dense
    _of_both: Tensor | None = None  # (2, N, N)
    _positive_scores: Tensor | None = None  # (P,)
    _summed = False  # whether a sum over the matrix was recorded for a backward pass

    def detach(self) -> Matrix:
        """Return the same scores without a gradient; what was formed, or is to be kept, is shared."""
        rows, cols = self.embeddings
        formed = self.scores() if self.keeps else self._scores
        twin = Matrix(rows.detach(), None if cols is None else cols.detach(), self.pairs, self.engine, 0)
        twin.bounded, twin.keeps = self.bounded, self.keeps
        twin._scores = None if formed is None else formed.detach()
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

    def whole(self, over: str, of_both: bool, fill: bool) -> tuple[Tensor, Tensor | None]:
        """Return the (N, M) scores, differentiable on the dense engine, and what leaves pairs out of a sum over them.

        ``of_both``: (2, N, N) scores of a square matrix, as its rows see them and as its columns do. With ``fill`` a
        bool mask of the pairs; else factors of 0 and 1, which cost a fifth of the time of filling.
        """
        key = over, of_both, fill
        if key in self._wholes:
            return self._wholes[key]
        scores = self.scores() if self._scores is None else self._scores
        mask, keep = self.pairs.excluded(over=over), self._scores is not None  # not in inference mode
        if of_both and self._of_both is None:
            with torch.set_grad_enabled(keep):
                self._of_both = torch.stack((scores, scores.T))
        if mask is not None:
            mask = torch.stack((mask, mask.T)) if of_both and not self.pairs.one_to_one else mask
            mask = mask if fill else (~mask).view(torch.uint8).to(self.dtype)  # bool would be converted one by one
        found = (scores if self._of_both is None or not of_both else self._of_both), mask
        if keep:
            self._wholes[key] = found
        else:
            self._of_both = None
        return found

    def differentiable_scores(self) -> Tensor:
        """Return the (N, M) scores with their gradient, whatever the engine."""
        rows, cols = self.embeddings
        if self.engine == "dense" or cols is None:
            return self.scores()
        with full_precision(rows.x):
            return rows.unit() @ cols.unit().T

    def source(self, form: bool = False) -> Scores:
        """Return what a pass needs; to ``form`` scores that are to be kept pays if a backward pass or others follow.

        One product less in each of these: 0.81 of the time of HAL at 1024 x 1024 x 512
        (``pytest benchmarks/test_micro.py --benchmark-enable -k kept_scores``).
        """
        (rows, cols), ids = self.embeddings, self.pairs.ids
        if cols is None:
            return Scores(rows.unit(), None, None, None, *ids)
        if self.keeps and may_keep() and not torch.compiler.is_compiling():
            units, kept = (rows.unit().detach(), cols.unit().detach()), self.scores() if form else self._scores
            return Scores(rows.x, cols.x, rows.inv, cols.inv, *ids, kept, *units)
        return Scores(rows.x, cols.x, rows.inverse_norms(), cols.inverse_norms(), *ids)

    def pair_scores(self, i: Tensor | None, j: Tensor | None, known: Tensor | None = None) -> Tensor:
        """Return the (P,) scores of rows ``i`` with columns ``j``, or of row p with column p, differentiable.

        ``known``: the scores themselves, if a product has formed them.
        """
        if self.cols is None or (self.engine == "dense" and self._summed):  # the matrix has a gradient anyway
            scores = self.scores() if self._scores is None else self._scores
            return scores.diagonal() if i is None or j is None else scores[i, j]
        # Two products less in the backward pass of a loss of pairs alone: 0.80 of the time at 128 x 128 x 1024
        # (pytest benchmarks/test_micro.py --benchmark-enable -k pairs_alone).
        return pair_scores(self.source(), i, j, known)

    def positive_scores(self) -> Tensor:
        """Return the (P,) scores of the positive pairs in the order of ``pairs.listed``; differentiable."""
        self.check_unchanged()
        if self._positive_scores is not None:
            return self._positive_scores
        keep = may_keep()
        with torch.set_grad_enabled(keep):  # whoever asks first
            scores = self.pair_scores(*((None, None) if self.pairs.one_to_one else self.pairs.listed))
        self._positive_scores = scores if keep else None
        return scores

    # ----------------------------------------------------------------------------------------- answers

    def counts(self, sides: Sequence[int], *, positive: bool) -> Tensor:
        """Return (A,) int64: how many positives, or negatives, the anchors of these sides have."""
        return torch.cat([self.pairs.counts(side)[0 if positive else 1] for side in sides])

    def reduce(self, sides: Sequence[int], *params: Tensor, key: str, over: str = "negatives") -> Tensor:
        """Return (K, A): the sums of an answer over the candidates of each anchor of these sides."""
        self.check_unchanged()
        answer = ANSWERS[key]
        if self.engine == "dense":
            self._summed = self._summed or torch.is_grad_enabled()
            return dense_sums(self, answer, over, sides, params)
        cols, compiling = self.cols, torch.compiler.is_compiling()
        early = answer.exponential and len(sides) == 1 and cols is not None and not cols.requires_grad
        source, pairs = self.source(form=not early), None if compiling else self.pairs
        question = key, over, tuple(sides), self.engine == "triton"
        if not torch.is_grad_enabled():
            return reduce.sums(list(source), list(params), *question, False, pairs=pairs)[0]
        listed = not (early or compiling or self._positive_scores is not None)
        listed = listed and cols is not None and self.pairs.listable
        sums, positive = reduce.Reduce.apply(pairs, question, listed, *source, *params)
        self._positive_scores = positive if listed else self._positive_scores
        return sums

    def sum_of_positives(self, sides: Sequence[int], *params: Tensor, term: Callable[..., Tensor]) -> Tensor:
        """Return (A,): the sums of a registered term over the positives of each anchor of these sides."""
        if not (self.pairs.one_to_one or self.pairs.listable):
            return self.reduce(sides, *params, key=term.__name__, over="positives")[0]
        scores, index, times, each = self.positive_scores(), None, len(sides), False
        if not self.pairs.one_to_one:
            index = self.pairs.anchors(*sides)
        for p in params:
            each = each or p.numel() > 1  # else both sides share the terms
        scores = torch.cat([scores] * times) if each and times > 1 else scores
        if index is not None and each:
            params = tuple(p if p.numel() == 1 else p[index] for p in params)
        values = term(scores, *params).expand_as(scores)
        values = values if each or times == 1 else torch.cat([values] * times)
        if index is None:
            return values.clone() if times == 1 else values  # they may be what is kept
        return segment_sum(values, index, sum(self.shape[side] for side in sides))

    def hinge_sum(self, sides: Sequence[int], *, margin: float) -> Tensor:
        """Return (A,): the hinges of all positives against all negatives of each anchor of these sides."""
        if not self.pairs.listable:
            return torch.cat([self._sorted_hinges(side, margin) for side in sides])
        self._summed = self._summed or torch.is_grad_enabled()
        scores, pairs = self.positive_scores(), self.pairs
        if pairs.one_to_one:
            thresholds = torch.cat([scores] * len(sides))[None]
        else:
            slots = [pairs.slots(side) for side in sides]
            width = max(int(slot.max()) + 1 if len(slot) else 1 for slot in slots)
            # (slots, A) of each side, inf where an anchor has fewer positives
            empty = [scores.new_full((width, self.shape[side]), math.inf) for side in sides]
            places = [(slot, pairs.listed[side]) for slot, side in zip(slots, sides, strict=True)]
            thresholds = torch.cat([x.index_put(at, scores) for x, at in zip(empty, places, strict=True)], 1)
        return self.reduce(sides, thresholds - margin, key="hinges")[0]

    def _sorted_hinges(self, side: int, margin: float) -> Tensor:
        """Return (A,) the hinges of :meth:`hinge_sum` without listing the positives.

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

    def centre(self, sides: Sequence[int]) -> Tensor:
        """Return (A,): a number near the mean of each anchor's negatives. Without a gradient.

        Several positives that score far from the negatives would move the mean of all candidates away from theirs.
        """
        pairs, count = self.pairs, 0
        simple = pairs.one_to_one and self.cols is not None  # scores that are given may be infinite
        if not simple:
            count = self.counts(sides, positive=False).clamp_min(1)
        found: list[Tensor] = []
        if self.keeps or self.cols is None:
            if not simple:
                return self.reduce(sides, key="identity")[0] / count
            scores = self.scores()
            for side in sides:
                found.append(scores.mean(1 - side))
            return torch.cat(found)
        source: Any = self.source()
        with full_precision(self.rows):
            for side in sides:
                other = sum(source.unit(1 - side, part).sum(0) for part in chunks(source[1 - side]))
                found.append(torch.cat([source.unit(side, part) @ other for part in chunks(source[side])]))
        if pairs.one_to_one or not pairs.listable:
            return torch.cat([total / self.shape[1 - side] for total, side in zip(found, sides, strict=True)])
        return (torch.cat(found) - self.sum_of_positives(sides, term=identity)) / count


def dense_sums(matrix: Matrix, answer: Answer, over: str, sides: Sequence[int], params: Sequence[Tensor]) -> Tensor:
    """Return the (K, A) sums over a matrix (N, M) that exists, in plain PyTorch: autograd differentiates it."""
    (n, m), each = matrix.shape, False
    for p in params:
        each = each or p.shape[-1] != 1
    of_both = each and n == m and len(sides) == 2
    # Scores that are given may be infinite: a factor of 0 would make them nan.
    scores, mask = matrix.whole(over, of_both, answer.maximum or matrix.cols is None)
    if of_both:  # rows and columns as one batch of rows: half the operators, which is what small matrices cost
        shared = []
        for p in params:
            shared.append(p.unsqueeze(-1) if p.shape[-1] == 1 else p.reshape(*p.shape[:-1], 2, n, 1))
        seen = [reduce.View([0], shared)]
    else:
        seen = reduce.views(sides, params, matrix.shape)
    found: list[Tensor] = []  # of the first view's sides, and then of the second's
    for view in seen:
        values = answer.value(scores, *view.params)
        x = values.expand_as(scores) if answer.width == 1 else torch.stack(values)
        if mask is not None:
            x = x.masked_fill(mask, float("-inf") if answer.maximum else 0.0) if mask.dtype == torch.bool else x * mask
        for side in view.sides:
            sums = x.amax(-1 - side) if answer.maximum else x.sum(-1 - side)
            found.append(sums.reshape(answer.width, -1))
    return found[0] if len(found) == 1 else torch.cat(found, 1)
