"""What engines are asked in their tests: functions of anchors, and how they are evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from itrloss.engine.terms import (
    exponential,
    hinge,
    identity,
    log1p_clamp,
    log1p_relu,
    negative_log_likelihood,
    softplus,
    square,
)
from support.cases import (
    finite,
    guide_of,
    only_the_parameter,
    plane,
    similarity,
    straight_line,
    weighted_by_guide,
)
from support.versions import grad_or_zeros

# Functions of anchors, and of one parameter per anchor between 2 and 6; see `parameters`.
ANSWERS = {
    "logsumexp": lambda a, p: a.logsumexp(3.0),
    "logsumexp per anchor": lambda a, p: a.logsumexp(p),
    "logsumexp shifted": lambda a, p: a.logsumexp(100.0),
    "logsumexp shifted per anchor": lambda a, p: a.logsumexp(20 * p),
    "logsumexp and positives": lambda a, p: a.logsumexp(3.0) + a.sum_of_positives(log1p_clamp),
    "negatives and positives": lambda a, p: a.sum(log1p_relu) + a.sum_of_positives(log1p_clamp),
    "hardest and positives": lambda a, p: (
        a.hardest_negatives().values + a.sum_of_positives(identity)
    ),
    "logsumexp sharp": lambda a, p: a.logsumexp(300.0),
    "logsumexp sharp and flat": lambda a, p: a.logsumexp(300 * p - 598),
    "logsumexp negative scale": lambda a, p: a.logsumexp(-5.0),
    "logsumexp of a scale beyond the exponential's range": lambda a, p: a.logsumexp(-2000.0),
    "logsumexp of such scales": lambda a, p: a.logsumexp(-500 * p),
    "logsumexp of two scales": lambda a, p: a.logsumexp(torch.where(p < 4.1, 3.0, 5.0).to(p)),
    "logsumexp over all": lambda a, p: a.logsumexp(7.0, over="all"),
    "logsumexp over all per anchor": lambda a, p: a.logsumexp(p, over="all"),
    "logsumexp of positives": lambda a, p: a.logsumexp(9.0, over="positives"),
    "logsumexp of positives per anchor": lambda a, p: a.logsumexp(-200 * p, over="positives"),
    "logsumexp below": lambda a, p: a.logsumexp(7.0, below=p / 8 - 0.2),
    "logsumexp above, over all": lambda a, p: a.logsumexp(3.0, over="all", above=-0.1),
    "logsumexp between": lambda a, p: a.logsumexp(p, below=0.4, above=0.1 - p / 8),
    "logsumexp of positives above": lambda a, p: a.logsumexp(p, over="positives", above=-0.1),
    "logsumexp sharp below": lambda a, p: a.logsumexp(300.0, below=p / 8 - 0.2),
    "sum between": lambda a, p: a.sum(softplus, scale=p, shift=-1.0, below=0.5, above=-p / 8),
    "logsumexp below and above, of a guide": lambda a, p: a.logsumexp(
        p, below=0.9, above=-p / 8, guide=guide_of(a)
    ),
    "logsumexp sharp above, of a guide": lambda a, p: a.logsumexp(
        300.0, above=p / 8, over="all", guide=guide_of(a)
    ),
    "sum with a guide": lambda a, p: a.sum(weighted_by_guide, p, 1.0, guide=guide_of(a)),
    "sum with a guide over all": lambda a, p: a.sum(
        weighted_by_guide, 2.0, p, over="all", guide=guide_of(a)
    ),
    "sum over positives": lambda a, p: a.sum(softplus, scale=p, shift=-1.0, over="positives"),
    "hardest below": lambda a, p: a.hardest_negatives(p / 8 - 0.2).values,
    "mean": lambda a, p: a.mean_std().mean,
    "std": lambda a, p: a.mean_std().std,
    "entropy": lambda a, p: a.entropy(1.0),
    "sharp entropy": lambda a, p: a.entropy(0.01),
    "hardest": lambda a, p: a.hardest_negatives().values,
    "positives": lambda a, p: a.sum_of_positives(identity),
    "mean of positives": lambda a, p: a.mean_of_positives(identity),
    "log1p": lambda a, p: a.mean_of_positives(log1p_clamp),
    "log1p relu": lambda a, p: a.sum_of_positives(log1p_relu),
    "likelihood": lambda a, p: a.sum_of_positives(negative_log_likelihood, p, 2 * p),
    "hinge": lambda a, p: a.sum_of_positives(hinge, p / 8),
    "negatives": lambda a, p: a.sum(identity),
    "hinge of negatives": lambda a, p: a.sum(hinge, p / 8),
    "softplus of one number each": lambda a, p: (
        a.sum_of_positives(softplus, scale=3.0, shift=3.0) + a.sum(softplus, scale=3.0, shift=-1.0)
    ),
    "positives and likelihood": lambda a, p: (
        a.sum_of_positives(identity) + a.sum_of_positives(negative_log_likelihood, p, 30.0)
    ),
    "values of the parameters alone": lambda a, p: (
        a.sum_of_positives(only_the_parameter, p) + a.sum(only_the_parameter, 3.0)
    ),
    "straight lines": lambda a, p: a.sum_of_positives(straight_line, p) + a.sum(straight_line, 3.0),
    "plane of negatives": lambda a, p: a.sum(plane, p, -p.square()),
    "softplus of negatives": lambda a, p: a.sum(softplus, scale=p, shift=4 - 2 * p),
    "hinge sum": lambda a, p: a.hinge_sum(0.3),
}

# Totals of anchors, with the parameters of ANSWERS.
TOTALS = {
    "softplus of one number each": lambda a, p: a.weighted_sum(softplus, scale=3.0, shift=-1.0),
    "learnt": lambda a, p: a.weighted_sum(softplus, scale=p[:1], shift=-p[-1:], weights=0.5),
    "weighted": lambda a, p: a.weighted_sum(softplus, scale=p[:1], weights=p.detach() - 3),
    "shifts of anchors": lambda a, p: a.weighted_sum(exponential, shift=-p, weights=p.detach()),
    "scales of anchors": lambda a, p: a.weighted_sum(softplus, scale=p, shift=4 - 2 * p),
    "over all": lambda a, p: a.weighted_sum(square, scale=2.0, shift=p[:1], over="all"),
    "over positives": lambda a, p: a.weighted_sum(square, shift=p, over="positives"),
    "large scale": lambda a, p: a.weighted_sum(softplus, scale=80.0, shift=10 * p[:1] - 80),
    "of a user's term": lambda a, p: a.weighted_sum(plane, p, -p.square(), weights=p.detach()),
    "and positives": lambda a, p: (
        a.weighted_sum(softplus, scale=p[:1], shift=-1.0)
        + a.sum_of_positives(softplus, scale=-p[:1], shift=1.0).sum()
    ),
    "mean of hinges": lambda a, p: a.reduced_hinge_sum(0.3, "mean"),
    "sum of hinges": lambda a, p: a.reduced_hinge_sum(0.3, "sum"),
}


def parameters(n, m, dtype=torch.float64):
    """One parameter for each row and column."""
    return torch.cat([torch.linspace(2, 6, size, dtype=dtype) for size in (n, m)])


def evaluate(answer, v, w, ids, engine, grads, view=lambda sim: sim.both, **options):
    """Return the values of anchors, and the gradients of vectors and parameters, without anchors
    that have no answer.
    """
    p = parameters(len(v), len(w), v.dtype).to(v.device)
    leaves = [x.clone().requires_grad_() for x in (v, w, p)]
    anchors = view(similarity(*leaves[:2], ids, engine, **options))
    values = answer(anchors, leaves[2][: len(anchors)])
    return [values.detach(), *gradients(values, leaves, torch.cat(tuple(grads)))]


def gradients(values, leaves, grad, retain_graph=False):
    """Return the gradients of values by leaves, 0 where there is none.

    Values that do not exist have no gradient. Others have the first entries of ``grad``.
    """
    if not values.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    total = (finite(values) * grad[: len(values)].to(values)).sum()
    found = grad_or_zeros(total, leaves, retain_graph=retain_graph)
    return [*found]


def assert_equal(found, wanted, about="", tolerance=1e-9):
    """Compare tensors, or lists of them, such as `evaluate` returns."""
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{about}: {text}"
    )


def assert_finite(value: Tensor, leaves: Sequence[Tensor]) -> None:
    """Check a value, and its gradients."""
    for x in (value, *torch.autograd.grad(value, leaves)):
        assert x.isfinite().all()


def assert_same_step(
    ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], tolerance: float = 1e-9
) -> None:
    """Compare values, and gradients of all inputs."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    found = grad_or_zeros(3 * ours, inputs, retain_graph=True)
    wanted = grad_or_zeros(3 * theirs, inputs, retain_graph=True)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
