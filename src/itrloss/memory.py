"""Momentum memories: keys of past batches, for more negatives than a batch can hold."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from . import checks
from .anchors import Anchors
from .checks import WholeState, as_ids, check_alike, check_matrix, check_size, one_of
from .distributed import gather
from .engine.matrix import MEMORY_BUDGET, Matrix, choose_engine
from .engine.pairs import Pairs
from .engine.scores import IGNORE_ID, Embeddings, inverse_norms, scaled
from .similarity import Engine, Similarity

__all__ = ["CoupledMemory", "MemorySimilarity", "MomentumEncoder"]


class CoupledMemory(WholeState):
    """Ring buffers of image keys and of the text keys that belong to them (CODER Sec. 3.2, USER Sec. III-D; MoCo).

    Keys are stored at unit length, over the oldest ones once the memory is full. Losses read the buffers without a
    copy, so enqueue a batch *after* its backward pass: if backward still needs entries that were overwritten, PyTorch
    raises an error. Only ``len(memory)`` synchronises with an accelerator, so that steps may be recorded as CUDA
    graphs. For keys that are not finite and for several processes see :doc:`methods/memory`.

    Args:
        size: number of entries; need not be a multiple of the batch size.
        dim: D of the embeddings.
        dtype: of the stored keys. float16 and bfloat16 halve the memory; scores are float32 all the same. A GPU
            multiplies half-precision embeddings fast only with keys of the same dtype.
        start: ``"empty"``, or ``"random"`` for a full memory of random unit vectors with non-negative coordinates.

    Attributes:
        images, texts: (size, dim) unit-length keys.
        ids: (size,) int64; the least int64 where there is no entry.
        enqueued: () int64, number of entries ever put in; the next goes to ``enqueued % size``.
    """

    images: Tensor
    texts: Tensor
    ids: Tensor
    enqueued: Tensor

    def __init__(
        self, size: int, dim: int, *, dtype: torch.dtype = torch.float32, start: Literal["empty", "random"] = "empty"
    ):
        super().__init__()
        check_size("size", size)
        check_size("dim", dim)
        if not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating-point type, got {dtype}")
        one_of("start", start, "empty", "random")
        #: The number of entries that the memory can hold.
        self.size = size
        #: The dimension of the embeddings, D.
        self.dim = dim
        with torch.inference_mode(False):  # inference tensors could not be written to later
            for name in ("images", "texts"):
                keys = torch.zeros(size, dim) if start == "empty" else torch.rand(size, dim)
                self.register_buffer(name, nn.functional.normalize(keys, dim=1).to(dtype))
            ids = torch.full((size,), IGNORE_ID) if start == "empty" else IGNORE_ID + 1 + torch.arange(size)
            self.register_buffer("ids", ids)
            self.register_buffer("enqueued", torch.tensor(0 if start == "empty" else size))
        self._labelled: bool | None = None  # whether entries have ids; None: nothing was enqueued yet

    def __len__(self) -> int:
        """Return the number of valid entries. Synchronises with an accelerator."""
        return int((self.ids != IGNORE_ID).sum())

    def __bool__(self) -> bool:
        """Return True, even for an empty memory: ``if memory`` asks whether there is one."""
        return True

    @torch.no_grad()
    def enqueue(self, image_keys: Tensor, text_keys: Tensor, ids: Tensor | None = None) -> None:
        """Store a batch of pairs in place of the oldest entries.

        Args:
            image_keys, text_keys: (B, dim) floating point of any length, row i of one belonging to row i of the other.
                If there are more than ``size`` pairs, the last ones are kept.
            ids: (B,) integers, as in the losses: an entry is no negative of an anchor with the same id. Left out,
                entries are negatives of every anchor. All batches must have ids or none.
        """
        self._check(image_keys, text_keys, ids)
        self._labelled = ids is not None
        images, texts = gather(image_keys), gather(text_keys)
        batch, device = images.shape[0], self.images.device
        if ids is None:  # unique ids, which match nothing
            ids = self.enqueued + torch.arange(IGNORE_ID + 1, IGNORE_ID + 1 + batch, device=device)
        else:
            ids = gather(ids.to(image_keys.device, torch.int64)).to(device)
        kept = min(batch, self.size)
        place = (self.enqueued + torch.arange(batch - kept, batch, device=device)) % self.size
        ids = ids[batch - kept :]
        for buffer, keys in ((self.images, images), (self.texts, texts)):
            keys = keys[batch - kept :].to(device)
            finite = keys.isfinite().all(1)
            keys = torch.where(finite[:, None], keys, 0.0)
            ids = torch.where(finite, ids, IGNORE_ID)
            buffer.index_copy_(0, place, scaled(keys, inverse_norms(keys)).to(buffer.dtype))
        self.ids.index_copy_(0, place, ids)
        self.enqueued.add_(batch)

    def _check(self, image_keys: Tensor, text_keys: Tensor, ids: Tensor | None) -> None:
        for name, keys in (("image_keys", image_keys), ("text_keys", text_keys)):
            check_matrix(name, keys, f"(B, {self.dim})")
            if keys.shape != (image_keys.shape[0], self.dim):
                raise ValueError(f"{name}: expected shape {(image_keys.shape[0], self.dim)}, got {tuple(keys.shape)}")
        if ids is not None:
            as_ids("ids", ids, image_keys.shape[0], image_keys.device)
        if self._labelled is not None and self._labelled != (ids is not None):
            had, got = ("ids", "none") if self._labelled else ("no ids", "some")
            raise ValueError(f"ids: the entries before had {had}, got {got}")

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state that is not in the buffers: whether entries have ids."""
        return {"labelled": self._labelled}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self._labelled = state["labelled"]

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, valid={len(self)}, dtype={self.images.dtype}"


