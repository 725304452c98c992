"""Scores of sets of embeddings from the scores of their elements, which are held for a few sets at a time.

The scores ``x`` of the elements of n sets with those of m others are (n, K, m, L), those of the sets (n, m):

    max               max_k max_l x                     max_sum           sum_k max_l x
    smooth_max_sum    sum_k soft_l x                    smooth_chamfer    (mean_k soft_l x + mean_l soft_k x) / 2

with ``soft_l x = log(sum_l exp(alpha x)) / alpha``. Where a maximum has a gradient, forward notes which element won,
and backward forms no scores: it adds up the winners. The scores of the smooth ones are formed again in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pairs import weighted_sums
from .products import matmul
from .reduce import operator
from .scores import (
    _ACCELERATOR_TILE,
    TILE,
    compute_dtype,
    even_chunks,
    full_precision,
    inverse_norms,
    normalized,
    project_,
    scaled,
)

_WINNER = 8  # a winner, with its indices and what sorting them takes, needs the memory of so many scores
_FEW = 16  # times as many elements on one side as on the other are many


class Sets(NamedTuple):
    """Sets of embeddings."""

    x: Tensor  # (N, K, D)
    inv: Tensor | None = None  # (N, K) inverse norms; None: vectors are not normalised
    lengths: Tensor | None = None  # (N,) int64; None: all elements exist

    def missing(self, part: slice | None = None) -> Tensor | None:
        """Return the (n, K) bool mask of the elements of some sets that do not exist; None if all do."""
        if self.lengths is None:
            return None
        lengths = self.lengths if part is None else self.lengths[part]
        return torch.arange(self.x.shape[1], device=self.x.device) >= lengths[:, None]

    def unit(self, part: slice, clean: bool = False) -> Tensor:
        """Return the (n K, D) vectors of some sets in the compute dtype, at unit length if they are normalised.

        ``clean``: elements that do not exist are zero, whatever they hold; they add nothing to the others' gradient.
        """
        vectors = scaled(self.x[part].flatten(0, 1), None if self.inv is None else self.inv[part].flatten())
        missing = self.missing(part) if clean else None
        return vectors if missing is None else vectors.masked_fill(missing.view(-1, 1), 0.0)

    def gradient(self, grad: Tensor, unit: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return the (N, K, D) gradient of the sets from that of their ``unit`` vectors (N K, D), which is overwritten.

        ``out``: where to put it.
        """
        inv, missing = None if self.inv is None else self.inv.flatten(), self.missing()
        at_once = None  # formed in `out`, without a copy
        if out is not None and inv is not None and out.dtype == grad.dtype:
            at_once = out.flatten(0, 1)
        result = project_(grad, self.x.flatten(0, 1), inv, unit, at_once).view_as(self.x)
        if out is not None:
            result = out if at_once is not None else out.copy_(result)
        return result if missing is None else result.masked_fill_(missing.unsqueeze(-1), 0.0)


class Form(NamedTuple):
    """How elements' scores are aggregated."""

    name: str
    alpha: float

    @property
    def hard(self) -> bool:
        """Whether elements are chosen, so that the gradient is theirs."""
        return self.name in ("max", "max_sum")


