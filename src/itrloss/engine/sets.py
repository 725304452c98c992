"""Scores of sets of embeddings from the scores of their elements, which are held for a few sets at
a time.

The scores ``x`` of the elements of n sets with those of m others are (n, K, m, L), those of the
sets (n, m):

    max               max_k max_l x                     max_sum           sum_k max_l x
    smooth_max_sum    sum_k soft_l x                    smooth_chamfer    (mean_k soft_l x + mean_l soft_k x) / 2

with ``soft_l x = log(sum_l exp(alpha x)) / alpha``. Where a maximum has a gradient, forward notes
which element won, and backward forms no scores: it adds up the winners. The scores of the smooth
ones are formed again in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import ACCELERATOR_TILE, TILE, even_chunks
from .pairs import weighted_sums
from .products import add_matmul_, matmul
from .vectors import (
    compute_dtype,
    full_precision,
    inverse_norms,
    normalized,
    project,
    scaled,
)

# a winner, with its indices and what sorting them takes, needs the memory of so many scores
_WINNER = 8


class Sets(NamedTuple):
    """Sets of embeddings."""

    x: Tensor  # (N, K, D)
    inv: Tensor | None = None  # (N, K, 1) inverse norms; None: vectors are not normalised
    lengths: Tensor | None = None  # (N,) int64; None: all elements exist

    def part(self, part: slice) -> Sets:
        """Return some of the sets."""
        return Sets(*(None if x is None else x[part] for x in self))  # type: ignore[arg-type]

    def missing(self) -> Tensor | None:
        """Return the (N, K) bool mask of the elements that do not exist; None if all do."""
        if self.lengths is None:
            return None
        return torch.arange(self.x.shape[1], device=self.x.device) >= self.lengths[:, None]

    def unit(self) -> Tensor:
        """Return the (N K, D) vectors in the compute dtype, at unit length if they are normalised.

        Elements that do not exist are zero, whatever they hold; they add nothing to the others'
        gradient.
        """
        vectors, missing = scaled(self.x.flatten(0, 1), self._inverse()), self.missing()
        return vectors if missing is None else vectors.masked_fill(missing.view(-1, 1), 0.0)

    def differentiable(self, normalize: bool) -> Tensor:
        """Return the (N, K, D) vectors in the compute dtype, as `unit` does, differentiable."""
        missing = self.missing()
        return normalized(
            self.x if missing is None else self.x.masked_fill(missing.unsqueeze(-1), 0.0), normalize
        )

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the (N, K, D) gradient of the sets from that of their ``unit`` vectors, which is
        overwritten.
        """
        inv = self._inverse()
        result = grad.flatten(0, 1)
        if inv is not None:
            result = project(result, self.unit(), inv)
        result = result.to(self.x.dtype).view_as(self.x)
        missing = self.missing()
        return result if missing is None else result.masked_fill_(missing.unsqueeze(-1), 0.0)

    def _inverse(self) -> Tensor | None:
        return None if self.inv is None else self.inv.flatten(0, 1)


class Form(NamedTuple):
    """How elements' scores are aggregated."""

    name: str
    alpha: float

    @property
    def hard(self) -> bool:
        """Whether elements are chosen, so that the gradient is theirs."""
        return self.name in ("max", "max_sum")


