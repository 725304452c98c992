"""The trainer for models of transformers, with tiny CLIP and SigLIP models made here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.pages import snippet
from support.processes import WORLD, run, set_environment
from support.trainers import (
    BATCH,
    IN_TWO_PROCESSES,
    SETTINGS,
    SIZE,
    SIZES_OF_LAYERS,
    Curve,
    assert_resumes,
    assert_same,
    assert_same_in_two_processes,
    curve,
)
from support.versions import DTensor, fully_shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import itrloss
from itrloss.metrics import retrieval_metrics

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from itrloss.integrations.transformers import RetrievalTrainer

SIDES = ("query_", "doc_", "neg_")
IDS = [i // 5 for i in range(SIZE)]  # five captions an image


def two_towers(config: Any, model: Any) -> Any:
    """A model with random weights in float64: 16 steps multiply rounding errors."""
    text = {
        "vocab_size": 32,
        "max_position_embeddings": 8,
        "projection_dim": 16,
        "projection_size": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    vision = {"image_size": 8, "patch_size": 4, "projection_dim": 16}
    torch.manual_seed(0)
    return model(
        config(
            text_config=SIZES_OF_LAYERS | text,
            vision_config=SIZES_OF_LAYERS | vision,
            projection_dim=16,
        )
    ).double()


def clip_with_a_bias() -> Any:
    """CLIP with the bias of the sigmoid loss, which it lacks, as the message says."""
    model = make("clip")
    model.logit_bias = nn.Parameter(torch.tensor(-10.0, dtype=torch.float64))
    return model


def one_tower() -> Any:
    torch.manual_seed(0)
    dropout: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(vocab_size=32, **SIZES_OF_LAYERS, **dropout)).double()


MODELS: dict[str, Callable[[], Any]] = {
    "clip": partial(two_towers, CLIPConfig, CLIPModel),
    "siglip": partial(two_towers, SiglipConfig, SiglipModel),
    "clip with a bias": clip_with_a_bias,
    "tower": one_tower,
}


def make(kind: str) -> Any:
    return MODELS[kind]()


def data(**more: list[Any]) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(SIZE, 3, 8, 8, generator=draw, dtype=torch.float64)
    texts = torch.randint(2, 32, (SIZE, 6), generator=draw)
    texts[:, -1] = 1
    return [
        {"pixel_values": image, "input_ids": text, **{name: x[i] for name, x in more.items()}}
        for i, (image, text) in enumerate(zip(images, texts, strict=True))
    ]


def batch_of(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return default_data_collator(rows) | more


def questions(count: int = SIZE) -> list[dict[str, Any]]:
    """Rows with a query, a document and two negatives."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        query, doc, *neg = torch.randint(2, 32, (4, 6), generator=draw)
        mask = (torch.arange(6) < 4).long()
        row = {"query_input_ids": query, "doc_input_ids": doc, "doc_attention_mask": mask}
        rows.append(row | {"neg_input_ids": torch.stack(neg)})
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch["neg_input_ids"] = batch["neg_input_ids"].flatten(0, 1)
    return batch


def last_word(outputs: Any) -> Tensor:
    return outputs.last_hidden_state[:, -1]


