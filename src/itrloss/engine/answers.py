"""What may be asked of the candidates of an anchor: ``finish(sum_j f(S_ij; params_i))``, ``f`` elementwise.

An :class:`Answer` is the ``f`` of a question, with its derivative where writing it out pays. How it is summed over a
matrix, and how its gradient gets to the embeddings, is said once, in :mod:`itrloss.engine.reduce`; how sums become
answers, in :class:`itrloss.Anchors`. Triton's form of each has the same name in :mod:`itrloss.engine.kernels`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .scores import host_may_read

FLOOR = -1 + 1e-6  # of scores whose log(1 + S) is taken


class Answer(NamedTuple):
    """An elementwise function of scores that is summed, or maximised, over candidates."""

    # (s, *params, out): values like s, or a tuple of ``width`` of them. Parameters broadcast with s; ``out`` holds
    # buffers that values may be written to, or is None where autograd is to see the work.
    value: Callable[..., Any]
    # (s, params, grads, needs, out): the values' gradient by s, and those by the parameters where needed, each like s,
    # times the upstream gradients, one for each of ``width``; that by s may lie in ``out[0]``, others in later buffers.
    slopes: Callable[..., list[Tensor | None]] | None  # None: there are none
    width: int = 1
    exponential: bool = False  # the derivative by s is the first parameter times the value
    maximum: bool = False  # instead of the sum; without a gradient
    buffers: int = 2  # in ``out``


ANSWERS: dict[str, Answer] = {}


def _by_autograd(function: Callable[..., Tensor], s, params, grads, needs, out):
    """The slopes of a function of which nothing is known."""
    with torch.enable_grad():
        leaves = [s.detach().requires_grad_()]
        # Whole tiles, so that a sum over some of the candidates can be taken afterwards.
        leaves += [p.detach().expand_as(s).clone().requires_grad_(n) for p, n in zip(params, needs, strict=True)]
        total = (function(*leaves).expand_as(s) * grads[0]).sum()
        wanted = [x for x in leaves if x.requires_grad]
        found = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
    by = iter(found)
    return [next(by) if x.requires_grad else None for x in leaves]


def pair_term(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register an elementwise function of scores, under its own name, for sums over negatives or positives.

    ``function(scores, *parameters)`` returns a tensor like ``scores``; autograd differentiates it, tile by tile.
    Parameters hold one value per anchor, shaped to broadcast with the scores. It should be finite for every score,
    also for those of pairs that are left out.

    >>> @pair_term
    ... def cube(scores):
    ...     return scores**3
    >>> from itrloss import Similarity
    >>> Similarity.from_scores(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).sum(cube)
    tensor([ 8., 27.])
    """
    name = function.__name__
    known = _TERMS.get(name, function)
    # The same definition once more, as a notebook's cell that is run again makes it, replaces the former.
    if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
        raise ValueError(f"pair_term: a term named {name!r} is already registered")

    def value(s: Tensor, *params: Tensor, out: Any = None) -> Tensor:
        # A tile's values may be written to: the function may have returned what it was given, or less.
        return function(s, *params) if out is None else out[0].copy_(function(s, *params))

    _register(function, Answer(value, functools.partial(_by_autograd, function)))
    return function


_TERMS: dict[str, Callable[..., Tensor]] = {}


def _register(function: Callable[..., Tensor], answer: Answer) -> None:
    _TERMS[function.__name__], ANSWERS[function.__name__] = function, answer


def term_name(term: Callable[..., Tensor]) -> str:
    """Return the name of a registered term."""
    name = getattr(term, "__name__", None)
    if name is None or _TERMS.get(name) is not term:
        raise ValueError(f"term: expected a function registered by itrloss.pair_term, got {term!r}")
    return name


# ---------------------------------------------------------------------------------------------- exponentials


def _exp(s: Tensor, scale: Tensor, top: Tensor | None = None, out: Any = None) -> Tensor:
    z = torch.mul(s, scale, out=out and out[0])
    if top is not None:
        z = z.sub_(top)
    if out is None and top is not None:  # a pair left out may lie far above ``top``: inf times a gradient of 0 is nan
        z = z.clamp_max(80.0)
    return z.exp_()


def _exp_slopes(s, params, grads, needs, out):
    e = _exp(s, *params, out=out).mul_(grads[0])
    by_scale = e * s if needs[0] else None
    return [e.mul_(params[0]), by_scale, None][: 1 + len(params)]


# The sum of a log-sum-exp. Parameters are the scale and, if exponents are large, a ``top`` that is subtracted:
# L = log sum + top.
ANSWERS["exp"] = Answer(_exp, _exp_slopes, exponential=True, buffers=1)
ANSWERS["peak"] = Answer(lambda s, scale, out=None: torch.mul(s, scale, out=out and out[0]), None, maximum=True)


