"""Re-rankers that reorder a query's best candidates: by how these see the query, or by a second, expensive scorer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_number, check_size
from ..engine.answers import identity
from .base import Reranker
from .direction import Direction, Rule


class _Best(NamedTuple):
    """The k best candidates of each own query, best first, (queries, k) each."""

    candidates: Tensor
    place: Tensor  # how many reference queries the candidate prefers to this one


def _best(direction: Direction, k: int) -> _Best:
    best = direction.queries.topk(min(k, direction.queries.shape[1]))
    values, candidates = _stable(best.values, best.indices)
    place = direction.summed(_places(direction, direction.of_all(values), direction.of_all(candidates)))
    first = direction.first[0]
    return _Best(candidates, place[first : first + len(candidates)])


def _places(direction: Direction, values: Tensor, candidates: Tensor) -> Tensor:
    """Return (queries of all processes, k): how many references an own candidate prefers; 0 for the others."""
    place = torch.zeros_like(candidates)
    flat = candidates.flatten() - direction.first[1]
    order = flat.argsort()
    ordered = flat[order]  # the pairs, by candidate
    query = order // candidates.shape[1]
    for rows, scores in direction.candidates.blocks():
        ends = torch.tensor([rows.start, rows.stop], device=ordered.device)
        first, last = torch.searchsorted(ordered, ends).tolist()
        if first == last:
            continue
        row, pair = ordered[first:last] - rows.start, order[first:last]
        # The very product that the rivals come from: rounded otherwise, a query could stand behind itself.
        own = scores[row, query[first:last]] if direction.transductive else values.flatten()[pair]
        ascending = scores.sort(1).values
        count = torch.empty_like(pair)
        for part in torch.arange(len(pair), device=pair.device).split(max(1, scores.numel() // scores.shape[1])):
            behind = torch.searchsorted(ascending[row[part]], own[part, None], right=True).squeeze(1)
            count[part] = scores.shape[1] - behind
        place.view(-1)[pair] = count
    return place


def _stable(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and indices sorted, best first; of two with the same score, the one with the lower number."""
    by_number = indices.argsort(1)
    values, indices = values.gather(1, by_number), indices.gather(1, by_number)
    order = values.argsort(dim=1, descending=True, stable=True)
    return values.gather(1, order), indices.gather(1, order)


def _lift_(scores: Tensor, candidates: Tensor, values: Tensor) -> Tensor:
    """Give these candidates of each row these values, all above those of the others, which stay as they are."""
    peak = scores.amax(1, keepdim=True)
    step = peak.abs().clamp_min(1.0)
    above = values - values.amin(1, keepdim=True)
    return scores.scatter_(1, candidates, peak + step * (1 + above))


class ReciprocalReranker(Reranker):
    r"""Reciprocal re-ranking, RR (MTFN; Wang et al., ACM MM 2019), without its leak of labels.

    The k best candidates of a query are put in the order of ``ρ_qc = #{r : R_rc > S_qc}``, how many queries stand
    between a candidate and this one; by their scores where ρ is the same. The other candidates follow in their order.

    MTFN's code for text→image takes the best place of *all captions of the query's image*. Which those are is the
    answer that is asked for, and a label: that form is not offered.

    Args:
        i2t_k, t2i_k: how many candidates are reordered.
    """

    def __init__(self, i2t_k: int = 15, t2i_k: int = 20):
        check_size("i2t_k", i2t_k)
        check_size("t2i_k", t2i_k)
        self.i2t_k, self.t2i_k = i2t_k, t2i_k

    def rule(self, direction: Direction) -> Rule:
        best = _best(direction, (self.i2t_k, self.t2i_k)[direction.side])

        def by_place(scores: Tensor, rows: slice) -> Tensor:
            order = best.place[rows].argsort(dim=1, stable=True)
            candidates = best.candidates[rows].gather(1, order)
            k = candidates.shape[1]
            values = torch.arange(k, 0, -1, dtype=scores.dtype, device=scores.device).expand(len(scores), k)
            return _lift_(scores, candidates, values)

        return by_place