def trainer_of(
    kind: str,
    folder: Path | str,
    loss: Any = None,
    rows: Any = None,
    own: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Our trainer or, without a loss, theirs; ``own``: its further arguments."""
    usual: dict[str, Any] = SETTINGS | {"learning_rate": 1e-2}
    given: dict[str, Any] = {"train_dataset": rows or data()}
    if loss is None:
        given["data_collator"] = partial(batch_of, return_loss=True)
    if kind == "tower":
        usual["remove_unused_columns"] = False
        given = {"train_dataset": questions(), "data_collator": collate, "sides": SIDES}
    given |= own or {}
    args = TrainingArguments(output_dir=str(folder), **usual | settings)
    model = None if "model_init" in given else make(kind)
    if loss is None:
        return Trainer(model, args, **given)
    return RetrievalTrainer(model, args, loss=loss, **given)


def train(*args: Any, checkpoint: str | None = None, **options: Any) -> tuple[Curve, Any]:
    """The curve of a trainer, and the trainer."""
    trainer = trainer_of(*args, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    return curve(trainer, trainer.model), trainer


# ------------------------------------------------------------------------------- curves like theirs


def test_infonce_has_twice_clips_curve(tmp_path):
    """The directions are added, so half of the rate makes the same step, of the model's scale,
    too.
    """
    theirs, _ = train("clip", tmp_path, learning_rate=0.02)
    ours, trainer = train("clip", tmp_path, itrloss.InfoNCELoss(learnable=True), learning_rate=0.01)
    assert_same(ours, theirs, factor=2)
    assert trainer.model.logit_scale.item() != make("clip").logit_scale.item()
    assert trainer.loss.log_scale is trainer.model.logit_scale


def test_the_sigmoid_loss_has_siglips_curve(tmp_path):
    options = {"optim": "adamw_torch", "max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    theirs, _ = train("siglip", tmp_path, **options)
    # Distinct labels change nothing; but the trainer counts them, and might leave it to the loss to
    # divide by that.
    rows = data(label=[*range(SIZE)])
    ours, trainer = train("siglip", tmp_path, itrloss.SigmoidLoss(), rows, **options)
    assert_same(ours, theirs)
    assert trainer.loss.bias is trainer.model.logit_bias


def test_other_losses_train_the_encoders_alone(tmp_path):
    for loss in (
        itrloss.TripletLoss(reduction="mean"),
        itrloss.Matryoshka(itrloss.InfoNCELoss(), [8, 16]),
    ):
        options = {"learning_rate": 1e-3, "optim": "adamw_torch", "weight_decay": 0.1}
        (values, _), trainer = train("siglip", tmp_path, loss, **options)
        assert values[-1] < values[0]
        for name in ("logit_scale", "logit_bias"):
            assert torch.equal(getattr(trainer.model, name), getattr(make("siglip"), name))
    matryoshka = itrloss.Matryoshka(itrloss.InfoNCELoss(learnable=True), [8, 16])
    trainer = trainer_of("clip", tmp_path, matryoshka)
    assert trainer.loss.loss.log_scale is trainer.model.logit_scale


# ------------------------------------------------- the whole batch, mini-batches and two processes


class SumOfPairLosses(itrloss.PairLoss):
    """The sum of the page as a loss of pairs."""

    def __init__(self):
        super().__init__()
        self.contrast = itrloss.InfoNCELoss(learnable=True)
        self.diversity = itrloss.DiversityContrastiveLoss()

    def compute(self, sim: Any) -> Tensor:
        return self.contrast.compute(sim) + 0.5 * self.diversity.compute(sim)


def sum_of_the_page(gather: bool = True) -> Any:
    names: dict[str, Any] = {"torch": torch}
    exec(snippet("integrations.rst", "class Sum"), names)
    loss = names["Sum"]()
    loss.contrast.gather = loss.diversity.gather = gather
    return loss


class Case(NamedTuple):
    """A model, a loss and options of a training."""

    kind: str
    loss: Callable[..., Any]  # of ``gather``
    settings: dict[str, Any]
    own: Mapping[str, Any] = MappingProxyType({})


ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0}
# In DDP all that are trained need a gradient, unless it looks for those without.
ALL = {"ddp_find_unused_parameters": False}
one_way = partial(itrloss.InfoNCELoss, 0.1, directions="image-text")
CASES = {
    "infonce": Case("clip", partial(itrloss.InfoNCELoss, learnable=True), ALL),
    "infonce, accumulated": Case(
        "clip",
        partial(itrloss.InfoNCELoss, learnable=True),
        {**ADAMW, "gradient_accumulation_steps": 2, "ddp_find_unused_parameters": True},
    ),
    "sigmoid": Case("siglip", itrloss.SigmoidLoss, ALL | {"gradient_accumulation_steps": 2}),
    "a bias of one's own": Case("clip with a bias", itrloss.SigmoidLoss, ALL),
    "triplet": Case("clip", partial(itrloss.TripletLoss, reduction="mean"), ALL | ADAMW),
    "matryoshka": Case(
        "clip",
        lambda **gather: itrloss.Matryoshka(itrloss.InfoNCELoss(learnable=True, **gather), [8, 16]),
        ALL | ADAMW,
    ),
    "sum": Case("clip", sum_of_the_page, ALL, {"train_dataset": data(image_ids=IDS, text_ids=IDS)}),
    "tower": Case("tower", one_way, {"gradient_accumulation_steps": 2}, {"output": last_word}),
    "tower, own negatives": Case("tower", partial(one_way, in_batch=False), {}),
}


def trained(case: Case, folder: Path | str, gather: bool, own: Any, **more: Any) -> Curve:
    loss = case.loss(gather=gather)
    settings = {"max_steps": 8} | case.settings | more
    found, trainer = train(case.kind, folder, loss, own={**case.own, **own}, **settings)
    assert trainer.args.world_size == (WORLD if gather else 1)
    for name in {"logit_scale", "logit_bias"} & dict(trainer.model.named_parameters()).keys():
        trains = any(x.endswith(name[6:]) for x, _ in loss.named_parameters())
        start = getattr(make(case.kind), name).item()
        assert (getattr(trainer.model, name).item() != start) == trains
    return found


def by_pieces(inputs: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Chunks of one row, and of the others."""
    assert size == 3
    rows = len(inputs["input_ids"])
    parts = [slice(1), slice(1, rows)]
    return [{name: x[part] for name, x in inputs.items()} for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_mini_batches_change_nothing(name: str, tmp_path):
    case = CASES[name]
    whole = trained(case, tmp_path, False, {})
    mini: dict[str, Any] = {"mini_batch_size": 3}
    assert_same(trained(case, tmp_path, False, mini), whole, atol=1e-6)
    if case.kind == "tower":
        split = Mock(side_effect=by_pieces)
        assert_same(trained(case, tmp_path, False, mini | {"split": split}), whole, atol=1e-6)
        batches = 8 * case.settings.get("gradient_accumulation_steps", 1)
        assert split.call_count == batches * len(SIDES)
    if name == "sum":
        options = {"own": dict(case.own), "max_steps": 8}
        as_pairs, _ = train("clip", tmp_path, SumOfPairLosses(), **options)
        assert_same(whole, as_pairs, atol=1e-6)


def in_a_process(rank: int, folder: str) -> dict[str, Curve]:
    set_environment(rank)
    return {
        f"{name} {size}": trained(case, folder, True, {"mini_batch_size": size}, **IN_TWO_PROCESSES)
        for name, case in CASES.items()
        for size in (None, 3)
    }


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    wanted = {}
    for name, case in CASES.items():
        whole = trained(case, tmp_path, False, {})
        wanted |= {f"{name} {size}": whole for size in (None, 3)}
    assert_same_in_two_processes(in_a_process, wanted, tmp_path, str(tmp_path))


def test_the_model_sees_mini_batches(tmp_path):
    sizes: list[int] = []

    def model_init() -> Any:
        model = make("clip")
        see = lambda module, args, options: sizes.append(len(options["pixel_values"]))  # noqa: E731
        model.register_forward_pre_hook(see, with_kwargs=True)
        return model

    own = {"model_init": model_init, "mini_batch_size": 3}
    train("clip", tmp_path, itrloss.InfoNCELoss(), own=own, max_steps=1)
    assert sizes == [3, 3, 2, 3, 3, 2]  # each twice


@pytest.mark.parametrize("output", ["pooler_output", last_word])
@pytest.mark.parametrize("in_batch", [True, False])
def test_sides_are_calls_of_one_model(output: Any, in_batch: bool, tmp_path):
    loss = one_way(in_batch=in_batch)
    trainer = trainer_of("tower", tmp_path, loss, own={"output": output})
    batch = collate(questions(BATCH))
    embeddings = []
    for side in SIDES:
        mask = batch.get(f"{side}attention_mask")
        outputs = trainer.model(batch[f"{side}input_ids"], attention_mask=mask)
        embeddings.append(outputs.pooler_output if output == "pooler_output" else output(outputs))
    images, texts, negatives = embeddings
    own = negatives if in_batch else negatives.view(BATCH, 2, -1)
    value, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert value.item() == pytest.approx(loss(images, texts, negatives=own).item())
    torch.testing.assert_close(outputs, dict(zip(SIDES, embeddings, strict=True)))
    assert trainer.evaluate(questions(BATCH))["eval_loss"] == pytest.approx(value.item())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infonce", "sigmoid", "triplet", "matryoshka"])
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, tmp_path):
    """It begins with all negatives; the run that is saved has switched to the hardest ones."""
    hinges = partial(itrloss.TripletLoss, mining="all")
    criteria: dict[str, Any] = {
        "infonce": lambda: itrloss.InfoNCELoss(learnable=True),
        "sigmoid": itrloss.SigmoidLoss,
        "triplet": hinges,
        "matryoshka": lambda: itrloss.Matryoshka(hinges(), [8, 16]),
    }
    options = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}
    options |= {"optim": "adamw_torch", "max_steps": 6}
    kind = "siglip" if name == "sigmoid" else "clip"

    def fit(folder: str, checkpoint: str | None = None) -> Curve:
        loss = criteria[name]()
        for part in loss.modules():
            if isinstance(part, itrloss.TripletLoss) and checkpoint is None:
                part.mining = "hardest"
        return train(kind, tmp_path / folder, loss, checkpoint=checkpoint, **options)[0]

    whole = fit("whole")
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert_resumes(whole, fit("part", str(checkpoint)))
    states = checkpoint / "retrieval_losses.pt"
    assert states.exists() == (name in ("triplet", "matryoshka"))
    if states.exists():
        states.unlink()
        with pytest.warns(UserWarning, match="checkpoint-3 has no retrieval_losses.pt"):
            fit("without", str(checkpoint))


