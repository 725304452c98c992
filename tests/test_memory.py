"""The coupled memory, and what is asked of the similarities to its entries.

`losses/test_memory_losses.py` has the losses, `losses/test_modules.py` copies and states.
"""

from __future__ import annotations

import collections
import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import finite, sample
from support.memories import D, filled, memory_batch
from support.versions import default_device, needs
from torch import nn

import itrloss
from itrloss import CoupledMemory
from itrloss.engine.terms import softplus
from itrloss.memory import MemorySimilarity

ENGINES = ("dense", "tiled")

# ------------------------------------------------------------------------------------------ entries


@given(
    size=st.integers(1, 9),
    batches=st.lists(st.integers(1, 21), max_size=8),
    with_ids=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_a_memory_is_a_queue(size, batches, with_ids):
    memory = CoupledMemory(size, 2)
    queue = collections.deque(maxlen=size)
    number = 0
    for batch in batches:
        labels = torch.arange(number, number + batch)
        keys = torch.stack([labels + 1.0, torch.ones(batch)], 1)  # distinct directions
        memory.enqueue(keys, -3 * keys, labels if with_ids else None)
        queue.extend(zip(labels.tolist(), nn.functional.normalize(keys), strict=True))
        number += batch
        assert len(memory) == len(queue)
        assert int(memory.enqueued) == number
        oldest_first = (number - len(queue) + torch.arange(len(queue))) % size
        wanted = torch.stack([key for _, key in queue])
        torch.testing.assert_close(memory.images[oldest_first], wanted)
        torch.testing.assert_close(memory.texts[oldest_first], -wanted)
        if with_ids:
            assert memory.ids[oldest_first].tolist() == [label for label, _ in queue]
        unfilled = len(memory) < size  # these entries share one id
        assert len(memory.ids.unique()) == len(memory) + unfilled


def test_an_empty_memory_is_true():
    assert CoupledMemory(3, 2)


def test_a_memory_may_start_with_random_entries():
    """Public code does: they are negatives of every anchor, until batches replace them."""
    memory = CoupledMemory(16, 4)
    memory.enqueue(*torch.rand(2, 16, 4), -1 - torch.arange(16))
    assert len(memory) == 16
    torch.testing.assert_close(memory.texts.norm(dim=1), torch.ones(16))
    v, w, ids = torch.randn(3, 4), torch.randn(3, 4), torch.arange(3)
    anchors = MemorySimilarity.of(v, w, v, w, memory, ids, ids).memory
    assert anchors.negative_counts.tolist() == [16] * 6
    memory.enqueue(-torch.ones(1, 4), torch.ones(1, 4), torch.tensor([3]))
    assert len(memory) == 16
    assert memory.ids[0] == 3
    assert (memory.images[0] < 0).all()


IMAGES = sample(5, D)
TEXTS = sample(5, D, seed=1)


def test_a_memory_may_get_no_keys():
    memory = CoupledMemory(9, D)
    memory.enqueue(IMAGES[:4], TEXTS[:4], range(4))
    memory.enqueue(IMAGES[:0], TEXTS[:0], [])
    memory.enqueue(IMAGES[4:], TEXTS[4:], [7])
    assert len(memory) == 5


def to_entries(memory, ids):
    """The anchors of a memory, of the images and texts with these ids."""
    return MemorySimilarity.of(IMAGES, TEXTS, IMAGES, TEXTS, memory, ids, ids).memory


NUMBERS = [3, 1, 4, 1, 5]
NAMES = [f"{number}" for number in NUMBERS]


@pytest.mark.parametrize(("held", "asked"), [(NUMBERS, NAMES), (NAMES, NUMBERS)])
def test_names_beside_numbers_of_a_memory_are_refused(held, asked):
    """They would be negatives of what they match."""
    memory = CoupledMemory(9, D)
    memory.enqueue(IMAGES, TEXTS, held)
    kinds = ("integers", "strings") if held is NUMBERS else ("strings", "integers")
    expected = "expected {}, as the ids of the memory's entries, got {}".format(*kinds)
    with pytest.raises(TypeError, match=f"ids: {expected}"):
        memory.enqueue(IMAGES, TEXTS, asked)
    with pytest.raises(TypeError, match=f"ids: {expected}"):
        memory.first_dimensions(3).enqueue(IMAGES[:, :3], TEXTS[:, :3], np.array(asked))
    with pytest.raises(TypeError, match=f"image_ids: {expected}"):
        to_entries(memory, asked)
    memory.enqueue(IMAGES[:0], TEXTS[:0], [])
    assert to_entries(memory, held).negative_counts.tolist() == [4, 3, 4, 3, 4] * 2


def test_a_memory_that_was_emptied_or_loaded_takes_names_or_numbers():
    memory = CoupledMemory(9, D)
    memory.enqueue(IMAGES, TEXTS, NAMES)
    loaded = CoupledMemory(9, D)
    loaded.enqueue(IMAGES, TEXTS, NUMBERS)
    loaded.load_state_dict(memory.state_dict())
    assert to_entries(loaded, NAMES).negative_counts.tolist() == [4, 3, 4, 3, 4] * 2
    memory.reset_parameters()
    memory.enqueue(IMAGES, TEXTS, NUMBERS)
    assert len(memory) == 5


def test_a_memory_shows_what_it_holds():
    memory = filled(4, torch.float32)
    assert repr(memory) == "CoupledMemory(size=7, dim=6, valid=4, dtype=torch.float32)"


@pytest.mark.parametrize("option", ["size", "dim"])
def test_a_memory_keeps_its_size(option):
    with pytest.raises(AttributeError, match=f"{option}: cannot be changed"):
        setattr(CoupledMemory(4, 3), option, 9)


KEYS = torch.ones(3, D)


# ------------------------------------------------------------------------------- states and devices


def test_a_memory_that_was_moved_and_loaded_is_counted_again():
    """Moving replaces the buffers, whose versions start again and may equal the old ones."""
    small, large = filled(2, size=8), filled(5, size=8)
    small._apply(torch.clone)  # as Module.to() does
    small.load_state_dict(large.state_dict())
    assert len(small) == 5


def test_a_memory_moves_with_its_module():
    memory = filled(4, torch.float32)
    nn.ModuleDict({"memory": memory}).to(torch.bfloat16)
    assert memory.images.dtype == torch.bfloat16
    assert memory.ids.dtype == torch.int64
    memory.enqueue(torch.ones(2, D), torch.ones(2, D))
    assert len(memory) == 6


def test_a_state_that_does_not_fit_changes_nothing():
    memory = CoupledMemory(10, D)
    with pytest.raises(RuntimeError, match=r"images: expected shape \(10, 6\), got \(5, 6\)"):
        memory.load_state_dict(filled(4, torch.float32, size=5).state_dict())
    assert len(memory) == 0
    assert memory.enqueued == 0


def test_a_state_of_tensors_alone_is_enough():
    memory = CoupledMemory(10, D)
    memory.enqueue(KEYS, KEYS, torch.arange(3))
    state = filled(4, torch.float32, size=10).state_dict()
    tensors = {name: x for name, x in state.items() if torch.is_tensor(x)}
    memory.load_state_dict(tensors, strict=False)
    assert len(memory) == 4


def test_a_memory_that_was_made_on_no_device_is_loaded():
    with default_device("meta"):
        memory = CoupledMemory(4, D)
    assert memory.images.is_meta
    assert memory.ids.is_meta
    assert "valid=on meta" in repr(memory)
    memory = memory.to_empty(device="cpu")
    memory.load_state_dict(filled(2, torch.float32, size=4).state_dict())
    assert len(memory) == 2


def test_keys_that_cannot_be_stored_leave_a_memory_new(monkeypatch):
    """As where an accelerator has no memory left."""

    def normalized(x):
        raise MemoryError

    memory = CoupledMemory(8, D)
    with monkeypatch.context() as patch:
        patch.setattr(itrloss.memory, "normalized", normalized)
        with pytest.raises(MemoryError):
            memory.enqueue(IMAGES, TEXTS, torch.arange(5))
    assert memory.is_new
    memory.enqueue(IMAGES, TEXTS)
    assert len(memory) == 5


def test_a_memory_may_be_made_in_inference_mode():
    with torch.inference_mode():
        memory = CoupledMemory(8, D)
    memory.enqueue(IMAGES, TEXTS)
    images = sample(5, D, seed=2).requires_grad_()
    loss = itrloss.MemoryDiversityContrastiveLoss()
    loss(images, TEXTS, IMAGES, TEXTS, memory).backward()
    assert len(memory) == 5
    assert images.grad.any()


@needs("to enqueue before the backward pass", 2, 1)
def test_a_batch_may_be_enqueued_in_inference_mode_before_the_backward_pass():
    memory = CoupledMemory(8, D)
    loss = itrloss.MemoryInfoNCELoss()
    for _ in range(3):
        images = sample(5, D, seed=2).requires_grad_()
        value = loss(images, TEXTS, IMAGES, TEXTS, memory)
        with torch.inference_mode():
            memory.enqueue(IMAGES, TEXTS)
        value.backward()
        assert images.grad.any()
    memory.load_state_dict(memory.state_dict())
    assert len(memory) == 8


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("entries", [0, 12])
def test_a_memory_that_was_loaded_and_copied_unasked_holds_what_was_loaded(entries, way):
    """How many entries exist is looked up at the first question, which may be after a copy."""
    source = filled(entries, torch.float32, size=16)
    loaded = filled(4, torch.float32, size=16)
    loaded.load_state_dict(source.state_dict())
    copied = COPIES[way](loaded)
    assert len(copied) == int(copied.enqueued) == entries
    loss = itrloss.MemoryDiversityContrastiveLoss()
    keys = [sample(4, D, seed=seed) for seed in range(4)]
    assert torch.equal(loss(*keys, copied), loss(*keys, source))
    loaded_later = COPIES[way](filled(4, torch.float32, size=16))
    loaded_later.load_state_dict(source.state_dict())
    assert len(loaded_later) == entries


# ---------------------------------------------------------------------- similarities to the entries


def asked(engine, shape="wide"):
    """Return the embeddings, and the anchors of a memory."""
    batch = memory_batch(shape)
    return batch.inputs, MemorySimilarity.of(*batch, engine=engine).memory


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_memory_answers(engine):
    _, anchors = asked(engine, "empty")
    hardest = anchors.hardest_negatives()
    assert hardest.values.tolist() == [-torch.inf] * 12
    assert hardest.indices.tolist() == [-1] * 12
    assert anchors.logsumexp(3.0).tolist() == [-torch.inf] * 12
    assert anchors.negative_counts.tolist() == [0] * 12


def gradient_of_scale(anchors):
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    shift = scale.reshape(1)
    value = anchors.logsumexp(scale) + anchors.sum(softplus, scale=shift, shift=-shift)
    total = finite(value).sum() + finite(anchors.logsumexp(5.0)).sum()
    return torch.autograd.grad(total, scale)[0]


def test_detached_anchors_serve_parameters_that_learn():
    dense = gradient_of_scale(asked("dense")[1].detach())
    tiled = gradient_of_scale(asked("tiled")[1].detach())
    torch.testing.assert_close(tiled, dense)
    torch.testing.assert_close(dense, gradient_of_scale(asked("dense")[1]))


def test_a_memory_pooled_with_itself_has_each_entry_twice():
    memory = asked("auto")[1]
    twice = itrloss.Anchors.pooled(memory, memory).logsumexp(2.0)
    torch.testing.assert_close(twice, memory.logsumexp(2.0) + np.log(2))


def test_ids_that_are_the_memorys_by_chance_give_no_other_numbers():
    images, texts, keys, entries = [sample(3, D, seed=k, dtype=torch.float64) for k in range(4)]
    memory = CoupledMemory(6, D, dtype=torch.float64)
    memory.enqueue(torch.cat([keys, entries]), torch.cat([entries, keys]), torch.arange(6))
    ids = torch.arange(3), torch.arange(3, 6)
    own = [
        MemorySimilarity.of(images, texts, keys, keys, memory, *ids, engine=engine).memory
        for engine in ("auto", "tiled")
    ]
    torch.testing.assert_close(own[0].mean_std(), own[1].mean_std())


def test_positives_close_to_one_cost_the_moments_no_digits():
    row = nn.functional.normalize(sample(1, 64, dtype=torch.float64))
    apart = sample(40, 64, seed=1, dtype=torch.float64)
    apart = nn.functional.normalize(apart - 0.99 * (apart @ row.T) * row)
    images = torch.cat([row.expand(20, 64), apart])
    texts = row.expand(60, 64)
    ids = torch.tensor([0])

    def deviation(engine, dtype):
        memory = CoupledMemory(60, 64, dtype=dtype)
        memory.enqueue(images.to(dtype), texts.to(dtype), torch.arange(60) // 20)
        x = row.to(dtype)
        sims = MemorySimilarity.of(x, x, x, x, memory, ids, ids, engine=engine)
        return sims.memory.mean_std().std[1].double()

    exact = deviation("dense", torch.float64)
    for engine in ENGINES:
        found = deviation(engine, torch.float32)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)
