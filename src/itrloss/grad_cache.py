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
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

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
    """Run forward and backward of ``loss(encoders[0](inputs[0]), encoders[1](inputs[1]), ...,
    **loss_kwargs)``.

    The loss sees the whole batch, the encoders ``chunk_size`` rows of it at a time (GradCache: Gao
    et al., *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*, 2021).
    Gradients are added to ``.grad``, of the loss's own parameters too. They are those of the whole
    batch up to rounding, provided that an encoder's output for a row does not depend on other rows
    (with BatchNorm it depends on the chunk's); see :doc:`methods/grad_cache`.

    Args:
        loss: takes one argument per encoder: what the encoder returned, for the whole batch.
            Returns a scalar, or a tuple or list with the scalar first.
        encoders: callables; each returns a (B, ...) tensor or a tuple of them, whose row i belongs
            to row i of its input.
        inputs: one per encoder: a (B, ...) tensor, a tuple of them (passed on as arguments) or a
            dict of them (passed on by name). B may differ between encoders.
        chunk_size: rows that an encoder gets at once; the last chunk may have fewer.
        scaler: a ``torch.amp.GradScaler``, for the scalar. What is returned is not scaled.
        loss_kwargs: passed on to the loss; for the whole batch.

    Returns:
        What the loss returned, detached.
    """
    chunks = _chunks(encoders, inputs, chunk_size)
    modules = [_modules(encoder) for encoder in encoders]
    states, embeddings = [], []
    with torch.no_grad():
        for i, encoder in enumerate(encoders):
            states.append(_state(modules[i]))
            embeddings.append(
                _joined(i, [_encode(i, encoder, inputs[i], rows) for rows in chunks[i]])
            )
    # older PyTorch (2.8) would reuse weights that were cast under no_grad
    torch.clear_autocast_cache()

    leaves = [
        [e.requires_grad_(e.is_floating_point()) for e in tree_leaves(embedding)]
        for embedding in embeddings
    ]
    result = loss(*embeddings, **loss_kwargs)
    total = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(total, Tensor):
        raise TypeError(
            f"loss: expected it to return a scalar tensor, or that first, got {type(total).__name__}"
        )
    if total.numel() != 1:
        raise ValueError(f"loss: expected it to return a scalar, got shape {tuple(total.shape)}")
    _backward([total if scaler is None else scaler.scale(total)])
    gradients = [[leaf.grad for leaf in group] for group in leaves]
    result = tree_map_only(Tensor, Tensor.detach, result)
    del embeddings, leaves, total

    needed = [i for i, group in enumerate(gradients) if any(g is not None for g in group)]
    last = {id(encoders[i]): i for i in needed}  # one encoder may serve several inputs
    with _state(set().union(*modules)):  # which is in the end as it is now
        for i in needed:
            states[i].close()
            no_sync = getattr(encoders[i], "no_sync", nullcontext)
            # Outputs alone do not tell what is frozen: a module may skip its parameters in a chunk,
            # or train others'.
            frozen = modules[i] and not any(p.requires_grad for p in modules[i][0].parameters())
            for rows in chunks[i]:
                with (
                    nullcontext()
                    if last[id(encoders[i])] == i and rows is chunks[i][-1]
                    else no_sync()
                ):
                    trains = _replay(i, encoders[i], inputs[i], rows, gradients[i])
                if frozen and not trains:
                    break
    return result


def _modules(encoder: Any) -> list[nn.Module]:
    """Return the module that an encoder is, or whose method it is, and all modules in it; none of
    other callables.
    """
    while isinstance(encoder, partial):
        encoder = encoder.func
    owner = getattr(encoder, "__self__", encoder)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


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
            raise TypeError(
                f"encoders[{i}]: expected it to return a tensor or a tuple of them, got {type(e).__name__}"
            )
        if e.shape[:1] != (size,):
            raise ValueError(
                f"encoders[{i}]: expected it to return shape ({size}, ...), got {tuple(e.shape)}"
            )
    return output


def _joined(i: int, outputs: list[Any]) -> Any:
    """Return the outputs of all chunks, concatenated."""

    def joined(*parts: Tensor) -> Tensor:
        # such as a padding to the longest text of a chunk
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(
                f"encoders[{i}]: expected rows of one shape from all chunks, got {shapes}"
            )
        return torch.cat(parts)

    return tree_map(joined, *outputs)


def _replay(i: int, encoder: Any, inputs: Any, rows: slice, gradients: list[Tensor | None]) -> bool:
    """Encode a chunk again and backpropagate its gradients. Return False if no output requires a
    gradient.
    """
    outputs = tree_leaves(_encode(i, encoder, inputs, rows))
    pairs = [
        (e, g[rows])
        for e, g in zip(outputs, gradients, strict=True)
        if g is not None and e.requires_grad
    ]
    if pairs:
        with _state():  # the next chunk's random numbers do not depend on those that hooks draw
            _backward([e for e, _ in pairs], [g for _, g in pairs])
    return bool(pairs)


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
        state.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            state.callback(setattr, module, name, buffer)
            if all(
                stride or size == 1
                for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                # An expanded one, which nothing can write to, is left out.
                # ``data`` keeps the version counter: other graphs may have saved the buffer.
                state.callback(buffer.data.copy_, buffer.detach().clone())
    return state


def _chunks(encoders: Any, inputs: Any, chunk_size: Any) -> list[list[slice]]:
    """Return the rows of each chunk of each input; raise an error for wrong arguments."""
    for name, x in (("encoders", encoders), ("inputs", inputs)):
        if not isinstance(x, (tuple, list)):
            raise TypeError(
                f"{name}: expected a tuple or list, one for each of the loss, got {type(x).__name__}"
            )
    if len(encoders) != len(inputs) or not inputs:
        raise ValueError(
            f"inputs: expected one for each of {len(encoders)} encoders, at least one, got {len(inputs)}"
        )
    check_size("chunk_size", chunk_size)
    chunks = []
    for i, encoder_inputs in enumerate(inputs):
        tensors = tree_leaves(encoder_inputs)
        for x in tensors:
            if not isinstance(x, Tensor):
                expected = "a tensor, or a tuple or dict of tensors"
                raise TypeError(f"inputs[{i}]: expected {expected}, got {type(x).__name__}")
            if x.grad_fn is not None:
                raise ValueError(
                    f"inputs[{i}]: expected tensors without a graph, got one with {x.grad_fn.name()}"
                )
        shapes = [tuple(x.shape) for x in tensors]
        if len({shape[:1] for shape in shapes}) != 1 or not any(shapes[0][:1]):
            raise ValueError(
                f"inputs[{i}]: expected tensors of one batch size, at least 1, got shapes {shapes}"
            )
        chunks.append([slice(at, at + chunk_size) for at in range(0, shapes[0][0], chunk_size)])
    return chunks
