"""Momentum memories: keys of past batches, for more negatives than a batch can hold."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import checks
from .anchors import Anchors, AnchorSide
from .checks import (
    CheckedModule,
    IdsLike,
    KeepsDtypes,
    WholeState,
    check_alike,
    check_embeddings,
    check_matrix,
    one_of,
    option,
    takes_queries,
)
from .distributed import ProcessGroup, collectives
from .distributed.consensus import digest, gather_parts, padded, world_size
from .distributed.shards import Share
from .engine.matrix import (
    MEMORY_BUDGET,
    Matrix,
    choose_engine,
    is_small,
    large_matrix,
    memory_matrix,
)
from .engine.related import PassedIds, UnknownRelation, relation_of
from .engine.relation import IGNORE_ID, Relation, are_sets
from .engine.step import NO_COLUMNS, Layout, Place, Step, StepPart
from .engine.vectors import Embeddings, host_may_read, normalized
from .similarity import SIDES, Directions, Engine, Similarity, as_directions
from .torch_versions import is_compiling

__all__ = ["CoupledMemory", "MemorySimilarity", "MomentumEncoder"]

HALF = torch.float16, torch.bfloat16


class CoupledMemory(CheckedModule):
    """Ring buffers of image keys and of the text keys that belong to them (CODER Sec. 3.2, USER
    Sec. III-D; MoCo).

    Losses read the buffers without a copy. A batch that is enqueued *before* the backward pass, as
    in the forward pass of MoCo's and ALBEF's models, goes into copies of the buffers, which take
    their place; PyTorch before 2.1, and a compiled step, then raise an error in the backward pass.
    Only ``len(memory)`` synchronises with an accelerator, so that steps may be recorded as CUDA
    graphs, if each enqueues after its backward pass. See :doc:`losses/memory`.

    Args:
        size: number of entries; need not be a multiple of the batch size.
        dim: D of the embeddings.
        dtype: of the stored keys. float16 and bfloat16 halve the memory; scores are float32 all the
            same. The Triton engine copies a float32 memory in each step, rounded to the dtype of a
            batch in half precision.

    Attributes:
        images, texts: (size, dim) unit-length keys.
        ids: (size,) int64; the least int64 where there is no entry.
        enqueued: () int64, number of entries ever put in; the next goes to ``enqueued % size``.
    """

    size: int = option(at_least=1, fixed=True)
    dim: int = option(at_least=1, fixed=True)
    images: Tensor
    texts: Tensor
    ids: Tensor
    enqueued: Tensor

    def __init__(self, size: int, dim: int, *, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.size = size
        self.dim = dim
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating-point type, got {dtype!r}")
        with torch.inference_mode(False):  # inference tensors could not be written to later
            self.register_buffer("images", torch.empty(size, dim, dtype=dtype))
            self.register_buffer("texts", torch.empty(size, dim, dtype=dtype))
            self.register_buffer("ids", torch.empty(size, dtype=torch.int64))
            # not torch.tensor(0), which a CUDA graph cannot copy from the host
            self.register_buffer("enqueued", torch.zeros((), dtype=torch.int64))
        self.reset_parameters()
        self.register_load_state_dict_post_hook(find_labels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Empty the memory, as is needed after ``to_empty``."""
        # Whether entries have ids; None: nothing was enqueued yet.
        self._labelled: bool | None = None
        # Whether these ids are strings; None: not known, as of a memory that was loaded.
        self._named: bool | None = None
        self.images.zero_()
        self.texts.zero_()
        self.ids.fill_(IGNORE_ID)
        self.enqueued.zero_()

    def __len__(self) -> int:
        """Return the number of valid entries. Synchronises with an accelerator."""
        return int((self.ids != IGNORE_ID).sum())

    @property
    def is_new(self) -> bool:
        """Whether nothing was enqueued yet. Does not synchronise with an accelerator."""
        return self._labelled is None

    def __bool__(self) -> bool:
        return True  # ``if memory`` is to say whether there is one, be it empty

    @takes_queries
    @torch.no_grad()
    def enqueue(
        self,
        image_keys: Tensor,
        text_keys: Tensor,
        ids: IdsLike | None = None,
        process_group: ProcessGroup = None,
    ) -> None:
        """Store a batch of pairs in place of the oldest entries.

        If several processes share the memory, it stores the batches of all of them, by rank. With a
        loss inside of ``torch.utils.checkpoint``, enqueue after the backward pass: its second
        forward pass would see the new entries.

        Args:
            image_keys, text_keys: (B, dim) floating point of any length, row i of one belonging to
                row i of the other. If there are more than ``size`` pairs, the last ones are kept.
            ids: (B,) integers or strings, as in the losses: an entry is no negative of an anchor
                with the same id. Left out, entries are negatives of every anchor. All batches must
                have ids or none, and all integers or all strings.
            process_group: the processes of a ``torch.distributed`` job that share the memory; by
                default, all.
        """
        if world_size(process_group) == 1:
            self.enqueue_alone(image_keys, text_keys, ids)
            return

        def checked() -> list[Tensor]:
            """Return the keys, and ids if there are any; raise an error if they do not fit."""
            return self._checked(image_keys, text_keys, ids)

        dtype = str(self.images.dtype).removeprefix("torch.")
        same = (
            f"memory ({self.size}, {self.dim}) of {dtype}; entries so far {digest(self.enqueued)}"
        )
        kind = checks.kind_of(ids)
        parts = gather_parts(checked, process_group, same, [kind])
        self._store(kind, *[torch.cat(x) for x in parts])

    @takes_queries
    @torch.no_grad()
    def enqueue_alone(
        self, image_keys: Tensor, text_keys: Tensor, ids: IdsLike | None = None
    ) -> None:
        """Store a batch of pairs of this process alone; for the arguments see :meth:`enqueue`.

        It is for memories that processes do not share: each may then hold other entries.
        """
        keys = self._checked(image_keys, text_keys, ids)
        self._store(checks.kind_of(ids), *keys)

    def _checked(self, image_keys: Tensor, text_keys: Tensor, ids: IdsLike | None) -> list[Tensor]:
        """Return the keys, and ids if there are any; raise an error if they do not fit."""
        image_keys = checks.from_numpy(image_keys)
        text_keys = checks.from_numpy(text_keys)
        for name, x in (("image_keys", image_keys), ("text_keys", text_keys)):
            check_matrix(name, x, f"(B, {self.dim})", empty=True)
            shape = image_keys.shape[0], self.dim
            if x.shape != shape:
                hint = checks.repeated_rows("image_keys", len(image_keys), len(text_keys))
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}{hint}")
        self.check_labels("ids", ids is not None)
        self.check_names("ids", ids)
        keys = [image_keys.detach(), text_keys.detach()]
        if ids is None:
            return keys
        return [*keys, checks.as_ids("ids", ids, len(image_keys), image_keys.device)]

    def _store(
        self, named: bool | None, images: Tensor, texts: Tensor, own_ids: Tensor | None = None
    ) -> None:
        """Store (B, dim) keys of images and texts, and ids if there are any.

        ``named``: whether ids are strings; None if this process has none.
        """
        if len(images) == 0:  # which says nothing of later batches
            return
        device = self.images.device
        images = images.to(device)
        texts = texts.to(device)
        number = self.enqueued + torch.arange(len(images), device=device)
        ids = number + (IGNORE_ID + 1)  # unique ids, which match nothing
        if own_ids is not None:
            ids = own_ids.to(device)
        finite = images.isfinite().all(1) & texts.isfinite().all(1)
        last = slice(-self.size, None)
        place = number[last] % self.size
        if is_saved(self.images) or is_saved(self.texts):
            with torch.inference_mode(False):  # of tensors made in it, no loss has a gradient
                self.images = self.images.clone()
                self.texts = self.texts.clone()
                self.ids = self.ids.clone()
        for buffer, keys in ((self.images, images), (self.texts, texts)):
            unit = normalized(torch.where(finite[last, None], keys[last], 0.0))
            buffer.index_copy_(0, place, unit.to(buffer.dtype))
        self.ids.index_copy_(0, place, torch.where(finite, ids, IGNORE_ID)[last])
        self.enqueued.add_(len(images))
        # last, as keys of a type that PyTorch does not compute with fail above
        self._labelled = own_ids is not None
        if named is not None:
            self._named = named

    def first_dimensions(self, d: int) -> CoupledMemory:
        """Return a memory with the first d dimensions of all entries, at unit length.

        It is a copy: what is enqueued into it does not get into this one.
        """
        part = empty_memory(self.size, self.images[:, :d])
        with torch.no_grad():
            part.images.copy_(normalized(self.images[:, :d]))
            part.texts.copy_(normalized(self.texts[:, :d]))
            part.ids.copy_(self.ids)
            part.enqueued.copy_(self.enqueued)
        part._labelled = self._labelled
        part._named = self._named
        return part

    def check_labels(self, name: str, labelled: bool) -> None:
        """Raise an error unless entries have ids if, and only if, a batch has them."""
        if self._labelled in (None, labelled):
            return
        expected = "None, as the memory has no ids"
        if self._labelled:
            expected = "ids, as the memory's entries have them"
        raise ValueError(f"{name}: expected {expected}")

    def check_names(self, name: str, ids: IdsLike | None) -> None:
        """Raise a TypeError for strings where the entries' ids are integers, and the other way
        round: none would match.
        """
        named = checks.kind_of(ids)
        if named is None or self._named is None or named == self._named:
            return
        checks.as_id_numbers(name, ids)  # raises its own error for what is neither
        kinds = {True: "strings", False: "integers"}
        expected = f"{kinds[self._named]}, as the ids of the memory's entries"
        raise TypeError(f"{name}: expected {expected}, got {kinds[named]}")

    def extra_repr(self) -> str:
        """Return the size, the dimension, the number of valid keys and their dtype."""
        valid = "on meta" if self.ids.is_meta else len(self)
        return f"size={self.size}, dim={self.dim}, valid={valid}, dtype={self.images.dtype}"


