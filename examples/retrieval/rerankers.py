"""The re-rankers that DVSE's table IV compares with Fast Re-ranking: RR of MTFN, and MR of GaLR.

Both reorder a query's best candidates by the query's own rank among all queries of each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from itrloss import option
from itrloss.rerank import Direction, Reranker
from itrloss.rerank.direction import Rule
from itrloss.rerank.two_stage import in_front

PAIRS = 1000  # of a query and a candidate, that are ranked at a time


class Best(NamedTuple):
    """The k best candidates of each query."""

    candidates: Tensor  # (Q, k)
    scores: Tensor  # (Q, k), in descending order
    places: Tensor  # (Q, k) from 1, by the query's rank for the candidate


def best_candidates(direction: Direction, k: int) -> Best:
    """Return the best candidates of each query.

    Of candidates with the same score, the one with the lower index comes first. The query's rank is
    the number of references with a higher score for the candidate; equal ranks stay in the order of
    scores.
    """
    best = direction.queries.topk(min(k, direction.queries.shape[1]))
    candidates, by_index = best.indices.sort(1)
    scores, order = best.values.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    candidates = candidates.gather(1, order)
    ranks = query_ranks(direction, scores, candidates)
    places = ranks.argsort(dim=1, stable=True).argsort(1) + 1
    return Best(candidates, scores, places)


def query_ranks(direction: Direction, scores: Tensor, candidates: Tensor) -> Tensor:
    """Return the (Q, k) number of references whose score for a candidate is above the query's."""
    ranks = torch.zeros_like(candidates)
    for rows, block in direction.candidates.blocks():
        inside = (candidates >= rows.start) & (candidates < rows.stop)
        query, place = inside.nonzero(as_tuple=True)
        row = candidates[query, place] - rows.start  # (P,), as its score
        score = scores[query, place]
        # From the same product: rounded otherwise, a query could rank behind itself.
        if direction.transductive:
            score = block[row, query]
        parts = zip(row.split(PAIRS), score.split(PAIRS), strict=True)
        above = [(block[rows] > own[:, None]).sum(1) for rows, own in parts]
        ranks[query, place] = torch.cat(above)
    return ranks


class ReciprocalReranker(Reranker):
    """Reciprocal re-ranking, RR (MTFN; Wang et al., ACM MM 2019), without its leak of labels.

    The ``i2t_k`` or ``t2i_k`` best candidates of a query are sorted by ``ρ_qc = #{r : R_rc >
    S_qc}``, the number of reference queries that are closer to the candidate, ascending; where ρ is
    the same, by their scores. The other candidates follow in their order. For text→image, MTFN's
    code takes the best ρ over *all captions of the query's image*, which uses a label.
    """

    i2t_k: int = option(default=15, at_least=1)
    t2i_k: int = option(default=20, at_least=1)

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that sorts the best candidates by the query's rank."""
        best = best_candidates(direction, self.t2i_k if direction.side else self.i2t_k)
        return in_front(best.candidates, -best.places)


class MultiFactorReranker(Reranker):
    """Multivariate re-ranking, MR (GaLR; Yuan et al., TGRS 2022).

    The ``k`` best candidates of a query are ranked by ``share_weight S_qc / sum_r R_rc + exp(-0.05
    j) + place_weight exp(-0.05 l)``, where c is the j-th best by score and the l-th in the order of
    :class:`ReciprocalReranker`. The other candidates follow in their order. The first term makes
    sense where similarities are mostly positive.
    """

    k: int = option(default=30, at_least=1)
    share_weight: float = 0.3
    place_weight: float = 1.1

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that sorts the best candidates by the three terms."""
        # In float64: of hundreds of candidates, the last terms are far smaller than the shares.
        own = direction.candidates
        sums = torch.empty(own.shape[0], dtype=torch.float64, device=own.device)
        for rows, block in own.blocks():
            torch.sum(block, 1, dtype=torch.float64, out=sums[rows])
        best = best_candidates(direction, self.k)
        own_sums = sums[best.candidates]
        share = torch.where(own_sums == 0, 0.0, best.scores / own_sums)
        j = torch.arange(1, best.candidates.shape[1] + 1, dtype=sums.dtype, device=sums.device)
        by_score = (-0.05 * j).exp()
        by_place = (-0.05 * best.places.double()).exp()
        values = self.share_weight * share + by_score + self.place_weight * by_place
        return in_front(best.candidates, values)


#: By the names that ``papers.toml`` has for them.
METHODS: dict[str, type[Reranker]] = {
    "reciprocal": ReciprocalReranker,
    "multi-factor": MultiFactorReranker,
}
