"""The elementwise functions ``f`` of scores in ``finish(sum_j f(S_ij; params_i))``, summed over an
anchor's candidates.

An :class:`Answer` is such an ``f`` with its derivative. :mod:`itrloss.engine.reduce` sums it over a
matrix and carries its gradient to the embeddings; :class:`itrloss.Anchors` has the ``finish``,
which turns sums into the answer of a method. Triton's version of each function has the same name in
:mod:`itrloss.engine.kernels`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .scores import host_may_read

FLOOR = -1 + 1e-6  # lower bound of scores in log(1 + S)


class Answer(NamedTuple):
    """An elementwise function of scores that is summed, or maximised, over candidates."""

    # (s, *params, out) -> values of the shape of s, or a tuple of ``width`` of them. Parameters
    # broadcast with s; ``out`` holds buffers that values may be written to, or is None where
    # autograd has to record the operations.
    value: Callable[..., Any]
    # (s, params, grads, needs, out) -> gradients w.r.t. s and, where needed, w.r.t. each parameter,
    # all of the shape of s, from ``width`` upstream gradients. That w.r.t. s may lie in ``out[0]``,
    # the others in later buffers.
    slopes: Callable[..., list[Tensor | None]] | None  # None: not differentiable
    width: int = 1
    exponential: bool = False  # the derivative w.r.t. s is the first parameter times the value
    maximum: bool = False  # the maximum is taken instead of the sum; without a gradient
    buffers: int = 2  # length of ``out``


ANSWERS: dict[str, Answer] = {}
# suffixes of an answer's name: of candidates below, above, or between limits of their scores
LIMITS = "<", ">", "<>"
GUIDED = "|"  # before them: limits of the scores of a guide, another matrix of the same shape


def within(answer: Answer, limits: str, guided: bool = False) -> Answer:
    """Return the same answer of the candidates within limits, which are its last parameters and get
    no gradient.

    With ``guided``, the first parameter are the scores that the limits are of, in place of the
    answer's own.
    """
    size, first = len(limits), int(guided)

    def outside(s: Tensor, params: Sequence[Tensor]) -> Tensor:
        s = params[0] if guided else s
        masks = [
            s >= t if which == "<" else s <= t
            for which, t in zip(limits, params[-size:], strict=True)
        ]
        return functools.reduce(torch.logical_or, masks)

    def value(s: Tensor, *params: Tensor, out: Any = None) -> Any:
        values, mask = answer.value(s, *params[first:-size], out=out), outside(s, params)
        fill = -math.inf if answer.maximum else 0.0
        if answer.width == 1:
            return (
                values.expand_as(s).masked_fill(mask, fill)
                if out is None
                else values.masked_fill_(mask, fill)
            )
        return tuple(
            x.masked_fill(mask, fill) if out is None else x.masked_fill_(mask, fill) for x in values
        )

    def slopes(
        s: Tensor, params: Sequence[Tensor], grads: Any, needs: Sequence[bool], out: Any
    ) -> list[Tensor | None]:
        assert answer.slopes is not None
        gradients, mask = (
            answer.slopes(s, params[first:-size], grads, needs[first:-size], out),
            outside(s, params),
        )
        gradients = [
            None if x is None else x.expand_as(mask).masked_fill(mask, 0.0) for x in gradients
        ]
        return [gradients[0], *[None] * first, *gradients[1:], *[None] * size]

    return answer._replace(value=value, slopes=None if answer.slopes is None else slopes)


def _add(name: str, answer: Answer) -> None:
    """Add an answer, and its forms within limits."""
    ANSWERS[name] = answer
    for limits in LIMITS:
        ANSWERS[name + limits] = within(answer, limits)
        ANSWERS[name + GUIDED + limits] = within(answer, limits, guided=True)


def _by_autograd(function: Callable[..., Tensor], s, params, grads, needs, out):
    """Return the ``slopes`` of any function, differentiated by autograd."""
    with torch.enable_grad():
        leaves = [s.detach().requires_grad_()]
        # Expanded to whole tiles, as excluded pairs are masked in these gradients before they are
        # summed.
        leaves += [
            p.detach().expand_as(s).clone().requires_grad_(n)
            for p, n in zip(params, needs, strict=True)
        ]
        total = (function(*leaves).expand_as(s) * grads[0]).sum()
        inputs = [x for x in leaves if x.requires_grad]
        slopes = (
            torch.autograd.grad(total, inputs, allow_unused=True)
            if total.requires_grad
            else [None] * len(inputs)
        )
    remaining = iter(slopes)
    return [next(remaining) if x.requires_grad else None for x in leaves]


def pair_term(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register an elementwise function of scores, under its own name, for sums over negatives or
    positives.

    ``function(scores, *parameters)`` returns a tensor like ``scores``; autograd differentiates it,
    tile by tile. Parameters hold one value per anchor, shaped to broadcast with the scores. The
    function should be finite for every score, even those of pairs that the sum leaves out.

    >>> @pair_term
    ... def cube(scores):
    ...     return scores**3
    >>> from itrloss import Similarity
    >>> Similarity.from_scores(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).sum(cube)
    tensor([ 8., 27.])
    """
    name = function.__name__
    registered = _TERMS.get(name, function)
    # A second function of the same module and name replaces the first: a notebook's cell that is
    # run again makes one.
    if (registered.__module__, registered.__qualname__) != (
        function.__module__,
        function.__qualname__,
    ):
        raise ValueError(f"pair_term: a term named {name!r} is already registered")

    def value(s: Tensor, *params: Tensor, out: Any = None) -> Tensor:
        # Copied, as excluded values are overwritten: the function may return its input, or a tensor
        # that broadcasts.
        return function(s, *params) if out is None else out[0].copy_(function(s, *params))

    _register(function, Answer(value, functools.partial(_by_autograd, function)))
    return function