def is_saved(buffer: Tensor) -> bool:
    """Return whether a backward pass that is to come has saved a buffer: then more than its object
    in Python refers to it.
    """
    count = getattr(buffer, "_use_count", None)  # from PyTorch 2.1 on
    return count is not None and not is_compiling() and count() > 1


def find_labels(memory: CoupledMemory, _: object) -> None:
    """Find whether the entries that a memory loaded have ids. Synchronises with an accelerator.

    Entries without ids are numbered from the least int64 on.
    """
    memory._named = None
    if memory.ids.is_meta:
        return
    memory._labelled = None
    if len(memory):
        memory._labelled = bool((memory.ids > IGNORE_ID + memory.enqueued).any())


class MemorySimilarity(NamedTuple):
    """The similarities that a loss with a memory needs.

    The anchors are images, then texts; of one ``directions``, images or texts.
    """

    batch: Similarity  # images with texts
    anchors: Anchors  # of the batch
    keys: Anchors  # images with the text keys; texts with the image keys
    memory: Anchors  # images with the memory's texts; texts with its images
    directions: Directions

    @classmethod
    def of(  # noqa: PLR0913 (the arguments of the losses with a memory)
        cls,
        images: Tensor,
        texts: Tensor,
        image_keys: Tensor,
        text_keys: Tensor,
        memory: CoupledMemory,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        directions: Directions = "both",
        engine: Engine = "auto",
        check_finite: bool = False,
        gather: bool = False,
        process_group: ProcessGroup = None,
        same: Callable[[], str] | None = None,
    ) -> MemorySimilarity:
        """Return the similarities of a batch, from the arguments of :class:`MemoryLoss`.

        With ``gather``, it is a batch that several processes share; ``same``: see
        :meth:`itrloss.Similarity.sharded`.
        """
        directions = as_directions(directions)
        batch = images, texts
        keys = image_keys, text_keys
        ids = image_ids, text_ids

        def checked() -> str:
            """Check the input; return what has to be the same in all processes."""
            check_memory_input(batch, keys, ids, memory, check_finite, empty=True)
            words = described(memory, keys)
            return words if same is None else f"{words}; {same()}"

        sides = SIDES[directions]
        if gather and world_size(process_group) > 1:
            sim = Similarity.sharded(
                *batch,
                *ids,
                process_group=process_group,
                same=checked,
                engine=engine,
                check_finite=check_finite,
                names=checks.IMAGES_AND_TEXTS,
            )
            of_keys, entries = several_processes(sim, keys, memory, engine, sides)
        else:
            check_memory_input(batch, keys, ids, memory, check_finite, empty=False)
            relation = relation_of_batch(batch, ids)
            matrices, entries = one_process(batch, keys, memory, relation, engine, sides)
            whole, to_text_keys, to_image_keys = matrices
            sim = Similarity.of_anchors(AnchorSide(whole, 0))
            of_keys = [AnchorSide(to_text_keys, 0), AnchorSide(to_image_keys, 1)]
        return cls(
            sim,
            sim.towards(directions),
            Anchors(*[[of_keys[side]] for side in sides]),
            Anchors(*[[side] for side in entries]),
            directions,
        )


