"""Training that is resumed is the training that was not interrupted, bit for bit: losses, a memory,
momentum encoders and prototypes in one model, saved by every framework.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.cases import sample
from support.processes import run as in_processes
from support.versions import distributed_checkpoint, fully_shard, load, require, state_dict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import itrloss
from itrloss import MomentumEncoder

D, BATCH, SAVED, STEPS = 8, 4, 4, 8


class Model(nn.Module):
    """Encoders with all that the library has to save: learnt scales, a memory, momentum encoders,
    prototypes, and a loss that changes half way through.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, **common: Any):
        super().__init__()
        # BatchNorm's statistics would be another in each process
        norm = nn.LayerNorm(D) if common.get("gather") else nn.BatchNorm1d(D)
        self.images = nn.Sequential(nn.Linear(D, D), norm, nn.Dropout(0.0))
        self.texts = nn.Linear(D, D)
        self.image_keys = MomentumEncoder(self.images, 0.9, buffers="average").to(dtype)
        self.text_keys = MomentumEncoder(self.texts, 0.9).to(dtype)
        self.infonce = itrloss.InfoNCELoss(learnable=True, **common)
        self.sigmoid = itrloss.SigmoidLoss(**common)
        self.prefixes = itrloss.Matryoshka(itrloss.TripletLoss(mining="all", **common), (4, D))
        self.memory = itrloss.CoupledMemory(20, D)
        self.coder = itrloss.CODERObjective(D, 40, **common)
        self.gate = itrloss.DynamicGate(D, 2)
        self.orthogonal = itrloss.DynamicOrthogonalLoss(slack=0.0, **common)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of the losses, and the keys."""
        v = self.images(x)
        w = self.texts(x)
        image_keys = self.image_keys.module(x.to(self.image_keys.module[0].weight.dtype))
        text_keys = self.text_keys.module(x.to(self.text_keys.module.weight.dtype))
        keys = image_keys.float(), text_keys.float()
        heads = torch.stack([v, w], 1)
        total = self.infonce(v, w) + self.sigmoid(v, w) + self.prefixes(v, w)
        total = total + self.coder(v, w, *keys, self.memory, v, w)[0]
        return total + self.orthogonal(heads, self.gate(heads.detach())), *keys


class Run:
    """A model in training, sharded or not, its optimiser and its scheduler."""

    def __init__(self, seed: int, kind: str = "alone", dtype: torch.dtype = torch.float32):
        torch.manual_seed(seed)
        self.model = Model(dtype, gather=kind != "alone")
        self.called: nn.Module = self.model
        if kind == "fsdp2":
            shard(self.model)
        if kind == "ddp":
            self.called = DistributedDataParallel(self.model, broadcast_buffers=False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def steps(self, some: range, rank: int = 0) -> list[float]:
        """Train; return the losses. Later, the hardest negatives count alone."""
        return [self.step(number, rank) for number in some]

    def step(self, number: int, rank: int) -> float:
        if number == SAVED - 1:
            self.model.prefixes.loss.mining = "hardest"
        return self.train(sample(BATCH, D, seed=10 * number + rank))

    def train(self, x: Tensor, backward: Callable[[Tensor], Any] = Tensor.backward) -> float:
        model = self.model
        model.image_keys.update(model.images)
        model.text_keys.update(model.texts)
        loss, *keys = self.called(x)
        self.optimizer.zero_grad()
        backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        model.memory.enqueue(*keys)
        return loss.item()


def shard(model: Model) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    encoders = model.images, model.texts, model.image_keys.module, model.text_keys.module
    for part in (*encoders, model):
        fully_shard(part, mesh=mesh)


def whole(x: Any) -> Any:
    """Return a tensor that may be sharded, as one that is not."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def same_state(model: nn.Module, wanted: nn.Module) -> bool:
    expected = {**wanted.state_dict(), **dict(wanted.named_buffers())}
    got = {**model.state_dict(), **dict(model.named_buffers())}
    equal = [torch.equal(whole(got[key]), whole(x)) for key, x in expected.items()]
    return got.keys() == expected.keys() and all(equal)


# ------------------------------------------------------------------------------------- one process


def by_torch(saved: Run, fresh: Run, folder: Path) -> Run:
    parts = ("model", "optimizer", "scheduler")
    state = {name: getattr(saved, name).state_dict() for name in parts}
    torch.save(state, folder / "last.pt")
    loaded = load(folder / "last.pt")
    for name in parts:
        getattr(fresh, name).load_state_dict(loaded[name])
    return fresh


def by_safetensors(saved: Run, fresh: Run, folder: Path) -> Run:
    safetensors = pytest.importorskip("safetensors.torch")
    by_torch(saved, fresh, folder)
    with torch.no_grad():
        for x in fresh.model.state_dict().values():
            x.zero_()
    safetensors.save_model(saved.model, str(folder / "model.safetensors"))
    safetensors.load_model(fresh.model, str(folder / "model.safetensors"))
    return fresh


