"""The trainer for models of transformers, with tiny CLIP and SigLIP models made here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pages import snippet
from support.processes import WORLD, run, set_environment
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import itrloss

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

from itrloss.integrations import inner_loss
from itrloss.integrations.transformers import RetrievalTrainer

STEPS, BATCH, SIZE = 16, 8, 64
KINDS: dict[str, Any] = {"clip": (CLIPConfig, CLIPModel), "siglip": (SiglipConfig, SiglipModel)}


def make(kind: str) -> Any:
    """A model with random weights in float64: 16 steps multiply rounding errors."""
    config, model = KINDS[kind]
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = sizes | {
        "vocab_size": 32,
        "max_position_embeddings": 8,
        "projection_dim": 16,
        "projection_size": 16,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    vision = sizes | {"image_size": 8, "patch_size": 4, "projection_dim": 16}
    torch.manual_seed(0)
    return model(
        config(text_config=text | tokens, vision_config=vision, projection_dim=16)
    ).double()


def data(**more: list[Any]) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(SIZE, 3, 8, 8, generator=draw, dtype=torch.float64)
    texts = torch.randint(2, 32, (SIZE, 6), generator=draw)
    texts[:, -1] = 1
    return [
        {"pixel_values": image, "input_ids": text, **{name: x[i] for name, x in more.items()}}
        for i, (image, text) in enumerate(zip(images, texts, strict=True))
    ]


def with_loss(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return default_data_collator(rows) | {"return_loss": True}


def train(
    kind: str, folder: Path | str, loss: Any = None, rows: Any = None, **options: Any
) -> tuple[Any, Any]:
    """The losses of 16 steps of their trainer, or of ours with a loss, and the trainer."""
    settings: Any = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }
    checkpoint = options.pop("checkpoint", None)
    of_trainer = ("eval_dataset", "model_init", "data_collator")
    more = {name: options.pop(name) for name in of_trainer if name in options}
    own = ("sides", "output", "mini_batch_size", "split")
    more |= {name: options.pop(name) for name in own if name in options}
    args = TrainingArguments(output_dir=str(folder), **settings | options)
    usual = {
        "args": args,
        "train_dataset": rows or data(),
        "data_collator": default_data_collator if loss else with_loss,
    }
    more = usual | more
    model = None if "model_init" in more else make(kind)
    trainer = Trainer(model, **more) if loss is None else RetrievalTrainer(model, loss=loss, **more)
    trainer.train(resume_from_checkpoint=checkpoint)
    return [x["loss"] for x in trainer.state.log_history if "loss" in x], trainer


def parameters(trainer: Any) -> list[Tensor]:
    return [p.detach() for p in trainer.model.parameters()]


def test_infonce_has_twice_clips_curve(tmp_path):
    """The directions are added, so half of the rate makes the same step, of the model's scale,
    too.
    """
    theirs, first = train("clip", tmp_path, learning_rate=0.02)
    ours, second = train("clip", tmp_path, itrloss.InfoNCELoss(learnable=True), learning_rate=0.01)
    assert len(ours) == STEPS and ours[-1] < ours[0]
    torch.testing.assert_close([x / 2 for x in ours], theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(parameters(second), parameters(first), rtol=0, atol=1e-6)
    assert second.model.logit_scale.item() != make("clip").logit_scale.item()
    assert second.loss.log_scale is second.model.logit_scale


def test_the_sigmoid_loss_has_siglips_curve(tmp_path):
    options = {"optim": "adamw_torch", "max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    theirs, first = train("siglip", tmp_path, **options)
    # Distinct labels change nothing; but the trainer counts them, and might leave it to the loss to
    # divide by that.
    ours, second = train(
        "siglip", tmp_path, itrloss.SigmoidLoss(), data(label=[*range(SIZE)]), **options
    )
    assert ours[-1] < 0.9 * ours[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(parameters(second), parameters(first), rtol=0, atol=1e-6)
    assert second.loss.bias is second.model.logit_bias


def test_other_losses_train_the_encoders_alone(tmp_path):
    for loss in (
        itrloss.TripletLoss(reduction="mean"),
        itrloss.Matryoshka(itrloss.InfoNCELoss(), [8, 16]),
    ):
        values, trainer = train(
            "siglip", tmp_path, loss, learning_rate=1e-3, optim="adamw_torch", weight_decay=0.1
        )
        assert values[-1] < values[0]
        for name in ("logit_scale", "logit_bias"):
            assert torch.equal(getattr(trainer.model, name), getattr(make("siglip"), name))
    _, trainer = train(
        "clip",
        tmp_path,
        itrloss.Matryoshka(itrloss.InfoNCELoss(learnable=True), [8, 16]),
        max_steps=1,
    )
    assert trainer.loss.loss.log_scale is trainer.model.logit_scale


def test_a_column_label_holds_ids_and_evaluation_has_a_loss(tmp_path):
    rows = data(label=[i // 4 for i in range(SIZE)])
    loss = itrloss.SupConLoss()
    _, trainer = train("clip", tmp_path, loss, rows, eval_dataset=rows[:BATCH], max_steps=1)
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        outputs = trainer.model(**default_data_collator(data()[:BATCH]))
    ids = torch.arange(BATCH) // 4
    assert found == pytest.approx(loss(outputs.image_embeds, outputs.text_embeds, ids, ids).item())
    assert found != pytest.approx(loss(outputs.image_embeds, outputs.text_embeds).item())


IDS = [i // 5 for i in range(SIZE)]  # five captions an image


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize("names", [("label",), ("labels",), ("image_ids", "text_ids")])
def test_columns_of_ids_reach_the_loss(kind: str, names: tuple[str, ...], tmp_path):
    """Also those that are no arguments of the model, which the Trainer would take out."""
    rows: Any = data(**dict.fromkeys(names, IDS), note=IDS)  # nobody takes a note
    if kind == "columns":
        datasets = pytest.importorskip("datasets")
        lists = [{name: np.asarray(x).tolist() for name, x in row.items()} for row in rows]
        rows = datasets.Dataset.from_list(lists).with_format("torch")
    model = make("clip").float() if kind == "columns" else make("clip")  # datasets have float32
    loss = itrloss.InfoNCELoss()
    values, trainer = train(
        "clip", tmp_path, loss, rows, eval_dataset=rows, model_init=lambda: model, max_steps=1
    )
    with torch.no_grad():
        batch = default_data_collator([rows[i] for i in order(tmp_path)[:BATCH]])
        inputs = {name: batch[name] for name in ("pixel_values", "input_ids")}
        first = make("clip").to(model.dtype)(**inputs)
        found = trainer.evaluate(rows.select(range(BATCH)) if kind == "columns" else rows[:BATCH])
        last = trainer.model(**default_data_collator([rows[i] for i in range(BATCH)]))
    ids = batch["labels" if "labels" in batch else "image_ids"]
    expected = loss(first.image_embeds, first.text_embeds, ids, ids)
    assert values[0] == pytest.approx(expected.item(), abs=1e-4)
    assert values[0] != pytest.approx(loss(first.image_embeds, first.text_embeds).item(), abs=0.01)
    ids = torch.tensor(IDS[:BATCH])
    expected = loss(last.image_embeds, last.text_embeds, ids, ids)
    assert found["eval_loss"] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("label",), marks=pytest.mark.slow),
        pytest.param(("labels",), marks=pytest.mark.slow),
        ("image_ids", "text_ids"),
    ],
)
def test_ids_that_are_strings_are_not_left_out(names: tuple[str, ...], tmp_path):
    """The usual collator leaves them out; one of one's own puts them into the batch."""
    words = [f"image {number}" for number in IDS]
    rows = data(**dict.fromkeys(names, words))
    with pytest.raises(TypeError, match=f"^{names[0]}: expected integers, .*got 'image"):
        train("clip", tmp_path, itrloss.InfoNCELoss(), rows, max_steps=1)

    def collate_words(rows: list[dict[str, Any]]) -> dict[str, Any]:
        others = [{name: x for name, x in row.items() if name not in names} for row in rows]
        batch = default_data_collator(others)
        for name in names:
            batch["labels" if name == "label" else name] = [row[name] for row in rows]
        return batch

    numbers = data(**dict.fromkeys(names, IDS))
    expected, _ = train("clip", tmp_path, itrloss.InfoNCELoss(), numbers, max_steps=2)
    found, _ = train(
        "clip", tmp_path, itrloss.InfoNCELoss(), rows, max_steps=2, data_collator=collate_words
    )
    assert found == pytest.approx(expected)


