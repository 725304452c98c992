"""Every re-ranker against loops over queries and candidates, and the guarantees of the
interface.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import math
import pickle
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle, oracle_rerank
from support.cases import embeddings, sample, similarity

from itrloss import Similarity, rerank
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import (
    CSLS,
    DualBankNorm,
    DualBankSinkhorn,
    DualSoftmax,
    FastReranker,
    InvertedSoftmax,
    KReciprocalReranker,
    MultiFactorReranker,
    MutualProximity,
    NearestNeighborNorm,
    QueryBankNorm,
    ReciprocalReranker,
    Sinkhorn,
    TwoStageReranker,
    neighbours,
)

N, M = 7, 14
METHODS = {
    "fast": FastReranker((9.0, 8.0), (8.0, 17.0)),
    "inverted softmax": InvertedSoftmax(15.0),
    "dual softmax": DualSoftmax(15.0),
    "qb-norm": QueryBankNorm(15.0, 2),
    "dbnorm": DualBankNorm(2.0, 3.0),
    "nnn": NearestNeighborNorm(0.6, 4),
    "csls": CSLS(3),
    "mutual proximity": MutualProximity(),
    "sinkhorn": Sinkhorn(12.0, 4),
    "dbsn": DualBankSinkhorn(12.0, 4),
    "rr": ReciprocalReranker(4, 5),
    "mr": MultiFactorReranker(5, 0.5, 1.1),
    "k-reciprocal": KReciprocalReranker(4, 3, 0.3),
}
SETTLED = ("k-reciprocal",)  # these take no bank


def unlabelled(v, w, **options):
    """The similarity of images and texts whose ids play no part."""
    return Similarity(v, w, torch.arange(len(v)), torch.arange(len(w)), **options)


def names(transductive=False, matrix=False):
    """Names of the re-rankers, optionally only of those that need no bank, or that accept a matrix
    of scores.
    """
    found = {name: m for name, m in METHODS.items() if not (transductive and m.needs_bank)}
    return [name for name, m in found.items() if not (matrix and m.needs_embeddings)]


# the oracles of the others, which treat both directions alike and take no more than one bank
ORACLES = {
    "inverted softmax": lambda m, S, R: oracle_rerank.inverted_softmax(S, R, m.scale),
    "dual softmax": lambda m, S, R: oracle_rerank.dual_softmax(S, R, m.scale),
    "qb-norm": lambda m, S, R: oracle_rerank.query_bank_norm(S, R, m.scale, m.k),
    "nnn": lambda m, S, R: oracle_rerank.nearest_neighbor_norm(S, R, m.alpha, m.k),
    "csls": lambda m, S, R: oracle_rerank.csls(S, R, m.k),
    "mutual proximity": lambda m, S, R: oracle_rerank.mutual_proximity(S, R),
    "sinkhorn": lambda m, S, R: oracle_rerank.sinkhorn(S, R, m.scale, m.iterations),
    "mr": lambda m, S, R: oracle_rerank.multi_factor(S, R, m.k, m.share_weight, m.place_weight)[0],
}


def expected(name, S, R, side, G=None, B=None):
    """The oracle's scores or order for one direction; G: gallery bank x candidates, B: query x
    gallery bank.
    """
    method = METHODS[name]
    if name == "fast":
        return oracle_rerank.fast(S, R, *(method.i2t, method.t2i)[side])
    if name == "dbnorm":
        return oracle_rerank.dual_bank_norm(S, R, G, method.query_scale, method.gallery_scale)
    if name == "dbsn":
        wide = np.c_[S, np.zeros((len(S), B.shape[1]))]
        found = oracle_rerank.sinkhorn(wide, np.c_[R, B], method.scale, method.iterations)
        return found[:, : S.shape[1]]
    if name == "rr":
        return oracle_rerank.reciprocal_order(S, R, (method.i2t_k, method.t2i_k)[side])
    return ORACLES[name](method, S, R)


def centred(x):
    """Scores (queries, candidates) less the mean of each query."""
    return x - x.mean(1, keepdims=True)


def agrees(name, found, wanted):
    """Compare ``found`` (queries, candidates): orders directly, scores up to a constant of each
    query.
    """
    found = np.asarray(found)
    if name == "dual softmax":
        size = np.log(np.abs(wanted))
        wanted = np.sign(wanted) * (1 + size - size.min(1, keepdims=True))
        np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-9)
    elif name in ("rr", "mr"):
        assert (np.argsort(-found, axis=1, kind="stable") == wanted).all()
    else:
        np.testing.assert_allclose(centred(found), centred(wanted), rtol=1e-8, atol=1e-9)


def equals_k_reciprocal(method, found, v, w):
    """Compare both directions with the oracle of the k-reciprocal re-ranker."""
    for scores, own, other in ((found.i2t, v, w), (found.t2i.T, w, v)):
        wanted = oracle_rerank.k_reciprocal(
            own.numpy(), other.numpy(), method.k1, method.k2, method.weight
        )
        np.testing.assert_allclose(scores, wanted, rtol=1e-8)


def cosine(a, b):
    return oracle.cosine(a.numpy(), b.numpy())


def kinds_of_input():
    """Valid combinations of bank and input, embeddings or a matrix; others raise errors (below)."""
    for name, method in METHODS.items():
        for bank in (False, True):
            if not ((method.needs_bank and not bank) or (bank and name in SETTLED)):
                for engine in ("scores", "dense", "tiled", "kept")[method.needs_embeddings :]:
                    yield name, bank, engine


@pytest.mark.parametrize(("name", "bank", "engine"), list(kinds_of_input()))
def test_every_method_equals_its_loops(name, bank, engine, small_tiles, monkeypatch):
    method = copy.copy(METHODS[name])
    monkeypatch.setattr(Similarity.blocks, "__defaults__", (30,))
    v, w = embeddings(N, M)
    bank_v, bank_w = embeddings(11, 9, seed=5)
    S = cosine(v, w)
    R = (cosine(bank_v, w), cosine(bank_w, v)) if bank else (S, S.T)
    if engine == "scores":
        asked = torch.from_numpy(S)
        banks = torch.from_numpy(R[0]), torch.from_numpy(R[1].T)
    else:
        ids = torch.zeros(N).long(), torch.zeros(M).long()
        asked = similarity(v, w, ids, engine)
        banks = bank_v, bank_w
    if bank:
        method.fit(*banks)
    found = method.rerank(asked)
    assert found.i2t.shape == found.t2i.shape == (N, M)
    assert found.transductive == (not bank, not bank)
    if name == "k-reciprocal":
        equals_k_reciprocal(method, found, v, w)
    else:
        gallery = (cosine(bank_w, w), cosine(bank_v, v))
        both = (cosine(bank_v, bank_w), cosine(bank_w, bank_v))
        for side, (x, s) in enumerate(((found.i2t, S), (found.t2i.T, S.T))):
            agrees(name, x, expected(name, s, R[side], side, gallery[side], both[side]))
    top = method.topk(asked, 4)
    assert top.transductive == found.transductive
    assert torch.equal(top.i2t.indices, found.i2t.topk(4).indices)
    assert torch.equal(top.t2i.indices, found.t2i.T.topk(4).indices)
    descending = top.t2i.values.argsort(1, descending=True)
    torch.testing.assert_close(descending, torch.arange(4).expand(M, 4))


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
@pytest.mark.parametrize("name", METHODS)
def test_images_are_the_rows_of_a_transposed_view_too(name, engine, small_tiles, monkeypatch):
    monkeypatch.setattr(Similarity.blocks, "__defaults__", (30,))
    method = copy.copy(METHODS[name])
    if name not in SETTLED:
        method.fit(*embeddings(11, 9, seed=5))
    v, w = embeddings(N, M)
    ids = torch.arange(N), torch.arange(M) // 2
    sim = similarity(v, w, ids, engine)
    turned = similarity(w, v, ids[::-1], engine).T
    for a, b in zip(method.rerank(sim), method.rerank(turned), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(method.topk(sim, 3), method.topk(turned, 3), strict=True):
        assert torch.equal(a.indices, b.indices)
    assert retrieval_metrics(sim, reranker=method) == retrieval_metrics(turned, reranker=method)


@pytest.mark.parametrize("name", names(matrix=True))
def test_scores_and_embeddings_stay_as_they_are_and_without_a_gradient(name):
    scores = torch.rand(N, M).requires_grad_()
    banks = [torch.rand(11, M), torch.rand(N, 9)]
    before = [x.detach().clone() for x in (scores, *banks)]
    method = copy.copy(METHODS[name]).fit(*banks)
    results = [*method.rerank(scores), *(x.values for x in method.topk(scores, 3))]
    retrieval_metrics(scores, reranker=method)
    assert not any(x.requires_grad for x in results)
    assert all(torch.equal(x, y) for x, y in zip((scores, *banks), before, strict=True))
    turned = scores.detach().T.contiguous().T
    for a, b in zip(method.rerank(scores), method.rerank(turned), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(turned, scores)


@pytest.mark.parametrize("name", names(transductive=True))
def test_metrics_of_the_re_ranked_need_no_matrix(name, small_tiles, monkeypatch):
    monkeypatch.setattr(Similarity.blocks, "__defaults__", (30,))
    image_ids = torch.randint(0, 4, (N,), generator=torch.Generator().manual_seed(0))
    text_ids = torch.arange(M) % 5
    sim = Similarity(*embeddings(N, M), image_ids, text_ids, engine="tiled")
    streamed = retrieval_metrics(sim, reranker=METHODS[name])
    i2t, t2i = METHODS[name].rerank(sim)
    dense = retrieval_metrics((i2t, t2i), image_ids, text_ids)
    assert streamed.keys() == dense.keys()
    assert streamed == pytest.approx(dense, abs=1e-9)


@pytest.mark.parametrize("name", names(transductive=True))
def test_no_method_looks_at_labels(name):
    v, w = embeddings(N, M)
    images = torch.arange(N)
    some = METHODS[name].rerank(Similarity(v, w, images, images.repeat_interleave(2)))
    other = METHODS[name].rerank(Similarity(v, w, torch.zeros_like(images), torch.arange(M)))
    assert torch.equal(some.i2t, other.i2t)
    assert torch.equal(some.t2i, other.t2i)


@pytest.mark.parametrize("name", names(transductive=True))
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_order_of_images_and_texts_changes_nothing(name, seed):
    generator = torch.Generator().manual_seed(seed)
    v, w = embeddings(N, M, seed=seed)
    p = torch.randperm(N, generator=generator)
    q = torch.randperm(M, generator=generator)
    plain = METHODS[name].rerank(unlabelled(v, w))
    mixed = METHODS[name].rerank(unlabelled(v[p], w[q]))
    for a, b in zip(plain, mixed, strict=True):
        torch.testing.assert_close(a[p][:, q], b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [n for n in names(transductive=True) if n not in SETTLED])
def test_the_test_queries_as_a_bank_change_nothing(name):
    v, w = embeddings(N, M)
    scores = torch.rand(N, M)
    cases = [(scores, (scores, scores))]
    if name not in ("rr", "mr"):  # these count scores, which a bank's product rounds differently
        cases.append((unlabelled(v, w), (v, w)))
    for asked, banks in cases:
        alone = METHODS[name].rerank(asked)
        fitted = copy.copy(METHODS[name]).fit(*banks).rerank(asked)
        for a, b in zip(alone, fitted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in SETTLED])
def test_beside_a_bank_a_query_stands_for_itself(name):
    v, w = embeddings(N, M)
    method = copy.copy(METHODS[name]).fit(*embeddings(11, 9, seed=5))
    whole = method.rerank(unlabelled(v, w)).i2t
    for i in range(N):
        alone = method.rerank(unlabelled(v[i : i + 1], w)).i2t
        torch.testing.assert_close(alone[0], whole[i], rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.floats(-1, 1), st.integers(0, M - 1))
@settings(max_examples=20, deadline=None)
def test_a_hub_is_gone(seed, lift, text):
    """Adding a constant to all scores of a text changes nothing for these."""
    scores = torch.rand(N, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lifted = scores.clone()
    lifted[:, text] += lift
    for method in (FastReranker((7.0, 7.0)), InvertedSoftmax(9.0), NearestNeighborNorm(1.0, 3)):
        torch.testing.assert_close(method.rerank(lifted).i2t, method.rerank(scores).i2t)
    wanted = CSLS(N).rerank(scores).i2t  # it doubles the scores
    wanted[:, text] += lift
    torch.testing.assert_close(CSLS(N).rerank(lifted).i2t, wanted)
    sinkhorn = Sinkhorn(9.0, 120)
    before = centred(sinkhorn.rerank(scores).i2t)
    after = centred(sinkhorn.rerank(lifted).i2t)
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-6)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_limits_of_the_scale(seed):
    scores = torch.rand(N, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mild = InvertedSoftmax(1e-4).rerank(scores).i2t / 1e-4
    wanted = centred(scores - scores.mean(0))
    torch.testing.assert_close(centred(mild), wanted, rtol=1e-3, atol=1e-4)
    sharp = InvertedSoftmax(1e4).rerank(scores).i2t / 1e4
    wanted = centred(scores - scores.amax(0))
    torch.testing.assert_close(centred(sharp), wanted, rtol=1e-3, atol=1e-3)


def test_fast_re_ranking_with_equal_scales_is_the_inverted_softmax():
    sim = unlabelled(*embeddings(N, M))
    fast = FastReranker((9, 9), (9, 9)).rerank(sim)
    softmax = InvertedSoftmax(9).rerank(sim)
    assert torch.equal(fast.i2t, softmax.i2t)
    assert torch.equal(fast.t2i, softmax.t2i)
    bank = embeddings(11, 9, seed=5)
    whole = QueryBankNorm(9.0, k=M).fit(*bank).rerank(sim)  # with all candidates active
    for a, b in zip(whole, InvertedSoftmax(9.0).fit(*bank).rerank(sim), strict=True):
        torch.testing.assert_close(a, b)


def test_a_penalty_that_overflows_leaves_queries_alone_whose_best_is_no_hub():
    scores, bank = torch.rand(N, M) + torch.eye(N, M), torch.rand(3, M)
    bank[:, M - 1] = 1e38
    found = QueryBankNorm(20.0).fit(bank, torch.rand(N, 4)).rerank(scores).i2t
    kept = scores.argmax(1) != M - 1
    assert kept.any() and torch.equal(found[kept], 20 * scores[kept])


def test_sinkhorn_has_all_candidates_liked_equally():
    scores = torch.rand(N, M, dtype=torch.float64)
    i2t = Sinkhorn(10.0, 500).rerank(scores).i2t
    shares = i2t.softmax(1).mean(0)  # each candidate's mean probability over all queries
    torch.testing.assert_close(shares, torch.full((M,), 1 / M, dtype=torch.float64))


@pytest.mark.parametrize("name", names(transductive=True))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_scores_in_float32(name, dtype):
    v, w = embeddings(N, M, dtype=dtype)
    found = METHODS[name].rerank(unlabelled(v, w))
    exact = METHODS[name].rerank(unlabelled(v.float(), w.float()))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_bank_keeps_its_precision_beside_half_precision():
    v, w = embeddings(N, M, dtype=torch.bfloat16)
    banks = embeddings(11, 9, seed=5, dtype=torch.float32)
    half = unlabelled(v, w)
    single = unlabelled(v.float(), w.float())
    for method in (DualBankSinkhorn(12.0, 4), DualBankNorm(2.0, 3.0)):
        method.fit(*banks)
        for a, b in zip(method.biases(half), method.biases(single), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for bias in FastReranker().fit(*banks).biases(half):
        assert bias.dtype == torch.float32


def test_a_bank_with_as_many_queries_as_candidates_is_read_the_right_way():
    scores, images, texts = torch.rand(4, 6), torch.rand(6, 6), torch.rand(4, 4)
    found = InvertedSoftmax(3.0).fit(images, texts).biases(scores)
    torch.testing.assert_close(found.texts, -(3 * images).logsumexp(0) / 3)
    torch.testing.assert_close(found.images, -(3 * texts).logsumexp(1) / 3)


def test_a_bank_is_scored_as_the_embeddings_are():
    (v, w), (bank_v, bank_w) = embeddings(N, M), embeddings(11, 9, seed=5)
    sim = unlabelled(v, w, normalize=False)
    found = InvertedSoftmax(0.5).fit(bank_v, bank_w).biases(sim)
    wanted = InvertedSoftmax(0.5).fit(bank_v @ w.T, v @ bank_w.T).biases(v @ w.T)
    torch.testing.assert_close(found, wanted)


def test_an_item_is_among_its_own_neighbours_whatever_the_number_of_its_copies():
    sim = unlabelled(torch.ones(3, 4), torch.rand(5, 4))
    assert all(x.isfinite().all() for x in KReciprocalReranker(1, 1).rerank(sim))


def test_blocks_whose_queries_have_different_numbers_of_positives(monkeypatch):
    """The ranks of all are padded to one width, at the end."""
    image_ids = torch.arange(6)
    text_ids = torch.tensor([0, 1, 2, 2, 2, 2, 3, 3, 4, 5])
    scores = torch.rand(6, 10, generator=torch.Generator().manual_seed(0))
    sim = Similarity.from_scores(scores, image_ids, text_ids)
    wanted = DualSoftmax().ranked(sim, 2, "pessimistic")
    monkeypatch.setattr("itrloss.rerank.base._AT_ONCE", 10)
    found = DualSoftmax().ranked(sim, 2, "pessimistic")
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.ranks, b.ranks)
        assert torch.equal(a.top.indices, b.top.indices)


@pytest.mark.parametrize("k1", [1, 2, 3, 5, 7, 9])
def test_half_of_an_odd_neighbourhood_is_rounded_to_the_nearest_even(k1):
    """3 / 2 and 7 / 2 up, 5 / 2 and 9 / 2 down."""
    v, w = embeddings(14, 28, d=4)
    method = KReciprocalReranker(k1, 2, 0.3)
    equals_k_reciprocal(method, method.rerank(unlabelled(v, w)), v, w)


@pytest.mark.parametrize(("k1", "k2"), [(2, 30), (30, 3), (30, 30), (11, 12)])
def test_all_items_are_the_neighbours_where_there_are_fewer_than_asked_for(k1, k2):
    v, w = embeddings(4, 7)
    method = KReciprocalReranker(k1, k2, 0.3)
    equals_k_reciprocal(method, method.rerank(unlabelled(v, w)), v, w)


@pytest.mark.parametrize("name", names(transductive=True))
def test_hostile_input_gives_finite_scores(name):
    v, w = embeddings(N, M, dtype=torch.float32)
    cases = {"duplicates": (v[:1].repeat(N, 1), w[:1].repeat(M, 1)), "one candidate": (v, w[:1])}
    v[2], w[3] = 0.0, 0.0
    cases |= {
        "zero vectors": (v, w),
        "non-contiguous": (v.T.contiguous().T, w.repeat(1, 2)[:, ::2]),
    }
    for what, (a, b) in cases.items():
        if what == "one candidate":  # a single text would be a single query, which needs a bank
            method = copy.copy(METHODS[name])
            if name not in SETTLED:
                method.fit(texts=embeddings(11, 9, seed=5, dtype=torch.float32)[1])
        else:
            method = METHODS[name]
        sim = unlabelled(a, b)
        assert all(x.isfinite().all() for x in method.rerank(sim)), what
        assert [x.indices.shape for x in method.topk(sim, 50)] == [
            (len(a), len(b)),
            (len(b), len(a)),
        ]


def test_what_is_not_reordered_keeps_its_order_below():
    scores = torch.rand(N, M)
    before = scores.argsort(1, descending=True)
    for method in (ReciprocalReranker(4, 4), MultiFactorReranker(4)):
        order = method.rerank(scores).i2t.argsort(1, descending=True)
        assert torch.equal(order[:, 4:], before[:, 4:])
        assert torch.equal(order[:, :4].sort(1).values, before[:, :4].sort(1).values)
        assert not torch.equal(order, before)
    huge = scores * 2.0**40  # so large that adding 1 is rounded away
    method = ReciprocalReranker(4)
    assert torch.equal(method.rerank(huge).i2t.argsort(1), method.rerank(scores).i2t.argsort(1))


def test_of_equals_the_first_comes_first():
    """If two texts have equal scores for all images, the reciprocal re-rankers keep their order."""
    scores = torch.rand(N, M)
    scores[:, 9] = scores[:, 4]
    order = ReciprocalReranker(M, 4).rerank(scores).i2t.argsort(dim=1, descending=True, stable=True)
    assert ((order == 4).nonzero()[:, 1] < (order == 9).nonzero()[:, 1]).all()


def test_what_is_reordered_stays_above_its_equals():
    """Reordered candidates stay first if all scores are equal, and if the best score is 0."""
    # any two of the equal ones
    best = ReciprocalReranker(2).rerank(torch.full((N, M), 0.5)).i2t.topk(3).values
    assert (best[:, 1] > best[:, 2]).all()
    distances = -torch.arange(5.0).expand(3, 5)
    later_first = TwoStageReranker(lambda images, texts: texts.float(), 3, weight=0.0)
    found = later_first.rerank(distances).i2t.argsort(1, descending=True)
    assert (found == torch.tensor([2, 1, 0, 3, 4])).all()


def test_of_queries_with_the_same_score_none_stands_before_the_other():
    # only the second image precedes the first, once
    scores = torch.tensor([[5.0, 5.0], [6.0, 5.0], [1.0, 1.0]])
    assert ReciprocalReranker(2, 2).rerank(scores).i2t[0].argmax() == 1


@pytest.mark.parametrize("kind", [NearestNeighborNorm, CSLS])
def test_all_queries_are_the_nearest_where_there_are_fewer(kind):
    scores = torch.rand(N, M, generator=torch.Generator().manual_seed(0))
    every = kind(k=1000).biases(scores)
    for k, side in ((N, "texts"), (M, "images")):
        torch.testing.assert_close(getattr(every, side), getattr(kind(k=k).biases(scores), side))
    fewer = kind(k=1000).biases(scores[:, :3])  # more queries than candidates
    ratio = fewer.texts / scores[:, :3].mean(0)
    torch.testing.assert_close(ratio, ratio[:1].expand(3))


@pytest.mark.parametrize("name", METHODS)
def test_re_rankers_show_and_copy_themselves(name):
    method = METHODS[name]
    twin = eval(repr(method), vars(rerank))
    assert repr(twin) == repr(method)
    for other in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert repr(other) == repr(method)
    assert type(method).__name__ in rerank.__all__


def test_all_are_named_and_tested():
    classes = filter(inspect.isclass, vars(rerank).values())
    rerankers = [x for x in classes if issubclass(x, rerank.Reranker)]
    concrete = {x for x in rerankers if not inspect.isabstract(x)}
    # tested below
    assert concrete == {type(method) for method in METHODS.values()} | {TwoStageReranker}


@pytest.mark.parametrize("name", METHODS)
def test_a_state_that_was_saved_ranks_as_before(name, tmp_path):
    method = copy.deepcopy(METHODS[name])
    v, w = embeddings(N, M)
    if method.takes_bank:
        method.fit(*embeddings(11, 9, seed=5))
    torch.save(method.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = METHODS[name] if name in ("mutual proximity", "k-reciprocal") else type(method)()
    other = copy.deepcopy(other).load_state_dict(state)
    assert repr(other) == repr(method) and other.transductive == method.transductive
    sim = unlabelled(v, w)
    for a, b in zip(method.rerank(sim), other.rerank(sim), strict=True):
        assert torch.equal(a, b)


def test_a_bank_that_comes_from_a_model_is_kept_without_its_gradient():
    # not a leaf, which PyTorch would not deepcopy
    bank = torch.rand(5, M, requires_grad=True) * 2.0
    method = CSLS(3).fit(images=bank)
    assert not method.state_dict()["images"].requires_grad
    assert copy.deepcopy(method).transductive == (False, True)


def test_hubs_of_a_saved_bank_serve_a_single_query(tmp_path):
    v, w = embeddings(N, M)
    fitted = FastReranker((9.0, 8.0), (8.0, 17.0)).fit(*embeddings(11, 9, seed=5))
    torch.save(fitted.state_dict(), tmp_path / "state.pt")
    loaded = FastReranker().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    ids = torch.arange(N), torch.arange(M)
    all_at_once = fitted.topk(Similarity(v, w, *ids), 5).i2t.indices
    for i in range(N):
        one = loaded.topk(Similarity(v[i : i + 1], w, ids[0][:1], ids[1]), 5).i2t.indices
        assert torch.equal(one[0], all_at_once[i])


def test_a_state_of_another_method_is_refused_and_nothing_taken_over():
    method = CSLS(3)
    for state in (InvertedSoftmax(2.0).state_dict(), {"method": "CSLS", "options": {"k": 5}}):
        with pytest.raises(ValueError, match="state: expected a state of CSLS, got one"):
            method.load_state_dict(state)
    broken = {**CSLS(5).state_dict(), "images": torch.full((2, 2), torch.nan)}
    with pytest.raises(ValueError, match="images"):
        method.load_state_dict(broken)
    assert method.k == 3


class _Centred(rerank.Reranker):
    """User-defined bias: the mean of a candidate's scores."""

    def rule(self, direction):
        return rerank.Bias(-direction.candidates.mean_std().mean)


