"""The guarantees of the interface of re-rankers.

Their scores are those of loops, see ``tests/metrics/test_random_evaluations.py``.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.cases import embeddings, public_rerankers, sample, transposed
from support.rerankers import METHODS, Centred, CentredByBlocks
from support.versions import load

import itrloss
from itrloss import Similarity, rerank
from itrloss.cli import comparison
from itrloss.metrics import retrieval_metrics, retrieval_results
from itrloss.rerank import (
    CSLS,
    DualBankNorm,
    DualBankSinkhorn,
    DualSoftmax,
    FastReranker,
    InvertedSoftmax,
    NearestNeighborNorm,
    QueryBankNorm,
    Sinkhorn,
    TwoStageReranker,
)

N, M = 7, 14


def unlabelled(v, w, **options):
    """The similarity of images and texts whose ids play no part."""
    return Similarity(v, w, torch.arange(len(v)), torch.arange(len(w)), **options)


def names(transductive=False, matrix=False):
    """Names of the re-rankers, optionally only of those that need no bank, or that accept a matrix
    of scores.
    """
    return [
        name
        for name, method in METHODS.items()
        if not (transductive and method.needs_bank) and not (matrix and method.needs_embeddings)
    ]


def a_bank(**options):
    """Embeddings of images and texts that are no queries."""
    return embeddings(11, 9, seed=5, **options)


def assert_all_close(found, wanted, **tolerance):
    """Compare both directions."""
    for own, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, exact, **tolerance)


@pytest.mark.parametrize("name", names(matrix=True))
def test_scores_and_embeddings_stay_as_they_are_and_without_a_gradient(name):
    scores = torch.rand(N, M).requires_grad_()
    banks = [torch.rand(11, M), torch.rand(N, 9)]
    inputs = [scores, *banks]
    before = [x.detach().clone() for x in inputs]
    method = copy.copy(METHODS[name]).fit(*banks)
    reranked = method.rerank(scores)
    best = method.topk(scores, 3)
    retrieval_metrics(scores, reranker=method)
    for result in (*reranked, best.i2t.values, best.t2i.values):
        assert not result.requires_grad
    for x, unchanged in zip(inputs, before, strict=True):
        assert torch.equal(x, unchanged)
    turned = transposed(scores.detach())
    assert_all_close(method.rerank(scores), method.rerank(turned))
    assert torch.equal(turned, scores)


def test_a_penalty_that_overflows_leaves_queries_alone_whose_best_is_no_hub():
    scores = torch.rand(N, M) + torch.eye(N, M)
    hub = M - 1
    bank = torch.rand(3, M)
    bank[:, hub] = 1e38
    method = QueryBankNorm(20.0).fit(bank, torch.rand(N, 4))
    found = method.rerank(scores).i2t
    kept = scores.argmax(1) != hub
    assert kept.any()
    assert torch.equal(found[kept], 20 * scores[kept])


@pytest.mark.parametrize("name", names(transductive=True))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_scores_in_float32(name, dtype):
    v, w = embeddings(N, M, dtype=dtype)
    found = METHODS[name].rerank(unlabelled(v, w))
    exact = METHODS[name].rerank(unlabelled(v.float(), w.float()))
    assert [scores.dtype for scores in found] == [torch.float32] * 2
    assert_all_close(found, exact, rtol=1e-4, atol=1e-4)


def test_a_bank_keeps_its_precision_beside_half_precision():
    v, w = embeddings(N, M, dtype=torch.bfloat16)
    banks = a_bank(dtype=torch.float32)
    half = unlabelled(v, w)
    single = unlabelled(v.float(), w.float())
    for method in (DualBankSinkhorn(12.0, 4), DualBankNorm(2.0, 3.0)):
        method.fit(*banks)
        assert_all_close(method.biases(half), method.biases(single), rtol=0, atol=1e-5)
    fast = FastReranker().fit(*banks)
    for bias in fast.biases(half):
        assert bias.dtype == torch.float32


def test_a_bank_with_as_many_queries_as_candidates_is_read_the_right_way():
    scores = torch.rand(4, 6)
    images = torch.rand(6, 6)
    texts = torch.rand(4, 4)
    found = InvertedSoftmax(3.0).fit(images, texts).biases(scores)
    torch.testing.assert_close(found.texts, -(3 * images).logsumexp(0) / 3)
    torch.testing.assert_close(found.images, -(3 * texts).logsumexp(1) / 3)


def test_a_bank_is_scored_as_the_embeddings_are():
    v, w = embeddings(N, M)
    bank_v, bank_w = a_bank()
    of_embeddings = InvertedSoftmax(0.5).fit(bank_v, bank_w)
    of_scores = InvertedSoftmax(0.5).fit(bank_v @ w.T, v @ bank_w.T)
    found = of_embeddings.biases(unlabelled(v, w, normalize=False))
    torch.testing.assert_close(found, of_scores.biases(v @ w.T))


@pytest.mark.parametrize("name", names(transductive=True))
def test_hostile_input_gives_finite_scores(name):
    v, w = embeddings(N, M, dtype=torch.float32)
    method = METHODS[name]
    assert_finite(method, v[:1].repeat(N, 1), w[:1].repeat(M, 1), "duplicates")
    v[2] = 0.0
    w[3] = 0.0
    assert_finite(method, v, w, "zero vectors")
    assert_finite(method, transposed(v), w.repeat(1, 2)[:, ::2], "non-contiguous")
    # a single text would be a single query, which needs a bank
    _, bank = a_bank(dtype=torch.float32)
    with_bank = copy.copy(method).fit(texts=bank)
    assert_finite(with_bank, v, w[:1], "one candidate")


def assert_finite(method, images, texts, what):
    """Check that scores are finite, and that all candidates are among the best."""
    sim = unlabelled(images, texts)
    for scores in method.rerank(sim):
        assert scores.isfinite().all(), what
    top = method.topk(sim, 50)
    assert top.i2t.indices.shape == (len(images), len(texts)), what
    assert top.t2i.indices.shape == (len(texts), len(images)), what


def test_what_is_reordered_stays_above_the_others():
    distances = -torch.arange(5.0).expand(3, 5)  # the best score is 0
    later_first = TwoStageReranker(lambda images, texts: texts.float(), 3, weight=0.0)
    order = later_first.rerank(distances).i2t.argsort(1, descending=True)
    assert (order == torch.tensor([2, 1, 0, 3, 4])).all()


@pytest.mark.parametrize("name", METHODS)
def test_re_rankers_show_and_copy_themselves(name):
    method = METHODS[name]
    twins = copy.deepcopy(method), pickle.loads(pickle.dumps(method))
    for other in (eval(repr(method), vars(rerank)), *twins):
        assert repr(other) == repr(method)
    assert type(method).__name__ in rerank.__all__


def test_all_are_named_and_tested():
    tested = {type(method) for method in METHODS.values()}
    tested.add(TwoStageReranker)  # below
    assert tested == public_rerankers()


def test_all_are_compared_by_the_command_line():
    """But for the one that takes a model of the user's."""
    assert {*comparison.METHODS.values(), TwoStageReranker} == public_rerankers()


