"""What trainers of frameworks are compared by: the losses of their steps, and the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.processes import WORLD, run

STEPS, BATCH, SIZE = 16, 8, 64
# Of the arguments of transformers and sentence-transformers.
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
}
IN_TWO_PROCESSES = {"per_device_train_batch_size": BATCH // WORLD, "ddp_backend": "gloo"}
SIZES_OF_LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}

# The losses of all steps, and the parameters after them.
Curve = tuple[list[float], list[Tensor]]


def curve(trainer: Any, module: nn.Module) -> Curve:
    """The curve of a trainer that has trained a module."""
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    return losses, [p.detach() for p in module.parameters()]


def assert_same(found: Curve, wanted: Curve, factor: float = 1.0, atol: float = 1e-5) -> None:
    """Compare curves, whose losses are factor times the wanted ones, and which go down."""
    losses, parameters = found
    assert losses[-1] < losses[0]
    torch.testing.assert_close([x / factor for x in losses], wanted[0], rtol=0, atol=atol)
    torch.testing.assert_close(parameters, wanted[1], rtol=0, atol=atol)


def assert_same_in_two_processes(
    in_a_process: Any, wanted: dict[str, Curve], folder: Path, *args: str
) -> None:
    """Compare the curves of a function in two processes, by name, with those of one process."""
    for processes in run(in_a_process, folder, *args):
        assert processes.keys() == wanted.keys()
        for name, found in processes.items():
            assert_same(found, wanted[name])


def assert_resumes(whole: Curve, resumed: Curve) -> None:
    """A run that was resumed goes on bit for bit as if nothing had been."""
    assert resumed[0] == whole[0]
    assert len(whole[0]) > 3
    assert all(map(torch.equal, resumed[1], whole[1]))
