"""Sums over a matrix that is visited block by block, differentiable.

Their gradient is in closed form: :func:`itrloss.engine.tiled.gradients`, or Triton's. As one node,
the sums and the positives add their gradients to the same tensors, so that backward holds one
gradient of all embeddings less at a time: 34 MB of 105 for InfoNCE at 8192 x 8192 x 512 (``pytest
tests/engine/test_costs.py -k memory``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_versions import is_compiling
from . import dense, tiled
from .inputs import NO_INPUTS, NUMBER_OF_TENSORS, Inputs, Side, whole_scores
from .pair_scores import Index, ListedPairs, pair_scores
from .products import product
from .question import Question, Value, is_trained
from .step import (
    aliases,
    pairs_of,
    raise_second_derivative,
    saved_tensors,
    second_gradients,
)
from .tiled import NOT_FOUND, EarlyGradients, Gradients, Needs
from .vectors import plain_unit


class Targets(NamedTuple):
    """What gets the gradient of embeddings and scores; None where there is nothing of the kind."""

    rows: Tensor | None = None  # (N, D)
    cols: Tensor | None = None  # (M, D)
    row_bias: Tensor | None = None  # (N,)
    col_bias: Tensor | None = None  # (M,)
    scores: Tensor | None = None  # (N, M)


class Request(NamedTuple):
    """A question of a matrix, or pairs whose scores are requested, or both."""

    question: Question | None
    inputs: Inputs
    guide: Inputs | None = None
    pairs: tuple[Index, Index] | None = None
    by_triton: bool = False
    #: Whether the gradient of vectors is found along with sums, up to one factor for each.
    early: bool = False
    #: Of the sums in one total, without a gradient; None: there is no total.
    weights: Value | None = None

    def without_tensors(self) -> tuple[Request, list[Tensor | None]]:
        """Return what is left of the request without its tensors, and these, or None in their
        places: autograd is to save them.
        """
        guide = NO_INPUTS if self.guide is None else self.guide
        i, j = self.pairs or (None, None)
        tensors = [*self.inputs.tensors(), *guide.tensors(), i, j]
        question = self.question
        if question is not None:
            question, of_question = question.without_tensors()
            tensors += of_question
        of_guide = None if self.guide is None else NO_INPUTS
        pairs = None if self.pairs is None else (None, None)
        rest = Request(question, NO_INPUTS, of_guide, pairs, self.by_triton, self.early)
        return rest, tensors

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Request:
        """Return the request with tensors in their places again."""
        size = NUMBER_OF_TENSORS
        question = self.question
        if question is not None:
            question = question.with_tensors(tensors[2 * size + 2 :])
        inputs = Inputs.of_tensors(tensors[:size])
        guide = None if self.guide is None else Inputs.of_tensors(tensors[size : 2 * size])
        i, j = tensors[2 * size : 2 * size + 2]
        pairs = None if self.pairs is None else (i, j)
        return Request(question, inputs, guide, pairs, self.by_triton, self.early)


def answer(
    request: Request, needs: Needs | None = None
) -> tuple[Tensor | None, Tensor | None, EarlyGradients]:
    """Return the sums (A,), or their () weighted total, and the scores (P,) of pairs; None for what
    is not requested. And what is found of the gradients that are needed.
    """
    inputs = request.inputs
    question = request.question
    found = NOT_FOUND
    if request.by_triton:
        from . import triton

        assert question is not None
        pairs = None if request.pairs is None else triton.pair_scores(inputs, *request.pairs)
        if needs is None or not request.early:
            return triton.sums(question, inputs), pairs, found
        sums, found = triton.sums_and_gradients(question, inputs, request.weights, needs)
        return sums, pairs, found
    pairs = None if request.pairs is None else pair_scores(inputs, *request.pairs)
    if question is None:
        return None, pairs, found
    return tiled.sums(question, inputs, request.guide), pairs, found


def ask(request: Request, targets: Targets) -> tuple[Tensor | None, Tensor | None]:
    """Return what :func:`answer` does, differentiable."""
    values: tuple[Value | None, ...] = ()
    if request.question is not None:
        values = request.question.values
    if not torch.is_grad_enabled():
        return answer(request)[:2]
    if is_compiling():
        if not any([is_trained(x) for x in (*targets, *values)]):
            return answer(request)[:2]
        torch._dynamo.graph_break(
            "itrloss: tiles are visited outside of compiled graphs; "
            "fullgraph=True needs engine='dense'"
        )
    return Sums.apply(request, *targets, *values)  # type: ignore[return-value]


class Sums(torch.autograd.Function):
    """The sums (A,), or their weighted total (), and the scores (P,) of listed pairs; None for what
    is not requested.
    """

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
        """Return both, from the request alone."""
        targets = Targets(rows, cols, row_bias, col_bias, scores)
        needs = needs_of(request, targets, ctx.needs_input_grad)
        sums, pairs, found = answer(request, needs)
        ctx.request, tensors = request.without_tensors()
        ctx.save_for_backward(*targets, *found, *tensors)
        ctx.set_materialize_grads(False)  # a loss may use the sums alone, or the pairs alone
        return sums, pairs

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_sums: Tensor | None, grad_pairs: Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradient of each tensor that ``forward`` took, from the gradients of both."""
        if grad_sums is None and grad_pairs is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = saved_tensors(ctx)
        targets = Targets(*tensors[:5])  # type: ignore[call-arg]
        found = EarlyGradients(*tensors[5:8])  # type: ignore[call-arg]
        request: Request = ctx.request.with_tensors(tensors[8:])
        if torch.is_grad_enabled():  # create_graph=True
            if request.early:
                raise_second_derivative()
            return None, *second_derivatives(request, targets, grad_sums, grad_pairs)
        needs = needs_of(request, targets, ctx.needs_input_grad)
        gradients = first_derivatives(request, needs, found, grad_sums, grad_pairs)
        return in_places(request, gradients)