def test_what_the_loss_takes_is_passed_on(tmp_path):
    args: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    loss = itrloss.InfoNCELoss(margin=0.0, groups="other")
    batch = default_data_collator(data()[:BATCH])
    output = make("clip")(**batch)
    pair = output.image_embeds, output.text_embeds
    draw = torch.Generator().manual_seed(0)
    guide = list(torch.randn(2, BATCH, 4, generator=draw, dtype=torch.float64))
    more = {"image_groups": torch.arange(BATCH) % 2, "guide": guide}
    expected = loss(*pair, **more).item()
    assert expected != pytest.approx(loss(*pair).item())
    trainer = RetrievalTrainer(make("clip"), args, loss=loss)
    assert trainer.compute_loss(trainer.model, batch | more).item() == pytest.approx(expected)
    mini = RetrievalTrainer(make("clip"), args, loss=loss, mini_batch_size=3)
    mini.create_optimizer()
    mini.current_gradient_accumulation_steps = 1
    assert mini.training_step(mini.model, batch | more).item() == pytest.approx(expected)


def test_names_that_neither_model_nor_loss_takes_are_refused(tmp_path):
    args: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = RetrievalTrainer(make("clip"), args, loss=itrloss.TripletLoss())
    batch = default_data_collator(data()[:BATCH])
    with pytest.raises(ValueError, match=r"CLIPModel or the loss takes \(labels, .*got image_id;"):
        trainer.compute_loss(trainer.model, batch | {"image_id": torch.arange(BATCH)})
    with pytest.raises(ValueError, match=r"inputs: expected a batch with names .*, got negatives;"):
        trainer.compute_loss(trainer.model, batch | {"negatives": torch.ones(BATCH, 16)})
    ids = torch.arange(BATCH)
    with pytest.raises(ValueError, match="labels: expected either labels or image_ids"):
        trainer.compute_loss(trainer.model, batch | {"labels": ids, "image_ids": ids})

    class OfIds(nn.Module):
        def forward(self, pixel_values: Tensor, text_ids: Tensor) -> Any:
            return {"image_embeds": pixel_values, "text_embeds": text_ids}

    pairs = torch.eye(BATCH)
    trainer = RetrievalTrainer(OfIds(), args, loss=itrloss.TripletLoss())
    trainer.compute_loss(trainer.model, {"pixel_values": pairs, "text_ids": pairs})  # the model's

    class Anything(nn.Module):
        def forward(self, **batch: Any) -> Any:
            return {"image_embeds": batch["image_id"], "text_embeds": batch["image_id"]}

    trainer = RetrievalTrainer(Anything(), args, loss=itrloss.TripletLoss())
    trainer.compute_loss(trainer.model, {"image_id": pairs})


