"""Answers about single pairs: hardest negatives, functions summed over the positives or the negatives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .positives import Positives
from .terms import SLOPES, VALUES, evaluate
from .tiles import SIDES, Gradient, Pair, Source, Tile, at_a_time, fused, tiles, unit

# -------------------------------------------------------------------------------------- scores of listed pairs


_BLOCK = 2**22  # elements of gathered embeddings held at once


def pair_scores(source: Source, i: Tensor, j: Tensor) -> Tensor:
    """(P,) scores of the pairs ``(i[p], j[p])``."""
    if source.cols is None:
        return source.rows[i, j]
    scores = source.rows.new_empty(j.numel(), dtype=source.dtype)
    step = max(1, _BLOCK // source.rows.shape[1])
    for start in range(0, j.numel(), step):
        a, b = i[start : start + step], j[start : start + step]
        row, col = (x.index_select(0, k).to(source.dtype) for x, k in ((source.rows, a), (source.cols, b)))
        score = scores[start : start + step]
        torch.sum(row.mul_(col), 1, out=score)
        for inv, index in ((source.row_inv, a), (source.col_inv, b)):
            if inv is not None:
                score.mul_(inv.index_select(0, index))
    return scores


def aligned_scores(source: Source) -> Tensor:
    """(N,) scores of row i with column i."""
    assert source.cols is not None
    scores = source.rows.new_empty(source.shape[0], dtype=source.dtype)
    for part in _blocks(source.rows):
        rows, cols = unit(source.rows[part], None), unit(source.cols[part], None)
        torch.sum(rows * cols, 1, out=scores[part])
    for inv in (source.row_inv, source.col_inv):
        if inv is not None:
            scores.mul_(inv)
    return scores


def aligned_gradient(source: Source, scores: Tensor, grad: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns from that of :func:`aligned_scores`."""
    rows, cols, row_inv, col_inv = source[:4]
    assert cols is not None
    weight, pull = grad, grad * scores  # see PairGradient.add
    for inv in (row_inv, col_inv):
        if inv is not None:
            weight = weight * inv
    found = [rows.new_empty(0), rows.new_empty(0)]
    for side, (own, inv, other) in enumerate(((rows, row_inv, cols), (cols, col_inv, rows))):
        if not needs[side]:
            continue
        found[side] = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        along = None if inv is None else pull * inv * inv
        for part in _blocks(own):
            block = unit(other[part], None) * weight[part, None]
            if along is not None:
                block.addcmul_(unit(own[part], None), along[part, None], value=-1)
            found[side][part] = block
    return found[0], found[1]


def _blocks(x: Tensor) -> list[slice]:
    size, step = len(x), at_a_time(x)
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


