"""The specification: all methods of anchors on a dense score matrix, in plain PyTorch,
differentiated by autograd.

In float64, engines are compared with it; it shares no code with them. :class:`Reference` has the
methods of ``itrloss.Anchors``, for the rows of matrices; the columns are the rows of the transposed
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_ID = torch.iinfo(torch.int64).min  # of what does not exist; as a group, open to all


class Values(NamedTuple):
    values: Tensor
    indices: Tensor


class MeanStd(NamedTuple):
    mean: Tensor
    std: Tensor


# The terms of `itrloss.engine.terms` again, in plain PyTorch: the name of the function there, and a
# function of the same arguments. A term that tests define themselves needs no entry.
TERMS: dict[str, Callable[..., Tensor]] = {
    "exponential": torch.exp,
    "square": lambda z: z * z,
    "excess": F.relu,
    "information": lambda z: z * torch.exp(z),
    "shifted_exponential": lambda s, scale, top: torch.exp(scale * s - top),
    "identity": lambda s: s,
    "log1p_clamp": lambda s: torch.log(1 + s.clamp_min(-1 + 1e-6)),
    "log1p_relu": lambda s: torch.log(1 + s.relu()),
    "negative_log_likelihood": lambda s, negatives, scale: -F.logsigmoid(scale * s - negatives),
    "softplus": lambda z: -F.logsigmoid(-z),
    "hinge": lambda s, threshold: (threshold - s).relu(),
}


def formula(term: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a term of the library in plain PyTorch, and one of the tests as it is.

    Raise an error for a term of the library that is not in `TERMS`: the library would otherwise be
    compared with itself.
    """
    if term.__module__.split(".")[0] != "itrloss":
        return term
    if term.__name__ not in TERMS:
        raise LookupError(
            f"tests/support/reference.py: TERMS has no formula of the term {term.__name__!r}; "
            "write it in plain PyTorch"
        )
    return TERMS[term.__name__]


def unit(x: Tensor) -> Tensor:
    """Normalise vectors (N, D); a zero vector stays zero."""
    norm = x.norm(dim=1, keepdim=True)
    zero = norm.detach() <= 1e-12
    return torch.where(zero, 0.0, x / torch.where(zero, 1.0, norm))


def matches(ids: Sequence[Tensor | None], n: int, m: int) -> Tensor:
    """Mask of the positive pairs, (N, M) bool, of ids (N,), (M,) or label sets (N, k), (M, l)."""
    rows, cols = (
        torch.arange(size) if x is None else x for x, size in zip(ids, (n, m), strict=True)
    )
    labels = rows.reshape(n, 1, -1, 1)
    others = cols.reshape(1, m, 1, -1)
    return ((labels == others) & (labels != NO_ID)).any(3).any(2)


def exists(ids: Tensor | None, size: int) -> Tensor:
    """Mask of the items that have a label, (size,) bool."""
    if ids is None:
        return torch.ones(size, dtype=torch.bool)
    return (ids.reshape(size, -1) != NO_ID).any(1)


