"""Losses and the evaluator in the trainer of sentence-transformers, with a tiny model made here."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support.pages import snippet
from support.processes import WORLD, set_environment
from support.trainers import (
    BATCH,
    IN_TWO_PROCESSES,
    SETTINGS,
    SIZES_OF_LAYERS,
    Curve,
    assert_resumes,
    assert_same,
    assert_same_in_two_processes,
    curve,
)

import itrloss
from itrloss.metrics import confidence_intervals, retrieval_results
from itrloss.rerank import FastReranker

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

from itrloss.integrations.sentence_transformers import (
    RetrievalEvaluator,
    RetrievalLoss,
    RetrievalTrainer,
)

COLOURS = ["red", "green", "blue", "black", "white", "grey", "brown", "pink"]
THINGS = ["dog", "cat", "car", "tree", "house", "boat", "bird", "shoe"]
PAIRS = [(f"{c} {t}", f"the {t} was {c}", f"no {t} is {c}") for c in COLOURS for t in THINGS]
BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a BERT with random weights, without dropout, and its tokenizer."""
    root = tmp_path_factory.mktemp("bert")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *COLOURS,
        *THINGS,
        "the",
        "was",
        "no",
        "is",
    ]
    (root / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(root / "vocab.txt")).save_pretrained(root)
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(
        BertConfig(vocab_size=len(words), max_position_embeddings=16, **SIZES_OF_LAYERS, **off)
    ).save_pretrained(root)
    return root


def make(folder) -> SentenceTransformer:
    """The model in float64: 16 steps multiply rounding errors."""
    return SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(16)], device="cpu"
    ).double()


def data(columns: int, **more: Any) -> Dataset:
    names = ("anchor", "positive", "negative")[:columns]
    return Dataset.from_dict(
        {name: [row[i] for row in PAIRS] for i, name in enumerate(names)} | more
    )


def train(
    folder,
    loss: Any,
    tmp_path,
    columns: int = 2,
    dataset: Any = None,
    kind: Any = SentenceTransformerTrainer,
    checkpoint: str | None = None,
    **options: Any,
) -> tuple[Curve, Any]:
    """The curve of their trainer, and the trainer; ``loss`` takes the model."""
    evaluator = options.pop("evaluator", None)
    settings = SETTINGS | {"learning_rate": 1e-3} | options
    args = SentenceTransformerTrainingArguments(output_dir=str(tmp_path), **settings)
    model = make(folder)
    rows = data(columns) if dataset is None else dataset
    trainer = kind(model, args, train_dataset=rows, loss=loss(model), evaluator=evaluator)
    trainer.train(resume_from_checkpoint=checkpoint)
    return curve(trainer, model), trainer


def ours(criterion: Any, **options: Any) -> Any:
    """A function of the model that returns our loss."""
    return lambda model: RetrievalLoss(model, criterion, **options)


def around(loss: Any) -> Any:
    """Their Matryoshka around a loss of the model."""
    return lambda model: MatryoshkaLoss(model, loss(model), DIMS)


DIMS = [4, 8, 16]
one_way = itrloss.InfoNCELoss(0.05, directions="image-text")
both_ways = itrloss.InfoNCELoss(0.05)
their_both = partial(MultipleNegativesRankingLoss, **BOTH)


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([itrloss.InfoNCELoss(), itrloss.TripletLoss()])

    def forward(self, images, texts, image_ids=None, text_ids=None):
        return sum(part(images, texts, image_ids, text_ids) for part in self.parts)


