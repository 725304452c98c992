"""Terms: the functions of scores that are summed over candidates.

    total_i = sum_j f(z_ij)          z_ij = scale_i S_ij + shift_i

A :class:`Term` is such an ``f`` with its derivative. :mod:`itrloss.engine.tiled` adds it up over
the tiles of a matrix, :mod:`itrloss.engine.dense` over a whole one in plain PyTorch, and
:mod:`itrloss.engine.kernels` has its form for Triton.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR = -1 + 1e-6  # lower bound of scores in log(1 + S)
SMALLEST_LOG = -1e4  # lower bound of z in z e^z, where -inf would give -inf * 0
SOFTPLUS_LINEAR = 40.0  # above it, log(1 + e^z) equals z in float64

Function = Callable[..., Tensor]


class Term:
    """An elementwise function of scores, and its derivative.

    Terms are compared by identity. A call computes the function, on a copy of the scores:

    >>> itrloss.terms.excess(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __init__(
        self,
        value: Function,
        slope: Callable[[Tensor], Tensor] | None = None,
        both: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
        zero: float | None = None,
    ):
        """Store a function and its derivative.

        ``value(z, *parameters)`` returns a tensor like ``z``. It is called with a tensor of its
        own, which it may overwrite by one operator; two in a row, as in ``z.relu_().square_()``,
        would overwrite what autograd needs where plain PyTorch differentiates it. ``slope(z)``
        returns the derivative and may overwrite ``z``. Without one, autograd differentiates the
        function by ``z`` and by its parameters, tile by tile. ``both(z)`` returns values and
        slopes, by default one after the other. ``zero``: an argument at which function and
        derivative are 0: it stands for a pair that does not count.
        """
        if not callable(value):
            raise TypeError(f"term: expected a function of scores, got {value!r}")
        self.value = value
        self.slope = slope
        self.both = self._one_by_one if both is None else both
        self.zero = zero
        self.__name__ = getattr(value, "__name__", type(value).__name__)
        self.__module__ = getattr(value, "__module__", "") or ""
        self.of_library = self.__module__.split(".")[0] == __name__.split(".")[0]
        self.__doc__ = value.__doc__

    def _one_by_one(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and the slopes (r, c) of z (r, c), which may be overwritten."""
        assert self.slope is not None
        return self.value(z.clone()), self.slope(z)

    def __call__(self, scores: Tensor, *params: Any) -> Tensor:
        """Return the function's values, of the shape of the scores."""
        return self._whole(self.computed(scores.clone(), params), scores)

    def computed(self, z: Tensor, params: Sequence[Any]) -> Tensor:
        """Return what the function makes of scores, which it may overwrite, and of parameters.

        A user's function may write to its parameters, too, which are the caller's tensors, or a
        guide's scores. So it gets copies of them.
        """
        if not self.of_library:
            params = [x.clone() if isinstance(x, Tensor) else x for x in params]
        return self.value(z, *params)

    def _whole(self, values: Any, scores: Tensor) -> Tensor:
        """Return the values in the shape of the scores; raise an error if they are no tensor."""
        if not isinstance(values, Tensor):
            got = type(values).__name__
            raise TypeError(f"term: expected {self.__name__} to return a tensor, got {got}")
        return values.expand_as(scores)

    def __repr__(self) -> str:
        return f"Term({self.__name__})"

    def __reduce__(self) -> Any:
        """Pickle a term that its module names by this name, and another one by its function."""
        module = sys.modules.get(self.__module__)
        if self.__module__ != "__main__" and getattr(module, self.__name__, None) is self:
            return self.__name__
        return Term, (self.value, self.slope)

    def values(
        self,
        z: Tensor,  # (r, c), may be overwritten
        params: Sequence[Tensor],  # which broadcast with z
    ) -> Tensor:
        """Return the values (r, c), which may be overwritten."""
        values = self.computed(z, params)
        if self.slope is not None:
            return values
        # copied, as a user's function may return a parameter
        return self._whole(values, z).clone()

    def gradients(
        self,
        z: Tensor,  # (r, c), may be overwritten
        params: Sequence[Tensor],  # which broadcast with z
        grad: Tensor,  # of the values, which broadcasts with z
    ) -> list[Tensor]:
        """Return ``grad`` times the derivatives by z and by each parameter: tensors (r, c)."""
        with torch.enable_grad():
            inputs = [z.detach().requires_grad_()]
            for param in params:
                # Expanded to the whole tile, as pairs that do not count are masked afterwards.
                whole = param.detach().expand_as(z).clone()
                inputs.append(whole.requires_grad_())
            total = (self(*inputs) * grad).sum()
            if not total.requires_grad:
                return [torch.zeros_like(x) for x in inputs]
            gradients = torch.autograd.grad(total, inputs, allow_unused=True)
        # An expanded gradient, such as a sum has, cannot be written to.
        pairs = zip(inputs, gradients, strict=True)
        return [torch.zeros_like(x) if grad is None else grad.clone() for x, grad in pairs]


@overload
def pair_term(function: Function) -> Term: ...


@overload
def pair_term(*, slope: Callable[[Tensor], Tensor]) -> Callable[[Function], Term]: ...


def pair_term(function: Function | None = None, *, slope: Any = None) -> Any:
    """Return a :class:`Term` for sums over negatives or positives from a function of scores.

    ``function(scores, *parameters)`` returns a tensor like ``scores``; autograd differentiates it,
    tile by tile. Parameters hold one value per anchor, shaped to broadcast with the scores. The
    function should be finite for every score, even for pairs that the sum leaves out. It gets
    copies of the scores and of the parameters, and may work in place.

    >>> @pair_term
    ... def cube(scores):
    ...     return scores**3
    >>> from itrloss import Similarity
    >>> Similarity.from_scores(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).sum(cube)
    tensor([ 8., 27.])

    A function of the scores alone may come with its derivative, which is several times as fast as
    autograd:

    >>> @pair_term(slope=lambda scores: 3 * scores**2)
    ... def fast_cube(scores):
    ...     return scores**3
    """
    if function is None:
        return functools.partial(_with_slope, slope)
    if not callable(function):
        raise TypeError(f"function: expected a function of scores, got {function!r}")
    return Term(function)


def _with_slope(slope: Callable[[Tensor], Tensor], function: Function) -> Term:
    """Return a term of a function and its slope."""
    return Term(function, slope)


def as_term(function: Term | Function) -> Term:
    """Return a term; a plain function becomes one."""
    if isinstance(function, Term):
        return function
    if not callable(function):
        raise TypeError(f"term: expected a function of scores, got {function!r}")
    return Term(function)


# ------------------------------------------------------------ terms that losses sum over candidates


def _with(**parts: Any) -> Callable[[Function], Term]:
    """Return a decorator that makes a term of a function and the given parts."""
    return functools.partial(Term, **parts)


def _exponential(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``e^z`` twice, in one tensor."""
    z.exp_()
    return z, z


@_with(slope=torch.exp_, both=_exponential, zero=-torch.inf)
def exponential(z: Tensor) -> Tensor:
    """Return ``e^z``."""
    return z.exp_()


@_with(slope=lambda z: z.mul_(2), both=lambda z: (z.square(), z.mul_(2)), zero=0.0)
def square(z: Tensor) -> Tensor:
    """Return ``z²``."""
    return z.square_()


def _excess(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``max(z, 0)`` and its derivative."""
    z.relu_()
    return z, z.sign()


@_with(slope=lambda z: z.gt_(0), both=_excess, zero=-torch.inf)
def excess(z: Tensor) -> Tensor:
    """Return ``max(z, 0)``."""
    return z.relu_()


def _softplus(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log(1 + e^z)`` and its derivative."""
    return F.softplus(z, threshold=SOFTPLUS_LINEAR), z.sigmoid_()


@_with(slope=torch.sigmoid_, both=_softplus, zero=-torch.inf)
def softplus(z: Tensor) -> Tensor:
    """Return ``log(1 + e^z)``."""
    return F.softplus(z, threshold=SOFTPLUS_LINEAR)


@_with(slope=lambda z: z.fill_(1))
def identity(scores: Tensor) -> Tensor:
    """Return ``S`` itself."""
    return scores


def _information_slope(z: Tensor) -> Tensor:
    """Return ``(z + 1) e^z``."""
    return z.exp().mul_(z.clamp_min(SMALLEST_LOG).add_(1))


@_with(slope=_information_slope, zero=-torch.inf)
def information(z: Tensor) -> Tensor:
    """Return ``z e^z``, which is 0 for -inf."""
    return z.exp() * z.clamp_min(SMALLEST_LOG)


# --------------------------------------------------------------- terms that losses ask of positives


def _log1p_clamp_slope(z: Tensor) -> Tensor:
    """Return ``1 / (1 + z)``, and 0 at and below the lower bound."""
    return torch.threshold(z, FLOOR, torch.inf).add_(1).reciprocal_()


def _log1p_clamp(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log(1 + S)`` with S kept above the lower bound, and its derivative."""
    return torch.threshold(z, FLOOR, FLOOR).log1p_(), _log1p_clamp_slope(z)


@_with(slope=_log1p_clamp_slope, both=_log1p_clamp)
def log1p_clamp(scores: Tensor) -> Tensor:
    """Return ``log(1 + S)`` with S kept above -1 + 1e-6."""
    # one operator of autograd's, where a clamp has four
    return torch.threshold(scores, FLOOR, FLOOR).log1p()


def _log1p_relu_slope(z: Tensor) -> Tensor:
    """Return ``1 / (1 + z)``, and 0 at and below 0."""
    return torch.threshold(z, 0.0, torch.inf).add_(1).reciprocal_()


def _log1p_relu(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log(1 + max(S, 0))`` and its derivative."""
    return z.relu().log1p_(), _log1p_relu_slope(z)


@_with(slope=_log1p_relu_slope, both=_log1p_relu, zero=0.0)
def log1p_relu(scores: Tensor) -> Tensor:
    """Return ``log(1 + max(S, 0))``, whose gradient is 0 for a positive that scores below 0."""
    return scores.relu().log1p()


@pair_term
def negative_log_likelihood(scores: Tensor, negatives: Tensor, scale: Tensor) -> Tensor:
    """Return ``-log p = log(1 + exp(L - a S))`` from the negatives' log-sum-exp L and a scale a."""
    z = torch.addcmul(negatives, scale, scores, value=-1)
    return F.softplus(z, threshold=SOFTPLUS_LINEAR)


@pair_term
def hinge(scores: Tensor, threshold: Tensor) -> Tensor:
    """Return ``max(threshold - S, 0)``."""
    return (threshold - scores).relu()


@pair_term
def shifted_exponential(scores: Tensor, scale: Tensor, top: Tensor) -> Tensor:
    """Return ``exp(a S - t)``, at most 1 where t is the largest exponent."""
    z = torch.addcmul(-top, scale, scores)
    return z.clamp_max(80.0).exp()  # pairs that do not count may overflow
