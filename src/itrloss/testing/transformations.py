"""Transformations of a batch, of a loss or of the call, after which the value and the gradients are
the same.

A docstring says what a loss has to do, and why; the page Testing shows it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace

import torch
from torch import Tensor, nn

from .registry import Results, Trial, altered, same_after
from .subject import Batch, Result, result_of, total


def _order(size: int) -> Tensor:
    """Return a random order of so many rows."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


@same_after(n=131, pairs=True)
def order_of_pairs(trial: Trial) -> Results:
    """The order of the pairs in the batch changes nothing, and moves gradients along.

    Labels by position, blocks that are merged wrongly and a tail that is dropped show up here.
    """
    order = _order(131)
    yield trial.result(trial.batch.take(order, order))


@same_after("ids", n=11, m=17)
def order_of_each_side(trial: Trial) -> Results:
    """Images and texts may come in any order, each with its ids.

    A loss that takes the first positive only, or the one at the anchor's own position, changes.
    """
    yield trial.result(trial.batch.take(_order(11), _order(17)))


@same_after()
def swapped_sides(trial: Trial) -> Results:
    """Images and texts may change places.

    In retrieval both directions count. Losses of one direction fail, as do those that mix up rows
    and columns in one.
    """
    yield trial.result(trial.batch.swapped())


@same_after("ids")
def renamed_ids(trial: Trial) -> Results:
    """Ids are names: negative, very large and unordered ones mean the same as 0, 1, 2; so do int32
    ones.

    They are keys of a database or file numbers. As indices, in float32 or in small integers they
    would collide.
    """
    for renamed in (lambda x: 3 - 7 * x, lambda x: 256 * x + 2**53, Tensor.int):
        yield trial.result(trial.batch.relabelled(renamed))


@same_after("ids", "pairing", pairs=True)
def ids_left_out(trial: Trial) -> Results:
    """Without ids, image i matches text i: the same as with distinct ids."""
    without_ids = replace(trial.subject, ids=False)
    yield replace(trial, subject=without_ids).result()


@same_after()
def rotation(trial: Trial) -> Results:
    """A rotation of all embeddings changes nothing: inner products decide the loss."""
    turn = torch.linalg.qr(trial.subject.batch(8, 8).images).Q
    yield trial.result(trial.batch.map(lambda x: x @ turn))


@same_after("normalizes")
def scaled_embeddings(trial: Trial) -> Results:
    """The length of each embedding changes nothing: the loss is one of cosines. Gradients go as 1 /
    length.
    """
    yield trial.result(trial.batch.map(lambda x: x * torch.linspace(0.1, 9, len(x))[:, None]))


@same_after("normalizes", dtype=torch.float32)
def short_embeddings(trial: Trial) -> Results:
    """Embeddings of length 2^-30, 1e-9, give the same loss in float32, also where an eps keeps
    lengths above 0.

    With the usual 1e-12 of :func:`torch.nn.functional.normalize` they do.
    """
    yield trial.result(trial.batch.map(lambda x: x * 2.0**-30))


@same_after()
def non_contiguous_inputs(trial: Trial) -> Results:
    """Strided tensors are read as what they hold, not as what lies in memory."""
    strided = (torch.stack([x, 0 * x], -1)[..., 0] for x in trial.batch)
    yield trial.result(Batch(*strided))


@same_after()
def repeated_calls(trial: Trial) -> Results:
    """A call for another batch changes nothing: there is no hidden state.

    Labels that are cached for the first batch are wrong for the second one. Losses with a queue, or
    with random numbers, fail.
    """
    yield trial.result(loss=altered(trial.subject.fresh()))


@same_after()
def two_backwards(trial: Trial) -> Results:
    """A second backward pass through a retained graph gives the same gradients: the first one
    modified nothing.
    """
    value = trial.subject.value(trial.batch, trial.loss)
    yield result_of(value, trial.batch, trial.loss, keep=True)
    yield result_of(value, trial.batch, trial.loss)


@same_after()
def two_forwards_before_one_backward(trial: Trial) -> Results:
    """Another batch may be put through before the backward pass, as in accumulation and in losses
    with two terms.

    Buffers and queues that the second call overwrites are still needed by the first.
    """
    value = trial.subject.value(trial.batch, trial.loss)
    trial.subject.value(trial.subject.batch(seed=2).leaves(), trial.loss)
    yield result_of(value, trial.batch, trial.loss)


@same_after("module")
def training_and_evaluation(trial: Trial) -> Results:
    """The value is the same in training and evaluation mode, so that validation losses can be
    compared.
    """
    yield trial.result(loss=trial.loss.train())
    yield trial.result(loss=trial.loss.eval())


@same_after("module")
def state_dict_round_trip(trial: Trial) -> Results:
    """The state_dict holds all parameters and buffers that the value depends on, and loads
    strictly.

    Queues have been published whose place was not saved.
    """
    stored = io.BytesIO()
    torch.save(trial.loss.state_dict(), stored)
    stored.seek(0)
    loaded = trial.subject.fresh()
    assert isinstance(loaded, nn.Module)
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    yield trial.result(loss=loaded)


@same_after("module")
def pickled(trial: Trial) -> Results:
    """The loss can be pickled, as torch.save of a whole model and spawned processes do it."""
    yield trial.result(loss=pickle.loads(pickle.dumps(trial.loss)))


@same_after("engine", n=21, m=34)
def engines_agree(trial: Trial) -> Results:
    """The engines "dense" and "tiled" give the same value and gradients."""
    for engine in ("dense", "tiled"):
        trial.loss.engine = engine
        yield trial.result()


def _compiled(trial: Trial, fullgraph: bool) -> Result:
    """Return the result of the compiled loss."""
    torch.compiler.reset()
    output = torch.compile(trial.subject.output, backend="aot_eager", fullgraph=fullgraph)
    try:
        return result_of(total(output(trial.batch, trial.loss)), trial.batch, trial.loss)
    finally:
        torch.compiler.reset()


@same_after("compiler", dtype=torch.float32)
def compiled(trial: Trial) -> Results:
    """Under torch.compile (aot_eager) the value and the gradients are the same."""
    yield _compiled(trial, fullgraph=False)


@same_after("compiler", dtype=torch.float32)
def compiled_as_one_graph(trial: Trial) -> Results:
    """torch.compile finds no graph break: `.item()`, branches on values and unknown operators are
    such.
    """
    yield _compiled(trial, fullgraph=True)
