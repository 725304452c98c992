"""Single queries, folds, confidence intervals, comparisons and judgements: against loops, and
invariants.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle, oracle_metrics
from support.cases import embeddings, make_ids, sample, similarity

import itrloss
from itrloss import Similarity
from itrloss.metrics import (
    Judgements,
    QueryResults,
    RetrievalResults,
    agreement,
    compare,
    confidence_intervals,
    retrieval_metrics,
    retrieval_results,
    save_trec,
)
from itrloss.rerank import FastReranker, InvertedSoftmax

N, M = 9, 17
ENGINES = ["scores", "dense", "tiled", "kept"]
PERFECT = torch.eye(4).repeat_interleave(5, 1)
SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"


@pytest.fixture
def tiny_blocks(small_tiles, monkeypatch):
    monkeypatch.setattr(Similarity.blocks, "__defaults__", (30,))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def ragged(seed, n=N, m=M):
    """Ids with and without a match, some of them repeated."""
    g = generator(seed)
    return torch.randint(0, 8, (n,), generator=g), torch.randint(2, 10, (m,), generator=g)


def tied(engine, ids=(None, None), seed=0):
    """Arguments, and their scores for the oracle; embeddings are small integers, so that ties are
    exact.
    """
    v, w = (
        torch.randint(-1, 2, (size, 4), generator=generator(seed + size)).double()
        for size in (N, M)
    )
    if engine == "scores":
        return v @ w.T, (v @ w.T).numpy()
    unlike = torch.arange(N), torch.arange(N, N + M)
    sim = similarity(v, w, unlike if ids[0] is None else ids, engine, normalize=False)
    return sim, (v @ w.T).numpy()


def judged(seed, count=50, n=N, m=M):
    g = generator(seed)
    images, texts = (torch.randint(0, size - 2, (count,), generator=g) for size in (n, m))
    return Judgements(images, texts, torch.randint(1, 5, (count,), generator=g))


def triples(judgements):
    return list(zip(*(x.tolist() for x in judgements), strict=True))


def right_pairs(judgements, relevant):
    return {
        pair
        for pair, grade in oracle_metrics._mean_grades(triples(judgements)).items()
        if grade >= relevant
    }


def without_skewness(found):
    return {name: x for name, x in found.items() if "skewness" not in name}


def chance(seed, n=12, captions=3, better=0.0):
    """Results of a model that is right at random."""
    ids = torch.arange(n), torch.arange(n).repeat_interleave(captions)
    scores = torch.rand(n, n * captions, generator=generator(seed), dtype=torch.float64)
    return retrieval_results(scores + (0.5 + better) * (ids[0][:, None] == ids[1]), *ids)


@pytest.mark.parametrize("ties", ["pessimistic", "optimistic"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_ragged_ids_and_listed_pairs_equal_the_loops(engine, ties, seed, tiny_blocks):
    ids = ragged(seed)
    asked, S = tied(engine, ids, seed)
    given_ids = ids if engine == "scores" else ()
    pairs = (ids[0][:, None] == ids[1]).nonzero().tolist()
    found = retrieval_metrics(asked, *given_ids, ties=ties)
    assert without_skewness(found) == pytest.approx(
        oracle_metrics.listed(S, map(tuple, pairs), ties)
    )
    judgements, S2 = judged(seed), S[::-1, ::-1].copy()
    for relevant in (2, 2.5, 4):
        pairs = right_pairs(judgements, relevant)
        both = {"relevant": judgements.at_least(relevant), "ties": ties}
        found = retrieval_results(tied(engine, seed=seed)[0], **both)
        assert without_skewness(found.metrics()) == pytest.approx(
            oracle_metrics.listed(S, pairs, ties)
        )
        assert (
            found.t2i.candidates == N
            and int(found.i2t.occurrences.sum()) == found.i2t.top.numel() == 10 * N
        )
        t2i = retrieval_results((asked, torch.from_numpy(S2)), *given_ids, **both).t2i
        assert without_skewness(t2i.metrics()) == pytest.approx(
            {
                k[4:]: x
                for k, x in oracle_metrics.listed(S2, pairs, ties).items()
                if k.startswith("t2i")
            }
        )


@pytest.mark.parametrize("seed", range(4))
def test_untied_ragged_metrics_equal_the_oracle_to_the_last_figure(seed):
    S = torch.rand(N, 23, generator=generator(seed), dtype=torch.float64)
    ids = ragged(seed, m=23)
    found = retrieval_metrics(S, *ids)
    assert found == pytest.approx(oracle.retrieval_metrics(S.numpy(), *(x.numpy() for x in ids)))
    # Queries without a right candidate do not count: the figures equal those without these queries.
    asked = torch.isin(ids[0], ids[1]).nonzero().squeeze(1)
    alone = retrieval_metrics(S[asked], ids[0][asked], ids[1])
    assert {k: x for k, x in found.items() if "i2t" in k} == {
        k: x for k, x in alone.items() if "i2t" in k
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["captions", "random"])
def test_folds_equal_the_oracle(engine, kind, tiny_blocks):
    n, m = 8, 40
    ids, (v, w) = make_ids(kind, n, m), embeddings(n, m)
    S, other = (
        oracle.cosine(v.numpy(), w.numpy()),
        torch.rand(n, m, generator=generator(1)).double(),
    )
    asked = (torch.from_numpy(S), *ids) if engine == "scores" else (similarity(v, w, ids, engine),)
    wanted, of_other = (oracle_metrics.folds(x, *ids, 4) for x in (S, other))
    assert retrieval_metrics(*asked, folds=4) == pytest.approx(wanted)
    assert retrieval_metrics(*asked, folds=1) == retrieval_metrics(*asked) != pytest.approx(wanted)
    mixed = retrieval_metrics((asked[0], other), *asked[1:], folds=4)
    assert {k: x for k, x in mixed.items() if k != "rsum"} == pytest.approx(
        {k: (wanted if "i2t" in k else of_other)[k] for k in wanted if k != "rsum"}
    )
    for method in (FastReranker(), InvertedSoftmax(scale=9.0)):
        parts = [
            retrieval_metrics(
                torch.from_numpy(S)[rows][:, cols], ids[0][rows], ids[1][cols], reranker=method
            )
            for rows in torch.arange(n).split(2)
            for cols in [torch.isin(ids[1], ids[0][rows])]
        ]
        found = retrieval_metrics(*asked, folds=4, reranker=method)
        assert found == pytest.approx({k: sum(p[k] for p in parts) / 4 for k in parts[0]})


@pytest.mark.parametrize("kind", ["two texts", "pairs", "pairs by number", "ragged", "ties"])
def test_queries_of_folds_are_those_of_their_parts(kind):
    n, parts = 8, 4
    image_ids = torch.arange(n) + 3
    counts = (
        torch.tensor([1, 2, 1, 1, 4, 1, 1, 2])
        if kind == "ragged"
        else torch.full((n,), 2 - kind.startswith("p"))
    )
    text_ids = image_ids.repeat_interleave(counts)
    text_ids = text_ids if kind.startswith("p") else text_ids.flip(0)
    S = torch.rand(n, len(text_ids), generator=generator(2), dtype=torch.float64)
    S = (4 * S).round() if kind == "ties" else S
    given = (Similarity.from_scores(S),) if kind == "pairs by number" else (S, image_ids, text_ids)
    numbers = torch.arange(n)
    for method, ties in (
        (None, "pessimistic"),
        (None, "optimistic"),
        (InvertedSoftmax(scale=9.0), "optimistic"),
    ):
        options = {"reranker": method, "ties": ties}
        found = retrieval_results(*given, folds=parts, hubness_k=2, **options)
        whole = retrieval_results(*given)
        assert torch.equal(found.i2t.ids, whole.i2t.ids) and torch.equal(
            found.t2i.ids, whole.t2i.ids
        )
        assert (found.i2t.candidates, found.t2i.candidates) == (len(text_ids), n)
        for rows in numbers.split(n // parts):
            cols = torch.isin(text_ids, image_ids[rows]).nonzero().squeeze(1)
            part = retrieval_results(
                S[rows][:, cols], image_ids[rows], text_ids[cols], hubness_k=2, **options
            )
            for side, wanted, queries, candidates in (
                (found.i2t, part.i2t, rows, cols),
                (found.t2i, part.t2i, cols, rows),
            ):
                width = wanted.ranks.shape[1]
                assert (
                    torch.equal(side.ranks[queries, :width], wanted.ranks)
                    and not side.ranks[queries, width:].any()
                )
                assert torch.equal(side.top[queries], candidates[wanted.top])
        averaged = retrieval_metrics(*given, folds=parts, **options)
        assert found.metrics() == averaged | {
            k: x for k, x in found.metrics().items() if "skewness" in k
        }


def test_hubs_of_folds_are_among_as_many_candidates_as_every_part_has():
    text_ids = torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 3])
    found = retrieval_results(torch.rand(4, 9), torch.arange(4), text_ids, folds=2, hubness_k=10)
    assert found.i2t.top.shape == (4, 4) and found.t2i.top.shape == (9, 2)


@pytest.mark.parametrize(("last", "asked"), [(7, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 5, 5])])
def test_texts_ask_in_every_part_that_has_an_image_of_theirs(last, asked):
    S, image_ids, text_ids = (
        torch.rand(6, 5),
        torch.tensor([0, 1, 5, 2, 3, 5]),
        torch.tensor([0, 1, 2, 3, last]),
    )
    found = retrieval_results(S, image_ids, text_ids, folds=2)
    assert found.t2i.ids.tolist() == asked and found.i2t.ids.tolist() == image_ids.tolist()
    assert found.metrics() == pytest.approx(oracle_metrics.folds(S.numpy(), image_ids, text_ids, 2))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_agreement_equals_the_loops(engine, seed, tiny_blocks):
    pytest.importorskip("scipy")
    judgements, (v, w) = judged(seed), embeddings(N, M, seed=seed)
    S = oracle.cosine(v.numpy(), w.numpy())
    asked = torch.from_numpy(S) if engine == "scores" else similarity(v, w, ragged(seed), engine)
    for k in (1, 3, 10, 40):
        found = agreement(asked, judgements, k=k)
        assert found[1:] == pytest.approx(oracle_metrics.ndcg(S, triples(judgements), k))
    assert found.tau == pytest.approx(oracle_metrics.kendall(S, triples(judgements)))
    asked, S = tied(engine, seed=seed)
    many = judged(seed, 200)
    # few, many, two levels
    for grades in (many.grades, torch.rand(200, generator=generator(seed)), many.grades > 2):
        given_grades = many._replace(grades=grades)
        wanted = oracle_metrics.kendall(S, triples(given_grades))
        assert agreement(asked, given_grades).tau == pytest.approx(wanted)


def test_agreement_of_known_orders():
    pytest.importorskip("scipy")
    images, texts = (
        x.flatten() for x in torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    )
    grades = torch.randperm(24, generator=generator(0))
    S = grades.view(4, 6).double()
    pairs = Judgements(images, texts, grades)
    assert agreement(S, pairs) == pytest.approx((1, 100, 100))
    assert agreement(-S, pairs).tau == -1 and agreement(-S, pairs).i2t_ndcg < 100
    assert agreement(torch.zeros(4, 6), pairs).tau == 0  # all tied: nothing is ordered
    everything = Judgements(
        torch.arange(2000) % 40, torch.arange(2000) // 40, torch.rand(2000, generator=generator(1))
    )
    # 2000 grades, quickly
    assert agreement(torch.rand(40, 50), everything).tau == pytest.approx(0, abs=0.1)
    assert agreement(S.half().T.contiguous().T, pairs) == pytest.approx((1, 100, 100))
    assert agreement(S, Judgements(images.byte(), texts.short(), grades)) == pytest.approx(
        (1, 100, 100)
    )
    # 249 * 50 overflows a byte
    wide = torch.arange(300, dtype=torch.uint8)[:250], torch.arange(50).repeat(5).byte()
    like = Judgements(*wide, torch.arange(250))
    S = torch.rand(250, 50, generator=generator(2))
    assert agreement(S, like) == agreement(
        S, Judgements(wide[0].long(), wide[1].long(), like.grades)
    )


def test_a_relevant_pair_counts_once_however_often_it_is_listed(tmp_path):
    pairs = torch.tensor([[0, 0, 3, 0, 2, 3], [5, 1, 8, 5, 8, 8]])
    once, again = tuple(pairs[:, [0, 1, 2, 4]]), tuple(pairs)
    for k in (3, M):
        wanted, found = (
            retrieval_results(tied("scores")[0], relevant=x, hubness_k=k) for x in (once, again)
        )
        assert found.metrics() == wanted.metrics() and found.i2t.positives.tolist() == [
            2,
            0,
            1,
            1,
            0,
            0,
            0,
            0,
            0,
        ]
        for way in ("i2t", "t2i"):
            assert torch.equal(getattr(found, way).ranks, getattr(wanted, way).ranks)
    save_trec(found, tmp_path)
    assert (tmp_path / "i2t.qrels").read_text().count("image0 0 text5") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("grade", [0.1, 0.3, 0.7, 0.9])
def test_a_grade_is_as_high_as_itself_however_it_is_stored_and_often_it_is_there(dtype, grade):
    for times in range(1, 8):
        pairs = Judgements(*torch.zeros(2, times).long(), torch.full((times,), grade, dtype=dtype))
        assert (
            retrieval_results(torch.rand(2, 3), relevant=pairs.at_least(grade)).i2t.best.tolist()[1]
            == 0
        )


@pytest.mark.parametrize("seed", range(3))
def test_the_bootstrap_equals_its_loops(seed):
    """The loops use the library's own samples: as many ids as there are, from the sorted ids of
    both sides.
    """
    ids, samples = ragged(seed), 70
    runs = [
        retrieval_results(torch.rand(N, M, generator=generator(s)).double(), *ids)
        for s in (seed, seed + 9)
    ]
    unique = torch.cat(ids).unique()
    g = generator(5)
    draws = torch.randint(len(unique), (samples, len(unique)), generator=g)
    figures = []
    for run in runs:
        queries = [
            [
                (i, oracle_metrics.query_figures([r for r in q if r]) if any(q) else [])
                for i, q in zip(*x, strict=True)
            ]
            for x in ((s.ids.tolist(), s.ranks.tolist()) for s in (run.i2t, run.t2i))
        ]
        figures.append(
            [oracle_metrics.resampled(*queries, unique[draw].tolist()) for draw in draws]
        )
    intervals = confidence_intervals(runs[0], level=0.8, samples=samples, seed=5)
    paired = compare(*runs, level=0.8, samples=samples, seed=5)
    exact = [run.metrics() for run in runs]
    assert intervals.keys() == paired.keys() == figures[0][0].keys() and len(figures[0]) == samples
    for name, found in paired.items():
        first, second = (np.array([f[name] for f in run]) for run in figures)
        assert intervals[name] == pytest.approx(tuple(np.nanquantile(first, [0.1, 0.9])))
        d = first - second
        p = min(
            1, 2 * (1 + min((d <= 1e-9).sum(), (d >= -1e-9).sum())) / (1 + np.isfinite(d).sum())
        )
        wanted = exact[0][name] - exact[1][name], *np.nanquantile(d, [0.1, 0.9]), p
        assert found == pytest.approx(wanted, abs=1e-9), name


@given(st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_intervals_and_comparisons(seed):
    a, b = chance(seed), chance(seed + 1, better=0.2)
    narrow, wide = (confidence_intervals(a, level=level, samples=400) for level in (0.5, 0.99))
    point = a.metrics()
    for name, (low, high) in narrow.items():
        assert (
            wide[name][0] <= low <= high <= wide[name][1]
            and 0 <= wide[name][0] <= point[name] <= wide[name][1]
        )
    assert confidence_intervals(a, level=0.5, samples=400) == narrow
    assert confidence_intervals(a, level=0.5, samples=20, seed=1) != confidence_intervals(
        a, level=0.5, samples=20
    )
    assert all(x == (0, 0, 0, 1) for x in compare(a, a, samples=100).values())
    forth, back = compare(a, b, samples=200), compare(b, a, samples=200)
    for name, x in forth.items():
        y = back[name]
        assert (x.difference, x.low, x.high, x.p_value) == pytest.approx(
            (-y.difference, -y.high, -y.low, y.p_value)
        )
        assert x.difference == pytest.approx(point[name] - b.metrics()[name]) and 0 < x.p_value <= 1


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_the_order_of_queries_is_that_of_the_results(seed):
    g = generator(seed)
    S, ids = torch.rand(N, M, generator=g, dtype=torch.float64), ragged(0)
    rows, cols = torch.randperm(N, generator=g), torch.randperm(M, generator=g)
    plain, moved = (
        retrieval_results(S, *ids),
        retrieval_results(S[rows][:, cols], ids[0][rows], ids[1][cols]),
    )
    assert moved.metrics() == pytest.approx(plain.metrics())
    for way, order, other in (("i2t", rows, cols), ("t2i", cols, rows)):
        a, b = getattr(plain, way), getattr(moved, way)
        assert torch.equal(a.ids[order], b.ids) and torch.equal(a.ranks[order], b.ranks)
        assert torch.equal(a.top[order], other[b.top]) and torch.equal(
            a.occurrences[other], b.occurrences
        )
    assert confidence_intervals(plain, samples=50)["rsum"] == pytest.approx(
        confidence_intervals(moved, samples=50)["rsum"]
    )


def test_five_times_the_same_caption_is_one_witness():
    S = torch.rand(40, 40, generator=generator(0)) + 0.6 * torch.eye(40)
    one, five = retrieval_results(S), retrieval_results(S.repeat_interleave(5, 1))
    a, b = (confidence_intervals(x, samples=300) for x in (one, five))
    for name in ("t2i_r1", "t2i_r5", "t2i_r10"):
        assert a[name] == pytest.approx(b[name]) and a[name][0] < a[name][1]


def simulated(seed, n=80, captions=5):
    """Results with a recall of 60 %: one right candidate per query; images are hard or easy for all
    their captions.
    """
    g = np.random.default_rng(seed)
    easy = g.beta(1.2, 0.8, n)
    ids = torch.arange(n), torch.arange(n).repeat_interleave(captions)
    ranks = (torch.from_numpy(np.where(g.random(len(i)) < easy[i], 1, 50))[:, None] for i in ids)
    return RetrievalResults(
        *(QueryResults(i, r, torch.zeros_like(r), 100) for i, r in zip(ids, ranks, strict=True))
    )


@pytest.mark.slow
def test_intervals_hold_what_they_promise():
    runs = [simulated(seed) for seed in range(200)]
    found = [confidence_intervals(run, level=0.9, samples=200) for run in runs]
    for name in ("i2t_r1", "t2i_r1"):
        assert 0.85 <= np.mean([x[name][0] <= 60 <= x[name][1] for x in found]) <= 0.95, name
    p = np.array(
        [
            compare(*pair, samples=200)["t2i_r1"].p_value
            for pair in zip(runs[::2], runs[1::2], strict=True)
        ]
    )
    # no difference: uniform p-values
    assert 0.04 <= (p < 0.1).mean() <= 0.18 and 0.35 <= (p < 0.5).mean() <= 0.65


def test_samples_without_an_answer_are_left_out():
    """Two of ten ids have answers, one for each model: samples favour both equally often, and many
    favour neither.
    """
    ids = torch.arange(10), torch.tensor([0, 1, *range(50, 58)])
    first, second = torch.zeros(2, 10, 10)
    first[0, 0] = second[1, 1] = 1
    found = compare(*(retrieval_results(x, *ids) for x in (first, second)))["i2t_r1"]
    assert found.difference == 0 and found.p_value > 0.95 and (found.low, found.high) == (-100, 100)
    # an id is missing from 0.9 ^ 10 = 35 % of the samples
    lone = torch.arange(10), torch.tensor([0, *range(50, 59)])
    results = [retrieval_results(x, *lone) for x in (first, second)]
    assert confidence_intervals(results[0])["i2t_r1"] == (100, 100)
    assert compare(*results)["i2t_r1"].p_value == pytest.approx(
        2 / (1 + 2000 * (1 - 0.9**10)), rel=0.05
    )


@pytest.mark.parametrize(
    "scores", [torch.rand(1, 5), torch.rand(1, 1), torch.rand(6, 6).half()[::2, ::2]]
)
def test_the_smallest_sets_have_results(scores):
    results = retrieval_results(scores)
    assert len(results.i2t.ids) == scores.shape[0] and len(results.t2i.best) == scores.shape[1]
    assert all(low <= high for low, high in confidence_intervals(results, samples=20).values())
    everything = retrieval_results(scores, *(torch.zeros(size).long() for size in scores.shape))
    assert everything.metrics()["rsum"] == 600 and confidence_intervals(everything)["rsum"] == (
        600,
        600,
    )


@pytest.mark.parametrize("where", [(0, 0), (17, 30), (40, 52)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_nan_is_found_wherever_it_is(where, turned, monkeypatch):
    """The matrix is scanned in blocks of rows, in its memory order."""
    monkeypatch.setattr("itrloss.checks._AT_ONCE", 100)
    scores = torch.rand(41, 53)
    scores[where] = torch.nan
    scores = scores.T.contiguous().T if turned else scores
    with pytest.raises(ValueError, match="scores: expected finite"):
        Similarity.from_scores(scores, torch.arange(41), torch.arange(53), check_finite=True)
    scores[where] = 0.0
    Similarity.from_scores(scores, torch.arange(41), torch.arange(53), check_finite=True)


def test_a_table_has_a_row_for_each_query(tmp_path):
    results = retrieval_results(torch.rand(N, M, generator=generator(0)), *ragged(0))
    results.save(str(tmp_path / "queries.csv"))
    with open(tmp_path / "queries.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == N + M == len(list(results.rows()))
    for way, size in (("i2t", N), ("t2i", M)):
        side, part = getattr(results, way), [row for row in rows if row["direction"] == way]
        assert [int(row["query"]) for row in part] == list(range(size))
        columns = {
            "id": side.ids,
            "best_rank": side.best,
            "positives": side.positives,
            "first": side.top[:, 0],
        }
        for name, x in (
            columns | {k: getattr(side, k) for k in ("r_precision", "average_precision_at_r")}
        ).items():
            assert [float(row[name]) for row in part] == x.tolist(), name
        answered = [row for row in part if int(row["positives"])]
        assert 0 < len(answered) < size and all(
            row["best_rank"] == "0" for row in part if row not in answered
        )
        mean = sum(float(row["average_precision_at_r"]) for row in answered) / len(answered)
        assert 100 * mean == pytest.approx(results.metrics()[f"{way}_map_at_r"])


def asked_with(scores=PERFECT, relevant=1.0, **changed):
    pairs = Judgements(
        torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0])
    )._replace(**changed)
    return lambda: (
        retrieval_results(scores, relevant=pairs.at_least(relevant)),
        agreement(scores, pairs),
    )


ONE, FEW = retrieval_results(PERFECT), judged(0, n=4, m=9)
UNANSWERED = retrieval_results(PERFECT, torch.arange(4), torch.arange(20) + 9)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            asked_with(images=torch.tensor([0.0, 1.0])),
            TypeError,
            r"judgements\.images.*integer.*float32",
        ),
        (
            asked_with(images=torch.tensor([True, False])),
            TypeError,
            r"judgements\.images.*integer.*bool",
        ),
        (asked_with(texts=torch.tensor([[0, 1]])), ValueError, r"judgements\.texts.*\(1, 2\)"),
        (asked_with(texts=torch.tensor([0])), ValueError, r"judgements\.texts.*got \(1,\)"),
        (
            asked_with(images=torch.tensor([0, 4])),
            ValueError,
            r"relevant\.images.*0 to 3, got 0 to 4",
        ),
        (
            asked_with(texts=torch.tensor([-1, 4])),
            ValueError,
            r"judgements\.texts.*from 0 to .*, got -1 to 4",
        ),
        (asked_with(images=torch.tensor([]).long()), ValueError, r"judgements\.images.*got 0"),
        (asked_with(grades=torch.tensor([1.0])), ValueError, r"judgements\.grades.*\(2,\).*\(1,\)"),
        (
            asked_with(grades=torch.tensor([1.0, math.nan])),
            ValueError,
            r"judgements\.grades.*finite",
        ),
        (asked_with(grades=torch.tensor([2.0, 2.0])), ValueError, "judgements.*two different"),
        (asked_with(relevant=2.1), ValueError, r"grade.*2\.1"),
        (asked_with(scores=torch.full((4, 7), math.nan)), ValueError, "scores.*finite"),
        (
            lambda: retrieval_results((PERFECT, PERFECT), reranker=FastReranker()),
            ValueError,
            "reranker.*pair of scores",
        ),
        (
            lambda: retrieval_results(PERFECT, relevant=FEW[:2], folds=2),
            ValueError,
            "folds.*relevant",
        ),
        (
            lambda: retrieval_results(PERFECT, relevant=(FEW.images, FEW.texts[1:])),
            ValueError,
            r"relevant\.texts.*49",
        ),
        (lambda: agreement(PERFECT[:, :3], FEW), ValueError, r"judgements\.texts.*0 to 2"),
        (lambda: agreement(PERFECT, FEW, k=0), ValueError, "k: .*0"),
        (lambda: agreement(torch.rand(4), FEW), ValueError, "scores"),
        (lambda: retrieval_metrics(PERFECT, folds=3), ValueError, "folds.*divisor of the 4.*3"),
        (lambda: retrieval_results(PERFECT, folds=3), ValueError, "folds.*divisor of the 4.*3"),
        (lambda: retrieval_results(PERFECT, folds=0), ValueError, "folds.*0"),
        (
            lambda: retrieval_results(PERFECT, folds=2, reranker=FastReranker().fit(PERFECT)),
            ValueError,
            "folds: banks",
        ),
        (
            lambda: retrieval_metrics(PERFECT, folds=2, reranker=FastReranker().fit(PERFECT)),
            ValueError,
            "folds: banks",
        ),
        (lambda: retrieval_metrics(PERFECT, folds=0), ValueError, "folds.*0"),
        (lambda: retrieval_metrics(PERFECT, folds=2.0), TypeError, r"folds.*2\.0"),  # type: ignore[arg-type]
        (
            lambda: retrieval_metrics(PERFECT[:, :2], torch.arange(4), torch.arange(2), folds=2),
            ValueError,
            "2 to 3",
        ),
        *(
            (lambda x=x: confidence_intervals(ONE, level=x), ValueError, f"level.*{x}")
            for x in (0, 1, 1.5, math.nan)
        ),
        (lambda: compare(ONE, ONE, level="high"), TypeError, "level.*high"),  # type: ignore[arg-type]
        (lambda: confidence_intervals(ONE, samples=0), ValueError, "samples.*0"),
        (lambda: compare(ONE, ONE, samples=1.5), TypeError, r"samples.*1\.5"),  # type: ignore[arg-type]
        (lambda: compare(ONE, retrieval_results(PERFECT[:2, :10])), ValueError, "others.*i2t"),
        (
            lambda: compare(ONE, retrieval_results(PERFECT, torch.arange(4), torch.arange(20) % 4)),
            ValueError,
            "t2i",
        ),
        (
            lambda: compare(ONE, retrieval_results(PERFECT, relevant=FEW.at_least(4))),
            ValueError,
            "others.*i2t",
        ),
        (lambda: confidence_intervals(UNANSWERED), ValueError, "results.*no query"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(
    not SHARED.exists(),
    reason="Flickr8k's expert judgements are not there: ../shared/data is absent",
)
@pytest.mark.slow
def test_flickr8k_experts_agree_with_a_linear_model():
    """Captions that three experts found suitable for other pictures retrieve these pictures before
    their own.
    """
    pytest.importorskip("scipy")
    names = (SHARED / "flickr8k" / "test_images.txt").read_text().split()
    row = {name: i for i, name in enumerate(names)}
    images, texts, grades = [], [], []
    for line in (SHARED / "flickr8k" / "ExpertAnnotations.txt").read_text().splitlines():
        image, caption, *ratings = line.split()
        name, number = caption.split("#")
        if name in row:
            images += [row[image]] * 3
            texts += [5 * row[name] + int(number)] * 3
            grades += map(int, ratings)
    judgements = Judgements(*(torch.tensor(x) for x in (images, texts, grades)))
    v, w = (
        torch.from_numpy(np.load(SHARED / "cca" / f"test_{x}_emb.npy")).float()
        for x in ("image", "text")
    )
    sim = Similarity(
        v, w, torch.arange(1000), torch.arange(1000).repeat_interleave(5), engine="tiled"
    )
    found = agreement(sim, judgements)
    assert found.tau > 0.3 and found.i2t_ndcg > 5 and found.t2i_ndcg > 10
    shuffled = agreement(sim, judgements._replace(texts=(judgements.texts + 2500) % 5000))
    assert abs(shuffled.tau) < 0.1 and shuffled.t2i_ndcg < found.t2i_ndcg / 3
    results = retrieval_results(sim, relevant=judgements.at_least(3))
    assert 0 < (results.i2t.positives > 0).sum() < 1000 and results.metrics()["t2i_r10"] > 10


def test_folds_of_inner_products_are_those_of_their_matrix():
    v, w = (
        torch.randn(n, 3, generator=generator(n)) * (1 + torch.arange(n))[:, None] for n in (8, 16)
    )
    ids = torch.arange(8), torch.arange(16) // 2
    found = retrieval_metrics(Similarity(v, w, *ids, normalize=False), folds=2)
    assert found == retrieval_metrics(v @ w.T, *ids, folds=2)


def test_no_candidate_of_a_fold_is_minus_one():
    """Texts that do not exist leave a fold short of candidates: -1, and none of another fold."""
    images = torch.tensor([0, 1, 2, itrloss.NO_ID])
    texts = torch.tensor([0, 0, 1, 1, 2, 2, itrloss.NO_ID, itrloss.NO_ID])
    results = retrieval_results(sample(4, 8).tanh(), images, texts, folds=2, hubness_k=4)
    assert sorted(results.i2t.top[0].tolist()) == [0, 1, 2, 3]
    assert sorted(results.i2t.top[2].tolist()) == [-1, -1, 4, 5]
