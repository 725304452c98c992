"""Scores of sets of embeddings from the scores of their elements, a few sets at a time.

The scores ``x`` of the elements of n sets with the elements of m others are (n, K, m, L), the
scores of the sets (n, m):

    max               max_k max_l x
    max_sum           sum_k max_l x
    smooth_max_sum    sum_k soft_l x
    smooth_chamfer    (mean_k soft_l x + mean_l soft_k x) / 2

with ``soft_l x = log(sum_l exp(alpha x)) / alpha``. Autograd differentiates a block of them, whose
scores are computed again in backward. Where a maximum has a gradient, forward notes which element
won instead, and backward forms no scores: it adds up the winners.

Sets of the columns may also belong to one row each: row n meets its own J sets alone. All shapes
then begin with n, and the row is one set next to J others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_versions import is_compiling
from .inputs import ACCELERATOR_TILE, TILE, even_chunks, taken
from .products import product
from .relation import weighted_sums
from .step import aliases
from .vectors import compute_dtype, normalized

# A winner, with its indices and what sorting them takes, needs the memory of so many scores.
WINNER = 8


class Sets(NamedTuple):
    """Sets of embeddings. All shapes may begin with further dimensions."""

    x: Tensor  # (N, K, D)
    exists: Tensor | None = None  # (N, K) bool; None: all elements exist

    @property
    def number(self) -> int:
        """The number of sets, N."""
        return self.x.shape[-3]

    @property
    def size(self) -> int:
        """The number of elements of a set, K, with padding."""
        return self.x.shape[-2]

    @property
    def vectors(self) -> Tensor:
        """The (N K, D) vectors of all elements."""
        return self.x.flatten(-3, -2)

    def part(self, part: Any) -> Sets:
        """Return some of the sets, by an index."""
        return Sets(self.x[part], taken(self.exists, part))

    def missing(self) -> Tensor | None:
        """Return the (N, K) bool mask of the elements that do not exist; None if all do."""
        return None if self.exists is None else ~self.exists

    def empty(self) -> Tensor | None:
        """Return the (N,) bool mask of the sets without an element; None if there is none."""
        return None if self.exists is None else ~self.exists.any(-1)

    def numbers_of_elements(self) -> Tensor:
        """Return how many elements exist, (N,) or (1,), at least 1, in the compute dtype."""
        if self.exists is None:
            numbers = torch.full((1,), self.size, device=self.x.device)
        else:
            numbers = self.exists.sum(-1).clamp_min(1)
        return numbers.to(compute_dtype(self.x))

    def prepared(self, normalize: bool) -> Sets:
        """Return the sets in the compute dtype, with ``normalize`` at unit length; differentiable.

        Elements that do not exist are zero, whatever they hold, and have no gradient.
        """
        x = self.x
        missing = self.missing()
        if missing is not None:
            x = x.masked_fill(missing.unsqueeze(-1), 0.0)
        return Sets(normalized(x, normalize), self.exists)

    def leaf(self, part: Any) -> Sets:
        """Return some of the sets in the compute dtype, as the beginning of a graph."""
        x = self.x.detach()[part].to(compute_dtype(self.x))
        return Sets(x.requires_grad_(self.x.requires_grad), taken(self.exists, part))


class Form(NamedTuple):
    """How the scores of sets are computed from their elements."""

    name: str
    alpha: float
    normalize: bool

    @property
    def is_hard(self) -> bool:
        """Whether elements are chosen, so that the gradient is theirs."""
        return self.name in ("max", "max_sum")


# ------------------------------------------------------------------------------------ of one block


def element_scores(rows: Sets, cols: Sets, form: Form) -> Tensor:
    """Return the scores (..., n, K, m, L) of prepared sets' elements, of maxima (..., m, L, n, K).

    With the product, maxima take 0.78 of the time in that layout for 32 queries of 32 elements with
    documents of 666, 0.75 for 64 sets of 49 with 64 of 20, and 1.03 for documents of 1024 (D 128,
    one thread of Zen 3; ``pytest benchmarks/test_micro.py --benchmark-enable -k
    late_interaction``). Exponentials would take longer.
    """
    first, second = (cols, rows) if form.is_hard else (rows, cols)
    x = product(first.vectors, second.vectors.mT)
    return x.view(*x.shape[:-2], first.number, first.size, second.number, second.size)


def aggregated(
    x: Tensor, rows: Sets, cols: Sets, form: Form, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the scores (..., n, m) of sets from those of their elements, which are overwritten.

    With ``keep``, return which elements won, too, see :func:`winning`.
    """
    which: Tensor | None = None
    if form.is_hard:
        scores, which = winning(x, rows, cols, form, keep)
    else:
        scores = smooth(x, rows, cols, form)
    return of_existing(scores, rows, cols), which


