"""Anchors, and the sums, means, extremes and other answers over the candidates of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .checks import as_params, check_number, one_of
from .engine.answers import GUIDED, exponential, shifted_exponential, term_name
from .engine.pairs import segment_sum, slots
from .engine.scores import host_may_read, may_keep
from .groups import Groups

Over = Literal["negatives", "positives", "all"]
Limit = float | Tensor | None
Term = Callable[..., Tensor]

_RANGE = 60.0  # exp(±60), and long sums of it, neither overflow nor underflow in float32


class MeanStd(NamedTuple):
    """Mean and population standard deviation (at least 1e-6) of each anchor's negatives: (A,), 0
    without any.
    """

    mean: Tensor
    std: Tensor


class Hardest(NamedTuple):
    """Score (A,) and index (A,) int64 of each anchor's highest-scoring negative; -inf and -1 where
    it has none.
    """

    values: Tensor
    indices: Tensor


class Anchors(Groups):
    """The anchors of similarity matrices: the rows of one, its columns, both, or the rows of
    several.

    Each anchor has candidates, the other side of its matrix. An answer is one vector (A,) over all
    anchors, group after group; :meth:`split` returns its parts. A parameter holds one value per
    anchor, in the same order, or one for all. All answers are differentiable unless they say
    otherwise.

    Anchors come from a :class:`itrloss.Similarity`, which is one (its rows), from its ``both``,
    from :meth:`together` and from :meth:`pooled`.
    """

    @staticmethod
    def together(*anchors: Anchors) -> Anchors:
        """Return the anchors of all, one after the other, each with its own candidates."""
        return Anchors(*(group for x in anchors for group in x._groups))

    @staticmethod
    def pooled(*anchors: Anchors) -> Anchors:
        """Return the same anchors with the candidates of all, such as the blocks of a gallery,
        without concatenation.

        >>> v, w = torch.randn(3, 4), torch.randn(6, 4)
        >>> ids = torch.arange(3), torch.arange(6) % 3
        >>> blocks = [Similarity(v, x, ids[0], i) for x, i in zip(w.split(2), ids[1].split(2))]
        >>> whole = Similarity(v, w, *ids).logsumexp(5.0)
        >>> torch.allclose(Anchors.pooled(*blocks).logsumexp(5.0), whole, atol=1e-6)
        True
        """
        groups = [
            sum(same, start=())
            for same in zip(*(map(tuple, x._groups) for x in anchors), strict=True)
        ]
        if any(len({m.shape[side] for m, side in group}) > 1 for group in groups):
            raise ValueError("anchors: expected as many anchors in each block")
        return Anchors(*groups)

    # --------------------------------------------------------------------------- groups and numbers

    def groups(self) -> list[Anchors]:
        """Return the anchors of each group by themselves."""
        return [Anchors(group) for group in self._groups]

    @property
    def both(self) -> Anchors:
        """These anchors; of a :class:`itrloss.Similarity`, its rows and its columns."""
        return self

    def detach(self) -> Anchors:
        """Return the same anchors of similarities without a gradient."""
        twins = {id(m): m.detach() for group in self._groups for m, _ in group}
        return Anchors(*([(twins[id(m)], side) for m, side in group] for group in self._groups))

    # -------------------------------------------------------------------------------------- answers

    def logsumexp(
        self,
        scale: float | Tensor = 1.0,
        *,
        over: Over = "negatives",
        below: Limit = None,
        above: Limit = None,
        guide: Anchors | None = None,
    ) -> Tensor:
        """Return (A,) ``log sum_j exp(scale_i S_ij)`` over each anchor's negatives, positives, or
        all candidates.

        ``scale`` is a number, a tensor of one value, or one of (A,); it gets its gradient. ``below``, ``above``: see
        :meth:`sum`; with a ``guide``, the same anchors of another model's similarities, they are limits of its scores.
        -inf for an empty sum.
        """
        if over != "negatives":
            one_of("over", over, "negatives", "positives", "all")
        (a,) = as_params("scale", (scale,), self._size, self.dtype, self.device)
        suffix, limits = (
            ("", []) if below is above is guide is None else self._limits(below, above, guide)
        )
        if over == "positives" and not limits:
            return self._logsumexp_of_positives(a)
        shift, top, total = None, None, None
        # Overflow: scores lie in [-1, 1], so one shift of all exponents keeps them below 60. The
        # maximum of each anchor would take a further pass over the scores. Up to a scale of 60 no
        # sum underflows. Beyond, one does only if its best score is below ``1 - 120 / a``; then the
        # maximum is computed after all.
        if self._bounded and host_may_read(a):
            largest = abs(float((a if a.numel() == 1 else a.abs().amax()).detach()))
            if self.exchange is not None and a.numel() > 1:
                largest = self.exchange.processes.largest(largest)
            shift = max(0.0, largest - _RANGE) if largest <= 3 * _RANGE else None
        if shift is not None:
            top = a.new_full((1,), shift) if shift else None
            params = (a,) if top is None else (a, top)
            total = self._answer(
                "sums", *params, *limits, key="exp" + suffix, over=over, guide=guide
            )
        if total is None or (shift and self._underflown(total.detach(), over)):
            top = self._largest(a, over, below, above, guide)
            total = self._answer(
                "sums", a, top, *limits, key="exp" + suffix, over=over, guide=guide
            )
        # an empty sum gives -inf, without a gradient
        empty: Any = None if self._complete and shift is not None and not limits else total == 0
        log = (total if empty is None else total.masked_fill(empty, 1.0)).log()
        log = log if top is None else log + top
        return log if empty is None else log.masked_fill(empty, -math.inf)

    def _underflown(self, total: Tensor, over: str) -> bool:
        """Return whether the sum of an anchor that has candidates, of any process, may have
        underflowed.
        """
        lowest = float(total.amin())
        # all processes take the same path
        if not self._complete and (lowest == 0 or self.exchange is not None):
            count = self.positive_counts if over == "positives" else self.negative_counts
            count = count + self.positive_counts if over == "all" else count
            lowest = float(total.masked_fill(count == 0, math.inf).amin())
        lowest = lowest if self.exchange is None else -self.exchange.processes.largest(-lowest)
        return lowest < math.exp(-_RANGE)

    def _limits(self, below: Limit, above: Limit, guide: Any = None) -> tuple[str, list[Tensor]]:
        """Return the suffix of an answer's name, see :func:`itrloss.engine.answers.within`, and its
        parameters.
        """
        named = [
            (name, which, x)
            for name, which, x in (("below", "<", below), ("above", ">", above))
            if x is not None
        ]
        like = self._size, self.dtype, self.device
        limits = [
            as_params(name, (x.detach() if isinstance(x, Tensor) else x,), *like)[0]
            for name, _, x in named
        ]
        if guide is not None and not named:
            raise ValueError("guide: expected below or above beside it, limits of its scores")
        return GUIDED * (guide is not None) + "".join(which for _, which, _ in named), limits

    def _largest(
        self,
        scale: Tensor,
        over: str,
        below: Limit = None,
        above: Limit = None,
        guide: Anchors | None = None,
    ) -> Tensor:
        """Return (A,) ``max_j scale_i S_ij``, 0 without candidates; without a gradient."""
        suffix, limits = (
            ("", []) if below is above is guide is None else self._limits(below, above, guide)
        )
        with torch.no_grad():
            top = self._answer(
                "sums", scale.detach(), *limits, key="peak" + suffix, over=over, guide=guide
            )
            return top.masked_fill(top == -math.inf, 0.0)

    def _logsumexp_of_positives(self, scale: Tensor) -> Tensor:
        if self.one_to_one or self._listable():
            scores, index = self._positives()
            a = scale if scale.numel() == 1 or index is None else self.gathered(scale)[index]
            top = (a * scores).detach()
            if index is not None:
                whole = top.new_full((sum(self.whole_sizes),), -math.inf).scatter_reduce(
                    0, index, top, "amax"
                )
                top = self.merged(whole, maximum=True)
                top = top.masked_fill(top == -math.inf, 0.0)
        else:
            top = self._largest(scale, "positives")
        total = self.sum_of_positives(shifted_exponential, scale, top)
        empty = total == 0
        return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, -math.inf)

    def mean_std(self) -> MeanStd:
        """Return the (A,) means and population standard deviations of each anchor's negatives."""
        with torch.no_grad():  # not a decorator, which the compiler refuses
            centre, number = self._answer("centre")
            centre = centre / number.clamp_min(1)
        sums = self._answer("sums", centre, key="moments")
        count: Any = self.sizes[0] - 1
        if not (self._complete and self.of_one_size):
            count = self._answer("counts", positive=False)
            centre, count = centre.masked_fill(count == 0, 0.0), count.clamp_min(1)
        first, second = sums / count
        return MeanStd(centre + first, (second - first.square()).clamp_min(1e-12).sqrt())

    def entropy(self, temperature: float = 1.0) -> Tensor:
        """Return (A,) ``-sum_{j in neg(i)} P_ij log2 P_ij``, ``P_i`` the softmax of ``S_i /
        temperature`` over all.
        """
        check_number("temperature", temperature, positive=True)
        a = torch.full((1,), 1 / temperature, dtype=self.dtype, device=self.device)
        # exponents are -20 at least, if no score is above 1 and no temperature below 0.1
        best = torch.ones_like(a)
        if temperature < 0.1 or not self._bounded:
            best = self._largest(best, "all")
        # With z = a (S - best): the sums of exp(z) and z exp(z) over negatives, and that of exp(z)
        # over all. Exponents are near 0, where float32 is accurate, and no large numbers cancel.
        negatives, information = self._answer("sums", a, best, key="information")
        total = negatives + self.sum_of_positives(exponential, a, best)
        total = total.clamp_min(1e-9)  # at least exp(-20), unless the sum is empty
        nats = (negatives * total.log() - information) / total
        return nats.clamp_min(0.0) / math.log(2)

    def sum(
        self,
        term: Term,
        *params: float | Tensor,
        over: Over = "negatives",
        below: Limit = None,
        above: Limit = None,
        guide: Anchors | None = None,
    ) -> Tensor:
        """Return (A,) ``sum_{j in neg(i)} term(S_ij, *params_i)``, 0 for an anchor without
        negatives.

        ``term`` is a function that :func:`itrloss.pair_term` registered; parameters get their
        gradients. Negatives, or what the sum is ``over``, count only with a score below ``below``
        and above ``above``: numbers, or (A,) limits, which get no gradient.

        With a ``guide``, the same anchors of another similarity, the sum is of ``term(S_ij, G_ij,
        *params_i)`` with its scores G, which get no gradient: those of a teacher, for instance.
        """
        if over != "negatives":
            one_of("over", over, "negatives", "positives", "all")
        tensors = as_params("params", params, self._size, self.dtype, self.device)
        suffix, limits = ("", []) if below is above is None else self._limits(below, above)
        if guide is not None and limits:
            raise ValueError("guide: expected no limits beside it, as the term gets its scores")
        return self._answer(
            "sums", *tensors, *limits, key=term_name(term) + suffix, over=over, guide=guide
        )

    def sum_of_positives(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} term(S_ip, *params_i)``, 0 for an anchor without
        positives.

        ``term`` is as in :meth:`sum`. The gradient goes straight to the embeddings of the pairs.
        """
        name = term_name(term)
        tensors = as_params("params", params, self._size, self.dtype, self.device) if params else []
        if not (self.one_to_one or self._listable()):
            return self._answer("sums", *tensors, key=name, over="positives")
        scores, index = self._positives()
        if index is None:
            return term(scores, *tensors).expand_as(scores)
        values = term(scores, *(p if p.numel() == 1 else self.gathered(p)[index] for p in tensors))
        return self.merged(segment_sum(values.expand_as(scores), index, sum(self.whole_sizes)))

    def _listable(self) -> bool:
        return all(m.pairs.listable for group in self._groups for m, _ in group)

    def _positives(self) -> tuple[Tensor, Tensor | None]:
        """Return the (P,) scores of the positive pairs, and (P,) their anchors; None: pair i
        belongs to anchor i.
        """
        scores: list[Tensor] = []
        index: list[Tensor] = []
        first, before = 0, None
        for size, group in zip(self.whole_sizes, self._groups, strict=True):
            for matrix, side in group:
                scores.append(scores[-1] if matrix is before else matrix.positive_scores())
                if not self.one_to_one and self._index is None:
                    index.append(matrix.pairs.listed[side] + first)
                before = matrix
            first += size
        if not index:
            return torch.cat(scores), self._index
        anchors = torch.cat(index)
        self._index = anchors if may_keep() else None  # one tensor for all graphs that save it
        return torch.cat(scores), anchors

    def mean_of_positives(self, term: Term, *params: float | Tensor) -> Tensor:
        """Return the (A,) means of a term over each anchor's positives, 0 without any."""
        sums = self.sum_of_positives(term, *params)
        return sums if self.one_to_one else sums / self.positive_counts.clamp_min(1)

    def hinge_sum(self, margin: float) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} sum_{j in neg(i)} max(margin - S_ip + S_ij, 0)``.

        Memory grows with the number of positive pairs, work with the largest number of positives of
        an anchor.
        """
        if not (self.one_to_one or self._listable()):
            if any(len(group) > 1 for group in self._groups):
                raise ValueError("hinge_sum: expected the candidates of an anchor in one matrix")
            if self.exchange is not None:
                raise ValueError(
                    "hinge_sum: torch.compile cannot list the positives of a batch that processes share"
                )
            return self._answer("sorted_hinges", margin=margin)
        thresholds, index = self._positives()
        if index is not None:  # (slots, A), inf where an anchor has fewer positives
            size, counts = sum(self.whole_sizes), self.positive_counts
            slot, most = slots(index, size), int(counts.amax())
            # an anchor has its own slots for the candidates of each process
            if self.exchange is not None:
                slot, most = (
                    slot + self.exchange.earlier()[index],
                    int(self.exchange.processes.largest(most)),
                )
            table = self.merged(
                thresholds.new_zeros(max(1, most), size).index_put((slot, index), thresholds)
            )
            empty = torch.arange(len(table), device=self.device)[:, None] >= counts
            thresholds = table.masked_fill(empty, math.inf)
        return self._answer("sums", thresholds.view(-1, self._size) - margin, key="hinges")

    def hardest_negatives(self, below: Limit = None) -> Hardest:
        """Return the (A,) scores and indices of each anchor's highest-scoring negative; gradients
        go to that pair.

        With ``below``, see :meth:`sum`, of those that score below it: with the score of a positive,
        a semi-hard one.
        """
        if self.exchange is not None and any(len(group) > 1 for group in self._groups):
            raise ValueError(
                "hardest_negatives: expected one matrix of candidates where processes share a batch"
            )
        return Hardest(*self._answer("hardest", *self._limits(below, None)[1]))
