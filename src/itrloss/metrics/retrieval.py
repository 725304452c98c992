"""Recall and other retrieval metrics, computed without holding the score matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..checks import IdsLike, as_size, check_matrix, from_numpy, one_of
from ..distributed import consensus, gather_table, world_size
from ..distributed import gather as gather_rows
from ..engine.ranking import Ranking
from ..similarity import Similarity
from ..suspicious import warn_of_unmatched
from .judgements import Judgements
from .labels import (
    fold_parts,
    folded,
    ids_or_indices,
    part_of,
    shared,
    warn_of_repeated,
    with_ids,
)
from .relevance import Judged, Relevant, WhichPairs, judged
from .results import RECALLS, Ks, QueryResults, RetrievalResults, as_ks, join_folds

if TYPE_CHECKING:
    from ..rerank import Reranker

Ties = Literal["pessimistic", "optimistic"]
AnyScores = Tensor | Similarity | tuple[Tensor | Similarity, Tensor]


def retrieval_metrics(  # noqa: PLR0913 - options by keyword
    scores: AnyScores,
    image_ids: IdsLike | None = None,
    text_ids: IdsLike | None = None,
    *,
    ks: Ks = RECALLS,
    relevant: Relevant | None = None,
    exclude: WhichPairs | None = None,
    candidates: WhichPairs | None = None,
    reranker: Reranker | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
    gather: bool = False,
    process_group: Any = None,
) -> dict[str, float]:
    """Return the metrics of image→text (``i2t_``) and text→image retrieval (``t2i_``) by name.

    For each direction, and each K of ``ks``: ``r1`` and so on, the field's R@K, which is the *hit
    rate*: the percentage of queries with a positive among the first K; ``recall_at_1``, the
    percentage of the positives that are among the first K; ``ndcg_at_1``, the normalised discounted
    cumulative gain, whose gains are the grades. Of the whole order: ``mrr``, the mean inverse rank
    of the best positive; ``map``, the mean average precision; ``r_precision``, the percentage of
    positives among the first R, where R is the number of positives; ``map_at_r``, the mean average
    precision at R; all in percent. ``median_rank`` and ``mean_rank`` of the best positive, from 1;
    ``skewness`` of the k-occurrences (the number of queries whose first k contain a candidate), 0
    without hubs. And ``rsum``, the sum of R@1, R@5 and R@10 of both directions, whatever ``ks``.
    Queries without positives do not count. With folds, every metric is its mean over the folds.

    Args:
        scores, image_ids, text_ids: see :func:`retrieval_results`.
        ks: numbers of first candidates, of at least 1.
        relevant, exclude, candidates: see :func:`retrieval_results`.
        reranker, ties, hubness_k, folds, gather, process_group: see :func:`retrieval_results`.

    Raises:
        TypeError, ValueError: as :func:`retrieval_results`; also if no query has a positive.
    """
    ks = as_ks(ks)
    results = retrieval_results(
        scores,
        image_ids,
        text_ids,
        relevant=relevant,
        exclude=exclude,
        candidates=candidates,
        reranker=reranker,
        ties=ties,
        hubness_k=hubness_k,
        folds=folds,
        gather=gather,
        process_group=process_group,
    )
    return results.metrics(ks)


def retrieval_results(  # noqa: PLR0913 - options by keyword
    scores: AnyScores,
    image_ids: IdsLike | None = None,
    text_ids: IdsLike | None = None,
    *,
    relevant: Relevant | None = None,
    exclude: WhichPairs | None = None,
    candidates: WhichPairs | None = None,
    reranker: Reranker | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
    gather: bool = False,
    process_group: Any = None,
) -> RetrievalResults:
    """Return the results of each query, which :func:`retrieval_metrics` averages.

    Args:
        scores: (n_images, n_texts), higher is better; or a :class:`itrloss.Similarity` with images
            as rows, whose matrix is not formed. Or a pair of scores for image→text and text→image,
            the second one a tensor, as :meth:`itrloss.rerank.Reranker.rerank` returns them.
        image_ids, text_ids: (n_images,) and (n_texts,) integers or strings, equal where image and
            text match. Not with a ``Similarity``, which has its own. Without ids, ``n_texts = c *
            n_images`` means c consecutive texts per image, and consecutive copies of an image count
            once: see :func:`fold_repeated`.
        relevant: the positive pairs, instead of those with equal ids: (P,) image and (P,) text
            indices, such as :meth:`Judgements.at_least` returns; or graded, as :class:`Judgements`
            or as a dense or sparse matrix (n_images, n_texts) of grades. Pairs with a grade above 0
            are right, and grades are the gains of nDCG. Not with folds.
        exclude: pairs that are not ranked, in either direction, such as an image with itself or the
            reference of a composed query: (P,) image and (P,) text indices, a bool matrix
            (n_images, n_texts), or a list with a list of text indices for each image. A right
            candidate that is excluded does not exist. Not with folds.
        candidates: the only pairs that are ranked, in the same forms, such as a first stage's best
            for each query. Not with folds.
        reranker: re-rank the scores first, without holding the matrix. It sees all scores, those
            of excluded pairs, too.
        ties: whether a negative with the score of a positive ranks ahead of it (``"pessimistic"``)
            or behind it (``"optimistic"``), and likewise a lower grade and a higher one. Of
            candidates that are equal in this, too, the lower index comes first. Ranks, stored
            candidates and k-occurrences follow this rule.
        hubness_k: k of the k-occurrences, and number of stored best candidates; at most all
            candidates. Where a query has fewer, they are padded with -1.
        folds: split the images into this many consecutive parts, each with its texts, and retrieve
            within each part, as in MSCOCO's "5-fold 1K". A transductive reranker sees only the
            queries of the part. A text that matches images in two parts is a query in both; one
            that matches none is in no part. Not with banks of scores.
        gather: in a ``torch.distributed`` job whose processes each hold a ``Similarity`` of their
            own images and texts, at least 1 of each: each process holds all embeddings and ranks
            the candidates of all processes for its own queries, and all return the results of a
            single process with all data. Ids are compared across processes; without ids row i
            matches column i of the same process. Copies of an embedding in different processes need
            not tie, as rounding differs.
        process_group: the processes that take part; by default, all.

    Warns:
        SuspiciousInputWarning: of copies of images, of embeddings passed as scores or as both
            sides, and of ids that many images or texts share with none; see :doc:`metrics`.

    Raises:
        TypeError, ValueError: naming the argument, also for nan or infinite scores or embeddings.
    """
    scores = as_pair(scores)
    pair = isinstance(scores, tuple)
    gather = gather and world_size(process_group) > 1
    by_ids = relevant is None
    has_rules = not by_ids or exclude is not None or candidates is not None
    has_more = pair or has_rules or image_ids is not None or text_ids is not None
    # an error in one process is raised in all: none waits in vain
    with consensus(process_group) if gather else contextlib.nullcontext():
        hubness_k = as_size("hubness_k", hubness_k)
        folds = as_size("folds", folds)
        one_of("ties", ties, "pessimistic", "optimistic")
        if reranker is not None:
            check_reranker(reranker, pair)
        check_division(folds, gather, has_rules, has_more)
    if gather:
        results = _sharded_results(scores, reranker, hubness_k, ties, process_group)
        warn_of_unmatched(results)
        return results
    if pair:
        sims = _pair_with_ids(scores, image_ids, text_ids, by_ids)
    else:
        sims = [with_ids("scores", scores, image_ids, text_ids, by_ids).detach()]
    if by_ids:
        warn_of_repeated(sims[0])
    if folds == 1:
        rules = judged(sims[0], relevant, exclude, candidates)
        results = _ranked(sims, rules, reranker, hubness_k, ties)
    else:
        results = _results_in_folds(sims, folds, reranker, hubness_k, ties)
    if not has_rules:
        warn_of_unmatched(results)
    return results


def as_pair(scores: Any) -> Any:
    """Return a list of two score matrices as a pair, and anything else as it is."""
    if isinstance(scores, list) and len(scores) == 2 and hasattr(scores[0], "shape"):
        return tuple(scores)
    return scores


def check_division(folds: int, gather: bool, has_rules: bool, has_more: bool) -> None:
    """Raise an error for input that folds, or several processes, do not go with.

    ``has_rules``: there are relevant, excluded or candidate pairs; ``has_more``: or ids or a pair
    of scores.
    """
    if folds > 1 and (has_rules or gather):
        others = "relevant, excluded or candidate pairs, or gather=True"
        raise ValueError(f"folds: expected 1 with {others}, got {folds}")
    if gather and has_more:
        given = "relevant, exclude, candidates, image_ids, text_ids, a pair of scores"
        raise ValueError(f"{given}: not for gather=True")


def check_reranker(reranker: Any, pair: bool) -> None:
    """Raise an error unless it is a re-ranker, which does not go with a pair of scores."""
    if isinstance(reranker, type) or not hasattr(reranker, "ranked"):
        expected = "a re-ranker with its options, such as itrloss.rerank.CSLS()"
        raise TypeError(f"reranker: expected {expected}, got {reranker!r}")
    if pair:
        raise ValueError("reranker: expected None with a pair of scores")


def _pair_with_ids(
    scores: tuple[Tensor | Similarity, Tensor],
    image_ids: IdsLike | None,
    text_ids: IdsLike | None,
    by_ids: bool,
) -> list[Similarity]:
    """Return the checked scores of image→text and of text→image with their ids."""
    first, second = scores
    i2t = with_ids("scores", first, image_ids, text_ids, by_ids).detach()
    second = from_numpy(second)
    check_matrix("scores[1]", second, "(N, M)")
    if tuple(second.shape) != tuple(first.shape):
        raise ValueError(
            f"scores[1]: expected shape {tuple(first.shape)}, got {tuple(second.shape)}"
        )
    if isinstance(first, Similarity):
        image_ids, text_ids = first.ids
    t2i = with_ids("scores[1]", second, image_ids, text_ids, by_ids)
    if t2i.shape != i2t.shape:
        raise ValueError("scores[1]: expected repeated images like scores[0], or ids")
    return [i2t, t2i]


def _results_in_folds(
    sims: Sequence[Similarity], folds: int, reranker: Reranker | None, k: int, ties: Ties
) -> RetrievalResults:
    """Return the results of one similarity, or of two, within consecutive parts of the images."""
    if reranker is not None and not all(reranker.transductive) and sims[0].embeddings is None:
        raise ValueError("folds: banks of scores contain all candidates, a part only some of them")
    parts = fold_parts(sims[0], folds)
    results = []
    for rows, cols in parts:
        inside = [part_of(sim, rows, cols) for sim in sims]
        results.append(_ranked(inside, None, reranker, k, ties))
    return join_folds(results, parts, sims[0].shape)


def _ranked(
    sims: Sequence[Similarity],
    rules: Judged | None,
    reranker: Reranker | None,
    k: int,
    ties: Ties,
) -> RetrievalResults:
    """Return the results of one similarity, or of two for image→text and text→image."""
    sim = sims[0]
    t2i = sims[-1].T
    relevance = (None, None) if rules is None else rules.both()
    if reranker is not None:
        of_images, of_texts = reranker.ranked(sim, k, ties, relevance)
    else:
        of_images = sim.ranked(k, ties=ties, relevance=relevance[0])
        of_texts = t2i.ranked(k, ties=ties, relevance=relevance[1])
    image_ids, text_ids = ids_or_indices(sim)
    right = None
    if rules is not None:
        grades = torch.ones_like(rules.images) if rules.grades is None else rules.grades
        right = Judgements(rules.images, rules.texts, grades)
    return RetrievalResults(
        i2t=_of_queries(image_ids, of_images, len(text_ids)),
        t2i=_of_queries(text_ids, of_texts, len(image_ids)),
        relevant=right,
    )


def _of_queries(ids: Tensor, ranking: Ranking, candidates: int) -> QueryResults:
    """Return the results of one direction."""
    return QueryResults(ids, ranking.ranks, ranking.top.indices, candidates, ranking.grades)


def _sharded_results(
    scores: Any, reranker: Reranker | None, k: int, ties: Ties, group: Any
) -> RetrievalResults:
    """Return the results of all processes, each of which ranks for its own queries."""
    if isinstance(scores, Similarity) and scores.embeddings is not None:
        scores = folded(scores)
    method = None if reranker is None else reranker.description()
    sim = shared(scores, f"re-ranker {method}, hubness_k {k}, ties {ties}", group)
    own = _ranked([sim], None, reranker, k, ties)
    image_ids, text_ids = sim.all_ids
    return RetrievalResults(
        i2t=_gathered(own.i2t, image_ids, len(text_ids), group),
        t2i=_gathered(own.t2i, text_ids, len(image_ids), group),
    )


def _gathered(own: QueryResults, ids: Tensor, candidates: int, group: Any) -> QueryResults:
    """Return the results of all processes' queries of one direction from this process's."""
    ranks = gather_table(own.ranks, group)
    return QueryResults(ids, ranks, gather_rows(own.top, group), candidates)
