"""Checks of gradients: right ones, in every way in which autograd may ask for them, and nothing
else touched.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .registry import check
from .subject import Subject, gradients, same, total, trained


@check()
def gradcheck(subject: Subject) -> None:
    """Gradients are those of finite differences, in float64 and entry by entry.

    Losses with weights that the gradient takes for constants fail; name them as expected failures.
    """
    batch = subject.batch(4, 5, d=4)
    loss = subject.fresh(torch.float64)
    compute = lambda v, w: subject.value(batch.of(v, w), loss)  # noqa: E731
    torch.autograd.gradcheck(compute, batch.leaves()[:2], check_undefined_grad=False)


@check()
def finite_differences(subject: Subject) -> None:
    """On a larger batch the slope along random directions is that of differences, too.

    A hand-written gradient may be right within one block and wrong across blocks.
    """
    batch, step = subject.batch(70, 83), 1e-7  # so small that hinges are hardly crossed
    result = subject.result(batch)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        along = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in batch[:2]]
        high, low = (
            subject.value(batch.of(batch.images + s * along[0], batch.texts + s * along[1]))
            for s in (step, -step)
        )
        slope = sum((g * a).sum() for g, a in zip(result[1:3], along, strict=True))
        same("slope", slope, (high - low) / (2 * step), rtol=1e-4, atol=1e-6)


@check("parameters")
def gradients_of_parameters(subject: Subject) -> None:
    """The loss's own parameters, a temperature or a bias, get the gradients of finite differences.

    Kernels have been published whose gradient of the bias was wrong, with tests too weak to tell.
    """
    batch, loss, step = subject.batch(9, 14), subject.fresh(torch.float64), 1e-5
    expected = subject.result(batch, loss).parameters
    for parameter, gradient in zip(trained(loss), expected, strict=True):
        flat, slopes = parameter.data.view(-1), []
        for i in range(min(10, len(flat))):
            centre, ends = flat[i].item(), []
            for shift in (step, -step):
                flat[i] = centre + shift
                ends.append(subject.value(batch, loss).detach())
            flat[i] = centre
            slopes.append((ends[0] - ends[1]) / (2 * step))
        same(
            "slope of a parameter",
            gradient.view(-1)[: len(slopes)],
            torch.stack(slopes),
            rtol=1e-4,
            atol=1e-6,
        )


@check()
def upstream_gradient(subject: Subject) -> None:
    """Gradients are proportional to what comes from above: a weight of the loss, a GradScaler's
    factor.
    """
    batch, weight = subject.batch(9, 14), -3.7
    plain, weighted = subject.result(batch), subject.result(batch, weight=weight)
    same("-3.7 times the loss", weighted[1:], [weight * x for x in tree_leaves(plain[1:])])


@check("reduction")
def uneven_upstream(subject: Subject) -> None:
    """With reduction "none" and another weight for each value, gradients are those of finite
    differences.

    A published kernel scaled all of it by the first weight, for a year.
    """
    batch, loss = subject.batch(4, 5, d=4), subject.fresh(torch.float64, reduction="none")

    def weighted(images: Tensor, texts: Tensor) -> Tensor:
        values = tree_leaves(subject.output(batch.of(images, texts), loss))
        return total([x * (torch.arange(len(x), dtype=x.dtype) - 1.3) for x in values])

    torch.autograd.gradcheck(weighted, batch.leaves()[:2], check_undefined_grad=False)


@check("reduction")
def reductions_agree(subject: Subject) -> None:
    """The reductions "sum" and "mean" are the sum and the means of the values of "none".

    Where there are values of images and of texts, the mean is the sum of their two means.
    """
    batch = subject.batch(9, one=True)
    none, added, mean = (
        subject.output(batch, subject.fresh(torch.float64, reduction=x))
        for x in ("none", "sum", "mean")
    )
    values = tree_leaves(none)
    assert all(x.dim() == 1 for x in values), (
        f'expected vectors for "none", got {[tuple(x.shape) for x in values]}'
    )
    same('"sum"', added, total(values))
    same('"mean"', mean, torch.stack([x.mean() for x in values]).sum())


@check()
def frozen_side(subject: Subject) -> None:
    """With one side frozen, as in LiT, the other one has the same gradient, and the frozen one
    none.
    """
    batch = subject.batch(9, 14)
    expected = subject.result(batch)
    for name in ("images", "texts"):
        leaves = batch.leaves()
        getattr(leaves, name).requires_grad_(False)
        subject.value(leaves).backward()
        other = "texts" if name == "images" else "images"
        same(
            f"{name} frozen, gradient of {other}",
            getattr(leaves, other).grad,
            getattr(expected, other),
        )
        assert getattr(leaves, name).grad is None, f"frozen {name} got a gradient"


@check()
def no_gradient_where_none_is_required(subject: Subject) -> None:
    """Under no_grad, in inference mode and for frozen inputs, the value is the same and holds no
    graph.
    """
    batch, loss = subject.batch(9, 14), subject.fresh(torch.float64)
    expected = subject.value(batch.leaves(), loss)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            value = subject.value(batch.leaves(), loss)
        assert not value.requires_grad, f"the value requires a gradient under {guard.__name__}"
        same(guard.__name__, value, expected)
    assert subject.value(batch, loss).requires_grad == bool(trained(loss)), (
        "frozen inputs: the value has a graph"
    )
    same("after inference mode", subject.value(batch.leaves(), loss), expected)


@check()
def one_tensor_on_both_sides(subject: Subject) -> None:
    """A tensor that is both sides gets the sum of both gradients, as in SimCSE."""
    batch = subject.batch(9, one=True)
    both = batch._replace(texts=batch.images)
    expected = subject.result(both)
    x = batch.images.clone().requires_grad_()
    (got,) = torch.autograd.grad(subject.value(both.of(x, x)), x)
    same("gradient", got, expected.images + expected.texts)


@check()
def two_forwards_before_one_backward(subject: Subject) -> None:
    """Two batches may be put through before one backward pass, as in accumulation and in losses
    with two terms.

    Buffers and queues that the second call overwrites are still needed by the first.
    """
    batches = [subject.batch(9, 14, seed=seed) for seed in (0, 1)]
    expected = [subject.result(batch) for batch in batches]
    loss, leaves = subject.fresh(torch.float64), [batch.leaves() for batch in batches]
    sum(subject.value(x, loss) for x in leaves).backward()  # type: ignore[union-attr]
    for number, (x, wanted) in enumerate(zip(leaves, expected, strict=True), 1):
        same(f"gradients of batch {number}", (x.images.grad, x.texts.grad), wanted[1:3])


@check()
def two_backwards(subject: Subject) -> None:
    """A second backward pass through a retained graph gives the same gradients: the first one
    modified nothing.
    """
    batch, loss = subject.batch(9, 14).leaves(), subject.fresh(torch.float64)
    value = subject.value(batch, loss)
    first = gradients(value, *batch[:2], loss, retain_graph=True)
    first = [x.clone() for x in tree_leaves(first)]
    same("second backward", tree_leaves(gradients(value, *batch[:2], loss)), first)


@check()
def inputs_not_modified(subject: Subject) -> None:
    """Embeddings and ids are as before, and no .grad is set by the forward pass.

    They belong to the caller, who may log, enqueue or re-use them.
    """
    batch = subject.batch(9, 14)
    leaves = batch.leaves()
    tensors = [x for x in leaves if x is not None]
    versions = [x._version for x in tensors]
    value = subject.value(leaves)
    assert leaves.images.grad is None is leaves.texts.grad, "the forward pass sets .grad"
    value.backward()
    for x, version, before in zip(
        tensors, versions, [x for x in batch if x is not None], strict=True
    ):
        assert torch.equal(x, before), "an input has other values after the call"
        assert x._version == version, "an input was written to"


@check("ids")
def ids_used_again(subject: Subject) -> None:
    """Ids may be overwritten before the backward pass, by a loader that uses its buffer again: it
    changes nothing.

    An error is fine, too.
    """
    batch = subject.batch(9, 14)
    expected, leaves = subject.result(batch), batch.leaves()
    leaves = leaves.with_ids(*(x.clone() for x in batch[2:]))  # type: ignore[union-attr]
    value = subject.value(leaves)
    for x in leaves[2:]:
        x.zero_()  # type: ignore[union-attr]
    try:
        value.backward()
    except RuntimeError:
        return
    same("gradients", (leaves.images.grad, leaves.texts.grad), expected[1:3])


@check()
def nothing_is_kept(subject: Subject) -> None:
    """A loss holds no reference to a batch after its backward pass: it would keep memory, and the
    graph.
    """
    loss, batch = subject.fresh(torch.float64), subject.batch(9, 14)

    def step() -> list[Any]:
        leaves = batch.leaves()
        value = subject.value(leaves, loss)
        value.backward()
        return [weakref.ref(x) for x in (value, *leaves[:2])]

    references = step()
    # by a cycle, perhaps; a collection may take half a second
    if any(x() is not None for x in references):
        gc.collect()
    assert not any(x() is not None for x in references), (
        "the batch or the value is still referenced"
    )
