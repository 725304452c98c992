"""A training step on a large batch that holds the autograd graph of one chunk at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)

from ..checks import as_size
from ..checks.warnings import warn
from ..distributed import world_size
from ..engine.inputs import even_chunks
from ..torch_versions import require_version

__all__ = ["grad_cache_step"]

Tree: TypeAlias = Any  # a tensor, or nested tuples, lists and mappings of tensors and flags
Split: TypeAlias = Callable[[Tree, int], Sequence[Tree]]
# Methods that modules have whose gradients are exchanged: DDP and FSDP, FSDP2.
_EXCHANGES = ("no_sync", "set_requires_gradient_sync")
# What to do about an encoder that returns more than embeddings.
_OUTPUT = (
    "output=... takes the embeddings from what it returns, such as output=lambda out: out[:2] or "
    "output=lambda out: (out.image_embeds, out.text_embeds)"
)


def grad_cache_step(
    loss: Callable[..., Tree],
    encoders: Sequence[Callable[..., Tree]],
    inputs: Sequence[Tree],
    chunk_size: int,
    *,
    scaler: torch.amp.GradScaler | None = None,
    output: Callable[[Any], Tree] | None = None,
    split: Split | None = None,
    **loss_kwargs: object,
) -> Tree:
    """Return ``loss(encoders[0](inputs[0]), encoders[1](inputs[1]), ..., **loss_kwargs)`` after its
    backward pass, detached.

    The loss sees the whole batch, the encoders ``chunk_size`` rows of it at a time (GradCache: Gao
    et al., *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*, 2021).
    Gradients are added to ``.grad``, of the loss's own parameters too. They equal the gradients of
    one whole batch up to rounding, provided that an encoder's output for a row does not depend on
    other rows (with BatchNorm it depends on the chunk's); see :doc:`grad_cache`.

    Args:
        loss: takes one argument per encoder: what the encoder returned, for the whole batch.
            Returns a scalar, or a tuple or list with the scalar first.
        encoders: callables; each returns a (B, ...) tensor or a tuple or mapping of them, whose row
            i belongs to row i of its input. There may also be None or flags, but no tensors in
            other objects.
        inputs: one per encoder: a (B, ...) tensor, a tuple of them (passed on as arguments) or a
            mapping of them, such as a tokenizer returns (passed on by name). What is no tensor in
            it, such as None or a flag, is passed on with every chunk. B may differ between
            encoders.
        chunk_size: rows that an encoder gets at once; the last chunk may have fewer. If a single
            row would be left, chunks are of about one size instead.
        scaler: a ``torch.amp.GradScaler``, for the scalar. What is returned is not scaled.
        output: takes what an encoder returned, and returns what the loss needs of it: a tensor, or
            a tuple or mapping of them, such as ``lambda out: out.pooler_output``. By default, all.
        split: takes one of the inputs and ``chunk_size``, and returns the list of its chunks. It is
            for inputs that cannot be cut row by row, such as the patches of all images in one
            tensor. An encoder returns as many rows for a chunk as the chunk stands for.
        loss_kwargs: passed on to the loss; for the whole batch.

    Returns:
        What the loss returned, detached.

    Under ``torch.no_grad`` or ``torch.inference_mode`` there are no gradients: the batch is encoded
    once, by chunks, for the loss alone.
    """
    chunk_size = as_size("chunk_size", chunk_size)
    if len(encoders) != len(inputs) or not inputs:
        expected = f"one for each of {len(encoders)} encoders, at least one"
        raise ValueError(f"inputs: expected {expected}, got {len(inputs)}")
    towers = []
    for i, (encoder, x) in enumerate(zip(encoders, inputs, strict=True)):
        chunks = _chunks(f"inputs[{i}]", x, chunk_size, split)
        towers.append(_Tower(f"encoders[{i}]", encoder, chunks, output, by_rows=split is None))
    if not torch.is_grad_enabled():
        embeddings = [tower.first_pass() for tower in towers]
        for tower in towers:  # buffers stay as after the first pass
            tower.before.pop_all()
        result = loss(*embeddings, **loss_kwargs)
        _checked_total(result)
        return tree_map_only(Tensor, Tensor.detach, result)
    _warn_of_processes(towers)
    result = _loss_backward(towers, loss, loss_kwargs, scaler)
    used = [tower for tower in towers if tower.is_used]
    last = {id(tower.encoder): tower for tower in used}  # one encoder may serve several inputs
    with _state(set().union(*(tower.modules for tower in towers))):  # in the end as it is now
        for tower in used:
            tower.second_pass(last[id(tower.encoder)] is tower)
    _warn_of_untrained(used)
    return result


def _warn_of_processes(towers: Sequence[_Tower]) -> None:
    """Warn of encoders whose gradients the processes of a job do not exchange."""
    if world_size(None) < 2:
        return
    for tower in towers:
        trains = any(p.requires_grad for p in tower.parameters)
        if trains and not any(hasattr(x, name) for x in tower.modules for name in _EXCHANGES):
            warn(
                f"{tower.name}: processes do not exchange the gradients of this encoder, unless "
                "you average them yourself. Pass the module that DistributedDataParallel returned, "
                "and neither its .module nor a method of it"
            )
            return


def _warn_of_untrained(towers: Sequence[_Tower]) -> None:
    """Warn of an encoder with parameters to train whose output needed no gradient.

    Not meant are parameters that another encoder trains, as in the methods of one model, and those
    that the loss uses.
    """
    trained = set()
    for tower in towers:
        trained.update(tower.parameter_gradients)
        if tower.trains:
            trained.update(tower.parameters)
    for tower in towers:
        own = {p for p in tower.parameters if p.requires_grad}
        if own and own.isdisjoint(trained):
            warn(
                f"{tower.name}: what it returns needs no gradient, so that nothing in it is "
                "trained. Leave out torch.no_grad() and .detach() in the encoder, or freeze its "
                "parameters by requires_grad_(False)"
            )


def _loss_backward(
    towers: list[_Tower],
    loss: Callable[..., Tree],
    loss_kwargs: Mapping[str, object],
    scaler: torch.amp.GradScaler | None,
) -> Tree:
    """Return what the loss returns, detached; leave the embeddings' gradients in the towers."""
    embeddings = [tower.first_pass() for tower in towers]
    # older PyTorch (2.8) would reuse weights that were cast under no_grad
    torch.clear_autocast_cache()
    for x in _tensors(embeddings):
        x.requires_grad_(x.is_floating_point() or x.is_complex())
    result = loss(*embeddings, **loss_kwargs)
    total = _checked_total(result)
    if scaler is not None:
        total = scaler.scale(total)
    of_parameters = _gradients_of_parameters(towers, total)
    for tower, embedding in zip(towers, embeddings, strict=True):
        tower.gradients = [x.grad for x in _tensors(embedding)]
    for p, gradient in of_parameters.items():
        owners = [tower for tower in towers if tower.is_used and p in tower.parameters]
        if owners:  # the last one that will encode again
            owners[-1].parameter_gradients[p] = gradient
        else:
            p.grad = gradient if p.grad is None else p.grad + gradient
    return tree_map_only(Tensor, Tensor.detach, result)


def _gradients_of_parameters(towers: list[_Tower], total: Tensor) -> dict[nn.Parameter, Tensor]:
    """Run the loss's backward pass, and return the gradients that parameters of encoders get in it,
    which leave ``.grad`` alone.

    A loss may use a parameter of an encoder, such as the scale of CLIP. Processes average the
    gradients of an encoder in the backward pass of its last chunk, and wait for that parameter
    there. Encoders that average nothing need none of this.
    """
    parameters = set().union(*(tower.parameters for tower in towers if tower.averages))
    before = {p: p.grad for p in parameters}
    for p in parameters:
        p.grad = None
    try:
        _backward([total])
        return {p: p.grad for p in parameters if p.grad is not None}
    finally:
        for p, gradient in before.items():
            p.grad = gradient


def _checked_total(result: object) -> Tensor:
    """Return the scalar of what a loss returned; raise an error if there is none."""
    total = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(total, Tensor) or total.numel() != 1:
        expected = "it to return a scalar tensor, or that first"
        got = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise ValueError(f"loss: expected {expected}, got {got}")
    return total


class _Tower:
    """An encoder and the chunks of its input, which it encodes twice."""

    gradients: list[Tensor | None]  # of what the encoder returns, for all rows
    trains: bool  # whether some chunk's output needed a gradient in the second pass

    def __init__(
        self,
        name: str,
        encoder: Callable[..., Tree],
        chunks: list[Tree],
        output: Callable[[Any], Tree] | None,
        *,
        by_rows: bool,  # a chunk's tensors have one row for each row that the encoder returns
    ):
        self.name = name
        self.encoder = encoder
        self.chunks = chunks
        self.output = output
        self.sizes: list[int | None] = [None] * len(chunks)  # rows of the chunks' outputs
        if by_rows:
            self.sizes = [len(_tensors(chunk)[0]) for chunk in chunks]
        self.modules = _modules(encoder)
        self.parameters = {p for module in self.modules for p in module.parameters(recurse=False)}
        self.averages = hasattr(encoder, "no_sync")  # the gradients of several processes
        #: Of parameters that the loss uses.
        self.parameter_gradients: dict[nn.Parameter, Tensor] = {}

    @property
    def is_used(self) -> bool:
        """Whether the loss depends on the embeddings."""
        return any(gradient is not None for gradient in self.gradients)

    def first_pass(self) -> Tree:
        """Return the embeddings of all rows, without a graph."""
        self.before = _state(self.modules)
        with torch.no_grad():
            outputs = [tree_flatten(self.encode(i)) for i in range(len(self.chunks))]
        columns = zip(*[leaves for leaves, _ in outputs], strict=True)
        return tree_unflatten([self.joined(*parts) for parts in columns], outputs[-1][1])

    def second_pass(self, is_last: bool) -> None:
        """Encode all chunks again, and backpropagate the gradients of the embeddings.

        Processes of a distributed job average their gradients after the last chunk of the encoder's
        last input.
        """
        self.before.close()
        no_sync = getattr(self.encoder, "no_sync", nullcontext)
        # Outputs alone do not tell what is frozen: a module may skip its parameters in a chunk, or
        # train others'.
        frozen = self.modules and not any(p.requires_grad for p in self.modules[0].parameters())
        at = 0
        self.trains = False
        for i in range(len(self.chunks)):
            end = at + (self.sizes[i] or 0)
            synchronises = is_last and i == len(self.chunks) - 1
            with nullcontext() if synchronises else no_sync():
                trains = self.backpropagate(i, slice(at, end), with_parameters=synchronises)
            self.trains = self.trains or trains
            at = end
            if frozen and not trains:
                break

    def backpropagate(self, i: int, rows: slice, *, with_parameters: bool) -> bool:
        """Encode chunk i again and backpropagate the gradients of its rows. Return False if no
        output requires a gradient.
        """
        outputs = []
        needed = []
        for output, gradient in zip(_tensors(self.encode(i)), self.gradients, strict=True):
            if gradient is not None and output.requires_grad:
                outputs.append(output)
                needed.append(gradient[rows])
        trains = bool(outputs)
        if with_parameters:
            outputs += self.parameter_gradients.keys()
            needed += self.parameter_gradients.values()
        if outputs:
            with _state():  # the next chunk's random numbers do not depend on those that hooks draw
                _backward(outputs, needed)
        return trains

    def encode(self, i: int) -> Tree:
        """Return what the loss needs of the encoder's output for chunk i, checked."""
        # cloned, as an encoder may write to it
        chunk: Tree = tree_map_only(Tensor, Tensor.clone, self.chunks[i])
        if isinstance(chunk, dict):
            output = self.encoder(**chunk)
        elif isinstance(chunk, (tuple, list)):
            output = self.encoder(*chunk)
        else:
            output = self.encoder(chunk)
        if self.output is not None:
            output = self.output(output)
        output = _plain(output)
        tensors = _tensors(output)
        if not tensors:
            expected = "it to return a tensor, or tuples, lists or mappings of tensors"
            raise TypeError(
                f"{self.name}: expected {expected}, got {type(output).__name__}; {_OUTPUT}"
            )
        size = self.sizes[i]
        if size is None and tensors[0].dim():  # the first output says it
            size = len(tensors[0])
            self.sizes[i] = size
        for x in tensors:
            if x.shape[:1] != (size,):
                expected = f"it to return shape ({'B' if size is None else size}, ...)"
                raise ValueError(
                    f"{self.name}: expected {expected}, got {tuple(x.shape)}; {_OUTPUT}"
                )
        return output

    def joined(self, *parts: Tree) -> Tree:
        """Return an output of all chunks, concatenated; what is no tensor, of the last."""
        if not any(isinstance(part, Tensor) for part in parts):
            return parts[-1]
        # such as a padding to the longest text of a chunk
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(
                f"{self.name}: expected rows of one shape from all chunks, got {shapes}; "
                f"{_OUTPUT}; pad texts once, for the whole batch"
            )
        return torch.cat(parts)


def _plain(x: Tree) -> Tree:
    """Return nested containers with dictionaries in place of other mappings, such as a tokenizer's
    ``BatchEncoding``.
    """
    leaves, spec = tree_flatten(x)
    leaves = [_plain(dict(leaf)) if isinstance(leaf, Mapping) else leaf for leaf in leaves]
    return tree_unflatten(leaves, spec)


def _tensors(x: Tree) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_flatten(x)[0] if isinstance(leaf, Tensor)]