class _Precise(_Centred):
    """The same in double precision."""

    def rule(self, direction):
        return rerank.Bias(super().rule(direction).bias.double())


class _CentredByBlocks(rerank.Reranker):
    """The same as a function of a block of scores."""

    def rule(self, direction):
        mean = direction.of_all(direction.candidates.mean_std().mean)
        return lambda scores, rows: scores.sub_(mean)


def test_re_rankers_of_ones_own_are_a_bias_or_a_function_of_a_block():
    sim = Similarity(*embeddings(N, M), torch.arange(N) % 3, torch.arange(M) % 3)
    scores = sim.scores()
    for method in (_Centred(), _CentredByBlocks()):
        found = method.rerank(sim)
        torch.testing.assert_close(found.i2t, scores - scores.mean(0))
        torch.testing.assert_close(found.t2i, scores - scores.mean(1, keepdim=True))
        assert torch.equal(method.topk(sim, 4).t2i.indices, found.t2i.T.topk(4).indices)
    one = retrieval_metrics(sim, reranker=_Centred())
    assert one == retrieval_metrics(sim, reranker=_CentredByBlocks())
    single = torch.rand(N, M)
    for found, wanted in zip(_Precise().rerank(single), _Centred().rerank(single), strict=True):
        torch.testing.assert_close(found, wanted)  # both directions in the dtype of the scores
    with pytest.raises(ValueError, match="_CentredByBlocks is not a bias per candidate"):
        _CentredByBlocks().biases(sim)


