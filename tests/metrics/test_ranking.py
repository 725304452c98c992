"""Any k, graded relevance, exclusions, candidates and ties: against loops and other tools."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import oracle_ranking

from itrloss import Similarity, metrics
from itrloss.engine import inputs
from itrloss.metrics import (
    Judgements,
    RetrievalResults,
    compare,
    confidence_intervals,
    latex_table,
    retrieval_metrics,
    retrieval_results,
    save_trec,
)
from itrloss.rerank import CSLS, DualSoftmax, FastReranker

KS = (1, 3, 5, 20)
WAYS = ("i2t", "t2i")
SYSTEMS = 200


class System(NamedTuple):
    """Random scores with many ties, grades, and excluded pairs; (N, M) each."""

    scores: torch.Tensor
    grades: torch.Tensor
    excluded: torch.Tensor

    def of(self, way: str) -> System:
        """The system with the queries of a direction as rows."""
        return self if way == "i2t" else System(*(x.T for x in self))

    def lists(self, way: str, ties: str = "pessimistic") -> list[list[int]]:
        """Each query's candidates by the loops, best first."""
        ranked = []
        for scores, grades, excluded in zip(*self.of(way), strict=True):
            out = excluded.nonzero()[:, 0].tolist()
            ranked.append(oracle_ranking.order(scores.tolist(), grades.tolist(), out, ties))
        return ranked

    def figures(self, ks=KS, ties: str = "pessimistic") -> dict[str, float]:
        """The loops' figures of both directions."""
        found = {}
        for way in WAYS:
            grades = self.of(way).grades.tolist()
            lists = self.lists(way, ties)
            ranked = [[own[c] for c in best] for own, best in zip(grades, lists, strict=True)]
            for name, value in oracle_ranking.figures(ranked, ks).items():
                found[f"{way}_{name}"] = value
        return found


def system(seed: int) -> System:
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


@pytest.fixture
def tiny_blocks(small_tiles, monkeypatch):
    """A few rows of scores at a time."""
    monkeypatch.setitem(inputs.TILE, "cpu", (10, 2))
    monkeypatch.setattr("itrloss.engine.matrix.CONVERTED_AT_ONCE", 20)
    monkeypatch.setattr(Similarity.blocks, "__defaults__", (30,))


def means_over_queries(found: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in found.items() if "skewness" not in name and name != "rsum"}


# --- against the loops ----------------------------------------------------------------------------


@pytest.mark.parametrize("ties", ["pessimistic", "optimistic"])
@pytest.mark.parametrize("many", [False, True])
def test_graded_lists_with_exclusions_equal_the_loops(ties, many, monkeypatch, tiny_blocks):
    if many:  # positives are compared with their rivals by sorting, and all is sorted as on a GPU
        monkeypatch.setattr("itrloss.engine.ranking.MANY", 0)
        monkeypatch.setattr("itrloss.engine.ranking.host_may_read", lambda x: False)
    for seed in range(60):
        made = system(seed)
        found = evaluated(made, ties=ties)
        assert means_over_queries(found.metrics(KS)) == pytest.approx(made.figures(ties=ties))
        for way, side in found.ways.items():
            width = side.top.shape[1]
            lists = [x + [-1] * (width - len(x)) for x in made.lists(way, ties)]
            assert side.top.tolist() == lists


def test_scores_of_embeddings_are_ranked_like_their_matrix(tiny_blocks):
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randint(-1, 2, (k, 3), generator=generator).double() for k in (9, 14))
    for seed in range(5):
        drawn = torch.Generator().manual_seed(seed)
        grades = torch.randint(-3, 3, (9, 14), generator=drawn).clamp_min(0)
        made = System(images @ texts.T, grades, torch.rand(9, 14, generator=drawn) < 0.3)
        for engine in ("dense", "tiled"):
            sim = Similarity(
                images, texts, torch.arange(9), torch.arange(14), normalize=False, engine=engine
            )
            found = retrieval_results(sim, relevant=grades, exclude=made.excluded)
            assert means_over_queries(found.metrics(KS)) == pytest.approx(made.figures())


