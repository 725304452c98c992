"""The figures that papers report on MSCOCO: 1K in five folds, 5K, and by later judgements."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from torch import Tensor

from ..similarity import Similarity
from .labels import with_ids
from .results import RECALL_NAMES, RECALLS, WAYS, QueryResults, RetrievalResults
from .retrieval import check_numbering, retrieval_metrics, retrieval_results

if TYPE_CHECKING:
    from eccv_caption import Metrics

    from ..rerank import Reranker

_SHAPE = (5000, 25000)  # images and captions of Karpathy's test split


def coco_protocol(
    scores: Tensor | Similarity, *, reranker: Reranker | None = None
) -> dict[str, dict[str, float]]:
    """Return figures of MSCOCO's test split by protocol and name.

    The protocols are ``"1K"``, ``"5K"``, ``"CxC"`` and ``"ECCV Caption"``. For ``"1K"``, the mean
    over five folds of 1000 images, and ``"5K"``, :func:`retrieval_metrics` computes the figures.
    CxC (Parekh et al., EACL 2021) and ECCV Caption (Chun et al., ECCV 2022) are other judgements of
    which captions are right. The package ``eccv-caption`` (``pip install 'itrloss[coco]'``) ships
    them. It computes recalls, and for ECCV Caption R-Precision and mAP@R. Without the package, both
    are left out.

    Args:
        scores: (5000, 25000) scores of Karpathy's test split in its order, five consecutive
            captions an image; or a :class:`itrloss.Similarity`.
        reranker: evaluate these scores re-ranked; for ``"1K"`` within each fold.

    Raises:
        ValueError: for another shape.
    """
    sim = with_ids("scores", scores, None, None)
    check_numbering("scores", scores, sim, reranker)
    if sim.shape != _SHAPE:
        raise ValueError(f"scores: expected MSCOCO's test split, shape {_SHAPE}, got {sim.shape}")
    figures = {
        "1K": retrieval_metrics(sim, reranker=reranker, folds=5),
        "5K": retrieval_metrics(sim, reranker=reranker),
    }
    try:
        from eccv_caption import Metrics
    except ImportError:
        return figures
    package = Metrics()
    longest = max(len(right) for way in WAYS for right in package.eccv_gts[way].values())
    results = retrieval_results(sim, reranker=reranker, hubness_k=longest)
    return figures | _judged(results, package)


def _judged(results: RetrievalResults, package: Metrics) -> dict[str, dict[str, float]]:
    """Return the figures of CxC and ECCV Caption, which ``package`` computes."""
    captions = package.coco_ids.tolist()
    images = list(dict.fromkeys(package.coco_gts["t2i"][caption][0] for caption in captions))
    ranked = {
        "i2t": _ranked_names(results.i2t, images, captions),
        "t2i": _ranked_names(results.t2i, captions, images),
    }
    cxc = {}
    eccv = {}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        for k in RECALLS:
            cxc[f"r{k}"] = package.cxc_recalls(ranked, "all", K=k)
            eccv[f"r{k}"] = package.eccv_recalls(ranked, "all", K=k)
        precisions = package.eccv_metrics(ranked, "all")
    eccv["r_precision"] = precisions["eccv_rprecision"]
    eccv["map_at_r"] = precisions["eccv_map_at_r"]
    return {"CxC": _percentages(cxc), "ECCV Caption": _percentages(eccv)}


def _ranked_names(
    results: QueryResults, queries: list[int], candidates: list[int]
) -> dict[int, list[int]]:
    """Return the names in MSCOCO of each query's best candidates, by the query's name."""
    ranked = {}
    for query, row in zip(queries, results.top.tolist(), strict=True):
        ranked[query] = [candidates[i] for i in row]
    return ranked


def _percentages(shares: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return figures in percent and the RSUM, from shares by name and direction."""
    figures = {}
    for way in WAYS:
        for name, by_way in shares.items():
            figures[f"{way}_{name}"] = 100 * float(by_way[way])
    figures["rsum"] = sum(figures[name] for name in RECALL_NAMES)
    return figures