@pytest.mark.parametrize("name", METHODS)
def test_a_state_that_was_saved_ranks_as_before(name):
    method = copy.deepcopy(METHODS[name])
    method.fit(*a_bank())
    state = saved_and_loaded(method)
    other = copy.deepcopy(method) if name == "mutual proximity" else type(method)()
    other.load_state_dict(state)
    assert repr(other) == repr(method)
    assert other.transductive == method.transductive
    v, w = embeddings(N, M)
    sim = unlabelled(v, w)
    assert_all_close(other.rerank(sim), method.rerank(sim), rtol=0, atol=0)


def saved_and_loaded(method):
    """The state of a re-ranker out of a file."""
    file = io.BytesIO()
    torch.save(method.state_dict(), file)
    file.seek(0)
    return load(file)


def test_a_bank_that_comes_from_a_model_is_kept_without_its_gradient():
    # not a leaf, which PyTorch would not deepcopy
    bank = torch.rand(5, M, requires_grad=True) * 2.0
    method = CSLS(3).fit(images=bank)
    assert not method.state_dict()["images"].requires_grad
    assert copy.deepcopy(method).transductive == (False, True)


def test_a_state_of_another_method_is_refused_and_nothing_taken_over():
    method = CSLS(3)
    for state in (InvertedSoftmax(2.0).state_dict(), {"method": "CSLS", "options": {"k": 5}}):
        with pytest.raises(ValueError, match="state: expected a state of CSLS, got one"):
            method.load_state_dict(state)
    broken = {**CSLS(5).state_dict(), "images": torch.full((2, 2), torch.nan)}
    with pytest.raises(ValueError, match="images"):
        method.load_state_dict(broken)
    assert method.k == 3