@pytest.mark.parametrize("reranker", [FastReranker(), CSLS(k=3), DualSoftmax()])
def test_reranked_scores_are_ranked_by_the_same_rule(reranker, tiny_blocks):
    made = system(3)
    made = made._replace(scores=made.scores.round())
    found = retrieval_metrics(
        made.scores, ks=KS, relevant=made.grades, exclude=made.excluded, reranker=reranker
    )
    i2t, t2i = reranker.rerank(made.scores)
    for way, scores in zip(WAYS, (i2t, t2i), strict=True):
        wanted = made._replace(scores=scores).figures()
        for name, value in means_over_queries(found).items():
            if name.startswith(way):
                assert value == pytest.approx(wanted[name]), name


def test_hit_rate_and_recall_have_their_own_names():
    scores = torch.tensor([[5.0, 0, 0, 0, 0, 4, 3, 2, 1]])
    right = torch.zeros(5).long(), torch.arange(5)
    found = retrieval_metrics(scores, relevant=right, ks=(1, 9))
    assert found["i2t_r1"] == 100 and found["i2t_recall_at_1"] == pytest.approx(20)
    assert found["i2t_r9"] == found["i2t_recall_at_9"] == 100
    assert "i2t_r5" not in found and "i2t_ndcg_at_9" in found


def test_the_sum_of_recalls_has_its_own_ks():
    made = system(1)
    assert evaluated(made).metrics((2,))["rsum"] == evaluated(made).metrics()["rsum"]


# --- exclusions and candidates --------------------------------------------------------------------


def forms(mask: torch.Tensor) -> list[Any]:
    images, texts = mask.nonzero(as_tuple=True)
    lists = [row.nonzero()[:, 0].tolist() for row in mask]
    return [mask, mask.numpy(), (images, texts), (images.tolist(), texts.tolist()), lists]


@pytest.mark.parametrize("form", range(5))
def test_exclusions_and_candidates_are_masks_pairs_or_lists(form):
    for seed in range(8):
        made = system(seed)
        kept = ~made.excluded
        other = torch.rand(kept.shape, generator=torch.Generator().manual_seed(seed)) < 0.1
        other[0, 0] = False
        options = {"relevant": made.grades, "ks": KS}
        by_exclusion = retrieval_metrics(made.scores, exclude=forms(made.excluded)[form], **options)
        by_candidates = retrieval_metrics(made.scores, candidates=forms(kept)[form], **options)
        assert by_exclusion == by_candidates
        assert means_over_queries(by_exclusion) == pytest.approx(made.figures())
        both = retrieval_metrics(
            made.scores, candidates=forms(kept)[form], exclude=forms(other)[form], **options
        )
        wanted = made._replace(excluded=made.excluded | other).figures()
        assert means_over_queries(both) == pytest.approx(wanted)


def test_what_is_excluded_ties_with_nobody():
    lowest = torch.finfo(torch.float32).min
    scores = torch.full((2, 3), lowest)
    right = torch.tensor([0, 1]), torch.tensor([0, 1])
    others = torch.tensor([0, 1, 0, 1]), torch.tensor([1, 0, 2, 2])
    found = retrieval_results(scores, relevant=right, exclude=others)
    assert found.i2t.ranks.tolist() == [[1], [1]] and found.t2i.ranks.tolist() == [[1], [1], [0]]
    assert found.t2i.top.tolist() == [[0, -1], [1, -1], [-1, -1]]
    assert found.t2i.occurrences.tolist() == [1, 1]


