"""Registration of the passes with PyTorch: one operator serves eager mode, ``torch.compile`` and graph capture.

Each answer is an operator without autograd (opaque to the compiler, shapes known from its inputs' shapes) wrapped by
an :class:`torch.autograd.Function` whose backward is another operator. That costs less per call than
``register_autograd`` and is traced by ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import moments, pairs, softmax
from .tiles import EPS, Pair, Source, compute_dtype, first_order, lengths, project_, unit

_library = torch.library.Library("itrloss", "DEF")
_SOURCE = "Tensor rows, Tensor? cols, Tensor? row_inv, Tensor? col_inv, Tensor? row_ids, Tensor? col_ids"


def _full_precision(x: Tensor):
    """Autocast would round the score products to half precision behind our back."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``itrloss::<function name>`` and return the function to call."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        """Give the operator its implementation and its shapes."""
        name = function.__name__

        @functools.wraps(function)
        def in_full_precision(*args: Any) -> Any:
            with _full_precision(args[0]):
                return function(*args)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            # In eager mode the dispatcher would only cost time.
            return operator(*args) if torch.compiler.is_compiling() else in_full_precision(*args)

        _library.define(name + schema.replace("SOURCE", _SOURCE))
        _library.impl(name, in_full_precision, "CompositeExplicitAutograd")
        torch.library.register_fake(f"itrloss::{name}", fake, lib=_library)
        operator = getattr(torch.ops.itrloss, name).default
        return call

    return register


def _sizes(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Uninitialised (N,) and (M,) results, empty where a side was not asked for."""
    sizes = [size if a else 0 for size, a in zip(source.shape, asked, strict=True)]
    first, second = (source.rows.new_empty(size, dtype=source.dtype) for size in sizes)
    return first, second


def _like_source(source: Source, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Uninitialised gradients of the source's tensors, empty where none is needed."""
    rows, cols = source.rows, source.cols
    if cols is None:
        return torch.empty_like(rows, memory_format=torch.contiguous_format), rows.new_empty(0)
    made = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else rows.new_empty(0)
        for x, need in zip((rows, cols), needs, strict=True)
    )
    first, second = made
    return first, second


def _asked(pair: Pair) -> tuple[bool, bool]:
    return pair[0] is not None, pair[1] is not None


# -------------------------------------------------------------------------------- norms and the dense product


def _fake_inverse_norms(x):
    return x.new_empty(x.shape[0], dtype=compute_dtype(x))


@_operator("(Tensor x) -> Tensor", _fake_inverse_norms)
def inverse_norms(x: Tensor) -> Tensor:
    """(N,) reciprocal lengths of the rows of ``x``; 0 for a row of length at most 1e-12."""
    norm = torch.linalg.vector_norm(x, dim=1, dtype=compute_dtype(x))
    if norm.device.type == "cpu":
        low, high = (float(v) for v in norm.aminmax())
        if low > EPS and high < 1e18:
            return norm.reciprocal_()
    norm = lengths(x)
    return torch.where(norm > EPS, norm.reciprocal(), 0.0)


class Product(torch.autograd.Function):
    """The dense score matrix ``unit(rows) @ unit(cols).T``, gradients through the normalisation included."""

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv):
        """(N, M) scores."""
        ctx.scaled_scores = _scaling_scores_pays(rows, cols, row_inv, col_inv)
        if ctx.scaled_scores:
            left, right = unit(rows, None), unit(cols, None)
        else:
            left, right = unit(rows, row_inv), unit(cols, col_inv)
        with _full_precision(rows):
            scores = left @ right.T
        if ctx.scaled_scores:
            scores.mul_(row_inv[:, None]).mul_(col_inv)
        ctx.save_for_backward(left, right, row_inv, col_inv, scores if ctx.scaled_scores else None)
        ctx.dtypes = rows.dtype, cols.dtype
        return scores

    @staticmethod
    @first_order
    def backward(ctx, grad):
        """Gradients of the embeddings."""
        left, right, row_inv, col_inv, scores = ctx.saved_tensors
        needs, found = ctx.needs_input_grad, [None, None]
        if ctx.scaled_scores:
            along = grad * scores  # its sums are what a gradient has along its own vector
            grad = (grad * row_inv[:, None]).mul_(col_inv)
        for side, (matrix, own, other, inv) in enumerate(
            ((grad, left, right, row_inv), (grad.T, right, left, col_inv))
        ):
            if not needs[side]:
                continue
            with _full_precision(grad):
                gradient = matrix @ other
            if ctx.scaled_scores:
                gradient.addcmul_(own, (along.sum(1 - side) * inv * inv)[:, None], value=-1)
            elif inv is not None:
                project_(gradient, own, inv)
            found[side] = gradient.to(ctx.dtypes[side])
        return *found, None, None


