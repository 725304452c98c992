"""Communication between the processes of ``torch.distributed``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .engine import processes
from .engine.processes import world_size as world_size

__all__ = ["gather"]

# bytes of all processes' columns and their gradients that "auto" holds in one process
GATHERED = 2**30

_NUMBERS = 6  # that processes exchange at most


class Consensus:
    """What a process has to say of its part of a collective computation, and what all said."""

    text = ""  # has to be the same in all processes
    numbers: Sequence[int] = ()
    every: list[list[int]]  # the numbers of all processes, by rank


@contextmanager
def consensus(group: Any = None) -> Iterator[Consensus]:
    """Run a block that checks a process's input; raise an error in all processes if it does in one,
    or texts differ.

    So no process waits in vain for one that failed. The block itself must not communicate. With a
    CPU backend, such as that of ``init_process_group()`` without arguments, only the hosts
    communicate; with NCCL alone, this synchronises.
    """
    mine, failure = Consensus(), None
    try:
        yield mine
    except Exception as error:
        failure, mine.text = error, f"{type(error).__name__}: {error}"
    own = [int(failure is not None), zlib.crc32(mine.text.encode()), *mine.numbers]
    own += [0] * (2 + _NUMBERS - len(own))
    host = "cpu" in str(dist.get_backend_config(group))
    device = "cpu" if host else torch.accelerator.current_accelerator()
    every = processes.gather(torch.tensor([own], device=device), group).tolist()
    mine.every = [row[2:] for row in every]
    if all(row[:2] == [0, every[0][1]] for row in every):
        return
    texts, ranks = [""] * len(every), dist.get_process_group_ranks(group)
    processes.communicate(dist.all_gather_object, texts, mine.text, group=group)
    if failure is not None:
        raise failure
    said: dict[str, list[int]] = {}  # by which processes
    some = any(row[0] for row in every)
    for rank, row, text in zip(ranks, every, texts, strict=True):
        if row[0] or not some:
            said.setdefault(text, []).append(rank)
    where = {text: f"process {', '.join(map(str, by))}" for text, by in said.items()}
    if some:
        raise ValueError(
            f"gather: {'; '.join(f'{by} failed: {text}' for text, by in where.items())}"
        )
    got = "; ".join(f"{text} in {by}" for text, by in where.items())
    raise ValueError(f"gather: expected the same in all processes, got {got}")


def gather(x: Tensor, process_group: Any = None) -> Tensor:
    """Return the (B_0 + B_1 + ..., ...) concatenation of ``x`` (B_r, ...) from all processes by
    rank, differentiable.

    Its gradient is the sum of those of all processes: as if their losses were added.
    ``DistributedDataParallel`` then divides the gradients of the parameters by the number of
    processes: if all compute the same loss, the result is the gradient of a single process with the
    whole batch. With a single process, return ``x`` itself.

    Raises:
        ValueError: in every process, if types or dimensions differ between them, or one of them
            fails.
    """
    return (
        x
        if world_size(process_group) == 1
        else torch.cat(gather_parts(lambda: [x], process_group)[0])
    )


def gather_parts(
    check: Callable[[], Sequence[Tensor]], group: Any = None, text: str = ""
) -> list[list[Tensor]]:
    """Return the parts of all processes, by rank, of the tensors that ``check`` returns, if it
    fails in no process.

    ``text`` has to be the same in all.
    """
    if torch.compiler.is_compiling():  # nothing is compared then
        return [list(processes.gather(x, group).chunk(world_size(group))) for x in check()]
    with consensus(group) as agreed:
        tensors = check()
        if not all(isinstance(x, Tensor) and x.dim() for x in tensors):
            raise TypeError(
                f"gather: expected tensors with rows, got {[type(x).__name__ for x in tensors]}"
            )
        kinds = (
            f"{str(x.dtype)[6:]} ({', '.join(('B', *map(str, x.shape[1:])))})" for x in tensors
        )
        agreed.text, agreed.numbers = (
            ", ".join([*kinds, *filter(None, [text])]),
            [len(x) for x in tensors],
        )
    gathered = []
    for x, *sizes in zip(tensors, *agreed.every, strict=False):
        parts = processes.gather(padded(x, max(sizes)), group).split(max(1, *sizes))
        gathered.append([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return gathered


def choose_schedule(numel: int) -> Literal["all-gather", "ring"]:
    """Return the schedule that ``"auto"`` takes, by the number of elements of all columns (M, D).

    For each, 8 bytes are held: the element and its gradient in float32, or in a half type those and
    a rounded gradient.
    """
    return "ring" if 8 * numel > GATHERED and not torch.compiler.is_compiling() else "all-gather"


def padded(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Return ``x`` (B, ...) with further rows, (size, ...)."""
    return (
        x if len(x) == size else F.pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)), value=value)
    )


def gather_table(x: Tensor, group: Any = None) -> Tensor:
    """Return :func:`gather` of ``x`` (B, C), whose number of columns may differ, too: padded with
    zeros.
    """
    width = int(gather(torch.tensor([x.shape[1]], device=x.device), group).amax())
    return gather(F.pad(x, (0, width - x.shape[1])), group)


def numbered(ids: Tensor, images: int, first: int) -> Tensor:
    """Return int64 numbers of own images as numbers among those of all processes; -1 for those out
    of range.
    """
    ids = ids.long()  # small types could overflow
    return torch.where((ids >= 0) & (ids < images), ids + first, -1)