def described(memory: CoupledMemory, keys: tuple[Tensor, Tensor]) -> str:
    """Return what has to be the same of a memory and of keys in all processes."""
    dtypes = [x.dtype for x in (memory.images, *keys)]
    types = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"memory ({memory.size}, {memory.dim}); types of memory and keys {types}"


def relation_of_batch(batch: tuple[Tensor, Tensor], ids: PassedIds) -> Relation:
    """Return who matches in a batch; raise an error if nothing says it."""
    images, texts = batch
    shape = images.shape[0], texts.shape[0]
    relation = relation_of(shape, ids, None, images.device, checks.IMAGES_AND_TEXTS)
    if isinstance(relation, UnknownRelation):
        raise relation.error
    return relation


def check_memory_input(
    batch: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    ids: PassedIds,
    memory: CoupledMemory,
    check_finite: bool,
    empty: bool,
) -> None:
    """Raise an error unless keys and memory go with a batch, which may be ``empty``."""
    if not isinstance(memory, CoupledMemory):
        raise TypeError(f"memory: expected a CoupledMemory, got {type(memory).__name__}")
    image_ids, text_ids = ids
    if image_ids is None and text_ids is not None:
        raise ValueError("image_ids: expected ids for images and texts or for neither, got None")
    memory.check_labels("image_ids, text_ids", image_ids is not None)
    memory.check_names("image_ids", image_ids)
    if text_ids is not image_ids:
        memory.check_names("text_ids", text_ids)
    for side, own, own_keys in zip(("image", "text"), batch, keys, strict=True):
        names = checks.Names(f"{side}s", f"{side}_keys")
        check_embeddings(own, own_keys, check_finite, names, empty=empty)
        if own_keys.shape != own.shape:
            expected = f"expected shape {tuple(own.shape)} like {side}s"
            raise ValueError(f"{side}_keys: {expected}, got {tuple(own_keys.shape)}")
    images, _ = batch
    if images.shape[1] != memory.dim:
        expected = f"embeddings of dimension {images.shape[1]} like images"
        raise ValueError(f"memory: expected {expected}, got {memory.dim}")
    check_alike("memory", memory.images, "images", images)


