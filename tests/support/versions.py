"""What tests need that older versions of PyTorch lack; nothing else decides what is skipped there.

A name of a newer version is imported from here. Where PyTorch is too old for it, a test that calls
it is skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from itrloss.torch_versions import VERSION

# Libraries whose releases need a newer PyTorch than the losses.
INTEGRATIONS = {
    "lightning",
    "pytorch_metric_learning",
    "sentence_transformers",
    "torchmetrics",
    "transformers",
}


# What can be imported from here: its name in PyTorch, and the version that has it.
SINCE = {
    "default_device": ("torch.device", 2, 0),  # as a context
    "checkpoint_wrapper": (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
        2,
        0,
    ),
    "FlopCounterMode": ("torch.utils.flop_counter.FlopCounterMode", 2, 1),
    "GradScaler": ("torch.amp.GradScaler", 2, 3),
    "unsigned": ("torch", 2, 3),  # its unsigned integers of more than 8 bits
    # FSDP2, and checkpoints of several processes
    "DTensor": ("torch.distributed.tensor.DTensor", 2, 6),
    "fully_shard": ("torch.distributed.fsdp.fully_shard", 2, 8),  # 2.6 fails on the CPU
    "init_device_mesh": ("torch.distributed.device_mesh.init_device_mesh", 2, 6),
    "distributed_checkpoint": ("torch.distributed.checkpoint", 2, 6),
    "state_dict": ("torch.distributed.checkpoint.state_dict", 2, 6),
    # The losses can be compiled from 2.8 on; conftest.py puts the first in torch.compile's place.
    "compile_": ("torch.compile", 2, 8),
    "reset_compiler": ("torch.compiler.reset", 2, 8),
    "CompileCounterWithBackend": ("torch._dynamo.testing.CompileCounterWithBackend", 2, 8),
}


class Missing:
    """Skips the test that calls it, or that reads any of its attributes."""

    def __init__(self, reason: str):
        self._reason = reason

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        pytest.skip(self._reason)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(self._reason)


def reason(name: str, version: tuple[int, ...]) -> str:
    """Return why a test is skipped."""
    return f"{name} needs PyTorch {'.'.join(map(str, version))}, this is {torch.__version__}"


def __getattr__(name: str) -> Any:
    """Return what can be imported from here, which takes seconds for some of it."""
    if name not in SINCE:
        raise AttributeError(name)
    path, *version = SINCE[name]
    if tuple(version) > VERSION:
        return Missing(reason(path, tuple(version)))
    return pkgutil.resolve_name(path)


def require(name: str, *version: int) -> None:
    """Skip the rest of a test where PyTorch is older."""
    if version > VERSION:
        pytest.skip(reason(name, version))


def needs(name: str, *version: int) -> pytest.MarkDecorator:
    """Return the mark of a test, or of a case, for a version and newer."""
    return pytest.mark.skipif(version > VERSION, reason=reason(name, version))


def what_is_missing(error: BaseException) -> str:
    """Return why a test cannot run on an older version; nothing if that is not the reason."""
    if VERSION >= (2, 8):
        return ""
    for line in str(error).splitlines():  # also of another process
        if " needs PyTorch 2." in line or "install itrloss with the extra" in line:
            return line
    if isinstance(error, ModuleNotFoundError) and error.name in INTEGRATIONS:
        return f"{error.name} is not installed, which needs a newer PyTorch"
    cause = error.__cause__ or error.__context__
    return "" if cause is None else what_is_missing(cause)


def grad_or_zeros(outputs: Any, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Return the gradients of what may not depend on all inputs: 0 of those."""
    found = torch.autograd.grad(outputs, inputs, allow_unused=True, **options)
    pairs = zip(inputs, found, strict=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]


# PyTorch 1.13 reads no number of Python without other objects.
load = partial(torch.load, weights_only=VERSION >= (2, 0))
# The Triton that its kernels need comes with 2.8.
HAS_TRITON = VERSION >= (2, 8) and importlib.util.find_spec("triton") is not None
