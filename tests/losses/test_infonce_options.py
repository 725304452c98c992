"""InfoNCE: distillation, limits and costs of options.

The spine, `test_random_cases`, has all options next to loops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.embedders import one_way

import itrloss
from itrloss import InfoNCELoss, Similarity

ENGINES = "dense", "tiled"


def test_a_learnt_scale_is_limited_in_training():
    v, w = (torch.randn(4, 8) for _ in range(2))
    loss = InfoNCELoss(0.01, learnable=True, max_scale=50.0)
    before = loss.eval()(v, w)
    torch.testing.assert_close(loss.temperature.item(), 0.01)
    after = loss.train()(v, w)
    torch.testing.assert_close(loss.temperature.item(), 0.02)
    torch.testing.assert_close(after, InfoNCELoss(0.02)(v, w))
    assert before != after
    after.backward()
    assert loss.log_scale is not None and loss.log_scale.grad is not None
    assert loss.log_scale.grad != 0  # at the limit, it may still fall


@pytest.mark.parametrize("shared", [True, False])
def test_an_image_whose_negatives_all_match_it_does_not_count(shared):
    v, w = torch.randn(2, 8), torch.randn(2, 8)
    loss = one_way(0.1, in_batch=False)
    if shared:
        further, ids = torch.randn(1, 8), [0]
        second = further[None]
    else:
        further, ids = torch.randn(2, 1, 8), [[0], [7]]
        second = further[1:]
    found = loss(v, w, negatives=further, negative_ids=ids)
    torch.testing.assert_close(found, loss(v[1:], w[1:], negatives=second))
    loss.reduction = "none"
    assert loss(v, w, negatives=further, negative_ids=ids)[0] == 0


def test_negatives_alone_multiply_nothing_else():
    """Without the batch's texts, nothing of its size (N, M) is computed."""
    n, k, d = 256, 2, 16
    v, w, z = (torch.randn(n, *size, d) for size in ((), (), (k,)))
    loss = one_way(0.1, in_batch=False)
    from support.versions import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss(v, w, negatives=z)
    assert counter.get_total_flops() <= 2 * n * (k + 1) * d


@pytest.mark.parametrize("engine", ENGINES)
def test_options_that_are_left_out_cost_nothing(engine):
    """A plain InfoNCE launches what its function does."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    v, w = (torch.randn(32, 16, requires_grad=True) for _ in range(2))
    loss = InfoNCELoss(engine=engine)
    loss(v, w)  # which looks at the first batch
    with Counter() as of_class:
        torch.autograd.grad(loss(v, w), (v, w))
    with Counter() as of_function:
        value = itrloss.functional.info_nce_loss(Similarity(v, w, engine=engine))
        torch.autograd.grad(value, (v, w))
    assert of_class.count == of_function.count


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_of_the_positive_is_no_negative_with_a_margin_of_zero(engine: Any, dtype: Any):
    """Whatever the rounding of two products of the same vectors."""
    loss = InfoNCELoss(0.05, margin=0.0, directions="image-text", engine=engine)
    guided = InfoNCELoss(0.05, margin=0.0, engine=engine)
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        image = torch.randn(1, 64, generator=draw, dtype=dtype)
        text = torch.randn(1, 64, generator=draw, dtype=dtype)
        assert loss(image, text.repeat(2, 1), [0], [0, 1]) == 0
        images, texts = (x.repeat(2, 1) for x in (image, text))
        guide = torch.randn(2, 2, 48, generator=draw, dtype=dtype)[:, :1].repeat(1, 2, 1)
        assert guided(images, texts, guide=tuple(guide)) == 0
