"""The one autograd function of the engine: sums over a matrix, and scores of its positive pairs.

Its gradient is in closed form: :func:`itrloss.engine.tiled.gradients`, or Triton's. As one node,
the sums and the positives add their gradients to the same tensors, so that backward holds one
gradient of all embeddings less at a time: 34 MB of 105 for InfoNCE at 8192 x 8192 x 512 (``pytest
tests/engine/test_costs.py -k memory``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import dense, moments, tiled
from .inputs import Inputs, Side, taken, whole_scores
from .pair_scores import Index, ListedPairs, pair_scores
from .question import Question, Value, is_trained
from .saved import save, saved
from .tiled import Gradients, Needs
from .vectors import full_precision, plain_unit

if TYPE_CHECKING:
    from .trial import Form
    from .triton import EarlyGradients


class AllScores(torch.autograd.Function):
    """The (N, M) scores of a small matrix, whose gradient is in closed form.

    The gradients of several questions are added up before they are multiplied: large terms that
    cancel lose no digits, and each question saves two products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (N, D) as they are passed in; in forward, ``inputs`` stand for all of them
        cols: Tensor,  # (M, D)
        row_bias: Tensor | None,  # (N,)
        col_bias: Tensor | None,  # (M,)
        inputs: Inputs,
    ) -> Tensor:
        """Return the (N, M) scores."""
        targets = Targets(rows, cols, row_bias, col_bias)
        save(ctx, (inputs, targets.only_trained()))
        with full_precision(inputs.like):
            return whole_scores(inputs.rows, inputs.cols)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the vectors and biases from the gradient of the scores (N, M)."""
        inputs: Inputs
        targets: Targets
        inputs, targets = saved(ctx)
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True
            scores = plain_scores(inputs, targets)
            return *second_gradients([scores], [grad], targets[:4]), None
        needs = Needs(*ctx.needs_input_grad[:4])
        with full_precision(inputs.like):
            gradients = tiled.gradients_of_scores(inputs, needs, grad)
        return gradients.rows, gradients.cols, gradients.row_bias, gradients.col_bias, None


class Targets(NamedTuple):
    """What gets the gradient of embeddings and scores; None where there is nothing of the kind."""

    rows: Tensor | None = None  # (N, D)
    cols: Tensor | None = None  # (M, D)
    row_bias: Tensor | None = None  # (N,)
    col_bias: Tensor | None = None  # (M,)
    scores: Tensor | None = None  # (N, M), where they are precomputed

    def any_trained(self) -> bool:
        """Return whether one of them gets a gradient."""
        return any(is_trained(x) for x in self)

    def only_trained(self) -> Targets:
        """Return those that get a gradient: they link a second derivative to their origin."""
        return Targets(*[x if is_trained(x) else None for x in self])


@dataclass(frozen=True, eq=False)
class Request:
    """A question of a matrix, or pairs whose scores are requested, or both."""

    question: Question | None
    inputs: Inputs
    guide: Inputs | None
    pairs: tuple[Index, Index] | None
    form: Form | None = None  # of the question, if Triton has kernels for it
    strict: bool = False  # whether an error of Triton is raised, as the user chose it
    early: bool = False  # whether Triton finds the gradient of vectors along with the sums
    #: (1,) or (A,): the sums are then added with these weights to one number. None: they are not.
    weights: Tensor | None = None
    moments: bool = False  # whether the sums are computed without the scores


def answer(request: Request) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums (A,) and the scores (P,) of pairs, without a gradient."""
    inputs = request.inputs
    with torch.no_grad(), full_precision(inputs.like):
        scores = None if request.pairs is None else pair_scores(inputs, *request.pairs)
        if request.question is None:
            return None, scores
        return sums_of(request, request.question), scores


def sums_of(request: Request, question: Question) -> Tensor:
    """Return the sums (A,) of a request's question, by Triton if it has kernels that work."""
    if request.moments:
        return moments.sums(question, request.inputs)
    if request.form is not None:
        from . import trial, triton

        try:
            return triton.sums(question, request.inputs)
        except Exception as error:
            trial.refuse(request.form, request.strict, error)
    return tiled.sums(question, request.inputs, request.guide)


