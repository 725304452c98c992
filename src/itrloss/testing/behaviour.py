"""Checks of a loss as part of a program: repetition, copies, threads, compilation, memory,
processes.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils._pytree import tree_leaves

from ..grad_cache import grad_cache_step
from .registry import check
from .subject import Batch, Result, Subject, identical, normal, result_of, same, total


@check()
def repeated_calls(subject: Subject) -> None:
    """Calls for other batches, and of other sizes, change nothing: there is no hidden state.

    Labels that are cached for the first batch are wrong for the last one of an epoch. Losses with a
    queue fail.
    """
    loss = subject.fresh()
    for seed, size in enumerate((9, 5, 12, 9)):
        batch = subject.batch(size, size, seed=seed)
        same(f"call {seed + 1}, {size} pairs", subject.result(batch, loss), subject.result(batch))


@check()
def deterministic(subject: Subject) -> None:
    """The same batch gives the same bits, gradients included."""
    batch = subject.batch(40, 50).to(torch.float32)
    loss = subject.fresh(torch.float32)
    first = subject.result(batch, loss)
    identical("a second call", subject.result(batch, loss), first)


@check()
def random_state(subject: Subject) -> None:
    """No random numbers are drawn from PyTorch's generator: otherwise a run cannot be compared with
    another loss's.
    """
    before = torch.get_rng_state()
    subject.result(subject.batch())
    identical("the random state after a call", torch.get_rng_state(), before)


def _strided(x: Tensor) -> Tensor:
    """Return a tensor that is every other row in memory."""
    return torch.stack([x, torch.zeros_like(x)], 1).flatten(0, 1)[::2]


@check()
def non_contiguous_inputs(subject: Subject) -> None:
    """Transposed and strided tensors count as what they hold, not as what lies in memory."""
    leaves = subject.batch().leaves()
    transposed = leaves.map(lambda x: x.T.contiguous().T)
    subject.same_after("transposed", leaves, transposed)
    strided = leaves.map(_strided).with_ids(*(_strided(x) for x in leaves.ids))
    subject.same_after("strided", leaves, strided)


@check()
def default_dtype(subject: Subject) -> None:
    """PyTorch's default dtype changes nothing."""
    batch = subject.batch()
    loss = subject.fresh()
    expected = subject.result(batch)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if default == torch.float32 else torch.float32)
        got = subject.result(batch, loss)
    finally:
        torch.set_default_dtype(default)
    same("another default dtype", got, expected)


@check("module")
def training_and_evaluation(subject: Subject) -> None:
    """The value is the same in training and evaluation mode, so that validation losses can be
    compared.
    """
    batch = subject.batch()
    training = subject.result(batch, subject.fresh().train())
    same("evaluation mode", subject.result(batch, subject.fresh().eval()), training)


def _altered(loss: nn.Module) -> nn.Module:
    """Return the loss with other parameters and floating-point buffers."""
    with torch.no_grad():
        for x in (*loss.parameters(), *loss.buffers()):
            if x.is_floating_point():
                x.mul_(1.25).add_(0.05)
    return loss


@check("module")
def state_dict_round_trip(subject: Subject) -> None:
    """The state_dict holds all parameters and buffers that the value depends on, and loads
    strictly.
    """
    batch = subject.batch()
    altered = _altered(subject.fresh())
    stored = io.BytesIO()
    torch.save(altered.state_dict(), stored)
    stored.seek(0)
    loaded = subject.fresh()
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    same("loaded", subject.result(batch, loaded), subject.result(batch, altered))


