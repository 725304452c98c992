"""Answers that are not sums over candidates: the best candidates, and ranks.

There is one rule for equal scores. Of candidates with the same score, wrong ones come first, then
right ones, those of a lower grade before those of a higher one; or the other way round, if ties are
optimistic. Where nobody is right or wrong, and among equals, the lower index comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .vectors import chunks, host_may_read

# Positives of an anchor up to which its rivals are compared with each. Beyond it they are sorted,
# which bounds the passes (tests/test_kinds_of_defects.py counts those of label sets), though on a
# CPU comparing is the faster way up to some 128.
MANY = 32
COUNTED_EXACTLY = 2**24  # up to which float32 has all whole numbers
RUN = 64  # length of the runs in `argmax`
# Numbers of a matrix from which `argmax` is faster than PyTorch: at 256 x 256 it takes twice as
# long, at 512 x 512 0.6 of the time (``pytest benchmarks/test_micro.py --benchmark-enable -k
# argmax``).
RUNS_FROM = 2**17


def argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``x.max(dim)`` of a matrix.

    On the CPU, PyTorch vectorises it only without the index, so the best run of 64 comes first: 0.5
    of the time along rows of 1024 x 1024, 0.2 along columns (``pytest benchmarks/test_micro.py
    --benchmark-enable -k argmax``).
    """
    if x.device.type != "cpu" or x.shape[dim] % RUN or x.numel() < RUNS_FROM:
        return x.max(dim)
    if x.stride(0) < x.stride(1):  # as it lies in memory, which takes a tenth of the time
        return argmax(x.T, 1 - dim)
    runs = x.unflatten(dim, (-1, RUN))
    value, run = runs.amax(dim + 1).max(dim)
    best = torch.take_along_dim(runs, run.unsqueeze(dim).unsqueeze(dim), dim).squeeze(dim)
    return value, best.argmax(dim).add_(run, alpha=RUN)


def ranks(
    thresholds: Tensor,  # (B, P) scores of the positives, -inf if not ranked, nan if there is none
    rivals: Tensor,  # (B, C) scores of the negatives, -inf for other candidates
    optimistic: bool,
) -> Tensor:
    """Return the (B, P) ranks of positives, from 1, ascending, padded with 0.

    A negative with the score of a positive ranks ahead of it, unless ``optimistic``. All C - P
    others are ahead of a positive that is not ranked.
    """
    count = thresholds.shape[1]
    missing = thresholds.isnan()
    if count > MANY:
        ordered = rivals.sort(dim=1).values
        ahead = rivals.shape[1] - torch.searchsorted(ordered, thresholds, right=optimistic)
    else:
        compare = torch.gt if optimistic else torch.ge
        ahead = torch.zeros_like(thresholds, dtype=torch.int64)
        few = rivals.shape[1] <= COUNTED_EXACTLY
        dtype = torch.float32 if few else torch.float64
        for part in chunks(rivals):
            block = rivals[part]
            # Answers as numbers, since a mask is copied to int64 to be summed: a tenth of the time
            # (``pytest benchmarks/test_micro.py --benchmark-enable -k ranks``).
            is_ahead = torch.empty_like(block, dtype=dtype)
            for k in range(count):
                compare(block, thresholds[part, k, None], out=is_ahead)
                ahead[part, k] = is_ahead.sum(1)
    others = rivals.shape[1] - (~missing).sum(1, keepdim=True)
    ahead = torch.where(thresholds == -torch.inf, others, ahead)
    last = torch.iinfo(torch.int64).max // 2
    ahead = ahead.masked_fill_(missing, last).sort(dim=1).values
    positions = torch.arange(1, count + 1, device=rivals.device)
    return (ahead + positions).masked_fill_(missing.sort(dim=1).values, 0)


class TopK(NamedTuple):
    """The best candidates of an anchor, best first: (A, k) scores and indices."""

    values: Tensor
    indices: Tensor


class Ranking(NamedTuple):
    """Where the right candidates of each anchor are, and its best candidates."""

    ranks: Tensor  #: (A, P) from 1, ascending, padded with 0; empty where they are not needed
    top: TopK
    grades: Tensor | None = None  #: (A, P) of the candidates at these ranks; None: all 1


def collected(size: int, parts: Iterable[tuple[slice, Ranking]]) -> Ranking:
    """Return the ranking of all anchors (``size``) from those of some at a time.

    They are written in place: small results kept from each part would lie between its large blocks
    of scores and fragment the heap, by hundreds of megabytes.
    """
    whole: Ranking | None = None
    for anchors, part in parts:
        if whole is None:
            top = TopK(*(x.new_empty(size, x.shape[1]) for x in part.top))
            grades = None
            if part.grades is not None:
                grades = part.grades.new_zeros(size, 0)
            whole = Ranking(part.ranks.new_zeros(size, 0), top, grades)
        whole.top.values[anchors] = part.top.values
        whole.top.indices[anchors] = part.top.indices
        ranks = _with_rows(whole.ranks, anchors, part.ranks)
        grades = whole.grades
        if grades is not None:
            assert part.grades is not None
            grades = _with_rows(grades, anchors, part.grades)
        whole = Ranking(ranks, whole.top, grades)
    assert whole is not None
    return whole


