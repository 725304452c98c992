"""The figures that papers on MSCOCO report: 1K in five folds, 5K, and those by later judgements of its test split."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..similarity import Similarity
from .labels import with_ids
from .results import RECALLS, WAYS
from .retrieval import retrieval_metrics, retrieval_results

if TYPE_CHECKING:
    from ..rerank import Reranker

_SHAPE = (5000, 25000)  # images and captions of Karpathy's test split


def check_coco(shape: tuple[int, int]) -> None:
    """Raise a ValueError unless scores have the shape of the test split."""
    if shape != _SHAPE:
        raise ValueError(f"scores: expected MSCOCO's test split, shape {_SHAPE}, got {shape}")


def coco_protocol(scores: Tensor | Similarity, *, reranker: Reranker | None = None) -> dict[str, dict[str, float]]:
    """Return figures of MSCOCO's test split by protocol: ``"1K"``, ``"5K"``, ``"CxC"`` and ``"ECCV Caption"``.

    ``"1K"``, the mean over five folds of 1000 images, and ``"5K"`` are those of :func:`retrieval_metrics`. CxC (Parekh
    et al., EACL 2021) and ECCV Caption (Chun et al., ECCV 2022) are other judgements of which captions are right. The
    package ``eccv-caption`` ships them and computes recalls, and for ECCV Caption R-Precision and mAP@R; without it
    (``pip install 'itrloss[coco]'``) they are left out.

    Args:
        scores: (5000, 25000) scores of Karpathy's test split in its order, five consecutive captions an image; or a
            :class:`itrloss.Similarity`.
        reranker: evaluate these scores re-ranked; for ``"1K"`` within each fold.

    Raises:
        ValueError: for another shape.
    """
    sim = with_ids("scores", scores, None, None)
    check_coco(sim.shape)
    figures = {
        "1K": retrieval_metrics(sim, reranker=reranker, folds=5),
        "5K": retrieval_metrics(sim, reranker=reranker),
    }
    try:
        from eccv_caption import Metrics
    except ImportError:
        return figures
    return figures | _judged(sim, reranker, Metrics())


def _judged(sim: Similarity, reranker: Reranker | None, package: Any) -> dict[str, dict[str, float]]:
    captions = package.coco_ids.tolist()
    images = list(dict.fromkeys(package.coco_gts["t2i"][caption][0] for caption in captions))
    longest = max(len(right) for way in WAYS for right in package.eccv_gts[way].values())
    results = retrieval_results(sim, reranker=reranker, hubness_k=longest)
    ranked = {
        way: {query: [candidates[i] for i in row] for query, row in zip(queries, top.tolist(), strict=True)}
        for way, queries, candidates, top in (
            ("i2t", images, captions, results.i2t.top),
            ("t2i", captions, images, results.t2i.top),
        )
    }
    figures: dict[str, dict[str, float]] = {}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        for name, recalls in (("CxC", package.cxc_recalls), ("ECCV Caption", package.eccv_recalls)):
            by_k = {f"r{k}": recalls(ranked, "all", K=k) for k in RECALLS}
            if name == "ECCV Caption":
                precisions = package.eccv_metrics(ranked, "all")
                by_k |= {"r_precision": precisions["eccv_rprecision"], "map_at_r": precisions["eccv_map_at_r"]}
            figures[name] = {f"{way}_{key}": 100 * float(x[way]) for way in WAYS for key, x in by_k.items()}
            figures[name]["rsum"] = sum(figures[name][f"{way}_r{k}"] for way in WAYS for k in RECALLS)
    return figures