def ask(request: Request, targets: Targets) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums (A,) and the scores (P,) of pairs, differentiable."""
    values: tuple[Value | None, ...] = ()
    if request.question is not None:
        values = request.question.values
    trained = targets.any_trained() or any(is_trained(x) for x in values)
    if not torch.is_grad_enabled() or not trained:
        return answer(request)
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            "itrloss: tiles are visited outside of compiled graphs; "
            "fullgraph=True needs engine='dense'"
        )
    function = EarlySumsAndPairScores if request.early else SumsAndPairScores
    return function.apply(request, *targets, *values)  # type: ignore[return-value]


class SumsAndPairScores(torch.autograd.Function):
    """The sums (A,) and the scores (P,) of listed pairs; None for what is not requested."""

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        rows: Tensor | None,
        cols: Tensor | None,
        row_bias: Tensor | None,
        col_bias: Tensor | None,
        scores: Tensor | None,
        *values: Value | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the sums (A,) or (K, A) and the scores (P,), from the request alone."""
        targets = Targets(rows, cols, row_bias, col_bias, scores)
        save(ctx, (request, targets.only_trained()))
        ctx.dtypes = [torch.float32 if x is None else x.dtype for x in (rows, cols)]
        ctx.set_materialize_grads(False)  # a loss may use the sums alone, or the pairs alone
        return answer(request)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradient of each tensor that ``forward`` took, from the gradients of both."""
        if grads == (None, None):
            return (None,) * len(ctx.needs_input_grad)
        request: Request
        targets: Targets
        request, targets = saved(ctx)
        if torch.is_grad_enabled():  # create_graph=True
            return None, *second_derivatives(request, targets, *grads)
        needs = needs_of(request, ctx.needs_input_grad)._replace(dtypes=tuple(ctx.dtypes))
        return in_places(request, first_derivatives(request, needs, *grads))


def in_places(request: Request, gradients: Gradients) -> tuple[Any, ...]:
    """Return gradients in the places of :meth:`SumsAndPairScores.forward`."""
    of_targets = (
        gradients.rows,
        gradients.cols,
        gradients.row_bias,
        gradients.col_bias,
        gradients.scores,
    )
    if request.question is None:
        return None, *of_targets
    return None, *of_targets, gradients.scale, gradients.shift, None, None, *gradients.params


class EarlySumsAndPairScores(torch.autograd.Function):
    """The sums (A,), or their weighted total (), with their gradient; and the scores (P,) of pairs.

    The gradient is known up to one factor for each sum, or for the total.
    """

    @staticmethod
    def forward(
        ctx: Any, request: Request, rows: Tensor | None, cols: Tensor | None, *rest: Value | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return both; ``rest``: see :meth:`SumsAndPairScores.forward`."""
        dtypes = [torch.float32 if x is None else x.dtype for x in (rows, cols)]
        needs = needs_of(request, ctx.needs_input_grad)._replace(dtypes=tuple(dtypes))
        inputs = request.inputs
        with full_precision(inputs.like):
            sums, early = early_sums(request, needs)
            scores = None if request.pairs is None else pair_scores(inputs, *request.pairs)
        save(ctx, (request, needs, early))
        ctx.set_materialize_grads(False)  # a loss may use the sums alone, or the pairs alone
        return sums, scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradient of each tensor that ``forward`` took, from the gradients of both."""
        if grads == (None, None):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise_second_derivative()
        request: Request
        request, needs, early = saved(ctx)
        grad_sums, grad_pairs = grads
        if grad_sums is None:
            return in_places(request, first_derivatives(request, needs, None, grad_pairs))
        gradients = early_derivatives(request, needs, early, grad_sums, grad_pairs)
        return in_places(request, gradients)


def early_sums(request: Request, needs: Needs) -> tuple[Tensor, EarlyGradients | None]:
    """Return the sums (A,), or their weighted total (), and what their gradients are made of.

    If Triton fails, the tiled engine returns them, and finds the gradients afterwards.
    """
    from . import trial, triton

    question = request.question
    weights = request.weights
    assert question is not None and request.form is not None
    try:
        return triton.sums_and_gradients(question, request.inputs, weights, needs)
    except Exception as error:
        trial.refuse(request.form, request.strict, error)
    sums = tiled.sums(question, request.inputs, None)
    return sums if weights is None else (sums * weights).sum(), None


def early_derivatives(
    request: Request,
    needs: Needs,
    early: EarlyGradients | None,
    grad: Tensor,  # (A,) of the sums, or () of their total
    grad_pairs: Tensor | None,  # (P,)
) -> Gradients:
    """Return the gradients from the gradients of :func:`early_sums` and of the pairs' scores."""
    from . import trial, triton

    question = request.question
    assert question is not None and request.form is not None
    if early is not None:
        listed = None
        if request.pairs is not None and grad_pairs is not None:
            listed = ListedPairs(*request.pairs, grad_pairs)
        inputs = request.inputs
        try:
            with full_precision(inputs.like):
                return triton.completed_gradients(question, inputs, early, grad, needs, listed)
        except Exception as error:
            trial.refuse(request.form, request.strict, error)
    if request.weights is not None:
        grad = (request.weights * grad).expand(question.size)
    by_tiles = replace(request, form=None)
    return first_derivatives(by_tiles, needs, grad, grad_pairs)


def needs_of(request: Request, needed: Sequence[bool]) -> Needs:
    """Return what a gradient is needed of, from the places of :meth:`SumsAndPairScores.forward`."""
    _, rows, cols, row_bias, col_bias, scores, *values = needed
    if request.question is None:
        return Needs(rows, cols, row_bias, col_bias, scores, False, False, ())
    scale, shift, _, _, *params = values
    return Needs(rows, cols, row_bias, col_bias, scores, scale, shift, tuple(params))


