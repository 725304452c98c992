"""MSCOCO's protocols, compared with the package that provides the judgements; and their output by
the command line.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from itrloss import Similarity, rerank
from itrloss.metrics import coco_protocol, default_ids, retrieval_metrics
from itrloss.metrics import protocols as module

N, M = 5000, 25000
# candidates of each query: the package uses as many as a query has positives, 48 at most
LISTED = 100


def saved_scores() -> torch.Tensor:
    """Scores by which a right candidate is among the first, and those of its fold precede all
    others.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(N, M, generator=generator)
    scores[default_ids(N, M)[1], torch.arange(M)] += 3.0
    for fold in range(5):
        scores[fold * 1000 : (fold + 1) * 1000, fold * 5000 : (fold + 1) * 5000] += 4.0
    return scores


@pytest.mark.slow
def test_figures_are_those_of_the_package():
    if importlib.util.find_spec("eccv_caption") is None:
        pytest.skip("eccv-caption is not installed")
    from eccv_caption import Metrics

    scores = saved_scores()
    found = coco_protocol(scores)
    theirs = Metrics()
    captions = theirs.coco_ids.tolist()
    images = list(dict.fromkeys(theirs.coco_gts["t2i"][c][0] for c in captions))
    best = (
        scores.topk(LISTED, 1).indices.tolist(),
        scores.T.contiguous().topk(LISTED, 1).indices.tolist(),
    )
    i2t = {i: [captions[c] for c in row] for i, row in zip(images, best[0], strict=True)}
    t2i = {c: [images[i] for i in row] for c, row in zip(captions, best[1], strict=True)}
    wanted = theirs.compute_all_metrics(
        i2t, t2i, ("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls")
    )
    for their, ours in {"coco_1k": "1K", "coco_5k": "5K", "cxc": "CxC"}.items():
        for k in (1, 5, 10):
            for way in ("i2t", "t2i"):
                assert found[ours][f"{way}_r{k}"] / 100 == pytest.approx(
                    wanted[f"{their}_r{k}"][way], abs=1e-12
                )
    wanted = theirs.eccv_metrics({"i2t": i2t, "t2i": t2i}, "all")
    for their, ours in {
        "eccv_r1": "r1",
        "eccv_map_at_r": "map_at_r",
        "eccv_rprecision": "r_precision",
    }.items():
        for way in ("i2t", "t2i"):
            assert found["ECCV Caption"][f"{way}_{ours}"] / 100 == pytest.approx(
                wanted[their][way], abs=1e-12
            )


@pytest.fixture
def small(monkeypatch):
    """A test split of ten images and fifty captions, without other judgements."""
    monkeypatch.setattr(module, "_SHAPE", (10, 50))
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    return torch.randn(10, 50, generator=torch.Generator().manual_seed(0))


def test_without_the_package_there_are_the_two_protocols_of_ids(small):
    found = coco_protocol(small)
    assert found == {"1K": retrieval_metrics(small, folds=5), "5K": retrieval_metrics(small)}
    fast = rerank.FastReranker()
    assert coco_protocol(small, reranker=fast)["1K"] == retrieval_metrics(
        small, reranker=fast, folds=5
    )


class Judgements:
    """The parts of the package that are read, for ten images of which one has 20 right captions."""

    coco_ids = np.arange(50)
    coco_gts: ClassVar = {"t2i": {caption: [caption // 5] for caption in range(50)}}
    eccv_gts: ClassVar = {"i2t": {0: [*range(20)]}, "t2i": {0: [0]}}

    def eccv_metrics(self, ranked, target):
        assert {len(row) for row in ranked["i2t"].values()} == {20} and len(ranked["t2i"]) == 50
        return {name: {"i2t": 0.5, "t2i": 0.25} for name in ("eccv_rprecision", "eccv_map_at_r")}

    def cxc_recalls(self, ranked, target, K):
        return {"i2t": 0.1, "t2i": 0.2}

    eccv_recalls = cxc_recalls


def test_judgements_leave_the_other_protocols_as_they_are(small, monkeypatch):
    """Longer lists of candidates are ranked for them."""
    alone = coco_protocol(small)
    monkeypatch.setitem(sys.modules, "eccv_caption", SimpleNamespace(Metrics=Judgements))
    found = coco_protocol(small)
    assert {name: found[name] for name in alone} == alone and list(found)[2:] == [
        "CxC",
        "ECCV Caption",
    ]
    assert found["ECCV Caption"]["i2t_map_at_r"] == 50 and found["CxC"]["rsum"] == pytest.approx(90)


def test_another_shape_is_refused(small):
    with pytest.raises(
        ValueError, match=r"scores: expected MSCOCO's test split, shape \(10, 50\), got \(10, 40\)"
    ):
        coco_protocol(small[:, :40])
    with pytest.raises(ValueError, match="scores: expected MSCOCO's test split"):
        coco_protocol(Similarity.from_scores(torch.eye(4)))
