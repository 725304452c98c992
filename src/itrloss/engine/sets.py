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
from .vectors import compute_dtype, full_precision, normalized

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
        x = filled(self.x, self.missing(), 0.0, -1)
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


def block_scores(
    rows: Sets, cols: Sets, form: Form, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the scores (..., n, m) of prepared sets.

    With ``keep``, return which elements won, too, see :func:`winning`.
    """
    which: Tensor | None = None
    if form.is_hard:
        scores, which = winning(rows, cols, form, keep)
    else:
        scores = smooth(rows, cols, form)
    return of_existing(scores, rows, cols), which


def products(rows: Sets, cols: Sets) -> Tensor:
    """Return the products (..., n, K, m, L) of the elements of sets."""
    x = product(rows.vectors, cols.vectors.mT)
    return x.view(*x.shape[:-2], rows.number, rows.size, cols.number, cols.size)


def of_existing(x: Tensor, rows: Sets, cols: Sets) -> Tensor:
    """Return values of pairs (..., N, M) with 0 where one of the sets is empty."""
    return filled(filled(x, rows.empty(), 0.0, -1), cols.empty(), 0.0, -2)


def filled(x: Tensor, mask: Tensor | None, value: float, *dims: int) -> Tensor:
    """Return ``x`` with a value where a mask is True, which gets further dimensions one by one;
    None: nowhere.
    """
    if mask is None:
        return x
    for dim in dims:
        mask = mask.unsqueeze(dim)
    return x.masked_fill(mask, value)


def plain_scores(rows: Sets, cols: Sets, form: Form) -> Tensor:
    """Return the (..., N, M) scores in plain PyTorch, which holds the scores of all elements."""
    rows = rows.prepared(form.normalize)
    cols = cols.prepared(form.normalize)
    return block_scores(rows, cols, form)[0]


def winning(
    rows: Sets,  # (..., n, K, D)
    cols: Sets,  # (..., m, L, D)
    form: Form,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the (..., n, m) maxima of elements' scores and, with ``keep``, which elements won.

    The second is (..., m, n, K) for the element of ``cols`` that is the best of each of ``rows``,
    or (..., m, n, 1) ``k L + l`` for the best pair of elements.

    With the product, maxima take 0.78 of the time in this layout for 32 queries of 32 elements with
    documents of 666, 0.75 for 64 sets of 49 with 64 of 20, and 1.03 for documents of 1024 (D 128,
    one thread of Zen 3; ``pytest benchmarks/test_micro.py --benchmark-enable -k
    late_interaction``). Exponentials would take longer.
    """
    x = products(cols, rows)  # (..., m, L, n, K)
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
    value = filled(value, rows.missing(), lowest(x) if form.name == "max" else 0.0, -3)
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
    rows: Sets,  # (..., n, K, D)
    cols: Sets,  # (..., m, L, D)
    form: Form,
) -> Tensor:
    """Return the smooth scores (..., n, m) of sets."""
    z = products(Sets(rows.x * form.alpha), cols)  # (..., n, K, m, L)
    of_rows = filled(z, cols.missing(), lowest(z), -3, -3).logsumexp(-1)  # (..., n, K, m)
    total = filled(of_rows, rows.missing(), 0.0, -1).sum(-2) / form.alpha
    if form.name == "smooth_max_sum":
        return total
    of_cols = filled(z, rows.missing(), lowest(z), -1, -1).logsumexp(-3)  # (..., n, m, L)
    total_of_cols = filled(of_cols, cols.missing(), 0.0, -3).sum(-1) / form.alpha
    mean_of_rows = total / rows.numbers_of_elements().unsqueeze(-1)
    mean_of_cols = total_of_cols / cols.numbers_of_elements().unsqueeze(-2)
    return (mean_of_rows + mean_of_cols) / 2


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
    with torch.no_grad(), full_precision(rows.x):
        for r, c in blocks(rows, cols, cols.size):
            if right is None or c != known:  # the larger parts change less often
                right = cols.part(c).prepared(form.normalize)
                known = c
            left = rows.part(r).prepared(form.normalize)
            place = (r,) if are_own(cols) else (r, c)
            scores[place], which = block_scores(left, right, form, winners is not None)
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
) -> list[Tensor | None]:
    """Return the gradients of both sides' elements; None where they need none."""
    sides = rows, cols
    totals = [zeros_of_elements(sets) for sets in sides]
    with torch.enable_grad(), full_precision(rows.x):
        for places in blocks(rows, cols, cols.size if winners is None else WINNER):
            r, c = places
            leaves = rows.leaf(r), cols.leaf(c)
            left, right = [leaf.prepared(form.normalize) for leaf in leaves]
            if winners is None:
                outputs = [block_scores(left, right, form)[0]]
                grads = [grad[r] if are_own(cols) else grad[r, c]]
            else:
                outputs = [sets.x for sets in (left, right) if sets.x.requires_grad]
                grads = gradients_of_winners(left, right, grad[r, c], winners[c, r])
            trained = [leaf.x for leaf in leaves if leaf.x.requires_grad]
            found = iter(torch.autograd.grad(outputs, trained, grads))
            for total, place in zip(totals, places, strict=True):
                if total is not None:
                    total[place] += next(found)
    return [
        None if total is None else total.to(sets.x.dtype)
        for sets, total in zip(sides, totals, strict=True)
    ]


def zeros_of_elements(sets: Sets) -> Tensor | None:
    """Return zeros (N, K, D) in the compute dtype; None for sets that need no gradient."""
    if not sets.x.requires_grad:
        return None
    return torch.zeros(sets.x.shape, dtype=compute_dtype(sets.x), device=sets.x.device)


@torch.no_grad()
def gradients_of_winners(
    rows: Sets,  # prepared, as cols
    cols: Sets,
    grad: Tensor,  # (n, m) of the scores
    winners: Tensor,  # (m, n, K or 1), as from `winning`
) -> list[Tensor]:
    """Return the gradients of a block's prepared elements, of the sides that need one."""
    m, n, k = winners.shape
    device = winners.device
    numbers = winners.long()
    first_of_rows = torch.arange(n * k, device=device).view(n, k) * (rows.size // k)
    first_of_cols = torch.arange(m, device=device).view(m, 1, 1) * cols.size
    i = (first_of_rows + numbers // cols.size).flatten()  # (P,) elements of the pairs that won
    j = (first_of_cols + numbers % cols.size).flatten()
    each = of_existing(grad, rows, cols).T.unsqueeze(2).expand(m, n, k).flatten()
    found = []
    for own, index, others, other in ((rows, i, cols, j), (cols, j, rows, i)):
        if own.x.requires_grad:
            sums = weighted_sums(others.vectors, other, each, index, len(own.vectors))
            found.append(sums.view_as(own.x))
    return found


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
