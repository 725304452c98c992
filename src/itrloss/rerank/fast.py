"""DVSE's Fast Re-ranking, and the inverted softmax, a special case."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..checks import IdsLike, as_number, option
from ..checks.warnings import UnfitScalesWarning, warn
from ..metrics.labels import with_ids
from ..metrics.matching import existing_part
from ..metrics.relevance import judged
from ..similarity import Similarity
from .base import Reranker
from .direction import Bias, Direction, reference_sums

# the grid of calibrate(), in steps of √2
SCALES = (5.0, 7.0, 10.0, 14.0, 20.0, 28.0, 40.0, 57.0, 80.0)
_PERFECT = (3.0, 1.0)  # recalls and mean reciprocal rank that no other scale can improve


def as_scales(name: str, value: object) -> tuple[float, float]:
    """Return two numbers above 0, of a tuple, a list or an array; raise an error for others."""
    if not isinstance(value, (tuple, list, np.ndarray, Tensor)) or len(value) != 2:
        raise ValueError(f"{name}: expected two numbers above 0, got {value!r}")
    if isinstance(value, Tensor):
        value = value.tolist()
    first, second = (as_number(name, x, positive=True) for x in value)
    return first, second


class FastReranker(Reranker):
    """Fast Re-ranking (DVSE Eq. 13-15): candidates that are similar to every query move down.

    Image→text ranks by ``γ2 S_qc - log sum_r exp(γ1 R_rc)``, text→image by ``λ2 S_qc - log sum_r
    exp(λ1 R_rc)``, computed in log space so that nothing overflows. As published, the references r
    are all test queries: results depend on which are ranked together, and a single query is
    refused. After :meth:`fit` they are a bank of other queries, such as the training set, and test
    queries no longer affect one another. No labels are used.

    Args:
        i2t: (γ1, γ2).
        t2i: (λ1, λ2). (In the paper (25, 25) and (20, 20); on CUB (9, 8) and (8, 17).)

    Relations:
        With equal scales it ranks as :class:`InvertedSoftmax`.

    Example:
        >>> import torch
        >>> from itrloss import rerank
        >>> scores = torch.rand(20, 30)
        >>> fast = rerank.FastReranker((20.0, 20.0), (20.0, 20.0)).rerank(scores)
        >>> inverted = rerank.InvertedSoftmax(20.0).rerank(scores)
        >>> torch.equal(fast.i2t.argsort(1), inverted.i2t.argsort(1))
        True
    """

    cosine_options = ("i2t", "t2i")

    i2t: tuple[float, float] = option(default=(25.0, 25.0), converter=partial(as_scales, "i2t"))
    t2i: tuple[float, float] = option(default=(20.0, 20.0), converter=partial(as_scales, "t2i"))

    def rule(self, direction: Direction) -> Bias:
        """Return minus the log-sum-exp of each candidate as its bias."""
        scale, factor = self.t2i if direction.side else self.i2t
        return Bias(-reference_sums(direction.candidates, scale), factor)

    @torch.no_grad()
    def calibrate(
        self,
        validation: Tensor | Similarity,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scales: Sequence[float] = SCALES,
    ) -> FastReranker:
        """Choose all four parameters on validation pairs, and return this object.

        They have the highest sum of the recalls at 1, 5 and 10 of their direction. Ties are broken
        by the mean reciprocal rank, then the first scales win. This uses labels, so never pass the
        test set.

        Args:
            validation: (n_images, n_texts) scores, or a :class:`itrloss.Similarity`. Banks of
                :meth:`fit` are used, and have to fit it.
            image_ids, text_ids: see :func:`itrloss.metrics.retrieval_metrics`.
            scales: the values to try for each parameter.

        Warns:
            SuspiciousInputWarning: if the least or the largest of at least three values is chosen,
                so that better ones may lie beyond.
        """
        scales = [float(x) for x in scales]
        if not scales or not all(x > 0 for x in scales):
            raise ValueError(f"scales: expected numbers above 0, got {scales}")
        sim = with_ids("validation", validation, image_ids, text_ids)
        if not bool(sim.positive_counts.any()):
            raise ValueError(
                "image_ids, text_ids: no query of the validation set has a matching candidate"
            )
        chosen = []
        ends = {min(scales), max(scales)}
        at_end = False
        part = existing_part(sim)
        # not who matches in the part, whose ids have one image of each text
        right = judged(sim).within(part.rows, part.cols)
        of_both = right.relevance(), right.T.relevance()
        for direction, relevance in zip(self._directions(part), of_both, strict=True):
            qualities: dict[tuple[float, float], tuple[float, float]] = {}
            for scale in scales:
                penalties = -reference_sums(direction.candidates, scale)
                for factor in scales:
                    bias = penalties / factor
                    ranking = direction.queries.ranked(0, bias, relevance=relevance)
                    qualities[scale, factor] = _quality(ranking.ranks[:, 0])
            best = max(qualities, key=qualities.__getitem__)
            if qualities[best] < _PERFECT and not ends.isdisjoint(best):
                at_end = True
            chosen.append(best)
        self.i2t, self.t2i = chosen
        if at_end and len(set(scales)) > 2:
            warn(
                f"scales: of the values tried, {min(scales):g} to {max(scales):g}, the first or "
                f"the last is best: {self!r}. Better ones may lie beyond; pass scales that go "
                "further, or divide logits by the model's logit scale",
                UnfitScalesWarning,
            )
        return self


def _quality(ranks: Tensor) -> tuple[float, float]:
    """Return the sum of the recalls and the mean reciprocal rank of queries with a positive."""
    ranks = ranks[ranks > 0].double().sort().values  # in one order, as rounding depends on it
    found = sum(int((ranks <= k).sum()) for k in (1, 5, 10))  # sums of shares may differ at ties
    return found / len(ranks), float((1 / ranks).mean())


class InvertedSoftmax(Reranker):
    """Inverted softmax (Smith et al., ICLR 2017): ``scale S_qc - log sum_r exp(scale R_rc)``.

    It is :class:`FastReranker` with all four parameters the same.

    Relations:
        :class:`FastReranker` with equal scales; :class:`QueryBankNorm` applies it to some
        queries only.

    Example:
        >>> import torch
        >>> from itrloss import rerank
        >>> scores = torch.rand(20, 30)
        >>> rerank.InvertedSoftmax().rerank(scores).i2t.shape
        torch.Size([20, 30])
    """

    cosine_options = ("scale",)

    scale: float = option(default=20.0, above=0)

    def rule(self, direction: Direction) -> Bias:
        """Return minus the log-sum-exp of each candidate as its bias."""
        return Bias(-reference_sums(direction.candidates, self.scale), self.scale)
