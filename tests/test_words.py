"""Queries and documents by their names, and two sets of embeddings without ids."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import cases

import itrloss
from itrloss import CoupledMemory, Similarity, compat
from itrloss.checks import if_transposed
from itrloss.functional import set_similarity
from itrloss.metrics import retrieval_metrics, retrieval_results
from itrloss.rerank import CSLS, FastReranker

ENGINES = ["dense", "tiled"]


sample = partial(cases.sample, dtype=torch.float64)
Q, D, N = sample(6, 5), sample(6, 5, seed=1), sample(4, 5, seed=2)
IDS, GROUPS = torch.tensor([0, 1, 0, 2, 3, 1]), torch.tensor([0, 0, 0, 1, 1, 1])


def theirs(name: str) -> str:
    """What queries and documents call an argument."""
    for ours, word in (("images", "queries"), ("texts", "documents")):
        name = name.replace(ours, word)
    return name.replace("image_", "query_").replace("text_", "document_")


def filled_memory() -> CoupledMemory:
    memory = CoupledMemory(6, 5, dtype=torch.float64)
    memory.enqueue(query_keys=D, document_keys=Q, ids=IDS + 1)
    return memory


# What losses take by the names of images and texts.
BATCH: dict[str, Any] = {"images": Q, "texts": D, "image_ids": IDS, "text_ids": IDS}
WITH_MEMORY = BATCH | {"image_keys": D, "text_keys": Q, "memory": filled_memory()}
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "InfoNCE": (itrloss.InfoNCELoss(), BATCH | {"image_groups": GROUPS, "text_groups": GROUPS}),
    "negatives": (itrloss.InfoNCELoss(), BATCH | {"negatives": N, "negative_ids": IDS[:4]}),
    "triplet": (itrloss.TripletLoss(), BATCH | {"image_groups": GROUPS}),
    "DCL": (itrloss.DiversityContrastiveLoss(), BATCH),
    "scores": (itrloss.SupConLoss(), {"scores": Q @ D.T, "image_ids": IDS, "text_ids": IDS}),
    "labels": (itrloss.SupConLoss(), {"images": Q, "texts": D, "labels": IDS}),
    "targets": (itrloss.SupConLoss(), {"images": Q, "texts": D, "targets": IDS}),
    "distillation": (itrloss.DistillationLoss(), BATCH | {"teacher": Q @ D.T / 9}),
    "memory": (itrloss.MemoryInfoNCELoss(), WITH_MEMORY),
    "UTO": (itrloss.UnifiedTrainingObjective(), WITH_MEMORY),
    "matryoshka": (itrloss.Matryoshka(itrloss.InfoNCELoss(), [3, 5]), BATCH | {"negatives": N}),
    "matryoshka of a memory": (
        itrloss.Matryoshka(itrloss.MemoryInfoNCELoss(), [3, 5]),
        WITH_MEMORY,
    ),
    "normal distributions": (
        lambda **given: itrloss.PCMEPlusPlusLoss()(**given),
        {
            "images_mean": Q,
            "texts_mean": D,
            "images_log_variance": D - 2,
            "texts_log_variance": Q - 2,
            "image_ids": IDS,
            "text_ids": IDS,
        },
    ),
    "variance-aware": (
        lambda **given: itrloss.VarianceAwareLoss()(**given),
        {"image_sets": Q.view(3, 2, 5), "texts": D, "image_ids": IDS[:3], "text_ids": IDS},
    ),
    "sets": (
        set_similarity,
        {
            "images": Q.view(3, 2, 5),
            "texts": D.view(2, 3, 5),
            "image_lengths": torch.tensor([1, 2, 2]),
            "text_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        },
    ),
    "metrics": (
        lambda **given: torch.tensor(list(retrieval_metrics(Q @ D.T, **given).values())),
        {"image_ids": IDS, "text_ids": IDS},
    ),
    "results": (
        lambda **given: retrieval_results(Q @ D.T, **given).i2t.ranks,
        {"image_ids": IDS, "text_ids": IDS},
    ),
    "bank": (
        lambda **given: CSLS(2).fit(**given).rerank(Similarity(Q, D)).i2t,
        {"images": N, "texts": N},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_queries_and_documents_are_images_and_texts(name):
    call, given = CALLS[name]
    wanted = call(**given)
    assert wanted.isfinite().all()
    renamed = {theirs(word): x for word, x in given.items()}
    assert renamed.keys() != given.keys() or name == "scores"
    torch.testing.assert_close(call(**renamed), wanted, rtol=0, atol=0)
    for word in {*renamed} - {*given}:  # one of them by its other name
        ours = next(x for x in given if theirs(x) == word)
        mixed = {word if x == ours else x: value for x, value in given.items()}
        torch.testing.assert_close(call(**mixed), wanted, rtol=0, atol=0)
        if not inspect.isfunction(call):
            with pytest.raises(TypeError, match=f"{word}|by two names"):
                call(**given, **{word: given[ours]})


def test_embeddings_go_first_and_ids_by_name():
    loss = itrloss.InfoNCELoss()
    wanted = loss(Q, D, IDS, IDS)
    torch.testing.assert_close(loss(Q, D, query_ids=IDS, document_ids=IDS), wanted)
    memory = filled_memory()
    loss = itrloss.MemoryInfoNCELoss()
    found = loss(Q, D, D, Q, memory, query_ids=IDS, document_ids=IDS)
    torch.testing.assert_close(found, loss(Q, D, D, Q, memory, IDS, IDS))


@pytest.mark.parametrize(
    ("loss", "given", "message"),
    [
        (itrloss.InfoNCELoss(), {"lables": IDS}, "unexpected .*'lables'; did you mean 'labels'"),
        (
            itrloss.SupConLoss(),
            {"query_idx": IDS},
            "unexpected keyword argument 'query_idx'; it has",
        ),
        (itrloss.SupConLoss(), {"documents": Q}, "either documents or texts, got both"),
        (itrloss.DistillationLoss(), {"labels": IDS}, "unexpected keyword argument 'labels'"),
    ],
)
def test_unknown_and_repeated_words_are_refused(loss, given, message):
    with pytest.raises(TypeError, match=message):
        loss(Q, D, **given)


def test_two_names_of_one_argument_are_refused():
    with pytest.raises(TypeError, match="retrieval_metrics: got an argument by two names"):
        retrieval_metrics(Q @ D.T, image_ids=IDS, query_ids=IDS, text_ids=IDS)


@pytest.mark.slow
def test_words_compile_as_one_graph():
    torch.compiler.reset()
    loss = itrloss.InfoNCELoss(engine="dense")
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    found = compiled(queries=Q, documents=D, query_ids=IDS, document_ids=IDS)
    torch.testing.assert_close(found, loss(Q, D, IDS, IDS))


WORDS = {
    "image-text": ["i2t", "v2t", "query-document"],
    "text-image": ["t2i", "t2v", "document-query"],
}


@pytest.mark.parametrize("directions", WORDS)
def test_synonyms_of_directions(directions):
    wanted = itrloss.InfoNCELoss(directions=directions)(Q, D)
    memory = filled_memory()
    of_memory = itrloss.MemoryInfoNCELoss(directions=directions)(Q, D, D, Q, memory, IDS, IDS)
    for word in WORDS[directions]:
        loss = itrloss.InfoNCELoss(directions=word)
        assert loss.directions == directions
        torch.testing.assert_close(loss(Q, D), wanted)
        loss = itrloss.MemoryInfoNCELoss(directions=word)
        torch.testing.assert_close(loss(Q, D, D, Q, memory, IDS, IDS), of_memory)
        values = Similarity(Q, D).towards(word).logsumexp(3.0)
        torch.testing.assert_close(values, Similarity(Q, D).towards(directions).logsumexp(3.0))


COSINES = F.normalize(Q, dim=1) @ F.normalize(D, dim=1).T


def test_losses_of_scores_have_a_neutral_name():
    criterion = compat.adapt(itrloss.InfoNCELoss(), "scores")
    torch.testing.assert_close(criterion(COSINES), itrloss.InfoNCELoss()(Q, D))
    with pytest.raises(ValueError, match=r"^score_function: expected None for 'scores'"):
        compat.adapt(itrloss.InfoNCELoss(), "scores", torch.matmul)


def test_opt_of_descendants_of_sgraf_has_no_effect():
    wanted = compat.SGRAFLoss(0.2, True)(COSINES)
    found = compat.SGRAFLoss(opt=object(), margin=0.2, max_violation=True)(COSINES)
    torch.testing.assert_close(found, wanted)


# ------------------------------------------------------------------------------------- without ids


@pytest.fixture(params=ENGINES)
def apart(request, small_tiles) -> Similarity:
    """Queries and candidates in different numbers, of which nothing says who matches."""
    return Similarity(Q, N, engine=request.param)


def test_sets_of_two_sizes_need_no_ids_to_be_ranked(apart):
    scores = F.normalize(Q, dim=1) @ F.normalize(N, dim=1).T
    best = scores.topk(2)
    for sim in (apart, Similarity.from_scores(scores)):
        assert sim.shape == (6, 4) and sim.ids == (None, None)
        torch.testing.assert_close(sim.scores(), scores)
        assert sim.topk(2).indices.equal(best.indices)
        assert sim.T.topk(1).indices[:, 0].equal(scores.argmax(0))
        torch.testing.assert_close(sim.topk(2).values, best.values)
        everybody = sim.logsumexp(3.0, over="all")
        torch.testing.assert_close(everybody, torch.logsumexp(3 * scores, 1))
    reranked = CSLS(2).rerank(apart)
    torch.testing.assert_close(reranked.i2t, CSLS(2).rerank(scores).i2t)
    assert CSLS(2).topk(apart, 3).i2t.indices.equal(CSLS(2).topk(scores, 3).i2t.indices)
    FastReranker().fit(D, D).rerank(apart)


def test_relevance_in_place_of_ids(apart):
    right = torch.tensor([0, 2, 5]), torch.tensor([3, 0, 1])
    sim = Similarity(Q, N, torch.arange(6), torch.arange(4) + 10)
    for options in ({}, {"reranker": CSLS(2)}):
        found = retrieval_metrics(apart, relevant=right, **options)
        assert found == retrieval_metrics(sim, relevant=right, **options)
    lists = [[3], [], [0], [], [], [1]]
    assert retrieval_metrics(apart, relevant=lists) == retrieval_metrics(sim, relevant=right)


QUESTIONS = {
    "positives": lambda sim: sim.positive_counts,
    "negatives": lambda sim: sim.negative_counts,
    "log-sum-exp": lambda sim: sim.logsumexp(3.0),
    "hardest": lambda sim: sim.T.hardest_negatives(),
    "ranks": lambda sim: sim.ranks(),
    "both": lambda sim: sim.both.mean_of_positives(itrloss.terms.identity),
    "InfoNCE": lambda sim: itrloss.InfoNCELoss()(sim),
    "sigmoid": lambda sim: itrloss.SigmoidLoss()(sim),
    "triplet": lambda sim: itrloss.TripletLoss()(sim),
    "figures": itrloss.describe,
    "metrics": retrieval_metrics,
    "mean": lambda sim: sim.mean_std(),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_who_matches_is_an_error_without_ids(name, apart):
    with pytest.raises(ValueError, match=r"^row_ids, col_ids: needed for 6 rows and 4 cols"):
        QUESTIONS[name](apart)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["InfoNCE", "DCL", "triplet", "scores", "memory"])
def test_losses_say_which_ids_they_need(name, engine):
    loss, given = CALLS[name]
    loss = copy.deepcopy(loss)
    loss.engine = engine
    given = {word: x for word, x in given.items() if "ids" not in word and "groups" not in word}
    for word in ("texts", "text_keys"):
        if word in given:
            given[word] = given[word][:4]
    if name == "scores":
        given["scores"] = given["scores"][:, :4]
    if name == "memory":
        given["memory"] = CoupledMemory(6, 5, dtype=torch.float64)
        given["memory"].enqueue(Q, D)
    with pytest.raises(ValueError, match=r"^image_ids, text_ids: needed for 6 images and 4 texts"):
        loss(**given)


@pytest.mark.parametrize(("n", "m"), [(4, 0), (4, 3), (4, 4), (4, 8)])
def test_nothing_is_said_of_a_transpose_that_would_not_fit(n: int, m: int):
    """A process of a job may have no texts."""
    assert if_transposed(n, m) == ""


@pytest.mark.parametrize(
    "call",
    [
        lambda scores: retrieval_metrics(scores),
        lambda scores: itrloss.InfoNCELoss()(scores=scores),
        lambda scores: Similarity.from_scores(scores).positive_counts,
    ],
)
def test_texts_as_rows_are_told_from_images(call):
    with pytest.raises(ValueError, match=r"needed for 240 .*pass the transpose, scores.T"):
        call(torch.randn(240, 60))
    with pytest.raises(ValueError) as caught:
        call(torch.randn(240, 70))
    assert "transpose" not in str(caught.value)
