"""Which pairs are positive, from integer ids; and the scores of listed pairs, whose gradient goes straight to them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .scores import (
    IGNORE_ID,
    Ids,
    Scores,
    Tile,
    cached_property,
    chunks,
    compute_dtype,
    host_may_read,
    may_keep,
    normalized,
)

_MASKED = 2**16  # scores of a tile up to which comparing ids costs less than listing pairs
_GATHERED = 2**18  # numbers of gathered embeddings held at once


class Pairs:
    """The positive pairs of a matrix (N, M). Ids left out on both sides: row i matches column i."""

    def __init__(self, shape: tuple[int, int], ids: Ids, device: torch.device):
        self.shape, self.ids, self.device = shape, ids, device
        #: Whether row i matches column i and nothing else.
        self.one_to_one = ids[0] is None

    @cached_property
    def listable(self) -> bool:
        """Whether pairs may be listed: how many there are is data, for which an accelerator has to synchronise."""
        if self.one_to_one:
            return True
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            return not torch.cuda.is_current_stream_capturing()
        assert self.ids[0] is not None
        return host_may_read(self.ids[0])

    @cached_property
    def ignored(self) -> list[Tensor | None]:
        """(N,) and (M,) bool: which rows and columns do not exist; None where all are known to."""
        found: list[Tensor | None] = []
        for ids in self.ids:
            mask = None if ids is None else ids == IGNORE_ID
            found.append(None if mask is not None and host_may_read(mask) and not bool(mask.any()) else mask)
        return found

    def counts(self, side: int) -> Tensor:
        """Return the (N,) or (M,) int64 numbers of positives of each row, or (1) of each column."""
        if self.one_to_one:
            return torch.ones(self.shape[side], dtype=torch.int64, device=self.device)
        if self.listable and self.device.type == "cpu":
            return torch.bincount(self.listed[side], minlength=self.shape[side])
        _, first, last = self._ranges(side)
        ignored = self.ignored[side]
        return last - first if ignored is None else (last - first).masked_fill(ignored, 0)

    def candidates(self, side: int) -> Tensor | int:
        """Return how many candidates the anchors of a side have."""
        other = self.ignored[1 - side]
        return self.shape[1 - side] if other is None else (~other).sum()

    def negative_counts(self, side: int) -> Tensor:
        """Return the (N,) or (M,) int64 numbers of negatives of each anchor."""
        found = self.candidates(side) - self.counts(side)
        ignored = self.ignored[side]
        return found if ignored is None else found.masked_fill(ignored, 0)

    def _ranges(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """``(order, first, last)``: anchor i's positives are the candidates ``order[first[i]:last[i]]``."""
        known = self.__dict__.setdefault("_sorted", {})
        if side not in known:
            own, other = self.ids[side], self.ids[1 - side]
            assert own is not None and other is not None
            ordered, order = torch.sort(other, stable=True)
            own = own.contiguous()
            known[side] = order, torch.searchsorted(ordered, own), torch.searchsorted(ordered, own, right=True)
        return known[side]

    @cached_property
    def listed(self) -> tuple[Tensor, Tensor]:
        """(P,) rows and (P,) columns of the positive pairs, sorted by row."""
        with contextlib.nullcontext() if may_keep() else torch.inference_mode(False):
            return self._listed()

    def _listed(self) -> tuple[Tensor, Tensor]:
        if self.one_to_one:
            i = torch.arange(min(self.shape), device=self.device)
            return i, i
        side = int(self.shape[1] > self.shape[0])  # whose ids are looked up among the other's, which are sorted
        own, other, ignored = self.ids[side], self.ids[1 - side], self.ignored[side]
        assert own is not None and other is not None
        ordered, order = torch.sort(other, stable=True)
        first = torch.searchsorted(ordered, own, out_int32=True)
        hit = ordered[first.clamp_max(len(ordered) - 1)] == own  # few of a memory's
        which = (hit if ignored is None else hit & ~ignored).nonzero().squeeze(1)
        first = first[which].long()
        count = torch.searchsorted(ordered, own[which], right=True) - first
        at = torch.repeat_interleave(count)  # 0 0 0 1 2 2 …
        within = torch.arange(len(at), device=at.device) - (count.cumsum(0) - count)[at]
        mine, theirs = which[at], order[first[at] + within]
        if side == 0:
            return mine, theirs
        theirs, order = torch.sort(theirs, stable=True)
        return theirs, mine[order]

    def slots(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (P,) anchors, candidates, and the number of each pair among its anchor's pairs (0, 1, …)."""
        i, j = self.listed if side == 0 else self.listed[::-1]
        if self.one_to_one:
            return i, j, torch.zeros_like(i)
        i, order = torch.sort(i, stable=True)
        count = self.counts(side)
        return i, j[order], torch.arange(len(i), device=i.device) - (count.cumsum(0) - count)[i]

    # --------------------------------------------------------------------------------------------- masking

    def positive(self, rows: slice = slice(None), cols: slice = slice(None)) -> Tensor:
        """Return a (r, c) bool mask of the positive pairs."""
        if self.one_to_one:
            return torch.eye(*self.shape, dtype=torch.bool, device=self.device)[rows, cols]
        assert self.ids[0] is not None and self.ids[1] is not None
        found = self.ids[0][rows, None] == self.ids[1][cols]
        return found if self.ignored[0] is None else found & ~self.ignored[0][rows, None]

    def excluded(self, rows: slice = slice(None), cols: slice = slice(None), over: str = "negatives") -> Tensor | None:
        """Return a (r, c) bool mask of the pairs that a sum ``over`` something leaves out; None: none of them."""
        if self.one_to_one and over == "negatives":
            return torch.eye(*self.shape, dtype=torch.bool, device=self.device)[rows, cols]
        if over == "positives":
            return ~self.positive(rows, cols)
        found = self.positive(rows, cols) if over == "negatives" else None
        for ignored, part in ((self.ignored[0], (rows, None)), (self.ignored[1], (None, cols))):
            if ignored is not None:
                found = ignored[part] if found is None else found | ignored[part]
        return found

    def exclude_(self, x: Tensor, tile: Tile, value: float, over: str) -> Tensor:
        """Overwrite what :meth:`excluded` says of a tile-shaped ``x`` by ``value``; return ``x``."""
        r, c = tile.rows, tile.cols
        if over == "negatives" and self.one_to_one:
            offset = r.start - c.start
            if -x.shape[0] < offset < x.shape[1]:
                x.diagonal(offset).fill_(value)
            return x
        if over == "negatives" and x.numel() > _MASKED and self.listable and x.device.type == "cpu":
            bounds = self._row_starts
            start, stop = bounds[r.start], bounds[r.stop]
            if (stop - start) * 16 <= x.numel():
                i, j = (y[start:stop] for y in self.listed)
                if x.shape[1] < self.shape[1]:
                    inside = (j >= c.start) & (j < c.stop)
                    i, j = i[inside], j[inside]
                x[i - r.start, j - c.start] = value
                over = "all"
        mask = self.excluded(r, c, over)
        return x if mask is None else x.masked_fill_(mask, value)

    @cached_property
    def _row_starts(self) -> list[int]:
        """Where the pairs of each row begin in :attr:`listed`, and where they end."""
        return [0, *self.counts(0).cumsum(0).tolist()]


# -------------------------------------------------------------------------------------------- scores of pairs


def pair_scores(scores: Scores, i: Tensor | None, j: Tensor | None, known: Tensor | None = None) -> Tensor:
    """Return the (P,) scores of rows ``i`` with columns ``j``, or of row p with column p; the gradient goes to these.

    ``known``: the scores themselves, if a product has formed them.
    """
    rows, cols = scores.rows, scores.cols
    if cols is None:
        return rows.diagonal().clone() if i is None or j is None else rows[i, j]
    if torch.compiler.is_compiling():  # which fuses it, and plans its memory
        return _plain_pair_scores(rows, cols, scores.row_inv, scores.col_inv, i, j)
    return _PairScores.apply(rows, cols, scores.row_inv, scores.col_inv, i, j, known)


def _plain_pair_scores(rows, cols, row_inv, col_inv, i, j) -> Tensor:
    """:func:`pair_scores` in operators that autograd differentiates."""
    sides = (rows, row_inv, i), (cols, col_inv, j)
    units = [(x.to(compute_dtype(x)) if inv is None else normalized(x), k) for x, inv, k in sides]
    left, right = (x if k is None else x[k] for x, k in units)
    return (left * right).sum(1)


class _PairScores(torch.autograd.Function):
    """(P,) cosines of pairs: the gradient is of the size of the pairs, and nothing is saved but the inputs."""

    @staticmethod
    def forward(ctx: Any, rows, cols, row_inv, col_inv, i, j, known):
        found = pair_products(rows, cols, row_inv, col_inv, i, j) if known is None else known.clone()
        ctx.save_for_backward(rows, cols, row_inv, col_inv, i, j, found.clone())  # answers may be written to
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        rows, cols, row_inv, col_inv, i, j, found = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            scores = _plain_pair_scores(rows, cols, row_inv, col_inv, i, j)
            needed = [x for x, need in zip((rows, cols), ctx.needs_input_grad, strict=False) if need]
            by = iter(torch.autograd.grad(scores, needed, grads[0], create_graph=True))
            return *(next(by) if need else None for need in ctx.needs_input_grad[:2]), *([None] * 5)
        sides = (rows, row_inv, i), (cols, col_inv, j)
        needed = zip((sides, sides[::-1]), ctx.needs_input_grad[:2], strict=True)
        by_side = [_pair_gradient(*own, *other, found, grads[0]) if need else None for (own, other), need in needed]
        return *by_side, *([None] * 5)


def pair_products(rows, cols, row_inv, col_inv, i, j) -> Tensor:
    """Return the (P,) scores of rows i with columns j, or of row p with column p, without a gradient."""
    dtype, p = compute_dtype(rows), rows.shape[0] if i is None else i.shape[0]
    found = rows.new_empty(p, dtype=dtype)
    step = max(1, _GATHERED // rows.shape[1])
    for start in range(0, p, step):
        part = slice(start, min(p, start + step))
        left, right = (_gathered(x, k, part).to(dtype) for x, k in ((rows, i), (cols, j)))
        torch.sum(left * right, 1, out=found[part])
    for inv, k in ((row_inv, i), (col_inv, j)):
        if inv is not None:
            found.mul_(inv if k is None else inv[k])
    return found


def _gathered(x: Tensor, index: Tensor | None, part: slice) -> Tensor:
    return x[part] if index is None else x.index_select(0, index[part])


def _pair_gradient(x, inv, index, other, other_inv, other_index, scores: Tensor, grad: Tensor) -> Tensor:
    """Return the (N, D) gradient of ``x``: ``d cos(v, w) / dv = w / (|v| |w|) - cos(v, w) v / |v|^2``, summed by v."""
    weight = grad
    for i, k in ((inv, index), (other_inv, other_index)):
        if i is not None:
            weight = weight * (i if k is None else i[k])
    along = None if inv is None else segment_sum(grad * scores, index, len(x)) * inv * inv
    listed = None if index is None else weighted_sums(other.to(weight.dtype), other_index, weight, index, len(x))
    if listed is None:  # no copy of N x D numbers more than the gradient
        listed = other.to(weight.dtype) * weight[:, None]
    if along is not None:
        for part in chunks(x):
            listed[part].addcmul_(x[part].to(weight.dtype), along[part, None], value=-1)
    return listed.to(x.dtype)


def segment_sum(values: Tensor, index: Tensor | None, size: int) -> Tensor:
    """Return the (size,) sums of the (P,) values of each index, with the same bits each time."""
    if index is None:
        return values
    total = values.new_zeros(size)
    if values.device.type == "cpu":
        return total.index_add(0, index, values)
    return total.index_put((index,), values, accumulate=True)  # which sorts on accelerators: index_add is atomic


def weighted_sums(vectors: Tensor, which: Tensor, weights: Tensor, index: Tensor, size: int) -> Tensor:
    """Return (size, D): ``sum_{p: index[p] = a} weights[p] vectors[which[p]]``, without (P, D) copies of vectors."""
    index, order = torch.sort(index, stable=True)
    offsets = torch.searchsorted(index, torch.arange(size, device=index.device))
    return F.embedding_bag(which[order], vectors, offsets, mode="sum", per_sample_weights=weights[order])


def first_derivative_only() -> None:
    """Refuse a second derivative, on any path: the dependence on the embeddings would be dropped in silence."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("create_graph: second derivatives need engine='dense', whose answers are plain PyTorch")
