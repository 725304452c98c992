"""The backends of :class:`itrloss.Anchors`: small matrices in plain PyTorch, others by tiles."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ranking, reduce
from .answers import ANSWERS
from .matrix import Matrix, check_unchanged
from .pairs import segment_sum
from .scores import Scores, chunks, full_precision, may_keep

View = tuple[Matrix, int]  # a matrix, and the side of it that the anchors are: 0 the rows, 1 the columns
Guides = Mapping[View, View]  # for each view, the same anchors in another matrix, whose scores get no gradient


class Tiled:
    """Answers for one or both sides of a matrix, tile by tile, in PyTorch or in Triton."""

    def __init__(self, views: Sequence[View]):
        """``views``: one or both sides of one matrix, the rows first."""
        self.views, self.matrix, self.sides = views, views[0][0], tuple(side for _, side in views)

    def sums(self, *params: Tensor, key: str, over: str = "negatives", guides: Guides | None = None) -> Tensor:
        """Return the sums, or maxima, of the answer ``key`` over each anchor's candidates: (A,), or (K, A) of several.

        With ``guides``, the scores of their matrices are the answer's first parameter.
        """
        m, compiling = self.matrix, torch.compiler.is_compiling()
        check_unchanged([m])
        early = ANSWERS[key].exponential and self.sides == (0,) and m.cols is not None and not m.cols.requires_grad
        source, pairs = list(m.source(form=not early)), None if compiling else m.pairs
        if guides is not None:
            check_unchanged([guide := guides[self.views[0]][0]])
            source += [None if x is None else x.detach() for x in guide.source(form=True)]
        question = key, over, self.sides, m.engine == "triton"
        if not torch.is_grad_enabled():
            sums = reduce.sums(source, list(params), *question, False, pairs=pairs)[0]
            return sums[0] if len(sums) == 1 else sums
        listed = not (early or compiling or m.cols is None) and m.pairs.listable and m._positive_scores is None
        index = ((None, None) if m.pairs.one_to_one else m.pairs.listed) if listed else None
        sums, positive = reduce.Reduce.apply(pairs, question, index, len(source), *source, *params)
        m._positive_scores = positive if listed else m._positive_scores
        return sums[0] if len(sums) == 1 else sums

    def counts(self, *, positive: bool) -> Tensor:
        """Return the (A,) int64 number of positives, or of negatives, of each anchor."""
        return torch.cat([self.matrix.pairs.counts(side)[0 if positive else 1] for side in self.sides])

    def centre(self) -> Tensor:
        """Return a sum of scores and their number (2, A), whose quotient is near the mean of each anchor's negatives.

        Without a gradient. One positive hardly moves the mean of all candidates, and may be among them. Several may
        score far from the negatives: they are subtracted.
        """
        m, sums = self.matrix, []
        every = m.cols is not None and (m.pairs.one_to_one or not m.pairs.listable)
        if m.keeps or m.cols is None:
            totals = self.sums(key="identity", over="all" if every else "negatives")
        else:
            source: Any = m.source()
            with full_precision(m.rows):
                for side in self.sides:
                    other = sum(source.unit(1 - side, part).sum(0) for part in chunks(source[1 - side]))
                    sums.append(torch.cat([source.unit(side, part) @ other for part in chunks(source[side])]))
            for side, x in zip(() if every else self.sides, sums, strict=False):
                x.sub_(segment_sum(m.positive_scores().detach(), m.pairs.listed[side], len(x)))
            totals = torch.cat(sums)
        if not every:
            return torch.stack([totals, self.counts(positive=False)])
        numbers = [totals.new_full((m.shape[side],), m.shape[1 - side]) for side in self.sides]
        return torch.stack([totals, torch.cat(numbers)])

    def hardest(self, below: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the (A,) scores and indices of each anchor's highest-scoring negative; -inf and -1 without one.

        ``below``, (A,) or (1,): of the negatives that score below it. The gradient goes to the pairs' embeddings alone.
        """
        m = self.matrix
        check_unchanged([m])
        values, index = self._hardest(below)
        if torch.is_grad_enabled() and any(x is not None and x.x.requires_grad for x in m.embeddings):
            own = torch.cat([torch.arange(m.shape[side], device=m.device) for side in self.sides])
            others, rows = index.clamp_min(0), 0 if self.sides == (1,) else m.shape[0]
            hardest_pairs = [torch.cat([x[:rows], y[rows:]]) for x, y in ((own, others), (others, own))]
            # With the positives, where they can be listed: one gradient of all embeddings less, 0.88 of the time
            # (python -m benchmarks --losses "triplet hardest" --shapes 512x512x1024, with and without).
            with_positives = m.pairs.listable and m._positive_scores is None and self._few(m.pairs.listed[0])
            listed = m.pairs.listed if with_positives else (own[:0], own[:0])
            scores = m.pair_scores(*(torch.cat(x) for x in zip(listed, hardest_pairs, strict=True)))
            positive, scores = scores.split([len(listed[0]), len(index)])
            m._positive_scores = positive if with_positives else m._positive_scores
            values = torch.where(index < 0, -math.inf, scores)
        return values, index

    def _hardest(self, below: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the (A,) scores and indices of the hardest negatives, without a gradient."""
        pairs: Any = {} if torch.compiler.is_compiling() else {"pairs": self.matrix.pairs}
        return ranking.hardest(list(self.matrix.source(form=True)), self.sides, below, **pairs)

    def _few(self, positives: Tensor) -> bool:
        """Return whether the scores of this many positives may be computed before they are needed."""
        return len(positives) <= sum(self.matrix.shape)

    def sorted_hinges(self, *, margin: float) -> Tensor:
        """Return the (A,) sums of hinges of all positives against all negatives, without listing the positives."""
        whole = self.matrix.as_dense()
        return Dense([(whole, side) for side in self.sides]).sorted_hinges(margin=margin)


class Dense(Tiled):
    """The same answers in plain PyTorch on the whole matrix, which autograd differentiates."""

    def __init__(self, views: Sequence[View]):
        super().__init__(views)
        self._counted: dict[str, Tensor] = {}

    def counted(self, over: str) -> Tensor:
        """Return (N, M) factors, 1 for the pairs that a sum ``over`` negatives, positives or all counts, 0 for others.

        A product with them takes a fifth of the time of filling with a bool mask, and makes infinite scores nan.
        """
        if over in self._counted:
            return self._counted[over]
        m, whole = self.matrix, [slice(0, size) for size in self.matrix.shape]
        counted = m.pairs.exclude_(torch.ones(m.shape, dtype=m.dtype, device=m.device), (whole[0], whole[1]), 0.0, over)
        if may_keep():
            self._counted[over] = counted
        return counted

    def sums(self, *params: Tensor, key: str, over: str = "negatives", guides: Guides | None = None) -> Tensor:
        """See :meth:`Tiled.sums`."""
        m, answer, sums = self.matrix, ANSWERS[key], {}
        check_unchanged([m])
        scores, counted, guide = m.scores(), self.counted(over), []
        if guides is not None:
            check_unchanged([other := guides[self.views[0]][0]])
            guide = [other.scores().detach().to(scores.dtype)]
        m.summed = m.summed or torch.is_grad_enabled()
        question = reduce.Question(Scores(scores), m.pairs, key, over, self.sides, params)
        for group, own in question.views():
            values = answer.value(scores, *guide, *own)
            values = values if answer.width == 1 else torch.stack(values)
            if answer.maximum or m.cols is None:
                values = values.masked_fill(counted == 0, -math.inf if answer.maximum else 0.0)
            else:
                values = values * counted
            for side in group:
                sums[side] = values.amax(-1 - side) if answer.maximum else values.sum(-1 - side)
        return torch.cat([sums[side] for side in self.sides], -1) if len(sums) > 1 else sums[self.sides[0]]

    def hardest(self, below: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Tiled.hardest`."""
        m, values, index = self.matrix, [], []
        check_unchanged([m])
        scores = m.scores().detach().masked_fill(self.counted("negatives") == 0, -math.inf)
        limits = reduce.Question(Scores(scores), m.pairs, "peak", "", self.sides, [] if below is None else [below])
        own = {side: params for group, params in limits.views() for side in group}
        for side in self.sides:
            x = scores if below is None else scores.masked_fill(scores >= own[side][0], -math.inf)
            best, where = x.max(1 - side)
            if torch.is_grad_enabled():
                pair_scores = m.pair_scores(*((where, None) if side else (None, where)))
                best = torch.where(best == -math.inf, -math.inf, pair_scores)
            values.append(best)
            index.append(where)
        result = torch.cat(values)
        return result, torch.cat(index).masked_fill(result == -math.inf, -1)

    def sorted_hinges(self, *, margin: float) -> Tensor:
        """See :meth:`Tiled.sorted_hinges`.

        Each candidate is treated as a positive, then masked. The negatives above its threshold are the last of the
        anchor's sorted negatives, and their sum is a cumulative one.
        """
        check_unchanged([self.matrix])
        found = []
        for side in self.sides:
            scores, positive, negative = (
                x.T if side else x for x in (self.matrix.scores(), self.counted("positives"), self.counted("negatives"))
            )
            ordered = scores.masked_fill(negative == 0, -math.inf).sort(dim=1).values
            sums = ordered.masked_fill(ordered == -math.inf, 0.0).flip(1).cumsum(1)
            thresholds = scores - margin
            below = torch.searchsorted(ordered.detach().contiguous(), thresholds.detach().contiguous(), right=True)
            count = scores.shape[1] - below
            above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
            found.append(torch.where(positive == 0, 0.0, above - count * thresholds).sum(1))
        return torch.cat(found)


Group = Sequence[View]  # the same anchors in the matrices that hold their candidates


class Several:
    """Answers of groups of anchors that several backends have the candidates of."""

    def __init__(self, parts: Sequence[tuple[Any, Sequence[tuple[int, int]]]], sizes: Sequence[int]):
        """``sizes``: the number of anchors of each group.

        ``parts``: backends; for each of a backend's views the number of its group, and that of its first candidate in
        the group.
        """
        self.parts, self.sizes = parts, sizes

    def sums(self, *params: Tensor, key: str, **options: Any) -> Tensor:
        """See :meth:`Tiled.sums`."""
        join = torch.maximum if ANSWERS[key].maximum else torch.add
        return self._joined(join, "sums", *params, key=key, **options)

    def counts(self, *, positive: bool) -> Tensor:
        """See :meth:`Tiled.counts`."""
        return self._joined(torch.add, "counts", positive=positive)

    def centre(self) -> Tensor:
        """See :meth:`Tiled.centre`."""
        return self._joined(torch.add, "centre")

    def sorted_hinges(self, *, margin: float) -> Tensor:
        """See :meth:`Tiled.sorted_hinges`; the candidates of a group are in one matrix."""
        return self._joined(torch.add, "sorted_hinges", margin=margin)

    def hardest(self, *below: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Tiled.hardest`; indices are those in a group's candidates."""
        best = []
        for answers in self._answers("hardest", *below):
            parts = [(x, torch.where(index < 0, index, index + first)) for first, x, index in answers]
            best.append(functools.reduce(_better, parts))
        values, indices = zip(*best, strict=True)
        return torch.cat(values), torch.cat(indices)

    def _joined(self, join: Any, *question: Any, **options: Any) -> Tensor:
        groups = self._answers(*question, **options)
        return torch.cat([functools.reduce(join, [x for _, x in answers]) for answers in groups], -1)

    def _answers(self, question: str, *params: Tensor, **options: Any) -> list[list[Any]]:
        """Return for each group the first candidate's number, and the answers (..., A), of all of its matrices."""
        groups: list[list[Any]] = [[] for _ in self.sizes]
        for backend, places in self.parts:
            numbers = [g for g, _ in places]

            def own(x: Tensor, numbers: Sequence[int] = numbers) -> Tensor:
                return x if x.shape[-1] == 1 else torch.cat([x.split(self.sizes, -1)[g] for g in numbers], -1)

            answer = getattr(backend, question)(*map(own, params), **options)
            answer = answer if isinstance(answer, tuple) else (answer,)
            split = (x.split([self.sizes[g] for g in numbers], -1) for x in answer)
            for (g, first), *x in zip(places, *split, strict=True):
                groups[g].append((first, *x))
        return groups


def _better(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the larger of (A,) values, and its index."""
    return tuple(torch.where(b[0] > a[0], y, x) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]


def backend(groups: Sequence[Group]) -> Any:
    """Return what answers for groups of anchors: one backend for all of them if there is one, or :class:`Several`."""
    batches: dict[Any, list[tuple[View, tuple[int, int]]]] = {}
    seen: dict[View, int] = collections.defaultdict(int)
    for g, group in enumerate(groups):
        first = 0
        for matrix, side in group:  # both sides of a matrix together, and once more if they occur again
            batches.setdefault((matrix, seen[matrix, side]), []).append(((matrix, side), (g, first)))
            seen[matrix, side] += 1
            first += matrix.shape[1 - side]
    parts: list[Any] = []
    for (matrix, _), members in batches.items():
        views, places = zip(*sorted(members, key=lambda x: x[0][1]), strict=True)  # the rows first
        kind = matrix.backend or (Dense if matrix.engine == "dense" else Tiled)
        parts.append((kind(views), places))
    if len(parts) == 1 and [g for g, _ in parts[0][1]] == [*range(len(groups))]:
        return parts[0][0]
    return Several(parts, [group[0][0].shape[group[0][1]] for group in groups])
