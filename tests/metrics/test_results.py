"""Single queries, folds, confidence intervals, comparisons and judgements: against loops, and
invariants.
"""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from support import oracle_metrics

from itrloss import Similarity
from itrloss.metrics import (
    Judgements,
    QueryResults,
    RetrievalResults,
    compare,
    confidence_intervals,
    retrieval_metrics,
    retrieval_results,
    save_trec,
)

N, M = 9, 17


def generator(seed):
    return torch.Generator().manual_seed(seed)


def ragged(seed):
    """Ids with and without a match, some of them repeated."""
    g = generator(seed)
    image_ids = torch.randint(0, 8, (N,), generator=g)
    text_ids = torch.randint(2, 10, (M,), generator=g)
    return image_ids, text_ids


def random_scores(seed):
    return torch.rand(N, M, generator=generator(seed))


def chance():
    """Results of a model that is right at random."""
    scores = torch.rand(12, 36, generator=generator(0), dtype=torch.float64)
    is_own = torch.arange(12)[:, None] == torch.arange(36) // 3
    return retrieval_results(scores + 0.5 * is_own)


# --- judgements -----------------------------------------------------------------------------------


def test_indices_of_small_integer_types_do_not_overflow():
    """249 x 50 + 49 is no number of a byte."""
    images = torch.arange(250)
    texts = torch.arange(50).repeat(5)
    grades = torch.arange(250)
    scores = torch.rand(250, 50, generator=generator(2))
    wanted = retrieval_metrics(scores, relevant=Judgements(images, texts, grades))
    for of_images in (images.byte(), images.short()):
        in_bytes = Judgements(of_images, texts.byte(), grades)
        assert retrieval_metrics(scores, relevant=in_bytes) == wanted


@pytest.mark.parametrize("k", [3, M])
def test_a_relevant_pair_counts_once_however_often_it_is_listed(k, tmp_path):
    pairs = torch.tensor([[0, 0, 3, 0, 2, 3], [5, 1, 8, 5, 8, 8]])
    once = pairs[:, [0, 1, 2, 4]]
    scores = random_scores(0)
    wanted = retrieval_results(scores, relevant=tuple(once), hubness_k=k)
    found = retrieval_results(scores, relevant=tuple(pairs), hubness_k=k)
    assert found.metrics() == wanted.metrics()
    assert found.i2t.positives.tolist() == [2, 0, 1, 1, 0, 0, 0, 0, 0]
    assert torch.equal(found.i2t.ranks, wanted.i2t.ranks)
    assert torch.equal(found.t2i.ranks, wanted.t2i.ranks)
    save_trec(found, tmp_path)
    qrels = (tmp_path / "i2t.qrels").read_text()
    assert qrels.count("image0 0 text5") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("grade", [0.1, 0.3, 0.7, 0.9])
def test_a_grade_is_as_high_as_itself_however_it_is_stored_and_often_it_is_there(dtype, grade):
    for times in range(1, 8):
        zeros = torch.zeros(times).long()
        grades = torch.full((times,), grade, dtype=dtype)
        judgements = Judgements(zeros, zeros, grades)
        found = retrieval_results(torch.rand(2, 3), relevant=judgements.at_least(grade))
        assert int(found.i2t.best[0]) > 0
        assert int(found.i2t.best[1]) == 0


# --- intervals and comparisons --------------------------------------------------------------------


def bootstrapped(results, draws):
    """The figures of each sample of ids, by loops."""
    sides = []
    for side in results.ways.values():
        figures_of_queries = []
        for i, ranks in zip(side.ids.tolist(), side.ranks.tolist(), strict=True):
            ranks = [rank for rank in ranks if rank]
            figures = oracle_metrics.query_figures(ranks) if ranks else []
            figures_of_queries.append((i, figures))
        sides.append(figures_of_queries)
    return [oracle_metrics.resampled(*sides, draw) for draw in draws]


@pytest.mark.parametrize("seed", range(3))
def test_the_bootstrap_equals_its_loops(seed):
    """The loops use the library's own samples: as many ids as there are, from the sorted ids of
    both sides.
    """
    ids = ragged(seed)
    a = retrieval_results(random_scores(seed).double(), *ids)
    b = retrieval_results(random_scores(seed + 9).double(), *ids)
    options = {"level": 0.8, "samples": 70, "seed": 5}
    intervals = confidence_intervals(a, **options)
    paired = compare(a, b, **options)

    unique = torch.cat(ids).unique()
    draws = torch.randint(len(unique), (70, len(unique)), generator=generator(5))
    drawn_ids = unique[draws].tolist()
    samples = [bootstrapped(results, drawn_ids) for results in (a, b)]
    assert intervals.keys() == paired.keys() == samples[0][0].keys()
    for name, found in paired.items():
        first, second = (np.array([figures[name] for figures in own]) for own in samples)
        low, high = np.nanquantile(first, [0.1, 0.9])
        assert intervals[name] == pytest.approx((low, high))
        difference = a.metrics()[name] - b.metrics()[name]
        low, high = np.nanquantile(first - second, [0.1, 0.9])
        wanted = (difference, low, high, p_value(first - second))
        assert found == pytest.approx(wanted, abs=1e-9), name


def p_value(differences):
    """Twice the share of samples on the rarer side of 0, one more counted on each; at most 1."""
    below = (differences <= 1e-9).sum()
    above = (differences >= -1e-9).sum()
    tail = min(below, above)
    samples = np.isfinite(differences).sum()
    return min(1, 2 * (1 + tail) / (1 + samples))


