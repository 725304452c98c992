"""Log-sum-exp of a batch against a memory, which gets no gradient."""

from __future__ import annotations

import torch

from . import softmax
from .products import matmul
from .registration import WIDTH, full_precision, operator, uninitialised
from .tiles import Source, first_order, project_, unit


def _fake_memory_sums(source, scale, masked, bounded, wanted):
    total, _ = uninitialised(source, (True, False))
    return total, torch.empty_like(total), total.new_empty(source.rows.shape if wanted else (0,))


@operator(
    "(SOURCE, Tensor scale, bool masked, bool bounded, bool wanted) -> (Tensor, Tensor, Tensor)", _fake_memory_sums
)
def memory_sums(source, scale, masked, bounded, wanted):
    total, top, products = softmax.sums_and_products(source, scale, masked, bounded, wanted)
    return total, top, total.new_empty(0) if products is None else products


def _memory_sums_in_place(source, scale, positives, bounded, wanted):
    """The same, where the scores exist and may be overwritten: not for the compiler, which should not see that."""
    cols = unit(source.cols, None)
    with full_precision(source.rows):
        found = softmax.exponentials_(source.kept, scale, positives, bounded)
        if found is None:
            source.kept.copy_(matmul(unit(source.rows, source.row_inv), cols.T))
            found = softmax.exponentials_(source.kept, scale, positives, False)
        assert found is not None
        return *found, matmul(source.kept, cols) if wanted else found[0].new_empty(0)


class MemoryLogSumExp(torch.autograd.Function):
    """``L`` of the rows of a memory; with ``in_place`` the scores that the source has kept are overwritten.

    The gradient of an anchor's value needs nothing of the upstream gradient but a factor. So it is found at once, while
    the memory is in the cache: no tile is formed again, and nothing of the size of the memory is kept for backward.
    """

    @staticmethod
    def forward(ctx, *args):
        """(N,) log-sum-exps; ``wanted``: there will be a backward pass."""
        source, (scale, masked, bounded, wanted, in_place, positives) = Source(*args[:WIDTH]), args[WIDTH:]
        if in_place:
            total, top, gradient = _memory_sums_in_place(source, scale, positives if masked else None, bounded, wanted)
        else:
            total, top, gradient = memory_sums(*source, scale, masked, bounded, wanted)
        if wanted:
            # Where nothing was summed, 0 is divided by 0.
            gradient.mul_((scale / torch.where(total > 0, total, 1.0))[:, None])
            assert source.row_inv is not None
            project_(gradient, unit(source.rows, source.row_inv), source.row_inv)
            ctx.save_for_backward(gradient)
            ctx.dtype = source.rows.dtype
        return total.log() + top

    @staticmethod
    @first_order
    def backward(ctx, grad):
        """Gradients of the rows."""
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[:, None]).to(ctx.dtype), *([None] * (WIDTH + 5))
