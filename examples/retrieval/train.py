"""Train a visual-semantic embedding with any loss of itrloss.

    python -m examples.retrieval.train --config examples/retrieval/configs/scenes.toml out=runs/dcl
    loss=dcl seed=1 torchrun --nproc-per-node 2 -m examples.retrieval.train --config ...

The run directory holds config.json, log.jsonl (one line per epoch), best.pt (by dev RSUM), last.pt
(to resume from), metrics.json, dev_scores.npy and TensorBoard events.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from itrloss.distributed import world_size
from itrloss.files import written

from .backbones import WordPieces
from .config import RESUMABLE, Config, load_config
from .data import Batch, Batches, Vocabulary, load_split
from .evaluate import before_and_after, model_scores, recalls, reranker
from .gradients import Step, of_chunks, of_whole_batch
from .objectives import build_loss, build_objective
from .preparation import (
    build_optimizer,
    check_fit,
    data_directory,
    is_first,
    load_model,
    new_model,
    sizes_of,
)


def learning_rate(config: Config, epoch: int, step: int) -> float:
    """Learning rate of a step (counted over the whole run): linear warm-up, and x 0.1 after each of
    `decay_epochs`.
    """
    warm = min(1.0, (step + 1) / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0
    return config.lr * warm * 0.1 ** sum(end <= epoch for end in config.decay_epochs)


class Trainer:
    """A run: the model, its optimiser, and its progress."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.out = Path(config.out)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)

        build_loss(config)  # report wrong options before loading data
        self.data = data_directory(config)
        train, self.dev = (
            load_split(self.data, name, config.image_size) for name in ("train", "dev")
        )
        self.vocabulary = (
            WordPieces.of_checkpoint(config.bert)
            if config.bert
            else Vocabulary.from_captions(train.captions, config.min_count)
        )
        self.world, self.rank = world_size(), dist.get_rank() if world_size() > 1 else 0
        sampling = config.batch_size, config.captions_per_image, config.seed, self.rank, self.world
        self.batches = Batches(train, self.vocabulary, *sampling)
        self.captions = hashlib.sha256("\n".join(train.captions).encode()).hexdigest()
        check_fit(config, self.data, train, self.batches.batch_size)
        self.sizes = sizes_of(train)
        self.model = new_model(config, train, self.vocabulary).to(config.device)
        self.objective = build_objective(config, self.model).to(config.device)
        self.optimizer = build_optimizer(self.model, self.objective, config)
        # Unscaled gradients underflow in float16, but not in bfloat16.
        self.scaler = torch.amp.GradScaler(
            config.device.partition(":")[0], enabled=config.precision == "float16"
        )
        self.encode: nn.Module = self.model  # replaced by its DDP wrapper with several processes
        if self.world > 1:
            # If a term of CODER's loss has weight 0, its parameters get no gradient.
            self.encode = DistributedDataParallel(
                self.model, find_unused_parameters=config.loss == "coder"
            )
            torch.manual_seed(config.seed + 1000 * self.rank)  # for dropout

        self.epoch = 0  # epochs done
        self.step = 0  # steps done in the current epoch
        # over the current epoch
        self.sums = dict.fromkeys(("loss", "seconds", "loss_seconds", "data_seconds"), 0.0)
        self.best = -math.inf  # dev RSUM
        self.history: list[dict[str, float]] = []  # the lines of log.jsonl
        self.writer: Any = None

    # --- training ---------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train the remaining epochs, then evaluate the best checkpoint. Return the metrics and the
        log.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        if self.config.resume and (self.out / "last.pt").exists():
            self.load(self.out / "last.pt")
        elif is_first():  # files of a former run must not be taken for this run's
            for name in ("metrics.json", "log.jsonl", "dev_scores.npy", "best.pt", "last.pt"):
                (self.out / name).unlink(missing_ok=True)
            for file in self.out.glob("events.out.tfevents.*"):
                file.unlink()
        if is_first():
            _write_json(self.out / "config.json", asdict(self.config))
        if self.config.tensorboard and is_first():
            # imported only when used, because it is slow
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.out), purge_step=self.total_steps + 1)
        while self.epoch < self.config.epochs and not self.stalled:
            self.train_epoch()
            self.finish_epoch()
        if self.writer is not None:
            self.writer.close()
        metrics = [self.final_metrics() if is_first() else None]
        if self.world > 1:
            dist.broadcast_object_list(metrics)
        return {"metrics": metrics[0], "best_rsum": self.best, "history": self.history}

    @property
    def stalled(self) -> bool:
        """Whether the last `patience` epochs did not improve the RSUM on dev."""
        rsums = [line["rsum"] for line in self.history]
        return (
            bool(self.config.patience and rsums)
            and len(rsums) - 1 - rsums.index(max(rsums)) >= self.config.patience
        )

    @property
    def total_steps(self) -> int:
        return self.epoch * len(self.batches) + self.step

    def train_epoch(self) -> None:
        self.model.train()
        self.objective.train()
        self.objective.begin_epoch(self.epoch)
        bar = tqdm(
            self._awaited(self.batches.epoch(self.epoch, self.step)),
            desc=f"epoch {self.epoch + 1}/{self.config.epochs}",
            initial=self.step,
            total=len(self.batches),
            disable=not (self.config.progress and sys.stderr.isatty() and is_first()),
            leave=False,
        )
        for batch in bar:
            value = self.train_step(batch)
            bar.set_postfix(loss=f"{value:.4f}", refresh=False)
            if self.config.save_steps and self.total_steps % self.config.save_steps == 0:
                self.save(self.out / "last.pt")

    def train_step(self, batch: Batch) -> float:
        """Update the parameters once; return the loss."""
        start, device = self._now(), self.config.device
        rate = learning_rate(self.config, self.epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.zero_grad(set_to_none=True)
        wholes = None if batch.wholes is None else batch.wholes.to(device)
        inputs = batch.regions.to(device), batch.words.to(device), batch.lengths, wholes
        ids = batch.image_ids.to(device), batch.text_ids.to(device)
        with self._precision():
            self.objective.prepare(self.model, *inputs)
        step = Step(
            self.encode, self.objective, inputs, ids, self.scaler, self._precision(), self._now
        )
        if self.config.micro_batch:
            value, figures, loss_seconds = of_chunks(
                step, self.config.micro_batch, self.model.of_texts
            )
        else:
            value, figures, loss_seconds = of_whole_batch(step)
        self.objective.finish(ids[1])
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(trained, self.config.clip)
        # The initial scale is too large; the scaler skips steps with overflow and reduces it.
        coming_down = self.scaler.is_enabled() and self.scaler.get_scale() > 1e-3
        if not math.isfinite(value) or not (torch.isfinite(norm) or coming_down):
            raise FloatingPointError(
                f"epoch {self.epoch + 1}, step {self.step + 1}: loss {value}, gradient norm "
                f"{norm.item()}"
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.sums["loss"] += value
        self.sums["seconds"] += self._now() - start
        self.sums["loss_seconds"] += loss_seconds
        if self.writer is not None:
            scalars = {"train/loss": value, "train/lr": rate, "train/gradient_norm": norm.item()}
            self._log_scalars(scalars | {f"train/{name}": float(x) for name, x in figures.items()})
        return value

    def _awaited(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, and add up the time that training waits for them."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.sums["data_seconds"] += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def _precision(self) -> torch.autocast:
        """Autocast of the encoders; losses compute in float32 at least, for inputs of any
        precision.
        """
        kind, low = self.config.device.partition(":")[0], self.config.precision != "float32"
        return torch.autocast(
            kind, getattr(torch, self.config.precision) if low else None, enabled=low
        )

    def finish_epoch(self) -> None:
        """Validate, keep the checkpoint if it is the best so far, and close the epoch in the
        log.
        """
        shared = [
            recalls(model_scores(self.model, self.dev, self.vocabulary), self.dev)
            if is_first()
            else {}
        ]
        if self.world > 1:  # all processes use the first one's figures
            dist.broadcast_object_list(shared)
        measured = shared[0]
        if self.writer is not None:
            self._log_scalars({f"dev/{name}": value for name, value in measured.items()})
            self._log_scalars(
                {
                    f"train/{name}": value
                    for name, value in self.objective.figures(self.model).items()
                }
            )
        line = {
            "epoch": self.epoch + 1,
            "step": self.total_steps,
            "loss": self.sums["loss"] / len(self.batches),
            "lr": learning_rate(self.config, self.epoch, self.total_steps - 1),
            "seconds": self.sums["seconds"],
            "loss_seconds": self.sums["loss_seconds"],
            "data_seconds": self.sums["data_seconds"],
            **measured,
        }
        self.history.append(line)
        self.epoch, self.step = self.epoch + 1, 0
        self.sums = dict.fromkeys(self.sums, 0.0)
        if measured["rsum"] > self.best:
            self.best = measured["rsum"]
            self.save(self.out / "best.pt")
        self.save(self.out / "last.pt")
        if not is_first():
            return
        # Rewritten from the checkpointed history, so that a resumed run neither repeats nor loses a
        # line.
        text = "".join(json.dumps(line) + "\n" for line in self.history)
        with written(self.out / "log.jsonl") as file:
            file.write(text)

    def final_metrics(self) -> dict[str, Any]:
        """Evaluate best.pt on dev (and on test with `final_test`); write metrics.json and
        dev_scores.npy.
        """
        model, vocabulary, _ = load_model(self.out / "best.pt")
        model.to(self.config.device)
        scores = model_scores(model, self.dev, vocabulary)
        with written(self.out / "dev_scores.npy", "wb") as file:
            np.save(file, scores.numpy())
        by = reranker(self.config.rerank)
        metrics = {"dev": before_and_after(scores, self.dev, by)}
        if self.config.final_test:
            test = load_split(self.data, "test", self.config.image_size)
            metrics["test"] = before_and_after(model_scores(model, test, vocabulary), test, by)
        _write_json(self.out / "metrics.json", metrics)
        return metrics

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the complete state, so that a resumed run equals an uninterrupted one bit for
        bit.
        """
        random = [
            {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            }
        ]
        if self.world > 1:
            random = random * self.world
            dist.all_gather_object(random, random[self.rank])
        if not is_first():
            return
        state = {
            "config": asdict(self.config),
            "vocabulary": self.vocabulary.state(),
            "captions": self.captions,
            "sizes": self.sizes,
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "sums": self.sums,
            "best": self.best,
            "history": self.history,
            "rng": random,  # states of all processes
        }
        with written(path, "wb") as file:
            torch.save(state, file)

    def load(self, path: Path) -> None:
        """Restore the state of a checkpoint; ValueError if its settings differ.

        With another number of processes, dropout draws other random numbers.
        """
        state = _read_checkpoint(path)
        mine, former, random = asdict(self.config), state["config"], state["rng"]
        for settings, world in ((mine, self.world), (former, len(random))):
            settings["batch_size of all processes"] = world * settings.pop("batch_size")
        changed = [k for k in mine if k not in RESUMABLE and mine[k] != former.get(k)]
        if (
            changed
            or state["vocabulary"] != self.vocabulary.state()
            or state["captions"] != self.captions
        ):
            what = ", ".join(f"{k} = {former.get(k)!r}" for k in changed) or "other captions"
            raise ValueError(
                f"{path} was trained with {what}: cannot resume; choose another out or resume=false"
            )
        self.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.step, self.best = state["epoch"], state["step"], state["best"]
        self.sums, self.history = state["sums"], state["history"]
        if len(random) != self.world:
            seeds = np.random.default_rng([self.config.seed, self.total_steps, self.rank])
            torch.manual_seed(int(seeds.integers(2**63)))
            return
        torch.set_rng_state(random[self.rank]["torch"])
        if torch.cuda.is_available() and random[self.rank]["cuda"]:
            torch.cuda.set_rng_state_all(random[self.rank]["cuda"])

    # --- small helpers ----------------------------------------------------------------------------

    def _now(self) -> float:
        """Time in seconds, after synchronising a GPU, because kernels run asynchronously."""
        if self.config.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _log_scalars(self, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, self.total_steps)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; ValueError if it is damaged. torch.load does not detect damage of the
    numbers themselves.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path}: not a whole checkpoint ({error}); resume=false begins anew"
        ) from None
    if damaged is not None:
        raise ValueError(f"{path}: damaged ({damaged}); resume=false begins anew")
    return torch.load(path, map_location="cpu", weights_only=True)


def _write_json(path: Path, value: object) -> None:
    with written(path) as file:
        file.write(json.dumps(value, indent=2) + "\n")


def train(config: Config) -> dict[str, Any]:
    """Run (or resume) the training that `config` describes.

    Returns:
        {"metrics": {"dev": {"before": {...}, "after": {...}}, ...}, "best_rsum": float, "history":
        [dict per epoch]}.
    """
    return Trainer(config).run()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train a visual-semantic embedding with any loss of itrloss."
    )
    parser.add_argument("--config", metavar="FILE.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. loss=dcl loss_options.margin=0.2"
    )
    args = parser.parse_intermixed_args(arguments)  # overrides may stand before --config too
    try:
        config = load_config(args.config, args.overrides)
        build_loss(config)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # set by torchrun
    if several:
        cuda = config.device.startswith("cuda")
        if cuda:
            config = replace(config, device=f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(config.device)
        dist.init_process_group("nccl" if cuda else "gloo")
    metrics = train(config)["metrics"]
    for split, both in metrics.items() if is_first() else ():
        for when, measured in both.items():
            figures = "  ".join(f"{name} {value:.1f}" for name, value in measured.items())
            print(f"{split} {when} re-ranking: {figures}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
