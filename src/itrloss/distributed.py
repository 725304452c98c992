"""Exchange between the processes of ``torch.distributed``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._arguments import require_finite
from .engines.dispatch import Matrix
from .engines.tiles import first_order
from .similarity import Similarity


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


def _embeddings_of(sim: Any) -> Matrix:
    """Its matrix, if it is one of embeddings."""
    if not isinstance(sim, Similarity | Tensor):
        raise TypeError(f"scores: expected a Similarity, got {type(sim).__name__}")
    if isinstance(sim, Tensor) or sim._flipped or sim._matrix.cols is None:
        raise ValueError("scores: expected a Similarity of embeddings, images as rows, for gather=True")
    sim._matrix._check_unchanged()
    return sim._matrix


_TOLD = (
    "inputs",
    "types",
    "dimensions",
    "normalize",
    "ids: some have none, or those of the texts alone",
    "questions, which are methods with their banks, and numbers",
)


def _agreed(sim: Similarity | Tensor, asked: str) -> Matrix:
    """The matrix of ``sim``, if all processes have one of the same kind and ask the same."""
    matrix: Matrix | None = None
    wrong: Exception | None = None
    try:
        matrix = _embeddings_of(sim)
    except (TypeError, ValueError, RuntimeError) as error:
        wrong = error
    mine = [0] * len(_TOLD)
    if matrix is not None:
        assert matrix.cols is not None
        kinds = f"{matrix.rows.dtype} {matrix.cols.dtype}"
        has = [x is None for x in matrix.given_ids]
        numbers = zlib.crc32(kinds.encode()), matrix.rows.shape[1], matrix.normalize, has[0] + 2 * has[1]
        mine = [1, *map(int, numbers), zlib.crc32(asked.encode())]
    every = gather_rows(torch.tensor([mine], device=getattr(sim, "device", None)))
    if wrong is not None:
        raise wrong
    for what, alike in zip(_TOLD, (every == every[0]).all(0).tolist(), strict=True):
        if not alike:
            raise ValueError(f"gather: the processes differ in their {what}")
    assert matrix is not None
    return matrix


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
        matrix = _agreed(sim, asked)
        assert isinstance(sim, Similarity) and matrix.cols is not None
        self.sim, self.own = sim, (matrix.rows.detach(), matrix.cols.detach())
        self.every = gather_parts(self.own[0]), gather_parts(self.own[1])
        for name, x in zip(("images", "texts"), self.every, strict=True):
            require_finite(name, x)
        sizes = gather_rows(torch.tensor([sim.shape], device=sim.device))
        images, texts = sizes[: dist.get_rank()].sum(0).tolist()
        self.first = images, texts
        self.ids = self._across(sim)
        self.every_ids = gather_parts(self.ids[0]), gather_parts(self.ids[1])
        self.normalize, self.engine = matrix.normalize, sim.engine if sim.engine in ("tiled", "triton") else "auto"

    def _across(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        images, texts = sim._matrix.given_ids
        numbers = torch.arange(sim.shape[0], device=sim.device) + self.first[0]
        if images is not None and texts is not None:
            return images, texts
        if texts is None:
            return numbers, numbers
        own = (texts >= 0) & (texts < len(numbers))  # another number is that of no image
        return numbers, torch.where(own, numbers[texts * own], -1)

    def beside(self, rows: Tensor, cols: Tensor, *ids: Tensor) -> Similarity:
        """Rows with columns, nothing matching unless there are ids."""
        if not ids:
            ids = torch.arange(len(rows) + len(cols), device=rows.device).split((len(rows), len(cols)))
        return Similarity(rows, cols, *ids, normalize=self.normalize, engine=self.engine)  # type: ignore[arg-type]

    def queries(self, side: int) -> Similarity:
        """Own images with all texts, or (1) own texts with all images."""
        return self.beside(self.own[side], self.every[1 - side], self.ids[side], self.every_ids[1 - side])


def gather(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all processes in the order of their ranks, (world * B, ...), with its gradient.

    Each process may then compute the loss of the whole batch. Its gradient comes back summed over the processes, which
    ``DistributedDataParallel`` divides by their number: what it leaves is the gradient of one process with the whole
    batch. Without it, average the gradients of the parameters yourself.

    B must be the same on every process. Without a process group, or alone in it, ``x`` itself.
    """
    return x if world_size() == 1 else _Gather.apply(x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[0]
        return gather_rows(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.narrow(0, dist.get_rank() * ctx.size, ctx.size)


def gather_ids(ids: Tensor | None, images: int) -> Tensor | None:
    """Ids of all processes. ``images``: 0, or how many there are a process where ids number its own."""
    if ids is None or world_size() == 1:
        return ids
    return gather_rows(ids + dist.get_rank() * images)