def test_each_loss_of_a_sum_gets_the_parameters_of_a_new_model(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (itrloss.InfoNCELoss(learnable=True) for _ in range(2))

        def forward(self, images, texts, image_ids=None, text_ids=None):
            batch = images, texts, image_ids, text_ids
            return self.first(*batch) + self.second(*batch)

    own = {"model_init": lambda: make("clip")}
    _, trainer = train("clip", tmp_path, Twice(), own=own, max_steps=1)
    for part in (trainer.loss.first, trainer.loss.second):
        assert part.log_scale is trainer.model.logit_scale
    assert trainer.model.logit_scale.item() != make("clip").logit_scale.item()


# ---------------------------------------------------------------------- what the loss gets, and ids


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize("names", [("label",), ("labels",), ("image_ids", "text_ids")])
def test_columns_of_ids_reach_the_loss(kind: str, names: tuple[str, ...], tmp_path):
    """Also those that are no arguments of the model, which the Trainer would take out."""
    rows: Any = data(**dict.fromkeys(names, IDS), note=IDS)[:BATCH]  # nobody takes a note
    if kind == "columns":
        datasets = pytest.importorskip("datasets")
        lists = [{name: np.asarray(x).tolist() for name, x in row.items()} for row in rows]
        rows = datasets.Dataset.from_list(lists).with_format("torch")
    model = make("clip").float() if kind == "columns" else make("clip")  # datasets have float32
    loss = itrloss.InfoNCELoss()
    own = {"model_init": lambda: model}
    trainer = trainer_of("clip", tmp_path, loss, rows, own=own, max_steps=1)
    inputs = default_data_collator([*data()[:BATCH]])
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.no_grad():
        outputs = model(**inputs)
    pair = outputs.image_embeds, outputs.text_embeds
    ids = torch.tensor(IDS[:BATCH])
    expected = loss(*pair, ids, ids).item()
    assert expected != pytest.approx(loss(*pair).item(), abs=0.01)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, abs=1e-4)
    trainer.train()  # of one batch, in another order
    values, _ = curve(trainer, model)
    assert values == pytest.approx([expected], abs=1e-4)


