"""Sums of the plain scores of positives, from the sums of the vectors of each class.

    sum_{p in pos(i)} S_ip = <u_i, c_k>        c_k = sum_{j in k} v_j        k: the class of i

That is work of (N + M) D, however many pairs there are, and no pair is listed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .autograd import Request, Targets, ask, plain_side, second_gradients
from .inputs import Inputs, Side
from .pairs import Classes, Members, Pairs, add_segments_, segment_sum
from .saved import save, saved
from .tiled import Total, of_vectors
from .vectors import chunks, compute_dtype


class ClassSums(torch.autograd.Function):
    """The sums (K, D) of the unit vectors of each class."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,  # (N, D) what gets the gradient of the vectors
        side: Side,
        classes: Classes,
        members: Members | None,  # of the classes, for Triton's kernel
    ) -> Tensor:
        """Return the sums (K, D)."""
        save(ctx, (side, classes, x))
        if members is not None:
            from . import triton

            return triton.class_sums(side, members)
        like = side.like
        sums = like.new_zeros(classes.size, like.shape[1], dtype=compute_dtype(like))
        for part in chunks(like):
            own = side.vectors(part) * classes.known[part, None]
            add_segments_(sums, classes.number[part], own)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradient (N, D) of the vectors."""
        side: Side
        classes: Classes
        side, classes, x = saved(ctx)
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True
            own = plain_side(side, x) * classes.known[:, None]
            sums = own.new_zeros(grad.shape).index_add(0, classes.number, own)
            return *second_gradients([sums], [grad], [x]), None, None, None
        total = Total(len(classes.number))
        total.value = grad[classes.number].mul_(classes.known[:, None])
        return of_vectors(total, side), None, None, None


def positive_sums(
    inputs: Inputs, pairs: Pairs, side: int, targets: Targets, by_triton: bool
) -> Tensor:
    """Return the sums (A,) of the scores of the positives of each vector of a side."""
    own, others = inputs.sides(side)
    own_target, target_of_others = targets.rows, targets.cols
    own_bias, bias_of_others = targets.row_bias, targets.col_bias
    if side == 1:
        own_target, target_of_others = target_of_others, own_target
        own_bias, bias_of_others = bias_of_others, own_bias
    own_classes = pairs.classes(side)
    classes_of_others = pairs.classes(1 - side)
    members = pairs.members(1 - side) if by_triton else None
    of_class = ClassSums.apply(target_of_others, others, classes_of_others, members)
    assert isinstance(of_class, Tensor)
    request = Request(
        question=None,
        inputs=Inputs(replace(own, bias=None), Side(None, None, of_class.detach(), None), None),
        guide=None,
        pairs=(None, own_classes.number),
    )
    _, sums = ask(request, Targets(own_target, of_class))
    assert sums is not None
    sums = sums * own_classes.known
    if own_bias is not None:
        sums = sums + own_bias * pairs.counts(side)[0]
    if bias_of_others is not None:
        bias = bias_of_others * classes_of_others.known
        by_class = segment_sum(bias, classes_of_others.number, classes_of_others.size)
        sums = sums + by_class[own_classes.number] * own_classes.known
    return sums