def blocks(a: Sets, b: Sets, values: int) -> tuple[list[slice], list[slice]]:
    """Return slices of both sides' sets: ``values`` for each element of ``a`` and set of ``b`` are
    held at once.
    """
    (n, k, d), (m, size, _) = a.x.shape, b.x.shape
    numel, width = TILE.get(a.x.device.type, ACCELERATOR_TILE)
    c = max(1, min(m, max(width, numel // (n * k)) // values, numel // (size * d)))
    r = max(1, min(n, numel // (c * values * k), numel // (k * d)))
    return even_chunks(n, r), even_chunks(m, c)


# ------------------------------------------------------------------------------------- of one block


def winning(
    x: Tensor, form: Form, a: Sets, b: Sets, keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the (n, m) maxima of elements' scores (m, L, n, K) and, with ``keep``, which won;
    overwrites ``x``.

    The second is (m, n, K) for the element of ``b`` that is the best of each of ``a``, or (m, n, 1)
    ``k L + l`` for the best pair of elements.
    """
    rows, cols = a.missing(), b.missing()
    if cols is not None:
        x.masked_fill_(cols[:, :, None, None], _low(x))
    if torch.is_grad_enabled():
        value, which = x.max(1)
    else:
        value, which = _argmax_(x) if keep else (x.amax(1), None)
    if rows is not None:
        value = value.masked_fill(rows, _low(x) if form.name == "max" else 0.0)
    if form.name == "max":
        value, best = value.max(2, keepdim=True)
        which = None if which is None else which.gather(2, best) + best * x.shape[1]
    return value.sum(2).T, which


def _argmax_(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x.max(1)``, the first of equal ones; overwrites ``x``. PyTorch vectorises it on a
    CPU without the index.

    So it takes 0.2 to 0.3 of the time (L of 32 to 1024, one thread of Zen 3). Scores within 1e-25
    are equal here.
    """
    value, last = x.amax(1), x.shape[1] - 1
    places = torch.arange(last, -1, -1, dtype=x.dtype, device=x.device).view(-1, 1, 1)
    best = torch.add(places, x.sub_(value.unsqueeze(1)), alpha=1e30, out=x).amax(1)
    return value, last - best.nan_to_num_(0.0).clamp_(0, last).long()


def smooth(x: Tensor, form: Form, a: Sets, b: Sets) -> Tensor:
    """Return the (n, m) sums of exponentials of elements' scores (n, K, m, L), by plain PyTorch."""
    rows, cols = a.missing(), b.missing()

    def soft(dim: int, missing: Tensor | None) -> Tensor:
        z = x * form.alpha
        return (z if missing is None else z.masked_fill_(missing, _low(x))).logsumexp(
            dim
        ) / form.alpha

    total = _sum(soft(3, cols), 1, None if rows is None else rows.unsqueeze(-1))
    if form.name != "smooth_chamfer":
        return total
    over_rows = _sum(soft(1, None if rows is None else rows[:, :, None, None]), 2, cols)
    return (total / _counts(a)[:, None] + over_rows / _counts(b)) / 2


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


def _low(x: Tensor) -> float:
    """Return the score of missing elements: it is finite, as a sum of exponentials of -inf has no
    gradient.
    """
    return torch.finfo(x.dtype).min / 2


def _sum(x: Tensor, dim: int, missing: Tensor | None) -> Tensor:
    return x.sum(dim) if missing is None else x.masked_fill(missing, 0.0).sum(dim)


def _counts(sets: Sets) -> Tensor:
    """Return the number of elements of each set (n,), at least 1, in the compute dtype; () if all
    are alike.
    """
    x = sets.x
    counts = (
        torch.full((1,), x.shape[1], device=x.device)
        if sets.lengths is None
        else sets.lengths.clamp_min(1)
    )
    return counts.to(compute_dtype(x))


# ---------------------------------------------------------------------------------------- operators


def _sets(source: Sequence[Tensor | None]) -> tuple[Sets, Sets]:
    return Sets(*source[:3]), Sets(*source[3:])  # type: ignore[arg-type]


def _of_existing(x: Tensor, a: Sets, b: Sets) -> Tensor:
    """Return values of pairs (N, M) with 0 where one of the sets is empty."""
    for sets, dim in ((a, 1), (b, 0)):
        x = x if sets.lengths is None else x.masked_fill((sets.lengths == 0).unsqueeze(dim), 0.0)
    return x


def _block_scores(
    right: Tensor, form: Form, a: Sets, b: Sets, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the (n, m) scores of a block of sets, the second of unit vectors ``right``, and which
    elements won.

    For maxima the scores of elements are (m, L, n, K). With the product they take 0.78 of the time
    of (n, K, m, L) for 32 queries of 32 elements with documents of 666, 0.75 for 64 sets of 49 with
    64 of 20, and 1.03 for documents of 1024 (D 128, one thread of Zen 3; ``pytest
    benchmarks/test_micro.py --benchmark-enable -k late_interaction``). Exponentials would take
    longer.
    """
    (n, k, _), (m, size, _) = a.x.shape, b.x.shape
    if form.hard:
        return winning(matmul(right, a.unit().T).view(m, size, n, k), form, a, b, keep)
    return smooth(matmul(a.unit(), right.T).view(n, k, m, size), form, a, b), None


def _scores(
    source: list[Tensor | None], name: str, alpha: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the (N, M) scores and, with ``keep``, the elements that win, (M, N, K or 1) integers."""
    (a, b), form = _sets(source), Form(name, alpha)
    scores, winners = _fake_scores(source, name, alpha, keep)
    with torch.no_grad(), full_precision(a.x):
        rows, cols = blocks(a, b, b.x.shape[1])
        for c in cols:  # the larger blocks outside: they are normalised once
            other = b.part(c)
            right = other.unit()
            for r in rows:
                own = a.part(r)
                scores[r, c], which = _block_scores(right, form, own, other, keep)
                if which is not None:
                    winners[c, r] = which
        return _of_existing(scores, a, b), winners


def _fake_scores(
    source: list[Tensor | None], name: str, alpha: float, keep: bool
) -> tuple[Tensor, Tensor]:
    (a, b), form = _sets(source), Form(name, alpha)
    (n, k, _), (m, size, _) = a.x.shape, b.x.shape
    k, size = (1, k * size) if name == "max" else (k, size)
    kind = next(
        x for x in (torch.uint8, torch.int16, torch.int32) if size <= torch.iinfo(x).max + 1
    )
    winners = a.x.new_empty((m, n, k) if keep and form.hard else (0,), dtype=kind)
    return a.x.new_empty(n, m, dtype=compute_dtype(a.x)), winners


def _gradients(
    source: list[Tensor | None],
    winners: Tensor,
    grad: Tensor,
    name: str,
    alpha: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sets of both sides; empty where not needed."""
    (a, b), form = _sets(source), Form(name, alpha)
    new = functools.partial(torch.zeros, dtype=grad.dtype, device=grad.device)
    of_rows, of_cols = (
        new(a.x.shape if needs[0] else 0),
        b.x.new_empty(b.x.shape if needs[1] else 0),
    )
    with torch.no_grad(), full_precision(a.x):
        grad = _of_existing(grad, a, b)
        rows, cols = blocks(a, b, _WINNER if form.hard else b.x.shape[1])
        for c in cols:
            other = b.part(c)
            right, held = other.unit(), new(other.x.shape if needs[1] else 0)
            for r in rows:
                own = a.part(r)
                left = own.unit()
                if form.hard:
                    i, j, weights = _winning_pairs(winners[c, r], grad[r, c].T, own, other)
                    if needs[0]:
                        of_rows[r] += weighted_sums(right, j, weights, i, len(left)).view_as(own.x)
                    if needs[1]:
                        held += weighted_sums(left, i, weights, j, len(right)).view_as(other.x)
                else:
                    x = matmul(left, right.T).view(*own.x.shape[:2], *other.x.shape[:2])
                    x = slopes(x, form, own, other, grad[r, c]).view(len(left), len(right))
                    if needs[0]:
                        add_matmul_(of_rows[r].flatten(0, 1), x, right)
                    if needs[1]:
                        add_matmul_(held.flatten(0, 1), x.T, left)
            if needs[1]:
                of_cols[c] = other.gradient(held)
    return a.gradient(of_rows) if needs[0] else a.x.new_empty(0), of_cols


def _winning_pairs(
    winners: Tensor, grad: Tensor, a: Sets, b: Sets
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (P,) elements of ``a`` and ``b`` that won, (m, n, K or 1), and the gradients (m, n) of
    their scores.
    """
    (m, n, k), size = winners.shape, b.x.shape[1]
    winners, device = winners.long(), winners.device
    i = torch.arange(n * k, device=device).view(n, k) * (a.x.shape[1] // k) + winners // size
    j = torch.arange(m, device=device).view(m, 1, 1) * size + winners % size
    return i.flatten(), j.flatten(), grad.unsqueeze(2).expand(m, n, k).flatten()


class _SetScores(torch.autograd.Function):
    """The (N, M) scores of sets, twice differentiable."""

    @staticmethod
    def forward(ctx: Any, form: Form, *source):
        ctx.form = form
        scores, winners = _scores(list(source), form.name, form.alpha, True)
        ctx.save_for_backward(*source, winners)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        source, winners = list(ctx.saved_tensors[:6]), ctx.saved_tensors[6]
        needs, form = (ctx.needs_input_grad[1], ctx.needs_input_grad[4]), ctx.form
        if torch.is_grad_enabled():  # create_graph=True
            inputs = [x for x, need in zip((source[0], source[3]), needs, strict=True) if need]
            of_inputs = iter(
                torch.autograd.grad(
                    _plain(*_sets(source), form), inputs, grads[0], create_graph=True
                )
            )
            gradients = [next(of_inputs) if need else None for need in needs]
        else:
            results = _gradients(source, winners, grads[0], form.name, form.alpha, needs)
            gradients = [x if need else None for x, need in zip(results, needs, strict=True)]
        return None, gradients[0], None, None, gradients[1], None, None


def _plain(a: Sets, b: Sets, form: Form) -> Tensor:
    """Return the (N, M) scores by plain PyTorch, which holds all elements' scores."""
    units = [sets.differentiable(sets.inv is not None) for sets in (a, b)]
    with full_precision(a.x):
        if form.hard:
            scores = winning(torch.einsum("nkd,mld->mlnk", *units), form, a, b)[0]
        else:
            scores = smooth(torch.einsum("nkd,mld->nkml", *units), form, a, b)
    return _of_existing(scores, a, b)


def set_scores(
    rows: tuple[Tensor, Tensor | None],
    cols: tuple[Tensor, Tensor | None],
    name: str,
    alpha: float,
    normalize: bool,
) -> Tensor:
    """Return the differentiable (N, M) scores of sets (N, K, D) and lengths (N,) with sets (M, L,
    D) and lengths.
    """
    source: list[Tensor | None] = []
    for x, lengths in (rows, cols):
        source += [x, inverse_norms(x.detach()) if normalize else None, lengths]
    if torch.compiler.is_compiling():
        return _plain(*_sets(source), Form(name, float(alpha)))
    if torch.is_grad_enabled() and (rows[0].requires_grad or cols[0].requires_grad):
        return _SetScores.apply(Form(name, float(alpha)), *source)  # type: ignore[return-value]
    return _scores(source, name, float(alpha), False)[0]