# --- two stages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_two_stages_put_the_best_candidates_in_the_second_scorers_order(engine, weight):
    generator = torch.Generator().manual_seed(3)
    second = torch.randn(N, M, generator=generator, dtype=torch.float64)
    seen = []

    def scorer(images, texts):
        seen.append(len(images))
        return second[images, texts]

    sim = Similarity(*embeddings(N, M), torch.arange(N) % 3, torch.arange(M) % 3, engine=engine)
    method = TwoStageReranker(scorer, k=4, weight=weight, batch_size=9)
    found, first = method.rerank(sim), sim.scores()
    assert found.transductive == method.transductive == (False, False)
    assert max(seen) <= 9 and sum(seen) == 4 * (N + M)
    for scores, S, F in ((found.i2t, first, second), (found.t2i.T, first.T, second.T)):
        for q in range(len(S)):
            order = S[q].argsort(descending=True).tolist()
            wanted = sorted(order[:4], key=lambda c: -(F[q, c] + weight * S[q, c])) + order[4:]
            assert scores[q].argsort(descending=True).tolist() == wanted
    assert torch.equal(method.topk(sim, 6).i2t.indices, found.i2t.topk(6).indices)
    v, w = sim.embeddings
    single = TwoStageReranker(scorer, M).topk(unlabelled(v[:1], w), 1)
    assert single.i2t.indices.item() == int((second[0] + first[0]).argmax())


