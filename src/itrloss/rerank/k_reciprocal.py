"""k-reciprocal encoding, whose neighbourhoods are kept as lists: no matrix of all items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import option
from ..engine.products import full_float32
from ..engine.vectors import full_precision
from ..similarity import Similarity
from .base import Reranker
from .direction import Direction, Rule

_AT_ONCE = 2**22  # numbers that a step holds at once
_QUERIES_AT_ONCE = 16  # whose neighbourhoods are compared at once; these fit into a cache


class KReciprocalReranker(Reranker):
    """k-reciprocal encoding (Zhong et al., CVPR 2017) on images and texts as one set; needs
    embeddings.

    Items are close if they have the same reciprocal neighbours: the score is ``-((1 - weight) J_qc
    + weight d_qc)`` with the Jaccard distance J of their neighbourhoods and the squared distance d,
    divided by the query's largest. Results depend on all N + M items. Their neighbourhoods are
    lists, so that memory grows with N + M. It takes no banks.

    Args:
        k1: size of the reciprocal neighbourhoods.
        k2: number of nearest items whose neighbourhoods are averaged.
        weight: a number in [0, 1].
    """

    needs_embeddings = True
    takes_bank = False

    k1: int = option(default=20, at_least=1)
    k2: int = option(default=6, at_least=1)
    weight: float = option(default=0.3, at_least=0, at_most=1)

    def description(self) -> str:
        """Raise an error, as processes cannot share the work."""
        raise ValueError("gather: KReciprocalReranker needs all items in one process")

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that compares the neighbourhoods of query and candidate."""
        return self._rules_together([direction])[0]

    def _rules_together(self, directions: Sequence[Direction]) -> list[Rule]:
        items = _centred_vectors(directions[0].queries)
        squares = torch.linalg.vector_norm(items, dim=1).square()
        near, farthest = _nearest(items, squares, max(self.k1, self.k2) + 1)
        encodings = self._encodings(items, near, farthest)
        n = directions[0].queries.shape[0]
        firsts = _Items(items[:n], squares[:n], farthest[:n], encodings.of_items(0, n))
        others = _Items(items[n:], squares[n:], farthest[n:], encodings.of_items(n, len(items)))
        rules = [self._rule(firsts, others), self._rule(others, firsts)]
        return rules[: len(directions)]

    def _rule(self, queries: _Items, candidates: _Items) -> Rule:
        """Return the rule of one direction."""
        by_neighbour = candidates.encodings.by_neighbour()
        size = len(candidates.vectors)

        def compare(scores: Tensor, rows: slice) -> Tensor:
            """Return the weighted sum of both distances, negated, for a block's queries."""
            vectors = queries.vectors[rows]
            with full_precision(vectors), full_float32(vectors.device):
                products = vectors @ candidates.vectors.T
            distance = _squared_distance(products, queries.squares[rows], candidates.squares)
            distance /= queries.farthest[rows, None]
            for start in range(0, len(vectors), _QUERIES_AT_ONCE):
                some = slice(start, min(start + _QUERIES_AT_ONCE, len(vectors)))
                own = queries.encodings.of_items(rows.start + some.start, rows.start + some.stop)
                scores[some] = _overlaps(own, some.stop - some.start, by_neighbour, size)
            jaccard = 1 - scores / (2 - scores)
            return -((1 - self.weight) * jaccard + self.weight * distance)

        return compare

    def _encodings(self, items: Tensor, near: Tensor, farthest: Tensor) -> _Weights:
        """Return the weights of each item's neighbours, which sum to 1."""
        n = len(items)
        item, neighbour = _expanded(near[:, : self.k1 + 1], near[:, : round(self.k1 / 2) + 1])
        distance = _distances_of_pairs(items, item, neighbour)
        weight = torch.exp(-distance / farthest[item])
        total = weight.new_zeros(n).index_add_(0, item, weight)
        weights = _Weights(item, neighbour, weight / total[item])
        return _averaged(weights, near[:, : self.k2])


class _Weights(NamedTuple):
    """The weights of items' neighbours, a sparse matrix."""

    item: Tensor  # (P,) int64, ascending
    neighbour: Tensor  # (P,) int64
    weight: Tensor  # (P,)

    def of_items(self, start: int, stop: int) -> _Weights:
        """Return the neighbours of some of the items, which are numbered from 0 again."""
        ends = torch.tensor([start, stop], device=self.item.device)
        first, last = torch.searchsorted(self.item, ends).tolist()
        part = slice(first, last)
        return _Weights(self.item[part] - start, self.neighbour[part], self.weight[part])

    def by_neighbour(self) -> _ByNeighbour:
        """Return the same weights, listed by neighbour."""
        neighbour, order = self.neighbour.sort(stable=True)
        return _ByNeighbour(neighbour, self.item[order], self.weight[order])


class _ByNeighbour(NamedTuple):
    """The items that have each neighbour: an inverted index."""

    neighbour: Tensor  # (P,) int64, ascending
    item: Tensor  # (P,) int64
    weight: Tensor  # (P,)


class _Items(NamedTuple):
    """Images or texts with their neighbourhoods."""

    vectors: Tensor  # (N, D), centred unit vectors
    squares: Tensor  # (N,) of their lengths
    farthest: Tensor  # (N,) the squared distance of the farthest of all items
    encodings: _Weights


def _centred_vectors(sim: Similarity) -> Tensor:
    """Return the (n, D) unit vectors of the rows, then of the columns, less the mean of all.

    Distances do not change by it, and those of vectors that lie close together keep their digits.
    """
    assert sim.embeddings is not None
    items = torch.cat([F.normalize(x.to(sim.dtype), dim=1) for x in sim.embeddings])
    return items.sub_(items.mean(0))


