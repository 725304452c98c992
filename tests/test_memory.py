"""The coupled memory, momentum encoders, and the losses over them."""

from __future__ import annotations

import collections
import copy
import functools
import math
import pickle

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import embeddings, finite, make_ids, pairwise, sample
from support.losses_registry import where
from torch import nn
from torch.autograd import gradcheck

import itrloss
from itrloss import CoupledMemory, MomentumEncoder
from itrloss.engine import inputs as engine_inputs
from itrloss.engine import moments
from itrloss.engine.terms import identity, log1p_clamp, log1p_relu, softplus
from itrloss.memory import MemorySimilarity

ENGINES = ("dense", "tiled")
LOSSES = where(lambda entry: entry.takes == "memory")
D = 6
# images, texts, entries, kind of ids
SHAPES = {
    "pairs": (7, 7, 12, None),
    "ids": (7, 7, 12, "random"),
    "captions": (4, 12, 30, "captions"),
    "wide": (5, 11, 9, "random"),
    "one pair": (1, 1, 5, None),
    "one entry": (6, 6, 1, "random"),
    "empty": (6, 6, 0, None),
    "all the same": (4, 4, 6, "same"),
    "nothing in common": (5, 6, 8, "disjoint"),
}


def filled(n, dtype=torch.float64, ids=None, size=None, d=D, seed=5):
    """Memory of n entries with some unused capacity, from batches whose size does not divide n."""
    memory = CoupledMemory(size or n + 3, d, dtype=dtype)
    v, w = embeddings(max(n, 1), max(n, 1), d, seed)
    for start in range(0, n, 4):
        part = slice(start, min(n, start + 4))
        memory.enqueue(v[part], w[part], None if ids is None else ids[part])
    return memory


def case(shape, dtype=torch.float64):
    """Embeddings, keys, memory and ids."""
    n, m, entries, kind = SHAPES[shape]
    ids = make_ids(kind, n, m)
    memory_ids = (
        None
        if kind is None
        else make_ids("random" if kind != "same" else "same", entries or 1, 1, 7)[0]
    )
    memory = filled(entries, dtype, memory_ids)
    v, w = (x.to(dtype).requires_grad_() for x in embeddings(n, m, D))
    keys = tuple(x.to(dtype) for x in embeddings(n, m, D, seed=9))
    return (v, w), keys, memory, ids


def expected(name, inputs, keys, memory, ids, **extra):
    n, m = len(inputs[0]), len(inputs[1])
    ids = (torch.arange(n), torch.arange(m)) if ids[0] is None else ids
    count = len(memory)
    arrays = [
        x.detach().double().numpy()
        for x in (*inputs, *keys, memory.images[:count], memory.texts[:count])
    ]
    numbers = [x.numpy() for x in (*ids, memory.ids[:count])]
    return LOSSES[name].expected(*arrays, *numbers, **extra)


def make(name, **extra):
    return LOSSES[name].make(**extra)


@pytest.mark.parametrize(
    ("name", "shape", "engine"), pairwise(name=LOSSES, shape=SHAPES, engine=ENGINES)
)
def test_losses_equal_the_loop_oracle(name, shape, engine, small_tiles, poisoned):
    inputs, keys, memory, ids = case(shape)
    for reduction in ("mean", "sum", "none"):
        got = make(name, engine=engine, reduction=reduction)(*inputs, *keys, memory, *ids)
        wanted = expected(name, inputs, keys, memory, ids, reduction=reduction)
        for a, b in zip(*((x,) if reduction != "none" else x for x in (got, wanted)), strict=True):
            # log(1 + S) near S = -1
            np.testing.assert_allclose(a.detach().numpy(), b, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("name", "shape"), pairwise(name=LOSSES, shape=SHAPES))
