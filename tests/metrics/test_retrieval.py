"""Metrics and re-ranking against the loop oracle, on scores and streamed from embeddings."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle, oracle_metrics
from support.cases import embeddings, make_ids, similarity

from itrloss import Similarity
from itrloss.metrics import (
    default_ids,
    fold_repeated,
    retrieval_metrics,
    retrieval_results,
    skewness,
)
from itrloss.rerank import FastReranker

FIGURES = {
    f"{w}_{x}"
    for w in ("i2t", "t2i")
    for x in (*oracle_metrics.FIGURES, "median_rank", "mean_rank", "skewness")
}


def coarse(n, m, seed=0):
    """Scores with many ties."""
    return torch.randint(0, 6, (n, m), generator=torch.Generator().manual_seed(seed)).double() / 4


@pytest.mark.parametrize("kind", ["captions", "random", "same"])
@pytest.mark.parametrize("seed", range(4))
def test_metrics_equal_the_oracle_with_ties(kind, seed, small_tiles):
    n, m = 8, 24
    ids = make_ids(kind, n, m, seed)
    scores = coarse(n, m, seed)
    ours = retrieval_metrics(scores, *ids)
    theirs = oracle.retrieval_metrics(scores.numpy(), *(x.numpy() for x in ids))
    assert set(ours) == FIGURES | {"rsum"} == set(theirs)
    for name in FIGURES | {"rsum"}:
        assert math.isclose(ours[name], theirs[name], abs_tol=1e-9), name
    untied = torch.rand(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours, theirs = (
        retrieval_metrics(untied, *ids),
        oracle.retrieval_metrics(untied.numpy(), *(x.numpy() for x in ids)),
    )
    for name in theirs:
        assert math.isclose(ours[name], theirs[name], abs_tol=1e-9), name


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
@pytest.mark.parametrize("kind", ["captions", "random"])
def test_streamed_metrics_equal_those_of_the_matrix(engine, kind, small_tiles):
    n, m = 8, 24
    ids, (v, w) = make_ids(kind, n, m), embeddings(n, m)
    sim = similarity(v, w, ids, engine)
    scores = torch.from_numpy(oracle.cosine(v.numpy(), w.numpy()))
    a, b = retrieval_metrics(sim), retrieval_metrics(scores, *ids)
    assert a.keys() == b.keys()
    for name in a:
        assert math.isclose(a[name], b[name], abs_tol=1e-9), name


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_re_ranked_metrics_stream_too(engine, small_tiles):
    ids, (v, w) = make_ids("captions", 8, 24), embeddings(8, 24)
    sim, fast = similarity(v, w, ids, engine), FastReranker((25.0, 10.0), (5.0, 20.0))
    i2t, t2i = fast.rerank(sim)
    streamed, dense = retrieval_metrics(sim, reranker=fast), retrieval_metrics((i2t, t2i), *ids)
    for name in streamed:
        assert math.isclose(streamed[name], dense[name], abs_tol=1e-9), name
    assert streamed != retrieval_metrics(sim)


def test_many_positives_a_row_are_ranked_by_sorting(small_tiles):
    n, m = 6, 80
    scores = coarse(n, m)
    ids = torch.arange(n) % 2, torch.arange(m) % 2
    ours, theirs = (
        retrieval_metrics(scores, *ids),
        oracle.retrieval_metrics(scores.numpy(), *(x.numpy() for x in ids)),
    )
    for name in theirs:
        if "skewness" not in name:
            assert math.isclose(ours[name], theirs[name], abs_tol=1e-9), name


def test_convention_of_consecutive_captions():
    scores = torch.rand(4, 20)
    ids = torch.arange(4), torch.arange(4).repeat_interleave(5)
    assert retrieval_metrics(scores) == retrieval_metrics(scores, *ids)
    assert [x.tolist() for x in default_ids(2, 4)] == [[0, 1], [0, 0, 1, 1]]
    perfect = retrieval_metrics((ids[0][:, None] == ids[1]).float())
    assert (
        perfect["rsum"] == 600
        and perfect["i2t_median_rank"] == 1
        and perfect["i2t_map_at_r"] == 100
    )


def test_ties_have_a_policy():
    """A model with constant scores finds nothing, unless ties are resolved in its favour."""
    flat = torch.zeros(20, 20)
    assert retrieval_metrics(flat)["rsum"] == 0
    assert retrieval_metrics(flat, ties="optimistic")["rsum"] == 600


def test_duplicate_embeddings_tie_whatever_the_engine():
    v = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 0)
    ids = torch.arange(24)
    for engine in ("dense", "tiled"):
        figures = retrieval_metrics(Similarity(v, v, ids, ids, engine=engine))
        assert figures["i2t_r1"] == 0 and figures["i2t_r5"] == 100


@pytest.mark.parametrize("shape", [(600, 2049), (513, 2048), (1025, 2050)])
def test_copies_tie_wherever_the_tiles_end(shape):
    """A product with one column is rounded differently from wider ones, so no tile may be that
    narrow.
    """
    n, m = shape
    generator = torch.Generator().manual_seed(0)
    rows, cols = torch.randn(n, 64, generator=generator), torch.randn(m, 64, generator=generator)
    rows[-1], cols[-1] = rows[0], cols[0]
    sim = Similarity(rows, cols, torch.zeros(n).long(), torch.arange(m), engine="tiled")
    assert ((sim.ranks(ties="pessimistic") - sim.ranks(ties="optimistic")) >= 1).all()
    sim = Similarity(rows, cols, torch.arange(n), torch.zeros(m).long(), engine="tiled").T
    assert ((sim.ranks(ties="pessimistic") - sim.ranks(ties="optimistic")) >= 1).all()


def test_a_positive_of_minus_infinity_ranks_last_and_not_behind_itself():
    scores = torch.tensor([[-math.inf, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    for engine in ("dense", "tiled"):
        assert Similarity.from_scores(scores, engine=engine).ranks().flatten().tolist() == [3, 2, 1]
    # enough positives to have them sorted
    many = torch.zeros(40).long(), torch.tensor([0] * 20 + [1] * 20)
    far = torch.cat([torch.full((40, 20), -math.inf), torch.rand(40, 20)], 1)
    assert Similarity.from_scores(far, *many).ranks()[0].tolist() == list(range(21, 41))
    v, w = embeddings(6, 6)
    bias = torch.zeros(6)
    bias[2] = -math.inf
    assert Similarity(v, w).ranks(bias)[2].item() == 6


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_metrics_do_not_depend_on_order_or_monotone_maps(seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, 12, generator=g, dtype=torch.float64)
    ids = torch.arange(6), torch.arange(6).repeat_interleave(2)
    p, q = torch.randperm(6, generator=g), torch.randperm(12, generator=g)
    plain = retrieval_metrics(scores, *ids)
    for other in (
        retrieval_metrics(scores[p][:, q], ids[0][p], ids[1][q]),
        retrieval_metrics(3 * scores.exp() - 7, *ids),
    ):
        for name in plain:
            assert math.isclose(plain[name], other[name], abs_tol=1e-9), name
    assert 0 <= plain["i2t_r1"] <= plain["i2t_r5"] <= plain["i2t_r10"] <= 100


def test_skewness_of_known_counts():
    assert skewness(torch.tensor([3, 3, 3])) == 0
    assert math.isclose(skewness(torch.tensor([0, 0, 0, 4])), 2 / math.sqrt(3))
    assert skewness(torch.tensor([0, 4, 4, 4])) < 0


@pytest.mark.parametrize("engine", ["scores", "dense", "tiled", "kept"])
def test_fast_reranking_equals_the_oracle(engine, small_tiles):
    v, w = embeddings(7, 14)
    S = oracle.cosine(v.numpy(), w.numpy())
    ids = make_ids("captions", 7, 14)
    given_scores = torch.from_numpy(S) if engine == "scores" else similarity(v, w, ids, engine)
    for i2t, t2i in (
        ((25.0, 25.0), (20.0, 20.0)),
        ((9.0, 8.0), (8.0, 17.0)),
        ((500.0, 1.0), (1.0, 500.0)),
    ):
        wanted = oracle.fast_rerank(S, i2t, t2i)
        found = FastReranker(i2t, t2i).rerank(given_scores)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["dense", "tiled", "kept"])
def test_top_of_the_re_ranked_without_the_matrix(engine, small_tiles):
    ids, (v, w) = make_ids("captions", 9, 27), embeddings(9, 27)
    sim, fast = similarity(v, w, ids, engine), FastReranker((9.0, 8.0), (8.0, 17.0))
    i2t, t2i = fast.rerank(sim)
    found = fast.topk(sim, 4)
    for top, full in zip(found, (i2t.topk(4, 1), t2i.T.topk(4, 1)), strict=True):
        assert torch.equal(top.indices, full.indices)
    assert [top.indices.shape for top in fast.topk(sim, 20)] == [(9, 20), (27, 9)]
    biases = fast.biases(sim)
    torch.testing.assert_close(found[0].values, (sim.scores() + biases.texts).topk(4).values * 8.0)


@pytest.mark.parametrize("engine", ["scores", "dense", "tiled", "kept"])
@pytest.mark.parametrize("given_banks", [("images",), ("texts",), ("images", "texts")])
def test_a_query_bank_takes_the_place_of_the_test_queries(engine, given_banks, small_tiles):
    """Oracle: append the bank to the matrix, so that the sums are over the bank only, and slice the
    result.
    """
    v, w = embeddings(7, 14)
    bank_v, bank_w = (x.to(v) for x in embeddings(11, 9, seed=5))
    sim = similarity(v, w, make_ids("captions", 7, 14), "dense" if engine == "scores" else engine)
    i2t, t2i = (9.0, 8.0), (8.0, 17.0)
    if engine == "scores":
        S = torch.from_numpy(oracle.cosine(v.numpy(), w.numpy()))
        banks = {
            "images": torch.from_numpy(oracle.cosine(bank_v.numpy(), w.numpy())),
            "texts": torch.from_numpy(oracle.cosine(v.numpy(), bank_w.numpy())),
        }
    else:
        S, banks = sim, {"images": bank_v, "texts": bank_w}
    fast = FastReranker(i2t, t2i).fit(**{name: banks[name] for name in given_banks})
    found = fast.rerank(S)
    plain = oracle.cosine(v.numpy(), w.numpy())
    queries_v = bank_v if "images" in given_banks else v
    queries_w = bank_w if "texts" in given_banks else w
    by_images = np.log(np.exp(9.0 * oracle.cosine(queries_v.numpy(), w.numpy())).sum(0))
    by_texts = np.log(np.exp(8.0 * oracle.cosine(v.numpy(), queries_w.numpy())).sum(1))
    np.testing.assert_allclose(found.i2t, 8.0 * plain - by_images, rtol=1e-9)
    np.testing.assert_allclose(found.t2i, 17.0 * plain - by_texts[:, None], rtol=1e-9)
    assert (
        found.transductive
        == fast.transductive
        == ("images" not in given_banks, "texts" not in given_banks)
    )
    top = fast.topk(S, 3)
    assert (
        torch.equal(top.i2t.indices, found.i2t.topk(3).indices)
        and top.transductive == found.transductive
    )


def test_a_query_stands_for_itself_beside_a_bank():
    v, w = embeddings(6, 12)
    bank_v, bank_w = embeddings(20, 30, seed=5)
    fast = FastReranker().fit(bank_v, bank_w)
    ids = make_ids("captions", 6, 12)
    whole = fast.rerank(Similarity(v, w, *ids))
    for i in range(6):
        alone = fast.rerank(Similarity(v[i : i + 1], w, ids[0][i : i + 1], ids[1]))
        torch.testing.assert_close(alone.i2t[0], whole.i2t[i])
    with pytest.raises(ValueError, match=r"single query.*fit\(images"):
        FastReranker().fit(texts=bank_w).rerank(Similarity(v[:1], w, ids[0][:1], ids[1]))
    with pytest.raises(ValueError, match=r"single query.*fit\(texts"):
        FastReranker().fit(images=bank_v).rerank(torch.rand(4, 1))


def test_the_bank_that_is_the_test_set_changes_nothing():
    v, w = embeddings(6, 12)
    sim = Similarity(v, w, *make_ids("captions", 6, 12))
    for a, b in zip(FastReranker().rerank(sim), FastReranker().fit(v, w).rerank(sim), strict=True):
        torch.testing.assert_close(a, b)
    scores = sim.scores()
    for a, b in zip(
        FastReranker().rerank(scores),
        FastReranker().fit(scores, scores).rerank(scores),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_re_ranked_pairs_copy_and_pickle():
    pair = FastReranker().fit(images=torch.rand(5, 3)).rerank(torch.rand(3, 3))
    for twin in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert (
            torch.equal(twin.i2t, pair.i2t)
            and torch.equal(twin.t2i, pair[1])
            and twin.transductive == (False, True)
        )


@given(st.integers(0, 10_000), st.floats(-1, 1), st.integers(0, 11))
@settings(max_examples=20, deadline=None)
def test_removing_a_hub(seed, lift, text):
    """With equal gammas, adding a constant to all scores of one text changes no image's ranking."""
    scores = torch.rand(6, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lifted = scores.clone()
    lifted[:, text] += lift
    a, b = (FastReranker((10.0, 10.0)).rerank(s)[0] for s in (scores, lifted))
    torch.testing.assert_close(a, b)


def test_re_ranking_lowers_the_skewness_of_a_hub():
    scores = torch.rand(50, 50, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.3 * torch.eye(
        50
    )
    scores[:, 7] += 0.5
    before, after = retrieval_metrics(scores), retrieval_metrics(*FastReranker().rerank(scores)[:1])
    assert after["i2t_skewness"] < before["i2t_skewness"] and after["i2t_r1"] > before["i2t_r1"]


def test_nothing_overflows():
    scores = torch.rand(5, 5) * 1e4
    assert all(x.isfinite().all() for x in FastReranker().rerank(scores))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: retrieval_metrics(torch.rand(4, 7)), ValueError, "image_ids, text_ids"),
        (lambda: retrieval_metrics(torch.rand(4)), ValueError, "scores"),
        (lambda: retrieval_metrics(torch.ones(4, 4).long()), TypeError, "scores"),
        (lambda: retrieval_metrics([[1.0]]), TypeError, "scores"),
        (lambda: retrieval_metrics(torch.full((4, 4), math.nan)), ValueError, "scores.*finite"),
        (lambda: retrieval_metrics(torch.rand(4, 4), torch.arange(3)), ValueError, "image_ids"),
        (
            lambda: retrieval_metrics(torch.rand(4, 4), text_ids=torch.rand(4)),
            TypeError,
            "text_ids",
        ),
        (lambda: retrieval_metrics(torch.rand(4, 4), ties="fair"), ValueError, "ties"),
        (
            lambda: retrieval_metrics(torch.rand(4, 4), text_ids=torch.arange(4) + 9),
            ValueError,
            "no query",
        ),
        (
            lambda: retrieval_metrics((torch.rand(4, 4), torch.rand(4, 5))),
            ValueError,
            r"scores\[1\].*\(4, 4\).*\(4, 5\)",
        ),
        (
            lambda: retrieval_metrics((torch.rand(4, 4), torch.full((4, 4), math.nan))),
            ValueError,
            r"scores\[1\].*finite",
        ),
        (
            lambda: retrieval_metrics(Similarity(*embeddings(3, 3)), torch.arange(3)),
            ValueError,
            "image_ids",
        ),
        (
            lambda: retrieval_metrics(
                (torch.rand(4, 4), torch.rand(4, 4)), reranker=FastReranker()
            ),
            ValueError,
            "reranker: expected None",
        ),
        (lambda: FastReranker((25.0, 0.0)), ValueError, "i2t"),
        (lambda: FastReranker(t2i=(1.0,)), ValueError, "t2i"),
        (lambda: FastReranker(25.0), ValueError, "i2t.*25"),  # type: ignore[arg-type]
        (
            lambda: FastReranker().fit(Similarity(*embeddings(3, 3))),
            TypeError,
            "images.*Similarity",
        ),  # type: ignore
        (
            lambda: retrieval_metrics((torch.rand(3, 3), Similarity(*embeddings(3, 3)))),  # type: ignore
            TypeError,
            r"scores\[1\].*Similarity",
        ),
        (lambda: FastReranker().rerank(torch.rand(4)), ValueError, "scores"),
        (lambda: FastReranker().rerank(torch.full((4, 4), math.inf)), ValueError, "scores.*finite"),
        (lambda: FastReranker().topk(torch.rand(4, 9), 0), ValueError, "k"),
        (lambda: retrieval_metrics(torch.rand(4, 4), hubness_k=0), ValueError, "hubness_k"),
        (
            lambda: retrieval_metrics(torch.rand(4, 8), image_ids=torch.arange(4)),
            ValueError,
            "text_ids",
        ),
        (lambda: FastReranker().rerank(torch.full((4, 4), 3e38)), ValueError, "scores.*25"),
        (
            lambda: FastReranker().rerank(
                Similarity(torch.full((4, 4), math.nan), torch.rand(4, 4))
            ),
            ValueError,
            "rows",
        ),
        (
            lambda: retrieval_metrics(Similarity(torch.rand(4, 4), torch.full((4, 4), math.nan))),
            ValueError,
            "cols",
        ),
        (lambda: FastReranker().fit(torch.rand(4)), ValueError, "images"),
        (lambda: FastReranker().fit(texts=torch.ones(4, 4).long()), TypeError, "texts"),
        (lambda: FastReranker().fit(torch.full((2, 2), math.nan)), ValueError, "images.*finite"),
        (
            lambda: FastReranker().fit(torch.rand(9, 5)).rerank(torch.rand(4, 8)),
            ValueError,
            "images.*8 candidates.*5",
        ),
        (
            lambda: FastReranker().fit(texts=torch.rand(9, 5)).rerank(torch.rand(4, 8)),
            ValueError,
            "texts.*4 cand.*9",
        ),
        (
            lambda: FastReranker().fit(torch.rand(9, 5)).rerank(Similarity(*embeddings(3, 3))),
            ValueError,
            "images.*dim",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def repeated(n=7, captions=5):
    """Images repeated for each caption, as much of the field's code saves them: (c N, D) and (c N,
    D).
    """
    g = torch.Generator().manual_seed(0)
    images = torch.randn(n, 8, generator=g).repeat_interleave(captions, 0)
    return images, images + 1.5 * torch.randn(images.shape, generator=g)


@pytest.mark.parametrize("captions", [2, 5])
@pytest.mark.parametrize(
    "kind", ["embeddings", "tiled", "scores", "rounded", "similarity of scores", "wide", "pair"]
)
def test_images_saved_once_per_caption_count_once(kind, captions):
    images, texts = repeated(captions=captions)
    S = torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(texts).T
    S = S[::captions].repeat_interleave(captions, 0)
    wanted = retrieval_metrics(S[::captions])
    asked = {
        "embeddings": Similarity(images, texts),
        "tiled": Similarity(images, texts, engine="tiled"),
        "scores": S,
        "rounded": S * (1 + 1e-6 * torch.rand(S.shape)),
        "similarity of scores": Similarity.from_scores(S),
        "wide": S.repeat_interleave(2, 1),
        "pair": (S, 2 * S),
    }[kind]
    wanted = retrieval_metrics(S[::captions].repeat_interleave(2, 1)) if kind == "wide" else wanted
    with pytest.warns(
        UserWarning, match=f"every {captions} consecutive ones are the same.*taken for 7 images"
    ):
        found = retrieval_results(asked)
    assert found.metrics() == wanted and found.i2t.ids.tolist() == list(range(7))
    with pytest.warns(UserWarning, match="images: every"):
        assert torch.equal(fold_repeated(images), images[::captions])


def test_a_pair_of_scores_has_the_same_images_repeated():
    once, repeated = torch.rand(4, 8), torch.rand(2, 8).repeat_interleave(2, 0)
    for pair in ((once, repeated), (repeated, once)):
        with (
            pytest.raises(ValueError, match=r"scores\[1\]: expected repeated images like"),
            pytest.warns(UserWarning),
        ):
            retrieval_results(pair)


def test_images_that_share_a_coordinate_are_different_ones():
    images = torch.rand(4, 3)
    images[1], images[3, 0] = images[0], images[2, 0]
    assert torch.equal(fold_repeated(images), images)


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [("float16", 2**-9), ("bfloat16", 2**-6), ("float32", 1e-5), ("float64", 1e-5)],
)
def test_copies_may_differ_by_two_steps_of_their_dtype_or_a_few_of_float32(dtype, rounding):
    """Half precision may differ by its rounding; double precision by that of former single
    precision.
    """
    images = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=getattr(torch, dtype)).repeat_interleave(
        2, 0
    )
    images[1::2] *= 1 + rounding * 0.99 if rounding == 1e-5 else 1 + rounding
    with pytest.warns(UserWarning, match="taken for 2 images"):
        assert torch.equal(fold_repeated(images), images[::2])
    images[1::2] = images[::2] * (1 + 1.5 * rounding)
    assert fold_repeated(images) is images


