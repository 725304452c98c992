"""Recalls and their companions, streamed: the score matrix need not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..checks import check_size, one_of
from ..distributed import Shares, gather_parts, gather_table, world_size
from ..similarity import Similarity
from .judgements import Judgements, fits_convention, judged, no_ids, relevant_pairs
from .labels import labelled, numbered, part_of, parts_of, whole_parts_of
from .results import QueryResults, RetrievalResults, joined

if TYPE_CHECKING:
    from ..rerank import Reranker

Ties = Literal["pessimistic", "optimistic"]


def retrieval_metrics(
    scores: Tensor | Similarity,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    t2i_scores: Tensor | None = None,
    reranker: Reranker | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
    gather: bool = False,
) -> dict[str, float]:
    """Recalls and their companions, for images asking for texts (``i2t_``) and texts asking for images (``t2i_``).

    Args:
        scores, image_ids, text_ids, t2i_scores, reranker, ties, hubness_k, gather: see :func:`retrieval_results`.
        folds: cut the images into so many consecutive parts, each with its texts, retrieve within each, and average
            every figure over them, as MSCOCO's "5-fold 1K" has it.

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
    options: Any = {"reranker": reranker, "ties": ties, "hubness_k": hubness_k}
    check_size("folds", folds)
    if folds == 1:
        return retrieval_results(scores, image_ids, text_ids, t2i_scores=t2i_scores, gather=gather, **options).metrics()
    sim, other = _to_be_cut(scores, image_ids, text_ids, t2i_scores, reranker, gather)
    found = [_of_part(sim, other, part, options).metrics() for part in parts_of(sim, folds)]
    return {name: sum(x[name] for x in found) / folds for name in found[0]}


def retrieval_results(
    scores: Tensor | Similarity,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    *,
    t2i_scores: Tensor | None = None,
    reranker: Reranker | None = None,
    judgements: Judgements | None = None,
    relevant: float | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
    gather: bool = False,
) -> RetrievalResults:
    """What every query found: the figures of :func:`retrieval_metrics` before they are averaged.

    Args:
        scores: (n_images, n_texts), higher is better; or a :class:`itrloss.Similarity` with images as rows, whose
            answers are streamed.
        image_ids, text_ids: integers, equal where image and text match. Both left out: ``n_texts = c * n_images`` means
            c consecutive texts an image. Not beside a ``Similarity``, which has its own.
        t2i_scores: (n_images, n_texts) scores for the text queries, if they differ (as after re-ranking).
        reranker: evaluate these scores re-ranked, without holding the matrix.
        judgements: pairs that people graded; those graded ``relevant`` or higher are right then, not those with equal
            ids, which may then be left out whatever the shape. Queries without such a pair do not count. Not beside a
            reranker.
        relevant: the lowest grade that counts as right, for ``judgements``.
        ties: whether a wrong candidate with the score of a right one is ahead of it (``"pessimistic"``) or behind.
        hubness_k: k of the k-occurrences; with fewer candidates, as many as there are.
        folds: cut the images into so many consecutive parts, each with its texts, and retrieve within each, where a
            transductive reranker sees no other queries. The figures of the result are those of all queries together,
            where :func:`retrieval_metrics` averages over the parts. Each text has its images in one part. Not beside
            judgements or banks of scores.
        gather: in a job of several processes (``torch.distributed``), each with its own images and texts as a
            ``Similarity`` of embeddings: every process ranks all candidates for its own queries, and gets the results
            of all, which are those of one process with everything. Ids hold across processes; without them row i
            matches column i of the same process. Every process holds the embeddings of all; parts may differ in size,
            but have an image and a text at least. Rounding is another than in one product: copies of an embedding in
            several processes need not tie.

    Raises:
        ValueError: naming the argument, also for nan or infinite scores or embeddings.
    """
    if reranker is not None and t2i_scores is not None:
        raise ValueError("t2i_scores: expected None beside a reranker, which finds both directions' scores itself")
    check_size("hubness_k", hubness_k)
    one_of("ties", ties, "pessimistic", "optimistic")
    if judgements is None and relevant is not None:
        raise ValueError(f"relevant: expected None without judgements, got {relevant}")
    check_size("folds", folds)
    if folds > 1:
        if judgements is not None:
            raise ValueError("folds: expected 1 beside judgements")
        sim, other = _to_be_cut(scores, image_ids, text_ids, t2i_scores, reranker, gather)
        return _of_parts(sim, other, whole_parts_of(sim, folds), reranker, ties, hubness_k)
    if gather and world_size() > 1:
        if t2i_scores is not None or judgements is not None or image_ids is not None or text_ids is not None:
            raise ValueError("t2i_scores, judgements, image_ids, text_ids: expected None for gather=True")
        question = None if reranker is None else reranker._question()
        return _of_all(Shares(scores, f"{question} {hubness_k} {ties}"), reranker, hubness_k, ties)
    if judgements is not None and image_ids is None and text_ids is None and not fits_convention(scores):
        image_ids, text_ids = no_ids(scores)
    sim = labelled("scores", scores, image_ids, text_ids).detach()
    other = _of_texts(sim, t2i_scores)
    views = sim, (sim if other is None else other).T
    if judgements is not None:
        if reranker is not None:
            raise ValueError("judgements: expected None beside a reranker; give its scores, and t2i_scores")
        pairs = relevant_pairs(judgements, relevant, sim.shape)
        found = [judged(view, pairs[way], pairs[1 - way], ties, hubness_k) for way, view in enumerate(views)]
    elif reranker is not None and other is None:
        found = reranker._ranked(sim, hubness_k, ties)
    else:
        found = [view.ranked(hubness_k, ties=ties) for view in views]
    parts = zip(numbered(sim), found, views, strict=True)
    return RetrievalResults(*(QueryResults(ids, ranks, top.indices, v.shape[1]) for ids, (ranks, top), v in parts))