def first_derivatives(
    request: Request, needs: Needs, grad_sums: Tensor | None, grad_pairs: Tensor | None
) -> Gradients:
    """Return the gradients from the gradients of the sums (A,) and of the pairs' scores (P,)."""
    question = request.question
    inputs = request.inputs
    listed = None
    if request.pairs is not None and grad_pairs is not None:
        listed = ListedPairs(*request.pairs, grad_pairs)
    with full_precision(inputs.like):
        if question is None or grad_sums is None:
            assert listed is not None
            return tiled.pair_gradients(inputs, needs, listed)
        if request.moments:
            return moments.gradients(question, inputs, grad_sums, needs, listed)
        if request.form is not None:
            from . import trial, triton

            try:
                return triton.gradients(question, inputs, grad_sums, needs, listed)
            except Exception as error:
                trial.refuse(request.form, request.strict, error)
        return tiled.gradients(question, inputs, request.guide, grad_sums, needs, listed)


# ------------------------------------------------------------------------------ second derivatives


def second_derivatives(
    request: Request, targets: Targets, grad_sums: Tensor | None, grad_pairs: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients with a graph of their own, from plain PyTorch."""
    question = request.question
    inputs = request.inputs
    guide = request.guide
    pairs = request.pairs
    outputs: list[Tensor] = []
    grads: list[Tensor] = []
    values: tuple[Value | None, ...] = ()
    if question is not None:
        values = question.values
        if grad_sums is not None:
            other = None if guide is None else scores_of_guide(guide)
            outputs.append(dense.sums(question, plain_scores(inputs, targets), other))
            grads.append(grad_sums)
    if pairs is not None and grad_pairs is not None:
        outputs.append(plain_pair_scores(inputs, targets, *pairs))
        grads.append(grad_pairs)
    return second_gradients(outputs, grads, [*targets, *values])


def scores_of_guide(guide: Inputs) -> Tensor:
    """Return the (N, M) scores of a guide, which may not hold them, without a gradient."""
    if guide.scores is not None:
        return guide.scores.detach()
    with torch.no_grad(), full_precision(guide.like):
        return whole_scores(guide.rows, guide.cols)


def second_gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], places: Sequence[Value | None]
) -> list[Tensor | None]:
    """Return the gradients, with a graph of their own, of what is trained among ``places``."""
    trained = [x for x in places if is_trained(x)]
    gradients = iter(
        torch.autograd.grad(outputs, trained, grads, create_graph=True, allow_unused=True)
    )
    return [next(gradients) if is_trained(x) else None for x in places]


def plain_scores(inputs: Inputs, targets: Targets) -> Tensor:
    """Return the (N, M) scores with their graph, from what gets their gradient."""
    if targets.scores is not None:
        return targets.scores
    if inputs.rows.unit is None:
        raise_second_derivative()
    rows = plain_side(inputs.rows, targets.rows)
    cols = plain_side(inputs.cols, targets.cols)
    return plain_product(rows, cols, inputs.rows.bias, inputs.cols.bias)


def raise_second_derivative() -> NoReturn:
    """Raise the error of a gradient that is not to be differentiated."""
    raise RuntimeError(
        "create_graph: second derivatives need engine='dense', whose answers are plain PyTorch"
    )


def plain_product(
    rows: Tensor,  # (N, D) at unit length
    cols: Tensor,  # (M, D)
    row_bias: Tensor | None,  # (N,)
    col_bias: Tensor | None,  # (M,)
) -> Tensor:
    """Return the (N, M) scores of vectors, by operators that autograd differentiates."""
    with full_precision(rows):
        scores = rows @ cols.T
    if row_bias is not None:
        scores = scores + row_bias[:, None]
    if col_bias is not None:
        scores = scores + col_bias
    return scores


def pairs_of(scores: Tensor, i: Index, j: Index) -> Tensor:
    """Return the entries (P,) of scores (N, M) in rows i and columns j; None: the diagonal."""
    if i is None or j is None:
        return scores.diagonal()
    return scores[i, j]


def plain_pair_scores(inputs: Inputs, targets: Targets, i: Index, j: Index) -> Tensor:
    """Return the (P,) scores of rows i with columns j with their graph."""
    if targets.scores is not None:
        return pairs_of(targets.scores, i, j)
    rows = plain_side(inputs.rows, targets.rows)
    cols = plain_side(inputs.cols, targets.cols)
    scores = (taken(rows, i) * taken(cols, j)).sum(1)
    if inputs.rows.bias is not None:
        scores = scores + taken(inputs.rows.bias, i)
    if inputs.cols.bias is not None:
        scores = scores + taken(inputs.cols.bias, j)
    return scores


def plain_side(side: Side, target: Tensor | None) -> Tensor:
    """Return a side's vectors at unit length, with their graph if they are trained."""
    if target is None:
        return side.all_vectors()
    return plain_unit(target, side.inv is not None)