class PairGradient:
    """Collects the gradient of listed pairs: sparse in the pairs, so no score matrix and no product is needed."""

    def __init__(self, source: Source, needs: tuple[bool, bool]):
        self.source = source
        self.needs = (True, False) if source.cols is None else needs
        self.sums: list[Tensor | None] = [None, None]
        self.along: list[Tensor | None] = [None, None]  # of each gradient along its own vector, times its length

    def add(self, i: Tensor, j: Tensor, scores: Tensor, grad: Tensor) -> None:
        """Account for ``grad`` (P,) at the pairs ``(i, j)``, which have these ``scores``."""
        s = self.source
        if s.cols is None:
            if self.sums[0] is None:
                self.sums[0] = torch.zeros(s.shape, dtype=s.dtype, device=s.rows.device)
            self.sums[0].index_put_((i, j), grad, accumulate=True)
            return
        # d cos(v, w) / dv = w / (|v| |w|) - cos(v, w) v / |v|^2
        weight, pull = grad, grad * scores
        for inv, index in ((s.row_inv, i), (s.col_inv, j)):
            if inv is not None:
                weight = weight * inv.index_select(0, index)
        for side, (own, inv, mine, other, theirs) in enumerate(
            ((s.rows, s.row_inv, i, s.cols, j), (s.cols, s.col_inv, j, s.rows, i))
        ):
            if self.needs[side]:
                self._add_side(side, bags(mine, theirs, other.to(s.dtype), weight, own.shape[0]))
                if inv is not None:
                    along = add_at_(torch.zeros_like(inv), mine, pull)
                    before = self.along[side]
                    self.along[side] = along if before is None else before.add_(along)

    def _add_side(self, side: int, step: Tensor) -> None:
        before = self.sums[side]
        self.sums[side] = step if before is None else before.add_(step)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of rows and columns in their own dtype; an empty tensor where none was asked for."""
        s = self.source
        found = []
        for side, (x, inv) in enumerate(((s.rows, s.row_inv), (s.cols, s.col_inv))):
            total, along = self.sums[side], self.along[side]
            if not self.needs[side] or x is None:
                total = s.rows.new_empty(0)
            elif total is None:  # no pair came
                total = torch.zeros(x.shape, dtype=s.dtype, device=x.device)
            elif inv is not None and along is not None:
                total.addcmul_(x.to(s.dtype), (along * inv * inv)[:, None], value=-1)
            found.append(total.to(s.rows.dtype if x is None else x.dtype))
        return found[0], found[1]


def add_at_(sums: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """``sums[index[p]] += values[p]``, with the same bits each time: accelerators add as it comes, unless they sort."""
    if sums.device.type == "cpu":
        return sums.index_add_(0, index, values)
    return sums.index_put_((index,), values, accumulate=True)


def bags(anchors: Tensor, others: Tensor, vectors: Tensor, weights: Tensor, size: int) -> Tensor:
    """(size, D): ``sum_{p: anchors[p] = a} weights[p] vectors[others[p]]``, without (P, D) copies of the vectors."""
    anchors, order = torch.sort(anchors)
    offsets = torch.searchsorted(anchors, torch.arange(size, device=anchors.device))
    others, weights = others.index_select(0, order), weights.index_select(0, order)
    return F.embedding_bag(others, vectors, offsets, mode="sum", per_sample_weights=weights)


# ------------------------------------------------------------------------------------------- hardest negative


def hardest(source: Source, asked: tuple[bool, bool]) -> tuple[Tensor, ...]:
    """Scores and indices of the highest-scoring negatives, of the rows and of the columns: -inf and -1 for none."""
    if source.fused and 0 not in source.shape:
        return fused().hardest(source, asked)
    positives = Positives.of(source)
    best: dict[int, Tensor] = {}
    where: dict[int, Tensor] = {}
    if 0 in source.shape and asked[0]:  # a memory that is empty yet
        best[0] = source.rows.new_full((source.shape[0],), -math.inf, dtype=source.dtype)
        where[0] = best[0].new_full(best[0].shape, -1, dtype=torch.int64)
    for tile in tiles(source, scratch=1):
        t = positives.fill_(tile.scratch[0].copy_(tile.scores), tile, -math.inf)
        for side, dim in SIDES:
            if not asked[side]:
                continue
            value, index = _argmax(t, dim)
            if tile.alone:
                best[side], where[side] = value, index.masked_fill(value == -math.inf, -1)
                continue
            if side not in best:
                best[side] = value.new_full((source.shape[side],), -math.inf)
                where[side] = index.new_full((source.shape[side],), -1)
            b, w = tile.part(best[side], dim), tile.part(where[side], dim)
            w.copy_(torch.where(value > b, index + (tile.c0 if dim == 1 else tile.r0), w))
            b.copy_(torch.maximum(b, value))
    values, indices = source.rows.new_empty(0, dtype=source.dtype), source.rows.new_empty(0, dtype=torch.int64)
    return tuple(found.get(side, empty) for found, empty in ((best, values), (where, indices)) for side, _ in SIDES)


_RUN, _SMALL = 64, 2**15


def _argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``x.max(dim)``, which PyTorch vectorises on the CPU only without the index: so find the run of 64 first."""
    size = x.shape[dim]
    runs = size // _RUN
    if runs < 2 or x.numel() <= _SMALL or x.device.type != "cpu":
        best = x.max(dim)
        return best.values, best.indices
    head = x.narrow(dim, 0, runs * _RUN).unflatten(dim, (runs, _RUN))
    value, run = head.amax(dim + 1).max(dim)
    where = run.unsqueeze(dim).unsqueeze(dim + 1)
    shape = list(head.shape)
    shape[dim] = 1
    inside = head.gather(dim, where.expand(shape)).squeeze(dim)
    index = inside.argmax(dim).add_(run, alpha=_RUN)
    if size % _RUN:
        rest, place = x.narrow(dim, runs * _RUN, size % _RUN).max(dim)
        better = rest > value
        value, index = torch.where(better, rest, value), torch.where(better, place + runs * _RUN, index)
    return value, index