class _Precise(Centred):
    """The same in double precision."""

    def rule(self, direction):
        single = super().rule(direction)
        return rerank.Bias(single.bias.double())


class _NoRule(Centred):
    """The new scores, where a function that returns them is expected."""

    def rule(self, direction):
        return direction.queries.scores()


def test_a_rule_that_is_no_function_is_named():
    with pytest.raises(TypeError, match=r"^rule: expected a Bias, or a function .*, got Tensor"):
        _NoRule().rerank(torch.rand(N, M))


def test_a_bias_of_ones_own_may_have_another_dtype_and_a_function_is_none():
    scores = torch.rand(N, M)
    # both directions in the dtype of the scores
    assert_all_close(_Precise().rerank(scores), Centred().rerank(scores))
    with pytest.raises(ValueError, match="CentredByBlocks is not a bias per candidate"):
        CentredByBlocks().biases(scores)


# --- two stages -----------------------------------------------------------------------------------


def test_two_stages_score_the_best_candidates_in_batches():
    seen = []

    def scorer(images, texts):
        seen.append(len(images))
        return torch.sin(images * 7.0 + texts)

    v, w = embeddings(N, M)
    method = TwoStageReranker(scorer, k=4, batch_size=9)
    found = method.rerank(unlabelled(v, w))
    assert found.transductive == method.transductive == (False, False)
    assert max(seen) <= 9
    assert sum(seen) == 4 * (N + M)
    alone = TwoStageReranker(scorer, M).topk(unlabelled(v[:1], w), 1)
    best = torch.sin(torch.arange(M).double()) + unlabelled(v[:1], w).scores()[0]
    assert int(alone.i2t.indices) == int(best.argmax())


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
    scores = 0.5 * torch.rand(n, 3 * n, generator=generator, dtype=torch.float64)
    is_own = torch.arange(n)[:, None] == torch.arange(3 * n) // 3
    popularity = torch.rand(3 * n, generator=generator, dtype=torch.float64)
    return scores + 0.35 * is_own + 0.3 * popularity


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
    pairs = itertools.product(scales, scales)
    tried = zip(*(recalls_of(held_out, FastReranker(pair, pair)) for pair in pairs), strict=True)
    assert recalls_of(held_out, found) == pytest.approx([*map(max, tried)])
    assert {*found.i2t, *found.t2i} <= set(scales)


def test_what_calibration_compares():
    """Calibration compares recalls, and if these are equal, reciprocal ranks, of queries with an
    answer.
    """
    quality = rerank.fast._quality
    assert quality(torch.tensor([0, 2, 0, 20])) == pytest.approx((1.0, 0.275))
    assert quality(torch.tensor([2, 20])) > quality(torch.tensor([3, 20]))


@pytest.mark.parametrize("seed", [33, 51, 101])
def test_equal_recalls_are_equal_whatever_their_shares(seed):
    """The sums of rounded shares differ in their last digit."""
    generator = torch.Generator().manual_seed(seed)
    held_out = 0.3 * torch.randn(8, 24, generator=generator, dtype=torch.float64)
    scales = (5.0, 20.0, 80.0)
    qualities = {}
    for pair in itertools.product(scales, scales):
        ranks = retrieval_results(held_out, reranker=FastReranker(t2i=pair)).t2i.best
        found = sum(int((ranks <= k).sum()) for k in (1, 5, 10))
        qualities[pair] = found, sum(Fraction(1, rank) for rank in ranks.tolist())
    chosen = FastReranker().calibrate(held_out, scales=scales).t2i
    assert chosen == max(qualities, key=qualities.__getitem__)