def _scaling_scores_pays(rows: Tensor, cols: Tensor, row_inv: Tensor | None, col_inv: Tensor | None) -> bool:
    """Few vectors of many dimensions: scale their products instead of normalised copies, unless that overflows."""
    # Only the CPU may look at the lengths for nothing; a zero vector has the reciprocal 0.
    if row_inv is None or col_inv is None or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    n, m, d = rows.shape[0], cols.shape[0], rows.shape[1]
    if 2 * n * m > (n + m) * d:
        return False
    return float(row_inv.amin()) * float(col_inv.amin()) > 1e-36


# ------------------------------------------------------------------------------------------------ log-sum-exp


def _scales(row_scale: Tensor | None, col_scale: Tensor | None, shared: bool) -> Pair:
    """``shared``: one scalar scale serves both sides (the compiler refuses to see the same tensor twice)."""
    return row_scale, row_scale if shared else col_scale


def _fake_logsumexp(*args):
    source, scales, extra = Source(*args[:6]), _scales(*args[6:9]), args[11]
    made = []
    for total, scale in zip(_sizes(source, _asked(scales)), scales, strict=True):
        figure = torch.empty_like(total) if extra else total.new_empty(0)
        if extra == softmax.ENTROPY and scale is not None:
            figure = total.new_empty(2, total.shape[0])
        made.append((total, torch.empty_like(total), figure))
    diagonal = made[0][0].new_empty(source.shape[0] if softmax.carries_diagonal(source, args[9], extra) else 0)
    return *(x for field in zip(*made, strict=True) for x in field), diagonal


@_operator(
    "(SOURCE, Tensor? row_scale, Tensor? col_scale, bool shared, bool masked, bool bounded, int extra)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_logsumexp,
)
def logsumexp(*args):
    rows, cols, diagonal = softmax.logsumexp(Source(*args[:6]), _scales(*args[6:9]), *args[9:])
    return *(x for field in zip(rows, cols, strict=True) for x in field), diagonal


def _fake_source_gradient(*args):
    return _like_source(Source(*args[:6]), args[-2:])


@_operator(
    "(SOURCE, Tensor? row_scale, Tensor? col_scale, bool shared, Tensor row_total, Tensor col_total, Tensor row_top,"
    " Tensor col_top, Tensor row_figure, Tensor col_figure, Tensor? row_grad, Tensor? col_grad,"
    " Tensor? row_figure_grad, Tensor? col_figure_grad, Tensor? diagonal_grad, bool masked, bool bounded, int extra,"
    " bool need_rows, bool need_cols) -> (Tensor, Tensor)",
    _fake_source_gradient,
)
def logsumexp_backward(*args):
    """Gradients of the source from those of :func:`logsumexp`."""
    a = args[6:]
    sums = softmax.Sums(a[3], a[5], a[7]), softmax.Sums(a[4], a[6], a[8])
    scales = _scales(*a[0:3])
    diagonal_grad, masked, bounded, extra = a[13:17]
    return softmax.logsumexp_backward(
        Source(*args[:6]), scales, sums, a[9:11], a[11:13], diagonal_grad, masked, bounded, extra, a[17:]
    )


class LogSumExp(torch.autograd.Function):
    """``(row L, column L, row figure, column figure, diagonal)`` of :func:`itrloss.engines.softmax.logsumexp`.

    The entropy is differentiable. The mean is there for the derivative by the scale, which it is.
    """

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv, row_ids, col_ids, row_scale, col_scale, *flags):
        """(N,) and (M,) log-sum-exps, their figures and the diagonal's scores."""
        source = (rows, cols, row_inv, col_inv, row_ids, col_ids)
        shared, masked, bounded, extra = flags
        *sums, diagonal = logsumexp(*source, row_scale, col_scale, shared, masked, bounded, extra)
        ctx.save_for_backward(*source, row_scale, col_scale, *sums)
        ctx.shared, ctx.flags, ctx.entropic = shared, (masked, bounded, extra), extra == softmax.ENTROPY
        ctx.set_materialize_grads(False)
        totals, tops = sums[:2], sums[2:4]
        values = [total.log() + top for total, top in zip(totals, tops, strict=True)]  # -inf: nothing was summed
        figures = tuple(x.clone() if extra else x.new_empty(0) for x in sums[4:])
        if not ctx.entropic:
            ctx.mark_non_differentiable(*figures)
        return (*values, *figures, diagonal)

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        """Gradients of the source and of the scales."""
        saved = ctx.saved_tensors
        source, scales, sums = saved[:6], saved[6:8], saved[8:]
        rows = cols = None
        figures = grads[2:4] if ctx.entropic else (None, None)
        grads = (*grads[:2], *figures, _unless_empty(grads[4]))
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            rows, cols = logsumexp_backward(
                *source, *scales, ctx.shared, *sums, *grads, *ctx.flags, *ctx.needs_input_grad[:2]
            )
        found: list[Tensor | None] = [None, None]
        for side, (mean, grad) in enumerate(zip(sums[4:], grads[:2], strict=True)):
            to = 0 if ctx.shared else side
            if ctx.needs_input_grad[6 + to] and grad is not None:
                by_scale = grad * mean
                by_scale = by_scale.sum().reshape(1) if scales[to].numel() == 1 else by_scale
                found[to] = by_scale if found[to] is None else found[to] + by_scale
        return _unless_empty(rows), _unless_empty(cols), None, None, None, None, *found, None, None, None, None


