"""Which pairs are positive, from integer ids; the scores of listed pairs, whose gradient skips the
score matrix.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .scores import IGNORE_ID, Ids, Scores, host_may_read, may_keep, scaled

_GATHERED, _ACCELERATOR_GATHERED = 2**18, 2**22  # elements of gathered embeddings held at once


def _cached(method: Any) -> Any:
    """Cache the results of a method, in tensors that autograd may save for backward."""

    def cached(self: Pairs, *args: int) -> Any:
        key = method.__name__, *args
        if key not in self._cache:
            with contextlib.nullcontext() if may_keep() else torch.inference_mode(False):
                self._cache[key] = method(self, *args)
        return self._cache[key]

    return cached


class Pairs:
    """The positive pairs of a matrix (N, M).

    Without ids, row i matches column i. Column ids alone are row numbers.
    """

    def __init__(self, shape: tuple[int, int], ids: Ids, device: torch.device):
        self.shape, self.device = shape, device
        rows, cols = self.ids_as_passed = ids
        if rows is None and cols is not None:
            rows = torch.arange(shape[0], device=device)
        #: Whether row i matches column i and nothing else, so that ids need not be compared.
        self.one_to_one = (
            rows is None or cols is None or (shape[0] == shape[1] and _diagonal(rows, cols))
        )
        self.ids: Ids = (None, None) if self.one_to_one else (rows, cols)
        #: (N,) and (M,) bool: rows and columns with IGNORE_ID; None where there are certainly none.
        self.ignored: list[Tensor | None] = [None, None]
        readable = self.ids[0] is not None and host_may_read(self.ids[0])
        for side, x in enumerate(self.ids):
            mask = None if x is None else x == IGNORE_ID
            self.ignored[side] = (
                None if mask is not None and readable and not bool(mask.any()) else mask
            )
        self._cache: dict[Any, Any] = {}

    @property
    def listable(self) -> bool:
        """Whether pairs may be listed. Their number depends on the data: an accelerator has to
        synchronise for it.
        """
        if self.ids[0] is None:
            return True
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            return not torch.cuda.is_current_stream_capturing()
        return host_may_read(self.ids[0])

    @_cached
    def counts(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the (A,) int64 numbers of positives and of negatives of each row (``side`` 0) or
        column (1).
        """
        own, other, (ignored, others_ignored) = (
            self.ids[side],
            self.ids[1 - side],
            self.ignored[:: 1 - 2 * side],
        )
        if own is None or other is None:
            count = torch.ones(self.shape[side], dtype=torch.int64, device=self.device)
        else:
            ordered, own = other.sort().values, own.contiguous()
            count = torch.searchsorted(ordered, own, right=True) - torch.searchsorted(ordered, own)
            count = count if ignored is None else count.masked_fill(ignored, 0)
        others = (
            self.shape[1 - side] if others_ignored is None else (~others_ignored).sum()
        ) - count
        return count, others if ignored is None else others.masked_fill(ignored, 0)

    @property
    @_cached
    def listed(self) -> tuple[Tensor, Tensor]:
        """The (P,) row and (P,) column indices of the positive pairs, sorted by row."""
        if self.one_to_one:
            i = torch.arange(min(self.shape), device=self.device)
            return i, i
        # the side whose ids are searched for in the sorted ids of the other
        side = int(self.shape[1] > self.shape[0])
        own, other, ignored = self.ids[side], self.ids[1 - side], self.ignored[side]
        assert own is not None and other is not None
        ordered, order = torch.sort(other, stable=True)
        first = torch.searchsorted(ordered, own, out_int32=True)
        hit = ordered[first.clamp_max(len(ordered) - 1)] == own  # few entries of a memory match
        which = (hit if ignored is None else hit & ~ignored).nonzero().squeeze(1)
        first = first[which].long()
        count = torch.searchsorted(ordered, own[which], right=True) - first
        at = torch.repeat_interleave(count)  # 0 0 0 1 2 2 …
        own_index, other_index = which[at], order[first[at] + _within(at, count)]
        if side == 0:
            return own_index, other_index
        other_index, order = torch.sort(other_index, stable=True)
        return other_index, own_index[order]

    def places(self, side: int) -> Tensor:
        """Return the (A, P) positives of each row (0) or column (1), P the largest number of them,
        padded with -1.
        """
        anchors, size = self.listed[side], self.shape[side]
        slot = slots(anchors, size)
        places = torch.full((size, int(slot.max()) + 1 if len(slot) else 0), -1, device=self.device)
        places[anchors, slot] = self.listed[1 - side]
        return places

    # -------------------------------------------------------------------------------------- masking

    # PyTorch 2.8 compiles no default slices
    def excluded(self, over: str, rows: slice, cols: slice) -> Tensor | None:
        """Return the (r, c) bool mask of pairs that a sum ``over`` negatives, positives or all
        leaves out, or None.
        """
        (row_ids, col_ids), mask = self.ids, None
        if over != "all":
            if row_ids is None or col_ids is None:
                mask = torch.eye(*self.shape, dtype=torch.bool, device=self.device)[rows, cols]
            else:
                mask = row_ids[rows, None] == col_ids[cols]
            mask = ~mask if over == "positives" else mask
        for ignored, part in ((self.ignored[0], (rows, None)), (self.ignored[1], (None, cols))):
            if ignored is not None:
                mask = ignored[part] if mask is None else mask | ignored[part]
        return mask

    def exclude_(
        self, x: Tensor, part: tuple[slice, slice], value: float, over: str = "negatives"
    ) -> Tensor:
        """Fill the :meth:`excluded` pairs in a part ``x`` (..., r, c) of the matrix with ``value``;
        return ``x``.
        """
        r, c = part
        if over == "negatives" and self.one_to_one:
            offset = r.start - c.start
            if -x.shape[-2] < offset < x.shape[-1]:
                x.diagonal(offset, -2, -1).fill_(value)
            return x
        if over == "negatives" and self.listable and x.device.type == "cpu":
            start, stop = torch.searchsorted(
                self.listed[0], torch.tensor([r.start, r.stop])
            ).tolist()
            if (stop - start) * 16 <= x.numel():
                i, j = (y[start:stop] for y in self.listed)
                inside = (j >= c.start) & (j < c.stop)
                x[..., i[inside] - r.start, j[inside] - c.start] = value
                over = "all"
        mask = self.excluded(over, r, c)
        return x if mask is None else x.masked_fill_(mask, value)


