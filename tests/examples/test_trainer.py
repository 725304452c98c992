"""Runs: what they write, how they are resumed, and their precision."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drawn import DRY
from support.versions import GradScaler
from tqdm import tqdm

from examples.retrieval.config import Config, make_config
from examples.retrieval.data import load_split
from examples.retrieval.evaluate import before_and_after, model_scores
from examples.retrieval.preparation import load_model
from examples.retrieval.train import Trainer, train
from itrloss.rerank import FastReranker

RECALLS = {"i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum"}


def files_of(config: Config) -> set[str]:
    return {file.name for file in Path(config.out).iterdir()}


# --- what a run writes ----------------------------------------------------------------------------


SLOW = [pytest.param(loss, marks=pytest.mark.slow) for loss in ("mdcl", "uto", "coder", "dvse")]


@pytest.mark.parametrize("loss", ["infonce", *SLOW])
def test_a_run_learns(config, loss):
    # the printed weight is too small here
    options = {"positive_weight": 1.0} if loss == "mdcl" else {}
    result = train(replace(config, loss=loss, loss_options=options, epochs=5))
    history = result["history"]
    assert result["best_rsum"] == max(line["rsum"] for line in history)
    assert result["best_rsum"] > 200  # for 20 images; chance level is 155
    assert loss != "infonce" or history[-1]["loss"] < 0.8 * history[0]["loss"]


def test_a_finished_run_is_in_its_files(config):
    config = replace(
        config, epochs=2, tensorboard=True, final_test=True, rerank=[9.0, 4.0, 3.0, 17.0]
    )
    result = train(config)
    out = Path(config.out)
    assert make_config(json.loads((out / "config.json").read_text())) == config
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log == result["history"]
    assert [(line["epoch"], line["step"]) for line in log] == [(1, 9), (2, 18)]
    assert {"loss", "lr", "seconds", *RECALLS} <= set(log[0])
    assert list(out.glob("events.out.tfevents*"))

    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics == result["metrics"]
    assert metrics["dev"]["before"]["rsum"] == pytest.approx(result["best_rsum"])
    scores = torch.from_numpy(np.load(out / "dev_scores.npy"))
    by = FastReranker(i2t=(9, 4), t2i=(3, 17))
    assert metrics["dev"] == before_and_after(scores, load_split(config.data, "dev"), by)
    model, words, _ = load_model(out / "best.pt")
    test = load_split(config.data, "test")
    assert metrics["test"] == before_and_after(model_scores(model, test, words), test, by)

    again = replace(config, resume=True)
    assert train(again) == result
    message = r"was trained with loss = 'infonce', lr = 0\.01: .* resume=false"
    with pytest.raises(ValueError, match=message):
        train(replace(again, lr=1e-3, loss="hal"))


def test_the_bar_counts_the_steps_of_all_epochs(config, monkeypatch):
    bars = []

    class Bar(tqdm):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr("examples.retrieval.train.tqdm", Bar)
    rsum = train(config)["history"][-1]["rsum"]
    train(replace(config, epochs=config.epochs + 1, resume=True))
    for bar, initial, epochs in zip(bars, (0, bars[0].n), (0, 1), strict=True):
        assert bar.n == bar.total == (config.epochs + epochs) * bars[0].n / config.epochs
        assert bar.initial == initial
        assert bar.desc == Path(config.out).name
    assert bars[0].postfix == f"RSUM {rsum:.1f}"


def test_a_new_run_leaves_nothing_of_a_former_one(config, monkeypatch):
    train(config)
    former = files_of(config)
    assert former >= {"metrics.json", "best.pt", "last.pt"}

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train_epoch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert files_of(config) & former == {"config.json"}


# --- steps ----------------------------------------------------------------------------------------


def test_learning_rate_drops_after_its_epochs(config):
    config = replace(config, lr=1.0, epochs=4, decay_epochs=[1, 3], batch_size=300)
    rates = [line["lr"] for line in train(config)["history"]]
    assert rates == pytest.approx([1.0, 0.1, 0.1, 0.01])


@pytest.mark.parametrize("micro_batch", [0, pytest.param(16, marks=pytest.mark.slow)])
def test_encoders_run_in_the_precision_asked_for(config, micro_batch):
    config = replace(config, loss="mdcl", micro_batch=micro_batch)
    losses = []
    for precision in ("float32", "bfloat16", "float16"):
        trainer = Trainer(replace(config, precision=precision))
        seen = set()

        def watch(criterion: torch.nn.Module, inputs: tuple[Any, ...], seen: set = seen) -> None:
            seen.update(x.dtype for x in inputs if torch.is_tensor(x))

        trainer.objective.criterion.register_forward_pre_hook(watch)
        trainer.run()
        assert seen == {getattr(torch, precision)}
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        assert trainer.scaler.is_enabled() == (precision == "float16")
        losses.append(trainer.history[-1]["loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.05)


@pytest.mark.parametrize("micro_batch", [0, 16])
def test_gradients_are_clipped_at_their_own_norm_whatever_their_scale(
    config, monkeypatch, micro_batch
):
    clip = torch.nn.utils.clip_grad_norm_
    norms = []

    def watched(*given):
        norms.append(clip(*given))
        return norms[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched)
    config = replace(config, micro_batch=micro_batch, clip=0.1, **DRY)
    for precision in ("float32", "float16"):
        trainer = Trainer(replace(config, precision=precision))
        # any scale other than 1 has an effect, and a small one does not overflow
        if precision == "float16":
            trainer.scaler = GradScaler("cpu", init_scale=0.125)
        trainer.train_step(next(trainer.batches.epoch(0)))
    exact, scaled = (norm.item() for norm in norms)
    assert scaled == pytest.approx(exact, rel=0.05)
    assert exact > 0.1
    clipped = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    assert clipped.item() == pytest.approx(0.1, rel=1e-3)


def test_a_loss_that_is_not_a_number_stops_the_run(config):
    trainer = Trainer(config)
    with torch.no_grad():
        trainer.model.image.linear.weight.fill_(math.inf)
    with pytest.raises(FloatingPointError, match="epoch 1, step 1: loss nan"):
        trainer.train_step(next(trainer.batches.epoch(0)))


# --- resuming -------------------------------------------------------------------------------------


def kill_in_step(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Interrupt the trainer after this number of steps."""
    step = Trainer.train_step
    taken = iter(range(steps))

    def mortal_step(self: Trainer, batch: Any) -> float:
        if next(taken, None) is None:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", mortal_step)


