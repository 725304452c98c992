"""Whoever asks about similarities, and what can be asked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from .checks import as_params, check_number, one_of
from .engine import ranking
from .engine.answers import exponential, identity, term_name
from .engine.matrix import Matrix
from .engine.pairs import segment_sum
from .engine.scores import host_may_read

Over = Literal["negatives", "all"]
Reduction = Literal["mean", "sum", "none"]
Term = Callable[..., Tensor]
Self = TypeVar("Self", bound="Anchors")

_RANGE = 60.0  # exp(±60) and long sums of it are ordinary float32 numbers


class MeanStd(NamedTuple):
    """Mean and population standard deviation (at least 1e-6) of each anchor's negatives: (A,), 0 without any."""

    mean: Tensor
    std: Tensor


class Hardest(NamedTuple):
    """Score (A,) and index (A,) int64 of each anchor's highest-scoring negative; -inf and -1 where it has none."""

    values: Tensor
    indices: Tensor


class Anchors:
    """Whoever asks about similarities: rows, columns, both, or the rows of several matrices.

    Answers are one vector (A,) over all anchors, group after group; :meth:`split` takes it apart. A parameter holds one
    value per anchor, in the same order, or one for all. All answers are differentiable unless they say otherwise.

    Anchors come from a :class:`itrloss.Similarity`, which is one (its rows), from its ``both``, from :meth:`together`
    and from :meth:`pooled`.
    """

    def __init__(self, *groups: Sequence[tuple[Matrix, int]]):
        """``groups``: for each the matrices that hold its candidates, and as which side of each it asks."""
        self._groups = groups
        self._first = first = groups[0][0][0]
        self.dtype, self.device = first.dtype, first.device
        #: Number of anchors in each group.
        self.sizes = sizes = []
        visits: dict[int, tuple[Matrix, list[int], list[int]]] = {}
        one_to_one = alike = True
        for g, group in enumerate(groups):
            sizes.append(group[0][0].shape[group[0][1]])
            alike = alike and sizes[g] == sizes[0]  # a set would have the compiler take each size for a constant
            one_to_one = one_to_one and len(group) == 1 and group[0][0].pairs.one_to_one
            for matrix, side in group:
                _, sides, places = visits.setdefault(id(matrix), (matrix, [], []))
                sides.append(side)
                places.append(g)
        self._visits = list(visits.values())  # each matrix with the sides that ask it, and the groups that these are
        self._size = sum(sizes)
        #: Whether anchor i of each group matches its candidate i and nothing else.
        self.one_to_one, self.of_one_size = one_to_one, alike

    @staticmethod
    def together(*anchors: Anchors) -> Anchors:
        """Return the anchors of all, one after the other, which ask each their own candidates."""
        return Anchors(*(group for x in anchors for group in x._groups))

    @staticmethod
    def pooled(*anchors: Anchors) -> Anchors:
        """Return the same anchors with the candidates of all: a gallery in blocks, which need not be there at once.

        >>> v, w = torch.randn(3, 4), torch.randn(6, 4)
        >>> ids = torch.arange(3), torch.arange(6) % 3
        >>> blocks = [Similarity(v, x, ids[0], i) for x, i in zip(w.split(2), ids[1].split(2))]
        >>> whole = Similarity(v, w, *ids).logsumexp(5.0)
        >>> torch.allclose(Anchors.pooled(*blocks).logsumexp(5.0), whole, atol=1e-6)
        True
        """
        groups = [sum(same, start=()) for same in zip(*(map(tuple, x._groups) for x in anchors), strict=True)]
        if any(len({m.shape[side] for m, side in group}) > 1 for group in groups):
            raise ValueError("anchors: expected as many anchors in each block")
        return Anchors(*groups)

    # ------------------------------------------------------------------------------------------- what there is

    def __len__(self) -> int:
        """Number of anchors, A."""
        return self._size

    def __bool__(self) -> bool:
        return True

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what each group holds of a tensor (..., A)."""
        return x.split(self.sizes, -1)

    def groups(self) -> list[Anchors]:
        """Return the anchors of each group by themselves."""
        return [Anchors(group) for group in self._groups]

    def detach(self) -> Anchors:
        """Return the same anchors of similarities without a gradient."""
        twins = {id(m): m.detach() for m, _, _ in self._visits}
        return Anchors(*([(twins[id(m)], side) for m, side in group] for group in self._groups))

    @property
    def positive_counts(self) -> Tensor:
        """(A,) int64: how many candidates match each anchor."""
        return torch.cat([sum(m.pairs.counts(s) for m, s in group) for group in self._groups])  # type: ignore[misc]

    @property
    def negative_counts(self) -> Tensor:
        """(A,) int64: how many candidates do not match each anchor."""
        counts = [sum(m.pairs.negative_counts(s) for m, s in group) for group in self._groups]
        return torch.cat(counts)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------ questions

    def _params(self, name: str, *params: Any) -> list[Tensor]:
        return as_params(name, params, self._size, self.dtype, self.device)

    def _sums(self, key: str, *params: Tensor, over: str = "negatives") -> Tensor:
        """(K, A) sums of an answer; both sides of one matrix out of one visit."""
        if len(self._visits) == 1 and self._visits[0][1] in ([0], [1], [0, 1]):
            matrix, sides, _ = self._visits[0]
            return matrix.reduce(key, sides, *params, over=over)
        parts = [None if p.shape[-1] == 1 else self.split(p) for p in params]
        sums: list[list[Tensor]] = [[] for _ in self._groups]
        for matrix, sides, groups in self._visits:
            sides, groups = zip(*sorted(zip(sides, groups, strict=True)), strict=True)
            given = zip(params, parts, strict=True)
            mine = [p if part is None else torch.cat([part[g] for g in groups], -1) for p, part in given]
            found = matrix.reduce(key, sides, *mine, over=over)
            for g, x in zip(groups, found.split([self.sizes[g] for g in groups], 1), strict=True):
                sums[g].append(x)
        join = torch.maximum if key == "peak" else torch.add
        return torch.cat([functools.reduce(join, x) for x in sums], 1)

    def logsumexp(self, scale: float | Tensor = 1.0, *, over: Over = "negatives") -> Tensor:
        """Return (A,) ``log sum_j exp(scale_i S_ij)`` over each anchor's negatives, or over all candidates.

        ``scale`` is a number, a tensor of one value, or one of (A,); it gets its gradient. -inf for an empty sum.
        """
        if over != "negatives":
            one_of("over", over, "negatives", "all")
        (a,) = as_params("scale", (scale,), self._size, self.dtype, self.device)
        shift = self._shift(a)
        if shift is not None:
            total = self._sums("exp", a, *([a.new_full((1,), shift)] if shift else []), over=over)[0]
            if not shift and self.one_to_one and min(self.sizes) > 1:
                return total.log()
            if not shift or float(total.detach().amin()) >= math.exp(-_RANGE):
                return self._log(total, shift)
        with torch.no_grad():
            top = self._sums("peak", a.detach(), over=over)[0]
            top = top.masked_fill(top == -math.inf, 0.0)
        return self._log(self._sums("exp", a, top, over=over)[0], top)

    def _log(self, total: Tensor, top: float | Tensor) -> Tensor:
        """(A,) ``log total + top``; -inf for a sum of nothing, through which no gradient goes."""
        if self.one_to_one and min(self.sizes) > 1 and isinstance(top, float):
            return total.log() + top if top else total.log()
        empty = total == 0
        return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, -math.inf)

    def _shift(self, scale: Tensor) -> float | None:
        """What can be subtracted from all exponents instead of each anchor's maximum; None if nothing can.

        Scores lie in [-1, 1], so ``a S - shift <= 60``. Up to a scale of 60 no sum underflows; beyond, one does only if
        its best score is below ``1 - 120 / a``, which is looked for. That saves a pass over the scores.
        """
        if not host_may_read(scale):
            return None
        for matrix, _, _ in self._visits:
            if not matrix.bounded:
                return None
        largest = float((scale if scale.numel() == 1 else scale.abs().amax()).detach().abs())
        return max(0.0, largest - _RANGE) if largest <= 3 * _RANGE else None

    def mean_std(self) -> MeanStd:
        """Return mean and population standard deviation of each anchor's negatives, (A,) each."""
        with torch.no_grad():  # inside, as the compiler refuses a decorator
            alone = self.one_to_one and len(self._visits) == 1
            centre = self._first.mean_scores(self._visits[0][1]) if alone else self._centre()
        sums = self._sums("moments", centre)
        if self.one_to_one and self.of_one_size:
            count: Any = max(1, self.sizes[0] - 1)
            first, second = sums / count
            mean = centre + first if self.sizes[0] > 1 else centre * 0
        else:
            count = self.negative_counts
            first, second = sums / count.clamp_min(1)
            mean = torch.where(count > 0, centre + first, 0.0)
        return MeanStd(mean, (second - first.square()).clamp_min(1e-12).sqrt())

    def _centre(self) -> Tensor:
        """(A,) a number near the mean of the negatives, so that squares of distances from it lose no digits.

        Several positives that score far from the negatives would move the mean of all candidates away from theirs.
        """
        groups = [[(m.mean_scores([side]), m.shape[1 - side]) for m, side in group] for group in self._groups]
        total = torch.cat([sum(mean * size for mean, size in group) for group in groups])  # type: ignore[arg-type]
        sizes = zip(self.sizes, groups, strict=True)
        count = torch.cat([total.new_full((anchors,), sum(size for _, size in group)) for anchors, group in sizes])
        if not self.one_to_one and all(m.pairs.listable for m, _, _ in self._visits):
            total, count = total - self.sum_of_positives(identity), count - self.positive_counts
        return total / count.clamp_min(1)

    def entropy(self, temperature: float = 1.0) -> Tensor:
        """Return (A,) ``-sum_{j in neg(i)} P_ij log2 P_ij``, ``P_i`` the softmax of ``S_i / temperature`` over all."""
        check_number("temperature", temperature, positive=True)
        (a,) = self._params("temperature", 1 / temperature)
        with torch.no_grad():
            best = self._sums("peak", torch.ones_like(a), over="all")[0]
            best = best.masked_fill(best == -math.inf, 0.0)
        # With z = a (S - best), sums over negatives of exp(z) and z exp(z), and that of exp(z) over all: exponents near
        # 0, where float32 is exact, and no difference of large numbers.
        negatives, information = self._sums("information", a, best)
        total = (negatives + self.sum_of_positives(exponential, a, best)).clamp_min(0.5)  # 1 at least, or of nothing
        nats = (negatives * total.log() - information) / total
        return nats.clamp_min(0.0) / math.log(2)

    def sum(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return (A,) ``sum_{j in neg(i)} term(S_ij, *params_i)``, 0 for an anchor without negatives.

        ``term`` is a function that :func:`itrloss.pair_term` registered; parameters get their gradients.
        """
        return self._sums(term_name(term), *self._params("params", *params))[0]

    def sum_of_positives(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} term(S_ip, *params_i)``, 0 for an anchor without positives.

        ``term`` is as in :meth:`sum`. The gradient goes straight to the embeddings of the pairs.
        """
        name = term_name(term)
        given = self._params("params", *params) if params else []
        if not self.one_to_one and not all(m.pairs.listable for m, _, _ in self._visits):
            return self._sums(name, *given, over="positives")[0]
        if self.one_to_one and len(self._visits) == 1:  # all groups at once
            scores, sides = self._first.positive_scores(), len(self.sizes)
            values = term(scores, *[p if p.numel() == 1 else p.view(sides, -1) for p in given])
            return values.expand(sides, len(scores)).flatten()
        known: dict[int, Tensor] = {}  # terms that both sides of a matrix share
        found, start = [], 0
        for group, size in zip(self._groups, self.sizes, strict=True):
            sums: list[Tensor] = []
            for matrix, side in group:
                anchor = None if matrix.pairs.one_to_one else matrix.pairs.listed[side]
                values = known.get(id(matrix))
                if values is None:
                    scores, own, shared = matrix.positive_scores(), [], True
                    for p in given:
                        if p.numel() > 1:
                            shared, p = False, p[start : start + size]
                            p = p if anchor is None else p[anchor]
                        own.append(p)
                    values = term(scores, *own).expand_as(scores)
                    if shared:
                        known[id(matrix)] = values
                sums.append(values if anchor is None else segment_sum(values, anchor, size))
            found.append(sums[0] if len(sums) == 1 else functools.reduce(torch.add, sums))
            start += size
        return torch.cat(found)

    def mean_of_positives(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return (A,) the mean of a term over each anchor's positives, 0 without any."""
        sums = self.sum_of_positives(term, *params)
        return sums if self.one_to_one else sums / self.positive_counts.clamp_min(1)

    def hinge_sum(self, margin: float) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} sum_{j in neg(i)} max(margin - S_ip + S_ij, 0)``.

        Memory for all positive pairs, and work for the largest number of positives that an anchor has.
        """
        if any(len(group) > 1 for group in self._groups):
            raise ValueError("hinge_sum: expected the candidates of an anchor in one matrix")
        if not all(m.pairs.listable for m, _, _ in self._visits):
            return torch.cat([m.sorted_hinges(side, margin) for ((m, side),) in self._groups])
        tables = [m.positive_table(side) - margin for ((m, side),) in self._groups]
        slots = max(len(t) for t in tables)
        for k, t in enumerate(tables):
            if len(t) < slots:
                tables[k] = torch.cat((t, t.new_full((slots - len(t), t.shape[1]), math.inf)))
        return self._sums("hinges", torch.cat(tables, 1))[0]

    def hardest_negatives(self) -> Hardest:
        """Return score and index (A,) of each anchor's highest-scoring negative; the gradient goes to the pair."""
        found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for matrix, sides, _ in self._visits:
            for side, best in zip(sides, ranking.hardest(matrix, sides), strict=True):
                found[id(matrix), side] = best
        groups = []
        for group in self._groups:
            (first, side), *others = group
            values, indices = found[id(first), side]
            offset = first.shape[1 - side]
            for matrix, side in others:
                more, where = found[id(matrix), side]
                better = more > values
                values, indices = torch.where(better, more, values), torch.where(better, where + offset, indices)
                offset += matrix.shape[1 - side]
            groups.append((values, indices))
        values, indices = (torch.cat(x) for x in zip(*groups, strict=True))
        return Hardest(values, indices)

    # --------------------------------------------------------------------------------------- losses' reduction

    def valid(self) -> Tensor | None:
        """Return (A,) bool: which anchors have a positive and a negative; None: all do."""
        if self.one_to_one and min(self.sizes) > 1:
            return None
        return (self.positive_counts > 0) & (self.negative_counts > 0)

    def reduce(self, values: Tensor, reduction: Reduction, valid: Tensor | None = None) -> Any:
        """Return the means over each group's ``valid`` anchors (default: :meth:`valid`) added, the sum, or the parts.

        An anchor that is not valid contributes 0 and does not count in a mean.
        """
        if reduction not in ("mean", "sum", "none"):
            one_of("reduction", reduction, "mean", "sum", "none")
        if valid is None and not (self.one_to_one and min(self.sizes) > 1):
            valid = self.valid()
        if valid is not None:
            values = torch.where(valid, values, 0.0)
        if reduction == "none":
            return self.split(values)
        if reduction == "sum":
            return values.sum()
        if valid is None and self.of_one_size:
            return values.sum() / self.sizes[0]
        counts = self.sizes if valid is None else [v.sum().clamp_min(1) for v in self.split(valid)]
        return sum(x.sum() / count for x, count in zip(self.split(values), counts, strict=True))

    def per_pair(self, sums: Tensor) -> Tensor:
        """Return sums (A,) over positives, scaled so that the mean over a group's valid anchors is that over pairs."""
        valid = self.valid()
        if self.one_to_one or valid is None:
            return sums
        sides = zip(self.split(sums), self.split(valid), self.split(self.positive_counts), strict=True)
        # In this order: a quotient of counts would be float32.
        return torch.cat([x * v.sum().clamp_min(1) / (n * v).sum().clamp_min(1) for x, v, n in sides])
