"""What newer versions of PyTorch have, for older ones; all other modules import it from here.

The library runs on PyTorch 1.13 and newer. A heading names the version that has what is below it:
when that is the oldest version that the library runs on, the lines go.
"""

from __future__ import annotations

import sys
import warnings
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

ProcessGroup: TypeAlias = "dist.ProcessGroup | None"  # None stands for all processes

#: The first two numbers of PyTorch's version.
VERSION = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])


def require_version(what: str, *version: int) -> None:
    """Raise a RuntimeError if PyTorch is older than ``what`` needs."""
    if version > VERSION:
        needed = ".".join([str(x) for x in version])
        raise RuntimeError(f"{what} needs PyTorch {needed} or newer, got {torch.__version__}")


# ---------------------------------------------------------------------------------------------- 2.0

if VERSION >= (2, 0):
    from torch.func import functional_call as functional_call

    untyped_storage = Tensor.untyped_storage

    def backends(group: ProcessGroup) -> str:
        """Return the kinds of devices, and the backends, by which a group exchanges tensors."""
        return str(dist.get_backend_config(group))

else:
    functional_call = nn.utils.stateless.functional_call
    untyped_storage = Tensor._storage  # type: ignore[attr-defined]

    def backends(group: ProcessGroup) -> str:
        """Return the kind of devices by which a group exchanges tensors."""
        return "cuda" if dist.get_backend(group) == "nccl" else "cpu"

    with warnings.catch_warnings():  # once, that it is in beta
        warnings.simplefilter("ignore")
        torch.zeros(1).scatter_reduce(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1), "sum")


# ---------------------------------------------------------------------------------------------- 2.1


def cpu_capability() -> str:
    """Return the name of the processor's instructions that PyTorch uses, or an empty string."""
    if VERSION < (2, 1):
        return ""
    return torch.backends.cpu.get_cpu_capability()


# ---------------------------------------------------------------------------------------------- 2.3

# None without unsigned integers of more than 8 bits.
UINT64 = getattr(torch, "uint64", None)


# ---------------------------------------------------------------------------------------------- 2.4

if VERSION >= (2, 4):
    aminmax = torch.aminmax
    get_autocast_dtype = torch.get_autocast_dtype
    is_autocast_available = torch.amp.is_autocast_available
    is_autocast_enabled = torch.is_autocast_enabled
else:

    def aminmax(x: Tensor, /) -> tuple[Tensor, ...]:
        """Return the least and the largest element, also of float16."""
        return x.amin(), x.amax()

    def get_autocast_dtype(kind: str, /) -> torch.dtype:
        """Return the dtype of autocast on a kind of device."""
        return getattr(torch, f"get_autocast_{'gpu' if kind == 'cuda' else kind}_dtype")()

    def is_autocast_available(kind: str, /) -> bool:
        """Return whether a kind of device has autocast."""
        return kind == "cuda" or hasattr(torch, f"is_autocast_{kind}_enabled")

    def is_autocast_enabled(kind: str, /) -> bool:
        """Return whether autocast is on for a kind of device that has it."""
        name = "is_autocast_enabled" if kind == "cuda" else f"is_autocast_{kind}_enabled"
        return getattr(torch, name)()


# ---------------------------------------------------------------------------------------------- 2.6


def current_accelerator() -> torch.device | None:
    """Return the kind of the accelerator; None without one, though PyTorch was built for it."""
    if VERSION >= (2, 6) and torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cuda") if torch.cuda.is_available() else None


# ---------------------------------------------------------------------------------------------- 2.8

if VERSION >= (2, 8):
    is_compiling = torch.compiler.is_compiling
else:

    def compiling_needs_torch_2_8() -> None:
        """Raise an error; where the compiler does not let it happen, it shows the name."""
        require_version("torch.compile: a compiled loss", 2, 8)

    # as torch._dynamo.disable does, whose import takes a second
    compiling_needs_torch_2_8._torchdynamo_disable = True  # type: ignore[attr-defined]

    def is_compiling() -> bool:
        """Return False; raise an error while the compiler traces this."""
        if "torch._dynamo" in sys.modules and torch._dynamo.is_compiling():
            compiling_needs_torch_2_8()
        return False


# ---------------------------------------------------------------------------------------------- 2.9

# Whether torch.backends.cuda.matmul has the setting that replaces allow_tf32. It raises no
# AttributeError for what it has not.
HAS_FP32_PRECISION = VERSION >= (2, 9)

# --------------------------------------------------------------------------------------------- 2.11

# Whether addmm adds half-precision products to a float32 matrix.
ADDMM_WIDENS = VERSION >= (2, 11)

# --------------------------------------------------------------------------------------------- 2.13

if hasattr(dist, "all_gather_single"):  # not where PyTorch was built without torch.distributed
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:

    def all_gather_single(whole: Tensor, x: Tensor, /, group: ProcessGroup) -> object:
        """Write the concatenation of ``x`` by rank to ``whole``."""
        if VERSION >= (2, 4) or x.device.type != "cpu":
            dist.all_gather_into_tensor(whole, x, group=group)
        else:  # Gloo has lists alone
            dist.all_gather(list(whole.chunk(dist.get_world_size(group))), x, group=group)

    def reduce_scatter_single(part: Tensor, x: Tensor, /, *, group: ProcessGroup) -> object:
        """Write this process's part of the sum of ``x`` to ``part``."""
        if VERSION >= (2, 4) or x.device.type != "cpu":
            dist.reduce_scatter_tensor(part, x, group=group)
        else:  # Gloo does not scatter
            total = x.clone()
            dist.all_reduce(total, group=group)
            part.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])