def needs_of(request: Request, targets: Targets, needed: Sequence[bool]) -> Needs:
    """Return what a gradient is needed of, from the places of :meth:`Sums.forward`."""
    _, rows, cols, row_bias, col_bias, scores, *values = needed
    dtypes = torch.float32, torch.float32
    if targets.rows is not None and targets.cols is not None:
        dtypes = targets.rows.dtype, targets.cols.dtype
    if request.question is None:
        return Needs(rows, cols, row_bias, col_bias, scores, dtypes=dtypes)
    scale, shift, _, _, *params = values
    return Needs(rows, cols, row_bias, col_bias, scores, scale, shift, tuple(params), dtypes)


def in_places(request: Request, gradients: Gradients) -> tuple[Any, ...]:
    """Return gradients in the places of :meth:`Sums.forward`."""
    of_targets = gradients[:5]
    if request.question is None:
        return None, *of_targets
    return None, *of_targets, gradients.scale, gradients.shift, None, None, *gradients.params


def first_derivatives(
    request: Request,
    needs: Needs,
    found: EarlyGradients,
    grad_sums: Tensor | None,  # (A,), or () of their total
    grad_pairs: Tensor | None,  # (P,)
) -> Gradients:
    """Return the gradients from the gradients of the sums and of the pairs' scores."""
    question = request.question
    inputs = request.inputs
    listed = None
    if request.pairs is not None and grad_pairs is not None:
        listed = ListedPairs(*request.pairs, grad_pairs)
    if question is None or grad_sums is None:
        assert listed is not None
        return tiled.pair_gradients(inputs, needs, listed)
    if request.by_triton:
        from . import triton

        if request.early:
            return triton.completed_gradients(question, inputs, found, grad_sums, needs, listed)
        return triton.gradients(question, inputs, grad_sums, needs, listed)
    return tiled.gradients(question, inputs, request.guide, grad_sums, needs, listed)


# ------------------------------------------------------------------------------ second derivatives


def second_derivatives(
    request: Request, targets: Targets, grad_sums: Tensor | None, grad_pairs: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients with a graph of their own, from plain PyTorch."""
    question = request.question
    pairs = request.pairs
    targets = Targets(*aliases(targets))
    scores = plain_scores(request.inputs, targets)
    outputs: list[Tensor | None] = []
    values: Sequence[Value | None] = ()
    if question is not None:
        values = aliases(question.values)
        question = question.with_values(values)
        other = None if request.guide is None else scores_of_guide(request.guide)
        outputs.append(None if grad_sums is None else dense.sums(question, scores, other))
    if pairs is not None:
        outputs.append(pairs_of(scores, *pairs))
    grads = [grad_sums] * (question is not None) + [grad_pairs] * (pairs is not None)
    return second_gradients(outputs, grads, [*targets, *values])


def scores_of_guide(guide: Inputs) -> Tensor:
    """Return the (N, M) scores of a guide, which may not hold them, without a gradient."""
    if guide.scores is not None:
        return guide.scores.detach()
    return whole_scores(guide.rows, guide.cols)


def plain_scores(inputs: Inputs, targets: Targets) -> Tensor:
    """Return the (N, M) scores with their graph, from what gets their gradient."""
    if targets.scores is not None:
        return targets.scores
    rows = plain_side(inputs.rows, targets.rows)
    cols = plain_side(inputs.cols, targets.cols)
    return with_biases(product(rows, cols.T), targets.row_bias, targets.col_bias)


def plain_side(side: Side, target: Tensor | None) -> Tensor:
    """Return a side's vectors at unit length, with their graph if they are trained."""
    if not is_trained(target):
        return side.all_vectors()
    if side.like.dtype != target.dtype:
        raise_second_derivative()
    return plain_unit(target, side.inv is not None)


def with_biases(scores: Tensor, row_bias: Tensor | None, col_bias: Tensor | None) -> Tensor:
    """Return scores (N, M) plus biases (N,) and (M,), differentiable."""
    if row_bias is not None:
        scores = scores + row_bias[:, None]
    if col_bias is not None:
        scores = scores + col_bias
    return scores
