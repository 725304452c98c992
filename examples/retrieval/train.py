r"""Train a visual-semantic embedding with any loss of itrloss.

    python -m examples.retrieval.train --config examples/retrieval/configs/scenes.toml \
        out=runs/dcl loss=dcl seed=1
    torchrun --nproc-per-node 2 -m examples.retrieval.train --config ...

The run directory holds config.json, log.jsonl (one line per epoch), best.pt (by dev RSUM), last.pt
(to resume from) and the former one, previous.pt, metrics.json, dev_scores.npy and TensorBoard
events.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import MultiStepLR
from tqdm import tqdm

from itrloss.distributed import world_size
from itrloss.files import written
from itrloss.torch_versions import require_version

from .config import RESUMABLE, Config, all_settings, load_config
from .data import Batch, Batches, Split, load_split
from .evaluate import before_and_after, model_scores, recalls, reranker
from .gradients import backward_in_chunks
from .objectives import Value, build_loss, build_objective
from .preparation import (
    build_optimizer,
    check_fit,
    data_directory,
    is_first,
    load_model,
    new_model,
    read_checkpoint,
    sizes_of,
    words_of,
)

# What a checkpoint holds the state of.
STATEFUL = ("model", "objective", "optimizer", "schedule", "scaler")
# What it holds as it is: see Trainer.__init__.
PROGRESS = ("epoch", "step", "loss_sum", "seconds", "best", "history")

# The last checkpoint and the one before, which is there if the last one is damaged.
RESUMED_FROM = ("last.pt", "previous.pt")


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
        train = load_split(self.data, "train", config.image_size)
        self.dev = load_split(self.data, "dev", config.image_size).first(config.dev_images)
        check_fit(config, self.data, train)
        self.world = world_size()
        self.rank = dist.get_rank() if self.world > 1 else 0
        self._prepare_batches(train)
        self._build_model(train)

        self.epoch = 0  # epochs done
        self.step = 0  # steps done in the current epoch
        self.loss_sum = 0.0  # over the current epoch
        self.seconds = 0.0  # spent in the steps of the current epoch
        self.best = -math.inf  # dev RSUM
        self.history: list[dict[str, float]] = []  # the lines of log.jsonl
        self.writer: Any = None

    def _prepare_batches(self, train: Split) -> None:
        """Set the words, the sizes of inputs, and this process's batches."""
        config = self.config
        self.words = words_of(config, train)
        self.sizes = sizes_of(config, train)
        self.captions = hashlib.sha256("\n".join(train.captions).encode()).hexdigest()
        self.batches = Batches(
            train,
            self.words,
            config.batch_size,
            config.captions_per_image,
            config.seed,
            self.rank,
            self.world,
            config.workers,
        )

    def _build_model(self, train: Split) -> None:
        """Set the model, the objective, and what trains them."""
        config = self.config
        self.model = new_model(config, train, self.sizes, self.words).to(config.device)
        self.objective = build_objective(config, self.model).to(config.device)
        self.optimizer = build_optimizer(self.model, self.objective, config)
        self.schedule = MultiStepLR(self.optimizer, config.decay_epochs, gamma=0.1)
        require_version("the trainer", 2, 3)
        # Unscaled gradients underflow in float16, but not in bfloat16.
        self.device_type = torch.device(config.device).type
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=config.precision == "float16")
        self.encode: nn.Module = self.model  # replaced by its DDP wrapper with several processes
        if self.world > 1:
            # If a term of CODER's loss has weight 0, its parameters get no gradient.
            self.encode = DistributedDataParallel(
                self.model, find_unused_parameters=config.loss == "coder"
            )
            torch.manual_seed(config.seed + 1000 * self.rank)  # for dropout

    # --- training ---------------------------------------------------------------------------------

    def run(self, line: int = 0) -> dict[str, Any]:
        """Train the remaining epochs, then evaluate the best checkpoint. Return the metrics and the
        log. ``line`` is that of the bar, where several processes show one.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        checkpoints = [self.out / name for name in RESUMED_FROM]
        saved = [path for path in checkpoints if path.exists()]
        if self.config.resume and saved:
            self.load(saved[0])
        elif is_first():
            self._remove_former_run()
        if is_first():
            _write_json(self.out / "config.json", asdict(self.config))
        if self.config.tensorboard and is_first():
            # imported only when used, because it is slow
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.out), purge_step=self.total_steps + 1)
        bar = tqdm(
            desc=self.out.name,
            initial=self.total_steps,
            total=self.config.epochs * len(self.batches),
            position=line,
            # None: not where there is no terminal
            disable=None if self.config.progress and is_first() else True,
        )
        with bar:
            while self.epoch < self.config.epochs:
                self.train_epoch(bar)
                self.finish_epoch()
                bar.set_postfix_str(f"RSUM {self.history[-1]['rsum']:.1f}")
        if self.writer is not None:
            self.writer.close()
        metrics = self._shared(self.final_metrics() if is_first() else None)
        return {"metrics": metrics, "best_rsum": self.best, "history": self.history}

    def _remove_former_run(self) -> None:
        """Remove files that would be taken for this run's."""
        for name in ("metrics.json", "log.jsonl", "dev_scores.npy", "best.pt", *RESUMED_FROM):
            (self.out / name).unlink(missing_ok=True)
        for file in self.out.glob("events.out.tfevents.*"):
            file.unlink()

    @property
    def total_steps(self) -> int:
        return self.epoch * len(self.batches) + self.step

    def train_epoch(self, bar: tqdm[Any]) -> None:
        self.model.train()
        self.objective.train()
        self.objective.begin_epoch(self.epoch)
        for batch in self.batches.epoch(self.epoch, self.step):
            value = self.train_step(batch)
            bar.set_postfix_str(f"epoch {self.epoch + 1}, loss {value:.4f}", refresh=False)
            bar.update()
            if self.config.save_steps and self.total_steps % self.config.save_steps == 0:
                self.save_last()

    def train_step(self, batch: Batch) -> float:
        """Update the parameters once; return the loss."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        batch = batch.to(self.config.device)
        loss, figures = self.backward(batch)
        value = loss.item()
        self.objective.finish(batch.text_ids)
        self.scaler.unscale_(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(trained, self.config.clip).item()
        # The initial scale is too large; the scaler skips steps with overflow and reduces it.
        coming_down = self.scaler.is_enabled() and self.scaler.get_scale() > 1e-3
        if not math.isfinite(value) or not (math.isfinite(norm) or coming_down):
            where = f"epoch {self.epoch + 1}, step {self.step + 1}"
            raise FloatingPointError(f"{where}: loss {value}, gradient norm {norm}")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.loss_sum += value
        self.seconds += time.perf_counter() - start
        if self.writer is not None:
            scalars = {"loss": value, "lr": self.rate, "gradient_norm": norm, **figures}
            self._log("train", scalars)
        return value

    def backward(self, batch: Batch) -> Value:
        """Compute the gradients of a batch; return its loss, and figures to log."""
        autocast = self._autocast()
        with autocast:
            self.objective.prepare(self.model, *batch.inputs)
            if self.config.micro_batch:
                return backward_in_chunks(
                    self.encode,
                    self.objective,
                    batch,
                    self.config.micro_batch,
                    self.model.of_texts,
                    self.scaler,
                )
            outputs = self.encode(*batch.inputs)
        loss, figures = self.objective(outputs, batch.image_ids, batch.text_ids)
        self.scaler.scale(loss).backward()
        return loss, figures

    def _autocast(self) -> torch.autocast:
        """The precision of the encoders; losses compute in float32 at least, for inputs of any
        precision.
        """
        if self.config.precision == "float32":
            return torch.autocast(self.device_type, enabled=False)
        return torch.autocast(self.device_type, getattr(torch, self.config.precision))

    @property
    def rate(self) -> float:
        """The learning rate of all parts that are not pre-trained."""
        return self.optimizer.param_groups[0]["lr"]

    def finish_epoch(self) -> None:
        """Validate, keep the checkpoint if it is the best so far, and close the epoch in the
        log.
        """
        measured = None
        if is_first():
            measured = recalls(model_scores(self.model, self.dev, self.words), self.dev)
        measured = self._shared(measured)  # all processes use the first one's figures
        if self.writer is not None:
            self._log("dev", measured)
            self._log("train", self.objective.figures(self.model))
        line = {
            "epoch": self.epoch + 1,
            "step": self.total_steps,
            "loss": self.loss_sum / len(self.batches),
            "lr": self.rate,
            "seconds": self.seconds,
            **measured,
        }
        self.history.append(line)
        self.schedule.step()
        self.epoch += 1
        self.step = 0
        self.loss_sum = 0.0
        self.seconds = 0.0
        if measured["rsum"] > self.best:
            self.best = measured["rsum"]
            self.save(self.out / "best.pt")
        self.save_last()
        if is_first():
            # Rewritten from the checkpointed history, so that a resumed run neither repeats nor
            # loses a line.
            with written(self.out / "log.jsonl") as file:
                for line in self.history:
                    file.write(json.dumps(line) + "\n")

    def final_metrics(self) -> dict[str, Any]:
        """Evaluate best.pt on dev, and with `final_test` on test and, if there are folds, on its
        parts; write metrics.json and dev_scores.npy.
        """
        model, words, _ = load_model(self.out / "best.pt")
        model.to(self.config.device)
        scores = model_scores(model, self.dev, words)
        with written(self.out / "dev_scores.npy", "wb") as file:
            np.save(file, scores.numpy())
        by = reranker(self.config.rerank)
        metrics = {"dev": before_and_after(scores, self.dev, by)}
        if self.config.final_test:
            test = load_split(self.data, self.config.test_split, self.config.image_size)
            scores = model_scores(model, test, words)
            metrics["test"] = before_and_after(scores, test, by)
            if self.config.test_folds > 1:
                folds = self.config.test_folds
                metrics["test_folds"] = before_and_after(scores, test, by, folds)
        _write_json(self.out / "metrics.json", metrics)
        return metrics

    def _log(self, group: str, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(f"{group}/{name}", float(value), self.total_steps)

    def _shared(self, value: Any) -> Any:
        """What the first process has, in all processes."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values)
        return values[0]

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the complete state, so that a resumed run equals an uninterrupted one bit for
        bit.
        """
        random = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
        random_of_all = [random] * self.world
        if self.world > 1:
            dist.all_gather_object(random_of_all, random)
        if not is_first():
            return
        state = {
            "config": asdict(self.config),
            "vocabulary": self.words.state(),
            "sizes": self.sizes,
            "captions": self.captions,
            "rng": random_of_all,
        }
        state |= {name: getattr(self, name).state_dict() for name in STATEFUL}
        state |= {name: getattr(self, name) for name in PROGRESS}
        with written(path, "wb") as file:
            torch.save(state, file)

    def save_last(self) -> None:
        """Write last.pt, and keep the former one as previous.pt."""
        last, previous = (self.out / name for name in RESUMED_FROM)
        if is_first() and last.exists():
            last.replace(previous)
        self.save(last)

    def load(self, path: Path) -> None:
        """Restore the state of a checkpoint; ValueError if its settings differ or it is damaged.

        With another number of processes, dropout draws other random numbers.
        """
        try:
            state = read_checkpoint(path)
        except ValueError as error:
            message = f"{error}; without it, the run resumes from previous.pt, if that is there"
            raise ValueError(message) from error
        self._check_settings(path, state)
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        for name in PROGRESS:
            setattr(self, name, state[name])
        if len(state["rng"]) != self.world:
            seeds = np.random.default_rng([self.config.seed, self.total_steps, self.rank])
            torch.manual_seed(int(seeds.integers(2**63)))
            return
        random = state["rng"][self.rank]
        torch.set_rng_state(random["torch"])
        torch.cuda.set_rng_state_all(random["cuda"])

    def _check_settings(self, path: Path, state: dict[str, Any]) -> None:
        """Raise a ValueError if a checkpoint was trained with other settings or captions."""
        mine = asdict(self.config)
        former = state["config"]
        for settings, world in ((mine, self.world), (former, len(state["rng"]))):
            settings["batch_size of all processes"] = world * settings.pop("batch_size")
        changed = [
            f"{name} = {former.get(name)!r}"
            for name, value in mine.items()
            if name not in RESUMABLE and value != former.get(name)
        ]
        if state["captions"] != self.captions or state["vocabulary"] != self.words.state():
            changed.append("other captions")
        if changed:
            raise ValueError(
                f"{path} was trained with {', '.join(changed)}: cannot resume; choose another out "
                "or resume=false"
            )


def _write_json(path: Path, value: object) -> None:
    with written(path) as file:
        file.write(json.dumps(value, indent=2) + "\n")


def train(config: Config, line: int = 0) -> dict[str, Any]:
    """Run (or resume) the training that `config` describes, with a bar in this line.

    Returns:
        {"metrics": {"dev": {"before": {...}, "after": {...}}, ...}, "best_rsum": float, "history":
        [dict per epoch]}.
    """
    return Trainer(config).run(line)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train a visual-semantic embedding with any loss of itrloss.",
        epilog=all_settings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        on_gpus = config.device.startswith("cuda")
        if on_gpus:
            config = replace(config, device=f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(config.device)
        dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        trainer = Trainer(config)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    metrics = trainer.run()["metrics"]
    if is_first():
        for split, both in metrics.items():
            for when, measured in both.items():
                figures = "  ".join(f"{name} {value:.1f}" for name, value in measured.items())
                print(f"{split} {when} re-ranking: {figures}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
