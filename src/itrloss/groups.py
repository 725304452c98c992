"""Groups of anchors: how many there are, who answers for them, and what losses make of answers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .checks import one_of
from .engine.backends import Group, View, backend
from .engine.exchange import Exchange, Sharded

Reduction = Literal["mean", "sum", "none"]


def _same_anchors(group: Group) -> bool:
    """Return whether the matrices of a group are of one batch that processes share, or of none.

    Another batch may hold further candidates of the same anchors, if each process has all of an
    anchor's candidates.
    """
    shares: list[Any] = [matrix.share for matrix, _ in group]
    if len({None if share is None else share.processes for share in shares}) == 1:
        return True
    if any(
        share is None or share.spread == side
        for share, (_, side) in zip(shares, group, strict=True)
    ):
        return False
    return (
        len(
            {
                (x.processes.group, x.unpadded[side])
                for x, (_, side) in zip(shares, group, strict=True)
            }
        )
        == 1
    )


class Groups:
    """Groups of anchors, each with its candidates in one or several matrices; the base of
    :class:`itrloss.Anchors`.
    """

    def __init__(self, *groups: Group):
        """``groups``: for each, the matrices that hold its candidates, and which side of each its
        anchors are.
        """
        self._groups = groups
        self._backend: Any = None  # what answers for all groups, made at the first question
        self._index: Tensor | None = None  # (P,) anchors of the positive pairs
        matrices = [matrix for group in groups for matrix, _ in group]
        self._matrix, self._side = groups[0][0]
        self.dtype, self.device = self._matrix.dtype, self._matrix.device
        firsts = [group[0] for group in groups]
        if len({None if m.share is None else m.share.processes for m in matrices}) > 1 and not (
            len({m.share and m.share.processes for m, _ in firsts}) == 1
            and all(map(_same_anchors, groups))
        ):
            raise ValueError(
                "anchors: expected those of one batch that processes share, or of none"
            )
        #: What is exchanged with other processes; None: nothing.
        self.exchange = None if self._matrix.share is None else Exchange(firsts)
        self.whole_sizes = [matrix.shape[side] for matrix, side in firsts]
        #: Number of anchors in each group.
        self.sizes = self.whole_sizes if self.exchange is None else self.exchange.sizes
        self._size = sum(self.sizes)
        # compared one by one: a set of sizes would have the compiler specialise on each
        self.of_one_size = all(size == self.sizes[0] for size in self.sizes)
        #: Whether anchor i of each group matches its candidate i and nothing else.
        self.one_to_one = len(matrices) == len(groups) and all(
            matrix.pairs.one_to_one for matrix in matrices
        )
        #: Whether all anchors certainly have a positive and a negative.
        self._complete = self.one_to_one and min(self.sizes) > 1
        # whether scores certainly lie in [-1, 1]
        self._bounded = all(matrix.bounded for matrix in matrices)

    def __len__(self) -> int:
        """Return the number of anchors, A."""
        return self._size

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor (..., A) that belong to each group."""
        return x.split(self.sizes, -1)

    @property
    def positive_counts(self) -> Tensor:
        """The (A,) int64 number of candidates that match each anchor."""
        return self._answer("counts", positive=True)

    @property
    def negative_counts(self) -> Tensor:
        """The (A,) int64 number of candidates that do not match each anchor."""
        return self._answer("counts", positive=False)

    def _answer(
        self, question: str, *params: Tensor, guide: Groups | None = None, **options: Any
    ) -> Any:
        """Return what a method of the backend returns, see :class:`itrloss.engine.backends.Dense`:
        (..., A), or two.
        """
        if self._backend is None:
            local = backend(self._groups)
            self._backend = local if self.exchange is None else Sharded(self.exchange, local)
        if guide is not None:
            options["guides"] = self._views_of(guide)
        return getattr(self._backend, question)(*params, **options)

    def _views_of(self, guide: Groups) -> dict[View, View]:
        """Return, for each view of a matrix, that of the guide's matrix with the scores of the same
        pairs.
        """
        if not isinstance(guide, Groups):
            raise TypeError(
                f"guide: expected the same anchors of another Similarity, got {type(guide).__name__}"
            )
        own, others = ([view for group in x._groups for view in group] for x in (self, guide))
        layouts = [
            [
                [(m.shape, side, m.share and m.share.unpadded) for m, side in group]
                for group in x._groups
            ]
            for x in (self, guide)
        ]
        views = dict(zip(own, others, strict=False))
        if layouts[0] != layouts[1] or any(
            views[view] != other for view, other in zip(own, others, strict=True)
        ):
            shapes = [[m.shape for group in x._groups for m, _ in group] for x in (guide, self)]
            got = f"matrices of {shapes[0]} for {shapes[1]}"
            raise ValueError(f"guide: expected the same anchors and candidates, got {got}")
        if any(m.backend is not None for m, _ in (*own, *others)):
            raise ValueError("guide: expected schedule='all-gather' of all similarities")
        return views

    # ------------------------------------------------------------------------------------ reduction

    def valid(self) -> Tensor | None:
        """Return the (A,) bool mask of anchors with a positive and a negative; None: all of them."""
        if self._complete:
            return None
        return (self.positive_counts > 0) & (self.negative_counts > 0)

    def reduce(self, values: Tensor, reduction: Reduction, valid: Tensor | None = None) -> Any:
        """Return the values (A,) reduced: ``"mean"``, ``"sum"``, or ``"none"`` for the values of
        each group.

        ``"mean"`` adds up the means over each group's ``valid`` anchors (default: :meth:`valid`).
        An anchor that is not valid contributes 0 and does not count in a mean.
        """
        if reduction not in ("mean", "sum", "none"):
            one_of("reduction", reduction, "mean", "sum", "none")
        if valid is None and not self._complete:
            valid = self.valid()
        if valid is not None:
            values = torch.where(valid, values, 0.0)
        if reduction == "none":
            return self.existing(values)
        if reduction == "sum":
            return self.total(values.sum())
        if self.exchange is not None and valid is not None:  # sums and numbers in one exchange
            both = torch.stack(
                [
                    torch.stack([x.sum() for x in y.split(self.sizes)])
                    for y in (values, valid.to(values))
                ]
            )
            sums, counts = self.total(both)
            return (sums / counts.clamp_min(1)).sum()
        if valid is None and self.of_one_size:
            return values.sum() / self.sizes[0]
        counts: Any = self.sizes
        if valid is not None:
            counts = torch.stack([v.sum() for v in valid.split(self.sizes)]).clamp_min(1)
        return sum(
            x.sum() / count for x, count in zip(values.split(self.sizes), counts, strict=True)
        )

    def per_pair(self, sums: Tensor) -> Tensor:
        """Return (A,) ``sums`` over positives, scaled so that a group's mean over valid anchors is
        that over pairs.
        """
        valid = self.valid()
        if self.one_to_one or valid is None:
            return sums
        positives = [x.sum() for x in (self.positive_counts * valid).split(self.sizes)]
        anchors, pairs = (
            self.total(torch.stack([*(v.sum() for v in self.split(valid)), *positives]))
            .clamp_min(1)
            .chunk(2)
        )
        # Multiplied first: a quotient of integer counts would be float32 even for float64 sums.
        return torch.cat(
            [x * v / n for x, v, n in zip(self.split(sums), anchors, pairs, strict=True)]
        )

    def total(self, x: Tensor) -> Tensor:
        """Return ``x``; of a sharded batch, its sum over all processes."""
        return x if self.exchange is None else self.exchange.processes.total(x)

    def gathered(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., A); of a sharded batch, for the matrices' anchors."""
        return x if self.exchange is None else self.exchange.gathered(x)

    def merged(self, x: Tensor, maximum: bool = False) -> Tensor:
        """Return ``x``; of a sharded batch, its sum, or ``maximum``, (..., A) over the matrices of
        all processes.
        """
        return x if self.exchange is None else self.exchange.merged(x, maximum)

    def group_amax(self, x: Tensor) -> list[Tensor]:
        """Return the () largest value of ``x`` (A,) in each group; of a sharded batch, over all
        processes.

        As ``amax``, it distributes the gradient evenly between equal values.
        """
        best = [part.amax() for part in x.split(self.sizes)]
        return best if self.exchange is None else self.exchange.group_amax(x, torch.stack(best))

    def existing(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of values (A,) that belong to each group, without those of a sharded
        batch's padding.
        """
        parts = self.split(values)
        return parts if self.exchange is None else self.exchange.existing(parts)