def one_process(
    given: tuple[Tensor, Tensor],  # (N, D) images and (M, D) texts
    keys: tuple[Tensor, Tensor],  # of both
    memory: CoupledMemory,
    relation: Relation,  # of the batch
    engine: Engine,
    sides: tuple[int, ...],  # that are anchors of the memory
) -> tuple[list[Matrix], list[AnchorSide]]:
    """Return the matrices of a batch that this process has alone: with itself, images with text
    keys, image keys with texts; and the anchors of the memory.
    """
    keys = keys[0].detach(), keys[1].detach()
    images = Embeddings(given[0])
    texts = Embeddings(given[1])
    batch = images, texts
    ids = ids_of_anchors(relation)
    chosen, is_small_batch = engine_for(math.prod(relation.shape), engine, images)
    if not is_small_batch:
        image_keys, text_keys = [keys_like(*x, chosen) for x in zip(batch, keys, strict=True)]
        pairs = (images, texts), (images, text_keys), (image_keys, texts)
        budget = budget_of(engine)
        matrices = [large_matrix(*x, relation, chosen, budget) for x in pairs]
        return matrices, sides_of_memory(batch, memory, ids, sides, engine)
    anchors = sum([relation.shape[side] for side in sides])
    of_memory, is_small_memory = engine_for(anchors * memory.size, engine, images)
    if not is_small_memory:
        matrices, _ = matrices_of_step(batch, keys, memory, (), relation, chosen)
        return matrices, sides_of_memory(batch, memory, ids, sides, engine)
    matrices, table = matrices_of_step(batch, keys, memory, sides, relation, chosen)
    return matrices, sides_of_table(batch, memory, ids, sides, of_memory, table)