class OfPairs(itrloss.PairLoss):
    def compute(self, sim):
        return sum(part.compute(sim) for part in Sum().parts)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("theirs", "own", "columns", "factor"),
    [
        (MultipleNegativesRankingLoss, ours(one_way), 2, 1),
        (their_both, ours(both_ways), 3, 2),
        (around(MultipleNegativesRankingLoss), ours(itrloss.Matryoshka(one_way, DIMS)), 3, 1),
        slow(around(their_both), ours(itrloss.Matryoshka(both_ways, DIMS)), 2, 2),
        slow(around(their_both), around(ours(both_ways)), 2, 2),
        slow(around(their_both), around(ours(both_ways, mini_batch_size=3)), 2, 2),
        slow(ours(OfPairs()), ours(Sum()), 2, 1),
        slow(ours(OfPairs()), ours(Sum(), mini_batch_size=3), 2, 1),
    ],
)
def test_the_curve_is_that_of_theirs(theirs, own, columns, factor, folder, tmp_path):
    """Directions are added, so half of the rate makes the same step."""
    options = {"columns": columns, "optim": "adamw_torch" if factor == 1 else "sgd"}
    wanted, _ = train(folder, theirs, tmp_path, learning_rate=1e-3 * factor, **options)
    found, _ = train(folder, own, tmp_path, **options)
    assert_same(found, wanted, factor)


def test_cached_gradients_are_those_of_the_whole_batch_also_of_the_losss_own_parameters(
    folder, tmp_path
):
    options = {"gradient_accumulation_steps": 2, "columns": 3, "learning_rate": 0.01}
    runs = []
    for size in (None, 3):
        loss = ours(itrloss.InfoNCELoss(0.1, learnable=True), mini_batch_size=size)
        runs.append(train(folder, loss, tmp_path, **options))
    (whole, first), (cached, second) = runs
    assert_same(cached, whole)
    assert second.loss.loss.temperature.item() == pytest.approx(first.loss.loss.temperature.item())
    assert abs(second.loss.loss.temperature.item() - 0.1) > 0.01


def curves(folder, tmp_path, gather: bool, **options: Any) -> dict[str, Curve]:
    """The curves of two losses, one with a parameter and in mini-batches."""
    learnt = itrloss.InfoNCELoss(0.1, learnable=True, gather=gather)
    cached = ours(learnt, mini_batch_size=3)
    first, trainer = train(folder, cached, tmp_path, columns=3, **options)
    assert trainer.args.world_size == (WORLD if gather else 1)
    dcl = ours(itrloss.DiversityContrastiveLoss(gather=gather))
    second, _ = train(folder, dcl, tmp_path, **options)
    first[1].extend(p.detach() for p in learnt.parameters())
    return {"infonce": first, "dcl": second}


def in_a_process(rank: int, folder: str, tmp_path: str) -> dict[str, Curve]:
    set_environment(rank)
    return curves(folder, tmp_path, True, **IN_TWO_PROCESSES)


@pytest.mark.slow
def test_two_processes_train_as_one_does(folder, tmp_path):
    wanted = curves(folder, tmp_path, False)
    assert_same_in_two_processes(in_a_process, wanted, tmp_path, str(folder), str(tmp_path))


def test_labels_are_ids(folder):
    model = make(folder)
    features = [model.preprocess([row[i] for row in PAIRS[:6]]) for i in range(2)]
    labels = torch.tensor([4, 7, 4, 4, 7, 9])
    embeddings = [model(dict(x))["sentence_embedding"] for x in features]
    for options in ({}, {"mini_batch_size": 4}):
        loss = RetrievalLoss(model, itrloss.SupConLoss(), **options)
        for ids in (labels, None):
            wanted = itrloss.SupConLoss()(*embeddings, ids, ids)
            torch.testing.assert_close(loss([dict(x) for x in features], ids), wanted)
            with torch.no_grad():
                torch.testing.assert_close(loss([dict(x) for x in features], ids), wanted)
    with pytest.raises(
        TypeError,
        match=r"labels: expected an integer tensor of shape \(6,\), got torch.float32; they are ids"
        r".*remove a column .*dataset.remove_columns\(\"score\"\)",
    ):
        loss([dict(x) for x in features], labels.float())


def test_a_column_of_labels_reaches_the_loss(folder, tmp_path):
    seen = []

    class Noted(itrloss.InfoNCELoss):
        def compute(self, sim, *further):
            seen.append(sim.ids[0])
            return super().compute(sim, *further)

    labels = [i % 3 for i in range(len(PAIRS))]
    train(folder, ours(Noted()), tmp_path, dataset=data(2, label=labels), max_steps=1)
    assert seen[0].shape == (BATCH,) and set(seen[0].tolist()) <= {0, 1, 2}


