"""Re-ranking in two stages: a second, expensive scorer reorders a query's best candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import from_numpy, option
from .base import Reranker
from .direction import Direction, Rule


def in_front(candidates: Tensor, values: Tensor) -> Rule:
    """Return the rule by which these (Q, k) candidates come first, by their values; the others keep
    their order.
    """
    # How many values of the query are lower. Scores hold small integers exactly; added to scores,
    # the values themselves would lose digits.
    levels = torch.searchsorted(values.sort(dim=1).values, values) + 1

    def move_to_front(scores: Tensor, rows: slice) -> Tensor:
        """Raise the chosen candidates of a block's queries above its highest score."""
        peak = scores.amax(1, keepdim=True)
        room = torch.finfo(scores.dtype).max - peak.clamp_min(0.0)
        step = peak.abs().clamp_min(1.0)
        step = torch.minimum(step, room / (levels.shape[1] + 1))
        return scores.scatter_(1, candidates[rows], peak + step * levels[rows].to(scores))

    return move_to_front


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
        ValueError: while re-ranking, if the scorer returns another shape, nan or infinity; in
            metrics, if images are repeated for each caption, which would be folded, see
            :func:`itrloss.metrics.fold_repeated`: the scorer gets indices of what was passed in.

    Relations:
        The other methods need scores alone; this one asks a second model, for the best k.

    Example:
        >>> import torch
        >>> import itrloss
        >>> from itrloss import rerank
        >>> images, texts = torch.randn(20, 16), torch.randn(30, 16)
        >>> sim = itrloss.Similarity(images, texts)
        >>> def head(image_numbers, text_numbers):
        ...     return (images[image_numbers] * texts[text_numbers]).sum(1)
        >>> rerank.TwoStageReranker(head, k=4).topk(sim, 2).i2t.indices.shape
        torch.Size([20, 2])
    """

    takes_bank = False
    needs_numbers = True
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

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that sorts the best candidates by the scorer's values."""
        best = direction.queries.topk(min(self.k, direction.queries.shape[1]))
        query_numbers, candidate_numbers = direction.numbers
        queries = query_numbers.repeat_interleave(best.indices.shape[1])
        candidates = candidate_numbers[best.indices.flatten()]
        if direction.side == 0:
            scored = self._scored(queries, candidates)
        else:
            scored = self._scored(candidates, queries)
        scored = scored.to(best.values.device, torch.float64).view_as(best.values)
        return in_front(best.indices, scored + self.weight * best.values)

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