def _squared_distance(
    products: Tensor,  # (N, M) of two sets of vectors
    of_rows: Tensor,  # (N,) squares of their lengths
    of_cols: Tensor,  # (M,)
) -> Tensor:
    """Return the (N, M) squared distances of vectors, in the memory of their products."""
    return products.mul_(-2).add_(of_rows[:, None]).add_(of_cols).clamp_min_(0.0)


def _distances_of_pairs(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return the (P,) squared distances of vectors i (P,) and j (P,) of x (n, D)."""
    step = max(1, _AT_ONCE // x.shape[1])
    parts = zip(i.split(step), j.split(step), strict=True)
    return torch.cat([(x[some_i] - x[some_j]).square_().sum(1) for some_i, some_j in parts])


def _nearest(items: Tensor, squares: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the (n, k) items nearest to each of the items (n, D), and the (n,) squared distance of
    the farthest.

    An item itself comes first, whatever the number of its copies; of equally near ones, the one
    with the lower index.
    """
    n = len(items)
    k = min(k, n)
    numbers = torch.arange(n, device=items.device)
    # written in place: small results kept from each step would lie between the large blocks of
    # distances and fragment the heap
    near = torch.empty(n, k, dtype=torch.int64, device=items.device)
    farthest = torch.empty(n, dtype=items.dtype, device=items.device)
    for own in numbers.split(max(1, _AT_ONCE // n)):
        with full_precision(items), full_float32(items.device):
            products = items[own] @ items.T
        distance = _squared_distance(products, squares[own], squares)
        farthest[own] = distance.amax(1)
        distance[numbers[: len(own)], own] = -1.0
        near[own] = Similarity.from_scores(distance.neg_(), own, numbers).topk(k).indices
    return near, farthest.clamp_min_(torch.finfo(items.dtype).tiny)


def _is_mutual(near: Tensor) -> Tensor:
    """Return (n, k) bool: whether each of an item's nearest (n, k) has it among its own."""
    item = torch.arange(len(near), device=near.device)
    parts = []
    step = max(1, _AT_ONCE // near.shape[1] ** 2)
    for some, own in zip(near.split(step), item.split(step), strict=True):
        parts.append((near[some] == own[:, None, None]).any(2))
    return torch.cat(parts)


def _expanded(near: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs (P,), (P,) of items and their expanded reciprocal neighbours, in order.

    R(x, k) are the mutual ones of the nearest (n, k). R(x, k1) is joined by those R(y, k1/2) of its
    members y of which it has more than two thirds.
    """
    n = len(near)
    mutual = _is_mutual(near)
    half_mutual = _is_mutual(half)
    keys = []
    step = max(1, _AT_ONCE // (near.shape[1] ** 2 * half.shape[1]))
    for item in torch.arange(n, device=near.device).split(step):
        members = near[item]  # (B, k)
        is_member = mutual[item]
        added = half[members]  # (B, k, h)
        is_added = half_mutual[members]
        known = members.masked_fill(~is_member, -1)
        is_known = (added[:, :, :, None] == known[:, None, None]).any(3)
        common = (is_known & is_added).sum(2)
        joins = is_member & (3 * common > 2 * is_added.sum(2))
        of_item = item * n
        own_keys = (of_item[:, None] + members)[is_member]
        added_keys = (of_item[:, None, None] + added)[is_added & joins[:, :, None]]
        keys.append(torch.cat([own_keys, added_keys]).unique())
    pairs = torch.cat(keys)
    return pairs // n, pairs % n


def _averaged(weights: _Weights, near: Tensor) -> _Weights:
    """Return the mean weights over each item's nearest (n, k), as weights of that item."""
    n, k = near.shape
    numbers = torch.arange(n + 1, device=near.device)
    bounds = torch.searchsorted(weights.item, numbers)
    parts = []
    step = max(1, _AT_ONCE * n // (16 * k * len(weights.item)))
    for item in numbers[:-1].split(step):
        members = near[item].flatten()
        entry, place = _in_lists(bounds[members], bounds[members + 1])
        keys = item[entry // k] * n + weights.neighbour[place]
        keys, own = keys.unique(return_inverse=True)
        sums = weights.weight.new_zeros(len(keys)).index_add_(0, own, weights.weight[place])
        parts.append(_Weights(keys // n, keys % n, sums / k))
    return _Weights(*(torch.cat(some) for some in zip(*parts, strict=True)))


def _overlaps(own: _Weights, rows: int, others: _ByNeighbour, size: int) -> Tensor:
    """Return (rows, size): the sum of the smaller of an item's and an other's weights, over their
    common neighbours.
    """
    first = torch.searchsorted(others.neighbour, own.neighbour)
    after = torch.searchsorted(others.neighbour, own.neighbour, right=True)
    entry, place = _in_lists(first, after)
    smaller = torch.minimum(own.weight[entry], others.weight[place])
    overlaps = smaller.new_zeros(rows * size)
    overlaps.index_add_(0, own.item[entry] * size + others.item[place], smaller)
    return overlaps.view(rows, size)


def _in_lists(first: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the members of lists that go from ``first`` (L,) up to ``after`` (L,), one list after
    the other: the (Q,) number of the list, and the place.
    """
    counts = after - first
    number = torch.repeat_interleave(counts)
    place = torch.arange(len(number), device=number.device)
    place += (first - counts.cumsum(0) + counts)[number]
    return number, place