@check("module")
def resumed_training(subject: Subject) -> None:
    """Training that is resumed from the state_dict goes on bit for bit, the loss's own parameters
    included.

    Queues have been published whose place was not saved.
    """

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a loss and its optimizer, before training."""
        loss = subject.fresh()
        parameters = [*loss.parameters(), nn.Parameter(torch.zeros(1))]
        return loss, torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    batches = [subject.batch(9, 9, seed=seed).leaves() for seed in range(10)]
    loss, optimizer = start()
    subject.steps(loss, optimizer, batches[:5])
    states = copy.deepcopy((loss.state_dict(), optimizer.state_dict()))
    expected = subject.steps(loss, optimizer, batches[5:])
    other, other_optimizer = start()
    other.load_state_dict(states[0])
    other_optimizer.load_state_dict(states[1])
    got = subject.steps(other, other_optimizer, batches[5:])
    identical("the resumed run", got, expected)


@check("module")
def deepcopy(subject: Subject) -> None:
    """A deep copy has the same value, and parameters of its own, as for an averaged or a second
    model.
    """
    batch = subject.batch()
    loss = subject.fresh()
    expected = subject.result(batch)
    same("copy", subject.result(batch, copy.deepcopy(loss)), expected)
    _altered(copy.deepcopy(loss))
    same("the original after a change of a copy", subject.result(batch, loss), expected)


@check("module")
def pickled(subject: Subject) -> None:
    """The loss can be pickled, as torch.save of a whole model and spawned processes do it."""
    batch = subject.batch()
    loss = _altered(subject.fresh())
    loaded = pickle.loads(pickle.dumps(loss))
    same("pickled", subject.result(batch, loaded), subject.result(batch, loss))


@check()
def threads(subject: Subject) -> None:
    """Threads may share a loss, as nn.DataParallel and evaluation during training do."""
    loss = subject.fresh()
    batches = [subject.batch(seed=seed) for seed in range(4)]
    expected = [subject.result(batch, loss) for batch in batches]

    def work(batch: Batch, wanted: Result) -> None:
        """Compare one batch's results with the expected ones, many times."""
        for _ in range(30):
            same("among other threads", subject.result(batch, loss), wanted)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(batches)) as pool:
            for _ in pool.map(work, batches, expected):  # raises the first error
                pass
    finally:
        sys.setswitchinterval(interval)


@check("engine")
def engines_agree(subject: Subject) -> None:
    """The engines "dense" and "tiled" give the same value and gradients."""
    batch = subject.batch(21, 34)
    dense = subject.result(batch, subject.fresh(engine="dense"))
    tiled = subject.result(batch, subject.fresh(engine="tiled"))
    same("tiled and dense", tiled, dense)


def _compiled(subject: Subject, fullgraph: bool) -> None:
    """Raise an AssertionError unless the compiled loss has the same value and gradients."""
    torch.compiler.reset()
    leaves = subject.batch().to(torch.float32).leaves()
    loss = subject.fresh(torch.float32)
    expected = subject.result(leaves, loss)
    compiled = torch.compile(subject.output, backend="aot_eager", fullgraph=fullgraph)
    try:
        got = result_of(total(compiled(leaves, loss)), leaves, loss)
        same("compiled", got, expected, rtol=1e-4, atol=1e-5)
    finally:
        torch.compiler.reset()


@check()
def compiled(subject: Subject) -> None:
    """Under torch.compile (aot_eager) the value and the gradients are the same."""
    _compiled(subject, fullgraph=False)


@check()
def compiled_as_one_graph(subject: Subject) -> None:
    """torch.compile finds no graph break: `.item()`, branches on values and unknown operators are
    such.
    """
    _compiled(subject, fullgraph=True)


def _nodes(start: Any) -> Iterator[Any]:
    """Yield the nodes of the autograd graph."""
    seen = set()
    left = [start]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            yield node


def _saved_bytes(subject: Subject, n: int) -> int:
    """Return the bytes that autograd saves for n pairs, attributes of custom functions included."""
    batch = subject.batch(n, one=True, d=4).to(torch.float32).leaves()
    loss = subject.fresh(torch.float32)
    if hasattr(loss, "engine"):
        loss.engine = "tiled"
    storages = {}  # by address; they are kept, so that none is used again

    def note(x: Any) -> Any:
        """Keep a tensor's storage; return the tensor."""
        if isinstance(x, Tensor) and x.layout == torch.strided:
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        value = subject.value(batch, loss)
    for node in _nodes(value.grad_fn):
        for x in tree_leaves([*getattr(node, "__dict__", {}).values()]):
            note(x)
    return sum(storage.nbytes() for storage in storages.values())