def test_a_scorer_that_answers_wrongly_is_named():
    sim = unlabelled(*embeddings(N, M))
    for scorer in (lambda i, t: i.float()[:1], lambda i, t: i / 0.0, lambda i, t: None):
        with pytest.raises(ValueError, match=r"scorer: expected finite scores of shape \(28,\)"):
            TwoStageReranker(scorer, 4).rerank(sim)
    with pytest.raises(TypeError, match="scorer: expected a function"):
        TwoStageReranker(3)
    with pytest.raises(ValueError, match="TwoStageReranker has no use for a bank"):
        TwoStageReranker(lambda i, t: i.float()).fit(torch.ones(2, 3))


# --- calibration ----------------------------------------------------------------------------------


def captions(seed=0, n=40):
    """Scores with hubs."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(n, 3 * n, generator=generator, dtype=torch.float64) * 0.5
    scores += 0.35 * (torch.arange(n)[:, None] == torch.arange(3 * n) // 3)
    return scores + 0.3 * torch.rand(3 * n, generator=generator, dtype=torch.float64)


def recalls_of(held_out, reranker):
    """The sums of the recalls of both directions."""
    metrics = retrieval_metrics(held_out, reranker=reranker)
    return [sum(metrics[f"{way}_r{k}"] for k in (1, 5, 10)) for way in ("i2t", "t2i")]


@pytest.mark.parametrize("as_embeddings", [False, True])
def test_calibration_finds_the_best_of_all_that_are_tried(as_embeddings):
    scales = (2.0, 10.0, 40.0)
    held_out = captions()
    if as_embeddings:
        v, w = embeddings(20, 60, d=4)
        ids = torch.arange(20)
        w = w + 2 * v.repeat_interleave(3, 0)
        held_out = Similarity(v, w, ids, ids.repeat_interleave(3))
    found = FastReranker().calibrate(held_out, scales=scales)
    tried = []
    for pair in itertools.product(scales, scales):
        tried.append(recalls_of(held_out, FastReranker(pair, pair)))
    best = [max(of_direction) for of_direction in zip(*tried, strict=True)]
    assert recalls_of(held_out, found) == pytest.approx(best)
    assert {*found.i2t, *found.t2i} <= set(scales)


def test_what_calibration_compares():
    """Calibration compares recalls, and if these are equal, reciprocal ranks, of queries with an
    answer.
    """
    assert rerank.fast._quality(torch.tensor([0, 2, 0, 20])) == pytest.approx((1.0, 0.275))
    assert rerank.fast._quality(torch.tensor([2, 20])) > rerank.fast._quality(torch.tensor([3, 20]))


def test_of_scales_that_do_as_well_the_first_are_chosen():
    found = FastReranker().calibrate(torch.eye(6), scales=(8.0, 4.0, 16.0))
    assert found.i2t == found.t2i == (8.0, 8.0)


def test_calibration_uses_the_bank():
    scores, bank = captions(), captions(1)
    # the bank makes every other text a hub, so that the sum must have a low weight
    bank[:, ::2] += 5.0
    plain = FastReranker().calibrate(scores)
    fitted = FastReranker().fit(images=bank).calibrate(scores)
    assert fitted.i2t != plain.i2t and fitted.t2i == plain.t2i


# --- an index -------------------------------------------------------------------------------------


def test_an_exact_index_finds_what_re_ranking_finds():
    v, w = embeddings(20, 60, dtype=torch.float32)
    fast = FastReranker((9.0, 8.0), (8.0, 17.0))
    sim = unlabelled(v, w)
    wanted, biases = fast.topk(sim, 5), fast.biases(sim)
    for top, candidates, bias, queries, factor in (
        (wanted.i2t, w, biases.texts, v, 8.0),
        (wanted.t2i, v, biases.images, w, 17.0),
    ):
        found = rerank.BiasedIndex(candidates, bias).search(queries, 5)
        assert torch.equal(found.indices, top.indices)
        torch.testing.assert_close(found.values * factor, top.values, rtol=1e-5, atol=1e-4)
    plain = rerank.BiasedIndex(w.half()).search(v.double(), 3)
    # half precision may swap two of them
    assert (plain.indices == sim.topk(3).indices).float().mean() > 0.95


def test_an_index_of_cells_finds_most_and_says_what_it_misses():
    v, w = embeddings(50, 400, dtype=torch.float32)
    fast = FastReranker()
    sim = unlabelled(v, w)
    exact, bias = fast.topk(sim, 5).i2t.indices, fast.biases(sim).texts
    shares = []
    for nprobe in (1, 8):
        found = rerank.BiasedIndex(w, bias, "IVF8,Flat", nprobe=nprobe).search(v, 5).indices
        shares.append(float((found[:, :, None] == exact[:, None]).any(2).float().mean()))
    assert shares[0] < 1.0 and shares[1] == 1.0  # search all cells
    few = rerank.BiasedIndex(w, bias, "IVF8,Flat", nprobe=1).search(v, 200)
    assert ((few.indices == -1) == (few.values == -math.inf)).all() and (few.indices == -1).any()


def test_without_faiss_an_index_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'itrloss\[faiss\]'"):
        rerank.BiasedIndex(torch.rand(4, 3))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in METHODS if METHODS[n].needs_bank])
def test_methods_that_need_a_bank_say_so(name):
    sim = unlabelled(*embeddings(N, M))
    for call in (
        lambda m: m.rerank(sim),
        lambda m: m.topk(sim, 3),
        lambda m: retrieval_metrics(sim, reranker=m),
    ):
        with pytest.raises(
            ValueError, match=r"images: .* needs a bank of queries; call fit\(images=...\)"
        ):
            call(METHODS[name])
    with pytest.raises(ValueError, match=r"texts: .* needs a bank"):
        copy.copy(METHODS[name]).fit(images=embeddings(11, 9, seed=5)[0]).rerank(sim)


@pytest.mark.parametrize("name", [n for n in METHODS if METHODS[n].needs_embeddings])
def test_methods_that_need_embeddings_say_so(name):
    with pytest.raises(ValueError, match=r"scores: .* needs a Similarity of embeddings"):
        METHODS[name].rerank(torch.rand(N, M))


@pytest.mark.parametrize("name", [n for n in names(transductive=True) if n not in SETTLED])
def test_a_single_query_without_a_bank_is_refused(name):
    for shape, missing in (((1, M), "images"), ((N, 1), "texts")):
        sim = unlabelled(*embeddings(*shape))
        with pytest.raises(ValueError, match=rf"single query.*fit\({missing}"):
            METHODS[name].rerank(sim)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: InvertedSoftmax(0.0), ValueError, "scale"),
        (lambda: DualSoftmax("warm"), TypeError, "scale"),  # type: ignore[arg-type]
        (lambda: QueryBankNorm(k=0), ValueError, "k"),
        (lambda: DualBankNorm(gallery_scale=-1.0), ValueError, "gallery_scale"),
        (lambda: NearestNeighborNorm(k=1.5), TypeError, "k"),  # type: ignore[arg-type]
        (lambda: CSLS(-3), ValueError, "k"),
        (lambda: Sinkhorn(iterations=0), ValueError, "iterations"),
        (lambda: Sinkhorn(math.nan), ValueError, "scale"),
        (lambda: ReciprocalReranker(t2i_k=0), ValueError, "t2i_k"),
        (lambda: MultiFactorReranker(share_weight=None), TypeError, "share_weight"),  # type: ignore[arg-type]
        (lambda: KReciprocalReranker(weight=1.5), ValueError, "weight"),
        (lambda: KReciprocalReranker().fit(torch.rand(3, 3)), ValueError, "no use for a bank"),
        (lambda: CSLS().topk(torch.rand(4, 9), 0), ValueError, "k"),
        (lambda: DualSoftmax().topk(torch.rand(4, 9), 0), ValueError, "k"),
        (
            lambda: MutualProximity().rerank(torch.full((4, 4), math.nan)),
            ValueError,
            "scores.*finite",
        ),
        (
            lambda: Sinkhorn().rerank(torch.full((4, 4), 3e38)),
            ValueError,
            r"scores: too large for Sinkhorn\(scale=100",
        ),
        (
            lambda: MutualProximity().fit(torch.rand(9, 5)).rerank(torch.rand(4, 8)),
            ValueError,
            "images.*8 candidates",
        ),
        (
            lambda: rerank.BiasedIndex(torch.rand(4, 3), torch.rand(3)),
            ValueError,
            r"bias: expected shape \(4,\)",
        ),
        (
            lambda: rerank.BiasedIndex(torch.rand(4, 3), factory="Heap"),
            ValueError,
            "factory.*'Heap'",
        ),
        (
            lambda: rerank.BiasedIndex(torch.rand(4, 3), factory="IVF8,Flat"),
            ValueError,
            "factory.*with 4 candidates",
        ),
        (
            lambda: rerank.BiasedIndex(torch.rand(4, 3), nprobe=2),
            ValueError,
            "factory.*'Flat'.*nprobe = 2",
        ),
        (lambda: FastReranker(("a", 2.0)), TypeError, "i2t.*'a'"),  # type: ignore[arg-type]
        (lambda: CSLS().topk(torch.rand(4, 9), 2.5), TypeError, "k.*2.5"),  # type: ignore[arg-type]
        (lambda: retrieval_metrics(torch.rand(4, 8), hubness_k=2.5), TypeError, "hubness_k"),  # type: ignore[arg-type]
        (
            lambda: rerank.BiasedIndex(torch.rand(4, 3)).search(torch.rand(2, 4), 2),
            ValueError,
            r"queries.*\(Q, 3\)",
        ),
        (lambda: rerank.BiasedIndex(torch.rand(4, 3)).search(torch.rand(2, 3), 0), ValueError, "k"),
        (lambda: FastReranker().calibrate(torch.rand(4, 7)), ValueError, "image_ids, text_ids"),
        (lambda: FastReranker().calibrate(torch.rand(4, 8), scales=()), ValueError, "scales"),
        (
            lambda: FastReranker().calibrate(torch.rand(3, 2), torch.arange(3), torch.arange(7, 9)),
            ValueError,
            "image_ids, text_ids: no query",
        ),
        (lambda: CSLS().fit(torch.full((2, 4), math.nan)), ValueError, "images: expected finite"),
        (lambda: CSLS().fit(texts=torch.rand(4)), ValueError, "texts: expected shape"),
        (lambda: CSLS().fit(torch.arange(4)), TypeError, "images: expected a floating-point"),
        (lambda: CSLS().fit(texts=[[0.5]]), TypeError, "texts: expected a floating-point"),  # type: ignore[arg-type]
        (
            lambda: FastReranker().calibrate(torch.full((4, 8), math.nan)),
            ValueError,
            "validation.*finite",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("few", [0, 10**9], ids=["sorted", "compared"])
@pytest.mark.parametrize("seed", range(20))
def test_numbers_above_are_counted_with_and_without_sorted_rows(seed, few, monkeypatch):
    """Equal scores are not above; a row may have no score to look for, or several."""
    monkeypatch.setattr(neighbours, "_FEW_IN_A_ROW", few)
    generator = torch.Generator().manual_seed(seed)
    rows, references, pairs = (int(x) for x in torch.randint(1, 40, (3,), generator=generator))
    block = torch.randint(5, (rows, references), generator=generator) / 4
    row = torch.randint(rows, (pairs,), generator=generator)
    score = torch.randint(6, (pairs,), generator=generator) / 4
    wanted = (block[row] > score[:, None]).sum(1)
    assert torch.equal(neighbours._numbers_above(block.clone(), row, score), wanted)


# --- what functions of users may do, and options of other types -----------------------------------


class Zeroing(rerank.Reranker):
    """A method whose rule overwrites the scores it gets."""

    def rule(self, direction):
        return lambda scores, rows: scores.zero_()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_rule_may_overwrite_the_scores_it_gets(transposed):
    scores = sample(N, M)
    if transposed:
        scores = scores.T
    before = scores.clone()
    Zeroing().rerank(scores)
    Zeroing().topk(scores, 3)
    assert torch.equal(scores, before)


def test_a_scorer_may_overwrite_the_numbers_of_its_pairs():
    def scorer(images, texts):
        images.zero_()
        texts.zero_()
        return torch.zeros(len(images))

    scores = sample(N, M)
    best = TwoStageReranker(scorer, k=5).topk(scores, 5).i2t.indices
    wanted = scores.topk(5).indices
    assert torch.equal(best.sort(1).values, wanted.sort(1).values)


SCORER_RESULTS = {
    "a column": lambda logits: logits[:, None],
    "an array": lambda logits: logits.numpy(),
    "squeezed": lambda logits: logits[:, None].squeeze(),  # of one pair: a tensor without dimension
}


@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("form", SCORER_RESULTS)
def test_a_scorer_may_return_its_scores_in_another_form(form, batch_size):
    def plain(images, texts):
        return (images * 7 + texts) % 5.0

    def scorer(images, texts):
        return SCORER_RESULTS[form](plain(images, texts))

    scores = sample(N, M)
    found = TwoStageReranker(scorer, k=5, batch_size=batch_size).topk(scores, 5).i2t
    wanted = TwoStageReranker(plain, k=5).topk(scores, 5).i2t
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.values, wanted.values)


OPTIONS_OF_ANY_TYPE = {
    "inverted softmax": InvertedSoftmax,
    "fast": lambda x: FastReranker((x, x), [x, x]),
    "fast, of an array": lambda x: FastReranker(np.array([x, x], float), [x, x]),
    "dual softmax": DualSoftmax,
    "qb-norm": lambda x: QueryBankNorm(x, np.int32(2)),
    "dbnorm": lambda x: DualBankNorm(x, x),
    "sinkhorn": lambda x: Sinkhorn(x, np.int8(3)),
    "nnn": NearestNeighborNorm,
    "mr": lambda x: MultiFactorReranker(share_weight=x),
    "k-reciprocal": lambda x: KReciprocalReranker(weight=x / 40),
}


@pytest.mark.parametrize(
    "number", [np.float16(20), np.float32(20), np.float64(20), np.int64(20), Fraction(20)], ids=repr
)
@pytest.mark.parametrize("name", OPTIONS_OF_ANY_TYPE)
def test_a_state_holds_plain_numbers_whatever_the_type_of_an_option(name, number):
    method = OPTIONS_OF_ANY_TYPE[name](number)
    file = io.BytesIO()
    torch.save(method.state_dict(), file)
    file.seek(0)
    loaded = type(method)().load_state_dict(torch.load(file, weights_only=True))
    assert repr(loaded) == repr(method)
    assert "np." not in repr(method)


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        (InvertedSoftmax, "scale", -5.0),
        (FastReranker, "i2t", (0.0, 25.0)),
        (CSLS, "k", 0),
        (KReciprocalReranker, "weight", 2.0),
        (Sinkhorn, "iterations", 1.5),
    ],
)
def test_an_option_that_is_set_later_is_checked(method, option, value):
    reranker = method()
    before = getattr(reranker, option)
    with pytest.raises((TypeError, ValueError), match=option):
        setattr(reranker, option, value)
    assert getattr(reranker, option) == before