class MemorySimilarity(NamedTuple):
    """The similarities that a loss with a memory needs. The anchors of keys and memory are images, then texts."""

    batch: Similarity  # images with texts
    keys: Anchors  # images with the text keys; texts with the image keys
    memory: Anchors  # images with the memory's texts; texts with its images
    entries: Tensor  # () int64, the number of valid entries in the memory

    @classmethod
    def of(
        cls,
        images: Tensor,
        texts: Tensor,
        image_keys: Tensor,
        text_keys: Tensor,
        memory: CoupledMemory,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
        *,
        engine: Engine = "auto",
        check_finite: bool = False,
    ) -> MemorySimilarity:
        """Return the similarities of a batch; see :class:`itrloss.MemoryLoss`, which passes its arguments on."""
        if not isinstance(memory, CoupledMemory):
            raise TypeError(f"memory: expected a CoupledMemory, got {type(memory).__name__}")
        if (image_ids is None) != (text_ids is None):
            missing = "image_ids" if image_ids is None else "text_ids"
            raise ValueError(f"{missing}: expected ids for images and texts or for neither, got None")
        if memory._labelled is not None and memory._labelled != (image_ids is not None):
            ids = "ids, as the memory's entries have them" if memory._labelled else "None, as the memory has no ids"
            raise ValueError(f"image_ids, text_ids: expected {ids}")
        options: dict[str, Any] = {"engine": engine, "check_finite": check_finite, "names": checks.IMAGES_AND_TEXTS}
        batch = Similarity(images, texts, image_ids, text_ids, **options)
        for name, own, keys in (("image_keys", images, image_keys), ("text_keys", texts, text_keys)):
            checks.check_embeddings(own, keys, check_finite, checks.Names("its embeddings", name))
            if keys.shape != own.shape:
                expected = f"shape {tuple(own.shape)} like its embeddings"
                raise ValueError(f"{name}: expected {expected}, got {tuple(keys.shape)}")
        if images.shape[1] != memory.dim:
            raise ValueError(f"memory: expected keys of dimension {images.shape[1]} like images, got {memory.dim}")
        check_alike("memory", memory.images, "images", images)
        (v, w), pairs, chosen = batch._matrix.embeddings, batch._matrix.pairs, batch._matrix.engine
        assert w is not None
        to_texts = Matrix(v, Embeddings(text_keys.detach()), pairs, chosen, MEMORY_BUDGET)
        to_images = Matrix(Embeddings(image_keys.detach()), w, pairs, chosen, MEMORY_BUDGET)
        ids = pairs.ids_as_passed
        if pairs.one_to_one:  # the ids are the same on both sides
            ids = (torch.arange(len(images), device=images.device) if ids[1] is None else ids[1],) * 2
        chosen = choose_engine(engine, max(len(images), len(texts)) * memory.size, MEMORY_BUDGET, images)
        budget, queues = 0 if engine == "tiled" else MEMORY_BUDGET, []
        entries = Pairs((len(images), memory.size), (ids[0], memory.ids), images.device)
        for anchors, bank, own in ((v, memory.texts, ids[0]), (w, memory.images, ids[1])):
            if own is not ids[0]:
                entries = Pairs((len(texts), memory.size), (own, memory.ids), images.device)
            queue = Matrix(anchors, Embeddings(bank, False), entries, chosen, budget)
            queue.bounded = True  # entries have unit length
            queues.append([(queue, 0)])
        valid = (memory.ids != IGNORE_ID).sum()
        return cls(batch, Anchors([(to_texts, 0)], [(to_images, 1)]), Anchors(*queues), valid)


def _average(momentum: float, averaged: Any, current: Any, count: Any) -> None:
    """Update as torch's ``get_ema_multi_avg_fn(momentum)`` does, which cannot be pickled."""
    get_ema_multi_avg_fn(momentum)(averaged, current, count)


class MomentumEncoder(AveragedModel):
    """A key encoder: the exponential moving average of an encoder's parameters, ``θ_k ← m θ_k + (1 - m) θ_q``.

    It is torch's :class:`~torch.optim.swa_utils.AveragedModel`, called without a gradient; its training mode is fixed.
    Call :meth:`update` once a step; USER does so before it computes the keys of the step.

    Args:
        encoder: any module; the key encoder starts as a copy of it.
        momentum: m in [0, 1]. CODER 0.995, USER 0.999.
        buffers: ``"copy"`` takes the encoder's buffers (BatchNorm's statistics) as they are, ``"average"`` averages
            them too.
        training: the mode it stays in, even if ``train()`` or ``eval()`` of a module that contains it is called.
    """

    def __init__(
        self,
        encoder: nn.Module,
        momentum: float = 0.995,
        *,
        buffers: Literal["copy", "average"] = "copy",
        training: bool = True,
    ):
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum: expected a number in [0, 1], got {momentum}")
        one_of("buffers", buffers, "copy", "average")
        super().__init__(encoder, multi_avg_fn=partial(_average, momentum), use_buffers=buffers == "average")
        self.n_averaged.fill_(1)  # the copy counts as the first model, or torch's first update would overwrite it
        self.requires_grad_(False)
        self.mode = training
        self.train()

    def train(self, mode: bool = True) -> MomentumEncoder:
        """Stay in the mode chosen at construction, whatever ``mode`` is."""
        return super().train(self.mode)

    def update(self, encoder: nn.Module) -> None:
        """Move the averaged parameters towards the encoder's."""
        count = self.n_averaged
        self.n_averaged = torch.ones_like(count, device="cpu")  # read by torch, which would synchronise
        try:
            self.update_parameters(encoder)
        finally:
            self.n_averaged = count
        count.add_(1)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the keys, without a gradient."""
        return super().forward(*args, **kwargs)
