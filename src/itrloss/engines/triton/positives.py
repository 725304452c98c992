"""Triton kernels of the positives that ids name: a program per anchor, which multiplies it with its positives alone.

Where they are is known from the sorted ids of the other side: those of anchor i are ``order[first[i]:last[i]]``. So
nothing has to be counted before, which would make the host wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sums import log1p, sigmoid, softplus

# Of itrloss.engines.terms; a term of someone's own is not among them.
TERMS = ("identity", "log1p_clamp", "log1p_relu", "negative_log_likelihood", "softplus", "hinge")
_CLAMP, _RELU, _LIKELIHOOD, _SOFTPLUS, _HINGE = (tl.constexpr(i) for i in range(1, len(TERMS)))
_FLOOR = tl.constexpr(-1 + 1e-6)


@triton.jit
def _term(s, p, q, TERM: tl.constexpr):
    """Value of a term, and its derivatives by the score and by its parameters p and q, if it has them."""
    value, slope, by_p, by_q = s, s * 0.0 + 1.0, s * 0.0, s * 0.0
    if TERM == _CLAMP:
        kept = tl.maximum(s, _FLOOR)
        value, slope = log1p(kept), tl.where(s >= _FLOOR, 1.0 / (1.0 + kept), 0.0)
    if TERM == _RELU:
        kept = tl.maximum(s, 0.0)
        value, slope = log1p(kept), tl.where(s > 0.0, 1.0 / (1.0 + kept), 0.0)
    if TERM == _LIKELIHOOD:
        z = p - q * s
        miss = sigmoid(z)
        value, slope, by_p, by_q = softplus(z), -miss * q, miss, -miss * s
    if TERM == _SOFTPLUS:
        z = p * s + q
        rise = sigmoid(z)
        value, slope, by_p, by_q = softplus(z), rise * p, rise * s, rise
    if TERM == _HINGE:
        active = tl.where(p > s, 1.0, 0.0)
        value, slope, by_p = active * (p - s), -active, active
    return value, slope, by_p, by_q


@triton.jit
def _embedding(x, inv, i, stride, width, D: tl.constexpr):
    """As it came, in float32, and its reciprocal length."""
    d = tl.arange(0, D)
    vector = tl.load(x + i * stride + d, mask=d < width, other=0.0).to(tl.float32)
    factor = 1.0
    if inv is not None:
        factor = tl.load(inv + i)
    return vector, factor


@triton.jit
def _parameter(x, i, ONE: tl.constexpr):
    found = 0.0
    if x is not None:
        if ONE:
            i = i * 0
        found = tl.load(x + i)
    return found


@triton.jit
def positive_sums(
    own,  # (N, D)
    other,  # (M, D)
    own_inv,  # (N,)
    other_inv,  # (M,)
    own_stride,
    other_stride,
    width,  # D
    order,  # (M,)
    first,  # (N,)
    last,  # (N,)
    p,  # (N,), or (1,), or None
    q,
    out,  # (N,)
    ONE_P: tl.constexpr,
    ONE_Q: tl.constexpr,
    TERM: tl.constexpr,
    D: tl.constexpr,
):
    """Sum of a term of the scores of an anchor with its positives."""
    i = tl.program_id(0).to(tl.int64)
    x, x_inv = _embedding(own, own_inv, i, own_stride, width, D)  # type: ignore
    a, b = _parameter(p, i, ONE_P), _parameter(q, i, ONE_Q)
    total = 0.0
    for k in range(tl.load(first + i), tl.load(last + i)):
        y, y_inv = _embedding(other, other_inv, tl.load(order + k), other_stride, width, D)
        value, _, _, _ = _term(tl.sum(x * y) * (x_inv * y_inv), a, b, TERM)
        total += value
    tl.store(out + i, total)


@triton.jit
def positive_gradient(
    own,
    other,
    own_inv,
    other_inv,
    own_stride,
    other_stride,
    width,
    order,
    first,
    last,
    own_p,
    own_q,
    own_grad,  # (N,) of the sums of this side; None if they are not asked
    other_p,
    other_q,
    other_grad,  # (M,) of those of the other side
    out,  # (N, D) gradient of the embeddings, or None
    by_p,  # (N,) gradients of the parameters, or None
    by_q,
    ONE_OWN_P: tl.constexpr,
    ONE_OWN_Q: tl.constexpr,
    ONE_OTHER_P: tl.constexpr,
    ONE_OTHER_Q: tl.constexpr,
    TERM: tl.constexpr,
    D: tl.constexpr,
):
    """Gradient of an anchor's embedding and parameters."""
    i, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    x, x_inv = _embedding(own, own_inv, i, own_stride, width, D)  # type: ignore
    a, b, g = _parameter(own_p, i, ONE_OWN_P), _parameter(own_q, i, ONE_OWN_Q), _parameter(own_grad, i, False)
    pull, along, along_a, along_b = tl.zeros([D], tl.float32), 0.0, 0.0, 0.0
    for k in range(tl.load(first + i), tl.load(last + i)):
        j = tl.load(order + k)
        y, y_inv = _embedding(other, other_inv, j, other_stride, width, D)
        s = tl.sum(x * y) * (x_inv * y_inv)
        weight = s * 0.0
        if own_grad is not None:
            _, slope, slope_a, slope_b = _term(s, a, b, TERM)
            weight += slope * g
            along_a += slope_a * g
            along_b += slope_b * g
        if other_grad is not None:
            c, e = _parameter(other_p, j, ONE_OTHER_P), _parameter(other_q, j, ONE_OTHER_Q)
            _, slope, _, _ = _term(s, c, e, TERM)
            weight += slope * tl.load(other_grad + j)
        pull += (weight * y_inv) * y
        along += weight * s
    if out is not None:
        # d cos(v, w) / dv = w / (|v| |w|) - cos(v, w) v / |v|^2
        if own_inv is not None:
            pull = x_inv * (pull - (along * x_inv) * x)
        tl.store(out + i * width + d, pull.to(out.dtype.element_ty), mask=d < width)
    if by_p is not None:
        tl.store(by_p + i, along_a)
    if by_q is not None:
        tl.store(by_q + i, along_b)
