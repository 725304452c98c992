"""Recall and other retrieval metrics, computed without holding the score matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..checks import IdsLike, as_size, check_matrix, from_numpy, one_of, takes_queries
from ..checks.warnings import warn_of_unmatched
from ..engine.ranking import Ranking
from ..similarity import Similarity
from .judgements import Judgements, Pairs
from .labels import fold_repeated, has_no_ids, warn_of_repeated, with_ids
from .matching import Part, part_of, query_ids
from .relevance import Judged, Rules, folds_of, judged
from .results import RECALLS, Ks, RankedPart, RetrievalResults, joined

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..rerank import Reranker

Ties = Literal["pessimistic", "optimistic"]
AnyScores = Tensor | Similarity | tuple[Tensor | Similarity, Tensor]


class Options(Rules, total=False):
    """The options of :func:`retrieval_results`."""

    reranker: Reranker | None
    ties: Ties
    hubness_k: int
    folds: int


@takes_queries
def retrieval_metrics(
    scores: AnyScores,
    image_ids: IdsLike | None = None,
    text_ids: IdsLike | None = None,
    *,
    ks: Ks = RECALLS,
    **options: Unpack[Options],
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
        options: ``relevant``, ``exclude``, ``candidates``, ``reranker``, ``ties``, ``hubness_k``
            and ``folds`` of :func:`retrieval_results`.

    Raises:
        TypeError, ValueError: as :func:`retrieval_results`; also if no query has a positive.
    """
    return retrieval_results(scores, image_ids, text_ids, **options).metrics(ks)


@takes_queries
def retrieval_results(  # noqa: PLR0913 - options by keyword
    scores: AnyScores,
    image_ids: IdsLike | None = None,
    text_ids: IdsLike | None = None,
    *,
    relevant: Pairs | None = None,
    exclude: Pairs | None = None,
    candidates: Pairs | None = None,
    reranker: Reranker | None = None,
    ties: Ties = "pessimistic",
    hubness_k: int = 10,
    folds: int = 1,
) -> RetrievalResults:
    """Return the results of each query, which :func:`retrieval_metrics` averages.

    Args:
        scores: (n_images, n_texts), higher is better; or a :class:`itrloss.Similarity` with images
            as rows, whose matrix is not formed. Or a pair of scores for image→text and text→image,
            the second one a tensor, as :meth:`itrloss.rerank.Reranker.rerank` returns them.
        image_ids, text_ids: (n_images,) and (n_texts,) integers or strings, equal where image and
            text match; ``text_ids`` alone are numbers of the images, from 0. Not with a
            ``Similarity``, which has its own. Without ids, ``n_texts = c * n_images`` means c
            consecutive texts per image, and consecutive copies of an image count once: see
            :func:`fold_repeated`.
        relevant: the positive pairs, instead of those with equal ids: (P,) image and (P,) text
            indices, such as :meth:`Judgements.at_least` returns; a list with a list of text indices
            for each image; or graded, as :class:`Judgements` or as a matrix (n_images, n_texts) of
            grades. Pairs with a grade above 0 are right, and grades are the gains of nDCG. Not with
            folds.
        exclude: pairs that are not ranked, in either direction, such as an image with itself or the
            reference of a composed query, in the same forms; a matrix is one of bools. A right
            candidate that is excluded does not exist. Not with folds.
        candidates: the only pairs that are ranked, in the same forms, such as a first stage's best
            for each query. A right pair that is not among them was missed: it counts, and has the
            last rank of all candidates. Not with folds.
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
            queries of the part. A text that matches no image is in no part; one that matches images
            of two parts is refused.

    Warns:
        SuspiciousInputWarning: of copies of images, of embeddings passed as scores or as both
            sides, and of ids that many images or texts share with none; see :doc:`metrics`.

    Raises:
        TypeError, ValueError: naming the argument, also for nan or infinite scores or embeddings.
    """
    by_ids = relevant is None
    has_rules = not by_ids or exclude is not None or candidates is not None
    hubness_k = as_size("hubness_k", hubness_k)
    folds = as_size("folds", folds)
    one_of("ties", ties, "pessimistic", "optimistic")
    if reranker is not None:
        check_reranker(reranker, _are_two(scores))
    if folds > 1 and has_rules:
        others = "relevant, excluded or candidate pairs"
        raise ValueError(f"folds: expected 1 with {others}, got {folds}")
    sims = _with_ids(scores, image_ids, text_ids, by_ids, reranker)
    if by_ids:
        warn_of_repeated(sims[0])
    pairs = judged(sims[0], relevant, exclude, candidates)
    i2t = []
    t2i = []
    for rows, cols in folds_of(sims[0], folds):
        inside = [part_of(sim, rows, cols) for sim in sims]
        right = pairs.within(rows, cols)
        of_images, of_texts = _rankings(inside, right, reranker, hubness_k, ties)
        i2t.append((of_images, rows, cols))
        t2i.append((of_texts, cols, rows))
    results = _joined(i2t, t2i, query_ids(sims[0]), pairs.right)
    if not has_rules:
        warn_of_unmatched(results)
    return results