def _of_all(shares: Shares, reranker: Reranker | None, k: int, ties: Ties) -> RetrievalResults:
    """Each process ranks for its own queries, and all exchange what they found."""
    if reranker is None:
        queries = (shares.queries(side) for side in (0, 1))
        ranked = (own.ranked(k, ties=ties) for own in queries)
    else:
        ranked = reranker._ranked_of_all(shares, k, ties)
    found = []
    for (ranks, top), ids, candidates in zip(ranked, shares.every_ids, shares.every[::-1], strict=True):
        found.append(QueryResults(ids, gather_table(ranks), gather_parts(top.indices), len(candidates)))
    return RetrievalResults(*found)


def _of_texts(sim: Similarity, scores: Tensor | None) -> Similarity | None:
    """The scores for the text queries, checked."""
    if scores is None:
        return None
    if not isinstance(scores, Tensor):
        raise TypeError(f"t2i_scores: expected a tensor of shape {sim.shape}, got {type(scores).__name__}")
    if tuple(scores.shape) != sim.shape:
        raise ValueError(f"t2i_scores: expected shape {sim.shape} like scores, got {tuple(scores.shape)}")
    return labelled("t2i_scores", scores, *sim.ids)


def _to_be_cut(
    scores: Tensor | Similarity,
    image_ids: Tensor | None,
    text_ids: Tensor | None,
    t2i_scores: Tensor | None,
    reranker: Reranker | None,
    gather: bool,
) -> tuple[Similarity, Similarity | None]:
    """What folds are parts of, and the scores for the text queries."""
    if gather and world_size() > 1:
        raise ValueError("folds: expected 1 for gather=True")
    sim = labelled("scores", scores, image_ids, text_ids)
    if reranker is not None and not all(reranker.transductive) and sim._inputs is None:
        raise ValueError("folds: banks of scores are with all candidates, those of a part are others")
    return sim, _of_texts(sim, t2i_scores)


def _of_part(
    sim: Similarity, other: Similarity | None, part: tuple[Tensor, Tensor], options: dict[str, Any]
) -> RetrievalResults:
    texts = None if other is None else part_of(other, *part).scores()
    return retrieval_results(part_of(sim, *part), t2i_scores=texts, **options)


def _of_parts(
    sim: Similarity,
    other: Similarity | None,
    parts: list[tuple[Tensor, Tensor]],
    reranker: Reranker | None,
    ties: Ties,
    k: int,
) -> RetrievalResults:
    rows, cols = (list(x) for x in zip(*parts, strict=True))
    k = min(k, *map(len, rows), *map(len, cols))  # the same for all queries
    options: dict[str, Any] = {"reranker": reranker, "ties": ties, "hubness_k": k}
    found = [_of_part(sim, other, part, options) for part in parts]
    ids = numbered(sim)
    return RetrievalResults(
        joined([x.i2t for x in found], rows, cols, ids[0]), joined([x.t2i for x in found], cols, rows, ids[1])
    )
