"""Anchors, and the sums, means, extremes and other answers over the candidates of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import as_tensor, as_value, check_number, one_of
from .distributed.shards import AnchorGroup, Exchange, Share
from .engine.matrix import Matrix
from .engine.question import Question, Value, affine, has_each, joined
from .engine.relation import FEW, Over, segment_sum, slots
from .engine.terms import (
    SOFTPLUS_LINEAR,
    Function,
    Term,
    as_term,
    excess,
    exponential,
    identity,
    information,
    square,
)
from .engine.tiled import Hardest, joined_moments
from .engine.vectors import host_may_read, may_keep

Limit = float | Tensor | None
Reduction = Literal["mean", "sum", "none"]

SAFE_EXPONENT = 60.0  # exp(±60), and long sums of it, neither overflow nor underflow in float32
LOWEST_SUM = math.exp(-40)  # 1 / sum², of which a second derivative is made, does not overflow


class MeanStd(NamedTuple):
    """Mean and population standard deviation (at least 1e-6) of each anchor's negatives.

    Both are (A,), 0 without any negatives.
    """

    mean: Tensor
    std: Tensor


class SoftmaxParts(NamedTuple):
    """The log-sum-exp of the scores of all candidates, and sums over negatives and over positives
    of their softmax p; (A,) each.
    """

    logsumexp: Tensor
    negatives: Tensor  # of p
    log_negatives: Tensor  # of p log p
    positives: Tensor
    log_positives: Tensor


class SoftmaxSums(NamedTuple):
    """Sums of exponentials ``e^z`` with ``z = scale S + shift``; (A,) each, but for the shift."""

    shift: Value
    negatives: Tensor
    weighted: Tensor  # of ``z e^z`` over the negatives
    positives: Tensor
    total: Tensor


class AnchorSide(NamedTuple):
    """Anchors that are one side of a matrix; their candidates are the other side."""

    matrix: Matrix
    side: int  # 0: the rows are the anchors; 1: the columns are
    share: Share | None = None  # of a batch that several processes share
    # Of a matrix with several groups of anchors on this side: how many groups come before, with the
    # first of which the matrix lists its pairs, and how many anchors are in this one.
    before: int = 0
    own_size: int | None = None

    @property
    def size(self) -> int:
        """The number of anchors."""
        return self.matrix.shape[self.side] if self.own_size is None else self.own_size


class Block(NamedTuple):
    """A matrix whose rows, columns or both are anchors, computed in one pass."""

    matrix: Matrix
    sides: tuple[int, ...]  # the rows first
    groups: tuple[int, ...]  # the numbers of its groups of anchors: one a side, or several
    firsts: tuple[int, ...]  # for each group, the number of its first candidate in the group

    @property
    def size(self) -> int:
        """The number of anchors."""
        n, m = self.matrix.shape
        if len(self.sides) == 2:
            return n + m
        return m if self.sides[0] else n

    def with_side(self, side: AnchorSide, group: int, first: int) -> Block:
        """Return the block with further anchors of the same matrix."""
        if side.before:
            return Block(self.matrix, self.sides, (*self.groups, group), (*self.firsts, first))
        if side.side == 0:
            return Block(self.matrix, (0, 1), (group, *self.groups), (first, *self.firsts))
        return Block(self.matrix, (0, 1), (*self.groups, group), (*self.firsts, first))


def blocks_of(groups: Sequence[Sequence[AnchorSide]]) -> list[Block]:
    """Return the matrices of groups of anchors, each once for both of its sides."""
    blocks: list[Block] = []
    for number, group in enumerate(groups):
        first = 0
        for side in group:
            for k, block in reversed(list(enumerate(blocks))):
                if block.matrix is not side.matrix:
                    continue
                if side.before:
                    is_next = len(block.groups) == side.before
                else:
                    is_next = block.sides == (1 - side.side,)
                if is_next:
                    blocks[k] = block.with_side(side, number, first)
                    break
            else:
                blocks.append(Block(side.matrix, (side.side,), (number,), (first,)))
            first += side.matrix.shape[1 - side.side]
    return blocks


class Anchors:
    """The anchors of similarity matrices: rows of one, its columns, both, or the rows of several.

    Each anchor has candidates, the other side of its matrix. An answer is one vector (A,) over all
    anchors, group after group; :meth:`split` returns its parts. A parameter holds one value per
    anchor, in the same order, or one for all. All answers are differentiable unless they say
    otherwise.

    Anchors come from a :class:`itrloss.Similarity`, which is one (its rows), from its ``both``,
    from :meth:`together` and from :meth:`pooled`.
    """

    def __init__(self, *groups: Sequence[AnchorSide]):
        """Store groups of anchors; each has its candidates in one or several matrices."""
        self._groups = groups
        self._blocks = blocks_of(groups)
        #: Whether the blocks have all groups in order, so that their answers are in order, too.
        of_blocks: tuple[int, ...] = ()
        for block in self._blocks:
            of_blocks += block.groups
        self._in_order = of_blocks == tuple(range(len(groups)))
        self._has_one_block = self._in_order and len(self._blocks) == 1
        first = groups[0][0].matrix
        self.dtype = first.dtype
        self.device = first.device
        #: Whether anchor i of each group matches its candidate i and nothing else.
        self.one_to_one = True
        #: Whether scores certainly lie in [-1, 1].
        self.bounded = True
        #: Whether matches have weights that are not all 1.
        self.has_weights = False
        self.whole_sizes: list[int] = []
        is_shared = False
        for group in groups:
            self.whole_sizes.append(group[0].size)
            for side in group:
                matrix = side.matrix
                is_alone = len(group) == 1 and side.own_size is None
                self.one_to_one = self.one_to_one and is_alone and matrix.relation.one_to_one
                self.bounded = self.bounded and matrix.bounded
                self.has_weights = self.has_weights or matrix.relation.has_weights
                is_shared = is_shared or side.share is not None
        #: What is exchanged with other processes; None: nothing.
        self.exchange = exchange_of(groups) if is_shared else None
        #: Number of anchors in each group.
        self.sizes = self.whole_sizes if self.exchange is None else self.exchange.sizes
        # The compiler specialises on what `len` returns, but not on this sum.
        self._size = sum(self.sizes)
        #: Whether all groups have as many anchors.
        self.of_one_size = True
        for size in self.sizes:  # one by one: a set would have the compiler specialise on each
            self.of_one_size = self.of_one_size and size == self.sizes[0]
        #: Whether all anchors certainly have a positive and a negative; None: not looked at.
        self._known_complete = min(self.sizes) > 1 if self.one_to_one else None
        self._index: Tensor | None = None  # (P,) anchors of the positive pairs
        self._known_valid: Tensor | None = None  # (A,) bool
        self._known_counts: dict[bool, Tensor] = {}  # (A,) numbers of positives (True), negatives

    @property
    def _complete(self) -> bool:
        """Whether all anchors certainly have a positive and a negative."""
        if self._known_complete is None:
            self._known_complete = self._is_complete()
        return self._known_complete

    def _is_complete(self) -> bool:
        """Return what :attr:`_complete` keeps."""
        if self.exchange is not None:
            return False
        for group in self._groups:
            side = group[0]
            if len(group) > 1 or side.matrix.is_memory:
                return False
            if not side.matrix.relation.is_complete(side.side):
                return False
        return True

    def __len__(self) -> int:
        """Return the number of anchors, A."""
        return self._size

    @staticmethod
    def together(*anchors: Anchors) -> Anchors:
        """Return the anchors of all, one after the other, each with its own candidates."""
        groups = [group for several in anchors for group in several._groups]
        return Anchors(*groups)

    @staticmethod
    def pooled(*anchors: Anchors) -> Anchors:
        """Return the same anchors with the candidates of all, such as the blocks of a gallery.

        >>> v, w = torch.randn(3, 4), torch.randn(6, 4)
        >>> ids = torch.arange(3), torch.arange(6) % 3
        >>> blocks = [Similarity(v, x, ids[0], i) for x, i in zip(w.split(2), ids[1].split(2))]
        >>> whole = Similarity(v, w, *ids).logsumexp(5.0)
        >>> torch.allclose(Anchors.pooled(*blocks).logsumexp(5.0), whole, atol=1e-6)
        True
        """
        groups = []
        for parts in zip(*(several._groups for several in anchors), strict=True):
            group = [side for part in parts for side in part]
            if len({side.size for side in group}) > 1:
                raise ValueError("anchors: expected as many anchors in each block")
            groups.append(group)
        return Anchors(*groups)

    @property
    def both(self) -> Anchors:
        """These anchors; of a :class:`itrloss.Similarity`, its rows and its columns."""
        return self

    def detach(self) -> Anchors:
        """Return the same anchors of similarities without a gradient."""
        return self._of_others([block.matrix.detach() for block in self._blocks])

    def _of_others(self, matrices: Sequence[Matrix]) -> Anchors:
        """Return the same anchors of other matrices, one for each block."""
        own = [block.matrix for block in self._blocks]
        twins = list(zip(own, matrices, strict=True))
        groups = []
        for group in self._groups:
            groups.append([side._replace(matrix=twin_of(side.matrix, twins)) for side in group])
        return Anchors(*groups)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor (..., A) that belong to each group."""
        return x.split_with_sizes(self.sizes, -1)  # x.split is a function in Python

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of the matrices of each group; of a part of one, that of the part."""
        shapes = []
        for group in self._groups:
            for side in group:
                n, m = side.matrix.shape
                shapes.append((n if side.own_size is None else side.own_size, m))
        return shapes

    # ----------------------------------------------------------------------------- asking matrices

    def _sum(self, question: Question, guide: Anchors | None = None) -> Tensor:
        """Return the sums (A,) of a question; ``guide``: of whose scores the limits are, or whose
        scores the term takes.
        """
        answers = []
        for matrix, own, other in self._of_blocks(question, guide):
            answers.append(matrix.sums(own, other))
        total = self._joined(answers, torch.add)
        return total if self.exchange is None else self.exchange.merged(total)

    def _highest(self, question: Question, guide: Anchors | None = None) -> Tensor:
        """Return (A,) ``max_j scale_i S_ij``, 0 without candidates; without a gradient."""
        answers = []
        for matrix, own, other in self._of_blocks(question, guide):
            answers.append(matrix.highest(own, other))
        top = self._joined(answers, torch.maximum)
        if self.exchange is not None:
            top = self.exchange.merged_largest(top)
        return top.masked_fill(top == -math.inf, 0.0)

    def _gathered(self, values: Sequence[Value | None]) -> Sequence[Value | None]:
        """Return the values of the matrices' anchors from the values of own anchors."""
        if self.exchange is None:
            return values
        return [self.exchange.gathered(x) if has_each(x) else x for x in values]

    def _of_blocks(
        self, question: Question, guide: Anchors | None = None
    ) -> list[tuple[Matrix, Question, Matrix | None]]:
        """Return each matrix, its question with its anchors' values, and the guide's matrix."""
        questions = [question] * len(self._blocks)
        if self.exchange is not None or not self._has_one_block:
            values = zip(*map(self._by_block, self._gathered(question.values)), strict=True)
            questions = [question.with_values(own) for own in values]
        others: Sequence[Matrix | None] = [None] * len(self._blocks)
        if guide is not None:
            others = self._others(guide)
        of_blocks = []
        for block, own, other in zip(self._blocks, questions, others, strict=True):
            own = own._replace(relation=block.matrix.relation, sides=block.sides)
            of_blocks.append((block.matrix, own, other))
        return of_blocks

    def _by_block(self, x: Value | None) -> Sequence[Value | None]:
        """Return each block's part of the values (..., A) of the matrices' anchors, or the one
        number for all.
        """
        if not isinstance(x, Tensor) or x.numel() == 1:
            return [x] * len(self._blocks)
        if self._in_order:
            return x.split_with_sizes([block.size for block in self._blocks], -1)
        of_groups = x.split_with_sizes(self.whole_sizes, -1)
        parts = []
        for block in self._blocks:
            parts.append(joined([of_groups[g] for g in block.groups], -1))
        return parts

    def _others(self, guide: Anchors) -> list[Matrix]:
        """Return, for each block, the guide's matrix with the scores of the same pairs."""
        if not isinstance(guide, Anchors):
            got = type(guide).__name__
            raise TypeError(f"guide: expected the same anchors of another Similarity, got {got}")
        if self._layout() != guide._layout():
            got = f"matrices of {guide.shapes} for {self.shapes}"
            raise ValueError(f"guide: expected the same anchors and candidates, got {got}")
        return [block.matrix for block in guide._blocks]

    def _layout(self) -> list[object]:
        """Return what two sets of anchors have alike if they have the same candidates."""
        layout: list[object] = []
        for block in self._blocks:
            layout.append((block.matrix.shape, block.sides, block.groups, block.firsts))
        for group in self._groups:
            for side in group:
                layout.append(None if side.share is None else list(side.share.unpadded))
        return layout

    def _joined(
        self,
        answers: Sequence[Tensor],  # (..., A_b) of each block
        join: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the answers (..., A) of all anchors of the matrices."""
        if self._has_one_block:
            return answers[0]
        if self._in_order:
            return torch.cat(list(answers), -1)
        parts: list[list[Tensor]] = [[] for _ in self.whole_sizes]
        for block, answer in zip(self._blocks, answers, strict=True):
            of_groups = [answer]
            if len(block.groups) > 1:
                of_groups = answer.split([self.whole_sizes[g] for g in block.groups], -1)
            for g, part in zip(block.groups, of_groups, strict=True):
                parts[g].append(part)
        return torch.cat([functools.reduce(join, of_group) for of_group in parts], -1)

    # ----------------------------------------------------------------------------- numbers of pairs

    @property
    def positive_counts(self) -> Tensor:
        """The (A,) int64 number of candidates that match each anchor; a copy."""
        return self.counts(positive=True).to(torch.int64, copy=True)

    @property
    def negative_counts(self) -> Tensor:
        """The (A,) int64 number of candidates that do not match each anchor; a copy."""
        return self.counts(positive=False).to(torch.int64, copy=True)

    def counts(self, positive: bool) -> Tensor:
        """Return the (A,) numbers of positives, or of negatives, counted once: not to be written
        to.
        """
        if positive in self._known_counts:
            return self._known_counts[positive]
        counts = self._local_counts(positive)
        if self.exchange is not None:
            counts = self.exchange.counts(counts, positive)
        if may_keep():
            self._known_counts[positive] = counts
        return counts

    def _local_counts(self, positive: bool) -> Tensor:
        """Return the numbers of positives, or of negatives, of the matrices' anchors."""
        answers = []
        for block in self._blocks:
            own = []
            for side in block.sides:
                own.append(block.matrix.relation.counts(side, positive))
            answers.append(joined(own))
        return self._joined(answers, torch.add)

    # ------------------------------------------------------------------------------ log-sum-exp

    def logsumexp(
        self,
        scale: float | Tensor = 1.0,
        *,
        over: Over = "negatives",
        below: Limit = None,
        above: Limit = None,
        guide: Anchors | None = None,
        at_most: float | None = None,
    ) -> Tensor:
        """Return (A,) ``log sum_j exp(scale_i S_ij)`` over each anchor's negatives, or others.

        ``scale`` is a number, a tensor of one value, or one of (A,); it gets its gradient. ``over``
        is "negatives", "positives" or "all" candidates. ``below``, ``above``: see :meth:`sum`; with
        a ``guide``, the same anchors of another model's similarities, they are limits of its
        scores. ``at_most``: a bound of the scales' sizes that the caller knows, which spares a look
        at a tensor. The result is -inf for an empty sum.
        """
        question = self._question(exponential, over, below, above)
        if guide is not None and not question.limited:
            raise ValueError("guide: expected below or above, limits of its scores")
        a = as_value("scale", scale, self._size, self.dtype, self.device)
        if over == "positives" and not question.limited:
            return self._logsumexp_of_positives(a)
        question = question._replace(scale=a)
        if at_most is None:
            at_most = self._largest_size(a)
        shift = self._safe_shift(at_most)
        if shift is not None:
            total = self._sum(question._replace(shift=-shift if shift else None), guide)
            if shift == 0 or not self._may_have_underflown(total.detach(), over):
                never_empty = self._complete and not question.limited
                return shifted_log(total, shift, never_empty)
        top = self._highest(question, guide)
        total = self._sum(question._replace(shift=-top), guide)
        return shifted_log(total, top, never_empty=False)

    def log1p_sum_exp(
        self, scale: float | Tensor, margin: float | Tensor, *, at_most: float | None = None
    ) -> Tensor:
        """Return (A,) ``log(1 + sum_j exp(scale_i (S_ij - margin_i)))`` over each anchor's
        negatives.

        Next to 1, what underflows weighs nothing, so that one pass does where exponents are at most
        60: cosines, and scales up to ``60 / (1 - margin)``. ``at_most``: see :meth:`logsumexp`.
        """
        if at_most is None:
            at_most = self._largest_size(scale)
        if (
            self.bounded
            and at_most is not None
            and not isinstance(margin, Tensor)
            and at_most * (1 - margin) <= SAFE_EXPONENT
        ):
            question = Question(exponential, scale=scale, shift=-margin * scale)
            return self._sum(question).log1p()
        negatives = self.logsumexp(scale, at_most=at_most)
        return F.softplus(negatives - margin * scale, threshold=SOFTPLUS_LINEAR)

    def _safe_shift(self, at_most: float | None) -> float | None:
        """Return one shift of all exponents that keeps them below 60, or None if that is not safe.

        Scores within [-1, 1] have exponents within the largest scale, and up to a scale of 60
        nothing can overflow or underflow. Beyond it, a sum underflows only if its best score is
        below ``1 - 100 / scale``, which is looked for afterwards. The maximum of each anchor in
        place of this one number would take a further pass over the scores: 0.200 for 0.167 s of HAL
        at 2048 x 512 (``python -m benchmarks --losses hal --shapes 2048x2048x512``, with and
        without). None for a tensor that the host cannot read without waiting for it.
        """
        if not self.bounded:
            return None
        if at_most is None or at_most > 3 * SAFE_EXPONENT:
            return None
        if at_most > SAFE_EXPONENT and not self._blocks[0].matrix.host_may_read():
            return None
        return max(0.0, at_most - SAFE_EXPONENT)

    def _largest_size(self, scale: Value) -> float | None:
        """Return the largest size of the scales, of all processes; None if the host cannot read."""
        if not isinstance(scale, Tensor):
            return abs(scale)
        if not host_may_read(scale):
            return None
        largest = float(scale.detach().abs().amax())
        if self.exchange is not None and has_each(scale):
            return self.exchange.processes.largest(largest)
        return largest

    def _may_have_underflown(self, total: Tensor, over: Over) -> bool:
        """Return whether the sum of an anchor with candidates, of any process, underflowed."""
        lowest = float(total.amin())
        # All processes have to take the same path. Of unknown pairs, all are candidates.
        is_known = all(block.matrix.relation.is_known for block in self._blocks)
        if is_known and not self._complete and (lowest == 0 or self.exchange is not None):
            count = self.counts(positive=over == "positives")
            if over == "all":
                count = count + self.counts(positive=True)
            lowest = float(total.masked_fill(count == 0, math.inf).amin())
        if self.exchange is not None:
            lowest = -self.exchange.processes.largest(-lowest)
        return lowest < LOWEST_SUM

    def _logsumexp_of_positives(self, scale: Value) -> Tensor:
        """Return :meth:`logsumexp` over positives."""
        if self._lists_positives():
            top = self._top_of_positives(scale)
        else:
            top = self._highest(Question(exponential, over="positives", scale=scale))
        total = self.sum_of_positives(exponential, scale=scale, shift=-top)
        return shifted_log(total, top, never_empty=False)

    def _top_of_positives(self, scale: Value) -> Tensor:
        """Return (A,) the largest ``scale S_ip`` of each anchor's positives, 0 without any."""
        scores, index = self._positives()
        if index is None:
            return (scores * scale).detach()
        own_scale = scale
        if has_each(scale):
            (gathered,) = self._gathered([scale])
            assert isinstance(gathered, Tensor)
            own_scale = gathered[index]
        exponents = (scores * own_scale).detach()
        top = exponents.new_full((sum(self.whole_sizes),), -math.inf)
        top = top.scatter_reduce(0, index, exponents, "amax")
        if self.exchange is not None:
            top = self.exchange.merged_largest(top)
        return top.masked_fill(top == -math.inf, 0.0)

    # --------------------------------------------------------------------------- other answers

    def mean_std(self) -> MeanStd:
        """Return the (A,) means and population standard deviations of each anchor's negatives."""
        return MeanStd(self._sum(Question(identity)) / self._negative_counts(), self.std())

    def std(self) -> Tensor:
        """Return the (A,) standard deviations of :meth:`mean_std`, without the means."""
        if torch.is_grad_enabled():
            # About the mean, no digits of the squares cancel. Its own gradient is 0 there, but not
            # its second derivative.
            count = self._negative_counts()
            shift = self._sum(Question(identity)) / -count
            variance = self._sum(Question(square, shift=shift)) / count
            return variance.clamp_min(1e-12).sqrt()
        if self.exchange is None and self._in_order:
            parts = [block.matrix.std(block.sides) for block in self._blocks]
            return self._joined(parts, torch.add).clamp_min(1e-6)
        of_blocks = [block.matrix.moments(block.sides) for block in self._blocks]
        moments = self._joined(of_blocks, joined_moments)
        if self.exchange is not None:
            moments = self.exchange.merged_moments(moments)
        number, _, squares = moments
        return (squares / number.clamp_min(1)).sqrt().clamp_min(1e-6)

    def _negative_counts(self) -> Any:
        """Return the number of negatives of each anchor, (A,) or one number, at least 1."""
        if self.one_to_one and self.of_one_size and self.exchange is None:
            return max(1, self.sizes[0] - 1)
        return self.counts(positive=False).clamp_min(1)

    def entropy(self, temperature: float = 1.0) -> Tensor:
        """Return (A,) ``-sum_j P_ij log2 P_ij`` over each anchor's negatives.

        ``P_i`` is the softmax of ``S_i / temperature`` over all candidates. For embeddings in half
        precision, Triton rounds the gradients of three sums, up to ``1 / temperature`` times as
        large as the gradient of the entropy, to that precision before they cancel.
        """
        check_number("temperature", temperature, positive=True)
        scale = 1 / temperature
        sums = self._sums_of_softmax(scale)
        nats = (sums.negatives * sums.total.log() - sums.weighted) / sums.total
        return nats.clamp_min(0.0) / math.log(2)

    def softmax_parts(self, scale: float | Tensor = 1.0) -> SoftmaxParts:
        """Return what each anchor's negatives, and its positives, have of its softmax.

        ``P_i`` is the softmax of ``scale S_i`` over all candidates. Its sums over negatives take
        one pass over the scores.
        """
        if not isinstance(scale, Tensor):
            check_number("scale", scale, positive=True)
        sums = self._sums_of_softmax(scale)
        options = {"scale": scale, "shift": sums.shift}
        weighted_positives = self.sum_of_positives(information, **options)
        negatives = sums.negatives / sums.total
        positives = sums.positives / sums.total
        log = sums.total.log()
        return SoftmaxParts(
            log - sums.shift,
            negatives,
            sums.weighted / sums.total - negatives * log,
            positives,
            weighted_positives / sums.total - positives * log,
        )

    def _sums_of_softmax(self, scale: float | Tensor) -> SoftmaxSums:
        """Return the sums from which softmaxes over all candidates are made."""
        # Exponents near 0 are accurate, and no large numbers cancel.
        shift: Value = -scale  # exponents are -20 at least, unless they are steeper
        if isinstance(scale, Tensor) or scale > 10 or not self.bounded:
            shift = -self._highest(Question(exponential, over="all", scale=scale))
        negatives = self._sum(Question(exponential, scale=scale, shift=shift))
        weighted = self._sum(Question(information, scale=scale, shift=shift))
        positives = self.sum_of_positives(exponential, scale=scale, shift=shift)
        total = (negatives + positives).clamp_min(1e-9)  # at least exp(-20), unless it is empty
        return SoftmaxSums(shift, negatives, weighted, positives, total)

    def sum(
        self,
        term: Term | Function,
        *params: float | Tensor,
        scale: float | Tensor = 1.0,
        shift: float | Tensor | None = None,
        over: Over = "negatives",
        below: Limit = None,
        above: Limit = None,
        guide: Anchors | None = None,
    ) -> Tensor:
        """Return (A,) ``sum_{j in neg(i)} term(scale_i S_ij + shift_i, *params_i)``.

        ``term`` is a function of scores, see :func:`itrloss.pair_term`. Scale, shift and parameters
        are numbers or tensors, of one value or (A,), and get their gradients. Negatives, or what
        the sum is ``over``, count only with a score below ``below`` and above ``above``: numbers,
        or (A,) limits, which get no gradient. The sum is 0 for an anchor without negatives.

        With a ``guide``, the same anchors of another similarity, the sum is of ``term(z_ij, G_ij,
        *params_i)`` with its scores G, which get no gradient: a teacher's scores, for instance.
        """
        question = self._question(as_term(term), over, below, above)
        if guide is not None and question.limited:
            raise ValueError("guide: expected no limits, as the term gets its scores")
        question = question._replace(teaches=guide is not None)
        return self._sum(self._with_values(question, scale, shift, params), guide)

    def weighted_sum(
        self,
        term: Term | Function,
        *params: float | Tensor,
        weights: float | Tensor = 1.0,
        scale: float | Tensor = 1.0,
        shift: float | Tensor | None = None,
        over: Over = "negatives",
    ) -> Tensor:
        """Return () ``sum_i w_i sum_{j in neg(i)} term(scale_i S_ij + shift_i, *params_i)``.

        ``weights`` are a number or (A,), and get no gradient; for the rest see :meth:`sum`. A loss
        that needs this one number, and not the sum of each anchor, says so by this method: on the
        Triton engine its gradient is then found in the forward pass, which spares a visit of all
        scores.
        """
        w = as_value("weights", weights, self._size, self.dtype, self.device)
        if isinstance(w, Tensor):
            w = w.detach()
        question = self._question(as_term(term), over)
        return self._weighted_sum(self._with_values(question, scale, shift, params), w)

    def _weighted_sum(self, question: Question, weights: Value) -> Tensor:
        """Return the () weighted total of sums, see :meth:`_sum`."""
        if self.exchange is not None:  # sums of candidates in several processes have to be merged
            return (self._sum(question) * weights).sum()
        totals = []
        of_blocks = zip(self._of_blocks(question), self._by_block(weights), strict=True)
        for (matrix, own, _), own_weights in of_blocks:
            assert own_weights is not None
            totals.append(matrix.weighted_sum(own, own_weights))
        return functools.reduce(torch.add, totals)

    def _question(
        self, term: Term, over: Over, below: Limit = None, above: Limit = None
    ) -> Question:
        """Return the question of a term and of the candidates that count, checked."""
        if over not in ("negatives", "positives", "all"):
            one_of("over", over, "negatives", "positives", "all")
        if below is None and above is None:
            return Question(term, over=over)
        own_below = self._limit("below", below)
        own_above = self._limit("above", above)
        return Question(term, over=over, below=own_below, above=own_above)

    def _with_values(
        self,
        question: Question,
        scale: float | Tensor,
        shift: float | Tensor | None,
        params: Sequence[float | Tensor],
    ) -> Question:
        """Return a question with the values of anchors and the parameters of its term, checked."""
        like = self._size, self.dtype, self.device
        return question._replace(
            scale=as_value("scale", scale, *like),
            shift=None if shift is None else as_value("shift", shift, *like),
            params=tuple([as_tensor("params", p, *like) for p in params]),
        )

    def _limit(self, name: str, limit: Limit) -> Value | None:
        """Return a checked limit, without a gradient; None: there is none."""
        if limit is None:
            return None
        value = as_value(name, limit, self._size, self.dtype, self.device)
        return value.detach() if isinstance(value, Tensor) else value

    def hardest_negatives(self, below: Limit = None) -> Hardest:
        """Return the (A,) scores and indices of each anchor's highest-scoring negative.

        The gradient of a score goes to its pair. With ``below``, see :meth:`sum`, it is the hardest
        of the negatives that score below it: with the score of a positive, a semi-hard one.
        """
        if self.exchange is not None and any(len(group) > 1 for group in self._groups):
            raise ValueError(
                "hardest_negatives: expected one matrix of candidates where processes share a batch"
            )
        question = Question(identity, below=self._limit("below", below))
        answers = [matrix.hardest(own) for matrix, own, _ in self._of_blocks(question)]
        best = self._joined_best(answers)
        if self.exchange is not None:
            best = Hardest(*self.exchange.merged_best(*best))
        return best

    def _joined_best(self, answers: Sequence[Hardest]) -> Hardest:
        """Return the best candidates (A,) of all anchors from the blocks' (A_b,)."""
        if self._has_one_block:
            return answers[0]
        best: list[Hardest | None] = [None for _ in self.whole_sizes]
        for block, answer in zip(self._blocks, answers, strict=True):
            sizes = [self.whole_sizes[g] for g in block.groups]
            parts = zip(answer.values.split(sizes), answer.indices.split(sizes), strict=True)
            for g, first, (value, index) in zip(block.groups, block.firsts, parts, strict=True):
                own = Hardest(value, torch.where(index < 0, index, index + first))
                best[g] = better(best[g], own)
        values = torch.cat([x.values for x in best if x is not None])
        indices = torch.cat([x.indices for x in best if x is not None])
        return Hardest(values, indices)

    # ---------------------------------------------------------------------------------- positives

    def sum_of_positives(
        self,
        term: Term | Function,
        *params: float | Tensor,
        scale: float | Tensor = 1.0,
        shift: float | Tensor | None = None,
        weights: Literal["factor", "parameter"] | None = None,
    ) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} term(scale_i S_ip + shift_i, *params_i)``.

        The term and its values are as in :meth:`sum`. The gradient goes straight to the embeddings
        of the pairs. The sum is 0 for an anchor without positives.

        ``weights`` says how the weights of matches enter: each is a ``"factor"`` of its pair's
        value, or the first ``"parameter"`` of the term. With None they do not.
        """
        term = as_term(term)
        if weights == "factor" and self.has_weights:
            term = times_weight(term)
            weights = "parameter"
        question = self._with_values(Question(term, over="positives"), scale, shift, params)
        a = question.scale
        b = question.shift
        # Values of each anchor are gathered below, in which all processes of a batch have to take
        # part. Whether sums by class are the faster way is decided by each process on its own.
        if term is identity and not has_each(a) and not has_each(b) and self._sums_by_class():
            return self._sum_of_positive_scores(a, b)
        if not self._lists_positives():
            matches = self._weights_of_matches() if weights == "parameter" else None
            return self._sum(question._replace(teaches=matches is not None), matches)
        return self._sum_of_listed(question, weights == "parameter")

    def _sum_of_listed(self, question: Question, takes_weights: bool) -> Tensor:
        """Return (A,) sums of a question over listed positives."""
        scores, index = self._positives()
        values: Sequence[Any] = question.scale, question.shift, *question.params
        if index is not None:
            values = [x[index] if has_each(x) else x for x in self._gathered(values)]
        scale, shift, *params = values
        z = affine(scores, scale, shift)
        if takes_weights:
            params.insert(0, self._listed_weights())
        terms = question.term.computed(z, params)
        if terms.shape != z.shape:  # a user's function may return a parameter
            terms = terms.expand_as(z)
        if index is None:
            return terms
        total = segment_sum(terms, index, sum(self.whole_sizes))
        return total if self.exchange is None else self.exchange.merged(total)

    def _weights_of_matches(self) -> Anchors:
        """Return the same anchors with the weights of matches in place of scores."""
        return self._of_others([block.matrix.of_weights() for block in self._blocks])

    def _listed_weights(self) -> Tensor:
        """Return the (P,) weights of the positive pairs, in the order of :meth:`_positives`."""
        sides = [side for group in self._groups for side in group if not side.before]
        return torch.cat([side.matrix.relation.listed_weights() for side in sides]).to(self.dtype)

    @property
    def positive_weights(self) -> Tensor:
        """The (A,) sums of the weights of each anchor's matches, which are their numbers if all
        weigh 1; 1 for an anchor without any.
        """
        if not self.has_weights:
            return self.counts(positive=True).clamp_min(1)
        answers = []
        for block in self._blocks:
            pairs = block.matrix.relation
            answers.append(joined([pairs.weight_sums(side).to(self.dtype) for side in block.sides]))
        total = self.merged(self._joined(answers, torch.add))
        return total.masked_fill(total == 0, 1.0)

    @property
    def largest_weights(self) -> Tensor:
        """The (A,) largest weights of each anchor's matches, 0 without any."""
        return self._weights_of_matches()._highest(Question(identity, over="positives"))

    def _sums_by_class(self) -> bool:
        """Return whether plain scores of positives are summed from the vectors of classes."""
        return all(block.matrix.sums_by_class() for block in self._blocks)

    def _sum_of_positive_scores(self, scale: Value, shift: Value | None) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} (scale S_ip + shift)``, from sums by class."""
        answers = [block.matrix.sums_of_positive_scores(block.sides) for block in self._blocks]
        total = self._joined(answers, torch.add)
        if self.exchange is not None:
            total = self.exchange.merged(total)
        total = total * scale
        return total if shift is None else total + shift * self.counts(positive=True)

    def mean_of_positives(
        self,
        term: Term | Function,
        *params: float | Tensor,
        scale: float | Tensor = 1.0,
        shift: float | Tensor | None = None,
    ) -> Tensor:
        """Return the (A,) means of a term over each anchor's positives, 0 without any.

        If matches have weights, it is the mean by their weights.
        """
        sums = self.sum_of_positives(term, *params, scale=scale, shift=shift, weights="factor")
        return sums if self.one_to_one else sums / self.positive_weights

    def _lists_positives(self) -> bool:
        """Return whether sums over positives are over listed pairs, not over all scores."""
        return self.one_to_one or all(block.matrix.lists_positives() for block in self._blocks)

    def _positives(self, with_sums: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the (P,) scores of the positive pairs, and (P,) their anchors.

        None in place of the anchors: pair i belongs to anchor i. ``with_sums``: whether sums over
        all scores are to follow.
        """
        scores: list[Tensor] = []
        index: list[Tensor] = []
        first = 0
        for size, group in zip(self.whole_sizes, self._groups, strict=True):
            for side in group:
                if side.before:
                    continue
                scores.append(side.matrix.positive_scores(with_sums))
                if not self.one_to_one and self._index is None:
                    own = side.matrix.relation.listed[side.side]
                    index.append(own + first if first else own)
            first += size
        if self.one_to_one:
            return joined(scores), None
        # As columns (P, 1): torch.cat would cut a vector without entries out of the graph, and a
        # process without pairs has to take part in the exchanges of second derivatives.
        every_score = torch.cat([x[:, None] for x in scores]).squeeze(1)
        if self._index is not None:
            return every_score, self._index
        anchors = torch.cat(index)
        if may_keep():
            self._index = anchors  # one tensor for all graphs that save it
        return every_score, anchors

    def hinge_sum(self, margin: float) -> Tensor:
        """Return (A,) ``sum_{p in pos(i)} sum_{j in neg(i)} max(margin - S_ip + S_ij, 0)``.

        There is a pass over the scores for each of up to 64 positives of an anchor. For more, the
        scores of each anchor are sorted, in memory of the size of the matrix.
        """
        self.refuse_weights("hinge_sum")
        if self._sorts_hinges():
            return self._sorted_hinge_sum(margin)
        shifts = self._hinge_shifts(margin)
        sums = [self._sum(Question(excess, shift=shift)) for shift in shifts]
        return functools.reduce(torch.add, sums)

    def _sorts_hinges(self) -> bool:
        """Return whether the positives of an anchor are too many to be visited one by one."""
        if not self._listable():
            return True
        return self.exchange is None and self._most_positives() > FEW

    def reduced_hinge_sum(self, margin: float, reduction: Reduction) -> Any:
        """Return :meth:`hinge_sum` after :meth:`reduce`.

        Where that is one number, its gradient is found as in :meth:`weighted_sum`.
        """
        one_of("reduction", reduction, "mean", "sum", "none")
        if reduction == "none" or self.exchange is not None or self._sorts_hinges():
            return self.reduce(self.hinge_sum(margin), reduction)
        self.refuse_weights("hinge_sum")
        weights = self._weights(reduction)
        shifts = self._hinge_shifts(margin)
        totals = [self._weighted_sum(Question(excess, shift=shift), weights) for shift in shifts]
        return functools.reduce(torch.add, totals)

    def refuse_weights(self, name: str) -> None:
        """Raise a ValueError if matches have weights; ``name``: of what would ignore them."""
        if self.has_weights:
            raise ValueError(f"matches: expected 1 for all matches in {name}, got other weights")

    def _listable(self) -> bool:
        """Return whether the positive pairs can be listed, however many they are."""
        return all(block.matrix.relation.listable for block in self._blocks)

    def _hinge_shifts(self, margin: float) -> list[Tensor]:
        """Return ``margin - S_ip`` (A,), one for each positive of an anchor.

        -inf where an anchor has fewer.
        """
        scores, index = self._positives(with_sums=True)
        if index is None:
            return [margin - scores]
        size = sum(self.whole_sizes)
        counts = self.counts(positive=True)
        slot = slots(index)
        if self.exchange is None:
            most = self._most_positives()
        else:  # positives in the processes before come first
            local = self._local_counts(positive=True)
            slot = slot + self.exchange.earlier_positives(local)[index]
            most = int(self.exchange.processes.largest(int(counts.amax())))
        table = scores.new_zeros(max(1, most), size)
        table = table.index_put((slot, index), scores)
        if self.exchange is not None:
            table = self.exchange.merged(table)
        missing = torch.arange(len(table), device=self.device)[:, None] >= counts
        return list((margin - table).masked_fill(missing, -math.inf))

    def _most_positives(self) -> int:
        """Return how many positives an anchor has at most."""
        of_groups = []
        for group in self._groups:
            of_groups.append(sum(x.matrix.relation.numbers().most[x.side] for x in group))
        return max(of_groups)

    def _sorted_hinge_sum(self, margin: float) -> Tensor:
        """Return :meth:`hinge_sum` where positives cannot be listed."""
        if any(len(group) > 1 for group in self._groups):
            raise ValueError("hinge_sum: expected the candidates of an anchor in one matrix")
        if self.exchange is not None:
            raise ValueError(
                "hinge_sum: torch.compile cannot list the positives of a batch that processes share"
            )
        answers = []
        for matrix, question, _ in self._of_blocks(Question(identity)):
            answers.append(matrix.sorted_excesses(question, margin))
        return self._joined(answers, torch.add)

    # ---------------------------------------------------------------------------------- reduction

    def valid(self) -> Tensor | None:
        """Return the (A,) bool mask of anchors with a positive and a negative; None: all."""
        if self._complete:
            return None
        if self._known_valid is not None:
            return self._known_valid
        valid = (self.counts(positive=True) > 0) & (self.counts(positive=False) > 0)
        if may_keep():
            self._known_valid = valid
        return valid

    def reduce(self, values: Tensor, reduction: Reduction, valid: Tensor | None = None) -> Any:
        """Return the values (A,) reduced: ``"mean"``, ``"sum"``, or ``"none"`` for each group's.

        ``"mean"`` adds up the means over each group's ``valid`` anchors (default: :meth:`valid`).
        An anchor that is not valid contributes 0 and does not count in a mean.
        """
        if reduction not in ("mean", "sum", "none"):
            one_of("reduction", reduction, "mean", "sum", "none")
        if valid is None:
            valid = self.valid()
        if valid is not None:
            values = values.masked_fill(~valid, 0.0)
        if reduction == "none":
            return self.existing(values)
        if reduction == "sum":
            return self.total(values.sum())
        if valid is None and self.exchange is None:
            if self.of_one_size:
                return values.sum() / self.sizes[0]
            means = [part.mean() for part in self.split(values)]
            return functools.reduce(torch.add, means)
        if valid is None:
            valid = torch.ones_like(values, dtype=torch.bool)
        sums = self._group_sums(values)
        counts = self._group_sums(valid)
        if self.exchange is not None:  # sums and numbers in one exchange
            sums, counts = self.total(torch.stack([sums, counts.to(sums.dtype)]))
        return (sums / counts.clamp_min(1)).sum()

    def _group_sums(self, x: Tensor) -> Tensor:
        """Return the (G,) sums of ``x`` (A,) over each group."""
        if self.of_one_size:
            return x.unflatten(0, (len(self.sizes), -1)).sum(1)
        return torch.stack([part.sum() for part in self.split(x)])

    def _weights(self, reduction: Literal["mean", "sum"]) -> Value:
        """Return the weights, (A,) or one number, with which :meth:`reduce` adds up values."""
        valid = self.valid()
        if valid is None and reduction == "sum":
            return 1.0
        if valid is None and self.of_one_size:
            return 1 / self.sizes[0]
        if valid is None:
            valid = torch.ones(self._size, dtype=torch.bool, device=self.device)
        weights = valid.to(self.dtype)
        if reduction == "sum":
            return weights
        return torch.cat([part / part.sum().clamp_min(1) for part in self.split(weights)])

    def per_pair(self, sums: Tensor) -> Tensor:
        """Return (A,) ``sums`` over positives, scaled for a mean over pairs.

        A group's mean over valid anchors is then the mean over its pairs, by their weights.
        """
        if self.one_to_one:
            return sums
        valid = self.valid()
        if valid is None:
            valid = torch.ones_like(sums, dtype=torch.bool)
        anchors = self._group_sums(valid)
        pairs = self._group_sums(self.positive_weights * valid)
        totals = self.total(torch.stack([anchors, pairs]))
        anchors, pairs = totals.masked_fill(totals == 0, 1).to(self.dtype)
        factors = (anchors / pairs).unbind()
        return sums * torch.cat([x.expand(n) for x, n in zip(factors, self.sizes, strict=True)])

    def total(self, x: Tensor) -> Tensor:
        """Return ``x``; of a batch that processes share, its sum over all of them."""
        return x if self.exchange is None else self.exchange.processes.total(x)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the values of the matrices' anchors from the values (..., A) of own anchors."""
        return x if self.exchange is None else self.exchange.gathered(x)

    def merged(self, x: Tensor) -> Tensor:
        """Return the sums of own anchors from the sums (..., A) of the matrices' anchors."""
        return x if self.exchange is None else self.exchange.merged(x)

    def group_amax(self, x: Tensor) -> list[Tensor]:
        """Return the () largest value of ``x`` (A,) in each group; over all processes of a batch.

        As ``amax``, it distributes the gradient evenly between equal values.
        """
        if self.exchange is not None:
            return self.exchange.group_amax(x)
        return [part.amax() for part in self.split(x)]

    def over_group_amax(self, x: Tensor) -> Tensor:
        """Return ``x`` (A,) divided by the largest value of each group; see :meth:`group_amax`."""
        if self.exchange is None and self.of_one_size:
            by_group = x.unflatten(0, (len(self.sizes), -1))
            return (by_group / by_group.amax(1, keepdim=True)).flatten()
        parts = zip(self.split(x), self.group_amax(x), strict=True)
        return torch.cat([part / top for part, top in parts])

    def existing(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of values (A,) of each group, without the padding of a shared batch."""
        parts = self.split(values)
        return parts if self.exchange is None else self.exchange.existing(parts)


# ------------------------------------------------------------------------------------------ helpers


def times_weight(term: Term) -> Term:
    """Return a term of scores and of the weights of their matches: the product of both."""

    def product(z: Tensor, weight: Tensor, *params: Tensor) -> Tensor:
        """Return the term of scores, times the weights."""
        return weight * term(z, *params)

    return Term(product)


def shifted_log(total: Tensor, shift: Value, never_empty: bool) -> Tensor:
    """Return ``log(total) + shift``; -inf, without a gradient, for an empty sum."""
    if never_empty:
        return total.log() + shift if shift else total.log()
    empty = total == 0
    log = total.masked_fill(empty, 1.0).log()
    if isinstance(shift, Tensor) or shift != 0.0:
        log = log + shift
    return log.masked_fill(empty, -math.inf)


def better(known: Hardest | None, other: Hardest) -> Hardest:
    """Return the larger of (A,) values, and its index."""
    if known is None:
        return other
    larger = other.values > known.values
    values = torch.where(larger, other.values, known.values)
    return Hardest(values, torch.where(larger, other.indices, known.indices))


def twin_of(matrix: Matrix, twins: Sequence[tuple[Matrix, Matrix]]) -> Matrix:
    """Return the twin of a matrix in a list of pairs."""
    return next(twin for original, twin in twins if original is matrix)


def exchange_of(groups: Sequence[Sequence[AnchorSide]]) -> Exchange | None:
    """Return what groups of anchors exchange with other processes; None: nothing."""
    sides = [side for group in groups for side in group]
    if all(side.share is None for side in sides):
        return None
    shards = []
    for group in groups:
        share = group[0].share
        if share is None or not has_same_anchors(group):
            raise_other_batch()
        shards.append(AnchorGroup(share, group[0].side, group[0].size))
    if not all(x.share.processes is shards[0].share.processes for x in shards):
        raise_other_batch()
    return Exchange(shards)


def raise_other_batch() -> NoReturn:
    """Raise the error of anchors that do not belong together."""
    raise ValueError("anchors: expected those of one batch that processes share, or of none")


def has_same_anchors(group: Sequence[AnchorSide]) -> bool:
    """Return whether the matrices of a group are of one batch that processes share.

    Another batch may hold further candidates of the same anchors, if each process has all of an
    anchor's candidates.
    """
    first = group[0]
    assert first.share is not None
    for side in group[1:]:
        if side.share is None:
            return False
        if side.share.processes is first.share.processes:
            continue
        if first.share.spread == first.side or side.share.spread == side.side:
            return False
        if side.share.processes.group != first.share.processes.group:
            return False
        if side.share.unpadded[side.side] != first.share.unpadded[first.side]:
            return False
    return True