_TERMS: dict[str, Callable[..., Tensor]] = {}


def _register(function: Callable[..., Tensor], answer: Answer) -> None:
    _TERMS[function.__name__] = function
    _add(function.__name__, answer)


def term_name(term: Callable[..., Tensor]) -> str:
    """Return the name of a registered term."""
    name = getattr(term, "__name__", None)
    if name is None or _TERMS.get(name) is not term:
        raise ValueError(f"term: expected a function registered by itrloss.pair_term, got {term!r}")
    return name


# ------------------------------------------------------------------------------------- exponentials


def _exp(s: Tensor, scale: Tensor, top: Tensor | None = None, out: Any = None) -> Tensor:
    z = torch.mul(s, scale, out=out and out[0])
    if top is not None:
        z = z.sub_(top)
    # an excluded pair may overflow: inf times its gradient of 0 is nan
    if out is None and top is not None:
        z = z.clamp_max(80.0)
    return z.exp_()


def _exp_slopes(s, params, grads, needs, out):
    e = _exp(s, *params, out=out).mul_(grads[0])
    grad_scale = e * s if needs[0] else None
    return [e.mul_(params[0]), grad_scale, None][: 1 + len(params)]


# The sum of a log-sum-exp. Parameters are the scale and, if exponents are large, a ``top``
# subtracted from all of them: L = log sum + top.
_add("exp", Answer(_exp, _exp_slopes, exponential=True, buffers=1))
_add(
    "peak",
    Answer(lambda s, scale, out=None: torch.mul(s, scale, out=out and out[0]), None, maximum=True),
)


def shifted_exponential(scores: Tensor, scale: Tensor, top: Tensor) -> Tensor:
    """Return ``exp(a S - t)``, at most 1 where t is the largest exponent."""
    return torch.addcmul(-top, scale, scores).clamp_max(80.0).exp()  # excluded pairs may overflow


def exponential(scores: Tensor, scale: Tensor, best: Tensor) -> Tensor:
    """Return ``exp(a (S - b))``, exact for a score near b, where ``a S - a b`` would cancel digits
    for a large a.
    """
    return ((scores - best) * scale).exp()


def _information(s: Tensor, scale: Tensor, best: Tensor, out: Any = None) -> tuple[Tensor, Tensor]:
    """Return ``exp(z)`` and ``z exp(z)``, ``z = scale (s - best)`` bounded below: -inf times
    exp(-inf) would be nan.
    """
    z = torch.sub(s, best, out=out and out[0]).mul_(scale)
    z = z.clamp(-1e4, 80.0) if out is None else z.clamp_min_(-1e4)  # upper bound as in `_exp`
    e = torch.exp(z, out=out and out[1])
    return e, e * z if out is None else z.mul_(e)