def test_the_metrics_of_the_page_are_a_plain_count(tmp_path):
    names: dict[str, Any] = {"itrloss": itrloss}
    code = snippet("integrations.rst", "def compute_metrics").partition("\nargs = ")[0]
    exec(code, names)
    rows = data(labels=IDS)
    for i, row in enumerate(rows):
        row["pixel_values"] = rows[i // 5 * 5]["pixel_values"]  # the image of five captions
    args: Any = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", label_names=["labels"]
    )
    trainer = RetrievalTrainer(
        make("clip"),
        args,
        eval_dataset=rows,  # type: ignore[arg-type] # a list of rows
        loss=itrloss.InfoNCELoss(),
        compute_metrics=names["compute_metrics"],
        data_collator=default_data_collator,
    )
    found = trainer.evaluate()
    with torch.no_grad():
        output = trainer.model(**default_data_collator([{**row, "labels": 0} for row in rows]))
    images = F.normalize(output.image_embeds[::5], dim=1)
    scores = images @ F.normalize(output.text_embeds, dim=1).T
    own = torch.tensor(IDS) == torch.arange(len(images))[:, None]
    for direction, table, right in (("i2t", scores, own), ("t2i", scores.T, own.T)):
        best = torch.where(right, table, -1.0).amax(1, keepdim=True)
        better = (table > best).sum(1)
        for k in (1, 5, 10):
            expected = 100 * (better < k).double().mean().item()
            assert found[f"eval_{direction}_r{k}"] == pytest.approx(expected), (direction, k)


# ------------------------------------------------------------------------------ losses of one's own


class SumOfPairLosses(itrloss.PairLoss):
    def __init__(self):
        super().__init__()
        self.contrast = itrloss.InfoNCELoss(learnable=True)
        self.diversity = itrloss.DiversityContrastiveLoss()

    def compute(self, sim: Any) -> Tensor:
        return self.contrast.compute(sim) + 0.5 * self.diversity.compute(sim)


def sum_of_the_page() -> Any:
    names: dict[str, Any] = {"torch": torch}
    exec(snippet("integrations.rst", "class Sum"), names)
    return names["Sum"]()