def of_existing(x: Tensor, rows: Sets, cols: Sets) -> Tensor:
    """Return values of pairs (..., N, M) with 0 where one of the sets is empty."""
    empty_rows = rows.empty()
    empty_cols = cols.empty()
    if empty_rows is not None:
        x = x.masked_fill(empty_rows.unsqueeze(-1), 0.0)
    if empty_cols is not None:
        x = x.masked_fill(empty_cols.unsqueeze(-2), 0.0)
    return x


def plain_scores(rows: Sets, cols: Sets, form: Form) -> Tensor:
    """Return the (..., N, M) scores in plain PyTorch, which holds the scores of all elements."""
    rows = rows.prepared(form.normalize)
    cols = cols.prepared(form.normalize)
    return aggregated(element_scores(rows, cols, form), rows, cols, form)[0]


def winning(
    x: Tensor,  # (..., m, L, n, K) scores of elements, overwritten
    rows: Sets,  # (..., n, K, D)
    cols: Sets,  # (..., m, L, D)
    form: Form,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the (..., n, m) maxima of elements' scores and, with ``keep``, which elements won.

    The second is (..., m, n, K) for the element of ``cols`` that is the best of each of ``rows``,
    or (..., m, n, 1) ``k L + l`` for the best pair of elements.
    """
    missing_rows = rows.missing()
    missing_cols = cols.missing()
    if missing_cols is not None:
        x.masked_fill_(missing_cols[..., None, None], lowest(x))
    which: Tensor | None = None
    if torch.is_grad_enabled():
        value, which = x.max(-3)
    elif keep:
        value, which = argmax_(x)
    else:
        value = x.amax(-3)
    if missing_rows is not None:
        fill = lowest(x) if form.name == "max" else 0.0
        value = value.masked_fill(missing_rows.unsqueeze(-3), fill)
    if form.name == "max":
        value, best = value.max(-1, keepdim=True)
        if which is not None:
            which = which.gather(-1, best) + best * cols.size
    return value.sum(-1).mT, which


def argmax_(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x.max(-3)`` of (..., m, L, n, K), the first of equal ones; overwrites ``x``.

    PyTorch vectorises it on a CPU without the index: so it takes 0.2 to 0.3 of the time (L of 32 to
    1024, one thread of Zen 3). Scores within 1e-25 are equal here.
    """
    value = x.amax(-3)
    last = x.shape[-3] - 1
    places = torch.arange(last, -1, -1, dtype=x.dtype, device=x.device).view(-1, 1, 1)
    best = torch.add(places, x.sub_(value.unsqueeze(-3)), alpha=1e30, out=x).amax(-3)
    return value, last - best.nan_to_num_(0.0).clamp_(0, last).long()


def smooth(
    x: Tensor,  # (..., n, K, m, L) scores of elements
    rows: Sets,  # (..., n, K, D)
    cols: Sets,  # (..., m, L, D)
    form: Form,
) -> Tensor:
    """Return the smooth scores (..., n, m) of sets."""
    missing_rows = rows.missing()
    missing_cols = cols.missing()
    if missing_cols is not None:
        missing_cols = missing_cols.unsqueeze(-3)  # (..., 1, m, L)
    missing_of_all = None if missing_cols is None else missing_cols.unsqueeze(-3)
    of_rows = soft_maximum(x, form, -1, missing_of_all)  # (..., n, K, m)
    if missing_rows is not None:
        of_rows = of_rows.masked_fill(missing_rows.unsqueeze(-1), 0.0)
    total = of_rows.sum(-2)
    if form.name == "smooth_max_sum":
        return total
    if missing_rows is not None:
        missing_rows = missing_rows[..., None, None]
    of_cols = soft_maximum(x, form, -3, missing_rows)  # (..., n, m, L)
    if missing_cols is not None:
        of_cols = of_cols.masked_fill(missing_cols, 0.0)
    mean_of_rows = total / rows.numbers_of_elements().unsqueeze(-1)
    mean_of_cols = of_cols.sum(-1) / cols.numbers_of_elements().unsqueeze(-2)
    return (mean_of_rows + mean_of_cols) / 2


def soft_maximum(x: Tensor, form: Form, dim: int, missing: Tensor | None) -> Tensor:
    """Return ``log(sum exp(alpha x)) / alpha`` over a dimension's existing elements."""
    z = x * form.alpha
    if missing is not None:
        z = z.masked_fill_(missing, lowest(x))
    return z.logsumexp(dim) / form.alpha


def lowest(x: Tensor) -> float:
    """Return the score of missing elements.

    It is finite, as a sum of exponentials of -inf has no gradient.
    """
    return torch.finfo(x.dtype).min / 2


# --------------------------------------------------------------------------------- sums over blocks


def blocks(
    rows: Sets,
    cols: Sets,
    values: int,  # that are held for each element of ``rows`` and set of ``cols``
) -> list[tuple[slice, slice]]:
    """Return the rows and the columns of blocks that cover every pair of sets once."""
    if not len(rows.x):  # in one process of several
        return []
    d = rows.x.shape[-1]
    numel, width = TILE.get(rows.x.device.type, ACCELERATOR_TILE)
    if are_own(cols):
        step = numel // (cols.number * cols.size * max(rows.size, d))
        return [(part, part) for part in even_chunks(len(rows.x), max(1, step))]
    by_scores = max(width, numel // (rows.number * rows.size)) // values
    by_vectors = numel // (cols.size * d)
    step = max(1, min(cols.number, by_scores, by_vectors))
    col_parts = even_chunks(cols.number, step)
    by_scores = numel // (step * values * rows.size)
    by_vectors = numel // (rows.size * d)
    row_parts = even_chunks(rows.number, max(1, min(rows.number, by_scores, by_vectors)))
    return [(r, c) for c in col_parts for r in row_parts]


def are_own(cols: Sets) -> bool:
    """Return whether each row has sets of its own, (N, J, L, D)."""
    return cols.x.dim() == 4


def scores_and_winners(
    rows: Sets, cols: Sets, form: Form, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the scores (N, M), or (N, 1, J) of own sets.

    With ``keep``, return which elements win, too: (M, N, K or 1) integers. Of own sets, none do.
    """
    shape = (*rows.x.shape[:-2], cols.number)
    scores = rows.x.new_empty(shape, dtype=compute_dtype(rows.x))
    winners: Tensor | None = None
    if keep and form.is_hard and not are_own(cols):
        winners = empty_winners(rows, cols, form)
    right: Sets | None = None
    known: slice | None = None
    with torch.no_grad():
        for r, c in blocks(rows, cols, cols.size):
            if right is None or c != known:  # the larger parts change less often
                right = cols.part(c).prepared(form.normalize)
                known = c
            left = rows.part(r).prepared(form.normalize)
            x = element_scores(left, right, form)
            place = (r,) if are_own(cols) else (r, c)
            scores[place], which = aggregated(x, left, right, form, winners is not None)
            if winners is not None and which is not None:
                winners[c, r] = which
    return scores, winners


def empty_winners(rows: Sets, cols: Sets, form: Form) -> Tensor:
    """Return space for the numbers of elements that win, in the smallest dtype that holds them."""
    each = rows.size
    numbers = cols.size
    if form.name == "max":  # the best pair of elements
        each = 1
        numbers = rows.size * cols.size
    dtype = torch.int32
    if numbers <= 2**15:
        dtype = torch.int16
    if numbers <= 2**8:
        dtype = torch.uint8
    return rows.x.new_empty((cols.number, rows.number, each), dtype=dtype)


class SetScores(torch.autograd.Function):
    """The (N, M) scores of sets, or (N, 1, J) of own sets; twice differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        row_x: Tensor,  # (N, K, D), or (N, 1, K, D)
        col_x: Tensor,  # (M, L, D), or (N, J, L, D)
        row_exists: Tensor | None,
        col_exists: Tensor | None,
        form: Form,
    ) -> Tensor:
        """Return the scores of the sets."""
        rows = Sets(row_x, row_exists)
        cols = Sets(col_x, col_exists)
        scores, winners = scores_and_winners(rows, cols, form, keep=True)
        ctx.form = form
        ctx.save_for_backward(row_x, row_exists, col_x, col_exists, winners)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of both sides' elements from the scores'."""
        row_x, row_exists, col_x, col_exists, winners = ctx.saved_tensors
        rows = Sets(row_x, row_exists)
        cols = Sets(col_x, col_exists)
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True
            of_rows, of_cols = differentiable_gradients(rows, cols, grad, ctx.form)
        else:
            of_rows, of_cols = gradients(rows, cols, winners, grad, ctx.form)
        return of_rows, of_cols, None, None, None


def differentiable_gradients(
    rows: Sets, cols: Sets, grad: Tensor, form: Form
) -> list[Tensor | None]:
    """Return the gradients of both sides' elements; None where they need none."""
    both = aliases((rows.x, cols.x))
    scores = plain_scores(rows._replace(x=both[0]), cols._replace(x=both[1]), form)
    trained = [x for x in both if x.requires_grad]
    found = iter(torch.autograd.grad(scores, trained, grad, create_graph=True))
    return [next(found) if x.requires_grad else None for x in both]


def gradients(
    rows: Sets,
    cols: Sets,
    winners: Tensor | None,  # as from `scores_and_winners`
    grad: Tensor,  # of the scores
    form: Form,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both sides' elements; None where they need none."""
    of_rows = zeros_of_elements(rows)
    of_cols = zeros_of_elements(cols)
    with torch.no_grad():
        for r, c in blocks(rows, cols, cols.size if winners is None else WINNER):
            row_leaf = rows.leaf(r)
            col_leaf = cols.leaf(c)
            with torch.enable_grad():
                left = row_leaf.prepared(form.normalize)
                right = col_leaf.prepared(form.normalize)
            if winners is None:
                own = grad[r] if are_own(cols) else grad[r, c]
                slopes = slopes_of_elements(left, right, own, form)
            else:
                slopes = winning_pairs(left, right, grad[r, c], winners[c, r])
            if of_rows is not None:
                of_rows[r] += gradient_of_block(row_leaf, left, right, slopes)
            if of_cols is not None:
                of_cols[c] += gradient_of_block(col_leaf, right, left, slopes.mT)
    if of_rows is not None:
        of_rows = of_rows.to(rows.x.dtype)
    if of_cols is not None:
        of_cols = of_cols.to(cols.x.dtype)
    return of_rows, of_cols


def zeros_of_elements(sets: Sets) -> Tensor | None:
    """Return zeros (N, K, D) in the compute dtype; None for sets that need no gradient."""
    if not sets.x.requires_grad:
        return None
    return torch.zeros(sets.x.shape, dtype=compute_dtype(sets.x), device=sets.x.device)


class WinningPairs(NamedTuple):
    """The pairs of elements that won, and the gradients of their scores; all others' are 0."""

    i: Tensor  # (P,) elements of one side
    j: Tensor  # (P,) elements of the other
    grad: Tensor  # (P,)

    @property
    def mT(self) -> WinningPairs:
        """The same pairs, seen from the other side."""
        return WinningPairs(self.j, self.i, self.grad)


def winning_pairs(
    rows: Sets,
    cols: Sets,
    grad: Tensor,  # (n, m)
    winners: Tensor,  # (m, n, K or 1), as from `winning`
) -> WinningPairs:
    """Return the pairs of elements of a block that won."""
    m, n, k = winners.shape
    device = winners.device
    numbers = winners.long()
    first_of_rows = torch.arange(n * k, device=device).view(n, k) * (rows.size // k)
    first_of_cols = torch.arange(m, device=device).view(m, 1, 1) * cols.size
    i = first_of_rows + numbers // cols.size
    j = first_of_cols + numbers % cols.size
    each = of_existing(grad, rows, cols).T.unsqueeze(2).expand(m, n, k)
    return WinningPairs(i.flatten(), j.flatten(), each.flatten())


def slopes_of_elements(rows: Sets, cols: Sets, grad: Tensor, form: Form) -> Tensor:
    """Return the gradient (..., n K, m L) of the scores of a block's elements."""
    x = element_scores(rows, cols, form)
    if not form.is_hard:
        slopes = smooth_slopes(x, rows, cols, form, grad)
        return slopes.flatten(-2, -1).flatten(-3, -2)
    x.requires_grad_()
    with torch.enable_grad():
        scores, _ = aggregated(x.clone(), rows, cols, form)
    (slopes,) = torch.autograd.grad(scores, x, grad)
    return slopes.flatten(-2, -1).flatten(-3, -2).mT


def smooth_slopes(x: Tensor, rows: Sets, cols: Sets, form: Form, grad: Tensor) -> Tensor:
    """Return the gradient (..., n, K, m, L) of the scores of elements, which are overwritten.

    Autograd would hold four blocks of scores, and take 1.5 times as long.
    """
    grad = of_existing(grad, rows, cols)
    missing_rows = rows.missing()
    missing_cols = cols.missing()
    z = x.mul_(form.alpha)
    existing = z
    if missing_cols is not None:
        existing = z.masked_fill(missing_cols[..., None, None, :, :], lowest(x))
    by_col = existing.softmax(-1)
    if form.name == "smooth_max_sum":
        return by_col.mul_(grad[..., :, None, :, None])
    if missing_rows is not None:
        z.masked_fill_(missing_rows[..., None, None], lowest(x))
    by_row = z.softmax(-3)
    of_rows = grad / rows.numbers_of_elements()[..., None] / 2
    of_cols = grad / cols.numbers_of_elements().unsqueeze(-2) / 2
    by_col.mul_(of_rows[..., :, None, :, None])
    return by_col.addcmul_(by_row, of_cols[..., :, None, :, None])


def gradient_of_block(
    leaf: Sets,  # (n, K, D)
    prepared: Sets,
    others: Sets,  # prepared, (m, L, D)
    slopes: Tensor | WinningPairs,  # of the scores of their elements, (n K, m L)
) -> Tensor:
    """Return the gradient (n, K, D) of a block's elements on one side."""
    if isinstance(slopes, WinningPairs):
        i, j, grad = slopes
        of_vectors = weighted_sums(others.vectors, j, grad, i, len(prepared.vectors))
    else:
        of_vectors = product(slopes, others.vectors)
    return torch.autograd.grad(prepared.x, leaf.x, of_vectors.view_as(leaf.x))[0]


# ------------------------------------------------------------------------------------------- scores


def set_scores(rows: Sets, cols: Sets, form: Form) -> Tensor:
    """Return the differentiable scores (N, M) of sets (N, K, D) and (M, L, D), or (N, J) of sets
    (N, K, D) and their own (N, J, L, D).
    """
    if cols.x.dim() == 4:
        one_each = rows.part((slice(None), None))  # (N, 1, K, D)
        return scores_by_blocks(one_each, cols, form).squeeze(1)
    return scores_by_blocks(rows, cols, form)


def scores_by_blocks(rows: Sets, cols: Sets, form: Form) -> Tensor:
    """Return the scores (N, M), or (N, 1, J) of own sets."""
    has_one = len(blocks(rows, cols, cols.size)) <= 1
    chooses = form.is_hard and not are_own(cols)
    if is_compiling() or (has_one and not chooses):
        return plain_scores(rows, cols, form)
    if torch.is_grad_enabled() and (rows.x.requires_grad or cols.x.requires_grad):
        return SetScores.apply(rows.x, cols.x, rows.exists, cols.exists, form)  # type: ignore[return-value]
    return scores_and_winners(rows, cols, form, keep=False)[0]