def test_images_that_repeat_otherwise_are_as_many_as_there_are():
    images, texts = repeated()
    cases = [
        # with constant scores, five captions per image cannot be recognised
        images[:1].expand(35, -1),
        torch.cat([images[:5], images[5:].flip(0)[:-1], images[:1]]),  # not the last copy
        torch.cat([images[:2], torch.randn(33, 8)]),
        texts,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # copies in another order have a warning of their own, and all these are at chance level
        warnings.filterwarnings("error", message="images: every")
        for x in cases:
            assert (
                fold_repeated(x) is x and len(retrieval_results(Similarity(x, texts)).i2t.ids) == 35
            )
        ids = torch.arange(35)
        assert len(retrieval_results(Similarity(images, texts, ids, ids)).i2t.ids) == 35
        assert len(retrieval_results(images @ texts.T, ids, ids).i2t.ids) == 35
        assert len(retrieval_results(images @ texts.T, relevant=(ids, ids)).i2t.ids) == 35
    assert retrieval_metrics(Similarity(cases[0], texts))["t2i_r1"] == 0


@pytest.mark.parametrize("folds", [1, 3])
def test_results_and_their_table_name_ids_as_they_were_given(folds):
    for image_ids, text_ids in (
        ([1001, 1002, 1003],) * 2,
        ([7, 5, 9], [9, 9, 5, 7]),
        ([-3, 2**40, 0], [0, 2**40, -3]),
    ):
        given_ids = torch.tensor(image_ids), torch.tensor(text_ids)
        scores = torch.rand(3, len(text_ids))
        embedded = Similarity(torch.rand(3, 4), torch.rand(len(text_ids), 4), *given_ids)
        for found in (
            retrieval_results(scores, *given_ids, folds=folds),
            retrieval_results(embedded, folds=folds),
        ):
            assert found.i2t.ids.tolist() == image_ids and found.t2i.ids.tolist() == text_ids
            assert [row["id"] for row in found.rows()] == image_ids + text_ids
