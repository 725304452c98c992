"""Re-rankers that reorder a query's best candidates: by reciprocal neighbours, or by a second,
expensive scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import from_numpy, option
from .base import Reranker
from .direction import Direction, Rule

_AT_ONCE = 2**19  # scores compared at once, which fit into a cache
_FEW_IN_A_ROW = 2  # scores that are looked for in a row, up to which it is not sorted


class _Best(NamedTuple):
    """The k best candidates of this process's queries."""

    candidates: Tensor  # (Q, k)
    scores: Tensor  # (Q, k), in descending order
    places: Tensor  # (Q, k) from 1, by the query's rank for the candidate


def _best_candidates(direction: Direction, k: int) -> _Best:
    """Return the best candidates of this process's queries.

    Of candidates with the same score, the one with the lower index comes first. The query's rank is
    the number of references with a higher score for the candidate; equal ranks stay in the order of
    scores.
    """
    best = direction.queries.topk(min(k, direction.queries.shape[1]))
    candidates, by_index = best.indices.sort(1)
    scores, order = best.values.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    candidates = candidates.gather(1, order)
    all_ranks = _query_ranks(direction, direction.of_all(scores), direction.of_all(candidates))
    ranks = direction.summed(all_ranks)[direction.first[0] :][: len(candidates)]
    places = ranks.argsort(dim=1, stable=True).argsort(1) + 1
    return _Best(candidates, scores, places)


def _query_ranks(direction: Direction, scores: Tensor, candidates: Tensor) -> Tensor:
    """Return the (Q, k) number of references above each query of all processes; 0 for other
    processes' candidates.
    """
    ranks = torch.zeros_like(candidates)
    own = candidates - direction.first[1]
    for rows, block in direction.candidates.blocks():
        query, place = ((own >= rows.start) & (own < rows.stop)).nonzero(as_tuple=True)
        row = own[query, place] - rows.start  # (P,), as its score
        score = scores[query, place]
        # from the same product: rounded otherwise, a query could rank behind itself
        if direction.transductive:
            score = block[row, query]
        ranks[query, place] = _numbers_above(block, row, score)
    return ranks


