"""Exchange between the processes of ``torch.distributed``."""

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

_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
_DIMS = 6  # of a shape that processes compare


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all processes in the order of their ranks, (world * B, ...); without a gradient.

    B must be the same on every process. Without a process group, or alone in it, ``x`` itself.
    """
    if world_size() == 1:
        return x
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def gather_parts(x: Tensor) -> Tensor:
    """:func:`gather_rows` of parts that need not have the same number of rows."""
    if world_size() == 1:
        return x
    own = torch.tensor([x.shape[0]], device=x.device)
    sizes = gather_rows(own).tolist()
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: x.shape[0]] = x.detach()
    parts = gather_rows(padded).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_table(x: Tensor) -> Tensor:
    """:func:`gather_parts` of tables (B, ...) that need not have the same number of columns: filled up with zeros."""
    width = int(gather_rows(torch.tensor([x.shape[1]], device=x.device)).amax())
    return gather_parts(torch.nn.functional.pad(x, (0, width - x.shape[1])))


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of the ``x`` of all processes, which have one shape; it is written over."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


@contextmanager
def failing_together(device: torch.device) -> Iterator[None]:
    """Raise in every process if one raises; one that failed alone would leave the others waiting for it.

    For what is done between exchanges: an exchange that some have left undone cannot be made up for.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    failed = gather_rows(torch.tensor([error is not None], device=device).int())
    if error is not None:
        raise error
    if bool(failed.any()):
        raise ValueError("gather: another process failed")


def _embeddings_of(sim: Any) -> tuple[Tensor, Tensor]:
    """Return the images and texts of a Similarity, if it is one of embeddings."""
    if not isinstance(sim, Similarity | Tensor):
        raise TypeError(f"scores: expected a Similarity, got {type(sim).__name__}")
    if isinstance(sim, Tensor) or sim._side or sim._inputs is None:
        raise ValueError("scores: expected a Similarity of embeddings, images as rows, for gather=True")
    check_unchanged([sim._matrix])
    return sim._inputs


_TOLD = (
    "inputs",
    "types",
    "dimensions",
    "normalize",
    "ids: some have none, or those of the texts alone",
    "questions, which are methods with their banks, and numbers",
)


def _agreed(sim: Similarity | Tensor, asked: str) -> tuple[Tensor, Tensor]:
    """Return images and texts of ``sim``, if all processes have some of the same kind and ask the same."""
    wrong: Exception | None = None
    mine = [0] * len(_TOLD)
    try:
        images, texts = _embeddings_of(sim)
    except (TypeError, ValueError, RuntimeError) as error:
        wrong = error
    else:
        assert isinstance(sim, Similarity)
        kinds = f"{images.dtype} {texts.dtype}"
        has = [x is None for x in sim.ids]
        numbers = zlib.crc32(kinds.encode()), images.shape[1], sim._matrix.bounded, has[0] + 2 * has[1]
        mine = [1, *map(int, numbers), zlib.crc32(asked.encode())]
    every = gather_rows(torch.tensor([mine], device=getattr(sim, "device", None)))
    if wrong is not None:
        raise wrong
    for what, alike in zip(_TOLD, (every == every[0]).all(0).tolist(), strict=True):
        if not alike:
            raise ValueError(f"gather: the processes differ in their {what}")
    return images, texts


class Shares:
    """The images and texts of all processes, each of which asks for its own.

    Args:
        sim: this process's, of embeddings, images as rows. Its ids hold across processes; those of texts alone number
            the process's own images.
        asked: what is asked, in words: the same in every process.

    Raises:
        TypeError, ValueError, RuntimeError: on every process, if something is wrong on any: a process that fails alone
            would leave others waiting.

    Attributes:
        sim: what was given.
        own: this process's images and texts.
        every: those of all processes, in the order of their ranks.
        first: the number of the first own image, and of the first own text, among them.
        ids: of own images and texts.
        every_ids: of all.
    """

    def __init__(self, sim: Similarity | Tensor, asked: str):
        images, texts = _agreed(sim, asked)
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
        self.normalize = sim._matrix.bounded
        self.engine = sim.engine if sim.engine in ("tiled", "triton") else "auto"

    def _across(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        images, texts = sim.ids
        numbers = torch.arange(sim.shape[0], device=sim.device) + self.first[0]
        if images is not None and texts is not None:
            return images, texts
        return numbers, numbers if texts is None else _numbered(texts, len(numbers), self.first[0])

    def beside(self, rows: Tensor, cols: Tensor, *ids: Tensor) -> Similarity:
        """Rows with columns, nothing matching unless there are ids."""
        if not ids:
            ids = torch.arange(len(rows) + len(cols), device=rows.device).split((len(rows), len(cols)))
        return Similarity(rows, cols, *ids, normalize=self.normalize, engine=self.engine)  # type: ignore[arg-type]

    def queries(self, side: int) -> Similarity:
        """Own images with all texts, or (1) own texts with all images."""
        return self.beside(self.own[side], self.every[1 - side], self.ids[side], self.every_ids[1 - side])


def _numbered(ids: Tensor, images: int, first: int) -> Tensor:
    """Return numbers of own images as those among the images of all; -1 for what is the number of none."""
    return torch.where((ids >= 0) & (ids < images), ids + first, -1)


def agree(x: Tensor) -> None:
    """Raise a ValueError in every process if the ``x`` of some has another type or shape than in others.

    Gathered as they are, bits of one type would be read as another's, and a longer batch would end or hang the job.
    """
    if world_size() == 1:
        return
    # A last batch differs when all before it did not, so each is compared. Processes that only have NCCL wait for
    # their device to do it; with "cpu:gloo,cuda:nccl", which init_process_group() takes by itself, the hosts talk.
    device = "cpu" if "cpu:" in str(dist.get_backend_config()) else x.device
    shape = [*x.shape, *[-1] * _DIMS][:_DIMS]
    own = torch.tensor([[_DTYPES.index(x.dtype), *shape]], device=device)
    kinds = [f"{_DTYPES[kind]} {tuple(n for n in size if n >= 0)}" for kind, *size in gather_rows(own).tolist()]
    if len(set(kinds)) > 1:
        got = ", ".join(f"{kind} in process {rank}" for rank, kind in enumerate(kinds))
        raise ValueError(f"gather: expected tensors of one type and shape in all processes, got {got}")


def gather(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all processes in the order of their ranks, (world * B, ...), with its gradient.

    Each process may then compute the loss of the whole batch. Its gradient comes back summed over the processes, which
    ``DistributedDataParallel`` divides by their number: what it leaves is the gradient of one process with the whole
    batch. Without it, average the gradients of the parameters yourself.

    Without a process group, or alone in it, ``x`` itself.

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
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.narrow(0, dist.get_rank() * ctx.size, ctx.size)


def gather_ids(ids: Tensor | None, images: int) -> Tensor | None:
    """Return the ids of all processes as int64; other types than integers are left to later checks.

    ``images``: 0, or how many there are in a process where ids number its own: another number stays that of none.
    """
    if ids is None or world_size() == 1:
        return ids
    if not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        ids = ids.long()  # small types could not hold the numbers of all
    agree(ids)
    return gather_rows(_numbered(ids, images, dist.get_rank() * images) if images else ids)