def sums_in_a_process(rank: int, folder: str) -> Any:
    set_environment(rank)
    options = {"per_device_train_batch_size": BATCH // WORLD, "ddp_backend": "gloo"}
    options["ddp_find_unused_parameters"] = False
    rows = data(image_ids=IDS, text_ids=IDS)
    values, trainer = train("clip", folder, sum_of_the_page(), rows, **options)
    return values, parameters(trainer)


@pytest.mark.slow
def test_a_sum_of_losses_trains_the_models_scale_in_one_process_and_in_two(tmp_path):
    ids = data(label=IDS)
    expected, whole = train("clip", tmp_path, SumOfPairLosses(), ids)
    assert expected[-1] < expected[0]
    assert whole.model.logit_scale.item() != make("clip").logit_scale.item()
    assert whole.loss.contrast.log_scale is whole.model.logit_scale
    for options in ({}, {"mini_batch_size": 3}):
        found, trainer = train("clip", tmp_path, sum_of_the_page(), ids, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(parameters(trainer), parameters(whole), rtol=0, atol=1e-9)
        assert not trainer._own_state()
    for result in run(sums_in_a_process, tmp_path, str(tmp_path)):
        torch.testing.assert_close(result[0], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(result[1], parameters(whole), rtol=0, atol=1e-6)


def test_each_loss_of_a_sum_gets_the_parameters_of_a_new_model(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (itrloss.InfoNCELoss(learnable=True) for _ in range(2))

        def forward(self, images, texts, image_ids=None, text_ids=None):
            batch = images, texts, image_ids, text_ids
            return self.first(*batch) + self.second(*batch)

    _, trainer = train("clip", tmp_path, Twice(), model_init=lambda: make("clip"), max_steps=1)
    trainer.train()
    for part in (trainer.loss.first, trainer.loss.second):
        assert part.log_scale is trainer.model.logit_scale


def test_a_model_init_trains_the_parameters_of_its_last_model(tmp_path):
    loss = itrloss.InfoNCELoss(learnable=True)
    _, trainer = train("clip", tmp_path, loss, model_init=lambda: make("clip"), max_steps=2)
    assert loss.log_scale is trainer.model.logit_scale
    assert trainer.model.logit_scale.item() != make("clip").logit_scale.item()


MINI: dict[str, Any] = {"mini_batch_size": 3}


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ["infonce", "sigmoid", "triplet", "matryoshka"])
def test_mini_batches_change_nothing(name: str, accumulation: int, tmp_path):
    criteria: dict[str, Any] = {
        "infonce": itrloss.InfoNCELoss(learnable=True),
        "sigmoid": itrloss.SigmoidLoss(),
        "triplet": itrloss.TripletLoss(reduction="mean"),
        "matryoshka": itrloss.Matryoshka(itrloss.InfoNCELoss(learnable=True), [8, 16]),
    }
    kind = "siglip" if name == "sigmoid" else "clip"
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 1.0}
    options |= {"learning_rate": 1e-3, "optim": "adamw_torch"}
    wanted, whole = train(kind, tmp_path, criteria[name], **options)
    found, trainer = train(kind, tmp_path, criteria[name], **options, **MINI)
    assert len(found) == STEPS and found[-1] < found[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(parameters(trainer), parameters(whole), rtol=0, atol=1e-9)


def test_the_model_sees_mini_batches(tmp_path):
    sizes: list[int] = []

    def see(module: Any, args: Any, options: Any) -> None:
        sizes.append(len(options["pixel_values"]))

    def model_init() -> Any:
        model = make("clip")
        model.register_forward_pre_hook(see, with_kwargs=True)
        return model

    train("clip", tmp_path, itrloss.InfoNCELoss(), max_steps=1, model_init=model_init, **MINI)
    assert sizes == [3, 3, 2, 3, 3, 2]  # each twice


SIDES = ("query_", "doc_", "neg_")


def one_tower() -> Any:
    sizes: Any = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    dropout: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(vocab_size=32, **sizes, **dropout)).double()


def questions(count: int = SIZE, negatives: int = 2) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        query, doc = torch.randint(2, 32, (2, 6), generator=draw)
        neg = torch.randint(2, 32, (negatives, 6), generator=draw)
        mask = torch.ones_like(doc)
        mask[4:] = 0
        rows.append(
            {
                "query_input_ids": query,
                "doc_input_ids": doc,
                "doc_attention_mask": mask,
                "neg_input_ids": neg,
            }
        )
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch["neg_input_ids"] = batch["neg_input_ids"].flatten(0, 1)
    return batch


def train_one_tower(
    folder: Path, loss: Any, sides: Any = SIDES, **options: Any
) -> tuple[list[float], Any]:
    """The losses of eight steps with one encoder for queries and documents, and the trainer."""
    own = {
        name: options.pop(name)
        for name in ("output", "mini_batch_size", "split")
        if name in options
    }
    settings: Any = {
        "max_steps": 8,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "remove_unused_columns": False,
    }
    trainer = RetrievalTrainer(
        one_tower(),
        TrainingArguments(output_dir=str(folder), **settings | options),
        loss=loss,
        sides=sides,
        train_dataset=questions(),  # type: ignore[arg-type] # a list of rows
        data_collator=collate,
        **own,
    )
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x], trainer


def last_word(outputs: Any) -> Tensor:
    return outputs.last_hidden_state[:, -1]


def by_pieces(inputs: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Chunks of one row, and of the others."""
    rows = len(inputs["input_ids"])
    parts = [slice(1), slice(1, rows)]
    return [{name: x[part] for name, x in inputs.items()} for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("output", ["pooler_output", last_word])
@pytest.mark.parametrize("in_batch", [True, False])
def test_sides_are_calls_of_one_model(output: Any, in_batch: bool, tmp_path):
    loss = itrloss.InfoNCELoss(0.1, directions="image-text", in_batch=in_batch)
    wanted, whole = train_one_tower(tmp_path, loss, output=output)
    model = one_tower()
    batch = collate([questions()[i] for i in order(tmp_path)[:BATCH]])
    names = ("query", "doc", "neg")
    masks = [None, batch["doc_attention_mask"], None]
    outputs = [
        model(batch[f"{name}_input_ids"], attention_mask=mask)
        for name, mask in zip(names, masks, strict=True)
    ]
    embeddings = [x.pooler_output if output == "pooler_output" else last_word(x) for x in outputs]
    negatives = embeddings[2] if in_batch else embeddings[2].view(BATCH, 2, -1)
    first = loss(embeddings[0], embeddings[1], negatives=negatives)
    assert wanted[0] == pytest.approx(first.item(), abs=1e-4) and wanted[-1] < wanted[0]
    cut: list[int] = []

    def and_count(inputs: Any, size: int) -> Any:
        cut.append(size)
        return by_pieces(inputs, size)

    for split in (None, and_count):
        mini = {"output": output, "mini_batch_size": 3, "split": split}
        found, trainer = train_one_tower(tmp_path, loss, **mini)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(parameters(trainer), parameters(whole), rtol=0, atol=1e-9)
    assert cut == 8 * 3 * [3]  # at each step, for each side


def order(folder: Path) -> list[int]:
    """The order in which the trainer takes the rows of its first epoch."""
    args: Any = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    rows: Any = [{"number": i} for i in range(SIZE)]
    trainer = Trainer(torch.nn.Linear(1, 1), args, train_dataset=rows, data_collator=list)
    trainer.args.remove_unused_columns = False
    return [row["number"] for batch in trainer.get_train_dataloader() for row in batch]


def in_a_process(rank: int, folder: str) -> dict[str, Any]:
    set_environment(rank)
    found = {}
    for name, kind, loss in losses(gather=True):
        options = {"per_device_train_batch_size": BATCH // WORLD, "ddp_backend": "gloo"}
        options["ddp_find_unused_parameters"] = False  # then all that are trained need a gradient
        values, trainer = train(kind, folder, loss, **options)
        assert trainer.args.world_size == WORLD
        found[name] = values, parameters(trainer)
    return found


def losses(gather: bool) -> list[tuple[str, str, Any]]:
    return [
        ("infonce", "clip", itrloss.InfoNCELoss(learnable=True, gather=gather)),
        ("sigmoid", "siglip", itrloss.SigmoidLoss(gather=gather)),
        ("dcl", "clip", itrloss.DiversityContrastiveLoss(gather=gather)),
    ]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    found = run(in_a_process, tmp_path, str(tmp_path))
    for name, kind, loss in losses(gather=False):
        values, trainer = train(kind, tmp_path, loss)
        torch.testing.assert_close(found[0][name][0], values, rtol=0, atol=1e-5)
        for result in found:
            torch.testing.assert_close(result[name][1], parameters(trainer), rtol=0, atol=1e-6)


def wrapped_clip_step(batch: dict[str, Any], loss: Any, mini_batch: int | None = None) -> Any:
    """The scale and the gradients after two steps of CLIP in a training loop of one's own."""
    model = make("clip")
    loss.log_scale = model.logit_scale
    trained = torch.nn.parallel.DistributedDataParallel(model) if loss.gather else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def of_output(output: Any) -> Tensor:
        return loss(output.image_embeds, output.text_embeds)

    names: dict[str, Any] = {"itrloss": itrloss, "model": model, "batch": batch}
    names["ids"] = torch.arange(len(batch["input_ids"])) + 100 * (
        dist.get_rank() if loss.gather else 0
    )
    names["DistributedDataParallel"] = lambda model: trained
    code = snippet("grad_cache.rst", "def embeddings").replace(
        "chunk_size=64", f"chunk_size={mini_batch}"
    )
    for _ in range(2):
        optimizer.zero_grad()
        if mini_batch is None:
            of_output(trained(**batch)).backward()
        else:
            exec(code, names)
        optimizer.step()
    return [p.grad for p in model.parameters()], model.logit_scale.item()


ROWS = 10  # five in a process, so that the last of its chunks is smaller


def own_loops_in_a_process(rank: int) -> list[Any]:
    part = slice(rank * ROWS // WORLD, (rank + 1) * ROWS // WORLD)
    batch = default_data_collator(data()[:ROWS][part])
    loss = itrloss.InfoNCELoss(learnable=True, max_scale=100, gather=True)
    return [wrapped_clip_step(batch, loss), wrapped_clip_step(batch, loss, 3)]


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_clip_with_its_scale_in_two_processes(tmp_path):
    loss = itrloss.InfoNCELoss(learnable=True, max_scale=100)
    batch = default_data_collator(data()[:ROWS])
    expected = wrapped_clip_step(batch, loss)
    torch.testing.assert_close(wrapped_clip_step(batch, loss, 4), expected, rtol=1e-6, atol=1e-9)
    assert expected[1] != make("clip").logit_scale.item()
    for found in run(own_loops_in_a_process, tmp_path):
        for result in found:
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)


def sharded_in_a_process(rank: int) -> Any:
    """The gradients of CLIP in FSDP2, whose scale is left out, as the page on several GPUs says."""
    part = slice(rank * ROWS // WORLD, (rank + 1) * ROWS // WORLD)
    model = make("clip")
    fully_shard(model, ignored_params={model.logit_scale})
    loss = itrloss.InfoNCELoss(learnable=True, max_scale=100, gather=True)
    loss.log_scale = model.logit_scale
    output = model(**default_data_collator(data()[:ROWS][part]))
    loss(output.image_embeds, output.text_embeds).backward()
    return [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in model.parameters()
    ]


@pytest.mark.slow
def test_a_sharded_clip_has_the_gradients_of_one_process_also_of_its_scale(tmp_path):
    model = make("clip")
    loss = itrloss.InfoNCELoss(learnable=True, max_scale=100)
    loss.log_scale = model.logit_scale
    output = model(**default_data_collator(data()[:ROWS]))
    loss(output.image_embeds, output.text_embeds).backward()
    expected = [p.grad for p in model.parameters()]
    for found in run(sharded_in_a_process, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def captioned(images: slice) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """Images with five captions each, and the ids of both."""
    rows = default_data_collator(data()[:50])
    ids = torch.arange(10)
    texts = slice(5 * images.start, 5 * images.stop)
    return (
        {"pixel_values": rows["pixel_values"][images]},
        {"input_ids": rows["input_ids"][texts]},
        ids[images],
        ids.repeat_interleave(5)[texts],
    )


def side_by_side(images: slice) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of the page's step, in DDP if there are several processes."""
    several = images.stop - images.start < 10
    names: dict[str, Any] = {"itrloss": itrloss, "torch": torch, "model": make("clip")}
    wrapper = torch.nn.parallel.DistributedDataParallel
    names["DistributedDataParallel"] = wrapper if several else lambda side: side
    inputs = ("images", "texts", "image_ids", "text_ids")
    names |= dict(zip(inputs, captioned(images), strict=True))
    code = snippet("grad_cache.rst", "class Side").replace("chunk_size=64", "chunk_size=4")
    exec(code, names)
    return names["loss"].item(), [p.grad for p in names["model"].parameters()]


def sides_in_a_process(rank: int) -> tuple[float, list[Tensor]]:
    return side_by_side([slice(0, 4), slice(4, 10)][rank])


def captions_at_once() -> tuple[float, list[Tensor]]:
    """The loss and the gradients of one pass over the whole batch."""
    images, texts, image_ids, text_ids = captioned(slice(0, 10))
    model = make("clip")
    criterion = itrloss.InfoNCELoss(learnable=True, max_scale=100)
    criterion.log_scale = model.logit_scale
    output = model(**images, **texts)
    loss = criterion(output.image_embeds, output.text_embeds, image_ids, text_ids)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


def test_the_chunks_of_the_page_take_five_captions_an_image():
    found = side_by_side(slice(0, 10))
    torch.testing.assert_close(found, captions_at_once(), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_two_processes_take_five_captions_an_image_in_chunks(tmp_path):
    expected = captions_at_once()
    for found in run(sides_in_a_process, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def train_a_given_bias(folder: str, gather: bool, **options: Any) -> tuple[list[float], Any]:
    """Train CLIP with the sigmoid loss, whose bias it does not have, as the message says."""

    def with_bias() -> Any:
        model = make("clip")
        model.logit_bias = torch.nn.Parameter(torch.tensor(-10.0, dtype=torch.float64))
        return model

    loss = itrloss.SigmoidLoss(gather=gather)
    values, trainer = train("clip", folder, loss, model_init=with_bias, max_steps=4, **options)
    return values, trainer.model.logit_bias.detach()


def test_a_loss_of_each_process_alone_is_noticed(tmp_path, monkeypatch):
    args: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setattr("itrloss.integrations.world_size", lambda: 2)
    with pytest.warns(UserWarning, match="loss: each process takes negatives .*gather=True"):
        RetrievalTrainer(make("clip"), args, loss=itrloss.InfoNCELoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        RetrievalTrainer(make("clip"), args, loss=itrloss.InfoNCELoss(gather=True))
        RetrievalTrainer(make("clip"), args, loss=sum_of_the_page())
    parts = sum_of_the_page()
    parts.diversity.gather = False
    with pytest.warns(UserWarning, match="loss: each process takes negatives"):
        RetrievalTrainer(make("clip"), args, loss=parts)


def given_bias_in_a_process(rank: int, folder: str) -> Any:
    set_environment(rank)
    options = {"per_device_train_batch_size": BATCH // WORLD, "ddp_backend": "gloo"}
    return train_a_given_bias(folder, True, ddp_find_unused_parameters=False, **options)


@pytest.mark.slow
def test_a_parameter_that_the_model_is_given_is_trained_in_two_processes(tmp_path):
    expected = train_a_given_bias(str(tmp_path), False)
    assert expected[1].item() != -10
    for found in run(given_bias_in_a_process, tmp_path, str(tmp_path)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def cases_of_mini_batches(gather: bool) -> list[tuple[str, Any, dict[str, Any]]]:
    """The model, the loss, and options. The scale of CLIP has a gradient of the loss alone."""
    infonce = itrloss.InfoNCELoss(learnable=True, gather=gather)
    one = itrloss.InfoNCELoss(0.1, directions="image-text", gather=gather)
    return [
        ("clip", infonce, {"ddp_find_unused_parameters": False}),
        ("clip", infonce, {"ddp_find_unused_parameters": True, "gradient_accumulation_steps": 2}),
        ("siglip", itrloss.SigmoidLoss(gather=gather), {"gradient_accumulation_steps": 2}),
        ("one tower", one, {}),
        ("one tower", one, {"gradient_accumulation_steps": 2}),
    ]


def train_case(kind: str, folder: Path | str, loss: Any, options: Any) -> tuple[Any, Any]:
    if kind == "one tower":
        return train_one_tower(Path(folder), loss, output=last_word, **options)
    return train(kind, folder, loss, learning_rate=1e-3, **options)


def mini_batches_in_a_process(rank: int, folder: str) -> list[Any]:
    set_environment(rank)
    found = []
    for kind, loss, options in cases_of_mini_batches(gather=True):
        shared = {"per_device_train_batch_size": BATCH // WORLD, "ddp_backend": "gloo"}
        values, trainer = train_case(kind, folder, loss, shared | options | MINI)
        assert trainer.args.world_size == WORLD
        found.append((values, parameters(trainer)))
    return found


@pytest.mark.slow
def test_mini_batches_of_two_processes_train_as_one_batch_does(tmp_path):
    found = run(mini_batches_in_a_process, tmp_path, str(tmp_path))
    for i, (kind, loss, options) in enumerate(cases_of_mini_batches(gather=False)):
        values, trainer = train_case(kind, tmp_path, loss, options)
        torch.testing.assert_close(found[0][i][0], values, rtol=0, atol=1e-6)
        for result in found:
            torch.testing.assert_close(result[i][1], parameters(trainer), rtol=0, atol=1e-6)
        if kind == "clip":
            assert trainer.model.logit_scale.item() != make("clip").logit_scale.item()


def test_evaluation_has_the_loss_and_the_embeddings_of_the_sides(tmp_path):
    loss = itrloss.InfoNCELoss(0.1, directions="image-text")
    _, trainer = train_one_tower(tmp_path, loss, max_steps=1, mini_batch_size=3)
    batch = collate(questions(BATCH))
    value, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    found = trainer.evaluate(questions(BATCH))["eval_loss"]
    assert found == pytest.approx(value.item())
    assert {name: x.shape for name, x in outputs.items()} == {
        "query_": (BATCH, 16),
        "doc_": (BATCH, 16),
        "neg_": (2 * BATCH, 16),
    }


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sides": "query_"}, TypeError, "sides: expected two or three strings, got 'query_'"),
        ({"sides": ["a", 1]}, TypeError, "sides: expected two or three strings"),
        ({"sides": ["a"]}, ValueError, r"sides: expected two or three strings .*, got \['a'\]"),
        ({"mini_batch_size": 0}, ValueError, "mini_batch_size"),
        ({"mini_batch_size": 2.0}, TypeError, "mini_batch_size"),
        ({"sides": SIDES, "output": None}, TypeError, "output: expected the name .*, got None"),
        (
            {"split": by_pieces},
            ValueError,
            "mini_batch_size: expected a number with split, got None",
        ),
    ],
)
def test_options_are_checked(options: Any, error: Any, message: str, tmp_path):
    args: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(error, match=message):
        RetrievalTrainer(one_tower(), args, loss=itrloss.InfoNCELoss(), **options)
    with pytest.raises(ValueError, match="sides: expected two strings for TripletLoss"):
        RetrievalTrainer(one_tower(), args, loss=itrloss.TripletLoss(), sides=SIDES)


def test_backward_passes_of_others_are_refused_for_mini_batches(tmp_path, monkeypatch):
    args: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    loss = itrloss.InfoNCELoss()
    args.optim = "adalomo"
    with pytest.raises(ValueError, match=r"mini_batch_size: expected None .*, got 4 with .* LOMO"):
        RetrievalTrainer(make("clip"), args, loss=loss, mini_batch_size=4)
    args.optim = "adamw_torch"
    create = Trainer.create_accelerator_and_postprocess

    def with_deepspeed(self: Any) -> None:
        create(self)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", with_deepspeed)
    with pytest.raises(
        ValueError, match=r"mini_batch_size: expected None .*, got 4 with DeepSpeed"
    ):
        RetrievalTrainer(make("clip"), args, loss=loss, mini_batch_size=4)


def test_batches_that_do_not_fit_the_sides_are_refused(tmp_path):
    args: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    own = itrloss.InfoNCELoss(directions="image-text", in_batch=False)
    trainer = RetrievalTrainer(one_tower(), args, loss=own, sides=SIDES)
    batch = collate(questions(4))
    with pytest.raises(ValueError, match=r"sides: .* begin with 'query_', got doc_input_ids"):
        trainer.compute_loss(trainer.model, {"doc_input_ids": batch["doc_input_ids"]})
    with pytest.raises(ValueError, match=r"sides: .* begin with .*'neg_'.*, got data_set"):
        trainer.compute_loss(trainer.model, batch | {"data_set": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"negatives: .* each of 4 images, got 7 rows"):
        fewer = batch["neg_input_ids"][:7]
        trainer.compute_loss(trainer.model, batch | {"neg_input_ids": fewer})
    with pytest.raises(ValueError, match=r"sides: expected each name .*, got group, note;"):
        trainer.compute_loss(trainer.model, batch | {"group": batch["doc_input_ids"], "note": 1})
    trainer.output = "last_hidden_state"
    with pytest.raises(ValueError, match=r"output: expected last_hidden_state .*\(4, 6, 16\)"):
        trainer.compute_loss(trainer.model, batch)
    trainer.output = "embeddings"
    with pytest.raises(TypeError, match="model: expected outputs with embeddings, got last_hidden"):
        trainer.compute_loss(trainer.model, batch)


def test_other_losses_and_models_are_refused(tmp_path):
    args: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(
        TypeError,
        match=r"loss: expected one of images and texts alone, such as .*, got 'InfoNCELoss'",
    ):
        RetrievalTrainer(make("clip"), args, loss="InfoNCELoss")  # type: ignore
    sigmoid = itrloss.SigmoidLoss()
    with pytest.raises(ValueError) as found:
        RetrievalTrainer(make("clip"), args, loss=sigmoid)
    message = str(found.value)
    assert "got SigmoidLoss(scale=10.0, bias=-10.0" in message  # as it was passed
    assert "CLIPModel has no logit_bias." in message
    assert "model.logit_bias = torch.nn.Parameter(torch.tensor(-10.0))" in message
    assert sigmoid.scale == 10
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    trainer = RetrievalTrainer(
        BertForSequenceClassification(BertConfig(vocab_size=8, **sizes)),
        args,
        loss=itrloss.InfoNCELoss(),
    )
    with pytest.raises(
        TypeError, match=r"model: expected outputs with image_embeds and text_embeds.*, got logits"
    ):
        trainer.compute_loss(trainer.model, {"input_ids": torch.ones(2, 3, dtype=torch.int64)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infonce", "sigmoid", "triplet", "matryoshka"])
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, tmp_path):
    """It begins with all negatives; the run that is saved has switched to the hardest ones."""
    criteria: dict[str, Any] = {
        "infonce": lambda: itrloss.InfoNCELoss(learnable=True),
        "sigmoid": itrloss.SigmoidLoss,
        "triplet": lambda: itrloss.TripletLoss(mining="all"),
        "matryoshka": lambda: itrloss.Matryoshka(itrloss.TripletLoss(mining="all"), [8, 16]),
    }
    options: Any = {
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
    }

    def run(folder: str, checkpoint: Any = None) -> tuple[Any, Any]:
        loss = criteria[name]()
        if name in ("triplet", "matryoshka") and checkpoint is None:
            inner_loss(loss).mining = "hardest"
        kind = "siglip" if name == "sigmoid" else "clip"
        more = {"max_steps": 6, "checkpoint": checkpoint, **options}
        return train(kind, tmp_path / folder, loss, **more)

    wanted, whole = run("whole")
    found, resumed = run("part", str(tmp_path / "whole" / "checkpoint-3"))
    assert found == wanted and len(found) == 6
    for p, expected in zip(parameters(resumed), parameters(whole), strict=True):
        assert torch.equal(p, expected)
    if name in ("triplet", "matryoshka"):
        (tmp_path / "whole" / "checkpoint-3" / "retrieval_losses.pt").unlink()
        with pytest.warns(UserWarning, match="checkpoint-3 has no retrieval_losses.pt"):
            run("without", str(tmp_path / "whole" / "checkpoint-3"))
