"""The GPUs on which the Triton engine has passed its checks. ``"auto"`` takes it there alone.

A record of ``python -m benchmarks gpu`` in benchmarks/results/ stands behind each entry, and
tests/engine/test_devices.py compares the two.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from ..torch_versions import VERSION


class Platform(NamedTuple):
    """A kind of GPU and the versions that compile for it."""

    capability: str  # compute capability, such as "9.0"
    torch: str  # such as "2.11": fixes of a version compile the same kernels
    triton: str  # such as "3.6"


#: Where the checks have passed.
VERIFIED = frozenset({Platform("9.0", "2.11", "3.6")})

OLDEST_CAPABILITY = 8  # older GPUs have no bfloat16, and too little shared memory


def platform_of(capability: str, torch_version: str, triton_version: str) -> Platform:
    """Return the platform of a GPU with a compute capability and full versions."""
    return Platform(capability, minor_version(torch_version), minor_version(triton_version))


def minor_version(version: str) -> str:
    """Return the first two numbers of a version: "2.11" of "2.11.0+cu130"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def is_verified(device: torch.device) -> bool:
    """Return whether ``"auto"`` takes the Triton engine on a CUDA device.

    Elsewhere a warning says once for each kind of GPU how to take it.
    """
    if VERSION < (2, 8) or importlib.util.find_spec("triton") is None or torch.version.hip:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if major < OLDEST_CAPABILITY:
        return False
    from triton import __version__ as triton_version

    platform = platform_of(f"{major}.{minor}", torch.__version__, triton_version)
    if platform in VERIFIED:
        return True
    advise(platform)
    return False


@functools.cache
def advise(platform: Platform) -> None:
    """Warn that the Triton engine is left out on a platform; a second call does nothing."""
    where = f"compute capability {platform.capability}, PyTorch {platform.torch}"
    warnings.warn(
        f"itrloss: engine='auto' takes 'tiled' on this GPU ({where}, Triton {platform.triton}), "
        "as no committed record says that the Triton kernels are right on it. "
        "engine='triton' takes them; python -m benchmarks gpu checks them first.",
        stacklevel=4,
    )


_RECORDS: ContextVar[bool] = ContextVar("_RECORDS", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """Let calls choose as in a CUDA graph: those that warm up for one run its kernels."""
    token = _RECORDS.set(True)
    try:
        yield
    finally:
        _RECORDS.reset(token)


def is_recorded(device: torch.device) -> bool:
    """Return whether what runs on a device goes into a CUDA graph: the host must not wait for it
    then, and launches cost no time.
    """
    if _RECORDS.get():
        return True
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()
