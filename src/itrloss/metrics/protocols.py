"""The figures that papers on MSCOCO report: 1K in five folds, 5K, and those by later judgements of
its test split.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..similarity import Similarity
from .labels import with_ids
from .results import RECALL_NAMES, RECALLS, WAYS, RetrievalResults
from .retrieval import retrieval_metrics, retrieval_results

if TYPE_CHECKING:
    from ..rerank import Reranker

_SHAPE = (5000, 25000)  # images and captions of Karpathy's test split
_HUBNESS_K = 10  # that of retrieval_metrics by default


def check_coco(shape: tuple[int, int]) -> None:
    """Raise a ValueError unless scores have the shape of the test split."""
    if shape != _SHAPE:
        raise ValueError(f"scores: expected MSCOCO's test split, shape {_SHAPE}, got {shape}")


def coco_protocol(
    scores: Tensor | Similarity, *, reranker: Reranker | None = None
) -> dict[str, dict[str, float]]:
    """Return figures of MSCOCO's test split by protocol: ``"1K"``, ``"5K"``, ``"CxC"`` and ``"ECCV
    Caption"``.

    ``"1K"``, the mean over five folds of 1000 images, and ``"5K"`` are those of
    :func:`retrieval_metrics`. CxC (Parekh et al., EACL 2021) and ECCV Caption (Chun et al., ECCV
    2022) are other judgements of which captions are right. The package ``eccv-caption`` ships them
    and computes recalls, and for ECCV Caption R-Precision and mAP@R; without it (``pip install
    'itrloss[coco]'``) they are left out.

    Args:
        scores: (5000, 25000) scores of Karpathy's test split in its order, five consecutive captions an image; or a
            :class:`itrloss.Similarity`.
        reranker: evaluate these scores re-ranked; for ``"1K"`` within each fold.

    Raises:
        ValueError: for another shape.
    """
    sim = with_ids("scores", scores, None, None)
    check_coco(sim.shape)
    figures = {"1K": retrieval_metrics(sim, reranker=reranker, folds=5)}
    try:
        from eccv_caption import Metrics
    except ImportError:
        return figures | {"5K": retrieval_metrics(sim, reranker=reranker)}
    package = Metrics()
    longest = max(len(right) for way in WAYS for right in package.eccv_gts[way].values())
    results = retrieval_results(sim, reranker=reranker, hubness_k=max(longest, _HUBNESS_K))
    i2t, t2i = (replace(side, top=side.top[:, :_HUBNESS_K]) for side in (results.i2t, results.t2i))
    return figures | {"5K": RetrievalResults(i2t, t2i).metrics()} | _judged(results, package)


def _judged(results: RetrievalResults, package: Any) -> dict[str, dict[str, float]]:
    captions = package.coco_ids.tolist()
    images = list(dict.fromkeys(package.coco_gts["t2i"][caption][0] for caption in captions))
    i2t, t2i = results.i2t.top.tolist(), results.t2i.top.tolist()
    ranked = {
        "i2t": {image: [captions[i] for i in row] for image, row in zip(images, i2t, strict=True)},
        "t2i": {
            caption: [images[i] for i in row] for caption, row in zip(captions, t2i, strict=True)
        },
    }
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        cxc, eccv = (
            {f"r{k}": recalls(ranked, "all", K=k) for k in RECALLS}
            for recalls in (package.cxc_recalls, package.eccv_recalls)
        )
        precisions = package.eccv_metrics(ranked, "all")
    eccv |= {"r_precision": precisions["eccv_rprecision"], "map_at_r": precisions["eccv_map_at_r"]}
    figures = {}
    for protocol, shares in (("CxC", cxc), ("ECCV Caption", eccv)):
        percent = {
            f"{way}_{name}": 100 * float(x[way]) for way in WAYS for name, x in shares.items()
        }
        figures[protocol] = percent | {"rsum": sum(percent[name] for name in RECALL_NAMES)}
    return figures
