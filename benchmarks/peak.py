"""How much memory a call takes."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def peak_memory(run: Callable[[], Any], device: torch.device) -> float | None:
    """Return the megabytes (10⁶ bytes) that a call takes at its peak beyond what was in use before.

    On the CPU it is the growth of the resident set, which only Linux tells; None elsewhere.
    """
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return round((torch.cuda.max_memory_allocated(device) - before) / 1e6, 1)
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        return None
    # freed memory that the C library keeps would hide what the call takes
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set begins anew
    except OSError:
        return None
    before = int(status.read_text().split("VmRSS:")[1].split()[0])
    run()
    return round((int(status.read_text().split("VmHWM:")[1].split()[0]) - before) * 1024 / 1e6, 1)
