"""Momentum memories: keys of past batches, for more negatives than a batch can hold."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import checks
from .anchors import Anchors
from .checks import WholeState, check_embeddings, check_matrix, check_size, one_of
from .distributed import consensus, gather_parts, padded, world_size
from .engine import processes
from .engine.exchange import Share
from .engine.matrix import MEMORY_BUDGET, Matrix, choose_engine
from .engine.pairs import Pairs
from .engine.ring import RingMatrix
from .engine.scores import IGNORE_ID, Embeddings, normalized
from .similarity import Engine, Similarity

__all__ = ["CoupledMemory", "MemorySimilarity", "MomentumEncoder"]


class CoupledMemory(WholeState):
    """Ring buffers of image keys and of the text keys that belong to them (CODER Sec. 3.2, USER
    Sec. III-D; MoCo).

    Losses read the buffers without a copy, so enqueue a batch *after* its backward pass: if
    backward still needs entries that were overwritten, PyTorch raises an error. Only
    ``len(memory)`` synchronises with an accelerator, so that steps may be recorded as CUDA graphs.
    See :doc:`methods/memory`.

    Args:
        size: number of entries; need not be a multiple of the batch size.
        dim: D of the embeddings.
        dtype: of the stored keys. float16 and bfloat16 halve the memory; scores are float32 all the
            same. A GPU multiplies half-precision embeddings fast only with keys of the same dtype.

    Attributes:
        images, texts: (size, dim) unit-length keys.
        ids: (size,) int64; the least int64 where there is no entry.
        enqueued: () int64, number of entries ever put in; the next goes to ``enqueued % size``.
    """

    images: Tensor
    texts: Tensor
    ids: Tensor
    enqueued: Tensor

    def __init__(self, size: int, dim: int, *, dtype: torch.dtype = torch.float32):
        super().__init__()
        check_size("size", size)
        check_size("dim", dim)
        if not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating-point type, got {dtype}")
        self.size, self.dim = size, dim
        # whether entries have ids; None: nothing was enqueued yet
        self._labelled: bool | None = None
        with torch.inference_mode(False):  # inference tensors could not be written to later
            self.register_buffer("images", torch.zeros(size, dim, dtype=dtype))
            self.register_buffer("texts", torch.zeros(size, dim, dtype=dtype))
            self.register_buffer("ids", torch.full((size,), IGNORE_ID))
            self.register_buffer("enqueued", torch.tensor(0))

    def __len__(self) -> int:
        """Return the number of valid entries. Synchronises with an accelerator."""
        return int((self.ids != IGNORE_ID).sum())

    def __bool__(self) -> bool:
        return True  # ``if memory`` asks whether there is one, be it empty

    @torch.no_grad()
    def enqueue(
        self,
        image_keys: Tensor,
        text_keys: Tensor,
        ids: Tensor | None = None,
        process_group: Any = None,
    ) -> None:
        """Store a batch of pairs in place of the oldest entries; of several processes, the batches
        of all, by rank.

        Args:
            image_keys, text_keys: (B, dim) floating point of any length, row i of one belonging to
                row i of the other. If there are more than ``size`` pairs, the last ones are kept.
            ids: (B,) integers, as in the losses: an entry is no negative of an anchor with the same
                id. Left out, entries are negatives of every anchor. All batches must have ids or
                none.
            process_group: the processes of a ``torch.distributed`` job that share the memory; by
                default, all.
        """
        one = world_size(process_group) == 1

        def checked() -> list[Tensor]:
            for name, x in (("image_keys", image_keys), ("text_keys", text_keys)):
                check_matrix(name, x, f"(B, {self.dim})", empty=not one)
                if x.shape != (image_keys.shape[0], self.dim):
                    raise ValueError(
                        f"{name}: expected shape {(image_keys.shape[0], self.dim)}, got {tuple(x.shape)}"
                    )
            if self._labelled not in (None, ids is not None):
                self._refuse("ids")
            keys = [image_keys.detach(), text_keys.detach()]
            return (
                keys
                if ids is None
                else [*keys, checks.as_ids("ids", ids, len(image_keys), image_keys.device)]
            )

        same = f"memory ({self.size}, {self.dim}) of {str(self.images.dtype)[6:]}"
        self._store(
            *(
                checked()
                if one
                else (torch.cat(x) for x in gather_parts(checked, process_group, same))
            )
        )

    def _store(self, *tensors: Tensor) -> None:
        """Store (B, dim) keys of images and texts, and ids if there are any, of this process alone."""
        self._labelled = len(tensors) == 3
        device = self.images.device
        images, texts, *own_ids = (x.to(device) for x in tensors)
        number = self.enqueued + torch.arange(images.shape[0], device=device)
        ids = own_ids[0] if own_ids else number + (IGNORE_ID + 1)  # unique ids, which match nothing
        finite = images.isfinite().all(1) & texts.isfinite().all(1)
        last = slice(-self.size, None)
        place = number[last] % self.size
        for buffer, keys in ((self.images, images), (self.texts, texts)):
            keys = normalized(torch.where(finite[last, None], keys[last], 0.0))
            buffer.index_copy_(0, place, keys.to(buffer.dtype))
        self.ids.index_copy_(0, place, torch.where(finite, ids, IGNORE_ID)[last])
        self.enqueued.add_(images.shape[0])

    def _refuse(self, name: str) -> None:
        expected = (
            "ids, as the memory's entries have them"
            if self._labelled
            else "None, as the memory has no ids"
        )
        raise ValueError(f"{name}: expected {expected}")

    def get_extra_state(self) -> dict[str, Any]:
        return {"labelled": self._labelled}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._labelled = state["labelled"]

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, valid={len(self)}, dtype={self.images.dtype}"


class MemorySimilarity(NamedTuple):
    """The similarities that a loss with a memory needs. The anchors of keys and memory are images,
    then texts.
    """

    batch: Similarity  # images with texts
    keys: Anchors  # images with the text keys; texts with the image keys
    memory: Anchors  # images with the memory's texts; texts with its images

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
        gather: bool = False,
        **shared: Any,
    ) -> MemorySimilarity:
        """Return the similarities of a batch; see :class:`itrloss.MemoryLoss`, which passes its
        arguments on.

        With ``gather``, of a batch that several processes share; ``shared``: see
        :meth:`itrloss.Similarity.sharded`.
        """
        options: dict[str, Any] = {
            "engine": engine,
            "check_finite": check_finite,
            "names": checks.IMAGES_AND_TEXTS,
        }
        ids, keys = (image_ids, text_ids), (image_keys, text_keys)
        compares = gather and not torch.compiler.is_compiling()
        with (
            consensus(shared.get("process_group"))
            if compares
            else contextlib.nullcontext() as agreed
        ):
            if not isinstance(memory, CoupledMemory):
                raise TypeError(f"memory: expected a CoupledMemory, got {type(memory).__name__}")
            if image_ids is None and text_ids is not None:
                raise ValueError(
                    "image_ids: expected ids for images and texts or for neither, got None"
                )
            if memory._labelled not in (None, image_ids is not None):
                memory._refuse("image_ids, text_ids")
            for side, own, x in zip(("image", "text"), (images, texts), keys, strict=True):
                check_embeddings(
                    own, x, check_finite, checks.Names(f"{side}s", f"{side}_keys"), empty=gather
                )
                if x.shape != own.shape:
                    expected = f"expected shape {tuple(own.shape)} like {side}s"
                    raise ValueError(f"{side}_keys: {expected}, got {tuple(x.shape)}")
            check_embeddings(
                images, memory.images, False, checks.Names("images", "memory"), empty=gather
            )
            if agreed is not None:
                types = ", ".join(str(x.dtype)[6:] for x in (memory.images, *keys))
                agreed.text = (
                    f"memory ({memory.size}, {memory.dim}); types of memory and keys {types}"
                )
        if gather:
            batch = Similarity.sharded(images, texts, *ids, **shared, **options)
        else:
            batch = Similarity(images, texts, *ids, **options)
        matrix, share = batch._matrix, batch._matrix.share
        v, w = matrix.embeddings
        assert w is not None
        v_keys, w_keys = (Embeddings(x.detach()) for x in keys)
        (rows, cols), (n, m) = matrix.pairs.ids_as_passed, matrix.shape
        budget = 0 if engine == "tiled" else MEMORY_BUDGET
        if share is None:
            if matrix.pairs.one_to_one:  # the ids are the same on both sides
                rows = cols = torch.arange(n, device=images.device) if cols is None else cols
            to_texts = Matrix(v, w_keys, matrix.pairs, matrix.engine, budget), 0
            to_images = Matrix(v_keys, w, matrix.pairs, matrix.engine, budget), 1
        else:  # this process's anchors, and the keys of all
            p, kind = share.processes, type(matrix)
            assert share.cols is not None
            w, (n, m), cols = Embeddings(share.cols), p.padded, p.ids[1].chunk(p.world)[p.rank]
            own = [padded(x.detach(), size) for x, size in zip(keys, (n, m), strict=True)]
            v_keys, w_keys = (
                Embeddings(x if kind is RingMatrix else processes.gather(x, p.group)) for x in own
            )
            to_texts = kind(v, w_keys, matrix.pairs, matrix.engine, budget), 0
            pairs = Pairs((m, n * p.world), (cols, p.ids[0]), images.device)
            to_images = kind(w, v_keys, pairs, matrix.engine, budget), 0
        of_images = Pairs((n, memory.size), (rows, memory.ids), images.device)
        of_texts = (
            of_images
            if rows is cols
            else Pairs((m, memory.size), (cols, memory.ids), images.device)
        )
        chosen = choose_engine(engine, max(n, m) * memory.size, MEMORY_BUDGET, images)
        to_memory = []
        for anchors, bank, entries in ((v, memory.texts, of_images), (w, memory.images, of_texts)):
            to_memory.append(Matrix(anchors, Embeddings(bank, False), entries, chosen, budget))
            to_memory[-1].bounded = True  # entries have unit length
        if share is not None:
            for queue, (of_keys, _), size in zip(
                to_memory, (to_texts, to_images), share.unpadded, strict=True
            ):
                queue.share = of_keys.share = Share(share.processes, None, (size,))
        return cls(
            batch, Anchors([to_texts], [to_images]), Anchors(*([(queue, 0)] for queue in to_memory))
        )


class MomentumEncoder(nn.Module):
    """A key encoder: the exponential moving average of an encoder's parameters, ``θ_k ← m θ_k + (1
    - m) θ_q``.

    It is called without a gradient. Call :meth:`update` once a step; USER does so before it
    computes the step's keys.

    Args:
        encoder: any module; the key encoder, the attribute ``module``, starts as a copy of it.
        momentum: m in [0, 1]. CODER 0.995, USER 0.999.
        buffers: ``"copy"`` takes the encoder's buffers (BatchNorm's statistics) as they are,
            ``"average"`` averages them too, but for integers.
        training: the mode it stays in, even if ``train()`` or ``eval()`` of a module that contains
            it is called.
    """

    def __init__(
        self,
        encoder: nn.Module,
        momentum: float = 0.995,
        *,
        buffers: Literal["copy", "average"] = "copy",
        training: bool = True,
    ):
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum: expected a number in [0, 1], got {momentum}")
        one_of("buffers", buffers, "copy", "average")
        self.module = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum, self.averages_buffers, self.mode = momentum, buffers == "average", training
        self.train()

    def train(self, mode: bool = True) -> MomentumEncoder:
        """Stay in the mode chosen at construction, whatever ``mode`` is."""
        return super().train(self.mode)

    @torch.no_grad()
    def update(self, encoder: nn.Module) -> None:
        """Move the averaged parameters towards the encoder's."""
        for own, new in zip(self.module.parameters(), encoder.parameters(), strict=True):
            own.lerp_(new, 1 - self.momentum)
        for own, new in zip(self.module.buffers(), encoder.buffers(), strict=True):
            averaged = self.averages_buffers and (own.is_floating_point() or own.is_complex())
            own.copy_(own.lerp(new, 1 - self.momentum) if averaged else new)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the keys, without a gradient."""
        return self.module(*args, **kwargs)
