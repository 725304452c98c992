"""Scores of sets of embeddings from the scores of their elements, a few sets at a time.

The scores ``x`` of the elements of n sets with the elements of m others are (n, K, m, L), the
scores of the sets (n, m):

    max               max_k max_l x
    max_sum           sum_k max_l x
    smooth_max_sum    sum_k soft_l x
    smooth_chamfer    (mean_k soft_l x + mean_l soft_k x) / 2

with ``soft_l x = log(sum_l exp(alpha x)) / alpha``. Where a maximum has a gradient, forward notes
which element won, and backward forms no scores: it adds up the winners. The scores of the smooth
forms are computed again in backward.

Sets of the columns may also belong to one row each: row n meets its own K sets alone. All shapes
then begin with n, and the row is one set next to K others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import ACCELERATOR_TILE, TILE, even_chunks, taken
from .products import add_matmul_, matmul
from .relation import weighted_sums
from .vectors import (
    compute_dtype,
    full_precision,
    inverse_norms,
    normalized,
    project,
    scaled,
)

# A winner, with its indices and what sorting them takes, needs the memory of so many scores.
WINNER = 8


class Sets(NamedTuple):
    """Sets of embeddings. All shapes may begin with further dimensions."""

    x: Tensor  # (N, K, D)
    inv: Tensor | None = None  # (N, K, 1) inverse norms; None: vectors are not normalised
    exists: Tensor | None = None  # (N, K) bool; None: all elements exist

    @property
    def number(self) -> int:
        """The number of sets, N."""
        return self.x.shape[-3]

    @property
    def size(self) -> int:
        """The number of elements of a set, K, with padding."""
        return self.x.shape[-2]

    def part(self, part: Any) -> Sets:
        """Return some of the sets, by an index."""
        return Sets(self.x[part], taken(self.inv, part), taken(self.exists, part))

    def with_norms(self) -> Sets:
        """Return the same sets with inverse norms, for vectors at unit length."""
        return self._replace(inv=inverse_norms(self.x.detach()))

    def leaf(self, requires_grad: bool) -> Sets:
        """Return the same sets without their graph, as the beginning of another one."""
        return self._replace(x=self.x.detach().requires_grad_(requires_grad))

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

    def unit(self) -> Tensor:
        """Return the (N K, D) vectors in the compute dtype, at unit length if they are normalised.

        Elements that do not exist are zero, whatever they hold, and add nothing to a gradient.
        """
        vectors = scaled(self.x, self.inv).flatten(0, 1)
        missing = self.missing()
        if missing is None:
            return vectors
        return vectors.masked_fill(missing.view(-1, 1), 0.0)

    def differentiable(self, normalize: bool) -> Tensor:
        """Return the (N, K, D) vectors in the compute dtype, as `unit` does, differentiable."""
        missing = self.missing()
        x = self.x
        if missing is not None:
            x = x.masked_fill(missing.unsqueeze(-1), 0.0)
        return normalized(x, normalize)

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient (N, K, D) from the gradient of the `unit` vectors (N K, D)."""
        if self.inv is not None:
            grad = project(grad, self.unit(), self.inv.flatten(0, 1))
        grad = grad.to(self.x.dtype).view_as(self.x)
        missing = self.missing()
        if missing is not None:
            grad.masked_fill_(missing.unsqueeze(-1), 0.0)
        return grad


class Form(NamedTuple):
    """How the scores of elements are aggregated."""

    name: str
    alpha: float

    @property
    def is_hard(self) -> bool:
        """Whether elements are chosen, so that the gradient is theirs."""
        return self.name in ("max", "max_sum")


class Block(NamedTuple):
    """Some sets of both sides, whose elements are scored at once."""

    r: slice
    c: slice
    rows: Sets  # n of them
    cols: Sets  # m of them
    right: Tensor  # (m L, D) the unit vectors of ``cols``


