"""Re-rankers that reorder a query's best candidates: by reciprocal neighbours, or by a second,
expensive scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import check_number, check_size
from ..terms import identity
from .base import Reranker
from .direction import Direction, Rule

_AT_ONCE = 2**19  # scores compared at once, which fit into a cache


def _best_candidates(direction: Direction, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (Q, k) best candidates of this process's queries, their scores, and their places
    by the query's rank.

    Of candidates with the same score, the one with the lower index comes first. The query's rank is
    the number of references with a higher score for the candidate; places count from 1, and equal
    ranks stay in the order of scores.
    """
    best = direction.queries.topk(min(k, direction.queries.shape[1]))
    candidates, by_index = best.indices.sort(1)
    values, order = best.values.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    candidates = candidates.gather(1, order)
    ranks = direction.summed(
        _query_ranks(direction, direction.of_all(values), direction.of_all(candidates))
    )
    ranks = ranks[direction.first[0] :][: len(candidates)]
    return candidates, values, ranks.argsort(dim=1, stable=True).argsort(1).add(1).to(values.dtype)


def _query_ranks(direction: Direction, values: Tensor, candidates: Tensor) -> Tensor:
    """Return the (Q, k) number of references above each query of all processes; 0 for other
    processes' candidates.
    """
    ranks, own = torch.zeros_like(candidates), candidates - direction.first[1]
    for rows, scores in direction.candidates.blocks():
        query, place = ((own >= rows.start) & (own < rows.stop)).nonzero(as_tuple=True)
        row, value = own[query, place] - rows.start, values[query, place]
        # from the same product: rounded otherwise, a query could rank behind itself
        if direction.transductive:
            value = scores[row, query]
        step = max(1, _AT_ONCE // scores.shape[1])
        parts = (x.split(step) for x in (query, place, row, value))
        for q, p, r, x in zip(*parts, strict=True):
            ranks[q, p] = (scores[r] > x[:, None]).sum(1)
    return ranks


def _in_front(candidates: Tensor, values: Tensor) -> Rule:
    """Return the rule by which these (Q, k) candidates come first, by their values; the others keep
    their order.
    """

    def move_to_front(scores: Tensor, rows: slice) -> Tensor:
        peak = scores.amax(1, keepdim=True)
        step = peak.abs().clamp_min(1.0)
        above = values[rows] - values[rows].amin(1, keepdim=True)
        return scores.scatter_(1, candidates[rows], peak + step * (1 + above))

    return move_to_front


class ReciprocalReranker(Reranker):
    """Reciprocal re-ranking, RR (MTFN; Wang et al., ACM MM 2019), without its leak of labels.

    The ``i2t_k`` or ``t2i_k`` best candidates of a query are sorted by ``ρ_qc = #{r : R_rc >
    S_qc}``, the number of reference queries that are closer to the candidate, ascending; where ρ is
    the same, by their scores. The other candidates follow in their order. For text→image, MTFN's
    code takes the best ρ over *all captions of the query's image*, which uses a label.
    """

    def __init__(self, i2t_k: int = 15, t2i_k: int = 20):
        check_size("i2t_k", i2t_k)
        check_size("t2i_k", t2i_k)
        self.i2t_k, self.t2i_k = i2t_k, t2i_k

    def rule(self, direction: Direction) -> Rule:
        candidates, _, place = _best_candidates(direction, (self.i2t_k, self.t2i_k)[direction.side])
        return _in_front(candidates, -place)


class MultiFactorReranker(Reranker):
    """Multivariate re-ranking, MR (GaLR; Yuan et al., TGRS 2022).

    The ``k`` best candidates of a query are ranked by ``share_weight S_qc / sum_r R_rc + exp(-0.05
    j) + place_weight exp(-0.05 l)``, where c is the j-th best by score and the l-th in the order of
    :class:`ReciprocalReranker`. The other candidates follow in their order. The first term makes
    sense where similarities are mostly positive.
    """

    def __init__(self, k: int = 30, share_weight: float = 0.3, place_weight: float = 1.1):
        check_size("k", k)
        check_number("share_weight", share_weight)
        check_number("place_weight", place_weight)
        self.k, self.share_weight, self.place_weight = k, share_weight, place_weight

    def rule(self, direction: Direction) -> Rule:
        sums = direction.of_all(direction.candidates.sum(identity))
        candidates, scores, place = _best_candidates(direction, self.k)
        j = torch.arange(1, candidates.shape[1] + 1, dtype=sums.dtype, device=sums.device)
        share = torch.where(sums[candidates] == 0, 0.0, scores / sums[candidates])
        values = (
            self.share_weight * share
            + (-0.05 * j).exp()
            + self.place_weight * (-0.05 * place).exp()
        )
        return _in_front(candidates, values)


class TwoStageReranker(Reranker):
    """Two stages: the k best candidates of a query are sorted by a second, expensive scorer.

    They are ranked by ``scorer + weight S_qc``, as in the evaluation of BLIP and ALBEF, where the
    scorer is the image-text matching head (ITM) and S are the contrastive scores (ITC). The other
    candidates follow in their order. Queries are independent.

    Args:
        scorer: a function of (P,) int64 image indices and (P,) int64 text indices that returns (P,)
            scores.
        k, weight: number of candidates that are scored again, and the weight of S.
        batch_size: the largest P.

    Raises:
        ValueError: while re-ranking, if the scorer returns another shape, nan or infinity.
    """

    takes_bank = False

    def __init__(
        self,
        scorer: Callable[[Tensor, Tensor], Tensor],
        k: int = 16,
        weight: float = 1.0,
        batch_size: int = 256,
    ):
        if not callable(scorer):
            raise TypeError(
                f"scorer: expected a function of image and text numbers, got {type(scorer).__name__}"
            )
        check_size("k", k)
        check_number("weight", weight)
        check_size("batch_size", batch_size)
        self.scorer, self.k, self.weight, self.batch_size = scorer, k, weight, batch_size

    @property
    def transductive(self) -> tuple[bool, bool]:
        """(False, False): queries are independent."""
        return False, False

    def state_dict(self) -> dict[str, Any]:
        """Return the options but for the scorer, which :meth:`load_state_dict` leaves as it is."""
        state = super().state_dict()
        del state["options"]["scorer"]
        return state

    def _description(self) -> str:
        # a scorer may have another address elsewhere
        return f"{type(self).__name__} {self.state_dict()['options']}"

    def rule(self, direction: Direction) -> Rule:
        scores, candidates = direction.queries.topk(min(self.k, direction.queries.shape[1]))
        queries = torch.arange(len(candidates), device=candidates.device) + direction.first[0]
        pairs = queries.repeat_interleave(candidates.shape[1]), candidates.flatten()
        batches = (x.split(self.batch_size) for x in pairs[:: 1 - 2 * direction.side])
        values = []
        for images, texts in zip(*batches, strict=True):
            x = self.scorer(images, texts)
            if not isinstance(x, Tensor) or x.shape != images.shape or not bool(x.isfinite().all()):
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"scorer: expected finite scores of shape ({len(images)},), got {got}"
                )
            values.append(x.detach())
        return _in_front(
            candidates, torch.cat(values).to(scores).view_as(scores) + self.weight * scores
        )