def _chunks(name: str, inputs: Tree, chunk_size: int, split: Split | None) -> list[Tree]:
    """Return the chunks of an encoder's input: some rows each, or as ``split`` cuts it."""
    if split is not None:
        chunks = [_plain(chunk) for chunk in split(inputs, chunk_size)]
        if not chunks:
            raise ValueError(f"split: expected the chunks of {name}, at least one, got none")
        return chunks
    inputs = _plain(inputs)
    size = _batch_size(name, inputs)
    slices = [slice(at, at + chunk_size) for at in range(0, size, chunk_size)]
    if size % chunk_size == 1:  # BatchNorm, for one, fails for a single row
        slices = even_chunks(size, chunk_size)
    goes_back = torch.is_grad_enabled() and any(x.grad_fn is not None for x in _tensors(inputs))
    if goes_back and len(slices) > 1:
        raise ValueError(
            f"{name}: expected tensors without a graph, got one that was computed with a gradient, "
            "which each chunk would go back through; compute it in the encoder"
        )
    return [tree_map_only(Tensor, itemgetter(rows), inputs) for rows in slices]


def _batch_size(name: str, inputs: Tree) -> int:
    """Return the number of rows of an encoder's input, which all its tensors have."""
    shapes = [tuple(x.shape) for x in _tensors(inputs)]
    if len({shape[:1] for shape in shapes}) != 1 or not any(shapes[0][:1]):
        expected = "tensors of one batch size, at least 1"
        raise ValueError(
            f"{name}: expected {expected}, got shapes {shapes}; where there are more texts than "
            "images, they are inputs of two encoders, such as (model.get_image_features, "
            "model.get_text_features)"
        )
    return shapes[0][0]