class MultiFactorReranker(Reranker):
    r"""Multivariate re-ranking, MR (GaLR; Yuan et al., TGRS 2022).

    The k best candidates of a query, of which c is the j-th, and in the order of :class:`ReciprocalReranker` the l-th,
    get ``w₁ S_qc / sum_r R_rc + exp(-0.05 j) + w₂ exp(-0.05 l)``. The other candidates follow in their order.

    The sum is of similarities, and a share of it makes sense where they are mostly positive.

    Args:
        k: how many candidates are reordered.
        share_weight, place_weight: w₁, w₂.
    """

    def __init__(self, k: int = 30, share_weight: float = 0.3, place_weight: float = 1.1):
        check_size("k", k)
        check_number("share_weight", share_weight)
        check_number("place_weight", place_weight)
        self.k, self.share_weight, self.place_weight = k, share_weight, place_weight

    def rule(self, direction: Direction) -> Rule:
        sums = direction.of_all(direction.candidates.sum(identity))
        best = _best(direction, self.k)

        def by_factors(scores: Tensor, rows: slice) -> Tensor:
            candidates = best.candidates[rows]
            k = candidates.shape[1]
            j = torch.arange(1, k + 1, dtype=scores.dtype, device=scores.device)
            order = best.place[rows].argsort(dim=1, stable=True)
            place = torch.empty_like(scores[:, :k]).scatter_(1, order, j.expand(len(scores), k))
            total = sums[candidates]
            share = torch.where(total == 0, 0.0, scores.gather(1, candidates) / total)
            values = self.share_weight * share + (-0.05 * j).exp() + self.place_weight * (-0.05 * place).exp()
            return _lift_(scores, candidates, values)

        return by_factors


class TwoStageReranker(Reranker):
    r"""Two stages: the k best candidates of a query are put in the order of a second, expensive scorer.

    They are ranked by ``f(q, c) + w S_qc``, as BLIP's and ALBEF's evaluation ranks by the head that matches images and
    texts (ITM) after the contrastive scores (ITC). The other candidates follow in their order. Queries are independent.

    Args:
        scorer: f, a function of (P,) int64 numbers of images and (P,) of texts that returns (P,) scores.
        k: how many candidates are scored again.
        weight: w.
        batch_size: P at most.

    Raises:
        ValueError: while re-ranking, if the scorer returns another shape, nan or infinity.
    """

    takes_bank = False
    _ranks_alone = True

    def __init__(
        self, scorer: Callable[[Tensor, Tensor], Tensor], k: int = 16, weight: float = 1.0, batch_size: int = 256
    ):
        if not callable(scorer):
            raise TypeError(f"scorer: expected a function of image and text numbers, got {type(scorer).__name__}")
        check_size("k", k)
        check_number("weight", weight)
        check_size("batch_size", batch_size)
        self.scorer, self.k, self.weight, self.batch_size = scorer, k, weight, batch_size

    @property
    def transductive(self) -> tuple[bool, bool]:
        """(False, False): each query stands for itself."""
        return False, False

    def rule(self, direction: Direction) -> Rule:
        scores, candidates = direction.queries.topk(min(self.k, direction.queries.shape[1]))
        queries = torch.arange(len(candidates), device=candidates.device) + direction.first[0]
        pairs = queries.repeat_interleave(candidates.shape[1]), candidates.flatten()
        batches = (x.split(self.batch_size) for x in pairs[:: 1 - 2 * direction.side])
        values = torch.cat([self._scored(*batch) for batch in zip(*batches, strict=True)])
        values = values.to(scores).view_as(scores) + self.weight * scores
        return lambda block, rows: _lift_(block, candidates[rows], values[rows])

    def _scored(self, images: Tensor, texts: Tensor) -> Tensor:
        scores = self.scorer(images, texts)
        if not isinstance(scores, Tensor) or scores.shape != images.shape or not bool(scores.isfinite().all()):
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"scorer: expected finite scores of shape ({len(images)},), got {shape}")
        return scores.detach()