class KReciprocalReranker(Reranker):
    """k-reciprocal encoding (Zhong et al., CVPR 2017) on images and texts as one set; needs
    embeddings.

    Items are close if they have the same reciprocal neighbours: the score is ``-((1 - weight) J_qc
    + weight d_qc)`` with the Jaccard distance J of their neighbourhoods and the squared distance d,
    divided by the query's largest. It needs all N + M items and a few matrices of (N + M)² numbers.
    It takes no banks.

    Args:
        k1: size of the reciprocal neighbourhoods.
        k2: number of nearest items whose neighbourhoods are averaged.
        weight: a number in [0, 1].
    """

    needs_embeddings = True
    takes_bank = False

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
        pair = direction.queries.embeddings
        assert pair is not None
        items = torch.cat(
            [torch.nn.functional.normalize(x.to(direction.queries.dtype), dim=1) for x in pair]
        )
        distance = (2 - 2 * items @ items.T).clamp_min_(0.0)
        distance /= distance.amax(1, keepdim=True).clamp_min(torch.finfo(distance.dtype).tiny)
        distance.fill_diagonal_(-1.0)  # so that the nearest neighbour of an item is itself
        # frees the rest
        near = distance.argsort(dim=1, stable=True)[:, : max(self.k1, self.k2) + 1].clone()
        distance.fill_diagonal_(0.0)
        weights = self._encoded(distance, near)
        n = direction.queries.shape[0]
        # frees the rest
        candidates, distance = weights[n:].T.contiguous(), distance[:n, n:].clone()

        def by_neighbours(scores: Tensor, rows: slice) -> Tensor:
            for query, own in zip(scores, weights[rows], strict=True):
                near = own.nonzero().squeeze(1)
                torch.sum(torch.minimum(own[near, None], candidates[near]), 0, out=query)
            jaccard = 1 - scores / (2 - scores)
            return -((1 - self.weight) * jaccard + self.weight * distance[rows])

        return by_neighbours

    def _encoded(self, distance: Tensor, near: Tensor) -> Tensor:
        """Return the (n, n) weights of each item's neighbours; rows sum to 1."""
        half = near[:, : round(self.k1 / 2) + 1]
        neighbours, in_half = _mutual(near[:, : self.k1 + 1]), _mutual(half).gather(1, half)
        expanded = neighbours.clone()
        for y in near[:, : self.k1 + 1].T:  # of each item, the nearest, the second, …
            added, is_mutual = half[y], in_half[y]
            common = (neighbours.gather(1, added) & is_mutual).sum(1)
            joins = neighbours.gather(1, y[:, None]) & (3 * common > 2 * is_mutual.sum(1))[:, None]
            x, place = (is_mutual & joins).nonzero(as_tuple=True)
            expanded[x, added[x, place]] = True
        weights = torch.exp(-distance).masked_fill_(~expanded, 0.0)
        weights /= weights.sum(1, keepdim=True)
        return torch.nn.functional.embedding_bag(near[:, : self.k2], weights, mode="mean")


def _mutual(near: Tensor) -> Tensor:
    """Return (n, n) bool: which items are among each other's nearest (n, k)."""
    among = torch.zeros(len(near), len(near), dtype=torch.bool, device=near.device)
    among.scatter_(1, near, True)
    return among & among.T
