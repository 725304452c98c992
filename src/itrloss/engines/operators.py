"""The passes as operators of PyTorch, with their gradients: one serves eager mode, ``torch.compile`` and graph capture.

Each answer is an operator without autograd (opaque to the compiler, shapes known from its inputs' shapes) wrapped by
an :class:`torch.autograd.Function` whose backward is another operator. That costs less per call than
``register_autograd`` and is traced by ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import moments, pairs, products, softmax
from . import violations as margins
from .products import matmul
from .registration import WIDTH, full_precision, like_source, operator, uninitialised
from .tiles import EPS, Kept, Source, compute_dtype, first_order, lengths, project_, unit

# -------------------------------------------------------------------------------- norms and the dense product


def _fake_inverse_norms(x):
    return x.new_empty(x.shape[0], dtype=compute_dtype(x))


@operator("(Tensor x) -> Tensor", _fake_inverse_norms)
def inverse_norms(x: Tensor) -> Tensor:
    """(N,) reciprocal lengths of the rows of ``x``; 0 for a row of length at most 1e-12."""
    found = usual_inverse_norms(x) if x.device.type == "cpu" else None
    if found is None:
        norm = lengths(x)
        found = torch.where(norm > EPS, norm.reciprocal(), 0.0)
    return found


def usual_inverse_norms(x: Tensor) -> Tensor | None:
    """:func:`inverse_norms` on the CPU, where looking is free; None if a length is not between 1e-12 and 1e18."""
    norm = torch.linalg.vector_norm(x, dim=1, dtype=compute_dtype(x))
    low, high = norm.aminmax()
    return norm.reciprocal_() if float(low) > EPS and float(high) < 1e18 else None


@operator("(Tensor a, Tensor b) -> Tensor", lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
def product(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, which the compiler sees unless it would leave it to the slower library."""
    if torch.compiler.is_compiling() and a.device.type == "cpu" and a.dtype == torch.float32:
        return product(a, b) if products.onednn_is_faster() else a @ b
    return matmul(a, b)


class Product(torch.autograd.Function):
    """The dense score matrix ``unit(rows) @ unit(cols).T``, gradients through the normalisation included."""

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv, scaled_scores):
        """(N, M) scores."""
        ctx.scaled_scores = scaled_scores
        if scaled_scores:
            left, right = unit(rows, None), unit(cols, None)
        else:
            left, right = unit(rows, row_inv), unit(cols, col_inv)
        with full_precision(rows):
            scores = _multiply(left, right.T)
        if scaled_scores:
            scores.mul_(row_inv[:, None]).mul_(col_inv)
        ctx.save_for_backward(left, right, row_inv, col_inv, scores if ctx.scaled_scores else None)
        ctx.dtypes = rows.dtype, cols.dtype
        return scores

    @staticmethod
    @first_order
    def backward(ctx, grad):
        """Gradients of the embeddings."""
        left, right, row_inv, col_inv, scores = ctx.saved_tensors
        needs = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None]
        if ctx.scaled_scores:
            along = grad * scores  # its sums are what a gradient has along its own vector
            grad = (grad * row_inv[:, None]).mul_(col_inv)
        with full_precision(grad):
            for side, (matrix, own, other, inv) in enumerate(
                ((grad, left, right, row_inv), (grad.T, right, left, col_inv))
            ):
                if not needs[side]:
                    continue
                gradient = _multiply(matrix, other)
                if ctx.scaled_scores:
                    gradient.addcmul_(own, along.sum(1 - side).mul_(inv).mul_(inv)[:, None], value=-1)
                elif inv is not None:
                    project_(gradient, own, inv)
                found[side] = gradient if gradient.dtype == ctx.dtypes[side] else gradient.to(ctx.dtypes[side])
        return *found, None, None, None


def scaling_scores_pays(
    rows: Tensor, cols: Tensor, row_inv: Tensor | None, col_inv: Tensor | None, usual: bool
) -> bool:
    """Few vectors of many dimensions: scale their products instead of normalised copies, unless that overflows.

    ``usual``: it cannot, as all lengths are known to be usual.
    """
    # Only the CPU may look at the lengths for nothing; the compiler is not to make graphs for shapes.
    if row_inv is None or col_inv is None or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    (n, d), m = rows.shape, cols.shape[0]
    if 2 * n * m > (n + m) * d:
        return False
    return usual or float(row_inv.amin()) * float(col_inv.amin()) > 1e-36  # a zero vector has the reciprocal 0


# ------------------------------------------------------------------------------ backward over the scores


