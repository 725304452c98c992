"""Train two towers with a momentum memory, in several processes and in mixed precision.

    torchrun --nproc-per-node 2 docs/training_loop.py --out run

Started again after an interruption, it goes on after the last epoch that was finished.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import itrloss

EPOCHS = 4
BATCH = 16  # pairs of a process in a part
PARTS = 2  # parts whose gradients are added up before a step
DIM = 32


class Pairs(Dataset):
    """Images with a caption each, as features that are drawn at random: put your own data here."""

    def __init__(self, size=256):
        draw = torch.Generator().manual_seed(0)
        meaning = torch.randn(size, 24, generator=draw)
        self.images = meaning @ torch.randn(24, 80, generator=draw)
        self.texts = meaning @ torch.randn(24, 60, generator=draw)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.texts[i], i  # the image's number is the id of the pair


def tower(inputs):
    """Return an encoder: put your own here."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, DIM))


class TwoTowers(nn.Module):
    """Both encoders in one module, as DistributedDataParallel wraps one."""

    def __init__(self):
        super().__init__()
        self.image_tower = tower(80)
        self.text_tower = tower(60)

    def forward(self, images, texts):
        return self.image_tower(images), self.text_tower(texts)


class Training:
    """All that changes during training, which a checkpoint therefore holds."""

    def __init__(self, device, steps):
        torch.manual_seed(0)  # all processes begin with the same parameters
        self.towers = TwoTowers().to(device)
        self.key_towers = itrloss.MomentumEncoder(self.towers, momentum=0.99)
        self.memory = itrloss.CoupledMemory(size=128, dim=DIM).to(device)
        self.criterion = itrloss.MemoryInfoNCELoss(learnable=True, gather=True).to(device)
        self.trained = [*self.towers.parameters(), *self.criterion.parameters()]
        groups = [
            {"params": self.towers.parameters()},
            {"params": self.criterion.parameters(), "weight_decay": 0.0},  # of the temperature
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.scaler = torch.amp.GradScaler(device.type)
        # The memory and the momentum encoder stay outside of the wrapper, which would send their
        # buffers in every step.
        self.wrapped = DistributedDataParallel(self.towers)
        torch.manual_seed(dist.get_rank())  # dropout differs between the processes

    def parts(self):
        """Return what has a state, by name."""
        return {
            "towers": self.towers,
            "key_towers": self.key_towers,
            "memory": self.memory,
            "criterion": self.criterion,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }


def random_state():
    """Return the state of this process's random numbers."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def save(training, epoch, path):
    """Write a checkpoint, from the first process: the others hold the same."""
    random = [None] * dist.get_world_size()
    dist.all_gather_object(random, random_state())  # alone this differs between the processes
    if dist.get_rank() == 0:
        state = {name: part.state_dict() for name, part in training.parts().items()}
        unfinished = path.with_suffix(".tmp")
        torch.save({"epoch": epoch, "random": random, **state}, unfinished)
        unfinished.replace(path)  # a run that is killed meanwhile leaves the earlier checkpoint
    dist.barrier()


def load(training, path):
    """Restore a checkpoint and return the number of finished epochs."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in training.parts().items():
        part.load_state_dict(state[name])
    random = state["random"][dist.get_rank()]
    torch.set_rng_state(random["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])
    return state["epoch"]


def step(training, batches, device):
    """Add up the gradients of some parts of a batch, change the parameters, return the loss."""
    training.key_towers.update(training.towers)  # once a step, before its keys are computed
    total = 0.0
    for number, (images, texts, ids) in enumerate(batches, 1):
        images, texts, ids = images.to(device), texts.to(device), ids.to(device)
        is_last = number == len(batches)
        # Processes average their gradients once, in the backward pass of the last part.
        with nullcontext() if is_last else training.wrapped.no_sync():
            with torch.autocast(device.type, dtype=torch.float16):
                embeddings = training.wrapped(images, texts)
                keys = training.key_towers(images, texts)
                loss = training.criterion(*embeddings, *keys, training.memory, ids, ids)
            training.scaler.scale(loss / len(batches)).backward()
        training.memory.enqueue(*keys, ids)  # after backward, which reads the memory
        total += loss.detach() / len(batches)

    training.scaler.unscale_(training.optimizer)  # clipping needs the true gradients
    torch.nn.utils.clip_grad_norm_(training.trained, 1.0)
    training.scaler.step(training.optimizer)  # leaves the step out where a gradient is infinite
    training.scaler.update()
    training.scheduler.step()
    training.optimizer.zero_grad()
    return total


def train(data, device, out):
    """Train to the end, from the last checkpoint in ``out`` if there is one."""
    sampler = DistributedSampler(data, seed=0, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    steps = len(loader) // PARTS
    training = Training(device, EPOCHS * steps)
    checkpoint = out / "last.pt"
    begin = load(training, checkpoint) if checkpoint.exists() else 0
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch, the same after resuming
        batches = iter(loader)
        for _ in range(steps):
            loss = step(training, [next(batches) for _ in range(PARTS)], device)
        save(training, epoch + 1, checkpoint)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}", flush=True)
    return training


def main():
    parser = argparse.ArgumentParser(description="Train two towers; go on where it stopped.")
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the checkpoint")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    train(Pairs(), device, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