def by_dcp(saved: Run, fresh: Run, folder: Path) -> Run:
    alone = not dist.is_initialized()
    for run, exchange in (saved, distributed_checkpoint.save), (fresh, distributed_checkpoint.load):
        model, optimizer = state_dict.get_state_dict(run.model, run.optimizer)
        state = {"model": model, "optimizer": optimizer}
        exchange(state, checkpoint_id=folder, no_dist=alone)
    state_dict.set_state_dict(
        fresh.model,
        fresh.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    fresh.scheduler.load_state_dict(saved.scheduler.state_dict())
    return fresh


def by_whole_states(saved: Run, fresh: Run, _: Path, *, broadcast: bool = False) -> Run:
    """The states are gathered, and then read by all processes, or sent by the first one."""
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    states = copy.deepcopy(state_dict.get_state_dict(saved.model, saved.optimizer, options=options))
    options = state_dict.StateDictOptions(
        full_state_dict=True, cpu_offload=broadcast, broadcast_from_rank0=broadcast
    )
    state_dict.set_model_state_dict(fresh.model, states[0], options=options)
    state_dict.set_optimizer_state_dict(fresh.model, fresh.optimizer, states[1], options=options)
    fresh.scheduler.load_state_dict(saved.scheduler.state_dict())
    return fresh


def by_deepcopy(saved: Run, fresh: Run, folder: Path) -> Run:
    return copy.deepcopy(saved)


def by_pickle(saved: Run, fresh: Run, folder: Path) -> Run:
    stored = io.BytesIO()
    torch.save(saved, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


WAYS = [by_torch, by_safetensors, by_dcp, by_whole_states, by_deepcopy, by_pickle]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_resumed(way: Callable[..., Run], dtype: torch.dtype, tmp_path):
    run = Run(0, dtype=dtype)
    run.steps(range(SAVED))
    resumed = way(run, Run(1, dtype=dtype), tmp_path)
    assert resumed.model.prefixes.loss.mining == "hardest"
    assert same_state(resumed.model, run.model)
    assert resumed.steps(range(SAVED, STEPS)) == run.steps(range(SAVED, STEPS))
    assert same_state(resumed.model, run.model)


def accelerated(folder: Path, saved: int, resumes: bool) -> tuple[list[float], nn.Module]:
    """The losses of a run of three epochs by accelerate, with dropout and drawn batches."""
    accelerate = pytest.importorskip("accelerate")
    configuration = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    run = Run(int(resumes))
    run.model.images[2].p = 0.3
    torch.manual_seed(0)  # of the loader's order
    data = sample(4 * BATCH, D)
    # Without a generator of its own, a loader takes a number from that of dropout.
    own = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, generator=own)
    loader, *parts = accelerator.prepare(loader, run.model, run.optimizer, run.scheduler)
    run.called, run.optimizer, run.scheduler = parts
    if resumes:
        accelerator.load_state(str(folder))
    done = saved if resumes else 0
    values = []
    for epoch in range(done // 4, 3):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, done % 4)
        for x in batches:
            values.append(run.train(x, accelerator.backward))
            done += 1
            if done == saved:
                run.model.prefixes.loss.mining = "hardest"
                accelerator.save_state(str(folder))
    return values, run.model


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0",
    reason="accelerate cannot read the random state that NumPy 1 pickles, and goes on without it",
)
@pytest.mark.parametrize("saved", [4, 6])
def test_a_run_of_accelerate_is_resumed_also_within_an_epoch(saved: int, tmp_path):
    values, model = accelerated(tmp_path, saved, resumes=False)
    resumed, again = accelerated(tmp_path, saved, resumes=True)
    assert resumed == values[saved:] and len(resumed) == 12 - saved
    assert same_state(again, model)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_a_model_is_saved(use_buffers: bool):
    run = Run(0)
    average = AveragedModel(run.model, use_buffers=use_buffers)
    for number in range(STEPS):
        run.step(number, 0)
        average.update_parameters(run.model)
    fresh = AveragedModel(Model(), use_buffers=use_buffers)
    fresh.load_state_dict(average.state_dict())
    assert same_state(fresh, average)
    if not use_buffers:
        require("an average with the last buffers", 2, 0)
        assert torch.equal(average.module.memory.ids, run.model.memory.ids)


# --------------------------------------------------------------------------------------- processes


SHARED = {
    "dcp": by_dcp,
    "whole": by_whole_states,
    "broadcast": partial(by_whole_states, broadcast=True),
}


def resumed_in_processes(rank: int, folder: str, kinds: list[str]) -> list[str]:
    """Return what differs between runs that are resumed and one that was not interrupted."""
    differ = []
    for kind in kinds:
        for dtype in (torch.float32, torch.bfloat16):
            for name, way in SHARED.items():
                place = Path(folder, f"{kind} {dtype} {name}")
                run = Run(0, kind, dtype)
                run.steps(range(SAVED), rank)
                resumed = way(run, Run(1, kind, dtype), place)
                rest = range(SAVED, STEPS)
                if run.steps(rest, rank) != resumed.steps(rest, rank):
                    differ.append(f"{place.name}: values")
                if not same_state(resumed.model, run.model):
                    differ.append(f"{place.name}: state")
    return differ


@pytest.mark.slow
def test_a_sharded_run_of_one_process_is_resumed(tmp_path):
    assert in_processes(resumed_in_processes, tmp_path, str(tmp_path), ["fsdp2"], world=1) == [[]]


@pytest.mark.slow
def test_runs_of_two_processes_are_resumed(tmp_path):
    found = in_processes(resumed_in_processes, tmp_path, str(tmp_path), ["fsdp2", "ddp"])
    assert found == [[], []]