def _save(ctx, kept: Kept | None, source: Sequence[Any], *others: Tensor | None) -> None:
    """``save_for_backward``; ``kept`` if the source is a :class:`Product` that may be overwritten."""
    ctx.kept, ctx.address = kept, None if kept is None else source[0].data_ptr()
    *tensors, ctx.fused = source
    ctx.save_for_backward(*tensors, *others)


def _saved(ctx) -> tuple[Source, tuple[Any, ...]]:
    """The source and the others."""
    saved = ctx.saved_tensors
    return Source._make((*saved[: WIDTH - 1], ctx.fused)), saved[WIDTH - 1 :]


def _at_hand(ctx, source: Source) -> tuple[Source, bool]:
    """The source in a backward pass, and whether that is to write over the scores."""
    kept = ctx.kept
    if kept is None or not ctx.needs_input_grad[0]:
        return source, False
    if kept.spent:  # a former backward pass through this graph did so
        left, right = ctx.next_functions[0][0].saved_tensors[:2]
        with full_precision(left):
            return source._replace(rows=matmul(left, right.T)), True
    # Hooks on saved tensors may have brought another copy, which they may bring once more.
    if kept.readers == 1 and source.rows.data_ptr() == ctx.address:
        kept.spent = True
        return source._replace(rows=source.rows.data), True  # which autograd need not know of
    return source, False


# ------------------------------------------------------------------------------------------------ log-sum-exp


def _fake_logsumexp(source, scale, for_rows, for_cols, masked, bounded, extra):
    total = torch.cat(uninitialised(source, (for_rows, for_cols)))
    figure = torch.empty_like(total) if extra else total.new_empty(0)
    if extra == softmax.ENTROPY:
        figure = total.new_empty(2, total.shape[0])
    diagonal = total.new_empty(source.shape[0] if softmax.carries_diagonal(source, masked, extra) else 0)
    return total, torch.empty_like(total), figure, diagonal


@operator(
    "(SOURCE, Tensor scale, bool for_rows, bool for_cols, bool masked, bool bounded, int extra)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_logsumexp,
)
def logsumexp(source, scale, for_rows, for_cols, masked, bounded, extra, held=None):
    sums, diagonal = softmax.logsumexp(source, scale, (for_rows, for_cols), masked, bounded, extra, held)
    return *sums, diagonal


def _fake_source_gradient(source, *args):
    return like_source(source, args[-2:])


@operator(
    "(SOURCE, Tensor scale, bool for_rows, bool for_cols, Tensor total, Tensor top, Tensor figure, Tensor? grad,"
    " Tensor? figure_grad, Tensor? diagonal_grad, bool masked, bool bounded, int extra, bool need_rows, bool need_cols)"
    " -> (Tensor, Tensor)",
    _fake_source_gradient,
)
def logsumexp_backward(source, scale, for_rows, for_cols, *args, in_place=False, held=None):
    """Gradients of the source from those of :func:`logsumexp`."""
    sums, grads, (masked, bounded, extra), needs = softmax.Sums(*args[:3]), args[3:6], args[6:9], args[9:]
    asked = for_rows, for_cols
    return softmax.logsumexp_backward(source, scale, asked, sums, grads, masked, bounded, extra, needs, in_place, held)


class LogSumExp(torch.autograd.Function):
    """``(L, figure, diagonal)`` of :func:`itrloss.engines.softmax.logsumexp`.

    The entropy is differentiable. The mean is there for the derivative by the scale, which it is.
    """

    @staticmethod
    def forward(ctx, *args):
        """(A,) log-sum-exps, their figures and the diagonal's scores."""
        held = [] if args[0].requires_grad else None
        total, top, figure, diagonal = logsumexp(*args[:-1], held=held)
        scale, *ctx.asked, masked, bounded, extra, kept = args[WIDTH:]
        _save(ctx, kept, args[:WIDTH], scale, total, top, figure, *held or ())
        ctx.flags, ctx.entropic = (masked, bounded, extra), extra == softmax.ENTROPY
        ctx.set_materialize_grads(False)
        if extra:
            figure = figure.clone()
        if not ctx.entropic:
            ctx.mark_non_differentiable(figure)
        return total.log().add_(top), figure, diagonal  # -inf: nothing was summed

    @staticmethod
    @first_order
    def backward(ctx, grad, figure_grad, diagonal_grad):
        """Gradients of the source and of the scale."""
        source, (scale, total, top, figure, *held) = _saved(ctx)
        rows = cols = by_scale = None
        grads = grad, figure_grad if ctx.entropic else None, _unless_empty(diagonal_grad)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            source, in_place = _at_hand(ctx, source)
            args = scale, *ctx.asked, total, top, figure, *grads, *ctx.flags, *ctx.needs_input_grad[:2]
            rows, cols = logsumexp_backward(*source, *args, in_place=in_place, held=held[0] if held else None)
        if ctx.needs_input_grad[WIDTH] and grad is not None:
            by_scale = grad * figure
            by_scale = by_scale.sum().reshape(1) if scale.numel() == 1 else by_scale
        return *_of_source(rows, cols), by_scale, *([None] * 6)