def relation(ids: Sequence[Tensor | None], related: Any, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Masks of the positive and of the negative pairs, by ids and `itrloss.Related`."""
    if related is not None and related.matches is not None:
        return related.matches > 0, related.matches == 0
    positive = matches(ids, n, m)
    negative = ~positive & exists(ids[0], n)[:, None] & exists(ids[1], m)
    if related is not None and related.groups[0] is not None:
        rows, cols = (x[:, None] if k == 0 else x for k, x in enumerate(related.groups))
        meet = (rows == cols) if related.rule == "same" else (rows != cols)
        negative &= meet | (rows == NO_ID) | (cols == NO_ID)
        if related.one_set:
            positive &= rows != cols
    return positive, negative


def left_out(positive: Tensor, negative: Tensor, over: str) -> Tensor:
    """Mask of the candidates that an answer over negatives, positives or all leaves out."""
    return {"negatives": ~negative, "positives": ~positive, "all": ~(positive | negative)}[over]


class Reference:
    """Anchors: groups of rows of dense scores (A, C), with the masks of positives and negatives."""

    def __init__(self, *groups: tuple[Tensor, Tensor, Tensor]):
        self.groups = groups

    @classmethod
    def of(
        cls,
        v: Tensor,
        w: Tensor,
        ids: Sequence[Tensor | None] = (None, None),
        normalize: bool = True,
        bias: Any = None,
        related: Any = None,
    ) -> Reference:
        """Rows of the matrix of cosines, or of inner products, and a bias."""
        scores = (unit(v) @ unit(w).T) if normalize else v @ w.T
        if bias is not None:
            scores = scores + bias[0][:, None] + bias[1]
        return cls.from_scores(scores, ids, related)

    @classmethod
    def from_scores(
        cls, scores: Tensor, ids: Sequence[Tensor | None] = (None, None), related: Any = None
    ) -> Reference:
        """Rows of a given matrix."""
        return cls((scores, *relation(ids, related, *scores.shape)))

    @property
    def T(self) -> Reference:
        return Reference(*(tuple(x.T for x in group) for group in self.groups))  # type: ignore

    @property
    def both(self) -> Reference:
        return Reference(*self.groups, *self.T.groups)

    def __len__(self) -> int:
        return sum(len(scores) for scores, _, _ in self.groups)

    def _each(self, answer: Callable[..., Tensor], *params: float | Tensor) -> Tensor:
        """Apply ``answer(scores, positive, negative, *params)`` to each group, with parameters
        (A, 1); concatenate to (A,).
        """
        given = [
            (x.reshape(-1) if isinstance(x, Tensor) else self.groups[0][0].new_tensor([x])).expand(
                len(self)
            )
            for x in params
        ]
        sizes = [len(scores) for scores, _, _ in self.groups]
        values = []
        for k, group in enumerate(self.groups):
            own = [x.split(sizes)[k][:, None] for x in given]
            values.append(answer(*group, *own))
        return torch.cat(values)

    @property
    def positive_counts(self) -> Tensor:
        return self._each(lambda s, positive, negative: positive.sum(1))

    @property
    def negative_counts(self) -> Tensor:
        return self._each(lambda s, positive, negative: negative.sum(1))

    def logsumexp(
        self, scale: float | Tensor = 1.0, *, over="negatives", below=None, above=None, guide=None
    ) -> Tensor:
        low = math.inf if below is None else below
        high = -math.inf if above is None else above
        judged = iter((self if guide is None else guide).groups)

        def one(s, positive, negative, a, low, high):
            z = s * a
            t = next(judged)[0]
            excluded = left_out(positive, negative, over) | (t >= low) | (t <= high)
            empty = excluded.all(1)
            # its gradient is nan for -inf only
            z = z.masked_fill(excluded, -math.inf).masked_fill(empty[:, None], 0.0)
            return z.logsumexp(1).masked_fill(empty, -math.inf)

        return self._each(one, scale, low, high)

    def mean_std(self) -> MeanStd:
        def mean(s, positive, negative):
            return s.masked_fill(~negative, 0.0).sum(1) / negative.sum(1).clamp_min(1)

        def std(s, positive, negative):
            away = (s - mean(s, positive, negative)[:, None]).masked_fill(~negative, 0.0)
            return (away.square().sum(1) / negative.sum(1).clamp_min(1)).clamp_min(1e-12).sqrt()

        return MeanStd(self._each(mean), self._each(std))

    def entropy(self, temperature: float = 1.0) -> Tensor:
        def one(s, positive, negative):
            exists = positive | negative
            empty = ~exists.any(1, keepdim=True)
            log_p = (s / temperature).masked_fill(~exists & ~empty, -1e30).log_softmax(1)
            return -(log_p.exp() * log_p).masked_fill(~negative, 0.0).sum(1) / math.log(2)

        return self._each(one)

    def hardest_negatives(self, below=math.inf) -> Values:
        def index(s, positive, negative, below):
            excluded = ~negative | (s >= below)
            return s.masked_fill(excluded, -math.inf).argmax(1).masked_fill(excluded.all(1), -1)

        def value(s, positive, negative, below):
            place = index(s, positive, negative, below)
            best = s.gather(1, place.clamp_min(0)[:, None]).squeeze(1)
            return best.masked_fill(place < 0, -math.inf)

        return Values(self._each(value, below), self._each(index, below))

    def sum(
        self,
        term: Callable[..., Tensor],
        *params: float | Tensor,
        scale: float | Tensor = 1.0,
        shift: float | Tensor = 0.0,
        over="negatives",
        below=math.inf,
        above=-math.inf,
        guide=None,
    ) -> Tensor:
        function = formula(term)
        others = None if guide is None else iter(guide.groups)

        def one(s, positive, negative, a, b, *params):
            *own, low, high = params
            others_scores = () if others is None else (next(others)[0],)
            values = function(a * s + b, *others_scores, *own).expand_as(s)
            excluded = left_out(positive, negative, over) | (s >= low) | (s <= high)
            return values.masked_fill(excluded, 0.0).sum(1)

        return self._each(one, scale, shift, *params, below, above)

    def weighted_sum(self, *args, weights: float | Tensor = 1.0, **options) -> Tensor:
        return (self.sum(*args, **options) * weights).sum()

    def reduced_hinge_sum(self, margin: float, reduction: str) -> Tensor:
        total = self.groups[0][0].new_zeros(())
        sums = self.hinge_sum(margin).split([len(scores) for scores, _, _ in self.groups])
        for (_, positive, negative), values in zip(self.groups, sums, strict=True):
            valid = positive.any(1) & negative.any(1)
            count = valid.sum().clamp_min(1) if reduction == "mean" else 1
            total = total + (values * valid).sum() / count
        return total

    def sum_of_positives(
        self,
        term: Callable[..., Tensor],
        *params: float | Tensor,
        scale: float | Tensor = 1.0,
        shift: float | Tensor = 0.0,
    ) -> Tensor:
        return self.sum(term, *params, scale=scale, shift=shift, over="positives")

    def mean_of_positives(self, term: Callable[..., Tensor], *params: float | Tensor) -> Tensor:
        return self.sum_of_positives(term, *params) / self.positive_counts.clamp_min(1)

    def hinge_sum(self, margin: float) -> Tensor:
        def one(s, positive, negative):
            sums = []
            for row, match, other in zip(s, positive, negative, strict=True):
                hinge = (margin - row[:, None] + row).relu()
                sums.append(torch.where(match[:, None] & other, hinge, 0.0).sum())
            return torch.stack(sums)

        return self._each(one)