def blocks(
    rows: Sets,
    cols: Sets,
    values: int,  # that are held for each element of ``rows`` and set of ``cols``
) -> Iterator[Block]:
    """Yield blocks that cover every pair of sets once."""
    if not rows.number:  # in one process of several
        return
    d = rows.x.shape[2]
    numel, width = TILE.get(rows.x.device.type, ACCELERATOR_TILE)
    by_scores = max(width, numel // (rows.number * rows.size)) // values
    by_vectors = numel // (cols.size * d)
    step = max(1, min(cols.number, by_scores, by_vectors))
    col_parts = even_chunks(cols.number, step)
    by_scores = numel // (step * values * rows.size)
    by_vectors = numel // (rows.size * d)
    row_parts = even_chunks(rows.number, max(1, min(rows.number, by_scores, by_vectors)))
    for c in col_parts:  # the larger parts outside: they are normalised once
        some_cols = cols.part(c)
        right = some_cols.unit()
        for r in row_parts:
            yield Block(r, c, rows.part(r), some_cols, right)


# ------------------------------------------------------------------------------------------- maxima


def winning(
    x: Tensor,  # (..., m, L, n, K) scores of elements, overwritten
    form: Form,
    rows: Sets,  # (..., n, K, D)
    cols: Sets,  # (..., m, L, D)
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the (..., n, m) maxima of elements' scores and, with ``keep``, which elements won.

    The second is (..., m, n, K) for the element of ``cols`` that is the best of each of ``rows``,
    or (..., m, n, 1) ``k L + l`` for the best pair of elements.
    """
    size = x.shape[-3]
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
            which = which.gather(-1, best) + best * size
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


class WinningPairs(NamedTuple):
    """Pairs of elements that won, and the gradients of their scores."""

    i: Tensor  # (P,) elements of the rows
    j: Tensor  # (P,) elements of the columns
    grad: Tensor  # (P,)


def winning_pairs(
    winners: Tensor,  # (m, n, K or 1), as from `winning`
    grad: Tensor,  # (n, m)
    block: Block,
) -> WinningPairs:
    """Return the pairs of elements of a block that won."""
    m, n, k = winners.shape
    size = block.cols.size
    device = winners.device
    numbers = winners.long()
    first_of_rows = torch.arange(n * k, device=device).view(n, k) * (block.rows.size // k)
    first_of_cols = torch.arange(m, device=device).view(m, 1, 1) * size
    i = first_of_rows + numbers // size
    j = first_of_cols + numbers % size
    each = grad.T.unsqueeze(2).expand(m, n, k)
    return WinningPairs(i.flatten(), j.flatten(), each.flatten())


# ------------------------------------------------------------------------------------- smooth forms


def smooth(
    x: Tensor,  # (..., n, K, m, L) scores of elements
    form: Form,
    rows: Sets,  # (..., n, K, D)
    cols: Sets,  # (..., m, L, D)
) -> Tensor:
    """Return the smooth scores (..., n, m) of sets, in plain PyTorch."""
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


def smooth_slopes(
    x: Tensor,  # (n, K, m, L) scores of elements
    form: Form,
    block: Block,
    grad: Tensor,  # (n, m) of the sets' scores
) -> Tensor:
    """Return the gradient (n, K, m, L) of the scores of elements."""
    missing_rows = block.rows.missing()
    missing_cols = block.cols.missing()
    z = x * form.alpha
    existing = z
    if missing_cols is not None:
        existing = z.masked_fill(missing_cols, lowest(x))
    by_col = existing.softmax(3)
    if form.name == "smooth_max_sum":
        return by_col.mul_(grad[:, None, :, None])
    if missing_rows is not None:
        z.masked_fill_(missing_rows[:, :, None, None], lowest(x))
    by_row = z.softmax(1)
    of_rows = grad / block.rows.numbers_of_elements()[:, None] / 2
    of_cols = grad / block.cols.numbers_of_elements() / 2
    by_col.mul_(of_rows[:, None, :, None])
    return by_col.addcmul_(by_row, of_cols[:, None, :, None])


def lowest(x: Tensor) -> float:
    """Return the score of missing elements.

    It is finite, as a sum of exponentials of -inf has no gradient.
    """
    return torch.finfo(x.dtype).min / 2


# --------------------------------------------------------------------------------- sums over blocks


def of_existing(x: Tensor, rows: Sets, cols: Sets) -> Tensor:
    """Return values of pairs (..., N, M) with 0 where one of the sets is empty."""
    empty_rows = rows.empty()
    empty_cols = cols.empty()
    if empty_rows is not None:
        x = x.masked_fill(empty_rows.unsqueeze(-1), 0.0)
    if empty_cols is not None:
        x = x.masked_fill(empty_cols.unsqueeze(-2), 0.0)
    return x


def block_scores(block: Block, form: Form, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return the (n, m) scores of a block of sets and, of maxima, which elements won.

    For maxima the scores of elements are (m, L, n, K). With the product they take 0.78 of the time
    of (n, K, m, L) for 32 queries of 32 elements with documents of 666, 0.75 for 64 sets of 49 with
    64 of 20, and 1.03 for documents of 1024 (D 128, one thread of Zen 3; ``pytest
    benchmarks/test_micro.py --benchmark-enable -k late_interaction``). Exponentials would take
    longer.
    """
    rows = block.rows
    cols = block.cols
    left = rows.unit()
    if form.is_hard:
        x = matmul(block.right, left.T).view(cols.number, cols.size, rows.number, rows.size)
        return winning(x, form, rows, cols, keep)
    x = matmul(left, block.right.T).view(rows.number, rows.size, cols.number, cols.size)
    return smooth(x, form, rows, cols), None


def scores_and_winners(
    rows: Sets, cols: Sets, form: Form, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the (N, M) scores and, with ``keep``, which elements win: (M, N, K or 1) integers."""
    scores = rows.x.new_empty(rows.number, cols.number, dtype=compute_dtype(rows.x))
    winners = empty_winners(rows, cols, form) if keep and form.is_hard else None
    with torch.no_grad(), full_precision(rows.x):
        for block in blocks(rows, cols, cols.size):
            scores[block.r, block.c], which = block_scores(block, form, keep)
            if winners is not None and which is not None:
                winners[block.c, block.r] = which
        return of_existing(scores, rows, cols), winners


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


def gradients(
    rows: Sets,
    cols: Sets,
    winners: Tensor | None,  # as from `scores_and_winners`
    grad: Tensor,  # (N, M) of the scores
    form: Form,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both sides' sets, None where they are not needed."""
    of_rows = zeros_of_elements(rows) if needs[0] else None
    of_cols = zeros_of_elements(cols) if needs[1] else None
    with torch.no_grad(), full_precision(rows.x):
        grad = of_existing(grad, rows, cols)
        for block in blocks(rows, cols, WINNER if form.is_hard else cols.size):
            own = grad[block.r, block.c]
            totals = BlockTotals(
                None if of_rows is None else of_rows[block.r].flatten(0, 1),
                None if of_cols is None else of_cols[block.c].flatten(0, 1),
            )
            if winners is not None:
                pairs = winning_pairs(winners[block.c, block.r], own, block)
                add_winners_(totals, pairs, block)
            else:
                add_smooth_(totals, own, block, form)
        return (
            None if of_rows is None else rows.gradient(of_rows.flatten(0, 1)),
            None if of_cols is None else cols.gradient(of_cols.flatten(0, 1)),
        )


def zeros_of_elements(sets: Sets) -> Tensor:
    """Return zeros (N, K, D) in the compute dtype."""
    return torch.zeros_like(
        sets.x, dtype=compute_dtype(sets.x), memory_format=torch.contiguous_format
    )


class BlockTotals(NamedTuple):
    """The gradients of a block's unit vectors, to be added to; None where they are not needed."""

    rows: Tensor | None  # (n K, D)
    cols: Tensor | None  # (m L, D)


def add_winners_(totals: BlockTotals, pairs: WinningPairs, block: Block) -> None:
    """Add the gradient of the scores of elements that won."""
    i, j, grad = pairs
    if totals.rows is not None:
        totals.rows.add_(weighted_sums(block.right, j, grad, i, len(totals.rows)))
    if totals.cols is not None:
        left = block.rows.unit()
        totals.cols.add_(weighted_sums(left, i, grad, j, len(totals.cols)))


def add_smooth_(totals: BlockTotals, grad: Tensor, block: Block, form: Form) -> None:
    """Add the gradient of the scores of all elements, which are computed again."""
    rows = block.rows
    cols = block.cols
    left = rows.unit()
    products = matmul(left, block.right.T).view(rows.number, rows.size, cols.number, cols.size)
    slopes = smooth_slopes(products, form, block, grad).view(len(left), len(block.right))
    if totals.rows is not None:
        add_matmul_(totals.rows, slopes, block.right)
    if totals.cols is not None:
        add_matmul_(totals.cols, slopes.T, left)


class SetScores(torch.autograd.Function):
    """The (N, M) scores of sets, twice differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        row_x: Tensor,  # (N, K, D), which ``rows`` hold without their graph
        col_x: Tensor,  # (M, L, D)
        rows: Sets,
        cols: Sets,
        form: Form,
    ) -> Tensor:
        """Return the scores (N, M) of the sets."""
        scores, winners = scores_and_winners(rows, cols, form, keep=True)
        ctx.form = form
        ctx.save_for_backward(row_x, rows.inv, rows.exists, col_x, cols.inv, cols.exists, winners)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the elements (N, K, D) and (M, L, D) from the scores' (N, M)."""
        row_x, row_inv, row_exists, col_x, col_inv, col_exists, winners = ctx.saved_tensors
        rows = Sets(row_x, row_inv, row_exists)
        cols = Sets(col_x, col_inv, col_exists)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True
            scores = plain_scores(rows, cols, ctx.form, rows.inv is not None)
            of_rows, of_cols = gradients_by_autograd(scores, (row_x, col_x), needs, grad)
        else:
            of_rows, of_cols = gradients(rows, cols, winners, grad, ctx.form, needs)
        return of_rows, of_cols, None, None, None


def gradients_by_autograd(
    scores: Tensor, inputs: tuple[Tensor, Tensor], needs: tuple[bool, bool], grad: Tensor
) -> list[Any]:
    """Return autograd's gradients of both inputs, None where they are not needed; differentiable
    with ``create_graph=True`` alone.
    """
    trained = [x for x, needed in zip(inputs, needs, strict=True) if needed]
    create_graph = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(scores, trained, grad, create_graph=create_graph))
    return [next(found) if needed else None for needed in needs]


def plain_scores(rows: Sets, cols: Sets, form: Form, normalize: bool) -> Tensor:
    """Return the (..., N, M) scores in plain PyTorch, which holds the scores of all elements."""
    left = rows.differentiable(normalize)
    right = cols.differentiable(normalize)
    with full_precision(rows.x):
        if form.is_hard:
            products = torch.einsum("...mld,...nkd->...mlnk", right, left)
            scores, _ = winning(products, form, rows, cols, keep=False)
        else:
            products = torch.einsum("...nkd,...mld->...nkml", left, right)
            scores = smooth(products, form, rows, cols)
    return of_existing(scores, rows, cols)


def set_scores(
    rows: Sets,  # (N, K, D)
    cols: Sets,  # (M, L, D)
    name: str,
    alpha: float,
    normalize: bool,
) -> Tensor:
    """Return the differentiable (N, M) scores of sets."""
    form = Form(name, float(alpha))
    if torch.compiler.is_compiling():
        return plain_scores(rows, cols, form, normalize)
    if normalize:
        rows = rows.with_norms()
        cols = cols.with_norms()
    if torch.is_grad_enabled() and (rows.x.requires_grad or cols.x.requires_grad):
        return SetScores.apply(rows.x, cols.x, rows, cols, form)  # type: ignore[return-value]
    return scores_and_winners(rows, cols, form, keep=False)[0]


# ----------------------------------------------------------------------------- sets of one row each


def own_set_scores(
    rows: Sets,  # (N, A, D)
    cols: Sets,  # (N, K, L, D)
    name: str,
    alpha: float,
    normalize: bool,
) -> Tensor:
    """Return the differentiable (N, K) scores of each row with its own sets."""
    form = Form(name, float(alpha))
    parts = parts_of_own(rows, cols)
    if len(parts) <= 1 or torch.compiler.is_compiling():
        return plain_scores_of_own(rows, cols, form, normalize)
    return OwnSetScores.apply(rows.x, cols.x, rows, cols, form, normalize)  # type: ignore[return-value]


def plain_scores_of_own(rows: Sets, cols: Sets, form: Form, normalize: bool) -> Tensor:
    """Return the (N, K) scores in plain PyTorch, which holds the scores of all elements."""
    one_each = rows.part((slice(None), None))  # (N, 1, A, D)
    return plain_scores(one_each, cols, form, normalize).squeeze(1)


def parts_of_own(rows: Sets, cols: Sets) -> list[slice]:
    """Return parts of the rows that are scored at once, with their sets."""
    number, own, size, d = cols.x.shape
    numel, _ = TILE.get(cols.x.device.type, ACCELERATOR_TILE)
    step = numel // (own * size * max(rows.size, d))
    return even_chunks(number, max(1, step))


class OwnSetScores(torch.autograd.Function):
    """The (N, K) scores of rows with their own sets, a few rows at a time, twice differentiable.

    Nothing is held for backward, which computes the scores of each part again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        row_x: Tensor,  # (N, A, D), which ``rows`` hold without their graph
        col_x: Tensor,  # (N, K, L, D)
        rows: Sets,
        cols: Sets,
        form: Form,
        normalize: bool,
    ) -> Tensor:
        """Return the scores (N, K)."""
        ctx.form = form
        ctx.normalize = normalize
        ctx.save_for_backward(row_x, rows.exists, col_x, cols.exists)
        scores = []
        for part in parts_of_own(rows, cols):
            scores.append(plain_scores_of_own(rows.part(part), cols.part(part), form, normalize))
        return torch.cat(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the elements (N, A, D) and (N, K, L, D) from the scores'."""
        row_x, row_exists, col_x, col_exists = ctx.saved_tensors
        rows = Sets(row_x, None, row_exists)
        cols = Sets(col_x, None, col_exists)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True
            scores = plain_scores_of_own(rows, cols, ctx.form, ctx.normalize)
            of_rows, of_cols = gradients_by_autograd(scores, (row_x, col_x), needs, grad)
            return of_rows, of_cols, None, None, None, None
        of_rows = torch.empty_like(row_x) if needs[0] else None
        of_cols = torch.empty_like(col_x) if needs[1] else None
        for part in parts_of_own(rows, cols):
            some_rows = rows.part(part).leaf(needs[0])
            some_cols = cols.part(part).leaf(needs[1])
            with torch.enable_grad():
                scores = plain_scores_of_own(some_rows, some_cols, ctx.form, ctx.normalize)
            found = gradients_by_autograd(scores, (some_rows.x, some_cols.x), needs, grad[part])
            if of_rows is not None:
                of_rows[part] = found[0]
            if of_cols is not None:
                of_cols[part] = found[1]
        return of_rows, of_cols, None, None, None, None
