"""Any k, graded relevance, exclusions, candidates and ties: against loops and other tools."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.cases import sample

from itrloss import Similarity
from itrloss.metrics import (
    RetrievalResults,
    compare,
    confidence_intervals,
    retrieval_results,
    save_trec,
)

KS = (1, 3, 5, 20)
WAYS = ("i2t", "t2i")
SYSTEMS = 200


class System(NamedTuple):
    """Random scores with many ties, grades, and excluded pairs; (N, M) each."""

    scores: torch.Tensor
    grades: torch.Tensor
    excluded: torch.Tensor


def system(seed: int) -> System:
    """A system of 3 to 12 images and texts."""
    generator = torch.Generator().manual_seed(seed)
    n, m = torch.randint(3, 13, (2,), generator=generator).tolist()
    levels = int(torch.randint(2, 30, (), generator=generator))  # few: most scores tie
    scores = torch.randint(0, levels, (n, m), generator=generator).double() / 4
    grades = torch.randint(-4, 4, (n, m), generator=generator).clamp_min(0)
    excluded = torch.rand(n, m, generator=generator) < 0.2
    grades[0, 0] = 2
    excluded[0, 0] = False
    return System(scores, grades, excluded)


def evaluated(made: System, **options: Any) -> RetrievalResults:
    """The library's results, with whole lists stored."""
    every = max(made.scores.shape)
    return retrieval_results(
        made.scores, relevant=made.grades, exclude=made.excluded, hubness_k=every, **options
    )


def test_the_sum_of_recalls_has_its_own_ks():
    results = evaluated(system(1))
    of_another_k = results.metrics((2,))
    assert of_another_k["rsum"] == results.metrics()["rsum"]


# --- exclusions and candidates --------------------------------------------------------------------


@pytest.mark.parametrize("ties", ["pessimistic", "optimistic"])
def test_what_a_first_stage_missed_counts_as_missed(ties):
    images, noise = sample(2, 50, 8)
    scores = images @ (images + noise).T
    best = scores.topk(5).indices.tolist()
    found = retrieval_results(scores, candidates=best, ties=ties)
    plain = retrieval_results(scores, ties=ties).i2t.best
    assert 0 < int((plain > 5).sum()) < 50
    assert found.i2t.best.tolist() == plain.masked_fill(plain > 5, 50).tolist()
    listed_by_nobody = retrieval_results(scores, candidates=([], []), ties=ties)
    assert listed_by_nobody.t2i.best.tolist() == [50] * 50
    assert listed_by_nobody.metrics()["i2t_r10"] == 0


def test_what_is_excluded_ties_with_nobody():
    lowest = torch.finfo(torch.float32).min
    scores = torch.full((2, 3), lowest)
    right = (torch.tensor([0, 1]), torch.tensor([0, 1]))
    others = (torch.tensor([0, 1, 0, 1]), torch.tensor([1, 0, 2, 2]))
    found = retrieval_results(scores, relevant=right, exclude=others)
    assert found.i2t.ranks.tolist() == [[1], [1]]
    assert found.t2i.ranks.tolist() == [[1], [1], [0]]
    assert found.t2i.top.tolist() == [[0, -1], [1, -1], [-1, -1]]
    assert found.t2i.occurrences.tolist() == [1, 1]


# --- ties -----------------------------------------------------------------------------------------


TIED = torch.randint(0, 4, (300, 70), generator=torch.Generator().manual_seed(0)).float()
TIED_IDS = torch.arange(300), torch.arange(70) + 300


@pytest.mark.parametrize("k", [1, 2, 9, 70])
def test_the_best_of_ties_are_in_the_order_of_their_columns(k):
    sim = Similarity.from_scores(TIED, *TIED_IDS)
    for top, scores in ((sim.topk(k), TIED), (sim.T.topk(k), TIED.T)):
        wanted = scores.sort(dim=1, descending=True, stable=True)
        assert torch.equal(top.indices, wanted.indices[:, :k])
        assert torch.equal(top.values, wanted.values[:, :k])


def test_the_best_of_ties_below_a_limit_are_in_the_order_of_their_columns():
    below = Similarity.from_scores(TIED, *TIED_IDS).topk(20, below=2)
    for row, found in zip(TIED.tolist(), below.indices.tolist(), strict=True):
        order = [j for score in (1, 0) for j, x in enumerate(row) if x == score]
        assert found == (order + [-1] * 20)[:20]


def test_the_best_are_stable_where_the_host_may_not_read():
    ids = (torch.arange(6), torch.arange(30) + 6)

    @torch.compile(backend="eager")
    def five_best(scores):
        return Similarity.from_scores(scores, *ids).topk(5)

    scores = TIED[:6, :30]
    order = scores.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(five_best(scores).indices, order[:, :5])


# --- the exported run, by other tools -------------------------------------------------------------


class Files(NamedTuple):
    """The exported run and qrels of one direction, as they are read, and our figures."""

    run: dict[str, dict[str, float]]
    qrels: dict[str, dict[str, int]]
    ours: dict[str, float]


def export(seed: int, folder: Path) -> list[Files]:
    """Write the files of a random system, of both directions, and read them."""
    ties = "optimistic" if seed % 3 == 2 else "pessimistic"
    results = evaluated(system(seed), ties=ties)
    save_trec(results, folder)
    files = []
    for way, side in results.ways.items():
        files.append(Files(*_read(folder, way), side.metrics(KS)))
    return files


