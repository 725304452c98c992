"""Checks of a loss as part of a program: repetition, copies, threads, compilation, memory,
processes.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
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
from .subject import Batch, Result, Subject, same, total

_FULL = torch.float64


@check()
def repeated_calls(subject: Subject) -> None:
    """Calls for other batches, and of other sizes, change nothing: there is no hidden state.

    Labels that are cached for the first batch are wrong for the last one of an epoch. Losses with a
    queue fail.
    """
    loss, sizes = subject.fresh(_FULL), (9, 5, 12, 9)
    for seed, size in enumerate(sizes):
        batch = subject.batch(size, size, seed=seed)
        same(f"call {seed + 1}, {size} pairs", subject.result(batch, loss), subject.result(batch))


@check()
def deterministic(subject: Subject) -> None:
    """The same batch gives the same bits, gradients included."""
    batch, loss = subject.batch(40, 50).to(torch.float32), subject.fresh()
    first, second = (tree_leaves(subject.result(batch, loss)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two calls differ"


@check()
def random_state(subject: Subject) -> None:
    """No random numbers are drawn from PyTorch's generator: otherwise a run cannot be compared with
    another loss's.
    """
    before = torch.get_rng_state()
    subject.result(subject.batch(9, 14))
    assert torch.equal(before, torch.get_rng_state()), (
        "the random state is another one after a call"
    )


@check()
def non_contiguous_inputs(subject: Subject) -> None:
    """Transposed, strided and expanded tensors count as what they hold, not as what lies in memory."""
    batch, loss = subject.batch(9, 14), subject.fresh(_FULL)
    expected = subject.result(batch, loss)
    every_other = lambda x: torch.stack([x, torch.zeros_like(x)], 1).flatten(0, 1)[::2]  # noqa: E731
    forms = {"transposed": lambda x: x.T.contiguous().T, "strided": every_other}
    for name, form in forms.items():
        ids = [x if x is None else every_other(x) for x in batch[2:]]
        images, texts = (form(x).detach().requires_grad_() for x in batch[:2])
        assert not images.is_contiguous()
        value = subject.value(Batch(images, texts, *ids), loss)
        same(name, (value, *torch.autograd.grad(value, (images, texts))), expected[:3])


@check()
def default_dtype(subject: Subject) -> None:
    """PyTorch's default dtype changes nothing."""
    batch, default = subject.batch(9, 14), torch.get_default_dtype()
    loss, expected = subject.fresh(_FULL), subject.result(batch)
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
    batch = subject.batch(9, 14)
    modes = [subject.result(batch, subject.fresh(_FULL).train(mode)) for mode in (True, False)]
    same("evaluation mode", modes[1], modes[0])


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
    batch, trained = subject.batch(9, 14), _altered(subject.fresh(_FULL))
    stored = io.BytesIO()
    torch.save(trained.state_dict(), stored)
    stored.seek(0)
    loaded = subject.fresh(_FULL)
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    same("loaded", subject.result(batch, loaded), subject.result(batch, trained))


def _steps(subject: Subject, loss: nn.Module, optimizer: Any, seeds: range) -> list[Tensor]:
    values = []
    for seed in seeds:
        value = subject.value(subject.batch(9, 9, seed=seed).leaves(), loss)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.detach())
    return values