def budget_of(engine: Engine) -> int:
    """Return the bytes of scores that a matrix may keep."""
    return 0 if engine == "tiled" else MEMORY_BUDGET


def engine_for(numel: int, engine: Engine, like: Embeddings) -> tuple[str, bool]:
    """Return the engine for so many scores, and whether they are kept in the graph of a step."""
    chosen = choose_engine(engine, numel, MEMORY_BUDGET, like.x)
    return chosen, is_small(chosen, numel, budget_of(engine), like.dtype)


def matrices_of_step(
    batch: tuple[Embeddings, Embeddings],
    keys: tuple[Tensor, Tensor],
    memory: CoupledMemory,
    sides: tuple[int, ...],  # whose scores with the memory are small, too
    relation: Relation,  # of the batch
    engine: str,
) -> tuple[list[Matrix], StepPart]:
    """Return the small matrices of :func:`one_process`, whose vectors go through one node, and the
    scores of some sides with the memory, one above the other.
    """
    images, texts = batch
    image_keys, text_keys = keys
    # Of keys, the pairs are needed. Where the host may not read which, all scores are visited.
    scores_keys = not relation.one_to_one and not host_may_read(images.x)
    layout, of_keys = layout_of_step(relation, sides, scores_keys)
    banks = memory.texts, memory.images
    constants = [None, *[banks[side] for side in sides]]
    constants += [None for _ in layout.places[len(constants) :]]
    step = Step(layout, constants, (images.target, texts.target, text_keys, image_keys))
    part = StepPart(step, (0,), *layout.places[0])
    matrices = [Matrix(relation, engine, images, vectors=batch, part=part)]
    first = 1 + len(sides)
    for k, place in enumerate(of_keys):
        numbers = (first + k,) if scores_keys else ()
        part = StepPart(step, numbers, *place, k if layout.diagonals else None)
        matrices.append(Matrix(relation, engine, batch[k], part=part))
    return matrices, StepPart(step, tuple(range(1, first)), slice(0, 0), NO_COLUMNS)


def layout_of_step(
    relation: Relation, sides: tuple[int, ...], scores_keys: bool
) -> tuple[Layout, tuple[Place, Place]]:
    """Return where the images, the texts, the text keys and the image keys are in a step, and what
    of them is multiplied; and where the images with text keys, and the image keys with texts are.
    """
    n, m = relation.shape
    of_images, of_texts, of_text_keys, of_image_keys = consecutive(n, m, m, n)
    own = of_images, of_texts
    of_keys = (of_images, of_text_keys), (of_image_keys, of_texts)
    places: list[Place] = [own, *[(own[side], NO_COLUMNS) for side in sides]]
    if scores_keys:
        places += of_keys
    return Layout(n + m, True, tuple(places), of_keys if relation.one_to_one else ()), of_keys