def exponential(scores: Tensor, scale: Tensor, best: Tensor) -> Tensor:
    """Return ``exp(a (S - b))``: no digit is lost near a score b, as they would be in ``a S - a b`` for a large a."""
    return ((scores - best) * scale).exp()


def _information(s: Tensor, scale: Tensor, best: Tensor, out: Any = None) -> tuple[Tensor, Tensor]:
    """``exp(z)`` and ``z exp(z)`` with ``z = scale (s - best)``, bounded below: -inf would meet an exponential of 0."""
    z = torch.sub(s, best, out=out and out[0]).mul_(scale)
    z = z.clamp(-1e4, 80.0) if out is None else z.clamp_min_(-1e4)  # above as in `_exp`
    e = torch.exp(z, out=out and out[1])
    return e, e * z if out is None else z.mul_(e)


def _information_slopes(s, params, grads, needs, out):
    e, ez = _information(s, *params, out=out)
    return [ez.add_(e).mul_(grads[1]).addcmul_(e, grads[0].expand_as(e)).mul_(params[0]), None, None]


# The sums of an entropy; its parameters are chosen, and have no gradient.
ANSWERS["information"] = Answer(_information, _information_slopes, width=2)

# ----------------------------------------------------------------------------------- moments, thresholds, terms


def _moments(s: Tensor, centre: Tensor, out: Any = None) -> tuple[Tensor, Tensor]:
    d = torch.sub(s, centre, out=out and out[0])
    return d, torch.mul(d, d, out=out and out[1])


def _moments_slopes(s, params, grads, needs, out):
    g1, g2 = grads
    return [torch.sub(s, params[0], out=out[0]).mul_(2 * g2).add_(g1), None]


# Distances from a centre near the mean, so that squares lose no digits, and their squares.
ANSWERS["moments"] = Answer(_moments, _moments_slopes, width=2)


def _hinges(s: Tensor, thresholds: Tensor, out: Any = None) -> Tensor:
    """``sum_k max(s - t_k, 0)`` for thresholds (slots, …); an infinite one is none."""
    total: Any = None
    for t in thresholds:
        if total is None:
            total = torch.sub(s, t, out=out and out[0]).relu_()
        elif _used(t):
            total = torch.add(total, torch.sub(s, t, out=out and out[1]).relu_(), out=out and total)
    return total


def _used(thresholds: Tensor) -> bool:
    """Whether a slot is used, as far as the host may look: one side may have fewer positives than the other."""
    return not host_may_read(thresholds) or float(thresholds.detach().amin()) < math.inf


def _hinges_slopes(s, params, grads, needs, out):
    total, by_slots = None, s.new_empty(len(params[0]), *s.shape) if needs[0] else None
    for k, t in enumerate(params[0]):
        if total is not None and not _used(t):
            if by_slots is not None:
                by_slots[k].zero_()
            continue
        above = torch.gt(s, t, out=out[0 if total is None else 1]).mul_(grads[0])
        if by_slots is not None:
            torch.neg(above, out=by_slots[k])
        total = above if total is None else total.add_(above)
    return [total, by_slots]


ANSWERS["hinges"] = Answer(_hinges, _hinges_slopes)


def identity(scores: Tensor) -> Tensor:
    """Return ``S``."""
    return scores


def log1p_clamp(scores: Tensor) -> Tensor:
    """Return ``log(1 + S)`` with S kept above -1 + 1e-6."""
    return scores.clamp_min(FLOOR).log1p()


def log1p_relu(scores: Tensor) -> Tensor:
    """Return ``log(1 + max(S, 0))``: no pull on a positive whose score is not above zero."""
    return scores.relu().log1p()


def negative_log_likelihood(scores: Tensor, negatives: Tensor, scale: Tensor) -> Tensor:
    """Return ``-log p = log(1 + exp(L - a S))``, L the log-sum-exp of the negatives and a the inverse temperature."""
    return F.softplus(torch.addcmul(negatives, scale, scores, value=-1), threshold=40)


def hinge(scores: Tensor, threshold: Tensor) -> Tensor:
    """Return ``max(threshold - S, 0)``."""
    return (threshold - scores).relu()


def softplus(scores: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return ``log(1 + exp(a S + b))``."""
    return F.softplus(scale * scores + bias, threshold=40)


def _softplus_slopes(s, params, grads, needs, out):
    """By hand for the sigmoid loss: a fifth of autograd's time on a tile of 512 x 512.

    ``pytest benchmarks/test_micro.py --benchmark-enable -k softplus_slopes``
    """
    scale, bias = params
    by_bias = torch.mul(s, scale, out=out[1]).add_(bias).sigmoid_().mul_(grads[0])
    by_scale = by_bias * s if needs[0] else None
    return [torch.mul(by_bias, scale, out=out[0]), by_scale, by_bias]


for _term in (identity, log1p_clamp, log1p_relu, negative_log_likelihood, hinge, exponential):
    pair_term(_term)
_register(softplus, Answer(lambda s, *params, out=None: softplus(s, *params), _softplus_slopes))