def _unless_empty(x: Tensor | None) -> Tensor | None:
    return None if x is None or x.numel() == 0 else x


# ---------------------------------------------------------------------------------------------------- moments


def _fake_moments(*args):
    sizes = _sizes(Source(*args[:6]), args[6:])
    return (*sizes, *(torch.empty_like(s) for s in sizes))


@_operator("(SOURCE, bool for_rows, bool for_cols) -> (Tensor, Tensor, Tensor, Tensor)", _fake_moments)
def moment_sums(*args):
    means, variances = moments.moments(Source(*args[:6]), args[6:])
    return (*means, *variances)


@_operator(
    "(SOURCE, Tensor? row_mean, Tensor? col_mean, Tensor? row_grad, Tensor? col_grad, Tensor? row_var_grad,"
    " Tensor? col_var_grad, bool need_rows, bool need_cols) -> (Tensor, Tensor)",
    _fake_source_gradient,
)
def moment_sums_backward(*args):
    a = args[6:]
    return moments.moments_backward(Source(*args[:6]), a[0:2], a[2:4], a[4:6], a[6:8])


class Moments(torch.autograd.Function):
    """``(row mean, column mean, row variance, column variance)`` of the negatives."""

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv, row_ids, col_ids, for_rows, for_cols):
        """(N,) means, (M,) means, (N,) and (M,) variances."""
        source = (rows, cols, row_inv, col_inv, row_ids, col_ids)
        out = moment_sums(*source, for_rows, for_cols)
        ctx.save_for_backward(*source, *out[:2])
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        rows, cols = moment_sums_backward(*saved[:6], *saved[6:8], *grads, *ctx.needs_input_grad[:2])
        return _unless_empty(rows), _unless_empty(cols), *([None] * 6)


# ------------------------------------------------------------------------------------------------ single pairs


def _fake_hardest(*args):
    sizes = _sizes(Source(*args[:6]), args[6:])
    return *sizes, *(x.to(torch.int64) for x in sizes)


@_operator("(SOURCE, bool for_rows, bool for_cols) -> (Tensor, Tensor, Tensor, Tensor)", _fake_hardest)
def hardest(*args):
    """Scores and indices, of the rows and of the columns: ``(row score, column score, row index, column index)``."""
    return pairs.hardest(Source(*args[:6]), args[6:])


def _unlabelled(rows: Tensor, cols: Tensor | None, row_inv: Tensor | None, col_inv: Tensor | None) -> Source:
    return Source(rows, cols, row_inv, col_inv, None, None)


def _fake_pair_scores(*args):
    return args[0].new_empty(args[4].shape[0], dtype=compute_dtype(args[0]))


@_operator(
    "(Tensor rows, Tensor? cols, Tensor? row_inv, Tensor? col_inv, Tensor row_index, Tensor? col_index) -> Tensor",
    _fake_pair_scores,
)
def pair_scores(*args):
    i, j = args[4:]
    return pairs.pair_scores(_unlabelled(*args[:4]), i, i if j is None else j)


def _fake_pair_scores_backward(*args):
    return _like_source(_unlabelled(*args[:4]), args[-2:])


@_operator(
    "(Tensor rows, Tensor? cols, Tensor? row_inv, Tensor? col_inv, Tensor row_index, Tensor? col_index, Tensor scores,"
    " Tensor grad, bool need_rows, bool need_cols) -> (Tensor, Tensor)",
    _fake_pair_scores_backward,
)
def pair_scores_backward(*args):
    """Gradients of the embeddings from those of :func:`pair_scores`."""
    gradient = pairs.PairGradient(_unlabelled(*args[:4]), args[8:])
    i, j, scores, grad = args[4:8]
    gradient.add(i, i if j is None else j, scores, grad)
    return gradient.finish()