@check()
def memory_grows_linearly(subject: Subject) -> None:
    """What autograd saves grows with (N + M) D, not with N M: from 256 to 4096 pairs, four times at
    four times N.

    A matrix of scores of 65 536 pairs takes 17 GB. Chunks that are all kept until the backward pass
    are no remedy.
    """
    for small, large in ((64, 256), (1024, 4096)):
        few = _saved_bytes(subject, small)
        many = _saved_bytes(subject, large)
        if many <= 8 * few:
            return
        if many > 2**25:
            break
    raise AssertionError(f"autograd saves {few:,} bytes for {small} pairs and {many:,} for {large}")


@check()
def cached_step(subject: Subject) -> None:
    """A step with gradient caching (:func:`itrloss.grad_cache_step`) has the gradients of the whole
    batch.
    """
    batch = subject.batch()
    loss = subject.fresh()
    generator = torch.Generator().manual_seed(0)
    weights = [normal((8, 6), generator).requires_grad_() for _ in range(2)]
    encoders = [partial(torch.matmul, other=weight) for weight in weights]

    def compute(images: Tensor, texts: Tensor) -> Tensor:
        """Return the loss of embeddings."""
        return subject.value(batch.of(images, texts), loss)

    value = compute(batch.images @ weights[0], batch.texts @ weights[1])
    expected = torch.autograd.grad(value, weights)
    grad_cache_step(compute, encoders, batch.embeddings, 4)
    same("chunks of 4 rows", [weight.grad for weight in weights], expected)


def _shared(subject: Subject, batch: Batch, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return a process's value and gradient of an encoder's weight, before the processes' mean."""
    loss = subject.fresh()
    if world > 1:
        loss.gather = True
    weight = normal((8, 6), torch.Generator().manual_seed(0)).requires_grad_()
    size = len(batch.images)  # of both sides
    own = slice(rank * size // world, (rank + 1) * size // world)
    part = batch.take(own, own)
    value = subject.value(part.of(part.images @ weight, part.texts @ weight), loss)
    (gradient,) = torch.autograd.grad(value, weight)
    return value.detach(), gradient


def _process(rank: int, subject: Subject, batch: Batch, world: int, folder: str) -> None:
    """Store the value and the mean gradient of one process of several in a folder."""
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", where, timedelta(seconds=60), rank=rank, world_size=world)
    value, gradient = _shared(subject, batch, rank, world)
    dist.all_reduce(gradient)
    torch.save((value, gradient / world), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
    # Without Python's shutdown: a last tensor that a thread of the group drops during it aborts the
    # process, rarely and on busy machines (pytorch/pytorch#179291).
    os._exit(0)


@check("processes", "gather")
def several_processes(subject: Subject) -> None:
    """With gather=True, W processes with shares of a batch have its value, and the mean of their
    gradients is its own.

    That mean is DistributedDataParallel's. Missing gradients of gathered embeddings, or factors of
    W, show up here.
    """
    if not dist.is_available():
        raise SkipTest("torch.distributed is not available")
    subject = replace(subject, reference=None)  # not used here, and a lambda cannot be sent
    try:
        pickle.dumps(subject)
    except Exception as error:
        raise SkipTest(f"the loss or call= cannot be sent to other processes: {error}") from error
    world = subject.processes
    batch = subject.batch(8 * world, one=True)
    expected = _shared(subject, batch, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (subject, batch, world, folder), world)
        for rank in range(world):
            same(f"process {rank} of {world}", torch.load(Path(folder, f"{rank}.pt")), expected)
