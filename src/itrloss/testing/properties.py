"""Checks of values and gradients, unusual and wrong batches, rounding, memory and processes.

A docstring says what a loss has to do, and why; the page Testing shows it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_versions import untyped_storage
from .registry import check
from .subject import Batch, Loss, Result, Subject, result_of, same, tensors, total, trained

# ----------------------------------------------------------------------------- values and gradients


@check()
def result_is_a_number(subject: Subject) -> None:
    """The loss is one finite floating-point number with a gradient, float64 for float64 input.

    A trainer calls ``backward`` on it, and a loss that computes in float32 whatever it gets cannot
    be verified.
    """
    value = subject.output(subject.batch(7, 9).leaves(), subject.fresh())
    if getattr(subject.loss, "reduction", None) != "none":
        assert isinstance(value, Tensor), f"expected a tensor, got {type(value).__name__}"
        assert value.dim() == 0, f"expected a 0-dim tensor, got shape {tuple(value.shape)}"
    value = total(value)
    assert value.requires_grad, "the value has no gradient"
    assert value.dtype == torch.float64, f"expected float64 for float64 input, got {value.dtype}"
    assert bool(value.isfinite()), f"expected a finite value, got {value.item()}"


def _gradcheck(output: Callable[[], object], inputs: Sequence[Tensor], **options: Any) -> None:
    """Raise an error unless the gradients of inputs equal finite differences."""

    def moved(*_: Tensor) -> tuple[Tensor, ...]:
        """Return all numbers for the inputs, which gradcheck has moved where they are."""
        return tuple(tensors(output()))

    torch.autograd.gradcheck(moved, inputs, check_undefined_grad=False, **options)


@check()
def gradcheck(subject: Subject) -> None:
    """Gradients equal finite differences in float64: entry by entry, and on a larger batch along a
    random direction.

    A hand-written gradient may be right within one block and wrong across blocks. Losses with
    weights that the gradient takes for constants fail: name this as an expected failure, and pass a
    ``reference``.
    """
    loss = subject.fresh()
    small = subject.batch(4, 5, d=4).leaves()
    _gradcheck(lambda: subject.value(small, loss), small[:2])
    large = subject.batch(70, 83).leaves()
    options = {"eps": 1e-7, "rtol": 1e-4, "atol": 1e-7}  # so small that hinges are hardly crossed
    _gradcheck(lambda: subject.value(large, loss), large[:2], fast_mode=True, **options)


@check("parameters")
def gradients_of_parameters(subject: Subject) -> None:
    """The loss's own parameters, a temperature or a bias, get the gradients of finite differences.

    Kernels have been published whose gradient of the bias was wrong, with tests too weak to tell.
    """
    loss = subject.fresh()
    batch = subject.batch()
    _gradcheck(lambda: subject.value(batch, loss), [*trained(loss).values()], rtol=1e-4, atol=1e-6)


@check("reduction")
def uneven_upstream(subject: Subject) -> None:
    """With reduction "none", the gradient of each value equals finite differences.

    A published kernel scaled all of it by the first weight, for a year. Losses with weights that
    the gradient takes for constants fail here as in ``gradcheck``: differences move the weights,
    too.
    """
    loss = subject.fresh(reduction="none")
    batch = subject.batch(4, 5, d=4).leaves()
    _gradcheck(lambda: subject.output(batch, loss), batch[:2])


@check("reduction")
def reductions_agree(subject: Subject) -> None:
    """The reductions "sum" and "mean" are the sum and the means of the values of "none".

    Where there are values of images and of texts, the mean is the sum of their two means.
    """
    batch = subject.batch(pairs=True)
    none, added, mean = (
        subject.output(batch, subject.fresh(reduction=x)) for x in ("none", "sum", "mean")
    )
    none = tensors(none)
    shapes = [tuple(x.shape) for x in none]
    assert all(len(shape) == 1 for shape in shapes), f'expected vectors for "none", got {shapes}'
    means = [x.mean() for x in none]
    same({"sum": added, "mean": mean}, {"sum": total(none), "mean": total(means)})


@check("reference")
def agrees_with_reference(subject: Subject) -> None:
    """Values and gradients are those of ``reference``, the formula in plain PyTorch, which autograd
    differentiates.

    No other check knows the gradient of a loss with weights that it takes for constants.
    """
    assert subject.reference is not None
    reductions = {"reduction": "none"} if hasattr(subject.loss, "reduction") else {}
    for batch, options in ((subject.batch(), {}), (subject.batch(70, 83), reductions)):
        loss = subject.fresh(torch.float64, **options)
        leaves = batch.leaves()
        results = []
        for formula in (loss, partial(subject.reference, loss)):
            values = tensors(subject.output(leaves, formula))
            numbers = torch.cat([x.flatten() for x in values])
            weights = torch.linspace(0.5, 1.5, len(numbers), dtype=numbers.dtype)
            results.append({"values": values, **result_of(numbers @ weights, leaves, loss)})
        same(*results)


@check("ids")
def ids_matter(subject: Subject) -> None:
    """Further pairs with equal ids are no negatives: the value differs from the value with one
    positive for each anchor.

    The same image twice in a batch, or two captions of one, are false negatives of each other
    otherwise.
    """
    pairs = subject.batch(pairs=True)
    one_class = pairs.relabelled(lambda x: torch.where(x == 5, 0, x))
    values = [subject.value(batch, subject.fresh()) for batch in (pairs, one_class)]
    assert not torch.isclose(*values, rtol=1e-9), "two pairs of one class count as those of two"


@check()
def prefers_its_own_texts(subject: Subject) -> None:
    """Images with texts that equal them have a lower loss than with each other's.

    A wrong sign makes a model that is trained push pairs apart.
    """
    pairs = subject.batch(pairs=True)
    others = pairs.images.roll(1, 0)
    right, wrong = (
        subject.value(pairs.of(pairs.images, texts), subject.fresh())
        for texts in (pairs.images, others)
    )
    assert right < wrong, f"{right:.4g} with the images' own texts, {wrong:.4g} with others'"


@check()
def inputs_not_modified(subject: Subject) -> None:
    """Embeddings and ids are as before, and no .grad is set by the forward pass.

    They belong to the caller, who may log, enqueue or re-use them.
    """
    leaves = subject.batch().leaves()
    before = copy.deepcopy(leaves)
    value = subject.value(leaves, subject.fresh())
    assert leaves.images.grad is None is leaves.texts.grad, "the forward pass sets .grad"
    value.backward()
    same(leaves, before, rtol=0, atol=0)


# ---------------------------------------------------------------------------------- unusual batches


def _finite(subject: Subject, *batches: Batch, loss: Loss | None = None) -> None:
    """Raise an AssertionError unless values and their gradients are finite."""
    for number, batch in enumerate(batches, 1):
        for name, x in subject.result(batch, copy.deepcopy(loss)).items():
            assert bool(x.isfinite().all()), (
                f"batch {number} of {len(batches)}: {name} is not finite"
            )


@check("ids")
def without_positives(subject: Subject) -> None:
    """Anchors without a positive, a few or all of them, leave the value and its gradients finite.

    A mean over no positives is 0 / 0, which a mask behind it does not mend: the gradient stays nan.
    """
    batch = subject.batch()
    few = batch.relabelled(lambda x: torch.where(x == x[-1], len(x), x))
    none = batch.relabelled(lambda x: torch.arange(len(x)) + 100 * len(x))
    _finite(subject, few, none)


@check("ids")
def without_negatives(subject: Subject) -> None:
    """Anchors without a negative leave the value and its gradients finite.

    A batch of one class happens with class labels. The log-sum-exp of no negatives is -inf, and its
    slope nan.
    """
    _finite(subject, subject.batch(5, 7).relabelled(torch.zeros_like))


@check()
def one_pair(subject: Subject) -> None:
    """A batch of one pair, or of two, has a finite value and finite gradients.

    The last batch of an epoch may have one. The sample standard deviation of one score is nan.
    """
    _finite(subject, subject.batch(1, pairs=True), subject.batch(2, pairs=True))


def _zeros(subject: Subject, dtype: torch.dtype) -> Batch:
    """Return pairs of which some embeddings are zeros."""
    batch = subject.batch(6, pairs=True).to(dtype)
    batch.images[1] = 0
    batch.texts[1:4] = 0
    return batch


@check()
def zero_vectors(subject: Subject) -> None:
    """Embeddings of zeros, as of an empty text, leave the value and its gradients finite."""
    _finite(subject, _zeros(subject, torch.float32))


@check()
def zero_vectors_in_half_precision(subject: Subject) -> None:
    """Embeddings of zeros are harmless in half precision: the 1e-12 that keeps a length above 0 is
    0 in float16.
    """
    _finite(subject, _zeros(subject, torch.float16), _zeros(subject, torch.bfloat16))


def _extreme(pairs: Batch) -> list[Batch]:
    """Return pairs that are equal, opposite, there twice, and all alike."""
    pairs = pairs.to(torch.float32)
    equal = pairs.of(pairs.images, pairs.images)
    opposite = pairs.of(pairs.images, -pairs.images)
    twice = pairs.map(lambda x: x.repeat_interleave(2, 0)[: len(x)])
    alike = equal.map(lambda x: x[:1].expand_as(x))
    return [equal, opposite, twice, alike]


@check()
def extreme_scores(subject: Subject) -> None:
    """Pairs that are equal, opposite, there twice, or all alike leave the value and its gradients
    finite in float32.

    A frozen encoder returns the same row for the same image. Cosines of 1 and -1 are the ends of
    logarithms, roots and arcs, where slopes are infinite.
    """
    pairs = subject.batch(8, pairs=True)
    axes = pairs.of(torch.eye(8), torch.eye(8))  # cosines are 1 and 0 however products round
    _finite(subject, *_extreme(pairs), *_extreme(axes))


@check("temperature")
def low_temperature(subject: Subject) -> None:
    """A temperature of 0.004 leaves the value and its gradients finite in float32, or is refused
    with a ValueError.

    An exponential of scores without their maximum overflows, and the logarithm of a softmax that is
    0 is -inf.
    """
    try:
        loss = subject.fresh(torch.float32, temperature=0.004)
        _finite(subject, *_extreme(subject.batch(pairs=True)), loss=loss)
    except (AttributeError, ValueError):
        pass  # refused when it is set or used, or a property that follows a parameter


# ------------------------------------------------------------------------------------ wrong batches


def _refused(subject: Subject, batch: Batch) -> None:
    """Raise an AssertionError unless the loss of a batch raises an error, or is nan."""
    try:
        value = subject.value(batch, subject.fresh())
    except Exception:
        return
    assert not bool(value.isfinite()), f"expected an error or nan, got {value.item():.4g}"


@check("pairing")
def unpaired_batches_are_refused(subject: Subject) -> None:
    """Without ids, more images than texts raise an error: a loss that broadcasts would return a
    number.
    """
    batch = subject.batch(5, pairs=True)
    for size in (4, 1):
        _refused(replace(subject, ids=False), batch.of(batch.images, batch.texts[:size]))


@check()
def other_dimensions_are_refused(subject: Subject) -> None:
    """Images and texts of different dimensions raise an error."""
    batch = subject.batch(5, pairs=True)
    for size in (7, 1):
        _refused(subject, batch.of(batch.images, batch.texts[:, :size]))


@check()
def nan_is_not_hidden(subject: Subject) -> None:
    """A nan in an embedding makes the loss nan, or raises an error: training must not go on
    unnoticed.
    """
    batch = subject.batch(5, pairs=True)
    batch.images[2, 3] = torch.nan
    _refused(subject, batch)


# ----------------------------------------------------------------------------------------- rounding

# With float32 scores losses of this library are at 0.12 to 0.38, with scores that are rounded to
# bfloat16 at 0.43 up.
_HALF = 0.4


def _largest_error(found: list[Result], exact: list[Result], names: Sequence[str]) -> Tensor:
    """Return the largest relative error of these entries of results, in the Frobenius norm."""
    errors = []
    for pair in zip(found, exact, strict=True):
        x, y = (torch.cat([z[name].double().flatten() for name in names]) for z in pair)
        errors.append((x - y).norm() / y.norm().clamp_min(torch.finfo(y.dtype).tiny))
    return torch.stack(errors).amax()  # nan, if one is


def _rounding(subject: Subject, dtype: torch.dtype, times: float, autocast: bool = False) -> None:
    """Raise an AssertionError if an error is more than ``times`` the error of rounding the
    embeddings and the gradients.
    """
    batches = [subject.batch(48, 60, d=64, seed=seed) for seed in range(3)]
    plain = [subject.result(batch) for batch in batches]
    rounded = [batch.to(dtype) for batch in batches]
    exact = [subject.result(batch.to(torch.float64)) for batch in rounded]
    if autocast:
        rounded = [batch.to(torch.float32) for batch in rounded]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = [subject.result(batch) for batch in rounded]
    for names in (["value"], ["gradient of images", "gradient of texts"]):
        error = _largest_error(found, exact, names)
        least = _largest_error(exact, plain, names)
        limit = times * (least + torch.finfo(dtype).eps)
        assert error <= limit, f"relative error of the {names[0]} {error:.2g}, allowed {limit:.2g}"


@check()
def float32_error(subject: Subject) -> None:
    """In float32 the error is at most twelve times the error of rounding the embeddings and
    the gradients.

    Scores are float32 here, and a temperature of 0.05 multiplies their rounding by 20. Cancellation
    is far worse.
    """
    _rounding(subject, torch.float32, 12)


@check()
def bfloat16_error(subject: Subject) -> None:
    """With bfloat16 embeddings the error is at most 0.4 times the error of rounding the embeddings
    and the gradients.

    Scores stay float32: rounded to bfloat16 and divided by a temperature of 0.01, they are
    multiples of 0.5.
    """
    _rounding(subject, torch.bfloat16, _HALF)


@check()
def float16_error(subject: Subject) -> None:
    """With float16 embeddings the error is at most 0.4 times the error of rounding the embeddings
    and the gradients.
    """
    _rounding(subject, torch.float16, _HALF)


@check()
def autocast_error(subject: Subject) -> None:
    """Under autocast to bfloat16 the error is at most 0.4 times the error of rounding the
    embeddings and the gradients.

    Autocast runs the product of float32 embeddings in bfloat16 unless the loss opts out.
    """
    _rounding(subject, torch.bfloat16, _HALF, autocast=True)


# ----------------------------------------------------------------------------- memory and processes


@check()
def memory_grows_linearly(subject: Subject) -> None:
    """What autograd saves grows with (N + M) D, not with N M: at 2048 pairs it is less than the
    scores would be in half precision.

    A matrix of scores of 65 536 pairs takes 17 GB. Chunks that are all kept until the backward pass
    are no remedy.
    """
    n = 2048
    batch = subject.batch(n, pairs=True, d=4).to(torch.float32).leaves()
    engine = {"engine": "tiled"} if hasattr(subject.loss, "engine") else {}
    loss = subject.fresh(torch.float32, **engine)
    storages = {}  # by address; they are kept, so that none is used again

    def note(x: Tensor) -> Tensor:
        """Keep a tensor's storage; return the tensor."""
        storage = untyped_storage(x)
        storages[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        subject.value(batch, loss)
    saved = sum(storage.nbytes() for storage in storages.values())
    assert saved < 2 * n * n, f"autograd saves {saved:,} bytes for {n} pairs, with {n * n:,} scores"


spawn = get_context("spawn")


def _process(rank: int, subject: Subject, batch: Batch, folder: str) -> Result:
    """Return the result of one process of several, which meet in a folder."""
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    world = subject.processes
    dist.init_process_group("gloo", where, timedelta(seconds=60), rank=rank, world_size=world)
    own = torch.arange(len(batch.images)).chunk(world)[rank]
    result = subject.result(batch.take(own, own), subject.fresh(gather=True))
    dist.barrier()
    dist.destroy_process_group()
    return result


@check("processes", "gather")
def several_processes(subject: Subject) -> None:
    """With gather=True, W processes with shares of a batch have its value, and the mean of their
    gradients is its own.

    That mean is DistributedDataParallel's. Missing gradients of gathered embeddings, or factors of
    W, show up here.
    """
    # A copy, as sending moves parameters into shared memory. A reference, which is not used here,
    # may be a lambda, which cannot be sent.
    subject = replace(subject, loss=subject.fresh(), reference=None)
    world = subject.processes
    batch = subject.batch(8 * world, pairs=True)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, spawn) as pool:
        work = partial(_process, subject=subject, batch=batch, folder=folder)
        results = list(pool.map(work, range(world)))  # each waits for the others in its own process
    expected = subject.result(batch)
    found = {name: torch.stack([result[name] for result in results]) for name in expected}
    for name, x in found.items():
        if name in ("gradient of images", "gradient of texts"):  # of a process's own ones
            found[name] = x.flatten(0, 1) / world
        elif name != "value":
            found[name] = x.mean(0)
    expected["value"] = expected["value"].expand(world)
    same(found, expected)