def blocks(a: Sets, b: Sets, values: int) -> tuple[list[slice], list[slice]]:
    """Return slices of both sides' sets: ``values`` for each element of ``a`` and set of ``b`` are held at once."""
    (n, k, d), (m, size, _) = a.x.shape, b.x.shape
    numel, width = TILE.get(a.x.device.type, _ACCELERATOR_TILE)
    c = max(1, min(m, max(width, numel // (n * k)) // values, numel // (size * d)))
    r = max(1, min(n, numel // (c * values * k), numel // (k * d)))
    return even_chunks(n, r), even_chunks(m, c)


def units(sets: Sets, parts: list[slice]) -> Callable[[int], Tensor]:
    """Return a function of i for the unit vectors of the i-th part; they are kept if they are no larger than a tile."""
    numel = TILE.get(sets.x.device.type, _ACCELERATOR_TILE)[0]
    return functools.lru_cache(len(parts) if sets.x.numel() <= numel else 1)(lambda i: sets.unit(parts[i]))


# ------------------------------------------------------------------------------------------------ of one block


def aggregated(x: Tensor, form: Form, a: Sets, b: Sets) -> Tensor:
    """Return the (n, m) scores of sets from those of all their elements (n, K, m, L), overwritten, by plain PyTorch."""
    rows, cols = a.missing(), b.missing()
    low = _low(x)

    def best(dim: int, missing: Tensor | None) -> Tensor:
        y = x if form.hard else x * form.alpha
        if missing is not None:
            y.masked_fill_(missing, low)
        if not form.hard:
            return y.logsumexp(dim) / form.alpha
        return y.max(dim).values if torch.is_grad_enabled() else _amax(y)

    over_cols = best(3, cols)  # (n, K, m)
    if form.name == "max":
        over_cols = over_cols if rows is None else over_cols.masked_fill(rows.unsqueeze(-1), low)
        return over_cols.max(1).values if torch.is_grad_enabled() else over_cols.amax(1)
    total = _sum(over_cols, 1, rows if rows is None else rows.unsqueeze(-1))
    if form.name != "smooth_chamfer":
        return total
    over_rows = _sum(best(1, None if rows is None else rows[:, :, None, None]), 2, cols)  # of (n, m, L)
    return (total / _counts(a)[:, None] + over_rows / _counts(b)) / 2


def _low(x: Tensor) -> float:
    """Return the score of missing elements: it is finite, as a sum of exponentials of -inf has no gradient."""
    return torch.finfo(x.dtype).min / 2


def _sum(x: Tensor, dim: int, missing: Tensor | None) -> Tensor:
    return x.sum(dim) if missing is None else x.masked_fill(missing, 0.0).sum(dim)


def _counts(sets: Sets) -> Tensor:
    """Return the number of elements of each set (n,), at least 1, in the compute dtype; () if all are alike."""
    x = sets.x
    counts = torch.full((1,), x.shape[1], device=x.device) if sets.lengths is None else sets.lengths.clamp_min(1)
    return counts.to(compute_dtype(x))


def winning(x: Tensor, form: Form, a: Sets, b: Sets) -> tuple[Tensor, Tensor]:
    """Return `aggregated` of a maximum and which elements won; overwrites ``x``.

    The second is (n, K, m) for the element of ``b`` that is the best of each of ``a``, or (n, 1, m) ``k L + l`` for the
    best pair of elements.
    """
    rows, cols = a.missing(), b.missing()
    if cols is not None:
        x.masked_fill_(cols, _low(x))
    value, which = _argmax_(x)
    if rows is not None:
        value = value.masked_fill(rows.unsqueeze(-1), _low(x) if form.name == "max" else 0.0)
    if form.name == "max":
        value, best = value.max(1, keepdim=True)
        which = which.gather(1, best) + best * x.shape[3]
    return value.sum(1), which


def _amax(x: Tensor) -> Tensor:
    """Return ``x.amax(3)``. That of transposed scores is vectorised only if its own layout is theirs."""
    return x.amax(3) if x.is_contiguous() else x.permute(2, 0, 1, 3).amax(3).permute(1, 2, 0)


def _argmax_(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x.max(3)``, the first of equal ones; overwrites ``x``. PyTorch vectorises it on a CPU without the index.

    So it takes 0.6 of the time (1024 x 1024) to 0.15 (32 along another dimension). Scores within 1e-25 are equal here.
    """
    value, last = _amax(x), x.shape[3] - 1
    places = torch.arange(last, -1, -1, dtype=x.dtype, device=x.device)
    best = _amax(torch.add(places, x.sub_(value.unsqueeze(3)), alpha=1e30, out=x))
    return value, last - best.nan_to_num_(0.0).clamp_(0, last).long()


def slopes(x: Tensor, form: Form, a: Sets, b: Sets, grad: Tensor) -> Tensor:
    """Return the gradient (n, K, m, L) of smooth scores (n, m) w.r.t. those of their elements."""
    rows, cols = a.missing(), b.missing()
    z = x * form.alpha
    by_col = (z if cols is None else z.masked_fill(cols, _low(x))).softmax(3)
    if form.name != "smooth_chamfer":
        return by_col.mul_(grad[:, None, :, None])
    by_row = (z if rows is None else z.masked_fill_(rows[:, :, None, None], _low(x))).softmax(1)
    by_col.mul_((grad / _counts(a)[:, None] / 2)[:, None, :, None])
    return by_col.addcmul_(by_row, (grad / _counts(b) / 2)[:, None, :, None])


# -------------------------------------------------------------------------------------------------- operators


def _sets(source: Sequence[Tensor | None]) -> tuple[Sets, Sets]:
    return Sets(*source[:3]), Sets(*source[3:])  # type: ignore[arg-type]


def _part(sets: Sets, part: slice) -> Sets:
    return Sets(*(None if x is None else x[part] for x in sets))  # type: ignore[arg-type]


def _products(left: Tensor, right: Tensor, form: Form, a: Sets, b: Sets) -> Tensor:
    """Return the (n, K, m, L) scores of elements; with few of ``a``, as for one query, they are transposed in memory.

    Then the product and the maxima take 0.7 of the time, 32 elements against 12 x 666 of dimension 128; sums of
    exponentials would take longer.
    """
    if form.hard and _FEW * len(left) <= len(right):
        return matmul(right, left.T).view(*b.x.shape[:2], *a.x.shape[:2]).permute(2, 3, 0, 1)
    return matmul(left, right.T).view(*a.x.shape[:2], *b.x.shape[:2])


def _empty(a: Sets, b: Sets) -> Tensor | None:
    """Return the (N, M) bool mask of the pairs of which one set is empty; None without lengths."""
    empty = [None if x.lengths is None else x.lengths == 0 for x in (a, b)]
    rows, cols = (torch.zeros(1, dtype=torch.bool, device=a.x.device) if x is None else x for x in empty)
    return None if empty == [None, None] else rows[:, None] | cols


def _scores(source: list[Tensor | None], name: str, alpha: float, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the (N, M) scores and, with ``keep``, the elements that win, (N, K or 1, M) integers."""
    (a, b), form = _sets(source), Form(name, alpha)
    scores, winners = _fake_scores(source, name, alpha, keep)
    with torch.no_grad(), full_precision(a.x):
        rows, cols = blocks(a, b, b.x.shape[1])
        left = units(a, rows)
        for c in cols:  # the larger blocks outside: they are normalised once
            right, other = b.unit(c), _part(b, c)
            for i, r in enumerate(rows):
                own = _part(a, r)
                if winners.numel():
                    scores[r, c], winners[r, :, c] = winning(
                        _products(left(i), right, form, own, other), form, own, other
                    )
                else:
                    scores[r, c] = aggregated(_products(left(i), right, form, own, other), form, own, other)
        empty = _empty(a, b)
        return scores if empty is None else scores.masked_fill_(empty, 0.0), winners


def _fake_scores(source: list[Tensor | None], name: str, alpha: float, keep: bool) -> tuple[Tensor, Tensor]:
    (a, b), form = _sets(source), Form(name, alpha)
    (n, k, _), (m, size, _) = a.x.shape, b.x.shape
    k, size = (1, k * size) if name == "max" else (k, size)
    kind = next(x for x in (torch.uint8, torch.int16, torch.int32) if size <= torch.iinfo(x).max + 1)
    winners = a.x.new_empty((n, k, m) if keep and form.hard else (0,), dtype=kind)
    return a.x.new_empty(n, m, dtype=compute_dtype(a.x)), winners


def _gradients(
    source: list[Tensor | None], winners: Tensor, grad: Tensor, name: str, alpha: float, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sets of both sides; empty where not needed."""
    (a, b), form = _sets(source), Form(name, alpha)
    of_rows, of_cols = (x.new_empty(x.shape if need else (0,)) for x, need in zip((a.x, b.x), needs, strict=True))
    total = torch.zeros(a.x.shape if needs[0] else (0,), dtype=grad.dtype, device=grad.device)
    with torch.no_grad(), full_precision(a.x):
        empty = _empty(a, b)
        grad = grad if empty is None else grad.masked_fill(empty, 0.0)
        rows, cols = blocks(a, b, _WINNER if form.hard else b.x.shape[1])
        for c in cols:
            right, other = b.unit(c, clean=True), _part(b, c)
            held: Tensor | None = None
            for r in rows:
                left, own = a.unit(r, clean=True), _part(a, r)
                if form.hard:
                    grads = _of_winners(left, right, winners[r, :, c], grad[r, c], other.x.shape[1], needs)
                else:
                    by_score = slopes(_products(left, right, form, own, other), form, own, other, grad[r, c])
                    by_score = by_score.view(len(left), len(right))
                    grads = [
                        matmul(by_score, right) if needs[0] else None,
                        matmul(by_score.T, left) if needs[1] else None,
                    ]
                if grads[0] is not None:
                    total[r] += grads[0].view_as(own.x)
                if grads[1] is not None:
                    held = grads[1] if held is None else held.add_(grads[1])
            if held is not None:
                other.gradient(held, right, out=of_cols[c])
        if needs[0]:
            of_rows = a.gradient(total.flatten(0, 1))
    return of_rows, of_cols


def _of_winners(
    left: Tensor, right: Tensor, winners: Tensor, grad: Tensor, size: int, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return what a block of winners (n, K or 1, m) adds to the gradients of both sides' vectors."""
    (n, k, m), device = winners.shape, winners.device
    winners = winners.long()
    i = torch.arange(n * k, device=device).view(n, k, 1)
    if len(left) == n * k:
        i, j = i.expand(n, k, m), winners
    else:
        i, j = i * (len(left) // n) + winners // size, winners % size
    j = j + torch.arange(0, m * size, size, device=device)
    i, j, weights = i.flatten(), j.flatten(), grad[:, None].expand(n, k, m).flatten()
    return (
        weighted_sums(right, j, weights, i, len(left)) if needs[0] else None,
        weighted_sums(left, i, weights, j, len(right)) if needs[1] else None,
    )


def _fake_gradients(source, winners, grad, name, alpha, needs):
    return tuple(x.new_empty(x.shape if need else (0,)) for x, need in zip((source[0], source[3]), needs, strict=True))


_FORWARD = "(Tensor?[] source, str name, float alpha, bool keep) -> (Tensor, Tensor)"
_BACKWARD = "(Tensor?[] source, Tensor winners, Tensor grad, str name, float alpha, bool[] needs) -> (Tensor, Tensor)"
_forward = operator("set_scores", _FORWARD, _scores, _fake_scores)
_backward = operator("set_scores_backward", _BACKWARD, _gradients, _fake_gradients)


class _SetScores(torch.autograd.Function):
    """The (N, M) scores of sets, twice differentiable."""

    @staticmethod
    def forward(ctx: Any, form: Form, *source):
        ctx.form = form
        scores, winners = _forward(list(source), *form, True)
        ctx.save_for_backward(*source, winners)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        source, winners = list(ctx.saved_tensors[:6]), ctx.saved_tensors[6]
        needs, form = (ctx.needs_input_grad[1], ctx.needs_input_grad[4]), ctx.form
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            inputs = [x for x, need in zip((source[0], source[3]), needs, strict=True) if need]
            of_inputs = iter(torch.autograd.grad(_plain(*_sets(source), form), inputs, grads[0], create_graph=True))
            wanted = [next(of_inputs) if need else None for need in needs]
        else:
            found = _backward(source, winners, grads[0], *form, needs)
            wanted = [x if need else None for x, need in zip(found, needs, strict=True)]
        return None, wanted[0], None, None, wanted[1], None, None


def _plain(a: Sets, b: Sets, form: Form) -> Tensor:
    """Return the (N, M) scores by plain PyTorch, which holds all elements' scores."""
    units = []
    for sets in (a, b):
        missing = sets.missing()
        x = sets.x if missing is None else sets.x.masked_fill(missing.unsqueeze(-1), 0.0)
        units.append(normalized(x, sets.inv is not None))
    with full_precision(a.x):
        scores = aggregated(torch.einsum("nkd,mld->nkml", *units), form, a, b)
    empty = _empty(a, b)
    return scores if empty is None else scores.masked_fill(empty, 0.0)


def set_scores(
    rows: tuple[Tensor, Tensor | None], cols: tuple[Tensor, Tensor | None], name: str, alpha: float, normalize: bool
) -> Tensor:
    """Return the differentiable (N, M) scores of sets (N, K, D) and lengths (N,) with sets (M, L, D) and lengths."""
    source: list[Tensor | None] = []
    for x, lengths in (rows, cols):
        source += [x, inverse_norms(x.detach()) if normalize else None, lengths]
    if torch.is_grad_enabled() and (rows[0].requires_grad or cols[0].requires_grad):
        return _SetScores.apply(Form(name, float(alpha)), *source)  # type: ignore[return-value]
    return _forward(source, name, float(alpha), False)[0]