def test_ids_say_who_is_right_beside_exclusions():
    """As in composed retrieval: row i asks with picture i, which is no candidate."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 6, generator=generator) + 9 * torch.eye(6)
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    itself = torch.arange(6), torch.arange(6)
    found = retrieval_metrics(scores, ids, ids, exclude=itself)
    grades = (ids[:, None] == ids).long()
    wanted = System(scores, grades, torch.eye(6) > 0).figures((1, 5, 10))
    assert means_over_queries(found) == pytest.approx(wanted)
    assert retrieval_metrics(scores, ids, ids)["i2t_r1"] == 100 > found["i2t_r1"]


def test_a_right_candidate_that_is_excluded_does_not_exist():
    scores = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(3), torch.tensor([0, 1, 2, 0])
    found = retrieval_results(scores, *ids, exclude=(torch.tensor([0, 1]), torch.tensor([3, 1])))
    assert found.i2t.positives.tolist() == [1, 0, 1] and found.t2i.positives.tolist() == [
        1,
        0,
        1,
        0,
    ]
    with pytest.raises(ValueError, match="no query"):
        retrieval_metrics(scores, *ids, candidates=([0], [1]))


# --- ties -----------------------------------------------------------------------------------------


def test_the_best_are_in_the_order_of_their_columns_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (300, 70), generator=generator).float()
    ids = torch.arange(300), torch.arange(70) + 300
    sim = Similarity.from_scores(scores, *ids)
    for k in (1, 2, 9, 70):
        top = sim.topk(k)
        wanted = scores.sort(dim=1, descending=True, stable=True)
        assert torch.equal(top.indices, wanted.indices[:, :k])
        assert torch.equal(top.values, wanted.values[:, :k])
        for i in (0, 7, 299):
            alone = Similarity.from_scores(scores[i : i + 1], ids[0][:1], ids[1]).topk(k)
            assert torch.equal(alone.indices, top.indices[i : i + 1])
        columns = sim.T.topk(k)
        wanted = scores.T.sort(dim=1, descending=True, stable=True)
        assert torch.equal(columns.indices, wanted.indices[:, :k])
    below = sim.topk(20, below=2)
    for row, found in zip(scores, below.indices.tolist(), strict=True):
        order = [j for value in (1, 0) for j in (row == value).nonzero()[:, 0].tolist()]
        assert found == (order + [-1] * 20)[:20]


def test_the_best_are_stable_where_the_host_may_not_read():
    compiled = torch.compile(lambda x: Similarity.from_scores(x, *ids).topk(5), backend="eager")
    scores = torch.randint(0, 3, (6, 30), generator=torch.Generator().manual_seed(0)).float()
    ids = torch.arange(6), torch.arange(30) + 6
    wanted = scores.sort(dim=1, descending=True, stable=True).indices[:, :5]
    assert torch.equal(compiled(scores).indices, wanted)


@pytest.mark.parametrize("ties", ["pessimistic", "optimistic"])
def test_stored_candidates_follow_the_rule_of_the_ranks(ties):
    scores = torch.zeros(2, 5)
    grades = torch.tensor([[0, 2, 0, 1, 0], [0, 0, 0, 0, 1]])
    found = retrieval_results(scores, relevant=grades, ties=ties)
    lists = {"pessimistic": [0, 2, 4, 3, 1], "optimistic": [1, 3, 0, 2, 4]}
    assert found.i2t.top[0].tolist() == lists[ties]
    assert found.i2t.ranks[0].tolist() == ([4, 5] if ties == "pessimistic" else [1, 2])
    assert found.i2t.grades is not None
    assert found.i2t.grades[0].tolist() == ([1, 2] if ties == "pessimistic" else [2, 1])


# --- the exported run, by other tools -------------------------------------------------------------


class Files(NamedTuple):
    """The exported run and qrels of one direction, as they are read, and our figures."""

    run: dict[str, dict[str, float]]
    qrels: dict[str, dict[str, int]]
    ours: dict[str, float]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> list[Files]:
    """The files of random systems, in both directions."""
    folder = tmp_path_factory.mktemp("trec")
    found = []
    for seed in range(SYSTEMS):
        made = system(seed)
        ties = "optimistic" if seed % 3 == 2 else "pessimistic"
        results = evaluated(made, ties=ties)
        save_trec(results, folder)
        for way, side in results.ways.items():
            ours = side.metrics(KS)
            wanted = made.figures(ties=ties)
            for name, value in ours.items():
                if name != "skewness":
                    assert value == pytest.approx(wanted[f"{way}_{name}"])
            found.append(Files(*_read(folder, way), ours))
    return found


def _read(folder: Path, way: str) -> tuple[Any, Any]:
    run: dict[str, dict[str, float]] = {}
    qrels: dict[str, dict[str, int]] = {}
    for line in Path(folder, f"{way}.run").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        run.setdefault(query, {})[document] = float(score)
    for line in Path(folder, f"{way}.qrels").read_text().splitlines():
        query, _, document, grade = line.split()
        qrels.setdefault(query, {})[document] = int(grade)
    return run, qrels


def check(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Fail unless another tool's means, as fractions, are our percentages to the last digits."""
    for name, value in theirs.items():
        assert 100 * value == pytest.approx(ours[name], rel=1e-13, abs=1e-11), name