def _numbers_above(block: Tensor, row: Tensor, score: Tensor) -> Tensor:
    """Return how many scores in row ``row[p]`` (P,) of a block (B, R) are above ``score[p]``.

    The rows are sorted, in place, where many scores are looked for in them: with 25 000 texts whose
    30 best of 5000 images are ranked, 5 s in place of 60 (``python -m benchmarks.reranking``).
    """
    size = block.shape[1]
    if len(row) <= _FEW_IN_A_ROW * len(block):
        step = max(1, _AT_ONCE // size)
        above = []
        for some_rows, some_scores in zip(row.split(step), score.split(step), strict=True):
            above.append((block[some_rows] > some_scores[:, None]).sum(1))
        return torch.cat(above)
    ordered, order = row.sort(stable=True)
    numbers = torch.bincount(ordered, minlength=len(block)).tolist()
    above = []
    for scores, own in zip(sorted_rows(block), score[order].split(numbers), strict=True):
        above.append(size - torch.searchsorted(scores, own, right=True))
    return torch.empty_like(row).index_copy_(0, order, torch.cat(above))


def sorted_rows(block: Tensor) -> Tensor:
    """Return the rows of a block (B, R) in ascending order, in the block's memory on a CPU."""
    if block.device.type != "cpu":
        return block.sort(1).values
    block.numpy().sort(axis=1)  # five times as fast as PyTorch's, which moves indices along
    return block


def _in_front(candidates: Tensor, values: Tensor) -> Rule:
    """Return the rule by which these (Q, k) candidates come first, by their values; the others keep
    their order.
    """
    levels = _levels(values)

    def move_to_front(scores: Tensor, rows: slice) -> Tensor:
        """Raise the chosen candidates of a block's queries above its highest score."""
        peak = scores.amax(1, keepdim=True)
        room = torch.finfo(scores.dtype).max - peak.clamp_min(0.0)
        step = peak.abs().clamp_min(1.0)
        step = torch.minimum(step, room / (levels.shape[1] + 1))
        return scores.scatter_(1, candidates[rows], peak + step * levels[rows].to(scores))

    return move_to_front


def _levels(values: Tensor) -> Tensor:
    """Return the place of each of the (Q, k) values in its row, 1 for the least; equal ones share
    it.

    Scores hold small integers exactly. Added to scores, the values themselves would lose digits.
    """
    ordered, order = values.sort(dim=1)
    rises = ordered[:, 1:] > ordered[:, :-1]
    levels = F.pad(rises.cumsum(1), (1, 0)) + 1
    return torch.empty_like(levels).scatter_(1, order, levels)


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
        best = _best_candidates(direction, self.t2i_k if direction.side else self.i2t_k)
        return _in_front(best.candidates, -best.places)


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
        # in float64: of hundreds of candidates, the last terms are far smaller than the shares
        own = direction.candidates
        sums = torch.empty(own.shape[0], dtype=torch.float64, device=own.device)
        for rows, block in own.blocks():
            torch.sum(block, 1, dtype=torch.float64, out=sums[rows])
        sums = direction.of_all(sums)
        best = _best_candidates(direction, self.k)
        own_sums = sums[best.candidates]
        share = torch.where(own_sums == 0, 0.0, best.scores / own_sums)
        j = torch.arange(1, best.candidates.shape[1] + 1, dtype=sums.dtype, device=sums.device)
        by_score = (-0.05 * j).exp()
        by_place = (-0.05 * best.places.double()).exp()
        values = self.share_weight * share + by_score + self.place_weight * by_place
        return _in_front(best.candidates, values)


def as_scorer(scorer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a scorer; raise a TypeError for what is no function."""
    if not callable(scorer):
        expected = "a function of image and text numbers"
        raise TypeError(f"scorer: expected {expected}, got {type(scorer).__name__}")
    return scorer


class TwoStageReranker(Reranker):
    """Two stages: the k best candidates of a query are sorted by a second, expensive scorer.

    They are ranked by ``scorer + weight S_qc``, computed in float64, as in the evaluation of BLIP
    and ALBEF, where the scorer is the image-text matching head (ITM) and S are the contrastive
    scores (ITC). The other candidates follow in their order. Queries are independent. Re-ranked
    scores only encode the order: the scorer may return probabilities, logits or a mask of -1e9.

    Args:
        scorer: a function of (P,) int64 image indices and (P,) int64 text indices that returns (P,)
            scores.
        k, weight: number of candidates that are scored again, and the weight of S.
        batch_size: the largest P.

    Raises:
        ValueError: while re-ranking, if the scorer returns another shape, nan or infinity.
    """

    takes_bank = False
    cosine_options = ("weight",)

    scorer: Callable[[Tensor, Tensor], Tensor] = option(converter=as_scorer)
    k: int = option(default=16, at_least=1)
    weight: float = 1.0
    batch_size: int = option(default=256, at_least=1)

    @property
    def transductive(self) -> tuple[bool, bool]:
        """(False, False): queries are independent."""
        return False, False

    def state_dict(self) -> dict[str, Any]:
        """Return the options but for the scorer, which :meth:`load_state_dict` leaves as it is."""
        state = super().state_dict()
        del state["options"]["scorer"]
        return state

    def description(self) -> str:
        """Return the method and its options without the scorer."""
        # A scorer may have another address elsewhere.
        return f"{type(self).__name__} {self.state_dict()['options']}"

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that sorts the best candidates by the scorer's values."""
        best = direction.queries.topk(min(self.k, direction.queries.shape[1]))
        numbers = torch.arange(len(best.indices), device=best.indices.device) + direction.first[0]
        queries = numbers.repeat_interleave(best.indices.shape[1])
        candidates = best.indices.flatten()
        if direction.side == 0:
            scored = self._scored(queries, candidates)
        else:
            scored = self._scored(candidates, queries)
        scored = scored.to(best.values.device, torch.float64).view_as(best.values)
        return _in_front(best.indices, scored + self.weight * best.values)

    def _scored(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the scorer's (P,) values of pairs of images (P,) and texts (P,), checked."""
        values = []
        batches = zip(images.split(self.batch_size), texts.split(self.batch_size), strict=True)
        for some_images, some_texts in batches:
            x = self.scorer(some_images.clone(), some_texts.clone())  # it may write to them
            shape = tuple(some_images.shape)
            x = from_numpy(np.array(x) if isinstance(x, list) else x)
            if isinstance(x, Tensor) and x.numel() == shape[0]:  # (P, 1) or, for P = 1, ()
                x = x.reshape(shape)
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            if got != shape or not bool(x.isfinite().all()):
                raise ValueError(f"scorer: expected finite scores of shape {shape}, got {got}")
            values.append(x.detach())
        return torch.cat(values)
