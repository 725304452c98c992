"""Wrong input of metrics and re-rankers: the message names the argument and what it got."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
from support.cases import embeddings

from itrloss import NO_ID, Similarity
from itrloss.metrics import (
    Judgements,
    compare,
    confidence_intervals,
    retrieval_metrics,
    retrieval_results,
)
from itrloss.rerank import (
    CSLS,
    DualBankNorm,
    DualSoftmax,
    FastReranker,
    InvertedSoftmax,
    MutualProximity,
    NearestNeighborNorm,
    QueryBankNorm,
    Sinkhorn,
    TwoStageReranker,
)

S = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
THREE = Similarity(*embeddings(3, 3))
PERFECT = torch.eye(4).repeat_interleave(5, 1)
ONE = retrieval_results(PERFECT)
PAIRS = (torch.arange(4), torch.arange(4))


def asked(**options):
    return partial(retrieval_metrics, PERFECT, **options)


def judged(least=1.0, **changed):
    """A call with two judgements, of which something is changed."""
    pairs = Judgements(torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    pairs = pairs._replace(**changed)
    return lambda: retrieval_results(PERFECT, relevant=pairs.at_least(least))


def reranked(method, scores, *banks):
    return lambda: method.fit(*banks).rerank(scores)


# --- matrices -------------------------------------------------------------------------------------

MATRICES = [
    (torch.rand(4), ValueError, "expected shape"),
    (torch.ones(4, 4).long(), TypeError, "expected a floating-point"),
    ([[1.0]], TypeError, "expected a floating-point"),
    (torch.full((4, 4), math.nan), ValueError, "expected finite"),
    (torch.full((4, 4), math.inf), ValueError, "expected finite"),
]
TAKEN_BY = [
    ("scores", retrieval_metrics),
    ("scores", retrieval_results),
    (r"scores\[1\]", lambda x: retrieval_metrics((S, x))),
    ("scores", FastReranker().rerank),
    ("scores", MutualProximity().rerank),
    ("scores", lambda x: CSLS().topk(x, 2)),
    ("scores", CSLS().biases),
    ("validation", FastReranker().calibrate),
    ("images", FastReranker().fit),
    ("texts", lambda x: CSLS().fit(texts=x)),
]


@pytest.mark.parametrize(("matrix", "taken"), list(product(MATRICES, TAKEN_BY)))
def test_bad_matrices_are_named(matrix, taken):
    x, error, message = matrix
    name, call = taken
    with pytest.raises(error, match=f"^{name}: {message}"):
        call(x)


# --- numbers --------------------------------------------------------------------------------------

NOT_SIZES = [(0, ValueError), (2.5, TypeError), (True, TypeError)]
SIZES = [
    ("hubness_k", lambda k: retrieval_metrics(S, hubness_k=k)),
    ("folds", lambda k: retrieval_metrics(S, folds=k)),
    ("ks", lambda k: retrieval_metrics(S, ks=(1, k))),
    ("k", lambda k: CSLS().topk(S, k)),
    ("k", CSLS),
    ("k", lambda k: QueryBankNorm(k=k)),
    ("k", lambda k: NearestNeighborNorm(k=k)),
    ("iterations", lambda k: Sinkhorn(iterations=k)),
    ("k", lambda k: TwoStageReranker(lambda i, t: i, k=k)),
    ("samples", lambda k: confidence_intervals(ONE, samples=k)),
    ("samples", lambda k: compare(ONE, ONE, samples=k)),
]
NOT_POSITIVE = [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("warm", TypeError)]
POSITIVE = [
    ("scale", InvertedSoftmax),
    ("scale", DualSoftmax),
    ("scale", Sinkhorn),
    ("query_scale", DualBankNorm),
    ("gallery_scale", lambda x: DualBankNorm(gallery_scale=x)),
    ("i2t", lambda x: FastReranker((25.0, x))),
    ("t2i", lambda x: FastReranker(t2i=(x, 25.0))),
    ("level", lambda x: confidence_intervals(ONE, level=x)),
    ("level", lambda x: compare(ONE, ONE, level=x)),
]


@pytest.mark.parametrize(
    ("value", "taken"), [*product(NOT_SIZES, SIZES), *product(NOT_POSITIVE, POSITIVE)]
)
def test_bad_numbers_are_named(value, taken):
    x, error = value
    name, call = taken
    with pytest.raises(error, match=f"^{name}: .*{x}"):
        call(x)


# --- everything else ------------------------------------------------------------------------------

OF_WRONG_VALUES = [
    (partial(retrieval_metrics, torch.rand(4, 7)), "image_ids, text_ids: needed for 4 images"),
    (partial(FastReranker().calibrate, torch.rand(4, 7)), "image_ids, text_ids"),
    (partial(FastReranker().calibrate, torch.rand(4, 8), scales=()), "scales"),
    (partial(FastReranker().calibrate, S, [0] * 4, [1] * 4), "image_ids, text_ids: no query"),
    (partial(retrieval_metrics, S, torch.arange(3)), "image_ids"),
    (partial(retrieval_metrics, S, *PAIRS, exclude=S > -9), "no query"),
    (
        partial(retrieval_metrics, S, text_ids=torch.arange(4) + 1),
        "text_ids: expected numbers of the 4 images, from 0 to 3, got 1 to 4; .*need image_ids",
    ),
    (partial(retrieval_metrics, S, text_ids=torch.tensor([[0, 1]] * 3 + [[0, -1]])), "got -1 to 1"),
    (partial(retrieval_metrics, S, text_ids=[NO_ID, 0, 1, 4]), "text_ids: .*got 0 to 4"),
    (partial(retrieval_metrics, Similarity(S, S, None, [0, 1, 2, 4])), "text_ids: .*got 0 to 4"),
    (partial(retrieval_metrics, Similarity(S, S, None, [0, 1, 2, 4]).T), "image_ids: .*4 texts"),
    (partial(retrieval_metrics, THREE, torch.arange(3)), "image_ids"),
    (partial(retrieval_metrics, (S, torch.rand(4, 5))), r"scores\[1\].*\(4, 4\).*\(4, 5\)"),
    (partial(retrieval_metrics, (S, S), reranker=CSLS()), "reranker: expected None"),
    (partial(retrieval_metrics, Similarity(torch.rand(4, 4) * math.nan, S)), "rows"),
    (partial(retrieval_metrics, Similarity(S, torch.rand(4, 4) * math.nan)), "cols"),
    (asked(ks=()), "ks: expected at least one"),
    (asked(folds=3), "folds.*divisor of the 4.*3"),
    (asked(folds=2, relevant=PAIRS), "folds: expected 1 with relevant, excluded"),
    (asked(folds=2, exclude=PAIRS), "folds: expected 1 with relevant, excluded"),
    (partial(retrieval_metrics, PERFECT[:, :2], range(4), range(2), folds=2), "2 to 3"),
    (
        partial(retrieval_metrics, torch.rand(2, 2), [0, 0], [0, 0], folds=2),
        "folds: expected each text to have its images in one part",
    ),
    (asked(exclude=PERFECT), r"exclude: expected a bool matrix \(4, 20\)"),
    (asked(exclude=PERFECT.T.bool()), r"exclude: .*\(20, 4\)"),
    (asked(exclude=([0], [20])), r"exclude\.texts: .*0 to 19, got 20"),
    (asked(candidates=([4], [0])), r"candidates\.images: .*0 to 3, got 4"),
    (asked(candidates=([0, 1], [0])), r"candidates\.texts: .*\(2,\)"),
    (asked(candidates=[[0], [1]]), "candidates: expected a list .* 4 images, got 2"),
    (asked(relevant=PERFECT.T), r"relevant: .* matrix of shape \(4, 20\)"),
    (asked(relevant=PERFECT.to_sparse()), "relevant: expected a dense matrix .*sparse_coo"),
    (asked(relevant=0 * PERFECT), "relevant: .* grade above 0, got none"),
    (asked(relevant=([], [])), "relevant: .* grade above 0, got none"),
    (asked(relevant=-PERFECT), "relevant: expected grades of at least 0"),
    (asked(relevant=PERFECT * math.nan), "relevant: expected finite"),
    (asked(relevant=(range(3), range(2))), r"relevant\.texts.*3"),
    (asked(relevant=([4], [0])), r"relevant\.images.*0 to 3, got 4"),
    (judged(texts=torch.tensor([[0, 1]])), r"judgements\.texts.*\(1, 2\)"),
    (judged(texts=torch.tensor([-1, 4])), r"judgements\.texts.*from 0 to .*, got -1 to 4"),
    (judged(grades=torch.tensor([1.0])), r"judgements\.grades.*\(2,\).*\(1,\)"),
    (judged(grades=torch.tensor([1.0, math.nan])), r"judgements\.grades.*finite"),
    (judged(2.1), r"grade.*2\.1"),
    (partial(confidence_intervals, ONE, level=1.0), "level.*1"),
    (partial(compare, ONE, retrieval_results(PERFECT[:2, :10])), "others.*i2t"),
    (partial(compare, ONE, retrieval_results(PERFECT, range(4), [*range(4)] * 5)), "t2i"),
    (
        partial(confidence_intervals, retrieval_results(PERFECT, range(4), range(4, 24))),
        "results.*no query",
    ),
    (partial(FastReranker, t2i=(1.0,)), "t2i"),
    (reranked(FastReranker(), torch.full((4, 4), 3e38)), "scores: too large for FastReranker.*25"),
    (reranked(Sinkhorn(), torch.full((4, 4), 3e38)), r"scores: too large for Sinkhorn\(scale=100"),
    (reranked(FastReranker(), Similarity(S * math.nan, S)), "rows"),
    (reranked(FastReranker(), torch.rand(4, 8), torch.rand(9, 5)), "images.*8 candidates.*5"),
    (reranked(CSLS(), torch.rand(4, 8), None, torch.rand(9, 5)), "texts.*4 candidates.*9"),
    (reranked(FastReranker(), THREE, torch.rand(9, 5)), "images.*dimension 6"),
    (partial(DualBankNorm().fit(S, S).rerank, S), "scores: .* needs a Similarity of embeddings"),
    (partial(CSLS().rerank, S[:1]), r"single query.*fit\(images"),
    (partial(CSLS().rerank, S[:, :1]), r"single query.*fit\(texts"),
    (partial(QueryBankNorm().rerank, S), r"images: .* needs a bank of queries; call fit\(images"),
    (partial(QueryBankNorm().fit(S).topk, S, 2), "texts: .* needs a bank"),
    (partial(retrieval_metrics, S, reranker=QueryBankNorm()), "images: .* needs a bank"),
]
OF_WRONG_TYPES = [
    (partial(retrieval_metrics, S, text_ids=torch.rand(4)), "text_ids"),
    (partial(retrieval_metrics, (S, THREE)), r"scores\[1\].*Similarity"),
    (asked(ks=5), r"ks: expected numbers such as \(1, 5, 10\), got 5"),
    (asked(candidates=[0, 1, 2, 3]), "candidates: expected a list of the texts .* got 0"),
    (
        asked(candidates=list(torch.arange(4).numpy())),
        "candidates: expected a list of the texts .* got 0",
    ),
    (asked(relevant=list(torch.arange(4))), "relevant: expected a list of the texts .* got 0"),
    (asked(relevant=[[0], None, [1], [2]]), "relevant: expected a list of the texts .* got None"),
    (asked(exclude="diagonal"), "exclude: expected .* got str"),
    (asked(relevant="all"), "relevant: expected .* got str"),
    (judged(images=torch.tensor([0.0, 1.0])), r"judgements\.images.*integer.*float32"),
    (partial(compare, torch.eye(3), torch.eye(3)), "results: expected those of .*, got Tensor"),
    (partial(FastReranker().fit, THREE), "images.*Similarity"),
]


@pytest.mark.parametrize(("call", "message"), OF_WRONG_VALUES)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), OF_WRONG_TYPES)
def test_bad_types_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()