def test_intervals_depend_on_the_seed_alone():
    first = confidence_intervals(chance(), samples=20)
    assert confidence_intervals(chance(), samples=20) == first
    assert confidence_intervals(chance(), samples=20, seed=1) != first


def test_a_model_does_not_differ_from_itself():
    found = compare(chance(), chance(), samples=100)
    assert set(found.values()) == {(0, 0, 0, 1)}


def simulated(seed):
    """Results with a recall of 60 %: one right candidate per query; images are hard or easy for all
    their captions.
    """
    g = np.random.default_rng(seed)
    chance_of_image = g.beta(1.2, 0.8, 80)
    sides = []
    for owners in (np.arange(80), np.arange(80).repeat(5)):
        is_right = g.random(len(owners)) < chance_of_image[owners]
        ranks = torch.from_numpy(np.where(is_right, 1, 50))[:, None]
        sides.append(QueryResults(torch.from_numpy(owners), ranks, torch.zeros_like(ranks), 100))
    return RetrievalResults(*sides)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["i2t_r1", "t2i_r1"])
def test_90_of_100_intervals_hold_the_true_figure(name):
    held = []
    for seed in range(200):
        intervals = confidence_intervals(simulated(seed), level=0.9, samples=200)
        low, high = intervals[name]
        held.append(low <= 60 <= high)
    assert 0.85 <= np.mean(held) <= 0.95


@pytest.mark.slow
def test_p_values_are_uniform_where_there_is_no_difference():
    values = []
    for seed in range(0, 200, 2):
        found = compare(simulated(seed), simulated(seed + 1), samples=200)
        values.append(found["t2i_r1"].p_value)
    p_values = np.array(values)
    below_a_tenth = np.mean(p_values < 0.1)
    assert 0.04 <= below_a_tenth <= 0.18
    below_a_half = np.mean(p_values < 0.5)
    assert 0.35 <= below_a_half <= 0.65


def first_or_second(text_ids):
    """Results of two models; each finds one right candidate."""
    results = []
    for right in (0, 1):
        scores = torch.zeros(10, 10)
        scores[right, right] = 1
        results.append(retrieval_results(scores, torch.arange(10), torch.tensor(text_ids)))
    return results


def test_samples_without_an_answer_favour_no_model():
    """Two of ten ids have answers, one for each model."""
    first, second = first_or_second([0, 1, *range(50, 58)])
    found = compare(first, second)["i2t_r1"]
    assert found[:3] == (0, -100, 100)
    assert found.p_value > 0.95


def test_samples_without_an_answer_are_left_out():
    """One of ten ids has an answer; it is missing from 0.9 ^ 10 = 35 % of the samples."""
    first, second = first_or_second([0, *range(50, 59)])
    intervals = confidence_intervals(first)
    assert intervals["i2t_r1"] == (100, 100)
    found = compare(first, second)["i2t_r1"]
    answered_samples = 2000 * (1 - 0.9**10)
    assert found.p_value == pytest.approx(2 / (1 + answered_samples), rel=0.05)


# --- sizes, tables and errors ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "scores", [torch.rand(1, 5), torch.rand(1, 1), torch.rand(6, 6).half()[::2, ::2]]
)
def test_the_smallest_sets_have_results(scores):
    results = retrieval_results(scores)
    assert len(results.i2t.ids) == scores.shape[0]
    assert len(results.t2i.best) == scores.shape[1]
    for low, high in confidence_intervals(results, samples=20).values():
        assert low <= high
    ids = [torch.zeros(size).long() for size in scores.shape]
    all_right = retrieval_results(scores, *ids)
    assert all_right.metrics()["rsum"] == 600
    intervals = confidence_intervals(all_right)
    assert intervals["rsum"] == (600, 600)


@pytest.mark.parametrize("where", [(0, 0), (17, 30), (40, 52)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_nan_is_found_wherever_it_is(where, turned):
    """The matrix is scanned in its memory order."""
    scores = torch.rand(41, 53)
    scores[where] = torch.nan
    if turned:
        scores = scores.T.contiguous().T
    ids = (torch.arange(41), torch.arange(53))
    place = f"1 of 2173, the first in row {where[0]} and column {where[1]}"
    with pytest.raises(ValueError, match=f"scores: expected finite .*: {place}"):
        Similarity.from_scores(scores, *ids, check_finite=True)
    scores[where] = 0.0
    Similarity.from_scores(scores, *ids, check_finite=True)


@pytest.mark.parametrize("way", ["i2t", "t2i"])
def test_a_table_has_a_row_for_each_query(way, tmp_path):
    path = tmp_path / "queries.csv"
    results = retrieval_results(random_scores(0), *ragged(0))
    results.save(str(path))
    with open(path, newline="", encoding="utf-8") as file:
        every = list(csv.DictReader(file))
    assert len(every) == N + M
    assert len(list(results.rows())) == N + M
    rows = [row for row in every if row["direction"] == way]
    side = results.ways[way]
    columns = {
        "query": torch.arange(len(side.ids)),
        "id": side.ids,
        "best_rank": side.best,
        "positives": side.positives,
        "first": side.top[:, 0],
        "r_precision": side.per_query()["r_precision"],
        "average_precision_at_r": side.per_query()["map_at_r"],
    }
    for name, values in columns.items():
        written = [float(row[name]) for row in rows]
        assert written == values.tolist(), name
