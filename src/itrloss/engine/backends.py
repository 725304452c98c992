"""The backends of :class:`itrloss.Anchors`: small matrices batched in plain PyTorch, others one by
one, by tiles.
"""

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
from .scores import chunks, full_precision, may_keep

# a matrix, and the side of it that the anchors are: 0 the rows, 1 the columns
View = tuple[Matrix, int]
# for each view, the same anchors in another matrix, whose scores get no gradient
Guides = Mapping[View, View]


class Dense:
    """Answers in plain PyTorch, for several views as one (A, C) batch of scores: half the operators
    of one by one.
    """

    def __init__(self, views: Sequence[View]):
        """``views``: all with the same number of candidates, C."""
        self.views, self.matrices = views, list(dict.fromkeys(matrix for matrix, _ in views))
        self.precomputed = any(matrix.cols is None for matrix in self.matrices)
        self._scores: Tensor | None = None
        self._counted: dict[str, Tensor] = {}

    def scores(self) -> Tensor:
        """Return the (A, C) scores, differentiable."""
        check_unchanged(self.matrices)
        if self._scores is not None:
            return self._scores
        keep = may_keep()
        parts = {matrix: matrix.scores(keep) for matrix in self.matrices}
        # cached with their graph, even if first used under no_grad
        with torch.set_grad_enabled(keep):
            rows = [parts[matrix].T if side else parts[matrix] for matrix, side in self.views]
            scores = torch.cat(rows) if len(rows) > 1 else rows[0]
        self._scores = scores if keep else None
        return scores

    def counted(self, over: str) -> Tensor:
        """Return (A, C) factors, 1 for the pairs that a sum ``over`` negatives, positives or all
        counts, 0 for others.

        A product with them takes a fifth of the time of filling with a bool mask, and makes
        infinite scores nan.
        """
        if over not in self._counted:
            parts: dict[Any, Tensor] = {}
            for pairs in dict.fromkeys(matrix.pairs for matrix in self.matrices):
                part = pairs.excluded(over, slice(None), slice(None))
                part = (
                    torch.zeros(1, 1, dtype=torch.bool, device=pairs.device)
                    if part is None
                    else part
                )
                # As bytes, whose conversion is vectorised: a third of the time at 256 x 256.
                parts[pairs] = (
                    (~part).view(torch.uint8).to(self.matrices[0].dtype).expand(pairs.shape)
                )
            counted = torch.cat(
                [
                    parts[matrix.pairs].T if side else parts[matrix.pairs]
                    for matrix, side in self.views
                ]
            )
            # it cannot be saved for backward
            if not torch.compiler.is_compiling() and counted.is_inference():
                return counted
            self._counted[over] = counted
        return self._counted[over]

    def sums(
        self, *params: Tensor, key: str, over: str = "negatives", guides: Guides | None = None
    ) -> Tensor:
        """Return the sums, or maxima, of the answer ``key`` over each anchor's candidates: (A,), or
        (K, A) of several.

        With ``guides``, the scores of their matrices are the answer's first parameter.
        """
        answer, scores = ANSWERS[key], self.scores()
        guide = (
            []
            if guides is None
            else [Dense([guides[v] for v in self.views]).scores().detach().to(scores.dtype)]
        )
        for matrix in self.matrices:
            matrix.summed = matrix.summed or torch.is_grad_enabled()
        values = answer.value(scores, *guide, *[p.unsqueeze(-1) for p in params])
        values = values if answer.width == 1 else torch.stack(values)
        if answer.maximum:
            return values.masked_fill(self.counted(over) == 0, -math.inf).amax(-1)
        if self.precomputed:
            return values.masked_fill(self.counted(over) == 0, 0.0).sum(-1)
        return (values * self.counted(over)).sum(-1)

    def counts(self, *, positive: bool) -> Tensor:
        """Return the (A,) int64 number of positives, or of negatives, of each anchor."""
        return self.counted("positives" if positive else "negatives").sum(-1).long()

    def centre(self) -> Tensor:
        """Return a sum of scores and their number (2, A), whose quotient is near the mean of each
        anchor's negatives.

        Without a gradient. One positive hardly moves the mean of all candidates, and may be among
        them.
        """
        if self.precomputed:
            return torch.stack([self.sums(key="identity"), self.counts(positive=False)])
        scores = self.scores()
        if all(matrix.pairs.one_to_one for matrix in self.matrices):
            return torch.stack([scores.sum(-1), scores.new_full(scores.shape[:1], scores.shape[1])])
        factors = self.counted("negatives")
        return torch.stack([(scores * factors).sum(-1), factors.sum(-1)])

    def hardest(self, below: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the (A,) scores and indices of each anchor's highest-scoring negative; -inf and -1
        without one.

        ``below``, (A,) or (1,): of the negatives that score below it.
        """
        scores = self.scores().detach()
        mask = self.counted("negatives") == 0
        mask = mask if below is None else mask | (scores >= below[:, None])
        values, index = scores.masked_fill(mask, -math.inf).max(-1)
        if torch.is_grad_enabled():
            scores, view_indices = (
                [],
                index.split([matrix.shape[side] for matrix, side in self.views]),
            )
            for (matrix, side), others in zip(self.views, view_indices, strict=True):
                scores.append(matrix.pair_scores(*((others, None) if side else (None, others))))
            values = torch.where(values == -math.inf, -math.inf, torch.cat(scores))
        return values, index.masked_fill(values == -math.inf, -1)

    def sorted_hinges(self, *, margin: float) -> Tensor:
        """Return the (A,) sums of hinges of all positives against all negatives, without listing
        the positives.

        Each candidate is treated as a positive, then masked. The negatives above its threshold are
        the last of the anchor's sorted negatives, and their sum is a cumulative one.
        """
        scores, positive, negative = (
            self.scores(),
            self.counted("positives"),
            self.counted("negatives"),
        )
        ordered = scores.masked_fill(negative == 0, -math.inf).sort(dim=1).values
        sums = ordered.masked_fill(ordered == -math.inf, 0.0).flip(1).cumsum(1)
        thresholds = scores - margin
        below = torch.searchsorted(
            ordered.detach().contiguous(), thresholds.detach().contiguous(), right=True
        )
        count = scores.shape[1] - below
        above = torch.nn.functional.pad(sums, (1, 0)).gather(1, count)
        return torch.where(positive == 0, 0.0, above - count * thresholds).sum(1)


class Tiled:
    """Answers for one or both sides of a matrix, tile by tile, in PyTorch or in Triton."""

    def __init__(self, views: Sequence[View]):
        """``views``: one or both sides of one matrix, the rows first."""
        self.views, self.matrix, self.sides = views, views[0][0], tuple(side for _, side in views)

    def sums(
        self, *params: Tensor, key: str, over: str = "negatives", guides: Guides | None = None
    ) -> Tensor:
        """See :meth:`Dense.sums`."""
        m, compiling = self.matrix, torch.compiler.is_compiling()
        check_unchanged([m])
        early = (
            ANSWERS[key].exponential
            and self.sides == (0,)
            and m.cols is not None
            and not m.cols.requires_grad
        )
        source, pairs = list(m.source(form=not early)), None if compiling else m.pairs
        if guides is not None:
            check_unchanged([guide := guides[self.views[0]][0]])
            source += [None if x is None else x.detach() for x in guide.source(form=True)]
        question = key, over, self.sides, m.engine == "triton"
        if not torch.is_grad_enabled():
            sums = reduce.sums(source, list(params), *question, False, pairs=pairs)[0]
            return sums[0] if len(sums) == 1 else sums
        listed = (
            not (early or compiling or m.cols is None)
            and m.pairs.listable
            and m._positive_scores is None
        )
        index = ((None, None) if m.pairs.one_to_one else m.pairs.listed) if listed else None
        sums, positive = reduce.Reduce.apply(pairs, question, index, len(source), *source, *params)
        m._positive_scores = positive if listed else m._positive_scores
        return sums[0] if len(sums) == 1 else sums

    def counts(self, *, positive: bool) -> Tensor:
        """See :meth:`Dense.counts`."""
        return torch.cat(
            [self.matrix.pairs.counts(side)[0 if positive else 1] for side in self.sides]
        )

    def centre(self) -> Tensor:
        """See :meth:`Dense.centre`. Several positives may score far from the negatives: they are
        subtracted.
        """
        m, sums = self.matrix, []
        if m.keeps or m.cols is None:
            return torch.stack([self.sums(key="identity"), self.counts(positive=False)])
        source: Any = m.source()
        with full_precision(m.rows):
            for side in self.sides:
                parts = (source.unit(1 - side, part).sum(0) for part in chunks(source[1 - side]))
                other = functools.reduce(torch.add, parts)
                sums.append(
                    torch.cat([source.unit(side, part) @ other for part in chunks(source[side])])
                )
        if m.pairs.one_to_one or not m.pairs.listable:
            numbers = [
                x.new_full(x.shape, m.shape[1 - side])
                for side, x in zip(self.sides, sums, strict=True)
            ]
            return torch.stack([torch.cat(sums), torch.cat(numbers)])
        for side, x in zip(self.sides, sums, strict=True):
            x.sub_(segment_sum(m.positive_scores().detach(), m.pairs.listed[side], len(x)))
        return torch.stack([torch.cat(sums), self.counts(positive=False)])

    def hardest(self, below: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Dense.hardest`; the gradient of a score goes to the embeddings of its pair
        alone.
        """
        m = self.matrix
        check_unchanged([m])
        values, index = self._hardest(below)
        if torch.is_grad_enabled() and any(
            x is not None and x.x.requires_grad for x in m.embeddings
        ):
            own = torch.cat([torch.arange(m.shape[side], device=m.device) for side in self.sides])
            others, rows = index.clamp_min(0), 0 if self.sides == (1,) else m.shape[0]
            hardest_pairs = [
                torch.cat([x[:rows], y[rows:]]) for x, y in ((own, others), (others, own))
            ]
            # With the positives, where they can be listed: one gradient of all embeddings less,
            # 0.88 of the time (python -m benchmarks --losses "triplet hardest" --shapes
            # 512x512x1024, with and without).
            with_positives = (
                m.pairs.listable and m._positive_scores is None and self._few(m.pairs.listed[0])
            )
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
        """See :meth:`Dense.sorted_hinges`."""
        whole = self.matrix.as_dense()
        return torch.cat(
            [Dense([(whole, side)]).sorted_hinges(margin=margin) for side in self.sides]
        )


Group = Sequence[View]  # the same anchors in the matrices that hold their candidates


class Several:
    """Answers of groups of anchors that several backends have the candidates of."""

    def __init__(
        self, parts: Sequence[tuple[Any, Sequence[tuple[int, int]]]], sizes: Sequence[int]
    ):
        """``sizes``: the number of anchors of each group.

        ``parts``: backends; for each of a backend's views the number of its group, and that of its
        first candidate in the group.
        """
        self.parts, self.sizes = parts, sizes

    def sums(self, *params: Tensor, key: str, **options: Any) -> Tensor:
        """See :meth:`Dense.sums`."""
        join = torch.maximum if ANSWERS[key].maximum else torch.add
        return self._joined(join, "sums", *params, key=key, **options)

    def counts(self, *, positive: bool) -> Tensor:
        """See :meth:`Dense.counts`."""
        return self._joined(torch.add, "counts", positive=positive)

    def centre(self) -> Tensor:
        """See :meth:`Dense.centre`."""
        return self._joined(torch.add, "centre")

    def sorted_hinges(self, *, margin: float) -> Tensor:
        """See :meth:`Dense.sorted_hinges`; the candidates of a group are in one matrix."""
        return self._joined(torch.add, "sorted_hinges", margin=margin)

    def hardest(self, *below: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Dense.hardest`; indices are those in a group's candidates."""
        best = []
        for answers in self._answers("hardest", *below):
            parts = [
                (x, torch.where(index < 0, index, index + first)) for first, x, index in answers
            ]
            best.append(functools.reduce(_better, parts))
        values, indices = zip(*best, strict=True)
        return torch.cat(values), torch.cat(indices)

    def _joined(self, join: Any, *question: Any, **options: Any) -> Tensor:
        groups = self._answers(*question, **options)
        return torch.cat(
            [functools.reduce(join, [x for _, x in answers]) for answers in groups], -1
        )

    def _answers(self, question: str, *params: Tensor, **options: Any) -> list[list[Any]]:
        """Return for each group the first candidate's number, and the answers (..., A), of all of
        its matrices.
        """
        groups: list[list[Any]] = [[] for _ in self.sizes]
        for backend, places in self.parts:
            numbers = [g for g, _ in places]

            def own(x: Tensor, numbers: Sequence[int] = numbers) -> Tensor:
                return (
                    x
                    if x.shape[-1] == 1
                    else torch.cat([x.split(self.sizes, -1)[g] for g in numbers], -1)
                )

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
    """Return what answers for groups of anchors: one backend for all of them if there is one, or
    :class:`Several`.
    """
    batches: dict[Any, list[tuple[View, tuple[int, int]]]] = {}
    seen: dict[View, int] = collections.defaultdict(int)
    # compared one by one: as keys they would have the compiler specialise on each
    widths: list[int] = []
    for g, group in enumerate(groups):
        first = 0
        for matrix, side in group:
            widths.append(matrix.shape[1 - side])
            # Dense matrices by their number of candidates; others one by one, and once more if they
            # occur again.
            batch: Any = matrix, seen[matrix, side]
            if matrix.engine == "dense":
                batch = next(k for k, x in enumerate(widths) if x == widths[-1])
            batches.setdefault(batch, []).append(((matrix, side), (g, first)))
            seen[matrix, side] += 1
            first += widths[-1]
    parts: list[Any] = []
    for batch, members in batches.items():
        dense = isinstance(batch, int)
        ordered = members if dense else sorted(members, key=lambda x: x[0][1])  # the rows first
        views, places = zip(*ordered, strict=True)
        kind = Dense if dense else views[0][0].backend or Tiled
        parts.append((kind(views), places))
    if len(parts) == 1 and [g for g, _ in parts[0][1]] == [*range(len(groups))]:
        return parts[0][0]
    return Several(parts, [group[0][0].shape[group[0][1]] for group in groups])
