"""Who matches and who exists is asked of the similarity, whatever says it: what is built on figures
knows relations that are no plain ids, and padding.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from support import cases
from support.cases import warnings_of
from support.rerankers import EVERY

from itrloss import NO_ID, Similarity
from itrloss.cli.comparison import compare_rerankers
from itrloss.engine.related import Related
from itrloss.metrics import (
    compare,
    confidence_intervals,
    retrieval_metrics,
    retrieval_results,
    save_trec,
)
from itrloss.rerank import CSLS, FastReranker

N, M, D = 12, 24, 6
# Text j belongs to image OWNER[j], in its third of the images: nothing matches by its place.
OWNER = torch.tensor([2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9]).repeat_interleave(2)
IDS = torch.arange(N), OWNER


sample = partial(cases.sample, dtype=torch.float64)
IMAGES = sample(N, D)
TEXTS = IMAGES[OWNER] + 1.2 * sample(M, D, seed=1)
BANKS = sample(20, D, seed=2), sample(30, D, seed=3)


# --- relations ------------------------------------------------------------------------------------


def label_sets():
    """An image and its texts share one of two labels; no two share the other."""
    rows = torch.stack([torch.arange(N) + 50, torch.arange(N)], 1)
    cols = torch.stack([OWNER, torch.arange(M) + 100, torch.full((M,), NO_ID)], 1)
    return Similarity(IMAGES, TEXTS, rows, cols)


def matches():
    matrix = (torch.arange(N)[:, None] == OWNER).float()
    return Similarity(IMAGES, TEXTS, related=Related(matches=matrix))


def one_group():
    """All are in one group, or open to all, so that groups leave out no pair."""
    groups = torch.zeros(N).long(), torch.zeros(M).long()
    groups[0][3] = NO_ID
    return Similarity(IMAGES, TEXTS, *IDS, related=Related(groups))


def transposed():
    rows = torch.stack([OWNER, torch.arange(M) + 100], 1)
    cols = torch.stack([torch.arange(N), torch.arange(N) + 50], 1)
    return Similarity(TEXTS, IMAGES, rows, cols).T


def numbers_alone():
    return Similarity(IMAGES, TEXTS, None, OWNER)


def scores_with_label_sets():
    sim = label_sets()
    return Similarity.from_scores(sim.scores(), *sim.label_sets())


RELATIONS = {
    "label sets": label_sets,
    "matches": matches,
    "one group": one_group,
    "transposed": transposed,
    "numbers alone": numbers_alone,
    "scores": scores_with_label_sets,
}


def plain():
    return Similarity(IMAGES, TEXTS, *IDS)


def assert_same(found, wanted):
    """Compare figures by name; equal queries rank alike up to the rounding of a product."""
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("relation", RELATIONS)
def test_images_are_drawn_with_the_texts_that_match_them(relation):
    found = retrieval_results(RELATIONS[relation]())
    wanted = retrieval_results(plain())
    others = retrieval_results(plain(), reranker=CSLS())
    of_relation = retrieval_results(RELATIONS[relation](), reranker=CSLS())
    assert confidence_intervals(found, samples=50) == confidence_intervals(wanted, samples=50)
    assert compare(of_relation, found, samples=50) == compare(others, wanted, samples=50)
    assert found.unmatched_in_words == wanted.unmatched_in_words


@pytest.mark.parametrize("folds", [1, 3])
@pytest.mark.parametrize("relation", RELATIONS)
def test_qrels_have_the_pairs_that_match(relation, folds, tmp_path):
    results = retrieval_results(RELATIONS[relation](), folds=folds)
    save_trec(results, tmp_path)
    found = set()
    for line in Path(tmp_path, "i2t.qrels").read_text().splitlines():
        image, _, text, _ = line.split()
        found.add((image, text))
    assert found == {(f"image{i}", f"text{j}") for j, i in enumerate(OWNER.tolist())}


@pytest.mark.parametrize("relation", RELATIONS)
def test_calibration_knows_who_matches(relation):
    scales = (1.0, 4.0, 16.0)
    found = FastReranker().calibrate(RELATIONS[relation](), scales=scales)
    wanted = FastReranker().calibrate(plain(), scales=scales)
    assert (found.i2t, found.t2i) == (wanted.i2t, wanted.t2i)


def test_comparisons_know_who_matches():
    found = compare_rerankers(label_sets(), ["csls", "dual-softmax"], samples=20)
    wanted = compare_rerankers(plain(), ["csls", "dual-softmax"], samples=20)
    for own, other in zip(found.entries, wanted.entries, strict=True):
        assert_same(own.results.metrics(), other.results.metrics())


def test_a_view_from_the_texts_has_the_numbers_of_its_columns():
    """Images have numbers of texts here, and two of them the same."""
    numbers = torch.arange(N) // 2
    sim = Similarity(TEXTS, IMAGES, None, numbers).T
    wanted = retrieval_results(Similarity(IMAGES, TEXTS, numbers, torch.arange(M)))
    found = retrieval_results(sim)
    assert_same(found.metrics(), wanted.metrics())
    assert torch.equal(found.i2t.ids, numbers)
    assert confidence_intervals(found, samples=50) == confidence_intervals(wanted, samples=50)


WITH_NAN = torch.eye(N, M)
WITH_NAN[0, 1] = math.nan
REFUSED = {
    "groups": Related((torch.arange(N) % 2, torch.arange(M) % 2)),
    "nan in matches": Related(matches=WITH_NAN),
    "weights": Related(matches=2 * torch.eye(N, M)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pairs_that_are_neither_right_nor_wrong_are_refused(name):
    ids = IDS if name == "groups" else (None, None)
    sim = Similarity(IMAGES, TEXTS, *ids, related=REFUSED[name])
    with pytest.raises(ValueError, match="expected neither groups nor weights or nan in matches"):
        retrieval_metrics(sim)
    right = (torch.arange(N), torch.arange(N))
    wanted = retrieval_metrics(plain(), relevant=right)
    assert_same(retrieval_metrics(sim, relevant=right), wanted)


# --- padding --------------------------------------------------------------------------------------


IMAGE_PLACES = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 11, 12, 13, 14])  # of 16: some do not exist
TEXT_PLACES = torch.tensor([x for x in range(30) if x not in (0, 7, 8, 20, 28, 29)])


def spread(x, places, size, fill):
    """``x`` at its places among ``size`` entries; the others are ``fill``."""
    whole = x.new_full((size, *x.shape[1:]), fill)
    whole[places] = x
    return whole


def spread_pair(images, texts, fill):
    """Images and texts, or what is said of them, with some in between that do not exist."""
    return spread(images, IMAGE_PLACES, 16, fill), spread(texts, TEXT_PLACES, 30, fill)


# The same with images and texts in between that are alike and close to others.
EMBEDDED = spread_pair(IMAGES, TEXTS, 0.7)


def padded():
    return Similarity(*EMBEDDED, *spread_pair(*IDS, NO_ID))


def padded_sets():
    return Similarity(*EMBEDDED, *spread_pair(*label_sets().label_sets(), NO_ID))


def padded_matches():
    """A row and a column of nan are of nobody."""
    whole = torch.full((16, 30), math.nan)
    whole[IMAGE_PLACES[:, None], TEXT_PLACES] = (torch.arange(N)[:, None] == OWNER).float()
    return Similarity(*EMBEDDED, related=Related(matches=whole))


PADDED = {
    "ids": padded,
    "label sets": padded_sets,
    "matches": padded_matches,
}


@pytest.mark.parametrize("name", ["fast", "nnn", "csls", "sinkhorn", "own"])
def test_biases_are_of_what_exists(name):
    found = EVERY[name].biases(padded())
    wanted = EVERY[name].biases(plain())
    images, texts = spread_pair(wanted.images, wanted.texts, 0.0)
    assert torch.equal(found.texts, texts)
    assert torch.equal(found.images, images)


@pytest.mark.parametrize("kind", PADDED)
def test_figures_of_queries_are_in_the_numbering_of_the_input(kind, tmp_path):
    found = retrieval_results(PADDED[kind]())
    rows = [row for row in found.rows() if row["direction"] == "i2t"]
    assert [row["query"] for row in rows] == IMAGE_PLACES.tolist()
    save_trec(found, tmp_path)
    for line in Path(tmp_path, "t2i.run").read_text().splitlines():
        query, _, candidate, *_ = line.split()
        assert int(query.removeprefix("text")) in TEXT_PLACES
        assert int(candidate.removeprefix("image")) in IMAGE_PLACES


@pytest.mark.parametrize("kind", PADDED)
def test_intervals_and_counts_are_of_what_exists(kind):
    found = retrieval_results(PADDED[kind]())
    wanted = retrieval_results(plain())
    assert confidence_intervals(found, samples=50) == confidence_intervals(wanted, samples=50)
    assert found.unmatched_in_words == "0 of 12 images and 0 of 24 texts have no match"
    assert found.i2t.metrics()["skewness"] == wanted.i2t.metrics()["skewness"]


def test_warnings_do_not_count_padding():
    """Rows of padding are alike, have no match, and rank for nobody."""
    more = torch.cat([IMAGES, torch.ones(40, D).double()])
    ids = torch.cat([IDS[0], torch.full((40,), NO_ID)])
    sim = Similarity(more, TEXTS, ids, IDS[1])
    assert warnings_of(lambda: retrieval_metrics(sim)) == []
    banks = torch.cat([BANKS[0], torch.ones(1, D).double()]), BANKS[1]
    assert warnings_of(lambda: CSLS().fit(*banks).rerank(sim)) == []


def test_one_query_that_exists_is_a_single_one():
    ids = torch.tensor([0] + [NO_ID] * (N - 1))
    sim = Similarity(IMAGES, TEXTS, ids, OWNER)
    with pytest.raises(ValueError, match=r"single query.*fit\(images"):
        CSLS().rerank(sim)


def test_a_batch_without_a_match_is_not_matched_by_its_padding():
    pytest.importorskip("torchmetrics")
    from itrloss.metrics import RetrievalMetrics

    metric = RetrievalMetrics()
    v = IMAGES[:3].float()
    assert metric(v, v, [0, 1, NO_ID], [4, 5, NO_ID]) is None