@pytest.fixture(params=range(SYSTEMS))
def exported(request, tmp_path) -> list[Files]:
    return export(request.param, tmp_path)


def _read(folder: Path, way: str) -> tuple[Any, Any]:
    """The run and the qrels of a direction."""
    run: dict[str, dict[str, float]] = defaultdict(dict)
    qrels: dict[str, dict[str, int]] = defaultdict(dict)
    for line in Path(folder, f"{way}.run").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        run[query][document] = float(score)
    for line in Path(folder, f"{way}.qrels").read_text().splitlines():
        query, _, document, grade = line.split()
        qrels[query][document] = int(grade)
    return dict(run), dict(qrels)


def check(ours: dict[str, float], name: str, theirs: list[float]) -> None:
    """Fail unless the mean of another tool's fractions is our percentage."""
    mean = math.fsum(theirs) / len(theirs)
    assert 100 * mean == pytest.approx(ours[name], rel=1e-13, abs=1e-11), name


def test_exported_scores_never_tie(exported):
    for files in exported:
        for best in files.run.values():
            assert len(set(best.values())) == len(best)


def test_trec_eval_finds_our_figures(exported):
    trec = pytest.importorskip("pytrec_eval")
    measures = {"mrr": "recip_rank", "map": "map", "r_precision": "Rprec"}
    for k in KS:
        measures[f"r{k}"] = f"success_{k}"
        measures[f"recall_at_{k}"] = f"recall_{k}"
        measures[f"ndcg_at_{k}"] = f"ndcg_cut_{k}"
    cuts = ",".join(map(str, KS))
    asked = {f"{measure}.{cuts}" for measure in ("success", "recall", "ndcg_cut")}
    asked |= {"recip_rank", "map", "Rprec"}
    for files in exported:
        evaluator = trec.RelevanceEvaluator(files.qrels, asked)
        of_each_query = evaluator.evaluate(files.run).values()
        for name, measure in measures.items():
            theirs = [found[measure] for found in of_each_query]
            check(files.ours, name, theirs)


@pytest.mark.slow
def test_ranx_finds_our_figures(tmp_path):
    ranx = pytest.importorskip("ranx", reason="no ranx; it compiles for half a minute")
    measures = {"mrr": "mrr", "map": "map", "r_precision": "r-precision"}
    for k in KS:
        measures[f"r{k}"] = f"hit_rate@{k}"
        measures[f"recall_at_{k}"] = f"recall@{k}"
        measures[f"ndcg_at_{k}"] = f"ndcg@{k}"
    for seed in range(SYSTEMS):
        for files in export(seed, tmp_path):
            answered = {query: files.run[query] for query in files.qrels}
            run = ranx.Run(answered)
            ranx.evaluate(ranx.Qrels(files.qrels), run, list(measures.values()))
            for name, measure in measures.items():
                theirs = [float(value) for value in run.scores[measure].values()]
                check(files.ours, name, theirs)


# --- grades ---------------------------------------------------------------------------------------


def test_files_have_lines_of_trec_whose_grades_are_whole(tmp_path):
    scores = torch.tensor([[0.2, 0.1], [0.3, 0.4]])
    grades = torch.tensor([[0.5, 0.0], [0.0, 2.0]])
    of_halves = retrieval_results(scores, relevant=grades)
    with pytest.raises(ValueError, match="results: expected grades that are whole"):
        save_trec(of_halves, tmp_path)
    whole = retrieval_results(scores, relevant=2 * grades, hubness_k=1)
    save_trec(whole, tmp_path / "new", tag="mine")
    written = (tmp_path / "new" / "i2t.qrels").read_text()
    assert written == "image0 0 text0 1\nimage1 0 text1 4\n"
    written = (tmp_path / "new" / "t2i.run").read_text()
    assert written == "text0 Q0 image1 1 1 mine\ntext1 Q0 image1 1 1 mine\n"


# --- what is built on them ------------------------------------------------------------------------


def test_metrics_of_single_queries_have_the_names_of_the_means():
    results = evaluated(system(4))
    found = results.metrics(KS)
    names = [f"r{k}" for k in KS]
    names += ["recall_at_3", "ndcg_at_20", "mrr", "map", "map_at_r"]
    for way, side in results.ways.items():
        matched = side.positives > 0
        for name in names:
            values = side.per_query(KS)[name]
            assert values.dtype == torch.float64
            assert not values[~matched].any()
            percentage = 100 * float(values[matched].mean())
            assert found[f"{way}_{name}"] == pytest.approx(percentage)
    with pytest.raises(ValueError, match="ks"):
        results.metrics((0,))


def test_intervals_and_comparisons_have_any_k():
    made = system(4)
    results = evaluated(made)
    perfect = evaluated(made._replace(scores=made.grades.double()))
    found = results.metrics((2, 7))

    intervals = confidence_intervals(results, ks=(2, 7), samples=50)
    without = {f"{way}_{name}" for way in WAYS for name in ("median_rank", "mean_rank", "skewness")}
    assert intervals.keys() == found.keys() - without
    assert "i2t_recall_at_7" in intervals
    of_usual_ks = confidence_intervals(results, samples=50)
    assert intervals["rsum"] == of_usual_ks["rsum"]

    changes = compare(perfect, results, ks=(2, 7), samples=50)
    change = changes["i2t_ndcg_at_2"]
    assert change.difference == pytest.approx(100 - found["i2t_ndcg_at_2"])