def _unless_empty(x: Tensor | None) -> Tensor | None:
    return None if x is None or x.numel() == 0 else x


def _asked_for(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """A side that was not asked for has no gradient, but the compiler makes zeros of no elements for it."""
    return tuple([_unless_empty(g) for g in grads])


def _of_source(rows: Tensor | None, cols: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of all that a source is made of."""
    return _unless_empty(rows), _unless_empty(cols), *([None] * (WIDTH - 2))


# ---------------------------------------------------------------------------------------------------- moments


def _fake_moments(source, *asked):
    mean = torch.cat(uninitialised(source, asked))
    return mean, torch.empty_like(mean)


@operator("(SOURCE, bool for_rows, bool for_cols) -> (Tensor, Tensor)", _fake_moments)
def moment_sums(source, *asked, positives=None):
    return moments.moments(source, asked, positives)


@operator(
    "(SOURCE, bool for_rows, bool for_cols, Tensor mean, Tensor? grad, Tensor? var_grad, bool need_rows,"
    " bool need_cols) -> (Tensor, Tensor)",
    _fake_source_gradient,
)
def moment_sums_backward(source, *args):
    asked, (mean, grad, var_grad), needs = args[:2], args[2:5], args[5:]
    return moments.moments_backward(source, asked, mean, grad, var_grad, needs)


class Moments(torch.autograd.Function):
    """Means and variances of the negatives: of the rows that are asked, then of the columns."""

    @staticmethod
    def forward(ctx, *args):
        """(N,), (M,) or (N + M,) means, and as many variances."""
        *args, positives = args
        mean, variance = moment_sums(*args, positives=positives)
        _save(ctx, None, args[:WIDTH], mean)
        ctx.asked = args[WIDTH:]
        ctx.set_materialize_grads(False)
        return mean, variance

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        source, (mean,) = _saved(ctx)
        rows, cols = moment_sums_backward(*source, *ctx.asked, mean, *grads, *ctx.needs_input_grad[:2])
        return *_of_source(rows, cols), None, None, None


# ------------------------------------------------------------------------------------------------ single pairs


def _fake_hardest(source, *asked):
    sizes = uninitialised(source, asked)
    return *sizes, *(x.to(torch.int64) for x in sizes)


@operator("(SOURCE, bool for_rows, bool for_cols) -> (Tensor, Tensor, Tensor, Tensor)", _fake_hardest)
def hardest(source, *asked):
    """Scores and indices, of the rows and of the columns: ``(row score, column score, row index, column index)``."""
    return pairs.hardest(source, asked)


def _unlabelled(rows: Tensor, cols: Tensor | None, row_inv: Tensor | None, col_inv: Tensor | None) -> Source:
    return Source(rows, cols, row_inv, col_inv, None, None)


def _fake_pair_scores(*args):
    return args[0].new_empty((args[0] if args[4] is None else args[4]).shape[0], dtype=compute_dtype(args[0]))


@operator(
    "(Tensor rows, Tensor? cols, Tensor? row_inv, Tensor? col_inv, Tensor? row_index, Tensor? col_index) -> Tensor",
    _fake_pair_scores,
)
def pair_scores(*args):
    source, (i, j) = _unlabelled(*args[:4]), args[4:]
    return pairs.aligned_scores(source) if i is None else pairs.pair_scores(source, i, j)


def _fake_pair_scores_backward(*args):
    return like_source(_unlabelled(*args[:4]), args[-2:])


@operator(
    "(Tensor rows, Tensor? cols, Tensor? row_inv, Tensor? col_inv, Tensor? row_index, Tensor? col_index, Tensor scores,"
    " Tensor grad, bool need_rows, bool need_cols) -> (Tensor, Tensor)",
    _fake_pair_scores_backward,
)
def pair_scores_backward(*args):
    """Gradients of the embeddings from those of :func:`pair_scores`."""
    source, (i, j, scores, grad), needs = _unlabelled(*args[:4]), args[4:8], args[8:]
    if i is None:
        return pairs.aligned_gradient(source, scores, grad, needs)
    gradient = pairs.PairGradient(source, needs)
    gradient.add(i, j, scores, grad)
    return gradient.finish()


class PairScores(torch.autograd.Function):
    """(P,) scores of the pairs ``(row_index[p], col_index[p])``; the gradient touches these pairs only.

    Without indices, row i is paired with column i. ``scores`` are the pairs' own if they are known already.
    """

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv, row_index, col_index, scores=None):
        """(P,) scores."""
        pair = rows, cols, row_inv, col_inv, row_index, col_index
        found = pair_scores(*pair) if scores is None else scores.clone()
        ctx.save_for_backward(*pair, found if scores is None else scores)
        return found

    @staticmethod
    @first_order
    def backward(ctx, grad):
        rows, cols = pair_scores_backward(*ctx.saved_tensors, grad, *ctx.needs_input_grad[:2])
        return _unless_empty(rows), _unless_empty(cols), *([None] * 5)


def _fake_term_sums(source, term, negative, row_params, col_params, *asked):
    sums = uninitialised(source, asked)
    return *sums, sums[0].new_empty(source.shape[0] if pairs.hands_out_diagonal(source, negative) else 0)


@operator(
    "(SOURCE, str term, bool negative, Tensor[] row_params, Tensor[] col_params, bool for_rows, bool for_cols)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_term_sums,
)
def term_sums(source, term, negative, row_params, col_params, *asked):
    return pairs.term_sums(source, term, (row_params, col_params), asked, negative)


def _fake_term_sums_backward(source, term, negative, row_params, col_params, *args):
    given = [[torch.empty_like(p) for p in side] for side in (row_params, col_params)]
    return (*like_source(source, args[3:5]), *given)


@operator(
    "(SOURCE, str term, bool negative, Tensor[] row_params, Tensor[] col_params, Tensor? row_grad, Tensor? col_grad,"
    " Tensor? diagonal_grad, bool need_rows, bool need_cols, bool need_params) -> (Tensor, Tensor, Tensor[], Tensor[])",
    _fake_term_sums_backward,
)
def term_sums_backward(source, term, negative, row_params, col_params, *args, in_place=False):
    params = row_params, col_params
    return pairs.term_sums_backward(source, term, params, args[:2], args[2], negative, args[3:5], args[5], in_place)


class TermSums(torch.autograd.Function):
    """``(row sums, column sums, diagonal)`` of :func:`itrloss.engines.pairs.term_sums`; parameters come last."""

    @staticmethod
    def forward(ctx, *args):
        """(N,) and (M,) sums, and the diagonal's scores."""
        source, params = args[:WIDTH], args[WIDTH + 6 :]
        term, negative, *asked, kept, split = args[WIDTH : WIDTH + 6]
        out = term_sums(*source, term, negative, list(params[:split]), list(params[split:]), *asked)
        _save(ctx, kept, source, *params)
        ctx.term, ctx.split = (term, negative), split
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        """Gradients of the source and of the parameters."""
        (source, params), split = _saved(ctx), ctx.split
        source, in_place = _at_hand(ctx, source)
        rows, cols, by_row_params, by_col_params = term_sums_backward(
            *(*source, *ctx.term, list(params[:split]), list(params[split:])),
            *(*_asked_for(*grads), *ctx.needs_input_grad[:2], any(ctx.needs_input_grad[WIDTH:])),
            in_place=in_place,
        )
        return *_of_source(rows, cols), *([None] * 6), *by_row_params, *by_col_params


def _fake_violations(source, margin, *asked):
    return uninitialised(source, asked)


@operator(
    "(SOURCE, float margin, bool for_rows, bool for_cols) -> (Tensor, Tensor)", _fake_violations, reads_values=True
)
def violations(source, margin, *asked):
    return margins.violations(source, margin, asked)


@operator(
    "(SOURCE, float margin, Tensor? row_grad, Tensor? col_grad, bool need_rows, bool need_cols) -> (Tensor, Tensor)",
    _fake_source_gradient,
    reads_values=True,
)
def violations_backward(source, margin, *args, in_place=False):
    return margins.violations_backward(source, margin, args[:2], args[2:], in_place)


class Violations(torch.autograd.Function):
    """``(row sums, column sums)`` of margin violations by all negatives."""

    @staticmethod
    def forward(ctx, *args):
        """(N,) and (M,) sums."""
        *args, kept = args
        _save(ctx, kept, args[:WIDTH])
        ctx.margin = args[WIDTH]
        ctx.set_materialize_grads(False)
        return violations(*args)

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        """Gradients of the source."""
        source, in_place = _at_hand(ctx, _saved(ctx)[0])
        rows, cols = violations_backward(
            *source, ctx.margin, *_asked_for(*grads), *ctx.needs_input_grad[:2], in_place=in_place
        )
        return *_of_source(rows, cols), *([None] * 4)
