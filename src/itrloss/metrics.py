"""Retrieval metrics, streamed: the score matrix need not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .similarity import Similarity

if TYPE_CHECKING:
    from .rerank import Reranker

__all__ = ["default_ids", "retrieval_metrics", "skewness"]


def retrieval_metrics(
    scores: Tensor | Similarity,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    t2i_scores: Tensor | None = None,
    reranker: Reranker | None = None,
    ties: Literal["pessimistic", "optimistic"] = "pessimistic",
    hubness_k: int = 10,
) -> dict[str, float]:
    """Recalls and their companions, for images asking for texts (``i2t_``) and texts asking for images (``t2i_``).

    Args:
        scores: (n_images, n_texts), higher is better; or a :class:`itrloss.Similarity` with images as rows, whose
            answers are streamed.
        image_ids, text_ids: integers, equal where image and text match. Both left out: ``n_texts = c * n_images`` means
            c consecutive texts an image. Not beside a ``Similarity``, which has its own.
        t2i_scores: (n_images, n_texts) scores for the text queries, if they differ (as after re-ranking).
        reranker: evaluate these scores re-ranked, without holding the matrix.
        ties: whether a wrong candidate with the score of a right one is ahead of it (``"pessimistic"``) or behind.
        hubness_k: k of the k-occurrences.

    Returns:
        A dictionary. For each direction, ``r1 r5 r10``, the percentage of queries with a right candidate among the
        first k; ``median_rank`` of the best right candidate, from 1; ``r_precision``, the percentage of right ones
        among the first R, R the number of right candidates; ``map_at_r``, mean average precision at R in percent;
        ``skewness`` of the k-occurrences (how often a candidate is among a query's first k), 0 without hubs. And
        ``rsum``, the sum of the six recalls. Queries without a right candidate do not count.

    Raises:
        ValueError: naming the argument, also for nan or infinite scores or embeddings and if no query has a right
            candidate.
    """
    if reranker is not None and t2i_scores is not None:
        raise ValueError("t2i_scores: expected None beside a reranker, which finds both directions' scores itself")
    if hubness_k < 1:
        raise ValueError(f"hubness_k: expected a number of at least 1, got {hubness_k}")
    sim = labelled("scores", scores, image_ids, text_ids).detach()
    if t2i_scores is not None:
        if not isinstance(t2i_scores, Tensor):
            raise TypeError(f"t2i_scores: expected a tensor of shape {sim.shape}, got {type(t2i_scores).__name__}")
        if tuple(t2i_scores.shape) != sim.shape:
            raise ValueError(f"t2i_scores: expected shape {sim.shape} like scores, got {tuple(t2i_scores.shape)}")
        other = labelled("t2i_scores", t2i_scores, *sim.ids)
        directions = {"i2t": _one_way(sim, ties, hubness_k), "t2i": _one_way(other.T, ties, hubness_k)}
    else:
        if reranker is None:
            tops = (top.indices for top in sim.both.topk(hubness_k))
            found = zip(sim.both.ranks(ties=ties), tops, strict=True)
        else:
            found = reranker._ranked(sim, hubness_k, ties)
        sides = zip(("i2t", "t2i"), found, sim.shape[::-1], strict=True)
        directions = {name: _figures(*ranks_and_top, size) for name, ranks_and_top, size in sides}
    result = {f"{way}_{name}": value for way, figures in directions.items() for name, value in figures.items()}
    result["rsum"] = sum(result[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10))
    return result


def default_ids(n_images: int, n_texts: int) -> tuple[Tensor, Tensor]:
    """Ids by the field's convention: ``n_texts = c * n_images`` texts, c consecutive ones an image."""
    if n_texts % n_images:
        raise ValueError(
            f"image_ids, text_ids: needed for {n_images} images and {n_texts} texts, "
            "which is not a whole number of texts an image (images are the rows)"
        )
    images = torch.arange(n_images)
    return images, images.repeat_interleave(n_texts // n_images)


def skewness(counts: Tensor) -> Tensor:
    """Third standardised moment of ``counts`` (1-D, any dtype) as a 0-dim tensor; 0 if they are all equal."""
    x = counts.double()
    x = x - x.mean()
    variance = x.square().mean()
    return torch.where(variance > 0, (x**3).mean() / variance**1.5, 0.0)


def labelled(name: str, scores: Tensor | Similarity, image_ids: Tensor | None, text_ids: Tensor | None) -> Similarity:
    """Scores with ids, by the field's convention where they are left out; errors name ``name`` and the ids."""
    if isinstance(scores, Similarity):
        if image_ids is not None or text_ids is not None:
            raise ValueError("image_ids, text_ids: expected None beside a Similarity, which has its own")
        scores.check_finite()
        return scores
    if image_ids is None and text_ids is None and isinstance(scores, Tensor) and scores.dim() == 2:
        image_ids, text_ids = default_ids(*scores.shape) if scores.numel() else (None, None)
    try:
        return Similarity.from_scores(scores, image_ids, text_ids, check_finite=True)
    except (TypeError, ValueError) as error:
        renamed = str(error).replace("row_ids", "image_ids").replace("col_ids", "text_ids")
        raise type(error)(renamed.replace("scores:", f"{name}:", 1)) from None


def _one_way(sim: Similarity, ties: str, hubness_k: int) -> dict[str, float]:
    top = sim.topk(min(hubness_k, sim.shape[1]))
    return _figures(sim.ranks(ties=ties), top.indices, sim.shape[1])


def _figures(ranks: Tensor, top: Tensor, candidates: int) -> dict[str, float]:
    """From (queries, positives) ascending ranks padded with 0, and (queries, k) best candidates."""
    ranks = ranks[(ranks > 0).any(1)] if ranks.numel() else ranks.new_empty(0, 1)
    if len(ranks) == 0:
        raise ValueError("image_ids, text_ids: no query has a matching candidate")
    ranks = ranks.double()
    real = ranks > 0
    best = ranks[:, 0]
    total = real.sum(1, keepdim=True).double()
    hit = real & (ranks <= total)
    order = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    precision = torch.where(hit, order / ranks.clamp_min(1), 0.0)
    figures = {f"r{k}": 100 * float((best <= k).double().mean()) for k in (1, 5, 10)}
    figures["median_rank"] = float(best.quantile(0.5))
    figures["r_precision"] = 100 * float((hit.sum(1, keepdim=True) / total).mean())
    figures["map_at_r"] = 100 * float((precision.sum(1, keepdim=True) / total).mean())
    figures["skewness"] = float(skewness(torch.bincount(top.flatten(), minlength=candidates)))
    return figures