class KReciprocalReranker(Reranker):
    r"""k-reciprocal encoding (Zhong et al., CVPR 2017), of images and texts as one set; needs embeddings.

    Items are close if they have the same reciprocal neighbours: the score is ``-((1 - λ) J_qc + λ d_qc)`` with the
    Jaccard distance J of their neighbourhoods and the squared distance d, as a share of the query's largest. It looks
    at all N + M items and holds (N + M)² numbers a few times over; banks have no place in it.

    Args:
        k1: size of the reciprocal neighbourhoods.
        k2: how many neighbours lend an item theirs.
        weight: λ in [0, 1].
    """

    needs_embeddings = True
    takes_bank = False
    _ranks_alone = True

    def __init__(self, k1: int = 20, k2: int = 6, weight: float = 0.3):
        check_size("k1", k1)
        check_size("k2", k2)
        check_number("weight", weight)
        if not 0 <= weight <= 1:
            raise ValueError(f"weight: expected a number in [0, 1], got {weight}")
        self.k1, self.k2, self.weight = k1, k2, weight

    def _question(self) -> str:
        raise ValueError("gather: KReciprocalReranker needs all items at once; re-rank those of all in one process")

    def rule(self, direction: Direction) -> Rule:
        pair = direction.queries._inputs
        assert pair is not None
        items = torch.cat([torch.nn.functional.normalize(x.to(direction.queries.dtype), dim=1) for x in pair])
        distance = (2 - 2 * items @ items.T).clamp_min_(0.0)
        distance /= distance.amax(1, keepdim=True).clamp_min(torch.finfo(distance.dtype).tiny)
        distance.fill_diagonal_(-1.0)  # an item is its own first neighbour
        near = distance.argsort(dim=1, stable=True)[:, : max(self.k1, self.k2) + 1].clone()  # not all of it
        distance.fill_diagonal_(0.0)
        weights = self._encoded(distance, near)
        n = direction.queries.shape[0]
        squared, shared = distance[:n, n:].clone(), self._shared(weights, n)

        def by_neighbours(scores: Tensor, rows: slice) -> Tensor:
            jaccard = 1 - shared[rows] / (2 - shared[rows])
            return -((1 - self.weight) * jaccard + self.weight * squared[rows])

        return by_neighbours

    def _encoded(self, distance: Tensor, near: Tensor) -> Tensor:
        """Return (n, n) weights of the items' neighbourhoods, each row with sum 1."""
        whole, half = _reciprocal(near, self.k1), _reciprocal(near, max(1, round(self.k1 / 2)))
        n = len(near)
        members = torch.zeros(n, n, dtype=torch.bool, device=near.device)
        members.scatter_(1, near[:, : whole.shape[1]], whole)
        expanded = members.clone()
        narrow, inside = near[:, : half.shape[1]], half
        size = inside.sum(1)
        for x in range(n):
            y = members[x].nonzero().squeeze(1)
            shared = (members[x][narrow[y]] & inside[y]).sum(1)
            joined = y[3 * shared > 2 * size[y]]
            expanded[x, narrow[joined][inside[joined]]] = True
        weights = torch.exp(-distance).masked_fill_(~expanded, 0.0)
        weights /= weights.sum(1, keepdim=True)
        if self.k2 > 1:
            lent = torch.zeros_like(weights)
            for column in near[:, : self.k2].T:
                lent += weights[column]
            weights = lent / min(self.k2, near.shape[1])
        return weights

    def _shared(self, weights: Tensor, n: int) -> Tensor:
        """Return (n, candidates) ``sum_z min(v_qz, v_cz)``."""
        others = weights[n:].T.contiguous()
        shared = torch.empty(n, others.shape[1], dtype=weights.dtype, device=weights.device)
        for query in range(n):
            where = weights[query].nonzero().squeeze(1)
            shared[query] = torch.minimum(weights[query, where, None], others[where]).sum(0)
        return shared


def _reciprocal(near: Tensor, k: int) -> Tensor:
    """Return (n, k + 1) bool: which of an item's k + 1 nearest have it among theirs."""
    near = near[:, : k + 1]
    back = near[near]  # (n, k + 1, k + 1)
    return (back == torch.arange(len(near), device=near.device)[:, None, None]).any(2)