def slots(anchors: Tensor, size: int) -> Tensor:
    """Return the (P,) index 0, 1, … of each pair among those of its anchor; ``anchors`` (P,) are
    below ``size``.
    """
    ordered, order = torch.sort(anchors, stable=True)
    return torch.empty_like(order).index_copy_(
        0, order, _within(ordered, torch.bincount(anchors, minlength=size))
    )


def _within(i: Tensor, count: Tensor) -> Tensor:
    """Return 0, 1, …, count[k] - 1 for each k, where ``i`` is ascending and contains each k
    count[k] times.
    """
    return torch.arange(len(i), device=i.device) - (count.cumsum(0) - count)[i]


def _diagonal(rows: Tensor, cols: Tensor) -> bool:
    """Return whether ids only say that row i matches column i; False if the host may not read them."""
    if not host_may_read(rows) or not torch.equal(rows, cols):
        return False
    ordered = rows.sort().values
    return not bool((ordered[1:] == ordered[:-1]).any()) and int(ordered[0]) != IGNORE_ID


# ---------------------------------------------------------------------------------- scores of pairs


def pair_products(scores: Scores, i: Tensor | None, j: Tensor | None) -> Tensor:
    """Return the (P,) scores of rows i with columns j, without a gradient; None stands for row, or
    column, p.
    """
    if (matrix := scores.matrix) is not None:
        return matrix.diagonal().clone() if i is None or j is None else matrix[i, j]
    (rows, row_inv), (cols, col_inv) = scores.vectors(0), scores.vectors(1)
    p, dtype = len(rows) if i is None else len(i), torch.promote_types(rows.dtype, torch.float32)
    products = rows.new_empty(p, dtype=dtype)
    for part in _gathered(p, rows):
        left, right = (
            x[part] if k is None else x.index_select(0, k[part]) for x, k in ((rows, i), (cols, j))
        )
        inv = row_inv if row_inv is None else row_inv[part if i is None else i[part]]
        # of two long vectors it would overflow
        torch.sum(scaled(left, inv) * right.to(dtype), 1, out=products[part])
    return products if col_inv is None else products.mul_(col_inv if j is None else col_inv[j])


def _gathered(size: int, x: Tensor) -> list[slice]:
    """Return slices of as many pairs as vectors like ``x`` (..., D) are gathered at once."""
    step = max(1, (_GATHERED if x.device.type == "cpu" else _ACCELERATOR_GATHERED) // x.shape[1])
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


def pair_gradient(
    total: Tensor | None,  # (N, D) that the gradient is added to; None: zeros
    index: Tensor | None,  # (P,) the vector in each pair; None: vector p in pair p
    other: Tensor,  # (M, D)
    other_inv: Tensor | None,  # (M,)
    others: Tensor | None,  # (P,)
    grad: Tensor,  # (P,)
    size: int,  # N
) -> Tensor:
    """Return the (N, D) gradient of unit vectors: ``sum_p grad_p y_p`` over pairs p, y_p the
    partner's unit vector.
    """
    weight = grad
    if other_inv is not None:
        weight = grad * (other_inv if others is None else other_inv[others])
    if total is None and index is None and others is None:
        return other.to(grad.dtype) * weight[:, None]
    if total is None:
        total = grad.new_zeros(size, other.shape[1])
    for part in _gathered(len(weight), other):
        y = other[part] if others is None else other.index_select(0, others[part])
        if index is None:
            total[part].addcmul_(y.to(grad.dtype), weight[part, None])
        else:
            _add_segments(total, index[part], y.to(grad.dtype) * weight[part, None])
    return total


def segment_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return the (size,) sums of the (P,) values of each index, deterministically."""
    return _add_segments(values.new_zeros(size), index, values)


def _add_segments(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return ``total`` (N, ...), to which the (P, ...) values of each index were added,
    deterministically.
    """
    if total.device.type == "cpu":
        return total.index_add_(0, index, values)
    # sorts on accelerators, where index_add is atomic
    return total.index_put_((index,), values, accumulate=True)


def weighted_sums(
    vectors: Tensor, which: Tensor, weights: Tensor, index: Tensor, size: int
) -> Tensor:
    """Return the (size, D) sums ``sum_{p: index[p] = a} weights[p] vectors[which[p]]``, without
    copies (P, D).
    """
    index, order = torch.sort(index, stable=True)
    offsets = torch.searchsorted(index, torch.arange(size, device=index.device))
    return F.embedding_bag(
        which[order], vectors, offsets, mode="sum", per_sample_weights=weights[order]
    )


def first_derivative_only() -> None:
    """Raise an error for ``create_graph=True``: second derivatives would silently miss terms of the
    embeddings.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "create_graph: second derivatives need engine='dense', whose answers are plain PyTorch"
        )