@check("module")
def resumed_training(subject: Subject) -> None:
    """Training that is resumed from the state_dict goes on bit for bit, the loss's own parameters
    included.

    Queues have been published whose place was not saved.
    """

    def start() -> tuple[nn.Module, Any]:
        loss = subject.fresh(_FULL)
        return loss, torch.optim.SGD(
            [*loss.parameters(), nn.Parameter(torch.zeros(1))], lr=0.01, momentum=0.9
        )

    loss, optimizer = start()
    _steps(subject, loss, optimizer, range(5))
    states = copy.deepcopy((loss.state_dict(), optimizer.state_dict()))
    expected = _steps(subject, loss, optimizer, range(5, 10))
    other, other_optimizer = start()
    other.load_state_dict(states[0])
    other_optimizer.load_state_dict(states[1])
    got = _steps(subject, other, other_optimizer, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (
        "the resumed run differs"
    )


@check("module")
def deepcopy(subject: Subject) -> None:
    """A deep copy has the same value, and parameters of its own, as for an averaged or a second
    model.
    """
    batch, loss = subject.batch(9, 14), subject.fresh(_FULL)
    expected, (twin, other) = subject.result(batch), (copy.deepcopy(loss) for _ in range(2))
    same("copy", subject.result(batch, twin), expected)
    _altered(other)
    same("the original after a change of a copy", subject.result(batch, loss), expected)


@check("module")
def pickled(subject: Subject) -> None:
    """The loss can be pickled, as torch.save of a whole model and spawned processes do it."""
    batch, loss = subject.batch(9, 14), _altered(subject.fresh(_FULL))
    same(
        "pickled",
        subject.result(batch, pickle.loads(pickle.dumps(loss))),
        subject.result(batch, loss),
    )


@check()
def threads(subject: Subject) -> None:
    """Threads may share a loss, as nn.DataParallel and evaluation beside training do."""
    loss, batches = subject.fresh(_FULL), [subject.batch(9, 14, seed=seed) for seed in range(4)]
    expected = [subject.result(batch, loss) for batch in batches]
    errors: list[Exception | AssertionError] = []

    def work(batch: Batch, wanted: Result) -> None:
        try:
            for _ in range(15):
                same("beside other threads", subject.result(batch, loss), wanted)
        except Exception as error:
            errors.append(error)

    workers = [
        threading.Thread(target=work, args=pair) for pair in zip(batches, expected, strict=True)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


@check("engine")
def engines_agree(subject: Subject) -> None:
    """The engines "dense" and "tiled" give the same value and gradients."""
    batch = subject.batch(21, 34)
    dense, tiled = (
        subject.result(batch, subject.fresh(_FULL, engine=x)) for x in ("dense", "tiled")
    )
    same("tiled beside dense", tiled, dense)


def _compiled(subject: Subject, fullgraph: bool) -> None:
    torch.compiler.reset()
    batch, loss = subject.batch(9, 14).to(torch.float32), subject.fresh()
    expected = subject.result(batch, loss)
    compiled = torch.compile(subject.output, backend="aot_eager", fullgraph=fullgraph)
    try:
        leaves = batch.leaves()
        value = total(compiled(leaves, loss))
        same(
            "compiled",
            (value, *torch.autograd.grad(value, leaves[:2])),
            expected[:3],
            rtol=1e-4,
            atol=1e-5,
        )
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
    seen, left = set(), [start]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            yield node


def _saved_bytes(subject: Subject, n: int) -> int:
    """Return the bytes that autograd saves for n pairs, attributes of custom functions included."""
    batch, storages = subject.batch(n, one=True, d=4).to(torch.float32).leaves(), {}

    def note(x: Tensor) -> Tensor:
        if x.layout == torch.strided:
            storages[x.untyped_storage().data_ptr()] = x
        return x

    options: dict[str, Any] = {} if subject.lacks("engine") else {"engine": "tiled"}
    loss = subject.fresh(**options)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        value = subject.value(batch, loss)
    for node in _nodes(value.grad_fn):
        for x in tree_leaves([*getattr(node, "__dict__", {}).values()]):
            if isinstance(x, Tensor):
                note(x)
    return sum(x.untyped_storage().nbytes() for x in storages.values())


@check()
def memory_grows_linearly(subject: Subject) -> None:
    """What autograd saves grows with (N + M) D, not with N M: from 256 to 4096 pairs, four times at
    four times N.

    A matrix of scores of 65 536 pairs takes 17 GB. Chunks that are all kept until the backward pass
    are no remedy.
    """
    for small, large in ((64, 256), (1024, 4096)):
        few, many = _saved_bytes(subject, small), _saved_bytes(subject, large)
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
    batch, loss = subject.batch(9, 14), subject.fresh(_FULL)
    generator = torch.Generator().manual_seed(0)
    encoders = [nn.Linear(8, 6, bias=False, dtype=_FULL) for _ in range(2)]
    for encoder in encoders:
        encoder.weight.data = torch.randn(6, 8, generator=generator, dtype=_FULL)
    compute = lambda images, texts: subject.value(batch.of(images, texts), loss)  # noqa: E731
    compute(*(encoder(x) for encoder, x in zip(encoders, batch[:2], strict=True))).backward()
    expected = []
    for encoder in encoders:
        expected.append(encoder.weight.grad)
        encoder.weight.grad = None
    grad_cache_step(compute, encoders, batch[:2], 4)
    same("chunks of 4 rows", [encoder.weight.grad for encoder in encoders], expected)


def _shared(subject: Subject, batch: Batch, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return a process's value, and the gradient of an encoder's weight as it is before the
    processes' mean.
    """
    loss = subject.fresh(_FULL) if world == 1 else subject.fresh(_FULL, gather=True)
    weight = torch.linspace(-1, 1, 48, dtype=_FULL).view(8, 6).sin().requires_grad_()
    own = [slice(rank * len(x) // world, (rank + 1) * len(x) // world) for x in batch[:2]]
    ids = [x if x is None else x[k] for x, k in zip(batch[2:], own, strict=True)]
    value = subject.value(
        Batch(batch.images[own[0]] @ weight, batch.texts[own[1]] @ weight, *ids), loss
    )
    return value.detach(), torch.autograd.grad(value, weight)[0]


def _process(rank: int, subject: Subject, batch: Batch, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", where, timedelta(seconds=60), rank=rank, world_size=world)
    value, gradient = _shared(subject, batch, rank, world)
    dist.all_reduce(gradient)
    torch.save((value, gradient / world), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@check("processes", "gather")
def several_processes(subject: Subject) -> None:
    """With gather=True, W processes with shares of a batch have its value, and the mean of their
    gradients is its own.

    That mean is DistributedDataParallel's. Missing gradients of gathered embeddings, or factors of
    W, show up here.
    """
    if not dist.is_available():
        raise SkipTest("torch.distributed is not available")
    try:
        pickle.dumps(subject)
    except Exception as error:
        raise SkipTest(f"the loss or call= cannot be sent to other processes: {error}") from error
    batch, world = subject.batch(8 * subject.processes, one=True), subject.processes
    expected = _shared(subject, batch, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        args = subject, batch, world, folder
        spawn(_process, args, world)
        for rank in range(world):
            same(f"process {rank} of {world}", torch.load(Path(folder, f"{rank}.pt")), expected)
