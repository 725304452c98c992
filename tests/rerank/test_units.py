"""Scores that are no cosines, and options that are made for cosines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import embeddings, public_rerankers, warnings_of

from itrloss import Similarity, rerank
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import FastReranker, InvertedSoftmax, Sinkhorn, TwoStageReranker

N, C = 24, 2
IMAGES, NOISE = embeddings(N, N * C, d=8, seed=3)
TEXTS = 2 * IMAGES.repeat_interleave(C, 0) + NOISE
IDS = torch.arange(N), torch.arange(N).repeat_interleave(C)
COSINES = Similarity(IMAGES, TEXTS, *IDS).scores()
BANKS = embeddings(30, 40, d=8, seed=5)


def scorer(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    return -(images - texts).abs().double()


KINDS: dict[str, Any] = {kind.__name__: kind for kind in public_rerankers()}


def made(kind: type[rerank.Reranker], scale: float = 1.0) -> rerank.Reranker:
    """A re-ranker with its defaults, with banks if it needs any, whose embeddings have a scale."""
    reranker = kind(scorer) if kind is TwoStageReranker else kind()
    if reranker.needs_bank:
        reranker.fit(*(scale**0.5 * torch.nn.functional.normalize(x) for x in BANKS))
    return reranker


def multiplied(scale: float) -> Similarity:
    """Scores that are cosines times a scale, of embeddings that are not normalised."""
    units = [scale**0.5 * torch.nn.functional.normalize(x) for x in (IMAGES, TEXTS)]
    return Similarity(*units, *IDS, normalize=False)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_methods_whose_order_depends_on_the_unit_of_scores_have_options_for_cosines(name):
    kind = KINDS[name]
    orders = []
    for scale in (1.0, 64.0):
        top = made(kind, scale).topk(multiplied(scale), N)
        orders.append(torch.cat([side.indices for side in top]))
    assert torch.equal(*orders) == (kind.cosine_options == ())


CALLS = {
    "rerank": lambda method, sim: method.rerank(sim),
    "topk": lambda method, sim: method.topk(sim, 3),
    "metrics": lambda method, sim: retrieval_metrics(sim, reranker=method),
}


@pytest.mark.parametrize("name", [name for name in sorted(KINDS) if KINDS[name].cosine_options])
@pytest.mark.parametrize("call", CALLS)
def test_defaults_for_cosines_are_noticed_with_logits(name, call):
    kind = KINDS[name]
    assert warnings_of(lambda: CALLS[call](made(kind), multiplied(1.0))) == []
    (message,) = warnings_of(lambda: CALLS[call](made(kind, 30.0), multiplied(30.0)))
    options = ", ".join(kind.cosine_options)
    assert message.startswith("scores: values beyond -1 to 1")
    assert f"{kind.__name__} has defaults ({options}) for cosine similarities" in message
    assert message.endswith("(calibrate)") == (kind is FastReranker)


def test_biases_of_logits_are_noticed_too():
    assert len(warnings_of(lambda: Sinkhorn().biases(100 * COSINES))) == 1


@pytest.mark.parametrize("scores", [30 * COSINES, -30 * (1 - COSINES), -2 + COSINES])
@pytest.mark.parametrize("folds", [1, 2])
def test_matrices_of_logits_and_distances_are_noticed(scores, folds):
    found = warnings_of(lambda: retrieval_metrics(scores, reranker=Sinkhorn(), folds=folds))
    assert len(found) == folds
    assert all(message.startswith("scores: values beyond") for message in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cosines_may_be_rounded_above_1(dtype):
    scores = torch.eye(6).to(dtype) * (1 + torch.finfo(dtype).eps)
    assert scores.amax() > 1
    assert warnings_of(lambda: InvertedSoftmax().rerank(scores)) == []


def test_chosen_options_are_in_the_users_unit():
    logits = 100 * COSINES
    ready = FastReranker().calibrate(logits, *IDS, scales=(0.2, 0.3, 0.4, 0.5))
    for reranker in (InvertedSoftmax(0.2), Sinkhorn(1.0), FastReranker((0.25, 0.25)), ready):
        assert warnings_of(lambda method=reranker: method.topk(logits, 3)) == []
    assert warnings_of(lambda: Sinkhorn(iterations=5).topk(logits, 3)) != []


def test_re_rankers_of_ones_own_have_options_of_any_unit():
    class Squared(InvertedSoftmax):
        def __init__(self):
            super().__init__()

    assert warnings_of(lambda: Squared().topk(100 * COSINES, 3)) == []


def test_normalised_embeddings_and_all_but_the_first_scores_are_not_looked_at(monkeypatch):
    monkeypatch.setattr("itrloss.rerank.base._AT_ONCE", 400)
    scores = torch.zeros(40, 40)
    scores[-1, -1] = 30.0
    assert warnings_of(lambda: InvertedSoftmax().topk(scores, 3)) == []
    monkeypatch.setattr(rerank.Reranker, "_warn_of_units", None)
    InvertedSoftmax().topk(Similarity(IMAGES, TEXTS, *IDS), 3)


@pytest.mark.parametrize(("factor", "noticed"), [(1.0, False), (100.0, True), (0.1, True)])
def test_the_ends_of_what_calibration_tries_are_noticed(factor, noticed):
    scales = (1.0, 2.0, 4.0, 8.0, 16.0)
    found = warnings_of(lambda: FastReranker().calibrate(factor * COSINES, *IDS, scales=scales))
    assert len(found) == noticed
    if noticed:
        assert "of the values tried, 1 to 16, the first or the last is best: Fast" in found[0]


def test_an_end_is_no_reason_to_go_on_where_nothing_can_be_better_or_lies_between():
    assert warnings_of(lambda: FastReranker().calibrate(torch.eye(6))) == []
    assert warnings_of(lambda: FastReranker().calibrate(COSINES, *IDS, scales=(1.0, 2.0))) == []
