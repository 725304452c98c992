"""Re-rankers that reorder a query's best candidates: by reciprocal neighbours, or by a second, expensive scorer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checks import check_number, check_size
from ..engine.answers import identity
from .base import Reranker
from .direction import Direction, Rule


def _best_candidates(direction: Direction, k: int) -> tuple[Tensor, Tensor]:
    """Return the (Q, k) best candidates of this process's queries, best first, and the query's rank for each.

    The rank is the number of reference queries with a higher score for the candidate. Of two candidates with the same
    score, the one with the lower index comes first.
    """
    best = direction.queries.topk(min(k, direction.queries.shape[1]))
    candidates, by_index = best.indices.sort(1)
    values, order = best.values.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    candidates = candidates.gather(1, order)
    ranks = direction.summed(_query_ranks(direction, direction.of_all(values), direction.of_all(candidates)))
    first = direction.first[0]
    return candidates, ranks[first : first + len(candidates)]


def _query_ranks(direction: Direction, values: Tensor, candidates: Tensor) -> Tensor:
    """Return the (Q, k) number of references above each query of all processes; 0 for other processes' candidates."""
    ranks = torch.zeros_like(candidates)
    flat = candidates.flatten() - direction.first[1]
    ordered, order = flat.sort()  # the pairs, by candidate
    query = order // candidates.shape[1]
    for rows, scores in direction.candidates.blocks():
        ends = torch.tensor([rows.start, rows.stop], device=ordered.device)
        first, last = torch.searchsorted(ordered, ends).tolist()
        if first == last:
            continue
        row, pair = ordered[first:last] - rows.start, order[first:last]
        # From the same product as the other references: rounded otherwise, a query could rank behind itself.
        own = scores[row, query[first:last]] if direction.transductive else values.flatten()[pair]
        ascending = scores.sort(1).values
        above = torch.empty_like(pair)
        for part in torch.arange(len(pair), device=pair.device).split(max(1, scores.numel() // scores.shape[1])):
            below = torch.searchsorted(ascending[row[part]], own[part, None], right=True).squeeze(1)
            above[part] = scores.shape[1] - below
        ranks.view(-1)[pair] = above
    return ranks


def _move_to_front_(scores: Tensor, candidates: Tensor, values: Tensor) -> Tensor:
    """Rank these (B, k) candidates by ``values``, ahead of the others, which keep their (B, C) ``scores``."""
    peak = scores.amax(1, keepdim=True)
    step = peak.abs().clamp_min(1.0)
    above = values - values.amin(1, keepdim=True)
    return scores.scatter_(1, candidates, peak + step * (1 + above))


class ReciprocalReranker(Reranker):
    r"""Reciprocal re-ranking, RR (MTFN; Wang et al., ACM MM 2019), without its leak of labels.

    The k best candidates of a query are sorted by ``ρ_qc = #{r : R_rc > S_qc}``, the number of reference queries that
    are closer to the candidate, ascending; where ρ is the same, by their scores. The other candidates follow in their
    order.

    For text→image, MTFN's code takes the best ρ over *all captions of the query's image*. That uses a label, and is not
    offered.

    Args:
        i2t_k, t2i_k: number of candidates that are reordered.
    """

    def __init__(self, i2t_k: int = 15, t2i_k: int = 20):
        check_size("i2t_k", i2t_k)
        check_size("t2i_k", t2i_k)
        self.i2t_k, self.t2i_k = i2t_k, t2i_k

    def rule(self, direction: Direction) -> Rule:
        candidates, ranks = _best_candidates(direction, (self.i2t_k, self.t2i_k)[direction.side])
        candidates = candidates.gather(1, ranks.argsort(dim=1, stable=True))
        k = candidates.shape[1]

        def by_query_rank(scores: Tensor, rows: slice) -> Tensor:
            values = torch.arange(k, 0, -1, dtype=scores.dtype, device=scores.device).expand(len(scores), k)
            return _move_to_front_(scores, candidates[rows], values)

        return by_query_rank


class MultiFactorReranker(Reranker):
    r"""Multivariate re-ranking, MR (GaLR; Yuan et al., TGRS 2022).

    The k best candidates of a query are ranked by ``w₁ S_qc / sum_r R_rc + exp(-0.05 j) + w₂ exp(-0.05 l)``, where c is
    the j-th best by score and the l-th in the order of :class:`ReciprocalReranker`. The other candidates follow in
    their order.

    The first term is a share of a sum of similarities, which makes sense where these are mostly positive.

    Args:
        k: number of candidates that are reordered.
        share_weight, place_weight: w₁, w₂.
    """

    def __init__(self, k: int = 30, share_weight: float = 0.3, place_weight: float = 1.1):
        check_size("k", k)
        check_number("share_weight", share_weight)
        check_number("place_weight", place_weight)
        self.k, self.share_weight, self.place_weight = k, share_weight, place_weight

    def rule(self, direction: Direction) -> Rule:
        sums = direction.of_all(direction.candidates.sum(identity))
        candidates, ranks = _best_candidates(direction, self.k)
        order = ranks.argsort(dim=1, stable=True)
        j = torch.arange(1, candidates.shape[1] + 1, dtype=sums.dtype, device=sums.device)

        def by_factors(scores: Tensor, rows: slice) -> Tensor:
            best, total = candidates[rows], sums[candidates[rows]]
            place = torch.empty_like(total).scatter_(1, order[rows], j.expand(best.shape))
            share = torch.where(total == 0, 0.0, scores.gather(1, best) / total)
            values = self.share_weight * share + (-0.05 * j).exp() + self.place_weight * (-0.05 * place).exp()
            return _move_to_front_(scores, best, values)

        return by_factors


class TwoStageReranker(Reranker):
    r"""Two stages: the k best candidates of a query are sorted by a second, expensive scorer.

    They are ranked by ``f(q, c) + w S_qc``, as in the evaluation of BLIP and ALBEF, where f is the image-text matching
    head (ITM) and S are the contrastive scores (ITC). The other candidates follow in their order. Queries are
    independent.

    Args:
        scorer: f, a function of (P,) int64 image indices and (P,) int64 text indices that returns (P,) scores.
        k: number of candidates that are scored again.
        weight: w.
        batch_size: the largest P.

    Raises:
        ValueError: while re-ranking, if the scorer returns another shape, nan or infinity.
    """

    takes_bank = False
    _ranks_single_query = True

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
        """(False, False): queries are independent."""
        return False, False

    def rule(self, direction: Direction) -> Rule:
        scores, candidates = direction.queries.topk(min(self.k, direction.queries.shape[1]))
        queries = torch.arange(len(candidates), device=candidates.device) + direction.first[0]
        pairs = queries.repeat_interleave(candidates.shape[1]), candidates.flatten()
        batches = (x.split(self.batch_size) for x in pairs[:: 1 - 2 * direction.side])
        values = torch.cat([self._scored(*batch) for batch in zip(*batches, strict=True)])
        values = values.to(scores).view_as(scores) + self.weight * scores
        return lambda block, rows: _move_to_front_(block, candidates[rows], values[rows])

    def _scored(self, images: Tensor, texts: Tensor) -> Tensor:
        scores = self.scorer(images, texts)
        if not isinstance(scores, Tensor) or scores.shape != images.shape or not bool(scores.isfinite().all()):
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"scorer: expected finite scores of shape ({len(images)},), got {shape}")
        return scores.detach()


class KReciprocalReranker(Reranker):
    r"""k-reciprocal encoding (Zhong et al., CVPR 2017) on images and texts as one set; needs embeddings.

    Items are close if they have the same reciprocal neighbours: the score is ``-((1 - λ) J_qc + λ d_qc)`` with the
    Jaccard distance J of their neighbourhoods and the squared distance d, divided by the query's largest. It needs all
    N + M items and a few matrices of (N + M)² numbers. It takes no banks.

    Args:
        k1: size of the reciprocal neighbourhoods.
        k2: number of nearest items whose neighbourhoods are averaged.
        weight: λ in [0, 1].
    """

    needs_embeddings = True
    takes_bank = False
    _ranks_single_query = True

    def __init__(self, k1: int = 20, k2: int = 6, weight: float = 0.3):
        check_size("k1", k1)
        check_size("k2", k2)
        check_number("weight", weight)
        if not 0 <= weight <= 1:
            raise ValueError(f"weight: expected a number in [0, 1], got {weight}")
        self.k1, self.k2, self.weight = k1, k2, weight

    def _description(self) -> str:
        raise ValueError("gather: KReciprocalReranker needs all items in one process")

    def rule(self, direction: Direction) -> Rule:
        pair = direction.queries._inputs
        assert pair is not None
        items = torch.cat([torch.nn.functional.normalize(x.to(direction.queries.dtype), dim=1) for x in pair])
        distance = (2 - 2 * items @ items.T).clamp_min_(0.0)
        distance /= distance.amax(1, keepdim=True).clamp_min(torch.finfo(distance.dtype).tiny)
        distance.fill_diagonal_(-1.0)  # so that the nearest neighbour of an item is itself
        near = distance.argsort(dim=1, stable=True)[:, : max(self.k1, self.k2) + 1].clone()  # frees the rest
        distance.fill_diagonal_(0.0)
        weights = self._encoded(distance, near)
        n = direction.queries.shape[0]
        squared, shared = distance[:n, n:].clone(), _shared(weights, n)

        def by_neighbours(scores: Tensor, rows: slice) -> Tensor:
            jaccard = 1 - shared[rows] / (2 - shared[rows])
            return -((1 - self.weight) * jaccard + self.weight * squared[rows])

        return by_neighbours

    def _encoded(self, distance: Tensor, near: Tensor) -> Tensor:
        """Return the (n, n) weights of each item's neighbours; rows sum to 1."""
        members, half_members = _reciprocal(near, self.k1), _reciprocal(near, max(1, round(self.k1 / 2)))
        n, half = len(near), near[:, : half_members.shape[1]]
        neighbours = torch.zeros(n, n, dtype=torch.bool, device=near.device)
        neighbours.scatter_(1, near[:, : members.shape[1]], members)
        expanded, size = neighbours.clone(), half_members.sum(1)
        for x in range(n):
            y = neighbours[x].nonzero().squeeze(1)
            common = (neighbours[x][half[y]] & half_members[y]).sum(1)
            added = y[3 * common > 2 * size[y]]
            expanded[x, half[added][half_members[added]]] = True
        weights = torch.exp(-distance).masked_fill_(~expanded, 0.0)
        weights /= weights.sum(1, keepdim=True)
        if self.k2 > 1:
            total = torch.zeros_like(weights)
            for column in near[:, : self.k2].T:
                total += weights[column]
            weights = total / min(self.k2, near.shape[1])
        return weights


def _shared(weights: Tensor, n: int) -> Tensor:
    """Return the (n, candidates) sums ``sum_z min(v_qz, v_cz)`` of the weights v of queries and candidates."""
    candidates = weights[n:].T.contiguous()
    shared = torch.empty(n, candidates.shape[1], dtype=weights.dtype, device=weights.device)
    for query in range(n):
        neighbours = weights[query].nonzero().squeeze(1)
        shared[query] = torch.minimum(weights[query, neighbours, None], candidates[neighbours]).sum(0)
    return shared


def _reciprocal(near: Tensor, k: int) -> Tensor:
    """Return (n, k + 1) bool: which of an item's k + 1 nearest have it among their own k + 1 nearest."""
    near = near[:, : k + 1]
    return (near[near] == torch.arange(len(near), device=near.device)[:, None, None]).any(2)