@pytest.mark.slow
def test_exported_scores_never_tie(exported):
    for files in exported:
        for best in files.run.values():
            assert len(set(best.values())) == len(best)


def test_trec_eval_finds_our_figures(exported):
    trec = pytest.importorskip("pytrec_eval")
    measures = {
        **{f"r{k}": f"success_{k}" for k in KS},
        **{f"recall_at_{k}": f"recall_{k}" for k in KS},
        **{f"ndcg_at_{k}": f"ndcg_cut_{k}" for k in KS},
        **{"mrr": "recip_rank", "map": "map", "r_precision": "Rprec"},
    }
    cuts = ",".join(map(str, KS))
    asked = {f"{x}.{cuts}" for x in ("success", "recall", "ndcg_cut")}
    for files in exported:
        evaluator = trec.RelevanceEvaluator(files.qrels, asked | {"recip_rank", "map", "Rprec"})
        each = evaluator.evaluate(files.run).values()
        theirs = {}
        for name, measure in measures.items():
            theirs[name] = math.fsum(x[measure] for x in each) / len(each)
        check(files.ours, theirs)


def test_ranx_finds_our_figures(exported):
    ranx = pytest.importorskip(
        "ranx", reason="no ranx; with it installed, this takes half a minute of compiling"
    )
    measures = {
        **{f"r{k}": f"hit_rate@{k}" for k in KS},
        **{f"recall_at_{k}": f"recall@{k}" for k in KS},
        **{f"ndcg_at_{k}": f"ndcg@{k}" for k in KS},
        **{"mrr": "mrr", "map": "map", "r_precision": "r-precision"},
    }
    run, qrels = {}, {}  # of all systems together: ranx takes a while to start
    for number, files in enumerate(exported):
        for query, right in files.qrels.items():
            qrels[f"{number} {query}"] = right
            run[f"{number} {query}"] = files.run[query]
    of_all = ranx.Run(run)
    ranx.evaluate(ranx.Qrels(qrels), of_all, list(measures.values()))
    for number, files in enumerate(exported):
        theirs = {}
        for name, measure in measures.items():
            each = [float(of_all.scores[measure][f"{number} {query}"]) for query in files.qrels]
            theirs[name] = math.fsum(each) / len(each)
        check(files.ours, theirs)


def _vectors(files: Files) -> list[tuple[list[float], list[int]]]:
    """The scores of each answered query's candidates, and their grades, in no special order."""
    vectors = []
    for query, right in files.qrels.items():
        best = sorted(files.run[query].items())
        assert set(right) <= set(files.run[query])
        vectors.append(([s for _, s in best], [right.get(document, 0) for document, _ in best]))
    return vectors


@pytest.mark.slow
def test_scikit_learn_finds_our_figures(exported):
    sklearn = pytest.importorskip("sklearn")
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        for files in exported:
            each = [_scikit_learn(*vectors) for vectors in _vectors(files)]
            names = each[0]
            check(files.ours, {x: math.fsum(found[x] for found in each) / len(each) for x in names})


def _scikit_learn(scores: list[float], grades: list[int]) -> dict[str, float]:
    from sklearn import metrics as tools

    binary = [int(grade > 0) for grade in grades]
    found = {"map": float(tools.average_precision_score(binary, scores))}
    for k in (3, 20):
        found[f"ndcg_at_{k}"] = 1.0  # it refuses single candidates
        if len(scores) > 1:
            found[f"ndcg_at_{k}"] = float(tools.ndcg_score([grades], [scores], k=k))
    return found


