"""What processes compare before they compute, and tensors that are gathered from all of them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.vectors import host_may_read
from ..torch_versions import backends, current_accelerator, is_compiling
from . import collectives
from .collectives import ProcessGroup, world_size

NUMBERS = 6  # that processes exchange at most
KINDS = 4  # of ids, that they compare at most


class Consensus:
    """What a process has to say of its part of a collective computation, and what all said."""

    text = ""  # has to be the same in all processes
    #: Whether ids are strings, which they are in all processes or in none; None: there are no ids.
    kinds: Sequence[bool | None] = ()
    numbers: Sequence[int] = ()
    every: list[list[int]]  # the numbers of all processes, by rank

    def in_words(self) -> str:
        """Return the text, and the kinds of ids."""
        if not self.kinds:
            return self.text
        kinds = [bool(kind) for kind in self.kinds]
        return f"{self.text}; ids of strings {kinds if len(kinds) > 1 else kinds[0]}"


@contextmanager
def consensus(group: ProcessGroup = None) -> Iterator[Consensus]:
    """Run a block that checks a process's input, and raise an error in all processes or in none.

    They raise one if the block fails in one of them, or if their texts differ: no process waits in
    vain for one that failed. The block itself must not communicate. With a CPU backend, as
    ``init_process_group()`` without arguments has, only the hosts communicate; with NCCL alone,
    this synchronises.
    """
    mine = Consensus()
    failure = None
    try:
        yield mine
    except Exception as error:
        failure = error
        mine.text = f"{type(error).__name__}: {error}"
        mine.kinds = ()
    digest = zlib.crc32(mine.text.encode())
    kinds = [-1 if kind is None else int(kind) for kind in mine.kinds]
    kinds += [-1] * (KINDS - len(kinds))
    own = [int(failure is not None), digest, *kinds, *mine.numbers]
    own += [0] * (2 + KINDS + NUMBERS - len(own))
    every = collectives.all_gather(torch.tensor([own], device=exchange_device(group)), group)
    rows = every.tolist()
    mine.every = [row[2 + KINDS :] for row in rows]
    failed = [bool(row[0]) for row in rows]
    digests = {row[1] for row in rows}
    are_mixed = any({0, 1} <= {row[2 + k] for row in rows} for k in range(KINDS))
    if not any(failed) and len(digests) == 1 and not are_mixed:
        return
    texts = [""] * len(rows)
    dist.all_gather_object(texts, mine.in_words(), group=group)
    if failure is not None:
        raise failure
    raise_disagreement(texts, failed, group)


def raise_disagreement(
    texts: Sequence[str], failed: Sequence[bool], group: ProcessGroup
) -> NoReturn:
    """Raise the error of a process that did not fail: what others failed with, or what differs."""
    said: dict[str, list[str]] = {}  # by which processes
    some = any(failed)
    parts = texts if some else what_differs(texts)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, text, fails in zip(ranks, parts, failed, strict=True):
        if fails or not some:
            said.setdefault(text, []).append(str(rank))
    if some:
        words = [f"process {', '.join(by)} failed: {text}" for text, by in said.items()]
        raise ValueError(f"gather: {'; '.join(words)}")
    words = [f"{text} in process {', '.join(by)}" for text, by in said.items()]
    raise ValueError(f"gather: expected the same in all processes, got {'; '.join(words)}")


def exchange_device(group: ProcessGroup) -> torch.device | str | None:
    """Return the device of numbers that are exchanged: the CPU, if the job can."""
    if "cpu" in backends(group):
        return "cpu"
    return current_accelerator()


def what_differs(texts: Sequence[str]) -> list[str]:
    """Return the parts, between commas, semicolons and braces, in which texts are not all alike."""
    split = [
        re.split(r"(?:[,;] |[{}])(?![^\[(]*[\])])", text) for text in texts
    ]  # lists stay whole
    if len({len(parts) for parts in split}) > 1:
        return list(texts)
    kept: list[tuple[str, ...]] = []
    for parts in zip(*split, strict=True):
        if len(set(parts)) > 1:
            kept.append(parts)
    return [", ".join(x.strip() for x in parts) for parts in zip(*kept, strict=True)]


def gather(x: Tensor, process_group: ProcessGroup = None) -> Tensor:
    """Return the concatenation of ``x`` (B_r, ...) from all processes by rank, differentiable.

    Its gradient is the sum of the processes' gradients: as if their losses were added.
    ``DistributedDataParallel`` then divides the gradients of the parameters by the number of
    processes: if all compute the same loss, the result is the gradient of a single process with the
    whole batch. With a single process, return ``x`` itself.

    Raises:
        ValueError: in every process, if types, dimensions or whether there is a gradient differ
            between them, or one of them fails.
    """
    if world_size(process_group) == 1:
        return x
    (parts,) = gather_parts(lambda: [x], process_group)
    return torch.cat(parts)


def gather_parts(
    check: Callable[[], Sequence[Tensor]],
    group: ProcessGroup = None,
    text: str = "",
    kinds: Sequence[bool | None] = (),
) -> list[list[Tensor]]:
    """Return, of each tensor that ``check`` returns, the parts of all processes by rank.

    If ``check`` fails in one process, all raise an error; so they do if ``text`` or ``kinds``, see
    :class:`Consensus`, differ.
    """
    if is_compiling():  # nothing is compared then
        world = world_size(group)
        return [list(collectives.gather(x, group).chunk(world)) for x in check()]
    with consensus(group) as agreed:
        tensors = check()
        if not all(isinstance(x, Tensor) and x.dim() for x in tensors):
            got = [type(x).__name__ for x in tensors]
            raise TypeError(f"gather: expected tensors with rows, got {got}")
        types = [f"{described(x)} with a gradient {is_trained(x)}" for x in tensors]
        agreed.text = "; ".join([*types, text])
        agreed.kinds = kinds
        agreed.numbers = [len(x) for x in tensors]
    gathered = []
    for k, x in enumerate(tensors):
        sizes = [numbers[k] for numbers in agreed.every]
        gathered.append(parts_of_all(x, sizes, group))
    return gathered


def parts_of_all(x: Tensor, sizes: Sequence[int], group: ProcessGroup = None) -> list[Tensor]:
    """Return the parts ``x`` (B_r, ...) of all processes, whose numbers of rows all know."""
    most = max(1, *sizes)
    parts = collectives.gather(padded(x, most), group).split(most)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def rows_of_all(x: Tensor, sizes: Sequence[int], group: ProcessGroup = None) -> Tensor:
    """Return the concatenation of :func:`parts_of_all`, without a copy where all are of a size."""
    if len(set(sizes)) == 1:
        return collectives.gather(x, group)
    return torch.cat(parts_of_all(x, sizes, group))


def described(x: Tensor) -> str:
    """Return the dtype and the shape of a tensor, whose first size may differ: float32 (B, 5)."""
    sizes = ", ".join(["B", *map(str, x.shape[1:])])
    return f"{str(x.dtype).removeprefix('torch.')} ({sizes})"


def is_trained(x: Tensor) -> bool:
    """Return whether a tensor gets a gradient: a process where it does would wait in the backward
    pass for one where it does not.
    """
    return x.requires_grad and torch.is_grad_enabled()


def digest(x: Tensor | None) -> str:
    """Return a number, or a few letters that tell the values of tensors apart, to be compared by
    processes.

    Empty where the host would have to wait for them, on accelerators, and for shards of a tensor.
    """
    if x is None or not host_may_read(x) or type(x.detach()) is not Tensor:
        return ""
    if x.numel() == 1:
        return f"{x.item():.9g}"
    # a copy: a storage that NumPy shares cannot be resized, as FSDP does
    data = x.detach().clone().flatten().view(torch.uint8).numpy()
    return f"{zlib.crc32(data.tobytes()):08x}"


def padded(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Return ``x`` (B, ...) with further rows, (size, ...)."""
    if len(x) == size:
        return x
    # PyTorch 2.8 cannot pad a tensor without elements.
    further = x.new_full((size - len(x), *x.shape[1:]), value)
    return torch.cat([x, further])


def numbered(ids: Tensor, images: int, first: int) -> Tensor:
    """Return own images' numbers as numbers among all processes' images; -1 if out of range."""
    ids = ids.long()  # small types could overflow
    return torch.where((ids >= 0) & (ids < images), ids + first, -1)