def consecutive(*sizes: int) -> list[slice]:
    """Return where parts of these sizes are, one after the other."""
    return [slice(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True)]


def ids_of_anchors(relation: Relation) -> tuple[Tensor, Tensor]:
    """Return the ids (A,), or the sets of labels (A, k), of the images and of the texts of a batch:
    their numbers, if there are no ids.
    """
    image_ids, text_ids = relation.ids_as_passed
    if are_sets(relation.ids):
        image_ids, text_ids = relation.ids
    if relation.one_to_one:  # the ids are the same on both sides
        image_ids = text_ids
    if image_ids is None:  # those of the texts, if there are any, are numbers of images
        image_ids = torch.arange(relation.shape[0], device=relation.device)
    of_images = image_ids.to(relation.device)
    if text_ids is None or text_ids is image_ids:
        return of_images, of_images
    return of_images, text_ids.to(relation.device)


def sides_of_table(
    batch: tuple[Embeddings, Embeddings],
    memory: CoupledMemory,
    ids: tuple[Tensor, Tensor],  # of both
    sides: tuple[int, ...],
    engine: str,
    table: StepPart,  # the scores of all of them
) -> list[AnchorSide]:
    """Return the anchors of some sides, with the entries of the other side as candidates, where all
    scores are one small matrix.
    """
    own = tuple([batch[side] for side in sides])
    relation = relation_to_entries(joined_ids([ids[side] for side in sides]), memory)
    matrix = Matrix(relation, engine, own[0], sources=own, part=table, is_memory=True)
    return [AnchorSide(matrix, 0, before=k, own_size=len(x)) for k, x in enumerate(own)]


def sides_of_memory(
    batch: tuple[Embeddings, Embeddings],
    memory: CoupledMemory,
    ids: tuple[Tensor, Tensor],  # of both
    sides: tuple[int, ...],
    engine: Engine,
) -> list[AnchorSide]:
    """Return the anchors of some sides, with the entries of the other side as candidates."""
    numel = max(ids[0].shape[0], ids[1].shape[0]) * memory.size
    chosen = choose_engine(engine, numel, MEMORY_BUDGET, batch[0].x)
    relation: Relation | None = None
    banks = memory.texts, memory.images
    found = []
    for side in sides:
        if relation is None or ids[0] is not ids[1]:  # what is known of one side serves the other
            relation = relation_to_entries(ids[side], memory)
        bank = keys_like(batch[side], banks[side], chosen, is_unit=True)
        matrix = memory_matrix(batch[side], bank, relation, chosen, budget_of(engine))
        found.append(AnchorSide(matrix, 0))
    return found


def joined_ids(ids: Sequence[Tensor]) -> Tensor:
    """Return ids (A,), or sets of labels (A, k) of the width of the largest, of several sides."""
    if ids[0].dim() == 2:
        width = max([x.shape[1] for x in ids])
        ids = [F.pad(x, (0, width - x.shape[1]), value=IGNORE_ID) for x in ids]
    return torch.cat(list(ids))


def relation_to_entries(ids: Tensor, memory: CoupledMemory) -> Relation:
    """Return which of a memory's entries match anchors with ids (A,) or sets of labels (A, k)."""
    entries = memory.ids if ids.dim() == 1 else memory.ids[:, None]
    return Relation((ids.shape[0], memory.size), (ids, entries), ids.device)


