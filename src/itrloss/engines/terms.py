"""Functions of single pairs' scores that are summed over the positives or the negatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .tiles import first_order

Term = Callable[..., tuple[Tensor, ...]]
TERMS: dict[str, Term] = {}
_FLOOR = -1 + 1e-6  # of scores whose log(1 + S) is taken


def pair_term(function: Term) -> Term:
    """Register an elementwise function of scores for :meth:`itrloss.Similarity.positives`, under its own name.

    ``function(scores, *parameters)`` returns a tuple: the values, their partial derivatives by the scores, and those by
    each parameter. Parameters hold one value per anchor, shaped to broadcast with the scores. All must be finite for
    every score, positive pair or not.
    """
    name = function.__name__
    known = TERMS.get(name, function)
    # The same definition once more, as a notebook's cell that is run again makes it, replaces the former.
    if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
        raise ValueError(f"pair_term: a term named {name!r} is already registered")
    TERMS[name] = function
    return function


@pair_term
def identity(scores: Tensor) -> tuple[Tensor, ...]:
    """``S``."""
    return scores, torch.ones_like(scores)


@pair_term
def log1p_clamp(scores: Tensor) -> tuple[Tensor, ...]:
    """``log(1 + S)`` with S kept above -1 + 1e-6."""
    kept = scores.clamp_min(_FLOOR)
    return kept.log1p(), (scores >= _FLOOR) / (1 + kept)


@pair_term
def log1p_relu(scores: Tensor) -> tuple[Tensor, ...]:
    """``log(1 + max(S, 0))``: no pull on a positive whose score is not above zero."""
    kept = scores.relu()
    return kept.log1p(), (scores > 0) / (1 + kept)


@pair_term
def negative_log_likelihood(scores: Tensor, negatives: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """``-log p = log(1 + exp(L - a S))``, L the log-sum-exp of the negatives and a the inverse temperature."""
    z = torch.addcmul(negatives, scale, scores, value=-1)
    miss = z.sigmoid()  # 1 - p
    slope = -miss
    return F.softplus(z, threshold=40), slope * scale, miss, slope * scores


@pair_term
def softplus(scores: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """``log(1 + exp(a S + b))``."""
    z = scale * scores + bias
    slope = z.sigmoid()
    return F.softplus(z, threshold=40), slope * scale, slope * scores, slope


@pair_term
def hinge(scores: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
    """``max(threshold - S, 0)``."""
    gap = threshold - scores
    active = (gap > 0).to(scores.dtype)
    return gap.relu(), -active, active


def _logits(scores: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (scores * scale).add_(bias)


# The values alone, which autograd differentiates as the terms do themselves; and the derivatives by the scores alone.
VALUES: dict[str, Callable[..., Tensor]] = {
    "identity": torch.clone,
    "log1p_clamp": lambda scores: scores.clamp_min(_FLOOR).log1p(),
    "log1p_relu": lambda scores: scores.relu().log1p(),
    "negative_log_likelihood": lambda scores, negatives, scale: F.softplus(
        torch.addcmul(negatives, scale, scores, value=-1), threshold=40
    ),
    "softplus": lambda *args: F.softplus(_logits(*args), threshold=40),
    "hinge": lambda scores, threshold: (threshold - scores).relu(),
}
SLOPES: dict[str, Callable[..., Tensor]] = {"softplus": lambda *args: _logits(*args).sigmoid_().mul_(args[1])}


def evaluate(term: str, scores: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The values of a registered term and its partial derivatives, by the scores first."""
    found = TERMS[term](scores, *params)
    if not isinstance(found, tuple) or len(found) != 2 + len(params):
        got = f"{len(found)} tensors" if isinstance(found, tuple) else type(found).__name__
        raise TypeError(
            f"term: {term!r} must return a tuple of its values and its {1 + len(params)} partial derivatives, got {got}"
        )
    return found


def needs_gradient(*given: Tensor | None) -> bool:
    """Whether autograd records what is done with these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def term_values(term: str, scores: Tensor, *params: Tensor) -> Tensor:
    """A term's values, one for each score; differentiated by what it says of its derivatives unless autograd knows."""
    if term in VALUES:
        return VALUES[term](scores, *params)
    if needs_gradient(scores, *params):
        return _TermValues.apply(term, scores, *params).expand_as(scores)
    # The compiler cannot trace the function where there is no gradient.
    return evaluate(term, scores, params)[0].expand_as(scores)


class _TermValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, scores, *params):
        """The values."""
        value, *partials = evaluate(term, scores, params)
        ctx.save_for_backward(*partials)
        ctx.shapes = [x.shape for x in (scores, *params)]
        return value.clone() if value is scores else value

    @staticmethod
    @first_order
    def backward(ctx, grad):
        needed = zip(ctx.saved_tensors, ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        return None, *[_reduced(grad * d, shape) if need else None for d, shape, need in needed]


def _reduced(x: Tensor, shape: torch.Size) -> Tensor:
    if x.shape == shape:
        return x
    return x.sum(0) if x.shape[1:] == shape else x.sum_to_size(shape)