def images_and_texts() -> list[list[str]]:
    """The first two columns, where two consecutive rows have an id."""
    return [[row[i] for row in PAIRS] for i in range(2)]


def drawn_evaluator(reranker: Any) -> RetrievalEvaluator:
    ids = torch.arange(len(PAIRS)) // 2
    options: Any = {"name": "drawn", "encode": {"batch_size": 7}}
    return RetrievalEvaluator(*images_and_texts(), ids, ids, reranker=reranker, **options)


def encoded(model: SentenceTransformer) -> itrloss.Similarity:
    """The similarity that the evaluator is about."""
    ids = torch.arange(len(PAIRS)) // 2
    embeddings = [model.encode(x, convert_to_tensor=True) for x in images_and_texts()]
    return itrloss.Similarity(*embeddings, ids, ids)


def assert_metrics_of(metrics: dict[str, float], results: Any) -> None:
    """An evaluator's metrics are those of results, with confidence intervals."""
    wanted = results.metrics()
    assert metrics["drawn_rsum"] == pytest.approx(wanted["rsum"])
    assert metrics["drawn_t2i_skewness"] == pytest.approx(wanted["t2i_skewness"])
    low, high = confidence_intervals(results)["i2t_r5"]
    assert metrics["drawn_i2t_r5_low"] == pytest.approx(low)
    assert metrics["drawn_i2t_r5_high"] == pytest.approx(high)


def test_the_evaluator_reports_intervals_and_re_ranks(folder, tmp_path):
    plain = drawn_evaluator(None)
    reranking = drawn_evaluator(FastReranker())
    settings = {
        "evaluator": reranking,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 2,
    }
    _, trainer = train(folder, ours(itrloss.InfoNCELoss()), tmp_path, **settings)
    sim = encoded(trainer.model)
    of_plain = plain(trainer.model)
    assert_metrics_of(of_plain, retrieval_results(sim))
    reranked = reranking(trainer.model)
    assert_metrics_of(reranked, retrieval_results(sim, reranker=FastReranker()))
    logged = [x for x in trainer.state.log_history if "eval_drawn_rsum" in x]
    assert len(logged) == 2
    assert logged[-1]["eval_drawn_rsum"] == pytest.approx(reranked["drawn_rsum"])
    assert logged[-1]["eval_drawn_rsum"] != of_plain["drawn_rsum"]
    assert reranking.primary_metric == "drawn_rsum"
    assert reranking.description == "Retrieval"


def test_the_evaluator_takes_two_consecutive_texts_for_an_image(folder):
    model = make(folder)
    images, texts = images_and_texts()
    captions = RetrievalEvaluator(images[::2], texts)(model)
    wanted = retrieval_results(encoded(model).scores()[::2]).metrics()
    assert captions["rsum"] == pytest.approx(wanted["rsum"])
    other = RetrievalEvaluator(images[::2], texts, ks=(2,))(model)
    assert {"i2t_r2", "t2i_recall_at_2_low"} <= set(other)
    assert "i2t_r5" not in other


def test_the_model_card_has_the_options_and_the_citation(folder, tmp_path):
    loss = itrloss.Matryoshka(itrloss.InfoNCELoss(0.05), [8, 16])
    images, texts = ([row[i] for row in PAIRS] for i in range(2))
    options = {
        "evaluator": RetrievalEvaluator(images, texts, reranker=FastReranker()),
        "max_steps": 2,
    }
    _, trainer = train(folder, ours(loss, mini_batch_size=4), tmp_path, **options)
    trainer.evaluate()
    trainer.model.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert (
        "itrloss.integrations.sentence_transformers.RetrievalLoss" in card
        and '"mini_batch_size": 4' in card
    )
    assert (
        "Matryoshka( dims=[8, 16], weights=[1.0, 1.0] (loss): InfoNCELoss(temperature=0.05" in card
    )
    assert "@software{itrloss," in card
    assert "note = {InfoNCELoss: InfoNCE, with any number of positives" in card
    assert "FastReranker" in card and "t2i_r1_high" in card