def several_processes(
    batch: Similarity,
    keys: tuple[Tensor, Tensor],
    memory: CoupledMemory,
    engine: Engine,
    sides: tuple[int, ...],  # that are anchors of the memory
) -> tuple[list[AnchorSide], list[AnchorSide]]:
    """Return this process's anchors of a batch that several share, with the keys of all and with
    the memory.
    """
    share = batch.share
    assert share is not None and share.cols is not None
    processes = share.processes
    both = batch.vectors[0], Embeddings(share.cols)
    image_ids, text_ids = [processes.own(ids) for ids in processes.ids]
    all_image_ids, _ = processes.ids
    image_keys, text_keys = [
        collectives.gather(padded(x.detach(), size), processes.group)
        for x, size in zip(keys, processes.padded, strict=True)
    ]
    shape = len(text_ids), len(all_image_ids)
    to_images = Relation(shape, (text_ids, all_image_ids), batch.device)
    of_keys = []
    others = (text_keys, batch.pairs), (image_keys, to_images)
    for side, (own, (of_all, relation)) in enumerate(zip(both, others, strict=True)):
        cols = keys_like(own, of_all, batch.engine)
        matrix = Matrix.of_embeddings(own, cols, relation, batch.engine, budget_of(engine))
        of_keys.append(AnchorSide(matrix, 0, Share(processes, None, (share.unpadded[side],))))
    entries = sides_of_memory(both, memory, (image_ids, text_ids), sides, engine)
    shares = [of_keys[side].share for side in sides]
    return of_keys, [own._replace(share=x) for own, x in zip(entries, shares, strict=True)]


def keys_like(vectors: Embeddings, keys: Tensor, engine: str, is_unit: bool = False) -> Embeddings:
    """Return keys (M, D) as an engine multiplies them with a batch's vectors.

    Triton's kernels are fast if both are in the same half precision: float32 keys are then
    rounded. It is a copy, until the backward pass.
    """
    found = Embeddings(keys, not is_unit, is_unit=is_unit)
    dtype = vectors.x.dtype
    if engine == "triton" and keys.dtype == torch.float32 and dtype != torch.float32:
        return found.rounded(dtype)
    return found


class FloatAverages(KeepsDtypes, WholeState):
    """The float32 averages of those tensors of a module that are float16 or bfloat16.

    Half precision would round the small steps of an average away. A state without them loads, too.
    """

    def follow(self, tensors: dict[str, Tensor]) -> None:
        """Hold an average of each tensor that is in half precision, and of no other."""
        half = {place_of(name): x for name, x in tensors.items() if x.dtype in HALF}
        for place in set(self._buffers) - set(half):
            delattr(self, place)
        for place, x in half.items():
            if place not in self._buffers:
                self.register_buffer(place, x.detach().float())

    def move(self, name: str, own: Tensor, new: Tensor, weight: float) -> None:
        """Move a half-precision tensor ``own``, and its average, towards another."""
        place = place_of(name)
        start = own.detach().float()
        average = self._buffers[place]
        assert average is not None
        if type(average) is not type(start):  # ``fully_shard`` came in between
            average = sharded_like(start, average)
            self.register_buffer(place, average)
        # Where somebody else has written to the tensor since, as by a load, it begins there.
        average.copy_(torch.where(average.to(own.dtype) == own, average, start))
        average.lerp_(new.float(), weight)
        own.copy_(average)

    def may_differ(self, name: str) -> bool:
        """Return True, for any average: the tensors themselves are in the encoder's state."""
        return True

    def before_assignment(self, loaded: Mapping[str, Tensor]) -> None:
        """Register the averages of a state, whose tensors may be in another precision."""
        for place, x in loaded.items():
            if place not in self._buffers:
                self.register_buffer(place, torch.empty_like(x))


def empty_memory(size: int, like: Tensor) -> CoupledMemory:
    """Return an empty memory of vectors in the manner of others (N, D), on their device."""
    memory = CoupledMemory(size, like.shape[1], dtype=like.dtype).to_empty(device=like.device)
    memory.reset_parameters()
    return memory