# --------------------------------------------------------------------- sums of a function over the positives


def hands_out_diagonal(source: Source, negative: bool) -> bool:
    """As :func:`itrloss.engines.softmax.carries_diagonal`."""
    return negative and source.row_ids is None and not (source.fused and source.cols is None)


def term_sums(
    source: Source, term: str, params: tuple[list[Tensor], list[Tensor]], asked: tuple[bool, bool], negative: bool
):
    """``sum_{p in pos(i)} term(S_ip, *params_i)`` for the rows, and the same for the columns; or over the negatives.

    And ``S_ii``, empty unless :func:`hands_out_diagonal`.
    """
    if source.fused and negative and term == "softplus":
        first, empty = fused().softplus_sums(source, params, asked)[0], source.rows.new_empty(0, dtype=source.dtype)
        diagonal = fused().diagonal_of(source, hands_out_diagonal(source, negative))
        return *[empty if x is None else x for x in first], diagonal
    if source.fused and not negative and fused().takes_positives(source, term):
        first, empty = fused().positive_sums(source, term, params, asked), source.rows.new_empty(0, dtype=source.dtype)
        return *[empty if x is None else x for x in first], empty.clone()
    shape = zip(source.shape, asked, strict=True)
    sums = [source.rows.new_zeros(size if a else 0, dtype=source.dtype) for size, a in shape]
    diagonal = source.rows.new_empty(source.shape[0] if hands_out_diagonal(source, negative) else 0, dtype=source.dtype)
    for chunk in _chunks(source, negative, scratch=0):
        if diagonal.numel() and isinstance(chunk, _Masked):
            chunk.positives.read_diagonal(chunk.tile, diagonal)
        for side, _ in SIDES:
            if asked[side]:
                given = chunk.take(params[side], side)
                alone = VALUES.get(term)
                if alone is None:
                    values = _unshared(evaluate(term, chunk.scores, given)[0], chunk.scores, *given)
                else:
                    values = alone(chunk.scores, *given)
                chunk.add_to(sums[side], values, side)
    return *sums, diagonal


