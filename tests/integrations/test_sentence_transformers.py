"""Losses and the evaluator in the trainer of sentence-transformers, with a tiny model made here."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support.pages import snippet
from support.processes import WORLD, run, set_environment
from torch import Tensor

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
STEPS, BATCH = 16, 8
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
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(
        BertConfig(vocab_size=len(words), max_position_embeddings=16, **sizes, **off)
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
    folder, loss: Any, tmp_path, columns: int = 2, dataset: Any = None, **options: Any
) -> tuple[Any, Any]:
    """The losses of 16 steps of their trainer, and the trainer; ``loss`` takes the model."""
    settings: Any = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }
    evaluator = options.pop("evaluator", None)
    args = SentenceTransformerTrainingArguments(output_dir=str(tmp_path), **settings | options)
    model, dataset = make(folder), data(columns) if dataset is None else dataset
    trainer = SentenceTransformerTrainer(
        model, args, train_dataset=dataset, loss=loss(model), evaluator=evaluator
    )
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x], trainer


def parameters(trainer: Any) -> list[Tensor]:
    return [p.detach() for p in trainer.loss.parameters()]


def test_a_direction_has_their_curve(folder, tmp_path):
    forward = itrloss.InfoNCELoss(0.05, directions="image-text")
    theirs, trainer = train(
        folder, MultipleNegativesRankingLoss, tmp_path, optim="adamw_torch", max_grad_norm=1.0
    )
    ours, other = train(
        folder,
        lambda model: RetrievalLoss(model, forward),
        tmp_path,
        optim="adamw_torch",
        max_grad_norm=1.0,
    )
    assert len(ours) == STEPS and ours[-1] < 0.9 * ours[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(parameters(other), parameters(trainer), rtol=0, atol=1e-5)


def test_both_directions_with_hard_negatives_have_twice_their_curve(folder, tmp_path):
    """The directions are added, so half of the rate makes the same step."""
    theirs, _ = train(
        folder,
        lambda model: MultipleNegativesRankingLoss(model, **BOTH),
        tmp_path,
        columns=3,
        learning_rate=0.002,
    )
    ours, _ = train(
        folder,
        lambda model: RetrievalLoss(model, itrloss.InfoNCELoss(0.05)),
        tmp_path,
        columns=3,
        learning_rate=0.001,
    )
    torch.testing.assert_close([x / 2 for x in ours], theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_matryoshka_inside_or_around_has_their_curve(folder, tmp_path):
    forward, dims = itrloss.InfoNCELoss(0.05), [4, 8, 16]
    ways = [
        lambda model: MatryoshkaLoss(model, MultipleNegativesRankingLoss(model, **BOTH), dims),
        lambda model: RetrievalLoss(model, itrloss.Matryoshka(forward, dims)),
        lambda model: MatryoshkaLoss(model, RetrievalLoss(model, forward), dims),
        lambda model: MatryoshkaLoss(model, RetrievalLoss(model, forward, mini_batch_size=3), dims),
    ]
    rates = 2e-3, 1e-3, 1e-3, 1e-3
    theirs, *ours = (
        train(folder, way, tmp_path, learning_rate=rate)[0]
        for way, rate in zip(ways, rates, strict=True)
    )
    for found in ours:
        torch.testing.assert_close([x / 2 for x in found], theirs, rtol=0, atol=1e-5)


def test_matryoshka_takes_a_column_of_negatives(folder, tmp_path):
    forward = itrloss.InfoNCELoss(0.05, directions="image-text")
    dims = [4, 8, 16]

    def theirs(model: Any) -> Any:
        return MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), dims)

    def ours(model: Any) -> Any:
        return RetrievalLoss(model, itrloss.Matryoshka(forward, dims))

    expected, _ = train(folder, theirs, tmp_path, columns=3)
    found, _ = train(folder, ours, tmp_path, columns=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_cached_gradients_are_those_of_the_whole_batch_also_of_the_losss_own_parameters(
    folder, tmp_path
):
    def loss(mini_batch_size):
        criterion = itrloss.InfoNCELoss(0.1, learnable=True)
        return lambda model: RetrievalLoss(model, criterion, mini_batch_size=mini_batch_size)

    options = {"gradient_accumulation_steps": 2, "columns": 3, "learning_rate": 0.01}
    (whole, first), (cached, second) = (
        train(folder, loss(size), tmp_path, **options) for size in (None, 3)
    )
    assert whole[-1] < 0.9 * whole[0]
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(parameters(second), parameters(first), rtol=1e-4, atol=1e-5)
    assert abs(second.loss.loss.temperature.item() - 0.1) > 0.01


def losses(gather: bool) -> list[Any]:
    ways = (
        itrloss.InfoNCELoss(0.1, learnable=True, gather=gather),
        itrloss.DiversityContrastiveLoss(gather=gather),
    )
    return [
        lambda model: RetrievalLoss(model, ways[0], mini_batch_size=3),
        lambda model: RetrievalLoss(model, ways[1]),
    ]


def in_a_process(rank: int, folder: str, tmp_path: str) -> list[Any]:
    set_environment(rank)
    found = []
    for columns, loss in zip((3, 2), losses(gather=True), strict=True):
        options = {
            "per_device_train_batch_size": BATCH // WORLD,
            "ddp_backend": "gloo",
            "columns": columns,
        }
        values, trainer = train(folder, loss, tmp_path, **options)
        assert trainer.args.world_size == WORLD
        found.append((values, parameters(trainer)))
    return found


@pytest.mark.slow
def test_two_processes_train_as_one_does(folder, tmp_path):
    found = run(in_a_process, tmp_path, str(folder), str(tmp_path))
    for i, (columns, loss) in enumerate(zip((3, 2), losses(gather=False), strict=True)):
        values, trainer = train(folder, loss, tmp_path, columns=columns)
        torch.testing.assert_close(found[0][i][0], values, rtol=0, atol=1e-5)
        for result in found:
            torch.testing.assert_close(result[i][1], parameters(trainer), rtol=0, atol=1e-5)


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
    train(
        folder,
        lambda model: RetrievalLoss(model, Noted()),
        tmp_path,
        dataset=data(2, label=labels),
        max_steps=1,
    )
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
    _, trainer = train(
        folder, lambda model: RetrievalLoss(model, itrloss.InfoNCELoss()), tmp_path, **settings
    )
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
    _, trainer = train(
        folder, lambda model: RetrievalLoss(model, loss, mini_batch_size=4), tmp_path, **options
    )
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


def test_other_columns_are_refused(folder):
    model = make(folder)
    column = model.preprocess(["red dog", "blue cat"])
    with pytest.raises(ValueError, match="mini_batch_size: expected at least 1, got 0"):
        RetrievalLoss(model, itrloss.InfoNCELoss(), mini_batch_size=0)
    for loss, columns, expected in (
        (itrloss.InfoNCELoss(), 1, "two or more columns for InfoNCELoss"),
        (itrloss.TripletLoss(), 3, "two columns for TripletLoss"),
        (itrloss.Matryoshka(itrloss.TripletLoss(), [4]), 3, "two columns for Matryoshka"),
    ):
        advice = "; InfoNCELoss takes columns of negatives, .*select_columns" if columns > 2 else ""
        with pytest.raises(
            ValueError, match=f"sentence_features: expected {expected}.*, got {columns}{advice}"
        ):
            RetrievalLoss(model, loss)([dict(column) for _ in range(columns)])


def test_a_model_of_several_vectors_is_refused(folder):
    sentence_transformers = pytest.importorskip("sentence_transformers", "6.2")
    model = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu")
    with pytest.raises(TypeError, match=r"model: .* got MultiVectorEncoder; .*set_similarity"):
        RetrievalLoss(model, itrloss.InfoNCELoss())


@pytest.mark.slow
def test_a_sum_of_losses_has_the_curve_of_a_pair_loss_of_both(folder, tmp_path):
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList([itrloss.InfoNCELoss(), itrloss.TripletLoss()])

        def forward(self, images, texts, image_ids=None, text_ids=None):
            return sum(part(images, texts, image_ids, text_ids) for part in self.parts)

    class OfPairs(itrloss.PairLoss):
        def compute(self, sim):
            return sum(part.compute(sim) for part in Sum().parts)

    for options in ({}, {"mini_batch_size": 3}):
        expected, found = (
            train(folder, partial(RetrievalLoss, loss=loss, **options), tmp_path)[0]
            for loss in (OfPairs(), Sum())
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("columns", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_guided_loss_of_the_page_has_the_curve_of_theirs(columns, folder, tmp_path):
    """With hard negatives, theirs compares documents with documents, but not with the negatives."""
    names: dict[str, Any] = {"torch": torch, "itrloss": itrloss}
    exec(snippet("integrations.rst", "class GuidedLoss"), names)
    torch.manual_seed(1)
    guide = make(folder)
    for p in guide.parameters():
        p.data += 0.05 * torch.randn_like(p)

    def ours(model: Any) -> Any:
        loss = names["GuidedLoss"](model, guide)
        # as theirs, which also takes queries with queries and documents with documents
        same = {"image_image": True, "text_text": columns == 2, "directions": "image-text"}
        loss.loss = itrloss.InfoNCELoss(0.01, margin=0, **same)
        return loss

    before = [p.clone() for p in guide.parameters()]
    theirs = partial(GISTEmbedLoss, guide=guide, contrast_positives=columns == 2)
    expected, _ = train(folder, theirs, tmp_path, columns)
    found, _ = train(folder, ours, tmp_path, columns)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert all(map(torch.equal, guide.parameters(), before))
    # as printed, with ids
    labels = [i // 2 for i in range(len(PAIRS))]
    rows = data(columns, label=labels)
    found, _ = train(folder, lambda m: names["GuidedLoss"](m, guide), tmp_path, dataset=rows)
    assert found[-1] < found[0]


# ----------------------------------------------------------------------------------------- resuming


def criterion(name: str) -> Any:
    return {
        "infonce": lambda: itrloss.InfoNCELoss(0.1, learnable=True),
        "sigmoid": itrloss.SigmoidLoss,
        "matryoshka": lambda: itrloss.Matryoshka(itrloss.InfoNCELoss(0.1, learnable=True), [8, 16]),
        "triplet": lambda: itrloss.TripletLoss(mining="all"),
    }[name]()


def resumable(
    folder, out, name: str, trainer_class: Any, steps: int, checkpoint: Any, **options: Any
) -> Any:
    """A trainer after some steps; one that does not resume switches to the hardest negatives."""
    args = SentenceTransformerTrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        report_to="none",
        save_strategy="steps",
        save_steps=3,
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.05,
        optim=options.pop("optim", "adamw_torch"),
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    model = make(folder)
    loss: Any = RetrievalLoss(model, criterion(name), **options.pop("loss", {}))
    if options.pop("around", False):
        loss = MatryoshkaLoss(model, loss, [8, 16])
    dataset: Any = data(2)
    if options.pop("several", False):
        loss = {"a": loss, "b": RetrievalLoss(model, criterion("sigmoid"))}
        dataset = {"a": dataset, "b": dataset}
    if name == "triplet" and checkpoint is None:
        loss.loss.mining = "hardest"
    trainer = trainer_class(model, args, train_dataset=dataset, loss=loss, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


CASES = {
    "infonce": {},
    "sigmoid": {},
    "matryoshka": {},
    "triplet": {},
    "infonce in mini-batches": {"loss": {"mini_batch_size": 3}},
    "infonce around": {"around": True},
    "infonce several": {"several": True},
    "infonce sgd": {"optim": "sgd"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_with_the_parameters_of_the_loss(case, folder, tmp_path):
    name = case.split()[0]

    def run(out: str, steps: int, checkpoint: Any = None) -> Any:
        options = copy.deepcopy(CASES[case])
        return resumable(
            folder, tmp_path / out, name, RetrievalTrainer, steps, checkpoint, **options
        )

    whole = run("whole", 5)
    first = run("part", 3)
    resumed = run("part", 5, str(tmp_path / "part" / "checkpoint-3"))
    states = [[x.loss.state_dict() for x in t._losses().values()] for t in (whole, resumed, first)]
    assert states[0] == states[1] and len(states[0]) == 1 + ("several" in case)
    assert (states[0] != states[2]) == (name != "triplet")
    for p, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, wanted)


def test_their_trainer_does_not_save_parameters_of_the_loss_and_that_is_said(folder, tmp_path):
    with pytest.warns(UserWarning, match="parameters of the loss, log_scale, but its checkpoints"):
        resumable(folder, tmp_path, "infonce", SentenceTransformerTrainer, 3, None)
    with pytest.warns(UserWarning, match="checkpoint-3 has no retrieval_losses.pt"):
        resumable(folder, tmp_path, "infonce", RetrievalTrainer, 4, str(tmp_path / "checkpoint-3"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "RetrievalLoss")
        resumable(folder, tmp_path, "triplet", SentenceTransformerTrainer, 1, None)