def sharded_like(own: Tensor, x: Tensor) -> Tensor:
    """Return a whole tensor, which all processes have, in the shards of ``own``."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor):
        raise TypeError(f"encoder: expected {type(x).__name__} parameters, got {type(own)}")
    return distribute_tensor(x, own.device_mesh, own.placements, src_data_rank=None)


def place_of(name: str) -> str:
    """Return the name of a buffer, which has no dot, for that of a tensor inside of a module."""
    return name.replace(".", "/")


class MomentumEncoder(CheckedModule):
    """A key encoder: the exponential moving average of an encoder's parameters, ``θ_k ← m θ_k + (1
    - m) θ_q``.

    It is called without a gradient. Methods of the encoder are those of ``module``:
    ``keys.module.encode_image(x)``; its parameters need no gradient. Call :meth:`update` once a
    step; USER does so before it computes the step's keys.

    Parameters in float16 or bfloat16 are rounded float32 averages, which the state dict holds, too:
    steps of ``1 - m`` are smaller than such a parameter can make. The encoder's dtype may differ.

    Args:
        encoder: any module; the key encoder, the attribute ``module``, starts as a copy of it.
        momentum: m in [0, 1]. CODER 0.995, USER 0.999.
        buffers: ``"copy"`` takes the encoder's buffers (BatchNorm's statistics) as they are,
            ``"average"`` averages them too, but for integers.
        training: the mode it stays in, even if ``train()`` or ``eval()`` of a module that contains
            it is called.
    """

    momentum: float = option(at_least=0, at_most=1)

    def __init__(
        self,
        encoder: nn.Module,
        momentum: float = 0.995,
        *,
        buffers: Literal["copy", "average"] = "copy",
        training: bool = True,
    ):
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise TypeError(f"encoder: expected a module, got {type(encoder).__name__}")
        one_of("buffers", buffers, "copy", "average")
        self.module = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum = momentum
        self.averages_buffers = buffers == "average"
        self.mode = training
        self.averages = FloatAverages()
        self.averages.follow(self._averaged())
        self.train()

    def train(self, mode: bool = True) -> MomentumEncoder:
        """Stay in the mode chosen at construction, whatever ``mode`` is."""
        return super().train(self.mode)

    @torch.no_grad()
    def update(self, encoder: nn.Module) -> None:
        """Move the averaged parameters towards the encoder's, which may be wrapped, as by DDP."""
        self._check_alike(encoder)
        self.averages.follow(self._averaged())  # the module may have been cast alone
        for (name, own), (_, new) in zip(tensors_of(self.module), tensors_of(encoder), strict=True):
            if not self._averages(own):
                own.copy_(new)
            elif own.dtype in HALF:
                self.averages.move(name, own, new, 1 - self.momentum)
            else:
                own.copy_(own.lerp(new.to(own.dtype), 1 - self.momentum))

    def _check_alike(self, encoder: nn.Module) -> None:
        """Raise an error unless an encoder has the parameters and buffers of the module."""
        if not isinstance(encoder, nn.Module):
            raise TypeError(f"encoder: expected a module, got {type(encoder).__name__}")
        for own, new in zip_longest(tensors_of(self.module), tensors_of(encoder)):
            if own is None or new is None or own[1].shape != new[1].shape:
                expected = f"{in_words(own)}, as in the key encoder"
                raise ValueError(f"encoder: expected {expected}, got {in_words(new)}")

    def _averages(self, x: Tensor) -> bool:
        """Return whether a parameter or a buffer of the module is averaged."""
        if isinstance(x, nn.Parameter):
            return True
        return self.averages_buffers and (x.is_floating_point() or x.is_complex())

    def _averaged(self) -> dict[str, Tensor]:
        """Return the tensors of the module that are averaged, by name."""
        return {name: x for name, x in tensors_of(self.module) if self._averages(x)}

    def _apply(
        self, fn: Callable[[Tensor], Tensor], *args: bool, **kwargs: bool
    ) -> MomentumEncoder:
        """Move or cast the module; what is then in half precision gets a float32 average."""
        super()._apply(fn, *args, **kwargs)
        self.averages.follow(self._averaged())
        return self

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the keys, without a gradient."""
        return self.module(*args, **kwargs)


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names of a module's parameters and buffers, and these, in their order.

    A module inside of another that wraps it has other names.
    """
    return [*module.named_parameters(), *module.named_buffers()]


def in_words(tensor: tuple[str, Tensor] | None) -> str:
    """Return the name and the shape of a parameter or a buffer."""
    if tensor is None:
        return "nothing"
    name, x = tensor
    return f"{name} of shape {tuple(x.shape)}"