def test_torchmetrics_finds_our_figures(exported):
    """It computes in float32."""
    retrieval = pytest.importorskip("torchmetrics.functional.retrieval")
    for files in exported[::5]:
        theirs: dict[str, list[float]] = {}
        for scores, grades in _vectors(files):
            preds, target = torch.tensor(scores), torch.tensor(grades)
            right = target > 0
            found = {
                "mrr": retrieval.retrieval_reciprocal_rank(preds, right),
                "map": retrieval.retrieval_average_precision(preds, right),
                "r_precision": retrieval.retrieval_r_precision(preds, right),
            }
            for k in KS:
                found[f"r{k}"] = retrieval.retrieval_hit_rate(preds, right, top_k=k)
                found[f"recall_at_{k}"] = retrieval.retrieval_recall(preds, right, top_k=k)
                found[f"ndcg_at_{k}"] = retrieval.retrieval_normalized_dcg(preds, target, top_k=k)
            for name, value in found.items():
                theirs.setdefault(name, []).append(float(value))
        for name, x in theirs.items():
            assert 100 * math.fsum(x) / len(x) == pytest.approx(files.ours[name], rel=1e-5), name


def test_tools_that_break_ties_by_name_or_at_random_would_find_other_figures(exported):
    """The scores as they were have ties that trec_eval resolves by the names of documents."""
    trec = pytest.importorskip("pytrec_eval")
    different = 0
    for seed in range(0, SYSTEMS, 3):
        made, files = system(seed), exported[2 * seed]
        run = {}
        for query, best in files.run.items():
            row = made.scores[int(query.removeprefix("image"))]
            run[query] = {text: float(row[int(text.removeprefix("text"))]) for text in best}
        each = trec.RelevanceEvaluator(files.qrels, {"recip_rank"}).evaluate(run).values()
        mrr = 100 * math.fsum(x["recip_rank"] for x in each) / len(each)
        different += abs(mrr - files.ours["mrr"]) > 1e-6
    assert different > SYSTEMS / 6


# --- grades ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_grades_are_a_matrix_dense_or_sparse_or_judgements():
    made = system(5)
    images, texts = made.grades.nonzero(as_tuple=True)
    wanted = retrieval_metrics(made.scores, relevant=made.grades)
    for relevant in (
        made.grades.float(),
        made.grades.numpy(),
        made.grades.to_sparse(),
        made.grades.double().to_sparse_csr(),
        Judgements(images, texts, made.grades[images, texts]),
    ):
        assert retrieval_metrics(made.scores, relevant=relevant) == wanted
    binary = retrieval_metrics(made.scores, relevant=made.grades > 0)
    assert binary == retrieval_metrics(made.scores, relevant=(images, texts))
    assert binary["i2t_ndcg_at_5"] != wanted["i2t_ndcg_at_5"] and binary["i2t_map"] <= 100


def test_grades_of_run_files_are_whole(tmp_path):
    grades = torch.tensor([[0.5, 0.0], [0.0, 2.0]])
    found = retrieval_results(torch.rand(2, 2), relevant=grades)
    with pytest.raises(ValueError, match="results: expected grades that are whole"):
        save_trec(found, tmp_path)
    save_trec(retrieval_results(torch.rand(2, 2), relevant=2 * grades), tmp_path)
    assert (tmp_path / "i2t.qrels").read_text() == "image0 0 text0 1\nimage1 0 text1 4\n"


# --- what is built on them ------------------------------------------------------------------------


def test_metrics_of_single_queries_have_the_names_of_the_means():
    results = evaluated(system(4))
    found = results.metrics(KS)
    for way, side in results.ways.items():
        matched = side.positives > 0
        for name in (*(f"r{k}" for k in KS), "recall_at_3", "ndcg_at_20", "mrr", "map", "map_at_r"):
            values = side.per_query(name)
            assert values.dtype == torch.float64 and not values[~matched].any()
            assert found[f"{way}_{name}"] == pytest.approx(100 * float(values[matched].mean()))
    for name in ("r0", "recall", "precision_at_3", "r05"):
        with pytest.raises(ValueError, match=f"name: .*{name}"):
            results.i2t.per_query(name)