def _joined(
    i2t: Sequence[RankedPart],
    t2i: Sequence[RankedPart],
    ids: tuple[Tensor, Tensor],
    relevant: Judgements,
) -> RetrievalResults:
    """Return the results of all queries, from the rankings of one part or of each fold."""
    image_ids, text_ids = ids
    images = joined(i2t, image_ids, len(text_ids))
    texts = joined(t2i, text_ids, len(image_ids))
    folds = []
    if len(i2t) > 1:
        for _, rows, cols in i2t:
            folds.append(RetrievalResults(images.part(rows, cols), texts.part(cols, rows)))
    return RetrievalResults(images, texts, tuple(folds), relevant)


def _rankings(
    parts: Sequence[Part], right: Judged, reranker: Reranker | None, k: int, ties: Ties
) -> Sequence[Ranking]:
    """Return the rankings of the images and of the texts of a part, of one matrix or of two."""
    of_images = right.relevance()
    of_texts = right.T.relevance()
    if reranker is not None:
        return reranker.ranked(parts[0], k, ties, (of_images, of_texts))
    return (
        parts[0].sim.ranked(k, ties=ties, relevance=of_images),
        parts[-1].sim.T.ranked(k, ties=ties, relevance=of_texts),
    )


def check_reranker(reranker: object, pair: bool) -> None:
    """Raise an error unless it is a re-ranker, which does not go with a pair of scores."""
    if isinstance(reranker, type) or not hasattr(reranker, "ranked"):
        expected = "a re-ranker with its options, such as itrloss.rerank.CSLS()"
        raise TypeError(f"reranker: expected {expected}, got {reranker!r}")
    if pair:
        raise ValueError("reranker: expected None with a pair of scores")


def check_numbering(
    name: str, scores: Tensor | Similarity, sim: Similarity, reranker: Reranker | None
) -> None:
    """Raise a ValueError for a re-ranker that asks for images by their indices in ``scores``, if
    repeated ones were folded in ``sim``.
    """
    rows = scores.shape[0]
    if getattr(reranker, "needs_numbers", False) and rows != sim.shape[0]:
        copies = rows // sim.shape[0]
        expected = (
            f"one row for each image with {type(reranker).__name__}, which gives their numbers"
        )
        raise ValueError(f"{name}: expected {expected}, got {copies} of each; pass [::{copies}]")


def _are_two(scores: AnyScores) -> bool:
    """Return whether scores are a pair, of image→text and of text→image."""
    return isinstance(scores, (tuple, list)) and len(scores) == 2


def _with_ids(
    scores: Any,  # AnyScores
    image_ids: IdsLike | None,
    text_ids: IdsLike | None,
    by_ids: bool,
    reranker: Reranker | None,
) -> list[Similarity]:
    """Return the checked scores with their ids: one matrix for both directions, or two."""
    if _are_two(scores):
        return _pair_with_ids(scores, image_ids, text_ids, by_ids)
    sim = with_ids("scores", scores, image_ids, text_ids, by_ids)
    check_numbering("scores", scores, sim, reranker)
    return [sim]


def _pair_with_ids(
    scores: tuple[Tensor | Similarity, Tensor],
    image_ids: IdsLike | None,
    text_ids: IdsLike | None,
    by_ids: bool,
) -> list[Similarity]:
    """Return the checked scores of image→text and of text→image with their ids."""
    first, second = scores
    i2t = with_ids("scores", first, image_ids, text_ids, by_ids)
    second = from_numpy(second)
    check_matrix("scores[1]", second, "(N, M)", check_finite=True)
    if tuple(second.shape) != tuple(first.shape):
        raise ValueError(
            f"scores[1]: expected shape {tuple(first.shape)}, got {tuple(second.shape)}"
        )
    ids_left_out = image_ids is None and text_ids is None
    if isinstance(first, Similarity):
        ids_left_out = has_no_ids(first)
    if by_ids and ids_left_out:
        second = fold_repeated(second)
    if i2t.shape != tuple(second.shape):
        raise ValueError("scores[1]: expected repeated images like scores[0], or ids")
    return [i2t, Similarity.from_scores(second, *query_ids(i2t))]
