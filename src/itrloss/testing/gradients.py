"""Checks of gradients: right ones, in every way in which autograd may ask for them, and nothing
else touched.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .registry import check
from .subject import Batch, Subject, normal, result_of, same, tensors, total, trained


def _gradcheck(output: Callable[[Batch], Any], batch: Batch) -> None:
    """Raise an error unless gradients of all outputs equal finite differences, entry by entry."""

    def compute(images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        """Return all that is computed from embeddings."""
        return tuple(tree_leaves(output(batch.of(images, texts))))

    torch.autograd.gradcheck(compute, batch.leaves().embeddings, check_undefined_grad=False)


@check()
def gradcheck(subject: Subject) -> None:
    """Gradients equal finite differences, in float64 and entry by entry.

    Losses with weights that the gradient takes for constants fail: name this as an expected
    failure, and pass a ``reference``.
    """
    loss = subject.fresh()
    _gradcheck(lambda batch: subject.value(batch, loss), subject.batch(4, 5, d=4))


@check()
def finite_differences(subject: Subject) -> None:
    """On a larger batch the slope along random directions equals finite differences, too.

    A hand-written gradient may be right within one block and wrong across blocks.
    """
    batch = subject.batch(70, 83)
    step = 1e-7  # so small that hinges are hardly crossed
    result = subject.result(batch)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        images, texts = (normal(x.shape, generator) for x in batch.embeddings)
        ends = []
        for shift in (step, -step):
            moved = batch.of(batch.images + shift * images, batch.texts + shift * texts)
            ends.append(subject.value(moved))
        slope = (result.images * images).sum() + (result.texts * texts).sum()
        same("slope", slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-6)


def _weighted(output: Any) -> Tensor:
    """Return the 0-dim sum of all numbers that a loss returned, each with another weight."""
    numbers = torch.cat([x.flatten() for x in tensors(output)])
    weights = torch.linspace(0.5, 1.5, len(numbers), dtype=numbers.dtype)
    return numbers @ weights


@check("reference")
def agrees_with_reference(subject: Subject) -> None:
    """Values and gradients are those of ``reference``, the formula in plain PyTorch, which autograd
    differentiates.

    No other check knows the gradient of a loss with weights that it takes for constants.
    """
    assert subject.reference is not None
    each_value: dict[str, Any] = {}
    if hasattr(subject.loss, "reduction"):
        each_value["reduction"] = "none"
    for size, options in (((9, 14), {}), ((70, 83), each_value)):
        leaves = subject.batch(*size).leaves()
        loss = subject.fresh(**options)
        found = subject.output(leaves, loss)
        wanted = subject.output(leaves, partial(subject.reference, loss))
        same("values", tensors(found), tensors(wanted))
        gradients = result_of(_weighted(found), leaves, loss).gradients
        same("gradients", gradients, result_of(_weighted(wanted), leaves, loss).gradients)


@check("parameters")
def gradients_of_parameters(subject: Subject) -> None:
    """The loss's own parameters, a temperature or a bias, get the gradients of finite differences.

    Kernels have been published whose gradient of the bias was wrong, with tests too weak to tell.
    """
    batch = subject.batch()
    loss = subject.fresh()
    step = 1e-5
    generator = torch.Generator().manual_seed(0)
    gradients = subject.result(batch, loss).parameters
    for parameter, gradient in zip(trained(loss), gradients, strict=True):
        centre = parameter.detach().clone()
        direction = normal(centre.shape, generator)
        ends = []
        for shift in (step, -step):
            parameter.data.copy_(centre + shift * direction)
            ends.append(subject.value(batch, loss).detach())
        parameter.data.copy_(centre)
        slope = (gradient * direction).sum()
        expected = (ends[0] - ends[1]) / (2 * step)
        same("slope of a parameter", slope, expected, rtol=1e-4, atol=1e-6)


@check()
def upstream_gradient(subject: Subject) -> None:
    """Gradients are proportional to what comes from above: a weight of the loss, a GradScaler's
    factor.
    """
    leaves = subject.batch().leaves()
    loss = subject.fresh()
    plain = subject.result(leaves)
    weighted = result_of(-3.7 * subject.value(leaves, loss), leaves, loss)
    same("-3.7 times the loss", weighted.gradients, [-3.7 * x for x in plain.gradients])


@check("reduction")
def uneven_upstream(subject: Subject) -> None:
    """With reduction "none", the gradient of each value equals finite differences.

    A published kernel scaled all of it by the first weight, for a year.
    """
    loss = subject.fresh(reduction="none")
    _gradcheck(lambda batch: subject.output(batch, loss), subject.batch(4, 5, d=4))


@check("reduction")
def reductions_agree(subject: Subject) -> None:
    """The reductions "sum" and "mean" are the sum and the means of the values of "none".

    Where there are values of images and of texts, the mean is the sum of their two means.
    """
    batch = subject.batch(one=True)
    none, added, mean = (
        subject.output(batch, subject.fresh(reduction=x)) for x in ("none", "sum", "mean")
    )
    values = tree_leaves(none)
    shapes = [tuple(x.shape) for x in values]
    assert all(len(shape) == 1 for shape in shapes), f'expected vectors for "none", got {shapes}'
    same('"sum"', added, total(values))
    same('"mean"', mean, torch.stack([x.mean() for x in values]).sum())


@check()
def frozen_side(subject: Subject) -> None:
    """With one side frozen, as in LiT, the other one has the same gradient, and the frozen one
    none.
    """
    batch = subject.batch()
    expected = subject.result(batch)
    names = ("images", "texts")
    for frozen, other in ((0, 1), (1, 0)):
        leaves = batch.leaves()
        leaves.embeddings[frozen].requires_grad_(False)
        subject.value(leaves).backward()
        what = f"{names[frozen]} frozen, gradient of {names[other]}"
        same(what, leaves.embeddings[other].grad, expected.embeddings[other])
        assert leaves.embeddings[frozen].grad is None, f"frozen {names[frozen]} got a gradient"


@check()
def no_gradient_where_none_is_required(subject: Subject) -> None:
    """Under no_grad, in inference mode and for frozen inputs, the value is the same and holds no
    graph.
    """
    batch = subject.batch()
    loss = subject.fresh()
    expected = subject.value(batch.leaves(), loss)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            value = subject.value(batch.leaves(), loss)
        assert not value.requires_grad, f"the value requires a gradient under {guard.__name__}"
        same(guard.__name__, value, expected)
    graph = subject.value(batch, loss).requires_grad
    assert graph == bool(trained(loss)), "frozen inputs: the value has a graph"
    same("after inference mode", subject.value(batch.leaves(), loss), expected)


@check()
def one_tensor_on_both_sides(subject: Subject) -> None:
    """A tensor that is both sides gets the sum of both gradients, as in SimCSE."""
    batch = subject.batch(one=True)
    expected = subject.result(batch.of(batch.images, batch.images))
    x = batch.images.clone().requires_grad_()
    (got,) = torch.autograd.grad(subject.value(batch.of(x, x)), x)
    same("gradient", got, expected.images + expected.texts)


@check()
def two_forwards_before_one_backward(subject: Subject) -> None:
    """Two batches may be put through before one backward pass, as in accumulation and in losses
    with two terms.

    Buffers and queues that the second call overwrites are still needed by the first.
    """
    loss = subject.fresh()
    batches = [subject.batch(seed=seed).leaves() for seed in (0, 1)]
    torch.stack([subject.value(batch, loss) for batch in batches]).sum().backward()
    for number, batch in enumerate(batches, 1):
        expected = subject.result(batch).embeddings
        same(f"gradients of batch {number}", (batch.images.grad, batch.texts.grad), expected)


@check()
def two_backwards(subject: Subject) -> None:
    """A second backward pass through a retained graph gives the same gradients: the first one
    modified nothing.
    """
    leaves = subject.batch().leaves()
    loss = subject.fresh()
    value = subject.value(leaves, loss)
    first = [x.clone() for x in result_of(value, leaves, loss, keep=True).gradients]
    same("second backward", result_of(value, leaves, loss).gradients, first)


@check()
def inputs_not_modified(subject: Subject) -> None:
    """Embeddings and ids are as before, and no .grad is set by the forward pass.

    They belong to the caller, who may log, enqueue or re-use them.
    """
    batch = subject.batch()
    leaves = batch.leaves()
    inputs = [x for x in leaves if x is not None]
    copies = [x.detach().clone() for x in inputs]
    versions = [x._version for x in inputs]
    value = subject.value(leaves)
    assert leaves.images.grad is None is leaves.texts.grad, "the forward pass sets .grad"
    value.backward()
    for x, before, version in zip(inputs, copies, versions, strict=True):
        assert torch.equal(x, before), "an input has other values after the call"
        assert x._version == version, "an input was written to"


@check("ids")
def ids_used_again(subject: Subject) -> None:
    """Ids may be overwritten before the backward pass, by a loader that uses its buffer again: it
    changes nothing.

    An error is fine, too.
    """
    batch = subject.batch()
    expected = subject.result(batch).embeddings
    image_ids, text_ids = (x.clone() for x in batch.ids)
    leaves = batch.leaves().with_ids(image_ids, text_ids)
    value = subject.value(leaves)
    image_ids.zero_()
    text_ids.zero_()
    try:
        value.backward()
    except RuntimeError:
        return
    same("gradients", (leaves.images.grad, leaves.texts.grad), expected)


@check()
def nothing_is_kept(subject: Subject) -> None:
    """A loss holds no reference to a batch after its backward pass: it would keep memory, and the
    graph.
    """
    loss = subject.fresh()
    batch = subject.batch()

    def step() -> list[Any]:
        """Run forward and backward; return weak references to the value and the embeddings."""
        leaves = batch.leaves()
        value = subject.value(leaves, loss)
        value.backward()
        return [weakref.ref(x) for x in (value, *leaves.embeddings)]

    references = step()
    # by a cycle, perhaps; a collection may take half a second
    if any(x() is not None for x in references):
        gc.collect()
    kept = [x for x in references if x() is not None]
    assert not kept, "the batch or the value is still referenced"