@pytest.mark.parametrize(
    "loss, error",
    [
        (
            torch.nn.CrossEntropyLoss(),
            "loss: expected one of images and texts alone, such as itrloss.InfoNCELoss()",
        ),
        (itrloss.DistillationLoss(), "loss: expected one of images and texts alone"),
        (itrloss.MemoryDiversityContrastiveLoss(), "loss: expected one of images and texts alone"),
        (itrloss.InfoNCELoss(reduction="none"), "loss: expected reduction 'mean' or 'sum'"),
        (itrloss.InfoNCELoss(groups="other"), "groups: expected 'same', as a trainer passes no"),
        (
            itrloss.Matryoshka(itrloss.InfoNCELoss(reduction="none"), [4]),
            "loss: expected reduction 'mean' or 'sum'",
        ),
    ],
)
def test_other_losses_are_refused(loss, error):
    with pytest.raises((TypeError, ValueError)) as found:
        RetrievalLoss(None, loss)  # type: ignore
    assert error in str(found.value)


@pytest.mark.parametrize(
    ("loss", "columns", "expected"),
    [
        (itrloss.InfoNCELoss(), 1, "two or more columns for InfoNCELoss"),
        (itrloss.TripletLoss(), 3, "two columns for TripletLoss"),
        (itrloss.Matryoshka(itrloss.TripletLoss(), [4]), 3, "two columns for Matryoshka"),
    ],
)
def test_other_columns_are_refused(loss, columns, expected, folder):
    model = make(folder)
    features = [model.preprocess(["red dog", "blue cat"]) for _ in range(columns)]
    message = f"sentence_features: expected {expected}.*, got {columns}; .*select_columns"
    with pytest.raises(ValueError, match=message):
        RetrievalLoss(model, loss)(features)
    with pytest.raises(ValueError, match="mini_batch_size: expected at least 1, got 0"):
        RetrievalLoss(model, loss, mini_batch_size=0)


def test_ids_of_negatives_come_in_lists_of_labels(folder):
    """A negative is none of the rows whose id it has, in whichever column it is."""
    model = make(folder)
    seen = []

    loss = itrloss.InfoNCELoss(0.05)
    loss.register_forward_pre_hook(lambda _, *given: seen.append(given), with_kwargs=True)
    rows = [[0, 3, 7], [1, 0, 7], [2, 8, 1], [0, 9, 9]]
    columns = [[f"{COLOURS[i]} {THINGS[k]}" for i in range(4)] for k in range(4)]
    features = [model.preprocess(texts) for texts in columns]
    labels = torch.tensor(rows)
    value = RetrievalLoss(model, loss)(features, labels)
    ((images, texts, image_ids, text_ids), given) = seen[0]
    assert image_ids.tolist() == text_ids.tolist() == [0, 1, 2, 0]
    assert given["negative_ids"].tolist() == [3, 0, 8, 9, 7, 7, 1, 9]
    torch.testing.assert_close(value, loss(images, texts, image_ids, text_ids, **given))
    loss.in_batch = False  # each row has its own negatives
    loss.directions = "image-text"
    RetrievalLoss(model, loss)(features, labels)
    own = seen[-1][1]
    assert own["negative_ids"].tolist() == [row[1:] for row in rows]
    assert torch.equal(own["negatives"].transpose(0, 1).flatten(0, 1), given["negatives"])
    with pytest.raises(ValueError, match="labels: expected shape"):
        RetrievalLoss(model, loss)(features, labels[:, :2])