def test_gradients_of_tiles_are_those_of_plain_pytorch(name, shape, small_tiles, poisoned):
    inputs, keys, memory, ids = case(shape)
    found = []
    for engine in ENGINES:
        rows, cols = make(name, engine=engine, reduction="none")(*inputs, *keys, memory, *ids)
        total = (rows * torch.linspace(-1, 2, len(rows))).sum() + (
            cols * torch.linspace(3, 1, len(cols))
        ).sum()
        found.append(torch.autograd.grad(total, inputs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mdcl through diversity", "wide"),
        ("mdcl through entropy", "ids"),
        ("mdcl implicit", "empty"),
        ("uto mild", "wide"),
    ],
)
def test_gradcheck(name, shape):
    module = make(name, engine="dense")
    module.reduction = "none"
    inputs, keys, memory, ids = case(shape)
    assert gradcheck(lambda v, w: module(v, w, *keys, memory, *ids), inputs, fast_mode=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name", ["albef", "moco", "mdcl", "mdcl, diversity in batch", "uto queues"]
)
def test_directions_are_the_parts_of_both(name, engine, small_tiles):
    inputs, keys, memory, ids = case("ids")
    both = make(name, engine=engine, reduction="none")(*inputs, *keys, memory, *ids)
    for direction, wanted in zip(("image-text", "text-image"), both, strict=True):
        loss = make(name, engine=engine, reduction="none", directions=direction)
        got = loss(*inputs, *keys, memory, *ids)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        options = {"retain_graph": True, "materialize_grads": True}  # not all of them need both
        gradients = torch.autograd.grad(got.sum(), inputs, **options)
        of_both = torch.autograd.grad(wanted.sum(), inputs, **options)
        for a, b in zip(gradients, of_both, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_distillation_is_that_of_albef():
    """Their formula: soft targets over the batch's keys and the queue, one-hot for its own key."""
    (v, w), (v_keys, w_keys), memory, _ = case("pairs")
    alpha, temperature = 0.4, 0.1
    loss = itrloss.MemoryInfoNCELoss(temperature, distillation=alpha)
    ours = loss(v, w, v_keys, w_keys, memory)
    theirs = torch.zeros((), dtype=torch.float64)
    for own, own_keys, keys, queue in (
        (v, v_keys, w_keys, memory.texts),
        (w, w_keys, v_keys, memory.images),
    ):
        candidates = torch.cat([F.normalize(keys), queue[: len(memory)]])
        logits = F.normalize(own) @ candidates.T / temperature
        taught = (F.normalize(own_keys) @ candidates.T / temperature).softmax(1)
        targets = alpha * taught + (1 - alpha) * torch.eye(*taught.shape, dtype=taught.dtype)
        theirs = theirs - (logits.log_softmax(1) * targets).sum(1).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for a, b in zip(*[torch.autograd.grad(x, (v, w)) for x in (ours, theirs)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_learnt_temperature_of_a_memory_has_its_gradient_and_its_clamp():
    (v, w), keys, memory, _ = case("pairs")
    loss = itrloss.MemoryInfoNCELoss(0.2, learnable=True, distillation=0.3, max_scale=20.0).double()
    loss(v, w, *keys, memory).backward()
    step = 1e-6
    with torch.no_grad():
        ahead = [
            itrloss.MemoryInfoNCELoss(0.2 * math.exp(-x), distillation=0.0)(v, w, *keys, memory)
            for x in (step, -step)
        ]
    contrast = itrloss.MemoryInfoNCELoss(0.2, learnable=True).double()
    contrast(v, w, *keys, memory).backward()
    slope = float(ahead[0] - ahead[1]) / (2 * step)
    assert contrast.log_scale.grad.item() == pytest.approx(slope, rel=1e-6)
    assert loss.log_scale.grad.item() != pytest.approx(slope, rel=1e-3)  # it distils, too
    with torch.no_grad():
        loss.log_scale.fill_(9.0)
    loss(v, w, *keys, memory)
    assert loss.log_scale.item() == pytest.approx(math.log(20.0))


def test_distillation_needs_the_batch():
    inputs, keys, memory, _ = case("pairs")
    loss = itrloss.MemoryInfoNCELoss(batch_negatives=False, distillation=0.4)
    with pytest.raises(ValueError, match="distillation: expected 0 beside batch_negatives=False"):
        loss(*inputs, *keys, memory)
    with pytest.raises(ValueError, match=r"distillation: expected .*1\.5"):
        itrloss.MemoryInfoNCELoss(distillation=1.5)


@pytest.mark.parametrize("name", LOSSES)
def test_keys_and_memory_get_no_gradient(name):
    inputs, keys, memory, ids = case("ids")
    keys = [x.requires_grad_() for x in keys]
    before = memory.texts.clone()
    make(name)(*inputs, *keys, memory, *ids).backward()
    assert all(x.grad is None for x in keys) and not memory.texts.requires_grad
    assert all(x.grad.abs().sum() > 0 for x in inputs)
    assert torch.equal(memory.texts, before)


@pytest.mark.parametrize("library", ["by_blas", "by_onednn"])
def test_no_product_for_the_gradient_of_the_memory(library, request, monkeypatch):
    from support.flops import Products

    request.getfixturevalue(library)
    inputs, keys, memory, ids = case("pairs", torch.float32)
    n, size = len(inputs[0]), memory.size
    # The tiled engine forms the scores for each answer, and once more for the gradient. Keys are
    # only multiplied with the embeddings of their pairs. Moments by D x D numbers save a product of
    # each matrix.
    numbers = 2 * (n + size) * D + 2 * (n + n) * D
    for engine, by_numbers, wanted in (
        ("dense", False, 2 * 2 * n * size + n * n),
        ("tiled", False, 2 * 4 * n * size + n * n),
        ("tiled", True, 2 * 3 * n * size + numbers),
    ):
        monkeypatch.setattr(moments, "has_gain", lambda *_, way=by_numbers: way)
        with Products() as products:
            make("mdcl", engine=engine)(*inputs, *keys, memory, *ids).backward()
        assert products.flops == 2 * D * wanted


def test_entries_with_the_anchors_id_are_no_negatives():
    v, w = embeddings(3, 3)
    memory = CoupledMemory(8, D, dtype=torch.float64)
    memory.enqueue(v, w, torch.tensor([0, 1, 2]))  # the batch itself, from a previous epoch
    ids = torch.tensor([0, 1, 5])
    rows, _ = itrloss.UnifiedTrainingObjective(5.0, batch_weight=0.0, reduction="none")(
        v, w, v, w, memory, ids, ids
    )
    memory.enqueue(v[:1], w[:1], torch.tensor([0]))
    again, _ = itrloss.UnifiedTrainingObjective(5.0, batch_weight=0.0, reduction="none")(
        v, w, v, w, memory, ids, ids
    )
    assert torch.equal(rows[0], again[0]) and (rows[1:] != again[1:]).all()


def test_nan_is_not_taken_for_an_anchor_without_negatives():
    inputs, keys, memory, ids = case("ids")
    broken = inputs[0].detach().clone()
    broken[2] = torch.nan
    for name in LOSSES:
        assert make(name)(broken, inputs[1], *keys, memory, *ids).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Scores of half-precision keys and embeddings are computed in float32."""
    inputs, keys, memory, ids = case("ids")
    halved = copy.deepcopy(memory).to(dtype)
    small = [x.detach().to(dtype).requires_grad_() for x in inputs]
    for name in LOSSES:
        value = make(name)(*small, *(k.to(dtype) for k in keys), halved, *ids)
        assert value.dtype == torch.float32
        torch.testing.assert_close(
            value.double(), make(name)(*inputs, *keys, memory, *ids), rtol=0.05, atol=0.02
        )
        assert all(
            g.dtype == dtype and g.isfinite().all() for g in torch.autograd.grad(value, small)
        )


def drawn(seed, n, entries, labels):
    """Embeddings, keys, entries and ids of a batch."""
    g = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(size, D, generator=g, dtype=torch.float64)
        for size in (n, n, n, n, entries, entries)
    ]
    ids = [torch.randint(0, labels, (size,), generator=g) for size in (n, entries)]
    return rows, ids


def value(name, rows, ids, **extra):
    memory = CoupledMemory(len(rows[4]), D, dtype=torch.float64)
    memory.enqueue(rows[4], rows[5], ids[1])
    return make(name, **extra)(*rows[:4], memory, ids[0], ids[0])


BATCHES = {
    "seed": st.integers(0, 10**6),
    "n": st.integers(1, 7),
    "entries": st.integers(1, 12),
    "labels": st.integers(1, 20),
    "name": st.sampled_from(sorted(LOSSES)),
}


@given(**BATCHES)
@settings(deadline=None, max_examples=50)
def test_order_and_length_change_nothing(seed, n, entries, labels, name):
    rows, ids = drawn(seed, n, entries, labels)
    g = torch.Generator().manual_seed(seed)
    batch, memory = torch.randperm(n, generator=g), torch.randperm(entries, generator=g)
    other = [x[batch if i < 4 else memory] * (i + 0.5) for i, x in enumerate(rows)]
    shuffled = value(name, other, [ids[0][batch], ids[1][memory]])
    torch.testing.assert_close(shuffled, value(name, rows, ids), rtol=1e-7, atol=1e-10)


# without the asymmetric loss
@given(**BATCHES | {"name": st.sampled_from(sorted(LOSSES.keys() - {"uto queues"}))})
@settings(deadline=None, max_examples=40)
def test_swapping_the_modalities_changes_nothing(seed, n, entries, labels, name):
    rows, ids = drawn(seed, n, entries, labels)
    swapped = [rows[i] for i in (1, 0, 3, 2, 5, 4)]
    torch.testing.assert_close(
        value(name, swapped, ids), value(name, rows, ids), rtol=1e-7, atol=1e-10
    )


@given(**BATCHES | {"name": st.sampled_from([x for x in LOSSES if "margin" in make(x).shown])})
@settings(deadline=None, max_examples=50)
def test_more_entries_and_a_smaller_margin_never_lower_an_anchor(seed, n, entries, labels, name):
    rows, ids = drawn(seed, n, entries, labels)
    whole = value(name, rows, ids, reduction="none")
    stricter = make(name, margin=-0.2, reduction="none")
    memory = CoupledMemory(entries, D, dtype=torch.float64)
    memory.enqueue(rows[4], rows[5], ids[1])
    for a, b in zip(stricter(*rows[:4], memory, ids[0], ids[0]), whole, strict=True):
        assert (a >= b - 1e-12).all()
    # diversities change with the entries
    if entries > 1 and getattr(stricter, "diversity", None) is None:
        part = value(
            name, [*rows[:4], rows[4][1:], rows[5][1:]], [ids[0], ids[1][1:]], reduction="none"
        )
        for a, b, own in zip(whole, part, (ids[0], ids[0]), strict=True):
            had_negatives = (own[:, None] != ids[1][1:]).any(1)
            assert (a >= b - 1e-12)[had_negatives].all()


# --------------------------------------------------------------------------------------- the memory


@given(
    size=st.integers(1, 9),
    batches=st.lists(st.integers(1, 21), max_size=8),
    with_ids=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_the_memory_is_a_queue(size, batches, with_ids):
    memory, model = CoupledMemory(size, 2), collections.deque(maxlen=size)
    number = 0
    for batch in batches:
        labels = torch.arange(number, number + batch)
        keys = torch.stack([labels + 1.0, torch.ones(batch)], 1)  # distinct directions
        memory.enqueue(keys, -3 * keys, labels if with_ids else None)
        model.extend(
            zip(labels.tolist(), torch.nn.functional.normalize(keys).tolist(), strict=True)
        )
        number += batch
        assert len(memory) == len(model) and int(memory.enqueued) == number
        order = (number - len(model) + torch.arange(len(model))) % size  # oldest first
        np.testing.assert_allclose(memory.images[order], [key for _, key in model], rtol=1e-6)
        np.testing.assert_allclose(
            memory.texts[order], [[-a, -b] for _, (a, b) in model], rtol=1e-6
        )
        if with_ids:
            assert memory.ids[order].tolist() == [label for label, _ in model]
        # unfilled entries share one id
        assert len(memory.ids.unique()) == len(memory) + (len(memory) < size)
    assert memory


def test_unfilled_entries_do_not_count():
    inputs, keys, memory, ids = case("ids")
    roomy = filled(12, ids=make_ids("random", 12, 1, 7)[0], size=500)
    for name in LOSSES:
        for engine in ENGINES:
            a, b = (make(name, engine=engine)(*inputs, *keys, x, *ids) for x in (memory, roomy))
            torch.testing.assert_close(a, b)


def test_a_memory_that_was_moved_and_loaded_is_counted_again():
    """Moving replaces the buffers, whose versions start again and may equal the old ones."""
    small, large = CoupledMemory(8, 4), CoupledMemory(8, 4)
    small.enqueue(torch.ones(2, 4), torch.ones(2, 4))
    large.enqueue(torch.ones(5, 4), torch.ones(5, 4))
    small._apply(torch.clone)  # as Module.to() does
    small.load_state_dict(large.state_dict())
    assert len(small) == 5


def test_a_memory_may_start_with_random_entries():
    """Public code starts with random entries: negatives of every anchor, until batches replace
    them.
    """
    memory = CoupledMemory(16, 4)
    memory.enqueue(*torch.rand(2, 16, 4), -1 - torch.arange(16))
    assert len(memory) == 16 and (memory.images >= 0).all()
    torch.testing.assert_close(memory.texts.norm(dim=1), torch.ones(16))
    v, w, ids = torch.randn(3, 4), torch.randn(3, 4), torch.arange(3)
    anchors = MemorySimilarity.of(v, w, v, w, memory, ids, ids).memory
    assert anchors.negative_counts.tolist() == [16] * 6
    first = memory.images[0].clone()
    memory.enqueue(-torch.ones(1, 4), torch.ones(1, 4), torch.tensor([3]))
    assert len(memory) == 16 and memory.ids[0] == 3 and not torch.equal(memory.images[0], first)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_backward_pass_after_its_entries_were_overwritten_is_refused(engine):
    """Backward reads the memory again, on each engine."""
    inputs, keys, memory, ids = case("ids")
    loss = make("mdcl", engine=engine)
    value = loss(*inputs, *keys, memory, *ids)
    memory.enqueue(*(k[:5] for k in keys), ids[0][:5])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_nothing_of_the_size_of_the_memory_is_kept_for_backward():
    inputs, keys, memory, ids = case("ids")
    inputs = [x.float().detach().requires_grad_() for x in inputs]
    saved = {}

    def note(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    entries = torch.randn(2, 5000, memory.dim)
    large = CoupledMemory(5000, memory.dim)
    large.enqueue(*entries, torch.arange(5000) + 1000)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        make("mdcl", engine="tiled")(*inputs, *(k.float() for k in keys), large, *ids)
    for x in (large.images, large.texts, large.ids):  # the memory itself
        saved.pop(x.untyped_storage().data_ptr(), None)
    assert max(saved.values()) < 5000 * 4


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict", "file"])
def test_a_restored_memory_goes_on_bit_for_bit(way, tmp_path):
    memory = filled(7, torch.float32, size=5)
    if way == "deepcopy":
        other = copy.deepcopy(memory)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(memory))
    else:
        other = CoupledMemory(5, D)
        state = memory.state_dict()
        if way == "file":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        other.load_state_dict(state)
    for x in (memory, other):
        x.enqueue(*(k.float() for k in embeddings(3, 3)))
    assert len(other) == len(memory) == 5
    for name, value in memory.state_dict().items():
        if torch.is_tensor(value):
            assert torch.equal(other.state_dict()[name], value), name
    with pytest.raises(ValueError, match="ids: expected None, as the memory has no ids"):
        other.enqueue(torch.ones(1, D), torch.ones(1, D), torch.tensor([1]))


def test_the_memory_shows_what_it_holds():
    assert (
        repr(filled(4, torch.float32))
        == "CoupledMemory(size=7, dim=6, valid=4, dtype=torch.float32)"
    )


KEYS = torch.ones(3, D)
WRONG = {
    "size": (lambda: CoupledMemory(0, 4), ValueError, "size"),
    "size type": (lambda: CoupledMemory(2.5, 4), TypeError, "size"),  # type: ignore[arg-type]
    "dtype": (lambda: CoupledMemory(2, 4, dtype=torch.int64), TypeError, "dtype"),
    "dim": (
        lambda: CoupledMemory(2, 4).enqueue(KEYS, KEYS),
        ValueError,
        r"image_keys: expected shape \(3, 4\)",
    ),
    "texts": (
        lambda: CoupledMemory(2, D).enqueue(KEYS, KEYS[:2]),
        ValueError,
        r"text_keys: expected shape \(3, 6\)",
    ),
    "int keys": (lambda: CoupledMemory(2, D).enqueue(KEYS, KEYS.long()), TypeError, "text_keys"),
    "ids": (
        lambda: CoupledMemory(2, D).enqueue(KEYS, KEYS, torch.arange(2)),
        ValueError,
        r"ids: expected shape \(3,\)",
    ),
    "float ids": (lambda: CoupledMemory(2, D).enqueue(KEYS, KEYS, torch.ones(3)), TypeError, "ids"),
    "memory": (
        lambda: make("uto")(KEYS, KEYS, KEYS, KEYS, KEYS),
        TypeError,
        "memory: expected a CoupledMemory",
    ),
    "keys": (
        lambda: make("uto")(KEYS, KEYS, KEYS[:2], KEYS, filled(2)),
        ValueError,
        "image_keys.* like images",
    ),
    "memory dim": (
        lambda: make("uto")(*[KEYS[:, :4]] * 4, filled(2)),
        ValueError,
        "memory: expected embeddings of dimension 4",
    ),
    "memory dtype": (
        lambda: make("uto")(*[KEYS] * 4, filled(2)),
        TypeError,
        "memory: expected float64 beside float64 images",
    ),
    "ids or none": (
        lambda: make("uto")(
            *[KEYS] * 4, filled(2, torch.float32), torch.arange(3), torch.arange(3)
        ),
        ValueError,
        "image_ids, text_ids: expected None",
    ),
    "none or ids": (
        lambda: make("uto")(*[KEYS] * 4, filled(2, torch.float32, torch.arange(2))),
        ValueError,
        "image_ids, text_ids: expected ids",
    ),
    "text ids": (
        lambda: make("uto")(
            *[KEYS] * 4, filled(2, torch.float32, torch.arange(2)), torch.arange(3), torch.arange(2)
        ),
        ValueError,
        "text_ids: expected shape",
    ),
    "diversity_from": (
        lambda: itrloss.MemoryDiversityContrastiveLoss(diversity_from="memory"),
        ValueError,
        "diversity_from",
    ),
    "positive_from": (
        lambda: itrloss.MemoryDiversityContrastiveLoss(positive_from="keys"),
        ValueError,
        "positive_from",
    ),  # type: ignore[arg-type]
    "momentum": (lambda: MomentumEncoder(nn.Linear(2, 2), 1.5), ValueError, "momentum"),
    "buffers": (lambda: MomentumEncoder(nn.Linear(2, 2), buffers="keep"), ValueError, "buffers"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


# -------------------------------------------------------------------------------- momentum encoders


def test_momentum_encoder_averages_parameters():
    encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for buffers in ("copy", "average"):
        keys = MomentumEncoder(encoder, 0.9, buffers=buffers)
        wanted = [p.detach().clone() for p in encoder.parameters()]
        mean = encoder[1].running_mean.clone()
        for _ in range(3):
            with torch.no_grad():
                for p in encoder.parameters():
                    p.add_(torch.randn_like(p))
            encoder(torch.randn(8, 3))
            keys.update(encoder)
            wanted = [
                0.9 * a + 0.1 * b.detach()
                for a, b in zip(wanted, encoder.parameters(), strict=True)
            ]
            mean = (
                encoder[1].running_mean.clone()
                if buffers == "copy"
                else 0.9 * mean + 0.1 * encoder[1].running_mean
            )
        for a, b in zip(keys.module.parameters(), wanted, strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(keys.module[1].running_mean, mean)
        assert not keys(torch.randn(8, 3)).requires_grad and not any(
            p.requires_grad for p in keys.parameters()
        )


def test_momentum_encoder_averages_complex_buffers():
    encoder = nn.Linear(3, 4)
    encoder.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    keys = MomentumEncoder(encoder, 0.75, buffers="average")
    encoder.phases.fill_(4 + 8j)
    keys.update(encoder)
    assert keys.module.phases.tolist() == [1 + 2j] * 2


@pytest.mark.parametrize("training", [True, False])
def test_momentum_encoder_keeps_its_mode(training):
    keys = MomentumEncoder(nn.Sequential(nn.Linear(3, 4), nn.Dropout()), training=training)
    around = nn.ModuleList([keys])
    for mode in (True, False):
        around.train(mode)
        assert all(m.training == training for m in keys.modules())


def test_momentum_is_checked_whenever_it_is_set():
    encoder = MomentumEncoder(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="momentum: expected a number of at least 0 and at most 1"):
        encoder.momentum = 1.5
    encoder.momentum = 0
    encoder.update(nn.Linear(2, 2))


def test_momentum_encoder_is_stored_and_restored():
    encoder = nn.Linear(3, 4)
    keys = MomentumEncoder(encoder, 0.5)
    encoder.weight.data.zero_()
    copies = [
        copy.deepcopy(keys),
        pickle.loads(pickle.dumps(keys)),
        MomentumEncoder(nn.Linear(3, 4), 0.5),
    ]
    copies[2].load_state_dict(keys.state_dict())
    for x in (keys, *copies):
        x.update(encoder)
        assert torch.equal(x.module.weight, keys.module.weight)


HALVES = [torch.bfloat16, torch.float16]


def moved(keys: MomentumEncoder, encoder: nn.Module, steps: int) -> nn.Module:
    for _ in range(steps):
        keys.update(encoder)
    return keys.module


def far_encoder(keys: MomentumEncoder, dtype: torch.dtype) -> nn.Module:
    """An encoder that is by a half longer than the average, in another dtype maybe."""
    encoder = copy.deepcopy(keys.module).to(dtype)
    with torch.no_grad():
        for p in encoder.parameters():
            p.mul_(1.5)
    return encoder


@pytest.mark.parametrize("own", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("new", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["made", "cast later", "from float32 state"])
def test_a_momentum_encoder_moves_alike_in_all_precisions(own, new, way):
    start = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(torch.float32)
    keys = MomentumEncoder(start if way == "cast later" else copy.deepcopy(start).to(own), 0.999)
    if way == "cast later":
        keys = keys.to(own)
    if way == "from float32 state":
        keys.load_state_dict(MomentumEncoder(start, 0.999).state_dict())
    encoder = far_encoder(keys, new)
    before = [p.detach().double().clone() for p in keys.module.parameters()]
    after = [p.detach().double() for p in moved(keys, encoder, 500).parameters()]
    assert all(p.dtype == own for p in keys.module.parameters())
    eps = max(torch.finfo(own).eps, 1e-5)
    for a, b, p in zip(before, after, encoder.parameters(), strict=True):
        wanted = a + (1 - 0.999**500) * (p.detach().double() - a)
        assert ((b - wanted).abs() <= eps * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_averages_in_half_precision_resume_bit_for_bit(dtype, tmp_path):
    keys = MomentumEncoder(nn.Linear(8, 8).to(dtype), 0.999)
    encoder = far_encoder(keys, dtype)
    moved(keys, encoder, 20)
    torch.save(keys.state_dict(), tmp_path / "keys.pt")
    loaded = MomentumEncoder(nn.Linear(8, 8).to(dtype), 0.999)
    loaded.load_state_dict(torch.load(tmp_path / "keys.pt", weights_only=True))
    others = [loaded, copy.deepcopy(keys), pickle.loads(pickle.dumps(keys))]
    others.append(copy.deepcopy(keys).to(dtype))  # as trainers call it
    wanted = moved(keys, encoder, 200).weight
    assert all(torch.equal(moved(x, encoder, 200).weight, wanted) for x in others)
    full = MomentumEncoder(nn.Linear(8, 8), 0.999)
    full.load_state_dict(keys.state_dict())
    assert torch.equal(full.module.weight, wanted.float()) and not list(full.averages.buffers())


def test_an_average_in_half_precision_begins_where_others_put_it():
    keys = MomentumEncoder(nn.Linear(8, 8).to(torch.bfloat16), 0.999)
    encoder = far_encoder(keys, torch.bfloat16)
    moved(keys, encoder, 10)
    keys.module.load_state_dict(encoder.state_dict())
    assert torch.equal(moved(keys, encoder, 10).weight, encoder.weight)
    assert torch.equal(moved(keys.float(), encoder, 1).weight, encoder.weight.float())


def test_averaged_buffers_in_half_precision_move():
    encoder = nn.BatchNorm1d(4).to(torch.bfloat16)
    keys = MomentumEncoder(encoder, 0.999, buffers="average")
    encoder.running_mean.fill_(1.0)
    found = moved(keys, encoder, 500).running_mean
    torch.testing.assert_close(
        found.double(), torch.full((4,), 1 - 0.999**500).double(), rtol=4e-3, atol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_momentum_encoder_moves_when_it_is_sharded(dtype, tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        keys = MomentumEncoder(nn.Linear(8, 8).to(dtype), 0.999)
        encoder = far_encoder(keys, dtype)
        wanted = moved(copy.deepcopy(keys), encoder, 100).weight
        fully_shard(keys, mesh=mesh)
        fully_shard(encoder, mesh=mesh)
        moved(keys, encoder, 100)
        (found,) = [
            x.full_tensor() for name, x in keys.state_dict().items() if name == "module.weight"
        ]
        assert torch.equal(found, wanted)
    finally:
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------- compilation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "before"), [("mdcl", "auto", 0), ("uto mild", "dense", 1)]
)
def test_compiles_while_the_memory_fills(name, engine, before):
    """Calls are compiled once for a memory that has never had an entry, and once for all others."""
    loss = make(name, engine=engine)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    # Tiles are visited outside of graphs.
    compiled = torch.compile(loss, fullgraph=engine != "tiled", backend=counter)
    memories = [CoupledMemory(10, D) for _ in range(2)]
    for memory in memories if before else []:
        memory.enqueue(
            *(x.float() for x in embeddings(before, before, D, seed=9)), torch.arange(before)
        )
    put = torch.compile(CoupledMemory.enqueue, fullgraph=True, backend=counter)
    for step in range(5):
        v, w = (x.float().requires_grad_() for x in embeddings(4, 4, D, seed=step))
        ids = torch.tensor([0, 1, 2, step % 3])
        values = [
            f(v, w, 2 * v, w + v, memory, ids, ids)
            for f, memory in zip((loss, compiled), memories, strict=True)
        ]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
        for a, b in zip(*(torch.autograd.grad(x, (v, w)) for x in values), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        memories[0].enqueue(v, w, ids)
        put(memories[1], v, w, ids)
        assert len(memories[0]) == len(memories[1])
        torch.testing.assert_close(memories[0].texts, memories[1].texts)
    assert counter.frame_count <= (2 if before else 4)  # not one compilation per fill level


def test_a_kept_matrix_in_pieces_gives_the_same(monkeypatch):
    inputs, keys, memory, ids = case("captions")
    wanted = [make(name)(*inputs, *keys, memory, *ids) for name in LOSSES]
    for tile in ((7, 2), (12, 3), (30, 30)):
        monkeypatch.setitem(engine_inputs.TILE, "cpu", tile)
        for name, value in zip(LOSSES, wanted, strict=True):
            torch.testing.assert_close(make(name)(*inputs, *keys, memory, *ids), value)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_copied_stored_and_moved(name):
    inputs, keys, memory, ids = case("ids")
    loss = make(name)
    wanted = loss(*inputs, *keys, memory, *ids)
    restored = make(name)
    restored.load_state_dict(loss.state_dict())
    for other in (
        copy.deepcopy(loss),
        pickle.loads(pickle.dumps(loss)),
        restored,
        loss.to(torch.float64),
    ):
        assert torch.equal(other(*inputs, *keys, memory, *ids), wanted) and repr(other) == repr(
            loss
        )


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_does_not_touch_the_scores(name):
    inputs, keys, memory, ids = case("ids", torch.float32)
    wanted = make(name)(*inputs, *keys, memory, *ids)
    gradient = torch.autograd.grad(wanted, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        value = make(name)(*inputs, *keys, memory, *ids)
    assert torch.equal(value, wanted)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(value, inputs), gradient, strict=True)
    )


def test_the_memory_moves_with_its_module():
    module = nn.ModuleDict({"memory": filled(4, torch.float32)}).to(torch.bfloat16)
    memory = module["memory"]
    assert (
        memory.images.dtype == torch.bfloat16
        and memory.ids.dtype == torch.int64
        and len(memory) == 4
    )
    memory.enqueue(torch.ones(2, D), torch.ones(2, D))
    assert len(memory) == 6


QUESTIONS = {
    "hardest": lambda s: s.hardest_negatives().values,
    "positives": lambda s: s.sum_of_positives(log1p_clamp),
    "negatives": lambda s: s.sum(log1p_relu),
    "hinge sum": lambda s: s.hinge_sum(0.3),
    "moments": lambda s: s.mean_std().std,
    "entropy": lambda s: s.entropy(0.3),
    "logsumexp": lambda s: s.logsumexp(4.0),
    "no scale": lambda s: s.logsumexp(0.0),
    "negative scale": lambda s: s.logsumexp(-3.0),
    "twice": lambda s: s.logsumexp(3.0) + s.logsumexp(5.0) + s.mean_std().mean,
}


def asked(engine, shape="wide"):
    inputs, keys, memory, ids = case(shape)
    sims = MemorySimilarity.of(*inputs, *keys, memory, *ids, engine=engine)
    return inputs, sims.memory


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_to_a_memory_has_the_reference_answer_and_gradient(
    name, small_tiles, poisoned
):
    """Missing entries act as if the matrix had no columns for them."""
    from support.reference import Reference

    found = []
    for engine in (*ENGINES, "reference"):
        inputs, keys, memory, ids = case("wide")
        if engine == "reference":
            count, (v, w) = len(memory), inputs
            first = Reference.of(v, memory.texts[:count], (ids[0], memory.ids[:count]))
            second = Reference.of(w, memory.images[:count], (ids[1], memory.ids[:count]))
            anchors = Reference(*first.groups, *second.groups)
        else:
            anchors = MemorySimilarity.of(*inputs, *keys, memory, *ids, engine=engine).memory
        values = QUESTIONS[name](anchors)
        total = (finite(values) * torch.linspace(1, 2, len(values))).sum()
        found.append([values.detach(), *torch.autograd.grad(total, inputs)])
    for other in found[:-1]:
        for a, b in zip(other, found[-1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_detached_memories_serve_parameters_that_learn(engine):
    _, memory = asked(engine)
    results = []
    for anchors in (memory.detach(), asked("dense")[1].detach()):
        a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        value = anchors.logsumexp(a) + anchors.sum(
            softplus, scale=a.reshape(1), shift=-a.reshape(1)
        )
        results.append(
            torch.autograd.grad((finite(value) + finite(anchors.logsumexp(5.0))).sum(), a)
        )
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("engine", ENGINES)
def test_inference_mode_leaves_the_gradient_to_later_answers(engine):
    inputs, s = asked(engine)
    with torch.inference_mode():
        s.mean_std(), s.sum_of_positives(identity)
    for answer in (s.logsumexp(5.0), s.mean_std().std, s.sum_of_positives(identity)):
        assert (
            torch.autograd.grad(finite(answer).sum(), inputs[0], retain_graph=True)[0].abs().sum()
            > 0
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_memory_answers(engine):
    _, s = asked(engine, "empty")
    assert s.hardest_negatives().values.tolist() == [-torch.inf] * 12
    assert s.hardest_negatives().indices.tolist() == [-1] * 12
    assert s.logsumexp(3.0).tolist() == [-torch.inf] * 12 and s.negative_counts.tolist() == [0] * 12


def test_ids_changed_behind_the_back_of_the_version_counter_are_seen():
    v, w = embeddings(6, 6)
    first, second = np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 1, 2, 2, 3])
    ids = torch.from_numpy(first), torch.from_numpy(second)
    loss = itrloss.InfoNCELoss()
    loss(v, w, *ids)
    first[:], second[:] = [5, 4, 3, 2, 1, 0], [5, 5, 5, 2, 2, 0]
    assert torch.equal(loss(v, w, *ids), loss(v, w, *(x.clone() for x in ids)))


def test_positives_close_to_one_cost_the_memorys_moments_no_digits():
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(
        torch.randn(1, 64, generator=generator, dtype=torch.float64)
    )
    apart = torch.randn(40, 64, generator=generator, dtype=torch.float64)
    apart = torch.nn.functional.normalize(apart - (apart @ rows.T) * rows * 0.99)
    found = []
    for engine, dtype in (
        ("dense", torch.float32),
        ("tiled", torch.float32),
        ("dense", torch.float64),
    ):
        memory = CoupledMemory(60, 64, dtype=dtype)
        keys = torch.cat([rows.expand(20, 64), apart]), rows.expand(60, 64)
        memory.enqueue(*(x.to(dtype) for x in keys), torch.arange(60) // 20)
        x, ids = rows.to(dtype), torch.tensor([0])
        found.append(
            MemorySimilarity.of(x, x, x, x, memory, ids, ids, engine=engine)
            .memory.mean_std()
            .std[1]
            .double()
        )
    for std in found[:2]:
        torch.testing.assert_close(std, found[2], rtol=1e-4, atol=0)


@pytest.mark.parametrize("option", ["positive_from", "diversity_from"])
def test_the_function_names_an_option_that_it_does_not_know(option):
    x, ids = torch.randn(3, D), torch.arange(3)
    sims = MemorySimilarity.of(x, x, x, x, CoupledMemory(4, D), ids, ids)
    with pytest.raises(ValueError, match=f"{option}: expected .* or 'batch', got 'queue'"):
        itrloss.functional.memory_diversity_contrastive_loss(sims, **{option: "queue"})


def test_what_is_no_memory_similarity_is_refused():
    x = torch.randn(3, D)
    sim = itrloss.Similarity(x, x)
    for function in (
        itrloss.functional.memory_diversity_contrastive_loss,
        itrloss.functional.unified_training_objective,
    ):
        with pytest.raises(TypeError, match=r"sims: expected a MemorySimilarity .* got Similarity"):
            function(sim)


def test_a_state_that_does_not_fit_changes_nothing():
    memory, other = filled(4, torch.float32, size=5), CoupledMemory(10, D)
    with pytest.raises(RuntimeError, match=r"images: expected shape \(10, 6\), got \(5, 6\)"):
        other.load_state_dict(memory.state_dict())
    assert len(other) == 0 and other.enqueued == 0
    other.enqueue(torch.ones(1, D), torch.ones(1, D), torch.tensor([1]))
    state = {
        k: v
        for k, v in filled(4, torch.float32, size=10).state_dict().items()
        if torch.is_tensor(v)
    }
    other.load_state_dict(state, strict=False)
    assert len(other) == 4


def test_a_memory_that_was_made_on_no_device_is_loaded():
    with torch.device("meta"):
        memory = CoupledMemory(4, 3)
    assert memory.images.is_meta and memory.ids.is_meta
    memory = memory.to_empty(device="cpu")
    source = CoupledMemory(4, 3)
    source.enqueue(torch.ones(2, 3), torch.ones(2, 3))
    memory.load_state_dict(source.state_dict())
    assert len(memory) == 2


def test_ids_of_one_side_alone_are_refused():
    memory = filled(6, torch.float32, torch.arange(6))
    with pytest.raises(
        ValueError, match="image_ids: expected ids for images and texts or for neither"
    ):
        make("uto")(*[KEYS] * 4, memory, None, torch.arange(3))


# ------------------------------------------------------------------------- copies, loads, overflows


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_memory_that_was_loaded_and_copied_unasked_holds_what_was_loaded(way):
    full, warm, empty = (filled(n, torch.float32, size=16) for n in (12, 4, 0))
    warm.load_state_dict(full.state_dict())
    other = way(warm)
    assert len(other) == 12 and int(other.enqueued) == 12
    v, w = (x.float() for x in embeddings(4, 4))
    assert torch.equal(make("mdcl")(v, w, v, w, other), make("mdcl")(v, w, v, w, full))
    emptied = filled(4, torch.float32, size=16)
    emptied.load_state_dict(empty.state_dict())
    assert len(way(emptied)) == 0
    later = way(filled(4, torch.float32, size=16))
    later.load_state_dict(full.state_dict())
    assert len(later) == 12


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_for_bit_after_a_load():
    loss = make("mdcl implicit")

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(memory, v, w):
        value = loss(v, w, v, w, memory)
        memory.enqueue(v, w)
        return value

    torch._dynamo.reset()
    batches = [[x.float() for x in embeddings(4, 4, D, seed=k)] for k in range(12)]
    memory = CoupledMemory(20, D)
    for batch in batches[:8]:  # full by then
        step(memory, *batch)
    state = {k: x.clone() if torch.is_tensor(x) else x for k, x in memory.state_dict().items()}
    through = [step(memory, *batch) for batch in batches[8:]]
    resumed = CoupledMemory(20, D)
    step(resumed, *batches[0])
    resumed.load_state_dict(state)  # between calls of a compiled step
    assert all(
        torch.equal(step(resumed, *batch), wanted)
        for batch, wanted in zip(batches[8:], through, strict=True)
    )


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_key_that_is_not_finite_leaves_no_trace(bad, side):
    """An overflow, after which the gradient scaler skips the step; the pair must be ignored."""
    inputs, keys, _, _ = case("pairs", torch.float32)
    memory, clean = CoupledMemory(12, D), CoupledMemory(11, D)
    v, w = (x.float() for x in embeddings(12, 12, D, 3))
    good = torch.arange(12) != 5
    clean.enqueue(v[good], w[good])
    (v, w)[side][5, 2] = bad
    memory.enqueue(v, w)
    assert len(memory) == 11 and memory.images.isfinite().all() and memory.texts.isfinite().all()
    for name in LOSSES:
        found, wanted = (make(name)(*inputs, *keys, x) for x in (memory, clean))
        torch.testing.assert_close(found, wanted)


def test_a_memory_may_be_made_in_inference_mode():
    with torch.inference_mode():
        memory = CoupledMemory(8, D)
    memory.enqueue(*(x.float() for x in embeddings(4, 4)))
    v, w = (x.float().requires_grad_() for x in embeddings(4, 4, seed=2))
    make("mdcl")(v, w, v, w, memory).backward()
    assert v.grad.abs().sum() > 0 and len(memory) == 4


@pytest.mark.parametrize("option", ["size", "dim"])
def test_a_memory_keeps_its_size(option):
    with pytest.raises(AttributeError, match=f"{option}: cannot be changed"):
        setattr(CoupledMemory(4, 3), option, 9)


def test_a_memory_may_get_no_keys():
    memory = CoupledMemory(9, 6)
    images, texts = sample(5, 6), sample(5, 6, seed=1)
    memory.enqueue(images[:4], texts[:4], range(4))
    memory.enqueue(images[:0], texts[:0], [])
    memory.enqueue(images[4:], texts[4:], [7])
    assert len(memory) == 5


def test_a_memory_takes_arrays():
    images, texts = sample(5, 6), sample(5, 6, seed=1)
    of_arrays, of_tensors = CoupledMemory(9, 6), CoupledMemory(9, 6)
    of_arrays.enqueue(images.numpy(), texts.numpy())  # type: ignore[arg-type]
    of_tensors.enqueue(images, texts)
    assert torch.equal(of_arrays.images, of_tensors.images)