def term_sums_backward(
    source: Source,
    term: str,
    params: tuple[list[Tensor], list[Tensor]],
    grads: Pair,
    diagonal_grad: Tensor | None,
    negative: bool,
    needs: tuple[bool, bool],
    needs_params: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the source and, if they are needed, of the parameters from those of the sums."""
    if source.fused and negative and term == "softplus":
        return fused().softplus_sums_backward(source, params, grads, diagonal_grad, needs, needs_params)
    if source.fused and not negative and fused().takes_positives(source, term):
        return fused().positive_sums_backward(source, term, params, grads, needs, needs_params)
    listed = not negative and Positives.of(source).listable
    gradient = PairGradient(source, needs) if listed else Gradient(source, needs, in_place)
    given = tuple([torch.zeros_like(p) for p in side] for side in params)
    for chunk in _chunks(source, negative, scratch=0 if isinstance(gradient, PairGradient) else gradient.scratch(0)):
        total = None
        for side, _ in SIDES:
            g = grads[side]
            if g is None:
                continue
            g, *taken = chunk.take([g, *params[side]], side)
            alone = None if needs_params else SLOPES.get(term)
            if alone is not None:
                part = alone(chunk.scores, *taken).mul_(g)
            else:
                _, by_score, *by_params = evaluate(term, chunk.scores, taken)
                part = _whole(by_score * g, chunk.scores)
                for into, d in zip(given[side], by_params, strict=True):
                    if needs_params:
                        chunk.add_to(into, d * g, side)
            total = part if total is None else total.add_(part)
        total = torch.zeros_like(chunk.scores) if total is None else total
        chunk.back(gradient, total, diagonal_grad)
    return (*gradient.finish(), given[0], given[1])


def _whole(x: Tensor, scores: Tensor) -> Tensor:
    """One number for each score: what a term says of its parameters alone may be less."""
    return x if x.shape == scores.shape else x.expand_as(scores).clone()


def _unshared(x: Tensor, *given: Tensor) -> Tensor:
    """What may be written to: a term may return what it was given."""
    own = x.untyped_storage().data_ptr()
    return x.clone() if any(own == y.untyped_storage().data_ptr() for y in given) else x


class _Listed:
    """Positive pairs as a list: exact, and as cheap as there are few of them."""

    def __init__(self, source: Source, i: Tensor, j: Tensor, whole_diagonal: bool):
        self.index = (None, None) if whole_diagonal else (i, j)
        self.i, self.j = i, j
        self.scores = pair_scores(source, i, j)

    def take(self, vectors: list[Tensor], side: int) -> list[Tensor]:
        index = self.index[side]
        return [v if index is None or v.numel() == 1 else v[index] for v in vectors]

    def add_to(self, sums: Tensor, values: Tensor, side: int) -> None:
        """Add the pairs' values to the sums of the anchors on one side."""
        index, values = self.index[side], _whole(values, self.scores)
        if sums.numel() == 1:
            sums.add_(values.sum())
        elif index is None:
            sums.add_(values)
        else:
            add_at_(sums, index, values)

    def back(self, gradient: PairGradient | Gradient, grad: Tensor, diagonal_grad: Tensor | None) -> None:
        """Hand the listed pairs' gradient on."""
        assert isinstance(gradient, PairGradient)
        gradient.add(self.i, self.j, self.scores, grad)


class _Masked:
    """A tile but for its negatives, or but for its positives: shapes depend on nothing else, so no device waits."""

    def __init__(self, tile: Tile, positives: Positives, negative: bool):
        self.tile, self.positives, self.negative = tile, positives, negative
        self.scores = tile.scores

    def only(self, values: Tensor, positive: float | Tensor = 0.0) -> Tensor:
        """Zeros in place of the others, or ``positive`` at the positives that are not to count; ``values`` are lost."""
        values = _whole(values, self.scores)
        if not self.negative:
            return values.masked_fill(~self.positives.mask(self.tile), 0)
        return self.positives.fill_(values, self.tile, positive)

    def take(self, vectors: list[Tensor], side: int) -> list[Tensor]:
        return [self.tile.spread(v, SIDES[side][1]) for v in vectors]

    def add_to(self, sums: Tensor, values: Tensor, side: int) -> None:
        values, dim = self.only(values), SIDES[side][1]
        self.tile.part(sums, dim).add_(values.sum() if sums.numel() == 1 else values.sum(dim))

    def back(self, gradient: PairGradient | Gradient, grad: Tensor, diagonal_grad: Tensor | None) -> None:
        """Hand the tile's gradient on, zero but where it counts and, if there is one, the diagonal's."""
        assert isinstance(gradient, Gradient)
        gradient.put(self.tile, self.only(grad, 0.0 if diagonal_grad is None else diagonal_grad))
        gradient.add(self.tile)


def _chunks(source: Source, negative: bool, scratch: int):
    pairs = Positives.of(source)
    if pairs.listable and not negative:
        for i, j in pairs.chunks():
            yield _Listed(source, i, j, pairs.diagonal and i.numel() == pairs.n)
    else:
        for tile in tiles(source, scratch):
            yield _Masked(tile, pairs, negative)
