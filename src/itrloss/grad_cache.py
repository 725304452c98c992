"""A training step on a large batch that holds the autograd graph of one chunk at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_structure, tree_unflatten

from .checks import check_size

__all__ = ["grad_cache_step"]


def grad_cache_step(
    loss: Callable[..., Any],
    encoders: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    chunk_size: int,
    *,
    scaler: Any = None,
    **loss_kwargs: Any,
) -> Any:
    """Run forward and backward of ``loss(encoders[0](inputs[0]), encoders[1](inputs[1]), ..., **loss_kwargs)``.

    The loss sees the whole batch, the encoders ``chunk_size`` rows of it at a time (GradCache: Gao et al., *Scaling
    Deep Contrastive Learning Batch Size under Memory Limited Setup*, 2021); see :doc:`methods/grad_cache`.

    Gradients are added to ``.grad``, of the loss's own parameters too. They are those of the whole batch up to
    rounding, provided that an encoder's output for a row does not depend on other rows (with BatchNorm it depends on
    the chunk's).

    Args:
        loss: takes one argument per encoder: what the encoder returned, for the whole batch. Returns a scalar, or a
            tuple or list with the scalar first.
        encoders: callables; each returns a (B, ...) tensor or a tuple of them, whose row i belongs to row i of its
            input.
        inputs: one per encoder: a (B, ...) tensor, a tuple of them (passed on as arguments) or a dict of them
            (passed on by name). B may differ between encoders.
        chunk_size: rows that an encoder gets at once; the last chunk may have fewer.
        scaler: a ``torch.amp.GradScaler``, for the scalar. What is returned is not scaled.
        loss_kwargs: passed on to the loss; for the whole batch.

    Returns:
        What the loss returned, detached.
    """
    sizes = _checked_sizes(encoders, inputs, chunk_size)
    chunks = [(i, slice(at, at + chunk_size)) for i, size in enumerate(sizes) for at in range(0, size, chunk_size)]
    owners = [_owner(encoder) for encoder in encoders]
    modules = {m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()}

    start, states, parts = _state(modules), [], [[] for _ in encoders]
    with torch.no_grad():
        for i, rows in chunks:
            states.append(_state())
            parts[i].append(_encode(i, encoders[i], inputs[i], rows))
        embeddings = [_joined(i, part) for i, part in enumerate(parts)]
    del parts
    torch.clear_autocast_cache()  # older PyTorch (2.8) would reuse weights that were cast under no_grad

    leaves = [[e.requires_grad_(e.is_floating_point()) for e in tree_leaves(embedding)] for embedding in embeddings]
    result = loss(*embeddings, **loss_kwargs)
    total = _scalar_of(result)
    _backward([total if scaler is None else scaler.scale(total)])
    gradients = [[leaf.grad for leaf in group] for group in leaves]
    result = tree_map_only(Tensor, Tensor.detach, result)
    del embeddings, leaves, total

    end = _state(modules)
    again = [t for t, (i, _) in enumerate(chunks) if any(g is not None for g in gradients[i])]
    last = {id(encoders[chunks[t][0]]): t for t in again}  # one encoder may serve several inputs
    frozen = set()
    _restore(start)
    for t in again:
        i, rows = chunks[t]
        if i in frozen:
            continue
        _restore(states[t])
        no_sync = getattr(encoders[i], "no_sync", nullcontext)
        with nullcontext() if last[id(encoders[i])] == t else no_sync():
            if not _replay(i, encoders[i], inputs[i], rows, gradients[i]) and _untrained(owners[i]):
                frozen.add(i)
    _restore(end)
    return result


def _owner(encoder: Any) -> Any:
    """Return the module whose method an encoder is, or the encoder itself."""
    while isinstance(encoder, partial):
        encoder = encoder.func
    return getattr(encoder, "__self__", encoder)


def _encode(i: int, encoder: Any, inputs: Any, rows: slice) -> Any:
    """Return what an encoder returns for some rows of its input, checked."""
    chunk: Any = tree_map(lambda x: x[rows].clone(), inputs)  # an encoder may write to it
    size = len(tree_leaves(chunk)[0])
    if isinstance(chunk, dict):
        output = encoder(**chunk)
    else:
        output = encoder(*chunk) if isinstance(chunk, (tuple, list)) else encoder(chunk)
    for e in tree_leaves(output):
        if not isinstance(e, Tensor):
            raise TypeError(f"encoders[{i}]: expected it to return a tensor or a tuple of them, got {type(e).__name__}")
        if e.shape[:1] != (size,):
            raise ValueError(f"encoders[{i}]: expected it to return shape ({size}, ...), got {tuple(e.shape)}")
    return output


def _joined(i: int, parts: list[Any]) -> Any:
    """Return the outputs of all chunks, concatenated."""
    columns = list(zip(*map(tree_leaves, parts), strict=True))
    for column in columns:
        if len({part.shape[1:] for part in column}) > 1:  # such as a padding to the longest text of a chunk
            shapes = [tuple(part.shape) for part in column]
            raise ValueError(f"encoders[{i}]: expected rows of one shape from all chunks, got {shapes}")
    return tree_unflatten(map(torch.cat, columns), tree_structure(parts[0]))


def _replay(i: int, encoder: Any, inputs: Any, rows: slice, gradients: list[Tensor | None]) -> bool:
    """Encode a chunk again and backpropagate its gradients. Return False if no output requires a gradient."""
    outputs = tree_leaves(_encode(i, encoder, inputs, rows))
    pairs = [(e, g[rows]) for e, g in zip(outputs, gradients, strict=True) if g is not None and e.requires_grad]
    if pairs:
        _backward([e for e, _ in pairs], [g for _, g in pairs])
    return bool(pairs)


def _untrained(owner: Any) -> bool:
    """Return whether an encoder is a module without trainable parameters.

    Outputs alone do not tell: a module may train parameters that it does not own, or skip some at random in a chunk.
    """
    return isinstance(owner, nn.Module) and not any(p.requires_grad for p in owner.parameters())


def _backward(tensors: list[Tensor], gradients: list[Tensor] | None = None) -> None:
    """Run backward outside of autocast, which would run products in half precision where forward opted out of it."""
    with ExitStack() as stack:
        for kind in {"cpu", *(x.device.type for x in tensors)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        torch.autograd.backward(tensors, gradients)


def _state(modules: Iterable[nn.Module] = ()) -> list[Callable[[], Any]]:
    """Return what restores all that a forward pass may change: random states and buffers."""
    restore: list[Callable[[], Any]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(np.random.set_state, np.random.get_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        restore.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if torch.backends.mps.is_available():
        restore.append(partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            restore.append(partial(_restore_buffer, module, name, buffer, buffer.detach().clone()))
    return restore


def _restore_buffer(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    """Restore a buffer through ``data``, which keeps its version counter: other graphs may have saved the buffer."""
    if all(stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        buffer.data.copy_(value)  # an expanded one cannot have been written to
    setattr(module, name, buffer)


def _restore(state: list[Callable[[], Any]]) -> None:
    for restore in state:
        restore()


def _scalar_of(result: Any) -> Tensor:
    """Return the scalar tensor in what the loss returned."""
    total = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(total, Tensor):
        raise TypeError(f"loss: expected it to return a scalar tensor, or that first, got {type(total).__name__}")
    if total.numel() != 1:
        raise ValueError(f"loss: expected it to return a scalar, got shape {tuple(total.shape)}")
    return total


def _checked_sizes(encoders: Any, inputs: Any, chunk_size: Any) -> list[int]:
    """Return the batch size of each input; raise an error for wrong arguments."""
    for name, x in (("encoders", encoders), ("inputs", inputs)):
        if not isinstance(x, (tuple, list)):
            raise TypeError(f"{name}: expected a tuple or list, one for each of the loss, got {type(x).__name__}")
    if len(encoders) != len(inputs) or not inputs:
        raise ValueError(f"inputs: expected one for each of {len(encoders)} encoders, at least one, got {len(inputs)}")
    check_size("chunk_size", chunk_size)
    sizes = []
    for i, encoder_inputs in enumerate(inputs):
        tensors = tree_leaves(encoder_inputs)
        for x in tensors:
            if not isinstance(x, Tensor):
                expected = "a tensor, or a tuple or dict of tensors"
                raise TypeError(f"inputs[{i}]: expected {expected}, got {type(x).__name__}")
            if x.grad_fn is not None:
                raise ValueError(f"inputs[{i}]: expected tensors without a graph, got one with {x.grad_fn.name()}")
        shapes = [tuple(x.shape) for x in tensors]
        if len({shape[:1] for shape in shapes}) != 1 or not any(shapes[0][:1]):
            raise ValueError(f"inputs[{i}]: expected tensors of one batch size, at least 1, got shapes {shapes}")
        sizes.append(shapes[0][0])
    return sizes