@pytest.mark.parametrize("names", [("label",), ("labels",), ("image_ids", "text_ids")])
def test_ids_that_are_strings_are_not_left_out(names: tuple[str, ...], tmp_path):
    """The usual collator leaves them out; one of one's own puts them into the batch."""
    loss = itrloss.InfoNCELoss()
    words = [f"image {number}" for number in IDS]
    with pytest.raises(TypeError, match=f"^{names[0]}: expected integers, .*got 'image"):
        train("clip", tmp_path, loss, data(**dict.fromkeys(names, words)), max_steps=1)
    batch = default_data_collator(data()[:BATCH])
    trainer = trainer_of("clip", tmp_path, loss)
    into = ["labels"] if names == ("label",) else names
    found, expected = (
        trainer.compute_loss(trainer.model, batch | dict.fromkeys(into, ids[:BATCH]))
        for ids in (words, torch.tensor(IDS))
    )
    assert found.item() == pytest.approx(expected.item())


def test_what_the_loss_takes_is_passed_on(tmp_path):
    loss = itrloss.InfoNCELoss(margin=0.0, groups="other")
    batch = default_data_collator(data()[:BATCH])
    output = make("clip")(**batch)
    pair = output.image_embeds, output.text_embeds
    draw = torch.Generator().manual_seed(0)
    guide = list(torch.randn(2, BATCH, 4, generator=draw, dtype=torch.float64))
    more = {"image_groups": torch.arange(BATCH) % 2, "guide": guide}
    expected = loss(*pair, **more).item()
    assert expected != pytest.approx(loss(*pair).item())
    trainer = trainer_of("clip", tmp_path, loss)
    assert trainer.compute_loss(trainer.model, batch | more).item() == pytest.approx(expected)
    mini = trainer_of("clip", tmp_path, loss, own={"mini_batch_size": 3})
    mini.create_optimizer()
    mini.current_gradient_accumulation_steps = 1
    assert mini.training_step(mini.model, batch | more).item() == pytest.approx(expected)