def _information_slopes(s, params, grads, needs, out):
    e, ez = _information(s, *params, out=out)
    return [
        ez.add_(e).mul_(grads[1]).addcmul_(e, grads[0].expand_as(e)).mul_(params[0]),
        None,
        None,
    ]


# The sums of an entropy. Its parameters are constants, without a gradient.
ANSWERS["information"] = Answer(_information, _information_slopes, width=2)

# ----------------------------------------------------------------------- moments, thresholds, terms


def _moments(s: Tensor, centre: Tensor, out: Any = None) -> tuple[Tensor, Tensor]:
    d = torch.sub(s, centre, out=out and out[0])
    return d, torch.mul(d, d, out=out and out[1])


def _moments_slopes(s, params, grads, needs, out):
    g1, g2 = grads
    return [torch.sub(s, params[0], out=out[0]).mul_(2 * g2).add_(g1), None]


# Deviations from a centre near the mean, so that no digits cancel, and their squares.
ANSWERS["moments"] = Answer(_moments, _moments_slopes, width=2)


def _hinges(s: Tensor, thresholds: Tensor, out: Any = None) -> Tensor:
    """Return ``sum_k max(s - t_k, 0)`` for thresholds (slots, …); an infinite one adds nothing."""
    total: Any = None
    for t in thresholds:
        if total is None:
            total = torch.sub(s, t, out=out and out[0]).relu_()
        elif _used(t):
            total = torch.add(total, torch.sub(s, t, out=out and out[1]).relu_(), out=out and total)
    return total


def _used(thresholds: Tensor) -> bool:
    """Return whether a slot has a finite threshold; True if the host may not read it. A side may
    not need all slots.
    """
    return not host_may_read(thresholds) or float(thresholds.detach().amin()) < math.inf


def _hinges_slopes(s, params, grads, needs, out):
    total, grad_slots = None, s.new_empty(len(params[0]), *s.shape) if needs[0] else None
    for k, t in enumerate(params[0]):
        if total is not None and not _used(t):
            if grad_slots is not None:
                grad_slots[k].zero_()
            continue
        above = torch.gt(s, t, out=out[0 if total is None else 1]).mul_(grads[0])
        if grad_slots is not None:
            torch.neg(above, out=grad_slots[k])
        total = above if total is None else total.add_(above)
    return [total, grad_slots]


ANSWERS["hinges"] = Answer(_hinges, _hinges_slopes)


def identity(scores: Tensor) -> Tensor:
    """Return ``S`` itself."""
    return scores


def log1p_clamp(scores: Tensor) -> Tensor:
    """Return ``log(1 + S)`` with S kept above -1 + 1e-6."""
    return scores.clamp_min(FLOOR).log1p()


def log1p_relu(scores: Tensor) -> Tensor:
    """Return ``log(1 + max(S, 0))``, whose gradient is 0 for a positive that does not score above
    0.
    """
    return scores.relu().log1p()


def negative_log_likelihood(scores: Tensor, negatives: Tensor, scale: Tensor) -> Tensor:
    """Return ``-log p = log(1 + exp(L - a S))``, L the log-sum-exp of the negatives and a the
    inverse temperature.
    """
    return F.softplus(torch.addcmul(negatives, scale, scores, value=-1), threshold=40)


def hinge(scores: Tensor, threshold: Tensor) -> Tensor:
    """Return ``max(threshold - S, 0)``."""
    return (threshold - scores).relu()


def softplus(scores: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return ``log(1 + exp(a S + b))``."""
    return F.softplus(scale * scores + bias, threshold=40)


def _softplus_slopes(s, params, grads, needs, out):
    """Return the ``slopes`` of the sigmoid loss, by hand: a fifth of autograd's time on a tile of
    512 x 512.

    ``pytest benchmarks/test_micro.py --benchmark-enable -k softplus_slopes``
    """
    scale, bias = params
    grad_bias = torch.mul(s, scale, out=out[1]).add_(bias).sigmoid_().mul_(grads[0])
    grad_scale = grad_bias * s if needs[0] else None
    return [torch.mul(grad_bias, scale, out=out[0]), grad_scale, grad_bias]


for _term in (
    identity,
    log1p_clamp,
    log1p_relu,
    negative_log_likelihood,
    hinge,
    exponential,
    shifted_exponential,
):
    pair_term(_term)
_register(softplus, Answer(lambda s, *params, out=None: softplus(s, *params), _softplus_slopes))