def _modules(encoder: object) -> list[nn.Module]:
    """Return the module that an encoder is, or whose method it is, and all modules in it; none of
    other callables.
    """
    while isinstance(encoder, partial):
        encoder = encoder.func
    owner = getattr(encoder, "__self__", encoder)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


def _backward(tensors: list[Tensor], gradients: list[Tensor] | None = None) -> None:
    """Run backward outside of autocast, which would run products in half precision where forward
    opted out of it.
    """
    with ExitStack() as stack:
        for kind in {"cpu", *(x.device.type for x in tensors)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        torch.autograd.backward(tensors, gradients)


def _state(modules: Iterable[nn.Module] = ()) -> ExitStack:
    """Return what restores, when it is closed, all that a forward pass may change: random states
    and buffers.
    """
    state = ExitStack()
    state.callback(torch.set_rng_state, torch.get_rng_state())
    state.callback(np.random.set_state, np.random.get_state())
    state.callback(random.setstate, random.getstate())
    if torch.cuda.is_initialized():
        state.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    if torch.backends.mps.is_available():
        require_version("grad_cache_step on MPS", 2, 0)
        state.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
    for module in modules:
        # named_buffers leaves out a buffer that is None until the first pass, and the second name
        # of a tensor.
        for name, buffer in module._buffers.items():
            state.callback(setattr, module, name, buffer)
            if buffer is not None and all(
                stride or size == 1
                for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                # An expanded one, which nothing can write to, is left out.
                # ``data`` keeps the version counter: other graphs may have saved the buffer.
                state.callback(buffer.data.copy_, buffer.detach().clone())
    return state