def test_the_metrics_of_the_page_are_those_of_each_image_once(tmp_path):
    names: dict[str, Any] = {"itrloss": itrloss}
    code = snippet("integrations.rst", "def compute_metrics").partition("\nargs = ")[0]
    exec(code, names)
    rows = data(labels=IDS)
    for i, row in enumerate(rows):
        row["pixel_values"] = rows[i // 5 * 5]["pixel_values"]  # the image of five captions
    own = {
        "eval_dataset": rows,
        "compute_metrics": names["compute_metrics"],
        "data_collator": default_data_collator,
    }
    trainer = trainer_of("clip", tmp_path, itrloss.InfoNCELoss(), own=own, label_names=["labels"])
    found = trainer.evaluate()
    with torch.no_grad():
        output = trainer.model(**default_data_collator([{**row, "labels": 0} for row in rows]))
    ids = torch.tensor(IDS)
    sim = itrloss.Similarity(output.image_embeds[::5], output.text_embeds, ids[::5], ids)
    for name, wanted in retrieval_metrics(sim).items():
        assert found[f"eval_{name}"] == pytest.approx(wanted), name


# ------------------------------------------------------------------------------- loops of one's own

ALL_IMAGES = slice(0, 10)
PARTS = (slice(0, 4), slice(4, 10))  # of two processes, so that a last chunk is smaller
# Snippets of the page on mini-batches, and how many captions their images have.
SNIPPETS = {"def embeddings": 1, "class Side": 5}


def captioned(images: slice, captions: int) -> list[Any]:
    """Images with their captions, and the ids of both."""
    rows = default_data_collator(data()[:50])
    ids = torch.arange(10)
    texts = slice(captions * images.start, captions * images.stop)
    return [
        {"pixel_values": rows["pixel_values"][images]},
        {"input_ids": rows["input_ids"][texts]},
        ids[images],
        ids.repeat_interleave(captions)[texts],
    ]


def plainly(model: Any, images: slice, captions: int, gather: bool = False) -> list[Any]:
    """The loss and the gradients of a step without chunks."""
    loss = itrloss.InfoNCELoss(learnable=True, max_scale=100, gather=gather)
    loss.log_scale = model.logit_scale
    of_images, of_texts, *ids = captioned(images, captions)
    output = model(**of_images, **of_texts)
    value = loss(output.image_embeds, output.text_embeds, *ids)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


def by_the_page(text: str, images: slice) -> list[Any]:
    """The same of the page's step, in DDP if there are several processes."""
    names: dict[str, Any] = {"itrloss": itrloss, "torch": torch, "model": make("clip")}
    several = images != ALL_IMAGES
    names["DistributedDataParallel"] = DistributedDataParallel if several else lambda side: side
    given = captioned(images, SNIPPETS[text])
    names |= zip(("images", "texts", "image_ids", "text_ids"), given, strict=True)
    names |= {"batch": given[0] | given[1], "ids": given[2]}
    exec(snippet("grad_cache.rst", text).replace("chunk_size=64", "chunk_size=4"), names)
    return [names["loss"], *(p.grad for p in names["model"].parameters())]


def own_loops_in_a_process(rank: int) -> list[list[Any]]:
    """The page's steps, and one of CLIP in FSDP2, whose scale is left out, as the page on several
    GPUs says.
    """
    found = [by_the_page(text, PARTS[rank]) for text in SNIPPETS]
    model = make("clip")
    fully_shard(model, ignored_params={model.logit_scale})
    sharded = plainly(model, PARTS[rank], 1, gather=True)
    return [*found, [x.full_tensor() if isinstance(x, DTensor) else x for x in sharded]]


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loops_of_the_pages_train_clip_with_its_scale(several, tmp_path):
    processes = [[by_the_page(text, ALL_IMAGES) for text in SNIPPETS]]
    if several:
        processes = run(own_loops_in_a_process, tmp_path)
    of_one, of_five = (plainly(make("clip"), ALL_IMAGES, number) for number in SNIPPETS.values())
    for found in processes:
        expected = [of_one, of_five, of_one][: len(found)]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


# -------------------------------------------------------------------------------------- wrong input


def test_a_loss_of_each_process_alone_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("itrloss.integrations.world_size", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for loss in (itrloss.InfoNCELoss(gather=True), sum_of_the_page()):
            trainer_of("clip", tmp_path, loss)
    parts = sum_of_the_page()
    parts.diversity.gather = False
    for loss in (itrloss.InfoNCELoss(), parts):
        with pytest.warns(UserWarning, match="loss: each process takes negatives .*gather=True"):
            trainer_of("clip", tmp_path, loss)


NCE = itrloss.InfoNCELoss()
MINI = {"mini_batch_size": 4}


@pytest.mark.parametrize(
    ("kind", "loss", "own", "message"),
    [
        (
            "tower",
            NCE,
            {"sides": "query_"},
            "sides: expected two or three strings .*, got 'query_'",
        ),
        ("tower", NCE, {"sides": ["a"]}, r"sides: expected two or three strings .*, got \['a'\]"),
        ("tower", itrloss.TripletLoss(), {}, "sides: expected two strings for TripletLoss"),
        ("clip", NCE, {"mini_batch_size": 0}, "mini_batch_size"),
        ("clip", NCE, {"mini_batch_size": 2.0}, "mini_batch_size"),
        ("clip", NCE, {"split": by_pieces}, "mini_batch_size: expected a number with split, got N"),
        (
            "clip",
            "InfoNCELoss",
            {},
            "loss: expected one of images and texts alone, such as .*, got",
        ),
        (
            "clip",
            itrloss.SigmoidLoss(),
            {},
            r"got SigmoidLoss\(scale=10.0, bias=-10.0.* CLIPModel has no logit_bias\. "
            r".*model.logit_bias = torch.nn.Parameter\(torch.tensor\(-10.0\)\)",
        ),
    ],
)
def test_other_options_and_losses_are_refused(kind, loss, own, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        trainer_of(kind, tmp_path, loss, own=own)


def test_backward_passes_of_others_are_refused_for_mini_batches(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"mini_batch_size: expected None .* LOMO, .*, got 4$"):
        trainer_of("clip", tmp_path, NCE, own=MINI, optim="adalomo")
    create = Trainer.create_accelerator_and_postprocess

    def with_deepspeed(self: Any) -> None:
        create(self)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", with_deepspeed)
    with pytest.raises(
        ValueError, match=r"mini_batch_size: expected None with DeepSpeed .*, got 4$"
    ):
        trainer_of("clip", tmp_path, NCE, own=MINI)


class Anything(nn.Module):
    def forward(self, **batch: Any) -> Any:
        return {"image_embeds": batch["image_id"], "text_embeds": batch["image_id"]}


class OfIds(nn.Module):
    def forward(self, pixel_values: Tensor, text_ids: Tensor) -> Any:
        return {"image_embeds": pixel_values, "text_embeds": text_ids}


EIGHT = torch.arange(BATCH)
SEQUENCES = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("clip", {"image_id": EIGHT}, r"CLIPModel, .* or the loss takes \(labels, .*got image_id"),
        ("clip", {"negatives": EIGHT}, "inputs: expected a batch with names .*, got negatives"),
        ("clip", {"labels": EIGHT, "image_ids": EIGHT}, "labels: expected either labels or image_"),
        ("tower", {"neg_input_ids": questions(1)[0]["neg_input_ids"][:1]}, "unflatten"),
        (
            "tower",
            {"group": EIGHT, "note": 1},
            "inputs: expected .* sides .*'query_', .*, got group, note",
        ),
        ("tower last_hidden_state", {}, r"expected shape \(N, D\)"),
        ("tower embeddings", {}, "model: expected outputs with embeddings, got last_hidden"),
        (
            "classifier",
            {},
            "model: expected outputs with image_embeds and text_embeds.*, got logit",
        ),
    ],
)
def test_batches_and_outputs_that_do_not_fit_are_refused(kind, more, message, tmp_path):
    kind, _, output = kind.partition(" ")
    batch = default_data_collator(data()[:BATCH])
    own = {}
    if kind == "classifier":
        batch = SEQUENCES
        config = BertConfig(vocab_size=8, **SIZES_OF_LAYERS)
        own["model_init"] = lambda: BertForSequenceClassification(config)
    if kind == "tower":
        batch = collate(questions(4))
        own = {"output": output} if output else {}
    loss = one_way(in_batch=False) if kind == "tower" else itrloss.TripletLoss()
    trainer = trainer_of(kind, tmp_path, loss, own=own)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        trainer.compute_loss(trainer.model, batch | more)


@pytest.mark.parametrize(
    ("model", "names"), [(OfIds, ("pixel_values", "text_ids")), (Anything, ("image_id",))]
)
def test_names_that_the_model_takes_are_its_own(model, names, tmp_path):
    own = {"model_init": lambda: model()}
    trainer = trainer_of("", tmp_path, itrloss.TripletLoss(), own=own)
    trainer.compute_loss(trainer.model, dict.fromkeys(names, torch.eye(BATCH)))