def _with_rows(whole: Tensor, rows: slice, part: Tensor) -> Tensor:
    """Return ``whole`` (N, P) with these rows set; padded with zeros if they are wider."""
    width = part.shape[1]
    if width > whole.shape[1]:
        whole = F.pad(whole, (0, width - whole.shape[1]))
    whole[rows, :width] = part
    return whole


class Relevance(NamedTuple):
    """Who is right for each anchor, and who is no candidate of it."""

    positives: Tensor  # (A, P) columns of the right candidates, -1 for none
    grades: Tensor | None = None  # (A, P) above 0, 0 for none; None: all 1
    # given a slice of the anchors: (B, M) bool, who is not ranked; positives among them are last
    excluded: Callable[[slice], Tensor] | None = None

    def part(self, anchors: slice) -> Relevance:
        """Return the same of some anchors."""
        grades = None if self.grades is None else self.grades[anchors]
        excluded = self.excluded
        if excluded is None:
            return Relevance(self.positives[anchors], grades)

        def excluded_there(part: slice) -> Tensor:
            """Return who is not ranked, given a slice of these anchors."""
            return excluded(slice(anchors.start + part.start, anchors.start + part.stop))

        return Relevance(self.positives[anchors], grades, excluded_there)

    def lateness(self, anchors: Tensor, size: int, optimistic: bool) -> Tensor:
        """Return (B, size) numbers of candidates, of some anchors (B,): of equal scores, the lower
        number comes first.
        """
        positives = self.positives[anchors]
        grades = torch.ones_like(positives, dtype=torch.float64)
        if self.grades is not None:
            grades = self.grades[anchors]
        if optimistic:
            grades = -grades
        late = torch.zeros(len(anchors), size + 1, dtype=grades.dtype, device=grades.device)
        late.scatter_(1, positives.masked_fill(positives < 0, size), grades)
        return late[:, :size]


def best(
    scores: Tensor,  # (B, M)
    k: int,
    least: float,  # scores up to this are of no candidates: their order does not matter
    relevance: Relevance | None = None,  # None: of equal scores, the lower index comes first
    optimistic: bool = False,
) -> TopK:
    """Return the k highest scores of each row, and their columns, in the order of the one rule."""
    size = scores.shape[1]
    values, indices = scores.topk(min(k + 1, size), dim=1)
    rows = torch.arange(len(scores), device=scores.device)
    if host_may_read(scores):
        equal = (values[:, 1:] == values[:, :-1]) & (values[:, 1:] > least)
        rows = equal.any(1).nonzero()[:, 0]
    values = values[:, :k]
    indices = indices[:, :k]
    if k == 0 or len(rows) == 0:
        return TopK(values, indices)
    for some in rows.split(chunks(scores)[0].stop):
        tied = scores[some]
        columns = _near_best(tied, k, values[some, -1:], least)
        if relevance is not None:
            late = relevance.lateness(some, size, optimistic).gather(1, columns)
            columns = columns.gather(1, late.argsort(dim=1, stable=True))
        ordered = tied.gather(1, columns).sort(dim=1, descending=True, stable=True)
        values[some] = ordered.values[:, :k]
        indices[some] = columns.gather(1, ordered.indices[:, :k])
    return TopK(values, indices)


def _near_best(scores: Tensor, k: int, lowest: Tensor, least: float) -> Tensor:
    """Return (B, C) ascending columns, among them those that may be the k best of each row.

    ``lowest`` (B, 1) is the k-th highest score of each row; ``least`` is that of no candidates.
    """
    size = scores.shape[1]
    width = size
    if host_may_read(scores):
        reached = (scores >= lowest).sum(1).masked_fill(lowest[:, 0] <= least, k)
        width = int(reached.amax())
    if 2 * width > size:  # to sort all is faster
        return torch.arange(size, device=scores.device).expand(scores.shape)
    return scores.topk(width, dim=1).indices.sort(dim=1).values


def ranked_grades(
    thresholds: Tensor,  # (B, P) scores of the positives, as in :func:`ranks`
    grades: Tensor,  # (B, P)
    optimistic: bool,
) -> Tensor:
    """Return the (B, P) grades in the order of :func:`ranks`."""
    order = grades.argsort(dim=1, descending=optimistic, stable=True)
    negative = thresholds.neg().gather(1, order)  # as nan is sorted behind all numbers
    order = order.gather(1, negative.argsort(dim=1, stable=True))
    return grades.gather(1, order)