def test_intervals_comparisons_and_tables_have_any_k():
    results, other = (
        evaluated(system(4)),
        evaluated(system(4)._replace(scores=system(4).grades * 1.0)),
    )
    intervals = confidence_intervals(results, ks=(2, 7), samples=50)
    found = results.metrics((2, 7))
    shares = {f"{w}_{x}" for w in WAYS for x in ("median_rank", "mean_rank", "skewness")}
    assert intervals.keys() == found.keys() - shares and "i2t_recall_at_7" in intervals
    assert intervals["rsum"] == confidence_intervals(results, samples=50)["rsum"]
    change = compare(other, results, ks=(2, 7), samples=50)["i2t_ndcg_at_2"]
    assert change.difference == pytest.approx(100 - found["i2t_ndcg_at_2"])
    lines = latex_table({"a": results}, ks=(2, 7)).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrr}"
    assert lines[3] == r" & R@2 & R@7 & R@2 & R@7 & RSUM \\"
    assert rf"\textbf{{{found['t2i_r7']:.1f}}}" in lines[5]


def test_batches_have_any_k():
    pytest.importorskip("torchmetrics")
    images, texts = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    metric = metrics.RetrievalMetrics(ks=(2, 7))
    metric.update(images, texts)
    found = {name: float(x) for name, x in metric.compute().items()}
    assert found == retrieval_metrics(Similarity(images, texts), ks=(2, 7))
    with pytest.raises(ValueError, match="ks"):
        metrics.RetrievalMetrics(ks=(0,))


S = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
RIGHT = (torch.arange(3), torch.arange(3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ks": ()}, ValueError, "ks: expected at least one"),
        ({"ks": (1, 0)}, ValueError, "ks: expected at least 1, got 0"),
        ({"ks": 5}, TypeError, r"ks: expected numbers such as \(1, 5, 10\), got 5"),
        ({"ks": (1.5,)}, TypeError, r"ks: .*1\.5"),
        ({"exclude": torch.ones(3, 4)}, ValueError, r"exclude: expected a bool matrix \(3, 4\)"),
        ({"exclude": torch.ones(4, 3).bool()}, ValueError, r"exclude: .*\(4, 3\)"),
        ({"exclude": ([0], [4])}, ValueError, r"exclude\.texts: .*0 to 3, got 4"),
        ({"candidates": ([3], [0])}, ValueError, r"candidates\.images: .*0 to 2, got 3"),
        ({"candidates": ([0, 1], [0])}, ValueError, r"candidates\.texts: .*\(2,\)"),
        ({"candidates": [[0], [1]]}, ValueError, "candidates: expected a list .* 3 images, got 2"),
        ({"candidates": [0, 1, 2]}, TypeError, "candidates: expected a list of the texts .* got 0"),
        ({"exclude": "diagonal"}, TypeError, "exclude: expected .* got str"),
        ({"relevant": torch.ones(4, 3)}, ValueError, r"relevant: expected shape \(3, 4\)"),
        ({"relevant": torch.zeros(3, 4)}, ValueError, "relevant: expected grades above 0"),
        ({"relevant": -torch.ones(3, 4)}, ValueError, "relevant: expected grades of at least 0"),
        ({"relevant": S.log() * math.nan}, ValueError, "relevant: expected finite"),
        ({"relevant": "all"}, TypeError, "relevant: expected .* got str"),
        ({"relevant": RIGHT, "folds": 3}, ValueError, "folds: expected 1 with relevant, excluded"),
        ({"exclude": RIGHT, "folds": 3}, ValueError, "folds: expected 1 with relevant, excluded"),
    ],
)
def test_bad_input_is_named(options, error, message):
    with pytest.raises(error, match=message):
        retrieval_metrics(S, torch.arange(3), torch.arange(4), **options)