def assert_same_state(found: Any, wanted: Any, where: str = "") -> None:
    """Checkpoints must agree bit for bit, but for settings and times."""
    if torch.is_tensor(wanted):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted.keys() - {"config", "seconds"}:
            assert_same_state(found[name], wanted[name], f"{where}.{name}")
    elif isinstance(wanted, list):
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same_state(one, other, f"{where}[{i}]")
    else:
        assert found == wanted, where


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"loss": "triplet", "loss_options": {"reduction": "mean"}}, marks=pytest.mark.slow
        ),
        # with the scale that its gradients have reached
        {"loss": "infonce", "precision": "float16", "micro_batch": 16},
        pytest.param({"loss": "uto"}, marks=pytest.mark.slow),
        pytest.param({"loss": "coder", "loss_options": {"clusters": 20}}, marks=pytest.mark.slow),
        pytest.param({"loss": "dvse"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: settings["loss"],
)
def test_a_killed_run_resumes_bit_for_bit(config, monkeypatch, settings):
    config = replace(config, epochs=2, decay_epochs=[1], save_steps=4, memory=70, **settings)
    straight = replace(config, out=config.out + "_straight")
    train(straight)
    with monkeypatch.context() as patch:
        # after step 4 of the second epoch; step 3 was saved
        kill_in_step(patch, 13)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    torch.manual_seed(123)  # another process would not share our random state either
    train(replace(config, resume=True))
    states = [torch.load(Path(run.out, "last.pt")) for run in (config, straight)]
    assert_same_state(*states)
    assert len(states[0]["history"]) == 2
    assert len(Path(config.out, "log.jsonl").read_text().splitlines()) == 2
    held = {"uto": "memory.images", "coder": "criterion.prototypes.centroids"}
    if config.loss in held:
        assert states[0]["objective"][held[config.loss]].abs().sum() > 0


def test_a_run_goes_on_with_the_captions_it_began_with(config, tmp_path):
    train(config)
    other = shutil.copytree(config.data, tmp_path / "other")
    moved = replace(config, resume=True, data=str(other), epochs=2, test_split="testall")
    assert len(train(moved)["history"]) == 2
    lines = (other / "train_caps.txt").read_text().splitlines()
    (other / "train_caps.txt").write_text("\n".join(reversed(lines)) + "\n")
    with pytest.raises(ValueError, match="was trained with other captions"):
        train(moved)


def test_a_damaged_checkpoint_is_not_resumed_from(config):
    config = replace(config, epochs=2)
    straight = train(config)
    last = Path(config.out) / "last.pt"
    content = last.read_bytes()
    intact = Trainer(config)
    intact.load(last)

    random = np.random.default_rng(0)
    trainer = Trainer(config)
    refused = 0
    for place in random.integers(len(content), size=50):
        damaged = bytearray(content)
        damaged[place] ^= 64
        last.write_bytes(damaged)
        with torch.no_grad():
            for x in trainer.model.state_dict().values():
                x.zero_()
        try:
            trainer.load(last)
        except ValueError as error:
            assert f"{last} is damaged: " in str(error)
            refused += 1
        else:  # padding between the entries
            for name, x in intact.model.state_dict().items():
                assert torch.equal(x, trainer.model.state_dict()[name])
    assert refused > 30
    last.write_bytes(content[: len(content) // 2])
    again = replace(config, resume=True)
    with pytest.raises(ValueError, match=r"last\.pt is damaged: .*resumes from previous\.pt"):
        train(again)
    last.unlink()
    resumed = train(again)  # from the first epoch
    assert resumed["metrics"] == straight["metrics"]