class PairScores(torch.autograd.Function):
    """(P,) scores of the pairs ``(row_index[p], col_index[p])``; the gradient touches these pairs only.

    Without ``col_index`` both have the same index. ``scores`` are the pairs' own if they are known already.
    """

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv, row_index, col_index, scores=None):
        """(P,) scores."""
        pair = rows, cols, row_inv, col_inv, row_index, col_index
        scores = pair_scores(*pair) if scores is None else scores.clone()
        ctx.save_for_backward(*pair, scores)
        return scores

    @staticmethod
    @first_order
    def backward(ctx, grad):
        rows, cols = pair_scores_backward(*ctx.saved_tensors, grad, *ctx.needs_input_grad[:2])
        return _unless_empty(rows), _unless_empty(cols), *([None] * 5)


def _fake_positives(*args):
    return _sizes(Source(*args[:6]), args[9:])


@_operator(
    "(SOURCE, str term, Tensor[] row_params, Tensor[] col_params, bool for_rows, bool for_cols) -> (Tensor, Tensor)",
    _fake_positives,
)
def positive_sums(*args):
    return pairs.positives(Source(*args[:6]), args[6], args[7:9], args[9:])


def _fake_positives_backward(*args):
    given = [torch.empty_like(p) for side in args[7:9] for p in side]
    split = len(args[7])
    return (*_like_source(Source(*args[:6]), args[-2:]), given[:split], given[split:])


@_operator(
    "(SOURCE, str term, Tensor[] row_params, Tensor[] col_params, Tensor? row_grad, Tensor? col_grad,"
    " bool need_rows, bool need_cols) -> (Tensor, Tensor, Tensor[], Tensor[])",
    _fake_positives_backward,
)
def positive_sums_backward(*args):
    return pairs.positives_backward(Source(*args[:6]), args[6], args[7:9], args[9:11], args[11:])


class PositiveSums(torch.autograd.Function):
    """``(row sums, column sums)`` of a registered term over the positives; parameters follow, rows' first."""

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv, row_ids, col_ids, term, for_rows, for_cols, split, *params):
        """(N,) and (M,) sums."""
        source = (rows, cols, row_inv, col_inv, row_ids, col_ids)
        out = positive_sums(*source, term, list(params[:split]), list(params[split:]), for_rows, for_cols)
        ctx.save_for_backward(*source, *params)
        ctx.term, ctx.split = term, split
        ctx.asked = for_rows, for_cols
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @first_order
    def backward(ctx, row_grad, col_grad):
        """Gradients of the source and of the parameters."""
        source, params, split = ctx.saved_tensors[:6], ctx.saved_tensors[6:], ctx.split
        rows, cols, by_row_params, by_col_params = positive_sums_backward(
            *source, ctx.term, list(params[:split]), list(params[split:]), row_grad, col_grad, *ctx.needs_input_grad[:2]
        )
        return _unless_empty(rows), _unless_empty(cols), *([None] * 8), *by_row_params, *by_col_params


def _fake_violations(*args):
    return _sizes(Source(*args[:6]), args[7:])


@_operator("(SOURCE, float margin, bool for_rows, bool for_cols) -> (Tensor, Tensor)", _fake_violations)
def violations(*args):
    return pairs.violations(Source(*args[:6]), args[6], args[7:])


@_operator(
    "(SOURCE, float margin, Tensor? row_grad, Tensor? col_grad, bool need_rows, bool need_cols) -> (Tensor, Tensor)",
    _fake_source_gradient,
)
def violations_backward(*args):
    return pairs.violations_backward(Source(*args[:6]), args[6], args[7:9], args[9:])


class Violations(torch.autograd.Function):
    """``(row sums, column sums)`` of margin violations by all negatives."""

    @staticmethod
    def forward(ctx, rows, cols, row_inv, col_inv, row_ids, col_ids, margin, for_rows, for_cols):
        """(N,) and (M,) sums."""
        source = (rows, cols, row_inv, col_inv, row_ids, col_ids)
        ctx.save_for_backward(*source)
        ctx.margin = margin
        ctx.set_materialize_grads(False)
        return violations(*source, margin, for_rows, for_cols)

    @staticmethod
    @first_order
    def backward(ctx, row_grad, col_grad):
        rows, cols = violations_backward(*ctx.saved_tensors, ctx.margin, row_grad, col_grad, *ctx.needs_input_grad[:2])
        return _unless_empty(rows), _unless_empty(cols), *([None] * 7)