def test_the_order_of_queries_does_not_matter_to_calibration():
    quality = rerank.fast._quality
    ranks = torch.arange(1, 60)
    for seed in range(20):
        order = torch.randperm(59, generator=torch.Generator().manual_seed(seed))
        assert quality(ranks[order]) == quality(ranks)


def test_of_scales_that_do_as_well_the_first_are_chosen():
    found = FastReranker().calibrate(torch.eye(6), scales=(8.0, 4.0, 16.0))
    assert found.i2t == found.t2i == (8.0, 8.0)


@pytest.mark.parametrize("form", ["labels", "matches"])
def test_calibration_leaves_padding_out(form):
    """An image has several labels, a text one, so that a text has several images. The last image
    and text do not exist.
    """
    generator = torch.Generator().manual_seed(1)
    v, w = sample(2, 61, 6)
    labels = torch.randint(8, (61, 3), generator=generator)
    of_texts = torch.randint(8, (61, 1), generator=generator)
    labels[60] = of_texts[60] = itrloss.NO_ID
    matches = (labels[:, None] == of_texts).any(2).double()
    matches[60] = matches[:, 60] = torch.nan

    def calibrated(size):
        if form == "labels":
            validation = Similarity(v[:size], w[:size], labels[:size], of_texts[:size])
        else:
            related = itrloss.Related(matches=matches[:size, :size])
            validation = Similarity(v[:size], w[:size], related=related)
        return FastReranker().calibrate(validation)

    assert (calibrated(61).i2t, calibrated(61).t2i) == (calibrated(60).i2t, calibrated(60).t2i)


def test_calibration_uses_the_bank():
    scores = captions()
    bank = captions(1)
    # the bank makes every other text a hub, so that the sum must have a low weight
    bank[:, ::2] += 5.0
    plain = FastReranker().calibrate(scores)
    with_bank = FastReranker().fit(images=bank).calibrate(scores)
    assert with_bank.i2t != plain.i2t
    assert with_bank.t2i == plain.t2i


# --- an index -------------------------------------------------------------------------------------


def test_a_bias_as_one_more_dimension_finds_what_re_ranking_finds():
    v, w = embeddings(20, 60, dtype=torch.float32)
    fast = FastReranker((9.0, 8.0), (8.0, 17.0))
    sim = unlabelled(v, w)
    wanted = fast.topk(sim, 5)
    biases = fast.biases(sim)
    sides = ((v, w, biases.texts, 8.0), (w, v, biases.images, 17.0))
    for (queries, candidates, bias, factor), top in zip(sides, wanted, strict=True):
        extended = torch.cat([torch.nn.functional.normalize(candidates), bias[:, None]], 1)
        ones = torch.ones(len(queries), 1)
        found = torch.cat([torch.nn.functional.normalize(queries), ones], 1) @ extended.T
        assert torch.equal(found.topk(5).indices, top.indices)
        torch.testing.assert_close(factor * found.topk(5).values, top.values, rtol=1e-5, atol=1e-4)


# --- what functions of users may do, and options of other types -----------------------------------


class Zeroing(rerank.Reranker):
    """A method whose rule overwrites the scores it gets."""

    def rule(self, direction):
        return lambda scores, rows: scores.zero_()


@pytest.mark.parametrize("scores", [sample(N, M), sample(N, M).T])
def test_a_rule_may_overwrite_the_scores_it_gets(scores):
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
    top = TwoStageReranker(scorer, k=5).topk(scores, 5)
    wanted = scores.topk(5).indices
    assert torch.equal(top.i2t.indices.sort(1).values, wanted.sort(1).values)


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
    method = TwoStageReranker(scorer, k=5, batch_size=batch_size)
    found = method.topk(scores, 5).i2t
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
}


@pytest.mark.parametrize(
    "number", [np.float16(20), np.float32(20), np.float64(20), np.int64(20), Fraction(20)], ids=repr
)
@pytest.mark.parametrize("name", OPTIONS_OF_ANY_TYPE)
def test_a_state_holds_plain_numbers_whatever_the_type_of_an_option(name, number):
    method = OPTIONS_OF_ANY_TYPE[name](number)
    loaded = type(method)().load_state_dict(saved_and_loaded(method))
    assert repr(loaded) == repr(method)
    assert "np." not in repr(method)
