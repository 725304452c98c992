"""Communication between the processes of ``torch.distributed``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import require_finite
from .engine.matrix import check_unchanged
from .engine.pairs import first_derivative_only
from .similarity import Similarity


def world_size() -> int:
    """Return the number of processes in the default group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(x: Tensor) -> Tensor:
    """Return the (world * B, ...) concatenation of ``x`` (B, ...) from all processes by rank, without a gradient.

    B must be the same on every process. With a single process, return ``x`` itself.
    """
    if world_size() == 1:
        return x
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def gather_parts(x: Tensor) -> Tensor:
    """Return :func:`gather_rows` of ``x``, whose number of rows may differ between processes."""
    if world_size() == 1:
        return x
    own = torch.tensor([x.shape[0]], device=x.device)
    sizes = gather_rows(own).tolist()
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: x.shape[0]] = x.detach()
    parts = gather_rows(padded).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_table(x: Tensor) -> Tensor:
    """Return :func:`gather_parts` of ``x`` (B, C), whose number of columns may differ: padded with zeros."""
    width = int(gather_rows(torch.tensor([x.shape[1]], device=x.device)).amax())
    return gather_parts(torch.nn.functional.pad(x, (0, width - x.shape[1])))


def sum_over_processes(x: Tensor) -> Tensor:
    """Return the sum of ``x`` over all processes, in place. Its shape must be the same on every process."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


@contextmanager
def failing_together(device: torch.device | None) -> Iterator[None]:
    """Raise an error in every process if the block does in one, as the others would hang in their next collective.

    The block itself must not communicate: a collective that some processes skipped cannot be repaired.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as exception:
        error = exception
    failed = gather_rows(torch.tensor([error is not None], device=device).int())
    if error is not None:
        raise error
    if bool(failed.any()):
        raise ValueError("gather: another process failed")


_AGREED = (
    "types",
    "dimensions",
    "normalize",
    "ids: some have none, or those of the texts alone",
    "questions, which are methods with their banks, and numbers",
)


def _agreed(sim: Any, question: str) -> tuple[Tensor, Tensor]:
    """Return the images and texts of ``sim``; raise an error unless all processes agree on their kind and question."""
    with failing_together(getattr(sim, "device", None)):
        if not isinstance(sim, Similarity | Tensor):
            raise TypeError(f"scores: expected a Similarity, got {type(sim).__name__}")
        if isinstance(sim, Tensor) or sim._side or sim._inputs is None:
            raise ValueError("scores: expected a Similarity of embeddings, images as rows, for gather=True")
        check_unchanged([sim._matrix])
        images, texts = sim._inputs
    types, ids = zlib.crc32(f"{images.dtype} {texts.dtype}".encode()), [x is None for x in sim.ids]
    mine = [types, images.shape[1], int(sim._matrix.bounded), ids[0] + 2 * ids[1], zlib.crc32(question.encode())]
    every = gather_rows(torch.tensor([mine], device=sim.device))
    for what, alike in zip(_AGREED, (every == every[0]).all(0).tolist(), strict=True):
        if not alike:
            raise ValueError(f"gather: the processes differ in their {what}")
    return images, texts


class Shares:
    """The images and texts of all processes, each of which computes the results of its own queries.

    Every process raises an error if one does: if it failed alone, the others would hang.

    Args:
        sim: this process's similarity of embeddings, images as rows. Its ids are valid across processes; ids of texts
            alone are numbers of this process's images.
        question: what is computed, in words: it has to be the same in every process.

    Attributes:
        own, ids: this process's images and texts, and their ids; ``every``, ``every_ids`` those of all, by rank.
        first: the indices of the first own image and the first own text in ``every``.
    """

    def __init__(self, sim: Similarity | Tensor, question: str):
        images, texts = _agreed(sim, question)
        assert isinstance(sim, Similarity)
        self.sim, self.own = sim, (images.detach(), texts.detach())
        self.every = gather_parts(self.own[0]), gather_parts(self.own[1])
        for name, x in zip(("images", "texts"), self.every, strict=True):
            require_finite(name, x)
        sizes = gather_rows(torch.tensor([sim.shape], device=sim.device))
        first = sizes[: dist.get_rank()].sum(0).tolist()
        self.first = first[0], first[1]
        self.ids = self._across(sim)
        self.every_ids = gather_parts(self.ids[0]), gather_parts(self.ids[1])

    def _across(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        images, texts = sim.ids
        numbers = torch.arange(sim.shape[0], device=sim.device) + self.first[0]
        if images is not None and texts is not None:
            return images, texts
        return numbers, numbers if texts is None else _numbered(texts, len(numbers), self.first[0])

    def queries(self, side: int) -> Similarity:
        """Return the similarity of own images with all texts (``side`` 0), or of own texts with all images (1)."""
        engine: Any = self.sim.engine if self.sim.engine in ("tiled", "triton") else "auto"
        ids = self.ids[side], self.every_ids[1 - side]
        normalize = self.sim._matrix.bounded
        return Similarity(self.own[side], self.every[1 - side], *ids, normalize=normalize, engine=engine)


def _numbered(ids: Tensor, images: int, first: int) -> Tensor:
    """Return numbers of own images as numbers among the images of all processes; -1 for those out of range."""
    return torch.where((ids >= 0) & (ids < images), ids + first, -1)


def agree(x: Tensor) -> None:
    """Raise a ValueError in every process if the dtype or shape of ``x`` differs between processes.

    Gathered unchecked, the bits of one dtype would be read as another, and a longer batch would crash or hang the job.
    """
    # Every batch is compared, since a last one may be the first to differ. With NCCL alone that synchronises with the
    # device; with "cpu:gloo,cuda:nccl", the default of init_process_group(), only the hosts communicate.
    kinds = [""] * world_size()
    dist.all_gather_object(kinds, f"{x.dtype} {tuple(x.shape)}")
    if len(set(kinds)) > 1:
        got = ", ".join(f"{kind} in process {rank}" for rank, kind in enumerate(kinds))
        raise ValueError(f"gather: expected tensors of one type and shape in all processes, got {got}")


def gather(x: Tensor) -> Tensor:
    """Return the (world * B, ...) concatenation of ``x`` (B, ...) from all processes by rank, with its gradient.

    Each process may then compute the loss of the whole batch. The gradient of ``x`` is summed over the processes, and
    ``DistributedDataParallel`` divides that of the parameters by their number: the result is the gradient of a single
    process with the whole batch. Without DistributedDataParallel, average the gradients of the parameters yourself.

    With a single process, return ``x`` itself.

    Raises:
        ValueError: in every process, if types or shapes differ between them.
    """
    if world_size() == 1:
        return x
    agree(x)
    return _Gather.apply(x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[0]
        return gather_rows(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        first_derivative_only()
        total = sum_over_processes(grad.clone(memory_format=torch.contiguous_format))
        return total.narrow(0, dist.get_rank() * ctx.size, ctx.size)


def gather_ids(ids: Tensor | None, images: int) -> Tensor | None:
    """Return the ids of all processes as int64; later checks report dtypes that are not integers.

    ``images``: if the ids are numbers of the process's own images, how many it has, else 0. Numbers out of range match
    no image.
    """
    if ids is None or world_size() == 1:
        return ids
    if not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        ids = ids.long()  # small dtypes could overflow with the numbers of all images
    agree(ids)
    return gather_rows(_numbered(ids, images, dist.get_rank() * images) if images else ids)
