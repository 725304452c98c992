"""Sums that Triton computes together with their gradient, so that scores are visited once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import triton
from .autograd import (
    Request,
    Targets,
    first_derivatives,
    in_places,
    needs_of,
)
from .pair_scores import ListedPairs, pair_scores
from .question import Value
from .step import raise_second_derivative, saved_tensors
from .vectors import full_precision


def ask(
    request: Request,
    weights: Tensor | None,  # (1,) or (A,), of the sums in one total; None: there is none
    targets: Targets,
) -> tuple[Tensor, Tensor | None]:
    """Return the sums (A,), or their () weighted total, and the scores (P,) of pairs.

    Their gradient by vectors comes along with them.
    """
    assert request.question is not None
    return EarlySums.apply(request, weights, *targets, *request.question.values)  # type: ignore[return-value]


class EarlySums(torch.autograd.Function):
    """The sums (A,), or their weighted total (), with their gradient; and the scores (P,) of pairs.

    The gradient is known up to one factor for each sum, or for the total.
    """

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        weights: Tensor | None,
        rows: Tensor | None,
        cols: Tensor | None,
        *rest: Value | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return both; ``rest``: see :meth:`itrloss.engine.autograd.Sums.forward`."""
        assert request.question is not None
        needed = ctx.needs_input_grad
        needs = needs_of(request, Targets(rows, cols), (False, *needed[2:]))
        inputs = request.inputs
        with full_precision(inputs.like):
            sums, found = triton.sums_and_gradients(request.question, inputs, weights, needs)
            scores = None if request.pairs is None else pair_scores(inputs, *request.pairs)
        ctx.request, tensors = request.without_tensors()
        ctx.save_for_backward(*found, *tensors)
        ctx.needs = needs
        ctx.set_materialize_grads(False)  # a loss may use the sums alone, or the pairs alone
        return sums, scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradient of each tensor that ``forward`` took, from the gradients of both."""
        if grads[0] is None and grads[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise_second_derivative()
        tensors = saved_tensors(ctx)
        request: Request = ctx.request.with_tensors(tensors[3:])
        grad_sums, grad_pairs = grads
        if grad_sums is None:
            found = first_derivatives(request, ctx.needs, None, grad_pairs)
            return None, *in_places(request, found)
        listed = None
        if request.pairs is not None and grad_pairs is not None:
            listed = ListedPairs(*request.pairs, grad_pairs)
        assert request.question is not None
        sums = triton.EarlyGradients(*tensors[:3])
        with full_precision(request.inputs.like):
            found = triton.completed_gradients(
                request.question, request.inputs, sums, grad_sums, ctx.needs, listed
            )
        return None, *in_places(request, found)
