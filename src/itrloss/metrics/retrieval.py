"""Recalls and their companions, streamed: the score matrix need not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ..checks import check_size, one_of
from ..distributed import Shares, gather_parts, gather_table, world_size
from ..similarity import Similarity
from .judgements import listed, ranked_by
from .labels import folded, labelled, numbered, part_of, parts_of
from .results import QueryResults, RetrievalResults, joined

if TYPE_CHECKING:
    from ..rerank import Reranker

Ties = Literal["pessimistic", "optimistic"]
Scores = Tensor | Similarity | tuple[Tensor | Similarity, Tensor]


def retrieval_metrics(
    scores: Scores,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    relevant: tuple[Tensor, Tensor] | None = None,
    reranker: Reranker | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
    gather: bool = False,
) -> dict[str, float]:
    """Recalls and their companions, for images asking for texts (``i2t_``) and texts asking for images (``t2i_``).

    Args:
        scores, image_ids, text_ids, relevant, reranker, ties, hubness_k, folds, gather: see :func:`retrieval_results`.

    Returns:
        A dictionary. For each direction, ``r1 r5 r10``, the percentage of queries with a right candidate among the
        first k; ``median_rank`` of the best right candidate, from 1; ``r_precision``, the percentage of right ones
        among the first R, R the number of right candidates; ``map_at_r``, mean average precision at R in percent;
        ``skewness`` of the k-occurrences (how often a candidate is among a query's first k), 0 without hubs. And
        ``rsum``, the sum of the six recalls. Queries without a right candidate do not count. With folds, every figure
        is the average of those of the parts.

    Raises:
        ValueError: naming the argument, also for nan or infinite scores or embeddings and if no query has a right
            candidate.
    """
    found = retrieval_results(
        scores,
        image_ids,
        text_ids,
        relevant=relevant,
        reranker=reranker,
        ties=ties,
        hubness_k=hubness_k,
        folds=folds,
        gather=gather,
    )
    return found.metrics()


def retrieval_results(
    scores: Scores,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    relevant: tuple[Tensor, Tensor] | None = None,
    reranker: Reranker | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
    gather: bool = False,
) -> RetrievalResults:
    """What every query found: the figures of :func:`retrieval_metrics` before they are averaged.

    Args:
        scores: (n_images, n_texts), higher is better; or a :class:`itrloss.Similarity` with images as rows, whose
            answers are streamed. A pair of these, the second one a tensor, where images rank by the first and texts by
            the second, as :meth:`itrloss.rerank.Reranker.rerank` returns them.
        image_ids, text_ids: integers, equal where image and text match. Not beside a ``Similarity``, which has its own.
            Without ids, ``n_texts = c * n_images`` means c consecutive texts an image, and images that are there
            several times, one behind the other, count once: see :func:`fold_repeated`.
        relevant: image and text numbers of the right pairs, such as :meth:`Judgements.at_least` returns, where these
            are not the pairs with equal ids, which may be left out whatever the shape. Not beside a reranker or folds.
        reranker: evaluate these scores re-ranked, without holding the matrix.
        ties: whether a wrong candidate with the score of a right one is ahead of it (``"pessimistic"``) or behind.
        hubness_k: k of the k-occurrences; with fewer candidates, as many as there are.
        folds: cut the images into so many consecutive parts, each with its texts, and retrieve within each, as MSCOCO's
            "5-fold 1K" has it; a transductive reranker sees no other queries. A text with images in two parts asks in
            both, one without an image in none. Not beside banks of scores.
        gather: in a job of several processes (``torch.distributed``), each with its own images and texts as a
            ``Similarity`` of embeddings: every process ranks all candidates for its own queries, and gets the results
            of all, which are those of one process with everything. Ids hold across processes; without them row i
            matches column i of the same process. Every process holds the embeddings of all; parts may differ in size,
            but have an image and a text at least. Rounding is another than in one product: copies of an embedding in
            several processes need not tie.

    Raises:
        ValueError: naming the argument, also for nan or infinite scores or embeddings.
    """
    check_size("hubness_k", hubness_k)
    check_size("folds", folds)
    one_of("ties", ties, "pessimistic", "optimistic")
    if reranker is not None and (relevant is not None or isinstance(scores, tuple)):
        raise ValueError("reranker: expected None beside relevant pairs, or scores of either direction")
    if relevant is not None and folds > 1:
        raise ValueError(f"folds: expected 1 beside relevant pairs, got {folds}")
    if gather and world_size() > 1:
        if isinstance(scores, tuple) or relevant is not None or image_ids is not None or text_ids is not None:
            raise ValueError("relevant, image_ids, text_ids, a pair of scores: not for gather=True")
        if folds > 1:
            raise ValueError(f"folds: expected 1 for gather=True, got {folds}")
        return _of_all(scores, reranker, hubness_k, ties)
    sim, other = _both_directions(scores, image_ids, text_ids, relevant)
    if folds == 1:
        return _ranked(sim, other, relevant, reranker, hubness_k, ties)
    if reranker is not None and not all(reranker.transductive) and sim._inputs is None:
        raise ValueError("folds: banks of scores are with all candidates, those of a part are others")
    parts = parts_of(sim, folds)
    found = []
    for part in parts:
        texts = None if other is None else part_of(other, *part)
        found.append(_ranked(part_of(sim, *part), texts, None, reranker, hubness_k, ties))
    return joined(found, parts, numbered(sim))


def _both_directions(
    scores: Scores, image_ids: Tensor | None, text_ids: Tensor | None, relevant: tuple[Tensor, Tensor] | None
) -> tuple[Similarity, Similarity | None]:
    """Return the scores that images rank by, and those that texts rank by if they are others; checked, with ids."""
    first, second = scores if isinstance(scores, tuple) else (scores, None)
    by_ids = relevant is None
    sim = labelled("scores", first, image_ids, text_ids, by_ids).detach()
    if second is None:
        return sim, None
    if not isinstance(second, Tensor):
        raise TypeError(f"scores[1]: expected a tensor of shape {tuple(first.shape)}, got {type(second).__name__}")
    if tuple(second.shape) != tuple(first.shape):
        raise ValueError(f"scores[1]: expected shape {tuple(first.shape)} like scores[0], got {tuple(second.shape)}")
    image_ids, text_ids = first.ids if isinstance(first, Similarity) else (image_ids, text_ids)
    other = labelled("scores[1]", second, image_ids, text_ids, by_ids)
    if other.shape != sim.shape:
        raise ValueError("scores[1]: expected repeated images like scores[0], or ids")
    return sim, other


def _ranked(
    sim: Similarity,
    other: Similarity | None,
    relevant: tuple[Tensor, Tensor] | None,
    reranker: Reranker | None,
    k: int,
    ties: Ties,
) -> RetrievalResults:
    views = sim, (sim if other is None else other).T
    if reranker is not None:
        found = reranker._ranked(sim, k, ties)
    elif relevant is not None:
        images, texts = listed(relevant, sim.shape, sim.device)
        found = ranked_by(images, texts, views[0], k, ties), ranked_by(texts, images, views[1], k, ties)
    else:
        found = [view.ranked(k, ties=ties) for view in views]
    parts = zip(numbered(sim), found, views, strict=True)
    i2t, t2i = (QueryResults(ids, ranks, top.indices, view.shape[1]) for ids, (ranks, top), view in parts)
    return RetrievalResults(i2t, t2i)


def _of_all(scores: Tensor | Similarity, reranker: Reranker | None, k: int, ties: Ties) -> RetrievalResults:
    """Each process ranks for its own queries, and all exchange what they found."""
    if isinstance(scores, Similarity) and scores._inputs is not None:
        scores = folded(scores)
    shares = Shares(scores, f"{None if reranker is None else reranker._question()} {k} {ties}")
    if reranker is None:
        ranked = (shares.queries(side).ranked(k, ties=ties) for side in (0, 1))
    else:
        ranked = reranker._ranked_of_all(shares, k, ties)
    found = []
    for (ranks, top), ids, candidates in zip(ranked, shares.every_ids, shares.every[::-1], strict=True):
        found.append(QueryResults(ids, gather_table(ranks), gather_parts(top.indices), len(candidates)))
    return RetrievalResults(*found)
