"""All losses in a program: what its surroundings, its other calls and its threads must not change.

These are properties of this library's losses that `check_loss` does not ask of others.
"""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from support.conforming import LOSSES

from itrloss import grad_cache_step
from itrloss.testing.subject import Batch, Subject, result_of, same, trained


@pytest.fixture(params=LOSSES)
def name(request) -> str:
    return request.param


@pytest.fixture
def subject(name) -> Subject:
    case = LOSSES[name]
    return Subject(case.loss, **case.options)


@pytest.fixture
def loss(subject) -> Any:
    return subject.fresh()


def test_surroundings_change_nothing_and_are_not_changed(subject, loss):
    batch = subject.batch()
    expected = subject.result(batch)
    before = torch.get_rng_state()
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        same(subject.result(batch, loss), expected)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_batch_gives_the_same_bits(subject):
    batch = subject.batch(40, 50).to(torch.float32)
    loss = subject.fresh(torch.float32)
    first = subject.result(batch, loss)
    same(subject.result(batch, loss), first, rtol=0, atol=0)


def test_there_is_no_graph_where_no_gradient_is_required(subject, loss):
    batch = subject.batch()
    expected = subject.value(batch, loss)
    assert expected.requires_grad == bool(trained(loss))
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            value = subject.value(batch.leaves(), loss)
        assert not value.requires_grad
        same({guard.__name__: value}, {guard.__name__: expected})
    same({"afterwards": subject.value(batch.leaves(), loss)}, {"afterwards": expected})


def test_the_gradient_of_one_side_is_the_same_with_the_other_one_frozen(subject):
    batch = subject.batch()
    expected = subject.result(batch)
    for side in ("images", "texts"):
        leaf = getattr(batch, side).clone().requires_grad_()
        subject.value(batch._replace(**{side: leaf}), subject.fresh()).backward()
        key = f"gradient of {side}"
        same({key: leaf.grad}, {key: expected[key]})


def test_a_tensor_on_both_sides_gets_both_gradients(subject):
    batch = subject.batch(pairs=True)
    x = batch.images.clone().requires_grad_()
    expected = subject.result(batch.of(batch.images, batch.images))
    (got,) = torch.autograd.grad(subject.value(batch.of(x, x), subject.fresh()), x)
    both = expected["gradient of images"] + expected["gradient of texts"]
    same({"gradient": got}, {"gradient": both})


def test_ids_may_be_overwritten_before_the_backward_pass(subject, loss):
    leaves = subject.batch().leaves().relabelled(torch.clone)
    expected = subject.result(leaves)
    value = subject.value(leaves, loss)
    leaves.image_ids.zero_()
    leaves.text_ids.zero_()
    try:
        same(result_of(value, leaves, loss), expected)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)


def test_nothing_is_kept_of_a_batch(subject, loss):

    def step() -> list[Any]:
        leaves = subject.batch().leaves()
        value = subject.value(leaves, loss)
        value.backward()
        return [weakref.ref(x) for x in (value, leaves.images, leaves.texts)]

    references = step()
    if any(x() is not None for x in references):  # by a cycle, perhaps
        gc.collect()
    assert [x for x in references if x() is not None] == []


def test_a_cached_step_has_the_gradients_of_the_whole_batch(subject, loss):
    batch = subject.batch()
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 8, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = [draw(), draw()]
    encoders = [partial(torch.matmul, other=weight) for weight in weights]

    def compute(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return subject.value(batch.of(images, texts), loss)

    value = compute(batch.images @ weights[0], batch.texts @ weights[1])
    expected = torch.autograd.grad(value, weights)
    grad_cache_step(compute, encoders, [batch.images, batch.texts], 4)
    same({"weights": [weight.grad for weight in weights]}, {"weights": [*expected]})


@pytest.mark.slow
def test_threads_may_share_a_loss(subject, loss):
    batches = [subject.batch(seed=seed) for seed in range(4)]
    expected = [subject.result(batch, loss) for batch in batches]

    def work(batch: Batch, wanted: Any) -> None:
        for _ in range(30):
            same(subject.result(batch, loss), wanted)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(batches)) as pool:
            for _ in pool.map(work, batches, expected):  # raises the first error
                pass
    finally:
        sys.setswitchinterval(interval)