@pytest.mark.parametrize(
    ("columns", "strategy", "margin"),
    [
        pytest.param(2, "absolute", 0.0, marks=pytest.mark.slow),
        (3, "absolute", 0.0),
        pytest.param(2, "absolute", 0.02, marks=pytest.mark.slow),
        (2, "relative", 0.02),
    ],
)
def test_the_guided_loss_of_the_page_has_the_curve_of_theirs(
    columns, strategy, margin, folder, tmp_path
):
    """With hard negatives, theirs compares documents with documents, but not with the negatives."""
    names: dict[str, Any] = {"torch": torch, "itrloss": itrloss}
    exec(snippet("integrations.rst", "class GuidedLoss"), names)
    torch.manual_seed(1)
    guide = make(folder)
    for p in guide.parameters():
        p.data += 0.05 * torch.randn_like(p)

    def guided(model: Any) -> Any:
        loss = names["GuidedLoss"](model, guide)
        # as theirs, which also takes queries with queries and documents with documents
        same = {"image_image": True, "text_text": columns == 2, "directions": "image-text"}
        relative = strategy == "relative"
        loss.loss = itrloss.InfoNCELoss(0.01, margin=-margin, relative=relative, **same)
        return loss

    before = [p.clone() for p in guide.parameters()]
    options = {"margin_strategy": strategy, "margin": margin}
    theirs = partial(GISTEmbedLoss, guide=guide, contrast_positives=columns == 2, **options)
    expected, _ = train(folder, theirs, tmp_path, columns)
    found, _ = train(folder, guided, tmp_path, columns)
    assert_same(found, expected)
    assert all(map(torch.equal, guide.parameters(), before))
    # as printed, with ids
    labels = [i // 2 for i in range(len(PAIRS))]
    rows = data(columns, label=labels)
    (found, _), _ = train(folder, partial(names["GuidedLoss"], guide=guide), tmp_path, dataset=rows)
    assert found[-1] < found[0]


# ----------------------------------------------------------------------------------------- resuming

CRITERIA: dict[str, Any] = {
    "infonce": partial(itrloss.InfoNCELoss, 0.1, learnable=True),
    "sigmoid": itrloss.SigmoidLoss,
    "matryoshka": lambda: itrloss.Matryoshka(CRITERIA["infonce"](), [8, 16]),
    "triplet": partial(itrloss.TripletLoss, mining="all"),
}
CASES: dict[str, Any] = {
    **CRITERIA,
    "infonce in mini-batches": CRITERIA["infonce"],
    "infonce around": CRITERIA["infonce"],
    "infonce several": CRITERIA["infonce"],
    "infonce sgd": CRITERIA["infonce"],
}


def resumable(
    folder,
    out,
    case: str,
    steps: int,
    checkpoint: Any = None,
    kind: Any = RetrievalTrainer,
) -> tuple[Curve, Any]:
    """A training of some steps; one that does not resume switches to the hardest negatives."""
    criterion = CASES[case]()
    if case == "triplet" and checkpoint is None:
        criterion.mining = "hardest"
    loss: Any = ours(criterion, mini_batch_size=3 if "mini" in case else None)
    rows: Any = data(2)
    if "around" in case:
        loss = around(loss)
    if "several" in case:
        of_a = loss
        loss = lambda model: {"a": of_a(model), "b": ours(CRITERIA["sigmoid"]())(model)}  # noqa: E731
        rows = {"a": rows, "b": rows}
    options = {
        "max_steps": steps,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 0.05,
        "optim": "sgd" if "sgd" in case else "adamw_torch",
    }
    return train(folder, loss, out, dataset=rows, kind=kind, checkpoint=checkpoint, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_with_the_parameters_of_the_loss(case, folder, tmp_path):
    whole, trainer = resumable(folder, tmp_path / "whole", case, 5)
    _, first = resumable(folder, tmp_path / "part", case, 3)
    checkpoint = str(tmp_path / "part" / "checkpoint-3")
    resumed, second = resumable(folder, tmp_path / "part", case, 5, checkpoint)
    assert_resumes(whole, resumed)
    states = [[x.loss.state_dict() for x in t._losses().values()] for t in (trainer, second, first)]
    assert states[0] == states[1]
    assert len(states[0]) == 1 + ("several" in case)
    assert (states[0] != states[2]) == (case != "triplet")


def test_their_trainer_does_not_save_parameters_of_the_loss_and_that_is_said(folder, tmp_path):
    fit = partial(resumable, folder, tmp_path)
    with pytest.warns(UserWarning, match="parameters of the loss, log_scale, but its checkpoints"):
        fit("infonce", 3, kind=SentenceTransformerTrainer)
    with pytest.warns(UserWarning, match="checkpoint-3 has no retrieval_losses.pt"):
        fit("infonce", 4, str(tmp_path / "checkpoint-3"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "RetrievalLoss")
        fit("triplet", 1, kind=SentenceTransformerTrainer)
