"""Metrics and re-ranking against the loop oracle, on scores and streamed from embeddings."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from support.cases import embeddings, sample

from itrloss import Similarity, SuspiciousInputWarning
from itrloss.cli.comparison import compare_rerankers
from itrloss.metrics import (
    coco_protocol,
    default_ids,
    fold_repeated,
    retrieval_metrics,
    retrieval_results,
    skewness,
)
from itrloss.rerank import FastReranker, TwoStageReranker

# --- figures --------------------------------------------------------------------------------------


def test_convention_of_consecutive_captions():
    scores = torch.rand(4, 20)
    image_ids = torch.arange(4)
    text_ids = image_ids.repeat_interleave(5)
    with_ids = retrieval_metrics(scores, image_ids, text_ids)
    assert retrieval_metrics(scores) == with_ids
    images, texts = default_ids(2, 4)
    assert images.tolist() == [0, 1]
    assert texts.tolist() == [0, 0, 1, 1]
    matches = image_ids[:, None] == text_ids
    perfect = retrieval_metrics(matches.float())
    assert perfect["rsum"] == 600
    assert perfect["i2t_median_rank"] == 1
    assert perfect["i2t_map_at_r"] == 100


@pytest.mark.parametrize("shape", [(600, 2049), (513, 2048), (1025, 2050)])
def test_copies_tie_wherever_the_tiles_end(shape):
    """A product with one column is rounded differently from wider ones, so no tile may be that
    narrow.
    """
    n, m = shape
    rows, cols = sample(n, 64), sample(m, 64, seed=1)
    rows[-1] = rows[0]
    cols[-1] = cols[0]
    of_rows = Similarity(rows, cols, torch.zeros(n).long(), torch.arange(m), engine="tiled")
    of_cols = Similarity(rows, cols, torch.arange(n), torch.zeros(m).long(), engine="tiled").T
    for sim in (of_rows, of_cols):
        difference = sim.ranks(ties="pessimistic") - sim.ranks(ties="optimistic")
        assert (difference >= 1).all()


def test_a_positive_of_minus_infinity_ranks_last_and_not_behind_itself():
    scores = torch.tensor([[-math.inf, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    for engine in ("dense", "tiled"):
        sim = Similarity.from_scores(scores, engine=engine)
        assert sim.ranks().flatten().tolist() == [3, 2, 1]

    # enough positives to have them sorted
    image_ids = torch.zeros(40).long()
    text_ids = torch.tensor([0] * 20 + [1] * 20)
    of_positives = torch.full((40, 20), -math.inf)
    far = torch.cat([of_positives, torch.rand(40, 20)], 1)
    sim = Similarity.from_scores(far, image_ids, text_ids)
    assert sim.ranks()[0].tolist() == list(range(21, 41))

    v, w = embeddings(6, 6)
    bias = torch.zeros(6)
    bias[2] = -math.inf
    ranks = Similarity(v, w).ranks(bias)
    assert ranks[2].item() == 6


def test_skewness_of_known_counts():
    assert skewness(torch.tensor([3, 3, 3])) == 0
    assert math.isclose(skewness(torch.tensor([0, 0, 0, 4])), 2 / math.sqrt(3))
    assert skewness(torch.tensor([0, 4, 4, 4])) < 0


# --- fast re-ranking ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_re_ranked_pairs_copy_and_pickle(twin_of):
    pair = FastReranker().fit(images=torch.rand(5, 3)).rerank(torch.rand(3, 3))
    twin = twin_of(pair)
    assert torch.equal(twin.i2t, pair.i2t)
    assert torch.equal(twin.t2i, pair.t2i)
    assert twin.transductive == (False, True)


def repeated(captions=5):
    """Images repeated for each caption, as much of the field's code saves them: (c N, D) and (c N,
    D).
    """
    images = sample(7, 8).repeat_interleave(captions, 0)
    return images, images + 1.5 * sample(*images.shape, seed=1)


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


@pytest.mark.filterwarnings("ignore:images")
def test_a_second_stage_gets_no_numbers_of_folded_images():
    images, texts = repeated()
    S = images @ texts.T
    two = TwoStageReranker(lambda image, text: (image == text // 5) * 99.0, k=35)
    assert retrieval_metrics(S[::5], reranker=two)["rsum"] == 600
    for evaluate in (retrieval_metrics, coco_protocol):
        for scores in (S, Similarity(images, texts)):
            with pytest.raises(ValueError, match=r"scores: .*TwoStageReranker.*got 5 .*\[::5\]"):
                evaluate(scores, reranker=two)
    with pytest.raises(ValueError, match="sim: expected one row for each image"):
        compare_rerankers(S, [two])
    by_row = retrieval_metrics(S, relevant=torch.eye(35), reranker=two)
    assert by_row["rsum"] < 600  # nothing is folded


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


def ids_in_two_spellings(share):
    """Scores of 40 images and 200 texts, and the names of both, of which a share is spelt anew."""
    draw = torch.Generator().manual_seed(1)
    scores = torch.eye(40).repeat_interleave(5, 1) + torch.rand(40, 200, generator=draw)
    names = [f"img_{i}" for i in range(40)]
    of_texts = [name for name in names for _ in range(5)]
    changed = round(share * 200)
    return scores, names, [name.upper() for name in of_texts[:changed]] + of_texts[changed:]


def test_many_ids_without_a_match_are_noticed():
    said = "image_ids, text_ids: 16 of 40 images and 80 of 200 texts have no match"
    with pytest.warns(SuspiciousInputWarning, match=said):
        retrieval_metrics(*ids_in_two_spellings(0.4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SuspiciousInputWarning)
        results = retrieval_results(*ids_in_two_spellings(0.05))
        retrieval_metrics(*ids_in_two_spellings(0.4), relevant=(torch.arange(3), torch.arange(3)))
    assert (results.i2t.unmatched, results.t2i.unmatched) == (2, 10)


def test_tables_say_how_many_queries_do_not_count():
    sim = Similarity.from_scores(*ids_in_two_spellings(0.05))
    note = "2 of 40 images and 10 of 200 texts have no match: "
    assert note in " ".join(compare_rerankers(sim, ["csls"], samples=9).table().notes)
    sim = Similarity.from_scores(*ids_in_two_spellings(0))
    assert "no match" not in " ".join(compare_rerankers(sim, ["csls"], samples=9).table().notes)
